"""Consumer groups: their policy and their committed offsets.

They are stored in RocketMQ's subscriptionGroup.json and consumerOffset.json. Each protocol
keeps track of a group's live members itself; committed offsets are shared by all protocols.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import fields

from martlet.errors import Reason, Refused
from martlet.runtime.clock import Clock
from martlet.runtime.steps import Steps
from martlet.store.format.light import is_light
from martlet.tables import names
from martlet.tables.rocketmq_json import DataVersion, head_of, parse, reading, render_in_steps, table_in
from martlet.tables.saved import NO_POSITION, POSITION_KEY, Table

__all__ = ["BUILT_IN", "TOOLS_GROUP", "Group", "Groups", "check_group_name"]

# Each group may have a retry topic, which counts towards the limit of topics.
GROUPS_MAX: Final = 40_000
# Pairs of a group and a topic that it must not read.
FORBIDDEN_MAX: Final = 100_000
FOREIGN_POPS_KEY: Final = "martletForeignPops"
OFFSETS_MAX: Final = 500_000  # the default of broker.offsets_max
GROUP_CHARS_MAX: Final = 120  # RocketMQ 5.x TopicValidator/GroupValidator

# RocketMQ's tools pull with this group, also from internal topics (MixAll.TOOLS_CONSUMER_GROUP).
TOOLS_GROUP: Final = "TOOLS_CONSUMER"
# Groups that every RocketMQ broker knows (MixAll, SubscriptionGroupManager.init).
BUILT_IN: Final = (
    TOOLS_GROUP,
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
    "CID_RMQ_SYS_TRANS",
)


def check_group_name(name: str) -> None:
    """Raise `Refused` (PARAMETER) unless *name* is a valid group name."""
    names.check("group", name, GROUP_CHARS_MAX)


class Group(Struct, frozen=True):
    """One group's policy; field names in JSON are RocketMQ's (SubscriptionGroupConfig)."""

    name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: int = 1
    retry_max_times: int = 16
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    notify_consumer_ids_changed_enable: bool = True
    group_sys_flag: int = 0
    consume_timeout_minute: int = 15
    attributes: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """RocketMQ's SubscriptionGroupConfig."""
        table = {_JSON_NAMES[f.name]: getattr(self, f.name) for f in fields(self)}
        return {**table, "groupRetryPolicy": {"type": "CUSTOMIZED"}}

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> "Group":
        """Read RocketMQ's SubscriptionGroupConfig; unknown keys are ignored.

        Raises:
          Refused: the name is missing or a value has the wrong type (Reason.PARAMETER).
        """
        values: dict[str, Any] = {}
        for f in fields(cls):
            value = table.get(_JSON_NAMES[f.name])
            if value is None:
                continue
            if type(value) is not _KINDS[f.name]:
                raise Refused(Reason.PARAMETER, f"{_JSON_NAMES[f.name]} {value!r} has the wrong type")
            values[f.name] = value
        if "name" not in values:
            raise Refused(Reason.PARAMETER, "groupName is missing")
        return cls(**values)


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(word.capitalize() for word in tail)


_JSON_NAMES: Final = {f.name: "groupName" if f.name == "name" else _camel(f.name) for f in fields(Group)}
_KINDS: Final = {
    f.name: str if f.name == "name" else dict if f.name == "attributes" else type(f.default) for f in fields(Group)
}


