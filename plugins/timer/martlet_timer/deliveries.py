"""Delivers messages of the delay levels when they are due.

A round takes what is due from all levels, publishes it as one atomic group with a note of the new offsets, and waits
until the group is durable. So a crash at any moment neither loses nor repeats a delivery, and what becomes due during
an fdatasync is delivered by the next one.

Nothing is lost silently. A message that cannot be delivered now, because its topic is closed, waits for its delay once
more; one that can never be delivered is logged and counted, and stays in the schedule topic until retention removes it.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final

import trio

from martlet.errors import Refused, StoreError
from martlet.message import Message, find_property
from martlet.store.delays import SCHEDULE_TOPIC
from martlet.store.layout import RecordView, record_views
from martlet.store.queues import Queue
from martlet.store.reading import ReadResult
from martlet.tables.topics import BROKER_TOPICS, WRITE

from .lateness import Lateness
from .levels import REAL_QUEUE, REAL_TOPIC
from .offsets import DelayOffsets
from .steady import SteadyClock

if TYPE_CHECKING:
    from martlet.broker import Broker

__all__ = ["Deliveries"]

log = logging.getLogger("martlet.timer")

# The limits of a round, which blocks the event loop for about 2 ms.
ROUND_MESSAGES: Final = 128
ROUND_BYTES: Final = 1024 * 1024
# Rounds begin at least so long after each other, so that messages that become due together are delivered together.
ROUND_MS: Final = 2.0
# How often a round looks whether it was undone, because the disk is full.
LOOK_S: Final = 0.1
# Pause after a failed round.
RETRY_S: Final = 1.0
# The time at which a level is due whose next message was not read yet, and one that has no readable message.
UNKNOWN: Final = 0.0
NEVER: Final = float("inf")


@final
class Level:
    """One delay level and its queue; ``offset`` is the next message to deliver, due at ``due_ms`` at the earliest."""

    __slots__ = ("delay_ms", "due_ms", "number", "offset", "queue")

    def __init__(self, number: int, delay_ms: int) -> None:
        self.number = number
        self.delay_ms = delay_ms
        self.queue: Queue | None = None  # None until there was a message
        self.offset = 0
        self.due_ms = UNKNOWN


@final
class Round:
    """What one round delivers: messages, and for each its level and the offset after it there."""

    __slots__ = ("bytes_left", "dropped", "due_ms", "messages", "places", "postponed")

    def __init__(self, bytes_left: int) -> None:
        self.bytes_left = bytes_left
        self.messages: list[Message] = []
        self.places: list[tuple[int, int]] = []
        self.due_ms: dict[int, float] = {}  # by the index of the message, for those that are not postponed
        self.postponed = 0
        self.dropped = 0

    @property
    def has_room(self) -> bool:
        return self.bytes_left > 0 and len(self.messages) < ROUND_MESSAGES


@final
class Deliveries:
    """The service that delivers; ``plugin`` is the name under which the timer's stages are known."""

    def __init__(
        self, broker: "Broker", plugin: str, delays_ms: Sequence[int], offsets: DelayOffsets, clock: SteadyClock
    ) -> None:
        self._broker = broker
        self._store = broker.store
        self._plugin = plugin
        self._offsets = offsets
        self._clock = clock
        self._levels = [Level(number, delay_ms) for number, delay_ms in enumerate(delays_ms, 1)]
        self._first = 0  # the level that the next round begins with
        self._wake = trio.Event()
        self._flush_awaited = False
        # The offsets of the newest stored note.
        self._stored: dict[int, int] = {}
        # Messages from before the start whose time is in the future were stored before the wall clock was set back.
        self._started_ms = 0.0
        self._started_at = 0
        self.lateness = Lateness()
        self.delivered = 0
        self.postponed = 0
        self.undeliverable = 0
        self.unreadable = 0
        self.expired = 0
        self.failed_rounds = 0

    async def run(self) -> None:
        """Deliver until cancelled."""
        store = self._store
        await self._offsets.adopt()
        self._started_ms, self._started_at = self._clock.now_ms(), store.readable
        if not self._stored:
            self._stored = dict(self._offsets.by_level)
        self._return_to_log()
        store.queues.on_new.append(self._found_queue)
        store.on_flushed.append(self._flushed)
        try:
            for queue in list(store.queues.topics.get(SCHEDULE_TOPIC, {}).values()):
                self._found_queue(queue)
            while True:
                began = self._clock.now_ms()
                await self._deliver_due()
                await self._wait_for_next(began + ROUND_MS)
        finally:
            store.queues.on_new.remove(self._found_queue)
            store.on_flushed.remove(self._flushed)
            for level in self._levels:
                if level.queue is not None and level.queue.watchers is not None:
                    level.queue.watchers.remove(self._became_readable)
                    level.queue = None

    # waiting

    def _found_queue(self, queue: Queue) -> None:
        if queue.topic == SCHEDULE_TOPIC and queue.queue_id < len(self._levels):
            level = self._levels[queue.queue_id]
            level.queue, level.due_ms = queue, UNKNOWN
            queue.watchers = [*(queue.watchers or ()), self._became_readable]

    def _became_readable(self, queue: Queue) -> None:
        level = self._levels[queue.queue_id]
        if level.due_ms in (UNKNOWN, NEVER):
            level.due_ms = UNKNOWN
            self._wake.set()

    def _flushed(self) -> None:
        if self._flush_awaited:
            self._wake.set()

    async def _wait_for_next(self, earliest_ms: float) -> None:
        """Wait until a level is due, but not before *earliest_ms*, or until an empty level has a message."""
        now = self._clock.now_ms()
        if earliest_ms > now:
            await trio.sleep((earliest_ms - now) / 1000)
        due_ms = min((level.due_ms for level in self._levels if level.queue is not None), default=NEVER)
        wait_s = max(due_ms - self._clock.now_ms(), 0.0) / 1000
        with trio.move_on_after(wait_s):
            await self._wake.wait()
        self._wake = trio.Event()

    # one round

    async def _deliver_due(self) -> None:
        """Deliver what is due now, in rounds."""
        config = self._store.config
        while True:
            made = Round(min(ROUND_BYTES, config.group_bytes_max // 2, config.segment_bytes // 4))
            try:
                await self._collect(made)
                offsets = self._reached()
                if offsets == self._stored:
                    return
                stored = await self._publish(made, offsets)
            except (Refused, StoreError, OSError) as error:
                log.error("delayed messages cannot be delivered now, retrying in 1 s; %s", error)
                stored = False
            if stored:
                self._stored = offsets
                self._count(made)
                continue
            self.failed_rounds += 1
            self._return_to_log()
            await trio.sleep(RETRY_S)

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
        result = self._store.read_near(queue, offset, count, made.bytes_left)
        if result is None:
            result = await self._store.read_far(queue, offset, count, made.bytes_left)
        level.offset = min(offset, result.end_offset)
        level.due_ms = NEVER if offset >= result.end_offset else UNKNOWN
        self._take(level, result, made, now)

    def _take(self, level: Level, result: ReadResult, made: Round, now: float) -> None:
        """Add the messages of *result* that are due, and set the time when the next one is."""
        for piece in result.pieces:
            for record in record_views(piece):
                self._skip_to(level, record.queue_offset)
                due_ms = self._due_ms(level, record)
                if due_ms > now:
                    level.due_ms = due_ms
                    return
                level.offset += 1
                level.due_ms = now
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

    async def _publish(self, made: Round, offsets: dict[int, int]) -> bool:
        """Publish the messages of *made* and the new *offsets*; return whether they were stored."""
        note = self._offsets.journal, self._offsets.note(offsets)
        try:
            self._broker.publish_atomic(made.messages, [note], passed=self._plugin)
        except Refused as refused:
            if self._store.refusal or not made.messages:
                raise
            log.warning("delayed messages are delivered one by one, because one was refused; %s", refused)
            self._publish_each(made)
            self._broker.publish_atomic([], [note])
        return await self._wait_stored()

    def _publish_each(self, made: Round) -> None:
        """Publish each message of *made* with a note of its own; drop those that are refused."""
        offsets = dict(self._stored)
        for place, (message, (level, offset)) in enumerate(zip(made.messages, made.places, strict=True)):
            offsets[level] = offset
            note = self._offsets.journal, self._offsets.note(offsets)
            try:
                self._broker.publish_atomic([message], [note], passed=self._plugin)
            except Refused as refused:
                if self._store.refusal:
                    raise
                made.dropped += 1
                made.due_ms.pop(place, None)
                key = message.property("UNIQ_KEY") or "none"
                log.error("delayed message with key %s for topic %s is not delivered; %s", key, message.topic, refused)

    async def _wait_stored(self) -> bool:
        """Wait until what was appended so far is readable; return False if the commit failed."""
        store = self._store
        end, journal = store.appended, store.queue(self._offsets.journal.topic, 0)
        noted = journal.next_offset
        self._flush_awaited = True
        try:
            while store.readable < end and journal.next_offset >= noted:
                with trio.move_on_after(LOOK_S):
                    await self._wake.wait()
                self._wake = trio.Event()
                if store.failed is not None:
                    raise store.failed
        finally:
            self._flush_awaited = False
        return journal.next_offset >= noted

    def _return_to_log(self) -> None:
        """Continue after what was stored; where nothing is known of a level, at the beginning of its queue."""
        for level in self._levels:
            level.offset, level.due_ms = self._stored.get(level.number, 0), UNKNOWN

    def _count(self, made: Round) -> None:
        now = self._clock.now_ms()
        for due_ms in made.due_ms.values():
            self.lateness.add(now - due_ms)
        self.delivered += len(made.due_ms)
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
