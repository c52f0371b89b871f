"""Counts and lists of pending timers, for administrators."""

from collections.abc import Sequence
from typing import Final, final

from martlet.broker import Broker
from martlet.contracts import PendingTimer
from martlet.message import Record, find_property
from martlet_timer.properties import REAL_QUEUE, REAL_TOPIC, UNIQUE_KEY
from martlet_timer.timers.delivery import TimerDelivery
from martlet_timer.timers.records import OUT_MS
from martlet_timer.timers.repeats import describe_repetition
from martlet_timer.timers.state import TimerState

__all__ = ["Listing"]

READ_AT_ONCE: Final = 64
READ_BYTES: Final = 1 << 20


@final
class Listing:
    """Counts and lists the pending timers of *broker*."""

    def __init__(self, broker: Broker, timers: TimerState, delivery: TimerDelivery) -> None:
        self._turns = broker.turns
        self._projections = broker.projections
        self._timers = timers
        self._reader = delivery.reader

    async def count(self, times_ms: Sequence[int]) -> list[int]:
        """Return the number of timers due before each of *times_ms*, and the number of all pending timers."""
        await self._projections.wait_applied(self._timers)  # all acknowledged timers
        pending = self._timers.pending
        return [*[await self._turns.finish(pending.count_before(each)) for each in times_ms], len(pending)]

    async def pending(self, from_ms: int, count: int) -> list[PendingTimer]:
        """Return the first *count* timers that are due at *from_ms* or later, except those with damaged records."""
        await self._projections.wait_applied(self._timers)
        timers = await self._turns.finish(self._timers.pending.first_due(from_ms, count))
        pending_timers: list[PendingTimer] = []
        while timers:
            part = timers[:READ_AT_ONCE]
            records = await self._reader.read([position for _, position in part], READ_BYTES)
            for (due_ms, _), record in zip(part, records, strict=False):
                if isinstance(record, Record):
                    pending_timers.append(_describe_timer(due_ms, record))
            del timers[: len(records)]
        return pending_timers


def _describe_timer(due_ms: int, record: Record) -> PendingTimer:
    def text(name: bytes) -> str:
        return find_property(record.properties, name).decode("utf-8", "replace")

    queue, out = text(REAL_QUEUE), text(OUT_MS)
    queue_id = int(queue) if queue.isdecimal() else -1
    return PendingTimer(
        due_ms,
        text(REAL_TOPIC),
        queue_id,
        text(UNIQUE_KEY),
        int(out),
        record.store_ms,
        len(record.body),
        describe_repetition(record.properties),
    )
