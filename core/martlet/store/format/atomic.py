"""Atomic groups: after a crash at any moment, either all records of a group are stored or none.

Two bits of sysFlag, unused otherwise, mark each record of a group as the first, an inner or the last one. The records
are contiguous in one segment and are written in one commit. There are no begin and commit records: a scan after a crash
accepts the first record of a group only if intact records lead from it to the last one, and resynchronisation never
enters a group. So each record carries all the information that the scan needs.

One byte of the magic of a commit's first group is written after everything else (`LogWriter.write_out`). So RocketMQ,
which does not know groups, ends the log before a group that a killed process left unfinished.

RocketMQ copies sysFlag into the messages that it delivers late, so these bits also occur outside of groups. If an
intact record follows that does not continue the group, there was no group. A log to which RocketMQ may have written
since our checkpoint is not checked at all.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from martlet.records.codec import check_record, record_crc_holds
from martlet.records.layout import (
    BLANK_MAGIC,
    FILLER,
    FILLER_BYTES,
    GROUP_MASK,
    HEAD_BYTES,
    MAGIC_AT,
    MAGIC_V1,
    MAGICS,
    NARROW,
    RECORD_BYTES_MIN,
    SYS_FLAG_AT,
    WIDE_HOSTS,
    Buffer,
    RecordView,
)
from martlet.runtime.checksum import crc32
from martlet.store.disk.segments import Segment, Segments

__all__ = [
    "FIRST",
    "INNER",
    "LAST",
    "MARK_AT",
    "NOWHERE",
    "group_flags",
    "group_marks",
    "lacks_magic",
    "may_begin_at",
    "valid_after",
    "whole_group",
]

# The byte of a record with the two bits: 0x20000000 and 0x40000000 of sysFlag.
MARK_AT: Final = SYS_FLAG_AT
FIRST: Final = 0x20
INNER: Final = 0x40
LAST: Final = 0x60
INNER_FLAG: Final = INNER << 24

NOWHERE: Final = 2**62  # greater than every position
TORN: Final = -1
FLAGS_CACHED: Final = 16  # of one group size each, 8 bytes a message
BLOCK_BYTES: Final = 4 * 1024 * 1024
MAGIC_START: Final = MAGIC_V1.to_bytes(4, "big")[:3]


@lru_cache(maxsize=16)
@lru_cache(FLAGS_CACHED)
def group_flags(count: int) -> tuple[int, ...]:
    """Return the bits of sysFlag for a group of *count* records; a single record has none."""
    return tuple(mark << 24 for mark in group_marks(count))


def group_marks(count: int) -> list[int]:
    """Return the marks for a group of *count* records; a single record has none."""
    return [FIRST, *[INNER] * (count - 2), LAST] if count > 1 else [0] * count


def whole_group(data: Buffer, start: int, room: int, base: int) -> int:
    """Return the end of the group that begins at *start* of *data*; `TORN`, or 0 if *data* is too short to tell.

    Args:
      room: index of the end of the segment, which may be after the end of *data*.
      base: the log position of *data*.
    """
    at, end = start, len(data)
    while room - at >= FILLER_BYTES:
        if end - at < RECORD_BYTES_MIN:
            return 0 if end < room else at if FILLER.unpack_from(data, at)[1] == BLANK_MAGIC else TORN
        size: int
        size, magic, crc, _, _, position, sys_flag, _, body_bytes = NARROW.unpack_from(data, at)
        if magic == BLANK_MAGIC and at + size == room:
            return at
        if magic not in MAGICS or size < RECORD_BYTES_MIN or at + size > room or position != base + at:
            return TORN
        if at + size > end:
            return 0
        if magic != MAGIC_V1 or sys_flag & WIDE_HOSTS or not 0 <= body_bytes <= size - RECORD_BYTES_MIN:
            intact = _is_intact(data, at, at + size, position)
        else:
            intact = _is_usual(data, at, at + size, at + HEAD_BYTES + body_bytes, crc)
        if not intact:
            return TORN
        mark = sys_flag & GROUP_MASK
        if mark < INNER_FLAG and at > start:
            return at
        at += size
        if mark == GROUP_MASK:
            return at
    return at


def _is_usual(data: Buffer, start: int, end: int, topic_at: int, crc: int) -> bool:
    """As `_is_intact`, for a V1 record with IPv4 hosts and a complete header; the topic's length is at *topic_at*."""
    at = topic_at + 1 + data[topic_at]
    if at + 2 > end or at + 2 + (data[at] << 8 | data[at + 1]) != end:
        return False
    if crc32(data[start + HEAD_BYTES : topic_at]) & 0x7FFFFFFF != crc or not record_crc_holds(data, start, end):
        return False
    return 0 not in data[topic_at + 1 : at] and 0 not in data[at + 2 : end]


