"""Exact tables: rows that show a message as an archive does, and of which `rebuild` makes the record byte for byte.

Beside the columns of a message a row has the other fields of its record, in columns whose names begin with ``_``. What
columns cannot express is kept raw: the stored body of a compressed one (``_body``), properties with a repeated or empty
name, bytes that are not UTF-8, or without their last separator (``_properties``), and the whole record if nothing else
gives its bytes (``_record``). Nothing here has to know all these cases: each row is rebuilt and compared with its
record before a batch is returned, and what differs is kept raw.
"""

from collections.abc import Iterator
from typing import Any, Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from martlet.records.compression import COMPRESSED
from martlet.records.layout import BORN_V6, HOST_BYTES, I32, START_BYTES, STORE_V6, WIDE_HOST_BYTES, part_offsets
from martlet_columns.decode import RAW, BatchFull, Decoder
from martlet_columns.errors import RecordError
from martlet_columns.rebuild import record_array
from martlet_columns.records import HEADS, Data, Integers, Records
from martlet_columns.schema import COLUMNS, exact_schema
from martlet_columns.vectors import elements

__all__ = ["BYTES_MAX", "PLAIN_BYTES_MAX", "ExactDecoder"]

# Bytes of the records of one call: the offsets in each column fit an i32, also if each byte of a text becomes U+FFFD.
BYTES_MAX: Final = 256 << 20
# Decompressed bodies of one batch with more than one record: a record of 64 KiB can decompress to 64 MiB.
PLAIN_BYTES_MAX: Final = 128 << 20


@final
class ExactDecoder:
    """Decodes records into batches of an exact table, whose schema is `exact_schema`."""

    def __init__(self) -> None:
        self._decoder = Decoder(tuple(COLUMNS), RAW, is_lenient=True, plain_bytes_max=PLAIN_BYTES_MAX)

    def batches(self, records: Records, broker: str) -> Iterator[Any]:
        """Yield RecordBatches with a row per record, in order; *broker* is the name of the records' broker.

        It is one batch, unless there is no record, or compressed bodies decompress to more than `PLAIN_BYTES_MAX`. Rows
        do not share memory with *records*. A damaged record has a row as well, with what can be read of it, and comes
        back damaged: check records before (`Records.check_bodies`).

        Raises:
          ValueError: there are more than `BYTES_MAX` bytes of records.
          PackageMissing: the package that decompresses a body is not installed.
        """
        if len(records.data) > BYTES_MAX:
            raise ValueError(f"{len(records.data)} bytes of records are more than {BYTES_MAX}; give fewer at a time")
        if not len(records):
            return
        try:
            yield self._batch(records, broker)
        except BatchFull:
            middle = len(records) // 2
            for part in (records.starts[:middle], records.starts[middle:]):
                yield from self.batches(Records(records.data, part), broker)

    def _batch(self, records: Records, broker: str) -> Any:
        shown = self._decoder.decode(records, broker)
        nothing = pa.nulls(len(records), pa.binary())
        own = {**_fields(records), "_properties": nothing, "_body": _stored_bodies(records, shown), "_record": nothing}
        arrays = [shown.column(name) if name in COLUMNS else own[name] for name in exact_schema().names]
        return _verified(pa.RecordBatch.from_arrays(arrays, schema=exact_schema()), _stored(records))


def _fields(records: Records) -> dict[str, Any]:
    """Return the columns of the fields that a message does not show."""
    heads, data, starts = records.heads, records.data, records.starts
    flags = heads["sys_flag"].astype(np.int32)
    born_at = starts + START_BYTES
    born_end = born_at + HOST_BYTES + WIDE_HOST_BYTES * (flags & BORN_V6 != 0)
    store_at = born_end + 8
    store_end = store_at + HOST_BYTES + WIDE_HOST_BYTES * (flags & STORE_V6 != 0)
    # A damaged record may say that it has hosts which go beyond its end.
    bounds = np.minimum(np.stack((born_at, born_end, store_at, store_end), axis=1), len(data)).astype(np.int32)
    bounds = bounds.reshape(-1)
    # A window of eight bytes begins at each byte.
    windows = np.ndarray((len(data) - 7,), "V8", data, strides=(1,))
    prepared = windows[np.minimum(store_end + 4, len(data) - 8)].view(">i8")
    return {
        "_position": pa.array(heads["position"].astype(np.int64)),
        "_sys_flag": pa.array(flags),
        "_magic": pa.array(heads["magic"].astype(np.uint32).view(np.int32)),
        "_body_crc": pa.array(heads["crc"].astype(np.uint32).view(np.int32)),
        "_prepared_position": pa.array(prepared.astype(np.int64)),
        "_born_host": elements(data, bounds, 0, 4),
        "_store_host": elements(data, bounds, 2, 4),
    }


