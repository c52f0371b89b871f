"""Forgets unused shared groups, so that their state does not stay for ever.

A group whose members have left keeps its state: messages wait for the next member. If no message waits for the group,
and no message is stored that the group has consumed, its state is useless: a member that joins later gets the same
messages with the state or without it. Such a group is forgotten some time after its last member has left. A topic that
was created for the group is deleted with it, if nothing else uses the topic.

A group with the mark `AUTO_DELETE` is personal: nobody else will join it. It is forgotten as soon as its messages are
settled; if messages wait, after the same time, together with its topic and the messages there.

The protocol of a group decides whether it is forgotten, and after what time (`UnusedGroups.expire`). No time is stored:
after a restart it starts again. If there is no room for a new group or topic, unused ones are forgotten earlier.
"""

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, NamedTuple, Protocol, final

import trio

from martlet.errors import Refused, StoreFailed
from martlet.groups.group import SharedGroup
from martlet.groups.in_memory import GroupsInMemory
from martlet.groups.journal.state import GroupQueueState
from martlet.groups.queues.group_context import Owner
from martlet.groups.strategy.policy import AUTO_DELETE, OWNS_TOPIC
from martlet.groups.user_limits import Place
from martlet.runtime.steps import Budget, Steps, per_slice
from martlet.tables.topics import Topic

__all__ = ["UnusedGroups"]

log = logging.getLogger("martlet.shares")

# Unused groups checked in one turn of the event loop if a topic is deleted.
GROUPS_A_TURN: Final = per_slice(us=100)
# Unused groups to check when there is no room, the longest unused first.
GROUPS_FOR_ROOM: Final = 64


class _Owner(Owner, Protocol):
    """The methods of `SharedGroups` that this module uses."""

    in_memory: GroupsInMemory

    def close_unused(self, shared_group: SharedGroup) -> None: ...

    def drop(self, place: Place) -> None: ...


class _UnusedGroup(NamedTuple):
    """A group without members *since* a time, and the *marks* with which it began after that."""

    check_at: float
    since: float
    marks: int


@final
class _Scope:
    """Groups of one scope: which names are forgotten, and how long after the last member has left."""

    __slots__ = ("after_s", "unused", "wants")

    def __init__(self, after_s: float, wants: Callable[[str], bool]) -> None:
        self.after_s = after_s
        self.wants = wants
        self.unused: OrderedDict[Place, _UnusedGroup] = OrderedDict()  # the next one to check first

    @property
    def next_at(self) -> float:
        """The time of the next check of a group."""
        return next(iter(self.unused.values())).check_at if self.unused else math.inf


