"""The lanes of one shared group: opened as its topic has queues; which have something to deliver, and what is due."""

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, final

from martlet.delivery.subscriptions import Start
from martlet.groups.queues.competitors import Competitors
from martlet.groups.queues.lane_leases import first_leases
from martlet.groups.queues.share_context import ShareContext
from martlet.groups.queues.share_lane import ShareLane

__all__ = ["RESTORED_A_TURN", "ShareLanes"]

# Leases that are restored before the next turn of the event loop, and the rest of the last queue's: 0.3 us each.
RESTORED_A_TURN: Final = 4096


@final
class ShareLanes:
    """The lanes of one group on one topic.

    Args:
      start: where the group begins in a queue that it has never consumed.
      begun_at: the log position from which the group finds its messages by their names; -1 if it reads its queues.
        Such a group gets a lane for a queue when it first finds a message there. The lane of the first queue records
        how far the group has searched.
    """

    __slots__ = (
        "_begun_at",
        "_competitors",
        "_context",
        "_start",
        "_timers",
        "_unopened",
        "active",
        "by_queue",
        "newest",
        "with_dead",
    )

    def __init__(self, context: ShareContext, competitors: Competitors, start: Start, begun_at: int) -> None:
        self._context = context
        self._competitors = competitors
        self._start = start
        self._begun_at = begun_at
        self.by_queue: dict[int, ShareLane] = {}
        self._unopened: dict[int, None] = {}  # queues with many stored leases, which `restore_some` opens one by one
        # The lanes with something to deliver, and perhaps a few others, the next one first: no call looks at all lanes.
        self.active: OrderedDict[ShareLane, None] = OrderedDict()
        self.newest = 0  # the newest generation of a returned message
        self.with_dead: dict[ShareLane, None] = {}  # lanes with dead messages
        self._timers: list[tuple[float, int]] = []  # a heap: when to look at the leases of which queue

    def follow(self, *, new: bool = False) -> None:
        """Share all present queues of the topic; *new* says that the group has never consumed it."""
        context, left = self._context, RESTORED_A_TURN
        for queue_id in range(context.topic.read_queues):
            if queue_id in self.by_queue or queue_id in self._unopened:
                continue
            known = context.owner.notes.stored(context.key(queue_id))
            if known is None and self._begun_at >= 0:
                continue
            if known is not None and known.leases:
                if left <= 0:
                    self._unopened[queue_id] = None
                    context.owner.alarm(context, -math.inf)
                    continue
                left -= len(known.leases)
            self.open(queue_id, new=new)

    def open(self, queue_id: int, *, new: bool = False, first: int = -1) -> ShareLane:
        """Share a queue, and restore its stored leases; without any, it begins at offset *first* if that is given."""
        self._unopened.pop(queue_id, None)
        context, start = self._context, self._start if new else None
        queue, key = context.topic.queue(queue_id), context.key(queue_id)
        leases = first_leases(context, queue, key, start, first, self._begun_at if queue_id == 0 else -1)
        lane = ShareLane(context, self._competitors, queue, key, leases, by_name=self._begun_at >= 0)
        self.by_queue[queue_id] = lane
        self.activate(lane)
        context.owner.notes.open(key, lane)
        self._competitors.wake()
        return lane

    def begin_again(self, lane: ShareLane) -> None:
        """Begin anew with *lane*, where an administrator's reset of the group wants it."""
        context = self._context
        context.owner.settled(lane.counted)
        for member in self._competitors.members:  # what they hold counts no more
            if held := len(lane.leases.table.held(member.holder)):
                member.add_credit(held)
        queue_id = lane.queue.queue_id
        self.newest = max(self.newest, lane.leases.table.newest)  # handles of before are not valid any more
        lane.use(first_leases(context, lane.queue, lane.key, None, -1, self._begun_at if queue_id == 0 else -1))
        self.activate(lane)
        lane.unflushed.clear()
        lane.forget_read()

    def restore_some(self) -> int:
        """Restore the stored leases of one queue that waits for that; return how many they are."""
        if not self._unopened:
            return 0
        restored = self.open(next(iter(self._unopened))).leases.table.size
        self._context.owner.alarm(self._context, -math.inf)
        return restored

    def get(self, queue_id: int) -> ShareLane | None:
        """Return the lane of a queue, whose stored leases are restored first."""
        return self.open(queue_id) if queue_id in self._unopened else self.by_queue.get(queue_id)

    @property
    def has_unsettled(self) -> bool:
        """Whether there are messages to settle."""
        return bool(self._unopened) or any(lane.leases.table.size for lane in self.by_queue.values())

    @property
    def is_stored(self) -> bool:
        """Whether the stored state has all that was noted."""
        return all(self._context.owner.notes.is_applied(lane.key) for lane in self.by_queue.values())

    def activate(self, lane: ShareLane) -> bool:
        """Note that *lane* may have something to deliver, or dead messages, or another deadline.

        Returns whether it has something to deliver.
        """
        leases, is_active = lane.leases, lane.is_active
        if is_active:
            self.active.setdefault(lane)
            self.newest = max(self.newest, leases.returns.newest)
        if leases.has_dead:
            self.with_dead[lane] = None
        at = leases.deadline()
        if at < lane.timer_at:
            lane.timer_at = at
            heapq.heappush(self._timers, (at, lane.queue.queue_id))
        return is_active

    def look_at_all(self) -> None:
        """Let the next `Distribution.hand_out` look at all queues."""
        for lane in self.by_queue.values():
            lane.due = True
            self.activate(lane)

    def apply_retries(self) -> None:
        """Use the group's present number of retries for messages that return from now on."""
        for lane in self.by_queue.values():
            lane.leases.deliveries_max = self._context.deliveries_max()

    def unpark(self) -> None:
        """Make all parked messages available: somebody joined who may take them."""
        for lane in self.by_queue.values():
            if lane.leases.returns.parked:
                lane.leases.returns.unpark()
                self.activate(lane)

    @property
    def deadline(self) -> float:
        """When `take_due` has something."""
        return self._timers[0][0] if self._timers else math.inf

    def take_due(self, now: float) -> Iterator[ShareLane]:
        """Yield each lane that has a timer up to *now*; the caller activates it, which sets its next timer."""
        while self._timers and self._timers[0][0] <= now:
            at, queue_id = heapq.heappop(self._timers)
            lane = self.by_queue.get(queue_id)
            if lane is not None and at == lane.timer_at:
                lane.timer_at = math.inf
                yield lane

    def end(self) -> list[ShareLane]:
        """Forget all lanes; return them, which must be closed."""
        lanes = list(self.by_queue.values())
        for lane in lanes:
            lane.is_closed = True
        for table in self.by_queue, self._unopened, self.active, self.with_dead, self._timers:
            table.clear()
        self._context.owner.settled(sum([lane.counted for lane in lanes]))
        return lanes
