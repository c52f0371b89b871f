"""A deleted topic stays deleted: through kills and power cuts, rebuilds, and saves that come late."""

import errno
import shutil
from pathlib import Path
from random import Random

import pytest
import trio
from trio.testing import MockClock

from martlet.runtime.steps import finish_now
from martlet.store import Store
from martlet.store.format.notes import NOTES_TOPIC
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import HOST, ManualClock, bodies, drain, message, small_config

from .conftest import OpenStore

ROOT = Path("/data")
CONFIG = small_config(flush="async", segment_bytes=65536)


async def open_on(disk: FakeDisk) -> Store:
    store = await Store.open(ROOT, CONFIG, ManualClock(), disk)
    store.writer.store_host = HOST
    return store


def send(store: Store, topic: str, *texts: str, queue_id: int = 0) -> None:
    for text in texts:
        store.writer.append(message(text, topic, unique=f"{topic}-{text}"), queue_id)
    store.committer.commit()


def numbers(count: int, label: str = "") -> list[str]:
    return [f"{label}{number}" for number in range(count)]


@pytest.mark.parametrize("gone", [(), ("consumequeue",), ("index",), ("queues.",), ("checkpoint", "index")], ids=str)
async def test_a_deletion_that_is_durable_survives_a_kill_and_any_rebuild(gone: tuple[str, ...]) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    for number in range(10):
        send(store, f"T{number}", "x", "y", queue_id=number)
    send(store, "Kept", *numbers(5))
    store.flusher.flush_now()
    await store.upkeep.checkpointer.checkpoint()
    for number in range(10):
        store.deletions.delete_topic(f"T{number}")
    store.flusher.flush_now()
    store.crash()
    for path in [path for path in disk.files if path.startswith(tuple(f"/data/{name}" for name in gone))]:
        disk.unlink(path)
    store = await open_on(disk)
    assert store.topics_on_disk() == ["Kept"]
    assert finish_now(store.lookup.query_keys("T1", b"T1-x", 9, 0, 2**62)).records == []
    assert len(finish_now(store.lookup.query_keys("Kept", b"Kept-1", 9, 0, 2**62)).records) == 1
    assert disk.names("/data/consumequeue") == ["Kept"]
    store.crash()


async def test_a_deletion_that_was_not_durable_is_undone_by_a_power_cut() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "T", *numbers(20))
    store.flusher.flush_now()
    await store.upkeep.checkpointer.checkpoint()
    store.deletions.delete_topic("T")
    await store.upkeep.checkpointer.checkpoint()
    for cut in (Cut.LOST, Cut.TORN):
        found = await open_on(disk.after_power_cut(cut, Random(0)))
        whole = [text.encode() for text in numbers(20)]
        assert drain(found, found.queue("T", 0)) in ([], whole)
        assert cut is Cut.TORN or drain(found, found.queue("T", 0)) == whole
        found.crash()
    store.crash()


async def test_a_start_after_a_deletion_and_a_kill_reads_the_log_from_the_checkpoint_only() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "Kept", *numbers(100))
    send(store, "T", *numbers(10))
    store.flusher.flush_now()
    await store.upkeep.checkpointer.checkpoint()
    store.deletions.delete_topic("T")
    store.flusher.flush_now()
    store.upkeep.checkpointer._deleted.take(0)
    await (
        store.upkeep.checkpointer.checkpoint()
    )  # its files are gone, and the next kill comes before the checkpoint page
    killed = disk.after_power_cut(Cut.KILLED, Random(0))
    store = await open_on(killed)
    assert store.topics_on_disk() == ["Kept"]
    assert store.statistics().recovered_records < 5
    store.crash()


async def test_a_topic_made_again_has_only_its_new_messages() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "T", *numbers(40, "old"))
    store.deletions.delete_topic("T")
    send(store, "T", *numbers(17, "new"))
    wanted = [text.encode() for text in numbers(17, "new")]
    assert drain(store, store.queue("T", 0)) == wanted
    store.flusher.flush_now()
    await store.upkeep.checkpointer.checkpoint()
    store.crash()
    for gone in ("consumequeue", "checkpoint"):
        found = disk.after_power_cut(Cut.KILLED, Random(0))
        for path in [path for path in found.files if path.startswith(f"/data/{gone}")]:
            found.unlink(path)
        store = await open_on(found)
        assert drain(store, store.queue("T", 0)) == wanted
        assert finish_now(store.lookup.query_keys("T", b"T-old3", 9, 0, 2**62)).records == []
        store.crash()


async def test_a_topic_made_again_after_the_checkpoint_has_only_its_new_messages_without_its_old_files() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "T", *numbers(40, "old"))
    store.flusher.flush_now()
    await store.upkeep.checkpointer.checkpoint()
    store.deletions.delete_topic("T")
    send(store, "T", *numbers(17, "new"))
    store.flusher.flush_now()
    store.crash()
    for path in [path for path in disk.files if path.startswith("/data/consumequeue/T/")]:
        disk.unlink(path)
    wanted = [text.encode() for text in numbers(17, "new")]
    for _ in range(2):
        store = await open_on(disk)
        assert drain(store, store.queue("T", 0)) == wanted
        await store.close()


async def test_no_single_damaged_record_brings_a_topic_back() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "T", *numbers(3))
    start = store.written
    store.deletions.delete_topic("T")
    end = store.written
    await store.close()
    for at in range(start, end):
        found = disk.after_power_cut(Cut.KILLED, Random(0))
        (path,) = (path for path in found.files if "/commitlog/" in path)
        found.files[path].data[at] ^= 1
        for name in [path for path in found.files if path.startswith("/data/queues.")]:
            found.unlink(name)
        store = await open_on(found)
        assert "T" not in store.topics_on_disk()
        store.crash()


