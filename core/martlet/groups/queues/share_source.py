"""Where the messages of a shared group come from: its selection of the topic, or the names that its finder looks for.

A group listens at the tail of its topic for what its selection may match, and reads its queues. One that takes only
some names does not: its finder brings the places of messages, and only those are read.
"""

from collections.abc import Sequence
from typing import Final, final

from martlet.delivery.costly import cut_after_costly
from martlet.delivery.routing.selection import Selection
from martlet.delivery.tail_reader import TailReader
from martlet.groups.journal.journal_codec import REACH, Change
from martlet.groups.queues.competitors import Competitor, Competitors
from martlet.groups.queues.finder import FOUND_MAX, Finder, Names, choose, cut_at
from martlet.groups.queues.share_context import ShareContext
from martlet.groups.queues.share_lane import RETURNED_AHEAD, ShareLane
from martlet.groups.queues.share_lanes import ShareLanes
from martlet.store import Queue, ReadResult

__all__ = ["ShareSource", "finds_from"]

RUNS_AHEAD: Final = 4
# The place of a lane's reader for messages never delivered; for a returned message it is the offset.
UNREAD: Final = "unread"
# How much of the log a group may look at again after the broker was killed, and after its last member left.
REACH_BYTES: Final = 64 << 20
REACH_BYTES_AT_END: Final = 1 << 20


def finds_from(context: ShareContext) -> int:
    """Return the log position from which a group finds messages by their names: where it is stored to be.

    A new group begins with messages published from now on.
    """
    known, end = context.owner.notes.stored(context.key(0)), context.owner.store.appended
    # After a power cut the log may end earlier.
    return end if known is None else min(max(known.reached, 0), end)


