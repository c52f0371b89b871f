"""Takes over the consume queues of a store that RocketMQ wrote: nothing but the files says what they hold."""

from itertools import pairwise
from typing import final

from martlet.store.layout import BLANK_MAGIC, BLANK_SIZE, ENTRY, ENTRY_BYTES, START
from martlet.store.queues import Queue, Queues, queue_ids
from martlet.store.scan import NOWHERE
from martlet.store.segments import Segments

__all__ = ["ForeignQueues"]


@final
class ForeignQueues:
    """Loads every queue up to log position *limit*; `NOWHERE` takes all that the files hold."""

    __slots__ = ("highest", "limit", "queues", "segments")

    def __init__(self, segments: Segments, queues: Queues, limit: int) -> None:
        self.segments = segments
        self.queues = queues
        self.limit = limit
        # The log position behind the newest record that has an entry.
        self.highest = segments.start

    def load(self) -> bool:
        """Return whether every queue is whole; else all are to be rebuilt from the log."""
        files = self.queues.files
        disk = files.files.disk
        for topic in disk.names(files.directory):
            for queue_id in queue_ids(disk.names(f"{files.directory}/{topic}")):
                queue = self.queues.get(topic, queue_id)
                if not self._load_queue(queue):
                    return False
                self.highest = max(self.highest, queue.last_end)
        return bool(self.queues.topics)

    def _load_queue(self, queue: Queue) -> bool:
        """Set its bounds from the files; False when one is missing or short."""
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
        # Blocks that RocketMQ began have no CRC; the next whole one has.
        queue.begins = end == low
        queue.first_offset = self.queues.first_behind(queue, low, end, self.segments.start)
        queue.unsure_names = self.limit != NOWHERE
        if end > queue.first_offset:
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
        """The offset behind the last entry of a record before the limit."""
        while low < high:
            middle = (low + high) // 2
            position, size = self._entry(queue, middle)
            if size > 0 and position < self.limit:
                low = middle + 1
            else:
                high = middle
        return low

    def _last_sound(self, queue: Queue, low: int, end: int) -> int:
        """Walk back from *end* over entries that name no record of this queue: a crash tore them."""
        while end > low:
            position, size = self._entry(queue, end - 1)
            if size == BLANK_SIZE or 0 < position < self.segments.start:
                break  # nothing to compare with: a hole, or removed by retention, which a power cut can undo
            head = self.segments.read(position, START.size)
            if len(head) == START.size:
                said, magic, _, queue_id, _, offset, at, _, _ = START.unpack(head)
                if (said, at, queue_id, offset) == (size, position, queue.queue_id, end - 1) and magic != BLANK_MAGIC:
                    break
            end -= 1
        return end
