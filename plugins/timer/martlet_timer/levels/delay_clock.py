"""A clock that does not jump with the wall clock, and the times of records on it.

A delay is a length of time, but a record has only its store time by the wall clock. If an administrator or NTP sets
that clock while the message waits, the delay must stay the same. So each jump is kept with the log position at which it
was detected: records from this position on have the new time. A restart begins with the wall clock's current time.
"""

from collections.abc import Callable
from typing import Final, final

from martlet.runtime.clock import Clock

__all__ = ["DelayClock"]

# Smaller differences result from reading two clocks one after the other, and from rounding to milliseconds.
JUMP_MS: Final = 2.0
# If reading both clocks took longer, their difference is not reliable.
READ_MS_MAX: Final = 0.5
JUMPS_MAX: Final = 256


@final
class DelayClock:
    """Milliseconds since 1970 by the wall clock at the start of the event loop, and by *elapsed_ms* from then on."""

    def __init__(self, clock: Clock, elapsed_ms: Callable[[], float]) -> None:
        self._clock = clock
        self._elapsed_ms = elapsed_ms
        self._began = -1.0  # unknown until the event loop asks for the time
        self._started_ms = 0.0
        # (position, milliseconds by which the wall clock was ahead of this clock from the position on).
        self._shifts: list[tuple[int, float]] = [(0, 0.0)]
        self.jumps = 0

    def now_ms(self) -> float:
        """Return the time, for comparison with the results of `stored_ms`."""
        if self._began < 0:
            # The wall clock is read first: a pause between the reads makes this clock late, so that no delivery is
            # early.
            self._started_ms = float(self._clock.now_ms())
            self._began = self._elapsed_ms()
        return self._started_ms + self._elapsed_ms() - self._began

    def observe(self, position: int) -> None:
        """Compare this clock with the wall clock; records from *position* on have the wall clock's current time."""
        before = self.now_ms()
        wall = self._clock.now_ms()
        now = self.now_ms()
        shift = wall - now
        if now - before > READ_MS_MAX or abs(shift - self._shifts[-1][1]) < JUMP_MS:
            return
        self.jumps += 1
        self._shifts.append((position, shift))
        if len(self._shifts) > JUMPS_MAX:
            del self._shifts[1]

    def stored_ms(self, position: int, store_ms: int) -> float:
        """Return the store time of the record at *position* on this clock, given the wall clock's time in it."""
        for start, shift in reversed(self._shifts):
            if position >= start:
                return store_ms - shift
        return float(store_ms)
