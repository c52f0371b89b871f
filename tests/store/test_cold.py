"""Records that retention removed are read from a cold reader, where there is one."""

from collections.abc import Awaitable, Callable
from typing import final

from martlet.records.layout import Predicate, RecordView, record_views
from martlet.store import Queue, ReadResult, ReadStatus, Store
from martlet.store.queue_reader import QueueReader
from martlet.testing.stores import bodies, message, small_config

OpenStore = Callable[..., Awaitable[Store]]


@final
class Kept:
    """Keeps a copy of each record of one queue, as a tier would."""

    def __init__(self, store: Store, queue: Queue) -> None:
        self.store = store
        self.records: dict[int, bytes] = {}
        self.first = 0
        for piece in store.readers.read(queue, 0, 1000, 1 << 20).pieces:
            for view in record_views(bytes(piece)):
                self.records[view.queue_offset] = bytes(view.buffer[view.start : view.start + view.size])

    def first_offset(self, queue: Queue) -> int:
        return self.first if queue.queue_id == 0 else queue.first_offset

    async def read(
        self,
        queue: Queue,
        offset: int,
        max_messages: int,
        budget_bytes: int,
        codes: frozenset[int] | None,
        predicate: Predicate | None,
    ) -> ReadResult:
        stop = min(offset + max_messages, queue.first_offset)
        result = ReadResult(ReadStatus.FOUND, stop, self.first, self.store.readers.end_offset(queue))
        wanted = [self.records[at] for at in range(offset, stop)]
        result.pieces = [data for data in wanted if predicate is None or predicate(RecordView(data))]
        result.count, result.size = len(result.pieces), sum(map(len, result.pieces))
        return result


async def with_removed(open_store: OpenStore) -> tuple[Store, Queue, Kept]:
    store = await open_store(small_config())
    for number in range(40):
        store.writer.append(message(b"%02d" % number * 100), number % 40 // 39)  # the last one into another queue
        store.committer.commit()
    store.flusher.flush_now()
    await store.upkeep.checkpointer.checkpoint()
    queue = store.queue("T", 0)
    kept = Kept(store, queue)
    store.segments.remove_first()
    store.upkeep.retention._update_after_removal()
    assert queue.first_offset > 2
    return store, queue, kept


async def test_what_is_before_the_first_offset_is_read_from_the_cold_reader(open_store: OpenStore) -> None:
    store, queue, kept = await with_removed(open_store)
    first = queue.first_offset
    before = await store.readers.read_far(queue, 1, 2, 1 << 20)
    assert (before.status, before.next_offset) == (ReadStatus.TOO_SMALL, first)
    store.readers.cold = kept
    assert store.readers.first_offset(queue) == 0
    found: list[bytes] = []
    offset = 0
    while offset < store.readers.end_offset(queue):
        result = await store.readers.read_far(queue, offset, 7, 1 << 20)
        assert result.next_offset > offset
        found += bodies(result.pieces)
        offset = result.next_offset
    assert found == [b"%02d" % number * 100 for number in range(39)]
    odd = await store.readers.read_far(queue, 0, 2, 1 << 20, predicate=lambda record: record.queue_offset % 2 == 1)
    assert bodies(odd.pieces) == [b"01" * 100]


async def test_an_offset_that_the_cold_reader_lacks_is_too_old(open_store: OpenStore) -> None:
    store, queue, kept = await with_removed(open_store)
    store.readers.cold = kept
    kept.first = 2
    result = await store.readers.read_far(queue, 1, 2, 1 << 20)
    assert (result.status, result.next_offset) == (ReadStatus.TOO_SMALL, queue.first_offset)
    assert store.readers.read_near(queue, 1, 2, 1 << 20) is not None
    assert store.readers.read_near(queue, 2, 2, 1 << 20) is None  # `read_far` has it
    other = store.queue("T", 1)
    assert store.readers.first_offset(other) == other.first_offset


async def test_a_consumer_comes_to_cold_records_through_its_queue_reader(open_store: OpenStore) -> None:
    store, queue, kept = await with_removed(open_store)
    store.readers.cold = kept
    started: list[Callable[[], Awaitable[None]]] = []
    told: list[object] = []
    reader = QueueReader(store.readers, told.append)
    assert reader.read(started.append, "place", queue, 0, 2, 1 << 20) is None
    await started.pop()()
    assert told == ["place"]
    result = reader.read(started.append, "place", queue, 0, 2, 1 << 20)
    assert result is not None
    assert bodies(result.pieces) == [b"00" * 100, b"01" * 100]
