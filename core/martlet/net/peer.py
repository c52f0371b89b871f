"""The server's side of one connection: the states of its life, what waits to leave, and its background tasks.

Answers of a step collect in `_batch`. At the end of the round `queue_output` moves them to `_held`, if the log has to
be flushed first, or to `_out`, and sends. Only when the transport does not take everything a task drains the rest.
"""

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from enum import IntEnum
from typing import Any, Final, final

import trio

from martlet.contracts import Buffer, Connection, Handler, Identity, Protocol
from martlet.errors import MartletError, Reason, Refused
from martlet.net.origins import origin_of
from martlet.net.pending import Pending
from martlet.net.transports import Transport
from martlet.settings import ServerConfig
from martlet.state.journal import NEXT_COMMIT

__all__ = ["DELIVERY_TRANSITIONS", "TRANSITIONS", "Delivery", "PeerState", "ServerPeer"]

log = logging.getLogger("martlet.server")

REST_BYTES: Final = 65536  # a piece of what a peer could not take yet
FAREWELL_S: Final = 5.0  # how long a peer that ends has to take what was sent to it


class PeerState(IntEnum):
    """The life of a peer. States only ever grow, so that ``state >= CLOSING`` covers all that follows."""

    OPEN = 0  # requests are read and answered
    READ_ENDED = 1  # no more is read: the client finished or broke the protocol; work under way is still answered
    CLOSING = 2  # no more requests are handled; what was sent still leaves
    LOST = 3  # nothing can be sent any more
    CLOSED = 4  # everything is freed


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


class Delivery(IntEnum):
    """Whether the handler is to be asked for more to send (`Handler.collect`)."""

    IDLE = 0  # nobody woke it
    QUEUED = 1  # it was woken and has its place in the queue
    NO_ROOM = 2  # it was woken; its turn comes once the peer has taken some of what waits


IDLE: Final = Delivery.IDLE
QUEUED: Final = Delivery.QUEUED
NO_ROOM: Final = Delivery.NO_ROOM

DELIVERY_TRANSITIONS: Final[dict[Delivery, frozenset[Delivery]]] = {
    IDLE: frozenset({QUEUED}),
    QUEUED: frozenset({IDLE, NO_ROOM}),
    NO_ROOM: frozenset({QUEUED}),
}


