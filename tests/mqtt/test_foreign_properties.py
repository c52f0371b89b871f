"""Records of RocketMQ producers: properties that MQTT does not allow are left out, and no client has to disconnect."""

from pathlib import Path

import pytest
from tests.wire_clients.mqtt import MqttClient, mqtt_broker

from martlet.message import Message
from martlet_mqtt.mapping.messages import to_deliver
from martlet_mqtt.wire.packets import Publish
from martlet_mqtt.wire.properties import Property

LONG = b"\xff" * 22_000  # three times as long once it is replaced by U+FFFD


async def delivered(tmp_path: Path, properties: bytes) -> Publish:
    """Return the message with *properties* as a subscriber gets it, that is still served after that."""
    async with mqtt_broker(tmp_path) as mqtt:
        talk: MqttClient = await mqtt.connect("c")
        await talk.subscribe("a")
        mqtt.broker.publish(Message("mqtt", b"x", b"TAGS\x01a\x02" + properties, 0))
        (message,) = await talk.messages(1)
        assert await talk.rest() == []
        return message


@pytest.mark.parametrize("foreign", [b"k\x01" + LONG, LONG + b"\x01v"])
async def test_a_property_that_is_too_long_once_it_is_text_is_left_out(tmp_path: Path, foreign: bytes) -> None:
    message = await delivered(tmp_path, foreign + b"\x02colour\x01red\x02")
    assert message.properties.user == (("colour", "red"),)


@pytest.mark.parametrize("name", [b"CONTENT_TYPE", b"REPLY_TO"])
async def test_a_content_type_or_response_topic_that_is_too_long_is_left_out(tmp_path: Path, name: bytes) -> None:
    message = await delivered(tmp_path, name + b"\x01" + LONG + b"\x02colour\x01red\x02")
    assert message.properties.user == (("colour", "red"),)
    assert message.properties.text(Property.CONTENT_TYPE) is None
    assert message.properties.text(Property.RESPONSE_TOPIC) is None


@pytest.mark.parametrize("topic", [b"a/+", b"#", b"a/#/b"])
async def test_a_response_topic_with_wildcards_is_left_out(tmp_path: Path, topic: bytes) -> None:
    message = await delivered(tmp_path, b"REPLY_TO\x01" + topic + b"\x02colour\x01red\x02")
    assert message.properties.text(Property.RESPONSE_TOPIC) is None
    assert message.properties.user == (("colour", "red"),)


async def test_an_address_for_replies_that_no_name_can_hold_is_left_out(tmp_path: Path) -> None:
    address = "ä".encode() * 12_000  # three characters for each byte in percent encoding
    message = await delivered(tmp_path, b"REPLY_TO_CLIENT\x01" + address + b"\x02CORRELATION_ID\x01c\x02")
    assert message.properties.text(Property.RESPONSE_TOPIC) is None


def test_what_a_store_of_rocketmq_holds_with_u_0000_is_left_out() -> None:
    """The broker stores no such properties itself."""
    properties = (
        b"TAGS\x01a\x02k\x01a\x00b\x02k\x00\x01v\x02CONTENT_TYPE\x01\x00\x02REPLY_TO\x01a\x00\x02colour\x01red\x02"
    )
    found = to_deliver(0, b"x", properties, 1000)
    assert found is not None
    assert found.properties == b"\x26\x00\x06colour\x00\x03red"
