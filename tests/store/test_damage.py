"""Files that were cut, flipped, removed or never finished: what a start makes of them.

``MARTLET_FLIPS`` sets how many single bits are flipped in each kind of file.
"""

import os
from pathlib import Path
from random import Random

import pytest
from tests.stored import records_in

from martlet.message import Record
from martlet.records.codec import decode_records, encode_record
from martlet.records.layout import FILLER, HEAD_BYTES, QUEUE_ID_AT, QUEUE_OFFSET_AT, STORE_MS_AT
from martlet.runtime.steps import finish_now
from martlet.store import Store, StoreConfig
from martlet.store.recovery.inspect import inspect
from martlet.store.recovery.usual import STORE_MS_END
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import HOST, ManualClock, drain, message, small_config

FLIPS = int(os.environ.get("MARTLET_FLIPS", "700"))
ROOT = "/data/store"
CONFIG = small_config()
QUEUES = (("A", 0), ("A", 1), ("B", 0))
COUNT = 30

Place = tuple[str, int, int]

# The bytes of a record with its queue and its offset there: they can contradict what came before.
ITS_PLACE = (*range(QUEUE_ID_AT, QUEUE_ID_AT + 4), *range(QUEUE_OFFSET_AT, QUEUE_OFFSET_AT + 8))


async def open_on(disk: FakeDisk, config: StoreConfig = CONFIG) -> Store:
    store = await Store.open(Path(ROOT), config, ManualClock(), disk)
    store.writer.store_host = HOST
    return store


def copy_of(disk: FakeDisk) -> FakeDisk:
    return disk.after_power_cut(Cut.KILLED, Random(0))


def contents(store: Store) -> dict[Place, Record]:
    """Every readable message; reads continue after damaged ones."""
    return {
        (queue.topic, queue.queue_id, record.queue_offset): record
        for queue in store.queues.all()
        for record in records_in(store, queue, 7)
    }


def keyed(store: Store, found: dict[Place, Record]) -> None:
    """Every message of *found* is also found by its key."""
    for (topic, _, _), record in found.items():
        records = finish_now(store.lookup.query_keys(topic, record.property("UNIQ_KEY").encode(), 64, 0, 2**62)).records
        assert any(r.position == record.position for data in records for r in decode_records(data))


@pytest.fixture
async def filled() -> FakeDisk:
    """A disk on which a store with three queues in four segments was stopped in order."""
    disk = FakeDisk()
    store = await open_on(disk)
    random = Random(5)
    for number in range(COUNT):
        for topic, queue_id in QUEUES:
            body = random.randbytes(random.randrange(1, 120))
            store.writer.append(message(body, topic, "tag", "key", f"{topic}{queue_id}-{number}"), queue_id)
        store.committer.commit()
    await store.close()
    return disk


@pytest.fixture
async def wanted(filled: FakeDisk) -> dict[Place, Record]:
    store = await open_on(copy_of(filled))
    found = contents(store)
    assert len(found) == COUNT * len(QUEUES)
    keyed(store, found)
    store.crash()
    return found


def same(found: dict[Place, Record], wanted: dict[Place, Record]) -> bool:
    return {p: (r.body, r.properties, r.position) for p, r in found.items()} == {
        p: (r.body, r.properties, r.position) for p, r in wanted.items()
    }


def remove(disk: FakeDisk, prefix: str) -> None:
    for path in [p for p in disk.files if p.startswith(f"{ROOT}/{prefix}")]:
        disk.unlink(path)
    for path in sorted((p for p in disk.directories if p.startswith(f"{ROOT}/{prefix}")), reverse=True):
        disk.remove_directory(path)


def change(disk: FakeDisk, path: str, data: bytes) -> None:
    file = disk.files[path]
    file.data[:] = data
    file.stable[:] = data


REMOVALS = [
    ("consumequeue",),
    ("index",),
    ("consumequeue", "index"),
    ("consumequeue/A",),
    ("consumequeue/A/1",),
    ("consumequeue/B/0/00000000000000000000",),
    ("consumequeue/B/0/00000000000000000320",),
    ("consumequeue", "index", "checkpoint"),
    ("checkpoint",),
    ("queues",),
    ("checkpoint", "queues"),
    ("lock",),
]


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("gone", REMOVALS, ids="+".join)
async def test_whatever_index_is_removed_nothing_changes(
    filled: FakeDisk, wanted: dict[Place, Record], gone: tuple[str, ...], killed: bool
) -> None:
    if killed:
        (await open_on(filled)).crash()
    for prefix in gone:
        remove(filled, prefix)
    store = await open_on(filled)
    found = contents(store)
    assert same(found, wanted)
    keyed(store, found)
    assert store.readers.damaged_records == 0
    await store.close()
    store = await open_on(filled)
    assert same(contents(store), wanted)
    assert store.statistics().recovered_records == 0
    store.crash()


