"""Retention removes the segments of half messages whose transactions are pending: copies take their place."""

from contextlib import suppress
from errno import EIO, ENOSPC
from functools import partial
from typing import Any

import pytest
from tests.cold_disk import cold_disk
from tests.state.power_cuts import Workload, changes_after, cut_again
from tests.tx.talk import GROUP, TOPIC, Sellers, check_times, flushing, half, sellers

from martlet.contracts import HalfMessage
from martlet.errors import Refused, StoreError
from martlet.message import Message, Placed, decode_properties
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import HOST, ManualClock
from martlet_tx.config import TxConfig
from martlet_tx.formats import PARK_TOPIC
from martlet_tx.journal_codec import checked_note

CONFIG = TxConfig(immunity_ms=6000, checks_max=15)
# Ten records fill a segment. Removal is forced by the disk, so age does not matter.
SIZES: dict[str, Any] = {"segment_bytes": 8192, "page_bytes": 512, "cache_bytes": 8192, "disk_clean_ratio": 0.9}
HOUR_MS = 3_600_000


class Kept(Workload):
    """Transactions that were begun before what fills the segments after them."""

    def __init__(self, disk: FakeDisk, flush: str = "sync", *, retires: bool = True) -> None:
        super().__init__(disk, flush)
        self.retires = retires
        self.clock = ManualClock()
        self.placed: dict[str, Placed] = {}

    async def open(self, disk: FakeDisk | None = None) -> Sellers:
        found = await sellers(disk or self.disk, self.clock, self.flush, CONFIG, **SIZES)
        found.broker.topics.ensure("other", 1)
        return found

    async def begin(self) -> Sellers:
        """Begin five transactions, end two, count checks of the third, and fill some segments."""
        found = await self.open()
        for key in ("pending", "checked", "late", "committed", "rolled back"):
            self.placed[key] = found.broker.publish(half(key, "own\x01kept\x02"))
        await found.settle()
        await found.end(self.placed["committed"], commit=True)
        await found.end(self.placed["rolled back"], commit=False)
        for _ in range(3):
            found.broker.journal("tx").note(checked_note([self.placed["checked"].queue_offset]))
        await self.fill(found)
        return found

    async def fill(self, found: Sellers, count: int = 30) -> None:
        for _ in range(count):
            found.broker.publish(Message("other", b"x" * 800, b"", 0, born_ms=1, born_host=HOST))
            found.store.committer.commit()
        await found.settle()

    async def work(self) -> None:
        """Begin, and let retention remove all segments but the active one."""
        found = await self.begin()
        if self.retires:
            await retire(found, self.disk)

    async def check(self, disk: FakeDisk, kind: Cut) -> None:
        found = await self.open(disk)
        await self.check_all(found)
        found.store.crash()

    async def check_all(self, found: Sellers) -> None:
        """See that each transaction is where it belongs, once, and ends once, however it is named."""
        pending = {each.half.record.property("UNIQ_KEY"): each for each in await found.held.pending(0, 100, 1 << 20)}
        assert sorted(pending) == ["checked", "late", "pending"]
        assert len(found.pending()) == 3
        assert {key: each.checks for key, each in pending.items()} == {"checked": 3, "late": 0, "pending": 0}
        for key, commit in (("pending", True), ("checked", False), ("late", True)):
            assert decode_properties(pending[key].half.record.properties)["own"] == "kept"
            named = await self.named(found, key)
            assert named.record.position == pending[key].half.record.position
            assert (named.group, named.topic, named.queue_id) == (GROUP, TOPIC, 0)
            found.held.end(named, commit=commit)
        for key in self.placed:
            assert await found.held.find_copy(self.placed[key].position, key) is None
        await found.settle()
        assert [key for key in found.stored() if key != "committed"] == ["pending", "late"]
        assert found.pending() == []

    async def named(self, found: Sellers, key: str) -> HalfMessage:
        """Return the half message that a producer means with what it knows: the place of the first one."""
        position = self.placed[key].position
        with suppress(Refused):
            first = await found.held.find(position)
            if found.held.is_pending(first.record.queue_offset):
                return first
        copy = await found.held.find_copy(position, key)
        assert copy is not None
        return copy


async def retire(found: Sellers, disk: FakeDisk) -> None:
    """Remove all segments but the active one, as retention does on a disk that is nearly full."""
    store = found.store
    await flushing(found, partial(found.broker.projections.keeper.release, store.segments.items[-2].end))
    await found.settle()
    await store.upkeep.checkpointer.checkpoint()
    disk.used_ratio = 0.95
    store.upkeep.retention.look()
    disk.used_ratio = 0.1


async def test_pending_transactions_outlive_the_segments_of_their_half_messages() -> None:
    kept = Kept(FakeDisk())
    found = await kept.begin()
    await retire(found, kept.disk)
    assert found.store.first_position > kept.placed["rolled back"].end
    await kept.check_all(found)


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_copy_is_found_before_it_is_readable(flush: str, times: int) -> None:
    """Retention has appended it, and its flush goes on: the one before it ends with it, and cannot be committed."""
    kept = Kept(FakeDisk(), flush)
    found = await kept.begin()
    for _ in range(times - 1):
        await retire(found, kept.disk)
        await kept.fill(found)
    await found.broker.turns.finish(found.state.roll(0, found.store.appended))
    assert found.store.appended > found.store.readable
    copies: list[HalfMessage | None] = []

    async def find() -> None:
        copies.append(await found.held.find_copy(kept.placed["late"].position, "late"))

    await flushing(found, find)
    (copy,) = copies
    assert copy is not None
    found.held.end(copy, commit=True)
    await found.settle()
    assert found.stored()[-1] == "late"


