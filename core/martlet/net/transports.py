"""Transports carry the bytes of a connection: over a socket, or TLS over a socket. A simulation has its own.

Only `wait_readable` and `wait_writable` wait; `receive` and `send` transfer as much as is possible without waiting. So
a whole batch of requests needs one wait, one receive and one send.
"""

import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final, Protocol, final

import trio

from martlet.contracts import Buffer, Certificate
from martlet.net.lingering import LingeringSockets

__all__ = ["SocketTransport", "TlsTransport", "Transport"]

IOVECS_MAX: Final = 1024  # Linux UIO_MAXIOV: sendmsg takes no more pieces at once
# Up to this size, and for pieces that are short on average, one copy is cheaper than a long iovec list. A prefix and
# 38 KB of records take 3.6 us with sendmsg, and 7.3 joined.
JOIN_BYTES_MAX: Final = 65536
JOINED_PIECE_BYTES: Final = 4096
TLS_BYTES_AT_ONCE: Final = 262144  # encrypted ahead of what the socket accepts


class Transport(Protocol):
    """Carries the bytes of one connection."""

    def receive(self, limit: int) -> bytes | None:
        """Return up to *limit* available bytes; empty at the end, None if none are available now."""
        ...

    def send(self, pieces: list[Buffer]) -> int:
        """Send as much of *pieces* as possible now; return the number of bytes. Raises `OSError`."""
        ...

    def pending(self) -> bool:
        """Return whether accepted bytes are still buffered inside."""
        ...

    async def wait_readable(self) -> None: ...

    async def wait_writable(self) -> None: ...

    def close(self) -> None: ...

    def linger(self) -> None:
        """Close so that a client that is still writing can read the last output (`martlet.net.lingering`)."""
        ...


@final
class SocketTransport:
    """A connected TCP socket, which becomes non-blocking; `on_close` is called just before it closes."""

    __slots__ = ("_has_ended", "_has_sent", "_lingering", "_socket", "_was_awaited", "on_close")

    def __init__(self, connected: socket.socket, lingering: LingeringSockets) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._lingering = lingering
        self._has_sent = False  # whether anything was sent
        self._has_ended = False  # whether the client's side has ended
        self._was_awaited = False  # whether trio knows the socket
        self.on_close: Callable[[], None] | None = None

    def fileno(self) -> int:
        """Return the file descriptor of the socket, -1 if it is closed."""
        return self._socket.fileno()

    def receive(self, limit: int) -> bytes | None:
        try:
            data = self._socket.recv(limit)
        except BlockingIOError:
            return None
        if not data:
            self._has_ended = True
        return data

    def send(self, pieces: list[Buffer]) -> int:
        try:
            if len(pieces) == 1:
                sent = self._socket.send(pieces[0])
            elif sum(map(len, pieces)) <= min(JOIN_BYTES_MAX, len(pieces) * JOINED_PIECE_BYTES):
                sent = self._socket.send(b"".join(pieces))
            else:
                sent = self._socket.sendmsg(pieces[:IOVECS_MAX])
        except BlockingIOError:
            return 0
        if sent:
            self._has_sent = True
        return sent

    def pending(self) -> bool:
        return False

    async def wait_readable(self) -> None:
        self._check_open()
        await trio.lowlevel.wait_readable(self._socket)

    async def wait_writable(self) -> None:
        self._check_open()
        await trio.lowlevel.wait_writable(self._socket)

    def _check_open(self) -> None:
        if self._socket.fileno() < 0:
            raise trio.ClosedResourceError("the socket was closed here")
        self._was_awaited = True

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._unregister()
            self._socket.close()

    def linger(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._unregister()
        if self._has_sent and not self._has_ended and self._socket.fileno() >= 0:  # `on_close` may have closed it
            with contextlib.suppress(OSError):  # the client has reset the connection
                self._socket.shutdown(socket.SHUT_WR)
                self._lingering.add(self._socket.detach())
        self._socket.close()

    def _unregister(self) -> None:
        """Make trio forget the socket."""
        if self.on_close is not None:
            on_close, self.on_close = self.on_close, None
            on_close()
        if self._was_awaited and self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)


