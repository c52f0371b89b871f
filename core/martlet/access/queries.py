"""Queries and administration by one client, after checking its permissions: the parts of a gate that these need."""

from collections.abc import Sequence
from typing import Final, Protocol, final

from martlet.access.grant import (
    BrokerAdminGrant,
    BrokerGrant,
    GroupAdminGrant,
    GroupDeletionGrant,
    GroupGrant,
    TopicAdminGrant,
    TopicDeletionGrant,
    TopicGrant,
    is_closed,
)
from martlet.contracts import Action, Identity
from martlet.errors import Refused
from martlet.records.layout import RecordView
from martlet.runtime.steps import Steps
from martlet.store import KeyQueryResult, Store
from martlet.store.format.light import MULTI, light_places, may_be_indexed
from martlet.tables.groups import Groups
from martlet.tables.topics import RETRY_PREFIX, Topics

__all__ = ["AdminGate", "QueryGate", "check_shown"]


# One is enough: who may read a topic's messages, or takes part in a group, may ask about it (auth, RocketMQ 5.5.0).
GET: Final[tuple[Action, ...]] = ("get", "subscribe")
READ: Final[tuple[Action, ...]] = ("subscribe", "get")
ROUTE: Final[tuple[Action, ...]] = ("publish", "subscribe", "get")
CHANGE: Final[tuple[Action, ...]] = ("create", "update")


class Allowed(Protocol):
    """The permissions of one identity; implemented by `martlet.access.rules.Decisions`."""

    identity: Identity

    def allows(self, action: Action, name: str) -> bool: ...

    def check(self, action: Action, name: str) -> bool: ...

    def check_any(self, actions: Sequence[Action], name: str) -> bool: ...


@final
class QueryGate:
    """Queries for one identity; every method raises `Refused` (NO_PERMISSION) if it lacks the permission."""

    __slots__ = ("_permissions", "_tables")

    def __init__(self, permissions: Allowed, store: Store, topics: Topics, groups: Groups) -> None:
        self._permissions = permissions
        self._tables = store, topics, groups

    def topic(self, topic: str) -> TopicGrant:
        """Return the grant for queries about *topic*; requires ``get`` or ``subscribe``."""
        self._permissions.check_any(GET, topic)
        return TopicGrant(*self._tables, topic)

    def route(self, topic: str) -> None:
        """Check that the identity may know where *topic* is: ``publish``, ``subscribe`` or ``get`` is enough."""
        self._permissions.check_any(ROUTE, topic)

    def group(self, group: str) -> GroupGrant:
        """Return the grant for queries about *group* and for its members; requires ``get`` or ``subscribe`` on it."""
        self._permissions.check_any(GET, RETRY_PREFIX + group)
        return GroupGrant(*self._tables, group)

    def broker(self, action: Action = "get") -> BrokerGrant:
        """Return the grant for queries about the whole broker; requires *action*, ``get`` or ``list``, on the empty
        name.
        """
        self._permissions.check(action, "")
        return BrokerGrant(*self._tables)

    def keys(
        self, topic: str, key: bytes, count_max: int, begin_ms: int, end_ms: int, bytes_max: int
    ) -> Steps[KeyQueryResult]:
        """Return the records of *topic* with *key*, like `Lookup.query_keys`; requires ``subscribe`` or ``get``.

        For internal topics it requires ``update`` on the broker.
        """
        check_shown(self._permissions, topic)
        return self._tables[0].lookup.query_keys(topic, key, count_max, begin_ms, end_ms, bytes_max)

    async def record_at(self, position: int) -> bytes | None:
        """Return the record at *position* of the log; None if no intact record starts there.

        Requires the same permissions as `keys`, or ``subscribe`` on a light topic of the record; a refusal does not
        name the topic. Waits for the disk in a worker thread.
        """
        data = await self._tables[0].lookup.record_far(position)
        if data is not None and not self._may_read_light(RecordView(data)):
            try:
                check_shown(self._permissions, RecordView(data).topic)
            except Refused as refused:
                raise Refused(
                    refused.reason,
                    f"{self._permissions.identity.name!r} may not get the message at position {position}",
                ) from None
        return data

    def _may_read_light(self, record: RecordView) -> bool:
        """Whether the identity may read *record* in one of the light queues that contain it."""
        if record.properties.find(MULTI) < 0 or not may_be_indexed(record.topic_bytes):
            return False
        light_names = [name for name, _ in light_places(record.topic_bytes, record.properties)]
        return any(self._permissions.allows("subscribe", name.decode("utf-8", "replace")) for name in light_names)


@final
class AdminGate:
    """Administration for one identity; every method raises `Refused` (NO_PERMISSION) if it lacks the permission."""

    __slots__ = ("_permissions", "_tables")

    def __init__(self, permissions: Allowed, store: Store, topics: Topics, groups: Groups) -> None:
        self._permissions = permissions
        self._tables = store, topics, groups

    def topic(self, topic: str) -> TopicAdminGrant:
        """Return the grant to create or change *topic*; requires ``create``, or ``update`` if it exists."""
        self._check_change(topic, exists=self._tables[1].get(topic) is not None)
        return TopicAdminGrant(*self._tables, topic)

    def group(self, group: str) -> GroupAdminGrant:
        """Return the grant to create, change or reset *group*; requires ``create``, or ``update`` if it exists."""
        self._check_change(RETRY_PREFIX + group, exists=self._tables[2].get(group) is not None)
        return GroupAdminGrant(*self._tables, group)

    def _check_change(self, name: str, *, exists: bool) -> None:
        """Raise `Refused`, with the same text whether *name* exists or not."""
        if exists:
            self._permissions.check_any(CHANGE, name)
        else:
            self._permissions.check("create", name)

    def topic_deletion(self, topic: str) -> TopicDeletionGrant:
        """Return the grant to delete *topic*; requires ``delete``."""
        self._permissions.check("delete", topic)
        return TopicDeletionGrant(*self._tables, topic)

    def group_deletion(self, group: str) -> GroupDeletionGrant:
        """Return the grant to delete *group*; requires ``delete``."""
        self._permissions.check("delete", RETRY_PREFIX + group)
        return GroupDeletionGrant(*self._tables, group)

    def broker(self) -> BrokerAdminGrant:
        """Return the grant to change the whole broker; requires ``update`` on the empty name."""
        self._permissions.check("update", "")
        return BrokerAdminGrant(*self._tables)


def check_shown(permissions: Allowed, topic: str) -> None:
    """Raise `Refused` unless the records of *topic* may be read: ``update`` on the broker for an internal topic."""
    permissions.check_any(READ, topic)
    if is_closed(topic):
        permissions.check("update", "")
