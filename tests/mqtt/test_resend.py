"""What was in flight and cannot be sent again: its identifier means nothing else before the client has forgotten it."""

from pathlib import Path

import pytest
from tests.wire_clients.mqtt import MqttBroker, mqtt_broker

from martlet.runtime.steps import per_slice
from martlet.store.read.lookup import Lookup
from martlet_mqtt.outbound.due import FILTER_US
from martlet_mqtt.outbound.flight import Flight
from martlet_mqtt.wire.codes import V4, V5, PacketType
from martlet_mqtt.wire.packets import Ack
from martlet_mqtt.wire.properties import Property


def flight_of(mqtt: MqttBroker) -> Flight:
    outgoing = mqtt.client("c").outgoing
    assert outgoing is not None
    return outgoing.flight


@pytest.mark.parametrize("version", [V4, V5])
@pytest.mark.parametrize("retained", [False, True])
async def test_an_identifier_of_qos_2_is_released_before_it_means_another_message(
    tmp_path: Path, version: int, retained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client may have the message, and would take the next one of this identifier for it [MQTT-4.3.3-10]."""
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p", version)
        talk = await mqtt.connect("c", version, clean=False, expiry_s=100)
        if retained:
            await publisher.publish("a", b"gone", 2, retain=True)
        await talk.subscribe("a", qos=2)
        if not retained:
            await publisher.publish("a", b"gone", 2)
        (gone,) = await talk.messages(1)
        talk.hang_up()

        async def read_nothing(lookup: Lookup, position: int) -> bytes | None:
            return None  # retention has removed it

        with monkeypatch.context() as patch:
            patch.setattr(Lookup, "known_record_far", read_nothing)
            talk = await mqtt.connect("c", version, clean=False, expiry_s=100, present=True)
            released = await talk.expect(Ack)
        assert (released.kind, released.packet_id) == (PacketType.PUBREL, gone.packet_id)
        flight_of(mqtt)._next_id = gone.packet_id
        await publisher.publish("a", b"new", 2)
        (new,) = await talk.messages(1)
        assert new.packet_id == gone.packet_id + 1
        talk.hang_up()
        talk = await mqtt.connect("c", version, clean=False, expiry_s=100, present=True)
        released = await talk.expect(Ack)
        assert (released.kind, released.packet_id) == (PacketType.PUBREL, gone.packet_id)
        await talk.send(Ack(PacketType.PUBCOMP, gone.packet_id))
        flight_of(mqtt)._next_id = gone.packet_id
        await publisher.publish("a", b"newer", 2)
        found = await talk.messages(2)
        assert [(each.payload, each.packet_id, each.is_duplicate) for each in found] == [
            (b"new", new.packet_id, True),
            (b"newer", gone.packet_id, False),
        ]


async def test_a_message_of_qos_2_that_became_too_large_for_the_client_is_released(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p")
        talk = await mqtt.connect("c", clean=False, expiry_s=100)
        await talk.subscribe("a", qos=2)
        await publisher.publish("a", b"x" * 100, 2)
        (large,) = await talk.messages(1)
        talk.hang_up()
        values = {Property.MAXIMUM_PACKET_SIZE: 50}
        talk = await mqtt.connect("c", clean=False, expiry_s=100, present=True, values=values)
        released = await talk.expect(Ack)
        assert (released.kind, released.packet_id) == (PacketType.PUBREL, large.packet_id)
        await talk.send(Ack(PacketType.PUBCOMP, large.packet_id))
        assert await talk.rest() == []
        session = mqtt.client("c").session
        assert session is not None
        assert session.flight == {}


async def test_the_filters_of_what_is_sent_again_are_looked_at_in_slices(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", clean=False, expiry_s=100)
        filters = 10 * per_slice(FILTER_US)
        await talk.subscribe(*[f"{number}/#" for number in range(filters)], qos=1)
        await talk.publish("7/x", b"again", 1)
        await talk.messages(1)
        talk.hang_up()
        before, slices = mqtt.broker.turns.slices, list[int]()
        talk = await mqtt.connect("c", clean=False, expiry_s=100, present=True)
        slices.append(mqtt.broker.turns.slices - before)
        assert await talk.payloads(1) == [b"again"]
        slices.append(mqtt.broker.turns.slices - before - slices[0])
        assert sum(slices) >= 2 * 10  # to resume the subscriptions, and to index them
