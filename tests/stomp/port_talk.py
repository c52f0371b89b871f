"""Connections over real sockets: plain, with TLS, and over WebSocket."""

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import trio
import trustme
from msgspec.structs import replace
from tests.stomp.stomp_talk import ASYNC, V1_2, Frame, Talk, frame
from tests.wire_clients.streams import StreamWire, dial
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Request, TextMessage

from martlet.broker import Broker
from martlet.net.addresses import split_address
from martlet.testing.peers import serving
from martlet_stomp.config import StompConfig
from martlet_stomp.plugin import StompPlugin
from martlet_stomp.shared.context import Context

__all__ = ["Port", "WebSocketWire", "connected", "port_of", "websocket"]

NO_TLS: Mapping[str, str] = {}


class WebSocketWire:
    """A WebSocket over a wire, whose frames are of text or binary as stomp.js sends them."""

    def __init__(self, wire: StreamWire, *, text: bool) -> None:
        self._wire = wire
        self._text = text
        self._state = WSConnection(ConnectionType.CLIENT)
        self._events: list[Event] = []

    async def shake_hands(self, subprotocols: list[str], origin: str = "") -> Event:
        """Return the answer of the broker."""
        headers = [(b"Origin", origin.encode())] if origin else []
        await self._tell(Request(host="localhost", target="/", subprotocols=subprotocols, extra_headers=headers))
        return await self.hear()

    async def _tell(self, event: Event) -> None:
        await self._wire.send(self._state.send(event))

    async def hear(self) -> Event:
        """Return the next event; `CloseConnection` also if the broker closes without a word."""
        while not self._events:
            data = await self._wire.receive_some()
            if not data:
                return CloseConnection(code=1006)
            self._state.receive_data(data)
            self._events += self._state.events()
        return self._events.pop(0)

    async def send(self, data: bytes) -> None:
        await self._tell(TextMessage(data.decode()) if self._text else BytesMessage(data))

    async def receive_some(self) -> bytes:
        event = await self.hear()
        if isinstance(event, CloseConnection):
            return b""
        assert isinstance(event, BytesMessage), event
        return bytes(event.data) or await self.receive_some()

    def close(self) -> None:
        self._wire.close()


class Port:
    """The STOMP port of a broker, with certificates of one authority."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = trustme.CA()
        self._wires: list[StreamWire] = []
        self.address = ""
        self.broker: Broker
        self.context: Context
        self.server_file = str(directory / "server.pem")
        self.ca_file = str(directory / "ca.pem")
        self._authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(self.server_file)
        self._authority.cert_pem.write_to_path(self.ca_file)

    def bound(self, address: str) -> None:
        self.address = address

    async def wire(self) -> StreamWire:
        return self._keep(await dial(self.address))

    async def tls_wire(self, user: str = "") -> StreamWire:
        """Return a connection with TLS, with a client certificate of *user* unless that is empty."""
        context = ssl.create_default_context(cafile=self.ca_file)
        if user:
            path = self._directory / f"{user}.pem"
            self._authority.issue_cert(common_name=user).private_key_and_cert_chain_pem.write_to_path(str(path))
            context.load_cert_chain(str(path))
        stream = await trio.open_tcp_stream(*split_address(self.address))
        return self._keep(StreamWire(trio.SSLStream(stream, context, server_hostname="127.0.0.1")))

    def _keep(self, wire: StreamWire) -> StreamWire:
        self._wires.append(wire)
        return wire

    def close(self) -> None:
        """Close all connections."""
        for wire in self._wires:
            wire.close()


async def connected(wire: StreamWire | WebSocketWire, **headers: str) -> tuple[Talk, Frame]:
    """Send CONNECT, and return the answer."""
    talk = Talk(wire, V1_2)
    await talk.send(frame("CONNECT", accept_version="1.2", host="h", **headers))
    return talk, await talk.receive()


async def websocket(wire: StreamWire, *, text: bool, origin: str = "") -> WebSocketWire:
    """Return an open WebSocket over *wire*."""
    found = WebSocketWire(wire, text=text)
    answer = await found.shake_hands(["v10.stomp", "v11.stomp", "v12.stomp"], origin)
    assert isinstance(answer, AcceptConnection), answer
    return found


@asynccontextmanager
async def port_of(
    directory: Path, tls: Mapping[str, str] = NO_TLS, config: StompConfig | None = None
) -> AsyncIterator[Port]:
    """Run a broker; *tls* are the keys of its certificates, in which ``server`` and ``ca`` stand for their files."""
    port = Port(directory)
    files = {"server": port.server_file, "ca": port.ca_file}
    settings = {name: files.get(value, value) for name, value in tls.items()}
    plugin = StompPlugin(replace(config or StompConfig(), listen="127.0.0.1:0", **settings))
    async with serving(
        directory / "data",
        store=ASYNC,
        services=plugin.martlet_services,
        ports=lambda broker: (plugin.protocol(broker, port.bound),),
    ) as running:
        port.broker, port.context = running.broker, plugin.context(running.broker)
        try:
            yield port
        finally:
            port.close()
