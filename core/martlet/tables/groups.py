"""Consumer groups and their policies, stored in RocketMQ's subscriptionGroup.json.

Each protocol keeps track of a group's live members itself.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import fields

from martlet.errors import Reason, Refused
from martlet.runtime.clock import Clock
from martlet.runtime.steps import Steps
from martlet.tables.names import GROUPS_MAX, check_group_name
from martlet.tables.offsets import OFFSETS_MAX, CommittedOffsets
from martlet.tables.rocketmq_json import DataVersion, head_of, parse, reading, render_in_steps, table_in
from martlet.tables.saved import NO_POSITION, Table

__all__ = ["BUILT_IN", "TOOLS_GROUP", "Group", "Groups", "check_group_name"]

# Pairs of a group and a topic that it must not read.
FORBIDDEN_MAX: Final = 100_000

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
    """All groups by name; `offsets` are their committed ones (`CommittedOffsets`).

    Each change of a policy increments ``version`` and calls every function in ``changed`` with the group's name.
    """

    def __init__(self, clock: Clock, *, auto_create: bool, offsets_max: int = OFFSETS_MAX) -> None:
        self._clock = clock
        self._table: dict[str, Group] = {name: Group(name) for name in BUILT_IN}
        self._forbidden: dict[str, dict[str, int]] = {}
        self.auto_create = auto_create
        self.version = DataVersion(timestamp=clock.now_ms())
        self.table = Table("config/subscriptionGroup.json", self.json_in_steps, self.load, urgent=True)
        self.changed: list[Callable[[str], None]] = []
        self.offsets = CommittedOffsets(clock, offsets_max, self.__contains__)

    # policy

    def get(self, name: str) -> Group | None:
        """Return group *name*; None if there is none."""
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
        """Return group *name*, or a new one that is not stored; None if the configuration allows none.

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
        self._announce_change(group.name)
        return group

    def delete(self, name: str, *, clean_offsets: bool) -> bool:
        """Delete group *name*, with *clean_offsets* also its offsets; return False if it did not exist."""
        existed = self._table.pop(name, None) is not None
        if clean_offsets:
            self.offsets.forget_group(name)
        if self._forbidden.pop(name, None) is not None or existed:
            self._announce_change(name)
        return existed

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
        self._announce_change(group)

    def is_forbidden(self, group: str, topic: str) -> bool:
        return bool(self._forbidden.get(group, {}).get(topic, 0) & 1 << 2)

    def forbidden(self) -> Mapping[str, Mapping[str, int]]:
        """Return the topics that groups must not read: group -> topic -> bits (forbiddenTable). Do not change it."""
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

    def _announce_change(self, name: str) -> None:
        self.version.next(self._clock)
        self.table.change()
        for tell in self.changed:
            tell(name)

    def statistics(self) -> dict[str, object]:
        return {"groups": len(self._table), "offsets": self.offsets.count}

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
            groups = {name: Group.from_json({**entry, "groupName": name}) for name, entry in entries}
        self.version.load(table.get("dataVersion"))
        self._forbidden = forbidden
        self._table.update(groups)
