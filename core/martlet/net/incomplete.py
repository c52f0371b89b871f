"""Limits the memory for incomplete requests, and chooses the connections to close when a limit is exceeded.

There are two limits: for all connections, and for the connections of one address, so that one address cannot use up
the total. Many clients may share an address (NAT, a proxy), so the address alone does not identify the culprit.
The average age of the incomplete bytes does. It is low for a connection that sends a large request at a useful speed,
and high for one that stopped in the middle or sends a byte from time to time. So if a limit is exceeded, the
connections whose bytes are oldest on average are closed, regardless of how many bytes they have.
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
    """The incomplete request of one connection."""

    __slots__ = ("arrival_sum", "origin", "size")

    def __init__(self, origin: bytes) -> None:
        self.origin = origin
        self.size = 0
        self.arrival_sum = 0.0  # sum of the arrival times of all bytes

    @property
    def arrival(self) -> float:
        """Return the average arrival time of its bytes."""
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
        """Remove the bytes of *owner*, which was closed."""
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
        """Return the incomplete bytes of all connections from *origin*."""
        return self._by_origin.get(origin, 0)

    def over(self, origin: bytes) -> bool:
        """Return whether a limit is exceeded, the total one or that of *origin*."""
        return self.total > self._total_max or self.held_by(origin) > self._origin_max

    def give_way(self, origin: bytes) -> list[T]:
        """Remove and return the connections with the oldest bytes, oldest first.

        That frees enough, unless very many connections have very few bytes each; then the next request frees more.
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
        """Remove those of *owners* with the oldest bytes, until they had *excess* bytes in total."""
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
        """Return the incomplete bytes of the address that has the most."""
        return max(self._by_origin.values(), default=0)
