"""The wall clock, for what is stored; intervals are measured with `trio.current_time`.

The only module that reads the time of day: a simulation replaces it whole.
"""

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


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
