"""What the store does to files in the background is done by a thread, in pieces: the event loop never waits for it."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest
import trio
import trio.testing
from tests.store.conftest import OpenStore

from martlet.store import Disk, RealDisk
from martlet.testing.stores import drain, message, small_config

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
        store.append(message(b"%d" % number), number)
    store.commit()
    store.flusher.flush_now()
    disk.calls.clear()
    await store.checkpoint()
    loop = threading.get_ident()
    made = [path for name, path, *_ in disk.calls if name == "make_directory"]
    assert len([path for path in made if str(path).rpartition("/")[2].isdecimal()]) == QUEUES
    on_loop = {(name, path) for name, path, thread, _ in disk.calls if thread == loop}
    assert not on_loop, "the event loop waited for the disk"
    assert [drain(store, store.queue("T", number)) for number in range(QUEUES)] == [[b"%d" % n] for n in range(QUEUES)]


async def test_a_new_generation_of_the_journal_is_written_in_pieces(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined, those of 80,000 queues would keep the interpreter's lock from the event loop for 12 ms."""
    monkeypatch.setattr("martlet.store.checkpointer.JOURNAL_BATCH", 8)
    disk = WatchedDisk()
    store = await open_store(small_config(flush="async", segment_bytes=1 << 20), cast(Disk, disk))
    for number in range(QUEUES):
        store.append(message(b"%d" % number), number)
    store.commit()
    store.flusher.flush_now()
    store.checkpointer.journal.abandon()
    written: list[int] = []
    real = store.files.write

    def write(path: str, data: memoryview, at: int) -> None:
        if "/queues." in path:
            written.append(len(data))
        real(path, data, at)

    monkeypatch.setattr(type(store.files), "write", lambda self, path, data, at: write(path, data, at))
    await store.checkpoint()
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
        store.append(message(b"%d" % number), number % 8)
    store.commit()
    store.flusher.flush_now()
    disk.may_go_on = trio.Event()

    async def close() -> None:
        closed.append(await store.close())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.checkpoint)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(close)
        await trio.testing.wait_all_tasks_blocked()
        early = list(closed)
        disk.may_go_on.set()
    assert (early, closed) == ([], [True])
    assert [queue.saved for queue in store.queues.all()] == [5] * 8
    await store.checkpoint()
    store = await open_store(config)
    assert [len(drain(store, store.queue("T", number))) for number in range(8)] == [5] * 8
