"""Stores that only RocketMQ has written: whatever is wrong with their consume queues, every record is read."""

import logging
from pathlib import Path
from random import Random

import pytest
import trio

from martlet.records.layout import ENTRY_BYTES, RecordView
from martlet.runtime.steps import finish_now
from martlet.store import Store
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import HOST, ManualClock, message, small_config

from .test_derived_files import Seen, check_keys, copy_of, look_at, set_content

CONFIG = small_config(segment_bytes=4096, disk_clean_ratio=0.9, index_entries=1024)
OURS_AT = 40  # behind RocketMQ's five times
FILE_BYTES = CONFIG.queue_file_entries * ENTRY_BYTES

TARGETS = {
    "all queues": "consumequeue/",
    "a topic": "consumequeue/A/",
    "a topic of one message": "consumequeue/One/",
    "a queue": "consumequeue/A/1/",
    "the first file of a queue": "consumequeue/A/0/",
    "a file in the middle": "consumequeue/A/0/",
    "the last file of a queue": "consumequeue/A/0/",
    "index": "index/",
}
ONE_FILE = {"the first file of a queue": 0, "a file in the middle": 2, "the last file of a queue": -1}
DAMAGES = ("removed", "emptied", "zeroed", "truncated", "flipped", "exchanged")
STOPS = ("orderly", "killed", "orderly after retention", "killed after retention")


async def open_on(disk: FakeDisk) -> Store:
    store = await Store.open(Path("/data"), CONFIG, ManualClock(), disk)
    store.writer.store_host = HOST
    return store


def forget_martlet(disk: FakeDisk, *, killed: bool) -> None:
    """Leave in *disk* what RocketMQ would have written."""
    for path in [path for path in disk.files if path.startswith("/data/queues.")]:
        disk.unlink(path)
    page = disk.files["/data/checkpoint"].data
    set_content(disk, "/data/checkpoint", bytes(page[:OURS_AT]) + bytes(len(page) - OURS_AT))
    if killed and "/data/abort" not in disk.files:
        disk.close(disk.open("/data/abort", create=True))


class History:
    """A store in each state in which RocketMQ can leave it, and its messages."""

    def __init__(self) -> None:
        self.stopped: dict[str, FakeDisk] = {}
        self.seen: dict[str, Seen] = {}

    async def make(self) -> "History":
        for stop in STOPS:
            disk = await self._live(retention="retention" in stop)
            forget_martlet(disk, killed="killed" in stop)
            self.stopped[stop] = disk
        return self

    async def _live(self, *, retention: bool) -> FakeDisk:
        disk, clock = FakeDisk(), ManualClock()
        store = await Store.open(Path("/data"), CONFIG, clock, disk)
        store.writer.store_host = HOST
        for number in range(100):
            clock.ms += 1000
            places = [("A", 0), *[("A", 1)] * (number % 3 == 0), *[("B", 0)] * (number % 7 == 0)]
            if number in (37, 99):
                places.append(("One", 0))
            for topic, queue_id in places:
                name = f"{topic}-{queue_id}-{number}"
                store.writer.append(message(name, topic, f"tag{number % 3}", f"key{number % 5}", name), queue_id)
            store.committer.commit()
        store.flusher.flush_now()
        if retention:
            await store.upkeep.checkpointer.checkpoint()
            store.segments.remove_first()
            store.segments.remove_first()
            for queue in store.queues.all():
                assert store.queues.advance_first(queue, store.segments.start)
        await self._keep(store, retention=retention)
        await store.close()
        return disk

    async def _keep(self, store: Store, *, retention: bool) -> None:
        for stop in STOPS:
            if ("retention" in stop) == retention:
                self.seen[stop] = look_at(store)


@pytest.fixture(scope="module")
def history() -> History:
    made = History()
    trio.run(made.make)
    return made


