"""Connections of the load programs, which send and receive without waiting."""

import socket

BLOCK_BYTES = 1 << 16


class Connection:
    """A connection to a port of this machine; ``out`` has what is to be sent."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.out = bytearray()

    def start(self) -> None:
        """Wait for nothing from now on."""
        self.socket.setblocking(False)

    def flush(self) -> None:
        """Send what the socket takes."""
        if self.out:
            try:
                sent = self.socket.send(self.out)
            except BlockingIOError:
                return
            del self.out[:sent]

    def receive(self) -> bytes:
        """Return what has come."""
        try:
            data = self.socket.recv(BLOCK_BYTES)
        except BlockingIOError:
            return b""
        assert data, "the broker closed the connection"
        return data
