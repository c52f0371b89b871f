"""Inspects the log in a data directory that no broker has open: its content and its damage. Changes nothing.

The log is walked from its first byte to its last. Bytes that are no record are judged as in recovery:
if an intact record follows, they are damage; otherwise the log ends there.
"""

from collections.abc import Callable, Iterator
from typing import Final

from msgspec import Struct, field

from martlet.errors import CorruptRecord, StoreError
from martlet.message import Record
from martlet.records.codec import decode_record
from martlet.records.layout import (
    BLANK_MAGIC,
    FILLER,
    FILLER_BYTES,
    MAGICS,
    PREPARED,
    RECORD_BYTES_MIN,
    ROLLBACK,
    TRANSACTION_MASK,
)
from martlet.store.disk.checkpoint import Checkpoint, read_checkpoint, stopped_in_order
from martlet.store.disk.data_directory import lock_directory
from martlet.store.disk.files import Disk, Files
from martlet.store.disk.segments import Segment, Segments
from martlet.store.format.atomic import FIRST, LAST, MARK_AT, NOWHERE, may_begin_at, valid_after
from martlet.store.format.light import places
from martlet.store.format.notes import NOTES_TOPIC, read_note

__all__ = [
    "Damage",
    "Inspection",
    "LogWalk",
    "QueueContent",
    "SegmentContent",
    "inspect",
    "record_at",
    "topics_deleted_since",
]

BLOCK_BYTES: Final = 4 * 1024 * 1024
OPEN_FILES: Final = 64

Report = Callable[[int, int, int], None]
Take = Callable[[Record], None]


class SegmentContent(Struct):
    """One file of the log; ``end`` is the end of its last record."""

    path: str
    start: int
    file_bytes: int
    end: int
    records: int = 0
    first_ms: int = 0
    last_ms: int = 0


class QueueContent(Struct):
    """The records of one queue in the log; if its topic was deleted and recreated, only the newer ones."""

    topic: str
    queue_id: int
    first_offset: int
    next_offset: int
    records: int = 0
    size: int = 0
    first_ms: int = 0
    last_ms: int = 0
    jumped_to: int = -1

    def follow(self, offset: int, *, after_damage: bool) -> None:
        """Note that the next record of this queue has *offset*, which a flipped bit may have changed."""
        expected = self.next_offset
        if offset == expected or offset == self.jumped_to + 1 or (after_damage and offset > expected):
            self.next_offset = offset + 1
        elif not offset:
            self.first_offset, self.next_offset = 0, 1
            self.records = self.size = 0
        else:
            self.jumped_to = offset
            self.next_offset = expected + 1


class Damage(Struct):
    """Log bytes from ``start`` up to ``end`` that contain no intact record, although records follow."""

    start: int
    end: int
    text: str


class Inspection(Struct):
    """The result. A crash left ``torn_bytes`` at the end of the log; the next start removes them."""

    stopped_in_order: bool = True
    segments: list[SegmentContent] = field(default_factory=list)
    queues: dict[tuple[str, int], QueueContent] = field(default_factory=dict)
    damage: list[Damage] = field(default_factory=list)
    records: int = 0
    log_start: int = 0
    log_end: int = 0
    torn_bytes: int = 0


def inspect(directory: str, disk: Disk, *, report: Report | None = None) -> Inspection:
    """Walk the log in *directory*, without checking the CRCs of bodies.

    Args:
      report: called after each block with the bytes done, the total bytes, and the records so far.

    Raises:
      StoreError: there is no log.
      StoreLocked: a broker has it open.
    """
    require_log(directory, disk)
    lock = _lock(directory, disk)
    files = Files(disk, OPEN_FILES, read_only=True)
    try:
        segments = Segments(files, f"{directory}/commitlog", 0)
        segments.load()
        names = disk.names(directory)
        checkpoint = read_checkpoint(files, f"{directory}/checkpoint")
        clean = stopped_in_order(checkpoint, abort="abort" in names)
        journal = any(name.startswith("queues.") for name in names)
        walk = LogWalk(
            segments, bodies=False, groups_from=_groups_checked_from(checkpoint, clean=clean, journal=journal)
        )
        walk.found.stopped_in_order = clean
        walk.run(report)
        return walk.found
    finally:
        files.close()
        if lock >= 0:
            disk.close(lock)


def topics_deleted_since(segments: Segments, position: int) -> set[str]:
    """Return the topics whose deletion the log records from *position* on, where a record begins or the log ends."""
    deleted: set[str] = set()

    def take(record: Record) -> None:
        if record.topic == NOTES_TOPIC:
            deleted.add(read_note(record.body).deleted)

    LogWalk(segments, bodies=False, take=take).run(None, position)
    return deleted - {""}


def _groups_checked_from(checkpoint: Checkpoint | None, *, clean: bool, journal: bool) -> int:
    """Return the position from which the next start accepts only whole groups of records (`Recovery`)."""
    if clean:
        return NOWHERE
    if checkpoint is None:
        return 0
    return NOWHERE if checkpoint.shared or not (checkpoint.known or journal) else max(checkpoint.position, 0)


def require_log(directory: str, disk: Disk) -> None:
    """Raise StoreError unless *directory* is the data directory of a broker."""
    if "commitlog" not in disk.names(directory):
        raise StoreError(f"directory {directory!r} holds no commitlog; name the data directory of a broker")


