"""PUBLISH and its acknowledgements (sections 3.3 to 3.7), without retained messages."""

from pathlib import Path
from typing import Any

import pytest
import trio
from tests.mqtt.normative import (
    VERSIONS,
    after_connect,
    before_fence,
    check_disconnect,
    leave,
    packet,
    publish_packet,
    statement,
    stay,
)
from tests.wire_clients.mqtt import MqttClient, mqtt_broker
from trio.testing import MockClock

from martlet.testing.clock import TrioClock
from martlet_mqtt.wire.codes import V4, V5, PacketType, ReasonCode
from martlet_mqtt.wire.packets import Ack, Connect, Disconnect, FilterSubscription, Pingreq, Pingresp, Publish
from martlet_mqtt.wire.properties import Properties, Property, encode_text

ACK_REASONS = {0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99}
RELEASE_REASONS = {0x00, 0x92}
NOT_TEXT = Properties({Property.PAYLOAD_FORMAT: 1})  # with a payload that is none


def expiring(seconds: int) -> Properties:
    return Properties({Property.MESSAGE_EXPIRY: seconds})


async def raw_packet(talk: MqttClient) -> bytes:
    """Return the next packet, which is a short one, as it came."""
    head = await talk.wire.receive_exactly(2)
    assert head[1] < 128
    return head + await talk.wire.receive_exactly(head[1])


