"""Consume queues: for each queue of a topic, where its messages stand in the log.

Entries of 20 bytes in ``consumequeue/<topic>/<queue id>/<20 digits>`` (RocketMQ
ConsumeQueue.java). New ones gather in memory and go to the files in the background,
never before the records they point at are durable. An idle queue holds no file and
next to no memory.
"""

from collections.abc import Callable
from struct import Struct
from typing import Final, final

from martlet.store.codec import ENTRY, ENTRY_BYTES, RECORD_BYTES_MIN, TOPIC_V1_BYTES_MAX
from martlet.store.files import Files
from martlet.store.segments import NAME_DIGITS, numbered_names
from martlet.store.tags import SCHEDULE_TOPIC

__all__ = ["BLANK_ENTRY", "Queue", "QueueFiles", "Queues"]

# What RocketMQ writes where a queue has no message (ConsumeQueue.fillPreBlank).
BLANK_SIZE: Final = 0x7FFFFFFF
BLANK_ENTRY: Final = ENTRY.pack(0, BLANK_SIZE, 0)
# Entries that stay in memory after they were written, for consumers at the tail.
KEPT_ENTRIES: Final = 64

# Files are searched for data in steps of this size: the rest of a file is mostly a hole.
HOLE_BYTES: Final = 64 * 1024
POSITION: Final = Struct(">q")
POSITION_SIZE: Final = Struct(">qi")


@final
class Queue:
    """One queue of one topic; offsets count its messages.

    ``next_offset`` is the first free one (what is below may not be readable yet), ``first_offset``
    the oldest that is kept. Each of ``watchers`` is called when records became readable.
    """

    __slots__ = (
        "begins",
        "dirty",
        "first_offset",
        "last_end",
        "narrow",
        "next_offset",
        "overhead",
        "queue_id",
        "saved",
        "tail",
        "tail_offset",
        "timed",
        "topic",
        "topic_bytes",
        "topic_hash",
        "topic_part",
        "unsure_names",
        "watchers",
    )

    def __init__(self, topic: str, queue_id: int) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.first_offset = 0
        self.next_offset = 0
        self.watchers: list[Callable[[Queue], None]] | None = None
        # Entries [tail_offset, next_offset) are in memory, [.., saved) are in files.
        self.tail = bytearray()
        self.tail_offset = 0
        self.saved = 0
        self.dirty = False
        # What its file holds before `tail_offset` is not to be relied on.
        self.begins = True
        # A killed process may have made its files and not have come to sync their names.
        self.unsure_names = False
        # The log position behind the newest record.
        self.last_end = 0
        topic_bytes = topic.encode()
        wide = len(topic_bytes) > TOPIC_V1_BYTES_MAX
        self.topic_bytes = topic_bytes
        self.narrow = not wide
        # Entries carry the time at which the message is due.
        self.timed = topic == SCHEDULE_TOPIC
        self.topic_part = (
            len(topic_bytes).to_bytes(2, "big") + topic_bytes if wide else bytes((len(topic_bytes),)) + topic_bytes
        )
        # The bytes of a record with IPv4 hosts, without body and properties.
        self.overhead = RECORD_BYTES_MIN + wide + len(topic_bytes)
        self.topic_hash = -1

    def __repr__(self) -> str:
        return f"<Queue {self.topic}/{self.queue_id} {self.first_offset}-{self.next_offset}>"

    def begin_at(self, offset: int) -> None:
        """Start over: empty, with *offset* as the first free one."""
        self.first_offset = self.next_offset = self.tail_offset = self.saved = offset
        self.tail = bytearray()
        self.last_end = 0
        self.begins = True

    def add(self, position: int, size: int, code: int) -> None:
        """Append the entry of the record at *position*."""
        self.tail += ENTRY.pack(position, size, code)
        self.next_offset += 1
        self.last_end = position + size

    def add_holes(self, count: int, position: int) -> None:
        """Append *count* entries of messages that are lost, which stood before *position*.

        They name that position, so that positions ascend in a queue and its end is found by halving.
        """
        self.tail += ENTRY.pack(position, BLANK_SIZE, 0) * count
        self.next_offset += count

    def drop_last(self) -> None:
        """Take back the newest entry, which is in memory."""
        del self.tail[-ENTRY_BYTES:]
        self.next_offset -= 1
        self.last_end = 0
        if self.tail:
            position, size, _ = ENTRY.unpack_from(self.tail, len(self.tail) - ENTRY_BYTES)
            self.last_end = position + size

    def end_before(self, limit: int) -> int:
        """The offset behind the newest message whose record ends at or before log position *limit*."""
        if self.last_end <= limit:
            return self.next_offset
        low, high = 0, self.next_offset - self.tail_offset
        tail = self.tail
        while low < high:
            middle = (low + high) // 2
            position, size = POSITION_SIZE.unpack_from(tail, middle * ENTRY_BYTES)
            if position + size <= limit or size == BLANK_SIZE:
                low = middle + 1
            else:
                high = middle
        return self.tail_offset + low


