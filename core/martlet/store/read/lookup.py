"""Finds records by log position, by time and by key: in the log, and before its beginning in the cold tier."""

from bisect import bisect_right
from functools import partial
from itertools import accumulate
from typing import Final, final

from martlet.errors import NotReady
from martlet.records.codec import check_record
from martlet.records.layout import FRONT_BYTES, MAGICS, RECORD_BYTES_MAX, RECORD_BYTES_MIN, RecordView
from martlet.runtime.steps import Budget, Steps, WaitingSteps, off_loop, wait_for
from martlet.store.append.readable import ReadableEnd
from martlet.store.disk.files import Disk
from martlet.store.disk.page_cache import LogWriter, PageCache
from martlet.store.disk.segments import Segments
from martlet.store.format.notes import OWN_PREFIX
from martlet.store.queues.queues import BlockDamaged, Queue, Queues, position_in
from martlet.store.read.readers import Readers
from martlet.store.read.reading import ReadOptions
from martlet.store.recovery.indexer import Indexer
from martlet.store.recovery.repair import Repairs
from martlet.store.recovery.usual import STORE_MS_END

__all__ = ["KeyQueryResult", "Lookup"]

OWN_BYTES: Final = OWN_PREFIX.encode()
# The total size of the records that a query by key returns.
QUERY_BYTES_MAX: Final = 1 << 30
# A position from a client may be none, and then the size there is random; RocketMQ's clients accept no frame over 16
# MiB. A larger `StoreConfig.message_bytes_max` raises this; properties and the rest of a record take 128 KiB.
ASKED_BYTES_MAX: Final = 16 << 20
SPARE_BYTES: Final = 128 << 10
UNKNOWN_MS: Final = 1 << 62
QUERY_PAUSE_BYTES: Final = 524_288  # bytes read per slice of a query; each read counts as QUERY_STEP_BYTES at least
QUERY_STEP_BYTES: Final = 32_768
# Cost of looking at one message in a search by time: up to two reads of 0.3 ms, a block of entries and the record.
LOOK_US: Final = 300.0


def _cut(records: list[bytes], bytes_max: int) -> list[bytes]:
    """Return the first *records*, at most *bytes_max* in total, and one at least."""
    sizes = list(accumulate(map(len, records)))
    return records[: max(bisect_right(sizes, bytes_max), 1)]


@final
class KeyQueryResult:
    """The result of a query by key: whole records, newest first, and the store time and log
    position up to which the index reaches.
    """

    __slots__ = ("index_ms", "index_position", "records")

    def __init__(self, records: list[bytes], index_ms: int, index_position: int) -> None:
        self.records = records
        self.index_ms = index_ms
        self.index_position = index_position


