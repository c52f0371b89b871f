"""The queues of one shared group: opening them, the queues with messages to deliver, and their timers.

A group begins on a queue with no leases, or with stored leases (`first_leases`).
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Final, final

from martlet.delivery.subscriptions import Start
from martlet.groups.journal.journal_codec import Key, LeaseState
from martlet.groups.journal.state import GroupQueueState
from martlet.groups.leases.queue_leases import Leases
from martlet.groups.queues.group_context import GroupContext
from martlet.groups.queues.group_members import GroupMembers
from martlet.groups.queues.group_queue import GroupQueue
from martlet.runtime.steps import per_slice
from martlet.store import Queue

__all__ = ["RESTORED_A_TURN", "GroupQueues", "first_leases"]

# Leases restored in a turn of the event loop. The last queue of a turn is finished, so that a turn may restore more.
RESTORED_A_TURN: Final = per_slice(us=0.3)
LAPSED_AT_START: Final = 512
RESTORED: Final = "an earlier run"  # the holder of messages leased before the broker started


@final
class GroupQueues:
    """The queues of one group on one topic.

    Args:
      start: where the group begins in a queue that it has never consumed.
      begun_at: the log position from which the group finds its messages by their names; -1 if it reads its queues.
        A group that finds messages gets a queue when it first finds one there. The first queue of the topic records the
        position up to which the group has searched.
    """

    __slots__ = (
        "_begun_at",
        "_context",
        "_members",
        "_start",
        "_timers",
        "_unopened",
        "active",
        "by_queue",
        "newest",
        "with_dead",
    )

    def __init__(self, context: GroupContext, members: GroupMembers, start: Start, begun_at: int) -> None:
        self._context = context
        self._members = members
        self._start = start
        self._begun_at = begun_at
        self.by_queue: dict[int, GroupQueue] = {}
        self._unopened: dict[int, None] = {}  # queues with many stored leases, which `restore_some` opens one by one
        # Queues with messages to deliver, and perhaps a few others, the next one first: no call looks at all queues.
        self.active: OrderedDict[GroupQueue, None] = OrderedDict()
        self.newest = 0  # the newest generation of a returned message
        self.with_dead: dict[GroupQueue, None] = {}  # queues with dead messages
        self._timers: list[tuple[float, int]] = []  # a heap of (time to check the leases of a queue, queue id)

    def follow(self, *, new: bool = False) -> None:
        """Use all present queues of the topic; *new*: the group has never consumed it."""
        context, leases_left = self._context, RESTORED_A_TURN
        for queue_id in range(context.topic.read_queues):
            if queue_id in self.by_queue or queue_id in self._unopened:
                continue
            stored = context.owner.notes.stored(context.key(queue_id))
            if stored is None and self._begun_at >= 0:
                continue
            if stored is not None and stored.leases:
                if leases_left <= 0:
                    self._unopened[queue_id] = None
                    context.owner.alarm(context, -math.inf)
                    continue
                leases_left -= len(stored.leases)
            self.open(queue_id, new=new)

    def open(self, queue_id: int, *, new: bool = False, first: int = -1) -> GroupQueue:
        """Use a queue, and restore its stored leases; without any, begin at offset *first* if that is given."""
        self._unopened.pop(queue_id, None)
        context, start = self._context, self._start if new else None
        store_queue, key = context.topic.queue(queue_id), context.key(queue_id)
        leases = first_leases(context, store_queue, key, start, first, self._begun_at if queue_id == 0 else -1)
        queue = GroupQueue(context, self._members, store_queue, key, leases, by_name=self._begun_at >= 0)
        self.by_queue[queue_id] = queue
        self.activate(queue)
        context.owner.notes.open(key, queue)
        self._members.wake()
        return queue

    def begin_again(self, queue: GroupQueue) -> None:
        """Begin again with *queue*, at the offset to which an administrator has reset the group."""
        context = self._context
        context.owner.settled(queue.counted)
        for member in self._members.by_turn:  # the messages that they hold do not count any more
            if held := len(queue.leases.table.held(member.holder)):
                member.add_credit(held)
        queue_id = queue.store_queue.queue_id
        self.newest = max(self.newest, queue.leases.table.newest)  # earlier handles are not valid any more
        queue.use(
            first_leases(context, queue.store_queue, queue.key, None, -1, self._begun_at if queue_id == 0 else -1)
        )
        self.activate(queue)
        queue.unflushed.clear()
        queue.forget_read()

    def restore_some(self) -> int:
        """Restore the stored leases of one waiting queue; return their number."""
        if not self._unopened:
            return 0
        restored = self.open(next(iter(self._unopened))).leases.table.size
        self._context.owner.alarm(self._context, -math.inf)
        return restored

    def get(self, queue_id: int) -> GroupQueue | None:
        """Return the queue with this id; restores its stored leases first."""
        return self.open(queue_id) if queue_id in self._unopened else self.by_queue.get(queue_id)

    @property
    def has_unsettled(self) -> bool:
        """Whether there are messages to settle."""
        return bool(self._unopened) or any(queue.leases.table.size for queue in self.by_queue.values())

    @property
    def is_stored(self) -> bool:
        """Whether the stored state includes everything that was noted."""
        return all(self._context.owner.notes.is_applied(queue.key) for queue in self.by_queue.values())

    def activate(self, queue: GroupQueue) -> bool:
        """Note that *queue* may have messages to deliver, dead messages, or another deadline.

        Returns whether it has messages to deliver.
        """
        leases, is_active = queue.leases, queue.is_active
        if is_active:
            self.active.setdefault(queue)
            self.newest = max(self.newest, leases.returns.newest)
        if leases.has_dead:
            self.with_dead[queue] = None
        check_at = leases.deadline()
        if check_at < queue.timer_at:
            queue.timer_at = check_at
            heapq.heappush(self._timers, (check_at, queue.store_queue.queue_id))
        return is_active

    def look_at_all(self) -> None:
        """Let the next `Distribution.hand_out` check all queues."""
        for queue in self.by_queue.values():
            queue.due = True
            self.activate(queue)

    def apply_retries(self) -> None:
        """Use the group's present number of retries for messages that return from now on."""
        for queue in self.by_queue.values():
            queue.leases.deliveries_max = self._context.deliveries_max()

    def unpark(self) -> None:
        """Make all parked messages available: a member joined that may take them."""
        for queue in self.by_queue.values():
            if queue.leases.returns.parked:
                queue.leases.returns.unpark()
                self.activate(queue)

    @property
    def deadline(self) -> float:
        """The time of the next timer for `take_due`."""
        return self._timers[0][0] if self._timers else math.inf

    def take_due(self, now: float) -> Iterator[GroupQueue]:
        """Yield each queue that has a timer up to *now*; the caller activates it, which sets its next timer."""
        while self._timers and self._timers[0][0] <= now:
            check_at, queue_id = heapq.heappop(self._timers)
            queue = self.by_queue.get(queue_id)
            if queue is not None and check_at == queue.timer_at:
                queue.timer_at = math.inf
                yield queue

    def end(self) -> list[GroupQueue]:
        """Forget all queues; return them, which must be closed."""
        queues = list(self.by_queue.values())
        for queue in queues:
            queue.is_closed = True
        for table in self.by_queue, self._unopened, self.active, self.with_dead, self._timers:
            table.clear()
        self._context.owner.settled(sum([queue.counted for queue in queues]))
        return queues


