"""The wall clock without its short jumps.

Timers are due at times of the wall clock, which can jump: an administrator sets it, or a bad time server does and
corrects itself a moment later. When the wall clock jumps, this clock continues at the speed of elapsed time, and
follows only after the wall clock has kept its new time for ten seconds. So a jump that is undone in time makes no
delivery early, late or repeated. This clock follows smaller changes, by which NTP adjusts a clock, at once, and also
the time for which the machine was suspended, which elapsed time contains.
"""

from collections.abc import Callable
from typing import Final, final

from martlet.runtime.clock import Clock

__all__ = ["DampedClock"]

# A greater change is a jump, after subtracting this part of the time since the last reading: NTP slews by at most 0.05
# %.
STEP_MS: Final = 250
SLEWED_PART: Final = 1000
# Duration of a jump after which this clock follows it.
CONFIRM_MS: Final = 10_000


@final
class DampedClock:
    """Follows *wall*; detects a jump only when it is read."""

    def __init__(self, wall: Clock, elapsed_ms: Callable[[], float]) -> None:
        self._wall = wall
        self._elapsed_ms = elapsed_ms
        # This clock's time minus the elapsed one.
        self._offset_ms: int | None = None
        # Milliseconds by which the wall clock is ahead of this clock since `_jumped_at_ms` of elapsed time; 0 for no
        # jump.
        self._jump_ms = 0
        self._jumped_at_ms = 0
        self._looked_at_ms = 0
        self.jumps = 0

    def now_ms(self) -> int:
        """Return the milliseconds since 1970-01-01 UTC."""
        elapsed_ms, wall_ms = int(self._elapsed_ms()), self._wall.now_ms()
        if self._offset_ms is None:
            self._offset_ms, self._looked_at_ms = wall_ms - elapsed_ms, elapsed_ms
        step_ms = STEP_MS + (elapsed_ms - self._looked_at_ms) // SLEWED_PART
        self._looked_at_ms = elapsed_ms
        ahead_ms = wall_ms - elapsed_ms - self._offset_ms
        if -step_ms <= ahead_ms <= step_ms:
            self._offset_ms += ahead_ms
            self._jump_ms = 0
            return wall_ms
        if not self._jump_ms or not -step_ms <= ahead_ms - self._jump_ms <= step_ms:
            self._jumped_at_ms = elapsed_ms
            self.jumps += 1
        self._jump_ms = ahead_ms
        if elapsed_ms - self._jumped_at_ms < CONFIRM_MS:
            return elapsed_ms + self._offset_ms
        self._offset_ms += ahead_ms
        self._jump_ms = 0
        return wall_ms

    @property
    def ahead_ms(self) -> int:
        """Return the milliseconds by which the wall clock is ahead of this clock because of a jump; 0 normally."""
        return self._jump_ms