@pytest.mark.parametrize("kind", ["consumequeue/A/0/00000000000000000000", "index/", "checkpoint", "queues"])
async def test_an_index_file_that_is_cut_anywhere_is_rebuilt(
    filled: FakeDisk, wanted: dict[Place, Record], kind: str
) -> None:
    path = next(p for p in sorted(filled.files) if p.startswith(f"{ROOT}/{kind}"))
    size = len(filled.files[path].data)
    for length in range(0, size, max(size // 60, 1)):
        disk = copy_of(filled)
        change(disk, path, bytes(disk.files[path].data[:length]))
        store = await open_on(disk)
        assert same(contents(store), wanted)
        store.crash()


async def test_a_log_cut_at_every_byte_loses_only_what_was_cut(filled: FakeDisk, wanted: dict[Place, Record]) -> None:
    (await open_on(filled)).crash()
    last = max(p for p in filled.files if "/commitlog/" in p)
    start = int(last[-20:])
    used = len(filled.files[last].data.rstrip(b"\x00"))
    for length in range(used + 2):
        disk = copy_of(filled)
        change(disk, last, bytes(filled.files[last].data[:length]))
        store = await open_on(disk)
        found = contents(store)
        whole = {p: r for p, r in wanted.items() if r.position + r.size <= start + length}
        assert same(found, whole)
        store.writer.append(message("more", "A"), 0)
        store.committer.commit()
        store.flusher.flush_now()
        assert len(contents(store)) == len(whole) + 1
        store.crash()


async def test_a_write_that_ended_at_any_byte_is_cut_off(filled: FakeDisk, wanted: dict[Place, Record]) -> None:
    store = await open_on(filled)
    end = store.appended
    last = max(p for p in filled.files if "/commitlog/" in p)
    at = end - int(last[-20:])
    torn = encode_record(message(b"torn" * 10, "A", unique="u"), 0, COUNT, end, 0, HOST)
    store.crash()
    for length in range(1, len(torn) + 1):
        disk = copy_of(filled)
        data = bytearray(disk.files[last].data)
        data[at : at + length] = torn[:length]
        change(disk, last, bytes(data))
        store = await open_on(disk)
        whole = length == len(torn)
        assert len(contents(store)) == len(wanted) + whole
        assert store.appended == end + whole * len(torn)
        assert store.recovered.cut_bytes == (0 if whole else len(torn[:length].rstrip(b"\x00")))
        store.crash()


async def test_damage_in_the_middle_costs_that_record_alone(filled: FakeDisk, wanted: dict[Place, Record]) -> None:
    for place, record in list(wanted.items())[::7]:
        disk = copy_of(filled)
        path = next(p for p in disk.files if "/commitlog/" in p and 0 <= record.position - int(p[-20:]) < 4096)
        data = bytearray(disk.files[path].data)
        data[record.position - int(path[-20:]) + 88] ^= 4
        change(disk, path, bytes(data))
        rest = {p: r for p, r in wanted.items() if p != place}
        store = await open_on(disk)
        assert same(contents(store), rest)
        assert same(contents(store), rest)
        assert store.readers.damaged_records == 1
        assert store.lookup.record_at(record.position) is None
        await store.close()
        remove(disk, "consumequeue")
        store = await open_on(disk)
        assert same(contents(store), rest)
        assert store.readers.damaged_records >= 1
        assert store.appended == max(r.position + r.size for r in wanted.values())
        store.crash()


@pytest.mark.parametrize("gone", ["nothing", "consumequeue/A/0", "consumequeue", "checkpoint"])
@pytest.mark.parametrize("lost_bytes", [1, 8, 1000])
async def test_a_record_without_the_end_of_its_properties_is_damaged(
    filled: FakeDisk, wanted: dict[Place, Record], lost_bytes: int, gone: str
) -> None:
    """The disk has lost the sector with its end, which reads as zeros: no CRC covers that."""
    of_queue = [place for place in wanted if place[:2] == ("A", 0)]
    for place in of_queue[3], of_queue[-1]:
        disk, record = copy_of(filled), wanted[place]
        path = next(p for p in disk.files if "/commitlog/" in p and 0 <= record.position - int(p[-20:]) < 4096)
        data, end = bytearray(disk.files[path].data), record.position + record.size - int(path[-20:])
        lost = min(lost_bytes, len(record.properties))
        data[end - lost : end] = bytes(lost)
        change(disk, path, bytes(data))
        (damage,) = inspect(ROOT, disk).damage
        assert (damage.start, damage.end - damage.start) == (record.position, record.size)
        assert "has lost the end of its properties" in damage.text
        if gone != "nothing":
            remove(disk, gone)
        store = await open_on(disk)
        rest = {p: r for p, r in wanted.items() if p != place}
        found = contents(store)
        assert same(found, rest)
        keyed(store, found)
        assert store.readers.damaged_records == 1
        assert store.lookup.record_at(record.position) is None
        store.crash()


async def test_a_missing_segment_in_the_middle_costs_only_its_records(
    filled: FakeDisk, wanted: dict[Place, Record]
) -> None:
    for rebuilt in (False, True):
        disk = copy_of(filled)
        remove(disk, "commitlog/00000000000000004096")
        if rebuilt:
            remove(disk, "consumequeue")
        store = await open_on(disk)
        assert same(contents(store), {p: r for p, r in wanted.items() if not 4096 <= r.position < 8192})
        assert store.readers.damaged_records
        store.crash()


async def test_a_segment_of_zeros_after_the_last_is_used(filled: FakeDisk, wanted: dict[Place, Record]) -> None:
    for size in (0, 100, 4096):
        disk = copy_of(filled)
        last = max(p for p in disk.files if "/commitlog/" in p)
        fd = disk.open(f"{ROOT}/commitlog/{int(last[-20:]) + 4096:020d}", create=True)
        disk.truncate(fd, size)
        disk.close(fd)
        (await open_on(copy_of(disk))).crash()
        store = await open_on(disk)
        assert same(contents(store), wanted)
        for _ in range(60):
            store.writer.append(message(b"x" * 100, "A"), 0)
        store.committer.commit()
        await store.close()
        store = await open_on(disk)
        assert len(contents(store)) == len(wanted) + 60
        store.crash()


async def test_progress_is_reported_while_a_start_takes_long(filled: FakeDisk) -> None:
    seen: list[tuple[int, int, int]] = []
    remove(filled, "consumequeue")
    store = await Store.open(
        Path(ROOT), CONFIG, ManualClock(), filled, lambda done, total, records: seen.append((done, total, records))
    )
    assert seen[-1][0] == seen[-1][1] == store.appended
    assert seen[-1][2] == COUNT * len(QUEUES)
    store.crash()


def flip(disk: FakeDisk, path: str, random: Random, used: int) -> int:
    at = random.randrange(used)
    data = bytearray(disk.files[path].data)
    data[at] ^= 1 << random.randrange(8)
    change(disk, path, bytes(data))
    return at


@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "killed"])
async def test_a_flipped_bit_in_the_log_costs_at_most_its_record(
    filled: FakeDisk, wanted: dict[Place, Record], clean: bool
) -> None:
    random = Random(clean)
    bodies = {r.body for r in wanted.values()}
    paths = sorted(p for p in filled.files if "/commitlog/" in p)
    for _ in range(FLIPS):
        disk = copy_of(filled)
        path = random.choice(paths)
        used = len(disk.files[path].data.rstrip(b"\x00"))
        at = int(path[-20:]) + flip(disk, path, random, used)
        hit = next((r for r in wanted.values() if r.position <= at < r.position + r.size), None)
        if hit is not None and disk.files[path].data[at - int(path[-20:])] >= 0x80 and in_topic(hit, at):
            continue  # no longer UTF-8, and no checksum guards the topic of a record without a record CRC
        if not clean:
            remove(disk, "consumequeue")
            remove(disk, "checkpoint")
            disk.close(disk.open(f"{ROOT}/abort", create=True))
        store = await open_on(disk)
        found = contents(store)
        lost = [p for p in wanted if p not in found or found[p].body != wanted[p].body]
        assert all(wanted[p].position <= at < wanted[p].position + wanted[p].size for p in lost)
        assert len(lost) <= 1
        if hit is None:
            told = (0 if clean else 1, False)  # a filler, which only a rebuild reads
        elif not lost or moved(found, wanted, at):
            told = (0, False)
        elif clean or hit.position < max(r.position for r in wanted.values()) or at - hit.position in ITS_PLACE:
            told = (1, False)
        else:
            told = (0, True)  # the last record, which a write may have torn
        assert (store.readers.damaged_records, store.recovered.cut_bytes > 0) == told
        assert all(r.body in bodies for r in found.values())
        store.crash()


