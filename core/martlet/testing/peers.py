"""Peers without sockets, a whole broker in one task tree, and checks that every connection must pass.

For the tests of protocols: `MemoryWire` is a socket as the server sees it and `MemoryPeer` the other end of it,
`serving` runs a real broker and server over a data directory, `RecordingPeer` replaces the peer of a handler, and
`check_connection` feeds a state machine the same bytes cut in every way.
"""

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, final

import trio
from msgspec import Struct, field

from martlet.app import saving
from martlet.app.config import Config
from martlet.app.startup import build
from martlet.broker import Broker
from martlet.contracts import Buffer, Connection, Dispatcher, Identity, LoginOrigin, Protocol, Service
from martlet.errors import Reason, Refused
from martlet.net.addresses import pack_host
from martlet.net.server import Server
from martlet.runtime.clock import Clock, SystemClock
from martlet.runtime.stats import Stats
from martlet.settings import BrokerConfig, DeliveryConfig, ServerConfig
from martlet.state import Projection
from martlet.store import Disk, RealDisk, Store, StoreConfig

__all__ = [
    "MemoryPeer",
    "MemoryWire",
    "RecordingPace",
    "RecordingPeer",
    "Serving",
    "check_connection",
    "memory_transport",
    "serving",
]

PIPE_BYTES: Final = 65536
RANDOM_CUTTINGS: Final = 50


@final
class _Pipe:
    """Bytes in one direction, up to a capacity."""

    __slots__ = ("_changed", "capacity", "closed", "data")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.data = bytearray()
        self.closed = False
        self._changed = trio.Event()

    def put(self, data: Buffer) -> int:
        taken = max(0, min(len(data), self.capacity - len(self.data)))
        if taken:
            self.data += data[:taken]
            self._tell()
        return taken

    def take(self, limit: int) -> bytes:
        data = bytes(self.data[:limit])
        del self.data[:limit]
        if data:
            self._tell()
        return data

    def close(self) -> None:
        self.closed = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def wait_readable(self) -> None:
        while not (self.data or self.closed):
            await self._changed.wait()

    async def wait_writable(self) -> None:
        while len(self.data) >= self.capacity and not self.closed:
            await self._changed.wait()


@final
class MemoryWire:
    """The server's end (martlet.net.transports.Transport)."""

    __slots__ = ("_closed", "_in", "_out")

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._in = incoming
        self._out = outgoing
        self._closed = False

    def receive(self, limit: int) -> bytes | None:
        if self._closed:
            raise trio.ClosedResourceError
        data = self._in.take(limit)
        return data if data or self._in.closed else None

    def send(self, pieces: list[Buffer]) -> int:
        if self._out.closed:
            raise BrokenPipeError("the peer is gone")
        taken = 0
        for piece in pieces:
            part = self._out.put(piece)
            taken += part
            if part < len(piece):
                break
        return taken

    def pending(self) -> bool:
        return False

    async def wait_readable(self) -> None:
        await trio.lowlevel.checkpoint()
        await self._in.wait_readable()
        if self._closed:
            raise trio.ClosedResourceError

    async def wait_writable(self) -> None:
        await trio.lowlevel.checkpoint()
        await self._out.wait_writable()
        if self._closed:
            raise trio.ClosedResourceError

    def close(self) -> None:
        self._closed = True
        self._in.close()
        self._out.close()

    def linger(self) -> None:
        self.close()  # bytes already sent still arrive


