"""The server's side of one connection: its life cycle, its unsent output, and its background tasks.

The answers of a round collect in `_batch`. At the end of the round `queue_output` moves them to `_held`, if the log
must be flushed first, or to `_out`, and sends. If the transport does not accept everything, a task drains the rest.

Until the first bytes show whether the client speaks TLS, WebSocket or the protocol itself, output waits in `_blocked`:
a server that speaks first must not send its greeting in plain text to a TLS client. Output queued after `start_tls`
waits in the same way, until the client has begun TLS.
"""

import logging
import math
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from enum import IntEnum
from typing import Any, Final, final

import trio

from martlet.contracts import ANONYMOUS, Buffer, Connection, Handler, Protocol
from martlet.errors import MartletError, Reason, Refused
from martlet.net.origins import origin_of
from martlet.net.pending import PendingWork
from martlet.net.transports import TlsTransport, Transport
from martlet.settings import ServerConfig
from martlet.state.journal import NEXT_COMMIT

__all__ = ["DELIVERY_TRANSITIONS", "TRANSITIONS", "DeliveryState", "PeerState", "ServerPeer"]

log = logging.getLogger("martlet.server")

REST_BYTES: Final = 65536  # largest piece of copied output
# Time that a greeting waits for the first bytes of a client, which may begin TLS or WebSocket, on a port that also
# takes plain text. A TLS client sends its first bytes right after the connection is made.
FIRST_BYTES_S: Final = 0.2
CLIENT_SHOWN: Final = 80  # characters of a client's name in the log
FAREWELL_S: Final = 5.0  # time limit for sending the rest of the output before a connection is closed


class PeerState(IntEnum):
    """The life cycle of a connection. The state never decreases, so ``state >= CLOSING`` includes all later states."""

    OPEN = 0  # requests are read and answered
    READ_ENDED = 1  # reading has ended: the client finished or broke the protocol; current requests are still answered
    CLOSING = 2  # no more requests are handled; queued output is still sent
    LOST = 3  # nothing can be sent anymore
    CLOSED = 4  # all resources are freed


OPEN: Final = PeerState.OPEN
READ_ENDED: Final = PeerState.READ_ENDED
CLOSING: Final = PeerState.CLOSING
LOST: Final = PeerState.LOST
CLOSED: Final = PeerState.CLOSED

TRANSITIONS: Final[dict[PeerState, frozenset[PeerState]]] = {
    OPEN: frozenset({READ_ENDED, CLOSING, LOST}),
    READ_ENDED: frozenset({CLOSING, LOST, CLOSED}),
    CLOSING: frozenset({LOST, CLOSED}),
    LOST: frozenset({CLOSED}),
    CLOSED: frozenset(),
}


class DeliveryState(IntEnum):
    """Whether `Handler.collect` must be called."""

    IDLE = 0  # not woken
    QUEUED = 1  # woken, and in the queue
    NO_ROOM = 2  # woken; it is queued once enough of its output has been sent


IDLE: Final = DeliveryState.IDLE
QUEUED: Final = DeliveryState.QUEUED
NO_ROOM: Final = DeliveryState.NO_ROOM

DELIVERY_TRANSITIONS: Final[dict[DeliveryState, frozenset[DeliveryState]]] = {
    IDLE: frozenset({QUEUED}),
    QUEUED: frozenset({IDLE, NO_ROOM}),
    NO_ROOM: frozenset({QUEUED}),
}


@final
class _Ended:
    """Replaces the connection and the handler of a closed peer; does nothing."""

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

    def refuse(self, answer: Buffer, refused: Refused) -> None: ...

    def collect(self, budget_bytes: int) -> None: ...

    def closed(self, reason: str) -> None: ...


ENDED: Final = _Ended()


