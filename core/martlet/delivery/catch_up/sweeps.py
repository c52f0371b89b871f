"""The sweeps for one kind of cursors of a feed, and the cursors that wait for one."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, TypeAlias, final

from martlet.delivery.beginnings import NEVER
from martlet.delivery.catch_up.sweep import AHEAD_BYTES, Sweep, slice_of
from martlet.delivery.cursor import Cursor, CursorPlace

__all__ = ["Sweeps", "WaitingCursors", "distance_class"]

# A cursor waits for a sweep that is behind it by at most this multiple of its own distance from the tail, or by
# NEAR_BYTES.
REACH: Final = 3
NEAR_BYTES: Final = 1 << 20
# A cursor that has just missed a sweep begins a new one only after that sweep is ahead by this part of its distance.
MISSED_PART: Final = 16
SWEEPS_MAX: Final = 2  # in each class of distances, of those that may wait for the cold tier and of others
Entry: TypeAlias = tuple[int, int, Cursor]  # (position where it begins, its number, the cursor)


@final
class WaitingCursors:
    """Cursors that wait for a sweep, in the order of the log positions at which they begin."""

    __slots__ = ("_entries", "_entries_by_cursor", "_number")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._entries_by_cursor: dict[Cursor, Entry] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, cursor: Cursor) -> bool:
        return cursor in self._entries_by_cursor

    def add(self, cursor: Cursor) -> None:
        self._number += 1
        entry = self._entries_by_cursor[cursor] = cursor.start, self._number, cursor
        insort(self._entries, entry)

    def remove(self, cursor: Cursor) -> None:
        """Remove *cursor* if it is here."""
        entry = self._entries_by_cursor.pop(cursor, None)
        if entry is not None:
            del self._entries[bisect_left(self._entries, entry)]

    def first_from(self, position: int) -> int:
        """Return the begin of the first cursor that begins at *position* or later; `NEVER` if there is none."""
        at = bisect_left(self._entries, (position,))
        return self._entries[at][0] if at < len(self._entries) else NEVER

    def between(self, start: int, end: int) -> Iterator[Cursor]:
        """Yield the cursors that begin from *start* up to *end*; none may be added or removed meanwhile."""
        first, last = (bisect_left(self._entries, (each,)) for each in (start, end))
        return (cursor for _, _, cursor in islice(self._entries, first, last))


def distance_class(distance: int) -> int:
    """Return the class of a distance from the tail in bytes; each is four times as wide as the one before."""
    return ((max(distance, 0) // NEAR_BYTES).bit_length() + 1) // 2


@final
class Sweeps:
    """Sweeps, and the cursors that ``waiting`` has for them; *begin* returns a new sweep from a log position."""

    def __init__(self, begin: Callable[[int], Sweep]) -> None:
        self.running: list[Sweep] = []
        self.waiting = WaitingCursors()
        self._make_sweep = begin

    def plan(self, tail: int, cold_to: int = 0) -> list[Sweep]:
        """Begin sweeps for waiting cursors that no sweep will reach soon; return the new sweeps.

        A sweep before log position *cold_to* waits for the cold tier, so no cursor after it waits for such a sweep.
        """
        counts = Counter((each.swept_to < cold_to, distance_class(tail - each.swept_to)) for each in self.running)
        new_sweeps: list[Sweep] = []
        for start in reversed(self._new_sweep_starts(tail, cold_to)):
            kind = start < cold_to, distance_class(tail - start)
            if counts[kind] < SWEEPS_MAX:
                counts[kind] += 1
                new_sweeps.append(self._make_sweep(start))
        self.running += new_sweeps
        return new_sweeps

    def _new_sweep_starts(self, tail: int, cold_to: int = 0) -> list[int]:
        """Return the positions where sweeps have to begin, ascending, so that each waiting cursor is served by one."""
        first_waiting_from, starts = self.waiting.first_from, list[int]()
        positions = [each.swept_to for each in self.running if not each.has_met]
        active_positions = [each.swept_to for each in self.running if each.cursors]
        start = first_waiting_from(0)
        while start < NEVER:
            least = cold_to if start >= cold_to else 0
            nearest_behind = max((each for each in (*positions, *starts) if least <= each <= start), default=NEVER)
            served_to = (nearest_behind + REACH * tail + NEAR_BYTES) // (1 + REACH)
            nearest_ahead = min((each for each in active_positions if each > start), default=NEVER)
            if nearest_behind < NEVER and (start <= served_to or start >= tail):
                # A sweep behind reaches this cursor soon.
                served_to = max(start, served_to)
                start = first_waiting_from(min(served_to + 1, cold_to) if start < cold_to else served_to + 1)
            elif nearest_ahead - start < (tail - start) // MISSED_PART:
                # The cursor has just missed a sweep: wait, so that it does not follow that sweep with one of its own.
                start = first_waiting_from(nearest_ahead)
            else:
                starts.append(start)
        return starts

    async def go_on(self, sweep: Sweep, cold_to: int = 0) -> bool:
        """Do a slice of *sweep*; return whether it has reached the tail. A sweep that is over leaves ``running``.

        No cursor from log position *cold_to* on joins a sweep before it.
        """
        reach = sweep.swept_to + AHEAD_BYTES
        if sweep.swept_to < cold_to:
            reach = min(reach, cold_to)
        if sweep.has_met:
            self._release_cursors(sweep)
            return False
        if not self._add_near_cursors(sweep, reach):
            return False
        if not sweep.cursors:
            self.running.remove(sweep)
            return False
        limit = self.waiting.first_from(reach)
        for other in self.running:
            if other is not sweep and other.swept_to >= sweep.swept_to and other.cursors:
                other.has_met = other.has_met or other.swept_to == sweep.swept_to
                limit = min(limit, other.swept_to)
        return await sweep.go_on(limit)

    def _add_near_cursors(self, sweep: Sweep, reach: int) -> bool:
        """Let cursors before log position *reach* join *sweep*; return False if more such cursors are left."""
        if sweep.is_routing:
            return True
        cursors, are_all = slice_of(self.waiting.between(sweep.swept_to, reach))
        for cursor in cursors:
            self.waiting.remove(cursor)
            sweep.take(cursor)
        return are_all

    def _release_cursors(self, sweep: Sweep) -> None:
        """Let some cursors of *sweep* wait for the sweep that it has met."""
        for cursor in slice_of(sweep.cursors)[0]:
            cursor.move_to(CursorPlace.BEHIND, sweep.swept_to)
            sweep.release(cursor)
            self.waiting.add(cursor)
        if not sweep.cursors:
            self.running.remove(sweep)
