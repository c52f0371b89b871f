"""The work of the key index is spread over commits and done a little at a time."""

import tracemalloc
from pathlib import Path

from martlet.store import Store, StoreConfig
from martlet.store.indexer import INDEX_HELP, UNINDEXED_MAX
from martlet.testing.stores import ManualClock, message


async def test_no_commit_pays_for_the_whole_backlog(tmp_path: Path) -> None:
    """Nothing runs in the background here, so only commits index."""
    store = await Store.open(tmp_path, StoreConfig(segment_bytes=1 << 24), ManualClock())
    keys = store.indexer.keys
    assert keys is not None

    def commit(count: int) -> None:
        for number in range(count):
            store.append(message(b"x", unique=f"K{number}"), 0)
        store.commit()

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
    store.append(message(b"x", unique="K"), 0)
    store.commit()
    tracemalloc.start()
    try:
        store.indexer.drain_now()
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    keys = store.indexer.keys
    assert keys is not None
    assert keys.slots == 5_000_000
    assert keys.active is not None
    assert most_bytes < 1 << 20
    await store.close()


async def test_messages_without_keys_wait_for_the_index_only_behind_others(tmp_path: Path) -> None:
    store = await Store.open(tmp_path, StoreConfig(segment_bytes=1 << 20), ManualClock())
    keys = store.indexer.keys
    assert keys is not None
    for unique, waiting in (("", 0), ("K1", 1), ("", 2)):
        store.append(message(b"x", unique=unique), 0)
        store.commit()
        assert len(keys.pending) == waiting
        assert waiting or keys.position == store.written
    store.indexer.drain_now()
    assert keys.position == store.written
    await store.close()
