"""The server's side of one connection: its life cycle, its output on the way to the transport, its background tasks.

What the handler sends collects in the `Answers` of the round; at its end `Rounds.queue_output` moves them to the
`Output`, and `push` sends what is ready. If the transport does not accept everything, a task drains the rest.
"""

import logging
import math
import ssl
from collections.abc import Awaitable, Callable, Iterable
from enum import IntEnum
from typing import Any, Final, final

import trio
from msgspec import Struct

from martlet.contracts import ANONYMOUS, Buffer, Connection, Handler, Identity, LoginOrigin, Protocol
from martlet.errors import Reason, Refused
from martlet.net.output import Answers, Output
from martlet.net.pace import Paces, PeerPace
from martlet.net.pending import IDLE, QUEUED, PendingWork
from martlet.net.slow_requests import SlowRequests
from martlet.net.transports import Transport
from martlet.settings import ServerConfig

__all__ = ["TRANSITIONS", "PeerState", "ServerPeer", "Shared"]

log = logging.getLogger("martlet.server")

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


def _do_nothing(*args: Any) -> None:
    """Do nothing."""


class Shared(Struct, frozen=True, eq=False):
    """What all peers of a server share.

    Args:
      introduced: called with a peer that has said who its client is, and details.
      blocked: called with a peer whose output may not leave before it is known how its client speaks.
      identified: called with a peer whose identity has changed, if its login expires.
      lost: called with a peer to which nothing can be sent anymore.
      wait_close: returns when one more peer may close: a flush releases the last answers of many at the same moment.
    """

    pending: "PendingWork[ServerPeer]"
    config: ServerConfig
    nursery: trio.Nursery
    paces: Paces
    introduced: "Callable[[ServerPeer, str], None]" = _do_nothing
    blocked: "Callable[[ServerPeer], None]" = _do_nothing
    identified: "Callable[[ServerPeer], None]" = _do_nothing
    lost: "Callable[[ServerPeer], None]" = _do_nothing
    wait_close: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint


