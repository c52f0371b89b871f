"""Reads the records of several queues in log order, by merging their consume queues by position.

A record that several of these queues index (light queues do) is returned once.

Entries and records in memory are read directly; everything that may have to come from disk is read in a worker thread.
Entries are read ahead, more of them from queues with many records, so that each read of a file pays off.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice, takewhile
from typing import Final, final

import trio

from martlet.records.codec import check_record
from martlet.records.layout import BLANK_SIZE, ENTRY, HEAD_BYTES, Buffer, RecordView
from martlet.runtime.checksum import crc32
from martlet.runtime.steps import Budget, Steps
from martlet.state.journal import PREFIX
from martlet.store import Queue, Store
from martlet.store.disk.page_cache import Page
from martlet.store.queues.queues import BlockDamaged

__all__ = ["LogOrder", "QueueCursor"]

# Entries to read ahead: of all queues together, and the minimum of one queue.
AHEAD: Final = 65_536
AHEAD_LEAST: Final = 16
# Entries to merge at once, for several runs in a row, and the most queues they come from.
MERGED: Final = 2048
# Cost of checking a queue in a pass over the queues; loading entries costs as much as LOOKS_A_LOAD checks.
LOOK_US: Final = 0.25
ENTRIES_A_LOAD: Final = 4096
LOOKS_A_LOAD: Final = 8
# Limits of one run, in records and in bytes; it has at least one record. A projection applies it in 1 to 2 ms.
RUN_RECORDS: Final = 256
RUN_BYTES: Final = 256 * 1024
# Weight of each byte of a journal: its records are all notes, and each note costs as much as a message.
JOURNAL_BYTE: Final = 32
# Records at most this far apart are read together.
GAP_BYTES: Final = 4096

# Position, size, and the number of the cursor.
Entry = tuple[int, int, int]
Run = list[RecordView]


@final
class QueueCursor:
    """The read position in one queue.

    ``offset`` is the next offset to return, ``ahead`` has the entries from there on, and ``position`` is the log
    position in the entry before ``offset``, -1 if there is none.
    """

    __slots__ = ("ahead", "byte", "end", "number", "offset", "position", "queue")

    def __init__(self, queue: Queue, number: int) -> None:
        self.queue = queue
        self.number = number
        self.byte = JOURNAL_BYTE if queue.topic.startswith(PREFIX) else 1  # the weight of a byte
        self.offset = queue.stored_from
        self.position = -1
        self.ahead: list[Entry] = []
        # The offset after the newest readable record, at the last check.
        self.end = 0

    @property
    def loaded(self) -> int:
        """The first offset whose entry is not in ``ahead``."""
        return self.offset + len(self.ahead)

    def put(self, data: bytes) -> None:
        """Add the entries in *data*."""
        number = self.number
        self.ahead += [(position, size, number) for position, size, _ in ENTRY.iter_unpack(data)]


@final
class LogOrder:
    """The readable records of a set of queues, merged by log position.

    `next_run_nowait` and `next_run` return the next records and advance. ``position``, ``size`` and ``crc`` (of its
    first `HEAD_BYTES`) are those of the last returned record.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.cursors: dict[int, QueueCursor] = {}
        # Cursors that may have records to return.
        self.behind: dict[int, QueueCursor] = {}
        self._numbers: dict[Queue, int] = {}
        self._next_number = 0
        # The next entries of all queues in log order; all earlier entries are loaded.
        self._merged: deque[Entry] = deque()
        self._loading: Steps[bool] | None = None  # a pass over all queues, to merge the next entries
        # Whether `next_run` is under way.
        self.busy = False
        self.position = self.size = self.crc = 0

    def add(self, queue: Queue) -> QueueCursor:
        """Follow *queue* from its first record on."""
        number = self._numbers[queue] = self._next_number
        self._next_number += 1
        cursor = self.cursors[number] = self.behind[number] = QueueCursor(queue, number)
        if queue.watchers is None:
            queue.watchers = []
        queue.watchers.append(self._note_new_records)
        return cursor

    def _note_new_records(self, queue: Queue) -> None:
        number = self._numbers[queue]
        self.behind[number] = self.cursors[number]

    def remove_topic(self, topic: str) -> None:
        """Stop following the queues of *topic*."""
        for queue in [queue for queue in self._numbers if queue.topic == topic]:
            self._remove(queue)

    def close(self) -> None:
        """Stop following all queues."""
        for queue in list(self._numbers):
            self._remove(queue)

    def _remove(self, queue: Queue) -> None:
        number = self._numbers.pop(queue)
        self._merged.clear()
        del self.cursors[number]
        self.behind.pop(number, None)
        if queue.watchers is not None:
            queue.watchers.remove(self._note_new_records)

    @property
    def at_end(self) -> bool:
        """Whether every readable record was returned."""
        return all(cursor.offset >= self.store.readers.end_offset(cursor.queue) for cursor in self.behind.values())

    def passed(self, end: int) -> bool:
        """Return whether all records before log position *end* were returned."""
        return not self.busy and (self.position + self.size >= end or self.at_end)

    def next_run_nowait(self) -> Run | None:
        """Return the next records, empty if there are none yet; None if that may take long, or a disk must be read."""
        if self.busy or not self._load_next():
            return None
        entries = self._next_entries()
        run = self._read_near(entries)
        if run is not None:
            self._advance(entries, run)
        return run

    async def next_run(self) -> Run:
        """As `next_run_nowait`, but in several turns, and read from disk in a worker thread if necessary."""
        self.busy = True
        try:
            while not (is_loaded := self._load_next()):
                if is_loaded is None:
                    await trio.lowlevel.checkpoint()
                else:
                    await self._off_loop(partial(self._load_far, self._ranges_in_files()))
            entries = self._next_entries()
            run = self._read_near(entries)
            if run is None:
                run = await self.store.disk.off_loop(partial(self._read_far, entries))
        finally:
            self.busy = False
        self._advance(entries, run)
        return run

    def next_run_blocking(self) -> Run:
        """As `next_run_nowait`, but read from disk, blocking; for shutdown."""
        while not (is_loaded := self._load_next()):
            if is_loaded is None:
                continue
            try:
                self._load_far(self._ranges_in_files())
            except BlockDamaged as damaged:
                self.store.upkeep.repairs.repair_now(damaged.queue)
        entries = self._next_entries()
        run = self._read_near(entries)
        if run is None:
            run = self._read_far(entries)
        self._advance(entries, run)
        return run

    async def _off_loop(self, work: Callable[[], None]) -> None:
        try:
            await self.store.disk.off_loop(work)
        except BlockDamaged as damaged:
            await self.store.upkeep.repairs.repair(damaged.queue)

    # ---- entries

    def _load_next(self) -> bool | None:
        """Merge the next entries: True; False if some are only in files; None if there are more queues to check.

        A pass checks all queues that may have records, some of them in each call.
        """
        if self._merged:
            return True
        if self._loading is None:
            if len(self.behind) == 1:
                return self._load_only_queue()
            self._loading = self._load_all_queues()
        try:
            next(self._loading)
        except StopIteration as done:
            self._loading = None
            return bool(done.value)
        return None

    def _load_only_queue(self) -> bool:
        """Take the next entries of the only queue that may have records: most projections follow one journal."""
        readable = self.store.readable
        (cursor,) = self.behind.values()
        if not self._load_queue(cursor, AHEAD, Budget(LOOK_US)):
            return False
        entries = cursor.ahead[:MERGED]
        if entries and entries[-1][0] >= readable:
            entries = [entry for entry in entries if entry[0] < readable]
        self._merged = deque(entries)
        return True

    def _load_all_queues(self) -> Steps[bool]:
        """Update the ends of the queues and take the entries in memory; return whether none was missing."""
        entries_max, is_loaded, budget = self._entries_ahead_max(), True, Budget(LOOK_US)
        readable = self.store.readable  # a queue may get later records after its check
        for cursor in list(self.behind.values()):
            if cursor.number in self.behind:
                is_loaded &= self._load_queue(cursor, entries_max, budget)
                if budget.is_over():
                    yield
        if is_loaded:
            if len(self.behind) > MERGED:
                yield
            self._merge(readable)
        return is_loaded

    def _load_queue(self, cursor: QueueCursor, entries_max: int, budget: Budget) -> bool:
        """Take up to *entries_max* entries of one queue; return False if the next one is only in a file."""
        queue = cursor.queue
        cursor.end = self.store.readers.end_offset(queue)
        if not cursor.ahead:
            if cursor.offset < queue.stored_from:
                cursor.offset = queue.stored_from  # retention removed the entries before
            if cursor.offset >= cursor.end:
                del self.behind[cursor.number]
                return True
            if cursor.offset < min(queue.tail_offset, cursor.end):
                return False
        count = min(entries_max - len(cursor.ahead), cursor.end - cursor.loaded, ENTRIES_A_LOAD)
        if count > 0 and cursor.loaded >= queue.tail_offset:  # these entries are in memory
            cursor.put(self.store.queues.load_entries(queue, cursor.loaded, count))
            budget.spend(LOOKS_A_LOAD + count)
        return True

    def _merge(self, readable: int) -> None:
        """Merge the next entries before *readable*, up to the last loaded entry of any queue that has more."""
        loaded_cursors = [cursor for cursor in self.behind.values() if cursor.ahead]
        horizon = min((c.ahead[-1][0] for c in loaded_cursors if c.loaded < c.end), default=1 << 63)
        horizon = min(horizon, readable - 1)
        if len(loaded_cursors) > MERGED:
            loaded_cursors.sort(key=lambda cursor: cursor.ahead[0][0])
            horizon = min(horizon, loaded_cursors[MERGED].ahead[0][0])
        entries = islice(heapq.merge(*[cursor.ahead for cursor in loaded_cursors[:MERGED]]), MERGED)
        self._merged = deque(takewhile(lambda entry: entry[0] <= horizon, entries))

    def _entries_ahead_max(self) -> int:
        return max(AHEAD // max(len(self.behind), 1), AHEAD_LEAST)

    def _ranges_in_files(self) -> list[tuple[QueueCursor, int]]:
        """Return the cursors whose next entries are only in files, each with the offset up to which to read."""
        limit = self._entries_ahead_max()
        return [
            (cursor, min(cursor.offset + limit, cursor.queue.tail_offset, cursor.end))
            for cursor in self.behind.values()
            if not cursor.ahead and cursor.offset < min(cursor.queue.tail_offset, cursor.end)
        ]

    def _load_far(self, ranges: Iterable[tuple[QueueCursor, int]]) -> None:
        """Read entries from files; runs in a thread. Raises `BlockDamaged`."""
        for cursor, end in ranges:
            while cursor.loaded < end:
                data = self.store.queues.saved_entries(cursor.queue, cursor.loaded, end - cursor.loaded)
                if not data:
                    # Retention or a person removed their file: there is nothing to return.
                    if not cursor.ahead:
                        cursor.offset = end
                    break
                cursor.put(data)

    def _next_entries(self) -> list[Entry]:
        """Return the entries of the next run."""
        entries = list(islice(self._merged, RUN_RECORDS))
        weight, cursors = 0, self.cursors
        for index, (_, size, number) in enumerate(entries):
            weight += size * cursors[number].byte if size != BLANK_SIZE else 0
            if weight > RUN_BYTES and index:
                return entries[:index]
        return entries

    def _advance(self, entries: list[Entry], run: Run) -> None:
        """Advance the cursors past *entries*, whose records are *run*."""
        merged = self._merged
        if merged and entries and merged[0] is entries[0]:  # otherwise a topic was deleted while a thread read
            for _ in entries:
                merged.popleft()
        counts: dict[int, int] = {}
        newest: dict[int, int] = {}
        for position, _, number in entries:
            counts[number] = counts.get(number, 0) + 1
            newest[number] = position
        topic_is_gone = False
        for number, count in counts.items():
            cursor = self.cursors.get(number)
            if cursor is None:
                topic_is_gone = True  # its topic was deleted while a thread was reading
                continue
            del cursor.ahead[:count]
            cursor.offset += count
            cursor.position = newest[number]
        if topic_is_gone:
            positions = {position for position, _, number in entries if number in self.cursors}
            run[:] = [record for record in run if record.position in positions]
        if run:
            last = run[-1]
            self.position, self.size = last.position, last.size
            self.crc = crc32(last.buffer[last.start : last.start + HEAD_BYTES])

    # ---- records

    def _read_near(self, entries: list[Entry]) -> Run | None:
        """Return the existing records of *entries*; None if one is not in memory."""
        pages, verify = self.store.pages, self.store.config.verify_reads
        run: Run = []
        page: Page | None = None
        last_position = self._newest_position()
        for entry in entries:
            position, size, _ = entry
            if size == BLANK_SIZE or size <= 0 or position == last_position:
                continue
            last_position = position
            if page is None or not page.base <= position < page.end:
                page = pages.load_now(position)
            if page is None and position >= pages.segments.start:
                return None
            if page is None:
                continue  # retention removed it
            if position + size <= page.end:
                view: Buffer = page.view
                start = position - page.base
            elif pages.load_now(position + size - 1) is not None:
                view, start = pages.read(position, size), 0
            else:
                return None
            if (page.trusted and view is page.view) or not verify or self._is_intact(view, start, entry):
                run.append(RecordView(view, start))
            else:
                self._report_damage(entry)
        return run

    def _read_far(self, taken: list[Entry]) -> Run:
        """As `_read_near`, but from files; runs in a thread."""
        run: Run = []
        begin = self.store.first_position
        # Keyed by position: a light queue may index a record of another queue.
        entries = {entry[0]: entry for entry in taken if entry[0] >= begin and 0 < entry[1] < BLANK_SIZE}
        entries.pop(self._newest_position(), None)
        for near in _split_at_gaps(list(entries.values())):
            first = near[0][0]
            data = self._read_range(first, near[-1][0] + near[-1][1])
            for entry in near:
                if self._is_intact(data, entry[0] - first, entry):
                    run.append(RecordView(data, entry[0] - first))
                else:
                    self._report_damage(entry)
        return run

    def _newest_position(self) -> int:
        """Return the position of the newest record that was returned; another queue may index it as well."""
        return self.position if self.size else -1

    def _read_range(self, start: int, end: int) -> bytes:
        """Return the bytes of the log from *start* to *end*, which may span several segments.

        A power cut may lose the size of a file, which then is shorter than its segment: missing bytes read as 0.
        """
        segments = self.store.segments
        parts: list[bytes] = []
        while start < end and (segment := segments.find(start)) is not None:
            size = min(end, segment.end) - start
            parts.append(segments.read(start, size).ljust(size, b"\0"))
            start += size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _is_intact(self, data: Buffer, start: int, entry: Entry) -> bool:
        position, size, number = entry
        cursor = self.cursors.get(number)  # None if its topic was deleted while a thread read
        topic = cursor.queue.topic_bytes if cursor is not None and not cursor.queue.light else None
        return check_record(data, start, start + size, position, topic)

    def _report_damage(self, entry: Entry) -> None:
        cursor = self.cursors.get(entry[2])
        if cursor is not None:
            self.store.readers.found_damage(entry[0], cursor.queue, cursor.offset + cursor.ahead.index(entry))


def _split_at_gaps(entries: list[Entry]) -> list[list[Entry]]:
    """Split *entries*, which are in log order, at gaps with other records."""
    groups: list[list[Entry]] = []
    end = -GAP_BYTES - 1
    for entry in entries:
        if entry[0] - end > GAP_BYTES:
            groups.append([])
        groups[-1].append(entry)
        end = entry[0] + entry[1]
    return groups
