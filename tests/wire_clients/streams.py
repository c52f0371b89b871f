"""The client's end of a real connection, with the methods that a connection in memory has."""

import trio

from martlet.net.addresses import split_address

Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]


class StreamWire:
    """Bytes to and from a broker."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._rest = b""

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def receive_some(self) -> bytes:
        """Return the next bytes; empty if the broker has closed the connection."""
        try:
            return bytes(await self.stream.receive_some())
        except trio.BrokenResourceError:
            return b""

    async def receive_exactly(self, size: int) -> bytes:
        """Return the next *size* bytes.

        Raises:
          EOFError: the broker has closed the connection.
        """
        while len(self._rest) < size:
            data = await self.receive_some()
            if not data:
                raise EOFError("the broker closed the connection")
            self._rest += data
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    def close(self) -> None:
        """Close the socket without a farewell."""
        stream = self.stream.transport_stream if isinstance(self.stream, trio.SSLStream) else self.stream
        stream.socket.close()


async def dial(address: str) -> StreamWire:
    return StreamWire(await trio.open_tcp_stream(*split_address(address)))
