"""Finds spans in the index, for reads and look-ups; the last used ones are in memory."""

from bisect import bisect_right
from collections.abc import Callable
from typing import Final, Protocol, TypeVar, final

from msgspec import Struct

from martlet.store import Queue
from martlet.store.read.cold import NOTHING_COLD
from martlet_tiered.reading.database import IndexDatabase, Place

__all__ = ["Ask", "FoundSpan", "SpanFinder"]

T = TypeVar("T")

# Queues whose spans are in memory, and spans of each: 250 bytes each.
NEAR_QUEUES: Final = 256
NEAR_SPANS: Final = 32


class Ask(Protocol):
    """Asks the database a question, in a thread.

    Raises:
      Refused: the disk is full or fails, or the index is damaged and will be built again (BUSY).
    """

    async def __call__(self, question: Callable[[IndexDatabase], T]) -> T: ...


class FoundSpan(Struct, frozen=True):
    """The span that has a message; None if no file has it. `next_first` is where the next span begins, if known."""

    place: Place | None
    next_first: int | None


class _Near(Struct, frozen=True):
    """Adjacent spans of a queue, for offsets from `low` on, before `high`."""

    low: int
    high: int
    places: list[Place]


@final
class SpanFinder:
    """Finds spans of queues.

    *is_complete* returns whether everything in the table is indexed, and *check_complete* raises `Refused` otherwise.
    """

    def __init__(self, ask: Ask, is_complete: Callable[[], bool], check_complete: Callable[[], None]) -> None:
        self._ask = ask
        self._is_complete = is_complete
        self._check_complete = check_complete
        self._near: dict[tuple[str, int], _Near] = {}
        self._changes = 0

    def forget(self) -> None:
        """Forget what is in memory: the index has changed."""
        self._near.clear()
        self._changes += 1

    async def find(self, queue: Queue, offset: int) -> FoundSpan:
        """Return the span that has message *offset* of *queue*.

        Raises:
          Refused: the index is not complete yet, or the disk fails (BUSY).
        """
        key = queue.topic, queue.queue_id
        near = self._near.pop(key, None)
        if near is not None and near.low <= offset < near.high:
            self._near[key] = near
        else:
            changes = self._changes
            near = await self._read_near(queue, offset)
            if changes == self._changes:
                self._near[key] = near
            if len(self._near) > NEAR_QUEUES:
                del self._near[next(iter(self._near))]
        at = bisect_right(near.places, offset, key=lambda place: place.span.first)
        place = near.places[at - 1] if at and offset <= near.places[at - 1].span.last else None
        if place is None:
            self._check_complete()
        has_next = at < len(near.places) and self._is_complete()
        return FoundSpan(place, near.places[at].span.first if has_next else None)

    async def _read_near(self, queue: Queue, offset: int) -> _Near:
        found = await self._ask(lambda database: database.places(queue.topic, queue.queue_id, offset, NEAR_SPANS))
        low = min(offset, found[0].span.first) if found else offset
        return _Near(low, found[-1].span.first if len(found) == NEAR_SPANS else NOTHING_COLD, found)

    async def find_by_time(self, queue: Queue, timestamp_ms: int, offset: int) -> Place | None:
        """Return the first span of *queue* that may have a message from *offset* on, stored at or after *timestamp_ms*.

        Raises:
          Refused: as `find`.
        """
        topic, queue_id = queue.topic, queue.queue_id
        return await self._first(lambda database: database.places_by_time(topic, queue_id, timestamp_ms, offset))

    async def find_by_position(self, queue: Queue, position: int, offset: int) -> Place | None:
        """Return the first span of *queue* with a message from *offset* on, at or after log position *position*.

        Raises:
          Refused: as `find`.
        """
        topic, queue_id = queue.topic, queue.queue_id
        return await self._first(lambda database: database.places_by_position(topic, queue_id, position, offset))

    async def end_of(self, queue: Queue) -> int:
        """Return the offset after the last message of *queue* that the tier has."""
        return await self._ask(lambda database: database.end_of(queue.topic, queue.queue_id))

    async def files_at(self, position: int) -> list[tuple[str, int]]:
        """Return the path and the size of each file that may have a message at log position *position*.

        Raises:
          Refused: as `find`.
        """
        self._check_complete()
        return await self._ask(lambda database: database.files_at(position))

    async def has_row(self, topic: str, queue_id: int, path: str, row: int) -> bool:
        """Return whether *row* of file *path* is a message of this queue, and not of an earlier one of the name."""
        return bool(await self._ask(lambda database: database.places_of_row(topic, queue_id, path, row)))

    async def places_of_topic(
        self, topic: str, begin_ms: int, end_ms: int, end_position: int, count: int
    ) -> list[Place]:
        """Return *count* spans of *topic* at most, newest first, that may have messages with these times and positions.

        Raises:
          Refused: as `find`.
        """
        self._check_complete()
        return await self._ask(lambda database: database.places_of_topic(topic, begin_ms, end_ms, end_position, count))

    async def _first(self, question: Callable[[IndexDatabase], list[Place]]) -> Place | None:
        self._check_complete()
        return next(iter(await self._ask(question)), None)
