"""The queues that a query reads, and their first and last offsets; runs on the driver."""

import re
from collections.abc import Collection, Iterable, Mapping
from time import monotonic
from typing import Any, Final, Protocol, final

from martlet_remoting.wire.packets import MessageQueue
from martlet_remoting.wire.routes import TopicRoute
from martlet_spark.cluster import Bounds, Cluster, UnknownTopic
from martlet_spark.connection import attempts
from martlet_spark.errors import OptionError, ReadError
from martlet_spark.options import SELECTION, TIER, Options, named, parse
from martlet_spark.read.offsets import EARLIEST, LATEST, Offsets, find_queues, queue_name

__all__ = ["QueryBound", "QueueBounds", "Subscribed", "check_selection", "query_bounds"]

# Interval of looking for new topics and queues.
ROUTES_S: Final = 5.0


class QueueBounds(Protocol):
    """The topics and queues that a query selects, wherever it reads them."""

    def bounds(self) -> dict[MessageQueue, Bounds]:
        """Return the bounds of all selected queues."""

    def offsets_at(self, times_ms: Mapping[MessageQueue, int]) -> Offsets:
        """Return, for each queue, the offset of the first message that was stored at the given time or later."""


def check_selection(options: Options) -> None:
    """Fail unless *options* select topics in one way.

    Raises:
      OptionError: they do not.
    """
    given = [name for name in ("subscribe", "subscribePattern", "assign") if options[name]]
    if len(given) != 1:
        said = f"{' and '.join(given)} are given" if given else "none is given"
        raise OptionError(f"exactly one of the options subscribe, subscribePattern and assign is needed; {said}")


