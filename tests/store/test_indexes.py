"""Finding messages: by key, by time, after retention, and while the key index is being rebuilt."""

import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from martlet.errors import NotReady
from martlet.message import Message
from martlet.records.codec import decode_record, key_hash
from martlet.records.layout import HEAD_BYTES
from martlet.runtime.steps import Steps, finish_now, per_slice
from martlet.store import Store, StoreConfig
from martlet.store.disk.checkpoint import read_checkpoint
from martlet.store.disk.files import Files
from martlet.store.keys.index_files import ITEM
from martlet.store.keys.key_index import KeyIndex
from martlet.store.queues.queues import Queue
from martlet.store.read.lookup import LOOK_US
from martlet.store.upkeep.checkpointer import SAVE_OFTEN_MAX
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import ManualClock, drain, message, small_config

OpenStore = Callable[..., Awaitable[Store]]


def put(store: Store, *messages: Message, queue_id: int = 0) -> None:
    for one in messages:
        store.writer.append(one, queue_id)
    store.committer.commit()
    store.flusher.flush_now()


def found(store: Store, key: str, topic: str = "T", count: int = 64, begin: int = 0, end: int = 2**62) -> list[bytes]:
    records = finish_now(store.lookup.query_keys(topic, key.encode(), count, begin, end)).records
    return [decode_record(data).body for data in records]


def index_config() -> StoreConfig:
    """A store whose index has room for thousands of keys in one file."""
    return replace(small_config(segment_bytes=1 << 22), index_slots=1024, index_entries=5000)


async def test_messages_are_found_by_every_key_newest_first(open_store: OpenStore) -> None:
    store = await open_store()
    put(store, message("1", keys="a b", unique="U1"), message("2", keys="b  c", unique="U2"), message("3", topic="X"))
    assert found(store, "b") == [b"2", b"1"]
    assert found(store, "a") == [b"1"]
    assert found(store, "U2") == [b"2"]
    assert found(store, "b", count=1) == [b"2"]
    assert found(store, "a", topic="X") == []
    await store.close()
    store = await open_store()
    assert found(store, "b") == [b"2", b"1"]


async def test_a_query_returns_how_far_the_index_reaches(open_store: OpenStore, clock: ManualClock) -> None:
    store = await open_store()
    put(store, message("1", keys="a"))
    answer = finish_now(store.lookup.query_keys("T", b"a", 1, 0, 2**62))
    assert (answer.index_ms, answer.index_position) == (clock.ms, store.written)


async def test_what_is_not_durable_is_not_found(open_store: OpenStore) -> None:
    store = await open_store()
    store.writer.append(message("1", keys="a"), 0)
    store.committer.commit()
    assert found(store, "a") == []
    store.flusher.flush_now()
    assert found(store, "a") == [b"1"]


async def test_a_query_keeps_to_its_times(open_store: OpenStore, clock: ManualClock) -> None:
    store = await open_store()
    start = clock.ms
    for second in range(5):
        clock.ms = start + second * 10_000
        put(store, message(str(second), keys="k"))
    assert found(store, "k", begin=start + 9_000, end=start + 31_000) == [b"3", b"2", b"1"]
    assert found(store, "k", begin=start + 50_000) == []


async def test_a_long_chain_of_one_key_is_walked_in_slices(open_store: OpenStore, clock: ManualClock) -> None:
    store = await open_store(index_config())
    start = clock.ms
    put(store, message("first", keys="k"))
    clock.ms += 60_000
    put(store, *(message(str(number), keys="k") for number in range(1500)))
    steps = store.lookup.query_keys("T", b"k", 64, 0, start + 1000)
    assert sum(1 for _ in steps) >= 10, "half of them while the messages are indexed, half on the way to the first"
    assert found(store, "k", end=start + 1000) == [b"first"]


async def test_an_index_file_may_go_while_a_query_walks_it(open_store: OpenStore, clock: ManualClock) -> None:
    store = await open_store(index_config())
    start = clock.ms
    put(store, message("first", keys="k"))
    clock.ms += 60_000
    put(store, *(message(str(number), keys="k") for number in range(600)))
    keys = store.keys
    assert isinstance(keys, KeyIndex)
    while keys.drain(1000):
        pass
    steps = store.lookup.query_keys("T", b"k", 64, 0, start + 500)
    next(steps)
    keys.clear()
    assert finish_now(steps).records == []


