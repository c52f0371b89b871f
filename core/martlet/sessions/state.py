"""The durable state of sessions: a projection over notes in a journal.

`session.py` changes the session of a connected client immediately and notes each change. `SessionTable` applies the
notes when they are readable, and is the only state that remains after a restart. A session without a client is stored
packed, in about a hundred bytes; a session with a client is an object.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

from martlet.records.layout import RecordView
from martlet.runtime.checksum import crc32
from martlet.runtime.steps import Budget, Steps
from martlet.sessions.journal_codec import (
    BEGIN,
    ENDED,
    INDEPENDENT,
    LEFT,
    MORE,
    WHOLE,
    SessionState,
    decode_note,
    moved,
    next_number,
    notes_lost,
    packed_head,
    packed_position,
)
from martlet.state.journal import read_notes
from martlet.state.projection import NOTHING
from martlet.state.rows import pack_rows, unpack_rows

__all__ = ["Passed", "SessionTable"]

FORMAT: Final = 1
# Copying one dict of 100,000 sessions takes 3 ms. So a snapshot shares the shards, about 100 sessions each, and a shard
# is copied before it changes.
SHARDS: Final = 1024
# Cost of checking a session in `roll`; noting one again costs as much as checking SKIPPED_A_NOTE of them.
SKIP_US: Final = 0.5
SKIPPED_A_NOTE: Final = 40

StoredState: TypeAlias = SessionState | bytes
# A position, and the numbers of messages before it (``passed``).
Passed: TypeAlias = tuple[int, Mapping[str, int]]


@final
class SessionTable:
    """The projection of session notes (martlet.state.Projection), by key.

    ``on_lost`` is called with the key of a session whose notes were lost, and whether `roll` wrote the note after them.
    ``on_left`` is called with the key and the number of the note when a client left or ended its session. Before
    records are removed, ``find_passed`` (`MissedMessages.find_passed`) is called, and then ``note_again`` notes the
    complete state of each session, with its result from ``find_passed``.
    """

    name = "sessions"

    def __init__(self, topic: str) -> None:
        self.topics = frozenset((topic,))
        self.on_lost: Callable[[str, bool], None] | None = None
        self.on_left: Callable[[str, int], None] | None = None
        self.find_passed: Callable[[int, int], Steps[Mapping[str, Passed]]] | None = None
        self.note_again: Callable[[str, Passed | None], None] | None = None
        self.bytes = 0
        self._shards: list[dict[str, StoredState]] = [{} for _ in range(SHARDS)]
        self._shared: set[int] = set()  # shards shared with a snapshot: copied before they change
        self._count = 0
        self._counts: Counter[str] = Counter()  # number of sessions by protocol
        self._edition = 0
        # The last session without a client that was read: connecting a client reads its session several times.
        self._unpacked: tuple[bytes, SessionState] | None = None
        # No session needs a record before this position.
        self._oldest = NOTHING

    def __len__(self) -> int:
        return self._count

    def count_of(self, protocol: str) -> int:
        """Return the number of sessions of *protocol*."""
        return self._counts[protocol]

    def __iter__(self) -> Iterator[str]:
        """Yield the keys of all sessions; a session added or removed during the iteration may be included or not."""
        for number in range(SHARDS):
            yield from list(self._shards[number])

    def get(self, key: str) -> SessionState | None:
        """Return a copy of the stored state of session *key*."""
        stored = self._find_stored(key)
        if isinstance(stored, bytes):
            return self._unpack(key, stored)
        return stored.copy() if stored is not None else None

    def _unpack(self, key: str, packed: bytes) -> SessionState:
        if self._unpacked is None or self._unpacked[0] is not packed:
            self._unpacked = packed, SessionState.unpack(key, packed)
        return self._unpacked[1].copy()

    def ends_ms(self, key: str) -> int:
        """Return when session *key* ends; 0 if a client uses it (or did when the broker was killed), -1 if unknown."""
        stored = self._find_stored(key)
        if stored is None:
            return -1
        return packed_head(stored)[1] if isinstance(stored, bytes) else stored.ends_ms

    def position(self, key: str) -> tuple[int, bool]:
        """Return ``position`` of session *key*, -1 if there is none, and whether ``passed`` is filled."""
        stored = self._find_stored(key)
        if stored is None:
            return -1, False
        return packed_position(stored) if isinstance(stored, bytes) else (stored.position, bool(stored.passed))

    # the projection

    def apply(self, records: Sequence[RecordView]) -> None:
        for record in records:
            for note in read_notes(record.body):
                kind, key, number, arguments = decode_note(note)
                self._apply(kind, key, number, arguments, record.position)

    def _apply(self, kind: int, key: str, number: int, arguments: list[Any], position: int) -> None:
        stored = self._find_stored(key)
        if kind == BEGIN:
            state = SessionState(key, *arguments)
            state.number = number
            self._add(state, position)
        elif kind in (WHOLE, MORE):
            self._apply_whole(kind, key, number, arguments, position)
        else:
            lost = notes_lost(_number_of(stored), number) if stored is not None else -1
            if stored is not None and (not lost or (lost > 0 and kind & INDEPENDENT)):
                self._change(key, stored, kind & ~INDEPENDENT, arguments, lost)
            if lost:
                self._report_lost(key, is_rolled=False)

    def _change(self, key: str, stored: StoredState, kind: int, arguments: list[Any], lost: int) -> None:
        if kind == ENDED:
            del self._shard_to_change(key)[key]
            self._count -= 1
            self._counts[_protocol_of(key)] -= 1
            self.bytes -= _size_of(stored)
            self._report_left(key, next_number(_number_of(stored)))
            return
        state = self._make_changeable(key, stored)
        size_before = state.size
        if lost:
            state.change_after_gap(kind, arguments)
        else:
            state.change(kind, arguments)
        self.bytes += state.size - size_before
        if kind == LEFT:
            self._put(key, state.pack(), state)
            self._report_left(key, state.number)

    def _report_left(self, key: str, number: int) -> None:
        if self.on_left is not None:
            self.on_left(key, number)

    def _report_lost(self, key: str, *, is_rolled: bool) -> None:
        if self.on_lost is not None:
            self.on_lost(key, is_rolled)

    def _apply_whole(self, kind: int, key: str, number: int, arguments: list[Any], position: int) -> None:
        """Apply a complete state; for a known session only ``since``, as older records may go, and ``passed``."""
        stored = self._find_stored(key)
        if stored is None and kind == WHOLE:
            state = SessionState.of(key, number, arguments[0], arguments[1:])
            state.add(*arguments[6:8], *arguments[9:])
            state.passed = _passed_in(arguments) or state.passed
            self._add(state, position)
        elif stored is None or number != _number_of(stored):
            self._report_lost(key, is_rolled=stored is not None and kind == WHOLE)
        elif kind == MORE:
            state = self._make_changeable(key, stored)
            size_before = state.size
            state.add(*arguments)
            self.bytes += state.size - size_before
            self._pack_if_detached(state)
        elif isinstance(stored, bytes) and not _passed_in(arguments):
            self._shard_to_change(key)[key] = moved(stored, position)
        else:
            state = self._make_changeable(key, stored)
            state.since = position
            state.passed = _passed_in(arguments) or state.passed
            self._pack_if_detached(state)

    def _add(self, state: SessionState, position: int) -> None:
        """Add a session, replacing any with the same key."""
        state.since, state.edition = position, self._edition
        self._oldest = min(self._oldest, position, state.position)
        self._put(state.key, state, self._find_stored(state.key))
        self._pack_if_detached(state)

    def _pack_if_detached(self, state: SessionState) -> None:
        if state.ends_ms:
            self._put(state.key, state.pack(), state)

    def _put(self, key: str, stored: StoredState, replaced: StoredState | None) -> None:
        self.bytes += _size_of(stored) - (_size_of(replaced) if replaced is not None else 0)
        self._count += replaced is None
        self._counts[_protocol_of(key)] += replaced is None
        self._shard_to_change(key)[key] = stored

    def _find_stored(self, key: str) -> StoredState | None:
        return self._shards[_shard_of(key)].get(key)

    def _shard_to_change(self, key: str) -> dict[str, StoredState]:
        number = _shard_of(key)
        if number in self._shared:
            self._shared.discard(number)
            self._shards[number] = self._shards[number].copy()
        return self._shards[number]

    def _make_changeable(self, key: str, stored: StoredState) -> SessionState:
        """Return a state of *key* that may be changed, because no unfinished snapshot uses it."""
        if isinstance(stored, bytes):
            state = self._unpack(key, stored)
            self._unpacked = None
        elif stored.edition != self._edition:
            state = stored.copy()
        else:
            return stored
        state.edition = self._edition
        self._put(key, state, stored)
        return state

    def freeze(self) -> Steps[list[bytes]]:
        self._edition += 1
        self._shared = set(range(SHARDS))
        return pack_rows(FORMAT, _make_rows(self._shards.copy()))

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        self._shards, self._shared = [{} for _ in range(SHARDS)], set()
        self._count, self.bytes, self._oldest = 0, 0, NOTHING
        self._counts.clear()
        budget = Budget()
        for key, packed in unpack_rows(FORMAT, data):
            if packed_head(packed)[0] >= first_position:
                self._oldest = first_position  # some sessions may have a position before their last complete note
                self._put(key, packed, None)
            if budget.is_over():
                yield

    def forget(self, topic: str) -> None:
        """Do nothing: journals are never deleted."""

    def floor(self) -> int:
        return self._oldest if self._count else NOTHING

    def roll(self, start: int, end: int) -> Steps[None]:
        """Note again the complete state of every session whose last complete note, or whose position, is before *end*.

        A position is noted only once: after that, ``passed`` replaces the earlier records.
        """
        passed = (yield from self.find_passed(start, end)) if self.find_passed is not None else {}
        budget = Budget(SKIP_US)
        for key in self:
            stored = self._find_stored(key)
            is_old = stored is not None and (_since_of(stored) < end or key in passed)
            if is_old and self.note_again is not None:
                self.note_again(key, passed.get(key))
            if budget.is_over(SKIPPED_A_NOTE if is_old else 1):
                yield
        self._oldest = max(self._oldest, end)


def _protocol_of(key: str) -> str:
    return key.partition(" ")[0]


def _shard_of(key: str) -> int:
    return crc32(key.encode()) % SHARDS


def _passed_in(arguments: Sequence[Any]) -> Mapping[str, int] | None:
    """Return ``passed`` of a complete state."""
    return arguments[8] if len(arguments) > 8 else None


def _make_rows(shards: list[dict[str, StoredState]]) -> Iterator[tuple[str, bytes]]:
    for shard in shards:
        for key, each in shard.items():
            yield key, each if isinstance(each, bytes) else each.pack()


def _number_of(stored: StoredState) -> int:
    return packed_head(stored)[2] if isinstance(stored, bytes) else stored.number


def _since_of(stored: StoredState) -> int:
    return packed_head(stored)[0] if isinstance(stored, bytes) else stored.since


def _size_of(stored: StoredState) -> int:
    return len(stored) if isinstance(stored, bytes) else stored.size
