"""The transactions of all clients that have not ended: how large they are, and when they must have ended."""

import math
from collections.abc import Callable
from typing import Protocol, final

import trio

__all__ = ["OpenTransactions"]


class Open(Protocol):
    """A transaction, with its size in bytes."""

    size: int


@final
class OpenTransactions:
    """Those of all clients, and what they take of the memory that all share."""

    def __init__(self, limit_s: float) -> None:
        """Begin; a transaction must end within *limit_s*."""
        self._limit_s = limit_s
        self._by_owner: dict[str, int] = {}
        # What to call for each when its time is over. All have the same limit, so the first one is the oldest.
        self._ends: dict[Open, tuple[float, Callable[[], None]]] = {}
        self._rung = trio.Event()
        self.size = 0

    def __len__(self) -> int:
        return len(self._ends)

    def size_of(self, owner: str) -> int:
        """Return how large those of *owner* are together."""
        return self._by_owner.get(owner, 0)

    def begin(self, transaction: Open, expire: Callable[[], None]) -> None:
        """Note a transaction, and call *expire* if it does not end in time."""
        self._ends[transaction] = trio.current_time() + self._limit_s, expire
        if len(self._ends) == 1:
            self._rung.set()

    def grow(self, owner: str, size: int) -> None:
        """Count *size* more bytes for *owner*."""
        self.size += size
        self._by_owner[owner] = self._by_owner.get(owner, 0) + size

    def end(self, transaction: Open, owner: str) -> None:
        """Forget a transaction."""
        self._ends.pop(transaction, None)
        self.grow(owner, -transaction.size)
        if self._by_owner[owner] <= 0:
            del self._by_owner[owner]

    async def run(self) -> None:
        """End those that take too long, until cancelled."""
        while True:
            with trio.move_on_at(self._next_end()):
                await self._rung.wait()
            self._rung = trio.Event()
            while self._next_end() <= trio.current_time():
                _, expire = self._ends.pop(next(iter(self._ends)))
                expire()
            await trio.lowlevel.checkpoint()

    def _next_end(self) -> float:
        """Return when the oldest must have ended."""
        return next(iter(self._ends.values()))[0] if self._ends else math.inf
