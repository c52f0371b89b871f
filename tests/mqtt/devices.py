"""Clients that obey the specification over all crashes: a publisher and a durable subscriber (MQTT 5 section 4.4)."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio
from msgspec.structs import replace
from tests.wire_clients.mqtt import MqttClient

from martlet_mqtt.wire.codes import PacketType
from martlet_mqtt.wire.packets import Ack, Connack, Connect, Disconnect, FilterSubscription, Publish, Suback, Subscribe
from martlet_mqtt.wire.properties import Properties, Property

NAMES = ("a/1", "a/2", "b/1/c", "b/2")
EXPIRY = Properties({Property.SESSION_EXPIRY: 100_000})


@dataclass
class Sender:
    """Publishes numbered messages of QoS 1 and 2; ``stored`` has those that the broker has acknowledged."""

    chance: random.Random
    name: str = "sender"
    number: int = 0
    limit: float = math.inf  # the last number to publish
    stored: dict[bytes, int] = field(default_factory=dict)
    # In the order of the first PUBLISH: by identifier what was sent, and whether PUBREC came.
    open: dict[int, tuple[Publish, bool]] = field(default_factory=dict)
    # For each power cut, the payloads without an acknowledgement at that time.
    unsure: list[set[bytes]] = field(default_factory=list)
    _next_id: int = 0

    async def connect(self, talk: MqttClient) -> None:
        """Connect, and send again what was not completed, in its order."""
        await talk.send(Connect(self.name, clean_start=False, properties=EXPIRY))
        answer = await talk.expect(Connack)
        assert answer.reason == 0, answer
        if not answer.session_present:
            self.open = {each: entry for each, entry in self.open.items() if not entry[1]}
        for packet_id, (packet, is_received) in self.open.items():
            if is_received:
                await talk.send(Ack(PacketType.PUBREL, packet_id))
            else:
                await talk.send(replace(packet, is_duplicate=True))

    async def run(self, talk: MqttClient, window: int = 20) -> None:
        """Publish until the connection ends; at the limit, complete what is open, then wait."""
        while True:
            while len(self.open) > (window // 2 if self.number < self.limit else 0):
                await self.take(talk)
            if self.number >= self.limit:
                await trio.sleep_forever()
            await self.send_some(talk, window)

    async def send_some(self, talk: MqttClient, window: int) -> None:
        packets: list[Publish] = []
        for _ in range(self.chance.randrange(1, window - len(self.open) + 1)):
            while self._next_id in self.open or not self._next_id:
                self._next_id = (self._next_id + 1) % 200
            qos, self.number = self.chance.choice((1, 2)), self.number + 1
            topic = self.chance.choice(NAMES)
            packet = self.message(topic, qos, self._next_id)
            self.open[self._next_id] = packet, False
            packets.append(packet)
        await talk.send(*packets)

    def message(self, topic: str, qos: int, packet_id: int) -> Publish:
        """Return the message of the current number."""
        return Publish(topic, b"%d" % self.number, qos, packet_id=packet_id)

    def keep(self, packet: Publish) -> None:
        """Note that the broker has *packet*."""
        self.stored[packet.payload] = packet.qos

    async def take(self, talk: MqttClient) -> None:
        """Take one answer."""
        answer = await talk.expect(Ack)
        packet, is_received = self.open[answer.packet_id]
        if answer.kind is PacketType.PUBREC:
            assert answer.reason == 0, answer
            if not is_received:
                self.keep(packet)
            self.open[answer.packet_id] = packet, True
            await talk.send(Ack(PacketType.PUBREL, answer.packet_id))
            return
        if answer.kind is PacketType.PUBACK:
            assert answer.reason == 0, answer
            self.keep(packet)
        del self.open[answer.packet_id]

    def power_cut(self) -> None:
        """Note that the power is cut now: the disk may keep any part of what is not acknowledged."""
        self.unsure.append({packet.payload for packet, is_received in self.open.values() if not is_received})

    async def finish(self, talk: MqttClient) -> None:
        """Complete everything that is open."""
        while self.open:
            await self.take(talk)


@dataclass
class Receiver:
    """A durable subscriber of QoS 2; ``received`` counts each message that it was given, ``order`` has each topic's."""

    chance: random.Random
    name: str = "receiver"
    filters: Sequence[str] = ("a/+", "b/#")
    received: dict[bytes, int] = field(default_factory=dict)
    order: dict[str, list[bytes]] = field(default_factory=dict)
    again: int = 0  # messages of QoS 1 that came again
    live: list[bytes] = field(default_factory=list)  # messages of QoS 0
    subscribed: trio.Event = field(default_factory=trio.Event)
    _ids: set[int] = field(default_factory=set)  # of QoS 2, without PUBREL
    _came: trio.Event = field(default_factory=trio.Event)  # a message; set once

    async def connect(self, talk: MqttClient) -> None:
        await talk.send(Connect(self.name, clean_start=False, properties=EXPIRY))
        answer = await talk.expect(Connack)
        assert answer.reason == 0, answer
        if not answer.session_present:
            self._ids.clear()
        await talk.send(Subscribe(1, tuple(FilterSubscription(each, 2) for each in self.filters)))

    async def run(self, talk: MqttClient) -> None:
        """Take messages until the connection ends."""
        while True:
            await self.take(talk)

    async def wait_received(self, count: int) -> None:
        """Wait until it has *count* different messages."""
        while len(self.received) < count:
            await self._came.wait()

    async def take(self, talk: MqttClient) -> None:
        packet = await talk.receive()
        if isinstance(packet, Publish):
            await self._take_message(talk, packet)
            self._came.set()
            self._came = trio.Event()
        elif isinstance(packet, Ack) and packet.kind is PacketType.PUBREL:
            self._ids.discard(packet.packet_id)
            await talk.send(Ack(PacketType.PUBCOMP, packet.packet_id))
        elif isinstance(packet, Disconnect):
            raise EOFError("the broker closes the connection")
        else:
            assert isinstance(packet, Suback), packet
            self.subscribed.set()

    async def _take_message(self, talk: MqttClient, packet: Publish) -> None:
        if not packet.qos:
            self.live.append(packet.payload)
            return
        if packet.qos == 1:
            self.again += packet.payload in self.received
            self._count(packet)
            await talk.send(Ack(PacketType.PUBACK, packet.packet_id))
            return
        if packet.packet_id not in self._ids:
            self._ids.add(packet.packet_id)
            self._count(packet)
        await talk.send(Ack(PacketType.PUBREC, packet.packet_id))

    def _count(self, packet: Publish) -> None:
        if packet.payload not in self.received:
            self.order.setdefault(packet.topic, []).append(packet.payload)
        self.received[packet.payload] = self.received.get(packet.payload, 0) + 1


def check(sender: Sender, receiver: Receiver) -> None:
    """Assert that nothing is lost, nothing of QoS 2 came twice, and each topic's messages came in order.

    Two messages may come in the other order if neither was acknowledged when the power was cut: if the disk kept only
    the later one, the earlier one is sent again after it.
    """
    lost = [payload for payload in sender.stored if payload not in receiver.received]
    assert lost == []
    twice = [payload for payload, qos in sender.stored.items() if qos == 2 and receiver.received[payload] > 1]
    assert twice == []
    for topic, payloads in receiver.order.items():  # the first time that each came
        for place, payload in enumerate(payloads):
            later = [each for each in payloads[:place] if int(each) > int(payload)]
            early = [each for each in later if not any({each, payload} <= cut for cut in sender.unsure)]
            assert not early, f"of {topic}, {early} came before {payload!r}"
