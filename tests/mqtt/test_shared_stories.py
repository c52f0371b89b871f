"""Random clients share subscriptions: a message goes to one of them until it is acknowledged, and never again then.

``MARTLET_SHARED_SEEDS`` runs more random stories.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import trio
import trio.lowlevel
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.testing.clock import TrioClock
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import PacketType, ReasonCode
from martlet_mqtt.wire.packets import Ack, FilterSubscription, Publish
from martlet_mqtt.wire.properties import Property

SEEDS = range(int(os.environ.get("MARTLET_SHARED_SEEDS", "8")))
FILTERS = {"$share/g/a/#": ("a", "a/x"), "$share/h/+/x": ("a/x", "b/x"), "$share/i/b/x": ("b/x",)}
NAMES = ("a", "a/x", "b/x", "c")
IDS = {topic_filter: number for number, topic_filter in enumerate(FILTERS, 1)}
OPEN, DONE = "open", "done"
ACTIONS = (
    "publish", "look", "acknowledge", "subscribe", "unsubscribe", "leave", "come", "take over", "kill"
)  # fmt: skip
WEIGHTS = (12, 8, 12, 5, 2, 3, 4, 1, 1)


@dataclass
class Client:
    """A client and what it knows of its session."""

    name: str
    talk: MqttClient | None = None
    is_kept: bool = False  # its session outlives the connection
    filters: dict[str, int] = field(default_factory=dict)  # with the QoS granted
    # What it has to acknowledge, by packet identifier: filter, payload and QoS.
    held: dict[int, tuple[str, bytes, int]] = field(default_factory=dict)
    unsent: set[int] = field(default_factory=set)  # of these, what was not sent on this connection

    @property
    def ready(self) -> list[int]:
        """What it can acknowledge now."""
        return [packet_id for packet_id in self.held if packet_id not in self.unsent]


class Story:
    """A broker, its clients, and where each message of each group is: open, done, or the name of its client."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.clock = TrioClock()
        self.disk = FakeDisk()
        self.clients = [Client(name) for name in ("one", "two", "three")]
        self.groups: dict[str, dict[bytes, str]] = {}
        self.sent: set[tuple[str, bytes]] = set()  # by filter, what was sent to anybody with QoS 1
        self.rules = self.random.choice(([], ["b/#=other"]))
        self.published = self.delivered = 0

    @asynccontextmanager
    async def life(self) -> AsyncIterator[MqttBroker]:
        store = small_config(flush="sync", segment_bytes=1 << 20, page_bytes=1 << 16)
        config = MqttConfig(queues=3, rules=self.rules)
        async with mqtt_broker(Path("/data"), config, store=store, disk=self.disk, clock=self.clock) as mqtt:
            yield mqtt

    async def live(self) -> None:
        async with self.life() as mqtt:
            publisher = await mqtt.connect("publisher")
            while True:
                (action,) = self.random.choices(ACTIONS, WEIGHTS)
                if action == "kill":
                    await self.settle(mqtt)
                    killed = self.disk.after_power_cut(Cut.KILLED, self.random)
                    break
                await self.act(mqtt, publisher, action, self.random.choice(self.clients))
        self.disk = killed
        for client in self.clients:
            self.is_gone(client)

    async def settle(self, mqtt: MqttBroker) -> None:
        """Wait until everybody has got what there is."""
        before = -1
        while self.delivered > before:
            before = self.delivered
            await mqtt.settle()
            await trio.sleep(1)
            for client in self.clients:
                if client.talk is not None:
                    await self.look(client)

    async def look_at_rest(self, mqtt: MqttBroker, client: Client) -> None:
        """Take what came for *client*, once the broker sends nothing more.

        What it sends to a connection that ends, nobody sees, and of QoS 2 it belongs to the session all the same.
        """
        before = -1
        while self.delivered > before:
            before = self.delivered
            await mqtt.settle()
            await wait_all_tasks_blocked()
            await self.look(client)

    async def act(self, mqtt: MqttBroker, publisher: MqttClient, action: str, client: Client) -> None:
        if action == "publish":
            await self.publish(publisher)
        elif action == "come" and client.talk is None:
            await self.come(mqtt, client)
        elif action == "take over" and client.talk is not None and client.is_kept:
            await self.look_at_rest(mqtt, client)
            self.is_gone(client)
            await self.come(mqtt, client)
        elif client.talk is not None:
            await self.use(mqtt, client, client.talk, action)

    async def publish(self, publisher: MqttClient) -> None:
        for _ in range(self.random.randrange(1, 4)):
            self.published += 1
            name, payload = self.random.choice(NAMES), b"%d" % self.published
            for topic_filter, group in self.groups.items():
                if name in FILTERS[topic_filter]:
                    group[payload] = OPEN
            await publisher.publish(name, payload, self.random.choice((1, 2)))

    async def come(self, mqtt: MqttBroker, client: Client, window: int = 0) -> None:
        client.is_kept = client.is_kept or self.random.random() < 0.6
        values = {Property.RECEIVE_MAXIMUM: window or self.random.choice((1, 2, 100))}
        expiry_s = 100_000 if client.is_kept else 0
        client.talk = await mqtt.connect(client.name, clean=False, expiry_s=expiry_s, values=values)
        await self.look(client)

    async def use(self, mqtt: MqttBroker, client: Client, talk: MqttClient, action: str) -> None:
        topic_filter = self.random.choice(list(FILTERS))
        if action == "look":
            await self.look(client)
        elif action == "acknowledge" and client.ready:
            await self.acknowledge(client, talk, self.random.choice(client.ready))
        elif action == "subscribe":
            await self.subscribe(client, talk, topic_filter, self.random.randrange(3))
        elif action == "unsubscribe" and topic_filter in client.filters:
            await talk.unsubscribe(topic_filter)
            await self.look(client)
            del client.filters[topic_filter]
        elif action == "leave":
            await self.look_at_rest(mqtt, client)
            if self.random.random() < 0.5:
                talk.hang_up()
            else:
                await talk.disconnect()
            self.is_gone(client)
            await trio.lowlevel.checkpoint()

    async def subscribe(self, client: Client, talk: MqttClient, topic_filter: str, qos: int) -> None:
        assert await talk.subscribe(FilterSubscription(topic_filter, qos), identifier=IDS[topic_filter]) == (qos,)
        self.groups.setdefault(topic_filter, {})
        await self.look(client, {*client.filters.items(), (topic_filter, qos)})
        client.filters[topic_filter] = qos

    async def look(self, client: Client, granted: "set[tuple[str, int]] | None" = None) -> None:
        """Take what came for *client*."""
        assert client.talk is not None
        for packet in await client.talk.rest():
            number, *_ = packet.properties.identifiers or (0,)
            topic_filter = next((each for each in FILTERS if IDS[each] == number), "")
            self.take(client, packet, topic_filter, granted or set(client.filters.items()))

    def take(self, client: Client, packet: Publish, topic_filter: str, granted: set[tuple[str, int]]) -> None:
        """Note that *packet* came to *client*; one that is sent again has the filter of the subscription it has now."""
        self.delivered += 1
        payload = packet.payload
        if packet.is_duplicate and packet.qos == 2:
            found = client.held.get(packet.packet_id)
            assert found is not None, "what nobody was sent is sent again"
            assert found[1:] == (payload, 2), "only QoS 2 stays with its session"
            assert packet.packet_id in client.unsent, "it comes twice on a connection"
            client.unsent.discard(packet.packet_id)
            return
        assert any(topic_filter == each and packet.qos <= qos for each, qos in granted), "it has no such subscription"
        state = self.groups[topic_filter].get(payload)
        assert state is not None, "it was published before the group began, or is for others"
        assert state == OPEN, f"it is {state}"
        if packet.qos == 1:
            was_sent = (topic_filter, payload) in self.sent
            assert packet.is_duplicate == was_sent, "DUP says whether it was sent before"
            self.sent.add((topic_filter, payload))
        if not packet.qos:
            self.groups[topic_filter][payload] = DONE
            return
        assert packet.packet_id not in client.held
        client.held[packet.packet_id] = topic_filter, payload, packet.qos
        self.groups[topic_filter][payload] = client.name

    async def acknowledge(self, client: Client, talk: MqttClient, packet_id: int) -> None:
        topic_filter, payload, qos = client.held.pop(packet_id)
        reason = self.random.choice((0, 0, ReasonCode.UNSPECIFIED_ERROR, ReasonCode.QUOTA_EXCEEDED))
        await talk.send(Ack(PacketType.PUBACK if qos == 1 else PacketType.PUBREC, packet_id, reason))
        if qos == 2 and not reason:
            answer = await talk.expect(Ack)
            assert (answer.kind, answer.packet_id) == (PacketType.PUBREL, packet_id)
            await talk.send(Ack(PacketType.PUBCOMP, packet_id))
        self.groups[topic_filter][payload] = DONE
        await self.look(client)

    def is_gone(self, client: Client) -> None:
        """What it holds of QoS 1 is for others; of QoS 2 it stays with the session, and ends with it."""
        client.talk = None
        for packet_id, (topic_filter, payload, qos) in list(client.held.items()):
            if qos == 1 or not client.is_kept:
                self.groups[topic_filter][payload] = OPEN if qos == 1 else DONE
                del client.held[packet_id]
        client.unsent = set(client.held)
        if not client.is_kept:
            client.filters = {}

    async def end(self) -> None:
        """Bring what is left to one client after all others, and see that it is all."""
        async with self.life() as mqtt:
            await trio.sleep(10)
            for client in self.clients:
                await self.come(mqtt, client, window=100)
                for topic_filter in FILTERS:
                    assert client.talk is not None
                    await self.subscribe(client, client.talk, topic_filter, 1)
            for _ in range(1000):
                await trio.sleep(10)
                for client in self.clients:
                    assert client.talk is not None
                    await self.look(client)
                    for packet_id in client.ready:
                        await self.acknowledge(client, client.talk, packet_id)
                if not any(state != DONE for group in self.groups.values() for state in group.values()):
                    return
            left = {each: {p for p, state in group.items() if state != DONE} for each, group in self.groups.items()}
            raise AssertionError(f"nobody got {left}")


@pytest.mark.parametrize("seed", SEEDS)
async def test_each_message_goes_to_one_member_until_it_is_acknowledged(seed: int, autojump_clock: MockClock) -> None:
    story = Story(seed)
    for _ in range(3):
        await story.live()
    await story.end()
    assert story.published
