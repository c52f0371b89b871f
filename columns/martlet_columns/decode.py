"""Decodes stored records into Arrow batches: usual ones all at once (`gather_usual`), odd ones one by one.

A record is odd if it has a compressed body, an IPv6 host, a topic of over 127 bytes, or properties with empty or
repeated names; if the columns need only some properties, the others do not count. `vectors.py` takes about 0.2 ms per
buffer, whatever its size, so a buffer of few records is decoded one by one too.

Brokers do not check bodies that producers mark as compressed. So a body that cannot be decompressed is no damage, and
need not end a read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import pyarrow as pa

from martlet.errors import MartletError
from martlet.message import KEYS, TAGS, UNIQ_KEY, Record, decode_properties
from martlet.records.codec import decode_record
from martlet.records.compression import CompressionError, PackageMissing, compression_name, decompress
from martlet.records.layout import HEAD, I32, part_offsets
from martlet.runtime.native import native
from martlet_columns.errors import RecordError, UndecodableBody
from martlet_columns.records import Data, Integers, Records
from martlet_columns.schema import COLUMNS, MS_MAX, MS_MIN, arrow_schema
from martlet_columns.vectors import gather_usual

__all__ = ["COMPRESSED_BODY", "ERROR", "NULL", "RAW", "VECTOR_MIN", "BatchFull", "Decoder"]

# With fewer records in a buffer, the loop over records is faster.
VECTOR_MIN: Final = 64
# Treatment of a body that cannot be decompressed: fail the read, return null, or return it as stored.
ERROR: Final = "error"
NULL: Final = "null"
RAW: Final = "raw"
# The property of a message with such a body; its value is the compression that the producer states.
COMPRESSED_BODY: Final = "COMPRESSED_BODY"


@final
class BatchFull(Exception):
    """Bodies decompress to more bytes than a batch may have; decode fewer records at a time."""


@final
class Decoder:
    """Decodes records into the columns *names*.

    *undecodable* is the treatment of a body that cannot be decompressed: `ERROR`, `NULL` or `RAW`. ``undecoded`` counts
    such bodies, and ``first_undecoded`` describes the first.

    Args:
      is_lenient: decode damaged records too: each becomes a row with what can be read of it.
      plain_bytes_max: bytes of decompressed bodies in a batch with more than one record; None means no limit.
    """

    def __init__(
        self,
        names: Sequence[str],
        undecodable: str = ERROR,
        *,
        is_lenient: bool = False,
        plain_bytes_max: int | None = None,
    ) -> None:
        self.names = tuple(names)
        self.undecoded = 0
        self.first_undecoded = ""
        self._has_bodies = "body" in names
        self._undecodable = undecodable
        self._is_lenient = is_lenient
        self._plain_bytes_max = plain_bytes_max
        self.schema = arrow_schema(names)
        self._gather_usual = native(gather_usual)

    def decode(self, records: Records, broker: str) -> Any:
        """Return a RecordBatch with a row per record; *broker* is the name of the records' broker.

        Raises:
          RecordError: a record is damaged.
          UndecodableBody: a body cannot be decompressed, and fails the read.
          PackageMissing: the package that decompresses a body is not installed.
          BatchFull: compressed bodies exceed the limit of a batch.
        """
        if len(records) < VECTOR_MIN:
            return self.decode_one_by_one(records, broker)
        columns, odd = self._gather_usual(
            records.data, records.starts, records.heads, self.names, self.schema, broker, (MS_MIN, MS_MAX)
        )
        usual = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        return self._with_odd(usual, records, odd, broker) if len(odd) else usual

    def decode_one_by_one(self, records: Records, broker: str) -> Any:
        """Like `decode`, for records of any kind, but slowly."""
        return self._one_by_one(records, records.starts.tolist(), broker)

    def _with_odd(self, usual: Any, records: Records, odd_starts: Integers, broker: str) -> Any:
        """Return *usual* together with the rows of the records at *odd_starts*, in the order of *records*."""
        odd = self._one_by_one(records, odd_starts.tolist(), broker)
        is_odd = np.zeros(len(records), bool)
        is_odd[np.searchsorted(records.starts, odd_starts)] = True
        order = np.empty(len(records), np.int64)
        order[~is_odd] = np.arange(len(usual))
        order[is_odd] = np.arange(len(usual), len(records))
        both = pa.Table.from_batches([usual, odd]).take(pa.array(order))
        return both.combine_chunks().to_batches()[0]

    def _one_by_one(self, records: Records, starts: Sequence[int], broker: str) -> Any:
        rows, plain_bytes = [], 0
        for start in starts:
            row = self._row(records, start, broker)
            rows.append(row)
            plain_bytes += len(row.body or b"")
            if self._plain_bytes_max is not None and plain_bytes > self._plain_bytes_max and len(records) > 1:
                raise BatchFull
        getters = [(_VALUE[name], COLUMNS[name][1]) for name in self.names]
        arrays = [pa.array([get(row) for row in rows], type=kind) for get, kind in getters]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _row(self, records: Records, start: int, broker: str) -> "_Row":
        try:
            record = decode_record(records.data, start, check_body=False)
        except MartletError as error:
            if not self._is_lenient:
                raise RecordError(f"{records.describe(start)} cannot be decoded: {error}") from error
            record = _readable_part(records.data, start)
        row = _Row(record, broker)
        if self._has_bodies:
            try:
                row.body = decompress(row.record.body, row.record.sys_flag)
            except CompressionError as error:
                self._note_undecoded(row, f"{records.describe(start)} has a body that cannot be decompressed", error)
        return row

    def _note_undecoded(self, row: "_Row", text: str, error: CompressionError) -> None:
        """Count the body of *row*, and treat it as the reader says.

        Raises:
          UndecodableBody: such a body fails the read.
          PackageMissing: a package is missing, which is no fault of the message.
        """
        if isinstance(error, PackageMissing):
            raise PackageMissing(f"{text}: {error}") from error
        if self._undecodable == ERROR:
            raise UndecodableBody(f"{text}: {error}") from error
        self.undecoded += 1
        self.first_undecoded = self.first_undecoded or f"{text}: {error}"
        if self._undecodable == RAW:
            row.body = row.record.body
            row.properties[COMPRESSED_BODY] = compression_name(row.record.sys_flag)


def _readable_part(data: Data, start: int) -> Record:
    """Return what can be read of a damaged record: the fixed fields, and the parts if they add up to its size."""
    size, magic, crc, queue, flag, offset, position, sys_flag, *rest = HEAD.unpack_from(data, start)
    born_ms, born_host, store_ms, store_host, reconsume_times, prepared_position, _ = rest
    end, topic, body, properties = start + size, b"", b"", b""
    parts = part_offsets(data, start, end, magic, sys_flag)
    if parts is not None:
        body_at, topic_at, properties_at = parts
        body = bytes(data[body_at : body_at + I32.unpack_from(data, body_at - 4)[0]])
        topic, properties = bytes(data[topic_at : properties_at - 2]), bytes(data[properties_at:end])
    return Record(
        *(topic.decode("utf-8", "replace"), queue, offset, position, size, body, properties, flag, sys_flag),
        *(born_ms, born_host, store_ms, store_host, reconsume_times, prepared_position, crc),
    )


@final
class _Row:
    """One record: its properties, and its body for the reader."""

    __slots__ = ("body", "broker", "properties", "record")

    def __init__(self, record: Record, broker: str) -> None:
        self.record = record
        self.broker = broker
        self.properties = decode_properties(record.properties)
        self.body: bytes | None = None

    @property
    def message_id(self) -> str:
        own = self.properties.get(UNIQ_KEY)
        return own or (self.record.store_host + self.record.position.to_bytes(8, "big", signed=True)).hex().upper()


def _microseconds(ms: int) -> int | None:
    return ms * 1000 if MS_MIN <= ms <= MS_MAX else None


_VALUE: Final[Mapping[str, Callable[[_Row], object]]] = {
    "topic": lambda row: row.record.topic,
    "broker": lambda row: row.broker,
    "queue": lambda row: row.record.queue_id,
    "offset": lambda row: row.record.queue_offset,
    "key": lambda row: row.properties.get(KEYS),
    "tag": lambda row: row.properties.get(TAGS),
    "body": lambda row: row.body,
    "properties": lambda row: list(row.properties.items()),
    "msg_id": lambda row: row.message_id,
    "born_ts": lambda row: _microseconds(row.record.born_ms),
    "store_ts": lambda row: _microseconds(row.record.store_ms),
    "flag": lambda row: row.record.flag,
    "reconsume_times": lambda row: row.record.reconsume_times,
}
assert _VALUE.keys() == COLUMNS.keys()
