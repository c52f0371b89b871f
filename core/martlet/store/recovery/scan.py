"""Reads records from a range of the log, and adds them to their queues or their keys to the key index.

Used by a start, by the repair of damaged queues, and by the key index.
"""

import logging
from collections.abc import Callable
from typing import Final, final

from martlet.records.codec import record_crc_holds
from martlet.records.layout import (
    BLANK_MAGIC,
    FILLER,
    FILLER_BYTES,
    MAGIC_AT,
    MAGIC_V1,
    MAGIC_V2,
    PREPARED,
    RECORD_BYTES_MIN,
    ROLLBACK,
    START,
    TRANSACTION_MASK,
    RecordView,
    part_offsets,
)
from martlet.runtime.checksum import crc32
from martlet.runtime.native import native
from martlet.store.disk.files import is_full
from martlet.store.disk.segments import Segment, Segments
from martlet.store.format.atomic import FIRST, LAST, MARK_AT, NOWHERE, lacks_magic, valid_after, whole_group
from martlet.store.format.light import MULTI, light_places
from martlet.store.format.notes import Note, is_note, read_note
from martlet.store.format.tags import TagCodes
from martlet.store.keys.usual import Waiting
from martlet.store.queues.order import Order
from martlet.store.queues.queues import Queue, Queues
from martlet.store.recovery.usual import STORE_MS_END, KnownQueues, scan_usual

__all__ = ["BLOCK_BYTES", "NOWHERE", "UNSAVED_RECORDS_MAX", "Scan"]

logger = logging.getLogger("martlet.store")

BLOCK_BYTES: Final = 4 * 1024 * 1024
MAGIC_BYTE: Final = MAGIC_V1.to_bytes(4, "big")[:1]
# Entries of this many records stay in memory before they are written to their files.
UNSAVED_RECORDS_MAX: Final = 200_000

# Finds or creates the queue of a record; returns None to skip the record.
Find = Callable[[str, int], Queue | None]
# Called with each of the store's notes and its log position.
OnNote = Callable[[Note, int], None]


