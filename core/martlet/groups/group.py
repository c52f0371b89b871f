"""One shared group on one topic: members join and leave, its queues follow the topic, and time passes.

`distribution.py` hands out messages, `settlement.py` settles them for their holders, `group_source.py` reads them, and
`group_queues.py` has the queues. Their objects are attributes, so that the calls made for each message go to them
directly.
"""

import math
from collections.abc import Hashable
from typing import Final, final

from martlet.errors import Reason, Refused
from martlet.groups.handing_out.dead_letters import DeadLetters
from martlet.groups.handing_out.distribution import Distribution
from martlet.groups.handing_out.settlement import Settlement
from martlet.groups.membership import Membership
from martlet.groups.queues.group_context import GroupContext
from martlet.groups.queues.group_members import GroupMember, GroupMembers
from martlet.groups.queues.group_queue import GroupQueue
from martlet.groups.queues.group_queues import GroupQueues
from martlet.groups.queues.group_source import GroupSource, finds_from
from martlet.runtime.steps import per_slice
from martlet.state.journal import Journal
from martlet.tables.topics import Topic

__all__ = ["LAPSED_A_TURN", "STORED_S", "SharedGroup"]

STORED_S: Final = 1.0  # pause before another look at a group whose state, or whose end, could not be stored yet
# Leases ended in one turn of the event loop.
LAPSED_A_TURN: Final = per_slice(us=0.5)
# Cost of a dead letter, in ends of leases.
DEAD_LETTER_TURNS: Final = 64


