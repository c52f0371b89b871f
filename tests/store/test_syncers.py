"""Syncs of real files by a thread, with and without an event loop that watches for their end."""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

import pytest
import trio
import trio.testing

from martlet.errors import StoreFailed
from martlet.store import Store
from martlet.store.disk.syncers import OffLoopSyncer, SyncThread
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import ManualClock, message, small_config


class Watcher:
    """Calls nothing by itself."""

    def __init__(self) -> None:
        self.calls: dict[int, Callable[[], None]] = {}

    def watch_call(self, fd: int, call: Callable[[], None]) -> None:
        self.calls[fd] = call

    def unwatch_call(self, fd: int) -> None:
        del self.calls[fd]


async def test_a_failed_sync_names_its_file(tmp_path: Path) -> None:
    unsyncable, other_end = os.pipe()
    thread = SyncThread()
    try:
        with (tmp_path / "file").open("wb") as file:
            thread.begin([(file.fileno(), "good"), (unsyncable, "bad"), (file.fileno(), "later")], str(tmp_path))
            await thread.finished()
            with pytest.raises(OSError, match="bad") as failure:
                thread.take_result()
            assert failure.value.errno == errno.EINVAL
            thread.begin([(file.fileno(), "good")], str(tmp_path))
            await thread.finished()
            thread.take_result()
    finally:
        thread.close()
        os.close(unsyncable)
        os.close(other_end)


async def test_a_watcher_ends_syncs_until_it_ends_itself(tmp_path: Path, clock: ManualClock) -> None:
    store, watcher = await Store.open(tmp_path, small_config(flush="sync"), clock), Watcher()
    flusher = store.flusher
    flusher.sync.watch(watcher)
    assert not watcher.calls, "nothing flushes yet"

    async def sent() -> int:
        end = store.writer.append(message(b"x"), 0).end
        store.committer.commit()
        await trio.testing.wait_all_tasks_blocked()
        return end

    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        await trio.testing.wait_all_tasks_blocked()
        ((fd, call),) = watcher.calls.items()
        end = await sent()
        await trio.lowlevel.wait_readable(fd)
        await trio.testing.wait_all_tasks_blocked()
        assert store.durable < end, "a task of trio's has ended the sync"
        call()
        assert store.durable == end

        end = await sent()  # the watcher ends in the middle of a sync
        flusher.sync.unwatch()
        assert not watcher.calls
        await flusher.wait_durable(end)
        await flusher.wait_durable(await sent())

        flusher.sync.watch(watcher)  # the flusher ends in the middle of a sync, and finishes it
        end = await sent()
        nursery.cancel_scope.cancel()
    assert store.durable == end
    assert not watcher.calls
    await store.close()


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("is_watched", [False, True])
async def test_a_failure_ends_the_flusher(
    tmp_path: Path, clock: ManualClock, *, is_watched: bool, is_busy: bool
) -> None:
    store = await Store.open(tmp_path, small_config(flush="sync"), clock)
    if is_watched:
        store.flusher.sync.watch(Watcher())
    with pytest.RaisesGroup(StoreFailed):
        async with trio.open_nursery() as nursery:
            await nursery.start(store.upkeep.run)
            await trio.testing.wait_all_tasks_blocked()
            if is_busy:
                store.writer.append(message(b"x"), 0)
                store.committer.commit()
            store.flusher.fail(OSError(errno.EIO, os.strerror(errno.EIO)))
    await store.close()


@final
class CheckedSyncer:
    """A syncer that must not be closed while a sync is under way, as the thread's must not."""

    results_fd = -1

    def __init__(self, disk: FakeDisk) -> None:
        self._syncer = OffLoopSyncer(disk)
        self._is_under_way = False

    def begin(self, files: Sequence[tuple[int, str]], directory: str) -> None:
        self._is_under_way = True
        self._syncer.begin(files, directory)

    async def finished(self) -> None:
        await self._syncer.finished()

    def take_result(self) -> None:
        self._is_under_way = False
        self._syncer.take_result()

    def close(self) -> None:
        assert not self._is_under_way


@pytest.mark.parametrize("flush", ["sync", "async"])
async def test_flushes_go_on_while_the_flusher_starts_and_ends(
    flush: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeDisk, "syncer", lambda disk: CheckedSyncer(disk))
    store = await Store.open(Path("/data"), small_config(flush=flush, flush_interval_ms=1), clock, FakeDisk())

    async def flush_often(has_ended: trio.Event) -> None:
        while not has_ended.is_set():
            end = store.writer.append(message(b"x"), 0).end
            store.committer.commit()
            await store.flusher.flush()
            assert store.durable >= end
            await trio.lowlevel.checkpoint()

    for turns in range(12):
        async with trio.open_nursery() as nursery:
            has_ended = trio.Event()
            for _ in range(3):
                nursery.start_soon(flush_often, has_ended)
            async with trio.open_nursery() as running:
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                running.start_soon(store.upkeep.run)
                for _ in range(30):
                    await trio.lowlevel.checkpoint()
                running.cancel_scope.cancel()
            has_ended.set()
    store.crash()


async def test_a_flush_in_this_thread_needs_no_sync_under_way(clock: ManualClock) -> None:
    store = await Store.open(Path("/data"), small_config(flush="sync"), clock, FakeDisk())
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        await trio.testing.wait_all_tasks_blocked()
        end = store.writer.append(message(b"x"), 0).end
        store.committer.commit()
        assert store.flusher.sync.is_under_way
        store.flusher.flush_now()
        assert store.durable == end
        await trio.testing.wait_all_tasks_blocked()
        assert (store.durable, store.flusher.fsyncs) == (end, 1)
        nursery.cancel_scope.cancel()
    store.crash()


async def test_what_was_written_after_a_flush_in_this_thread_is_flushed_too(clock: ManualClock) -> None:
    store = await Store.open(Path("/data"), small_config(flush="sync"), clock, FakeDisk())
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        await trio.testing.wait_all_tasks_blocked()
        for is_blocking in True, False:
            end = store.writer.append(message(b"x"), 0).end
            store.committer.commit()
            if is_blocking:
                store.flusher.flush_now()
        assert store.flusher.sync.is_under_way
        assert store.durable < end
        await trio.testing.wait_all_tasks_blocked()
        assert store.durable == end
        nursery.cancel_scope.cancel()
    store.crash()


def test_threads_end_with_their_stores(tmp_path: Path, clock: ManualClock) -> None:
    async def opened_and_closed() -> None:
        store = await Store.open(tmp_path, small_config(), clock)
        async with trio.open_nursery() as nursery:
            await nursery.start(store.upkeep.run)
            nursery.cancel_scope.cancel()
        await store.close()

    fds = set(os.listdir("/proc/self/fd"))
    trio.run(opened_and_closed)
    assert not [thread for thread in threading.enumerate() if thread.name == "flusher"]
    assert set(os.listdir("/proc/self/fd")) == fds
