"""A power cut can lose any write that was not synced, and keep later ones.

Nothing that was lost had been acknowledged, so clients send it again. What is left must be consistent: a QoS 2 message
with its packet identifier, a message of a shared subscription with the session that got it, a will with the session
that had it, and retained messages in flight with the progress of their filter.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain, combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker

from martlet.records.layout import record_views
from martlet.store.format.atomic import LAST, MARK_AT
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.wire.codes import PacketType
from martlet_mqtt.wire.packets import Ack, Publish, Will
from martlet_mqtt.wire.properties import Property

DIRECTORY = Path("/data")
SEGMENT = "/data/commitlog/00000000000000000000"
STORE = small_config(flush="sync", segment_bytes=1 << 16, page_bytes=1 << 13, cache_bytes=1 << 16)
PAYLOADS = [b"%d" % number for number in range(4)]


def commits(log: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each record outside of groups, and of each group."""
    start = at = 0
    for record in record_views(log.rstrip(b"\0")):
        at = record.start + record.size
        if log[record.start + MARK_AT] & LAST in (0, LAST):
            yield start, at
            start = at


def without(disk: FakeDisk, start: int, end: int) -> FakeDisk:
    """Return a copy of *disk* as if the log had never been written from *start* to *end*."""
    copy = disk.after_power_cut(Cut.KILLED, Random(0))
    copy.files[SEGMENT].data[start:end] = copy.files[SEGMENT].stable[start:end] = bytes(end - start)
    return copy


def damaged(disk: FakeDisk, start: int) -> Iterator[FakeDisk]:
    """Yield copies of *disk* without up to three of the records and groups from *start* on."""
    written = [each for each in commits(bytes(disk.files[SEGMENT].data)) if each[0] >= start]
    for holes in chain.from_iterable(combinations(written, count) for count in range(1, 4)):
        found = disk
        for hole in holes:
            found = without(found, *hole)
        yield found


async def connected(mqtt: MqttBroker, name: str, *, present: bool = True, **more: Any) -> MqttClient:
    return await mqtt.connect(name, clean=False, expiry_s=1000, present=present, **more)


def packets(*, again: bool) -> list[Publish]:
    return [
        Publish("a/1", payload, 2, is_duplicate=again, packet_id=number)
        for number, payload in enumerate(PAYLOADS, start=1)
    ]


async def take_all(talk: MqttClient) -> Counter[bytes]:
    """Take and complete what comes, until nothing comes after a last message; return how often each payload came."""
    came: Counter[bytes] = Counter()
    last = b""
    while last not in came:
        packet = await talk.receive()
        if isinstance(packet, Publish):
            came[packet.payload] += 1
            await talk.send(*[Ack(PacketType.PUBREC, packet.packet_id)] * (packet.qos == 2))
        else:
            assert isinstance(packet, Ack), packet
            await talk.send(Ack(PacketType.PUBCOMP, packet.packet_id))
        if len(came) == len(PAYLOADS) and not last:
            last = b"last"
            await talk.publish("a/1", last)
    del came[last]
    return came


async def killed(disk: FakeDisk, *, is_delivered: bool) -> tuple[FakeDisk, int]:
    """Publish messages of QoS 2, a commit each, to a session and to a shared subscription, both without their clients.

    If *is_delivered*, these come and get the messages. Returns what is left when the broker is killed, and the log
    position from which on no client knows of anything.
    """
    async with mqtt_broker(DIRECTORY, store=STORE, disk=disk) as mqtt:
        for name, topic_filter in (("subscriber", "a/#"), ("member", "$share/g/a/#")):
            talk = await connected(mqtt, name, present=False)
            await talk.subscribe(topic_filter)
            await talk.disconnect()
        publisher = await connected(mqtt, "publisher", present=False)
        await mqtt.settle()
        start = mqtt.broker.store.appended
        for packet in packets(again=False):
            await publisher.send(packet)
            await publisher.expect(Ack)
        if is_delivered:
            start = mqtt.broker.store.appended
            for name in ("subscriber", "member"):
                talk = await connected(mqtt, name)
                assert await talk.payloads(len(PAYLOADS)) == PAYLOADS
        return disk.after_power_cut(Cut.KILLED, Random(0)), start