def _is_intact(data: Buffer, start: int, end: int, position: int) -> bool:
    """Return whether ``data[start:end]`` is a record that a scan accepts, even where a write may be torn."""
    if not check_record(data, start, end, position):
        return False
    # Only a record CRC covers properties; the parts that were not written read as zeros.
    return 0 not in RecordView(data, start).properties


def valid_after(
    segments: Segments, position: int, groups_from: int = NOWHERE, on_part: Callable[[int], None] | None = None
) -> int:
    """Return the first position after *position* at which an intact record begins; -1 if there is none.

    From *groups_from* on, that record is outside of groups or the first of a whole one; *on_part* is called with the
    positions of other members.
    """
    for segment in segments.items:
        if segment.end <= position:
            continue
        found = _valid_in(segments, segment, max(position + 1, segment.start), groups_from, on_part)
        if found >= 0:
            return found
    return -1


def _valid_in(
    segments: Segments,
    segment: Segment,
    position: int,
    groups_from: int,
    on_part: Callable[[int], None] | None,
) -> int:
    size = segments.files.size(segment.path)
    while position < segment.end:
        at = segments.files.next_data(segment.path, position - segment.start)
        if at >= size:
            return -1
        # The first bytes of a record's size are zeros.
        position = max(position, segment.start + at - 4)
        data = segments.read(position, BLOCK_BYTES)
        at = data.find(MAGIC_START)
        while at >= 0:
            found = position + at - MAGIC_AT
            if at >= MAGIC_AT and _is_record_at(segments, segment, found):
                if found < groups_from or may_begin_at(segments, segment, found):
                    return found
                if on_part is not None:
                    on_part(found)
            at = data.find(MAGIC_START, at + 1)
        if len(data) <= 7:
            return -1
        position += len(data) - 7
    return -1


def _is_record_at(segments: Segments, segment: Segment, position: int) -> bool:
    """Return whether an intact record begins at *position* of *segment*."""
    head = segments.read(position, FILLER_BYTES)
    if len(head) < FILLER_BYTES:
        return False
    size, magic = FILLER.unpack(head)
    if magic not in MAGICS or size < RECORD_BYTES_MIN or position + size > segment.end:
        return False
    data = segments.read(position, size)
    return len(data) == size and check_record(data, 0, size, position)


def may_begin_at(segments: Segments, segment: Segment, position: int) -> bool:
    """Return whether the intact record at *position* is outside of groups, or the first of a whole one."""
    mark = segments.read(position + MARK_AT, 1)[0] & LAST
    return not mark or (mark == FIRST and _is_whole_at(segments, segment, position))


def lacks_magic(segments: Segments, segment: Segment, position: int) -> bool:
    """Return whether a group at *position* is whole but for the first byte of its magic, which is written last."""
    head = segments.read(position, MARK_AT + 1)
    if len(head) <= MARK_AT or head[MARK_AT] & LAST != FIRST or head[MAGIC_AT]:
        return False
    return head[MAGIC_AT + 1 : MAGIC_AT + 3] == MAGIC_START[1:] and _is_whole_at(segments, segment, position)


def _is_whole_at(segments: Segments, segment: Segment, position: int) -> bool:
    """Return whether a whole group is at *position*, ignoring the first byte of its magic, which is written last."""
    want = BLOCK_BYTES
    while True:
        data = bytearray(segments.read(position, want))
        data[MAGIC_AT] = MAGIC_START[0]
        end = whole_group(data, 0, segment.end - position, position)
        if end or len(data) < want:
            return end > 0
        want *= 2
