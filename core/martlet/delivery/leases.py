"""Shared consumption of one queue: which consumer holds which message, until when, and what is delivered again.

Pure logic over numbers, without I/O or clock. At any time a message is in one of five states: never delivered (from
`Leases.next` on), held by one holder until a deadline, waiting to be delivered again (at once, or not before a time),
dead (its deliveries are used up; it must become a dead letter), or settled. Everything below `Leases.low` is settled:
that is the offset that a group commits. Messages settled above it are tracked here, and `group_state.py` preserves them
across restarts.

Each delivery has a *generation*: its time in ms. Offset and generation form a handle by which anyone may settle the
message, over any connection. A counter instead of a time would produce the same handles again after a restart.

Precedents: the visibility timeout of SQS, the reserve and touch of beanstalkd, RocketMQ's POP check points. Redelivery
does not wait for earlier messages; order is not preserved.
"""

import heapq
import math
from collections import deque
from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Final, final

from martlet.errors import LocalProtocolError

__all__ = ["Leases"]

STALE_TIMERS_MIN: Final = 64
# Restored leases that `lapse` ends without looking at its limit.
ENDED_TOGETHER: Final = 256
# Of `lapse`: no limit.
ALL: Final = 1 << 62
# Settled messages after an unsettled one that are tracked at least.
SETTLED_MIN: Final = 64


@final
class _Lease:
    """A message that is delivered and not settled; without a ``holder`` it is waiting or dead.

    The messages of a first delivery have one lease together, and so have restored ones that are alike. It never changes
    (``shared``); a message whose state changes gets its own first.
    """

    __slots__ = ("before", "dead", "deliveries", "generation", "holder", "length_s", "settling", "shared", "until")

    def __init__(
        self, holder: Hashable | None, until: float, generation: int, length_s: float, *, shared: bool = False
    ) -> None:
        self.holder: Hashable | None = holder
        self.until = until
        self.generation = generation
        self.length_s = length_s
        self.shared = shared
        self.deliveries = 1
        self.dead = False
        # An acknowledgement is in the current commit: only its result or the deadline may change the state now.
        self.settling = False
        self.before = until  # the deadline without it


