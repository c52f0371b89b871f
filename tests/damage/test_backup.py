"""Copies of a data directory that a broker is using: by `martlet.offline.backup`, and file by file in any order."""

import os
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import Final, TypeVar

import pytest
import trio
from tests.damage.test_data_files import History, content_of, differences, history
from tests.damage.world import CONFIG, DATA, Live, Seen, copy_of, fill, living, see
from tests.stored import records_of
from trio.testing import MockClock

from martlet.app.config import Config
from martlet.errors import StoreError
from martlet.message import Message
from martlet.offline.backup import backup
from martlet.testing.clock import START_MS
from martlet.testing.disk import FakeDisk

__all__ = ["history"]

TARGET: Final = "/backup"
SEEDS: Final = range(int(os.environ.get("MARTLET_BACKUP_SEEDS", "4")))
CHUNK: Final = 4096
T = TypeVar("T")


def played(main: Callable[..., Awaitable[T]], *arguments: object) -> T:
    return trio.run(main, *arguments, clock=MockClock(autojump_threshold=0))


def restored(disk: FakeDisk, target: str = TARGET) -> FakeDisk:
    """Return a disk with the copy in *target* in place of the data directory."""
    made = FakeDisk()
    for path, file in disk.files.items():
        if path.startswith(f"{target}/"):
            to = DATA + path.removeprefix(target)
            made.make_directory(os.path.dirname(to))
            made.close(made.open(to, create=True))
            made.files[to].data[:] = made.files[to].stable[:] = file.data
    made.make_directory(f"{DATA}/commitlog")
    made.sync_everything("/")
    return made


async def settled() -> tuple[FakeDisk, FakeDisk]:
    """Return a backup of a broker with state of every kind, and what a kill leaves at the same moment."""
    disk = FakeDisk()
    async with living(disk, START_MS) as live:
        await fill(live, "first")
        await trio.sleep(12)
        await fill(live, "second")
        await trio.sleep(12)
        killed = copy_of(disk)
        made = await backup(DATA, Config(store=CONFIG), disk, target=TARGET)
        assert made.findings == []
    return restored(disk), killed


def test_a_backup_of_a_running_broker_has_all_state() -> None:
    copy, killed = played(settled)
    assert played(lost_by, copy, killed) == {}


async def lost_by(copy: FakeDisk, killed: FakeDisk) -> dict[str, tuple[object, object]]:
    return differences(await see(copy), await see(killed))


def test_a_backup_of_a_stopped_broker_has_all_state(history: History) -> None:
    disk = copy_of(history.stopped["orderly"])
    made = played(partial(backup, target=TARGET), DATA, Config(store=CONFIG), disk)
    assert (made.findings, made.inspection.torn_bytes) == ([], 0)
    seen: Seen = played(see, restored(disk))
    assert differences(seen, history.expected("orderly")) == {}


class Busy:
    """Sends, deletes topics, makes checkpoints and lets retention remove segments, until it is cancelled."""

    def __init__(self, live: Live, disk: FakeDisk, seed: int) -> None:
        self.live = live
        self.disk = disk
        self.random = Random(seed)
        self.acknowledged: list[bytes] = []
        self.removed = 0

    async def run(self) -> None:
        broker, store, number = self.live.broker, self.live.broker.store, 0
        for name in ("busy", "brief"):
            broker.topics.ensure(name, 3)
        while True:
            sent = []
            for _ in range(self.random.randrange(1, 30)):
                number += 1
                sent.append(b"%d" % number)
                broker.publish(Message("busy", sent[-1], b"", number % 3))
                broker.publish(Message("brief", b"x" * self.random.randrange(300), b"", 0))
            broker.groups.offsets.commit("readers-first", "busy", 0, max(store.queue("busy", 0).next_offset - 1, 0))
            store.committer.commit()
            await store.flusher.wait_flushed(store.written)
            self.acknowledged += sent
            if not self.random.randrange(8):
                await store.upkeep.checkpointer.checkpoint()
            if not self.random.randrange(20):
                broker.topics.delete("brief")
                broker.topics.ensure("brief", 3)
            await trio.sleep(0.01)


async def readable(disk: FakeDisk) -> tuple[list[bytes], int]:
    """Start a broker; return the bodies in topic ``busy``, and how many messages a group would skip there."""
    async with living(disk, START_MS + 100_000) as live:
        store = live.broker.store
        found = [record.body for record in records_of(store, "busy")]
        committed = live.broker.groups.offsets.get("readers-first", "busy", 0)
        return found, max(committed - store.queue("busy", 0).next_offset, 0)


