"""Timed messages as records of RocketMQ's timer topic, so that either broker can deliver them.

A client asks for a time with one of three properties (`HookUtils.transformTimerMessage`). The message is stored in the
topic `TIMER_TOPIC` with its own topic and queue in properties, and with TIMER_OUT_MS. RocketMQ delivers when the second
of TIMER_OUT_MS is over, and so sets it to the full second before the time. Martlet sets it to the time minus 1 ms:
RocketMQ delivers in the same second, and Martlet at the millisecond. Only a time 1 ms after a full second is delivered
1 ms late: TIMER_OUT_MS would otherwise look like RocketMQ's, which means the end of the second.
"""

from typing import Final

from martlet.message import PROPERTIES_BYTES_MAX, Message, Record, find_property, put_property, remove_property
from martlet.records.layout import RecordView
from martlet.runtime.checksum import crc32
from martlet.tables.topics import REVIVE_PREFIX, TIMER_TOPIC
from martlet_timer.properties import LEVEL, REAL_QUEUE, REAL_TOPIC, TIME_KEYS, UNIQUE_KEY

__all__ = [
    "DIGITS_MAX",
    "OUT_MS",
    "PRECISION_MS",
    "RECALLED_KEY",
    "copy_of",
    "delete_key",
    "delivery_of",
    "due_of",
    "key_of",
    "moved_copy",
    "out_of",
    "read_timer",
    "timer_properties",
]

OUT_MS: Final = b"TIMER_OUT_MS"
ENQUEUE_MS: Final = b"TIMER_ENQUEUE_MS"
DEQUEUE_MS: Final = b"TIMER_DEQUEUE_MS"
ROLL_TIMES: Final = b"TIMER_ROLL_TIMES"
RECALLED_KEY: Final = b"TIMER_DEL_UNIQKEY"
REVIVE: Final = REVIVE_PREFIX.encode()

# RocketMQ's timerPrecisionMs.
PRECISION_MS: Final = 1000
# More digits than a time in ms has in the next 30,000 years.
DIGITS_MAX: Final = 15


def out_of(due_ms: int) -> int:
    """Return TIMER_OUT_MS for a message to deliver at *due_ms*."""
    out_ms = due_ms - 1
    return out_ms + 1 if out_ms % PRECISION_MS == 0 else out_ms


def due_of(out_ms: int) -> int:
    """Return the delivery time of a message with TIMER_OUT_MS *out_ms*, which Martlet or RocketMQ wrote."""
    return out_ms + PRECISION_MS if out_ms % PRECISION_MS == 0 else out_ms + 1


def delete_key(topic: str, unique: str) -> str:
    """Return the key by which RocketMQ recalls a message (TimerMessageStore.buildDeleteKey)."""
    return f"{topic}+{unique}"


def key_of(topic: str, unique: str) -> int:
    """Return the key hash of a pending timer, by which recalls find it."""
    return crc32(delete_key(topic, unique).encode())


def read_timer(record: RecordView) -> tuple[int, str, str] | None:
    """Return due time, topic and unique key of a record in `TIMER_TOPIC`; None if it is not a timer.

    RocketMQ's check points of pops are no timers: the plugin that serves pops takes them over at the start.
    """
    properties = record.properties
    out, topic = find_property(properties, OUT_MS), find_property(properties, REAL_TOPIC)
    if (
        not topic
        or topic.startswith(REVIVE)
        or not out.isdigit()
        or len(out) > DIGITS_MAX
        or find_property(properties, RECALLED_KEY)
    ):
        return None
    unique = find_property(properties, UNIQUE_KEY)
    return due_of(int(out)), topic.decode("utf-8", "replace"), unique.decode("utf-8", "replace")


def timer_properties(properties: bytes, due_ms: int) -> bytes:
    """Return the properties of a message of a delay level, changed so that it is a timer due at *due_ms*.

    The level is removed: when RocketMQ delivers a timer with a level, the message waits for its delay again.
    """
    for key in (LEVEL, *TIME_KEYS):
        properties = remove_property(properties, key)
    return put_property(properties, OUT_MS, b"%d" % out_of(due_ms))


def copy_of(record: Record, topic: str, queue_id: int, properties: bytes) -> Message:
    """Return the message of *record* for another place, with *properties*."""
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
    return copy_of(record, topic, queue_id, properties)


def moved_copy(record: Record, due_ms: int) -> Message:
    """Return a copy of a timer's *record* that is due at *due_ms*, as RocketMQ rolls its timers."""
    properties = record.properties.replace(b"\x00", b"")
    times = find_property(properties, ROLL_TIMES)
    count = int(times) + 1 if times.isdigit() and len(times) < 10 else 1
    longer = put_property(properties, ROLL_TIMES, b"%d" % count)
    if len(longer) <= PROPERTIES_BYTES_MAX:
        properties = longer
    if due_of(int(find_property(properties, OUT_MS))) != due_ms:
        properties = put_property(properties, OUT_MS, b"%d" % out_of(due_ms))
    return copy_of(record, TIMER_TOPIC, 0, properties)
