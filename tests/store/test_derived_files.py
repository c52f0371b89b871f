"""Whatever happens to files that can be rebuilt, after whatever kind of stop, the log's records stay as they were.

The product of (file or directory) x (damage) x (stop), then combinations of several damages at once.
``MARTLET_COMBINATIONS`` sets how many of these; the default is a sample.
"""

import logging
import os
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random

import pytest
from tests.stored import records_in

from martlet.errors import NotReady
from martlet.message import Record
from martlet.records.codec import decode_records
from martlet.runtime.steps import finish_now
from martlet.store import Store
from martlet.store.format.light import is_light
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import HOST, ManualClock, message, small_config

COMBINATIONS = int(os.environ.get("MARTLET_COMBINATIONS", "30"))
ROOT = "/data/store"
CONFIG = small_config(segment_bytes=8192, disk_clean_ratio=0.9, index_entries=1024)

TARGETS = {
    "all queues": "consumequeue/",
    "a topic": "consumequeue/A/",
    "a queue": "consumequeue/A/0/",
    "the first file of a queue": "consumequeue/A/0/00000000000000000000",
    "the last file of a queue": "consumequeue/A/0/00000000000000000960",
    "a topic that was made again": "consumequeue/R/",
    "an empty queue": "consumequeue/E/",
    "a light queue": "consumequeue/%LMQ%odd/",
    "the last file of a light queue": "consumequeue/%LMQ%odd/0/00000000000000000960",
    "all light queues": "consumequeue/%LMQ%",
    "index": "index/",
    "checkpoint": "checkpoint",
    "journal": "queues.",
    "abort": "abort",
}
DAMAGES = ("removed", "emptied", "zeroed", "truncated", "stale", "flipped")
STOPS = ("orderly", "killed before a checkpoint", "killed after a checkpoint", "killed twice", "power cut")

Place = tuple[str, int, int]
Bounds = dict[tuple[str, int], tuple[int, int]]
Content = tuple[frozenset[tuple[str, bytes]], frozenset[str]]


async def open_on(disk: FakeDisk) -> Store:
    store = await Store.open(Path(ROOT), CONFIG, ManualClock(), disk)
    store.writer.store_host = HOST
    store.writer.light_queues = True
    return store


def copy_of(disk: FakeDisk) -> FakeDisk:
    return disk.after_power_cut(Cut.KILLED, Random(0))


def content_of(disk: FakeDisk) -> Content:
    """Return the files and directories that a new process finds."""
    return frozenset((path, bytes(file.data)) for path, file in disk.files.items()), frozenset(disk.directories)


def light_topics_of(number: int) -> list[str]:
    """The light topics that index the message with this offset."""
    if not number % 2:
        return []
    return ["%LMQ%odd"] if number % 5 else ["%LMQ%odd", "%LMQ%five"]


def send(store: Store, topic: str, count: int, queue_id: int = 0, *, label: str = "") -> None:
    first = store.queue(topic, queue_id).next_offset
    for number in range(first, first + count):
        name = f"{topic}{label}-{queue_id}-{number}"
        made = message(name, topic, f"tag{number % 3}", f"key{number % 5}", name)
        if number % 2:
            made.properties += f"INNER_MULTI_DISPATCH\x01{','.join(light_topics_of(number))}\x02".encode()
        store.writer.append(made, queue_id)
    store.committer.commit()
    store.flusher.flush_now()


@dataclass
class Seen:
    """What a client can see of a store."""

    records: dict[Place, bytes] = field(default_factory=dict)
    bounds: Bounds = field(default_factory=dict)


def look_at(store: Store) -> Seen:
    seen = Seen()
    for queue in store.queues.all():
        if not queue.next_offset:
            continue
        for record in records_in(store, queue, 7):
            seen.records[queue.topic, queue.queue_id, record.queue_offset] = record.body
        seen.bounds[queue.topic, queue.queue_id] = (queue.first_offset, queue.next_offset)
    return seen


def by_key(store: Store, record: Record) -> list[Record]:
    found = finish_now(
        store.lookup.query_keys(record.topic, record.property("UNIQ_KEY").encode(), 64, 0, 2**62)
    ).records
    return [each for data in found for each in decode_records(data)]


