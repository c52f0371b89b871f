"""A cold tier in memory: keeps what retention removes, can be slow or fail, and counts what it is asked."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final, final

import trio

from martlet.broker import Broker
from martlet.message import find_property
from martlet.plugins.hooks import Hooks
from martlet.records.layout import RecordView, record_views
from martlet.store import ColdTier, Queue, ReadOptions, ReadResult, Store
from martlet.store.read.cold import may_be_cold, select_records

__all__ = ["MemoryTier", "MemoryTierPlugin", "remove_sealed", "use_memory_tier"]

READ_AT_ONCE: Final = 1000
BYTES_AT_ONCE: Final = 1 << 20


@final
class _KeptQueue:
    """The records of one queue that the tier has, in ascending order."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.records: list[bytes] = []

    def index(self, of: Callable[[RecordView], int], least: int) -> int:
        """Return the index of the first record for which *of* returns at least *least*."""
        return bisect_left(self.records, least, key=lambda data: of(RecordView(data)))

    def offset_from(self, of: Callable[[RecordView], int], least: int) -> int:
        """Return the offset of that record; the offset after the last one, if there is none."""
        at = self.index(of, least)
        return RecordView(self.records[at]).queue_offset if at < len(self.records) else self.end

    @property
    def end(self) -> int:
        """The offset after the last record."""
        return RecordView(self.records[-1]).queue_offset + 1 if self.records else 0


@final
class MemoryTier:
    """A `ColdTier` of *store* in memory.

    While ``is_down`` it releases nothing. Each answer waits for ``gate``, if that is set, and then raises ``failure``,
    if that is set. ``asked`` has the names of the methods that were called.
    """

    def __init__(self, store: Store, name: str = "memory") -> None:
        self.name = name
        self.released = 0
        self.is_down = False
        self.gate: trio.Event | None = None
        self.failure: Exception | None = None
        self.asked: list[str] = []
        self._store = store
        self._kept: dict[tuple[str, int], _KeptQueue] = {}
        self._from_position = -1

    @property
    def reason(self) -> str:
        """Why records may not be removed yet."""
        return f"cold tier {self.name!r} has no copy of them; its object store does not answer"

    # ---- copies

    async def begin(self) -> None:
        """Tell what the tier has of its store."""
        self._tell()

    def move(self, store: Store) -> None:
        """Continue with *store*, the same data directory after a restart."""
        self._store = store
        for (topic, queue_id), kept in self._kept.items():
            kept.queue = store.queues.find(topic, queue_id) or kept.queue

    async def release(self, end: int) -> None:
        """Copy the records before log position *end*."""
        if self.is_down or end <= self.released:
            return
        if self._from_position < 0:
            self._from_position = self._store.first_position
        for queue in self._store.queues.all():
            if may_be_cold(queue.topic):
                self._copy(queue, end)
        self._tell()
        self.released = end

    def _copy(self, queue: Queue, end: int) -> None:
        key = queue.topic, queue.queue_id
        kept = self._kept.get(key)
        if kept is None or kept.queue is not queue:  # its topic was deleted and created again
            kept = self._kept[key] = _KeptQueue(queue)
        readers, offset = self._store.readers, max(kept.end, queue.local_from)
        while offset < readers.end_offset(queue):
            result = readers.read(queue, offset, READ_AT_ONCE, BYTES_AT_ONCE)
            for record in _records(result):
                if record.position >= end:
                    return
                kept.records.append(bytes(record.buffer[record.start : record.start + record.size]))
            offset = result.next_offset

    def _tell(self) -> None:
        store = self._store
        if self._from_position >= 0:
            store.cold.from_position = self._from_position
        for kept in self._kept.values():
            if kept.records and store.queues.find(kept.queue.topic, kept.queue.queue_id) is kept.queue:
                store.cold.keep(kept.queue, RecordView(kept.records[0]).queue_offset)

    def drop_before(self, queue: Queue, offset: int) -> None:
        """Remove the messages of *queue* before *offset*, as the tier's own retention; some later ones stay."""
        kept = self._kept[queue.topic, queue.queue_id]
        del kept.records[: kept.index(_queue_offset, offset)]
        self._from_position = max(self._from_position, RecordView(kept.records[0]).position)
        self._tell()

    # ---- answers

    async def _answer(self, method: str) -> None:
        self.asked.append(method)
        await trio.lowlevel.checkpoint()
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure

    def _of(self, queue: Queue) -> _KeptQueue:
        return self._kept[queue.topic, queue.queue_id]

    async def read(self, queue: Queue, offset: int, wanted: ReadOptions) -> ReadResult:
        """Return records of *queue* from *offset* on; calls the predicate on the event loop."""
        await self._answer("read")
        kept = self._of(queue)
        records = kept.records[kept.index(_queue_offset, offset) :]
        return select_records(queue, records, offset, kept.end, wanted)

    async def offset_by_time(self, queue: Queue, timestamp_ms: int) -> int:
        """Return the first offset of *queue* stored at or after *timestamp_ms*."""
        await self._answer("offset_by_time")
        return self._of(queue).offset_from(lambda record: record.store_ms, timestamp_ms)

    async def offset_by_position(self, queue: Queue, position: int) -> int:
        """Return the first offset of *queue* at or after log position *position*."""
        await self._answer("offset_by_position")
        return self._of(queue).offset_from(lambda record: record.position, position)

    async def record_at(self, position: int) -> bytes | None:
        """Return the record at log position *position*."""
        await self._answer("record_at")
        return next((data for data in self._all() if RecordView(data).position == position), None)

    async def records_by_key(
        self, topic: str, key: bytes, count_max: int, begin_ms: int, end_ms: int, end_position: int
    ) -> list[bytes]:
        """Return the newest *count_max* records of *topic* with *key*, newest first."""
        await self._answer("records_by_key")
        found = [
            data
            for data in self._all()
            if (record := RecordView(data)).topic == topic
            and record.position < end_position
            and begin_ms <= record.store_ms <= end_ms
            and key in _keys(record.properties)
        ]
        return sorted(found, key=lambda data: -RecordView(data).position)[:count_max]

    def _all(self) -> Iterator[bytes]:
        for kept in self._kept.values():
            yield from kept.records


