"""Leases messages of a shared group that were returned: read again, and delivered once more."""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import final

from martlet.delivery.fanout import Batch, encode_result
from martlet.delivery.subscriptions import Delivery
from martlet.groups.handing_out.collection import MESSAGES_A_READ, Collection
from martlet.groups.handing_out.settlement import Settlement
from martlet.groups.journal.journal_codec import AGAIN, Change, in_ms
from martlet.groups.queues.competitors import Competitors
from martlet.groups.queues.share_context import ShareContext
from martlet.groups.queues.share_lane import ShareLane
from martlet.groups.queues.share_source import ShareSource
from martlet.groups.strategy.by_name import may_get_all, receivers_of
from martlet.groups.strategy.choosing import takers_of
from martlet.store import ReadResult

__all__ = ["ReturnedMessages"]


@final
class ReturnedMessages:
    """The messages of one group that wait to be delivered again."""

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