@final
class _Ended:
    """Stands in for the connection and the handler of a closed peer; does nothing."""

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
    """One client (martlet.contracts.Peer)."""

    __slots__ = (
        "_batch",
        "_batch_bytes",
        "_config",
        "_held",
        "_hold_position",
        "_holds",
        "_nursery",
        "_out",
        "_pending",
        "_progress",
        "_scopes",
        "_touched",
        "address",
        "alarm",
        "connection",
        "delivery",
        "draining",
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
        "rest_scope",
        "state",
        "transport",
    )

    def __init__(
        self,
        protocol: Protocol,
        transport: Transport,
        address: str,
        host: bytes,
        pending: "Pending[ServerPeer]",
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
        self.identity = Identity()
        self.state = OPEN
        self.delivery = IDLE
        self.reason = ""
        self._touched = False  # `Pending.touched` has it
        self._batch: list[Buffer] = []  # sent by the handler in this round
        self._batch_bytes = 0
        self._hold_position = 0
        # Each position in `_batch` from which on the answers depend on a log position, and that.
        self._holds: list[tuple[int, int]] = []
        self._held: deque[tuple[int, list[Buffer], int]] = deque()  # (log position, pieces, bytes)
        self.held_bytes = 0
        self._out: list[Buffer] = []  # free to leave
        self.out_bytes = 0
        self.draining = False  # a task waits until the transport takes more of `_out`
        self._progress: trio.Event | None = None
        self._scopes: set[trio.CancelScope] = set()  # of slow work under way
        self.rest: Awaitable[None] | None = None  # of a request that is not finished yet
        self.rest_scope: trio.CancelScope | None = None
        self.alarm = math.inf  # the deadline that is watched
        self.incomplete = False  # whether it holds bytes of a request of which more is to come
        self.connection: Connection = protocol.connect(trio.current_time())
        self.handler: Handler = protocol.handle(self, self.connection)

    def _become(self, state: PeerState) -> None:
        assert state in TRANSITIONS[self.state], f"peer {self.address} cannot go from {self.state!r} to {state!r}"
        self.state = state

    def set_delivery(self, delivery: Delivery) -> None:
        """Go to the state *delivery*."""
        assert delivery in DELIVERY_TRANSITIONS[self.delivery], f"{self.delivery!r} to {delivery!r}"
        self.delivery = delivery

    # what handlers call

    def send(self, *pieces: Buffer) -> None:
        self._batch += pieces
        self._batch_bytes += len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        if not self._touched:
            self._touch()

    def hold_until(self, position: int) -> None:
        if position > self._hold_position:
            self._hold_position = position
            self._holds.append((len(self._batch), position))
            if not self._touched:
                self._touch()

    def _touch(self) -> None:
        self._touched = True
        self._pending.touch(self)

    def wake(self) -> None:
        if self.delivery is not QUEUED and self.state is not CLOSED:
            self.set_delivery(QUEUED)
            self._pending.wake(self)

    def start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        limit = self._config.peer_tasks_max
        if len(self._scopes) >= limit:
            raise Refused(
                Reason.BUSY, f"{limit} slow requests of this connection are under way; server.peer_tasks_max is {limit}"
            )
        scope = trio.CancelScope()
        self._scopes.add(scope)
        self._nursery.start_soon(self._work, scope, work, args)

    def close(self, reason: str) -> None:
        if self.state >= CLOSING:
            return
        self._become(CLOSING)
        self.reason = reason
        if self.idle:
            self.transport.close()
        else:
            self._nursery.start_soon(self._close_when_idle)

    # what may leave, and what has to wait

    @property
    def over(self) -> bool:
        """Whether no more requests should be read until some of the answers have left."""
        waiting = self.out_bytes + self.held_bytes + self._batch_bytes
        config = self._config
        return waiting > config.unsent_bytes_max or (
            waiting > 0 and self._pending.unsent_bytes > config.unsent_total_bytes_max
        )

    @property
    def batch_bytes(self) -> int:
        """How much was sent in this round."""
        return self._batch_bytes

    @property
    def idle(self) -> bool:
        """Whether nothing waits to leave."""
        return not (self._out or self._held or self._batch or self.transport.pending())

    @property
    def hold_position(self) -> int:
        """Up to where the log must be flushed before what was sent in this round may leave."""
        return self._hold_position

    @property
    def held_position(self) -> int:
        """Up to where the log must be flushed before anything that is held may leave; -1 if nothing is."""
        return self._held[0][0] if self._held else -1

    def queue_output(self, readable: int, committed: int) -> None:
        """Close what was sent in this round into a unit that leaves or is held, and send what may leave.

        What waits for `NEXT_COMMIT` waits for *committed*, where the log ends now.
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
            elif self._held:
                position, pieces, size = self._held.pop()
                pieces.extend(self._batch)
                self._held.append((position, pieces, size + self._batch_bytes))
                self._add_held(self._batch_bytes)
            else:
                self._let_out(self._batch)
                self._add_out(self._batch_bytes)
            self._batch = []
            self._batch_bytes = 0
        if self._holds:
            self._holds.clear()
            self._hold_position = 0
        if self._out and not self.draining:
            self.push()

    def discard_batch(self) -> None:
        """Forget what was sent in this round: what it says did not happen."""
        self._batch = []
        self._batch_bytes = 0
        self._holds.clear()
        self._hold_position = 0
        self._note_progress()

    def refuse_batch(self, written: int, refused: Refused) -> bool:
        """Replace the answers of this round that say that something beyond *written* is stored.

        Returns False when the handler cannot say so.
        """
        batch = self._batch
        for index, position in self._holds:
            if position > written and index < len(batch):
                instead = self.handler.refuse(batch[index], refused)
                if instead is None:
                    return False
                batch[index] = instead
        self._batch_bytes = sum(map(len, batch))
        self._hold_position = min(self._hold_position, written)
        return True

    def _let_out(self, pieces: list[Buffer]) -> None:
        """Let *pieces* leave after what waits; behind a drain they are copied, for views would pin whole chunks."""
        self._out.extend(map(bytes, pieces) if self.draining else pieces)

    def _add_out(self, size: int) -> None:
        self.out_bytes += size
        self._pending.unsent_bytes += size

    def _add_held(self, size: int) -> None:
        self.held_bytes += size
        self._pending.unsent_bytes += size

    def release(self, readable: int) -> bool:
        """Send what waited for the log to be flushed up to *readable*; True when nothing is held any more."""
        held = self._held
        while held and held[0][0] <= readable:
            _, pieces, size = held.popleft()
            self._let_out(pieces)
            self._add_held(-size)
            self._add_out(size)
        if self._out and not self.draining:
            self.push()
        if self.delivery is NO_ROOM and not self.draining:
            self.wake()
        return not held

    def push(self) -> None:
        """Send what fits now; a task drains the rest."""
        if self.state >= LOST:
            return
        try:
            taken = self.transport.send(self._out)
        except Exception as error:
            self.lose(error)
            return
        self._add_out(-taken)
        self._pending.bytes_out += taken
        if taken:
            self._note_progress()
        if not self.out_bytes and not self.transport.pending():
            self._out = []
            return
        self._keep_rest(taken)
        self.drain()

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

    def drain(self) -> None:
        """Have a task send what waits as the transport takes it."""
        if not self.draining and self.state is not CLOSED:
            self.draining = True
            self._nursery.start_soon(self._drain)

    async def _drain(self) -> None:
        try:
            while self.state < LOST and (self.out_bytes or self.transport.pending()):
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
                self.wake()

    # waiting

    async def wait_room(self) -> None:
        """Return once enough of what waits has left, or the peer is lost."""
        while self.over and self.state < LOST:
            await self._wait_progress()

    async def wait_idle(self, *, slow_work: bool = False) -> None:
        """Return once all that was sent has left, with *slow_work* also what is under way, or the peer is lost."""
        while self.state < LOST and (not self.idle or (slow_work and self._scopes)):
            await self._wait_progress()

    async def wait_farewell(self, *, slow_work: bool = False) -> None:
        """As `wait_idle`, for a few seconds at most."""
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
        self.transport.close()

    def fail(self, error: Exception) -> None:
        """Close after *error*, which is a defect of the protocol's code."""
        log.error("%s %s closed; a defect", self.protocol.name, self.address, exc_info=error)
        self.close(f"{type(error).__name__}: {error}")

    def end_reading(self) -> None:
        """Read no more; requests under way are still answered."""
        if self.state is OPEN:
            self._become(READ_ENDED)

    def lose(self, error: Exception) -> None:
        """Give up what waits: nothing can be sent any more, because of *error*."""
        if not isinstance(error, OSError | trio.ClosedResourceError):
            log.error("%s %s closed; a defect", self.protocol.name, self.address, exc_info=error)
        self.reason = self.reason or f"{type(error).__name__}: {error}"
        if self.state < LOST:
            self._become(LOST)
        self.transport.close()
        self._note_progress()
        if self.rest_scope is not None:
            self.rest_scope.cancel()

    def end(self) -> None:
        """Free everything; the transport closes and slow work is cancelled."""
        self._become(CLOSED)
        self.transport.close()
        self._pending.held.pop(self, None)
        self._pending.unsent_bytes -= self.out_bytes + self.held_bytes
        self.out_bytes = self.held_bytes = 0
        self._out = []
        self._held.clear()
        self.discard_batch()
        for scope in self._scopes:
            scope.cancel()

    def drop_handler(self) -> None:
        """Drop the connection and the handler: both refer to this peer, and the cycle would keep all they hold."""
        self.connection = ENDED
        self.handler = ENDED
