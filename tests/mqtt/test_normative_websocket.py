"""MQTT over WebSocket (chapter 6)."""

from pathlib import Path

import pytest
import trio
from tests.mqtt.normative import VERSIONS, statement
from tests.wire_clients.mqtt import MqttClient, mqtt_broker
from tests.wire_clients.streams import WebSocketWire
from wsproto.events import AcceptConnection, CloseConnection, Event, RejectConnection, TextMessage

from martlet_mqtt.wire.codec import encode_packet
from martlet_mqtt.wire.codes import V4, V5
from martlet_mqtt.wire.packets import Connack, Connect, Pingreq, Pingresp


async def opened(talk: MqttClient, *subprotocols: str) -> tuple[WebSocketWire, Event]:
    """Return a WebSocket on the connection of *talk*, and the answer of the broker to its handshake."""
    wire = WebSocketWire(talk.wire)
    return wire, await wire.shake_hands(*subprotocols, target="/mqtt")


@statement(V4, "MQTT-6.0.0-4")
@statement(V5, "MQTT-6.0.0-4")
@pytest.mark.parametrize("offered", [["mqtt"], ["other", "mqtt"], ["mqtt", "other"]])
async def test_the_subprotocol_is_mqtt(tmp_path: Path, offered: list[str]) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        _, answer = await opened(mqtt.open(), *offered)
        assert isinstance(answer, AcceptConnection)
        assert answer.subprotocol == "mqtt"


@statement(V4, "MQTT-6.0.0-3")
@statement(V5, "MQTT-6.0.0-3")
async def test_a_client_that_does_not_offer_it_is_rejected(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        _, answer = await opened(mqtt.open(), "other")
        assert isinstance(answer, RejectConnection)
        _, answer = await opened(mqtt.open())  # one that offers nothing can mean nothing else
        assert isinstance(answer, AcceptConnection)
        assert answer.subprotocol is None


@statement(V4, "MQTT-6.0.0-1", "MQTT-6.0.0-2")
@statement(V5, "MQTT-6.0.0-1", "MQTT-6.0.0-2")
@VERSIONS
@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_packets_may_begin_and_end_anywhere_in_binary_frames(tmp_path: Path, version: int, size: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        wire, _ = await opened(mqtt.open(), "mqtt")
        talk = MqttClient(wire, version)
        data = encode_packet(Connect("c", version), version) + encode_packet(Pingreq(), version) * 3
        for at in range(0, len(data), size):
            await wire.send(data[at : at + size])
        assert (await talk.expect(Connack)).reason == 0
        for _ in range(3):
            await talk.expect(Pingresp)
        await talk.subscribe("a", qos=1)
        await talk.publish("a", b"x" * 300, 1)
        assert await talk.payloads(1) == [b"x" * 300]


@statement(V4, "MQTT-6.0.0-1")
@statement(V5, "MQTT-6.0.0-1")
@VERSIONS
@pytest.mark.parametrize("connected", [False, True])
async def test_a_text_frame_ends_the_connection(tmp_path: Path, version: int, connected: bool) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        wire, _ = await opened(mqtt.open(), "mqtt")
        if connected:
            talk = MqttClient(wire, version)
            await talk.send(Connect("c", version))
            await talk.expect(Connack)
        await wire.tell(TextMessage("\x10\x00"))
        while not isinstance(await wire.hear(), CloseConnection):
            pass  # the last words of the broker
        with pytest.raises(EOFError):
            await wire.hear()
        while mqtt.context.clients:
            await trio.lowlevel.checkpoint()
