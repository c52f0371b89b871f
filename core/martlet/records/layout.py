"""The byte layout of records, of segment fillers and of consume-queue entries; all offsets are defined here.

The layouts are RocketMQ's (store CommitLog.java, ConsumeQueue.java); consumers get records as they are in the
log. A record, all numbers big-endian, with two IPv4 hosts:

    at  bytes
     0  4   size of the whole record
     4  4   magic: V1, or V2 if the length of the topic is an i16
     8  4   CRC-32 of the body, without its highest bit
    12  4   queue id
    16  4   flag, set by the producer
    20  8   queue offset
    28  8   position in the log
    36  4   sysFlag
    40  8   born ms
    48  8   born host: address and an i32 port; with sysFlag 0x10 IPv6, 12 bytes more
    56  8   store ms
    64  8   store host; with sysFlag 0x20 IPv6, 12 bytes more
    72  4   reconsume times
    76  8   position of the prepared message
    84  4   bytes of the body, then the body
            bytes of the topic (1, in V2 2), then the topic
            bytes of the properties (2), then the properties

`RecordView` reads single fields and properties of a record without decoding the rest.
"""

from collections.abc import Callable, Iterator
from struct import Struct
from typing import Final, TypeAlias, TypeVar, final

from martlet.errors import CorruptRecord
from martlet.message import find_property

