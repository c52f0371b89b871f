r"""`Message`, which a client wants to store, and `Record`, a message in the log.

Both have their properties in the encoded form of RocketMQ (``key\x01value\x02`` repeated, UTF-8;
MessageDecoder.messageProperties2String), because most messages are passed through without decoding it.
"""

import re
from collections.abc import Mapping
from typing import Final, final

__all__ = [
    "CORRELATION_ID",
    "KEYS",
    "PROPERTIES_BYTES_MAX",
    "REPLY_TO",
    "TAGS",
    "UNIQ_KEY",
    "Message",
    "Placed",
    "Record",
    "decode_properties",
    "encode_properties",
    "find_property",
    "put_properties",
    "put_property",
    "remove_property",
]

TAGS: Final = "TAGS"
KEYS: Final = "KEYS"
UNIQ_KEY: Final = "UNIQ_KEY"
# Properties of a request and of its reply: the number of the request, and the address of the client that waits.
CORRELATION_ID: Final = "CORRELATION_ID"
REPLY_TO: Final = "REPLY_TO_CLIENT"

# The length of the property string is an i16 in the record.
PROPERTIES_BYTES_MAX: Final = 32767

NO_HOST: Final = b"\x00\x00\x00\x00\x00\x00\x00\x00"


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Return *properties* encoded; empty values are left out, because readers would drop them.

    Raises:
      ValueError: a key or value holds a separator (U+0001 or U+0002), or a key is empty.
    """
    parts: list[str] = []
    for key, value in properties.items():
        if not key or "\x01" in key or "\x02" in key or "\x01" in value or "\x02" in value:
            raise ValueError(f"property {key!r} is empty or holds U+0001 or U+0002; these separate properties")
        if value:
            parts.append(f"{key}\x01{value}\x02")
    return "".join(parts).encode()


def decode_properties(properties: bytes) -> dict[str, str]:
    """Return encoded *properties* by name; malformed fragments are ignored, as RocketMQ does."""
    decoded: dict[str, str] = {}
    for fragment in properties.decode("utf-8", "replace").split("\x02"):
        key, separator, value = fragment.partition("\x01")
        if separator and key and value:
            decoded[key] = value
    return decoded


def find_property(properties: bytes, name: bytes) -> bytes:
    """Return the value of *name* without decoding the rest, the last of several; empty when it is absent."""
    needle = name + b"\x01"
    at = properties.rfind(needle)
    if at < 0:
        return b""
    if at and properties[at - 1] != 2:  # the end of a longer name, or part of a value
        at = properties.rfind(b"\x02" + needle) + 1
        if not at and not properties.startswith(needle):
            return b""
    at += len(needle)
    end = properties.find(2, at)
    return properties[at:end] if end >= 0 else properties[at:]


def remove_property(properties: bytes, name: bytes) -> bytes:
    """Return *properties* without any value of *name*."""
    if properties.find(name + b"\x01") < 0:  # `in` raises and catches a TypeError internally
        return properties
    # All matches in one pass: a request may contain the property 100,000 times.
    return re.sub(b"(?<![^\x02])%b\x01[^\x02]*\x02?" % re.escape(name), b"", properties)


def put_property(properties: bytes, name: bytes, value: bytes) -> bytes:
    """Return *properties* with *name* set to *value*; an older value is replaced."""
    return put_properties(properties, {name: value})


def put_properties(properties: bytes, values: Mapping[bytes, bytes]) -> bytes:
    """Return *properties* with all of *values* by name, at the end; older values are replaced."""
    for name in values:
        properties = remove_property(properties, name)
    if properties and properties[-1] != 2:
        properties += b"\x02"
    return properties + b"".join([b"%b\x01%b\x02" % value for value in values.items()])


@final
class Message:
    """A message to be stored.

    ``queue_id`` -1 lets the broker choose. ``born_host`` is 4 or 16 address bytes and
    an i32 port, big-endian, as the record holds it. ``sys_flag`` bits are RocketMQ's
    (MessageSysFlag): 0x1 compressed body, 0x700 how it is compressed (0 or 0x300 ZLIB,
    0x100 LZ4, 0x200 ZSTD), 0xC transaction type, 0x10 IPv6 born host.
    """

    __slots__ = (
        "body",
        "born_host",
        "born_ms",
        "flag",
        "prepared_position",
        "properties",
        "queue_id",
        "reconsume_times",
        "sys_flag",
        "topic",
    )

    def __init__(
        self,
        topic: str,
        body: bytes,
        properties: bytes = b"",
        queue_id: int = -1,
        flag: int = 0,
        sys_flag: int = 0,
        born_ms: int = 0,
        born_host: bytes = NO_HOST,
        reconsume_times: int = 0,
        prepared_position: int = 0,
    ) -> None:
        self.topic = topic
        self.body = body
        self.properties = properties
        self.queue_id = queue_id
        self.flag = flag
        self.sys_flag = sys_flag
        self.born_ms = born_ms
        self.born_host = born_host
        self.reconsume_times = reconsume_times
        self.prepared_position = prepared_position

    def property(self, name: str) -> str:
        """The value of property *name*; empty when it is absent."""
        return find_property(self.properties, name.encode()).decode("utf-8", "replace")


@final
class Placed:
    """Where a message was stored: bytes ``position`` to ``end`` of the log, message ``queue_offset`` of its queue."""

    __slots__ = ("end", "position", "queue_id", "queue_offset", "store_ms")

    def __init__(self, queue_id: int, queue_offset: int, position: int, end: int, store_ms: int) -> None:
        self.queue_id = queue_id
        self.queue_offset = queue_offset
        self.position = position
        self.end = end
        self.store_ms = store_ms


@final
class Record:
    """A stored message: the record of ``size`` bytes at ``position`` of the log.

    Layout: RocketMQ store CommitLog.java, magic 0xDAA320A7 (V1) and 0xDAA320AB (V2).
    """

    __slots__ = (
        "body",
        "body_crc",
        "born_host",
        "born_ms",
        "flag",
        "position",
        "prepared_position",
        "properties",
        "queue_id",
        "queue_offset",
        "reconsume_times",
        "size",
        "store_host",
        "store_ms",
        "sys_flag",
        "topic",
    )

    def __init__(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        position: int,
        size: int,
        body: bytes,
        properties: bytes,
        flag: int,
        sys_flag: int,
        born_ms: int,
        born_host: bytes,
        store_ms: int,
        store_host: bytes,
        reconsume_times: int,
        prepared_position: int,
        body_crc: int,
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.queue_offset = queue_offset
        self.position = position
        self.size = size
        self.body = body
        self.properties = properties
        self.flag = flag
        self.sys_flag = sys_flag
        self.born_ms = born_ms
        self.born_host = born_host
        self.store_ms = store_ms
        self.store_host = store_host
        self.reconsume_times = reconsume_times
        self.prepared_position = prepared_position
        self.body_crc = body_crc

    def property(self, name: str) -> str:
        """The value of property *name*; empty when it is absent."""
        return find_property(self.properties, name.encode()).decode("utf-8", "replace")