def first_leases(
    context: GroupContext, queue: Queue, key: Key, start: Start | None, first: int, reached: int
) -> Leases:
    """Return the leases of a group on *queue*; note that it begins if nothing is stored.

    Args:
      start: where to begin in a queue that the group has never consumed; None for the beginning of the queue.
      first: the offset of the first message that was found by its name; -1 if the group reads the queue.
      reached: the log position to note with the beginning, or -1.
    """
    owner = context.owner
    stored, offset = owner.notes.stored(key), first
    if context.policy is None:
        groups = owner.groups
        if groups.offsets.take_reset(context.group, key.topic, queue.queue_id) >= 0:
            stored = None
        offset = groups.offsets.get(context.group, key.topic, queue.queue_id)
    if stored is not None and stored.next > queue.next_offset:
        stored = None  # the state is of a deleted topic
    if stored is not None:
        offset = stored.low if first >= 0 else max(offset, stored.low)
    elif offset < 0:
        offset = start(queue) if start is not None else context.topic.beginning_of(queue)
    # A power cut can lose messages whose offsets were committed; later messages get these offsets again.
    offset = min(offset, queue.next_offset)
    leases = Leases(
        offset,
        window=owner.config.lease_window,
        deliveries_max=context.deliveries_max(),
        lapses_count=context.leaving_counts,
    )
    if stored is not None:
        restore(context, leases, stored, offset)
    else:
        owner.notes.begin(key, offset, reached, context.marks_of(queue.queue_id))
    context.commit_offset(queue.queue_id, leases.table.low)
    return leases


def restore(context: GroupContext, leases: Leases, stored: GroupQueueState, offset: int) -> None:
    """Restore the stored leases from *offset* on."""
    now, now_ms = context.times()
    for state, offsets in _group_alike(stored.leases, offset):
        # A clock that was set back must not extend a lease.
        remaining_ms = min(max(state.generation + state.duration_ms - now_ms, 0), state.duration_ms)
        leases.restore(
            RESTORED, offsets, now + remaining_ms / 1000, state.deliveries, state.generation, state.duration_ms / 1000
        )
    leases.skip_to(stored.next)
    context.owner.unsettled += leases.table.size
    leases.lapse(now, most=LAPSED_AT_START)
    context.owner.alarm(context, -math.inf)


def _group_alike(leases: Mapping[int, LeaseState], first: int) -> Iterator[tuple[LeaseState, list[int]]]:
    """Yield leases from offset *first* on in ascending order; consecutive, equal leases are together."""
    offsets: list[int] = []
    state: LeaseState | None = None
    for offset in sorted(leases):
        if offset < first:
            continue
        lease = leases[offset]
        if lease is not state:
            if state is not None:
                yield state, offsets
            state, offsets = lease, []
        offsets.append(offset)
    if state is not None:
        yield state, offsets
