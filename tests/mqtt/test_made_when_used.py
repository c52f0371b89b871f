"""What only subscribers need is made when a client subscribes."""

from pathlib import Path

from tests.wire_clients.mqtt import mqtt_broker

from martlet_mqtt.shared.context import PROTOCOL
from martlet_mqtt.wire.codes import PacketType, ReasonCode
from martlet_mqtt.wire.packets import Ack


async def test_a_client_that_only_publishes_follows_no_log(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("me", expiry_s=1000)
        await talk.publish("a", b"1", 1)
        assert len(mqtt.context.feed) == 0
        await talk.subscribe("a")
        assert len(mqtt.context.feed) == 1
        await talk.publish("a", b"2", 1)
        assert await talk.payloads(1) == [b"2"]
        await talk.disconnect()
        assert len(mqtt.context.feed) == 0


async def test_a_session_without_subscriptions_needs_nothing_that_came_before_its_client_left(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("me", expiry_s=1000)
        await talk.publish("a", b"1", 1)
        published = mqtt.broker.store.readable
        await talk.disconnect()
        state, has_client = mqtt.broker.sessions.find(PROTOCOL, "me")
        assert state is not None
        assert not has_client
        assert state.start >= published


async def test_acknowledgements_of_a_client_without_subscriptions_are_those_of_unknown_messages(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("me")
        await talk.send(Ack(PacketType.PUBACK, 7), Ack(PacketType.PUBREC, 8), Ack(PacketType.PUBREL, 9))
        answers = [await talk.expect(Ack), await talk.expect(Ack)]
        assert [(answer.kind, answer.packet_id, answer.reason) for answer in answers] == [
            (PacketType.PUBREL, 8, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND),
            (PacketType.PUBCOMP, 9, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND),
        ]
