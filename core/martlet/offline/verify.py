"""Verifies an open store: whether every intact record in the log is reachable through the indexes.

`Served` looks each record up in its queue, like a consumer, and `Keyed` in the key index, like a query.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple, final

from martlet.message import Record, find_property
from martlet.records.layout import ENTRY_BYTES, POSITION_SIZE, PREPARED, ROLLBACK, TRANSACTION_MASK
from martlet.store.disk.checkpoint import read_checkpoint
from martlet.store.disk.files import Disk, Files
from martlet.store.format.light import places
from martlet.store.keys.index_files import HEADER, ITEM, ITEM_BYTES, SLOT_BYTES, IndexFile
from martlet.store.keys.key_index import KeyIndex
from martlet.store.queues.queue_journal import QueueJournal
from martlet.store.queues.queues import Queue
from martlet.store.recovery.usual import STORE_MS_END
from martlet.store.store import Store

__all__ = ["Keyed", "Served", "gone_since_checkpoint", "offsets_at_checkpoint"]

# Entries of a queue to read at once, and the number of queues for which they are cached.
ENTRIES_READ: Final = 512
QUEUES_KEPT: Final = 1000
ITEMS_READ: Final = 65536


def offsets_at_checkpoint(directory: str, disk: Disk) -> dict[tuple[str, int], int]:
    """Return the first offset of each queue at the newest checkpoint, as far as it is readable."""
    files = Files(disk, 4, read_only=True)
    try:
        checkpoint = read_checkpoint(files, f"{directory}/checkpoint")
        states = QueueJournal(files, directory).load(checkpoint) if checkpoint is not None else None
    finally:
        files.close()
    return {
        (topic, queue_id): state.first_offset
        for topic, of_topic in (states or {}).items()
        for queue_id, state in of_topic.items()
    }


def gone_since_checkpoint(store: Store, before: dict[tuple[str, int], int]) -> Iterator[str]:
    """Return a sentence if queues of *store* begin later than in *before*, a result of `offsets_at_checkpoint`."""
    gone = {
        queue: queue.stored_from - before[queue.topic, queue.queue_id]
        for queue in store.queues.all()
        if queue.stored_from > before.get((queue.topic, queue.queue_id), queue.stored_from)
    }
    if gone:
        yield (
            f"the log begins at position {store.first_position:,}, later than at the newest checkpoint; "
            f"{_plural(sum(gone.values()), 'message')} of {_plural(len(gone), 'queue')} were in the removed segments"
        )


@final
class Served:
    """Finds records in the log that a consumer of *store* would not get."""

    __slots__ = ("_entries", "_matched", "_missed", "_store")

    def __init__(self, store: Store) -> None:
        self._store = store
        self._matched: dict[Queue, int] = {}
        # Positions of intact records that are missing in their queue.
        self._missed: dict[tuple[str, int], list[int]] = {}
        self._entries: OrderedDict[Queue, tuple[int, bytes]] = OrderedDict()

    def take(self, record: Record) -> None:
        """Handle the next intact record of the log."""
        if record.sys_flag & TRANSACTION_MASK in (PREPARED, ROLLBACK):
            return
        for topic, queue_id, offset in places(record):
            queue = self._store.queues.find(topic, queue_id)
            if queue is not None and self._entry(queue, offset) == (record.position, record.size):
                self._matched[queue] = self._matched.get(queue, 0) + 1
            else:
                self._missed.setdefault((topic, queue_id), []).append(record.position)

    def _entry(self, queue: Queue, offset: int) -> tuple[int, int]:
        """Return log position and size in *queue*'s entry for message *offset*; zeros if there is none."""
        if not queue.stored_from <= offset < queue.next_offset:
            return 0, 0
        base, data = self._entries.get(queue, (0, b""))
        if not base <= offset < base + len(data) // ENTRY_BYTES:
            base, data = offset, self._store.queues.entries(queue, offset, ENTRIES_READ)
            self._entries[queue] = base, data
            self._entries.move_to_end(queue)
            if len(self._entries) > QUEUES_KEPT:
                self._entries.popitem(last=False)
        if not data:
            return 0, 0
        position, size = POSITION_SIZE.unpack_from(data, (offset - base) * ENTRY_BYTES)
        return position, size

    def forget_topic(self, topic: str) -> None:
        """Note that *topic* was deleted here: its earlier records must not be served."""
        for key in [key for key in self._missed if key[0] == topic]:
            del self._missed[key]

    def findings(self) -> Iterator[str]:
        """Return a sentence for each queue with a problem, after the whole log."""
        for (topic, queue_id), positions in sorted(self._missed.items()):
            yield (
                f"queue {topic}/{queue_id}: {_plural(len(positions), 'record')} of the log "
                f"(the first at position {positions[0]}) cannot be read through it; a start does not repair this"
            )
        for queue in sorted(self._store.queues.all(), key=lambda queue: (queue.topic, queue.queue_id)):
            lost_count = queue.next_offset - queue.stored_from - self._matched.get(queue, 0)
            if lost_count:
                yield (
                    f"queue {queue.topic}/{queue.queue_id}: {_plural(lost_count, 'message')} between offset "
                    f"{queue.stored_from} and {queue.next_offset} "
                    "have no record in the log; they are lost, and consumers skip them"
                )


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


