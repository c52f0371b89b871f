"""What connections hold of requests that are not complete, and which of them close when it is too much.

Two limits: for all connections together, and for those of one address, so that no address alone uses up what
is for all. Many clients may share an address (NAT, a proxy), so it alone says nothing about who is to blame.
What does is how long the bytes held have been waiting on average. A connection that sends a large request at any
useful speed is far below one that stopped in the middle, or that sends a byte now and then: those make no difference
to the average. So over a limit those close whose bytes have waited longest, however much or little they hold.
"""

from heapq import nsmallest
from typing import Final, Generic, TypeVar, final

__all__ = ["IncompleteRequests"]

T = TypeVar("T")
# Over a limit as much goes as makes room for a sixteenth of it, so that not every read has to look for somebody.
ROOM: Final = 16
AT_ONCE: Final = 256  # connections, so that nobody else waits long


@final
class _Part:
    """What is here of one connection's request."""

    __slots__ = ("arrival_sum", "origin", "size")

    def __init__(self, origin: bytes) -> None:
        self.origin = origin
        self.size = 0
        self.arrival_sum = 0.0  # over all bytes, the time when each came

    @property
    def arrival(self) -> float:
        """When a byte of it came, on average."""
        return self.arrival_sum / self.size


@final
class IncompleteRequests(Generic[T]):
    """The incomplete requests of all connections; *T* is a connection."""

    def __init__(self, total_max: int, origin_max: int) -> None:
        self._total_max = total_max
        self._origin_max = origin_max
        self._parts: dict[T, _Part] = {}
        self._by_origin: dict[bytes, int] = {}
        self.total = 0

    def note(self, owner: T, origin: bytes, size: int, received: int, now: float) -> None:
        """*owner* now holds *size* bytes; *received* bytes have just come, at *now*."""
        part = self._parts.get(owner)
        if part is None:
            part = self._parts[owner] = _Part(origin)
        if size <= received:  # requests complete in order: what is left is what came last
            part.arrival_sum = size * now
        elif size >= part.size:
            part.arrival_sum += (size - part.size) * now
        else:
            part.arrival_sum *= size / part.size
        self._grow(origin, size - part.size)
        part.size = size
        if not size:
            del self._parts[owner]

    def forget(self, owner: T) -> None:
        """*owner* is gone, with what it held."""
        part = self._parts.pop(owner, None)
        if part is not None:
            self._grow(part.origin, -part.size)

    def _grow(self, origin: bytes, size: int) -> None:
        self.total += size
        held = self._by_origin.get(origin, 0) + size
        if held:
            self._by_origin[origin] = held
        else:
            self._by_origin.pop(origin, None)

    def held_by(self, origin: bytes) -> int:
        """How many bytes all connections from *origin* hold."""
        return self._by_origin.get(origin, 0)

    def over(self, origin: bytes) -> bool:
        """Whether all connections, or those from *origin*, hold too much."""
        return self.total > self._total_max or self.held_by(origin) > self._origin_max

    def give_way(self, origin: bytes) -> list[T]:
        """Forget whose bytes have waited longest, and return them, longest first.

        That makes room, or where very many hold very little, some of it; then the next request that comes makes more.
        """
        found: list[T] = []
        limit = self._origin_max
        if self.held_by(origin) > limit:
            owners = [owner for owner, part in self._parts.items() if part.origin == origin]
            found += self._take(owners, self.held_by(origin) - limit + limit // ROOM)
        limit = self._total_max
        if self.total > limit:
            found += self._take(list(self._parts), self.total - limit + limit // ROOM)
        return found

    def _take(self, owners: list[T], excess: int) -> list[T]:
        """Forget those of *owners* whose bytes have waited longest, until they held *excess* bytes in all."""
        parts = self._parts
        found: list[T] = []
        for owner in nsmallest(AT_ONCE, owners, key=lambda owner: parts[owner].arrival):
            if excess <= 0:
                break
            excess -= parts[owner].size
            self.forget(owner)
            found.append(owner)
        return found

    def largest_origin(self) -> int:
        """How many bytes the connections of one address hold at most."""
        return max(self._by_origin.values(), default=0)
