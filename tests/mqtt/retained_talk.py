"""What tests of retained messages share: appending without a turn of the event loop, and what is retained."""

from collections.abc import Generator
from typing import Any

import trio.testing
from tests.wire_clients.mqtt import V5, MqttBroker, MqttClient

from martlet.contracts import Identity, RecordView
from martlet.testing.disk import FakeDisk
from martlet_mqtt.shared.storing import store
from martlet_mqtt.wire.packets import Connack, Connect, FilterSubscription, Publish, Suback, Subscribe
from martlet_mqtt.wire.properties import Properties, Property

HOST = bytes(8)


def append(mqtt: MqttBroker, name: str, payload: bytes, *, retain: bool = True, qos: int = 1) -> None:
    """Append a message as if a client had published it; nothing is committed."""
    context = mqtt.context
    packet = Publish(name, payload, qos, retain, packet_id=1)
    store(context, mqtt.broker.gate(Identity()), packet, context.names.find(name), HOST, "publisher")


def run_now(steps: Generator[Any, None, None]) -> None:
    """Do *steps* without a turn of the event loop, which could apply what was appended."""
    for work in steps:
        if work is not None:
            work()


def roll(mqtt: MqttBroker, end: int) -> None:
    """Append again what is retained before *end*, without a turn of the event loop."""
    run_now(mqtt.context.retained.roll(0, end))


async def applied(mqtt: MqttBroker) -> None:
    """Wait until all that was appended is applied."""
    await mqtt.settle()
    await mqtt.broker.projections.wait_applied(mqtt.context.retained)


async def remove_old_segments(mqtt: MqttBroker, disk: FakeDisk) -> int:
    """Have retention remove all segments but the last; return where the log begins then."""
    store = mqtt.broker.store
    await mqtt.broker.projections.keeper.release(store.segments.items[-2].end)
    await store.upkeep.checkpointer.checkpoint()
    disk.used_ratio = 0.95
    for _ in range(5):  # ten segments each
        store.upkeep.retention.look()
    disk.used_ratio = 0.1
    await applied(mqtt)
    return store.first_position


async def kept(mqtt: MqttBroker, topic_filter: str = "#") -> dict[str, bytes]:
    """Return the retained messages that a new subscriber gets."""
    await applied(mqtt)
    talk, publisher = await mqtt.connect(), await mqtt.connect()
    await talk.subscribe(topic_filter, qos=0)
    await talk.subscribe("fence", qos=0)
    await publisher.publish("fence", b"", 1)
    found: dict[str, bytes] = {}
    while True:
        (message,) = await talk.messages(1)
        if not message.retain:
            return found
        assert message.topic not in found
        found[message.topic] = message.payload


def held(mqtt: MqttBroker) -> dict[str, bytes]:
    """Return the payload of the record of each retained message."""
    retained, found = mqtt.context.retained, dict[str, bytes]()
    for name in retained.matches("#"):
        if name:
            record = mqtt.broker.store.lookup.known_record(retained.position(name))
            assert record is not None, name
            found[name] = bytes(RecordView(record).body)
    return found


async def come_back(mqtt: MqttBroker, *filters: str) -> list[tuple[bytes, bool]]:
    """Return the payloads and RETAIN flags that client "c" gets when it connects and subscribes in one read."""
    talk = mqtt.open()
    await talk.send(
        Connect("c", V5, False, properties=Properties({Property.SESSION_EXPIRY: 1000})),
        Subscribe(1, tuple(FilterSubscription(each, 1) for each in filters or ("a",))),
    )
    assert (await talk.expect(Connack)).session_present
    await talk.expect(Suback)
    return await came(talk)


async def came(talk: MqttClient) -> list[tuple[bytes, bool]]:
    """Return the payloads and RETAIN flags of all that comes until there is nothing more, acknowledged."""
    found: list[tuple[bytes, bool]] = []
    while True:
        await trio.testing.wait_all_tasks_blocked()
        messages = await talk.rest()
        if not messages:
            return found
        for message in messages:
            await talk.acknowledge(message)
            found.append((message.payload, message.retain))
