"""QoS 0 needs no fdatasync of its own: nobody waits until such a message is durable.

Live subscribers get it at once. Whoever reads only what is durable waits no longer than `store.flush_interval_ms`, and
not at all where the broker knows that somebody waits.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from tests.mqtt.devices import NAMES, Receiver, Sender, check
from tests.remoting.conftest import pull_ext
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker
from tests.wire_clients.remoting import RemotingClient, remoting_of
from trio.testing import MockClock

from martlet.records.codec import decode_records
from martlet.store import Store, StoreConfig
from martlet.testing.clock import TrioClock
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.wire.codes import V4
from martlet_mqtt.wire.packets import Connack, Connect, FilterSubscription, Publish, Suback, Subscribe
from martlet_mqtt.wire.properties import Properties
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

SEEDS = range(int(os.environ.get("MARTLET_CRASH_SEEDS", "3")))
DATA = Path("/data")
INTERVAL_S = 60.0


def config(**more: Any) -> StoreConfig:
    usual = {"flush_interval_ms": int(INTERVAL_S * 1000), "segment_bytes": 1 << 22, "page_bytes": 1 << 13}
    return small_config(flush="sync", cache_bytes=1 << 16, **{**usual, **more})


@asynccontextmanager
async def broker(disk: FakeDisk, **more: Any) -> AsyncIterator[MqttBroker]:
    async with mqtt_broker(DATA, store=config(**more), disk=disk, clock=TrioClock()) as mqtt:
        yield mqtt


async def test_a_thousand_messages_of_qos_0_need_no_fdatasync_and_come_at_once(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    async with broker(disk, checkpoint_interval_ms=3_600_000) as mqtt:
        talk, publisher = await mqtt.connect("s", V4), await mqtt.connect("p", V4)
        await talk.subscribe("a/#", qos=0)
        before = disk.calls["sync"]
        for number in range(1000):
            began = trio.current_time()
            await publisher.publish(f"a/{number % 7}", b"%d" % number)
            assert await talk.payloads(1) == [b"%d" % number]
            assert trio.current_time() == began, "a subscriber need not wait for anything"
            await trio.sleep(INTERVAL_S / 2000)
        assert disk.calls["sync"] == before
        store = mqtt.broker.store
        assert store.readable < store.written
        await trio.sleep(INTERVAL_S)
        assert store.readable == store.written
        assert store.flusher.fsyncs == 1


async def test_messages_of_qos_0_with_properties_need_none_either(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    async with broker(disk) as mqtt:
        talk, publisher = await mqtt.connect("s"), await mqtt.connect("p")
        await talk.subscribe("a", qos=0)
        before = disk.calls["sync"]
        for number in range(20):
            properties = Properties({}, (("key", str(number)),))
            await publisher.publish("a", b"%d" % number, properties=properties)
            assert await talk.payloads(1) == [b"%d" % number]
        assert disk.calls["sync"] == before


async def test_qos_1_is_acknowledged_and_delivered_only_when_it_is_durable(autojump_clock: MockClock) -> None:
    async with broker(FakeDisk()) as mqtt:
        talk, publisher = await mqtt.connect("s", V4), await mqtt.connect("p", V4)
        await talk.subscribe("a", qos=0)
        store = mqtt.broker.store
        for number in range(30):
            await publisher.publish("a", b"0 %d" % number)
            await talk.payloads(1)
            assert store.readable < store.written
            await publisher.publish("a", b"1 %d" % number, qos=1)
            assert store.readable == store.written, "it was acknowledged"
            assert await talk.payloads(1) == [b"1 %d" % number]


async def test_nothing_overtakes_a_message_for_which_somebody_waits(autojump_clock: MockClock) -> None:
    """Subscribers get everything in the order of the log, whatever its QoS, while fdatasync takes long."""
    async with broker(FakeDisk()) as mqtt:
        store, chance = mqtt.broker.store, Random(1)
        slow_down(store.flusher.files, 0.05)
        talk, one, two = await mqtt.connect("s", V4), await mqtt.connect("p", V4), await mqtt.connect("q", V4)
        await talk.subscribe("a", qos=0)
        sent: list[bytes] = []
        for number in range(200):
            sent.append(b"%d" % number)
            qos = int(chance.random() < 0.3)
            await (one if chance.random() < 0.5 else two).send(
                Publish("a", sent[-1], qos, packet_id=number + 1 if qos else 0)
            )
            if chance.random() < 0.5:
                await trio.sleep(0.02)
            await trio.testing.wait_all_tasks_blocked()
        assert await talk.payloads(200) == sent


def slow_down(files: Any, seconds: float) -> None:
    """Let each fdatasync take *seconds*."""
    off_loop = files.disk.off_loop

    async def slowly(work: Any) -> Any:
        await trio.sleep(seconds)
        return await off_loop(work)

    files.disk.off_loop = slowly


async def test_a_subscription_of_qos_1_and_a_durable_session_get_messages_of_qos_0_at_once(
    autojump_clock: MockClock,
) -> None:
    async with broker(FakeDisk()) as mqtt:
        talk = await mqtt.connect("s", expiry_s=1000)
        publisher = await mqtt.connect("p", V4)
        await talk.subscribe("a", qos=1)
        began = trio.current_time()
        for number in range(10):
            await publisher.publish("a", b"%d" % number)
            assert await talk.payloads(1) == [b"%d" % number]
        assert trio.current_time() == began
        await talk.disconnect()
        await publisher.publish("a", b"away")
        talk = await mqtt.connect("s", clean=False, expiry_s=1000, present=True)
        assert await talk.payloads(1) == [b"away"]


async def test_a_shared_subscription_asks_for_a_flush_at_once(autojump_clock: MockClock) -> None:
    async with broker(FakeDisk()) as mqtt:
        member, plain = await mqtt.connect("m"), await mqtt.connect("s")
        publisher = await mqtt.connect("p", V4)
        await plain.subscribe("a/#", qos=0)
        for number in range(5):
            await publisher.publish("a/b", b"early %d" % number)
        assert await plain.payloads(5) == [b"early %d" % number for number in range(5)]
        await member.subscribe("$share/g/a/#", qos=1)
        began = trio.current_time()
        for number in range(20):
            await publisher.publish("a/b", b"%d" % number)
            (found,) = await member.messages(1)
            assert found.payload == b"%d" % number
            assert await plain.payloads(1) == [b"%d" % number]
        assert trio.current_time() == began
        await member.unsubscribe("$share/g/a/#")
        await publisher.publish("a/b", b"missed by none")
        await plain.payloads(1)
        await member.subscribe("$share/g/a/#", qos=1)
        assert await member.payloads(1) == [b"missed by none"]


async def test_a_retained_message_of_qos_0_is_durable_when_it_is_seen(autojump_clock: MockClock) -> None:
    async with broker(FakeDisk()) as mqtt:
        talk, publisher = await mqtt.connect("s", V4), await mqtt.connect("p", V4)
        await talk.subscribe("a", qos=0)
        await publisher.publish("a", b"kept", retain=True)
        await talk.payloads(1)
        assert mqtt.broker.store.readable == mqtt.broker.store.written
        await publisher.publish("a", b"not kept")
        await talk.payloads(1)
        late, began = await mqtt.connect("l", V4), trio.current_time()
        await late.subscribe("a", qos=0)
        assert await late.payloads(1) == [b"kept"]
        assert trio.current_time() == began


class Reader:
    """Reads the topic by its offsets, as a consumer of RocketMQ does, over all crashes; never forgets what it saw."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], bytes] = {}
        self._next: dict[int, int] = {}

    def read(self, store: Store) -> None:
        for queue in store.queues.topics.get("mqtt", {}).values():
            key = queue.queue_id
            result = store.readers.read(queue, self._next.get(key, 0), 1000, 1 << 20)
            self._next[key] = result.next_offset
            for record in decode_records(b"".join(result.pieces)):
                self.seen[key, record.queue_offset] = record.body

    def check(self, store: Store) -> None:
        """Assert that the log still has everything that was ever read, at the same offset."""
        for (queue_id, offset), body in self.seen.items():
            (record,) = decode_records(
                b"".join(store.readers.read(store.queue("mqtt", queue_id), offset, 1, 1 << 20).pieces)
            )
            assert record.body == body, (queue_id, offset)


