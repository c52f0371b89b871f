"""Open transactions of all clients: their sizes and their time limit."""

import math
from collections.abc import Callable
from typing import Protocol, final

import trio

__all__ = ["OpenTransactions"]


class Open(Protocol):
    """An open transaction, with its size in bytes."""

    size: int


@final
class OpenTransactions:
    """The open transactions of all clients; ``size`` is their memory in bytes, which has a common limit."""

    def __init__(self, limit_s: float) -> None:
        """Begin without transactions; each must end within *limit_s*."""
        self._limit_s = limit_s
        self._by_owner: dict[str, int] = {}
        # The end of the time limit, and the function to call then. All have the same limit, so the oldest is the first.
        self._ends: dict[Open, tuple[float, Callable[[], None]]] = {}
        self._rung = trio.Event()
        self.size = 0

    def __len__(self) -> int:
        return len(self._ends)

    def size_of(self, owner: str) -> int:
        """Return the bytes of all transactions of *owner*."""
        return self._by_owner.get(owner, 0)

    def begin(self, transaction: Open, expire: Callable[[], None]) -> None:
        """Add a transaction; call *expire* if it does not end in time."""
        self._ends[transaction] = trio.current_time() + self._limit_s, expire
        if len(self._ends) == 1:
            self._rung.set()

    def grow(self, owner: str, size: int) -> None:
        """Add *size* bytes to the transactions of *owner*."""
        self.size += size
        self._by_owner[owner] = self._by_owner.get(owner, 0) + size

    def end(self, transaction: Open, owner: str) -> None:
        """Remove a transaction of *owner*, with its size."""
        self._ends.pop(transaction, None)
        self.grow(owner, -transaction.size)
        if self._by_owner[owner] <= 0:
            del self._by_owner[owner]

    async def run(self) -> None:
        """Expire transactions at the end of their time, until cancelled."""
        while True:
            with trio.move_on_at(self._next_end()):
                await self._rung.wait()
            self._rung = trio.Event()
            while self._next_end() <= trio.current_time():
                _, expire = self._ends.pop(next(iter(self._ends)))
                expire()
            await trio.lowlevel.checkpoint()

    def _next_end(self) -> float:
        """Return the time at which the oldest transaction expires."""
        return next(iter(self._ends.values()))[0] if self._ends else math.inf
