"""Shared consumption of one queue: who holds which message, until when, and what comes back.

Pure logic over numbers; it reads nothing and sees no clock. A message is, at any time, in
one of five places: never handed out (from `Leases.next` on), held by one holder until a
deadline, waiting to be handed out again (at once, or not before a time), dead (its
deliveries are used up and somebody must bury it), or settled. All below `Leases.low` is
settled: that is the offset a group commits. What is settled above it is known only here,
so a restart hands those messages out once more.

Precedents: the visibility timeout of SQS, the reserve and touch of beanstalkd, RocketMQ's
POP check points. Redelivery does not wait for the messages before it; order is not kept.
"""

import heapq
import math
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Final, final

from martlet.errors import LocalProtocolError

__all__ = ["Leases"]

STALE_TIMERS_MIN: Final = 64


@final
class _Lease:
    """One message that is handed out and not settled; ``holder`` None: it waits, or is dead."""

    __slots__ = ("dead", "deliveries", "holder", "until")

    def __init__(self, holder: Hashable, until: float) -> None:
        self.holder: Hashable | None = holder
        self.until = until
        self.deliveries = 1
        self.dead = False


@final
class Leases:
    """The messages of one queue shared out among holders.

    Args:
      first: the offset to begin with; all below counts as settled.
      window: how many messages may be unsettled, or settled behind an unsettled one; bounds memory.
      deliveries_max: after so many deliveries a message that comes back is dead; 0 for no limit.
    """

    __slots__ = (
        "_dead",
        "_deliveries_max",
        "_held",
        "_order",
        "_slots",
        "_timers",
        "_waiting",
        "_window",
        "low",
        "next",
    )

    def __init__(self, first: int, *, window: int, deliveries_max: int) -> None:
        self.low = first
        self.next = first
        self._window = window
        self._deliveries_max = deliveries_max
        self._slots: dict[int, _Lease] = {}
        self._order: deque[int] = deque()  # every offset handed out from `low` on, settled or not, ascending
        self._held: dict[Hashable, dict[int, None]] = {}
        self._timers: list[tuple[float, int]] = []  # a heap; an entry may be stale
        self._waiting: list[int] = []  # a heap
        self._dead: dict[int, None] = {}

    # sizes

    @property
    def room(self) -> int:
        """How many messages may be handed out for the first time now."""
        return self._window - len(self._order)

    @property
    def size(self) -> int:
        """How many messages this remembers; at most the window."""
        return len(self._order)

    @property
    def unsettled(self) -> int:
        """How many messages are handed out and not settled."""
        return len(self._slots)

    @property
    def waiting(self) -> int:
        """How many messages can be handed out again now."""
        return len(self._waiting)

    def returned(self, count: int) -> list[int]:
        """The first *count* offsets that `hand_again` would give, oldest first."""
        return self._waiting[:1] if count == 1 else heapq.nsmallest(count, self._waiting)

    def is_waiting(self, offset: int) -> bool:
        """Whether the message at *offset* can be handed out again now."""
        lease = self._slots.get(offset)
        return lease is not None and lease.holder is None and not lease.dead and lease.until == -math.inf

    def is_dead(self, offset: int) -> bool:
        """Whether the message at *offset* waits to be buried."""
        return offset in self._dead

    def held(self, holder: Hashable) -> list[int]:
        """The offsets that *holder* holds."""
        return list(self._held.get(holder, ()))

    def deliveries(self, offset: int) -> int:
        """How often the message at *offset* was handed out; 0 when it is settled or never was."""
        lease = self._slots.get(offset)
        return lease.deliveries if lease is not None else 0

    # handing out

    def hand_out(self, holder: Hashable, offsets: Sequence[int], until: float) -> None:
        """Give *holder* messages that nobody had before: ascending, from `next` on, at most `room`.

        Offsets that are left out between them hold nothing for anybody and count as settled.

        Raises:
          LocalProtocolError: an offset is below `next`, or there are more than `room`.
        """
        if len(offsets) > self.room:
            raise LocalProtocolError(
                f"{len(offsets)} messages are more than the {self.room} that the window has room for"
            )
        held = self._held.setdefault(holder, {}) if offsets else {}
        for offset in offsets:
            if offset < self.next:
                raise LocalProtocolError(f"offset {offset} was handed out before; the next is {self.next}")
            self.next = offset + 1
            self._slots[offset] = _Lease(holder, until)
            held[offset] = None
            heapq.heappush(self._timers, (until, offset))
        self._order.extend(offsets)
        self._trim()

    def skip_to(self, offset: int) -> None:
        """Count everything from `next` up to *offset* as settled: nothing there is for anybody."""
        if offset > self.next:
            self.next = offset
            self._trim()

    def hand_again(self, holder: Hashable, count: int, until: float) -> list[tuple[int, int]]:
        """Give *holder* up to *count* messages that came back, oldest first: (offset, which delivery this is)."""
        given: list[tuple[int, int]] = []
        held = self._held.setdefault(holder, {})
        while self._waiting and len(given) < count:
            offset = heapq.heappop(self._waiting)
            lease = self._slots[offset]
            lease.holder = holder
            lease.until = until
            lease.deliveries += 1
            held[offset] = None
            heapq.heappush(self._timers, (until, offset))
            given.append((offset, lease.deliveries))
        if not held:
            del self._held[holder]
        return given

    # what holders say

    def ack(self, holder: Hashable, offset: int) -> bool:
        """Settle the message at *offset*; False when *holder* does not hold it (any more)."""
        lease = self._slots.get(offset)
        if lease is None or lease.holder is None or lease.holder != holder:
            return False
        self._let_go(lease, offset)
        self._settle(offset)
        return True

    def extend(self, holder: Hashable, offset: int, until: float) -> bool:
        """Let *holder* keep the message longer, never shorter; False when it does not hold it."""
        lease = self._slots.get(offset)
        if lease is None or lease.holder is None or lease.holder != holder:
            return False
        lease.until = max(lease.until, until)
        return True

    def give_back(self, holder: Hashable, offset: int, at: float = -math.inf) -> bool:
        """Let the message at *offset* be handed out again, not before *at*; False when *holder* does not hold it."""
        lease = self._slots.get(offset)
        if lease is None or lease.holder is None or lease.holder != holder:
            return False
        self._let_go(lease, offset)
        self._return(lease, offset, at)
        return True

    # time

    def lapse(self, now: float, lost: list[Hashable] | None = None) -> int:
        """Take back what silent holders held too long; returns how many messages can be handed out more than before.

        Each holder is added to *lost* as often as it lost a message.
        """
        before = len(self._waiting)
        while self._timers and self._timers[0][0] <= now:
            _, offset = heapq.heappop(self._timers)
            lease = self._slots.get(offset)
            if lease is None or lease.dead or lease.until == -math.inf:
                continue
            if lease.until > now:
                heapq.heappush(self._timers, (lease.until, offset))
            elif lease.holder is not None:
                if lost is not None:
                    lost.append(lease.holder)
                self._let_go(lease, offset)
                self._return(lease, offset, -math.inf)
            else:
                self._offer(lease, offset)
        return len(self._waiting) - before

    def deadline(self) -> float:
        """When `lapse` has something to do; may be early, never late. Infinity for never."""
        return self._timers[0][0] if self._timers else math.inf

    # the dead

    def dead(self) -> list[int]:
        """The messages whose deliveries are used up; each stays until it is settled with `bury`."""
        return list(self._dead)

    def bury(self, offset: int) -> None:
        """The dead message at *offset* is safe elsewhere: settle it."""
        del self._dead[offset]
        self._settle(offset)

    # inside

    def _let_go(self, lease: _Lease, offset: int) -> None:
        held = self._held[lease.holder]
        del held[offset]
        if not held:
            del self._held[lease.holder]
        lease.holder = None

    def _return(self, lease: _Lease, offset: int, at: float) -> None:
        if self._deliveries_max and lease.deliveries >= self._deliveries_max:
            lease.dead = True
            self._dead[offset] = None
        elif at == -math.inf:
            self._offer(lease, offset)
        else:
            lease.until = at
            heapq.heappush(self._timers, (at, offset))
        self._forget_stale_timers()

    def _offer(self, lease: _Lease, offset: int) -> None:
        lease.until = -math.inf
        heapq.heappush(self._waiting, offset)

    def _settle(self, offset: int) -> None:
        del self._slots[offset]
        self._trim()
        self._forget_stale_timers()

    def _trim(self) -> None:
        order, slots = self._order, self._slots
        while order and order[0] not in slots:
            order.popleft()
        self.low = order[0] if order else self.next

    def _forget_stale_timers(self) -> None:
        """Settled messages leave their timers behind; rebuild before these outnumber the live ones."""
        if len(self._timers) > STALE_TIMERS_MIN + 2 * len(self._slots):
            self._timers = [(lease.until, offset) for offset, lease in self._slots.items() if lease.until > -math.inf]
            heapq.heapify(self._timers)
