"""The gate: the one way in and out for whoever is not the broker itself.

A protocol gets a gate for the identity of its client (`Broker.gate`), and publishes,
subscribes, joins groups, looks things up and administers through nothing else. The gate
asks the authorizers (`rules.Decisions`), once per action and name until the rules change,
and keeps the broker's own topics closed.

Names that authorizers are asked about: a topic by its name, a consumer group by its retry
topic ``%RETRY%<group>``, and the broker as a whole by the empty name. In a topic that a `Feed` follows each message
has a name, its tag; it is asked about as ``topic/name``, and so is a topic filter.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Protocol, final

from martlet.access.grant import (
    BrokerAdminGrant,
    BrokerGrant,
    ConsumeGrant,
    GroupAdminGrant,
    GroupGrant,
    PublishGrant,
    TopicAdminGrant,
    TopicGrant,
    is_closed,
)
from martlet.access.rules import Decisions, FollowPermit
from martlet.contracts import Identity, Peer, Router
from martlet.delivery.cursor import Cursor, Feed
from martlet.delivery.fanout import Encoding
from martlet.delivery.group_members import GroupPolicy, Member
from martlet.delivery.selection import EVERYTHING, Selection
from martlet.delivery.sessions import Session, Sessions
from martlet.delivery.share import Share
from martlet.delivery.shared_groups import Shares
from martlet.delivery.subscriptions import Start, Subscription, Subscriptions, from_tail
from martlet.errors import Reason, Refused
from martlet.message import Message, Placed
from martlet.state.journal import Journal
from martlet.store import Found, Store
from martlet.store.layout import RecordView
from martlet.store.light import MULTI, light_places, light_topics, may_be_indexed
from martlet.store.queues import Queue
from martlet.store.tags import find_tags
from martlet.store.writer import RunItem, RunResult
from martlet.tables.groups import Groups
from martlet.tables.topics import DLQ_PREFIX, RETRY_PREFIX, Topic, Topics, is_reserved
from martlet.turns import Steps

__all__ = ["Gate"]


class Behind(Protocol):
    """What a gate leads to; `martlet.broker.Broker` is one."""

    store: Store
    topics: Topics
    groups: Groups
    subscriptions: Subscriptions
    shares: Shares
    sessions: Sessions
    routers: tuple[tuple[str, Router], ...]

    def publish(self, message: Message) -> Placed: ...

    def publish_many(self, messages: Sequence[Message]) -> list[Placed | Refused]: ...

    def publish_batch(self, messages: Sequence[Message]) -> list[Placed]: ...

    def find_queue(self, topic: str, queue_id: int) -> Queue | None: ...

    def publish_run(self, run: Sequence[RunItem], *, atomic: bool = ...) -> RunResult: ...

    def publish_atomic(
        self, messages: Sequence[Message], acknowledgements: Sequence[tuple[Journal, bytes]] = ...
    ) -> list[Placed]: ...


@final
class Gate:
    """What one identity may do with the broker.

    Every method raises `Refused` (NO_PERMISSION) for what the identity may not do, besides what it says itself.
    """

    __slots__ = (
        "_behind",
        "_decisions",
        "_publish",
        "_tables",
        "_tags",
        "identity",
        "publishable",
    )

    def __init__(self, behind: Behind, decisions: Decisions) -> None:
        self._behind = behind
        self._decisions = decisions
        # Messages name light topics themselves only where routers are.
        self._publish = self._publish_named if behind.routers else behind.publish
        # By topic what `check_publish` returned; for the hot path of a protocol.
        self.publishable: Mapping[str, PublishGrant] = decisions.publishable
        self._tags: Mapping[str, Collection[bytes]] = decisions.publishable_tags
        self._tables = behind.store, behind.topics, behind.groups
        self.identity: Identity = decisions.identity

    def allows(self, action: str, name: str) -> bool:
        """Whether the identity may do *action* (``publish``, ``read`` or ``manage``) on *name*."""
        return self._decisions.allows(action, name)

    def check(self, action: str, name: str) -> None:
        """Raise `Refused` (NO_PERMISSION) unless the identity may do *action* on *name*."""
        self._decisions.check(action, name)

    # publishing

    def publish(self, message: Message) -> Placed:
        """Store *message* as `Broker.publish` does; asks for ``publish`` on its topic, or its name there.

        With light queues it asks for that on each light topic, too, that the message names.
        """
        if message.topic not in self.publishable:
            self._check_message(message.topic, message.properties)
        return self._publish(message)

    def _publish_named(self, message: Message) -> Placed:
        self._check_light(message)
        return self._behind.publish(message)

    def _check_light(self, message: Message) -> None:
        if message.properties.find(MULTI) >= 0 and may_be_indexed(message.topic.encode()):
            for topic in light_topics(message.properties):
                self.check("publish", topic)

    def publish_many(self, messages: Sequence[Message]) -> list[Placed | Refused]:
        """Store *messages* one by one; return for each where it was stored, or why it was not."""
        if not self._behind.routers and self.publishable.keys() >= {message.topic for message in messages}:
            return self._behind.publish_many(messages)
        refusals: dict[int, Refused] = {}
        for place, message in enumerate(messages):
            try:
                self._check_publish(message)
            except Refused as refused:
                refusals[place] = refused
        if not refusals:
            return self._behind.publish_many(messages)
        allowed = [message for place, message in enumerate(messages) if place not in refusals]
        results = iter(self._behind.publish_many(allowed))
        return [refusals[place] if place in refusals else next(results) for place in range(len(messages))]

    def publish_batch(self, messages: Sequence[Message]) -> list[Placed]:
        """Store *messages* of one topic in one queue, in order: all of them, or none."""
        self._check_publish_all(messages)
        return self._behind.publish_batch(messages)

    def find_queue(self, topic: str, queue_id: int) -> Queue | None:
        """Return the queue for a message of a run; None where that must go through `publish`, as `Broker.find_queue`.

        Asks nobody, so it is None as well until `check_publish` has allowed the topic.
        """
        return self._behind.find_queue(topic, queue_id) if topic in self.publishable else None

    def publish_run(self, run: Sequence[RunItem], *, atomic: bool = False) -> RunResult:
        """Store the messages of *run* in queues of `find_queue`, as `Broker.publish_run` does."""
        if not self.publishable.keys() >= {item[0].topic for item in run}:
            for item in run:
                if item[0].topic not in self.publishable:
                    self._check_message(item[0].topic, item[2])
        return self._behind.publish_run(run, atomic=atomic)

    def publish_atomic(
        self, messages: Sequence[Message], acknowledgements: Sequence[tuple[Journal, bytes]] = ()
    ) -> list[Placed]:
        """Store *messages* of any topics, and notes, all or none, as `Broker.publish_atomic` does."""
        self._check_publish_all(messages)
        return self._behind.publish_atomic(messages, acknowledgements)

    def _check_publish_all(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._check_publish(message)

    def _check_publish(self, message: Message) -> None:
        if message.topic not in self.publishable:
            self._check_message(message.topic, message.properties)
        if self._behind.routers:
            self._check_light(message)

    def _check_message(self, topic: str, properties: bytes) -> None:
        """Raise `Refused` (NO_PERMISSION) unless a message with *properties* may be published to *topic*."""
        tags = self._tags.get(topic)
        if tags is not None and find_tags(properties) in tags:
            return
        self.check_publish(topic)
        if topic not in self.publishable:
            self._decisions.check_tag(topic, find_tags(properties))

    def give_back(self, group: str, message: Message) -> Placed:
        """Store a *message* that a member of *group* could not process, in the group's retry or dead-letter topic.

        Asks for ``read`` on the group: its members may do so without a permission to publish.
        """
        self.check("read", RETRY_PREFIX + group)
        if message.topic not in (RETRY_PREFIX + group, DLQ_PREFIX + group):
            text = f"topic[{message.topic}] is neither the retry topic nor the dead-letter topic of group[{group}]"
            raise Refused(Reason.ILLEGAL, text)
        return self._publish(message)

    def check_publish(self, topic: str) -> PublishGrant:
        """Return what is needed to find *topic*, or to create it, before messages are published to it.

        Where messages have names, nobody is asked about an existing topic: each message is by its name.
        """
        grant = self.publishable.get(topic)
        if grant is not None:
            return grant
        if is_closed(topic):
            raise Refused(
                Reason.NO_PERMISSION, f"Sending message to topic[{topic}] is forbidden; only the broker writes it"
            )
        grant = PublishGrant(*self._tables, topic)
        if self._decisions.has_names(topic):
            if grant.get() is None:
                self.check("publish", topic)
        else:
            self.check("publish", topic)
            self._decisions.remember_publishable(grant)
        return grant

    # consuming

    def find_topic(self, name: str, action: str, new_queues: int) -> Topic | None:
        """Return topic *name* for *action*, ``publish`` or ``read``; None when there is none.

        Where naming a topic creates it (`Topics.auto_create_enabled`), it has *new_queues* queues; a dead-letter
        topic is created for an existing group.
        """
        if action == "publish":
            self.check_publish(name)
        else:
            self._check_open(name)
            self.check(action, name)
        _, topics, groups = self._tables
        found = topics.get(name)
        if found is not None or not topics.auto_create_enabled:
            return found
        if name.startswith(DLQ_PREFIX) and groups.get(name.removeprefix(DLQ_PREFIX)) is not None:
            return topics.ensure(name, 1)
        return None if is_reserved(name) else topics.ensure(name, new_queues)

    def subscribe(
        self,
        peer: Peer,
        topic: str,
        encoding: Encoding,
        *,
        selection: Selection = EVERYTHING,
        start: Start = from_tail,
        credit: int = 0,
    ) -> Subscription:
        """Return a new subscription, as `Subscriptions.open` does; asks for ``read`` on *topic*.

        It asks again at each `Subscription.collect`, which raises `Refused` once the answer is no.
        """
        self._check_open(topic)
        permit = self._decisions.reading(topic)
        permit()
        return self._behind.subscriptions.open(
            peer, topic, encoding, selection=selection, start=start, credit=credit, permit=permit
        )

    def follow(
        self, feed: Feed, wake: Callable[[], None], filters: Mapping[str, Hashable], position: int | None = None
    ) -> Cursor:
        """Return a new cursor of *feed*, as `Feed.open` does; asks for ``read`` on each filter in the feed's topics.

        It asks about each name that a filter matches as well, and delivers only what may be read. When the rules
        change it asks again about the filters: `Cursor.collect` raises `Refused` once one is denied.
        """
        permit = self._follow_permit(feed)
        for each in filters:
            permit.check(each)
        return feed.open(wake, filters, position, permit=permit)

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
        return FollowPermit(self._decisions, feed.topics)

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
        policy: GroupPolicy | None = None,
        holder: Hashable = None,
    ) -> Member:
        """Return a new member of a shared group, as `Shares.join` does; asks for ``read`` on *topic* and *group*.

        For a group that is no consumer group, one with a *policy*, it asks for the topic only. It asks again at each
        `Member.collect`, which raises `Refused` once the answer is no.
        """
        permit = self._may_share(topic, group, policy)
        return self._behind.shares.join(
            peer,
            topic,
            group,
            encoding,
            lease_s=lease_s,
            credit=credit,
            selection=selection,
            start=start,
            permit=permit,
            policy=policy,
            holder=holder,
        )

    def share(self, topic: str, group: str, policy: GroupPolicy | None = None) -> Share | None:
        """Return a shared group to settle messages by their handles, as `Shares.find`; asks as `join` does."""
        self._may_share(topic, group, policy)
        return self._behind.shares.find(topic, group, policy)

    def _may_share(self, topic: str, group: str, policy: GroupPolicy | None) -> Callable[[], None]:
        self._check_open(topic)
        names = (topic,) if policy is not None else (topic, RETRY_PREFIX + group)
        permit = self._decisions.reading(*names)
        permit()
        return permit

    def consume(self, group: str, topic: str) -> ConsumeGrant:
        """Return what a pull by *group* needs; asks for ``read`` on both, so call it before each answer."""
        grant = self._decisions.consumable.get((group, topic))
        if grant is None:
            self.check("read", RETRY_PREFIX + group)
            self._check_open(topic)
            self.check("read", topic)
            grant = ConsumeGrant(*self._tables, group, topic)
            self._decisions.remember_consumable(grant)
        return grant

    def _check_open(self, topic: str) -> None:
        if is_closed(topic):
            raise Refused(Reason.NO_PERMISSION, f"Reading topic[{topic}] is forbidden; it is for the broker itself")

    # sessions

    def open_session(
        self, protocol: str, name: str, position: int, lost: Callable[[str], None], *, expiry_s: int | None = None
    ) -> tuple[Session, bool]:
        """Return the session *name* of this identity, as `Sessions.open` does, and whether it existed before."""
        return self._behind.sessions.open(protocol, self.identity.name, name, position, lost, expiry_s=expiry_s)

    # looking things up

    def query(self, topic: str) -> TopicGrant:
        """Return what requests about *topic* read; asks for ``read``."""
        self.check("read", topic)
        return TopicGrant(*self._tables, topic)

    def query_group(self, group: str) -> GroupGrant:
        """Return what requests about *group*, and its members, need; asks for ``read`` on it."""
        self.check("read", RETRY_PREFIX + group)
        return GroupGrant(*self._tables, group)

    def query_broker(self) -> BrokerGrant:
        """Return what requests about the broker as a whole read; asks for ``read`` on the empty name."""
        self.check("read", "")
        return BrokerGrant(*self._tables)

    def query_keys(
        self, topic: str, key: bytes, count_max: int, begin_ms: int, end_ms: int, bytes_max: int
    ) -> Steps[Found]:
        """Return the records of *topic* that carry *key*, as `Store.query_keys` does; asks for ``read``.

        What is in the broker's own topics is shown to those who may ``manage`` the broker.
        """
        self._check_shown(topic)
        return self._behind.store.query_keys(topic, key, count_max, begin_ms, end_ms, bytes_max)

    async def record_at(self, position: int) -> bytes | None:
        """Return the record at *position* of the log, None when no intact one starts there.

        Asks as `query_keys` does; it is enough to be allowed to read a light topic that the record names. The disk is
        waited for in a worker thread.
        """
        data = await self._behind.store.record_far(position)
        if data is not None and not self._may_read_light(RecordView(data)):
            self._check_shown(RecordView(data).topic)
        return data

    def _may_read_light(self, record: RecordView) -> bool:
        """Whether the identity may read *record* in one of the light queues that have it."""
        if record.properties.find(MULTI) < 0 or not may_be_indexed(record.topic_bytes):
            return False
        named = [name for name, _ in light_places(record.topic_bytes, record.properties)]
        return any(self.allows("read", name.decode("utf-8", "replace")) for name in named)

    def _check_shown(self, topic: str) -> None:
        self.check("read", topic)
        if is_closed(topic):
            self.check("manage", "")

    # administration

    def manage(self, topic: str) -> TopicAdminGrant:
        """Return what is needed to create, change or delete *topic*; asks for ``manage``."""
        self.check("manage", topic)
        return TopicAdminGrant(*self._tables, topic)

    def manage_group(self, group: str) -> GroupAdminGrant:
        """Return what is needed to create, change, reset or delete *group*; asks for ``manage``."""
        self.check("manage", RETRY_PREFIX + group)
        return GroupAdminGrant(*self._tables, group)

    def manage_broker(self) -> BrokerAdminGrant:
        """Return what is needed to change the broker as a whole; asks for ``manage`` on the empty name."""
        self.check("manage", "")
        return BrokerAdminGrant(*self._tables)