@final
class QueueFiles:
    """Reads and writes the files of queues."""

    __slots__ = ("directory", "file_bytes", "file_entries", "files", "new_directories")

    def __init__(self, files: Files, directory: str, file_entries: int) -> None:
        self.files = files
        self.directory = directory
        self.file_entries = file_entries
        self.file_bytes = file_entries * ENTRY_BYTES
        # Directories whose names are not durable yet.
        self.new_directories: set[str] = set()

    def directory_of(self, topic: str, queue_id: int) -> str:
        return f"{self.directory}/{topic}/{queue_id}"

    def path_of(self, queue: Queue, file_start: int) -> str:
        return f"{self.directory}/{queue.topic}/{queue.queue_id}/{file_start:0{NAME_DIGITS}d}"

    def starts(self, queue: Queue) -> list[int]:
        """The first byte of each file of *queue*, ascending."""
        return numbered_names(self.files.disk.names(self.directory_of(queue.topic, queue.queue_id)))

    def read(self, queue: Queue, offset: int, count: int) -> bytes:
        """Return entries from *offset* on, at most *count* and of one file; empty where there is none."""
        at = offset * ENTRY_BYTES
        within = at % self.file_bytes
        size = min(count * ENTRY_BYTES, self.file_bytes - within)
        try:
            data = self.files.read(self.path_of(queue, at - within), size, within)
        except FileNotFoundError:
            return b""
        return data[: len(data) - len(data) % ENTRY_BYTES]

    def write(self, queue: Queue, offset: int, entries: memoryview) -> set[str]:
        """Write *entries* from *offset* on and return the paths that are to be synced."""
        written: set[str] = set()
        at = offset * ENTRY_BYTES
        if queue.begins:
            # As RocketMQ does, so that the queue's end is where its entries end (ConsumeQueue.fillPreBlank).
            within = at % self.file_bytes
            at -= within
            entries = memoryview(BLANK_ENTRY * (within // ENTRY_BYTES) + bytes(entries))
            queue.begins = False
        if queue.unsure_names:
            self._note_names(queue)
            queue.unsure_names = False
        while entries:
            within = at % self.file_bytes
            part = entries[: self.file_bytes - within]
            path = self.path_of(queue, at - within)
            try:
                self.files.write(path, part, within)
            except FileNotFoundError:
                self._create(queue, path)
                self.files.write(path, part, within)
            written.add(path)
            at += len(part)
            entries = entries[len(part) :]
        return written

    def _create(self, queue: Queue, path: str) -> None:
        directory = self.directory_of(queue.topic, queue.queue_id)
        self.files.disk.make_directory(directory)
        self.files.create(path, self.file_bytes)
        self._note_names(queue)

    def _note_names(self, queue: Queue) -> None:
        directory = self.directory_of(queue.topic, queue.queue_id)
        self.new_directories.update((directory, f"{self.directory}/{queue.topic}", self.directory))

    def any_short(self, queue: Queue, starts: list[int]) -> bool:
        """Whether a file has not its full size; the last one is lengthened, which a crash may have prevented."""
        for start in starts:
            path = self.path_of(queue, start)
            if self.files.size(path) >= self.file_bytes:
                continue
            if start != starts[-1]:
                return True
            self.files.truncate(path, self.file_bytes)
        return False

    def cut(self, queue: Queue, end: int) -> None:
        """Make sure that the files hold nothing from offset *end* on."""
        at = end * ENTRY_BYTES
        for start in self.starts(queue):
            path = self.path_of(queue, start)
            if start > at:
                self.files.unlink(path)
                self.new_directories.add(self.directory_of(queue.topic, queue.queue_id))
            elif start + self.file_bytes > at and self._holds_data(path, at - start):
                self.files.clear(path, at - start)

    def _holds_data(self, path: str, at: int) -> bool:
        size = self.files.size(path)
        while (at := self.files.next_data(path, at)) < size:
            data = self.files.read(path, HOLE_BYTES, at)
            if data.rstrip(b"\x00"):
                return True
            at += len(data)
        return False

    def remove_before(self, queue: Queue, first: int) -> None:
        """Remove files all of whose entries are before offset *first*; the last file stays."""
        starts = self.starts(queue) if first >= self.file_entries else []
        for start in starts[:-1]:
            if start + self.file_bytes <= first * ENTRY_BYTES:
                self.files.unlink(self.path_of(queue, start))

    def remove(self, topic: str, queue_id: int) -> None:
        """Remove every file of the queue, and its directory."""
        directory = self.directory_of(topic, queue_id)
        for name in self.files.disk.names(directory):
            self.files.unlink(f"{directory}/{name}")
        self.files.disk.remove_directory(directory)


@final
class Queues:
    """All queues by topic and id, and the entries of each."""

    __slots__ = ("dirty", "files", "topics")

    def __init__(self, files: QueueFiles) -> None:
        self.files = files
        self.topics: dict[str, dict[int, Queue]] = {}
        # Queues with entries that are not in their files.
        self.dirty: dict[Queue, None] = {}

    def find(self, topic: str, queue_id: int) -> Queue | None:
        of_topic = self.topics.get(topic)
        return of_topic.get(queue_id) if of_topic is not None else None

    def get(self, topic: str, queue_id: int) -> Queue:
        """The queue, made if it does not exist yet."""
        of_topic = self.topics.setdefault(topic, {})
        queue = of_topic.get(queue_id)
        if queue is None:
            queue = of_topic[queue_id] = Queue(topic, queue_id)
        return queue

    def all(self) -> list[Queue]:
        return [queue for of_topic in self.topics.values() for queue in of_topic.values()]

    def touch(self, queue: Queue) -> None:
        """Remember that *queue* has entries to be saved."""
        if not queue.dirty:
            queue.dirty = True
            self.dirty[queue] = None

    def entries(self, queue: Queue, offset: int, count: int) -> bytes:
        """Return entries from *offset* on, at most *count*; fewer at a file's end, none only where there is none."""
        if offset >= queue.tail_offset:
            at = (offset - queue.tail_offset) * ENTRY_BYTES
            return bytes(queue.tail[at : at + count * ENTRY_BYTES])
        return self.files.read(queue, offset, min(count, queue.tail_offset - offset))

    def position_at(self, queue: Queue, offset: int) -> int:
        """The log position of message *offset*; -1 where there is none."""
        entry = self.entries(queue, offset, 1)
        if len(entry) < ENTRY_BYTES:
            return -1
        position, size = POSITION_SIZE.unpack_from(entry)
        return -1 if size == BLANK_SIZE or size == 0 else int(position)

    def save(self, queue: Queue, limit: int) -> set[str]:
        """Write the entries of records that end at or before *limit*; return the paths to sync.

        What was written before the last call and is not at the very tail leaves the memory.
        """
        end = queue.end_before(limit)
        paths: set[str] = set()
        if end > queue.saved:
            start = (queue.saved - queue.tail_offset) * ENTRY_BYTES
            data = bytes(queue.tail[start : (end - queue.tail_offset) * ENTRY_BYTES])
            paths = self.files.write(queue, queue.saved, memoryview(data))
            kept = min(KEPT_ENTRIES, end - queue.tail_offset)
        else:
            kept = 0
        queue.saved = max(queue.saved, end)
        gone = queue.saved - kept - queue.tail_offset
        if gone > 0:
            del queue.tail[: gone * ENTRY_BYTES]
            queue.tail_offset += gone
        if queue.saved == queue.next_offset and not queue.tail:
            queue.dirty = False
            queue.tail = bytearray()
            self.dirty.pop(queue, None)
        return paths

    def advance_first(self, queue: Queue, start: int) -> None:
        """Move the first offset to the first record at or behind log position *start*; whole old files go."""
        queue.first_offset = self.first_behind(queue, queue.first_offset, queue.next_offset, start)
        self.files.remove_before(queue, queue.first_offset)

    def first_behind(self, queue: Queue, low: int, end: int, start: int) -> int:
        """The first of the offsets *low* to *end* whose record is at or behind log position *start*; holes are none."""
        high = end
        if low < end and self.position_at(queue, low) >= start:
            return low
        while low < high:
            middle = (low + high) // 2
            at = self._real_from(queue, middle, high)
            if at == high or self.position_at(queue, at) >= start:
                high = middle
            else:
                low = at + 1
        return self._real_from(queue, low, end)

    def _real_from(self, queue: Queue, offset: int, end: int) -> int:
        while offset < end and self.position_at(queue, offset) < 0:
            offset += 1
        return offset

    def remove_topic(self, topic: str) -> None:
        """Forget *topic* and remove its files."""
        for queue in self.topics.pop(topic, {}).values():
            self.dirty.pop(queue, None)
        disk = self.files.files.disk
        directory = f"{self.files.directory}/{topic}"
        names = disk.names(directory)
        for name in names:
            if name.isdecimal():
                self.files.remove(topic, int(name))
        if names:
            disk.remove_directory(directory)
            self.files.new_directories.difference_update(
                {d for d in self.files.new_directories if d.startswith(directory)}
            )
            self.files.new_directories.add(self.files.directory)
