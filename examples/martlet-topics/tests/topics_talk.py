"""A client for the tests: one connection, and what came over it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import trio
from msgspec.structs import replace

from martlet.broker import Broker
from martlet.contracts import Protocol as Served
from martlet.sessions.sessions import Sessions
from martlet.store import StoreConfig
from martlet.testing.peers import MemoryPeer, Serving, serving
from martlet_topics.codec import encode_frame
from martlet_topics.config import TopicsConfig
from martlet_topics.plugin import TopicsPlugin

ASYNC = StoreConfig(flush="async")


class Wire(Protocol):
    """The client's end of a connection."""

    async def send(self, data: bytes) -> None: ...

    async def receive_line(self) -> bytes: ...

    async def receive_exactly(self, size: int) -> bytes: ...

    def close(self) -> None: ...


class SocketPeer:
    """The same over a real socket."""

    def __init__(self, stream: trio.SocketStream) -> None:
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
        self._stream.socket.close()


@dataclass(frozen=True)
class Came:
    """A message; ``packet_id`` is 0 at QoS 0."""

    name: str
    body: bytes
    packet_id: int = 0
    is_again: bool = False


def frames(*messages: tuple[str, bytes]) -> bytes:
    return b"".join(encode_frame(name.encode(), body) for name, body in messages)


def run(first_id: int, *messages: tuple[str, bytes], verb: str = "RUN", then: str = "") -> bytes:
    data = frames(*messages)
    return f"{verb} {first_id} {len(messages)} {len(data)}{then}\n".encode() + data


class Talk:
    """One connection."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._came: list[Came] = []

    async def say(self, *lines: str) -> None:
        await self.wire.send("".join(f"{line}\n" for line in lines).encode())

    async def publish(self, first_id: int, *messages: tuple[str, bytes], **options: str) -> None:
        await self.wire.send(run(first_id, *messages, **options))

    async def line(self) -> str:
        """Return the next line that is not about messages."""
        while True:
            line = (await self.wire.receive_line()).decode()
            if not line.startswith("RUN "):
                return line
            await self._take(line)

    async def _take(self, line: str) -> None:
        words = line.split()
        first, count, size = map(int, words[1:4])
        data, at = await self.wire.receive_exactly(size), 0
        for index in range(count):
            newline = data.index(b"\n", at)
            name, _, length = data[at:newline].partition(b" ")
            at = newline + 2 + int(length)
            body = data[newline + 1 : at - 1]
            self._came.append(Came(name.decode(), body, first and first + index, words[4:] == ["again"]))
        assert at == len(data)

    async def messages(self, count: int) -> list[Came]:
        """Wait for *count* messages."""
        while len(self._came) < count:
            line = (await self.wire.receive_line()).decode()
            assert line.startswith("RUN "), line
            await self._take(line)
        came, self._came = self._came[:count], self._came[count:]
        return came

    async def bodies(self, count: int) -> list[bytes]:
        return [each.body for each in await self.messages(count)]

    async def ask(self, *lines: str) -> str:
        """Say *lines* and return the answer to the last."""
        answer = ""
        for line in lines:
            await self.say(line)
            answer = await self.line()
        return answer

    async def rest(self) -> list[Came]:
        """What has come and is not taken, up to the answer of a PING; and no more may come."""
        assert await self.ask("PING") == "PONG"
        came, self._came = self._came, []
        return came

    def hang_up(self) -> None:
        self.wire.close()


class Running:
    """A broker with the protocol, in memory or on sockets."""

    def __init__(self, running: Serving, protocol: Served) -> None:
        self.running = running
        self.broker: Broker = running.broker
        self.sessions: Sessions = running.broker.sessions
        self._protocol = protocol

    async def connect(self, name: str = "", expected: str = "") -> Talk:
        """Return a connection that has said HELLO."""
        peer: MemoryPeer = self.running.connect(self._protocol)
        talk = Talk(peer)
        answer = await talk.ask(f"HELLO {name}")
        assert answer == expected or (not expected and answer in ("OK new", "OK old")), answer
        return talk

    async def settle(self) -> None:
        """Wait until everything appended is applied."""
        self.broker.store.committer.commit()
        await self.broker.store.flusher.wait_flushed(self.broker.store.appended)
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def topics_broker(
    directory: Path, config: TopicsConfig | None = None, *, store: StoreConfig = ASYNC, **options: Any
) -> AsyncIterator[Running]:
    plugin = TopicsPlugin(replace(config or TopicsConfig(), listen="127.0.0.1:0"))
    async with serving(directory, store=store, **options) as running:
        yield Running(running, plugin.protocol(running.broker))
