"""The pending timers as a projection of the log.

A record in RocketMQ's timer topic adds a timer. A note in the plugin's journal removes timers: those of a delivery, in
the atomic group of the delivered messages; a recalled one; and those whose records were appended again before retention
removes them, in the atomic group of the new records. So a timer is pending exactly as long as nothing in the log says
otherwise, whatever the clock did.
"""

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, final

import msgpack  # type: ignore[import-untyped]

from martlet.errors import StoreError
from martlet.records.layout import RecordView
from martlet.state import NOTHING, pack_rows, unpack_rows
from martlet.state.journal import read_notes
from martlet.steps import Pace, Steps, WaitingSteps
from martlet.tables.topics import TIMER_TOPIC

from .pending import Column, Frozen, Pending
from .records import key_of, read_timer
from .schedule import Schedule, Timer

__all__ = ["TimerState", "gone"]

FORMAT: Final = 1
GONE: Final = 1
RESTORED_AT_ONCE: Final = 4096


def gone(timers: Iterable[Timer]) -> bytes:
    """Return the note that *timers* are no longer pending."""
    numbers = [GONE]
    due_before = position_before = 0
    for due_ms, position in timers:
        numbers += (due_ms - due_before, position - position_before)
        due_before, position_before = due_ms, position
    note: bytes = msgpack.packb(numbers)
    return note


def _read_gone(note: bytes) -> Iterator[Timer]:
    kind, *numbers = msgpack.unpackb(note)
    if kind != GONE:
        raise StoreError(f"journal of timers has a note of the unknown kind {kind!r}; a newer version wrote it")
    due_ms = position = 0
    for due_more, position_more in zip(numbers[::2], numbers[1::2], strict=True):
        due_ms, position = due_ms + due_more, position + position_more
        yield due_ms, position


@final
class TimerState:
    """The projection (martlet.state.Projection).

    Args:
      journal_topic: the topic of the plugin's journal.
      granule_bytes: the size of a segment of the log.
      roll: appends again the given timers; for `roll`.
    """

    def __init__(self, journal_topic: str, granule_bytes: int) -> None:
        self.name = "timers"
        self.topics = frozenset((TIMER_TOPIC, journal_topic))
        self._granule_bytes = granule_bytes
        self.pending = Pending(granule_bytes)
        self.schedule = Schedule(self.pending)
        # Appends the records of timers again; set by `TimerDelivery`.
        self.append_again: Callable[[Iterable[list[Timer]]], WaitingSteps[None]] | None = None
        # Called when timers were added or removed.
        self.changed: Callable[[], None] | None = None
        # The offset in the timer topic after the newest applied record; set by the plugin after the replay.
        self.next_offset = 0

    def held(self) -> int:
        return len(self.pending)

    def apply(self, records: Sequence[RecordView]) -> None:
        pending, schedule = self.pending, self.schedule
        newest: RecordView | None = None
        for record in records:
            if record.topic != TIMER_TOPIC:
                for note in read_notes(record.body):
                    for due_ms, position in _read_gone(note):
                        pending.remove(due_ms, position)
                        schedule.removed(position)
                continue
            newest = record
            timer = read_timer(record)
            if timer is not None:
                due_ms, topic, unique = timer
                pending.add(due_ms, record.position, key_of(topic, unique))
                schedule.added(due_ms, record.position)
        if newest is not None:
            self.next_offset = newest.queue_offset + 1
        if self.changed is not None:
            self.changed()

    def freeze(self) -> Steps[Sequence[bytes]]:
        return pack_rows(FORMAT, _rows(self.pending.freeze()))

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        self._begin()
        pace = Pace(RESTORED_AT_ONCE)
        for hour, dues, positions, keys in unpack_rows(FORMAT, data):
            columns = hour, _column("I", dues), _column("q", positions), _column("I", keys)
            self.pending.restore(columns, first_position)
            if pace.is_over(16 + len(columns[1])):
                yield

    def _begin(self) -> None:
        self.pending = Pending(self._granule_bytes)
        self.schedule = Schedule(self.pending)

    def forget(self, topic: str) -> None:
        if topic == TIMER_TOPIC:
            self._begin()

    def floor(self) -> int:
        floor = self.pending.floor()
        return NOTHING if floor is None else floor

    def roll(self, start: int, end: int) -> WaitingSteps[None]:
        if self.append_again is not None:
            yield from self.append_again(self.pending.in_range(start, end))


def _rows(frozen: Iterator[Frozen]) -> Iterator[object]:
    for hour, dues, positions, keys in frozen:
        yield hour, _bytes(dues), _bytes(positions), _bytes(keys)


def _bytes(column: Column) -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _column(kind: str, data: bytes) -> Column:
    column = array(kind)
    try:
        column.frombytes(data)
    except ValueError as error:
        raise StoreError(f"column of {len(data)} bytes has a part of a number") from error
    if sys.byteorder == "big":
        column.byteswap()
    return column
