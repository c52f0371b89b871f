"""The records of several queues in log order: how far the merge came, what it leaves out, how long a run is."""

from errno import EIO
from random import Random

import pytest
from tests.state.tally import ROOT, send

from martlet.records.layout import BLANK_SIZE
from martlet.state import log_order
from martlet.state.log_order import LogOrder, Run
from martlet.store import Store
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import ManualClock, small_config


async def open_store(disk: FakeDisk | None = None, **changes: int | str) -> Store:
    return await Store.open(ROOT, small_config(**{"flush": "async", **changes}), ManualClock(), disk or FakeDisk())


def follow(store: Store, *topics: str) -> LogOrder:
    order = LogOrder(store)
    for topic in topics:
        order.add(store.queue(topic, 0))
    return order


def bodies(run: Run | None) -> list[str]:
    assert run is not None
    return [bytes(record.body).decode() for record in run]


async def test_what_was_passed_is_known_after_each_run_and_not_during_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_order, "RUN_RECORDS", 2)
    store = await open_store()
    send(store, "A", "a1", "a2", "a3")
    order = follow(store, "A")
    assert (order.passed(1), order.at_end) == (False, False)
    run = order.next_run_nowait()
    assert bodies(run) == ["a1", "a2"]
    end = order.position + order.size
    assert (order.passed(end), order.passed(end + 1), order.at_end) == (True, False, False)
    order.busy = True
    assert not order.passed(end)
    order.busy = False
    assert bodies(order.next_run_nowait()) == ["a3"]
    assert order.at_end
    assert order.passed(1 << 40)
    order.busy = True
    assert not order.passed(1)
    store.crash()


async def test_what_retention_removed_before_it_was_read_is_left_out() -> None:
    store = await open_store()
    send(store, "A", *(f"a{number}" for number in range(9)))
    order = follow(store, "A")
    store.queue("A", 0).store_from(5)
    assert bodies(order.next_run_nowait()) == ["a5", "a6", "a7", "a8"]
    assert order.at_end
    store.queue("A", 0).store_from(9)
    behind = follow(store, "A")
    assert bodies(behind.next_run_nowait()) == []
    store.crash()


async def test_lost_messages_of_a_queue_are_passed_over_and_are_no_damage() -> None:
    store = await open_store(cache_bytes=0, page_bytes=256)
    send(store, "A", "a1")
    store.queue("A", 0).add_holes(3, store.appended)
    send(store, "A", "a2")
    send(store, "B", *(f"b{number}" for number in range(20)))
    order = follow(store, "A", "B")
    assert order._load_next()
    taken = order._next_entries()
    assert [size == BLANK_SIZE for _, size, _ in taken[:5]] == [False, True, True, True, False]
    run = order._read_far(taken)
    order._advance(taken, run)
    assert bodies(run) == ["a1", "a2", *(f"b{number}" for number in range(20))]
    assert (store.readers.damaged_records, order.at_end) == (0, True)
    store.crash()


async def test_records_before_the_start_of_the_log_are_not_read() -> None:
    disk = FakeDisk()
    store = await open_store(disk, segment_bytes=4096)
    send(store, "A", *(f"{number:0100d}" for number in range(60)))
    order = follow(store, "A")
    assert order._load_next()
    taken = order._next_entries()
    start = store.segments.items[1].start
    store.segments.remove_first()
    run = order._read_far(taken)
    assert [record.position for record in run] == [position for position, _, _ in taken if position >= start]
    assert store.readers.damaged_records == 0
    store.crash()


async def test_records_after_a_segment_whose_file_is_short_are_read() -> None:
    """A power cut may lose the size of a file. A start sets it only for the last file, which has no record and goes."""
    disk = FakeDisk()
    store = await open_store(disk)
    send(store, "A", "a1", "a2")
    (segment,) = store.segments.items
    torn = disk.after_power_cut(Cut.KILLED, Random(0))
    torn.files[segment.path].change(store.appended - segment.start, None)
    following = torn.open(segment.path.replace(f"{segment.start:020d}", f"{segment.end:020d}"), create=True)
    torn.truncate(following, segment.end - segment.start)
    torn.close(following)
    store.crash()
    store = await open_store(torn)
    sent = [f"{number:0100d}" for number in range(30)]
    send(store, "A", *sent)
    assert torn.path_size(segment.path) < segment.end - segment.start
    await store.close()
    store = await open_store(torn, cache_bytes=0)
    order = follow(store, "A")
    assert order.next_run_nowait() is None
    assert bodies(await order.next_run()) == ["a1", "a2", *sent]
    assert store.readers.damaged_records == 0
    store.crash()


async def test_a_run_ends_before_the_record_that_crosses_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await open_store()
    send(store, "A", *(f"{number:050d}" for number in range(9)))
    whole = follow(store, "A").next_run_nowait()
    assert whole is not None
    size = whole[0].size
    for limit, count in ((3 * size, 3), (4 * size - 1, 3), (4 * size, 4), (1, 1)):
        monkeypatch.setattr(log_order, "RUN_BYTES", limit)
        assert len(follow(store, "A").next_run_nowait() or ()) == count
    store.crash()


async def test_a_run_that_waits_for_the_disk_is_over_when_it_is_returned() -> None:
    disk = FakeDisk()
    store = await open_store(disk, cache_bytes=0, page_bytes=256)
    send(store, "A", *(f"{number:0100d}" for number in range(30)))
    order = follow(store, "A")
    assert order.next_run_nowait() is None
    run = await order.next_run()
    assert bodies(run)[0] == f"{0:0100d}"
    assert (order.busy, order.passed(order.position + order.size)) == (False, True)
    disk.fail_next("read", EIO)
    behind = follow(store, "A")
    with pytest.raises(OSError, match="Input/output error"):
        await behind.next_run()
    assert not behind.busy
    assert bodies(await behind.next_run()) == bodies(run)
    store.crash()