async def chatter(talk: MqttClient, sent: list[bytes], chance: Random) -> None:
    """Publish with QoS 0 without end, sometimes many at once."""
    await talk.send(Connect("chatter", V4))
    await talk.expect(Connack)
    while True:
        some = [b"%d" % (len(sent) + number) for number in range(chance.randrange(1, 5))]
        sent += some
        await talk.send(*[Publish(chance.choice(NAMES), b"live " + each) for each in some])
        await trio.sleep(chance.choice((0, 0, 0.001, 0.02)))


async def listen(talk: MqttClient, came: list[bytes], ready: trio.Event) -> None:
    """Subscribe with QoS 0."""
    await talk.send(Connect("listener", V4), Subscribe(1, (FilterSubscription("#", 0),)))
    await talk.expect(Connack)
    await talk.expect(Suback)
    ready.set()
    while True:
        (packet,) = await talk.messages(1)
        if packet.payload.startswith(b"live "):
            came.append(packet.payload.removeprefix(b"live "))


async def cut_power(store: Store, disk: FakeDisk, cut: Cut, sender: Sender) -> FakeDisk:
    """Cut the power right after messages of QoS 0 were given to subscribers that are not durable; return the disk."""
    found, early, delivered = list[FakeDisk](), store.readable_end.early, trio.Event()

    def cut_now() -> None:
        if not found:
            assert store.durable < early.position
            found.append(disk.after_power_cut(cut, sender.chance))
            if cut in {Cut.REORDERED, Cut.TORN}:
                sender.power_cut()
            delivered.set()

    early.on_watched.append(cut_now)
    await delivered.wait()
    return found[0]


