"""Messages for the log, and the locations where they were stored."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Final, TypeAlias, final

from martlet.errors import Refused
from martlet.message import Placed
from martlet.records.layout import Buffer
from martlet.store.queues.queues import Queue

__all__ = ["AppendItem", "AppendResult", "body_of", "properties_of", "queue_of", "sys_flag_of"]

# A message: its queue, body, properties and tag code (`Writer.code_of`), flag, sysFlag, born ms and born host,
# reconsume times, and the position of its prepared message. A tuple, because protocols make one for each message.
AppendItem: TypeAlias = tuple[Queue, Buffer, bytes, int, int, int, int, bytes, int, int]

queue_of: Final[Callable[[AppendItem], Queue]] = itemgetter(0)
body_of: Final[Callable[[AppendItem], Buffer]] = itemgetter(1)
properties_of: Final[Callable[[AppendItem], bytes]] = itemgetter(2)
sys_flag_of: Final[Callable[[AppendItem], int]] = itemgetter(5)


@final
class AppendResult:
    """Locations of messages that were appended together: log positions, ends of records, and queue offsets, in order.

    A refused message has -1 for all three, and its reason in ``refused`` by its index. ``end`` is the log position
    after the last record. ``rolled`` tells that a segment may have ended after one of the records; the records in that
    segment are committed.
    """

    __slots__ = ("_items", "end", "ends", "offsets", "positions", "refused", "rolled", "store_ms")

    def __init__(self, items: Sequence[AppendItem | None]) -> None:
        self._items = items
        self.positions: list[int] = []
        self.ends: list[int] = []
        self.offsets: list[int] = []
        self.refused: dict[int, Refused] = {}
        self.end = 0
        self.store_ms = 0
        self.rolled = False

    def part(self, begin: int, end: int) -> "AppendResult":
        """Return the result of messages *begin* to *end*, without *end*."""
        found = AppendResult(self._items[begin:end])
        found.positions, found.offsets = self.positions[begin:end], self.offsets[begin:end]
        found.ends = self.ends[begin:end]
        found.refused = {index - begin: error for index, error in self.refused.items() if begin <= index < end}
        found.end, found.store_ms, found.rolled = max(found.ends, default=0), self.store_ms, self.rolled
        return found

    def forget_last(self, count: int) -> None:
        """Remove the last *count* messages, which the caller added."""
        for values in self.positions, self.ends, self.offsets:
            del values[-count:]
        self._items = self._items[:-count]

    def add_refused(self, refused: Mapping[int, Refused]) -> None:
        """Add messages that were refused before they reached the store, by their index among all messages."""
        items = list(self._items)
        for index in sorted(refused):
            items.insert(index, None)
            for values in self.positions, self.ends, self.offsets:
                values.insert(index, -1)
        stored_indexes = [index for index in range(len(self.positions)) if index not in refused]
        self.refused = {**{stored_indexes[index]: error for index, error in self.refused.items()}, **refused}
        self._items = items

    def placed(self, index: int) -> Placed:
        """Return the location of message number *index*.

        Raises:
          Refused: it was not stored.
        """
        item = self._items[index]
        if item is None or index in self.refused:
            raise self.refused[index]
        return Placed(
            queue_of(item).queue_id, self.offsets[index], self.positions[index], self.ends[index], self.store_ms
        )

    def outcomes(self) -> list[Placed | Refused]:
        """Return for each message its location, or the reason why it was refused."""
        refusals = self.refused
        return [refusals.get(index) or self.placed(index) for index in range(len(self.positions))]
