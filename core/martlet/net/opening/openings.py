"""How a client speaks: TLS, WebSocket or the protocol itself; its first bytes tell.

Output waits until that is known (`martlet.net.output`), but a client of the protocol itself may wait for the server's
first word: if it sends nothing for a moment, it gets its output in plain text.
"""

import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeAlias, final

import trio

from martlet.contracts import Certificate, Identity, LoginOrigin
from martlet.errors import Refused, RemoteProtocolError
from martlet.net.peer import CLOSING, LOST, ServerPeer
from martlet.net.transports import TlsTransport, Transport

__all__ = ["Authenticate", "Openings"]

# Time that a greeting waits for the first bytes of a client, which may begin TLS or WebSocket, on a port that also
# takes plain text. A TLS client sends its first bytes right after the connection is made.
FIRST_BYTES_S: Final = 0.2
HTTP_GET: Final = 0x47  # the G of GET, with which a WebSocket handshake begins
TLS_HANDSHAKE: Final = 0x16  # the first byte of a TLS record of a ClientHello (RFC 8446 5.1)

Authenticate: TypeAlias = Callable[[Certificate, LoginOrigin], Identity]


@final
class Openings:
    """Finds out how each client speaks, and gives its peer the transport for that.

    Args:
      authenticate: returns the identity that a certificate proves.
      receive: waits for the next bytes of a peer; empty at the end.
    """

    def __init__(self, authenticate: Authenticate, receive: Callable[[ServerPeer], Awaitable[bytes]]) -> None:
        self._authenticate = authenticate
        self._receive = receive
        self._greeted: set[ServerPeer] = set()  # a task waits for their first bytes

    def is_plain(self, peer: ServerPeer, data: bytes) -> bool:
        """Return whether *data*, the first bytes of *peer*, is plain text of the protocol; if so, release the peer's
        output.
        """
        if not peer.undecided:
            return True
        protocol = peer.protocol
        if data[0] == TLS_HANDSHAKE and protocol.takes_tls:
            return False
        if protocol.tls_required or (protocol.websocket is not None and data[0] == HTTP_GET):
            return False
        peer.decide()
        return True

    async def open(self, peer: ServerPeer, data: bytes) -> bytes:
        """Give *peer* the transport that *data*, its first bytes, call for; return those of the protocol itself.

        They are empty if none have come, or the client has ended.
        """
        if not data:
            return b""
        context, websocket, is_tls = None, peer.protocol.websocket, peer.undecided and data[0] == TLS_HANDSHAKE
        if is_tls and (context := peer.protocol.tls()) is None and peer.protocol.make_tls is not None:
            context = await peer.protocol.make_tls()
            if peer.state >= CLOSING:
                return b""
        if context is not None:
            self._wrap(peer, self._make_tls(peer, context, data), encrypted=True)
            if websocket is None:
                peer.decide()
                return b""
            if not (data := await self._receive(peer)):
                return b""
        elif peer.protocol.tls_required:
            peer.drop_output()
            raise RemoteProtocolError("client speaks plain text; this port requires TLS")
        if peer.undecided and websocket is not None and data[0] == HTTP_GET:
            from martlet.net.opening.websocket import (
                WebSocketTransport,  # `martlet.app.startup` imports it once the broker is ready
            )

            self._wrap(peer, WebSocketTransport(peer.transport, websocket, data), encrypted=False)
            data = b""
        if peer.undecided:
            peer.decide()
        return data

    async def upgrade(self, peer: ServerPeer, *, has_more: bool) -> None:
        """Send the rest of the plain text, then begin TLS, as the handler has asked.

        If the client *has_more* plain text, that is refused: anybody on the network may have written it, and it must
        not count as a request of the client that TLS identifies.
        """
        context = peer.upgrade
        assert context is not None
        first = b""
        if not has_more:
            while peer.state < LOST and not peer.output.is_at_border:
                await peer.output.wait_progress()
            if peer.state >= LOST or not (first := await self._receive(peer)):
                return
        if has_more or first[0] != TLS_HANDSHAKE:
            peer.drop_output()
            raise RemoteProtocolError("client sent plain text where TLS had to begin")
        peer.upgrade = None
        peer.stops = peer.state >= CLOSING
        self._wrap(peer, self._make_tls(peer, context, first), encrypted=True)
        peer.decide()

    def _wrap(self, peer: ServerPeer, transport: Transport, *, encrypted: bool) -> None:
        """Continue over *transport*, TLS or WebSocket; the protocol inside may be undecided still."""
        peer.transport = transport
        peer.wrapped = True
        peer.encrypted = peer.encrypted or encrypted
        if peer.output.blocked:
            self.watch(peer)

    def _make_tls(self, peer: ServerPeer, context: ssl.SSLContext, first: bytes) -> TlsTransport:
        return TlsTransport(peer.transport, context, first, partial(self._identify, peer))

    def _identify(self, peer: ServerPeer, certificate: Certificate) -> None:
        """Set the identity of *peer* from its certificate, which TLS has verified."""
        try:
            peer.identity = self._authenticate(certificate, peer.login_origin())
        except Refused as refused:
            raise RemoteProtocolError(f"certificate of {certificate.common_name!r} was refused; {refused}") from refused

    def watch(self, peer: ServerPeer) -> None:
        """Release the output after `FIRST_BYTES_S` if the client sends nothing: it waits for the server's greeting."""
        if peer.may_be_plain and peer not in self._greeted:
            self._greeted.add(peer)
            peer.shared.nursery.start_soon(self._wait_first_bytes, peer)

    async def _wait_first_bytes(self, peer: ServerPeer) -> None:
        transport: Transport | None = None
        try:
            while peer.undecided and (peer.transport is not transport or _is_shaking_hands(peer)):
                transport = peer.transport
                await trio.sleep(FIRST_BYTES_S)
            if peer.undecided:
                peer.decide()
        finally:
            self._greeted.discard(peer)


def _is_shaking_hands(peer: ServerPeer) -> bool:
    return isinstance(peer.transport, TlsTransport) and not peer.transport.is_ready
