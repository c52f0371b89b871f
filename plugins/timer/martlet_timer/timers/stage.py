"""The stage that holds timed messages."""

from collections.abc import Callable
from typing import Final, NamedTuple, final

from martlet.contracts import Stage
from martlet.errors import Reason, Refused
from martlet.message import PROPERTIES_BYTES_MAX, Message, find_property, put_property
from martlet.records.layout import PREPARED
from martlet.tables.topics import BROKER_TOPICS, TIMER_TOPIC
from martlet_timer.properties import (
    CRON,
    DELAY_SEC,
    DELIVER_MS,
    REAL_QUEUE,
    REAL_TOPIC,
    SCHEDULE_KEYS,
    TIME_KEYS,
    UNIQUE_KEY,
)
from martlet_timer.timers.records import DIGITS_MAX, OUT_MS, RECALLED_KEY, out_of
from martlet_timer.timers.repeats import (
    ENDLESS,
    NAME_BYTES,
    Repeats,
    is_repeated,
    read_repeats,
    with_expiry_moved,
    without_schedule,
)

__all__ = ["RepeatLimits", "TimerStage"]

# Maximum size of the properties that delivery adds: two times and a count, with their names.
ROOM_BYTES: Final = 128


@final
class RepeatLimits(NamedTuple):
    """Limits of repeated messages: the shortest period, and the number that may be pending; ``pending`` counts them."""

    period_min_ms: int
    pending_max: int
    pending: Callable[[], int]


