"""Outcomes of due timers: delivered, postponed, or dropped because their topic is gone; and their counters."""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Final, final

from martlet.broker import Broker
from martlet.errors import Reason, Refused
from martlet.message import Message, Record, find_property
from martlet_timer.lateness import Lateness
from martlet_timer.properties import REAL_TOPIC
from martlet_timer.timers.damped_clock import DampedClock
from martlet_timer.timers.journal_writer import TimerJournalWriter
from martlet_timer.timers.records import moved_copy
from martlet_timer.timers.repeats import DueOutcome, outcome_of
from martlet_timer.timers.schedule import Timer
from martlet_timer.timers.state import TimerState

__all__ = ["POSTPONE_MS", "DueTimer", "TimerOutcomes"]

log = logging.getLogger("martlet.timer")

# Pause before a message is tried again that was refused by itself, or cannot be read because the disk fails.
POSTPONE_MS: Final = 60_000
# Deleted topics for which dropped messages are counted.
GONE_TOPICS_MAX: Final = 1000

DueTimer = tuple[Timer, Record]


@final
class TimerOutcomes:
    """Publishes messages that are due.

    Attributes:
      lateness: of deliveries, when consumers can read them.
      delivered, postponed, dropped: messages since the start; dropped ones had no topic any more.
    """

    def __init__(
        self, broker: Broker, writer: TimerJournalWriter, timers: TimerState, clock: DampedClock, period_min_ms: int
    ) -> None:
        self._broker = broker
        self._store = broker.store
        self._writer = writer
        self._timers = timers
        self._clock = clock
        self._period_min_ms = period_min_ms
        self._gone_topics: dict[str, int] = {}
        # Of each delivery that is not readable yet, its end in the log and the due times of its timers.
        self._published: deque[tuple[int, list[int]]] = deque()
        self.lateness = Lateness()
        self.delivered = self.postponed = self.dropped = 0

    def publish(self, due_timers: list[DueTimer], unsettled_timers: dict[int, Timer]) -> int:
        """Deliver the messages of *due_timers*, and remove stored timers from *unsettled_timers*.

        Raises:
          Refused: the store refuses writes.
          StoreFailed: the disk failed.
        """
        now_ms = self._clock.now_ms()
        outcomes = [outcome_of(record, timer[0], now_ms, self._period_min_ms) for timer, record in due_timers]
        timers = [timer for timer, _ in due_timers]
        try:
            end = self._append_outcomes(outcomes, timers)
        except Refused as refused:
            if self._store.admission.refusal:
                raise
            if len(due_timers) == 1:
                end = self._publish_odd(due_timers[0], outcomes[0], refused)
            else:
                middle = len(due_timers) // 2
                self.publish(due_timers[:middle], unsettled_timers)
                return self.publish(due_timers[middle:], unsettled_timers)
        for _, position in timers:
            unsettled_timers.pop(position)
        return end

    def _append_outcomes(self, outcomes: Sequence[DueOutcome], timers: Sequence[Timer]) -> int:
        """Store the outcomes of the due *timers*.

        Raises:
          Refused: as in `TimerJournalWriter.append`, or the topic of a series was deleted.
          StoreFailed: the disk failed.
        """
        messages: list[Message] = []
        delivered_timers: list[Timer] = []
        for outcome, timer in zip(outcomes, timers, strict=True):
            if outcome.delivery is not None:
                messages.append(outcome.delivery)
                delivered_timers.append(timer)
            else:
                self._check_topic(outcome.timers[0])
            messages += outcome.timers
        end = self._writer.append(messages, timers, [outcome.ended for outcome in outcomes if outcome.ended])
        self._note_published(end, delivered_timers)
        return end

    def _check_topic(self, timer: Message) -> None:
        """Raise `Refused` if the topic of *timer*'s message was deleted."""
        topic = _topic_of(timer.properties)
        if self._broker.topics.get(topic) is None:
            raise Refused(Reason.NO_TOPIC, f"topic[{topic}] does not exist; create it, and send the message again")

    def _publish_odd(self, due_timer: DueTimer, outcome: DueOutcome, refusal: Refused) -> int:
        """Deliver one message that was refused with *refusal*: to another queue, later, or not at all."""
        timer, record = due_timer
        topic = _topic_of(record.properties)
        if refusal.reason == Reason.NO_TOPIC:
            return self._drop_without_topic(timer, topic)
        message = outcome.delivery
        if message is not None and message.queue_id >= 0 and self._queue_is_gone(message):
            message.queue_id = -1
            try:
                return self._append_outcomes([outcome], [timer])
            except Refused as second_refusal:
                if self._store.admission.refusal:
                    raise
                refusal = second_refusal
        later_ms = self._clock.now_ms() + POSTPONE_MS
        end = self._writer.append([moved_copy(record, later_ms)], [timer])
        self.postponed += 1
        text = "timer due at %d ms for topic[%s] is refused, trying again in a minute; %s"
        log.warning(text, timer[0], topic, refusal)
        return end

    def _queue_is_gone(self, message: Message) -> bool:
        topic = self._broker.topics.get(message.topic)
        return topic is not None and message.queue_id >= topic.write_queues

    def _drop_without_topic(self, timer: Timer, topic: str) -> int:
        """Store that a timer is gone because its topic was deleted: a deleted topic is not created again."""
        key = self._timers.repeated.key_at(timer[1])
        end = self._writer.append([], [timer], [key] if key else [])
        self.dropped += 1
        if topic not in self._gone_topics and len(self._gone_topics) < GONE_TOPICS_MAX:
            log.warning("timers for topic[%s] are dropped when they are due, because the topic was deleted", topic)
            self._gone_topics[topic] = 0
        if topic in self._gone_topics:
            self._gone_topics[topic] += 1
        return end

    def _note_published(self, end: int, timers: list[Timer]) -> None:
        self._published.append((end, [due_ms for due_ms, _ in timers]))
        self.count_readable()  # with async flush the commit was sufficient

    def count_readable(self) -> None:
        """Count the deliveries that consumers can read now."""
        if not self._published:
            return
        now_ms, readable = self._clock.now_ms(), self._store.readable
        while self._published and self._published[0][0] <= readable:
            _, dues_ms = self._published.popleft()
            self.delivered += len(dues_ms)
            for due_ms in dues_ms:
                self.lateness.add(now_ms - due_ms)


def _topic_of(properties: bytes) -> str:
    """Return the target topic of a timer with *properties*."""
    return find_property(properties, REAL_TOPIC).decode("utf-8", "replace")
