"""Reading from peers: bytes to events, events to the handler, and the answers of a read in one round.

A peer that does not read what we send it is not read from either, so what waits for it stays near
`ServerConfig.unsent_bytes_max`.
"""

import logging
import select
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeAlias, final

import trio

from martlet.contracts import Certificate, Credentials, Identity
from martlet.errors import LocalProtocolError, MartletError, Refused, RemoteProtocolError
from martlet.net.complaints import Complaints
from martlet.net.deadlines import Deadlines
from martlet.net.event_pump import EventPump
from martlet.net.incomplete import IncompleteRequests
from martlet.net.peer import CLOSING, LOST, ServerPeer
from martlet.net.read_turns import ReadTurns
from martlet.net.rounds import Rounds
from martlet.net.transports import SocketTransport, TlsTransport
from martlet.net.websocket import HTTP_GET, WebSocketTransport
from martlet.settings import ServerConfig

__all__ = ["Authenticate", "Reader"]

log = logging.getLogger("martlet.server")

RECEIVE_BYTES: Final = 262144
TLS_HANDSHAKE: Final = 0x16  # the first byte of a TLS record of a ClientHello (RFC 8446 5.1)


Authenticate: TypeAlias = Callable[[Credentials], Identity]


@final
class Reading:
    """How far reading from one peer by the pump is."""

    __slots__ = ("_fd", "_pump", "attention", "closed", "ended", "events", "first", "now", "peer", "plain", "received")

    def __init__(self, peer: ServerPeer, pump: "EventPump[Reading]", fd: int) -> None:
        self.peer = peer
        self._pump = pump
        self._fd = fd
        self.attention = trio.Event()  # set when the peer's own task has to act
        self.plain = False  # its first bytes were the protocol's own
        self.first: bytes | None = None  # its first bytes, which were not
        self.events: Iterator[Any] | None = None  # what is left of a read whose handling must wait
        self.received = 0  # bytes of that read
        self.now = 0.0  # its time
        self.ended = False  # nothing more is to be read
        self.closed = False  # the socket was closed on our side

    async def wait_attention(self) -> None:
        """Let the pump read until the peer's own task has to act."""
        self.attention = trio.Event()
        self._pump.watch(self._fd, self)
        try:
            await self.attention.wait()
        finally:
            self._pump.unwatch(self._fd, self)

    def stop(self) -> None:
        """Read no more, not even before the peer's own task runs, and have that act."""
        self._pump.unwatch(self._fd, self)
        self.attention.set()

    def close(self) -> None:
        """The socket is about to close."""
        self.closed = True
        self.stop()


