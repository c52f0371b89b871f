"""Retention removes nothing that a keeper needs, and a refusal of appends says who needs it."""

import logging
from errno import ENOSPC

import pytest
from tests.store.conftest import OpenStore

from martlet.errors import Refused
from martlet.store import Store
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import message, small_config

CONFIG = small_config(disk_used_ratio_max=0.7, disk_clean_ratio=0.8, disk_full_ratio=0.9)


class Keeping:
    """A keeper that releases up to *most*; ``asked`` are the ends for which it was asked."""

    def __init__(self, most: int, reason: str = "it has no copy") -> None:
        self.most = most
        self.reason = reason
        self.released = 0
        self.asked: list[int] = []

    async def release(self, end: int) -> None:
        self.asked.append(end)
        self.released = max(self.released, min(end, self.most))


async def filled(open_store: OpenStore, used: float) -> tuple[Store, FakeDisk]:
    """A store with many segments on a disk that is too full to keep them."""
    disk = FakeDisk()
    store = await open_store(CONFIG, disk)
    while len(store.segments.items) < 30:
        store.writer.append(message(b"x" * 500), 0)
        store.committer.commit()
    store.flusher.flush_now()
    await store.upkeep.checkpointer.checkpoint()
    disk.used_ratio = used
    store.upkeep.retention.space.measure()
    return store, disk


async def look(store: Store) -> int:
    """Let retention do its work; return where the log begins."""
    await store.upkeep.retention.release()
    store.upkeep.retention.look()
    return store.first_position


async def test_the_lowest_of_all_keepers_is_the_floor(open_store: OpenStore) -> None:
    store, _ = await filled(open_store, 0.85)
    ends = [segment.end for segment in store.segments.items]
    for most in (ends[8], ends[3], ends[5]):
        store.upkeep.retention.add_keeper(Keeping(most))
    assert await look(store) == ends[3]
    assert await look(store) == ends[3]


async def test_a_keeper_is_asked_before_those_added_earlier_which_keep_no_more_than_needed(
    open_store: OpenStore,
) -> None:
    store, _ = await filled(open_store, 0.85)
    ends = [segment.end for segment in store.segments.items]
    first, second = Keeping(1 << 40), Keeping(ends[2])
    store.upkeep.retention.add_keeper(first)
    store.upkeep.retention.add_keeper(second)
    assert await look(store) == ends[2]
    assert (first.asked, second.asked) == ([ends[2]], [ends[9]])


async def test_early_removal_is_no_loss_where_consumers_read_copies(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = await filled(open_store, 0.88)
    caplog.set_level(logging.INFO)
    store.upkeep.retention.add_keeper(Keeping(1 << 40), "cold tier 's3'")
    store.upkeep.retention.add_keeper(Keeping(1 << 40))
    assert await look(store) > 0
    (record,) = [each for each in caplog.records if "file_reserved_hours" in each.getMessage()]
    assert record.levelno == logging.INFO
    assert "consumers read messages stored until 20" in record.getMessage()
    assert record.getMessage().endswith("from cold tier 's3'")


async def test_a_keeper_may_refuse_for_ever_and_the_refusal_of_appends_says_why(open_store: OpenStore) -> None:
    store, disk = await filled(open_store, 0.95)
    keeping = Keeping(0, "cold tier 's3' is behind; its last upload failed: 503 Slow Down")
    store.upkeep.retention.add_keeper(keeping)
    for _ in range(30):
        assert await look(store) == 0
    text = (
        r"95% full, above the limit of 90% \(store\.disk_full_ratio\); 0\.1 MiB of old records may not be removed yet: "
        r"cold tier 's3' is behind; its last upload failed: 503 Slow Down; writes resume automatically"
    )
    with pytest.raises(Refused, match=text):
        store.writer.append(message(b"y"), 0)
    keeping.reason = "cold tier 's3' is behind; no route to host"
    await look(store)
    with pytest.raises(Refused, match="no route to host"):
        store.writer.append(message(b"y"), 0)
    keeping.most = 1 << 40
    assert await look(store) > 0
    with pytest.raises(Refused) as refused:
        store.writer.append(message(b"y"), 0)
    assert "may not be removed" not in str(refused.value)
    disk.used_ratio = 0.5
    await look(store)
    store.writer.append(message(b"y"), 0)


async def test_a_full_disk_says_it_too(open_store: OpenStore) -> None:
    store, disk = await filled(open_store, 0.85)
    store.upkeep.retention.add_keeper(Keeping(0, "cold tier 's3' is behind"))
    await look(store)
    store.writer.append(message(b"y"), 0)
    disk.fail_next("write", ENOSPC)
    with pytest.raises(Refused, match=r"is full .*; 0\.1 MiB of old records may not be removed yet: cold tier 's3'"):
        store.committer.commit()


async def test_nothing_is_kept_while_nothing_has_to_be_removed(open_store: OpenStore) -> None:
    store, _ = await filled(open_store, 0.5)
    keeping = Keeping(0)
    store.upkeep.retention.add_keeper(keeping)
    await look(store)
    assert (keeping.asked, store.admission.kept) == ([0], "")
