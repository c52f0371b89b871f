"""Topic names, topic filters and shared subscriptions (sections 4.7 and 4.8)."""

from pathlib import Path

import pytest
from tests.mqtt.normative import (
    VERSIONS,
    before_fence,
    filter_packet,
    leave,
    statement,
    stay,
)
from tests.wire_clients.mqtt import MqttBroker, mqtt_broker

from martlet.message import Message
from martlet_mqtt.wire.codes import V4, V5, PacketType, ReasonCode
from martlet_mqtt.wire.packets import Ack, Suback
from martlet_mqtt.wire.properties import encode_text


def publish_as_another_protocol(mqtt: MqttBroker, name: str) -> None:
    """Store a message to *name*, which clients of MQTT may not publish to if it begins with a dollar sign."""
    mqtt.broker.publish(Message("mqtt", name.encode(), b"TAGS\x01%b\x02" % name.encode(), 0))


@statement(V4, "MQTT-4.7.2-1")
@statement(V5, "MQTT-4.7.2-1")
@VERSIONS
async def test_a_wildcard_at_the_beginning_does_not_match_names_with_a_dollar_sign(
    tmp_path: Path, version: int
) -> None:
    """Neither does another filter match such names, unless they are of the broker."""
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p", version)
        talks = []
        for topic_filter, expected in (
            ("#", [b"a/$x"]),
            ("+/y", []),
            ("+", []),
            ("+/#", [b"a/$x"]),
            ("$x/#", []),
            ("a/+", [b"a/$x"]),
        ):
            talk = await mqtt.connect("", version)
            await talk.subscribe(topic_filter, "fence", qos=0)
            talks.append((talk, topic_filter, expected))
        for name in ("$x/y", "$x", "a/$x"):
            publish_as_another_protocol(mqtt, name)
        for talk, topic_filter, expected in talks:
            found = [each for each in await before_fence(talk, publisher) if each != b"the fence"]
            assert found == expected, topic_filter


