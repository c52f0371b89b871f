"""Merges the results of reads of several queues into log order.

Reads of several queues end at different places of the log. So the reader reads as much of each queue as the first
messages in log order need, and takes only records that no unread record of another queue precedes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from struct import unpack
from typing import Final

from martlet.delivery.routing.division import Found
from martlet.records.layout import ENTRY_BYTES, RecordView, find_names, name_of
from martlet.runtime.native import native
from martlet.store import Queue, ReadResult
from martlet.store.read.readers import Readers

__all__ = ["POSITION_OF", "first_counts", "merge", "records_in"]

POSITION_OF: Final = itemgetter(0)  # of what `merge` found


def first_counts(readers: Readers, starts: Sequence[tuple[Queue, int]], count: int) -> list[int]:
    """Return how the first *count* messages from *starts* on, in log order, are divided among the queues.

    Publishers write many messages to one queue at a time, so equal shares would read messages before their turn in the
    order of the log. Shares are equal if some of the entries are on disk.
    """
    unread = [readers.end_offset(queue) - start for queue, start in starts]
    if sum(unread) <= count:
        return unread
    if len(unread) == 1:
        return [count]
    columns: list[Sequence[int]] = []
    for (queue, start), unread_count in zip(starts, unread, strict=True):
        column = _positions(readers, queue, start, min(unread_count, count))
        if column is None:
            return [min(unread_count, max(count // len(unread), 1)) for unread_count in unread]
        columns.append(column)
    last = sorted(chain.from_iterable(columns))[count - 1]
    return [bisect_right(column, last) for column in columns]


def _positions(readers: Readers, queue: Queue, start: int, count: int) -> Sequence[int] | None:
    """Return the log positions of *count* messages from offset *start* on; None if they are on disk or have holes."""
    if start < queue.tail_offset:
        return None
    data = readers.queues.entries(queue, start, count)
    positions: tuple[int, ...] = unpack(">" + "q12x" * (len(data) // ENTRY_BYTES), data)
    return positions if len(positions) == count and list(positions) == sorted(positions) else None


def merge(readers: Readers, results: dict[Queue, ReadResult], offsets: dict[Queue, int], readable: int) -> list[Found]:
    """Return the records of *results* in log order, and advance *offsets* over them.

    If a queue was not read to its end, later records of other queues are left for the next call. So are records that
    were not *readable* when the reads began, because another queue may have got records since.
    """
    merged: list[Found] = []
    limit = readable - 1
    for queue, result in results.items():
        count_before = len(merged)
        merged += _records_of(queue, result)
        offsets[queue] = max(offsets[queue], result.next_offset)
        if result.next_offset < readers.end_offset(queue):
            following = readers.queues.position_now(queue, result.next_offset)  # -1 for a hole, or an entry on disk
            last = merged[-1][0] if len(merged) > count_before else 0
            limit = min(limit, following - 1 if following >= 0 else last)
    if len(results) > 1:
        merged.sort(key=POSITION_OF)
    while merged and merged[-1][0] > limit:
        _, data, start, _, _, queue = merged.pop()
        offsets[queue] = RecordView(data, start).queue_offset
    return merged


def _records_of(queue: Queue, result: ReadResult) -> list[Found]:
    return records_in(b"".join(result.pieces), queue)  # with many names, each record is a piece


def records_in(data: bytes, queue: Queue) -> list[Found]:
    """Return the records in *data*, which are of *queue*."""
    found: list[Found] = []
    find, start, size = native(find_names), 0, len(data)
    while (start := find(data, start, queue, found)) < size:
        record = RecordView(data, start)
        end = start + record.size
        found.append((record.position, data, start, end, name_of(record), queue))
        start = end
    return found