@final
class TlsTransport:
    """TLS over another transport; *first* holds the bytes that were read to detect TLS.

    After the handshake, before the first bytes are received, *verified* is called with the client's certificate, if it
    sent one.
    """

    __slots__ = (
        "_handshake_done",
        "_has_ended",
        "_incoming",
        "_inner",
        "_object",
        "_on_verified",
        "_outgoing",
        "_ready",
        "_unsent",
    )

    def __init__(
        self, inner: Transport, context: ssl.SSLContext, first: bytes, verified: Callable[[Certificate], None]
    ) -> None:
        self._inner = inner
        self._on_verified = verified
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._incoming.write(first)
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._unsent = b""
        self._handshake_done = False
        self._has_ended = False  # whether the client's side has ended
        self._ready: trio.Event | None = None  # set while a task waits for the end of the handshake

    @property
    def is_ready(self) -> bool:
        """Whether the handshake is over."""
        return self._handshake_done

    def receive(self, limit: int) -> bytes | None:
        if not self._incoming.pending:
            raw = self._inner.receive(limit)
            if raw is None:
                return None
            if raw:
                self._incoming.write(raw)
            else:
                self._incoming.write_eof()
        return self._decrypt(limit)

    def _decrypt(self, limit: int) -> bytes | None:
        plaintext: list[bytes] = []
        try:
            if not self._handshake_done:
                self._object.do_handshake()
                self._handshake_done = True
                self._wake_writer()
                self._report_certificate()
            while True:
                data = self._object.read(limit)
                plaintext.append(data)
                if not data:
                    break
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            plaintext.append(b"")
        finally:
            self._flush()
        if not plaintext:
            return None
        data = b"".join(plaintext)
        self._has_ended = not data
        return data

    def _report_certificate(self) -> None:
        fields, der = self._object.getpeercert(), self._object.getpeercert(binary_form=True)
        if fields and der:
            self._on_verified(_make_certificate(fields, der))

    def send(self, pieces: list[Buffer]) -> int:
        if not self._flush() or not self._handshake_done:
            return 0
        written_bytes = 0
        for piece in pieces:
            room = TLS_BYTES_AT_ONCE - written_bytes
            self._object.write(piece if len(piece) <= room else memoryview(piece)[:room])
            written_bytes += min(len(piece), room)
            if written_bytes == TLS_BYTES_AT_ONCE:
                break
        self._flush()
        return written_bytes

    def _flush(self) -> bool:
        """Send encrypted bytes; return True if none are left."""
        if self._outgoing.pending:
            self._unsent += self._outgoing.read()
        if self._unsent:
            self._unsent = self._unsent[self._inner.send([self._unsent]) :]
        return not self._unsent

    def pending(self) -> bool:
        return bool(self._unsent)

    async def wait_readable(self) -> None:
        if not self._incoming.pending:
            await self._inner.wait_readable()

    async def wait_writable(self) -> None:
        if self._handshake_done or self._unsent:
            await self._inner.wait_writable()
            return
        # The socket is writable, but no application data can be sent before the handshake is over.
        if self._ready is None:
            self._ready = trio.Event()
        await self._ready.wait()

    def _wake_writer(self) -> None:
        if self._ready is not None:
            self._ready.set()
            self._ready = None

    def close(self) -> None:
        self._inner.close()
        self._wake_writer()

    def linger(self) -> None:
        if self._has_ended:
            self.close()
            return
        with contextlib.suppress(OSError, trio.ClosedResourceError):
            self._send_close_notify()
        self._inner.linger()
        self._wake_writer()

    def _send_close_notify(self) -> None:
        """Send the alert close_notify (RFC 8446 6.1); without it, the client takes the end for an attack."""
        if self._handshake_done:
            with contextlib.suppress(ssl.SSLError):  # the client's alert has not arrived yet
                self._object.unwrap()
            self._flush()


def _make_certificate(fields: dict[str, Any], der: bytes) -> Certificate:
    """Convert the result of `ssl.SSLObject.getpeercert` to credentials."""
    subject = dict(pair for pairs in fields.get("subject", ()) for pair in pairs)
    names = tuple(name for kind, name in fields.get("subjectAltName", ()) if kind == "DNS")
    return Certificate(subject.get("commonName", ""), names, der)
