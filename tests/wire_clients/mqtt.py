"""A client of MQTT that sends what a test says, and brokers in this process that serve it."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio
from msgspec.structs import replace
from tests.broker_process import BrokerProcess, small_store
from tests.wire_clients.ports import NO_TLS, Port
from tests.wire_clients.streams import Wire

from martlet.broker import Broker
from martlet.contracts import Protocol
from martlet.store import StoreConfig
from martlet.testing.peers import Serving, serving
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.plugin import MqttPlugin
from martlet_mqtt.session.client import Client
from martlet_mqtt.wire.codec import decode_packet, encode_packet, packet_bytes
from martlet_mqtt.wire.codes import V4, V5, PacketType, ReasonCode
from martlet_mqtt.wire.packets import (
    Ack,
    Connack,
    Connect,
    Disconnect,
    FilterSubscription,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from martlet_mqtt.wire.properties import NO_PROPERTIES, Properties, Property

__all__ = ["ASYNC", "V4", "V5", "MqttBroker", "MqttClient", "MqttPort", "leave"]
__all__ += ["mqtt_broker", "mqtt_port", "mqtt_process"]

ASYNC = StoreConfig(flush="async")
P = TypeVar("P")


class MqttClient:
    """One connection; keeps PUBLISH packets until they are asked for."""

    def __init__(self, wire: Wire, version: int = V5) -> None:
        self.wire = wire
        self.version = version
        self._came: list[Publish] = []

    async def send(self, *packets: Packet) -> None:
        """Send *packets* at once."""
        await self.wire.send(b"".join(encode_packet(packet, self.version) for packet in packets))

    async def receive(self) -> Packet:
        """Return the next packet."""
        data = await self.wire.receive_exactly(2)
        while data[-1] > 127:
            data += await self.wire.receive_exactly(1)
        rest = await self.wire.receive_exactly(packet_bytes(data, 0) - len(data))
        return decode_packet(data[0], rest, self.version)

    async def expect(self, kind: type[P]) -> P:
        """Return the next packet that is no PUBLISH, which must be of *kind*."""
        while True:
            packet = await self.receive()
            if isinstance(packet, kind):
                return packet
            assert isinstance(packet, Publish), packet
            self._came.append(packet)

    async def messages(self, count: int) -> list[Publish]:
        """Return the next *count* PUBLISH packets."""
        while len(self._came) < count:
            packet = await self.receive()
            assert isinstance(packet, Publish), packet
            self._came.append(packet)
        found, self._came = self._came[:count], self._came[count:]
        return found

    async def payloads(self, count: int) -> list[bytes]:
        return [packet.payload for packet in await self.messages(count)]

    async def rest(self) -> list[Publish]:
        """Return what came until PINGREQ is answered."""
        await self.send(Pingreq())
        await self.expect(Pingresp)
        found, self._came = self._came, []
        return found

    async def subscribe(self, *filters: str | FilterSubscription, qos: int = 2, identifier: int = 0) -> tuple[int, ...]:
        """Subscribe to *filters*, and return the codes of the answer."""
        wanted = [each if isinstance(each, FilterSubscription) else FilterSubscription(each, qos) for each in filters]
        properties = Properties({}, (), (identifier,)) if identifier else NO_PROPERTIES
        await self.send(Subscribe(99, tuple(wanted), properties))
        answer = await self.expect(Suback)
        assert answer.packet_id == 99
        return answer.codes

    async def unsubscribe(self, *filters: str) -> tuple[int, ...]:
        await self.send(Unsubscribe(98, filters))
        return (await self.expect(Unsuback)).codes

    async def publish(self, topic: str, payload: bytes = b"", qos: int = 0, packet_id: int = 1, **more: Any) -> int:
        """Publish one message, to the end of its exchange; return the reason of the first answer."""
        await self.send(Publish(topic, payload, qos, packet_id=packet_id if qos else 0, **more))
        if not qos:
            return 0
        answer = await self.expect(Ack)
        assert (answer.kind, answer.packet_id) == (PacketType.PUBACK if qos == 1 else PacketType.PUBREC, packet_id)
        if qos == 2 and answer.reason < ReasonCode.UNSPECIFIED_ERROR:
            await self.send(Ack(PacketType.PUBREL, packet_id))
            done = await self.expect(Ack)
            assert (done.kind, done.packet_id) == (PacketType.PUBCOMP, packet_id)
        return answer.reason

    async def acknowledge(self, packet: Publish) -> None:
        """Answer *packet*, to the end of its exchange."""
        if packet.qos == 1:
            await self.send(Ack(PacketType.PUBACK, packet.packet_id))
        elif packet.qos == 2:
            await self.send(Ack(PacketType.PUBREC, packet.packet_id))
            answer = await self.expect(Ack)
            assert (answer.kind, answer.packet_id) == (PacketType.PUBREL, packet.packet_id)
            await self.send(Ack(PacketType.PUBCOMP, packet.packet_id))

    async def closed(self) -> Packet | None:
        """Wait until the broker closes the connection; return its last packet."""
        last: Packet | None = None
        while True:
            try:
                last = await self.receive()
            except EOFError:
                return last

    async def disconnect(self, reason: int = 0, properties: Properties = NO_PROPERTIES) -> None:
        await self.send(Disconnect(reason, properties))
        assert await self.closed() is None

    def hang_up(self) -> None:
        self.wire.close()


class MqttBroker:
    """A broker that serves MQTT in memory."""

    def __init__(self, running: Serving, protocol: Protocol, plugin: MqttPlugin) -> None:
        self.running = running
        self.broker: Broker = running.broker
        self.context = plugin.context(running.broker)
        self.wills = plugin._wills_of(running.broker)
        self.protocol = protocol

    def open(self, version: int = V5) -> MqttClient:
        """Return a connection on which nothing was said."""
        return MqttClient(self.running.connect(self.protocol), version)

    async def answer(self, connect: Connect) -> tuple[MqttClient, Connack]:
        talk = self.open(connect.version)
        await talk.send(connect)
        return talk, await talk.expect(Connack)

    async def connect(
        self,
        client_id: str = "",
        version: int = V5,
        *,
        clean: bool = True,
        expiry_s: int = 0,
        present: bool | None = None,
        values: dict[Property, Any] | None = None,
        **more: Any,
    ) -> MqttClient:
        """Return a connection that the broker has accepted."""
        found = dict(values or {})
        if expiry_s and version == V5:
            found[Property.SESSION_EXPIRY] = expiry_s
        talk, answer = await self.answer(
            Connect(client_id, version, clean, properties=Properties(found) if version == V5 else NO_PROPERTIES, **more)
        )
        assert answer.reason == ReasonCode.SUCCESS, answer
        assert present is None or answer.session_present == present
        return talk

    def client(self, client_id: str) -> Client:
        """Return the broker's part of a connected client."""
        found = self.context.clients[client_id]
        assert isinstance(found, Client)
        return found

    async def settle(self) -> None:
        """Wait until everything appended is readable."""
        self.broker.store.committer.commit()
        await self.broker.store.flusher.wait_flushed(self.broker.store.appended)


