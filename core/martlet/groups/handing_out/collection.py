"""Messages that one member collects at once: new ones, returned ones, and how much of both it may get."""

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final, final

from martlet.delivery.fanout import Batch, encode_result
from martlet.delivery.subscriptions import Delivery
from martlet.groups.handing_out.settlement import Settlement
from martlet.groups.journal.journal_codec import AGAIN, KEEP, NEW, Change, in_ms
from martlet.groups.queues.competitors import Competitor, Competitors
from martlet.groups.queues.share_context import ShareContext
from martlet.groups.queues.share_lane import ShareLane
from martlet.groups.queues.share_lanes import ShareLanes
from martlet.groups.queues.share_source import ShareSource
from martlet.groups.strategy.by_name import may_get_all, receivers_of
from martlet.groups.strategy.choosing import CHOICES_A_READ, PARKED_MAX, takers_of
from martlet.store import ReadResult

__all__ = ["MESSAGES_A_READ", "READS_A_CALL", "Collection", "NewMessages", "ReturnedMessages"]

MESSAGES_A_READ: Final = 256
READS_A_CALL: Final = 128  # how often one call reads: 20 to 40 us each, as returned messages may be far apart
UNNOTED_MAX: Final = 4096  # skipped messages that may be read again after a restart


@final
class Collection:
    """Messages leased to *member* in one call, all with the same *generation*, *until* a time.

    ``Competitor.credit``, ``budget_bytes`` and ``reads_left`` say how many more it may get, and ``kept`` how many were
    kept for others.
    """

    __slots__ = ("budget_bytes", "found", "generation", "kept", "member", "reads_left", "until")

    def __init__(self, member: Competitor, budget_bytes: int, until: float, generation: int) -> None:
        self.member = member
        self.budget_bytes = budget_bytes
        self.until = until
        self.generation = generation
        self.reads_left = READS_A_CALL
        self.kept = 0
        self.found: list[Delivery] = []

    def give(
        self,
        lane: ShareLane,
        receivers: Mapping[int, tuple[Competitor, str]],
        batch: Batch,
        result: ReadResult,
        deliveries: int,
    ) -> None:
        """Add what the member gets to ``found``, and keep the rest for its receivers."""
        member, context = self.member, lane.context
        batches, now = {member.encoding.name: batch}, context.owner.now()
        for offset, (receiver, name) in receivers.items():
            own = batches.get(receiver.encoding.name)
            if own is None:
                own = batches[receiver.encoding.name] = encode_result(result, batch.start, receiver.encoding)
            delivery = Delivery(lane.queue.queue_id, offset, offset + 1, 1, own, deliveries, self.generation)
            self.budget_bytes -= delivery.size
            if receiver is member:
                member.credit -= 1
                self.found.append(delivery)
            else:
                self.kept += 1
                receiver.keep(name, delivery)
                context.owner.alarm(context, now + receiver.lease_s)

    def give_chosen(
        self,
        lane: ShareLane,
        takers: Sequence[Competitor | None],
        batch: Batch,
        result: ReadResult,
        deliveries: int,
    ) -> None:
        """Add what the member takes to ``found`` as one delivery, and keep the rest for its takers."""
        member = self.member
        own = [index for index, taker in enumerate(takers) if taker is member]
        others = {
            offset: (taker, "")
            for taker, offset in zip(takers, batch.offsets, strict=False)
            if taker is not None and taker is not member
        }
        self.give(lane, others, batch, result, deliveries)
        if own:
            chosen = batch.chosen(own)
            member.credit -= len(own)
            queue_id, first = lane.queue.queue_id, chosen.offsets[0]
            self.found.append(Delivery(queue_id, first, batch.next, len(own), chosen, deliveries, self.generation))
            self.budget_bytes -= chosen.size


@final
class NewMessages:
    """The messages of one group that were never delivered: read once, whoever of the members gets them."""

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