@final
class ShareSource:
    """Wakes a group for new messages and reads them; `begin` starts that.

    With *names*, it finds messages from log position *begun_at* on.
    """

    __slots__ = ("_begun_at", "_competitors", "_context", "_lanes", "_tail", "finder", "names", "parked", "selection")

    def __init__(
        self,
        context: ShareContext,
        competitors: Competitors,
        lanes: ShareLanes,
        selection: Selection,
        names: Names | None,
        begun_at: int,
    ) -> None:
        self._context = context
        self._competitors = competitors
        self._lanes = lanes
        self._begun_at = begun_at
        self._tail: TailReader | None = None
        self.selection = selection
        self.names = names
        self.parked = 0  # messages in `ShareLane.found`
        self.finder: Finder | None = None
        if names is not None:
            self.finder = Finder(names, context.topic.name, begun_at, competitors.wake)

    def begin(self) -> None:
        """Open the lanes, and be woken for new messages that the selection may match."""
        context, lanes = self._context, self._lanes
        if self.finder is not None:
            if context.owner.notes.stored(context.key(0)) is None:
                lanes.open(0, new=True)
            lanes.follow()
            lanes.by_queue[0].reached = self._begun_at
            return
        # A queue added while the group was inactive is read from its beginning, as it is for an active group.
        known = any(context.owner.notes.stored(context.key(each)) for each in range(context.topic.read_queues))
        committed = context.policy is None and context.owner.groups.committed(context.group, context.topic.name)
        lanes.follow(new=not (known or committed))
        self._listen()

    def _listen(self) -> None:
        self._tail = self._context.owner.tails.of(self._context.topic)
        self._tail.listen(self)

    def end(self) -> None:
        """Be woken no more."""
        if self._tail is not None:
            self._tail.leave(self)
        self.pause()

    def select(self, selection: Selection, names: Names | None = None) -> None:
        """Use *selection* from now on, and *names* with the same topic filter."""
        if self._tail is not None:
            self._tail.leave(self)
        self.selection, self.names = selection, names
        if self.finder is None:
            self._listen()
        for lane in self._lanes.by_queue.values():
            lane.forget_read()
            if self.finder is None:
                lane.due = True  # the old selection may not have been woken by what the new one wants
            self._lanes.activate(lane)

    def arrived_at(self, queue: Queue) -> None:
        """Read *queue* again: records that may match became readable."""
        lane = self._lanes.by_queue.get(queue.queue_id)
        if lane is not None and lane.queue is queue:
            lane.due = True
            self._lanes.activate(lane)
            self._competitors.wake()

    # messages that are found by their names

    def go_on(self) -> None:
        """Find messages by their names, if the group does so. Raises `Refused` if the topic may not be read."""
        if self.finder is not None:
            self.finder.go_on()

    def pause(self) -> None:
        """Find nothing more until `go_on`."""
        if self.finder is not None:
            self.finder.pause()

    def find(self, finder: Finder, count: int) -> None:
        """Take up to *count* messages that were found, to the lanes of their queues."""
        count = min(count, FOUND_MAX - self.parked)
        if count <= 0 or not finder.has_found:
            return
        lanes = self._lanes
        for queue_id, offset, position in finder.take(count):
            lane = lanes.get(queue_id) or lanes.open(queue_id, first=offset)
            if lane.find(offset, position):
                self.parked += 1
                lanes.activate(lane)

    @property
    def reached(self) -> int:
        """The log position before which everything was found by names and delivered; -1 if the group does not do so."""
        return self._reached(self.finder) if self.finder is not None else -1

    def _reached(self, finder: Finder) -> int:
        """Return the log position before which everything was found and delivered."""
        return min([finder.position, *[lane.found[0][1] for lane in self._lanes.by_queue.values() if lane.found]])

    def reach(self) -> None:
        """Note the position of the group if it has moved far."""
        finder = self.finder
        if finder is not None and finder.position - self._lanes.by_queue[0].reached > REACH_BYTES:
            self._context.owner.notes.reach(self._context.key(0), self._reached(finder))

    def note_end(self) -> None:
        """Note how far the group is, so that the next member need not look at what was published before.

        Until there is another member, the note tells whether messages wait (`UnusedGroups`, `Draining`).
        """
        context, lanes = self._context, self._lanes.by_queue
        notes = context.owner.notes
        if self.finder is None:
            return
        reached, lane = self._reached(self.finder), lanes[0]
        queues = context.owner.store.queues.topics.get(context.topic.name, {}).values()
        has_new = any(lane.reached < queue.last_end <= reached for queue in queues)
        if not has_new and reached - lane.reached <= REACH_BYTES_AT_END:
            return
        if all(notes.is_durable(each.key) for each in lanes.values()):
            lane.reached = reached
            notes.note(lane.key, Change(REACH, number=reached))
        else:
            notes.reach(lane.key, reached)

    # reading

    def read_new(self, lane: ShareLane, member: Competitor, count: int, budget_bytes: int) -> ReadResult | None:
        """Read *count* messages that were never looked at; None if a thread must do that, or there are none."""
        selection, start = self.selection, lane.leases.table.next
        result = lane.reader.read(
            member.peer.start, UNREAD, lane.queue, start, count, budget_bytes, selection.codes, selection.predicate
        )
        if result is not None:
            cut_after_costly(result)
            lane.due = start < result.next_offset < lane.queue.next_offset
        return result

    def read_found(self, lane: ShareLane, member: Competitor, count: int, budget_bytes: int) -> ReadResult | None:
        """Read up to *count* messages that were found; None if a thread must do that, or they are gone."""
        assert self.names is not None
        offsets = lane.next_found(count)
        first, end = offsets[0], offsets[-1] + 1
        result = lane.reader.read(member.peer.start, UNREAD, lane.queue, first, end - first, budget_bytes)
        if result is not None:
            cut_after_costly(result)
            self.parked -= lane.forget_found(max(result.next_offset, first + 1))
            lane.due = bool(lane.found)
            choose(result, offsets, self.names.condition)
        return result

    def read_again(
        self, lane: ShareLane, member: Competitor, first: int, count: int, budget_bytes: int
    ) -> ReadResult | None:
        """Read *count* returned messages from *first* on; None if a thread must do that, which then wakes a member."""
        result = self._read_one(lane, member, first, count, budget_bytes)
        if result is None:
            self._read_ahead(lane, member, first, count, budget_bytes)
        else:
            cut_at(result, first + count)
        return result

    def _read_ahead(self, lane: ShareLane, member: Competitor, first: int, count: int, budget_bytes: int) -> None:
        """Have a thread read what follows a run of returned messages, too: more runs as long, or single messages."""
        leases, end = lane.leases, first + count
        offsets: Sequence[int] = range(end, end + count * RUNS_AHEAD, count)
        if not leases.returns.has(end):
            count = 1
            offsets = [offset for offset in leases.returns.first(min(member.credit, RETURNED_AHEAD)) if offset >= end]
        offsets = [offset for offset in offsets if leases.returns.has(offset)]
        lane.reader.keep_only((UNREAD, first, *offsets))
        for offset in offsets:
            self._read_one(lane, member, offset, count, budget_bytes)

    def _read_one(
        self, lane: ShareLane, member: Competitor, offset: int, count: int, budget_bytes: int
    ) -> ReadResult | None:
        start, selection = member.peer.start, self.selection
        result = lane.reader.read(
            start, offset, lane.queue, offset, count, budget_bytes, selection.codes, selection.predicate
        )
        if result is not None:
            cut_after_costly(result)
        return result
