"""Retained messages: the log position of the newest one of each name.

A retained message is stored twice, in one atomic group: in its topic, where subscribers receive it once, and in
`RETAINED_TOPIC`, which no client can read. A projection of `RETAINED_TOPIC` alone holds the newest record of each name.
So other messages cost nothing, and retention can copy records there without delivering them again.
An empty payload removes the retained message of its name (MQTT 5 section 3.3.1.3). A sweep removes expired messages;
retention does not copy them.

A copy must neither replace a newer message nor bring back a removed one, so retention makes none while the log has a
newer record of the name, applied or not. A copy's prepared position is the position at which its client published it.
"""

from collections import deque
from collections.abc import Container, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, final

import trio

from martlet.contracts import Buffer, RecordView
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.records.codec import decode_record
from martlet.runtime.clock import Clock
from martlet.runtime.steps import Budget, Steps, WaitingSteps, off_loop
from martlet.runtime.turns import Turns
from martlet.state import NOTHING, Pages, pack_rows, unpack_rows
from martlet.store import Store
from martlet.store.format.notes import OWN_PREFIX
from martlet_mqtt.shared.retained_names import SortedNames

__all__ = ["RETAINED_TOPIC", "Ahead", "Appended", "Retained", "size_of"]

RETAINED_TOPIC: Final = OWN_PREFIX + "mqtt.retained"
FORMAT: Final = 4
SIZE_BITS: Final = 32
POSITION_BITS: Final = 64
SIZE_MASK: Final = (1 << SIZE_BITS) - 1
POSITION_MASK: Final = (1 << POSITION_BITS) - 1
ORIGIN_SHIFT: Final = SIZE_BITS + POSITION_BITS
EXPIRY_SHIFT: Final = ORIGIN_SHIFT + POSITION_BITS
# Seconds between two sweeps for expired messages.
LOOK_S: Final = 60.0
LOOK_US: Final = 0.5
DIGITS_MAX: Final = 19  # of a time in ms


@final
class Appended(NamedTuple):
    """A message appended to `RETAINED_TOPIC`.

    ``offset`` counts in its queue, ``end`` is the log position at which its atomic group ends, and ``size`` is in
    bytes, 0 if the message removes the retained one.
    """

    offset: int
    end: int
    size: int


@final
class Ahead:
    """Messages appended but not yet applied to the projection, by name and in the order of the log.

    A failed commit loses its messages, and later messages get their offsets.
    """

    __slots__ = ("_by_name", "_names")

    def __init__(self) -> None:
        self._by_name: dict[str, deque[Appended]] = {}
        self._names: deque[str] = deque()  # the name of each message, in order

    def __len__(self) -> int:
        return len(self._names)

    def newest(self, name: str) -> Appended | None:
        """Return the newest message of *name*; None if there is none."""
        messages = self._by_name.get(name)
        return messages[-1] if messages is not None else None

    def first(self) -> str:
        """Return the name of the oldest message. There must be one."""
        return self._names[0]

    def last(self) -> str:
        """Return the name of the newest message. There must be one."""
        return self._names[-1]

    def oldest_offset(self) -> int:
        """Return the offset of the oldest message. There must be one."""
        return self._by_name[self._names[0]][0].offset

    def newest_offset(self) -> int:
        """Return the offset of the newest message. There must be one."""
        return self._by_name[self._names[-1]][-1].offset

    def add(self, name: str, message: Appended) -> None:
        """Add *message*, the newest of all, for *name*."""
        self._by_name.setdefault(name, deque()).append(message)
        self._names.append(name)

    def drop_first(self) -> None:
        """Remove the oldest message, because it is applied."""
        name = self._names.popleft()
        messages = self._by_name[name]
        messages.popleft()
        if not messages:
            del self._by_name[name]

    def drop_last(self) -> None:
        """Remove the newest message, because its commit failed."""
        name = self._names.pop()
        messages = self._by_name[name]
        messages.pop()
        if not messages:
            del self._by_name[name]


class Entry(NamedTuple):
    """A retained message in the log.

    ``position`` is that of its record, ``origin`` the log position at which its client published it, ``size`` the bytes
    of body and properties, and ``expires_ms`` its expiry in ms since 1970, 0 for never.
    """

    position: int
    origin: int
    size: int
    expires_ms: int


