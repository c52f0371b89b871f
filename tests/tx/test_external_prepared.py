"""Transactions on several brokers: what a run has prepared outlives it, and the next run commits or drops it."""

from typing import Any

import pytest
import trio
from tests.tx.external_talk import OTHER, TOPIC, Sink, numbered, sink

from martlet.contracts import ExternalCommit, ExternalRun
from martlet.errors import Reason, Refused
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import ManualClock
from martlet_tx.config import TxConfig


async def prepared(disk: FakeDisk | None = None, **more: Any) -> Sink:
    """A run has prepared a part of transaction 3, and staged another one."""
    found = await sink(disk, **more)
    assert await found.begin_at("run-1", 0, "b", "a") == ExternalRun(1, -1, -1, ("a", "b"))
    await found.commit(2, [], epoch=1)
    await found.stage(3, "left", ["one", "two"], epoch=1)
    await found.stage(3, "other", ["no"], epoch=1)
    assert not (await found.prepare(3, [("left", 1)], epoch=1)).is_duplicate
    return found


async def test_what_is_prepared_outlives_its_run_and_is_committed_by_the_next() -> None:
    found = await prepared()
    assert found.stored() == []
    assert await found.begin_at("run-2", 0, "c") == ExternalRun(2, 2, 3, ("a", "b", "c"))
    assert found.parts() == {(3, "left"): 1}
    with pytest.raises(Refused, match="was replaced by a newer run"):
        await found.commit(3, [("left", 1)], epoch=1)
    with pytest.raises(Refused, match="was replaced by a newer run"):
        await found.prepare(3, [("left", 1)], epoch=1)
    assert (await found.commit(3, None, epoch=2)).messages == 2
    assert found.stored() == ["one", "two"]
    assert (await found.commit(3, None, epoch=2)).is_duplicate
    assert (await found.prepare(3, [], epoch=2)).is_duplicate
    assert (await found.begin_at("run-2")).prepared == -1
    assert found.stored() == ["one", "two"]


async def test_what_is_prepared_is_dropped_if_the_next_run_says_so() -> None:
    found = await prepared()
    await found.begin("run-2")
    await found.stage(3, "again", ["new"], epoch=2)
    assert await found.abort_prepared(3, epoch=2) == 1
    assert await found.abort_prepared(3, epoch=2) == 0
    assert found.parts() == {(3, "again"): 1}
    assert (await found.commit(3, None, epoch=2)).is_duplicate  # nothing is left, so nothing is decided
    assert (await found.commit(3, [("again", 1)], epoch=2)).messages == 1
    assert found.stored() == ["new"]


async def test_a_late_request_about_the_older_run_does_not_touch_what_the_newer_one_has_prepared() -> None:
    found = await prepared()
    await found.begin("run-2")
    await found.stage(3, "again", ["new"], epoch=2)
    await found.prepare(3, [("again", 1)], epoch=2)
    assert (await found.begin_at("run-2")).prepared == -1
    assert await found.abort_prepared(3, epoch=2) == 0
    assert (await found.commit(3, None, epoch=2)).is_duplicate
    assert found.parts() == {(3, "again"): 1}
    assert (await found.commit(3, [("again", 1)], epoch=2)).messages == 1


async def test_a_transaction_that_could_not_be_committed_is_not_prepared() -> None:
    found = await prepared()
    with pytest.raises(Refused, match="has 0 of 1 chunks"):
        await found.prepare(4, [("unknown", 1)], epoch=1)
    await found.stage(4, "part", ["bill"], epoch=1, topic=OTHER)
    found.broker.topics.delete(OTHER)
    with pytest.raises(Refused, match=r"topic\[bills\] was deleted"):
        await found.prepare(4, [("part", 1)], epoch=1)
    await found.prepare(5, [], epoch=1)
    with pytest.raises(
        Refused, match="transaction 5 of 'query' is prepared already; prepare transactions in"
    ) as refused:
        await found.prepare(4, [], epoch=1)
    assert refused.value.reason is Reason.ILLEGAL


async def test_what_is_prepared_is_committed_though_its_topic_was_closed_or_deleted_since() -> None:
    found = await prepared()  # it is decided on another broker
    await found.stage(4, "bills", ["bill"], epoch=1, topic=OTHER)
    found.broker.topics.update(TOPIC, perm=4)
    assert (await found.commit(3, [("left", 1)], epoch=1)).messages == 2
    await found.stage(4, "part", ["bill"], epoch=1, topic=OTHER)
    await found.prepare(4, [("part", 1)], epoch=1)
    found.broker.topics.delete(OTHER)
    await found.begin("run-2")
    assert (await found.commit(4, None, epoch=2)).messages == 0
    assert found.staged.statistics()["dropped_without_topic"] == 1


async def test_an_abort_does_not_touch_what_is_prepared() -> None:
    found = await prepared()  # it may be decided on another broker, whose answer was lost
    assert await found.abort(3, epoch=1) == 1
    assert await found.abort(3, ["left"], epoch=1) == 0
    assert (await found.commit(3, [("left", 1)], epoch=1)).messages == 2