async def test_readable_copies_are_forgotten() -> None:
    kept = Kept(FakeDisk())
    found = await kept.begin()
    for _ in range(3):
        await retire(found, kept.disk)
        await kept.fill(found)
    assert len(found.held._copied) <= 3
    for key in "pending", "checked", "late":
        found.held.end(await kept.named(found, key), commit=False)
    found.prepare("another")
    await found.settle()
    for _ in range(3):
        await retire(found, kept.disk)
        await kept.fill(found)
    assert len(found.held._copied) == 1


async def test_a_transaction_is_moved_again_and_again() -> None:
    kept = Kept(FakeDisk())
    found = await kept.begin()
    for _ in range(3):
        await retire(found, kept.disk)
        await kept.fill(found)
    found.broker.projections.save()
    await found.store.close()
    again = await kept.open()
    assert again.pending() == found.pending()
    assert again.held.half_queue.next_offset == 5 + 3 * 3
    await kept.check_all(again)


@pytest.mark.parametrize("flush", ["sync", "async"])
async def test_a_power_cut_while_retention_moves_half_messages_leaves_each_once(flush: str) -> None:
    changes = await changes_after(Kept(FakeDisk(), flush, retires=False), Kept(FakeDisk(), flush))
    assert await cut_again(lambda disk: Kept(disk, flush), changes) > 2


async def test_half_messages_on_the_disk_are_read_by_a_thread() -> None:
    disk, fake = cold_disk()
    kept = Kept(fake)
    found = await kept.begin()
    disk.on_loop = 0
    await found.broker.turns.finish(found.state.roll(0, found.store.appended))
    assert disk.on_loop == 0
    await found.settle()
    await kept.check_all(found)


async def test_a_half_message_that_the_disk_fails_to_read_stalls_no_check() -> None:
    _, disk = cold_disk()
    kept = Kept(disk)
    found = await kept.begin()
    kept.clock.ms += 6001
    disk.fail_next("read", EIO)
    await flushing(found, found.checks.round)
    assert found.asked.keys() == ["checked", "late"]
    assert found.pending() == [0, 1, 2]
    await flushing(found, found.checks.round)
    assert found.asked.keys() == ["pending", "checked", "late"]


async def test_a_half_message_that_the_disk_fails_to_read_keeps_its_segment_and_no_other() -> None:
    _, disk = cold_disk()
    kept = Kept(disk)
    found = await kept.begin()
    disk.fail_next("read", EIO)
    with pytest.raises(StoreError, match="1 half messages cannot be read; check the disk"):
        await found.broker.turns.finish(found.state.roll(0, found.store.appended))
    await found.settle()
    assert found.pending() == [0, 5, 6]
    await retire(found, disk)
    await kept.check_all(found)


async def test_many_half_messages_are_moved_in_slices() -> None:
    found = await sellers(config=CONFIG, segment_bytes=1 << 20, cache_bytes=1 << 16, page_bytes=1 << 14)
    placed = [found.prepare(f"k{number}") for number in range(2500)]
    await found.settle()
    for each in placed[::5]:
        await found.end(each, commit=False)
    await found.settle()
    end, before = placed[2000].position, found.broker.turns.slices
    await found.broker.turns.finish(found.state.roll(0, end))
    assert found.broker.turns.slices - before > 1600 // 64
    await found.settle()
    assert found.state.halves.pending == 2000
    assert [offset for offset in found.pending() if offset < 2500] == [each for each in range(2000, 2500) if each % 5]
    listed = await found.held.pending(2500, 5000, 1 << 24)
    moved = [f"k{each}" for each in range(2000) if each % 5]
    assert [each.half.record.property("UNIQ_KEY") for each in listed] == moved


async def test_transactions_as_old_as_retention_allows_are_parked() -> None:
    kept = Kept(FakeDisk())
    found = await kept.begin()
    kept.clock.ms += 72 * HOUR_MS
    await retire(found, kept.disk)
    assert found.pending() == []
    assert sorted(found.stored(PARK_TOPIC)) == ["checked", "late", "pending"]
    assert check_times(found) == [b"0", b"3", b"0"]
    for key, placed in kept.placed.items():
        assert await found.held.find_copy(placed.position, key) is None
    (parked,) = (each for each in found.records(PARK_TOPIC) if each.property("UNIQ_KEY") == "late")
    found.held.resume(await found.held.find(parked.position))
    await found.settle()
    found.held.end(await kept.named(found, "late"), commit=True)
    await found.settle()
    (record,) = found.records(TOPIC)
    assert (record.property("UNIQ_KEY"), record.property("own")) == ("late", "kept")
    assert record.property("TRAN_MOVED_FROM") == ""


async def test_a_foreign_name_finds_no_copy() -> None:
    kept = Kept(FakeDisk())
    found = await kept.begin()
    await retire(found, kept.disk)
    position = kept.placed["late"].position
    for where, key in ((position, "pending"), (position + 1, "late"), (-1, "late"), (position, ""), (position, "x")):
        assert await found.held.find_copy(where, key) is None


async def test_others_are_told_that_a_commit_of_retention_failed() -> None:
    disk = FakeDisk()
    found = await Kept(disk).begin()
    found.broker.publish(Message("other", b"x", b"", 0, born_ms=1, born_host=HOST))  # not answered yet
    disk.fail_next("write", ENOSPC)
    with pytest.raises(Refused):
        await found.broker.turns.finish(found.state.roll(0, found.store.appended))
    with pytest.raises(Refused):
        found.store.committer.commit()  # that of the server, which sends the answer after it
