"""A broker with all plugins that hold state, clients that use all of them, and what clients see after a start.

Everything is in memory and in virtual time. `fill` uses every kind of state once; `see` starts a broker on what is
left, lets every client come back, and returns what they got until nothing is left to happen.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, final

import orjson
import trio
from tests.remoting.pop_talk import ack_ext, pop_ext, popped
from tests.stored import records_of
from tests.wire_clients.mqtt import MqttBroker, MqttClient
from tests.wire_clients.remoting import RemotingClient
from tests.wire_clients.stomp import StompBroker, StompClient

from martlet.app import saving
from martlet.broker import Broker
from martlet.contracts import (
    ExternalTransaction,
    ExternalTransactions,
    Producers,
    Protocol,
    Service,
    StagedBatch,
    Transactions,
)
from martlet.errors import NotReady
from martlet.message import Message, Record, encode_properties
from martlet.plugins.hooks import Hooks
from martlet.records.codec import decode_records
from martlet.runtime.steps import finish_now
from martlet.state import Projection
from martlet.testing.clock import START_MS, TrioClock
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.peers import Serving, serving
from martlet.testing.stores import HOST, small_config
from martlet_filter_sql92.plugin import Sql92Config, Sql92Plugin
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.plugin import MqttPlugin
from martlet_mqtt.wire.codes import PacketType
from martlet_mqtt.wire.packets import Ack, Connack, Connect, FilterSubscription, Publish, Will
from martlet_mqtt.wire.properties import Properties, Property
from martlet_remoting.config import RemotingConfig
from martlet_remoting.nameserver.config import NameServerConfig
from martlet_remoting.nameserver.plugin import NameServerPlugin
from martlet_remoting.plugin import RemotingPlugin
from martlet_remoting.wire.codes import RequestCode
from martlet_stomp.config import StompConfig
from martlet_stomp.plugin import StompPlugin
from martlet_timer.config import TimerConfig
from martlet_timer.plugin import TimerPlugin
from martlet_tx.config import TxConfig
from martlet_tx.plugin import TxPlugin

__all__ = ["DATA", "Seen", "copy_of", "fill", "living", "see"]

DATA: Final = "/data"
CONFIG: Final = small_config(segment_bytes=1 << 16, page_bytes=1 << 13, cache_bytes=1 << 16, index_entries=4096)
# The wall clock of the second start; what waits for longer than this was sent before.
LATER_MS: Final = START_MS + 200_000
# How long clients wait after a start, in virtual time, which is longer than anything waits.
SEEN_S: Final = 400.0
EXPIRY: Final = Properties({Property.SESSION_EXPIRY: 100_000})
LABELS: Final = ("first", "second")
USER_TOPICS: Final = ("plain", "popped", "timed", "sold", "mqtt", "news", "jobs", "%LMQ%light")


@final
class Ended(BaseException):
    """Ends a broker without an orderly shutdown."""


@final
class Live:
    """A running broker and its ports."""

    def __init__(self, running: Serving, made: "Plugins") -> None:
        self.broker = running.broker
        self._running = running
        self._made = made
        mqtt, stomp = made.protocols["mqtt"], made.protocols["stomp"]
        self.mqtt = MqttBroker(running, mqtt, made.mqtt)
        self.stomp = StompBroker(running, stomp, made.stomp)
        self.asked = made.asked
        kv = made.names.server
        assert kv is not None
        self.kv = kv.kv

    def remoting(self) -> RemotingClient:
        return RemotingClient.of(self._running, self._made.protocols["remoting"])

    async def device(self, name: str, received: int = 65535) -> MqttClient:
        """Return a connection of the durable session *name*, which takes *received* messages at a time."""
        talk = self.mqtt.open()
        properties = EXPIRY.having(Property.RECEIVE_MAXIMUM, received)
        await talk.send(Connect(name, clean_start=False, properties=properties))
        assert (await talk.expect(Connack)).reason == 0
        return talk

    def publish(self, topic: str, body: bytes, queue_id: int = 0, **properties: object) -> None:
        named = {"UNIQ_KEY": body.decode(), **{name: str(value) for name, value in properties.items()}}
        self.broker.publish(Message(topic, body, encode_properties(named), queue_id, born_ms=1, born_host=HOST))

    async def settle(self) -> None:
        """Wait until everything appended is readable and applied."""
        store = self.broker.store
        store.committer.commit()
        await store.flusher.wait_flushed(store.appended)
        await trio.sleep(0.1)


@final
class Plugins:
    """All plugins with state, installed as `martlet.app.startup` does."""

    def __init__(self) -> None:
        self.remoting = RemotingPlugin(RemotingConfig(listen="127.0.0.1:10911", vip=False, light_queues=True))
        self.names = NameServerPlugin(NameServerConfig(listen="127.0.0.1:9876"))
        self.tx = TxPlugin(TxConfig(check_interval_ms=5000, immunity_ms=60_000, checks_max=3))
        self.timer = TimerPlugin(TimerConfig())
        self.timer.elapsed.suspended_ns = lambda: 0
        self.mqtt = MqttPlugin(MqttConfig(listen="127.0.0.1:1883", topic="mqtt"))
        self.stomp = StompPlugin(StompConfig(listen="127.0.0.1:61613"))
        self.protocols: dict[str, Protocol] = {}
        self.asked: Counter[str] = Counter()

    @property
    def all(self) -> Sequence[tuple[str, Hooks]]:
        return [
            ("remoting", self.remoting),
            ("nameserver", self.names),
            ("filter_sql92", Sql92Plugin(Sql92Config())),
            ("tx", self.tx),
            ("timer", self.timer),
            ("mqtt", self.mqtt),
            ("stomp", self.stomp),
        ]

    def install(self, broker: Broker) -> Sequence[Projection]:
        plugins = self.all
        for _, plugin in plugins:
            broker.capabilities.update(plugin.martlet_capabilities(broker))
            broker.filters = {**broker.filters, **plugin.martlet_filters(broker)}
        broker.capabilities[Producers] = Producers(self._ask)
        broker.set_stages(
            [(name, stage) for name, plugin in plugins for stage in plugin.martlet_stages(broker)],
            [(name, router) for name, plugin in plugins for router in plugin.martlet_routers(broker)],
        )
        found = [projection for _, plugin in plugins for projection in plugin.martlet_projections(broker)]
        for _, plugin in plugins:
            for protocol in plugin.martlet_protocols(broker):
                self.protocols[protocol.name] = protocol
                protocol.bound(protocol.listen)
        return found

    def _ask(self, group: str, half: Record, topic: str, queue_id: int) -> bool:
        self.asked[half.property("UNIQ_KEY")] += 1
        return True

    def services(self, broker: Broker) -> Sequence[Service]:
        saving.save(broker)
        found = [service for _, plugin in self.all for service in plugin.martlet_services(broker)]
        return [partial(saving.run, broker), *found]


@asynccontextmanager
async def living(disk: FakeDisk, start_ms: int) -> AsyncIterator[Live]:
    """A broker with all plugins on *disk*, at *start_ms*; it is stopped in order, unless the block raises."""
    made = Plugins()
    async with serving(
        Path(DATA),
        disk=disk,
        clock=TrioClock(start_ms),
        store=CONFIG,
        projections=made.install,
        services=made.services,
        dispatchers=made.timer.martlet_dispatchers(),
    ) as running:
        await trio.sleep(0.1)
        yield Live(running, made)


def copy_of(disk: FakeDisk, cut: Cut = Cut.KILLED) -> FakeDisk:
    """Return what is left when the process is killed now, or the power is cut."""
    return disk.after_power_cut(cut, Random(0))


# ---- every kind of state


async def fill(live: Live, label: str) -> None:
    """Leave state of every kind, named *label*, behind."""
    await _fill_tables(live, label)
    await _fill_remoting(live, label)
    await _fill_timers(live, label)
    await _fill_transactions(live, label)
    await _fill_mqtt(live, label)
    await _fill_stomp(live, label)
    await live.settle()


async def _fill_tables(live: Live, label: str) -> None:
    broker = live.broker
    for name in ("plain", "popped", "timed", "sold"):
        broker.topics.ensure(name, 2)
    broker.topics.update(f"empty-{label}", 3, 3, attributes={"reserve.time": "24"})
    broker.topics.ensure(f"gone-{label}", 1)
    live.publish(f"gone-{label}", b"never again")
    broker.groups.ensure(f"readers-{label}")
    broker.groups.set_forbidden(f"readers-{label}", "sold", readable=False)
    await live.kv.put("ORDER_TOPIC_CONFIG", f"plain-{label}", "broker-a:2")
    for number in range(12):
        light = {"INNER_MULTI_DISPATCH": "%LMQ%light"} if number % 3 == 0 else {}
        live.publish("plain", f"{label}-{number}".encode(), number % 2, TAGS=f"t{number % 3}", KEYS="key", **light)
    await live.settle()
    broker.groups.offsets.commit(f"readers-{label}", "plain", 0, 3)
    broker.topics.delete(f"gone-{label}")


async def _fill_remoting(live: Live, label: str) -> None:
    for number in range(4):
        live.publish("popped", f"{label}-{number}".encode())
    await live.settle()
    client = live.remoting()
    pops = popped(await client.ask(RequestCode.POP_MESSAGE, pop_ext("popped", 0, invisibleTime=90_000)))
    for message in pops[1:3]:
        assert (await client.ask(RequestCode.ACK_MESSAGE, ack_ext(message))).code == 0
    mode = {"topic": "plain", "consumerGroup": f"readers-{label}", "mode": "POP", "popShareQueueNum": 1}
    answer = await client.ask(RequestCode.SET_MESSAGE_REQUEST_MODE, {}, orjson.dumps(mode))
    assert answer.code == 0, answer.remark


async def _fill_timers(live: Live, label: str) -> None:
    now_ms = live.broker.clock.now_ms()
    for name, delay in (("delivered", {"DELAY": 1}), ("late", {"DELAY": 9})):
        live.publish("timed", f"{label}-level-{name}".encode(), **delay)
    for name, due_ms in (("delivered", now_ms + 1000), ("late", START_MS + 300_000), ("missed", START_MS + 100_000)):
        live.publish("timed", f"{label}-timer-{name}".encode(), 1, TIMER_DELIVER_MS=due_ms)
    await trio.sleep(3)


async def _fill_transactions(live: Live, label: str) -> None:
    held = live.broker.capability(Transactions)
    assert held is not None
    for name in ("open", "committed", "rolled back"):
        message = Message("sold", f"{label} {name}".encode(), b"", 0, 7, 0x4, 1, HOST)
        message.properties = encode_properties({"TRAN_MSG": "true", "PGROUP": "sellers", "UNIQ_KEY": f"{label} {name}"})
        placed = live.broker.publish(message)
        await live.settle()
        if name != "open":
            half = held.find_nowait(placed.queue_offset, placed.position) or await held.find(placed.position)
            held.end(half, commit=name == "committed")
    await live.settle()
    outside = live.broker.capability(ExternalTransactions)
    assert outside is not None
    begun = await outside.begin("", f"job-{label}", "run")
    prepared = ExternalTransaction(f"job-{label}", begun.epoch, 1)
    members = [(b"%b prepared" % label.encode(), b"", 0)]
    await outside.stage(prepared, "part", 0, StagedBatch("sold", 1, members, 0, 1, HOST))
    await outside.prepare(prepared, [("part", 1)], lambda topic: None)


async def _fill_mqtt(live: Live, label: str) -> None:
    device, member = await live.device("device"), await live.device("member")
    behind = await live.device("behind", 1)
    await device.subscribe("a/#", "w/#")
    await behind.subscribe("a/#", qos=1)
    await member.subscribe("$share/g/s/#")
    sender = live.mqtt.open()
    await sender.send(Connect("sender"))
    assert (await sender.expect(Connack)).reason == 0
    for number in range(3):
        payload = f"{label}-{number}".encode()
        await sender.publish(f"a/{number}", payload, 1 + number % 2)
        await sender.publish(f"s/{number}", payload, 1)
        await sender.publish(f"r/{label}/{number}", payload, 1, retain=True)
    await sender.publish(f"r/{label}/2", b"", 1, retain=True)
    taken = await device.messages(3)
    await device.acknowledge(taken[0])
    await member.acknowledge((await member.messages(3))[0])
    await behind.subscribe(FilterSubscription(f"r/{label}/#", 1, retain_handling=2))
    device.wire.close()
    member.wire.close()
    behind.wire.close()
    await sender.publish(f"r/{label}/new", f"{label}-new".encode(), 1)
    await sender.publish("a/later", f"{label}-later".encode(), 2)
    will = Will(f"w/{label}", b"the end", 1, properties=Properties({Property.WILL_DELAY: 300}))
    dying = live.mqtt.open()
    await dying.send(Connect(f"dying-{label}", properties=EXPIRY, will=will))
    assert (await dying.expect(Connack)).reason == 0
    dying.wire.close()
    sender.wire.close()


async def _durable(live: Live) -> StompClient:
    talk = await live.stomp.connect(client_id="ann")
    await talk.subscribe("/topic/news", "client-individual", **{"activemq.subscriptionName": "news"})
    return talk


async def _fill_stomp(live: Live, label: str) -> None:
    sender, reader = await live.stomp.connect(), await _durable(live)
    bodies = [f"{label}-{number}".encode() for number in range(4)]
    await sender.publish("/topic/news", *bodies)
    await sender.publish("/queue/jobs", *bodies)
    await reader.ack((await reader.messages(2))[0])
    worker = await live.stomp.connect()
    await worker.subscribe("/queue/jobs", "client-individual")
    await worker.ack((await worker.messages(2))[0])
    for talk in (sender, reader, worker):
        talk.hang_up()
    await trio.sleep(0.1)


# ---- what clients see

Seen = dict[str, Any]


async def see(disk: FakeDisk) -> Seen:
    """Start a broker on *disk*, use it as its clients do, and return what they see."""
    seen: Seen = {}
    try:
        async with living(disk, LATER_MS) as live:
            seen["tables"] = _tables(live)
            seen["keys"] = _by_key(live)
            async with trio.open_nursery() as nursery:
                for work in (_see_device, _see_member, _see_behind, _see_retained, _see_stomp, _see_pops):
                    nursery.start_soon(work, live, seen)
            await trio.sleep(SEEN_S / 4)
            seen["records"] = {topic: _records(live, topic) for topic in USER_TOPICS}
            seen["asked"] = dict(live.asked)
            seen["prepared"] = await _commit_prepared(live)
            raise Ended
    except* Ended:
        pass
    return seen


def _tables(live: Live) -> dict[str, object]:
    broker = live.broker
    groups = broker.groups
    offsets = {
        f"{topic}@{group}": dict(groups.offsets.committed(group, topic))
        for group in [*groups.names(), *groups.offsets.groups_of("plain")]
        for topic in groups.offsets.topics_of(group)
    }
    modes = live._made.remoting.state.request_modes
    return {
        "topics": {topic.name: topic.as_json() for topic in broker.topics},
        "groups": {name: group.as_json() for name in groups.names() if (group := groups.get(name))},
        "forbidden": {group: dict(topics) for group, topics in groups.forbidden().items()},
        "offsets": {key: found for key, found in offsets.items() if found and not key.startswith("popped@")},
        "modes": {label: modes.get("plain", f"readers-{label}") for label in LABELS},
        "kv": live.kv.namespace("ORDER_TOPIC_CONFIG"),
        "queues": {
            (topic, queue.queue_id): (queue.first_offset, queue.next_offset)
            for topic in USER_TOPICS
            for queue in broker.store.queues.topics.get(topic, {}).values()
        },
    }


def _by_key(live: Live) -> list[bytes] | None:
    try:
        found = finish_now(live.broker.store.lookup.query_keys("plain", b"key", 64, 0, 2**62)).records
    except NotReady:
        return None  # the index is being rebuilt; a client gets an answer that asks it to retry
    return sorted(bytes(record.body) for data in found for record in decode_records(data))


def _records(live: Live, topic: str) -> list[tuple[int, bytes]]:
    return sorted((record.queue_id, record.body) for record in records_of(live.broker.store, topic))


async def _see_device(live: Live, seen: Seen) -> None:
    talk = await live.device("device")
    seen["device"] = await _drain(talk)


async def _see_member(live: Live, seen: Seen) -> None:
    talk = await live.device("member")
    seen["member"] = await _drain(talk)


async def _see_behind(live: Live, seen: Seen) -> None:
    """A session with a filter that was new while it was behind."""
    talk = await live.device("behind")
    seen["behind"] = await _drain(talk)
    assert not any(topic in (f"r/{label}/0", f"r/{label}/1") for topic, *_ in seen["behind"] for label in LABELS)


async def _drain(talk: MqttClient) -> list[tuple[object, ...]]:
    """Take and acknowledge what comes until the end; leave out messages of QoS 0 that nobody asked for."""
    found: list[Publish] = []
    with trio.move_on_after(SEEN_S * 3 / 4):
        while True:
            packet = talk._came.pop(0) if talk._came else await talk.receive()
            if isinstance(packet, Ack):  # PUBREL of a message that was received before
                await talk.send(Ack(PacketType.PUBCOMP, packet.packet_id))
                continue
            assert isinstance(packet, Publish), packet
            found.append(packet)
            await talk.acknowledge(packet)
    return sorted((each.topic, each.payload, each.qos, each.is_duplicate, each.retain) for each in found)


async def _see_retained(live: Live, seen: Seen) -> None:
    talk = live.mqtt.open()
    await talk.send(Connect("looks"))
    assert (await talk.expect(Connack)).reason == 0
    await talk.subscribe("r/#", qos=0)
    await trio.sleep(5)
    seen["retained"] = sorted((each.topic, each.payload) for each in await talk.rest())


async def _see_stomp(live: Live, seen: Seen) -> None:
    reader = await _durable(live)
    worker = await live.stomp.connect()
    await worker.subscribe("/queue/jobs", "client-individual")
    for name, talk in (("news", reader), ("jobs", worker)):
        came = []
        with trio.move_on_after(SEEN_S / 4):
            while True:
                message = (await talk.messages(1))[0]
                came.append((message.body, message.headers.get("redelivered")))
                await talk.ack(message)
        seen[name] = sorted(came, key=str)


async def _see_pops(live: Live, seen: Seen) -> None:
    client, came = live.remoting(), []
    for _ in range(20):
        answer = await client.ask(RequestCode.POP_MESSAGE, pop_ext("popped", -1, invisibleTime=90_000, pollTime=0))
        for message in popped(answer) if answer.code == 0 else ():
            came.append((message.body, message.times))
            assert (await client.ask(RequestCode.ACK_MESSAGE, ack_ext(message))).code == 0
        await trio.sleep(5)
    seen["popped"] = sorted(came)


async def _commit_prepared(live: Live) -> list[tuple[int, bytes]]:
    outside = live.broker.capability(ExternalTransactions)
    assert outside is not None
    for label in ("first", "second"):
        begun = await outside.begin("", f"job-{label}", "run")
        await outside.commit(ExternalTransaction(f"job-{label}", begun.epoch, 1), [("part", 1)], lambda topic: None)
    await live.settle()
    return _records(live, "sold")
