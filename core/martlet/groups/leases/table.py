"""The unsettled messages of one queue of a shared group, and their holders.

Everything below `LeaseTable.low` is settled: this is the offset that a group commits. Messages settled above it are
tracked here, too. `LeaseReturns` has the messages that returned to the group, `LeaseTimers` the times of the next check
of each lease.
"""

import heapq
import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Final, final

__all__ = ["DEAD_DELIVERIES", "SETTLED_MIN", "STALE_TIMERS_MIN", "Lease", "LeaseReturns", "LeaseTable", "LeaseTimers"]

# Settled messages after an unsettled one that are tracked at least.
SETTLED_MIN: Final = 64
# Notes and snapshots mark a dead message with this number of deliveries.
DEAD_DELIVERIES: Final = 1 << 20
STALE_TIMERS_MIN: Final = 64
# Leases that end at one time and share one entry: `Leases.lapse` ends them without checking its limit.
ENDED_TOGETHER: Final = 256


@final
class Lease:
    """A message that is delivered and not settled; without a ``holder`` it is waiting or dead.

    The messages of a first delivery share one lease, and so do restored messages that are alike. A shared lease never
    changes (``shared``); a message whose state changes gets its own first.
    """

    __slots__ = (
        "dead",
        "deliveries",
        "generation",
        "holder",
        "length_s",
        "settling",
        "shared",
        "until",
        "until_before",
    )

    def __init__(
        self,
        holder: Hashable | None,
        until: float,
        generation: int,
        length_s: float,
        deliveries: int = 1,
        *,
        shared: bool = False,
    ) -> None:
        self.holder: Hashable | None = holder
        self.until = until
        self.generation = generation
        self.length_s = length_s
        self.shared = shared
        self.deliveries = deliveries
        self.dead = False
        # An acknowledgement is in the current commit: only its result or the deadline may change the state now.
        self.settling = False
        self.until_before = until  # the deadline without the acknowledgement


@final
class LeaseTable:
    """The tracked messages of one queue; only `martlet.groups.leases.queue_leases` changes it.

    Args:
      first: the offset to begin with; everything below is settled.
      window: the maximum number of messages tracked; limits memory. It counts unsettled messages and settled ones after
        an unsettled one: at most as many, and `SETTLED_MIN` more.
    """

    __slots__ = ("by_holder", "low", "next", "order", "slots", "window")

    def __init__(self, first: int, window: int) -> None:
        self.low = first
        self.next = first  # the first offset never delivered
        self.window = window
        self.slots: dict[int, Lease] = {}
        # Every unsettled offset, and some settled ones above the lowest, ascending.
        self.order: deque[int] = deque()
        self.by_holder: dict[Hashable, dict[int, None]] = {}

    # queries

    @property
    def room(self) -> int:
        """The number of messages that may be delivered for the first time now."""
        return self.window - len(self.order)

    @property
    def size(self) -> int:
        """The number of tracked messages; at most the window."""
        return len(self.order)

    @property
    def unsettled(self) -> int:
        """The number of messages that are delivered and not settled."""
        return len(self.slots)

    def is_settled(self, offset: int) -> bool:
        """Return whether the message at *offset* is settled."""
        return offset < self.next and offset not in self.slots

    def held(self, holder: Hashable) -> list[int]:
        """Return the offsets that *holder* holds."""
        return list(self.by_holder.get(holder, ()))

    def holds(self, holder: Hashable, offset: int) -> bool:
        """Return whether *holder* holds the message at *offset*, and may settle it."""
        lease = self.slots.get(offset)
        return lease is not None and lease.holder is not None and lease.holder == holder and not lease.settling

    def held_by_deliveries(self, holder: Hashable) -> dict[int, list[int]]:
        """Return the offsets that *holder* holds, by the number of their deliveries."""
        by_deliveries: dict[int, list[int]] = {}
        for offset in self.by_holder.get(holder, ()):
            by_deliveries.setdefault(self.slots[offset].deliveries, []).append(offset)
        return by_deliveries

    def deliveries(self, offset: int) -> int:
        """Return the number of deliveries of the message at *offset*; 0 if it is settled or was never delivered."""
        lease = self.slots.get(offset)
        return lease.deliveries if lease is not None else 0

    def generation(self, offset: int) -> int:
        """Return the generation of the newest delivery of the message at *offset*; 0 if there is no lease."""
        lease = self.slots.get(offset)
        return lease.generation if lease is not None else 0

    @property
    def newest(self) -> int:
        """The newest generation of all unsettled messages; 0 if there are none."""
        return max((lease.generation for lease in set(self.slots.values())), default=0)

    def holder(self, offset: int, generation: int) -> Hashable | None:
        """Return the holder of the message at *offset* since *generation*; None if that handle is no longer valid."""
        lease = self.slots.get(offset)
        return lease.holder if lease is not None and lease.generation == generation else None

    def unsettled_leases(self) -> list[tuple[int, float, int, int, float]]:
        """Return for each unsettled message, ascending: offset, deadline, deliveries, generation, length in seconds.

        The length is that of the whole lease: infinity if it is unknown, -1 if nobody holds the message.
        """
        leases: list[tuple[int, float, int, int, float]] = []
        for offset in self.order:
            lease = self.slots.get(offset)
            if lease is not None:
                length_s = lease.length_s if lease.holder is not None else -1
                leases.append((offset, lease.until, lease.deliveries, lease.generation, length_s))
        return leases

    @property
    def is_settling(self) -> bool:
        """Whether the result of an acknowledgement is pending."""
        return any(lease.settling for lease in self.slots.values())

    # changes

    def add(self, lease: Lease, offsets: Sequence[int]) -> None:
        """Track messages at *offsets*, which ascend and are beyond all others, with one shared *lease*."""
        self.slots.update(dict.fromkeys(offsets, lease))
        if lease.holder is not None:
            self.by_holder.setdefault(lease.holder, {}).update(dict.fromkeys(offsets))
        self.order.extend(offsets)
        self.next = max(self.next, offsets[-1] + 1)
        self.low = self.order[0]

    def insert(self, lease: Lease, offsets: Sequence[int]) -> None:
        """Track settled messages at *offsets* again, with one shared *lease* that nobody holds."""
        self.slots.update(dict.fromkeys(offsets, lease))
        self.order = deque(sorted(self.slots))
        self.low = self.order[0]

    def find(self, holder: Hashable, offset: int) -> Lease | None:
        """Return the lease of the message at *offset*, to change it.

        None if *holder* does not hold the message, or an acknowledgement is pending.
        """
        lease = self.slots.get(offset)
        if lease is None or lease.holder is None or lease.settling or lease.holder != holder:
            return None
        return self.own(lease, offset)

    def own(self, lease: Lease, offset: int) -> Lease:
        """Return a lease that only the message at *offset* has."""
        if lease.shared:
            own_lease = Lease(lease.holder, lease.until, lease.generation, lease.length_s, lease.deliveries)
            self.slots[offset] = own_lease
            return own_lease
        return lease

    def release(self, holder: Hashable, offset: int) -> None:
        """Note that *holder* no longer holds the message at *offset*."""
        held = self.by_holder[holder]
        del held[offset]
        if not held:
            del self.by_holder[holder]

    def trim(self) -> None:
        """Advance ``low`` to the first unsettled message."""
        order, slots = self.order, self.slots
        while order and order[0] not in slots:
            order.popleft()
        self.low = order[0] if order else self.next

    def forget_settled(self) -> None:
        """Stop tracking settled messages where one unsettled message would fill the window with them."""
        slots, order = self.slots, self.order
        if order[0] not in slots:
            self.trim()
        elif len(order) > SETTLED_MIN + 2 * len(slots):
            self.order = deque(offset for offset in order if offset in slots)


