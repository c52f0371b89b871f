"""Messages that take long to encode: a turn of the event loop encodes few of them, whatever their size.

RocketMQ's producers compress large bodies, and subscribers of other protocols get them decompressed. A body of 4 KiB
may expand to 4 MiB. And the 32 KiB of properties of a message can be 8,000, each of which takes 2 to 3 us to encode. So
the size of a read says nothing about the work. Therefore a read ends after the first compressed body, and once its
messages have many properties; a run has no other message beside a compressed one, and few messages with many
properties; and a cursor returns one such run at a time: the output that a subscriber has not read yet then counts
before the next run is encoded.
"""

from struct import Struct
from typing import Final

from martlet.contracts import Buffer
from martlet.records.compression import COMPRESSED
from martlet.records.layout import SYS_FLAG_AT, property_count
from martlet.runtime.native import native
from martlet.store import ReadResult

__all__ = [
    "COMPRESSION_AT",
    "LONG_BYTES",
    "PROPERTIES_MAX",
    "SIZE_FLAG_BODY",
    "USUAL_BYTES",
    "cheap_records",
    "cut_after_costly",
    "property_cost",
]

# Index in a record of the byte with the flag COMPRESSED.
COMPRESSION_AT: Final = SYS_FLAG_AT + 3
# Properties of messages that are encoded together, at most, beyond those that every message may have.
PROPERTIES_MAX: Final = 1024
PROPERTIES_FREE: Final = 16
# A record with fewer bytes, without its body, has few properties; a record with more than LONG_BYTES may have many.
USUAL_BYTES: Final = 256
LONG_BYTES: Final = 1024
# For up to this many records, looking up the kernel's function takes longer than it saves.
FEW: Final = 16
# A record's size, its flags, and at byte 84 the size of its body if both hosts are IPv4.
SIZE_FLAG_BODY: Final = Struct(f">i{SYS_FLAG_AT - 4}xi{84 - SYS_FLAG_AT - 4}xi")


def property_cost(data: Buffer, start: int) -> int:
    """Return the number of properties, beyond the usual ones, of the record at *start*."""
    return max(property_count(data, start) - PROPERTIES_FREE, 0)


def cut_after_costly(result: ReadResult) -> None:
    """Keep only the messages of *result* up to the first compressed one, or until they have many properties."""
    skip_cheap = native(cheap_records) if result.count > FEW else cheap_records
    count, cost = 0, 0
    for piece in result.pieces:
        start, end = 0, len(piece)
        while start < end:
            cheap_count, start = skip_cheap(piece, start)
            count += cheap_count
            if start >= end:
                break
            count += 1
            size, sys_flag, _ = SIZE_FLAG_BODY.unpack_from(piece, start)
            cost += property_cost(piece, start)
            if sys_flag & COMPRESSED or cost > PROPERTIES_MAX:
                result.cut(count)
                return
            start += size


def cheap_records(records: Buffer, start: int) -> tuple[int, int]:
    """Return how many of *records* from *start* on are not compressed and have few properties, and where they end.

    The native kernel has this function as well; see `martlet.runtime.native`.
    """
    count, end, unpack = 0, len(records), SIZE_FLAG_BODY.unpack_from
    while start < end:
        size, sys_flag, body_bytes = unpack(records, start)
        if sys_flag & COMPRESSED or not 0 <= size - body_bytes <= USUAL_BYTES:
            break
        count += 1
        start += size
    return count, start
