"""From a queue's entries to slices of the log: what a pull is answered with.

The stored record is what goes over the wire, so an answer is views of chunks, merged
where records stand side by side. Tags are compared on the entries alone, by searching
their bytes: 800 entries without a match cost a few microseconds.
"""

from collections.abc import Callable
from enum import IntEnum, unique
from typing import Final, final

from martlet.store.codec import check_record
from martlet.store.layout import (
    BLANK_SIZE,
    CODE,
    CODE_AT,
    ENTRY,
    ENTRY_BYTES,
    IDENTITY,
    QUEUE_ID_AT,
    Buffer,
    Predicate,
    RecordView,
)
from martlet.store.page_cache import Chunk, Chunks
from martlet.store.queues import BlockDamaged, Queue

__all__ = ["ReadResult", "ReadStatus", "Reader"]

# RocketMQ maxFilterMessageSize: a read looks at no more bytes of entries, unless more messages are wanted.
SCAN_BYTES: Final = 16_000
PATTERNS_MAX: Final = 16

Entries = Callable[[Queue, int, int], bytes]
Load = Callable[[int], Chunk | None]


@unique
class ReadStatus(IntEnum):
    """What a read came to; RocketMQ's GetMessageStatus."""

    FOUND = 0
    NO_MATCH = 1
    NO_QUEUE = 2
    EMPTY = 3
    TOO_SMALL = 4
    AT_END = 5
    BEYOND_END = 6
    REMOVED = 7
    HOLE = 8


@final
class ReadResult:
    """Whole records in ``pieces``, and where to read on (``next_offset``).

    ``first_offset`` and ``end_offset`` are the queue's bounds of that moment; ``count`` messages of
    ``size`` bytes together. A piece is a view that keeps up to a chunk of memory alive: who cannot
    send it soon copies it.
    """

    __slots__ = ("count", "end_offset", "first_offset", "next_offset", "pieces", "size", "status")

    def __init__(self, status: ReadStatus, next_offset: int, first_offset: int, end_offset: int) -> None:
        self.status = status
        self.next_offset = next_offset
        self.first_offset = first_offset
        self.end_offset = end_offset
        self.pieces: list[Buffer] = []
        self.count = 0
        self.size = 0

    def __repr__(self) -> str:
        return f"<ReadResult {self.status.name} next {self.next_offset} count {self.count} size {self.size}>"


def bounds(queue: Queue, offset: int, end: int) -> ReadResult | None:
    """The answer when *offset* is outside of the queue; None when there is something to read."""
    first = queue.first_offset
    if first <= offset < end:
        return None
    if end == 0:
        return ReadResult(ReadStatus.EMPTY, 0, first, end)
    if offset < first:
        return ReadResult(ReadStatus.TOO_SMALL, first, first, end)
    if offset == end:
        return ReadResult(ReadStatus.AT_END, offset, first, end)
    return ReadResult(ReadStatus.BEYOND_END, end, first, end)


def matching(data: bytes, codes: frozenset[int], count_max: int) -> tuple[list[int], int]:
    """Return the indexes of entries with one of *codes*, ascending, and the index up to which that is all of them."""
    if len(codes) > PATTERNS_MAX:
        found = [index for index, entry in enumerate(ENTRY.iter_unpack(data)) if entry[2] in codes]
        return found, len(data) // ENTRY_BYTES
    found = []
    covered = len(data) // ENTRY_BYTES
    for code in codes:
        pattern = CODE.pack(code)
        at = data.find(pattern, CODE_AT)
        left = count_max
        while at >= 0:
            index, within = divmod(at, ENTRY_BYTES)
            if within != CODE_AT:
                at = data.find(pattern, at + 1)
                continue
            found.append(index)
            left -= 1
            if not left:
                covered = min(covered, index + 1)
                break
            at = data.find(pattern, at + ENTRY_BYTES)
    found = sorted(index for index in found if index < covered)
    return found, covered


