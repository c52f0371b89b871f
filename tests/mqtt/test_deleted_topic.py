"""An administrator deletes a topic with messages of MQTT: it is created again, and nobody has to connect again."""

from pathlib import Path
from random import Random

import pytest
from tests.wire_clients.mqtt import leave, mqtt_broker

from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.packets import Connack, Connect, Disconnect, FilterSubscription, Subscribe, Will

DATA = Path("/data")
RULES = MqttConfig(rules=["b/#=bees"], queues=2)


@pytest.mark.parametrize("topic", ["mqtt", "bees"])
async def test_subscribers_get_what_is_published_after_a_topic_was_deleted(tmp_path: Path, topic: str) -> None:
    async with mqtt_broker(tmp_path, RULES) as mqtt:
        subscriber, publisher = await mqtt.connect("subscriber"), await mqtt.connect("publisher")
        await subscriber.subscribe("#", qos=1)
        await publisher.publish("a", b"kept", 1, retain=True)
        await publisher.publish("b", b"before", 1)
        assert await subscriber.payloads(2) == [b"kept", b"before"]
        for turn in (b"1", b"2"):
            mqtt.broker.topics.delete(topic)
            for name in "ab":
                assert await publisher.publish(name, name.encode() + turn, 1) == ReasonCode.SUCCESS
            assert await subscriber.payloads(2) == [b"a" + turn, b"b" + turn]
        created = mqtt.broker.topics.get(topic)
        assert created is not None
        assert created.write_queues == 2
        newcomer = await mqtt.connect("newcomer")
        await newcomer.subscribe("#", qos=1)
        assert await newcomer.payloads(1) == [b"kept"]
        await publisher.publish("b", b"new", 1)
        assert await newcomer.payloads(1) == await subscriber.payloads(1) == [b"new"]


async def test_topics_are_created_again_without_automatic_creation(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path, RULES) as mqtt:
        mqtt.broker.topics.auto_create_enabled = False
        publisher, subscriber = await mqtt.connect("publisher"), await mqtt.connect("subscriber")
        mqtt.broker.topics.delete("bees")
        await subscriber.subscribe("b", qos=1)
        assert await publisher.publish("b", b"1", 1) == ReasonCode.SUCCESS
        assert await subscriber.payloads(1) == [b"1"]


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_shared_subscription_goes_on_after_its_topic_was_deleted(tmp_path: Path, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        member, publisher = await mqtt.connect("member"), await mqtt.connect("publisher")
        await member.subscribe("$share/g/a", qos=qos)
        await publisher.publish("a", b"before", qos)
        [before] = await member.messages(1)
        mqtt.broker.topics.delete("mqtt")
        await member.rest()
        await publisher.publish("a", b"after", qos)
        [after] = await member.messages(1)
        assert after.payload == b"after"
        for packet in (before, after):
            await member.acknowledge(packet)
        later = await mqtt.connect("later")
        assert await later.subscribe("$share/g/a", qos=qos) == (qos,)
        await member.unsubscribe("$share/g/a")
        await publisher.publish("a", b"last", qos)
        assert await later.payloads(1) == [b"last"]


async def test_a_client_is_accepted_once_while_the_topics_are_deleted(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path, RULES) as mqtt:
        for topic in ("mqtt", "bees"):
            mqtt.broker.topics.delete(topic)
        talk = await mqtt.connect("me")
        assert await talk.subscribe("#", qos=1) == (1,)
        assert await talk.publish("b", b"1", 1) == ReasonCode.SUCCESS
        assert await talk.payloads(1) == [b"1"]


async def test_a_client_that_cannot_go_on_is_refused_without_its_will(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        before = await mqtt.connect("me", expiry_s=1000)
        await before.subscribe("#", qos=1)
        await before.disconnect()
        mqtt.broker.topics.update("mqtt", 8, 8, perm=2)  # it can only be written
        talk, answer = await mqtt.answer(Connect("me", clean_start=False, will=Will("a", b"will", 1)))
        assert answer.reason == ReasonCode.NOT_AUTHORIZED
        assert not isinstance(await talk.closed(), Connack)
        assert not mqtt.context.clients
        assert mqtt.context.counters.wills == 0


async def test_a_topic_that_can_only_be_written_takes_messages_of_clients_but_no_subscription(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        mqtt.broker.topics.update("mqtt", 8, 8, perm=2)
        talk = await mqtt.connect("me")
        assert await talk.publish("a", b"1", 1) == ReasonCode.SUCCESS
        await talk.send(Subscribe(1, (FilterSubscription("a", 1),)))
        last = await talk.closed()
        assert isinstance(last, Disconnect)
        assert last.reason == ReasonCode.NOT_AUTHORIZED


@pytest.mark.parametrize("without_index", [False, True])
async def test_after_a_power_cut_sessions_have_what_was_published_since_the_deletion(without_index: bool) -> None:
    disk, store = FakeDisk(), small_config(flush="sync", segment_bytes=1 << 20, page_bytes=1 << 16)
    async with mqtt_broker(DATA, RULES, store=store, disk=disk) as mqtt:
        talk, publisher = await mqtt.connect("me", expiry_s=1000), await mqtt.connect("publisher")
        await talk.subscribe("#", qos=2)
        await publisher.publish("c", b"kept", 1, retain=True)
        await publisher.publish("a", b"in flight", 2)
        packets = await talk.messages(2)
        assert [packet.payload for packet in packets] == [b"kept", b"in flight"]
        await talk.acknowledge(packets[0])
        await leave(mqtt, talk, "me")
        await publisher.publish("a", b"deleted", 1)
        mqtt.broker.topics.delete("mqtt")
        for payload in (b"1", b"2"):
            await publisher.publish("a", payload, 2)
            await publisher.publish("b", payload, 1)
        await mqtt.settle()
        disk = disk.after_power_cut(Cut.LOST, Random(1))
    if without_index:
        for path in [path for path in disk.files if "/consumequeue/" in path]:
            disk.unlink(path)
    async with mqtt_broker(DATA, RULES, store=store, disk=disk) as mqtt:
        talk = await mqtt.connect("me", clean=False, expiry_s=1000, present=True)
        came = await talk.messages(5)
        assert [(packet.payload, packet.is_duplicate) for packet in came] == [
            (b"in flight", True),
            (b"1", False),
            (b"1", False),
            (b"2", False),
            (b"2", False),
        ]
        assert await talk.rest() == []
        await talk.subscribe("c", qos=1)
        assert await talk.payloads(1) == [b"kept"]
