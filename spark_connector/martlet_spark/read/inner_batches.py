"""Replaces RocketMQ's inner batches by records of their messages."""

from martlet.errors import MartletError
from martlet.message import Message
from martlet.records.codec import decode_record, encode_record
from martlet_columns.records import Records
from martlet_remoting.wire.inner_batches import INNER_BATCH, unroll
from martlet_spark.errors import ReadError

__all__ = ["unrolled"]


def unrolled(records: Records, first: int) -> Records:
    """Return *records* with a record for each message of an inner batch, without messages before offset *first*.

    A pull of an offset in the middle of a batch is answered with the whole batch.

    Raises:
      ReadError: an inner batch is damaged.
    """
    is_inner = records.heads["sys_flag"] & INNER_BATCH == INNER_BATCH
    if not is_inner.any():
        return records
    data, copied_end = bytearray(), 0
    for start in records.starts[is_inner].tolist():
        data += records.data[copied_end:start]
        copied_end = start + _unroll(records, start, first, data)
    data += records.data[copied_end:]
    return Records(data)


def _unroll(records: Records, start: int, first: int, data: bytearray) -> int:
    """Append the messages of the inner batch at *start* to *data*; return the size of the batch."""
    try:
        batch = decode_record(records.data, start, check_body=False)
        messages = unroll(batch, first)
    except MartletError as error:
        raise ReadError(f"{records.describe(start)} is a batch that cannot be unrolled: {error}") from error
    for each in messages:
        flags = each.sys_flag & ~INNER_BATCH
        message = Message(each.topic, each.body, each.properties, -1, each.flag, flags, each.born_ms, each.born_host)
        data += encode_record(message, each.queue_id, each.queue_offset, each.position, each.store_ms, each.store_host)
    return batch.size
