"""Sessions: what a client's name stands for, and what outlives its connection.

A session belongs to a protocol, a name and an owner. It is its filters, a position in the log, and the ids of messages
that are in flight; it never copies a message. While a client has it, it is a `Session`, which changes at once and has
every change noted in a journal. What is noted is stored (`session_state.py`) once the note is durable, live and in each
replay. So a client that comes back, after whatever happened, finds what was durable, and a message is either before the
position and acknowledged, or in flight, or yet to come.

When a commit fails its notes are lost, and the clients that they were about lose their sessions: they return to what is
stored, so that some messages come again and none is lost. Notes of a session are numbered: one that does not follow the
note before is ignored.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
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
from martlet.store import Store
from martlet.turns import Pace, Steps, Turns

__all__ = ["Session", "Sessions"]

log = logging.getLogger("martlet.sessions")

NAME_BYTES_MAX: Final = 1024
# Between two looks at all sessions.
LOOK_S: Final = 60.0
OVERDUE_MS: Final = 3_600_000
# Sessions that are overdue go one by one, all of them within this time.
OVERDUE_S: Final = 86_400.0
# A session whose client wants little would read much again after a crash, unless its position is noted now and then.
DISTANCE_BYTES: Final = 64 << 20
# Sessions that a slice of a sweep looks at, and how many of them take as long as one that is noted.
LOOKS_A_SLICE: Final = 2000
LOOKS_A_NOTE: Final = 40
# Messages in flight that one note adds.
SENT_A_NOTE: Final = 4096
# After every offset of the journal.
NEVER: Final = 1 << 62


@final
class Session:
    """A session while its client is connected; made by `Gate.open_session`.

    Every change is stored with the commit of this round: pass ``until`` to `Peer.hold_until` before an answer that
    says so. ``where`` returns the log position before which the client has everything it wants; set it to that of the
    client's cursor. A client that lost the session, by `open_session` on another connection, changes nothing any more.
    """

    __slots__ = ("_sessions", "_state", "is_ended", "lost", "where")

    def __init__(
        self, state: SessionState, sessions: "Sessions | None", lost: Callable[[str], None] | None = None
    ) -> None:
        self._state = state
        self._sessions = sessions  # None where nothing is stored
        self.lost = lost  # None once the client is gone
        self.is_ended = False
        self.where: Callable[[], int] = lambda: state.position

    # what is known

    @property
    def name(self) -> str:
        return self._state.key.partition(" ")[2]

    @property
    def owner(self) -> str:
        return self._state.owner

    @property
    def is_stored(self) -> bool:
        """Whether it outlives its connection."""
        return self._sessions is not None

    @property
    def until(self) -> int:
        """By when every change so far is durable, for `Peer.hold_until`."""
        return NEXT_COMMIT if self._sessions is not None else 0

    @property
    def filters(self) -> Mapping[str, bytes]:
        """What the client subscribed to, each with the options of the protocol."""
        return self._state.filters

    @property
    def position(self) -> int:
        """The log position before which messages were sent, or are not wanted."""
        return self._state.position

    @property
    def flight(self) -> Mapping[int, int]:
        """The ids in flight, each with the log position of its message, `NO_MESSAGE` for none."""
        return self._state.flight

    @property
    def next_id(self) -> int:
        """One more than the id that was used last."""
        return self._state.next_id

    @property
    def start(self) -> int:
        """The log position of the oldest message that the client may still need."""
        return self._state.start

    @property
    def data(self) -> bytes:
        """The protocol's own."""
        return self._state.data

    # what changes

    def subscribe(self, topic_filter: str, options: bytes = b"") -> None:
        """Add a filter, or change its options; messages before ``where()`` do not come for it.

        Raises:
          Refused: it is too long, all filters take too many bytes, or the store takes no writes; nothing is changed.
        """
        if self._sessions is not None:
            self._sessions.check_room(self._state, topic_filter, options)
        self._change(FILTER, topic_filter, options, self.reached())

    def unsubscribe(self, topic_filter: str) -> None:
        """Remove a filter. Raises `Refused`."""
        if topic_filter in self._state.filters:
            self._change(NO_FILTER, topic_filter)

    def hand_out(self, first: int, positions: Sequence[int], end: int) -> None:
        """Messages at *positions* leave under the ids from *first* on; the next that may come is at *end* or later.

        Ids are numbers of the protocol that are not in flight. Call `Peer.hold_until` before the messages leave: else
        an acknowledgement after a crash could be taken for that of another message. Raises `Refused`.
        """
        for at in range(0, len(positions), SENT_A_NOTE):
            part = positions[at : at + SENT_A_NOTE]
            last = at + len(part) == len(positions)
            self._change(SENT, *encode_sent(first + at, part, end if last else positions[at + len(part)]))

    def acknowledge(self, first: int, count: int = 1) -> None:
        """*count* ids from *first* on are free again. Raises `Refused`."""
        self._change(ACKNOWLEDGED, first, count)

    def acknowledgement(self, first: int, count: int = 1) -> tuple[Journal, bytes]:
        """Return what `Gate.publish_atomic` takes to acknowledge ids together with messages.

        Call `acknowledged` at once when that has stored them. Raises `Refused` (NOT_FOUND) where nothing is stored.
        """
        if self._sessions is None or not self._sessions.has(self):
            raise Refused(Reason.NOT_FOUND, f"session {self.name!r} is not stored, or another connection has it")
        state = self._state
        note = encode_note(ACKNOWLEDGED, state.key, next_number(state.number), first, count)
        return self._sessions.journal, note

    def acknowledged(self, first: int, count: int = 1) -> None:
        """An `acknowledgement` was stored."""
        if self._sessions is not None:
            self._sessions.watch(self._state.key)
        self._state.change(ACKNOWLEDGED, (first, count))

    def move(self, position: int) -> None:
        """Messages before *position* are not needed any more. Raises `Refused`."""
        self._change(MOVED, position)

    def keep(self, data: bytes) -> None:
        """Store *data*, a few bytes of the protocol's own. Raises `Refused`."""
        if self._sessions is not None:
            self._sessions.check_data(data)
        if data != self._state.data:
            self._change(DATA, data)

    def expire_after(self, expiry_s: int | None) -> None:
        """Let the session end *expiry_s* after its client left; never for None. Raises `Refused`."""
        self._change(ATTACHED, self.reached(), -1 if expiry_s is None else expiry_s)

    def leave(self) -> None:
        """The client is gone; the session stays until it expires. Call it in `Handler.closed`."""
        if self._sessions is not None:
            self._sessions.leave(self)

    def end(self) -> None:
        """End the session. Raises `Refused`."""
        if self._sessions is not None:
            self._sessions.end(self)

    def reached(self) -> int:
        """The log position before which the client has everything."""
        return max(self._state.position, self.where())

    def _change(self, kind: int, *arguments: Any) -> None:
        if self._sessions is not None:
            if not self._sessions.has(self):
                return
            self._sessions.note(self._state, kind, *arguments)
        self._state.change(kind, arguments)