@final
class ReturnedMessages:
    """The messages of one group that wait to be delivered again: they are read once more."""

    __slots__ = ("_competitors", "_owner", "_settlement", "_source")

    def __init__(
        self, context: ShareContext, competitors: Competitors, source: ShareSource, settlement: Settlement
    ) -> None:
        self._owner = context.owner
        self._competitors = competitors
        self._source = source
        self._settlement = settlement

    def lease(self, lane: ShareLane, collection: Collection) -> None:
        """Lease messages of *lane* to the member, and add them to *collection*. Raises `Refused`."""
        leases, member, generation = lane.leases, collection.member, collection.generation
        while leases.waiting and member.credit > 0 and collection.budget_bytes > 0 and collection.reads_left > 0:
            collection.reads_left -= 1
            first, count = leases.returns.run(min(member.credit, MESSAGES_A_READ))
            result = self._source.read_again(lane, member, first, count, collection.budget_bytes)
            if result is None:
                break
            end = min(max(result.next_offset, first + 1), first + count)
            if member.asks and not may_get_all(member, result):
                self._lease_by_name(lane, collection, result, range(first, end))
                continue
            batch = encode_result(result, first, member.encoding)
            if self._competitors.choosing or self._competitors.sticky is not None:
                if self._lease_by_choice(lane, collection, result, batch, range(first, end)):
                    continue
                break
            until = collection.until
            deliveries = leases.hand_again(member.holder, end - first, until, generation, member.lease_s)[0][1]
            member.credit -= end - first
            matching = bisect_left(batch.offsets, end)
            offsets = batch.offsets[:matching]
            if matching < end - first:
                self._settle_gone(lane, member.holder, range(first, end), offsets)
            if matching:
                self._owner.notes.note(lane.key, Change(AGAIN, generation, in_ms(member.lease_s), offsets=offsets))
                delivery = Delivery(lane.queue.queue_id, offsets[0], end, matching, batch, deliveries, generation)
                collection.found.append(delivery)
                collection.budget_bytes -= delivery.size

    def _lease_by_name(self, lane: ShareLane, collection: Collection, result: ReadResult, run: range) -> None:
        """As `lease` for the messages of *run*, of which the member may not get all."""
        member, generation = collection.member, collection.generation
        batch = encode_result(result, run.start, member.encoding)
        offsets = batch.offsets[: bisect_left(batch.offsets, run.stop)]
        receivers = receivers_of(result, member, self._competitors.in_turn(), offsets)
        self._owner.withheld += len(offsets) - len(receivers)
        now, deliveries = self._owner.now(), 1
        for offset in run:
            receiver = receivers[offset][0] if offset in receivers else member
            given = lane.leases.hand_again(receiver.holder, 1, now + receiver.lease_s, generation, receiver.lease_s)
            deliveries = given[0][1]
            if offset not in receivers:  # it is gone, or for nobody
                member.credit -= 1  # which `settle` gives back
                self._settlement.settle(lane, member.holder, offset)
        if receivers:
            change = Change(AGAIN, generation, in_ms(member.lease_s), offsets=list(receivers))
            self._owner.notes.note(lane.key, change)
        collection.give(lane, receivers, batch, result, deliveries)

    def _lease_by_choice(
        self, lane: ShareLane, collection: Collection, result: ReadResult, batch: Batch, run: range
    ) -> bool:
        """As `lease` for the messages of *run*, each for a member that takes it, or parked again.

        Returns False if the next one is for a member that can take no more now.
        """
        member, generation, competitors = collection.member, collection.generation, self._competitors
        count = bisect_left(batch.offsets, run.stop)
        takers = takers_of(result, member, competitors.in_turn(), competitors.sticky, competitors.keepers)[:count]
        if len(takers) < count:
            run, batch = range(run.start, batch.offsets[len(takers)]), batch.beginning(len(takers))
        by_offset, now, deliveries = dict(zip(batch.offsets, takers, strict=False)), self._owner.now(), 1
        for offset in run:
            taker = by_offset.get(offset, member)
            if taker is None:
                lane.leases.returns.park()
                continue
            given = lane.leases.hand_again(taker.holder, 1, now + taker.lease_s, generation, taker.lease_s)
            deliveries = given[0][1]
            if offset not in by_offset:  # it is gone
                member.credit -= 1  # which `settle` gives back
                self._settlement.settle(lane, member.holder, offset)
        if taken := [offset for offset, taker in by_offset.items() if taker is not None]:
            self._owner.notes.note(lane.key, Change(AGAIN, generation, in_ms(member.lease_s), offsets=taken))
        collection.give_chosen(lane, takers, batch, result, deliveries)
        return len(takers) == count

    def _settle_gone(self, lane: ShareLane, holder: Hashable, run: Sequence[int], found: Sequence[int]) -> None:
        """Settle messages of *run* that were not *found*: retention removed them, or they are not selected any more."""
        wanted = frozenset(found)
        for offset in run:
            if offset not in wanted:
                self._settlement.settle(lane, holder, offset)
