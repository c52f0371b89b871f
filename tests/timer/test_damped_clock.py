"""The clock of timers ignores jumps of the wall clock that do not last."""

import pytest

from martlet.testing.stores import ManualClock
from martlet_timer.timers.damped_clock import CONFIRM_MS, STEP_MS, DampedClock

HOUR_MS = 3_600_000


class Times:
    """A wall clock and a monotonic one that advance together."""

    def __init__(self) -> None:
        self.wall = ManualClock()
        self.elapsed_ms = 5000
        self.smooth = DampedClock(self.wall, lambda: self.elapsed_ms)
        self.start_ms = self.smooth.now_ms()
        assert self.start_ms == self.wall.ms

    def wait(self, ms: int) -> int:
        """Return how far the smooth clock has advanced."""
        self.smooth.now_ms()
        for _ in range(10):
            self.wall.ms += ms // 10
            self.elapsed_ms += ms // 10
            self.smooth.now_ms()
        return self.smooth.now_ms() - self.start_ms


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS, STEP_MS + 10, -STEP_MS - 10])
def test_a_jump_that_is_undone_has_no_effect(jump_ms: int) -> None:
    times = Times()
    assert times.wait(1000) == 1000
    times.wall.ms += jump_ms
    assert times.wait(CONFIRM_MS - 1000) == CONFIRM_MS
    assert times.smooth.ahead_ms == jump_ms
    times.wall.ms -= jump_ms
    assert times.wait(10_000) == CONFIRM_MS + 10_000
    assert times.smooth.ahead_ms == 0
    assert times.smooth.jumps == 1


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS])
def test_a_jump_that_lasts_is_followed(jump_ms: int) -> None:
    times = Times()
    times.wall.ms += jump_ms
    assert times.wait(CONFIRM_MS - 1000) == CONFIRM_MS - 1000
    assert times.wait(2000) == CONFIRM_MS + 1000 + jump_ms
    assert times.smooth.now_ms() == times.wall.ms
    assert times.wait(10_000) == CONFIRM_MS + 11_000 + jump_ms


def test_a_clock_that_keeps_jumping_is_not_followed() -> None:
    times = Times()
    for number in range(1, 10):
        times.wall.ms += HOUR_MS
        assert times.wait(CONFIRM_MS - 1000) == number * (CONFIRM_MS - 1000)
    assert times.smooth.jumps == 9


@pytest.mark.parametrize("step_ms", [STEP_MS, -STEP_MS, 3, -3])
def test_small_changes_are_followed_immediately(step_ms: int) -> None:
    times = Times()
    for number in range(1, 20):
        times.wall.ms += step_ms
        assert times.wait(1000) == number * (1000 + step_ms)
    assert times.smooth.jumps == 0


@pytest.mark.parametrize("drift_ms", [800, -800])
def test_a_clock_that_runs_fast_or_slow_does_not_jump(drift_ms: int) -> None:
    times = Times()
    for number in range(1, 20):
        times.wall.ms += 600_000 + drift_ms
        times.elapsed_ms += 600_000
        assert times.smooth.now_ms() - times.start_ms == number * (600_000 + drift_ms)
    assert times.smooth.jumps == 0