async def test_a_query_takes_no_more_bytes_than_it_may_but_one_record_at_least(open_store: OpenStore) -> None:
    store = await open_store()
    put(store, *(message("x" * 1000, keys="k") for _ in range(10)))
    records = finish_now(store.lookup.query_keys("T", b"k", 64, 0, 2**62, 3500)).records
    assert 2 <= len(records) <= 3
    assert sum(map(len, records)) <= 3500
    assert len(finish_now(store.lookup.query_keys("T", b"k", 64, 0, 2**62, 1)).records) == 1


async def test_keys_continue_in_another_file_when_one_is_full(open_store: OpenStore) -> None:
    store = await open_store(small_config(segment_bytes=65536))
    for number in range(300):
        put(store, message(str(number), keys=f"k{number % 7}", unique=f"U{number}"))
    assert [found(store, f"U{n}") for n in range(300)] == [[b"%d" % n] for n in range(300)]
    assert len(store.disk.names(f"{store.data_directory.path}/index")) > 3
    assert found(store, "k3", count=100) == [b"%d" % n for n in range(299, -1, -1) if n % 7 == 3]
    await store.close()
    store = await open_store(small_config(segment_bytes=65536))
    assert found(store, "k3", count=100) == [b"%d" % n for n in range(299, -1, -1) if n % 7 == 3]


@pytest.mark.parametrize(
    "key", ["", "short", "7F0000010A2B18B4AAC2000000100001", "ä€😀", "x" * 255, "y" * 256, "z" * 900]
)
async def test_the_fast_hash_is_the_hash(open_store: OpenStore, key: str) -> None:
    store = await open_store()
    keys = store.keys
    assert isinstance(keys, KeyIndex)
    for topic in ("T", "%RETRY%gruppe-ü"):
        for _ in range(2):
            assert keys.hashes.of(Queue(topic, 0), key.encode()) == key_hash(topic, key.encode())


async def test_offsets_are_found_by_time(open_store: OpenStore, clock: ManualClock) -> None:
    store = await open_store()
    queue = store.queue("T", 0)
    assert (finish_now(store.lookup.earliest_store_ms(queue)), finish_now(store.lookup.offset_by_time(queue, 0))) == (
        -1,
        0,
    )
    times = [100, 200, 200, 200, 300, 500]
    for at in times:
        clock.ms = at
        put(store, message("x" * 200))
    assert finish_now(store.lookup.earliest_store_ms(queue)) == 100
    assert finish_now(store.lookup.earliest_store_ms()) == 100
    for at in range(50, 600, 25):
        lower = next((i for i, t in enumerate(times) if t >= at), len(times))
        upper = max((i for i, t in enumerate(times) if t <= at), default=0)
        assert finish_now(store.lookup.offset_by_time(queue, at)) == lower
        assert finish_now(store.lookup.offset_by_time(queue, at, upper=True)) == upper


async def test_a_search_by_time_reads_a_little_in_each_slice(clock: ManualClock) -> None:
    disk = FakeDisk()
    config = small_config(flush="async", cache_bytes=0, queue_file_entries=10_000, segment_bytes=1 << 22)
    store = await Store.open(Path("/data"), config, clock, disk)
    for at in range(10_000):
        clock.ms = 1000 + at
        put(store, message(b"x"))
    await store.close()
    store = await Store.open(Path("/data"), config, clock, disk)
    for at in (0, 1, 4999, 7777, 9999):
        found: list[int] = []

        def search(at: int = at, found: list[int] = found) -> Steps[None]:
            found.append((yield from store.lookup.offset_by_time(store.queue("T", 0), 1000 + at)))

        slices, reads = 0, disk.calls["read"]
        for blocking in search():
            slices += 1
            if blocking is not None:
                blocking()
            assert disk.calls["read"] - reads <= 2 * per_slice(LOOK_US)
            reads = disk.calls["read"]
        assert found == [at]
        assert slices >= 3
    store.crash()


async def test_a_search_by_time_leaves_the_pages_that_consumers_read(open_store: OpenStore, clock: ManualClock) -> None:
    store = await open_store(small_config(cache_bytes=1024))
    queue = store.queue("T", 0)
    times = range(100, 140)
    for at in times:
        clock.ms = at
        put(store, message(bytes(187)))  # 279 bytes a record: some heads go on in the next page
    assert len(store.readers.read(queue, 39, 1, 1000).pieces) == 1
    store.readers.read(queue, 0, 1, 1000)
    held = list(store.pages._held)
    assert [finish_now(store.lookup.store_ms_at(queue, offset)) for offset in range(40)] == list(times)
    assert [finish_now(store.lookup.offset_by_time(queue, at)) for at in times] == list(range(40))
    assert list(store.pages._held) == held