@pytest.mark.parametrize("cut", list(Cut))
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_power_cut_costs_messages_of_qos_0_alone_and_no_offset_gets_another_message(
    cut: Cut, seed: int, autojump_clock: MockClock
) -> None:
    """The power is cut while messages of QoS 0 were delivered that are not durable yet."""
    chance = Random(seed)
    sender, receiver, reader, disk = Sender(chance), Receiver(chance), Reader(), FakeDisk()

    async def connected(device: Sender | Receiver, talk: MqttClient) -> None:
        await device.connect(talk)
        await device.run(talk)

    async def send_slowly(talk: MqttClient) -> None:
        await sender.connect(talk)
        while True:
            await sender.send_some(talk, 5)
            await sender.finish(talk)
            await trio.sleep(chance.choice((0, 0.01, 0.1)))

    async def read(store: Store) -> None:
        while True:
            reader.read(store)
            await trio.sleep(0.005)

    for _ in range(4):
        sent, came, ready = list[bytes](), list[bytes](), trio.Event()
        interval: dict[str, Any] = {"flush_interval_ms": chance.choice((20, 500))}
        sizes = {"segment_bytes": 1 << 16, "queue_file_entries": 1000}
        async with broker(disk, **sizes, **interval) as mqtt, trio.open_nursery() as nursery:
            store = mqtt.broker.store
            reader.check(store)
            nursery.start_soon(connected, receiver, mqtt.open())
            nursery.start_soon(listen, mqtt.open(V4), came, ready)
            await receiver.subscribed.wait()
            await ready.wait()
            nursery.start_soon(send_slowly, mqtt.open())
            nursery.start_soon(chatter, mqtt.open(V4), sent, chance)
            nursery.start_soon(read, store)
            await receiver.wait_received(len(receiver.received) + chance.randrange(5, 40))
            await trio.sleep(chance.random() * 0.05)
            assert came == sent[: len(came)], "a live subscriber gets each message once, in order"
            after = await cut_power(store, disk, cut, sender)
            nursery.cancel_scope.cancel()
        disk = after
    async with broker(disk, segment_bytes=1 << 16, queue_file_entries=1000) as mqtt:
        reader.check(mqtt.broker.store)
        talk = mqtt.open()
        await sender.connect(talk)
        await sender.finish(talk)
        talk = mqtt.open()
        await receiver.connect(talk)
        while not sender.stored.keys() <= receiver.received.keys():
            await receiver.take(talk)
    check(sender, receiver)


async def test_a_consumer_that_waits_has_messages_of_qos_0_flushed_at_once(autojump_clock: MockClock) -> None:
    """A long poll of RocketMQ's protocol waits at the end of the topic, before or after messages came."""
    async with broker(FakeDisk()) as mqtt:
        talk = RemotingClient.of(mqtt.running, remoting_of(mqtt.broker))
        subscriber, publisher = await mqtt.connect("s", V4), await mqtt.connect("p", V4)
        await subscriber.subscribe("a", qos=0)
        place = mqtt.context.names.find("a").place % 8
        began, offset = trio.current_time(), 0
        for number in range(10):
            if number % 2:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(publish_later, publisher, b"%d" % number)
                    answer = await pull(talk, place, offset)
            else:
                await publisher.publish("a", b"%d" % number)
                await subscriber.payloads(1)
                answer = await pull(talk, place, offset)
            records = decode_records(answer.body)
            assert [record.body for record in records] == [b"%d" % number]
            offset = records[-1].queue_offset + 1
        assert trio.current_time() < began + 1


async def publish_later(publisher: MqttClient, payload: bytes) -> None:
    await trio.sleep(0.01)
    await publisher.publish("a", payload)


async def pull(talk: RemotingClient, queue_id: int, offset: int) -> Command:
    """Wait for messages as a consumer does."""
    ext = pull_ext("mqtt", offset, queue_id, sysFlag=6, suspendTimeoutMillis=20_000)
    return await talk.ask(RequestCode.PULL_MESSAGE, ext)


async def test_a_subscription_to_the_whole_topic_asks_for_a_flush_at_once(autojump_clock: MockClock) -> None:
    """As a subscriber of STOMP or of a plugin's protocol does."""
    async with broker(FakeDisk()) as mqtt:
        publisher, store = await mqtt.connect("p", V4), mqtt.broker.store
        await publisher.publish("a", b"1")
        await publisher.rest()
        assert store.readable < store.written
        topic = mqtt.broker.topics.get("mqtt")
        assert topic is not None
        tail = mqtt.broker.tails.of(topic)
        await trio.testing.wait_all_tasks_blocked()
        assert store.readable == store.written
        await publisher.publish("a", b"2")
        await publisher.rest()
        await trio.testing.wait_all_tasks_blocked()
        assert store.readable == store.written
        mqtt.broker.tails.release(tail)
        await publisher.publish("a", b"3")
        await publisher.rest()
        assert store.readable < store.written