@final
class ServerPeer:
    """One client connection; implements `martlet.contracts.Peer`."""

    __slots__ = (
        "_batch",
        "_batch_bytes",
        "_blocked",
        "_border",
        "_config",
        "_held",
        "_hold_position",
        "_holds",
        "_nursery",
        "_out",
        "_pending",
        "_progress",
        "_scopes",
        "_skipped",
        "_touched",
        "_waits_for_bytes",
        "address",
        "client",
        "connection",
        "delivery",
        "draining",
        "encrypted",
        "handler",
        "held_bytes",
        "host",
        "identity",
        "incomplete",
        "last",
        "on_introduced",
        "origin",
        "out_bytes",
        "protocol",
        "reason",
        "rest",
        "rest_scope",
        "state",
        "stops",
        "transport",
        "undecided",
        "upgrade",
        "wrapped",
    )

    def __init__(
        self,
        protocol: Protocol,
        transport: Transport,
        address: str,
        host: bytes,
        pending: "PendingWork[ServerPeer]",
        config: ServerConfig,
        nursery: trio.Nursery,
    ) -> None:
        self._pending = pending
        self._config = config
        self._nursery = nursery
        self.protocol = protocol
        self.transport = transport
        self.address = address
        self.host = host
        self.origin = origin_of(host)
        self.identity = ANONYMOUS
        self.client = ""  # its name in the log, once its handler knows it
        self.on_introduced: Callable[[ServerPeer, str], None] = _log_nothing
        self.encrypted = False
        self.wrapped = False  # whether the transport is TLS or WebSocket
        self.state = OPEN
        self.stops = False  # whether no more events may be handled now: the peer closes, or TLS begins
        self.delivery = IDLE
        self.last = False  # woken only by `wake_last`
        self.reason = ""
        self._touched = False  # whether `PendingWork.touched` contains this peer
        self._batch: list[Buffer] = []  # answers sent by the handler in this round
        self._batch_bytes = 0
        self._hold_position = 0
        # Pairs of an index in `_batch` and the log position that the answers from this index on depend on.
        self._holds: list[tuple[int, int]] = []
        self._held: deque[tuple[int, list[Buffer], int]] = deque()  # (log position, pieces, bytes)
        self.held_bytes = 0
        self._out: list[Buffer] = []  # ready to send
        self._skipped = 0  # bytes of the first piece already sent
        self.out_bytes = 0  # a piece counts in full until its last byte is sent
        # Whether the first bytes decide between TLS, WebSocket and plain text; False where plain text is the only way.
        self.undecided = protocol.tls_required or protocol.websocket is not None or protocol.takes_tls
        self._blocked: list[Buffer] | None = [] if self.undecided else None  # may not be sent yet
        self._waits_for_bytes = False  # whether a task will end the wait for the first bytes
        self.upgrade: ssl.SSLContext | None = None  # set by `start_tls`, until the client has begun TLS
        self._border: bytearray | None = None  # the last piece of output in plain text
        self.draining = False  # whether a task waits until the transport accepts more of `_out`
        self._progress: trio.Event | None = None
        self._scopes: set[trio.CancelScope] = set()  # of slow requests in progress
        self.rest: Awaitable[None] | None = None  # the unfinished part of a request
        self.rest_scope: trio.CancelScope | None = None
        self.incomplete = False  # whether part of a request has been received
        self.connection: Connection = protocol.connect(trio.current_time())
        self.handler: Handler = protocol.handle(self, self.connection)

    def _become(self, state: PeerState) -> None:
        assert state in TRANSITIONS[self.state], f"peer {self.address} cannot go from {self.state!r} to {state!r}"
        self.state = state
        if state >= CLOSING:
            self.stops = True

    def set_delivery(self, delivery: DeliveryState) -> None:
        """Change the delivery state to *delivery*."""
        assert delivery in DELIVERY_TRANSITIONS[self.delivery], f"{self.delivery!r} to {delivery!r}"
        self.delivery = delivery

    # what handlers call

    def send(self, *pieces: Buffer) -> None:
        self._batch += pieces
        self._batch_bytes += len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        if not self._touched:
            self._touch()

    def introduce(self, client: str, details: str = "") -> None:
        if client and not self.client:
            self.client = client
            self.on_introduced(self, details)

    @property
    def shown(self) -> str:
        """The name of the client in log lines: protocol, its own name if known, and address."""
        if self.client:
            return f"{self.protocol.name} client {self.client[:CLIENT_SHOWN]!r} at {self.address}"
        return f"{self.protocol.name} {self.address}"

    def hold_until(self, position: int) -> None:
        if position > self._hold_position:
            self._hold_position = position
            self._holds.append((len(self._batch), position))
            if not self._touched:
                self._touch()
        elif position > 0 and self._holds[-1][0] < len(self._batch):
            self._holds.append((len(self._batch), position))  # `refuse_batch` needs an entry for each answer

    def _touch(self) -> None:
        self._touched = True
        self._pending.touch(self)

    def wake(self) -> None:
        if self.delivery is not QUEUED and self.state is not CLOSED:
            self.last = False
            self.set_delivery(QUEUED)
            self._pending.wake(self)

    def wake_last(self) -> None:
        if self.delivery is IDLE and self.state is not CLOSED:
            self.last = True
            self._queue_last()

    def _queue_last(self) -> None:
        self.set_delivery(QUEUED)
        self._pending.wake_last(self)

    def _continue_delivery(self) -> None:
        """Continue a delivery that had to wait for room."""
        if self.state is CLOSED:
            return
        if self.last:
            self._queue_last()
        else:
            self.wake()

    def has_room(self) -> bool:
        return not (self.draining or self.over)

    def start_tls(self) -> None:
        context = self.protocol.tls()
        if context is None:
            raise Refused(Reason.NOT_SUPPORTED, f"TLS cannot begin; {self.protocol.name} has no certificate")
        if self.wrapped or self.upgrade is not None:
            raise Refused(Reason.ILLEGAL, "TLS cannot begin; the connection uses TLS or WebSocket already")
        if self.undecided:
            self.decide()
        self.upgrade = context
        self.stops = True
        self._border = bytearray()
        self.send(self._border)

    def start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        limit = self._config.peer_tasks_max
        if len(self._scopes) >= limit:
            raise Refused(
                Reason.BUSY, f"{limit} slow requests of this connection are running; server.peer_tasks_max is {limit}"
            )
        scope = trio.CancelScope()
        self._scopes.add(scope)
        self._nursery.start_soon(self._work, scope, work, args)

    def close(self, reason: str) -> None:
        if self.state >= CLOSING:
            return
        self._become(CLOSING)
        self.reason = reason
        if self._blocked is not None:
            self._end_blocked()
        if not self.idle:
            self._nursery.start_soon(self._close_when_idle)
        elif reason:
            self.transport.linger()
        else:  # the client has sent everything
            self.transport.close()

    # output

    @property
    def over(self) -> bool:
        """Whether to stop reading requests until part of the output has been sent."""
        waiting = self.out_bytes + self.held_bytes + self._batch_bytes
        config = self._config
        return waiting > config.unsent_bytes_max or (
            waiting > 0 and self._pending.unsent_bytes > config.unsent_total_bytes_max
        )

    @property
    def batch_bytes(self) -> int:
        """The size of the answers of this round in bytes."""
        return self._batch_bytes

    @property
    def idle(self) -> bool:
        """Whether there is no unsent output."""
        return not (self._out or self._held or self._batch or self._blocked or self.transport.pending())

    @property
    def is_working(self) -> bool:
        """Whether slow requests of the peer are in progress."""
        return bool(self._scopes)

    @property
    def hold_position(self) -> int:
        """The log position that must be flushed before the answers of this round may be sent."""
        return self._hold_position

    @property
    def held_position(self) -> int:
        """The log position whose flush releases the first held answers; -1 if no answers are held."""
        return self._held[0][0] if self._held else -1

    def queue_output(self, readable: int, committed: int) -> None:
        """Queue the answers of this round, hold those that depend on the log, and send the others.

        Answers that wait for `NEXT_COMMIT` wait for *committed*, the current end of the log.
        """
        self._touched = False
        if self.state is CLOSED:
            self.discard_batch()
            return
        if self._batch:
            if self._hold_position == NEXT_COMMIT:
                self._hold_position = committed
            if self._hold_position > readable:
                self._held.append((self._hold_position, self._batch, self._batch_bytes))
                self._add_held(self._batch_bytes)
                self._pending.held[self] = None
                self._pending.want_durable(self._hold_position)
            elif self._held:
                position, pieces, size = self._held.pop()
                pieces.extend(self._batch)
                self._held.append((position, pieces, size + self._batch_bytes))
                self._add_held(self._batch_bytes)
            else:
                self._queue_pieces(self._batch)
                self._add_out(self._batch_bytes)
            self._batch = []
            self._batch_bytes = 0
        if self._holds:
            self._holds.clear()
            self._hold_position = 0
        if self._out and not self.draining:
            self.push()

    def discard_batch(self) -> None:
        """Drop the answers of this round, because the commit failed."""
        self._batch = []
        self._batch_bytes = 0
        self._holds.clear()
        self._hold_position = 0
        self._note_progress()

    def cut_batch(self, written: int) -> None:
        """Drop the answers of this round, beginning with the first that acknowledges records beyond *written*."""
        first = min(index for index, position in self._holds if position > written)
        del self._batch[first:]
        self._batch_bytes = sum(map(len, self._batch))
        self._holds = [each for each in self._holds if each[0] < first]
        self._hold_position = max((position for _, position in self._holds), default=0)
        self._note_progress()

    def refuse_batch(self, written: int, refused: Refused) -> bool:
        """Replace each answer of this round that acknowledges records beyond *written* by a refusal.

        Return False if the handler cannot refuse.
        """
        batch = self._batch
        for index in dict.fromkeys([index for index, position in self._holds if position > written]):
            if index < len(batch):
                instead = self.handler.refuse(batch[index], refused)
                if instead is None:
                    return False
                batch[index] = instead
        self._batch_bytes = sum(map(len, batch))
        self._hold_position = min(self._hold_position, written)
        return True

    def _queue_pieces(self, pieces: list[Buffer]) -> None:
        """Append *pieces* to the output; if a task is draining the output, they wait for it."""
        if self._blocked is not None:
            self._blocked += pieces
            self._watch_first_bytes()
            return
        if self._border is not None:
            pieces = self._stop_at_border(pieces)
        if not self.draining:
            self._out.extend(pieces)
            return
        for piece in pieces:
            if may_wait(piece):
                self._out.append(piece)
            else:
                self._out += copied(piece, 0)

    def _stop_at_border(self, pieces: list[Buffer]) -> list[Buffer]:
        """Return the leading *pieces* that are still sent in plain text; block the others."""
        for index, piece in enumerate(pieces):
            if piece is self._border:
                self._blocked = pieces[index + 1 :]
                if self.state is not OPEN:
                    self._drop_blocked()
                self._note_progress()
                return pieces[:index]
        return pieces

    def _add_out(self, size: int) -> None:
        self.out_bytes += size
        self._pending.unsent_bytes += size

    def _add_held(self, size: int) -> None:
        self.held_bytes += size
        self._pending.unsent_bytes += size

    def release(self, readable: int) -> bool:
        """Send the answers held for log positions up to *readable*; return True if no answers are held anymore."""
        held = self._held
        while held and held[0][0] <= readable:
            _, pieces, size = held.popleft()
            self._queue_pieces(pieces)
            self._add_held(-size)
            self._add_out(size)
        if self._out and not self.draining:
            self.push()
        if self.delivery is NO_ROOM and not self.draining:
            self._continue_delivery()
        return not held

    def push(self) -> None:
        """Send as much as the transport accepts now; a task drains the rest."""
        if self.state >= LOST:
            return
        out, skipped = self._out, self._skipped
        try:
            taken = self.transport.send([memoryview(out[0])[skipped:], *out[1:]] if skipped else out)
        except Exception as error:
            self.lose(error)
            return
        self.protocol.traffic.bytes_out += taken
        if skipped + taken == self.out_bytes:
            self._out, self._skipped = [], 0
            self._add_out(-self.out_bytes)
        else:
            self._drop_sent(skipped + taken)
        if taken:
            self._note_progress()
        if self._out or self.transport.pending():
            self.drain()

    def _drop_sent(self, taken: int) -> None:
        """Drop pieces of the output that lie fully within the first *taken* bytes, and prepare the others to wait.

        A piece stays as it is, and counts in full until its last byte is sent: other connections may wait with the same
        object. Only a view that would pin a whole page of the log is copied.
        """
        unsent: list[Buffer] = []
        done = self._skipped = 0
        for piece in self._out:
            size = len(piece)
            if taken >= size:
                taken -= size
                done += size
                continue
            if may_wait(piece):
                unsent.append(piece)
                self._skipped += taken
            else:
                unsent += copied(piece, taken)
                done += taken
            taken = 0
        self._out = unsent
        self._add_out(-done)

    def drain(self) -> None:
        """Start a task that sends the output as the transport accepts it."""
        if not self.draining and self.state is not CLOSED:
            self.draining = True
            self._nursery.start_soon(self._drain)

    async def _drain(self) -> None:
        try:
            while self.state < LOST and (self._out or self.transport.pending()):
                await self.transport.wait_writable()
                self.push()
        except (OSError, trio.ClosedResourceError) as error:
            self.lose(error)
        finally:
            self.draining = False
            self._note_progress()
        if self.delivery is NO_ROOM and self.state is not CLOSED:
            await trio.lowlevel.checkpoint()
            if self.delivery is NO_ROOM:
                self._continue_delivery()

    # how the client speaks

    def wrap(self, transport: Transport, *, encrypted: bool) -> None:
        """Continue over *transport*, TLS or WebSocket; the protocol inside may be undecided still."""
        self.transport = transport
        self.wrapped = True
        self.encrypted = self.encrypted or encrypted
        if self._blocked:
            self._watch_first_bytes()

    def decide(self) -> None:
        """Release the blocked output, after the choice between TLS, WebSocket and plain text."""
        self.undecided = False
        blocked, self._blocked = self._blocked, None
        if blocked:
            self._queue_pieces(blocked)
            if not self.draining:
                self.push()

    @property
    def _may_be_plain(self) -> bool:
        """Whether bytes of the protocol itself may follow now; False while a TLS handshake must come first."""
        return self.undecided and (self.encrypted or not self.protocol.tls_required)

    def _watch_first_bytes(self) -> None:
        """Release the output after `FIRST_BYTES_S` if the client sends nothing: it waits for the server's greeting."""
        if self._may_be_plain and not self._waits_for_bytes:
            self._waits_for_bytes = True
            self._nursery.start_soon(self._wait_first_bytes)

    async def _wait_first_bytes(self) -> None:
        transport: Transport | None = None
        while self.undecided and (self.transport is not transport or self._is_shaking_hands):
            transport = self.transport
            await trio.sleep(FIRST_BYTES_S)
        if self.undecided:
            self.decide()

    @property
    def _is_shaking_hands(self) -> bool:
        return isinstance(self.transport, TlsTransport) and not self.transport.is_ready

    def _end_blocked(self) -> None:
        """Release the blocked output if the protocol itself may follow, else drop it: no first bytes will come."""
        if self._may_be_plain:
            self.decide()
        elif self.undecided:
            self.drop_output()
        else:
            self._drop_blocked()

    def _drop_blocked(self) -> None:
        blocked, self._blocked = self._blocked, None
        self._add_out(-sum(map(len, blocked or ())))

    def drop_output(self) -> None:
        """Drop the output, and send later output in plain text: the client does not speak TLS."""
        self.undecided = False
        self.upgrade = self._border = self._blocked = None
        self.stops = self.state >= CLOSING
        self._pending.held.pop(self, None)
        self._held.clear()
        self._add_held(-self.held_bytes)
        self._add_out(-self.out_bytes)
        self._out, self._skipped = [], 0
        self.discard_batch()

    async def wait_plain_sent(self) -> None:
        """Return once all output before `start_tls` has been sent, or the peer is lost."""
        while self.state < LOST and (self._blocked is None or self._out):
            await self._wait_progress()

    def begin_tls(self, transport: TlsTransport) -> None:
        """Continue over *transport*, because the client has begun TLS after `start_tls`."""
        self.upgrade = self._border = None
        self.stops = self.state >= CLOSING
        self.wrap(transport, encrypted=True)
        self.decide()

    # waiting

    async def wait_room(self) -> None:
        """Return once enough of the output has been sent, or the peer is lost."""
        while self.over and self.state < LOST:
            await self._wait_progress()

    async def wait_idle(self, *, slow_work: bool = False) -> None:
        """Return once all output has been sent, or the peer is lost; *slow_work*: also that of slow requests."""
        while self.state < LOST and (not self.idle or (slow_work and self._scopes)):
            await self._wait_progress()

    async def wait_farewell(self, *, slow_work: bool = False) -> None:
        """As `wait_idle`, but for at most `FAREWELL_S`."""
        if self.state < LOST and (not self.idle or (slow_work and self._scopes)):
            with trio.move_on_after(FAREWELL_S):
                await self.wait_idle(slow_work=slow_work)

    async def _wait_progress(self) -> None:
        if self._progress is None:
            self._progress = trio.Event()
        await self._progress.wait()

    def _note_progress(self) -> None:
        if self._progress is not None:
            self._progress.set()
            self._progress = None

    # background work and the end

    async def _work(self, scope: trio.CancelScope, work: Callable[..., Awaitable[None]], args: tuple[Any, ...]) -> None:
        try:
            with scope:
                await work(*args)
        except MartletError as error:
            self.close(str(error))
        except Exception as error:
            self.fail(error)
        finally:
            self._scopes.discard(scope)
            if not self._scopes:
                self._note_progress()

    async def _close_when_idle(self) -> None:
        await self.wait_farewell()
        self._close_transport()

    def _close_transport(self) -> None:
        if self.idle:
            self.transport.linger()
        else:
            self.transport.close()

    def fail(self, error: Exception) -> None:
        """Close the connection after *error*, a bug in the protocol's code."""
        log.error("%s closed because of a bug", self.shown, exc_info=error)
        self.close(f"{type(error).__name__}: {error}")

    def end_reading(self) -> None:
        """Stop reading; current requests are still answered."""
        if self.state is OPEN:
            self._become(READ_ENDED)
            if self._blocked is not None:
                self._end_blocked()

    def lose(self, error: Exception) -> None:
        """Drop the output: after *error* nothing can be sent anymore."""
        if not isinstance(error, OSError | trio.ClosedResourceError):
            log.error("%s closed because of a bug", self.shown, exc_info=error)
        self.reason = self.reason or f"{type(error).__name__}: {error}"
        if self.state < LOST:
            self._become(LOST)
        if isinstance(error, ssl.SSLError):  # a TLS alert to the client is on its way
            self.transport.linger()
        else:
            self.transport.close()
        self._note_progress()
        if self.rest_scope is not None:
            self.rest_scope.cancel()

    def end(self) -> None:
        """Free all resources: close the transport and cancel slow requests."""
        self._become(CLOSED)
        self._close_transport()
        self._pending.held.pop(self, None)
        self._pending.unsent_bytes -= self.out_bytes + self.held_bytes
        self.out_bytes = self.held_bytes = self._skipped = 0
        self._out = []
        self._blocked = None
        self._held.clear()
        self.discard_batch()
        for scope in self._scopes:
            scope.cancel()

    def drop_handler(self) -> None:
        """Drop the connection and the handler: they refer to this peer, and the cycle would keep their memory alive."""
        self.connection = ENDED
        self.handler = ENDED


def _log_nothing(peer: ServerPeer, details: str) -> None:
    """Log nothing about a client that was introduced."""


def may_wait(piece: Buffer) -> bool:
    """Return whether *piece* pins at most twice its size in memory, so that it can wait without a copy."""
    if isinstance(piece, memoryview):
        base = piece.obj
        return isinstance(base, bytes | bytearray) and len(base) <= 2 * len(piece)
    return True


def copied(piece: Buffer, taken: int) -> list[Buffer]:
    """Return a copy of *piece* without its first *taken* bytes, in pieces that are freed one by one."""
    return [bytes(piece[at : at + REST_BYTES]) for at in range(taken, len(piece), REST_BYTES)]
