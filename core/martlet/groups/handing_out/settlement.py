"""Settles held messages of a shared group, returns them, and renews their leases.

A change applies immediately and is noted with the next commit. An acknowledgement that is stored in an atomic group,
together with messages, settles its message once that group is readable.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from typing import Final, final

from martlet.delivery.subscriptions import Delivery
from martlet.errors import Reason, Refused
from martlet.groups.journal.journal_codec import ACK, BACK, KEEP, RENEW, Change, in_ms
from martlet.groups.leases.table import DEAD_DELIVERIES
from martlet.groups.queues.group_context import GroupContext
from martlet.groups.queues.group_members import GroupMembers
from martlet.groups.queues.group_queue import GroupQueue
from martlet.groups.queues.group_queues import GroupQueues
from martlet.groups.strategy.redelivery import pause_ms
from martlet.state.journal import Journal

__all__ = ["Settlement"]

SETTLING_S: Final = 60.0  # limit of the wait for the outcome of an acknowledgement in an atomic group


@final
class Settlement:
    """Settles the messages of one group for their holders; `ack_all` and `holder` take handles from anybody."""

    __slots__ = ("_by_queue", "_context", "_members", "_owner", "_queues")

    def __init__(self, context: GroupContext, members: GroupMembers, queues: GroupQueues) -> None:
        self._context = context
        self._owner = context.owner
        self._members = members
        self._queues = queues
        self._by_queue = queues.by_queue

    def holds(self, holder: Hashable, queue_id: int, offset: int) -> bool:
        """Return whether *holder* holds a message, and may settle it."""
        queue = self._by_queue.get(queue_id)
        return queue is not None and queue.leases.table.holds(holder, offset)

    def is_held(self, holder: Hashable, delivery: Delivery) -> bool:
        """Return whether *holder* still holds the message of *delivery*."""
        return self.holder(delivery.queue_id, delivery.first, delivery.generation) == holder

    def holder(self, queue_id: int, offset: int, generation: int) -> Hashable | None:
        """Return the holder of the message with this handle; None if the handle is no longer valid."""
        queue = self._queues.get(queue_id)
        return queue.leases.table.holder(offset, generation) if queue is not None else None

    # settled

    def ack_held(self, holder: Hashable, queue_id: int, offset: int) -> bool:
        """Settle a message that *holder* holds; False if it does not hold it."""
        queue = self._by_queue.get(queue_id)
        return queue is not None and self.settle(queue, holder, offset)

    def ack_held_all(self, holder: Hashable, queue_id: int, offsets: Sequence[int]) -> Sequence[int]:
        """Settle the messages of one queue that *holder* holds among *offsets*; return their offsets."""
        queue = self._by_queue.get(queue_id)
        settled = queue.leases.ack_held(holder, offsets) if queue is not None else ()
        if queue is not None and settled:
            self._note_settled(queue, settled, {holder: len(settled)})
        return settled

    def ack_all(self, queue_id: int, offsets: Sequence[int], generation: int) -> list[int]:
        """Settle messages of one queue by their handles; return the offsets whose handles are valid."""
        queue, holders = self._queues.get(queue_id), list[Hashable]()
        if queue is None:
            return []
        settled = queue.leases.ack_all(offsets, generation, holders)
        if settled:
            self._note_settled(queue, settled, Counter(holders))
        return settled

    def settle(self, queue: GroupQueue, holder: Hashable, offset: int) -> bool:
        """Settle a message that *holder* holds; False if it does not hold it."""
        if not queue.leases.ack(holder, offset):
            return False
        self._owner.notes.ack(queue.key, (offset,))
        self._members.give_credit(holder)
        if queue.in_order:
            self._note_settled_in_order(queue, (offset,))
        return True

    def _note_settled(self, queue: GroupQueue, offsets: Sequence[int], holders: Mapping[Hashable, int]) -> None:
        """Note that messages were settled; *holders* has an entry for each. `account` follows with the commit."""
        self._owner.notes.ack(queue.key, offsets)
        for holder, count in holders.items():
            self._members.give_credit(holder, count)
        if queue.in_order:
            self._note_settled_in_order(queue, offsets)

    def _note_settled_in_order(self, queue: GroupQueue, offsets: Sequence[int]) -> None:
        queue.note_early(offsets)
        if not queue.is_blocked:
            self._members.wake()

    # returned

    def return_attempt(self, queue: GroupQueue, holder: Hashable) -> None:
        """Make everything that *holder* holds available again; the attempt that took it takes it again."""
        self.give_back(queue, holder, queue.leases.table.held(holder), 0, counts=False)

    def return_early(self, queue: GroupQueue) -> None:
        """Make messages available that were settled before an earlier, returned one: in order, they follow it."""
        first_unsettled, early = queue.leases.table.low, queue.early
        offsets = sorted(offset for offset in early if offset > first_unsettled)
        early.clear()
        if offsets:
            queue.leases.reopen(offsets)
            self._owner.notes.note(queue.key, Change(KEEP, 0, 0, 1, offsets))

    def nack_held(self, holder: Hashable, queue_id: int, offsets: Sequence[int], delay_s: float) -> list[int]:
        """Return failed messages that *holder* holds to the group; return their offsets."""
        queue, returned = self._by_queue.get(queue_id), list[int]()
        if queue is None:
            return returned
        for deliveries, run in groupby(offsets, queue.leases.table.deliveries):
            returned += self.give_back(queue, holder, list(run), deliveries, delay_s)
        if returned:
            self._members.give_credit(holder, len(returned))
            self._members.wake()
        return returned

    def pass_on(self, holder: Hashable, queue_id: int, offset: int) -> None:
        """Return a message that was not sent to *holder*, because it may not read it any more."""
        queue = self._by_queue.get(queue_id)
        if queue is not None:
            self.give_back(queue, holder, (offset,), queue.leases.table.deliveries(offset) - 1)
            self._members.wake()

    def give_back_all(self, queue: GroupQueue, holder: Hashable) -> None:
        """Return all messages of *holder*, which left. This is no failure of the messages; their earlier deliveries
        count.

        With a policy for which leaving never counts, the messages can be delivered again at once, in order.
        """
        counts = self._context.leaving_counts
        for deliveries, offsets in queue.leases.table.held_by_deliveries(holder).items():
            self.give_back(queue, holder, offsets, deliveries - 1 if counts else 0, counts=counts)

    def give_back(
        self,
        queue: GroupQueue,
        holder: Hashable,
        offsets: Sequence[int],
        failures: int,
        delay_s: float = 0,
        *,
        counts: bool = True,
    ) -> list[int]:
        """Return messages for redelivery after *delay_s*, or after a longer pause that grows with *failures*.

        Returns the offsets that *holder* held. Unless this *counts*, none of the messages becomes dead.
        """
        wait_s = max(delay_s, pause_ms(failures) / 1000)
        now, now_ms = self._context.times()
        available_at = now + wait_s if wait_s > 0 else -math.inf
        returned = queue.leases.give_back_all(holder, offsets, available_at, counts=counts)
        if returned:
            self._queues.activate(queue)
            self._owner.notes.note(queue.key, Change(BACK, now_ms, round(wait_s * 1000), offsets=returned))
            self._note_dead(queue, returned)
            self._owner.alarm(self._context, -math.inf if queue.leases.has_dead else available_at)
        return returned

    def give_up_held(self, holder: Hashable, queue_id: int, offsets: Sequence[int]) -> list[int]:
        """Make messages dead that *holder* holds, whatever their number of deliveries; return their offsets.

        In the topic of the group's dead letters, they are delivered again, as with `nack_held`.
        """
        if self._context.keeps_failed:
            return self.nack_held(holder, queue_id, offsets, 0)
        queue = self._by_queue.get(queue_id)
        dead = queue.leases.give_up(holder, offsets) if queue is not None else []
        if queue is not None and dead:
            self._note_dead(queue, dead)
            self._queues.activate(queue)
            self._owner.alarm(self._context, -math.inf)
            self._members.give_credit(holder, len(dead))
        return dead

    def _note_dead(self, queue: GroupQueue, offsets: Sequence[int]) -> None:
        """Note the dead messages among *offsets*, so that a crash does not make them available again."""
        leases = queue.leases
        dead_offsets = sorted(filter(leases.is_dead, offsets)) if leases.has_dead else []
        if dead_offsets:
            now_ms = self._context.times()[1]
            self._owner.notes.note(queue.key, Change(KEEP, now_ms, 0, DEAD_DELIVERIES, dead_offsets))

    def renew_held(self, holder: Hashable, queue_id: int, offset: int, lease_s: float) -> int:
        """Make a lease of *holder* end *lease_s* from now; return its new generation, 0 if there is no such lease."""
        queue = self._by_queue.get(queue_id)
        now, now_ms = self._context.times()
        if queue is None or not queue.leases.renew(holder, offset, now + lease_s, now_ms, lease_s):
            return 0
        self._queues.activate(queue)
        generation = queue.leases.table.generation(offset)
        self._owner.notes.note(queue.key, Change(RENEW, generation, in_ms(lease_s), offsets=(offset,)))
        self._owner.alarm(self._context, now + lease_s)
        return generation

    # settled together with messages

    def acknowledgements_held(
        self, holder: Hashable, queue_id: int, offsets: Sequence[int]
    ) -> list[tuple[Journal, bytes]]:
        """Return acknowledgements of messages of *holder*, as `SharedGroup.acknowledgement`. Raises `Refused`."""
        queue, settling = self._queues.get(queue_id), list[int]()
        self._owner.store.admission.check()
        until = self._owner.now() + SETTLING_S
        for offset in offsets:
            if queue is None or not queue.leases.begin_settling(holder, offset, until):
                for each in settling:
                    self.withdraw(queue_id, each)
                group = self._context.group
                text = f"message {offset} of queue {queue_id} is not held by this member of group {group!r}"
                raise Refused(Reason.NOT_FOUND, f"{text}; it was settled, or its lease has ended")
            settling.append(offset)
        if queue is None or not settling:
            return []
        self._queues.activate(queue)
        self._owner.alarm(self._context, until)
        return self._owner.notes.settle(queue.key, settling, queue.began)

    def withdraw(self, queue_id: int, offset: int) -> None:
        """Undo `acknowledgements_held`: the atomic group was refused."""
        queue = self._by_queue.get(queue_id)
        if queue is not None:
            queue.leases.end_settling(offset, done=False)

    def settled_atomically(self, queue_id: int, offsets: Sequence[int]) -> None:
        """Settle *offsets*: the atomic group that acknowledges them is readable."""
        queue = self._by_queue.get(queue_id)
        if queue is None:
            return
        if self._owner.notes.must_note_settled(queue.key):
            self._owner.notes.note(queue.key, Change(ACK, offsets=offsets))
        for offset in offsets:
            holder = queue.leases.end_settling(offset, done=True)
            if holder is not None:
                self._members.give_credit(holder)
        queue.account()
