"""Clients of RocketMQ's remoting protocol that send what a test says: no retry, no reconnect, nothing hidden."""

import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

import orjson
from tests.remoting.conftest import pull_ext, send_ext

from martlet.broker import Broker
from martlet.contracts import Protocol
from martlet.message import decode_properties, encode_properties
from martlet.net.addresses import split_address
from martlet.testing.peers import Serving
from martlet_remoting.config import RemotingConfig
from martlet_remoting.plugin import RemotingPlugin
from martlet_remoting.wire.codec import FrameBuffer, encode_command
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

PATIENCE_S = 180.0
REPLY_TOPIC = "DefaultCluster_REPLY_TOPIC"


class RemotingClient:
    """One connection; ``asked`` are the requests of the broker that came while an answer was waited for.

    *receive_bytes* returns nothing if the broker has closed the connection.
    """

    def __init__(
        self, send_bytes: Callable[[bytes], Awaitable[None]], receive_bytes: Callable[[], Awaitable[bytes]]
    ) -> None:
        self._send_bytes = send_bytes
        self._receive_bytes = receive_bytes
        self._frames = FrameBuffer()
        self._opaque = 0
        self.asked: list[Command] = []

    @classmethod
    def of(cls, running: Serving, port: Protocol) -> Self:
        """Return a new connection to *port* of a broker in memory."""
        wire = running.connect(port)
        return cls(wire.send, wire.receive_some)

    async def send(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> int:
        """Send a request and return its number."""
        self._opaque += 1
        await self.send_command(Command(code, ext, body, self._opaque))
        return self._opaque

    async def send_command(self, *commands: Command) -> None:
        """Send commands that the broker reads at once."""
        await self._send_bytes(b"".join(map(encode_command, commands)))

    async def receive(self) -> Command:
        """Return the next command.

        Raises:
          EOFError: the broker has closed the connection.
        """
        while (command := self._frames.next_command()) is None:
            data = await self._receive_bytes()
            if not data:
                raise EOFError("the broker closed the connection")
            self._frames.receive_data(data)
        return command

    async def ask(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> Command:
        """Send a request and return its answer."""
        number = await self.send(code, ext, body)
        while (command := await self.receive()).opaque != number or not command.is_response:
            if not command.is_response:
                self.asked.append(command)
        return command

    async def introduce(self, client_id: str) -> None:
        """Be a producer."""
        body = {"clientID": client_id, "producerDataSet": [{"groupName": "P"}]}
        assert (await self.ask(RequestCode.HEART_BEAT, {}, orjson.dumps(body))).code == 0

    async def publish(
        self, topic: str, body: bytes, properties: Mapping[str, str], code: int = RequestCode.SEND_MESSAGE_V2
    ) -> Command:
        """Send one message and return the answer."""
        return await self.ask(code, send_ext(topic, 0, encode_properties(properties).decode()), body)

    async def reply(self, request: Mapping[str, str], body: bytes, **more: str) -> Command:
        """Answer a request with the properties *request*, as RocketMQ's MessageUtil.createReplyMessage does."""
        own = {name: request[name] for name in ("CORRELATION_ID", "REPLY_TO_CLIENT", "TTL")}
        topic = f"{request['CLUSTER']}_REPLY_TOPIC"
        return await self.publish(topic, body, {**own, "MSG_TYPE": "reply", **more}, RequestCode.SEND_REPLY_MESSAGE_V2)

    async def pushed(self) -> tuple[Command, dict[str, str]]:
        """Wait for a reply that the broker pushes, take it, and return it with its properties."""
        command = self.asked.pop(0) if self.asked else await self.receive()
        assert command.code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, command
        await self.send_command(Command(0, {}, b"", command.opaque, 1))
        return command, decode_properties(str(command.ext["properties"]).encode())


class BlockingRemotingClient:
    """One connection; `send` and `receive` are apart, so that requests can be under way when the broker dies."""

    def __init__(self, address: str) -> None:
        self.socket = socket.create_connection(split_address(address), PATIENCE_S)
        self._frames = FrameBuffer()

    def send(self, command: Command) -> None:
        self.socket.sendall(encode_command(command))

    def receive(self) -> Command:
        """Return the next answer.

        Raises:
          ConnectionError: the broker is gone.
        """
        while (command := self._frames.next_command()) is None:
            data = self.socket.recv(65536)
            if not data:
                raise ConnectionError("the broker closed the connection")
            self._frames.receive_data(data)
        return command

    def ask(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> Command:
        self.send(Command(code, ext, body, opaque=0))
        return self.receive()

    def pull(self, topic: str, queue_id: int, offset: int, hold_ms: int = 0) -> Command:
        """Return the answer of a pull that the broker holds for *hold_ms* if there is no message."""
        how = {"sysFlag": 6 if hold_ms else 4, "suspendTimeoutMillis": hold_ms}
        return self.ask(RequestCode.PULL_MESSAGE, pull_ext(topic, offset, queue_id, **how))

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def send_request(topic: str, queue_id: int, key: str, body: bytes, opaque: int, light: Sequence[str] = ()) -> Command:
    """Return a SEND_MESSAGE_V2 of one message, which names the topics *light*."""
    properties = {"UNIQ_KEY": key, "TAGS": "A", "INNER_MULTI_DISPATCH": ",".join(light)}
    ext = send_ext(topic, queue_id, encode_properties(properties).decode())
    return Command(RequestCode.SEND_MESSAGE_V2, ext, body, opaque)


def remoting_of(broker: Broker, **settings: Any) -> Protocol:
    """Return the remoting port of *broker*, made as at its start."""
    plugin = RemotingPlugin(RemotingConfig(listen="127.0.0.1:0", vip=False, **settings))
    protocol = plugin.martlet_protocols(broker)[0]
    plugin.state.set_store_host(bytes((127, 0, 0, 1, 0, 0, 0, 1)))
    return protocol
