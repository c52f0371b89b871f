"""Blocks: the records of one row group, rebuilt and checked, which all consumers share.

The footer has the CRC of the records of each row group. If they do not match it, or if another program has written the
file, the queues' CRCs and the records' own ones tell which records are intact.
"""

from collections.abc import Iterator
from typing import Any, Final, final

import numpy as np
from msgspec import Struct

from martlet.records.codec import check_record
from martlet.records.layout import RecordView
from martlet.runtime.checksum import crc32
from martlet_columns.errors import RecordError
from martlet_columns.records import Integers, Records
from martlet_tiered.errors import ObjectDamaged
from martlet_tiered.format.fields import store_times
from martlet_tiered.format.footer import Span
from martlet_tiered.objects import Objects
from martlet_tiered.reading.row_groups import ParquetObject, RowRange, read_records
from martlet_tiered.reading.spans import end_row

__all__ = ["Block", "SpanSlice", "WrongIndex", "load_block"]


class WrongIndex(Exception):
    """The rows that the index names belong to another queue."""


@final
class Block:
    """The records of *rows*, of which only the intact ones are given to anybody.

    The arrays have an element for each record; `times` are in milliseconds, and `data` has all records.
    """

    __slots__ = ("_checked", "data", "ends", "intact", "offsets", "positions", "queues", "rows", "starts", "times")

    def __init__(self, rows: RowRange, records: Records, intact: Any) -> None:
        self.rows: Final = rows
        self.data: Final = bytes(records.data)
        self.intact: Final = intact
        self.starts: Final[Integers] = records.starts
        self.ends: Final[Integers] = np.append(records.starts[1:], len(records.data))
        self.queues: Final[Integers] = records.heads["queue"].astype(np.int32)
        self.offsets: Final[Integers] = records.heads["offset"].astype(np.int64)
        self.positions: Final[Integers] = records.heads["position"].astype(np.int64)
        self.times: Final[Integers] = store_times(records)
        self._checked: set[tuple[str, int, int]] = set()

    @property
    def damaged(self) -> int:
        """The number of records that are not intact."""
        return int(len(self.intact) - self.intact.sum())

    @property
    def memory_bytes(self) -> int:
        """About the memory that the block takes."""
        return len(self.data) + 45 * len(self.offsets)

    def record(self, at: int) -> bytes:
        """Return record *at* of the block."""
        return bytes(self.data[self.starts[at] : self.ends[at]])

    def slice_of(self, span: Span) -> "SpanSlice":
        """Return the messages of *span* in this block.

        Raises:
          WrongIndex: there are others.
        """
        begin = min(max(span.row - self.rows.first, 0), len(self.offsets))
        end = max(min(end_row(span) - self.rows.first, len(self.offsets)), begin)
        found = SpanSlice(self, begin, end)
        key = span.topic, span.queue, span.first
        if begin < end and key not in self._checked:
            self._check(span, begin, end)
            self._checked.add(key)
        return found

    def _check(self, span: Span, begin: int, end: int) -> None:
        offsets = self.offsets[begin:end]
        is_right = (
            bool((self.queues[begin:end] == span.queue).all())
            and span.first <= offsets[0] <= offsets[-1] <= span.last
            and bool((np.diff(offsets) > 0).all())
        )
        # A block has few topics, and its records are sorted: the first and the last one tell about all.
        if is_right and all(self.intact[at] for at in (begin, end - 1)):
            is_right = all(RecordView(self.record(at)).topic == span.topic for at in (begin, end - 1))
        if not is_right and self.intact[begin:end].all():
            raise WrongIndex(f"rows {begin} to {end} are no messages of queue {span.queue} of {span.topic!r}")


class SpanSlice(Struct, frozen=True):
    """The messages of one span in `block`: its records from `begin` on, before `end`."""

    block: Block
    begin: int
    end: int

    def index(self, offset: int) -> int:
        """Return the index in the block of the first intact message at or after *offset*; `end` if there is none."""
        at = self.begin + int(np.searchsorted(self.block.offsets[self.begin : self.end], offset))
        intact = self.block.intact[at : self.end]
        return at + int(intact.argmax()) if intact.any() else self.end

    def first_at_least(self, values: Integers, least: int, offset: int) -> int | None:
        """Return the offset of the first intact message from *offset* on whose value is at least *least*, if any.

        *values* has one of each record of the block.
        """
        inside = slice(self.begin, self.end)
        fits = (values[inside] >= least) & (self.block.offsets[inside] >= offset) & self.block.intact[inside]
        return int(self.block.offsets[self.begin + int(fits.argmax())]) if fits.any() else None

    def with_text(self, text: bytes) -> Iterator[int]:
        """Yield the index of each intact record that has *text* anywhere."""
        block = self.block
        if self.begin == self.end:
            return
        data, ends = block.data, block.ends[self.begin : self.end]
        at, end = int(block.starts[self.begin]), int(ends[-1])
        while (at := data.find(text, at, end)) >= 0:
            number = self.begin + int(np.searchsorted(ends, at, "right"))
            if block.intact[number]:
                yield number
            at = int(block.ends[number])

    def records(self, at: int, end: int) -> Iterator[bytes]:
        """Yield the intact records from index *at* on, before index *end*."""
        block = self.block
        for number in range(at, end):
            if block.intact[number]:
                yield block.record(number)


def load_block(objects: Objects, file: ParquetObject, rows: RowRange) -> Block:
    """Return the block with *rows*: one request, two if the first answer is damaged.

    Raises:
      ObjectDamaged: no records can be made of the rows.
      TierError: they cannot be read.
    """
    try:
        records, is_right = read_records(objects, file, rows)
        must_repeat = not is_right and file.footer is not None
    except ObjectDamaged:
        must_repeat = True
    if must_repeat:
        records, is_right = read_records(objects, file, rows)
    intact = np.ones(len(records), bool)
    if not is_right:
        intact = _intact(records, rows, file)
    return Block(rows, records, intact)


def _intact(records: Records, rows: RowRange, file: ParquetObject) -> Any:
    """Return which of *records* are intact, one by one."""
    if file.footer is None:
        try:
            records.check_bodies()
        except RecordError:
            pass
        else:
            return np.ones(len(records), bool)
    data, starts = records.data, records.starts.tolist()
    ends = [*starts[1:], len(data)]
    positions = records.heads["position"].tolist()
    intact = np.array([check_record(data, *each) for each in zip(starts, ends, positions, strict=True)], bool)
    for span in file.footer.spans if file.footer is not None else ():
        begin, end = span.row - rows.first, end_row(span) - rows.first
        if begin < 0 or end > len(starts):
            continue  # its CRC is of records in other row groups too
        if crc32(memoryview(data)[starts[begin] : ends[end - 1]]) != span.crc:
            intact[begin:end] = False
    return intact
