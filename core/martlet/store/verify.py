"""Compares the log with its indexes in a store that is open: whether every intact record can be served.

`Served` looks each record up where a consumer would, in its queue, and `Keyed` where a query would, in the key index.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple, final

from martlet.message import Record, find_property
from martlet.store.checkpoint import read_checkpoint
from martlet.store.files import Disk, Files
from martlet.store.key_index import HEADER, ITEM, ITEM_BYTES, SLOT_BYTES, IndexFile, KeyIndex
from martlet.store.layout import ENTRY_BYTES, POSITION_SIZE, PREPARED, ROLLBACK, TRANSACTION_MASK
from martlet.store.light import places
from martlet.store.log import Store
from martlet.store.queue_journal import Journal
from martlet.store.queues import Queue
from martlet.store.scan import STORE_MS_END

__all__ = ["Keyed", "Served", "gone_since_checkpoint", "offsets_at_checkpoint"]

# Entries of a queue that are read at once, and for how many queues they are kept.
ENTRIES_READ: Final = 512
QUEUES_KEPT: Final = 1000
ITEMS_READ: Final = 65536


def offsets_at_checkpoint(directory: str, disk: Disk) -> dict[tuple[str, int], int]:
    """The first offset of each queue at the newest checkpoint, as far as that can be read."""
    files = Files(disk, 4, read_only=True)
    try:
        checkpoint = read_checkpoint(files, f"{directory}/checkpoint")
        states = Journal(files, directory).load(checkpoint) if checkpoint is not None else None
    finally:
        files.close()
    return {
        (topic, queue_id): state.first_offset
        for topic, of_topic in (states or {}).items()
        for queue_id, state in of_topic.items()
    }


def gone_since_checkpoint(store: Store, before: dict[tuple[str, int], int]) -> Iterator[str]:
    """A sentence if queues of *store* begin later than `offsets_at_checkpoint` said *before* the start."""
    gone = {
        queue: queue.first_offset - before[queue.topic, queue.queue_id]
        for queue in store.queues.all()
        if queue.first_offset > before.get((queue.topic, queue.queue_id), queue.first_offset)
    }
    if gone:
        yield (
            f"the log begins at position {store.first_position:,}, later than at the newest checkpoint; "
            f"{_many(sum(gone.values()), 'message')} of {_many(len(gone), 'queue')} went with its first segments"
        )


@final
class Served:
    """Which records of the log a consumer of *store* would not be given."""

    __slots__ = ("_entries", "_matched", "_missed", "_store")

    def __init__(self, store: Store) -> None:
        self._store = store
        self._matched: dict[Queue, int] = {}
        # Positions of intact records that their queue does not name.
        self._missed: dict[tuple[str, int], list[int]] = {}
        self._entries: OrderedDict[Queue, tuple[int, bytes]] = OrderedDict()

    def take(self, record: Record) -> None:
        """The next intact record of the log."""
        if record.sys_flag & TRANSACTION_MASK in (PREPARED, ROLLBACK):
            return
        for topic, queue_id, offset in places(record):
            queue = self._store.find_queue(topic, queue_id)
            if queue is not None and self._entry(queue, offset) == (record.position, record.size):
                self._matched[queue] = self._matched.get(queue, 0) + 1
            else:
                self._missed.setdefault((topic, queue_id), []).append(record.position)

    def _entry(self, queue: Queue, offset: int) -> tuple[int, int]:
        """Log position and size that *queue* says of message *offset*; zeros where it has none."""
        if not queue.first_offset <= offset < queue.next_offset:
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
        """*topic* was deleted here: its records so far are not to be served."""
        for key in [key for key in self._missed if key[0] == topic]:
            del self._missed[key]

    def findings(self) -> Iterator[str]:
        """A sentence for each queue with a problem, once the whole log was taken."""
        for (topic, queue_id), positions in sorted(self._missed.items()):
            yield (
                f"queue {topic}/{queue_id}: {_many(len(positions), 'record')} of the log "
                f"(the first at position {positions[0]}) cannot be read through it; a start leaves this as it is"
            )
        for queue in sorted(self._store.queues.all(), key=lambda queue: (queue.topic, queue.queue_id)):
            lost = queue.next_offset - queue.first_offset - self._matched.get(queue, 0)
            if lost:
                yield (
                    f"queue {queue.topic}/{queue.queue_id}: {_many(lost, 'message')} between offset "
                    f"{queue.first_offset} and {queue.next_offset} "
                    "have no record in the log; they are lost, and consumers skip them"
                )


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


class _Entry(NamedTuple):
    """What an entry of the key index says."""

    position: int
    key: int  # its hash
    item: IndexFile
    seconds: int

    def says_time_of(self, record: Record) -> bool:
        return record.store_ms >= STORE_MS_END or self.seconds == self.item.seconds_at(record.store_ms)


@final
class Keyed:
    """Which records of the log a query by key would not find in *keys*.

    Entries are in log order, so one pass over both compares them. After a crash some may be there twice.
    """

    __slots__ = ("_at", "_items", "_keys", "_missed", "_topics")

    def __init__(self, keys: KeyIndex) -> None:
        self._keys = keys
        self._items = self._reachable()
        self._at = next(self._items, None)
        # Records whose keys are not found, by topic.
        self._missed: dict[str, int] = {}
        # A queue of each topic, which knows the hash of its name.
        self._topics: dict[str, Queue] = {}

    def take(self, record: Record) -> None:
        """The next intact record of the log."""
        if record.sys_flag & TRANSACTION_MASK == ROLLBACK or record.position >= self._keys.position:
            return
        queue = self._topics.get(record.topic)
        if queue is None:
            queue = self._topics[record.topic] = Queue(record.topic, 0)
        expected = {self._keys._hash(queue, key) for key in _keys_of(record.properties)}
        found: set[int] = set()
        while self._at is not None and self._at.position <= record.position:
            if self._at.position == record.position and self._at.says_time_of(record):
                found.add(self._at.key)
            self._at = next(self._items, None)
        if expected != found:
            self._missed[record.topic] = self._missed.get(record.topic, 0) + 1

    def forget_topic(self, topic: str) -> None:
        """*topic* was deleted here: the index need not have its records so far."""
        self._missed.pop(topic, None)

    def findings(self) -> Iterator[str]:
        """A sentence for each topic with a problem, once the whole log was taken."""
        for topic, count in sorted(self._missed.items()):
            yield (
                f"index of keys: {_many(count, 'record')} of topic {topic!r} cannot be found by key; the broker "
                "rebuilds the index when a query meets the damage, or at a start without the directory index"
            )

    def _reachable(self) -> Iterator[_Entry]:
        """Every entry that a query can reach, in log order; one out of order is damaged."""
        last: _Entry | None = None
        for item in self._keys.items:
            reach = self._reach(item)
            for number, (key, position, seconds, _) in self._entries(item, range(1, item.count)):
                if not reach[number]:
                    continue
                if last is not None and last.position <= position:
                    yield last
                last = _Entry(position, key, item, seconds)
        if last is not None:
            yield last

    def _reach(self, item: IndexFile) -> bytearray:
        """Which entries of *item* its slots lead to."""
        keys = self._keys
        reach = bytearray(item.count)
        slots = array("i", keys.files.read(item.path, keys.slots * SLOT_BYTES, HEADER.size))
        slots.byteswap()
        for number in slots:
            if 0 < number < item.count:
                reach[number] = 1
        for number, (_, _, _, before) in self._entries(item, range(item.count - 1, 0, -1)):
            if reach[number] and 0 < before < number:
                reach[before] = 1
        return reach

    def _entries(self, item: IndexFile, numbers: range) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
        keys = self._keys
        for at in range(0, len(numbers), ITEMS_READ):
            part = numbers[at : at + ITEMS_READ]
            low, high = min(part[0], part[-1]), max(part[0], part[-1])
            data = keys.files.read(item.path, (high - low + 1) * ITEM_BYTES, keys._item_at(low))
            for number in part:
                yield number, ITEM.unpack_from(data, (number - low) * ITEM_BYTES)


def _keys_of(properties: bytes) -> Iterator[bytes]:
    unique = find_property(properties, b"UNIQ_KEY")
    if unique:
        yield unique
    yield from (key for key in find_property(properties, b"KEYS").split(b" ") if key)
