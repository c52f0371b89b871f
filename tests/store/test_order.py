"""A record whose queue offset contradicts its neighbours is the damaged one, and costs its own place at most."""

from random import Random

import pytest

from martlet.message import Placed
from martlet.store import Store
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import drain, message

from .test_deletion import open_on, send

COUNT = 100
OFFSET_AT = 20  # of the record
LOW_BYTE = OFFSET_AT + 7


async def filled() -> tuple[FakeDisk, list[Placed]]:
    """A store whose last checkpoint is before half of its records."""
    disk = FakeDisk()
    store = await open_on(disk)
    placed: list[Placed] = []
    for number in range(COUNT):
        placed.append(store.writer.append(message(f"{number}", "T"), 0))
        send(store, "Other", f"{number}")
        if number == COUNT // 2:
            store.flusher.flush_now()
            await store.upkeep.checkpointer.checkpoint()
    store.flusher.flush_now()
    store.crash()
    return disk, placed


def change(disk: FakeDisk, position: int, value: int) -> None:
    (path,) = (path for path in disk.files if "/commitlog/" in path)
    disk.files[path].data[position] = value


def forget(disk: FakeDisk, names: tuple[str, ...]) -> None:
    for path in [path for path in disk.files if path.startswith(tuple(f"/data/{name}" for name in names))]:
        disk.unlink(path)


def check(store: Store, number: int) -> None:
    found = drain(store, store.queue("T", 0))
    wanted = [b"%d" % n for n in range(COUNT)]
    assert found in (wanted, wanted[:number] + wanted[number + 1 :])
    assert store.queue("T", 0).next_offset in (COUNT, COUNT + 1)
    assert len(drain(store, store.queue("Other", 0))) == COUNT


REBUILT = [(), ("consumequeue",), ("checkpoint",)]


@pytest.mark.parametrize("gone", REBUILT, ids=str)
@pytest.mark.parametrize("number", [0, 1, 2, COUNT // 2, COUNT // 2 + 1, COUNT // 2 + 2, COUNT - 2, COUNT - 1])
async def test_a_damaged_offset_costs_that_record_at_most(number: int, gone: tuple[str, ...]) -> None:
    disk, placed = await filled()
    (path,) = (path for path in disk.files if "/commitlog/" in path)
    at = placed[number].position
    for byte in range(OFFSET_AT, OFFSET_AT + 8):
        old = disk.files[path].data[at + byte]
        bits = range(8) if byte >= LOW_BYTE - 1 else (0, 7)
        for value in {0} | {old ^ 1 << bit for bit in bits}:
            found = disk.after_power_cut(Cut.KILLED, Random(0))
            change(found, at + byte, value)
            forget(found, gone)
            store = await open_on(found)
            check(store, number)
            send(store, "T", "next")
            store.flusher.flush_now()
            await store.close()
            store = await open_on(found)
            assert drain(store, store.queue("T", 0))[-1] == b"next"
            store.crash()


@pytest.mark.parametrize("gone", REBUILT, ids=str)
async def test_a_record_that_strayed_into_another_queue_costs_that_record_at_most(gone: tuple[str, ...]) -> None:
    disk, placed = await filled()
    for number in (0, 1, COUNT // 2 + 1, COUNT - 2, COUNT - 1):
        found = disk.after_power_cut(Cut.KILLED, Random(0))
        change(found, placed[number].position + 15, 1)  # of the queue id
        forget(found, gone)
        store = await open_on(found)
        found_bodies = drain(store, store.queue("T", 0))
        wanted = [b"%d" % n for n in range(COUNT)]
        assert found_bodies in (wanted, wanted[:number] + wanted[number + 1 :])
        store.crash()


async def test_a_start_that_retention_has_shortened_believes_no_single_record() -> None:
    """The log no longer begins at 0, so a queue may begin at any offset; two records that agree outvote one."""
    disk, _ = await filled()
    store = await open_on(disk)
    send(store, "T", *("x" * 1000 for _ in range(80)))
    store.flusher.flush_now()
    await store.upkeep.checkpointer.checkpoint()
    store.segments.remove_first()
    store.upkeep.retention._update_after_removal()
    queue = store.queue("T", 0)
    first, end = queue.first_offset, queue.next_offset
    assert COUNT < first < end - 3
    position = store.queues.position_at(queue, first)
    await store.close()
    for bit in range(0, 60, 4):
        found = disk.after_power_cut(Cut.KILLED, Random(0))
        path = max(path for path in found.files if "/commitlog/" in path)
        at = position - int(path[-20:])
        found.files[path].data[at + OFFSET_AT + 7 - bit // 8] ^= 1 << bit % 8
        forget(found, ("checkpoint", "consumequeue"))
        store = await open_on(found)
        queue = store.queue("T", 0)
        assert queue.next_offset == end
        assert len(drain(store, queue)) >= end - first - 1
        store.crash()
