"""Delivers timers when they are due, appends them again for retention, and recalls them.

Each operation is an atomic group of messages and a note that removes the timers (`timers.gone`). So after a crash at
any moment a timer is either delivered or pending. A timer that is being delivered, moved or recalled is taken from the
schedule until the note is applied, so no two operations affect one timer.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, final

import trio

from martlet.broker import Broker
from martlet.errors import MartletError, Reason, Refused, StoreError, StoreFailed
from martlet.message import Record
from martlet.runtime.steps import WaitingSteps
from martlet.tables.topics import TIMER_TOPIC
from martlet_timer.timers.damped_clock import DampedClock
from martlet_timer.timers.journal_writer import TimerJournalWriter
from martlet_timer.timers.outcomes import POSTPONE_MS, DueTimer, TimerOutcomes
from martlet_timer.timers.pending import PendingTimers
from martlet_timer.timers.reader import ReadOutcome, RecordReader
from martlet_timer.timers.records import moved_copy
from martlet_timer.timers.repeats import is_repeated
from martlet_timer.timers.schedule import Schedule, Timer
from martlet_timer.timers.state import TimerState

__all__ = ["TimerDelivery"]

log = logging.getLogger("martlet.timer")

# Timers in one atomic group.
BATCH_TIMERS: Final = 128
BATCH_BYTES: Final = 256 * 1024
# A repeated message is stored twice, in 70 us, and counts as this many timers.
TIMERS_A_REPETITION: Final = 4
# Timers that are delivered, but not yet durable and applied.
TAKEN_MAX: Final = 4096
# If nothing is due, the clock is read this often, because NTP may make it run faster than trio's.
CLOCK_S: Final = 600.0
# Pause after the store refused a delivery because the disk is full.
RETRY_S: Final = 1.0
# Timeout of a recall or of retention that waits for a timer that is being delivered, moved or recalled.
FREE_S: Final = 10.0


@final
class TimerDelivery:
    """The service that delivers *timers* of *broker*.

    Args:
      period_min_ms: repeated messages that another broker stored have this period at least.
    """

    def __init__(
        self, broker: Broker, writer: TimerJournalWriter, timers: TimerState, clock: DampedClock, period_min_ms: int
    ) -> None:
        self._broker = broker
        self._store = broker.store
        self._writer = writer
        self._timers = timers
        self._clock = clock
        self.outcomes = TimerOutcomes(broker, writer, timers, clock, period_min_ms)
        self.reader = RecordReader(broker.store)
        timers.append_again = self.append_again
        timers.changed = self._handle_change
        self._woken = trio.Event()
        # Tasks that wait for taken timers.
        self._freed = trio.lowlevel.ParkingLot()
        # The time at which `run` will look again; None while it is busy.
        self._wakes_ms: float | None = None
        # Timers that the disk failed to read, and the time of the next attempt.
        self._unreadable: list[Timer] = []
        self._unreadable_until_ms = 0
        self._damaged = 0

    @property
    def _pending(self) -> PendingTimers:
        return self._timers.pending

    @property
    def _schedule(self) -> Schedule:
        return self._timers.schedule

    # ---- the service

    async def run(self) -> None:
        """Deliver due timers, until cancelled."""
        while True:
            now_ms = self._clock.now_ms()
            if self._unreadable and now_ms >= self._unreadable_until_ms:
                self._retry_unreadable()
            await self._broker.turns.finish(self._schedule.prepare(now_ms))
            timers = self._schedule.take(now_ms, BATCH_TIMERS)
            if timers:
                await self._deliver(timers)
            else:
                await self._wait()

    def _handle_change(self) -> None:
        """Handle added or removed timers."""
        self._freed.unpark_all()
        self.outcomes.count_readable()
        self._wake_if_earlier()

    def give_back(self, timers: list[Timer]) -> None:
        """Let the taken *timers* become due again, as they were neither delivered, moved nor recalled."""
        self._schedule.give_back(timers)
        self._freed.unpark_all()
        self._wake_if_earlier()

    def _wake_if_earlier(self) -> None:
        """Wake `run` if it has work earlier than expected."""
        if self._wakes_ms is None:
            return
        wake_ms = self._schedule.wake_ms()
        if wake_ms is not None and wake_ms < self._wakes_ms:
            self._woken.set()

    def wake(self) -> None:
        """Read the clock again after a jump."""
        self._woken.set()

    async def _wait(self) -> None:
        """Wait until the next timer comes near or is due."""
        now_ms, wake_ms = self._clock.now_ms(), self._schedule.wake_ms()
        wait_s = CLOCK_S if wake_ms is None else min((wake_ms - now_ms) / 1000, CLOCK_S)
        if self._unreadable:
            wait_s = min(wait_s, max((self._unreadable_until_ms - now_ms) / 1000, 0.0))
        if wait_s <= 0:
            await trio.lowlevel.checkpoint()
            return
        self._woken = trio.Event()
        self._wakes_ms = now_ms + wait_s * 1000
        try:
            with trio.move_on_after(wait_s):
                await self._woken.wait()
        finally:
            self._wakes_ms = None

    async def _deliver(self, timers: list[Timer]) -> None:
        """Deliver the taken *timers*; let undeliverable ones become due again."""
        unsettled_timers = {position: (due_ms, position) for due_ms, position in timers}
        end = 0
        refusal: MartletError | None = None
        try:
            outcomes = await self.reader.read([position for _, position in timers], BATCH_BYTES)
            due_timers = self._select_deliverable(timers, outcomes, unsettled_timers)
            if due_timers:
                end = self.outcomes.publish(_first_timers(due_timers), unsettled_timers)
        except (Refused, StoreFailed) as error:
            refusal = error
        finally:
            self.give_back(list(unsettled_timers.values()))
        if refusal is not None:
            await self._pause(refusal)
        elif self._schedule.taken > TAKEN_MAX:
            await self._wait_applied(end)
        else:
            await trio.lowlevel.checkpoint()

    async def _pause(self, refusal: MartletError) -> None:
        if not self._writer.is_refused:
            self._writer.is_refused = True
            log.warning("timers wait, because the store refuses messages; %s", refusal)
        await trio.sleep(RETRY_S)

    def _is_busy(self, timer: Timer) -> bool:
        return self._schedule.is_taken(timer[1]) and self._pending.has(*timer)

    async def wait_free(self, timer: Timer) -> None:
        """Wait while *timer* is being delivered, moved or recalled.

        Raises:
          Refused: the wait takes longer than `FREE_S` (Reason.BUSY).
        """
        with trio.move_on_after(FREE_S) as scope:
            while self._is_busy(timer):
                await self._freed.park()
        if scope.cancelled_caught:
            text = f"timer due at {timer[0]} ms has been in delivery for {FREE_S:g} s"
            raise Refused(Reason.BUSY, f"{text}; try again")

    async def _wait_applied(self, end: int) -> None:
        """Wait until fewer timers are taken."""
        await self._store.flusher.wait_flushed(end)
        while self._schedule.taken > TAKEN_MAX:
            await self._freed.park()

    # ---- results of reads

    def _select_deliverable(
        self, timers: list[Timer], outcomes: Sequence[ReadOutcome], unsettled_timers: dict[int, Timer]
    ) -> list[DueTimer]:
        """Return the timers that can be delivered; store that damaged ones are gone, and set unreadable ones aside."""
        due_timers: list[DueTimer] = []
        damaged_timers: list[Timer] = []
        for timer, outcome in zip(timers, outcomes, strict=False):
            if not self._pending.has(*timer):
                continue
            if self._timers.repeated.is_ending(timer[1]):
                unsettled_timers.pop(timer[1])  # the note removes it
                continue
            if isinstance(outcome, Record):
                due_timers.append((timer, outcome))
            elif outcome is None:
                damaged_timers.append(timer)
            else:
                self._put_aside(unsettled_timers.pop(timer[1]), outcome)
        if damaged_timers:
            self._drop_damaged(damaged_timers)
            for _, position in damaged_timers:
                unsettled_timers.pop(position)
        return due_timers

    def _drop_damaged(self, timers: list[Timer]) -> None:
        keys = [key for _, position in timers if (key := self._timers.repeated.key_at(position))]
        self._writer.append([], timers, keys)
        self._damaged += len(timers)
        for due_ms, position in timers:
            log.error("timer due at %d ms is lost: its record at position %d is damaged", due_ms, position)

    def _put_aside(self, timer: Timer, error: OSError) -> None:
        if not self._unreadable:
            self._unreadable_until_ms = self._clock.now_ms() + POSTPONE_MS
        self._unreadable.append(timer)
        text = "timer due at %d ms cannot be read at position %d, trying again in a minute; %s"
        log.error(text, *timer, error.strerror or error)

    def _retry_unreadable(self) -> None:
        timers, self._unreadable = self._unreadable, []
        self.give_back(timers)

    # ---- retention

    def append_again(self, parts: Iterable[list[Timer]]) -> WaitingSteps[None]:
        """Append the records of timers again, before retention removes the current ones.

        Raises:
          Refused: the store refuses writes.
          StoreFailed: the disk failed.
          StoreError: some records could not be read; all others were appended again.
        """
        self._retry_unreadable()
        for timers in parts:
            for start in range(0, len(timers), BATCH_TIMERS):
                yield from self._append_batch_again(timers[start : start + BATCH_TIMERS])
            yield None
        if self._unreadable:
            raise StoreError(f"records of {len(self._unreadable)} timers cannot be read; check the disk")

    def _append_batch_again(self, timers: list[Timer]) -> WaitingSteps[None]:
        unsettled_timers: dict[int, Timer] = {}
        try:
            for timer in timers:
                if self._is_busy(timer):
                    yield partial(self.wait_free, timer)
                if self._schedule.hold(timer):
                    unsettled_timers[timer[1]] = timer
            held_timers = list(unsettled_timers.values())
            while held_timers:
                outcomes: list[ReadOutcome] = []
                yield partial(self._read_into, outcomes, [position for _, position in held_timers])
                self._move(self._select_deliverable(held_timers, outcomes, unsettled_timers), unsettled_timers)
                held_timers = held_timers[len(outcomes) :]
        finally:
            self.give_back(list(unsettled_timers.values()))

    async def _read_into(self, outcomes: list[ReadOutcome], positions: list[int]) -> None:
        outcomes += await self.reader.read(positions, BATCH_BYTES)

    def _move(self, batch: list[DueTimer], unsettled_timers: dict[int, Timer]) -> None:
        """Append the records of *batch* again, and remove the stored ones from *unsettled_timers*."""
        count = len(batch)
        while batch:
            part = batch[:count]
            try:
                self._writer.append(
                    [moved_copy(record, timer[0]) for timer, record in part], [timer for timer, _ in part]
                )
            except Refused:
                if self._store.admission.refusal or count == 1:
                    raise
                count //= 2  # together they are too large for a group
                continue
            for (_, position), _ in part:
                unsettled_timers.pop(position)
            batch = batch[count:]

    def statistics(self) -> dict[str, object]:
        """Return counters.

        ``not_yet_pending``: stored records that were not read yet. ``behind_ms``: the time for which the next timer has
        been due.
        """
        now_ms, wake_ms = self._clock.now_ms(), self._schedule.first_due_ms()
        return {
            "pending": len(self._pending),
            "not_yet_pending": self._store.queue(TIMER_TOPIC, 0).next_offset - self._timers.next_offset,
            "repeated": len(self._timers.repeated),
            "being_delivered": self._schedule.taken,
            "behind_ms": max(now_ms - wake_ms, 0) if wake_ms is not None else 0,
            "delivered": self.outcomes.delivered,
            "postponed": self.outcomes.postponed,
            "dropped_without_topic": self.outcomes.dropped,
            "damaged": self._damaged,
            "unreadable": len(self._unreadable),
            "clock_ahead_ms": self._clock.ahead_ms,
            "clock_jumps": self._clock.jumps,
            **self.outcomes.lateness.statistics(),
        }


def _first_timers(due_timers: list[DueTimer]) -> list[DueTimer]:
    """Return the first timers of *due_timers*, as many as one turn delivers; the others stay due."""
    cost = 0
    for index, (_, record) in enumerate(due_timers):
        cost += TIMERS_A_REPETITION if is_repeated(record.properties) else 1
        if cost > BATCH_TIMERS:
            return due_timers[:index]
    return due_timers
