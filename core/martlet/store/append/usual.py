"""The inner loop of appends: usual messages, of one call, into the end of the log and into their queues.

A usual message fits into the page at the end of the log and into the limits, has IPv4 hosts, is in a queue of the usual
kind, and is no prepared message. Its properties do not end with a record CRC, and contain, which is looked for only if
*is_odd*, no zero byte and no light queues.

The native kernel has `put_usual` and `measure_usual` as well; see `martlet.runtime.native`.
"""

from collections.abc import Sequence
from typing import Final, TypeAlias

from martlet.message import PROPERTIES_BYTES_MAX
from martlet.records.codec import (
    RECORD_CRC_BYTES,
    RECORD_CRC_NAME,
    RECORD_CRC_ROOM,
    has_record_crc,
    may_have_record_crc,
    with_room_for_record_crc,
    write_record_crc,
)
from martlet.records.layout import ENTRY, HEAD, HEAD_BYTES, MAGIC_V1, PREPARED, SHORT, STORE_BITS
from martlet.runtime.checksum import crc32_each
from martlet.store.append.committer import Appended
from martlet.store.append.items import AppendItem, AppendResult, body_of, properties_of
from martlet.store.disk.page_cache import LogWriter
from martlet.store.format.light import MULTI
from martlet.store.queues.queues import Queues

__all__ = ["Terms", "measure_usual", "put_usual"]

ENTRY_PACK: Final = ENTRY.pack
HEAD_PACK: Final = HEAD.pack_into
SHORT_PACK: Final = SHORT.pack
# Client flags that are kept; the store sets the others itself.
KEPT_FLAGS: Final = ~STORE_BITS


# Shared by all messages of a call: the end of the log, the queues, the messages that wait for the commit,
# the result, the broker's address, the store time, the longest body, whether properties may be odd, whether each record
# gets a record CRC, and the bits of sysFlag for each message of an atomic group.
Terms: TypeAlias = tuple[LogWriter, Queues, list[Appended], AppendResult, bytes, int, int, bool, bool, Sequence[int]]


def put_usual(items: Sequence[AppendItem], done: int, terms: Terms) -> int:
    """Append *items* from index *done* on, up to the first that is not usual; return the index of that one."""
    count = 1 if done else len(items)  # after an item that was not usual, there are probably more
    while done < len(items):
        part = items[done : done + count]
        wanted, done = done + len(part), _put_part(part, crc32_each(map(body_of, part)), terms)
        if done < wanted:
            break
        count *= 4
    return done


def _put_part(items: Sequence[AppendItem], crcs: Sequence[int], terms: Terms) -> int:
    """Append the usual ones at the beginning of *items*, whose bodies have the CRCs *crcs*; return as `put_usual`."""
    tail, queues, pending, result, host, now, body_bytes_max, is_odd, record_crcs, marks = terms
    positions, ends, offsets = result.positions, result.ends, result.offsets
    for item, crc in zip(items, crcs, strict=True):
        queue, body, properties, code, flag, sys_flag, born_ms, born_host, reconsume_times, prepared_position = item
        if record_crcs and properties.find(RECORD_CRC_NAME) < 0:
            properties = with_room_for_record_crc(properties)
        body_bytes, properties_bytes, position = len(body), len(properties), tail.position
        size = queue.overhead + body_bytes + properties_bytes
        end = position + size
        if (
            end > tail.room
            or len(host) != 8
            or not queue.plain
            or len(born_host) != 8
            or sys_flag & PREPARED
            or body_bytes > body_bytes_max
            or properties_bytes > PROPERTIES_BYTES_MAX
            or (is_odd and (0 in properties or properties.find(MULTI) >= 0))
            or (record_crcs and not _has_room(properties))
            or (
                not record_crcs
                and may_have_record_crc(properties, properties_bytes)
                and has_record_crc(properties, properties_bytes)
            )
        ):
            break
        data, at, offset = tail.data, position - tail.page_base, queue.next_offset
        HEAD_PACK(
            data,
            at,
            size,
            MAGIC_V1,
            crc & 0x7FFFFFFF,
            queue.queue_id,
            flag,
            offset,
            position,
            sys_flag & KEPT_FLAGS | (marks[len(positions)] if marks else 0),
            born_ms,
            born_host,
            now,
            host,
            reconsume_times,
            prepared_position,
            body_bytes,
        )
        body_at, topic_at = at + HEAD_BYTES, at + HEAD_BYTES + body_bytes
        data[body_at:topic_at] = body
        data[topic_at : at + size] = b"%b%b%b" % (queue.topic_part, SHORT_PACK(properties_bytes), properties)
        if record_crcs:
            write_record_crc(data, at, at + size)
        queue.tail += ENTRY_PACK(position, size, code)
        queue.next_offset = offset + 1
        queue.put_bytes += size
        queue.last_end = tail.position = end
        if not queue.dirty:
            queues.touch(queue)
        pending.append((queue, position, end, now, properties))
        positions.append(position)
        ends.append(end)
        offsets.append(offset)
    return len(positions)


def measure_usual(items: Sequence[AppendItem], body_bytes_max: int) -> int:
    """Return the size of the records of *items*, whose hosts are IPv4; -1 if one may be unusual or is too large."""
    size = 0
    for queue, body, properties, _, _, _, _, born_host, _, _ in items:
        body_bytes, properties_bytes = len(body), len(properties)
        if (
            body_bytes > body_bytes_max
            or properties_bytes > PROPERTIES_BYTES_MAX
            or len(born_host) != 8
            or (may_have_record_crc(properties, properties_bytes) and has_record_crc(properties, properties_bytes))
        ):
            return -1
        size += queue.overhead + body_bytes + properties_bytes
    all_properties = list(map(properties_of, items))
    joined = b"".join(all_properties)
    # A name may begin in one message and end in the next.
    is_odd = 0 in joined or (joined.find(MULTI) >= 0 and any(each.find(MULTI) >= 0 for each in all_properties))
    return -1 if is_odd else size


def _has_room(properties: bytes) -> bool:
    """Return whether *properties* have room for a record CRC at the end, and no record CRC before."""
    at = properties.find(RECORD_CRC_NAME)
    return at == len(properties) - RECORD_CRC_BYTES and properties.endswith(RECORD_CRC_ROOM)
