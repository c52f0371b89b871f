"""The gate: all operations of a protocol on the broker, after checking permissions.

A protocol gets a gate for the identity of its client (`Broker.gate`). It publishes, subscribes, joins groups, queries
and administers only through the gate. The gate asks the authorizers (`rules.Decisions`), once per action and name until
the rules change, and keeps the broker's internal topics closed.

The actions are RocketMQ's (`martlet.contracts.Action`). The names in a decision: a topic has its own name, a consumer
group the name of its retry topic ``%RETRY%<group>``, a shared group with a `GroupPolicy` is ``$share/<scope>/<group>``,
and the whole broker has the empty name. In a topic that a `Feed` follows, each message has a name too, its tag:
decisions on messages and topic filters use ``topic/name``.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Final, Protocol, TypeGuard, TypeVar, final

from martlet.access.allowances import UNLIMITED, Allowance
from martlet.access.grant import (
    ConsumeGrant,
    PublishGrant,
    TopicOffsets,
    check_not_closed,
    is_closed,
)
from martlet.access.queries import AdminGate, QueryGate, check_shown
from martlet.access.questions import name_of_group
from martlet.access.rules import Decisions, FollowPermit, GroupPermit
from martlet.access.transactions import ExternalGate, TransactionGate
from martlet.contracts import Action, ExternalTransactions, Identity, Router, Transactions
from martlet.delivery.cursor import Cursor
from martlet.delivery.fanout import Encoding
from martlet.delivery.feed import Feed
from martlet.delivery.routing.selection import EVERYTHING, Selection
from martlet.delivery.subscriptions import MemberPeer, Start, Subscriptions, TopicSubscription, from_tail
from martlet.errors import Reason, Refused
from martlet.groups.group import SharedGroup
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.groups.shared_groups import SharedGroups
from martlet.groups.strategy.policy import GroupPolicy
from martlet.message import Message, Placed
from martlet.sessions.session import Session
from martlet.sessions.sessions import Sessions
from martlet.state.journal import Journal
from martlet.store import Store
from martlet.store.append.items import AppendItem, AppendResult, body_of, properties_of, queue_of
from martlet.store.format.light import MULTI, light_topics, may_be_indexed
from martlet.store.format.tags import find_tags
from martlet.store.queues.queues import Queue
from martlet.tables.groups import TOOLS_GROUP, Groups
from martlet.tables.topics import BROKER_TOPICS, DLQ_PREFIX, EVENT_TOPIC, RETRY_PREFIX, Topic, Topics, is_reserved

__all__ = ["Gate", "publish_together"]

T = TypeVar("T")

FEW: Final = 4  # items; for more, a look at all of them together is faster than one at each


class ReplyRouting(Protocol):
    """Stores replies for the clients that wait for them; implemented by `martlet.access.replies.Replies`."""

    def send(self, gate: "Gate", address: str, reply: Message) -> Placed: ...


class Behind(Protocol):
    """The methods of the broker that a gate uses; implemented by `martlet.broker.Broker`."""

    store: Store
    topics: Topics
    groups: Groups
    subscriptions: Subscriptions
    shared_groups: SharedGroups
    sessions: Sessions
    routers: tuple[tuple[str, Router], ...]

    @property
    def replies(self) -> ReplyRouting: ...

    def capability(self, kind: type[T]) -> T | None: ...

    def publish(self, message: Message) -> Placed: ...

    def publish_all(
        self,
        items: Sequence[AppendItem | Message],
        *,
        atomic: bool = ...,
        notes: Sequence[tuple[Journal, bytes]] = ...,
        own: Callable[[Message], Message] | None = ...,
    ) -> AppendResult: ...

    def find_queue(self, topic: str, queue_id: int) -> Queue | None: ...


@final
class Gate:
    """The operations of the broker for one identity.

    Every method raises `Refused` (NO_PERMISSION) if the identity lacks the permission, in addition to its own errors.
    ``allowance`` is what the client's quotas allow. The gate counts with it what is published, and gives it to what
    delivers; a protocol that answers requests for messages asks it itself.
    """

    __slots__ = (
        "_behind",
        "_decisions",
        "_is_limited",
        "_tables",
        "_tags",
        "allowance",
        "identity",
        "publishable",
    )

    def __init__(self, behind: Behind, decisions: Decisions, allowance: Allowance = UNLIMITED) -> None:
        self._behind = behind
        self.allowance = allowance
        self._is_limited = allowance is not UNLIMITED
        self._decisions = decisions
        # Results of `check_publish` by topic, for hot paths of protocols.
        self.publishable: Mapping[str, PublishGrant] = decisions.publishable
        self._tags: Mapping[str, Collection[bytes]] = decisions.publishable_tags
        self._tables = behind.store, behind.topics, behind.groups
        self.identity: Identity = decisions.identity

    @property
    def has_routers(self) -> bool:
        """Whether a router may index messages in the light topics that they name."""
        return bool(self._behind.routers)

    def allows(self, action: Action, name: str) -> bool:
        """Return whether the identity may do *action* on *name*, without notifying listeners."""
        return self._decisions.allows(action, name)

    def check(self, action: Action, name: str) -> None:
        """Raise `Refused` (NO_PERMISSION) unless the identity may do *action* on *name*."""
        self._decisions.check(action, name)

    # publishing

    def publish(self, message: Message) -> Placed:
        """Store *message* like `Broker.publish`; requires ``publish`` on its topic, or on its name in the topic.

        With light queues, it also requires ``publish`` on each light topic that the message names.
        """
        if self._is_limited:
            self.allowance.check_in()
        self.check_whole(message)
        placed = self._behind.publish(message)
        if self._is_limited:
            self.allowance.charge_in(1, _size_of(message))
        return placed

    def _check_light_topics(self, message: Message) -> None:
        """Raise `Refused` unless *message* may go to the light topics that it names; they count only if there are
        routers.
        """
        if message.properties.find(MULTI) >= 0 and may_be_indexed(message.topic.encode()):
            for topic in light_topics(message.properties):
                self.check("publish", topic)

    def publish_all(
        self,
        items: Sequence[AppendItem | Message],
        *,
        atomic: bool = False,
        notes: Sequence[tuple[Journal, bytes]] = (),
        own: Callable[[Message], Message] | None = None,
    ) -> AppendResult:
        """Store messages like `Broker.publish_all`; refuses each message without permission."""
        refused = _refusals(self, items, atomic=atomic)
        if refused:
            items = [item for index, item in enumerate(items) if index not in refused]
        result = self._behind.publish_all(items, atomic=atomic, notes=notes, own=own)
        if refused:
            result.add_refused(refused)
        if self._is_limited:
            _charge(self, items)
        return result

    def find_queue(self, topic: str, queue_id: int) -> Queue | None:
        """Return the queue for a tuple of `publish_all`, like `Broker.find_queue`; None if it must be a `Message`.

        It does not check permissions, so it returns None until `check_publish` has allowed the topic.
        """
        return self._behind.find_queue(topic, queue_id) if topic in self.publishable else None

    def note_unawaited(self, topic: str, count: int, end: int) -> None:
        """Note that nobody waits until the last *count* messages, which were just published, are durable.

        The first of them is in *topic*, and the last one ends at *end*. They need no fdatasync of their own then: they
        become durable together with later messages, or after ``store.flush_interval_ms``. Early feeds (`Cursors.open`)
        deliver them before. Nothing is noted if a stage stored other messages with them or instead of them.
        """
        self._behind.store.committer.note_unawaited(topic, count, end)

    def check_whole(self, message: Message) -> None:
        """Raise `Refused` (NO_PERMISSION) unless *message* may be published, also to the light topics that it names."""
        if message.topic not in self.publishable:
            self.check_message(message.topic, message.properties)
        if self._behind.routers:  # looked up each time: a gate may be older than the routers
            self._check_light_topics(message)

    def check_message(self, topic: str, properties: bytes) -> None:
        """Raise `Refused` (NO_PERMISSION) unless a message with encoded *properties* may be published to *topic*."""
        tags = self._tags.get(topic)
        if tags is not None and find_tags(properties) in tags:
            return
        self.check_publish(topic)
        if self._decisions.has_names(topic):
            self._decisions.check_tag(topic, find_tags(properties))

    @property
    def transactions(self) -> TransactionGate:
        """RocketMQ's transactional messages."""
        return TransactionGate(self, self._behind.capability(Transactions))

    @property
    def external(self) -> ExternalGate:
        """Transactions that a system outside of the broker coordinates, such as a Spark query."""
        return ExternalGate(self, self._behind.capability(ExternalTransactions))

    @property
    def queries(self) -> QueryGate:
        """Queries about topics, groups, messages and the broker."""
        return QueryGate(self._decisions, *self._tables)

    @property
    def admin(self) -> AdminGate:
        """The actions of administrators."""
        return AdminGate(self._decisions, *self._tables)

    def give_back(self, group: str, message: Message) -> Placed:
        """Store a *message* that a member of *group* could not process, in the group's retry or dead-letter topic.

        Requires ``subscribe`` on the group: its members need no permission to publish.
        """
        self.check("subscribe", RETRY_PREFIX + group)
        if message.topic not in (RETRY_PREFIX + group, DLQ_PREFIX + group):
            text = f"topic[{message.topic}] is neither the retry topic nor the dead-letter topic of group[{group}]"
            raise Refused(Reason.ILLEGAL, text)
        if self._is_limited:
            self.allowance.check_in()
            self.allowance.charge_in(1, _size_of(message))
        return self._behind.publish(message)  # such topics have no light queues

    def reply(self, address: str, message: Message) -> Placed:
        """Store *message* as the reply for *address*, the property ``REPLY_TO_CLIENT`` of a request, and deliver it.

        Requires ``publish`` on the place where the reply is stored: the reply topic of RocketMQ clients, or the name of
        MQTT clients.

        Args:
          message: with the property ``CORRELATION_ID`` of the request; its topic is set.

        Raises:
          Refused: nobody waits for a reply there (Reason.NOT_FOUND), or as for `publish`.
        """
        return self._behind.replies.send(self, address, message)

    def check_publish(self, topic: str, *, before_publish: bool = False) -> PublishGrant:
        """Return the grant to find or create *topic* before publishing; requires ``publish``.

        In a topic whose messages have names, the permission is checked per message instead. *before_publish* says that
        `publish` or `publish_all` to *topic* follows: what is only observed counts there, so that it counts once.
        """
        grant = self.publishable.get(topic)
        if grant is not None:
            return grant
        check_not_closed(topic)
        grant = PublishGrant(*self._tables, topic)
        if before_publish and self._decisions.observes("publish", topic):
            return grant
        if self._decisions.has_names(topic):
            if grant.get() is None:
                self.check("publish", topic)
        elif self._decisions.check("publish", topic):
            self._decisions.remember_publishable(grant)
        return grant

    # consuming

    def find_topic(self, name: str, action: Action, new_queues: int) -> Topic | None:
        """Return topic *name* for *action*, ``publish`` (before `publish`) or ``subscribe``; None if there is none.

        If automatic creation is on (`Topics.auto_create_enabled`), a missing topic is created with *new_queues*
        queues. A dead-letter topic is created only for an existing group.
        """
        if action == "publish":
            self.check_publish(name, before_publish=True)
        else:
            self._check_open(name)
            self.check(action, name)
        _, topics, groups = self._tables
        known_topic = topics.get(name)
        if known_topic is not None or not topics.auto_create_enabled:
            return known_topic
        if name.startswith(DLQ_PREFIX) and groups.get(name.removeprefix(DLQ_PREFIX)) is not None:
            return topics.ensure(name, 1)
        return None if is_reserved(name) else topics.ensure(name, new_queues)

    def subscribe(
        self,
        peer: MemberPeer,
        topic: str,
        encoding: Encoding,
        *,
        selection: Selection = EVERYTHING,
        start: Start = from_tail,
        credit: int = 0,
    ) -> TopicSubscription:
        """Return a new subscription, like `Subscriptions.open`; requires ``subscribe`` on *topic*.

        The permission is checked again at each `TopicSubscription.collect`, which then may raise `Refused`.
        """
        self._check_open(topic)
        permit = self._decisions.reading(topic)
        permit()
        subscription = self._behind.subscriptions.open(
            peer, topic, encoding, selection=selection, start=start, credit=credit, permit=permit
        )
        subscription.limit = self.allowance if self._is_limited else None
        return subscription

    def follow(
        self,
        feed: Feed,
        wake: Callable[[], None],
        filters: Mapping[str, Hashable],
        position: int | None = None,
        droppable: Callable[[tuple[Hashable, ...]], bool] | None = None,
        *,
        is_paused: bool = False,
    ) -> Cursor:
        """Return a new cursor of *feed*, like `Feed.open`; requires ``subscribe`` on each filter in the feed's topics.

        The cursor also checks each message's name and delivers only what the identity may read. After a change of
        the rules, the filters are checked again: `Cursor.collect` raises `Refused` if one is denied.
        """
        permit = self._follow_permit(feed)
        for each in filters:
            permit.check(each)
        cursor = feed.open(wake, filters, position, permit=permit, droppable=droppable, is_paused=is_paused)
        cursor.limit = self.allowance if self._is_limited else None
        return cursor

    def may_follow(self, feed: Feed, topic_filter: str) -> bool:
        """Whether the identity may follow *topic_filter* of *feed*."""
        try:
            self._follow_permit(feed).check(topic_filter)
        except Refused:
            return False
        return True

    def _follow_permit(self, feed: Feed) -> FollowPermit:
        for topic in feed.topics:
            self._check_open(topic)
        return FollowPermit(self._decisions, feed.topics_of)

    def join(
        self,
        peer: MemberPeer,
        topic: str,
        group: str,
        encoding: Encoding,
        membership: Membership,
        policy: GroupPolicy | None = None,
    ) -> Member:
        """Return a new member of a shared group, like `SharedGroups.join`.

        It requires ``subscribe`` on *group* and on *topic*, or, if *membership* has names, on their topic filter
        instead of the whole topic. Then the member gets only messages whose names it may read. Other messages go to
        other members, or to nobody if no connected member may read them.

        Authorizers know a group with a *policy*, which is not a consumer group, as ``$share/<scope>/<group>``. The
        permission is checked again at each `Member.collect`, which then may raise `Refused`.
        """
        names = membership.names
        permit = self._check_group(topic, group, policy, names.topic_filter if names is not None else "")
        left = self.allowance.join_group((policy.scope if policy is not None else "", group, topic))
        try:
            member = self._behind.shared_groups.join(
                peer, topic, group, encoding, membership, policy, permit=permit, user=self.identity.name
            )
        except Refused:
            left()
            raise
        member.limit, member.left = self.allowance if self._is_limited else None, left
        return member

    def shared_group(self, topic: str, group: str, policy: GroupPolicy | None = None) -> SharedGroup | None:
        """Return a group, to settle messages by handle, like `SharedGroups.find`; requires the same as `join`."""
        self._check_group(topic, group, policy)
        return self._behind.shared_groups.find(topic, group, policy)

    def _check_group(self, topic: str, group: str, policy: GroupPolicy | None, topic_filter: str = "") -> GroupPermit:
        self._check_open(topic)
        name = name_of_group(group, policy.scope) if policy is not None else RETRY_PREFIX + group
        permit = GroupPermit(self._decisions, topic, name, topic_filter)
        permit.check()
        return permit

    def consume(self, group: str, topic: str) -> ConsumeGrant:
        """Return the grant for a pull; requires ``subscribe`` on both, so call it before each answer.

        RocketMQ's tools may pull from its internal topics too, which requires ``manage`` on the broker as well.
        """
        grant = self._decisions.consumable.get((group, topic))
        if grant is None:
            decisions = self._decisions
            may_remember = decisions.check("subscribe", RETRY_PREFIX + group)
            if group == TOOLS_GROUP and topic in BROKER_TOPICS:
                check_shown(decisions, topic)
            else:
                self._check_open(topic)
                may_remember = decisions.check("subscribe", topic) and may_remember
            grant = ConsumeGrant(*self._tables, group, topic)
            if may_remember:
                decisions.remember_consumable(grant)
        return grant

    def read(self, topic: str) -> TopicOffsets:
        """Return the grant to read *topic* without a group; requires ``subscribe``, so call it before each answer."""
        self._check_open(topic)
        self.check("subscribe", topic)
        return TopicOffsets(*self._tables, topic)

    def _check_open(self, topic: str) -> None:
        if is_closed(topic) and topic != EVENT_TOPIC:
            raise Refused(Reason.NO_PERMISSION, f"Reading topic[{topic}] is forbidden; it is internal to the broker")

    # sessions

    def open_session(
        self, protocol: str, name: str, position: int, lost: Callable[[str], None], *, expiry_s: int | None = None
    ) -> tuple[Session, bool]:
        """Return the session *name* of this identity, like `Sessions.open`, and whether it existed before."""
        return self._behind.sessions.open(protocol, self.identity.name, name, position, lost, expiry_s=expiry_s)


