"""The service that delivers messages of the delay levels when they are due.

A round takes the due messages of all levels (`due.py`) and publishes them with the new offsets (`rounds.py`). So a
crash at any moment neither loses nor repeats a delivery.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, final

import trio

from martlet.errors import Reason, Refused, StoreError
from martlet.store.format.delays import SCHEDULE_TOPIC
from martlet_timer.levels.delay_clock import DelayClock
from martlet_timer.levels.due import NEVER, DelayLevels
from martlet_timer.levels.journal_codec import Delivered, low_of, union
from martlet_timer.levels.rounds import PublishedRounds
from martlet_timer.levels.state import LevelState

if TYPE_CHECKING:
    from martlet.broker import Broker

__all__ = ["LevelDelivery"]

log = logging.getLogger("martlet.timer")

# Minimum interval between rounds, so that messages that become due together are delivered together.
ROUND_MS: Final = 2.0
# Interval of checks for rounds that were undone because the disk is full.
LOOK_S: Final = 0.1
# Pause after a failed round.
RETRY_S: Final = 1.0


@final
class LevelDelivery:
    """The service that delivers messages of the delay levels.

    Args:
      plugin: the name under which the timer's stages are known.
      wall_ms: the time that timers follow.
    """

    def __init__(
        self,
        broker: "Broker",
        plugin: str,
        delays_ms: Sequence[int],
        offsets: LevelState,
        clock: DelayClock,
        wall_ms: Callable[[], int],
    ) -> None:
        self._store = broker.store
        self._offsets = offsets
        self._clock = clock
        self._levels = DelayLevels(broker, delays_ms, clock, wall_ms, self.wake)
        self.rounds = PublishedRounds(broker, plugin, offsets, clock)
        self._wake = trio.Event()
        self._progress = trio.Event()
        self._failed_rounds = 0
        self._is_failing = False

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Deliver until cancelled."""
        store = self._store
        if not self.rounds.stored:
            delivered = self._delivered_before_start()
            self.rounds.stored = {level: low_of(ranges) for level, ranges in delivered.items()}
            self._levels.restore(delivered)
        task_status.started()
        await self._offsets.adopt()
        self._return_to_log()
        store.readable_end.on_moved.append(self._settle_after_flush)
        self._offsets.keeper = self
        self._levels.open()
        try:
            while True:
                start_ms = self._clock.now_ms()
                await self._deliver_or_retry()
                await self._wait_for_next(start_ms + ROUND_MS)
        finally:
            self._offsets.keeper = None
            store.readable_end.on_moved.remove(self._settle_after_flush)
            self._levels.close()

    def _return_to_log(self) -> None:
        """Continue after the stored deliveries."""
        self.rounds.forget()
        self._levels.return_to(self.rounds.stored)

    def _delivered_before_start(self) -> Delivered:
        """Return the ranges delivered before the start, cut at the end of each queue to skip no new messages."""
        queues = self._store.queues.topics.get(SCHEDULE_TOPIC, {})
        ends = {queue_id + 1: self._store.readers.end_offset(queue) for queue_id, queue in queues.items()}
        delivered = self._offsets.delivered
        return {
            level: union((min(first, ends.get(level, 0)), min(end, ends.get(level, 0))) for first, end in ranges)
            for level, ranges in delivered.items()
        }

    # waiting

    def wake(self) -> None:
        """Read the clock again after a jump."""
        self._wake.set()

    def _settle_after_flush(self) -> None:
        if self.rounds.are_waiting:
            self.rounds.settle()
            self._wake.set()
            self._tell_progress()

    def _tell_progress(self) -> None:
        self._progress.set()
        self._progress = trio.Event()

    async def _wait_for_next(self, earliest_ms: float) -> None:
        """Wait until a level is due, but not before *earliest_ms*, or until an empty level has a message.

        While rounds wait for the disk, return after a flush as well.
        """
        self._tell_progress()
        now = self._clock.now_ms()
        if earliest_ms > now:
            await trio.sleep((earliest_ms - now) / 1000)
        due_ms = self._levels.next_due_ms() if self.rounds.has_room else NEVER
        wait_s = max(due_ms - self._clock.now_ms(), 0.0) / 1000
        if self.rounds.are_waiting:
            wait_s = min(wait_s, LOOK_S)
        with trio.move_on_after(wait_s):
            await self._wake.wait()
        self._wake = trio.Event()

    # one round

    async def _deliver_or_retry(self) -> None:
        """Deliver the messages due now; after an error, pause and continue after the stored deliveries."""
        try:
            stored = await self._deliver_due()
        except (Refused, StoreError, OSError) as error:
            if not self._is_failing:  # one line, not one a second while the disk is full
                self._is_failing = True
                log.error("delayed messages wait, and are tried again every second; %s", error)
            stored = False
        if stored and self._is_failing:
            self._is_failing = False
            log.info("delayed messages are delivered again")
        if not stored:
            self._failed_rounds += 1
            self._tell_progress()
            await trio.sleep(RETRY_S)
            self.rounds.settle()
            self._return_to_log()

    async def _deliver_due(self) -> bool:
        """Deliver the messages due now, in rounds; return False if rounds were undone."""
        levels, rounds = self._levels, self.rounds
        if self._store.flusher.failed is not None:
            raise self._store.flusher.failed
        while rounds.settle():
            if not rounds.has_room:
                return True
            new_round = rounds.begin()
            await levels.collect(new_round)
            new_round.offsets = levels.offsets()
            if new_round.offsets == rounds.noted and rounds.published_end > levels.released_end:
                return True
            rounds.publish(new_round, levels.later_ranges())
            await trio.lowlevel.checkpoint()  # the server commits
        return False

    # retention

    def floor(self) -> int:
        """Return the position of the oldest record that is still needed, or one before it; `NOTHING` for none."""
        return self._levels.floor()

    async def release(self, end: int) -> None:
        """Turn pending messages before log position *end* into timers; return once they and a newer note are stored.

        Raises:
          Refused: deliveries fail, because the store refuses writes or cannot be read.
        """
        self._levels.release(end)
        failed_rounds, offsets = self._failed_rounds, dict[int, int]()
        while not self._is_released(end, offsets):
            progress = self._progress
            self._wake.set()
            await progress.wait()
            if self._failed_rounds != failed_rounds:
                raise Refused(Reason.BUSY, "messages of the delay levels cannot be moved now; the log says why")

    def _is_released(self, end: int, offsets: dict[int, int]) -> bool:
        """Return whether *offsets* (see `DelayLevels.is_released`) are complete, and stored with a newer note."""
        are_offsets_known = self._levels.is_released(end, offsets)
        are_offsets_stored = all(self.rounds.stored.get(level, 0) >= offset for level, offset in offsets.items())
        return are_offsets_known and are_offsets_stored and self.rounds.settled_end > self._levels.released_end

    def statistics(self) -> dict[str, object]:
        """Return counters, and by level the number of waiting messages and the lateness of the oldest one in ms."""
        return {
            **self._levels.statistics(),
            **self.rounds.statistics(),
            "failed_rounds": self._failed_rounds,
            "clock_jumps": self._clock.jumps,
        }
