"""The clock of tests that jumps waits for threads."""

from threading import Event

import trio
from trio.testing import MockClock


async def test_the_clock_does_not_jump_while_a_thread_works(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    nursery.start_soon(trio.sleep, 10)
    never = Event()

    def work() -> float:
        never.wait(0.05)  # where every task waits
        return trio.from_thread.run_sync(trio.current_time)

    assert await trio.to_thread.run_sync(work) == 0
    await trio.sleep(5)
    assert trio.current_time() == 5


async def test_it_jumps_although_a_thread_of_a_limiter_of_its_own_waits(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    slept = Event()

    async def sleep() -> None:
        await trio.sleep(10)
        slept.set()

    nursery.start_soon(sleep)
    await trio.to_thread.run_sync(slept.wait, limiter=trio.CapacityLimiter(1))
    assert trio.current_time() == 10
