"""What a session is, and notes about it <-> bytes; pure functions.

A note is a msgpack array: its kind, the key of the session, the number of the note, and what the kind says. The number
counts the changes of the session, so a note that does not follow the one before shows that notes were lost.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Any, Final, final

import msgpack  # type: ignore[import-untyped]

from martlet.errors import StoreError

__all__ = [
    "ACKNOWLEDGED",
    "ATTACHED",
    "BEGIN",
    "DATA",
    "ENDED",
    "FILTER",
    "LEFT",
    "MORE",
    "MOVED",
    "NEVER_MS",
    "NO_FILTER",
    "NO_MESSAGE",
    "SENT",
    "WHOLE",
    "SessionState",
    "decode_note",
    "encode_note",
    "encode_sent",
    "encode_whole",
    "moved",
    "next_number",
    "packed_head",
]

Kind = int
# A new session, whatever was there under its key: owner, position, expiry.
BEGIN: Final[Kind] = 1
# The session as it is, when the notes before are removed: when it ends, its fields, filters, flights. MORE has more of
# the latter two.
WHOLE: Final[Kind] = 2
MORE: Final[Kind] = 3
ATTACHED: Final[Kind] = 4  # position, expiry
LEFT: Final[Kind] = 5  # position, when the session ends
ENDED: Final[Kind] = 6
FILTER: Final[Kind] = 7  # filter, options, position
NO_FILTER: Final[Kind] = 8  # filter
SENT: Final[Kind] = 9  # first id, steps from one message's position to the next, position after all of them
ACKNOWLEDGED: Final[Kind] = 10  # first id, count
MOVED: Final[Kind] = 11  # position
DATA: Final[Kind] = 12  # the protocol's own

# The position of an id that is in use without a message.
NO_MESSAGE: Final = -1
# When a session ends that does not.
NEVER_MS: Final = 1 << 62
NEVER: Final = -1
# A packed state begins with the position of the note that has it whole, when it ends, and the number of its last note.
HEAD: Final = Struct(">QQI")
NUMBERS: Final = 1 << 32
# What a filter, an id in flight and a session take, roughly, besides their own bytes.
FILTER_BYTES: Final = 100
FLIGHT_BYTES: Final = 16
STATE_BYTES: Final = 100


def next_number(number: int) -> int:
    """The number of the note after note *number*."""
    return (number + 1) % NUMBERS


def packed_head(packed: bytes) -> tuple[int, int, int]:
    """Return the first fields of a packed state: ``since``, ``ends_ms`` and ``number``."""
    since, ends_ms, number = HEAD.unpack_from(packed)
    return since, ends_ms, number


def moved(packed: bytes, since: int) -> bytes:
    """Return the packed state with another ``since``."""
    return since.to_bytes(8, "big") + packed[8:]


@final
class SessionState:
    """What a session remembers.

    Messages before ``position`` were sent, or are not wanted; ``flight`` has the ids of those that were sent and
    are not acknowledged, each with the position of its message. ``ends_ms`` is 0 while a client has the session,
    ``expiry_s`` -1 for one that does not expire. ``since`` is the position of the record that has the state whole.
    ``size`` is about how many bytes it takes.
    """

    __slots__ = (
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
        self.flight: dict[int, int] = {}
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
            self._send(*arguments)
        elif kind == ACKNOWLEDGED:
            first, count = arguments
            for number in range(first, first + count):
                if self.flight.pop(number, None) is not None:
                    self.size -= FLIGHT_BYTES
        elif kind == FILTER:
            topic_filter, options, self.position = arguments
            self._drop_filter(topic_filter)
            self._add_filter(topic_filter, options)
        elif kind == NO_FILTER:
            self._drop_filter(arguments[0])
        elif kind == MOVED:
            (self.position,) = arguments
        elif kind == LEFT:
            self.position, self.ends_ms = arguments
        elif kind == ATTACHED:
            self.ends_ms = 0
            self.position, self.expiry_s = arguments
        elif kind == DATA:
            self.size += len(arguments[0]) - len(self.data)
            (self.data,) = arguments
        elif kind != ENDED:
            raise StoreError(f"kind {kind!r} of a note about a session is unknown")

    def _send(self, first: int, steps: Sequence[int], end: int) -> None:
        at, number = 0, first
        flight, before = self.flight, len(self.flight)
        for step in steps:
            at += step
            flight[number] = at
            number += 1
        self.size += (len(flight) - before) * FLIGHT_BYTES
        self.next_id, self.position = number, end

    def _add_filter(self, topic_filter: str, options: bytes) -> None:
        self.filters[topic_filter] = options
        self.size += filter_bytes(topic_filter, options)

    def _drop_filter(self, topic_filter: str) -> None:
        options = self.filters.pop(topic_filter, None)
        if options is not None:
            self.size -= filter_bytes(topic_filter, options)

    def add(self, filters: Mapping[str, bytes], flight: Sequence[int]) -> None:
        """Take over a part of *filters* and of the ids in *flight*, as `flat` has them."""
        for topic_filter, options in filters.items():
            self._drop_filter(topic_filter)
            self._add_filter(topic_filter, options)
        before = len(self.flight)
        self.flight.update(_pairs(flight))
        self.size += (len(self.flight) - before) * FLIGHT_BYTES

    def fields(self) -> list[Any]:
        """Everything but the key, ``filters``, ``flight`` and what a head has."""
        return [self.owner, self.position, self.expiry_s, self.next_id, self.data]

    @classmethod
    def of(cls, key: str, number: int, ends_ms: int, fields: Sequence[Any]) -> "SessionState":
        """Return the state that has *fields*, without filters and flights."""
        owner, position, expiry_s, next_id, data = fields[:5]
        state = cls(key, owner, position, expiry_s)
        state.number, state.ends_ms, state.next_id, state.data = number, ends_ms, next_id, data
        state.size += len(data)
        return state

    def copy(self) -> "SessionState":
        state = SessionState.of(self.key, self.number, self.ends_ms, self.fields())
        state.since, state.edition, state.size = self.since, self.edition, self.size
        state.filters, state.flight = self.filters.copy(), self.flight.copy()
        return state

    def pack(self) -> bytes:
        """Return the state without its key, as short as it gets."""
        head = HEAD.pack(self.since, self.ends_ms, self.number)
        return head + bytes(msgpack.packb([*self.fields(), self.filters, flat(self.flight.items())]))

    @classmethod
    def unpack(cls, key: str, packed: bytes) -> "SessionState":
        """Return the state that `pack` made *packed* of."""
        since, ends_ms, number = packed_head(packed)
        fields = msgpack.unpackb(memoryview(packed)[HEAD.size :])
        state = cls.of(key, number, ends_ms, fields)
        state.since = since
        state.add(fields[5], fields[6])
        return state


def filter_bytes(topic_filter: str, options: bytes) -> int:
    """About how many bytes a filter takes."""
    return FILTER_BYTES + len(topic_filter.encode()) + len(options)


def flat(flight: Iterable[tuple[int, int]]) -> list[int]:
    """Ids and positions as one list of differences: short numbers take fewer bytes."""
    found: list[int] = []
    last_id = last_position = 0
    for number, position in flight:
        found += (number - last_id, position - last_position)
        last_id, last_position = number, position
    return found


def _pairs(steps: Sequence[int]) -> Iterator[tuple[int, int]]:
    number = position = 0
    for index in range(0, len(steps), 2):
        number += steps[index]
        position += steps[index + 1]
        yield number, position


def encode_note(kind: Kind, key: str, number: int, *arguments: Any) -> bytes:
    """Return note *number* about session *key*."""
    return bytes(msgpack.packb([kind, key, number, *arguments]))


def decode_note(note: bytes) -> tuple[Kind, str, int, list[Any]]:
    """Return the kind, the key, the number and the rest of *note*.

    Raises:
      StoreError: it is no such note.
    """
    try:
        kind, key, number, *arguments = msgpack.unpackb(note)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise StoreError(f"the note of {len(note)} bytes is not about a session; {error}") from error
    return kind, key, number, arguments


def encode_sent(first: int, positions: Sequence[int], end: int) -> list[Any]:
    """Return the arguments of a SENT note: messages at *positions* left under the ids from *first* on."""
    last = 0
    steps: list[int] = []
    for position in positions:
        steps.append(position - last)
        last = position
    return [first, steps, end]


def encode_whole(state: SessionState, bytes_max: int) -> list[bytes]:
    """Return notes that have all of *state*, each of *bytes_max* or less as far as one filter allows that."""
    number, fields = state.number, [state.ends_ms, *state.fields()]
    room = bytes_max - STATE_BYTES - len(state.key.encode()) - len(state.owner.encode()) - len(state.data)
    parts = list(_parts(state, room))
    notes = [encode_note(WHOLE, state.key, number, *fields, *parts[0])]
    return notes + [encode_note(MORE, state.key, number, *part) for part in parts[1:]]


def _parts(state: SessionState, room: int) -> Iterator[tuple[dict[str, bytes], list[int]]]:
    """Yield filters and flights, each part of about *room* bytes; one even where there are none."""
    filters: dict[str, bytes] = {}
    flight: list[tuple[int, int]] = []
    left = room
    for topic_filter, options in state.filters.items():
        size = filter_bytes(topic_filter, options)
        if size > left and filters:
            yield filters, []
            filters, left = {}, room
        filters[topic_filter] = options
        left -= size
    for each in state.flight.items():
        if left < FLIGHT_BYTES and (filters or flight):
            yield filters, flat(flight)
            filters, flight, left = {}, [], room
        flight.append(each)
        left -= FLIGHT_BYTES
    yield filters, flat(flight)
