"""The state of a session; encodes and decodes the state and notes about it; pure functions.

A note is a msgpack array: its kind, the key of the session, the number of the note, and arguments of the kind. The
number counts the changes of the session, so a gap between two numbers shows that notes were lost. A power failure can
lose a note and keep a later one, which may be in an atomic group with a message. So notes after a gap apply if they do
not depend on earlier ones (INDEPENDENT), and the others are ignored.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, repeat
from operator import sub
from struct import Struct
from typing import Any, Final, final

import msgpack  # type: ignore[import-untyped]

from martlet.errors import StoreError
from martlet.runtime.checksum import crc32

__all__ = [
    "ACKNOWLEDGED",
    "ATTACHED",
    "BEGIN",
    "DATA",
    "DEPENDENT",
    "ENDED",
    "FILTER",
    "HELD",
    "INDEPENDENT",
    "LEFT",
    "MORE",
    "MOVED",
    "NEVER_MS",
    "NO_FILTER",
    "NO_MESSAGE",
    "PROGRESS",
    "SENT",
    "WHOLE",
    "SessionState",
    "decode_note",
    "encode_note",
    "encode_sent",
    "encode_whole",
    "first_number",
    "moved",
    "next_number",
    "notes_lost",
    "packed_head",
    "packed_position",
]

Kind = int
# A new session, which replaces any other with this key: owner, position, expiry.
BEGIN: Final[Kind] = 1
# The complete session, because earlier notes are about to be removed: when it ends, its fields, filters, ids in flight,
# ``passed`` and the begins of filters, without empty ones at the end. MORE continues filters, ids and begins.
WHOLE: Final[Kind] = 2
MORE: Final[Kind] = 3
ATTACHED: Final[Kind] = 4  # position, expiry
LEFT: Final[Kind] = 5  # position, time when the session ends
ENDED: Final[Kind] = 6
# Filter, options, position, and the filter's begin; without a begin, the filter keeps the one that it has, if any.
FILTER: Final[Kind] = 7
NO_FILTER: Final[Kind] = 8  # filter
SENT: Final[Kind] = 9  # first id, differences between the positions of the messages, position after all of them
ACKNOWLEDGED: Final[Kind] = 10  # first id, count
MOVED: Final[Kind] = 11  # position
DATA: Final[Kind] = 12  # data of the protocol, checksum of the data that it replaces
HELD: Final[Kind] = 13  # first id, count: ids in use, without a message
PROGRESS: Final[Kind] = 14  # filter, options, position: the options tell which messages were sent for the filter
# Added to the kind of a note that applies even if earlier notes are lost. Earlier versions ignored every note after a
# gap and continued without them, so their notes, which do not have it, stay ignored.
INDEPENDENT: Final[Kind] = 32
# Kinds of notes that depend on earlier ones, except SENT in an atomic group that settles its messages elsewhere.
DEPENDENT: Final = frozenset((SENT, MOVED, PROGRESS))

# The index of the session's position in the arguments of independent notes.
POSITION_AT: Final = {ATTACHED: 0, LEFT: 0, FILTER: 2, SENT: 2}

# The position of an id that is in use but has no message.
NO_MESSAGE: Final = -1
# The end of a session that never ends.
NEVER_MS: Final = 1 << 62
NEVER: Final = -1
# Head of a packed state: the position of its last complete note, when it ends, and the number of its last note.
HEAD: Final = Struct(">QQI")
# The indexes of ``passed`` and of filters' begins in the fields after it; WHOLE has one argument before them.
PASSED: Final = 7
BEGINS: Final = 8
NUMBERS: Final = 1 << 32
# Distance between the numbers of a session and of the session that replaces it; a shorter gap is within one session.
NUMBERS_BETWEEN: Final = 1 << 20
# Approximate overhead in bytes of a filter, with its begin, of an id in flight, and of a session.
FILTER_BYTES: Final = 100
FLIGHT_BYTES: Final = 16
STATE_BYTES: Final = 100
NOTHING_PASSED: Final[Mapping[str, int]] = {}
NO_BEGINS: Final[dict[str, int]] = {}  # shared: replaced, never changed


def next_number(number: int) -> int:
    """Return the number that follows *number*."""
    return (number + 1) % NUMBERS


def first_number(replaced: int) -> int:
    """Return the first number of a session that replaces one whose last number is *replaced*."""
    return (replaced + NUMBERS_BETWEEN) % NUMBERS


def notes_lost(number: int, following: int) -> int:
    """Return the number of notes missing between *number* and *following*; -1 if these are of different sessions."""
    lost = (following - number - 1) % NUMBERS
    return lost if lost < NUMBERS_BETWEEN - 1 else -1


def packed_head(packed: bytes) -> tuple[int, int, int]:
    """Return the first fields of a packed state: ``since``, ``ends_ms`` and ``number``."""
    since, ends_ms, number = HEAD.unpack_from(packed)
    return since, ends_ms, number


def packed_position(packed: bytes) -> tuple[int, bool]:
    """Return ``position`` of a packed state, and whether it has ``passed``."""
    fields = msgpack.unpackb(memoryview(packed)[HEAD.size :])
    return fields[1], len(fields) > PASSED and bool(fields[PASSED])


def moved(packed: bytes, since: int) -> bytes:
    """Return the packed state with another ``since``."""
    return since.to_bytes(8, "big") + packed[8:]


@final
class SessionState:
    """The state of a session.

    Every matching message before ``position`` was sent. ``passed`` has, by topic, the number of messages that its
    queues had before that position; it is empty unless retention is about to remove the record there
    (`missed_messages.py`). ``begins`` has the log positions at which filters begin that were added while the session
    was behind: they match no earlier message. It may still have begins that the session has passed; ``begins_to`` is
    the last position in it. ``flight`` maps the ids of messages that were sent but not acknowledged to their positions.
    ``ends_ms`` is 0 while a client uses the session; ``expiry_s`` is -1 if it does not expire. ``since`` is the
    position of the last record with the complete state. ``size`` is the approximate size in bytes.
    """

    __slots__ = (
        "begins",
        "begins_to",
        "data",
        "edition",
        "ends_ms",
        "expiry_s",
        "filters",
        "flight",
        "key",
        "next_id",
        "number",
        "owner",
        "passed",
        "position",
        "since",
        "size",
    )

    def __init__(self, key: str, owner: str, position: int, expiry_s: int) -> None:
        self.key = key
        self.owner = owner
        self.position = position
        self.expiry_s = expiry_s
        self.next_id = 1
        self.ends_ms = 0
        self.number = 0
        self.since = 0
        self.edition = 0
        self.filters: dict[str, bytes] = {}
        self.begins = NO_BEGINS
        self.begins_to = 0
        self.flight: dict[int, int] = {}
        self.passed = NOTHING_PASSED
        self.data = b""
        self.size = STATE_BYTES + len(key) + len(owner)

    @property
    def start(self) -> int:
        """The position of the oldest message that the client may still need."""
        return min((position for position in self.flight.values() if position >= 0), default=self.position)

    def change(self, kind: Kind, arguments: Sequence[Any]) -> None:
        """Apply a note."""
        self.number = next_number(self.number)
        if kind == SENT:
            self._apply_sent(*arguments)
        elif kind == ACKNOWLEDGED:
            first, count = arguments
            self.size -= self._take(range(first, first + count)) * FLIGHT_BYTES
        elif kind == HELD:
            self._apply_held(*arguments)
        elif kind in (FILTER, PROGRESS):
            topic_filter, options, position, *begin = arguments
            self._move(position)
            begin = begin or [self.begins.get(topic_filter, 0)]
            self._drop_filter(topic_filter)
            self._add_filter(topic_filter, options)
            self._begin_later(topic_filter, *begin)
        elif kind == NO_FILTER:
            self._drop_filter(arguments[0])
        elif kind == MOVED:
            self._move(*arguments)
        elif kind == LEFT:
            position, self.ends_ms = arguments
            self._move(position)
        elif kind == ATTACHED:
            self.ends_ms = 0
            position, self.expiry_s = arguments
            self._move(position)
        elif kind == DATA:
            self.size += len(arguments[0]) - len(self.data)
            self.data = arguments[0]
        elif kind != ENDED:
            raise StoreError(f"kind {kind!r} of a note about a session is unknown")

    def change_after_gap(self, kind: Kind, arguments: Sequence[Any]) -> None:
        """Apply an independent note that follows lost ones.

        The position does not move, because messages before the new position may not have been sent. Data is replaced
        only if the note was written to replace the present data: otherwise the lost notes may include the protocol's
        use of it, such as publishing a will.
        """
        if kind == DATA and arguments[1] != crc32(self.data):
            return
        number_before, position_index = self.number, POSITION_AT.get(kind)
        if position_index is not None:
            arguments = [*arguments[:position_index], self.position, *arguments[position_index + 1 :]]
        self.change(kind, arguments)
        self.number = number_before

    def _move(self, position: int) -> None:
        if position != self.position:
            self.position, self.passed = position, NOTHING_PASSED
            if position >= self.begins_to and self.begins:
                self.begins = NO_BEGINS

    def _apply_sent(self, first_id: int, position_deltas: Sequence[int], end: int) -> None:
        flight, before = self.flight, len(self.flight)
        flight.update(zip(range(first_id, first_id + len(position_deltas)), accumulate(position_deltas), strict=True))
        self.size += (len(flight) - before) * FLIGHT_BYTES
        self.next_id = first_id + len(position_deltas)
        self._move(end)

    def _apply_held(self, first: int, count: int) -> None:
        numbers = range(first, first + count)
        taken = self._take(numbers)  # so that held ids are in the order of their notes
        self.flight.update(dict.fromkeys(numbers, NO_MESSAGE))
        self.size += (count - taken) * FLIGHT_BYTES

    def _take(self, numbers: range) -> int:
        """Remove *numbers* from the ids in flight; return how many of them were there."""
        before = len(self.flight)
        deque(map(self.flight.pop, numbers, repeat(None)), 0)
        return before - len(self.flight)

    def _add_filter(self, topic_filter: str, options: bytes) -> None:
        self.filters[topic_filter] = options
        self.size += filter_bytes(topic_filter, options)

    def _drop_filter(self, topic_filter: str) -> None:
        options = self.filters.pop(topic_filter, None)
        if options is not None:
            self.size -= filter_bytes(topic_filter, options)
        if self.begins:
            self.begins.pop(topic_filter, None)

    def _begin_later(self, topic_filter: str, begin: int) -> None:
        if begin > self.position:
            if not self.begins:
                self.begins, self.begins_to = {}, 0
            self.begins[topic_filter] = begin
            self.begins_to = max(self.begins_to, begin)

    def begins_in(self, filters: Iterable[str]) -> list[int]:
        """Return the begins of *filters* that the session has not reached, as `add` takes them."""
        if not self.begins:
            return []
        begins = ((number, self.begins.get(each, 0)) for number, each in enumerate(filters))
        return flat((number, begin) for number, begin in begins if begin > self.position)

    def add(self, filters: Mapping[str, bytes], flight: Sequence[int], begins: Sequence[int] = ()) -> None:
        """Add *filters*, the ids in *flight* as encoded by `flat`, and the begins of filters (`begins_in`)."""
        if not self.filters:
            self.filters = dict(filters)
            self.size += FILTER_BYTES * len(filters) + len("".join(filters).encode()) + len(b"".join(filters.values()))
        else:
            for topic_filter, options in filters.items():
                self._drop_filter(topic_filter)
                self._add_filter(topic_filter, options)
        if begins:
            names = list(filters)
            for number, begin in _pairs(begins):
                self._begin_later(names[number], begin)
        count_before = len(self.flight)
        self.flight.update(_pairs(flight))
        self.size += (len(self.flight) - count_before) * FLIGHT_BYTES

    def fields(self) -> list[Any]:
        """Return owner, position, expiry in s, next id, and the data of the protocol."""
        return [self.owner, self.position, self.expiry_s, self.next_id, self.data]

    @classmethod
    def of(cls, key: str, number: int, ends_ms: int, fields: Sequence[Any]) -> "SessionState":
        """Return a state with *fields*, without filters and ids in flight."""
        owner, position, expiry_s, next_id, data = fields[:5]
        state = cls(key, owner, position, expiry_s)
        state.number, state.ends_ms, state.next_id, state.data = number, ends_ms, next_id, data
        state.size += len(data)
        return state

    def copy(self) -> "SessionState":
        state = SessionState.of(self.key, self.number, self.ends_ms, self.fields())
        state.since, state.edition, state.size = self.since, self.edition, self.size
        state.filters, state.flight, state.passed = self.filters.copy(), self.flight.copy(), self.passed
        state.begins, state.begins_to = self.begins and self.begins.copy(), self.begins_to
        return state

    def pack(self) -> bytes:
        """Return the compact encoding of the state, without its key."""
        head = HEAD.pack(self.since, self.ends_ms, self.number)
        trailing = _trailing_fields(self.passed, self.begins_in(self.filters))
        return head + bytes(msgpack.packb([*self.fields(), self.filters, flat(self.flight.items()), *trailing]))

    @classmethod
    def unpack(cls, key: str, packed: bytes) -> "SessionState":
        """Decode a state that `pack` encoded."""
        since, ends_ms, number = packed_head(packed)
        fields = msgpack.unpackb(memoryview(packed)[HEAD.size :])
        state = cls.of(key, number, ends_ms, fields)
        state.since = since
        state.add(fields[5], fields[6], *fields[BEGINS:])
        if len(fields) > PASSED:
            state.passed = fields[PASSED]
        return state


def _trailing_fields(passed: Mapping[str, int], begins: list[int]) -> list[Any]:
    """Return the last fields of a state, without empty ones at the end."""
    return [passed, begins] if begins else [passed] if passed else []


def filter_bytes(topic_filter: str, options: bytes) -> int:
    """Return the approximate size of a filter in bytes."""
    return FILTER_BYTES + len(topic_filter.encode()) + len(options)


def flat(flight: Iterable[tuple[int, int]]) -> list[int]:
    """Return ids and positions as one list of differences: small numbers take fewer bytes."""
    differences: list[int] = []
    last_id = last_position = 0
    for number, position in flight:
        differences += (number - last_id, position - last_position)
        last_id, last_position = number, position
    return differences


def _pairs(differences: Sequence[int]) -> Iterator[tuple[int, int]]:
    number = position = 0
    for index in range(0, len(differences), 2):
        number += differences[index]
        position += differences[index + 1]
        yield number, position


def encode_note(kind: Kind, key: str, number: int, *arguments: Any) -> bytes:
    """Return note *number* about session *key*."""
    return bytes(msgpack.packb([kind, key, number, *arguments]))


def decode_note(note: bytes) -> tuple[Kind, str, int, list[Any]]:
    """Return the kind, the key, the number and the rest of *note*.

    Raises:
      StoreError: *note* is not about a session.
    """
    try:
        kind, key, number, *arguments = msgpack.unpackb(note)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise StoreError(f"the note of {len(note)} bytes is not about a session; {error}") from error
    return kind, key, number, arguments


def encode_sent(first: int, positions: Sequence[int], end: int) -> list[Any]:
    """Return the arguments of a SENT note: messages at *positions* were sent with ids from *first* on."""
    return [first, list(map(sub, positions, chain((0,), positions))), end]


def encode_whole(state: SessionState, bytes_max: int) -> list[bytes]:
    """Return notes with the complete *state*, each of at most *bytes_max* unless a single filter is longer."""
    number, fields = state.number, [state.ends_ms, *state.fields()]
    room = bytes_max - STATE_BYTES - len(state.key.encode()) - len(state.owner.encode()) - len(state.data)
    parts = list(_split_state(state, room))
    filters, flight = parts[0]
    trailing = _trailing_fields(state.passed, state.begins_in(filters))
    notes = [encode_note(WHOLE, state.key, number, *fields, filters, flight, *trailing)]
    for filters, flight in parts[1:]:
        begins = state.begins_in(filters)
        notes.append(encode_note(MORE, state.key, number, filters, flight, *([begins] if begins else [])))
    return notes


def _split_state(state: SessionState, room: int) -> Iterator[tuple[dict[str, bytes], list[int]]]:
    """Yield filters and ids in flight in parts of about *room* bytes; at least one part."""
    filters: dict[str, bytes] = {}
    flight: list[tuple[int, int]] = []
    room_left = room
    for topic_filter, options in state.filters.items():
        size = filter_bytes(topic_filter, options)
        if size > room_left and filters:
            yield filters, []
            filters, room_left = {}, room
        filters[topic_filter] = options
        room_left -= size
    for each in state.flight.items():
        if room_left < FLIGHT_BYTES and (filters or flight):
            yield filters, flat(flight)
            filters, flight, room_left = {}, [], room
        flight.append(each)
        room_left -= FLIGHT_BYTES
    yield filters, flat(flight)
