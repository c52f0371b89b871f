"""Records that nobody waits for: early readers have them when written, everybody else when they are durable."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.errors import Refused
from martlet.message import Message
from martlet.store import Queue, Store
from martlet.testing.clock import TrioClock
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import small_config

INTERVAL_S = 10.0


async def opened(disk: FakeDisk, flush: str = "sync") -> Store:
    config = small_config(flush=flush, flush_interval_ms=int(INTERVAL_S * 1000))
    return await Store.open(Path("/data"), config, TrioClock(), disk)


def put(store: Store, topic: str = "T", *, awaited: bool = False) -> int:
    """Append a message without a commit; return its end."""
    end = store.writer.append(Message(topic, b"x"), 0).end
    if not awaited:
        store.committer.note_unawaited(topic, 1, end)
    return end


def commit(store: Store, *, awaited: bool = False) -> int:
    end = put(store, awaited=awaited)
    store.committer.commit()
    return end


def ends(store: Store) -> tuple[int, int]:
    """Up to which offset early readers and all others read."""
    queue = store.queue("T", 0)
    return store.early_readers.end_offset(queue), store.readers.end_offset(queue)


async def test_early_readers_read_up_to_the_first_record_for_which_somebody_waits() -> None:
    store = await opened(FakeDisk())
    commit(store)
    commit(store)
    assert ends(store) == (2, 0)
    end = commit(store, awaited=True)
    commit(store)
    assert ends(store) == (2, 0)
    store.flusher.flush_now()
    assert ends(store) == (4, 4)
    assert store.readable > end


async def test_a_flush_lets_early_readers_go_on_behind_what_it_made_durable(autojump_clock: MockClock) -> None:
    store, calls = await opened(FakeDisk()), list[int]()
    queue = store.queue("T", 0)
    store.readable_end.early.watch(queue, lambda queue: calls.append(store.early_readers.end_offset(queue)))
    commit(store, awaited=True)
    disk, off_loop = store.disk, store.disk.off_loop

    async def slowly(work):  # type: ignore[no-untyped-def]
        await trio.sleep(1)
        return await off_loop(work)

    disk.off_loop = slowly  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.flusher.flush)
        await wait_all_tasks_blocked()
        commit(store)  # this flush does not include it
        assert ends(store) == (0, 0)
        assert not calls
    assert ends(store) == (2, 1)
    assert calls == [2]


@pytest.mark.parametrize("mixed", ["before", "after"])
async def test_a_commit_with_one_record_for_which_somebody_waits_is_awaited_as_a_whole(mixed: str) -> None:
    store = await opened(FakeDisk())
    for awaited in (True, False) if mixed == "before" else (False, True):
        put(store, awaited=awaited)
    store.committer.commit()
    assert ends(store) == (0, 0)


async def test_with_async_flush_everybody_reads_what_is_written() -> None:
    store = await opened(FakeDisk(), "async")
    commit(store)
    assert ends(store) == (1, 1)
    assert not store.delivers_early


async def test_a_refused_commit_leaves_no_note_behind() -> None:
    disk = FakeDisk()
    store = await opened(disk)
    commit(store, awaited=True)
    store.flusher.flush_now()
    put(store)
    disk.free_bytes = 0
    disk.fail_next("write", 28)
    with pytest.raises(Refused):
        store.committer.commit()
    assert ends(store) == (1, 1)
    disk.free_bytes = None
    store.admission.disk_full = False
    store.admission.refusal = ""
    commit(store, awaited=True)
    assert ends(store) == (1, 1)
    store.flusher.flush_now()
    assert ends(store) == (2, 2)


async def test_a_component_that_must_confirm_records_confirms_these_too() -> None:
    store, confirmed = await opened(FakeDisk()), [0]
    store.readable_end.confirmed.append(lambda: confirmed[0])
    end = commit(store)
    assert ends(store) == (0, 0)
    store.flusher.flush_now()
    assert ends(store) == (0, 0)
    confirmed[0] = end
    store.readable_end.update()
    assert ends(store) == (1, 1)


async def running(store: Store, nursery: trio.Nursery) -> None:
    await nursery.start(store.upkeep.run)


async def test_what_nobody_waits_for_is_durable_after_the_interval(autojump_clock: MockClock) -> None:
    store = await opened(FakeDisk())
    async with trio.open_nursery() as nursery:
        await running(store, nursery)
        began = trio.current_time()
        for _ in range(5):
            commit(store)
            await trio.sleep(1)
        assert store.flusher.fsyncs == 0
        await trio.sleep_until(began + INTERVAL_S + 1)
        assert (store.flusher.fsyncs, ends(store)) == (1, (5, 5))
        await trio.sleep(10 * INTERVAL_S)
        assert store.flusher.fsyncs == 1
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "how", ["watcher", "later watcher", "wanted", "wait_flushed", "wait_flushed before", "a record"]
)
async def test_somebody_who_waits_has_it_flushed_at_once(autojump_clock: MockClock, how: str) -> None:
    store, seen = await opened(FakeDisk()), list[Queue]()
    queue = store.queue("T", 0)
    async with trio.open_nursery() as nursery:
        await running(store, nursery)
        began = trio.current_time()
        if how == "watcher":
            queue.watchers = [seen.append]
        if how == "wait_flushed before":
            end = put(store)
            nursery.start_soon(store.flusher.wait_flushed, end)
            await wait_all_tasks_blocked()
            store.committer.commit()
        else:
            end = commit(store)
        await wait_all_tasks_blocked()
        if how == "wanted":
            store.flusher.want_durable(end)
        elif how == "wait_flushed":
            await store.flusher.wait_flushed(end)
        elif how == "a record":
            commit(store, awaited=True)
        elif how == "later watcher":
            queue.watchers = [seen.append]
            commit(store)
        await wait_all_tasks_blocked()
        assert store.durable == store.written
        assert trio.current_time() == began
        nursery.cancel_scope.cancel()
    assert bool(seen) == ("watcher" in how)