@final
class UnusedGroups:
    """The groups without members; ``forgotten`` counts forgotten groups, ``topics`` their topics."""

    def __init__(self, owner: _Owner) -> None:
        self._owner = owner
        self._scopes: dict[str, _Scope] = {}
        self._to_check_now: deque[Place] = deque()  # personal groups whose last member has just left
        self._work = trio.Event()
        self.forgotten = 0
        self.topics = 0

    def expire(self, scope: str, after_s: float, wants: Callable[[str], bool] = lambda group: True) -> None:
        """Forget groups of *scope* whose names *wants* accepts, *after_s* after their last member has left.

        Call it before `run`: stored groups then count as unused from that time on.
        """
        self._scopes[scope] = _Scope(after_s, wants)

    def since(self, place: Place) -> float | None:
        """Return when the last member of a group has left; None if it has members, or is never forgotten."""
        scope = self._scopes.get(place[2])
        entry = scope.unused.get(place) if scope is not None else None
        return entry.since if entry is not None else None

    def left(self, shared_group: SharedGroup) -> None:
        """Note that a group has no members; personal groups are checked soon, and again when they are settled."""
        place = shared_group.context.place
        self._add(place)
        if shared_group.context.marks & AUTO_DELETE and self.since(place) is not None:
            self._to_check_now.append(place)
            self._work.set()

    def begun(self, place: Place, marks: int) -> None:
        """Note that a group began with *marks*, and has no members."""
        self._add(place, marks)

    def marks_of(self, place: Place) -> int:
        """Return the marks with which a group without members began, whether they are stored yet or not."""
        scope = self._scopes.get(place[2])
        entry = scope.unused.get(place) if scope is not None else None
        return entry.marks if entry is not None else 0

    def _add(self, place: Place, marks: int = 0) -> None:
        scope = self._scopes.get(place[2])
        if scope is not None and place not in scope.unused and scope.wants(place[1]):
            now = self._owner.now()
            if not scope.unused:
                self._work.set()
            scope.unused[place] = _UnusedGroup(now + scope.after_s, now, marks)

    def joined(self, place: Place) -> None:
        """Note that a group has a member, or has ended."""
        scope = self._scopes.get(place[2])
        if scope is not None:
            scope.unused.pop(place, None)

    async def run(self) -> None:
        """Forget groups that are due, until cancelled."""
        for _ in self._find_stored():
            await trio.lowlevel.checkpoint()
        while True:
            with trio.move_on_at(min((scope.next_at for scope in self._scopes.values()), default=math.inf)):
                await self._work.wait()
            self._work = trio.Event()
            while self._forget_due():
                await trio.lowlevel.checkpoint()

    def _find_stored(self) -> Steps[None]:
        """Note the stored groups without members, in slices."""
        budget, known = Budget(), self._owner.state.known
        for scope, group in known.names():
            for topic in known.topics_of(scope, group) if scope in self._scopes else ():
                place = (topic, group, scope)
                shared_group = self._owner.in_memory.get(*place)
                if shared_group is None or not len(shared_group):
                    self._add(place)
                if budget.is_over():
                    yield
            if budget.is_over():
                yield

    def _forget_due(self) -> bool:
        """Check some groups that are due; return whether there are more."""
        for _ in range(min(len(self._to_check_now), GROUPS_A_TURN)):
            place = self._to_check_now.popleft()
            if self.since(place) is not None:
                self._forget_if_useless(place, has_expired=False)
        now, has_more = self._owner.now(), bool(self._to_check_now)
        for scope in self._scopes.values():
            due = [place for place, entry in islice(scope.unused.items(), GROUPS_A_TURN) if entry.check_at <= now]
            for place in due:
                if place in scope.unused and not self._forget_if_useless(place, has_expired=True):
                    self._check_later(scope, place)
            has_more = has_more or len(due) == GROUPS_A_TURN
        return has_more

    def _check_later(self, scope: _Scope, place: Place) -> None:
        scope.unused[place] = scope.unused[place]._replace(check_at=self._owner.now() + scope.after_s)
        scope.unused.move_to_end(place)

    def make_room(self, needed: str = "") -> bool:
        """Forget some unused groups before their time, none on the topic *needed*; return whether any was forgotten.

        Groups that find messages by their names are forgotten even if messages may wait for them, but not before their
        time.
        """
        forgotten_before, now = self.forgotten, self._owner.now()
        for scope in self._scopes.values():
            for place, entry in list(islice(scope.unused.items(), GROUPS_FOR_ROOM)):
                if place[0] == needed or not self._forget_if_useless(
                    place, has_expired=now >= entry.since + scope.after_s, needs_room=True
                ):
                    self._check_later(scope, place)
        return self.forgotten > forgotten_before

    def make_room_for_topic(self) -> bool:
        """Delete some topics of unused groups before their time; return whether any was deleted."""
        topics_before = self.topics
        return self.make_room() and self.topics > topics_before

    def _forget_if_useless(self, place: Place, *, has_expired: bool, needs_room: bool = False) -> bool:
        """Forget a group, with its topic, if its state is useless; return whether it was forgotten.

        If it *has_expired*, a personal group is forgotten with its waiting messages.
        """
        topic, group, scope = place
        owner = self._owner
        shared_group, keys = owner.in_memory.get(*place), owner.state.known.of(scope, group, topic)
        if (shared_group is not None and len(shared_group)) or not keys:
            self.joined(place)
            return True
        topic_entry = owner.topics.get(topic)
        is_stored = shared_group.is_unused if shared_group is not None else all(map(owner.notes.is_applied, keys))
        if topic_entry is None or not is_stored:
            return False
        if shared_group is not None:
            owner.close_unused(shared_group)
        use = _TopicUse(owner, topic_entry, [queue for key in keys if (queue := owner.notes.stored(key)) is not None])
        if not use.is_over(is_expired=has_expired, needs_room=needs_room):
            return False
        try:
            self._drop(place, delete_topic=use.deletes)
        except (Refused, StoreFailed) as error:
            log.debug("group %s of topic %s cannot be forgotten now; %s", group, topic, error)
            return False
        return True

    def _drop(self, place: Place, *, delete_topic: bool) -> None:
        """Drop the state of a group, and its topic. Raises `Refused` and `StoreFailed`."""
        topic = place[0]
        if delete_topic:
            self._owner.topics.delete(topic)  # together with the state of its groups
            self._owner.groups.offsets.forget_topic(topic)
            self.topics += 1
        else:
            self._owner.drop(place)
        self.joined(place)
        self.forgotten += 1


@final
class _TopicUse:
    """The state of a group without members by its stored *queues*, and whether anything else uses its topic."""

    def __init__(self, owner: Owner, topic: Topic, queues: Sequence[GroupQueueState]) -> None:
        self._queues = {queue.key.queue_id: queue for queue in queues}
        self._store_queues = owner.store.queues.topics.get(topic.name, {})
        marks = max((queue.marks for queue in queues), default=0)
        self.is_personal = bool(marks & AUTO_DELETE)
        name = topic.name
        owns_topic = bool(marks & OWNS_TOPIC) and not owner.groups.offsets.groups_of(name)
        is_followed = owner.tails.follows(name) or len(owner.state.known.groups(name)) > 1
        # Whether the topic is deleted with the group, or once its followers have left.
        self.deletes = owns_topic and not is_followed and (self.is_personal or self._is_empty)
        self._deletes_later = owns_topic and is_followed

    def is_over(self, *, is_expired: bool, needs_room: bool) -> bool:
        """Return whether the group can be forgotten.

        Without its state, a group that reads all messages would begin with the first existing message, and a group that
        finds messages by their names with messages published later.
        """
        if self.is_personal and is_expired and (self.deletes or self._finds_names):
            return True
        if self._finds_names:
            waits = any(queue.last_end > self._queues[0].reached for queue in self._store_queues.values())
            return not self._has_leases and (not waits or (is_expired and needs_room))
        return self._is_settled and (self.deletes or (self._is_empty and not self._deletes_later))

    @property
    def _has_leases(self) -> bool:
        for queue_id, queue in self._queues.items():
            store_queue = self._store_queues.get(queue_id)
            if store_queue is not None and any(offset >= store_queue.first_offset for offset in queue.leases):
                return True
        return False

    @property
    def _finds_names(self) -> bool:
        return 0 in self._queues and self._queues[0].reached >= 0

    @property
    def _is_settled(self) -> bool:
        """Whether no message of the topic waits for the group."""
        for queue_id, store_queue in self._store_queues.items():
            queue = self._queues.get(queue_id)
            if max(queue.next if queue is not None else 0, store_queue.first_offset) < store_queue.next_offset:
                return False
        return not self._has_leases

    @property
    def _is_empty(self) -> bool:
        """Whether the topic has no messages, or only expired ones."""
        return all(queue.first_offset >= queue.next_offset for queue in self._store_queues.values())
