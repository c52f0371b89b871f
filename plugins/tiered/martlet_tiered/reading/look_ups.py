"""Look-ups in the cold tier: by time, by log position, and by key."""

import datetime
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, final

import numpy as np
import trio
from msgspec import Struct

from martlet.message import find_property
from martlet.records.codec import key_hash
from martlet.records.layout import RecordView
from martlet.store import Queue
from martlet_columns.records import Integers
from martlet_tiered.format.footer import Span
from martlet_tiered.reading.blocks import Block
from martlet_tiered.reading.database import Place
from martlet_tiered.reading.index import TierIndex, one_error
from martlet_tiered.reading.row_groups import ParquetObject
from martlet_tiered.reading.spans import end_row
from martlet_tiered.reading.store_reads import StoreReads

__all__ = ["FILES_MAX", "LookUps"]

# Files in which a look-up by key searches, the newest ones in its range of time: 16 GiB of log. And the row groups that
# it reads at most, and the indexes of keys that it reads at the same time.
FILES_MAX: Final = 64
BLOCKS_MAX: Final = 64
KEYS_AT_ONCE: Final = 4
SPANS_MAX: Final = 1000
EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
MS: Final = datetime.timedelta(milliseconds=1)


class _Wanted(Struct, frozen=True):
    """What a look-up by key searches."""

    topic: str
    key: bytes
    begin_ms: int
    end_ms: int
    end_position: int


class _Candidate(Struct, frozen=True):
    """Range `number` of a file, which may have the key, and the spans of the topic in it."""

    file: ParquetObject
    number: int
    spans: list[Span]


