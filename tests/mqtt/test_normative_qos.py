"""The exchanges of QoS 1 and 2, flow control, and the order of messages (sections 4.3, 4.6 and 4.9)."""

from pathlib import Path

import pytest
import trio
from tests.mqtt.normative import VERSIONS, before_fence, statement, stay
from tests.wire_clients.mqtt import MqttClient, leave, mqtt_broker
from trio.testing import MockClock

from martlet.testing.clock import TrioClock
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import V4, V5, PacketType, ReasonCode
from martlet_mqtt.wire.packets import Ack, Disconnect, Pingreq, Pingresp, Publish
from martlet_mqtt.wire.properties import Properties, Property

NOT_TEXT = Properties({Property.PAYLOAD_FORMAT: 1})


async def ack(talk: MqttClient, kind: PacketType, packet_id: int, reason: int = 0) -> None:
    await talk.send(Ack(kind, packet_id, reason))


# from clients


@statement(V4, "MQTT-4.3.2-2")
@statement(V5, "MQTT-4.3.2-4", "MQTT-4.3.2-5")
@VERSIONS
async def test_after_puback_the_identifier_means_a_new_message_whatever_dup_says(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, talk = await mqtt.connect("w", version), await mqtt.connect("c", version)
        await watcher.subscribe("#", qos=0)
        for number in range(4):
            assert await talk.publish("a", b"%d" % number, 1, 7, is_duplicate=number % 2 == 1) == 0
        assert await before_fence(watcher, talk) == [b"0", b"1", b"2", b"3"]


@statement(V4, "MQTT-4.3.3-2")
@statement(V5, "MQTT-4.3.3-8", "MQTT-4.3.3-10", "MQTT-4.3.3-11", "MQTT-4.3.3-12")
@VERSIONS
async def test_qos_2_is_delivered_once_until_pubrel_and_then_anew(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, talk = await mqtt.connect("w", version), await stay(mqtt, "me", version)
        await watcher.subscribe("#", qos=0)
        for round_ in (b"one", b"two"):
            for duplicate in (False, True, False, True):
                await talk.send(Publish("a", round_, 2, is_duplicate=duplicate, packet_id=7))
                assert await talk.expect(Ack) == Ack(PacketType.PUBREC, 7)
            await leave(mqtt, talk, "me")
            talk = await stay(mqtt, "me", version, present=True)
            await talk.send(Publish("a", round_, 2, is_duplicate=True, packet_id=7))
            assert await talk.expect(Ack) == Ack(PacketType.PUBREC, 7)
            await ack(talk, PacketType.PUBREL, 7)
            assert await talk.expect(Ack) == Ack(PacketType.PUBCOMP, 7)
        assert await before_fence(watcher, talk) == [b"one", b"two"]


@statement(V4, "MQTT-4.3.3-2")
@statement(V5, "MQTT-4.3.3-11")
@VERSIONS
async def test_pubrel_is_answered_even_if_its_identifier_is_unknown(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", version)
        for packet_id in (1, 65_535):
            await ack(talk, PacketType.PUBREL, packet_id)
            answer = await talk.expect(Ack)
            assert (answer.kind, answer.packet_id) == (PacketType.PUBCOMP, packet_id)
            assert answer.reason == (ReasonCode.PACKET_IDENTIFIER_NOT_FOUND if version == V5 else 0)


@statement(V5, "MQTT-4.3.3-9")
async def test_after_a_refusing_pubrec_the_identifier_means_a_new_message(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, talk = await mqtt.connect("w"), await mqtt.connect("c")
        await watcher.subscribe("#", qos=0)
        for _ in range(2):
            assert await talk.publish("a", b"\xff", 2, 7, properties=NOT_TEXT) == ReasonCode.PAYLOAD_FORMAT_INVALID
        assert await talk.publish("a", b"good", 2, 7) == 0
        assert await before_fence(watcher, talk) == [b"good"]


@statement(V5, "MQTT-4.3.3-13")
async def test_an_expired_message_of_qos_2_is_acknowledged_to_the_end(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        talk = await stay(mqtt, "me", V5)
        expiring = Publish("a", b"x", 2, packet_id=7, properties=Properties({Property.MESSAGE_EXPIRY: 5}))
        await talk.send(expiring)
        assert await talk.expect(Ack) == Ack(PacketType.PUBREC, 7)
        await trio.sleep(20)
        await talk.send(expiring)
        assert await talk.expect(Ack) == Ack(PacketType.PUBREC, 7)
        await ack(talk, PacketType.PUBREL, 7)
        assert await talk.expect(Ack) == Ack(PacketType.PUBCOMP, 7)


# to clients


@statement(V4, "MQTT-4.3.2-1", "MQTT-4.4.0-1")
@statement(V5, "MQTT-4.3.2-3", "MQTT-4.4.0-1")
@VERSIONS
async def test_qos_1_is_in_flight_until_puback(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", version), await mqtt.connect("p", version)
        await talk.subscribe("a", "fence", qos=1)
        await publisher.publish("a", b"x", 1)
        (first,) = await talk.messages(1)
        for _ in range(3):
            await leave(mqtt, talk, "me")
            talk = await stay(mqtt, "me", version, present=True)
            (again,) = await talk.messages(1)
            assert (again.packet_id, again.qos, again.payload) == (first.packet_id, 1, b"x")
        await talk.acknowledge(again)
        assert await talk.rest() == []
        await leave(mqtt, talk, "me")
        talk = await stay(mqtt, "me", version, present=True)
        assert await before_fence(talk, publisher) == []


@statement(V4, "MQTT-4.3.3-1", "MQTT-4.4.0-1", "MQTT-4.6.0-4")
@statement(V5, "MQTT-4.3.3-3", "MQTT-4.3.3-4", "MQTT-4.3.3-5", "MQTT-4.3.3-6", "MQTT-4.4.0-1")
@VERSIONS
async def test_qos_2_is_in_flight_until_pubrec_and_its_pubrel_until_pubcomp(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", version), await mqtt.connect("p", version)
        await talk.subscribe("a", "fence", qos=2)
        await publisher.publish("a", b"x", 2)
        (first,) = await talk.messages(1)
        number = first.packet_id
        await leave(mqtt, talk, "me")
        talk = await stay(mqtt, "me", version, present=True)
        (again,) = await talk.messages(1)
        assert (again.packet_id, again.qos) == (number, 2)
        for _ in range(2):
            await ack(talk, PacketType.PUBREC, number)
            assert await talk.expect(Ack) == Ack(PacketType.PUBREL, number)
        for _ in range(2):
            await leave(mqtt, talk, "me")
            talk = await stay(mqtt, "me", version, present=True)
            assert await talk.receive() == Ack(PacketType.PUBREL, number)
            assert await talk.rest() == []
        await ack(talk, PacketType.PUBCOMP, number)
        assert await talk.rest() == []
        await leave(mqtt, talk, "me")
        talk = await stay(mqtt, "me", version, present=True)
        assert await before_fence(talk, publisher) == []


@statement(V4, "MQTT-4.4.0-1")
@statement(V5, "MQTT-4.4.0-1")
@VERSIONS
async def test_nothing_is_sent_again_on_a_connection_that_stays(
    tmp_path: Path, version: int, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", version, keep_alive_s=3000), await mqtt.connect("p", version)
        await talk.subscribe("a", qos=2)
        for qos in (1, 2, 2):
            await publisher.publish("a", b"x", qos)
        _, _, third = await talk.messages(3)
        await ack(talk, PacketType.PUBREC, third.packet_id)
        await talk.expect(Ack)
        await trio.sleep(4000)
        assert await talk.rest() == []


@statement(V5, "MQTT-4.4.0-2")
async def test_what_a_client_refuses_is_not_sent_again(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", V5), await mqtt.connect("p")
        await talk.subscribe("a", "fence", qos=2)
        for qos in (1, 2):
            await publisher.publish("a", b"x", qos)
        one, two = await talk.messages(2)
        await ack(talk, PacketType.PUBACK, one.packet_id, ReasonCode.UNSPECIFIED_ERROR)
        await ack(talk, PacketType.PUBREC, two.packet_id, ReasonCode.QUOTA_EXCEEDED)
        await talk.send(Pingreq())
        assert isinstance(await talk.receive(), Pingresp)  # and no PUBREL
        await leave(mqtt, talk, "me")
        talk = await stay(mqtt, "me", V5, present=True)
        assert await before_fence(talk, publisher) == []


@statement(V5, "MQTT-4.3.3-7")
async def test_a_message_of_qos_2_that_was_sent_does_not_expire(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        talk, publisher = await stay(mqtt, "me", V5), await mqtt.connect("p")
        await talk.subscribe("a", qos=2)
        await publisher.publish("a", b"x", 2, properties=Properties({Property.MESSAGE_EXPIRY: 10}))
        (first,) = await talk.messages(1)
        await leave(mqtt, talk, "me")
        await trio.sleep(30)
        talk = await stay(mqtt, "me", V5, present=True)
        with trio.fail_after(5):
            (again,) = await talk.messages(1)
        assert (again.packet_id, again.payload, again.is_duplicate) == (first.packet_id, b"x", True)
        await talk.acknowledge(again)


# order


@statement(V4, "MQTT-4.6.0-1", "MQTT-4.6.0-4", "MQTT-4.6.0-6")
@statement(V5, "MQTT-4.4.0-1", "MQTT-4.6.0-5")
@VERSIONS
async def test_what_is_sent_again_has_its_original_order(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", version), await mqtt.connect("p", version)
        await talk.subscribe("#", qos=2)
        for number in range(30):
            await publisher.publish(f"a/{number % 3}", b"%d" % number, 1 + number % 2)
        found = await talk.messages(30)
        assert [int(each.payload) for each in found] == list(range(30))
        for each in found[:3]:
            await talk.acknowledge(each)
        for each in found[11:20:2]:
            assert each.qos == 2
            await ack(talk, PacketType.PUBREC, each.packet_id)
            assert (await talk.expect(Ack)).packet_id == each.packet_id
        await talk.rest()
        await leave(mqtt, talk, "me")
        talk = await stay(mqtt, "me", version, present=True)
        released = [await talk.expect(Ack) for _ in range(5)]
        assert [each.packet_id for each in released] == [each.packet_id for each in found[11:20:2]]
        expected = [each for each in found[3:] if each not in found[11:20:2]]
        again = await talk.messages(len(expected))
        assert [(each.payload, each.packet_id) for each in again] == [
            (each.payload, each.packet_id) for each in expected
        ]


@statement(V4, "MQTT-4.6.0-2", "MQTT-4.6.0-3", "MQTT-4.6.0-4", "MQTT-4.3.2-2", "MQTT-4.3.3-2")
@VERSIONS
async def test_acknowledgements_have_the_order_of_what_they_acknowledge(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", version)
        ids = [9, 3, 65_535, 1, 200, 4]
        await talk.send(*(Publish(f"a/{each}", b"x", 1 + each % 2, packet_id=each) for each in ids))
        answers = [await talk.expect(Ack) for _ in ids]
        for qos, kind in ((1, PacketType.PUBACK), (2, PacketType.PUBREC)):
            got = [each.packet_id for each in answers if each.kind is kind]
            assert got == [each for each in ids if 1 + each % 2 == qos]
        odd = [each for each in ids if each % 2]
        await talk.send(*(Ack(PacketType.PUBREL, each) for each in reversed(odd)))
        assert [(await talk.expect(Ack)).packet_id for _ in odd] == odd[::-1]


@statement(V4, "MQTT-4.6.0-5", "MQTT-4.6.0-6")
@statement(V5, "MQTT-4.6.0-5", "MQTT-4.6.0-6")
@VERSIONS
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_messages_of_one_publisher_come_in_order(tmp_path: Path, version: int, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talks = [await mqtt.connect(f"c{number}", version) for number in range(2)]
        for talk in talks:
            await talk.subscribe("a/+", qos=qos)
        one, two = await mqtt.connect("one", version), await mqtt.connect("two", version)
        for number in range(1, 61):
            for publisher, name in ((one, b"one"), (two, b"two")):
                packet_id = number if qos else 0
                await publisher.send(Publish(f"a/{number % 2}", b"%b %d" % (name, number), qos, packet_id=packet_id))
        for talk in talks:
            found: list[tuple[str, bytes, int]] = []
            for each in await talk.messages(120):
                who, text = each.payload.split()
                found.append((each.topic, who, int(text)))
                await talk.acknowledge(each)
            for name in (b"one", b"two"):
                for topic in ("a/0", "a/1"):
                    numbers = [count for topic_, who, count in found if (topic_, who) == (topic, name)]
                    assert numbers == [number for number in range(1, 61) if topic == f"a/{number % 2}"]


# flow control


@statement(V5, "MQTT-3.3.4-9", "MQTT-4.9.0-1", "MQTT-4.9.0-2")
@pytest.mark.parametrize("limit", [1, 3])
async def test_no_more_messages_are_in_flight_than_the_client_allows(tmp_path: Path, limit: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", values={Property.RECEIVE_MAXIMUM: limit})
        publisher = await mqtt.connect("p")
        await talk.subscribe("a", qos=2)
        for number in range(12):
            await publisher.publish("a", b"%d" % number, 1 + number % 2)
        in_flight = await talk.messages(limit)
        count = limit
        while count < 12:
            assert await talk.rest() == []
            oldest = in_flight.pop(0)
            if oldest.qos == 1:
                await ack(talk, PacketType.PUBACK, oldest.packet_id)
            elif count % 4:
                await ack(talk, PacketType.PUBREC, oldest.packet_id)
                assert (await talk.expect(Ack)).kind is PacketType.PUBREL
                assert await talk.rest() == []  # PUBREC alone makes no room
                await ack(talk, PacketType.PUBCOMP, oldest.packet_id)
            else:
                await ack(talk, PacketType.PUBREC, oldest.packet_id, ReasonCode.UNSPECIFIED_ERROR)
            in_flight += await talk.messages(1)
            count += 1
        assert [int(each.payload) for each in in_flight] == list(range(12 - limit, 12))


@statement(V5, "MQTT-3.3.4-9", "MQTT-4.9.0-1", "MQTT-4.9.0-2")
async def test_the_receive_maximum_counts_what_is_sent_again(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", V5), await mqtt.connect("p")
        await talk.subscribe("a", qos=1)
        for number in range(5):
            await publisher.publish("a", b"%d" % number, 1)
        await talk.messages(5)
        await leave(mqtt, talk, "me")
        talk = await stay(mqtt, "me", V5, present=True, values={Property.RECEIVE_MAXIMUM: 2})
        found = await talk.messages(2)
        assert await talk.rest() == []
        while len(found) < 5:
            await talk.acknowledge(found[-2])
            found += await talk.messages(1)
        assert [each.payload for each in found] == [b"0", b"1", b"2", b"3", b"4"]


@statement(V5, "MQTT-3.3.4-9", "MQTT-4.9.0-2")
async def test_the_receive_maximum_counts_retained_and_shared_messages(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p")
        for number in range(4):
            await publisher.publish(f"kept/{number}", b"kept", 2, retain=True)
        await mqtt.settle()
        talk = await mqtt.connect("c", values={Property.RECEIVE_MAXIMUM: 2})
        await talk.subscribe("$share/g/shared", "kept/+", qos=2)
        for _ in range(4):
            await publisher.publish("shared", b"shared", 1)
        found = await talk.messages(2)
        while len(found) < 8:
            assert await talk.rest() == []
            await talk.acknowledge(found[-2])
            found += await talk.messages(1)
        assert sorted(each.payload for each in found) == [b"kept"] * 4 + [b"shared"] * 4


@statement(V5, "MQTT-3.3.4-10", "MQTT-4.9.0-3")
async def test_without_room_everything_but_messages_is_answered(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", values={Property.RECEIVE_MAXIMUM: 1})
        await talk.subscribe("a", qos=1)
        assert await talk.publish("a", b"fills", 1) == 0
        assert await talk.publish("a", b"waits", 2) == 0
        assert await talk.subscribe("b", qos=0) == (0,)
        assert await talk.unsubscribe("b") == (0,)
        (found,) = await talk.rest()
        assert found.payload == b"fills"
        await talk.acknowledge(found)
        assert await talk.payloads(1) == [b"waits"]


@statement(V5, "MQTT-3.3.4-7", "MQTT-4.9.0-2")
async def test_a_client_that_sends_more_than_the_broker_allows_is_disconnected(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(receive_max=3)) as mqtt:
        talk = await mqtt.connect("c")
        await talk.send(*(Publish("a", b"x", 2, packet_id=each) for each in range(1, 5)))
        last = await talk.closed()
        assert isinstance(last, Disconnect)
        assert last.reason == ReasonCode.RECEIVE_MAXIMUM_EXCEEDED
