"""Elapsed time, including the time for which the machine was suspended.

trio's clock stops while a laptop or a virtual machine sleeps, but the wall clock goes on. Delays and times go on as
well. Linux counts the time asleep as the difference of two clocks.
"""

import time
from collections.abc import Callable
from typing import Final, final

import trio

__all__ = ["ElapsedTime", "watch"]

# How often to look whether a clock jumped, or the machine was suspended: neither wakes a sleeping task.
WATCH_S: Final = 1.0
# Smaller changes of a clock against trio's are no jumps.
JUMP_MS: Final = 20.0

_BOOTTIME: Final = getattr(time, "CLOCK_BOOTTIME", None)


def suspended_ns() -> int:
    """Return for how long the machine was suspended since it booted, or less by the time between two reads."""
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
    """Call *wake* whenever *now_ms* has moved differently from trio's clock, by which tasks sleep; until cancelled."""
    ahead_ms = now_ms() - trio.current_time() * 1000
    while True:
        await trio.sleep(WATCH_S)
        before_ms, ahead_ms = ahead_ms, now_ms() - trio.current_time() * 1000
        if abs(ahead_ms - before_ms) > JUMP_MS:
            wake()