def publish_together(parts: Sequence[tuple[Gate, Sequence[AppendItem | Message]]]) -> AppendResult:
    """Store the messages of several gates of one broker like `Gate.publish_all`; the result has them in order.

    Storing a message each of many clients together costs a fraction of storing one after the other.
    """
    if len(parts) == 1:
        return parts[0][0].publish_all(parts[0][1])
    items: list[AppendItem | Message] = []
    refused: dict[int, Refused] = {}
    at = 0
    for gate, part in parts:
        count = len(part)
        if found := _refusals(gate, part):
            refused |= {at + index: error for index, error in found.items()}
            part = [item for index, item in enumerate(part) if index not in found]
        if gate._is_limited:  # before the next one, which may count with the same quotas
            _charge(gate, part)
        items += part
        at += count
    result = parts[0][0]._behind.publish_all(items)
    if refused:
        result.add_refused(refused)
    return result


def _refusals(gate: Gate, items: Sequence[AppendItem | Message], *, atomic: bool = False) -> dict[int, Refused]:
    """Return the refusals of those of *items* that permissions or quotas forbid, by index; raise it if *atomic*."""
    publishable = gate.publishable
    refused: dict[int, Refused] = {}
    if gate._is_limited and items and gate.allowance.applies:
        refused = _refuse_excess(gate.allowance, items, atomic=atomic)
    if _may_publish(items, publishable):
        return refused
    has_routers = gate.has_routers
    for index, item in enumerate(items):
        try:
            if not isinstance(item, Message):
                topic = queue_of(item).topic
                if topic not in publishable:
                    gate.check_message(topic, properties_of(item))
            elif has_routers or item.topic not in publishable:
                gate.check_whole(item)
        except Refused as error:
            if atomic:
                raise
            refused[index] = error
    return refused


