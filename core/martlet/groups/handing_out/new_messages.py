"""Leases messages of a shared group that were never delivered: read once, whoever of the members gets them."""

from itertools import groupby
from operator import itemgetter
from typing import Final, final

from martlet.delivery.fanout import Batch, encode_result
from martlet.delivery.subscriptions import Delivery
from martlet.groups.handing_out.collection import MESSAGES_A_READ, Collection
from martlet.groups.journal.journal_codec import KEEP, NEW, Change, in_ms
from martlet.groups.queues.competitors import Competitors
from martlet.groups.queues.share_context import ShareContext
from martlet.groups.queues.share_lane import ShareLane
from martlet.groups.queues.share_lanes import ShareLanes
from martlet.groups.queues.share_source import ShareSource
from martlet.groups.strategy.by_name import may_get_all, receivers_of
from martlet.groups.strategy.choosing import CHOICES_A_READ, PARKED_MAX, takers_of
from martlet.store import ReadResult

__all__ = ["NewMessages"]

UNNOTED_MAX: Final = 4096  # skipped messages that may be read again after a restart


@final
class NewMessages:
    """The messages of one group that were never delivered."""

    __slots__ = ("_competitors", "_context", "_lanes", "_source")

    def __init__(self, context: ShareContext, competitors: Competitors, lanes: ShareLanes, source: ShareSource) -> None:
        self._context = context
        self._competitors = competitors
        self._lanes = lanes
        self._source = source

    def lease(self, lane: ShareLane, collection: Collection) -> None:
        """Lease the next messages of *lane* to the member, and add them to *collection*. Raises `Refused`."""
        context, competitors, source = self._context, self._competitors, self._source
        owner, member = context.owner, collection.member
        leases, table = lane.leases, lane.leases.table
        room = min(table.room, owner.room, member.credit, MESSAGES_A_READ)
        if context.policy is not None and context.policy.in_parts:
            room = min(room, self._part(lane))
        if competitors.choosing:
            choices = max(CHOICES_A_READ // len(competitors.members), 1)
            room = min(room, choices, PARKED_MAX - len(leases.returns.parked))
        if room <= 0 or not lane.due:
            return
        collection.reads_left -= 1
        is_found = bool(lane.found)
        start, read = (lane.found[0][0], source.read_found) if is_found else (table.next, source.read_new)
        result = read(lane, member, room, collection.budget_bytes)
        if result is None or result.next_offset <= start:
            return
        batch = encode_result(result, start, member.encoding)
        if member.asks and not may_get_all(member, result):
            self._lease_by_name(lane, collection, result, batch)
        elif result.count and (competitors.choosing or competitors.sticky is not None):
            self._lease_by_choice(lane, collection, result, batch, may_stop=not is_found)
        else:
            self._lease_all(lane, collection, result, batch)

    def _lease_all(self, lane: ShareLane, collection: Collection, result: ReadResult, batch: Batch) -> None:
        """As `lease`, for messages that are all for the member."""
        leases, table = lane.leases, lane.leases.table
        member, generation = collection.member, collection.generation
        leased = batch.offsets if member.acknowledges else ()
        leases.hand_out(member.holder, leased, collection.until, generation, member.lease_s)
        leases.skip_to(result.next_offset)
        if result.count or table.next >= lane.noted_next + UNNOTED_MAX:
            change = Change(NEW, generation, in_ms(member.lease_s), table.next, leased, lane.noted_next)
            self._context.owner.notes.note(lane.key, change)
            lane.noted_next = table.next
        lane.account()
        if not result.count:
            if lane.due:
                self._competitors.wake()
            return
        member.credit -= len(leased)
        queue_id, first = lane.queue.queue_id, batch.offsets[0]
        collection.found.append(Delivery(queue_id, first, result.next_offset, result.count, batch, 1, generation))
        collection.budget_bytes -= batch.size

    def _lease_by_name(self, lane: ShareLane, collection: Collection, result: ReadResult, batch: Batch) -> None:
        """As `lease`, for messages of which the member may not get all; those that are for nobody are skipped."""
        leases, table = lane.leases, lane.leases.table
        owner, generation = self._context.owner, collection.generation
        receivers = receivers_of(result, collection.member, self._competitors.in_turn(), batch.offsets)
        owner.withheld += len(batch.offsets) - len(receivers)
        now = owner.now()
        for offset, (receiver, _) in receivers.items():
            leases.hand_out(receiver.holder, (offset,), now + receiver.lease_s, generation, receiver.lease_s)
        leases.skip_to(result.next_offset)
        if receivers or table.next >= lane.noted_next + UNNOTED_MAX:
            lease_ms = in_ms(collection.member.lease_s)
            owner.notes.note(lane.key, Change(NEW, generation, lease_ms, table.next, list(receivers), lane.noted_next))
            lane.noted_next = table.next
        lane.account()
        if lane.due:
            self._competitors.wake()
        collection.give(lane, receivers, batch, result, 1)

    def _lease_by_choice(
        self, lane: ShareLane, collection: Collection, result: ReadResult, batch: Batch, *, may_stop: bool
    ) -> None:
        """As `lease`, for messages of which each goes to a member that takes it.

        Those that nobody takes are parked. If it *may_stop*, messages from the first one on whose member can take no
        more now are left.
        """
        leases, table = lane.leases, lane.leases.table
        owner, generation = self._context.owner, collection.generation
        members, now = self._competitors, owner.now()
        sticky, keepers = members.sticky, members.keepers
        takers = takers_of(result, collection.member, members.in_turn(), sticky, keepers, may_stop=may_stop)
        if len(takers) < len(batch.offsets):
            lane.due = True
            if not takers:
                return  # who gets the next message reads it
            batch = batch.beginning(len(takers))
        parked: list[int] = []
        for taker, run in groupby(zip(takers, batch.offsets, strict=True), itemgetter(0)):
            offsets = [offset for _, offset in run]
            if taker is None:
                leases.park(offsets, generation)
                parked += offsets
            else:
                leases.hand_out(taker.holder, offsets, now + taker.lease_s, generation, taker.lease_s)
        leases.skip_to(batch.next)
        lease_ms, left = in_ms(collection.member.lease_s), frozenset(parked)
        taken = [offset for offset in batch.offsets if offset not in left]
        owner.notes.note(lane.key, Change(NEW, generation, lease_ms, table.next, taken, lane.noted_next))
        if parked:
            owner.notes.note(lane.key, Change(KEEP, generation, 0, 0, parked))
        lane.noted_next = table.next
        lane.account()
        if lane.due:
            self._competitors.wake()
        collection.give_chosen(lane, takers, batch, result, 1)

    def _part(self, lane: ShareLane) -> int:
        """Return how many new messages one member may take, so that all with credit get some of them."""
        competitors = self._competitors
        several = len(competitors.members) > 1 and not competitors.exclusive
        ready = sum([member.credit > 0 for member in competitors.members]) if several else 1
        return max(-((lane.leases.table.next - lane.queue.next_offset) // max(ready, 1)), 1)
