"""Sockets and peers: one reader task a peer, and a writer only while a peer cannot take all.

The way of one socket read: the transport gives bytes, the connection makes events of them,
the handler acts on each, the store takes all that was appended in one write, and all
answers leave in one send. What must be durable first is held until the store's flusher
has moved on; then the flusher's own step sends it, without waking a task a peer.

A peer that does not read what we send it is not read from either, so what waits for it
stays below `ServerConfig.unsent_bytes_max`.
"""

import heapq
import logging
import math
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from ipaddress import ip_address
from typing import Any, Final, final
from typing import Protocol as TypingProtocol

import trio

from martlet.contracts import Buffer, Connection, Handler, Identity, Protocol
from martlet.errors import ConfigError, LocalProtocolError, MartletError, Reason, Refused, RemoteProtocolError
from martlet.net.complaints import Complaints
from martlet.net.incomplete import IncompleteRequests
from martlet.net.origins import Origins, origin_of
from martlet.net.transports import SocketTransport, TlsTransport, Transport
from martlet.settings import ServerConfig
from martlet.stats import Stats

__all__ = ["Server", "pack_host", "split_address"]

log = logging.getLogger("martlet.server")

RECEIVE_BYTES: Final = 262144
ACCEPTS_AT_ONCE: Final = 64
ACCEPT_AGAIN_S: Final = 0.1
PEERS_AT_ONCE: Final = 64
ALARMS_SLACK: Final = 64  # alarms of peers that are gone, before they are looked for
REST_BYTES: Final = 65536  # a piece of what a peer could not take yet
TLS_HANDSHAKE: Final = 0x16  # the first byte of a TLS record of a ClientHello (RFC 8446 5.1)
# A reader that learned of an error waits so long for its last words to leave.
FAREWELL_S: Final = 5.0
# While too much waits over all peers, one that reads well is given so much less at once, in case it stops reading.
COLLECT_LESS: Final = 16
# Others may send a peer that is not read from any more so often its `unsent_bytes_max`; then it is given up.
PUSHED_MOST: Final = 32


class Log(TypingProtocol):
    """What the server asks of the store."""

    on_flushed: list[Callable[[], None]]

    @property
    def readable(self) -> int:
        """The log position up to which answers may leave."""
        ...

    def commit(self) -> None:
        """Hand what was appended to the disk; raises `MartletError`, and then none of it is stored."""
        ...


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; an IPv6 host stands in brackets.

    Raises:
      ConfigError: it is neither.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"address {text!r} is not HOST:PORT; for example 127.0.0.1:10911 or [::1]:10911")
    return host.strip("[]"), int(port)


def pack_host(host: str, port: int) -> bytes:
    """Return 4 or 16 address bytes and an i32 port, big-endian, as records hold them."""
    return ip_address(host).packed + port.to_bytes(4, "big")


