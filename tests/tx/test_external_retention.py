"""Retention removes the segments of what is staged, of a delivery that is not complete, and of what producers are."""

from typing import Any

import pytest
from tests.state.power_cuts import Workload, changes_after, cut_again
from tests.tx.external_talk import OTHER, TOPIC, Sink, hurt, numbered, sink

from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import HOST, ManualClock

# Removal is forced by the disk, so age does not matter.
FULL: dict[str, Any] = {"disk_clean_ratio": 0.9}


async def fill(found: Sink, count: int = 60) -> None:
    found.broker.topics.ensure("filler", 1)
    for _ in range(count):
        found.broker.publish(Message("filler", b"x" * 800, b"", 0, born_ms=1, born_host=HOST))
        found.store.committer.commit()
    await found.settle()


async def retire(found: Sink, disk: FakeDisk) -> None:
    """Remove all segments but the active one, as retention does on a disk that is nearly full."""
    store = found.store
    await found.do(lambda: found.broker.projections.keeper.release(store.segments.items[-2].end))
    await found.settle()
    await store.upkeep.checkpointer.checkpoint()
    disk.used_ratio = 0.95
    store.upkeep.retention.look()
    disk.used_ratio = 0.1


class Kept(Workload):
    """What must outlive its segments; *damage* is done to what a cut leaves."""

    def __init__(self, disk: FakeDisk, flush: str = "sync", damage: str = "", *, retires: bool = True) -> None:
        super().__init__(disk, flush)
        self.damage = damage
        self.retires = retires

    async def open(self, disk: FakeDisk | None = None) -> Sink:
        return await sink(disk or self.disk, ManualClock(), self.flush, **FULL)

    async def begin(self) -> Sink:
        found = await self.open()
        await found.begin("run-1")
        await found.begin("run-2")
        await found.stage(0, "first", ["zero"], epoch=2)
        await found.commit(0, [("first", 1)], epoch=2)
        await found.commit(4, [], producer="query/1")
        await found.do(found.staged.expiry.count_hour)
        await found.stage(1, "kept", ["one", "two"], epoch=2)
        await found.stage(1, "aborted", ["no"], epoch=2)
        await found.stage(1, "kept", ["three"], epoch=2, chunk=1)
        await found.abort(1, ["aborted"], epoch=2)
        await found.begin_at("old", 5000, "a", "b", producer="query/2")
        await found.stage(7, "held", ["held"], epoch=1, producer="query/2", topic=OTHER)
        await found.prepare(7, [("held", 1)], epoch=1, producer="query/2")
        await found.begin_at("new", 6000, "c", producer="query/2")
        await fill(found)
        return found

    async def work(self) -> None:
        found = await self.begin()
        if self.retires:
            await retire(found, self.disk)

    async def check(self, disk: FakeDisk, kind: Cut) -> None:
        hurt(disk, self.damage)
        found = await self.open(disk)
        await self.check_all(found)
        found.store.crash()

    async def check_all(self, found: Sink) -> None:
        assert found.state.hour == 1
        assert found.parts() == {(1, "kept"): 2}
        with pytest.raises(Refused) as refused:
            await found.begin("run-1")
        assert refused.value.reason is Reason.FENCED
        assert await found.begin("run-2") == (2, 0)
        begun = await found.begin_at("new", producer="query/2")
        assert (begun.epoch, begun.prepared, begun.brokers) == (2, 7, ("a", "b", "c"))
        with pytest.raises(Refused, match=r"began 0\.5 s before the newest run"):
            await found.begin_at("older", 5500, producer="query/2")
        assert (await found.commit(7, None, epoch=2, producer="query/2")).messages == 1
        assert found.stored(OTHER) == ["held"]
        assert (await found.commit(4, [], producer="query/1")).is_duplicate
        assert (await found.commit(0, [("first", 1)], epoch=2)).is_duplicate
        assert (await found.commit(1, [("kept", 2)], epoch=2)).messages == 3
        assert [body for body in found.stored() if body != "zero"] == ["one", "two", "three"]
        assert not found.state.chunks
        assert (found.state.messages, found.state.size) == (0, 0)


async def test_what_is_staged_and_known_outlives_its_segments() -> None:
    kept = Kept(FakeDisk())
    found = await kept.begin()
    first = found.store.first_position
    for _ in range(3):
        await retire(found, kept.disk)
        assert found.store.first_position > first
        first = found.store.first_position
        await fill(found)
    await kept.check_all(found)


@pytest.mark.parametrize("damage", ["", "removed", "zeroed"])
async def test_it_outlives_the_loss_of_snapshots_as_well(damage: str) -> None:
    kept = Kept(FakeDisk())
    found = await kept.begin()
    for _ in range(2):
        await retire(found, kept.disk)
        await fill(found)
    found.broker.projections.save()
    await found.store.close()
    hurt(kept.disk, damage)
    await kept.check_all(await kept.open())


@pytest.mark.parametrize("flush", ["sync", "async"])
async def test_a_power_cut_while_retention_moves_it_changes_nothing(flush: str) -> None:
    changes = await changes_after(Kept(FakeDisk(), flush, retires=False), Kept(FakeDisk(), flush))
    assert await cut_again(lambda disk: Kept(disk, flush), changes[::2]) > 1
    assert await cut_again(lambda disk: Kept(disk, flush, "removed"), changes[1::2]) > 1


@pytest.mark.parametrize("damage", ["", "removed"])
@pytest.mark.parametrize("moves", [1, 2])
async def test_a_delivery_that_was_cut_off_goes_on_where_it_ended(damage: str, moves: int) -> None:
    disk, clock = FakeDisk(), ManualClock()
    found = await sink(disk, clock, **FULL)
    for chunk in range(4):
        await found.stage(3, "large", numbered(chunk * 25, 25), chunk=chunk)
    await found.decide(3, [("large", 4)])
    delivered = found.stored()
    assert 0 < len(delivered) < 25
    for _ in range(moves):
        found.store.crash()
        found = await sink(disk, clock, **FULL)
        await fill(found)
        await retire(found, disk)
    assert found.stored() == []
    found.broker.projections.save()
    await found.store.close()
    hurt(disk, damage)
    found = await sink(disk, clock, **FULL)
    assert found.state.producers["", "query"].committed == 3
    await found.go_on()
    assert delivered + found.stored(TOPIC) == numbered(0, 100)
    assert not found.state.chunks
    assert (await found.commit(3, [("large", 4)])).is_duplicate
