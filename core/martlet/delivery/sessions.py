"""Sessions: the state of a client that outlives its connection.

A session is identified by a protocol and a name, and belongs to an owner. It consists of filters, a position in the
log, and the ids of messages in flight; it never copies a message. While a client uses it, it is a `Session` object,
which changes immediately and notes every change in a journal. `session_state.py` applies a note once it is durable,
both live and during replay. So a client that reconnects, after any failure, finds its last durable state. Each message
is either acknowledged and before the position, or in flight, or still to be sent.

A failed commit loses its notes. The clients affected lose their sessions and return to the stored state: some messages
are sent again, none is lost. The notes of a session are numbered, and a note that does not follow the previous one is
ignored.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, final

import trio

from martlet.clock import Clock
from martlet.delivery.session_notes import (
    ACKNOWLEDGED,
    ATTACHED,
    BEGIN,
    DATA,
    ENDED,
    FILTER,
    HELD,
    LEFT,
    MOVED,
    NEVER_MS,
    NO_FILTER,
    SENT,
    SessionState,
    encode_note,
    encode_sent,
    encode_whole,
    filter_bytes,
    next_number,
)
from martlet.delivery.session_state import SessionTable
from martlet.errors import Reason, Refused, StoreError
from martlet.settings import DeliveryConfig
from martlet.state.journal import NEXT_COMMIT, Journal
from martlet.steps import Pace, Steps
from martlet.store import Store
from martlet.turns import Turns

__all__ = ["JointChanges", "Session", "Sessions"]

log = logging.getLogger("martlet.sessions")

NAME_BYTES_MAX: Final = 1024
# Seconds between two sweeps over all sessions.
LOOK_S: Final = 60.0
OVERDUE_MS: Final = 3_600_000
# Overdue sessions end one by one, all of them within this time.
OVERDUE_S: Final = 86_400.0
# If a client's filters match little, its position is noted each time it has advanced this far; otherwise it would have
# to read much of the log again after a crash.
DISTANCE_BYTES: Final = 64 << 20
# How many sessions one slice of a sweep checks; noting a session costs as much as checking LOOKS_A_NOTE of them.
LOOKS_A_SLICE: Final = 2000
LOOKS_A_NOTE: Final = 40
# The maximum number of messages in flight that one note adds.
SENT_A_NOTE: Final = 4096
# After every offset of the journal.
NEVER: Final = 1 << 62


@final
class Session:
    """A session while its client is connected; made by `Gate.open_session`.

    Every change is stored with the commit of this round: pass ``until`` to `Peer.hold_until` before an answer that
    confirms a change. ``where`` returns the log position before which the client has every matching message; set it to
    the position of the client's cursor. When another connection opens the session, this object no longer changes it.
    """

    __slots__ = ("_all", "_counted", "_sessions", "_state", "is_ended", "lost", "where")

    def __init__(
        self,
        state: SessionState,
        sessions: "Sessions",
        lost: Callable[[str], None] | None = None,
        *,
        is_stored: bool = True,
    ) -> None:
        self._state = state
        self._all = sessions
        self._sessions = sessions if is_stored else None
        self._counted = 0  # bytes of filters in `Sessions.unstored_bytes`
        self.lost = lost  # None once the client is gone
        self.is_ended = False
        self.where: Callable[[], int] = lambda: state.position

    # what is known

    @property
    def name(self) -> str:
        """The name by which the client opened it; empty if it is not stored."""
        return self._state.key.partition(" ")[2]

    @property
    def owner(self) -> str:
        """The name of the identity that it belongs to."""
        return self._state.owner

    @property
    def is_stored(self) -> bool:
        """Whether it outlives its connection."""
        return self._sessions is not None

    @property
    def until(self) -> int:
        """What to pass to `Peer.hold_until` so that every change so far is durable."""
        return NEXT_COMMIT if self._sessions is not None else 0

    @property
    def filters(self) -> Mapping[str, bytes]:
        """The client's filters, each with its protocol-specific options."""
        return self._state.filters

    @property
    def position(self) -> int:
        """The log position before which every matching message was sent."""
        return self._state.position

    @property
    def flight(self) -> Mapping[int, int]:
        """The ids in flight, each with the log position of its message, or `NO_MESSAGE`."""
        return self._state.flight

    @property
    def expiry_s(self) -> int:
        """How long it stays after its client left, -1 if it never ends."""
        return self._state.expiry_s

    @property
    def next_id(self) -> int:
        """The id after the last one used."""
        return self._state.next_id

    @property
    def start(self) -> int:
        """The log position of the oldest message that the client may still need."""
        return self._state.start

    @property
    def data(self) -> bytes:
        """Data of the protocol, as `keep` stored it."""
        return self._state.data

    # what changes

    def subscribe(self, topic_filter: str, options: bytes = b"") -> None:
        """Add a filter or change its options; it applies to messages from ``where()`` on.

        Raises:
          Refused: it is too long, the filters take too many bytes, or the store accepts no writes; nothing is changed.
        """
        self._all.check_room(self._state, topic_filter, options)
        self._change(FILTER, topic_filter, options, self.reached())
        self._count_filters()

    def unsubscribe(self, topic_filter: str) -> None:
        """Remove a filter. Raises `Refused`."""
        if topic_filter in self._state.filters:
            self._change(NO_FILTER, topic_filter)
            self._count_filters()

    def _count_filters(self) -> None:
        """Count the size of a session that is not stored among that of all sessions."""
        if self._sessions is None:
            self._count(self._state.size if self._state.filters else 0)

    def _count(self, size: int) -> None:
        self._all.unstored_bytes += size - self._counted
        self._counted = size

    def hand_out(self, first: int, positions: Sequence[int], end: int) -> None:
        """Note that messages at *positions* are sent with ids from *first* on; the next message is at *end* or later.

        The protocol chooses ids that are not in flight. Call `Peer.hold_until` before you send the messages; otherwise
        an acknowledgement after a crash could be applied to another message. Raises `Refused`.
        """
        for at in range(0, len(positions), SENT_A_NOTE):
            part = positions[at : at + SENT_A_NOTE]
            last = at + len(part) == len(positions)
            self._change(SENT, *encode_sent(first + at, part, end if last else positions[at + len(part)]))

    def acknowledge(self, first: int, count: int = 1) -> None:
        """Free *count* ids from *first* on. Raises `Refused`."""
        self._change(ACKNOWLEDGED, first, count)

    def hold(self, first: int, count: int = 1) -> None:
        """Use *count* ids from *first* on without a message; `acknowledge` frees them. Raises `Refused`."""
        self._change(HELD, first, count)

    def changes(self) -> "JointChanges":
        """Return changes to be stored together with messages.

        Raises:
          Refused: another connection has this session (Reason.NOT_FOUND).
        """
        if self._sessions is not None and not self._sessions.has(self):
            raise Refused(Reason.NOT_FOUND, f"another connection has session {self.name!r}")
        return JointChanges(self._state, self._sessions)

    def move(self, position: int) -> None:
        """Advance to *position*: earlier messages are no longer needed. Raises `Refused`."""
        self._change(MOVED, position)

    def keep(self, data: bytes) -> None:
        """Store *data*, a few bytes for the protocol itself. Raises `Refused`."""
        if data != self._state.data:
            if self._sessions is not None:
                self._sessions.check_data(data, self._state)
            self._change(DATA, data)

    def expire_after(self, expiry_s: int | None) -> None:
        """Make the session expire *expiry_s* after its client leaves; None means never. Raises `Refused`."""
        self._change(ATTACHED, self.reached(), -1 if expiry_s is None else expiry_s)

    def leave(self) -> None:
        """Detach the client; the session stays until it expires. Call this in `Handler.closed`."""
        self._count(0)
        if self._sessions is not None:
            self._sessions.leave(self)

    def end(self) -> None:
        """End the session. Raises `Refused`."""
        if self._sessions is not None:
            self._sessions.end(self)

    def reached(self) -> int:
        """Return the log position before which the client has every matching message."""
        return max(self._state.position, self.where())

    def _change(self, kind: int, *arguments: Any) -> None:
        if self._sessions is not None:
            if not self._sessions.has(self):
                return
            self._sessions.note(self._state, kind, *arguments)
        self._state.change(kind, arguments)


