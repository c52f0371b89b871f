"""Shared groups: members compete for the messages of a topic, each is acknowledged by one.

`leases.py` knows who holds what; this reads the messages, hands them to members that
have credit, commits the group's offsets as messages are settled, takes back what dead or
silent members held, and buries in ``%DLQ%<group>`` what was delivered in vain as often as
the group's ``retryMaxTimes`` allows. What fails again and again waits longer each time.

A holder is any hashable: by default the member itself, else a name that outlives its connection.
Whoever knows a message's handle (queue, offset, generation) may settle it over any connection.
Every change is noted in the log (`group_state.py`), so a restart forgets neither acknowledgements
nor how often a message was delivered.

When messages arrive one member with credit is woken, and wakes the next one if it leaves some. One
that was woken and does not collect, since its client reads slowly, is passed over after `STALL_S`.
"""

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, final

import trio

from martlet.clock import Clock
from martlet.contracts import Peer
from martlet.delivery.fanout import Encoding, encode_result
from martlet.delivery.group_state import GroupNotes, GroupState, Lane
from martlet.delivery.lease_notes import ACK, AGAIN, BACK, NEW, RENEW, Change, Key, LeaseState
from martlet.delivery.leases import Leases
from martlet.delivery.redelivery import pause_ms
from martlet.delivery.selection import EVERYTHING, Selection
from martlet.delivery.subscriptions import Delivery, Start, from_tail, is_readable, readable
from martlet.delivery.tail_reader import Tails
from martlet.errors import CorruptRecord, Reason, Refused, StoreError, StoreFailed
from martlet.message import PROPERTIES_BYTES_MAX, Message, Record, find_property, put_property
from martlet.settings import DeliveryConfig
from martlet.state.journal import Journal
from martlet.store import Queue, QueueReader, ReadResult, Store
from martlet.store.codec import decode_record
from martlet.tables.groups import Groups
from martlet.tables.topics import DLQ_PREFIX, Topic, Topics

__all__ = ["GroupPolicy", "Member", "Share", "Shares"]

log = logging.getLogger("martlet.shares")

MESSAGES_A_READ: Final = 256
RETURNED_AHEAD: Final = 8  # of those that came back and are far behind the tail
UNREAD: Final = "unread"  # the place of a lane's reader for messages that nobody had; others are offsets that came back
DEAD_A_TURN: Final = 64  # far ones that are read before the clock is looked at again
RECONSUME_TIMES_MAX: Final = (1 << 31) - 1  # a record's field; a sender may begin there
STALL_S: Final = 0.1
SETTLING_S: Final = 60.0  # so long the outcome of an acknowledgement in an atomic group is waited for
RESTORED: Final = "an earlier run"  # the holder of what was handed out before the broker started
UNNOTED_MAX: Final = 4096  # messages that nobody selects and that are read again after a restart
REMEMBERED_TIMES: Final = 4  # delivery.leases_max, for the leases of groups that are not in memory
BURY_AGAIN_S: Final = 5.0  # when the dead letter topic refuses a message
# Why a dead letter is refused each time: the record, or a group name too long for a dead letter topic,
# which a table that RocketMQ wrote may hold.
NEVER: Final = frozenset((Reason.ILLEGAL, Reason.PARAMETER))


@final
@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """How a group that is no consumer group retries; its name may be any text, within *scope*.

    Args:
      scope: whose names these are, such as that of the protocol.
      retries_max: after so many deliveries in vain, and the first, a message is dead; -1 for no limit.
      dead_letters: the topic for dead messages; where it is empty they are dropped.
    """

    scope: str
    retries_max: int = -1
    dead_letters: str = ""


@final
class _Lane:
    """One queue as one group shares it."""

    __slots__ = ("began", "due", "failure", "graves", "key", "leases", "noted_next", "queue", "reader", "share")

    def __init__(self, share: "Share", queue: Queue, key: Key, leases: Leases) -> None:
        self.share = share
        self.queue = queue
        self.key = key
        self.leases = leases
        self.noted_next = leases.next
        self.began = leases.low
        self.due = True
        self.reader = QueueReader(share.store, self._was_read, RETURNED_AHEAD + 1)
        self.failure: Refused | None = None  # for the next member that collects
        # Offset -> log position behind its dead letter, which is not flushed yet; positions ascend.
        self.graves: dict[int, int] = {}

    def _was_read(self, place: Hashable) -> None:
        self.share.wake()

    def forget_read(self) -> None:
        """Drop what a thread has read: nobody is there for it, or others want something else."""
        self.failure = None
        self.reader.forget_all()

    @property
    def is_settling(self) -> bool:
        return self.leases.is_settling

    def state(self) -> tuple[int, list[tuple[int, LeaseState]]]:
        """The offset that comes next, and every unsettled message, as notes have them."""
        now, now_ms = self.share.times()
        found: list[tuple[int, LeaseState]] = []
        for offset, until, deliveries, generation in self.leases.unsettled_leases():
            ends_ms = now_ms + round((until - now) * 1000) if abs(until) < math.inf else 0
            found.append((offset, LeaseState(generation, max(ends_ms - generation, 0), deliveries)))
        self.noted_next = self.leases.next
        return self.leases.next, found


