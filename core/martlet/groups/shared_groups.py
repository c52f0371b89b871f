"""Shared groups: the members of a group compete for the messages of a topic; each message goes to one of them.

`queue_leases.py` tracks the holder of each message. A `SharedGroup` reads the messages, leases them to members with
credit, commits the group's offsets as messages are settled, and returns messages from members that are dead or silent;
this module has all groups, and `upkeep.py` checks groups that are due. A message that failed as often as the group's
``retryMaxTimes`` allows is moved to ``%DLQ%<group>``. The pause before a redelivery grows with each failure.

A holder is any hashable: by default one that only the member has, otherwise a name that outlives its connection. A
message can be settled over any connection with its handle (queue, offset, generation). Every change is noted in the log
(`state.py`), so acknowledgements and delivery counts survive a restart.

When messages arrive, one member with credit is woken; if it leaves some, it wakes the next one. If a woken member does
not collect within `group_members.STALL_S`, because its client reads slowly, the next one is woken instead.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, final

import trio

from martlet.delivery.fanout import Encoding
from martlet.delivery.subscriptions import MemberPeer, is_readable, readable
from martlet.delivery.tail_reader import Tails
from martlet.errors import Reason, Refused
from martlet.groups.group import SharedGroup
from martlet.groups.handing_out.dead_letters import DeadLetters
from martlet.groups.in_memory import GroupsInMemory
from martlet.groups.journal.journal_codec import Key
from martlet.groups.journal.journal_writer import GroupJournalWriter
from martlet.groups.journal.state import GroupState
from martlet.groups.member import Member
from martlet.groups.membership import MemberPermit, Membership
from martlet.groups.progress import GroupProgress
from martlet.groups.queues.group_context import GroupContext
from martlet.groups.strategy.policy import AUTO_DELETE, OWNS_TOPIC, GroupPolicy
from martlet.groups.unused_groups import UnusedGroups
from martlet.groups.upkeep import Upkeep
from martlet.groups.user_limits import Place, UserGroups
from martlet.runtime.clock import Clock
from martlet.runtime.steps import Budget, Steps
from martlet.settings import DeliveryConfig
from martlet.state.journal import Journal
from martlet.store import Store
from martlet.tables.groups import Groups
from martlet.tables.topics import Topic, Topics

__all__ = ["SharedGroups"]

# Cost of forgetting a group on a topic with a few queues.
FORGET_US: Final = 30.0
# The membership of a group that is opened for handles, before it has members.
NOBODY: Final = Membership(lease_s=0)
# Limit on leases in `GroupState`, which include leases of groups not in memory, in units of delivery.leases_max.
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
        self.topics = topics
        self.in_memory = GroupsInMemory()
        self.progress = GroupProgress(self.state, self.notes, self.in_memory)
        self.upkeep = Upkeep(self)
        self.alarm: Callable[[GroupContext, float], None] = self.upkeep.alarm
        self.users = UserGroups(config)
        self.unused = UnusedGroups(self)
        topics.changed.append(self._topic_changed)
        topics.deleted.append(self._topic_deleted)
        topics.make_room = self.unused.make_room_for_topic
        groups.changed.append(self._group_changed)
        groups.offsets.was_reset.append(self._note_reset)

    @property
    def room(self) -> int:
        """The number of messages that may still be leased.

        One limit applies to unsettled messages, another one to these and to acknowledged messages that are remembered,
        because an earlier message of their queue is unsettled.
        """
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
          membership: the terms of the member; a new group begins with these.
          policy: for a group that is not a consumer group.
          permit: decides at each `Member.collect` whether the member may read, and which messages; None for all.
          user: the owner of the member, for limits per user; None for the broker itself.

        Raises:
          Refused: the topic or group does not exist, there are too many groups or members, or the other members use
            another selection.
        """
        shared_group = self._open(topic, group, policy, membership, user)
        _set_selection(shared_group, topic, group, membership)
        shared_group.gone = False
        limit = self.config.share_members_max
        if len(shared_group) >= limit:
            raise Refused(Reason.BUSY, f"group {group!r} has {limit} members; delivery.share_members_max is {limit}")
        member = Member(shared_group, peer, encoding, membership, permit)
        shared_group.join(member)
        self.in_memory.joined(shared_group)
        self.unused.joined(shared_group.context.place)
        return member

    def waiting(self) -> Iterator[Member]:
        """Yield the members of all groups; more may join and leave meanwhile."""
        for shared_group in list(self.in_memory.by_place.values()):
            for member in shared_group.members():
                if isinstance(member, Member):
                    yield member

    def _open(
        self, topic: str, group: str, policy: GroupPolicy | None, membership: Membership, user: str | None = None
    ) -> SharedGroup:
        """Return a group; a new one begins as *membership* specifies. Raises `Refused`."""
        topic_entry = readable(self.topics, topic)
        if policy is None:
            self.groups.reader(group, topic)
            self.groups.offsets.check_may_commit(group, topic, range(topic_entry.read_queues))
        scope = policy.scope if policy is not None else ""
        shared_group = self.in_memory.get(topic, group, scope)
        if shared_group is not None:
            return shared_group
        self._check_room(Key(scope, group, topic, 0), topic_entry.read_queues, user)
        is_new = not self.state.known.count_of(scope, group, topic)
        marks = membership.marks | self.unused.marks_of((topic, group, scope))
        context = GroupContext(self, topic_entry, group, policy, marks, user)
        shared_group = SharedGroup(context, self.dead_letters, membership)
        self.in_memory.add(shared_group)
        self.users.add(user)
        if is_new:
            self.users.begin(context.place, user, topic_entry.read_queues)
        if membership.names is not None:
            self.upkeep.watch_reach()
        self.alarm(shared_group.context, -math.inf)
        return shared_group

    def _check_room(self, key: Key, queues: int, user: str | None) -> None:
        """Raise `Refused` (BUSY) unless *user* may use one more group, with this many *queues*."""
        limit = self.config.shares_max
        if user is not None and self.users.is_full(user):
            self._make_room(user)
            self.users.check(user)
        if len(self.in_memory.by_place) >= limit and not self._make_room():
            raise Refused(Reason.BUSY, f"{limit} shared groups are in use; delivery.shares_max is {limit}")
        is_new = not self.state.known.count_of(key.scope, key.group, key.topic)
        if not self.notes.has_room(key, queues) or (is_new and not self.users.has_queues(user, queues)):
            self.unused.make_room(key.topic)
            self.notes.check_room(key, queues)
        if is_new:
            self.users.check_queues(user, queues)

    def _make_room(self, user: str | None = None) -> bool:
        """Drop a group without members, of *user* if given, from memory early; return False if there is none."""
        unused = self.in_memory.find_unused(user)
        if unused is not None:
            self.close_unused(unused)
        return unused is not None

    def close_unused(self, shared_group: SharedGroup) -> None:
        """Drop *shared_group*, which has no members and is stored, from memory."""
        self._remove(shared_group)
        shared_group.close()

    def forget_idle(self, context: GroupContext) -> None:
        """Drop a group from memory if it has no members, and either no unsettled messages or none for a long time."""
        shared_group = self.in_memory.of(context)
        if shared_group is not None and shared_group.idle(self.now()):
            self.close_unused(shared_group)
            self.unused.left(shared_group)

    def _remove(self, shared_group: SharedGroup) -> None:
        context = shared_group.context
        self.in_memory.remove(shared_group)
        self.upkeep.cancel(context)
        self.users.remove(context.user)

    def begin(self, topic: Topic, group: str, policy: GroupPolicy) -> None:
        """Note that *topic* was created for *group*, whose first member comes later, if ever.

        The group begins with the first message, and is deleted with the topic like others with `OWNS_TOPIC`. If half of
        the room for groups is used, no owner is noted, to leave the rest to other groups.
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
        shared_group = self.in_memory.get(topic, group, scope)
        if shared_group is not None or self.notes.stored(Key(scope, group, topic, 0)) is None:
            return shared_group
        return self._open(topic, group, policy, NOBODY)

    def forget(self, topic: str, group: str, policy: GroupPolicy) -> None:
        """Drop the state of *group*, which is not a consumer group, on *topic*; its members get no more messages."""
        self._forget(topic, policy.scope, group)

    def groups_of(self, scope: str) -> Iterator[str]:
        """Yield the groups with this scope that have a state, once for each topic."""
        known = self.state.known
        for group_scope, group in known.names():
            for _ in known.topics_of(group_scope, group) if group_scope == scope else ():
                yield group

    def forget_groups(self, policy: GroupPolicy, groups: Iterable[str]) -> Steps[None]:
        """Drop the state of *groups*, which are not consumer groups, on all topics where they have no members."""
        budget, known = Budget(FORGET_US), self.state.known
        for group in groups:
            for topic in known.topics_of(policy.scope, group):
                shared_group = self.in_memory.get(topic, group, policy.scope)
                if shared_group is None or not len(shared_group):
                    self._forget(topic, policy.scope, group)
                if budget.is_over():
                    yield

    def _forget(self, topic: str, scope: str, group: str) -> None:
        shared_group = self.in_memory.get(topic, group, scope)
        if shared_group is not None:
            self._remove(shared_group)
            self.upkeep.close(shared_group)
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
            self.upkeep.look_at_dropped()

    def settled(self, count: int) -> None:
        """Subtract *count* from the number of unsettled messages."""
        was_full = self.unsettled >= self.config.leases_max
        self.unsettled -= count
        if was_full and self.unsettled < self.config.leases_max:
            self.upkeep.wake_all()

    def left(self, context: GroupContext) -> None:
        """Note that the last member of a group has left."""
        shared_group = self.in_memory.of(context)
        if shared_group is not None:
            self.in_memory.left(shared_group)
            self.unused.left(shared_group)

    def keep_topic(self, topic: str, *, of_personal: bool) -> None:
        """Note that *topic* is not only for the group for which it was created.

        A personal group still deletes it, unless *of_personal*.
        """
        for scope, group in self.state.known.groups(topic):
            shared_group, key = self.in_memory.get(topic, group, scope), Key(scope, group, topic, 0)
            queue = self.notes.stored(key)
            marks = shared_group.context.marks if shared_group is not None else queue.marks if queue is not None else 0
            if marks & OWNS_TOPIC and (of_personal or not marks & AUTO_DELETE):
                marks &= ~OWNS_TOPIC
                self.notes.mark(key, marks)
                if shared_group is not None:
                    shared_group.context.marks = marks

    def _topic_changed(self, topic: Topic | None) -> None:
        if topic is None:
            return
        for shared_group in self.in_memory.on_topic(topic.name):
            shared_group.follow(topic)
            self._check_readable(shared_group)
        self.keep_topic(topic.name, of_personal=True)

    def _topic_deleted(self, name: str) -> None:
        for shared_group in self.in_memory.on_topic(name):
            self._remove(shared_group)
            shared_group.gone = True
            shared_group.wake()
            self.upkeep.close(shared_group)
            self.unused.joined(shared_group.context.place)
        self._drop(self.state.known.on(name))

    def _drop_deleted_topics(self) -> None:
        known = self.state.known
        for topic in known.topics():
            if self.topics.get(topic) is None:
                self._drop(known.on(topic))

    def _group_changed(self, group: str) -> None:
        deleted = self.groups.get(group) is None and not self.groups.offsets.topics_of(group)
        for shared_group in self.in_memory.of_consumers(group):
            shared_group.queues.apply_retries()
            self._check_readable(shared_group)
            if deleted and not len(shared_group):
                self._remove(shared_group)
                self.upkeep.close(shared_group)
        if deleted:
            for topic in self.state.known.topics_of("", group):
                if self.in_memory.get(topic, group, "") is None:
                    self._drop(self.state.known.of("", group, topic))

    def _check_readable(self, shared_group: SharedGroup) -> None:
        """Check whether *shared_group* may still be read; its state stays, because reading may be allowed again."""
        context = shared_group.context
        may_read = context.policy is not None or self.groups.may_read(context.group, context.topic.name)
        shared_group.gone = not (is_readable(context.topic) and may_read)
        if shared_group.gone:
            shared_group.wake()

    def _note_reset(self, group: str, topic: str) -> None:
        shared_group = self.in_memory.get(topic, group, "")
        if shared_group is not None:
            shared_group.look_at_all()

    def _settled_atomically(self, key: Key, offsets: Sequence[int]) -> None:
        shared_group = self.in_memory.get(key.topic, key.group, key.scope)
        if shared_group is not None:
            shared_group.settlement.settled_atomically(key.queue_id, offsets)

    async def run(self) -> None:
        """End leases on time, store dead letters, and forget unused groups, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.unused.run)
            # The broker may have been killed after a topic was deleted and before that was noted.
            self._drop_deleted_topics()
            await self.upkeep.run()

    def statistics(self) -> dict[str, object]:
        return {
            "shares": len(self.in_memory.by_place),
            "members": sum(map(len, self.in_memory.by_place.values())),
            "unsettled": self.unsettled,
            "remembered": len(self.state),
            "remembered_leases": self.state.leases,
            "dead_letters": self.dead_letters.stored,
            "dead_without_letter": self.dead_letters.without_letter,
            "withheld": self.withheld,
            "unused_groups_forgotten": self.unused.forgotten,
            "unused_topics_deleted": self.unused.topics,
        }


def _set_selection(shared_group: SharedGroup, topic: str, group: str, membership: Membership) -> None:
    """Set the selection of *shared_group* from *membership*. Raises `Refused` if its members have another one."""
    current, selection = shared_group.source.selection.name, membership.selection
    if current == selection.name:
        return
    if len(shared_group):
        text = f"group {group!r} selects {current!r} of topic {topic!r}; use the same selection"
        raise Refused(Reason.ILLEGAL, text)
    shared_group.source.select(selection, membership.names)