@final
class MemoryPeer:
    """The client's end of a connection in memory."""

    __slots__ = ("_in", "_out", "_rest")

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._in = incoming
        self._out = outgoing
        self._rest = b""

    async def send(self, data: bytes) -> None:
        """Send all of *data*. Raises `trio.BrokenResourceError` when the server closed."""
        await trio.lowlevel.checkpoint()
        while data:
            if self._out.closed:
                raise trio.BrokenResourceError("the server closed")
            await self._out.wait_writable()
            data = data[self._out.put(data) :]

    async def receive_some(self) -> bytes:
        """Wait for bytes and return them; empty when the server closed."""
        await trio.lowlevel.checkpoint()
        if self._rest:
            data, self._rest = self._rest, b""
            return data
        await self._in.wait_readable()
        return self._in.take(PIPE_BYTES)

    async def receive_exactly(self, size: int) -> bytes:
        """Return *size* bytes. Raises `EOFError` when the server closes before."""
        if not size:
            return b""  # received bytes stay for the next call
        data = b""
        while len(data) < size:
            more = await self.receive_some()
            if not more:
                raise EOFError(f"the server closed after {len(data)} of {size} bytes: {data!r}")
            data += more
        self._rest = data[size:]
        return data[:size]

    async def receive_line(self) -> bytes:
        """Return a line without its newline. Raises `EOFError` when the server closes before."""
        data = b""
        while b"\n" not in data:
            more = await self.receive_some()
            if not more:
                raise EOFError(f"the server closed in {data!r}")
            data += more
        line, _, self._rest = data.partition(b"\n")
        return line

    def waiting(self) -> int:
        """Return the number of bytes that have arrived and were not received yet."""
        return len(self._rest) + len(self._in.data)

    def close(self) -> None:
        """Close both directions, as a process that ends does."""
        self._out.close()
        self._in.close()


def memory_transport(capacity: int = PIPE_BYTES) -> tuple[MemoryPeer, MemoryWire]:
    """Return both ends of a connection that holds *capacity* bytes a direction."""
    up, down = _Pipe(capacity), _Pipe(capacity)
    return MemoryPeer(down, up), MemoryWire(up, down)


class RecordingPace(Struct, eq=False):
    """A `martlet.contracts.Pace` that records until when a peer was slowed; call ``tells`` to end the connection."""

    receive_bytes: int = 1 << 18
    read_at: float = 0.0
    deliver_at: float = 0.0
    tells: list[Callable[[], None]] = field(default_factory=list)

    def slow_reading(self, until: float) -> None:
        self.read_at = max(self.read_at, until)

    def slow_delivery(self, until: float) -> None:
        self.deliver_at = max(self.deliver_at, until)

    def shorten(self, reading_until: float, delivery_until: float) -> None:
        self.read_at = min(self.read_at, reading_until)
        self.deliver_at = min(self.deliver_at, delivery_until)

    def on_end(self, tell: Callable[[], None]) -> None:
        self.tells.append(tell)


class RecordingPeer(Struct, dict=True):
    """A `Peer` without a connection, which records a handler's calls."""

    address: str = "127.0.0.1:1"
    host: bytes = pack_host("127.0.0.1", 1)
    identity: Identity = field(default_factory=Identity)
    sent: bytearray = field(default_factory=bytearray)
    held: int = 0
    wakes: int = 0
    reason: str | None = None
    encrypted: bool = False
    room: bool = True
    started: list[tuple[Callable[..., Awaitable[None]], tuple[Any, ...]]] = field(default_factory=list)
    client: str = ""
    paced: RecordingPace = field(default_factory=RecordingPace)

    def pace(self) -> RecordingPace:
        return self.paced

    def login_origin(self, client_id: str = "") -> LoginOrigin:
        return LoginOrigin(self.address.rpartition(":")[0], "memory", client_id=client_id)

    def introduce(self, client: str, details: str = "") -> None:
        self.client = self.client or client

    def send(self, *pieces: Buffer) -> None:
        for piece in pieces:
            self.sent += piece

    def take_sent(self) -> bytes:
        """Return the bytes sent since the last call."""
        data = bytes(self.sent)
        self.sent.clear()
        return data

    def hold_until(self, position: int) -> None:
        self.held = max(self.held, position)

    def before_commit(self, work: Callable[[], None]) -> None:
        """Call *work* now, as if the round ended after this request."""
        work()

    def wake(self) -> None:
        self.wakes += 1

    def wake_last(self) -> None:
        self.wakes += 1

    def has_room(self) -> bool:
        return self.room

    def start_tls(self) -> None:
        """Set ``encrypted``, as if the client had begun TLS at once."""
        if self.encrypted:
            raise Refused(Reason.ILLEGAL, "TLS cannot begin; the connection uses TLS or WebSocket already")
        self.encrypted = True

    def start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        self.started.append((work, args))

    async def run_started(self) -> None:
        """Run the started work, one after the other."""
        while self.started:
            work, args = self.started.pop(0)
            await work(*args)

    def close(self, reason: str) -> None:
        self.reason = reason