@final
class Subscribed:
    """The topics and queues that the options subscribe, subscribePattern or assign select."""

    def __init__(self, cluster: Cluster, options: Options) -> None:
        self.cluster = cluster
        self._subscribe: tuple[str, ...] = options["subscribe"]
        self._pattern: str = options["subscribePattern"]
        self._assign: Mapping[str, tuple[str, ...]] | None = options["assign"]
        self._routes: dict[str, TopicRoute] = {}
        self._routes_until = 0.0
        check_selection(options)

    @classmethod
    def of(cls, source: Mapping[str, str]) -> "Subscribed":
        """Return the selection of *source*, the options of a batch or a stream; its other options do not matter.

        Raises:
          OptionError: an option is invalid.
        """
        known = (*SELECTION, *TIER)
        options = parse(named(source, known), known)
        return cls(Cluster(options["endpoints"] or (), options.security, options["timeoutMs"] / 1000), options)

    def routes(self, known: Collection[MessageQueue] = ()) -> Mapping[str, TopicRoute]:
        """Return the topics' routes, up to some seconds old; topics of *known* that are gone are left out.

        Raises:
          UnknownTopic: a topic that is named does not exist.
        """
        if monotonic() >= self._routes_until:
            self._routes = self._resolve({queue.topic for queue in known})
            self._routes_until = monotonic() + ROUTES_S
        return self._routes

    @property
    def is_old(self) -> bool:
        """Whether the routes are so old that there may be new topics and queues."""
        return monotonic() >= self._routes_until

    def selects(self, queue: MessageQueue) -> bool:
        """Whether the options select *queue*, if it exists."""
        if self._assign is not None:
            return any(find_queues(queue.topic, name, [queue]) for name in self._assign.get(queue.topic, ()))
        return self.selects_topic(queue.topic)

    def selects_topic(self, topic: str) -> bool:
        """Whether the options select queues of *topic*."""
        if self._pattern:
            return re.fullmatch(self._pattern, topic) is not None
        return topic in (self._subscribe or self._assign or ())

    def forget_routes(self) -> None:
        """Discard the routes; the next use asks for new ones."""
        self._routes_until = 0.0

    def _resolve(self, known_topics: Collection[str]) -> dict[str, TopicRoute]:
        """Return the routes; wait for brokers that register with name servers that have just started."""
        names = [*(self._subscribe or self._assign or ())]
        routes: dict[str, TopicRoute] = {}
        missing_names: list[str] = []
        for _ in attempts(self.cluster.timeout_s):
            routes = self.cluster.routes(self.cluster.topics(self._pattern) if self._pattern else names)
            missing_names = [name for name in names if name not in routes and name not in known_topics]
            if (routes and not missing_names) or not self.cluster.knows_no_topic():
                break
        return routes | {name: self.cluster.route(name) for name in missing_names}

    def bounds(self, known: Collection[MessageQueue] = ()) -> dict[MessageQueue, Bounds]:
        """Return the bounds of all selected queues; queues of *known* that are gone are left out.

        Raises:
          ReadError: a broker does not answer.
          OptionError: a queue that is assigned does not exist.
        """
        found: dict[MessageQueue, Bounds] = {}
        routes = self.routes(known)
        by_topic = self.cluster.bounds(routes)
        for topic in routes.keys() - by_topic.keys():
            self.forget_routes()
            if not self._pattern and all(queue.topic != topic for queue in known):
                raise UnknownTopic(f"topic {topic!r} is being created or deleted; start the query again")
        for topic, bounds in by_topic.items():
            if not bounds and not self._pattern and all(queue.topic != topic for queue in known):
                raise ReadError(f"topic {topic!r} has no queue that may be read; its perm lacks 4, open it on a broker")
            found.update(bounds if self._assign is None else self._assigned(topic, bounds, known))
        return found

    def _assigned(
        self, topic: str, bounds: Mapping[MessageQueue, Bounds], known: Collection[MessageQueue]
    ) -> dict[MessageQueue, Bounds]:
        assert self._assign is not None
        found: dict[MessageQueue, Bounds] = {}
        for name in self._assign[topic]:
            if find_queues(topic, name, bounds) or not find_queues(topic, name, known):
                found.update((queue, bounds[queue]) for queue in _find_named(topic, name, bounds, "assign"))
        return found

    def offsets_at(self, times_ms: Mapping[MessageQueue, int]) -> Offsets:
        """Return, for each queue, the offset of the first message that was stored at the given time or later."""
        found: Offsets = {}
        for topic, route in self.routes().items():
            own = {queue: ms for queue, ms in times_ms.items() if queue.topic == topic}
            found.update(self.cluster.offsets_at(own, route))
        return found


def _find_named(topic: str, name: str, queues: Iterable[MessageQueue], option: str) -> list[MessageQueue]:
    named_queues = find_queues(topic, name, queues)
    if not named_queues:
        topics = sorted({queue.topic for queue in queues})
        if topic not in topics:
            raise OptionError(f"option {option} names topic {topic!r}; the query reads {', '.join(topics) or 'none'}")
        ids = ", ".join(str(queue.queue_id) for queue in queues if queue.topic == topic)
        raise OptionError(
            f"option {option} names queue {name!r}, which topic {topic!r} does not have; its queues are {ids}"
        )
    return named_queues


