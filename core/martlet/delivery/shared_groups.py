"""Shared groups: members compete for the messages of a topic, each is acknowledged by one.

`leases.py` knows who holds what; this reads the messages, hands them to members that
have credit, commits the group's offsets as messages are settled, takes back what dead or
silent members held, and buries in ``%DLQ%<group>`` what was delivered in vain as often as
the group's ``retryMaxTimes`` allows. What fails again and again waits longer each time.

Members may speak different protocols. What a group has settled above its committed
offset is forgotten by a restart: those messages are delivered once more.
"""

import logging
import math
from collections.abc import Callable, Hashable
from typing import Final, final

import trio

from martlet.contracts import Peer
from martlet.delivery.fanout import Encoding, encode_result
from martlet.delivery.leases import Leases
from martlet.delivery.redelivery import pause_ms
from martlet.delivery.selection import EVERYTHING, Selection
from martlet.delivery.subscriptions import Delivery, Start, from_tail, is_readable, readable
from martlet.delivery.tail_reader import unwatch, watch
from martlet.errors import CorruptRecord, Reason, Refused, StoreError, StoreFailed
from martlet.message import PROPERTIES_BYTES_MAX, Message, Record, find_property, put_property
from martlet.settings import DeliveryConfig
from martlet.store import Queue, QueueReader, ReadResult, Store
from martlet.store.codec import decode_record
from martlet.tables.groups import Groups
from martlet.tables.topics import DLQ_PREFIX, Topic, Topics

__all__ = ["Member", "Share", "Shares"]

log = logging.getLogger("martlet.shares")

MESSAGES_A_READ: Final = 256
RETURNED_AHEAD: Final = 8  # of those that came back and are far behind the tail
NEW: Final = "new"  # the place of a lane's reader for messages that nobody had; others are offsets that came back
DEAD_A_TURN: Final = 64  # far ones that are read before the clock is looked at again
RECONSUME_TIMES_MAX: Final = (1 << 31) - 1  # a record's field; a sender may begin there
BURY_AGAIN_S: Final = 5.0  # when the dead letter topic refuses a message
# Why a dead letter is refused each time: the record, or a group name too long for a dead letter topic,
# which a table that RocketMQ wrote may hold.
NEVER: Final = frozenset((Reason.ILLEGAL, Reason.PARAMETER))


@final
class _Lane:
    """One queue as one group shares it."""

    __slots__ = ("due", "failure", "graves", "leases", "queue", "reader", "share")

    def __init__(self, share: "Share", queue: Queue, leases: Leases) -> None:
        self.share = share
        self.queue = queue
        self.leases = leases
        self.due = True
        self.reader = QueueReader(share.store, self._was_read, RETURNED_AHEAD + 1)
        self.failure: Refused | None = None  # for the next member that collects
        # Offset -> log position behind its dead letter, which is not flushed yet; positions ascend.
        self.graves: dict[int, int] = {}

    def arrived(self, queue: Queue) -> None:
        self.due = True
        self.share.wake()

    def _was_read(self, place: Hashable) -> None:
        self.share.wake()

    def forget_read(self) -> None:
        """Drop what a thread has read: nobody is there for it, or others want something else."""
        self.failure = None
        self.reader.forget_all()


@final
class Member:
    """One peer in a shared group; ``credit`` is how many more messages it may hold.

    A message whose lease ends goes to another member. Its credit comes back only when this member is heard of
    again, because until then it may be dead.
    """

    __slots__ = ("_permit", "credit", "encoding", "lapsed", "lease_s", "peer", "share")

    def __init__(
        self,
        share: "Share",
        peer: Peer,
        encoding: Encoding,
        lease_s: float,
        credit: int,
        permit: Callable[[], None] | None,
    ) -> None:
        self._permit = permit
        self.share = share
        self.peer = peer
        self.encoding = encoding
        self.lease_s = lease_s
        self.credit = credit
        self.lapsed = 0  # messages that it lost since it was last heard of

    def add_credit(self, count: int) -> None:
        """Allow this member to hold *count* more messages, and wake its peer."""
        self.credit += count
        self.peer.wake()

    def collect(self, budget_bytes: int) -> list[Delivery]:
        """Return messages that this member holds from now on: at most ``credit``, and about *budget_bytes*.

        Raises:
          Refused: the filter failed, or reading is not allowed any more; leave the group.
        """
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
        self.touch()
        return self.share.ack(self, queue_id, offset)

    def nack(self, queue_id: int, offset: int, delay_s: float = 0) -> bool:
        """Return a message that failed to the group; False when this member does not hold it.

        It is delivered again after *delay_s* or later: the more often it failed, the longer it waits.
        """
        self.touch()
        return self.share.nack(self, queue_id, offset, delay_s)

    def extend(self, queue_id: int, offset: int) -> bool:
        """Start the lease of a message again; False when this member does not hold it."""
        self.touch()
        return self.share.extend(self, queue_id, offset)

    def leave(self) -> None:
        """What this member holds goes to others: at once what it was the first to get, the rest after a pause."""
        self.share.leave(self)


