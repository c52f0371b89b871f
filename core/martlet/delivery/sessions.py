"""Session: who a peer is, and what outlives its socket.

A session has a name and an owner. While a peer is attached it may add durable
subscriptions; their cursors are the committed offsets of a consumer group, so they cost
nothing while the peer is away and are seen by every tool that shows groups. A peer that
comes with the name of an attached one takes over, and the other is told. Who stays away
for too long is forgotten, cursors included.

The table is ours alone, hence msgpack: ``config/sessions.msgpack``.
"""

import logging
from collections.abc import Callable
from typing import Any, Final, final

import msgpack  # type: ignore[import-untyped]
import trio

from martlet.clock import Clock
from martlet.delivery.subscriptions import Start, from_earliest
from martlet.errors import Reason, Refused, StoreError
from martlet.settings import DeliveryConfig
from martlet.store import Queue
from martlet.tables.groups import Groups
from martlet.tables.saved import NO_POSITION, Table
from martlet.tables.topics import Topic
from martlet.turns import Pace, Steps

__all__ = ["Session", "Sessions"]

log = logging.getLogger("martlet.sessions")

FORMAT: Final = 1
EXPIRY_CHECK_S: Final = 60.0
OVERDUE_MS: Final = 3_600_000


@final
class Session:
    """A name that outlives connections.

    ``topics`` has its durable subscriptions, each with a note of the protocol's own. ``left_ms`` is when its peer left,
    0 while one is attached; ``lost`` tells that peer why it loses the session.
    """

    __slots__ = ("group", "left_ms", "lost", "name", "owner", "protocol", "topics")

    def __init__(self, protocol: str, owner: str, name: str, group: str) -> None:
        self.protocol = protocol
        self.owner = owner
        self.name = name
        self.group = group
        self.topics: dict[str, str] = {}
        self.left_ms = 0
        self.lost: Callable[[str], None] | None = None