@final
class QueryBound:
    """The offsets at which a query begins (*side* "starting") or ends ("ending"), from the options."""

    def __init__(self, subscribed: QueueBounds, options: Options, side: str, default: str) -> None:
        self._subscribed = subscribed
        self._side = side
        self._offsets: Any = options[f"{side}Offsets"]
        self._time: int | None = options[f"{side}Timestamp"]
        self._times: Mapping[str, Mapping[str, int]] | None = options[f"{side}OffsetsByTimestamp"]
        self._strategy: str = options["startingOffsetsByTimestampStrategy"] if side == "starting" else "latest"
        names = f"{side}Offsets", f"{side}Timestamp", f"{side}OffsetsByTimestamp"
        given = [
            name
            for name, value in zip(names, (self._offsets, self._time, self._times), strict=True)
            if value is not None
        ]
        if len(given) > 1:
            raise OptionError(f"options {' and '.join(given)} contradict each other; give one of them")
        if self._offsets is None:
            self._offsets = default

    def find(self, bounds: Mapping[MessageQueue, Bounds]) -> Offsets:
        """Return the offset in each queue of *bounds*.

        Raises:
          OptionError: a queue has no offset in the options, or one outside of its bounds.
        """
        if self._time is not None:
            return self._at(dict.fromkeys(bounds, self._time), bounds)
        if self._times is not None:
            return self._at(self._each(self._times, bounds, f"{self._side}OffsetsByTimestamp"), bounds)
        if isinstance(self._offsets, str):
            return {queue: first if self._offsets == "earliest" else end for queue, (first, end) in bounds.items()}
        given = self._each(self._offsets, bounds, f"{self._side}Offsets")
        return {queue: self._offset(queue, given[queue], bounds[queue]) for queue in bounds}

    def check_before(self, ending: "QueryBound", queue: MessageQueue, start: int, end: int) -> None:
        """Fail if the options themselves set a *start* after the *end* of a queue.

        Bounds from a time or from retention may leave nothing to read, which is no error.
        """
        if isinstance(ending._offsets, Mapping) and (isinstance(self._offsets, Mapping) or self._offsets == "latest"):
            text = f"option startingOffsets has {start} for {queue_name(queue)} of topic {queue.topic!r}"
            raise OptionError(f"{text}, and endingOffsets {end} before it; begin there or earlier")

    def _each(
        self, table: Mapping[str, Mapping[str, int]], bounds: Mapping[MessageQueue, Bounds], option: str
    ) -> dict[MessageQueue, int]:
        """Return the number of each queue in *table*; *table* must name all queues, as in Spark's Kafka source."""
        found: dict[MessageQueue, int] = {}
        for topic, numbers in table.items():
            for name, number in numbers.items():
                found.update(dict.fromkeys(_find_named(topic, name, bounds, option), number))
        missing = [queue for queue in bounds if queue not in found]
        if missing:
            queue = missing[0]
            text = f"option {option} lacks queue {queue.queue_id} of topic {queue.topic!r} on {queue.broker_name!r}"
            raise OptionError(f"{text}; name every queue, -2 is earliest and -1 latest")
        return found

    def _offset(self, queue: MessageQueue, offset: int, bounds: Bounds) -> int:
        first, end = bounds
        if offset == EARLIEST:
            return first
        if offset == LATEST:
            return end
        if not 0 <= offset <= end:
            text = f"option {self._side}Offsets has offset {offset} of queue {queue.queue_id} of topic {queue.topic!r}"
            raise OptionError(f"{text}; the queue has messages {first} to {end - 1}")
        return offset  # the read detects messages that are removed before

    def _at(self, times_ms: Mapping[MessageQueue, int], bounds: Mapping[MessageQueue, Bounds]) -> Offsets:
        found = self._subscribed.offsets_at(times_ms)
        for queue, offset in found.items():
            first, end = bounds[queue]
            found[queue] = min(max(offset, first), end)
            if offset >= end and self._strategy == "error":
                text = (
                    f"queue {queue_name(queue)} of topic {queue.topic!r} has no message stored at {times_ms[queue]} ms"
                )
                text += " or later"
                raise OptionError(f"{text}; set startingOffsetsByTimestampStrategy to latest to begin at its end")
        return found


def query_bounds(subscribed: QueueBounds, options: Options) -> dict[MessageQueue, Bounds]:
    """Return the first offset and the end in each queue of a batch with *options*, sorted by queue.

    Raises:
      OptionError: the options do not fit each other or the queues.
      ReadError: a broker does not answer.
    """
    starting = QueryBound(subscribed, options, "starting", "earliest")
    ending = QueryBound(subscribed, options, "ending", "latest")
    bounds = subscribed.bounds()
    starts, ends = starting.find(bounds), ending.find(bounds)
    found = {queue: (starts[queue], ends[queue]) for queue in sorted(bounds)}
    for queue, (start, end) in found.items():
        if start > end:
            starting.check_before(ending, queue, start, end)
    return found