def _charge(gate: Gate, items: Sequence[AppendItem | Message]) -> None:
    """Count *items*, which were stored, with the client's quotas."""
    if items and gate.allowance.applies:
        gate.allowance.charge_in(len(items), sum(map(_size_of, items)))


def _are_tuples(items: Sequence[AppendItem | Message]) -> TypeGuard[Sequence[AppendItem]]:
    return Message not in set(map(type, items))


def _may_publish(items: Sequence[AppendItem | Message], publishable: Collection[str]) -> bool:
    """Return whether all *items* are tuples for topics in *publishable*."""
    if len(items) == 1:
        item = items[0]
        return not isinstance(item, Message) and queue_of(item).topic in publishable
    if len(items) < FEW or not _are_tuples(items):
        return False
    return all(queue.topic in publishable for queue in set(map(queue_of, items)))


def _size_of(item: AppendItem | Message) -> int:
    """Return the size of a message for quotas: its body and its properties."""
    if isinstance(item, Message):
        return len(item.body) + len(item.properties)
    return len(body_of(item)) + len(properties_of(item))


def _refuse_excess(allowance: Allowance, items: Sequence[AppendItem | Message], *, atomic: bool) -> dict[int, Refused]:
    """Return the refusals of those of *items* that the client's quotas do not allow; raise it if *atomic*."""
    if atomic:
        allowance.check_in()
        return {}
    return allowance.refuse_excess([*map(_size_of, items)])
