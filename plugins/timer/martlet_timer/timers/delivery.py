"""Delivers timers when they are due, appends them again for retention, and recalls them.

Each of these is an atomic group of messages and a note that removes the timers (`timers.gone`). So after a crash at any
moment a timer is either delivered or pending. A timer that is being delivered, moved or recalled is taken from the
schedule until the note is applied, so no two of these happen to one timer.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, final

import trio

from martlet.broker import Broker
from martlet.errors import MartletError, Reason, Refused, StoreError, StoreFailed
from martlet.message import Message, Record, find_property
from martlet.runtime.steps import WaitingSteps
from martlet.state.journal import Journal
from martlet.tables.topics import TIMER_TOPIC
from martlet_timer.lateness import Lateness
from martlet_timer.properties import REAL_TOPIC
from martlet_timer.timers.damped_clock import DampedClock
from martlet_timer.timers.journal_codec import ended, gone
from martlet_timer.timers.pending import PendingTimers
from martlet_timer.timers.reader import Found, RecordReader
from martlet_timer.timers.records import moved
from martlet_timer.timers.repeats import DueOutcome, is_repeated, outcome_of
from martlet_timer.timers.schedule import Schedule, Timer
from martlet_timer.timers.state import TimerState

__all__ = ["TimerDelivery"]

log = logging.getLogger("martlet.timer")

# Of one atomic group.
BATCH_TIMERS: Final = 128
BATCH_BYTES: Final = 256 * 1024
# A repeated message is stored twice, in 70 us, and counts as so many others.
TIMERS_A_REPETITION: Final = 4
# Delivered, but not yet durable and applied.
TAKEN_MAX: Final = 4096
# If nothing is due, the clock is read this often, because NTP may make it run faster than trio's.
CLOCK_S: Final = 600.0
# After the store refused a delivery because the disk is full.
RETRY_S: Final = 1.0
# A message that is refused for itself, or cannot be read because the disk fails, is tried again after this time.
POSTPONE_MS: Final = 60_000
# How long a recall or retention waits for a timer that is being delivered, moved or recalled.
FREE_S: Final = 10.0
# Topics to count messages of that were deleted before the messages were due.
GONE_TOPICS_MAX: Final = 1000

Due = tuple[Timer, Record]


@final
class TimerDelivery:
    """The service that delivers *timers* of *broker*.

    Args:
      plugin: the name under which the plugin is loaded.
      period_min_ms: repeated messages that another broker stored have this period at least.
    """

    def __init__(
        self,
        broker: Broker,
        journal: Journal,
        timers: TimerState,
        clock: DampedClock,
        plugin: str,
        period_min_ms: int,
    ) -> None:
        self._broker = broker
        self._store = broker.store
        self._journal = journal
        self._timers = timers
        self._clock = clock
        self._plugin = plugin
        self._period_min_ms = period_min_ms
        self.reader = RecordReader(broker.store)
        timers.append_again = self.append_again
        timers.changed = self._changed
        self._woken = trio.Event()
        # Who waits for timers that are taken.
        self._freed = trio.lowlevel.ParkingLot()
        # When `run` will look again by itself; None while it is busy.
        self._wakes_ms: float | None = None
        # Timers that the disk failed to read, and when to try again.
        self._unreadable: list[Timer] = []
        self._unreadable_until_ms = 0
        self._is_refused = False
        self._gone_topics: dict[str, int] = {}
        # The end in the log of each delivery that is not readable yet, and when its timers were due.
        self._published: deque[tuple[int, list[int]]] = deque()
        self.lateness = Lateness()
        self.delivered = 0
        self.postponed = 0
        self.dropped = 0
        self.damaged = 0

    @property
    def _pending(self) -> PendingTimers:
        return self._timers.pending

    @property
    def _schedule(self) -> Schedule:
        return self._timers.schedule

    # ---- the service

    async def run(self) -> None:
        """Deliver what is due; until cancelled."""
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

    def _changed(self) -> None:
        """Handle that timers were added or removed."""
        self._freed.unpark_all()
        if self._published:
            self._count_readable()
        self._wake_if_earlier()

    def give_back(self, timers: list[Timer]) -> None:
        """Let *timers* become due again, which were taken, but neither delivered, moved nor recalled."""
        self._schedule.give_back(timers)
        self._freed.unpark_all()
        self._wake_if_earlier()

    def _wake_if_earlier(self) -> None:
        """Wake `run` if it has something to do earlier than it thought."""
        if self._wakes_ms is None:
            return
        wake_ms = self._schedule.wake_ms()
        if wake_ms is not None and wake_ms < self._wakes_ms:
            self._woken.set()

    def wake(self) -> None:
        """Look at the clock again: it jumped."""
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
        """Deliver *timers*, which are taken; give back those that cannot be delivered now."""
        left = {position: (due_ms, position) for due_ms, position in timers}
        end = 0
        refused: MartletError | None = None
        try:
            found = await self.reader.read([position for _, position in timers], BATCH_BYTES)
            due = self._check_found(timers, found, left)
            if due:
                end = self._publish(_first(due), left)
        except (Refused, StoreFailed) as error:
            refused = error
        finally:
            self.give_back(list(left.values()))
        if refused is not None:
            await self._pause(refused)
        elif self._schedule.taken > TAKEN_MAX:
            await self._wait_applied(end)
        else:
            await trio.lowlevel.checkpoint()

    async def _pause(self, refused: MartletError) -> None:
        if not self._is_refused:
            self._is_refused = True
            log.warning("timers wait, because the store refuses messages; %s", refused)
        await trio.sleep(RETRY_S)

    def _is_busy(self, timer: Timer) -> bool:
        return self._schedule.is_taken(timer[1]) and self._pending.has(*timer)

    async def wait_free(self, timer: Timer) -> None:
        """Wait while *timer* is being delivered, moved or recalled.

        Raises:
          Refused: that takes longer than `FREE_S` (Reason.BUSY).
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

    # ---- what was read

    def _check_found(self, timers: list[Timer], found: Sequence[Found], left: dict[int, Timer]) -> list[Due]:
        """Return the timers that can be delivered; store that damaged ones are gone, and put others aside."""
        due: list[Due] = []
        damaged: list[Timer] = []
        for timer, record in zip(timers, found, strict=False):
            if not self._pending.has(*timer):
                continue
            if self._timers.repeated.is_ending(timer[1]):
                left.pop(timer[1])  # the note removes it
                continue
            if isinstance(record, Record):
                due.append((timer, record))
            elif record is None:
                damaged.append(timer)
            else:
                self._put_aside(left.pop(timer[1]), record)
        if damaged:
            self._drop_damaged(damaged)
            for _, position in damaged:
                left.pop(position)
        return due

    def _drop_damaged(self, timers: list[Timer]) -> None:
        keys = [key for _, position in timers if (key := self._timers.repeated.key_at(position))]
        self.append([], timers, keys)
        self.damaged += len(timers)
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

    # ---- storing

    def append(self, messages: Sequence[Message], timers: Sequence[Timer], keys: Sequence[str] = ()) -> int:
        """Store *messages* and that *timers* are gone, all or nothing; return the end in the log.

        Args:
          keys: of repeated messages that end with this.

        Raises:
          Refused: the store refuses writes, or a message is refused.
          StoreFailed: the disk failed.
        """
        store = self._store
        store.committer.renew_clock()  # an older time would look like an early delivery
        notes = [(self._journal, gone(timers))]
        if keys:
            notes.append((self._journal, ended(keys)))
        self._broker.publish_all(messages, atomic=True, notes=notes, passed=self._plugin)
        end = store.appended
        try:
            store.committer.commit()
        except (Refused, StoreFailed) as error:
            # Other appends since the last commit were not stored either; their answers must not be sent.
            store.committer.fail_next(error)
            raise
        if self._is_refused:
            self._is_refused = False
            log.info("timers are delivered again")
        return end

    def _publish(self, due: list[Due], left: dict[int, Timer]) -> int:
        """Deliver the messages of *due*, and remove what was stored from *left*.

        Raises:
          Refused: the store refuses writes.
          StoreFailed: the disk failed.
        """
        now_ms = self._clock.now_ms()
        outcomes = [outcome_of(record, timer[0], now_ms, self._period_min_ms) for timer, record in due]
        timers = [timer for timer, _ in due]
        try:
            end = self._append_outcomes(outcomes, timers)
        except Refused as refused:
            if self._store.admission.refusal:
                raise
            if len(due) == 1:
                end = self._publish_odd(due[0], outcomes[0], refused)
            else:
                middle = len(due) // 2
                self._publish(due[:middle], left)
                return self._publish(due[middle:], left)
        for _, position in timers:
            left.pop(position)
        return end

    def _append_outcomes(self, outcomes: Sequence[DueOutcome], timers: Sequence[Timer]) -> int:
        """Store what follows from *timers* that are due; raises as `append`, and if a series has no topic."""
        messages: list[Message] = []
        delivered: list[Timer] = []
        for outcome, timer in zip(outcomes, timers, strict=True):
            if outcome.delivery is not None:
                messages.append(outcome.delivery)
                delivered.append(timer)
            else:
                self._check_topic(outcome.timers[0])
            messages += outcome.timers
        end = self.append(messages, timers, [outcome.ended for outcome in outcomes if outcome.ended])
        self._note_published(end, delivered)
        return end

    def _check_topic(self, timer: Message) -> None:
        """Raise `Refused` if the topic that *timer* is for was deleted."""
        topic = _topic_of(timer.properties)
        if self._broker.topics.get(topic) is None:
            raise Refused(Reason.NO_TOPIC, f"topic[{topic}] does not exist; create it, and send the message again")

    def _note_published(self, end: int, timers: list[Timer]) -> None:
        self._published.append((end, [due_ms for due_ms, _ in timers]))
        self._count_readable()  # with async flush the commit was enough

    def _count_readable(self) -> None:
        """Count the deliveries that consumers can read now."""
        now_ms, readable = self._clock.now_ms(), self._store.readable
        while self._published and self._published[0][0] <= readable:
            _, dues_ms = self._published.popleft()
            self.delivered += len(dues_ms)
            for due_ms in dues_ms:
                self.lateness.add(now_ms - due_ms)

    def _publish_odd(self, due: Due, outcome: DueOutcome, refused: Refused) -> int:
        """Deliver one message that was refused with *refused*: to another queue, later, or not at all."""
        timer, record = due
        topic = _topic_of(record.properties)
        if refused.reason == Reason.NO_TOPIC:
            return self._drop_without_topic(timer, topic)
        message = outcome.delivery
        if message is not None and message.queue_id >= 0 and self._queue_is_gone(message):
            message.queue_id = -1
            try:
                return self._append_outcomes([outcome], [timer])
            except Refused as again:
                if self._store.admission.refusal:
                    raise
                refused = again
        later_ms = self._clock.now_ms() + POSTPONE_MS
        end = self.append([moved(record, later_ms)], [timer])
        self.postponed += 1
        text = "timer due at %d ms for topic[%s] is refused, trying again in a minute; %s"
        log.warning(text, timer[0], topic, refused)
        return end

    def _queue_is_gone(self, message: Message) -> bool:
        topic = self._broker.topics.get(message.topic)
        return topic is not None and message.queue_id >= topic.write_queues

    def _drop_without_topic(self, timer: Timer, topic: str) -> int:
        """Store that a timer is gone because its topic was deleted: what was deleted stays deleted."""
        key = self._timers.repeated.key_at(timer[1])
        end = self.append([], [timer], [key] if key else [])
        self.dropped += 1
        if topic not in self._gone_topics and len(self._gone_topics) < GONE_TOPICS_MAX:
            log.warning("timers for topic[%s] are dropped when they are due, because the topic was deleted", topic)
            self._gone_topics[topic] = 0
        if topic in self._gone_topics:
            self._gone_topics[topic] += 1
        return end

    # ---- retention

    def append_again(self, parts: Iterable[list[Timer]]) -> WaitingSteps[None]:
        """Append the records of timers again, before retention removes the present ones.

        Raises:
          Refused: the store refuses writes.
          StoreFailed: the disk failed.
          StoreError: some records could not be read; all others were appended again.
        """
        self._retry_unreadable()
        for timers in parts:
            for first in range(0, len(timers), BATCH_TIMERS):
                yield from self._append_batch_again(timers[first : first + BATCH_TIMERS])
            yield None
        if self._unreadable:
            raise StoreError(f"records of {len(self._unreadable)} timers cannot be read; check the disk")

    def _append_batch_again(self, timers: list[Timer]) -> WaitingSteps[None]:
        left: dict[int, Timer] = {}
        try:
            for timer in timers:
                if self._is_busy(timer):
                    yield partial(self.wait_free, timer)
                if self._schedule.hold(timer):
                    left[timer[1]] = timer
            held = list(left.values())
            while held:
                found: list[Found] = []
                yield partial(self._read_into, found, [position for _, position in held])
                self._move(self._check_found(held, found, left), left)
                held = held[len(found) :]
        finally:
            self.give_back(list(left.values()))

    async def _read_into(self, found: list[Found], positions: list[int]) -> None:
        found += await self.reader.read(positions, BATCH_BYTES)

    def _move(self, batch: list[Due], left: dict[int, Timer]) -> None:
        """Append the records of *batch* again, and remove what was stored from *left*."""
        count = len(batch)
        while batch:
            part = batch[:count]
            try:
                self.append([moved(record, timer[0]) for timer, record in part], [timer for timer, _ in part])
            except Refused:
                if self._store.admission.refusal or count == 1:
                    raise
                count //= 2  # together they are too large for a group
                continue
            for (_, position), _ in part:
                left.pop(position)
            batch = batch[count:]

    def statistics(self) -> dict[str, object]:
        """Return counters.

        ``not_yet_pending``: stored records that were not read yet. ``behind_ms``: how long the next timer has been due.
        """
        now_ms, wake_ms = self._clock.now_ms(), self._schedule.first_due_ms()
        return {
            "pending": len(self._pending),
            "not_yet_pending": self._store.queue(TIMER_TOPIC, 0).next_offset - self._timers.next_offset,
            "repeated": len(self._timers.repeated),
            "being_delivered": self._schedule.taken,
            "behind_ms": max(now_ms - wake_ms, 0) if wake_ms is not None else 0,
            "delivered": self.delivered,
            "postponed": self.postponed,
            "dropped_without_topic": self.dropped,
            "damaged": self.damaged,
            "unreadable": len(self._unreadable),
            "clock_ahead_ms": self._clock.ahead_ms,
            "clock_jumps": self._clock.jumps,
            **self.lateness.statistics(),
        }


def _first(due: list[Due]) -> list[Due]:
    """Return the first ones of *due* that are delivered in one turn; the others stay due."""
    cost = 0
    for index, (_, record) in enumerate(due):
        cost += TIMERS_A_REPETITION if is_repeated(record.properties) else 1
        if cost > BATCH_TIMERS:
            return due[:index]
    return due


def _topic_of(properties: bytes) -> str:
    """Return the topic that a timer with *properties* is for."""
    return find_property(properties, REAL_TOPIC).decode("utf-8", "replace")