@final
class Member:
    """One peer in a shared group; ``credit`` is how many more messages it may hold.

    A message whose lease ends goes to another member. Its credit comes back only when this member is heard of
    again, because until then it may be dead. ``holder`` is who holds what this member gets.
    """

    __slots__ = ("_permit", "credit", "encoding", "holder", "lapsed", "lease_s", "peer", "share", "woken")

    def __init__(
        self,
        share: "Share",
        peer: Peer,
        encoding: Encoding,
        lease_s: float,
        credit: int,
        permit: Callable[[], None] | None,
        holder: Hashable = None,
    ) -> None:
        self._permit = permit
        self.share = share
        self.peer = peer
        self.encoding = encoding
        self.lease_s = lease_s
        self.credit = credit
        self.holder: Hashable = self if holder is None else holder
        self.lapsed = 0  # messages that it lost since it was last heard of
        self.woken = False  # and has not collected since

    def add_credit(self, count: int) -> None:
        """Allow this member to hold *count* more messages, and wake its peer."""
        self.credit += count
        self.wake()

    def wake(self) -> None:
        self.woken = True
        self.peer.wake()

    def collect(self, budget_bytes: int) -> list[Delivery]:
        """Return messages that this member holds from now on: at most ``credit``, and about *budget_bytes*.

        Raises:
          Refused: the filter failed, or reading is not allowed any more; leave the group.
        """
        self.woken = False
        if self._permit is not None:
            self._permit()
        return self.share.hand_out(self, budget_bytes) if self.credit > 0 else []

    def touch(self) -> None:
        """Note that the peer is alive, and give back the credit of messages whose lease ended meanwhile."""
        if self.lapsed:
            lapsed, self.lapsed = self.lapsed, 0
            self.add_credit(lapsed)

    def ack(self, queue_id: int, offset: int) -> bool:
        """Settle a message and give its credit back; False when this member does not hold it, or no longer."""
        if self.lapsed:
            self.touch()
        return self.share.ack_held(self.holder, queue_id, offset)

    def nack(self, queue_id: int, offset: int, delay_s: float = 0) -> bool:
        """Return a message that failed to the group; False when this member does not hold it.

        It is delivered again after *delay_s* or later: the more often it failed, the longer it waits.
        """
        self.touch()
        return self.share.nack_held(self.holder, queue_id, offset, delay_s)

    def extend(self, queue_id: int, offset: int) -> bool:
        """Start the lease of a message again; False when this member does not hold it."""
        self.touch()
        return self.share.renew_held(self.holder, queue_id, offset, self.lease_s) > 0

    def leave(self, *, keep: bool = False) -> None:
        """What this member holds goes to others: at once what it was the first to get, the rest after a pause.

        With *keep* it stays with its ``holder`` until the leases end, or somebody settles it.
        """
        self.share.leave(self, keep=keep)


