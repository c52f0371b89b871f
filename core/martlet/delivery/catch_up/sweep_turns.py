"""Chooses the sweep that has the next turn, among all feeds.

Three of four turns are for the sweeps that are nearest to the tail, three of four of the other turns for the next class
of distances, and so on; within a class the sweeps take turns. So a client that is a few messages behind is soon at the
tail, however many records others have to catch up, and the furthest sweeps still advance.
"""

from collections import deque
from typing import Generic, TypeVar, final

__all__ = ["SweepTurns"]

T = TypeVar("T")


@final
class SweepTurns(Generic[T]):
    """Sweeps that wait for a turn: a line for each class of distances from the tail."""

    def __init__(self) -> None:
        self._lines: dict[int, deque[T]] = {}
        self._turns = 0

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, sweep: T, nearness: int) -> None:
        """Queue *sweep* for a turn, in the class of its distance."""
        self._lines.setdefault(nearness, deque()).append(sweep)

    def take(self) -> T:
        """Remove and return the sweep whose turn it is; there is at least one."""
        self._turns += 1
        classes = sorted(self._lines)
        rank = ((self._turns & -self._turns).bit_length() - 1) // 2  # 0 in 3 of 4 turns, 1 in 3 of 16, ...
        nearness = classes[min(rank, len(classes) - 1)]
        line = self._lines[nearness]
        sweep = line.popleft()
        if not line:
            del self._lines[nearness]
        return sweep
