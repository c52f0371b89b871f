"""Shared consumption of one queue: the holder of each message, its deadline, and its redelivery.

Pure logic over numbers, without I/O or clock. At any time a message is in one of five states: never delivered (from
`LeaseTable.next` on), held by one holder until a deadline, waiting to be delivered again (at once, or not before a
time), dead (its deliveries are used up; it must become a dead letter), or settled. `table.py` has the state of a queue,
the waiting messages, and the deadlines; this module has the rules that change the state of a message.
`journal/state.py` preserves it across restarts.

Each delivery has a *generation*: its time in ms. Offset and generation form a handle by which anyone may settle the
message, over any connection. A counter instead of a time would produce the same handles again after a restart.

Precedents: the visibility timeout of SQS, the reserve and touch of beanstalkd, RocketMQ's POP check points. Redelivery
does not wait for earlier messages; order is not preserved.
"""

import heapq
import math
from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Final, final

from martlet.errors import LocalProtocolError
from martlet.groups.leases.table import DEAD_DELIVERIES, STALE_TIMERS_MIN, Lease, LeaseReturns, LeaseTable, LeaseTimers

__all__ = ["Leases"]

# The argument of `lapse` for no limit.
ALL: Final = 1 << 62


@final
class Leases:
    """The messages of one queue, distributed to holders: ``table`` has their states, ``returns`` the returned
    messages.

    Args:
      first: the offset to begin with; everything below is settled.
      window: the maximum number of messages tracked, as in `LeaseTable`.
      deliveries_max: a message that returns after this many deliveries is dead; 0 for no limit.
      lapses_count: whether the end of a lease can make a message dead.
    """

    __slots__ = ("_dead", "_timers", "deliveries_max", "lapses_count", "looked_at", "returns", "table")

    def __init__(self, first: int, *, window: int, deliveries_max: int, lapses_count: bool = True) -> None:
        self.deliveries_max = deliveries_max
        self.lapses_count = lapses_count
        self.table = LeaseTable(first, window)
        self.returns = LeaseReturns(self.table)
        self._timers = LeaseTimers()
        self._dead: dict[int, None] = {}
        self.looked_at = 0  # ends of leases that `lapse` has checked, including those of settled messages

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
        if deliveries >= DEAD_DELIVERIES:
            dead = Lease(None, math.inf, generation, -1, deliveries, shared=True)
            dead.dead = True
            self.table.add(dead, offsets)
            self._dead.update(dict.fromkeys(offsets))
            return
        self.table.add(Lease(holder, until, generation, length_s, deliveries, shared=True), offsets)
        if until < math.inf:
            self._timers.add_many(until, offsets)

    @property
    def waiting(self) -> int:
        """The number of messages that can be delivered again now."""
        return len(self.returns.available)

    # deliveries

    def hand_out(
        self,
        holder: Hashable,
        offsets: Sequence[int],
        until: float,
        generation: int = 0,
        length_s: float = math.inf,
    ) -> None:
        """Lease new messages to *holder*: ascending offsets, all >= `LeaseTable.next`, at most `LeaseTable.room`.

        *until* is infinity for a lease that never expires; *length_s* is its total length. Offsets skipped between them
        are for nobody and count as settled.

        Raises:
          LocalProtocolError: an offset was delivered before, or there are more offsets than the room.
        """
        table = self.table
        if len(offsets) > table.window - len(table.order):
            raise LocalProtocolError(f"{len(offsets)} messages exceed the room of {table.room} in the window")
        if not offsets:
            return
        if offsets[0] < table.next:
            raise LocalProtocolError(f"offset {offsets[0]} was delivered before; the next is {table.next}")
        table.add(Lease(holder, until, generation, length_s, shared=True), offsets)
        if until < math.inf:
            self._timers.add(until, tuple(offsets))

    def park(self, offsets: Sequence[int], generation: int = 0) -> None:
        """Pass over new messages that no holder takes, as `hand_out`; `LeaseReturns.unpark` makes them available."""
        self.table.add(Lease(None, math.inf, generation, math.inf, deliveries=0, shared=True), offsets)
        self.returns.parked.update(dict.fromkeys(offsets))

    def skip_to(self, offset: int) -> None:
        """Count all messages from `LeaseTable.next` up to *offset* as settled: none of them is for anybody."""
        if offset > self.table.next:
            self.table.next = offset
            self.table.trim()

    def hand_again(
        self, holder: Hashable, count: int, until: float, generation: int = 0, length_s: float = math.inf
    ) -> list[tuple[int, int]]:
        """Lease up to *count* returned messages to *holder*, oldest first; return (offset, number of the delivery).

        If a message's last delivery has this *generation* or a later one, it gets the next.
        """
        table, available, leased = self.table, self.returns.available, list[tuple[int, int]]()
        held = table.by_holder.setdefault(holder, {})
        while available and len(leased) < count:
            offset = heapq.heappop(available)
            lease = table.own(table.slots[offset], offset)
            lease.holder = holder
            lease.until = until
            lease.length_s = length_s
            lease.generation = max(generation, lease.generation + 1)
            lease.deliveries += 1
            held[offset] = None
            if until < math.inf:
                self._timers.add(until, (offset,))
            leased.append((offset, lease.deliveries))
        if not held:
            del table.by_holder[holder]
        return leased

    def reopen(self, offsets: Sequence[int]) -> None:
        """Make settled messages at *offsets*, which ascend, available again; each was delivered once."""
        lease = Lease(None, -math.inf, 0, -1, shared=True)
        self.table.insert(lease, offsets)
        self.returns.offer_alike(lease, offsets)

    # actions of holders

    def ack(self, holder: Hashable, offset: int) -> bool:
        """Settle the message at *offset*; return False if *holder* does not hold it (any more)."""
        table, slots = self.table, self.table.slots
        lease = slots.get(offset)
        if lease is None or lease.holder is None or lease.settling or lease.holder != holder:
            return False
        held, order = table.by_holder[holder], table.order
        del held[offset], slots[offset]
        if not held:
            del table.by_holder[holder]
        if order[0] == offset and len(order) > 1 and order[1] in slots:
            # The usual case of `forget_settled`: the lowest message is settled, and the next one is not.
            order.popleft()
            table.low = order[0]
            if self._timers.count > STALE_TIMERS_MIN + 2 * len(slots):
                self._timers.forget_stale(slots)
        else:
            table.forget_settled()
            self._timers.forget_stale(slots)
        return True

    def ack_all(self, offsets: Sequence[int], generation: int, holders: list[Hashable]) -> list[int]:
        """Settle the messages at *offsets* that are held since *generation*; return their offsets.

        The holder of each is added to *holders*.
        """
        table, slots, settled = self.table, self.table.slots, list[int]()
        for offset in offsets:
            lease = slots.get(offset)
            if lease is None or lease.generation != generation or lease.holder is None or lease.settling:
                continue
            table.release(lease.holder, offset)
            holders.append(lease.holder)
            del slots[offset]
            settled.append(offset)
        if settled:
            table.forget_settled()
            self._timers.forget_stale(slots)
        return settled

    def ack_held(self, holder: Hashable, offsets: Sequence[int]) -> Sequence[int]:
        """Settle the messages at *offsets* that *holder* holds; return their offsets.

        Consecutive offsets of a first delivery take 0.2 us each.
        """
        table, slots = self.table, self.table.slots
        held = table.by_holder.get(holder)
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
            del table.by_holder[holder]
        if offsets:
            table.forget_settled()
            self._timers.forget_stale(slots)
        return offsets

    def renew(
        self, holder: Hashable, offset: int, until: float, generation: int = 0, length_s: float = math.inf
    ) -> bool:
        """Set the end of the lease to *until*, earlier or later than before; return False if *holder* does not hold
        it.

        The lease gets *generation*, or the next one if that is not newer.
        """
        lease = self.table.find(holder, offset)
        if lease is None:
            return False
        is_shorter, lease.until, lease.length_s = until < lease.until, until, length_s
        lease.generation = max(generation, lease.generation + 1)
        if is_shorter:
            self._timers.add(until, (offset,))
            self._timers.forget_stale(self.table.slots)
        return True

    def begin_settling(self, holder: Hashable, offset: int, until: float) -> bool:
        """Note that an acknowledgement is in the current commit; return False if *holder* does not hold the message.

        It takes effect with `end_settling`; without that, the message returns at *until*.
        """
        lease = self.table.find(holder, offset)
        if lease is None:
            return False
        lease.until_before = lease.until
        if until < lease.until:
            lease.until = until
            self._timers.add(until, (offset,))
        lease.settling = True
        return True

    def end_settling(self, offset: int, *, done: bool) -> Hashable | None:
        """Settle the message at *offset* if *done*, else leave it with its holder; return the holder, or None."""
        lease = self.table.slots.get(offset)
        if lease is None or not lease.settling:
            return None
        holder = lease.holder
        lease.settling = False
        if done:
            self._release(lease, offset)
            self._forget_message(offset)
        elif lease.until_before > lease.until:
            lease.until = lease.until_before
            if lease.until < math.inf:
                self._timers.add(lease.until, (offset,))
        return holder

    def give_back(self, holder: Hashable, offset: int, available_at: float = -math.inf) -> bool:
        """As `give_back_all`, for one message; return False if *holder* does not hold it."""
        return bool(self.give_back_all(holder, (offset,), available_at))

    def give_back_all(
        self, holder: Hashable, offsets: Sequence[int], available_at: float = -math.inf, *, counts: bool = True
    ) -> list[int]:
        """Make the messages at *offsets* that *holder* holds available again; return their offsets.

        Unless this *counts*, none of them is dead afterwards, whatever its number of deliveries.
        """
        returned: list[int] = []
        for lease, run in groupby(dict.fromkeys(offsets), self.table.slots.get):
            if lease is not None and lease.holder == holder and not lease.settling:
                run_offsets = list(run)
                self._give_back_alike(lease, run_offsets, available_at, counts)
                returned += run_offsets
        held = self.table.by_holder.get(holder, {})
        for offset in returned:
            del held[offset]
        if returned and not held:
            del self.table.by_holder[holder]
        self._timers.forget_stale(self.table.slots)
        return returned

    def _give_back_alike(self, lease: Lease, offsets: list[int], available_at: float, counts: bool) -> None:
        """Make messages with one *lease* available again; the caller releases them."""
        if len(offsets) == 1 or (counts and self._has_used_up(lease)):
            for offset in offsets:
                own_lease = self.table.own(lease, offset)
                own_lease.holder = None
                self._put_back(own_lease, offset, available_at, counts)
            return
        shared_lease = Lease(None, available_at, lease.generation, lease.length_s, lease.deliveries, shared=True)
        self.table.slots.update(dict.fromkeys(offsets, shared_lease))
        if available_at > -math.inf:
            self._timers.add_many(available_at, offsets)
            return
        self.returns.offer_alike(lease, offsets)

    def give_up(self, holder: Hashable, offsets: Sequence[int]) -> list[int]:
        """Make the messages at *offsets* that *holder* holds dead; return their offsets."""
        dead: list[int] = []
        for offset in offsets:
            lease = self.table.find(holder, offset)
            if lease is not None:
                self._release(lease, offset)
                self._make_dead(lease, offset)
                dead.append(offset)
        return dead

    # time

    def lapse(self, now: float, lost: list[Hashable] | None = None, most: int = ALL) -> int:
        """End expired leases; return the number of messages that became available.

        Each holder is added to *lost* once per message that it lost. About *most* leases are checked; if more are due,
        `deadline` is in the past afterwards.
        """
        timers, waiting_before, looked_at_max = self._timers, self.waiting, self.looked_at + most
        while timers.heap and timers.heap[0][0] <= now and self.looked_at < looked_at_max:
            offsets = timers.pop()
            self.looked_at += len(offsets)
            for offset in offsets:
                self._lapse_one(offset, now, lost)
        timers.forget_stale(self.table.slots)
        return self.waiting - waiting_before

    def _lapse_one(self, offset: int, now: float, lost: list[Hashable] | None) -> None:
        lease = self.table.slots.get(offset)
        if lease is None or lease.dead or lease.until == -math.inf:
            return
        if lease.until > now:
            if lease.until < math.inf:
                self._timers.add(lease.until, (offset,))
            return
        lease = self.table.own(lease, offset)
        if lease.holder is None:
            self.returns.offer(lease, offset)
            return
        lease.settling = False
        if lost is not None:
            lost.append(lease.holder)
        self.table.release(lease.holder, offset)
        lease.holder = None
        self._put_back(lease, offset, -math.inf, self.lapses_count)

    def deadline(self) -> float:
        """Return when to call `lapse` next; may be early, never late. Infinity if there is nothing to do."""
        heap = self._timers.heap
        return heap[0][0] if heap else math.inf

    # dead letters

    @property
    def has_dead(self) -> bool:
        """Whether a message must become a dead letter."""
        return bool(self._dead)

    def is_dead(self, offset: int) -> bool:
        """Return whether the message at *offset* must become a dead letter."""
        return offset in self._dead

    def dead(self) -> list[int]:
        """Return the messages whose deliveries are used up; each stays until it is settled with `settle_dead`."""
        return list(self._dead)

    def settle_dead(self, offset: int) -> None:
        """Settle the dead message at *offset*, which is stored as a dead letter."""
        del self._dead[offset]
        self._forget_message(offset)

    # internals

    def _release(self, lease: Lease, offset: int) -> None:
        self.table.release(lease.holder, offset)
        lease.holder = None

    def _make_dead(self, lease: Lease, offset: int) -> None:
        lease.dead = True
        lease.deliveries = DEAD_DELIVERIES
        self._dead[offset] = None

    def _has_used_up(self, lease: Lease) -> bool:
        """Return whether the deliveries of a message with *lease* are used up."""
        return 0 < self.deliveries_max <= lease.deliveries

    def _put_back(self, lease: Lease, offset: int, available_at: float, counts: bool = True) -> None:
        if counts and self._has_used_up(lease):
            self._make_dead(lease, offset)
        elif available_at == -math.inf:
            self.returns.offer(lease, offset)
        else:
            lease.until = available_at
            self._timers.add(available_at, (offset,))

    def _forget_message(self, offset: int) -> None:
        table = self.table
        del table.slots[offset]
        table.trim()
        self._timers.forget_stale(table.slots)


def _are_consecutive(offsets: Sequence[int]) -> bool:
    """Return whether *offsets* ascend without a gap."""
    first, count = offsets[0], len(offsets)
    expected = range(first, first + count)
    return offsets[-1] == expected[-1] and (offsets == expected or list(offsets) == list(expected))