@final
class TimerStage:
    """The stage that holds timed messages: turns them into records of `TIMER_TOPIC`.

    Args:
      now_ms: the time.
      horizon_ms: the maximum time from now to a message's due time.
      queue_for: returns the target queue of a message; raises `Refused` if it would be refused there.
      renew_clock: gives the next record a store time of its own, so that no message looks early.
      limits: limits of repeated messages.
      new_key: returns a unique key, for messages without one.
    """

    def __init__(
        self,
        now_ms: Callable[[], int],
        horizon_ms: int,
        queue_for: Callable[[Message], int],
        renew_clock: Callable[[], None],
        limits: RepeatLimits,
        new_key: Callable[[], str],
    ) -> None:
        self._now_ms = now_ms
        self._horizon_ms = horizon_ms
        self._queue_for = queue_for
        self._renew_clock = renew_clock
        self._limits = limits
        self._new_key = new_key

    def stage(self) -> Stage:
        return Stage(self.hold, tuple(key.decode() for key in (*TIME_KEYS, *SCHEDULE_KEYS, RECALLED_KEY)))

    def hold(self, message: Message) -> Message:
        """Return *message*, which becomes a record of `TIMER_TOPIC` if it asks for a time in the future.

        Raises:
          Refused: the requested time is not valid, or too far in the future.
        """
        properties = message.properties
        if message.topic in BROKER_TOPICS or message.sys_flag & PREPARED:
            return message  # held already; a half message, or the record that ends one
        if find_property(properties, RECALLED_KEY):
            text = f"property {RECALLED_KEY.decode()!r} is for the broker only; recall a message by its handle"
            raise Refused(Reason.ILLEGAL, text)
        if find_property(properties, OUT_MS):
            return message  # the message was delivered before, and is sent again
        now_ms = self._now_ms()
        if any(find_property(properties, key) for key in SCHEDULE_KEYS):
            due_ms = self._schedule(message, now_ms)
        else:
            due_ms = self._due_ms(properties, now_ms)
        if due_ms > now_ms:
            return self._held(message, due_ms)
        self._renew_clock()
        return message

    def _schedule(self, message: Message, now_ms: int) -> int:
        """Return the first due time of *message*, and set the properties that each repeated message has.

        Raises:
          Refused: the schedule is not valid or too dense, or there are too many repeated messages.
        """
        properties = message.properties
        has_time = any(find_property(properties, key) for key in TIME_KEYS)
        delay_ms = max(self._due_ms(properties, now_ms) - now_ms, 0) if has_time else 0
        try:
            repeats = read_repeats(properties, delay_ms)
            due_ms = repeats.first_ms(now_ms)
        except ValueError as error:
            raise Refused(Reason.ILLEGAL, str(error)) from error
        if max(repeats.wait_ms, repeats.period_ms) > self._horizon_ms:
            text = f"period {repeats.period_ms} is too long; the maximum is {self._horizon_ms} ms"
            raise Refused(Reason.ILLEGAL, f"{text} (timer.delay_max_s = {self._horizon_ms // 1000})")
        if repeats.is_once:
            properties = without_schedule(properties)
        else:
            self._check_repeats(repeats, properties)
            if not find_property(properties, UNIQUE_KEY):
                properties = put_property(properties, UNIQUE_KEY, self._new_key().encode())
        message.properties = with_expiry_moved(properties, due_ms - now_ms)
        return due_ms

    def _check_repeats(self, repeats: Repeats, properties: bytes) -> None:
        """Raise `Refused` if *repeats* are not possible, or too many."""
        limits = self._limits
        if repeats.repeat and repeats.period_ms < limits.period_min_ms:
            text = f"period {repeats.period_ms} of a repeated message is too short; the minimum is"
            raise Refused(Reason.ILLEGAL, f"{text} {limits.period_min_ms} ms (timer.period_min_ms)")
        if repeats.cron is not None:
            if find_property(properties, DELIVER_MS):
                text = f"message has both {CRON.decode()} and {DELIVER_MS.decode()}; use one of them"
                raise Refused(Reason.ILLEGAL, text)
            shortest_ms = repeats.cron.shortest_ms()
            series_ms = repeats.wait_ms + repeats.repeat * repeats.period_ms if repeats.repeat else 0
            if repeats.repeat == ENDLESS or series_ms >= shortest_ms:
                takes = "has no end" if repeats.repeat == ENDLESS else f"takes {series_ms} ms"
                text = f"the series of a schedule {takes}, and the next one can begin after {shortest_ms} ms"
                raise Refused(Reason.ILLEGAL, f"{text}; use fewer repetitions, or a shorter period")
        if limits.pending() >= limits.pending_max:
            text = f"there are {limits.pending_max} repeated messages; timer.schedules_max allows no more"
            raise Refused(Reason.BUSY, f"{text}, end others first")

    def _due_ms(self, properties: bytes, now_ms: int) -> int:
        key, value = next((key, value) for key in TIME_KEYS if (value := find_property(properties, key)))
        digits = value[1:] if value[:1] in (b"-", b"+") else value
        if not digits.isdigit() or len(digits) > DIGITS_MAX:
            problem = "too large" if digits.isdigit() else "not a number"
            text = f"property {key.decode()} {value[:64].decode('utf-8', 'replace')!r} is {problem}"
            raise Refused(Reason.ILLEGAL, f"{text}; use seconds for {DELAY_SEC.decode()}, else milliseconds")
        amount = int(value)
        due_ms = amount if key == DELIVER_MS else now_ms + amount * (1000 if key == DELAY_SEC else 1)
        if due_ms > now_ms + self._horizon_ms:
            text = f"property {key.decode()} {amount} is {due_ms - now_ms} ms ahead"
            limit = f"the maximum is {self._horizon_ms} ms (timer.delay_max_s = {self._horizon_ms // 1000})"
            raise Refused(Reason.ILLEGAL, f"timer message illegal: {text}; {limit}")
        return due_ms

    def _held(self, message: Message, due_ms: int) -> Message:
        """Return *message* for the topic of timers, with its own topic and queue, and *due_ms*, in its properties."""
        queue_id = self._queue_for(message)
        properties = put_property(message.properties, OUT_MS, b"%d" % out_of(due_ms))
        properties = put_property(properties, REAL_TOPIC, message.topic.encode())
        properties = put_property(properties, REAL_QUEUE, b"%d" % queue_id)
        room = ROOM_BYTES + (NAME_BYTES if is_repeated(properties) else 0)
        if len(properties) > PROPERTIES_BYTES_MAX - room:
            text = f"message properties are {len(properties)} bytes with those of its timer"
            raise Refused(Reason.ILLEGAL, f"{text}; the maximum is {PROPERTIES_BYTES_MAX - room}")
        message.properties = properties
        message.topic, message.queue_id = TIMER_TOPIC, 0
        return message
