"""The source of a shared group's messages: its selection of the topic, or the names that its finder looks for.

A group listens at the tail of its topic for messages that its selection may match, and reads its queues. A group that
takes only some names does not: its finder returns the places of messages, and only these are read.
"""

from collections.abc import Sequence
from typing import Final, final

from martlet.delivery.costly import cut_after_costly
from martlet.delivery.routing.selection import Selection
from martlet.delivery.tail_reader import TailReader
from martlet.groups.journal.journal_codec import REACH, Change
from martlet.groups.queues.finder import FOUND_MAX, Finder, MessageSelection, choose, cut_at
from martlet.groups.queues.group_context import GroupContext
from martlet.groups.queues.group_members import GroupMember, GroupMembers
from martlet.groups.queues.group_queue import RETURNED_AHEAD, GroupQueue
from martlet.groups.queues.group_queues import GroupQueues
from martlet.store import Queue, ReadResult

__all__ = ["GroupSource", "finds_from"]

RUNS_AHEAD: Final = 4
# Key of a queue's reader for messages never delivered; for a returned message the key is the offset.
UNREAD: Final = "unread"
# Bytes of the log that a group may search again after the broker was killed, and after its last member left.
REACH_BYTES: Final = 64 << 20
REACH_BYTES_AT_END: Final = 1 << 20


def finds_from(context: GroupContext) -> int:
    """Return the log position from which a group finds messages by their names: its stored position.

    A new group begins with messages published from now on.
    """
    stored, end = context.owner.notes.stored(context.key(0)), context.owner.store.appended
    # After a power cut the log may end earlier.
    return end if stored is None else min(max(stored.reached, 0), end)