@final
class Sessions:
    """All sessions of a broker, by protocol and name."""

    def __init__(self, groups: Groups, clock: Clock, config: DeliveryConfig) -> None:
        self._groups = groups
        self._clock = clock
        self._config = config
        self._table: dict[tuple[str, str], Session] = {}
        self.table = Table("config/sessions.msgpack", self.bytes_in_steps, self.load)
        self._any_overdue = False
        # When the last overdue session went, or the first was noticed.
        self._overdue_from = 0.0
        self._overdue_pause_s = 0.0
        groups.was_reset.append(self._was_reset)

    def __len__(self) -> int:
        return len(self._table)

    def get(self, protocol: str, name: str) -> Session | None:
        """Return session *name* of *protocol*, None if there is none."""
        return self._table.get((protocol, name))

    def open(
        self, protocol: str, owner: str, name: str, lost: Callable[[str], None], *, group: str = ""
    ) -> tuple[Session, bool]:
        """Attach the caller to session *name*, created if need be; return it, and whether it existed before.

        A peer that is attached already loses the session: its *lost* is called with the reason. That also happens
        when an administrator resets the cursors. The cursors are offsets of *group*, or of a group with the
        session's name if that is empty.

        Raises:
          Refused: the name is not valid or belongs to another *owner*, or there are too many sessions.
        """
        session = self._table.get((protocol, name))
        if session is None:
            session = self._add(protocol, owner, name, group or name)
            session.lost = lost
            return session, False
        if session.owner != owner:
            raise Refused(Reason.NO_PERMISSION, f"session {name!r} belongs to somebody else; choose another name")
        if session.lost is not None:
            session.lost("another connection uses the name")
        session.lost = lost
        session.left_ms = 0
        self.table.change()
        return session, True

    def _add(self, protocol: str, owner: str, name: str, group: str) -> Session:
        limit = self._config.sessions_max
        if len(self._table) >= limit:
            raise Refused(Reason.BUSY, f"{limit} sessions exist; delivery.sessions_max is {limit}")
        if self._groups.ensure(group) is None:
            raise Refused(
                Reason.NO_GROUP, f"group {group!r} does not exist; create it, or set broker.auto_create_groups"
            )
        session = self._table[protocol, name] = Session(protocol, owner, name, group)
        self.table.change()
        return session

    def subscribe(self, session: Session, topic: Topic, start: Start, note: str = "") -> Start:
        """Add a durable subscription to the session; return the *start* for `Subscriptions.open`: its cursors.

        A queue without a cursor begins at *start* if the subscription is new, and with the oldest message otherwise.

        Raises:
          Refused: the session's group may not consume that topic, it has too many subscriptions, or so many
            offsets are kept that its cursors find no room.
        """
        self._groups.reader(session.group, topic.name)
        self._groups.check_may_commit(session.group, topic.name, range(topic.read_queues))
        limit = self._config.session_subscriptions_max
        if topic.name not in session.topics and len(session.topics) >= limit:
            text = f"session {session.name!r} has {limit} subscriptions; delivery.session_subscriptions_max is {limit}"
            raise Refused(Reason.BUSY, text)
        if topic.name in session.topics:
            start = from_earliest  # of a queue that came, or of a topic that was made again, in the meantime
        if session.topics.get(topic.name) != note:
            session.topics[topic.name] = note
            self.table.change()
        return lambda queue: self._cursor(session, queue, start)

    def _cursor(self, session: Session, queue: Queue, start: Start) -> int:
        groups = self._groups
        groups.take_reset(session.group, queue.topic, queue.queue_id)
        offset = groups.offset(session.group, queue.topic, queue.queue_id)
        # A power cut can take messages that a cursor has passed, never what comes after them.
        offset = min(offset, queue.next_offset) if offset >= 0 else start(queue)
        groups.commit(session.group, queue.topic, queue.queue_id, offset)
        return offset

    def commit(self, session: Session, topic: str, queue_id: int, offset: int) -> None:
        """Move the cursor of a queue forward to *offset*: the peer needs nothing below it any more."""
        if offset > self._groups.offset(session.group, topic, queue_id):
            self._groups.commit(session.group, topic, queue_id, offset)

    def unsubscribe(self, session: Session, topic: str) -> None:
        """Delete a durable subscription and its cursors, and with the last one the session."""
        if session.topics.pop(topic, None) is not None:
            self.table.change()
            self._groups.forget_offsets(session.group, topic)
        if not session.topics:
            self._table.pop((session.protocol, session.name), None)

    def leave(self, session: Session, lost: Callable[[str], None]) -> None:
        """Detach the peer that attached with *lost*; the session stays until it expires."""
        if session.lost == lost:
            session.lost = None
            session.left_ms = self._clock.now_ms()
            self.table.change()

    def forget_empty(self, session: Session) -> None:
        """Delete *session* if no peer is attached and it has no subscriptions."""
        key = session.protocol, session.name
        if session.lost is None and not session.topics and self._table.get(key) is session:
            del self._table[key]
            self.table.change()

    def _was_reset(self, group: str, topic: str) -> None:
        """An administrator moved the cursors: who is attached has to come again to go on there."""
        for session in list(self._table.values()):
            if session.group == group and topic in session.topics and session.lost is not None:
                session.lost("its offsets were reset; subscribe again")

    def expire(self) -> list[str]:
        """Forget the sessions whose peers stayed away too long; return their names.

        Looked at each minute, none is overdue by much, unless the wall clock jumped or the broker was stopped for
        long, and nothing here can tell which. So those that are go one by one, all of them within `session_expiry_s`,
        as `Retention` does with segments.
        """
        before = self._clock.now_ms() - self._config.session_expiry_s * 1000
        over = [s for s in self._table.values() if s.lost is None and s.left_ms <= before]
        overdue = [s for s in over if s.left_ms <= before - OVERDUE_MS]
        if overdue:
            over = [s for s in over if s.left_ms > before - OVERDUE_MS] + self._next_overdue(overdue)
        self._any_overdue = bool(overdue)
        for session in over:
            for topic in list(session.topics):
                self.unsubscribe(session, topic)
            self._table.pop((session.protocol, session.name), None)
            self.table.change()
        return [session.name for session in over]

    def _next_overdue(self, overdue: list[Session]) -> list[Session]:
        """Those of *overdue* whose turn it is."""
        now = trio.current_time()
        if not self._any_overdue:
            log.warning(
                "%d sessions are overdue by more than an hour: the clock jumped ahead or the broker was stopped for "
                "long; forgetting them one by one; if the clock is wrong, set it right",
                len(overdue),
            )
            self._overdue_from = now
            self._overdue_pause_s = self._config.session_expiry_s / len(overdue)
        count = int((now - self._overdue_from) / self._overdue_pause_s)
        self._overdue_from += count * self._overdue_pause_s
        return sorted(overdue, key=lambda session: session.left_ms)[:count]

    async def run(self) -> None:
        """Expire sessions until cancelled."""
        while True:
            await trio.sleep(EXPIRY_CHECK_S)
            self.expire()

    # file

    def bytes_in_steps(self, position: int = NO_POSITION) -> Steps[list[bytes]]:
        """The whole table, a piece for each slice; a session that is attached now has left when the table is loaded."""
        return self._render(list(self._table.values()))

    def _render(self, sessions: list[Session]) -> Steps[list[bytes]]:
        pace = Pace()
        packer = msgpack.Packer()
        parts = [packer.pack_array_header(2), packer.pack(FORMAT), packer.pack_array_header(len(sessions))]
        pieces: list[bytes] = []
        for s in sessions:
            left_ms = 0 if s.lost is not None else s.left_ms
            parts.append(packer.pack([s.protocol, s.owner, s.name, s.group, left_ms, s.topics]))
            if pace.is_over(1 + len(s.topics)):
                pieces.append(b"".join(parts))
                parts.clear()
                yield
        return [*pieces, b"".join(parts)]

    def load(self, data: bytes) -> None:
        """Take over what `to_bytes` wrote.

        Raises:
          StoreError: it is not such a table.
        """
        try:
            version, rows = msgpack.unpackb(data)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise StoreError(f"sessions.msgpack cannot be read; {error}") from error
        if version != FORMAT or not isinstance(rows, list):
            raise StoreError(f"sessions.msgpack has format {version!r}; {FORMAT} would be right")
        table: dict[tuple[str, str], Session] = {}
        for row in rows:
            session = _from_row(row)
            session.left_ms = session.left_ms or self._clock.now_ms()
            table[session.protocol, session.name] = session
        self._table = table

    def statistics(self) -> dict[str, object]:
        attached = sum(session.lost is not None for session in self._table.values())
        return {"sessions": len(self._table), "attached": attached}


def _from_row(row: Any) -> Session:
    try:
        protocol, owner, name, group, left_ms, topics = row
        session = Session(str(protocol), str(owner), str(name), str(group))
        session.left_ms = int(left_ms)
        session.topics = {str(topic): str(note) for topic, note in topics.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"sessions.msgpack has a row that is no session; {error}") from error
    return session
