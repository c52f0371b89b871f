"""A new topic keeps its queues, permission and attributes if a crash precedes the write of its table."""

import errno
import random
from functools import partial

import orjson
import pytest
import trio
from tests.delivery.pushing import broker_in_memory

from martlet.app.config import Config, PluginsConfig
from martlet.app.startup import run
from martlet.app.topic_notes import WAITING_MAX, TopicNotes
from martlet.broker import Broker
from martlet.message import Message
from martlet.net.addresses import split_address
from martlet.settings import BrokerConfig
from martlet.store.disk.files import read_file
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config

ATTRIBUTES = {"message.type": "FIFO", "reserve.time": "7"}
TABLES = ("topics.json", "topics.json.bak")


def crashed(disk: FakeDisk, cut: Cut = Cut.KILLED) -> FakeDisk:
    return disk.after_power_cut(cut, random.Random(1))


def entry(broker: Broker, name: str) -> dict[str, object]:
    topic = broker.topics.get(name)
    assert topic is not None
    return topic.as_json()


def use(broker: Broker, name: str) -> None:
    broker.publish(Message(name, b"x", queue_id=0))
    broker.store.commit()


@pytest.mark.parametrize(("cut", "flush"), [(Cut.KILLED, "async"), (Cut.KILLED, "sync"), (Cut.LOST, "sync")])
async def test_a_new_topic_survives_a_crash_as_it_was(cut: Cut, flush: str, caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk, flush=flush) as broker:
        TopicNotes(broker.store, broker.topics)
        broker.topics.ensure("T", 1, attributes=ATTRIBUTES)
        broker.topics.update("Read", 3, 2, 4)
        broker.topics.update("Read", 3, 2, 6)
        for name in "T", "Read":
            use(broker, name)
        broker.topics.update("Read", 3, 2, 4)
        broker.store.commit()
        expected = [entry(broker, name) for name in ("T", "Read")]
        await broker.store.wait_flushed(broker.store.appended)
        disk = crashed(disk, cut)
    for _ in range(2):  # and it stays so
        async with broker_in_memory(disk, flush=flush) as broker:
            assert [entry(broker, name) for name in ("T", "Read")] == expected
            assert broker.store.topic_retention.topics == {"T": 7}
    assert caplog.text.count("topic T has records but no entry in config/topics.json; creating it again") == 1
    assert "creating it again as the log says, queues: 1" in caplog.text


async def test_the_entry_is_in_the_commit_of_the_first_message_or_before_it() -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        TopicNotes(broker.store, broker.topics)
        broker.topics.ensure("T", 1)
        broker.publish(Message("T", b"x", queue_id=0))
        assert broker.store.committer.commits == 0
        broker.store.commit()
        assert broker.store.committer.commits == 1
        assert broker.store.topics_on_disk() == ["T"], "nobody reads the entry as a message, neither does RocketMQ"
        disk = crashed(disk)
    async with broker_in_memory(disk) as broker:
        assert entry(broker, "T")["writeQueueNums"] == 1


async def test_an_entry_whose_commit_failed_is_in_the_next() -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        TopicNotes(broker.store, broker.topics)
        for name in "T", "U":
            broker.topics.ensure(name, 1)
            broker.publish(Message(name, b"x", queue_id=0))
        disk.fail_next("write", errno.ENOSPC)
        with pytest.raises(Exception, match="No space"):
            broker.store.commit()
        broker.store.retention.look()
        assert not broker.store.refusal
        use(broker, "T")
        use(broker, "U")
        disk = crashed(disk)
    async with broker_in_memory(disk) as broker:
        assert [entry(broker, name)["writeQueueNums"] for name in ("T", "U")] == [1, 1]


async def test_topics_are_created_while_the_disk_is_full_and_noted_when_it_has_space() -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk, disk_full_ratio=0.9) as broker:
        notes = TopicNotes(broker.store, broker.topics)
        use_first = broker.topics.ensure("First", 1)
        use(broker, use_first.name)
        disk.used_ratio = 0.99
        broker.store.retention.look()
        assert broker.store.refusal
        for number in range(WAITING_MAX + 10):
            broker.topics.ensure(f"T{number}", 1)
        end = broker.store.appended
        for _ in range(3):
            broker.store.commit()  # nobody's connection is closed
        assert broker.store.appended == end
        assert len(notes._wanted) == WAITING_MAX, "the others are left to the table"
        disk.used_ratio = 0.1
        broker.store.retention.look()
        use(broker, "T0")
        assert not notes._wanted
        disk = crashed(disk)
    async with broker_in_memory(disk) as broker:
        assert entry(broker, "T0")["writeQueueNums"] == 1


