"""Strings, numbers, flags, packet identifiers, and what breaks the protocol (chapters 1 and 2, section 4.13)."""

from pathlib import Path

import pytest
from tests.mqtt.normative import (
    VERSIONS,
    after_connect,
    answer_to,
    before_fence,
    check_disconnect,
    check_refusal,
    connect_packet,
    filter_packet,
    packet,
    publish_packet,
    statement,
    stay,
)
from tests.wire_clients.mqtt import mqtt_broker

from martlet.contracts import Stage
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import V4, V5, PacketType, ReasonCode
from martlet_mqtt.wire.packets import (
    Ack,
    Connack,
    Connect,
    Disconnect,
    FilterSubscription,
    Publish,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from martlet_mqtt.wire.properties import Properties, Property, encode_data, encode_text

NOT_STRINGS = (b"\xff", b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xc3(", b"\xe2\x82", b"\0", b"a\0b", b"\xc0\x80")
PUBREL = 0x60
SUBSCRIBE = 0x82
UNSUBSCRIBE = 0xA2


@statement(V4, "MQTT-1.5.3-1", "MQTT-1.5.3-2", "MQTT-3.3.2-1", "MQTT-3.8.3-1", "MQTT-3.10.3-1", "MQTT-4.7.3-2")
@statement(V5, "MQTT-1.5.4-1", "MQTT-1.5.4-2", "MQTT-3.3.2-1", "MQTT-3.8.3-1", "MQTT-3.10.3-1", "MQTT-4.7.3-2")
@VERSIONS
@pytest.mark.parametrize("raw", NOT_STRINGS)
async def test_names_and_filters_must_be_strings(tmp_path: Path, version: int, raw: bytes) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for data in (
            publish_packet(version, raw),
            publish_packet(version, raw, b"x", 2),
            filter_packet(SUBSCRIBE, 1, version, encode_data(raw), b"\1"),
            filter_packet(UNSUBSCRIBE, 1, version, encode_data(raw)),
        ):
            last = await after_connect(mqtt, data, version)
            check_disconnect(last, version, ReasonCode.MALFORMED_PACKET)


@statement(V5, "MQTT-1.5.4-1", "MQTT-1.5.4-2", "MQTT-1.5.7-1", "MQTT-3.3.2-13", "MQTT-3.3.2-19", "MQTT-4.13.1-1")
@pytest.mark.parametrize("raw", NOT_STRINGS)
async def test_strings_in_properties_must_be_strings(tmp_path: Path, raw: bytes) -> None:
    bad, good = encode_data(raw), encode_text("good")
    async with mqtt_broker(tmp_path) as mqtt:
        for properties in (b"\x26" + bad + good, b"\x26" + good + bad, b"\x03" + bad, b"\x08" + bad):
            last = await after_connect(mqtt, publish_packet(V5, b"a", properties=properties), V5)
            check_disconnect(last, V5, ReasonCode.MALFORMED_PACKET)


@statement(V5, "MQTT-1.5.7-1", "MQTT-1.5.4-1")
async def test_pairs_of_strings_are_delivered_as_strings(tmp_path: Path) -> None:
    user = (("é", "\U0001f600"), ("", "ﬀ"), ("\U00010000", ""))
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c")
        await talk.subscribe("a")
        await talk.publish("a", b"x", 1, properties=Properties({}, user))
        (found,) = await talk.messages(1)
        assert found.properties.user == user


@statement(V4, "MQTT-1.5.3-3")
@statement(V5, "MQTT-1.5.4-3")
@VERSIONS
async def test_a_zero_width_no_break_space_stays_where_it_is(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("\ufeffc", version)
        await talk.subscribe("\ufeffa/+", "fence", qos=1)
        for name in ("\ufeffa/b", "a/b", "a/\ufeffb", "\ufeffa/\ufeffb\ufeff"):
            await talk.publish(name, name.encode(), 1)
        found = await talk.messages(2)
        assert [each.topic for each in found] == ["\ufeffa/b", "\ufeffa/\ufeffb\ufeff"]
        assert [each.payload.decode() for each in found] == ["\ufeffa/b", "\ufeffa/\ufeffb\ufeff"]
        assert "\ufeffc" in mqtt.context.clients


@statement(V5, "MQTT-1.5.5-1")
@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
async def test_lengths_take_the_fewest_bytes(tmp_path: Path, size: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        subscriber, publisher = await mqtt.connect("s"), await mqtt.connect("p")
        await subscriber.subscribe("a", qos=0)
        head = 2 + 1 + 1  # the name and the length of the properties
        await publisher.publish("a", bytes(max(0, size - head)), 1)
        size = max(size, head)
        data = await subscriber.wire.receive_exactly(1 + (1 + (size > 127) + (size > 16_383) + (size > 2_097_151)))
        assert data[0] == 0x30
        assert 0 < data[-1] < 0x80
        assert sum((byte & 0x7F) << 7 * at for at, byte in enumerate(data[1:])) == size
        await subscriber.wire.receive_exactly(size)


@statement(V5, "MQTT-1.5.5-1")
@pytest.mark.parametrize("count", [1, 3, 4, 400])
async def test_lengths_of_properties_and_identifiers_take_the_fewest_bytes(tmp_path: Path, count: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        subscriber, publisher = await mqtt.connect("s"), await mqtt.connect("p")
        for identifier in (1, 127, 128, 16_383, 16_384, 268_435_455):
            await subscriber.subscribe(f"a/{identifier}", qos=0, identifier=identifier)
            user = [("k" * 9, "v" * 9)] * count
            await publisher.publish(f"a/{identifier}", b"", 1, properties=Properties({}, user))
            size = 1 + len(_varint(identifier)) + 23 * count
            name = encode_text(f"a/{identifier}")
            total = len(name) + len(_varint(size)) + size
            data = await subscriber.wire.receive_exactly(1 + len(_varint(total)) + total)
            assert data.startswith(b"\x30" + _varint(total) + name + _varint(size))
            assert b"\x0b" + _varint(identifier) in data


def _varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found, value = found + bytes((value & 127 | 128,)), value >> 7
    return found + bytes((value,))


@statement(V4, "MQTT-2.2.2-1", "MQTT-2.2.2-2", "MQTT-3.6.1-1", "MQTT-3.8.1-1", "MQTT-3.10.1-1", "MQTT-3.14.1-1")
@statement(V4, "MQTT-4.8.0-1")
@statement(V5, "MQTT-2.1.3-1", "MQTT-3.6.1-1", "MQTT-3.8.1-1", "MQTT-3.10.1-1", "MQTT-3.14.1-1", "MQTT-3.15.1-1")
@statement(V5, "MQTT-4.13.1-1")
@VERSIONS
@pytest.mark.parametrize("flags", range(16))
async def test_reserved_flags_end_the_connection(tmp_path: Path, version: int, flags: int) -> None:
    number = b"\0\1"
    content = {
        PacketType.PUBACK: number,
        PacketType.PUBREC: number,
        PacketType.PUBREL: number,
        PacketType.PUBCOMP: number,
        PacketType.SUBSCRIBE: number + b"\0" * (version == V5) + encode_text("a") + b"\0",
        PacketType.UNSUBSCRIBE: number + b"\0" * (version == V5) + encode_text("a"),
        PacketType.PINGREQ: b"",
        PacketType.DISCONNECT: b"",
        PacketType.AUTH: b"",
    }
    right = {PacketType.PUBREL: 2, PacketType.SUBSCRIBE: 2, PacketType.UNSUBSCRIBE: 2}
    async with mqtt_broker(tmp_path) as mqtt:
        for kind, rest in content.items():
            if flags != right.get(kind, 0):
                last = await after_connect(mqtt, packet(kind << 4 | flags, rest), version)
                check_disconnect(last, version, ReasonCode.MALFORMED_PACKET)
        if flags:
            data = bytearray(connect_packet(version))
            data[0] |= flags
            last = await answer_to(mqtt, bytes(data), version)
            assert last is None or (isinstance(last, Connack) and last.reason)


@statement(V4, "MQTT-2.2.2-1")
@statement(V5, "MQTT-2.1.3-1", "MQTT-3.8.1-1", "MQTT-3.6.1-1", "MQTT-3.10.1-1")
@VERSIONS
async def test_packets_of_the_broker_have_the_right_flags(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", version)
        subscribe = Subscribe(1, (FilterSubscription("a", 2),))
        await talk.send(subscribe, Publish("a", b"x", 2, packet_id=2), Ack(PacketType.PUBREL, 2))
        await talk.send(Publish("b", b"x", 1, packet_id=3))
        firsts: set[int] = set()
        while len(firsts) < 6:
            head = await talk.wire.receive_exactly(2)
            rest = await talk.wire.receive_exactly(head[1])
            firsts.add(head[0])
            if head[0] >> 4 == PacketType.PUBLISH:
                at = 2 + rest[0] * 256 + rest[1]
                await talk.send(Ack(PacketType.PUBREC, int.from_bytes(rest[at : at + 2])), Unsubscribe(4, ("a",)))
        assert firsts <= {0x34, 0x40, 0x50, 0x62, 0x70, 0x90, 0xB0}


# packet identifiers


@statement(V4, "MQTT-2.3.1-1", "MQTT-2.3.1-2")
@statement(V5, "MQTT-2.2.1-3")
@VERSIONS
async def test_packet_identifier_0_ends_the_connection(tmp_path: Path, version: int) -> None:
    empty = b"\0" * (version == V5)
    async with mqtt_broker(tmp_path) as mqtt:
        for data in (
            packet(0x32, encode_text("a"), b"\0\0", empty),
            packet(0x34, encode_text("a"), b"\0\0", empty),
            filter_packet(SUBSCRIBE, 0, version, encode_text("a"), b"\0"),
            filter_packet(UNSUBSCRIBE, 0, version, encode_text("a")),
        ):
            last = await after_connect(mqtt, data, version)
            check_disconnect(last, version, ReasonCode.PROTOCOL_ERROR)


@statement(V4, "MQTT-2.3.1-1", "MQTT-2.3.1-4", "MQTT-4.3.2-1", "MQTT-4.3.3-1")
@statement(V5, "MQTT-2.2.1-4", "MQTT-4.3.2-1", "MQTT-4.3.3-1", "MQTT-4.3.2-2", "MQTT-4.3.3-2")
@VERSIONS
@pytest.mark.parametrize("qos", [1, 2])
async def test_messages_in_flight_have_different_identifiers_above_0(tmp_path: Path, version: int, qos: int) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(in_flight_max=50)) as mqtt:
        subscriber, publisher = await mqtt.connect("s", version), await mqtt.connect("p", version)
        await subscriber.subscribe("a", qos=qos)
        for _ in range(50):
            await publisher.publish("a", b"x", qos)
        found = await subscriber.messages(50)
        assert [(each.qos, each.is_duplicate) for each in found] == [(qos, False)] * 50
        used = {each.packet_id for each in found}
        assert len(used) == 50
        assert 0 not in used
        for each in found[::2]:
            await subscriber.acknowledge(each)
            used.discard(each.packet_id)
        for _ in range(25):
            await publisher.publish("a", b"y", qos)
        more = {each.packet_id for each in await subscriber.messages(25)}
        assert len(more) == 25
        assert not more & used
        assert 0 not in more


@statement(V4, "MQTT-2.3.1-4", "MQTT-2.3.1-1")
@statement(V5, "MQTT-2.2.1-4")
@VERSIONS
async def test_identifiers_begin_again_after_the_largest_one_without_0(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", version)
        await talk.subscribe("a", qos=1)
        outgoing = mqtt.client("c").outgoing
        assert outgoing is not None
        outgoing.flight._next_id = 65_534  # otherwise the test would be a long one
        await talk.send(*(Publish("a", b"x", 0) for _ in range(2)))
        await talk.publish("a", b"y", 1)
        sent = [await talk.publish("a", b"%d" % number, 1) for number in range(4)]
        assert sent == [0] * 4
        found = [each.packet_id for each in await talk.messages(7) if each.qos]
        assert found == [65_534, 65_535, 1, 2, 3]


@statement(V4, "MQTT-2.3.1-5", "MQTT-4.3.1-1", "MQTT-3.3.1-2")
@statement(V5, "MQTT-2.2.1-2", "MQTT-4.3.1-1", "MQTT-3.3.1-2", "MQTT-2.2.2-1")
@VERSIONS
async def test_qos_0_has_no_identifier_and_no_dup(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await mqtt.connect("c", version), await mqtt.connect("p", version)
        await talk.subscribe("a", qos=0)
        for qos in (0, 1, 2):
            await publisher.publish("a", b"payload", qos)
        expected = publish_packet(version, b"a", b"payload")
        assert await talk.wire.receive_exactly(3 * len(expected)) == 3 * expected


@statement(V4, "MQTT-2.3.1-6", "MQTT-2.3.1-7", "MQTT-3.8.4-1", "MQTT-3.8.4-2", "MQTT-3.10.4-4")
@statement(V5, "MQTT-2.2.1-5", "MQTT-2.2.1-6", "MQTT-3.8.4-1", "MQTT-3.8.4-2", "MQTT-3.10.4-4", "MQTT-3.10.4-5")
@VERSIONS
@pytest.mark.parametrize("packet_id", [1, 255, 256, 65_535])
async def test_answers_have_the_identifier_of_what_they_answer(tmp_path: Path, version: int, packet_id: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", version)
        await talk.send(Subscribe(packet_id, (FilterSubscription("b", 1),)))
        assert (await talk.expect(Suback)).packet_id == packet_id
        for qos, kinds in ((1, [PacketType.PUBACK]), (2, [PacketType.PUBREC, PacketType.PUBCOMP])):
            await talk.send(Publish("a", b"x", qos, packet_id=packet_id))
            if qos == 2:
                await talk.send(Ack(PacketType.PUBREL, packet_id))
            found = [await talk.expect(Ack) for _ in kinds]
            assert [(each.kind, each.packet_id) for each in found] == [(kind, packet_id) for kind in kinds]
        await talk.send(Unsubscribe(packet_id, ("b",)))
        assert (await talk.expect(Unsuback)).packet_id == packet_id


@statement(V5, "MQTT-2.2.2-1")
async def test_packets_without_properties_have_a_length_of_0(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await mqtt.connect("c"), await mqtt.connect("p")
        await talk.wire.send(filter_packet(SUBSCRIBE, 1, V5, encode_text("a"), b"\2"))
        assert await talk.wire.receive_exactly(6) == b"\x90\4\0\1\0\2"
        await publisher.publish("a", b"x", 1)
        found = await talk.wire.receive_exactly(9)
        assert found[:2] + found[7:] == b"\x32\7\0x"
        await talk.wire.send(filter_packet(UNSUBSCRIBE, 2, V5, encode_text("a")))
        assert await talk.wire.receive_exactly(6) == b"\xb0\4\0\2\0\0"


# violations


@statement(V4, "MQTT-3.3.1-4", "MQTT-4.8.0-1")
@statement(V5, "MQTT-3.3.1-4", "MQTT-4.13.1-1")
@VERSIONS
async def test_qos_3_ends_the_connection(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for flags in (0x06, 0x0E, 0x07):
            last = await after_connect(mqtt, publish_packet(version, b"a", b"x", flags), version)
            check_disconnect(last, version, ReasonCode.MALFORMED_PACKET)


@statement(V4, "MQTT-3.3.1-2", "MQTT-4.8.0-1")
@statement(V5, "MQTT-3.3.1-2", "MQTT-4.13.1-1")
@VERSIONS
async def test_dup_with_qos_0_ends_the_connection(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        last = await after_connect(mqtt, publish_packet(version, b"a", b"x", 8), version)
        check_disconnect(last, version, ReasonCode.MALFORMED_PACKET)


@statement(V4, "MQTT-4.8.0-1", "MQTT-3.8.3-3", "MQTT-3.10.3-2")
@statement(V5, "MQTT-4.13.1-1", "MQTT-4.13.2-1", "MQTT-3.8.3-2", "MQTT-3.10.3-2")
@VERSIONS
@pytest.mark.parametrize(
    "data",
    [
        packet(0x00),
        packet(0x20, b"\0\0"),  # packets of brokers
        packet(0x90, b"\0\1\0"),
        packet(0xB0, b"\0\1"),
        packet(0xD0),
        packet(0x82, b"\0\1", b"\0"),  # no filter
        packet(0xA2, b"\0\1", b"\0"),
        packet(0x82, b"\0\1"),
        packet(0xA2, b"\0\1"),
        packet(0x40, b"\1"),  # cut off
        packet(0x62),
        packet(0xC0, b"x"),  # too long
        packet(0x32, b"\0\5a"),
        b"\xc0\xff\xff\xff\xff\1",  # a length of five bytes
    ],
)
async def test_what_is_no_packet_of_clients_ends_the_connection_but_no_other(
    tmp_path: Path, version: int, data: bytes
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, publisher = await mqtt.connect("w", version), await mqtt.connect("p", version)
        await watcher.subscribe("#", qos=1)
        last = await after_connect(mqtt, data, version)
        if version == V5:
            assert isinstance(last, Disconnect)
            assert last.reason in (ReasonCode.MALFORMED_PACKET, ReasonCode.PROTOCOL_ERROR)
        else:
            assert last is None
        assert await before_fence(watcher, publisher) == []


@statement(V4, "MQTT-4.8.0-2")
async def test_what_fails_for_now_ends_the_connection_so_that_the_client_sends_it_again(tmp_path: Path) -> None:
    def refuse(message: Message) -> Message:
        raise Refused(Reason.UNAVAILABLE, "not now")

    async with mqtt_broker(tmp_path) as mqtt:
        mqtt.broker.set_stages([("test", Stage(refuse))])
        talk = await stay(mqtt, "c", V4)
        for qos in (1, 2):
            await talk.send(Publish("a", b"x", qos, packet_id=1))
            assert await talk.closed() is None
            talk = await stay(mqtt, "c", V4, present=True)


@statement(V5, "MQTT-4.13.2-1", "MQTT-3.14.4-1", "MQTT-3.14.4-2")
async def test_an_error_ends_the_connection_after_disconnect_and_nothing_more_is_sent(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c")
        await talk.subscribe("#", qos=1)
        await talk.send(*(Publish("a", b"x" * 100, 0) for _ in range(200)))
        await talk.wire.send(packet(0xD0))
        await talk.messages(1)
        check_disconnect(await talk.closed(), V5, ReasonCode.PROTOCOL_ERROR)


@statement(V4, "MQTT-7.0.0-2")
@statement(V5, "MQTT-3.1.4-5", "MQTT-4.3.2-4")
@VERSIONS
async def test_nothing_but_the_packets_of_the_specification_is_needed(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        connect, subscribe = connect_packet(version), filter_packet(SUBSCRIBE, 1, version, encode_text("a"), b"\1")
        talk = mqtt.open(version)
        await talk.wire.send(connect + subscribe + publish_packet(version, b"a", b"x", 2))
        answer = await talk.expect(Connack)
        assert (answer.reason, answer.session_present) == (0, False)
        assert (await talk.expect(Suback)).codes == (1,)
        assert await talk.expect(Ack) == Ack(PacketType.PUBACK, 1)
        assert await talk.payloads(1) == [b"x"]


@statement(V5, "MQTT-3.1.4-1", "MQTT-4.13.1-1")
async def test_properties_that_a_packet_may_not_have_end_the_connection(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for data in (
            publish_packet(V5, b"a", properties=b"\x11\0\0\0\1"),  # session expiry
            publish_packet(V5, b"a", properties=b"\1\1\1\1"),  # the payload format twice
            publish_packet(V5, b"a", properties=b"\1\2"),
            publish_packet(V5, b"a", properties=b"\2\0\0\0"),
            packet(0x82, b"\0\1", b"\2\x0b\0", encode_text("a"), b"\0"),  # subscription identifier 0
            packet(0x82, b"\0\1", b"\4\x0b\1\x0b\2", encode_text("a"), b"\0"),
            packet(0xE0, b"\0", b"\3\x21\0\1"),
        ):
            last = await after_connect(mqtt, data, V5)
            assert isinstance(last, Disconnect)
            assert last.reason in (ReasonCode.MALFORMED_PACKET, ReasonCode.PROTOCOL_ERROR)


@statement(V5, "MQTT-3.1.4-2")
@statement(V4, "MQTT-3.1.4-1")
@VERSIONS
async def test_a_connect_with_bytes_after_its_end_is_refused(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        last = await answer_to(mqtt, connect_packet(version, 2, encode_text("c") + b"\0"), version)
        check_refusal(last, version, ReasonCode.MALFORMED_PACKET)


@statement(V5, "MQTT-3.2.2-15")
async def test_a_packet_larger_than_the_broker_accepts_ends_the_connection(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(packet_bytes_max=2000)) as mqtt:
        _, answer = await mqtt.answer(Connect("c", V5))
        assert answer.properties.number(Property.MAXIMUM_PACKET_SIZE, 0) == 2000
        last = await after_connect(mqtt, publish_packet(V5, b"a", bytes(2000)), V5)
        check_disconnect(last, V5, ReasonCode.PACKET_TOO_LARGE)


@statement(V5, "MQTT-3.2.2-15")
async def test_the_largest_packet_has_a_payload_that_the_broker_stores(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        _, answer = await mqtt.answer(Connect("c", V5))
        room = answer.properties.number(Property.MAXIMUM_PACKET_SIZE, 0) - mqtt.broker.config.message_bytes_max
        assert 0 < room <= 1 << 17
