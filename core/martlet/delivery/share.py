"""One shared group on one topic: reads its queues, leases messages to members, and settles or returns them."""

import heapq
import logging
import math
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from operator import itemgetter
from typing import Final, Protocol, final

from martlet.clock import Clock
from martlet.delivery.by_name import assign, may_get_all
from martlet.delivery.choosing import CHOICES_A_READ, PARKED_MAX, takers_of
from martlet.delivery.dead_letters import NEVER_STORED, put_dead_letter
from martlet.delivery.fanout import Batch, Encoding, encode_result
from martlet.delivery.finder import FOUND_MAX, Finder, Names, choose
from martlet.delivery.group_notes import GroupNotes
from martlet.delivery.group_policy import GroupPolicy
from martlet.delivery.group_state import GroupState, Lane
from martlet.delivery.lease_notes import ACK, AGAIN, BACK, KEEP, NEW, REACH, RENEW, Change, Key, LeaseState
from martlet.delivery.leases import Leases
from martlet.delivery.redelivery import pause_ms
from martlet.delivery.selection import Selection
from martlet.delivery.subscriptions import Delivery, MemberPeer, Start
from martlet.delivery.tail_reader import TailReader, Tails
from martlet.errors import CorruptRecord, Reason, Refused, StoreError
from martlet.records.codec import decode_record
from martlet.records.layout import RecordView
from martlet.settings import DeliveryConfig
from martlet.state.journal import Journal
from martlet.store import Queue, QueueReader, ReadResult, Store
from martlet.tables.groups import Groups
from martlet.tables.topics import DLQ_PREFIX, Topic, Topics

__all__ = [
    "DEAD_LETTER_RETRY_S",
    "LAPSED_A_TURN",
    "STORED_S",
    "Competitor",
    "MemberPeer",
    "Owner",
    "Share",
    "ShareLane",
]

log = logging.getLogger("martlet.shares")

MESSAGES_A_READ: Final = 256
LANES_A_CALL: Final = 256  # queues that one `Share.hand_out` looks at
READS_A_CALL: Final = 128  # and how often it reads: 20 to 40 us each, as returned messages may be far apart
# Messages of one queue before those of the next: notes about few queues are shorter.
MESSAGES_A_TURN: Final = 512
RESTS_EXACT: Final = 64  # queues with messages up to which `Share.rest` counts each time
# Returned messages far behind the tail that are read ahead.
RETURNED_AHEAD: Final = 8
RUNS_AHEAD: Final = 4
# The place of a lane's reader for messages never delivered; for a returned message it is the offset.
UNREAD: Final = "unread"
STALL_S: Final = 0.1
STORED_S: Final = 1.0  # until a group is looked at again whose state, or whose end, could not be stored yet
# Leases that one turn of the event loop ends: a few milliseconds of work.
LAPSED_A_TURN: Final = 4096
LAPSED_AT_START: Final = 512
# Leases that are restored before the next turn of the event loop, and the rest of the last queue's: 0.3 us each.
RESTORED_A_TURN: Final = 4096
# A dead letter takes as long as the end of so many leases.
DEAD_LETTER_TURNS: Final = 64
SETTLING_S: Final = 60.0  # how long to wait for the outcome of an acknowledgement in an atomic group
RESTORED: Final = "an earlier run"  # the holder of messages leased before the broker started
# Messages that were found are read together if no more than so many others are between two of them.
NEAR: Final = 4
# How much of the log a group may look at again after the broker was killed, and after its last member left.
REACH_BYTES: Final = 64 << 20
REACH_BYTES_AT_END: Final = 1 << 20
UNNOTED_MAX: Final = 4096  # skipped messages that may be read again after a restart
DEAD_LETTER_RETRY_S: Final = 5.0  # pause before a failed dead letter is tried again


class Competitor(Protocol):
    """A member as its group uses it; implemented by `martlet.delivery.group_members.Member`."""

    peer: MemberPeer
    encoding: Encoding
    holder: Hashable
    lease_s: float
    acknowledges: bool
    credit: int
    lapsed: int
    woken: bool

    @property
    def is_exclusive(self) -> bool: ...

    @property
    def asks(self) -> bool: ...

    @property
    def takes(self) -> Callable[[RecordView], bool] | None: ...

    def may_get(self, name: str) -> bool: ...

    def keep(self, name: str, delivery: Delivery) -> None: ...

    def add_credit(self, count: int) -> None: ...

    def wake(self) -> None: ...


class Owner(Protocol):
    """What all groups of a broker share, as one of them uses it; implemented by `shared_groups.Shares`."""

    store: Store
    topics: Topics
    groups: Groups
    tails: Tails
    clock: Clock
    config: DeliveryConfig
    now: Callable[[], float]
    state: GroupState
    notes: GroupNotes
    unsettled: int
    dead_letters: int
    dead_without_letter: int
    withheld: int
    unflushed_lanes: "dict[ShareLane, None]"
    far_dead: "dict[tuple[ShareLane, int], None]"

    @property
    def room(self) -> int: ...

    def alarm(self, share: "Share", at: float) -> None: ...

    def settled(self, count: int) -> None: ...


@final
class ShareLane:
    """One queue as shared by one group."""

    __slots__ = (
        "began",
        "counted",
        "due",
        "failure",
        "found",
        "in_order",
        "key",
        "leases",
        "low",
        "noted_next",
        "queue",
        "reached",
        "reader",
        "share",
        "timer_at",
        "unflushed",
    )

    def __init__(self, share: "Share", queue: Queue, key: Key, leases: Leases) -> None:
        self.share = share
        self.queue = queue
        self.key = key
        # Messages that the group's finder has found and that were never delivered: offset and log position, ascending.
        self.found: deque[tuple[int, int]] = deque()
        self.reached = -1
        self.timer_at = math.inf  # the earliest of its timers in the share
        self.use(leases)
        self.in_order = False  # somebody takes its messages in order
        self.reader = QueueReader(share.store, self._was_read, RETURNED_AHEAD + 1)
        # Offset -> end of its dead letter in the log, which is not flushed yet; ends ascend.
        self.unflushed: dict[int, int] = {}

    def use(self, leases: Leases) -> None:
        """Begin with *leases*."""
        self.leases = leases
        self.failure: Refused | None = None  # for the next member that collects
        self.noted_next = leases.next
        self.began = leases.low
        # What the broker counts of this lane, and the offset committed last.
        self.counted = leases.size
        self.low = leases.low
        self.due = self.share.finder is None
        self.share.activate(self)

    def _was_read(self, place: Hashable) -> None:
        self.share.wake()

    def forget_read(self) -> None:
        """Drop what a thread has read: no member is left, or the selection has changed."""
        self.failure = None
        self.reader.forget_all()

    def find(self, offset: int, position: int) -> bool:
        """Note that the group wants the message at *offset*; return False if it had it before."""
        last = self.found[-1][0] if self.found else self.leases.next - 1
        if offset <= last:
            return False
        self.found.append((offset, position))
        self.due = True
        return True

    def next_found(self, most: int) -> list[int]:
        """Return the offsets of the next messages that were found, up to *most* that are close to each other."""
        found: list[int] = []
        for offset, _ in islice(self.found, most):
            if found and offset > found[-1] + NEAR:
                break
            found.append(offset)
        return found

    def forget_found(self, offset: int) -> int:
        """Drop what was found before *offset*; return how many messages that are."""
        count = 0
        while self.found and self.found[0][0] < offset:
            self.found.popleft()
            count += 1
        return count

    def close(self) -> None:
        """Drop what it has read, after its share has ended."""
        self.reader.close()

    @property
    def is_active(self) -> bool:
        """Whether there may be something to deliver: messages that were returned, that arrived, or an error."""
        return self.due or self.leases.waiting > 0 or self.failure is not None

    @property
    def is_settling(self) -> bool:
        return self.leases.is_settling

    @property
    def is_blocked(self) -> bool:
        """Whether nothing may be delivered in order now: an earlier message is held, pauses or is dead."""
        return self.leases.unsettled > self.leases.waiting

    def account(self) -> None:
        self.share.account(self)

    def state(self) -> tuple[int, list[tuple[int, LeaseState]], int]:
        """Return the next offset and every unsettled message, in the form of notes, and what the group has reached."""
        now, now_ms = self.share.times()
        found: list[tuple[int, LeaseState]] = []
        for offset, until, deliveries, generation, length_s in self.leases.unsettled_leases():
            # The same length as in the lease's own note: the clock may have been set since then.
            duration_ms = _in_ms(length_s)
            if length_s < 0:  # returned: nobody has its handle, and it waits for its next delivery
                generation = max(generation, now_ms)
                duration_ms = max(round((until - now) * 1000), 0) if abs(until) < math.inf else 0
            found.append((offset, LeaseState(generation, duration_ms, deliveries)))
        self.noted_next = self.leases.next
        return self.leases.next, found, self.reached


