"""The topic table: queues, permissions, attributes (RocketMQ topics.json).

The rules for names, permissions and automatic creation are those of RocketMQ TopicValidator
and TopicConfigManager.createTopicInSendMessageMethod.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, final

from martlet.errors import Reason, Refused
from martlet.runtime.clock import Clock
from martlet.runtime.steps import Steps
from martlet.store import Queue, Store
from martlet.store.format.light import check_light_name, is_light
from martlet.tables import names
from martlet.tables.rocketmq_json import DataVersion, head_of, parse, reading, render_in_steps, table_in
from martlet.tables.saved import NO_POSITION, POSITION_KEY, Table

__all__ = [
    "BROKER_TOPICS",
    "DLQ_PREFIX",
    "EVENT_TOPIC",
    "INHERIT",
    "READ",
    "RESERVE_TIME",
    "RETRY_PREFIX",
    "REVIVE_PREFIX",
    "SYSTEM_TOPICS",
    "TEMPLATE_TOPIC",
    "TIMER_TOPIC",
    "WRITE",
    "Topic",
    "Topics",
    "check_name",
    "is_reserved",
    "reserve_hours",
]

READ: Final = 4
WRITE: Final = 2
INHERIT: Final = 1

RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
TEMPLATE_TOPIC: Final = "TBW102"

# Consumers may read it: RocketMQ's admin tool does in startMonitoring, and fails if it may not.
EVENT_TOPIC: Final = "OFFSET_MOVED_EVENT"
# RocketMQ lets every client write to this topic, and so send to any topic and recall any message.
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
# RocketMQ's check points of pops, and their acknowledgements; the cluster's name follows.
REVIVE_PREFIX: Final = "rmq_sys_REVIVE_LOG_"
# Topics to which only the broker writes (TopicValidator.NOT_ALLOWED_SEND_TOPIC_SET, and the timer topic).
BROKER_TOPICS: Final = frozenset(
    (
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        EVENT_TOPIC,
        TIMER_TOPIC,
    )
)
# Names that clients can neither change nor delete (TopicValidator).
SYSTEM_TOPICS: Final = (
    TEMPLATE_TOPIC,
    "SCHEDULE_TOPIC_XXXX",
    "BenchmarkTest",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "RMQ_SYS_TRACE_TOPIC",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC",
    "TRANS_CHECK_MAX_TIME_TOPIC",
    "SELF_TEST_TOPIC",
    EVENT_TOPIC,
    "CHECKPOINT_TOPIC",
)
SYSTEM_PREFIX: Final = "rmq_sys_"

# The attribute with a topic's own retention in hours (TopicAttributes; FlatMessageFile.getFileReservedHours).
RESERVE_TIME: Final = "reserve.time"

TOPIC_CHARS_MAX: Final = 127
RETRY_TOPIC_CHARS_MAX: Final = 255
QUEUES_MAX: Final = 16384
HOURS_DIGITS_MAX: Final = 19  # of the largest Java long, RocketMQ's type for hours
# Keys of a topic in topics.json that RocketMQ does not have.
WANTED_KEY: Final = "martletReadQueueNums"
BEGINS_KEY: Final = "martletQueueBegins"
# A registration with a name server is one frame of at most 16 MiB, which has room for about 90,000 topics.
TOPICS_MAX: Final = 80_000


def check_name(name: str) -> None:
    """Raise `Refused` (PARAMETER) unless *name* is a valid name for a new topic."""
    if is_light(name):
        text = "is a light topic, which nobody creates or sends to; name it in a message's INNER_MULTI_DISPATCH"
        raise Refused(Reason.PARAMETER, f"topic[{name}] {text}")
    limit = RETRY_TOPIC_CHARS_MAX if name.startswith((RETRY_PREFIX, DLQ_PREFIX)) else TOPIC_CHARS_MAX
    # RocketMQ names a retry topic of POP %RETRY%group+topic.
    names.check("topic", name.replace("+", "_", 1) if name.startswith(RETRY_PREFIX) else name, limit)


def is_reserved(name: str) -> bool:
    """Return whether only the broker may create topic *name*: a system, retry or dead-letter topic."""
    return name.startswith((SYSTEM_PREFIX, RETRY_PREFIX, DLQ_PREFIX)) or name in SYSTEM_TOPICS


def _is_system(name: str) -> bool:
    """Return whether topic *name* is the broker's own, with messages that parts of the broker need."""
    return name.startswith(SYSTEM_PREFIX) or name in SYSTEM_TOPICS or name in BROKER_TOPICS


