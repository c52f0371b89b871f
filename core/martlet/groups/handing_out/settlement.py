"""Settles messages of a shared group that somebody holds, takes them back, and renews their leases.

A change applies immediately and is noted with the next commit. An acknowledgement that is stored in an atomic group,
together with messages, settles its message once that group is readable.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from typing import Final, final

from martlet.delivery.subscriptions import Delivery
from martlet.errors import Reason, Refused
from martlet.groups.journal.journal_codec import ACK, BACK, KEEP, RENEW, Change, in_ms
from martlet.groups.leases.table import DEAD_DELIVERIES
from martlet.groups.queues.competitors import Competitors
from martlet.groups.queues.share_context import ShareContext
from martlet.groups.queues.share_lane import ShareLane
from martlet.groups.queues.share_lanes import ShareLanes
from martlet.groups.strategy.redelivery import pause_ms
from martlet.state.journal import Journal

__all__ = ["Settlement"]

SETTLING_S: Final = 60.0  # how long to wait for the outcome of an acknowledgement in an atomic group


@final
class Settlement:
    """Settles the messages of one group for their holders; `ack_all` and `holder` take handles, whoever has them."""

    __slots__ = ("_by_queue", "_competitors", "_context", "_lanes", "_owner")

    def __init__(self, context: ShareContext, competitors: Competitors, lanes: ShareLanes) -> None:
        self._context = context
        self._owner = context.owner
        self._competitors = competitors
        self._lanes = lanes
        self._by_queue = lanes.by_queue

    def holds(self, holder: Hashable, queue_id: int, offset: int) -> bool:
        """Return whether *holder* holds a message, and may settle it."""
        lane = self._by_queue.get(queue_id)
        return lane is not None and lane.leases.table.holds(holder, offset)

    def is_held(self, holder: Hashable, delivery: Delivery) -> bool:
        """Return whether *holder* still holds the message of *delivery*."""
        return self.holder(delivery.queue_id, delivery.first, delivery.generation) == holder

    def holder(self, queue_id: int, offset: int, generation: int) -> Hashable | None:
        """Return who holds a message with this handle; None if the handle is no longer valid."""
        lane = self._lanes.get(queue_id)
        return lane.leases.table.holder(offset, generation) if lane is not None else None

    # settled

    def ack_held(self, holder: Hashable, queue_id: int, offset: int) -> bool:
        """Settle a message that *holder* holds; False if it does not hold it."""
        lane = self._by_queue.get(queue_id)
        return lane is not None and self.settle(lane, holder, offset)

    def ack_held_all(self, holder: Hashable, queue_id: int, offsets: Sequence[int]) -> Sequence[int]:
        """Settle those messages of one queue that *holder* holds; return their offsets."""
        lane = self._by_queue.get(queue_id)
        settled = lane.leases.ack_held(holder, offsets) if lane is not None else ()
        if lane is not None and settled:
            self._was_settled(lane, settled, {holder: len(settled)})
        return settled

    def ack_all(self, queue_id: int, offsets: Sequence[int], generation: int) -> list[int]:
        """Settle messages of one queue by their handles; return the offsets of those whose handles are valid."""
        lane, holders = self._lanes.get(queue_id), list[Hashable]()
        if lane is None:
            return []
        settled = lane.leases.ack_all(offsets, generation, holders)
        if settled:
            self._was_settled(lane, settled, Counter(holders))
        return settled

    def settle(self, lane: ShareLane, holder: Hashable, offset: int) -> bool:
        """Settle a message that *holder* holds; False if it does not hold it."""
        if not lane.leases.ack(holder, offset):
            return False
        self._owner.notes.ack(lane.key, (offset,))
        self._competitors.give_credit(holder)
        if lane.in_order:
            self._settled_in_order(lane, (offset,))
        return True

    def _was_settled(self, lane: ShareLane, offsets: Sequence[int], holders: Mapping[Hashable, int]) -> None:
        """Note that messages were settled, so many of each of *holders*; `account` follows with the commit."""
        self._owner.notes.ack(lane.key, offsets)
        for holder, count in holders.items():
            self._competitors.give_credit(holder, count)
        if lane.in_order:
            self._settled_in_order(lane, offsets)

    def _settled_in_order(self, lane: ShareLane, offsets: Sequence[int]) -> None:
        lane.note_early(offsets)
        if not lane.is_blocked:
            self._competitors.wake()

    # returned

    def return_attempt(self, lane: ShareLane, holder: Hashable) -> None:
        """Make everything available that *holder* holds: the attempt that took it takes it again."""
        self.give_back(lane, holder, lane.leases.table.held(holder), 0, counts=False)

    def return_early(self, lane: ShareLane) -> None:
        """Make messages available that were settled before an earlier one, which comes again: in order, they follow."""
        low, early = lane.leases.table.low, lane.early
        offsets = sorted(offset for offset in early if offset > low)
        early.clear()
        if offsets:
            lane.leases.reopen(offsets)
            self._owner.notes.note(lane.key, Change(KEEP, 0, 0, 1, offsets))

    def nack_held(self, holder: Hashable, queue_id: int, offsets: Sequence[int], delay_s: float) -> list[int]:
        """Return failed messages that *holder* holds; return their offsets."""
        lane, failed = self._by_queue.get(queue_id), list[int]()
        if lane is None:
            return failed
        for deliveries, alike in groupby(offsets, lane.leases.table.deliveries):
            failed += self.give_back(lane, holder, list(alike), deliveries, delay_s)
        if failed:
            self._competitors.give_credit(holder, len(failed))
            self._competitors.wake()
        return failed

    def pass_on(self, holder: Hashable, queue_id: int, offset: int) -> None:
        """Return a message that *holder* was not sent, because it may not read it any more."""
        lane = self._by_queue.get(queue_id)
        if lane is not None:
            self.give_back(lane, holder, (offset,), lane.leases.table.deliveries(offset) - 1)
            self._competitors.wake()

    def give_back_all(self, lane: ShareLane, holder: Hashable) -> None:
        """Return what *holder* held, who left; that does not count as a failure of the messages, earlier deliveries do.

        With a policy for which leaving never counts, the messages can be delivered again at once, in order.
        """
        counts = self._context.leaving_counts
        for deliveries, offsets in lane.leases.table.held_by_deliveries(holder).items():
            self.give_back(lane, holder, offsets, deliveries - 1 if counts else 0, counts=counts)

    def give_back(
        self,
        lane: ShareLane,
        holder: Hashable,
        offsets: Sequence[int],
        failures: int,
        delay_s: float = 0,
        *,
        counts: bool = True,
    ) -> list[int]:
        """Return messages for redelivery after *delay_s*, or after a longer pause that grows with *failures*.

        Returns the offsets of those that *holder* held. Unless this *counts*, none of them becomes dead.
        """
        wait_s = max(delay_s, pause_ms(failures) / 1000)
        now, now_ms = self._context.times()
        at = now + wait_s if wait_s > 0 else -math.inf
        back = lane.leases.give_back_all(holder, offsets, at, counts=counts)
        if back:
            self._lanes.activate(lane)
            self._owner.notes.note(lane.key, Change(BACK, now_ms, round(wait_s * 1000), offsets=back))
            self._note_dead(lane, back)
            self._owner.alarm(self._context, -math.inf if lane.leases.has_dead else at)
        return back

    def give_up_held(self, holder: Hashable, queue_id: int, offsets: Sequence[int]) -> list[int]:
        """Make messages dead that *holder* holds, however often they were delivered; return their offsets.

        In the topic of its dead letters they come again, as with `nack_held`.
        """
        if self._context.keeps_failed:
            return self.nack_held(holder, queue_id, offsets, 0)
        lane = self._by_queue.get(queue_id)
        given = lane.leases.give_up(holder, offsets) if lane is not None else []
        if lane is not None and given:
            self._note_dead(lane, given)
            self._lanes.activate(lane)
            self._owner.alarm(self._context, -math.inf)
            self._competitors.give_credit(holder, len(given))
        return given

    def _note_dead(self, lane: ShareLane, offsets: Sequence[int]) -> None:
        """Note which of *offsets* are dead, so that a crash does not make them available again."""
        leases = lane.leases
        dead = sorted(filter(leases.is_dead, offsets)) if leases.has_dead else []
        if dead:
            now_ms = self._context.times()[1]
            self._owner.notes.note(lane.key, Change(KEEP, now_ms, 0, DEAD_DELIVERIES, dead))

    def renew_held(self, holder: Hashable, queue_id: int, offset: int, lease_s: float) -> int:
        """Make a lease of *holder* end *lease_s* from now; return its new generation, 0 if there is no such lease."""
        lane = self._by_queue.get(queue_id)
        now, now_ms = self._context.times()
        if lane is None or not lane.leases.renew(holder, offset, now + lease_s, now_ms, lease_s):
            return 0
        self._lanes.activate(lane)
        generation = lane.leases.table.generation(offset)
        self._owner.notes.note(lane.key, Change(RENEW, generation, in_ms(lease_s), offsets=(offset,)))
        self._owner.alarm(self._context, now + lease_s)
        return generation

    # settled together with messages

    def acknowledgements_held(
        self, holder: Hashable, queue_id: int, offsets: Sequence[int]
    ) -> list[tuple[Journal, bytes]]:
        """Return the acknowledgements of messages that *holder* holds, as `Share.acknowledgement`. Raises `Refused`."""
        lane, begun = self._lanes.get(queue_id), list[int]()
        self._owner.store.admission.check()
        until = self._owner.now() + SETTLING_S
        for offset in offsets:
            if lane is None or not lane.leases.begin_settling(holder, offset, until):
                for each in begun:
                    self.withdraw(queue_id, each)
                group = self._context.group
                text = f"message {offset} of queue {queue_id} is not held by this member of group {group!r}"
                raise Refused(Reason.NOT_FOUND, f"{text}; it was settled, or its lease has ended")
            begun.append(offset)
        if lane is None or not begun:
            return []
        self._lanes.activate(lane)
        self._owner.alarm(self._context, until)
        return self._owner.notes.settle(lane.key, begun, lane.began)

    def withdraw(self, queue_id: int, offset: int) -> None:
        """Undo `acknowledgements_held`: the atomic group was refused."""
        lane = self._by_queue.get(queue_id)
        if lane is not None:
            lane.leases.end_settling(offset, done=False)

    def settled_atomically(self, queue_id: int, offsets: Sequence[int]) -> None:
        """Settle *offsets*: the atomic group that acknowledges them is readable."""
        lane = self._by_queue.get(queue_id)
        if lane is None:
            return
        if self._owner.notes.must_note_settled(lane.key):
            self._owner.notes.note(lane.key, Change(ACK, offsets=offsets))
        for offset in offsets:
            holder = lane.leases.end_settling(offset, done=True)
            if holder is not None:
                self._competitors.give_credit(holder)
        lane.account()