def _stored_bodies(records: Records, shown: Any) -> Any:
    """Return the stored body of each record whose row *shown* has another one, null for the others."""
    rows = np.flatnonzero(records.heads["sys_flag"] & COMPRESSED)
    if not len(rows):
        return pa.nulls(len(records), pa.binary())
    bodies = shown.column("body").take(pa.array(rows)).to_pylist()
    stored = [_body_and_properties(records.data, start)[0] for start in records.starts[rows].tolist()]
    differing = [None if own == body else own for own, body in zip(stored, bodies, strict=True)]
    return _spread(pa.array(differing, pa.binary()), rows, len(records))


def _body_and_properties(data: Data, start: int) -> tuple[bytes | None, bytes | None]:
    """Return body and properties as stored; None if the parts of the record do not add up."""
    head = np.frombuffer(data, HEADS, 1, start)[0]
    end = start + int(head["size"])
    parts = part_offsets(data, start, end, int(head["magic"]), int(head["sys_flag"]))
    if parts is None:
        return None, None
    body_at, _, properties_at = parts
    body_end = body_at + I32.unpack_from(data, body_at - 4)[0]
    return bytes(data[body_at:body_end]), bytes(data[properties_at:end])


def _stored(records: Records) -> Any:
    """Return a binary array of *records* that shares their memory."""
    ends = records.starts + records.heads["size"]
    bounds = np.stack((records.starts, ends), axis=1).astype(np.int32).reshape(-1)
    if (ends[:-1] != records.starts[1:]).any():
        return elements(records.data, bounds, 0, 2)
    bounds = np.append(bounds[::2], bounds[-1])
    return pa.Array.from_buffers(pa.binary(), len(records), [None, pa.py_buffer(bounds), pa.py_buffer(records.data)])


def _verified(batch: Any, stored: Any) -> Any:
    """Return *batch* with what is needed to make the records *stored* of it.

    Raises:
      RecordError: a row does not give its record, which is a defect.
    """
    wrong = _differing(batch, stored)
    if not len(wrong):
        return batch
    raw = stored.take(pa.array(wrong))
    texts = pa.array([_body_and_properties(each, 0)[1] for each in raw.to_pylist()], pa.binary())
    rows = _with(batch.take(pa.array(wrong)), "_properties", texts)
    lost = _differing(rows, raw)
    texts = pc.if_else(pa.array(np.isin(np.arange(len(wrong)), lost)), None, texts)
    batch = _with(batch, "_properties", _spread(texts, wrong, len(batch)))
    if len(lost):
        batch = _with(batch, "_record", _spread(raw.take(pa.array(lost)), wrong[lost], len(batch)))
    wrong = _differing(batch, stored)
    if len(wrong):
        raise RecordError(f"row {wrong[0]} does not give its record again; report this defect")
    return batch


def _differing(batch: Any, stored: Any) -> Integers:
    """Return the rows of *batch* that do not give their records *stored*."""
    is_equal = pc.equal(record_array(batch), stored)
    return np.flatnonzero(~np.asarray(is_equal.fill_null(False)))


def _spread(values: Any, rows: Integers, count: int) -> Any:
    """Return a column of *count* rows that has *values* in *rows*, and null in the others."""
    at = np.full(count, -1, np.int64)
    at[rows] = np.arange(len(rows))
    return values.take(pa.array(at, mask=at < 0))


def _with(batch: Any, name: str, column: Any) -> Any:
    """Return *batch* with another column *name*."""
    return batch.set_column(batch.schema.get_field_index(name), batch.schema.field(name), column)