@final
class Share:
    """One group on one topic.

    ``gone`` is set when the topic was deleted, or may not be read by this group any more, and all members
    are woken; their handlers then tell the peers and leave. ``ack``, ``nack``, ``renew`` and ``acknowledgement`` take a
    message's handle, whoever holds it: queue, offset and `Delivery.generation`.
    """

    __slots__ = (
        "_by_holder",
        "_forget_at",
        "_lanes",
        "_members",
        "_owner",
        "_stalled_at",
        "_tail",
        "_turn",
        "gone",
        "group",
        "policy",
        "selection",
        "start",
        "store",
        "topic",
    )

    def __init__(
        self,
        owner: "Shares",
        topic: Topic,
        group: str,
        selection: Selection,
        start: Start,
        policy: GroupPolicy | None = None,
    ) -> None:
        self._owner = owner
        self.store = owner.store
        self.topic = topic
        self.group = group
        self.policy = policy
        self.selection = selection
        self.start = start
        self.gone = False
        self._members: dict[Member, None] = {}
        self._by_holder: dict[Hashable, Member] = {}
        self._lanes: dict[int, _Lane] = {}
        self._turn = 0
        self._stalled_at = math.inf
        self._forget_at = owner.now() + owner.config.share_memory_s
        # A queue that came while the group was away begins at its beginning, as for one that stayed.
        known = any(owner.state.get(self.key(queue_id)) for queue_id in range(topic.read_queues))
        self.follow(topic, new=not (known or (policy is None and owner.groups.committed(group, topic.name))))
        self._tail = owner.tails.of(topic)
        self._tail.listen(self)

    def __len__(self) -> int:
        return len(self._members)

    def key(self, queue_id: int) -> Key:
        """How what is remembered of a queue is found."""
        return Key(self.policy.scope if self.policy is not None else "", self.group, self.topic.name, queue_id)

    def times(self) -> tuple[float, int]:
        """Now, as deadlines count, and as the wall clock says, in ms."""
        return self._owner.now(), self._owner.clock.now_ms()

    def idle(self, now: float) -> bool:
        """Whether this object may be dropped: no members, and nothing to remember or nobody who came back for it."""
        if self._members:
            return False
        return now >= self._forget_at or not any(lane.leases.size for lane in self._lanes.values())

    def follow(self, topic: Topic, *, new: bool = False) -> None:
        """Share all queues that *topic* has now."""
        self.topic = topic
        for queue_id in range(topic.read_queues):
            if queue_id not in self._lanes:
                queue, key = topic.queue(queue_id), self.key(queue_id)
                lane = self._lanes[queue_id] = _Lane(self, queue, key, self._make_leases(queue, key, new))
                self._owner.notes.open(key, lane)
                self.wake()

    def _make_leases(self, queue: Queue, key: Key, new: bool) -> Leases:
        owner = self._owner
        known = owner.state.get(key)
        offset = -1
        if self.policy is None:
            groups = owner.groups
            if groups.take_reset(self.group, key.topic, queue.queue_id) >= 0:
                known = None
            offset = groups.offset(self.group, key.topic, queue.queue_id)
        if known is not None and known.next > queue.next_offset:
            known = None  # it is about a topic that was deleted
        if known is not None:
            offset = max(offset, known.low)
        elif offset < 0:
            offset = self.start(queue) if new else queue.first_offset
        # A power cut can take messages that were committed, never what comes after them.
        offset = min(offset, queue.next_offset)
        retries = self._retries_max()
        # The first delivery is no retry.
        leases = Leases(offset, window=owner.config.lease_window, deliveries_max=retries + 1 if retries >= 0 else 0)
        if known is not None:
            self._restore(leases, known, offset)
        else:
            owner.notes.begin(key, offset)
        self._commit_offset(queue.queue_id, leases.low)
        return leases

    def _restore(self, leases: Leases, known: Lane, offset: int) -> None:
        """Give *leases* what is remembered from *offset* on."""
        now, now_ms = self.times()
        for each, state in sorted(known.leases.items()):
            if each >= offset:
                # A clock that was set back meanwhile makes no lease longer.
                left_ms = min(max(state.generation + state.duration_ms - now_ms, 0), state.duration_ms)
                leases.restore(RESTORED, each, now + left_ms / 1000, state.deliveries, state.generation)
        leases.skip_to(known.next)
        self._owner.unsettled += leases.size
        leases.lapse(now)
        self._owner.alarm(-math.inf)

    def _retries_max(self) -> int:
        if self.policy is not None:
            return self.policy.retries_max
        group = self._owner.groups.get(self.group)
        return group.retry_max_times if group is not None else 16

    def arrived_at(self, queue: Queue) -> None:
        """Records that may be wanted became readable."""
        lane = self._lanes.get(queue.queue_id)
        if lane is not None and lane.queue is queue:
            lane.due = True
            self.wake()

    def select(self, selection: Selection) -> None:
        """Hand out what *selection* wants from now on."""
        self._tail.leave(self)
        self.selection = selection
        self._tail = self._owner.tails.of(self.topic)
        self._tail.listen(self)
        for lane in self._lanes.values():
            lane.forget_read()

    def join(self, member: Member) -> None:
        self._members[member] = None
        self._by_holder[member.holder] = member
        member.wake()

    def leave(self, member: Member, *, keep: bool) -> None:
        if self._members.pop(member, self) is None:
            last = self._by_holder.get(member.holder) is member
            if last:
                del self._by_holder[member.holder]
            for lane in self._lanes.values():
                if last and not keep:
                    self._give_back(lane, member)
                if not self._members:
                    lane.forget_read()
            self._forget_at = self._owner.now() + self._owner.config.share_memory_s
            self._owner.alarm(-math.inf)
            self.wake()
            self._owner.forget_idle(self)

    def _give_back(self, lane: _Lane, member: Member) -> None:
        """Take back what *member* held. That it leaves is no failure of a message, that others left before may be."""
        leases = lane.leases
        for offset in leases.held(member.holder):
            self._return(lane, member.holder, offset, leases.deliveries(offset) - 1)

    def _return(self, lane: _Lane, holder: Hashable, offset: int, failures: int, delay_s: float = 0) -> bool:
        """Let a message be delivered again, after *delay_s* and later the more often it failed."""
        wait_s = max(delay_s, pause_ms(failures) / 1000)
        now, now_ms = self.times()
        at = now + wait_s if wait_s > 0 else -math.inf
        if not lane.leases.give_back(holder, offset, at):
            return False
        self._owner.notes.note(lane.key, Change(BACK, now_ms, round(wait_s * 1000), offsets=(offset,)))
        self._owner.alarm(-math.inf if lane.leases.is_dead(offset) else at)
        return True

    def wake(self) -> None:
        """Wake a member that has credit and was not woken yet, another one each time; all of them once it is over."""
        if self.gone:
            for member in list(self._members):
                member.wake()
            return
        members = list(self._members)
        self._turn = (self._turn + 1) % (len(members) or 1)
        ready = [each for each in members[self._turn :] + members[: self._turn] if each.credit > 0 and not each.woken]
        if not ready:
            return
        # Who lost a lease and was not heard of since may be dead.
        next((each for each in ready if not each.lapsed), ready[0]).wake()
        if self._stalled_at == math.inf and len(members) > 1:
            self._stalled_at = self._owner.now() + STALL_S
            self._owner.alarm(self._stalled_at)

    def close(self, *, forget: bool = False) -> None:
        """End it; members stay without messages. With *forget* nothing is remembered."""
        self._tail.leave(self)
        for lane in self._lanes.values():
            lane.reader.close()
            self._owner.settled(lane.leases.size)
            self._owner.mourned.pop(lane, None)
            if forget:
                self._owner.notes.drop(lane.key)
            else:
                self._owner.notes.close(lane.key)
        self._lanes.clear()

    # messages to members

    def hand_out(self, member: Member, budget_bytes: int) -> list[Delivery]:
        """Lease messages to *member*: first what came back, then new ones; queues take turns."""
        until = self._owner.now() + member.lease_s
        found: list[Delivery] = []
        lanes = list(self._lanes.values())
        self._turn += 1
        first = self._turn % (len(lanes) or 1)
        for lane in lanes[first:] + lanes[:first]:
            if member.credit <= 0 or budget_bytes <= 0:
                break
            try:
                for take in (self._fail, self._again, self._new):
                    deliveries = take(lane, member, budget_bytes, until)
                    budget_bytes -= sum(len(delivery.data) for delivery in deliveries)
                    found += deliveries
            except Refused as refused:
                if not found:
                    raise
                lane.failure = refused  # first what is found already
                member.peer.wake()
                break
        if found:
            self._owner.alarm(until)
            if any(lane.due or lane.leases.waiting for lane in lanes):
                self.wake()
        return found

    def _fail(self, lane: _Lane, member: Member, budget_bytes: int, until: float) -> list[Delivery]:
        """Raise what a read in a thread has raised."""
        failure, lane.failure = lane.failure, None
        if failure is not None:
            raise failure
        return []

    def _again(self, lane: _Lane, member: Member, budget_bytes: int, until: float) -> list[Delivery]:
        """Messages that came back."""
        found: list[Delivery] = []
        leases = lane.leases
        while leases.waiting and member.credit > 0 and budget_bytes > 0:
            result = self._read_again(lane, member, budget_bytes)
            if result is None:
                break
            offset, deliveries = leases.hand_again(member.holder, 1, until, self._owner.clock.now_ms())[0]
            if not result.count or result.next_offset != offset + 1:
                member.credit -= 1
                self._settle(lane, member.holder, offset)  # retention removed it
                continue
            generation = leases.generation(offset)
            self._owner.notes.note(lane.key, Change(AGAIN, generation, _in_ms(member.lease_s), offsets=(offset,)))
            batch = encode_result(result, offset, member.encoding)
            found.append(
                Delivery(lane.queue.queue_id, offset, offset + 1, 1, batch.data, batch, deliveries, generation)
            )
            member.credit -= 1
            budget_bytes -= len(batch.data)
        return found

    def _read_again(self, lane: _Lane, member: Member, budget_bytes: int) -> ReadResult | None:
        """Read the first message that came back; None when a thread has to read it, which wakes the members."""
        first = self._read_one(lane, member, lane.leases.returned(1)[0], budget_bytes)
        if first is None:
            offsets = lane.leases.returned(min(member.credit, RETURNED_AHEAD))
            lane.reader.keep_only((UNREAD, *offsets))
            for offset in offsets:
                self._read_one(lane, member, offset, budget_bytes)
        return first

    def _read_one(self, lane: _Lane, member: Member, offset: int, budget_bytes: int) -> ReadResult | None:
        start, selection = member.peer.start, self.selection
        return lane.reader.read(
            start, offset, lane.queue, offset, 1, budget_bytes, selection.codes, selection.predicate
        )

    def _new(self, lane: _Lane, member: Member, budget_bytes: int, until: float) -> list[Delivery]:
        """Messages that nobody had before."""
        self._reset_if_wanted(lane)
        leases, owner = lane.leases, self._owner
        room = min(leases.room, owner.room, member.credit, MESSAGES_A_READ)
        if not lane.due or room <= 0 or budget_bytes <= 0:
            return []
        start = leases.next
        result = self._read(lane, member, room, budget_bytes)
        if result is None:
            return []
        if result.next_offset <= start:
            lane.due = False
            return []
        lane.due = result.next_offset < lane.queue.next_offset
        before = leases.size
        batch = encode_result(result, start, member.encoding)
        generation = owner.clock.now_ms()
        leases.hand_out(member.holder, batch.offsets, until, generation)
        leases.skip_to(result.next_offset)
        owner.unsettled += leases.size - before
        if result.count or leases.next >= lane.noted_next + UNNOTED_MAX:
            offsets = batch.offsets if result.count else ()
            change = Change(NEW, generation, _in_ms(member.lease_s), leases.next, offsets, lane.noted_next)
            owner.notes.note(lane.key, change)
            lane.noted_next = leases.next
        self._commit(lane)
        if not result.count:
            if lane.due:
                self.wake()
            return []
        member.credit -= result.count
        queue_id, first = lane.queue.queue_id, batch.offsets[0]
        return [Delivery(queue_id, first, result.next_offset, result.count, batch.data, batch, 1, generation)]

    def _read(self, lane: _Lane, member: Member, count: int, budget_bytes: int) -> ReadResult | None:
        selection, start = self.selection, member.peer.start
        offset = lane.leases.next
        return lane.reader.read(
            start, UNREAD, lane.queue, offset, count, budget_bytes, selection.codes, selection.predicate
        )

    def _reset_if_wanted(self, lane: _Lane) -> None:
        """Begin anew where an administrator's reset of the group wants it."""
        owner = self._owner
        if self.policy is None and owner.groups.pending_reset(self.group, self.topic.name, lane.queue.queue_id) >= 0:
            owner.settled(lane.leases.size)
            for member in self._members:  # what they hold counts no more
                if held := len(lane.leases.held(member.holder)):
                    member.add_credit(held)
            lane.leases = self._make_leases(lane.queue, lane.key, new=False)
            lane.noted_next = lane.leases.next
            lane.began = lane.leases.low
            lane.graves.clear()
            lane.forget_read()
            owner.mourned.pop(lane, None)
            lane.due = True

    # messages from members, and from whoever has a handle

    def ack_held(self, holder: Hashable, queue_id: int, offset: int) -> bool:
        """Settle a message that *holder* holds; False when it does not."""
        lane = self._lanes.get(queue_id)
        return lane is not None and self._settle(lane, holder, offset)

    def nack_held(self, holder: Hashable, queue_id: int, offset: int, delay_s: float) -> bool:
        """Return a message that *holder* holds and that failed; False when it does not."""
        lane = self._lanes.get(queue_id)
        if lane is None or not self._return(lane, holder, offset, lane.leases.deliveries(offset), delay_s):
            return False
        self._give_credit(holder)
        self.wake()
        return True

    def renew_held(self, holder: Hashable, queue_id: int, offset: int, lease_s: float) -> int:
        """Let a lease of *holder* end *lease_s* from now; return its new generation, 0 when there is no such lease."""
        lane = self._lanes.get(queue_id)
        now, now_ms = self.times()
        if lane is None or not lane.leases.renew(holder, offset, now + lease_s, now_ms):
            return 0
        generation = lane.leases.generation(offset)
        self._owner.notes.note(lane.key, Change(RENEW, generation, _in_ms(lease_s), offsets=(offset,)))
        self._owner.alarm(now + lease_s)
        return generation

    def ack(self, queue_id: int, offset: int, generation: int) -> bool:
        """Settle a message by its handle; False when that is no longer valid."""
        holder = self._holder(queue_id, offset, generation)
        return holder is not None and self.ack_held(holder, queue_id, offset)

    def nack(self, queue_id: int, offset: int, generation: int, delay_s: float = 0) -> bool:
        """Return a message that failed by its handle, as `Member.nack`; False when that is no longer valid."""
        holder = self._holder(queue_id, offset, generation)
        return holder is not None and self.nack_held(holder, queue_id, offset, delay_s)

    def renew(self, queue_id: int, offset: int, generation: int, lease_s: float) -> int:
        """Let a lease end *lease_s* from now, earlier or later than before; return its new generation.

        That makes a new handle; the old one is no longer valid. 0 when *generation* was not.
        """
        holder = self._holder(queue_id, offset, generation)
        return self.renew_held(holder, queue_id, offset, lease_s) if holder is not None else 0

    def acknowledgement(self, queue_id: int, offset: int, generation: int) -> tuple[Journal, bytes]:
        """Return the acknowledgement of a message as a part of `Broker.publish_atomic`, to be called next.

        The message is settled when the group is readable. If it is not stored, call `withdraw`; if the commit fails
        the message comes back when its lease ends, within a minute.

        Raises:
          Refused: the handle is not valid (Reason.NOT_FOUND), or the store takes no writes just now.
        """
        lane, holder = self._lanes.get(queue_id), self._holder(queue_id, offset, generation)
        self.store.admission.check()
        until = self._owner.now() + SETTLING_S
        if lane is None or holder is None or not lane.leases.begin_settling(holder, offset, until):
            text = f"message {offset} of queue {queue_id} is not leased as {generation} by group {self.group!r}"
            raise Refused(Reason.NOT_FOUND, f"{text}; its lease may have ended")
        self._owner.alarm(until)
        return self._owner.notes.settle(lane.key, offset, lane.began)

    def withdraw(self, queue_id: int, offset: int) -> None:
        """Undo `acknowledgement`: the atomic group was refused."""
        lane = self._lanes.get(queue_id)
        if lane is not None:
            lane.leases.end_settling(offset, done=False)

    def settled_atomically(self, queue_id: int, offsets: Sequence[int]) -> None:
        """An atomic group that acknowledges *offsets* is readable."""
        lane = self._lanes.get(queue_id)
        if lane is None:
            return
        if self._owner.notes.must_note_settled(lane.key):
            self._owner.notes.note(lane.key, Change(ACK, offsets=offsets))
        before, full = lane.leases.size, lane.leases.room <= 0
        for offset in offsets:
            holder = lane.leases.end_settling(offset, done=True)
            if holder is not None:
                self._give_credit(holder)
        self._was_settled(lane, before, full)

    def _holder(self, queue_id: int, offset: int, generation: int) -> Hashable | None:
        lane = self._lanes.get(queue_id)
        return lane.leases.holder(offset, generation) if lane is not None else None

    def _give_credit(self, holder: Hashable) -> None:
        member = self._by_holder.get(holder)
        if member is not None:
            member.add_credit(1)

    def _settle(self, lane: _Lane, holder: Hashable, offset: int) -> bool:
        leases = lane.leases
        before = leases.size
        if not leases.ack(holder, offset):
            return False
        self._owner.notes.ack(lane.key, offset)
        self._give_credit(holder)
        self._was_settled(lane, before, before >= leases.window)
        return True

    def _was_settled(self, lane: _Lane, before: int, full: bool) -> None:
        size = lane.leases.size
        if size != before:
            self._owner.settled(before - size)
        self._commit(lane)
        if full and lane.leases.room > 0:
            self.wake()

    def _commit(self, lane: _Lane) -> None:
        if self.policy is None:
            self._owner.groups.commit(self.group, self.topic.name, lane.queue.queue_id, lane.leases.low)

    def _commit_offset(self, queue_id: int, offset: int) -> None:
        if self.policy is None:
            self._owner.groups.commit(self.group, self.topic.name, queue_id, offset)

    # time, and the dead

    def deadline(self) -> float:
        """When `tick` has something to do."""
        forget_at = math.inf if self._members else self._forget_at
        return min(forget_at, self._stalled_at, *(lane.leases.deadline() for lane in self._lanes.values()), math.inf)

    def tick(self, now: float) -> None:
        """Take back what is overdue, and bury the dead."""
        back = 0
        lost: list[Hashable] = []
        for lane in self._lanes.values():
            back += lane.leases.lapse(now, lost)
            for offset in lane.leases.dead():
                self._bury(lane, offset)
        for holder in lost:
            member = self._by_holder.get(holder)
            if member is not None:
                member.lapsed += 1
        if now >= self._stalled_at:
            self._stalled_at = math.inf
            if any(member.woken for member in self._members):
                back += any(lane.due or lane.leases.waiting for lane in self._lanes.values())
        if back:
            self.wake()

    def _bury(self, lane: _Lane, offset: int) -> None:
        """Copy a dead message to the dead letter topic; settle it once the copy is as safe as the flush mode says."""
        owner = self._owner
        if offset in lane.graves:
            return
        result = owner.store.read_near(lane.queue, offset, 1, 1)
        if result is not None:
            self._bury_read(lane, offset, result)
        else:
            owner.far_dead[lane, offset] = None

    async def bury_far(self, lane: _Lane, offset: int) -> None:
        """As `_bury`, read in a thread."""
        leases = lane.leases
        result = await self._owner.store.read_far(lane.queue, offset, 1, 1)
        alive = self._lanes.get(lane.queue.queue_id) is lane and lane.leases is leases
        if alive and leases.is_dead(offset) and offset not in lane.graves:
            self._bury_read(lane, offset, result)

    def _bury_read(self, lane: _Lane, offset: int, result: ReadResult) -> None:
        owner = self._owner
        if not result.count or result.next_offset != offset + 1:
            self._settle_dead(lane, offset)  # retention removed it
            return
        topic = self.policy.dead_letters if self.policy is not None else DLQ_PREFIX + self.group
        if not topic:
            self._settle_dead(lane, offset)
            return
        try:
            end = owner.put_dead_letter(topic, decode_record(b"".join(result.pieces)))
        except (Refused, StoreError) as error:
            self._not_buried(lane, offset, error)
            return
        lane.graves[offset] = end
        owner.mourned[lane] = None
        self.settle_flushed(lane)

    def settle_flushed(self, lane: _Lane) -> None:
        """Settle the dead of *lane* whose letters are flushed; `Shares.run` asks again at the next flush."""
        owner, graves = self._owner, lane.graves
        while graves:
            offset, end = next(iter(graves.items()))
            if end > owner.store.readable:
                return
            del graves[offset]
            owner.buried += 1
            self._settle_dead(lane, offset)
        owner.mourned.pop(lane, None)

    def _not_buried(self, lane: _Lane, offset: int, error: Refused | StoreError) -> None:
        """Try it again, unless it would be the same each time: then the group goes on, and the message stays unread."""
        owner = self._owner
        if not (isinstance(error, CorruptRecord) or (isinstance(error, Refused) and error.reason in NEVER)):
            owner.alarm(owner.now() + BURY_AGAIN_S)
            return
        owner.unburied += 1
        log.error(
            "message %d of queue %d of topic[%s] is dead in group %r and has no dead letter, read it where it is; %s",
            offset,
            lane.queue.queue_id,
            self.topic.name,
            self.group,
            error,
        )
        self._settle_dead(lane, offset)

    def _settle_dead(self, lane: _Lane, offset: int) -> None:
        before = lane.leases.size
        lane.leases.bury(offset)
        self._owner.notes.ack(lane.key, offset)
        self._owner.settled(before - lane.leases.size)
        self._commit(lane)
        self.wake()


