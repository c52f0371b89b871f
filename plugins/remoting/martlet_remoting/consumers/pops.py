"""POP consumption: groups that pop topics, and their requests that wait for messages.

A group on a topic is one shared group of the core (`martlet.groups.shared_groups`), in which `PopGroup` is one member
for all consumers: a pop leases messages for a time that it chooses, and a message can be acknowledged with its handle
over any connection. So leases survive the end of a connection.

A pop that finds no message waits here. When messages arrive or return, the core wakes the member, which calls the next
pop: client addresses take turns, and within an address the pop that has waited longest is next. If messages are left,
the core wakes the member once more. A pop that arrives meanwhile waits for its turn too, so a client that pops all the
time takes no messages from one that waits. If a connection does not collect after it was woken, because its client
reads slowly, the next pop is called after `STALL_S`.

RocketMQ puts popped messages that were not acknowledged into a retry topic of the group and topic. In a store that
RocketMQ has used, the group pops these topics as well (`PopGroup.retries`), before its own.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterator
from typing import Any, Final, TypeAlias, final

from martlet.access import Gate, Login
from martlet.broker import Broker
from martlet.contracts import Buffer, Peer
from martlet.delivery.fanout import Encoding
from martlet.delivery.routing.selection import EVERYTHING, Selection
from martlet.delivery.subscriptions import Delivery, MemberPeer, Start, from_earliest
from martlet.errors import LocalProtocolError, Reason, Refused
from martlet.groups.group import SharedGroup
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.records.layout import I32
from martlet.tables.topics import READ, RETRY_PREFIX, Topic
from martlet_remoting.consumers.timeouts import Timeouts
from martlet_remoting.wire.pop_handles import retry_topics

__all__ = ["ANY_QUEUE", "PendingPops", "Pop", "PopGroup", "PopGroups", "split_records"]

log = logging.getLogger("martlet.remoting")

ANY_QUEUE: Final = -1
STALL_S: Final = 0.25
# A `PopGroup` without pops for this long leaves the shared group, whose state remains.
IDLE_S: Final = 60.0
PORT_BYTES: Final = 4
# A queue id, or the one for any queue, and whether its messages are popped in order.
Line: TypeAlias = tuple[int, bool]
# The holder of all popped messages, for all clients with handles.
HOLDER: Final = "popped"


def split_records(records: Buffer) -> list[bytes]:
    """Return the stored bytes of each of *records*."""
    data, pieces, start = bytes(records), [], 0
    while start < len(data):
        end: int = start + I32.unpack_from(data, start)[0]
        pieces.append(data[start:end])
        start = end
    return pieces


STORED: Final = Encoding("rocketmq", split_records)


@final
class _Taker:
    """Takes messages for one pop at a time (a `martlet.groups.queues.group_members.GroupMember`)."""

    __slots__ = ("acknowledges", "credit", "encoding", "holder", "lapsed", "lease_s", "peer", "woken")

    def __init__(self) -> None:
        self.peer: MemberPeer
        self.acknowledges = True
        self.encoding = STORED
        self.holder: Hashable = HOLDER
        self.lease_s = 0.0
        self.credit = 0
        self.lapsed = 0
        self.woken = False

    @property
    def is_exclusive(self) -> bool:
        return False

    @property
    def is_full(self) -> bool:
        return False  # no message is kept for it

    @property
    def takes(self) -> None:
        return None  # takes messages of any name

    @property
    def asks(self) -> bool:
        return False  # a client that may read a whole topic may read all its names

    def may_get(self, name: str) -> bool:
        return True

    def keep(self, name: str, delivery: Delivery) -> None:
        raise LocalProtocolError("a pop takes what it reads, and nothing for others")

    def add_credit(self, count: int) -> None:
        self.credit += count

    def wake(self) -> None:
        self.peer.wake()


@final
class Pop:
    """A POP_MESSAGE request without an answer yet; with *count_max* 0 it is a NOTIFICATION, which takes no messages."""

    __slots__ = (
        "address",
        "attempt",
        "bucket",
        "count_max",
        "gate",
        "group",
        "in_order",
        "invisible_ms",
        "is_counted",
        "is_queued",
        "must_answer",
        "name",
        "opaque",
        "pending",
        "queue_id",
        "refused",
        "selection",
        "topic",
        "until",
    )

    def __init__(
        self, pending: "PendingPops", gate: Gate, opaque: int, name: str, topic: str, queue_id: int, *, in_order: bool
    ) -> None:
        self.bucket = -1
        self.pending = pending
        self.address = bytes(pending.peer.host[:-PORT_BYTES])
        self.gate = gate  # checked again before a pop that waited is answered
        self.opaque = opaque
        self.name = name
        self.topic = topic
        self.queue_id = queue_id
        self.in_order = in_order
        self.attempt = ""  # the client's id of the pop, if it may repeat the pop
        self.count_max = 0
        self.invisible_ms = 0
        self.selection = EVERYTHING
        self.until = 0.0  # trio.current_time at which the wait ends
        self.must_answer = False  # the pop must be answered now
        self.is_counted = False  # the pop counts as waiting
        self.is_queued = False  # the pop is in `PendingPops.ready`
        self.refused: Refused | None = None  # its login or its permission ended while it waited
        self.group: PopGroup | None = None  # while the pop waits in it, or was called by it

    def expire(self) -> None:
        self.must_answer = True
        self.pending.call(self)

    def refuse(self, refused: Refused) -> None:
        """Answer with *refused* at the next collect, if the pop waits."""
        if self in self.pending.held:
            self.refused = refused
            self.pending.call(self)

    def recheck(self) -> None:
        """Let the pop run now if it waits and is no longer permitted: the next collect refuses it."""
        try:
            self.gate.consume(self.name, self.topic)
        except Refused as refused:
            self.refuse(refused)


@final
class PendingPops:
    """The pops of one connection: waiting ones, and ready ones, to run at the next collect."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.held: dict[Pop, None] = {}  # waiting pops
        self.ready: deque[Pop] = deque()  # pops to run at the next collect

    def call(self, pop: Pop) -> None:
        """Let *pop* run at the next collect."""
        if pop.group is not None:
            pop.group.take(pop)
        if not pop.is_queued:
            pop.is_queued = True
            self.ready.append(pop)
        self.peer.wake()


