"""A RocketMQ client on a broker in memory that also serves MQTT."""

from typing import final

import orjson
from tests.wire_clients.remoting import RemotingClient

from martlet.broker import Broker
from martlet.contracts import Protocol
from martlet.message import Record, decode_properties, encode_properties
from martlet.testing.peers import Serving
from martlet_remoting.config import RemotingConfig
from martlet_remoting.plugin import RemotingPlugin
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

REPLY_TOPIC = "DefaultCluster_REPLY_TOPIC"


def remoting_of(broker: Broker) -> Protocol:
    """Return the remoting port of *broker*, made as at its start."""
    plugin = RemotingPlugin(RemotingConfig(vip=False))
    protocol = plugin.martlet_protocols(broker)[0]
    plugin.state.set_store_host(bytes((127, 0, 0, 1, 0, 0, 0, 1)))
    return protocol


@final
class RemotingTalk:
    """A scripted connection that keeps the requests of the broker."""

    def __init__(self, running: Serving, protocol: Protocol) -> None:
        wire = running.connect(protocol)
        self._client = RemotingClient(wire.send, wire.receive_some)
        self.ask = self._client.ask

    async def introduce(self, client_id: str) -> None:
        """Be a producer."""
        body = {"clientID": client_id, "producerDataSet": [{"groupName": "P"}]}
        assert (await self.ask(RequestCode.HEART_BEAT, {}, orjson.dumps(body))).code == 0

    async def send(
        self,
        topic: str,
        body: bytes,
        properties: dict[str, str],
        code: int = RequestCode.SEND_MESSAGE_V2,
        queue: int = 0,
    ) -> Command:
        """Send one message and return the answer."""
        ext: dict[str, object] = {
            "a": "P",
            "b": topic,
            "c": "TBW102",
            "d": 4,
            "e": queue,
            "f": 0,
            "g": 5,
            "h": 0,
            "i": encode_properties(properties).decode(),
            "j": 0,
            "k": False,
        }
        return await self.ask(code, ext, body)

    async def reply(self, request: dict[str, str], body: bytes, **more: str) -> Command:
        """Answer a request with the properties *request*, as RocketMQ's MessageUtil.createReplyMessage does."""
        own = {name: request[name] for name in ("CORRELATION_ID", "REPLY_TO_CLIENT", "TTL")}
        topic = f"{request['CLUSTER']}_REPLY_TOPIC"
        return await self.send(topic, body, {**own, "MSG_TYPE": "reply", **more}, RequestCode.SEND_REPLY_MESSAGE_V2)

    async def pushed(self) -> tuple[Command, dict[str, str]]:
        """Wait for a reply that the broker pushes, take it, and return it with its properties."""
        client = self._client
        command = client.asked.pop(0) if client.asked else await client.receive()
        assert command.code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, command
        await client.send_command(Command(0, {}, b"", command.opaque, 1))
        return command, decode_properties(str(command.ext["properties"]).encode())


def properties_of(record: Record) -> dict[str, str]:
    return decode_properties(record.properties)