@final
class Reader:
    """Collects records from the log by entries; safe to use from several threads."""

    __slots__ = ("chunks", "on_damage", "verify")

    def __init__(self, chunks: Chunks, on_damage: Callable[[int, Queue, int], None], *, verify: bool) -> None:
        self.chunks = chunks
        self.on_damage = on_damage
        self.verify = verify

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
    ) -> ReadResult:
        """Read *queue* from *offset*, which is below *end*; *entries* gives bytes of entries, *load* chunks.

        What *load* does not have ends the read, unless it is the first, and so does a damaged block of entries.

        Raises:
          BlockDamaged: that of the first entry.
        """
        result = ReadResult(ReadStatus.NO_MATCH, offset, queue.first_offset, end)
        filtered = codes is not None or predicate is not None
        scan = max(SCAN_BYTES // ENTRY_BYTES, max_messages) if filtered else max_messages
        stop = min(end, offset + scan)
        while offset < stop:
            try:
                data = entries(queue, offset, stop - offset)
            except BlockDamaged:
                if offset == result.next_offset:
                    raise
                break  # whoever begins there has it repaired
            if not data:
                if not result.count:
                    result.status, offset = self._after_hole(queue, offset, stop)
                break
            found: list[int] | range
            covered = len(data) // ENTRY_BYTES
            if codes is None:
                found = range(covered)
            else:
                found, covered = matching(data, codes, max_messages)
                data = b"".join([data[i * ENTRY_BYTES : (i + 1) * ENTRY_BYTES] for i in found])
            taken = self._collect(result, queue, offset, found, data, max_messages, budget_bytes, predicate, load)
            if taken >= 0:
                offset += taken
                break
            offset += covered
            if result.count >= max_messages:
                break
        if result.status is ReadStatus.REMOVED and not result.count:
            offset = max(offset, queue.first_offset)
        result.next_offset = offset
        return result

    def _after_hole(self, queue: Queue, offset: int, stop: int) -> tuple[ReadStatus, int]:
        """What it means that a file of entries is missing, and where to go on.

        Retention may have removed it since the read began. Else what is in memory still is, or all that was looked at.
        """
        if offset < queue.first_offset:
            return ReadStatus.REMOVED, queue.first_offset
        return ReadStatus.HOLE, queue.tail_offset if offset < queue.tail_offset < stop else stop

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
    ) -> int:
        """Add the records of the entries in *data*; return the index to go on from when *result* is full, else -1."""
        pieces = result.pieces
        count, total = result.count, result.size
        low, high, trusted = 0, 0, False
        view = memoryview(b"")
        stored: bytes | bytearray = b""
        run, run_end = -1, -1
        full = -1
        for index, (position, size, _) in zip(indexes, ENTRY.iter_unpack(data), strict=True):
            if count and (count >= max_messages or total + size > budget_bytes):
                full = index
                break
            end = position + size
            if position < low or end > high or size <= 0:
                if run >= 0:
                    pieces.append(view[run - low : run_end - low])
                    run = run_end = -1
                chunk = self._chunk(position, size, load)
                if chunk is None and (count or offset + index > result.next_offset):
                    full = index  # whoever begins there looks again
                    break
                if chunk is None:
                    chunk = self._chunk(position, size, self.chunks.load)
                if chunk is None:
                    if size != BLANK_SIZE and size != 0 and not self._gone(result, position):
                        self.on_damage(position, queue, offset + index)
                    low = high = 0
                    continue
                low, high, trusted, view = chunk.base, chunk.end, chunk.trusted, chunk.view
                stored = chunk.data
            if not trusted and not self._intact(view, position - low, end - low, position, queue, offset + index):
                self.on_damage(position, queue, offset + index)
                continue
            if predicate is not None and not predicate(RecordView(stored, position - low)):
                continue
            count += 1
            total += size
            if position == run_end:
                run_end = end
            else:
                if run >= 0:
                    pieces.append(view[run - low : run_end - low])
                run, run_end = position, end
        if run >= 0:
            pieces.append(view[run - low : run_end - low])
        if count > result.count:
            result.count, result.size, result.status = count, total, ReadStatus.FOUND
        return full

    def _gone(self, result: ReadResult, position: int) -> bool:
        """Whether retention removed *position*; then the read says so unless it finds something."""
        if position < 0 or position >= self.chunks.segments.start:
            return False
        if not result.count:
            result.status = ReadStatus.REMOVED
        return True

    def _chunk(self, position: int, size: int, load: Load) -> Chunk | None:
        """The chunk of *position*, or a copy of the one record if that crosses a border; None if none is there."""
        if size <= 0 or size == BLANK_SIZE:
            return None
        chunk = load(position)
        if chunk is None or position + size <= chunk.end:
            return chunk
        if load(position + size - 1) is None:
            return None
        head = self.chunks.read(position, 4)
        if len(head) < 4 or RecordView(head).size != size:
            return None
        data = self.chunks.read(position, size)
        return Chunk(position, data, chunk.trusted) if len(data) == size else None

    def _intact(self, view: memoryview, start: int, end: int, position: int, queue: Queue, offset: int) -> bool:
        """Whether the bytes are the record that the entry says, undamaged."""
        if not self.verify:
            return True
        if not check_record(view, start, end, position):
            return False
        said: tuple[int, int] = IDENTITY.unpack_from(view, start + QUEUE_ID_AT)
        return said == (queue.queue_id, offset)
