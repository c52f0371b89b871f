"""The messages of one queue that a shared group has taken back, and that wait to be delivered again."""

import heapq
import math
from collections.abc import Sequence
from typing import final

from martlet.groups.leases.lease import Lease
from martlet.groups.leases.table import LeaseTable

__all__ = ["LeaseReturns"]


@final
class LeaseReturns:
    """Messages that can be delivered again now, and those that are parked until somebody may take them."""

    __slots__ = ("_table", "available", "newest", "parked")

    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self.available: list[int] = []  # a heap
        self.parked: dict[int, None] = {}
        self.newest = 0  # the highest generation of all messages that returned

    def has(self, offset: int) -> bool:
        """Return whether the message at *offset* can be delivered again now."""
        lease = self._table.slots.get(offset)
        return lease is not None and lease.holder is None and not lease.dead and lease.until == -math.inf

    def run(self, most: int) -> tuple[int, int]:
        """Return the first offset that `Leases.hand_again` would return, and how many it would return without a gap.

        At most *most*, and only messages that were delivered equally often.
        """
        slots = self._table.slots
        first = end = self.available[0]
        deliveries = slots[first].deliveries
        while end - first < most and self.has(end) and slots[end].deliveries == deliveries:
            end += 1
        return first, end - first

    def first(self, count: int) -> list[int]:
        """Return the first *count* offsets that `Leases.hand_again` would return, oldest first."""
        heap, found = self.available, list[int]()
        nodes = [(heap[0], 0)] if heap else []
        while nodes and len(found) < count:
            offset, node = heapq.heappop(nodes)
            found.append(offset)
            for child in range(2 * node + 1, min(2 * node + 3, len(heap))):
                heapq.heappush(nodes, (heap[child], child))
        return found

    def offer(self, lease: Lease, offset: int) -> None:
        """Make the message at *offset*, which has its own *lease*, available."""
        lease.until = -math.inf
        if lease.generation > self.newest:
            self.newest = lease.generation
        heapq.heappush(self.available, offset)

    def offer_alike(self, lease: Lease, offsets: Sequence[int]) -> None:
        """Make messages available that have one shared *lease*, which says so already."""
        self.newest = max(self.newest, lease.generation)
        self.available += offsets
        heapq.heapify(self.available)

    def park(self) -> None:
        """Pass over the message that `Leases.hand_again` would return first."""
        offset = heapq.heappop(self.available)
        self._table.own(self._table.slots[offset], offset).until = math.inf
        self.parked[offset] = None

    def unpark(self) -> None:
        """Make all parked messages available."""
        parked, self.parked = self.parked, {}
        for offset in parked:
            self.offer(self._table.own(self._table.slots[offset], offset), offset)
