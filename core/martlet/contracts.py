"""What core and plugins promise each other: types only.

A protocol plugin brings a `Protocol`: where it listens, and how to make the two
halves of one peer. The `Connection` is a sans-I/O state machine (bytes to events,
events to bytes; time comes in as an argument). The `Handler` says what events mean
to the broker; it is synchronous, so what it does to the broker is atomic. The
server owns the socket and gives the handler a `Peer` to answer through.
"""

import ssl
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias
from typing import Protocol as TypingProtocol

from martlet.message import Message, Record

__all__ = [
    "Authorizer",
    "Buffer",
    "Command",
    "Compile",
    "Connection",
    "Handler",
    "Identity",
    "Peer",
    "Predicate",
    "Protocol",
    "Service",
    "Stage",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

# Hot: called once a message from a tuple of plain callables.
Stage: TypeAlias = Callable[[Message], Message]  # may raise Refused
Predicate: TypeAlias = Callable[[Record], bool]
Compile: TypeAlias = Callable[[str], Predicate]  # raises Refused(Reason.ILLEGAL) with where and what

Service: TypeAlias = Callable[[], Awaitable[None]]  # runs until it is cancelled


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a peer proved to be; *name* is empty for an anonymous peer."""

    name: str = ""


# (who, action, canonical topic): True allows, False denies, None has no opinion
Authorizer: TypeAlias = Callable[[Identity, str, str], bool | None]


class Connection(TypingProtocol):
    """One peer's protocol as a state machine; it does no I/O and sees no clock."""

    @property
    def buffered_bytes(self) -> int:
        """How many received bytes no event has been made of yet: those of an incomplete request."""
        ...

    def receive_data(self, data: bytes, now: float) -> None:
        """Take what the socket gave. Raises `RemoteProtocolError` when the peer broke the protocol."""
        ...

    def events(self) -> Iterable[Any]:
        """Yield what the data so far says, each event once."""
        ...

    def farewell(self, error: Exception) -> bytes:
        """The protocol's own words for closing because of *error*; empty where it has none."""
        ...

    def deadline(self) -> float:
        """When `handle_timeout` wants to be called, in seconds of the clock of *now*; infinity for never."""
        ...

    def handle_timeout(self, now: float) -> None:
        """The deadline has passed; may make events. Raises `RemoteProtocolError` to close the peer."""
        ...


class Peer(TypingProtocol):
    """The server's side of one peer, as its handler sees it."""

    address: str  # "127.0.0.1:53214"
    host: bytes  # 4 or 16 address bytes and an i32 port, as a record holds them
    identity: Identity

    def send(self, *pieces: Buffer) -> None:
        """Put *pieces* behind what is to leave; all answers of one socket read leave in one send."""
        ...

    def hold_until(self, position: int) -> None:
        """Let nothing sent from here on leave before the log is flushed up to *position* (see Store.wait_flushed)."""
        ...

    def wake(self) -> None:
        """Ask for a `Handler.collect` as soon as the socket has room; many wakes make one collect."""
        ...

    def start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run *work* beside the reader; it is cancelled when the peer goes. At most a configured number at once.

        Raises:
          Refused: too many are under way (Reason.BUSY).
        """
        ...

    def close(self, reason: str) -> None:
        """Close after what was sent has left; *reason* goes to the log. Empty for an orderly end."""
        ...


class Handler(TypingProtocol):
    """What one peer's events mean to the broker."""

    def handle(self, event: Any) -> None:
        """Act on *event*; answers go to the peer. Raises `RemoteProtocolError` to close the peer."""
        ...

    def collect(self, budget_bytes: int) -> None:
        """The socket has room and somebody woke us: send what is due, up to about *budget_bytes*."""
        ...

    def closed(self, reason: str) -> None:
        """The peer is gone; give back what it held."""
        ...


@dataclass(frozen=True, slots=True)
class Protocol:
    """A port, and how to serve one peer on it.

    ``tls`` is asked at each new peer, so certificates can change; with ``tls_required`` false
    a first byte 0x16 means TLS and anything else means plain (RocketMQ ``permissive``).
    Without a port that is ``optional`` the broker starts all the same, with a warning.
    """

    name: str
    listen: str  # "127.0.0.1:10911", port 0 for any free one
    connect: Callable[[], Connection]
    handle: Callable[[Peer, Any], Handler]  # (peer, its connection)
    tls: Callable[[], ssl.SSLContext | None] = lambda: None
    tls_required: bool = False
    bound: Callable[[str], None] = lambda address: None  # told the real address once it is bound
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """One more ``martlet`` subcommand; *run* returns the exit code."""

    name: str
    help: str
    configure: Callable[[Any], None]  # gets the argparse parser
    run: Callable[[Any], int]
