"""Encodes and decodes notes of shared groups about deliveries, acknowledgements and returned messages; pure functions.

A note is about one *lane*, a queue as shared by one group, and begins with the lane's number. Changes follow, each with
a kind, its numbers, and its offsets as runs. All numbers are unsigned LEB128; generations and first offsets are
differences from the previous change. A first delivery of 32 messages takes 15-20 bytes; an acknowledgement takes 1-2
when it is combined with others.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgpack  # type: ignore[import-untyped]

from martlet.errors import StoreError

__all__ = [
    "ACK",
    "AGAIN",
    "BACK",
    "BEGIN",
    "DROP",
    "KEEP",
    "NEW",
    "RENEW",
    "SETTLE",
    "Change",
    "Key",
    "LeaseState",
    "decode_note",
    "encode_changes",
    "head",
]

Kind = int
# Assigns the lane's number to a group and queue, without any state.
DEFINE: Final[Kind] = 1
DROP: Final[Kind] = 2
# The lane restarts at an offset: everything below is settled, nothing is known from there on.
BEGIN: Final[Kind] = 3
# The state of an unsettled message, in a snapshot or when the notes about it are removed.
KEEP: Final[Kind] = 4
NEW: Final[Kind] = 5
AGAIN: Final[Kind] = 6
ACK: Final[Kind] = 7
BACK: Final[Kind] = 8
RENEW: Final[Kind] = 9
# An acknowledgement in an atomic group, which takes effect when the group is readable.
SETTLE: Final[Kind] = 10

# The maximum size of a change per offset: a run of one message at any offset.
OFFSET_BYTES_MAX: Final = 10
CHANGE_BYTES_MAX: Final = 48


class Key(NamedTuple):
    """A group and a queue that it shares; *scope* is empty for a consumer group, else the owner of the group's name."""

    scope: str
    group: str
    topic: str
    queue_id: int


class LeaseState(NamedTuple):
    """One unsettled message: when it was leased or returned, for how long that holds, and its number of deliveries.

    A duration of 0 means that it returns when the broker restarts.
    """

    generation: int
    duration_ms: int
    deliveries: int


class Change(NamedTuple):
    """One change of a lane; which fields are used depends on its kind."""

    kind: Kind
    generation: int = 0
    duration_ms: int = 0
    # For BEGIN and NEW: the next offset. For KEEP: the number of deliveries. For SETTLE: where the lane began, in case
    # the log has no earlier notes.
    number: int = 0
    offsets: Sequence[int] = ()
    # For NEW: the previous next offset. If a power failure lost earlier notes, the restored lane ends before it.
    first: int = 0


# Which of (generation, duration, number, offsets) a kind has.
CHANGES: Final[dict[Kind, tuple[bool, bool, bool, bool]]] = {
    DROP: (False, False, False, False),
    BEGIN: (False, False, True, False),
    KEEP: (True, True, True, True),
    NEW: (True, True, True, True),
    AGAIN: (True, True, False, True),
    ACK: (False, False, False, True),
    BACK: (True, True, False, True),
    RENEW: (True, True, False, True),
    SETTLE: (False, False, True, True),
}


def _put(out: bytearray, number: int) -> None:
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def head(number: int, key: Key | None = None) -> bytes:
    """Return the beginning of a note about lane *number*; *key* adds the definition of the number."""
    out = bytearray()
    _put(out, number)
    if key is not None:
        packed = msgpack.packb(tuple(key))
        out.append(DEFINE)
        _put(out, len(packed))
        out += packed
    return bytes(out)