def _in_ms(lease_s: float) -> int:
    """How long a lease holds; 0 for one that never ends by itself: after a restart nobody is there who holds it."""
    return round(lease_s * 1000) if lease_s < math.inf else 0


@final
class Shares:
    """All shared groups of a broker; `run` is their clock."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        groups: Groups,
        tails: Tails,
        journal: Journal,
        clock: Clock,
        config: DeliveryConfig,
        now: Callable[[], float] = trio.current_time,
    ) -> None:
        self.store = store
        self.groups = groups
        self.tails = tails
        self.clock = clock
        self.config = config
        self.now = now
        self.state = GroupState(journal.topic)
        self.state.settled = self._settled_atomically
        self.notes = GroupNotes(store, journal, self.state, config.share_queues_max)
        self.unsettled = 0
        self.buried = 0
        self.unburied = 0  # dead messages that no dead letter can hold
        self.mourned: dict[_Lane, None] = {}  # those with a dead letter that waits for a flush
        self.far_dead: dict[tuple[_Lane, int], None] = {}
        self._log_moved = False
        self._topics = topics
        self._shares: dict[tuple[str, str, str], Share] = {}
        self._wanted = math.inf
        self._rung = trio.Event()
        topics.changed.append(self._topic_changed)
        groups.changed.append(self._group_changed)
        groups.was_reset.append(self._was_reset)
        store.on_flushed.append(self._flushed)

    @property
    def room(self) -> int:
        """How many more messages may be out, or acknowledged behind one that is not."""
        return min(
            self.config.leases_max - self.unsettled, self.config.leases_max * REMEMBERED_TIMES - self.state.leases
        )

    def join(
        self,
        peer: Peer,
        topic: str,
        group: str,
        encoding: Encoding,
        *,
        lease_s: float,
        credit: int = 0,
        selection: Selection = EVERYTHING,
        start: Start = from_tail,
        permit: Callable[[], None] | None = None,
        policy: GroupPolicy | None = None,
        holder: Hashable = None,
    ) -> Member:
        """Make *peer* a member of *group* on *topic*.

        Args:
          peer: is woken when there is something to collect.
          topic: its name; it must exist.
          group: its name; without a *policy* a consumer group, created if the configuration allows that.
          encoding: makes frames of records.
          lease_s: how long the member may hold a message before it goes to another; infinity for as long as it stays.
          credit: how many messages it may hold at once.
          selection: which messages the group gets; the same for all members.
          start: where to begin in a queue that the group never consumed.
          permit: raises `Refused` once the peer may not read any more; called at each collect.
          policy: for a group that is no consumer group.
          holder: who holds the messages: any hashable but None, the member itself by default. Of two members with one
            holder the newer gets the credit of what is settled.

        Raises:
          Refused: there is no such topic or group, there are too many groups or members, or the other members
            select other messages.
        """
        share = self._open(topic, group, selection, start, policy)
        if share.selection.name != selection.name:
            if len(share):
                text = (
                    f"group {group!r} selects {share.selection.name!r} of topic {topic!r}; members must want the same"
                )
                raise Refused(Reason.ILLEGAL, text)
            share.select(selection)
        share.gone = False
        limit = self.config.share_members_max
        if len(share) >= limit:
            raise Refused(Reason.BUSY, f"group {group!r} has {limit} members; delivery.share_members_max is {limit}")
        member = Member(share, peer, encoding, lease_s, credit, permit, holder)
        share.join(member)
        return member

    def _open(self, topic: str, group: str, selection: Selection, start: Start, policy: GroupPolicy | None) -> Share:
        found = readable(self._topics, topic)
        if policy is None:
            self.groups.reader(group, topic)
            self.groups.check_may_commit(group, topic, range(found.read_queues))
        scope = policy.scope if policy is not None else ""
        share = self._shares.get((topic, group, scope))
        if share is not None:
            return share
        limit = self.config.shares_max
        if len(self._shares) >= limit:
            raise Refused(Reason.BUSY, f"{limit} shared groups are in use; delivery.shares_max is {limit}")
        self.notes.check_room([Key(scope, group, topic, queue_id) for queue_id in range(found.read_queues)])
        share = self._shares[topic, group, scope] = Share(self, found, group, selection, start, policy)
        self.alarm(self.now() + self.config.share_memory_s)
        return share

    def find(self, topic: str, group: str, policy: GroupPolicy | None = None) -> Share | None:
        """Return *group* on *topic*, to settle messages by their handles; None when it never consumed anything there.

        Raises:
          Refused: the topic is not there or not readable, or the group may not consume it.
        """
        scope = policy.scope if policy is not None else ""
        share = self._shares.get((topic, group, scope))
        if share is not None or self.state.get(Key(scope, group, topic, 0)) is None:
            return share
        return self._open(topic, group, EVERYTHING, from_tail, policy)

    def forget(self, topic: str, group: str, policy: GroupPolicy) -> None:
        """Drop what *group*, which is no consumer group, remembers of *topic*; members stay without messages."""
        share = self._shares.pop((topic, group, policy.scope), None)
        if share is not None:
            share.close(forget=True)
        self._drop(lambda key: key[:3] == (policy.scope, group, topic))

    def _drop(self, wanted: Callable[[Key], bool]) -> None:
        """Drop what is remembered of lanes that are not in memory."""
        for key in [key for key in self.notes.known() if wanted(key)]:
            if (key.topic, key.group, key.scope) not in self._shares:
                self.notes.drop(key)

    def put_dead_letter(self, name: str, record: Record) -> int:
        """Store a copy of *record* in the dead letter topic *name*; return the log position behind it.

        Property names as RocketMQ's SendMessageBackHook has them.

        Raises:
          Refused: not now, or (`NEVER`) never.
          StoreError: the store has failed.
        """
        topic = self._topics.ensure(name, 1)
        message = Message(
            topic.name,
            record.body,
            _letter_properties(record),
            0,
            record.flag,
            record.sys_flag,
            record.born_ms,
            record.born_host,
            min(record.reconsume_times + 1, RECONSUME_TIMES_MAX),
        )
        end = self.store.append(message, 0).end
        try:
            self.store.commit()
        except (Refused, StoreFailed) as error:
            # What others appended in this round was not stored either; their answers must not leave.
            self.store.committer.fail_next(error)
            raise
        return end

    def settled(self, count: int) -> None:
        """*count* messages need not be remembered any more."""
        full = self.unsettled >= self.config.leases_max
        self.unsettled -= count
        if full and self.unsettled < self.config.leases_max:
            for share in self._shares.values():
                share.wake()

    def forget_idle(self, share: Share) -> None:
        """Drop *share* when nothing is lost with it, or when nobody came back for long."""
        key = share.topic.name, share.group, share.key(0).scope
        # A deleted topic may be there again by now, with a share of its own.
        if self._shares.get(key) is share and share.idle(self.now()):
            del self._shares[key]
            share.close()

    def _topic_changed(self, topic: Topic | None) -> None:
        for key, share in list(self._shares.items()):
            if topic is not None and topic.name == key[0]:
                share.follow(topic)
                self._look(share)
            elif topic is None and self._topics.get(key[0]) is None:
                del self._shares[key]
                share.gone = True
                share.wake()
                share.close(forget=True)
        if topic is None:
            self._drop(lambda key: self._topics.get(key.topic) is None)

    def _group_changed(self, group: str) -> None:
        deleted = self.groups.get(group) is None and not self.groups.topics_of(group)
        for key, share in list(self._shares.items()):
            if share.group == group and share.policy is None:
                self._look(share)
                if deleted and not len(share):
                    del self._shares[key]
                    share.close(forget=True)
        if deleted:
            self._drop(lambda key: not key.scope and key.group == group)

    def _look(self, share: Share) -> None:
        """Whether *share* may still be read; what it remembers stays, for it may be allowed again."""
        may_read = share.policy is not None or self.groups.may_read(share.group, share.topic.name)
        share.gone = not (is_readable(share.topic) and may_read)
        if share.gone:
            share.wake()

    def _was_reset(self, group: str, topic: str) -> None:
        share = self._shares.get((topic, group, ""))
        if share is not None:
            share.wake()

    def _settled_atomically(self, key: Key, offsets: Sequence[int]) -> None:
        share = self._shares.get((key.topic, key.group, key.scope))
        if share is not None:
            share.settled_atomically(key.queue_id, offsets)

    def _flushed(self) -> None:
        if self.mourned:
            self._log_moved = True
            self._rung.set()

    def _settle_flushed(self) -> None:
        self._log_moved = False
        for lane in list(self.mourned):
            lane.share.settle_flushed(lane)
            self.forget_idle(lane.share)

    def alarm(self, at: float) -> None:
        """Let `run` look at the shares by *at*."""
        if at < self._wanted:
            self._wanted = at
            self._rung.set()

    async def run(self) -> None:
        """Take back what silent members hold too long, until cancelled."""
        # The broker may have been killed between a topic's deletion and the notes about it.
        self._drop(lambda key: self._topics.get(key.topic) is None)
        while True:
            if self._wanted > self.now() and not (self._log_moved or self.far_dead):
                with trio.move_on_at(self._wanted):
                    await self._rung.wait()
            self._rung = trio.Event()
            if self._log_moved:
                self._settle_flushed()
            now = self.now()
            if self._wanted <= now:
                self._wanted = math.inf
                for share in list(self._shares.values()):
                    share.tick(now)
                    self.forget_idle(share)
                self.alarm(min((share.deadline() for share in self._shares.values()), default=math.inf))
            await self._bury_far()

    async def _bury_far(self) -> None:
        """Bury some of the dead that are far behind the tail: for these the disk may have to be waited for."""
        for _ in range(min(DEAD_A_TURN, len(self.far_dead))):
            lane, offset = next(iter(self.far_dead))
            del self.far_dead[lane, offset]
            try:
                await lane.share.bury_far(lane, offset)
            except (OSError, StoreError) as error:
                log.error(
                    "a dead message of group %r cannot be read, again in %g s; %s",
                    lane.share.group,
                    BURY_AGAIN_S,
                    error,
                )
                self.alarm(self.now() + BURY_AGAIN_S)

    def statistics(self) -> dict[str, object]:
        return {
            "shares": len(self._shares),
            "members": sum(map(len, self._shares.values())),
            "unsettled": self.unsettled,
            "remembered": len(self.state),
            "remembered_leases": self.state.leases,
            "dead_letters": self.buried,
            "dead_without_letter": self.unburied,
        }


def _letter_properties(record: Record) -> bytes:
    """The properties of *record*'s dead letter: its own, and where it was as far as there is room for that."""
    # The store takes no U+0000, which a log that RocketMQ wrote may hold.
    properties = record.properties.replace(b"\x00", b"")
    origin_id = (record.store_host + record.position.to_bytes(8, "big")).hex().upper()
    for name, value in ((b"DLQ_ORIGIN_TOPIC", record.topic), (b"DLQ_ORIGIN_MESSAGE_ID", origin_id)):
        longer = properties if find_property(properties, name) else put_property(properties, name, value.encode())
        if len(longer) <= PROPERTIES_BYTES_MAX:
            properties = longer
    return properties
