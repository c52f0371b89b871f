"""A wall clock that jumps forward and back delivers nothing early, nothing twice and nothing late."""

import pytest
import trio
from tests.timer.timer_talk import timed
from trio.testing import MockClock

from martlet.testing.clock import START_MS, TrioClock
from martlet_timer.timers.damped_clock import CONFIRM_MS

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS, 30 * 24 * HOUR_MS])
async def test_a_jump_forward_and_back_changes_nothing(autojump_clock: MockClock, jump_ms: int) -> None:
    clock = TrioClock()
    async with timed(clock=clock) as made:
        for second in range(1, 181):
            made.publish(body=b"%d" % second, TIMER_DELIVER_MS=START_MS + 1000 * second)
        for number in range(6):
            clock.skew_ms += jump_ms if number % 2 == 0 else -jump_ms
            # Also timers that are sent meanwhile, with a delay by the broker's clock and a time by the client's.
            made.publish(body=b"delay %d" % number, TIMER_DELAY_MS=2000)
            made.publish(body=b"time %d" % number, TIMER_DELIVER_MS=START_MS + 30_000 * number + 4000)
            await trio.sleep(29.9995)
            assert len(made.records()) == 30 * number + 29 + 2 * (number + 1)
            await trio.sleep(0.0005)
        await trio.sleep(0.01)
        came = {record.body: record for record in made.records()}
        assert len(came) == len(made.records()) == 192
        assert all(0 <= late <= 1 for late in made.late_ms_of(b"%d" % second for second in range(1, 181)))
        assert all(0 <= late <= 1 for late in made.late_ms_of(b"time %d" % number for number in range(6)))
        assert made.statistics["clock_jumps"] == 3
        assert made.statistics["clock_ahead_ms"] == 0


async def test_a_clock_that_was_set_forward_is_followed_after_a_minute(autojump_clock: MockClock) -> None:
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
        await trio.sleep(600 + CONFIRM_MS / 1000)
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
