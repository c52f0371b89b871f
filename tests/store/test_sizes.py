"""The sizes of the files of a store stay as they are, whatever the configuration says: RocketMQ compares them."""

import logging
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from martlet.runtime.steps import finish_now
from martlet.store import Store, StoreConfig
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import HOST, ManualClock, drain, message, small_config

ROOT = "/data/store"
# As RocketMQ's users set them: mappedFileSizeCommitLog, mappedFileSizeConsumeQueue / 20, maxHashSlotNum, maxIndexNum.
MADE = {
    "log": {"segment_bytes": 6000},
    "large log": {"segment_bytes": 1 << 17},
    "queues": {"queue_file_entries": 50},
    "large queues": {"queue_file_entries": 5000},
    "slots": {"index_slots": 77},
    "entries": {"index_entries": 1001},
    "slots and entries": {"index_slots": 500, "index_entries": 2000},
    "odd slots and entries": {"index_slots": 131, "index_entries": 197},
    "everything": {"segment_bytes": 9999, "queue_file_entries": 101, "index_slots": 61, "index_entries": 300},
}


async def open_on(disk: FakeDisk, config: StoreConfig) -> Store:
    store = await Store.open(Path(ROOT), config, ManualClock(), disk)
    store.writer.store_host = HOST
    return store


def send(store: Store, first: int, count: int) -> None:
    for number in range(first, first + count):
        store.writer.append(message(f"{number}", "T", keys=f"key{number}"), number % 3)
    store.committer.commit()
    store.flusher.flush_now()


def sizes_of(disk: FakeDisk, folder: str) -> Counter[int]:
    return Counter(len(file.data) for path, file in disk.files.items() if path.startswith(f"{ROOT}/{folder}/"))


def check(store: Store, count: int) -> None:
    found = [body for queue in store.queues.topics["T"].values() for body in drain(store, queue)]
    assert sorted(found, key=int) == [b"%d" % number for number in range(count)]
    for number in (0, count // 2, count - 1):
        assert len(finish_now(store.lookup.query_keys("T", b"key%d" % number, 64, 0, 2**62)).records) == 1


@pytest.mark.parametrize("rocketmqs", [True, False], ids=["written by RocketMQ", "written by Martlet"])
@pytest.mark.parametrize("stop", ["orderly", "killed"])
@pytest.mark.parametrize("made", MADE)
async def test_the_files_of_a_store_keep_their_sizes(
    made: str, stop: str, rocketmqs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    disk, own = FakeDisk(), small_config(**MADE[made])
    store = await open_on(disk, own)
    send(store, 0, 140)
    await store.close()
    store = await open_on(disk, own)
    send(store, 140, 10)
    if stop == "killed":
        disk = disk.after_power_cut(Cut.KILLED, Random(0))
        store.crash()
    else:
        await store.close()
    if rocketmqs:
        forget_martlet(disk)
    before = {folder: set(sizes_of(disk, folder)) for folder in ("commitlog", "consumequeue", "index")}
    assert all(len(sizes) == 1 for sizes in before.values())
    with caplog.at_level(logging.WARNING):
        store = await open_on(disk, small_config())
    for key, value in MADE[made].items():
        assert f"store.{key} = {value}, which stays so; the configuration says" in caplog.text
    check(store, 150)
    send(store, 150, 250)
    check(store, 400)
    await store.close()
    assert {folder: set(sizes_of(disk, folder)) for folder in before} == before
    store = await open_on(disk, small_config())
    assert store.statistics().recovered_records == 0
    check(store, 400)
    store.crash()


def forget_martlet(disk: FakeDisk) -> None:
    """Leave what RocketMQ writes: the page with times alone, and no journal."""
    for path in [path for path in disk.files if path.startswith(f"{ROOT}/queues.")]:
        disk.unlink(path)
    page = disk.files[f"{ROOT}/checkpoint"]
    page.data[128:] = page.stable[128:] = bytes(4096 - 128)


async def test_the_configuration_is_for_new_stores(caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk()
    for _ in range(2):
        store = await open_on(disk, small_config(segment_bytes=8192, queue_file_entries=32, index_slots=128))
        send(store, 0, 100)
        await store.close()
    assert set(sizes_of(disk, "commitlog")) == {8192}
    assert "stays so" not in caplog.text


@pytest.mark.parametrize("left", [0, 1, 700, 4000])
async def test_a_segment_that_a_crash_left_short_is_completed(left: int) -> None:
    disk = FakeDisk()
    store = await open_on(disk, small_config())
    send(store, 0, 150)
    await store.close()
    newest = max(path for path in disk.files if "/commitlog/" in path)
    assert len(sizes_of(disk, "commitlog")) == 1
    file = disk.files[newest]
    del file.data[left:]
    file.stable[:] = file.data
    store = await open_on(disk, small_config(segment_bytes=1 << 16))
    store.crash()
    assert set(sizes_of(disk, "commitlog")) == {4096}


async def test_damaged_files_do_not_tell_a_size(caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk()
    store = await open_on(disk, small_config())
    send(store, 0, 150)
    await store.close()
    random = Random(3)
    for path, file in sorted(disk.files.items()):
        if "/consumequeue/" in path or "/index/" in path:
            del file.data[random.randrange(len(file.data)) :]
            file.stable[:] = file.data
    store = await open_on(disk, small_config())
    assert "stays so" not in caplog.text
    check(store, 150)
    await store.close()
    assert set(sizes_of(disk, "consumequeue")) == {320}
