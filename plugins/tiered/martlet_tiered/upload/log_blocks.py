"""Reads the log block by block, in threads, and finds the intact records in it."""

from typing import Final

import numpy as np
from msgspec import Struct

from martlet.records.codec import check_record
from martlet.records.layout import BLANK_MAGIC, FILLER, FILLER_BYTES, I64, MAGICS, POSITION_AT, RECORD_BYTES_MIN
from martlet.runtime.native import native
from martlet.store.disk.segments import Segment, Segments
from martlet.store.format.atomic import valid_after
from martlet_columns.records import Integers, Records, doubtful_records, record_starts
from martlet_tiered.errors import LogUnreadable

__all__ = ["BLOCK_BYTES", "LogBlock", "read_block"]

BLOCK_BYTES: Final = 1 << 20
MAGICS_ARRAY: Final = np.array(sorted(MAGICS), np.uint32)


class LogBlock(Struct):
    """Records that follow each other in the log from `position` on, and where the log continues (`next`).

    `is_intact` has a flag for each record: it matches its CRCs. `lost` are bytes before `next` that are no record, and
    `removed` bytes that the log does not have any more. If `next` is `position`, the log cannot be read any further
    up to the given end.
    """

    position: int
    records: Records
    is_intact: Integers
    next: int
    lost: int = 0
    removed: int = 0


def read_block(segments: Segments, position: int, end: int) -> LogBlock:
    """Return the records at log position *position*, none of which ends after *end*.

    Raises:
      LogUnreadable: the log has no data there, although it has a segment.
      OSError: the disk fails.
    """
    segment = segments.find(position)
    if segment is None:
        return _after_gap(segments, position, end)
    want = BLOCK_BYTES
    while True:
        data = segments.read(position, min(want, segment.end - position, end - position))
        if not data:
            raise LogUnreadable(f"the log has no data at position {position}, in {segment.path!r}")
        records, size = _records_in(data, position)
        after = position + size
        if after < min(segment.end, end):
            if not len(records) and (needed := _record_bytes(data, position, segment)) > len(data):
                if position + needed > end:
                    return _block(position, records, position)
                want = needed
                continue
            return _before_other(segments, segment, data, records, position, after, end)
        return _block(position, records, after)


def _block(position: int, records: Records, after: int, lost: int = 0, removed: int = 0) -> LogBlock:
    return LogBlock(position, records, _intact(records, position), after, lost, removed)


def _after_gap(segments: Segments, position: int, end: int) -> LogBlock:
    """Skip positions for which there is no segment: retention has removed it."""
    after = min([each.start for each in segments.items if each.start > position] + [end])
    return _block(position, _nothing(), after, removed=after - position)


def _nothing() -> Records:
    return Records(bytearray())


def _records_in(data: bytes, position: int) -> tuple[Records, int]:
    """Return the whole records from the begin of *data* on, for log position *position*, and their size."""
    view = memoryview(data)
    starts, _ = native(record_starts)(view)
    records = Records(view, starts)
    heads = records.heads
    ends = starts + heads["size"]
    fine = np.isin(heads["magic"], MAGICS_ARRAY) & (heads["position"] == position + starts) & (ends <= len(data))
    count = len(fine) if fine.all() else int(np.argmin(fine))
    size = int(ends[count - 1]) if count else 0
    return (records if count == len(fine) else Records(view[:size], starts[:count])), size


def _record_bytes(data: bytes, position: int, segment: Segment) -> int:
    """Return the size of the record at the begin of *data*, which may end after it; 0 if none begins there."""
    if len(data) < RECORD_BYTES_MIN:
        return RECORD_BYTES_MIN if position + RECORD_BYTES_MIN <= segment.end and not _is_filler(data, 0, 0) else 0
    size, magic = FILLER.unpack_from(data)
    is_record = magic in MAGICS and I64.unpack_from(data, POSITION_AT)[0] == position
    return size if is_record and RECORD_BYTES_MIN <= size <= segment.end - position else 0


def _is_filler(data: bytes, at: int, room: int) -> bool:
    """Whether the rest of the segment, *room* bytes, holds no record; 0: any number."""
    if len(data) - at < FILLER_BYTES:
        return False
    size, magic = FILLER.unpack_from(data, at)
    return magic == BLANK_MAGIC and room in (0, size)


def _before_other(
    segments: Segments, segment: Segment, data: bytes, records: Records, position: int, after: int, end: int
) -> LogBlock:
    """Return the block of *records* that end at *after*, where no whole record follows in *data*."""
    at = after - position
    if len(records) and len(data) - at < max(RECORD_BYTES_MIN, FILLER_BYTES):
        return _block(position, records, after)
    if _is_filler(data, at, segment.end - after):
        # The end is one of a record, so it is not inside a filler, but for a log that was cut there.
        return _block(position, records, min(segment.end, end))
    if len(records) and _record_bytes(data[at : at + RECORD_BYTES_MIN], after, segment):
        return _block(position, records, after)
    found = valid_after(segments, after)
    following = found if 0 <= found < end else end
    return _block(position, records, following, lost=following - after)


def _intact(records: Records, position: int) -> Integers:
    fine = np.ones(len(records), bool)
    if len(records):
        for start in native(doubtful_records)(records.data, records.starts, records.heads):
            row = int(np.searchsorted(records.starts, start))
            end = start + int(records.heads["size"][row])
            fine[row] = check_record(records.data, start, end, position + start)
    return fine
