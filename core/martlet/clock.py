"""The wall clock, for what is stored; intervals are measured with `trio.current_time`.

The only module that reads the time of day: a simulation replaces it whole.
"""

import os
import time
from typing import Final, Protocol

__all__ = ["Clock", "SystemClock", "process_age_s"]

_IMPORTED: Final = time.perf_counter()


class Clock(Protocol):
    """Tells the time that goes into records."""

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        ...


class SystemClock:
    """The machine's own clock; it may jump, so nothing waits by it."""

    __slots__ = ()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


def process_age_s() -> float:
    """How long ago this process was started; in whole clock ticks (10 ms) where the kernel tells."""
    try:
        with open("/proc/self/stat", "rb") as stat:
            # proc(5): the 22nd field, counted behind the parenthesised name; ticks since boot
            ticks = int(stat.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
