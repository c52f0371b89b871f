"""A client for the tests: says lines, and takes apart what comes."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import trio

from martlet.broker import Broker
from martlet.contracts import Protocol as Served
from martlet.settings import DeliveryConfig
from martlet.store import Disk, StoreConfig
from martlet.testing.peers import MemoryPeer, Serving, serving
from martlet_line.codec import Received, decode_batch
from martlet_line.config import LineConfig
from martlet_line.plugin import protocol

ASYNC = StoreConfig(flush="async")


class Wire(Protocol):
    """The client's end of a connection."""

    async def send(self, data: bytes) -> None: ...

    async def receive_line(self) -> bytes: ...

    async def receive_exactly(self, size: int) -> bytes: ...

    def close(self) -> None: ...


class SocketPeer:
    """The same over a real socket."""

    def __init__(self, stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]) -> None:
        self._stream = stream
        self._rest = b""

    async def send(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def receive_line(self) -> bytes:
        while b"\n" not in self._rest:
            await self._more()
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    async def receive_exactly(self, size: int) -> bytes:
        while len(self._rest) < size:
            await self._more()
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    async def _more(self) -> None:
        data = await self._stream.receive_some()
        if not data:
            raise EOFError(f"the server closed in {self._rest!r}")
        self._rest += data

    def close(self) -> None:
        stream = self._stream.transport_stream if isinstance(self._stream, trio.SSLStream) else self._stream
        stream.socket.close()


class Talk:
    """One connection."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    async def say(self, *lines: str | bytes) -> None:
        for line in lines:
            await self.wire.send((line.encode() if isinstance(line, str) else line) + b"\n")

    async def line(self) -> str:
        return (await self.wire.receive_line()).decode()

    async def ask(self, *lines: str | bytes) -> str:
        """Say *lines* and return the next line that comes."""
        await self.say(*lines)
        return await self.line()

    async def batch(self, number: int = 1, delivery: int = 1) -> list[Received]:
        """Return the messages of the next line, which must be a BATCH of subscription *number*."""
        words = (await self.line()).split()
        assert words[:2] == ["BATCH", str(number)], words
        assert words[4:] == ([f"delivery={delivery}"] if delivery > 1 else []), words
        found = decode_batch(await self.wire.receive_exactly(int(words[3])))
        assert len(found) == int(words[2])
        return found

    async def messages(self, count: int, number: int = 1, delivery: int = 1) -> list[Received]:
        """Return the next *count* messages, in however many batches."""
        found: list[Received] = []
        while len(found) < count:
            found += await self.batch(number, delivery)
        assert len(found) == count
        return found

    async def bodies(self, count: int, number: int = 1, delivery: int = 1) -> list[str]:
        return [message.body.decode() for message in await self.messages(count, number, delivery)]

    async def quiet(self) -> None:
        """Assert that nothing is on its way to us."""
        assert await self.ask("PING still there") == "PONG still there"

    async def end(self) -> str:
        """Return what comes before the server closes."""
        said = []
        try:
            while True:
                said.append(await self.line())
        except EOFError:
            return "\n".join(said)


class Room:
    """A running broker with the line protocol."""

    def __init__(self, running: Serving, config: LineConfig) -> None:
        self.running = running
        self.broker: Broker = running.broker
        self.protocol: Served = protocol(config, running.broker)

    def connect(self, capacity: int = 65536) -> Talk:
        return Talk(self.memory(capacity))

    def memory(self, capacity: int = 65536) -> MemoryPeer:
        return self.running.connect(self.protocol, capacity)


Open = Callable[..., AbstractAsyncContextManager[Room]]


@asynccontextmanager
async def room(
    directory: Path,
    config: LineConfig | None = None,
    store: StoreConfig = ASYNC,
    delivery: DeliveryConfig | None = None,
    disk: Disk | None = None,
) -> AsyncIterator[Room]:
    async with serving(directory, store=store, delivery=delivery, disk=disk) as running:
        yield Room(running, config or LineConfig(idle_s=0))
