"""Grants: the operations of a permitted request. Each is bound to one topic, one group or the whole broker.

A grant has no method that reads or changes another topic or group. Do not keep a grant longer than its request: it does
not check permissions again.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, final

from martlet.errors import Reason, Refused
from martlet.runtime.steps import Steps
from martlet.store import Queue, ReadResult, Store, StoreConfig, StoreStatistics, Usage
from martlet.store.format.notes import OWN_PREFIX
from martlet.tables.groups import Group, Groups
from martlet.tables.rocketmq_json import DataVersion
from martlet.tables.topics import BROKER_TOPICS, DLQ_PREFIX, READ, RETRY_PREFIX, WRITE, Topic, Topics

__all__ = [
    "BrokerAdminGrant",
    "BrokerGrant",
    "ConsumeGrant",
    "GroupAdminGrant",
    "GroupDeletionGrant",
    "GroupGrant",
    "PublishGrant",
    "TopicAdminGrant",
    "TopicDeletionGrant",
    "TopicGrant",
    "TopicOffsets",
    "check_not_closed",
    "is_closed",
]


def is_closed(topic: str) -> bool:
    """Return whether *topic* is internal: one of RocketMQ's internal topics, or one of Martlet's such as a journal."""
    return topic in BROKER_TOPICS or topic.startswith(OWN_PREFIX)


def check_not_closed(topic: str) -> None:
    """Raise `Refused` (NO_PERMISSION) if only the broker writes *topic*."""
    if is_closed(topic):
        text = f"Sending message to topic[{topic}] is forbidden; only the broker writes it"
        raise Refused(Reason.NO_PERMISSION, text)


class _Grant:
    """One topic or group by its name, and the tables that its grant uses."""

    __slots__ = ("_groups", "_store", "_topics", "name")

    def __init__(self, store: Store, topics: Topics, groups: Groups, name: str) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self.name: Final = name


class TopicOffsets(_Grant):
    """One topic's configuration, and the offsets and times of its queues, but no messages."""

    __slots__ = ()

    def get(self) -> Topic | None:
        """Return the topic; None if there is none."""
        return self._topics.get(self.name)

    def has_used(self, queue_id: int) -> bool:
        """Return whether this queue was ever used."""
        return self._queue(queue_id) is not None

    def first_offset(self, queue_id: int) -> int:
        """Return the oldest offset left; 0 for a queue that was never used."""
        queue = self._queue(queue_id)
        return queue.first_offset if queue is not None else 0

    def end_offset(self, queue_id: int) -> int:
        """Return the offset after the newest readable message; 0 for a queue that was never used."""
        queue = self._queue(queue_id)
        return self._store.readers.end_offset(queue) if queue is not None else 0

    def next_offset(self, queue_id: int) -> tuple[int, int]:
        """Return the offset of the next message that is appended, and the log position up to which it must be
        readable.

        A consumer that begins there gets only messages published from now on: hold the answer until that position
        (`Peer.hold_until`), because a failed commit would reuse the offset.
        """
        queue = self._queue(queue_id)
        return (queue.next_offset, queue.last_end) if queue is not None else (0, 0)

    def store_ms_at(self, queue_id: int, offset: int) -> Steps[int]:
        """Return when message *offset* was stored; -1 if it is not readable or damaged. Raises `NotReady`."""
        queue = self._queue(queue_id)
        return -1 if queue is None else (yield from self._store.lookup.store_ms_at(queue, offset))

    def earliest_store_ms(self, queue_id: int) -> Steps[int]:
        """Return when the oldest message was stored; -1 for an empty queue. Raises `NotReady`."""
        queue = self._queue(queue_id)
        return -1 if queue is None else (yield from self._store.lookup.earliest_store_ms(queue))

    def offset_by_time(self, queue_id: int, timestamp_ms: int, *, upper: bool = False) -> Steps[int]:
        """Like `Lookup.offset_by_time`; 0 for a queue that was never used. Raises `NotReady`."""
        queue = self._queue(queue_id)
        return 0 if queue is None else (yield from self._store.lookup.offset_by_time(queue, timestamp_ms, upper))

    def position_at(self, queue_id: int, offset: int) -> Steps[int]:
        """Return the log position of message *offset*; -1 if it is not readable or lost. Raises `NotReady`."""
        queue = self._queue(queue_id)
        return -1 if queue is None else (yield from self._store.lookup.position_at(queue, offset))

    def is_cold(self, queue_id: int, offset: int) -> bool:
        """Return whether only the cold tier has message *offset*."""
        queue = self._queue(queue_id)
        return queue is not None and offset < queue.local_from and self._store.cold.has(queue, offset)

    @property
    def readable(self) -> int:
        """The log position before which everything is readable."""
        return self._store.readable

    def bytes_since(self, queue_id: int, offset: int) -> Steps[int]:
        """Return the bytes appended to the log since message *offset*; -1 if it is not readable. Raises `NotReady`."""
        queue = self._queue(queue_id)
        position = -1 if queue is None else (yield from self._store.lookup.position_at(queue, offset))
        return self._store.readable - position if position >= 0 else -1

    def _queue(self, queue_id: int) -> Queue | None:
        return self._store.queues.find(self.name, queue_id)


