"""Expires messages of topics whose own retention is shorter than the log's.

All topics share one log, so no record is removed: consumers get no message before ``Queue.expired_to`` any more, and
the log's retention removes the records later. A note in the log has the first offset of each queue, so expired messages
stay expired after every kind of stop and rebuild, whatever the clock says then.

As for the log (`retention.py`), age depends on the wall clock, which may be wrong. In normal operation a message
expires within minutes. If the oldest one is overdue by more than `OVERDUE_HOURS`, either the clock has jumped or the
broker was stopped for long, and nothing on this machine can tell which. Then overdue messages expire gradually, over as
many hours as the topic keeps messages. A retention that was just set is an exception: all older messages are overdue.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, final

import trio

from martlet.errors import NotReady, Refused
from martlet.records.layout import BLANK_SIZE, ENTRY_BYTES, POSITION_SIZE, RecordView
from martlet.runtime.clock import Clock
from martlet.runtime.steps import Budget, Steps, per_slice
from martlet.store.append.flusher import Flusher
from martlet.store.append.note_writer import NoteWriter
from martlet.store.disk.files import Disk
from martlet.store.disk.page_cache import LogWriter
from martlet.store.queues.queues import Queue, Queues
from martlet.store.read.lookup import LOOK_US, Lookup
from martlet.store.read.readers import Readers
from martlet.store.upkeep.segment_age import HOUR_MS, OVERDUE_HOURS, SegmentAge, span

__all__ = ["TopicRetention"]

logger = logging.getLogger("martlet.store")

# Maximum delay of an expiry. Each sweep may write a note of about 30 bytes per queue.
SWEEP_S: Final = 60.0
# Seconds between log lines about one topic.
SAID_S: Final = 3600.0
# Queues to check, to note or to advance in one turn of the event loop.
QUEUES_A_TURN: Final = per_slice(us=2)
NOTHING_KNOWN: Final = (-1, 1)  # no offset, and the earliest time


class Expiry(NamedTuple):
    """Messages of ``queue`` before offset ``first`` have expired; the records of these end at log position ``end``."""

    queue: Queue
    first: int
    end: int


@final
class TopicRetention:
    """Applies the retention of topics to one store; ``expired_messages`` have expired since it was opened."""

    def __init__(
        self,
        disk: Disk,
        queues: Queues,
        readers: Readers,
        lookup: Lookup,
        notes: NoteWriter,
        tail: LogWriter,
        flusher: Flusher,
        age: SegmentAge,
        clock: Clock,
    ) -> None:
        self._disk = disk
        self._queues = queues
        self._readers = readers
        self._lookup = lookup
        self._notes = notes
        self._tail = tail
        self._flusher = flusher
        self._age = age
        self._clock = clock
        self._changed = trio.Event()
        self._sweeping = trio.Lock()
        self._hours: dict[str, int] = {}
        # Topics whose retention was set or shortened since the last sweep.
        self._new: set[str] = set()
        # The time when each overdue topic became overdue, and of its last sweep, on trio's clock.
        self._overdue: dict[str, tuple[float, float]] = {}
        # The log position after the newest expired message of each topic.
        self._removed_to: dict[str, int] = {}
        # The first offset of each queue and the store time of that message, so that most sweeps read nothing; while the
        # first message has no plausible time, those of an earlier one.
        self._oldest: dict[Queue, tuple[int, int]] = {}
        # Offsets that must still be noted in the log, because there was no space on the disk.
        self._unnoted: dict[Queue, int] = {}
        # By topic: messages that no log line has counted yet, and the time of the next line.
        self._said: dict[str, tuple[int, float]] = {}
        self.expired_messages = 0

    @property
    def hours_max(self) -> int:
        """The log's retention, which no topic can exceed; 0 if it depends on disk usage alone."""
        return self._age.hours_max

    @property
    def topics(self) -> Mapping[str, int]:
        """The topics with a retention of their own, and its hours."""
        return self._hours

    @property
    def overdue_topics(self) -> int:
        """The number of topics whose messages are overdue for so long that the clock may be wrong."""
        return len(self._overdue)

    def set_hours(self, topic: str, hours: int, *, loaded: bool = False) -> None:
        """Let messages of *topic* expire after *hours*; with 0 they have only the log's retention.

        Args:
          loaded: it was set before this start, so older messages should have expired already.
        """
        if 0 < self.hours_max < hours:
            logger.warning(
                "topic %s keeps messages for %d hours, not for the %d of its reserve.time: all topics share one log, "
                "and store.file_reserved_hours is shorter",
                topic,
                self.hours_max,
                hours,
            )
        hours_before = self._hours.get(topic, 0)
        if not hours:
            self._forget(topic)
        elif hours != hours_before:
            self._hours[topic] = hours
            if not loaded and not 0 < hours_before < hours:
                self._new.add(topic)
            self._changed.set()

    def _forget(self, topic: str) -> None:
        self._hours.pop(topic, None)
        self._overdue.pop(topic, None)
        self._said.pop(topic, None)
        self._new.discard(topic)
        self._oldest = {queue: oldest for queue, oldest in self._oldest.items() if queue.topic != topic}

    def deleted(self, topic: str) -> None:
        """Forget *topic*, which was deleted."""
        self._forget(topic)
        self._removed_to.pop(topic, None)

    def removed_to(self, topic: str) -> int:
        """Return the log position after the newest expired message of *topic*; 0 if there is none."""
        return self._removed_to.get(topic, 0)

    def has_expired(self, data: bytes) -> bool:
        """Return whether the message of the record *data* has expired for consumers, though the log still has it."""
        record = RecordView(data)
        queue = self._queues.find(record.topic, record.queue_id)
        return queue is not None and record.queue_offset < queue.expired_to

    def expire_whole(self, queues: Sequence[Queue]) -> Steps[None]:
        """Expire all messages of *queues*, to which nothing is written any more.

        Raises `NotReady`, and `Refused` if the disk is full.
        """
        for at in range(0, len(queues), QUEUES_A_TURN):
            batch = queues[at : at + QUEUES_A_TURN]
            self._notes.note_expiries([(queue.topic, queue.queue_id, queue.next_offset) for queue in batch])
            for queue in batch:
                end = (yield from self._end_before(queue, queue.next_offset)) or queue.last_end
                queue.expire_to(queue.next_offset)
                self._queues.note_change(queue)
                self._removed_to[queue.topic] = max(self._removed_to.get(queue.topic, 0), end)
            yield

    # ---- sweeps

    async def run(self) -> None:
        """Sweep every minute and after each change, until cancelled; wait while no topic has its own retention."""
        while True:
            with trio.move_on_after(SWEEP_S if self._hours or self._unnoted else math.inf):
                await self._changed.wait()
            self._changed = trio.Event()  # not in a sweep: others may set it during the wait
            await self.sweep()

    async def sweep(self) -> None:
        """Expire all messages that are old enough; those that cannot be read now, at a later sweep.

        Raises:
          StoreFailed: the disk failed.
        """
        async with self._sweeping:
            if self._flusher.failed is not None:
                return
            expiries: list[Expiry] = []
            for topic, hours in list(self._hours.items()):
                try:
                    expiries += await self._find_expired(topic, hours)
                except OSError as error:
                    logger.warning("messages of topic %s expire later: %s", topic, error)
            await self._expire(expiries)

    async def _find_expired(self, topic: str, hours: int) -> list[Expiry]:
        """Return the expired messages of *topic*, by queue."""
        is_new = topic in self._new and not self._age.overdue_ms
        now_ms = self._clock.now_ms()
        cutoff_ms = now_ms - hours * HOUR_MS
        queues_to_expire: list[Queue] = []
        overdue_ms = 0
        expiries: list[Expiry] = []
        knows_end = topic in self._removed_to
        self._removed_to.setdefault(topic, 0)
        for number, queue in enumerate(list(self._queues.topics.get(topic, {}).values()), 1):
            if not number % QUEUES_A_TURN:
                await trio.lowlevel.checkpoint()
            if not knows_end and queue.expired_to > queue.stored_from:
                expiries.append(await self._make_expiry(queue, queue.expired_to))
            if queue.local_from < self._readers.end_offset(queue):
                oldest_ms = await self._find_oldest_ms(queue, now_ms)
                if oldest_ms < cutoff_ms:
                    queues_to_expire.append(queue)
                    overdue_ms = max(overdue_ms, cutoff_ms - oldest_ms if oldest_ms else 0)
        share = self._share_to_expire(topic, hours, overdue_ms, is_new=is_new)
        self._new.discard(topic)
        for queue in queues_to_expire:
            end = await self._run_steps(self._find_first_kept(queue, cutoff_ms, now_ms))
            if end < 0 and is_new:
                self._new.add(topic)
            end = queue.local_from + round((end - queue.local_from) * share)
            if end > queue.local_from:
                expiries.append(await self._make_expiry(queue, end))
        return expiries

    async def _find_oldest_ms(self, queue: Queue, now_ms: int) -> int:
        """Return the store time of the oldest message of *queue*; 0 if it is not plausible."""
        first_offset = queue.local_from
        offset, known_ms = self._oldest.get(queue, NOTHING_KNOWN)
        if offset == first_offset:
            return known_ms
        stored_ms = await self._run_steps(self._lookup.store_ms_at(queue, first_offset))
        if not known_ms <= stored_ms <= now_ms:
            return 0
        self._oldest[queue] = first_offset, stored_ms
        return stored_ms

    async def _make_expiry(self, queue: Queue, end_offset: int) -> Expiry:
        return Expiry(queue, end_offset, await self._run_steps(self._end_before(queue, end_offset)))

    async def _run_steps(self, steps: Steps[int]) -> int:
        """Run *steps*, one slice a turn of the event loop; return -1 if a damaged block must be rebuilt first."""
        await trio.lowlevel.checkpoint()
        try:
            while True:
                blocking = next(steps)
                if blocking is None:
                    await trio.lowlevel.checkpoint()
                else:
                    await self._disk.off_loop(blocking)
        except StopIteration as done:
            return int(done.value)
        except NotReady:
            return -1

    def _end_before(self, queue: Queue, offset: int) -> Steps[int]:
        """Return the log position after the message before *offset*; 0 if unknown."""
        entry = yield from self._lookup.entries(queue, offset - 1, 1)
        if len(entry) < ENTRY_BYTES:
            return 0
        position, size = POSITION_SIZE.unpack_from(entry)
        return int(position) + (int(size) if size != BLANK_SIZE else 0)

    # ---- ages

    def _find_first_kept(self, queue: Queue, cutoff_ms: int, now_ms: int) -> Steps[int]:
        """Return the first offset of *queue* that was stored at or after *cutoff_ms*.

        A message without a plausible time is as old as the next later message with one.
        """
        low, high, budget = queue.local_from, self._readers.end_offset(queue), Budget(LOOK_US)
        _, since_ms = self._oldest.get(queue, NOTHING_KNOWN)
        while low < high:
            middle = (low + high) // 2
            stored_ms = yield from self._find_plausible_ms(queue, middle, high, since_ms, now_ms)
            if budget.is_over():
                yield
            if 0 <= stored_ms < cutoff_ms:
                low, since_ms = middle + 1, stored_ms
            else:
                high = middle
        return low

    def _find_plausible_ms(self, queue: Queue, offset: int, end: int, since_ms: int, now_ms: int) -> Steps[int]:
        """Return the store time of *offset*, or of a later message if that time is before *since_ms* or in the future.

        Returns -1 if there is none before *end*.
        """
        step = 1
        while offset < end:
            stored_ms = yield from self._lookup.store_ms_at(queue, offset)
            if since_ms <= stored_ms <= now_ms:
                return stored_ms
            yield
            offset = end if offset == end - 1 else min(offset + step, end - 1)
            step *= 2
        return -1

    def _share_to_expire(self, topic: str, hours: int, overdue_ms: int, *, is_new: bool) -> float:
        """Return the share of the overdue messages that may expire now: 1.0, unless they are overdue for too long."""
        if overdue_ms <= OVERDUE_HOURS * HOUR_MS or is_new:
            self._overdue.pop(topic, None)
            return 1.0
        now = trio.current_time()
        if topic not in self._overdue:
            logger.warning(
                "messages of topic %s are %s past its reserve.time: the clock jumped ahead or the broker was stopped "
                "for long; they expire gradually over %d hours; if the clock is wrong, correct it",
                topic,
                span(overdue_ms),
                hours,
            )
        began, last_sweep = self._overdue.get(topic, (now, now))
        self._overdue[topic] = began, now
        left_s = began + hours * 3600 - last_sweep
        return (now - last_sweep) / left_s if now - last_sweep < left_s else 1.0

    # ---- expiry

    async def _expire(self, expiries: Sequence[Expiry]) -> None:
        """Write *expiries* into the log, and advance the queues once the note is durable."""
        first_offsets = {
            **self._unnoted,
            **{each.queue: each.first for each in expiries if each.first > each.queue.expired_to},
        }
        try:
            await self._write_note(list(first_offsets.items()))
            self._unnoted = {}
        except Refused as refused:
            # They expire anyway, and again after a rebuild.
            self._unnoted = first_offsets
            logger.warning("that messages of %d queues have expired is noted later; %s", len(first_offsets), refused)
        counts: dict[str, int] = {}
        for number, (queue, first_offset, end) in enumerate(expiries, 1):
            if self._is_alive(queue):
                counts[queue.topic] = counts.get(queue.topic, 0) + max(first_offset - queue.first_offset, 0)
                queue.expire_to(first_offset)
                self._queues.note_change(queue)
                self._removed_to[queue.topic] = max(self._removed_to.get(queue.topic, 0), end)
            if not number % QUEUES_A_TURN:
                await trio.lowlevel.checkpoint()
        for topic, count in counts.items():
            self.expired_messages += count
            self._log_expired(topic, count)

    async def _write_note(self, first_offsets: Sequence[tuple[Queue, int]]) -> None:
        """Write the first offsets of queues into the log, and wait until they are durable.

        Raises:
          Refused: the disk is full.
        """
        for at in range(0, len(first_offsets), QUEUES_A_TURN):
            existing = [each for each in first_offsets[at : at + QUEUES_A_TURN] if self._is_alive(each[0])]
            self._notes.note_expiries([(queue.topic, queue.queue_id, first_offset) for queue, first_offset in existing])
            await trio.lowlevel.checkpoint()
        if first_offsets:
            await self._flusher.wait_durable(self._tail.written)

    def _is_alive(self, queue: Queue) -> bool:
        return self._queues.find(queue.topic, queue.queue_id) is queue

    def _log_expired(self, topic: str, count: int) -> None:
        """Log the number of messages of *topic* that have expired, at intervals."""
        uncounted, next_line = self._said.get(topic, (0, 0.0))
        count, now = uncounted + count, trio.current_time()
        if count and now >= next_line:
            hours = self._hours.get(topic, 0)
            logger.info("%d messages of topic %s are older than %d hours and have expired", count, topic, hours)
            count, next_line = 0, now + SAID_S
        self._said[topic] = count, next_line