@final
class Sessions:
    """All sessions of a broker; `run` ends those that expired."""

    def __init__(self, store: Store, journal: Journal, turns: Turns, clock: Clock, config: DeliveryConfig) -> None:
        self.journal = journal
        self.table = SessionTable(journal.topic)
        self.table.on_lost = lambda key, is_rolled: self._lost(key, is_rolled=is_rolled)
        self.table.on_left = self._left
        self.table.note_again = self._note_again
        self._store = store
        self._turns = turns
        self._clock = clock
        self._config = config
        # The sessions of clients, and those whose last note is not durable yet.
        self._live: dict[str, Session] = {}
        # Those with a note in the commit under way, and in the commit before.
        self._noted: dict[str, None] = {}
        self._unsure: dict[str, None] = {}
        self._waits = False
        # The offset that the journal reached with the commit before; less if that failed.
        self._expected = 0
        # Sessions without a client that a sweep met, with where the log ended then.
        self._in_doubt: dict[str, int] = {}
        self._overdue = 0
        # When the last overdue session ended, or the first was noticed, and the pause between two.
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
        """Give a client the session *name* of *protocol*; return it, and whether it existed before.

        Args:
          protocol: whose names these are: one word.
          owner: the name of the identity that it belongs to.
          name: any text; empty for a session that ends with its connection, of which nothing is stored.
          position: where a new one begins in the log.
          lost: is called with the reason when the client loses it: to another connection, or by a disk failure.
          expiry_s: it ends so long after its client left; never for None.

        Raises:
          Refused: the name is too long, the session belongs to another owner, there are too many sessions, or the
            store takes no writes.
        """
        expiry = -1 if expiry_s is None else expiry_s
        if " " in protocol:
            raise ValueError(f"protocol {protocol!r} has a space; name it by one word")
        if not name:
            return Session(SessionState("", owner, position, expiry), None), False
        if len(name.encode()) > NAME_BYTES_MAX:
            text = f"the name of a session has {len(name.encode())} bytes; shorten it to {NAME_BYTES_MAX}"
            raise Refused(Reason.ILLEGAL, text)
        self.find_lost()
        key = f"{protocol} {name}"
        before, holder = self._find(key)
        if before is None or (holder is not None and holder.is_ended) or self._is_over(before):
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

    def _find(self, key: str) -> tuple[SessionState | None, Session | None]:
        """What there is of session *key*, and who has it or had it last."""
        holder = self._live.get(key)
        return (self.table.get(key), None) if holder is None else (holder._state, holder)

    def _is_over(self, state: SessionState) -> bool:
        """Whether a session ended; not one that is so late that a clock may have jumped."""
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
        # If this note is lost those after it must not follow the last one of the session before.
        state.number = next_number(next_number(before.number)) if before is not None else 0
        self._note(key, encode_note(BEGIN, key, state.number, owner, position, expiry_s))
        session = self._live[key] = Session(state, self, lost)
        return session

    def has(self, session: Session) -> bool:
        """Whether its client has *session* still."""
        self.find_lost()
        return session.lost is not None and self._live.get(session._state.key) is session

    def check_room(self, state: SessionState, topic_filter: str, options: bytes) -> None:
        """Raise `Refused` unless *state* may have this filter too."""
        size, config, limit = filter_bytes(topic_filter, options), self._config, self.journal.note_bytes_max // 2
        if size > limit:
            raise Refused(Reason.ILLEGAL, f"a filter of {size} bytes is too long; the most is {limit}")
        before = state.filters.get(topic_filter)
        more = size - (filter_bytes(topic_filter, before) if before is not None else 0)
        if more > 0 and state.size + more > config.session_bytes_max:
            text = f"the filters of the session are too many; delivery.session_bytes_max is {config.session_bytes_max}"
            raise Refused(Reason.BUSY, text)
        if more > 0 and self.table.bytes + more > config.sessions_bytes_max:
            text = f"all sessions take {self.table.bytes} bytes; delivery.sessions_bytes_max allows no more filters"
            raise Refused(Reason.BUSY, text)

    def check_data(self, data: bytes) -> None:
        """Raise `Refused` unless *data* may be stored."""
        limit = self.journal.note_bytes_max // 4
        if len(data) > limit:
            raise Refused(Reason.ILLEGAL, f"data of a session of {len(data)} bytes is too long; the most is {limit}")

    def note(self, state: SessionState, kind: int, *arguments: Any) -> None:
        """Note a change of *state* that comes next. Raises `Refused`, and the change must not be made."""
        self._note(state.key, encode_note(kind, state.key, next_number(state.number), *arguments))

    def watch(self, key: str) -> None:
        """Session *key* has a note in the commit under way, and is lost if that fails."""
        self._noted[key] = None
        if not self._waits:
            self._waits = True
            self._store.before_commit.append(self._write)

    def _note(self, key: str, note: bytes) -> None:
        self.watch(key)
        try:
            self.journal.note(note)
        except (Refused, StoreError):
            self._expected = NEVER  # notes before this one may be lost
            raise

    def _write(self) -> None:
        """Write what was noted; the commit under way calls it."""
        self._waits = False
        self._unsure, self._noted = self._noted, {}
        expected, self._expected = self._expected, NEVER
        self.journal.write()
        if expected < NEVER:
            self._expected = self._journal_end()

    def _journal_end(self) -> int:
        queue = self._store.find_queue(self.journal.topic, 0)
        return queue.next_offset if queue is not None else 0

    def find_lost(self) -> None:
        """Take their sessions from the clients whose notes were in a commit that failed."""
        if self._waits or self._journal_end() >= self._expected:
            return
        self._expected = 0
        unsure, self._unsure = self._unsure, {}
        for key in unsure:
            self._lost(key, is_rolled=False)

    def leave(self, session: Session) -> None:
        """The client of *session* is gone."""
        if not self.has(session):
            return
        state = session._state
        if not state.expiry_s:
            self.end(session)
            return
        ends_ms = self._clock.now_ms() + state.expiry_s * 1000 if state.expiry_s > 0 else NEVER_MS
        arguments = session.reached(), ends_ms
        session.lost = None
        try:
            self.note(state, LEFT, *arguments)
        except (Refused, StoreError):
            self._drop(state.key)  # what is stored counts; a sweep will say that the client left
            return
        state.change(LEFT, arguments)

    def end(self, session: Session) -> None:
        """End *session*. Raises `Refused`."""
        if self.has(session):
            self.note(session._state, ENDED)
            session._state.change(ENDED, ())
            session.is_ended, session.lost = True, None

    # the projection

    def _lost(self, key: str, *, is_rolled: bool) -> None:
        """Notes of the session were lost: what is stored counts."""
        session = self._drop(key)
        if session is None:
            return
        if is_rolled:
            self._note_again(key)  # the records about it that there are may be removed next
        if session.lost is not None:
            lost, session.lost = session.lost, None
            lost("a disk failure lost its last changes; connect again")

    def _left(self, key: str, number: int) -> None:
        """That the client left is stored."""
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
        """End sessions that expired, until cancelled."""
        while True:
            try:
                await self._turns.finish(self.sweep())
            except (Refused, StoreError) as error:
                log.warning("expired sessions cannot be ended, again in %g s; %s", LOOK_S, error)
            await trio.sleep(LOOK_S)

    def sweep(self) -> Steps[None]:
        """End sessions that expired, and note where those of connected clients are, in slices.

        A session whose client was connected when the broker was killed counts as left now.
        """
        self.find_lost()
        pace = Pace(LOOKS_A_SLICE)
        now_ms = self._clock.now_ms()
        allowed, overdue = self._overdue_allowed(), 0
        for key in self.table:
            ends_ms = self.table.ends_ms(key)
            if key not in self._live and 0 <= ends_ms <= now_ms:
                is_overdue = 0 < ends_ms <= now_ms - OVERDUE_MS
                overdue += is_overdue
                if not is_overdue or overdue <= allowed:
                    self._end_stored(key, ends_ms == 0)
                    pace.spend(LOOKS_A_NOTE)
            if pace.is_over():
                yield
        self._note_overdue(overdue - min(allowed, overdue))
        for key, session in list(self._live.items()):
            self._look_at(key, session)
            if pace.is_over():
                yield

    def _end_stored(self, key: str, has_client: bool) -> None:
        """End a session that nobody has, or note that its client left."""
        state = self.table.get(key)
        if state is None:
            return
        session = Session(state, self, _nobody)
        if has_client:
            self._live[key] = session
            self.leave(session)
        else:
            self.note(state, ENDED)

    def _look_at(self, key: str, session: Session) -> None:
        """Note where a client is that wanted little of what came; drop a session whose last notes were lost."""
        if session.lost is not None:
            position = session.reached()
            if position - session.position > DISTANCE_BYTES:
                session.move(position)
        elif key not in self._in_doubt:
            self._in_doubt[key] = self._store.appended
        elif self._in_doubt[key] <= self._store.readable:
            self._drop(key)

    def _overdue_allowed(self) -> int:
        """How many of the overdue sessions may end now."""
        if not self._overdue:
            return 0
        count = int((trio.current_time() - self._overdue_from) / self._overdue_pause_s)
        self._overdue_from += count * self._overdue_pause_s
        return count

    def _note_overdue(self, count: int) -> None:
        """So many sessions are overdue, though each is looked at every minute.

        The wall clock jumped or the broker was stopped for long, and nothing here can tell which. So they end one by
        one, as `Retention` does with segments.
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
        return {"sessions": len(self.table), "attached": attached, "bytes": self.table.bytes}


def _nobody(reason: str) -> None:
    """The client of an earlier run."""
