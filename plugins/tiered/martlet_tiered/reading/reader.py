"""Reads old messages for consumers: the reading half of the cold tier.

A read needs the span of its message (`TierIndex`), the metadata of the file, and one row group (`StoreReads`): two
requests at most, none if another consumer has read the same row group. Records that are damaged or lost are reported as
lost messages, as those of the log.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar, final

import numpy as np
import trio
from msgspec import Struct

from martlet.errors import Reason, Refused
from martlet.store import Queue, ReadOptions, ReadResult
from martlet.store.read.cold import select_records
from martlet.store.read.reading import ReadStatus
from martlet_tiered.errors import TierError
from martlet_tiered.reading.blocks import SpanSlice, WrongIndex
from martlet_tiered.reading.finder import FoundSpan
from martlet_tiered.reading.index import TierIndex
from martlet_tiered.reading.look_ups import LookUps
from martlet_tiered.reading.read_ahead import ReadAhead
from martlet_tiered.reading.row_groups import ParquetObject
from martlet_tiered.reading.spans import end_row
from martlet_tiered.reading.store_reads import FileGone, StoreReads

__all__ = ["DEADLINE_S", "ReadsOfTier", "TierReader"]

T = TypeVar("T")

# Of one question, with all retries.
DEADLINE_S: Final = 10.0
# Records that a read looks at with a filter, as in the log; with a predicate, which takes longer; and without a filter.
SCAN_RECORDS: Final = 8000
TESTED_RECORDS: Final = 800
# Records that the event loop selects at once, without a filter, in less than a millisecond; a thread selects more.
SELECTED_NOW: Final = 256


class _Piece(Struct, frozen=True):
    """Messages of a queue in one block, from index `at` on; the tier has nothing between their end and `stop`."""

    slice: SpanSlice
    at: int
    stop: int
    file: ParquetObject
    number: int


@final
class TierReader:
    """The `ColdReader` of a tier with *index*.

    *refresh* compares the index with the newest state of the table (`TierIndex.sync`), from which another program may
    have removed files.
    """

    def __init__(self, name: str, index: TierIndex, reads: StoreReads, refresh: Callable[[], Awaitable[None]]) -> None:
        self.name: Final = name
        self._index = index
        self._reads = reads
        self._refresh = refresh
        self._refreshing = trio.Lock()
        self._ahead = ReadAhead()
        self._look_ups = LookUps(index, reads)

    async def run(self) -> None:
        """Index files and read ahead, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._index.run)
            nursery.start_soon(self._ahead.run)

    # ---- reads

    async def read(self, queue: Queue, offset: int, wanted: ReadOptions) -> ReadResult:
        """Return records of *queue* from *offset* on, of one row group at most.

        Raises:
          Refused: the store did not answer, or the index is being built (BUSY); or the store refuses access.
        """
        return await self._in_time(partial(self._read, queue, offset, wanted))

    async def _read(self, queue: Queue, offset: int, wanted: ReadOptions) -> ReadResult:
        found = await self._index.finder.find(queue, offset)
        if found.place is None:
            end = found.next_first if found.next_first is not None else queue.local_from
            return _lost(offset, max(end, offset + 1))
        piece = await self._piece(found, offset)
        if piece is None:
            return _lost(offset, _end_of(found))
        result = await self._select(queue, piece, offset, wanted)
        if self._ahead.is_sequential(queue.topic, queue.queue_id, offset, result.next_offset):
            self._read_ahead(queue, found, piece)
        return result

    async def _piece(self, found: FoundSpan, offset: int) -> _Piece | None:
        """Return the first messages at or after *offset* of the span in *found*; None if all are damaged or lost."""
        assert found.place is not None
        span = found.place.span
        file = await self._reads.file(found.place.path, found.place.bytes)
        if file is None:
            return None
        number, last = _first_range(file, found, offset), file.range_at(end_row(span) - 1)
        while number <= last:
            block = await self._reads.block(file, number)
            if block is not None:
                messages = block.slice_of(span)
                at = messages.index(offset)
                if at < messages.end:
                    stop = int(block.offsets[messages.end - 1]) + 1 if number < last else _end_of(found)
                    return _Piece(messages, at, stop, file, number)
            number += 1
        return None

    async def _select(self, queue: Queue, piece: _Piece, offset: int, wanted: ReadOptions) -> ReadResult:
        if wanted.codes is None and wanted.predicate is None:
            result = _take(piece, offset, wanted)
            if result is not None:
                return result
        has_filter = wanted.codes is not None or wanted.predicate is not None
        most = SCAN_RECORDS if wanted.predicate is None else max(TESTED_RECORDS, wanted.count_max)
        most = most if has_filter else wanted.count_max + 1
        messages, end, stop = piece.slice, piece.slice.end, piece.stop
        if end - piece.at > most:
            end = piece.at + most
            stop = int(messages.block.offsets[end - 1]) + 1
        records = messages.records(piece.at, end)
        if not has_filter and min(wanted.count_max, end - piece.at) <= SELECTED_NOW:
            return select_records(queue, records, offset, stop, wanted)
        return await self._reads.in_thread(partial(select_records, queue, records, offset, stop, wanted))

    def _read_ahead(self, queue: Queue, found: FoundSpan, piece: _Piece) -> None:
        """Read the block that follows *piece*, unless it is there."""
        assert found.place is not None
        if piece.file.range_at(end_row(found.place.span) - 1) > piece.number:
            if not self._reads.has_block(piece.file, piece.number + 1):
                self._ahead.want(partial(self._read_block, piece.file, piece.number + 1))
        elif found.next_first is not None:
            self._ahead.want(partial(self._read_span, queue, found.next_first))

    async def _read_block(self, file: ParquetObject, number: int) -> None:
        await self._reads.block(file, number)

    async def _read_span(self, queue: Queue, offset: int) -> None:
        """Read the first block of the span that has message *offset*."""
        found = await self._index.finder.find(queue, offset)
        if found.place is not None:
            file = await self._reads.file(found.place.path, found.place.bytes)
            if file is not None:
                await self._reads.block(file, _first_range(file, found, offset))

    # ---- look-ups

    async def offset_by_time(self, queue: Queue, timestamp_ms: int) -> int:
        """Return the first offset of *queue* stored at or after *timestamp_ms*; the offset after its last, if none.

        Raises:
          Refused: as `read`.
        """
        return await self._in_time(partial(self._look_ups.offset_by_time, queue, timestamp_ms))

    async def offset_by_position(self, queue: Queue, position: int) -> int:
        """Return the first offset of *queue* at or after log position *position*; the offset after its last, if none.

        Raises:
          Refused: as `read`.
        """
        return await self._in_time(partial(self._look_ups.offset_by_position, queue, position))

    async def record_at(self, position: int) -> bytes | None:
        """Return the record at log position *position*; None if none begins there.

        Raises:
          Refused: as `read`.
        """
        return await self._in_time(partial(self._look_ups.record_at, position))

    async def records_by_key(
        self, topic: str, key: bytes, count_max: int, begin_ms: int, end_ms: int, end_position: int
    ) -> list[bytes]:
        """Return the newest *count_max* records of *topic* with *key*, newest first, of a limited number of files.

        They were stored from *begin_ms* to *end_ms*, and are before log position *end_position*.

        Raises:
          Refused: as `read`.
        """
        ask = self._look_ups.records_by_key
        return await self._in_time(partial(ask, topic, key, count_max, begin_ms, end_ms, end_position))

    async def _in_time(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of *ask* before the deadline.

        Raises:
          Refused: there is none (BUSY).
        """
        await trio.lowlevel.checkpoint()  # with all in memory there is no other
        with trio.move_on_after(DEADLINE_S):
            try:
                return await self._answer(ask)
            except WrongIndex as error:
                self._index.distrust(str(error))
                raise Refused(Reason.BUSY, "the index of the cold tier is being rebuilt; try again") from error
        raise Refused(Reason.BUSY, f"cold tier {self.name!r} did not answer within {DEADLINE_S:g} s; try again")

    async def _answer(self, ask: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await ask()
            except FileGone as gone:
                await self._look_for(gone.path)

    async def _look_for(self, path: str) -> None:
        """Find out whether the table still has file *path*, which the store does not have."""
        async with self._refreshing:
            if self._reads.is_lost(path) or not self._index.has_file(path):
                return
            try:
                await self._refresh()
            except TierError as error:
                raise Refused(Reason.BUSY, f"old messages cannot be read; {error}") from error
            if self._index.has_file(path):
                self._reads.note_lost(path)


def _lost(offset: int, end: int) -> ReadResult:
    """Return the result of a read of messages that are damaged or lost, up to *end*."""
    result = ReadResult(ReadStatus.NO_MATCH, end, 0, 0)
    result.lose(offset, end)
    return result


def _take(piece: _Piece, offset: int, wanted: ReadOptions) -> ReadResult | None:
    """Return the result of a read without a filter, as `select_records`; None if a record is damaged.

    The records are adjacent in the block, so they need not be looked at one by one.
    """
    block, at = piece.slice.block, piece.at
    end = min(piece.slice.end, at + max(wanted.count_max, 1))
    sizes = block.ends[at:end] - block.starts[at]
    count = max(int(np.searchsorted(sizes, wanted.budget_bytes, "right")), 1)
    end = at + count
    if not block.intact[at:end].all():
        return None
    offsets = block.offsets[at:end]
    result = ReadResult(ReadStatus.FOUND, int(offsets[-1]) + 1, 0, 0)
    if offsets[0] > offset:
        result.lose(offset, int(offsets[0]))
    for hole in np.flatnonzero(np.diff(offsets) > 1).tolist():
        result.lose(int(offsets[hole]) + 1, int(offsets[hole + 1]))
    if end == piece.slice.end and piece.stop > result.next_offset:
        result.lose(result.next_offset, piece.stop)
        result.next_offset = piece.stop
    result.pieces.append(block.data[int(block.starts[at]) : int(block.ends[end - 1])])
    result.count, result.size = count, int(sizes[count - 1])
    return result


def _end_of(found: FoundSpan) -> int:
    """Return the offset up to which the span has all that there is."""
    assert found.place is not None
    return found.next_first if found.next_first is not None else found.place.span.last + 1


def _first_range(file: ParquetObject, found: FoundSpan, offset: int) -> int:
    """Return the number of the first range of *file* that may have a message of the span from *offset* on."""
    assert found.place is not None
    span = found.place.span
    # At most `last - offset` messages of the span come after it.
    number = file.range_at(max(span.row, end_row(span) - 1 - (span.last - offset)))
    last = file.range_at(end_row(span) - 1)
    while number < last:
        greatest = file.greatest(file.ranges[number].group, "offset")
        if greatest is None or greatest >= offset:
            break
        number += 1
    return number


class ReadsOfTier:
    """The base of a `ColdTier` whose reads and look-ups are those of `reader`."""

    reader: TierReader

    async def read(self, queue: Queue, offset: int, wanted: ReadOptions) -> ReadResult:
        """Return records of *queue* from *offset* on. Raises `Refused`."""
        return await self.reader.read(queue, offset, wanted)

    async def offset_by_time(self, queue: Queue, timestamp_ms: int) -> int:
        """Return the first offset of *queue* stored at or after *timestamp_ms*. Raises `Refused`."""
        return await self.reader.offset_by_time(queue, timestamp_ms)

    async def offset_by_position(self, queue: Queue, position: int) -> int:
        """Return the first offset of *queue* at or after log position *position*. Raises `Refused`."""
        return await self.reader.offset_by_position(queue, position)

    async def record_at(self, position: int) -> bytes | None:
        """Return the record at log position *position*. Raises `Refused`."""
        return await self.reader.record_at(position)

    async def records_by_key(
        self, topic: str, key: bytes, count_max: int, begin_ms: int, end_ms: int, end_position: int
    ) -> list[bytes]:
        """Return the newest records of *topic* with *key*, newest first. Raises `Refused`."""
        return await self.reader.records_by_key(topic, key, count_max, begin_ms, end_ms, end_position)
