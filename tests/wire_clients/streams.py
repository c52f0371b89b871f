"""The client's end of a connection: a socket, with the methods that one in memory has, or a WebSocket over one."""

import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import BytesMessage, CloseConnection, Event, Request, TextMessage

from martlet.net.addresses import split_address

Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]


class Wire(Protocol):
    """Bytes to and from a broker, as `martlet.testing.peers.MemoryPeer` has them."""

    async def send(self, data: bytes) -> None: ...

    async def receive_some(self) -> bytes:
        """Return the next bytes; empty if the broker has closed the connection."""

    async def receive_exactly(self, size: int) -> bytes:
        """Return the next *size* bytes. Raises `EOFError` if the broker has closed the connection."""

    def close(self) -> None:
        """Close the connection without a farewell."""


class _Buffered(ABC):
    """Cuts received bytes into the sizes that a test asks for; a subclass receives them."""

    def __init__(self) -> None:
        self._rest = b""

    @abstractmethod
    async def receive_some(self) -> bytes:
        """Return the next bytes; empty at the end."""

    async def receive_exactly(self, size: int) -> bytes:
        while len(self._rest) < size:
            data = await self.receive_some()
            if not data:
                raise EOFError("the broker closed the connection")
            self._rest += data
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


class StreamWire(_Buffered):
    """A socket, with or without TLS."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def receive_some(self) -> bytes:
        try:
            return bytes(await self.stream.receive_some())
        except trio.BrokenResourceError:
            return b""

    def close(self) -> None:
        stream = self.stream.transport_stream if isinstance(self.stream, trio.SSLStream) else self.stream
        stream.socket.close()


class WebSocketWire(_Buffered):
    """A WebSocket over *wire*, whose frames are of text if *text*, otherwise binary."""

    def __init__(self, wire: Wire, *, text: bool = False) -> None:
        super().__init__()
        self._wire = wire
        self._text = text
        self._state = WSConnection(ConnectionType.CLIENT)
        self._events: list[Event] = []

    async def shake_hands(self, *subprotocols: str, target: str = "/", origin: str = "") -> Event:
        """Return the broker's answer."""
        headers = [(b"Origin", origin.encode())] if origin else []
        await self.tell(
            Request(host="localhost", target=target, subprotocols=list(subprotocols), extra_headers=headers)
        )
        return await self.hear()

    async def tell(self, event: Event) -> None:
        await self._wire.send(self._state.send(event))

    async def hear(self) -> Event:
        """Return the next event. Raises `EOFError` if the broker has closed the connection."""
        while not self._events:
            data = await self._wire.receive_some()
            if not data:
                raise EOFError("the broker closed the connection")
            self._state.receive_data(data)
            self._events += self._state.events()
        return self._events.pop(0)

    async def send(self, data: bytes) -> None:
        await self.tell(TextMessage(data.decode()) if self._text else BytesMessage(data))

    async def receive_some(self) -> bytes:
        data = b""
        while not data:
            event = await self.hear()
            if isinstance(event, CloseConnection):
                return b""
            assert isinstance(event, BytesMessage), event
            data = bytes(event.data)
        return data

    def close(self) -> None:
        self._wire.close()


async def dial(address: str, context: ssl.SSLContext | None = None) -> StreamWire:
    """Return a connection to *address*, with TLS if a *context* is given."""
    host, port = split_address(address)
    stream = await trio.open_tcp_stream(host, port)
    return StreamWire(stream if context is None else trio.SSLStream(stream, context, server_hostname=host))


@asynccontextmanager
async def dialed(address: str) -> AsyncIterator[StreamWire]:
    """A connection to *address*, which the end of the block closes."""
    wire = await dial(address)
    try:
        yield wire
    finally:
        wire.close()
