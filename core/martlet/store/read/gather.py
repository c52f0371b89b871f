"""Gathers the records of a queue's entries from a page of the log, many in one call.

The native kernel has these functions as well; see `martlet.runtime.native`.
"""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, compress
from operator import add, le, ne
from typing import Final

from martlet.records.codec import check_record
from martlet.records.layout import BLANK_SIZE, ENTRY, ENTRY_BYTES, IDENTITY, QUEUE_ID_AT, Buffer
from martlet.store.disk.page_cache import Page
from martlet.store.queues.queues import Queue
from martlet.store.read.tag_match import matching_entries

__all__ = ["count_intact", "gather_records", "select_entries"]

SWAPS: Final = sys.byteorder == "little"  # entries are big-endian


def select_entries(data: bytes, codes: frozenset[int], count_max: int) -> tuple[bytes, list[int], int]:
    """Return the entries of *data* with one of *codes*, their indexes, and the number of entries checked.

    The last two are those of `matching_entries`.
    """
    indexes, checked_count = matching_entries(data, codes, count_max)
    if len(indexes) * ENTRY_BYTES < len(data):
        data = b"".join([data[i * ENTRY_BYTES : (i + 1) * ENTRY_BYTES] for i in indexes])
    return data, indexes, checked_count


def gather_records(
    entries: bytes, first: int, end: int, bytes_max: int, page: Page, pieces: list[Buffer]
) -> tuple[int, int]:
    """Add to *pieces* the records of *entries* from index *first* up to *end*; return their number and their bytes.

    Stops before a record that is not whole in *page*, that begins before the end of the one before, or with which the
    records would have more than *bytes_max* bytes, and before an entry that has no record. Adjacent records are added
    as one view of the page, others as one copy.
    """
    data, low = entries[first * ENTRY_BYTES : end * ENTRY_BYTES], page.base & 0xFFFFFFFF
    words = array("I", data)  # five words per entry: position, position, size, code, code
    if SWAPS:
        words.byteswap()
    highs, starts, sizes = words[0::5], words[1::5].tolist(), words[2::5].tolist()
    ends = list(map(add, starts, sizes))
    count = len(starts)
    if not (
        count
        and highs.count(page.base >> 32) == count
        and 0 < min(sizes) <= max(sizes) < BLANK_SIZE
        and low <= starts[0]
        and all(map(le, ends, starts[1:]))
    ):
        count = _usual_count(data, page.base)
    count = bisect_right(ends, page.end - page.base + low, 0, count)
    count = bisect_right(list(accumulate(sizes)), bytes_max, 0, count)
    if not count:
        return 0, 0
    parts = _runs(page.view, low, starts[:count], ends[:count])
    pieces.append(parts[0] if len(parts) == 1 else b"".join(parts))
    return count, sum(sizes[:count])


def count_intact(
    entries: bytes, first: int, end: int, bytes_max: int, page: Page, queue: Queue, offset: int, indexes: Sequence[int]
) -> int:
    """Return how many records of *entries*, from index *first* up to *end*, are intact and in *page*.

    Each must have the CRCs that it says, and belong to *queue*, at *offset* plus its number in *indexes*. Stops as
    `gather_records`. The kernel also stops before a record that has another layout than V1 with IPv4 hosts.
    """
    count, size_left, view, base = 0, bytes_max, page.view, page.base
    data = entries[first * ENTRY_BYTES : end * ENTRY_BYTES]
    for index, (position, size, _) in zip(indexes[first:], ENTRY.iter_unpack(data), strict=False):
        start, size_left = position - base, size_left - size
        if size_left < 0 or start < 0 or not 0 < size < BLANK_SIZE or start + size > len(view):
            break
        if not check_record(view, start, start + size, position, queue.topic_bytes):
            break
        if IDENTITY.unpack_from(view, start + QUEUE_ID_AT) != (queue.queue_id, offset + index):
            break
        count += 1
    return count


def _usual_count(data: bytes, base: int) -> int:
    """Return the number of entries in *data* before the first that does not point behind the one before.

    The first one must not point before *base*. Positions must have the same upper half as *base*.
    """
    high, behind = base >> 32, base
    for count, (position, size, _) in enumerate(ENTRY.iter_unpack(data)):
        if position >> 32 != high or position < behind or not 0 < size < BLANK_SIZE:
            return count
        behind = position + size
    return len(data) // ENTRY_BYTES


def _runs(view: memoryview, low: int, starts: list[int], ends: list[int]) -> list[memoryview]:
    """Return the records from *starts* to *ends* as parts of *view*, which begins at *low*; adjacent records are one
    part.
    """
    next_starts = starts[1:]
    if ends[:-1] == next_starts:
        return [view[starts[0] - low : ends[-1] - low]]
    apart = list(map(ne, ends, next_starts))
    starts = [starts[0], *compress(next_starts, apart)]
    ends = [*compress(ends, apart), ends[-1]]
    return [view[start - low : end - low] for start, end in zip(starts, ends, strict=True)]
