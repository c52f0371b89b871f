"""Which messages of one queue a shared group has not settled, and who holds them.

Everything below `LeaseTable.low` is settled: that is the offset that a group commits. Messages settled above it are
tracked here, too.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Final, final

from martlet.groups.leases.lease import Lease

__all__ = ["SETTLED_MIN", "LeaseTable"]

# Settled messages after an unsettled one that are tracked at least.
SETTLED_MIN: Final = 64


@final
class LeaseTable:
    """The messages of one queue that are tracked; only `martlet.groups.leases.leases` changes it.

    Args:
      first: the offset to begin with; everything below is settled.
      window: the maximum number of messages tracked; limits memory. Those are the unsettled ones, and settled ones
        after an unsettled one: at most as many, and `SETTLED_MIN` more.
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

    # what is known

    @property
    def room(self) -> int:
        """How many messages may be delivered for the first time now."""
        return self.window - len(self.order)

    @property
    def size(self) -> int:
        """How many messages are tracked; at most the window."""
        return len(self.order)

    @property
    def unsettled(self) -> int:
        """How many messages are delivered and not settled."""
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
        found: dict[int, list[int]] = {}
        for offset in self.by_holder.get(holder, ()):
            found.setdefault(self.slots[offset].deliveries, []).append(offset)
        return found

    def deliveries(self, offset: int) -> int:
        """Return how often the message at *offset* was delivered; 0 if it is settled or never was."""
        lease = self.slots.get(offset)
        return lease.deliveries if lease is not None else 0

    def generation(self, offset: int) -> int:
        """Return the generation of the newest delivery of the message at *offset*; 0 if it is settled or never was."""
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

        The length is that of the whole lease, infinity if nobody said it, and -1 if nobody holds the message.
        """
        found: list[tuple[int, float, int, int, float]] = []
        for offset in self.order:
            lease = self.slots.get(offset)
            if lease is not None:
                length_s = lease.length_s if lease.holder is not None else -1
                found.append((offset, lease.until, lease.deliveries, lease.generation, length_s))
        return found

    @property
    def is_settling(self) -> bool:
        """Whether the result of an acknowledgement is pending."""
        return any(lease.settling for lease in self.slots.values())

    # what changes

    def add(self, lease: Lease, offsets: Sequence[int]) -> None:
        """Track messages at *offsets*, which ascend and are beyond all others, with one shared *lease*."""
        self.slots.update(dict.fromkeys(offsets, lease))
        if lease.holder is not None:
            self.by_holder.setdefault(lease.holder, {}).update(dict.fromkeys(offsets))
        self.order.extend(offsets)
        self.next = max(self.next, offsets[-1] + 1)
        self.low = self.order[0]

    def insert(self, lease: Lease, offsets: Sequence[int]) -> None:
        """Track messages at *offsets* again, which were settled, with one shared *lease* that nobody holds."""
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
        """Return a lease of the message at *offset* alone."""
        if lease.shared:
            own = Lease(lease.holder, lease.until, lease.generation, lease.length_s, lease.deliveries)
            self.slots[offset] = own
            return own
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
        """Track less, after messages were settled: one that is not must not fill the window with those after it."""
        slots, order = self.slots, self.order
        if order[0] not in slots:
            self.trim()
        elif len(order) > SETTLED_MIN + 2 * len(slots):
            self.order = deque(offset for offset in order if offset in slots)
