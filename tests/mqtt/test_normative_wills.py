"""Wills (sections 3.1.2.5 and 3.1.3.2)."""

from pathlib import Path

import pytest
import trio
from tests.mqtt.normative import (
    VERSIONS,
    before_fence,
    connect_packet,
    leave,
    statement,
    stay,
)
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker
from trio.testing import MockClock

from martlet.testing.clock import TrioClock
from martlet_mqtt.wire.codes import V4, V5, ReasonCode
from martlet_mqtt.wire.packets import Disconnect, Will
from martlet_mqtt.wire.properties import Properties, Property


def later(delay_s: int, payload: bytes = b"will") -> Will:
    return Will("will", payload, 1, properties=Properties({Property.WILL_DELAY: delay_s}))


async def watching(mqtt: MqttBroker, version: int = V5) -> MqttClient:
    watcher = await mqtt.connect("watcher", version)
    await watcher.subscribe("will", "fence", qos=2)
    return watcher


@statement(V4, "MQTT-3.1.2-8", "MQTT-3.1.2-9")
@statement(V5, "MQTT-3.1.2-7", "MQTT-3.1.2-8", "MQTT-3.1.2-9", "MQTT-3.1.2-12")
@VERSIONS
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_will_is_published_when_the_connection_breaks(tmp_path: Path, version: int, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher = await watching(mqtt, version)
        talk = await mqtt.connect("c", version, will=Will("will", b"\xffwill", qos))
        talk.hang_up()
        (found,) = await watcher.messages(1)
        assert (found.topic, found.payload, found.qos, found.retain) == ("will", b"\xffwill", qos, False)


@statement(V4, "MQTT-3.1.2-8")
@statement(V5, "MQTT-3.1.2-8")
@VERSIONS
async def test_a_will_is_published_when_the_broker_ends_the_connection(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher = await watching(mqtt, version)
        talk = await mqtt.connect("c", version, will=Will("will", b"error"))
        await talk.wire.send(connect_packet(version))
        assert await watcher.payloads(1) == [b"error"]
        await mqtt.connect("d", version, will=Will("will", b"taken over"))
        await mqtt.connect("d", version)
        assert await watcher.payloads(1) == [b"taken over"]


@statement(V4, "MQTT-3.1.2-10", "MQTT-3.14.4-3")
@statement(V5, "MQTT-3.1.2-10", "MQTT-3.14.4-3")
@VERSIONS
async def test_disconnect_discards_the_will(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, publisher = await watching(mqtt, version), await mqtt.connect("p", version)
        talk = await stay(mqtt, "c", version, will=Will("will", b"never"))
        await talk.disconnect()
        await leave(mqtt, talk, "c")
        again = await stay(mqtt, "c", version, present=True)
        await leave(mqtt, again, "c")
        assert await before_fence(watcher, publisher) == []


@statement(V4, "MQTT-3.1.2-10")
@statement(V5, "MQTT-3.1.2-10")
@VERSIONS
async def test_a_will_is_published_once(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, publisher = await watching(mqtt, version), await mqtt.connect("p", version)
        talk = await stay(mqtt, "c", version, will=Will("will", b"once"))
        await leave(mqtt, talk, "c")
        for _ in range(2):
            again = await stay(mqtt, "c", version, present=True)
            await leave(mqtt, again, "c")
        assert await before_fence(watcher, publisher) == [b"once"]


@statement(V5, "MQTT-3.1.2-8", "MQTT-3.14.4-3")
@pytest.mark.parametrize("reason", [ReasonCode.DISCONNECT_WITH_WILL, ReasonCode.UNSPECIFIED_ERROR, 0x97])
async def test_disconnect_with_another_reason_publishes_the_will(tmp_path: Path, reason: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher = await watching(mqtt)
        talk = await mqtt.connect("c", will=Will("will", b"wanted"))
        await talk.send(Disconnect(reason))
        assert await watcher.payloads(1) == [b"wanted"]


@statement(V4, "MQTT-3.1.2-12")
@VERSIONS
async def test_without_a_will_none_is_published(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, publisher = await mqtt.connect("w", version), await mqtt.connect("p", version)
        await watcher.subscribe("#", qos=1)
        talk = await mqtt.connect("c", version)
        await leave(mqtt, talk, "c")
        assert await before_fence(watcher, publisher) == []


@statement(V4, "MQTT-3.1.2-16", "MQTT-3.1.2-17")
@statement(V5, "MQTT-3.1.2-14", "MQTT-3.1.2-15")
@VERSIONS
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("retain", [False, True])
async def test_a_will_is_retained_if_it_says_so(tmp_path: Path, version: int, qos: int, retain: bool) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, publisher = await watching(mqtt, version), await mqtt.connect("p", version)
        talk = await mqtt.connect("c", version, will=Will("will", b"will", qos, retain))
        talk.hang_up()
        (found,) = await watcher.messages(1)
        assert (found.payload, found.retain) == (b"will", False)
        await mqtt.settle()
        late = await mqtt.connect("late", version)
        await late.subscribe("will", "fence", qos=1)
        assert await before_fence(late, publisher) == [b"will"] * retain


@statement(V5, "MQTT-3.1.3-10")
async def test_a_will_has_its_properties_in_order(tmp_path: Path) -> None:
    values = {
        Property.PAYLOAD_FORMAT: 1,
        Property.CONTENT_TYPE: "text/plain",
        Property.RESPONSE_TOPIC: "answers",
        Property.CORRELATION_DATA: b"\0\xff",
    }
    user = (("z", "1"), ("a", "2"), ("z", "1"), ("m", ""), ("a", "0"))
    async with mqtt_broker(tmp_path) as mqtt:
        watcher = await watching(mqtt)
        talk = await mqtt.connect("c", will=Will("will", b"will", 1, properties=Properties(values, user)))
        talk.hang_up()
        (found,) = await watcher.messages(1)
        assert found.properties == Properties(values, user)


@statement(V5, "MQTT-3.1.2-8")
async def test_a_will_waits_for_its_delay(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        watcher = await watching(mqtt)
        talk = await stay(mqtt, "c", V5, will=later(50))
        await leave(mqtt, talk, "c")
        await trio.sleep(49)
        assert await watcher.rest() == []
        start = trio.current_time()
        assert await watcher.payloads(1) == [b"will"]
        assert trio.current_time() - start < 3


@statement(V5, "MQTT-3.1.2-8")
async def test_a_will_does_not_wait_longer_than_its_session(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        watcher = await watching(mqtt)
        talk = await stay(mqtt, "c", V5, will=later(100_000))
        await leave(mqtt, talk, "c")
        start = trio.current_time()
        assert await watcher.payloads(1) == [b"will"]
        assert 99 <= trio.current_time() - start < 170  # a sweep every minute ends sessions


@statement(V5, "MQTT-3.1.2-8")
async def test_a_clean_start_ends_the_session_and_publishes_its_delayed_will(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        watcher, publisher = await watching(mqtt), await mqtt.connect("p")
        talk = await stay(mqtt, "c", V5, will=later(50))
        await leave(mqtt, talk, "c")
        await mqtt.connect("c", clean=True, present=False)
        assert await before_fence(watcher, publisher) == [b"will"]


@statement(V5, "MQTT-3.1.3-9")
async def test_a_client_that_returns_in_time_prevents_its_will(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        watcher, publisher = await watching(mqtt), await mqtt.connect("p")
        talk = await stay(mqtt, "c", V5, will=later(50))
        await leave(mqtt, talk, "c")
        await trio.sleep(49)
        await stay(mqtt, "c", V5, present=True)
        await trio.sleep(1000)
        assert await before_fence(watcher, publisher) == []


@statement(V5, "MQTT-3.1.3-9", "MQTT-3.1.2-8")
async def test_the_delay_of_a_will_begins_when_its_own_connection_ends(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        watcher = await watching(mqtt)
        first = await stay(mqtt, "c", V5, will=later(50, b"first"))
        await leave(mqtt, first, "c")
        await trio.sleep(40)
        second = await stay(mqtt, "c", V5, will=later(50, b"second"), present=True)
        await leave(mqtt, second, "c")
        await trio.sleep(45)  # 85 s after the first connection ended, 45 s after the second one
        assert await watcher.rest() == []
        assert await watcher.payloads(1) == [b"second"]


@statement(V5, "MQTT-3.1.2-7", "MQTT-3.1.2-8")
@statement(V4, "MQTT-3.1.2-8")
@VERSIONS
async def test_a_will_survives_the_end_of_the_broker(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher = await stay(mqtt, "watcher", version)
        await watcher.subscribe("will", qos=1)
        await stay(mqtt, "c", version, will=Will("will", b"will", 1))
        await mqtt.settle()
    async with mqtt_broker(tmp_path) as mqtt:
        watcher = await stay(mqtt, "watcher", version, present=True)
        assert await watcher.payloads(1) == [b"will"]