async def test_a_deleted_topic_stays_deleted_and_its_name_has_the_newer_entry() -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        TopicNotes(broker.store, broker.topics)
        for name in "Gone", "Again", "Unused":
            broker.topics.ensure(name, 1)
        use(broker, "Gone")
        use(broker, "Again")
        for name in "Gone", "Again", "Unused":
            broker.topics.delete(name)
        broker.topics.ensure("Again", 3)
        use(broker, "Again")
        await broker.store.wait_deleted()
        disk = crashed(disk)
    async with broker_in_memory(disk) as broker:
        assert [(topic.name, topic.write_queues) for topic in broker.topics] == [("Again", 3)]


async def test_topics_outlive_both_copies_of_the_table() -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        TopicNotes(broker.store, broker.topics)
        broker.topics.ensure("T", 2, attributes=ATTRIBUTES)
        use(broker, "T")
        expected = entry(broker, "T")
    for name in TABLES:
        disk.unlink(f"/data/config/{name}")
    async with broker_in_memory(disk) as broker:
        assert entry(broker, "T") == expected


async def test_the_tables_entry_counts_although_the_log_has_an_older_one() -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        TopicNotes(broker.store, broker.topics)
        broker.topics.ensure("T", 2)
        use(broker, "T")
    for name in TABLES:  # RocketMQ has opened the store meanwhile
        table = orjson.loads(bytes(disk.files[f"/data/config/{name}"].data))
        table["topicConfigTable"]["T"] |= {"writeQueueNums": 5, "readQueueNums": 5}
        kept = {key: table[key] for key in ("dataVersion", "topicConfigTable")}
        disk.files[f"/data/config/{name}"].data[:] = orjson.dumps(kept)
    async with broker_in_memory(disk) as broker:
        assert entry(broker, "T")["writeQueueNums"] == 5


@pytest.mark.parametrize("value", ["many", 1 << 70])
async def test_an_entry_that_cannot_be_used_or_noted_leaves_a_likely_one(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        TopicNotes(broker.store, broker.topics)
        topic = broker.topics.ensure("T", 1)
        said = topic.as_json() | {"readQueueNums": value}
        with monkeypatch.context() as patch:
            patch.setattr(type(topic), "as_json", lambda topic: said)
            use(broker, "T")
        disk = crashed(disk)
    async with broker_in_memory(disk) as broker:
        assert entry(broker, "T")["writeQueueNums"] == 8


async def test_a_text_that_is_no_unicode_and_a_very_long_one_break_no_commit() -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        TopicNotes(broker.store, broker.topics)
        broker.topics.ensure("Half", 1, attributes={"a": "\ud800"})
        broker.topics.ensure("Long", 1, attributes={"a": "x" * (1 << 20)})
        use(broker, "Half")
        use(broker, "Long")
        broker.topics.delete("Half")  # no table can have it
        disk = crashed(disk)
    async with broker_in_memory(disk) as broker:
        assert entry(broker, "Long")["writeQueueNums"] == 8, "its entry does not fit into a note"


async def test_a_stomp_queue_keeps_its_order_after_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole program, killed after a receipt and before the table of topics could be written."""
    config = Config(
        broker=BrokerConfig(data="/data"),
        store=small_config(),
        plugins=PluginsConfig(enabled=["stomp"]),
        plugin_tables={"stomp": {"listen": "127.0.0.1:0"}},
    )
    disk = FakeDisk()
    open_as_ever = disk.open

    def refuse(path: str, *, create: bool = False, read_only: bool = False) -> int:
        if path.endswith("topics.json.tmp") and create:
            raise OSError(errno.ENOSPC, "no space left", path)
        return open_as_ever(path, create=create, read_only=read_only)

    bound: dict[str, str] = {}

    async def serve(found: FakeDisk, ready: trio.Event, stop: trio.Event) -> None:
        def is_ready(addresses: dict[str, str]) -> None:
            bound.update(addresses)
            ready.set()

        await run(config, ready=is_ready, disk=found, stop=stop)

    async with trio.open_nursery() as nursery:
        monkeypatch.setattr(disk, "open", refuse)
        ready, stop = trio.Event(), trio.Event()
        nursery.start_soon(partial(serve, disk, ready, stop))
        await ready.wait()
        stream = await trio.open_tcp_stream(*split_address(bound["stomp"]))
        async with stream:
            await stream.send_all(b"CONNECT\naccept-version:1.2\nhost:h\n\n\0")
            await stream.send_all(b"SEND\ndestination:/queue/q\nreceipt:r\n\nx\0")
            data = b""
            while b"receipt-id:r" not in data:
                data += await stream.receive_some()
        killed = crashed(disk)
        monkeypatch.undo()
        stop.set()
    assert read_file(killed, "/data/config/topics.json") is None
    async with trio.open_nursery() as nursery:
        ready, stop = trio.Event(), trio.Event()
        nursery.start_soon(partial(serve, killed, ready, stop))
        await ready.wait()
        stop.set()
    table = orjson.loads(read_file(killed, "/data/config/topics.json") or b"")
    assert table["topicConfigTable"]["q"]["writeQueueNums"] == 1
