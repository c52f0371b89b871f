"""A message with a delay in a user property comes when it is due, if timers are on."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from tests.timer.timer_talk import install
from tests.wire_clients.mqtt import MqttBroker
from trio.testing import MockClock

from martlet.broker import Broker
from martlet.contracts import Service
from martlet.state import Projection
from martlet.testing.clock import START_MS, TrioClock
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import serving
from martlet.testing.stores import small_config
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.plugin import MqttPlugin
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.properties import Properties
from martlet_timer.config import TimerConfig
from martlet_timer.plugin import TimerPlugin

DELAYS = [
    ("TIMER_DELAY_SEC", 12),
    ("TIMER_DELAY_MS", 12_000),
    ("TIMER_DELIVER_MS", START_MS + 12_000),
    ("DELAY", 3),  # the third level, 10 s
]


@asynccontextmanager
async def delaying_broker() -> AsyncIterator[MqttBroker]:
    mqtt, timer = MqttPlugin(MqttConfig(listen="127.0.0.1:0")), TimerPlugin(TimerConfig())

    def projections(broker: Broker) -> Sequence[Projection]:
        return [*install(broker, timer, ()), *mqtt.martlet_projections(broker)]

    def services(broker: Broker) -> Sequence[Service]:
        return [*timer.martlet_services(broker), *mqtt.martlet_services(broker)]

    async with serving(
        Path("/data"),
        store=small_config(segment_bytes=1 << 16, page_bytes=1 << 13, cache_bytes=1 << 16),
        clock=TrioClock(),
        disk=FakeDisk(),
        projections=projections,
        services=services,
        dispatchers=timer.martlet_dispatchers(),
    ) as running:
        yield MqttBroker(running, mqtt.protocol(running.broker), mqtt)


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize(("name", "value"), DELAYS)
async def test_a_user_property_delays_a_message(autojump_clock: MockClock, name: str, value: int, qos: int) -> None:
    async with delaying_broker() as mqtt:
        subscriber, publisher = await mqtt.connect("s"), await mqtt.connect("p")
        await subscriber.subscribe("a/#")
        delayed = Properties({}, ((name, str(value)), ("own", "b")))
        assert await publisher.publish("a/b", b"later", qos, properties=delayed) == ReasonCode.SUCCESS
        await publisher.publish("a/b", b"now", qos)
        (now,) = await subscriber.messages(1)
        assert now.payload == b"now"
        await subscriber.acknowledge(now)
        await trio.sleep(9.9)
        assert await subscriber.rest() == []
        (later,) = await subscriber.messages(1)
        assert (later.topic, later.payload, later.qos) == ("a/b", b"later", qos)
        assert ("own", "b") in later.properties.user
        await subscriber.acknowledge(later)
        await trio.sleep(30)
        assert await subscriber.rest() == []


async def test_a_subscription_that_begins_before_it_is_due_gets_it(autojump_clock: MockClock) -> None:
    async with delaying_broker() as mqtt:
        publisher = await mqtt.connect("p")
        delayed = Properties({}, (("TIMER_DELAY_SEC", "12"),))
        await publisher.publish("a", b"later", 1, properties=delayed)
        await trio.sleep(6)
        subscriber = await mqtt.connect("s")
        await subscriber.subscribe("a")
        assert await subscriber.rest() == []
        assert await subscriber.payloads(1) == [b"later"]


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("name", [name for name, _ in DELAYS])
async def test_a_delay_that_is_no_number_is_refused(autojump_clock: MockClock, name: str, qos: int) -> None:
    """With the same code, whichever property it is."""
    async with delaying_broker() as mqtt:
        publisher = await mqtt.connect("p")
        delayed = Properties({}, ((name, "abc"),))
        reason = await publisher.publish("a", b"later", qos, properties=delayed)
        assert reason == ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR
        assert mqtt.context.counters.stored == 0
