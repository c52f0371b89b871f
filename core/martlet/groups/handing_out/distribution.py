"""Hands out the messages of one shared group: to one member at a time, of each queue in turn."""

from collections.abc import Iterable, Iterator
from typing import Final, final

from martlet.delivery.subscriptions import Delivery
from martlet.errors import Refused
from martlet.groups.handing_out.collection import Collection, NewMessages, ReturnedMessages
from martlet.groups.handing_out.settlement import Settlement
from martlet.groups.queues.group_context import GroupContext
from martlet.groups.queues.group_members import GroupMember, GroupMembers
from martlet.groups.queues.group_queue import GroupQueue
from martlet.groups.queues.group_queues import GroupQueues
from martlet.groups.queues.group_source import GroupSource

__all__ = ["MESSAGES_A_TURN", "RESTS_EXACT", "Distribution"]

QUEUES_A_CALL: Final = 256  # queues visited by one `Distribution.hand_out`
# Messages taken from one queue before the next queue's turn: notes about few queues are shorter.
MESSAGES_A_TURN: Final = 512
RESTS_EXACT: Final = 64  # up to this many queues with messages, `Distribution.rest` counts each time


@final
class Distribution:
    """Leases the messages of one group to its members, and counts the messages left."""

    __slots__ = (
        "_context",
        "_members",
        "_new",
        "_queues",
        "_rest",
        "_rest_reuses",
        "_returned",
        "_settlement",
        "_source",
        "_turn_left",
    )

    def __init__(
        self,
        context: GroupContext,
        members: GroupMembers,
        queues: GroupQueues,
        source: GroupSource,
        settlement: Settlement,
    ) -> None:
        self._context = context
        self._members = members
        self._queues = queues
        self._source = source
        self._settlement = settlement
        self._returned = ReturnedMessages(context, members, source, settlement)
        self._new = NewMessages(context, members, source)
        self._rest = self._rest_reuses = 0  # the last result of `rest`, and the number of calls that it still serves
        self._turn_left = MESSAGES_A_TURN  # messages left of the turn of the next queue

    def hand_out(
        self, member: GroupMember, budget_bytes: int, queue_id: int = -1, *, in_order: bool = False, attempt: str = ""
    ) -> list[Delivery]:
        """Lease messages to *member*, of each queue in turn: first returned ones, then new ones.

        All get the same generation. With *queue_id* they are of that queue only. With *in_order* a queue is skipped
        until its earlier messages are settled or can be delivered again, and messages that were settled before such an
        earlier message follow it again. The *attempt* that took the last messages of a queue in order takes them again.
        """
        exclusive, owner, source = self._members.exclusive, self._context.owner, self._source
        if exclusive and member is not next(iter(exclusive)):
            return []
        until = owner.now() + member.lease_s
        self._begin_reset(queue_id)
        if in_order:
            self._return_earlier_attempt(attempt, queue_id, member)
        if source.finder is not None:
            source.find(source.finder, member.credit)
        parked, visited = source.parked, list[GroupQueue]()
        collection = Collection(member, budget_bytes, until, max(owner.clock.now_ms(), self._queues.newest + 1))
        try:
            self._collect_from_queues(collection, queue_id, attempt if in_order else None, visited)
        finally:
            self._deactivate_empty(visited)
        deliveries = collection.deliveries
        if deliveries:
            owner.alarm(self._context, until)
            self._rest -= sum([delivery.count for delivery in deliveries])
        made_progress = bool(deliveries) or collection.kept > 0 or source.parked < parked or collection.reads_left <= 0
        if made_progress and self.has_more(queue_id):
            self._members.wake()
        return deliveries

    def _return_earlier_attempt(self, attempt: str, queue_id: int, member: GroupMember) -> None:
        """Return the messages that *attempt* took before, so that it can take them again."""
        for queue in self._queues_of_attempt(attempt, queue_id):
            self._settlement.return_attempt(queue, member.holder)

    def _deactivate_empty(self, visited: list[GroupQueue]) -> None:
        queues = self._queues
        for queue in visited:
            if not queues.activate(queue):  # it has nothing to deliver
                queues.active.pop(queue, None)

    def has_more(self, queue_id: int = -1) -> bool:
        """Return whether there are messages to deliver, or to check."""
        finder = self._source.finder
        if finder is not None and finder.has_found:
            return True
        return any(queue.due or queue.leases.returns.available for queue in self._candidate_queues(queue_id))

    def _collect_from_queues(
        self, collection: Collection, queue_id: int, attempt: str | None, visited: list[GroupQueue]
    ) -> None:
        """Add messages to *collection*, and every visited queue to *visited*.

        *attempt* is the argument of `hand_out`, None if the order does not matter.
        """
        member = collection.member
        for queue in self._next_queues(queue_id):
            if collection.room <= 0 or collection.budget_bytes <= 0 or collection.reads_left <= 0:
                break
            visited.append(queue)
            if attempt is not None and not self._begin_in_order(queue, attempt):
                continue
            room_before = collection.room
            try:
                if queue.failure is not None:
                    queue.take_failure()
                if queue.leases.waiting:
                    self._returned.lease(queue, collection)
                has_advanced = True
                while (
                    has_advanced and collection.room > 0 and collection.budget_bytes > 0 and collection.reads_left > 0
                ):
                    found_before = len(queue.found)
                    self._new.lease(queue, collection)
                    has_advanced = 0 < len(queue.found) < found_before
            except Refused as refused:
                if not collection.deliveries:
                    self._end_turn(queue)
                    raise
                queue.failure = refused  # first deliver the messages read before the error
                member.peer.wake()
                break
            if collection.room <= 0 or collection.budget_bytes <= 0:
                self._turn_left -= room_before - collection.room
                if self._turn_left <= 0:
                    self._end_turn(queue)
                break

    def _is_reset(self, queue: GroupQueue) -> bool:
        """Whether an administrator has reset the group in *queue*, so that it must begin again."""
        context = self._context
        if context.policy is not None:
            return False
        return (
            context.owner.groups.offsets.pending_reset(context.group, context.topic.name, queue.store_queue.queue_id)
            >= 0
        )

    def _begin_reset(self, queue_id: int) -> None:
        """Begin again with queues in which the group was reset, before the generation of a delivery is chosen."""
        context = self._context
        if context.policy is None and context.owner.groups.offsets.has_resets(context.group, context.topic.name):
            for queue in [queue for queue in self._candidate_queues(queue_id) if self._is_reset(queue)]:
                self._queues.begin_again(queue)

    def _queues_of_attempt(self, attempt: str, queue_id: int) -> list[GroupQueue]:
        """Return the queues whose next messages wait for messages that *attempt* has taken in order."""
        queues = self._queues.by_queue.values() if queue_id < 0 else self._candidate_queues(queue_id)
        return [queue for queue in queues if queue.attempt == attempt and queue.is_blocked] if attempt else []

    def _begin_in_order(self, queue: GroupQueue, attempt: str) -> bool:
        """Return whether messages of *queue* may be taken in order now."""
        queue.in_order = True
        if queue.is_blocked:
            return False
        if queue.early and queue.leases.waiting:
            self._settlement.return_early(queue)
        queue.attempt = attempt
        return True

    def _next_queues(self, queue_id: int) -> Iterator[GroupQueue]:
        """Yield the queue with *queue_id*; if it is -1, active queues: first the one whose turn is not over."""
        if queue_id >= 0:
            yield from self._candidate_queues(queue_id)
            return
        active = self._queues.active
        for _ in range(min(len(active), QUEUES_A_CALL)):
            queue = next(iter(active))
            yield queue
            self._end_turn(queue)

    def _end_turn(self, queue: GroupQueue) -> None:
        """Put *queue* behind all other queues."""
        self._turn_left = MESSAGES_A_TURN
        if queue in self._queues.active:
            self._queues.active.move_to_end(queue)

    def _candidate_queues(self, queue_id: int) -> Iterable[GroupQueue]:
        """Return the queue with *queue_id*; if it is -1, all queues that may have messages."""
        if queue_id < 0:
            return self._queues.active
        queue = self._queues.get(queue_id)
        return (queue,) if queue is not None else ()

    def is_ready(self, queue_id: int = -1, *, in_order: bool = False, attempt: str = "") -> bool:
        """Return whether `hand_out` may return messages now; if not, members with credit are woken when it may."""
        owner = self._context.owner
        if self._queues_of_attempt(attempt, queue_id):
            return True
        for queue in self._candidate_queues(queue_id):
            reader = queue.reader
            if reader.must_wait and not reader.has_read:
                continue
            if in_order and queue.is_blocked:
                if self._is_reset(queue):
                    return True
                continue
            if queue.failure or queue.leases.waiting:
                return True
            is_behind = queue.due and owner.store.readers.end_offset(queue.store_queue) > queue.leases.table.next
            if is_behind and min(queue.leases.table.room, owner.room) > 0:
                return True
        return False

    def is_reading(self, queue_id: int = -1) -> bool:
        """Return whether a thread reads messages for `hand_out`; members with credit are woken when it has."""
        return any(queue.reader.must_wait for queue in self._candidate_queues(queue_id))

    def rest(self, queue_id: int = -1) -> int:
        """Return the number of messages to deliver now or not checked yet; approximate for many queues."""
        if queue_id < 0 and self._rest_reuses > 0:
            self._rest_reuses -= 1
            return max(self._rest, 0)
        queues = self._candidate_queues(queue_id)
        messages_left = sum(
            [queue.leases.waiting + max(queue.store_queue.next_offset - queue.leases.table.next, 0) for queue in queues]
        )
        if queue_id < 0:
            self._rest, self._rest_reuses = messages_left, len(self._queues.active) // RESTS_EXACT
        return messages_left
