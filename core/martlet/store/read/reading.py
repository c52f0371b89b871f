"""Reads the log by the entries of a queue; returns slices of it, as pull answers need them.

Stored records are sent unchanged: adjacent ones as a view of their page, others copied together. Tags are matched
on the entries alone (`tag_match.py`).
"""

from collections.abc import Callable, Iterable
from enum import IntEnum, unique
from typing import Final, final

from msgspec import Struct

from martlet.records.codec import check_record, has_record_crc, write_record_crc
from martlet.records.layout import (
    BLANK_SIZE,
    ENTRY,
    ENTRY_BYTES,
    I32,
    I64,
    IDENTITY,
    POSITION_SIZE,
    QUEUE_ID_AT,
    QUEUE_OFFSET_AT,
    Buffer,
    Condition,
    Find,
    Predicate,
    RecordView,
    record_views,
)
from martlet.runtime.native import native
from martlet.store.disk.page_cache import Page, PageCache
from martlet.store.format.light import names_place
from martlet.store.queues.queues import BlockDamaged, Queue
from martlet.store.read.gather import count_intact, gather_records, select_entries
from martlet.store.read.needle_match import STEPS_MAX, NeedleSearch

__all__ = ["Care", "LogReader", "ReadOptions", "ReadResult", "ReadStatus", "merged"]

# Entries that a read checks at most for wanted tags, in about 0.1 ms. RocketMQ checks 800 (maxFilterMessageSize) and
# lets its client ask again.
SCAN_ENTRIES: Final = 8000
# Records with which a read calls a predicate at most, unless more messages are wanted.
TESTED_MAX: Final = 800
# Entries from which on a search is worth it; for fewer, the predicate is called for each.
NARROWED_MIN: Final = 16
NOT_AT_HAND: Final = -2
# Entries processed together where their records need no check; below the minimum, they are processed one by one.
BLOCK_ENTRIES: Final = 256
BLOCK_ENTRIES_MIN: Final = 8
# Bytes that reveal entries without a record, in 30 us among 8000: the first byte of a blank entry's size; zeros of a
# lost page.
SIZE_AT: Final = 8
BLANK_SIZE_BYTE: Final = b"\x7f"
ZEROS: Final = bytes(ENTRY_BYTES)

Entries = Callable[[Queue, int, int], bytes | None]
Load = Callable[[int], Page | None]


@unique
class ReadStatus(IntEnum):
    """The outcome of a read; RocketMQ's GetMessageStatus."""

    FOUND = 0
    NO_MATCH = 1
    NO_QUEUE = 2
    EMPTY = 3
    TOO_SMALL = 4
    AT_END = 5
    BEYOND_END = 6
    REMOVED = 7
    HOLE = 8


@unique
class Care(IntEnum):
    """How a read treats damaged records, and entries without a record."""

    LEAVE_OUT = 0
    # With a filter, report entries without a record too (`ReadResult.lost`); takes a third of the time of a tag scan.
    TELL = 1
    # Like TELL, but records are not checked unless there is a predicate: the caller compares them with their CRCs, and
    # with the messages that it asked for.
    CALLER_CHECKS = 2


class ReadOptions(Struct, frozen=True, eq=False):
    """What a read returns: at most *count_max* messages, the first and as many more as fit *budget_bytes*.

    They have one of *codes* in their queue entries, and *predicate* returns true for their records; None selects all.
    """

    count_max: int
    budget_bytes: int
    codes: frozenset[int] | None = None
    predicate: Predicate | None = None
    care: Care = Care.LEAVE_OUT