@final
class JointChanges:
    """Changes of a session that are stored in an atomic group with messages; made by `Session.changes`.

    Pass ``notes`` to `Gate.publish_atomic` or `Gate.publish_run`, and call `apply` right after that; without messages,
    call `store`.
    """

    __slots__ = ("_done", "_number", "_sessions", "_state", "notes")

    def __init__(self, state: SessionState, sessions: "Sessions | None") -> None:
        self._state = state
        self._sessions = sessions
        self._number = state.number
        self._done: list[tuple[int, tuple[Any, ...]]] = []
        # Empty for a session that is not stored.
        self.notes: list[tuple[Journal, bytes]] = []

    def hand_out(self, first: int, positions: Sequence[int], end: int) -> None:
        """Use ids from *first* on for messages at *positions*, like `Session.hand_out`."""
        self._add(SENT, *encode_sent(first, positions, end))

    def acknowledge(self, first: int, count: int = 1) -> None:
        """Free *count* ids from *first* on."""
        self._add(ACKNOWLEDGED, first, count)

    def hold(self, first: int, count: int = 1) -> None:
        """Use *count* ids from *first* on without a message."""
        self._add(HELD, first, count)

    def keep(self, data: bytes) -> None:
        """Store *data*, a few bytes for the protocol itself. Raises `Refused`."""
        if self._sessions is not None:
            self._sessions.check_data(data, self._state)
        self._add(DATA, data)

    def leave(self, position: int, ends_ms: int) -> None:
        """Detach the client, which has every matching message before *position*."""
        self._add(LEFT, position, ends_ms)

    def end(self) -> None:
        """End the session; this is the last change."""
        self._add(ENDED)

    @property
    def state(self) -> SessionState:
        """The state before the changes; do not change it."""
        return self._state

    def _add(self, kind: int, *arguments: Any) -> None:
        self._number = next_number(self._number)
        self._done.append((kind, arguments))
        if self._sessions is not None:
            note = encode_note(kind, self._state.key, self._number, *arguments)
            self.notes.append((self._sessions.journal, note))

    def apply(self) -> None:
        """Apply the changes, which were published."""
        for kind, arguments in self._done:
            self._state.change(kind, arguments)
        if self._sessions is not None:
            self._sessions.changed(self._state, is_ended=self._done[-1][0] == ENDED)

    def store(self) -> None:
        """Store the changes without messages, and apply them. Raises `Refused`."""
        if self._sessions is not None:
            self._sessions.note_all(self._state.key, self.notes)
        self.apply()


