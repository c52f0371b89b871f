"""Light topics above the store: what the topic table, subscriptions, shared groups and a restart make of them."""

import logging
from typing import Any

import orjson
import pytest
import trio
from tests.delivery.pushing import LINES, broker_in_memory, publish, subscribe, told
from trio.testing import MockClock

from martlet.broker import Broker
from martlet.contracts import Router
from martlet.delivery.subscriptions import from_earliest
from martlet.errors import Reason, Refused
from martlet.groups.membership import Membership
from martlet.groups.strategy.policy import GroupPolicy
from martlet.message import Message
from martlet.store.format.light import light_topics
from martlet.tables.rocketmq_json import parse
from martlet.tables.topics import READ
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import RecordingPeer
from martlet.testing.stores import HOST, drain

A = b"INNER_MULTI_DISPATCH\x01%LMQ%a\x02"
AB = b"INNER_MULTI_DISPATCH\x01%LMQ%a,%LMQ%b\x02"


def with_routers(broker: Broker) -> Broker:
    broker.set_stages((), (("test", Router(lambda message: light_topics(message.properties))),))
    broker.topics.ensure("t", 3)
    return broker


async def test_a_light_topic_is_there_while_the_store_has_its_queue() -> None:
    async with broker_in_memory() as made:
        broker = with_routers(made)
        before = len(broker.topics)
        assert broker.topics.get("%LMQ%a") is None
        assert not broker.topics.has_queue("%LMQ%a", 0)
        publish(broker, "t", 1, b"x", properties=A)
        topic = broker.topics.get("%LMQ%a")
        assert topic is not None
        assert (topic.read_queues, topic.perm) == (1, READ)
        assert topic.queue(0) is broker.store.queues.find("%LMQ%a", 0)
        assert (broker.topics.has_queue("%LMQ%a", 0), broker.topics.has_queue("%LMQ%a", 1)) == (True, False)
        assert (len(broker.topics), [each.name for each in broker.topics if "LMQ" in each.name]) == (before, [])
        with pytest.raises(Refused, match="is not writable"):
            broker.publish(Message("%LMQ%a", b"x"))
        assert broker.topics.delete("%LMQ%a")
        assert broker.topics.get("%LMQ%a") is None
        assert not broker.topics.delete("%LMQ%a")


async def test_the_first_reader_of_a_light_topic_creates_it_if_light_queues_are_on() -> None:
    async with broker_in_memory(light_queues_max=2) as broker:
        assert broker.topics.open("%LMQ%a") is None
        with pytest.raises(Refused, match="light queues are off") as caught:
            broker.topics.ensure("%LMQ%a", 8)
        assert caught.value.reason is Reason.NO_TOPIC
        with_routers(broker)
        for topic in (broker.topics.open("%LMQ%a"), broker.topics.ensure("%LMQ%b", 8), broker.topics.open("%LMQ%a")):
            assert topic is not None
            assert topic.read_queues == 1
        with pytest.raises(Refused, match="there are 2 light queues"):
            broker.topics.open("%LMQ%c")
        with pytest.raises(Refused, match=r"topic\[%LMQ%c\] is a light topic, which nobody creates"):
            broker.topics.update("%LMQ%c", 1, 1)


async def test_a_subscription_of_a_light_topic_gets_what_becomes_readable() -> None:
    async with broker_in_memory() as made:
        broker = with_routers(made)
        publish(broker, "t", 2, b"before", properties=A)
        mine = subscribe(broker, "%LMQ%a", start=from_earliest)
        parent = subscribe(broker, "t", start=from_earliest)
        await mine.drain()
        publish(broker, "t", 0, b"1", properties=AB)
        publish(broker, "t", 1, b"2")
        publish(broker, "t", 1, b"3", properties=A)
        await mine.drain()
        await parent.drain()
        assert mine.got == ["0:0:before", "0:1:1", "0:2:3"]
        assert sorted(parent.got) == ["0:0:1", "1:0:2", "1:1:3", "2:0:before"]
        broker.topics.delete("%LMQ%a")
        assert broker.tails._readers.keys() == {(("t",), False)}
        publish(broker, "t", 0, b"4", properties=A)
        assert await mine.drain() == []