@final
class Retained:
    """The projection (martlet.state.Projection): the newest message of each name."""

    name = "mqtt-retained"
    topics = frozenset((RETAINED_TOPIC,))

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._entries: Pages[str, int] = (
            Pages()
        )  # by name, in the order of positions, each packed into one number by `_pack`
        self._names = SortedNames()
        self.bytes = 0
        self._expiring = 0  # number of entries with an expiry
        # Messages not applied yet, and the count and bytes of retained messages once these are applied.
        self._ahead = Ahead()
        self._planned_count = 0
        self._planned_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    # limits

    def check_room(self, name: str, size: int, count_max: int, bytes_max: int) -> None:
        """Raise `Refused` (BUSY) unless a message of *size* for *name* may be retained.

        A message no larger than its predecessor is always accepted.
        """
        self._forget_lost(self._next_offset())
        size_before = self._newest_size(name)
        count, total = self._planned_count, self._planned_bytes + size - size_before
        if not size_before and count >= count_max:
            raise Refused(Reason.BUSY, f"{count} messages are retained; mqtt.retained_max is {count_max}")
        if size > size_before and total > bytes_max:
            text = f"the retained messages would take {total} bytes, {size} of them for {name[:80]!r}"
            raise Refused(Reason.BUSY, f"{text}; mqtt.retained_bytes_max is {bytes_max}")

    def appended(self, name: str, size: int, end: int) -> None:
        """Note that a message of *size* for *name* was just appended; its atomic group ends at log position *end*."""
        offset = self._next_offset() - 1
        self._forget_lost(offset)
        size_before = self._newest_size(name)
        self._ahead.add(name, Appended(offset, end, size))
        self._update_plan(name, size_before)

    def _next_offset(self) -> int:
        """Return the offset after the newest message that was appended."""
        queue = self._store.queues.find(RETAINED_TOPIC, 0)
        return queue.next_offset if queue is not None else 0

    def _forget_lost(self, offset: int) -> None:
        """Forget earlier messages at *offset* and above: their commit failed, and their offsets are free again."""
        ahead = self._ahead
        while ahead and ahead.newest_offset() >= offset:
            name = ahead.last()
            size_before = self._newest_size(name)
            ahead.drop_last()
            self._update_plan(name, size_before)

    def _forget_applied(self, offset: int) -> None:
        """Forget messages up to *offset*, inclusive: each is applied, or its record is damaged."""
        ahead = self._ahead
        while ahead and ahead.oldest_offset() <= offset:
            name = ahead.first()
            size_before = self._newest_size(name)
            ahead.drop_first()
            self._update_plan(name, size_before)

    def _update_plan(self, name: str, size_before: int) -> None:
        """Update the planned count and bytes after the newest size for *name* changed from *size_before* (0: none)."""
        size = self._newest_size(name)
        self._planned_count += bool(size) - bool(size_before)
        self._planned_bytes += size - size_before

    def _newest_size(self, name: str) -> int:
        """Return the size of the newest message of *name*, which may not be applied yet; 0 for none."""
        newest = self._ahead.newest(name)
        return self._entries.get(name, 0) & SIZE_MASK if newest is None else newest.size

    # retained messages

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def get(self, name: str) -> Entry | None:
        """Return the retained message of *name*; None if there is none."""
        entry = self._entries.get(name)
        return None if entry is None else _unpack(entry)

    def position(self, name: str) -> int:
        """Return the log position of the retained message of *name*; -1 if there is none."""
        entry = self._entries.get(name)
        return -1 if entry is None else _position(entry)

    def find_origins(self, origins: Container[int]) -> Steps[dict[int, str]]:
        """Return names by origin, for the retained messages whose origin is in *origins*; in slices."""
        names: dict[int, str] = {}
        budget = Budget(LOOK_US)
        for name in list(self._entries):
            entry = self.get(name)
            if entry is not None and entry.origin in origins:
                names[entry.origin] = name
            if budget.is_over():
                yield
        return names

    def may_match(self, topic_filter: str) -> bool:
        """Return False if *topic_filter* matches no name with a retained message, applied or not."""
        if _has_wildcards(topic_filter):
            return len(self._entries) + len(self._ahead) > 0
        return topic_filter in self._entries or self._ahead.newest(topic_filter) is not None

    def matches(self, topic_filter: str, after: str = "") -> Iterator[str]:
        """Yield the names after *after* that have a retained message and match *topic_filter*, in order.

        Messages may come and go meanwhile. An empty text is no name, but a chance for the caller to pause
        (`retained_names.py`).
        """
        if _has_wildcards(topic_filter):
            yield from self._names.matches(topic_filter, after)
        elif topic_filter in self._entries and topic_filter > after:
            yield topic_filter

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
        budget = Budget(LOOK_US)
        for name in list(self._entries):
            self._drop_expired(name)
            if budget.is_over():
                yield

    def _drop_expired(self, name: str) -> bool:
        """Remove the message of *name* if it has expired; return whether it had."""
        if not 0 < self._entries.get(name, 0) >> EXPIRY_SHIFT <= self._clock.now_ms():
            return False
        size_before = self._newest_size(name)
        self._remove(name)
        self._update_plan(name, size_before)
        return True

    # the projection

    def apply(self, records: Sequence[RecordView]) -> None:
        for record in records:
            name = record.property("TAGS") or ""
            self._forget_applied(record.queue_offset)
            size_before = self._newest_size(name)
            if record.body and record.property("MQTT_PAYLOAD_BYTES") != "0":
                origin, size = record.prepared_position or record.position, size_of(record.body, record.properties)
                self._put_entry(name, Entry(record.position, origin, size, _expires_ms(record)))
            elif name in self._entries:
                self._remove(name)
            self._update_plan(name, size_before)

    def _put_entry(self, name: str, entry: Entry) -> None:
        """Make *entry* the retained message of *name*, and the last one in the order of positions."""
        previous = self._entries.pop(name)  # added again below, so that it becomes the last one
        if previous is None:
            self._names.add(name)
        else:
            self._uncount(previous)
        self.bytes += entry.size
        self._expiring += entry.expires_ms > 0
        self._entries[name] = _pack(entry)

    def _remove(self, name: str) -> None:
        self._uncount(self._entries[name])
        del self._entries[name]
        self._names.remove(name)

    def _uncount(self, entry: int) -> None:
        self.bytes -= entry & SIZE_MASK
        self._expiring -= entry >> EXPIRY_SHIFT > 0

    def freeze(self) -> Steps[Sequence[bytes]]:
        return pack_rows(FORMAT, ((name, *_unpack(entry)) for name, entry in self._entries.freeze()))

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        self._clear()
        budget = Budget()
        for name, *values in unpack_rows(FORMAT, data):
            entry = Entry(*values)
            if entry.position >= first_position:
                self._put_entry(name, entry)
                self._update_plan(name, 0)
            if budget.is_over():
                yield

    def forget(self, topic: str) -> None:
        self._clear()

    def _clear(self) -> None:
        self._entries, self._names, self._ahead = Pages(), SortedNames(), Ahead()
        self.bytes = self._expiring = self._planned_count = self._planned_bytes = 0

    # retention

    def floor(self) -> int:
        first_name = next(iter(self._entries), None)
        return NOTHING if first_name is None else self.position(first_name)

    def roll(self, start: int, end: int) -> WaitingSteps[None]:
        budget = Budget(LOOK_US)
        for name in list(self._entries):
            if budget.is_over():
                yield None
            while start <= (at := self.position(name)) < end and not self._drop_expired(name):
                data = yield from off_loop(partial(self._store.lookup.known_record, at))
                if self.position(name) == at:
                    if data is not None and not self._is_replaced(name):
                        self._copy(name, data)
                    break

    def _is_replaced(self, name: str) -> bool:
        """Return whether the log has a newer message of *name* that is not applied yet; a copy must not follow it.

        Raises:
          Refused, StoreFailed: the commit of the newer message failed, so the answer is unknown.
        """
        self._forget_lost(self._next_offset())
        newest = self._ahead.newest(name)
        if newest is None:
            return False
        if newest.end > self._store.written:
            self._store.committer.commit_early()
        return True

    def _copy(self, name: str, data: bytes) -> None:
        entry = _unpack(self._entries[name])
        record = decode_record(data)
        copy = Message(RETAINED_TOPIC, record.body, record.properties, 0, record.flag, record.sys_flag)
        copy.born_ms, copy.born_host, copy.prepared_position = record.born_ms, record.born_host, entry.origin
        self._store.writer.append(copy, 0)


def _has_wildcards(topic_filter: str) -> bool:
    return "+" in topic_filter or "#" in topic_filter


def _pack(entry: Entry) -> int:
    position, origin, size, expires_ms = entry
    return expires_ms << EXPIRY_SHIFT | origin << ORIGIN_SHIFT | position << SIZE_BITS | size


def _unpack(entry: int) -> Entry:
    origin = entry >> ORIGIN_SHIFT & POSITION_MASK
    return Entry(_position(entry), origin, entry & SIZE_MASK, entry >> EXPIRY_SHIFT)


def _position(entry: int) -> int:
    return entry >> SIZE_BITS & POSITION_MASK


def _expires_ms(record: RecordView) -> int:
    text = record.property("EXPIRES_MS") or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < DIGITS_MAX else 0


def size_of(body: Buffer, properties: Buffer) -> int:
    """Return the bytes that a message takes of ``mqtt.retained_bytes_max``."""
    return len(body) + len(properties)
