"""Loads the consume queues of a store that RocketMQ wrote; their content is known only from their files.

They are checked against the log without reading it: records and fillers cover each segment without a gap, and each
record has one entry. If the entries of a segment do not cover it exactly, some are missing or wrong, and all queues are
rebuilt from the log. All queues are rebuilt as well if light queues may have been in use: the number of their entries
is known only from the records.
"""

import sys
from array import array
from bisect import bisect_left
from itertools import compress, pairwise
from operator import mul
from typing import Final, final

from martlet.records.layout import BLANK_MAGIC, BLANK_SIZE, ENTRY, ENTRY_BYTES, FILLER, FILLER_BYTES, START
from martlet.store.disk.segments import Segment, Segments
from martlet.store.format.atomic import NOWHERE
from martlet.store.format.light import is_light
from martlet.store.queues.queues import Queue, Queues, queue_ids

__all__ = ["ForeignQueues"]

# Entries to sum up in one step.
SUMMED_AT_ONCE: Final = 50_000
# RocketMQ keeps the offsets of consumers in this file, instead of consumerOffset.json, while light queues are on
# (enableLmq).
LIGHT_OFFSETS: Final = "config/lmqConsumerOffset.json"


@final
class _Sums:
    """Sums over the entries of one segment, with positions counted from its start.

    If they cover it without a gap up to ``end``, ``size`` equals ``end``, and ``squares`` equals its square. The sum
    ``squares`` adds, for each record, the square of its end less the square of its start. Wrong entries do not satisfy
    both.
    """

    def __init__(self) -> None:
        self.end = 0
        self.size = 0
        self.squares = 0

    def add(self, starts: list[int], sizes: list[int]) -> None:
        self.end = max(self.end, starts[-1] + sizes[-1])
        self.size += sum(sizes)
        self.squares += 2 * sum(map(mul, starts, sizes)) + sum(map(mul, sizes, sizes))

    @property
    def whole(self) -> bool:
        return self.size == self.end and self.squares == self.end * self.end


