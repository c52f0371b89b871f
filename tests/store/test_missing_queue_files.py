"""Files of consume queues are missing at startup, although the checkpoint lists them."""

import logging
from pathlib import Path
from random import Random

import pytest
import trio
from trio.testing import MockClock

import martlet.store.recovery.scan
from martlet.errors import Refused
from martlet.store import Store
from martlet.store.queues.queues import Queue
from martlet.store.read.reading import ReadStatus
from martlet.store.recovery.repair import Repairs
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import HOST, ManualClock, bodies, drain, message, small_config

QUEUES = "/data/consumequeue"
Seen = dict[tuple[str, int], tuple[int, int, list[bytes]]]


async def open_on(disk: FakeDisk, segment_bytes: int = 2048) -> Store:
    config = small_config(segment_bytes=segment_bytes, disk_clean_ratio=0.9)
    store = await Store.open(Path("/data"), config, ManualClock(), disk)
    store.writer.store_host = HOST
    return store


def send(store: Store, topic: str, count: int) -> None:
    first = store.queue(topic, 0).next_offset
    for number in range(first, first + count):
        store.writer.append(message(f"{topic}-{number}", topic), 0)
    store.committer.commit()
    store.flusher.flush_now()


def remove_all_but_the_last(store: Store, disk: FakeDisk) -> None:
    disk.used_ratio = 0.95
    store.upkeep.retention.look()
    disk.used_ratio = 0.1
    assert len(store.segments.items) == 1


def seen(store: Store) -> Seen:
    queues = [queue for queue in store.queues.all() if queue.next_offset]
    return {(q.topic, q.queue_id): (q.first_offset, q.next_offset, drain(store, q)) for q in queues}


def without(disk: FakeDisk, prefix: str) -> FakeDisk:
    """What a killed process leaves on *disk*, without the files under *prefix*."""
    copy = disk.after_power_cut(Cut.KILLED, Random(0))
    for path in [path for path in copy.files if path.startswith(prefix)]:
        copy.unlink(path)
    return copy


@pytest.mark.parametrize("gone", ["", "/A", "/B"])
async def test_messages_after_the_checkpoint_that_a_start_saved_early_are_kept(
    monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    monkeypatch.setattr(martlet.store.recovery.scan, "UNSAVED_RECORDS_MAX", 5)
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "A", 5)
    await store.upkeep.checkpointer.checkpoint()
    send(store, "A", 2)  # in the same block of entries
    send(store, "B", 20)
    send(store, "C", 20)
    wanted = seen(store)
    found = await open_on(without(disk, QUEUES + gone))
    assert seen(found) == wanted
    found.crash()


@pytest.mark.parametrize("after", [0, 1, 40])
async def test_queues_begin_where_they_did_after_a_removal_that_no_checkpoint_knows(after: int) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "One", 1)
    for _ in range(15):
        send(store, "A", 9)
        send(store, "B", 3)
    send(store, "One", 1)
    await store.upkeep.checkpointer.checkpoint()
    remove_all_but_the_last(store, disk)
    send(store, "A", after)
    wanted = seen(store)
    assert wanted["One", 0] == (1, 2, [b"One-1"])
    files = {path for path in disk.files if path.startswith(QUEUES)}
    for gone in sorted({QUEUES, *files, *(path.rpartition("/")[0] for path in files)}):
        found = await open_on(without(disk, gone))
        assert seen(found) == wanted, gone
        found.crash()


async def test_an_emptied_queue_continues_without_its_file(caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "E", 3)
    send(store, "A", 80)
    await store.upkeep.checkpointer.checkpoint()
    remove_all_but_the_last(store, disk)
    await store.upkeep.checkpointer.checkpoint()
    disk = without(disk, f"{QUEUES}/E")
    store = await open_on(disk)
    send(store, "E", 2)
    await store.close()
    with caplog.at_level(logging.WARNING):
        store = await open_on(disk)
        assert seen(store)["E", 0] == (3, 5, [b"E-3", b"E-4"])
    assert "damaged" not in caplog.text
    store.crash()


async def test_a_far_read_of_a_deleted_topic_finds_no_queue() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "A", 100)
    await store.upkeep.checkpointer.checkpoint()
    queue = store.queue("A", 0)
    store.deletions.delete_topic("A")
    store.flusher.flush_now()
    await store.upkeep.checkpointer.checkpoint()
    result = await store.readers.read_far(queue, 0, 5, 1000)
    assert (result.status, result.count, result.next_offset) == (ReadStatus.NO_QUEUE, 0, 0)
    store.crash()


async def without_a_file(disk: FakeDisk) -> Store:
    """A store of a queue without its first file, on a disk that is full."""
    store = await open_on(disk, segment_bytes=65536)  # retention leaves the newest segment alone
    send(store, "A", 30)
    await store.close()
    store = await open_on(disk, segment_bytes=65536)
    path = f"{QUEUES}/A/0/{0:020d}"
    disk.unlink(path)
    store.segments.files.forget(path)
    disk.free_bytes = 0
    return store