async def test_old_segments_go_at_their_hour_and_take_their_indexes_along(
    open_store: OpenStore, clock: ManualClock
) -> None:
    config = small_config(delete_when="00;01;02;03;04;05;06;07;08;09;10;11;12;13;14;15;16;17;18;19;20;21;22;23")
    store = await open_store(config)
    for number in range(100):
        put(store, message(b"%d" % number + b"x" * 100, unique=f"U{number}"))
    queue = store.queue("T", 0)
    store.upkeep.retention.look()
    assert queue.first_offset == 0
    clock.ms += 73 * 3_600_000
    put(store, message(b"new", unique="new"))
    store.upkeep.retention.look()
    assert store.first_position == 0  # no checkpoint covers them
    await store.upkeep.checkpointer.checkpoint()
    store.upkeep.retention.look()
    start = store.first_position
    assert start == store.segments.items[-1].start > 0
    assert drain(store, queue)[-1] == b"new"
    assert queue.first_offset > 80
    assert found(store, "U3") == []
    assert finish_now(store.lookup.earliest_store_ms(queue)) >= 0
    await store.close()
    store = await open_store(config)
    assert (store.first_position, store.queue("T", 0).first_offset) == (start, queue.first_offset)
    assert store.statistics().recovered_records == 0


@pytest.mark.parametrize(
    ("ratio", "age_h", "gone"), [(0.5, 100, False), (0.8, 1, False), (0.8, 100, True), (0.9, 1, True)]
)
async def test_a_full_disk_hastens_retention(
    open_store: OpenStore, clock: ManualClock, ratio: float, age_h: int, gone: bool
) -> None:
    disk = FakeDisk()
    store = await open_store(small_config(disk_used_ratio_max=0.75, disk_clean_ratio=0.85), disk)
    for _ in range(100):
        put(store, message("x" * 100))
    clock.ms += age_h * 3_600_000
    put(store, message("now"))
    await store.upkeep.checkpointer.checkpoint()
    disk.used_ratio = ratio
    store.upkeep.retention.look()
    assert (store.first_position > 0) is gone
    assert len(store.segments.items) >= 1


