"""Reads queues: directly from memory and the page cache, in a worker thread from disk, and from a cold tier."""

import logging
from typing import Final, final

from martlet.errors import Reason, Refused
from martlet.records.layout import ENTRY_BYTES, POSITION_SIZE, Predicate, RecordView
from martlet.store.append.readable import EarlyEnd, ReadableEnd
from martlet.store.disk.files import Disk
from martlet.store.disk.page_cache import PageCache
from martlet.store.queues.queues import BlockDamaged, Queue, Queues
from martlet.store.read.cold import ColdRecords
from martlet.store.read.reading import Care, LogReader, ReadOptions, ReadResult, ReadStatus, bounds
from martlet.store.recovery.repair import Repairs

__all__ = ["Readers"]

logger = logging.getLogger("martlet.store")

# Entries passed to a read in a worker thread.
SCAN_ENTRIES: Final = 4096
# Bytes that a read copies from the page cache on the event loop at most: a mebibyte takes 0.1 to 0.2 ms.
READ_NOW_BYTES: Final = 8 << 20
# Number of times that one read requests the rebuild of a damaged block.
REPAIRS_A_READ: Final = 3
# Remembered positions of damaged records, so that each is reported once.
DAMAGED_MAX: Final = 10_000


def _copied(result: ReadResult) -> ReadResult:
    """Return *result* with copied records: views would keep a page each while they wait to be sent."""
    if result.pieces:
        result.pieces = [b"".join(result.pieces)]
    return result


@final
class _Shared:
    """The state that all readers of a store share."""

    def __init__(self) -> None:
        self.damaged: set[int] = set()
        self.damaged_records = 0


