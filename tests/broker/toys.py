"""A minimal line protocol, a store that is only a number, and a server that uses both."""

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast, final

import trio

from martlet.contracts import Buffer, Connection, Peer, Protocol
from martlet.errors import MartletError, Refused, RemoteProtocolError
from martlet.net.server import Server
from martlet.runtime.stats import Stats
from martlet.settings import ServerConfig
from martlet.store import Store
from martlet.testing.links import Caller, Conditions, MemoryLink


@final
class ToyStore:
    """The log as the server sees it: what is appended, and up to where it may be seen."""

    def __init__(self) -> None:
        self.readable = 0
        self.written = 0
        self.commits = 0
        self._error: MartletError | None = None
        self.on_commit_wanted: Callable[[], None] | None = None
        self.on_moved: list[Callable[[], None]] = []
        self.committer = self.flusher = self.sync = self.readable_end = self  # as far as the server needs these parts

    def append(self) -> None:
        if self.on_commit_wanted is not None:
            self.on_commit_wanted()

    def want_durable(self, position: int) -> None:
        pass

    def watch(self, watcher: object) -> None:
        pass

    def unwatch(self) -> None:
        pass

    def commit(self) -> None:
        self.commits += 1
        error, self._error = self._error, None
        if error is not None:
            raise error

    def fail_commit(self, error: MartletError) -> None:
        """Let the next commit fail."""
        self._error = error

    def flush_to(self, position: int) -> None:
        self.readable = position
        for tell in self.on_moved:
            tell()


@final
class Lines:
    """Splits bytes into lines; a line over 1,000 bytes is an error, a silence over *silence_s* too."""

    def __init__(self, silence_s: float = math.inf, *, moves: bool = True) -> None:
        self._silence_s = silence_s
        self._moves = moves
        self._data = b""
        self._heard = trio.current_time()
        self.timeouts = 0

    @property
    def buffered_bytes(self) -> int:
        return len(self._data)

    def receive_data(self, data: bytes, now: float) -> None:
        self._data += data
        self._heard = now

    def events(self) -> Iterable[str]:
        while b"\n" in self._data:
            line, _, self._data = self._data.partition(b"\n")
            yield line.decode()
        if len(self._data) > 1000:
            raise RemoteProtocolError("a line is over 1000 bytes")

    def farewell(self, error: Exception) -> bytes:
        return f"error {error}\n".encode()

    def deadline(self) -> float:
        return self._heard + self._silence_s

    def handle_timeout(self, now: float) -> None:
        self.timeouts += 1
        if self._moves:
            self._heard = now
        raise RemoteProtocolError("silent for too long")


