"""Hands out the messages of one shared group: to one member at a time, of each queue in turn."""

from collections.abc import Iterable, Iterator
from typing import Final, final

from martlet.delivery.subscriptions import Delivery
from martlet.errors import Refused
from martlet.groups.handing_out.collection import Collection, NewMessages, ReturnedMessages
from martlet.groups.handing_out.settlement import Settlement
from martlet.groups.queues.competitors import Competitor, Competitors
from martlet.groups.queues.share_context import ShareContext
from martlet.groups.queues.share_lane import ShareLane
from martlet.groups.queues.share_lanes import ShareLanes
from martlet.groups.queues.share_source import ShareSource

__all__ = ["MESSAGES_A_TURN", "RESTS_EXACT", "Distribution"]

LANES_A_CALL: Final = 256  # queues that one `Distribution.hand_out` looks at
# Messages of one queue before those of the next: notes about few queues are shorter.
MESSAGES_A_TURN: Final = 512
RESTS_EXACT: Final = 64  # queues with messages up to which `Distribution.rest` counts each time


@final
class Distribution:
    """Leases the messages of one group to its members, and says what is left."""

    __slots__ = (
        "_competitors",
        "_context",
        "_lanes",
        "_new",
        "_rest",
        "_rest_calls",
        "_returned",
        "_settlement",
        "_source",
        "_turn_left",
    )

    def __init__(
        self,
        context: ShareContext,
        competitors: Competitors,
        lanes: ShareLanes,
        source: ShareSource,
        settlement: Settlement,
    ) -> None:
        self._context = context
        self._competitors = competitors
        self._lanes = lanes
        self._source = source
        self._settlement = settlement
        self._returned = ReturnedMessages(context, competitors, source, settlement)
        self._new = NewMessages(context, competitors, source)
        self._rest = self._rest_calls = 0  # the last result of `rest`, and how many calls it serves
        self._turn_left = MESSAGES_A_TURN  # of the next lane

    def hand_out(
        self, member: Competitor, budget_bytes: int, queue_id: int = -1, *, in_order: bool = False, attempt: str = ""
    ) -> list[Delivery]:
        """Lease messages to *member*, of each queue in turn: first returned ones, then new ones.

        All get the same generation. With *queue_id* they are of that queue only. With *in_order* a queue is left out
        until its earlier messages are settled or can be delivered again, and messages that were settled before an
        earlier one follow that again. The *attempt* that took the last messages of a queue in order takes them again.
        """
        exclusive, owner, lanes, source = self._competitors.exclusive, self._context.owner, self._lanes, self._source
        if exclusive and member is not next(iter(exclusive)):
            return []
        until = owner.now() + member.lease_s
        self._begin_reset(queue_id)
        for lane in self._taken_by(attempt, queue_id) if in_order else ():
            self._settlement.return_attempt(lane, member.holder)
        visited: list[ShareLane] = []
        if source.finder is not None:
            source.find(source.finder, member.credit)
        parked = source.parked
        collection = Collection(member, budget_bytes, until, max(owner.clock.now_ms(), lanes.newest + 1))
        try:
            self._visit(collection, queue_id, attempt if in_order else None, visited)
        finally:
            for lane in visited:
                if not lanes.activate(lane):
                    lanes.active.pop(lane, None)
        found = collection.found
        if found:
            owner.alarm(self._context, until)
            self._rest -= sum([delivery.count for delivery in found])
        goes_on = bool(found) or collection.kept > 0 or source.parked < parked or collection.reads_left <= 0
        if goes_on and self.has_more(queue_id):
            self._competitors.wake()
        return found

    def has_more(self, queue_id: int = -1) -> bool:
        """Return whether there are messages to deliver, or to look at."""
        finder = self._source.finder
        if finder is not None and finder.has_found:
            return True
        return any(lane.due or lane.leases.returns.available for lane in self._may_have(queue_id))

    def _visit(self, collection: Collection, queue_id: int, attempt: str | None, visited: list[ShareLane]) -> None:
        """Add messages to *collection*, and every lane that was looked at to *visited*.

        *attempt* is what `hand_out` got, None if the order does not matter.
        """
        member = collection.member
        for lane in self._next_lanes(queue_id):
            if member.credit <= 0 or collection.budget_bytes <= 0 or collection.reads_left <= 0:
                break
            visited.append(lane)
            if attempt is not None and not self._begin_in_order(lane, attempt):
                continue
            credit = member.credit
            try:
                if lane.failure is not None:
                    lane.take_failure()
                if lane.leases.waiting:
                    self._returned.lease(lane, collection)
                is_moving = True
                while is_moving and member.credit > 0 and collection.budget_bytes > 0 and collection.reads_left > 0:
                    before = len(lane.found)
                    self._new.lease(lane, collection)
                    is_moving = 0 < len(lane.found) < before
            except Refused as refused:
                if not collection.found:
                    self._end_turn(lane)
                    raise
                lane.failure = refused  # deliver what was found first
                member.peer.wake()
                break
            if member.credit <= 0 or collection.budget_bytes <= 0:
                self._turn_left -= credit - member.credit
                if self._turn_left <= 0:
                    self._end_turn(lane)
                break

    def _is_reset(self, lane: ShareLane) -> bool:
        """Whether an administrator has reset the group in the queue of *lane*, which must begin again."""
        context = self._context
        if context.policy is not None:
            return False
        return context.owner.groups.pending_reset(context.group, context.topic.name, lane.queue.queue_id) >= 0

    def _begin_reset(self, queue_id: int) -> None:
        """Begin again with queues in which the group was reset, before the generation of a delivery is chosen."""
        context = self._context
        if context.policy is None and context.owner.groups.has_resets(context.group, context.topic.name):
            for lane in [lane for lane in self._may_have(queue_id) if self._is_reset(lane)]:
                self._lanes.begin_again(lane)

    def _taken_by(self, attempt: str, queue_id: int) -> list[ShareLane]:
        """Return the queues whose next messages wait for those that *attempt* has taken in order."""
        lanes = self._lanes.by_queue.values() if queue_id < 0 else self._may_have(queue_id)
        return [lane for lane in lanes if lane.attempt == attempt and lane.is_blocked] if attempt else []

    def _begin_in_order(self, lane: ShareLane, attempt: str) -> bool:
        """Return whether messages of *lane* may be taken in order now."""
        lane.in_order = True
        if lane.is_blocked:
            return False
        if lane.early and lane.leases.waiting:
            self._settlement.return_early(lane)
        lane.attempt = attempt
        return True

    def _next_lanes(self, queue_id: int) -> Iterator[ShareLane]:
        """Yield the lane of *queue_id*; if it is -1, active lanes: one whose turn is not over is next again."""
        if queue_id >= 0:
            yield from self._may_have(queue_id)
            return
        active = self._lanes.active
        for _ in range(min(len(active), LANES_A_CALL)):
            lane = next(iter(active))
            yield lane
            self._end_turn(lane)

    def _end_turn(self, lane: ShareLane) -> None:
        """Let all other queues come before that of *lane*."""
        self._turn_left = MESSAGES_A_TURN
        if lane in self._lanes.active:
            self._lanes.active.move_to_end(lane)

    def _may_have(self, queue_id: int) -> Iterable[ShareLane]:
        """Return the lane of *queue_id*; if it is -1, all that may have messages."""
        if queue_id < 0:
            return self._lanes.active
        lane = self._lanes.get(queue_id)
        return (lane,) if lane is not None else ()

    def is_ready(self, queue_id: int = -1, *, in_order: bool = False, attempt: str = "") -> bool:
        """Return whether `hand_out` may find messages now; if not, members with credit are woken once it may."""
        owner = self._context.owner
        if self._taken_by(attempt, queue_id):
            return True
        for lane in self._may_have(queue_id):
            reader = lane.reader
            if reader.must_wait and not reader.has_read:
                continue
            if in_order and lane.is_blocked:
                if self._is_reset(lane):
                    return True
                continue
            if lane.failure or lane.leases.waiting:
                return True
            is_behind = lane.due and owner.store.end_offset(lane.queue) > lane.leases.table.next
            if is_behind and min(lane.leases.table.room, owner.room) > 0:
                return True
        return False

    def is_reading(self, queue_id: int = -1) -> bool:
        """Return whether a thread reads messages for `hand_out`; members with credit are woken when it has."""
        return any(lane.reader.must_wait for lane in self._may_have(queue_id))

    def rest(self, queue_id: int = -1) -> int:
        """Return how many messages can be delivered now or have not been looked at yet; about, if queues are many."""
        if queue_id < 0 and self._rest_calls > 0:
            self._rest_calls -= 1
            return max(self._rest, 0)
        lanes = self._may_have(queue_id)
        rest = sum([lane.leases.waiting + max(lane.queue.next_offset - lane.leases.table.next, 0) for lane in lanes])
        if queue_id < 0:
            self._rest, self._rest_calls = rest, len(self._lanes.active) // RESTS_EXACT
        return rest
