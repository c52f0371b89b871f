"""One queue of one shared group: its leases, the messages found and read, and the notes and counts of its state."""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Final, final

from martlet.errors import Refused
from martlet.groups.journal.journal_codec import Key, LeaseState, in_ms
from martlet.groups.leases.queue_leases import Leases
from martlet.groups.queues.group_context import GroupContext
from martlet.groups.queues.group_members import GroupMembers
from martlet.store import Queue, QueueReader

__all__ = ["RETURNED_AHEAD", "GroupQueue"]

# Returned messages far behind the tail that are read ahead.
RETURNED_AHEAD: Final = 8
# Messages that were found are read together if at most this many others are between two of them.
NEAR: Final = 4


@final
class GroupQueue:
    """One queue of one group.

    It begins with nothing to read if the group's messages are found *by_name*, otherwise with the queue to read. Its 21
    attributes are in one object, because each group has one for each queue.
    """

    __slots__ = (
        "_by_name",
        "attempt",
        "began",
        "context",
        "counted",
        "due",
        "early",
        "failure",
        "found",
        "in_order",
        "is_closed",
        "key",
        "leases",
        "low",
        "members",
        "noted_next",
        "reached",
        "reader",
        "store_queue",
        "timer_at",
        "unflushed",
    )

    def __init__(
        self,
        context: GroupContext,
        members: GroupMembers,
        store_queue: Queue,
        key: Key,
        leases: Leases,
        *,
        by_name: bool,
    ) -> None:
        self.context = context
        self.members = members
        self.store_queue = store_queue
        self.key = key
        self._by_name = by_name
        # Messages that the group's finder has found and that were never delivered: offset and log position, ascending.
        self.found: deque[tuple[int, int]] = deque()
        self.reached = -1
        self.timer_at = math.inf  # the earliest timer of the queue that the group has
        # Offset -> end of its dead letter in the log, which is not flushed yet; ends ascend.
        self.unflushed: dict[int, int] = {}
        self.use(leases)
        self.in_order = False  # whether a member takes its messages in order
        self.is_closed = False
        self.reader = QueueReader(context.owner.store.readers, self._wake_member, RETURNED_AHEAD + 1)

    def use(self, leases: Leases) -> None:
        """Begin with *leases*."""
        self.leases = leases
        self.failure: Refused | None = None  # an error for the next member that collects
        self.noted_next = leases.table.next
        self.began = leases.table.low
        # The broker's counts of this queue, and the offset committed last.
        self.counted = leases.table.size
        self.low = leases.table.low
        self.due = not self._by_name
        # Messages taken in order that were settled before an earlier one, and the attempt that took the last ones.
        self.early: dict[int, None] = {}
        self.attempt = ""

    def _wake_member(self, key: Hashable) -> None:
        self.members.wake()

    def forget_read(self) -> None:
        """Drop messages read by a thread: no member is left, or the selection has changed."""
        self.failure = None
        self.reader.forget_all()

    def find(self, offset: int, position: int) -> bool:
        """Note that the group wants the message at *offset*; return False if that was noted before."""
        last = self.found[-1][0] if self.found else self.leases.table.next - 1
        if offset <= last:
            return False
        self.found.append((offset, position))
        self.due = True
        return True

    def next_found(self, count_max: int) -> list[int]:
        """Return the offsets of the next messages that were found, up to *count_max* that are close to each other."""
        offsets: list[int] = []
        for offset, _ in islice(self.found, count_max):
            if offsets and offset > offsets[-1] + NEAR:
                break
            offsets.append(offset)
        return offsets

    def forget_found(self, offset: int) -> int:
        """Drop messages found before *offset*; return their number."""
        count = 0
        while self.found and self.found[0][0] < offset:
            self.found.popleft()
            count += 1
        return count

    def close(self) -> None:
        """Drop the messages read, after its group has ended."""
        self.reader.close()

    def take_failure(self) -> None:
        """Raise the error of an earlier read, if there is one."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    @property
    def is_active(self) -> bool:
        """Whether there may be something to deliver: returned messages, new messages, or an error."""
        return self.due or self.leases.waiting > 0 or self.failure is not None

    @property
    def is_settling(self) -> bool:
        return self.leases.table.is_settling

    @property
    def is_blocked(self) -> bool:
        """Whether nothing may be delivered in order now: an earlier message is held, pauses or is dead."""
        return self.leases.table.unsettled > self.leases.waiting

    def note_early(self, offsets: Sequence[int]) -> None:
        """Remember the messages among *offsets* that were settled before an earlier message."""
        first_unsettled, early = self.leases.table.low, self.early
        early.update(dict.fromkeys([offset for offset in offsets if offset > first_unsettled]))
        for offset in [offset for offset in early if offset < first_unsettled]:
            del early[offset]

    def account(self) -> None:
        """Count the messages leased and settled since the last call, and commit the group's offset."""
        leases, context = self.leases, self.context
        size, counted_before = leases.table.size, self.counted
        if size != counted_before:
            self.counted = size
            context.owner.settled(counted_before - size)
            if size < leases.table.window <= counted_before:
                self.members.wake()
        if leases.table.low != self.low:
            self.low = leases.table.low
            context.commit_offset(self.store_queue.queue_id, self.low)

    def state(self) -> tuple[int, list[tuple[int, LeaseState]], int, int]:
        """Return the next offset and every unsettled message, in the form of notes.

        With them, the position that the group has reached, and its marks.
        """
        now, now_ms = self.context.times()
        leases: list[tuple[int, LeaseState]] = []
        for offset, until, deliveries, generation, length_s in self.leases.table.unsettled_leases():
            # The same length as in the lease's own note: the clock may have been set since then.
            duration_ms = in_ms(length_s)
            if length_s < 0:  # returned: nobody has its handle, and it waits for its next delivery
                generation = max(generation, now_ms)
                duration_ms = max(round((until - now) * 1000), 0) if abs(until) < math.inf else 0
            leases.append((offset, LeaseState(generation, duration_ms, deliveries)))
        self.noted_next = self.leases.table.next
        return self.leases.table.next, leases, self.reached, self.context.marks_of(self.store_queue.queue_id)
