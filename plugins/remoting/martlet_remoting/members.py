"""Who is there: the live clients of every consumer and producer group, and the queues that ordered ones hold.

A client is registered per (group, connection) by its heartbeats. Whoever leaves, by
word, by silence or by a closed connection, is told to the rest of its group at once, so
that they share out its queues (NOTIFY_CONSUMER_IDS_CHANGED).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, Protocol, final

from martlet.contracts import Peer
from martlet.errors import Reason, Refused
from martlet.groups import Groups

from .codes import RequestCode
from .packets import Command, MessageQueue
from .subscriptions import Subscription

__all__ = [
    "BROADCASTING",
    "CLUSTERING",
    "Channel",
    "ConsumerGroup",
    "Line",
    "Members",
    "QueueLocks",
]

BROADCASTING: Final = "BROADCASTING"
CLUSTERING: Final = "CLUSTERING"
LOCKS_MAX: Final = 200_000  # over all groups and connections: a thousand busy ordered groups


class Line(Protocol):
    """A connection as the registry sees it: one can speak to the client on it."""

    peer: Peer

    def tell(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> None:
        """Send a oneway request."""
        ...

    def ask(
        self, code: int, ext: Mapping[str, object], body: bytes, answered: Callable[[Command | None], None]
    ) -> None:
        """Send a request; *answered* gets the client's answer, or None when it did not come in time or at all."""
        ...


@final
class Channel:
    """One connection as the member of a group."""

    __slots__ = ("client_id", "language", "line", "seen", "seen_ms", "version")

    def __init__(self, line: Line, client_id: str, language: str, version: int, seen: float, seen_ms: int) -> None:
        self.line = line
        self.client_id = client_id
        self.language = language
        self.version = version
        self.seen = seen  # seconds of trio.current_time
        self.seen_ms = seen_ms  # wall clock, for people


@final
class ConsumerGroup:
    """The live side of one consumer group; what the newest heartbeats say holds for all its members."""

    __slots__ = ("channels", "fingerprint", "from_where", "kind", "model", "name", "subscriptions")

    def __init__(self, name: str) -> None:
        self.name = name
        self.kind = "CONSUME_PASSIVELY"
        self.model = CLUSTERING
        self.from_where = "CONSUME_FROM_LAST_OFFSET"
        self.subscriptions: dict[str, Subscription] = {}
        self.channels: dict[Line, Channel] = {}
        self.fingerprint: int | None = None

    def client_ids(self) -> list[str]:
        """Every member once, also one with several connections."""
        return list(dict.fromkeys(channel.client_id for channel in self.channels.values()))

    def find(self, client_id: str) -> Channel | None:
        """The channel of *client_id*; None when it is not here."""
        return next((c for c in self.channels.values() if c.client_id == client_id), None)

    def subscribe(self, subscriptions: Iterable[Subscription]) -> bool:
        """Take over what a full heartbeat says; whether a topic came or went.

        A subscription that is not newer than the held one changes nothing (ConsumerGroupInfo.updateSubscription).
        """
        changed = False
        named: set[str] = set()
        for new in subscriptions:
            named.add(new.topic)
            old = self.subscriptions.get(new.topic)
            changed = changed or old is None
            if old is None or new.version > old.version:
                self.subscriptions[new.topic] = new
        for topic in [topic for topic in self.subscriptions if topic not in named]:
            del self.subscriptions[topic]
            changed = True
        return changed


