"""A session while its client is connected, and the changes made to it.

Every change applies immediately and is noted. So a `Session` may be ahead of the stored state until its notes are
durable, and is dropped if they are lost. `LiveSessions` has all sessions that may be ahead.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

from martlet.errors import Reason, Refused
from martlet.runtime.checksum import crc32
from martlet.sessions.journal_codec import (
    ACKNOWLEDGED,
    ATTACHED,
    DATA,
    ENDED,
    FILTER,
    HELD,
    INDEPENDENT,
    LEFT,
    MOVED,
    NO_FILTER,
    PROGRESS,
    SENT,
    SessionState,
    encode_note,
    encode_sent,
    next_number,
)
from martlet.sessions.journal_writer import SessionJournalWriter
from martlet.sessions.limits import SessionQuota
from martlet.state.journal import NEXT_COMMIT, Journal

__all__ = ["JointChanges", "LiveSessions", "Session"]

# The maximum number of messages in flight that one note adds.
SENT_A_NOTE: Final = 4096


@final
class Session:
    """A session while its client is connected; made by `Gate.open_session`.

    Every change is stored with the commit of this round: pass ``until`` to `Peer.hold_until` before an answer that
    confirms a change. ``where`` returns the log position before which the client has every matching message; set it to
    the position of the client's cursor. When another connection opens the session, this object no longer changes it.
    """

    __slots__ = ("_counted", "_live", "_quota", "doubted_at", "is_ended", "lost", "state", "where")

    def __init__(
        self,
        state: SessionState,
        live: "LiveSessions",
        lost: Callable[[str], None] | None = None,
        *,
        is_stored: bool = True,
    ) -> None:
        self.state = state  # only `martlet.delivery` may use it
        self.doubted_at = -1  # the end of the log when a sweep found it detached
        self._quota = live.quota
        self._live = live if is_stored else None
        self._counted = 0  # bytes of filters in `SessionQuota.unstored_bytes`
        self.lost = lost  # None once the client is gone
        self.is_ended = False
        self.where: Callable[[], int] = lambda: state.position

    # queries

    @property
    def name(self) -> str:
        """The name with which the client opened it; empty if it is not stored."""
        return self.state.key.partition(" ")[2]

    @property
    def owner(self) -> str:
        """The name of the identity that owns it."""
        return self.state.owner

    @property
    def is_stored(self) -> bool:
        """Whether the session outlives its connection."""
        return self._live is not None

    @property
    def until(self) -> int:
        """The position for `Peer.hold_until` at which every change so far is durable."""
        return NEXT_COMMIT if self._live is not None else 0

    @property
    def filters(self) -> Mapping[str, bytes]:
        """The client's filters, each with its protocol-specific options."""
        return self.state.filters

    @property
    def begins(self) -> Mapping[str, int]:
        """The begins of filters that `subscribe` set, until the session has passed the last of them."""
        return self.state.begins

    @property
    def position(self) -> int:
        """The log position before which every matching message was sent."""
        return self.state.position

    @property
    def flight(self) -> Mapping[int, int]:
        """The ids in flight, each with the log position of its message, or `NO_MESSAGE`."""
        return self.state.flight

    @property
    def expiry_s(self) -> int:
        """Seconds for which it stays after its client left; -1 if it never ends."""
        return self.state.expiry_s

    @property
    def next_id(self) -> int:
        """The id after the last one used."""
        return self.state.next_id

    @property
    def start(self) -> int:
        """The log position of the oldest message that the client may still need."""
        return self.state.start

    @property
    def data(self) -> bytes:
        """Data of the protocol, stored by `keep`."""
        return self.state.data

    # changes

    def subscribe(self, topic_filter: str, options: bytes = b"", begin: int = 0) -> None:
        """Add a filter or change its options; it applies to messages from ``where()`` on.

        To begin a filter with messages published from now on, also if the session is behind, pass `Feed.end_position`
        as *begin*: ``begins`` has that position until the session has passed it, and `Cursor.add_filter` takes it when
        the client returns. A filter that is changed keeps its begin, unless *begin* replaces it.

        Raises:
          Refused: it is too long, the filters take too many bytes, or the store accepts no writes; nothing is changed.
        """
        self._put_filter(FILTER, topic_filter, options, *((begin,) if begin else ()))

    def record_progress(self, topic_filter: str, options: bytes) -> None:
        """Change the options of a filter, which contain the number of its messages handed out.

        If a power failure loses an earlier change, perhaps a `hand_out`, it loses this one too, so the messages are
        sent again. Options set with `subscribe` do not depend on earlier changes.

        Raises:
          Refused: as for `subscribe`; nothing is changed.
        """
        self._put_filter(PROGRESS, topic_filter, options)

    def _put_filter(self, kind: int, topic_filter: str, options: bytes, *begin: int) -> None:
        self._quota.check_filter(self.state, topic_filter, options)
        self._change(kind, topic_filter, options, self.reached(), *begin)
        self._count_filters()

    def unsubscribe(self, topic_filter: str) -> None:
        """Remove a filter. Raises `Refused`."""
        if topic_filter in self.state.filters:
            self._change(NO_FILTER, topic_filter)
            self._count_filters()

    def _count_filters(self) -> None:
        """Add the size of an unstored session to that of all sessions."""
        if self._live is None:
            self._count(self.state.size if self.state.filters else 0)

    def _count(self, size: int) -> None:
        self._quota.unstored_bytes += size - self._counted
        self._counted = size

    def hand_out(self, first: int, positions: Sequence[int], end: int) -> None:
        """Note that messages at *positions* are sent with ids from *first* on; the next message is at *end* or later.

        The protocol chooses ids that are not in flight. Call `Peer.hold_until` before you send the messages; otherwise
        an acknowledgement after a crash could be applied to another message. Raises `Refused`.
        """
        for start in range(0, len(positions), SENT_A_NOTE):
            stop = start + SENT_A_NOTE
            part_end = positions[stop] if stop < len(positions) else end
            self._change(SENT, *encode_sent(first + start, positions[start:stop], part_end))

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
        if self._live is not None and not self._live.has(self):
            raise Refused(Reason.NOT_FOUND, f"another connection has session {self.name!r}")
        return JointChanges(self.state, self._live)

    def move(self, position: int) -> None:
        """Advance to *position*: earlier messages are no longer needed. Raises `Refused`."""
        self._change(MOVED, position)

    def keep(self, data: bytes) -> None:
        """Store *data*, a few bytes for the protocol itself. Raises `Refused`."""
        if data != self.state.data:
            if self._live is not None:
                self._quota.check_data(data, self.state)
            self._change(DATA, data, crc32(self.state.data))

    def expire_after(self, expiry_s: int | None) -> None:
        """Make the session expire *expiry_s* after its client leaves; None means never. Raises `Refused`."""
        self._change(ATTACHED, self.reached(), -1 if expiry_s is None else expiry_s)

    def leave(self) -> None:
        """Detach the client; the session stays until it expires. Call this in `Handler.closed`."""
        self._count(0)
        if self._live is not None:
            self._live.leave(self)

    def end(self) -> None:
        """End the session. Raises `Refused`."""
        if self._live is not None:
            self._live.end(self)

    def reached(self) -> int:
        """Return the log position before which the client has every matching message."""
        return max(self.state.position, self.where())

    def _change(self, kind: int, *arguments: Any) -> None:
        if self._live is not None:
            if not self._live.has(self):
                return
            self._live.writer.note(self.state, kind, *arguments)
        self.state.change(kind, arguments)


