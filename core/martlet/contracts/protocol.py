"""The parts of a protocol plugin.

A `Protocol` names its port, and makes the two halves of one peer. The `Connection` is a sans-I/O state machine (bytes
to events; time is an argument). The `Handler` acts on events; it is synchronous, so its changes to the broker are
atomic. The server owns the socket and gives the handler a `Peer` to answer through.
"""

import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any
from typing import Protocol as TypingProtocol

from msgspec import Struct, field

from martlet.contracts.access import Identity, LoginOrigin, Network
from martlet.contracts.quotas import Pace
from martlet.errors import Refused
from martlet.records.layout import Buffer

__all__ = ["Connection", "Handler", "Peer", "PortNetworks", "Protocol", "Traffic", "WebSocket"]


class Connection(TypingProtocol):
    """The protocol of one peer as a state machine, without I/O and without a clock."""

    @property
    def buffered_bytes(self) -> int:
        """The number of received bytes that belong to an incomplete request."""
        ...

    def receive_data(self, data: bytes, now: float) -> None:
        """Receive bytes from the socket. Raises `RemoteProtocolError` if the peer broke the protocol."""
        ...

    def events(self) -> Iterable[Any]:
        """Yield the complete events, each once."""
        ...

    def farewell(self, error: Exception) -> bytes:
        """Return the bytes that tell the peer about *error* before its connection closes; empty for none.

        The error is a `RemoteProtocolError`, or a `Refused` if the login of the client has expired (Reason.EXPIRED), or
        somebody has ended it (Reason.ENDED), or records could not be stored.
        """
        ...

    def deadline(self) -> float:
        """Return the time to call `handle_timeout`, in seconds on the clock of *now*; infinity for never."""
        ...

    def handle_timeout(self, now: float) -> None:
        """Act on a deadline that has passed; may create events. Raises `RemoteProtocolError` to close the peer."""
        ...


