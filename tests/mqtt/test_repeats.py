"""Packets that a client sends again: they have their effect once."""

from pathlib import Path

from tests.wire_clients.mqtt import mqtt_broker

from martlet_mqtt.admin.control import PREFIX, REQUEST_BYTES_MAX
from martlet_mqtt.wire.codes import PacketType, ReasonCode
from martlet_mqtt.wire.packets import Ack, Disconnect, Publish
from martlet_mqtt.wire.properties import Properties, Property

ALIASED = Properties({Property.TOPIC_ALIAS: 1})


async def test_the_alias_of_a_repeated_message_counts(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher = await mqtt.connect("w")
        await watcher.subscribe("a", qos=0)
        talk = await mqtt.connect("c", expiry_s=100)
        await talk.send(Publish("a", b"1", 2, packet_id=1))
        await talk.expect(Ack)
        talk.hang_up()
        talk = await mqtt.connect("c", clean=False, expiry_s=100, present=True)
        await talk.send(Publish("a", b"1", 2, True, packet_id=1, properties=ALIASED))
        assert (await talk.expect(Ack)).reason == ReasonCode.SUCCESS
        assert await talk.publish("", b"2", 1, 2, properties=ALIASED) == ReasonCode.SUCCESS
        assert await watcher.payloads(2) == [b"1", b"2"]
        assert await watcher.rest() == []


async def test_a_request_of_qos_2_is_answered_once(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c")
        await talk.subscribe("$CONTROL/#", qos=0)
        for _ in range(3):
            await talk.send(Publish(PREFIX + "clients", b"", 2, packet_id=7))
            answer = await talk.expect(Ack)
            assert (answer.kind, answer.packet_id, answer.reason) == (PacketType.PUBREC, 7, ReasonCode.SUCCESS)
        assert len(await talk.rest()) == 1
        for reason in (ReasonCode.SUCCESS, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND):
            await talk.send(Ack(PacketType.PUBREL, 7))
            done = await talk.expect(Ack)
            assert (done.kind, done.packet_id, done.reason) == (PacketType.PUBCOMP, 7, reason)


async def test_nothing_follows_disconnect_after_a_request_to_disconnect_oneself(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c")
        await talk.publish(PREFIX + "kick", b'{"client": "c"}', 1)
        last = await talk.closed()
        assert isinstance(last, Disconnect)
        assert last.reason == ReasonCode.ADMINISTRATIVE_ACTION


async def test_a_request_that_is_too_long_is_not_looked_at(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c")
        await talk.publish(PREFIX + "clients", b"[" * (REQUEST_BYTES_MAX + 1), 1)
        (answer,) = await talk.messages(1)
        assert b"the request has 16385 bytes; at most 16384 are accepted" in answer.payload


async def test_a_repeated_pubrec_is_answered_and_notes_nothing(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", expiry_s=100)
        await talk.subscribe("a", qos=2)
        await (await mqtt.connect("p")).publish("a", b"1", 1)
        other = await mqtt.connect("q")
        await other.publish("a", b"2", 2)
        packet = (await talk.messages(2))[1]
        await talk.send(Ack(PacketType.PUBREC, packet.packet_id))
        await talk.expect(Ack)
        await mqtt.settle()
        before = mqtt.broker.store.appended
        await talk.send(*[Ack(PacketType.PUBREC, packet.packet_id)] * 1000)
        for _ in range(1000):
            answer = await talk.expect(Ack)
            assert (answer.kind, answer.packet_id, answer.reason) == (PacketType.PUBREL, packet.packet_id, 0)
        assert mqtt.broker.store.appended == before


async def test_an_acknowledgement_that_comes_twice_makes_room_for_one_message(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", values={Property.RECEIVE_MAXIMUM: 1})
        await talk.subscribe("$share/g/a", qos=1)
        publisher = await mqtt.connect("p")
        for payload in (b"1", b"2", b"3"):
            await publisher.publish("a", payload, 1)
        for payload in (b"1", b"2"):
            (message,) = await talk.messages(1)
            assert message.payload == payload
            await talk.send(*[Ack(PacketType.PUBACK, message.packet_id)] * 2)
        assert await talk.payloads(1) == [b"3"]
        assert await talk.rest() == []