async def test_what_is_prepared_expires_with_its_producer() -> None:
    found = await prepared(config=TxConfig(staged_timeout_ms=200, producer_hours=2))
    for hours in range(3):
        await found.do(found.staged.expiry.expire)
        await trio.sleep(0.25)
        await found.do(found.staged.expiry.expire)
        assert found.parts() == ({(3, "left"): 1} if hours < 2 else {})
        await found.do(found.staged.expiry.count_hour)
    assert len(found.state.producers) == 0


async def test_a_producer_is_forgotten_soon_after_its_last_commit() -> None:
    found = await sink()
    await found.commit(0, [], producer="goes on")
    for _ in range(2):
        await found.stage(0, "a", ["x"], producer="write")
        done = await found.commit(0, [("a", 1)], producer="write", is_last=True)
        await found.do(found.staged.expiry.count_hour)
        assert found.stored() == ["x"]
    assert done.is_duplicate  # an hour later
    await found.do(found.staged.expiry.count_hour)
    assert [name for _, name in found.state.producers] == ["goes on"]


async def test_a_run_that_began_earlier_cannot_fence_a_newer_one() -> None:
    found = await sink()
    await found.begin_at("run-2", 20_000)
    with pytest.raises(Refused, match=r"run 'run-1', which began 1\.5 s before the newest run of producer") as refused:
        await found.begin_at("run-1", 18_500)
    assert refused.value.reason is Reason.FENCED
    assert (await found.begin_at("run-2", 25_000)).epoch == 1  # a later batch of the same run
    assert (await found.begin_at("run-3", 20_001)).epoch == 2
    assert (await found.begin_at("run-without-time")).epoch == 3


async def test_a_clock_that_is_far_ahead_stops_later_runs_for_an_hour_only() -> None:
    clock = ManualClock()
    found = await sink(clock=clock)
    await found.begin_at("run-1", (1 << 63) - 1)
    with pytest.raises(Refused, match=r"run 'run-2', which began 3600 s before the newest run"):
        await found.begin_at("run-2", clock.ms)
    clock.ms += 3_600_000
    assert (await found.begin_at("run-2", clock.ms)).epoch == 2


async def test_a_producer_that_is_unknown_begins_nothing_if_it_is_only_looked_up() -> None:
    found = await sink()
    assert await found.do(lambda: found.staged.begin("", "query", "run-1", only_known=True)) == ExternalRun(0, -1)
    assert len(found.state.producers) == 0
    await found.begin("run-1")
    assert (await found.do(lambda: found.staged.begin("", "query", "run-2", only_known=True))).epoch == 2


async def test_names_of_brokers_are_collected_and_limited() -> None:
    found = await sink()
    assert (await found.begin_at("run-1", 0, "b", "a")).brokers == ("a", "b")
    assert (await found.begin_at("run-1", 0, "b", "c")).brokers == ("a", "b", "c")
    assert (await found.begin_at("run-2")).brokers == ("a", "b", "c")
    for names in (["x" * 4096], [""]):
        with pytest.raises(Refused, match="brokers have") as refused:
            await found.begin_at("run-2", 0, *names)
        assert refused.value.reason is Reason.PARAMETER


@pytest.mark.parametrize("restarts", [False, True])
async def test_an_empty_transaction_is_prepared_and_committed_like_others(restarts: bool) -> None:
    disk = FakeDisk()
    found = await sink(disk)
    await found.begin("run-1")
    await found.prepare(0, [], epoch=1)
    if restarts:
        found.broker.projections.save()
        await found.store.close()
        found = await sink(disk)
    assert (await found.begin_at("run-2")).prepared == 0
    assert await found.commit(0, None, epoch=2) == ExternalCommit(0, 0, False)
    await found.stage(1, "large", numbered(0, 60), epoch=2)
    await found.prepare(1, [("large", 1)], epoch=2)
    assert (await found.commit(1, [("large", 1)], epoch=2)).messages == 60
    assert found.stored(TOPIC) == numbered(0, 60)


@pytest.mark.parametrize("saves", [False, True])
async def test_a_run_is_told_what_the_last_commit_said_of_its_content(saves: bool) -> None:
    disk = FakeDisk()
    found = await sink(disk)
    await found.begin("run-1")
    assert (await found.begin_at("run-1")).content == ""
    await found.commit(0, [], epoch=1, content="10-abc")
    assert (await found.begin_at("run-1")).content == "10-abc"
    await found.stage(1, "part", ["one"], epoch=1)
    await found.prepare(1, [("part", 1)], epoch=1, content="1-def")
    assert (await found.begin_at("run-2")).content == "10-abc"
    await found.commit(1, None, epoch=2)  # the new run does not know what was prepared
    assert (await found.commit(0, [], epoch=2, content="late")).is_duplicate
    if saves:
        found.broker.projections.save()
    await found.store.close()
    again = await sink(disk)
    assert (await again.begin_at("run-3")).content == "1-def"
    with pytest.raises(Refused, match=r"content 'xxx.* has 65 characters"):
        await again.commit(2, [], epoch=3, content="x" * 65)
