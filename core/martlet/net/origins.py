"""Where connections come from, so that no address takes from the others what is for all."""

from typing import Final, Generic, TypeVar, final

__all__ = ["Origins", "origin_of"]

T = TypeVar("T")
PORT_BYTES: Final = 4
MAPPED: Final = bytes(10) + b"\xff\xff"  # IPv4 in IPv6 (RFC 4291 2.5.5.2)


def origin_of(host: bytes) -> bytes:
    """Return what the connections of one client have in common: its IPv4 address, or its IPv6 network of 64 bits.

    *host* is an address and a port as records hold them; who has one IPv6 address usually has a whole such network.
    """
    address = host[:-PORT_BYTES]
    return address[:8] if len(address) == 16 and not address.startswith(MAPPED) else address


@final
class Origins(Generic[T]):
    """All connections by their origin; *T* is a connection."""

    def __init__(self) -> None:
        self._by_origin: dict[bytes, dict[T, None]] = {}
        self._count = 0

    def add(self, connection: T, origin: bytes) -> None:
        self._by_origin.setdefault(origin, {})[connection] = None
        self._count += 1

    def remove(self, connection: T, origin: bytes) -> None:
        """Forget *connection*; one that is not known is ignored."""
        connections = self._by_origin.get(origin)
        if connections is not None and connection in connections:
            del connections[connection]
            self._count -= 1
            if not connections:
                del self._by_origin[origin]

    def give_way(self, origin: bytes) -> T | None:
        """Forget the newest connection from the most crowded origin and return it, where *origin* has fewer by far.

        That is, less than the average, and so few that it has fewer still with one more.
        """
        mine = len(self._by_origin.get(origin, ()))
        if mine * len(self._by_origin) >= self._count:
            return None
        crowded = max(self._by_origin, key=self._crowd)
        if mine + 1 >= self._crowd(crowded):
            return None
        newest = next(reversed(self._by_origin[crowded]))
        self.remove(newest, crowded)
        return newest

    def _crowd(self, origin: bytes) -> int:
        return len(self._by_origin[origin])

    def largest(self) -> int:
        """How many connections come from the most crowded origin."""
        return max(map(len, self._by_origin.values()), default=0)
