"""Elapsed time, including the time for which the machine was suspended.

trio's clock stops while a laptop or a virtual machine sleeps; the wall clock does not, and neither do delays and times.
On Linux the time asleep is the difference of two clocks.
"""

import time
from collections.abc import Callable
from typing import Final, final

import trio

__all__ = ["ElapsedTime", "watch"]

# Interval of checks for a jump of a clock or a suspended machine: neither wakes a sleeping task.
WATCH_S: Final = 1.0
# Smaller differences between a clock and trio's are no jumps.
JUMP_MS: Final = 20.0

_BOOTTIME: Final = getattr(time, "CLOCK_BOOTTIME", None)


def suspended_ns() -> int:
    """Return the time that the machine was suspended since boot, or less by the time between two reads of clocks."""
    if _BOOTTIME is None:
        return 0  # not Linux
    asleep_too = time.clock_gettime_ns(_BOOTTIME)
    return asleep_too - time.clock_gettime_ns(time.CLOCK_MONOTONIC)


@final
class ElapsedTime:
    """Milliseconds that never go back; *suspended_ns* can be replaced at any time."""

    def __init__(self) -> None:
        self.suspended_ns: Callable[[], int] = suspended_ns
        self._asleep_ns = 0

    def ms(self) -> float:
        self._asleep_ns = max(self._asleep_ns, self.suspended_ns())
        return trio.current_time() * 1000 + self._asleep_ns / 1_000_000


async def watch(now_ms: Callable[[], float], wake: Callable[[], None]) -> None:
    """Call *wake* whenever *now_ms* has jumped against trio's clock, by which tasks sleep; until cancelled."""
    ahead_ms = now_ms() - trio.current_time() * 1000
    while True:
        await trio.sleep(WATCH_S)
        before_ms, ahead_ms = ahead_ms, now_ms() - trio.current_time() * 1000
        if abs(ahead_ms - before_ms) > JUMP_MS:
            wake()
