"""The next offset of a queue without records is in the log, so a rebuild does not start at 0 again."""

from errno import ENOSPC
from pathlib import Path
from random import Random

import pytest
import trio
from trio.testing import MockClock

from martlet.errors import Refused
from martlet.store import Store
from martlet.store.format.notes import Note, deletion, offset_notes, read_note
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import HOST, ManualClock, drain, message, small_config

CONFIG = small_config(flush="async", disk_clean_ratio=0.9, retention_interval_ms=100)


async def open_on(disk: FakeDisk) -> Store:
    store = await Store.open(Path("/data"), CONFIG, ManualClock(), disk)
    store.writer.store_host = HOST
    return store


def send(store: Store, topic: str, count: int, size: int = 100) -> None:
    for _ in range(count):
        store.writer.append(message(b"x" * size, topic), 0)
        store.committer.commit()


async def remove_all_but_the_last(store: Store, disk: FakeDisk) -> None:
    await store.flusher.flush()
    await store.upkeep.checkpointer.checkpoint()
    disk.used_ratio = 0.95
    for _ in range(10):
        store.upkeep.retention.look()
    disk.used_ratio = 0.1
    assert len(store.segments.items) == 1


def without(disk: FakeDisk, *names: str) -> FakeDisk:
    found = disk.after_power_cut(Cut.KILLED, Random(0))
    for path in [path for path in found.files if path.startswith(tuple(f"/data/{name}" for name in names))]:
        found.unlink(path)
    return found


@pytest.mark.parametrize("gone", [(), ("consumequeue",), ("queues.",), ("checkpoint", "consumequeue")], ids=str)
@pytest.mark.parametrize("rounds", [1, 3])
async def test_an_empty_queue_continues_at_its_offset(rounds: int, gone: tuple[str, ...]) -> None:
    """Notes are repeated when the segment that holds them goes."""
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "Idle", 7)
    for _ in range(rounds):
        send(store, "Busy", 120)
        await remove_all_but_the_last(store, disk)
    busy = store.queue("Busy", 0).next_offset
    store.crash()
    store = await open_on(without(disk, *gone))
    idle = store.queue("Idle", 0)
    assert (idle.first_offset, idle.next_offset) == (7, 7)
    assert store.queue("Busy", 0).next_offset == busy
    placed = store.writer.append(message(b"next", "Idle"), 0)
    store.committer.commit()
    assert placed.queue_offset == 7
    store.crash()


@pytest.mark.parametrize("gone", [(), ("consumequeue",), ("queues.",), ("checkpoint", "consumequeue")], ids=str)
@pytest.mark.parametrize("restarts", [False, True])
async def test_a_queue_that_only_a_note_names_outlives_the_segment_of_the_note(
    restarts: bool, gone: tuple[str, ...]
) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    store.notes.note_offsets([store.queue("Waiting", 2)])
    for _ in range(2):
        send(store, "Busy", 120)
        await remove_all_but_the_last(store, disk)
        if restarts:
            store.crash()
            disk = without(disk)
            store = await open_on(disk)
    store.crash()
    store = await open_on(without(disk, *gone))
    assert list(store.queues.topics["Waiting"]) == [2]
    assert store.queue("Waiting", 2).next_offset == 0
    store.crash()


async def test_a_note_after_lost_records_keeps_the_messages_before_them() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "T", 5)
    await store.flusher.flush()
    await store.upkeep.checkpointer.checkpoint()
    lost = [store.writer.append(message(b"lost", "T"), 0) for _ in range(2)]
    store.notes.note_offsets([store.queue("T", 0)])
    store.committer.commit()
    await store.flusher.flush()
    store.crash()
    fd = disk.open("/data/commitlog/00000000000000000000")
    disk.write(fd, bytes(lost[-1].end - lost[0].position), lost[0].position)
    disk.close(fd)
    store = await open_on(disk)
    queue = store.queue("T", 0)
    assert (queue.first_offset, queue.next_offset) == (0, 7)
    assert drain(store, queue) == [b"x" * 100] * 5
    store.crash()


async def test_notes_are_durable_before_records_go(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "Idle", 7)
    send(store, "Busy", 120)
    await store.flusher.flush()
    await store.upkeep.checkpointer.checkpoint()
    cuts: list[FakeDisk] = []
    disk.on_change = lambda name: cuts.append(disk.after_power_cut(Cut.LOST, Random(0)))
    disk.used_ratio = 0.95
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        await trio.sleep(2)
        nursery.cancel_scope.cancel()
    disk.on_change = None
    assert len(store.segments.items) == 1
    assert len(cuts) > 3
    for cut in cuts:
        found = await open_on(without(cut, "queues.", "consumequeue"))
        assert found.queue("Idle", 0).next_offset == 7
        found.crash()
    store.crash()


async def test_a_full_disk_is_cleaned_though_no_note_finds_space() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "Idle", 7)
    send(store, "Busy", 120)
    await store.flusher.flush()
    await store.upkeep.checkpointer.checkpoint()
    disk.total_bytes = 100_000
    disk.free_bytes = 0
    store.admission.refusal = "full"
    for _ in range(5):
        store.upkeep.retention.look()
    assert disk.free_bytes > 0
    disk.free_bytes = 90_000
    store.upkeep.retention.look()
    store.upkeep.retention.look()
    await store.flusher.flush()
    store.crash()
    store = await open_on(without(disk, "queues.", "consumequeue"))
    assert store.queue("Idle", 0).next_offset == 7
    store.crash()


def test_notes_are_split_and_read_back() -> None:
    ends = [(f"topic-{number}", number, number * 10) for number in range(500)]
    notes = list(offset_notes(ends, 2000, HOST, 1))
    assert len(notes) > 5
    assert all(len(note.body) <= 2000 for note in notes)
    assert [end for note in notes for end in read_note(note.body).ends] == ends
    assert read_note(deletion("T", HOST, 1).body) == Note("T", [], [])
    assert read_note(b"\xc1") == Note()
    assert read_note(b"\x01") == Note()


async def test_a_note_that_meets_a_full_disk_fails_the_commit_of_its_round() -> None:
    """It commits what others appended before it, whose answers must not be sent."""
    disk = FakeDisk()
    store = await open_on(disk)
    send(store, "Idle", 1)
    store.writer.append(message(b"of a client", "Busy"), 0)
    disk.fail_next("write", ENOSPC)
    with pytest.raises(Refused):
        store.notes.note_offsets([store.queue("Idle", 0)])
    with pytest.raises(Refused):
        store.committer.commit()
    store.committer.commit()
    assert store.queue("Busy", 0).next_offset == 0
    store.crash()