class History:
    """A store with all that can happen to queues, stopped in each way, and an older copy of its disk."""

    def __init__(self) -> None:
        self.older = FakeDisk()
        self.stopped: dict[str, FakeDisk] = {}
        self.seen: dict[str, Seen] = {}

    async def make(self) -> "History":
        disk = FakeDisk()
        store = await open_on(disk)
        send(store, "E", 3)
        send(store, "D", 20)
        send(store, "R", 30, label="old")
        send(store, "A", 18)
        await store.close()
        self.older = copy_of(disk)
        store = await open_on(disk)
        await self._live_on(store, disk)
        send(store, "A", 5)
        send(store, "R", 1)
        await store.close()
        await self._keep("orderly", disk)
        return self

    async def _live_on(self, store: Store, disk: FakeDisk) -> None:
        for _ in range(3):
            send(store, "A", 20)
            send(store, "B", 12)
        await store.upkeep.checkpointer.checkpoint()
        disk.used_ratio = 0.95
        store.upkeep.retention.look()
        disk.used_ratio = 0.1
        assert store.first_position > 0
        for queue_id in (0, 1, 0, 1):
            send(store, "A", 20, queue_id)
            send(store, "B", 12)
        store.deletions.delete_topic("D")
        store.deletions.delete_topic("R")
        send(store, "R", 9)
        await store.upkeep.checkpointer.checkpoint()
        await self._keep("killed after a checkpoint", disk)
        self.stopped["power cut"] = disk.after_power_cut(Cut.TORN, Random(1))
        self.seen["power cut"] = self.seen["killed after a checkpoint"]
        send(store, "A", 11)
        store.deletions.delete_topic("B")
        send(store, "C", 4)
        store.flusher.flush_now()
        await self._keep("killed before a checkpoint", disk)
        again = copy_of(disk)
        second = await open_on(again)
        send(second, "A", 2, 1)
        second.crash()
        await self._keep("killed twice", again)

    async def _keep(self, stop: str, disk: FakeDisk) -> None:
        self.stopped[stop] = copy_of(disk)
        store = await open_on(copy_of(disk))
        self.seen[stop] = look_at(store)
        store.crash()


@pytest.fixture(scope="module")
def history() -> History:
    """Built once per module; each test works on a copy."""
    import trio

    made = History()
    trio.run(made.make)
    return made


def set_content(disk: FakeDisk, path: str, data: bytes) -> None:
    file = disk.files[path]
    file.data[:] = data
    file.stable[:] = data
    file.changes.clear()


def spoil(disk: FakeDisk, older: FakeDisk, prefix: str, damage: str, random: Random) -> None:
    """Do *damage* to every file of *disk* under *prefix*."""
    full = f"{ROOT}/{prefix}"
    paths = sorted(path for path in disk.files if path.startswith(full))
    if damage == "stale":
        put_back(disk, older, full)
    elif damage == "removed":
        for path in paths:
            disk.unlink(path)
        for path in sorted((p for p in disk.directories if f"{p}/".startswith(full)), reverse=True):
            disk.remove_directory(path)
    for path in paths if damage not in ("stale", "removed") else ():
        data = bytearray(disk.files[path].data)
        if damage == "flipped" and data:
            used = len(data.rstrip(b"\x00")) or 1
            data[random.randrange(used)] ^= 1 << random.randrange(8)
        elif damage == "zeroed":
            data = bytearray(len(data))
        elif damage == "truncated":
            del data[random.randrange(len(data) + 1) :]
        elif damage == "emptied":
            data.clear()
        set_content(disk, path, bytes(data))


def put_back(disk: FakeDisk, older: FakeDisk, full: str) -> None:
    for path in [path for path in disk.files if path.startswith(full)]:
        disk.unlink(path)
    for path, file in older.files.items():
        if path.startswith(full):
            disk.make_directory(os.path.dirname(path))
            disk.close(disk.open(path, create=True))
            set_content(disk, path, bytes(file.data))


def check_keys(store: Store, seen: Seen, *, complete: bool) -> None:
    for (topic, queue_id, offset), body in seen.records.items():
        position = store.queues.position_at(store.queue(topic, queue_id), offset)
        data = store.lookup.record_at(position)
        assert data is not None
        (record,) = decode_records(data)
        if is_light(topic):
            continue  # keys belong to the record's own topic, which may be deleted
        try:
            found = by_key(store, record)
        except NotReady:
            assert not complete
            return
        assert all(each.topic == topic for each in found)
        assert [each.position for each in found if each.body == body] in ([position], [])
        assert not complete or body in [each.body for each in found]