@final
class LookUps:
    """Answers look-ups with *index* and *reads*. All methods raise `Refused` as `TierReader.read`."""

    def __init__(self, index: TierIndex, reads: StoreReads) -> None:
        self._index = index
        self._reads = reads

    # ---- the first message of a queue

    async def offset_by_time(self, queue: Queue, timestamp_ms: int) -> int:
        """Return the first offset of *queue* stored at or after *timestamp_ms*; the offset after its last, if none."""
        ask = partial(self._index.finder.find_by_time, queue, timestamp_ms)
        return await self._first(queue, ask, "store_ts", lambda block: block.times, timestamp_ms)

    async def offset_by_position(self, queue: Queue, position: int) -> int:
        """Return the first offset of *queue* at or after log position *position*; else the offset after its last."""
        ask = partial(self._index.finder.find_by_position, queue, position)
        return await self._first(queue, ask, "_position", lambda block: block.positions, position)

    async def _first(
        self,
        queue: Queue,
        find: Callable[[int], Awaitable[Place | None]],
        column: str,
        values: Callable[[Block], Integers],
        least: int,
    ) -> int:
        offset = queue.first_offset
        while (place := await find(offset)) is not None:
            found = await self._first_in(place, column, values, least, offset)
            if found is not None:
                return found
            offset = place.span.last + 1
        return await self._index.finder.end_of(queue)

    async def _first_in(
        self, place: Place, column: str, values: Callable[[Block], Integers], least: int, offset: int
    ) -> int | None:
        """Return the first offset of a span from *offset* on whose value is at least *least*; None if there is none."""
        file = await self._reads.file(place.path, place.bytes)
        if file is None:
            return None
        span = place.span
        for number in range(file.range_at(span.row), file.range_at(end_row(span) - 1) + 1):
            if _is_less(file.greatest(file.ranges[number].group, column), least):
                continue
            block = await self._reads.block(file, number)
            found = block.slice_of(span).first_at_least(values(block), least, offset) if block is not None else None
            if found is not None:
                return found
        return None

    # ---- a record at a position

    async def record_at(self, position: int) -> bytes | None:
        """Return the record at log position *position*; None if none begins there."""
        for path, size in await self._index.finder.files_at(position):
            file = await self._reads.file(path, size)
            positions = await self._reads.positions(file) if file is not None else None
            if file is None or positions is None:
                continue
            for row in np.flatnonzero(positions == position).tolist():
                data = await self._record_in(file, row)
                if data is not None:
                    return data
        return None

    async def _record_in(self, file: ParquetObject, row: int) -> bytes | None:
        """Return the record in *row* of *file*; None if it is damaged, or of a queue that is not there any more."""
        number = file.range_at(row)
        block = await self._reads.block(file, number)
        at = row - file.ranges[number].first
        if block is None or not block.intact[at]:
            return None
        data = block.record(at)
        record = RecordView(data)
        return data if await self._index.finder.has_row(record.topic, record.queue_id, file.path, row) else None

    # ---- records by key

    async def records_by_key(
        self, topic: str, key: bytes, count_max: int, begin_ms: int, end_ms: int, end_position: int
    ) -> list[bytes]:
        """Return the newest *count_max* records of *topic* with *key*, newest first; searches `FILES_MAX` files."""
        wanted = _Wanted(topic, key, begin_ms, end_ms, end_position)
        files = _by_file(await self._index.finder.places_of_topic(topic, begin_ms, end_ms, end_position, SPANS_MAX))
        code, found, left = key_hash(topic, key), list[bytes](), BLOCKS_MAX
        for at in range(0, min(len(files), FILES_MAX), KEYS_AT_ONCE):
            batch = files[at : at + KEYS_AT_ONCE]
            if len(found) >= count_max and _position(found[count_max - 1]) > _newest(batch):
                break
            candidates = (await self._candidates(batch, code))[:left]
            left -= len(candidates)
            for each in candidates:
                found += await self._records_in(each, wanted)
            found.sort(key=_position, reverse=True)
        return found[:count_max]

    async def _candidates(self, files: Sequence[list[Place]], code: int) -> list[_Candidate]:
        """Return the row groups of *files* that may have a key with the hash *code*, file by file."""
        found: list[list[_Candidate]] = [[] for _ in files]

        async def look(number: int, places: list[Place]) -> None:
            found[number] = await self._candidates_in(places, code)

        with one_error():
            async with trio.open_nursery() as nursery:
                for number, places in enumerate(files):
                    nursery.start_soon(look, number, places)
        return [each for part in found for each in part]

    async def _candidates_in(self, places: list[Place], code: int) -> list[_Candidate]:
        file = await self._reads.file(places[0].path, places[0].bytes)
        if file is None:
            return []
        keys = await self._reads.keys(file.path)
        groups = set(keys.groups_of(code)) if keys is not None else None  # without them, all are searched
        found: list[_Candidate] = []
        for number, rows in enumerate(file.ranges):
            spans = [each.span for each in places if each.span.row < rows.end and end_row(each.span) > rows.first]
            if spans and (groups is None or rows.group in groups):
                found.append(_Candidate(file, number, spans))
        return found

    async def _records_in(self, candidate: _Candidate, wanted: _Wanted) -> list[bytes]:
        block = await self._reads.block(candidate.file, candidate.number)
        if block is None:
            return []
        return await self._reads.in_thread(partial(_find_key, block, candidate.spans, wanted))


def _by_file(places: Sequence[Place]) -> list[list[Place]]:
    """Return *places* by file, those of the newest first."""
    files: dict[str, list[Place]] = {}
    for place in places:
        files.setdefault(place.path, []).append(place)
    return list(files.values())


def _newest(files: Sequence[list[Place]]) -> int:
    return max(place.span.max_position for places in files for place in places)


def _position(data: bytes) -> int:
    return RecordView(data).position


def _is_less(value: object, least: int) -> bool:
    """Return whether *value* of a statistic, a number or a time, is known and less than *least*."""
    if isinstance(value, datetime.datetime):
        value = (value - EPOCH) // MS
    return isinstance(value, int) and value < least


def _find_key(block: Block, spans: Sequence[Span], wanted: _Wanted) -> list[bytes]:
    """Return the records of *spans* in *block* that have the key."""
    found: list[bytes] = []
    for span in spans:
        part = block.slice_of(span)
        times, positions = block.times, block.positions
        for at in part.with_text(wanted.key):
            if wanted.begin_ms <= times[at] <= wanted.end_ms and positions[at] < wanted.end_position:
                data = block.record(at)
                properties = RecordView(data).properties
                own = find_property(properties, b"UNIQ_KEY")
                if wanted.key in (own, *find_property(properties, b"KEYS").split(b" ")):
                    found.append(data)
    return found
