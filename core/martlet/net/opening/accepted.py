"""Decides which accepted sockets become connections, and reads the headers of proxies first.

The client's address decides: its network, its number of connections, their rate. If a proxy passes the connection on,
the header of the PROXY protocol has that address. So the server learns of such a connection only after its header was
read, and nothing else has to know about proxies. Only the header's own bytes are taken from the socket: the first bytes
of TLS, WebSocket or the protocol stay there for whoever reads from it next.
"""

import logging
import socket
from collections.abc import Callable
from typing import Any, Final, TypeAlias, final

import trio

from martlet.access.networks import AddressClasses
from martlet.contracts import Protocol
from martlet.errors import RemoteProtocolError
from martlet.net.addresses import pack_host, plain_host, show_address
from martlet.net.complaints import Complaints, Refusals
from martlet.net.opening.connect_rates import ConnectRates
from martlet.net.opening.proxy_header import ProxyHeader
from martlet.net.origins import origin_of
from martlet.settings import ServerConfig

__all__ = ["AcceptedSockets", "NetworkLookup"]

log = logging.getLogger("martlet.server")

# The specification asks for 3 s at least, because a packet may be lost. Proxies send the header at once.
HEADER_S: Final = 5.0
# Connections without their header; docs/operations.md counts their descriptors. Nearly always the header is there when
# the connection is accepted.
AWAITED_MAX: Final = 256
PEEK_BYTES: Final = 1024  # more than a usual header; the socket keeps what follows it

Admit: TypeAlias = Callable[[Protocol, socket.socket, str, bytes], None]


@final
class NetworkLookup:
    """Who may connect to the port of *protocol*, prepared for look-ups."""

    __slots__ = ("allowed", "key", "protocol", "proxies")

    def __init__(self, protocol: Protocol) -> None:
        clients, proxies = protocol.networks.clients, protocol.networks.proxies
        self.protocol = protocol
        self.key = protocol.networks.section or protocol.name
        self.allowed = AddressClasses((*clients, *proxies)) if clients else None  # None: everybody
        self.proxies = AddressClasses(proxies) if proxies else None


@final
class _Proxied:
    """A connection from a proxy whose header is being read."""

    __slots__ = ("address", "connected", "header", "is_settled", "networks", "scope", "why")

    def __init__(self, networks: NetworkLookup, connected: socket.socket, address: tuple[str, int]) -> None:
        self.networks = networks
        self.connected = connected
        self.address = address
        self.header = ProxyHeader()
        self.is_settled = False  # whether it is served or closed
        self.scope = trio.CancelScope(relative_deadline=HEADER_S)
        self.why = f"no PROXY header came within {HEADER_S:g} s"  # it is closed, if the scope is cancelled