@final
class Lookup:
    """Finds readable records."""

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        pages: PageCache,
        tail: LogWriter,
        queues: Queues,
        readable: ReadableEnd,
        readers: Readers,
        indexer: Indexer,
        repairs: Repairs,
        message_bytes_max: int,
    ) -> None:
        self._asked_bytes_max = max(ASKED_BYTES_MAX, message_bytes_max + SPARE_BYTES)
        self._disk = disk
        self._segments = segments
        self._pages = pages
        self._tail = tail
        self._queues = queues
        self._readable = readable
        self._readers = readers
        self._indexer = indexer
        self._repairs = repairs

    def record_at(
        self, position: int, size_hint: int = 0, bytes_max: int = QUERY_BYTES_MAX, *, internal: bool = False
    ) -> bytes | None:
        """Return the record that begins at *position*; None if there is none, or it is damaged or not readable yet.

        Also None for a record longer than *bytes_max*; for one of Martlet's internal records, unless *internal*.
        """
        if not self._may_begin(position):
            return None
        head = self._pages.read(position, max(size_hint, 4))
        if len(head) < 4:
            return None
        size = RecordView(head).size
        segment = self._segments.find(position)
        if segment is None or not RECORD_BYTES_MIN <= size <= bytes_max:
            return None
        if position + size > min(segment.end, self._readable.position):
            return None
        data = head[:size] if len(head) >= size else self._pages.read(position, size)
        if not check_record(data, 0, size, position):
            return None
        return data if internal or not RecordView(data).topic_bytes.startswith(OWN_BYTES) else None

    def newest_ms(self) -> int:
        """Return the newest store time of all queues, for a start; `UNKNOWN_MS` if it cannot be found."""
        queues = self._queues
        try:
            last = [queues.position_at(each, each.next_offset - 1) for each in queues.all() if each.next_offset]
        except BlockDamaged:
            return UNKNOWN_MS
        newest = max(last, default=-1)
        front = self._segments.read(newest, FRONT_BYTES) if newest >= 0 else b""
        return RecordView(front).store_ms if len(front) == FRONT_BYTES else UNKNOWN_MS

    def known_record(self, position: int) -> bytes | None:
        """As `record_at`, for a *position* that the broker noted itself; also returns internal records."""
        return self.record_at(position, bytes_max=RECORD_BYTES_MAX, internal=True)

    async def known_record_far(self, position: int) -> bytes | None:
        """As `known_record`, but waits for the disk in a worker thread, or for the cold tier.

        Raises:
          Refused: the cold tier failed or did not answer in time.
        """
        read = partial(self.known_record, position)
        data = read() if self._is_near(position, RECORD_BYTES_MAX) else await self._disk.off_loop(read)
        return data if data is not None else await self._cold_record_at(position)

    async def record_far(self, position: int) -> bytes | None:
        """As `record_at`, for a *position* from a client: waits for the disk in a worker thread.

        Bytes inside a record that look like another record do not count: the queue must have an entry for the record.

        Raises:
          Refused: the entry is in a damaged block that cannot be rebuilt, because the disk is full; or the cold tier
            failed or did not answer in time.
          StoreFailed: the disk failed.
        """

        def read() -> bytes | None:
            return self.record_at(position, bytes_max=self._asked_bytes_max)

        data = read() if self._is_near(position, self._asked_bytes_max) else await self._disk.off_loop(read)
        if data is None:
            return await self._cold_record_at(position)
        record = RecordView(data)
        queue = self._queues.find(record.topic, record.queue_id)
        if queue is None or not queue.local_from <= record.queue_offset < queue.next_offset:
            return await self._cold_record_at(position)
        try:
            entry = await self._entry_far(queue, record.queue_offset)
        except BlockDamaged:
            await self._repairs.repair(queue)
            entry = self._queues.entries(queue, record.queue_offset, 1)
        return data if position_in(entry) == position else None

    async def _entry_far(self, queue: Queue, offset: int) -> bytes:
        """Return an entry, waiting for the disk in a worker thread. Raises `BlockDamaged`."""
        entry = self._queues.entries_now(queue, offset, 1)
        if entry is None:
            entry = await self._disk.off_loop(partial(self._queues.saved_entries, queue, offset, 1))
        return entry

    def _is_near(self, position: int, bytes_max: int) -> bool:
        """Return whether *position* needs no disk: its record is near, or it has none up to *bytes_max*."""
        if not self._may_begin(position):
            return True
        page = self._pages.load_now(position)
        if page is None or position + 4 > page.end:
            return False
        at = position - page.base
        size = RecordView(bytes(page.view[at : at + 4])).size
        end = position + size
        return end <= page.end or end > self._readable.position or not RECORD_BYTES_MIN <= size <= bytes_max

    def _may_begin(self, position: int) -> bool:
        """Return whether a readable record may begin at *position*."""
        return self._segments.start <= position and position + RECORD_BYTES_MIN <= self._readable.position

    async def _cold_record_at(self, position: int) -> bytes | None:
        """Return the record at *position* from the cold tier; None unless retention removed it from the log."""
        return await self._readers.cold.record_at(position) if position < self._local_position else None

    @property
    def _local_position(self) -> int:
        """As `Store.local_position`."""
        return max(self._segments.start, self._readers.cold.to_position)

    def position_at(self, queue: Queue, offset: int) -> Steps[int]:
        """Return the log position of message *offset*; -1 if it is not readable or lost.

        Waits for the disk in a worker thread, and for the cold tier if that has the message (`WaitingSteps`).

        Raises:
          NotReady: its entry is in a damaged block that is being rebuilt.
          Refused: the cold tier failed or did not answer in time.
        """
        if offset < queue.local_from and self._readers.cold.has(queue, offset):
            record = yield from self._cold_record(queue, offset)
            return record.position if record is not None else -1
        if not queue.local_from <= offset < self._readers.end_offset(queue):
            return -1
        return position_in((yield from self.entries(queue, offset, 1)))

    def _cold_record(self, queue: Queue, offset: int) -> WaitingSteps[RecordView | None]:
        """Return message *offset* of *queue* from the cold tier; None if it is lost."""
        cold, end = self._readers.cold, self._readers.end_offset(queue)
        read = yield from wait_for(partial(cold.read, queue, offset, ReadOptions(1, 1), end))
        record = RecordView(b"".join(read.pieces)) if read.count else None
        return record if record is not None and record.queue_offset == offset else None

    def entries(self, queue: Queue, offset: int, count: int) -> Steps[bytes]:
        """Return up to *count* entries from *offset* on; fewer at a block's end. Waits for the disk in a thread.

        Raises:
          NotReady: the entries are in a damaged block that is being rebuilt.
        """
        try:
            return (yield from self._queues.entries_in_steps(queue, offset, count))
        except BlockDamaged:
            self._repairs.want(queue)
            text = f"consume queue '{queue.topic}/{queue.queue_id}' is damaged and being rebuilt; try again in a moment"
            raise NotReady(text, partial(self._repairs.repair, queue)) from None

    def store_ms_at(self, queue: Queue, offset: int) -> Steps[int]:
        """Return the store time of message *offset*; -1 if it is not readable or damaged.

        Waits as `position_at`.

        Raises:
          NotReady, Refused: as for `position_at`.
        """
        if offset < queue.local_from and self._readers.cold.has(queue, offset):
            record = yield from self._cold_record(queue, offset)
            return record.store_ms if record is not None else -1
        position = yield from self.position_at(queue, offset)
        if position < 0:
            return -1
        front = yield from self._front_at(position)
        return RecordView(front).store_ms if len(front) == FRONT_BYTES else -1

    def _front_at(self, position: int) -> Steps[bytes]:
        """Return the first bytes of a readable record; load no page, which could evict a page that consumers read."""
        page = self._pages.find(position)
        if page is not None and position + FRONT_BYTES <= page.end:
            return bytes(page.view[position - page.base : position - page.base + FRONT_BYTES])
        front = self._segments.read_now(position, FRONT_BYTES)
        if front is None:
            front = yield from off_loop(partial(self._segments.read, position, FRONT_BYTES))
        return bytes(front)

    def earliest_store_ms(self, queue: Queue | None = None) -> Steps[int]:
        """Return the store time of the oldest message of *queue*; -1 if it is empty or damaged.

        Without a queue, return that of the oldest record in the log, whatever the cold tier has.

        Raises:
          NotReady, Refused: as for `position_at`.
        """
        if queue is not None:
            return (yield from self.store_ms_at(queue, queue.first_offset))
        position = self._segments.start
        if position + FRONT_BYTES > self._readable.position:
            return -1
        record = RecordView((yield from self._front_at(position)))
        return record.store_ms if len(record.buffer) == FRONT_BYTES and record.magic in MAGICS else -1

    def offset_by_time(self, queue: Queue, timestamp_ms: int, upper: bool = False) -> Steps[int]:
        """Return the first offset stored at or after *timestamp_ms*, else the end; *upper*: the last at or before it.

        With *upper* and a time before all messages, return the first offset. Works in slices of a few reads. If all
        messages in the log are too new, asks the cold tier.

        Raises:
          NotReady, Refused: as for `position_at`.
        """
        low, high, budget = queue.local_from, self._readers.end_offset(queue), Budget(LOOK_US)
        while low < high:
            middle = (low + high) // 2
            stored = yield from self._store_ms_near(queue, middle, high, budget)
            if stored < timestamp_ms or (upper and stored == timestamp_ms):
                low = middle + 1
            else:
                high = middle
        if low <= queue.local_from and self._readers.cold.has_range(queue):
            cold, after_ms = self._readers.cold, timestamp_ms + upper
            low = yield from wait_for(partial(cold.offset_by_time, queue, after_ms))
        return max(low - 1 if upper else low, queue.first_offset)

    def _store_ms_near(self, queue: Queue, offset: int, end: int, budget: Budget) -> Steps[int]:
        """Return the store time of *offset* or of the next intact message; later than every time if there is none."""
        for at in range(offset, min(end, offset + 64)):
            stored = yield from self.store_ms_at(queue, at)
            if budget.is_over():
                yield
            if stored >= 0:
                return stored
        return 2**63 - 1

    def query_keys(
        self, topic: str, key: bytes, max_count: int, begin_ms: int, end_ms: int, bytes_max: int = QUERY_BYTES_MAX
    ) -> Steps[KeyQueryResult]:
        """Return readable records of *topic* with *key* as unique key or in KEYS, newest first; works in slices.

        The records have at most *bytes_max* in total, but the first record is always returned. If there are fewer than
        *max_count* in the log, older ones come from the cold tier.

        Raises:
          NotReady: the key index is being rebuilt because it is damaged or incomplete.
          Refused: as for `position_at`.
        """
        keys = self._indexer.keys
        if keys is None:
            return KeyQueryResult([], 0, 0)
        self._check_keys_complete()
        queue = self._queues.find(topic, 0) or Queue(topic, 0)
        records: list[bytes] = []
        size = unpaused = 0
        positions = yield from keys.find(queue, key, max_count, begin_ms, end_ms, self._indexed_ms_at)
        for position in positions:
            if self._is_near(position, RECORD_BYTES_MAX):
                data = self.record_at(position)
            else:
                data = yield from off_loop(partial(self.record_at, position))
            if data is None and not (yield from self._is_absence_explained(position)):
                keys.damaged = True
            if data is not None and (yield from self._is_kept(RecordView(data), queue)):
                size += len(data)
                if records and size > bytes_max:
                    break
                records.append(data)
            unpaused += QUERY_STEP_BYTES + (len(data) if data is not None else 0)
            if unpaused > QUERY_PAUSE_BYTES:
                unpaused = 0
                yield
        self._check_keys_complete()
        cold, left, start = self._readers.cold, max_count - len(records), self._local_position
        if cold.tier is not None and left > 0 and size <= bytes_max:
            older = yield from wait_for(partial(cold.records_by_key, topic, key, left, begin_ms, end_ms, start))
            known = {RecordView(data).position for data in records}  # retention may have removed them since
            records = _cut([*records, *[each for each in older if RecordView(each).position not in known]], bytes_max)
        return KeyQueryResult(records, keys.store_ms, keys.position)

    def _check_keys_complete(self) -> None:
        if self._indexer.is_complete:
            return
        self._indexer.wake()
        text = "the key index is being checked or rebuilt; try again in a few seconds"
        raise NotReady(text, self._indexer.wait_complete)

    def _indexed_ms_at(self, position: int) -> Steps[int]:
        """Return the store time of the record at *position* as in the key index; -1 if unknown."""
        if not self._segments.start <= position < self._readable.position:
            return -1
        front = yield from self._front_at(position)
        record = RecordView(front)
        if len(front) < FRONT_BYTES or record.position != position or record.magic not in MAGICS:
            return -1
        # The index ignores impossible times (scan.py).
        return record.store_ms if record.store_ms < STORE_MS_END else -1

    def _is_absence_explained(self, position: int) -> Steps[bool]:
        """Return whether the log explains the absence of a record at *position*; otherwise the entry for it is
        damaged.
        """
        if 0 <= position < self._segments.start:
            return True  # removed by retention
        if not 0 <= position < self._tail.position:
            return False
        if position >= self._readable.position:
            return True
        front = yield from self._front_at(position)
        if len(front) < FRONT_BYTES:
            return False
        record = RecordView(front)
        return record.position == position and record.magic in MAGICS  # damaged after its header

    def _is_kept(self, record: RecordView, like: Queue) -> Steps[bool]:
        """Return whether the queue's entry names *record*; after a deletion there is no entry, or one of another
        record.
        """
        if record.topic_bytes != like.topic_bytes:
            return False
        queue = self._queues.find(like.topic, record.queue_id)
        offset = record.queue_offset
        if queue is None or not queue.local_from <= offset < queue.next_offset:
            return False
        try:
            entry = yield from self._queues.entries_in_steps(queue, offset, 1)
        except BlockDamaged:
            self._repairs.want(queue)
            return True
        return position_in(entry) == record.position
