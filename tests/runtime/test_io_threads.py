"""Calls that may hang have a deadline, and those that hang are bounded."""

import threading
from collections.abc import Callable

import pytest
import trio
import trio.testing

from martlet.errors import Reason, Refused
from martlet.runtime.io_threads import IoThreads

REAL_S = 60.0  # for calls that return: no test waits for it


async def count_down(threads: IoThreads, count: int) -> None:
    """Wait in real time until *count* calls hang."""
    with trio.fail_after(REAL_S):
        while threads.abandoned != count:  # noqa: ASYNC110 - a thread ends it
            await trio.sleep(0.001)


def hang(release: threading.Event) -> Callable[[], str]:
    return lambda: str(release.wait())


async def abandon(threads: IoThreads, work: Callable[[], object]) -> Refused:
    """Let one more call miss its deadline, and return its refusal; on a busy machine it may not even have begun."""
    abandoned = threads.abandoned
    while True:
        with pytest.raises(Refused, match=r"the store did not answer within 0\.01 s; try again") as refused:
            await threads.run(work)
        if threads.abandoned > abandoned:
            return refused.value


async def test_a_call_returns_its_result_or_its_error() -> None:
    threads = IoThreads("the store", deadline_s=REAL_S)
    assert await threads.run(lambda: threading.current_thread() is threading.main_thread()) is False
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert threads.abandoned == 0


async def test_a_call_that_hangs_is_refused_at_its_deadline_and_counted_until_it_ends() -> None:
    threads, release = IoThreads("the store", deadline_s=0.01), threading.Event()
    try:
        refused = await abandon(threads, hang(release))
        assert refused.reason is Reason.BUSY
        assert threads.abandoned == 1
    finally:
        release.set()
    await count_down(threads, 0)


async def test_beyond_the_bound_calls_are_refused_at_once_until_one_ends() -> None:
    threads = IoThreads("the store", threads_max=1, abandoned_max=2, deadline_s=0.01)
    releases = [threading.Event(), threading.Event()]
    try:
        for number, release in enumerate(releases, 1):
            await abandon(threads, hang(release))
            assert threads.abandoned == number, "a call that hangs does not hold the place of another"
        asked: list[int] = []
        with pytest.raises(Refused, match="2 calls of the store hang; try again when it answers"):
            await threads.run(lambda: asked.append(1))
        assert asked == []
        releases[0].set()
        await count_down(threads, 1)
        with trio.fail_after(REAL_S):
            while not asked:  # a busy machine may miss the short deadline
                try:
                    await threads.run(lambda: asked.append(1))
                except Refused:
                    await count_down(threads, 1)
    finally:
        for release in releases:
            release.set()
    await count_down(threads, 0)


async def test_a_call_that_waits_for_its_turn_has_its_deadline_too_and_is_not_abandoned() -> None:
    threads, release = IoThreads("the store", threads_max=1, deadline_s=REAL_S), threading.Event()
    began: list[str] = []
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(threads.run, hang(release))
            await trio.testing.wait_all_tasks_blocked()
            with trio.CancelScope() as scope:
                scope.deadline = trio.current_time() + 0.01
                await threads.run(lambda: began.append("second"))
            assert scope.cancelled_caught
            assert (began, threads.abandoned) == ([], 0)
            release.set()
    finally:
        release.set()
    assert threads.abandoned == 0


async def test_a_call_whose_deadline_passes_before_it_begins_is_not_abandoned() -> None:
    threads, asked = IoThreads("the store", deadline_s=1e-6), list[int]()
    with pytest.raises(Refused, match="did not answer"):
        await threads.run(lambda: asked.append(1))
    assert (asked, threads.abandoned) == ([], 0)


async def test_a_cancelled_call_is_abandoned() -> None:
    threads, release = IoThreads("the store", deadline_s=REAL_S), threading.Event()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(threads.run, hang(release))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert threads.abandoned == 1
    finally:
        release.set()
    await count_down(threads, 0)


def test_a_call_may_end_after_the_event_loop() -> None:
    threads, release, ended = IoThreads("the store", deadline_s=0.01), threading.Event(), threading.Event()

    def work() -> None:
        release.wait()
        ended.set()

    async def main() -> None:
        await abandon(threads, work)

    trio.run(main)
    release.set()
    assert ended.wait(REAL_S)
