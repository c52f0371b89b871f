"""What a client gets, whatever it does: out of order, with a small window, in many connections, with junk between.

The client obeys MQTT 5 otherwise, and checks what the broker must hold to: sections 3.3.4, 4.3, 4.4, 4.6 and 4.9.
"""

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing
from msgspec.structs import replace
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker

from martlet.delivery.cursor import CursorPlace
from martlet.store.read.lookup import Lookup
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import PacketType, ReasonCode
from martlet_mqtt.wire.packets import Ack, Connack, Connect, FilterSubscription, Pingreq, Pingresp, Publish
from martlet_mqtt.wire.properties import Properties, Property

SEEDS = range(int(os.environ.get("MARTLET_SENDING_SEEDS", "12")))
STEPS = 120
ALIASES = 1
NAMES = ("a/1", "a/long/name", "b/1", "b/another/name")
FIRST_IDS = (65_530, 1, 3, 65_534)  # so that identifiers meet those that are in flight


@dataclass
class Held:
    """A message in flight, as the client knows it."""

    packet: Publish
    is_sent: bool = True  # on this connection
    is_received: bool = False  # PUBREC was sent
    is_released: bool = False  # PUBREL came


@dataclass
class Client:
    """A subscriber that checks what it gets."""

    chance: random.Random
    mqtt: MqttBroker
    talk: MqttClient
    limit: int
    held: dict[int, Held] = field(default_factory=dict)  # in the order of the first PUBLISH, by identifier
    aliases: dict[int, str] = field(default_factory=dict)
    came: list[tuple[str, bytes]] = field(default_factory=list)  # each message that is new to the client

    async def take(self) -> None:
        """Take everything that the broker sends until it answers a ping."""
        await self.mqtt.settle()
        await self.talk.send(Pingreq())
        while not isinstance(packet := await self.talk.receive(), Pingresp):
            if isinstance(packet, Publish):
                self._take_message(packet)
            else:
                assert isinstance(packet, Ack), packet
                assert packet.kind is PacketType.PUBREL, packet
                self._release(packet)

    def take_aside(self) -> None:
        """Take the messages that came before an answer."""
        for packet in self.talk._came:
            self._take_message(packet)
        self.talk._came.clear()

    def _take_message(self, packet: Publish) -> None:
        alias = packet.properties.number(Property.TOPIC_ALIAS, 0)
        if alias:
            assert alias <= ALIASES
            assert not packet.is_duplicate
            self.aliases[alias] = packet.topic or self.aliases[alias]
            packet = replace(packet, topic=self.aliases[alias])
        if not packet.qos:
            assert not packet.is_duplicate
            return
        assert packet.packet_id
        held = self.held.get(packet.packet_id)
        first = next((each for each in self.held.values() if not each.is_sent and not each.is_received), None)
        if held is None:
            # Sent again, or sent on the connection before and never read; not before what came before it.
            assert first is None, (packet, first)
            self.held[packet.packet_id] = Held(packet)
            self.came.append((packet.topic, packet.payload))
        else:
            assert packet.is_duplicate, packet
            assert not held.is_sent, packet
            assert held is first, (packet, first)
            assert (packet.topic, packet.payload, packet.qos) == (
                held.packet.topic,
                held.packet.payload,
                held.packet.qos,
            )
            held.is_sent = True
        assert sum(each.is_sent for each in self.held.values()) <= self.limit

    def _release(self, packet: Ack) -> None:
        held = self.held.get(packet.packet_id)
        assert held is not None, packet
        assert held.is_received
        held.is_released = True

    async def answer(self) -> None:
        """Answer one message, any of those in flight."""
        if not self.held:
            return
        packet_id = self.chance.choice(list(self.held))
        held = self.held[packet_id]
        if (not held.is_sent or held.is_received) and not held.is_released:
            return  # PUBLISH comes again first, or PUBREL comes
        if held.packet.qos == 1:
            await self.talk.send(Ack(PacketType.PUBACK, packet_id))
            del self.held[packet_id]
        elif held.is_released:
            await self.talk.send(Ack(PacketType.PUBCOMP, packet_id))
            del self.held[packet_id]
        elif self.chance.random() < 0.1:
            await self.talk.send(Ack(PacketType.PUBREC, packet_id, ReasonCode.UNSPECIFIED_ERROR))
            del self.held[packet_id]
        else:
            await self.talk.send(Ack(PacketType.PUBREC, packet_id))
            held.is_received = True

    async def junk(self) -> None:
        """Send acknowledgements that belong to nothing."""
        free = range(40_000, 50_000)
        twice = [packet_id for packet_id, held in self.held.items() if held.packet.qos == 2]
        kind = self.chance.choice([PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBCOMP])
        packet_id = self.chance.choice(free)
        if kind is PacketType.PUBACK and twice:
            packet_id = self.chance.choice(twice)
        if kind is PacketType.PUBREC:
            await self.take()
            await self.talk.send(Ack(kind, packet_id))
            answer = await self.talk.expect(Ack)
            self.take_aside()
            assert (answer.kind, answer.packet_id) == (PacketType.PUBREL, packet_id)
            assert answer.reason == ReasonCode.PACKET_IDENTIFIER_NOT_FOUND
        elif kind is PacketType.PUBACK and twice:
            await self.talk.send(Ack(kind, packet_id))

    async def come_back(self) -> None:
        """Drop the connection, perhaps in the middle, and connect again with another window."""
        await self.take() if self.chance.random() < 0.7 else await self.mqtt.settle()
        await trio.testing.wait_all_tasks_blocked()
        self.talk.hang_up()
        self.aliases.clear()
        self.limit = self.chance.choice([1, 2, 5, 20])
        self.talk = await connected(self.mqtt, self.limit, self.chance, present=True)
        for held in self.held.values():
            held.is_sent = held.is_released = False

    async def finish(self) -> None:
        """Take and answer everything."""
        client = self.mqtt.client("c")
        assert client.outgoing is not None
        assert client.session is not None
        cursor = client.outgoing._cursor
        while self.held or client.session.flight or cursor.place is not CursorPlace.TAIL or cursor.has_pending:
            await self.answer()
            await self.take()