@final
class ServerPeer:
    """One client connection; implements `martlet.contracts.Peer`."""

    __slots__ = (
        "_identity",
        "address",
        "answers",
        "client",
        "connection",
        "delivery",
        "encrypted",
        "expires_at",
        "handler",
        "host",
        "output",
        "own_pace",
        "protocol",
        "reason",
        "shared",
        "slow_requests",
        "state",
        "stops",
        "transport",
        "undecided",
        "upgrade",
        "watched_at",
        "wrapped",
    )

    def __init__(self, protocol: Protocol, transport: Transport, address: str, host: bytes, shared: Shared) -> None:
        self.shared = shared
        self.protocol = protocol
        self.transport = transport
        self.address = address
        self.host = host
        self._identity = ANONYMOUS
        self.expires_at = math.inf  # when to look whether the login has expired
        self.client = ""  # its name in the log, once its handler knows it
        # Whether the first bytes decide between TLS, WebSocket and plain text; False where plain text is the only way.
        self.undecided = protocol.tls_required or protocol.websocket is not None or protocol.takes_tls
        self.encrypted = False
        self.watched_at = math.inf  # when `Deadlines` looks at the peer
        self.wrapped = False  # whether the transport is TLS or WebSocket
        self.upgrade: ssl.SSLContext | None = None  # set by `start_tls`, until the client has begun TLS
        self.state = OPEN
        self.stops = False  # whether no more events may be handled now: the peer closes, or TLS begins
        self.reason = ""
        self.delivery = IDLE
        self.answers: Answers | None = None  # of this round; `PendingWork.touched` has the peer while it is set
        self.output = Output(shared.pending, blocked=self.undecided)
        self.slow_requests: SlowRequests | None = None  # once one was started
        self.own_pace: PeerPace | None = None  # set by `pace`, if its client has quotas
        self.connection: Connection = protocol.connect(trio.current_time())
        self.handler: Handler = protocol.handle(self, self.connection)

    def _become(self, state: PeerState) -> None:
        assert state in TRANSITIONS[self.state], f"peer {self.address} cannot go from {self.state!r} to {state!r}"
        self.state = state
        if state >= CLOSING:
            self.stops = True
            if self.own_pace is not None:
                self.own_pace.end()

    # what handlers call

    @property
    def identity(self) -> Identity:
        return self._identity

    @identity.setter
    def identity(self, identity: Identity) -> None:
        self._identity = identity
        if identity.expires_ms or self.expires_at < math.inf:
            self.shared.identified(self)

    def send(self, *pieces: Buffer) -> None:
        answers = self.answers or self._begin_answers()
        answers.pieces += pieces
        answers.size += len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))

    def hold_until(self, position: int) -> None:
        answers = self.answers or self._begin_answers()
        if position > answers.hold_position:
            answers.hold_position = position
            answers.holds.append((len(answers.pieces), position))
        elif position > 0 and answers.holds[-1][0] < len(answers.pieces):
            answers.holds.append((len(answers.pieces), position))  # `Answers.refuse` must know each answer

    def before_commit(self, work: Callable[[], None]) -> None:
        self.shared.pending.call_before_commit(self, work)

    def _begin_answers(self) -> Answers:
        self.answers = Answers()
        self.shared.pending.touch(self)
        return self.answers

    def login_origin(self, client_id: str = "") -> LoginOrigin:
        address = self.address.rpartition(":")[0].strip("[]")
        return LoginOrigin(address, self.protocol.name, self.protocol.listen, client_id)

    def introduce(self, client: str, details: str = "") -> None:
        if client and not self.client:
            self.client = client
            self.shared.introduced(self, details)

    @property
    def shown(self) -> str:
        """The name of the client in log lines: protocol, its own name if known, and address."""
        if self.client:
            return f"{self.protocol.name} client {self.client[:CLIENT_SHOWN]!r} at {self.address}"
        return f"{self.protocol.name} {self.address}"

    def wake(self) -> None:
        if self.delivery is not QUEUED and self.state is not CLOSED:
            self.shared.pending.wake(self)

    def wake_last(self) -> None:
        if self.state is not CLOSED:
            self.shared.pending.wake_last(self)

    def has_room(self) -> bool:
        return not (self.output.draining or self.over)

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
        self.send(self.output.begin_border(drops_rest=self.state is not OPEN))

    def pace(self) -> PeerPace:
        if self.own_pace is None:
            self.own_pace = PeerPace(self, self.shared.paces, has_ended=self.state >= CLOSING)
        return self.own_pace

    def start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        if self.slow_requests is None:
            self.slow_requests = SlowRequests(self.shared.config.peer_tasks_max)
        self.slow_requests.start(self, self.shared.nursery, work, args)

    # its pace

    @property
    def deadline(self) -> float:
        """The connection's deadline, later by the time for which the server has not read from it."""
        deadline = self.connection.deadline()
        return deadline if self.own_pace is None else self.own_pace.excuse(deadline)

    async def wait_pace(self) -> None:
        """Return when the server may read from the peer again."""
        if self.own_pace is not None:
            await self.own_pace.wait_reading(self.connection.deadline)
        self.stops = self.state >= CLOSING or self.upgrade is not None

    # output

    @property
    def over(self) -> bool:
        """Whether to stop reading requests until part of the output has been sent."""
        answers, shared = self.answers, self.shared
        unsent_bytes = self.output.unsent_bytes + (answers.size if answers is not None else 0)
        return unsent_bytes > shared.config.unsent_bytes_max or (
            unsent_bytes > 0 and shared.pending.unsent_bytes > shared.config.unsent_total_bytes_max
        )

    @property
    def idle(self) -> bool:
        """Whether there is no unsent output."""
        answers = self.answers
        return self.output.is_empty and not (answers is not None and answers.pieces) and not self.transport.pending()

    def push(self) -> None:
        """Send as much as the transport accepts now; a task drains the rest."""
        if self.state >= LOST:
            return
        output = self.output
        try:
            sent_bytes = self.transport.send(output.unsent() if output.skipped else output.ready)
        except Exception as error:
            self.lose(error)
            return
        self.protocol.traffic.bytes_out += sent_bytes
        output.drop_sent(sent_bytes)
        if output.ready or self.transport.pending():
            self.drain()

    def send_now(self, answers: Answers) -> None:
        """Send *answers* at the end of a round, while nothing else is unsent; the rest waits as other output does."""
        if self.state >= LOST:
            return
        try:
            sent_bytes = self.transport.send(answers.pieces)
        except Exception as error:
            self.lose(error)
            return
        self.protocol.traffic.bytes_out += sent_bytes
        output = self.output
        if sent_bytes < answers.size or self.transport.pending():
            output.add(answers)
            output.drop_sent(sent_bytes)
            self.drain()
        elif output.progress is not None:
            output.note_progress()

    def drain(self) -> None:
        """Start a task that sends the output as the transport accepts it."""
        if not self.output.draining and self.state is not CLOSED:
            self.output.draining = True
            self.shared.nursery.start_soon(self._drain)

    async def _drain(self) -> None:
        try:
            while self.state < LOST and (self.output.ready or self.transport.pending()):
                await self.transport.wait_writable()
                self.push()
        except (OSError, trio.ClosedResourceError) as error:
            self.lose(error)
        finally:
            self.output.draining = False
            self.output.note_progress()
        if self.delivery is not IDLE:
            await trio.lowlevel.checkpoint()
            if self.state is not CLOSED:
                self.shared.pending.resume(self)

    def decide(self) -> None:
        """Release the blocked output, after the choice between TLS, WebSocket and plain text."""
        self.undecided = False
        self.output.unblock()
        if self.output.ready and not self.output.draining:
            self.push()

    @property
    def may_be_plain(self) -> bool:
        """Whether bytes of the protocol itself may follow now; False while a TLS handshake must come first."""
        return self.undecided and (self.encrypted or not self.protocol.tls_required)

    def _settle_blocked(self) -> None:
        """Release the blocked output if the protocol itself may follow, else drop it: no first bytes will come."""
        if self.may_be_plain:
            self.decide()
        elif self.undecided:
            self.drop_output()
        elif self.upgrade is not None:
            self.output.drop_blocked()

    def drop_output(self) -> None:
        """Drop the output, and send later output in plain text: the client does not speak TLS."""
        self.undecided = False
        self.upgrade = None
        self.stops = self.state >= CLOSING
        self.shared.pending.held.pop(self, None)
        if self.answers is not None:
            self.answers.clear()
        self.output.drop()

    async def wait_room(self) -> None:
        """Return once enough of the output has been sent, or the peer is lost."""
        while self.over and self.state < LOST:
            await self.output.wait_progress()

    async def wait_idle(self, limit_s: float = math.inf, *, slow_work: bool = False) -> None:
        """Return once all output has been sent, or the peer is lost; *slow_work*: also that of slow requests."""
        with trio.move_on_after(limit_s):
            while self.state < LOST and (not self.idle or (slow_work and self.slow_requests)):
                await self.output.wait_progress()

    # the end

    def close(self, reason: str, farewell_s: float = FAREWELL_S) -> None:
        if self.state >= CLOSING:
            return
        self._become(CLOSING)
        self.reason = reason
        self._settle_blocked()
        if not self.idle:
            self.shared.nursery.start_soon(self._close_when_idle, farewell_s)
        elif reason:
            self.transport.linger()
        else:  # the client has sent everything
            self.transport.close()

    async def _close_when_idle(self, limit_s: float) -> None:
        await self.wait_idle(limit_s)
        await self.shared.wait_close()
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
            self._settle_blocked()

    def lose(self, error: Exception) -> None:
        """Send nothing anymore, because that is not possible after *error*."""
        if not isinstance(error, OSError | trio.ClosedResourceError):
            log.error("%s closed because of a bug", self.shown, exc_info=error)
        self.reason = self.reason or f"{type(error).__name__}: {error}"
        if self.state < LOST:
            self._become(LOST)
        if isinstance(error, ssl.SSLError):  # a TLS alert to the client is on its way
            self.transport.linger()
        else:
            self.transport.close()
        self.output.note_progress()
        self.shared.lost(self)

    def end(self) -> Handler:
        """Free all resources: close the transport and cancel slow requests.

        Returns the handler, which must be told. The peer drops it and its connection: they refer to the peer, and the
        cycle would keep their memory alive.
        """
        self._become(CLOSED)
        self._close_transport()
        self.shared.pending.held.pop(self, None)
        self.answers = None
        self.output.drop()
        if self.slow_requests is not None:
            self.slow_requests.cancel()
        handler, self.handler, self.connection = self.handler, ENDED, ENDED
        return handler