async def test_files_of_a_deleted_topic_are_not_written_again(
    autojump_clock: MockClock, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Topics are deleted while a save, which has its list of queues already, is under way."""
    monkeypatch.setattr("martlet.store.upkeep.checkpointer.SAVE_BATCH", 1)
    store = await open_store(small_config(flush="async", persist_interval_ms=10, checkpoint_interval_ms=50))
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        for number in range(100):
            for topic in ("T", "U", "V"):
                send(store, topic, f"{number}")
            await trio.sleep(0.011)
            with trio.move_on_after(1):
                for _ in range(number % 4):
                    await trio.lowlevel.checkpoint()
                store.deletions.delete_topic("V")
            send(store, "V", f"again {number}")
            assert drain(store, store.queue("V", 0)) == [b"again %d" % number]
            await trio.sleep(0.1)
            assert drain(store, store.queue("V", 0)) == [b"again %d" % number]
            store.deletions.delete_topic("V")
            await trio.sleep(2)
            assert "V" not in store.disk.names(f"{store.data_directory.path}/consumequeue")
        nursery.cancel_scope.cancel()


async def test_a_directory_of_a_deleted_topic_that_is_put_back_does_not_surface(
    open_store: OpenStore, tmp_path: Path
) -> None:
    store = await open_store()
    for number in range(20):
        send(store, "T", f"old {number}")
    await store.close()
    queues = tmp_path / "store" / "consumequeue"
    shutil.copytree(queues / "T", tmp_path / "copy")
    store = await open_store()
    store.deletions.delete_topic("T")
    await store.close()
    shutil.copytree(tmp_path / "copy", queues / "T")
    store = await open_store()
    assert store.topics_on_disk() == []
    await store.close()
    shutil.copytree(tmp_path / "copy", queues / "T")
    store = await open_store()
    send(store, "T", "new")
    assert bodies(store.readers.read(store.queue("T", 0), 0, 9, 9999).pieces) == []
    store.flusher.flush_now()
    assert drain(store, store.queue("T", 0)) == [b"new"]
    await store.close()
    assert len(list((queues / "T" / "0").iterdir())) == 1


async def test_nobody_can_read_the_stores_own_records(open_store: OpenStore) -> None:
    store = await open_store()
    send(store, "T", "x")
    position = store.written
    store.deletions.delete_topic("T")
    store.flusher.flush_now()
    assert store.lookup.record_at(position) is None
    assert store.queues.find(NOTES_TOPIC, 0) is None
    assert store.topics_on_disk() == []
    await store.close()
    store = await open_store()
    assert store.topics_on_disk() == []


async def test_a_directory_that_cannot_be_removed_is_named_and_tried_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "T", "x")
    store.flusher.flush_now()
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        await store.upkeep.checkpointer.checkpoint()
        store.deletions.delete_topic("T")
        disk.fail_next("remove_directory", errno.EACCES)
        await trio.sleep(2)
        await store.upkeep.checkpointer.checkpoint()
        assert disk.names("/data/consumequeue") == []
        nursery.cancel_scope.cancel()
    warned = [record.getMessage() for record in caplog.records if "cannot be removed" in record.getMessage()]
    assert warned == [
        "/data/consumequeue/T/0 is no longer used and cannot be removed: Permission denied; trying again later"
    ]
    store.crash()


@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "killed"])
@pytest.mark.parametrize("also", ["nothing", "consumequeue", "checkpoint", "queues."])
async def test_a_deletion_in_a_lost_segment_is_known_or_in_doubt(also: str, clean: bool) -> None:
    disk = FakeDisk()
    config = small_config(flush="async", segment_bytes=4096)
    store = await Store.open(ROOT, config, ManualClock(), disk)
    send(store, "T", *numbers(20))
    send(store, "Kept", *numbers(20))
    await store.upkeep.checkpointer.checkpoint()
    position = store.appended
    store.deletions.delete_topic("T")
    store.flusher.flush_now()
    send(store, "Kept", *numbers(40, "later"))
    await store.upkeep.checkpointer.checkpoint()
    segment = store.segments.find(position)
    assert segment is not None
    assert store.segments.items[0] is not segment
    assert store.segments.items[-1] is not segment
    if clean:
        await store.close()
    else:
        store.crash()
    for path in list(disk.files):
        if path == segment.path or path.startswith(f"/data/{also}"):
            disk.unlink(path)
    store = await Store.open(ROOT, config, ManualClock(), disk)
    known = also in ("nothing", "consumequeue")
    assert store.topics_on_disk() == (["Kept"] if known else ["Kept", "T"])
    assert store.recovered.unlisted == (set() if known else {"T"})
    store.crash()


async def test_queue_files_of_a_topic_without_records_are_removed_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "Kept", *numbers(3))
    await store.close()
    disk.make_directory("/data/consumequeue/Stray/0")
    fd = disk.open(f"/data/consumequeue/Stray/0/{0:020d}", create=True)
    disk.write(fd, bytes(20), 0)
    disk.close(fd)
    store = await open_on(disk)
    assert disk.names("/data/consumequeue") == store.topics_on_disk() == ["Kept"]
    assert "topic Stray has consume queues but no records; removing them" in caplog.text
    store.crash()
