"""What the store does to files in the background is done by a thread, in pieces: the event loop never waits for it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import trio
import trio.testing
from tests.cold_disk import cold_disk
from tests.store.conftest import OpenStore
from trio.testing import MockClock

from martlet.records.layout import ENTRY_BYTES
from martlet.runtime.turns import Turns
from martlet.store import Disk, RealDisk, Store
from martlet.testing.stores import ManualClock, drain, message, small_config

QUEUES = 200
T = TypeVar("T")


class WatchedDisk:
    """The real disk; remembers which thread made which call, and how many bytes were written by each."""

    def __init__(self) -> None:
        self.disk = RealDisk()
        self.calls: list[tuple[str, object, int, int]] = []  # name, thread, bytes
        self.may_go_on = trio.Event()
        self.may_go_on.set()

    async def off_loop(self, work: Callable[[], T]) -> T:
        await self.may_go_on.wait()
        return await self.disk.off_loop(work)

    def __getattr__(self, name: str) -> object:
        found = getattr(self.disk, name)
        if name in ("open", "write", "make_directory", "truncate"):
            return lambda *args, **more: self.call(name, found, *args, **more)
        return found

    def call(self, name: str, found: Any, *args: Any, **more: Any) -> object:
        size = max((len(each) for each in args if isinstance(each, bytes | memoryview)), default=0)
        self.calls.append((name, args[0], threading.get_ident(), size))
        return found(*args, **more)


async def test_files_of_new_queues_are_made_by_a_thread(open_store: OpenStore) -> None:
    disk = WatchedDisk()
    store = await open_store(small_config(flush="async", segment_bytes=1 << 20), cast(Disk, disk))
    for number in range(QUEUES):
        store.writer.append(message(b"%d" % number), number)
    store.committer.commit()
    store.flusher.flush_now()
    disk.calls.clear()
    await store.upkeep.checkpointer.checkpoint()
    loop = threading.get_ident()
    made = [path for name, path, *_ in disk.calls if name == "make_directory"]
    assert len([path for path in made if str(path).rpartition("/")[2].isdecimal()]) == QUEUES
    on_loop = {(name, path) for name, path, thread, _ in disk.calls if thread == loop}
    assert not on_loop, "the event loop waited for the disk"
    assert [drain(store, store.queue("T", number)) for number in range(QUEUES)] == [[b"%d" % n] for n in range(QUEUES)]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_flush_during_another_includes_the_newest_writes(
    open_store: OpenStore, nursery: trio.Nursery, fails: bool
) -> None:
    disk = WatchedDisk()
    store = await open_store(small_config(flush="async"), cast(Disk, disk))
    disk.may_go_on = trio.Event()
    store.writer.append(message(b"first"), 0)
    store.committer.commit()
    nursery.start_soon(store.flusher.flush)
    await trio.testing.wait_all_tasks_blocked()
    store.writer.append(message(b"second"), 0)
    store.committer.commit()
    ended = trio.Event()

    async def flush() -> None:
        await store.flusher.flush()
        ended.set()

    nursery.start_soon(flush)
    await trio.testing.wait_all_tasks_blocked()
    assert not ended.is_set()
    if fails:
        store.flusher.fail(OSError(5, "Input/output error"))
    disk.may_go_on.set()
    await ended.wait()
    assert (store.durable >= store.written) is not fails


async def test_a_new_generation_of_the_journal_is_written_in_pieces(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined, those of 80,000 queues would keep the interpreter's lock from the event loop for 12 ms."""
    monkeypatch.setattr("martlet.store.upkeep.checkpointer.JOURNAL_BATCH", 8)
    disk = WatchedDisk()
    store = await open_store(small_config(flush="async", segment_bytes=1 << 20), cast(Disk, disk))
    for number in range(QUEUES):
        store.writer.append(message(b"%d" % number), number)
    store.committer.commit()
    store.flusher.flush_now()
    store.upkeep.checkpointer.journal.abandon()
    written: list[int] = []
    real = store.segments.files.write

    def write(path: str, data: memoryview, at: int) -> None:
        if "/queues." in path:
            written.append(len(data))
        real(path, data, at)

    monkeypatch.setattr(type(store.segments.files), "write", lambda self, path, data, at: write(path, data, at))
    await store.upkeep.checkpointer.checkpoint()
    assert len(written) == QUEUES // 8
    assert max(written) < 8 * 100
    await store.close()
    store = await open_store(small_config(flush="async", segment_bytes=1 << 20))
    assert [store.queue("T", number).next_offset for number in range(QUEUES)] == [1] * QUEUES


async def test_a_store_that_closes_waits_for_the_thread_that_writes(open_store: OpenStore) -> None:
    disk, closed = WatchedDisk(), list[bool]()
    config = small_config(flush="async", segment_bytes=1 << 20)
    store = await open_store(config, cast(Disk, disk))
    for number in range(40):
        store.writer.append(message(b"%d" % number), number % 8)
    store.committer.commit()
    store.flusher.flush_now()
    disk.may_go_on = trio.Event()

    async def close() -> None:
        closed.append(await store.close())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.upkeep.checkpointer.checkpoint)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(close)
        await trio.testing.wait_all_tasks_blocked()
        early = list(closed)
        disk.may_go_on.set()
    assert (early, closed) == ([], [True])
    assert [queue.saved for queue in store.queues.all()] == [5] * 8
    await store.upkeep.checkpointer.checkpoint()
    store = await open_store(config)
    assert [len(drain(store, store.queue("T", number))) for number in range(8)] == [5] * 8


async def test_reads_and_lookups_wait_for_the_disk_off_the_event_loop(autojump_clock: MockClock) -> None:
    (cold, disk), clock = cold_disk(), ManualClock()
    config = small_config(flush="async", segment_bytes=1 << 20, cache_bytes=0, queue_file_entries=10_000)
    store = await Store.open(Path("/data"), config, clock, disk)
    for number in range(2500):
        store.writer.append(message(b"%d" % number, keys=f"K{number}", unique=f"U{number}"), 0)
        clock.ms += 10
        store.committer.commit()
    await store.close()
    store = await Store.open(Path("/data"), config, clock, disk)
    queue, turns = store.queue("T", 0), Turns(cold.off_loop)
    cold.on_loop = cold.off = 0
    assert store.readers.read_near(queue, 1200, 1, 1000) is None
    assert (await store.readers.read_far(queue, 1200, 1, 1000)).count == 1
    position = await turns.finish(store.lookup.position_at(queue, 5))
    assert await turns.finish(store.lookup.store_ms_at(queue, 2499)) == clock.ms - 10
    earliest_ms = await turns.finish(store.lookup.earliest_store_ms())
    assert await turns.finish(store.lookup.earliest_store_ms(queue)) == earliest_ms
    assert await turns.finish(store.lookup.offset_by_time(queue, earliest_ms + 7000)) == 700
    assert len(await turns.finish(store.lookup.entries(queue, 1900, 10))) == 10 * ENTRY_BYTES
    assert len((await turns.finish(store.lookup.query_keys("T", b"K3", 1, 0, 1 << 62))).records) == 1
    assert await store.lookup.record_far(position) is not None
    assert cold.on_loop == 0, "the event loop waited for the disk"
    assert cold.off > 15
    store.crash()
