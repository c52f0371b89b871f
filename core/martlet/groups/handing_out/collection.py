"""What one member collects at once: how much it may get, and what was found for it."""

from collections.abc import Mapping, Sequence
from typing import Final, final

from martlet.delivery.fanout import Batch, encode_result
from martlet.delivery.subscriptions import Delivery
from martlet.groups.queues.competitors import Competitor
from martlet.groups.queues.share_lane import ShareLane
from martlet.store import ReadResult

__all__ = ["MESSAGES_A_READ", "READS_A_CALL", "Collection"]

MESSAGES_A_READ: Final = 256
READS_A_CALL: Final = 128  # how often one call reads: 20 to 40 us each, as returned messages may be far apart


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
