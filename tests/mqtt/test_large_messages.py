"""Large messages: subscribers share the payload, whatever else differs between their packets."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.wire_clients.mqtt import V4, V5, MqttBroker, MqttClient, mqtt_broker
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.message import Message
from martlet.records.compression import compress
from martlet_mqtt.mapping.frames import LARGE_BYTES
from martlet_mqtt.wire.packets import FilterSubscription, Publish
from martlet_mqtt.wire.properties import Properties, Property

PAYLOAD = bytes(range(256)) * (LARGE_BYTES // 128)
SUBSCRIBERS = 60
MESSAGE_BYTES = 4_000_000
MEMORY_BYTES_MAX = 40_000_000


async def receive(talk: MqttClient, qos: int, payload: bytes) -> Publish:
    """Take a message, which must be *payload*, and nothing else."""
    (found,) = await talk.messages(1)
    assert (found.qos, found.payload) == (qos, payload)
    await talk.acknowledge(found)
    assert await talk.rest() == []
    return found


@pytest.mark.parametrize("size", [LARGE_BYTES - 1, LARGE_BYTES, len(PAYLOAD)])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_every_subscriber_gets_the_whole_message(
    qos: int, size: int, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path) as broker:
        plain = [await broker.connect(f"plain {n}", version) for n, version in enumerate((V4, V5, V5))]
        for talk in plain:
            await talk.subscribe("a/#", qos=qos)
        own = [await broker.connect(f"own {number}") for number in (1, 2)]
        for number, talk in enumerate(own, 1):
            await talk.subscribe("a/#", qos=qos, identifier=number)
        await (await broker.connect("publisher")).publish("a/b", PAYLOAD[:size], 2)
        for talk in plain:
            assert (await receive(talk, qos, PAYLOAD[:size])).properties.identifiers == ()
        for number, talk in enumerate(own, 1):
            assert (await receive(talk, qos, PAYLOAD[:size])).properties.identifiers == (number,)


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_small_and_large_messages_come_in_their_order(
    qos: int, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Also if one read brings all of them, and only some of them are in flight at a time."""
    async with mqtt_broker(tmp_path) as broker:
        talks = [
            await broker.connect("plain"),
            await broker.connect("alias", values={Property.TOPIC_ALIAS_MAXIMUM: 10}),
            await broker.connect("slow", values={Property.RECEIVE_MAXIMUM: 2}),
        ]
        for talk in talks:
            await talk.subscribe("one/long/name", qos=qos)
        payloads = [b"first", PAYLOAD, b"second", b"third", PAYLOAD[1:], PAYLOAD[2:], b"last"]
        publisher = await broker.connect("publisher")
        await publisher.send(
            *[Publish("one/long/name", payload, 1, packet_id=n + 1) for n, payload in enumerate(payloads)]
        )
        for talk in talks:
            for payload in payloads:
                (found,) = await talk.messages(1)
                assert (found.qos, found.payload) == (min(qos, 1), payload)
                await talk.acknowledge(found)
            assert await talk.rest() == []


async def test_what_is_the_subscribers_own_is_right(tmp_path: Path, autojump_clock: MockClock) -> None:
    """An alias, the rest of the expiry, RETAIN, no local, and the largest packet."""
    async with mqtt_broker(tmp_path) as broker:
        alias = await broker.connect("alias", values={Property.TOPIC_ALIAS_MAXIMUM: 10})
        published = await broker.connect("as published")
        local = await broker.connect("local")
        small = await broker.connect("small", values={Property.MAXIMUM_PACKET_SIZE: len(PAYLOAD)})
        await alias.subscribe("one/long/name")
        await published.subscribe(FilterSubscription("#", 1, retain_as_published=True))
        await local.subscribe(FilterSubscription("#", 1, no_local=True))
        await small.subscribe("#")
        properties = Properties({Property.MESSAGE_EXPIRY: 100})
        for number in range(2):
            await local.publish("one/long/name", PAYLOAD, 1, retain=True, properties=properties)
            found = await receive(alias, 1, PAYLOAD)
            assert (found.topic, found.properties.number(Property.TOPIC_ALIAS, 0)) == (("one/long/name", "")[number], 1)
            found = await receive(published, 1, PAYLOAD)
            assert (found.retain, found.properties.number(Property.MESSAGE_EXPIRY, 0)) == (True, 100)
        for talk in local, small:
            assert await talk.rest() == []
        assert broker.context.counters.oversize == 2


async def test_a_compressed_message_is_decompressed_for_all(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path) as broker:
        talks = [await broker.connect(f"client {number}") for number in range(3)]
        for number, talk in enumerate(talks, 1):
            await talk.subscribe("a", qos=0, identifier=number)
        (topic,) = broker.context.rules.topics
        body, flag = compress(PAYLOAD)
        broker.broker.publish(Message(topic, body, b"TAGS\x01a\x02", sys_flag=flag))
        await broker.settle()
        for number, talk in enumerate(talks, 1):
            assert (await receive(talk, 0, PAYLOAD)).properties.identifiers == (number,)


async def memory_of(publish: Callable[[], Any]) -> int:
    """Return how many more bytes are in use after *publish*, at most."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        await publish()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("has_identifier", [False, True])
async def test_subscribers_that_do_not_read_share_a_payload(
    has_identifier: bool, qos: int, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path) as broker:
        talks = [await broker.connect(f"client {number}") for number in range(SUBSCRIBERS)]
        for number, talk in enumerate(talks, 1):
            await talk.subscribe("a", qos=qos, identifier=number * has_identifier)
        publisher = await broker.connect("publisher")

        async def publish() -> None:
            await publisher.publish("a", b"x" * MESSAGE_BYTES, 1)
            await delivered(broker)

        assert await memory_of(publish) < MEMORY_BYTES_MAX
        for talk in talks:
            (found,) = await talk.messages(1)
            assert found.payload == b"x" * MESSAGE_BYTES


async def delivered(broker: MqttBroker) -> None:
    """Wait until the message is on its way to all."""
    while broker.context.counters.delivered < SUBSCRIBERS:
        await wait_all_tasks_blocked()
