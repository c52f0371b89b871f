"""Durable sessions: notes in a journal, and the projection that they lead to.

A session is its filters, a position in the log, and the packet ids that are in flight with the positions of their
messages; it never copies a message. Whoever is connected has a `Session`, whose state changes at once and whose every
change is a note. The same change is applied to what is *kept* when the note is durable, live and in each replay. So a
client that returns, after whatever happened, finds what was durable, and a message of QoS 1 is either below the
position and acknowledged, or in flight, or yet to come.

Notes of a session are numbered. When a commit fails, its notes are lost and those after it do not fit any more: they
are ignored, and the client is disconnected. It returns to what is kept: some messages come again, none is lost.

A note is a msgpack array: kind, name, number, arguments.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import msgpack  # type: ignore[import-untyped]

from martlet.contracts import RecordView
from martlet.errors import Reason, Refused, StoreError
from martlet.state import NOTHING, pack_rows, unpack_rows
from martlet.state.journal import Journal, read_notes
from martlet.turns import Pace, Steps
from martlet_topics.codec import IDS_MAX

__all__ = ["Session", "SessionState", "Sessions"]

FORMAT: Final = 2
SESSIONS_A_SLICE: Final = 200

WHOLE: Final = 1  # owner, position, next id, left, filters, flight
SUBSCRIBED: Final = 2  # filter, QoS, position
UNSUBSCRIBED: Final = 3  # filter
SENT: Final = 4  # first id, positions, end
ACKNOWLEDGED: Final = 5  # first id, count
MOVED: Final = 6  # position
LEFT: Final = 7  # position, time in ms
FORGOTTEN: Final = 8


@final
class SessionState:
    """What outlives a connection.

    ``position``: the messages before it were sent or are not wanted. ``flight``: the packet ids of those that are not
    acknowledged. ``number`` is that of the last note, ``since`` the position of the note that has the state whole.
    ``left_ms`` is 0 while a client is connected, and after a crash of the broker.
    """

    __slots__ = ("edition", "filters", "flight", "left_ms", "name", "next_id", "number", "owner", "position", "since")

    def __init__(self, name: str, owner: str, position: int) -> None:
        self.name = name
        self.owner = owner
        self.position = position
        self.next_id = 1
        self.left_ms = 0
        self.number = 0
        self.since = 0
        self.edition = 0
        self.filters: dict[str, int] = {}
        self.flight: dict[int, int] = {}

    def change(self, kind: int, arguments: Sequence[Any]) -> None:
        """Apply a note."""
        self.number += 1
        if kind == SENT:
            first, positions, self.position = arguments
            self.flight.update(zip(range(first, first + len(positions)), positions, strict=True))
            self.next_id = (first + len(positions) - 1) % IDS_MAX + 1
        elif kind == ACKNOWLEDGED:
            first, count = arguments
            for packet_id in range(first, first + count):
                self.flight.pop(packet_id, None)
        elif kind == SUBSCRIBED:
            topic_filter, qos, self.position = arguments
            self.filters[topic_filter] = qos
        elif kind == UNSUBSCRIBED:
            self.filters.pop(arguments[0], None)
        elif kind in (MOVED, LEFT):
            self.position = arguments[0]
            self.left_ms = arguments[1] if kind == LEFT else 0

    def whole(self) -> list[Any]:
        """Return the note that has all of this."""
        state = [self.owner, self.position, self.next_id, self.left_ms, self.filters, list(self.flight.items())]
        return [WHOLE, self.name, self.number, *state]

    @classmethod
    def of(cls, note: Sequence[Any]) -> "SessionState":
        """Return the state that `whole` made *note* of."""
        _, name, number, owner, position, next_id, left_ms, filters, flight = note
        state = cls(name, owner, position)
        state.number, state.next_id, state.left_ms = number, next_id, left_ms
        state.filters, state.flight = dict(filters), dict(flight)
        return state

    def copy(self, edition: int = 0) -> "SessionState":
        state = SessionState.of(self.whole())
        state.since, state.edition = self.since, edition
        return state

    def start(self) -> int:
        """Return the position of the oldest message that the client may still need."""
        return min(self.flight.values(), default=self.position)

    def free_ids(self, count: int) -> tuple[int, int]:
        """Return the next free packet id, and how many from there on are free, up to *count*."""
        first = self.next_id
        while first in self.flight:
            first = first % IDS_MAX + 1
        last = first + 1
        while last < first + count and last <= IDS_MAX and last not in self.flight:
            last += 1
        return first, last - first


@final
class Session:
    """A session while a client has it; one without a journal ends with its connection."""

    __slots__ = ("_journal", "is_forgotten", "lost", "state", "where")

    def __init__(self, state: SessionState, journal: Journal | None) -> None:
        self.state = state
        self.lost: Callable[[str], None] | None = None  # tells the client why it loses the session
        self.where: Callable[[], int] = lambda: state.position  # up to where the client has everything
        self.is_forgotten = False
        self._journal = journal

    def note(self, kind: int, *arguments: Any) -> int:
        """Change the state; return what to pass to `Peer.hold_until`. Raises `Refused`, and nothing is changed."""
        until = 0 if self._journal is None else self._journal.note(self.encode(kind, *arguments))
        self.state.change(kind, arguments)
        return until

    def encode(self, kind: int, *arguments: Any) -> bytes:
        """Return the next note, for an atomic group; after it is stored call ``state.change``."""
        return bytes(msgpack.packb([kind, self.state.name, self.state.number + 1, *arguments]))

    def note_whole(self) -> int:
        """Note the state as it is. Raises `Refused`."""
        return 0 if self._journal is None else self._journal.note(msgpack.packb(self.state.whole()))

    def is_in_flight(self, first_id: int, count: int) -> bool:
        """Whether all these packet ids wait for an acknowledgement."""
        return all(packet_id in self.state.flight for packet_id in range(first_id, first_id + count))


@final
class Sessions:
    """All sessions by name, and the projection behind them (martlet.state.Projection)."""

    name = "topics"

    def __init__(self, journal: Journal, sessions_max: int) -> None:
        self.topics = frozenset((journal.topic,))
        self.journal = journal
        self._sessions_max = sessions_max
        self._edition = 0
        # Ordered by ``since``: a session goes to the end whenever its whole state is noted.
        self._kept: dict[str, SessionState] = {}
        # The sessions of clients, and those whose last note is not durable yet.
        self._live: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._kept)

    # clients

    def open(self, name: str, owner: str, position: int, lost: Callable[[str], None]) -> tuple[Session, bool]:
        """Attach a client to the session *name*, new ones begin at *position*; return it, and whether it is old.

        A client that has the session loses it.

        Raises:
          Refused: the session belongs to another *owner*, or there are too many.
        """
        session = self._live.get(name)
        if session is not None and session.is_forgotten:
            session = None
        kept = None if name in self._live else self._kept.get(name)
        if session is None and kept is not None:
            session = Session(kept.copy(), self.journal)
        if session is not None and session.state.owner != owner:
            raise Refused(Reason.NO_PERMISSION, f"session {name!r} belongs to somebody else; choose another name")
        if session is None:
            return self._create(name, owner, position, lost), False
        if session.lost is not None:
            session.lost("another connection uses the name")
        session.note(MOVED, session.state.position)
        session.lost = lost
        self._live[name] = session
        return session, True

    def _create(self, name: str, owner: str, position: int, lost: Callable[[str], None]) -> Session:
        if len(self._kept) >= self._sessions_max:
            text = f"{self._sessions_max} sessions exist; topics.sessions_max allows no more"
            raise Refused(Reason.BUSY, text)
        session = Session(SessionState(name, owner, position), self.journal)
        session.note_whole()
        session.lost = lost
        self._live[name] = session
        return session

    def leave(self, session: Session, now_ms: int) -> None:
        """The client of *session* is gone; the session stays until it expires."""
        session.lost = None
        try:
            session.note(LEFT, max(session.where(), session.state.position), now_ms)
        except (Refused, StoreError):
            self._live.pop(session.state.name, None)  # what is kept counts

    def end(self, session: Session) -> int:
        """End *session*; return what to pass to `Peer.hold_until`. Raises `Refused`."""
        until = session.note(FORGOTTEN)
        session.is_forgotten = True
        session.lost = None
        return until

    def expire(self, left_before_ms: int, started_ms: int) -> Steps[None]:
        """End the sessions whose clients left before that time, in slices; a crash counts as leaving at the start."""
        for index, state in enumerate(list(self._kept.values())):
            if state.name not in self._live and (state.left_ms or started_ms) < left_before_ms:
                session = self._live[state.name] = Session(state.copy(), self.journal)
                self.end(session)
            if index % SESSIONS_A_SLICE == 0:
                yield

    def note_positions(self, distance_bytes: int) -> Steps[None]:
        """Note where sessions are whose clients wanted little of what came, in slices."""
        for index, session in enumerate(list(self._live.values())):
            if session.lost is not None and session.where() - session.state.position > distance_bytes:
                session.note(MOVED, session.where())
            if index % SESSIONS_A_SLICE == 0:
                yield

    # the projection

    def apply(self, records: Sequence[RecordView]) -> None:
        for record in records:
            for note in read_notes(bytes(record.body)):
                self._apply(msgpack.unpackb(note, strict_map_key=False), record.position)

    def _apply(self, note: Sequence[Any], position: int) -> None:
        kind, name, number = note[:3]
        state = self._kept.get(name)
        if kind == WHOLE:
            if state is None:
                state = SessionState.of(note)
                state.edition = self._edition
            elif number != state.number:
                self._disconnect(name)
                return
            else:
                del self._kept[name]
                state = state.copy(self._edition)
            state.since = position
            self._kept[name] = state
        elif state is None or number != state.number + 1:
            self._disconnect(name)
        else:
            self._change(state, kind, note[3:])

    def _change(self, state: SessionState, kind: int, arguments: Sequence[Any]) -> None:
        name, session = state.name, self._live.get(state.name)
        if kind == FORGOTTEN:
            del self._kept[name]
            if session is not None and session.is_forgotten:
                del self._live[name]
            return
        if state.edition != self._edition:
            state = self._kept[name] = state.copy(self._edition)
        state.change(kind, arguments)
        if session is not None and session.lost is None and session.state.number == state.number:
            del self._live[name]  # it left, and that is durable

    def _disconnect(self, name: str) -> None:
        """Notes of the session were lost: what is kept counts."""
        session = self._live.pop(name, None)
        if session is not None and session.lost is not None:
            session.lost("a disk failure lost its last changes; connect again")

    def freeze(self) -> Steps[Sequence[bytes]]:
        self._edition += 1
        return pack_rows(FORMAT, ((each.since, each.whole()) for each in self._kept.copy().values()))

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        self._kept = {}
        pace = Pace(SESSIONS_A_SLICE)
        for since, note in unpack_rows(FORMAT, data):
            state = self._kept[note[1]] = SessionState.of(note)
            state.since, state.edition = since, self._edition
            if pace.is_over():
                yield

    def forget(self, topic: str) -> None:
        """Nothing: nobody deletes a journal."""

    def floor(self) -> int:
        return next((state.since for state in self._kept.values()), NOTHING)

    def roll(self, start: int, end: int) -> Steps[None]:
        """Note again, whole, every session that a note in the range began."""
        for index, state in enumerate(list(self._kept.values())):
            if state.since >= end:
                return
            session = self._live.get(state.name) or Session(state, self.journal)
            if not session.is_forgotten:
                session.note_whole()
            if index % SESSIONS_A_SLICE == 0:
                yield