def reserve_hours(attributes: Mapping[str, str]) -> int:
    """Return the hours for which a topic with *attributes* keeps messages; 0 for as long as the log, as in RocketMQ."""
    value = attributes.get(RESERVE_TIME, "")
    return int(value) if value.isascii() and value.isdecimal() and len(value) <= HOURS_DIGITS_MAX else 0


@final
class Topic:
    """One topic, which is replaced when it changes. ``queues`` has the store's queues that were used so far, by id.

    ``read_queues`` is at least ``write_queues``, so that nobody writes where nobody reads. It also counts removed
    queues that still have messages: ``read_queues_wanted`` is the number without them, if it is smaller.
    ``open_queues`` is the number of queues that accept messages: 0 if the topic is not writable. ``begins`` has the
    offset where a queue begins for readers that know the topic and not the queue: it was removed and added again, and
    its older messages had been read.
    """

    __slots__ = (
        "_store",
        "attributes",
        "begins",
        "filter_type",
        "name",
        "open_queues",
        "order",
        "perm",
        "queues",
        "read_queues",
        "read_queues_wanted",
        "sys_flag",
        "write_queues",
    )

    def __init__(
        self,
        store: Store,
        name: str,
        read_queues: int = 8,
        write_queues: int = 8,
        perm: int = READ | WRITE,
        sys_flag: int = 0,
        order: bool = False,
        attributes: dict[str, str] | None = None,
        filter_type: str = "SINGLE_TAG",
        read_queues_wanted: int | None = None,
        begins: dict[int, int] | None = None,
    ) -> None:
        self._store = store
        self.name = name
        self.read_queues = max(read_queues, write_queues)
        self.read_queues_wanted = read_queues_wanted
        self.begins = begins or {}
        self.write_queues = write_queues
        self.perm = perm
        self.sys_flag = sys_flag
        self.order = order
        self.attributes = attributes or {}
        self.filter_type = filter_type
        self.open_queues = max(write_queues, read_queues) if perm & WRITE and write_queues else 0
        self.queues: dict[int, Queue] = {}

    def queue(self, queue_id: int) -> Queue:
        """Return the queue with this id; the caller must have checked that the topic has it."""
        queue = self.queues.get(queue_id)
        if queue is None:
            queue = self.queues[queue_id] = self._store.queue(self.name, queue_id)
        return queue

    def beginning_of(self, queue: Queue) -> int:
        """Return the offset at which a reader of the topic begins in *queue*, which was added later."""
        return max(queue.first_offset, self.begins.get(queue.queue_id, 0))

    def has_readable(self, queue_id: int) -> bool:
        """Return whether a queue may be read by its id: it belongs to the topic, or did so while it had messages."""
        if 0 <= queue_id < self.read_queues:
            return True
        queue = self._store.queues.find(self.name, queue_id)
        return queue is not None and queue.next_offset > 0

    def queue_ids(self) -> list[int]:
        """Return the ids of all queues, and of removed queues that had messages."""
        used = [key for key, queue in self._store.queues.topics.get(self.name, {}).items() if queue.next_offset]
        return sorted({*range(self.read_queues), *used})

    def check_queue(self, queue_id: int) -> None:
        """Raise `Refused` (PARAMETER) for a *queue_id* beyond the topic's queues.

        A queue that is only read still accepts messages from producers with an old route.
        """
        queues = max(self.write_queues, self.read_queues)
        if queue_id >= queues:
            text = f"queue {queue_id} of topic[{self.name}] does not exist; it has queues 0 to {queues - 1}"
            raise Refused(Reason.PARAMETER, text)

    def as_json(self) -> dict[str, object]:
        """RocketMQ's TopicConfig, with Martlet's own keys, which RocketMQ ignores and drops."""
        own: dict[str, object] = {}
        if self.read_queues_wanted is not None:
            own[WANTED_KEY] = self.read_queues_wanted
        if self.begins:
            own[BEGINS_KEY] = {str(queue_id): offset for queue_id, offset in self.begins.items()}
        return {
            **own,
            "attributes": self.attributes,
            "order": self.order,
            "perm": self.perm,
            "readQueueNums": self.read_queues,
            "topicFilterType": self.filter_type,
            "topicName": self.name,
            "topicSysFlag": self.sys_flag,
            "writeQueueNums": self.write_queues,
        }


