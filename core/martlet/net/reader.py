"""Reads from connections: decodes bytes to events, passes events to the handler, and ends the round.

While a client does not read its answers, the server stops reading its requests, so that its unsent output stays
near `ServerConfig.unsent_bytes_max`.
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
from martlet.settings import ServerConfig

__all__ = ["Authenticate", "Reader"]

log = logging.getLogger("martlet.server")

RECEIVE_BYTES: Final = 262144
HTTP_GET: Final = 0x47  # the G of GET, with which a WebSocket handshake begins
TLS_HANDSHAKE: Final = 0x16  # the first byte of a TLS record of a ClientHello (RFC 8446 5.1)


Authenticate: TypeAlias = Callable[[Credentials], Identity]


@final
class Reading:
    """The state of reading from one peer by the pump."""

    __slots__ = ("_fd", "_pump", "attention", "closed", "ended", "events", "first", "now", "peer", "plain", "received")

    def __init__(self, peer: ServerPeer, pump: "EventPump[Reading]", fd: int) -> None:
        self.peer = peer
        self._pump = pump
        self._fd = fd
        self.attention = trio.Event()  # set when the peer's own task must act
        self.plain = False  # whether the first bytes were the protocol's own
        self.first: bytes | None = None  # the first bytes, if they were not
        self.events: Iterator[Any] | None = None  # the remaining events of a read that must wait
        self.received = 0  # size of that read
        self.now = 0.0  # time of that read
        self.ended = False  # the client has ended its side
        self.closed = False  # the socket was closed on our side

    async def wait_attention(self) -> None:
        """Let the pump read until the peer's own task must act."""
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
        """Prepare for the closing of the socket."""
        self.closed = True
        self.stop()