@final
class WaitingPops:
    """Pops that wait for the same queue: client addresses take turns, with the pops of each in order of arrival."""

    def __init__(self) -> None:
        self._by_address: dict[bytes, dict[Pop, None]] = {}  # the next address first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Pop]:
        for pops in self._by_address.values():
            yield from pops

    def add(self, pop: Pop) -> None:
        self._by_address.setdefault(pop.address, {})[pop] = None
        self._count += 1

    def remove(self, pop: Pop) -> bool:
        """Remove *pop*; return whether it was waiting here."""
        pops = self._by_address.get(pop.address)
        if pops is None or pops.pop(pop, pop) is not None:
            return False
        if not pops:
            del self._by_address[pop.address]
        self._count -= 1
        return True

    def next(self) -> Pop:
        """Return the pop whose turn it is."""
        return next(iter(self))

    def end_turn(self, address: bytes) -> None:
        """Move *address* after all other addresses."""
        pops = self._by_address.pop(address, None)
        if pops is not None:
            self._by_address[address] = pops

    def surplus(self, address: bytes) -> Pop | None:
        """Return the newest pop of the address with the most pops; None if *address* would not have fewer pops."""
        most = max(self._by_address.values(), key=len, default={})
        fewer = len(self._by_address.get(address, ())) + 1 < len(most)
        return next(reversed(most)) if fewer else None


