"""The pending timers as a projection of the log.

A record in RocketMQ's timer topic adds a timer. A note in the plugin's journal removes timers: delivered ones, in the
atomic group of the delivered messages; a recalled one; and timers whose records were appended again before retention
removes them, in the atomic group of the new records. So the log alone determines the pending timers, independently of
the clock.

A message that is delivered several times is one timer after the other (`repeats.py`). A record in the timer topic also
removes the earlier timer of its message; a note ends the message.
"""

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, final

from martlet.errors import StoreError
from martlet.records.layout import RecordView
from martlet.runtime.steps import Budget, Steps, WaitingSteps
from martlet.state import NOTHING, pack_rows, unpack_rows
from martlet.state.journal import read_notes
from martlet.tables.topics import TIMER_TOPIC
from martlet_timer.timers.journal_codec import ENDED, GONE, decode_note, read_gone
from martlet_timer.timers.pending import Column, Frozen, PendingTimers
from martlet_timer.timers.records import delete_key, key_of, read_timer
from martlet_timer.timers.repeated import RepeatedTimers
from martlet_timer.timers.repeats import is_repeated
from martlet_timer.timers.schedule import Schedule, Timer

__all__ = ["TimerState"]

FORMAT: Final = 1
# Marks a row of repeated messages in a snapshot, in place of the hour.
REPEATED: Final = -1
RESTORE_US: Final = 0.25


@final
class TimerState:
    """The projection (martlet.state.Projection).

    Args:
      journal_topic: the topic of the plugin's journal.
      granule_bytes: the size of a segment of the log.
      roll: appends the records of timers again; for `roll`.
    """

    def __init__(self, journal_topic: str, granule_bytes: int) -> None:
        self.name = "timers"
        self.topics = frozenset((TIMER_TOPIC, journal_topic))
        self._granule_bytes = granule_bytes
        self.pending = PendingTimers(granule_bytes)
        self.schedule = Schedule(self.pending)
        self.repeated = RepeatedTimers()
        # Appends the records of timers again; set by `TimerDelivery`.
        self.append_again: Callable[[Iterable[list[Timer]]], WaitingSteps[None]] | None = None
        # Called when timers were added or removed.
        self.changed: Callable[[], None] | None = None
        # The offset in the timer topic after the newest applied record; set by the plugin after the replay.
        self.next_offset = 0

    def held(self) -> int:
        return len(self.pending)

    def apply(self, records: Sequence[RecordView]) -> None:
        newest: RecordView | None = None
        for record in records:
            if record.topic != TIMER_TOPIC:
                for note in read_notes(record.body):
                    self._apply_note(note)
                continue
            newest = record
            self._apply_timer(record)
        if newest is not None:
            self.next_offset = newest.queue_offset + 1
        if self.changed is not None:
            self.changed()

    def _apply_timer(self, record: RecordView) -> None:
        timer = read_timer(record)
        if timer is None:
            return
        due_ms, topic, unique = timer
        self.pending.add(due_ms, record.position, key_of(topic, unique))
        self.schedule.add(due_ms, record.position)
        if is_repeated(record.properties):
            self._remove(self.repeated.put(delete_key(topic, unique), (due_ms, record.position)))

    def _apply_note(self, note: bytes) -> None:
        kind, content = decode_note(note)
        if kind == GONE:
            for timer in read_gone(content):
                self._remove(timer)
        elif kind == ENDED:
            for key in content:
                self._remove(self.repeated.end(key))
                self.repeated.ending.discard(key)
        else:
            raise StoreError(f"journal of timers has a note of the unknown kind {kind!r}; a newer version wrote it")

    def _remove(self, timer: Timer | None) -> None:
        if timer is not None:
            self.pending.remove(*timer)
            self.schedule.forget(timer[1])
            self.repeated.gone(timer[1])

    def freeze(self) -> Steps[Sequence[bytes]]:
        return pack_rows(FORMAT, _rows(self.pending.freeze(), self.repeated.freeze()))

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        self._clear()
        budget = Budget(RESTORE_US)
        for hour, dues, positions, keys in unpack_rows(FORMAT, data):
            if hour == REPEATED:
                self.repeated.restore(keys, first_position)
                continue
            columns = hour, _column("I", dues), _column("q", positions), _column("I", keys)
            self.pending.restore(columns, first_position)
            if budget.is_over(16 + len(columns[1])):
                yield

    def _clear(self) -> None:
        self.pending = PendingTimers(self._granule_bytes)
        self.schedule = Schedule(self.pending)
        self.repeated = RepeatedTimers()

    def forget(self, topic: str) -> None:
        if topic == TIMER_TOPIC:
            self._clear()

    def floor(self) -> int:
        floor = self.pending.floor()
        return NOTHING if floor is None else floor

    def roll(self, start: int, end: int) -> WaitingSteps[None]:
        if self.append_again is not None:
            yield from self.append_again(self.pending.in_range(start, end))


def _rows(frozen: Iterator[Frozen], repeated: Iterable[bytes]) -> Iterator[object]:
    for row in repeated:
        yield REPEATED, b"", b"", row
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
