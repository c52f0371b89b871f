"""Rebuilds damaged parts of consume queues from the log.

The range of a queue's offsets is known, and the CRC of each block. So a repair reads the blocks; for blocks that are
missing or do not match, it reads the log between the records of their neighbours and writes them again. If the log lost
a record too, its place becomes a hole.

`Repairs` collects the queues with damaged blocks, and rebuilds them with one repair at a time.
"""

import logging
from typing import Final, final

import trio

from martlet.records.layout import BLANK_SIZE, ENTRY, ENTRY_BYTES
from martlet.runtime.wakeup import Wakeup
from martlet.store.append.admission import Admission
from martlet.store.append.flusher import Flusher
from martlet.store.disk.dry_disk import DryDisk
from martlet.store.disk.files import Disk, Files, is_full
from martlet.store.disk.segments import Segments
from martlet.store.format.notes import Note
from martlet.store.queues.queues import BlockDamaged, Queue, QueueFiles, Queues
from martlet.store.recovery.scan import BLOCK_BYTES, NOWHERE, UNSAVED_RECORDS_MAX, Scan

__all__ = ["MemoryRepair", "Repair", "Repairs"]

logger = logging.getLogger("martlet.store")

# Entries kept in memory while the disk is full, 20 MB.
MEMORY_ENTRIES_MAX: Final = 1_000_000
# With more queues than this, one log line covers all of them.
NAMED_MAX: Final = 10


@final
class _Part:
    """Offsets from ``start`` up to ``end`` of one queue; their records are at log positions ``low`` to ``high``."""

    __slots__ = ("end", "high", "low", "mark", "queue", "scratch", "start")

    def __init__(self, queue: Queue, start: int, end: int, low: int, high: int, mark: tuple[int, int]) -> None:
        self.queue = queue
        self.start = start
        self.end = end
        self.low = low
        self.high = high
        # The queue's mark when its blocks were checked.
        self.mark = mark
        # Collects the records; saving it writes to the queue's files.
        self.scratch = Queue(queue.topic, queue.queue_id, queue.dispatcher)


