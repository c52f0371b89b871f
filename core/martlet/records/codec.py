"""Encodes and decodes records, and computes Java's hash codes; pure. `layout.py` defines where the fields are.

A record may have a record CRC: its last property is then a CRC of everything before it (RocketMQ
enabledAppendPropCRC). The body's CRC, which every record has, covers only the body.
"""

from array import array
from operator import mul
from typing import Final

from martlet.errors import CorruptRecord
from martlet.message import Message, Record, remove_property
from martlet.records.layout import (
    AFTER_BORN,
    AFTER_STORE,
    BLANK_MAGIC,
    BORN_V6,
    FILLER,
    FILLER_BYTES,
    MAGIC_V1,
    MAGIC_V2,
    MAGICS,
    RECORD_BYTES_MIN,
    SHORT,
    START,
    START_BYTES,
    STORE_BITS,
    STORE_V6,
    TOPIC_V1_BYTES_MAX,
    Buffer,
    part_offsets,
)
from martlet.runtime.checksum import crc32

__all__ = [
    "MARK_FIRST",
    "MARK_LAST",
    "RECORD_CRC_BYTES",
    "RECORD_CRC_NAME",
    "body_crc",
    "check_record",
    "decode_record",
    "decode_records",
    "encode_filler",
    "encode_record",
    "has_record_crc",
    "hash_code",
    "key_hash",
    "may_have_record_crc",
    "record_crc_holds",
    "record_size",
    "tags_code",
    "with_room_for_record_crc",
    "without_record_crc",
    "write_record_crc",
]

RECORD_CRC_NAME: Final = b"__CRC32#"
RECORD_CRC_BYTES: Final = 20  # the name, 0x01, ten digits, lowest first, 0x02
RECORD_CRC_MARK: Final = int.from_bytes(RECORD_CRC_NAME + b"\x01\x02", "big")
# A single flipped bit leaves at least one of these two bytes intact at its distance from the end.
MARK_FIRST: Final = RECORD_CRC_NAME[0]
MARK_LAST: Final = 1


def body_crc(body: Buffer) -> int:
    """Return the CRC that records and all clients use: CRC-32 without its highest bit."""
    return crc32(body) & 0x7FFFFFFF


def _record_crc_property(crc: int) -> bytes:
    return b"%b\x01%b\x02" % (RECORD_CRC_NAME, (b"%010d" % crc)[::-1])


RECORD_CRC_ROOM: Final = _record_crc_property(0)


def write_record_crc(data: bytearray, start: int, end: int) -> None:
    """Fill in the record CRC of ``data[start:end]``, whose properties end with room for it."""
    at = end - RECORD_CRC_BYTES
    data[at:end] = _record_crc_property(body_crc(memoryview(data)[start:at]))


def may_have_record_crc(data: Buffer, end: int) -> bool:
    """Return whether *data* may have a record CRC before *end*: a quick look at two bytes."""
    return end >= RECORD_CRC_BYTES and (data[end - 12] == MARK_LAST or data[end - RECORD_CRC_BYTES] == MARK_FIRST)


def has_record_crc(data: Buffer, end: int) -> bool:
    """Return whether the name of a record CRC, possibly with one flipped bit, precedes *end*."""
    if not may_have_record_crc(data, end):
        return False
    found = bytes(data[end - RECORD_CRC_BYTES : end - 11]) + bytes(data[end - 1 : end])
    mark = int.from_bytes(found, "big") ^ RECORD_CRC_MARK
    return not mark & (mark - 1)


def record_crc_holds(data: Buffer, start: int, end: int) -> bool:
    """Return whether the record ``data[start:end]`` has no record CRC, or a correct one."""
    if not has_record_crc(data, end):
        return True
    at = end - RECORD_CRC_BYTES
    return data[at:end] == _record_crc_property(body_crc(memoryview(data)[start:at]))


def with_room_for_record_crc(properties: bytes) -> bytes:
    """Return *properties* without any record CRC, and with room for a new one at the end."""
    properties = remove_property(properties, RECORD_CRC_NAME)
    if properties and properties[-1] != 2:
        properties += b"\x02"
    return properties + RECORD_CRC_ROOM


def without_record_crc(properties: bytes) -> bytes:
    """Return *properties* without the record CRC of another record, which readers would take for this record's."""
    properties = remove_property(properties, RECORD_CRC_NAME)
    return properties + b"\x02" if has_record_crc(properties, len(properties)) else properties


