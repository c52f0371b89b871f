"""Finds damaged records among many that a search has passed over, without decoding them.

Their bodies need no check: damage that reaches from a body into the properties, in which a condition looks, also hits
the topic between them. Only records with a record CRC are checked whole.
"""

from struct import Struct
from typing import Final

from martlet.records.codec import RECORD_CRC_BYTES, RECORD_CRC_NAME, check_record
from martlet.records.layout import ENTRY, ENTRY_BYTES, HEAD_BYTES, MAGIC_AT, MAGIC_V1, POSITION_AT, Buffer
from martlet.store.disk.page_cache import Page

__all__ = ["are_intact", "find_damaged"]

SIZE_AT: Final = 8
SIZES: Final = Struct(">8xi8x")
BODY_BYTES: Final = Struct(f">{HEAD_BYTES - 4}xi")
MAGIC: Final = MAGIC_V1.to_bytes(4, "big")
# Bytes of a record's head, and where a queue entry has the same: the size, and the position.
COLUMNS: Final = (*((at, SIZE_AT + at) for at in range(4)), *((POSITION_AT + at, at) for at in range(8)))
TAIL_BYTES: Final = RECORD_CRC_BYTES
RECORD_CRC: Final = RECORD_CRC_NAME + b"\x01"


def are_intact(page: Buffer, starts: list[int], data: bytes, topic: bytes) -> bool:
    """Return whether at *starts* of *page* there are V1 records with the positions and sizes of the entries *data*.

    Looks at all of them together: at their sizes, magics, positions and topics, and at the ends of their properties.
    This takes 0.5 us for each, a fourth of `check_record`. False if one has a record CRC.
    """
    heads = b"".join([page[start : start + HEAD_BYTES] for start in starts])
    count = len(starts)
    if len(heads) != count * HEAD_BYTES:
        return False
    for at, byte in enumerate(MAGIC, MAGIC_AT):
        if heads[at::HEAD_BYTES].count(byte) != count:
            return False
    for at, entry_at in COLUMNS:
        if heads[at::HEAD_BYTES] != data[entry_at::ENTRY_BYTES]:
            return False
    mark = bytes((len(topic),)) + topic
    bodies = [start + HEAD_BYTES + size for start, (size,) in zip(starts, BODY_BYTES.iter_unpack(heads), strict=True)]
    if b"".join([page[at : at + len(mark)] for at in bodies]) != mark * count:
        return False
    ends = [start + size for start, (size,) in zip(starts, SIZES.iter_unpack(data), strict=True)]
    tails = b"".join([page[end - TAIL_BYTES : end] for end in ends])
    return len(tails) == count * TAIL_BYTES and 0 not in tails[TAIL_BYTES - 1 :: TAIL_BYTES] and RECORD_CRC not in tails


def find_damaged(page: Page, starts: list[int], data: bytes, topic: bytes) -> list[int]:
    """Return which of the records at *starts* of *page*, with the entries *data*, are damaged, or not of *topic*.

    An empty topic is any. This takes 2 us for each, and 6 us with record CRCs.
    """
    found: list[int] = []
    for index, (position, size, _) in enumerate(ENTRY.iter_unpack(data)):
        start = starts[index]
        if not check_record(page.view, start, start + size, position, topic or None):
            found.append(index)
    return found