def record_at(directory: str, disk: Disk, position: int) -> Record:
    """Return the record at *position* of the log.

    Raises:
      StoreError: there is none, or it is damaged.
    """
    files = Files(disk, OPEN_FILES, read_only=True)
    segments = Segments(files, f"{directory}/commitlog", 0)
    try:
        segments.load()
        head = segments.read(position, FILLER_BYTES)
        if len(head) < FILLER_BYTES:
            raise StoreError(f"position {position} is not in the log; it goes from {segments.start} to {segments.end}")
        size, magic = FILLER.unpack(head)
        if magic not in MAGICS or size < RECORD_BYTES_MIN:
            raise StoreError(f"no record begins at position {position}")
        return decode_record(segments.read(position, size), 0, position)
    finally:
        files.close()


def _lock(directory: str, disk: Disk) -> int:
    if "lock" not in disk.names(directory):
        return -1
    try:
        return lock_directory(directory, disk)
    except OSError:  # a read-only copy; no broker can have it open for writing
        return -1


class LogWalk:
    """One walk over the log, with the results so far; *take* is called with every intact record.

    From *groups_from* on, an incomplete group counts as damage.
    """

    def __init__(
        self, segments: Segments, *, bodies: bool, take: Take | None = None, groups_from: int = NOWHERE
    ) -> None:
        self.found = Inspection()
        self._groups_from = groups_from
        self._bodies = bodies
        self._segments = segments
        self._take_record = take

    def run(self, report: Report | None, begin: int = 0) -> None:
        """Walk the log, from its first byte or the record at *begin* on."""
        segments = self._segments
        self.found.log_start = self.found.log_end = position = max(segments.start, begin)
        for segment in segments.items:
            if segment.end <= begin:
                continue
            content = SegmentContent(segment.path, segment.start, segment.end - segment.start, segment.start)
            self.found.segments.append(content)
            position = max(position, segment.start)
            while segment.start <= position < segment.end:
                position = self._walk_block(segment, content, position)
                if report is not None:
                    report(position - segments.start, segments.end - segments.start, self.found.records)
        self.found.torn_bytes = self._count_torn_bytes()

    def _walk_block(self, segment: Segment, content: SegmentContent, position: int) -> int:
        """Handle about one block of records from *position* on; return the position to continue at."""
        bytes_left = segment.end - position
        head = self._segments.read(position, FILLER_BYTES)
        if len(head) == FILLER_BYTES:
            size, magic = FILLER.unpack(head)
            if magic == BLANK_MAGIC and size == bytes_left:
                return segment.end
            if magic in MAGICS and RECORD_BYTES_MIN <= size <= bytes_left:
                data = self._segments.read(position, max(size, BLOCK_BYTES))
                return self._walk_records(segment, content, position, data)
        return self._skip(position, "no record begins here")

    def _walk_records(self, segment: Segment, content: SegmentContent, position: int, data: bytes) -> int:
        at = 0
        while len(data) - at >= FILLER_BYTES:
            size, magic = FILLER.unpack_from(data, at)
            if magic not in MAGICS or size < RECORD_BYTES_MIN or at + size > len(data):
                break
            try:
                record = decode_record(data, at, position + at, check_body=self._bodies)
            except CorruptRecord as error:
                return self._skip(position + at, str(error))
            if record.properties.endswith(b"\x00"):
                return self._skip(position + at, "a record has lost the end of its properties")
            is_group_checked = data[at + MARK_AT] & LAST == FIRST and position + at >= self._groups_from
            if is_group_checked and not may_begin_at(self._segments, segment, position + at):
                return self._skip(position + at, "a group of records is incomplete")
            self._add_record(content, record)
            at += size
        return position + at if at else self._skip(position, "a record is cut short")

    def _skip(self, position: int, text: str) -> int:
        """Return the position of the next record after *position*, where none begins, or the end of the log."""
        following = valid_after(self._segments, position, self._groups_from)
        if following < 0:
            return self._segments.end
        self.found.damage.append(Damage(position, following, text))
        return following

    def _add_record(self, content: SegmentContent, record: Record) -> None:
        content.records += 1
        content.first_ms = content.first_ms or record.store_ms
        content.last_ms = max(content.last_ms, record.store_ms)
        content.end = self.found.log_end = record.position + record.size
        self.found.records += 1
        if self._take_record is not None:
            self._take_record(record)
        if record.sys_flag & TRANSACTION_MASK in (PREPARED, ROLLBACK):
            return
        for topic, queue_id, offset in places(record):
            key = topic, queue_id
            queue = self.found.queues.get(key)
            if queue is None:
                queue = self.found.queues[key] = QueueContent(*key, offset, offset)
            queue.records += 1
            queue.size += record.size
            queue.follow(offset, after_damage=bool(self.found.damage))
            queue.first_ms = queue.first_ms or record.store_ms
            queue.last_ms = max(queue.last_ms, record.store_ms)

    def _count_torn_bytes(self) -> int:
        """Return the number of bytes from the log's end to the last nonzero byte, not counting an end-of-file mark."""
        end = self.found.log_end
        segment = self._segments.find(end)
        if segment is None:
            return 0
        nonzero_end = 0
        for at, data in self._read_blocks(segment, end):
            used_bytes = len(data.rstrip(b"\x00"))
            nonzero_end = at + used_bytes if used_bytes else nonzero_end
        return max(nonzero_end - end, 0)

    def _read_blocks(self, segment: Segment, position: int) -> Iterator[tuple[int, bytes]]:
        files = self._segments.files
        size = files.size(segment.path)
        at = position - segment.start
        while (at := files.next_data(segment.path, at)) < size:
            data = files.read(segment.path, BLOCK_BYTES, at)
            yield segment.start + at, data
            at += len(data)
