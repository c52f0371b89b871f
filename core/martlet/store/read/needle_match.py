"""Narrows the entries of a read to candidates, by one search of each page that contains the records.

A `Condition` may know bytes that every matching record contains, and find them at the speed of C. Each page keeps the
places found in it, because the records of a topic's queues lie side by side: the reads of the other queues use them
too.

A damaged record may lack these bytes, so a search that must report damage also checks the records that it passes over,
without decoding them (`are_intact`, `find_damaged`). Their bodies need no check: damage that reaches from a body into
the properties, in which a condition looks, also hits the topic between them. Only records with a record CRC are checked
as a whole.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import chain
from struct import Struct
from typing import Final, final

from martlet.records.codec import RECORD_CRC_BYTES, RECORD_CRC_NAME, check_record
from martlet.records.layout import (
    ENTRY,
    ENTRY_BYTES,
    HEAD_BYTES,
    I32,
    I64,
    MAGIC_AT,
    MAGIC_V1,
    POSITION_AT,
    Buffer,
    Find,
)
from martlet.runtime.native import native
from martlet.store.disk.page_cache import Page

__all__ = ["STEPS_MAX", "NeedleSearch", "are_intact", "find_damaged", "match_places", "positions_before"]

# Bytes of the log that one read searches at most, and at least one page: 2 to 6 ms. Reads that follow one another in
# several queues end at the same page, so each page is searched once for all of them and then dropped from the cache.
SEARCHED_BYTES_MAX: Final = 6 << 20
# Bytes charged for each place found, and for each record that is looked at or checked as a whole.
PLACE_BYTES: Final = 512
LOOKED_AT_BYTES: Final = 2048
CHECKED_BYTES: Final = 8192
# A search ends after this many steps (`Condition`), about 3 ms.
STEPS_MAX: Final = 16_384
# A page is searched only if it has an entry per this many bytes; for fewer, calling the predicate takes less time.
SPACING_BYTES_MAX: Final = 16 << 10
PLACES_MAX: Final = 8192  # places kept with a page, 36 bytes each
POSITIONS_AT_ONCE: Final = 64
POSITION: Final = Struct(">q12x")
POSITIONS: Final = Struct(">" + POSITIONS_AT_ONCE * "q12x")
SIZE_AT: Final = 8
SIZES: Final = Struct(">8xi8x")
BODY_BYTES: Final = Struct(f">{HEAD_BYTES - 4}xi")
MAGIC: Final = MAGIC_V1.to_bytes(4, "big")
# Pairs of offsets, in a record and in its queue entry, of bytes that must be equal: those of size and position.
COLUMNS: Final = (*((at, SIZE_AT + at) for at in range(4)), *((POSITION_AT + at, at) for at in range(8)))
TAIL_BYTES: Final = RECORD_CRC_BYTES
RECORD_CRC: Final = RECORD_CRC_NAME + b"\x01"


@final
class NeedleSearch:
    """The search of one read; it bounds the range of the read.

    Args:
      find: finds records that may match.
      steps: the steps that *find* takes (`Condition`); None if it does not count them.
      load: returns the page of a position, or None if that would wait.
      topic: also finds damaged records of this topic; None if damage does not matter. An empty one is any topic.
    """

    __slots__ = ("_end", "_find", "_load", "_match_places", "_positions_before", "_steps", "_steps_end", "_topic")

    def __init__(
        self, find: Find, steps: list[int] | None, load: Callable[[int], Page | None], topic: bytes | None = None
    ) -> None:
        self._find = find
        self._load = load
        self._steps = steps if steps is not None else [0]
        self._steps_end = self._steps[0] + STEPS_MAX
        self._topic = topic
        self._positions_before, self._match_places = native(positions_before), native(match_places)
        self._end = -1  # position where the search ends; unknown before the first page

    def candidates(self, data: bytes, count_max: int) -> tuple[list[int] | None, int]:
        """Return the indexes of the entries in *data* whose records may match, None for all, and the number checked.

        The search stops early when it has searched enough or found more than *count_max*, or at a record that *load*
        does not have, unless that is the first one.
        """
        total, at = len(data) // ENTRY_BYTES, 0
        indexes: list[int] = []
        while at < total and len(indexes) <= count_max and not self._is_over(_position(data, at)):
            page = self._load(_position(data, at))
            if page is None:
                return (indexes, at) if at else (None, total)
            if self._end < 0:
                self._end = page.base + SEARCHED_BYTES_MAX
            stop, positions = self._positions_before(data, at, page.end)
            hits = None
            if positions is not None:  # otherwise an entry is damaged
                hits = _hits(page, self._find, stop - at, positions[-1] + _size(data, stop - 1))
            if hits is None or positions is None:
                indexes += range(at, stop)
            else:
                likely = self._match_places(data, at, positions, page.base, hits)
                self._end -= len(hits) * PLACE_BYTES
                if self._topic is not None and not page.trusted:
                    passed = data[at * ENTRY_BYTES : (stop - 1) * ENTRY_BYTES]
                    damaged = self._damaged(page, positions[:-1], passed, self._topic)
                    if damaged:
                        likely = sorted({*likely, *[at + index for index in damaged]})
                indexes += likely
            at = stop
        return indexes, at

    def _damaged(self, page: Page, positions: list[int], data: bytes, topic: bytes) -> list[int]:
        """Return the indexes of records at *positions*, with the entries *data*, that are damaged or not of *topic*."""
        starts = [position - page.base for position in positions]
        if topic and are_intact(page.data, starts, data, topic):
            self._end -= len(starts) * LOOKED_AT_BYTES
            return []
        self._end -= len(starts) * CHECKED_BYTES
        return find_damaged(page, starts, data, topic)

    def _is_over(self, position: int) -> bool:
        return 0 <= self._end <= position or self._steps[0] >= self._steps_end


def _first_from(data: bytes, position: int, begin: int, end: int) -> int:
    """Return the index of the first of the entries from *begin* up to *end* whose record is at *position* or later."""
    while begin < end:
        middle = (begin + end) >> 1
        if _position(data, middle) < position:
            begin = middle + 1
        else:
            end = middle
    return begin


def _position(data: bytes, index: int) -> int:
    position: int = I64.unpack_from(data, index * ENTRY_BYTES)[0]
    return position


def _positions(data: bytes, begin: int, end: int) -> list[int]:
    """Return the positions of the entries from *begin* up to *end*."""
    whole = begin + (end - begin) // POSITIONS_AT_ONCE * POSITIONS_AT_ONCE
    view = memoryview(data)
    rows = POSITIONS.iter_unpack(view[begin * ENTRY_BYTES : whole * ENTRY_BYTES])
    rest = POSITION.iter_unpack(view[whole * ENTRY_BYTES : end * ENTRY_BYTES])
    return list(chain.from_iterable(chain(rows, rest)))


def _size(data: bytes, index: int) -> int:
    size: int = I32.unpack_from(data, index * ENTRY_BYTES + SIZE_AT)[0]
    return size


def _hits(page: Page, find: Find, entries: int, end: int) -> list[int] | None:
    """Return the places in *page* up to position *end*; None if there are too many, or *entries* are too few."""
    data, known = page.data, page.searched
    # At the end of the log, only records before *end* are known to be complete in the page.
    stop = len(data) if isinstance(data, bytes) else min(end - page.base, len(data))
    begin = 0
    places: list[int] = []
    if known is not None and known[0] is find:
        if known[1] >= stop or known[2] is None:
            return known[2]
        begin, places = known[1], known[2]
    if stop - begin > entries * SPACING_BYTES_MAX:
        return None
    more = find(data, begin, stop)
    hits = places + more if more is not None and len(places) + len(more) <= PLACES_MAX else None
    page.searched = find, stop, hits
    return hits


def positions_before(data: bytes, begin: int, position: int) -> tuple[int, list[int] | None]:
    """Return the index of the first entry of *data*, after *begin*, whose record is at *position* or later, and the
    positions of the entries from *begin* up to it; None if they are not ascending.
    """
    stop = max(_first_from(data, position, begin, len(data) // ENTRY_BYTES), begin + 1)
    positions = _positions(data, begin, stop)
    return stop, positions if positions == sorted(positions) else None


def match_places(data: bytes, begin: int, positions: list[int], base: int, places: list[int]) -> list[int]:
    """Return the indexes of the entries from *begin* on, at *positions*, whose records contain one of *places*, and of
    the last one.

    The last one always counts: bytes that are no record may follow it, and its end may be in the next page. *places*
    are ascending, and count from *base*.
    """
    found: list[int] = []
    first, last = bisect_left(places, positions[0] - base), len(positions) - 1
    stop = bisect_left(places, positions[last] - base, first)
    if stop - first <= last:
        previous = -1
        for place in places[first:stop]:
            index = bisect_right(positions, place + base) - 1
            if index != previous and place + base < positions[index] + _size(data, begin + index):
                found.append(begin + index)
                previous = index
    else:
        view = memoryview(data)[begin * ENTRY_BYTES : (begin + last) * ENTRY_BYTES]
        for index, (position, size, _) in enumerate(ENTRY.iter_unpack(view), begin):
            at = bisect_left(places, position - base, first, stop)
            if at < stop and places[at] < position - base + size:
                found.append(index)
    found.append(begin + last)
    return found


def are_intact(page: Buffer, starts: list[int], data: bytes, topic: bytes) -> bool:
    """Return whether the bytes of *page* at *starts* are intact V1 records with the positions and sizes in the entries
    *data*.

    Checks all records together: sizes, magics, positions, topics, and the ends of their properties. This takes 0.5 us
    for each, a fourth of `check_record`. False if a record has a record CRC.
    """
    heads = b"".join([page[start : start + HEAD_BYTES] for start in starts])
    count = len(starts)
    if len(heads) != count * HEAD_BYTES:
        return False
    for at, byte in enumerate(MAGIC, MAGIC_AT):
        if heads[at::HEAD_BYTES].count(byte) != count:
            return False
    for at, entry_at in COLUMNS:
        if heads[at::HEAD_BYTES] != data[entry_at::ENTRY_BYTES]:
            return False
    mark = bytes((len(topic),)) + topic
    bodies = [start + HEAD_BYTES + size for start, (size,) in zip(starts, BODY_BYTES.iter_unpack(heads), strict=True)]
    if b"".join([page[at : at + len(mark)] for at in bodies]) != mark * count:
        return False
    ends = [start + size for start, (size,) in zip(starts, SIZES.iter_unpack(data), strict=True)]
    tails = b"".join([page[end - TAIL_BYTES : end] for end in ends])
    return len(tails) == count * TAIL_BYTES and 0 not in tails[TAIL_BYTES - 1 :: TAIL_BYTES] and RECORD_CRC not in tails


def find_damaged(page: Page, starts: list[int], data: bytes, topic: bytes) -> list[int]:
    """Return the indexes of damaged records at *starts* of *page*, or not of *topic*; *data* are their entries.

    An empty topic is any. This takes 2 us for each record, and 6 us with record CRCs.
    """
    damaged: list[int] = []
    for index, (position, size, _) in enumerate(ENTRY.iter_unpack(data)):
        start = starts[index]
        if not check_record(page.view, start, start + size, position, topic or None):
            damaged.append(index)
    return damaged
