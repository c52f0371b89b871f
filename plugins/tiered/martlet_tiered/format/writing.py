"""Writes records, sorted by queue, as one file of the cold tier."""

import datetime
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec import Struct

from martlet.runtime.checksum import crc32
from martlet.runtime.steps import Steps, finish_now
from martlet_columns.exact import ExactDecoder
from martlet_columns.records import Integers, Records
from martlet_columns.schema import MS_MAX, MS_MIN, exact_schema
from martlet_tiered.files import DataFile
from martlet_tiered.format.fields import store_times, topics_of
from martlet_tiered.format.footer import FOOTER_KEY, FOOTER_VERSION, FileFooter, GroupPlace, Span, encode_footer
from martlet_tiered.format.keys import encode_keys, key_hashes
from martlet_tiered.names import DataName

__all__ = ["GROUP_BYTES", "TABLE_SCHEMA", "EncodedFile", "FileWriter", "group_ends", "pieces_of", "write_file"]

# The columns of the table: those of the files, and the two of the partition.
TABLE_SCHEMA: Final = pa.schema([*exact_schema(), pa.field("date", pa.date32()), pa.field("kind", pa.string())])
# A row group ends after this many bytes of records, or at a change of the topic once it has the lesser number.
GROUP_BYTES: Final = 8 << 20
GROUP_BYTES_MIN: Final = 1 << 20
# Records to decode at once: about 2 ms, in which the interpreter's lock may be held. A process of its own takes more.
PIECE_BYTES: Final = 1 << 20
PIECE_RECORDS: Final = 1000

DICTIONARY: Final = ("topic", "broker", "tag", "properties.key_value.key", "_born_host", "_store_host")
PACKED: Final = (
    *("queue", "offset", "born_ts", "store_ts", "flag", "reconsume_times"),
    *("_position", "_sys_flag", "_magic", "_prepared_position"),
)
# Readers that select by these columns skip row groups and pages.
WITH_STATISTICS: Final = ("topic", "queue", "offset", "key", "tag", "msg_id", "born_ts", "store_ts", "_position")
COMPRESSION_LEVEL: Final = 1


class EncodedFile(Struct, frozen=True):
    """A file: how a commit describes it, its footer, its bytes, and the object with its keys."""

    file: DataFile
    footer: FileFooter
    data: memoryview
    keys: bytes


def group_ends(topics: Integers, sizes: Integers) -> list[int]:
    """Return the ends of the row groups for sorted records with these topics (any numbers) and sizes in bytes."""
    ends, totals = [0], np.cumsum(sizes, dtype=np.int64)
    changes = np.append(np.flatnonzero(np.diff(topics)) + 1, len(topics))
    while ends[-1] < len(topics):
        before = int(totals[ends[-1] - 1]) if ends[-1] else 0
        full = int(np.searchsorted(totals, before + GROUP_BYTES)) + 1
        enough = int(np.searchsorted(totals, before + GROUP_BYTES_MIN)) + 1
        change = int(np.searchsorted(changes, enough))
        ends.append(min(full, int(changes[change]) if change < len(changes) else len(topics)))
    return ends[1:]


def pieces_of(sizes: Integers, factor: int = 1) -> list[tuple[int, int]]:
    """Return the first record and the end of each piece of records with these sizes, to be decoded at once.

    Pieces are *factor* times as large as usual.
    """
    pieces, totals, begin = [], np.cumsum(sizes, dtype=np.int64), 0
    while begin < len(sizes):
        before = int(totals[begin - 1]) if begin else 0
        end = int(np.searchsorted(totals, before + factor * PIECE_BYTES, "right"))
        end = min(max(end, begin + 1), begin + factor * PIECE_RECORDS)
        pieces.append((begin, end))
        begin = end
    return pieces