async def publish_again(talk: MqttClient) -> None:
    await talk.send(*packets(again=True))
    for kind, answer in ((PacketType.PUBREC, PacketType.PUBREL), (PacketType.PUBCOMP, None)):
        for packet in packets(again=True):
            ack = await talk.expect(Ack)
            assert (ack.kind, ack.packet_id, ack.reason) == (kind, packet.packet_id, 0)
            if answer is not None:
                await talk.send(Ack(answer, packet.packet_id))


@pytest.mark.parametrize("is_delivered", [False, True])
async def test_qos_2_comes_once_whatever_writes_were_lost(*, is_delivered: bool) -> None:
    disk, start = await killed(FakeDisk(), is_delivered=is_delivered)
    for place, found in enumerate(damaged(disk, start)):
        async with mqtt_broker(DIRECTORY, store=STORE, disk=found) as mqtt:
            await publish_again(await connected(mqtt, "publisher"))
            for name in ("subscriber", "member"):
                came = await take_all(await connected(mqtt, name))
                assert came == dict.fromkeys(PAYLOADS, 1), (name, place, came)


async def until_last(talk: MqttClient) -> Counter[bytes]:
    """Acknowledge what comes until the payload "last"; return how often each payload came."""
    came: Counter[bytes] = Counter()
    while b"last" not in came:
        (packet,) = await talk.messages(1)
        came[packet.payload] += 1
        await talk.acknowledge(packet)
    return came


async def test_the_will_of_a_connection_is_published_although_another_one_took_its_session() -> None:
    disk = FakeDisk()
    async with mqtt_broker(DIRECTORY, store=STORE, disk=disk) as mqtt:
        watcher = await connected(mqtt, "watcher", present=False)
        await watcher.subscribe("will", qos=1)
        await connected(mqtt, "client", present=False, will=Will("will", b"first", 1))
        await mqtt.settle()
        start = mqtt.broker.store.appended
        await connected(mqtt, "client", will=Will("will", b"second", 1))
        killed = disk.after_power_cut(Cut.KILLED, Random(0))
    for found in damaged(killed, start):
        async with mqtt_broker(DIRECTORY, store=STORE, disk=found) as mqtt:
            await connected(mqtt, "client")
            watcher = await connected(mqtt, "watcher")
            await watcher.publish("will", b"last")
            assert (await until_last(watcher))[b"first"] == 1


async def test_retained_messages_come_although_what_was_sent_before_them_is_lost() -> None:
    disk = FakeDisk()
    one = {Property.RECEIVE_MAXIMUM: 1}
    async with mqtt_broker(DIRECTORY, store=STORE, disk=disk) as mqtt:
        publisher = await mqtt.connect("publisher")
        for payload in PAYLOADS:
            await publisher.publish(f"a/{payload.decode()}", payload, 1, retain=True)
        subscriber = await connected(mqtt, "subscriber", present=False, values=one)
        await subscriber.subscribe("a/#", qos=1)
        (first,) = await subscriber.messages(1)
        await mqtt.settle()
        start = mqtt.broker.store.appended
        await subscriber.acknowledge(first)
        await subscriber.messages(1)
        killed = disk.after_power_cut(Cut.KILLED, Random(0))
    for found in damaged(killed, start):
        async with mqtt_broker(DIRECTORY, store=STORE, disk=found) as mqtt:
            subscriber = await connected(mqtt, "subscriber", values=one)
            await (await mqtt.connect("publisher")).publish("a/5", b"last", 1)
            came = await until_last(subscriber)
            assert set(PAYLOADS) - {first.payload} <= set(came), came
