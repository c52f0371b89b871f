"""Groups connections by address, so that one address cannot use up the limit of connections."""

from typing import Final, Generic, TypeVar, final

__all__ = ["Origins", "origin_of"]

T = TypeVar("T")
PORT_BYTES: Final = 4
MAPPED: Final = bytes(10) + b"\xff\xff"  # IPv4 in IPv6 (RFC 4291 2.5.5.2)


def origin_of(host: bytes) -> bytes:
    """Return the part of an address that identifies a client: the IPv4 address or the IPv6 /64 network.

    *host* is an address and port in the format of records. An IPv6 client usually has a whole /64 network.
    """
    address = host[:-PORT_BYTES]
    return address[:8] if len(address) == 16 and not address.startswith(MAPPED) else address


@final
class Origins(Generic[T]):
    """All connections by origin; *T* is a connection."""

    def __init__(self) -> None:
        self._by_origin: dict[bytes, dict[T, None]] = {}
        self._count = 0

    def add(self, connection: T, origin: bytes) -> None:
        self._by_origin.setdefault(origin, {})[connection] = None
        self._count += 1

    def remove(self, connection: T, origin: bytes) -> None:
        """Remove *connection*; ignored if it is unknown."""
        connections = self._by_origin.get(origin)
        if connections is not None and connection in connections:
            del connections[connection]
            self._count -= 1
            if not connections:
                del self._by_origin[origin]

    def give_way(self, origin: bytes) -> T | None:
        """Remove and return the newest connection of the origin with the most, if *origin* has far fewer.

        Far fewer means: below the average, and still fewer after adding one.
        """
        own_count = self.count(origin)
        if own_count * len(self._by_origin) >= self._count:
            return None
        largest_origin = max(self._by_origin, key=self._count_of)
        if own_count + 1 >= self._count_of(largest_origin):
            return None
        newest = next(reversed(self._by_origin[largest_origin]))
        self.remove(newest, largest_origin)
        return newest

    def _count_of(self, origin: bytes) -> int:
        return len(self._by_origin[origin])

    def count(self, origin: bytes) -> int:
        """Return the number of connections of *origin*."""
        return len(self._by_origin.get(origin, ()))

    def largest(self) -> int:
        """Return the number of connections of the origin with the most."""
        return max(map(len, self._by_origin.values()), default=0)
