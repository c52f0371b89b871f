"""Names in topics of their own (`mqtt.rules`): every session gets what it wants once, in the order of the log."""

from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.mqtt.users import closed_broker
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker

from martlet.delivery.routing.route_cache import RouteCache
from martlet.errors import ConfigError, Reason, Refused
from martlet.message import Message
from martlet.records.layout import record_views
from martlet.sessions.journal_codec import SENT, SessionState
from martlet.sessions.journal_writer import SessionJournalWriter
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.mapping.rules import TopicRules
from martlet_mqtt.wire.codes import PacketType, ReasonCode
from martlet_mqtt.wire.packets import Ack, Disconnect, Publish
from martlet_mqtt.wire.properties import Property

RULES = ["b/#=bees", "c/#=cats"]
DATA = Path("/data")
# The first levels of the names that are published: each topic comes between messages of the others.
ORDER = "acbbacabca"


class Follower:
    """A durable subscriber; ``came`` has each message once, ``repeated`` those of QoS 2 that came as new ones again."""

    def __init__(self, qos: int, window: int) -> None:
        self.qos = qos
        self.values = {Property.RECEIVE_MAXIMUM: window}
        self.came: list[bytes] = []
        self.repeated: list[bytes] = []
        self._ids: set[int] = set()  # of QoS 2, without PUBREL

    async def connect(self, mqtt: MqttBroker, *, present: bool = True) -> MqttClient:
        return await mqtt.connect("me", clean=not present, expiry_s=1000, present=present, values=self.values)

    async def take(self, talk: MqttClient, last: bytes, new_max: int) -> None:
        """Take messages until *last* or the *new_max*-th new one, which is not acknowledged."""
        while True:
            packet = await talk.receive()
            if isinstance(packet, Ack):
                assert packet.kind is PacketType.PUBREL
                self._ids.discard(packet.packet_id)
                await talk.send(Ack(PacketType.PUBCOMP, packet.packet_id))
                continue
            assert isinstance(packet, Publish)
            assert packet.qos == self.qos
            if packet.payload not in self.came:
                self.came.append(packet.payload)
                new_max -= 1
            elif packet.packet_id not in self._ids:
                self.repeated.append(packet.payload)
            self._ids.add(packet.packet_id)
            if not new_max or packet.payload == last:
                return
            await talk.send(Ack(PacketType.PUBACK if self.qos == 1 else PacketType.PUBREC, packet.packet_id))


async def publish_all(mqtt: MqttBroker, qos: int) -> list[bytes]:
    """Publish messages with names of all topics in one write, and return their payloads."""
    talk = await mqtt.connect("publisher")
    packets = [Publish(f"{name}/x", b"%d" % at, qos, packet_id=at + 1) for at, name in enumerate(ORDER)]
    await talk.send(*packets)
    for _ in packets:
        await talk.expect(Ack)
    return [packet.payload for packet in packets]


@pytest.mark.parametrize("is_killed", [False, True], ids=["reconnect", "kill"])
@pytest.mark.parametrize("window", [1, 2, 65_535])
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("topics", [1, 2, 3])
async def test_an_interrupted_session_gets_all_topics_in_log_order_and_loses_nothing(
    topics: int, qos: int, window: int, is_killed: bool
) -> None:
    disk, follower = FakeDisk(), Follower(qos, window)
    store = small_config(flush="async", segment_bytes=1 << 20, page_bytes=1 << 16)
    config, sent = MqttConfig(rules=RULES[: topics - 1], queues=1), list[bytes]()
    while len(follower.came) < len(ORDER):
        async with mqtt_broker(DATA, config, store=store, disk=disk) as mqtt:
            while len(follower.came) < len(ORDER):
                talk = await follower.connect(mqtt, present=bool(sent))
                if not sent:
                    await talk.subscribe("#", qos=qos)
                    sent = await publish_all(mqtt, qos)
                await follower.take(talk, sent[-1], 3)
                await mqtt.settle()
                if is_killed:
                    disk = disk.after_power_cut(Cut.KILLED, Random(1))
                    break
                talk.hang_up()
    async with mqtt_broker(DATA, config, store=store, disk=disk) as mqtt:
        talk = await follower.connect(mqtt)
        await (await mqtt.connect("publisher")).publish("a/x", b"end", 2)
        await follower.take(talk, b"end", 2)
    assert follower.came == [*sent, b"end"]
    if qos == 2:
        assert follower.repeated == []