@final
class Reader:
    """Reads from every peer of a server."""

    def __init__(
        self, config: ServerConfig, rounds: Rounds, complaints: Complaints, authenticate: Authenticate
    ) -> None:
        self._config = config
        self._authenticate = authenticate
        self._rounds = rounds
        self._complaints = complaints
        # Answers of one read before we look whether the peer can take them.
        self._look_bytes = config.unsent_bytes_max // 8
        self.pump: EventPump[Reading] | None = None  # while it runs
        self.turns = ReadTurns()  # of peers that the pump does not read from
        self.deadlines = Deadlines(self._deadline_passed)
        self.incomplete: IncompleteRequests[ServerPeer] = IncompleteRequests(
            config.incomplete_total_bytes_max, config.incomplete_address_bytes_max
        )
        self.incomplete_closed = 0
        self.protocol_errors = 0
        self.bytes_in = 0

    async def read(self, peer: ServerPeer) -> None:
        """Read until the client's side ends or something is wrong; an error ends this peer and nothing else."""
        try:
            await self._read(peer)
        except Exception as error:
            self._ended_by(peer, error)

    def _ended_by(self, peer: ServerPeer, error: Exception) -> None:
        """Act on *error* of reading from *peer* or of handling what it sent."""
        if isinstance(error, RemoteProtocolError):
            self.protocol_errors += 1
            peer.reason = str(error)
            self._complaints.warn("%s %s closed; %s", peer.protocol.name, peer.address, error)
            peer.send(peer.connection.farewell(error))
        elif isinstance(error, OSError | ssl.SSLError | trio.ClosedResourceError):
            peer.lose(error)
        elif isinstance(error, MartletError):
            peer.reason = str(error)
            log.error("%s %s closed; %s", peer.protocol.name, peer.address, error)
        else:
            peer.fail(error)

    async def _read(self, peer: ServerPeer) -> None:
        self.deadlines.watch(peer)
        if self.pump is not None and isinstance(peer.transport, SocketTransport):
            first = await self._read_pumped(peer, peer.transport, self.pump)
            if first is None:
                return
            await self.turns.wait()
        else:
            first = await self._receive_some(peer)
        await self._open(peer, first)
        del first
        while peer.state < CLOSING:
            await peer.transport.wait_readable()
            await self.turns.wait()
            data = peer.transport.receive(RECEIVE_BYTES)
            if data is None:
                if peer.transport.pending():
                    peer.drain()
                continue
            if not data or peer.state >= CLOSING:
                return
            await self._take(peer, data)
            del data  # or every idle connection would keep what it said last

    async def _open(self, peer: ServerPeer, data: bytes) -> None:
        """Look at the first bytes, *data*: TLS or not, and then WebSocket or the protocol itself."""
        if not data:
            return
        context, websocket = peer.protocol.tls(), peer.protocol.websocket
        if context is not None and data[0] == TLS_HANDSHAKE:
            peer.transport = TlsTransport(peer.transport, context, data, partial(self._identify, peer))
            if websocket is None or not (data := await self._receive_some(peer)):
                return
        elif peer.protocol.tls_required:
            raise RemoteProtocolError("peer speaks plain text; this port takes TLS only")
        if websocket is not None and data[0] == HTTP_GET:
            peer.transport = WebSocketTransport(peer.transport, websocket, data)
            return
        await self._take(peer, data)

    def _identify(self, peer: ServerPeer, certificate: Certificate) -> None:
        """Set who *peer* is, from the certificate that TLS has verified."""
        try:
            peer.identity = self._authenticate(certificate)
        except Refused as refused:
            raise RemoteProtocolError(f"certificate of {certificate.common_name!r} was refused; {refused}") from refused

    def _is_plain(self, peer: ServerPeer, data: bytes) -> bool:
        """Whether *data*, the first bytes of *peer*, is neither TLS nor WebSocket, nor must be."""
        protocol = peer.protocol
        if data[0] == TLS_HANDSHAKE and protocol.tls() is not None:
            return False
        return not protocol.tls_required and (protocol.websocket is None or data[0] != HTTP_GET)

    async def _receive_some(self, peer: ServerPeer) -> bytes:
        """Return the next bytes that the transport has; empty at the end."""
        while True:
            await peer.transport.wait_readable()
            await self.turns.wait()
            data = peer.transport.receive(RECEIVE_BYTES)
            if data is not None:
                return data
            if peer.transport.pending():
                peer.drain()

    # reading by the pump

    async def run_pump(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Have the pump read from plain sockets; without epoll (macOS) every peer reads by itself."""
        if not hasattr(select, "epoll"):
            task_status.started()
            return
        self.pump = EventPump(self._rounds, self._read_now)
        task_status.started()
        try:
            await self.pump.run()
        finally:
            self.pump = None

    async def _read_pumped(
        self, peer: ServerPeer, transport: SocketTransport, pump: "EventPump[Reading]"
    ) -> bytes | None:
        """Let the pump read; this task takes over where something must be waited for, and at the end.

        Returns the first bytes when they are not the protocol's own, so that the pump cannot go on; None at the end.
        """
        reading = Reading(peer, pump, transport.fileno())
        transport.on_close = reading.close
        try:
            while not reading.ended and peer.state < CLOSING:
                if reading.closed:
                    raise trio.ClosedResourceError("the socket was closed here")
                await reading.wait_attention()
                if reading.first is not None:
                    return reading.first
                if reading.events is not None:
                    events, reading.events = reading.events, None
                    await self._go_on(peer, events, reading.received, reading.now)
                    self._taken(peer, reading.received, reading.now)
                    del events
                if peer.over:
                    await peer.wait_room()
            return None
        finally:
            transport.on_close = None

    def _read_now(self, reading: "Reading") -> None:
        """Read once and handle what is complete, in a round of the pump."""
        peer = reading.peer
        try:
            data = peer.transport.receive(RECEIVE_BYTES)
            if data is None:
                return
            if not data or peer.state >= CLOSING:
                reading.ended = True
            elif reading.plain or self._is_plain(peer, data):
                reading.plain = True
                self._take_now(reading, data)
            else:
                reading.first = data
                reading.stop()
        except Exception as error:
            self._ended_by(peer, error)
            reading.ended = True
        if reading.ended or reading.events is not None or peer.state >= CLOSING or peer.over:
            reading.stop()

    def _take_now(self, reading: "Reading", data: bytes) -> None:
        peer = reading.peer
        now = trio.current_time()
        self.bytes_in += len(data)
        peer.connection.receive_data(data, now)
        events = iter(peer.connection.events())
        if self._handle(peer, events):
            self._taken(peer, len(data), now)
        else:
            reading.events, reading.received, reading.now = events, len(data), now

    def _taken(self, peer: ServerPeer, received: int, now: float) -> None:
        """Everything that was *received* is handled, or belongs to a request that is not complete."""
        self._note_incomplete(peer, received, now)
        self.deadlines.watch(peer)

    async def _take(self, peer: ServerPeer, data: bytes) -> None:
        """Handle all that *data* completes, and let the answers leave together."""
        now = trio.current_time()
        self.bytes_in += len(data)
        self._rounds.begin()
        try:
            peer.connection.receive_data(data, now)
            events = iter(peer.connection.events())
            done = self._handle(peer, events)
        finally:
            self._rounds.end()
        if not done:
            await self._go_on(peer, events, len(data), now)
        self._taken(peer, len(data), now)
        if peer.over:
            await peer.wait_room()

    def _handle(self, peer: ServerPeer, events: Iterator[Any]) -> bool:
        """Handle *events*; False when something must be waited for before the next one."""
        handle = peer.handler.handle
        for event in events:
            rest = handle(event)
            if rest is not None:
                peer.rest = rest
                return False
            if peer.batch_bytes > self._look_bytes and peer.over:
                return False
            if peer.state >= CLOSING:
                break
        return True

    async def _go_on(self, peer: ServerPeer, events: Iterator[Any], received: int, now: float) -> None:
        """Wait for the rest of a request or for room, and handle the remaining *events*, until there are none."""
        done = False
        while not done:
            if peer.rest is not None:
                await self._wait_rest(peer)
            elif peer.over:
                self._note_incomplete(peer, received, now)
                await peer.wait_room()
            if peer.state >= CLOSING:
                return
            self._rounds.begin()
            try:
                done = self._handle(peer, events)
            finally:
                self._rounds.end()

    async def _wait_rest(self, peer: ServerPeer) -> None:
        """Wait for the rest of a request; earlier answers have left, later requests of this peer wait."""
        rest, peer.rest = peer.rest, None
        assert rest is not None
        scope = peer.rest_scope = trio.CancelScope()
        if peer.state >= LOST:
            scope.cancel()
        with scope:
            await rest
        peer.rest_scope = None

    def _note_incomplete(self, peer: ServerPeer, received: int, now: float) -> None:
        """Account for what *peer* holds of requests that are not handled; over a limit the slowest peers are closed."""
        size = peer.connection.buffered_bytes
        if not size and not peer.incomplete:
            return
        peer.incomplete = size > 0
        requests = self.incomplete
        requests.note(peer, peer.origin, size, received, now)
        if requests.over(peer.origin):
            self._close_slow(peer)

    def _close_slow(self, peer: ServerPeer) -> None:
        """Too much is held of incomplete requests, at the latest since *peer* sent more: the slowest of them end."""
        requests, config = self.incomplete, self._config
        held, held_here = requests.total, requests.held_by(peer.origin)
        slow = requests.give_way(peer.origin)
        self.incomplete_closed += len(slow)
        self._complaints.warn(
            "%d connections closed, the slowest in sending a request, %s first; incomplete requests held %d bytes "
            "and those from the address of %s %d, server.incomplete_total_bytes_max is %d and "
            "server.incomplete_address_bytes_max %d",
            len(slow),
            slow[0].address,
            held,
            peer.address,
            held_here,
            config.incomplete_total_bytes_max,
            config.incomplete_address_bytes_max,
        )
        for each in slow:
            each.lose(TimeoutError("it was among the slowest in sending a request when too many were incomplete"))

    def _deadline_passed(self, peer: ServerPeer, now: float) -> None:
        """Have the connection of *peer* act on its deadline, if that has passed indeed."""
        if peer.state >= CLOSING or peer.rest_scope is not None:  # after the rest of a request it is watched again
            return
        self._rounds.begin()
        try:
            if peer.connection.deadline() <= now:
                peer.connection.handle_timeout(now)
                for event in peer.connection.events():
                    if peer.handler.handle(event) is not None:
                        raise LocalProtocolError("an event that a timeout made must be handled at once")
        except RemoteProtocolError as error:
            self.protocol_errors += 1
            peer.send(peer.connection.farewell(error))
            peer.close(str(error))
        except MartletError as error:
            peer.close(str(error))
        except Exception as error:
            peer.fail(error)
        finally:
            self._rounds.end()
        self.deadlines.watch(peer)