@final
class TopicGrant(TopicOffsets):
    """One topic, for queries; returned by `QueryGate.topic`."""

    __slots__ = ()

    def entries(self, queue_id: int, offset: int, count: int) -> Steps[bytes]:
        """Return up to *count* consume queue entries from *offset* on; stops at the end of a block.

        Raises `NotReady`.
        """
        queue = self._queue(queue_id)
        return b"" if queue is None else (yield from self._store.lookup.entries(queue, offset, count))

    def groups(self) -> list[str]:
        """Return the groups with committed offsets in the topic."""
        return self._groups.offsets.groups_of(self.name)

    def committed(self, group: str) -> Mapping[int, int]:
        """Return the committed offsets of *group* in the topic: queue id -> offset; do not change or keep it."""
        return self._groups.offsets.committed(group, self.name)


@final
class TopicAdminGrant(TopicOffsets):
    """One topic, for changes; returned by `AdminGate.topic`."""

    __slots__ = ()

    def update(
        self,
        read_queues: int = 8,
        write_queues: int = 8,
        perm: int = READ | WRITE,
        sys_flag: int = 0,
        order: bool = False,
        attributes: dict[str, str] | None = None,
        filter_type: str = "SINGLE_TAG",
        *,
        force: bool = False,
    ) -> Topic:
        """Create or change the topic, and return it. Raises `Refused` like `Topics.update`, or if it is internal."""
        _check_changeable(self.name)
        return self._topics.update(
            self.name, read_queues, write_queues, perm, sys_flag, order, attributes, filter_type, force=force
        )


@final
class TopicDeletionGrant(_Grant):
    """One topic, to delete it; returned by `AdminGate.topic_deletion`."""

    __slots__ = ()

    def delete(self) -> bool:
        """Delete the topic, its messages and the groups' offsets in it; return False if there was none.

        Raises:
          Refused: it is internal, or the disk is full; the topic was not deleted.
        """
        _check_changeable(self.name)
        if not self._topics.delete(self.name):
            return False
        self._groups.offsets.forget_topic(self.name)
        return True


def _check_changeable(topic: str) -> None:
    if is_closed(topic):
        raise Refused(Reason.NO_PERMISSION, f"Changing topic[{topic}] is forbidden; it is internal to the broker")


class GroupGrant(_Grant):
    """One consumer group, for queries and for its members; returned by `QueryGate.group`."""

    __slots__ = ()

    def get(self) -> Group | None:
        """Return the group; None if there is none."""
        return self._groups.get(self.name)

    def ensure(self) -> Group | None:
        """Return the group, created if the configuration allows it; None otherwise. Raises `Refused`."""
        return self._groups.ensure(self.name)

    def topics(self) -> list[str]:
        """Return the topics with committed offsets of the group."""
        return self._groups.offsets.topics_of(self.name)

    def committed(self, topic: str) -> Mapping[int, int]:
        """Return the group's committed offsets in *topic*: queue id -> offset; do not change or keep it."""
        return self._groups.offsets.committed(self.name, topic)

    def offset(self, topic: str, queue_id: int) -> int:
        """Return the group's committed offset in that queue; -1 if there is none."""
        return self._groups.offsets.get(self.name, topic, queue_id)

    def is_forbidden(self, topic: str) -> bool:
        """Return whether an administrator has forbidden the group to read *topic*."""
        return self._groups.is_forbidden(self.name, topic)

    def topic_offsets(self, topic: str) -> TopicOffsets:
        """Return the offsets of *topic*, to compare the group's committed offsets with."""
        return TopicOffsets(self._store, self._topics, self._groups, topic)

    def make_retry_topic(self, queues: int, sys_flag: int = 0) -> Topic:
        """Return the group's retry topic; create it with *queues* queues if there is none. Raises `Refused`."""
        return self._topics.ensure(RETRY_PREFIX + self.name, queues, sys_flag=sys_flag)

    def make_dead_letter_topic(self) -> Topic:
        """Return the group's dead-letter topic; create it if there is none. Raises `Refused`."""
        return self._topics.ensure(DLQ_PREFIX + self.name, 1)


