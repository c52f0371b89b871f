"""Unrolls RocketMQ's inner batches: one record whose body contains messages with consecutive offsets.

RocketMQ 5 stores batch sends as inner batches in topics with ``queue.type=BatchCQ``. Its clients unroll them
(MessageDecoder decodeMessage): each message has the hosts, times and position of the record, and its own flag and
properties.
"""

from typing import Final

from martlet.message import Record
from martlet.records.compression import COMPRESSED, COMPRESSION_BITS, decompress
from martlet.runtime.checksum import crc32
from martlet_remoting.wire.batches import decode_batch

__all__ = ["INNER_BATCH", "is_inner_batch", "unroll"]

# RocketMQ MessageSysFlag.INNER_BATCH_FLAG and NEED_UNWRAP_FLAG: clients unroll a record that has both.
INNER_BATCH: Final = 0x80 | 0x40


def is_inner_batch(sys_flag: int) -> bool:
    """Whether a record with *sys_flag* is a batch that `unroll` unrolls."""
    return sys_flag & INNER_BATCH == INNER_BATCH


def unroll(batch: Record, first: int = 0) -> list[Record]:
    """Return the messages of *batch* from offset *first* on, each as a record of its own.

    The messages keep the flags ``INNER_BATCH``: a broker does not find such messages by their position.

    Raises:
      Refused: lengths in the batch contradict each other.
      CompressionError: the batch cannot be decompressed.
    """
    sys_flag = batch.sys_flag & ~(COMPRESSED | COMPRESSION_BITS)
    return [
        Record(
            batch.topic,
            batch.queue_id,
            offset,
            batch.position,
            len(inner.body) + len(inner.properties),
            inner.body,
            inner.properties,
            inner.flag,
            sys_flag,
            batch.born_ms,
            batch.born_host,
            batch.store_ms,
            batch.store_host,
            0,
            0,
            crc32(inner.body) & 0x7FFFFFFF,
        )
        for offset, inner in enumerate(decode_batch(decompress(batch.body, batch.sys_flag)), batch.queue_offset)
        if offset >= first
    ]
