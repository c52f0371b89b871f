"""Encodes and decodes notes of shared groups about deliveries, acknowledgements and returned messages; pure functions.

A note is about one queue of one group, and begins with a number that identifies both. Changes follow, each with a kind,
its numbers, and its offsets as runs. All numbers are unsigned LEB128; generations and first offsets are differences
from the previous change. A first delivery of 32 messages takes 15-20 bytes; an acknowledgement takes 1-2 when it is
combined with others.
"""

import math
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
    "MARK",
    "NEW",
    "REACH",
    "RENEW",
    "SETTLE",
    "Change",
    "Key",
    "LeaseState",
    "decode_note",
    "encode_changes",
    "head",
    "in_ms",
]

Kind = int
# Assigns the number to a group and a queue, without any state.
DEFINE: Final[Kind] = 1
DROP: Final[Kind] = 2
# The queue restarts at an offset: everything below is settled, nothing from there on is known.
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
# The finder (`finder.py`) has found all wanted messages of the topic before a position of the log.
REACH: Final[Kind] = 11
# The marks of the group on this topic (`policy.py`), with its first queue.
MARK: Final[Kind] = 12

# The maximum size of a change per offset: a run of one message at any offset.
OFFSET_BYTES_MAX: Final = 10
CHANGE_BYTES_MAX: Final = 48


class Key(NamedTuple):
    """A group and one of its queues; *scope* is empty for a consumer group, else the owner of the group's name."""

    scope: str
    group: str
    topic: str
    queue_id: int


class LeaseState(NamedTuple):
    """One unsettled message: the start of its lease or pause, its duration, and its number of deliveries.

    A duration of 0 means that the message returns when the broker restarts.
    """

    generation: int
    duration_ms: int
    deliveries: int


class Change(NamedTuple):
    """One change of a queue; the fields in use depend on its kind."""

    kind: Kind
    generation: int = 0
    duration_ms: int = 0
    # For BEGIN and NEW: the next offset. For KEEP: the number of deliveries. For SETTLE: the offset at which the queue
    # began, in case the log has no earlier notes. For REACH: the position. For MARK: the marks.
    number: int = 0
    offsets: Sequence[int] = ()
    # For NEW: the previous next offset. If a power failure lost earlier notes, the restored queue ends before it.
    first: int = 0


# Fields of each kind: (generation, duration, number, offsets).
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
    REACH: (False, False, True, False),
    MARK: (False, False, True, False),
}


def _append_numbers(out: bytearray, numbers: Iterable[int]) -> None:
    put = out.append
    for number in numbers:
        while number > 0x7F:
            put(number & 0x7F | 0x80)
            number >>= 7
        put(number)


def _decode_numbers(data: bytes) -> list[int]:
    """Return the numbers in *data*; raise `IndexError` if the last one is cut off."""
    numbers: list[int] = []
    value = shift = 0
    for byte in data:
        if byte > 0x7F:
            value |= (byte & 0x7F) << shift
            shift += 7
        elif shift:
            numbers.append(value | byte << shift)
            value = shift = 0
        else:
            numbers.append(byte)
    if shift:
        raise IndexError("a number is cut off")
    return numbers


def in_ms(lease_s: float) -> int:
    """Return the duration of a lease in ms; 0 for a lease without end, which ends at a restart."""
    return round(lease_s * 1000) if lease_s < math.inf else 0


def head(number: int, key: Key | None = None) -> bytes:
    """Return the beginning of a note about the queue with *number*; *key* adds the definition of the number."""
    if key is None and number < 0x80:
        return bytes((number,))
    out = bytearray()
    _append_numbers(out, (number,))
    if key is not None:
        packed = msgpack.packb(tuple(key))
        _append_numbers(out, (DEFINE, len(packed)))
        out += packed
    return bytes(out)