@final
class SharedGroup:
    """One group on one topic.

    When the topic is deleted, or the group may no longer read it, ``gone`` is set and all members are woken; their
    handlers then tell the peers and leave. ``ack``, ``nack``, ``renew`` and ``acknowledgement`` take a message's
    handle (queue, offset and `Delivery.generation`), whoever holds the message.
    """

    __slots__ = (
        "_check_at",
        "_dead_letters",
        "_forget_at",
        "_members",
        "_owner",
        "context",
        "distribution",
        "queues",
        "settlement",
        "source",
    )

    def __init__(self, context: GroupContext, dead_letters: DeadLetters, first: Membership) -> None:
        """Begin as the membership *first* specifies, unless the group is stored."""
        self.context = context
        owner = self._owner = context.owner
        self._dead_letters = dead_letters
        self._forget_at = owner.now() + owner.config.share_memory_s
        self._check_at = math.inf  # time of the next check whether the state is stored
        members = self._members = GroupMembers(context)
        begun_at = finds_from(context) if first.names is not None else -1
        queues = self.queues = GroupQueues(context, members, first.start, begun_at)
        self.source = GroupSource(context, members, queues, first.selection, first.names, begun_at)
        self.settlement = Settlement(context, members, queues)
        self.distribution = Distribution(context, members, queues, self.source, self.settlement)
        self.source.begin()

    def __len__(self) -> int:
        return len(self._members.by_turn)

    @property
    def gone(self) -> bool:
        """Whether the members of the group get no more messages; they leave."""
        return self._members.gone

    @gone.setter
    def gone(self, gone: bool) -> None:
        self._members.gone = gone

    # members

    def members(self) -> list[GroupMember]:
        """Return the members."""
        return list(self._members.by_turn)

    def join(self, member: GroupMember) -> None:
        """Add *member*. Raises `Refused` if the topic may not be read."""
        self.source.go_on()
        self._members.add(member)
        self.queues.unpark()
        member.wake()

    def leave(self, member: GroupMember, *, keep: bool) -> None:
        """Remove *member*; with *keep*, its holder keeps the messages that it holds."""
        members = self._members
        if member not in members.by_turn:
            return
        was_first_exclusive = next(iter(members.exclusive), None) is member
        is_last = members.remove(member)
        if was_first_exclusive:
            self.queues.unpark()  # others may take messages that it did not select
        for queue in self.queues.by_queue.values():
            if is_last and not keep:
                self.settlement.give_back_all(queue, member.holder)
            if not members.by_turn:
                queue.forget_read()
        if not members.by_turn:
            self.source.pause()
            self._owner.left(self.context)
        self._forget_at = self._owner.now() + self._owner.config.share_memory_s
        self._owner.alarm(self.context, -math.inf)
        members.wake()

    def wake(self) -> None:
        """Wake the next member that has credit and is not woken yet; all members if the group is gone."""
        self._members.wake()

    # administration

    def follow(self, topic: Topic) -> None:
        """Use all present queues of *topic*."""
        self.context.topic = topic
        self.queues.follow()

    def look_at_all(self) -> None:
        """Check all queues at the next delivery: an administrator may have reset some of them."""
        self.queues.look_at_all()
        self._members.wake()

    # the end

    def idle(self, now: float) -> bool:
        """Return whether to drop this object: no members, and no unsettled messages or no member for a long time.

        A group that comes back continues as it is stored, so everything must be stored.
        """
        return self.is_unused and (now >= self._forget_at or not self.queues.has_unsettled)

    @property
    def is_unused(self) -> bool:
        """Whether the group can be dropped: it has no members, and its state is stored."""
        return not self._members.by_turn and self.queues.is_stored

    def close(self) -> None:
        """Close the group: members get no more messages; its stored state remains."""
        self.source.note_end()
        for queue in self.queues.by_queue.values():
            queue.account()
            self._owner.notes.close(queue.key)
        for queue in self.end():
            queue.close()

    def end(self) -> list[GroupQueue]:
        """End the group, with its state: members get no more messages. Return its queues, which must be closed."""
        self.source.end()
        queues = self.queues.end()
        self._dead_letters.forget(queues)
        return queues

    # state of a queue

    def next_offset(self, queue_id: int) -> int:
        """Return the first offset of the queue that was never delivered; -1 if there is no such queue."""
        queue = self.queues.get(queue_id)
        return queue.leases.table.next if queue is not None else -1

    def first_unsettled(self, queue_id: int) -> int:
        """Return the first offset of the queue that is not settled; -1 if there is no such queue."""
        queue = self.queues.get(queue_id)
        return queue.leases.table.low if queue is not None else -1

    def is_settled(self, queue_id: int, offset: int) -> bool:
        """Return whether a message is settled."""
        queue = self.queues.get(queue_id)
        return queue is not None and queue.leases.table.is_settled(offset)

    # messages settled by their handles

    def ack(self, queue_id: int, offset: int, generation: int) -> bool:
        """Settle a message by its handle; False if the handle is no longer valid."""
        return bool(self.settlement.ack_all(queue_id, (offset,), generation))

    def nack(self, queue_id: int, offset: int, generation: int, delay_s: float = 0) -> bool:
        """Return a failed message by its handle, as `Member.nack`; False if the handle is no longer valid."""
        holder = self.settlement.holder(queue_id, offset, generation)
        return holder is not None and bool(self.settlement.nack_held(holder, queue_id, (offset,), delay_s))

    def renew(self, queue_id: int, offset: int, generation: int, lease_s: float) -> int:
        """Make a lease end *lease_s* from now, earlier or later than before; return its new generation.

        The old handle is then no longer valid. Returns 0 if *generation* was not valid.
        """
        holder = self.settlement.holder(queue_id, offset, generation)
        return self.settlement.renew_held(holder, queue_id, offset, lease_s) if holder is not None else 0

    def acknowledgement(self, queue_id: int, offset: int, generation: int) -> tuple[Journal, bytes]:
        """Return the acknowledgement of a message for `Broker.publish_all`, which must be called next.

        The message is settled once the atomic group is readable. If the group is refused, call `withdraw`; if its
        commit fails, the message is returned within a minute.

        Raises:
          Refused: the handle is not valid (Reason.NOT_FOUND), or the store accepts no writes now.
        """
        holder = self.settlement.holder(queue_id, offset, generation)
        if holder is None:
            self._owner.store.admission.check()
            text = f"message {offset} of queue {queue_id} has no lease {generation} in group {self.context.group!r}"
            raise Refused(Reason.NOT_FOUND, f"{text}; it may have ended")
        return self.settlement.acknowledgements_held(holder, queue_id, (offset,))[0]

    def withdraw(self, queue_id: int, offset: int) -> None:
        """Undo `acknowledgement`: the atomic group was refused."""
        self.settlement.withdraw(queue_id, offset)

    # time

    def deadline(self) -> float:
        """Return when `tick` is due next."""
        members = self._members
        forget_at = math.inf if members.by_turn or self._check_at < math.inf else self._forget_at
        return min(forget_at, self._check_at, members.stalled_at, self.queues.deadline)

    def tick(self, now: float, work_left: int = LAPSED_A_TURN) -> int:
        """Return messages whose leases ended, and store dead letters; return how much of *work_left* is not used.

        If the result is 0, it must be called again.
        """
        members, queues = self._members, self.queues
        available = 0
        former_holders: list[Hashable] = []
        self._check_at = math.inf
        if not (members.by_turn or queues.is_stored):
            self._check_at = now + STORED_S
            self._owner.notes.try_again()
        work_left -= queues.restore_some()
        for queue in queues.take_due(now):
            looked_at_before = queue.leases.looked_at
            available += queue.leases.lapse(now, former_holders, work_left)
            work_left -= queue.leases.looked_at - looked_at_before
            queues.activate(queue)
            if work_left <= 0:
                break
        work_left = self._store_dead_letters(work_left)
        members.have_lost(former_holders)
        if members.has_stalled(now):
            available += self.distribution.has_more()
        if available:
            members.wake()
        return work_left

    def _store_dead_letters(self, work_left: int) -> int:
        """Store dead letters of all queues; return how much of *work_left* is not used."""
        with_dead = self.queues.with_dead
        for queue in list(with_dead):
            if work_left <= 0:
                self._owner.alarm(self.context, -math.inf)
                break
            work_left -= self._dead_letters.store(queue, max(work_left // DEAD_LETTER_TURNS, 1)) * DEAD_LETTER_TURNS
            if not queue.leases.has_dead:
                with_dead.pop(queue, None)
        return work_left
