"""The queues that a query reads if it reads tables of the cold tier alone, and their first and last offsets."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.cluster import DEAD_LETTERS, Bounds
from martlet_spark.errors import OptionError, ReadError
from martlet_spark.options import Options
from martlet_spark.read.cold_rows import first_stored_at
from martlet_spark.read.history import REQUESTS_MAX, History, TopicSet, Window, read_history
from martlet_spark.read.offsets import Offsets, find_queues
from martlet_spark.read.tier_place import TierPlace, plain_errors
from martlet_spark.read.topics import check_selection

__all__ = ["ColdTopics"]


@final
class ColdTopics:
    """The topics and queues in the tables at *places* that the options subscribe, subscribePattern or assign select.

    Messages outside of *window* may lack. `histories` has what each table has. *known* are earlier ones, of the same
    options, from which tables are taken that have not changed.

    Raises:
      ReadError: a table cannot be read.
    """

    def __init__(
        self, places: Sequence[TierPlace], options: Options, window: Window, known: "ColdTopics | None" = None
    ) -> None:
        check_selection(options)
        self._assign: Mapping[str, tuple[str, ...]] | None = options["assign"]
        self._names: Sequence[str] = options["subscribe"] or tuple(self._assign or ())
        topics = TopicSet(self._names, options["subscribePattern"])
        with plain_errors():
            before: Sequence[History | None] = known.histories if known is not None else [None] * len(places)
            self.histories: Sequence[History] = [
                read_history(place, topics, window, history) for place, history in zip(places, before, strict=True)
            ]
            if self._missing() and self.is_pruned:
                self.histories = [read_history(place, topics) for place in places]

    @property
    def is_pruned(self) -> bool:
        """Whether files were left out because of their time."""
        return any(history.is_pruned for history in self.histories)

    def bounds(self) -> dict[MessageQueue, Bounds]:
        """Return the bounds of all selected queues.

        Raises:
          ReadError: the tables have no message of a topic that is named.
          OptionError: a queue that is assigned has no message, or two tables are of one broker.
        """
        brokers = [history.broker for history in self.histories]
        if len(set(brokers)) < len(brokers):
            raise OptionError("option tierUrl names two tables of one broker; name each table once")
        found = {queue: each for history in self.histories for queue, each in history.bounds().items()}
        for name in self._missing():
            urls = ", ".join(history.place.url for history in self.histories)
            group = name.removeprefix(DEAD_LETTERS)
            what = f"topic {name!r}" if group == name else f"{name!r}, the dead letters of group {group!r}"
            raise ReadError(f"the cold tier at {urls} has no message of {what}; see 'martlet tiered ls --topics'")
        return found if self._assign is None else self._assigned(found)

    def _missing(self) -> list[str]:
        """Return the named topics of which the tables have no message."""
        found = {queue.topic for history in self.histories for queue in history.bounds()}
        return [name for name in self._names if name not in found]

    def _assigned(self, bounds: Mapping[MessageQueue, Bounds]) -> dict[MessageQueue, Bounds]:
        found: dict[MessageQueue, Bounds] = {}
        assert self._assign is not None
        for topic, names in self._assign.items():
            for name in names:
                queues = find_queues(topic, name, bounds)
                if not queues:
                    raise OptionError(f"option assign names queue {name!r} of {topic!r}, which has no message there")
                found.update((queue, bounds[queue]) for queue in queues)
        return found

    def offsets_at(self, times_ms: Mapping[MessageQueue, int]) -> Offsets:
        """Return, for each queue, the offset of the first message that was stored at the given time or later.

        Raises:
          ReadError: a table cannot be read.
        """
        asked = [
            (history, queue, ms)
            for history in self.histories
            for queue, ms in times_ms.items()
            if queue.broker_name == history.broker
        ]
        with plain_errors(), ThreadPoolExecutor(REQUESTS_MAX) as threads:
            offsets = list(threads.map(lambda each: _offset_at(*each), asked))
        return {queue: offset for (_, queue, _), offset in zip(asked, offsets, strict=True)}


def _offset_at(history: History, queue: MessageQueue, ms: int) -> int:
    runs = history.times(queue)
    for first, end, greatest_ms in runs:
        if greatest_ms < ms:
            continue
        for each in history.ranges([(queue, (first, end))]):
            offset = first_stored_at(each, ms)
            if offset is not None:
                return offset
    return runs[-1][1] if runs else 0
