"""Blocks of consume queues: checked against their CRC when they are read, and rebuilt from the log when they differ."""

import logging
from pathlib import Path
from random import Random

import pytest
import trio
from trio.testing import MockClock

from martlet.errors import NotReady
from martlet.records.codec import tags_code
from martlet.records.layout import ENTRY_BYTES
from martlet.runtime.steps import finish_now
from martlet.store import Store
from martlet.store.queues.queues import BLOCKS_CACHED
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import ManualClock, bodies, drain, message, small_config

from .test_deletion import open_on, send

PATH = "/data/consumequeue/T/0/00000000000000000000"
COUNT = 15


async def filled() -> FakeDisk:
    disk = FakeDisk()
    store = await open_on(disk)
    for number in range(COUNT):
        store.writer.append(message(b"%d" % number, "T", f"tag{number % 2}"), 0)
        send(store, "Other", f"{number}")
    await store.close()
    return disk


def damage(disk: FakeDisk, at: int, mask: int = 1, path: str = PATH) -> None:
    file = disk.files[path]
    file.data[at] ^= mask
    file.stable[at] = file.data[at]


WANTED = [b"%d" % number for number in range(COUNT)]


async def test_every_flipped_byte_of_an_entry_is_repaired_and_is_no_damaged_record(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = await filled()
    random = Random(0)
    for at in range(COUNT * ENTRY_BYTES):
        damage(disk, at, 1 << random.randrange(8))
        store = await open_on(disk)
        queue = store.queue("T", 0)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert not all(store.readers.read_near(queue, offset, 1, 1) is not None for offset in range(COUNT))
            assert drain(store, queue) == WANTED
        assert caplog.text.count("rebuilding its messages") == 1
        assert store.readers.damaged_records == 0
        odd = store.readers.read(queue, 0, COUNT, 10**6, frozenset((tags_code("tag1"),)))
        assert bodies(odd.pieces) == WANTED[1::2]
        store.crash()
        store = await open_on(disk)
        assert all(store.queues.position_at(store.queue("T", 0), offset) >= 0 for offset in range(COUNT))
        store.crash()


async def test_a_record_is_found_by_its_position_though_its_entry_is_in_a_damaged_block(
    autojump_clock: MockClock,
) -> None:
    disk = await filled()
    store = await open_on(disk)
    positions = [finish_now(store.lookup.position_at(store.queue("T", 0), offset)) for offset in range(COUNT)]
    store.crash()
    damage(disk, 3)
    store = await open_on(disk)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        for position, body in zip(positions, WANTED, strict=True):
            data = await store.lookup.record_far(position)
            assert data is not None
            assert bodies([data]) == [body]
        assert await store.lookup.record_far(positions[0] + 1) is None
        nursery.cancel_scope.cancel()
    store.crash()


async def test_a_far_read_has_a_damaged_block_repaired(autojump_clock: MockClock) -> None:
    disk = await filled()
    damage(disk, 3)
    damage(disk, 3, path="/data/consumequeue/Other/0/00000000000000000000")
    store = await open_on(disk)
    queue = store.queue("T", 0)
    results = []

    async def read() -> None:
        results.append(await store.readers.read_far(queue, 0, COUNT, 10**6))

    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        async with trio.open_nursery() as readers:
            for _ in range(3):
                readers.start_soon(read)
        # The first block alone: the next is another read's.
        assert all(bodies(result.pieces) == WANTED[: result.count] and result.count for result in results)
        with pytest.raises(NotReady, match="consume queue 'Other/0' is damaged and being rebuilt") as refused:
            finish_now(store.lookup.store_ms_at(store.queue("Other", 0), 0))
        await refused.value.wait()
        assert finish_now(store.lookup.store_ms_at(store.queue("Other", 0), 0)) >= 0
        nursery.cancel_scope.cancel()
    store.crash()


@pytest.mark.parametrize("run", [False, True])
async def test_a_lookup_by_time_is_right_once_a_damaged_block_is_repaired(run: bool, autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    clock = ManualClock()
    store = await Store.open(Path("/data"), small_config(queue_file_entries=200), clock, disk)
    begin = clock.ms
    for number in range(600):
        clock.ms = begin + number * 10
        send(store, "T", str(number))
    await store.close()
    for start in (0, 4000, 8000):
        damage(disk, 7, path=f"/data/consumequeue/T/0/{start:020d}")
    store = await Store.open(Path("/data"), small_config(queue_file_entries=200), clock, disk)
    queue = store.queue("T", 0)
    wanted = {begin + at * 10: at for at in (0, 5, 130, 205, 299, 401, 599)}

    async def look(at: int) -> int:
        for _ in range(4):
            try:
                return finish_now(store.lookup.offset_by_time(queue, at))
            except NotReady as error:
                await error.wait()
        raise AssertionError("the queue is damaged again after each repair")

    async with trio.open_nursery() as nursery:
        if run:
            await nursery.start(store.upkeep.run)
        assert {at: await look(at) for at in wanted} == wanted
        nursery.cancel_scope.cancel()
    store.crash()


async def test_repairs_run_concurrently_with_sends_and_saves(autojump_clock: MockClock) -> None:
    disk = await filled()
    damage(disk, (COUNT - 1) * ENTRY_BYTES)
    store = await open_on(disk)
    queue = store.queue("T", 0)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        for number in range(60):
            send(store, "T", f"more {number}")
            if not number % 7:
                await trio.sleep(1.5)
                store.upkeep.repairs.want(queue)
        result = await store.readers.read_far(queue, COUNT - 1, 1, 10**6)
        assert bodies(result.pieces) == WANTED[-1:]
        await trio.sleep(5)
        nursery.cancel_scope.cancel()
    store.flusher.flush_now()
    await store.close()
    store = await open_on(disk)
    assert drain(store, store.queue("T", 0)) == WANTED + [b"more %d" % number for number in range(60)]
    assert store.readers.damaged_records == 0
    store.crash()


async def test_a_record_that_the_log_lost_too_leaves_a_hole() -> None:
    disk = await filled()
    store = await open_on(disk)
    position = store.queues.position_at(store.queue("T", 0), 4)
    await store.close()
    (log,) = (path for path in disk.files if "/commitlog/" in path)
    damage(disk, position + 88, path=log)
    damage(disk, 5 * ENTRY_BYTES)
    store = await open_on(disk)
    assert drain(store, store.queue("T", 0)) == WANTED[:4] + WANTED[5:]
    send(store, "T", "next")
    store.flusher.flush_now()
    assert drain(store, store.queue("T", 0))[-1] == b"next"
    await store.close()
    store = await open_on(disk)
    assert drain(store, store.queue("T", 0)) == [*WANTED[:4], *WANTED[5:], b"next"]
    store.crash()


@pytest.mark.parametrize("name", ["00000000000000000123", "99999999999999999999", "٣", "²", "x", "-1", "007"])
@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("journal", [True, False])
async def test_stray_names_among_the_queues_stop_no_start(name: str, killed: bool, journal: bool) -> None:
    disk = await filled()
    if killed:
        (await open_on(disk)).crash()
    disk.make_directory(f"/data/consumequeue/T/{name}")
    disk.make_directory(f"/data/consumequeue/{name}/{name}")
    disk.close(disk.open(f"/data/consumequeue/T/0/{name}x", create=True))
    disk.close(disk.open(f"/data/consumequeue/{name}x", create=True))
    if not journal:
        for path in [path for path in disk.files if path.startswith("/data/queues.")]:
            disk.unlink(path)
    store = await open_on(disk)
    assert drain(store, store.queue("T", 0)) == WANTED
    assert store.queues.find("T", 123) is None
    send(store, "T", "next")
    await store.close()


async def test_few_blocks_stay_in_memory() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "T", *(str(number) for number in range(600)))
    await store.close()
    store = await open_on(disk)
    assert len(drain(store, store.queue("T", 0))) == 600
    assert len(store.queues._cache) == BLOCKS_CACHED
    store.crash()


async def test_no_state_of_blocks_that_retention_removed_is_kept() -> None:
    store = await open_on(FakeDisk())
    send(store, "T", *(f"{number}" for number in range(200)))
    store.flusher.flush_now()
    await store.upkeep.checkpointer.checkpoint()
    queue = store.queue("T", 0)
    before = len(queue.blocks[1])
    assert before > 4
    position = store.queues.position_at(queue, 150)
    assert store.queues.advance_first(queue, position)
    base, crcs = queue.blocks
    assert queue.first_offset == 150
    assert base == 150 // store.queues.files.block_entries
    assert len(crcs) == before - base
    store.crash()


async def test_a_queue_file_that_a_crash_left_short_gets_its_full_size() -> None:
    """RocketMQ takes over no queue with a short file."""
    disk = await filled()
    full = len(disk.files[PATH].data)
    for data in (disk.files[PATH].data, disk.files[PATH].stable):
        del data[COUNT * ENTRY_BYTES :]
    store = await open_on(disk)
    send(store, "T", "more")
    await store.close()
    assert len(disk.files[PATH].data) == full
    store = await open_on(disk)
    assert drain(store, store.queue("T", 0)) == [*WANTED, b"more"]
    store.crash()