def _show(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@final
class _Ended:
    """What a peer that is gone has instead of a connection and a handler: nothing is said and nothing done."""

    buffered_bytes: int = 0

    def receive_data(self, data: bytes, now: float) -> None: ...

    def events(self) -> Iterable[Any]:
        return ()

    def farewell(self, error: Exception) -> bytes:
        return b""

    def deadline(self) -> float:
        return math.inf

    def handle_timeout(self, now: float) -> None: ...

    def handle(self, event: Any) -> None: ...

    def collect(self, budget_bytes: int) -> None: ...

    def closed(self, reason: str) -> None: ...


ENDED: Final = _Ended()


@final
class _Peer:
    """The server's side of one peer (contracts.Peer)."""

    __slots__ = (
        "_batch",
        "_held",
        "_hold_position",
        "_out",
        "_room",
        "_scopes",
        "_server",
        "address",
        "alarm",
        "closed",
        "closing",
        "collect_later",
        "connection",
        "draining",
        "gone",
        "handler",
        "held_bytes",
        "host",
        "identity",
        "incomplete",
        "origin",
        "out_bytes",
        "protocol",
        "reason",
        "rest",
        "step_bytes",
        "transport",
        "woken",
    )

    def __init__(self, server: "Server", protocol: Protocol, transport: Transport, address: str, host: bytes) -> None:
        self._server = server
        self.protocol = protocol
        self.transport = transport
        self.address = address
        self.host = host
        self.origin = origin_of(host)
        self.identity = Identity()
        self.connection: Connection = protocol.connect()
        self._batch: list[Buffer] = []  # sent by the handler in this step
        self.step_bytes = 0
        self.incomplete = False  # whether it holds bytes of a request of which more is to come
        self._hold_position = 0
        self._held: deque[tuple[int, list[Buffer], int]] = deque()  # (log position, pieces, bytes)
        self.held_bytes = 0
        self._out: list[Buffer] = []  # free to leave
        self.out_bytes = 0
        self._room: trio.Event | None = None
        self._scopes: set[trio.CancelScope] = set()
        self.rest: trio.CancelScope | None = None  # of a request that is not finished yet
        self.alarm = math.inf
        self.woken = False
        self.collect_later = False
        self.draining = False
        self.closing = False  # nothing more is taken from it
        self.gone = False  # nothing more can be sent to it
        self.closed = False
        self.reason = ""
        self.handler: Handler = protocol.handle(self, self.connection)

    # what handlers call

    def send(self, *pieces: Buffer) -> None:
        self._batch += pieces
        self.step_bytes += len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))

    def hold_until(self, position: int) -> None:
        if position > self._hold_position:
            self._hold_position = position

    def wake(self) -> None:
        if not self.woken and not self.closed:
            self.woken = True
            self._server.ready(self)

    def start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        limit = self._server.config.peer_tasks_max
        if len(self._scopes) >= limit:
            raise Refused(
                Reason.BUSY, f"{limit} slow requests of this connection are under way; server.peer_tasks_max is {limit}"
            )
        self._server.start_for(self, work, args)

    def close(self, reason: str) -> None:
        if not self.closing:
            self.closing = True
            self.reason = reason
            self._server.closing(self)

    # what the server calls

    @property
    def over(self) -> bool:
        """Whether this peer should be read from no more until some of its answers have left."""
        waiting = self.out_bytes + self.held_bytes + self.step_bytes
        config = self._server.config
        return waiting > config.unsent_bytes_max or (
            waiting > 0 and self._server.unsent > config.unsent_total_bytes_max
        )

    @property
    def idle(self) -> bool:
        """Whether nothing waits to leave."""
        return not (self._out or self._held or self._batch or self.transport.pending())

    def settle(self) -> None:
        """Close what was sent in this step into a unit, then let leave what may."""
        if self._batch:
            if self._hold_position > self._server.store_readable():
                self._held.append((self._hold_position, self._batch, self.step_bytes))
                self._add_held(self.step_bytes)
                self._server.holding[self] = None
            elif self._held:
                position, pieces, size = self._held.pop()
                pieces.extend(self._batch)
                self._held.append((position, pieces, size + self.step_bytes))
                self._add_held(self.step_bytes)
            else:
                self._let_out(self._batch)
                self._add_out(self.step_bytes)
            self._batch = []
            self.step_bytes = 0
        self._hold_position = 0
        if self._out and not self.draining:
            self.push()

    def discard(self) -> None:
        """Forget what was sent in this step: what it says did not happen."""
        self._batch = []
        self.step_bytes = 0
        self._hold_position = 0

    def _let_out(self, pieces: list[Buffer]) -> None:
        """Put *pieces* behind what may leave; what has to wait there is copied, for views would pin whole chunks."""
        self._out.extend(map(bytes, pieces) if self.draining else pieces)

    def _add_out(self, size: int) -> None:
        self.out_bytes += size
        self._server.unsent += size

    def _add_held(self, size: int) -> None:
        self.held_bytes += size
        self._server.unsent += size

    def release(self, readable: int) -> bool:
        """Let leave what waited for the log to be flushed up to *readable*; True when nothing is held any more."""
        held = self._held
        while held and held[0][0] <= readable:
            _, pieces, size = held.popleft()
            self._let_out(pieces)
            self._add_held(-size)
            self._add_out(size)
        if self._out and not self.draining:
            self.push()
        if self.collect_later and not self.draining:
            self.collect_now()
        return not held

    def collect_now(self) -> None:
        """There may be room for what a wake asked for earlier."""
        self.collect_later = False
        self.wake()

    def push(self) -> None:
        """Send what fits now; the rest is a drain's business."""
        if self.closed or self.gone:
            return
        try:
            taken = self.transport.send(self._out)
        except Exception as error:
            self._server.lost(self, error)
            return
        self._add_out(-taken)
        self._server.bytes_out += taken
        if taken:
            self.made_room()
        if not self.out_bytes and not self.transport.pending():
            self._out = []
            return
        self._keep_rest(taken)
        self._server.drain(self)

    def _keep_rest(self, taken: int) -> None:
        """Drop the first *taken* bytes of what waits; copy the rest, for views would pin whole chunks of the log."""
        rest: list[Buffer] = []
        for piece in self._out:
            size = len(piece)
            if taken >= size:
                taken -= size
                continue
            # In short pieces, so that a send which takes some of a long one does not copy all the others again.
            rest += [bytes(piece[at : at + REST_BYTES]) for at in range(taken, size, REST_BYTES)]
            taken = 0
        self._out = rest

    async def wait_room(self) -> None:
        """Wait until some of what waits has left."""
        while self.over and not self.gone:
            await self._wait_progress()

    async def wait_idle(self, *, slow_work: bool = False) -> None:
        """Wait until all that was sent has left, with *slow_work* also what is under way, or the peer is gone."""
        while not self.gone and (not self.idle or (slow_work and self._scopes)):
            await self._wait_progress()

    async def _wait_progress(self) -> None:
        if self._room is None:
            self._room = trio.Event()
        await self._room.wait()

    def made_room(self) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None

    def add_scope(self, scope: trio.CancelScope) -> None:
        self._scopes.add(scope)

    def drop_scope(self, scope: trio.CancelScope) -> None:
        self._scopes.discard(scope)
        if not self._scopes:
            self.made_room()

    def end(self) -> None:
        """Free everything; the socket closes."""
        self.closed = self.closing = self.gone = True
        self.transport.close()
        self._server.unsent -= self.out_bytes + self.held_bytes
        self._server.incomplete.forget(self)
        self.out_bytes = self.held_bytes = 0
        self._out = []
        self._held.clear()
        self._batch = []
        self.made_room()
        for scope in self._scopes:
            scope.cancel()

    def let_go(self) -> None:
        """Drop the connection with all it has read, and the handler: both know this peer, a cycle that would linger."""
        self.connection = ENDED
        self.handler = ENDED


