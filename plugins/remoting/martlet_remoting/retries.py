"""Retries wait in their queue: a record of ``%RETRY%<group>`` is not shown to the group before its pause is over.

A stop-gap until a timer holds delayed messages. When a record may be delivered follows from what
is stored in it, its store time and how often it failed, so nothing else is written and a restart
changes nothing. Records leave in queue order: one that must wait holds back those behind it, and
since they were stored later, none waits longer than the longest pause.
"""

from struct import Struct
from typing import Final

from martlet.contracts import Buffer
from martlet.delivery.redelivery import pause_ms
from martlet.store import ReadResult
from martlet.store.codec import BORN_V6, STORE_V6

__all__ = ["hold_back"]

# Where a record has what is needed here; see store/codec.py.
OUTLINE: Final = Struct(">i16xq8xi")  # size, queue_offset, sys_flag
STORE_MS_AT: Final = 56  # behind the born host; an IPv6 address is 12 bytes longer
STORE_MS: Final = Struct(">q")
RECONSUME_TIMES_AT: Final = 16  # from the store time on
RECONSUME_TIMES: Final = Struct(">i")
WIDER_BYTES: Final = 12


def hold_back(result: ReadResult, now_ms: int) -> int:
    """Cut *result* before the first record that has to wait; return how many ms that is, 0 if none has to."""
    count = size = 0
    for index, piece in enumerate(result.pieces):
        at, end = 0, len(piece)
        while at < end:
            record_bytes, queue_offset, sys_flag = OUTLINE.unpack_from(piece, at)
            wait_ms = _wait_ms(piece, at, sys_flag, now_ms)
            if wait_ms:
                result.pieces[index:] = [piece[:at]] if at else []
                result.count, result.size, result.next_offset = count, size, queue_offset
                return wait_ms
            at += record_bytes
            count += 1
            size += record_bytes
    return 0


def _wait_ms(data: Buffer, at: int, sys_flag: int, now_ms: int) -> int:
    """How long the record at *at* has to wait; not at all where the clock was set back since it was stored."""
    at += STORE_MS_AT + (WIDER_BYTES if sys_flag & BORN_V6 else 0)
    age_ms: int = now_ms - STORE_MS.unpack_from(data, at)[0]
    at += RECONSUME_TIMES_AT + (WIDER_BYTES if sys_flag & STORE_V6 else 0)
    pause = pause_ms(RECONSUME_TIMES.unpack_from(data, at)[0])
    return pause - age_ms if 0 <= age_ms < pause else 0
