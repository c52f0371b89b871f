"""Rows of data files, read with one request for each row group, and rebuilt as records.

The row groups of the broker's files have 8 MiB of records. Those of other programs, such as Delta's OPTIMIZE, can have
any size; a very large one is read in parts, each of which decodes what is before it.
"""

import io
import threading
from collections.abc import Sequence
from typing import Any, Final, final

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct

from martlet.runtime.checksum import crc32
from martlet_columns.errors import RecordError
from martlet_columns.rebuild import rebuild
from martlet_columns.records import Records
from martlet_tiered.errors import ObjectDamaged
from martlet_tiered.format.footer import FileFooter, decode_group, footer_of, group_range, read_metadata
from martlet_tiered.names import DATA_FOLDER
from martlet_tiered.objects import Objects

__all__ = [
    "ParquetObject",
    "RowRange",
    "column_chunks",
    "decode_columns",
    "open_parquet",
    "read_columns",
    "read_records",
]

# Bytes of a row group before its compression from which on it is read in parts, and of a part.
GROUP_BYTES_MAX: Final = 64 << 20
PART_BYTES: Final = 8 << 20
# Decoding a row group takes about 40 MiB for a moment, and a processor.
_DECODING: Final = threading.BoundedSemaphore(2)


class RowRange(Struct, frozen=True):
    """Rows that are read together: all of row group `group`, or its rows from `at` on if it is very large.

    `first` is the number of the first row in the file.
    """

    group: int
    first: int
    count: int
    at: int

    @property
    def end(self) -> int:
        """The row after the last one."""
        return self.first + self.count


@final
class ParquetObject:
    """The metadata of a data file; `path` is relative to the table, and `ranges` has its rows in order."""

    __slots__ = ("bytes", "footer", "metadata", "path", "ranges")

    def __init__(self, path: str, size: int, metadata: pq.FileMetaData, footer: FileFooter | None) -> None:
        self.path: Final = path
        self.bytes: Final = size
        self.metadata: Final = metadata
        self.footer: Final = footer
        self.ranges: Final = _ranges(metadata)

    @property
    def name(self) -> str:
        """The name of the object."""
        return f"{DATA_FOLDER}/{self.path}"

    @property
    def memory_bytes(self) -> int:
        """About the memory that the metadata take: decoded, some times as much as in the file."""
        spans = len(self.footer.spans) if self.footer is not None else 0
        return 8 * int(self.metadata.serialized_size) + 300 * spans

    def range_at(self, row: int) -> int:
        """Return the index in `ranges` of the one that has *row*."""
        low, high = 0, len(self.ranges)
        while low < high:
            middle = (low + high) // 2
            if self.ranges[middle].end <= row:
                low = middle + 1
            else:
                high = middle
        return low

    def greatest(self, group: int, column: str) -> Any:
        """Return the greatest value of *column* in row group *group*; None if unknown."""
        statistics = self._chunk(group, column).statistics
        is_known = statistics is not None and statistics.has_min_max and statistics.null_count == 0
        return statistics.max if is_known else None

    def bytes_of(self, group: int, column: str) -> tuple[int, int]:
        """Return the begin and the end of the bytes of *column* in row group *group*."""
        return _chunk_range(self._chunk(group, column))

    def _chunk(self, group: int, column: str) -> Any:
        names = [self.metadata.schema.column(index).path for index in range(self.metadata.num_columns)]
        if column not in names:
            raise ObjectDamaged(f"{self.path!r} has no column {column!r}")
        return self.metadata.row_group(group).column(names.index(column))


