"""A wall clock that follows trio's, so that a test with a mock clock controls both."""

from typing import Final, final

import trio

__all__ = ["TrioClock"]

# 2024-01-01 00:00 UTC, somewhere within a day: not a boundary that a test could meet by accident.
START_MS: Final = 1_704_103_200_000


@final
class TrioClock:
    """A wall clock that advances like `trio.current_time`, from *start_ms* on.

    It may be read outside of trio (a store that is built before the loop runs); its time does not advance there.
    ``skew_ms`` may be changed at any time, like a machine's clock.
    """

    def __init__(self, start_ms: int = START_MS) -> None:
        self.start_ms = start_ms
        self.skew_ms = 0
        self._origin: float | None = None
        self._last_ms = start_ms

    def now_ms(self) -> int:
        try:
            now = trio.current_time()
        except RuntimeError:
            return self._last_ms + self.skew_ms
        if self._origin is None:
            self._origin = now
        self._last_ms = self.start_ms + int((now - self._origin) * 1000)
        return self._last_ms + self.skew_ms
