"""Queries and administration by one client, after checking its permissions: the parts of a gate that these need."""

from typing import Protocol, final

from martlet.access.grant import (
    BrokerAdminGrant,
    BrokerGrant,
    GroupAdminGrant,
    GroupGrant,
    TopicAdminGrant,
    TopicGrant,
    is_closed,
)
from martlet.records.layout import RecordView
from martlet.runtime.steps import Steps
from martlet.store import KeyQueryResult, Store
from martlet.store.format.light import MULTI, light_places, may_be_indexed
from martlet.tables.groups import Groups
from martlet.tables.topics import RETRY_PREFIX, Topics

__all__ = ["AdminGate", "QueryGate", "check_shown"]


class Allowed(Protocol):
    """The permissions of one identity; implemented by `martlet.access.Gate`."""

    def allows(self, action: str, name: str) -> bool: ...

    def check(self, action: str, name: str) -> None: ...


@final
class QueryGate:
    """Queries for one identity; every method raises `Refused` (NO_PERMISSION) if it lacks the permission."""

    __slots__ = ("_permissions", "_tables")

    def __init__(self, permissions: Allowed, store: Store, topics: Topics, groups: Groups) -> None:
        self._permissions = permissions
        self._tables = store, topics, groups

    def topic(self, topic: str) -> TopicGrant:
        """Return the grant for queries about *topic*; requires ``read``."""
        self._permissions.check("read", topic)
        return TopicGrant(*self._tables, topic)

    def group(self, group: str) -> GroupGrant:
        """Return the grant for queries about *group* and for its members; requires ``read`` on it."""
        self._permissions.check("read", RETRY_PREFIX + group)
        return GroupGrant(*self._tables, group)

    def broker(self) -> BrokerGrant:
        """Return the grant for queries about the whole broker; requires ``read`` on the empty name."""
        self._permissions.check("read", "")
        return BrokerGrant(*self._tables)

    def keys(
        self, topic: str, key: bytes, count_max: int, begin_ms: int, end_ms: int, bytes_max: int
    ) -> Steps[KeyQueryResult]:
        """Return the records of *topic* with *key*, like `Lookup.query_keys`; requires ``read``.

        For internal topics it requires ``manage`` on the broker.
        """
        check_shown(self._permissions, topic)
        return self._tables[0].lookup.query_keys(topic, key, count_max, begin_ms, end_ms, bytes_max)

    async def record_at(self, position: int) -> bytes | None:
        """Return the record at *position* of the log; None if no intact record starts there.

        Requires the same permissions as `keys`, or ``read`` on a light topic of the record. Waits for the disk in
        a worker thread.
        """
        data = await self._tables[0].lookup.record_far(position)
        if data is not None and not self._may_read_light(RecordView(data)):
            check_shown(self._permissions, RecordView(data).topic)
        return data

    def _may_read_light(self, record: RecordView) -> bool:
        """Whether the identity may read *record* in one of the light queues that contain it."""
        if record.properties.find(MULTI) < 0 or not may_be_indexed(record.topic_bytes):
            return False
        light_names = [name for name, _ in light_places(record.topic_bytes, record.properties)]
        return any(self._permissions.allows("read", name.decode("utf-8", "replace")) for name in light_names)


@final
class AdminGate:
    """Administration for one identity; every method raises `Refused` (NO_PERMISSION) if it lacks the permission."""

    __slots__ = ("_permissions", "_tables")

    def __init__(self, permissions: Allowed, store: Store, topics: Topics, groups: Groups) -> None:
        self._permissions = permissions
        self._tables = store, topics, groups

    def topic(self, topic: str) -> TopicAdminGrant:
        """Return the grant to create, change or delete *topic*; requires ``manage``."""
        self._permissions.check("manage", topic)
        return TopicAdminGrant(*self._tables, topic)

    def group(self, group: str) -> GroupAdminGrant:
        """Return the grant to create, change, reset or delete *group*; requires ``manage``."""
        self._permissions.check("manage", RETRY_PREFIX + group)
        return GroupAdminGrant(*self._tables, group)

    def broker(self) -> BrokerAdminGrant:
        """Return the grant to change the whole broker; requires ``manage`` on the empty name."""
        self._permissions.check("manage", "")
        return BrokerAdminGrant(*self._tables)


def check_shown(permissions: Allowed, topic: str) -> None:
    """Raise `Refused` unless the records of *topic* may be read: ``manage`` on the broker for an internal topic."""
    permissions.check("read", topic)
    if is_closed(topic):
        permissions.check("manage", "")
