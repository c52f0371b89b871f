"""Tests whether the records that a key index does not cover have keys."""

from typing import Final

from martlet.records.codec import check_record
from martlet.records.layout import (
    BLANK_MAGIC,
    FILLER,
    FILLER_BYTES,
    RECORD_BYTES_MIN,
    ROLLBACK,
    TRANSACTION_MASK,
    RecordView,
)
from martlet.store.disk.segments import Segments

__all__ = ["is_keyless", "record_end"]

# A longer range counts as one with keys: the index is then rebuilt, which is always correct.
LOOK_BYTES: Final = 16 * 1024 * 1024


def is_keyless(segments: Segments, start: int, end: int) -> bool:
    """Return whether no record from log position *start* to *end* has a key; False if unknown or slow to check."""
    for segment in segments.items:
        at = max(start, segment.start)
        while at < min(end, segment.end):
            if at - start > LOOK_BYTES:
                return False
            head = segments.read(at, FILLER_BYTES)
            if len(head) < FILLER_BYTES:
                return False
            size, magic = FILLER.unpack(head)
            if magic == BLANK_MAGIC and at + size == segment.end:
                break
            data = segments.read(at, size) if RECORD_BYTES_MIN <= size <= segment.end - at else b""
            if not check_record(data, 0, size, at) or _has_keys(RecordView(data)):
                return False
            at += size
    return True


def record_end(segments: Segments, position: int) -> int:
    """Return the end of the record at *position*; *position* if there is none."""
    head = segments.read(position, FILLER_BYTES)
    return position + FILLER.unpack(head)[0] if len(head) == FILLER_BYTES else position


def _has_keys(record: RecordView) -> bool:
    """Return whether the record is indexed by key; a record of a rolled back transaction is not."""
    properties = record.properties
    has_keys = b"UNIQ_KEY\x01" in properties or b"KEYS\x01" in properties
    return has_keys and record.sys_flag & TRANSACTION_MASK != ROLLBACK