@final
class GroupAdminGrant(GroupGrant):
    """One consumer group, for changes; returned by `AdminGate.group`."""

    __slots__ = ()

    def update(self, group: Group) -> Group:
        """Create or change the group. Raises `Refused` as `Groups.update`, or if *group* has another name."""
        if group.name != self.name:
            text = f"group {group.name!r} cannot be changed; the permission is for group {self.name!r}"
            raise Refused(Reason.NO_PERMISSION, text)
        return self._groups.update(group)

    def set_forbidden(self, topic: str, *, readable: bool) -> None:
        """Allow or forbid the group to read *topic*. Raises `Refused` (BUSY)."""
        self._groups.set_forbidden(self.name, topic, readable=readable)

    def commit(self, topic: str, offsets: Mapping[int, int]) -> None:
        """Commit offsets in *topic*: queue id -> offset. Raises `Refused` (BUSY) if there are too many."""
        self._groups.offsets.check_may_commit(self.name, topic, offsets)
        for queue_id, offset in offsets.items():
            self._groups.offsets.commit(self.name, topic, queue_id, offset)

    def reset(self, topic: str, offsets: Mapping[int, int]) -> None:
        """Make the next pull of each queue start at its new offset. Raises `Refused` (BUSY) if there are too many."""
        self._groups.offsets.check_may_commit(self.name, topic, offsets)
        self._groups.offsets.reset(self.name, topic, offsets)


@final
class GroupDeletionGrant(_Grant):
    """One consumer group, to delete it; returned by `AdminGate.group_deletion`."""

    __slots__ = ()

    def delete(self, *, clean_offsets: bool) -> bool:
        """Delete the group, with *clean_offsets* also its offsets; return False if there was none."""
        return self._groups.delete(self.name, clean_offsets=clean_offsets)


@final
class ConsumeGrant:
    """One group as a consumer of one topic; returned by `Gate.consume`."""

    __slots__ = ("_groups", "_store", "_topics", "group", "topic")

    def __init__(self, store: Store, topics: Topics, groups: Groups, group: str, topic: str) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self.group: Final = group
        self.topic: Final = topic

    def get_topic(self) -> Topic | None:
        """Return the topic; None if there is none."""
        return self._topics.get(self.topic)

    def open_topic(self) -> Topic | None:
        """As `get_topic`; but where light queues are on, the first reader of a light topic creates it.

        Raises:
          Refused: there are too many light queues (Reason.BUSY).
        """
        return self._topics.open(self.topic)

    def get_group(self) -> Group | None:
        """Return the group; None if there is none."""
        return self._groups.get(self.group)

    def group_policy(self) -> Group | None:
        """Return the group, or an unstored new one; None if the configuration allows none. Raises `Refused`."""
        return self._groups.policy(self.group)

    def ensure_group(self) -> Group | None:
        """Return the group, created if the configuration allows it; None otherwise. Raises `Refused`."""
        return self._groups.ensure(self.group)

    def is_forbidden(self) -> bool:
        """Return whether an administrator has forbidden the group to read the topic."""
        return self._groups.is_forbidden(self.group, self.topic)

    def topic_offsets(self) -> TopicOffsets:
        """Return the offsets of the topic."""
        return TopicOffsets(self._store, self._topics, self._groups, self.topic)

    def end_offset(self, queue_id: int) -> int:
        """Return the offset after the newest readable message; 0 for a queue that was never used."""
        queue = self._store.queues.find(self.topic, queue_id)
        return self._store.readers.end_offset(queue) if queue is not None else 0

    async def read(self, queue_id: int, offset: int, count_max: int, budget_bytes: int) -> ReadResult:
        """Read up to *count_max* messages of about *budget_bytes* together; in a worker thread if they are not in
        memory.

        Raises:
          Refused: the queue was never used (Reason.NOT_FOUND).
          StoreError: the records could not be read.
        """
        store = self._store
        queue = store.queues.find(self.topic, queue_id)
        if queue is None:
            raise Refused(Reason.NOT_FOUND, f"queue {queue_id} of topic {self.topic!r} has no messages yet; send one")
        near = store.readers.read_near(queue, offset, count_max, budget_bytes)
        return near if near is not None else await store.readers.read_far(queue, offset, count_max, budget_bytes)

    def offset(self, queue_id: int) -> int:
        """Return the group's committed offset in that queue; -1 if there is none."""
        return self._groups.offsets.get(self.group, self.topic, queue_id)

    def commit(self, queue_id: int, offset: int) -> None:
        """Commit *offset*: the group has consumed everything below it. Raises `Refused` (BUSY): too many offsets."""
        self._groups.offsets.check_may_commit(self.group, self.topic, (queue_id,))
        self._groups.offsets.commit(self.group, self.topic, queue_id, offset)

    def pending_reset(self, queue_id: int) -> int:
        """Return the offset of the pending reset; -1 if there is none."""
        return self._groups.offsets.pending_reset(self.group, self.topic, queue_id)

    def take_reset(self, queue_id: int) -> int:
        """Return the offset of the pending reset like `pending_reset`, and clear it."""
        return self._groups.offsets.take_reset(self.group, self.topic, queue_id)


