"""Retained messages that were appended and are not applied yet."""

from collections import deque
from typing import NamedTuple, final

__all__ = ["Ahead", "Appended"]


@final
class Appended(NamedTuple):
    """A message: its offset in the queue, the end of all that was stored with it, and its size, 0 if it removes."""

    offset: int
    end: int
    size: int


@final
class Ahead:
    """Those messages by name, in the order in which they were appended.

    If a commit fails, they are gone, and later ones get their offsets.
    """

    __slots__ = ("_by_name", "_names")

    def __init__(self) -> None:
        self._by_name: dict[str, deque[Appended]] = {}
        self._names: deque[str] = deque()  # of all of them

    def __len__(self) -> int:
        return len(self._names)

    def newest(self, name: str) -> Appended | None:
        """Return the newest message of *name*; None if there is none."""
        found = self._by_name.get(name)
        return found[-1] if found is not None else None

    def first(self) -> str:
        """Return the name of the oldest message; there is one."""
        return self._names[0]

    def last(self) -> str:
        """Return the name of the newest message; there is one."""
        return self._names[-1]

    def oldest_offset(self) -> int:
        """Return the offset of the oldest message; there is one."""
        return self._by_name[self._names[0]][0].offset

    def newest_offset(self) -> int:
        """Return the offset of the newest message; there is one."""
        return self._by_name[self._names[-1]][-1].offset

    def add(self, name: str, message: Appended) -> None:
        """Add the newest message."""
        self._by_name.setdefault(name, deque()).append(message)
        self._names.append(name)

    def drop_first(self) -> None:
        """Remove the oldest message, because it is applied."""
        name = self._names.popleft()
        found = self._by_name[name]
        found.popleft()
        if not found:
            del self._by_name[name]

    def drop_last(self) -> None:
        """Remove the newest message, because it was not stored."""
        name = self._names.pop()
        found = self._by_name[name]
        found.pop()
        if not found:
            del self._by_name[name]