def _ranges(metadata: pq.FileMetaData) -> tuple[RowRange, ...]:
    found: list[RowRange] = []
    first = 0
    for group in range(metadata.num_row_groups):
        rows, size = metadata.row_group(group).num_rows, metadata.row_group(group).total_byte_size
        parts = -(-size // PART_BYTES) if size > GROUP_BYTES_MAX else 1
        step = max(1, -(-rows // parts))
        found += [RowRange(group, first + at, min(step, rows - at), at) for at in range(0, rows, step)]
        first += rows
    return tuple(found)


def _chunk_range(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Return the begin and the end of the bytes of a column in a row group."""
    dictionary = chunk.dictionary_page_offset
    begin = chunk.data_page_offset if dictionary is None else min(dictionary, chunk.data_page_offset)
    return begin, begin + chunk.total_compressed_size


def open_parquet(objects: Objects, path: str, size: int) -> ParquetObject:
    """Return the metadata of the file *path* of *size* bytes: one request, two if they are longer than 64 KiB.

    Raises:
      ObjectDamaged: the file is damaged.
      TierError: it cannot be read.
    """
    metadata = read_metadata(objects, f"{DATA_FOLDER}/{path}", size)
    return ParquetObject(path, size, metadata, footer_of(metadata))


def read_records(objects: Objects, file: ParquetObject, rows: RowRange) -> tuple[Records, bool]:
    """Return the records of *rows*, and whether they match the CRC in the footer: one request.

    Raises:
      ObjectDamaged: they cannot be decoded.
      TierError: they cannot be read.
    """
    begin, end = group_range(file.metadata, rows.group)
    data = objects.read_range(file.name, begin, end)
    with _DECODING:
        return _decoded(file, rows, begin, data)


def _decoded(file: ParquetObject, rows: RowRange, begin: int, data: bytes) -> tuple[Records, bool]:
    if rows.count == file.metadata.row_group(rows.group).num_rows:
        table = decode_group(file.metadata, rows.group, begin, data)
    else:
        table = _decode_part(file, rows, begin, data)
    try:
        records = rebuild(table)
    except (RecordError, pa.ArrowException) as error:
        raise ObjectDamaged(f"{file.name!r} has rows of which no records can be made: {error}") from error
    if file.footer is None:
        return records, False
    return records, crc32(records.data) == file.footer.groups[rows.group].crc


def read_columns(objects: Objects, file: ParquetObject, names: Sequence[str]) -> pa.Table:
    """Return the columns *names*, none of them nested, of all rows.

    Raises:
      ObjectDamaged: they cannot be decoded.
      TierError: they cannot be read.
    """
    groups = range(file.metadata.num_row_groups)
    spans = [file.bytes_of(group, name) for group in groups for name in names]
    data = objects.read_ranges(file.name, spans)
    pieces = [(begin, each) for (begin, _), each in zip(spans, data, strict=True)]
    try:
        return _parquet(file, pieces).read(list(names), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise ObjectDamaged(f"{file.name!r} has columns that cannot be read: {error}") from error


def column_chunks(file: ParquetObject, group: int, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return the begin and end of the bytes of the columns *names*, nested ones too, in row group *group*.

    What is adjacent is one range.
    """
    found: list[tuple[int, int]] = []
    for number in range(file.metadata.num_columns):
        if file.metadata.schema.column(number).path.partition(".")[0] in names:
            begin, end = _chunk_range(file.metadata.row_group(group).column(number))
            if found and found[-1][1] == begin:
                begin = found.pop()[0]
            found.append((begin, end))
    return found


def decode_columns(
    file: ParquetObject, group: int, names: Sequence[str], pieces: Sequence[tuple[int, bytes]]
) -> pa.Table:
    """Return the columns *names* of row group *group*; *pieces* have the bytes that `column_chunks` says, each with its
    begin.

    Raises:
      ObjectDamaged: they cannot be decoded.
    """
    try:
        return _parquet(file, pieces).read_row_group(group, columns=list(names), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise ObjectDamaged(f"row group {group} of {file.name!r} cannot be read: {error}") from error


def _decode_part(file: ParquetObject, rows: RowRange, begin: int, data: bytes) -> pa.Table:
    """Return *rows* of the row group whose bytes from *begin* on are *data*."""
    at, parts, end = 0, [], rows.at + rows.count
    try:
        for batch in _parquet(file, [(begin, data)]).iter_batches(rows.count, [rows.group], use_threads=False):
            first, last = max(rows.at, at), min(end, at + len(batch))
            if first < last:
                parts.append(batch.slice(first - at, last - first))
            at += len(batch)
            if at >= end:
                break
        return pa.Table.from_batches(parts)
    except (pa.ArrowException, OSError) as error:
        raise ObjectDamaged(f"row group {rows.group} of {file.name!r} cannot be read: {error}") from error


def _parquet(file: ParquetObject, pieces: Sequence[tuple[int, bytes]]) -> pq.ParquetFile:
    source = pa.PythonFile(_Pieces(file.bytes, pieces), "r")
    return pq.ParquetFile(source, metadata=file.metadata, pre_buffer=False, page_checksum_verification=True)


@final
class _Pieces(io.RawIOBase):
    """A file of *size* bytes of which only *pieces* can be read: each with its position."""

    def __init__(self, size: int, pieces: Sequence[tuple[int, bytes]]) -> None:
        super().__init__()
        self._size = size
        self._pieces = pieces
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        for begin, data in self._pieces:
            if size >= 0 and begin <= self._at and self._at + size <= begin + len(data):
                found = data[self._at - begin : self._at - begin + size]
                self._at += size
                return found
        raise OSError(f"bytes {self._at} to {self._at + size} were not read")
