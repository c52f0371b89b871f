"""Limits the memory for incomplete requests, and chooses the connections to close when a limit is exceeded.

There are two limits: for all connections, and for the connections of one address, so that one address cannot use up the
total. Many clients may share an address (NAT, a proxy), so the address alone does not identify the culprit. The average
age of the incomplete bytes does. It is low for a connection that sends a large request at a useful speed, and high for
a connection that stopped in the middle or sends a byte from time to time. So over a limit the server closes the
connections whose bytes are oldest on average, regardless of their number of bytes.
"""

from heapq import nsmallest
from typing import Final, Generic, TypeVar, final

__all__ = ["IncompleteRequests"]

T = TypeVar("T")
# Over a limit, connections are closed until a sixteenth of the limit is free, so that not every read has to search.
ROOM: Final = 16
AT_ONCE: Final = 256  # connections closed at once, so that other clients do not wait long


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
        """The average arrival time of the bytes."""
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

    def __contains__(self, owner: T) -> bool:
        return owner in self._parts

    def note(self, owner: T, origin: bytes, size: int, received: int, now: float) -> None:
        """Note that *owner* now holds *size* incomplete bytes, of which *received* arrived at *now*."""
        part = self._parts.get(owner)
        if part is None:
            part = self._parts[owner] = _Part(origin)
        if size <= received:  # requests complete in order: the bytes left are the newest
            part.arrival_sum = size * now
        elif size >= part.size:
            part.arrival_sum += (size - part.size) * now
        else:
            part.arrival_sum *= size / part.size
        self._add_bytes(origin, size - part.size)
        part.size = size
        if not size:
            del self._parts[owner]

    def forget(self, owner: T) -> None:
        """Forget the bytes of *owner*, which was closed."""
        part = self._parts.pop(owner, None)
        if part is not None:
            self._add_bytes(part.origin, -part.size)

    def _add_bytes(self, origin: bytes, size: int) -> None:
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

        Closing them frees enough, unless very many connections have very few bytes each; then the next request frees
        more.
        """
        removed: list[T] = []
        limit = self._origin_max
        if self.held_by(origin) > limit:
            owners = [owner for owner, part in self._parts.items() if part.origin == origin]
            removed += self._remove_oldest(owners, self.held_by(origin) - limit + limit // ROOM)
        limit = self._total_max
        if self.total > limit:
            removed += self._remove_oldest(list(self._parts), self.total - limit + limit // ROOM)
        return removed

    def _remove_oldest(self, owners: list[T], excess: int) -> list[T]:
        """Remove and return those of *owners* with the oldest bytes, until *excess* bytes are freed."""
        parts = self._parts
        removed: list[T] = []
        for owner in nsmallest(AT_ONCE, owners, key=lambda owner: parts[owner].arrival):
            if excess <= 0:
                break
            excess -= parts[owner].size
            self.forget(owner)
            removed.append(owner)
        return removed

    def largest_origin(self) -> int:
        """Return the incomplete bytes of the address that has the most."""
        return max(self._by_origin.values(), default=0)