async def test_a_record_with_a_damaged_topic_is_not_served(filled: FakeDisk, wanted: dict[Place, Record]) -> None:
    hit = min(wanted.values(), key=lambda record: record.position)
    path = f"{ROOT}/commitlog/{0:020d}"
    for bit in range(8):
        disk = copy_of(filled)
        data = bytearray(disk.files[path].data)
        data[hit.position + HEAD_BYTES + len(hit.body) + 1] ^= 1 << bit
        change(disk, path, bytes(data))
        store = await open_on(disk)
        found = contents(store)
        assert same(found, {place: record for place, record in wanted.items() if record is not hit})
        assert store.readers.damaged_records == 1
        store.crash()


def in_topic(record: Record, at: int) -> bool:
    topic_at = record.position + HEAD_BYTES + len(record.body) + 1
    return topic_at <= at < topic_at + len(record.topic)


def moved(found: dict[Place, Record], wanted: dict[Place, Record], at: int) -> bool:
    """Return whether the flip hit the topic or queue id, which no checksum covers, and moved the record."""
    return any(p not in wanted and r.position <= at < r.position + r.size for p, r in found.items())


@pytest.mark.parametrize("bit", [0, 30, *range(44, 64)])
async def test_a_flipped_bit_in_a_store_time_costs_nothing(
    filled: FakeDisk, wanted: dict[Place, Record], bit: int
) -> None:
    """Without a record CRC no checksum guards it; the key index cannot name a file after the year 9 million."""
    first = min(wanted.values(), key=lambda record: record.position)
    path = f"{ROOT}/commitlog/{0:020d}"
    data = bytearray(filled.files[path].data)
    data[first.position + STORE_MS_AT + 7 - bit // 8] ^= 1 << bit % 8
    change(filled, path, bytes(data))
    for prefix in ("consumequeue", "index", "checkpoint", "queues"):
        remove(filled, prefix)
    store = await open_on(filled)
    found = contents(store)
    assert same(found, wanted)
    keyed(store, {place: record for place, record in found.items() if record.position != first.position})
    assert 0 <= store.committer.last_store_ms < STORE_MS_END
    store.crash()


@pytest.mark.parametrize("kind", ["consumequeue/", "index/", "checkpoint", "queues"])
async def test_a_flipped_bit_in_an_index_serves_nothing_wrong(
    filled: FakeDisk, wanted: dict[Place, Record], kind: str
) -> None:
    random = Random(kind)
    paths = sorted(p for p in filled.files if p.startswith(f"{ROOT}/{kind}") and not p.endswith(".bak"))
    for _ in range(FLIPS // 2):
        disk = copy_of(filled)
        path = random.choice(paths)
        flip(disk, path, random, len(disk.files[path].data))
        store = await open_on(disk)
        found = contents(store)
        assert all(found[p].body == wanted[p].body for p in found)
        lost = wanted.keys() - found.keys()
        assert len(lost) <= (1 if kind == "consumequeue/" else 0)
        assert not lost or store.readers.damaged_records
        store.crash()


async def test_a_filler_that_is_damaged_loses_no_record(filled: FakeDisk, wanted: dict[Place, Record]) -> None:
    disk = copy_of(filled)
    path = f"{ROOT}/commitlog/{0:020d}"
    data = bytearray(disk.files[path].data)
    at = data.rindex(FILLER.pack(0, 0xCBD43194)[4:]) - 4
    data[at : at + 8] = b"\xff" * 8
    change(disk, path, bytes(data))
    remove(disk, "consumequeue")
    store = await open_on(disk)
    assert same(contents(store), wanted)
    assert store.readers.damaged_records == 1
    store.crash()


async def test_a_record_between_two_damaged_places_is_kept_when_the_queues_are_rebuilt() -> None:
    """Neither its own offset nor the next record's follows what was there before (seeds 896 and 1958)."""
    disk = FakeDisk()
    store = await open_on(disk)
    placed = [store.writer.append(message(b"m%d" % number, "A"), 0) for number in range(12)]
    store.committer.commit()
    await store.close()
    (path,) = (path for path in disk.files if "/commitlog/" in path)
    data = bytearray(disk.files[path].data)
    for number in (3, 4, 5, 7, 8):
        at = placed[number]
        data[at.position : at.end] = bytes(at.end - at.position)
    change(disk, path, bytes(data))
    for prefix in ("consumequeue", "index", "checkpoint", "queues"):
        remove(disk, prefix)
    store = await open_on(disk)
    assert sorted(offset for _, _, offset in contents(store)) == [0, 1, 2, 6, 9, 10, 11]
    store.crash()


async def test_a_damaged_last_record_is_not_cut_off_after_an_orderly_shutdown() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    placed = [store.writer.append(message(f"m{number}", unique=f"u{number}"), 0) for number in range(3)]
    store.committer.commit()
    await store.close()
    last = placed[-1]
    fd = disk.open(f"{ROOT}/commitlog/00000000000000000000")
    disk.write(fd, bytes(8), last.position)
    kept = disk.read(fd, last.end - last.position, last.position)
    disk.unlink(f"{ROOT}/checkpoint")
    store = await open_on(disk)
    assert (store.statistics().damaged_records, store.appended) == (1, last.end)
    assert disk.read(fd, last.end - last.position, last.position) == kept
    assert drain(store, store.queue("T", 0)) == [b"m0", b"m1"]
    store.writer.append(message("m3"), 0)
    store.committer.commit()
    store.flusher.flush_now()
    assert drain(store, store.queue("T", 0)) == [b"m0", b"m1", b"m3"]
    disk.close(fd)
    store.crash()
