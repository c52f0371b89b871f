"""The broker's promises: what may be stored and where, stages, opinions, capabilities, and tables that survive."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from martlet.broker import Broker
from martlet.contracts import Identity, Stage
from martlet.errors import MartletError, Reason, Refused
from martlet.message import Message
from martlet.settings import BrokerConfig
from martlet.tables.groups import Group
from martlet.tables.topics import READ, WRITE
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import serving
from martlet.testing.stores import ManualClock, placed_of, small_config

DATA = Path("/data")
Brokers = Callable[..., AbstractAsyncContextManager[Broker]]


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


@pytest.fixture
def broker_on(disk: FakeDisk) -> Brokers:
    """A running broker on the disk; a second one on the same disk is a restart."""

    @asynccontextmanager
    async def run(**config: Any) -> AsyncIterator[Broker]:
        settings = BrokerConfig(**config)
        async with serving(DATA, store=small_config(), broker=settings, clock=ManualClock(), disk=disk) as made:
            yield made.broker

    return run


def to(topic: str, body: bytes = b"x", queue_id: int = 0, properties: bytes = b"") -> Message:
    return Message(topic, body, properties, queue_id)


async def test_a_message_goes_where_it_says(broker_on: Brokers) -> None:
    async with broker_on() as broker:
        broker.topics.update("T", 4, 4)
        first, second = broker.publish(to("T", queue_id=2)), broker.publish(to("T", queue_id=2))
        assert (first.queue_id, first.queue_offset, second.queue_offset) == (2, 0, 1)


async def test_without_a_wish_every_queue_gets_some(broker_on: Brokers) -> None:
    async with broker_on() as broker:
        broker.topics.update("T", 4, 4)
        assert {broker.publish(to("T", queue_id=-1)).queue_id for _ in range(200)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("sent", "reason", "text"),
    [
        (to("None"), Reason.NO_TOPIC, r"topic\[None\] not exist"),
        (to("ReadOnly"), Reason.NO_PERMISSION, r"perm is 4"),
        (to("NoQueues"), Reason.NO_PERMISSION, r"0 write queues"),
        (to("T", queue_id=4), Reason.PARAMETER, r"queue 4 of topic\[T\] does not exist"),
        (to("T", b"x" * 1001), Reason.ILLEGAL, r"1001 bytes; broker.message_bytes_max is 1000"),
        (to("T", properties=b"k\x01" + b"v" * 32767), Reason.ILLEGAL, r"32769 bytes"),
    ],
)
async def test_topics_and_messages_that_are_not_allowed_are_refused_with_the_reason(
    broker_on: Brokers, sent: Message, reason: Reason, text: str
) -> None:
    async with broker_on(message_bytes_max=1000) as broker:
        broker.topics.update("T", 4, 4)
        broker.topics.update("ReadOnly", 4, 4, READ)
        broker.topics.update("NoQueues", 4, 0)
        before = broker.store.appended
        with pytest.raises(Refused, match=text) as one:
            broker.publish(sent)
        with pytest.raises(Refused, match=text) as batch:
            broker.publish_all([to(sent.topic, queue_id=sent.queue_id), sent], atomic=True)
        assert one.value.reason is batch.value.reason is reason
        assert broker.store.appended == before, "of the batch nothing was stored either"


async def test_messages_of_a_batch_follow_each_other_in_one_queue(broker_on: Brokers) -> None:
    async with broker_on() as broker:
        broker.topics.update("T", 4, 4)
        broker.publish(to("T", queue_id=3))
        placed = placed_of(broker.publish_all([to("T", b"%d" % i, 3) for i in range(5)], atomic=True))
        assert [(p.queue_id, p.queue_offset) for p in placed] == [(3, offset) for offset in range(1, 6)]
        assert broker.publish_all([], atomic=True).outcomes() == []


async def test_many_are_stored_each_on_its_own(broker_on: Brokers) -> None:
    async with broker_on() as broker:
        broker.topics.update("T", 1, 1)
        good, bad, last = broker.publish_all([to("T"), to("None"), to("T")]).outcomes()
        assert isinstance(bad, Refused)
        assert not isinstance(good, Refused)
        assert not isinstance(last, Refused)
        assert (good.queue_offset, last.queue_offset) == (0, 1)


async def test_stages_see_every_message_and_may_refuse_or_fail(broker_on: Brokers) -> None:
    def stamp(message: Message) -> Message:
        return Message(message.topic, message.body + b"!", message.properties, message.queue_id)

    def judge(message: Message) -> Message:
        if message.body == b"bad!":
            raise Refused(Reason.ILLEGAL, "bad words")
        if message.body == b"odd!":
            raise ZeroDivisionError("in a stage")
        return message

    async with broker_on() as broker:
        broker.topics.update("T", 1, 1)
        broker.set_stages([("stamper", Stage(stamp)), ("judge", Stage(judge))])
        placed = broker.publish(to("T", b"good"))
        with pytest.raises(Refused, match="bad words"):
            broker.publish(to("T", b"bad"))
        with pytest.raises(Refused, match="plugin 'judge' failed in its stage; ZeroDivisionError") as failed:
            broker.publish_all([to("T", b"fine"), to("T", b"odd")], atomic=True)
        assert failed.value.reason is Reason.UNAVAILABLE
        assert broker.statistics()["refused_by_stages"] == 2
        assert broker.store.appended == placed.end
        broker.store.committer.commit()
        await broker.store.flusher.wait_flushed(placed.end)
        data = broker.store.lookup.record_at(placed.position)
        assert data is not None
        assert b"good!" in data


async def test_the_first_opinion_rules_and_without_one_nothing_is_allowed(broker_on: Brokers) -> None:
    async with broker_on() as broker:
        ann, bob = broker.gate(Identity("ann")), broker.gate(Identity("bob"))
        assert ann.allows("publish", "T")
        broker.authorizers = (
            lambda who, action, topic: True if who.name == "ann" else None,
            lambda who, action, topic: False if action == "publish" else None,
        )
        assert ann.allows("publish", "T")
        assert not bob.allows("publish", "T")
        assert not bob.allows("subscribe", "T")


async def test_a_capability_of_another_type_is_an_error(broker_on: Brokers) -> None:
    async with broker_on() as broker:
        assert broker.capability(ManualClock) is None
        clock = ManualClock()
        broker.capabilities[ManualClock] = clock
        assert broker.capability(ManualClock) is clock
        broker.capabilities[ManualClock] = "no clock"
        with pytest.raises(MartletError, match="the plugin must offer a"):
            broker.capability(ManualClock)


# tables beside the log


def content(disk: FakeDisk, name: str) -> bytes:
    return bytes(disk.files[f"{DATA}/config/{name}"].data)


def spoil(disk: FakeDisk, name: str, data: bytes) -> None:
    disk.files[f"{DATA}/config/{name}"].data[:] = data


async def test_topics_groups_and_offsets_outlive_a_restart(broker_on: Brokers) -> None:
    async with broker_on() as broker:
        broker.topics.update("T", 4, 2, attributes={"a": "b"})
        broker.groups.update(Group("G", retry_max_times=3))
        broker.groups.offsets.commit("G", "T", 1, 7)
    async with broker_on() as broker:
        topic = broker.topics.get("T")
        assert topic is not None
        assert (topic.read_queues, topic.write_queues, topic.attributes) == (4, 2, {"a": "b"})
        assert broker.groups.get("G") == Group("G", retry_max_times=3)
        assert broker.groups.offsets.get("G", "T", 1) == 7


@pytest.mark.parametrize(
    "spoiled", [b"", b"{", b"{}", b"\x00" * 50, b'{"topicConfigTable":[]}x', b'{"topicConfigTable":{"A":5}}']
)
async def test_a_broken_table_gives_way_to_its_copy(
    broker_on: Brokers, disk: FakeDisk, spoiled: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with broker_on() as broker:
        broker.topics.update("Old", 4, 4)
    async with broker_on() as broker:
        broker.topics.update("New", 4, 4)
    assert "New" in json.loads(content(disk, "topics.json"))["topicConfigTable"]
    spoil(disk, "topics.json", spoiled)
    async with broker_on() as broker:
        assert broker.topics.get("Old") is not None
        assert broker.topics.get("New") is not None
        assert broker.topics.get("A") is None
    assert "topics.json" in caplog.text


@pytest.mark.parametrize("restarts", [0, 1])
async def test_a_deleted_topic_does_not_come_back_with_the_previous_generation(
    broker_on: Brokers, disk: FakeDisk, restarts: int
) -> None:
    async with broker_on() as broker:
        for name in ("Stay", "Gone"):
            broker.topics.update(name, 1, 1)
        broker.publish(to("Gone"))
    async with broker_on() as broker:
        assert broker.topics.delete("Gone")
    for _ in range(restarts):
        async with broker_on():
            pass
    spoil(disk, "topics.json", b"")
    async with broker_on() as broker:
        assert perms(broker, "Stay", "Gone") == [READ | WRITE, -1]


@pytest.mark.parametrize("spoiled", [b"{", b'{"subscriptionGroupTable":{"G":{"retryMaxTimes":"x"}}}'])
async def test_a_broken_table_of_groups_does_not_prevent_a_start(
    broker_on: Brokers, disk: FakeDisk, spoiled: bytes
) -> None:
    async with broker_on() as broker:
        broker.groups.update(Group("G"))
    for name in ("subscriptionGroup.json", "subscriptionGroup.json.bak"):
        if f"{DATA}/config/{name}" in disk.files:
            spoil(disk, name, spoiled)
    async with broker_on() as broker:
        assert broker.groups.get("G") is None
        assert broker.groups.get("TOOLS_CONSUMER") is not None


def forget_martlet(disk: FakeDisk) -> None:
    """Leave what RocketMQ would have written."""
    for path in [path for path in disk.files if path.startswith(f"{DATA}/queues.")]:
        disk.unlink(path)
    file = disk.files[f"{DATA}/checkpoint"]
    file.data[40:] = bytes(len(file.data) - 40)


def lose_queues(disk: FakeDisk, *topics: str) -> None:
    for topic in topics:
        for path in [path for path in disk.files if path.startswith(f"{DATA}/consumequeue/{topic}/")]:
            disk.unlink(path)
        disk.remove_directory(f"{DATA}/consumequeue/{topic}/0")
        disk.remove_directory(f"{DATA}/consumequeue/{topic}")


async def store_of_rocketmq(broker_on: Brokers, disk: FakeDisk, listed: tuple[str, ...], lost: tuple[str, ...]) -> None:
    """Leave topics T, Other and %RETRY%G as RocketMQ would: only *listed* are in topics.json, *lost* have no queues."""
    topics = ("T", "Other", "%RETRY%G")
    async with broker_on() as broker:
        for topic in topics:
            broker.topics.update(topic, 1, 1)
            broker.publish(to(topic))
    forget_martlet(disk)
    lose_queues(disk, *lost)
    table = json.loads(content(disk, "topics.json"))
    for topic in set(topics) - set(listed):
        del table["topicConfigTable"][topic]
    spoil(disk, "topics.json", json.dumps(table).encode())


async def test_a_topic_that_rocketmq_deleted_is_closed_and_keeps_its_messages_until_it_is_opened(
    broker_on: Brokers, disk: FakeDisk, caplog: pytest.LogCaptureFixture
) -> None:
    await store_of_rocketmq(broker_on, disk, listed=("Other", "%RETRY%G"), lost=("T", "%RETRY%G"))
    for _ in range(2):
        async with broker_on() as broker:
            assert perms(broker, "T", "Other", "%RETRY%G") == [0, READ | WRITE, READ | WRITE]
            with pytest.raises(Refused, match="not writable"):
                broker.publish(to("T"))
    assert caplog.text.count("topic T has records but neither queues nor an entry in config/topics.json") == 1
    async with broker_on() as broker:
        opened = broker.topics.update("T", 1, 1)
        assert broker.store.readers.end_offset(opened.queue(0)) == 1
        assert broker.publish(to("T")).queue_offset == 1


async def test_a_listed_topic_that_lost_its_queues_is_open(broker_on: Brokers, disk: FakeDisk) -> None:
    await store_of_rocketmq(broker_on, disk, listed=("T", "Other", "%RETRY%G"), lost=("T",))
    async with broker_on() as broker:
        assert perms(broker, "T") == [READ | WRITE]
        assert broker.publish(to("T")).queue_offset == 1


async def test_an_old_table_of_topics_hides_no_message_for_good(broker_on: Brokers, disk: FakeDisk) -> None:
    await store_of_rocketmq(broker_on, disk, listed=("Other",), lost=("T", "Other", "%RETRY%G"))
    async with broker_on() as broker:
        assert broker.store.topics_on_disk() == ["%RETRY%G", "Other", "T"]
    for path in [path for path in disk.files if path.startswith((f"{DATA}/consumequeue/", f"{DATA}/queues."))]:
        disk.unlink(path)
    async with broker_on() as broker:
        assert broker.store.readers.end_offset(broker.topics.update("T", 1, 1).queue(0)) == 1


def perms(broker: Broker, *names: str) -> list[int]:
    topics = [broker.topics.get(name) for name in names]
    return [-1 if topic is None else topic.perm for topic in topics]


async def test_a_topic_with_records_and_no_entry_is_made_again(broker_on: Brokers, disk: FakeDisk) -> None:
    async with broker_on() as broker:
        broker.topics.update("T", 20, 20)
        broker.publish(to("T", queue_id=15))
    for name in ("topics.json", "topics.json.bak"):
        disk.files.pop(f"{DATA}/config/{name}", None)
    async with broker_on() as broker:
        topic = broker.topics.get("T")
        assert topic is not None
        assert topic.read_queues == topic.write_queues == 16
        assert broker.store.readers.end_offset(topic.queue(15)) == 1
