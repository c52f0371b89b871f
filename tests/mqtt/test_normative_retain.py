"""RETAIN and retained messages (sections 3.3.1.3 and 3.8.3.1)."""

from pathlib import Path

import pytest
from tests.mqtt.normative import VERSIONS, before_fence, statement, stay
from tests.wire_clients.mqtt import MqttBroker, leave, mqtt_broker

from martlet_mqtt.wire.codes import V4, V5
from martlet_mqtt.wire.packets import Ack, FilterSubscription, Publish, Suback, Subscribe
from martlet_mqtt.wire.properties import Properties, Property

QOS = pytest.mark.parametrize("qos", [0, 1, 2])


async def retained(mqtt: MqttBroker, topic_filter: str, version: int) -> list[tuple[str, bytes, int, bool]]:
    """Return what a new subscriber to *topic_filter* gets."""
    await mqtt.settle()
    talk, publisher = await mqtt.connect("", version), await mqtt.connect("", version)
    await talk.subscribe(topic_filter, qos=2)
    await talk.subscribe("fence", qos=0)
    await publisher.publish("fence", b"", 1)
    found: list[tuple[str, bytes, int, bool]] = []
    while True:
        (one,) = await talk.messages(1)
        await talk.acknowledge(one)
        if one.topic == "fence":
            return found
        found.append((one.topic, one.payload, one.qos, one.retain))