@final
class Repair:
    """One repair of *wanted*. `prepare` and `scan` block and may run in any thread; call `finish` on the event loop.

    Args:
      end: the log position up to which the queues' files are complete.
    """

    def __init__(self, segments: Segments, queues: Queues, wanted: list[Queue], end: int) -> None:
        self.queues = queues
        self.wanted = wanted
        self.parts: list[_Part] = []
        self.paths: set[str] = set()
        self._segments = segments
        self._end = end
        self._at = end
        self._want = BLOCK_BYTES
        self._saved_records = 0
        self.scan = Scan(segments, Queues(queues.files), lambda topic, queue_id: None, self._apply_note)

    # ---- finding damage

    def prepare(self) -> None:
        """Check every block of every queue, and find the ranges of the log to read."""
        for queue in self.wanted:
            part = self._find_damage(queue)
            if part is not None:
                self.parts.append(part)
        if not self.parts:
            return
        self._log_damage()
        self._at = min(part.low for part in self.parts)
        scratch_queues = {(part.queue.topic, part.queue.queue_id): part.scratch for part in self.parts}
        self.scan = Scan(
            self._segments,
            self.scan.queues,
            lambda topic, queue_id: scratch_queues.get((topic, queue_id)),
            self._apply_note,
        )
        self.scan.limit = max(part.high for part in self.parts)
        for part in self.parts:
            part.scratch.begin_at(part.start)
            part.scratch.begins = False
            part.scratch.mark = part.start, self._write_blanks(part)
            self.scan.queues.topics.setdefault(part.queue.topic, {})[part.queue.queue_id] = part.scratch

    def _find_damage(self, queue: Queue) -> _Part | None:
        """Return the part of *queue* from its first to its last damaged block; None if all blocks are intact."""
        mark = queue.mark
        block_entries = self.queues.files.block_entries
        first_offset = queue.stored_from
        blocks = (
            range(first_offset // block_entries, -(-mark[0] // block_entries)) if mark[0] > first_offset else range(0)
        )
        bad_blocks = [block for block in blocks if not self._is_intact(queue, block)]
        if not bad_blocks:
            return None
        start = max(bad_blocks[0] * block_entries, first_offset)
        end = min((bad_blocks[-1] + 1) * block_entries, mark[0])
        low = (
            self._segments.start if bad_blocks[0] == blocks[0] else self._end_of_record(queue, start - 1, first_offset)
        )
        high = self._end if bad_blocks[-1] == blocks[-1] else self._position_at(queue, end)
        return _Part(queue, start, end, low, high, mark)

    def _is_intact(self, queue: Queue, number: int) -> bool:
        try:
            data = self.queues.load_block(queue, number)
        except BlockDamaged:
            return False
        # A file is missing; without a CRC there is no other sign of damage.
        return bool(data)

    def _read_entry(self, queue: Queue, offset: int) -> tuple[int, int]:
        data = self.queues.files.read(queue, offset, 1)
        if len(data) < ENTRY_BYTES:
            return 0, BLANK_SIZE
        position, size, _ = ENTRY.unpack(data)
        return position, size

    def _end_of_record(self, queue: Queue, offset: int, first_offset: int) -> int:
        """Return the end of the newest record at or before *offset*, whose block is intact."""
        while offset >= first_offset and offset >= 0:
            position, size = self._read_entry(queue, offset)
            if size != BLANK_SIZE:
                return max(position + size, self._segments.start)
            offset -= 1
        return self._segments.start

    def _position_at(self, queue: Queue, offset: int) -> int:
        """Return the log position in the entry at *offset*, whose block is intact, or of the record lost there."""
        return self._read_entry(queue, offset)[0]

    def _write_blanks(self, part: _Part) -> int:
        """Write blanks before *part* into its first block, and return their CRC."""
        entries = self.queues.files.block_entries
        block_start = part.start - part.start % entries
        if part.start == block_start:
            return 0
        blanks = Queue(part.queue.topic, part.queue.queue_id)
        blanks.begin_at(block_start)
        blanks.begins = False
        blanks.add_holes(part.start - block_start, 0)
        blanks.last_end = 0
        self.paths |= self._write(blanks)
        return blanks.mark[1]

    def _write(self, queue: Queue) -> set[str]:
        return Queues(self.queues.files).save(queue, NOWHERE)

    def _log_damage(self) -> None:
        count = len(self.parts)
        if count > NAMED_MAX:
            logger.warning("%d consume queues are missing or damaged; rebuilding them from the log", count)
            return
        for part in self.parts:
            logger.warning(
                "consume queue %s/%d is missing or damaged; rebuilding its messages %d to %d from the log",
                part.queue.topic,
                part.queue.queue_id,
                part.start,
                part.end - 1,
            )

    # ---- reading the log

    def run(self, entries_max: int = NOWHERE) -> bool:
        """Do everything except `finish`; return False, changing nothing, if that needs over *entries_max*. Blocks."""
        self.prepare()
        if sum(part.end - part.start for part in self.parts) > entries_max:
            return False
        while self.step():
            pass
        self.complete()
        return True

    def step(self) -> bool:
        """Read a block of the log; return False if that was the last."""
        if not self.parts or self._at >= self.scan.limit:
            return False
        position, self._want = self.scan.step(self._at, self._want)
        must_save = self.scan.records - self._saved_records >= UNSAVED_RECORDS_MAX
        for part in self.parts:
            self._clamp(part, must_save=must_save)
        if must_save:
            self._saved_records = self.scan.records
        if position < 0:
            return False
        self._at = position
        return True

    def _clamp(self, part: _Part, *, must_save: bool) -> None:
        """Write nothing after the end of *part*: later entries belong to another part or to an earlier topic."""
        scratch = part.scratch
        scratch.begins = False
        if scratch.next_offset >= part.end:
            if scratch.next_offset > part.end:
                self.scan.queues.rewind(scratch, part.end)
            self.scan.ignore(scratch)
        if must_save and scratch.dirty:
            self.scan.queues.save(scratch, NOWHERE)

    @property
    def done(self) -> tuple[int, int]:
        """The log position up to which the log was read, and the position where the repair ends."""
        return self._at, self.scan.limit

    def _apply_note(self, note: Note, position: int) -> None:
        """Restart a deleted topic at 0. Other notes add nothing: the bounds of these queues are known."""
        deleted_parts = [part for part in self.parts if part.queue.topic == note.deleted]
        if deleted_parts:
            self.scan.order.forget(note.deleted, [part.scratch for part in deleted_parts])
            self.scan.forget_topic(note.deleted)
        for part in deleted_parts:
            part.scratch.begin_at(0)
            part.scratch.begins = False

    def complete(self) -> None:
        """After the last `step`: add holes for missing records, and write everything. Blocks."""
        self.scan.order.settle()
        for part in self.parts:
            scratch = part.scratch
            scratch.begins = False
            if scratch.next_offset > part.end:
                self.scan.queues.rewind(scratch, part.end)
            elif scratch.next_offset < part.end:
                position = max(scratch.last_end, part.low)
                scratch.add_holes(part.end - scratch.next_offset, position)
                scratch.last_end = position
            self.paths |= self.scan.queues.save(scratch, NOWHERE)
            files = self.queues.files
            self.paths |= {
                files.path_of(scratch, at)
                for at in range(
                    part.start * ENTRY_BYTES // files.file_bytes * files.file_bytes,
                    part.end * ENTRY_BYTES,
                    files.file_bytes,
                )
            }

    def finish(self) -> None:
        """Use the rebuilt blocks everywhere from now on."""
        for part in self.parts:
            self._replace_crcs(part)

    def _replace_crcs(self, part: _Part) -> None:
        """Give the queue of *part* the CRCs of the rebuilt blocks, and read these blocks from their files again."""
        queue, scratch = part.queue, part.scratch
        entries = self.queues.files.block_entries
        base, crcs = queue.blocks
        for number in range(part.start // entries, part.end // entries):
            crc = scratch.crc_of(number)
            if 0 <= number - base < len(crcs) and crcs[number - base] != crc:
                crcs[number - base] = crc
                queue.journaled = min(queue.journaled, number)
        self.queues.forget_blocks(queue)
        if part.end == part.mark[0] and part.end % entries and scratch.mark[1] != part.mark[1]:
            block_start = part.end - part.end % entries
            self._renew_last_crc(queue, block_start)
        self.queues.note_change(queue)

    def _renew_last_crc(self, queue: Queue, block_start: int) -> None:
        """Update the CRC of the last block, whose entries have changed."""
        entries = self.queues.files.block_entries
        count = min(queue.saved - block_start, entries)
        copy = Queue(queue.topic, queue.queue_id)
        copy.begin_at(block_start)
        data = self.queues.files.read(queue, block_start, count)
        copy.add_to_crcs(data, self.queues.files.block_bytes)
        if queue.saved - block_start < entries:
            queue.mark = queue.saved, copy.mark[1]
            return
        base, crcs = queue.blocks
        number = block_start // entries
        crcs[number - base] = copy.crc_of(number)
        queue.journaled = min(queue.journaled, number)


@final
class MemoryRepair:
    """As `Repair`, but for a full disk: the result goes to `Queues.rebuilt` instead of the files."""

    def __init__(self, segments: Segments, queues: Queues, wanted: list[Queue], end: int) -> None:
        files = queues.files
        copy = QueueFiles(Files(DryDisk(files.files.disk), 1), files.directory, files.file_entries)
        self._queues = queues
        self._work = Repair(segments, Queues(copy), wanted, end)

    def run(self) -> bool:
        """Do everything except `finish`; return False if that needs too much memory. Blocks."""
        return self._work.run(MEMORY_ENTRIES_MAX)

    def finish(self) -> None:
        """Make the rebuilt blocks available to readers."""
        work, queues = self._work, self._queues
        work.finish()
        entries = queues.files.block_entries
        for part in work.parts:
            queue = part.queue
            queue.changed = False  # the journal uses its own list of changes, not that of the copy
            queues.note_change(queue)
            queues.forget_blocks(queue)
            for number in range(part.start // entries, -(-part.end // entries)):
                queues.rebuilt[queue, number] = work.queues.load_block(queue, number)
        work.queues.files.files.close()


@final
class Repairs:
    """Rebuilds damaged blocks of all queues of the store.

    Hold `lock` while writing files of queues. `paths` are changed files that must be synced; *wakeup* is set when there
    is something to repair or to sync.
    """

    def __init__(
        self, disk: Disk, segments: Segments, queues: Queues, flusher: Flusher, admission: Admission, wakeup: Wakeup
    ) -> None:
        self._disk = disk
        self._segments = segments
        self._queues = queues
        self._flusher = flusher
        self._admission = admission
        self._wakeup = wakeup
        self._wanted: dict[Queue, None] = {}
        self.lock = trio.Lock()
        self.paths: set[str] = set()

    def want(self, queue: Queue) -> None:
        """Request the rebuild of the damaged blocks of *queue*."""
        self._wanted[queue] = None
        self._wakeup.set()

    def want_all(self) -> None:
        """Request a check of every block of every queue, and the rebuild of damaged ones."""
        self._wanted.update(dict.fromkeys(self._queues.all()))

    async def repair(self, queue: Queue) -> None:
        """Rebuild the damaged blocks of *queue* and of other waiting queues, in a worker thread.

        Raises:
          Refused: the disk is full.
          StoreFailed: the disk failed.
        """
        self._wanted[queue] = None
        try:
            await self._repair(queue)
        except OSError as error:
            raise self._admission.refuse(error) from error

    def repair_now(self, queue: Queue) -> None:
        """As `repair`, but blocking."""
        self._wanted[queue] = None
        repair = self._new_repair()
        try:
            self._run_now(repair)
        except OSError as error:
            raise self._admission.refuse(error) from error

    def _run_now(self, repair: Repair) -> None:
        try:
            repair.run()
        except OSError as error:
            memory_repair = self._new_memory_repair(repair.wanted, error)
            if not memory_repair.run():
                raise
            memory_repair.finish()
        else:
            self._finish(repair)

    def want_rebuilt(self) -> None:
        """Once there is space again, write blocks that were rebuilt only in memory to their files."""
        queues = self._queues
        if queues.rebuilt and not self._admission.refusal:
            wanted = dict.fromkeys(queue for queue, _ in queues.rebuilt)
            queues.forget_blocks(*wanted)
            self._wanted.update(wanted)

    async def repair_wanted(self) -> None:
        """Do all requested repairs. Raises `OSError`."""
        while self._wanted:
            await self._repair(next(iter(self._wanted)))

    async def _repair(self, queue: Queue) -> None:
        async with self.lock:
            if queue not in self._wanted:
                return  # another task did it meanwhile
            repair = self._new_repair()
            with trio.CancelScope(shield=True):
                try:
                    await self._disk.off_loop(repair.run)
                except OSError as error:
                    memory_repair = self._new_memory_repair(repair.wanted, error)
                    if not await self._disk.off_loop(memory_repair.run):
                        raise
                    memory_repair.finish()
                else:
                    self._finish(repair)

    def _new_repair(self) -> Repair:
        wanted, self._wanted = self._wanted, {}
        # Do not recreate the files of a deleted topic.
        existing = [queue for queue in wanted if self._queues.find(queue.topic, queue.queue_id) is queue]
        return Repair(self._segments, self._queues, existing, self._flusher.durable)

    def _new_memory_repair(self, wanted: list[Queue], error: OSError) -> MemoryRepair:
        """Return a repair whose result goes to the files later; raise *error* again unless the disk is full."""
        if not is_full(error):
            raise error
        self._admission.refuse_full(error)
        self._wakeup.set()
        return MemoryRepair(self._segments, self._queues, wanted, self._flusher.durable)

    def _finish(self, repair: Repair) -> None:
        repair.finish()
        self.paths |= repair.paths
        self._wakeup.set()