def _make_no_room() -> bool:
    """Delete no topic: the default of `Topics.make_room`."""
    return False


@final
class Topics:
    """All topics by name. Each change increments ``version`` and calls every function in ``changed``.

    ``changed`` gets the topic, or None for a deletion; ``deleted`` gets the name of a topic that was deleted. ``grown``
    is called first if a topic gets more queues for readers, with the topic and the ids of these queues.
    """

    def __init__(self, store: Store, clock: Clock, *, auto_create: bool, auto_create_queues: int) -> None:
        self._store = store
        self._clock = clock
        self._table: dict[str, Topic] = {}
        self.auto_create_enabled = auto_create
        self.auto_create_queues = auto_create_queues
        self.version = DataVersion(timestamp=clock.now_ms())
        self.changed: list[Callable[[Topic | None], None]] = []
        self.deleted: list[Callable[[str], None]] = []
        # Called when there is no room for a new topic; deletes topics that nobody needs, and returns whether it deleted
        # any.
        self.make_room: Callable[[], bool] = _make_no_room
        self.grown: list[Callable[[Topic, range], None]] = []
        self.table = Table("config/topics.json", self.json_in_steps, self.load, urgent=True)
        # The log position up to which the loaded file was complete; `NO_POSITION` if the file has none.
        self.loaded_position = NO_POSITION

    def get(self, name: str) -> Topic | None:
        """Return topic *name*; None if there is none. A light topic exists while the store has its queue."""
        topic = self._table.get(name)
        if topic is None and is_light(name):
            return self._light(name)
        return topic

    def open(self, name: str) -> Topic | None:
        """As `get`; but where light queues are on, the first reader of a light topic creates it.

        Raises:
          Refused: there are too many light queues (Reason.BUSY).
        """
        topic = self.get(name)
        if topic is None and is_light(name) and self._store.writer.light_queues:
            return self._ensure_light(name)
        return topic

    def _light(self, name: str) -> Topic | None:
        """Return a light topic. Light topics are in no table: they have one queue, to which nobody writes directly."""
        queues = self._store.queues.topics.get(name)
        if queues is None:
            return None
        topic = Topic(self._store, name, 1, 1, READ)
        if 0 in queues:
            topic.queues[0] = queues[0]
        return topic

    @property
    def hours_max(self) -> int:
        """The longest retention that a topic may have: that of the log; 0 if there is no limit."""
        return self._store.upkeep.topic_retention.hours_max

    def has_queue(self, name: str, queue_id: int) -> bool:
        """Return whether topic *name* has queue *queue_id*, for reading or writing."""
        topic = self.get(name)
        return topic is not None and 0 <= queue_id < max(topic.read_queues, topic.write_queues)

    def __iter__(self) -> Iterator[Topic]:
        return iter(list(self._table.values()))

    def __len__(self) -> int:
        return len(self._table)

    def update(
        self,
        name: str,
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
        """Create or change topic *name*, and return it.

        A lower number of *write_queues* applies at once. Queues beyond *read_queues* that have messages stay readable,
        until they are consumed (`martlet.draining`); with *force* they do not.

        Raises:
          Refused: the name or a number is invalid (Reason.PARAMETER).
        """
        self._check(name, read_queues, write_queues, perm)
        previous = self._table.get(name)
        queues_wanted, queues_used = max(read_queues, write_queues), self.used_queues(name)
        queues_kept = queues_wanted
        if previous is not None and not force:
            queues_kept = max(queues_wanted, min(previous.read_queues, queues_used))
        topic = Topic(
            self._store,
            name,
            read_queues=queues_kept,
            write_queues=write_queues,
            perm=perm,
            sys_flag=sys_flag,
            order=order,
            attributes=dict(attributes or {}),
            filter_type=filter_type,
            read_queues_wanted=queues_wanted if previous is not None and queues_wanted < queues_used else None,
            begins=self._begins_after(previous, queues_kept) if previous is not None else None,
        )
        if previous is None and len(self._table) >= TOPICS_MAX and not self.make_room():
            raise Refused(Reason.BUSY, f"there are {len(self._table)} topics, the most a broker keeps; delete some")
        if previous is not None:
            if previous.as_json() == topic.as_json():
                return previous
            topic.queues = previous.queues
        self._keep_for_hours(topic, reserve_hours(previous.attributes) if previous is not None else 0)
        self._table[name] = topic
        if previous is not None and topic.read_queues > previous.read_queues:
            for grow in self.grown:
                grow(topic, range(previous.read_queues, topic.read_queues))
        self._announce_change(topic)
        return topic

    def used_queues(self, name: str) -> int:
        """Return the number of queues that topic *name* must have to include all queues with messages."""
        queues = self._store.queues.topics.get(name, {})
        return 1 + max((key for key, queue in queues.items() if queue.first_offset < queue.next_offset), default=-1)

    def _begins_after(self, previous: Topic, read_queues: int) -> dict[int, int]:
        """Return ``begins`` of a topic that had the queues of *previous*, and has *read_queues* now."""
        queues = self._store.queues.topics.get(previous.name, {})
        begins = dict(previous.begins)
        if previous.read_queues_wanted is not None:  # it had more queues once
            added_queues = [each for each in queues.items() if previous.read_queues <= each[0] < read_queues]
            begins |= {key: queue.next_offset for key, queue in added_queues}
        return {key: offset for key, offset in begins.items() if key in queues and offset > queues[key].first_offset}

    def narrow(self, topic: Topic) -> Topic:
        """Remove the queues of *topic* that only remain to be read; return the topic."""
        read_queues = topic.read_queues_wanted
        if read_queues is None or self._table.get(topic.name) is not topic:
            return topic
        return self.update(
            topic.name,
            read_queues,
            topic.write_queues,
            topic.perm,
            topic.sys_flag,
            topic.order,
            topic.attributes,
            topic.filter_type,
            force=True,
        )

    def read_again(self) -> list[Topic]:
        """Make all queues with messages readable that RocketMQ, or an older version of Martlet, has removed.

        Call this after `load`. Returns the topics with such queues.
        """
        topics: list[Topic] = []
        for topic in self:
            queues_used = self.used_queues(topic.name)
            if queues_used > topic.read_queues and topic.read_queues_wanted is None and not _is_system(topic.name):
                topic.read_queues_wanted, topic.read_queues = topic.read_queues, queues_used
                topics.append(topic)
        return topics

    def _keep_for_hours(self, topic: Topic, hours_before: int) -> None:
        """Apply the retention of *topic*, which was *hours_before*. Raises `Refused` if it is too long."""
        hours, limit = reserve_hours(topic.attributes), self.hours_max
        if hours == hours_before or _is_system(topic.name):
            return
        if 0 < limit < hours:
            text = f"topic[{topic.name}] cannot keep messages for {hours} hours (attribute {RESERVE_TIME})"
            why = f"all topics share one log, which keeps them for {limit}; set store.file_reserved_hours higher"
            raise Refused(Reason.PARAMETER, f"{text}; {why}")
        self._store.upkeep.topic_retention.set_hours(topic.name, hours)

    @staticmethod
    def _check(name: str, read_queues: int, write_queues: int, perm: int) -> None:
        """Raise `Refused` (PARAMETER) unless there can be such a topic."""
        check_name(name)
        for field, count in (("readQueueNums", read_queues), ("writeQueueNums", write_queues)):
            if not 0 <= count <= QUEUES_MAX:
                raise Refused(Reason.PARAMETER, f"{field} {count} is out of range; it must be 0 to {QUEUES_MAX}")
        if not 0 <= perm <= 15:
            raise Refused(
                Reason.PARAMETER, f"perm {perm} is unknown; it is 2 (write), 4 (read) or 6 (both), and 1 (inherit)"
            )

    def ensure(
        self,
        name: str,
        queues: int,
        perm: int = READ | WRITE,
        sys_flag: int = 0,
        attributes: dict[str, str] | None = None,
    ) -> Topic:
        """Return topic *name*; create it with *queues* queues and *attributes* if there is none.

        A light topic has one queue and no attributes.

        Raises:
          Refused: the name or a number is invalid (Reason.PARAMETER), or there are too many topics.
        """
        topic = self._table.get(name)
        if topic is None and is_light(name):
            return self._ensure_light(name)
        if topic is not None:
            return topic
        return self.update(name, queues, queues, perm, sys_flag, attributes=attributes)

    def _ensure_light(self, name: str) -> Topic:
        if self._light(name) is None and not self._store.writer.light_queues:
            raise Refused(Reason.NO_TOPIC, f"topic[{name}] does not exist, and light queues are off")
        if self._light(name) is None:
            check_light_name(name)
        self._store.queue(name, 0)
        topic = self._light(name)
        assert topic is not None
        return topic

    def auto_create(self, name: str, template: str, queues_wanted: int) -> Topic | None:
        """Create topic *name* like topic *template*; return None if the configuration forbids it."""
        base = self._table.get(template)
        if base is None or not base.perm & INHERIT or (template == TEMPLATE_TOPIC and not self.auto_create_enabled):
            return None
        queues = max(0, min(queues_wanted, base.write_queues))
        return self.update(name, queues, queues, base.perm & ~INHERIT, filter_type=base.filter_type)

    def delete(self, name: str) -> bool:
        """Delete topic *name* and its queues; False if there was none.

        Raises:
          Refused: the disk is full; the topic was not deleted.
          StoreFailed: the disk failed.
        """
        if self.get(name) is None:
            return False
        self._store.deletions.delete_topic(name)
        self._store.upkeep.topic_retention.deleted(name)
        self._table.pop(name, None)
        for tell in self.deleted:
            tell(name)
        self._announce_change(None)
        return True

    def drop(self, name: str) -> bool:
        """Remove topic *name*, whose deletion is in the log, from the table; return whether it was there."""
        return self._table.pop(name, None) is not None

    def _announce_change(self, topic: Topic | None) -> None:
        self.version.next(self._clock)
        self.table.change(removed=topic is None)
        for tell in self.changed:
            tell(topic)

    def json_in_steps(self, position: int = NO_POSITION) -> Steps[list[bytes]]:
        """Return the table as ``config/topics.json``, complete up to log position *position*, if known."""
        return render_in_steps(head_of(self.version, position), "topicConfigTable", self._definitions())

    def _definitions(self) -> Iterator[tuple[str, object]]:
        for topic in self:
            yield topic.name, topic.as_json()

    def load(self, data: bytes) -> None:
        """Load a ``config/topics.json``.

        Raises:
          StoreError: it is invalid; nothing was changed.
        """
        table = parse(data, "topics.json")
        entries = table_in(table, "topicConfigTable", "topics.json").items()
        with reading("topics.json"):
            topics = {name: self._from_json(name, entry) for name, entry in entries}
            self.loaded_position = int(table.get(POSITION_KEY, NO_POSITION))
        self.version.load(table.get("dataVersion"))
        self._table.update(topics)
        for topic in topics.values():
            hours = reserve_hours(topic.attributes)
            if hours and not _is_system(topic.name):
                self._store.upkeep.topic_retention.set_hours(topic.name, hours, loaded=True)

    def _from_json(self, name: str, entry: dict[str, Any]) -> Topic:
        return Topic(
            self._store,
            name,
            read_queues=int(entry.get("readQueueNums", 16)),
            write_queues=int(entry.get("writeQueueNums", 16)),
            perm=int(entry.get("perm", READ | WRITE)),
            sys_flag=int(entry.get("topicSysFlag", 0)),
            order=bool(entry.get("order", False)),
            attributes={str(k): str(v) for k, v in (entry.get("attributes") or {}).items()},
            filter_type=str(entry.get("topicFilterType", "SINGLE_TAG")),
            read_queues_wanted=int(entry[WANTED_KEY]) if WANTED_KEY in entry else None,
            begins={int(queue_id): int(offset) for queue_id, offset in (entry.get(BEGINS_KEY) or {}).items()},
        )