@final
class AcceptedSockets:
    """Decides about the accepted sockets of all ports.

    Args:
      count: returns the number of connections of an origin.
      admit: called with a connection that may be served: protocol, socket, address, and address as in records.
    """

    def __init__(
        self, config: ServerConfig, complaints: Complaints, count: Callable[[bytes], int], admit: Admit
    ) -> None:
        self._count = count
        self._admit = admit
        self._refusals = Refusals(complaints)
        self._address_max = config.connections_address_max
        self._address_s = config.connects_address_s
        self._has_limits = self._address_max > 0 or self._address_s > 0
        self._rates = ConnectRates(self._address_s) if self._address_s else None
        self.nursery: trio.Nursery | None = None  # of the server, set while it runs
        self._awaited: dict[_Proxied, None] = {}
        self._wrong_networks = 0
        self._over_address_max = 0
        self._over_address_rate = 0
        self._wrong_headers = 0

    def accept(self, networks: NetworkLookup, connected: socket.socket, name: tuple[Any, ...]) -> None:
        """Admit or close *connected*, now or once its header has arrived; *name* is the address of its other end."""
        client = plain_host(name[0])
        if networks.proxies is not None and networks.proxies.contain(client):
            self._await_header(_Proxied(networks, connected, (client, name[1])))
        else:
            self._decide(networks, connected, client, name[1])

    def _decide(self, networks: NetworkLookup, connected: socket.socket, client: str, port: int) -> None:
        """Admit *connected* if the address *client* may have one more connection; otherwise close it."""
        address = show_address(client, port)
        host = pack_host(client.partition("%")[0], port)
        if networks.allowed is not None and not networks.allowed.contain(client):
            self._wrong_networks += 1
            self._refusals.warn(f"{networks.key}.networks refused a connection", address, "its address is in none")
        elif not self._has_limits or self._is_within_limits(networks, address, origin_of(host)):
            self._admit(networks.protocol, connected, address, host)
            return
        connected.close()

    def _is_within_limits(self, networks: NetworkLookup, address: str, origin: bytes) -> bool:
        """Return whether *origin* may have one more connection, and count it."""
        who = f"{address} to {networks.protocol.name}"
        if self._address_max and (held := self._count(origin)) >= self._address_max:
            self._over_address_max += 1
            kind = "server.connections_address_max refused a connection"
            self._refusals.warn(kind, who, f"its address has {held} already")
        elif self._rates is not None and not self._rates.take(origin, trio.current_time()):
            self._over_address_rate += 1
            kind = "server.connects_address_s refused a connection"
            self._refusals.warn(kind, who, f"its address makes more than {self._address_s} a second")
        else:
            return True
        return False

    # headers of proxies

    def _await_header(self, proxied: _Proxied) -> None:
        assert self.nursery is not None
        proxied.connected.setblocking(False)
        self._read_header(proxied)
        if proxied.is_settled:
            return
        if len(self._awaited) >= AWAITED_MAX:
            oldest = next(iter(self._awaited))
            del self._awaited[oldest]
            oldest.why = f"{AWAITED_MAX} newer connections wait for their PROXY headers"
            oldest.scope.cancel()
        self._awaited[proxied] = None
        self.nursery.start_soon(self._wait_header, proxied)

    async def _wait_header(self, proxied: _Proxied) -> None:
        try:
            with proxied.scope:
                while not proxied.is_settled:
                    await trio.lowlevel.wait_readable(proxied.connected)
                    self._read_header(proxied)
            if not proxied.is_settled:
                self._refuse_header(proxied, proxied.why)
        finally:
            self._awaited.pop(proxied, None)
            if not proxied.is_settled:  # the server stops
                proxied.connected.close()

    def _read_header(self, proxied: _Proxied) -> None:
        """Read what has arrived of the header; once it is complete, decide about its client."""
        connected, header = proxied.connected, proxied.header
        try:
            while not header.is_complete:
                seen = connected.recv(PEEK_BYTES, socket.MSG_PEEK)
                if not seen:
                    self._end_early(proxied)
                    return
                connected.recv(header.receive_data(seen))
        except BlockingIOError:
            return
        except OSError:  # the proxy has reset the connection
            self._end_early(proxied)
            return
        except RemoteProtocolError as error:
            self._refuse_header(proxied, str(error))
            return
        proxied.is_settled = True
        client, port = header.source or proxied.address
        log.debug("%s passes on a connection of %s", show_address(*proxied.address), show_address(client, port))
        self._decide(proxied.networks, connected, plain_host(client), port)

    def _end_early(self, proxied: _Proxied) -> None:
        """Close a connection that ended within its header; without any byte it was only a check whether we listen."""
        if proxied.header.has_begun:
            self._refuse_header(proxied, "it ended within its PROXY header")
        else:
            proxied.is_settled = True
            proxied.connected.close()

    def _refuse_header(self, proxied: _Proxied, why: str) -> None:
        self._wrong_headers += 1
        kind = f"{proxied.networks.key}.proxy_networks: closed a connection"
        self._refusals.warn(kind, show_address(*proxied.address), why)
        proxied.is_settled = True
        proxied.connected.close()

    def statistics(self) -> dict[str, object]:
        return {
            "refused_by_networks": self._wrong_networks,
            "refused_by_address_max": self._over_address_max,
            "refused_by_address_rate": self._over_address_rate,
            "rated_addresses": len(self._rates) if self._rates is not None else 0,
            "wrong_proxy_headers": self._wrong_headers,
            "awaited_proxy_headers": len(self._awaited),
        }
