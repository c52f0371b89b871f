"""Logins wait in a fair line for worker threads, and guessers wait behind themselves."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.access import login_line
from martlet.access.login_line import (
    AGAIN_S,
    FAILURES_FREE,
    FORGET_S,
    PAUSE_S_MAX,
    THREADS,
    WAIT_S,
    LoginLine,
    network_of,
)
from martlet.contracts import LoginOrigin
from martlet.errors import Reason, Refused

CHECK_S = 0.05
HERE, THERE = LoginOrigin("10.0.0.1"), LoginOrigin("10.0.0.2")


class Threads:
    """Runs each check for *CHECK_S* on the test's clock, and counts how many run."""

    def __init__(self) -> None:
        self.running = self.most = self.done = 0

    async def run(self, work: Callable[[], Any]) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        with trio.CancelScope(shield=True):  # as a thread, which cannot be cancelled
            await trio.sleep(CHECK_S)
        self.running -= 1
        self.done += 1
        return work()


def wrong() -> None:
    raise Refused(Reason.CREDENTIALS, "wrong")


def is_empty(line: LoginLine) -> bool:
    return not line._waiting and line._count == 0 and line._free == THREADS


async def reason_of(login: Awaitable[object]) -> Reason | None:
    try:
        await login
    except Refused as refused:
        return refused.reason
    return None


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2"),
        ("2001:db8::6", "2001:db8:0:0"),
        ("::1", "0:0:0:0"),
        ("::", "0:0:0:0"),
        ("fe80::", "fe80:0:0:0"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1"),
        ("memory", "memory"),
        ("", ""),
    ],
)
def test_a_client_is_an_ipv4_address_or_an_ipv6_network(address: str, network: str) -> None:
    assert network_of(address) == network


async def test_checks_run_in_a_few_threads(autojump_clock: MockClock) -> None:
    threads = Threads()
    line = LoginLine(threads.run)
    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(line.run, LoginOrigin(str(number)), "ann", lambda: None)
    assert (threads.most, threads.done) == (THREADS, 20)
    assert trio.current_time() == pytest.approx(20 / THREADS * CHECK_S)
    assert is_empty(line)


async def test_a_guesser_with_many_connections_delays_others_by_one_check(autojump_clock: MockClock) -> None:
    threads = Threads()
    line = LoginLine(threads.run)
    waits: list[float] = []

    async def login(number: int) -> None:
        began = trio.current_time()
        assert await line.run(LoginOrigin(f"10.0.1.{number}"), "ann", lambda: "ann") == "ann"
        waits.append(trio.current_time() - began)

    async with trio.open_nursery() as nursery:
        for number in range(1000):  # each with a name of its own
            nursery.start_soon(reason_of, line.run(HERE, f"guess {number}", wrong))
        await trio.sleep(CHECK_S / 2)
        for number in range(20):
            nursery.start_soon(login, number)
            await trio.sleep(CHECK_S)
    assert len(waits) == 20
    assert max(waits) <= 3 * CHECK_S
    assert is_empty(line)


async def test_users_of_one_address_take_turns(autojump_clock: MockClock) -> None:
    line = LoginLine(Threads().run)
    order: list[str] = []
    async with trio.open_nursery() as nursery:
        for number in range(THREADS + 20):
            nursery.start_soon(line.run, HERE, "bob", lambda: order.append("bob"))
            await trio.lowlevel.checkpoint()
            if number == THREADS + 5:
                nursery.start_soon(line.run, HERE, "ann", lambda: order.append("ann"))
    assert order.index("ann") <= THREADS + 2


async def test_a_login_that_has_waited_long_is_refused(autojump_clock: MockClock) -> None:
    line = LoginLine(Threads().run)
    room = int(WAIT_S / CHECK_S * THREADS)
    reasons: list[Reason | None] = []

    async def login(number: int) -> None:
        reasons.append(await reason_of(line.run(LoginOrigin(f"{number}"), "ann", lambda: None)))
        if reasons[-1] is not None:
            assert trio.current_time() == pytest.approx(WAIT_S)

    async with trio.open_nursery() as nursery:
        for number in range(2 * room):
            nursery.start_soon(login, number)
    assert reasons.count(None) == pytest.approx(room, abs=2 * THREADS)
    assert set(reasons) == {None, Reason.BUSY}
    assert line.refused == reasons.count(Reason.BUSY)
    assert is_empty(line)


async def test_who_was_refused_and_comes_again_goes_before_those_who_came_later(autojump_clock: MockClock) -> None:
    line = LoginLine(Threads().run)
    done: dict[str, float] = {}
    room = int(WAIT_S / CHECK_S * THREADS)

    async def login(user: str) -> None:
        while user not in done:
            if await reason_of(line.run(HERE, user, lambda: None)) is None:
                done[user] = trio.current_time()
            else:
                await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for number in range(3 * room):
            nursery.start_soon(login, f"early {number}")
        await trio.sleep(WAIT_S - 1)
        for number in range(3 * room):
            nursery.start_soon(login, f"late {number}")
    early = max(at for user, at in done.items() if user.startswith("early"))
    assert early < 3 * WAIT_S + 2 + 2 * CHECK_S
    assert sum(at < early for user, at in done.items() if user.startswith("late")) <= 3 * THREADS / CHECK_S
    assert is_empty(line)
    assert not line._missed


