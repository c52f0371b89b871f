"""Messages that one member collects at once: new ones and returned ones, within its limits."""

from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import Final, final

from martlet.delivery.fanout import Batch, encode_result
from martlet.delivery.subscriptions import Delivery
from martlet.groups.handing_out.receivers import CHOICES_A_READ, PARKED_MAX, Portion, receivers_of
from martlet.groups.handing_out.settlement import Settlement
from martlet.groups.journal.journal_codec import AGAIN, KEEP, NEW, Change, in_ms
from martlet.groups.queues.group_context import GroupContext
from martlet.groups.queues.group_members import GroupMember, GroupMembers
from martlet.groups.queues.group_queue import GroupQueue
from martlet.groups.queues.group_source import GroupSource
from martlet.store import ReadResult

__all__ = ["MESSAGES_A_READ", "READS_A_CALL", "Collection", "NewMessages", "ReturnedMessages"]

MESSAGES_A_READ: Final = 256
READS_A_CALL: Final = 128  # reads per call: 20 to 40 us each, as returned messages may be far apart
UNNOTED_MAX: Final = 4096  # skipped messages that may be read again after a restart


@final
class Collection:
    """Messages leased to *member* in one call, all with the same *generation*, *until* a time.

    ``room``, ``budget_bytes`` and ``reads_left`` are what it may still get, and ``kept`` counts messages kept for
    others.
    """

    __slots__ = ("budget_bytes", "deliveries", "generation", "kept", "member", "reads_left", "settled", "until")

    def __init__(self, member: GroupMember, budget_bytes: int, until: float, generation: int) -> None:
        self.member = member
        self.budget_bytes = budget_bytes
        self.until = until
        self.generation = generation
        self.reads_left = READS_A_CALL
        self.kept = 0
        self.settled = 0  # messages settled at once, for a member that acknowledges none
        self.deliveries: list[Delivery] = []

    @property
    def room(self) -> int:
        """The number of messages that the member may still get."""
        return self.member.credit - self.settled

    def give(
        self,
        queue: GroupQueue,
        portions: Iterable[Portion],
        batch: Batch,
        end: int,
        result: ReadResult,
        delivery_number: int,
    ) -> bool:
        """Add the member's messages of *batch*, up to offset *end*, and keep the others for their receivers.

        Returns whether the member receives anything.
        """
        member, index = self.member, 0
        own_indexes: list[int] = []
        batches = {member.encoding.name: batch}
        for receiver, length, name, _ in portions:
            if receiver is member:
                own_indexes += range(index, index + length)
            elif receiver is not None:
                encoded = batches.get(receiver.encoding.name)
                if encoded is None:
                    encoded = batches[receiver.encoding.name] = encode_result(result, batch.start, receiver.encoding)
                self._keep_for(queue, receiver, name, batch.offsets[index : index + length], encoded, delivery_number)
            index += length
        if own_indexes:
            own_batch = batch if len(own_indexes) == len(batch.offsets) else batch.chosen(own_indexes)
            queue_id, first = queue.store_queue.queue_id, own_batch.offsets[0]
            count = len(own_indexes)
            self.deliveries.append(Delivery(queue_id, first, end, count, own_batch, delivery_number, self.generation))
            self.budget_bytes -= own_batch.size
        return bool(own_indexes)

    def _keep_for(
        self,
        queue: GroupQueue,
        receiver: GroupMember,
        name: str,
        offsets: Sequence[int],
        batch: Batch,
        delivery_number: int,
    ) -> None:
        """Keep messages of *name* for *receiver*, one by one."""
        context, queue_id, generation = queue.context, queue.store_queue.queue_id, self.generation
        for offset in offsets:
            delivery = Delivery(queue_id, offset, offset + 1, 1, batch, delivery_number, generation)
            self.budget_bytes -= delivery.size
            receiver.keep(name, delivery)
        self.kept += len(offsets)
        context.owner.alarm(context, context.owner.now() + receiver.lease_s)