@final
class Reader:
    """Reads from all peers of a server."""

    def __init__(
        self, config: ServerConfig, rounds: Rounds, complaints: Complaints, authenticate: Authenticate
    ) -> None:
        self._config = config
        self._authenticate = authenticate
        self._rounds = rounds
        self._complaints = complaints
        # The size of answers after which the reader checks whether the peer accepts them.
        self._look_bytes = config.unsent_bytes_max // 8
        self.pump: EventPump[Reading] | None = None  # set while it runs
        self.turns = ReadTurns()  # for peers that the pump does not read from
        self.deadlines = Deadlines(self._deadline_passed)
        self.incomplete: IncompleteRequests[ServerPeer] = IncompleteRequests(
            config.incomplete_total_bytes_max, config.incomplete_address_bytes_max
        )
        self.incomplete_closed = 0
        self.protocol_errors = 0

    async def read(self, peer: ServerPeer) -> None:
        """Read until the client's side ends or an error occurs; an error closes only this connection."""
        try:
            await self._read(peer)
        except Exception as error:
            self._ended_by(peer, error)

    def _ended_by(self, peer: ServerPeer, error: Exception) -> None:
        """Handle *error*, raised while reading from *peer* or handling its requests."""
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
            del data  # else every idle connection would keep its last bytes in memory

    async def _open(self, peer: ServerPeer, data: bytes) -> None:
        """Detect from the first bytes, *data*, whether the client speaks TLS, WebSocket or the protocol itself."""
        if not data:
            return
        context, websocket = peer.protocol.tls(), peer.protocol.websocket
        if context is not None and data[0] == TLS_HANDSHAKE:
            peer.transport = TlsTransport(peer.transport, context, data, partial(self._identify, peer))
            if websocket is None or not (data := await self._receive_some(peer)):
                return
        elif peer.protocol.tls_required:
            raise RemoteProtocolError("client speaks plain text; this port requires TLS")
        if websocket is not None and data[0] == HTTP_GET:
            from martlet.net.websocket import WebSocketTransport  # `Server.run` imports it

            peer.transport = WebSocketTransport(peer.transport, websocket, data)
            return
        await self._take(peer, data)

    def _identify(self, peer: ServerPeer, certificate: Certificate) -> None:
        """Set the identity of *peer* from its certificate, which TLS has verified."""
        try:
            peer.identity = self._authenticate(certificate)
        except Refused as refused:
            raise RemoteProtocolError(f"certificate of {certificate.common_name!r} was refused; {refused}") from refused

    def _is_plain(self, peer: ServerPeer, data: bytes) -> bool:
        """Return whether *data*, the first bytes of *peer*, needs neither TLS nor WebSocket."""
        protocol = peer.protocol
        if data[0] == TLS_HANDSHAKE and protocol.tls() is not None:
            return False
        return not protocol.tls_required and (protocol.websocket is None or data[0] != HTTP_GET)

    async def _receive_some(self, peer: ServerPeer) -> bytes:
        """Return the next bytes from the transport; empty at the end."""
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
        """Run the pump, which reads from plain sockets; without epoll (macOS) each peer has its own task."""
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
        """Let the pump read; this task takes over when it is necessary to wait, and at the end.

        Return the first bytes if they are not the protocol's own, so that the pump cannot continue; None at the end.
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
        """Read once and handle complete requests, in a round of the pump."""
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
        peer.protocol.traffic.bytes_in += len(data)
        peer.connection.receive_data(data, now)
        events = iter(peer.connection.events())
        if self._handle(peer, events):
            self._taken(peer, len(data), now)
        else:
            reading.events, reading.received, reading.now = events, len(data), now

    def _taken(self, peer: ServerPeer, received: int, now: float) -> None:
        """Finish a read of *received* bytes, after all complete requests in it were handled."""
        self._note_incomplete(peer, received, now)
        self.deadlines.watch(peer)

    async def _take(self, peer: ServerPeer, data: bytes) -> None:
        """Handle all requests that *data* completes, and send their answers together."""
        now = trio.current_time()
        peer.protocol.traffic.bytes_in += len(data)
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
        """Handle *events*; return False if it is necessary to wait before the next one."""
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
        """Wait for the rest of a request or for room in the output, and handle the remaining *events*."""
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
        """Wait for the rest of a request; earlier answers were sent, later requests of this peer wait."""
        rest, peer.rest = peer.rest, None
        assert rest is not None
        scope = peer.rest_scope = trio.CancelScope()
        if peer.state >= LOST:
            scope.cancel()
        with scope:
            await rest
        peer.rest_scope = None

    def _note_incomplete(self, peer: ServerPeer, received: int, now: float) -> None:
        """Update the incomplete bytes of *peer*; if a limit is exceeded, close the slowest peers."""
        size = peer.connection.buffered_bytes
        if not size and not peer.incomplete:
            return
        peer.incomplete = size > 0
        requests = self.incomplete
        requests.note(peer, peer.origin, size, received, now)
        if requests.over(peer.origin):
            self._close_slow(peer)

    def _close_slow(self, peer: ServerPeer) -> None:
        """Close the connections with the oldest incomplete requests, because *peer* exceeded a limit."""
        requests, config = self.incomplete, self._config
        held, held_here = requests.total, requests.held_by(peer.origin)
        slow = requests.give_way(peer.origin)
        self.incomplete_closed += len(slow)
        self._complaints.warn(
            "%d connections closed because they sent requests most slowly, %s first; incomplete requests used "
            "%d bytes and those from the address of %s %d, server.incomplete_total_bytes_max is %d and "
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
            each.lose(TimeoutError("it sent its request too slowly when too many requests were incomplete"))

    def _deadline_passed(self, peer: ServerPeer, now: float) -> None:
        """Let the connection of *peer* handle its deadline, if that has really passed."""
        if peer.state >= CLOSING or peer.rest_scope is not None:  # watched again after the rest
            return
        self._rounds.begin()
        try:
            if peer.connection.deadline() <= now:
                peer.connection.handle_timeout(now)
                for event in peer.connection.events():
                    if peer.handler.handle(event) is not None:
                        raise LocalProtocolError("an event of a timeout must be handled without waiting")
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