@final
class FileWriter:
    """Makes the file *name* of records of *broker*, in memory.

    Add records sorted by topic (by bytes), queue and offset, and end each row group where `group_ends` says. With a
    *capacity*, the bytes of the file are never copied, and a write beyond it raises an `OSError`; memory is used as the
    file grows. *factor* is for `pieces_of`.
    """

    def __init__(self, name: DataName, broker: str, capacity: int | None = None, factor: int = 1) -> None:
        self._name = name
        self._broker = broker
        self._buffer = None if capacity is None else pa.allocate_buffer(capacity)
        self._sink = pa.BufferOutputStream() if self._buffer is None else pa.FixedSizeBufferWriter(self._buffer)
        self._factor = factor
        self._decoder = ExactDecoder()
        self._writer = pq.ParquetWriter(
            self._sink,
            exact_schema(),
            compression="zstd",
            compression_level=COMPRESSION_LEVEL,
            use_dictionary=list(DICTIONARY),
            column_encoding=dict.fromkeys(PACKED, "DELTA_BINARY_PACKED"),
            write_statistics=list(WITH_STATISTICS),
            write_page_index=True,
            write_page_checksum=True,
        )
        self._batches: list[Any] = []  # of the row group, and
        self._bytes = self._crc = 0
        self._rows = 0  # in the row groups before
        self._hashes: list[Integers] = []  # of each row group
        self._group_hashes: list[Integers] = []
        self._spans: list[_OpenSpan] = []
        self._groups: list[GroupPlace] = []

    @property
    def bytes(self) -> int:
        """The size of the file so far."""
        size: int = self._sink.tell()
        return size

    def add(self, records: Records) -> Steps[None]:
        """Add *records*, contiguous in their data, to the row group."""
        for begin, end in pieces_of(records.heads["size"], self._factor):
            yield from self._add_piece(_part(records, begin, end))

    def end_group(self) -> Steps[None]:
        """Write the row group, unless it is empty."""
        if not self._batches:
            return
        begin = self._sink.tell() or 4  # after Parquet's magic, which is written with the first row group
        table = pa.Table.from_batches(self._batches, exact_schema())
        self._batches = []
        yield
        self._writer.write_table(table, row_group_size=len(table))
        self._groups.append(GroupPlace(self._rows, len(table), begin, self._sink.tell(), self._bytes, self._crc))
        self._rows += len(table)
        self._bytes = self._crc = 0
        self._hashes.append(np.concatenate(self._group_hashes))
        self._group_hashes = []
        yield

    def finish(self, now_ms: int) -> Steps[EncodedFile]:
        """Return the whole file, of which the last row group has ended; *now_ms* is when it was made."""
        assert not self._batches, "end the row group first"
        name = self._name
        spans = [span.close() for span in self._spans]
        footer = FileFooter(FOOTER_VERSION, self._broker, name.epoch, name.begin, name.end, spans, self._groups)
        yield
        self._writer.add_key_value_metadata({FOOTER_KEY: encode_footer(footer)})
        self._writer.close()
        yield
        if self._buffer is None:
            data = memoryview(self._sink.getvalue()).cast("B")
        else:
            data = memoryview(self._buffer).cast("B")[: self._sink.tell()]
        minimum, maximum = _ranges(spans)
        file = DataFile(name.path, name.date, name.kind, len(data), now_ms, self._rows, minimum, maximum)
        keys = encode_keys(self._hashes)
        return EncodedFile(file, footer, data, keys)

    def _add_piece(self, records: Records) -> Steps[None]:
        row = self._rows + sum(map(len, self._batches))
        for batch in self._decoder.batches(records, self._broker):
            self._batches.append(batch)
            yield
            self._group_hashes.append(key_hashes(batch))
            yield
        self._bytes += len(records.data)
        self._crc = crc32(records.data, self._crc)
        self._add_to_spans(records, row)
        yield

    def _add_to_spans(self, records: Records, row: int) -> None:
        topics = topics_of(records).dictionary_encode()
        codes, queues = np.asarray(topics.indices.fill_null(-1)), records.heads["queue"].astype(np.int64)
        names = [topic.decode("utf-8", "replace") for topic in topics.dictionary.to_pylist()]
        changes = np.flatnonzero((np.diff(codes) != 0) | (np.diff(queues) != 0)) + 1
        times = store_times(records)
        bounds = [0, *changes.tolist(), len(records)]
        for begin, end in pairwise(bounds):
            topic, queue = names[codes[begin]] if codes[begin] >= 0 else "", int(queues[begin])
            last = self._spans[-1] if self._spans else None
            if last is None or (last.topic, last.queue) != (topic, queue):
                last = _OpenSpan(topic, queue, row + begin)
                self._spans.append(last)
            last.add(_part(records, begin, end), times[begin:end])


