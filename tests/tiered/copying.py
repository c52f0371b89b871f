"""A cold tier that copies a range of the log when retention asks for it: the real files, table, index and reader."""

import datetime
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar, final

import trio

from martlet.records.layout import MAGICS, RecordView
from martlet.runtime.io_threads import IoThreads
from martlet.store import Queue, ReadOptions, ReadResult, Store
from martlet.store.format.notes import OWN_PREFIX
from martlet_columns.records import Records
from martlet_tiered.format.keys import keys_name
from martlet_tiered.format.writing import EncodedFile, write_file
from martlet_tiered.names import DataName, Kind
from martlet_tiered.objects import Objects
from martlet_tiered.reading.index import FILE_NAME, TierIndex
from martlet_tiered.reading.reader import ReadsOfTier, TierReader
from martlet_tiered.reading.store_reads import StoreReads
from martlet_tiered.table import ColdTable

from .cold import Tier

__all__ = ["CACHE_BYTES", "CopyingTier", "CountedObjects", "copying_tier"]

T = TypeVar("T")
BLANK_MAGIC: Final = 0xCBD43194
CACHE_BYTES: Final = 64 << 20


def kind_of(topic: str) -> Kind:
    if topic.startswith(OWN_PREFIX):
        return "internal"
    return "retry" if topic.startswith("%RETRY%") else "dlq" if topic.startswith("%DLQ%") else "topic"


@final
class CountedObjects:
    """Counts the reads of data files, by name, and can hang or fail them."""

    def __init__(self, inner: Objects) -> None:
        self.reads: list[str] = []
        self.hang: Callable[[], None] | None = None
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def _note(self, name: str) -> None:
        self.reads.append(name)
        if self.hang is not None:
            self.hang()

    def read(self, name: str) -> bytes:
        self._note(name)
        return self.inner.read(name)

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        self._note(name)
        return self.inner.read_range(name, begin, end)

    def read_ranges(self, name: str, ranges: list[tuple[int, int]]) -> list[bytes]:
        self._note(name)
        return self.inner.read_ranges(name, ranges)


@final
class CopyingTier(ReadsOfTier):
    """A `ColdTier` of *store* at *place*; `objects` counts requests, and `asked` has the questions of the core."""

    def __init__(self, store: Store, place: Tier, cache_bytes: int = CACHE_BYTES) -> None:
        self.name = "copying"
        self.released = 0
        self.reason = f"cold tier {self.name!r} has no copy of them"
        self.asked: list[str] = []
        self.store = store
        self.table: ColdTable = place.exact_table()
        self.table.take_over(str(id(self)))
        self.objects = CountedObjects(place.objects())
        threads = IoThreads("the object store")
        path = f"{store.data_directory.path}/{FILE_NAME}"
        self.index = TierIndex(store, path, place.url, self.objects, threads)  # type: ignore[arg-type]
        self.reads = StoreReads(self.objects, threads, cache_bytes)  # type: ignore[arg-type]
        self.reader = TierReader(self.name, self.index, self.reads, self.refresh)
        self.released = self.table.end or 0

    async def begin(self) -> None:
        await self.index.begin()
        await self.refresh()

    async def refresh(self) -> None:
        await trio.to_thread.run_sync(self.table.refresh)
        await self.index.sync(self.table.files())

    async def run(self) -> None:
        await self.reader.run()

    async def release(self, end: int) -> None:
        """Copy the records before log position *end*."""
        begin = self.table.end if self.table.end is not None else self.store.first_position
        if end <= begin:
            return
        parts: dict[tuple[str, Kind], list[bytes]] = {}
        at = begin
        while at < end:
            head = self.store.segments.read(at, 8)
            size, magic = int.from_bytes(head[:4], "big"), int.from_bytes(head[4:], "big")
            if magic in MAGICS:
                data = bytes(self.store.segments.read(at, size))
                record = RecordView(data)
                if self._is_live(record):
                    day = datetime.datetime.fromtimestamp(record.store_ms / 1000, datetime.UTC).date().isoformat()
                    parts.setdefault((day, kind_of(record.topic)), []).append(data)
            at += size
        written = [
            write_file(
                DataName(day, kind, self.table.epoch, begin, at), "a", Records(bytearray().join(parts[day, kind])), 1
            )
            for day, kind in parts
        ]
        await self.upload(begin, at, written)

    async def upload(self, begin: int, end: int, written: list[EncodedFile]) -> None:
        """Commit *written* as the files of a range."""
        for each in written:
            self.objects.inner.create(f"table/{each.file.path}", each.data)
            self.objects.inner.create(keys_name(each.file.path), each.keys)
        self.table.append(begin, end, [each.file for each in written])
        await self.index.committed([each.file for each in written], [each.footer for each in written])
        self.released = end

    def _is_live(self, record: RecordView) -> bool:
        """Whether the record's topic was not deleted since."""
        if kind_of(record.topic) == "internal":
            return True
        queue = self.store.queues.find(record.topic, record.queue_id)
        if queue is None or queue.light or not queue.stored_from <= record.queue_offset < queue.next_offset:
            return False
        found = self.store.readers.read(queue, record.queue_offset, 1, 1 << 20)
        return bool(found.count) and RecordView(b"".join(found.pieces)).position == record.position

    async def read(self, queue: Queue, offset: int, wanted: ReadOptions) -> ReadResult:
        self.asked.append("read")
        return await super().read(queue, offset, wanted)


@asynccontextmanager
async def copying_tier(store: Store, place: Tier) -> AsyncIterator[CopyingTier]:
    """Give *store* a tier at *place*, whose service runs during the block."""
    tier = await trio.to_thread.run_sync(CopyingTier, store, place)
    store.use_cold_tier(tier)
    await tier.begin()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tier.run)
        yield tier
        nursery.cancel_scope.cancel()
