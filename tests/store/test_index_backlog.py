"""The work of the key index is spread over commits and done a little at a time."""

import tracemalloc
from pathlib import Path

import pytest
import trio

from martlet.errors import NotReady
from martlet.message import Message
from martlet.runtime.steps import finish_now
from martlet.store import Store, StoreConfig
from martlet.store.keys.usual import SHORT_BYTES
from martlet.store.recovery.indexer import INDEX_BATCH, INDEX_HELP, INDEX_HELP_MAX, UNINDEXED_MAX
from martlet.testing.stores import ManualClock, message


async def test_no_commit_pays_for_the_whole_backlog(tmp_path: Path) -> None:
    """Nothing runs in the background here, so only commits index."""
    store = await Store.open(tmp_path, StoreConfig(segment_bytes=1 << 24), ManualClock())
    keys = store.upkeep.indexer.keys
    assert keys is not None

    def commit(count: int) -> None:
        for number in range(count):
            store.writer.append(message(b"x", unique=f"K{number}"), 0)
        store.committer.commit()

    commit(UNINDEXED_MAX)
    assert len(keys.pending) == UNINDEXED_MAX
    for count in (1, 10, 500):
        while len(keys.pending) + count <= UNINDEXED_MAX:
            commit(1)
        before = len(keys.pending)
        commit(count)
        assert len(keys.pending) == before - INDEX_HELP, "as many as it added, and a few more"
    await store.close()


async def test_a_new_file_does_not_clear_its_slots_at_once(tmp_path: Path) -> None:
    """5 million slots, as RocketMQ has: clearing them keeps the event loop for 10 ms."""
    store = await Store.open(tmp_path, StoreConfig(segment_bytes=1 << 20), ManualClock())
    store.writer.append(message(b"x", unique="K"), 0)
    store.committer.commit()
    tracemalloc.start()
    try:
        store.upkeep.indexer.drain_now()
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    keys = store.upkeep.indexer.keys
    assert keys is not None
    assert keys.files.slots == 5_000_000
    assert keys.active.item is not None
    assert most_bytes < 1 << 20
    await store.close()


async def test_messages_without_keys_wait_for_the_index_only_behind_others(tmp_path: Path) -> None:
    store = await Store.open(tmp_path, StoreConfig(segment_bytes=1 << 20), ManualClock())
    keys = store.upkeep.indexer.keys
    assert keys is not None
    for unique, waiting in (("", 0), ("K1", 1), ("", 2)):
        store.writer.append(message(b"x", unique=unique), 0)
        store.committer.commit()
        assert len(keys.pending) == waiting
        assert waiting or keys.position == store.written
    store.upkeep.indexer.drain_now()
    assert keys.position == store.written
    await store.close()


MANY = 16_000


def with_keys(number: int, count: int = MANY) -> bytes:
    """Properties with *count* short keys of message *number*."""
    return (
        f"KEYS\x01{' '.join(str(each % 10) for each in range(count))} own{number}\x02UNIQ_KEY\x01u{number}\x02".encode()
    )


def put(store: Store, number: int, count: int = MANY) -> None:
    store.writer.append(Message("T", b"x", with_keys(number, count)), 0)


def positions(store: Store, key: str) -> list[bytes]:
    return finish_now(store.lookup.query_keys("T", key.encode(), 10, 0, 1 << 62)).records


@pytest.mark.parametrize("count", [10, 300, MANY])
async def test_a_slice_counts_keys_and_not_messages(tmp_path: Path, count: int) -> None:
    store = await Store.open(tmp_path, StoreConfig(segment_bytes=1 << 24), ManualClock())
    keys = store.upkeep.indexer.keys
    assert keys is not None
    for number in range(20):
        put(store, number, count)
    store.committer.commit()
    steps, before = [0], keys.files.total()
    while keys.drain(INDEX_BATCH):
        steps.append(keys.files.total() - before)
        before = keys.files.total()
    assert max(steps) <= INDEX_BATCH + SHORT_BYTES // 2
    assert keys.files.total() == 20 * (count + 2)
    assert (keys.pending_keys, keys.pending_bytes, keys.position) == (0, 0, store.written)
    store.committer.commit()
    await store.flusher.flush()
    assert len(positions(store, "own7")) == len(positions(store, "u7")) == 1
    await store.close()


async def test_a_commit_indexes_no_more_keys_than_a_turn_allows(tmp_path: Path) -> None:
    store = await Store.open(tmp_path, StoreConfig(segment_bytes=1 << 24), ManualClock())
    keys = store.upkeep.indexer.keys
    assert keys is not None
    for number in range(40):
        put(store, number)
        before = keys.files.total()
        store.committer.commit()
        assert keys.files.total() - before <= INDEX_HELP_MAX + SHORT_BYTES // 2
    await store.close()


async def test_with_too_many_keys_the_index_follows_the_log_a_little_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("martlet.store.recovery.indexer.WAITING_BYTES_MAX", 1 << 19)
    store = await Store.open(tmp_path, StoreConfig(segment_bytes=1 << 24), ManualClock())
    keys = store.upkeep.indexer.keys
    assert keys is not None
    for number in range(30):
        put(store, number)
        store.committer.commit()
    assert store.upkeep.indexer.is_complete is False
    assert "have more keys than can be indexed at once" in caplog.text
    assert keys.pending_bytes == 0, "memory is limited"
    with pytest.raises(NotReady):
        positions(store, "u3")
    most = 0
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        before = keys.files.total()
        while keys.position < store.written:
            await trio.lowlevel.checkpoint()
            most, before = max(most, keys.files.total() - before), keys.files.total()
        await store.upkeep.indexer.wait_complete()
        nursery.cancel_scope.cancel()
    assert most <= INDEX_BATCH + SHORT_BYTES // 2
    assert [len(positions(store, f"own{number}")) for number in range(30)] == [1] * 30
    put(store, 30)
    store.committer.commit()
    store.upkeep.indexer.drain_now()
    total = keys.files.total()
    await store.close()
    again = await Store.open(tmp_path, StoreConfig(segment_bytes=1 << 24), ManualClock())
    assert again.upkeep.indexer.keys is not None
    assert again.upkeep.indexer.keys.files.total() == total >= 31 * (MANY + 2)
    await again.close()
