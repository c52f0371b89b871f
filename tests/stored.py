"""All that can be read from a store, for tests that compare it with what was sent."""

from collections.abc import Iterator

from martlet.message import Record
from martlet.records.codec import decode_records
from martlet.store import Queue, Store


def records_in(store: Store, queue: Queue, count: int = 100) -> Iterator[Record]:
    """Yield the readable records of *queue*, read by *count*; each read moves on."""
    offset = queue.first_offset
    while offset < store.readers.end_offset(queue):
        result = store.readers.read(queue, offset, count, 1 << 20)
        assert result.next_offset > offset, f"read of {queue} at {offset} did not move on: {result}"
        yield from decode_records(b"".join(result.pieces))
        offset = result.next_offset


def records_of(store: Store, topic: str) -> list[Record]:
    """Return the readable records of *topic*, queue by queue."""
    queues = store.queues.topics.get(topic, {})
    return [record for _, queue in sorted(queues.items()) for record in records_in(store, queue)]