@final
class PublishGrant(_Grant):
    """One topic, to find or create it before publishing; returned by `Gate.check_publish`."""

    __slots__ = ("_readable_end", "_tail", "code_of")

    def __init__(self, store: Store, topics: Topics, groups: Groups, name: str) -> None:
        super().__init__(store, topics, groups, name)
        self._tail = store.tail
        self._readable_end = store.readable_end
        self.code_of: Final = store.writer.code_of  # returns the tag code of encoded properties, for `Gate.publish_all`

    def get(self) -> Topic | None:
        """Return the topic; None if there is none."""
        return self._topics.get(self.name)

    def auto_create(self, template: str, queues_wanted: int) -> Topic | None:
        """Create the topic like topic *template*; return None if the configuration forbids it. Raises `Refused`."""
        return self._topics.auto_create(self.name, template, queues_wanted)

    def retry_group(self) -> GroupGrant | None:
        """Return the group if this is a retry topic, else None."""
        group = self.name.removeprefix(RETRY_PREFIX)
        return GroupGrant(self._store, self._topics, self._groups, group) if group != self.name else None

    @property
    def unflushed_bytes(self) -> int:
        """The number of appended bytes of the log that are not readable yet."""
        return self._tail.position - self._readable_end.position


class BrokerGrant:
    """The whole broker, for queries; returned by `QueryGate.broker`."""

    __slots__ = ("_groups", "_store", "_topics")

    def __init__(self, store: Store, topics: Topics, groups: Groups) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups

    @property
    def config(self) -> StoreConfig:
        """The store's configuration."""
        return self._store.config

    @property
    def directory(self) -> str:
        """The store's directory."""
        return self._store.data_directory.path

    @property
    def readable(self) -> int:
        """The log position before which everything is readable."""
        return self._store.readable

    @property
    def auto_create_topics(self) -> bool:
        return self._topics.auto_create_enabled

    @property
    def auto_create_groups(self) -> bool:
        return self._groups.auto_create

    @property
    def topics_version(self) -> DataVersion:
        return self._topics.version

    @property
    def groups_version(self) -> DataVersion:
        return self._groups.version

    def topics(self) -> Iterator[Topic]:
        """Yield all topics in order of creation."""
        return iter(self._topics)

    def groups(self) -> Sequence[str]:
        """Return the names of all groups in order of creation."""
        return self._groups.names()

    def group(self, name: str) -> GroupGrant:
        """Return the grant for one group."""
        return GroupGrant(self._store, self._topics, self._groups, name)

    def forbidden(self) -> Mapping[str, Mapping[str, int]]:
        """Return the topics that groups must not read: group -> topic -> bits; do not change or keep it."""
        return self._groups.forbidden()

    def offsets_in_steps(self) -> Steps[list[bytes]]:
        """Return the committed offsets of all groups as JSON."""
        return self._groups.offsets.json_in_steps()

    def statistics(self) -> StoreStatistics:
        """Return the store's counters."""
        return self._store.statistics()

    def disk_usage(self) -> Usage:
        """Return the usage of the store's disk."""
        return self._store.data_directory.usage()

    def earliest_store_ms(self) -> Steps[int]:
        """Return when the log's first record was stored; -1 if there is none or it is damaged."""
        return self._store.lookup.earliest_store_ms()


@final
class BrokerAdminGrant(BrokerGrant):
    """The whole broker, for changes; returned by `AdminGate.broker`."""

    __slots__ = ()

    def set_config(self, config: StoreConfig) -> None:
        """Replace the store's configuration; changes of retention by age have an effect at once."""
        self._store.set_config(config)

    def set_auto_create(self, *, topics: bool | None = None, groups: bool | None = None) -> None:
        """Switch automatic creation of topics or groups on or off; None leaves it unchanged."""
        if topics is not None:
            self._topics.auto_create_enabled = topics
        if groups is not None:
            self._groups.auto_create = groups

    def clean(self) -> None:
        """Run retention now instead of at the next interval."""
        self._store.upkeep.retention.look()

    def delete_unused_topics(self) -> Steps[None]:
        """Remove stored messages of topics that no longer exist, in slices."""
        for name in self._store.topics_on_disk():
            if self._topics.get(name) is None:
                self._store.deletions.delete_topic(name)
                yield