@final
class PopGroup:
    """One group that pops one topic, and its waiting pops by queue."""

    __slots__ = (
        "_called_pops",
        "_has_reading_pop",
        "_now",
        "_taker",
        "_timeouts",
        "bucket",
        "heir",
        "member",
        "retries",
        "used_at",
        "waiting",
    )

    def __init__(self, timeouts: Timeouts, now: Callable[[], float]) -> None:
        self.bucket = -1
        self._timeouts = timeouts
        self._now = now
        self._taker = _Taker()
        self._called_pops: dict[Pop, None] = {}  # pops that were called and have not run since
        self._has_reading_pop = False  # whether a pop waits for a thread that reads
        self.member: Member | None = None
        self.used_at = now()
        # The same group on RocketMQ's retry topics of this topic; in a `PopGroup` of a retry topic, the one of the
        # original topic.
        self.retries: list[PopGroup] = []
        self.heir: PopGroup | None = None
        # Waiting pops by queue and order.
        self.waiting: dict[Line, WaitingPops] = {}

    @property
    def shared_group(self) -> SharedGroup:
        assert self.member is not None
        return self.member.group

    def take(self, pop: Pop) -> None:
        """Remove *pop* from the waiting pops."""
        key = pop.queue_id, pop.in_order
        line = self.waiting.get(key)
        if line is not None and line.remove(pop):
            if not line:
                del self.waiting[key]
            self._add_credit(-1)
        self._called_pops.pop(pop, None)

    def park(self, pop: Pop) -> None:
        """Let *pop* wait until it is called."""
        pop.group = self
        self._called_pops.pop(pop, None)
        self.waiting.setdefault((pop.queue_id, pop.in_order), WaitingPops()).add(pop)
        self._add_credit(1)

    def _add_credit(self, change: int) -> None:
        for group in (self, *self.retries):
            assert group.member is not None
            group.member.credit += change

    @property
    def has_called_pops(self) -> bool:
        """Whether a called pop has not run since."""
        return bool(self._called_pops)

    def _open_retries(self) -> list["PopGroup"]:
        return [group for group in self.retries if not group.shared_group.gone]

    def is_ready(self, queue_id: int, *, in_order: bool, attempt: str = "") -> bool:
        """Return whether there may be messages for a pop of this queue."""
        if not in_order and any(group.shared_group.distribution.is_ready() for group in self._open_retries()):
            return True
        return self.shared_group.distribution.is_ready(queue_id, in_order=in_order, attempt=attempt)

    def is_reading(self, queue_id: int, *, in_order: bool) -> bool:
        """Return whether a thread reads messages for a pop of this queue."""
        if not in_order and any(group.shared_group.distribution.is_reading() for group in self._open_retries()):
            return True
        return self.shared_group.distribution.is_reading(queue_id)

    def hand_out(self, pop: Pop, count_max: int, budget_bytes: int) -> tuple["PopGroup", list[Delivery]]:
        """Lease messages for *pop*: at most *count_max*, and about *budget_bytes*.

        All messages are of one topic; the first result is the group on that topic.
        """
        self.used_at = self._now()
        for group in self._open_retries() if not pop.in_order else ():
            if not group.shared_group.distribution.is_ready():
                continue
            if deliveries := group.lease(pop, ANY_QUEUE, count_max, budget_bytes):
                return group, deliveries
        return self, self.lease(pop, pop.queue_id, count_max, budget_bytes)

    def lease(self, pop: Pop, queue_id: int, count_max: int, budget_bytes: int) -> list[Delivery]:
        """Lease messages of this topic for *pop*."""
        taker = self._taker
        taker.peer = pop.pending.peer
        taker.lease_s = pop.invisible_ms / 1000
        taker.credit = count_max
        try:
            distribution = self.shared_group.distribution
            return distribution.hand_out(taker, budget_bytes, queue_id, in_order=pop.in_order, attempt=pop.attempt)
        finally:
            taker.peer = self

    def wake(self) -> None:
        """Call the next pop of each queue that has messages; call all pops if they must be refused."""
        if self.member is None:
            return  # the group is joining, and no pop waits
        self.member.woken = False
        if self.heir is not None:
            self.heir.wake()
        if self.shared_group.gone:
            self.call_all()
            return
        for queue_id, in_order in list(self.waiting):
            if self.is_ready(queue_id, in_order=in_order):
                line = self.waiting[queue_id, in_order]
                pop = line.next()
                pop.pending.call(pop)
                line.end_turn(pop.address)
                self._called_pops[pop] = None
        if self._called_pops:
            self._set_timer()

    def _set_timer(self) -> None:
        if self.bucket < 0:
            self._timeouts.add(self, self._now() + STALL_S)

    def look_again(self) -> None:
        """Call pops again after a while: a connection that reads for its pop may close, or have too many tasks."""
        self._has_reading_pop = True
        self._set_timer()

    def call_all(self) -> None:
        """Call all waiting pops."""
        for line in list(self.waiting.values()):
            for pop in list(line):
                pop.pending.call(pop)

    def start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Refuse the work: connections run the work for their own pops."""
        raise Refused(Reason.BUSY, "a group that pops runs no tasks of its own; the connection of a pop does")

    def expire(self) -> None:
        """Call the next pops if called ones have not run, or wait for a thread."""
        has_called, has_reading_pop, self._has_reading_pop = bool(self._called_pops), self._has_reading_pop, False
        self._called_pops.clear()
        if has_reading_pop:
            for line in list(self.waiting.values()):
                pop = line.next()
                pop.pending.call(pop)
        elif has_called:
            self.wake()


@final
class PopGroups:
    """All groups that pop, and the limits of their waiting pops."""

    def __init__(
        self, broker: Broker, timeouts: Timeouts, now: Callable[[], float], waiting_max: int, line_max: int
    ) -> None:
        self._broker = broker
        self._timeouts = timeouts
        self._now = now
        self._waiting_max = waiting_max
        self._line_max = line_max
        self._groups: dict[tuple[str, str], PopGroup] = {}
        self.waiting = 0
        self.stopping = False
        # Notified before the shared groups, which keep a deleted group while it has members.
        broker.groups.changed.insert(0, self._leave_deleted_group)
        broker.groups.offsets.was_reset.append(self._call_after_reset)
        broker.topics.changed.append(self._leave_deleted_topics)

    def find(self, name: str, topic: str) -> PopGroup | None:
        """Return group *name* on *topic* if a client has popped lately and the group may still do so."""
        group = self._groups.get((name, topic))
        return group if group is not None and not group.shared_group.gone else None

    def open(self, pop: Pop, start: Start) -> PopGroup:
        """Return the group of *pop*, and set its selection to that of *pop*; a new group begins at *start*.

        Raises:
          Refused: the topic or the group may not be read, or there are too many groups.
        """
        selection = pop.selection
        group = self.find(pop.name, pop.topic)
        if group is None:
            group = self._join(pop, pop.topic, selection, start)
            self._open_retries(pop, group)
        elif pop.count_max and group.shared_group.source.selection.name != selection.name:
            if len(group.shared_group) > 1:
                text = f"group {pop.name!r} selects {group.shared_group.source.selection.name!r} of topic {pop.topic!r}"
                raise Refused(Reason.ILLEGAL, f"{text} over another protocol; use the same selection")
            group.shared_group.source.select(selection)
        return group

    def _join(self, pop: Pop, topic: str, selection: Selection, start: Start) -> PopGroup:
        old_group = self._groups.pop((pop.name, topic), None)
        if old_group is not None:
            self._leave(old_group)
        group = PopGroup(self._timeouts, self._now)
        group.member = pop.gate.join(
            group, topic, pop.name, STORED, Membership(lease_s=0.0, selection=selection, start=start)
        )
        group.member.ask_nothing()  # it is not the first pop's alone
        group.member.woken = False
        self._groups[pop.name, topic] = group
        return group

    def _open_retries(self, pop: Pop, group: PopGroup) -> None:
        """Let *group* pop RocketMQ's retry topics of its topic as well, if there are any."""
        for name in retry_topics(pop.topic, pop.name):
            # A topic named with "_" may also be the retry topic of a group, whose messages are for that group alone.
            topic, owner = self._broker.topics.get(name), name.removeprefix(RETRY_PREFIX)
            if topic is None or not topic.perm & READ or self._broker.groups.get(owner) is not None:
                continue
            try:
                retries = self.find(pop.name, name) or self._join(pop, name, EVERYTHING, from_earliest)
            except Refused as refused:
                log.warning("group %r cannot pop what RocketMQ left in topic[%s]; %s", pop.name, name, refused)
                continue
            retries.heir = group
            group.retries.append(retries)

    def shared_group(self, gate: Gate, name: str, topic: str) -> SharedGroup | None:
        """Return the shared group to settle messages by handle; None if the group has never consumed the topic."""
        group = self.find(name, topic)
        return group.shared_group if group is not None else gate.shared_group(topic, name)

    def count(self, name: str, topic: str, queue_id: int) -> int:
        """Return the number of pops that wait for that queue."""
        group = self.find(name, topic)
        if group is None:
            return 0
        return sum(len(group.waiting.get((queue_id, in_order), ())) for in_order in (False, True))

    def park(self, group: PopGroup, pop: Pop) -> bool:
        """Let *pop* wait; return False if too many pops wait already.

        In a full line, the address with the most pops loses one to an address that has fewer.
        """
        if not pop.is_counted:
            line = group.waiting.get((pop.queue_id, pop.in_order))
            surplus = None
            if line is not None and len(line) >= self._line_max:
                surplus = line.surplus(pop.address)
                if surplus is None:
                    return False
            if self.waiting >= self._waiting_max:
                return False
            if surplus is not None:
                surplus.expire()
            pop.is_counted = True
            self.waiting += 1
            pop.pending.held[pop] = None
            self._timeouts.add(pop, pop.until)
        group.park(pop)
        return True

    def waiting_pops(self) -> Iterator[Pop]:
        """Yield the pops that wait; more may come and go meanwhile."""
        for group in list(self._groups.values()):
            for line in list(group.waiting.values()):
                yield from list(line)

    def logins(self) -> Iterator[Login]:
        """Yield the identities of the pops that wait, and what ends each."""
        for pop in self.waiting_pops():
            yield pop.gate.identity, pop.refuse

    def done(self, pop: Pop) -> None:
        """Settle the answered *pop*."""
        if pop.group is not None:
            pop.group.take(pop)
        if pop.is_counted:
            pop.is_counted = False
            self.waiting -= 1
            pop.pending.held.pop(pop, None)
        if pop.bucket >= 0:
            self._timeouts.give_up(pop)

    def drop(self, pending: PendingPops) -> None:
        """Drop the pops of a closed connection, and call others in place of called ones."""
        called_pops = list(pending.ready)
        pending.ready.clear()
        for pop in (*called_pops, *pending.held):
            self.done(pop)
        for pop in called_pops:
            if pop.group is not None and not pop.group.shared_group.gone:
                pop.group.wake()

    def answer_all(self) -> None:
        """Let all pops run, and hold no more: at shutdown."""
        self.stopping = True
        for group in self._groups.values():
            group.call_all()

    def sweep(self) -> None:
        """Forget groups without pops for a while."""
        until = self._now() - IDLE_S
        for key, group in list(self._groups.items()):
            if not group.waiting and group.used_at <= until and group.heir is None:
                del self._groups[key]
                self._leave(group)

    def _leave(self, group: PopGroup) -> None:
        group.call_all()
        if group.bucket >= 0:
            self._timeouts.give_up(group)
        if group.heir is not None:
            group.heir.retries.remove(group)
            group.heir = None
        for retries in group.retries:
            retries.heir = None  # leaves when idle
        assert group.member is not None
        group.member.leave(keep=True)

    def _call_after_reset(self, name: str, topic: str) -> None:
        group = self.find(name, topic)
        if group is not None:
            group.call_all()

    def _leave_deleted_group(self, name: str) -> None:
        if self._broker.groups.get(name) is None:
            for key in [key for key in self._groups if key[0] == name]:
                self._leave(self._groups.pop(key))

    def _leave_deleted_topics(self, topic: Topic | None) -> None:
        if topic is None:  # a topic was deleted
            for key in [key for key in self._groups if self._broker.topics.get(key[1]) is None]:
                self._leave(self._groups.pop(key))

    def statistics(self) -> dict[str, object]:
        return {"popping_groups": len(self._groups), "waiting_pops": self.waiting}
