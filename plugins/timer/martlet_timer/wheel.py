"""Timed messages as records of RocketMQ's timer topic, so that either broker can deliver them.

A client asks for a time with one of three properties (`HookUtils.transformTimerMessage`). The message is stored in the
topic `TIMER_TOPIC` with its own topic and queue in properties, and with TIMER_OUT_MS. RocketMQ delivers when the second
of TIMER_OUT_MS is over, and so puts there the full second before the time. Martlet puts there the time minus 1 ms: for
RocketMQ that is in the same second, and Martlet delivers at the millisecond. Only a time 1 ms after a full second is
delivered 1 ms late, as TIMER_OUT_MS would otherwise look like one of RocketMQ, which means the end of its second.
"""

from collections.abc import Callable
from typing import Final, final

from martlet.checksum import crc32
from martlet.contracts import Stage
from martlet.errors import Reason, Refused
from martlet.message import PROPERTIES_BYTES_MAX, Message, Record, find_property, put_property
from martlet.store.layout import PREPARED, RecordView
from martlet.tables.topics import BROKER_TOPICS, TIMER_TOPIC

__all__ = [
    "OUT_MS",
    "PRECISION_MS",
    "REAL_QUEUE",
    "REAL_TOPIC",
    "RECALLED_KEY",
    "UNIQUE_KEY",
    "Wheel",
    "delete_key",
    "delivery_of",
    "due_of",
    "key_of",
    "moved",
    "out_of",
    "read_timer",
]


DELIVER_MS: Final = b"TIMER_DELIVER_MS"
DELAY_MS: Final = b"TIMER_DELAY_MS"
DELAY_SEC: Final = b"TIMER_DELAY_SEC"
# In the order in which RocketMQ looks for them.
TIME_KEYS: Final = (DELAY_SEC, DELAY_MS, DELIVER_MS)
OUT_MS: Final = b"TIMER_OUT_MS"
ENQUEUE_MS: Final = b"TIMER_ENQUEUE_MS"
DEQUEUE_MS: Final = b"TIMER_DEQUEUE_MS"
ROLL_TIMES: Final = b"TIMER_ROLL_TIMES"
RECALLED_KEY: Final = b"TIMER_DEL_UNIQKEY"
REAL_TOPIC: Final = b"REAL_TOPIC"
REAL_QUEUE: Final = b"REAL_QID"
UNIQUE_KEY: Final = b"UNIQ_KEY"

# RocketMQ's timerPrecisionMs.
PRECISION_MS: Final = 1000
# What delivery adds at most: two times and a count, with their names.
ROOM_BYTES: Final = 128
# Longer than a time in ms of the next 30,000 years.
DIGITS_MAX: Final = 15


def out_of(due_ms: int) -> int:
    """Return TIMER_OUT_MS for a message to deliver at *due_ms*."""
    out_ms = due_ms - 1
    return out_ms + 1 if out_ms % PRECISION_MS == 0 else out_ms


def due_of(out_ms: int) -> int:
    """Return when to deliver a message with TIMER_OUT_MS *out_ms*, which Martlet or RocketMQ wrote."""
    return out_ms + PRECISION_MS if out_ms % PRECISION_MS == 0 else out_ms + 1


def delete_key(topic: str, unique: str) -> str:
    """Return the key by which RocketMQ recalls a message (TimerMessageStore.buildDeleteKey)."""
    return f"{topic}+{unique}"


def key_of(topic: str, unique: str) -> int:
    """Return the hash by which a pending timer is found."""
    return crc32(delete_key(topic, unique).encode())


def read_timer(record: RecordView) -> tuple[int, str, str] | None:
    """Return due time, topic and unique key of a record in `TIMER_TOPIC`; None if it is not a timer."""
    properties = record.properties
    out, topic = find_property(properties, OUT_MS), find_property(properties, REAL_TOPIC)
    if not topic or not out.isdigit() or len(out) > DIGITS_MAX or find_property(properties, RECALLED_KEY):
        return None
    unique = find_property(properties, UNIQUE_KEY)
    return due_of(int(out)), topic.decode("utf-8", "replace"), unique.decode("utf-8", "replace")


@final
class Wheel:
    """The stage that holds timed messages: it turns them into records of `TIMER_TOPIC`.

    Args:
      now_ms: the time.
      horizon_ms: how far in the future messages may be due.
      queue_for: returns the queue in which a message would be stored; raises `Refused` if it would be refused.
    """

    def __init__(self, now_ms: Callable[[], int], horizon_ms: int, queue_for: Callable[[Message], int]) -> None:
        self._now_ms = now_ms
        self._horizon_ms = horizon_ms
        self._queue_for = queue_for

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
        return message if due_ms <= now_ms else self._held(message, due_ms)

    def _due_ms(self, properties: bytes, now_ms: int) -> int:
        key, value = next((key, value) for key in TIME_KEYS if (value := find_property(properties, key)))
        digits = value[1:] if value[:1] in (b"-", b"+") else value
        if not digits.isdigit() or len(digits) > DIGITS_MAX:
            text = f"property {key.decode()} {value.decode('utf-8', 'replace')!r} is not a number"
            raise Refused(Reason.ILLEGAL, f"{text}; use seconds for {DELAY_SEC.decode()}, else milliseconds")
        given = int(value)
        due_ms = given if key == DELIVER_MS else now_ms + given * (1000 if key == DELAY_SEC else 1)
        if due_ms > now_ms + self._horizon_ms:
            text = f"property {key.decode()} {given} is {(due_ms - now_ms) // 1000} s ahead"
            limit = f"the maximum is {self._horizon_ms // 1000} s (timer.delay_max_s)"
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


def _copy_of(record: Record, topic: str, queue_id: int, properties: bytes) -> Message:
    return Message(
        topic,
        record.body,
        properties,
        queue_id,
        record.flag,
        record.sys_flag,
        record.born_ms,
        record.born_host,
        record.reconsume_times,
        record.prepared_position,
    )


def delivery_of(record: Record, now_ms: int) -> Message:
    """Return the message to deliver for a timer's *record*, with the same properties as RocketMQ's."""
    topic = find_property(record.properties, REAL_TOPIC).decode("utf-8", "replace")
    queue = find_property(record.properties, REAL_QUEUE)
    queue_id = int(queue) if queue.isdigit() and len(queue) < 10 else -1
    # The store refuses U+0000, which a log written by RocketMQ may contain.
    properties = record.properties.replace(b"\x00", b"")
    longer = put_property(properties, ENQUEUE_MS, b"%d" % record.store_ms)
    longer = put_property(longer, DEQUEUE_MS, b"%d" % now_ms)
    if len(longer) <= PROPERTIES_BYTES_MAX:
        properties = longer
    return _copy_of(record, topic, queue_id, properties)


def moved(record: Record, due_ms: int) -> Message:
    """Return a copy of a timer's *record* that is due at *due_ms*, as RocketMQ rolls its timers."""
    properties = record.properties.replace(b"\x00", b"")
    times = find_property(properties, ROLL_TIMES)
    count = int(times) + 1 if times.isdigit() and len(times) < 10 else 1
    longer = put_property(properties, ROLL_TIMES, b"%d" % count)
    if len(longer) <= PROPERTIES_BYTES_MAX:
        properties = longer
    if due_of(int(find_property(properties, OUT_MS))) != due_ms:
        properties = put_property(properties, OUT_MS, b"%d" % out_of(due_ms))
    return _copy_of(record, TIMER_TOPIC, 0, properties)