async def test_a_place_in_the_line_is_kept_for_a_time(autojump_clock: MockClock) -> None:
    line = LoginLine(Threads().run)
    order: list[str] = []
    room = int(WAIT_S / CHECK_S * THREADS)

    async def login(user: str) -> None:
        await reason_of(line.run(HERE, user, lambda: order.append(user)))

    async with trio.open_nursery() as nursery:
        for number in range(room + THREADS + 1):
            nursery.start_soon(login, f"{number}")
            await trio.lowlevel.checkpoint()
    missed = ({f"{number}" for number in range(room + THREADS + 1)} - set(order)).pop()
    for pause_s, places in ((1.0, range(2 * THREADS)), (AGAIN_S + 1, range(10, THREADS + 11))):
        line._missed[HERE.address, missed] = 0.0, trio.current_time()
        await trio.sleep(pause_s)
        order.clear()
        async with trio.open_nursery() as nursery:
            for number in range(THREADS + 10):
                nursery.start_soon(login, f"other {number}")
                await trio.lowlevel.checkpoint()
            nursery.start_soon(login, missed)
        assert order.index(missed) in places


async def test_missed_logins_take_bounded_memory(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_line, "MISSED_MAX", 10)
    line = LoginLine(Threads().run)
    async with trio.open_nursery() as nursery:
        for number in range(2 * int(WAIT_S / CHECK_S * THREADS)):
            nursery.start_soon(reason_of, line.run(HERE, f"{number}", lambda: None))
    assert len(line._missed) == 10


async def test_a_client_that_goes_leaves_the_line(autojump_clock: MockClock) -> None:
    threads = Threads()
    line = LoginLine(threads.run)
    async with trio.open_nursery() as nursery:
        for number in range(THREADS):
            nursery.start_soon(line.run, HERE, f"{number}", lambda: None)
        await wait_all_tasks_blocked()
        with trio.move_on_after(CHECK_S / 2):
            await line.run(THERE, "ann", lambda: None)
        assert line._count == 0
    assert threads.done == THREADS
    assert is_empty(line)


async def test_a_client_that_goes_when_its_turn_comes_gives_the_thread_to_the_next(autojump_clock: MockClock) -> None:
    line = LoginLine(Threads().run)
    done: list[str] = []
    async with trio.open_nursery() as nursery:
        for number in range(THREADS):
            nursery.start_soon(line.run, HERE, f"{number}", lambda: None)
        await wait_all_tasks_blocked()
        with trio.CancelScope() as scope:

            async def leave() -> None:
                await trio.sleep(CHECK_S)  # the turn comes in this moment
                scope.cancel()

            nursery.start_soon(leave)
            await line.run(THERE, "ann", lambda: done.append("ann"))
        await line.run(THERE, "bob", lambda: done.append("bob"))
    assert done[-1] == "bob"
    assert is_empty(line)


async def test_failures_of_a_user_at_an_address_make_growing_pauses(autojump_clock: MockClock) -> None:
    threads = Threads()
    line = LoginLine(threads.run)
    for _ in range(FAILURES_FREE + 1):
        assert await reason_of(line.run(HERE, "ann", wrong)) is Reason.CREDENTIALS
    pauses: list[float] = []
    for _ in range(8):
        checked, began = threads.done, trio.current_time()
        assert await reason_of(line.run(HERE, "ann", wrong)) is Reason.BUSY
        assert threads.done == checked, "during a pause nothing is checked"
        for _ in range(100):
            await trio.sleep(0.5)
            if await reason_of(line.run(HERE, "ann", wrong)) is Reason.CREDENTIALS:
                break
        pauses.append(round(trio.current_time() - began))
    assert pauses == [1, 2, 4, 8, 16, PAUSE_S_MAX, PAUSE_S_MAX, PAUSE_S_MAX]
    assert await line.run(THERE, "ann", lambda: "ann") == "ann", "nobody can lock out a user at another address"
    assert await line.run(HERE, "bob", lambda: "bob") == "bob"


async def test_guesses_that_wait_when_a_pause_begins_are_not_checked(autojump_clock: MockClock) -> None:
    threads = Threads()
    line = LoginLine(threads.run)
    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(reason_of, line.run(HERE, "ann", wrong))
    assert FAILURES_FREE < threads.done <= FAILURES_FREE + THREADS
    assert is_empty(line)


async def test_a_success_ends_the_failures_and_time_forgets_them(autojump_clock: MockClock) -> None:
    line = LoginLine(Threads().run)
    for _ in range(FAILURES_FREE):
        await reason_of(line.run(HERE, "ann", wrong))
    await line.run(HERE, "ann", lambda: None)
    for _ in range(FAILURES_FREE + 1):
        assert await reason_of(line.run(HERE, "ann", wrong)) is Reason.CREDENTIALS
    await trio.sleep(FORGET_S + 1)
    for _ in range(FAILURES_FREE + 1):
        assert await reason_of(line.run(HERE, "ann", wrong)) is Reason.CREDENTIALS


async def test_failures_take_bounded_memory(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_line, "FAILURES_MAX", 10)
    line = LoginLine(Threads().run)
    for number in range(30):
        await reason_of(line.run(HERE, f"{number}", wrong))
    assert len(line._failures) == 10


async def test_an_error_of_a_check_is_no_failure_of_the_user(autojump_clock: MockClock) -> None:
    line = LoginLine(Threads().run)

    def breaks() -> None:
        raise Refused(Reason.UNAVAILABLE, "the plugin failed")

    for _ in range(3 * FAILURES_FREE):
        assert await reason_of(line.run(HERE, "ann", breaks)) is Reason.UNAVAILABLE
    assert is_empty(line)