@statement(V4, "MQTT-4.7.2-1")
@statement(V5, "MQTT-4.7.2-1")
@VERSIONS
async def test_figures_of_the_broker_are_for_filters_that_name_them(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await mqtt.connect("c", version), await mqtt.connect("p", version)
        await talk.subscribe("#", "+/broker/version", "+/+/version", qos=0)
        assert await before_fence(talk, publisher) == []
        await talk.subscribe("$SYS/broker/version", qos=0)
        (found,) = await talk.messages(1)
        assert (found.topic, found.retain) == ("$SYS/broker/version", True)


@statement(V5, "MQTT-4.7.2-1")
async def test_a_group_does_not_get_names_with_a_dollar_sign_either(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await mqtt.connect("c"), await mqtt.connect("p")
        await talk.subscribe("$share/g/#", "$share/h/+/y", "end", qos=0)
        for name in ("$x/y", "$x", "a/y"):
            publish_as_another_protocol(mqtt, name)
        assert [each.topic for each in await talk.messages(2)] == ["a/y", "a/y"]
        assert set(await before_fence(talk, publisher, "end")) <= {b"the fence"}


@statement(V4, "MQTT-4.7.3-4")
@statement(V5, "MQTT-4.7.3-4")
@VERSIONS
async def test_names_and_filters_are_compared_as_they_are(tmp_path: Path, version: int) -> None:
    alike = ["é", "e\u0301", "É", "a", "A", "a ", " a", "a/", "/a", "a//", "ß", "ss", "\ufb01", "fi", "a%2Fb"]
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p", version)
        talks = [await mqtt.connect(f"c{number}", version) for number in range(len(alike))]
        for talk, name in zip(talks, alike, strict=True):
            await talk.subscribe(name, "fence", qos=0)
        for name in alike:
            await publisher.publish(name, name.encode(), 1)
        for talk, name in zip(talks, alike, strict=True):
            assert set(await before_fence(talk, publisher)) - {b"the fence"} == {name.encode()}


@statement(V4, "MQTT-4.7.3-3")
@statement(V5, "MQTT-4.7.3-3")
@VERSIONS
async def test_the_longest_string_is_a_name_or_is_refused(tmp_path: Path, version: int) -> None:
    longest = "n" * 65_535
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", version)
        expected = ReasonCode.TOPIC_FILTER_INVALID if version == V5 else 0x80
        assert await talk.subscribe(longest) == (expected,)
        reason = await talk.publish(longest, b"x", 1)
        assert reason == (ReasonCode.TOPIC_NAME_INVALID if version == V5 else 0)
        assert await talk.rest() == []


# shared subscriptions


@statement(V5, "MQTT-4.8.2-1", "MQTT-4.8.2-2")
async def test_a_group_has_a_name_without_wildcards_and_a_filter(tmp_path: Path) -> None:
    bad = ["$share/", "$share//a", "$share/g", "$share/g/", "$share/+/a", "$share/#/a", "$share/g+/a", "$share/g/a#"]
    good = ["$share/g/a", "$share/g//", "$share/$g/#", "$share/g/$x/+", "$share/a b/+/+"]
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c")
        for topic_filter in bad:
            await talk.wire.send(filter_packet(0x82, 1, V5, encode_text(topic_filter), b"\1"))
            assert (await talk.expect(Suback)).codes == (0x8F,), topic_filter
        assert await talk.subscribe(*good, qos=1) == (1,) * len(good)
        assert set(mqtt.context.clients["c"].filters) == set(good)


@statement(V5, "MQTT-4.8.2-1", "MQTT-4.8.2-2")
async def test_a_group_gets_each_message_of_its_filter_once(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        one, two, alone = [await mqtt.connect(name) for name in ("one", "two", "alone")]
        for talk in (one, two):
            await talk.subscribe("$share/g/a/+", qos=0)
        await alone.subscribe("a/+", qos=0)
        publisher = await mqtt.connect("p")
        for number in range(20):
            await publisher.publish(f"a/{number % 3}", b"%d" % number, 1)
        await publisher.publish("b", b"other", 1)
        assert await alone.payloads(20) == [b"%d" % number for number in range(20)]
        found: list[bytes] = []
        while len(found) < 20:
            for talk in (one, two):
                found += [each.payload for each in await talk.rest()]
        assert sorted(map(int, found)) == list(range(20))


@statement(V5, "MQTT-4.8.2-3")
async def test_each_member_of_a_group_gets_the_qos_granted_to_it(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p")
        for granted in range(3):
            talk = await mqtt.connect("c")
            assert await talk.subscribe("$share/g/a", qos=granted) == (granted,)
            for qos in (1, 2):
                await publisher.publish("a", b"x", qos)
                (found,) = await talk.messages(1)
                assert found.qos == min(granted, qos)
                await talk.acknowledge(found)
            await talk.rest()
            await leave(mqtt, talk, "c")


@statement(V5, "MQTT-4.8.2-4")
async def test_qos_2_of_a_group_is_completed_when_the_member_returns(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p")
        talk = await stay(mqtt, "me", V5)
        await talk.subscribe("$share/g/a", qos=2)
        for payload in (b"sent", b"received"):
            await publisher.publish("a", payload, 2)
        sent, received = await talk.messages(2)
        await talk.send(Ack(PacketType.PUBREC, received.packet_id))
        assert (await talk.expect(Ack)).kind is PacketType.PUBREL
        await leave(mqtt, talk, "me")
        other = await mqtt.connect("other")
        await other.subscribe("$share/g/a", "fence", qos=2)
        assert await before_fence(other, publisher) == []
        talk = await stay(mqtt, "me", V5, present=True)
        assert await talk.expect(Ack) == Ack(PacketType.PUBREL, received.packet_id)
        (again,) = await talk.messages(1)
        assert (again.payload, again.packet_id, again.is_duplicate) == (b"sent", sent.packet_id, True)
        await talk.acknowledge(again)


@statement(V5, "MQTT-4.8.2-5")
@pytest.mark.parametrize("kept", [False, True])
async def test_qos_2_of_a_group_goes_to_nobody_else_when_the_session_ends(tmp_path: Path, kept: bool) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher, other = await mqtt.connect("p"), await mqtt.connect("other")
        talk = await mqtt.connect("me", expiry_s=100 if kept else 0)
        await talk.subscribe("$share/g/a", qos=2)
        await publisher.publish("a", b"x", 2)
        assert await talk.payloads(1) == [b"x"]
        await other.subscribe("$share/g/a", "fence", qos=2)
        await leave(mqtt, talk, "me")
        if kept:
            await mqtt.connect("me", clean=True, present=False)
        assert await before_fence(other, publisher) == []


@statement(V5, "MQTT-4.8.2-6")
@pytest.mark.parametrize("qos", [1, 2])
async def test_what_a_member_refuses_goes_to_nobody_else(tmp_path: Path, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher, other = await mqtt.connect("p"), await mqtt.connect("other")
        talk = await mqtt.connect("me")
        await talk.subscribe("$share/g/a", qos=2)
        await publisher.publish("a", b"x", qos)
        (found,) = await talk.messages(1)
        kind = PacketType.PUBACK if qos == 1 else PacketType.PUBREC
        await talk.send(Ack(kind, found.packet_id, ReasonCode.UNSPECIFIED_ERROR))
        assert await talk.rest() == []
        await other.subscribe("$share/g/a", "fence", qos=2)
        await leave(mqtt, talk, "me")
        assert await before_fence(other, publisher) == []
