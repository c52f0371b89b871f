"""Delivers messages of the delay levels when they are due.

A round takes what is due from all levels and publishes it as one atomic group with a note of where it began and of
the new offsets. So a crash at any moment neither loses nor repeats a delivery. Some rounds may wait for the disk at
once: what becomes due during an fdatasync is covered by the next one. If a commit fails, its rounds are repeated; if a
power cut loses a round and keeps a later one, only the lost one is.

Nothing is lost silently. A message that cannot be delivered now, because its topic is closed, waits for its delay once
more; one that can never be delivered is logged and counted, and stays in the schedule topic until retention removes it.

Before retention removes a segment, its pending messages become timers that are due at the same time. Appended again to
the queue of their level they would wait behind later ones, in RocketMQ too. A timer keeps its time in either broker.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Final, final

import trio

from martlet.errors import Reason, Refused, StoreError
from martlet.message import PROPERTIES_BYTES_MAX, Message, find_property
from martlet.records.layout import RecordView, record_views
from martlet.state import NOTHING
from martlet.store.format.delays import SCHEDULE_TOPIC
from martlet.store.queues.queues import Queue
from martlet.store.read.reading import ReadResult
from martlet.tables.topics import BROKER_TOPICS, TIMER_TOPIC, WRITE
from martlet_timer.lateness import Lateness
from martlet_timer.levels.delay_clock import DelayClock
from martlet_timer.levels.journal_codec import Delivered, Offsets, Ranges, later_of, low_of, union
from martlet_timer.levels.state import LevelState
from martlet_timer.properties import REAL_QUEUE, REAL_TOPIC
from martlet_timer.timers.records import timer_properties

if TYPE_CHECKING:
    from martlet.broker import Broker

__all__ = ["LevelDelivery"]

log = logging.getLogger("martlet.timer")

# The limits of a round, which blocks the event loop for about 2 ms.
ROUND_MESSAGES: Final = 128
ROUND_BYTES: Final = 1024 * 1024
# Rounds begin at least so long after each other, so that messages that become due together are delivered together.
ROUND_MS: Final = 2.0
# Rounds that may wait for the disk at the same time.
ROUNDS_MAX: Final = 16
# How often to look whether rounds were undone, because the disk is full.
LOOK_S: Final = 0.1
# Pause after a failed round.
RETRY_S: Final = 1.0
# The time at which a level is due whose next message was not read yet, and one that has no readable message.
UNKNOWN: Final = 0.0
NEVER: Final = float("inf")


@final
class Level:
    """One delay level and its queue; ``offset`` is the next message to deliver, due at ``due_ms`` at the earliest.

    Its records before the log position ``floor`` come before ``offset``. The messages of ``later`` were delivered
    before the start, by rounds that a power cut kept although it lost earlier ones.
    """

    __slots__ = ("delay_ms", "due_ms", "floor", "later", "moved_ms", "number", "offset", "queue")

    def __init__(self, number: int, delay_ms: int) -> None:
        self.number = number
        self.delay_ms = delay_ms
        self.queue: Queue | None = None  # None until there was a message
        self.offset = 0
        self.due_ms = UNKNOWN
        self.floor = 0
        self.later: Ranges = ()
        self.moved_ms = 0  # when the last message that became a timer is due


@final
class Round:
    """What one round delivers: messages, and for each its level and the offset after it there.

    Once it is published, ``offsets`` are those in its note, ``end`` is the log position after it, and ``noted`` the
    number of records in the journal.
    """

    __slots__ = (
        "bytes_left",
        "dropped",
        "due_ms",
        "end",
        "messages",
        "moved",
        "noted",
        "offsets",
        "places",
        "postponed",
    )

    def __init__(self, bytes_left: int) -> None:
        self.bytes_left = bytes_left
        self.messages: list[Message] = []
        self.places: list[tuple[int, int]] = []
        self.due_ms: dict[int, float] = {}  # by the index of the message, for those that are delivered
        self.moved = 0
        self.postponed = 0
        self.dropped = 0
        self.offsets: dict[int, int] = {}
        self.end = 0
        self.noted = 0

    @property
    def has_room(self) -> bool:
        return self.bytes_left > 0 and len(self.messages) < ROUND_MESSAGES


@final
class LevelDelivery:
    """The service that delivers.

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
        self._broker = broker
        self._store = broker.store
        self._plugin = plugin
        self._offsets = offsets
        self._clock = clock
        self._wall_ms = wall_ms
        self._levels = [Level(number, delay_ms) for number, delay_ms in enumerate(delays_ms, 1)]
        self._first = 0  # the level that the next round begins with
        self._wake = trio.Event()
        # The offsets of the newest note that is stored, and of the newest one at all.
        self._stored: dict[int, int] = {}
        self._noted: dict[int, int] = {}
        # Published rounds that are not stored yet, in order.
        self._unsettled: deque[Round] = deque()
        # Where the newest round ends that was published, and the newest one that is stored.
        self._published_end = self._settled_end = 0
        # Records before this log position are about to be removed: messages become timers, and a new note is needed.
        self._released_end = -1
        self._progress = trio.Event()
        # Messages from before the start whose time is in the future were stored before the wall clock was set back.
        self._started_ms = 0.0
        self._started_at = 0
        self.lateness = Lateness()
        self.delivered = 0
        self.moved_to_timers = 0
        self.postponed = 0
        self.undeliverable = 0
        self.unreadable = 0
        self.expired = 0
        self.failed_rounds = 0
        self._is_failing = False

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Deliver until cancelled."""
        store = self._store
        if not self._stored:
            self._restore(self._known())
        task_status.started()
        await self._offsets.adopt()
        self._started_ms, self._started_at = self._clock.now_ms(), store.readable
        self._return_to_log()
        store.queues.on_new.append(self._found_queue)
        store.on_flushed.append(self._flushed)
        self._offsets.keeper = self
        try:
            for queue in list(store.queues.topics.get(SCHEDULE_TOPIC, {}).values()):
                self._found_queue(queue)
            while True:
                began = self._clock.now_ms()
                await self._deliver_or_retry()
                await self._wait_for_next(began + ROUND_MS)
        finally:
            self._offsets.keeper = None
            store.queues.on_new.remove(self._found_queue)
            store.on_flushed.remove(self._flushed)
            for level in self._levels:
                if level.queue is not None and level.queue.watchers is not None:
                    level.queue.watchers.remove(self._became_readable)
                    level.queue = None

    def _known(self) -> Delivered:
        """Return what was delivered before the start; a range beyond the end of a queue would skip what is sent now."""
        queues = self._store.queues.topics.get(SCHEDULE_TOPIC, {})
        ends = {queue_id + 1: self._store.end_offset(queue) for queue_id, queue in queues.items()}
        known = self._offsets.delivered
        return {
            level: union((min(first, ends.get(level, 0)), min(end, ends.get(level, 0))) for first, end in ranges)
            for level, ranges in known.items()
        }

    def _restore(self, known: Delivered) -> None:
        self._stored = {level: low_of(ranges) for level, ranges in known.items()}
        for level in self._levels:
            level.later = later_of(known.get(level.number, ()))
            if level.later:
                text = "a power cut lost messages of level %d that were delivered; delivering them again from %d on"
                log.warning(text, level.number, self._stored[level.number])

    # waiting

    def _found_queue(self, queue: Queue) -> None:
        if queue.topic == SCHEDULE_TOPIC and queue.queue_id < len(self._levels):
            level = self._levels[queue.queue_id]
            level.queue, level.due_ms, level.floor = queue, UNKNOWN, 0
            queue.watchers = [*(queue.watchers or ()), self._became_readable]

    def _became_readable(self, queue: Queue) -> None:
        level = self._levels[queue.queue_id]
        if level.due_ms in (UNKNOWN, NEVER):
            level.due_ms = UNKNOWN
            self._wake.set()

    def wake(self) -> None:
        """Look at the clock again: it jumped."""
        self._wake.set()

    def _flushed(self) -> None:
        if self._unsettled:
            self._settle()
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
        due_ms = min((level.due_ms for level in self._levels if level.queue is not None), default=NEVER)
        if len(self._unsettled) >= ROUNDS_MAX:
            due_ms = NEVER
        wait_s = max(due_ms - self._clock.now_ms(), 0.0) / 1000
        if self._unsettled:
            wait_s = min(wait_s, LOOK_S)
        with trio.move_on_after(wait_s):
            await self._wake.wait()
        self._wake = trio.Event()

    # one round

    async def _deliver_or_retry(self) -> None:
        """Deliver what is due now; after an error, pause and continue after what was stored."""
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
            self.failed_rounds += 1
            self._tell_progress()
            await trio.sleep(RETRY_S)
            self._settle()
            self._return_to_log()

    async def _deliver_due(self) -> bool:
        """Deliver what is due now, in rounds; return False if rounds were undone."""
        config = self._store.config
        if self._store.failed is not None:
            raise self._store.failed
        while self._settle():
            if len(self._unsettled) >= ROUNDS_MAX:
                return True
            made = Round(min(ROUND_BYTES, config.group_room // 2, config.segment_bytes // 4))
            await self._collect(made)
            made.offsets = self._reached()
            if made.offsets == self._noted and self._published_end > self._released_end:
                return True
            self._publish(made)
            await trio.lowlevel.checkpoint()  # the server commits
        return False

    async def _collect(self, made: Round) -> None:
        """Take what is due from the levels, each time beginning with another one, until the round is full."""
        levels, now = self._levels, self._clock.now_ms()
        for place in range(len(levels)):
            level = levels[(self._first + place) % len(levels)]
            if level.queue is not None and level.due_ms <= now and made.has_room:
                await self._collect_level(level, level.queue, made, now)
        self._first = (self._first + 1) % len(levels)

    async def _collect_level(self, level: Level, queue: Queue, made: Round, now: float) -> None:
        count = ROUND_MESSAGES - len(made.messages) if level.due_ms != UNKNOWN else 1
        offset = level.offset
        if offset < queue.first_offset:
            self._note_expired(level, queue.first_offset - offset)
            offset = queue.first_offset
        readable = self._store.readable
        result = self._store.read_near(queue, offset, count, made.bytes_left)
        if result is None:
            result = await self._store.read_far(queue, offset, count, made.bytes_left)
        level.offset = min(offset, result.end_offset)
        level.due_ms = NEVER if offset >= result.end_offset else UNKNOWN
        level.floor = readable if level.due_ms == NEVER else 0
        self._take(level, result, made, now)

    def _take(self, level: Level, result: ReadResult, made: Round, now: float) -> None:
        """Add the messages of *result* that are due, and set the time when the next one is."""
        for piece in result.pieces:
            for record in record_views(piece):
                self._skip_to(level, record.queue_offset)
                if level.later and any(first <= level.offset < end for first, end in level.later):
                    level.offset, level.due_ms = level.offset + 1, UNKNOWN
                    continue
                due_ms = self._due_ms(level, record)
                is_moved = due_ms > now and record.position < self._released_end
                if due_ms > now and not is_moved:
                    level.due_ms, level.floor = due_ms, record.position
                    return
                level.offset += 1
                level.due_ms = now
                if is_moved:
                    self._move(level, record, due_ms, made)
                else:
                    self._add(level, record, due_ms, made)
        self._skip_to(level, result.next_offset)

    def _skip_to(self, level: Level, offset: int) -> None:
        """Skip unreadable records before *offset*; the store has logged them."""
        if offset > level.offset:
            self.unreadable += offset - level.offset
            level.offset, level.due_ms = offset, UNKNOWN

    def _due_ms(self, level: Level, record: RecordView) -> float:
        due_ms = self._clock.stored_ms(record.position, record.store_ms) + level.delay_ms
        if record.position < self._started_at:
            return min(due_ms, self._started_ms + level.delay_ms)
        return due_ms

    # retention

    def floor(self) -> int:
        """Return the position of the oldest record that is still needed, or one before it; `NOTHING` for none."""
        return min((level.floor for level in self._levels if level.queue is not None), default=NOTHING)

    async def release(self, end: int) -> None:
        """Turn pending messages before log position *end* into timers; return when that and a newer note are stored.

        Raises:
          Refused: deliveries fail, because the store refuses writes or cannot be read.
        """
        self._released_end = max(self._released_end, end)
        for level in self._levels:
            if level.floor < end:
                level.due_ms = UNKNOWN
        failed_rounds, wanted = self.failed_rounds, dict[int, int]()
        while not self._is_released(end, wanted):
            progress = self._progress
            self._wake.set()
            await progress.wait()
            if self.failed_rounds != failed_rounds:
                raise Refused(Reason.BUSY, "messages of the delay levels cannot be moved now; the log says why")

    def _is_released(self, end: int, wanted: dict[int, int]) -> bool:
        """Note in *wanted*, by level, an offset with no record before *end* after it; return whether all are stored."""
        levels = [level for level in self._levels if level.queue is not None]
        for level in levels:
            if level.floor >= end:
                wanted.setdefault(level.number, level.offset)
        known = all(level.number in wanted for level in levels)
        stored = all(self._stored.get(level, 0) >= offset for level, offset in wanted.items())
        return known and stored and self._settled_end > self._released_end

    def _move(self, level: Level, record: RecordView, due_ms: float, made: Round) -> None:
        """Make a timer of *record*; those of a level keep their order, whatever the clocks were rounded to."""
        ahead_ms = ceil(due_ms - self._clock.now_ms())
        level.moved_ms = max(self._wall_ms() + ahead_ms, level.moved_ms)
        message = _message_of(record)
        properties = timer_properties(message.properties, level.moved_ms)
        if len(properties) > PROPERTIES_BYTES_MAX:
            made.postponed += 1  # it waits for its delay again: late, but not lost
        else:
            made.moved += 1
            message.topic, message.queue_id, message.properties = TIMER_TOPIC, 0, properties
        self._put(made, level, record, message)

    def _note_expired(self, level: Level, count: int) -> None:
        if not level.offset:
            return  # nothing is known of them: they were probably delivered
        self.expired += count
        text = "retention removed %d delayed messages of level %d before they were due; keep the log for longer"
        log.error(text, count, level.number)

    def _add(self, level: Level, record: RecordView, due_ms: float, made: Round) -> None:
        message = _message_of(record)
        name = find_property(message.properties, REAL_TOPIC).decode("utf-8", "replace")
        topic = self._broker.topics.get(name)
        why = ""
        if not name or name in BROKER_TOPICS:
            why = f"its property REAL_TOPIC is {name!r}"
        elif topic is None:
            why = f"topic[{name}] does not exist any more"
        if why or topic is None:
            made.dropped += 1
            self._say_undeliverable(level, record, why)
            return
        if not topic.perm & WRITE or not topic.write_queues:
            made.postponed += 1
            message.topic, message.queue_id = SCHEDULE_TOPIC, level.number - 1
        else:
            message.topic = name
            message.queue_id = _queue_of(message, max(topic.write_queues, topic.read_queues), topic.write_queues)
            made.due_ms[len(made.messages)] = due_ms
        self._put(made, level, record, message)

    def _put(self, made: Round, level: Level, record: RecordView, message: Message) -> None:
        made.messages.append(message)
        made.places.append((level.number, level.offset))
        made.bytes_left -= record.size

    def _say_undeliverable(self, level: Level, record: RecordView, why: str) -> None:
        text = "delayed message at position %d (message %d of level %d, key %s) is not delivered; %s"
        key = record.property("UNIQ_KEY") or "none"
        log.error(text, record.position, record.queue_offset, level.number, key, why)

    # publishing

    def _reached(self) -> dict[int, int]:
        """Return by level how many messages were delivered, or taken by this round."""
        return {level.number: level.offset for level in self._levels if level.offset > 0}

    def _publish(self, made: Round) -> None:
        """Publish the messages of *made* and its offsets.

        Raises:
          Refused: the store accepts no writes at the moment.
        """
        note = self._offsets.journal, self._note(made.offsets, self._noted)
        self._store.renew_clock()  # an older time would look like an early delivery
        try:
            self._broker.publish_all(made.messages, atomic=True, notes=[note], passed=self._plugin)
        except Refused as refused:
            if self._store.refusal or not made.messages:
                raise
            log.warning("delayed messages are delivered one by one, because one was refused; %s", refused)
            self._publish_each(made)
            self._broker.publish_all([], atomic=True, notes=[note])
        made.end, made.noted = self._store.appended, self._journal_end()
        self._published_end = made.end
        self._noted = made.offsets
        self._unsettled.append(made)

    def _note(self, reached: Offsets, begun: Offsets) -> bytes:
        return self._offsets.note(reached, begun, {level.number: level.later for level in self._levels})

    def _publish_each(self, made: Round) -> None:
        """Publish each message of *made* with a note of its own; drop those that are refused."""
        offsets = dict(self._noted)
        for place, (message, (level, offset)) in enumerate(zip(made.messages, made.places, strict=True)):
            begun = dict(offsets)
            offsets[level] = offset
            note = self._offsets.journal, self._note(offsets, begun)
            try:
                self._broker.publish_all([message], atomic=True, notes=[note], passed=self._plugin)
            except Refused as refused:
                if self._store.refusal:
                    raise
                made.dropped += 1
                made.due_ms.pop(place, None)
                key = message.property("UNIQ_KEY") or "none"
                log.error("delayed message with key %s for topic %s is not delivered; %s", key, message.topic, refused)

    def _journal_end(self) -> int:
        return self._store.queue(self._offsets.journal.topic, 0).next_offset

    def _settle(self) -> bool:
        """Count the rounds that are stored now; return False if rounds were undone, because a commit failed."""
        store, unsettled = self._store, self._unsettled
        if not unsettled:
            return True
        journal_end = self._journal_end()
        while unsettled and unsettled[0].noted <= journal_end and unsettled[0].end <= store.readable:
            made = unsettled.popleft()
            self._stored, self._settled_end = made.offsets, made.end
            self._count(made)
        return not unsettled or unsettled[-1].noted <= journal_end

    def _return_to_log(self) -> None:
        """Continue after what was stored; where nothing is known of a level, at the beginning of its queue."""
        self._unsettled.clear()
        self._noted, self._published_end = self._stored, self._settled_end
        for level in self._levels:
            level.offset, level.due_ms, level.floor = self._stored.get(level.number, 0), UNKNOWN, 0

    def _count(self, made: Round) -> None:
        now = self._clock.now_ms()
        for due_ms in made.due_ms.values():
            self.lateness.add(now - due_ms)
        self.delivered += len(made.due_ms)
        self.moved_to_timers += made.moved
        self.postponed += made.postponed
        self.undeliverable += made.dropped

    def statistics(self) -> dict[str, object]:
        """Return counters, and by level how many messages wait and by how many ms the oldest one is late."""
        now = self._clock.now_ms()
        waiting: dict[str, int] = {}
        for level in self._levels:
            if level.queue is not None:
                waiting[f"pending_{level.number}"] = max(self._store.end_offset(level.queue) - level.offset, 0)
        late = [now - level.due_ms for level in self._levels if level.due_ms not in (UNKNOWN, NEVER)]
        return {
            "pending": sum(waiting.values()),
            **waiting,
            "lag_ms": round(max([0.0, *late])),
            "delivered": self.delivered,
            "moved_to_timers": self.moved_to_timers,
            "postponed": self.postponed,
            "undeliverable": self.undeliverable,
            "unreadable": self.unreadable,
            "expired": self.expired,
            "failed_rounds": self.failed_rounds,
            "clock_jumps": self._clock.jumps,
            **self.lateness.statistics(),
        }


def _message_of(record: RecordView) -> Message:
    """Return the message of *record*, for the topic and the queue that it is stored in."""
    return Message(
        record.topic,
        bytes(record.body),
        bytes(record.properties),
        record.queue_id,
        record.flag,
        record.sys_flag,
        record.born_ms,
        record.born_host,
        record.reconsume_times,
    )


def _queue_of(message: Message, queues: int, write_queues: int) -> int:
    """Return the queue for a due message; another one if the topic has fewer queues now."""
    text = find_property(message.properties, REAL_QUEUE)
    number = int(text) if text.isdigit() and len(text) < 10 else 0
    return number if number < queues else number % write_queues
