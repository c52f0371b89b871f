"""Delays retries in their queue: a record of ``%RETRY%<group>`` is not delivered before its delay is over.

This is a substitute while no plugin holds delayed messages. The delay follows from the record's own store time and
number of redeliveries, so nothing else is stored and a restart changes nothing. Records are delivered in queue order: a
delayed record holds back the following ones. They were stored later, so no record waits longer than the longest delay.
"""

from martlet.groups.strategy.redelivery import pause_ms
from martlet.records.layout import RecordView, record_views
from martlet.store import ReadResult

__all__ = ["hold_back"]


def hold_back(result: ReadResult, now_ms: int) -> int:
    """Cut *result* before the first delayed record; return its remaining delay in ms, 0 if there is none."""
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
    """Return the remaining delay of *record*; 0 if the clock was set back since it was stored."""
    age_ms = now_ms - record.store_ms
    pause = pause_ms(record.reconsume_times)
    return pause - age_ms if 0 <= age_ms < pause else 0
