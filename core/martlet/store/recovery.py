"""What a start does: find the log's end, and make the indexes agree with it.

Everything below the checkpoint's position is durable and indexed; the log is read from there on,
and each record put into its queue again. Where bytes are no record, the next one that is
decides: if there is one, what lies before it is damage and is skipped and reported; if not, the
log ends here. A queue whose files hold less than the list of queues promises is made anew from
the whole log, and so is the key index.
"""

import logging
from collections.abc import Callable
from itertools import pairwise
from struct import Struct
from typing import Final, final

import trio

from martlet.checksum import crc32
from martlet.store.checkpoint import Checkpoint, QueueList
from martlet.store.codec import (
    BLANK_MAGIC,
    BODY_BYTES,
    BORN_V6,
    ENTRY,
    ENTRY_BYTES,
    FILLER,
    FILLER_BYTES,
    HEAD_BYTES,
    MAGIC_V1,
    MAGIC_V2,
    PREPARED,
    RECORD_BYTES_MIN,
    ROLLBACK,
    SHORT,
    START,
    STORE_V6,
    TRANSACTION_MASK,
    check_record,
    seal_holds,
)
from martlet.store.keys import KeyIndex
from martlet.store.queues import BLANK_SIZE, Queue, Queues
from martlet.store.segments import Segment, Segments
from martlet.store.tags import TagCodes

__all__ = ["Follower", "Progress", "Recovery", "valid_after"]

logger = logging.getLogger("martlet.store")

Progress = Callable[[int, int, int], None]

BLOCK_BYTES: Final = 4 * 1024 * 1024
REPORT_SECONDS: Final = 0.25
MARK: Final = b"\xda\xa3\x20"
# Entries of this many records stay in memory before they go to their files.
UNSAVED_RECORDS_MAX: Final = 200_000
# A single flipped bit can feign any gap, but one of this size costs little.
SMALL_GAP: Final = 1024
NOWHERE: Final = 2**62  # behind every position
# size magic crc queue_id queue_offset position sys_flag store_ms body_bytes, of a record with IPv4 hosts
USUAL: Final = Struct(">iIIi4xqqi8x8xq8x4x8xi")
UNUSUAL_FLAGS: Final = BORN_V6 | STORE_V6 | TRANSACTION_MASK
STORE_MS: Final = Struct(">q")
# The most entries behind a queue's promised end that are looked at in one read.
NEAR_ENTRIES: Final = 512


def valid_after(segments: Segments, position: int) -> int:
    """The first position behind *position* at which an intact record begins; -1 when none does."""
    for segment in segments.items:
        if segment.end <= position:
            continue
        found = _valid_in(segments, segment, max(position + 1, segment.start))
        if found >= 0:
            return found
    return -1


def _valid_in(segments: Segments, segment: Segment, position: int) -> int:
    size = segments.files.size(segment.path)
    while position < segment.end:
        at = segments.files.next_data(segment.path, position - segment.start)
        if at >= size:
            return -1
        # The first bytes of a record's size are zeros.
        position = max(position, segment.start + at - 4)
        data = segments.read(position, BLOCK_BYTES)
        at = data.find(MARK)
        while at >= 0:
            if at >= 4 and intact_at(segments, segment, position + at - 4):
                return position + at - 4
            at = data.find(MARK, at + 1)
        if len(data) <= 7:
            return -1
        position += len(data) - 7
    return -1


def intact_at(segments: Segments, segment: Segment, position: int) -> bool:
    """Whether an intact record begins at *position* of *segment*."""
    head = segments.read(position, FILLER_BYTES)
    if len(head) < FILLER_BYTES:
        return False
    size, magic = FILLER.unpack(head)
    if magic not in (MAGIC_V1, MAGIC_V2) or size < RECORD_BYTES_MIN or position + size > segment.end:
        return False
    data = segments.read(position, size)
    return len(data) == size and check_record(data, 0, size, position)


@final
class _Suspect:
    """A record whose queue offset is not the next one; the queue's next record shows which of the two is right."""

    __slots__ = ("code", "offset", "position", "size")

    def __init__(self, offset: int, position: int, size: int, code: int) -> None:
        self.offset = offset
        self.position = position
        self.size = size
        self.code = code


