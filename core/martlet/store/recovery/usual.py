"""The inner loop of scans: usual records into their queues, or their properties into a list for the key index.

The native kernel has a function with the same name that does the same; see `martlet.runtime.native`.
"""

from typing import Final, TypeAlias

from martlet.records.codec import MARK_FIRST, MARK_LAST, RECORD_CRC_BYTES, record_crc_holds
from martlet.records.layout import (
    ENTRY,
    GROUP_MASK,
    HEAD_BYTES,
    MAGIC_V1,
    NARROW,
    RECORD_BYTES_MIN,
    TRANSACTION_MASK,
    WIDE_HOSTS,
)
from martlet.runtime.checksum import crc32
from martlet.store.format.atomic import FIRST
from martlet.store.format.light import MULTI
from martlet.store.format.tags import TagCodes
from martlet.store.keys.usual import Waiting
from martlet.store.queues.queues import Queue, Queues

__all__ = ["STORE_MS_END", "KnownQueues", "ScanTerms", "scan_usual"]

# The queues that a scan has looked up, by topic and queue id; None for one whose records it skips.
KnownQueues: TypeAlias = dict[bytes, dict[int, Queue | None]]
# What all records of a call have in common: the log position of the data; the position from which on records are
# ignored; the position from which on groups must be whole; the known queues; all queues; tag codes; and the list to
# which records with their properties are added instead of to their queues, or None.
ScanTerms: TypeAlias = tuple[int, int, int, KnownQueues, Queues, TagCodes, list[Waiting] | None]

# The year 6429. Without a record CRC, no checksum covers the store time: a later or negative one is damaged, and the
# time of the previous record is used.
STORE_MS_END: Final = 1 << 47
UNUSUAL_FLAGS: Final = WIDE_HOSTS | TRANSACTION_MASK
FIRST_FLAG: Final = FIRST << 24


def scan_usual(data: bytes, at: int, terms: ScanTerms) -> tuple[int, int, int]:
    """Add the first records of *data*, from index *at* on, to their queues; or to the list of the terms.

    Returns the index of the first record that was not added, the number of the others, and their newest store time.
    Stops before a record that is not usual: damaged, with an IPv6 host or a long topic, of a transaction, the first of
    a group, of a queue that is unknown or has a dispatcher, out of order, or of several queues.
    """
    base, limit, groups_from, known, queues, codes, keys = terms
    end, count, newest_ms = len(data), 0, 0
    last = min(end - RECORD_BYTES_MIN, limit - base - 1)
    unpack, pack, code_of = NARROW.unpack_from, ENTRY.pack, codes.of
    while at <= last:
        size, magic, crc, queue_id, offset, position, sys_flag, store_ms, body_bytes = unpack(data, at)
        record_end = at + size
        if (
            magic != MAGIC_V1
            or sys_flag & UNUSUAL_FLAGS
            or not 0 <= body_bytes <= size - RECORD_BYTES_MIN
            or record_end > end
            or position != base + at
            or (sys_flag & GROUP_MASK == FIRST_FLAG and position >= groups_from)
            or not 0 <= store_ms < STORE_MS_END
        ):
            break
        body_at = at + HEAD_BYTES
        topic_at = body_at + body_bytes
        topic_end = topic_at + 1 + data[topic_at]
        properties_at = topic_end + 2
        if (
            properties_at > record_end
            or properties_at + (data[topic_end] << 8 | data[topic_end + 1]) != record_end
            or crc32(data[body_at:topic_at]) & 0x7FFFFFFF != crc
            or (
                (data[record_end - 12] == MARK_LAST or data[record_end - RECORD_CRC_BYTES] == MARK_FIRST)
                and not record_crc_holds(data, at, record_end)
            )
        ):
            break
        of_topic = known.get(data[topic_at + 1 : topic_end])
        queue = of_topic.get(queue_id) if of_topic is not None else None
        properties = data[properties_at:record_end]
        if queue is None or queue.dispatcher is not None or 0 in properties:
            break
        if keys is not None:
            keys.append((queue, position, -1, store_ms, properties))
        elif offset == queue.next_offset and MULTI not in properties:
            queue.tail += pack(position, size, code_of(properties))
            queue.next_offset = offset + 1
            queue.last_end = position + size
            if not queue.dirty:
                queues.touch(queue)
        else:
            break
        count += 1
        at = record_end
        if store_ms > newest_ms:
            newest_ms = store_ms
    return at, count, newest_ms