@final
class ReadResult:
    """Whole records in ``pieces``, and the offset to continue with (``next_offset``).

    ``first_offset`` and ``end_offset`` are the queue's bounds at that time; ``count`` messages have ``size`` bytes in
    total. A piece is a view that can keep a whole page in memory: copy it if you cannot send it soon.
    """

    __slots__ = ("_lost", "count", "end_offset", "first_offset", "next_offset", "pieces", "size", "status")

    def __init__(self, status: ReadStatus, next_offset: int, first_offset: int, end_offset: int) -> None:
        self.status = status
        self.next_offset = next_offset
        self.first_offset = first_offset
        self.end_offset = end_offset
        self.pieces: list[Buffer] = []
        self.count = 0
        self.size = 0
        self._lost: list[tuple[int, int]] | None = None

    def lose(self, offset: int, end: int) -> None:
        """Note that messages from *offset* up to *end* are damaged or gone, and would be in the result otherwise."""
        if self._lost is None:
            self._lost = []
        self._lost.append((offset, end))

    @property
    def lost(self) -> list[tuple[int, int]]:
        """The ranges of offsets, ascending, whose messages could not be read; with a filter, some may not match it.

        The list is complete without a filter, and with `Care.TELL`. With `Care.TELL`, a filter passes over a record
        whose body alone is damaged, if its tag or its properties show that it does not match. With `Care.CALLER_CHECKS`
        damaged records are in the result, unless there is a predicate.
        """
        if self._lost is None:
            return []
        stop = self.next_offset
        return merged([(offset, min(end, stop)) for offset, end in sorted(self._lost) if offset < stop])

    def cut(self, count: int) -> None:
        """Keep only the first *count* messages."""
        if self.count <= count:
            return
        self.count, self.size = count, 0
        for index, piece in enumerate(self.pieces):
            for record in record_views(piece):
                if not count:
                    self.next_offset = record.queue_offset
                    self.pieces[index:] = [piece[: record.start]] if record.start else []
                    return
                self.size += record.size
                count -= 1

    def cut_before(self, offset: int) -> None:
        """Keep only the messages before *offset* of the queue."""
        self.cut(sum(record.queue_offset < offset for piece in self.pieces for record in record_views(piece)))
        self.next_offset = min(self.next_offset, offset)

    def __repr__(self) -> str:
        return f"<ReadResult {self.status.name} next {self.next_offset} count {self.count} size {self.size}>"


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ascending *ranges* of offsets, with adjacent and overlapping ranges merged."""
    joined: list[tuple[int, int]] = []
    for offset, end in ranges:
        if joined and offset <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((offset, end))
    return joined


def bounds(queue: Queue, offset: int, end: int) -> ReadResult | None:
    """Return the result for an *offset* that the log does not have; None if it does.

    Readers ask the cold tier before for its offsets.
    """
    if queue.local_from <= offset < end:
        return None
    first_offset = queue.first_offset
    if end == 0:
        return ReadResult(ReadStatus.EMPTY, 0, first_offset, end)
    if offset < queue.local_from:
        next_offset = first_offset if offset < first_offset else queue.local_from
        return ReadResult(ReadStatus.TOO_SMALL, next_offset, first_offset, end)
    if offset == end:
        return ReadResult(ReadStatus.AT_END, offset, first_offset, end)
    return ReadResult(ReadStatus.BEYOND_END, end, first_offset, end)


def _lose_blanks(result: ReadResult, offset: int, data: bytes) -> None:
    """Note the entries of *data*, from *offset* on, that have no record: their messages may match."""
    if BLANK_SIZE_BYTE not in data[SIZE_AT::ENTRY_BYTES] and ZEROS not in data:
        return
    for index, (_, size, _) in enumerate(ENTRY.iter_unpack(data), offset):
        if size in (BLANK_SIZE, 0):
            result.lose(index, index + 1)


def _narrow(
    data: bytes, indexes: list[int] | range, covered_count: int, search: NeedleSearch, count_max: int
) -> tuple[bytes, list[int] | range, int]:
    """Return the first *count_max* entries of *data* whose records may match, their indexes, and the number checked.

    Arguments and results are as in `matching_entries`: *indexes* has the indexes of the entries in *data*.
    """
    likely, checked = search.candidates(data, count_max)
    if likely is None:
        likely = list(range(checked))
    if len(likely) > count_max:
        checked = likely[count_max]
        del likely[count_max:]
    if checked < len(indexes):
        covered_count = indexes[checked]
    if len(likely) < len(indexes):
        data = b"".join([data[i * ENTRY_BYTES : (i + 1) * ENTRY_BYTES] for i in likely])
    return data, [indexes[i] for i in likely], covered_count


def _steps(predicate: Predicate | None) -> list[int] | None:
    """Return the counter of the steps of *predicate*; None if it has none."""
    return predicate.steps if isinstance(predicate, Condition) else None


def _entries(result: ReadResult, queue: Queue, offset: int, count: int, entries: Entries) -> bytes | None:
    """Return up to *count* entries; None if they are not at hand, or damaged and not the first of the read.

    A read that begins at damaged entries requests their repair.

    Raises:
      BlockDamaged: the damaged entries are the first of the read.
    """
    try:
        return entries(queue, offset, count)
    except BlockDamaged:
        if offset == result.next_offset:
            raise
        return None


def _limits(predicate: Predicate | None, max_messages: int, *, by_codes: bool) -> tuple[Find | None, int, int]:
    """Return the search of raw bytes, the number of records a read may test, and of entries it may scan."""
    condition = predicate if isinstance(predicate, Condition) else None
    find = condition.find if condition is not None else None
    tests = max(TESTED_MAX, max_messages)
    if condition is not None:
        tests = max(tests // condition.cost, 1)
    if by_codes:
        return find, tests, max(SCAN_ENTRIES, max_messages)
    if predicate is None:
        return find, tests, max_messages
    return find, tests, tests if find is None else SCAN_ENTRIES


@final
class LogReader:
    """Collects records from the log by entries; thread-safe.

    Args:
      on_damage: called with the log position, the queue and the offset of each damaged record found.
      verify: whether to compare records with their CRCs; pages that were written in this run are trusted.
      tells: whether reads with a filter look for entries without a record (`Care.TELL`).
    """

    def __init__(
        self, pages: PageCache, on_damage: Callable[[int, Queue, int], None], *, verify: bool, tells: bool = False
    ) -> None:
        self.pages = pages
        self.on_damage = on_damage
        self.verify = verify
        self.tells = tells
        self._gather_records, self._select_entries = native(gather_records), native(select_entries)
        self._count_intact = native(count_intact)

    def read(
        self,
        queue: Queue,
        offset: int,
        end: int,
        max_messages: int,
        budget_bytes: int,
        codes: frozenset[int] | None,
        predicate: Predicate | None,
        entries: Entries,
        load: Load,
        *,
        wait: bool = True,
    ) -> ReadResult | None:
        """Read *queue* from *offset*, which is below *end*; *entries* returns bytes of entries, *load* returns pages.

        The read ends at entries or a record that *entries* or *load* does not have, or at a damaged block of entries.
        If that is the first record, it is read from the disk anyway; without *wait*, or if its entry is missing, the
        result is None.

        Raises:
          BlockDamaged: the first entry is in a damaged block.
        """
        result = ReadResult(ReadStatus.NO_MATCH, offset, queue.first_offset, end)
        find, tests, scan = _limits(predicate, max_messages, by_codes=codes is not None)
        search = self._search(queue, find, _steps(predicate), load) if find is not None else None
        stop = min(end, offset + scan)
        window = max_messages  # if most messages are wanted, the first entries fill the result
        while offset < stop:
            data = _entries(result, queue, offset, min(stop - offset, window), entries)
            if data is None:
                if offset == result.next_offset:
                    return None
                break
            if not data:
                if not result.count:
                    offset = self._pass_hole(result, queue, offset, stop)
                break
            window = scan
            if self.tells and (codes is not None or predicate is not None):
                _lose_blanks(result, offset, data)
            data, indexes, checked_count = self._select(data, codes, max_messages if predicate is None else tests)
            all_checked = checked_count
            if search is not None and len(indexes) >= NARROWED_MIN:
                data, indexes, checked_count = _narrow(data, indexes, checked_count, search, tests)
            pieces_before, done, index = len(result.pieces), 0, -1
            if predicate is None and len(data) >= BLOCK_ENTRIES_MIN * ENTRY_BYTES:
                done = self._collect_many(result, queue, offset, indexes, data, max_messages, budget_bytes, load)
            if done < len(indexes):
                left, rest = indexes[done:], data[done * ENTRY_BYTES :]
                index = self._collect(
                    result, queue, offset, left, rest, max_messages, budget_bytes, predicate, load, wait
                )
            if queue.light:
                _write_places(result.pieces, pieces_before, queue, offset, indexes, data)
            if index == NOT_AT_HAND:
                return None
            if index >= 0:
                offset += index
                break
            offset += checked_count
            if predicate is not None:
                tests -= len(indexes)
            if result.count >= max_messages or tests <= 0 or checked_count < all_checked:
                break
        if result.status is ReadStatus.REMOVED and not result.count:
            offset = max(offset, queue.local_from)
        result.next_offset = offset
        return result

    def _select(
        self, data: bytes, codes: frozenset[int] | None, count_max: int
    ) -> tuple[bytes, list[int] | range, int]:
        """Return the entries of *data* with one of *codes*, their indexes, and the number of entries checked."""
        if codes is not None:
            return self._select_entries(data, codes, count_max)
        count = len(data) // ENTRY_BYTES
        return data, range(count), count

    def _search(self, queue: Queue, find: Find, steps: list[int] | None, load: Load) -> NeedleSearch:
        """Return a search in *queue* by *find*; it also finds damaged records if the reader reports them."""
        topic = (b"" if queue.light else queue.topic_bytes) if self.tells and self.verify else None
        return NeedleSearch(find, steps, load, topic)

    def _pass_hole(self, result: ReadResult, queue: Queue, offset: int, stop: int) -> int:
        """Note a missing file of entries in *result*; return where to continue.

        Retention may have removed it since the read began. Otherwise continue at the entries in memory, or after all
        entries that were checked.
        """
        if offset < queue.local_from:
            result.status = ReadStatus.REMOVED
            return queue.local_from
        result.status = ReadStatus.HOLE
        next_offset = queue.tail_offset if offset < queue.tail_offset < stop else stop
        result.lose(offset, next_offset)
        return next_offset

    def _collect(
        self,
        result: ReadResult,
        queue: Queue,
        offset: int,
        indexes: list[int] | range,
        data: bytes,
        max_messages: int,
        budget_bytes: int,
        predicate: Predicate | None,
        load: Load,
        wait: bool,
    ) -> int:
        """Add the records of the entries in *data*; return the index to continue at if *result* is full, else -1.

        `NOT_AT_HAND` means that reading the first record would wait for the disk.
        """
        pieces, before = result.pieces, result.count
        count, skipped, left = before, 0, budget_bytes - result.size
        low, high, is_checked, view = 0, 0, False, memoryview(b"")
        page: Page | None = None
        run, run_end, full = -1, -1, -1
        steps = _steps(predicate)
        steps_max = steps[0] + STEPS_MAX if steps is not None else 0
        for position, size, _ in ENTRY.iter_unpack(data):
            if count and (size > left or count >= max_messages):
                full = indexes[count - before + skipped]
                break
            end = position + size
            if not low <= position < end <= high:
                index = indexes[count - before + skipped]
                if run >= 0:
                    pieces.append(view[run - low : run_end - low])
                    run = run_end = -1
                page = self._page(position, size, load)
                if page is None:
                    if not (wait or count) and 0 < size < BLANK_SIZE:
                        return NOT_AT_HAND
                    if count or offset + index > result.next_offset:
                        full = index  # a read that begins there tries again
                        break
                    page = self._first_page(result, queue, offset + index, position, size)
                    if page is None:
                        if result.status is ReadStatus.REMOVED and queue.cold_from <= offset + index:
                            full = index  # the cold tier has it
                            break
                        low, high, skipped = 0, 0, skipped + 1
                        continue
                low, high, view = page.base, page.end, page.view
                is_checked = predicate is None and (page.trusted or not self.verify)
            if not is_checked and page is not None:
                index = indexes[count - before + skipped]
                if steps is not None and steps[0] >= steps_max:
                    full = index
                    break
                if not self._is_wanted(result, page, position, end, queue, offset + index, predicate):
                    skipped += 1
                    continue
            left, count = left - size, count + 1
            if position == run_end:
                run_end = end
            else:
                if run >= 0:
                    pieces.append(view[run - low : run_end - low])
                run, run_end = position, end
        if run >= 0:
            pieces.append(view[run - low : run_end - low])
        if count > before:
            result.count, result.size, result.status = count, budget_bytes - left, ReadStatus.FOUND
        return full

    def _collect_many(
        self,
        result: ReadResult,
        queue: Queue,
        offset: int,
        indexes: list[int] | range,
        data: bytes,
        max_messages: int,
        budget_bytes: int,
        load: Load,
    ) -> int:
        """Add the first records of the entries in *data*, many in one step; return their number.

        `_collect` continues: at the end of the budget, at a page that is not at hand, or at an odd entry or record.
        """
        pieces, gather = result.pieces, self._gather_records
        bytes_left, done = budget_bytes - result.size, 0
        count = min(max_messages - result.count, len(data) // ENTRY_BYTES)
        while done < count:
            position, size = POSITION_SIZE.unpack_from(data, done * ENTRY_BYTES)
            page, end = self._page(position, size, load), min(count, done + BLOCK_ENTRIES)
            if page is None:
                break
            if self.verify and not page.trusted:
                if queue.light:
                    break
                end = done + self._count_intact(data, done, end, bytes_left, page, queue, offset, indexes)
            gathered, gathered_bytes = gather(data, done, end, bytes_left, page, pieces)
            if not gathered:
                break
            done += gathered
            bytes_left -= gathered_bytes
        if done:
            result.count += done
            result.size, result.status = budget_bytes - bytes_left, ReadStatus.FOUND
        return done

    def _is_wanted(
        self,
        result: ReadResult,
        page: Page,
        position: int,
        end: int,
        queue: Queue,
        offset: int,
        predicate: Predicate | None,
    ) -> bool:
        """Return whether the record in *page* is undamaged and *predicate* selects it; note damage in *result*."""
        start = position - page.base
        if not page.trusted and not self._is_intact(page.view, start, end - page.base, position, queue, offset):
            self.on_damage(position, queue, offset)
            result.lose(offset, offset + 1)
            return False
        return predicate is None or predicate(RecordView(page.data, start))

    def _first_page(self, result: ReadResult, queue: Queue, offset: int, position: int, size: int) -> Page | None:
        """Return the page of the first record of a read, from the disk; report the record if it is damaged."""
        page = self._page(position, size, self.pages.load)
        if page is None:
            result.lose(offset, offset + 1)
        if page is None and size != BLANK_SIZE and size != 0 and not self._note_removed(result, position):
            self.on_damage(position, queue, offset)
        return page

    def _note_removed(self, result: ReadResult, position: int) -> bool:
        """Return whether retention removed *position*; the read then reports this unless it finds a record."""
        if position < 0 or position >= self.pages.segments.start:
            return False
        if not result.count:
            result.status = ReadStatus.REMOVED
        return True

    def _page(self, position: int, size: int, load: Load) -> Page | None:
        """Return the page of *position*, or a copy of the one record if it spans two pages; None if the log has
        neither.
        """
        if size <= 0 or size == BLANK_SIZE:
            return None
        page = load(position)
        if page is None or position + size <= page.end:
            return page
        if load(position + size - 1) is None:
            return None
        head = self.pages.read(position, 4)
        if len(head) < 4 or RecordView(head).size != size:
            return None
        data = self.pages.read(position, size)
        return Page(position, data, page.trusted) if len(data) == size else None

    def _is_intact(self, view: memoryview, start: int, end: int, position: int, queue: Queue, offset: int) -> bool:
        """Return whether the bytes are the undamaged record that the entry describes."""
        if not self.verify:
            return True
        if not check_record(view, start, end, position, None if queue.light else queue.topic_bytes):
            return False
        said: tuple[int, int] = IDENTITY.unpack_from(view, start + QUEUE_ID_AT)
        if not queue.light:
            return said == (queue.queue_id, offset)
        record = RecordView(view, start)
        own = said == (queue.queue_id, offset) and record.topic_bytes == queue.topic_bytes
        return own or names_place(record, queue.topic_bytes, offset)


def _write_places(
    pieces: list[Buffer], first: int, queue: Queue, offset: int, indexes: list[int] | range, data: bytes
) -> None:
    """Replace *pieces* from number *first* on by copies whose records contain their offsets in the light *queue*.

    The offsets follow from the entries *data*, of which *indexes* were used, counted from *offset*.
    """
    entries = zip(indexes, ENTRY.iter_unpack(data), strict=True)
    offsets = {position: offset + index for index, (position, size, _) in entries if size != BLANK_SIZE}
    for number in range(first, len(pieces)):
        copy = bytearray(pieces[number])
        for record in record_views(copy):
            I32.pack_into(copy, record.start + QUEUE_ID_AT, queue.queue_id)
            I64.pack_into(copy, record.start + QUEUE_OFFSET_AT, offsets.get(record.position, record.queue_offset))
            if has_record_crc(copy, record.start + record.size):
                write_record_crc(copy, record.start, record.start + record.size)
        pieces[number] = bytes(copy)