def _part(records: Records, begin: int, end: int) -> Records:
    """Return the records from number *begin* on, before number *end*."""
    if (begin, end) == (0, len(records)):
        return records
    starts = records.starts[begin:end]
    first = int(starts[0])
    last = int(records.starts[end]) if end < len(records) else len(records.data)
    return Records(memoryview(records.data)[first:last], starts - first)


@final
class _OpenSpan:
    """A `Span` that grows."""

    def __init__(self, topic: str, queue: int, row: int) -> None:
        self.topic = topic
        self.queue = queue
        self._row = row
        self._first = self._last = self._count = self._crc = 0
        self._ms: tuple[int, int] | None = None
        self._positions: tuple[int, int] | None = None

    def add(self, records: Records, times: Integers) -> None:
        offsets = records.heads["offset"]
        if not self._count:
            self._first = int(offsets[0])
        self._last = int(offsets[-1])
        self._count += len(records)
        self._crc = crc32(records.data, self._crc)
        self._ms = _wider(self._ms, times)
        self._positions = _wider(self._positions, records.heads["position"])

    def close(self) -> Span:
        assert self._ms is not None
        assert self._positions is not None
        return Span(
            *(self.topic, self.queue, self._first, self._last, self._row, self._count),
            *self._ms,
            *self._positions,
            self._crc,
        )


def _wider(known: tuple[int, int] | None, values: Integers) -> tuple[int, int]:
    least, greatest = int(values.min()), int(values.max())
    return (least, greatest) if known is None else (min(known[0], least), max(known[1], greatest))


def _ranges(spans: list[Span]) -> tuple[dict[str, object], dict[str, object]]:
    """Return the least and greatest values of columns, for the table's statistics."""
    if not spans:
        return {}, {}
    minimum: dict[str, object] = {
        "topic": min(span.topic for span in spans),
        "queue": min(span.queue for span in spans),
        "offset": min(span.first for span in spans),
        "_position": min(span.min_position for span in spans),
    }
    maximum: dict[str, object] = {
        "topic": max(span.topic for span in spans),
        "queue": max(span.queue for span in spans),
        "offset": max(span.last for span in spans),
        "_position": max(span.max_position for span in spans),
    }
    first, last = min(span.min_ms for span in spans), max(span.max_ms for span in spans)
    if first >= MS_MIN and last <= MS_MAX:  # others are null in the column
        minimum["store_ts"], maximum["store_ts"] = (
            datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC) for ms in (first, last)
        )
    return minimum, maximum


def write_file(name: DataName, broker: str, records: Records, now_ms: int) -> EncodedFile:
    """Return the file *name* with all of *records*, in any order; for few of them."""
    topics = topics_of(records).dictionary_encode()
    ranks = pc.rank(topics.dictionary.fill_null(b""), "ascending", tiebreaker="dense") if len(records) else None
    numbers = np.asarray(ranks)[np.asarray(topics.indices.fill_null(0))] if len(records) else np.empty(0, np.int64)
    heads = records.heads
    order = np.lexsort((heads["position"], heads["offset"], heads["queue"], numbers))
    writer, begin = FileWriter(name, broker), 0
    for end in group_ends(numbers[order], heads["size"][order]):
        finish_now(writer.add(_gathered(records, order[begin:end])))
        finish_now(writer.end_group())
        begin = end
    return finish_now(writer.finish(now_ms))


def _gathered(records: Records, numbers: Integers) -> Records:
    return Records(bytearray().join(_each(records, numbers)))


def _each(records: Records, numbers: Integers) -> Iterator[memoryview]:
    view = memoryview(records.data)
    for number in numbers:
        start = int(records.starts[number])
        yield view[start : start + int(records.heads["size"][number])]
