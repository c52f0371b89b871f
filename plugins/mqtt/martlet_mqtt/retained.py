"""Retained messages: the log position of the newest one of each name.

A retained message is stored twice, in one atomic group: in its topic, where everybody receives it once, and in
`RETAINED_TOPIC`, which no client can read. A projection of that topic alone knows the newest record of each name, so it
costs nothing for other messages, and retention copies records there without anybody receiving them again.
An empty payload removes the retained message of its name (MQTT 5 section 3.3.1.3). One that has expired is removed by a
sweep, and not copied by retention.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, final

import trio

from martlet.clock import Clock
from martlet.contracts import Buffer, RecordView
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.records.codec import decode_record
from martlet.state import NOTHING, Pages, pack_rows, unpack_rows
from martlet.steps import Pace, Steps, WaitingSteps, off_loop
from martlet.store import Store
from martlet.store.notes import OWN_PREFIX
from martlet.turns import Turns

from .retained_names import SortedNames

__all__ = ["RETAINED_TOPIC", "Retained", "size_of"]

RETAINED_TOPIC: Final = OWN_PREFIX + "mqtt.retained"
FORMAT: Final = 3
SIZE_BITS: Final = 32
SIZE_MASK: Final = (1 << SIZE_BITS) - 1
POSITION_MASK: Final = (1 << 64) - 1
EXPIRY_BITS: Final = 96
# Seconds between two looks for messages that have expired.
LOOK_S: Final = 60.0
LOOKS_A_SLICE: Final = 2000
DIGITS_MAX: Final = 19  # of a time in ms


@final
class Retained:
    """The projection (martlet.state.Projection): positions by name, and the names in order for wildcards."""

    name = "mqtt-retained"
    topics = frozenset((RETAINED_TOPIC,))

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        # By name, in the order of positions: when it expires in ms since 1970 (0 for never) shifted by EXPIRY_BITS, the
        # position shifted by SIZE_BITS, and the size, which is that of body and properties.
        self._entries: Pages[str, int] = Pages()
        self._names = SortedNames()
        self.bytes = 0
        self._expiring = 0  # how many of them expire
        self._copies: dict[int, int] = {}  # by the position of a copy that `roll` made, that of the message itself
        # The sizes of messages that were appended and are not applied yet, 0 for one that removes; where the last one
        # ends in the log; and how many messages and bytes are retained with these.
        self._ahead: dict[str, int] = {}
        self._ahead_end = 0
        self._planned = 0, 0

    def __len__(self) -> int:
        return len(self._entries)

    # limits

    def check_room(self, name: str, size: int, count_max: int, bytes_max: int) -> None:
        """Raise `Refused` (BUSY) unless a message of *size* for *name* may be retained; a smaller one always may."""
        text = self._excess(name, size, count_max, bytes_max)
        if text and self._ahead and self._store.readable >= self._ahead_end:
            self._ahead.clear()  # those that are left were never stored: a commit failed
            text = self._excess(name, size, count_max, bytes_max)
        if text:
            raise Refused(Reason.BUSY, text)

    def _excess(self, name: str, size: int, count_max: int, bytes_max: int) -> str:
        """Return which limit a message of *size* for *name* exceeds; empty for none."""
        before = self._size_of(name)
        count, total = self._with(name, size)
        if not before and count > count_max:
            return f"{count - 1} messages are retained; mqtt.retained_max is {count_max}"
        if size > before and total > bytes_max:
            text = f"the retained messages would take {total} bytes, {size} of them for {name[:80]!r}"
            return f"{text}; mqtt.retained_bytes_max is {bytes_max}"
        return ""

    def appended(self, name: str, size: int, end: int) -> None:
        """Note that a message of *size* for *name* is appended, with all that belongs to it before *end*."""
        self._planned = self._with(name, size)
        self._ahead[name] = size
        self._ahead_end = end

    def _with(self, name: str, size: int) -> tuple[int, int]:
        """Return how many messages and bytes are retained when one of *size* for *name* is."""
        count, total = self._planned if self._ahead else (len(self._entries), self.bytes)
        before = self._size_of(name)
        return count + bool(size) - bool(before), total + size - before

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def position(self, name: str) -> int:
        """Return the log position of the retained message of *name*; -1 if there is none."""
        entry = self._entries.get(name)
        return -1 if entry is None else _position(entry)

    def origin(self, position: int) -> int:
        """Return where the message at *position* was before retention copied it there without anybody receiving it."""
        return self._copies.get(position, position)

    def matches(self, topic_filter: str) -> Iterator[str]:
        """Yield the names with a retained message that *topic_filter* matches, while messages come and go.

        An empty text among them is no name: it gives the caller a chance to pause (`retained_names.py`).
        """
        if "+" not in topic_filter and "#" not in topic_filter:
            return iter((topic_filter,) if topic_filter in self._entries else ())
        return self._names.matches(topic_filter)

    def _size_of(self, name: str) -> int:
        """Return the size of the newest message of *name*, 0 for none."""
        size = self._ahead.get(name)
        return self._entries.get(name, 0) & SIZE_MASK if size is None else size

    # expiry

    async def run(self, turns: Turns) -> None:
        """Remove messages that have expired, until cancelled."""
        while True:
            await turns.finish(self.sweep())
            await trio.sleep(LOOK_S)

    def sweep(self) -> Steps[None]:
        """Remove the messages that have expired, in slices."""
        if not self._expiring:
            return
        pace = Pace(LOOKS_A_SLICE)
        for name in list(self._entries):
            self._drop_expired(name)
            if pace.is_over():
                yield

    def _drop_expired(self, name: str) -> bool:
        """Remove the message of *name* if it has expired; return whether it had."""
        entry = self._entries.get(name, 0)
        if not 0 < entry >> EXPIRY_BITS <= self._clock.now_ms():
            return False
        if self._ahead and name not in self._ahead:
            count, total = self._planned
            self._planned = count - 1, total - (entry & SIZE_MASK)
        self._remove(name)
        return True

    # the projection

    def apply(self, records: Sequence[RecordView]) -> None:
        for record in records:
            name = record.property("TAGS") or ""
            is_message = record.body and record.property("MQTT_PAYLOAD_BYTES") != "0"
            size = size_of(record.body, record.properties) if is_message else 0
            if is_message:
                self._put(name, record.position, size, _expires_ms(record))
            elif name in self._entries:
                self._remove(name)
            if self._ahead.get(name) == size:
                del self._ahead[name]

    def _put(self, name: str, position: int, size: int, expires_ms: int) -> None:
        before = self._entries.pop(name)  # so that it becomes the last one
        if before is None:
            self._names.add(name)
        else:
            self._uncount(before)
        self.bytes += size
        self._expiring += expires_ms > 0
        self._entries[name] = expires_ms << EXPIRY_BITS | position << SIZE_BITS | size

    def _remove(self, name: str) -> None:
        self._uncount(self._entries[name])
        del self._entries[name]
        self._names.remove(name)

    def _uncount(self, entry: int) -> None:
        self.bytes -= entry & SIZE_MASK
        self._copies.pop(_position(entry), None)
        self._expiring -= entry >> EXPIRY_BITS > 0

    def freeze(self) -> Steps[Sequence[bytes]]:
        entries = self._entries.freeze()
        rows = ((name, _position(entry), entry & SIZE_MASK, entry >> EXPIRY_BITS) for name, entry in entries)
        return pack_rows(FORMAT, rows)

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        self._clear()
        pace = Pace()
        for name, at, size, expires_ms in unpack_rows(FORMAT, data):
            if at >= first_position:
                self._put(name, at, size, expires_ms)
            if pace.is_over():
                yield

    def forget(self, topic: str) -> None:
        self._clear()

    def _clear(self) -> None:
        self._entries, self._names, self.bytes, self._expiring = Pages(), SortedNames(), 0, 0

    def floor(self) -> int:
        first = next(iter(self._entries), None)
        return NOTHING if first is None else self.position(first)

    def roll(self, start: int, end: int) -> WaitingSteps[None]:
        pace = Pace(LOOKS_A_SLICE)
        for name in list(self._entries):
            if pace.is_over():
                yield None
            if not start <= (at := self.position(name)) < end or self._drop_expired(name):
                continue
            data = yield from off_loop(partial(self._store.known_record, at))
            if data is not None and self.position(name) == at:
                record = decode_record(data)
                copy = Message(RETAINED_TOPIC, record.body, record.properties, 0, record.flag)
                copy.born_ms, copy.born_host = record.born_ms, record.born_host
                self._copies[self._store.append(copy, 0).position] = self.origin(at)


def _position(entry: int) -> int:
    return entry >> SIZE_BITS & POSITION_MASK


def _expires_ms(record: RecordView) -> int:
    text = record.property("EXPIRES_MS") or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < DIGITS_MAX else 0


def size_of(body: Buffer, properties: Buffer) -> int:
    """Return how many bytes of ``mqtt.retained_bytes_max`` a message takes."""
    return len(body) + len(properties)