def _runs(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending *offsets* as (first, count)."""
    found: list[tuple[int, int]] = []
    first = end = -1
    for offset in offsets:
        if offset == end:
            end += 1
            continue
        if end > first:
            found.append((first, end - first))
        first, end = offset, offset + 1
    if end > first:
        found.append((first, end - first))
    return found


class _Before:
    """The base values for the relative numbers of the next change."""

    __slots__ = ("generation", "offset")

    def __init__(self) -> None:
        self.generation = 0
        self.offset = 0


def _signed(number: int) -> int:
    return number << 1 if number >= 0 else (-number << 1) - 1


def _unsigned(number: int) -> int:
    return -((number + 1) >> 1) if number & 1 else number >> 1


def _encode(change: Change, before: _Before) -> bytes:
    out = bytearray((change.kind,))
    has_generation, has_duration, has_number, has_offsets = CHANGES[change.kind]
    if has_generation:
        _put(out, _signed(change.generation - before.generation))
        before.generation = change.generation
    if has_duration:
        _put(out, change.duration_ms)
    if has_number:
        _put(out, change.number)
    if change.kind == NEW:
        _put(out, _signed(change.first - before.offset))
    if has_offsets:
        runs = _runs(sorted(change.offsets))
        _put(out, len(runs))
        for first, count in runs:
            # The lowest bit says whether a count follows; often a run is a single message.
            _put(out, _signed(first - before.offset) << 1 | (count > 1))
            if count > 1:
                _put(out, count - 2)
            before.offset = first + count
    return bytes(out)


def encode_changes(prefix: bytes, changes: Iterable[Change], bytes_max: int, more: bytes) -> list[bytes]:
    """Return notes of at most *bytes_max* with *changes*.

    The first begins with *prefix*, the others with *more*.
    """
    notes: list[bytes] = []
    note = bytearray(prefix)
    used = len(prefix)
    before = _Before()
    step = max((bytes_max - CHANGE_BYTES_MAX - len(more)) // OFFSET_BYTES_MAX, 1)
    for change in changes:
        for part in _split(change, step):
            encoded = _encode(part, before)
            if len(note) + len(encoded) > bytes_max and len(note) > used:
                notes.append(bytes(note))
                note = bytearray(more)
                used = len(more)
                before = _Before()
                encoded = _encode(part, before)
            note += encoded
    notes.append(bytes(note))
    return notes


def _split(change: Change, step: int) -> Iterable[Change]:
    if len(change.offsets) <= step:
        return (change,)
    offsets = sorted(change.offsets)
    parts = [change._replace(offsets=offsets[at : at + step]) for at in range(0, len(offsets), step)]
    if change.kind == NEW:
        # Each part continues where the previous one ends and covers up to its own last message; the last part covers
        # up to the end of the change.
        ends = [part.offsets[-1] + 1 for part in parts[:-1]] + [change.number]
        firsts = [change.first, *ends[:-1]]
        parts = [p._replace(number=end, first=first) for p, end, first in zip(parts, ends, firsts, strict=True)]
    return parts


class _Reader:
    """Reads numbers from a note."""

    __slots__ = ("at", "before", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.before = _Before()

    def number(self) -> int:
        data, at, shift, value = self.data, self.at, 0, 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                self.at = at
                return value
            shift += 7

    def offsets(self) -> list[int]:
        found: list[int] = []
        at = self.before.offset
        for _ in range(self.number()):
            step = self.number()
            first = at + _unsigned(step >> 1)
            at = first + (self.number() + 2 if step & 1 else 1)
            if at - first == 1:
                found.append(first)
            else:
                found += range(first, at)
        self.before.offset = at
        return found

    def generation(self) -> int:
        self.before.generation += _unsigned(self.number())
        return self.before.generation


def decode_note(note: bytes) -> tuple[int, Key | None, Iterator[Change]]:
    """Return the number of the lane, its key if the note defines it, and the changes.

    Raises:
      StoreError: *note* is not such a note; the iterator may raise it too.
    """
    reader = _Reader(note)
    try:
        number, key = reader.number(), None
        if reader.at < len(note) and note[reader.at] == DEFINE:
            reader.at += 1
            size = reader.number()
            key = Key(*msgpack.unpackb(note[reader.at : reader.at + size]))
            reader.at += size
    except (IndexError, ValueError, TypeError, msgpack.UnpackException) as error:
        raise StoreError(f"the note of {len(note)} bytes is not about a shared group; {error}") from error
    return number, key, _changes(reader)


def _changes(reader: _Reader) -> Iterator[Change]:
    note = reader.data
    try:
        while reader.at < len(note):
            kind = note[reader.at]
            reader.at += 1
            has_generation, has_duration, has_number, has_offsets = CHANGES[kind]
            generation = reader.generation() if has_generation else 0
            duration_ms = reader.number() if has_duration else 0
            number = reader.number() if has_number else 0
            first = reader.before.offset + _unsigned(reader.number()) if kind == NEW else 0
            yield Change(kind, generation, duration_ms, number, reader.offsets() if has_offsets else (), first)
    except (IndexError, KeyError) as error:
        raise StoreError(f"the note of {len(note)} bytes about a shared group is damaged; {error!r}") from error
