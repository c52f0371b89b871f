"""Jumps of the wall clock, and suspended machines: nothing comes early, late or twice, whatever the clocks do."""

import pytest
import trio
from tests.timer.timer_talk import Timed, timed
from trio.testing import MockClock

from martlet.testing.clock import START_MS, TrioClock
from martlet.testing.disk import FakeDisk
from martlet_timer.elapsed_time import WATCH_S, ElapsedTime
from martlet_timer.timers.damped_clock import CONFIRM_MS

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
# How long the messages of most tests wait: level 5, and the same as a timer.
WAIT_MS = 60_000
CONFIRM_S = CONFIRM_MS / 1000
JUMPS = [200, -200, HOUR_MS, -HOUR_MS, 30 * 24 * HOUR_MS, -30 * 24 * HOUR_MS]


def publish_each_kind(made: Timed) -> None:
    """Publish a message with a level, one with a delay and one with a time, due in a minute."""
    made.publish(body=b"level", DELAY=5)
    made.publish(body=b"delay", TIMER_DELAY_MS=WAIT_MS)
    made.publish(body=b"time", TIMER_DELIVER_MS=made.clock.now_ms() + WAIT_MS)


async def arrival_ms(made: Timed, began: float, *, until_s: float) -> dict[bytes, int]:
    """Wait until *until_s* after *began*; return when each message came, in ms since *began*, none of them twice."""
    came: dict[bytes, int] = {}

    def flushed() -> None:
        for body in made.bodies():
            came.setdefault(body, round((trio.current_time() - began) * 1000))

    flushed()
    made.broker.store.readable_end.on_moved.append(flushed)
    await trio.sleep_until(began + until_s)
    made.broker.store.readable_end.on_moved.remove(flushed)
    assert len(made.bodies()) == len(came)
    return came


def is_at(came_ms: int, wanted_ms: float) -> bool:
    """Whether *came_ms* is not early, and late by no more than a delivery takes."""
    return wanted_ms - 1 <= came_ms <= wanted_ms + 10


@pytest.mark.parametrize("jump_ms", JUMPS)
async def test_a_jump_that_is_undone_changes_nothing(autojump_clock: MockClock, jump_ms: int) -> None:
    clock = TrioClock()
    async with timed(clock=clock) as made:
        began = trio.current_time()
        publish_each_kind(made)
        await trio.sleep(55)
        clock.skew_ms += jump_ms
        await trio.sleep(CONFIRM_S - 6)
        clock.skew_ms -= jump_ms
        came = await arrival_ms(made, began, until_s=70)
        assert all(is_at(came[kind], WAIT_MS) for kind in (b"level", b"delay", b"time")), came


@pytest.mark.parametrize("jump_ms", JUMPS)
async def test_a_jump_that_lasts_moves_times_but_no_level(autojump_clock: MockClock, jump_ms: int) -> None:
    clock = TrioClock()
    async with timed(clock=clock) as made:
        began = trio.current_time()
        publish_each_kind(made)
        await trio.sleep(30)
        clock.skew_ms += jump_ms
        came = await arrival_ms(made, began, until_s=100)
        assert is_at(came[b"level"], WAIT_MS)
        if jump_ms > MINUTE_MS:
            for kind in (b"delay", b"time"):
                assert 30_000 + CONFIRM_MS <= came[kind] <= 30_000 + CONFIRM_MS + 1000 * WATCH_S + 10
        elif jump_ms < -MINUTE_MS:
            assert came.keys() == {b"level"}
            if jump_ms < -HOUR_MS:
                return
            await trio.sleep_until(began + (WAIT_MS - jump_ms) / 1000 - 1)
            assert made.bodies() == [b"level"]
            await trio.sleep(1.01)
            assert made.bodies() == [b"level", b"delay", b"time"]
        else:
            assert is_at(came[b"delay"], WAIT_MS - jump_ms)
            assert is_at(came[b"time"], WAIT_MS - jump_ms)


@pytest.mark.parametrize("jump_ms", [200, -200, HOUR_MS, -HOUR_MS])
async def test_a_jump_while_the_broker_is_stopped_is_followed(autojump_clock: MockClock, jump_ms: int) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with timed(disk, clock) as made:
        made.publish(body=b"before", TIMER_DELAY_MS=500)
        began = trio.current_time()
        publish_each_kind(made)
        await trio.sleep(1)
        assert made.bodies() == [b"before"]
    clock.skew_ms += jump_ms
    async with timed(disk, clock) as made:
        came = await arrival_ms(made, began, until_s=130)
        # Only the wall clock says how long the broker was stopped; a level waits for its delay once more at most.
        wanted_ms = min(max(WAIT_MS - jump_ms, 1000), WAIT_MS + 1000)
        assert wanted_ms - 1 <= came[b"level"] <= wanted_ms + 50
        if jump_ms < -MINUTE_MS:
            assert came.keys() == {b"before", b"level"}
            await trio.sleep_until(began + (WAIT_MS - jump_ms) / 1000 + 0.01)
        else:
            wanted_ms = max(WAIT_MS - jump_ms, 1000)
            assert all(wanted_ms - 1 <= came[kind] <= wanted_ms + 50 for kind in (b"delay", b"time")), came
        assert sorted(made.bodies()) == [b"before", b"delay", b"level", b"time"]


