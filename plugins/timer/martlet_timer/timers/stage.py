"""The stage that holds timed messages."""

from collections.abc import Callable
from typing import Final, final

from martlet.contracts import Stage
from martlet.errors import Reason, Refused
from martlet.message import PROPERTIES_BYTES_MAX, Message, find_property, put_property
from martlet.records.layout import PREPARED
from martlet.tables.topics import BROKER_TOPICS, TIMER_TOPIC
from martlet_timer.properties import DELAY_SEC, DELIVER_MS, REAL_QUEUE, REAL_TOPIC, TIME_KEYS

from .records import DIGITS_MAX, OUT_MS, RECALLED_KEY, out_of

__all__ = ["TimerStage"]

# What delivery adds at most: two times and a count, with their names.
ROOM_BYTES: Final = 128


@final
class TimerStage:
    """The stage that holds timed messages: it turns them into records of `TIMER_TOPIC`.

    Args:
      now_ms: the time.
      horizon_ms: how far in the future messages may be due.
      queue_for: returns the queue in which a message would be stored; raises `Refused` if it would be refused.
      renew_clock: gives the next record a store time of its own, so that no message looks early.
    """

    def __init__(
        self,
        now_ms: Callable[[], int],
        horizon_ms: int,
        queue_for: Callable[[Message], int],
        renew_clock: Callable[[], None],
    ) -> None:
        self._now_ms = now_ms
        self._horizon_ms = horizon_ms
        self._queue_for = queue_for
        self._renew_clock = renew_clock

    def stage(self) -> Stage:
        return Stage(self.hold, (*(key.decode() for key in TIME_KEYS), RECALLED_KEY.decode()))

    def hold(self, message: Message) -> Message:
        """Return *message*, which becomes a record of `TIMER_TOPIC` if it asks for a time in the future.

        Raises:
          Refused: it asks for no valid time, or for one too far in the future.
        """
        properties = message.properties
        if message.topic in BROKER_TOPICS or message.sys_flag & PREPARED:
            return message  # held already; a half message, or the record that ends one
        if find_property(properties, RECALLED_KEY):
            text = f"property {RECALLED_KEY.decode()!r} is for the broker only; recall a message by its handle"
            raise Refused(Reason.ILLEGAL, text)
        if find_property(properties, OUT_MS):
            return message  # it was delivered before, and is sent again
        now_ms = self._now_ms()
        due_ms = self._due_ms(properties, now_ms)
        if due_ms > now_ms:
            return self._held(message, due_ms)
        self._renew_clock()
        return message

    def _due_ms(self, properties: bytes, now_ms: int) -> int:
        key, value = next((key, value) for key in TIME_KEYS if (value := find_property(properties, key)))
        digits = value[1:] if value[:1] in (b"-", b"+") else value
        if not digits.isdigit() or len(digits) > DIGITS_MAX:
            what = "too large" if digits.isdigit() else "not a number"
            text = f"property {key.decode()} {value[:64].decode('utf-8', 'replace')!r} is {what}"
            raise Refused(Reason.ILLEGAL, f"{text}; use seconds for {DELAY_SEC.decode()}, else milliseconds")
        given = int(value)
        due_ms = given if key == DELIVER_MS else now_ms + given * (1000 if key == DELAY_SEC else 1)
        if due_ms > now_ms + self._horizon_ms:
            text = f"property {key.decode()} {given} is {due_ms - now_ms} ms ahead"
            limit = f"the maximum is {self._horizon_ms} ms (timer.delay_max_s = {self._horizon_ms // 1000})"
            raise Refused(Reason.ILLEGAL, f"timer message illegal: {text}; {limit}")
        return due_ms

    def _held(self, message: Message, due_ms: int) -> Message:
        queue_id = self._queue_for(message)
        properties = put_property(message.properties, OUT_MS, b"%d" % out_of(due_ms))
        properties = put_property(properties, REAL_TOPIC, message.topic.encode())
        properties = put_property(properties, REAL_QUEUE, b"%d" % queue_id)
        if len(properties) > PROPERTIES_BYTES_MAX - ROOM_BYTES:
            text = f"message properties are {len(properties)} bytes with those of its timer"
            raise Refused(Reason.ILLEGAL, f"{text}; the maximum is {PROPERTIES_BYTES_MAX - ROOM_BYTES}")
        message.properties = properties
        message.topic, message.queue_id = TIMER_TOPIC, 0
        return message