def flip(data: bytearray, random: Random) -> None:
    """Flip a bit of an entry's position or size; nothing guards the code of its tags."""
    used = [at for at in range(0, len(data), ENTRY_BYTES) if any(data[at : at + ENTRY_BYTES])]
    if used:
        data[random.choice(used) + random.randrange(12)] ^= 1 << random.randrange(8)


def exchange(data: bytearray, random: Random) -> None:
    """Swap two entries."""
    used = [at for at in range(0, len(data), ENTRY_BYTES) if any(data[at : at + ENTRY_BYTES])]
    if len(used) > 1:
        a, b = random.sample(used, 2)
        size = ENTRY_BYTES
        data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


CHANGES = {"flipped": flip, "exchanged": exchange}


def spoil(disk: FakeDisk, target: str, damage: str, random: Random) -> None:
    full = f"/data/{TARGETS[target]}"
    paths = sorted(path for path in disk.files if path.startswith(full))
    if target in ONE_FILE:
        paths = [paths[ONE_FILE[target]]]
    for path in paths:
        data = bytearray(disk.files[path].data)
        if damage == "removed":
            disk.unlink(path)
            continue
        if damage in CHANGES:
            CHANGES[damage](data, random)
        else:
            del data[random.randrange(len(data) + 1) if damage == "truncated" else 0 :]
            data += bytes(len(disk.files[path].data) if damage == "zeroed" else 0)
        set_content(disk, path, bytes(data))
    if damage == "removed" and target not in ONE_FILE:
        for path in sorted((p for p in disk.directories if f"{p}/".startswith(full)), reverse=True):
            disk.remove_directory(path)


async def check(disk: FakeDisk, seen: Seen, *, keys: bool = True) -> None:
    store = await open_on(disk)
    found = look_at(store)
    assert store.readers.damaged_records == 0
    assert found.records == seen.records
    assert found.bounds == seen.bounds
    check_keys(store, seen, complete=keys)
    await store.close()
    store = await open_on(disk)
    assert look_at(store) == seen
    assert store.statistics().recovered_records == 0
    store.crash()