def _split_runs(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending *offsets* as (first, count)."""
    if not offsets:
        return []
    first, count = offsets[0], len(offsets)
    contiguous = range(first, first + count)
    if offsets[-1] == contiguous[-1] and (offsets == contiguous or offsets == list(contiguous)):
        return [(first, count)]
    runs: list[tuple[int, int]] = []
    end = first
    for offset in offsets:
        if offset != end:
            runs.append((first, end - first))
            first = offset
        end = offset + 1
    runs.append((first, end - first))
    return runs


class _Bases:
    """The base values for the relative numbers of the next change."""

    __slots__ = ("generation", "offset")

    def __init__(self) -> None:
        self.generation = 0
        self.offset = 0


def _signed(number: int) -> int:
    return number << 1 if number >= 0 else (-number << 1) - 1


def _unsigned(number: int) -> int:
    return -((number + 1) >> 1) if number & 1 else number >> 1


def _append_change(out: bytearray, change: Change, bases: _Bases) -> None:
    """Append *change* to *out*."""
    kind, generation, duration_ms, number, offsets, first_new = change
    has_generation, has_duration, has_number, has_offsets = CHANGES[kind]
    numbers = [kind]
    if has_generation:
        numbers.append(_signed(generation - bases.generation))
        bases.generation = generation
    if has_duration:
        numbers.append(duration_ms)
    if has_number:
        numbers.append(number)
    base_offset = bases.offset
    if kind == NEW:
        numbers.append(_signed(first_new - base_offset))
    if has_offsets:
        runs = _split_runs(offsets if isinstance(offsets, range) else sorted(offsets))
        numbers.append(len(runs))
        for first, count in runs:
            # The lowest bit tells whether a count follows; often a run is a single message.
            step = _signed(first - base_offset) << 1
            if count > 1:
                numbers.append(step | 1)
                numbers.append(count - 2)
            else:
                numbers.append(step)
            base_offset = first + count
        bases.offset = base_offset
    _append_numbers(out, numbers)


def encode_changes(prefix: bytes, changes: Iterable[Change], bytes_max: int, next_prefix: bytes) -> list[bytes]:
    """Return notes of at most *bytes_max* with *changes*.

    The first begins with *prefix*, the others with *next_prefix*.
    """
    notes: list[bytes] = []
    note = bytearray(prefix)
    prefix_bytes = len(prefix)
    bases = _Bases()
    offsets_max = max((bytes_max - CHANGE_BYTES_MAX - len(next_prefix)) // OFFSET_BYTES_MAX, 1)
    for change in changes:
        for part in (change,) if len(change.offsets) <= offsets_max else _split_change(change, offsets_max):
            size_before = len(note)
            _append_change(note, part, bases)
            if len(note) > bytes_max and size_before > prefix_bytes:
                notes.append(bytes(note[:size_before]))
                note = bytearray(next_prefix)
                prefix_bytes = len(next_prefix)
                bases = _Bases()
                _append_change(note, part, bases)
    notes.append(bytes(note))
    return notes


def _split_change(change: Change, offsets_max: int) -> Iterable[Change]:
    offsets = sorted(change.offsets)
    starts = range(0, len(offsets), offsets_max)
    parts = [change._replace(offsets=offsets[start : start + offsets_max]) for start in starts]
    if change.kind == NEW:
        # Each part continues where the previous one ends and covers up to its own last message; the last part covers
        # up to the end of the change.
        ends = [part.offsets[-1] + 1 for part in parts[:-1]] + [change.number]
        firsts = [change.first, *ends[:-1]]
        parts = [p._replace(number=end, first=first) for p, end, first in zip(parts, ends, firsts, strict=True)]
    return parts


def _decode_number(note: bytes, index: int) -> tuple[int, int]:
    """Return the number at *index* and the index after it."""
    if note[index] < 0x80:
        return note[index], index + 1
    end = index
    while note[end] > 0x7F:
        end += 1
    return _decode_numbers(note[index : end + 1])[0], end + 1


def decode_note(note: bytes) -> tuple[int, Key | None, Iterator[Change]]:
    """Return the number of the queue, its key if the note defines it, and the changes.

    Raises:
      StoreError: *note* is not such a note; the iterator may raise it too.
    """
    try:
        number, index = _decode_number(note, 0)
        key = None
        if index < len(note) and note[index] == DEFINE:
            size, index = _decode_number(note, index + 1)
            key = Key(*msgpack.unpackb(note[index : index + size]))
            index += size
        numbers = _decode_numbers(note[index:])
    except (IndexError, ValueError, TypeError, msgpack.UnpackException) as error:
        raise StoreError(f"the note of {len(note)} bytes is not about a shared group; {error}") from error
    return number, key, _decode_changes(numbers)


def _decode_changes(numbers: list[int]) -> Iterator[Change]:
    index = generation = base_offset = 0
    try:
        while index < len(numbers):
            kind = numbers[index]
            has_generation, has_duration, has_number, has_offsets = CHANGES[kind]
            index += 1
            duration_ms = number = first = 0
            offsets: Sequence[int] = ()
            if has_generation:
                generation += _unsigned(numbers[index])
                index += 1
            if has_duration:
                duration_ms = numbers[index]
                index += 1
            if has_number:
                number = numbers[index]
                index += 1
            if kind == NEW:
                first = base_offset + _unsigned(numbers[index])
                index += 1
            if has_offsets:
                offsets, index, base_offset = _decode_offsets(numbers, index, base_offset)
            yield Change(kind, generation if has_generation else 0, duration_ms, number, offsets, first)
    except (IndexError, KeyError) as error:
        raise StoreError(f"a note of {len(numbers)} numbers about a shared group is damaged; {error!r}") from error


def _decode_offsets(numbers: list[int], index: int, base_offset: int) -> tuple[Sequence[int], int, int]:
    """Return ascending offsets, the index after them, and the offset after the last; a range if they are contiguous."""
    offsets: list[int] = []
    run_count = numbers[index]
    index += 1
    for _ in range(run_count):
        step = numbers[index]
        first = base_offset + _unsigned(step >> 1)
        if step & 1:
            base_offset = first + numbers[index + 1] + 2
            index += 2
        else:
            base_offset = first + 1
            index += 1
        if run_count == 1:
            return range(first, base_offset), index, base_offset
        offsets += range(first, base_offset)
    return offsets, index, base_offset