def record_size(message: Message, topic: bytes, store_host: bytes) -> int:
    """Return the size of *message* in the log."""
    wide = len(topic) > TOPIC_V1_BYTES_MAX
    hosts = len(message.born_host) + len(store_host) - 16
    return RECORD_BYTES_MIN + wide + hosts + len(topic) + len(message.body) + len(message.properties)


def encode_record(
    message: Message, queue_id: int, queue_offset: int, position: int, store_ms: int, store_host: bytes
) -> bytes:
    """Return the record of *message* for *position* of the log; V2 only if the topic is too long for V1."""
    topic = message.topic.encode()
    body = message.body
    wide = len(topic) > TOPIC_V1_BYTES_MAX
    flags = message.sys_flag & ~STORE_BITS
    flags |= BORN_V6 if len(message.born_host) == 20 else 0
    flags |= STORE_V6 if len(store_host) == 20 else 0
    return b"".join(
        (
            START.pack(
                record_size(message, topic, store_host),
                MAGIC_V2 if wide else MAGIC_V1,
                body_crc(body),
                queue_id,
                message.flag,
                queue_offset,
                position,
                flags,
                message.born_ms,
            ),
            message.born_host,
            AFTER_BORN.pack(store_ms),
            store_host,
            AFTER_STORE.pack(message.reconsume_times, message.prepared_position, len(body)),
            body,
            SHORT.pack(len(topic)) if wide else bytes((len(topic),)),
            topic,
            SHORT.pack(len(message.properties)),
            message.properties,
        )
    )


def encode_filler(remaining: int) -> bytes:
    """Return the mark for the end of a segment: the *remaining* bytes up to its end hold no record."""
    return FILLER.pack(remaining, BLANK_MAGIC)


def decode_record(
    data: Buffer, start: int = 0, position_check: int | None = None, *, check_body: bool = True
) -> Record:
    """Return the record that begins at *start* of *data*.

    Args:
      position_check: the log position that the record must contain; None accepts any.
      check_body: check the CRCs too; lengths are always checked.

    Raises:
      CorruptRecord: the bytes are not an intact record; the text says why.
    """
    where = start if position_check is None else position_check
    if len(data) - start < RECORD_BYTES_MIN:
        raise CorruptRecord(where, f"has {len(data) - start} bytes; a record has at least {RECORD_BYTES_MIN}")
    size, magic, crc, queue_id, flag, queue_offset, position, sys_flag, born_ms = START.unpack_from(data, start)
    if magic != MAGIC_V1 and magic != MAGIC_V2:
        raise CorruptRecord(where, f"has magic 0x{magic:08X}; expected 0x{MAGIC_V1:08X} or 0x{MAGIC_V2:08X}")
    if size < RECORD_BYTES_MIN or start + size > len(data):
        raise CorruptRecord(where, f"says {size} bytes; {len(data) - start} are there")
    if position_check is not None and position != position_check:
        raise CorruptRecord(where, f"says it is at position {position}")
    end = start + size
    at = start + START_BYTES
    host_end = at + (20 if sys_flag & BORN_V6 else 8)
    born_host = bytes(data[at:host_end])
    at = host_end + 8
    host_end = at + (20 if sys_flag & STORE_V6 else 8)
    wide = magic == MAGIC_V2
    body_at = host_end + 16
    if body_at + 3 + wide > end:
        raise CorruptRecord(where, f"says {size} bytes, less than its own header")
    (store_ms,) = AFTER_BORN.unpack_from(data, at - 8)
    reconsume_times, prepared_position, body_bytes = AFTER_STORE.unpack_from(data, host_end)
    topic_at = body_at + body_bytes
    if body_bytes < 0 or topic_at + 3 + wide > end:
        raise CorruptRecord(where, f"says a body of {body_bytes} bytes in a record of {size}")
    body = bytes(data[body_at:topic_at])
    topic_bytes = SHORT.unpack_from(data, topic_at)[0] if wide else data[topic_at]
    topic_at += 1 + wide
    properties_at = topic_at + topic_bytes
    if topic_bytes < 0 or properties_at + 2 > end:
        raise CorruptRecord(where, f"says a topic of {topic_bytes} bytes in a record of {size}")
    if properties_at + 2 + SHORT.unpack_from(data, properties_at)[0] != end:
        raise CorruptRecord(where, f"says {size} bytes, but its parts do not add up to that")
    if check_body:
        _check_crcs(data, start, end, body, crc, where)
    try:
        topic = str(data[topic_at:properties_at], "utf-8")
    except UnicodeDecodeError as error:
        raise CorruptRecord(where, "has a topic that is not UTF-8") from error
    return Record(
        topic,
        queue_id,
        queue_offset,
        position,
        size,
        body,
        bytes(data[properties_at + 2 : end]),
        flag,
        sys_flag,
        born_ms,
        born_host,
        store_ms,
        bytes(data[at:host_end]),
        reconsume_times,
        prepared_position,
        crc,
    )


