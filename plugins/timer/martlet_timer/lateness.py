"""The lateness of deliveries, as a histogram."""

from bisect import bisect_left
from typing import Final, final

__all__ = ["Lateness"]

BOUNDS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 1000, 10_000)


@final
class Lateness:
    """Counts of deliveries by lateness: the time from when a message was due until it was readable."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_MS) + 1)
        self._max_ms = 0.0

    def add(self, late_ms: float) -> None:
        self._counts[bisect_left(BOUNDS_MS, late_ms)] += 1
        self._max_ms = max(self._max_ms, late_ms)

    def statistics(self) -> dict[str, object]:
        """Return the number of deliveries up to each bound of lateness in ms, and the maximum lateness."""
        late: dict[str, object] = {}
        total = 0
        for bound, count in zip(BOUNDS_MS, self._counts, strict=False):
            total += count
            late[f"late_{bound}_ms"] = total
        return {**late, "late_max_ms": round(self._max_ms)}
