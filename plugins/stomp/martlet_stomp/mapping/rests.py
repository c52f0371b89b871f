"""The inner loop of `encoding.py`: the rests of MESSAGE frames.

The native kernel has a function with the same name that does the same; see `martlet.runtime.native`.
"""

from collections.abc import Callable
from typing import TypeAlias

from martlet.records.codec import decode_record
from martlet.records.compression import COMPRESSED
from martlet.records.layout import HEAD_BYTES, MAGIC_V1, TIMED_OUTLINE, WIDE_HOSTS

__all__ = ["RestTerms", "message_rests"]

# What the same subscribers have in common: the template of a rest, whether it contains ``message-id``, the known header
# lines by the properties of records, the function that learns others, and the one that encodes other messages alone
# from queue id, queue offset, sysFlag, born time in ms, body and properties.
RestTerms: TypeAlias = tuple[
    bytes,
    bool,
    dict[bytes, bytes | None],
    Callable[[bytes], bytes | None],
    Callable[[int, int, int, int, bytes, bytes], bytes],
]


def message_rests(data: bytes, terms: RestTerms) -> list[bytes]:
    """Return the rests of the frames of the records in *data*; an empty one for a message that is not delivered."""
    template, with_id, table, learn, alone = terms
    rests: list[bytes] = []
    at, end, unpack, add = 0, len(data), TIMED_OUTLINE.unpack_from, rests.append
    while at < end:
        size, magic, queue_id, offset, sys_flag, born_ms, body_bytes = unpack(data, at)
        if sys_flag & WIDE_HOSTS or magic != MAGIC_V1:
            # with IPv6 hosts body_bytes has another offset, and in V2 the topic's length is wider
            record = decode_record(data, at, check_body=False)
            body, properties = record.body, record.properties
        else:
            body_end = at + HEAD_BYTES + body_bytes
            body, properties = data[at + HEAD_BYTES : body_end], data[body_end + 3 + data[body_end] : at + size]
        lines = table.get(properties)
        if lines is None and properties not in table and not sys_flag & COMPRESSED:
            lines = learn(properties)
        if lines is None or sys_flag & COMPRESSED:
            add(alone(queue_id, offset, sys_flag, born_ms, body, properties))
        elif with_id:
            add(template % (queue_id, offset, queue_id, offset, len(body), born_ms, lines, body))
        else:
            add(template % (queue_id, offset, len(body), born_ms, lines, body))
        at += size
    return rests