async def leave(mqtt: MqttBroker, talk: MqttClient, client_id: str) -> None:
    """Break the connection of *talk*, and wait until the broker has noticed."""
    talk.hang_up()
    while client_id in mqtt.context.clients:
        await trio.lowlevel.checkpoint()


@asynccontextmanager
async def mqtt_broker(
    directory: Path,
    config: MqttConfig | None = None,
    *,
    store: StoreConfig = ASYNC,
    port: Port | None = None,
    **options: Any,
) -> AsyncIterator[MqttBroker]:
    """Run a broker in memory, on *port* as well if it is given."""
    plugin = MqttPlugin(replace(config or MqttConfig(), listen="127.0.0.1:0"))
    if port is not None:
        options["ports"] = lambda broker: (plugin.protocol(broker, port.bound),)
    services: Callable[[Broker], Any] = plugin.martlet_services
    async with serving(
        directory, store=store, projections=plugin.martlet_projections, services=services, **options
    ) as running:
        yield MqttBroker(running, plugin.protocol(running.broker), plugin)


class MqttPort(Port):
    """The MQTT port of a broker."""

    broker: MqttBroker


@asynccontextmanager
async def mqtt_port(directory: Path, tls: Mapping[str, str] = NO_TLS) -> AsyncIterator[MqttPort]:
    """Run a broker with a port; *tls* are the keys of its certificates, as `Port.settings` takes them."""
    port = MqttPort(directory)
    config = replace(MqttConfig(), **port.settings(tls))
    async with mqtt_broker(directory / "data", config, port=port) as port.broker:
        yield port
        port.close()


def mqtt_process(folder: Path, flush: str, hours: int = 0) -> BrokerProcess:
    """Start a broker with timers in a process of its own, which a test kills; its clock is *hours* ahead."""
    settings = {"plugins.enabled": '["mqtt", "timer"]', "mqtt.in_flight_max": 20}
    return BrokerProcess(folder, {**settings, **small_store(flush=flush, flush_interval_ms=20)}, hours=hours)
