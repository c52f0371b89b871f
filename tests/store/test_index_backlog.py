"""A backlog of the key index is worked off a little with each commit, never at once."""

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