async def test_the_key_index_is_rebuilt_while_other_work_continues(
    open_store: OpenStore, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store()
    for number in range(150):
        put(store, message(str(number), keys="k", unique=f"U{number}"))
    await store.close()
    for path in (name for name in store.disk.names(f"{store.data_directory.path}/index")):
        store.disk.unlink(f"{store.data_directory.path}/index/{path}")
    monkeypatch.setattr("martlet.store.recovery.indexer.FOLLOW_AT_ONCE_BYTES", 0)
    monkeypatch.setattr("martlet.store.recovery.indexer.FOLLOW_BYTES", 500)
    store = await open_store()
    with pytest.raises(NotReady, match="the key index is being checked or rebuilt; try again") as refused:
        found(store, "U1")
    await nursery.start(store.upkeep.run)
    put(store, message("late", unique="late"))
    await refused.value.wait()
    put(store, message("later", unique="later"))
    assert [found(store, f"U{n}") for n in range(150)] == [[b"%d" % n] for n in range(150)]
    assert found(store, "late") == [b"late"]
    assert found(store, "later") == [b"later"]
    nursery.cancel_scope.cancel()


SECONDS_AT = 12  # in an entry


def entry_of(store: Store, number: int) -> tuple[str, int]:
    """The file and the place in it of entry *number* of the only index file."""
    keys = store.keys
    assert keys is not None
    (item,) = keys.files.items
    return item.path, keys.files.entry_at(number)


@pytest.mark.parametrize("field", ["hash", "position far off", "position near by", "before"])
async def test_a_query_that_meets_damage_waits_for_the_rebuild(
    field: str, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FakeDisk()
    store = await Store.open(Path("/data"), index_config(), ManualClock(), disk)
    put(store, *(message(str(number), keys="k", unique=f"U{number}") for number in range(20)))
    await store.close()
    store = await Store.open(Path("/data"), index_config(), ManualClock(), disk)
    path, at = entry_of(store, 20)  # of the tenth message: its unique key, then k
    key, position, seconds, before = ITEM.unpack(disk.files[path].data[at : at + ITEM.size])
    damaged = {
        "hash": (key ^ 1, position, seconds, before),
        "position far off": (key, position | 1 << 50, seconds, before),
        "position near by": (key, position + 4, seconds, before),
        "before": (key, position, seconds, before + 64),
    }[field]
    disk.files[path].data[at : at + ITEM.size] = ITEM.pack(*damaged)
    for key in ("k", "U1"):
        with pytest.raises(NotReady, match="the key index is being checked or rebuilt; try again") as refused:
            found(store, key)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        await refused.value.wait()
        assert found(store, "k") == [b"%d" % number for number in range(19, -1, -1)]
        nursery.cancel_scope.cancel()
    assert caplog.text.count("the key index is damaged; rebuilding it from the log") == 1
    store.crash()


@pytest.mark.parametrize("bit", [0, 1, 12, 30, 31])
@pytest.mark.parametrize("wanted", ["all times", "its time"])
async def test_an_entry_with_a_wrong_time_hides_no_message(
    bit: int, wanted: str, autojump_clock: trio.testing.MockClock
) -> None:
    disk, clock = FakeDisk(), ManualClock()
    start = clock.ms
    store = await Store.open(Path("/data"), index_config(), clock, disk)
    for number in range(5):
        put(store, message(b"%d" % number, unique=f"U{number}"))
        clock.ms += 1000
    await store.close()
    store = await Store.open(Path("/data"), index_config(), clock, disk)
    path, at = entry_of(store, 4)  # of the fourth message
    disk.files[path].data[at + SECONDS_AT + 3 - bit // 8] ^= 1 << bit % 8
    begin, end = (0, 2**62) if wanted == "all times" else (start + 3000, start + 3000)
    with pytest.raises(NotReady, match="the key index is being checked or rebuilt; try again") as refused:
        found(store, "U3", begin=begin, end=end)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        await refused.value.wait()
        assert found(store, "U3", begin=begin, end=end) == [b"3"]
        nursery.cancel_scope.cancel()
    store.crash()


async def test_times_that_went_back_are_no_damage(open_store: OpenStore, clock: ManualClock) -> None:
    store = await open_store()
    start = clock.ms
    for seconds in (0, -50, 30):
        clock.ms = start + seconds * 1000
        put(store, message(str(seconds), keys="k"))
    assert found(store, "k") == [b"30", b"-50", b"0"]
    assert found(store, "k", begin=start + 20_000) == [b"30"]


async def test_a_damaged_record_has_the_key_index_left_alone() -> None:
    disk = FakeDisk()
    store = await Store.open(Path("/data"), index_config(), ManualClock(), disk)
    put(store, *(message(b"%d" % number, keys="k") for number in range(50)))
    await store.close()
    store = await Store.open(Path("/data"), index_config(), ManualClock(), disk)
    position = store.queues.position_at(store.queue("T", 0), 2)
    disk.files[store.segments.items[0].path].data[position + HEAD_BYTES] ^= 1
    assert found(store, "k") == [b"%d" % number for number in range(49, -1, -1) if number != 2]
    assert store.upkeep.indexer.is_complete
    store.crash()


async def test_a_full_index_file_that_is_gone_is_rebuilt(open_store: OpenStore, nursery: trio.Nursery) -> None:
    store = await open_store(small_config(segment_bytes=65536))
    for number in range(300):
        put(store, message(str(number), unique=f"U{number}"))
    await store.close()
    store = await open_store(small_config(segment_bytes=65536))
    assert store.keys is not None
    store.segments.files.unlink(store.keys.files.items[0].path)
    with pytest.raises(NotReady) as refused:
        [found(store, f"U{n}") for n in range(300)]
    await nursery.start(store.upkeep.run)
    await refused.value.wait()
    assert [found(store, f"U{n}") for n in range(300)] == [[b"%d" % n] for n in range(300)]
    nursery.cancel_scope.cancel()


async def test_thousands_of_queues_share_a_few_files(open_store: OpenStore) -> None:
    store = await open_store(small_config(segment_bytes=2**22, page_bytes=2**16, keys_index=False, open_files_max=8))
    for number in range(2000):
        store.writer.append(message("x", topic=f"T{number}"), 0)
    store.committer.commit()
    store.flusher.flush_now()
    await store.upkeep.checkpointer.checkpoint()
    assert store.statistics().open_files <= 8
    assert store.statistics().queues == 2000
    store.crash()
    store = await open_store(small_config(segment_bytes=2**22, page_bytes=2**16, keys_index=False, open_files_max=8))
    assert all(drain(store, store.queue(f"T{n}", 0)) == [b"x"] for n in range(0, 2000, 97))


async def missing_keys(disk: FakeDisk, count: int) -> list[int]:
    """Which of the keys k0, k1, ... a start on *disk* does not find."""
    store = await Store.open(Path("/data"), small_config(), ManualClock(), disk)
    missing = [number for number in range(count) if found(store, f"k{number}") != [b"%d" % number]]
    store.crash()
    return missing


async def test_index_files_that_a_kill_left_after_the_checkpoint_are_made_again(
    open_store: OpenStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(small_config(segment_bytes=1 << 22), index_entries=64)
    store = await open_store(config)
    for number in range(10):  # the index of the newest checkpoint is that of the start
        clock.ms += 1000
        put(store, *(message(f"{number}.{each}", keys=f"k{number}") for each in range(20)))
    store.upkeep.indexer.drain_now()
    store.crash()
    for _ in range(2):
        store = await open_store(config)
        keys = store.keys
        assert keys is not None
        assert keys.files.total() == 200
        assert [item.begin_position for item in keys.files.items] == sorted(
            item.begin_position for item in keys.files.items
        )
        assert all(item.begin_ms for item in keys.files.items)
        assert len(found(store, "k3")) == 20
        await store.close()
    assert "key index" not in caplog.text


async def test_a_checkpoint_claims_no_keys_of_records_that_are_not_durable(open_store: OpenStore) -> None:
    store = await open_store()
    put(store, *(message(b"%d" % number, keys="k") for number in range(5)))
    store.writer.append(message("written", keys="k"), 0)
    store.committer.commit()
    store.upkeep.indexer.drain_now()
    assert store.durable < store.written
    store.upkeep.checkpointer.write_checkpoint()
    made = read_checkpoint(store.segments.files, f"{store.data_directory.path}/checkpoint")
    assert made is not None
    assert made.position == made.index_position == store.durable


async def test_the_key_index_is_rebuilt_after_a_torn_checkpoint() -> None:
    """It is then unknown how much of the index is durable: the header may be ahead of the slots."""
    disk = FakeDisk()
    store = await Store.open(Path("/data"), small_config(), ManualClock(), disk)
    put(store, *(message(str(number), keys=f"k{number}") for number in range(30)))
    await store.close()
    store = await Store.open(Path("/data"), small_config(), ManualClock(), disk)
    store.crash()
    files = Files(disk, 8)
    (name,) = disk.names("/data/index")
    files.write(f"/data/index/{name}", bytes(64 * 4), 40)
    files.write("/data/checkpoint", bytes(8), 0)
    files.close()
    assert await missing_keys(disk, 30) == []


async def test_a_power_cut_while_an_index_file_is_finished_loses_no_key(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """No slot of it is written before the entry that it names is durable."""
    disk = FakeDisk()
    store = await Store.open(Path("/data"), small_config(), ManualClock(), disk)
    put(store, *(message(str(number), keys=f"k{number}") for number in range(30)))
    await trio.sleep(3600)
    await store.upkeep.checkpointer.checkpoint()
    cuts: list[FakeDisk] = []
    sync = Files.sync

    def cut_before(files: Files, path: str) -> None:
        if path.startswith("/data/index/"):
            cuts.extend(disk.after_power_cut(Cut.TORN, random.Random(seed)) for seed in range(10))
        sync(files, path)

    put(store, *(message(str(number), keys=f"k{number}") for number in range(30, 140)))
    monkeypatch.setattr(Files, "sync", cut_before)
    found(store, "k139")
    monkeypatch.undo()
    store.crash()
    assert len(cuts) >= 10
    assert [await missing_keys(cut, 140) for cut in cuts] == [[]] * len(cuts)


@pytest.mark.parametrize(("queues", "early"), [(50, True), (SAVE_OFTEN_MAX + 1, False)])
async def test_very_many_changed_queues_are_saved_when_time_brings_a_checkpoint(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery, queues: int, early: bool
) -> None:
    config = small_config(flush="async", persist_interval_ms=1000, checkpoint_interval_ms=10_000)
    store = await Store.open(Path("/data"), replace(config, checkpoint_bytes=1), ManualClock(), FakeDisk())
    nursery.start_soon(store.upkeep.run)
    for number in range(queues):
        store.writer.append(message("x", f"T{number}"), 0)
    store.committer.commit()
    await trio.sleep(3.5)
    assert (store.queue("T0", 0).saved == 1) is early
    assert (store.upkeep.checkpointer.checkpointed > 0) is early
    await trio.sleep(20)
    assert store.queue("T0", 0).saved == 1
    assert store.upkeep.checkpointer.checkpointed == store.durable
    nursery.cancel_scope.cancel()
    store.crash()
