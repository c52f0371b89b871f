"""The live members of every consumer and producer group, and the queues that ordered consumers have locked.

Heartbeats register a client per (group, connection). A member leaves by unregistering, by missing
heartbeats, or because its connection closes. The other members are notified, so that they
reallocate the queues (NOTIFY_CONSUMER_IDS_CHANGED).

A change of a group of n members costs n notices, so n joins in a row would cost n * n. `Members.run` therefore
sends a bounded number per turn of the event loop. If a group changes while its members are being notified,
they are notified once more, however often it changed.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, Protocol, final

import orjson
import trio

from martlet.contracts import Peer
from martlet.errors import Reason, Refused
from martlet.net.complaints import Complaints
from martlet.runtime.steps import Budget, Steps
from martlet.tables.groups import Groups
from martlet_remoting.consumers.subscriptions import GroupSubscription
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command, MessageQueue

__all__ = [
    "BROADCASTING",
    "CLUSTERING",
    "ClientConnection",
    "ConsumerGroup",
    "Members",
    "QueueLocks",
    "RegisteredClient",
]

log = logging.getLogger("martlet.remoting")

BROADCASTING: Final = "BROADCASTING"
CLUSTERING: Final = "CLUSTERING"
# A notice takes 20 microseconds to encode and send (benchmarks/pauses.py).
TOLD_AT_ONCE: Final = 64
MEMBER_US: Final = 0.25
STEPS_OF_A_LEAVE: Final = 16
LOCK_US: Final = 0.25
QUEUES_AT_ONCE: Final = 256  # of one request to lock or unlock
QUEUE_US: Final = 4.0
LOGGED_CHARS_MAX: Final = 80
LOCKS_MAX: Final = 200_000  # over all groups and connections: a thousand busy ordered groups


class ClientConnection(Protocol):
    """A client's connection, over which the broker can send requests to the client."""

    peer: Peer

    def tell(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> None:
        """Send a oneway request."""
        ...

    def ask(
        self, code: int, ext: Mapping[str, object], body: bytes, answered: Callable[[Command | None], None]
    ) -> None:
        """Send a request; *answered* is called with the client's answer, or None if no answer arrives in time."""
        ...


@final
class RegisteredClient:
    """One connection as a member of a group."""

    __slots__ = ("client_id", "connection", "language", "seen", "seen_ms", "version")

    def __init__(
        self, connection: ClientConnection, client_id: str, language: str, version: int, seen: float, seen_ms: int
    ) -> None:
        self.connection = connection
        self.client_id = client_id
        self.language = language
        self.version = version
        self.seen = seen  # trio.current_time of the last heartbeat
        self.seen_ms = seen_ms  # the same time by the wall clock, for people


@final
class ConsumerGroup:
    """The live state of one consumer group; the newest heartbeat determines it for all members."""

    __slots__ = (
        "fingerprint",
        "from_where",
        "ids",
        "ids_json",
        "kind",
        "members",
        "model",
        "name",
        "subscriptions",
        "weight",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.kind = "CONSUME_PASSIVELY"
        self.model = CLUSTERING
        self.from_where = "CONSUME_FROM_LAST_OFFSET"
        self.subscriptions: dict[str, GroupSubscription] = {}
        self.weight = 0  # sum over the subscriptions
        self.members: dict[ClientConnection, RegisteredClient] = {}
        self.fingerprint: int | None = None
        # Caches, reset when a member joins or leaves.
        self.ids: list[str] | None = None
        self.ids_json: bytes | None = None

    def client_ids_as_json(self) -> bytes:
        """Return each member's client id once; all members request this after each change."""
        if self.ids_json is None:
            ids = list(dict.fromkeys(member.client_id for member in self.members.values()))
            self.ids_json = orjson.dumps({"consumerIdList": ids})
        return self.ids_json

    def sorted_ids(self) -> list[str]:
        """Return each member's client id once, in the order in which queues are allocated."""
        if self.ids is None:
            self.ids = sorted({member.client_id for member in self.members.values()})
        return self.ids

    def find(self, client_id: str) -> RegisteredClient | None:
        """Return the member *client_id*, None if it is not in the group."""
        return next((c for c in self.members.values() if c.client_id == client_id), None)

    def subscribe(self, subscriptions: Iterable[GroupSubscription]) -> bool:
        """Apply the subscriptions of a full heartbeat; return whether a topic was added or removed.

        A subscription that is not newer than the current one is ignored (ConsumerGroupInfo.updateSubscription).
        """
        is_changed = False
        topics: set[str] = set()
        for new_subscription in subscriptions:
            topics.add(new_subscription.topic)
            old_subscription = self.subscriptions.get(new_subscription.topic)
            is_changed = is_changed or old_subscription is None
            if old_subscription is None or new_subscription.version > old_subscription.version:
                self.subscriptions[new_subscription.topic] = new_subscription
        for topic in [topic for topic in self.subscriptions if topic not in topics]:
            del self.subscriptions[topic]
            is_changed = True
        self.weight = sum(subscription.weight for subscription in self.subscriptions.values())
        return is_changed


@final
class _Joined:
    """The groups of one connection, and its characters of subscriptions per group and in total."""

    __slots__ = ("chars", "groups")

    def __init__(self) -> None:
        self.groups: dict[tuple[bool, str], int] = {}  # (is consumer, group) -> characters
        self.chars = 0

    def put(self, key: tuple[bool, str], chars: int) -> None:
        self.chars += chars - self.groups.get(key, 0)
        self.groups[key] = chars

    def drop(self, key: tuple[bool, str]) -> None:
        self.chars -= self.groups.pop(key, 0)


@final
class Members:
    """The registry of group members. `consumers` and `producers` are public for reading."""

    def __init__(self, groups: Groups, groups_peer_max: int, subscribed_chars_peer_max: int = 1 << 20) -> None:
        self.consumers: dict[str, ConsumerGroup] = {}
        self.producers: dict[str, dict[ClientConnection, RegisteredClient]] = {}
        self._groups = groups
        self._groups_peer_max = groups_peer_max
        self._subscribed_chars_peer_max = subscribed_chars_peer_max
        self._complaints = Complaints(log)
        self._faulty_subscriptions = 0  # since the start
        self._of_connection: dict[ClientConnection, _Joined] = {}
        # Groups whose members must be notified, in the order of their changes.
        self._changed_groups: dict[str, None] = {}
        self._notified_group = ""  # the group whose members are being notified
        self._members_to_notify: deque[ClientConnection] = deque()
        self._wake = trio.Event()

    def group(self, name: str) -> ConsumerGroup | None:
        """Return the live consumer group *name*, None if it has no members."""
        return self.consumers.get(name)

    def broadcasting_on(self, topic: str) -> str:
        """Return the group that consumes *topic* by broadcasting, with offsets at its members; empty if none."""
        for name, group in self.consumers.items():
            if group.model == BROADCASTING and topic in group.subscriptions:
                return f"broadcasting group {name}"
        return ""

    def join(
        self, name: str, member: RegisteredClient, subscriptions: Iterable[GroupSubscription] | None = None
    ) -> ConsumerGroup:
        """Return the consumer group *name* for a heartbeat of *member*; call `enter` afterwards.

        *subscriptions* are the group's new subscriptions, or None if they are unchanged.

        Raises:
          Refused: the connection is in too many groups, or its subscriptions are too long (BUSY).
        """
        group = self.consumers.get(name)
        if subscriptions is not None:
            chars = sum(subscription.weight for subscription in subscriptions)
        else:
            chars = group.weight if group is not None else 0
        self._count_group(member.connection, True, name, chars)
        if group is None:
            group = self.consumers[name] = ConsumerGroup(name)
        return group

    def enter(self, group: ConsumerGroup, member: RegisteredClient) -> bool:
        """Add *member* to *group*; return whether the member is new or has a new client id."""
        old_member = group.members.get(member.connection)
        group.members[member.connection] = member
        if old_member is not None and old_member.client_id == member.client_id:
            return False
        group.ids = group.ids_json = None
        return True

    def report_faults(
        self, group: ConsumerGroup, member: RegisteredClient, subscriptions: Iterable[GroupSubscription]
    ) -> None:
        """Log each of the new *subscriptions* that cannot be compiled; call it before `ConsumerGroup.subscribe`.

        The heartbeat succeeds all the same, as in RocketMQ: a refusal would affect the client's other groups too, and
        tell the user no more. Each pull is refused with the reason, but Go and Node clients only log it.
        """
        for new_subscription in subscriptions:
            old_subscription = group.subscriptions.get(new_subscription.topic)
            if new_subscription.fault and (
                old_subscription is None
                or (
                    new_subscription.version > old_subscription.version
                    and new_subscription.fault != old_subscription.fault
                )
            ):
                self._faulty_subscriptions += 1
                self._complaints.warn(
                    "group %r gets no messages of topic %r: client %r (%s) at %s subscribed with a "
                    "faulty expression; %s",
                    group.name,
                    new_subscription.topic,
                    member.client_id[:LOGGED_CHARS_MAX],
                    member.language,
                    member.connection.peer.address,
                    new_subscription.fault,
                )

    def join_producers(self, name: str, member: RegisteredClient) -> None:
        """Register *member* as a producer of group *name*."""
        self._count_group(member.connection, False, name)
        self.producers.setdefault(name, {})[member.connection] = member

    def _count_group(self, connection: ClientConnection, consumer: bool, name: str, chars: int = 0) -> None:
        joined, key = self._of_connection.setdefault(connection, _Joined()), (consumer, name)
        group_count = len(joined.groups)
        if group_count >= self._groups_peer_max and key not in joined.groups:
            text = f"connection is in {group_count} groups; remoting.groups_peer_max is {self._groups_peer_max}"
            raise Refused(Reason.BUSY, text)
        total_chars, limit = joined.chars - joined.groups.get(key, 0) + chars, self._subscribed_chars_peer_max
        if chars and total_chars > limit:
            text = f"groups of this connection would subscribe to {total_chars} characters of topics and expressions"
            raise Refused(Reason.BUSY, f"{text}; remoting.subscribed_chars_peer_max is {limit}")
        joined.put(key, chars)

    def _uncount_group(self, connection: ClientConnection, consumer: bool, name: str) -> None:
        joined = self._of_connection.get(connection)
        if joined is not None:
            joined.drop((consumer, name))

    def leave(self, connection: ClientConnection, name: str) -> None:
        """Remove *connection* from the consumer group *name* and notify the other members."""
        group = self.consumers.get(name)
        self._uncount_group(connection, True, name)
        if group is None or group.members.pop(connection, None) is None:
            return
        group.ids = group.ids_json = None
        if not group.members:
            del self.consumers[name]
        self.notify(group)

    def expel(self, connection: ClientConnection, name: str, client_id: str) -> None:
        """As `leave`, if the member of *connection* is *client_id*; a proxy has other clients on it."""
        group = self.consumers.get(name)
        member = group.members.get(connection) if group is not None else None
        if member is not None and member.client_id == client_id:
            self.leave(connection, name)

    def leave_producers(self, connection: ClientConnection, name: str) -> None:
        """Remove *connection* from the producer group *name*."""
        self._uncount_group(connection, False, name)
        members = self.producers.get(name)
        if members is not None and members.pop(connection, None) is not None and not members:
            del self.producers[name]

    def drop(self, connection: ClientConnection) -> None:
        """Remove a closed connection from all its groups."""
        joined = self._of_connection.get(connection)
        for consumer, name in list(joined.groups) if joined is not None else ():
            if consumer:
                self.leave(connection, name)
            else:
                self.leave_producers(connection, name)
        self._of_connection.pop(connection, None)

    def expire(self, before: float) -> Steps[None]:
        """Remove members whose last heartbeat was before *before*."""
        budget = Budget(MEMBER_US)
        for group in list(self.consumers.values()):
            late_members = [member for member in group.members.values() if member.seen < before]
            if budget.is_over(1 + len(group.members)):
                yield
            for member in late_members:
                if group.members.get(member.connection) is member:
                    self.leave(member.connection, group.name)
                if budget.is_over(STEPS_OF_A_LEAVE):
                    yield
        for name, members in list(self.producers.items()):
            late_members = [member for member in members.values() if member.seen < before]
            if budget.is_over(1 + len(members)):
                yield
            for member in late_members:
                if members.get(member.connection) is member:
                    self.leave_producers(member.connection, name)
                if budget.is_over(STEPS_OF_A_LEAVE):
                    yield

    # notices

    def notify(self, group: ConsumerGroup) -> None:
        """Schedule a notice to all members of *group* about changed members or subscriptions, unless disabled."""
        policy = self._groups.get(group.name)
        if group.model == BROADCASTING or (policy and not policy.notify_consumer_ids_changed_enable):
            return
        self._changed_groups[group.name] = None
        self._wake.set()

    async def run(self) -> None:
        """Notify the members of changed groups, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self.tell_some():
                await trio.lowlevel.checkpoint()

    def tell_some(self, count_max: int = TOLD_AT_ONCE) -> bool:
        """Notify up to *count_max* members of changed groups; return whether more remain."""
        for _ in range(count_max):
            group = self.consumers.get(self._notified_group)
            if not self._members_to_notify or group is None:
                self._notified_group = next(iter(self._changed_groups), "")
                self._changed_groups.pop(self._notified_group, None)
                group = self.consumers.get(self._notified_group)
                self._members_to_notify = deque(group.members if group is not None else ())
            if self._members_to_notify and group is not None:
                connection = self._members_to_notify.popleft()
                if connection in group.members:
                    connection.tell(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": group.name})
            elif not self._changed_groups:
                return False
        return bool(self._members_to_notify or self._changed_groups)

    def next_producer(self, name: str) -> RegisteredClient | None:
        """Return a member of producer group *name*, round robin; None if the group has none."""
        members = self.producers.get(name)
        if members is None:
            return None
        connection = next(iter(members))
        member = members[connection] = members.pop(connection)
        return member

    def find_producer(self, client_id: str) -> RegisteredClient | None:
        """Return the producer *client_id* of any group, None if it is not connected."""
        for members in self.producers.values():
            for member in members.values():
                if member.client_id == client_id:
                    return member
        return None

    def statistics(self) -> dict[str, object]:
        return {
            "consumer_groups": len(self.consumers),
            "consumers": sum(len(group.members) for group in self.consumers.values()),
            "producer_groups": len(self.producers),
            "producers": sum(len(members) for members in self.producers.values()),
            "groups_to_be_told": len(self._changed_groups),
            "faulty_subscriptions": self._faulty_subscriptions,
        }


@final
class _Lock:
    """A client's lock on one queue; ``connection`` is None once the connection that took it has closed."""

    __slots__ = ("client_id", "connection", "group", "key", "until")

    def __init__(self, group: str, key: tuple[str, int]) -> None:
        self.group = group
        self.key = key
        self.client_id = ""
        self.connection: ClientConnection | None = None
        self.until = 0.0


@final
class QueueLocks:
    """The queue locks of ordered consumers; a lock expires *lock_s* seconds after its last renewal.

    The key is topic and queue id, without the broker's name, which clients may have from before a renaming. A queue
    that does not exist can be locked by everybody: it has no messages, and its lock is not stored.
    """

    def __init__(self, lock_s: float, connection_max: int, exists: Callable[[str, int], bool]) -> None:
        self._lock_s = lock_s
        self._connection_max = connection_max
        self._exists = exists
        self._table: dict[str, dict[tuple[str, int], _Lock]] = {}
        self._of_connection: dict[ClientConnection, dict[_Lock, None]] = {}
        # Locks of closed connections: clients may reconnect and renew them. At the limit, the oldest are dropped.
        self._unowned_locks: dict[_Lock, None] = {}
        self._count = 0

    def lock(
        self, connection: ClientConnection, group: str, client_id: str, queues: Sequence[MessageQueue], now: float
    ) -> Steps[list[MessageQueue]]:
        """Lock *queues* for *client_id* on *connection*; return the locked ones. Runs in slices.

        Raises:
          Refused: this connection, or all connections, would hold too many locks (BUSY); its locks are unchanged.
        """
        locked_queues: list[MessageQueue] = []
        new_locks: list[_Lock] = []
        for start in range(0, len(queues), QUEUES_AT_ONCE):
            if start:
                yield
            some_queues = queues[start : start + QUEUES_AT_ONCE]
            try:
                locked_queues += self._lock_some(connection, group, client_id, some_queues, now, new_locks)
            except Refused:
                for lock in new_locks:
                    if self._table.get(group, {}).get(lock.key) is lock:
                        self._forget(lock)
                raise
        return locked_queues

    def _lock_some(
        self,
        connection: ClientConnection,
        group: str,
        client_id: str,
        queues: Sequence[MessageQueue],
        now: float,
        new_locks: list[_Lock],
    ) -> list[MessageQueue]:
        table = self._table.get(group, {})
        locked_queues: list[MessageQueue] = []
        locks_to_take: dict[tuple[str, int], _Lock | None] = {}
        for queue in queues:
            key = queue.topic, queue.queue_id
            current_lock = table.get(key)
            if current_lock is not None and current_lock.client_id != client_id and current_lock.until > now:
                continue
            locked_queues.append(queue)
            if self._exists(*key):
                locks_to_take[key] = current_lock
        self._check_room(connection, locks_to_take)
        for key, lock in locks_to_take.items():
            if lock is None:
                lock = self._add_lock(group, key)
                new_locks.append(lock)
            self._take(connection, lock, client_id, now)
        return locked_queues

    def _check_room(self, connection: ClientConnection, locks_to_take: Mapping[tuple[str, int], _Lock | None]) -> None:
        own_count = len(self._of_connection.get(connection, ()))
        more_count = sum(lock is None or lock.connection is not connection for lock in locks_to_take.values())
        if own_count + more_count > self._connection_max:
            text = (
                f"connection holds {own_count} queue locks and requests {more_count} more; remoting.locks_peer_max is"
            )
            raise Refused(Reason.BUSY, f"{text} {self._connection_max}")
        excess = self._count + sum(lock is None for lock in locks_to_take.values()) - LOCKS_MAX
        if excess <= 0:
            return
        spare_locks = list(
            islice((lock for lock in self._unowned_locks if locks_to_take.get(lock.key) is not lock), excess)
        )
        if len(spare_locks) < excess:
            raise Refused(Reason.BUSY, f"{self._count} queues are locked; at most {LOCKS_MAX}, wait for some to expire")
        for lock in spare_locks:
            self._forget(lock)

    def _add_lock(self, group: str, key: tuple[str, int]) -> _Lock:
        lock = self._table.setdefault(group, {})[key] = _Lock(group, key)
        self._count += 1
        return lock

    def _take(self, connection: ClientConnection, lock: _Lock, client_id: str, now: float) -> None:
        self._disown(lock)
        lock.connection, lock.client_id, lock.until = connection, client_id, now + self._lock_s
        self._of_connection.setdefault(connection, {})[lock] = None

    def _disown(self, lock: _Lock) -> None:
        """Detach *lock* from its connection."""
        self._unowned_locks.pop(lock, None)
        connection = lock.connection
        if connection is not None:
            locks = self._of_connection[connection]
            del locks[lock]
            if not locks:
                del self._of_connection[connection]

    def _forget(self, lock: _Lock) -> None:
        self._disown(lock)
        table = self._table[lock.group]
        del table[lock.key]
        if not table:
            del self._table[lock.group]
        self._count -= 1

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> Steps[None]:
        """Release the locks that *client_id* holds on *queues*."""
        budget = Budget(QUEUE_US)
        for queue in queues:
            lock = self._table.get(group, {}).get((queue.topic, queue.queue_id))
            if lock is not None and lock.client_id == client_id:
                self._forget(lock)
            if budget.is_over():
                yield

    def drop(self, connection: ClientConnection) -> None:
        """Detach the locks of a closed connection; they stay until they expire, as the client may reconnect."""
        for lock in self._of_connection.pop(connection, ()):
            lock.connection = None
            self._unowned_locks[lock] = None

    def any_held(self, group: str, now: float) -> bool:
        """Return whether *group* holds a lock that has not expired."""
        return any(lock.until > now for lock in self._table.get(group, {}).values())

    def expire(self, now: float) -> Steps[None]:
        """Remove expired locks."""
        budget = Budget(LOCK_US)
        for table in list(self._table.values()):
            for lock in list(table.values()):
                if lock.until <= now and table.get(lock.key) is lock:
                    self._forget(lock)
                if budget.is_over():
                    yield

    def __len__(self) -> int:
        return self._count