@final
class Leases:
    """The messages of one queue, distributed to holders.

    Args:
      first: the offset to begin with; everything below is settled.
      window: the maximum number of messages tracked; limits memory. Those are the unsettled ones, and settled ones
        after an unsettled one: at most as many, and `SETTLED_MIN` more.
      deliveries_max: a message that returns after this many deliveries is dead; 0 for no limit.
      lapses_count: whether the end of a lease can make a message dead.
    """

    __slots__ = (
        "_dead",
        "_held",
        "_order",
        "_parked",
        "_slots",
        "_timed",
        "_timers",
        "_waiting",
        "deliveries_max",
        "lapses_count",
        "looked_at",
        "low",
        "newest_returned",
        "next",
        "window",
    )

    def __init__(self, first: int, *, window: int, deliveries_max: int, lapses_count: bool = True) -> None:
        self.low = first
        self.next = first
        self.window = window
        self.deliveries_max = deliveries_max
        self.lapses_count = lapses_count
        self._slots: dict[int, _Lease] = {}
        # Every unsettled offset, and some settled ones above the lowest, ascending.
        self._order: deque[int] = deque()
        self._held: dict[Hashable, dict[int, None]] = {}
        self._timers: list[tuple[float, tuple[int, ...]]] = []  # a heap; an entry may be stale
        self._timed = 0  # offsets in _timers
        self._waiting: list[int] = []  # a heap
        self._dead: dict[int, None] = {}
        self._parked: dict[int, None] = {}  # waiting until `unpark`
        self.newest_returned = 0  # the highest generation of all messages that returned
        self.looked_at = 0  # ends of leases that `lapse` has looked at, some of them of settled messages

    def restore(
        self,
        holder: Hashable,
        offsets: Sequence[int],
        until: float,
        deliveries: int,
        generation: int,
        length_s: float = math.inf,
    ) -> None:
        """Restore leases of an earlier run for *holder*; call it in ascending order, before anything else."""
        lease = _Lease(holder, until, generation, length_s, shared=True)
        lease.deliveries = deliveries
        self._slots.update(dict.fromkeys(offsets, lease))
        self._held.setdefault(holder, {}).update(dict.fromkeys(offsets))
        self._order.extend(offsets)
        if until < math.inf:
            self._wake_together(until, offsets)
        self.next = max(self.next, offsets[-1] + 1)
        self.low = self._order[0]

    # sizes

    @property
    def room(self) -> int:
        """How many messages may be delivered for the first time now."""
        return self.window - len(self._order)

    @property
    def size(self) -> int:
        """How many messages are tracked; at most the window."""
        return len(self._order)

    @property
    def unsettled(self) -> int:
        """How many messages are delivered and not settled."""
        return len(self._slots)

    @property
    def parked(self) -> int:
        """How many messages wait for a holder that takes them."""
        return len(self._parked)

    @property
    def waiting(self) -> int:
        """How many messages can be delivered again now."""
        return len(self._waiting)

    def returned_run(self, most: int) -> tuple[int, int]:
        """Return the first offset that `hand_again` would return, and how many it would return without a gap.

        At most *most*, and only messages that were delivered equally often.
        """
        first = end = self._waiting[0]
        deliveries = self._slots[first].deliveries
        while end - first < most and self.is_waiting(end) and self._slots[end].deliveries == deliveries:
            end += 1
        return first, end - first

    def returned(self, count: int) -> list[int]:
        """Return the first *count* offsets that `hand_again` would return, oldest first."""
        heap, found = self._waiting, list[int]()
        nodes = [(heap[0], 0)] if heap else []
        while nodes and len(found) < count:
            offset, node = heapq.heappop(nodes)
            found.append(offset)
            for child in range(2 * node + 1, min(2 * node + 3, len(heap))):
                heapq.heappush(nodes, (heap[child], child))
        return found

    def is_waiting(self, offset: int) -> bool:
        """Return whether the message at *offset* can be delivered again now."""
        lease = self._slots.get(offset)
        return lease is not None and lease.holder is None and not lease.dead and lease.until == -math.inf

    def is_dead(self, offset: int) -> bool:
        """Return whether the message at *offset* must become a dead letter."""
        return offset in self._dead

    def held(self, holder: Hashable) -> list[int]:
        """Return the offsets that *holder* holds."""
        return list(self._held.get(holder, ()))

    def is_settled(self, offset: int) -> bool:
        """Return whether the message at *offset* is settled."""
        return offset < self.next and offset not in self._slots

    def holds(self, holder: Hashable, offset: int) -> bool:
        """Return whether *holder* holds the message at *offset*, and may settle it."""
        lease = self._slots.get(offset)
        return lease is not None and lease.holder is not None and lease.holder == holder and not lease.settling

    def held_by_deliveries(self, holder: Hashable) -> dict[int, list[int]]:
        """Return the offsets that *holder* holds, by the number of their deliveries."""
        found: dict[int, list[int]] = {}
        for offset in self._held.get(holder, ()):
            found.setdefault(self._slots[offset].deliveries, []).append(offset)
        return found

    def deliveries(self, offset: int) -> int:
        """Return how often the message at *offset* was delivered; 0 if it is settled or never was."""
        lease = self._slots.get(offset)
        return lease.deliveries if lease is not None else 0

    def generation(self, offset: int) -> int:
        """Return the generation of the newest delivery of the message at *offset*; 0 if it is settled or never was."""
        lease = self._slots.get(offset)
        return lease.generation if lease is not None else 0

    def holder(self, offset: int, generation: int) -> Hashable | None:
        """Return the holder of the message at *offset* since *generation*; None if that handle is no longer valid."""
        lease = self._slots.get(offset)
        return lease.holder if lease is not None and lease.generation == generation else None

    def unsettled_leases(self) -> list[tuple[int, float, int, int, float]]:
        """Return for each unsettled message, ascending: offset, deadline, deliveries, generation, length in seconds.

        The length is that of the whole lease, infinity if nobody said it, and -1 if nobody holds the message.
        """
        found: list[tuple[int, float, int, int, float]] = []
        for offset in self._order:
            lease = self._slots.get(offset)
            if lease is not None:
                length_s = lease.length_s if lease.holder is not None else -1
                found.append((offset, lease.until, lease.deliveries, lease.generation, length_s))
        return found

    @property
    def is_settling(self) -> bool:
        """Return whether the result of an acknowledgement is pending."""
        return any(lease.settling for lease in self._slots.values())

    # deliveries

    def hand_out(
        self,
        holder: Hashable,
        offsets: Sequence[int],
        until: float,
        generation: int = 0,
        length_s: float = math.inf,
    ) -> None:
        """Lease new messages to *holder*: ascending offsets, all >= `next`, at most `room`.

        *until* is infinity for a lease that never expires; *length_s* is how long it holds in all. Offsets skipped
        between them are for nobody and count as settled.

        Raises:
          LocalProtocolError: an offset is below `next`, or there are more than `room`.
        """
        if len(offsets) > self.room:
            raise LocalProtocolError(f"{len(offsets)} messages exceed the room of {self.room} in the window")
        if not offsets:
            return
        if offsets[0] < self.next:
            raise LocalProtocolError(f"offset {offsets[0]} was delivered before; the next is {self.next}")
        self.next = offsets[-1] + 1
        self._slots.update(dict.fromkeys(offsets, _Lease(holder, until, generation, length_s, shared=True)))
        self._held.setdefault(holder, {}).update(dict.fromkeys(offsets))
        if until < math.inf:
            self._wake_at(until, tuple(offsets))
        self._order.extend(offsets)
        self.low = self._order[0]

    def park(self, offsets: Sequence[int], generation: int = 0) -> None:
        """Pass over new messages that no holder takes, as `hand_out`; they are available after `unpark`."""
        lease = _Lease(None, math.inf, generation, math.inf, shared=True)
        lease.deliveries = 0
        self.next = offsets[-1] + 1
        self._slots.update(dict.fromkeys(offsets, lease))
        self._parked.update(dict.fromkeys(offsets))
        self._order.extend(offsets)
        self.low = self._order[0]

    def park_returned(self) -> None:
        """Pass over the message that `hand_again` would return first."""
        offset = heapq.heappop(self._waiting)
        self._own(self._slots[offset], offset).until = math.inf
        self._parked[offset] = None

    def unpark(self) -> None:
        """Make all parked messages available."""
        parked, self._parked = self._parked, {}
        for offset in parked:
            self._offer(self._own(self._slots[offset], offset), offset)

    def skip_to(self, offset: int) -> None:
        """Count everything from `next` up to *offset* as settled: nothing there is for anybody."""
        if offset > self.next:
            self.next = offset
            self._trim()

    def hand_again(
        self, holder: Hashable, count: int, until: float, generation: int = 0, length_s: float = math.inf
    ) -> list[tuple[int, int]]:
        """Lease up to *count* returned messages to *holder*, oldest first; return (offset, number of the delivery).

        If a message's last delivery has this *generation* or a later one, it gets the next.
        """
        given: list[tuple[int, int]] = []
        held = self._held.setdefault(holder, {})
        while self._waiting and len(given) < count:
            offset = heapq.heappop(self._waiting)
            lease = self._own(self._slots[offset], offset)
            lease.holder = holder
            lease.until = until
            lease.length_s = length_s
            lease.generation = max(generation, lease.generation + 1)
            lease.deliveries += 1
            held[offset] = None
            if until < math.inf:
                self._wake_at(until, (offset,))
            given.append((offset, lease.deliveries))
        if not held:
            del self._held[holder]
        return given

    # actions of holders

    def ack(self, holder: Hashable, offset: int) -> bool:
        """Settle the message at *offset*; return False if *holder* does not hold it (any more)."""
        lease = self._slots.get(offset)
        if lease is None or lease.holder is None or lease.settling or lease.holder != holder:
            return False
        held, slots, order = self._held[holder], self._slots, self._order
        del held[offset], slots[offset]
        if not held:
            del self._held[holder]
        if order[0] == offset and len(order) > 1 and order[1] in slots:
            # The usual case of `_was_settled`: the lowest one is settled, and the next one is not.
            order.popleft()
            self.low = order[0]
            if self._timed > STALE_TIMERS_MIN + 2 * len(slots):
                self._forget_stale_timers()
        else:
            self._was_settled()
        return True

    def ack_all(self, offsets: Sequence[int], generation: int, holders: list[Hashable]) -> list[int]:
        """Settle the messages at *offsets* that are held since *generation*; return their offsets.

        The holder of each is added to *holders*.
        """
        slots, settled = self._slots, list[int]()
        for offset in offsets:
            lease = slots.get(offset)
            if lease is None or lease.generation != generation or lease.holder is None or lease.settling:
                continue
            self._release(lease.holder, offset)
            holders.append(lease.holder)
            del slots[offset]
            settled.append(offset)
        if settled:
            self._was_settled()
        return settled

    def ack_held(self, holder: Hashable, offsets: Sequence[int]) -> Sequence[int]:
        """Settle those messages at *offsets* that *holder* holds; return their offsets.

        Consecutive offsets of a first delivery take 0.2 us each.
        """
        held, slots = self._held.get(holder), self._slots
        if held is None or not offsets:
            return ()
        leases = list(map(slots.get, offsets))
        first = leases[0]
        is_run = first is not None and first.shared and leases.count(first) == len(leases) and _are_consecutive(offsets)
        if first is None or not is_run or first.holder != holder:
            offsets = [
                offset
                for offset, lease in zip(offsets, leases, strict=True)
                if lease is not None and lease.holder == holder and not lease.settling
            ]
            offsets = list(dict.fromkeys(offsets))
        for offset in offsets:
            del slots[offset], held[offset]
        if not held:
            del self._held[holder]
        if offsets:
            self._was_settled()
        return offsets

    def _was_settled(self) -> None:
        slots, order = self._slots, self._order
        if order[0] not in slots:
            self._trim()
        elif len(order) > SETTLED_MIN + 2 * len(slots):
            self._forget_settled()
        self._forget_stale_timers()

    def renew(
        self, holder: Hashable, offset: int, until: float, generation: int = 0, length_s: float = math.inf
    ) -> bool:
        """Set the end of the lease to *until*, earlier or later than before; return False if *holder* does not hold it.

        The lease gets *generation*, or the next one if that is not newer.
        """
        lease = self._find(holder, offset)
        if lease is None:
            return False
        shorter, lease.until, lease.length_s = until < lease.until, until, length_s
        lease.generation = max(generation, lease.generation + 1)
        if shorter:
            self._wake_at(until, (offset,))
            self._forget_stale_timers()
        return True

    def begin_settling(self, holder: Hashable, offset: int, until: float) -> bool:
        """Note that an acknowledgement is in the current commit; return False if *holder* does not hold the message.

        It takes effect with `end_settling`; without that, the message returns at *until*.
        """
        lease = self._find(holder, offset)
        if lease is None:
            return False
        lease.before = lease.until
        if until < lease.until:
            lease.until = until
            self._wake_at(until, (offset,))
        lease.settling = True
        return True

    def end_settling(self, offset: int, *, done: bool) -> Hashable | None:
        """Settle the message at *offset* if *done*, else leave it with its holder; return that one or None."""
        lease = self._slots.get(offset)
        if lease is None or not lease.settling:
            return None
        holder = lease.holder
        lease.settling = False
        if done:
            self._let_go(lease, offset)
            self._settle(offset)
        elif lease.before > lease.until:
            lease.until = lease.before
            if lease.until < math.inf:
                self._wake_at(lease.until, (offset,))
        return holder

    def settle_below(self, offset: int) -> None:
        """Settle everything below *offset*."""
        for each in [each for each in self._slots if each < offset]:
            holder = self._slots[each].holder
            if holder is not None:
                self._release(holder, each)
            self._dead.pop(each, None)
            self._parked.pop(each, None)
            del self._slots[each]
        self._waiting = [each for each in self._waiting if each >= offset]
        heapq.heapify(self._waiting)
        self._forget_stale_timers()
        self.next = max(self.next, offset)
        self._trim()

    def give_back(self, holder: Hashable, offset: int, at: float = -math.inf) -> bool:
        """Make the message at *offset* available again from *at* on; return False if *holder* does not hold it."""
        return bool(self.give_back_all(holder, (offset,), at))

    def give_back_all(
        self, holder: Hashable, offsets: Sequence[int], at: float = -math.inf, *, counts: bool = True
    ) -> list[int]:
        """Make those messages at *offsets* available again that *holder* holds; return their offsets.

        Unless this *counts*, none of them is dead afterwards, however often it was delivered.
        """
        back: list[int] = []
        for lease, run in groupby(dict.fromkeys(offsets), self._slots.get):
            if lease is not None and lease.holder == holder and not lease.settling:
                found = list(run)
                self._give_back_alike(lease, found, at, counts)
                back += found
        held = self._held.get(holder, {})
        for offset in back:
            del held[offset]
        if back and not held:
            del self._held[holder]
        self._forget_stale_timers()
        return back

    def _give_back_alike(self, lease: _Lease, offsets: list[int], at: float, counts: bool) -> None:
        """Make messages with one *lease* available again; the caller releases them."""
        if len(offsets) == 1 or (counts and self._are_used_up(lease)):
            for offset in offsets:
                own = self._own(lease, offset)
                own.holder = None
                self._return(own, offset, at, counts)
            return
        returned = _Lease(None, at, lease.generation, lease.length_s, shared=True)
        returned.deliveries = lease.deliveries
        self._slots.update(dict.fromkeys(offsets, returned))
        if at > -math.inf:
            self._wake_together(at, offsets)
            return
        self.newest_returned = max(self.newest_returned, lease.generation)
        self._waiting += offsets
        heapq.heapify(self._waiting)

    def give_up(self, holder: Hashable, offsets: Sequence[int]) -> list[int]:
        """Make those messages at *offsets* dead that *holder* holds; return their offsets."""
        given: list[int] = []
        for offset in offsets:
            lease = self._find(holder, offset)
            if lease is not None:
                self._let_go(lease, offset)
                lease.dead = True
                self._dead[offset] = None
                given.append(offset)
        return given

    # time

    def lapse(self, now: float, lost: list[Hashable] | None = None, most: int = ALL) -> int:
        """End expired leases; return how many more messages than before can be delivered.

        Each holder is added to *lost* once per message that it lost. About *most* leases are looked at; if more are
        due, `deadline` is in the past afterwards.
        """
        before, end = len(self._waiting), self.looked_at + most
        while self._timers and self._timers[0][0] <= now and self.looked_at < end:
            _, offsets = heapq.heappop(self._timers)
            self._timed -= len(offsets)
            self.looked_at += len(offsets)
            for offset in offsets:
                self._lapse_one(offset, now, lost)
        self._forget_stale_timers()
        return len(self._waiting) - before

    def _lapse_one(self, offset: int, now: float, lost: list[Hashable] | None) -> None:
        lease = self._slots.get(offset)
        if lease is None or lease.dead or lease.until == -math.inf:
            return
        if lease.until > now:
            if lease.until < math.inf:
                self._wake_at(lease.until, (offset,))
            return
        lease = self._own(lease, offset)
        if lease.holder is None:
            self._offer(lease, offset)
            return
        lease.settling = False
        if lost is not None:
            lost.append(lease.holder)
        self._let_go(lease, offset)
        self._return(lease, offset, -math.inf, self.lapses_count)

    def deadline(self) -> float:
        """Return when to call `lapse` next; may be early, never late. Infinity if there is nothing to do."""
        return self._timers[0][0] if self._timers else math.inf

    # dead letters

    @property
    def has_dead(self) -> bool:
        return bool(self._dead)

    def dead(self) -> list[int]:
        """The messages whose deliveries are used up; each stays until it is settled with `settle_dead`."""
        return list(self._dead)

    def settle_dead(self, offset: int) -> None:
        """Settle the dead message at *offset*, which is stored as a dead letter."""
        del self._dead[offset]
        self._settle(offset)

    # inside

    def _find(self, holder: Hashable, offset: int) -> _Lease | None:
        """Return the lease of the message at *offset*, to change it.

        None if *holder* does not hold the message, or an acknowledgement is pending.
        """
        lease = self._slots.get(offset)
        if lease is None or lease.holder is None or lease.settling or lease.holder != holder:
            return None
        return self._own(lease, offset)

    def _own(self, lease: _Lease, offset: int) -> _Lease:
        """Return a lease of the message at *offset* alone."""
        if lease.shared:
            own = self._slots[offset] = _Lease(lease.holder, lease.until, lease.generation, lease.length_s)
            own.deliveries = lease.deliveries
            return own
        return lease

    def _let_go(self, lease: _Lease, offset: int) -> None:
        self._release(lease.holder, offset)
        lease.holder = None

    def _release(self, holder: Hashable, offset: int) -> None:
        held = self._held[holder]
        del held[offset]
        if not held:
            del self._held[holder]

    def _are_used_up(self, lease: _Lease) -> bool:
        """Return whether the deliveries of a message with *lease* are used up."""
        return 0 < self.deliveries_max <= lease.deliveries

    def _return(self, lease: _Lease, offset: int, at: float, counts: bool = True) -> None:
        if counts and self._are_used_up(lease):
            lease.dead = True
            self._dead[offset] = None
        elif at == -math.inf:
            self._offer(lease, offset)
        else:
            lease.until = at
            self._wake_at(at, (offset,))

    def _offer(self, lease: _Lease, offset: int) -> None:
        lease.until = -math.inf
        if lease.generation > self.newest_returned:
            self.newest_returned = lease.generation
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

    def _forget_settled(self) -> None:
        """Stop tracking settled messages: one that stays unsettled for long must not fill the window with others."""
        slots = self._slots
        self._order = deque(offset for offset in self._order if offset in slots)

    def _wake_at(self, at: float, offsets: tuple[int, ...]) -> None:
        """Have `lapse` look at *offsets* from *at* on."""
        heapq.heappush(self._timers, (at, offsets))
        self._timed += len(offsets)

    def _wake_together(self, at: float, offsets: Sequence[int]) -> None:
        """As `_wake_at`, for many *offsets*."""
        for first in range(0, len(offsets), ENDED_TOGETHER):
            self._wake_at(at, tuple(offsets[first : first + ENDED_TOGETHER]))

    def _forget_stale_timers(self) -> None:
        """Rebuild the timers before those of settled messages outnumber the live ones."""
        if self._timed <= STALE_TIMERS_MIN + 2 * len(self._slots):
            return
        ends: dict[float, list[int]] = {}
        for offset, lease in self._slots.items():
            if abs(lease.until) < math.inf:
                ends.setdefault(lease.until, []).append(offset)
        self._timers = [(until, tuple(offsets)) for until, offsets in ends.items()]
        self._timed = sum(map(len, ends.values()))
        heapq.heapify(self._timers)


def _are_consecutive(offsets: Sequence[int]) -> bool:
    """Return whether *offsets* ascend without a gap."""
    first, count = offsets[0], len(offsets)
    whole = range(first, first + count)
    return offsets[-1] == whole[-1] and (offsets == whole or list(offsets) == list(whole))