async def check(disk: FakeDisk, seen: Seen, *, flipped_index: bool = False) -> None:
    """Open *disk*: everything is as it was, and stays so through an orderly stop."""
    store = await open_on(disk)
    assert store.readers.damaged_records == 0
    found = look_at(store)
    assert found.records == seen.records
    assert found.bounds == seen.bounds
    assert set(store.topics_on_disk()) <= {topic for topic, _ in seen.bounds}
    check_keys(store, seen, complete=not flipped_index)
    for topic, label in (("D", ""), ("R", "old")):
        with suppress(NotReady) if flipped_index else nullcontext():
            assert (
                finish_now(store.lookup.query_keys(topic, f"{topic}{label}-0-1".encode(), 64, 0, 2**62)).records == []
            )
    send(store, "A", 1)
    await store.close()
    store = await open_on(disk)
    new = seen.bounds["A", 0][1]
    added = {("A", 0, new)} | {(topic, 0, seen.bounds[topic, 0][1]) for topic in light_topics_of(new)}
    assert look_at(store).records.keys() == seen.records.keys() | added
    assert store.statistics().recovered_records == 0
    # E holds no record: its files may be there or not.
    assert {*disk.names(f"{ROOT}/consumequeue"), "E"} == {topic for topic, _ in found.bounds}
    store.crash()


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("target", TARGETS)
async def test_damage_to_a_derived_file_changes_nothing(history: History, target: str, damage: str, stop: str) -> None:
    disk = copy_of(history.stopped[stop])
    spoil(disk, history.older, TARGETS[target], damage, Random(f"{target}{damage}{stop}"))
    await check(disk, history.seen[stop], flipped_index=(target, damage) == ("index", "flipped"))


@pytest.mark.parametrize("stop", STOPS)
async def test_damage_to_several_derived_files_changes_nothing(history: History, stop: str) -> None:
    every = list(product(TARGETS, DAMAGES))
    for seed in range(COMBINATIONS):
        random = Random(f"{stop}{seed}")
        chosen = random.sample(every, random.randrange(2, 5))
        disk = copy_of(history.stopped[stop])
        for target, damage in chosen:
            spoil(disk, history.older, TARGETS[target], damage, random)
        try:
            await check(disk, history.seen[stop], flipped_index=("index", "flipped") in chosen)
        except BaseException as error:
            error.add_note(f"{stop}, seed {seed}: {chosen}")
            raise


@pytest.mark.parametrize("length", [0, 8, 39, 40, 41, 100, 128, 129, 200, 4095])
@pytest.mark.parametrize("stop", STOPS)
async def test_a_cut_checkpoint_without_a_journal_is_not_rocketmqs(history: History, stop: str, length: int) -> None:
    for target in ("all queues", "a queue", "the last file of a queue", "abort"):
        disk = copy_of(history.stopped[stop])
        spoil(disk, history.older, "queues.", "removed", Random(0))
        spoil(disk, history.older, TARGETS[target], "removed", Random(0))
        path = f"{ROOT}/checkpoint"
        set_content(disk, path, bytes(disk.files[path].data[:length]))
        await check(disk, history.seen[stop])


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("target", ["all queues", "a queue", "journal", "checkpoint"])
async def test_a_start_that_dies_while_it_rebuilds_is_made_up_for(history: History, target: str, stop: str) -> None:
    disk = copy_of(history.stopped[stop])
    spoil(disk, history.older, TARGETS[target], "removed", Random(0))
    left = await interrupted(disk)
    assert len(left) > len(ENDS)
    for found in {content_of(each): each for each in left}.values():  # a third are as another one
        await check(found, history.seen[stop])


ENDS = (Cut.KILLED, Cut.LOST, Cut.TORN)


async def interrupted(disk: FakeDisk) -> list[FakeDisk]:
    """Return what is left of starts that die at each ninth of their changes, in each of the ways `ENDS`."""
    left = list[FakeDisk]()
    changes = 0

    def keep(name: str) -> None:
        nonlocal changes
        if changes % 9 == 0:
            left.extend(disk.after_power_cut(cut, Random(changes)) for cut in ENDS)
        changes += 1

    disk.on_change = keep
    store = await open_on(disk)
    disk.on_change = None
    store.crash()
    return left


@pytest.mark.parametrize("target", ["all queues", "a queue", "journal", "checkpoint", "index"])
@pytest.mark.parametrize("stop", STOPS)
async def test_a_rebuild_is_logged(history: History, target: str, stop: str, caplog: pytest.LogCaptureFixture) -> None:
    disk = copy_of(history.stopped[stop])
    spoil(disk, history.older, TARGETS[target], "removed", Random(0))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        (await open_on(disk)).crash()
    assert "rebuilding" in caplog.text
    assert "from the log" in caplog.text
