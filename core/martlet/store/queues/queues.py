"""Consume queues: the log positions of the messages of each queue.

Entries of 20 bytes in ``consumequeue/<topic>/<queue id>/<20 digits>`` (RocketMQ ConsumeQueue.java). New entries are
collected in memory and written to the files in the background, after the records that they point to are durable. An
idle queue has no open file and uses almost no memory.

Files consist of blocks of 1,000 entries, and each queue knows the CRC of each of its blocks. Entries are read one block
at a time, checked once, and kept in a small cache. A block with a wrong CRC is never used: it is rebuilt from the log
(`repair.py`).
"""

import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from math import gcd
from threading import Lock
from typing import Final, TypeAlias, final

from martlet.records.layout import (
    BLANK_ENTRY,
    BLANK_SIZE,
    ENTRY,
    ENTRY_BYTES,
    POSITION_SIZE,
    RECORD_BYTES_MIN,
    TOPIC_V1_BYTES_MAX,
    Dispatcher,
)
from martlet.runtime.checksum import crc32
from martlet.runtime.steps import Steps, off_loop
from martlet.store.disk.files import Files
from martlet.store.disk.segments import NAME_DIGITS, numbered_names
from martlet.store.format.light import is_light

__all__ = ["BlockDamaged", "Queue", "QueueFiles", "Queues", "Unsaved", "position_in", "queue_ids"]

logger = logging.getLogger("martlet.store")

# Entries that stay in memory after they were written, for consumers at the tail.
KEPT_ENTRIES: Final = 64

# Divides RocketMQ's 300,000 entries per file. Block CRCs take 4 bytes of memory per this many messages.
BLOCK_ENTRIES: Final = 1000
# Blocks in the cache, 20 KB each.
BLOCKS_CACHED: Final = 64
NOTHING_COLD: Final = 1 << 62
UNKNOWN: Final = 0  # replaces the CRC of a block that RocketMQ began
QUEUE_ID_MAX: Final = 2**31 - 1


# Shared by all queues without a whole block; never modified.
NO_CRCS: Final = array("I")


class BlockDamaged(Exception):
    """A block in a queue's files differs from what was written; `repair` rebuilds it from the log."""

    def __init__(self, queue: "Queue") -> None:
        super().__init__(f"consume queue {queue.topic}/{queue.queue_id} has a damaged block")
        self.queue = queue


