"""Live brokers of the route table: the time of each one's last request, and its connection."""

from collections.abc import Iterable
from typing import Final, final

from msgspec import Struct

from martlet.errors import Reason, Refused
from martlet_remoting.wire.register_broker import Registration
from martlet_remoting.wire.routes import BrokerGroup, Version

__all__ = ["BROKERS_OF_A_CONNECTION_MAX", "Live", "LiveBrokers"]

# A container of RocketMQ 5 registers all its brokers over one connection.
BROKERS_OF_A_CONNECTION_MAX: Final = 256


@final
class Live(Struct):
    """The state of the broker at an address: time of its last request, names, and connection."""

    name: str
    seen: float
    timeout_ms: int
    state_version: int
    # None: the table's topics of the broker are outdated, so it must register all of them again
    version: Version | None
    ha_address: str
    connection: object
    names: dict[str, None]
    filter_servers: tuple[str, ...] = ()


@final
class LiveBrokers:
    """Brokers by cluster and address, and by connection; ``now`` is in seconds of any monotonic clock."""

    def __init__(self, timeout_ms: int, brokers_max: int) -> None:
        self._timeout_ms = timeout_ms  # default for brokers that register without a timeout
        self._brokers_max = brokers_max
        self._by_address: dict[tuple[str, str], Live] = {}
        self._of_connection: dict[object, dict[tuple[str, str], None]] = {}

    def __len__(self) -> int:
        return len(self._by_address)

    def get(self, cluster: str, address: str) -> Live | None:
        return self._by_address.get((cluster, address))

    def check_room(self, registration: Registration, connection: object) -> None:
        """Raise `Refused` (BUSY) if there are too many brokers, in all or over *connection*."""
        key = registration.cluster, registration.address
        if key not in self._by_address and len(self) >= self._brokers_max:
            text = f"{len(self)} brokers are registered; nameserver.brokers_max is {self._brokers_max}"
            raise Refused(Reason.BUSY, text)
        brokers = self._of_connection.get(connection, {})
        if connection is not None and key not in brokers and len(brokers) >= BROKERS_OF_A_CONNECTION_MAX:
            text = f"{len(brokers)} brokers are registered over this connection"
            raise Refused(Reason.BUSY, f"{text}; at most {BROKERS_OF_A_CONNECTION_MAX}")

    def add(self, registration: Registration, now: float, connection: object) -> Live:
        """Add a broker, or renew it; its version is unknown at first."""
        timeout_ms = self._timeout_ms if registration.timeout_ms is None else registration.timeout_ms
        key = registration.cluster, registration.address
        old_live = self.remove(*key)
        servers = registration.filter_servers
        if servers is None:
            servers = old_live.filter_servers if old_live is not None else ()
        names = {**(old_live.names if old_live is not None else {}), registration.name: None}
        state = registration.version.state_version
        live = Live(
            registration.name, now, timeout_ms, state, None, registration.ha_address, connection, names, servers
        )
        self._by_address[key] = live
        if connection is not None:
            self._of_connection.setdefault(connection, {})[key] = None
        return live

    def remove(self, cluster: str, address: str) -> Live | None:
        key = cluster, address
        live = self._by_address.pop(key, None)
        if live is not None and live.connection is not None:
            held = self._of_connection[live.connection]
            del held[key]
            if not held:
                del self._of_connection[live.connection]
        return live

    def heard(self, cluster: str, address: str, now: float) -> None:
        """Set the time of a broker's last request to now; ignore a broker that is not registered."""
        live = self.get(cluster, address)
        if live is not None:
            live.seen = now

    def silent(self, now: float) -> list[tuple[tuple[str, str], Live]]:
        """Return the brokers that were silent for too long, with their clusters and addresses."""
        return [(key, live) for key, live in self._by_address.items() if live.seen + live.timeout_ms / 1000 < now]

    def of_connection(self, connection: object) -> list[tuple[str, str]]:
        """Return the clusters and addresses of the brokers that registered over *connection*."""
        return list(self._of_connection.get(connection, ()))

    def filter_servers(self, groups: Iterable[BrokerGroup]) -> dict[str, list[str]]:
        """Return the filter servers of the brokers in *groups*, by address."""
        found: dict[str, list[str]] = {}
        for group in groups:
            for address in group.addresses.values():
                live = self.get(group.cluster, address)
                if live is not None and live.filter_servers:
                    found[address] = list(live.filter_servers)
        return found
