"""Encodes the rows of an exact table back into the bytes of their records, all rows of a batch at once.

A record has a few parts; each part is one Arrow array with an element per row. Joined row by row, they form one array,
whose buffer has the records one after the other. Of the ways to join them this is the fastest: the same by one `take`
of all parts takes twice as long, by a scatter of NumPy 35 times (`benchmarks/columns.py`).
"""

from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from martlet.records.layout import MAGIC_V2, START_BYTES
from martlet_columns.errors import RecordError
from martlet_columns.records import START_FIELDS, Integers, Records
from martlet_columns.schema import exact_schema

__all__ = ["Rows", "rebuild", "record_array"]

Rows: TypeAlias = "pa.RecordBatch | pa.Table"

START: Final = np.dtype(list(START_FIELDS))
assert START.itemsize == START_BYTES
# `martlet.records.layout.AFTER_STORE`: the fields after the hosts.
AFTER: Final = np.dtype([("reconsume_times", ">i4"), ("prepared_position", ">i8"), ("body_bytes", ">i4")])
# What is neither body, topic, properties nor a host: the length of the topic has one byte, in V2 two.
FIXED_BYTES: Final = START.itemsize + 8 + AFTER.itemsize + 1 + 2
V2: Final = MAGIC_V2 - (1 << 32)
# Columns that may be null are not needed, or say so by null: their record is in another column.
NEEDED: Final = tuple(
    name
    for name in exact_schema().names
    if name not in ("broker", "key", "tag", "msg_id", "_properties", "_body", "_record")
)
NONE: Final = b""  # not a pa.scalar: making one imports pandas


def rebuild(rows: Rows) -> Records:
    """Return the records of *rows*, byte for byte as they were stored, in the order of the rows.

    Columns that are not those of an exact table are ignored.

    Raises:
      RecordError: *rows* lack a column, or a row lacks a value that a record needs.
      ArrowCapacityError: a batch of *rows* has records of more than 2 GiB.
    """
    schema = exact_schema()
    missing = set(schema.names).difference(rows.schema.names)
    if missing:
        raise RecordError(f"the table lacks the columns {', '.join(sorted(missing))}; records cannot be made of it")
    exact = rows.select(schema.names).cast(schema)
    batches = exact.to_batches() if isinstance(exact, pa.Table) else [exact]
    arrays = [record_array(batch) for batch in batches if len(batch)]
    for batch, array in zip(filter(len, batches), arrays, strict=True):
        if array.null_count:
            raise RecordError(_description(batch, int(np.flatnonzero(np.asarray(array.is_null()))[0])))
    parts = [_bytes_of(array) for array in arrays]
    data = parts[0] if len(parts) == 1 else bytearray().join(parts)
    sizes = [np.diff(bounds_of(array)).astype(np.int64) for array in arrays]
    ends = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes]))
    return Records(data, ends[:-1])


def record_array(batch: pa.RecordBatch) -> Any:
    """Return a binary array of the records of *batch*, null in rows that lack a value that a record needs.

    The columns are those of `exact_schema`.
    """
    raw = batch.column("_record")
    if not raw.null_count:
        return raw
    made = _joined(batch)
    for name in NEEDED:
        if batch.column(name).null_count:
            made = pc.if_else(batch.column(name).is_valid(), made, pa.scalar(None, pa.binary()))
    return made if raw.null_count == len(batch) else pc.coalesce(raw, made)


def bounds_of(texts: Any) -> Integers:
    """Return the begin of each element of a binary array in its buffer, and the end of the last."""
    if not len(texts):
        return np.zeros(1, np.int32)
    return np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]


def _joined(batch: pa.RecordBatch) -> Any:
    """Return the records of *batch*, made of the columns."""
    own_body = batch.column("_body")
    body = _filled(batch, "body", NONE) if own_body.null_count else own_body
    if own_body.null_count < len(batch):
        body = pc.coalesce(own_body, body)
    own_texts = batch.column("_properties")
    texts = _encoded(batch) if own_texts.null_count else own_texts
    if own_texts.null_count < len(batch):
        texts = pc.coalesce(own_texts, texts)
    topic = _filled(batch, "topic", "").cast(pa.binary())
    born_host, store_host = _filled(batch, "_born_host", NONE), _filled(batch, "_store_host", NONE)
    topic_bytes, text_bytes, body_bytes = _lengths(topic), _lengths(texts), _lengths(body)
    is_v2 = _numbers(batch, "_magic") == V2
    sizes = FIXED_BYTES + body_bytes + topic_bytes + text_bytes + is_v2 + _lengths(born_host) + _lengths(store_host)
    return pc.binary_join_element_wise(
        _starts(batch, sizes),
        born_host,
        _fixed(_milliseconds(batch, "store_ts").astype(">i8")),
        store_host,
        _afters(batch, body_bytes),
        body,
        _topic_lengths(topic_bytes, is_v2),
        topic,
        _fixed(text_bytes.astype(">i2")),
        texts,
        NONE,
    )


