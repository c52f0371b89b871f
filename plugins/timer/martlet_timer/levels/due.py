"""The delay levels and their queues: collects due messages, and finds their topics and queues.

No message is lost silently. One that cannot be delivered now, because its topic is closed, waits for its delay once
more. One that can never be delivered is logged and counted, and stays in the schedule topic until retention removes it.

Before retention removes a segment, its pending messages become timers that are due at the same time. Appended again to
the queue of their level, they would wait for later messages before them, in RocketMQ too. A timer keeps its time in
either broker.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Final, final

from martlet.message import PROPERTIES_BYTES_MAX, Message, find_property
from martlet.records.layout import RecordView, record_views
from martlet.state import NOTHING
from martlet.store.format.delays import SCHEDULE_TOPIC
from martlet.store.queues.queues import Queue
from martlet.store.read.reading import ReadResult
from martlet.tables.topics import BROKER_TOPICS, TIMER_TOPIC, WRITE
from martlet_timer.levels.delay_clock import DelayClock
from martlet_timer.levels.journal_codec import Delivered, Ranges, later_of, low_of
from martlet_timer.levels.rounds import ROUND_MESSAGES, Round
from martlet_timer.properties import REAL_QUEUE, REAL_TOPIC
from martlet_timer.timers.records import timer_properties

if TYPE_CHECKING:
    from martlet.broker import Broker

__all__ = ["NEVER", "DelayLevels"]

log = logging.getLogger("martlet.timer")

# Due time of a level whose next message was not read yet, and of a level without a readable message.
UNKNOWN: Final = 0.0
NEVER: Final = float("inf")


@final
class Level:
    """One delay level and its queue; ``offset`` is the next message to deliver, due at ``due_ms`` at the earliest.

    Its records before the log position ``floor`` come before ``offset``. The messages in ``later`` were delivered
    before the start, by rounds that survived a power cut which lost earlier rounds.
    """

    __slots__ = ("delay_ms", "due_ms", "floor", "later", "moved_ms", "number", "offset", "queue")

    def __init__(self, number: int, delay_ms: int) -> None:
        self.number = number
        self.delay_ms = delay_ms
        self.queue: Queue | None = None  # None until there is a message
        self.offset = 0
        self.due_ms = UNKNOWN
        self.floor = 0
        self.later: Ranges = ()
        self.moved_ms = 0  # due time of the last message that became a timer


@final
class DelayLevels:
    """All levels; ``unreadable`` and ``expired`` count the messages that are lost.

    Records before the log position ``released_end`` are about to be removed: their messages become timers.

    Args:
      wall_ms: the time that timers follow.
      wake: called when a level without a message gets one.
    """

    def __init__(
        self,
        broker: "Broker",
        delays_ms: Sequence[int],
        clock: DelayClock,
        wall_ms: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        self._broker = broker
        self._store = broker.store
        self._clock = clock
        self._wall_ms = wall_ms
        self._wake = wake
        self._levels = [Level(number, delay_ms) for number, delay_ms in enumerate(delays_ms, 1)]
        self._first = 0  # the first level of the next round
        self.released_end = -1
        # Messages from before the start whose time is in the future were stored before the wall clock was set back.
        self._started_ms = 0.0
        self._started_at = 0
        self.unreadable = 0
        self.expired = 0

    # the queues

    def restore(self, delivered: Delivered) -> None:
        """Skip messages that were delivered before the start although earlier ones were not."""
        for level in self._levels:
            ranges = delivered.get(level.number, ())
            level.later = later_of(ranges)
            if level.later:
                text = "a power cut lost messages of level %d that were delivered; delivering them again from %d on"
                log.warning(text, level.number, low_of(ranges))

    def open(self) -> None:
        """Follow the current and later queues of the levels, until `close`."""
        self._started_ms, self._started_at = self._clock.now_ms(), self._store.readable
        self._store.queues.on_new.append(self._follow_queue)
        for queue in list(self._store.queues.topics.get(SCHEDULE_TOPIC, {}).values()):
            self._follow_queue(queue)

    def close(self) -> None:
        self._store.queues.on_new.remove(self._follow_queue)
        for level in self._levels:
            if level.queue is not None and level.queue.watchers is not None:
                level.queue.watchers.remove(self._wake_level)
                level.queue = None

    def _follow_queue(self, queue: Queue) -> None:
        if queue.topic == SCHEDULE_TOPIC and queue.queue_id < len(self._levels):
            level = self._levels[queue.queue_id]
            level.queue, level.due_ms, level.floor = queue, UNKNOWN, 0
            queue.watchers = [*(queue.watchers or ()), self._wake_level]

    def _wake_level(self, queue: Queue) -> None:
        level = self._levels[queue.queue_id]
        if level.due_ms in (UNKNOWN, NEVER):
            level.due_ms = UNKNOWN
            self._wake()

    def return_to(self, offsets: Mapping[int, int]) -> None:
        """Continue at *offsets*; a level without an offset continues at the beginning of its queue."""
        for level in self._levels:
            level.offset, level.due_ms, level.floor = offsets.get(level.number, 0), UNKNOWN, 0

    def offsets(self) -> dict[int, int]:
        """Return, by level, the number of messages that were delivered, or taken by this round."""
        return {level.number: level.offset for level in self._levels if level.offset > 0}

    def later_ranges(self) -> dict[int, Ranges]:
        """Return by level the ranges that were delivered before the start although earlier messages were not."""
        return {level.number: level.later for level in self._levels}

    def next_due_ms(self) -> float:
        """Return the time at which the next message may be due; `NEVER` if there is none."""
        return min((level.due_ms for level in self._levels if level.queue is not None), default=NEVER)

    # due messages

    async def collect(self, new_round: Round) -> None:
        """Take due messages from the levels until the round is full; each call begins with another level."""
        levels, now = self._levels, self._clock.now_ms()
        for place in range(len(levels)):
            level = levels[(self._first + place) % len(levels)]
            if level.queue is not None and level.due_ms <= now and new_round.has_room:
                await self._collect_level(level, level.queue, new_round, now)
        self._first = (self._first + 1) % len(levels)

    async def _collect_level(self, level: Level, queue: Queue, new_round: Round, now: float) -> None:
        count = ROUND_MESSAGES - len(new_round.messages) if level.due_ms != UNKNOWN else 1
        offset = level.offset
        if offset < queue.first_offset:
            self._note_expired(level, queue.first_offset - offset)
            offset = queue.first_offset
        readable = self._store.readable
        result = self._store.readers.read_near(queue, offset, count, new_round.bytes_left)
        if result is None:
            result = await self._store.readers.read_far(queue, offset, count, new_round.bytes_left)
        level.offset = min(offset, result.end_offset)
        level.due_ms = NEVER if offset >= result.end_offset else UNKNOWN
        level.floor = readable if level.due_ms == NEVER else 0
        self._take_due(level, result, new_round, now)

    def _take_due(self, level: Level, result: ReadResult, new_round: Round, now: float) -> None:
        """Add the due messages of *result*, and set the due time of the next one."""
        for piece in result.pieces:
            for record in record_views(piece):
                self._skip_to(level, record.queue_offset)
                if level.later and any(first <= level.offset < end for first, end in level.later):
                    level.offset, level.due_ms = level.offset + 1, UNKNOWN
                    continue
                due_ms = self._due_ms(level, record)
                is_moved = due_ms > now and record.position < self.released_end
                if due_ms > now and not is_moved:
                    level.due_ms, level.floor = due_ms, record.position
                    return
                level.offset += 1
                level.due_ms = now
                if is_moved:
                    self._add_timer(level, record, due_ms, new_round)
                else:
                    self._add_due_message(level, record, due_ms, new_round)
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
            return  # no offset is known: they were probably delivered
        self.expired += count
        text = "retention removed %d delayed messages of level %d before they were due; keep the log for longer"
        log.error(text, count, level.number)

    def _add_due_message(self, level: Level, record: RecordView, due_ms: float, new_round: Round) -> None:
        message = _message_of(record)
        name = find_property(message.properties, REAL_TOPIC).decode("utf-8", "replace")
        topic = self._broker.topics.get(name)
        why = ""
        if not name or name in BROKER_TOPICS:
            why = f"its property REAL_TOPIC is {name!r}"
        elif topic is None:
            why = f"topic[{name}] does not exist any more"
        if why or topic is None:
            new_round.dropped += 1
            self._log_undeliverable(level, record, why)
            return
        if not topic.perm & WRITE or not topic.write_queues:
            new_round.postponed += 1
            message.topic, message.queue_id = SCHEDULE_TOPIC, level.number - 1
        else:
            message.topic = name
            message.queue_id = _queue_of(message, max(topic.write_queues, topic.read_queues), topic.write_queues)
            new_round.due_ms[len(new_round.messages)] = due_ms
        self._add_to_round(new_round, level, record, message)

    def _add_timer(self, level: Level, record: RecordView, due_ms: float, new_round: Round) -> None:
        """Make a timer of *record*; timers of a level keep their order despite the rounding of clocks."""
        ahead_ms = ceil(due_ms - self._clock.now_ms())
        level.moved_ms = max(self._wall_ms() + ahead_ms, level.moved_ms)
        message = _message_of(record)
        properties = timer_properties(message.properties, level.moved_ms)
        if len(properties) > PROPERTIES_BYTES_MAX:
            new_round.postponed += 1  # the message waits for its delay again: late, but not lost
        else:
            new_round.moved += 1
            message.topic, message.queue_id, message.properties = TIMER_TOPIC, 0, properties
        self._add_to_round(new_round, level, record, message)

    def _add_to_round(self, new_round: Round, level: Level, record: RecordView, message: Message) -> None:
        new_round.messages.append(message)
        new_round.places.append((level.number, level.offset))
        new_round.bytes_left -= record.size

    def _log_undeliverable(self, level: Level, record: RecordView, why: str) -> None:
        text = "delayed message at position %d (message %d of level %d, key %s) is not delivered; %s"
        key = record.property("UNIQ_KEY") or "none"
        log.error(text, record.position, record.queue_offset, level.number, key, why)

    # retention

    def floor(self) -> int:
        """Return the position of the oldest record that is still needed, or one before it; `NOTHING` for none."""
        return min((level.floor for level in self._levels if level.queue is not None), default=NOTHING)

    def release(self, end: int) -> None:
        """Let `collect` turn pending messages before log position *end* into timers."""
        self.released_end = max(self.released_end, end)
        for level in self._levels:
            if level.floor < end:
                level.due_ms = UNKNOWN

    def is_released(self, end: int, offsets: dict[int, int]) -> bool:
        """Set in *offsets*, by level, an offset after all records before *end*; return whether all are known."""
        levels = [level for level in self._levels if level.queue is not None]
        for level in levels:
            if level.floor >= end:
                offsets.setdefault(level.number, level.offset)
        return all(level.number in offsets for level in levels)

    def statistics(self) -> dict[str, object]:
        """Return, by level, the number of waiting messages, and the lateness of the oldest one in ms."""
        now = self._clock.now_ms()
        pending_counts: dict[str, int] = {}
        for level in self._levels:
            if level.queue is not None:
                pending_counts[f"pending_{level.number}"] = max(
                    self._store.readers.end_offset(level.queue) - level.offset, 0
                )
        latenesses = [now - level.due_ms for level in self._levels if level.due_ms not in (UNKNOWN, NEVER)]
        return {
            "pending": sum(pending_counts.values()),
            **pending_counts,
            "lag_ms": round(max([0.0, *latenesses])),
            "unreadable": self.unreadable,
            "expired": self.expired,
        }


def _message_of(record: RecordView) -> Message:
    """Return the message of *record*, in its current topic and queue."""
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