__all__ = [
    "AFTER_BORN",
    "AFTER_STORE",
    "BLANK_ENTRY",
    "BLANK_MAGIC",
    "BLANK_SIZE",
    "BORN_V6",
    "CODE",
    "CODE_AT",
    "ENTRY",
    "ENTRY_BYTES",
    "FILLER",
    "FILLER_BYTES",
    "FRONT_BYTES",
    "GROUP_MASK",
    "HEAD",
    "HEAD_BYTES",
    "I32",
    "I64",
    "IDENTITY",
    "MAGICS",
    "MAGIC_AT",
    "MAGIC_V1",
    "MAGIC_V2",
    "NARROW",
    "OUTLINE",
    "PLACE",
    "POSITION_SIZE",
    "PREPARED",
    "QUEUE_ID_AT",
    "QUEUE_OFFSET_AT",
    "RECORD_BYTES_MAX",
    "RECORD_BYTES_MIN",
    "ROLLBACK",
    "SHORT",
    "START",
    "START_BYTES",
    "STORE_BITS",
    "STORE_MS_AT",
    "STORE_V6",
    "SYS_FLAG_AT",
    "TIMED_OUTLINE",
    "TOPIC_V1_BYTES_MAX",
    "TRANSACTION_MASK",
    "WIDE_HOSTS",
    "WIDE_HOST_BYTES",
    "Buffer",
    "Condition",
    "Dispatcher",
    "Find",
    "Predicate",
    "RecordView",
    "find_names",
    "name_of",
    "part_offsets",
    "property_count",
    "record_views",
    "with_reconsume_times",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")

# ---- records

MAGIC_V1: Final = 0xDAA320A7
MAGIC_V2: Final = 0xDAA320AB
BLANK_MAGIC: Final = 0xCBD43194
MAGICS: Final = frozenset((MAGIC_V1, MAGIC_V2))

# Bits of sysFlag.
BORN_V6: Final = 0x10
STORE_V6: Final = 0x20
WIDE_HOSTS: Final = BORN_V6 | STORE_V6
TRANSACTION_MASK: Final = 0xC
GROUP_MASK: Final = 0x60000000  # a record's place in an atomic group (atomic.py)
STORE_BITS: Final = WIDE_HOSTS | GROUP_MASK  # clients cannot set these
PREPARED: Final = 0x4
ROLLBACK: Final = 0xC

MAGIC_AT: Final = 4
BODY_CRC_AT: Final = 8
QUEUE_ID_AT: Final = 12
FLAG_AT: Final = 16
QUEUE_OFFSET_AT: Final = 20
POSITION_AT: Final = 28
SYS_FLAG_AT: Final = 36
BORN_MS_AT: Final = 40
BORN_HOST_AT: Final = 48
HOST_BYTES: Final = 8
WIDE_HOST_BYTES: Final = 12  # an IPv6 host is this much longer than an IPv4 one
# After one or two hosts, if these are IPv4.
STORE_MS_AT: Final = 56
STORE_HOST_AT: Final = 64
RECONSUME_TIMES_AT: Final = 72
PREPARED_POSITION_AT: Final = 76
BODY_BYTES_AT: Final = 84
HEAD_BYTES: Final = 88
# Leading bytes that contain the store time, for IPv4 and IPv6 born hosts.
FRONT_BYTES: Final = 76
# With empty body, topic and properties.
RECORD_BYTES_MIN: Final = 91
# With the longest body that `broker.message_bytes_max` allows, and the longest topic and properties.
RECORD_BYTES_MAX: Final = (128 << 20) + (1 << 17)
TOPIC_V1_BYTES_MAX: Final = 127

# size magic crc queue_id flag queue_offset position sys_flag born_ms born_host store_ms store_host
# reconsume_times prepared_position body_bytes; both hosts IPv4
HEAD: Final = Struct(">iIIiiqqiq8sq8siqi")
START: Final = Struct(">iIIiiqqiq")  # up to born_ms, the same for every record
START_BYTES: Final = BORN_HOST_AT
AFTER_BORN: Final = Struct(">q")  # store_ms
AFTER_STORE: Final = Struct(">iqi")  # reconsume_times prepared_position body_bytes
# size magic crc queue_id queue_offset position sys_flag store_ms body_bytes; both hosts IPv4
NARROW: Final = Struct(">iIIi4xqqi8x8xq8x4x8xi")
# size magic queue_id queue_offset sys_flag body_bytes; both hosts IPv4
OUTLINE: Final = Struct(">iI4xi4xq8xi44xi")
TIMED_OUTLINE: Final = Struct(">iI4xi4xq8xiq36xi")  # the same with born_ms, after sys_flag
PLACE: Final = Struct(">i16xqq")  # size queue_offset position
# queue_id queue_offset, from QUEUE_ID_AT on
IDENTITY: Final = Struct(">i4xq")
_PARTS: Final = Struct(">iI28xi44xi")  # size magic sys_flag body_bytes; both hosts IPv4
_NAMED: Final = Struct(">iI20xqi44xi")  # size magic position sys_flag body_bytes; both hosts IPv4
I32: Final = Struct(">i")
U32: Final = Struct(">I")
I64: Final = Struct(">q")
SHORT: Final = Struct(">h")  # the length of the properties, and of a V2 topic

FILLER: Final = Struct(">iI")  # up to the end of the segment, BLANK_MAGIC
FILLER_BYTES: Final = 8

# ---- entries of consume queues

ENTRY: Final = Struct(">qiq")  # position, size, tags code
ENTRY_BYTES: Final = 20
POSITION_SIZE: Final = Struct(">qi")
CODE: Final = Struct(">q")
CODE_AT: Final = 12
# The size in an entry of RocketMQ for an offset that has no message (ConsumeQueue.fillPreBlank).
BLANK_SIZE: Final = 0x7FFFFFFF
BLANK_ENTRY: Final = ENTRY.pack(0, BLANK_SIZE, 0)


def part_offsets(data: Buffer, start: int, end: int, magic: int, sys_flag: int) -> tuple[int, int, int] | None:
    """Return the indexes of body, topic and properties of the record ``data[start:end]``; None if they do not add up.

    The body ends before the length of the topic, the topic before the two bytes of the length of the properties, and
    the properties at *end*.
    """
    body_at = start + HEAD_BYTES
    if sys_flag & WIDE_HOSTS:
        body_at += (WIDE_HOST_BYTES if sys_flag & BORN_V6 else 0) + (WIDE_HOST_BYTES if sys_flag & STORE_V6 else 0)
    length_bytes = 2 if magic == MAGIC_V2 else 1
    if body_at + length_bytes + 2 > end:
        return None
    body_bytes: int = I32.unpack_from(data, body_at - 4)[0]
    topic_at = body_at + body_bytes + length_bytes
    if body_bytes < 0 or topic_at + 2 > end:
        return None
    topic_bytes: int = data[topic_at - 1] if length_bytes == 1 else SHORT.unpack_from(data, topic_at - 2)[0]
    properties_at = topic_at + topic_bytes + 2
    if topic_bytes < 0 or properties_at > end:
        return None
    if properties_at + SHORT.unpack_from(data, properties_at - 2)[0] != end:
        return None
    return body_at, topic_at, properties_at


def find_names(data: bytes, start: int, more: T, found: list[tuple[int, bytes, int, int, str, T]]) -> int:
    """Add log position, *data*, start, end, name (its tags) and *more* to *found* for each record from *start* on.

    The name is empty if the record has no tags. Returns the start of the first record that is not usual: one of another
    layout than V1 with IPv4 hosts, or with tags that are not UTF-8. Equal names that follow each other are one object.

    This takes a third of the time of `RecordView`; the reader of a topic's tail does it for each message. The native
    kernel has this function as well; see `martlet.runtime.native`.
    """
    unpack, find, rfind = _NAMED.unpack_from, data.find, data.rfind
    size, raw, name = len(data), b"", ""  # the tags and the name of the previous record
    last = size - RECORD_BYTES_MIN
    while start <= last:
        length, magic, position, sys_flag, body_bytes = unpack(data, start)
        end: int = start + length
        at: int = start + HEAD_BYTES + body_bytes + 1  # of the topic; its length is in the byte before
        if magic != MAGIC_V1 or sys_flag & WIDE_HOSTS or body_bytes < 0 or not at + 2 <= end <= size:
            break
        first = at + data[at - 1] + 2
        tags_at = rfind(b"TAGS\x01", first, end)
        if tags_at < 0:
            raw, name = b"", ""
        elif tags_at == first or data[tags_at - 1] == 2:
            stop = find(b"\x02", tags_at, end)
            tags = data[tags_at + 5 : stop if stop >= 0 else end]
            if tags != raw:
                try:
                    raw, name = tags, tags.decode()
                except UnicodeDecodeError:
                    break
        else:
            break
        found.append((position, data, start, end, name, more))
        start = end
    return start


def name_of(record: "RecordView") -> str:
    """Return the name of *record*, its tags; empty if it has no tags, or if they are not UTF-8."""
    try:
        return find_property(record.properties, b"TAGS").decode()
    except UnicodeDecodeError:
        return ""


def property_count(data: Buffer, start: int) -> int:
    """Return the number of properties of the record at *start*."""
    size, _, _, sys_flag, body_bytes = _NAMED.unpack_from(data, start)
    if sys_flag & WIDE_HOSTS or body_bytes < 0:
        return RecordView(data, start).properties.count(b"\x02")
    return bytes(data[start + HEAD_BYTES + body_bytes : start + size]).count(b"\x02")


@final
class RecordView:
    """One stored record; decodes fields and properties from *buffer* on access.

    The record begins at *start* and has been checked. The view keeps *buffer* alive, which may be a page of the log:
    copy every part that you keep for longer. `martlet.records.codec.decode_record` decodes a whole record.
    """

    __slots__ = ("_end", "_properties_at", "_text", "_topic_at", "buffer", "start")

    def __init__(self, buffer: Buffer, start: int = 0) -> None:
        self.buffer = buffer
        self.start = start
        # The index of the properties in `_text`; 0 until `_locate` has set it and the other three.
        self._properties_at = 0

    def __repr__(self) -> str:
        return f"<RecordView {self.topic}/{self.queue_id} {self.queue_offset} at {self.position}>"

    @property
    def size(self) -> int:
        """The size of the whole record in bytes."""
        size: int = I32.unpack_from(self.buffer, self.start)[0]
        return size

    @property
    def magic(self) -> int:
        magic: int = U32.unpack_from(self.buffer, self.start + MAGIC_AT)[0]
        return magic

    @property
    def body_crc(self) -> int:
        """The CRC-32 of the body, without its highest bit."""
        crc: int = U32.unpack_from(self.buffer, self.start + BODY_CRC_AT)[0]
        return crc

    @property
    def queue_id(self) -> int:
        queue_id: int = I32.unpack_from(self.buffer, self.start + QUEUE_ID_AT)[0]
        return queue_id

    @property
    def flag(self) -> int:
        flag: int = I32.unpack_from(self.buffer, self.start + FLAG_AT)[0]
        return flag

    @property
    def queue_offset(self) -> int:
        """The number of the message in its queue."""
        offset: int = I64.unpack_from(self.buffer, self.start + QUEUE_OFFSET_AT)[0]
        return offset

    @property
    def position(self) -> int:
        """The position of the record in the log."""
        position: int = I64.unpack_from(self.buffer, self.start + POSITION_AT)[0]
        return position

    @property
    def sys_flag(self) -> int:
        """RocketMQ's bits (MessageSysFlag); see `Message`."""
        sys_flag: int = I32.unpack_from(self.buffer, self.start + SYS_FLAG_AT)[0]
        return sys_flag

    @property
    def born_ms(self) -> int:
        """When the producer created the message, by its own clock."""
        born_ms: int = I64.unpack_from(self.buffer, self.start + BORN_MS_AT)[0]
        return born_ms

    @property
    def born_host(self) -> bytes:
        """The producer's address: 4 or 16 bytes and an i32 port."""
        at = self.start + BORN_HOST_AT
        return bytes(self.buffer[at : at + HOST_BYTES + self._born_extra()])

    @property
    def store_ms(self) -> int:
        """When the broker stored the message."""
        at = self.start + STORE_MS_AT + self._born_extra()
        store_ms: int = I64.unpack_from(self.buffer, at)[0]
        return store_ms

    @property
    def store_host(self) -> bytes:
        """The broker's address: 4 or 16 bytes and an i32 port."""
        sys_flag = self.sys_flag
        at = self.start + STORE_HOST_AT + self._born_extra()
        return bytes(self.buffer[at : at + HOST_BYTES + (WIDE_HOST_BYTES if sys_flag & STORE_V6 else 0)])

    @property
    def reconsume_times(self) -> int:
        """The number of times that consumers have sent the message back."""
        times: int = I32.unpack_from(self.buffer, self.start + RECONSUME_TIMES_AT + self._extra())[0]
        return times

    @property
    def prepared_position(self) -> int:
        """The log position of the prepared message that this message commits or rolls back."""
        position: int = I64.unpack_from(self.buffer, self.start + PREPARED_POSITION_AT + self._extra())[0]
        return position

    @property
    def body(self) -> Buffer:
        """The body as sent by the producer, possibly compressed: a slice of *buffer*."""
        at = self.start + HEAD_BYTES + self._extra()
        body_bytes: int = I32.unpack_from(self.buffer, at - 4)[0]
        return self.buffer[at : at + body_bytes]

    @property
    def topic_bytes(self) -> bytes:
        """The topic in UTF-8."""
        properties_at = self._properties_at or self._locate()
        return bytes(self._text[self._topic_at : properties_at - 2])

    @property
    def topic(self) -> str:
        return self.topic_bytes.decode("utf-8", "replace")

    @property
    def properties(self) -> bytes:
        """The encoded properties; `martlet.message.decode_properties` returns them as a mapping."""
        properties_at = self._properties_at or self._locate()
        return bytes(self._text[properties_at : self._end])

    def property(self, name: str | bytes) -> str | None:
        """Return the value of property *name*; None if it is absent or empty."""
        first = self._properties_at or self._locate()
        text, end = self._text, self._end
        key = (name if isinstance(name, bytes) else name.encode()) + b"\x01"
        at = text.rfind(key, first, end)
        if at > first and text[at - 1] != 2:  # the end of a longer name, or part of a value
            at = text.rfind(b"\x02" + key, first, end) + 1
            if not at:
                at = first if text.startswith(key, first) else -1
        if at < 0:
            return None
        at += len(key)
        stop = text.find(b"\x02", at, end)
        return text[at : stop if stop >= 0 else end].decode("utf-8", "replace") or None

    def _locate(self) -> int:
        """Find topic and properties; return the index of the properties in `_text`."""
        data, start = self.buffer, self.start
        size, magic, sys_flag, body_bytes = _PARTS.unpack_from(data, start)
        end: int = start + size
        if magic != MAGIC_V1 or sys_flag & WIDE_HOSTS or body_bytes < 0:
            return self._locate_any(size, magic, sys_flag)
        topic_at = start + HEAD_BYTES + 1 + body_bytes
        if isinstance(data, memoryview):  # a memoryview has no `find`
            data = bytes(data[topic_at - 1 : end])
            topic_at, end = 1, end - topic_at + 1
        if topic_at + 2 > end or end > len(data):
            raise self._corrupt()
        at: int = topic_at + 2 + data[topic_at - 1]
        if at > end:
            raise self._corrupt()
        self._text = data
        self._topic_at = topic_at
        self._properties_at = at
        self._end = end
        return at

    def _locate_any(self, size: int, magic: int, sys_flag: int) -> int:
        """As `_locate`, for records of any kind."""
        data = bytes(self.buffer[self.start : self.start + size])
        found = part_offsets(data, 0, size, magic, sys_flag) if len(data) == size else None
        if found is None:
            raise self._corrupt()
        self._text = data
        _, self._topic_at, self._properties_at = found
        self._end = size
        return self._properties_at

    def _corrupt(self) -> CorruptRecord:
        return CorruptRecord(self.position, f"says {self.size} bytes, but its parts do not add up to that")

    def _born_extra(self) -> int:
        return WIDE_HOST_BYTES if self.sys_flag & BORN_V6 else 0

    def _extra(self) -> int:
        sys_flag = self.sys_flag
        if not sys_flag & WIDE_HOSTS:
            return 0
        return (WIDE_HOST_BYTES if sys_flag & BORN_V6 else 0) + (WIDE_HOST_BYTES if sys_flag & STORE_V6 else 0)


# Called with each record that a subscriber might get; returns whether to deliver it. It must not keep the record after
# it returns, and may be called in a worker thread.
Predicate: TypeAlias = Callable[[RecordView], bool]
# Returns the code for the entry of a message, an i64, from its properties and its store time. A rebuild of the queue
# calls it again, so the result must depend only on these.
Dispatcher: TypeAlias = Callable[[bytes, int], int]
# Returns places in ``data[begin:end]``, ascending: at least one in each record that lies there and matches, except the
# last record. None if there are too many. Its time must be linear in the bytes.
Find: TypeAlias = Callable[[bytes | bytearray, int, int], list[int] | None]


@final
class Condition:
    """A predicate, with the data that a read needs to scan many records with it, and to stop in time.

    Args:
      holds: the predicate; it decides.
      cost: the time of one call, in units of one property's comparison (1 us).
      find: finds records that may match in raw bytes of the log, so that *holds* is not called with others.
      steps: one number, to which *holds* adds the steps (0.2 us) that a record takes beyond *cost*, *find* the steps
        that it takes beyond a search for a few bytes.
    """

    __slots__ = ("cost", "find", "holds", "steps")

    def __init__(
        self, holds: Predicate, cost: int = 1, find: Find | None = None, steps: list[int] | None = None
    ) -> None:
        self.holds = holds
        self.cost = cost
        self.find = find
        self.steps = steps

    def __call__(self, record: RecordView) -> bool:
        return self.holds(record)


def record_views(piece: Buffer) -> Iterator[RecordView]:
    """Yield a view of each record in *piece*, which contains contiguous whole records, like `ReadResult.pieces`."""
    at, end = 0, len(piece)
    while at < end:
        yield RecordView(piece, at)
        at += I32.unpack_from(piece, at)[0]


def with_reconsume_times(record: Buffer, times: int) -> bytes:
    """Return *record* with other reconsume times, at most 0x7FFFFFFF."""
    data = bytearray(record)
    sys_flag: int = I32.unpack_from(data, SYS_FLAG_AT)[0]
    wide = bool(sys_flag & BORN_V6) + bool(sys_flag & STORE_V6)
    I32.pack_into(data, RECONSUME_TIMES_AT + wide * WIDE_HOST_BYTES, min(times, 0x7FFF_FFFF))
    return bytes(data)