@final
class Share:
    """One group on one topic.

    ``gone`` is set when the topic was deleted, or may not be read by this group any more, and all members
    are woken; their handlers then tell the peers and leave.
    """

    __slots__ = (
        "_forget_at",
        "_lanes",
        "_members",
        "_owner",
        "_turn",
        "gone",
        "group",
        "selection",
        "start",
        "store",
        "topic",
    )

    def __init__(self, owner: "Shares", topic: Topic, group: str, selection: Selection, start: Start) -> None:
        self._owner = owner
        self.store = owner.store
        self.topic = topic
        self.group = group
        self.selection = selection
        self.start = start
        self.gone = False
        self._members: dict[Member, None] = {}
        self._lanes: dict[int, _Lane] = {}
        self._turn = 0
        self._forget_at = math.inf
        # A queue that came while the group was away begins at its beginning, as for one that stayed.
        self.follow(topic, new=not owner.groups.committed(group, topic.name))

    def __len__(self) -> int:
        return len(self._members)

    def idle(self, now: float) -> bool:
        """Whether this object may be forgotten: no members, and nothing to remember or nobody who came back for it."""
        if self._members:
            return False
        return now >= self._forget_at or not any(lane.leases.size for lane in self._lanes.values())

    def follow(self, topic: Topic, *, new: bool = False) -> None:
        """Share all queues that *topic* has now."""
        self.topic = topic
        for queue_id in range(topic.read_queues):
            if queue_id not in self._lanes:
                lane = _Lane(self, topic.queue(queue_id), self._make_leases(topic.queue(queue_id), new))
                self._lanes[queue_id] = lane
                watch(lane.queue, lane.arrived)
                self.wake()

    def _make_leases(self, queue: Queue, new: bool) -> Leases:
        owner = self._owner
        groups, topic = owner.groups, self.topic.name
        groups.take_reset(self.group, topic, queue.queue_id)
        offset = groups.offset(self.group, topic, queue.queue_id)
        if offset < 0:
            offset = self.start(queue) if new else queue.first_offset
        # A power cut can take messages that were committed, never what comes after them.
        offset = min(offset, queue.next_offset)
        groups.commit(self.group, topic, queue.queue_id, offset)
        group = groups.get(self.group)
        retries = group.retry_max_times if group is not None else 16
        # The first delivery is no retry.
        return Leases(offset, window=owner.config.lease_window, deliveries_max=retries + 1 if retries >= 0 else 0)

    def select(self, selection: Selection) -> None:
        """Hand out what *selection* wants from now on."""
        self.selection = selection
        for lane in self._lanes.values():
            lane.forget_read()

    def join(self, member: Member) -> None:
        self._members[member] = None
        member.peer.wake()

    def leave(self, member: Member) -> None:
        if self._members.pop(member, self) is None:
            for lane in self._lanes.values():
                self._give_back(lane.leases, member)
                if not self._members:
                    lane.forget_read()
            self._forget_at = self._owner.now() + self._owner.config.share_memory_s
            self._owner.alarm(-math.inf)
            self.wake()
            self._owner.forget_idle(self)

    def _give_back(self, leases: Leases, member: Member) -> None:
        """Take back what *member* held. That it leaves is no failure of a message, that others left before may be."""
        for offset in leases.held(member):
            leases.give_back(member, offset, self._not_before(leases.deliveries(offset) - 1))

    def _not_before(self, failures: int, delay_s: float = 0) -> float:
        """When a message that failed so often may be delivered again, in *delay_s* at the earliest."""
        wait_s = max(delay_s, pause_ms(failures) / 1000)
        return self._owner.now() + wait_s if wait_s > 0 else -math.inf

    def wake(self) -> None:
        """Wake every member that has credit, another one first each time."""
        members = list(self._members)
        self._turn = (self._turn + 1) % (len(members) or 1)
        for member in members[self._turn :] + members[: self._turn]:
            if member.credit > 0 or self.gone:
                member.peer.wake()

    def close(self) -> None:
        """Forget everything; members stay without messages."""
        for lane in self._lanes.values():
            unwatch(lane.queue, lane.arrived)
            lane.reader.close()
            self._owner.settled(lane.leases.size)
            self._owner.mourned.pop(lane, None)
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
            offset, deliveries = leases.hand_again(member, 1, until)[0]
            if not result.count or result.next_offset != offset + 1:
                self._settle(lane, member, offset)  # retention removed it
                continue
            batch = encode_result(result, offset, member.encoding)
            found.append(Delivery(lane.queue.queue_id, offset, offset + 1, 1, batch.data, batch, deliveries))
            member.credit -= 1
            budget_bytes -= len(batch.data)
        return found

    def _read_again(self, lane: _Lane, member: Member, budget_bytes: int) -> ReadResult | None:
        """Read the first message that came back; None when a thread has to read it, which wakes the members."""
        first = self._read_one(lane, member, lane.leases.returned(1)[0], budget_bytes)
        if first is None:
            offsets = lane.leases.returned(min(member.credit, RETURNED_AHEAD))
            lane.reader.keep_only((NEW, *offsets))
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
        room = min(leases.room, owner.config.leases_max - owner.unsettled, member.credit, MESSAGES_A_READ)
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
        leases.hand_out(member, batch.offsets, until)
        leases.skip_to(result.next_offset)
        owner.unsettled += leases.size - before
        self._commit(lane)
        if not result.count:
            if lane.due:
                self.wake()
            return []
        member.credit -= result.count
        return [Delivery(lane.queue.queue_id, batch.offsets[0], result.next_offset, result.count, batch.data, batch)]

    def _read(self, lane: _Lane, member: Member, count: int, budget_bytes: int) -> ReadResult | None:
        selection, start = self.selection, member.peer.start
        offset = lane.leases.next
        return lane.reader.read(
            start, NEW, lane.queue, offset, count, budget_bytes, selection.codes, selection.predicate
        )

    def _reset_if_wanted(self, lane: _Lane) -> None:
        """Begin anew where an administrator's reset of the group wants it."""
        owner = self._owner
        if owner.groups.pending_reset(self.group, self.topic.name, lane.queue.queue_id) >= 0:
            owner.settled(lane.leases.size)
            for member in self._members:  # what they hold counts no more
                if held := len(lane.leases.held(member)):
                    member.add_credit(held)
            lane.leases = self._make_leases(lane.queue, new=False)
            lane.graves.clear()
            lane.forget_read()
            owner.mourned.pop(lane, None)
            lane.due = True

    # messages from members

    def ack(self, member: Member, queue_id: int, offset: int) -> bool:
        lane = self._lanes.get(queue_id)
        if lane is None or not self._settle(lane, member, offset):
            return False
        member.add_credit(1)
        return True

    def nack(self, member: Member, queue_id: int, offset: int, delay_s: float) -> bool:
        lane = self._lanes.get(queue_id)
        if lane is None:
            return False
        at = self._not_before(lane.leases.deliveries(offset), delay_s)
        if not lane.leases.give_back(member, offset, at):
            return False
        self._owner.alarm(-math.inf if lane.leases.is_dead(offset) else at)
        member.add_credit(1)
        self.wake()
        return True

    def extend(self, member: Member, queue_id: int, offset: int) -> bool:
        lane = self._lanes.get(queue_id)
        return lane is not None and lane.leases.extend(member, offset, self._owner.now() + member.lease_s)

    def _settle(self, lane: _Lane, member: Member, offset: int) -> bool:
        before, full = lane.leases.size, lane.leases.room <= 0
        if not lane.leases.ack(member, offset):
            return False
        self._owner.settled(before - lane.leases.size)
        self._commit(lane)
        if full and lane.leases.room > 0:
            self.wake()
        return True

    def _commit(self, lane: _Lane) -> None:
        self._owner.groups.commit(self.group, self.topic.name, lane.queue.queue_id, lane.leases.low)

    # time, and the dead

    def deadline(self) -> float:
        """When `tick` has something to do."""
        forget_at = math.inf if self._members else self._forget_at
        return min(forget_at, *(lane.leases.deadline() for lane in self._lanes.values()), math.inf)

    def tick(self, now: float) -> None:
        """Take back what is overdue, and bury the dead."""
        back = 0
        lost: list[Hashable] = []
        for lane in self._lanes.values():
            back += lane.leases.lapse(now, lost)
            for offset in lane.leases.dead():
                self._bury(lane, offset)
        for member in lost:
            if isinstance(member, Member):
                member.lapsed += 1
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
        try:
            end = owner.put_dead_letter(self.group, decode_record(b"".join(result.pieces)))
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
        self._owner.settled(before - lane.leases.size)
        self._commit(lane)
        self.wake()


