"""Connections of MQTT clients leave no reference cycles, which nothing would collect while the broker is busy."""

import gc
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from tests.wire_clients.mqtt import MqttBroker, mqtt_broker

from martlet_mqtt.wire.codes import PacketType
from martlet_mqtt.wire.packets import Ack, Connack, Connect, Publish, Will

TIMES = 20


async def publisher(mqtt: MqttBroker) -> None:
    talk = await mqtt.connect("publisher")
    await talk.publish("a", b"0")
    await talk.publish("a", b"1", 1)
    await talk.publish("a", b"2", 2)
    await talk.disconnect()


async def session(mqtt: MqttBroker) -> None:
    """The session is not ended, and has two messages in flight."""
    talk = await mqtt.connect("session", clean=False, expiry_s=1000)
    await talk.subscribe("b/#", qos=2)
    await talk.publish("b/1", b"1", 1, retain=True)
    await talk.publish("b/2", b"2", 2)
    assert {each.payload for each in await talk.messages(2)} == {b"1", b"2"}
    talk.hang_up()


async def clean_session(mqtt: MqttBroker) -> None:
    talk = await mqtt.connect("clean")
    await talk.subscribe("b/#", "$SYS/#", "c", qos=1)
    await talk.unsubscribe("c", "d")
    talk.hang_up()


async def shared(mqtt: MqttBroker) -> None:
    talk = await mqtt.connect("shared")
    await talk.subscribe("$share/g/s", qos=1)
    await talk.publish("s", b"1", 1)
    (message,) = await talk.messages(1)
    await talk.acknowledge(message)
    await talk.disconnect()


async def will(mqtt: MqttBroker) -> None:
    talk = await mqtt.connect("will", will=Will("w", b"gone", 1))
    talk.hang_up()


async def taken_over(mqtt: MqttBroker) -> None:
    first = await mqtt.connect("twice", expiry_s=1000)
    await first.subscribe("t", qos=1)
    second = await mqtt.connect("twice", clean=False, expiry_s=1000, present=True)
    await first.closed()
    second.hang_up()


async def refused(mqtt: MqttBroker) -> None:
    _, answer = await mqtt.answer(Connect("\x01"))
    assert isinstance(answer, Connack)
    assert answer.reason


async def wrong(mqtt: MqttBroker) -> None:
    talk = await mqtt.connect("wrong")
    await talk.subscribe("b/#", qos=1)
    await talk.send(Ack(PacketType.PUBREL, 7), Publish("+", b""))
    await talk.closed()


VISITS: list[Callable[[MqttBroker], Awaitable[None]]] = [
    publisher,
    session,
    clean_session,
    shared,
    will,
    taken_over,
    refused,
    wrong,
]


async def wait_alone(mqtt: MqttBroker) -> None:
    """Wait until every connection has ended, and what they did is known."""
    while mqtt.running.server.statistics()["connections"]:
        await trio.lowlevel.checkpoint()
    await mqtt.settle()


@pytest.mark.parametrize("visit", VISITS, ids=lambda visit: visit.__name__)
async def test_clients_leave_no_cycles(
    visit: Callable[[MqttBroker], Awaitable[None]], tmp_path: Path, no_collection: None
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for _ in range(3):  # what is made once
            await visit(mqtt)
        await wait_alone(mqtt)
        gc.collect()
        for _ in range(TIMES):
            await visit(mqtt)
        await wait_alone(mqtt)
        assert gc.collect() < TIMES  # less than one object for each time
