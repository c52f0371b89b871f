"""The state of sessions, and whose messages it has (sections 4.1 and 4.5)."""

from pathlib import Path

import pytest
import trio
from tests.mqtt.normative import VERSIONS, before_fence, statement, stay
from tests.wire_clients.mqtt import MqttBroker, leave, mqtt_broker
from trio.testing import MockClock

from martlet.testing.clock import TrioClock
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import V4, V5, ReasonCode
from martlet_mqtt.wire.packets import Connect, Disconnect
from martlet_mqtt.wire.properties import Properties, Property


async def comes_back(mqtt: MqttBroker, expiry_s: int) -> bool:
    """Connect client ``me`` again; return whether the broker still has its session."""
    properties = Properties({Property.SESSION_EXPIRY: expiry_s})
    _, answer = await mqtt.answer(Connect("me", V5, clean_start=False, properties=properties))
    assert answer.reason == ReasonCode.SUCCESS
    return answer.session_present


@statement(V4, "MQTT-4.1.0-1", "MQTT-4.1.0-2", "MQTT-3.1.2-4")
@statement(V5, "MQTT-4.1.0-1", "MQTT-3.1.2-23")
@VERSIONS
async def test_a_session_is_kept_while_its_client_is_connected(
    tmp_path: Path, version: int, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        talk = await mqtt.connect("me", version, clean=False, expiry_s=1, keep_alive_s=3000)
        publisher = await mqtt.connect("p", version, keep_alive_s=3000)
        await talk.subscribe("a", qos=1)
        await trio.sleep(4000)
        await publisher.publish("a", b"x", 1)
        assert await talk.payloads(1) == [b"x"]
        talk.hang_up()
        talk = await mqtt.connect("me", version, clean=False, expiry_s=1, present=True)
        assert await talk.payloads(1) == [b"x"]


@statement(V5, "MQTT-4.1.0-2")
@pytest.mark.parametrize("seconds", [10, 200])
async def test_a_session_is_discarded_when_its_expiry_interval_has_passed(
    tmp_path: Path, seconds: int, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        publisher = await mqtt.connect("p")
        for away_s, is_kept in ((seconds - 2, True), (seconds + 2, False)):
            talk = await mqtt.connect("me", clean=False, expiry_s=seconds)
            await talk.subscribe("a", "fence", qos=1)
            await leave(mqtt, talk, "me")
            await publisher.publish("a", b"missed", 1)
            await trio.sleep(away_s)
            talk = await mqtt.connect("me", clean=False, expiry_s=seconds, present=is_kept)
            await talk.subscribe("fence", qos=1)
            assert await before_fence(talk, publisher) == [b"missed"] * is_kept


@statement(V5, "MQTT-4.1.0-2", "MQTT-3.1.2-23")
async def test_disconnect_can_change_the_expiry_interval(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        for seconds, away_s, is_kept in ((0, 0, False), (10, 12, False), (1000, 900, True)):
            talk = await mqtt.connect("me", clean=True, expiry_s=100)
            await talk.disconnect(0, Properties({Property.SESSION_EXPIRY: seconds}))
            await leave(mqtt, talk, "me")
            await trio.sleep(away_s)
            assert await comes_back(mqtt, 100) == is_kept


@statement(V5, "MQTT-3.1.2-23")
async def test_a_session_that_never_expires_is_there_after_a_day(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(sys_interval_s=86_400), clock=TrioClock()) as mqtt:
        talk = await mqtt.connect("me", clean=False, expiry_s=0xFFFF_FFFF)
        await leave(mqtt, talk, "me")
        await trio.sleep(86_400)
        assert await comes_back(mqtt, 0)


@statement(V4, "MQTT-4.1.0-1", "MQTT-3.1.2-4")
@statement(V5, "MQTT-3.1.2-23", "MQTT-4.1.0-1")
@VERSIONS
async def test_a_session_outlives_the_broker(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", version), await mqtt.connect("p", version)
        await talk.subscribe("a", qos=2)
        await publisher.publish("a", b"in flight", 2)
        (first,) = await talk.messages(1)
        await leave(mqtt, talk, "me")
        await publisher.publish("a", b"missed", 1)
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await stay(mqtt, "me", version, present=True)
        one, two = await talk.messages(2)
        assert (one.payload, one.packet_id, one.is_duplicate) == (b"in flight", first.packet_id, True)
        assert two.payload == b"missed"


@statement(V4, "MQTT-4.5.0-1", "MQTT-3.1.2-5")
@statement(V5, "MQTT-4.5.0-1")
@VERSIONS
@pytest.mark.parametrize("qos", [1, 2])
async def test_an_accepted_message_is_in_every_session_that_subscribed(tmp_path: Path, version: int, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for name, topic_filter in (("one", "a/b"), ("two", "a/+"), ("three", "#"), ("four", "b")):
            talk = await stay(mqtt, name, version)
            await talk.subscribe(topic_filter, "fence", qos=qos)
            await leave(mqtt, talk, name)
        connected, publisher = await mqtt.connect("now", version), await mqtt.connect("p", version)
        await connected.subscribe("+/b", qos=qos)
        await publisher.publish("a/b", b"x", qos)
        assert await connected.payloads(1) == [b"x"]
        for name, expected in (("one", [b"x"]), ("two", [b"x"]), ("three", [b"x"]), ("four", [])):
            talk = await stay(mqtt, name, version, present=True)
            assert await before_fence(talk, publisher) == expected, name
            await leave(mqtt, talk, name)


@statement(V5, "MQTT-3.1.2-23")
async def test_disconnect_keeps_the_session(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await stay(mqtt, "me", V5)
        await talk.send(Disconnect())
        assert await talk.closed() is None
        await leave(mqtt, talk, "me")
        await stay(mqtt, "me", V5, present=True)