async def test_members_of_a_shared_group_compete_for_a_light_topic(autojump_clock: MockClock) -> None:
    async with broker_in_memory() as made:
        broker = with_routers(made)
        publish(broker, "t", 2, *(b"%d" % n for n in range(4)), properties=A)
        first, second = (
            broker.shared_groups.join(
                RecordingPeer(), "%LMQ%a", "G", LINES, Membership(lease_s=30, credit=2, start=from_earliest)
            )
            for _ in range(2)
        )
        assert told(first.collect(1 << 20)) == ["0:0:0", "0:1:1"]
        assert told(second.collect(1 << 20)) == ["0:2:2", "0:3:3"]
        second.leave()
        first.add_credit(2)
        assert told(first.collect(1 << 20)) == ["0:2:2", "0:3:3"]


async def test_a_cursor_gets_a_record_once_for_each_topic_that_it_follows() -> None:
    async with broker_in_memory() as made:
        broker = with_routers(made)
        tagged = b"TAGS\x01n\x02"
        for number in range(20):
            publish(broker, "t", number % 3, b"%d" % number, properties=tagged + (A if number % 4 == 0 else b""))
        feeds = [broker.cursors.open(["%LMQ%a"]), broker.cursors.open(["t", "%LMQ%a"])]
        cursors = [feed.open(lambda: None, {"n": None}, 0) for feed in feeds]
        await trio.testing.wait_all_tasks_blocked()
        publish(broker, "t", 1, b"20", properties=tagged + A)
        await trio.testing.wait_all_tasks_blocked()
        light, both = ([r for run, _ in each.collect(1 << 20) for r in run.records()] for each in cursors)
        assert [(r.body, r.queue_id, r.queue_offset) for r in light] == [(b"%d" % (4 * n), 0, n) for n in range(6)]
        assert [r.body for r in both] == [b"%d" % n for n in range(21) for _ in range(1 + (n % 4 == 0))]


async def test_acknowledgements_of_a_light_topic_outlive_a_restart() -> None:
    disk = FakeDisk()
    disk.cached = True  # what a broker has just written is in the page cache
    membership, policy = Membership(lease_s=30, credit=9, start=from_earliest), GroupPolicy("tested")
    async with broker_in_memory(disk) as made:
        broker = with_routers(made)
        publish(broker, "t", 2, b"parent")
        publish(broker, "t", 2, *(b"%d" % n for n in range(4)), properties=A)
        member = broker.shared_groups.join(RecordingPeer(), "%LMQ%a", "G", LINES, membership, policy)
        assert len(told(member.collect(1 << 20))) == 4
        assert [member.ack(0, offset) for offset in (0, 2)] == [True, True]
        broker.store.committer.commit()
        member.leave()
    for path in [path for path in disk.files if "/consumequeue/" in path]:
        disk.unlink(path)
    async with broker_in_memory(disk) as broker:
        member = broker.shared_groups.join(RecordingPeer(), "%LMQ%a", "G", LINES, membership, policy)
        assert sorted(told(member.collect(1 << 20))) == ["0:1:1", "0:3:3"]


