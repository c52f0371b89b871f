"""Stored records for the tests: messages of one queue, as a broker sends them."""

from collections.abc import Sequence

from martlet.message import Message, encode_properties
from martlet.records.codec import encode_record
from martlet_columns.records import Records

HOST = bytes((127, 0, 0, 1, 0, 0, 0x2A, 0x9F))
STORE_MS = 1_700_000_001_000


def usual(number: int, body: bytes = b"body") -> Message:
    """A message as the Java client sends it."""
    properties = {"KEYS": f"key-{number}", "TAGS": f"T{number % 7}", "UNIQ_KEY": f"7F{number:030X}", "WAIT": "true"}
    born_ms = 1_700_000_000_000 + number
    return Message("Orders", body, encode_properties(properties), 3, number, 0, born_ms, HOST)


def stored(messages: Sequence[Message], *, first: int = 0, store_host: bytes = HOST) -> bytearray:
    """The records of *messages* in queue 3, from offset *first* on."""
    data = bytearray()
    for number, message in enumerate(messages):
        position = (1 << 33) + len(data)
        data += encode_record(message, 3, first + number, position, STORE_MS + number, store_host)
    return data


def records(messages: Sequence[Message], *, first: int = 0, store_host: bytes = HOST) -> Records:
    return Records(stored(messages, first=first, store_host=store_host))
