"""The exchanges of MQTT between clients and a broker in memory."""

from pathlib import Path

import pytest
from tests.wire_clients.mqtt import mqtt_broker

from martlet.errors import Reason, Refused
from martlet.sessions.session import Session
from martlet_mqtt.wire.codec import encode_packet
from martlet_mqtt.wire.codes import V3, V4, V5, PacketType, ReasonCode
from martlet_mqtt.wire.packets import (
    Ack,
    Connack,
    Connect,
    Disconnect,
    FilterSubscription,
    Publish,
    Suback,
    Subscribe,
    Will,
)
from martlet_mqtt.wire.properties import Properties, Property

VERSIONS = pytest.mark.parametrize("version", [V3, V4, V5])
QOS = (0, 1, 2)


@VERSIONS
@pytest.mark.parametrize("qos", QOS)
@pytest.mark.parametrize("granted", QOS)
async def test_a_message_has_the_lower_qos_of_publisher_and_subscription(
    tmp_path: Path, version: int, qos: int, granted: int
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        subscriber, publisher = await mqtt.connect("s", version), await mqtt.connect("p", version)
        assert await subscriber.subscribe("a/+", qos=granted) == (granted,)
        await publisher.publish("a/b", b"one", qos)
        await publisher.publish("a/c/d", b"other", qos)
        await publisher.publish("a/b", b"two", qos)
        found = await subscriber.messages(2)
        assert [(each.topic, each.payload, each.qos) for each in found] == [
            ("a/b", b"one", min(qos, granted)),
            ("a/b", b"two", min(qos, granted)),
        ]
        for each in found:
            await subscriber.acknowledge(each)
        assert await subscriber.rest() == []


@VERSIONS
async def test_a_read_with_packets_of_all_kinds_is_handled_in_order(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", version)
        await talk.subscribe("#")
        sent = [
            Publish(f"n/{index % 3}", b"%d" % index, index % 3, packet_id=index if index % 3 else 0)
            for index in range(1, 200)
        ]
        await talk.send(*sent)
        found: list[bytes] = []
        while len(found) < len(sent):
            packet = await talk.receive()
            if isinstance(packet, Publish):
                found.append(packet.payload)
                if packet.qos:
                    kind = PacketType.PUBACK if packet.qos == 1 else PacketType.PUBREC
                    await talk.send(Ack(kind, packet.packet_id))
            elif isinstance(packet, Ack) and packet.kind is PacketType.PUBREC:
                await talk.send(Ack(PacketType.PUBREL, packet.packet_id))
            elif isinstance(packet, Ack) and packet.kind is PacketType.PUBREL:
                await talk.send(Ack(PacketType.PUBCOMP, packet.packet_id))
        for name in range(3):
            expected = [packet.payload for packet in sent if packet.topic == f"n/{name}"]
            assert [each for each in found if int(each) % 3 == name] == expected


async def test_a_session_returns_with_what_it_missed_and_what_was_in_flight(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("me", expiry_s=100, present=False)
        await talk.subscribe("a/#", qos=2)
        await talk.subscribe("zero", qos=0)
        publisher = await mqtt.connect("p")
        await publisher.publish("a/1", b"one", 1)
        await publisher.publish("a/2", b"two", 2)
        await publisher.publish("a/3", b"three", 2)
        one, two, three = await talk.messages(3)
        await talk.send(Ack(PacketType.PUBREC, two.packet_id))
        assert (await talk.expect(Ack)).kind is PacketType.PUBREL
        talk.hang_up()
        await publisher.publish("a/4", b"four", 1)
        await publisher.publish("zero", b"not kept", 1)
        again = await mqtt.connect("me", clean=False, expiry_s=100, present=True)
        release = await again.expect(Ack)
        assert (release.kind, release.packet_id) == (PacketType.PUBREL, two.packet_id)
        found = await again.messages(3)
        assert [(each.payload, each.packet_id, each.qos, each.is_duplicate) for each in found[:2]] == [
            (b"one", one.packet_id, 1, True),
            (b"three", three.packet_id, 2, True),
        ]
        assert (found[2].payload, found[2].is_duplicate) == (b"four", False)
        await again.send(Ack(PacketType.PUBCOMP, two.packet_id))
        for each in found:
            await again.acknowledge(each)
        await publisher.publish("zero", b"now", 0)
        assert await again.payloads(1) == [b"now"]
        assert await again.rest() == []


async def test_a_clean_start_forgets_the_session(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("me", expiry_s=100)
        await talk.subscribe("a")
        talk.hang_up()
        publisher = await mqtt.connect("p")
        await publisher.publish("a", b"old", 1)
        again = await mqtt.connect("me", expiry_s=100, present=False)
        await publisher.publish("a", b"new", 1)
        assert await again.rest() == []
        again.hang_up()
        last = await mqtt.connect("me", clean=True, present=False)
        last.hang_up()
        await mqtt.connect("me", clean=False, present=False)


async def test_a_message_of_qos_2_that_is_sent_again_is_stored_once(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        subscriber = await mqtt.connect("s")
        await subscriber.subscribe("a", qos=0)
        talk = await mqtt.connect("me", expiry_s=100)
        packet = Publish("a", b"once", 2, packet_id=7)
        await talk.send(packet, packet)
        assert [(await talk.expect(Ack)).reason for _ in range(2)] == [0, 0]
        talk.hang_up()
        talk = await mqtt.connect("me", clean=False, expiry_s=100, present=True)
        await talk.send(Publish("a", b"once", 2, is_duplicate=True, packet_id=7))
        assert (await talk.expect(Ack)).kind is PacketType.PUBREC
        await talk.send(Ack(PacketType.PUBREL, 7))
        assert (await talk.expect(Ack)).reason == ReasonCode.SUCCESS
        await talk.send(Ack(PacketType.PUBREL, 7))
        assert (await talk.expect(Ack)).reason == ReasonCode.PACKET_IDENTIFIER_NOT_FOUND
        await talk.publish("a", b"twice", 2, 7)
        assert await subscriber.payloads(2) == [b"once", b"twice"]
        assert await subscriber.rest() == []


@pytest.mark.parametrize("qos", QOS)
async def test_retained_messages_come_when_a_subscription_begins(tmp_path: Path, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p")
        for name in ("a/b", "a/c", "a/b/c", "x", "a/gone"):
            await publisher.publish(name, name.encode(), qos, retain=True)
        await publisher.publish("a/b", b"newer", qos, retain=True)
        await publisher.publish("a/gone", b"", qos, retain=True)
        await mqtt.settle()
        for topic_filter, expected in (
            ("a/+", {b"newer", b"a/c"}),
            ("#", {b"newer", b"a/c", b"a/b/c", b"x"}),
            ("a/b", {b"newer"}),
            ("a/b/#", {b"newer", b"a/b/c"}),
            ("+", {b"x"}),
            ("no/+", set()),
        ):
            talk = await mqtt.connect()
            await talk.subscribe(topic_filter, qos=2)
            found = await talk.messages(len(expected))
            assert {(each.payload, each.retain, each.qos) for each in found} == {(one, True, qos) for one in expected}
            for each in found:
                await talk.acknowledge(each)
            assert await talk.rest() == []


async def test_subscription_options_choose_what_comes(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        other = await mqtt.connect("other")
        await other.publish("a", b"kept", 1, retain=True)
        await mqtt.settle()
        me = await mqtt.connect("me")
        await me.subscribe(FilterSubscription("a", 0, no_local=True, retain_handling=2))
        await me.publish("a", b"mine", 1)
        await other.publish("a", b"yours", 1, retain=True)
        (found,) = await me.messages(1)
        assert (found.payload, found.retain) == (b"yours", False)
        await me.subscribe(FilterSubscription("a", 0, retain_as_published=True, retain_handling=1), identifier=5)
        await other.publish("a", b"as published", 1, retain=True)
        (found,) = await me.messages(1)
        assert (found.payload, found.retain, found.properties.identifiers) == (b"as published", True, (5,))
        await me.unsubscribe("a")
        await me.subscribe(FilterSubscription("a", 0, retain_handling=1))
        assert await me.payloads(1) == [b"as published"]
        assert await me.rest() == []


async def test_properties_come_through(tmp_path: Path) -> None:
    values = {
        Property.PAYLOAD_FORMAT: 1,
        Property.CONTENT_TYPE: "text/plain",
        Property.RESPONSE_TOPIC: "answers/me",
        Property.CORRELATION_DATA: b"\x00\xff\x01",
    }
    user = (("b", "1"), ("a", "2"), ("b", "3"), ("", ""), ("TAGS", "x"), ("é", "\x01\x02"))
    async with mqtt_broker(tmp_path) as mqtt:
        subscriber, publisher = await mqtt.connect("s"), await mqtt.connect("p")
        await subscriber.subscribe("a")
        for sent in (
            Properties(values, user),
            Properties({}, (("z", "1"), ("a", "2"))),
            Properties({Property.CORRELATION_DATA: b"text"}),
            Properties(values, tuple(("k" * 500, "v" * 500) for _ in range(60))),
        ):
            await publisher.publish("a", "päyload".encode(), 1, properties=sent)
            (found,) = await subscriber.messages(1)
            assert found.properties == sent
            assert found.payload.decode() == "päyload"
            await subscriber.acknowledge(found)


async def test_a_will_is_published_unless_the_client_says_that_it_goes(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher = await mqtt.connect("w")
        await watcher.subscribe("will/#")
        orderly = await mqtt.connect("a", will=Will("will/a", b"a is gone"))
        await orderly.disconnect()
        sudden = await mqtt.connect("b", will=Will("will/b", b"b is gone", 1, True))
        sudden.hang_up()
        (found,) = await watcher.messages(1)
        assert (found.payload, found.qos) == (b"b is gone", 1)
        wanted = await mqtt.connect("c", will=Will("will/c", b"c is gone"))
        await wanted.disconnect(ReasonCode.DISCONNECT_WITH_WILL)
        assert await watcher.payloads(1) == [b"c is gone"]
        await mqtt.settle()
        late = await mqtt.connect()
        await late.subscribe("will/b")
        assert await late.payloads(1) == [b"b is gone"]


async def test_a_client_identifier_is_taken_over(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        first = await mqtt.connect("me", expiry_s=100)
        await first.subscribe("a")
        second = await mqtt.connect("me", clean=False, expiry_s=100, present=True)
        last = await first.closed()
        assert isinstance(last, Disconnect)
        assert last.reason == ReasonCode.SESSION_TAKEN_OVER
        await second.publish("a", b"still there", 1)
        assert await second.payloads(1) == [b"still there"]


async def test_aliases_stand_for_names_in_both_directions(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        subscriber = await mqtt.connect("s", values={Property.TOPIC_ALIAS_MAXIMUM: 5})
        publisher = await mqtt.connect("p")
        await subscriber.subscribe("a/long/name/#")
        await publisher.publish("a/long/name/1", b"1", 1, properties=Properties({Property.TOPIC_ALIAS: 3}))
        await publisher.publish("", b"2", 1, properties=Properties({Property.TOPIC_ALIAS: 3}))
        first, second = await subscriber.messages(2)
        alias = first.properties.number(Property.TOPIC_ALIAS, 0)
        assert (first.topic, first.payload, alias > 0) == ("a/long/name/1", b"1", True)
        assert (second.topic, second.payload) == ("", b"2")
        assert second.properties.number(Property.TOPIC_ALIAS, 0) == alias
        await publisher.send(Publish("", b"", properties=Properties({Property.TOPIC_ALIAS: 4})))
        last = await publisher.closed()
        assert isinstance(last, Disconnect)
        assert last.reason == ReasonCode.PROTOCOL_ERROR


@VERSIONS
async def test_connecting_answers_with_the_protocols_reasons(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for client_id in ("a\x7fb", "a\x01", "a\nb"):
            talk, answer = await mqtt.answer(Connect(client_id, version))
            assert answer.reason == (ReasonCode.CLIENT_IDENTIFIER_NOT_VALID if version == V5 else 2)
            assert await talk.closed() is None
        _, answer = await mqtt.answer(Connect("", version, clean_start=False))
        assert answer.reason == (0 if version == V5 else 2)
        assigned = answer.properties.text(Property.ASSIGNED_CLIENT_IDENTIFIER)
        assert (assigned is not None) == (version == V5)


@pytest.mark.parametrize("qos", QOS)
async def test_a_shared_subscription_brings_each_message_to_one_client(tmp_path: Path, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        members = [await mqtt.connect(f"m{number}") for number in range(3)]
        for member in members:
            assert await member.subscribe("$share/group/a/+", qos=qos) == (qos,)
        publisher = await mqtt.connect("p")
        for number in range(60):
            await publisher.publish(f"a/{number % 5}", b"%d" % number, 2)
        await publisher.publish("b", b"other", 2)
        found: list[int] = []
        while len(found) < 60:
            for member in members:
                for packet in await member.rest():
                    found.append(int(packet.payload))
                    await member.acknowledge(packet)
        assert sorted(found) == list(range(60))
        assert [await member.rest() for member in members] == [[], [], []]


async def test_what_a_shared_client_did_not_acknowledge_goes_to_another_one_unless_it_has_qos_2(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        first, publisher = await mqtt.connect("first", expiry_s=100), await mqtt.connect("p")
        await first.subscribe("$share/g/#", qos=2)
        await publisher.publish("a", b"once", 1)
        await publisher.publish("a", b"twice", 2)
        once, twice = await first.messages(2)
        assert (once.payload, twice.payload) == (b"once", b"twice")
        second = await mqtt.connect("second")
        await second.subscribe("$share/g/#", qos=2)
        first.hang_up()
        assert await second.payloads(1) == [b"once"]
        assert await second.rest() == []
        first = await mqtt.connect("first", clean=False, expiry_s=100, present=True)
        (again,) = await first.messages(1)
        assert (again.payload, again.packet_id, again.is_duplicate) == (b"twice", twice.packet_id, True)
        await first.acknowledge(again)
        assert await first.rest() == []


async def test_a_shared_subscription_with_no_local_breaks_the_protocol(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c")
        await talk.send(Subscribe(1, (FilterSubscription("$share/g/a", 1, no_local=True),)))
        last = await talk.closed()
        assert isinstance(last, Disconnect)
        assert last.reason == ReasonCode.PROTOCOL_ERROR


@VERSIONS
async def test_packets_right_behind_connect_are_handled(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = mqtt.open(version)
        subscribe = Subscribe(1, (FilterSubscription("a", 1),))
        await talk.send(Connect("c", version), subscribe, Publish("a", b"early", 1, packet_id=2))
        assert (await talk.expect(Connack)).reason == 0
        assert (await talk.expect(Suback)).codes == (1,)
        assert (await talk.expect(Ack)).packet_id == 2
        assert await talk.payloads(1) == [b"early"]


@pytest.mark.parametrize("limit", [16_384, 16_387, 16_390])
async def test_an_alias_never_makes_a_message_too_large_nor_drops_one(tmp_path: Path, limit: int) -> None:
    """An alias is 3 bytes, and may add one to the length of the properties, and one to that of the packet."""
    async with mqtt_broker(tmp_path) as mqtt:
        values = {Property.TOPIC_ALIAS_MAXIMUM: 1000, Property.MAXIMUM_PACKET_SIZE: limit}
        talk, publisher = await mqtt.connect("me", values=values), await mqtt.connect("publisher")
        await talk.subscribe("#", qos=1)
        fitting: list[str] = []
        for user_bytes in (118, 119, 120, 121, 122):
            for rest in range(16_230, 16_265):
                name, user = f"a/long/name/{len(fitting)}/{rest}", (("k", "v" * (user_bytes - 1)),)
                packet = Publish(name, bytes(rest - len(name)), 1, packet_id=1, properties=Properties({}, user))
                assert await publisher.publish(name, packet.payload, 1, properties=packet.properties) == 0
                if len(encode_packet(packet, V5)) <= limit:
                    fitting.append(name)
        assert fitting
        for name in fitting:
            [packet] = await talk.messages(1)
            assert packet.topic == name
            assert len(encode_packet(packet, V5)) <= limit
            await talk.acknowledge(packet)
        assert await talk.rest() == []


async def test_a_subscription_that_is_replaced_by_qos_0_brings_what_waited_for_it(tmp_path: Path) -> None:
    """MQTT 5 section 3.8.4: no message is lost because a subscription is replaced."""
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", expiry_s=100)
        await talk.subscribe("a", qos=1)
        talk.hang_up()
        publisher = await mqtt.connect("p")
        for number in range(50):
            await publisher.publish("a", b"%d" % number, 1)
        talk = mqtt.open()
        properties = Properties({Property.SESSION_EXPIRY: 100, Property.RECEIVE_MAXIMUM: 1})
        again = Connect("c", V5, False, properties=properties)
        await talk.send(again, Subscribe(1, (FilterSubscription("a", 0),)))
        assert (await talk.expect(Connack)).session_present
        assert (await talk.expect(Suback)).codes == (0,)
        found = await talk.messages(1)
        await talk.acknowledge(found[0])
        found += await talk.messages(49)
        assert [each.payload for each in found] == [b"%d" % number for number in range(50)]
        await publisher.publish("a", b"new", 1)
        assert [(each.qos, each.payload) for each in await talk.messages(1)] == [(0, b"new")]


async def test_a_shared_subscription_that_is_refused_brings_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(session: Session, topic_filter: str, options: bytes, begin: int) -> None:
        raise Refused(Reason.BUSY, "the session is full")

    async with mqtt_broker(tmp_path) as mqtt:
        member, talk = await mqtt.connect("m"), await mqtt.connect("c")
        await member.subscribe("$share/g/a", qos=1)
        monkeypatch.setattr(Session, "subscribe", refuse)
        assert await talk.subscribe("$share/g/a", qos=1) == (ReasonCode.QUOTA_EXCEEDED,)
        for number in range(6):
            await talk.publish("a", b"%d" % number, 1)
        assert await member.payloads(6) == [b"%d" % number for number in range(6)]