def _starts(batch: pa.RecordBatch, sizes: Integers) -> Any:
    starts = np.empty(len(batch), START)
    starts["size"] = sizes
    starts["magic"] = _numbers(batch, "_magic")
    starts["crc"] = _numbers(batch, "_body_crc")
    starts["queue"] = _numbers(batch, "queue")
    starts["flag"] = _numbers(batch, "flag")
    starts["offset"] = _numbers(batch, "offset")
    starts["position"] = _numbers(batch, "_position")
    starts["sys_flag"] = _numbers(batch, "_sys_flag")
    starts["born_ms"] = _milliseconds(batch, "born_ts")
    return _fixed(starts)


def _afters(batch: pa.RecordBatch, body_bytes: Integers) -> Any:
    afters = np.empty(len(batch), AFTER)
    afters["reconsume_times"] = _numbers(batch, "reconsume_times")
    afters["prepared_position"] = _numbers(batch, "_prepared_position")
    afters["body_bytes"] = body_bytes
    return _fixed(afters)


def _topic_lengths(topic_bytes: Integers, is_v2: Integers) -> Any:
    """Return the length before each topic: one byte, in records V2 two."""
    if not is_v2.any():
        return _fixed(topic_bytes.astype(np.uint8))
    both = topic_bytes.astype(">i2").view(np.uint8).reshape(-1, 2)
    has_byte = np.ones(both.shape, bool)
    has_byte[:, 0] = is_v2
    bounds = np.zeros(len(topic_bytes) + 1, np.int32)
    np.cumsum(1 + is_v2, out=bounds[1:])
    return _binary(bounds, both[has_byte])


def _encoded(batch: pa.RecordBatch) -> Any:
    """Return the properties of each row, encoded."""
    column = _filled(batch, "properties", [])
    bounds = np.asarray(column.offsets)
    names = column.keys.slice(bounds[0], bounds[-1] - bounds[0]).cast(pa.binary())
    values = column.items.slice(bounds[0], bounds[-1] - bounds[0]).cast(pa.binary())
    joined = pc.binary_join_element_wise(names, b"\x01", values, b"\x02", NONE)
    return _binary(bounds_of(joined)[bounds - bounds[0]], joined.buffers()[2])


def _description(batch: pa.RecordBatch, row: int) -> str:
    """Return what *row* lacks, for an error."""
    missing = [name for name in NEEDED if not batch.column(name)[row].is_valid]
    place = "/".join(str(batch.column(name)[row]) for name in ("topic", "queue", "offset"))
    return f"the row of message {place} has null in {', '.join(missing)}; a record cannot be made of it"


def _filled(batch: pa.RecordBatch, name: str, nothing: object) -> Any:
    """Return column *name* with *nothing* for null."""
    column = batch.column(name)
    if not column.null_count:
        return column
    return pc.if_else(column.is_valid(), column, pa.scalar(nothing, column.type))


def _numbers(batch: pa.RecordBatch, name: str) -> Integers:
    return np.asarray(_filled(batch, name, 0))


def _milliseconds(batch: pa.RecordBatch, name: str) -> Integers:
    found: Integers = np.asarray(_filled(batch, name, 0).view(pa.int64())) // 1000
    return found


def _lengths(texts: Any) -> Integers:
    return np.diff(bounds_of(texts)).astype(np.int64)


def _fixed(values: Any) -> Any:
    """Return the elements of a NumPy array as a binary array that shares their memory."""
    bounds = np.arange(0, (len(values) + 1) * values.itemsize, values.itemsize, dtype=np.int32)
    return _binary(bounds, values)


def _binary(bounds: Integers, data: Any) -> Any:
    buffers = [None, pa.py_buffer(np.ascontiguousarray(bounds)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(bounds) - 1, buffers)


def _bytes_of(array: Any) -> memoryview:
    bounds = bounds_of(array)
    return memoryview(array.buffers()[2]).cast("B")[bounds[0] : bounds[-1]]
