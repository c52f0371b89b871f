"""Cursors that wait for a sweep, by their positions."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from typing import TypeAlias, final

from martlet.delivery.beginnings import NEVER
from martlet.delivery.cursor import Cursor

__all__ = ["Waiting"]

Entry: TypeAlias = tuple[int, int, Cursor]  # where it begins, its number, and the cursor


@final
class Waiting:
    """Cursors in the order of the log positions at which they begin."""

    __slots__ = ("_entries", "_number", "_of")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._of: dict[Cursor, Entry] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, cursor: Cursor) -> bool:
        return cursor in self._of

    def add(self, cursor: Cursor) -> None:
        self._number += 1
        entry = self._of[cursor] = cursor.start, self._number, cursor
        insort(self._entries, entry)

    def remove(self, cursor: Cursor) -> None:
        """Remove *cursor* if it is here."""
        entry = self._of.pop(cursor, None)
        if entry is not None:
            del self._entries[bisect_left(self._entries, entry)]

    def first_from(self, position: int) -> int:
        """Return where the first cursor begins that begins at *position* or later; `NEVER` if there is none."""
        at = bisect_left(self._entries, (position,))
        return self._entries[at][0] if at < len(self._entries) else NEVER

    def between(self, start: int, end: int) -> Iterator[Cursor]:
        """Yield the cursors that begin from *start* up to *end*; none may be added or removed meanwhile."""
        first, last = (bisect_left(self._entries, (each,)) for each in (start, end))
        return (cursor for _, _, cursor in islice(self._entries, first, last))
