"""The wall clock, for timestamps in records; intervals are measured with `trio.current_time`.

This is the only module that reads the time of day, so that a simulation can replace it.
"""

import os
import time
from typing import Final, Protocol

__all__ = ["Clock", "SystemClock", "process_age_s"]

_IMPORTED: Final = time.perf_counter()


class Clock(Protocol):
    """Provides the timestamps of records."""

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        ...


class SystemClock:
    """The system clock; it may jump, so it is not used for timeouts."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


def process_age_s() -> float:
    """Return the time since this process started; in clock ticks (10 ms) if the kernel provides it."""
    try:
        with open("/proc/self/stat", "rb") as stat:
            # proc(5): field 22, start time in ticks since boot; field 3 is the first one after the name in parentheses
            ticks = int(stat.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
