"""The tables in config/: changes during a write go into the next one, and one failing table delays no other."""

import errno
import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import orjson
import pytest
import trio
import trio.testing
from tests.delivery.pushing import broker_in_memory
from trio.testing import MockClock

from martlet.app import saving
from martlet.broker import Broker
from martlet.message import Message
from martlet.runtime.steps import Steps
from martlet.tables.rocketmq_json import parse, render_in_steps
from martlet.tables.saved import POSITION_KEY, Table
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.peers import serving
from martlet.testing.stores import small_config

T = TypeVar("T")


def told_meanwhile(disk: FakeDisk, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
    """Call *meanwhile* on the loop whenever a worker thread is at work."""

    async def off_loop(work: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()
        result = work()
        meanwhile()
        return result

    monkeypatch.setattr(disk, "off_loop", off_loop)


def commit(broker: Broker, offset: int) -> None:
    """Create topic t and group G, and commit *offset*."""
    broker.topics.ensure("t", 1)
    broker.groups.ensure("G")
    broker.groups.offsets.commit("G", "t", 0, offset)


def offsets_on_disk(broker: Broker) -> str:
    text = next(broker.store.data_directory.read_generations("config/consumerOffset.json")).decode()
    return text.replace(" ", "").replace("\n", "")


async def test_changes_during_the_write_of_another_table_are_saved_by_the_next_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        commit(broker, 1)
        with monkeypatch.context() as patch:
            told_meanwhile(disk, patch, lambda: broker.groups.offsets.commit("G", "t", 0, 2))
            await saving._try_to_save(broker, offsets=True)
        await saving._try_to_save(broker, offsets=True)
        assert '"t@G":{0:2}' in offsets_on_disk(broker)


async def test_offsets_of_a_deleted_topic_leave_the_disk_with_it(autojump_clock: MockClock) -> None:
    async with broker_in_memory() as broker, trio.open_nursery() as nursery:
        nursery.start_soon(saving.run, broker)
        commit(broker, 1000)
        await trio.sleep(6)
        assert "t@G" in offsets_on_disk(broker)
        broker.topics.delete("t")
        broker.groups.offsets.forget_topic("t")
        await trio.sleep(0.1)
        assert "t@G" not in offsets_on_disk(broker)
        nursery.cancel_scope.cancel()


async def test_a_table_that_cannot_be_written_at_the_end_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        commit(broker, 7)
        open_as_ever = disk.open

        def refuse(path: str, *, create: bool = False, read_only: bool = False, mode: int = 0o640) -> int:
            if path.endswith("topics.json.tmp") and create:
                raise OSError(errno.ENOSPC, "no space left", path)
            return open_as_ever(path, create=create, read_only=read_only)

        with monkeypatch.context() as patch:
            patch.setattr(disk, "open", refuse)
            assert "config/topics.json cannot be written; [Errno 28] no space left" in saving.save(broker)
        assert '"t@G":{0:7}' in offsets_on_disk(broker)


def topics_on_disk(broker: Broker) -> str:
    return next(broker.store.data_directory.read_generations("config/topics.json")).decode()


async def test_a_waiter_is_called_once_its_change_is_on_disk(autojump_clock: MockClock) -> None:
    told: list[tuple[str, bool]] = []
    async with broker_in_memory() as broker, trio.open_nursery() as nursery:
        nursery.start_soon(saving.run, broker)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(3):
            name = f"topic-{number}"
            broker.topics.ensure(name, 1)
            broker.call_when_saved(lambda problem, name=name: told.append((problem, name in topics_on_disk(broker))))  # type: ignore[misc]
        assert not told
        await trio.sleep(1)
        assert told == [("", True)] * 3
        broker.call_when_saved(lambda problem: told.append((problem, False)))
        await trio.sleep(1)
        assert told[3:] == [("", False)], "an unchanged table is reported as well"
        nursery.cancel_scope.cancel()


async def test_a_waiter_learns_that_the_disk_is_full_and_the_change_is_written_later(
    autojump_clock: MockClock,
) -> None:
    disk = FakeDisk()
    told: list[str] = []
    async with broker_in_memory(disk) as broker, trio.open_nursery() as nursery:
        nursery.start_soon(saving.run, broker)
        await trio.testing.wait_all_tasks_blocked()
        broker.topics.ensure("one", 1)
        disk.fail_next("write", errno.ENOSPC)
        broker.call_when_saved(told.append)
        await trio.sleep(1)
        [problem] = told
        assert "config/topics.json cannot be written" in problem
        broker.topics.ensure("two", 1)
        broker.call_when_saved(told.append)
        await trio.sleep(1)
        assert told[1:] == [""]
        assert "one" in topics_on_disk(broker)
        nursery.cancel_scope.cancel()


async def test_the_number_of_waiters_for_a_hanging_disk_is_limited(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(saving, "WAITING_MAX", 3)
    told: list[str] = []
    async with broker_in_memory() as broker, trio.open_nursery() as nursery:
        nursery.start_soon(saving.run, broker)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(5):
            broker.call_when_saved(told.append)
        assert told == ["3 changes already wait for the disk"] * 2
        await trio.sleep(1)
        assert told[2:] == [""] * 3
        nursery.cancel_scope.cancel()


async def test_both_generations_of_a_table_of_secrets_are_closed_to_others(tmp_path: Path) -> None:
    def render(position: int) -> Steps[list[bytes]]:
        yield
        return [b"secret"]

    before = os.umask(0)
    try:
        async with serving(tmp_path) as running:
            table = Table("config/secrets", render, lambda data: None, urgent=True, mode=0o600)
            running.broker.tables.register(table)
            table.change()
            assert table.writes == 0
            assert await saving._try_to_save(running.broker, offsets=False) == ""
            assert table.writes == 1
            for name in ("secrets", "secrets.bak"):
                assert (tmp_path / "config" / name).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


async def test_where_nothing_writes_the_tables_nobody_waits() -> None:
    told: list[str] = []
    async with broker_in_memory() as broker:
        broker.call_when_saved(told.append)
    assert told == [""]


async def test_a_deletion_that_was_confirmed_survives_a_kill(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    confirmed: list[str] = []
    async with broker_in_memory(disk) as broker, trio.open_nursery() as nursery:
        nursery.start_soon(saving.run, broker)
        topic = broker.topics.ensure("t", 1)
        broker.publish(Message("t", b"x", queue_id=0))
        broker.store.committer.commit()
        await trio.sleep(20)
        assert broker.topics.delete(topic.name)
        broker.call_when_saved(confirmed.append)
        await trio.sleep(1)
        assert confirmed == [""]
        killed = disk.after_power_cut(Cut.LOST, random.Random(0))
        nursery.cancel_scope.cancel()
    async with broker_in_memory(killed) as broker:
        saving.load(broker)
        assert broker.topics.get("t") is None


@pytest.mark.parametrize("cut", [Cut.KILLED, Cut.LOST])
async def test_a_topic_whose_only_message_waits_elsewhere_survives_a_crash(cut: Cut) -> None:
    """A stage stores the message in another topic, and the crash comes before the table is written."""
    disk = FakeDisk()
    async with broker_in_memory(disk, flush="sync") as broker:
        for name in "T", "%RETRY%G", "Gone":
            broker.topics.ensure(name, 4)
            for _ in range(2):
                assert broker.queue_for_later(Message(name, b"x", queue_id=3)) == 3
        end = broker.publish(Message("T", b"x", queue_id=1)).end
        notes = broker.store.appended
        assert broker.queue_for_later(Message("T", b"x", queue_id=2)) == 2
        assert broker.store.appended == notes, "a topic that the log names already is not named again"
        broker.topics.delete("Gone")
        await broker.store.flusher.wait_flushed(end)
        await broker.store.deletions.wait_durable()
        disk = disk.after_power_cut(cut, random.Random(1))
    async with broker_in_memory(disk, flush="sync") as broker:
        saving.load(broker)
        names = {topic.name: topic.write_queues for topic in broker.topics}
        assert names == {"T": 8, "%RETRY%G": 4}


@pytest.mark.parametrize("lost", [["checkpoint"], []])
@pytest.mark.parametrize("cut", [Cut.KILLED, None])
async def test_a_topic_whose_only_message_waits_elsewhere_outlives_its_table(cut: Cut | None, lost: list[str]) -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk, flush="sync") as broker:
        broker.topics.ensure("T", 4)
        assert broker.queue_for_later(Message("T", b"x", queue_id=3)) == 3
        await broker.store.upkeep.checkpointer.checkpoint()
        if cut is not None:
            disk = disk.after_power_cut(cut, random.Random(1))
    for _ in range(2):
        for name in "config/topics.json", "config/topics.json.bak", *lost:
            with suppress(FileNotFoundError):
                disk.unlink(f"/data/{name}")
        async with broker_in_memory(disk, flush="sync") as broker:
            saving.load(broker)
            assert [topic.name for topic in broker.topics] == ["T"]
            assert broker.topics.ensure("T", 1).queue(3).next_offset == 0


async def test_a_topic_stays_in_its_file_until_the_log_says_that_it_was_deleted(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut in between brings its messages back, and not how many queues it had."""
    disk = FakeDisk()

    async def off_loop(work: Callable[[], T]) -> T:
        # Only what writes a table comes as a partial: the flush of the deletion's record takes longer.
        await trio.sleep(0.0 if isinstance(work, partial) else 1.0)
        return work()

    async with broker_in_memory(disk, flush="sync") as broker, trio.open_nursery() as nursery:
        nursery.start_soon(saving.run, broker)
        broker.topics.ensure("t", 3)
        broker.publish(Message("t", b"x", queue_id=0))
        broker.store.committer.commit()
        await trio.sleep(20)
        monkeypatch.setattr(disk, "off_loop", off_loop)
        broker.topics.delete("t")
        await trio.sleep(0.5)
        assert broker.store.durable < broker.store.deletions.end
        assert '"t"' in topics_on_disk(broker)
        await trio.sleep(6)
        assert '"t"' not in topics_on_disk(broker)
        nursery.cancel_scope.cancel()


# tables of plugins, and where tables say that they are complete


class Delays:
    """What a timer plugin keeps: RocketMQ's delayOffset.json."""

    def __init__(self) -> None:
        self.offsets: dict[int, int] = {}
        self.table = Table("config/delayOffset.json", self.render, self.load, urgent=True)

    def render(self, position: int) -> Steps[list[bytes]]:
        return render_in_steps({POSITION_KEY: position}, "offsetTable", [("all", dict(self.offsets))], bare_keys=True)

    def load(self, data: bytes) -> None:
        found = parse(data, "delayOffset.json")["offsetTable"]["all"]
        self.offsets = {int(level): offset for level, offset in found.items()}


async def test_a_plugin_keeps_a_table_of_its_own(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        delays = Delays()
        broker.tables.add(delays.table)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(saving.run, broker)
            await trio.testing.wait_all_tasks_blocked()
            delays.offsets[3] = 77
            delays.table.change()
            await trio.sleep(0.2)
            assert b"3:77" in disk.files["/data/config/delayOffset.json"].data
            nursery.cancel_scope.cancel()
        delays.offsets[4] = 5
        delays.table.change()
    async with broker_in_memory(disk) as broker:
        delays = Delays()
        broker.tables.add(delays.table)
        assert delays.offsets == {3: 77, 4: 5}


async def test_a_plugins_table_that_is_damaged_gives_way_to_its_previous_generation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = FakeDisk()
    for value in (1, 2):
        async with broker_in_memory(disk) as broker:
            delays = Delays()
            broker.tables.add(delays.table)
            delays.offsets[1] = value
            delays.table.change()
    disk.files["/data/config/delayOffset.json"].data[:] = b"{"
    async with broker_in_memory(disk) as broker:
        delays = Delays()
        broker.tables.add(delays.table)
        assert delays.offsets == {1: 2}, "it is a copy"
    assert "config/delayOffset.json cannot be used, trying its previous generation" in caplog.text


async def test_a_table_contains_the_position_up_to_which_it_is_complete() -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk, flush="async", flush_interval_ms=60_000) as broker:
        commit(broker, 1)
        broker.publish(Message("t", b"x", b""))
        broker.store.committer.commit()
        assert broker.store.durable == 0 < broker.store.readable
        await saving._try_to_save(broker, offsets=True)
        assert '"martletPosition":0' in offsets_on_disk(broker), "never ahead of what is durable"
        broker.store.flusher.flush_now()
        commit(broker, 2)
        await saving._try_to_save(broker, offsets=True)
        end = broker.store.durable
        assert f'"martletPosition":{end}' in offsets_on_disk(broker)
    async with broker_in_memory(disk) as broker:
        assert broker.groups.offsets.position == end


@pytest.mark.parametrize("damage", ["RocketMQ wrote it", "of a longer log"])
async def test_offsets_that_another_wrote_are_newer_than_all_notes_in_the_log(damage: str) -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        commit(broker, 1)
        broker.publish(Message("t", b"x", b""))
    path = "/data/config/consumerOffset.json"
    table = orjson.loads(bytes(disk.files[path].data).replace(b"0:1", b'"0":1'))
    assert table.pop("martletPosition") > 0
    assert table.pop("martletCrc") > 0
    if damage == "of a longer log":
        table["martletPosition"] = 1 << 40
    disk.files[path].data[:] = orjson.dumps(table)
    async with broker_in_memory(disk) as broker:
        assert broker.groups.offsets.get("G", "t", 0) == 1
        assert broker.groups.offsets.position == broker.store.readable > 0
        broker.publish(Message("t", b"y", b""))
    async with broker_in_memory(disk) as broker:  # it was said in the file at once
        assert 0 < broker.groups.offsets.position <= broker.store.readable


async def test_without_a_table_every_note_counts() -> None:
    async with broker_in_memory() as broker:
        assert broker.groups.offsets.position == 0


async def test_a_large_table_is_rendered_in_a_worker_thread(tmp_path: Path) -> None:
    threads: set[int] = set()

    class Wide(Delays):
        def render(self, position: int) -> Steps[list[bytes]]:
            return self.slices()

        def slices(self) -> Steps[list[bytes]]:
            for _ in range(10):
                threads.add(threading.get_ident())
                yield
            return [b"{}"]

    async with serving(tmp_path, store=small_config(flush="async")) as running:
        wide = Wide()
        running.broker.tables.register(wide.table)
        wide.table.change()
        assert await saving._try_to_save(running.broker, offsets=False) == ""
        assert len(threads) == 1
        assert threading.get_ident() not in threads
        assert (tmp_path / "config" / "delayOffset.json").read_bytes() == b"{}"


async def test_a_topic_that_may_have_been_deleted_is_closed_unless_the_table_has_it() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("Listed", 1)
        for name in ("T", "Listed", "New"):
            broker.store.writer.append(Message(name, b"x"), 0)
        broker.store.committer.commit()
        saving._make_topics_of_records(broker, closed={"T", "Listed"})
        perms = {name: topic.perm for name in ("T", "Listed", "New") if (topic := broker.topics.get(name))}
        assert perms == {"T": 0, "Listed": 6, "New": 6}


TABLES = ("topics.json", "subscriptionGroup.json", "consumerOffset.json")


async def filled(disk: FakeDisk) -> None:
    async with broker_in_memory(disk) as broker:
        commit(broker, 1)
        broker.topics.ensure("other", 3)
        broker.groups.set_forbidden("G", "other", readable=False)
        broker.publish(Message("t", b"x", queue_id=0))


def known(broker: Broker) -> tuple[object, ...]:
    groups = broker.groups
    topics = {topic.name: topic.as_json() for topic in broker.topics}
    return topics, sorted(groups.names()), groups.offsets.get("G", "t", 0), groups.forbidden(), groups.offsets.position


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("copy", ["", ".bak"])
async def test_a_flipped_bit_in_a_table_changes_nothing(name: str, copy: str) -> None:
    disk = FakeDisk()
    await filled(disk)
    async with broker_in_memory(copy_of(disk)) as broker:
        expected = known(broker)
    size = len(disk.files[f"/data/config/{name}{copy}"].data)
    for byte in sorted({*range(48), *range(0, size, max(size // 16, 1))}):
        damaged = copy_of(disk)
        damaged.files[f"/data/config/{name}{copy}"].data[byte] ^= 1 << byte % 8
        async with broker_in_memory(damaged) as broker:
            assert known(broker) == expected, byte
        table, second = (damaged.files[f"/data/config/{name}{end}"].data for end in ("", ".bak"))
        assert table == second, "both copies are whole again"


def copy_of(disk: FakeDisk) -> FakeDisk:
    return disk.after_power_cut(Cut.KILLED, random.Random(0))


@pytest.mark.parametrize("name", TABLES)
async def test_a_table_without_its_main_key_is_damaged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk()
    await filled(disk)
    async with broker_in_memory(copy_of(disk)) as broker:
        expected = known(broker)
    disk.files[f"/data/config/{name}"].data[:] = b'{"dataVersion":{}}'
    async with broker_in_memory(disk) as broker:
        assert known(broker) == expected
    assert f"config/{name} cannot be used, trying its previous generation; {name} has no " in caplog.text


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("damage", ["missing", "empty"])
async def test_the_use_of_a_previous_generation_is_logged(
    name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FakeDisk()
    await filled(disk)
    async with broker_in_memory(copy_of(disk)) as broker:
        expected = known(broker)
    assert not caplog.records
    path = f"/data/config/{name}"
    if damage == "missing":
        disk.unlink(path)
    else:
        disk.files[path].data.clear()
    async with broker_in_memory(disk) as broker:
        assert known(broker) == expected
    assert f"config/{name} is missing or empty; using its previous generation" in caplog.text


@pytest.mark.parametrize("damage", ["missing", "flipped"])
async def test_a_topic_that_an_older_version_deleted_stays_deleted(
    damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Older versions left the deleted topic in the previous generation of the table."""
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        for name in ("gone", "again", "kept"):
            broker.topics.ensure(name, 1)
            broker.publish(Message(name, b"x", queue_id=0))
    before = bytes(disk.files["/data/config/topics.json"].data)
    async with broker_in_memory(disk) as broker:
        broker.topics.delete("gone")
        broker.topics.delete("again")
        broker.topics.ensure("again", 1)
        broker.publish(Message("again", b"y", queue_id=0))
    disk.files["/data/config/topics.json.bak"].data[:] = before
    async with broker_in_memory(copy_of(disk)):
        pass
    if damage == "missing":
        disk.unlink("/data/config/topics.json")
    else:
        disk.files["/data/config/topics.json"].data[-5] ^= 1
    async with broker_in_memory(disk) as broker:
        assert {topic.name for topic in broker.topics} == {"again", "kept"}
    assert "topic gone stays deleted: the log records its deletion" in caplog.text


async def test_the_copy_of_a_table_follows_an_interval_later(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker, trio.open_nursery() as nursery:
        nursery.start_soon(saving.run, broker)
        commit(broker, 1000)
        await trio.sleep(6)
        commit(broker, 2000)
        await trio.sleep(11)
        table, second = (disk.files[f"/data/config/consumerOffset.json{end}"].data for end in ("", ".bak"))
        assert b"2000" in table
        assert table == second
        nursery.cancel_scope.cancel()


async def test_a_damaged_table_does_not_bring_rocketmqs_older_one_back() -> None:
    disk = FakeDisk()
    await filled(disk)
    path = "/data/config/consumerOffset.json"
    theirs = orjson.dumps({"dataVersion": {}, "offsetTable": {"t@G": {"0": 5}}})
    disk.files[f"{path}.bak"].data[:] = theirs
    disk.files[path].data[60] ^= 1
    async with broker_in_memory(disk) as broker:
        assert broker.groups.offsets.get("G", "t", 0) == -1, (
            "the log and its notes count, not an older file of RocketMQ"
        )
        assert broker.groups.offsets.position == 0


async def test_an_offset_beyond_the_last_message_is_lowered(caplog: pytest.LogCaptureFixture) -> None:
    """The log of a copy can be older than its tables."""
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        commit(broker, 5)
        broker.publish(Message("t", b"x", queue_id=0))
    async with broker_in_memory(disk) as broker:
        assert broker.groups.offsets.get("G", "t", 0) == 1
    assert "1 committed offsets were beyond the last message of their queue; lowered them to it" in caplog.text