@final
class Members:
    """The registry of all connections. `consumers` and `producers` may be read by everyone."""

    def __init__(self, groups: Groups, groups_peer_max: int, subscribed_chars_peer_max: int = 1 << 20) -> None:
        self.consumers: dict[str, ConsumerGroup] = {}
        self.producers: dict[str, dict[Line, Channel]] = {}
        self._groups = groups
        self._groups_peer_max = groups_peer_max
        self._subscribed_chars_peer_max = subscribed_chars_peer_max
        # (consumer?, group) -> what it subscribes to, in characters
        self._of_line: dict[Line, dict[tuple[bool, str], int]] = {}

    def group(self, name: str) -> ConsumerGroup | None:
        """The live consumer group *name*; None when nobody is there."""
        return self.consumers.get(name)

    def join(self, name: str, channel: Channel, subscriptions: Iterable[Subscription] | None = None) -> ConsumerGroup:
        """Return the consumer group *name* for a heartbeat of *channel*'s connection; `enter` it then.

        *subscriptions* are what it is going to subscribe to; None where that stays as it is.

        Raises:
          Refused: the connection is in too many groups, or these subscribe to too much (BUSY).
        """
        group = self.consumers.get(name)
        if subscriptions is None:
            subscriptions = group.subscriptions.values() if group is not None else ()
        self._note(channel.line, True, name, sum(subscription.weight for subscription in subscriptions))
        if group is None:
            group = self.consumers[name] = ConsumerGroup(name)
        return group

    def enter(self, group: ConsumerGroup, channel: Channel) -> bool:
        """Put *channel* into *group*; whether it was not there, or under another client id."""
        old = group.channels.get(channel.line)
        group.channels[channel.line] = channel
        return old is None or old.client_id != channel.client_id

    def join_producers(self, name: str, channel: Channel) -> None:
        """Register *channel* as a producer of group *name*."""
        self._note(channel.line, False, name)
        self.producers.setdefault(name, {})[channel.line] = channel

    def _note(self, line: Line, consumer: bool, name: str, chars: int = 0) -> None:
        mine = self._of_line.setdefault(line, {})
        if len(mine) >= self._groups_peer_max and (consumer, name) not in mine:
            text = f"connection is in {len(mine)} groups; remoting.groups_peer_max is {self._groups_peer_max}"
            raise Refused(Reason.BUSY, text)
        total, limit = sum(mine.values()) - mine.get((consumer, name), 0) + chars, self._subscribed_chars_peer_max
        if chars and total > limit:
            text = f"groups of this connection would subscribe to {total} characters of topics and expressions"
            raise Refused(Reason.BUSY, f"{text}; remoting.subscribed_chars_peer_max is {limit}")
        mine[consumer, name] = chars

    def leave(self, line: Line, name: str) -> None:
        """*line* has left the consumer group *name*; the others are told."""
        group = self.consumers.get(name)
        self._of_line.get(line, {}).pop((True, name), None)
        if group is None or group.channels.pop(line, None) is None:
            return
        if not group.channels:
            del self.consumers[name]
        self.notify(group)

    def leave_producers(self, line: Line, name: str) -> None:
        """*line* has left the producer group *name*."""
        self._of_line.get(line, {}).pop((False, name), None)
        channels = self.producers.get(name)
        if channels is not None and channels.pop(line, None) is not None and not channels:
            del self.producers[name]

    def drop(self, line: Line) -> None:
        """The connection is gone; it leaves all its groups."""
        for consumer, name in list(self._of_line.get(line, ())):
            if consumer:
                self.leave(line, name)
            else:
                self.leave_producers(line, name)
        self._of_line.pop(line, None)

    def expire(self, before: float) -> None:
        """Whoever was last heard of before *before* leaves."""
        for group in list(self.consumers.values()):
            for channel in [c for c in group.channels.values() if c.seen < before]:
                self.leave(channel.line, group.name)
        for name, channels in list(self.producers.items()):
            for channel in [c for c in channels.values() if c.seen < before]:
                self.leave_producers(channel.line, name)

    def notify(self, group: ConsumerGroup) -> None:
        """Tell every member of *group* that its members or subscriptions changed, unless the group forbids it."""
        policy = self._groups.get(group.name)
        if group.model == BROADCASTING or (policy and not policy.notify_consumer_ids_changed_enable):
            return
        for line in group.channels:
            line.tell(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": group.name})

    def find_producer(self, client_id: str) -> Channel | None:
        """The connection of the producer *client_id*, in whatever group; None when it is not here."""
        for channels in self.producers.values():
            for channel in channels.values():
                if channel.client_id == client_id:
                    return channel
        return None

    def statistics(self) -> dict[str, object]:
        return {
            "consumer_groups": len(self.consumers),
            "consumers": sum(len(group.channels) for group in self.consumers.values()),
            "producer_groups": len(self.producers),
            "producers": sum(len(channels) for channels in self.producers.values()),
        }


@final
class _Lock:
    """One queue that one client of a group holds; ``line`` None: the connection it was taken on is gone."""

    __slots__ = ("client_id", "group", "key", "line", "until")

    def __init__(self, group: str, key: tuple[str, int]) -> None:
        self.group = group
        self.key = key
        self.client_id = ""
        self.line: Line | None = None
        self.until = 0.0


@final
class QueueLocks:
    """Which ordered consumer holds which queue; a lock ends *lock_s* seconds after its last renewal.

    A queue is its topic and number: whoever calls the broker by an old name means the same one. One that is
    not there can be had by everybody, as nothing comes from it, and costs nothing.
    """

    def __init__(self, lock_s: float, line_max: int, exists: Callable[[str, int], bool]) -> None:
        self._lock_s = lock_s
        self._line_max = line_max
        self._exists = exists
        self._table: dict[str, dict[tuple[str, int], _Lock]] = {}
        self._of_line: dict[Line, dict[_Lock, None]] = {}
        # Of connections that are gone: clients come back for theirs, but at the limit these make room, oldest first.
        self._left: dict[_Lock, None] = {}
        self._count = 0

    def lock(
        self, line: Line, group: str, client_id: str, queues: Sequence[MessageQueue], now: float
    ) -> list[MessageQueue]:
        """Return those of *queues* that *client_id*, speaking on *line*, holds from now on.

        Raises:
          Refused: this connection, or all together, would hold too many (BUSY); nothing has changed.
        """
        table = self._table.get(group, {})
        held: list[MessageQueue] = []
        taken: dict[tuple[str, int], _Lock | None] = {}
        for queue in queues:
            key = queue.topic, queue.queue_id
            found = table.get(key)
            if found is not None and found.client_id != client_id and found.until > now:
                continue
            held.append(queue)
            if self._exists(*key):
                taken[key] = found
        self._check_room(line, taken)
        for key, found in taken.items():
            self._take(line, found or self._new(group, key), client_id, now)
        return held

    def _check_room(self, line: Line, taken: Mapping[tuple[str, int], _Lock | None]) -> None:
        mine = len(self._of_line.get(line, ()))
        more = sum(lock is None or lock.line is not line for lock in taken.values())
        if mine + more > self._line_max:
            text = f"connection holds {mine} locked queues and wants {more} more; remoting.locks_peer_max is"
            raise Refused(Reason.BUSY, f"{text} {self._line_max}")
        beyond = self._count + sum(lock is None for lock in taken.values()) - LOCKS_MAX
        if beyond <= 0:
            return
        spare = list(islice((lock for lock in self._left if taken.get(lock.key) is not lock), beyond))
        if len(spare) < beyond:
            raise Refused(Reason.BUSY, f"{self._count} queues are locked; at most {LOCKS_MAX}, wait for some to end")
        for lock in spare:
            self._forget(lock)

    def _new(self, group: str, key: tuple[str, int]) -> _Lock:
        lock = self._table.setdefault(group, {})[key] = _Lock(group, key)
        self._count += 1
        return lock

    def _take(self, line: Line, lock: _Lock, client_id: str, now: float) -> None:
        self._disown(lock)
        lock.line, lock.client_id, lock.until = line, client_id, now + self._lock_s
        self._of_line.setdefault(line, {})[lock] = None

    def _disown(self, lock: _Lock) -> None:
        """*lock* is no connection's any more."""
        self._left.pop(lock, None)
        line = lock.line
        if line is not None:
            mine = self._of_line[line]
            del mine[lock]
            if not mine:
                del self._of_line[line]

    def _forget(self, lock: _Lock) -> None:
        self._disown(lock)
        table = self._table[lock.group]
        del table[lock.key]
        if not table:
            del self._table[lock.group]
        self._count -= 1

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Give back those of *queues* that *client_id* holds."""
        for queue in queues:
            lock = self._table.get(group, {}).get((queue.topic, queue.queue_id))
            if lock is not None and lock.client_id == client_id:
                self._forget(lock)

    def drop(self, line: Line) -> None:
        """The connection is gone; its locks last until they end, for its client may come again."""
        for lock in self._of_line.pop(line, ()):
            lock.line = None
            self._left[lock] = None

    def any_held(self, group: str, now: float) -> bool:
        """Whether *group* holds a lock that has not ended."""
        return any(lock.until > now for lock in self._table.get(group, {}).values())

    def expire(self, now: float) -> None:
        """Forget locks that have ended."""
        for lock in [lock for table in self._table.values() for lock in table.values() if lock.until <= now]:
            self._forget(lock)

    def __len__(self) -> int:
        return self._count
