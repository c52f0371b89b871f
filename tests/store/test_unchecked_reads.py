"""Reads of many records that need no check return the same as reads of one record at a time."""

import random

import pytest

from martlet.records.layout import BLANK_ENTRY, ENTRY, ENTRY_BYTES
from martlet.store import Queue, Store
from martlet.store.read.reading import BLOCK_ENTRIES, Care
from martlet.testing.stores import message, small_config

from .conftest import OpenStore

COUNT = 700
QUEUES = 3
SIZES = (10, 10, 10, 90, 700, 2500)  # of bodies; the last ones lie in two or three pages


async def filled(open_store: OpenStore, *, trusted: bool) -> tuple[Store, list[Queue], list[list[bytes]]]:
    """Return a store whose pages are all in memory, its queues, and the records of each."""
    config = small_config(flush="async", segment_bytes=1 << 16, cache_bytes=1 << 22, queue_file_entries=4096)
    store = await open_store(config)
    drawn = random.Random(7)
    for _ in range(COUNT):
        # Runs of one queue in between, which are adjacent in the log.
        for _ in range(drawn.choice((1, 1, 1, 5))):
            store.writer.append(message(drawn.randbytes(drawn.choice(SIZES))), queue_id := drawn.randrange(QUEUES))
        store.writer.append(message(b"x"), queue_id)
    store.committer.commit()
    await store.upkeep.checkpointer.checkpoint()
    if not trusted:
        store.pages.trusted_from = 1 << 62
        store.pages.drop_before(1 << 62)
    queues = [store.queue("T", number) for number in range(QUEUES)]
    ends = map(store.readers.end_offset, queues)
    records = [
        [b"".join(store.readers.read(queue, offset, 1, 1).pieces) for offset in range(end)]
        for queue, end in zip(queues, ends, strict=True)
    ]
    return store, queues, records


def expected(records: list[bytes], offset: int, count_max: int, budget_bytes: int) -> list[bytes]:
    found: list[bytes] = []
    for record in records[offset : offset + count_max]:
        budget_bytes -= len(record)
        if found and budget_bytes < 0:
            break
        found.append(record)
    return found


@pytest.mark.parametrize(("trusted", "care"), [(True, Care.LEAVE_OUT), *((False, care) for care in Care)])
async def test_any_part_of_a_queue_is_read_whole(open_store: OpenStore, trusted: bool, care: Care) -> None:
    store, queues, records = await filled(open_store, trusted=trusted)
    drawn = random.Random(8)
    for _ in range(300):
        number = drawn.randrange(QUEUES)
        offset = drawn.randrange(len(records[number]))
        limits = drawn.choice((1, 7, 8, 9, 300, 1024)), drawn.choice((1, 500, 5000, 100_000, 1 << 30))
        result = store.readers.read_near(queues[number], offset, *limits, care=care)
        assert result is not None
        found = expected(records[number], offset, *limits)
        assert b"".join(result.pieces) == b"".join(found)
        assert (result.count, result.size) == (len(found), sum(map(len, found)))
        assert result.next_offset == offset + len(found)
        assert len(result.pieces) <= len(found)


async def test_entries_of_a_damaged_file_are_read_one_by_one(open_store: OpenStore) -> None:
    store, queues, records = await filled(open_store, trusted=True)
    queue = queues[0]
    saved = store.queues.load_entries(queue, 0, BLOCK_ENTRIES)
    entries = [saved[at : at + ENTRY_BYTES] for at in range(0, len(saved), ENTRY_BYTES)]
    order = list(range(len(entries)))
    order[3], order[4] = order[4], order[3]
    _, size, code = ENTRY.unpack(entries[7])
    damaged = [entries[index] for index in order]
    wrong = [BLANK_ENTRY, ENTRY.pack(0, 0, 0), ENTRY.pack(0, -5, 0), ENTRY.pack(1 << 40, size, code)]
    damaged[20:20] = wrong
    joined = b"".join(damaged)

    def read_entries(queue: Queue, offset: int, count: int) -> bytes:
        return joined[offset * ENTRY_BYTES : (offset + count) * ENTRY_BYTES]

    found, offset = b"", 0
    while offset < len(damaged):
        result = store.readers._usual.read(
            queue, offset, len(damaged), len(damaged), 1 << 30, None, None, read_entries, store.pages.load
        )
        assert result is not None
        assert result.next_offset > offset
        found += b"".join(result.pieces)
        offset = result.next_offset
    assert found == b"".join(records[0][index] for index in order)
