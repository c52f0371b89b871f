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

Held: TypeAlias = SessionState | bytes
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
        self._shards: list[dict[str, Held]] = [{} for _ in range(SHARDS)]
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
        held = self._find(key)
        if isinstance(held, bytes):
            return self._unpack(key, held)
        return held.copy() if held is not None else None

    def _unpack(self, key: str, packed: bytes) -> SessionState:
        if self._unpacked is None or self._unpacked[0] is not packed:
            self._unpacked = packed, SessionState.unpack(key, packed)
        return self._unpacked[1].copy()

    def ends_ms(self, key: str) -> int:
        """Return when session *key* ends; 0 if a client uses it (or did when the broker was killed), -1 if unknown."""
        held = self._find(key)
        if held is None:
            return -1
        return packed_head(held)[1] if isinstance(held, bytes) else held.ends_ms

    def position(self, key: str) -> tuple[int, bool]:
        """Return ``position`` of session *key*, -1 if there is none, and whether ``passed`` is filled."""
        held = self._find(key)
        if held is None:
            return -1, False
        return packed_position(held) if isinstance(held, bytes) else (held.position, bool(held.passed))

    # the projection

    def apply(self, records: Sequence[RecordView]) -> None:
        for record in records:
            for note in read_notes(record.body):
                kind, key, number, arguments = decode_note(note)
                self._apply(kind, key, number, arguments, record.position)

    def _apply(self, kind: int, key: str, number: int, arguments: list[Any], position: int) -> None:
        held = self._find(key)
        if kind == BEGIN:
            state = SessionState(key, *arguments)
            state.number = number
            self._add(state, position)
        elif kind in (WHOLE, MORE):
            self._apply_whole(kind, key, number, arguments, position)
        else:
            lost = notes_lost(_number(held), number) if held is not None else -1
            if held is not None and (not lost or (lost > 0 and kind & INDEPENDENT)):
                self._change(key, held, kind & ~INDEPENDENT, arguments, lost)
            if lost:
                self._tell_lost(key, is_rolled=False)

    def _change(self, key: str, held: Held, kind: int, arguments: list[Any], lost: int) -> None:
        if kind == ENDED:
            del self._shard_to_change(key)[key]
            self._count -= 1
            self._counts[_protocol_of(key)] -= 1
            self.bytes -= _weight(held)
            self._tell_left(key, next_number(_number(held)))
            return
        state = self._own(key, held)
        before = state.size
        if lost:
            state.change_after_gap(kind, arguments)
        else:
            state.change(kind, arguments)
        self.bytes += state.size - before
        if kind == LEFT:
            self._put(key, state.pack(), state)
            self._tell_left(key, state.number)

    def _tell_left(self, key: str, number: int) -> None:
        if self.on_left is not None:
            self.on_left(key, number)

    def _tell_lost(self, key: str, *, is_rolled: bool) -> None:
        if self.on_lost is not None:
            self.on_lost(key, is_rolled)

    def _apply_whole(self, kind: int, key: str, number: int, arguments: list[Any], position: int) -> None:
        """Apply a complete state; for a known session only ``since``, as older records may go, and ``passed``."""
        held = self._find(key)
        if held is None and kind == WHOLE:
            state = SessionState.of(key, number, arguments[0], arguments[1:])
            state.add(*arguments[6:8], *arguments[9:])
            state.passed = _passed(arguments) or state.passed
            self._add(state, position)
        elif held is None or number != _number(held):
            self._tell_lost(key, is_rolled=held is not None and kind == WHOLE)
        elif kind == MORE:
            state = self._own(key, held)
            before = state.size
            state.add(*arguments)
            self.bytes += state.size - before
            self._settle(state)
        elif isinstance(held, bytes) and not _passed(arguments):
            self._shard_to_change(key)[key] = moved(held, position)
        else:
            state = self._own(key, held)
            state.since = position
            state.passed = _passed(arguments) or state.passed
            self._settle(state)

    def _add(self, state: SessionState, position: int) -> None:
        """Add a session, replacing any with the same key."""
        state.since, state.edition = position, self._edition
        self._oldest = min(self._oldest, position, state.position)
        self._put(state.key, state, self._find(state.key))
        self._settle(state)

    def _settle(self, state: SessionState) -> None:
        if state.ends_ms:
            self._put(state.key, state.pack(), state)

    def _put(self, key: str, held: Held, before: Held | None) -> None:
        self.bytes += _weight(held) - (_weight(before) if before is not None else 0)
        self._count += before is None
        self._counts[_protocol_of(key)] += before is None
        self._shard_to_change(key)[key] = held

    def _find(self, key: str) -> Held | None:
        return self._shards[_shard_of(key)].get(key)

    def _shard_to_change(self, key: str) -> dict[str, Held]:
        number = _shard_of(key)
        if number in self._shared:
            self._shared.discard(number)
            self._shards[number] = self._shards[number].copy()
        return self._shards[number]

    def _own(self, key: str, held: Held) -> SessionState:
        """Return a state of *key* that may be changed, because no unfinished snapshot uses it."""
        if isinstance(held, bytes):
            state = self._unpack(key, held)
            self._unpacked = None
        elif held.edition != self._edition:
            state = held.copy()
        else:
            return held
        state.edition = self._edition
        self._put(key, state, held)
        return state

    def freeze(self) -> Steps[list[bytes]]:
        self._edition += 1
        self._shared = set(range(SHARDS))
        return pack_rows(FORMAT, _rows(self._shards.copy()))

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
            held = self._find(key)
            is_old = held is not None and (_since(held) < end or key in passed)
            if is_old and self.note_again is not None:
                self.note_again(key, passed.get(key))
            if budget.is_over(SKIPPED_A_NOTE if is_old else 1):
                yield
        self._oldest = max(self._oldest, end)


def _protocol_of(key: str) -> str:
    return key.partition(" ")[0]


def _shard_of(key: str) -> int:
    return crc32(key.encode()) % SHARDS


def _passed(arguments: Sequence[Any]) -> Mapping[str, int] | None:
    """Return ``passed`` of a complete state."""
    return arguments[8] if len(arguments) > 8 else None


def _rows(shards: list[dict[str, Held]]) -> Iterator[tuple[str, bytes]]:
    for shard in shards:
        for key, each in shard.items():
            yield key, each if isinstance(each, bytes) else each.pack()


def _number(held: Held) -> int:
    return packed_head(held)[2] if isinstance(held, bytes) else held.number


def _since(held: Held) -> int:
    return packed_head(held)[0] if isinstance(held, bytes) else held.since


def _weight(held: Held) -> int:
    return len(held) if isinstance(held, bytes) else held.size
