"""Which messages of a query come from the cold tier's tables, and which from the brokers.

A query decides that once, when it is planned. For each queue, the messages from the start on that the table has without
a gap are read from the table, at the version that is the newest then; from the first offset that it lacks on, the
broker is read. So each offset is read once, whatever is uploaded meanwhile. What retention then removes from the
broker's log is in the tier, and the broker itself reads it from there.

A table may lag behind the deletion of a topic, which the broker knows at once. So one message of each topic is compared
with the broker's.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final, TypeAlias, final

from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.cluster import Bounds, Cluster
from martlet_spark.errors import OptionError, ReadError
from martlet_spark.options import SELECTION, TIER, Options, named, parse
from martlet_spark.read.cold_rows import last_identity
from martlet_spark.read.cold_topics import ColdTopics
from martlet_spark.read.history import REQUESTS_MAX, History, TopicSet, Window, lose_doubtful, read_history
from martlet_spark.read.identity import identities
from martlet_spark.read.losses import lose
from martlet_spark.read.offsets import words
from martlet_spark.read.planner import Range, gaps
from martlet_spark.read.tier_place import TierPlace, plain_errors
from martlet_spark.read.topics import Subscribed, query_bounds
from martlet_spark.read.watching import MessageSizes

__all__ = ["StreamSeam", "alive_at", "bounds_of", "cold_ranges", "places_of", "plan_batch"]

log = logging.getLogger("martlet.spark")

AllBounds: TypeAlias = Mapping[MessageQueue, Bounds]

NAMING: Final = ("assign", "startingOffsets", "startingOffsetsByTimestamp", "endingOffsets", "endingOffsetsByTimestamp")


def plan_batch(cluster: Cluster, options: Options, *, with_sizes: bool) -> list[Range]:
    """Return what a batch with *options* reads: the rows of tables first, then ranges of brokers' queues.

    *with_sizes* asks the brokers for the size of their messages.

    Raises:
      OptionError: the options do not fit each other or the queues.
      ReadError: a broker or a table cannot be read.
      DataLost: a table lacks messages, and may not.
    """
    places = places_of(options)
    if options["tier"] == "cold":
        return _plan_cold(places, options)
    subscribed = Subscribed(cluster, options)
    bounds = query_bounds(subscribed, options)
    cold: list[Range] = []
    left: AllBounds = bounds
    if places and not options["sql"]:
        cold, left = _divide(subscribed, places, bounds, options)
    sizes = MessageSizes(cluster).of(subscribed.routes(), left) if with_sizes else {}
    hot = [Range(queue, start, end) for queue, (start, end) in left.items() if start < end]
    return [*cold, *(replace(each, message_bytes=sizes[each.queue.topic]) if with_sizes else each for each in hot)]


def places_of(options: Options) -> tuple[TierPlace, ...]:
    """Return the tables that a query with *options* reads.

    Raises:
      OptionError: options do not fit each other.
    """
    if options["tier"] == "hot":
        return ()
    if options["tier"] == "cold" and not options["tierUrl"]:
        raise OptionError("option tier is cold, and tierUrl is missing; give the tiered.url of the broker")
    if options["tier"] == "cold" and options.get("sql"):
        raise OptionError("option sql needs brokers, and tier is cold; filter after load(), or leave tier out")
    names = ("tierEndpoint", "tierRegion", "tierCredentialsFile")
    return TierPlace.of(options["tierUrl"], *(options[name] for name in names))


def bounds_of(source: Mapping[str, str]) -> dict[MessageQueue, Bounds]:
    """Return the bounds of the queues that *source*, the options of a batch or a stream, selects.

    Raises:
      OptionError: an option is invalid.
      ReadError: a table cannot be read, or a broker does not answer.
    """
    known = (*SELECTION, *TIER)
    options = parse(named(source, known), known)
    if options["tier"] == "cold":
        return ColdTopics(places_of(options), options, Window()).bounds()
    return Subscribed.of(source).bounds()


def _window(options: Options) -> Window:
    return Window(options["startingTimestamp"], options["endingTimestamp"])


def _plan_cold(places: Sequence[TierPlace], options: Options) -> list[Range]:
    # Options that name queues need the bounds of all, whenever their messages were stored.
    is_named = any(isinstance(options[name], Mapping) for name in NAMING)
    topics = ColdTopics(places, options, Window() if is_named else _window(options))
    bounds = query_bounds(topics, options)
    if topics.is_pruned and any(True for _ in gaps(bounds.items(), _ranges(topics, bounds))):
        # Clocks may have gone back, and other programs may have put messages of very different times into one file.
        topics = ColdTopics(places, options, Window())
        bounds = query_bounds(topics, options)
    return cold_ranges(topics, bounds, fails=options["failOnDataLoss"])


def cold_ranges(topics: ColdTopics, bounds: AllBounds, *, fails: bool) -> list[Range]:
    """Return the rows of the tables of *topics* with all messages in *bounds*.

    Raises:
      DataLost: some are missing, and the query *fails* on loss.
    """
    for history in topics.histories:
        lose_doubtful(history, fails=fails)
    ranges = _ranges(topics, bounds)
    faults = [fault for history in topics.histories for fault in history.faults]
    because = f" ({'; '.join(faults[:3])})" if faults else ""
    for gap in gaps(bounds.items(), ranges):
        text = f"the cold tier lacks messages {gap.start} to {gap.end - 1} of {words(gap.queue)}"
        lose(f"{text}{because}", fails=fails)
    return ranges


def _ranges(topics: ColdTopics, bounds: AllBounds) -> list[Range]:
    return [each for history in topics.histories for each in history.ranges(_of_broker(bounds, history.broker).items())]


def _divide(
    subscribed: Subscribed, places: Sequence[TierPlace], bounds: AllBounds, options: Options
) -> tuple[list[Range], AllBounds]:
    """Return the rows of tables to read, and what is left to read from the brokers.

    Raises:
      ReadError: a table cannot be read, or is of a broker that is away.
    """
    window, alive = _window(options), bounds
    if isinstance(options["startingOffsets"], Mapping):  # others are within the brokers' bounds
        alive = alive_at(subscribed.bounds(), bounds)
    topics = TopicSet({queue.topic for queue in bounds})
    histories: list[History] = []
    for place in places:
        with plain_errors():
            history = read_history(place, topics, window)
            own = _of_broker(alive, history.broker)
            if history.is_pruned and any(
                history.seam(queue, *each) == each[0] < each[1] for queue, each in own.items()
            ):
                # Clocks may have gone back: the time of an offset says nothing for sure about the next ones.
                history = read_history(place, topics)
        histories.append(history)
    cold, left = divided(subscribed, histories, alive)
    return cold, {**bounds, **left}


def alive_at(now: AllBounds, bounds: AllBounds) -> AllBounds:
    """Return those of *bounds* that begin within the brokers' bounds *now*.

    The messages of the others have expired or were removed, but may still be in a table: the brokers tell.
    """
    return {queue: each for queue, each in bounds.items() if queue in now and now[queue][0] <= each[0]}


def divided(subscribed: Subscribed, histories: Sequence[History], bounds: AllBounds) -> tuple[list[Range], AllBounds]:
    """Return the rows of the tables *histories* to read of *bounds*, and what is left to read from the brokers.

    Raises:
      ReadError: a table cannot be read, or is of a broker that is away.
    """
    left = dict(bounds)
    cold: list[Range] = []
    for history in histories:
        _check_known(subscribed, history)
        own = _of_broker(bounds, history.broker)
        seams = {queue: history.seam(queue, start, end) for queue, (start, end) in own.items() if start < end}
        wanted = {queue: (own[queue][0], seam) for queue, seam in seams.items() if seam > own[queue][0]}
        with plain_errors():
            ranges = _verified(subscribed, history.ranges(wanted.items()))
        cold += ranges
        for each in ranges:
            left[each.queue] = each.end, bounds[each.queue][1]
    return cold, left


def _check_known(subscribed: Subscribed, history: History) -> None:
    """Fail if the table is of a broker that the name servers do not know: its new messages would be missing."""
    if history.bounds() and history.broker not in subscribed.cluster.masters():
        text = f"the table at {history.place.url!r} is of broker {history.broker!r}, which the name servers do not know"
        raise ReadError(f"{text}; start it, or set the option tier to cold to read the table alone")


def _verified(subscribed: Subscribed, ranges: Sequence[Range]) -> list[Range]:
    """Return *ranges* without those of topics that were created again, of which the table has other messages.

    Those of topics whose messages at the broker are unknown are left out as well.
    """
    last: dict[tuple[str, str], Range] = {}
    for each in ranges:
        name = each.queue.topic, each.queue.broker_name
        if name not in last or each.end > last[name].end:
            last[name] = each
    offsets = {each.queue: each.end - 1 for each in last.values()}
    there = identities(subscribed.cluster, subscribed.routes(), offsets)
    with ThreadPoolExecutor(REQUESTS_MAX) as threads:
        ours = dict(zip(offsets, threads.map(last_identity, last.values()), strict=True))
    wrong = {(queue.topic, queue.broker_name) for queue in offsets if there.get(queue) != ours[queue]}
    unknown = {(queue.topic, queue.broker_name) for queue in offsets if queue not in there}
    for topic, broker in sorted(wrong):
        why = "it did not say which it has" if (topic, broker) in unknown else "the table has other messages of it"
        log.info("topic %r of broker %r is read from the broker: %s", topic, broker, why)
    return [each for each in ranges if (each.queue.topic, each.queue.broker_name) not in wrong]


def _of_broker(bounds: AllBounds, broker: str) -> dict[MessageQueue, Bounds]:
    return {queue: each for queue, each in bounds.items() if queue.broker_name == broker}


@final
class StreamSeam:
    """The tables from which a stream with *options* reads what it is behind; on its driver.

    They are read again when a batch needs more than they have. A table is not read any more once the stream has read
    all that it has.
    """

    def __init__(self, options: Options) -> None:
        self._places = () if options["sql"] else places_of(options)
        self._known: Sequence[History | None] = [None] * len(self._places)
        self._topics: frozenset[str] = frozenset()

    def divide(
        self, subscribed: Subscribed, bounds: AllBounds, starts: Mapping[MessageQueue, int]
    ) -> tuple[list[Range], AllBounds]:
        """Return the rows of tables to read of *bounds*, and what is left to read from the brokers.

        *starts* are the offsets of all queues up to which the stream has read.

        Raises:
          ReadError: a table cannot be read, or is of a broker that is away.
        """
        if not self._places or not bounds:
            return [], bounds
        names = frozenset(queue.topic for queue in bounds)
        known = [history for history in self._known if history is not None]
        if known and names <= self._topics and _have_all(known, bounds):
            return divided(subscribed, known, bounds)
        before = self._known if names <= self._topics else [None] * len(self._places)
        self._topics |= names
        with plain_errors():
            histories = [
                read_history(place, TopicSet(self._topics), None, history)
                for place, history in zip(self._places, before, strict=True)
            ]
        # A batch may have no rows of a table only because the broker did not tell the identity of a message.
        needed = [
            (place, history)
            for place, history in zip(self._places, histories, strict=True)
            if any(starts.get(queue, end) < end for queue, (_, end) in history.bounds().items())
        ]
        self._places, self._known = tuple(place for place, _ in needed), [history for _, history in needed]
        return divided(subscribed, histories, bounds)


def _have_all(histories: Sequence[History], bounds: AllBounds) -> bool:
    return not any(
        history.seam(queue, *each) < each[1]
        for history in histories
        for queue, each in _of_broker(bounds, history.broker).items()
    )
