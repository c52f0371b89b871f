"""Shared groups: the members of a group compete for the messages of a topic; each message goes to one of them.

`queue_leases.py` tracks which holder has which message. A `SharedGroup` reads the messages, leases them to members with
credit, commits the group's offsets as messages are settled, and takes messages back from members that are dead or
silent; this module has all of them, and looks at those that are due. A message that failed as often as the group's
``retryMaxTimes`` allows is moved to ``%DLQ%<group>``. The pause before a redelivery grows with each failure.

A holder is any hashable: by default one that only the member has, otherwise a name that outlives its connection.
A message can be settled over any connection with its handle (queue, offset, generation).
Every change is noted in the log (`state.py`), so acknowledgements and delivery counts survive a restart.

When messages arrive, one member with credit is woken; if it leaves some, it wakes the next one. If a woken member does
not collect within `group_members.STALL_S`, because its client reads slowly, the next one is woken instead.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, final

import trio

from martlet.delivery.fanout import Encoding
from martlet.delivery.subscriptions import MemberPeer, is_readable, readable
from martlet.delivery.tail_reader import Tails
from martlet.errors import Reason, Refused
from martlet.groups.group import LAPSED_A_TURN, STORED_S, SharedGroup
from martlet.groups.handing_out.dead_letters import DeadLetters
from martlet.groups.journal.journal_codec import Key, LeaseState
from martlet.groups.journal.journal_writer import GroupJournalWriter
from martlet.groups.journal.state import GroupState
from martlet.groups.member import Member
from martlet.groups.membership import MemberPermit, Membership
from martlet.groups.queues.group_context import GroupContext
from martlet.groups.queues.group_queue import GroupQueue
from martlet.groups.strategy.policy import AUTO_DELETE, OWNS_TOPIC, GroupPolicy
from martlet.groups.unused_groups import UnusedGroups
from martlet.groups.user_limits import Place, UserGroups
from martlet.runtime.alarms import Alarms
from martlet.runtime.clock import Clock
from martlet.runtime.steps import Pace, Steps
from martlet.settings import DeliveryConfig
from martlet.state.journal import Journal
from martlet.store import Queue, Store
from martlet.tables.groups import Groups
from martlet.tables.topics import Topic, Topics

__all__ = ["SharedGroups"]

log = logging.getLogger("martlet.shares")

# Groups that one turn of the event loop looks at: 5 to 20 us each.
GROUPS_A_TURN: Final = 128
# Groups without members to look at for one that can be dropped from memory.
UNUSED_LOOKED_AT: Final = 256
# How often to look how far groups are that find their messages by names.
REACH_S: Final = 10.0
# Groups on a topic that a slice forgets, each with a few queues; queues of ended groups that a turn closes: 3 us each.
FORGOTTEN_A_SLICE: Final = 32
QUEUES_CLOSED_A_TURN: Final = 256
# The membership of a group that is opened for handles, before it has members.
NOBODY: Final = Membership(lease_s=0)
# The limit on leases in `GroupState`, which include those of groups not in memory, in units of delivery.leases_max.
REMEMBERED_TIMES: Final = 4


@final
class SharedGroups:
    """All shared groups of a broker; `run` ends their leases on time."""

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
        self.notes = GroupJournalWriter(store, journal, self.state, config.share_queues_max)
        self.unsettled = 0
        self.dead_letters = DeadLetters(self)
        self.withheld = 0  # messages that no member of a group was allowed to read
        self._log_moved = False
        self.topics = topics
        self._by_place: dict[Place, SharedGroup] = {}
        # The same by topic, and those of consumer groups by group; those without members.
        self._by_topic: dict[str, dict[SharedGroup, None]] = {}
        self._by_group: dict[str, dict[SharedGroup, None]] = {}
        self._empty: dict[SharedGroup, None] = {}
        self.users = UserGroups(config)
        self.unused = UnusedGroups(self)
        self._due: dict[GroupContext, None] = {}  # those to look at in this turn or the next ones, the first one first
        self._alarms: Alarms[GroupContext] = Alarms()
        self._to_wake: deque[SharedGroup] = deque()  # there is room for more messages that are not settled
        self._closing: deque[GroupQueue] = deque()  # queues of groups that ended
        self._reach_at = math.inf  # when to look how far groups are, and those not looked at yet
        self._to_reach: list[SharedGroup] = []
        self._look_at = math.inf  # when to look whether dropped queues are stored
        self._rung = trio.Event()
        topics.changed.append(self._topic_changed)
        topics.deleted.append(self._topic_deleted)
        topics.make_room = self.unused.make_room_for_topic
        groups.changed.append(self._group_changed)
        groups.was_reset.append(self._was_reset)
        store.on_flushed.append(self._flushed)

    @property
    def room(self) -> int:
        """How many more messages may be unsettled, or acknowledged after one that is unsettled."""
        return min(
            self.config.leases_max - self.unsettled, self.config.leases_max * REMEMBERED_TIMES - self.state.leases
        )

    def join(
        self,
        peer: MemberPeer,
        topic: str,
        group: str,
        encoding: Encoding,
        membership: Membership,
        policy: GroupPolicy | None = None,
        *,
        permit: MemberPermit | None = None,
        user: str | None = None,
    ) -> Member:
        """Make *peer* a member of *group* on *topic*.

        Args:
          peer: woken when there are messages to collect.
          topic: the name of an existing topic.
          group: its name; without a *policy* it is a consumer group, created if the configuration allows it.
          encoding: encodes records as frames.
          membership: what the member may hold; a new group begins as it says.
          policy: for a group that is not a consumer group.
          permit: decides at each `Member.collect` whether the member may read, and which messages; None for all.
          user: who has the member, for limits of one user; None for the broker itself.

        Raises:
          Refused: the topic or group does not exist, there are too many groups or members, or the other members use
            another selection.
        """
        shared_group = self._open(topic, group, policy, membership, user)
        _agree(shared_group, topic, group, membership)
        shared_group.gone = False
        limit = self.config.share_members_max
        if len(shared_group) >= limit:
            raise Refused(Reason.BUSY, f"group {group!r} has {limit} members; delivery.share_members_max is {limit}")
        member = Member(shared_group, peer, encoding, membership, permit)
        shared_group.join(member)
        self._empty.pop(shared_group, None)
        self.unused.joined(shared_group.context.place)
        return member

    def _open(
        self, topic: str, group: str, policy: GroupPolicy | None, first: Membership, user: str | None = None
    ) -> SharedGroup:
        """Return a group, which begins as *first* says if it is new. Raises `Refused`."""
        found = readable(self.topics, topic)
        if policy is None:
            self.groups.reader(group, topic)
            self.groups.check_may_commit(group, topic, range(found.read_queues))
        scope = policy.scope if policy is not None else ""
        shared_group = self._by_place.get((topic, group, scope))
        if shared_group is not None:
            return shared_group
        self._check_room(Key(scope, group, topic, 0), found.read_queues, user)
        begins = not self.state.known.count_of(scope, group, topic)
        marks = first.marks | self.unused.marks_of((topic, group, scope))
        shared_group = SharedGroup(GroupContext(self, found, group, policy, marks, user), self.dead_letters, first)
        self._add(shared_group)
        if begins:
            self.users.begin(shared_group.context.place, user, found.read_queues)
        if first.names is not None:
            self._reach_at = min(self._reach_at, self.now() + REACH_S)
        self.alarm(shared_group.context, -math.inf)
        return shared_group

    def _check_room(self, key: Key, queues: int, user: str | None) -> None:
        """Raise `Refused` (BUSY) unless *user* may use one more group, with so many *queues*."""
        limit = self.config.shares_max
        if user is not None and self.users.is_full(user):
            self._close_unused(user)
            self.users.check(user)
        if len(self._by_place) >= limit and not self._close_unused():
            raise Refused(Reason.BUSY, f"{limit} shared groups are in use; delivery.shares_max is {limit}")
        begins = not self.state.known.count_of(key.scope, key.group, key.topic)
        if not self.notes.has_room(key, queues) or (begins and not self.users.has_queues(user, queues)):
            self.unused.make_room(key.topic)
            self.notes.check_room(key, queues)
        if begins:
            self.users.check_queues(user, queues)

    def _add(self, shared_group: SharedGroup) -> None:
        """Keep *shared_group* in memory."""
        context = shared_group.context
        self._by_place[context.place] = shared_group
        self._by_topic.setdefault(context.topic.name, {})[shared_group] = None
        if context.policy is None:
            self._by_group.setdefault(context.group, {})[shared_group] = None
        self._empty[shared_group] = None
        self.users.add(context.user)

    def _remove(self, shared_group: SharedGroup) -> None:
        """Keep *shared_group* in memory no more."""
        context = shared_group.context
        del self._by_place[context.place]
        of_topic = self._by_topic[context.topic.name]
        del of_topic[shared_group]
        if not of_topic:
            del self._by_topic[context.topic.name]
        of_group = self._by_group.get(context.group, {}) if context.policy is None else {}
        of_group.pop(shared_group, None)
        if context.policy is None and not of_group:
            del self._by_group[context.group]
        self._empty.pop(shared_group, None)
        self._alarms.cancel(context)
        self.users.remove(context.user)

    def _close_unused(self, user: str | None = None) -> bool:
        """Drop one group without members, of *user* if given, from memory before its time; False if there is none."""
        for shared_group in islice(self._empty, UNUSED_LOOKED_AT):
            if shared_group.is_unused and user in (None, shared_group.context.user):
                self.close_unused(shared_group)
                return True
        return False

    def close_unused(self, shared_group: SharedGroup) -> None:
        """Drop *shared_group*, which has no members and is stored, from memory."""
        self._remove(shared_group)
        shared_group.close()

    def begin(self, topic: Topic, group: str, policy: GroupPolicy) -> None:
        """Note that *topic* was created for *group*, whose first member comes later, if ever.

        The group begins with the first message, and goes with the topic as others with `OWNS_TOPIC`. If half of the
        room for groups is used, which the others need, the topic belongs to nobody.
        """
        key, kept_free = Key(policy.scope, group, topic.name, 0), self.config.share_queues_max // 2
        if self.state.known.groups(topic.name) or not self.notes.has_room(key, topic.read_queues + kept_free):
            return
        self.notes.begin(key, topic.queue(0).first_offset, marks=OWNS_TOPIC)
        self.unused.begun((topic.name, group, policy.scope), OWNS_TOPIC)

    def find(self, topic: str, group: str, policy: GroupPolicy | None = None) -> SharedGroup | None:
        """Return *group* on *topic*, to settle messages by handle; None if it has never consumed the topic.

        Raises:
          Refused: the topic does not exist or is not readable, or the group may not read it.
        """
        scope = policy.scope if policy is not None else ""
        shared_group = self._by_place.get((topic, group, scope))
        if shared_group is not None or self.notes.stored(Key(scope, group, topic, 0)) is None:
            return shared_group
        return self._open(topic, group, policy, NOBODY)

    def groups_on(self, topic: str) -> list[tuple[str, str]]:
        """Return scope and name of each group that is not a consumer group and has a state on *topic*."""
        return [each for each in self.state.known.groups(topic) if each[0]]

    def low_of(self, scope: str, group: str, store_queue: Queue) -> int | None:
        """Return the offset in *store_queue* before which all messages are settled.

        None if the group finds its messages by their names, and none of this queue is unsettled: see `reached_by`.
        """
        shared_group, key = (
            self._by_place.get((store_queue.topic, group, scope)),
            Key(scope, group, store_queue.topic, store_queue.queue_id),
        )
        queue, known = (
            shared_group.queues.by_queue.get(store_queue.queue_id) if shared_group is not None else None,
            self.notes.stored(key),
        )
        by_name, has_unsettled = self.reached_by(scope, group, store_queue.topic) >= 0, False
        low = store_queue.first_offset
        if queue is not None:
            low, has_unsettled = queue.leases.table.low, queue.leases.table.size > 0
        elif known is not None:
            low, has_unsettled = known.low, bool(known.leases)
        return None if by_name and not has_unsettled else low

    def reached_by(self, scope: str, group: str, topic: str) -> int:
        """Return the log position before which a group has found everything by names; -1 if it reads its queues."""
        shared_group, known = self._by_place.get((topic, group, scope)), self.notes.stored(Key(scope, group, topic, 0))
        reached = shared_group.source.reached if shared_group is not None else -1
        return max(reached, known.reached if known is not None else -1)

    def take_over(self, topic: str, group: str, queue_id: int, leases: Mapping[int, LeaseState], room: int) -> int:
        """Lease messages below the committed offset of *group*, which another broker handed out; return how many.

        The committed offset becomes that of the first of them. If they are more than *room*, nothing is leased, and
        everything from the first one on is delivered again. Messages that are gone are left out, and so are those of a
        topic, queue or group that does not exist. The group must not be in memory.
        """
        found = self.topics.get(topic)
        if found is None or not found.has_readable(queue_id) or self.groups.get(group) is None:
            return 0
        queue, key = found.queue(queue_id), Key("", group, topic, queue_id)
        committed = min(self.groups.offset(group, topic, queue_id), queue.next_offset)
        known = {offset: lease for offset, lease in leases.items() if queue.first_offset <= offset < queue.next_offset}
        if committed >= 0:
            known = {offset: lease for offset, lease in known.items() if offset < committed}
        if not known:
            return 0
        self.groups.commit(group, topic, queue_id, min(known))
        if committed < 0 or len(known) > room:
            self.notes.begin(key, min(known))
            return 0
        self._take_over(key, committed, known, queue)
        return len(known)

    def _take_over(self, key: Key, committed: int, leases: Mapping[int, LeaseState], queue: Queue) -> None:
        """Replace the stored state below *committed*; what is known of later messages is still right."""
        old = self.notes.stored(key)
        if old is not None and old.next <= queue.next_offset:
            later = {offset: lease for offset, lease in old.leases.items() if offset >= committed}
            leases, committed = {**leases, **later}, max(committed, old.next)
        self.notes.begin_with(key, committed, leases)

    def forget(self, topic: str, group: str, policy: GroupPolicy) -> None:
        """Drop the state of *group*, which is not a consumer group, on *topic*; its members get no more messages."""
        self._forget(topic, policy.scope, group)

    def groups_of(self, scope: str) -> Iterator[str]:
        """Yield the groups with this scope that have a state, once for each topic."""
        known = self.state.known
        for of, group in known.names():
            for _ in known.topics_of(of, group) if of == scope else ():
                yield group

    def forget_groups(self, policy: GroupPolicy, groups: Iterable[str]) -> Steps[None]:
        """Drop the state of *groups*, which are not consumer groups, on all topics where they have no members."""
        pace, known = Pace(FORGOTTEN_A_SLICE), self.state.known
        for group in groups:
            for topic in known.topics_of(policy.scope, group):
                shared_group = self._by_place.get((topic, group, policy.scope))
                if shared_group is None or not len(shared_group):
                    self._forget(topic, policy.scope, group)
                if pace.is_over():
                    yield

    def _forget(self, topic: str, scope: str, group: str) -> None:
        shared_group = self._by_place.get((topic, group, scope))
        if shared_group is not None:
            self._remove(shared_group)
            self._close(shared_group)
        self.drop((topic, group, scope))

    def drop(self, place: Place) -> None:
        """Drop the stored state of a group that is not in memory."""
        topic, group, scope = place
        self._drop(self.state.known.of(scope, group, topic))
        self.unused.joined(place)

    def _drop(self, keys: Collection[Key]) -> None:
        """Drop the stored state of *keys*, which are of no group in memory."""
        if keys:
            for scope, group, topic, _ in keys:
                self.users.forget((topic, group, scope))
            self.notes.drop(keys)
            self._look_at_dropped()

    def _close(self, shared_group: SharedGroup) -> None:
        """Close a group whose state is dropped; its queues follow in the next turns."""
        self._closing.extend(shared_group.end())
        self._rung.set()

    def _look_at_dropped(self) -> None:
        """Make `run` check soon whether the notes about dropped queues were stored; a failed commit loses them."""
        if self.notes.is_dropping:
            self._look_at = min(self._look_at, self.now() + STORED_S)
            self._rung.set()

    def settled(self, count: int) -> None:
        """Stop counting *count* messages as unsettled."""
        full = self.unsettled >= self.config.leases_max
        self.unsettled -= count
        if full and self.unsettled < self.config.leases_max:
            self._to_wake = deque(self._by_place.values())
            self._wake_some()

    def _wake_some(self) -> None:
        """Wake some of the groups that may have waited for room; others follow in the next turns."""
        for _ in range(min(len(self._to_wake), GROUPS_A_TURN)):
            self._to_wake.popleft().wake()
        if self._to_wake:
            self._rung.set()

    def _forget_idle(self, context: GroupContext) -> None:
        """Drop a group from memory if it has no members, and either no unsettled messages or none for a long time."""
        shared_group = self._group_of(context)
        if shared_group is not None and shared_group.idle(self.now()):
            self.close_unused(shared_group)
            self.unused.left(shared_group)

    def left(self, context: GroupContext) -> None:
        """Note that the last member of a group has left."""
        shared_group = self._group_of(context)
        if shared_group is not None:
            self._empty[shared_group] = None
            self.unused.left(shared_group)

    def open_group(self, place: Place) -> SharedGroup | None:
        """Return a group that is in memory."""
        return self._by_place.get(place)

    def keep_topic(self, topic: str, *, of_personal: bool) -> None:
        """Note that *topic* is not only for the group for which it was created.

        It goes with a personal group all the same, unless *of_personal*.
        """
        for scope, group in self.state.known.groups(topic):
            shared_group, key = self._by_place.get((topic, group, scope)), Key(scope, group, topic, 0)
            queue = self.notes.stored(key)
            marks = shared_group.context.marks if shared_group is not None else queue.marks if queue is not None else 0
            if marks & OWNS_TOPIC and (of_personal or not marks & AUTO_DELETE):
                marks &= ~OWNS_TOPIC
                self.notes.mark(key, marks)
                if shared_group is not None:
                    shared_group.context.marks = marks

    def _group_of(self, context: GroupContext) -> SharedGroup | None:
        """Return the group of *context* if it is in use; its topic may have been deleted and created again since."""
        shared_group = self._by_place.get(context.place)
        return shared_group if shared_group is not None and shared_group.context is context else None

    def _topic_changed(self, topic: Topic | None) -> None:
        if topic is None:
            return
        for shared_group in list(self._by_topic.get(topic.name, ())):
            shared_group.follow(topic)
            self._look(shared_group)
        self.keep_topic(topic.name, of_personal=True)

    def _topic_deleted(self, name: str) -> None:
        for shared_group in list(self._by_topic.get(name, ())):
            self._remove(shared_group)
            shared_group.gone = True
            shared_group.wake()
            self._close(shared_group)
            self.unused.joined(shared_group.context.place)
        self._drop(self.state.known.on(name))

    def _drop_deleted_topics(self) -> None:
        known = self.state.known
        for topic in known.topics():
            if self.topics.get(topic) is None:
                self._drop(known.on(topic))

    def _group_changed(self, group: str) -> None:
        deleted = self.groups.get(group) is None and not self.groups.topics_of(group)
        for shared_group in list(self._by_group.get(group, ())):
            shared_group.queues.apply_retries()
            self._look(shared_group)
            if deleted and not len(shared_group):
                self._remove(shared_group)
                self._close(shared_group)
        if deleted:
            for topic in self.state.known.topics_of("", group):
                if (topic, group, "") not in self._by_place:
                    self._drop(self.state.known.of("", group, topic))

    def _look(self, shared_group: SharedGroup) -> None:
        """Check whether *shared_group* may still be read; its state stays, because reading may be allowed again."""
        context = shared_group.context
        may_read = context.policy is not None or self.groups.may_read(context.group, context.topic.name)
        shared_group.gone = not (is_readable(context.topic) and may_read)
        if shared_group.gone:
            shared_group.wake()

    def _was_reset(self, group: str, topic: str) -> None:
        shared_group = self._by_place.get((topic, group, ""))
        if shared_group is not None:
            shared_group.look_at_all()

    def _settled_atomically(self, key: Key, offsets: Sequence[int]) -> None:
        shared_group = self._by_place.get((key.topic, key.group, key.scope))
        if shared_group is not None:
            shared_group.settlement.settled_atomically(key.queue_id, offsets)

    def _flushed(self) -> None:
        if self.dead_letters.unflushed:
            self._log_moved = True
            self._rung.set()

    def _settle_flushed(self) -> None:
        self._log_moved = False
        for queue in list(self.dead_letters.unflushed):
            self.dead_letters.settle_flushed(queue)
            self._forget_idle(queue.context)

    def alarm(self, context: GroupContext, at: float) -> None:
        """Make `run` look at the group of *context* no later than *at*."""
        if at == -math.inf:
            self._due[context] = None
            self._rung.set()
        elif self._alarms.ring_by(context, at):
            self._rung.set()

    async def run(self) -> None:
        """End leases on time, store dead letters, and forget unused groups, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.unused.run)
            await self._run()

    async def _run(self) -> None:
        """End leases on time and store dead letters, until cancelled."""
        # The broker may have been killed after a topic was deleted and before that was noted.
        self._drop_deleted_topics()
        while True:
            if not (self._has_work or self._log_moved or self.dead_letters.far):
                with trio.move_on_at(min(self._alarms.next_at, self._look_at, self._reach_at)):
                    await self._rung.wait()
            self._rung = trio.Event()
            if self._log_moved:
                self._settle_flushed()
            now = self.now()
            self._due.update(dict.fromkeys([context for _, context in self._alarms.take(now)]))
            if self._has_work or min(self._look_at, self._reach_at) <= now:
                self._tick(now)
                await trio.lowlevel.checkpoint()
            await self.dead_letters.store_far()

    @property
    def _has_work(self) -> bool:
        """Whether there is something to do in this turn."""
        return bool(self._due or self._closing or self._to_wake or self._to_reach or self.notes.has_undropped)

    def _tick(self, now: float) -> None:
        """Look at the groups that are due, at a limited number of them and of their leases; others follow."""
        left = LAPSED_A_TURN
        for context in list(islice(self._due, GROUPS_A_TURN)):
            if left <= 0:
                break
            del self._due[context]
            shared_group = self._group_of(context)
            if shared_group is not None:
                left = shared_group.tick(now, left)
                self._forget_idle(context)
            if shared_group is not None and self._group_of(context) is shared_group:
                self.alarm(context, shared_group.deadline())
        for _ in range(min(QUEUES_CLOSED_A_TURN, len(self._closing))):
            self._closing.popleft().close()
        self._wake_some()
        self.notes.drop_some()
        if self._reach_at <= now:
            self.notes.note_reached()
            self._to_reach = [
                shared_group for shared_group in self._by_place.values() if shared_group.source.finder is not None
            ]
            self._reach_at = now + REACH_S if self._to_reach or self.notes.has_reached else math.inf
        for shared_group in self._to_reach[-GROUPS_A_TURN:]:
            if self._group_of(shared_group.context) is shared_group:
                shared_group.source.reach()
        del self._to_reach[-GROUPS_A_TURN:]
        if self._look_at <= now:
            self._look_at = math.inf
            self.notes.try_again()
            self._look_at_dropped()

    def statistics(self) -> dict[str, object]:
        return {
            "shares": len(self._by_place),
            "members": sum(map(len, self._by_place.values())),
            "unsettled": self.unsettled,
            "remembered": len(self.state),
            "remembered_leases": self.state.leases,
            "dead_letters": self.dead_letters.stored,
            "dead_without_letter": self.dead_letters.without_letter,
            "withheld": self.withheld,
            "unused_groups_forgotten": self.unused.forgotten,
            "unused_topics_deleted": self.unused.topics,
        }


def _agree(shared_group: SharedGroup, topic: str, group: str, membership: Membership) -> None:
    """Let *shared_group* have the selection of *membership*. Raises `Refused` if its members have another one."""
    present, selection = shared_group.source.selection.name, membership.selection
    if present == selection.name:
        return
    if len(shared_group):
        text = f"group {group!r} selects {present!r} of topic {topic!r}; use the same selection"
        raise Refused(Reason.ILLEGAL, text)
    shared_group.source.select(selection, membership.names)