async def backed_up_while_busy(seed: int) -> tuple[FakeDisk, list[bytes]]:
    disk = FakeDisk()
    async with living(disk, START_MS) as live, trio.open_nursery() as nursery:
        await fill(live, "first")
        busy = Busy(live, disk, seed)
        nursery.start_soon(busy.run)
        await trio.sleep(busy.random.uniform(0.5, 5))
        before = list(busy.acknowledged)
        made = await backup(DATA, Config(store=CONFIG), disk, target=TARGET)
        assert made.findings == []
        assert len(busy.acknowledged) > len(before), "it was busy meanwhile"
        nursery.cancel_scope.cancel()
    return restored(disk), before


@pytest.mark.parametrize("seed", SEEDS)
def test_a_backup_has_whatever_was_acknowledged_before(seed: int) -> None:
    copy, acknowledged = played(backed_up_while_busy, seed)
    found, skipped = played(readable, copy)
    assert set(acknowledged) <= set(found)
    assert sorted(found, key=int) == [b"%d" % number for number in range(1, len(found) + 1)], "no gap"
    assert skipped == 0


async def copied_while_busy(seed: int) -> tuple[FakeDisk, list[bytes]]:
    """Copy the files in random order and in pieces, as cp, rsync and tar do, one file after the other."""
    disk, chance = FakeDisk(), Random(f"copy {seed}")
    async with living(disk, START_MS) as live, trio.open_nursery() as nursery:
        await fill(live, "first")
        busy = Busy(live, disk, seed)
        nursery.start_soon(busy.run)
        await trio.sleep(busy.random.uniform(0.5, 5))
        before = list(busy.acknowledged)
        paths = list(content_of(disk))
        chance.shuffle(paths)
        copy = FakeDisk()
        for path in paths:
            source = disk.files.get(f"{DATA}/{path}")  # what is removed meanwhile is not copied
            if source is None:
                continue
            copied = bytearray()
            while len(copied) < len(source.data):
                copied += source.data[len(copied) : len(copied) + CHUNK]
                if not chance.randrange(4):
                    await trio.sleep(0.02)
            to = f"{TARGET}/{path}"
            copy.make_directory(os.path.dirname(to))
            copy.close(copy.open(to, create=True))
            copy.files[to].data[:] = copied
        nursery.cancel_scope.cancel()
    return restored(copy), before


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_file_by_file_in_any_order_has_whatever_was_acknowledged_before(seed: int) -> None:
    copy, acknowledged = played(copied_while_busy, seed)
    found, skipped = played(readable, copy)
    assert set(acknowledged) <= set(found)
    assert len(found) == len(set(found))
    assert skipped == 0, "a group does not skip what is sent to the copy"


async def with_retention() -> tuple[FakeDisk, int]:
    """Have retention remove the first segments while they are copied."""
    disk, removed = FakeDisk(), 0
    async with living(disk, START_MS) as live, trio.open_nursery() as nursery:
        await fill(live, "first")
        await fill(live, "second")
        store = live.broker.store
        for number in range(400):
            live.publish("plain", b"%d" % number + b"x" * 1000)
        await live.settle()
        assert len(store.segments.items) > 3

        async def remove() -> None:
            nonlocal removed
            while f"{TARGET}/config/topics.json" not in disk.files:  # noqa: ASYNC110 - virtual time
                await trio.sleep(0.001)
            await live.broker.projections.keeper.release(store.segments.items[1].end)
            for _ in range(2):
                first = store.segments.remove_first()
                removed = first.end

        nursery.start_soon(remove)
        made = await backup(DATA, Config(store=CONFIG), disk, target=TARGET)
        assert made.findings == []
    return restored(disk), removed


def test_a_backup_begins_again_if_retention_removes_what_it_copies() -> None:
    copy, removed = played(with_retention)
    assert removed > 0
    starts = [int(path.rpartition("/")[2]) for path in copy.files if "/commitlog/" in path]
    assert min(starts) == removed
    seen: Seen = played(see, copy)
    assert [name for name, _ in seen["retained"]] == ["r/first/0", "r/first/1", "r/second/0", "r/second/1"]
    timed = {body for _, body in seen["records"]["timed"]}
    assert {b"first-level-late", b"first-timer-late", b"first-timer-missed"} <= timed


@pytest.mark.parametrize("place", [f"{DATA}/backup", "/full"])
def test_a_backup_goes_into_an_empty_directory_elsewhere(history: History, place: str) -> None:
    disk = copy_of(history.stopped["orderly"])
    disk.make_directory("/full")
    disk.close(disk.open("/full/file", create=True))
    with pytest.raises(StoreError, match=r"is not empty|is inside of the data directory"):
        played(partial(backup, target=place), DATA, Config(store=CONFIG), disk)
