"""Reads rows of a cold tier's table, without a broker; runs in the tasks of executors.

Only the chunks of the selected columns are requested, some row groups ahead. Most rows are as they are needed. A row
that does not say all of its record is decoded from the record, as if a broker had sent that: one that is kept raw, a
body that cannot be decompressed, an inner batch of RocketMQ.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np
import pyarrow as pa

from martlet.records.compression import COMPRESSED
from martlet_columns.decode import Decoder
from martlet_columns.records import Data, Integers, Records
from martlet_columns.schema import arrow_schema
from martlet_remoting.wire.inner_batches import INNER_BATCH
from martlet_spark.errors import ReadError
from martlet_spark.read.identity import identity_of
from martlet_spark.read.inner_batches import unrolled
from martlet_spark.read.offsets import words
from martlet_spark.read.planner import ColdRows, Range
from martlet_spark.read.tier_place import TierPlace
from martlet_tiered.errors import ObjectDamaged

if TYPE_CHECKING:
    from martlet_tiered.reading.row_groups import ParquetObject

__all__ = ["ColdBatches", "RowGroup", "first_stored_at", "last_identity"]

# Row groups that are requested before they are needed; a row group has 8 MiB of messages, and compressed about 2.
AHEAD: Final = 4
# Opened files that a process remembers: a task reads a file's row groups one after the other.
FILES_MAX: Final = 64
NEVER: Final = -(1 << 63)
NEEDED: Final = ("queue", "offset", "_sys_flag", "_record")


class RowGroup(NamedTuple):
    """Ranges of one row group, in order of their rows, and the bytes of the columns to read.

    If the file is damaged, *fault* says how, and there is nothing else.
    """

    ranges: Sequence[Range]
    file: "ParquetObject | None"
    pieces: Sequence[tuple[int, bytes]] = ()
    fault: str = ""


@final
class ColdBatches:
    """Decodes rows of tables into the columns of *decoder*."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        names = dict.fromkeys((*decoder.names, *NEEDED))
        # The stored body tells whether the shown one was decompressed, and properties name a body that was not.
        has_body = "body" in names or "properties" in names
        self._columns = (*names, "_body") if has_body else tuple(names)
        self._schema = arrow_schema(decoder.names)

    def fetched(self, ranges: Sequence[Range]) -> Iterator[RowGroup]:
        """Yield the row groups of *ranges*, neighbours of one row group together, each with its bytes.

        Raises:
          ObjectMissing: a file is gone.
          TierError: a file cannot be read.
        """
        groups = [list(group) for _, group in groupby(ranges, key=_row_group)]
        yield from _ahead(self.fetch, groups)

    def batches(self, group: RowGroup) -> list[Any]:
        """Return the rows of the ranges of *group*, as RecordBatches.

        Raises:
          ObjectDamaged: the rows cannot be decoded.
          ReadError: they are other messages than those of the range, or a body cannot be decompressed.
        """
        from martlet_tiered.reading.row_groups import decode_columns

        if group.file is None:
            raise ObjectDamaged(group.fault)
        table = decode_columns(group.file, _rows(group.ranges[0]).group, self._columns, group.pieces)
        at = _joined((_rows(each).row, len(each)) for each in group.ranges)
        offsets = _joined((each.start, len(each)) for each in group.ranges)
        is_run = int(at[-1]) - int(at[0]) + 1 == len(at) and bool((np.diff(at) == 1).all())
        parts = [(int(at[0]), len(at))] if is_run else [(_rows(each).row, len(each)) for each in group.ranges]
        rows = pa.concat_tables(table.slice(*part) for part in parts).combine_chunks()
        queues = np.repeat([each.queue.queue_id for each in group.ranges], [len(each) for each in group.ranges])
        if (
            len(rows) != len(at)
            or (offsets != _integers(rows, "offset")).any()
            or (queues != _integers(rows, "queue")).any()
        ):
            first = group.ranges[0]
            raise ReadError(f"{group.file.name!r} has other messages than {words(first.queue)} from {first.start} on")
        usual = [_cast(batch, self._schema) for batch in rows.select(list(self._decoder.names)).to_batches()]
        odd = self._odd_rows(rows)
        return self._with_odd(group, usual, at[odd], offsets[odd], odd) if len(odd) else usual

    def fetch(self, ranges: Sequence[Range]) -> RowGroup:
        """Return the row group of *ranges*. Raises what `fetched` raises."""
        from martlet_tiered.reading.row_groups import column_chunks

        rows = _rows(ranges[0])
        try:
            file = _opened(rows.place, rows.path, rows.file_bytes)
            chunks = column_chunks(file, rows.group, self._columns)
            data = rows.place.objects().read_ranges(file.name, chunks)
        except ObjectDamaged as error:
            return RowGroup(ranges, None, fault=str(error))
        return RowGroup(ranges, file, [(begin, each) for (begin, _), each in zip(chunks, data, strict=True)])

    def _odd_rows(self, rows: pa.Table) -> Integers:
        flags = _integers(rows, "_sys_flag")
        is_odd = np.asarray(rows.column("_record").combine_chunks().is_valid()) | (flags & INNER_BATCH == INNER_BATCH)
        if "_body" in self._columns:
            is_odd |= (flags & COMPRESSED != 0) & np.asarray(rows.column("_body").combine_chunks().is_null())
        return np.flatnonzero(is_odd)

    def _with_odd(
        self, group: RowGroup, usual: Sequence[Any], at: Integers, offsets: Integers, odd: Integers
    ) -> list[Any]:
        """Return the rows *usual* with the *odd* ones decoded from their records: rows *at* of the row group."""
        from martlet_tiered.reading.row_groups import RowRange, read_records

        assert group.file is not None
        first = group.ranges[0]
        rows = _rows(first)
        whole = RowRange(rows.group, 0, group.file.metadata.row_group(rows.group).num_rows, 0)
        records, _ = read_records(rows.place.objects(), group.file, whole)
        parts = [_record(records, int(row), int(offset)) for row, offset in zip(at, offsets, strict=True)]
        decoded = self._decoder.decode(Records(bytearray().join(parts)), first.queue.broker_name)
        count = sum(map(len, group.ranges))
        order = np.arange(count)
        order[odd] = count + np.arange(len(odd))
        found: list[Any] = pa.Table.from_batches([*usual, decoded]).take(pa.array(order)).combine_chunks().to_batches()
        return found


