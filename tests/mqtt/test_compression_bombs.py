"""Compressed bodies that expand to many times their size: few of them are in memory at a time, whoever reads them."""

import tracemalloc
from pathlib import Path

import pytest
import trio
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker
from trio.testing import MockClock

from martlet.message import Message
from martlet.records.compression import DELIVERED_BYTES_MAX, compress
from martlet.settings import BrokerConfig

EXPANDED_BYTES = 1 << 20
MESSAGES = 40
MEMORY_BYTES_MAX = 20_000_000


def publish(broker: MqttBroker, *bodies: bytes, is_compressed: bool = True) -> None:
    (topic,) = broker.context.rules.topics
    for body in bodies:
        content, flag = compress(body) if is_compressed else (body, 0)
        broker.broker.publish(Message(topic, content, b"TAGS\x01a\x02", sys_flag=flag))


def bodies_of(count: int) -> list[bytes]:
    return [b"%d" % number + bytes(EXPANDED_BYTES) for number in range(count)]


async def take(talk: MqttClient, bodies: list[bytes]) -> None:
    """Receive messages with *bodies*, in this order."""
    for body in bodies:
        (found,) = await talk.messages(1)
        assert found.payload == body
        await talk.acknowledge(found)


@pytest.mark.parametrize("is_away", [False, True], ids=["there", "away"])
@pytest.mark.parametrize(
    ("topic_filter", "qos", "identifier"), [("a", 0, 0), ("a", 1, 0), ("a", 1, 7), ("$share/g/a", 1, 0)]
)
async def test_a_subscriber_gets_them_in_order_and_few_are_in_memory(
    topic_filter: str, qos: int, identifier: int, is_away: bool, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path) as broker:
        talk = await broker.connect("me", expiry_s=1000)
        await talk.subscribe(topic_filter, qos=qos, identifier=identifier)
        if is_away:
            await talk.disconnect()
        bodies = bodies_of(MESSAGES)
        publish(broker, *bodies)
        publish(broker, b"last", is_compressed=False)
        expected = [] if is_away and not qos else [*bodies, b"last"]
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            await broker.settle()
            if is_away:
                talk = await broker.connect("me", clean=False, expiry_s=1000)
                await broker.settle()
            peak = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        assert peak < MEMORY_BYTES_MAX
        await take(talk, expected)


async def test_a_slow_subscriber_does_not_keep_what_a_fast_one_got(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path) as broker:
        slow, fast = await broker.connect("slow"), await broker.connect("fast")
        await slow.subscribe("a", qos=1)
        await fast.subscribe("a", qos=0)
        tracemalloc.start()
        try:
            for _ in range(MESSAGES // 10):
                bodies = bodies_of(10)
                publish(broker, *bodies)
                await take(fast, bodies)
            assert tracemalloc.get_traced_memory()[0] < MEMORY_BYTES_MAX
        finally:
            tracemalloc.stop()
        await take(slow, bodies_of(10))


async def test_a_body_that_expands_to_too_much_is_left_out(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path) as broker:
        talk = await broker.connect("me")
        await talk.subscribe("a", qos=1)
        largest = bytes(DELIVERED_BYTES_MAX)
        publish(broker, b"first", largest + b"x", largest, b"last")
        await take(talk, [b"first", largest, b"last"])
        assert await talk.rest() == []


@pytest.mark.parametrize("is_away", [False, True], ids=["there", "away"])
@pytest.mark.parametrize("topic_filter", ["a", "$share/g/a"])
async def test_a_body_as_long_as_messages_may_be_arrives(
    topic_filter: str, is_away: bool, tmp_path: Path, autojump_clock: MockClock
) -> None:
    largest = bytes(DELIVERED_BYTES_MAX + 1000)
    settings = BrokerConfig(message_bytes_max=len(largest))
    async with mqtt_broker(tmp_path, broker=settings) as broker:
        talk = await broker.connect("me", expiry_s=1000)
        await talk.subscribe(topic_filter, qos=1)
        if is_away:
            await talk.disconnect()
        publish(broker, largest + b"x", largest, b"last")
        await broker.settle()
        if is_away:
            talk = await broker.connect("me", clean=False, expiry_s=1000)
        with trio.fail_after(60):
            await take(talk, [largest, b"last"])
        assert broker.context.statistics()["unreadable"] == 1


@pytest.mark.parametrize("topic_filter", ["#", "$share/g/#"])
async def test_bodies_that_cannot_be_decompressed_are_left_out_and_counted(
    topic_filter: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path) as broker:
        talk = await broker.connect("me")
        await talk.subscribe(topic_filter, qos=1)
        (topic,) = broker.context.rules.topics
        _, flag = compress(b"x")
        for body, properties in (b"no zlib", b"TAGS\x01a\x02"), (b"no zlib, no name", b""):
            broker.broker.publish(Message(topic, body, properties, sys_flag=flag))
        publish(broker, b"last")
        await take(talk, [b"last"])
        assert await talk.rest() == []
        assert broker.context.statistics()["unreadable"] == 1
