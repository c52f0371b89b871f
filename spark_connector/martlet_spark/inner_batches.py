"""Unrolls RocketMQ's inner batches: one record whose body contains messages with consecutive offsets.

RocketMQ 5 stores batch sends so in topics with ``queue.type=BatchCQ``. Its clients unroll them (MessageDecoder
decodeMessage): all messages have the hosts, times and position of the record, and a flag and properties of their own.
"""

from typing import Final

from martlet.errors import MartletError
from martlet.message import Message
from martlet.records.codec import decode_record, encode_record
from martlet_remoting.batches import decode_batch
from martlet_remoting.compression import COMPRESSED, COMPRESSION_BITS, decompress
from martlet_spark.errors import ReadError
from martlet_spark.records import Records

__all__ = ["INNER_BATCH", "unrolled"]

# RocketMQ MessageSysFlag.INNER_BATCH_FLAG and NEED_UNWRAP_FLAG: clients unroll a record that has both.
INNER_BATCH: Final = 0x80 | 0x40


def unrolled(records: Records, first: int) -> Records:
    """Return *records* with a record for each message of an inner batch, without those before offset *first*.

    A pull of an offset in the middle of a batch is answered with the whole batch.

    Raises:
      ReadError: an inner batch is damaged.
    """
    inner = records.heads["sys_flag"] & INNER_BATCH == INNER_BATCH
    if not inner.any():
        return records
    data, at = bytearray(), 0
    for start in records.starts[inner].tolist():
        data += records.data[at:start]
        at = start + _unroll(records, start, first, data)
    data += records.data[at:]
    return Records(data)


def _unroll(records: Records, start: int, first: int, data: bytearray) -> int:
    """Append the messages of the inner batch at *start* to *data*; return the size of the batch."""
    try:
        outer = decode_record(records.data, start, check_body=False)
        messages = decode_batch(decompress(outer.body, outer.sys_flag))
    except MartletError as error:
        raise ReadError(f"{records.describe(start)} is a batch that cannot be unrolled: {error}") from error
    sys_flag = outer.sys_flag & ~(INNER_BATCH | COMPRESSED | COMPRESSION_BITS)
    for offset, inner in enumerate(messages, outer.queue_offset):
        if offset >= first:
            message = Message(
                outer.topic, inner.body, inner.properties, -1, inner.flag, sys_flag, outer.born_ms, outer.born_host
            )
            data += encode_record(message, outer.queue_id, offset, outer.position, outer.store_ms, outer.store_host)
    return outer.size
