"""A sample projection, and what the tests of projections share."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio
from tests.stored import records_of
from trio.testing import wait_all_tasks_blocked

from martlet.message import Message
from martlet.records.layout import RecordView
from martlet.runtime.steps import Steps
from martlet.runtime.turns import Turns
from martlet.state import NOTHING, Projections, pack_rows, unpack_rows
from martlet.store import Store, StoreConfig
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import HOST, ManualClock, message, small_config

ROOT: Final = Path("/data/store")
FORMAT: Final = 3
TOPICS: Final = frozenset(("A", "B"))

# topic -> (count, keys)
Totals = dict[str, tuple[int, set[str]]]


class Tally:
    """Counts the records of each topic and collects their keys; records with KEYS ``live`` outlive retention."""

    def __init__(self, topics: frozenset[str] = TOPICS, append: Callable[[Message], None] | None = None) -> None:
        self.name = "tally"
        self.topics = topics
        # By position: topic, key and whether the record is needed for ever, with its body then.
        self.records: dict[int, tuple[str, str, bytes]] = {}
        self.newest = -1
        self.applied = 0
        self.restored = 0
        self.rolled: list[tuple[int, int]] = []
        self.fails_at = b""
        self._append = append

    def apply(self, records: Sequence[RecordView]) -> None:
        for record in records:
            if record.position <= self.newest:
                raise AssertionError(f"{record} comes after a record at position {self.newest}")
            self.newest = record.position
            if self.fails_at and record.body == self.fails_at:
                raise ValueError("this record does not please")
            live = record.property("KEYS") == "live"
            key = record.property("UNIQ_KEY") or ""
            self.records[record.position] = (record.topic, key, bytes(record.body) if live else b"")
            self.applied += 1

    def freeze(self) -> Steps[Sequence[bytes]]:
        return pack_rows(FORMAT, self.records.copy().items())

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        self.records = {}
        for position, row in unpack_rows(FORMAT, data):
            if position >= first_position:
                self.records[position] = tuple(row)
            yield
        self.restored = len(self.records)
        self.newest = max(self.records, default=-1)

    def forget(self, topic: str) -> None:
        self.records = {position: row for position, row in self.records.items() if row[0] != topic}

    def floor(self) -> int:
        return min((position for position, row in self.records.items() if row[2]), default=NOTHING)

    def roll(self, start: int, end: int) -> Steps[None]:
        self.rolled.append((start, end))
        for position, (topic, key, body) in list(self.records.items()):
            if start <= position < end and body and self._append is not None:
                self._append(message(body, topic, keys="live", unique=key))
            yield

    def totals(self, first_position: int = 0) -> Totals:
        """What is known of each topic from the records at or behind *first_position*."""
        found: Totals = {}
        for position, (topic, key, _) in self.records.items():
            if position >= first_position:
                count, keys = found.get(topic, (0, set()))
                found[topic] = (count + 1, keys | {key})
        return found


def totals_in(store: Store, topics: Iterable[str] = TOPICS) -> Totals:
    """What a `Tally` should know: counted from everything readable in *store*."""
    found: Totals = {}
    for topic in topics:
        records = records_of(store, topic)
        if records:
            found[topic] = (len(records), {record.property("UNIQ_KEY") for record in records})
    return found


def send(store: Store, topic: str, *bodies: str, queue_id: int = 0, keys: str = "") -> None:
    """Append and commit; the unique key is the body."""
    for body in bodies:
        store.writer.append(message(body, topic, "t", keys, body), queue_id)
    store.committer.commit()


class Running:
    """A store with one `Tally`."""

    def __init__(self, store: Store, tally: Tally, projections: Projections) -> None:
        self.store = store
        self.tally = tally
        self.projections = projections

    def check(self) -> None:
        """The projection knows what it would know had it read the whole log."""
        assert self.tally.totals(self.store.first_position) == totals_in(self.store)


async def start(
    disk: FakeDisk,
    tally: Tally | None = None,
    *others: Tally,
    config: StoreConfig | None = None,
    clock: ManualClock | None = None,
    snapshot_bytes: int = 1 << 30,
    **changes: Any,
) -> Running:
    """Open the store on *disk* and replay, for *others* as well; nothing runs in the background."""
    store = await Store.open(ROOT, config or small_config(**changes), clock or ManualClock(), disk)
    store.writer.store_host = HOST
    tally = tally or Tally()
    tally._append = tally._append or (lambda one: _append(store, one))
    projections = Projections(store, Turns(), snapshot_bytes=snapshot_bytes)
    for each in (tally, *others):
        projections.add("toy", each)
    await projections.replay()
    return Running(store, tally, projections)


def _append(store: Store, one: Message) -> None:
    store.writer.append(one, 0)


async def retire(running: Running, disk: FakeDisk) -> None:
    """Do what retention does when the disk is nearly full; nothing else runs."""
    store = running.store
    for driven in running.projections._driven:
        await running.projections._catch_up(driven)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(running.projections.keeper.release, store.segments.items[-2].end)
        await wait_all_tasks_blocked()
        await store.flusher.flush()
    await store.upkeep.checkpointer.checkpoint()
    disk.used_ratio = 0.99
    store.upkeep.retention.look()
    disk.used_ratio = 0.1


async def stop(running: Running) -> None:
    """Stop in order."""
    running.projections.save()
    await running.store.close()


@asynccontextmanager
async def started(disk: FakeDisk, *tallies: Tally, **options: Any) -> AsyncIterator[Running]:
    """As `start`, with the tasks of the store and of the projections; stops in order."""
    running = await start(disk, *tallies, **options)
    async with trio.open_nursery() as nursery:
        await nursery.start(running.store.upkeep.run)
        nursery.start_soon(running.projections.run)
        yield running
        nursery.cancel_scope.cancel()
    await stop(running)