async def test_light_topics_outlive_a_restart_without_an_entry_in_the_table(caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as made:
        broker = with_routers(made)
        publish(broker, "t", 1, b"x", properties=AB)
        broker.groups.ensure("G")
        broker.groups.offsets.commit("G", "%LMQ%a", 0, 1)
    with caplog.at_level(logging.WARNING):
        async with broker_in_memory(disk) as broker:
            assert broker.topics.get("%LMQ%a") is not None
            assert broker.topics.ensure("%LMQ%a", 1).queue(0).next_offset == 1, "with light queues off, too"
            assert broker.groups.offsets.get("G", "%LMQ%a", 0) == 1
            assert b"LMQ" not in disk.files["/data/config/topics.json"].data
            mine = subscribe(broker, "%LMQ%b", start=from_earliest)
            await mine.drain()
            assert mine.got == ["0:0:x"]
    assert caplog.text == ""


async def test_a_queue_of_a_light_topic_that_only_somebody_else_writes_stops_no_start() -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as made:
        made.store.writer.append(Message("%LMQ%a", b"x"), 3)
        made.store.committer.commit()
    async with broker_in_memory(disk) as broker:
        topic = broker.topics.get("%LMQ%a")
        assert topic is not None
        assert (topic.read_queues, topic.queue(0).next_offset) == (1, 0)
        assert broker.topics.delete("%LMQ%a")
        assert broker.topics.get("%LMQ%a") is None


# ---- offsets of consumers, in the table that RocketMQ has while its light queues are on

OFFSETS, LIGHT_OFFSETS = "/data/config/consumerOffset.json", "/data/config/lmqConsumerOffset.json"


def table_of(disk: FakeDisk, path: str) -> dict[str, Any]:
    return parse(bytes(disk.files[path].data), path)


def rewrite(disk: FakeDisk, path: str, table: dict[str, Any]) -> None:
    """Rewrite the file as RocketMQ does: without our log position."""
    disk.files[path].data[:] = orjson.dumps(table)


async def with_offsets(disk: FakeDisk, *, light: bool) -> None:
    async with broker_in_memory(disk) as broker:
        if light:
            with_routers(broker)
        broker.topics.ensure("t", 3)
        publish(broker, "t", 0, b"x")
        for group, topic, queue_id, offset in (("G", "t", 2, 7), ("G", "%LMQ%a", 0, 3), ("%LMQ%c", "%LMQ%a", 0, 5)):
            broker.groups.offsets.commit(group, topic, queue_id, offset)


async def test_offsets_go_into_rocketmqs_table_for_light_queues_where_they_are_on() -> None:
    disk = FakeDisk()
    await with_offsets(disk, light=True)
    table = table_of(disk, LIGHT_OFFSETS)
    assert table["offsetTable"] == {"t@G": {"2": 7}, "%LMQ%a@G": {"0": 3}}
    assert table["lmqOffsetTable"] == {"%LMQ%a@%LMQ%c": 5}
    assert table["martletPosition"] == table_of(disk, OFFSETS)["martletPosition"]
    assert table_of(disk, OFFSETS)["offsetTable"]["%LMQ%a@%LMQ%c"] == {"0": 5}
    disk = FakeDisk()
    await with_offsets(disk, light=False)
    assert LIGHT_OFFSETS not in disk.files


async def test_offsets_of_a_light_topic_with_an_at_sign_in_its_name_are_found_again() -> None:
    disk, name = FakeDisk(), "%LMQ%P2P@@@device"
    async with broker_in_memory(disk) as made:
        broker = with_routers(made)
        for _ in range(8):
            publish(broker, "t", 0, b"x", properties=A.replace(b"%LMQ%a", name.encode()))
        broker.groups.offsets.commit("G", name, 0, 1)
    async with broker_in_memory(disk) as broker:
        assert broker.groups.offsets.get("G", name, 0) == 1
    rewrite(disk, LIGHT_OFFSETS, {"offsetTable": {f"{name}@G": {"0": 7}}, "lmqOffsetTable": {f"{name}@%LMQ%c": 8}})
    async with broker_in_memory(disk) as broker:
        assert (broker.groups.offsets.get("G", name, 0), broker.groups.offsets.get("%LMQ%c", name, 0)) == (7, 8)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("Martlet", 7),
        ("RocketMQ with light queues", 20),
        ("RocketMQ without light queues", 30),
        ("RocketMQ only, of both kinds", 30),
    ],
)
async def test_offsets_are_taken_from_the_table_that_was_written_last(last: str, expected: int) -> None:
    disk = FakeDisk()
    await with_offsets(disk, light=True)
    if last in ("RocketMQ with light queues", "RocketMQ only, of both kinds"):
        rewrite(disk, LIGHT_OFFSETS, {"offsetTable": {"t@G": {"2": 20}}, "lmqOffsetTable": {"%LMQ%a@%LMQ%c": 20}})
    if last in ("RocketMQ without light queues", "RocketMQ only, of both kinds"):
        rewrite(disk, OFFSETS, {"offsetTable": {"t@G": {"2": 30}, "%LMQ%a@%LMQ%c": {"0": 30}}})
    for _ in range(2):
        async with broker_in_memory(disk) as broker:
            groups = broker.groups
            assert groups.offsets.get("G", "t", 2) == expected
            assert groups.offsets.get("%LMQ%c", "%LMQ%a", 0) == (5 if last == "Martlet" else expected)
            assert 0 < groups.offsets.position <= broker.store.readable
        for path in (OFFSETS, LIGHT_OFFSETS):
            assert table_of(disk, path)["offsetTable"]["t@G"] == {"2": expected}, "both are kept, also without routers"
            assert "martletPosition" in table_of(disk, path)


