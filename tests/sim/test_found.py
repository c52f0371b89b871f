"""What the simulation has found, as short as it can be said."""

import errno
import random
from pathlib import Path

import pytest
import trio

from martlet.errors import Refused
from martlet.store import ReadStatus, Store
from martlet.store.disk.files import Files
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import ManualClock, bodies, drain, message, small_config

from .disk import SlowDisk


async def test_records_lost_when_a_full_disk_stops_a_new_segment_are_not_committed() -> None:
    """Their appends have returned: only the commit can say that they are not stored (seed 216)."""
    disk = FakeDisk()
    store = await Store.open(Path("/data"), small_config(), ManualClock(), disk)
    stored = store.writer.append(message("stored"), 0)
    store.committer.commit()
    for _ in range(6):
        store.writer.append(message("x" * 500), 0)
    disk.fail_next("write", errno.ENOSPC)
    with pytest.raises(Refused, match="is full"):
        store.writer.append(message("x" * 500), 0)
    with pytest.raises(Refused, match="is full"):
        store.committer.commit()
    store.committer.commit()
    store.flusher.flush_now()
    assert store.readable == stored.end
    queue = store.queue("T", 0)
    assert (queue.next_offset, bodies(store.readers.read(queue, 0, 32, 65536).pieces)) == (1, [b"stored"])
    store.crash()


async def test_a_stop_amid_a_checkpoint_loses_no_entry_of_a_queue() -> None:
    """What the checkpoint was about to sync is synced, or an orderly stop claims too much (seed 282)."""
    disk = FakeDisk()
    config = small_config(keys_index=False)
    store = await Store.open(Path("/data"), config, ManualClock(), disk)
    sent = [b"%d" % number for number in range(20)]
    # The second part ends where a file of the queue does, so that what follows does not touch that file again.
    for first, end in ((0, 5), (5, config.queue_file_entries), (config.queue_file_entries, 20)):
        for body in sent[first:end]:
            store.writer.append(message(body), 0)
        store.committer.commit()
        store.flusher.flush_now()
        with trio.CancelScope() as stop:
            if first == 5:
                stop.cancel()
            await store.upkeep.checkpointer.checkpoint()
    await store.close()
    found = await Store.open(Path("/data"), config, ManualClock(), disk.after_power_cut(Cut.LOST, random.Random(0)))
    assert drain(found, found.queue("T", 0)) == sent
    found.crash()


async def test_a_read_that_retention_overtakes_passes_nothing_over(autojump_clock: trio.testing.MockClock) -> None:
    """The entries it was to read are removed while it waits for the disk (seed 713)."""
    disk = FakeDisk()
    slow = SlowDisk(disk, random.Random(0), 1.0, lambda path: None)
    store = await Store.open(Path("/data"), small_config(disk_clean_ratio=0.85), ManualClock(), slow)
    queue = store.queue("T", 0)
    for _ in range(40):
        store.writer.append(message(bytes(300)), 0)
    store.committer.commit()
    store.flusher.flush_now()
    for _ in range(2):  # the second lets the entries leave the memory
        await store.upkeep.checkpointer.checkpoint()
    assert queue.tail_offset == 40
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def read() -> None:
            result = await store.readers.read_far(queue, 4, 40, 1 << 20)
            assert (result.status, result.next_offset) == (ReadStatus.REMOVED, queue.first_offset)

        await trio.testing.wait_all_tasks_blocked()
        disk.used_ratio = 0.9
        store.upkeep.retention.look()
        assert 16 < queue.first_offset < 40
    store.crash()


async def test_the_end_of_what_is_readable_is_near_even_if_what_is_behind_has_left_the_memory() -> None:
    """Whoever reads there would be told a while later that nothing is there, when there is (seed 604)."""
    store = await Store.open(Path("/data"), small_config(cache_bytes=0), ManualClock(), FakeDisk())
    queue = store.queue("T", 0)
    for _ in range(8):
        store.writer.append(message(bytes(300)), 0)
    store.committer.commit()
    assert store.readers.end_offset(queue) == 0
    assert store.readers.read_near(queue, 0, 1, 1) is not None
    store.flusher.flush_now()
    assert store.readers.read_near(queue, 0, 1, 1) is None
    store.crash()


async def test_a_queue_of_which_nothing_is_left_goes_on_where_it_ended_whenever_the_power_goes() -> None:
    """Segments stay until the entries of their queues are on the disk, however full that is."""
    disk = FakeDisk()
    config = small_config(disk_clean_ratio=0.85)
    store = await Store.open(Path("/data"), config, ManualClock(), disk)
    for _ in range(40):
        store.writer.append(message(bytes(300)), 0)
    store.writer.append(message(bytes(3000), topic="U"), 0)
    store.writer.append(message(bytes(3000), topic="U"), 0)
    store.committer.commit()
    store.flusher.flush_now()
    disk.used_ratio = 0.9
    for covered in (False, True):
        if covered:
            await store.upkeep.checkpointer.checkpoint()
        store.upkeep.retention.look()
        assert (store.first_position > 0) is covered
        left = disk.after_power_cut(Cut.LOST, random.Random(0))
        found = await Store.open(Path("/data"), config, ManualClock(), left)
        queue = found.queue("T", 0)
        assert (queue.first_offset, found.readers.end_offset(queue)) == ((40 if covered else 0), 40)
        found.crash()
    store.crash()


async def test_a_thread_reads_nothing_of_a_segment_that_goes_at_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may look before, after and amid each step of the removal."""
    found: list[object] = []
    slow = SlowDisk(FakeDisk(), random.Random(0), 0.0, lambda path: found.append(store.segments.find(0)))
    store = await Store.open(Path("/data"), small_config(), ManualClock(), slow)
    for _ in range(40):
        store.writer.append(message(bytes(300)), 0)
    store.committer.commit()
    segments = store.segments
    second = segments.items[1]
    read = Files.read

    def overtaken(self: Files, path: str, size: int, position: int) -> bytes:
        if path == segments.items[0].path:
            segments.remove_first()
        return read(self, path, size, position)

    monkeypatch.setattr(Files, "read", overtaken)
    assert segments.read(0, 100) == b""
    assert found == [None]
    assert segments.find(second.start) is second
    starts, items = segments._starts, segments.items
    for segments._starts, segments.items in ((starts[1:], items), (starts, items[1:])):
        assert [segments.find(each.start) for each in items[1:]] == items[1:]
    store.crash()
