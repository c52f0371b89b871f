"""All sessions: the state of clients that outlives their connections.

A session is identified by a protocol and a name, and belongs to an owner. It consists of filters, a position in the
log, and the ids of messages in flight; it never copies a message. While a client uses it, it is a `Session` object
(`session.py`), which changes immediately and notes every change in a journal (`journal_writer.py`). `state.py` applies
a note once it is durable, both live and during replay. So a client that reconnects, after any failure, finds its last
durable state. Each message is either acknowledged and before the position, or in flight, or still to be sent.

A failed commit loses its notes. The clients affected lose their sessions and return to the stored state: some messages
are sent again, none is lost. The notes of a session are numbered; after lost notes, only notes that do not depend on
earlier ones apply.
"""

from collections.abc import Callable
from typing import Final, final

from martlet.errors import Reason, Refused
from martlet.runtime.clock import Clock
from martlet.runtime.turns import Turns
from martlet.sessions.expiry import SessionExpiry
from martlet.sessions.journal_codec import ATTACHED, BEGIN, SessionState, encode_note, encode_whole, first_number
from martlet.sessions.journal_writer import SessionJournalWriter
from martlet.sessions.limits import SessionQuota
from martlet.sessions.missed_messages import MissedMessages
from martlet.sessions.session import JointChanges, LiveSessions, Session
from martlet.sessions.state import Passed, SessionTable
from martlet.settings import DeliveryConfig
from martlet.state.journal import Journal
from martlet.store import Store

__all__ = ["Sessions"]

NAME_BYTES_MAX: Final = 1024


@final
class Sessions:
    """All sessions of a broker."""

    def __init__(self, store: Store, journal: Journal, turns: Turns, clock: Clock, config: DeliveryConfig) -> None:
        self.journal = journal
        self.table = SessionTable(journal.topic)  # the stored state of all sessions
        self.table.on_lost = lambda key, is_rolled: self._disconnect(key, is_rolled=is_rolled)
        self.table.on_left = self._drop_live
        self.table.note_again = self._note_again
        self.writer = SessionJournalWriter(store, journal)
        self.writer.on_lost = lambda key: self._disconnect(key, is_rolled=False)
        self.quota = SessionQuota(self.table, journal.note_bytes_max, config)
        self.live = LiveSessions(self.writer, self.quota)  # the sessions in use
        self.missed = MissedMessages(store, self.table, self.live)
        self.table.find_passed = self.missed.find_passed
        self.expiry = SessionExpiry(self.live, self.table, store, turns, clock)
        self._sessions_max = config.sessions_max

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
            return Session(SessionState("", owner, position, expiry), self.live, is_stored=False), False
        if len(name.encode()) > NAME_BYTES_MAX:
            text = f"the name of a session has {len(name.encode())} bytes; shorten it to {NAME_BYTES_MAX}"
            raise Refused(Reason.ILLEGAL, text)
        writer = self.writer
        writer.find_lost()
        key = f"{protocol} {name}"
        if writer.restored and not writer.is_settled(key):
            text = f"a disk failure lost the last changes of session {name!r}; connect again"
            raise Refused(Reason.UNAVAILABLE, text)
        state, holder = self._find_session(key)
        is_ended = holder is not None and holder.is_ended
        if state is not None and not is_ended and self.expiry.is_over(state, holder):
            self.expiry.end(state)  # no sweep has seen that it expired
            is_ended = True
        if state is None or is_ended:
            return self._begin_session(key, owner, position, expiry, lost, state), False
        if state.owner != owner:
            raise Refused(Reason.NO_PERMISSION, f"session {name!r} belongs to somebody else; choose another name")
        reached = holder.reached() if holder is not None and holder.lost is not None else state.position
        writer.note(state, ATTACHED, reached, expiry)
        state.change(ATTACHED, (reached, expiry))
        session = self.live.by_key[key] = Session(state, self.live, lost)
        if holder is not None and holder.lost is not None:
            holder.lost("another connection uses the name")
        return session, True

    def find(self, protocol: str, name: str) -> tuple[SessionState | None, bool]:
        """Return the state of a session, None if there is none, and whether a client uses it; do not change it."""
        state, holder = self._find_session(f"{protocol} {name}")
        if holder is not None and holder.is_ended:
            return None, False
        return state, holder is not None and holder.lost is not None

    def position_of(self, key: str) -> int:
        """Return the log position before which session *key* has everything; -1 if there is no such session."""
        session = self.live.by_key.get(key)
        return session.reached() if session is not None and session.lost is None else self.table.position(key)[0]

    def changes_without_client(self, protocol: str, name: str) -> JointChanges | None:
        """Return changes of a session that no client uses, to be stored with messages; None if there is none."""
        state, has_client = self.find(protocol, name)
        return JointChanges(state, self.live) if state is not None and not has_client else None

    def is_settled(self, protocol: str, name: str) -> bool:
        """Return whether the state of a session is known; it is not for a moment after a failed commit."""
        writer = self.writer
        writer.find_lost()
        return not writer.restored or writer.is_settled(f"{protocol} {name}")

    async def wait_settled(self, protocol: str, name: str) -> None:
        """Wait until `is_settled`. Raises `StoreFailed`."""
        await self.writer.wait_settled(f"{protocol} {name}")

    def _find_session(self, key: str) -> tuple[SessionState | None, Session | None]:
        """Return the state of session *key*, and its live `Session` if there is one."""
        holder = self.live.by_key.get(key)
        return (self.table.get(key), None) if holder is None else (holder.state, holder)

    def _begin_session(
        self,
        key: str,
        owner: str,
        position: int,
        expiry_s: int,
        lost: Callable[[str], None],
        replaced: SessionState | None,
    ) -> Session:
        limit = self._sessions_max
        if replaced is None and len(self.table) >= limit:
            raise Refused(Reason.BUSY, f"{limit} sessions exist; delivery.sessions_max is {limit}")
        state = SessionState(key, owner, position, expiry_s)
        # If this note is lost, later notes must not seem to follow the last note of the previous session.
        state.number = first_number(replaced.number) if replaced is not None else 0
        self.writer.write(key, encode_note(BEGIN, key, state.number, owner, position, expiry_s))
        session = self.live.by_key[key] = Session(state, self.live, lost)
        return session

    # the projection

    def _disconnect(self, key: str, *, is_rolled: bool) -> None:
        """Disconnect the client: notes of the session were lost, and the stored state is valid."""
        session = self.live.by_key.pop(key, None)
        if session is None:
            return
        self.writer.restore(key)
        if is_rolled:
            self._note_again(key, None)  # the existing records about it may be removed next
        if session.lost is not None:
            lost, session.lost = session.lost, None
            lost("a disk failure lost its last changes; connect again")

    def _drop_live(self, key: str, number: int) -> None:
        """Drop the live session: the note that its client left is durable."""
        session = self.live.by_key.get(key)
        if session is not None and session.lost is None and session.state.number == number:
            del self.live.by_key[key]

    def _note_again(self, key: str, passed: Passed | None) -> None:
        session = self.live.by_key.get(key)
        state = session.state if session is not None else self.table.get(key)
        if state is not None and not (session is not None and session.is_ended):
            if passed is not None and passed[0] == state.position:
                state.passed = passed[1]
            for note in encode_whole(state, self.journal.note_bytes_max):
                self.journal.note(note)

    def statistics(self) -> dict[str, object]:
        attached = sum(session.lost is not None for session in self.live.by_key.values())
        return {"sessions": len(self.table), "attached": attached, "bytes": self.quota.total_bytes}