async def test_a_table_for_light_queues_that_is_older_than_the_other_does_not_count() -> None:
    disk = FakeDisk()
    await with_offsets(disk, light=True)
    older = {**table_of(disk, LIGHT_OFFSETS), "offsetTable": {"t@G": {"2": 1}}}
    rewrite(disk, LIGHT_OFFSETS, older)  # as if the process was killed between the two
    async with broker_in_memory(disk) as broker:
        assert broker.groups.offsets.get("G", "t", 2) == 7


@pytest.mark.parametrize("content", [b"", b"[]", b'{"offsetTable": 7}', b'{"lmqOffsetTable": {"a@g": "x"}}'])
async def test_a_table_for_light_queues_that_cannot_be_read_changes_nothing(content: bytes) -> None:
    disk = FakeDisk()
    await with_offsets(disk, light=False)
    disk.close(disk.open(LIGHT_OFFSETS, create=True))
    disk.files[LIGHT_OFFSETS].data[:] = content
    async with broker_in_memory(disk) as broker:
        assert broker.groups.offsets.get("G", "t", 2) == 7


async def test_messages_that_no_router_wants_stay_in_runs_beside_those_in_light_queues() -> None:
    async with broker_in_memory() as broker:
        asked: list[bytes] = []

        def by_device(message: Message) -> list[str]:
            asked.append(message.body)
            return [f"%LMQ%{message.property('DEVICE')}"]

        broker.set_stages((), (("test", Router(by_device, ("DEVICE",))),))
        broker.topics.ensure("t", 1)
        assert not broker.stages.every_message
        queue = broker.find_queue("t", 0)
        assert queue is not None
        plain = (queue, b"plain", b"TAGS\x01x\x02", 0, 0, 0, 0, HOST, 0, 0)
        routed = Message("t", b"routed", b"DEVICE\x01d\x02", queue_id=0, born_host=HOST)
        named = Message("t", b"named", A, queue_id=0, born_host=HOST)
        result = broker.publish_all([plain, routed, plain, named, plain])
        broker.store.committer.commit()
        assert (asked, result.refused) == ([b"routed"], {})
        assert drain(broker.store, queue, max_messages=9) == [b"plain", b"routed", b"plain", b"named", b"plain"]
        assert drain(broker.store, broker.store.queue("%LMQ%d", 0)) == [b"routed"]
        assert broker.store.queues.light == 1, "what no router says does not count"


async def test_a_router_that_wants_every_message_keeps_all_out_of_runs() -> None:
    async with broker_in_memory() as broker:
        broker.set_stages((), (("one", Router(lambda message: (), ("DEVICE",))), ("two", Router(lambda message: ()))))
        broker.topics.ensure("t", 1)
        assert broker.stages.every_message
        assert broker.find_queue("t", 0) is None


@pytest.mark.parametrize("char", ["\n", "\0", "\x1b", "\x7f", "\x85", "\u2028"])
async def test_control_characters_are_refused_in_names(char: str) -> None:
    async with broker_in_memory() as broker:
        broker.store.writer.light_queues = True
        name = f"%LMQ%a{char}b"
        with pytest.raises(Refused, match="has a control character"):
            light_topics(f"INNER_MULTI_DISPATCH\x01{name}\x02".encode())
        with pytest.raises(Refused, match="has a control character"):
            broker.topics.open(name)
        assert broker.store.queues.find(name, 0) is None
        assert broker.topics.open("%LMQ%a b\u00e4") is not None
