"""Narrows the entries of a read to those whose records may match, by one search of each page that holds the records.

A `Condition` may know bytes that every matching record contains, and find them at the speed of C. The places in a page
are kept with it, because the records of a topic's queues lie side by side: the reads of the other queues use them too.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import chain
from struct import Struct
from typing import Final

from martlet.store.layout import ENTRY, ENTRY_BYTES, Find
from martlet.store.page_cache import Page

__all__ = ["candidates"]

# One read searches pages of this many bytes in total, and at least one. It takes 1 to 3 ms; 10 for bytes made for it.
SEARCHED_BYTES_MAX: Final = 3 << 20
# A page is not searched for fewer entries than one for this many bytes: calling the predicate takes less time.
SPACING_BYTES_MAX: Final = 16 << 10
PLACES_MAX: Final = 8192  # kept with a page, 36 bytes each
POSITIONS_AT_ONCE: Final = 64
POSITION: Final = Struct(">q12x")
POSITIONS: Final = Struct(">" + POSITIONS_AT_ONCE * "q12x")
SIZE: Final = Struct(">i")
SIZE_AT: Final = 8


def candidates(data: bytes, find: Find, load: Callable[[int], Page | None]) -> tuple[list[int] | None, int]:
    """Return the indexes of the entries in *data* whose records may match, None for all, and the number checked.

    It stops early when it has searched enough, or at a record that *load* does not have, unless that is the first one.
    """
    positions = _positions(data)
    total, at, searched = len(positions), 0, 0
    if positions != sorted(positions):
        return None, total  # a damaged entry
    found: list[int] = []
    while at < total and searched < SEARCHED_BYTES_MAX:
        page = load(positions[at])
        if page is None:
            return (found, at) if at else (None, total)
        stop = max(bisect_left(positions, page.end, at), at + 1)
        last_end = positions[stop - 1] + _size(data, stop - 1)
        hits = _hits(page, find, stop - at, last_end)
        if hits is None:
            found += range(at, stop)
        else:
            _match(found, hits, positions, data, page.base, at, stop)
        searched += len(page.data)
        at = stop
    return found, at


def _positions(data: bytes) -> list[int]:
    whole = len(data) - len(data) % POSITIONS.size
    rows = chain(POSITIONS.iter_unpack(memoryview(data)[:whole]), POSITION.iter_unpack(memoryview(data)[whole:]))
    return list(chain.from_iterable(rows))


def _size(data: bytes, index: int) -> int:
    size: int = SIZE.unpack_from(data, index * ENTRY_BYTES + SIZE_AT)[0]
    return size


def _hits(page: Page, find: Find, entries: int, end: int) -> list[int] | None:
    """Return the places in *page* up to position *end*; None if there are too many, or *entries* are too few."""
    data, known = page.data, page.searched
    # Of the page at the end of the log only the records before *end* are known to be complete.
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
    found = places + more if more is not None and len(places) + len(more) <= PLACES_MAX else None
    page.searched = find, stop, found
    return found


def _match(
    found: list[int], hits: list[int], positions: list[int], data: bytes, base: int, begin: int, stop: int
) -> None:
    """Append to *found* which of the entries from *begin* up to *stop* have one of *hits*, and the last one.

    The last one always counts: bytes that are no record may follow it, and its end may be in the next page.
    """
    first = bisect_left(hits, positions[begin] - base)
    end = bisect_left(hits, positions[stop - 1] - base, first)
    if end - first < stop - begin:
        previous = -1
        for place in hits[first:end]:
            index = bisect_right(positions, place + base, begin, stop) - 1
            if index != previous and place + base < positions[index] + _size(data, index):
                found.append(index)
                previous = index
    else:
        view = memoryview(data)[begin * ENTRY_BYTES : (stop - 1) * ENTRY_BYTES]
        for index, (position, size, _) in enumerate(ENTRY.iter_unpack(view), begin):
            at = bisect_left(hits, position - base, first, end)
            if at < end and hits[at] < position - base + size:
                found.append(index)
    found.append(stop - 1)