@final
class ForeignQueues:
    """Loads every queue up to log position *limit*; `NOWHERE` loads everything in the files."""

    def __init__(self, segments: Segments, queues: Queues, limit: int) -> None:
        self.segments = segments
        self.queues = queues
        self.limit = limit
        # The end of the newest record that has an entry.
        self.highest = segments.start
        self._sums = {segment.start: _Sums() for segment in segments.items}

    def load(self) -> bool:
        """Return whether the queues contain every record of the log; otherwise all must be rebuilt from the log."""
        files = self.queues.files
        disk = files.files.disk
        topics = disk.names(files.directory)
        root = files.directory.rpartition("/")[0]
        if any(map(is_light, topics)) or disk.path_size(f"{root}/{LIGHT_OFFSETS}") >= 0:
            return False
        for topic in topics:
            for queue_id in queue_ids(disk.names(f"{files.directory}/{topic}")):
                queue = self.queues.get(topic, queue_id)
                if not self._load_queue(queue) or not self._add_up(queue):
                    return False
                self.highest = max(self.highest, queue.last_end)
        return bool(self.queues.topics) and self._cover()

    def _add_up(self, queue: Queue) -> bool:
        """Add the entries of *queue* to the sums of their segments; return False if they are out of order."""
        offset, before = queue.stored_from, -1
        if offset == queue.next_offset:
            return True
        while offset < queue.next_offset:
            count = min(SUMMED_AT_ONCE, queue.next_offset - offset)
            numbers = array("I", self.queues.files.read(queue, offset, count))
            if not numbers:
                return False
            if sys.byteorder == "little":
                numbers.byteswap()
            offset += len(numbers) // 5
            sizes = numbers[2::5].tolist()
            starts = [high << 32 | low for high, low in zip(numbers[0::5], numbers[1::5], strict=True)]
            if BLANK_SIZE in sizes:
                real = [size != BLANK_SIZE for size in sizes]
                sizes, starts = list(compress(sizes, real)), list(compress(starts, real))
            if starts and (starts[0] <= before or starts != sorted(starts) or not self._add_all(starts, sizes)):
                return False
            before = starts[-1] if starts else before
        return self._names_its_record(queue, queue.stored_from) and self._names_its_record(queue, queue.next_offset - 1)

    def _add_all(self, starts: list[int], sizes: list[int]) -> bool:
        at = 0
        while at < len(starts):
            segment = self.segments.find(starts[at])
            after = bisect_left(starts, segment.end, at) if segment is not None else at
            if segment is None or after == at:
                return False
            base = segment.start
            self._sums[base].add([start - base for start in starts[at:after]], sizes[at:after])
            at = after
        return True

    def _cover(self) -> bool:
        """Return whether the entries of each segment below the limit cover it; a start reads the log from `highest`."""
        return all(
            self._sums[segment.start].whole and self._ends(segment)
            for segment in self.segments.items
            if segment.end <= self.limit
        )

    def _ends(self, segment: Segment) -> bool:
        """Return whether *segment* has no record after its last entry, or only one that the start will read."""
        end = segment.start + self._sums[segment.start].end
        if end == segment.end or (end == self.highest and self.limit == NOWHERE):
            return True
        head = self.segments.read(end, FILLER_BYTES)
        return len(head) == FILLER_BYTES and FILLER.unpack(head) == (segment.end - end, BLANK_MAGIC)

    def _load_queue(self, queue: Queue) -> bool:
        """Set the bounds of a queue from its files; return False if a file is missing or too short."""
        files = self.queues.files
        starts = files.starts(queue)
        if not starts:
            return True
        sizes = [files.files.disk.path_size(files.path_of(queue, start)) for start in starts]
        if any(b - a != files.file_bytes for a, b in pairwise(starts)) or set(sizes[:-1]) - {files.file_bytes}:
            return False
        low = starts[0] // ENTRY_BYTES
        end = self._search_end(queue, low, starts[-1] // ENTRY_BYTES + files.file_entries)
        if self.limit != NOWHERE:
            end = self._last_sound(queue, low, end)
        queue.begin_at(end)
        # Blocks begun by RocketMQ have no CRC; the next whole block has one.
        queue.begins = end == low
        queue.store_from(self.queues.first_behind(queue, low, end, self.segments.start))
        queue.unsure_names = self.limit != NOWHERE
        if end > queue.stored_from:
            position, size = self._entry(queue, end - 1)
            queue.last_end = queue.saved_end = position + size if size != BLANK_SIZE else 0
        return True

    def _entry(self, queue: Queue, offset: int) -> tuple[int, int]:
        data = self.queues.files.read(queue, offset, 1)
        if len(data) < ENTRY_BYTES:
            return 0, 0
        position, size, _ = ENTRY.unpack(data)
        return position, size

    def _search_end(self, queue: Queue, low: int, high: int) -> int:
        """Return the offset after the last entry of a record before the limit."""
        while low < high:
            middle = (low + high) // 2
            position, size = self._entry(queue, middle)
            if size > 0 and position < self.limit:
                low = middle + 1
            else:
                high = middle
        return low

    def _last_sound(self, queue: Queue, low: int, end: int) -> int:
        """Walk back from *end* over entries torn by a crash: they name no record of this queue."""
        while end > low:
            position, size = self._entry(queue, end - 1)
            if size == BLANK_SIZE or 0 < position < self.segments.start:
                break  # nothing to compare with: a hole, or removed by retention, which a power cut can undo
            if self._names_its_record(queue, end - 1):
                break
            end -= 1
        return end

    def _names_its_record(self, queue: Queue, offset: int) -> bool:
        """Return whether the entry at *offset* names a record with this queue and offset; a hole names none."""
        position, size = self._entry(queue, offset)
        if size == BLANK_SIZE:
            return True
        head = self.segments.read(position, START.size)
        if len(head) < START.size:
            return False
        said, magic, _, queue_id, _, number, at, _, _ = START.unpack(head)
        return (said, at, queue_id, number) == (size, position, queue.queue_id, offset) and magic != BLANK_MAGIC