@final
class JointChanges:
    """Changes of a session that are stored in an atomic group with messages; made by `Session.changes`.

    Pass ``notes`` to `Gate.publish_all`, and call `apply` right after that; without messages, call `store`.
    """

    __slots__ = ("_changes", "_live", "_number", "_state", "notes")

    def __init__(self, state: SessionState, live: "LiveSessions | None") -> None:
        self._state = state
        self._live = live
        self._number = state.number
        self._changes: list[tuple[int, tuple[Any, ...]]] = []
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
        if self._live is not None:
            self._live.quota.check_data(data, self._state)
        self._add(DATA, data, crc32(self._state.data))

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
        self._changes.append((kind, arguments))
        if self._live is not None:
            note = encode_note(kind | INDEPENDENT, self._state.key, self._number, *arguments)
            self.notes.append((self._live.writer.journal, note))

    def apply(self) -> None:
        """Apply the changes, whose notes were published."""
        for kind, arguments in self._changes:
            self._state.change(kind, arguments)
        if self._live is not None:
            self._live.changed(self._state, is_ended=self._changes[-1][0] == ENDED)

    def store(self) -> None:
        """Store the changes without messages, and apply them. Raises `Refused`."""
        if self._live is not None:
            self._live.writer.write_all(self._state.key, self.notes)
        self.apply()


@final
class LiveSessions:
    """The sessions with a client, and sessions whose last note is not durable yet; ``by_key`` has them.

    ``leave`` detaches the client of a session; `SessionExpiry` sets it.
    """

    def __init__(self, writer: SessionJournalWriter, quota: SessionQuota) -> None:
        self.by_key: dict[str, Session] = {}
        self.writer = writer
        self.quota = quota
        self.leave: Callable[[Session], None] = lambda session: None

    def has(self, session: Session) -> bool:
        """Return whether the client still has *session*."""
        self.writer.find_lost()
        return session.lost is not None and self.by_key.get(session.state.key) is session

    def changed(self, state: SessionState, *, is_ended: bool = False) -> None:
        """Record that notes in the current commit changed *state*; the record lasts until they are applied."""
        self.writer.watch(state.key)
        session = self.by_key.get(state.key)
        if session is None:
            session = self.by_key[state.key] = Session(state, self)
        if is_ended:
            session.is_ended, session.lost = True, None

    def end(self, session: Session) -> None:
        """End *session*. Raises `Refused`."""
        if self.has(session):
            self.writer.note(session.state, ENDED)
            session.state.change(ENDED, ())
            session.is_ended, session.lost = True, None