@final
class Queue:
    """One queue of one topic; offsets count its messages.

    ``next_offset`` is the first free offset (lower ones may not be readable yet), ``first_offset`` the oldest one that
    consumers may read, from the log or from a cold tier. ``local_from`` is the oldest one that they may read from the
    log: the oldest one stored (``stored_from``), or a later one if the topic's own retention expired messages
    (``expired_to``). Each of ``watchers`` is called when records become readable.
    """

    __slots__ = (
        "begins",
        "blocks",
        "changed",
        "cold_from",
        "deleted",
        "dirty",
        "dispatcher",
        "expired_to",
        "first_offset",
        "journaled",
        "last_end",
        "light",
        "local_from",
        "mark",
        "narrow",
        "next_offset",
        "noted",
        "overhead",
        "plain",
        "put_bytes",
        "queue_id",
        "saved",
        "saved_end",
        "stored_from",
        "tail",
        "tail_offset",
        "topic",
        "topic_bytes",
        "topic_hash",
        "topic_part",
        "unsure_names",
        "watchers",
    )

    def __init__(self, topic: str, queue_id: int, dispatcher: Dispatcher | None = None) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.first_offset = 0
        self.local_from = 0
        self.stored_from = 0
        # A cold tier has the messages from this offset on that the log has lost.
        self.cold_from = NOTHING_COLD
        # Consumers get no message before this offset, though the log may have it until its own retention.
        self.expired_to = 0
        self.next_offset = 0
        self.put_bytes = 0  # bytes of the records appended since the start
        self.watchers: list[Callable[[Queue], None]] | None = None
        # Entries [tail_offset, next_offset) are in memory, [.., saved) are in files.
        self.tail = bytearray()
        self.tail_offset = 0
        self.saved = 0
        # The end of the newest record whose entry is in a file.
        self.saved_end = 0
        # The number of the first block with a CRC, and the CRCs of all whole blocks from there on.
        self.blocks: tuple[int, array[int]] = (0, NO_CRCS)
        # The end of the CRCs' range in the files: `saved`, and the CRC of its block. A single attribute, so that
        # threads see consistent values.
        self.mark: tuple[int, int] = (0, 0)
        # Blocks before this number are in the journal; `changed` tells whether other state of the queue must be written
        # there.
        self.journaled = 0
        self.changed = False
        # The log position of a note with this queue's next offset; -1 if there is none.
        self.noted = -1
        self.dirty = False
        # The file's content before `tail_offset` is unreliable.
        self.begins = True
        # A killed process may have created its files without syncing their names.
        self.unsure_names = False
        # The end of the newest record.
        self.last_end = 0
        topic_bytes = topic.encode()
        wide = len(topic_bytes) > TOPIC_V1_BYTES_MAX
        self.topic_bytes = topic_bytes
        self.narrow = not wide
        # Its entries point to records of other queues, which name this queue (`light.py`).
        self.light = is_light(topic)
        # Computes the entries' codes, instead of the tag code.
        self.dispatcher = dispatcher
        # Records are V1 and have a tag code; unset when the topic is deleted.
        self.plain = self.narrow and dispatcher is None
        self.deleted = False
        self.topic_part = (
            len(topic_bytes).to_bytes(2, "big") + topic_bytes if wide else bytes((len(topic_bytes),)) + topic_bytes
        )
        # The size of a record with IPv4 hosts, without body and properties.
        self.overhead = RECORD_BYTES_MIN + wide + len(topic_bytes)
        self.topic_hash = -1

    def __repr__(self) -> str:
        return f"<Queue {self.topic}/{self.queue_id} {self.first_offset}-{self.next_offset}>"

    def begin_at(self, offset: int) -> None:
        """Restart empty, with *offset* as the first free offset."""
        self.next_offset = self.tail_offset = self.saved = offset
        self.store_from(offset)
        self.tail = bytearray()
        self.last_end = self.saved_end = 0
        self.blocks, self.mark, self.journaled = (0, NO_CRCS), (offset, UNKNOWN), 0
        self.begins = True

    def store_from(self, offset: int) -> None:
        """Note that *offset* is the first one whose message the log has, or the next one."""
        self.stored_from = offset
        self._set_first()

    def keep_cold_from(self, offset: int) -> None:
        """Note that a cold tier has every message from *offset* on that the log loses (`ColdRecords.keep`)."""
        self.cold_from = offset
        self._set_first()

    def expire_to(self, offset: int) -> None:
        """Note that consumers get no message before *offset* any more."""
        self.expired_to = max(self.expired_to, offset)
        self._set_first()

    def _set_first(self) -> None:
        self.local_from = max(self.stored_from, self.expired_to)
        self.first_offset = max(min(self.stored_from, self.cold_from), self.expired_to)

    def add(self, position: int, size: int, code: int) -> None:
        """Append the entry of the record at *position*."""
        self.tail += ENTRY.pack(position, size, code)
        self.next_offset += 1
        self.put_bytes += size
        self.last_end = position + size

    def add_holes(self, count: int, position: int) -> None:
        """Append *count* entries for lost messages, which were before *position*.

        They contain that position, so that positions ascend in a queue, as binary search for its end requires.
        """
        self.tail += ENTRY.pack(position, BLANK_SIZE, 0) * count
        self.next_offset += count

    def drop_last(self) -> None:
        """Remove the newest entry, which is in memory."""
        del self.tail[-ENTRY_BYTES:]
        self.next_offset -= 1
        self.last_end = 0
        if self.tail:
            position, size, _ = ENTRY.unpack_from(self.tail, len(self.tail) - ENTRY_BYTES)
            self.last_end = position + size

    def add_to_crcs(self, entries: bytes, block_bytes: int) -> None:
        """Add *entries*, which were written from `saved` on, to the CRCs."""
        block_bytes_done = self.saved * ENTRY_BYTES % block_bytes
        crc, is_known = self.mark[1], self.mark[1] != UNKNOWN or not block_bytes_done
        at = 0
        while at < len(entries):
            block_part = entries[at : at + block_bytes - block_bytes_done]
            crc = crc32(block_part, crc) if is_known else UNKNOWN
            at += len(block_part)
            block_bytes_done += len(block_part)
            if block_bytes_done == block_bytes:
                self._add_block((self.saved * ENTRY_BYTES + at) // block_bytes - 1, crc)
                crc, is_known, block_bytes_done = 0, True, 0
        self.saved += len(entries) // ENTRY_BYTES
        self.mark = self.saved, crc
        position, size = POSITION_SIZE.unpack_from(entries, len(entries) - ENTRY_BYTES)
        self.saved_end = position + (size if size != BLANK_SIZE else 0)

    def _add_block(self, block: int, crc: int) -> None:
        base, crcs = self.blocks
        if crcs is NO_CRCS or block != base + len(crcs):
            self.blocks = (block, array("I", (crc,)))
        else:
            crcs.append(crc)

    def crc_of(self, block: int) -> int:
        """Return the CRC of a whole block; `UNKNOWN` if there is none."""
        base, crcs = self.blocks
        return crcs[block - base] if 0 <= block - base < len(crcs) else UNKNOWN

    def end_before(self, limit: int) -> int:
        """Return the offset after the newest message whose record ends at or before log position *limit*."""
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


# Reads entries of a queue from its files: `QueueFiles.read`, or `read_now`, which returns None rather than wait.
ReadEntries: TypeAlias = Callable[[Queue, int, int], bytes | None]
# A queue and the entries to write to its files next.
Unsaved: TypeAlias = tuple[Queue, bytes]


@final
class QueueFiles:
    """Reads and writes the files of queues."""

    def __init__(self, files: Files, directory: str, file_entries: int) -> None:
        self.files = files
        self.directory = directory
        self.file_entries = file_entries
        self.file_bytes = file_entries * ENTRY_BYTES
        # A block never spans two files.
        self.block_entries = gcd(file_entries, BLOCK_ENTRIES)
        self.block_bytes = self.block_entries * ENTRY_BYTES
        # Directories whose names are not durable yet.
        self.new_directories: set[str] = set()
        # Unused directories that could not be removed.
        self.left: set[str] = set()

    def directory_of(self, topic: str, queue_id: int) -> str:
        return f"{self.directory}/{topic}/{queue_id}"

    def path_of(self, queue: Queue, file_start: int) -> str:
        return f"{self.directory}/{queue.topic}/{queue.queue_id}/{file_start:0{NAME_DIGITS}d}"

    def starts(self, queue: Queue) -> list[int]:
        """Return the first byte of each file of *queue*, ascending."""
        return numbered_names(self.files.disk.names(self.directory_of(queue.topic, queue.queue_id)))

    def read(self, queue: Queue, offset: int, count: int) -> bytes:
        """Return entries from *offset* on, at most *count* and from one file; empty if there are none."""
        try:
            data = self.files.read(*self._locate(queue, offset, count))
        except FileNotFoundError:
            return b""
        return data[: len(data) - len(data) % ENTRY_BYTES]

    def read_now(self, queue: Queue, offset: int, count: int) -> bytes | None:
        """As `read`, but return None if the read would wait for the disk."""
        try:
            data = self.files.read_now(*self._locate(queue, offset, count))
        except FileNotFoundError:
            return b""
        return bytes(data[: len(data) - len(data) % ENTRY_BYTES]) if data is not None else None

    def _locate(self, queue: Queue, offset: int, count: int) -> tuple[str, int, int]:
        """Return path, size and position of up to *count* entries in the file of *offset*."""
        position = offset * ENTRY_BYTES
        file_position = position % self.file_bytes
        return (
            self.path_of(queue, position - file_position),
            min(count * ENTRY_BYTES, self.file_bytes - file_position),
            file_position,
        )

    def write(self, queue: Queue, offset: int, entries: memoryview) -> set[str]:
        """Write *entries* from *offset* on and return the paths to sync.

        The files of a queue that begins contain only these entries afterwards; after an error, the next write ensures
        that.
        """
        paths: set[str] = set()
        position = offset * ENTRY_BYTES
        if queue.begins:
            # The existing files belong to a deleted queue.
            self.remove(queue.topic, queue.queue_id)
            # Blanks as RocketMQ writes them, so that the queue ends where its entries end (ConsumeQueue.fillPreBlank).
            file_position = position % self.file_bytes
            position -= file_position
            entries = memoryview(BLANK_ENTRY * (file_position // ENTRY_BYTES) + bytes(entries))
        if queue.unsure_names:
            self._note_names(queue)
            queue.unsure_names = False
        while entries:
            file_position = position % self.file_bytes
            part = entries[: self.file_bytes - file_position]
            path = self.path_of(queue, position - file_position)
            try:
                if self.files.size(path) != self.file_bytes:
                    self.files.truncate(path, self.file_bytes)
            except FileNotFoundError:
                self._create(queue, path)
            self.files.write(path, part, file_position)
            paths.add(path)
            position += len(part)
            entries = entries[len(part) :]
        return paths

    def _create(self, queue: Queue, path: str) -> None:
        directory = self.directory_of(queue.topic, queue.queue_id)
        self.left -= {directory, f"{self.directory}/{queue.topic}"}
        self.files.disk.make_directory(directory)
        self.files.create(path, self.file_bytes)
        self._note_names(queue)

    def _note_names(self, queue: Queue) -> None:
        directory = self.directory_of(queue.topic, queue.queue_id)
        self.new_directories.update((directory, f"{self.directory}/{queue.topic}", self.directory))

    def whole(self, queue: Queue) -> bool:
        """Return whether all files with entries of stored messages exist, and are long enough."""
        start = queue.stored_from * ENTRY_BYTES
        start -= start % self.file_bytes
        for at in range(start, queue.saved * ENTRY_BYTES, self.file_bytes):
            if self.files.disk.path_size(self.path_of(queue, at)) != self.file_bytes:
                return False
        return True

    def complete(self, queue: Queue) -> set[str]:
        """Extend all files of *queue* to their full size, which RocketMQ checks; return the paths of changed files."""
        paths: set[str] = set()
        for start in self.starts(queue):
            path = self.path_of(queue, start)
            if self.files.size(path) != self.file_bytes:
                self.files.truncate(path, self.file_bytes)
                paths.add(path)
        return paths

    def cut(self, queue: Queue, end: int) -> None:
        """Ensure that the files have no entries from offset *end* on."""
        at = end * ENTRY_BYTES
        for start in self.starts(queue):
            path = self.path_of(queue, start)
            if start > at:
                self.files.unlink(path)
                self.new_directories.add(self.directory_of(queue.topic, queue.queue_id))
            elif start + self.file_bytes > at and self.files.next_data(path, at - start) < self.file_bytes:
                self.files.clear(path, at - start)

    def remove_before(self, queue: Queue, first_offset: int) -> None:
        """Remove files whose entries are all before offset *first_offset*; the last file stays."""
        starts = self.starts(queue) if first_offset >= self.file_entries else []
        for start in starts[:-1]:
            if start + self.file_bytes <= first_offset * ENTRY_BYTES:
                self.files.unlink(self.path_of(queue, start))

    def remove(self, topic: str, queue_id: int) -> None:
        """Remove all files of the queue, and its directory unless it contains anything else."""
        directory = self.directory_of(topic, queue_id)
        names = self.files.disk.names(directory)
        for start in numbered_names(names):
            path = f"{directory}/{start:0{NAME_DIGITS}d}"
            if self.files.disk.path_size(path) >= 0:
                self.files.unlink(path)
        if names:
            self._remove_directory(directory)

    def remove_topic(self, topic: str) -> None:
        """Remove the files of all queues of *topic*."""
        directory = f"{self.directory}/{topic}"
        names = self.files.disk.names(directory)
        for queue_id in queue_ids(names):
            self.remove(topic, queue_id)
            self._remove_directory(f"{directory}/{queue_id}")
        self._remove_directory(directory)
        if names:
            removed_directories = {
                path for path in self.new_directories if path == directory or path.startswith(f"{directory}/")
            }
            self.new_directories.difference_update(removed_directories)
            self.new_directories.add(self.directory)

    def _remove_directory(self, path: str) -> None:
        """Remove directory *path* if it exists; `remove_left` retries after a failure."""
        try:
            self.files.disk.remove_directory(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            if path not in self.left:
                why = error.strerror
                logger.warning("%s is no longer used and cannot be removed: %s; trying again later", path, why)
            self.left.add(path)
            return
        self.left.discard(path)

    def remove_left(self) -> None:
        """Remove the directories that could not be removed before."""
        for path in sorted(self.left, key=len, reverse=True):  # subdirectories first
            self._remove_directory(path)


def queue_ids(names: list[str]) -> list[int]:
    """Return the queue ids among *names*, the directories of a topic; other names are ignored."""
    ids = (int(name) for name in names if name.isascii() and name.isdecimal() and len(name) <= 10)
    return [queue_id for queue_id in ids if queue_id <= QUEUE_ID_MAX and str(queue_id) in names]


@final
class Queues:
    """All queues by topic and id, and the entries of each."""

    def __init__(self, files: QueueFiles) -> None:
        self.files = files
        self.topics: dict[str, dict[int, Queue]] = {}
        # The number of light queues.
        self.light = 0
        # Functions that compute the codes of entries, by topic; for all other topics they are tag codes.
        self.dispatchers: dict[str, Dispatcher] = {}
        # Queues with entries that are not in their files.
        self.dirty: dict[Queue, None] = {}
        # Queues whose state in files is not in the journal yet.
        self.changed: dict[Queue, None] = {}
        # Called with a queue that has a damaged block, on the event loop.
        self.on_damage: Callable[[Queue], None] | None = None
        # Each is called with every new queue.
        self.on_new: list[Callable[[Queue], None]] = []
        # Rebuilt blocks for which there was no space in their files.
        self.rebuilt: dict[tuple[Queue, int], bytes] = {}
        self._cache: OrderedDict[tuple[Queue, int], bytes] = OrderedDict()
        self._lock = Lock()

    def find(self, topic: str, queue_id: int) -> Queue | None:
        of_topic = self.topics.get(topic)
        return of_topic.get(queue_id) if of_topic is not None else None

    def get(self, topic: str, queue_id: int) -> Queue:
        """Return the queue, created if it does not exist."""
        of_topic = self.topics.setdefault(topic, {})
        queue = of_topic.get(queue_id)
        if queue is None:
            queue = of_topic[queue_id] = Queue(topic, queue_id, self.dispatchers.get(topic))
            self.light += queue.light
            for tell in self.on_new:
                tell(queue)
        return queue

    def all(self) -> list[Queue]:
        return [queue for of_topic in self.topics.values() for queue in of_topic.values()]

    def touch(self, queue: Queue) -> None:
        """Note that *queue* has entries to save."""
        if not queue.dirty:
            queue.dirty = True
            self.dirty[queue] = None

    def note_change(self, queue: Queue) -> None:
        """Note that *queue* must be written to the journal."""
        if not queue.changed:
            queue.changed = True
            self.changed[queue] = None

    # ---- reading entries

    def entries(self, queue: Queue, offset: int, count: int) -> bytes:
        """Return entries from *offset* on, at most *count*; fewer at a block's end, none only if there are none.

        The entries of a damaged block count as missing; the block is reported to `on_damage`.
        """
        try:
            return self.load_entries(queue, offset, count)
        except BlockDamaged:
            if self.on_damage is not None:
                self.on_damage(queue)
            return b""

    def load_entries(self, queue: Queue, offset: int, count: int) -> bytes:
        """As `entries`, but raises `BlockDamaged`."""
        if offset >= queue.tail_offset:
            at = (offset - queue.tail_offset) * ENTRY_BYTES
            return bytes(queue.tail[at : at + count * ENTRY_BYTES])
        return self.saved_entries(queue, offset, min(count, queue.tail_offset - offset))

    def entries_now(self, queue: Queue, offset: int, count: int) -> bytes | None:
        """As `load_entries`, but return None if the read would wait for the disk."""
        if offset >= queue.tail_offset:
            return self.load_entries(queue, offset, count)
        return self._read_saved(queue, offset, min(count, queue.tail_offset - offset), self.files.read_now)

    def entries_in_steps(self, queue: Queue, offset: int, count: int) -> Steps[bytes]:
        """As `load_entries`, but wait for the disk in a worker thread."""
        data = self.entries_now(queue, offset, count)
        if data is None:
            data = yield from off_loop(partial(self.saved_entries, queue, offset, count))
        return data

    def saved_entries(self, queue: Queue, offset: int, count: int) -> bytes:
        """As `load_entries`, but read only files; threads may call it."""
        data = self._read_saved(queue, offset, count, self.files.read)
        assert data is not None
        return data

    def _read_saved(self, queue: Queue, offset: int, count: int, read_entries: ReadEntries) -> bytes | None:
        block_entries = self.files.block_entries
        block = offset // block_entries
        at = (offset - block * block_entries) * ENTRY_BYTES
        data = self._find_cached(queue, block)
        if data is None or at >= len(data):
            data = self._read_block(queue, block, read_entries)
            if data is None:
                return None
            with self._lock:
                self._cache[queue, block] = data
                while len(self._cache) > BLOCKS_CACHED:
                    self._cache.popitem(last=False)
        return data[at : at + count * ENTRY_BYTES]

    def _find_cached(self, queue: Queue, block: int) -> bytes | None:
        with self._lock:
            data = self._cache.get((queue, block))
            if data is not None:
                self._cache.move_to_end((queue, block))
        return data

    def load_block(self, queue: Queue, block: int) -> bytes:
        """Read a block from its file and check it.

        Raises:
          BlockDamaged: it differs from the block that was written.
        """
        data = self._read_block(queue, block, self.files.read)
        assert data is not None
        return data

    def _read_block(self, queue: Queue, block: int, read_entries: ReadEntries) -> bytes | None:
        saved, last_block_crc = queue.mark
        block_entries = self.files.block_entries
        count = min(block_entries, saved - block * block_entries)
        crc = last_block_crc if count < block_entries else queue.crc_of(block)
        rebuilt = self.rebuilt.get((queue, block), b"") if self.rebuilt else b""
        if rebuilt and len(rebuilt) == count * ENTRY_BYTES:
            return rebuilt
        data = read_entries(queue, block * block_entries, count) if count > 0 else b""
        if data is None:
            return None
        if crc != UNKNOWN and (len(data) != count * ENTRY_BYTES or crc32(data) != crc):
            if (block + 1) * block_entries <= queue.stored_from:
                return b""  # retention removed it in the meantime
            raise BlockDamaged(queue)
        return data

    def forget_blocks(self, *queues: Queue) -> None:
        """Drop cached blocks of *queues*, whose files changed."""
        changed_queues = set(queues)
        with self._lock:
            for key in [key for key in self._cache if key[0] in changed_queues]:
                del self._cache[key]
        for key in [key for key in self.rebuilt if key[0] in changed_queues]:
            del self.rebuilt[key]

    def position_at(self, queue: Queue, offset: int) -> int:
        """Return the log position of message *offset*; -1 if there is none."""
        return position_in(self.entries(queue, offset, 1))

    def position_now(self, queue: Queue, offset: int) -> int:
        """As `position_at`, but return -1 if the read would wait for the disk."""
        try:
            return position_in(self.entries_now(queue, offset, 1) or b"")
        except BlockDamaged:
            if self.on_damage is not None:
                self.on_damage(queue)
            return -1

    # ---- saving

    def save(self, queue: Queue, limit: int) -> set[str]:
        """Write the entries of records that end at or before *limit*; return the paths to sync.

        Entries written before the previous call are dropped from memory, except the newest ones.
        """
        unsaved = self.take_unsaved(queue, limit)
        paths = self.write_unsaved(unsaved)
        self.note_saved(unsaved)
        return paths

    def take_unsaved(self, queue: Queue, limit: int) -> Unsaved:
        """Return the entries of records that end at or before *limit* and are not in files."""
        end = queue.end_before(limit)
        start = (queue.saved - queue.tail_offset) * ENTRY_BYTES
        return queue, bytes(queue.tail[start : (end - queue.tail_offset) * ENTRY_BYTES]) if end > queue.saved else b""

    def write_unsaved(self, unsaved: Unsaved) -> set[str]:
        """Write to the files, and return the paths to sync; blocking. A thread may do it while appends continue."""
        queue, data = unsaved
        return self.files.write(queue, queue.saved, memoryview(data)) if data else set()

    def note_saved(self, unsaved: Unsaved) -> None:
        """Note that the entries are in their files: add them to the CRCs, and drop older entries from memory."""
        queue, data = unsaved
        kept_count = 0
        if data:
            if queue.begins:
                blanks = queue.saved % self.files.block_entries
                queue.mark = queue.saved, crc32(BLANK_ENTRY * blanks)
                queue.begins = False
            queue.add_to_crcs(data, self.files.block_bytes)
            self.note_change(queue)
            kept_count = min(KEPT_ENTRIES, queue.saved - queue.tail_offset)
        dropped_count = queue.saved - kept_count - queue.tail_offset
        if dropped_count > 0:
            del queue.tail[: dropped_count * ENTRY_BYTES]
            queue.tail_offset += dropped_count
        if queue.saved == queue.next_offset and not queue.tail:
            queue.dirty = False
            queue.tail = bytearray()
            self.dirty.pop(queue, None)

    def rewind(self, queue: Queue, offset: int) -> None:
        """Remove all entries from *offset* on, including saved ones; *offset* is not before the first offset."""
        queue.next_offset = offset
        if offset >= queue.tail_offset:
            del queue.tail[(offset - queue.tail_offset) * ENTRY_BYTES :]
        else:
            queue.tail, queue.tail_offset = bytearray(), offset
        if offset < queue.saved:
            block, block_count = divmod(offset, self.files.block_entries)
            base, crcs = queue.blocks
            queue.blocks = base, crcs[: max(block - base, 0)]
            queue.saved, queue.journaled = offset, min(queue.journaled, block)
            data = self.files.read(queue, offset - block_count, block_count) if block_count else b""
            queue.mark = offset, crc32(data) if block_count else UNKNOWN
        self.forget_blocks(queue)
        self.touch(queue)

    # ---- retention and deletion

    def advance_first(self, queue: Queue, start: int) -> bool:
        """Let the queue begin with the first record at or after log position *start*; old files are removed whole.

        Returns False if that offset is in a damaged block.
        """
        try:
            first_offset = self.first_behind(queue, queue.stored_from, queue.next_offset, start)
        except BlockDamaged:
            if self.on_damage is not None:
                self.on_damage(queue)
            return False
        if first_offset != queue.stored_from:
            queue.store_from(first_offset)
            base, crcs = queue.blocks
            removed_blocks = min(first_offset // self.files.block_entries - base, len(crcs))
            if removed_blocks > 0:
                queue.blocks = base + removed_blocks, crcs[removed_blocks:]
            self.note_change(queue)
            self.files.remove_before(queue, first_offset)
        return True

    def first_behind(self, queue: Queue, low: int, end: int, start: int) -> int:
        """Return the first offset from *low* to *end* whose record is at or after log position *start*; skips holes.

        Raises:
          BlockDamaged: a needed entry is damaged.
        """
        high = end
        if low < end and self.checked_position(queue, low) >= start:
            return low
        while low < high:
            middle = (low + high) // 2
            at = self._skip_holes(queue, middle, high)
            if at == high or self.checked_position(queue, at) >= start:
                high = middle
            else:
                low = at + 1
        return self._skip_holes(queue, low, end)

    def checked_position(self, queue: Queue, offset: int) -> int:
        """As `position_at`, but raises `BlockDamaged`."""
        return position_in(self.load_entries(queue, offset, 1))

    def _skip_holes(self, queue: Queue, offset: int, end: int) -> int:
        """Return the first offset from *offset* on that has a record; *end* if there is none before it."""
        while offset < end and self.checked_position(queue, offset) < 0:
            offset += 1
        return offset

    def forget_all(self) -> None:
        """Remove all topics from the table."""
        self.topics.clear()
        self.light = 0

    def forget_topic(self, topic: str) -> list[Queue]:
        """Remove *topic* from the table and return its queues; their files stay."""
        queues = list(self.topics.pop(topic, {}).values())
        for queue in queues:
            queue.plain, queue.deleted = False, True
            self.light -= queue.light
        return queues

    def let_go(self, queues: list[Queue]) -> None:
        """Never save *queues* again."""
        for queue in queues:
            self.dirty.pop(queue, None)
            self.changed.pop(queue, None)
        self.forget_blocks(*queues)


def position_in(entry: bytes) -> int:
    """Return the log position in *entry*; -1 if the entry is missing, or stands for a lost message."""
    if len(entry) < ENTRY_BYTES:
        return -1
    position, size = POSITION_SIZE.unpack_from(entry)
    return -1 if size == BLANK_SIZE or size == 0 else int(position)