def _queue_offset(record: RecordView) -> int:
    return record.queue_offset


def _records(result: ReadResult) -> Iterator[RecordView]:
    for piece in result.pieces:
        yield from record_views(piece)


def _keys(properties: bytes) -> Sequence[bytes]:
    return (find_property(properties, b"UNIQ_KEY"), *find_property(properties, b"KEYS").split(b" "))


class MemoryTierPlugin(Hooks):
    """A plugin with a tier in memory, for tests of a whole broker."""

    def martlet_cold_tiers(self, broker: Broker) -> Sequence[ColdTier]:
        """Return the tier."""
        return [MemoryTier(broker.store)]


def use_memory_tier(store: Store) -> MemoryTier:
    """Give *store* a tier in memory, as a plugin does."""
    tier = MemoryTier(store)
    store.use_cold_tier(tier)
    return tier


async def remove_sealed(store: Store) -> None:
    """Remove every segment of the log but the last, as far as the keepers allow."""
    retention = store.upkeep.retention
    await store.flusher.flush()
    await store.upkeep.checkpointer.checkpoint()
    floor = store.segments.items[-1].start
    for keeper in retention._keepers:
        await keeper.release(floor)
        floor = min(floor, keeper.released)
    retention._emptied.note_now(floor)
    while store.segments.items[0].end <= floor and len(store.segments.items) > 1:
        store.segments.remove_first()
    retention._update_after_removal()
    while retention._first_offsets.advance(READ_AT_ONCE):
        await trio.lowlevel.checkpoint()