@final
class Recovery:
    """One start of a store; afterwards the fields say what was found."""

    __slots__ = (
        "_by_topic",
        "_codes",
        "_listed_start",
        "_on_rebuild",
        "_report",
        "_reported",
        "_saved_records",
        "_suspects",
        "_torn_from",
        "_void",
        "cut_bytes",
        "damaged",
        "damaged_bytes",
        "end",
        "keys",
        "last_store_ms",
        "queues",
        "rebuild",
        "records",
        "segments",
        "start",
    )

    def __init__(
        self,
        segments: Segments,
        queues: Queues,
        keys: KeyIndex | None,
        report: Progress | None,
        on_rebuild: Callable[[], None],
    ) -> None:
        self.segments = segments
        self.queues = queues
        self.keys = keys
        self._report = report
        # Called before queues are emptied: what the checkpoint says of them no longer holds.
        self._on_rebuild = on_rebuild
        self._reported = -REPORT_SECONDS
        self._codes = TagCodes()
        self._by_topic: dict[bytes, dict[int, Queue]] = {}
        self._suspects: dict[Queue, _Suspect] = {}
        self._void: dict[bytes, int] = {}
        self._listed_start = -1
        self._torn_from = NOWHERE
        # Queues that are made anew from the whole log; the others only take records from `start` on.
        self.rebuild: set[Queue] = set()
        self.start = 0
        self.end = 0
        self.records = 0
        self._saved_records = 0
        self.damaged = 0
        self.damaged_bytes = 0
        self.cut_bytes = 0
        self.last_store_ms = 0

    async def run(self, checkpoint: Checkpoint | None, listed: QueueList | None, *, clean: bool) -> None:
        """Find the end of the log and complete queues and keys.

        Args:
          checkpoint: None, or by whom it may be: then as much as needed is read.
          listed: what the queues held at least.
          clean: the last stop was an orderly one.
        """
        self._void = {topic.encode(): position for topic, position in (listed.deleted if listed else {}).items()}
        self._listed_start = listed.log_start if listed else -1
        self.start = self._choose_start(checkpoint, clean=clean)
        self.segments.complete()
        self._torn_from = NOWHERE if clean else self.start
        scan_from = self._load_queues(checkpoint, listed, clean=clean)
        keys, self.keys = self.keys, None  # they follow, see `Follower`
        await self._scan(scan_from)
        if keys is not None:
            self._load_keys(keys, checkpoint, clean=clean)
        self._settle_suspects()

    # ---- where to begin

    def _choose_start(self, checkpoint: Checkpoint | None, *, clean: bool) -> int:
        segments = self.segments
        if not segments.items or checkpoint is None:
            return segments.start
        if checkpoint.position >= 0:
            return self._within(checkpoint.position)
        if clean:
            return segments.end  # of RocketMQ: lowered to what its queues hold
        limit = min(checkpoint.log_ms, checkpoint.queues_ms) - 3000
        for segment in reversed(segments.items):
            if 0 < segments.head_store_ms(segment) <= limit:
                return segment.start
        return segments.start

    def _within(self, position: int) -> int:
        """*position*, or the start of the last segment when the files end before it."""
        segments = self.segments
        if position <= segments.start:
            return segments.start
        last = segments.items[-1]
        if position > last.end or (position > last.start + segments.files.size(last.path)):
            logger.error("the log ends before position %d, up to which it was durable; files are missing", position)
            return last.start
        return position

    # ---- queues

    def _load_queues(self, checkpoint: Checkpoint | None, listed: QueueList | None, *, clean: bool) -> int:
        """Load every queue up to `start`; return from where the log has to be read."""
        queues, files = self.queues, self.queues.files
        disk = files.files.disk
        foreign = checkpoint is None or checkpoint.position < 0
        limit = NOWHERE if foreign and clean and checkpoint is not None else self.start
        highest = self.segments.start
        for topic in disk.names(files.directory):
            for name in disk.names(f"{files.directory}/{topic}"):
                if not name.isdecimal():
                    continue
                queue = queues.get(topic, int(name))
                promised = listed.queues.get((topic, int(name)), (0, 0)) if listed else (0, 0)
                if not self._load_queue(queue, limit, promised, clean=clean and not foreign):
                    self.rebuild.add(queue)
                highest = max(highest, queue.last_end)
        if listed is not None:
            for (topic, queue_id), (_, next_offset) in listed.queues.items():
                if queues.find(topic, queue_id) is None and next_offset:
                    self.rebuild.add(queues.get(topic, queue_id))
        if self.rebuild:
            self._on_rebuild()
        for queue in self.rebuild:
            logger.warning("consume queue %s/%d is missing or damaged; it is made anew", queue.topic, queue.queue_id)
            self._start_over(queue)
        if limit == NOWHERE:
            self.start = highest
        if listed is None and (not queues.topics or not foreign):
            # Nothing tells which queues there should be.
            self._on_rebuild()
            self.rebuild.update(queues.all())
            for queue in self.rebuild:
                self._start_over(queue)
            self.start = self.segments.start
        return self.segments.start if self.rebuild else self.start

    def _start_over(self, queue: Queue) -> None:
        """Empty *queue* in memory and on the disk."""
        if self.queues.files.starts(queue):
            self.queues.files.remove(queue.topic, queue.queue_id)
        queue.begin_at(0)

    def _load_queue(self, queue: Queue, limit: int, promised: tuple[int, int], *, clean: bool) -> bool:
        """Set its bounds from the files; False when they hold less than *promised* (first and next offset)."""
        files = self.queues.files
        queue.unsure_names = not clean
        starts = files.starts(queue)
        if not starts:
            return promised[1] == 0
        if any(b - a != files.file_bytes for a, b in pairwise(starts)) or files.any_short(queue, starts):
            return False
        low = starts[0] // ENTRY_BYTES
        high = starts[-1] // ENTRY_BYTES + files.file_entries
        end = self._search_end(queue, low, high, limit, promised[1])
        if end < promised[1]:
            return False
        if not clean:
            end = self._last_sound(queue, low, end, promised[1])
        queue.begin_at(end)
        first = self.queues.first_behind(queue, low, end, self.segments.start)
        if first > promised[0] and promised[1] and self._listed_start == self.segments.start:
            return False
        queue.first_offset = first
        queue.begins = end == low
        if end > first:
            position, size = self._entry(queue, end - 1)
            queue.last_end = position + size if size != BLANK_SIZE else 0
        if not clean:
            files.cut(queue, end)
        return True

    def _entry(self, queue: Queue, offset: int) -> tuple[int, int]:
        data = self.queues.files.read(queue, offset, 1)
        if len(data) < ENTRY_BYTES:
            return 0, 0
        position, size, _ = ENTRY.unpack(data)
        return position, size

    def _search_end(self, queue: Queue, low: int, high: int, limit: int, promised: int) -> int:
        """The offset behind the last entry of a record before *limit*; looks near *promised* first."""
        if low < promised <= high:
            data = self.queues.files.read(queue, promised - 1, NEAR_ENTRIES)
            for index, (position, size, _) in enumerate(ENTRY.iter_unpack(data)):
                if size <= 0 or position >= limit:
                    if index:
                        return promised - 1 + index
                    break
        while low < high:
            middle = (low + high) // 2
            position, size = self._entry(queue, middle)
            if size > 0 and position < limit:
                low = middle + 1
            else:
                high = middle
        return low

    def _last_sound(self, queue: Queue, low: int, end: int, promised: int) -> int:
        """Walk back from *end* over entries that name no record of this queue: torn ones, behind what was promised."""
        while end > max(low, promised):
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

    # ---- keys

    def _load_keys(self, keys: KeyIndex, checkpoint: Checkpoint | None, *, clean: bool) -> None:
        """Load the key index; its ``position`` says from where the log has to be read for it."""
        loaded = keys.load()
        # After a crash nothing but a checkpoint of ours tells how much of the index is durable: a failed write can
        # leave a page of which only the times count, and a power cut can leave a header ahead of its slots.
        if clean and checkpoint is not None and checkpoint.position < 0 and loaded and keys.items:
            keys.reopen(clean=False)
            newest = max(item.end_position for item in keys.items)
            keys.position = min(max(newest, self.segments.start), self.end)
            return
        if not loaded or checkpoint is None or checkpoint.position < 0 or keys.total() < checkpoint.index_entries:
            if checkpoint is not None and (self.end or keys.items):
                logger.warning("the key index is missing or damaged; it is made anew")
            keys.clear()
            keys.position = self.segments.start
            return
        keys.reopen(clean=clean)
        keys.new_names = not clean
        keys.position = min(max(checkpoint.index_position, self.segments.start), self.end)

    # ---- the log

    async def _scan(self, position: int) -> None:
        """Read the log from *position* to its end."""
        segments = self.segments
        begin = position
        total = max(segments.end - begin, 1)
        want = BLOCK_BYTES
        while (segment := segments.find(position)) is not None:
            data = segments.read(position, want)
            done, more = self._scan_block(segment, position, data)
            position += done
            self._save_some(position)
            self._progress(position - begin, total)
            await trio.lowlevel.checkpoint()
            if done and more >= 0:
                want = max(BLOCK_BYTES, more)
                continue
            if more > want:  # a record longer than a block
                want = more
                continue
            found = valid_after(segments, position)
            if found < 0:
                break
            self._damage(position, found)
            position = found
            want = BLOCK_BYTES
        self._cut(position)
        self._progress(position - begin, position - begin, last=True)

    def _save_some(self, position: int) -> None:
        """Write entries to files before they take much memory."""
        if self.records - self._saved_records < UNSAVED_RECORDS_MAX:
            return
        self._saved_records = self.records
        for queue in list(self.queues.dirty):
            self.queues.save(queue, position)

    def _scan_block(self, segment: Segment, position: int, data: bytes) -> tuple[int, int]:
        """Take the records of *data*, which begins at *position*.

        Returns the bytes taken, and why it ended: the size of a record that is longer than the rest of
        *data*, 0 when the segment ends, or -1 when something else than a record follows.
        """
        at = 0
        end = len(data)
        room = segment.end - position
        records = self.records
        try:
            while True:
                if end - at < FILLER_BYTES:
                    return at, (FILLER_BYTES if position + end < segment.end and at else -1)
                size, magic = FILLER.unpack_from(data, at)
                if magic == BLANK_MAGIC and at + size == room:
                    return room, 0
                if (magic != MAGIC_V1 and magic != MAGIC_V2) or size < RECORD_BYTES_MIN or at + size > room:
                    return at, -1
                if at + size > end:
                    return at, (size if position + end < segment.end else -1)
                if not self._take(data, at, size, position + at, magic):
                    return at, -1
                records += 1
                at += size
                if at == room:
                    return at, 0
        finally:
            self.records = records

    def _take(self, data: bytes, at: int, size: int, position: int, magic: int) -> bool:
        """Put the record at *at* into its queue and the key index; False when it is not intact.

        The short way, for all that is usual; whatever is odd is looked at again by `_take_any`.
        """
        _, _, crc, queue_id, offset, said, sys_flag, store_ms, body_bytes = USUAL.unpack_from(data, at)
        if magic != MAGIC_V1 or sys_flag & UNUSUAL_FLAGS or not 0 <= body_bytes <= size - RECORD_BYTES_MIN:
            return self._take_any(data, at, size, position, magic)
        end = at + size
        topic_at = at + HEAD_BYTES + body_bytes
        topic_end = topic_at + 1 + data[topic_at]
        if (
            said != position
            or topic_end + 2 > end
            or topic_end + 2 + (data[topic_end] << 8 | data[topic_end + 1]) != end
        ):
            return self._take_any(data, at, size, position, magic)
        if crc32(data[at + HEAD_BYTES : topic_at]) & 0x7FFFFFFF != crc or not seal_holds(data, at, end):
            return self._take_any(data, at, size, position, magic)
        of_topic = self._by_topic.get(data[topic_at + 1 : topic_end])
        queue = of_topic.get(queue_id) if of_topic is not None else None
        properties = data[topic_end + 2 : end]
        if queue is None or queue.timed or self._suspects or self._void or 0 in properties:
            return self._take_any(data, at, size, position, magic)
        if position >= self.start or queue in self.rebuild:
            if offset != queue.next_offset:
                return self._take_any(data, at, size, position, magic)
            queue.tail += ENTRY.pack(position, size, self._codes.of(properties))
            queue.next_offset = offset + 1
            queue.last_end = position + size
            if not queue.dirty:
                self.queues.touch(queue)
        if store_ms > self.last_store_ms:
            self.last_store_ms = store_ms
        if self.keys is not None and position >= self.keys.position:
            self.keys.put(queue, position, store_ms, properties)
        return True

    def _take_any(self, data: bytes, at: int, size: int, position: int, magic: int) -> bool:
        """As `_take`, for every kind of record."""
        _, _, crc, queue_id, _, offset, said, sys_flag, _ = START.unpack_from(data, at)
        end = at + size
        body_at = at + HEAD_BYTES
        store_at = at + 56
        if sys_flag & 0x30:
            body_at += (12 if sys_flag & BORN_V6 else 0) + (12 if sys_flag & STORE_V6 else 0)
            store_at += 12 if sys_flag & BORN_V6 else 0
        wide = magic == MAGIC_V2
        if said != position or body_at + 3 + wide > end:
            return False
        (body_bytes,) = BODY_BYTES.unpack_from(data, body_at - 4)
        topic_at = body_at + body_bytes
        if body_bytes < 0 or topic_at + 3 + wide > end:
            return False
        if wide:
            (topic_bytes,) = SHORT.unpack_from(data, topic_at)
            topic_at += 2
        else:
            topic_bytes = data[topic_at]
            topic_at += 1
        properties_at = topic_at + topic_bytes
        if topic_bytes < 0 or properties_at + 2 > end:
            return False
        if properties_at + 2 + SHORT.unpack_from(data, properties_at)[0] != end:
            return False
        if body_bytes and crc32(data[body_at : body_at + body_bytes]) & 0x7FFFFFFF != crc:
            return False
        if not seal_holds(data, at, end):
            return False
        (store_ms,) = STORE_MS.unpack_from(data, store_at)
        topic = data[topic_at:properties_at]
        properties = data[properties_at + 2 : end]
        if 0 in topic or (0 in properties and self._torn_from <= position):
            # No CRC guards these two. Where a write may have been torn, what is missing reads as zeros.
            self._void_record(position)
            return False
        if position < self._void.get(topic, 0):
            return True
        if not self._known(topic, queue_id):
            self._lost(position)
            return True
        self._dispatch(topic, queue_id, offset, position, size, sys_flag, properties, store_ms)
        return True

    def _void_record(self, position: int) -> None:
        """Let no later start take what this one did not: remove the magic."""
        segment = self.segments.find(position)
        if segment is not None and self._torn_from <= position:
            self.segments.files.write(segment.path, bytes(4), position + 4 - segment.start)

    def _known(self, topic: bytes, queue_id: int) -> bool:
        """Find or make the queue; False when its name can be no directory (a damaged header)."""
        of_topic = self._by_topic.get(topic)
        if of_topic is None:
            of_topic = self._by_topic[topic] = {}
        if queue_id in of_topic:
            return True
        try:
            name = topic.decode()
        except UnicodeDecodeError:
            return False
        if not name or "/" in name or "\x00" in name or name in (".", "..") or queue_id < 0:
            return False
        of_topic[queue_id] = self.queues.get(name, queue_id)
        return True

    def _dispatch(
        self,
        topic: bytes,
        queue_id: int,
        offset: int,
        position: int,
        size: int,
        sys_flag: int,
        properties: bytes,
        store_ms: int,
    ) -> None:
        queue = self._by_topic[topic][queue_id]
        if store_ms > self.last_store_ms:
            self.last_store_ms = store_ms
        kind = sys_flag & TRANSACTION_MASK
        if kind != PREPARED and kind != ROLLBACK and (position >= self.start or queue in self.rebuild):
            code = self._codes.due(properties, store_ms) if queue.timed else self._codes.of(properties)
            if offset == queue.next_offset and queue not in self._suspects:
                if not queue.dirty:
                    self.queues.touch(queue)
                queue.add(position, size, code)
            else:
                self._odd(queue, offset, position, size, code)
        keys = self.keys
        if keys is not None and position >= keys.position and kind != ROLLBACK:
            keys.put(queue, position, store_ms, properties)

    # ---- offsets that do not follow one another

    def _odd(self, queue: Queue, offset: int, position: int, size: int, code: int) -> None:
        """A record whose queue offset is not the next: a gap, a topic made again, or a damaged header."""
        self.queues.touch(queue)
        suspect = self._suspects.pop(queue, None)
        if suspect is not None:
            if offset == suspect.offset + 1:
                self._jump(queue, suspect)
            elif offset == queue.next_offset + 1:
                # The suspect had this place, its header is damaged.
                self._lost(suspect.position)
                queue.add_holes(1, suspect.position)
            elif queue.next_offset < suspect.offset < offset and self._damage_hides(offset - queue.next_offset - 1):
                self._jump(queue, suspect)
            else:
                self._lost(suspect.position)
        if offset == queue.next_offset:
            queue.add(position, size, code)
        elif queue.next_offset == queue.first_offset and not queue.tail:
            # The first message of the queue that is still in the log.
            queue.begin_at(offset)
            queue.add(position, size, code)
        else:
            self._suspects[queue] = _Suspect(offset, position, size, code)

    def _damage_hides(self, count: int) -> bool:
        """Whether so many records may have stood where no record was found."""
        return count <= self.damaged_bytes // RECORD_BYTES_MIN

    def _jump(self, queue: Queue, suspect: _Suspect) -> None:
        """The suspect was right: fill the gap before it, or begin the queue anew there."""
        if suspect.offset > queue.next_offset:
            queue.add_holes(suspect.offset - queue.next_offset, suspect.position)
        else:
            self._start_over(queue)
            queue.begin_at(suspect.offset)
        queue.add(suspect.position, suspect.size, suspect.code)

    def _settle_suspects(self) -> None:
        """No further record tells: believe a gap that damage explains or that is small, and a topic made again."""
        for queue, suspect in self._suspects.items():
            gap = suspect.offset - queue.next_offset
            again = suspect.offset == 0 and queue.next_offset & (queue.next_offset - 1)
            if 0 < gap <= SMALL_GAP or (gap > 0 and self._damage_hides(gap)) or again:
                self._jump(queue, suspect)
            else:
                self._lost(suspect.position)
        self._suspects.clear()

    # ---- damage

    def _lost(self, position: int) -> None:
        self.damaged += 1
        logger.error("record at position %d has a damaged header; it is skipped", position)

    def _damage(self, start: int, end: int) -> None:
        self.damaged += 1
        self.damaged_bytes += end - start
        logger.error(
            "the log holds no record from position %d to %d; these %d bytes are skipped", start, end, end - start
        )

    def _cut(self, position: int) -> None:
        """Make *position* the end of the log; nothing valid is behind it."""
        segments = self.segments
        for segment in segments.remove_after(position):
            logger.warning("segment %s holds no record; it is removed", segment.path)
        self.end = position
        if not segments.items:
            return
        last = segments.items[-1]
        at = position - last.start
        size = segments.files.size(last.path)
        if at >= size or segments.files.next_data(last.path, at) >= size:
            return
        garbage = self._garbage(last, position)
        if garbage and self._torn_from == NOWHERE:
            # No write was under way at an orderly stop: this was a record.
            self.end = position + garbage
            self._damage(position, self.end)
        elif garbage:
            self.cut_bytes = garbage
            logger.warning("the log ends at position %d with %d bytes of no record; they are cut", position, garbage)
            segments.files.clear(last.path, at)

    def _garbage(self, segment: Segment, position: int) -> int:
        """How many bytes from *position* to the last one that is not zero."""
        files = self.segments.files
        size = files.size(segment.path)
        at = position - segment.start
        last = 0
        while (at := files.next_data(segment.path, at)) < size:
            data = files.read(segment.path, BLOCK_BYTES, at)
            used = len(data.rstrip(b"\x00"))
            last = max(last, at + used - (position - segment.start)) if used else last
            at += len(data)
        return last

    def _progress(self, done: int, total: int, *, last: bool = False) -> None:
        if self._report is None:
            return
        now = trio.current_time()
        if last or now - self._reported >= REPORT_SECONDS:
            self._reported = now
            self._report(done, max(total, done), self.records)


@final
class Follower:
    """Brings the key index from where it stands to the end of the log, block by block, beside other work.

    While it is at work nothing is queued for the index: what is appended meanwhile it reads as well.
    """

    __slots__ = ("_scan", "keys", "segments")

    def __init__(self, segments: Segments, queues: Queues, keys: KeyIndex) -> None:
        self.segments = segments
        self.keys = keys
        self._scan = Recovery(segments, queues, keys, None, lambda: None)
        # The queues have these records.
        self._scan.start = NOWHERE

    def read(self, end: int, size: int) -> bytes:
        """Up to *size* bytes from where the index stands, at most to log position *end*; blocks."""
        return self.segments.read(self.keys.position, min(size, end - self.keys.position))

    def take(self, data: bytes, end: int, size: int) -> int:
        """Index what `read` returned for *end* and *size*; return the size to read next, 0 for the usual."""
        keys = self.keys
        segment = self.segments.find(keys.position)
        if segment is None:
            keys.position = end
            return 0
        done, more = self._scan._scan_block(segment, keys.position, data)
        if done:
            keys.position += done
        elif size < more <= end - keys.position:
            return more
        else:
            found = valid_after(self.segments, keys.position)
            keys.position = found if 0 <= found < end else end
        return 0