def _check_crcs(data: Buffer, start: int, end: int, body: bytes, crc: int, where: int) -> None:
    if body and body_crc(body) != crc:
        raise CorruptRecord(where, f"has a body whose CRC is not 0x{crc:08X}")
    if not record_crc_holds(data, start, end):
        raise CorruptRecord(where, "has a record CRC that does not match its content")


def decode_records(data: Buffer, *, check_body: bool = True) -> list[Record]:
    """Return the contiguous records in *data*, as in a pull answer.

    A filler ends a segment; the bytes that it spans are skipped.

    Raises:
      CorruptRecord: *data* contains anything but intact records and fillers; position counts from the start of *data*.
    """
    records: list[Record] = []
    at = 0
    end = len(data)
    while at < end:
        if end - at >= FILLER_BYTES:
            remaining, magic = FILLER.unpack_from(data, at)
            if magic == BLANK_MAGIC and remaining >= FILLER_BYTES:
                at += remaining
                continue
        record = decode_record(data, at, check_body=check_body)
        records.append(record)
        at += record.size
    return records


def check_record(data: Buffer, start: int, end: int, position: int, topic: bytes | None = None) -> bool:
    """Return whether ``data[start:end]`` is one intact record for *position*: lengths, magic, position and CRCs.

    No CRC covers the topic, so it is compared with *topic*; if that is None, it must at least be free of NULs. No CRC
    covers the properties either: they must not end in a NUL, as they do if their end was never written.
    """
    size = end - start
    if size < RECORD_BYTES_MIN or end > len(data):
        return False
    said, magic, crc, _, _, _, at, sys_flag, _ = START.unpack_from(data, start)
    if said != size or at != position or magic not in MAGICS:
        return False
    parts = part_offsets(data, start, end, magic, sys_flag)
    if parts is None:
        return False
    body_at, topic_at, properties_at = parts
    said_topic = bytes(data[topic_at : properties_at - 2])
    if (0 in said_topic) if topic is None else (said_topic != topic):
        return False
    if data[end - 1] == 0 and properties_at < end:
        return False
    body_end = topic_at - (2 if magic == MAGIC_V2 else 1)
    if body_end > body_at and crc32(memoryview(data)[body_at:body_end]) & 0x7FFFFFFF != crc:
        return False
    return record_crc_holds(data, start, end)


def _powers(count: int) -> tuple[int, ...]:
    found = [1]
    for _ in range(count - 1):
        found.append(found[-1] * 31 & 0xFFFFFFFF)
    return tuple(reversed(found))


POWERS: Final = _powers(256)
# POWERS_OF[n]: the powers of 31 for a text of n characters, highest first.
POWERS_OF: Final = tuple(POWERS[256 - n :] for n in range(257))


def hash_code(text: bytes) -> int:
    """Return Java's String.hashCode() of UTF-8 *text* (over its UTF-16 units), as an unsigned 32-bit number."""
    if not text.isascii():
        units = array("H", text.decode("utf-8", "replace").encode("utf-16-le"))
        return _hash_long(units)
    size = len(text)
    if size > 256:
        return _hash_long(text)
    code: int = sum(map(mul, text, POWERS_OF[size]))
    return code & 0xFFFFFFFF


def _hash_long(units: "bytes | array[int]") -> int:
    code = 0
    for unit in units:
        code = (code * 31 + unit) & 0xFFFFFFFF
    return code


def tags_code(tags: bytes | str) -> int:
    """Return the code of a TAGS property for a consume-queue entry: Java's hash code, signed; 0 without tags."""
    code = hash_code(tags.encode("utf-8", "surrogatepass") if isinstance(tags, str) else tags)
    return code - 0x1_0000_0000 if code & 0x80000000 else code


def key_hash(topic: str, key: bytes) -> int:
    """Return the hash of *key* of *topic* in the key index: the hash code's magnitude; 0 for -2^31, which has none."""
    code = hash_code(b"%b#%b" % (topic.encode(), key))
    if code & 0x80000000:
        code = 0x1_0000_0000 - code
    return 0 if code == 0x80000000 else code