@final
class GroupSource:
    """Wakes a group for new messages and reads them, after `begin`.

    With *names*, it finds messages from log position *begun_at* on.
    """

    __slots__ = ("_begun_at", "_context", "_members", "_queues", "_tail", "finder", "names", "parked", "selection")

    def __init__(
        self,
        context: GroupContext,
        members: GroupMembers,
        queues: GroupQueues,
        selection: Selection,
        names: MessageSelection | None,
        begun_at: int,
    ) -> None:
        self._context = context
        self._members = members
        self._queues = queues
        self._begun_at = begun_at
        self._tail: TailReader | None = None
        self.selection = selection
        self.names = names
        self.parked = 0  # messages in `GroupQueue.found`
        self.finder: Finder | None = None
        if names is not None:
            self.finder = Finder(names, context.topic.name, begun_at, members.wake)

    def begin(self) -> None:
        """Open the queues, and be woken for new messages that the selection may match."""
        context, queues = self._context, self._queues
        if self.finder is not None:
            if context.owner.notes.stored(context.key(0)) is None:
                queues.open(0, new=True)
            queues.follow()
            queues.by_queue[0].reached = self._begun_at
            return
        # A queue added while the group was inactive is read from its beginning, as it is for an active group.
        is_stored = any(context.owner.notes.stored(context.key(each)) for each in range(context.topic.read_queues))
        committed = context.owner.groups.offsets.committed
        has_committed = context.policy is None and committed(context.group, context.topic.name)
        queues.follow(new=not (is_stored or has_committed))
        self._listen()

    def _listen(self) -> None:
        self._tail = self._context.owner.tails.of(self._context.topic)
        self._tail.listen(self)

    def end(self) -> None:
        """Stop waking the group."""
        if self._tail is not None:
            self._tail.leave(self)
        self.pause()

    def select(self, selection: Selection, names: MessageSelection | None = None) -> None:
        """Use *selection* from now on, and *names* with the same topic filter."""
        if self._tail is not None:
            self._tail.leave(self)
        self.selection, self.names = selection, names
        if self.finder is None:
            self._listen()
        for queue in self._queues.by_queue.values():
            queue.forget_read()
            if self.finder is None:
                queue.due = True  # the old selection may have ignored records that the new one selects
            self._queues.activate(queue)

    def arrived_at(self, store_queue: Queue) -> None:
        """Read *store_queue* again: records that may match became readable."""
        queue = self._queues.by_queue.get(store_queue.queue_id)
        if queue is not None and queue.store_queue is store_queue:
            queue.due = True
            self._queues.activate(queue)
            self._members.wake()

    # messages that are found by their names

    def go_on(self) -> None:
        """Find messages by their names, if the group does so. Raises `Refused` if the topic may not be read."""
        if self.finder is not None:
            self.finder.go_on()

    def pause(self) -> None:
        """Stop finding messages until `go_on`."""
        if self.finder is not None:
            self.finder.pause()

    def find(self, finder: Finder, count: int) -> None:
        """Move up to *count* messages that *finder* has found to their queues."""
        count = min(count, FOUND_MAX - self.parked)
        if count <= 0 or not finder.has_found:
            return
        queues = self._queues
        for queue_id, offset, position in finder.take(count):
            queue = queues.get(queue_id) or queues.open(queue_id, first=offset)
            if queue.find(offset, position):
                self.parked += 1
                queues.activate(queue)

    @property
    def reached(self) -> int:
        """The log position before which all was found by names and delivered; -1 if the group reads queues."""
        return self._reached(self.finder) if self.finder is not None else -1

    def _reached(self, finder: Finder) -> int:
        """Return the log position before which everything was found and delivered."""
        return min([finder.position, *[queue.found[0][1] for queue in self._queues.by_queue.values() if queue.found]])

    def reach(self) -> None:
        """Note the position of the group if it has moved far."""
        finder = self.finder
        if finder is not None and finder.position - self._queues.by_queue[0].reached > REACH_BYTES:
            self._context.owner.notes.reach(self._context.key(0), self._reached(finder))

    def note_end(self) -> None:
        """Note the position of the group, so that the next member need not search earlier messages.

        Until there is another member, the note tells whether messages wait (`UnusedGroups`, `Draining`).
        """
        context, queues = self._context, self._queues.by_queue
        notes = context.owner.notes
        if self.finder is None:
            return
        reached, queue = self._reached(self.finder), queues[0]
        store_queues = context.owner.store.queues.topics.get(context.topic.name, {}).values()
        has_advanced = any(queue.reached < each.last_end <= reached for each in store_queues)
        if not has_advanced and reached - queue.reached <= REACH_BYTES_AT_END:
            return
        if all(notes.is_durable(each.key) for each in queues.values()):
            queue.reached = reached
            notes.note(queue.key, Change(REACH, number=reached))
        else:
            notes.reach(queue.key, reached)

    # reading

    def read_new(self, queue: GroupQueue, member: GroupMember, count: int, budget_bytes: int) -> ReadResult | None:
        """Read *count* messages that were never checked; None if a thread must do that, or there are none."""
        selection, start = self.selection, queue.leases.table.next
        result = queue.reader.read(
            member.peer.start,
            UNREAD,
            queue.store_queue,
            start,
            count,
            budget_bytes,
            selection.codes,
            selection.predicate,
        )
        if result is not None:
            cut_after_costly(result)
            queue.due = start < result.next_offset < queue.store_queue.next_offset
        return result

    def read_found(self, queue: GroupQueue, member: GroupMember, count: int, budget_bytes: int) -> ReadResult | None:
        """Read up to *count* messages that were found; None if a thread must do that, or they are gone."""
        assert self.names is not None
        offsets = queue.next_found(count)
        first, end = offsets[0], offsets[-1] + 1
        result = queue.reader.read(member.peer.start, UNREAD, queue.store_queue, first, end - first, budget_bytes)
        if result is not None:
            cut_after_costly(result)
            self.parked -= queue.forget_found(max(result.next_offset, first + 1))
            queue.due = bool(queue.found)
            choose(result, offsets, self.names.condition)
        return result

    def read_again(
        self, queue: GroupQueue, member: GroupMember, first: int, count: int, budget_bytes: int
    ) -> ReadResult | None:
        """Read *count* returned messages from *first* on; None if a thread must do that, which then wakes a member."""
        result = self._read_one(queue, member, first, count, budget_bytes)
        if result is None:
            self._read_ahead(queue, member, first, count, budget_bytes)
        else:
            cut_at(result, first + count)
        return result

    def _read_ahead(self, queue: GroupQueue, member: GroupMember, first: int, count: int, budget_bytes: int) -> None:
        """Have a thread also read the messages after a run of returned ones: more runs as long, or single messages."""
        leases, end = queue.leases, first + count
        offsets: Sequence[int] = range(end, end + count * RUNS_AHEAD, count)
        if not leases.returns.has(end):
            count = 1
            offsets = [offset for offset in leases.returns.first(min(member.credit, RETURNED_AHEAD)) if offset >= end]
        offsets = [offset for offset in offsets if leases.returns.has(offset)]
        queue.reader.keep_only((UNREAD, first, *offsets))
        for offset in offsets:
            self._read_one(queue, member, offset, count, budget_bytes)

    def _read_one(
        self, queue: GroupQueue, member: GroupMember, offset: int, count: int, budget_bytes: int
    ) -> ReadResult | None:
        start, selection = member.peer.start, self.selection
        result = queue.reader.read(
            start, offset, queue.store_queue, offset, count, budget_bytes, selection.codes, selection.predicate
        )
        if result is not None:
            cut_after_costly(result)
        return result
