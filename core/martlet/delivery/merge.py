"""Merges what was read of several queues into log order.

A reader of several queues reads each to another place. So it reads as much of each as the first messages in log order
need, and takes only what no unread record of another queue precedes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from struct import unpack
from typing import Final

from martlet.delivery.routing.division import Found
from martlet.records.layout import ENTRY_BYTES, RecordView, names_of
from martlet.store import Queue, ReadResult
from martlet.store.read.readers import Readers

__all__ = ["POSITION_OF", "first_counts", "merge"]

POSITION_OF: Final = itemgetter(0)  # of what `merge` found


def first_counts(readers: Readers, starts: Sequence[tuple[Queue, int]], count: int) -> list[int]:
    """Return how many of the first *count* messages from *starts* on, in log order, are in each queue.

    Publishers write many messages to one queue at a time, so equal shares would read messages before their turn in the
    order of the log. Shares are equal if some of the entries are on disk.
    """
    left = [readers.end_offset(queue) - start for queue, start in starts]
    if sum(left) <= count:
        return left
    if len(left) == 1:
        return [count]
    columns: list[Sequence[int]] = []
    for (queue, start), each in zip(starts, left, strict=True):
        column = _positions(readers, queue, start, min(each, count))
        if column is None:
            return [min(each, max(count // len(left), 1)) for each in left]
        columns.append(column)
    last = sorted(chain.from_iterable(columns))[count - 1]
    return [bisect_right(column, last) for column in columns]


def _positions(readers: Readers, queue: Queue, start: int, count: int) -> Sequence[int] | None:
    """Return the log positions of *count* messages from offset *start* on; None if they are on disk or have holes."""
    if start < queue.tail_offset:
        return None
    data = readers.queues.entries(queue, start, count)
    found: tuple[int, ...] = unpack(">" + "q12x" * (len(data) // ENTRY_BYTES), data)
    return found if len(found) == count and list(found) == sorted(found) else None


def merge(readers: Readers, results: dict[Queue, ReadResult], offsets: dict[Queue, int], readable: int) -> list[Found]:
    """Return the records of *results* in log order, and advance *offsets* over them.

    If a queue was not read to its end, later records of other queues are left for the next time. So are records that
    were not *readable* when the reads began, because another queue may have got records since.
    """
    found: list[Found] = []
    limit = readable - 1
    for queue, result in results.items():
        before = len(found)
        found += _records(queue, result)
        offsets[queue] = max(offsets[queue], result.next_offset)
        if result.next_offset < readers.end_offset(queue):
            following = readers.queues.position_now(queue, result.next_offset)  # -1 for a hole, or if it is on disk
            last = found[-1][0] if len(found) > before else 0
            limit = min(limit, following - 1 if following >= 0 else last)
    if len(results) > 1:
        found.sort(key=POSITION_OF)
    while found and found[-1][0] > limit:
        _, data, at, _, _, queue = found.pop()
        offsets[queue] = RecordView(data, at).queue_offset
    return found


def _records(queue: Queue, result: ReadResult) -> list[Found]:
    data = b"".join(result.pieces)  # with many names, each record is a piece
    return [(position, data, at, end, name, queue) for position, at, end, name in names_of(data)]