@final
class LeaseReturns:
    """Returned messages, which can be delivered again: now or, if parked, once a member may take them."""

    __slots__ = ("_table", "available", "newest", "parked")

    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self.available: list[int] = []  # a heap
        self.parked: dict[int, None] = {}
        self.newest = 0  # the highest generation of all returned messages

    def has(self, offset: int) -> bool:
        """Return whether the message at *offset* can be delivered again now."""
        lease = self._table.slots.get(offset)
        return lease is not None and lease.holder is None and not lease.dead and lease.until == -math.inf

    def run(self, count_max: int) -> tuple[int, int]:
        """Return the first offset that `Leases.hand_again` would return, and how many from there without a gap.

        At most *count_max*, and only messages with the same number of deliveries.
        """
        slots = self._table.slots
        first = end = self.available[0]
        deliveries = slots[first].deliveries
        while end - first < count_max and self.has(end) and slots[end].deliveries == deliveries:
            end += 1
        return first, end - first

    def first(self, count: int) -> list[int]:
        """Return the first *count* offsets that `Leases.hand_again` would return, oldest first."""
        heap, offsets = self.available, list[int]()
        nodes = [(heap[0], 0)] if heap else []
        while nodes and len(offsets) < count:
            offset, node = heapq.heappop(nodes)
            offsets.append(offset)
            for child in range(2 * node + 1, min(2 * node + 3, len(heap))):
                heapq.heappush(nodes, (heap[child], child))
        return offsets

    def offer(self, lease: Lease, offset: int) -> None:
        """Make the message at *offset*, which has its own *lease*, available."""
        lease.until = -math.inf
        if lease.generation > self.newest:
            self.newest = lease.generation
        heapq.heappush(self.available, offset)

    def offer_alike(self, lease: Lease, offsets: Sequence[int]) -> None:
        """Make messages available that share one *lease*, whose state is already set."""
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


@final
class LeaseTimers:
    """Timers of offsets, of which some are *stale*: the message was settled, or has another deadline by now.

    Leases that are settled early do not make it grow.

    ``heap`` has a time and its offsets in each entry, ``count`` is the number of all offsets in it.
    """

    __slots__ = ("count", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[float, tuple[int, ...]]] = []
        self.count = 0

    def add(self, at: float, offsets: tuple[int, ...]) -> None:
        """Make `Leases.lapse` check *offsets* from *at* on."""
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
        """Recreate the timers of *leases* before stale ones outnumber them."""
        if self.count <= STALE_TIMERS_MIN + 2 * len(leases):
            return
        offsets_by_end: dict[float, list[int]] = {}
        for offset, lease in leases.items():
            if abs(lease.until) < math.inf:
                offsets_by_end.setdefault(lease.until, []).append(offset)
        self.heap = [(until, tuple(offsets)) for until, offsets in offsets_by_end.items()]
        self.count = sum(map(len, offsets_by_end.values()))
        heapq.heapify(self.heap)