@final
class Serving:
    """A running broker and its server."""

    def __init__(self, broker: Broker, server: Server, nursery: trio.Nursery) -> None:
        self.broker = broker
        self.server = server
        self.nursery = nursery
        self._connections = 0

    def connect(self, protocol: Protocol, capacity: int = PIPE_BYTES) -> MemoryPeer:
        """Return the client's end of a new connection to *protocol*."""
        self._connections += 1
        peer, transport = memory_transport(capacity)
        port = self._connections
        self.server.serve(protocol, transport, f"127.0.0.1:{port}", pack_host("127.0.0.1", port))
        return peer


@asynccontextmanager
async def serving(
    directory: Path,
    *,
    store: StoreConfig | None = None,
    broker: BrokerConfig | None = None,
    server: ServerConfig | None = None,
    delivery: DeliveryConfig | None = None,
    clock: Clock | None = None,
    disk: Disk | None = None,
    seed: int = 0,
    ports: Callable[[Broker], Sequence[Protocol]] = lambda broker: (),
    projections: Callable[[Broker], Sequence[Projection]] = lambda broker: (),
    services: Callable[[Broker], Sequence[Service]] = lambda broker: (),
    dispatchers: Mapping[str, Dispatcher] | None = None,
) -> AsyncIterator[Serving]:
    """Run a broker on *directory*, and stop it in order at the end of the block.

    It has only the ports of the protocols that *ports* returns, and passes their addresses to ``bound``; it drives the
    projections that *projections* returns, and runs the services that *services* returns. It loads no plugins: call the
    hooks you test. Use it twice with one directory to test a restart.
    """
    clock = clock or SystemClock()
    stats = Stats()
    opened = await Store.open(directory, store or StoreConfig(), clock, disk or RealDisk(), dispatchers=dispatchers)
    try:
        config = Config(broker=broker or BrokerConfig(), delivery=delivery or DeliveryConfig())
        made = build(config, opened, clock, stats, random.Random(seed))
        for projection in projections(made):
            made.projections.add("tested", projection)
        async with trio.open_nursery() as nursery:
            authenticate, now_ms = made.authentication.authenticate, clock.now_ms
            serves = Server(server or ServerConfig(), opened, stats, authenticate, made.turns, now_ms=now_ms)
            made.revocation.logins.append(serves.logins)
            await nursery.start(opened.upkeep.run)
            await made.projections.replay()
            nursery.start_soon(made.projections.run)
            await nursery.start(serves.run, [(protocol, serves.bind(protocol)) for protocol in ports(made)])
            nursery.start_soon(made.tails.run)
            nursery.start_soon(made.cursors.run)
            nursery.start_soon(made.revocation.run)
            nursery.start_soon(made.shared_groups.run)
            nursery.start_soon(made.sessions.expiry.run)
            nursery.start_soon(made.draining.run)
            for service in services(made):
                nursery.start_soon(service)
            yield Serving(made, serves, nursery)
            nursery.cancel_scope.cancel()
        made.projections.save()
        saving.save(made)
    finally:
        with trio.CancelScope(shield=True):
            await opened.close()


def _identity(event: Any) -> Iterable[Any]:
    return (event,)


def check_connection(
    connect: Callable[[], Connection],
    data: bytes,
    expected: Sequence[Any],
    *,
    flatten: Callable[[Any], Iterable[Any]] = _identity,
    seed: int = 0,
) -> None:
    """Assert that *data* makes the events *expected*, however it is cut.

    Feeds it whole, in two pieces cut at every place, byte by byte, and in random pieces. *flatten* splits events that
    cover several requests when these arrive together.
    """
    for pieces in _cuttings(data, random.Random(seed)):
        connection = connect()
        events: list[Any] = []
        for piece in pieces:
            connection.receive_data(piece, 0.0)
            for event in connection.events():
                events.extend(flatten(event))
        if events != list(expected):
            raise AssertionError(f"cut at {[len(piece) for piece in pieces]}: {events!r} instead of {list(expected)!r}")


def _cuttings(data: bytes, source: random.Random) -> Iterable[list[bytes]]:
    yield [data]
    for at in range(1, len(data)):
        yield [data[:at], data[at:]]
    yield [data[at : at + 1] for at in range(len(data))]
    for _ in range(RANDOM_CUTTINGS if len(data) > 2 else 0):
        cuts = sorted(source.sample(range(1, len(data)), min(len(data) - 1, source.randint(1, 8))))
        yield [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
