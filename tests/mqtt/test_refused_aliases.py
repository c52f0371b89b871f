"""A topic alias stands for the name that it was sent with last, also a refused one (MQTT 5 section 3.3.2.3.4)."""

from pathlib import Path

import orjson
import pytest
from tests.wire_clients.mqtt import MqttClient, mqtt_broker

from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.packets import Publish
from martlet_mqtt.wire.properties import Properties, Property

ALIAS = Properties({Property.TOPIC_ALIAS: 1})
REFUSED = ReasonCode.TOPIC_NAME_INVALID


async def alias(talk: MqttClient, name: str, payload: bytes, qos: int = 1) -> int:
    return await talk.publish(name, payload, qos, properties=ALIAS)


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("name", ["$x", "n" * 5000, "$REPLY/" + "n" * 5000, "$CONTROL/martlet/v1/" + "n" * 5000])
async def test_an_alias_of_a_refused_name_is_refused(tmp_path: Path, name: str, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        reader, writer = await mqtt.connect("reader"), await mqtt.connect("writer")
        await reader.subscribe("#")
        assert await alias(writer, "good/a", b"1", qos) == 0
        for _ in range(2):
            assert await alias(writer, name, b"not stored", qos) == REFUSED
            assert await alias(writer, "", b"not stored", qos) == REFUSED
        assert await alias(writer, "good/b", b"2", qos) == 0
        assert await alias(writer, "", b"3", qos) == 0
        came = [(packet.topic, packet.payload) for packet in await reader.messages(3)]
        assert came == [("good/a", b"1"), ("good/b", b"2"), ("good/b", b"3")]
        assert await reader.rest() == []


async def test_with_qos_0_such_messages_are_dropped(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        reader, writer = await mqtt.connect("reader"), await mqtt.connect("writer")
        await reader.subscribe("#")
        for name in ("good/a", "$x", ""):
            await writer.send(Publish(name, name.encode(), properties=ALIAS))
        assert await alias(writer, "good/c", b"end") == 0
        assert await reader.payloads(2) == [b"good/a", b"end"]


async def test_an_alias_of_a_request_is_another_request(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        reader, writer = await mqtt.connect("reader"), await mqtt.connect("writer")
        await reader.subscribe("#")
        assert await alias(writer, "good/a", b"1") == 0
        for name in ("$CONTROL/martlet/v1/clients", ""):
            assert await alias(writer, name, b"") == 0
            [answer] = await writer.messages(1)
            assert {row["client"] for row in orjson.loads(answer.payload)["rows"]} == {"reader", "writer"}
        assert await reader.payloads(1) == [b"1"]
        assert await reader.rest() == []


async def test_a_request_has_no_alias_that_is_too_large(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        writer = await mqtt.connect("writer")
        too_large = Properties({Property.TOPIC_ALIAS: 17})
        await writer.send(Publish("$CONTROL/martlet/v1/clients", b"", properties=too_large))
        last = await writer.closed()
        assert last is not None
        assert getattr(last, "reason", None) == ReasonCode.TOPIC_ALIAS_INVALID