@final
class Shares:
    """All shared groups of a broker; `run` is their clock."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        groups: Groups,
        config: DeliveryConfig,
        now: Callable[[], float] = trio.current_time,
    ) -> None:
        self.store = store
        self.groups = groups
        self.config = config
        self.now = now
        self.unsettled = 0
        self.buried = 0
        self.unburied = 0  # dead messages that no dead letter can hold
        self.mourned: dict[_Lane, None] = {}  # those with a dead letter that waits for a flush
        self.far_dead: dict[tuple[_Lane, int], None] = {}
        self._log_moved = False
        self._topics = topics
        self._shares: dict[tuple[str, str], Share] = {}
        self._wanted = math.inf
        self._rung = trio.Event()
        topics.changed.append(self._topic_changed)
        groups.changed.append(self._group_changed)
        groups.was_reset.append(self._was_reset)
        store.on_flushed.append(self._flushed)

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
    ) -> Member:
        """Make *peer* a member of *group* on *topic*.

        Args:
          peer: is woken when there is something to collect.
          topic: its name; it must exist.
          group: its name; created if the configuration allows that.
          encoding: makes frames of records.
          lease_s: how long the member may hold a message before it goes to another.
          credit: how many messages it may hold at once.
          selection: which messages the group gets; the same for all members.
          start: where to begin in a queue that the group never consumed.
          permit: raises `Refused` once the peer may not read any more; called at each collect.

        Raises:
          Refused: there is no such topic or group, there are too many groups or members, or the other members
            select other messages.
        """
        found = readable(self._topics, topic)
        self.groups.reader(group, topic)
        self.groups.check_may_commit(group, topic, range(found.read_queues))
        share = self._shares.get((topic, group))
        if share is None:
            limit = self.config.shares_max
            if len(self._shares) >= limit:
                raise Refused(Reason.BUSY, f"{limit} shared groups are in use; delivery.shares_max is {limit}")
            share = self._shares[topic, group] = Share(self, found, group, selection, start)
        elif share.selection.name != selection.name:
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
        member = Member(share, peer, encoding, lease_s, credit, permit)
        share.join(member)
        return member

    def put_dead_letter(self, group: str, record: Record) -> int:
        """Store a copy of *record* in the dead letter topic of *group*; return the log position behind it.

        Property names as RocketMQ's SendMessageBackHook has them.

        Raises:
          Refused: not now, or (`NEVER`) never.
          StoreError: the store has failed.
        """
        topic = self._topics.ensure(DLQ_PREFIX + group, 1)
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
        key = share.topic.name, share.group
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
                share.close()

    def _group_changed(self, group: str) -> None:
        for share in self._shares.values():
            if share.group == group:
                self._look(share)

    def _look(self, share: Share) -> None:
        """Whether *share* may still be read; what it remembers stays, for it may be allowed again."""
        share.gone = not (is_readable(share.topic) and self.groups.may_read(share.group, share.topic.name))
        if share.gone:
            share.wake()

    def _was_reset(self, group: str, topic: str) -> None:
        share = self._shares.get((topic, group))
        if share is not None:
            share.wake()

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