@statement(V4, "MQTT-3.3.1-3")
@statement(V5, "MQTT-3.3.1-3")
@VERSIONS
@pytest.mark.parametrize("qos", [1, 2])
async def test_dup_is_not_handed_on(tmp_path: Path, version: int, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", version)
        await talk.subscribe("a", qos=2)
        await talk.publish("a", b"x", qos, is_duplicate=True)
        (found,) = await talk.messages(1)
        assert (found.payload, found.qos, found.is_duplicate) == (b"x", qos, False)


@statement(V4, "MQTT-3.3.1-1", "MQTT-3.3.1-3", "MQTT-4.4.0-1")
@statement(V5, "MQTT-3.3.1-1", "MQTT-3.3.1-3")
@VERSIONS
@pytest.mark.parametrize("qos", [1, 2])
async def test_what_is_sent_again_has_dup(tmp_path: Path, version: int, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", version), await mqtt.connect("p", version)
        await talk.subscribe("a", qos=2)
        await publisher.publish("a", b"x", qos)
        (first,) = await talk.messages(1)
        for _ in range(2):
            await leave(mqtt, talk, "me")
            talk = await stay(mqtt, "me", version, present=True)
            (again,) = await talk.messages(1)
            assert (again.is_duplicate, again.packet_id, again.payload) == (True, first.packet_id, b"x")
        await publisher.publish("a", b"new", qos)
        (new,) = await talk.messages(1)
        assert (new.is_duplicate, new.payload) == (False, b"new")


@statement(V4, "MQTT-3.3.2-2", "MQTT-4.7.1-1", "MQTT-4.7.3-1")
@statement(V5, "MQTT-3.3.2-2", "MQTT-4.7.0-1", "MQTT-4.7.3-1")
@VERSIONS
@pytest.mark.parametrize("name", [b"#", b"+", b"a/#", b"a/+/b", b"a+", b"#a", b""])
async def test_names_with_wildcards_and_empty_ones_are_refused(tmp_path: Path, version: int, name: bytes) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, publisher = await mqtt.connect("w", version), await mqtt.connect("p", version)
        await watcher.subscribe("#", qos=1)
        for flags in (0, 2, 4):
            last = await after_connect(mqtt, publish_packet(version, name, b"x", flags), version)
            if version == V5:
                assert isinstance(last, Disconnect)
                assert last.reason in (ReasonCode.TOPIC_NAME_INVALID, ReasonCode.PROTOCOL_ERROR)
            else:
                assert last is None
        assert await before_fence(watcher, publisher) == []


@statement(V4, "MQTT-3.3.2-3", "MQTT-3.3.2-1")
@statement(V5, "MQTT-3.3.2-3", "MQTT-3.3.2-1")
@VERSIONS
async def test_only_names_that_match_are_delivered_and_under_their_own_name(tmp_path: Path, version: int) -> None:
    names = ["a", "a/b", "a/b/c", "b", "/a", "a/", "a//b", "ab", "A", "a/b/c/d"]
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p", version)
        for topic_filter, expected in (
            ("a", ["a"]),
            ("a/#", ["a", "a/b", "a/b/c", "a/", "a//b", "a/b/c/d"]),
            ("a/+", ["a/b", "a/"]),
            ("+", ["a", "b", "ab", "A"]),
            ("+/+", ["a/b", "/a", "a/"]),
            ("a/+/+", ["a/b/c", "a//b"]),
            ("+/b/#", ["a/b", "a/b/c", "a/b/c/d"]),
            ("/+", ["/a"]),
        ):
            talk = await mqtt.connect("s", version)
            await talk.subscribe(topic_filter, "fence/end", qos=1)
            for name in names:
                await publisher.publish(name, name.encode(), 1)
            await publisher.publish("fence/end", b"the fence", 1)
            found: list[str] = []
            while not found or found[-1] != "fence/end":
                (one,) = await talk.messages(1)
                found.append(one.topic)
                assert one.payload in (one.topic.encode(), b"the fence")
                await talk.acknowledge(one)
            assert [name for name in found if name != "fence/end"] == expected, topic_filter


@statement(V4, "MQTT-3.3.4-1")
@statement(V5, "MQTT-3.3.4-1")
@VERSIONS
async def test_publish_is_answered_as_its_qos_demands(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", version)
        await talk.send(Publish("a", b"x"), Pingreq())
        assert isinstance(await talk.receive(), Pingresp)
        await talk.send(Publish("a", b"x", 1, packet_id=5), Publish("a", b"x", 2, packet_id=6))
        assert await talk.receive() == Ack(PacketType.PUBACK, 5)
        assert await talk.receive() == Ack(PacketType.PUBREC, 6)
        await talk.send(Ack(PacketType.PUBREL, 6))
        assert await talk.receive() == Ack(PacketType.PUBCOMP, 6)


# several subscriptions that match


@statement(V4, "MQTT-3.3.5-1")
@statement(V5, "MQTT-3.3.4-2")
@VERSIONS
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_overlapping_subscriptions_deliver_with_the_highest_qos(tmp_path: Path, version: int, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await mqtt.connect("c", version), await mqtt.connect("p", version)
        wanted = [
            FilterSubscription("a/#", 0),
            FilterSubscription("a/b", qos),
            FilterSubscription("+/b", 0),
            FilterSubscription("fence", 1),
        ]
        await talk.subscribe(*wanted)
        await publisher.publish("a/b", b"x", 2)
        (found,) = await talk.messages(1)
        assert found.qos == qos
        if qos:
            await talk.acknowledge(found)
        assert set(await before_fence(talk, publisher)) <= {b"x"}  # more copies would be allowed


@statement(V5, "MQTT-3.3.4-3", "MQTT-3.3.4-4", "MQTT-3.3.4-5")
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_each_copy_has_the_identifiers_of_its_subscriptions(tmp_path: Path, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await mqtt.connect("c"), await mqtt.connect("p")
        for identifier, topic_filter in ((7, "a/#"), (268_435_455, "a/b"), (0, "+/b"), (7, "#"), (9, "c")):
            await talk.subscribe(topic_filter, qos=qos, identifier=identifier)
        await publisher.publish("a/b", b"one", 2, properties=Properties({Property.CONTENT_TYPE: "t"}))
        await publisher.publish("a/b", b"two", 2)
        await publisher.publish("c", b"three", 2)
        found = await talk.messages(3)
        told = [sorted(set(each.properties.identifiers)) for each in found]
        assert told == [[7, 268_435_455], [7, 268_435_455], [7, 9]]


@statement(V5, "MQTT-3.3.4-3", "MQTT-3.3.4-4")
async def test_a_session_that_continues_has_its_subscription_identifiers(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", V5), await mqtt.connect("p")
        await talk.subscribe("a", qos=1, identifier=5)
        await leave(mqtt, talk, "me")
        await publisher.publish("a", b"missed", 1)
        talk = await stay(mqtt, "me", V5, present=True)
        (found,) = await talk.messages(1)
        assert (found.payload, found.properties.identifiers) == (b"missed", (5,))


@statement(V5, "MQTT-3.3.4-3", "MQTT-3.3.4-4")
@pytest.mark.parametrize("qos", [1, 2])
async def test_what_is_sent_again_has_its_subscription_identifiers(tmp_path: Path, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", V5), await mqtt.connect("p")
        await talk.subscribe("a", qos=2, identifier=5)
        await publisher.publish("a", b"x", qos)
        (first,) = await talk.messages(1)
        assert first.properties.identifiers == (5,)
        await leave(mqtt, talk, "me")
        talk = await stay(mqtt, "me", V5, present=True)
        (again,) = await talk.messages(1)
        assert again.is_duplicate
        assert again.properties.identifiers == (5,)


@statement(V5, "MQTT-3.3.4-6")
async def test_a_subscription_identifier_of_a_client_in_publish_ends_the_connection(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        last = await after_connect(mqtt, publish_packet(V5, b"a", properties=b"\x0b\1"), V5)
        check_disconnect(last, V5, ReasonCode.PROTOCOL_ERROR)


# properties that are handed on


@statement(V5, "MQTT-3.3.2-4", "MQTT-3.3.2-15", "MQTT-3.3.2-16", "MQTT-3.3.2-17", "MQTT-3.3.2-18", "MQTT-3.3.2-20")
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize(
    ("values", "user"),
    [
        ({Property.PAYLOAD_FORMAT: 1}, ()),
        ({Property.PAYLOAD_FORMAT: 0}, ()),
        ({Property.CONTENT_TYPE: ""}, ()),
        ({Property.CONTENT_TYPE: "text/plain; charset=é"}, ()),
        ({Property.RESPONSE_TOPIC: "answers/é/1"}, ()),
        ({Property.CORRELATION_DATA: b""}, ()),
        ({Property.CORRELATION_DATA: bytes(range(256))}, ()),
        ({}, (("b", "1"), ("a", "1"), ("b", "1"), ("", ""), ("b", "0"))),
        ({}, (("TAGS", "x"), ("KEYS", "y"), ("DELAY", "3"), ("MQTT_QOS", "0"))),
        ({Property.RESPONSE_TOPIC: "r", Property.CORRELATION_DATA: b"c"}, (("k", "v" * 60_000),)),
    ],
)
async def test_what_a_message_says_about_itself_is_delivered_unchanged(
    tmp_path: Path, qos: int, values: dict[Property, Any], user: tuple[tuple[str, str], ...]
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        sent = Properties(values, user)
        talks = [await mqtt.connect(f"c{number}") for number in range(2)]
        for talk in talks:
            await talk.subscribe("a", qos=qos)
        publisher = await mqtt.connect("p")
        await publisher.publish("a", "é".encode(), 2, properties=sent)
        for talk in talks:
            (found,) = await talk.messages(1)
            assert found.payload == "é".encode()
            assert found.properties.user == user
            # A payload format indicator of 0 says the same as none (section 3.3.2.3.2).
            default = {Property.PAYLOAD_FORMAT: 0}
            assert {**default, **found.properties._values} == {**default, **values}


@statement(V5, "MQTT-3.3.2-4")
async def test_a_payload_format_indicator_of_0_is_delivered(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c")
        await talk.subscribe("a")
        await talk.publish("a", b"\xff", 1, properties=Properties({Property.PAYLOAD_FORMAT: 0}))
        (found,) = await talk.messages(1)
        assert found.properties.get(Property.PAYLOAD_FORMAT) == 0


@statement(V5, "MQTT-3.3.2-14", "MQTT-4.13.1-1")
@pytest.mark.parametrize("topic", ["a/#", "+", ""])
async def test_a_response_topic_with_wildcards_ends_the_connection(tmp_path: Path, topic: str) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for flags in (0, 2, 4):
            data = publish_packet(V5, b"a", b"x", flags, properties=b"\x08" + encode_text(topic))
            last = await after_connect(mqtt, data, V5)
            assert isinstance(last, Disconnect)
            assert last.reason in (ReasonCode.PROTOCOL_ERROR, ReasonCode.TOPIC_NAME_INVALID)


# expiry


@statement(V5, "MQTT-3.3.2-5")
@pytest.mark.parametrize("qos", [1, 2])
async def test_an_expired_message_is_not_delivered(tmp_path: Path, qos: int, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        talk, publisher = await stay(mqtt, "me", V5), await mqtt.connect("p")
        await talk.subscribe("a", "fence", qos=qos)
        await leave(mqtt, talk, "me")
        for seconds in (10, 50, 0):
            await publisher.publish("a", b"%d" % seconds, qos, properties=expiring(seconds))
        await publisher.publish("a", b"for ever", qos)
        await trio.sleep(20)
        talk = await stay(mqtt, "me", V5, present=True)
        assert await before_fence(talk, publisher) == [b"50", b"for ever"]


@statement(V5, "MQTT-3.3.2-6")
async def test_the_time_that_a_message_waited_is_taken_off_its_expiry(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        talk, publisher = await stay(mqtt, "me", V5), await mqtt.connect("p")
        await talk.subscribe("a", qos=1)
        await publisher.publish("a", b"at once", 1, properties=expiring(60))
        (found,) = await talk.messages(1)
        assert found.properties.number(Property.MESSAGE_EXPIRY, -1) in (59, 60)
        await talk.acknowledge(found)
        await leave(mqtt, talk, "me")
        await publisher.publish("a", b"waited", 1, properties=expiring(60))
        await trio.sleep(25)
        talk = await stay(mqtt, "me", V5, present=True)
        (found,) = await talk.messages(1)
        assert found.payload == b"waited"
        assert found.properties.number(Property.MESSAGE_EXPIRY, -1) in (34, 35)


@statement(V5, "MQTT-3.3.2-5", "MQTT-3.3.2-6")
async def test_retained_messages_expire(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        publisher = await mqtt.connect("p")
        await publisher.publish("a", b"kept", 1, retain=True, properties=expiring(60))
        await mqtt.settle()
        await trio.sleep(20)
        talk = await mqtt.connect("one")
        await talk.subscribe("a", qos=1)
        (found,) = await talk.messages(1)
        assert (found.payload, found.retain) == (b"kept", True)
        assert found.properties.number(Property.MESSAGE_EXPIRY, -1) in (39, 40)
        await trio.sleep(45)
        late = await mqtt.connect("two")
        await late.subscribe("a", "fence", qos=1)
        assert await before_fence(late, publisher) == []


# topic aliases


@statement(V5, "MQTT-3.3.2-8", "MQTT-3.3.2-9", "MQTT-3.2.2-17", "MQTT-3.2.2-18")
async def test_an_alias_of_0_or_above_the_maximum_ends_the_connection(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        _, answer = await mqtt.answer(Connect("c", V5))
        limit = answer.properties.number(Property.TOPIC_ALIAS_MAXIMUM, 0)
        for alias in (0, limit + 1, 65_535):
            data = publish_packet(V5, b"a", properties=b"\x23" + alias.to_bytes(2))
            check_disconnect(await after_connect(mqtt, data, V5), V5, ReasonCode.TOPIC_ALIAS_INVALID)


@statement(V5, "MQTT-3.3.2-12")
async def test_every_alias_up_to_the_maximum_is_accepted(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, answer = await mqtt.answer(Connect("c", V5))
        limit = answer.properties.number(Property.TOPIC_ALIAS_MAXIMUM, 0)
        assert limit > 0
        await talk.subscribe("a/+", qos=0)
        for qos in range(3):
            for alias in range(1, limit + 1):
                properties = Properties({Property.TOPIC_ALIAS: alias})
                await talk.publish(f"a/{qos}-{alias}", b"named", qos, properties=properties)
            for alias in range(1, limit + 1):
                await talk.publish("", b"%d" % alias, qos, properties=Properties({Property.TOPIC_ALIAS: alias}))
            found = [each for each in await talk.messages(2 * limit) if each.payload != b"named"]
            assert {each.topic: each.payload for each in found} == {
                f"a/{qos}-{alias}": b"%d" % alias for alias in range(1, limit + 1)
            }


@statement(V5, "MQTT-3.3.2-7")
async def test_aliases_of_a_client_end_with_its_connection(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await stay(mqtt, "c", V5)
        await talk.publish("a", b"x", 1, properties=Properties({Property.TOPIC_ALIAS: 1}))
        await leave(mqtt, talk, "c")
        again = await stay(mqtt, "c", V5, present=True)
        await again.send(Publish("", b"y", properties=Properties({Property.TOPIC_ALIAS: 1})))
        last = await again.closed()
        assert isinstance(last, Disconnect)
        assert last.reason in (ReasonCode.PROTOCOL_ERROR, ReasonCode.TOPIC_ALIAS_INVALID)


@statement(V5, "MQTT-3.3.2-7", "MQTT-3.3.2-11", "MQTT-3.1.2-26", "MQTT-3.3.2-8")
async def test_aliases_to_a_client_end_with_its_connection_and_stay_below_its_maximum(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p")
        talk = await stay(mqtt, "me", V5, values={Property.TOPIC_ALIAS_MAXIMUM: 2})
        await talk.subscribe("a/long/name/+", qos=1)
        for _ in range(2):
            names: dict[int, str] = {}
            seen: list[str] = []
            for number in range(12):
                await publisher.publish(f"a/long/name/{number % 4}", b"x", 1)
                (found,) = await talk.messages(1)
                await talk.acknowledge(found)
                alias = found.properties.number(Property.TOPIC_ALIAS, -1)
                assert alias in (-1, 1, 2)
                if found.topic and alias > 0:
                    names[alias] = found.topic
                seen.append(found.topic or names[alias])  # KeyError: an alias that this connection does not know
            assert seen == [f"a/long/name/{number % 4}" for number in range(12)]
            assert len(names) == 2
            await leave(mqtt, talk, "me")
            talk = await stay(mqtt, "me", V5, present=True, values={Property.TOPIC_ALIAS_MAXIMUM: 2})


@statement(V5, "MQTT-3.1.2-27")
@pytest.mark.parametrize("values", [{}, {Property.TOPIC_ALIAS_MAXIMUM: 0}])
async def test_clients_that_do_not_ask_get_no_aliases(tmp_path: Path, values: dict[Property, Any]) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await mqtt.connect("c", values=values), await mqtt.connect("p")
        await talk.subscribe("a/long/name", qos=0)
        for _ in range(3):
            await publisher.publish("a/long/name", b"x", 1, properties=Properties({Property.TOPIC_ALIAS: 1}))
        found = await talk.messages(3)
        assert [each.topic for each in found] == ["a/long/name"] * 3
        assert [each.properties.get(Property.TOPIC_ALIAS) for each in found] == [None] * 3


# packets that are too large for the client


@statement(V5, "MQTT-3.1.2-24", "MQTT-3.1.2-25")
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("alias_max", [0, 5])
async def test_messages_that_are_too_large_are_passed_over(tmp_path: Path, qos: int, alias_max: int) -> None:
    limit = 100
    async with mqtt_broker(tmp_path) as mqtt:
        values = {Property.MAXIMUM_PACKET_SIZE: limit, Property.RECEIVE_MAXIMUM: 2}
        if alias_max:
            values[Property.TOPIC_ALIAS_MAXIMUM] = alias_max
        talk, publisher = await mqtt.connect("c", values=values), await mqtt.connect("p")
        await talk.subscribe("a", qos=qos)
        head = 2 + 3 + 1 + (2 if qos else 0)  # two bytes of fixed header, the name, properties, and the identifier
        largest = limit - head
        for size in (largest + 1, 5000, 30, largest + 1, 20_000, largest, 1):
            await publisher.publish("a", bytes(size), 2)
        found: list[int] = []
        while not found or found[-1] != 1:
            (one,) = await talk.messages(1)
            found.append(len(one.payload))
            if qos:
                await talk.acknowledge(one)
        assert [size for size in found if size != largest] == [30, 1]
        assert found == [30, largest, 1] or alias_max


@statement(V5, "MQTT-3.1.2-24", "MQTT-3.1.2-25")
async def test_retained_messages_and_those_sent_again_respect_the_maximum_of_the_connection(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", V5), await mqtt.connect("p")
        await publisher.publish("kept", bytes(500), 1, retain=True)
        await talk.subscribe("a", "fence", qos=1)
        await publisher.publish("a", bytes(600), 1)
        await publisher.publish("a", b"small", 1)
        await talk.messages(2)
        await leave(mqtt, talk, "me")
        await mqtt.settle()
        again = await stay(mqtt, "me", V5, present=True, values={Property.MAXIMUM_PACKET_SIZE: 200})
        await again.subscribe("kept", qos=1)
        assert await before_fence(again, publisher) == [b"small"]


@statement(V5, "MQTT-3.4.2-2", "MQTT-3.4.2-3", "MQTT-3.5.2-2", "MQTT-3.5.2-3", "MQTT-3.1.2-24")
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("limit", [20, 30, 60])
async def test_what_explains_a_refusal_does_not_make_acknowledgements_too_large(
    tmp_path: Path, qos: int, limit: int
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = mqtt.open()
        await talk.send(Connect("c", V5, properties=Properties({Property.MAXIMUM_PACKET_SIZE: limit})))
        await raw_packet(talk)
        await talk.send(Publish("a", b"\xff", qos, packet_id=1, properties=NOT_TEXT))
        answer = await raw_packet(talk)
        assert answer[2:5] == b"\0\1\x99"
        assert len(answer) <= limit


@statement(V5, "MQTT-3.6.2-2", "MQTT-3.6.2-3", "MQTT-3.7.2-2", "MQTT-3.7.2-3", "MQTT-3.9.2-1", "MQTT-3.9.2-2")
@statement(V5, "MQTT-3.11.2-1", "MQTT-3.11.2-2", "MQTT-3.1.2-24")
async def test_other_answers_stay_below_the_maximum_as_well(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = mqtt.open()
        await talk.send(Connect("c", V5, properties=Properties({Property.MAXIMUM_PACKET_SIZE: 20})))
        await raw_packet(talk)
        for kind, first in ((PacketType.PUBREL, 0x70), (PacketType.PUBREC, 0x62)):  # of unknown identifiers
            await talk.send(Ack(kind, 9))
            answer = await raw_packet(talk)
            assert (answer[0], answer[2:5]) == (first, b"\0\x09\x92")
            assert len(answer) <= 20
        bad = encode_text("a/#/b")
        await talk.wire.send(packet(0x82, b"\0\1\0", bad, b"\0", bad, b"\0"))
        answer = await raw_packet(talk)
        assert (answer[0], answer[-2:]) == (0x90, b"\x8f\x8f")
        assert len(answer) <= 20
        await talk.wire.send(packet(0xA2, b"\0\2\0", bad, bad))
        answer = await raw_packet(talk)
        assert (answer[0], answer[-2:]) == (0xB0, b"\x11\x11")
        assert len(answer) <= 20


# reasons


@statement(V5, "MQTT-3.1.2-29")
@pytest.mark.parametrize("asks", [0, 1])
async def test_acknowledgements_explain_only_to_clients_that_want_it(tmp_path: Path, asks: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", values={Property.REQUEST_PROBLEM_INFORMATION: asks})
        for qos in (1, 2):
            await talk.send(Publish("a", b"\xff", qos, packet_id=1, properties=NOT_TEXT))
            answer = await talk.expect(Ack)
            assert answer.reason == ReasonCode.PAYLOAD_FORMAT_INVALID
            assert bool(answer.properties) <= bool(asks)
        for kind in (PacketType.PUBREL, PacketType.PUBREC):
            await talk.send(Ack(kind, 9))
            assert bool((await talk.expect(Ack)).properties) <= bool(asks)
        assert await talk.subscribe("a/#/b") == (ReasonCode.TOPIC_FILTER_INVALID,)
        assert await talk.unsubscribe("no") == (ReasonCode.NO_SUBSCRIPTION_EXISTED,)


@statement(V5, "MQTT-3.4.2-1", "MQTT-3.5.2-1", "MQTT-3.6.2-1", "MQTT-3.7.2-1")
async def test_acknowledgements_have_only_their_reason_codes(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        mqtt.broker.authorizers = (lambda identity, action, name: "secret" not in name,)
        talk = await mqtt.connect("c")
        found: list[int] = []
        for qos in (1, 2):
            for packet_id, (name, payload, properties) in enumerate(
                [
                    ("a", b"\xff", NOT_TEXT),
                    ("secret", b"x", Properties({})),
                    ("a", b"x", Properties({}, [("DELAY", "nonsense")])),
                    ("a", b"x", Properties({})),
                ],
                1,
            ):
                reason = await talk.publish(name, payload, qos, packet_id, properties=properties)
                found.append(reason)
        assert set(found) <= ACK_REASONS
        assert {ReasonCode.SUCCESS, ReasonCode.PAYLOAD_FORMAT_INVALID, ReasonCode.NOT_AUTHORIZED} <= set(found)
        for kind, answers in ((PacketType.PUBREL, PacketType.PUBCOMP), (PacketType.PUBREC, PacketType.PUBREL)):
            await talk.send(Ack(kind, 9))
            answer = await talk.expect(Ack)
            assert answer.kind is answers
            assert answer.reason in RELEASE_REASONS


@statement(V4, "MQTT-3.3.5-2")
@pytest.mark.parametrize("qos", [1, 2])
async def test_a_message_without_permission_is_acknowledged_and_not_delivered(tmp_path: Path, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        mqtt.broker.authorizers = (lambda identity, action, name: action != "publish" or "secret" not in name,)
        talk = await mqtt.connect("c", V4)
        await talk.subscribe("#", qos=1)
        assert await talk.publish("secret", b"x", qos) == 0
        assert await before_fence(talk, talk) == []
