"""RocketMQ's records for transactions: half messages, op records, committed and parked messages.

Sources: broker TransactionalMessageBridge, EndTransactionProcessor, TransactionalMessageServiceImpl and
DefaultTransactionalMessageCheckListener of RocketMQ 5.
"""

from collections.abc import Sequence
from typing import Final

from martlet.contracts import HalfMessage
from martlet.message import Message, Record, find_property, put_properties, put_property, remove_property
from martlet.records.layout import TRANSACTION_MASK

__all__ = [
    "CHECK_TIMES",
    "CID",
    "HALF_TOPIC",
    "IMMUNITY",
    "MOVED_FROM",
    "NAME",
    "OP_TOPIC",
    "PARK_TOPIC",
    "PREPARED_OFFSET",
    "decode_half",
    "final_message",
    "half_message",
    "half_offsets",
    "immunity_ms",
    "is_half",
    "number_of",
    "op_message",
    "parked_message",
    "renewed_message",
]

NAME: Final = "tx"  # of the plugin
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
PARK_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
# The group with the committed offsets at which RocketMQ's checks continue in the first two topics.
CID: Final = "CID_RMQ_SYS_TRANS"

CHECK_TIMES: Final = b"TRANSACTION_CHECK_TIMES"
# In a copy that RocketMQ made because of CHECK_IMMUNITY_TIME_IN_SECONDS: the offset of the original half message.
PREPARED_OFFSET: Final = b"TRAN_PREPARED_QUEUE_OFFSET"
# In Martlet's copies: the log position of the original half message, which its producer may still name.
MOVED_FROM: Final = b"TRAN_MOVED_FROM"
IMMUNITY: Final = b"CHECK_IMMUNITY_TIME_IN_SECONDS"
COMMITTED: Final = 0x8  # in sysFlag
ENDED: Final = b"TAGS\x01d\x02"
DIGITS_MAX: Final = 18


def number_of(text: bytes) -> int:
    """Return *text* as a number; -1 if it is no number, or does not fit 64 bits."""
    return int(text) if text.isdigit() and len(text) <= DIGITS_MAX else -1


def is_half(message: Message) -> bool:
    """Return whether *message* begins a transaction (RocketMQ SendMessageProcessor).

    Clients before 4.6.1 send a message back for a retry with the properties of its transaction, and a delay.
    """
    properties = message.properties
    if find_property(properties, b"TRAN_MSG").lower() != b"true":
        return False
    return not (message.reconsume_times > 0 and number_of(find_property(properties, b"DELAY")) > 0)


def half_message(message: Message, queue_id: int) -> Message:
    """Turn *message*, which goes to queue *queue_id* of its topic, into a half message."""
    unique = find_property(message.properties, b"UNIQ_KEY")
    values = {b"__transactionId__": unique} if unique else {}
    values[b"REAL_TOPIC"] = message.topic.encode()
    values[b"REAL_QID"] = b"%d" % queue_id
    message.properties = put_properties(message.properties, values)
    message.sys_flag &= ~TRANSACTION_MASK
    message.topic, message.queue_id = HALF_TOPIC, 0
    return message


def decode_half(record: Record) -> HalfMessage | None:
    """Return the half message in *record*, of the half topic or the park topic; None if a property is missing."""
    topic = find_property(record.properties, b"REAL_TOPIC").decode("utf-8", "replace")
    group = find_property(record.properties, b"PGROUP").decode("utf-8", "replace")
    queue_id = number_of(find_property(record.properties, b"REAL_QID"))
    return HalfMessage(record, topic, queue_id, group) if topic and group else None


def final_message(half: HalfMessage) -> Message:
    """Return the message that a commit of *half* stores."""
    record = half.record
    properties = record.properties
    return Message(
        half.topic,
        record.body,
        remove_property(properties, MOVED_FROM) if MOVED_FROM in properties else properties,
        half.queue_id,
        record.flag,
        record.sys_flag & ~TRANSACTION_MASK | COMMITTED,
        record.born_ms,
        record.born_host,
        record.reconsume_times,
        record.position,
    )


def op_message(offsets: Sequence[int], now_ms: int, host: bytes) -> Message:
    """Return the op record that ends the transactions of the half messages at *offsets*."""
    body = ",".join(map(str, offsets)).encode()
    return Message(OP_TOPIC, body, ENDED, 0, born_ms=now_ms, born_host=host)


def half_offsets(properties: bytes, body: bytes) -> list[int]:
    """Return the offsets of half messages whose transactions an op record ends; RocketMQ's op records have several."""
    if find_property(properties, b"TAGS") != b"d":
        return []
    return [offset for offset in map(number_of, body.split(b",")) if offset >= 0]


def parked_message(half: HalfMessage, checks: int) -> Message:
    """Return the message for `PARK_TOPIC`, after too many checks of *half*."""
    return _copy(half.record, PARK_TOPIC, put_property(half.record.properties, CHECK_TIMES, b"%d" % checks))


def renewed_message(half: HalfMessage, checks: int) -> Message:
    """Return a copy of *half* for the half topic."""
    properties = remove_property(half.record.properties, PREPARED_OFFSET)
    return _copy(half.record, HALF_TOPIC, put_property(properties, CHECK_TIMES, b"%d" % checks))


def _copy(record: Record, topic: str, properties: bytes) -> Message:
    if not find_property(properties, MOVED_FROM):
        properties = put_property(properties, MOVED_FROM, b"%d" % record.position)
    return Message(
        topic,
        record.body,
        properties,
        0,
        record.flag,
        record.sys_flag,
        record.born_ms,
        record.born_host,
        record.reconsume_times,
    )


def immunity_ms(properties: bytes, default_ms: int) -> int:
    """Return the time in ms for which a half message with *properties* is not checked; at least *default_ms*."""
    return max(number_of(find_property(properties, IMMUNITY)) * 1000, default_ms)