@final
class Readers:
    """Reads records of *queues* before an end: the readable end, or the early end for early readers."""

    def __init__(
        self,
        disk: Disk,
        pages: PageCache,
        queues: Queues,
        readable: ReadableEnd | EarlyEnd,
        repairs: Repairs,
        cold: ColdRecords,
        *,
        verify: bool,
        shared: "_Shared | None" = None,
    ) -> None:
        self._disk = disk
        self._pages = pages
        self.queues = queues
        self._readable = readable
        self._repairs = repairs
        self.cold = cold
        self._usual = LogReader(pages, self.found_damage, verify=verify)
        self._telling = LogReader(pages, self.found_damage, verify=verify, tells=True)
        self._unchecked = LogReader(pages, self.found_damage, verify=False, tells=True)
        self._verify = verify
        self._shared = shared or _Shared()

    def up_to(self, end: EarlyEnd) -> "Readers":
        """Return readers of the same queues up to another *end*."""
        disk, pages, queues, repairs, cold = self._disk, self._pages, self.queues, self._repairs, self.cold
        return Readers(disk, pages, queues, end, repairs, cold, verify=self._verify, shared=self._shared)

    @property
    def readable(self) -> int:
        """The log position before which these readers read."""
        return self._readable.position

    @property
    def damaged_records(self) -> int:
        """The number of damaged records found since the store was opened."""
        return self._shared.damaged_records

    @damaged_records.setter
    def damaged_records(self, count: int) -> None:
        self._shared.damaged_records = count

    def end_offset(self, queue: Queue) -> int:
        """Return the offset after the newest readable message of *queue*."""
        return (
            queue.next_offset
            if queue.last_end <= self._readable.position
            else queue.end_before(self._readable.position)
        )

    def read(
        self,
        queue: Queue,
        offset: int,
        max_messages: int,
        budget_bytes: int,
        codes: frozenset[int] | None = None,
        predicate: Predicate | None = None,
    ) -> ReadResult:
        """Return readable records of *queue* from *offset* on, in stored form.

        The first message is returned whatever its size, then as many as fit both limits and need no wait for the disk.
        *codes* are matched against the tag codes of the entries; *predicate* is called with whole records. Checks a
        limited number of entries, so ``next_offset`` may advance even if nothing matched. Damaged records are skipped.
        May wait for the disk for the first message, and for the rebuild of a damaged block of entries: on the event
        loop, consumers read with `QueueReader`. Reads only the log: before its first message, the status is TOO_SMALL.
        """
        end = self.end_offset(queue)
        outside = bounds(queue, offset, end)
        if outside is not None:
            return outside
        read = self._usual.read
        entries, load = self.queues.load_entries, self._pages.load_now
        try:
            result = read(queue, offset, end, max_messages, budget_bytes, codes, predicate, entries, load)
        except BlockDamaged:
            self._repairs.repair_now(queue)
            entries = self.queues.entries
            result = read(queue, offset, end, max_messages, budget_bytes, codes, predicate, entries, load)
        assert result is not None
        return result

    def read_near(
        self,
        queue: Queue,
        offset: int,
        max_messages: int,
        budget_bytes: int,
        codes: frozenset[int] | None = None,
        predicate: Predicate | None = None,
        care: Care = Care.LEAVE_OUT,
    ) -> ReadResult | None:
        """As `read`, but return None if the first record is neither in memory nor in the page cache (see `read_far`).

        The same holds for its queue entry. Also returns None if the entry is in a damaged block or cannot be read, and
        for messages that only the cold tier has. Returns fewer records where they lie far apart in the log.
        """
        if offset < queue.local_from and self.cold.has(queue, offset):
            return None
        end = self.end_offset(queue)
        outside = bounds(queue, offset, end)
        if outside is not None:
            return outside
        entries, load = self.queues.entries_now, self._pages.load_few(READ_NOW_BYTES)
        read = self._collector(care, predicate).read
        try:
            result = read(queue, offset, end, max_messages, budget_bytes, codes, predicate, entries, load, wait=False)
        except (BlockDamaged, OSError):
            return None  # `read_far` repairs the block or reports the error
        if result is not None and result.status is ReadStatus.REMOVED and self.cold.has(queue, offset):
            return None
        return result

    def view_now(self, queue: Queue, offset: int) -> RecordView | None:
        """Return a view of message *offset* of *queue* if it is readable and among the newest; otherwise None.

        Such a record was appended by this process and is in memory in one piece, so its CRCs need no check.
        """
        at = (offset - queue.tail_offset) * ENTRY_BYTES
        if offset < queue.local_from or not 0 <= at < len(queue.tail):
            return None
        position, size = POSITION_SIZE.unpack_from(queue.tail, at)
        end = position + size
        page = self._pages.find(position) if end <= self._readable.position else None
        if page is None or not page.trusted or end > page.end:
            return None
        return RecordView(page.data, position - page.base)

    async def read_far(
        self,
        queue: Queue,
        offset: int,
        max_messages: int,
        budget_bytes: int,
        codes: frozenset[int] | None = None,
        predicate: Predicate | None = None,
        care: Care = Care.LEAVE_OUT,
    ) -> ReadResult:
        """As `read`, in a worker thread if the read may wait for the disk; *predicate* is called in that thread.

        Raises:
          Refused: a damaged block cannot be rebuilt: the disk is full, or damages it again.
          StoreFailed: the disk failed.
        """
        end = self.end_offset(queue)
        if offset < queue.local_from and self.cold.has(queue, offset):
            wanted = ReadOptions(max_messages, budget_bytes, codes, predicate, care)
            return await self.cold.read(queue, offset, wanted, end)
        outside = bounds(queue, offset, end)
        if outside is not None:
            return outside
        for _ in range(REPAIRS_A_READ):
            try:
                result = await self._read_off_loop(
                    queue, offset, end, max_messages, budget_bytes, codes, predicate, care
                )
                break
            except BlockDamaged:
                await self._repairs.repair(queue)
            if self.queues.find(queue.topic, queue.queue_id) is not queue:
                return ReadResult(ReadStatus.NO_QUEUE, offset, queue.first_offset, end)  # its topic was deleted
            outside = bounds(queue, offset, end)
            if outside is not None:
                return outside
        else:
            where = f"consume queue '{queue.topic}/{queue.queue_id}'"
            raise Refused(Reason.UNAVAILABLE, f"{where} is damaged again after each rebuild; check the disk")
        if result.status is ReadStatus.REMOVED and self.cold.has(queue, offset):
            # Retention removed it, and the queue's first offset follows (`FirstOffsets`).
            wanted = ReadOptions(max_messages, budget_bytes, codes, predicate, care)
            return await self.cold.read(queue, offset, wanted, end)
        result.end_offset = self.end_offset(queue)
        return result

    def _collector(self, care: Care, predicate: Predicate | None) -> LogReader:
        if care is Care.LEAVE_OUT:
            return self._usual
        return self._unchecked if care is Care.CALLER_CHECKS and predicate is None else self._telling

    async def _read_off_loop(
        self,
        queue: Queue,
        offset: int,
        end: int,
        max_messages: int,
        budget_bytes: int,
        codes: frozenset[int] | None,
        predicate: Predicate | None,
        care: Care,
    ) -> ReadResult:
        """Read in a worker thread; raises `BlockDamaged` if the first entry is in a damaged block."""
        # Only the event loop's thread may use the entries in memory, so pass a copy.
        held = self.queues.load_entries(queue, offset, SCAN_ENTRIES) if offset >= queue.tail_offset else b""
        end = min(end, offset + len(held) // ENTRY_BYTES if held else queue.tail_offset)

        def entries(queue: Queue, at: int, count: int) -> bytes:
            if not held:
                return self.queues.saved_entries(queue, at, count)
            return held[(at - offset) * ENTRY_BYTES : (at - offset + count) * ENTRY_BYTES]

        collector = self._collector(care, predicate)

        def work() -> ReadResult:
            read, load = collector.read, self._pages.load
            result = read(queue, offset, end, max_messages, budget_bytes, codes, predicate, entries, load)
            assert result is not None
            return _copied(result)

        return await self._disk.off_loop(work)

    def found_damage(self, position: int, queue: Queue, offset: int) -> None:
        """Report the damaged record at log position *position*, message *offset* of *queue*; each only once."""
        damaged = self._shared.damaged
        if position in damaged or len(damaged) >= DAMAGED_MAX:
            return
        damaged.add(position)
        self.damaged_records += 1
        logger.error(
            "record at position %d (message %d of %s/%d) is damaged; skipping it",
            position,
            offset,
            queue.topic,
            queue.queue_id,
        )
