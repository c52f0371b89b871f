"""Retention asks projections before it removes what they need, and then goes on."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from errno import ENOSPC
from random import Random
from typing import Any

import pytest
import trio
from tests.state.tally import ROOT, Running, Tally, _append, send, start, started
from trio.testing import MockClock

from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.runtime.turns import Turns
from martlet.state import Projections
from martlet.store import Store
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import ManualClock, small_config

CONFIG: dict[str, Any] = {"disk_clean_ratio": 0.9, "retention_interval_ms": 1000, "persist_interval_ms": 100}


@asynccontextmanager
async def full(disk: FakeDisk, tally: Tally) -> AsyncIterator[Running]:
    """A store with a live record in its first segment, on a disk that is nearly full."""
    async with started(disk, tally, flush="sync", **CONFIG) as running:
        send(running.store, "A", "precious", keys="live")
        for number in range(80):
            send(running.store, "A", f"m{number}" * 20)
        await running.store.flusher.wait_durable(running.store.written)
        await running.store.upkeep.checkpointer.checkpoint()
        disk.used_ratio = 0.95
        yield running


def known(tally: Tally, first_position: int) -> set[str]:
    return set().union(*(keys for _, keys in tally.totals(first_position).values()))


async def test_what_is_live_is_appended_again_before_its_segment_goes(autojump_clock: MockClock) -> None:
    disk, tally = FakeDisk(), Tally()
    async with full(disk, tally) as running:
        await trio.sleep(5)
        assert running.store.first_position > 0
        assert tally.rolled[0][0] == 0
        assert tally.rolled[0][1] >= running.store.first_position
        assert "precious" in known(tally, running.store.first_position)
        found = disk.after_power_cut(Cut.KILLED, Random(0))
    again = await start(found)
    assert "precious" in known(again.tally, again.store.first_position)
    again.store.crash()


async def test_nothing_is_removed_before_the_replay(autojump_clock: MockClock) -> None:
    """The store applies retention as soon as it runs, and only the projections know what is live."""
    disk, tally = FakeDisk(), Tally()
    async with full(disk, tally):
        found = disk.after_power_cut(Cut.KILLED, Random(0))
    found.used_ratio = 0.95
    store = await Store.open(ROOT, small_config(flush="sync", **CONFIG), ManualClock(), found)
    projections = Projections(store, Turns())
    tally = Tally(append=lambda one: _append(store, one))
    projections.add("toy", tally)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        await trio.sleep(5)
        assert store.first_position == 0
        await projections.replay()
        nursery.start_soon(projections.run)
        await trio.sleep(5)
        assert store.first_position > 0
        assert "precious" in known(tally, store.first_position)
        nursery.cancel_scope.cancel()
    store.crash()


async def test_a_projection_that_needs_nothing_is_not_asked(autojump_clock: MockClock) -> None:
    disk, tally = FakeDisk(), Tally(frozenset(("Other",)))
    async with full(disk, tally) as running:
        await trio.sleep(5)
        assert running.store.first_position > 0
        assert tally.rolled == []


async def test_records_stay_while_a_roll_is_refused_but_not_for_ever(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = 3

    def append(one: Message) -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise Refused(Reason.UNAVAILABLE, "the disk is full")
        made.append(one.body)

    made: list[bytes] = []
    disk, tally = FakeDisk(), Tally(append=append)
    async with full(disk, tally) as running:
        await trio.sleep(2.5)
        assert running.store.first_position == 0
        assert "are not removed yet, because a projection needs them; the disk is full" in caplog.text
        await trio.sleep(5)
        assert running.store.first_position > 0
        assert made == [b"precious"]


async def test_nobody_holds_records_back_for_ever(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    def append(one: Message) -> None:
        raise Refused(Reason.UNAVAILABLE, "the disk is full")

    disk, tally = FakeDisk(), Tally(append=append)
    async with full(disk, tally) as running:
        await trio.sleep(9)
        assert running.store.first_position == 0
        await trio.sleep(5)
        assert running.store.first_position > 0
        assert "although a projection needs them; the disk is full" in caplog.text


async def test_what_a_failed_commit_undid_is_appended_again_before_its_segment_goes(autojump_clock: MockClock) -> None:
    """The commit of a round may fail between `roll` and the commit of retention, which then has nothing to do."""
    failures = 2

    def append(one: Message) -> None:
        nonlocal failures
        running.store.writer.append(one, 0)
        made.append(one.body)
        if failures:
            failures -= 1
            disk.fail_next("write", ENOSPC)
            with pytest.raises(Refused):
                running.store.committer.commit()

    made: list[bytes] = []
    disk, tally = FakeDisk(), Tally(append=append)
    async with full(disk, tally) as running:
        await trio.sleep(8)
        assert running.store.first_position > 0
        assert made == [b"precious"] * 3
        assert "precious" in known(tally, running.store.first_position)


async def test_a_failed_commit_of_retention_fails_that_of_the_round_as_well(autojump_clock: MockClock) -> None:
    """What others appended in the round was not stored either, and their answers must not be sent."""

    def append(one: Message) -> None:
        running.store.writer.append(one, 0)
        if not refused:
            disk.fail_next("write", ENOSPC)

    def commit() -> None:
        try:
            running.store.committer.commit()
        except Refused as error:
            refused.append(str(error))

    refused: list[str] = []
    disk, tally = FakeDisk(), Tally(append=append)
    async with full(disk, tally) as running:
        await trio.sleep(2.5)
        commit()
        assert len(refused) == 1
        commit()
        assert len(refused) == 1


async def test_tries_are_counted_again_once_nothing_has_to_be_removed(autojump_clock: MockClock) -> None:
    """Two times with a full disk are not one long one, after which a segment is given up."""

    def append(one: Message) -> None:
        if is_full:
            raise Refused(Reason.UNAVAILABLE, "the disk is full")
        made.append(one.body)

    made: list[bytes] = []
    is_full = True
    disk, tally = FakeDisk(), Tally(append=append)
    async with full(disk, tally) as running:
        for _ in range(3):
            await trio.sleep(8)
            disk.used_ratio = 0.5
            await trio.sleep(3)
            disk.used_ratio = 0.95
        assert running.store.first_position == 0
        is_full = False
        await trio.sleep(3)
        assert running.store.first_position > 0
        assert made == [b"precious"]


async def test_of_what_was_held_back_one_segment_is_given_up(autojump_clock: MockClock) -> None:
    """The space that it leaves is enough for what is live in the others."""

    def append(one: Message) -> None:
        if running.store.first_position == 0:
            raise Refused(Reason.UNAVAILABLE, "the disk is full")
        made.append(one.body)

    made: list[bytes] = []
    disk, tally = FakeDisk(), Tally(append=append)
    async with full(disk, tally) as running:
        for _ in range(2):
            send(running.store, "A", "later", keys="live")
            for number in range(80):
                send(running.store, "A", f"n{number}" * 20)
        await running.store.flusher.wait_durable(running.store.written)
        await running.store.upkeep.checkpointer.checkpoint()
        await trio.sleep(14)
        assert running.store.first_position > 0
        assert made == [b"later", b"later"]


async def test_a_failed_projection_holds_nothing_back(autojump_clock: MockClock) -> None:
    disk, tally = FakeDisk(), Tally()
    async with full(disk, tally) as running:
        tally.fails_at = b"bad"
        send(running.store, "A", "bad")
        await trio.sleep(5)
        assert running.store.first_position > 0
        assert tally.rolled == []