@final
class Sessions:
    """All sessions of a broker; `run` ends expired ones."""

    def __init__(self, store: Store, journal: Journal, turns: Turns, clock: Clock, config: DeliveryConfig) -> None:
        self.journal = journal
        self.table = SessionTable(journal.topic)
        self.table.on_lost = lambda key, is_rolled: self._lost(key, is_rolled=is_rolled)
        self.table.on_left = self._left
        self.table.note_again = self._note_again
        self.unstored_bytes = 0  # the size of sessions that end with their connections
        self._store = store
        self._turns = turns
        self._clock = clock
        self._config = config
        # Sessions with a client, and those whose last note is not durable yet.
        self._live: dict[str, Session] = {}
        # Keys with a note in the current commit, and in the previous one.
        self._noted: dict[str, None] = {}
        self._unsure: dict[str, None] = {}
        self._waits = False
        # The end that the journal must have reached with the previous commit; if it is lower, that commit failed.
        self._expected = 0
        # How often the store had undone appends before the first note of the current commit.
        self._undone = 0
        # Whether `table` has everything that is readable, and a function that waits for that; set by the broker.
        self.is_current: Callable[[], bool] = lambda: True
        self.wait_current: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        # Sessions whose last notes were lost, with the log position that `table` must reach to know what remained.
        self._restored: dict[str, int] = {}
        # By protocol, a function that is called when a session ends because its client is gone: with the note of its
        # end, which it must store, alone or together with messages. If it raises `Refused`, it is called again later.
        self.ending: dict[str, Callable[[JointChanges], None]] = {}
        # Detached sessions found by a sweep, with the end of the log at that time.
        self._in_doubt: dict[str, int] = {}
        self._overdue = 0
        # When the last overdue session ended (or the first was noticed), and the pause between two.
        self._overdue_from = 0.0
        self._overdue_pause_s = 0.0

    def __len__(self) -> int:
        return len(self.table)

    # clients

    def open(
        self,
        protocol: str,
        owner: str,
        name: str,
        position: int,
        lost: Callable[[str], None],
        *,
        expiry_s: int | None = None,
    ) -> tuple[Session, bool]:
        """Return session *name* of *protocol* for a client, and whether it existed before.

        Args:
          protocol: the protocol that the name belongs to; one word.
          owner: the name of the identity that owns the session.
          name: any text; empty for a session that is not stored and ends with its connection.
          position: where a new session begins in the log.
          lost: called with the reason when the client loses the session: to another connection or by a disk failure.
          expiry_s: how long the session stays after its client leaves; None means that it never expires.

        Raises:
          Refused: the name is too long, the session belongs to another owner, there are too many sessions, or the
            store accepts no writes.
        """
        expiry = -1 if expiry_s is None else expiry_s
        if " " in protocol:
            raise ValueError(f"protocol {protocol!r} contains a space; use one word")
        if not name:
            return Session(SessionState("", owner, position, expiry), self, is_stored=False), False
        if len(name.encode()) > NAME_BYTES_MAX:
            text = f"the name of a session has {len(name.encode())} bytes; shorten it to {NAME_BYTES_MAX}"
            raise Refused(Reason.ILLEGAL, text)
        self.find_lost()
        key = f"{protocol} {name}"
        if self._restored:
            self._check_settled(key)
        before, holder = self._find(key)
        is_ended = holder is not None and holder.is_ended
        if before is not None and not is_ended and self._is_over(before, holder):
            self._end(before)  # no sweep has seen that it expired
            is_ended = True
        if before is None or is_ended:
            return self._begin(key, owner, position, expiry, lost, before), False
        if before.owner != owner:
            raise Refused(Reason.NO_PERMISSION, f"session {name!r} belongs to somebody else; choose another name")
        reached = holder.reached() if holder is not None and holder.lost is not None else before.position
        self.note(before, ATTACHED, reached, expiry)
        before.change(ATTACHED, (reached, expiry))
        session = self._live[key] = Session(before, self, lost)
        self._in_doubt.pop(key, None)
        if holder is not None and holder.lost is not None:
            holder.lost("another connection uses the name")
        return session, True

    def find(self, protocol: str, name: str) -> tuple[SessionState | None, bool]:
        """Return the state of a session, None if there is none, and whether a client uses it; do not change it."""
        state, holder = self._find(f"{protocol} {name}")
        if holder is not None and holder.is_ended:
            return None, False
        return state, holder is not None and holder.lost is not None

    def changes_without_client(self, protocol: str, name: str) -> JointChanges | None:
        """Return changes of a session that no client uses, to be stored with messages; None if there is none."""
        state, has_client = self.find(protocol, name)
        return JointChanges(state, self) if state is not None and not has_client else None

    def is_settled(self, protocol: str, name: str) -> bool:
        """Return whether the state of a session is known; it is not for a moment after a failed commit."""
        self.find_lost()
        return not self._restored or self._is_settled(f"{protocol} {name}")

    async def wait_settled(self, protocol: str, name: str) -> None:
        """Wait until `is_settled`. Raises `StoreFailed`."""
        while not self.is_settled(protocol, name):
            await self._store.wait_flushed(self._store.written)
            await self.wait_current()

    def _is_settled(self, key: str) -> bool:
        end = self._restored.get(key)
        if end is None:
            return True
        if self._store.readable < end or not self.is_current():
            return False
        del self._restored[key]
        return True

    def _check_settled(self, key: str) -> None:
        """Raise `Refused` (UNAVAILABLE) while the stored state of *key* is not known."""
        if not self._is_settled(key):
            name = key.partition(" ")[2]
            raise Refused(
                Reason.UNAVAILABLE, f"a disk failure lost the last changes of session {name!r}; connect again"
            )

    def _find(self, key: str) -> tuple[SessionState | None, Session | None]:
        """Return the state of session *key*, and its live `Session` if there is one."""
        holder = self._live.get(key)
        return (self.table.get(key), None) if holder is None else (holder._state, holder)

    def _is_over(self, state: SessionState, holder: Session | None) -> bool:
        """Return whether a session has expired; False if it is so overdue that the clock may have jumped."""
        if not state.expiry_s and (holder is None or holder.lost is None):
            return True  # it should have ended with its connection
        late_ms = self._clock.now_ms() - state.ends_ms
        return state.ends_ms > 0 and 0 <= late_ms < OVERDUE_MS

    def _begin(
        self,
        key: str,
        owner: str,
        position: int,
        expiry_s: int,
        lost: Callable[[str], None],
        before: SessionState | None,
    ) -> Session:
        limit = self._config.sessions_max
        if before is None and len(self.table) >= limit:
            raise Refused(Reason.BUSY, f"{limit} sessions exist; delivery.sessions_max is {limit}")
        state = SessionState(key, owner, position, expiry_s)
        # If this note is lost, later ones must not seem to follow the last note of the previous session.
        state.number = next_number(next_number(before.number)) if before is not None else 0
        self._note(key, encode_note(BEGIN, key, state.number, owner, position, expiry_s))
        session = self._live[key] = Session(state, self, lost)
        return session

    def has(self, session: Session) -> bool:
        """Return whether the client still has *session*."""
        self.find_lost()
        return session.lost is not None and self._live.get(session._state.key) is session

    def check_room(self, state: SessionState, topic_filter: str, options: bytes) -> None:
        """Raise `Refused` unless there is room for this filter in *state*."""
        size, config, limit = filter_bytes(topic_filter, options), self._config, self.journal.note_bytes_max // 2
        if size > limit:
            raise Refused(Reason.ILLEGAL, f"a filter takes {size} bytes; shorten it to {limit}")
        before = state.filters.get(topic_filter)
        more = size - (filter_bytes(topic_filter, before) if before is not None else 0)
        if more > 0 and state.size + more > config.session_bytes_max:
            text = f"the session has too many filters; delivery.session_bytes_max is {config.session_bytes_max}"
            raise Refused(Reason.BUSY, text)
        total = self.table.bytes + self.unstored_bytes
        if more > 0 and total + more > config.sessions_bytes_max:
            text = f"all sessions take {total} bytes; delivery.sessions_bytes_max allows no more filters"
            raise Refused(Reason.BUSY, text)

    @property
    def data_bytes_max(self) -> int:
        """The maximum size of the data of one session."""
        return self.journal.note_bytes_max // 4

    def check_data(self, data: bytes, state: SessionState | None) -> None:
        """Raise `Refused` unless there is room for *data* in *state*, or in a new session if that is None."""
        limit, config = self.data_bytes_max, self._config
        if len(data) > limit:
            raise Refused(Reason.ILLEGAL, f"the data of a session has {len(data)} bytes; shorten it to {limit}")
        before, size = (state.data, state.size) if state is not None else (b"", 0)
        more = len(data) - len(before)
        if more > 0 and size + more > config.session_bytes_max:
            text = f"the session has {size} bytes; delivery.session_bytes_max is {config.session_bytes_max}"
            raise Refused(Reason.BUSY, f"{text}, which leaves no room for {len(data)} bytes of data")
        total = self.table.bytes + self.unstored_bytes
        if more > 0 and total + more > config.sessions_bytes_max:
            text = f"all sessions take {total} bytes; delivery.sessions_bytes_max allows no more data"
            raise Refused(Reason.BUSY, text)

    def note(self, state: SessionState, kind: int, *arguments: Any) -> None:
        """Note the next change of *state*; do not make the change if this raises `Refused`."""
        self._note(state.key, encode_note(kind, state.key, next_number(state.number), *arguments))

    def watch(self, key: str) -> None:
        """Record that session *key* has a note in the current commit; the client loses it if that fails."""
        self._noted[key] = None
        if not self._waits:
            self._waits = True
            self._undone = self._store.committer.undone
            self._store.before_commit.append(self._write)

    def changed(self, state: SessionState, *, is_ended: bool = False) -> None:
        """Record that notes in the current commit changed *state*; it counts until they are applied."""
        self.watch(state.key)
        session = self._live.get(state.key)
        if session is None:
            session = self._live[state.key] = Session(state, self)
        if is_ended:
            session.is_ended, session.lost = True, None

    def note_all(self, key: str, notes: Sequence[tuple[Journal, bytes]]) -> None:
        """Note changes of session *key*, which were encoded before. Raises `Refused`."""
        for _, note in notes:
            self._note(key, note)

    def _note(self, key: str, note: bytes) -> None:
        store = self._store
        if store.admission.refusal or store.flusher.failed is not None:
            store.admission.check()  # a note that is refused here loses nothing
        self.watch(key)
        try:
            self.journal.note(note)
        except (Refused, StoreError):
            self._expected = NEVER  # notes before this one may be lost
            raise

    def _write(self) -> None:
        """Write the collected notes; called by the commit."""
        self._waits = False
        self._unsure, self._noted = self._noted, {}
        expected, self._expected = self._expected, NEVER
        self.journal.write()
        if expected < NEVER and self._undone == self._store.committer.undone:
            self._expected = self._journal_end()

    def _journal_end(self) -> int:
        queue = self._store.find_queue(self.journal.topic, 0)
        return queue.next_offset if queue is not None else 0

    def find_lost(self) -> None:
        """After a failed commit, end the use of sessions whose notes it lost."""
        if self._waits or (self._expected < NEVER and self._undone == self._store.committer.undone):
            return
        if self._journal_end() >= self._expected:
            return
        self._expected = 0
        unsure, self._unsure = self._unsure, {}
        for key in unsure:
            self._lost(key, is_rolled=False)

    def leave(self, session: Session) -> None:
        """Detach the client of *session*."""
        if not self.has(session):
            return
        session.lost = None
        try:
            self._note_left(session)
        except (Refused, StoreError) as error:
            position = session.reached()
            session.where = lambda: position  # the client and its cursor are gone
            log.debug("a sweep will note that the client of session %r left; %s", session.name, error)

    def _note_left(self, session: Session) -> None:
        """Note that the client of *session* left, or end it if it expires at once. Raises `Refused`."""
        state = session._state
        if not state.expiry_s:
            self._end(state)
            return
        ends_ms = self._clock.now_ms() + state.expiry_s * 1000 if state.expiry_s > 0 else NEVER_MS
        changes = JointChanges(state, self)
        changes.leave(session.reached(), ends_ms)
        changes.store()

    def _end(self, state: SessionState) -> None:
        """End a session whose client is gone; its protocol stores the note of that. Raises `Refused`."""
        changes = JointChanges(state, self)
        changes.end()
        self.ending.get(state.key.partition(" ")[0], JointChanges.store)(changes)

    def end(self, session: Session) -> None:
        """End *session*. Raises `Refused`."""
        if self.has(session):
            self.note(session._state, ENDED)
            session._state.change(ENDED, ())
            session.is_ended, session.lost = True, None

    # the projection

    def _lost(self, key: str, *, is_rolled: bool) -> None:
        """Disconnect the client: notes of the session were lost, and the stored state is valid."""
        session = self._drop(key)
        if session is None:
            return
        if self._store.readable < self._store.written or not self.is_current():
            self._restored[key] = self._store.written
        if is_rolled:
            self._note_again(key)  # the existing records about it may be removed next
        if session.lost is not None:
            lost, session.lost = session.lost, None
            lost("a disk failure lost its last changes; connect again")

    def _left(self, key: str, number: int) -> None:
        """Drop the live session: the note that its client left is durable."""
        session = self._live.get(key)
        if session is not None and session.lost is None and session._state.number == number:
            self._drop(key)

    def _drop(self, key: str) -> Session | None:
        self._in_doubt.pop(key, None)
        return self._live.pop(key, None)

    def _note_again(self, key: str) -> None:
        session = self._live.get(key)
        state = session._state if session is not None else self.table.get(key)
        if state is not None and not (session is not None and session.is_ended):
            for note in encode_whole(state, self.journal.note_bytes_max):
                self.journal.note(note)

    # time

    async def run(self) -> None:
        """End expired sessions, until cancelled."""
        while True:
            try:
                await self._turns.finish(self.sweep())
            except (Refused, StoreError) as error:
                log.warning("expired sessions cannot be ended, retrying in %g s; %s", LOOK_S, error)
            await trio.sleep(LOOK_S)

    def sweep(self) -> Steps[None]:
        """End expired sessions and note the positions of connected clients, in slices.

        For a session whose client was connected when the broker was killed, the client counts as leaving now.
        """
        self.find_lost()
        for key in list(self._restored):
            self._is_settled(key)
        refused: Counter[str] = Counter()
        pace = Pace(LOOKS_A_SLICE)
        now_ms = self._clock.now_ms()
        allowed, overdue = self._overdue_allowed(), 0
        for key in self.table:
            ends_ms = self.table.ends_ms(key)
            if key not in self._live and 0 <= ends_ms <= now_ms:
                is_overdue = 0 < ends_ms <= now_ms - OVERDUE_MS
                overdue += is_overdue
                if not is_overdue or overdue <= allowed:
                    self._end_stored(key, refused)
                    pace.spend(LOOKS_A_NOTE)
            if pace.is_over():
                yield
        self._note_overdue(overdue - min(allowed, overdue))
        for key, session in list(self._live.items()):
            self._look_at(key, session, refused)
            if pace.is_over():
                yield
        for reason, count in refused.items():
            log.warning("%d sessions cannot be ended or moved on, retrying in %g s; %s", count, LOOK_S, reason)

    def _end_stored(self, key: str, refused: Counter[str]) -> None:
        """End a session that no client uses, or note that its client left if that is not stored."""
        self.find_lost()
        state = self.table.get(key) if self._is_settled(key) else None
        if state is None or key in self._live:
            return
        try:
            if state.ends_ms:
                self._end(state)
            else:
                self._note_left(Session(state, self))
        except Refused as error:
            refused[str(error)] += 1

    def _look_at(self, key: str, session: Session, refused: Counter[str]) -> None:
        """Note how far a client got, or that it left; drop a detached session whose last note was lost."""
        self.find_lost()
        if self._live.get(key) is not session:
            return  # it was noted in an earlier turn
        try:
            if session.lost is not None:
                position = session.reached()
                if position - session.position > DISTANCE_BYTES:
                    session.move(position)
            elif not (session.is_ended or session._state.ends_ms):
                self._note_left(session)  # it was refused when the client left
            elif key not in self._in_doubt:
                self._in_doubt[key] = self._store.appended
            elif self._in_doubt[key] <= self._store.readable and self.is_current():
                self._drop(key)
        except Refused as error:
            refused[str(error)] += 1

    def _overdue_allowed(self) -> int:
        """Return how many overdue sessions may end now."""
        if not self._overdue:
            return 0
        count = int((trio.current_time() - self._overdue_from) / self._overdue_pause_s)
        self._overdue_from += count * self._overdue_pause_s
        return count

    def _note_overdue(self, count: int) -> None:
        """Note that *count* sessions are overdue although every session is checked each minute.

        Either the wall clock jumped or the broker was stopped for a long time; the two cannot be told apart. So the
        sessions end one by one, as `Retention` removes segments.
        """
        if count and not self._overdue:
            log.warning(
                "%d sessions are overdue by more than an hour: the clock jumped ahead or the broker was stopped for "
                "long; ending them one by one; if the clock is wrong, set it right",
                count,
            )
            self._overdue_from = trio.current_time()
            self._overdue_pause_s = OVERDUE_S / count
        self._overdue = count

    def statistics(self) -> dict[str, object]:
        attached = sum(session.lost is not None for session in self._live.values())
        return {"sessions": len(self.table), "attached": attached, "bytes": self.table.bytes + self.unstored_bytes}