def log_order(mqtt: MqttBroker) -> list[bytes]:
    """Return the bodies of all messages by their position in the log."""
    store, found = mqtt.broker.store, list[tuple[int, bytes]]()
    for topic in mqtt.context.feed.topics:
        for queue in mqtt.broker.topics.ensure(topic, 1).queues.values():
            result = store.readers.read_near(queue, 0, 1000, 1 << 20)
            assert result is not None
            for piece in result.pieces:
                found += [(record.position, bytes(record.body)) for record in record_views(bytes(piece))]
    return [body for _, body in sorted(found)]


@pytest.mark.parametrize(
    ("last", "received"), [(["gone/#=bees"], [b"1", b"end"]), ([], [b"end"])], ids=["kept", "removed"]
)
async def test_a_rule_for_no_name_keeps_the_topic_of_a_former_rule_readable(
    tmp_path: Path, last: list[str], received: list[bytes]
) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(rules=["b/#=bees"])) as mqtt:
        talk = await mqtt.connect("me", clean=True, expiry_s=1000)
        await talk.subscribe("#", qos=1)
        talk.hang_up()
        await (await mqtt.connect("publisher")).publish("b/x", b"1", 1)
    async with mqtt_broker(tmp_path, MqttConfig(rules=last)) as mqtt:
        talk = await mqtt.connect("me", clean=False, expiry_s=1000, present=True)
        await (await mqtt.connect("publisher")).publish("b/x", b"end", 1)
        assert [message.payload for message in await talk.messages(len(received))] == received


async def test_messages_of_all_rules_come_in_log_order_whoever_published_them(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(rules=RULES)) as mqtt:
        everything, some = await mqtt.connect("everything"), await mqtt.connect("some")
        await everything.subscribe("#", qos=1)
        await some.subscribe("+/1", "c/2", qos=0)
        publishers = [await mqtt.connect(f"publisher {number}") for number in range(3)]
        names = [f"{topic}/{number}" for topic in "abc" for number in (1, 2)]
        chance, sent = Random(1), 0
        for _ in range(20):
            for talk in publishers:
                packets = [Publish(chance.choice(names), b"%d" % (sent + each)) for each in range(5)]
                await talk.send(*packets)
                sent += len(packets)
            name = chance.choice(names)
            topic = mqtt.context.names.find(name).topic
            mqtt.broker.publish(Message(topic, b"%d" % sent, f"TAGS\x01{name}\x02".encode(), 0))
            sent += 1
        came = await everything.messages(sent)
        order = log_order(mqtt)
        assert [packet.payload for packet in came] == order
        wanted = {packet.payload for packet in came if packet.topic.endswith("/1") or packet.topic == "c/2"}
        assert await some.payloads(len(wanted)) == [payload for payload in order if payload in wanted]


@pytest.mark.parametrize("fails", [1, 2])
async def test_a_session_continues_where_its_delivery_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    """Messages that could not be noted as in flight are not passed over when the client leaves because of that."""
    note, notes = SessionJournalWriter.note, 0

    def refusing(writer: SessionJournalWriter, state: SessionState, kind: int, *arguments: Any) -> None:
        nonlocal notes
        notes += kind == SENT
        if kind == SENT and notes == fails:
            raise Refused(Reason.UNAVAILABLE, "the disk is full")
        note(writer, state, kind, *arguments)

    async with mqtt_broker(tmp_path, MqttConfig(rules=RULES)) as mqtt:
        talk = await mqtt.connect("me", expiry_s=1000)
        await talk.subscribe("a/#", qos=1, identifier=1)
        await talk.subscribe("b/#", qos=1, identifier=2)
        monkeypatch.setattr(SessionJournalWriter, "note", refusing)
        publisher = await mqtt.connect("publisher")
        await publisher.send(*[Publish(f"{name}/x", name.encode(), 1, packet_id=9) for name in "aba"])
        assert isinstance(await talk.closed(), Disconnect)
        talk = await mqtt.connect("me", clean=False, expiry_s=1000, present=True)
        assert await talk.payloads(3) == [b"a", b"b", b"a"]