@final
class Server:
    """Serves the protocols of plugins; owns every socket that others connect to."""

    def __init__(self, config: ServerConfig, store: Log | None, stats: Stats) -> None:
        self.config = config
        # Answers of one read before we look whether the peer can take them.
        self._look_bytes = config.unsent_bytes_max // 8
        self._store = store
        self.holding: dict[_Peer, None] = {}
        self.unsent = 0
        self.incomplete: IncompleteRequests[_Peer] = IncompleteRequests(
            config.incomplete_total_bytes_max, config.incomplete_address_bytes_max
        )
        self._incomplete_closed = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self._accepted = 0
        self._turned_away = 0
        self._protocol_errors = 0
        self._gave_way = 0
        self._complaints = Complaints(log)
        self._peers: dict[_Peer, None] = {}
        self._origins: Origins[_Peer] = Origins()
        self._ready: deque[_Peer] = deque()
        self._ready_event = trio.Event()
        self._alarms: list[tuple[float, int, _Peer]] = []
        self._alarm_number = 0
        self._alarm_event = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._listeners: list[socket.socket] = []
        if store is not None:
            store.on_flushed.append(self._flushed)
        stats.add("server", self.statistics)

    # start and stop

    def bind(self, protocol: Protocol) -> socket.socket:
        """Return a socket that listens where *protocol* wants; its real address is told to ``protocol.bound``.

        Raises:
          ConfigError: the address is wrong, or in use.
        """
        host, port = split_address(protocol.listen)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise ConfigError(
                f"{protocol.name} cannot listen on {protocol.listen!r}; {error.strerror or error}"
            ) from error
        listener.setblocking(False)
        self._listeners.append(listener)
        name = listener.getsockname()
        protocol.bound(_show(name[0], name[1]))
        return listener

    async def run(
        self,
        bound: Sequence[tuple[Protocol, socket.socket]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept and serve until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._pump_when_ready)
                nursery.start_soon(self._watch_alarms)
                for protocol, listener in bound:
                    nursery.start_soon(self._accept, protocol, listener)
                task_status.started()
        finally:
            self.stop_accepting()

    def stop_accepting(self) -> None:
        """Close the listening sockets; peers stay."""
        for listener in self._listeners:
            if listener.fileno() >= 0:
                trio.lowlevel.notify_closing(listener)
                listener.close()
        self._listeners.clear()

    async def wait_idle(self) -> None:
        """Return when all that was answered has left; the caller bounds the wait."""
        for peer in list(self._peers):
            await peer.wait_idle()

    def close_peers(self, reason: str) -> None:
        """Close every peer after what was sent to it has left."""
        for peer in list(self._peers):
            peer.close(reason)

    # accepting

    async def _accept(self, protocol: Protocol, listener: socket.socket) -> None:
        failing = False
        while listener.fileno() >= 0:
            try:
                await trio.lowlevel.wait_readable(listener)
                for _ in range(ACCEPTS_AT_ONCE):
                    connected, name = listener.accept()
                    self._welcome(protocol, connected, name)
            except BlockingIOError:
                failing = False
            except trio.ClosedResourceError:
                return
            except OSError as error:
                if not failing:
                    log.warning("%s cannot accept, tried again until it can; %s", protocol.name, error.strerror)
                failing = True
                await trio.sleep(ACCEPT_AGAIN_S)

    def _welcome(self, protocol: Protocol, connected: socket.socket, name: tuple[Any, ...]) -> None:
        address = _show(name[0], name[1])
        host = pack_host(name[0].partition("%")[0], name[1])
        if len(self._peers) >= self.config.connections_max and not self._make_room(address, origin_of(host)):
            connected.close()
            return
        try:
            transport = SocketTransport(connected)
        except OSError:  # it is gone already
            connected.close()
            return
        self.serve(protocol, transport, address, host)

    def _make_room(self, address: str, origin: bytes) -> bool:
        """Close a connection of an address that has very many for one of *origin*; False where that has as many."""
        limit = self.config.connections_max
        peer = self._origins.give_way(origin)
        if peer is None:
            self._turned_away += 1
            text = "%s turned away; %d connections are open, server.connections_max is %d"
            self._complaints.warn(text, address, len(self._peers), limit)
            return False
        self._gave_way += 1
        text = "%s %s closed for %s, whose address has fewer; server.connections_max is %d"
        self._complaints.warn(text, peer.protocol.name, peer.address, address, limit)
        self.lost(peer, TimeoutError("its address has the most connections, and another needed one"))
        return True

    def serve(self, protocol: Protocol, transport: Transport, address: str, host: bytes) -> None:
        """Serve one peer over *transport* until it goes."""
        assert self._nursery is not None
        self._accepted += 1
        try:
            peer = _Peer(self, protocol, transport, address, host)
        except Exception:
            log.exception("%s %s closed; a defect", protocol.name, address)
            transport.close()
            return
        self._peers[peer] = None
        self._origins.add(peer, peer.origin)
        log.debug("%s connected to %s", address, protocol.name)
        self._nursery.start_soon(self._live, peer)

    # reading

    async def _live(self, peer: _Peer) -> None:
        """Everything one peer does, from its first byte to its end."""
        try:
            await self._listen(peer)
        finally:
            await self._bury(peer)

    async def _listen(self, peer: _Peer) -> None:
        """Read until the peer's side ends or something is wrong; a defect of its handler is its end alone."""
        try:
            await self._read(peer)
        except RemoteProtocolError as error:
            self._protocol_errors += 1
            peer.reason = str(error)
            self._complaints.warn("%s %s closed; %s", peer.protocol.name, peer.address, error)
            peer.send(peer.connection.farewell(error))
        except (OSError, ssl.SSLError, trio.ClosedResourceError) as error:
            self.lost(peer, error)
        except MartletError as error:
            peer.reason = str(error)
            log.error("%s %s closed; %s", peer.protocol.name, peer.address, error)
        except Exception as error:
            self._defect(peer, error)

    def _defect(self, peer: _Peer, error: Exception) -> None:
        log.exception("%s %s closed; a defect", peer.protocol.name, peer.address)
        peer.close(f"{type(error).__name__}: {error}")

    async def _read(self, peer: _Peer) -> None:
        self._set_alarm(peer)
        await self._start_tls(peer)
        while not peer.closing:
            await peer.transport.wait_readable()
            data = peer.transport.receive(RECEIVE_BYTES)
            if data is None:
                if peer.transport.pending():
                    self.drain(peer)
                continue
            if not data or peer.closing:
                return
            await self._take(peer, data)
            del data  # or every idle connection would keep what it said last

    async def _start_tls(self, peer: _Peer) -> None:
        """Look at the first bytes: TLS or not."""
        data = None
        while data is None:
            await peer.transport.wait_readable()
            data = peer.transport.receive(RECEIVE_BYTES)
        if not data:
            return
        context = peer.protocol.tls()
        if context is not None and data[0] == TLS_HANDSHAKE:
            peer.transport = TlsTransport(peer.transport, context, data)
            return
        if peer.protocol.tls_required:
            raise RemoteProtocolError("peer speaks plain text; this port takes TLS only")
        await self._take(peer, data)

    async def _take(self, peer: _Peer, data: bytes) -> None:
        """Handle all that *data* completes, and let the answers leave together."""
        now = trio.current_time()
        self.bytes_in += len(data)
        peer.connection.receive_data(data, now)
        handle = peer.handler.handle
        try:
            for event in peer.connection.events():
                rest = handle(event)
                if rest is not None:
                    await self._wait_rest(peer, rest)
                if peer.step_bytes > self._look_bytes and peer.over:
                    self._finish_step(peer)
                    if peer.over:
                        self._note_incomplete(peer, len(data), now)
                        await peer.wait_room()
                if peer.closing:
                    return
        finally:
            self._finish_step(peer)
        self._note_incomplete(peer, len(data), now)
        self._set_alarm(peer)
        if peer.over:
            await peer.wait_room()

    async def _wait_rest(self, peer: _Peer, rest: Awaitable[None]) -> None:
        """Wait for the *rest* of a request; earlier answers leave meanwhile, later requests of this peer wait."""
        self._finish_step(peer)
        with trio.CancelScope() as peer.rest:
            await rest
        peer.rest = None

    def _note_incomplete(self, peer: _Peer, received: int, now: float) -> None:
        """Account for what *peer* holds of requests that are not handled; over a limit the slowest peers are closed."""
        size = peer.connection.buffered_bytes
        if not size and not peer.incomplete:
            return
        peer.incomplete = size > 0
        requests = self.incomplete
        requests.note(peer, peer.origin, size, received, now)
        if not requests.over(peer.origin):
            return
        self._close_slow(peer)

    def _close_slow(self, peer: _Peer) -> None:
        """Too much is held of incomplete requests, at the latest since *peer* sent more: the slowest of them end."""
        requests, config = self.incomplete, self.config
        held, held_here = requests.total, requests.held_by(peer.origin)
        slow = requests.give_way(peer.origin)
        self._incomplete_closed += len(slow)
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
            self.lost(each, TimeoutError("it was among the slowest in sending a request when too many were incomplete"))

    def _finish_step(self, peer: _Peer) -> None:
        """Store what the step appended, then let its answers leave; without the first there is no second."""
        self._commit_for(peer)
        if self._ready:
            self._pump()

    def _commit_for(self, peer: _Peer) -> None:
        if self._store is not None:
            try:
                self._store.commit()
            except MartletError as error:
                log.error("%s %s closed, its answers were dropped; %s", peer.protocol.name, peer.address, error)
                peer.discard()
                peer.close(str(error))
        peer.settle()

    def store_readable(self) -> int:
        return self._store.readable if self._store is not None else 0

    # delivery to peers that were woken

    def ready(self, peer: _Peer) -> None:
        self._ready.append(peer)
        self._ready_event.set()

    def _pump(self) -> None:
        """Collect from peers that were woken, a bounded number at a time; who has no room collects when it has."""
        for _ in range(min(PEERS_AT_ONCE, len(self._ready))):
            peer = self._ready.popleft()
            peer.woken = False
            if peer.closing or peer.draining or peer.over:
                self._settle_only(peer)
            else:
                self._collect(peer)

    def _settle_only(self, peer: _Peer) -> None:
        """Let what others sent *peer* join what waits for it: nobody else would, and it is not asked to collect."""
        if peer.closed:
            return
        pushed = peer.step_bytes
        self._commit_for(peer)
        if peer.closing:
            return
        waiting = peer.out_bytes + peer.held_bytes
        if pushed and waiting > PUSHED_MOST * self.config.unsent_bytes_max:
            self.lost(peer, TimeoutError(f"{waiting} bytes wait for it and it does not read them"))
        elif peer.draining or peer.over:
            peer.collect_later = True
        else:
            self._collect(peer)

    def _collect(self, peer: _Peer) -> None:
        config = self.config
        full = self.unsent > config.unsent_total_bytes_max
        try:
            peer.handler.collect(config.collect_bytes // COLLECT_LESS if full else config.collect_bytes)
        except MartletError as error:
            peer.close(str(error))
        except Exception as error:
            self._defect(peer, error)
        self._commit_for(peer)

    async def _pump_when_ready(self) -> None:
        while True:
            await self._ready_event.wait()
            self._ready_event = trio.Event()
            while self._ready:
                self._pump()
                await trio.lowlevel.checkpoint()

    def _flushed(self) -> None:
        """The log is durable further than before: what waited for that leaves now."""
        readable = self.store_readable()
        if self.holding:
            for peer in list(self.holding):
                if peer.release(readable):
                    self.holding.pop(peer, None)
        if self._ready:
            self._pump()

    # writing to a peer that cannot take all at once

    def drain(self, peer: _Peer) -> None:
        if not peer.draining and not peer.closed and self._nursery is not None:
            peer.draining = True
            self._nursery.start_soon(self._drain, peer)

    async def _drain(self, peer: _Peer) -> None:
        try:
            while not peer.gone and (peer.out_bytes or peer.transport.pending()):
                await peer.transport.wait_writable()
                peer.push()
        except (OSError, trio.ClosedResourceError) as error:
            self.lost(peer, error)
        finally:
            peer.draining = False
            peer.made_room()
        if peer.collect_later and not peer.closed:
            await trio.lowlevel.checkpoint()
            peer.collect_now()

    def start_for(self, peer: _Peer, work: Callable[..., Awaitable[None]], args: tuple[Any, ...]) -> None:
        assert self._nursery is not None
        scope = trio.CancelScope()
        peer.add_scope(scope)
        self._nursery.start_soon(self._work, peer, scope, work, args)

    async def _work(
        self, peer: _Peer, scope: trio.CancelScope, work: Callable[..., Awaitable[None]], args: tuple[Any, ...]
    ) -> None:
        try:
            with scope:
                await work(*args)
        except MartletError as error:
            peer.close(str(error))
        except Exception as error:
            self._defect(peer, error)
        finally:
            peer.drop_scope(scope)
        if not peer.closed:
            self._finish_step(peer)

    # ends

    def closing(self, peer: _Peer) -> None:
        if peer.idle:
            peer.transport.close()
        elif self._nursery is not None:
            self._nursery.start_soon(self._close_when_idle, peer)

    async def _close_when_idle(self, peer: _Peer) -> None:
        await self._last_words(peer)
        peer.transport.close()

    def lost(self, peer: _Peer, error: Exception) -> None:
        """Nothing can be sent to *peer* any more."""
        if not isinstance(error, OSError | trio.ClosedResourceError):
            log.error("%s %s closed; a defect", peer.protocol.name, peer.address, exc_info=error)
        peer.reason = peer.reason or f"{type(error).__name__}: {error}"
        peer.closing = peer.gone = True
        peer.transport.close()
        peer.made_room()
        if peer.rest is not None:
            peer.rest.cancel()

    async def _last_words(self, peer: _Peer, *, slow_work: bool = False) -> None:
        with trio.move_on_after(FAREWELL_S):
            await peer.wait_idle(slow_work=slow_work)

    async def _bury(self, peer: _Peer) -> None:
        half_closed = not peer.closing
        try:
            peer.settle()
            await self._last_words(peer, slow_work=half_closed)
        finally:
            self._peers.pop(peer, None)
            self._origins.remove(peer, peer.origin)
            self.holding.pop(peer, None)
            peer.end()
            self._tell_closed(peer)
            peer.let_go()
            log.debug("%s left %s; %s", peer.address, peer.protocol.name, peer.reason or "its side closed")

    def _tell_closed(self, peer: _Peer) -> None:
        try:
            peer.handler.closed(peer.reason)
        except Exception:
            log.exception("%s %s did not end well; a defect", peer.protocol.name, peer.address)
        if self._ready:
            self._ready_event.set()

    # time

    def _set_alarm(self, peer: _Peer) -> None:
        deadline = peer.connection.deadline()
        if deadline < peer.alarm and not peer.closing:
            peer.alarm = deadline
            self._alarm_number += 1
            if len(self._alarms) > ALARMS_SLACK + 2 * len(self._peers):
                self._forget_alarms()
            heapq.heappush(self._alarms, (deadline, self._alarm_number, peer))
            if self._alarms[0][2] is peer:
                self._alarm_event.set()

    def _forget_alarms(self) -> None:
        """Drop the alarms of peers that are gone; they would hold on to all that these were."""
        self._alarms = [alarm for alarm in self._alarms if not alarm[2].closed]
        heapq.heapify(self._alarms)

    async def _watch_alarms(self) -> None:
        while True:
            deadline = self._alarms[0][0] if self._alarms else math.inf
            with trio.move_on_at(deadline):
                await self._alarm_event.wait()
            self._alarm_event = trio.Event()
            now = trio.current_time()
            due: list[_Peer] = []
            while self._alarms and self._alarms[0][0] <= now:
                due.append(heapq.heappop(self._alarms)[2])
            for peer in due:
                self._ring(peer, now)

    def _ring(self, peer: _Peer, now: float) -> None:
        peer.alarm = math.inf
        if peer.closing or peer.rest is not None:  # after the rest of a request the reader sets the alarm again
            return
        try:
            if peer.connection.deadline() <= now:
                peer.connection.handle_timeout(now)
                for event in peer.connection.events():
                    if peer.handler.handle(event) is not None:
                        raise LocalProtocolError("an event that a timeout made must be handled at once")
                self._finish_step(peer)
        except RemoteProtocolError as error:
            self._protocol_errors += 1
            peer.send(peer.connection.farewell(error))
            peer.settle()
            peer.close(str(error))
        except MartletError as error:
            peer.close(str(error))
        except Exception as error:
            self._defect(peer, error)
        self._set_alarm(peer)

    def statistics(self) -> dict[str, object]:
        return {
            "connections": len(self._peers),
            "accepted": self._accepted,
            "connections_address": self._origins.largest(),
            "turned_away": self._turned_away,
            "gave_way": self._gave_way,
            "warnings_left_out": self._complaints.left_out,
            "protocol_errors": self._protocol_errors,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "unsent_bytes": self.unsent,
            "incomplete_bytes": self.incomplete.total,
            "incomplete_address_bytes": self.incomplete.largest_origin(),
            "incomplete_closed": self._incomplete_closed,
        }