@pytest.mark.parametrize("stop", STOPS)
async def test_a_whole_store_is_taken_over_without_a_rebuild(
    history: History, stop: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        await check(copy_of(history.stopped[stop]), history.seen[stop])
    assert "consume queues" not in caplog.text


# Entries of the key index have no checksum.
SPOILED = [(target, damage) for target in TARGETS for damage in DAMAGES if target != "index" or damage not in CHANGES]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize(("target", "damage"), SPOILED)
async def test_damage_to_a_queue_hides_no_record(history: History, target: str, damage: str, stop: str) -> None:
    disk = copy_of(history.stopped[stop])
    spoil(disk, target, damage, Random(f"{target}{damage}{stop}"))
    await check(disk, history.seen[stop])


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("length", [0, 8, 39, 40, 100, 128, 200, 4095])
async def test_a_checkpoint_that_was_cut_hides_no_record(history: History, length: int, stop: str) -> None:
    disk = copy_of(history.stopped[stop])
    set_content(disk, "/data/checkpoint", bytes(disk.files["/data/checkpoint"].data[:length]))
    await check(disk, history.seen[stop])


INDEX = small_config(segment_bytes=4096, disk_clean_ratio=0.9, index_entries=64)


async def indexed() -> FakeDisk:
    """A store with several files of the key index; keyless messages lie where one ends and the next begins."""
    disk, clock = FakeDisk(), ManualClock()
    store = await Store.open(Path("/data"), INDEX, clock, disk)
    store.writer.store_host = HOST
    keys = store.keys
    assert keys is not None
    for number in range(250):
        clock.ms += 1000
        if keys.active.item is not None and keys.active.item.count == INDEX.index_entries:
            store.writer.append(message("without a key", "A"), 0)
        store.writer.append(message(f"{number}", "A", unique=f"U{number}"), 0)
        store.committer.commit()
        store.upkeep.indexer.drain_now()
    await store.close()
    forget_martlet(disk, killed=False)
    return disk


async def by_unique_key(disk: FakeDisk) -> list[bytes]:
    store = await Store.open(Path("/data"), INDEX, ManualClock(), disk)
    bodies = [
        bytes(RecordView(data).body)
        for number in range(250)
        for data in finish_now(store.lookup.query_keys("A", b"U%d" % number, 1, 0, 2**62)).records
    ]
    store.crash()
    return bodies


EVERYTHING = [b"%d" % number for number in range(250)]


@pytest.mark.parametrize("gone", [(), (0,), (1,), (2,), (3,), (0, 1), (1, 2), (0, 2), (1, 3), (2, 3)], ids=str)
async def test_rocketmqs_key_index_without_some_of_its_files_hides_no_message(
    gone: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    disk = await indexed()
    paths = sorted(path for path in disk.files if path.startswith("/data/index/"))
    assert len(paths) == 4
    for number in gone:
        disk.unlink(paths[number])
    assert await by_unique_key(disk) == EVERYTHING
    # What the last files had is indexed again, as always; for that nothing has to be removed.
    rebuilt = "the key index is missing or damaged; rebuilding it from the log" in caplog.text
    assert rebuilt == (gone not in ((), (3,), (2, 3)))


async def test_rocketmqs_key_index_is_as_old_as_the_log_that_retention_left(caplog: pytest.LogCaptureFixture) -> None:
    disk = await indexed()
    for path in sorted(path for path in disk.files if path.startswith("/data/commitlog/"))[:2]:
        disk.unlink(path)
    assert (await by_unique_key(disk))[-100:] == EVERYTHING[-100:]
    assert "key index" not in caplog.text


async def test_rocketmqs_entries_of_the_last_seconds_before_a_kill_are_not_needed(
    history: History, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checkpoint may be three seconds ahead of what it flushed; the log of that time is read."""
    disk = copy_of(history.stopped["killed"])
    last = max(path for path in disk.files if "/commitlog/" in path)
    begun_ms = RecordView(disk.files[last].data).store_ms
    page = disk.files["/data/checkpoint"].data
    set_content(disk, "/data/checkpoint", (begun_ms + 2000).to_bytes(8, "big") * 3 + bytes(page[24:]))
    for path in [path for path in disk.files if "/consumequeue/" in path]:
        data = bytearray(disk.files[path].data)
        for at in range(0, len(data), ENTRY_BYTES):
            if int.from_bytes(data[at : at + 8], "big") >= int(last[-20:]) - 1000:
                data[at : at + ENTRY_BYTES] = bytes(ENTRY_BYTES)
        set_content(disk, path, bytes(data))
    await check(disk, history.seen["killed"])
    assert "consume queues" not in caplog.text, "they are completed, not rebuilt"


@pytest.mark.parametrize("torn_bytes", [0, 50])
async def test_entries_of_records_that_a_crash_lost_are_removed(history: History, torn_bytes: int) -> None:
    disk = copy_of(history.stopped["killed"])
    store = await open_on(copy_of(disk))
    queue = store.queue("A", 0)
    position = store.queues.position_at(queue, 99)
    segment = store.segments.find(position)
    store.crash()
    assert segment is not None
    log, at = disk.files[segment.path].data, position - segment.start
    for later in [name for name in disk.files if "/commitlog/" in name and name > segment.path]:
        disk.unlink(later)
    log[at:] = b"\xff" * torn_bytes + bytes(len(log) - at - torn_bytes)
    entry_at = 99 * ENTRY_BYTES % FILE_BYTES
    path = f"/data/consumequeue/A/0/{99 * ENTRY_BYTES - entry_at:020d}"
    assert any(disk.files[path].data[entry_at : entry_at + ENTRY_BYTES])
    store = await open_on(disk)
    assert (store.appended, store.recovered.cut_bytes) == (position, torn_bytes)
    assert [store.queue(topic, 0).next_offset for topic in ("A", "One")] == [99, 1]
    assert not any(disk.files[segment.path].data[at:])
    assert not any(disk.files[path].data[entry_at:])
    store.crash()
