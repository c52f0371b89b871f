"""Long work in slices: one a turn of the loop, first come first served, closed when it is cancelled."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import trio
import trio.testing

from martlet.runtime.steps import SLICE_US, Budget, Steps, WaitingSteps, begin, finish_now, finish_off_loop, off_loop
from martlet.runtime.turns import Turns


def work(name: str, slices: int, done: list[str]) -> Steps[str]:
    try:
        for _ in range(slices):
            done.append(name)
            yield
        return name
    finally:
        done.append(f"{name} closed")


async def test_works_take_slices_in_turn_and_return_what_they_made() -> None:
    turns, done, results = Turns(), list[str](), list[str]()

    async def run(name: str, slices: int) -> None:
        results.append(await turns.finish(work(name, slices, done)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, "a", 4)
        nursery.start_soon(run, "b", 2)
    pattern = [name for name in done if "closed" not in name]
    assert sorted(pattern[:4]) == ["a", "a", "b", "b"]
    assert pattern[0] != pattern[1], "nobody has two slices while another waits"
    assert pattern[4:] == ["a", "a"]
    assert results == ["b", "a"]


async def test_the_loop_turns_between_any_two_slices() -> None:
    turns, done = Turns(), list[str]()

    async def tick() -> None:
        while True:
            done.append("tick")
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        await turns.finish(work("a", 5, done))
        nursery.cancel_scope.cancel()
    assert done.count("a") == 5
    # One of each a turn of the loop, in an order that trio chooses.
    assert done.count("tick") >= 4


async def test_those_that_wait_for_a_turn_share_the_queue_with_slices() -> None:
    turns, done, looks = Turns(), list[str](), list[int]()

    async def look() -> None:
        while True:
            looks.append(len(done))
            await trio.lowlevel.checkpoint()

    async def run(name: str) -> None:
        for _ in range(3):
            await turns.wait()
            done.append(name)

    async with trio.open_nursery() as looking:
        looking.start_soon(look)
        async with trio.open_nursery() as nursery:
            for name in "abc":
                nursery.start_soon(run, name)
            nursery.start_soon(turns.finish, work("d", 3, done))
        looking.cancel_scope.cancel()
    assert len(done) == 4 * 3 + 1
    assert all(sorted(set(done[at : at + 4])) == ["a", "b", "c", "d"] for at in (0, 4, 8))
    # In one turn of the loop, or in two, because trio runs the tasks of a turn in any order; the last one closes.
    assert max(later - earlier for earlier, later in pairwise(looks)) <= 3
    assert turns.slices == 4 * 3 + 1


async def test_cancelled_work_is_closed_and_blocks_nobody() -> None:
    turns, done = Turns(), list[str]()
    with trio.CancelScope() as scope:
        scope.cancel()
        await turns.finish(work("a", 5, done))
    with trio.move_on_after(0):
        await turns.finish(work("b", 5, done))
    assert await turns.finish(work("c", 1, done)) == "c"
    assert turns.statistics()["waiting"] == 0


async def test_work_may_wait_between_two_slices_while_others_go_on() -> None:
    turns, done, ready = Turns(), list[str](), trio.Event()

    def waiting() -> WaitingSteps[str]:
        done.append("before")
        yield ready.wait
        done.append("after")
        return "waited"

    async def run() -> None:
        done.append(await turns.finish(waiting()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        assert await turns.finish(work("other", 2, [])) == "other"
        assert done == ["before"]
        ready.set()
    assert done == ["before", "after", "waited"]


async def test_an_error_while_work_waits_closes_it_and_reaches_the_waiter() -> None:
    closed: list[bool] = []

    async def fails() -> None:
        raise OSError("no disk")

    def waiting() -> WaitingSteps[None]:
        try:
            yield fails
        finally:
            closed.append(True)

    with pytest.raises(OSError, match="no disk"):
        await Turns().finish(waiting())
    assert closed == [True]


async def test_an_error_in_a_slice_reaches_the_waiter() -> None:
    def fails() -> Steps[None]:
        yield
        raise ValueError("no")

    turns = Turns()
    with pytest.raises(ValueError, match="no"):
        await turns.finish(fails())
    assert await turns.finish(work("a", 1, [])) == "a"


def test_without_a_loop_work_is_done_at_once() -> None:
    assert finish_now(work("a", 3, [])) == "a"


def test_a_slice_is_over_after_so_many_steps() -> None:
    budget = Budget(SLICE_US / 3)
    assert [budget.is_over() for _ in range(7)] == [False, False, True, False, False, True, False]
    assert budget.is_over(5), "steps may come in bulk"
    assert [budget.is_over() for _ in range(3)] == [False, False, True]


def ask_disk(log: list[str], error: Exception | None = None) -> Steps[str]:
    """Wait for the disk, then for another turn."""

    def read() -> str:
        log.append("read")
        if error is not None:
            raise error
        return "data"

    log.append("began")
    data = yield from off_loop(read)
    log.append("continued")
    yield
    return data


async def test_blocking_work_is_done_off_the_loop_while_others_have_turns() -> None:
    log, may_read = list[str](), trio.Event()

    async def thread(work: Callable[[], None]) -> None:
        await may_read.wait()
        work()

    turns, results = Turns(thread), list[str]()

    async def run() -> None:
        results.append(await turns.finish(ask_disk(log)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        assert await turns.finish(work("other", 3, [])) == "other"
        assert log == ["began"]
        may_read.set()
    assert (log, results) == (["began", "read", "continued"], ["data"])


async def test_an_error_of_blocking_work_is_raised_where_it_was_wanted() -> None:
    def careful() -> Steps[str]:
        try:
            return (yield from ask_disk([], OSError("broken")))
        except OSError as error:
            return str(error)

    assert await Turns().finish(careful()) == "broken"
    assert finish_now(careful()) == finish_off_loop(careful()) == "broken"
    with pytest.raises(OSError, match="no"):
        await Turns().finish(ask_disk([], OSError("no")))


async def test_steps_whose_first_slice_was_run_go_on_with_its_blocking_work() -> None:
    log = list[str]()
    rest = begin(ask_disk(log))
    assert log == ["began"]
    assert await Turns().finish(rest) == "data"
    assert finish_now(begin(work("a", 0, []))) == "a"