@statement(V4, "MQTT-3.3.1-5", "MQTT-3.3.1-6", "MQTT-3.3.1-7", "MQTT-3.3.1-8")
@statement(V5, "MQTT-3.3.1-5", "MQTT-3.3.1-9")
@VERSIONS
@QOS
async def test_the_last_message_with_retain_of_each_name_is_kept(tmp_path: Path, version: int, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p", version)
        for payload in (b"first", b"second"):
            for name in ("a", "a/b", "b"):
                await publisher.publish(name, payload, qos, retain=True)
        assert await retained(mqtt, "a", version) == [("a", b"second", qos, True)]
        assert sorted(await retained(mqtt, "a/#", version)) == [
            ("a", b"second", qos, True),
            ("a/b", b"second", qos, True),
        ]
        assert len(await retained(mqtt, "#", version)) == 3
        assert await retained(mqtt, "a/b/c", version) == []


@statement(V4, "MQTT-3.3.1-7")
@statement(V5, "MQTT-3.3.1-5")
@VERSIONS
async def test_qos_0_replaces_a_retained_message_of_a_higher_qos(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p", version)
        await publisher.publish("a", b"old", 2, retain=True)
        await publisher.publish("a", b"new", 0, retain=True)
        await publisher.publish("b", b"", 1)  # so that the one before is stored
        assert await retained(mqtt, "a", version) == [("a", b"new", 0, True)]


@statement(V4, "MQTT-3.3.1-10", "MQTT-3.3.1-11", "MQTT-3.3.1-9")
@statement(V5, "MQTT-3.3.1-6", "MQTT-3.3.1-7")
@VERSIONS
@QOS
async def test_an_empty_message_removes_the_retained_one_and_is_delivered(
    tmp_path: Path, version: int, qos: int
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, publisher = await mqtt.connect("w", version), await mqtt.connect("p", version)
        await watcher.subscribe("a", "never", qos=0)
        await publisher.publish("a", b"kept", qos, retain=True)
        await publisher.publish("a", b"", qos, retain=True)
        await publisher.publish("never", b"", qos, retain=True)
        found = await watcher.messages(3)
        assert [(each.payload, each.retain) for each in found] == [(b"kept", False), (b"", False), (b"", False)]
        assert await retained(mqtt, "#", version) == []
        assert len(mqtt.context.retained) == 0


@statement(V5, "MQTT-3.3.1-6", "MQTT-3.3.1-7")
async def test_an_empty_message_with_properties_is_not_retained_either(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p")
        for properties in (
            Properties({Property.CORRELATION_DATA: b"\xff"}),
            Properties({}, [("a", "1"), ("a", "2")]),
            Properties({}, [("k" * 500, "v" * 500)] * 50),
        ):
            await publisher.publish("a", b"kept", 1, retain=True)
            await publisher.publish("a", b"", 1, retain=True, properties=properties)
            assert await retained(mqtt, "#", V5) == []


@statement(V4, "MQTT-3.3.1-12")
@statement(V5, "MQTT-3.3.1-8")
@VERSIONS
@QOS
async def test_messages_without_retain_change_nothing(tmp_path: Path, version: int, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p", version)
        await publisher.publish("a", b"kept", 1, retain=True)
        for payload in (b"passing", b""):
            for name in ("a", "b"):
                await publisher.publish(name, payload, qos)
        assert await retained(mqtt, "#", version) == [("a", b"kept", 1, True)]


@statement(V4, "MQTT-3.1.2-7")
@VERSIONS
async def test_retained_messages_outlive_session_and_broker(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p", version)
        await publisher.publish("a", b"kept", 1, retain=True)
        await leave(mqtt, publisher, "p")
        assert await retained(mqtt, "a", version) == [("a", b"kept", 1, True)]
    async with mqtt_broker(tmp_path) as mqtt:
        assert await retained(mqtt, "a", version) == [("a", b"kept", 1, True)]


@statement(V4, "MQTT-3.3.1-9")
@statement(V5, "MQTT-3.3.1-12")
@VERSIONS
@QOS
async def test_retain_is_not_set_for_subscriptions_that_exist(tmp_path: Path, version: int, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", version), await mqtt.connect("p", version)
        await talk.subscribe("a", qos=2)
        await publisher.publish("a", b"live", qos, retain=True)
        (found,) = await talk.messages(1)
        assert (found.payload, found.retain) == (b"live", False)
        await talk.acknowledge(found)
        await leave(mqtt, talk, "me")
        await publisher.publish("a", b"missed", max(1, qos), retain=True)
        talk = await stay(mqtt, "me", version, present=True)
        (found,) = await talk.messages(1)
        assert (found.payload, found.retain) == (b"missed", False)


@statement(V5, "MQTT-3.3.1-13")
@QOS
async def test_retain_as_published_keeps_the_flag(tmp_path: Path, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", V5), await mqtt.connect("p")
        await talk.subscribe(FilterSubscription("a", 2, retain_as_published=True))
        for retain in (True, False, True):
            await publisher.publish("a", b"x", qos, retain=retain)
        found = await talk.messages(3)
        assert [each.retain for each in found] == [True, False, True]
        for each in found:
            await talk.acknowledge(each)
        await leave(mqtt, talk, "me")
        for retain in (True, False):
            await publisher.publish("a", b"missed", max(1, qos), retain=retain)
        talk = await stay(mqtt, "me", V5, present=True)
        assert [each.retain for each in await talk.messages(2)] == [True, False]


@statement(V5, "MQTT-3.3.1-13", "MQTT-4.4.0-1")
@pytest.mark.parametrize("qos", [1, 2])
async def test_what_is_sent_again_keeps_the_flag_as_well(tmp_path: Path, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", V5), await mqtt.connect("p")
        await talk.subscribe(FilterSubscription("a", 2, retain_as_published=True))
        await publisher.publish("a", b"x", qos, retain=True)
        (first,) = await talk.messages(1)
        assert first.retain
        await leave(mqtt, talk, "me")
        talk = await stay(mqtt, "me", V5, present=True)
        (again,) = await talk.messages(1)
        assert (again.is_duplicate, again.retain) == (True, True)


@statement(V5, "MQTT-3.3.1-9", "MQTT-3.3.1-10", "MQTT-3.3.1-11")
@pytest.mark.parametrize(("handling", "first", "second"), [(0, True, True), (1, True, False), (2, False, False)])
async def test_retain_handling_says_when_retained_messages_come(
    tmp_path: Path, handling: int, first: bool, second: bool
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p")
        await publisher.publish("a/b", b"kept", 1, retain=True)
        await publisher.publish("a/c", b"kept too", 1, retain=True)
        await mqtt.settle()
        talk = await stay(mqtt, "me", V5)
        await talk.subscribe("fence", qos=0)
        for expected in (first, second):
            await talk.subscribe(FilterSubscription("a/+", 0, retain_handling=handling))
            found = await before_fence(talk, publisher)
            assert sorted(found) == [b"kept", b"kept too"] * expected
        await leave(mqtt, talk, "me")
        talk = await stay(mqtt, "me", V5, present=True)
        await talk.subscribe(FilterSubscription("a/+", 0, retain_handling=handling))
        assert sorted(await before_fence(talk, publisher)) == [b"kept", b"kept too"] * second
        await talk.unsubscribe("a/+")
        await talk.subscribe(FilterSubscription("a/+", 0, retain_handling=handling))
        assert sorted(await before_fence(talk, publisher)) == [b"kept", b"kept too"] * first


@statement(V4, "MQTT-3.3.1-6", "MQTT-3.8.4-3")
@statement(V5, "MQTT-3.3.1-9", "MQTT-3.8.4-4")
@VERSIONS
async def test_an_equal_subscription_brings_the_retained_messages_again(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await mqtt.connect("c", version), await mqtt.connect("p", version)
        await publisher.publish("a", b"kept", 1, retain=True)
        await mqtt.settle()
        for qos in (0, 1, 2, 0):
            await talk.subscribe("a", qos=qos)
            (found,) = await talk.messages(1)
            assert (found.payload, found.retain, found.qos) == (b"kept", True, min(qos, 1))
            if found.qos:
                await talk.acknowledge(found)


@statement(V4, "MQTT-3.3.1-5", "MQTT-3.3.1-6")
@statement(V5, "MQTT-3.3.1-5", "MQTT-3.3.1-9")
@VERSIONS
@QOS
async def test_a_subscription_right_after_a_retained_message_gets_it(tmp_path: Path, version: int, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", version)
        publish = Publish("a", b"kept", qos, retain=True, packet_id=1 if qos else 0)
        await talk.send(publish, Subscribe(2, (FilterSubscription("a", 0), FilterSubscription("fence", 0))))
        if qos:
            await talk.expect(Ack)
        await talk.expect(Suback)
        assert await before_fence(talk, await mqtt.connect("p", version)) == [b"kept"]