async def test_a_read_that_needs_more_memory_than_allowed_is_refused_while_the_disk_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("martlet.store.recovery.repair.MEMORY_ENTRIES_MAX", 10)
    disk = FakeDisk()
    store = await without_a_file(disk)
    queue = store.queue("A", 0)
    with pytest.raises(Refused, match="is full"):
        await store.readers.read_far(queue, 0, 2, 1000)
    with pytest.raises(Refused, match="is full"):
        store.readers.read(queue, 0, 2, 1000)
    disk.free_bytes = None
    assert bodies((await store.readers.read_far(queue, 0, 2, 1000)).pieces) == [b"A-0", b"A-1"]
    store.crash()


@pytest.mark.parametrize("far", [False, True])
async def test_what_is_rebuilt_on_a_full_disk_is_read_and_written_once_there_is_space(
    far: bool, autojump_clock: MockClock
) -> None:
    disk = FakeDisk()
    store = await without_a_file(disk)
    queue, wanted = store.queue("A", 0), [b"A-%d" % number for number in range(30)]
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        for _ in range(2):
            first = await store.readers.read_far(queue, 3, 2, 1000) if far else store.readers.read(queue, 3, 2, 1000)
            assert bodies(first.pieces) == [b"A-3", b"A-4"]
            assert drain(store, queue) == wanted
            await trio.sleep(30)
        assert len(store.queues.rebuilt) == 2
        with pytest.raises(Refused, match="is full"):
            send(store, "A", 1)
        disk.free_bytes = 10**6
        await trio.sleep(30)
        assert disk.names(f"{QUEUES}/A/0") == [f"{0:020d}", f"{320:020d}"]
        assert store.queues.rebuilt == {}
        send(store, "A", 1)
        nursery.cancel_scope.cancel()
    store.queues.forget_blocks(queue)
    assert drain(store, queue) == [*wanted, b"A-30"]
    assert store.readers.damaged_records == 0
    store.crash()


async def test_a_journal_without_disk_space_leaves_no_file() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    for number in range(150):
        send(store, f"T{number}", 1)
    await store.upkeep.checkpointer.checkpoint()
    store.upkeep.checkpointer.journal.abandon()
    before = disk.names("/data")
    disk.free_bytes = 4096
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            await store.upkeep.checkpointer.checkpoint()
    assert disk.names("/data") == before
    disk.free_bytes = None
    await store.upkeep.checkpointer.checkpoint()
    wanted = seen(store)
    found = await open_on(without(disk, "/nothing"))
    assert seen(found) == wanted
    found.crash()


async def test_a_directory_with_the_name_of_a_journal_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk()
    disk.make_directory("/data/queues.0000000009")
    store = await open_on(disk)
    send(store, "A", 3)
    store.upkeep.checkpointer.journal.abandon()
    await store.upkeep.checkpointer.checkpoint()
    assert "queues.0000000009 is no longer used and cannot be removed" in caplog.text
    await store.close()
    store = await open_on(disk)
    assert seen(store)["A", 0] == (0, 3, [b"A-0", b"A-1", b"A-2"])
    store.crash()


async def test_a_repair_leaves_alone_what_is_being_written(caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "A", 3)
    await store.upkeep.checkpointer.checkpoint()
    queue, path = store.queue("A", 0), f"{QUEUES}/A/0/{0:020d}"
    for _ in range(2):
        store.writer.append(message("half written", "B"), 0)
    store.committer.commit()
    log = disk.files[store.segments.items[0].path].data
    log[log.index(b"half")] = 0
    disk.files[path].data[:60] = bytes(60)
    await store.upkeep.repairs.repair(queue)
    assert "rebuilding its messages 0 to 2" in caplog.text
    assert "holds no record" not in caplog.text
    store.crash()


async def test_a_block_that_is_damaged_after_each_rebuild_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "A", 3)
    await store.close()
    store = await open_on(disk)
    queue, path = store.queue("A", 0), f"{QUEUES}/A/0/{0:020d}"
    rebuild = store.upkeep.repairs.repair

    async def rebuild_in_vain(queue: Queue) -> None:
        await rebuild(queue)
        disk.files[path].data[:60] = bytes(60)

    disk.files[path].data[:60] = bytes(60)
    with monkeypatch.context() as patch:
        patch.setattr(Repairs, "repair", lambda self, queue: rebuild_in_vain(queue))
        with pytest.raises(Refused, match=r"'A/0' is damaged again.*check the disk"):
            await store.readers.read_far(queue, 0, 2, 1000)
    assert (await store.readers.read_far(queue, 0, 2, 1000)).count == 2
    store.crash()
