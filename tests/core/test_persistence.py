"""The tables beside the log: what changes while they are written is written too, and what one lacks keeps no other."""

import errno
import random
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest
import trio
import trio.testing
from tests.core.pushing import broker_in_memory
from trio.testing import MockClock

from martlet import persistence
from martlet.broker import Broker
from martlet.message import Message
from martlet.testing.disk import Cut, FakeDisk

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
    """Let group G have consumed topic t up to *offset*; both are made."""
    broker.topics.ensure("t", 1)
    broker.groups.ensure("G")
    broker.groups.commit("G", "t", 0, offset)


def offsets_on_disk(broker: Broker) -> str:
    text = next(broker.store.read_generations("config/consumerOffset.json")).decode()
    return text.replace(" ", "").replace("\n", "")


async def test_what_changes_while_another_table_is_written_is_saved_by_the_next_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        commit(broker, 1)
        with monkeypatch.context() as patch:
            told_meanwhile(disk, patch, lambda: broker.groups.commit("G", "t", 0, 2))
            await persistence._try_to_save(broker, offsets=True)
        await persistence._try_to_save(broker, offsets=True)
        assert '"t@G":{0:2}' in offsets_on_disk(broker)


async def test_offsets_of_a_deleted_topic_leave_the_disk_with_it(autojump_clock: MockClock) -> None:
    async with broker_in_memory() as broker, trio.open_nursery() as nursery:
        nursery.start_soon(persistence.run, broker)
        commit(broker, 1000)
        await trio.sleep(6)
        assert "t@G" in offsets_on_disk(broker)
        broker.topics.delete("t")
        broker.groups.forget_topic("t")
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

        def refuse(path: str, *, create: bool = False, read_only: bool = False) -> int:
            if path.endswith("topics.json.tmp") and create:
                raise OSError(errno.ENOSPC, "no space left", path)
            return open_as_ever(path, create=create, read_only=read_only)

        with monkeypatch.context() as patch:
            patch.setattr(disk, "open", refuse)
            with pytest.raises(OSError, match="no space"):
                persistence.save(broker)
        assert '"t@G":{0:7}' in offsets_on_disk(broker)


def topics_on_disk(broker: Broker) -> str:
    return next(broker.store.read_generations("config/topics.json")).decode()


async def test_who_waits_for_a_change_is_told_once_it_is_on_the_disk(autojump_clock: MockClock) -> None:
    told: list[tuple[str, bool]] = []
    async with broker_in_memory() as broker, trio.open_nursery() as nursery:
        nursery.start_soon(persistence.run, broker)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(3):
            name = f"topic-{number}"
            broker.topics.ensure(name, 1)
            broker.when_saved(lambda problem, name=name: told.append((problem, name in topics_on_disk(broker))))  # type: ignore[misc]
        assert not told
        await trio.sleep(1)
        assert told == [("", True)] * 3
        broker.when_saved(lambda problem: told.append((problem, False)))
        await trio.sleep(1)
        assert told[3:] == [("", False)], "who changed nothing is told as well"
        nursery.cancel_scope.cancel()


async def test_who_waits_is_told_that_the_disk_is_full_and_the_change_is_written_later(
    autojump_clock: MockClock,
) -> None:
    disk = FakeDisk()
    told: list[str] = []
    async with broker_in_memory(disk) as broker, trio.open_nursery() as nursery:
        nursery.start_soon(persistence.run, broker)
        await trio.testing.wait_all_tasks_blocked()
        broker.topics.ensure("one", 1)
        disk.fail_next("write", errno.ENOSPC)
        broker.when_saved(told.append)
        await trio.sleep(1)
        [problem] = told
        assert "config/topics.json cannot be written" in problem
        broker.topics.ensure("two", 1)
        broker.when_saved(told.append)
        await trio.sleep(1)
        assert told[1:] == [""]
        assert "one" in topics_on_disk(broker)
        nursery.cancel_scope.cancel()


async def test_no_more_wait_for_a_disk_that_stands_still_than_may(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(persistence, "WAITING_MAX", 3)
    told: list[str] = []
    async with broker_in_memory() as broker, trio.open_nursery() as nursery:
        nursery.start_soon(persistence.run, broker)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(5):
            broker.when_saved(told.append)
        assert told == ["3 changes wait for the disk"] * 2
        await trio.sleep(1)
        assert told[2:] == [""] * 3
        nursery.cancel_scope.cancel()


async def test_where_nothing_writes_the_tables_nobody_waits() -> None:
    told: list[str] = []
    async with broker_in_memory() as broker:
        broker.when_saved(told.append)
    assert told == [""]


async def test_a_deletion_that_was_confirmed_survives_a_kill(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    confirmed: list[str] = []
    async with broker_in_memory(disk) as broker, trio.open_nursery() as nursery:
        nursery.start_soon(persistence.run, broker)
        topic = broker.topics.ensure("t", 1)
        broker.publish(Message("t", b"x", queue_id=0))
        broker.store.commit()
        await trio.sleep(20)
        assert broker.topics.delete(topic.name)
        broker.when_saved(confirmed.append)
        await trio.sleep(1)
        assert confirmed == [""]
        killed = disk.after_power_cut(Cut.LOST, random.Random(0))
        nursery.cancel_scope.cancel()
    async with broker_in_memory(killed) as broker:
        persistence.load(broker)
        assert broker.topics.get("t") is None


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
        nursery.start_soon(persistence.run, broker)
        broker.topics.ensure("t", 3)
        broker.publish(Message("t", b"x", queue_id=0))
        broker.store.commit()
        await trio.sleep(20)
        monkeypatch.setattr(disk, "off_loop", off_loop)
        broker.topics.delete("t")
        await trio.sleep(0.5)
        assert broker.store.durable < broker.store.deleted_to
        assert '"t"' in topics_on_disk(broker)
        await trio.sleep(6)
        assert '"t"' not in topics_on_disk(broker)
        nursery.cancel_scope.cancel()