class Groups:
    """All groups by name, their committed offsets, and pending offset resets.

    Each change of a policy increments ``version`` and calls every function in ``changed`` with the group's name.
    """

    def __init__(self, clock: Clock, *, auto_create: bool, offsets_max: int = OFFSETS_MAX) -> None:
        self._clock = clock
        self._offsets_max = offsets_max
        self._table: dict[str, Group] = {name: Group(name) for name in BUILT_IN}
        # group -> topic -> queue id -> next offset to consume
        self._offsets: dict[str, dict[str, dict[int, int]]] = {}
        self._offsets_kept = 0
        # topic -> group -> queue id -> offset
        self._resets: dict[str, dict[str, dict[int, int]]] = {}
        self._forbidden: dict[str, dict[str, int]] = {}
        self.auto_create = auto_create
        self.version = DataVersion(timestamp=clock.now_ms())
        self.offsets_version = DataVersion(timestamp=clock.now_ms())
        self.table = Table("config/subscriptionGroup.json", self.json_in_steps, self.load, urgent=True)
        self.offsets_table = Table("config/consumerOffset.json", self.offsets_in_steps, self.load_offsets)
        # With light queues on, RocketMQ uses this file instead of the other. It is written if they are on here, or if
        # it was there before.
        self.light_offsets_table = Table(
            "config/lmqConsumerOffset.json", self.light_offsets_in_steps, self.load_light_offsets
        )
        self.keeps_light_offsets = False
        # The loaded offsets include all notes of offsets before this log position, or newer ones.
        self.offsets_position = 0
        # RocketMQ wrote the offsets last, and nobody has taken over what it had popped; the file says so until then.
        self.has_foreign_pops = False
        self.changed: list[Callable[[str], None]] = []
        self.was_reset: list[Callable[[str, str], None]] = []  # called with group and topic

    # policy

    def get(self, name: str) -> Group | None:
        """Return group *name*, None if there is none."""
        return self._table.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def names(self) -> list[str]:
        return list(self._table)

    def ensure(self, name: str) -> Group | None:
        """Return group *name*, created if the configuration allows it; None otherwise."""
        group = self._table.get(name)
        if group is None and self.auto_create:
            check_group_name(name)
            return self.update(Group(name))
        return group

    def policy(self, name: str) -> Group | None:
        """Return group *name*, or what a new one would be, which is not created; None if none may be.

        Raises:
          Refused: there is no such group, and its name is invalid (Reason.PARAMETER).
        """
        group = self._table.get(name)
        if group is None and self.auto_create:
            check_group_name(name)
            return Group(name)
        return group

    def update(self, group: Group) -> Group:
        """Create or change *group*.

        Raises:
          Refused: its name is invalid (Reason.PARAMETER).
        """
        check_group_name(group.name)
        if group.name not in self._table and len(self._table) >= GROUPS_MAX:
            raise Refused(Reason.BUSY, f"there are {len(self._table)} groups, the most a broker keeps; delete some")
        self._table[group.name] = group
        self._moved(group.name)
        return group

    def delete(self, name: str, *, clean_offsets: bool) -> bool:
        """Delete group *name*, with *clean_offsets* also its offsets; return False if it did not exist."""
        found = self._table.pop(name, None) is not None
        if clean_offsets:
            topics = self._offsets.pop(name, {})
            self._offsets_kept -= sum(map(len, topics.values()))
            for topic in topics:
                self._drop_reset(topic, name)
            self.offsets_changed()
        if self._forbidden.pop(name, None) is not None or found:
            self._moved(name)
        return found

    def set_forbidden(self, group: str, topic: str, *, readable: bool) -> None:
        """Allow or forbid *group* to read *topic* (RocketMQ forbiddenTable, bit 2).

        Raises:
          Refused: there are too many forbidden pairs (Reason.BUSY).
        """
        if readable == (not self.is_forbidden(group, topic)):
            return
        if readable:
            self._forbidden[group].pop(topic)
            if not self._forbidden[group]:
                del self._forbidden[group]
        else:
            count = sum(map(len, self._forbidden.values()))
            if count >= FORBIDDEN_MAX:
                raise Refused(Reason.BUSY, f"{count} groups are forbidden topics, the most a broker keeps; allow some")
            self._forbidden.setdefault(group, {})[topic] = 1 << 2
        self._moved(group)

    def is_forbidden(self, group: str, topic: str) -> bool:
        return bool(self._forbidden.get(group, {}).get(topic, 0) & 1 << 2)

    def forbidden(self) -> Mapping[str, Mapping[str, int]]:
        """Return what groups must not read: group -> topic -> bits (RocketMQ forbiddenTable). Do not change it."""
        return self._forbidden

    def may_read(self, name: str, topic: str) -> bool:
        """Return whether *name* is allowed to consume *topic*. Unknown groups are."""
        group = self._table.get(name)
        return (group is None or group.consume_enable) and not self.is_forbidden(name, topic)

    def reader(self, name: str, topic: str) -> Group:
        """Return group *name*, created if the configuration allows it, for consuming *topic*.

        Raises:
          Refused: it does not exist, its name is invalid, or it may not read *topic*.
        """
        group = self.ensure(name)
        if group is None:
            raise Refused(
                Reason.NO_GROUP, f"group {name!r} does not exist; create it, or set broker.auto_create_groups"
            )
        if not self.may_read(name, topic):
            text = f"group {name!r} may not read topic[{topic}]; an administrator has forbidden it"
            raise Refused(Reason.NO_PERMISSION, text)
        return group

    def _moved(self, name: str) -> None:
        self.version.next(self._clock)
        self.table.change()
        for tell in self.changed:
            tell(name)

    # offsets

    def offset(self, group: str, topic: str, queue_id: int) -> int:
        """Return the committed offset of *group* in that queue, -1 if there is none."""
        return self.committed(group, topic).get(queue_id, -1)

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Commit *offset*: *group* has consumed everything below it; a lower offset than before is allowed.

        While a reset is pending for this queue, commits are ignored: they are from consumers before the reset.
        """
        if self._resets and self.pending_reset(group, topic, queue_id) >= 0:
            return
        try:
            table = self._offsets[group][topic]
        except KeyError:
            table = self._offsets.setdefault(group, {}).setdefault(topic, {})
        held = table.get(queue_id)
        if held != offset:
            self._offsets_kept += held is None
            table[queue_id] = offset
            self.offsets_changed()

    def offsets_changed(self) -> None:
        """Have the offsets written."""
        self.offsets_table.change()
        if self.keeps_light_offsets:
            self.light_offsets_table.change()

    def check_may_commit(self, group: str, topic: str, queue_ids: Iterable[int]) -> None:
        """Raise `Refused` if committing offsets of *group* for these queues would exceed a limit."""
        table = self.committed(group, topic)
        more = sum(queue_id not in table for queue_id in queue_ids)
        if not more:
            return
        if self._offsets_kept + more > self._offsets_max:
            text = f"{self._offsets_kept} offsets are stored and {more} more requested; broker.offsets_max is"
            raise Refused(Reason.BUSY, f"{text} {self._offsets_max}, delete unused groups")
        if group in self._table:
            return
        check_group_name(group)
        if group not in self._offsets and len(self._offsets) >= GROUPS_MAX:
            text = f"there are offsets of {len(self._offsets)} groups, the most a broker keeps; delete some"
            raise Refused(Reason.BUSY, text)

    def topics_of(self, group: str) -> list[str]:
        """Return the topics with committed offsets of *group*."""
        return list(self._offsets.get(group, ()))

    def committed(self, group: str, topic: str) -> Mapping[int, int]:
        """Return the committed offsets of *group* in *topic*: queue id -> offset; do not change or keep it."""
        return self._offsets.get(group, {}).get(topic, {})

    def groups_of(self, topic: str) -> list[str]:
        """Return the groups with committed offsets in *topic*."""
        return [group for group, topics in self._offsets.items() if topic in topics]

    def reset(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Make the next pull of each queue start at its new offset (RocketMQ's server-side reset)."""
        resets = self._resets.setdefault(topic, {}).setdefault(group, {})
        table = self._offsets.setdefault(group, {}).setdefault(topic, {})
        for queue_id, offset in offsets.items():
            resets[queue_id] = offset
            self._offsets_kept += queue_id not in table
            table[queue_id] = offset
        self.offsets_changed()
        for tell in self.was_reset:
            tell(group, topic)

    def pending_reset(self, group: str, topic: str, queue_id: int) -> int:
        """Return the offset of the pending reset, -1 if there is none."""
        groups = self._resets.get(topic)
        if groups is None:
            return -1
        return groups.get(group, {}).get(queue_id, -1)

    def has_resets(self, group: str, topic: str) -> bool:
        """Return whether a reset of *group* is pending in any queue of *topic*."""
        return bool(self._resets) and group in self._resets.get(topic, ())

    def take_reset(self, group: str, topic: str, queue_id: int) -> int:
        """Return the offset of the pending reset like `pending_reset`, and clear it."""
        table = self._resets.get(topic, {}).get(group, {})
        offset = table.pop(queue_id, -1)
        if offset >= 0 and not table:
            self._drop_reset(topic, group)
        return offset

    def lower_offsets(self, end_of: Callable[[str, int], int]) -> int:
        """Lower each committed offset that is beyond *end_of* its topic and queue id; return how many there were."""
        lowered = 0
        for topics in self._offsets.values():
            for topic, offsets in topics.items():
                for queue_id, offset in offsets.items():
                    end = end_of(topic, queue_id)
                    if offset > end:
                        offsets[queue_id] = end
                        lowered += 1
        if lowered:
            self.offsets_changed()
        return lowered

    def forget_topic(self, topic: str) -> None:
        """Drop the offsets of all groups in *topic*."""
        for group in self.groups_of(topic):
            self._forget(group, topic)
        self._resets.pop(topic, None)
        self.offsets_changed()

    def forget_offsets(self, group: str, topic: str) -> None:
        """Drop the offsets of *group* in *topic*."""
        self._forget(group, topic)
        self._drop_reset(topic, group)
        self.offsets_changed()

    def _forget(self, group: str, topic: str) -> None:
        topics = self._offsets.get(group, {})
        self._offsets_kept -= len(topics.pop(topic, ()))
        if not topics:
            self._offsets.pop(group, None)

    def _drop_reset(self, topic: str, group: str) -> None:
        groups = self._resets.get(topic)
        if groups is not None and groups.pop(group, None) is not None and not groups:
            del self._resets[topic]

    def statistics(self) -> dict[str, object]:
        return {"groups": len(self._table), "offsets": self._offsets_kept}

    # files

    def json_in_steps(self, position: int = NO_POSITION) -> Steps[list[bytes]]:
        """Return the policies as ``config/subscriptionGroup.json``, with *position* if given."""
        fields = {**head_of(self.version, position), "forbiddenTable": self._forbidden}
        return render_in_steps(fields, "subscriptionGroupTable", self._policies())

    def _policies(self) -> Iterator[tuple[str, object]]:
        for group in list(self._table.values()):
            yield group.name, group.as_json()

    def load(self, data: bytes) -> None:
        """Load a ``config/subscriptionGroup.json``. Raises `StoreError`, and changes nothing, if it is invalid."""
        table = parse(data, "subscriptionGroup.json")
        entries = table_in(table, "subscriptionGroupTable", "subscriptionGroup.json").items()
        with reading("subscriptionGroup.json"):
            forbidden = {
                group: {topic: int(bits) for topic, bits in topics.items()}
                for group, topics in (table.get("forbiddenTable") or {}).items()
            }
            found = {name: Group.from_json({**entry, "groupName": name}) for name, entry in entries}
        self.version.load(table.get("dataVersion"))
        self._forbidden = forbidden
        self._table.update(found)

    def offsets_in_steps(self, position: int = NO_POSITION) -> Steps[list[bytes]]:
        """Return the offsets as ``config/consumerOffset.json``; *position* is where they are complete up to, if known.

        The offsets of one group and topic are those at the time of their slice, which may run in a worker thread.
        """
        head = head_of(self.offsets_version, position)
        if self.has_foreign_pops:
            head[FOREIGN_POPS_KEY] = True
        return render_in_steps(head, "offsetTable", self._offsets_by_key(), bare_keys=True)

    def _offsets_by_key(self, *, light: bool | None = None) -> Iterator[tuple[str, Mapping[int, int]]]:
        """Yield each topic and group with offsets; tolerates changes in the meantime.

        *light* selects only groups named like light topics (True) or only the others (False).
        """
        for group in list(self._offsets):
            if light is not None and light is not is_light(group):
                continue
            topics = self._offsets.get(group, {})
            for topic in list(topics):
                if (offsets := topics.get(topic)) is not None:
                    yield f"{topic}@{group}", offsets

    def load_offsets(self, data: bytes) -> None:
        """Load a ``config/consumerOffset.json``. Raises `StoreError`, and changes nothing, if it is invalid."""
        table = parse(data, "consumerOffset.json")
        with reading("consumerOffset.json"):
            found = _offsets_in(table, "consumerOffset.json")
            position = int(table.get(POSITION_KEY, NO_POSITION))
        self.offsets_version.load(table.get("dataVersion"))
        self.offsets_position = position
        self.has_foreign_pops = table.get(FOREIGN_POPS_KEY) is True
        self._replace_offsets(found)

    def _replace_offsets(self, found: Mapping[tuple[str, str], dict[int, int]]) -> None:
        for (topic, group), table_of_queues in found.items():
            self._forget(group, topic)
            self._offsets.setdefault(group, {})[topic] = table_of_queues
            self._offsets_kept += len(table_of_queues)

    def light_offsets_in_steps(self, position: int = NO_POSITION) -> Steps[list[bytes]]:
        """As `offsets_in_steps`, as ``config/lmqConsumerOffset.json``: light groups have a table of their own there."""
        head = head_of(self.offsets_version, position)
        light, others = self._offsets_by_key(light=True), self._offsets_by_key(light=False)

        def render() -> Steps[list[bytes]]:
            fields = {**head, "lmqOffsetTable": {key: offsets.get(0, 0) for key, offsets in light}}
            return (yield from render_in_steps(fields, "offsetTable", others, bare_keys=True))

        return render()

    def load_light_offsets(self, data: bytes) -> None:
        """Take over a ``config/lmqConsumerOffset.json``, after `load_offsets`, where RocketMQ wrote it last.

        Raises `StoreError`, and takes nothing, when it is not one.
        """
        table = parse(data, "lmqConsumerOffset.json")
        with reading("lmqConsumerOffset.json"):
            found = _offsets_in(table, "lmqConsumerOffset.json")
            for key, offset in (table.get("lmqOffsetTable") or {}).items():
                topic, _, group = key.rpartition("@")
                found[topic, group] = {0: int(offset)}
            ours = POSITION_KEY in table
        self.keeps_light_offsets = True
        if ours:
            return  # the other file was written with it, or since
        if self.offsets_position == NO_POSITION:
            # RocketMQ wrote both, with light queues on and off; nothing says which is newer.
            for (topic, group), offsets in found.items():
                for queue_id, offset in self.committed(group, topic).items():
                    offsets[queue_id] = max(offset, offsets.get(queue_id, 0))
        self.offsets_position = NO_POSITION
        self._replace_offsets(found)
        self.offsets_changed()


def _offsets_in(table: Mapping[str, Any], name: str) -> dict[tuple[str, str], dict[int, int]]:
    """Return the ``offsetTable`` of *table*, the content of file *name*, by topic and group."""
    found: dict[tuple[str, str], dict[int, int]] = {}
    for key, offsets in table_in(table, "offsetTable", name).items():
        topic, _, group = key.rpartition("@")
        found[topic, group] = {int(queue_id): int(offset) for queue_id, offset in offsets.items()}
    return found