def last_identity(each: Range) -> str:
    """Return the identity of the last message of *each*, as `identities` has it.

    Raises:
      TierError: it cannot be read.
    """
    from martlet_tiered.reading.row_groups import RowRange, read_records

    row = _columns(each, ("born_ts", "_body_crc")).slice(len(each) - 1)
    if not any(column.null_count for column in row.columns):
        return identity_of(int(_integers(row, "born_ts")[0]) // 1000, int(_integers(row, "_body_crc")[0]) & 0xFFFFFFFF)
    rows = _rows(each)
    file, at = _opened(rows.place, rows.path, rows.file_bytes), rows.row + len(each) - 1
    whole = RowRange(rows.group, 0, file.metadata.row_group(rows.group).num_rows, 0)
    records, _ = read_records(rows.place.objects(), file, whole)
    return identity_of(int(records.heads["born_ms"][at]), int(records.heads["crc"][at]))


def first_stored_at(each: Range, ms: int) -> int | None:
    """Return the offset of the first message of *each* that was stored at *ms* or later; None if there is none.

    Raises:
      TierError: the times cannot be read.
    """
    times = _columns(each, ("store_ts",)).column("store_ts").combine_chunks().cast(pa.int64()).fill_null(NEVER)
    found = np.flatnonzero(np.asarray(times) >= ms * 1000)
    return each.start + int(found[0]) if len(found) else None


def _columns(each: Range, names: Sequence[str]) -> pa.Table:
    """Return the columns *names* of the rows of *each*."""
    from martlet_tiered.reading.row_groups import column_chunks, decode_columns

    rows = _rows(each)
    file = _opened(rows.place, rows.path, rows.file_bytes)
    chunks = column_chunks(file, rows.group, names)
    data = rows.place.objects().read_ranges(file.name, chunks)
    pieces = [(begin, part) for (begin, _), part in zip(chunks, data, strict=True)]
    return decode_columns(file, rows.group, names, pieces).slice(rows.row, len(each))


def _ahead(fetch: Callable[[Any], RowGroup], groups: Sequence[Any]) -> Iterator[RowGroup]:
    """Yield the result of *fetch* for each of *groups*, some of them requested ahead."""
    threads = ThreadPoolExecutor(AHEAD, "martlet-cold")
    try:
        waiting: deque[Future[RowGroup]] = deque()
        for group in groups:
            waiting.append(threads.submit(fetch, group))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)


@lru_cache(FILES_MAX)
def _opened(place: TierPlace, path: str, size: int) -> "ParquetObject":
    from martlet_tiered.reading.row_groups import open_parquet

    return open_parquet(place.objects(), path, size)


def _joined(runs: Iterable[tuple[int, int]]) -> Integers:
    """Return the numbers of all *runs*, each a first number and a count."""
    return np.concatenate([np.arange(first, first + count) for first, count in runs])


def _rows(each: Range) -> ColdRows:
    assert each.rows is not None, "the range is not of a table"
    return each.rows


def _row_group(each: Range) -> tuple[TierPlace, str, int]:
    rows = _rows(each)
    return rows.place, rows.path, rows.group


def _record(records: Records, row: int, offset: int) -> Data:
    """Return the record of number *row*; if it is an inner batch, that of its message at *offset*."""
    start = int(records.starts[row])
    one = Records(bytearray(records.data[start : start + int(records.heads["size"][row])]))
    message = unrolled(one, offset).before(offset + 1)
    if message is None:
        raise ReadError(f"{one.describe(0)} is a batch that lacks message {offset}")
    return message.data


def _integers(rows: pa.Table, name: str) -> Integers:
    return np.asarray(rows.column(name).combine_chunks().cast(pa.int64()).fill_null(0))


def _cast(batch: Any, schema: pa.Schema) -> Any:
    """Return *batch* with the types of *schema*."""
    columns = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