@final
class Toy:
    """Does what the lines say: ``echo TEXT``, ``hold POSITION TEXT``, ``fill BYTES`` and so on."""

    def __init__(self, world: "World", peer: Peer, connection: Connection) -> None:
        self.world = world
        self.peer = peer
        self.connection = connection
        self.collected = 0
        self.to_push = 0
        self.ended: list[str] = []
        world.toys.append(self)

    def handle(self, event: str) -> Awaitable[None] | None:
        self.world.handled.append(event)
        verb, _, rest = event.partition(" ")
        return cast("Awaitable[None] | None", getattr(self, f"do_{verb}")(rest))

    def do_echo(self, text: str) -> None:
        self.peer.send(text.encode(), b"\n")

    def do_hold(self, rest: str) -> None:
        position, _, text = rest.partition(" ")
        self.world.store.append()
        self.peer.hold_until(int(position))
        self.do_echo(text)

    def do_fill(self, size: str) -> None:
        self.peer.send(bytes(int(size)))

    def do_parts(self, count: str) -> None:
        self.peer.send(*(b"%d " % i for i in range(int(count))), b"\n")

    def do_bye(self, text: str) -> None:
        self.do_echo(text)
        self.peer.close("it said bye")

    def do_tls(self, text: str) -> None:
        """Send *text*, begin TLS, and send *text* again."""
        self.do_echo(text)
        self.peer.start_tls()
        self.do_echo(text)

    def do_bad(self, text: str) -> None:
        raise RemoteProtocolError(text)

    def do_wrong(self, text: str) -> None:
        raise MartletError(text)

    def do_break(self, text: str) -> None:
        raise RuntimeError(text)

    def do_push(self, count: str) -> None:
        self.to_push += int(count)
        self.peer.wake()

    def do_wake(self, times: str) -> None:
        for _ in range(int(times)):
            self.peer.wake()

    def do_others(self, rest: str) -> None:
        for toy in self.world.toys:
            if toy is not self:
                toy.peer.wake()

    def do_pause(self, seconds: str) -> None:
        self.peer.pace().slow_reading(trio.current_time() + float(seconds))

    def do_blink(self, rest: str) -> None:
        """Pause, and do not."""
        self.do_pause("100")
        self.peer.pace().shorten(0.0, 0.0)

    def do_rest(self, seconds: str) -> None:
        self.peer.pace().slow_delivery(trio.current_time() + float(seconds))

    def do_slowly(self, text: str) -> None:
        self.peer.start(self.world.work, self, text)

    def do_long(self, text: str) -> Awaitable[None]:
        return self.world.work(self, text)

    def refuse(self, answer: Buffer, refused: Refused) -> Buffer | None:
        return b"refused: " if answer != b"lost" else None

    def collect(self, budget_bytes: int) -> None:
        self.collected += 1
        self.world.collects += 1
        self.world.on_collect(self)
        if self.to_push:
            self.to_push -= 1
            self.peer.send(bytes(min(budget_bytes, self.world.push_bytes)))
        if self.to_push:
            self.peer.wake()

    def closed(self, reason: str) -> None:
        self.ended.append(reason)
        self.world.reasons.append(reason)
        self.world.on_closed(self)


def nothing(toy: Toy) -> None:
    """Do nothing."""


async def answer_later(toy: Toy, text: str) -> None:
    await trio.sleep(1)
    toy.do_echo(text)


@dataclass
class World:
    """What happened in a server with toys."""

    toys: list[Toy] = field(default_factory=list)
    handled: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    collects: int = 0
    push_bytes: int = 1000
    store: ToyStore = field(default_factory=ToyStore)
    on_collect: Callable[[Toy], None] = nothing
    on_closed: Callable[[Toy], None] = nothing
    work: Callable[[Toy, str], Awaitable[None]] = answer_later
    connect: Callable[[], Connection] = Lines
    addresses: list[str] = field(default_factory=list)
    clock: Callable[[], float] = lambda: 0.0
    now_ms: Callable[[], int] = lambda: 0
    server: Server = field(init=False)

    def protocol(self, **options: object) -> Protocol:
        options.setdefault("connect", lambda now: self.connect())
        options.setdefault("handle", lambda peer, connection: Toy(self, peer, connection))
        return Protocol(name="toy", listen="127.0.0.1:0", bound=self.addresses.append, **options)  # type: ignore[arg-type]

    def dial(
        self, conditions: Conditions | None = None, protocol: Protocol | None = None, host: bytes = bytes(4)
    ) -> tuple[Caller, MemoryLink]:
        """Connect one more peer by a link, from the address *host*."""
        link = MemoryLink(conditions)
        self.server.serve(protocol or self.protocol(), link.far, f"peer-{len(self.toys)}", host + bytes(4))
        return Caller(link.near), link

    def statistic(self, name: str) -> int:
        return cast(int, self.server.statistics()[name])


@asynccontextmanager
async def toy_server(
    config: ServerConfig | None = None, protocol: Protocol | None = None, world: World | None = None
) -> AsyncGenerator[World]:
    """A running server; with *protocol* it listens on a loopback port."""
    world = world or World()
    store, now_ms = cast(Store, world.store), world.now_ms
    world.server = Server(config or ServerConfig(), store, Stats(), clock=world.clock, now_ms=now_ms)
    bound = [(protocol, world.server.bind(protocol))] if protocol else []
    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            await nursery.start(world.server.run, bound)
            yield world
            nursery.cancel_scope.cancel()
