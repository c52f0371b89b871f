"""`martlet store verify` reports correctly for each kind of file, damage and shutdown.

The truth is what a start makes of the same directory: which files it changes, and which of the messages that were
acknowledged a consumer or a query by key then gets.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from martlet.app import saving
from martlet.app.config import Config
from martlet.app.startup import build
from martlet.errors import NotReady, StoreError
from martlet.message import Record
from martlet.offline import directory as offline
from martlet.offline.directory import Verification
from martlet.records.codec import decode_records
from martlet.runtime.stats import Stats
from martlet.runtime.steps import finish_now
from martlet.store import Store
from martlet.store.keys.index_files import HEADER, ITEM_BYTES, SLOT_BYTES
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import HOST, ManualClock, message, small_config

ROOT = "/data/store"
CONFIG = Config(store=small_config(record_crcs=True))
QUEUES = (("A", 0), ("A", 1), ("B", 0))
STOPS = ("stopped", "killed", "killed before a checkpoint")
LIGHT_EVERY = 5  # each message with such a number is in two light queues as well
SERVED = 45 * len(QUEUES) + 45 // LIGHT_EVERY * len(QUEUES) * 2

Place = tuple[str, int, int]


def copy_of(disk: FakeDisk) -> FakeDisk:
    return disk.after_power_cut(Cut.KILLED, Random(0))


async def opened(disk: FakeDisk) -> Store:
    store = await Store.open(Path(ROOT), CONFIG.store, ManualClock(), disk)
    store.writer.store_host = HOST
    store.writer.light_queues = True
    return store


def save_tables(store: Store) -> None:
    broker = build(CONFIG, store, ManualClock(), Stats())
    broker.groups.ensure("G")
    broker.groups.offsets.commit("G", "A", 0, 3)
    saving.save(broker)


def send(store: Store, rounds: range) -> None:
    random = Random(rounds.start)
    for number in rounds:
        for topic, queue_id in QUEUES:
            body = random.randbytes(random.randrange(1, 120))
            made = message(body, topic, "tag", "key", f"{topic}{queue_id}-{number}")
            if not number % LIGHT_EVERY:
                made.properties += b"INNER_MULTI_DISPATCH\x01%LMQ%x,%LMQ%y\x02"
            store.writer.append(made, queue_id)
        store.committer.commit()
    store.flusher.flush_now()


MADE: dict[str, tuple[FakeDisk, FakeDisk]] = {}
SERVED_WHOLE: dict[str, dict[Place, Record]] = {}


async def used(stop: str) -> tuple[FakeDisk, FakeDisk]:
    """A disk with a store after *stop*, and an older state of the same; to be copied, not changed."""
    if stop not in MADE:
        MADE[stop] = await make(stop)
    return MADE[stop]


async def served_whole(stop: str) -> dict[Place, Record]:
    """What a start on the undamaged disk after *stop* serves."""
    if stop not in SERVED_WHOLE:
        store = await opened(copy_of((await used(stop))[0]))
        SERVED_WHOLE[stop] = served(store)
        store.crash()
    return SERVED_WHOLE[stop]


async def make(stop: str) -> tuple[FakeDisk, FakeDisk]:
    disk = FakeDisk()
    store = await opened(disk)
    for _ in range(5):
        store.writer.append(message(b"of an earlier life", "B", keys="key", unique="old"), 0)
    store.committer.commit()
    store.flusher.flush_now()
    store.deletions.delete_topic("B")
    send(store, range(20))
    await store.upkeep.checkpointer.checkpoint()
    save_tables(store)
    older = copy_of(disk)
    send(store, range(20, 45))
    save_tables(store)
    if stop != "killed before a checkpoint":
        await store.upkeep.checkpointer.checkpoint()
    if stop == "stopped":
        await store.close()
    else:
        store.crash()
    return copy_of(disk), older


def positions_by_key(store: Store, record: Record) -> list[int]:
    """What a query for the unique key of *record* finds; nothing while a damaged key index keeps it waiting."""
    key = record.property("UNIQ_KEY").encode()
    with suppress(NotReady):
        records = finish_now(store.lookup.query_keys(record.topic, key, 64, 0, 2**62)).records
        return [each.position for data in records for each in decode_records(data)]
    return []


def served(store: Store) -> dict[Place, Record]:
    """What consumers get, and queries by key as well."""
    found: dict[Place, Record] = {}
    for queue in store.queues.all():
        offset = queue.first_offset
        while offset < store.readers.end_offset(queue):
            result = store.readers.read(queue, offset, 7, 10**6)
            for record in decode_records(b"".join(result.pieces)):
                if record.position in positions_by_key(store, record):
                    found[queue.topic, queue.queue_id, record.queue_offset] = record
            offset = max(result.next_offset, offset + 1)
    return found


def contents(disk: FakeDisk) -> dict[str, bytes]:
    return {path: bytes(file.data) for path, file in disk.files.items()}


def differences(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    names = {path.removeprefix(f"{ROOT}/") for path in changed}
    return {name for name in names if name.partition(".")[0] not in ("abort", "checkpoint", "lock", "queues", "space")}


async def verified(disk: FakeDisk) -> Verification:
    before = contents(disk)
    found = await offline.verify(ROOT, CONFIG, disk)
    assert contents(disk) == before
    assert not disk.open_files
    return found


async def test_unknown_files_beside_the_tables_are_ignored() -> None:
    disk = copy_of((await used("stopped"))[0])
    disk.make_directory(f"{ROOT}/config/x")
    fd = disk.open(f"{ROOT}/config/notes", create=True)
    disk.close(fd)
    assert (await verified(disk)).findings == []


@pytest.mark.parametrize("stop", STOPS)
async def test_an_intact_store_is_sound_once_a_start_had_nothing_to_do(stop: str) -> None:
    disk = copy_of((await used(stop))[0])
    found = await verified(disk)
    assert found.inspection.records == 5 + 45 * len(QUEUES) + 2  # with the two notes of the deletion
    assert not found.inspection.damage
    before = contents(disk)
    store = await opened(disk)
    assert len(served(store)) == SERVED
    store.crash()
    assert bool(found.findings) is bool(differences(before, contents(disk)))
    assert not found.findings or stop != "stopped"
    assert (await verified(disk)).findings == []


TARGETS = {
    "first segment": "commitlog/00000000000000000000",
    "middle segment": "commitlog/00000000000000008192",
    "last segment": "commitlog/*",
    "first file of a queue": "consumequeue/A/0/00000000000000000000",
    "last file of a queue": "consumequeue/B/0/*",
    "a queue": "consumequeue/A/1/",
    "all queues": "consumequeue/",
    "a light queue": "consumequeue/%LMQ%x/0/*",
    "all light queues": "consumequeue/%LMQ%",
    "index": "index/",
    "checkpoint": "checkpoint",
    "journal": "queues.",
    "topics": "config/topics.json",
    "groups": "config/subscriptionGroup.json",
    "offsets": "config/consumerOffset.json",
}


def remove(disk: FakeDisk, path: str) -> None:
    disk.unlink(path)


def rewrite(disk: FakeDisk, path: str, data: bytes) -> None:
    file = disk.files[path]
    file.data[:] = data
    file.stable[:] = data
    file.changes.clear()


def paths_of(disk: FakeDisk, target: str) -> list[str]:
    name = f"{ROOT}/{TARGETS[target]}"
    if name.endswith("*"):
        return [max(path for path in disk.files if path.startswith(name[:-1]))]
    return sorted(path for path in disk.files if path.startswith(name) and not path.endswith((".bak", ".tmp")))


def flipped(data: bytes, random: Random) -> bytes:
    used = len(data.rstrip(b"\x00")) or 1
    at = random.randrange(used)
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def page_zeroed(data: bytes) -> bytes:
    used = len(data.rstrip(b"\x00"))
    low, high = used // 3, used * 2 // 3
    return data[:low] + bytes(high - low) + data[high:]


DAMAGES: dict[str, Callable[[bytes, bytes, Random], bytes | None]] = {
    "removed": lambda data, older, random: None,
    "emptied": lambda data, older, random: b"",
    "zeroed": lambda data, older, random: bytes(len(data)),
    "page zeroed": lambda data, older, random: page_zeroed(data),
    "truncated": lambda data, older, random: data[: len(data.rstrip(b"\x00")) * 5 // 11],
    "stale": lambda data, older, random: older,
    **{f"flipped {n}": lambda data, older, random: flipped(data, random) for n in range(4)},
}


def damaged(disk: FakeDisk, older: FakeDisk, target: str, damage: str) -> FakeDisk:
    found = copy_of(disk)
    random = Random(f"{target} {damage}")
    for path in paths_of(found, target):
        before = bytes(older.files[path].data) if path in older.files else b""
        data = DAMAGES[damage](bytes(found.files[path].data), before, random)
        if data is None:
            found.unlink(path)
        else:
            rewrite(found, path, data)
    return found


def same(found: dict[Place, Record], wanted: dict[Place, Record]) -> bool:
    return {place: (record.body, record.properties) for place, record in found.items()} == {
        place: (record.body, record.properties) for place, record in wanted.items()
    }


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("stop", STOPS)
async def test_verify_tells_what_a_start_makes_of_it(stop: str, target: str, damage: str) -> None:
    whole, older = await used(stop)
    disk = damaged(whole, older, target, damage)
    found = await verified(disk)
    before = contents(disk)
    store = await opened(disk)
    all_served = same(served(store), await served_whole(stop))
    store.crash()
    changed = differences(before, contents(disk))
    for name in changed:
        assert any(finding.kind == "change" and name.partition("/")[0] in finding.text for finding in found.findings)
    if changed or not all_served:
        assert found.findings


async def test_a_repair_does_what_was_planned_and_nothing_is_left() -> None:
    whole, older = await used("killed before a checkpoint")
    disk = damaged(whole, older, "all queues", "removed")
    for path in paths_of(disk, "index"):
        disk.unlink(path)
    planned = await offline.plan(ROOT, CONFIG, disk)
    assert {finding.kind for finding in planned.findings} == {"start", "change"}
    said = await offline.repair(ROOT, CONFIG, disk)
    assert said == [finding.text for finding in planned.findings if finding.kind == "start"]
    found = await verified(disk)
    assert (found.findings, found.inspection.stopped_in_order) == ([], True)


async def test_a_repair_on_a_full_disk_ends_with_an_error() -> None:
    whole, older = await used("killed before a checkpoint")
    disk = damaged(whole, older, "index", "removed")
    disk.free_bytes = 0
    with pytest.raises(StoreError, match="is full"):
        await offline.repair(ROOT, CONFIG, disk)
    disk.free_bytes = None
    await offline.repair(ROOT, CONFIG, disk)
    assert (await verified(disk)).findings == []


@pytest.mark.parametrize("bit", [0x01, 0x40])
async def test_one_damaged_entry_of_the_key_index_costs_one_record(bit: int) -> None:
    """An entry that points far ahead hides no entry after it."""
    disk = copy_of((await used("stopped"))[0])
    path = paths_of(disk, "index")[1]
    at = HEADER.size + CONFIG.store.index_slots * SLOT_BYTES + 9 * ITEM_BYTES + 4  # the position's first byte
    disk.files[path].data[at + 7 if bit == 1 else at] ^= bit
    (finding,) = (await verified(disk)).findings
    assert "1 record of topic" in finding.text
    assert "cannot be found by key" in finding.text