class Peer(TypingProtocol):
    """The connection to one client, as its handler sees it."""

    address: str  # "127.0.0.1:53214"
    host: bytes  # 4 or 16 address bytes and an i32 port, as a record holds them
    # The identity that its certificate proves, else anonymous; a protocol may set it after a login. If it expires, the
    # server ends the connection then.
    identity: Identity
    encrypted: bool  # whether the client has begun TLS

    def login_origin(self, client_id: str = "") -> LoginOrigin:
        """Return where the credentials of this client come from, for `Authentication`."""
        ...

    def send(self, *pieces: Buffer) -> None:
        """Queue *pieces* for sending; all pieces queued while one socket read is handled leave in one send."""
        ...

    def introduce(self, client: str, details: str = "") -> None:
        """Log that *client*, as its protocol names it, has connected, with *details* such as its version.

        From then on the log names it in lines about the connection, and says when and why that ends. Only the first
        call counts. The number of such lines per second is limited.
        """
        ...

    def hold_until(self, position: int) -> None:
        """Hold everything sent in this round until the log is flushed up to *position*.

        *position* is a `Placed.end`, or `martlet.state.journal.NEXT_COMMIT` for everything that this round appends.
        """
        ...

    def before_commit(self, work: Callable[[], None]) -> None:
        """Call *work* once, before the commit that ends this round.

        What *work* sends leaves at the end of the round, too. `Broker.round_publishes` stores so what many clients
        have published.
        """
        ...

    def wake(self) -> None:
        """Ask for a call of `Handler.collect` once the socket has room; many wakes cause one call."""
        ...

    def wake_last(self) -> None:
        """As `wake`, but after all peers that were woken by `wake`, and for one peer in each turn of the event loop.

        Use it for deliveries of much data that nobody waits for, so that other clients hardly notice them.
        """
        ...

    def has_room(self) -> bool:
        """Return whether the client keeps up; if not, further output only waits in memory.

        Ask before sending data that may be dropped or sent later. Deliveries in `Handler.collect` need not ask.
        """
        ...

    def start_tls(self) -> None:
        """Begin TLS now, for protocols that upgrade: earlier output leaves in plain text, later output after the
        handshake.

        Call it in `Handler.handle`, for a command such as ``STARTTLS``, or while the handler is made, for a server that
        speaks first. The client's next bytes must be a TLS handshake, otherwise its connection is closed.

        Raises:
          Refused: the port has no certificate (Reason.NOT_SUPPORTED; none is made for this), or the connection uses
            TLS or WebSocket already.
        """
        ...

    def pace(self) -> Pace:
        """Return how fast the server serves this peer, to slow it down; `Broker.gate` does that by quotas."""
        ...

    def start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run the coroutine function *work* in the background; it is cancelled when the peer disconnects.

        Raises:
          Refused: too many are running for this peer (Reason.BUSY).
        """
        ...

    def close(self, reason: str) -> None:
        """Close the connection once everything queued is sent; *reason* goes to the log, empty for an orderly end."""
        ...


class Handler(TypingProtocol):
    """Acts on the events of one peer."""

    def handle(self, event: Any) -> Awaitable[None] | None:
        """Act on *event* and answer through the peer. Raises `RemoteProtocolError` to close the peer.

        Work that would block the event loop for more than a few milliseconds is returned as an awaitable, usually
        from `martlet.runtime.turns.Turns.finish`. Later events of the peer wait until it is done, so their order is
        kept; it is cancelled if the peer disconnects. Events made by `Connection.handle_timeout` do not wait.
        """
        ...

    def refuse(self, answer: Buffer, refused: Refused) -> Buffer | None:
        """Return the replacement for *answer*, the first piece sent after a `Peer.hold_until`.

        The message that *answer* acknowledges was not stored: the disk became full. The answer has not left yet. None
        drops all answers of this round and closes the peer, after `Connection.farewell` of *refused*.
        """
        ...

    def collect(self, budget_bytes: int) -> None:
        """Send due messages, up to about *budget_bytes*; called after `Peer.wake`, once the socket has room."""
        ...

    def closed(self, reason: str) -> None:
        """Release the resources of the peer, which has disconnected."""
        ...


class WebSocket(Struct, frozen=True):
    """A protocol over WebSocket: the payloads of all frames form one stream of bytes.

    Args:
      subprotocols: a client that offers any must offer at least one of these, such as ``("mqtt",)``; a client that
        offers none gets the protocol of the port.
      text: whether text frames are accepted as well as binary ones. Frames sent are always binary.
      origins: web pages that may connect, such as ``https://example.org``, or ``*`` for all. Always allowed: pages of
        this machine and of the host that the client connects to (its header Host), and clients without an Origin
        header, such as programs that are no browsers.
      origins_key: the configuration key of *origins*, for the reason of a refusal.
    """

    subprotocols: tuple[str, ...]
    text: bool = False
    origins: Collection[str] = ("*",)
    origins_key: str = ""


class PortNetworks(Struct, frozen=True):
    """Who may connect to a port, usually from `martlet.net.ports.PortConfig.port_networks`.

    Args:
      section: the configuration section of its keys, for log lines.
      clients: the networks of clients that may connect; empty for all. Proxies may connect in any case.
      proxies: the networks of proxies. Each of their connections begins with a header of the PROXY protocol,
        and the client that it names takes the place of the proxy: in `Peer.address` and `Peer.host`, and for limits.
    """

    section: str = ""
    clients: tuple[Network, ...] = ()
    proxies: tuple[Network, ...] = ()


class Traffic(Struct, eq=False):
    """Bytes received from the peers of a port, and bytes sent to them."""

    bytes_in: int = 0
    bytes_out: int = 0


class Protocol(Struct, frozen=True, eq=False):
    """A port, and how to serve each peer that connects to it.

    Args:
      name: the name in logs and in the ready line.
      listen: ``host:port``; port 0 means any free port.
      listen_at: if set, called for the address in place of *listen* once the protocols before this one are bound, for a
        port at a distance from another one.
      connect: creates the connection of a new peer; called with the time, on the clock of `Connection.receive_data`.
      handle: creates the handler of a new peer; called with the peer and its connection.
      tls: returns the TLS context, None for plain text; called for each new peer, so certificates can change.
      make_tls: if set, awaited when a client begins TLS while *tls* returns None: returns a new context, or None. The
        first client waits for a certificate that the broker makes (`Tls.make`).
      certificate_end_ms: returns when the certificate of *tls* ends, in epoch milliseconds; 0 for none.
      tls_required: whether plain text is refused. If not, a first byte of 0x16 means TLS (RocketMQ ``permissive``).
        What a handler sends before the first bytes of the client waits for them, on such a port and with *websocket*.
        If plain text is allowed, a client that sends nothing for 0.2 s gets it in plain text.
      bound: called with the address once the port is bound.
      websocket: if set, the port also accepts WebSocket clients, whose first byte is the G of ``GET``.
      optional: if the port cannot be bound, the broker logs a warning and starts without it.
      traffic: the server counts in it.
      networks: who may connect.
    """

    name: str
    listen: str  # "127.0.0.1:10911", port 0 for any free one
    connect: Callable[[float], Connection]  # (now)
    handle: Callable[[Peer, Any], Handler]  # (peer, its connection)
    tls: Callable[[], ssl.SSLContext | None] = lambda: None
    tls_required: bool = False
    bound: Callable[[str], None] = lambda address: None  # (address), once the port is bound
    optional: bool = False
    listen_at: Callable[[], str] | None = None
    websocket: WebSocket | None = None
    traffic: Traffic = field(default_factory=Traffic)
    make_tls: Callable[[], Awaitable[ssl.SSLContext | None]] | None = None
    certificate_end_ms: Callable[[], int] = lambda: 0
    networks: PortNetworks = PortNetworks()

    @property
    def takes_tls(self) -> bool:
        """Whether a client may begin TLS at once."""
        return self.make_tls is not None or self.tls() is not None
