"""Who is there: the live clients of every consumer and producer group, and the queues that ordered ones hold.

A client is registered per (group, connection) by its heartbeats. Whoever leaves, by
word, by silence or by a closed connection, is told to the rest of its group, so
that they share out its queues (NOTIFY_CONSUMER_IDS_CHANGED).

A change of a group of n costs n notices, so n joins at once would cost n * n of them. `Members.run` therefore
sends a bounded number a turn of the event loop, and a group that changed again while its members were being
told is told once more, however often it changed.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, Protocol, final

import orjson
import trio

from martlet.contracts import Peer
from martlet.errors import Reason, Refused
from martlet.tables.groups import Groups
from martlet.turns import Pace, Steps

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
# A notice takes 20 microseconds to encode and send (benchmarks/pauses.py).
TOLD_AT_ONCE: Final = 64
CHANNELS_AT_ONCE: Final = 4096
STEPS_OF_A_LEAVE: Final = 16
LOCKS_AT_ONCE: Final = 4096
QUEUES_AT_ONCE: Final = 256  # of one request to lock or unlock
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

    __slots__ = (
        "channels",
        "fingerprint",
        "from_where",
        "ids",
        "ids_json",
        "kind",
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
        self.subscriptions: dict[str, Subscription] = {}
        self.weight = 0  # of the subscriptions
        self.channels: dict[Line, Channel] = {}
        self.fingerprint: int | None = None
        # Until a member comes or goes.
        self.ids: list[str] | None = None
        self.ids_json: bytes | None = None

    def client_ids_as_json(self) -> bytes:
        """Every member once, also one with several connections; all of a group ask for it after each change."""
        if self.ids_json is None:
            ids = list(dict.fromkeys(channel.client_id for channel in self.channels.values()))
            self.ids_json = orjson.dumps({"consumerIdList": ids})
        return self.ids_json

    def sorted_ids(self) -> list[str]:
        """As `client_ids_as_json`, in the order in which queues are shared out."""
        if self.ids is None:
            self.ids = sorted({channel.client_id for channel in self.channels.values()})
        return self.ids

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
        self.weight = sum(subscription.weight for subscription in self.subscriptions.values())
        return changed


@final
class _Joined:
    """The groups of one connection: what it subscribes to in each, in characters, and in all."""

    __slots__ = ("chars", "groups")

    def __init__(self) -> None:
        self.groups: dict[tuple[bool, str], int] = {}  # by (consumer?, group)
        self.chars = 0

    def put(self, key: tuple[bool, str], chars: int) -> None:
        self.chars += chars - self.groups.get(key, 0)
        self.groups[key] = chars

    def drop(self, key: tuple[bool, str]) -> None:
        self.chars -= self.groups.pop(key, 0)


@final
class Members:
    """The registry of all connections. `consumers` and `producers` may be read by everyone."""

    def __init__(self, groups: Groups, groups_peer_max: int, subscribed_chars_peer_max: int = 1 << 20) -> None:
        self.consumers: dict[str, ConsumerGroup] = {}
        self.producers: dict[str, dict[Line, Channel]] = {}
        self._groups = groups
        self._groups_peer_max = groups_peer_max
        self._subscribed_chars_peer_max = subscribed_chars_peer_max
        self._of_line: dict[Line, _Joined] = {}
        self._changed: dict[str, None] = {}  # groups whose members are to be told, in the order they changed
        self._telling = ""  # the group whose members are being told now
        self._untold: deque[Line] = deque()
        self._woken = trio.Event()

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
        if subscriptions is not None:
            chars = sum(subscription.weight for subscription in subscriptions)
        else:
            chars = group.weight if group is not None else 0
        self._note(channel.line, True, name, chars)
        if group is None:
            group = self.consumers[name] = ConsumerGroup(name)
        return group

    def enter(self, group: ConsumerGroup, channel: Channel) -> bool:
        """Put *channel* into *group*; whether it was not there, or under another client id."""
        old = group.channels.get(channel.line)
        group.channels[channel.line] = channel
        if old is not None and old.client_id == channel.client_id:
            return False
        group.ids = group.ids_json = None
        return True

    def join_producers(self, name: str, channel: Channel) -> None:
        """Register *channel* as a producer of group *name*."""
        self._note(channel.line, False, name)
        self.producers.setdefault(name, {})[channel.line] = channel

    def _note(self, line: Line, consumer: bool, name: str, chars: int = 0) -> None:
        mine, key = self._of_line.setdefault(line, _Joined()), (consumer, name)
        count = len(mine.groups)
        if count >= self._groups_peer_max and key not in mine.groups:
            text = f"connection is in {count} groups; remoting.groups_peer_max is {self._groups_peer_max}"
            raise Refused(Reason.BUSY, text)
        total, limit = mine.chars - mine.groups.get(key, 0) + chars, self._subscribed_chars_peer_max
        if chars and total > limit:
            text = f"groups of this connection would subscribe to {total} characters of topics and expressions"
            raise Refused(Reason.BUSY, f"{text}; remoting.subscribed_chars_peer_max is {limit}")
        mine.put(key, chars)

    def _forget(self, line: Line, consumer: bool, name: str) -> None:
        mine = self._of_line.get(line)
        if mine is not None:
            mine.drop((consumer, name))

    def leave(self, line: Line, name: str) -> None:
        """*line* has left the consumer group *name*; the others are told."""
        group = self.consumers.get(name)
        self._forget(line, True, name)
        if group is None or group.channels.pop(line, None) is None:
            return
        group.ids = group.ids_json = None
        if not group.channels:
            del self.consumers[name]
        self.notify(group)

    def leave_producers(self, line: Line, name: str) -> None:
        """*line* has left the producer group *name*."""
        self._forget(line, False, name)
        channels = self.producers.get(name)
        if channels is not None and channels.pop(line, None) is not None and not channels:
            del self.producers[name]

    def drop(self, line: Line) -> None:
        """The connection is gone; it leaves all its groups."""
        mine = self._of_line.get(line)
        for consumer, name in list(mine.groups) if mine is not None else ():
            if consumer:
                self.leave(line, name)
            else:
                self.leave_producers(line, name)
        self._of_line.pop(line, None)

    def expire(self, before: float) -> Steps[None]:
        """Whoever was last heard of before *before* leaves."""
        pace = Pace(CHANNELS_AT_ONCE)
        for group in list(self.consumers.values()):
            late = [channel for channel in group.channels.values() if channel.seen < before]
            if pace.is_over(1 + len(group.channels)):
                yield
            for channel in late:
                if group.channels.get(channel.line) is channel:
                    self.leave(channel.line, group.name)
                if pace.is_over(STEPS_OF_A_LEAVE):
                    yield
        for name, channels in list(self.producers.items()):
            late = [channel for channel in channels.values() if channel.seen < before]
            if pace.is_over(1 + len(channels)):
                yield
            for channel in late:
                if channels.get(channel.line) is channel:
                    self.leave_producers(channel.line, name)
                if pace.is_over(STEPS_OF_A_LEAVE):
                    yield

    # notices

    def notify(self, group: ConsumerGroup) -> None:
        """Let every member of *group* know soon that members or subscriptions changed, unless the group forbids it."""
        policy = self._groups.get(group.name)
        if group.model == BROADCASTING or (policy and not policy.notify_consumer_ids_changed_enable):
            return
        self._changed[group.name] = None
        self._woken.set()

    async def run(self) -> None:
        """Tell the members of groups that changed, until cancelled."""
        while True:
            await self._woken.wait()
            self._woken = trio.Event()
            while self.tell_some():
                await trio.lowlevel.checkpoint()

    def tell_some(self, count_max: int = TOLD_AT_ONCE) -> bool:
        """Tell up to *count_max* members that their group changed; whether more wait."""
        for _ in range(count_max):
            group = self.consumers.get(self._telling)
            if not self._untold or group is None:
                self._telling = next(iter(self._changed), "")
                self._changed.pop(self._telling, None)
                group = self.consumers.get(self._telling)
                self._untold = deque(group.channels if group is not None else ())
            if self._untold and group is not None:
                line = self._untold.popleft()
                if line in group.channels:
                    line.tell(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": group.name})
            elif not self._changed:
                return False
        return bool(self._untold or self._changed)

    def next_producer(self, name: str) -> Channel | None:
        """A connection of producer group *name*, each in its turn; None when nobody is there."""
        channels = self.producers.get(name)
        if channels is None:
            return None
        line = next(iter(channels))
        channel = channels[line] = channels.pop(line)
        return channel

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
            "groups_to_be_told": len(self._changed),
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
    ) -> Steps[list[MessageQueue]]:
        """Return those of *queues* that *client_id*, speaking on *line*, holds from now on; in slices.

        Raises:
          Refused: this connection, or all together, would hold too many (BUSY); it holds what it held before.
        """
        held: list[MessageQueue] = []
        made: list[_Lock] = []
        for start in range(0, len(queues), QUEUES_AT_ONCE):
            if start:
                yield
            some = queues[start : start + QUEUES_AT_ONCE]
            try:
                held += self._lock(line, group, client_id, some, now, made)
            except Refused:
                for lock in made:
                    if self._table.get(group, {}).get(lock.key) is lock:
                        self._forget(lock)
                raise
        return held

    def _lock(
        self, line: Line, group: str, client_id: str, queues: Sequence[MessageQueue], now: float, made: list[_Lock]
    ) -> list[MessageQueue]:
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
        for key, lock in taken.items():
            if lock is None:
                lock = self._new(group, key)
                made.append(lock)
            self._take(line, lock, client_id, now)
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

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> Steps[None]:
        """Give back those of *queues* that *client_id* holds."""
        pace = Pace(QUEUES_AT_ONCE)
        for queue in queues:
            lock = self._table.get(group, {}).get((queue.topic, queue.queue_id))
            if lock is not None and lock.client_id == client_id:
                self._forget(lock)
            if pace.is_over():
                yield

    def drop(self, line: Line) -> None:
        """The connection is gone; its locks last until they end, for its client may come again."""
        for lock in self._of_line.pop(line, ()):
            lock.line = None
            self._left[lock] = None

    def any_held(self, group: str, now: float) -> bool:
        """Whether *group* holds a lock that has not ended."""
        return any(lock.until > now for lock in self._table.get(group, {}).values())

    def expire(self, now: float) -> Steps[None]:
        """Forget locks that have ended."""
        pace = Pace(LOCKS_AT_ONCE)
        for table in list(self._table.values()):
            for lock in list(table.values()):
                if lock.until <= now and table.get(lock.key) is lock:
                    self._forget(lock)
                if pace.is_over():
                    yield

    def __len__(self) -> int:
        return self._count