async def connected(mqtt: MqttBroker, limit: int, chance: random.Random, *, present: bool) -> MqttClient:
    values = {
        Property.SESSION_EXPIRY: 1000,
        Property.RECEIVE_MAXIMUM: limit,
        Property.TOPIC_ALIAS_MAXIMUM: chance.choice([0, ALIASES]),
    }
    talk, answer = await mqtt.answer(Connect("c", clean_start=False, properties=Properties(values)))
    assert isinstance(answer, Connack)
    assert (answer.reason, answer.session_present) == (0, present)
    outgoing = mqtt.client("c").outgoing
    if outgoing is not None:
        outgoing.flight._next_id = chance.choice(FIRST_IDS)
    return talk


async def change(client: Client) -> None:
    """Change a subscription other than that to ``a/#``, whatever is in flight for it."""
    chance = client.chance
    topic_filter = chance.choice(["b/#", "+/1", "a/1", "+/+/name"])
    await client.take()
    if chance.random() < 0.4:
        await client.talk.unsubscribe(topic_filter)
    else:
        await client.talk.subscribe(
            FilterSubscription(topic_filter, chance.randrange(3)), identifier=chance.randrange(1, 9)
        )
    client.take_aside()


@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_a_client_does_it_gets_each_message_once_and_in_order(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    async with mqtt_broker(tmp_path, MqttConfig(in_flight_max=chance.choice([3, 1024]))) as mqtt:
        publisher = await mqtt.connect("p")
        talk = await connected(mqtt, 20, chance, present=False)
        client = Client(chance, mqtt, talk, 20)
        await talk.subscribe("a/#", qos=2)
        wanted: list[bytes] = []
        number = 0
        for _ in range(STEPS):
            match chance.randrange(10):
                case 0 | 1 | 2:
                    for _ in range(chance.randrange(1, 9)):
                        number += 1
                        name, qos, payload = chance.choice(NAMES), chance.randrange(3), b"%d" % number
                        await publisher.publish(name, payload, qos)
                        if qos and name.startswith("a/"):
                            wanted.append(payload)
                case 3 | 4 | 5 | 6:
                    for _ in range(chance.randrange(1, 5)):
                        await client.answer()
                case 7:
                    await client.take()
                case 8:
                    await client.junk()
                case _:
                    await (client.come_back() if chance.random() < 0.6 else change(client))
        await client.finish()
        assert [payload for name, payload in client.came if name.startswith("a/")] == wanted
        assert [int(payload) for _, payload in client.came] == sorted({int(payload) for _, payload in client.came})
        flight = mqtt.client("c").session
        assert flight is not None
        assert flight.flight == {}


async def test_new_messages_wait_for_those_that_are_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These may have to be read from disk."""
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", clean=False, expiry_s=100)
        publisher = await mqtt.connect("p")
        await talk.subscribe("a", "$share/g/b", qos=1)
        for number in range(3):
            await publisher.publish("a", b"%d" % number, 1)
        await talk.messages(3)
        talk.hang_up()
        may_read, read = trio.Event(), Lookup.known_record_far

        async def read_late(lookup: Lookup, position: int) -> bytes | None:
            await may_read.wait()
            return await read(lookup, position)

        monkeypatch.setattr(Lookup, "known_record_far", read_late)
        talk = await mqtt.connect("c", clean=False, expiry_s=100)
        for name in ("a", "b"):
            await publisher.publish(name, b"new", 1)
        assert await talk.rest() == []
        may_read.set()
        found = await talk.messages(5)
        assert [(each.payload, each.is_duplicate) for each in found[:3]] == [(b"0", True), (b"1", True), (b"2", True)]
        assert sorted((each.topic, each.payload, each.is_duplicate) for each in found[3:]) == [
            ("a", b"new", False),
            ("b", b"new", False),
        ]