@final
class Share:
    """One group on one topic.

    When the topic is deleted, or the group may no longer read it, ``gone`` is set and all members are woken; their
    handlers then tell the peers and leave. ``ack``, ``nack``, ``renew`` and ``acknowledgement`` take a message's
    handle (queue, offset and `Delivery.generation`), whoever holds the message.
    """

    __slots__ = (
        "_active",
        "_by_holder",
        "_choosing",
        "_dead",
        "_exclusive",
        "_forget_at",
        "_lanes",
        "_look_at",
        "_members",
        "_newest",
        "_owner",
        "_parked",
        "_reads_left",
        "_rest",
        "_rest_calls",
        "_stalled_at",
        "_start",
        "_tail",
        "_timers",
        "_turn_left",
        "_unopened",
        "alarm_at",
        "finder",
        "gone",
        "group",
        "names",
        "policy",
        "selection",
        "start",
        "store",
        "topic",
    )

    def __init__(
        self,
        owner: Owner,
        topic: Topic,
        group: str,
        selection: Selection,
        start: Start,
        policy: GroupPolicy | None = None,
        names: Names | None = None,
    ) -> None:
        self.names = names
        self._owner = owner
        self.store = owner.store
        self.topic = topic
        self.group = group
        self.policy = policy
        self.selection = selection
        self.start = start
        self.gone = False
        self.alarm_at = math.inf  # the earliest alarm that its owner knows
        self._members: OrderedDict[Competitor, None] = OrderedDict()  # the one whose turn it is first
        self._choosing = 0  # members that take only some messages
        self._exclusive: dict[Competitor, None] = {}  # the first one gets everything
        self._by_holder: dict[Hashable, Competitor] = {}
        self._lanes: dict[int, ShareLane] = {}
        self._unopened: dict[int, None] = {}  # queues with many stored leases, which `tick` restores one by one
        # The lanes with something to deliver, and perhaps a few others, the next one first: no call looks at all lanes.
        self._active: OrderedDict[ShareLane, None] = OrderedDict()
        self._newest = 0  # the newest generation of a returned message
        self._dead: dict[ShareLane, None] = {}  # lanes with dead messages
        self._timers: list[tuple[float, int]] = []  # a heap: when to look at the leases of which queue
        self._rest = self._rest_calls = 0  # the last result of `rest`, and how many calls it serves
        self._turn_left = MESSAGES_A_TURN  # of the next lane
        self._stalled_at = math.inf
        self._forget_at = owner.now() + owner.config.share_memory_s
        self._look_at = math.inf  # when to look again whether the state is stored
        self._start = -1  # where the finder began
        self._parked = 0  # messages in `ShareLane.found`
        self._reads_left = 0  # of one `hand_out`
        self.finder: Finder | None = None
        self._tail: TailReader | None = None
        if names is not None:
            self._find_by(names)
            return
        # A queue added while the group was inactive is read from its beginning, as it is for an active group.
        known = any(owner.notes.stored(self.key(queue_id)) for queue_id in range(topic.read_queues))
        self.follow(topic, new=not (known or (policy is None and owner.groups.committed(group, topic.name))))
        self._listen()

    def _listen(self) -> None:
        """Be woken for new messages that the selection may match."""
        self._tail = self._owner.tails.of(self.topic)
        self._tail.listen(self)

    def _find_by(self, names: Names) -> None:
        """Find messages by their names, from where the group is; a new group begins with those published from now on.

        A lane is opened when a message is found for it; that of the first queue says how far the group is.
        """
        known, store = self._owner.notes.stored(self.key(0)), self.store
        # After a power cut the log may end earlier.
        self._start = store.appended if known is None else min(max(known.reached, 0), store.appended)
        self.finder = Finder(names, self.topic.name, self._start, self.wake)
        if known is None:
            self._open_lane(0, new=True)
        self.follow(self.topic)
        self._lanes[0].reached = self._start

    def __len__(self) -> int:
        return len(self._members)

    def key(self, queue_id: int) -> Key:
        """Return the key of a queue's stored state."""
        return Key(self.policy.scope if self.policy is not None else "", self.group, self.topic.name, queue_id)

    def times(self) -> tuple[float, int]:
        """Return the time now, on the clock of deadlines in seconds and on the wall clock in ms."""
        return self._owner.now(), self._owner.clock.now_ms()

    def idle(self, now: float) -> bool:
        """Return whether to drop this object: no members, and no unsettled messages or no member for a long time.

        A group that comes back continues as it is stored, so everything must be stored.
        """
        if not self.is_unused:
            return False
        return now >= self._forget_at or not (self._unopened or any(lane.leases.size for lane in self._lanes.values()))

    @property
    def is_unused(self) -> bool:
        """Whether it can be dropped: nobody is a member, and its state is stored."""
        return not self._members and self._is_stored

    @property
    def _is_stored(self) -> bool:
        """Whether the stored state has all that was noted."""
        return all(self._owner.notes.is_applied(lane.key) for lane in self._lanes.values())

    def follow(self, topic: Topic, *, new: bool = False) -> None:
        """Share all present queues of *topic*."""
        self.topic = topic
        left = RESTORED_A_TURN
        for queue_id in range(topic.read_queues):
            if queue_id in self._lanes or queue_id in self._unopened:
                continue
            known = self._owner.notes.stored(self.key(queue_id))
            if known is None and self.finder is not None:
                continue
            if known is not None and known.leases:
                if left <= 0:
                    self._unopened[queue_id] = None
                    self._owner.alarm(self, -math.inf)
                    continue
                left -= len(known.leases)
            self._open_lane(queue_id, new)

    def _open_lane(self, queue_id: int, new: bool = False, first: int = -1) -> ShareLane:
        """Share a queue, and restore its stored leases; without any, it begins at offset *first* if that is given."""
        self._unopened.pop(queue_id, None)
        queue, key = self.topic.queue(queue_id), self.key(queue_id)
        lane = self._lanes[queue_id] = ShareLane(self, queue, key, self._make_leases(queue, key, new, first))
        self._owner.notes.open(key, lane)
        self.wake()
        return lane

    def _lane(self, queue_id: int) -> ShareLane | None:
        return self._open_lane(queue_id) if queue_id in self._unopened else self._lanes.get(queue_id)

    def _make_leases(self, queue: Queue, key: Key, new: bool, first: int = -1) -> Leases:
        owner = self._owner
        known, offset = owner.notes.stored(key), first
        if self.policy is None:
            groups = owner.groups
            if groups.take_reset(self.group, key.topic, queue.queue_id) >= 0:
                known = None
            offset = groups.offset(self.group, key.topic, queue.queue_id)
        if known is not None and known.next > queue.next_offset:
            known = None  # the state is of a deleted topic
        if known is not None:
            offset = known.low if first >= 0 else max(offset, known.low)
        elif offset < 0:
            offset = self.start(queue) if new else queue.first_offset
        # A power cut can lose messages whose offsets were committed; later messages get these offsets again.
        offset = min(offset, queue.next_offset)
        leases = Leases(
            offset,
            window=owner.config.lease_window,
            deliveries_max=self._deliveries_max(),
            lapses_count=self._leaving_counts,
        )
        if known is not None:
            self._restore(leases, known, offset)
        else:
            owner.notes.begin(key, offset, self._start if queue.queue_id == 0 else -1)
        self._commit_offset(queue.queue_id, leases.low)
        return leases

    def _restore(self, leases: Leases, known: Lane, offset: int) -> None:
        """Restore the stored leases from *offset* on."""
        now, now_ms = self.times()
        for state, offsets in _alike(known.leases, offset):
            # A clock that was set back must not extend a lease.
            left_ms = min(max(state.generation + state.duration_ms - now_ms, 0), state.duration_ms)
            leases.restore(
                RESTORED, offsets, now + left_ms / 1000, state.deliveries, state.generation, state.duration_ms / 1000
            )
        leases.skip_to(known.next)
        self._owner.unsettled += leases.size
        leases.lapse(now, most=LAPSED_AT_START)
        self._owner.alarm(self, -math.inf)

    @property
    def _leaving_counts(self) -> bool:
        return self.policy is None or self.policy.leaving_counts

    def _deliveries_max(self) -> int:
        """Return how often a message is delivered, 0 for no limit; the first delivery is not a retry."""
        if self.policy is not None:
            retries = self.policy.retries_max
        else:
            group = self._owner.groups.get(self.group)
            retries = group.retry_max_times if group is not None else 16
        return retries + 1 if retries >= 0 else 0

    def activate(self, lane: ShareLane) -> None:
        """Note that *lane* may have something to deliver, or dead messages, or another deadline."""
        leases = lane.leases
        if lane.is_active:
            self._active.setdefault(lane)
            self._newest = max(self._newest, leases.newest_returned)
        if leases.has_dead:
            self._dead[lane] = None
        at = leases.deadline()
        if at < lane.timer_at:
            lane.timer_at = at
            heapq.heappush(self._timers, (at, lane.queue.queue_id))

    def look_at_all(self) -> None:
        """Let the next `hand_out` look at all queues: an administrator may have reset some of them."""
        for lane in self._lanes.values():
            lane.due = True
            self.activate(lane)
        self.wake()

    def apply_retries(self) -> None:
        """Use the group's present number of retries for messages that return from now on."""
        for lane in self._lanes.values():
            lane.leases.deliveries_max = self._deliveries_max()

    def arrived_at(self, queue: Queue) -> None:
        """Read *queue* again: records that may match became readable."""
        lane = self._lanes.get(queue.queue_id)
        if lane is not None and lane.queue is queue:
            lane.due = True
            self.activate(lane)
            self.wake()

    def select(self, selection: Selection, names: Names | None = None) -> None:
        """Use *selection* from now on, and *names* with the same topic filter."""
        if self._tail is not None:
            self._tail.leave(self)
        self.selection, self.names = selection, names
        if self.finder is None:
            self._listen()
        for lane in self._lanes.values():
            lane.forget_read()
            if self.finder is None:
                lane.due = True  # the old selection may not have been woken by what the new one wants
            self.activate(lane)

    def join(self, member: Competitor) -> None:
        """Take *member* in. Raises `Refused` if the topic may not be read."""
        if self.finder is not None:
            self.finder.go_on(self.store.readable)
        self._members[member] = None
        self._by_holder[member.holder] = member
        self._choosing += member.takes is not None
        if member.is_exclusive:
            self._exclusive[member] = None
        for lane in self._lanes.values():
            if lane.leases.parked:
                lane.leases.unpark()
                self.activate(lane)
        member.wake()

    def leave(self, member: Competitor, *, keep: bool) -> None:
        if self._members.pop(member, self) is None:
            self._choosing -= member.takes is not None
            self._exclusive.pop(member, None)
            last = self._by_holder.get(member.holder) is member
            if last:
                del self._by_holder[member.holder]
            for lane in self._lanes.values():
                if last and not keep:
                    self._give_back(lane, member)
                if not self._members:
                    lane.forget_read()
            if self.finder is not None and not self._members:
                self.finder.pause()
            self._forget_at = self._owner.now() + self._owner.config.share_memory_s
            self._owner.alarm(self, -math.inf)
            self.wake()

    def _give_back(self, lane: ShareLane, member: Competitor) -> None:
        """Return what *member* held; its leaving does not count as a failure of the messages, earlier deliveries do.

        With a policy for which leaving never counts, the messages can be delivered again at once, in order.
        """
        counts = self._leaving_counts
        for deliveries, offsets in lane.leases.held_by_deliveries(member.holder).items():
            self._return(lane, member.holder, offsets, deliveries - 1 if counts else 0, counts=counts)

    def _return(
        self,
        lane: ShareLane,
        holder: Hashable,
        offsets: Sequence[int],
        failures: int,
        delay_s: float = 0,
        *,
        counts: bool = True,
    ) -> list[int]:
        """Return messages for redelivery after *delay_s*, or after a longer pause that grows with *failures*.

        Returns the offsets of those that *holder* held. Unless this *counts*, none of them becomes dead.
        """
        wait_s = max(delay_s, pause_ms(failures) / 1000)
        now, now_ms = self.times()
        at = now + wait_s if wait_s > 0 else -math.inf
        back = lane.leases.give_back_all(holder, offsets, at, counts=counts)
        if back:
            self.activate(lane)
            self._owner.notes.note(lane.key, Change(BACK, now_ms, round(wait_s * 1000), offsets=back))
            self._owner.alarm(self, -math.inf if lane.leases.has_dead else at)
        return back

    def wake(self) -> None:
        """Wake the next member that has credit and is not woken yet; all members if the share is gone."""
        if self.gone:
            for member in list(self._members):
                member.wake()
            return
        ready = self._next_ready()
        if ready is None:
            return
        ready.wake()
        if self._stalled_at == math.inf and len(self._members) > 1:
            self._stalled_at = self._owner.now() + STALL_S
            self._owner.alarm(self, self._stalled_at)

    def _next_ready(self) -> Competitor | None:
        """Return the next member that has credit and is not woken; its turn comes after all others again."""
        members, lapsed = self._members, None
        if self._exclusive:
            first = next(iter(self._exclusive))
            return first if first.credit > 0 and not first.woken else None
        for _ in range(len(members)):
            member = next(iter(members))
            members.move_to_end(member)
            if member.credit > 0 and not member.woken:
                if not member.lapsed:
                    return member
                # One that lost a lease and has been silent since may be dead.
                lapsed = lapsed or member
        return lapsed

    def close(self) -> None:
        """Close the share: members get no more messages; its stored state remains."""
        self._note_end()
        for lane in self._lanes.values():
            self.account(lane)
            self._owner.notes.close(lane.key)
        for lane in self.end():
            lane.close()

    def end(self) -> list[ShareLane]:
        """End the share, with its state: members get no more messages. Return its lanes, which must be closed."""
        if self._tail is not None:
            self._tail.leave(self)
        if self.finder is not None:
            self.finder.pause()
        lanes = list(self._lanes.values())
        if self._owner.unflushed_lanes:
            for lane in lanes:
                self._owner.unflushed_lanes.pop(lane, None)
        for table in self._lanes, self._unopened, self._active, self._dead, self._timers:
            table.clear()
        self._owner.settled(sum([lane.counted for lane in lanes]))
        return lanes

    # messages that are found by their names

    def _find(self, finder: Finder, count: int) -> None:
        """Take up to *count* messages that were found, to the lanes of their queues."""
        count = min(count, FOUND_MAX - self._parked)
        if count <= 0 or not finder.has_found:
            return
        for queue_id, offset, position in finder.take(count):
            lane = self._lane(queue_id) or self._open_lane(queue_id, first=offset)
            if lane.find(offset, position):
                self._parked += 1
                self.activate(lane)

    @property
    def _reached(self) -> int:
        """The log position before which everything was found and delivered."""
        assert self.finder is not None
        return min([self.finder.position, *[lane.found[0][1] for lane in self._lanes.values() if lane.found]])

    def reach(self) -> None:
        """Note the position of the group if it has moved far; `Shares` calls this now and then."""
        if self.finder is not None and self.finder.position - self._lanes[0].reached > REACH_BYTES:
            self._owner.notes.reach(self._lanes[0].key, self._reached)

    def _note_end(self) -> None:
        """Note how far the group is, so that the next member need not look at what was published before."""
        notes = self._owner.notes
        if self.finder is None or not all(notes.is_durable(lane.key) for lane in self._lanes.values()):
            return
        reached, lane = self._reached, self._lanes[0]
        if reached - lane.reached > REACH_BYTES_AT_END:
            lane.reached = reached
            notes.note(lane.key, Change(REACH, number=reached))

    # messages to members

    def hand_out(
        self, member: Competitor, budget_bytes: int, queue_id: int = -1, *, in_order: bool = False
    ) -> list[Delivery]:
        """Lease messages to *member*, of each queue in turn: first returned ones, then new ones.

        All get the same generation. With *queue_id* they are of that queue only. With *in_order* a queue is left out
        until its earlier messages are settled or can be delivered again.
        """
        if self._exclusive and member is not next(iter(self._exclusive)):
            return []
        until = self._owner.now() + member.lease_s
        found: list[Delivery] = []
        visited: list[ShareLane] = []
        if self.finder is not None:
            self._find(self.finder, member.credit)
        parked, self._reads_left = self._parked, READS_A_CALL
        try:
            self._visit(member, budget_bytes, queue_id, in_order, until, found, visited)
        finally:
            for lane in visited:
                self.activate(lane)
                if not lane.is_active:
                    self._active.pop(lane, None)
        if found:
            self._owner.alarm(self, until)
            self._rest -= sum([delivery.count for delivery in found])
        if (found or self._parked < parked or self._reads_left <= 0) and self._has_more(queue_id):
            self.wake()
        return found

    def _has_more(self, queue_id: int = -1) -> bool:
        """Return whether there are messages to deliver, or to look at."""
        if self.finder is not None and self.finder.has_found:
            return True
        return any(lane.due or lane.leases.waiting for lane in self._may_have(queue_id))

    def _visit(
        self,
        member: Competitor,
        budget_bytes: int,
        queue_id: int,
        in_order: bool,
        until: float,
        found: list[Delivery],
        visited: list[ShareLane],
    ) -> None:
        """Add messages to *found*, and every lane that was looked at to *visited*."""
        generation = max(self._owner.clock.now_ms(), self._newest + 1)
        for lane in self._next_lanes(queue_id):
            if member.credit <= 0 or budget_bytes <= 0 or self._reads_left <= 0:
                break
            visited.append(lane)
            if in_order:
                lane.in_order = True
                if lane.is_blocked:
                    continue
            credit = member.credit
            try:
                if lane.failure is not None:
                    self._fail(lane)
                if lane.leases.waiting:
                    budget_bytes -= self._again(lane, member, budget_bytes, until, generation, found)
                is_moving = True
                while is_moving and member.credit > 0 and budget_bytes > 0 and self._reads_left > 0:
                    before = len(lane.found)
                    budget_bytes -= self._new(lane, member, budget_bytes, until, generation, found)
                    is_moving = 0 < len(lane.found) < before
            except Refused as refused:
                if not found:
                    self._end_turn(lane)
                    raise
                lane.failure = refused  # deliver what was found first
                member.peer.wake()
                break
            if member.credit <= 0 or budget_bytes <= 0:
                self._turn_left -= credit - member.credit
                if self._turn_left <= 0:
                    self._end_turn(lane)
                break

    def _next_lanes(self, queue_id: int) -> Iterator[ShareLane]:
        """Yield the lane of *queue_id*; if it is -1, active lanes: one whose turn is not over is next again."""
        if queue_id >= 0:
            yield from self._may_have(queue_id)
            return
        for _ in range(min(len(self._active), LANES_A_CALL)):
            lane = next(iter(self._active))
            yield lane
            self._end_turn(lane)

    def _end_turn(self, lane: ShareLane) -> None:
        """Let all other queues come before that of *lane*."""
        self._turn_left = MESSAGES_A_TURN
        if lane in self._active:
            self._active.move_to_end(lane)

    def _may_have(self, queue_id: int) -> Iterable[ShareLane]:
        """Return the lane of *queue_id*; if it is -1, all that may have messages."""
        if queue_id < 0:
            return self._active
        lane = self._lane(queue_id)
        return (lane,) if lane is not None else ()

    def is_ready(self, queue_id: int = -1, *, in_order: bool = False) -> bool:
        """Return whether `hand_out` may find messages now; if not, members with credit are woken once it may."""
        for lane in self._may_have(queue_id):
            reader = lane.reader
            if (reader.must_wait and not reader.has_read) or (in_order and lane.is_blocked):
                continue
            if lane.failure or lane.leases.waiting:
                return True
            is_behind = lane.due and self.store.end_offset(lane.queue) > lane.leases.next
            if is_behind and min(lane.leases.room, self._owner.room) > 0:
                return True
        return False

    def is_reading(self, queue_id: int = -1) -> bool:
        """Return whether a thread reads messages for `hand_out`; members with credit are woken when it has."""
        return any(lane.reader.must_wait for lane in self._may_have(queue_id))

    def next_offset(self, queue_id: int) -> int:
        """Return the first offset of the queue that was never delivered; -1 if there is no such queue."""
        lane = self._lane(queue_id)
        return lane.leases.next if lane is not None else -1

    def first_unsettled(self, queue_id: int) -> int:
        """Return the first offset of the queue that is not settled; -1 if there is no such queue."""
        lane = self._lane(queue_id)
        return lane.leases.low if lane is not None else -1

    def is_settled(self, queue_id: int, offset: int) -> bool:
        """Return whether a message is settled."""
        lane = self._lane(queue_id)
        return lane is not None and lane.leases.is_settled(offset)

    def rest(self, queue_id: int = -1) -> int:
        """Return how many messages can be delivered now or have not been looked at yet; about, if queues are many."""
        if queue_id < 0 and self._rest_calls > 0:
            self._rest_calls -= 1
            return max(self._rest, 0)
        lanes = self._may_have(queue_id)
        rest = sum([lane.leases.waiting + max(lane.queue.next_offset - lane.leases.next, 0) for lane in lanes])
        if queue_id < 0:
            self._rest, self._rest_calls = rest, len(self._active) // RESTS_EXACT
        return rest

    def _fail(self, lane: ShareLane) -> None:
        """Raise the error of an earlier read, if there is one."""
        failure, lane.failure = lane.failure, None
        if failure is not None:
            raise failure

    def _again(
        self,
        lane: ShareLane,
        member: Competitor,
        budget_bytes: int,
        until: float,
        generation: int,
        found: list[Delivery],
    ) -> int:
        """Lease messages that were returned, and add them to *found*; return their size."""
        leases, used = lane.leases, 0
        while leases.waiting and member.credit > 0 and used < budget_bytes and self._reads_left > 0:
            self._reads_left -= 1
            first, count = leases.returned_run(min(member.credit, MESSAGES_A_READ))
            result = self._read_again(lane, member, first, count, budget_bytes - used)
            if result is None:
                break
            end = min(max(result.next_offset, first + 1), first + count)
            if member.asks and not may_get_all(member, result):
                used += self._again_by_name(lane, member, result, range(first, end), generation, found)
                continue
            if self._choosing:
                used += self._again_by_choice(lane, member, result, range(first, end), generation, found)
                continue
            deliveries = leases.hand_again(member.holder, end - first, until, generation, member.lease_s)[0][1]
            member.credit -= end - first
            batch = encode_result(result, first, member.encoding)
            matching = bisect_left(batch.offsets, end)
            offsets = batch.offsets[:matching]
            if matching < end - first:
                self._settle_gone(lane, member, range(first, end), offsets)
            if matching:
                self._owner.notes.note(lane.key, Change(AGAIN, generation, _in_ms(member.lease_s), offsets=offsets))
                delivery = Delivery(lane.queue.queue_id, offsets[0], end, matching, batch, deliveries, generation)
                found.append(delivery)
                used += delivery.size
        return used

    def _again_by_name(
        self,
        lane: ShareLane,
        member: Competitor,
        result: ReadResult,
        run: range,
        generation: int,
        found: list[Delivery],
    ) -> int:
        """As `_again` for the returned messages of *run*, of which *member* may not get all."""
        batch = encode_result(result, run.start, member.encoding)
        receivers = self._receivers(result, member, batch.offsets[: bisect_left(batch.offsets, run.stop)])
        now, deliveries = self._owner.now(), 1
        for offset in run:
            receiver = receivers[offset][0] if offset in receivers else member
            given = lane.leases.hand_again(receiver.holder, 1, now + receiver.lease_s, generation, receiver.lease_s)
            deliveries = given[0][1]
            if offset not in receivers:  # it is gone, or for nobody
                member.credit -= 1  # which `_settle` gives back
                self._settle(lane, member.holder, offset)
        if receivers:
            change = Change(AGAIN, generation, _in_ms(member.lease_s), offsets=list(receivers))
            self._owner.notes.note(lane.key, change)
        return self._give(lane, member, receivers, batch, result, deliveries, generation, found)

    def _again_by_choice(
        self,
        lane: ShareLane,
        member: Competitor,
        result: ReadResult,
        run: range,
        generation: int,
        found: list[Delivery],
    ) -> int:
        """As `_again` for the returned messages of *run*, each for a member that takes it, or parked again."""
        batch = encode_result(result, run.start, member.encoding)
        count = bisect_left(batch.offsets, run.stop)
        takers = takers_of(result, member, self._in_turn())[:count]
        by_offset, now, deliveries = dict(zip(batch.offsets, takers, strict=False)), self._owner.now(), 1
        for offset in run:
            taker = by_offset.get(offset, member)
            if taker is None:
                lane.leases.park_returned()
                continue
            given = lane.leases.hand_again(taker.holder, 1, now + taker.lease_s, generation, taker.lease_s)
            deliveries = given[0][1]
            if offset not in by_offset:  # it is gone
                member.credit -= 1  # which `_settle` gives back
                self._settle(lane, member.holder, offset)
        if taken := [offset for offset, taker in by_offset.items() if taker is not None]:
            self._owner.notes.note(lane.key, Change(AGAIN, generation, _in_ms(member.lease_s), offsets=taken))
        return self._give_chosen(lane, member, takers, batch, result, deliveries, generation, found)

    def _receivers(
        self, result: ReadResult, member: Competitor, offsets: Sequence[int]
    ) -> dict[int, tuple[Competitor, str]]:
        """Return by offset who gets the messages of *result*, and their names; without those that are for nobody."""
        at = 0
        found: dict[int, tuple[Competitor, str]] = {}
        for receiver, names in assign(result, member, self._in_turn()):
            for name, offset in zip(names, offsets[at : at + len(names)], strict=False):
                if receiver is not None:
                    found[offset] = receiver, name
            at += len(names)
        self._owner.withheld += len(offsets) - len(found)
        return found

    def _give(
        self,
        lane: ShareLane,
        member: Competitor,
        receivers: Mapping[int, tuple[Competitor, str]],
        batch: Batch,
        result: ReadResult,
        deliveries: int,
        generation: int,
        found: list[Delivery],
    ) -> int:
        """Add what *member* gets to *found*, and keep the rest for its receivers; return the size of all."""
        batches, used, now = {member.encoding.name: batch}, 0, self._owner.now()
        for offset, (receiver, name) in receivers.items():
            own = batches.get(receiver.encoding.name)
            if own is None:
                own = batches[receiver.encoding.name] = encode_result(result, batch.start, receiver.encoding)
            delivery = Delivery(lane.queue.queue_id, offset, offset + 1, 1, own, deliveries, generation)
            used += delivery.size
            if receiver is member:
                member.credit -= 1
                found.append(delivery)
            else:
                receiver.keep(name, delivery)
                self._owner.alarm(self, now + receiver.lease_s)
        return used

    def is_held(self, holder: Hashable, delivery: Delivery) -> bool:
        """Return whether *holder* still holds the message of *delivery*."""
        return self._holder(delivery.queue_id, delivery.first, delivery.generation) == holder

    def pass_on(self, holder: Hashable, queue_id: int, offset: int) -> None:
        """Return a message that *holder* was not sent, because it may not read it any more."""
        lane = self._lanes.get(queue_id)
        if lane is not None:
            self._return(lane, holder, (offset,), lane.leases.deliveries(offset) - 1)
            self.wake()

    def _settle_gone(self, lane: ShareLane, member: Competitor, run: Sequence[int], found: Sequence[int]) -> None:
        """Settle messages of *run* that were not *found*: retention removed them, or they are not selected any more."""
        wanted = frozenset(found)
        for offset in run:
            if offset not in wanted:
                self._settle(lane, member.holder, offset)

    def _read_again(
        self, lane: ShareLane, member: Competitor, first: int, count: int, budget_bytes: int
    ) -> ReadResult | None:
        """Read *count* returned messages from *first* on; None if a thread must do that, which then wakes a member."""
        result = self._read_one(lane, member, first, count, budget_bytes)
        if result is None:
            self._read_ahead(lane, member, first, count, budget_bytes)
        return result

    def _read_ahead(self, lane: ShareLane, member: Competitor, first: int, count: int, budget_bytes: int) -> None:
        """Have a thread read what follows a run of returned messages, too: more runs as long, or single messages."""
        leases, end = lane.leases, first + count
        offsets = list(range(end, end + count * RUNS_AHEAD, count))
        if not leases.is_waiting(end):
            count = 1
            offsets = [offset for offset in leases.returned(min(member.credit, RETURNED_AHEAD)) if offset >= end]
        offsets = [offset for offset in offsets if leases.is_waiting(offset)]
        lane.reader.keep_only((UNREAD, first, *offsets))
        for offset in offsets:
            self._read_one(lane, member, offset, count, budget_bytes)

    def _read_one(
        self, lane: ShareLane, member: Competitor, offset: int, count: int, budget_bytes: int
    ) -> ReadResult | None:
        start, selection = member.peer.start, self.selection
        return lane.reader.read(
            start, offset, lane.queue, offset, count, budget_bytes, selection.codes, selection.predicate
        )

    def _new(
        self,
        lane: ShareLane,
        member: Competitor,
        budget_bytes: int,
        until: float,
        generation: int,
        found: list[Delivery],
    ) -> int:
        """Lease messages that were never delivered, and add them to *found*; return their size."""
        self._reset_if_wanted(lane)
        leases, owner = lane.leases, self._owner
        room = min(leases.room, owner.room, member.credit, MESSAGES_A_READ)
        if self.policy is not None and self.policy.in_parts:
            room = min(room, self._part(lane))
        if self._choosing:
            room = min(room, max(CHOICES_A_READ // len(self._members), 1), PARKED_MAX - leases.parked)
        if room <= 0 or not lane.due:
            return 0
        self._reads_left -= 1
        start, read = (lane.found[0][0], self._read_found) if lane.found else (leases.next, self._read)
        result = read(lane, member, room, budget_bytes)
        if result is None or result.next_offset <= start:
            return 0
        batch = encode_result(result, start, member.encoding)
        if member.asks and not may_get_all(member, result):
            return self._new_by_name(lane, member, result, batch, generation, found)
        if self._choosing and result.count:
            return self._new_by_choice(lane, member, result, batch, generation, found)
        leased = batch.offsets if member.acknowledges else ()
        leases.hand_out(member.holder, leased, until, generation, member.lease_s)
        leases.skip_to(result.next_offset)
        if result.count or leases.next >= lane.noted_next + UNNOTED_MAX:
            change = Change(NEW, generation, _in_ms(member.lease_s), leases.next, leased, lane.noted_next)
            owner.notes.note(lane.key, change)
            lane.noted_next = leases.next
        self.account(lane)
        if not result.count:
            if lane.due:
                self.wake()
            return 0
        member.credit -= len(leased)
        queue_id, first = lane.queue.queue_id, batch.offsets[0]
        found.append(Delivery(queue_id, first, result.next_offset, result.count, batch, 1, generation))
        return batch.size

    def _new_by_name(
        self,
        lane: ShareLane,
        member: Competitor,
        result: ReadResult,
        batch: Batch,
        generation: int,
        found: list[Delivery],
    ) -> int:
        """As `_new`, for messages of which *member* may not get all; those that are for nobody are skipped."""
        leases, owner = lane.leases, self._owner
        receivers, now = self._receivers(result, member, batch.offsets), owner.now()
        for offset, (receiver, _) in receivers.items():
            leases.hand_out(receiver.holder, (offset,), now + receiver.lease_s, generation, receiver.lease_s)
        leases.skip_to(result.next_offset)
        if receivers or leases.next >= lane.noted_next + UNNOTED_MAX:
            lease_ms = _in_ms(member.lease_s)
            owner.notes.note(lane.key, Change(NEW, generation, lease_ms, leases.next, list(receivers), lane.noted_next))
            lane.noted_next = leases.next
        self.account(lane)
        if lane.due:
            self.wake()
        return self._give(lane, member, receivers, batch, result, 1, generation, found)

    def _new_by_choice(
        self,
        lane: ShareLane,
        member: Competitor,
        result: ReadResult,
        batch: Batch,
        generation: int,
        found: list[Delivery],
    ) -> int:
        """As `_new`, for messages of which each goes to a member that takes it; those that nobody takes are parked."""
        leases, owner = lane.leases, self._owner
        takers, now = takers_of(result, member, self._in_turn()), owner.now()
        parked: list[int] = []
        for taker, run in groupby(zip(takers, batch.offsets, strict=True), itemgetter(0)):
            offsets = [offset for _, offset in run]
            if taker is None:
                leases.park(offsets, generation)
                parked += offsets
            else:
                leases.hand_out(taker.holder, offsets, now + taker.lease_s, generation, taker.lease_s)
        leases.skip_to(result.next_offset)
        lease_ms, left = _in_ms(member.lease_s), frozenset(parked)
        taken = [offset for offset in batch.offsets if offset not in left]
        owner.notes.note(lane.key, Change(NEW, generation, lease_ms, leases.next, taken, lane.noted_next))
        if parked:
            owner.notes.note(lane.key, Change(KEEP, generation, 0, 0, parked))
        lane.noted_next = leases.next
        self.account(lane)
        if lane.due:
            self.wake()
        return self._give_chosen(lane, member, takers, batch, result, 1, generation, found)

    def _give_chosen(
        self,
        lane: ShareLane,
        member: Competitor,
        takers: Sequence[Competitor | None],
        batch: Batch,
        result: ReadResult,
        deliveries: int,
        generation: int,
        found: list[Delivery],
    ) -> int:
        """Add what *member* takes to *found* as one delivery, and keep the rest for its takers; return their size."""
        own = [index for index, taker in enumerate(takers) if taker is member]
        others = {
            offset: (taker, "")
            for taker, offset in zip(takers, batch.offsets, strict=False)
            if taker is not None and taker is not member
        }
        used = self._give(lane, member, others, batch, result, deliveries, generation, found)
        if own:
            chosen = batch.chosen(own)
            member.credit -= len(own)
            queue_id, first = lane.queue.queue_id, chosen.offsets[0]
            found.append(Delivery(queue_id, first, batch.next, len(own), chosen, deliveries, generation))
            used += chosen.size
        return used

    def _part(self, lane: ShareLane) -> int:
        """Return how many new messages one member may take, so that all with credit get some of them."""
        several = len(self._members) > 1 and not self._exclusive
        ready = sum([member.credit > 0 for member in self._members]) if several else 1
        return max(-((lane.leases.next - lane.queue.next_offset) // max(ready, 1)), 1)

    def _in_turn(self) -> list[Competitor]:
        """Return those that may get messages, the one whose turn it is first."""
        return [next(iter(self._exclusive))] if self._exclusive else list(self._members)

    def _read(self, lane: ShareLane, member: Competitor, count: int, budget_bytes: int) -> ReadResult | None:
        """Read *count* messages that were never looked at; None if a thread must do that, or there are none."""
        selection, start = self.selection, lane.leases.next
        result = lane.reader.read(
            member.peer.start, UNREAD, lane.queue, start, count, budget_bytes, selection.codes, selection.predicate
        )
        if result is not None:
            lane.due = start < result.next_offset < lane.queue.next_offset
        return result

    def _read_found(self, lane: ShareLane, member: Competitor, count: int, budget_bytes: int) -> ReadResult | None:
        """Read up to *count* messages that were found; None if a thread must do that, or they are gone."""
        assert self.names is not None
        offsets = lane.next_found(count)
        first, end = offsets[0], offsets[-1] + 1
        result = lane.reader.read(member.peer.start, UNREAD, lane.queue, first, end - first, budget_bytes)
        if result is not None:
            self._parked -= lane.forget_found(max(result.next_offset, first + 1))
            lane.due = bool(lane.found)
            choose(result, offsets, self.names.condition)
        return result

    def _reset_if_wanted(self, lane: ShareLane) -> None:
        """Begin anew where an administrator's reset of the group wants it."""
        owner = self._owner
        if self.policy is None and owner.groups.pending_reset(self.group, self.topic.name, lane.queue.queue_id) >= 0:
            owner.settled(lane.counted)
            for member in self._members:  # what they hold counts no more
                if held := len(lane.leases.held(member.holder)):
                    member.add_credit(held)
            lane.use(self._make_leases(lane.queue, lane.key, new=False))
            lane.unflushed.clear()
            lane.forget_read()
            owner.unflushed_lanes.pop(lane, None)

    # messages from members, and from whoever has a handle

    def holds(self, holder: Hashable, queue_id: int, offset: int) -> bool:
        """Return whether *holder* holds a message, and may settle it."""
        lane = self._lanes.get(queue_id)
        return lane is not None and lane.leases.holds(holder, offset)

    def ack_held(self, holder: Hashable, queue_id: int, offset: int) -> bool:
        """Settle a message that *holder* holds; False if it does not hold it."""
        lane = self._lanes.get(queue_id)
        return lane is not None and self._settle(lane, holder, offset)

    def ack_held_all(self, holder: Hashable, queue_id: int, offsets: Sequence[int]) -> Sequence[int]:
        """Settle those messages of one queue that *holder* holds; return their offsets."""
        lane = self._lanes.get(queue_id)
        settled = lane.leases.ack_held(holder, offsets) if lane is not None else ()
        if lane is not None and settled:
            self._was_settled(lane, settled, {holder: len(settled)})
        return settled

    def nack_held(self, holder: Hashable, queue_id: int, offsets: Sequence[int], delay_s: float) -> list[int]:
        """Return failed messages that *holder* holds; return their offsets."""
        lane, failed = self._lanes.get(queue_id), list[int]()
        if lane is None:
            return failed
        for deliveries, alike in groupby(offsets, lane.leases.deliveries):
            failed += self._return(lane, holder, list(alike), deliveries, delay_s)
        if failed:
            self._give_credit(holder, len(failed))
            self.wake()
        return failed

    def give_up_held(self, holder: Hashable, queue_id: int, offsets: Sequence[int]) -> list[int]:
        """Make messages dead that *holder* holds, however often they were delivered; return their offsets."""
        lane = self._lanes.get(queue_id)
        given = lane.leases.give_up(holder, offsets) if lane is not None else []
        if lane is not None and given:
            self.activate(lane)
            self._owner.alarm(self, -math.inf)
            self._give_credit(holder, len(given))
        return given

    def renew_held(self, holder: Hashable, queue_id: int, offset: int, lease_s: float) -> int:
        """Make a lease of *holder* end *lease_s* from now; return its new generation, 0 if there is no such lease."""
        lane = self._lanes.get(queue_id)
        now, now_ms = self.times()
        if lane is None or not lane.leases.renew(holder, offset, now + lease_s, now_ms, lease_s):
            return 0
        self.activate(lane)
        generation = lane.leases.generation(offset)
        self._owner.notes.note(lane.key, Change(RENEW, generation, _in_ms(lease_s), offsets=(offset,)))
        self._owner.alarm(self, now + lease_s)
        return generation

    def ack(self, queue_id: int, offset: int, generation: int) -> bool:
        """Settle a message by its handle; False if the handle is no longer valid."""
        return bool(self.ack_all(queue_id, (offset,), generation))

    def ack_all(self, queue_id: int, offsets: Sequence[int], generation: int) -> list[int]:
        """Settle messages of one queue by their handles; return the offsets of those whose handles are valid."""
        lane, holders = self._lane(queue_id), list[Hashable]()
        if lane is None:
            return []
        settled = lane.leases.ack_all(offsets, generation, holders)
        if settled:
            self._was_settled(lane, settled, Counter(holders))
        return settled

    def nack(self, queue_id: int, offset: int, generation: int, delay_s: float = 0) -> bool:
        """Return a failed message by its handle, as `Member.nack`; False if the handle is no longer valid."""
        holder = self._holder(queue_id, offset, generation)
        return holder is not None and bool(self.nack_held(holder, queue_id, (offset,), delay_s))

    def renew(self, queue_id: int, offset: int, generation: int, lease_s: float) -> int:
        """Make a lease end *lease_s* from now, earlier or later than before; return its new generation.

        The old handle is then no longer valid. Returns 0 if *generation* was not valid.
        """
        holder = self._holder(queue_id, offset, generation)
        return self.renew_held(holder, queue_id, offset, lease_s) if holder is not None else 0

    def acknowledgement(self, queue_id: int, offset: int, generation: int) -> tuple[Journal, bytes]:
        """Return the acknowledgement of a message for `Broker.publish_atomic`, which must be called next.

        The message is settled once the atomic group is readable. If the group is refused, call `withdraw`; if its
        commit fails, the message is returned within a minute.

        Raises:
          Refused: the handle is not valid (Reason.NOT_FOUND), or the store accepts no writes now.
        """
        holder = self._holder(queue_id, offset, generation)
        if holder is None:
            self.store.admission.check()
            text = f"message {offset} of queue {queue_id} has no lease {generation} in group {self.group!r}"
            raise Refused(Reason.NOT_FOUND, f"{text}; it may have ended")
        return self.acknowledgements_held(holder, queue_id, (offset,))[0]

    def acknowledgements_held(
        self, holder: Hashable, queue_id: int, offsets: Sequence[int]
    ) -> list[tuple[Journal, bytes]]:
        """Return the acknowledgements of messages that *holder* holds, as `acknowledgement`. Raises `Refused`."""
        lane, begun = self._lane(queue_id), list[int]()
        self.store.admission.check()
        until = self._owner.now() + SETTLING_S
        for offset in offsets:
            if lane is None or not lane.leases.begin_settling(holder, offset, until):
                for each in begun:
                    self.withdraw(queue_id, each)
                text = f"message {offset} of queue {queue_id} is not held by this member of group {self.group!r}"
                raise Refused(Reason.NOT_FOUND, f"{text}; it was settled, or its lease has ended")
            begun.append(offset)
        if lane is None or not begun:
            return []
        self.activate(lane)
        self._owner.alarm(self, until)
        return self._owner.notes.settle(lane.key, begun, lane.began)

    def withdraw(self, queue_id: int, offset: int) -> None:
        """Undo `acknowledgement`: the atomic group was refused."""
        lane = self._lanes.get(queue_id)
        if lane is not None:
            lane.leases.end_settling(offset, done=False)

    def settled_atomically(self, queue_id: int, offsets: Sequence[int]) -> None:
        """Settle *offsets*: the atomic group that acknowledges them is readable."""
        lane = self._lanes.get(queue_id)
        if lane is None:
            return
        if self._owner.notes.must_note_settled(lane.key):
            self._owner.notes.note(lane.key, Change(ACK, offsets=offsets))
        for offset in offsets:
            holder = lane.leases.end_settling(offset, done=True)
            if holder is not None:
                self._give_credit(holder)
        self.account(lane)

    def _holder(self, queue_id: int, offset: int, generation: int) -> Hashable | None:
        lane = self._lane(queue_id)
        return lane.leases.holder(offset, generation) if lane is not None else None

    def _give_credit(self, holder: Hashable, count: int = 1) -> None:
        member = self._by_holder.get(holder)
        if member is not None:
            member.add_credit(count)

    def _settle(self, lane: ShareLane, holder: Hashable, offset: int) -> bool:
        if not lane.leases.ack(holder, offset):
            return False
        self._owner.notes.ack(lane.key, (offset,))
        self._give_credit(holder)
        if lane.in_order and not lane.is_blocked:
            self.wake()
        return True

    def _was_settled(self, lane: ShareLane, offsets: Sequence[int], holders: Mapping[Hashable, int]) -> None:
        """Note that messages were settled, so many of each of *holders*; `account` follows with the commit."""
        self._owner.notes.ack(lane.key, offsets)
        for holder, count in holders.items():
            self._give_credit(holder, count)
        if lane.in_order and not lane.is_blocked:
            self.wake()

    def account(self, lane: ShareLane) -> None:
        """Count what was leased and settled since the last call, and commit the group's offset."""
        leases = lane.leases
        size, before = leases.size, lane.counted
        if size != before:
            lane.counted = size
            self._owner.settled(before - size)
            if size < leases.window <= before:
                self.wake()
        if leases.low != lane.low:
            lane.low = leases.low
            self._commit_offset(lane.queue.queue_id, lane.low)

    def _commit_offset(self, queue_id: int, offset: int) -> None:
        if self.policy is None:
            self._owner.groups.commit(self.group, self.topic.name, queue_id, offset)

    # time and dead letters

    def deadline(self) -> float:
        """Return when `tick` is due next."""
        forget_at = math.inf if self._members or self._look_at < math.inf else self._forget_at
        return min(forget_at, self._look_at, self._stalled_at, self._timers[0][0] if self._timers else math.inf)

    def tick(self, now: float, most: int = LAPSED_A_TURN) -> int:
        """Take back about *most* messages whose lease ended, and store dead letters; return what is left of *most*.

        If nothing is left, it must be called again.
        """
        back = 0
        lost: list[Hashable] = []
        self._look_at = math.inf
        if not (self._members or self._is_stored):
            self._look_at = now + STORED_S
            self._owner.notes.try_again()
        if self._unopened:
            most -= self._open_lane(next(iter(self._unopened))).leases.size
            self._owner.alarm(self, -math.inf)
        for lane in self._take_due(now):
            before = lane.leases.looked_at
            back += lane.leases.lapse(now, lost, most)
            most -= lane.leases.looked_at - before
            self.activate(lane)
            if most <= 0:
                break
        for lane in list(self._dead):
            if most <= 0:
                self._owner.alarm(self, -math.inf)
                break
            most -= self._dead_letters(lane, max(most // DEAD_LETTER_TURNS, 1)) * DEAD_LETTER_TURNS
            if not lane.leases.has_dead:
                self._dead.pop(lane, None)
        for holder in lost:
            member = self._by_holder.get(holder)
            if member is not None:
                member.lapsed += 1
        if now >= self._stalled_at:
            self._stalled_at = math.inf
            if any(member.woken for member in self._members):
                back += self._has_more()
        if back:
            self.wake()
        return most

    def _take_due(self, now: float) -> Iterator[ShareLane]:
        """Yield each lane that has a timer up to *now*; the caller activates it, which sets its next timer."""
        while self._timers and self._timers[0][0] <= now:
            at, queue_id = heapq.heappop(self._timers)
            lane = self._lanes.get(queue_id)
            if lane is not None and at == lane.timer_at:
                lane.timer_at = math.inf
                yield lane

    def _dead_letters(self, lane: ShareLane, most: int) -> int:
        """Store dead letters for dead messages of *lane*, at most *most*; return how many there were."""
        owner, count = self._owner, 0
        for offset in lane.leases.dead():
            if offset in lane.unflushed or (lane, offset) in owner.far_dead:
                continue
            if count == most:
                owner.alarm(self, -math.inf)
                break
            count += 1
            if not self._dead_letter(lane, offset):
                break
        return count

    def _dead_letter(self, lane: ShareLane, offset: int) -> bool:
        """Copy a dead message to the dead letter topic; settle it once the copy is readable.

        Returns False if the store refuses it now.
        """
        owner = self._owner
        result = owner.store.read_near(lane.queue, offset, 1, 1)
        if result is None:
            owner.far_dead[lane, offset] = None
            return True
        self._store_dead_letter(lane, offset, result)
        return offset in lane.unflushed or not lane.leases.is_dead(offset)

    async def dead_letter_far(self, lane: ShareLane, offset: int) -> None:
        """As `_dead_letter`, for a message that is read in a thread."""
        leases = lane.leases
        result = await self._owner.store.read_far(lane.queue, offset, 1, 1)
        alive = self._lanes.get(lane.queue.queue_id) is lane and lane.leases is leases
        if alive and leases.is_dead(offset) and offset not in lane.unflushed:
            self._store_dead_letter(lane, offset, result)

    def _store_dead_letter(self, lane: ShareLane, offset: int, result: ReadResult) -> None:
        owner = self._owner
        if not result.count or result.next_offset != offset + 1:
            self._settle_dead(lane, offset)  # retention removed it
            return
        topic = self.policy.dead_letters if self.policy is not None else DLQ_PREFIX + self.group
        if not topic:
            self._settle_dead(lane, offset)
            return
        try:
            end = put_dead_letter(owner.store, owner.topics, topic, decode_record(b"".join(result.pieces)))
        except (Refused, StoreError) as error:
            self._dead_letter_failed(lane, offset, error)
            return
        lane.unflushed[offset] = end
        owner.unflushed_lanes[lane] = None
        self.settle_flushed(lane)

    def settle_flushed(self, lane: ShareLane) -> None:
        """Settle dead messages of *lane* whose dead letters are flushed; `Shares.run` calls this after each flush."""
        owner, unflushed = self._owner, lane.unflushed
        while unflushed:
            offset, end = next(iter(unflushed.items()))
            if end > owner.store.readable:
                return
            del unflushed[offset]
            owner.dead_letters += 1
            self._settle_dead(lane, offset)
        owner.unflushed_lanes.pop(lane, None)

    def _dead_letter_failed(self, lane: ShareLane, offset: int, error: Refused | StoreError) -> None:
        """Retry later; if the error is permanent, log it and settle the message without a dead letter."""
        owner = self._owner
        if not (isinstance(error, CorruptRecord) or (isinstance(error, Refused) and error.reason in NEVER_STORED)):
            owner.alarm(self, owner.now() + DEAD_LETTER_RETRY_S)
            return
        owner.dead_without_letter += 1
        log.error(
            "message %d of queue %d of topic[%s] has no dead letter although group %r gave it up, read it there; %s",
            offset,
            lane.queue.queue_id,
            self.topic.name,
            self.group,
            error,
        )
        self._settle_dead(lane, offset)

    def _settle_dead(self, lane: ShareLane, offset: int) -> None:
        lane.leases.settle_dead(offset)
        self._owner.notes.ack(lane.key, (offset,))
        self.account(lane)
        self.wake()


def _alike(leases: Mapping[int, LeaseState], first: int) -> Iterator[tuple[LeaseState, list[int]]]:
    """Yield leases from offset *first* on in ascending order, those together that follow each other and are alike."""
    found: list[int] = []
    state: LeaseState | None = None
    for offset in sorted(leases):
        if offset < first:
            continue
        each = leases[offset]
        if each is not state:
            if state is not None:
                yield state, found
            state, found = each, []
        found.append(offset)
    if state is not None:
        yield state, found


def _in_ms(lease_s: float) -> int:
    """Return the duration of a lease in ms; 0 for one without end, which ends at a restart."""
    return round(lease_s * 1000) if lease_s < math.inf else 0