class _Entry(NamedTuple):
    """The content of an entry of the key index."""

    position: int
    key: int  # the hash of the key
    item: IndexFile
    seconds: int

    def says_time_of(self, record: Record) -> bool:
        return record.store_ms >= STORE_MS_END or self.seconds == self.item.seconds_at(record.store_ms)


@final
class Keyed:
    """Finds records in the log that a query by key would not find in *keys*.

    Entries are in log order, so one pass over both compares them. After a crash there may be duplicates.
    """

    __slots__ = ("_at", "_items", "_keys", "_missed", "_topics")

    def __init__(self, keys: KeyIndex) -> None:
        self._keys = keys
        self._items = self._reachable_entries()
        self._at = next(self._items, None)
        # The number of records with missing keys, by topic.
        self._missed: dict[str, int] = {}
        # One queue per topic, which has the hash of its name.
        self._topics: dict[str, Queue] = {}

    def take(self, record: Record) -> None:
        """Handle the next intact record of the log."""
        if record.sys_flag & TRANSACTION_MASK == ROLLBACK or record.position >= self._keys.position:
            return
        queue = self._topics.get(record.topic)
        if queue is None:
            queue = self._topics[record.topic] = Queue(record.topic, 0)
        expected = {self._keys.hashes.of(queue, key) for key in _keys_of(record.properties)}
        indexed: set[int] = set()
        while self._at is not None and self._at.position <= record.position:
            if self._at.position == record.position and self._at.says_time_of(record):
                indexed.add(self._at.key)
            self._at = next(self._items, None)
        if expected != indexed:
            self._missed[record.topic] = self._missed.get(record.topic, 0) + 1

    def forget_topic(self, topic: str) -> None:
        """Note that *topic* was deleted here: its earlier records need not be in the index."""
        self._missed.pop(topic, None)

    def findings(self) -> Iterator[str]:
        """Return a sentence for each topic with a problem, after the whole log."""
        for topic, count in sorted(self._missed.items()):
            yield (
                f"index of keys: {_plural(count, 'record')} of topic {topic!r} cannot be found by key; the broker "
                "rebuilds the index when a query meets the damage, or at a start after you delete the directory index"
            )

    def _reachable_entries(self) -> Iterator[_Entry]:
        """Yield every entry that a query can reach, in log order; an entry out of order is damaged."""
        previous: _Entry | None = None
        for item in self._keys.files.items:
            reach = self._find_reachable(item)
            for number, (key, position, seconds, _) in self._entries(item, range(1, item.count)):
                if not reach[number]:
                    continue
                if previous is not None and previous.position <= position:
                    yield previous
                previous = _Entry(position, key, item, seconds)
        if previous is not None:
            yield previous

    def _find_reachable(self, item: IndexFile) -> bytearray:
        """Return which entries of *item* its slots lead to."""
        files = self._keys.files
        reach = bytearray(item.count)
        slots = array("i", files.files.read(item.path, files.slots * SLOT_BYTES, HEADER.size))
        slots.byteswap()
        for number in slots:
            if 0 < number < item.count:
                reach[number] = 1
        for number, (_, _, _, previous) in self._entries(item, range(item.count - 1, 0, -1)):
            if reach[number] and 0 < previous < number:
                reach[previous] = 1
        return reach

    def _entries(self, item: IndexFile, numbers: range) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
        files = self._keys.files
        for at in range(0, len(numbers), ITEMS_READ):
            batch = numbers[at : at + ITEMS_READ]
            low, high = min(batch[0], batch[-1]), max(batch[0], batch[-1])
            data = files.files.read(item.path, (high - low + 1) * ITEM_BYTES, files.entry_at(low))
            for number in batch:
                yield number, ITEM.unpack_from(data, (number - low) * ITEM_BYTES)


def _keys_of(properties: bytes) -> Iterator[bytes]:
    unique = find_property(properties, b"UNIQ_KEY")
    if unique:
        yield unique
    yield from (key for key in find_property(properties, b"KEYS").split(b" ") if key)