@final
class Scan:
    """Handles the records of a range of the log, in order.

    Adds each record to its queue, which `find` returns; or, if *keys* is a list, to that.
    """

    def __init__(
        self,
        segments: Segments,
        queues: Queues,
        find: Find,
        on_note: OnNote | None = None,
        keys: list[Waiting] | None = None,
    ) -> None:
        self.segments = segments
        self.queues = queues
        self.keys = keys
        self._find = find
        self._on_note = on_note
        self._codes = TagCodes()
        self._known: KnownQueues = {}
        self._scan_usual = native(scan_usual)
        self._saved_records = 0
        self.order = Order(queues, self.lost)
        # From this position on, a write may be torn.
        self.torn_from = NOWHERE
        # From this position on, groups of records are accepted only as a whole; not below `torn_from`.
        self.groups_from = NOWHERE
        # Records from this position on are ignored.
        self.limit = NOWHERE
        self.records = 0
        self.damaged = 0
        self.damaged_bytes = 0
        self.last_store_ms = 0

    def step(self, position: int, want: int) -> tuple[int, int]:
        """Handle about a block of the log from *position* on.

        Returns the position to continue at and the number of bytes to read there. At the end of the log these are -1
        and the end's position, which is 0 if no segment has *position*.
        """
        segment = self.segments.find(position)
        if segment is None:
            return -1, 0
        bytes_done, size_needed = self.take_block(segment, position, self.segments.read(position, want))
        position += bytes_done
        if bytes_done and size_needed >= 0:
            return position, max(BLOCK_BYTES, size_needed)
        if size_needed > want:  # a record longer than a block
            return position, size_needed
        if position >= self.limit:
            return position, BLOCK_BYTES  # its write may be in progress
        if position >= self.groups_from and lacks_magic(self.segments, segment, position):
            self.segments.files.write(segment.path, MAGIC_BYTE, position + MAGIC_AT - segment.start)
            return position, BLOCK_BYTES
        following = valid_after(self.segments, position, self.groups_from, self._void_record)
        if following < 0:
            return -1, position
        self.damage(position, following)
        return following, BLOCK_BYTES

    def save_some(self, position: int) -> None:
        """Write entries to files before they use much memory."""
        if self.records - self._saved_records < UNSAVED_RECORDS_MAX:
            return
        self._saved_records = self.records
        try:
            for queue in list(self.queues.dirty):
                self.queues.save(queue, position)
        except OSError as error:
            if not is_full(error):
                raise
            # They stay in memory until there is space.
            logger.warning("entries of consume queues cannot be saved: %s", error)

    def take_block(self, segment: Segment, position: int, data: bytes) -> tuple[int, int]:
        """Handle the records of *data*, which begins at *position*.

        Returns the number of bytes handled, and a number that says why no more were: the bytes to read if *data* ends
        within a record or a group, 0 at the end of the segment, or -1 at bytes that are no record.
        """
        at = 0
        end = len(data)
        bytes_left = segment.end - position
        while True:
            if not self.order.suspects:
                at = self._take_usual(data, at, position)
                if at == bytes_left:
                    return at, 0
            if end - at < FILLER_BYTES:
                return at, (FILLER_BYTES if position + end < segment.end and at else -1)
            size, magic = FILLER.unpack_from(data, at)
            if magic == BLANK_MAGIC and at + size == bytes_left:
                return bytes_left, 0
            if (magic != MAGIC_V1 and magic != MAGIC_V2) or size < RECORD_BYTES_MIN or at + size > bytes_left:
                return at, -1
            if at + size > end:
                return at, (size if position + end < segment.end else -1)
            if data[at + MARK_AT] & LAST == FIRST and position + at >= self.groups_from:
                group_bytes = whole_group(data, at, bytes_left, position)
                if not group_bytes:
                    return at, 2 * (end - at)
                if group_bytes < 0:
                    self._void_record(position + at)
                    return at, -1
            if not self._add_record(data, at, size, position + at, magic):
                return at, -1
            self.records += 1
            at += size
            if at == bytes_left:
                return at, 0

    def _take_usual(self, data: bytes, at: int, base: int) -> int:
        """Handle the usual records at index *at* of *data*, which begins at *base*; return the index after them."""
        terms = base, self.limit, self.groups_from, self._known, self.queues, self._codes, self.keys
        at, count, newest_ms = self._scan_usual(data, at, terms)
        self.records += count
        self.last_store_ms = max(self.last_store_ms, newest_ms)
        return at

    def _add_record(self, data: bytes, at: int, size: int, position: int, magic: int) -> bool:
        """Add the record at *at*, of any kind, to its queues or to `keys`; return False if it is damaged."""
        _, _, crc, queue_id, _, offset, stored_position, sys_flag, _ = START.unpack_from(data, at)
        end = at + size
        offsets = part_offsets(data, at, end, magic, sys_flag)
        if stored_position != position or offsets is None:
            return False
        body_at, topic_at, properties_at = offsets
        body = data[body_at : topic_at - (2 if magic == MAGIC_V2 else 1)]
        if body and crc32(body) & 0x7FFFFFFF != crc:
            return False
        if not record_crc_holds(data, at, end):
            return False
        store_ms = RecordView(data, at).store_ms
        topic = data[topic_at : properties_at - 2]
        properties = data[properties_at:end]
        if 0 in topic or properties[-1:] == b"\x00" or (0 in properties and self.torn_from <= position):
            # No CRC covers topic and properties. Bytes that were never written read as zeros: at the end of a record
            # anywhere, and elsewhere only where a write may be torn, because RocketMQ accepts a U+0000 inside.
            self._void_record(position)
            return False
        if position >= self.limit:
            return True
        self._add_to_queues(topic, queue_id, offset, position, size, sys_flag, body, properties, store_ms)
        return True

    def _void_record(self, position: int) -> None:
        """Invalidate the record at *position* by removing its magic, so that later starts skip it, too."""
        segment = self.segments.find(position)
        if segment is not None and self.torn_from <= position:
            self.segments.files.write(segment.path, bytes(4), position + MAGIC_AT - segment.start)

    def _add_to_queues(
        self,
        topic: bytes,
        queue_id: int,
        offset: int,
        position: int,
        size: int,
        sys_flag: int,
        body: bytes,
        properties: bytes,
        store_ms: int,
    ) -> None:
        if not 0 <= store_ms < STORE_MS_END:
            store_ms = self.last_store_ms
        if store_ms > self.last_store_ms:
            self.last_store_ms = store_ms
        if is_note(topic):
            if self._on_note is not None:
                self._on_note(read_note(body), position)
            return
        kind = sys_flag & TRANSACTION_MASK
        if kind == ROLLBACK or (kind == PREPARED and self.keys is None):
            return
        queue = self._queue_of(topic, queue_id, position)
        if self.keys is not None:
            if queue is not None:
                self.keys.append((queue, position, -1, store_ms, properties))
            return
        if queue is not None:
            self._add_entry(queue, offset, position, size, properties, store_ms)
        if properties.find(MULTI) >= 0:
            for name, light_offset in light_places(topic, properties):
                queue = self._queue_of(name, 0, position)
                if queue is not None:
                    self._add_entry(queue, light_offset, position, size, properties, store_ms)

    def _add_entry(self, queue: Queue, offset: int, position: int, size: int, properties: bytes, store_ms: int) -> None:
        """Set the entry at *offset* of *queue* to the record at *position*."""
        dispatch = queue.dispatcher
        code = self._codes.of(properties) if dispatch is None else dispatch(properties, store_ms)
        if offset == queue.next_offset and queue not in self.order.suspects:
            self.queues.touch(queue)
            queue.add(position, size, code)
        else:
            self.order.take(queue, offset, position, size, code)

    def _queue_of(self, topic: bytes, queue_id: int, position: int) -> Queue | None:
        """Find or create the queue; return None to skip the record, or if its topic cannot be a directory name."""
        of_topic = self._known.get(topic)
        if of_topic is None:
            of_topic = self._known[topic] = {}
        if queue_id in of_topic:
            return of_topic[queue_id]
        try:
            name = topic.decode()
        except UnicodeDecodeError:
            name = ""
        if not name or "/" in name or name in (".", "..") or queue_id < 0:
            self.lost(position)
            return None
        queue = of_topic[queue_id] = self._find(name, queue_id)
        return queue

    def forget_topic(self, topic: str) -> None:
        """Look up the queues of *topic* again."""
        self._known.pop(topic.encode(), None)

    def ignore(self, queue: Queue) -> None:
        """Ignore further records of *queue*."""
        self.order.suspects.pop(queue, None)
        self._known.setdefault(queue.topic_bytes, {})[queue.queue_id] = None

    # ---- damage

    def lost(self, position: int) -> None:
        """Report the record at *position*, which contradicts other records or is malformed."""
        self.damaged += 1
        logger.error("record at position %d has a damaged header; skipping it", position)

    def damage(self, start: int, end: int) -> None:
        """Report that there is no record from *start* to *end*; one begins at *end*."""
        self.damaged += 1
        self.damaged_bytes += end - start
        self.order.damage(start, end - start)
        logger.error("the log holds no record from position %d to %d; skipping these %d bytes", start, end, end - start)
