"""When to look at which leases of one queue: a heap that does not grow with leases that were settled early."""

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Final, final

from martlet.groups.leases.lease import Lease

__all__ = ["STALE_TIMERS_MIN", "LeaseTimers"]

STALE_TIMERS_MIN: Final = 64
# Leases that end at one time and have one entry: `Leases.lapse` ends them without looking at its limit.
ENDED_TOGETHER: Final = 256


@final
class LeaseTimers:
    """Timers of offsets, of which some are *stale*: the message was settled, or has another deadline by now.

    ``heap`` has a time and its offsets in each entry, ``count`` is the number of all offsets in it.
    """

    __slots__ = ("count", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[float, tuple[int, ...]]] = []
        self.count = 0

    def add(self, at: float, offsets: tuple[int, ...]) -> None:
        """Have `Leases.lapse` look at *offsets* from *at* on."""
        heapq.heappush(self.heap, (at, offsets))
        self.count += len(offsets)

    def add_many(self, at: float, offsets: Sequence[int]) -> None:
        """As `add`, for many *offsets*."""
        for first in range(0, len(offsets), ENDED_TOGETHER):
            self.add(at, tuple(offsets[first : first + ENDED_TOGETHER]))

    def pop(self) -> tuple[int, ...]:
        """Remove the earliest timer; return its offsets."""
        _, offsets = heapq.heappop(self.heap)
        self.count -= len(offsets)
        return offsets

    def forget_stale(self, leases: Mapping[int, Lease]) -> None:
        """Set the timers of *leases* anew before stale ones outnumber them."""
        if self.count <= STALE_TIMERS_MIN + 2 * len(leases):
            return
        ends: dict[float, list[int]] = {}
        for offset, lease in leases.items():
            if abs(lease.until) < math.inf:
                ends.setdefault(lease.until, []).append(offset)
        self.heap = [(until, tuple(offsets)) for until, offsets in ends.items()]
        self.count = sum(map(len, ends.values()))
        heapq.heapify(self.heap)
