"""Retries wait in their queue: a record of ``%RETRY%<group>`` is not shown to the group before its pause is over.

A stop-gap until a timer holds delayed messages. When a record may be delivered follows from what
is stored in it, its store time and how often it failed, so nothing else is written and a restart
changes nothing. Records leave in queue order: one that must wait holds back those behind it, and
since they were stored later, none waits longer than the longest pause.
"""

from martlet.delivery.redelivery import pause_ms
from martlet.store import ReadResult
from martlet.store.layout import RecordView, record_views

__all__ = ["hold_back"]


def hold_back(result: ReadResult, now_ms: int) -> int:
    """Cut *result* before the first record that has to wait; return how many ms that is, 0 if none has to."""
    count = size = 0
    for index, piece in enumerate(result.pieces):
        for record in record_views(piece):
            wait_ms = _wait_ms(record, now_ms)
            if wait_ms:
                result.pieces[index:] = [piece[: record.start]] if record.start else []
                result.count, result.size, result.next_offset = count, size, record.queue_offset
                return wait_ms
            count += 1
            size += record.size
    return 0


def _wait_ms(record: RecordView, now_ms: int) -> int:
    """How long *record* has to wait; not at all where the clock was set back since it was stored."""
    age_ms = now_ms - record.store_ms
    pause = pause_ms(record.reconsume_times)
    return pause - age_ms if 0 <= age_ms < pause else 0
