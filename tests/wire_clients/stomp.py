"""A client of STOMP that sends what a test says, and brokers in this process that serve it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from msgspec.structs import replace
from tests.stored import records_of
from tests.wire_clients.ports import NO_TLS, Port
from tests.wire_clients.streams import WebSocketWire, Wire
from trio.testing import active_thread_count, wait_all_tasks_blocked, wait_all_threads_completed
from wsproto.events import AcceptConnection

from martlet.broker import Broker
from martlet.contracts import Credentials, Identity, LoginOrigin, Password, Protocol
from martlet.errors import Reason, Refused
from martlet.message import Message, Record
from martlet.store import StoreConfig
from martlet.testing.peers import Serving, serving
from martlet_stomp.config import StompConfig
from martlet_stomp.plugin import StompPlugin
from martlet_stomp.wire.codec import Limits, decode_head, encode_frame
from martlet_stomp.wire.packets import Version

ASYNC = StoreConfig(flush="async")
LIMITS = Limits()
V1_0, V1_1, V1_2 = Version


@dataclass(frozen=True)
class Frame:
    """A frame of the broker."""

    command: str
    headers: Mapping[str, str]
    body: bytes

    def __getitem__(self, name: str) -> str:
        return self.headers[name]


Idle = Callable[[], Awaitable[None]]


def frame(command: str, body: bytes = b"", version: Version = V1_2, /, **headers: str) -> bytes:
    """Return a frame; in lower case names of *headers*, ``_`` stands for ``-``."""
    pairs = [(name.replace("_", "-") if name.islower() else name, value) for name, value in headers.items()]
    return encode_frame(command, pairs, body, version)


class StompClient:
    """One connection; keeps MESSAGE frames in ``came`` until they are asked for."""

    def __init__(self, wire: Wire, version: Version = V1_2, idle: Idle = trio.lowlevel.checkpoint) -> None:
        self.wire = wire
        self.version = version
        self._idle = idle
        self._data = b""
        self.came: list[Frame] = []
        self._probes = 0

    async def send(self, *frames: bytes) -> None:
        """Send *frames* at once."""
        await self.wire.send(b"".join(frames))

    def frame(self, command: str, body: bytes = b"", /, **headers: str) -> bytes:
        return frame(command, body, self.version, **headers)

    async def receive(self) -> Frame:
        """Return the next frame. Raises `EOFError` if there is none."""
        while True:
            self._data = self._data.lstrip(b"\n")
            head, blank, rest = self._data.partition(b"\n\n")
            if blank:
                command, headers = decode_head(head, None if head.startswith(b"CONNECTED") else self.version, LIMITS)
                size = int(headers["content-length"]) if "content-length" in headers else rest.find(b"\0")
                if 0 <= size < len(rest):
                    assert rest[size] == 0, self._data
                    self._data = rest[size + 1 :]
                    return Frame(command, headers, rest[:size])
            more = await self.wire.receive_some()
            if not more:
                raise EOFError(f"the broker closed the connection; {self._data!r} is left")
            self._data += more

    async def expect(self, command: str) -> Frame:
        """Return the next frame that is no MESSAGE, which must be *command*."""
        while True:
            found = await self.receive()
            if found.command == command:
                return found
            assert found.command == "MESSAGE", found
            self.came.append(found)

    async def receipt(self, receipt: str) -> None:
        """Wait for RECEIPT, which must be the next frame that is no MESSAGE."""
        assert (await self.expect("RECEIPT"))["receipt-id"] == receipt

    async def messages(self, count: int) -> list[Frame]:
        """Return the next *count* MESSAGE frames."""
        while len(self.came) < count:
            found = await self.receive()
            assert found.command == "MESSAGE", found
            self.came.append(found)
        data, self.came = self.came[:count], self.came[count:]
        return data

    async def some(self, most: int) -> list[Frame]:
        """Return at least one MESSAGE frame, and at most *most* of those that came with other answers."""
        found = await self.messages(1)
        return [*found, *(self.came.pop(0) for _ in range(min(most - 1, len(self.came))))]

    async def bodies(self, count: int) -> list[bytes]:
        return [each.body for each in await self.messages(count)]

    async def rest(self) -> list[Frame]:
        """Return the MESSAGE frames that came until the broker, which is in memory, has nothing left to do."""
        await self._idle()
        self._probes += 1
        probe = f"probe {self._probes}"
        await self.send(self.frame("SUBSCRIBE", id=probe, destination="/topic/probe"))
        await self.send(self.frame("UNSUBSCRIBE", id=probe, receipt=probe))
        await self.receipt(probe)
        found, self.came = self.came, []
        return found

    # frames, with a receipt

    async def subscribe(self, destination: str, ack: str = "auto", name: str = "0", **headers: str) -> None:
        await self.send(
            self.frame("SUBSCRIBE", id=name, destination=destination, ack=ack, receipt=f"sub {name}", **headers)
        )
        await self.receipt(f"sub {name}")

    async def unsubscribe(self, name: str = "0", **headers: str) -> None:
        await self.send(self.frame("UNSUBSCRIBE", id=name, receipt=f"unsub {name}", **headers))
        await self.receipt(f"unsub {name}")

    async def publish(self, destination: str, *bodies: bytes, **headers: str) -> None:
        """Send *bodies*, and wait until they are durable."""
        frames = [self.frame("SEND", body, destination=destination, **headers) for body in bodies[:-1]]
        frames += [self.frame("SEND", bodies[-1], destination=destination, receipt="sent", **headers)]
        await self.send(*frames)
        await self.receipt("sent")

    def settling(self, command: str, message: Frame, **headers: str) -> bytes:
        """Return ACK or NACK for *message*."""
        if self.version is V1_2:
            return self.frame(command, id=message["ack"], **headers)
        return self.frame(command, subscription=message["subscription"], message_id=message["message-id"], **headers)

    async def ack(self, *messages: Frame) -> None:
        await self.send(*[self.settling("ACK", message) for message in messages[:-1]])
        await self.send(self.settling("ACK", messages[-1], receipt="acked"))
        await self.receipt("acked")

    async def nack(self, message: Frame, **headers: str) -> None:
        await self.send(self.settling("NACK", message, receipt="nacked", **headers))
        await self.receipt("nacked")

    # the end

    async def error(self) -> Frame:
        """Return ERROR, after which the broker closes the connection."""
        found = await self.expect("ERROR")
        assert found["content-type"] == "text/plain"
        assert await self.is_closed()
        return found

    async def is_closed(self) -> bool:
        """Wait until the broker closes the connection; False if another frame comes before."""
        try:
            found = await self.receive()
        except EOFError:
            return True
        raise AssertionError(f"{found} came before the end")

    async def disconnect(self) -> None:
        await self.send(self.frame("DISCONNECT", receipt="bye"))
        await self.receipt("bye")
        assert await self.is_closed()

    def hang_up(self) -> None:
        self.wire.close()


class StompBroker:
    """A broker that serves STOMP in memory."""

    def __init__(self, running: Serving, protocol: Protocol, plugin: StompPlugin) -> None:
        self.running = running
        self.broker: Broker = running.broker
        self.context = plugin.context(running.broker)
        self.protocol = protocol
        self.plugin = plugin

    def open(self, version: Version = V1_2) -> StompClient:
        """Return a connection on which nothing was said."""
        return StompClient(self.running.connect(self.protocol), version, self.idle)

    async def answer(self, version: Version = V1_2, **headers: str) -> tuple[StompClient, Frame]:
        """Return a connection, and the answer to CONNECT."""
        talk = self.open(version)
        if version is not V1_0:
            headers = {"accept_version": version.text, "host": "martlet", **headers}
        await talk.send(frame("CONNECT", **headers))
        return talk, await talk.receive()

    async def connect(self, version: Version = V1_2, **headers: str) -> StompClient:
        """Return a connection that the broker has accepted."""
        talk, answer = await self.answer(version, **headers)
        assert (answer.command, answer["version"]) == ("CONNECTED", version.text), answer
        return talk

    async def connect_as(self, user: str) -> StompClient:
        """Return a connection of *user*, who has the own name as passcode; the broker then knows all such users."""
        self.broker.authentication.authenticators = (_believe,)
        return await self.connect(login=user, passcode=user)

    def subscriptions(self) -> int:
        """Return how many subscriptions all clients have."""
        return sum(len(list(client.described_subscriptions())) for client in self.context.clients)

    async def settle(self) -> None:
        """Wait until everything appended is readable."""
        self.broker.store.committer.commit()
        await self.broker.store.flusher.wait_flushed(self.broker.store.appended)

    async def idle(self) -> None:
        """Wait until the broker has sent all that it can send: no thread works, all tasks wait, nothing is appended."""
        end = -1
        while end != self.broker.store.appended or active_thread_count():
            end = self.broker.store.appended
            await self.settle()
            await wait_all_threads_completed()
            await wait_all_tasks_blocked()

    def records(self, topic: str) -> list[Record]:
        """Return the stored messages of *topic*, queue by queue."""
        return records_of(self.broker.store, topic)

    async def publish(self, topic: str, body: bytes, properties: bytes = b"", **more: Any) -> None:
        """Store a message as another protocol does."""
        self.broker.publish(Message(topic, body, properties, **more))
        await self.settle()


def _believe(credentials: Credentials, origin: LoginOrigin) -> Identity:
    if not isinstance(credentials, Password) or credentials.password != credentials.user.encode():
        raise Refused(Reason.CREDENTIALS, "the passcode is wrong")
    return Identity(credentials.user)


async def connected(wire: Wire, **headers: str) -> tuple[StompClient, Frame]:
    """Send CONNECT, and return the answer."""
    talk = StompClient(wire, V1_2)
    await talk.send(frame("CONNECT", accept_version="1.2", host="h", **headers))
    return talk, await talk.receive()


async def websocket(wire: Wire, *, text: bool) -> WebSocketWire:
    """Return an open WebSocket over *wire*."""
    found = WebSocketWire(wire, text=text)
    answer = await found.shake_hands("v10.stomp", "v11.stomp", "v12.stomp")
    assert isinstance(answer, AcceptConnection), answer
    return found


@asynccontextmanager
async def stomp_broker(
    directory: Path,
    config: StompConfig | None = None,
    *,
    store: StoreConfig = ASYNC,
    port: Port | None = None,
    **options: Any,
) -> AsyncIterator[StompBroker]:
    """Run a broker in memory, on *port* as well if it is given."""
    plugin = StompPlugin(replace(config or StompConfig(), listen="127.0.0.1:0"))
    options.setdefault("services", plugin.martlet_services)
    if port is not None:
        options["ports"] = lambda broker: (plugin.protocol(broker, port.bound),)
    async with serving(directory, store=store, **options) as running:
        yield StompBroker(running, plugin.protocol(running.broker), plugin)


class StompPort(Port):
    """The STOMP port of a broker."""

    broker: StompBroker


@asynccontextmanager
async def stomp_port(
    directory: Path, tls: Mapping[str, str] = NO_TLS, config: StompConfig | None = None
) -> AsyncIterator[StompPort]:
    """Run a broker with a port; *tls* are the keys of its certificates, as `Port.settings` takes them."""
    port = StompPort(directory)
    config = replace(config or StompConfig(), **port.settings(tls))
    async with stomp_broker(directory / "data", config, port=port) as port.broker:
        yield port
        port.close()
