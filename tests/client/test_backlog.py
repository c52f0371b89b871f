"""A queue is committed up to its first message that is not done, whatever order the listeners end in."""

from random import Random

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from martlet_client.backlog import Backlog

PLENTY = 1_000_000


@given(st.lists(st.integers(1, 5), max_size=20), st.randoms(use_true_random=False))
def test_commit_offset_is_that_of_a_plain_set(gaps: list[int], chance: Random) -> None:
    backlog = Backlog(100, PLENTY, PLENTY)
    offsets, at = [], 100
    for gap in gaps:
        at += gap
        offsets.append(at)
        assert backlog.add(at, 10)
    backlog.end = at + 1
    pending = set(offsets)
    for offset in chance.sample(offsets, len(offsets)):
        backlog.done(offset)
        pending.discard(offset)
        assert backlog.commit_offset == (min(pending) if pending else backlog.end)
        assert (len(backlog), backlog.bytes) == (len(pending), 10 * len(pending))


def test_message_that_is_there_already_is_not_taken_twice() -> None:
    backlog = Backlog(0, PLENTY, PLENTY)
    assert backlog.add(5, 1)
    assert not backlog.add(5, 1)
    assert not backlog.add(4, 1)
    backlog.done(5)
    backlog.done(5)
    assert (len(backlog), backlog.bytes) == (0, 0)


@pytest.mark.parametrize(("messages_max", "bytes_max"), [(2, PLENTY), (PLENTY, 20)])
async def test_full_backlog_waits_for_room(autojump_clock: MockClock, messages_max: int, bytes_max: int) -> None:
    backlog = Backlog(0, messages_max, bytes_max)
    await backlog.wait_room()
    backlog.add(0, 10)
    backlog.add(1, 10)
    with trio.move_on_after(10) as scope:
        await backlog.wait_room()
    assert scope.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(backlog.wait_room)
        await trio.testing.wait_all_tasks_blocked()
        backlog.done(1)


async def test_message_over_the_limit_gets_in_alone(autojump_clock: MockClock) -> None:
    backlog = Backlog(0, 10, 100)
    await backlog.wait_room()
    assert backlog.add(0, 1000)
    assert backlog.is_full