@pytest.mark.parametrize("asleep_ms", [20_000, HOUR_MS])
async def test_after_the_machine_was_suspended_everything_is_due_at_once(
    autojump_clock: MockClock, asleep_ms: int
) -> None:
    clock = TrioClock()
    async with timed(clock=clock) as made:
        began, asleep_ns = trio.current_time(), 0
        made.plugin.elapsed.suspended_ns = lambda: asleep_ns
        publish_each_kind(made)
        await trio.sleep(30)
        clock.skew_ms, asleep_ns = asleep_ms, asleep_ms * 1_000_000
        # What is sent after that, before the broker has noticed, is not early.
        made.publish(body=b"level 2", DELAY=1)
        made.publish(body=b"delay 2", TIMER_DELAY_MS=1000)
        came = await arrival_ms(made, began, until_s=70)
        assert is_at(came[b"level 2"], 31_000)
        assert is_at(came[b"delay 2"], 31_000)
        for kind in (b"level", b"delay", b"time"):
            wanted_ms = max(WAIT_MS - asleep_ms, 30_000)
            assert wanted_ms - 1 <= came[kind] <= wanted_ms + 1000 * WATCH_S + 10
        assert made.statistics["clock_jumps"] == 0


async def test_the_elapsed_time_goes_as_the_time_of_the_loop_and_never_back(autojump_clock: MockClock) -> None:
    elapsed = ElapsedTime()
    before_ms = elapsed.ms()
    await trio.sleep(5)
    assert round(elapsed.ms() - before_ms) == 5000
    elapsed.suspended_ns = lambda: 0
    assert round(elapsed.ms() - before_ms) == 5000


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS, 30 * 24 * HOUR_MS])
async def test_jumps_forward_and_back_change_nothing_while_messages_are_sent(
    autojump_clock: MockClock, jump_ms: int
) -> None:
    clock = TrioClock()
    async with timed(clock=clock) as made:
        for second in range(1, 55):
            made.publish(body=b"%d" % second, TIMER_DELIVER_MS=START_MS + 1000 * second)
        for number in range(6):
            clock.skew_ms += jump_ms if number % 2 == 0 else -jump_ms
            # Also timers that are sent meanwhile, with a delay by the broker's clock and a time by the client's.
            made.publish(body=b"delay %d" % number, TIMER_DELAY_MS=2000)
            made.publish(body=b"time %d" % number, TIMER_DELIVER_MS=START_MS + 9000 * number + 4000)
            await trio.sleep(8.9995)
            assert len(made.records()) == 9 * number + 8 + 2 * (number + 1)
            await trio.sleep(0.0005)
        await trio.sleep(0.01)
        came = {record.body: record for record in made.records()}
        assert len(came) == len(made.records()) == 66
        assert all(0 <= late <= 1 for late in made.late_ms_of(b"%d" % second for second in range(1, 55)))
        assert all(0 <= late <= 1 for late in made.late_ms_of(b"time %d" % number for number in range(6)))
        assert made.statistics["clock_jumps"] == 3
        assert made.statistics["clock_ahead_ms"] == 0


async def test_a_clock_that_was_set_forward_is_followed_after_ten_seconds(autojump_clock: MockClock) -> None:
    clock = TrioClock()
    async with timed(clock=clock) as made:
        made.publish(body=b"first", TIMER_DELIVER_MS=START_MS + HOUR_MS)
        made.publish(body=b"second", TIMER_DELIVER_MS=START_MS + 3 * HOUR_MS)
        made.publish(body=b"soon", TIMER_DELAY_MS=5000)
        await trio.sleep(1)
        clock.skew_ms += 2 * HOUR_MS
        await trio.sleep(5)
        assert made.statistics["clock_ahead_ms"] == 2 * HOUR_MS
        assert made.bodies() == [b"soon"]
        await trio.sleep(CONFIRM_S - 3)
        assert made.bodies() == [b"soon", b"first"]
        await trio.sleep(HOUR_MS / 1000)
        assert made.bodies() == [b"soon", b"first", b"second"]


async def test_a_clock_that_was_set_back_delivers_nothing_twice_and_new_timers_in_time(
    autojump_clock: MockClock,
) -> None:
    clock = TrioClock()
    async with timed(clock=clock) as made:
        made.publish(body=b"first", TIMER_DELAY_MS=1000)
        await trio.sleep(2)
        clock.skew_ms -= HOUR_MS
        made.publish(body=b"second", TIMER_DELAY_MS=90_000)
        await trio.sleep(89.9)
        assert made.bodies() == [b"first"]
        now_ms = clock.now_ms()
        made.publish(body=b"third", TIMER_DELIVER_MS=now_ms + 500)
        await trio.sleep(0.51)
        assert made.bodies() == [b"first", b"third"]
        assert made.late_ms_of([b"third"]) == [0]
        await trio.sleep(HOUR_MS / 1000)
        assert made.bodies() == [b"first", b"third", b"second"]
        assert made.statistics["pending"] == 0