@final
class NewMessages:
    """The messages of one group that were never delivered: read once, for whichever members get them."""

    __slots__ = ("_context", "_members", "_source")

    def __init__(self, context: GroupContext, members: GroupMembers, source: GroupSource) -> None:
        self._context = context
        self._members = members
        self._source = source

    def lease(self, queue: GroupQueue, collection: Collection) -> None:
        """Lease the next messages of *queue* to the member, and add them to *collection*. Raises `Refused`."""
        context, members, source = self._context, self._members, self._source
        owner, member = context.owner, collection.member
        leases, table = queue.leases, queue.leases.table
        room = min(table.room, owner.room, collection.room, MESSAGES_A_READ)
        if context.policy is not None and context.policy.in_parts:
            room = min(room, self._fair_share(queue))
        if members.choosing:
            choices_max = max(CHOICES_A_READ // len(members.by_turn), 1)
            room = min(room, choices_max, PARKED_MAX - len(leases.returns.parked))
        if room <= 0 or not queue.due:
            return
        collection.reads_left -= 1
        is_by_name = bool(queue.found)
        start, read = (queue.found[0][0], source.read_found) if is_by_name else (table.next, source.read_new)
        result = read(queue, member, room, collection.budget_bytes)
        if result is None or result.next_offset <= start:
            return
        batch = encode_result(result, start, member.encoding)
        portions = receivers_of(result, member, members, may_stop=not is_by_name)
        if result.count and not portions:
            queue.due = True
            return  # the receiver of the next message reads it
        end = self._hand_out(queue, collection, portions, batch)
        if not collection.give(queue, portions, batch, end, result, delivery_number=1) and queue.due:
            members.wake()

    def _hand_out(self, queue: GroupQueue, collection: Collection, portions: Iterable[Portion], batch: Batch) -> int:
        """Lease the messages of *batch* to their receivers, and note that; return the offset of the first one left."""
        leases, owner = queue.leases, self._context.owner
        member, generation, index, withheld = collection.member, collection.generation, 0, 0
        leased: list[Sequence[int]] = []
        parked_offsets: list[int] = []
        for receiver, count, _, is_parked in portions:
            offsets = batch.offsets[index : index + count]
            index += count
            if receiver is member:
                if member.acknowledges:
                    leases.hand_out(member.holder, offsets, collection.until, generation, member.lease_s)
                    leased.append(offsets)
                    member.credit -= count
                else:
                    collection.settled += count
            elif receiver is not None:
                leases.hand_out(receiver.holder, offsets, owner.now() + receiver.lease_s, generation, receiver.lease_s)
                leased.append(offsets)
            elif is_parked:
                leases.park(offsets, generation)
                parked_offsets += offsets
            else:
                withheld += count
        owner.withheld += withheld
        end = batch.end_of(index)
        if end < batch.next:
            queue.due = True
        leases.skip_to(end)
        if index > withheld or end >= queue.noted_next + UNNOTED_MAX:
            leased_offsets = leased[0] if len(leased) == 1 else list(chain.from_iterable(leased))
            change = Change(NEW, generation, in_ms(member.lease_s), end, leased_offsets, queue.noted_next)
            owner.notes.note(queue.key, change)
            queue.noted_next = end
        if parked_offsets:
            owner.notes.note(queue.key, Change(KEEP, generation, 0, 0, parked_offsets))
        queue.account()
        return end

    def _fair_share(self, queue: GroupQueue) -> int:
        """Return the number of new messages that one member may take, so that all members with credit get some."""
        members = self._members
        is_shared = len(members.by_turn) > 1 and not members.exclusive
        ready = sum([member.credit > 0 for member in members.by_turn]) if is_shared else 1
        return max(-((queue.leases.table.next - queue.store_queue.next_offset) // max(ready, 1)), 1)


@final
class ReturnedMessages:
    """The messages of one group that wait to be delivered again; they are read again."""

    __slots__ = ("_members", "_owner", "_settlement", "_source")

    def __init__(
        self, context: GroupContext, members: GroupMembers, source: GroupSource, settlement: Settlement
    ) -> None:
        self._owner = context.owner
        self._members = members
        self._source = source
        self._settlement = settlement

    def lease(self, queue: GroupQueue, collection: Collection) -> None:
        """Lease messages of *queue* to the member, and add them to *collection*. Raises `Refused`."""
        leases, member = queue.leases, collection.member
        while leases.waiting and collection.room > 0 and collection.budget_bytes > 0 and collection.reads_left > 0:
            collection.reads_left -= 1
            first, count = leases.returns.run(min(collection.room, MESSAGES_A_READ))
            result = self._source.read_again(queue, member, first, count, collection.budget_bytes)
            if result is None:
                break
            batch = encode_result(result, first, member.encoding)
            portions = receivers_of(result, member, self._members)
            receivable = sum([portion.length for portion in portions])
            is_all = receivable == result.count
            end = max(batch.next, first + 1) if is_all else batch.offsets[receivable]
            delivery_number = self._hand_out(queue, collection, portions, batch.offsets, range(first, end))
            collection.give(queue, portions, batch, end, result, delivery_number)
            if not is_all:
                break  # the next message is for a member that can take no more now

    def _hand_out(
        self, queue: GroupQueue, collection: Collection, portions: Iterable[Portion], offsets: Sequence[int], run: range
    ) -> int:
        """Lease the messages of *run* to their receivers, and note the leases; return the number of the delivery.

        Messages missing at *offsets* are settled: retention removed them, or they are not selected any more.
        """
        leases, owner = queue.leases, self._owner
        member, generation, index = collection.member, collection.generation, 0
        receivers: dict[int, GroupMember | None] = {}
        for receiver, count, _, is_parked in portions:
            if receiver is not None or is_parked:
                receivers.update(dict.fromkeys(offsets[index : index + count], receiver))
            else:
                owner.withheld += count
            index += count
        delivery_number = 1
        for receiver, group in groupby([receivers.get(offset, member) for offset in run]):
            count = len(list(group))
            if receiver is None:
                for _ in range(count):
                    leases.returns.park()
                continue
            until = collection.until if receiver is member else owner.now() + receiver.lease_s
            leases_given = leases.hand_again(receiver.holder, count, until, generation, receiver.lease_s)
            delivery_number = leases_given[0][1]
            member.credit -= count if receiver is member else 0  # `settle` returns the credit of messages for nobody
        for offset in run if len(receivers) < len(run) else ():
            if offset not in receivers:
                self._settlement.settle(queue, member.holder, offset)
        if leased := [offset for offset, receiver in receivers.items() if receiver is not None]:
            owner.notes.note(queue.key, Change(AGAIN, generation, in_ms(member.lease_s), offsets=leased))
        return delivery_number
