"""Divides the ranges of a batch among Spark partitions: large queues are split, small ones share a partition.

A partition costs Spark 15 to 25 ms on two cores, so a partition per queue, as in Spark's Kafka source, would make each
micro-batch of a topic with 64 queues take a second or more.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final, TypeAlias, final

from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.read.tier_place import TierPlace

__all__ = ["ColdRows", "Piece", "Range", "gaps", "plan"]

# A queue, and the first offset and the end of some of its messages.
Piece: TypeAlias = tuple[MessageQueue, tuple[int, int]]

# Assumed size of a message if that of its queue's messages is unknown.
MESSAGE_BYTES: Final = 1024


@final
@dataclass(frozen=True, slots=True)
class ColdRows:
    """Where messages are in the table at *place*: in row group *group* of the file *path*, from its row *row* on.

    The path is relative to the table, and *file_bytes* is the size of the file. *last_position* is the position in the
    broker's log of the last message of the queue in the file: messages with the same offsets that were stored after it
    are those of a topic that was created again.
    """

    place: TierPlace
    path: str
    file_bytes: int
    group: int
    row: int
    last_position: int


@final
@dataclass(frozen=True, slots=True)
class Range:
    """The messages of *queue* from offset *start* up to *end*, exclusive; some in between may be missing.

    With *rows* they are read from a table of the cold tier, in which none is missing, and otherwise from the broker.
    """

    queue: MessageQueue
    start: int
    end: int
    message_bytes: int = MESSAGE_BYTES
    rows: ColdRows | None = None

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def bytes(self) -> int:
        """The estimated size of all messages of the range."""
        return len(self) * self.message_bytes

    def part(self, start: int, count: int) -> "Range":
        """Return the *count* messages from offset *start* on."""
        rows = None if self.rows is None else replace(self.rows, row=self.rows.row + start - self.start)
        return replace(self, start=start, end=start + count, rows=rows)


def gaps(wanted: Iterable[Piece], ranges: Iterable[Range]) -> Iterator[Range]:
    """Yield what *ranges*, of which those of a queue ascend, lack of the messages *wanted*."""
    by_queue: dict[MessageQueue, list[Range]] = {}
    for each in ranges:
        by_queue.setdefault(each.queue, []).append(each)
    for queue, (start, end) in wanted:
        for each in by_queue.get(queue, ()):
            if each.start >= end:
                break
            if each.start > start:
                yield Range(queue, start, each.start)
            start = max(start, each.end)
        if start < end:
            yield Range(queue, start, end)


def plan(
    ranges: Iterable[Range], *, target_bytes: int, records_max: int = 0, partitions_min: int = 0
) -> list[list[Range]]:
    """Return the ranges of each partition: about *target_bytes*, at most *records_max* messages (0: any number).

    There are at least *partitions_min* partitions, if there are as many messages. The ranges of a partition follow one
    another, and those of one queue ascend.
    """
    nonempty_ranges = [each for each in ranges if len(each)]
    total = sum(len(each) for each in nonempty_ranges)
    if not total:
        return []
    partition_count = max(ceil(sum(each.bytes for each in nonempty_ranges) / target_bytes), 1)
    if records_max:
        partition_count = max(partition_count, ceil(total / records_max))
    if partitions_min > partition_count:
        return _equal(nonempty_ranges, min(partitions_min, total))
    return _fill(nonempty_ranges, target_bytes, records_max)


def _fill(ranges: Sequence[Range], target_bytes: int, records_max: int) -> list[list[Range]]:
    """Fill one partition after the other, up to its limits."""
    found: list[list[Range]] = []
    room_bytes = room = 0
    for each in ranges:
        start = each.start
        while start < each.end:
            fits = max(room_bytes, 0) // each.message_bytes
            count = min(each.end - start, fits, room)
            divides = each.rows is not None and count < len(each) and bool(found) and bool(found[-1])
            if count <= 0 or (divides and start == each.start):  # two tasks would read the same row group
                found.append([])
                room_bytes = max(target_bytes, each.message_bytes)
                room = records_max or 1 << 62
                continue
            found[-1].append(each.part(start, count))
            start += count
            room -= count
            room_bytes -= count * each.message_bytes
    return found


def _equal(ranges: Sequence[Range], count: int) -> list[list[Range]]:
    """Return *count* partitions with the same number of messages, plus or minus one."""
    total = sum(len(each) for each in ranges)
    partitions: list[list[Range]] = []
    room = 0
    for each in ranges:
        start = each.start
        while start < each.end:
            if not room:
                room = total * (len(partitions) + 1) // count - total * len(partitions) // count
                partitions.append([])
            size = min(each.end - start, room)
            partitions[-1].append(each.part(start, size))
            start += size
            room -= size
    return partitions