LEVEL = st.sampled_from(["a", "b", "", "+"])
FILTER = st.builds(
    lambda first, rest, last: "/".join([first, *rest, *last]),
    st.sampled_from(["a", "b", "", "+", "$s"]),
    st.lists(LEVEL, max_size=2),
    st.sampled_from([[], ["#"]]),
).filter(bool) | st.just("#")
NAMES = ["/".join(levels) for count in (1, 2, 3, 4) for levels in product(["a", "b", ""], repeat=count)]
NAMES += [f"$s/{name}" for name in NAMES[:30]] + ["$s"]


@given(st.lists(FILTER, max_size=3), FILTER)
def test_the_topics_of_a_filter_are_those_of_all_names_that_it_matches(rules: list[str], topic_filter: str) -> None:
    made = TopicRules([f"{each}=t{number}" for number, each in enumerate(rules)], "mqtt", 8)
    routes: RouteCache[None] = RouteCache()
    routes.add(topic_filter, None)
    topics = {made.topic_of(name) for name in NAMES if routes.match(name)}
    assert topics <= set(made.topics_of(topic_filter))
    for name in NAMES[:20]:
        assert made.topics_of(name) == [made.topic_of(name)]


@pytest.mark.parametrize(
    ("topic_filter", "topics"),
    [
        ("home/#", ["mqtt"]),
        ("b/#", ["bees"]),
        ("b/x/+", ["bees"]),
        ("+/x", ["bees", "cats", "mqtt"]),
        ("#", ["bees", "cats", "mqtt"]),
        ("c", ["cats"]),
        ("$SYS/#", ["mqtt"]),
    ],
)
def test_a_filter_needs_no_other_topics(topic_filter: str, topics: list[str]) -> None:
    assert TopicRules(RULES, "mqtt", 8).topics_of(topic_filter) == topics


async def test_a_filter_needs_permission_only_where_its_names_are(tmp_path: Path) -> None:
    options: dict[str, Any] = {"config": MqttConfig(rules=RULES)}
    ann, bob = "publish *; read mqtt/#; read $share*", "read bees/b/#; read $share*"
    denied = ReasonCode.NOT_AUTHORIZED
    async with closed_broker(tmp_path, options=options, ann=ann, bob=bob) as (mqtt, _):
        a, b = [await mqtt.connect(user, user_name=user, password=user.encode()) for user in ("ann", "bob")]
        filters = ("home/#", "b/x", "#", "$share/g/home/+", "$share/g/b/#")
        assert await a.subscribe(*filters, qos=1) == (1, denied, denied, 1, denied)
        assert await b.subscribe(*filters, qos=1) == (denied, 1, denied, denied, 1)
        for number, name in enumerate(("home/x", "b/x")):
            await a.publish(name, name.encode(), 1, packet_id=number + 1)
        assert await a.payloads(2) == [b"home/x"] * 2
        assert await b.payloads(2) == [b"b/x"] * 2


async def test_a_rule_says_how_many_queues_its_topic_gets_also_when_it_is_created_again(tmp_path: Path) -> None:
    config = MqttConfig(rules=["b/#=bees:3", "d/b/#=bees:3", "c/#=cats"], queues=5)
    async with mqtt_broker(tmp_path, config) as mqtt:
        topics = mqtt.broker.topics

        def counts() -> list[int]:
            found = [topics.get(name) for name in ("bees", "cats", "mqtt")]
            return [each.write_queues if each is not None else 0 for each in found]

        assert counts() == [3, 5, 5]
        topics.delete("bees")
        assert counts() == [0, 5, 5]
        talk = await mqtt.connect("me")
        await talk.send(Publish("b/1", b"again", 1, packet_id=1))
        await talk.receive()
        assert counts() == [3, 5, 5]


@pytest.mark.parametrize("queues", ["", "0", "1025", "-1", "x", "1 ", "²", "9" * 5000])
def test_a_rule_with_a_wrong_number_of_queues_is_refused(queues: str) -> None:
    with pytest.raises(ConfigError, match="number of queues is not 1 to 1024; write FILTER=TOPIC, FILTER=TOPIC:QUE"):
        TopicRules([f"b/#=bees:{queues}"], "mqtt", 8)


def test_rules_that_disagree_about_the_queues_of_a_topic_are_refused() -> None:
    with pytest.raises(ConfigError, match="another rule creates 'bees' with other queues"):
        TopicRules(["b/#=bees:3", "c/#=bees:4"], "mqtt", 8)
