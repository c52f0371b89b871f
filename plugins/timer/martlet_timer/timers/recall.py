"""Recalls timers before they are due.

A timer is found by the time and the hash of topic and unique key in its handle, and recalled only if its record has
this topic and key. A client may recall only messages of topics to which it may publish: the protocol asks the gate.

A recall also writes RocketMQ's records (RecallMessageProcessor), so that RocketMQ, which does not know Martlet's notes,
recalls the message as well if it reads this log. One record has the key of RocketMQ 5.5, one that of later versions,
which contains the topic.

A message that is delivered several times ends with the recall of its pending timer, or by its name. The latter also
ends a timer that is being delivered: its delivery is before the end in the log, or does not happen.
"""

from typing import Final, final

from martlet.broker import Broker
from martlet.errors import Reason, Refused
from martlet.message import Message, Record, encode_properties, find_property
from martlet.tables.topics import TIMER_TOPIC
from martlet_timer.properties import REAL_TOPIC, UNIQUE_KEY
from martlet_timer.timers.damped_clock import DampedClock
from martlet_timer.timers.delivery import TimerDelivery
from martlet_timer.timers.journal_writer import TimerJournalWriter
from martlet_timer.timers.records import OUT_MS, RECALLED_KEY, delete_key, due_of, key_of, out_of
from martlet_timer.timers.repeats import SERIES
from martlet_timer.timers.schedule import Timer
from martlet_timer.timers.state import TimerState

__all__ = ["Recalls"]

READ_BYTES: Final = 1 << 20


@final
class Recalls:
    """Recalls *timers* of *broker*."""

    def __init__(
        self,
        broker: Broker,
        timers: TimerState,
        delivery: TimerDelivery,
        writer: TimerJournalWriter,
        clock: DampedClock,
    ) -> None:
        self._broker = broker
        self._timers = timers
        self._delivery = delivery
        self._writer = writer
        self._clock = clock
        self.recalled = 0

    async def recall(self, topic: str, out_ms: int, unique: str, group: str = "") -> int:
        """Recall the message of *topic* with this unique key and TIMER_OUT_MS; return the recall's end in the log.

        Returns 0 if no such message is pending: it was recalled already, or never existed.

        Raises:
          Refused: the timer is due already (Reason.NOT_FOUND), is busy for too long (Reason.BUSY), has an unreadable
            record (Reason.UNAVAILABLE), or the store refuses writes.
          StoreFailed: the disk failed.
        """
        due_ms = due_of(out_ms)
        # A message whose answer has just been sent may not have reached the state yet.
        await self._broker.projections.wait_applied(self._timers)
        timers = await self._take(topic, due_ms, unique)
        if not timers:
            return 0
        try:
            key = delete_key(topic, unique)
            ended = [key] if key in self._timers.repeated.newest else []
            end = self._writer.append(self._records_of(topic, out_ms, unique, group), timers, ended)
        except BaseException:
            self._delivery.give_back(timers)
            raise
        self.recalled += len(timers)
        return end

    def end_repeated(self, topic: str, unique: str) -> int:
        """End the repeated message of *topic* whose copies are named TOPIC:UNIQUE; return the log position after it.

        Returns 0 if there is no such message: it has ended already, or never existed.

        Raises:
          Refused: the store refuses writes.
          StoreFailed: the disk failed.
        """
        newest, schedule = self._timers.repeated.newest, self._timers.schedule
        uniques = {delete_key(topic, each): each for each in (unique, unique + SERIES)}
        timers = {each: newest[key] for key, each in uniques.items() if key in newest}
        if not timers:
            return 0
        records = [
            record
            for each, (due_ms, _) in timers.items()
            for record in self._records_of(topic, out_of(due_ms), each, "")
        ]
        held_timers = [timer for timer in timers.values() if schedule.hold(timer)]
        try:
            end = self._writer.append(records, held_timers, list(uniques))
        except BaseException:
            self._delivery.give_back(held_timers)
            raise
        self._timers.repeated.ending.update(uniques)
        self.recalled += 1
        return end

    async def _take(self, topic: str, due_ms: int, unique: str) -> list[Timer]:
        """Take the timers with this key, several if a producer has resent a message; wait until all are free."""
        schedule = self._timers.schedule
        while due_ms > self._clock.now_ms():
            timers = await self._find(topic, due_ms, unique)
            held_timers = [timer for timer in timers if schedule.hold(timer)]
            if len(held_timers) == len(timers):
                return held_timers
            self._delivery.give_back(held_timers)
            for timer in timers:
                await self._delivery.wait_free(timer)
        text = f"message {unique!r} of topic[{topic}] was due at {due_ms} ms and cannot be recalled any more"
        raise Refused(Reason.NOT_FOUND, f"{text}; it is delivered already")

    async def _find(self, topic: str, due_ms: int, unique: str) -> list[Timer]:
        """Return the pending timers with this key."""
        positions = await self._broker.turns.finish(self._timers.pending.with_key(due_ms, key_of(topic, unique)))
        found: list[Timer] = []
        for position in positions:
            (record,) = await self._delivery.reader.read([position], READ_BYTES)
            if isinstance(record, OSError):
                text = f"record at position {position} cannot be read; {record.strerror or record}, check the disk"
                raise Refused(Reason.UNAVAILABLE, text) from record
            if isinstance(record, Record) and _is(record, topic, unique):
                found.append((due_ms, position))
        return found

    def _records_of(self, topic: str, out_ms: int, unique: str, group: str) -> list[Message]:
        keys = delete_key(topic, unique), unique
        return [self._record_of(topic, out_ms, unique, group, key) for key in keys]

    def _record_of(self, topic: str, out_ms: int, unique: str, group: str, key: str) -> Message:
        properties = {
            "TAGS": "_RECALL_TAG_",
            RECALLED_KEY.decode(): key,
            UNIQUE_KEY.decode(): unique,
            "TIMER_DELIVER_MS": str(out_ms + 1),
            "PGROUP": group,
            OUT_MS.decode(): str(out_ms),
            REAL_TOPIC.decode(): topic,
            "REAL_QID": "0",
        }
        host, now_ms = self._broker.store.writer.store_host, self._broker.clock.now_ms()
        return Message(TIMER_TOPIC, b"0", encode_properties(properties), 0, born_ms=now_ms, born_host=host)


def _is(record: Record, topic: str, unique: str) -> bool:
    return (
        find_property(record.properties, REAL_TOPIC) == topic.encode()
        and find_property(record.properties, UNIQUE_KEY) == unique.encode()
    )
