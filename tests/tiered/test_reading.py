"""Consumers get from the tier, byte for byte, what the log had; what is damaged or lost there costs only itself."""

import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
import trio.testing
from deltalake import DeltaTable

from martlet.errors import Reason, Refused
from martlet.records.codec import tags_code
from martlet.records.layout import RecordView, record_views
from martlet.store import Queue, ReadResult, Store, StoreConfig
from martlet.testing.cold import remove_sealed
from martlet.testing.stores import ManualClock, message, small_config
from martlet_tiered.errors import StoreUnavailable
from martlet_tiered.format import writing
from martlet_tiered.names import parse_data
from martlet_tiered.reading import index as indexes
from martlet_tiered.reading import reader as readers
from martlet_tiered.reading import row_groups
from martlet_tiered.reading.index import FILE_NAME
from martlet_tiered.reading.store_reads import StoreReadsStatistics

from .cold import DAY_MS, Tier
from .copying import CACHE_BYTES, CopyingTier

STORE = small_config(flush="async", segment_bytes=1 << 14, page_bytes=1 << 12, cache_bytes=1 << 14)
COUNT = 120
STEP_MS = 1000


class World:
    """A store with a tier, of which the service runs."""

    def __init__(self, store: Store, tier: CopyingTier, clock: ManualClock) -> None:
        self.store = store
        self.tier = tier
        self.clock = clock
        self.begin_ms = clock.ms

    def put(self, topic: str, count: int, queues: int = 1, keys: Callable[[int], str] = str) -> None:
        for number in range(count):
            made = message(
                b"%05d " % number * 20, topic, tags="AB"[number % 2], keys=keys(number), unique=f"{number:X}"
            )
            self.store.writer.append(made, number % queues)
            self.store.committer.commit()
            self.clock.ms += STEP_MS

    def queue(self, topic: str = "T", queue_id: int = 0) -> Queue:
        return self.store.queue(topic, queue_id)

    async def bury(self, topic: str = "T", count: int = COUNT, queues: int = 1) -> Queue:
        """Append messages and let most of them become cold."""
        self.put(topic, count, queues)
        await remove_sealed(self.store)
        return self.queue(topic)

    async def all_of(self, queue: Queue, offset: int = 0, end: int | None = None) -> list[bytes]:
        """Read *queue* as a consumer does; every message must be there."""
        found, lost = await self.all_with_lost(queue, offset, end)
        assert lost == []
        return found

    async def all_with_lost(
        self, queue: Queue, offset: int = 0, end: int | None = None
    ) -> tuple[list[bytes], list[tuple[int, int]]]:
        found: list[bytes] = []
        lost: list[tuple[int, int]] = []
        end = queue.next_offset if end is None else end
        while offset < end:
            result = await self.store.readers.read_far(queue, offset, 32, 1 << 20)
            found += records(result)
            lost += result.lost
            assert result.next_offset > offset
            offset = result.next_offset
        return found, lost


def records(result: ReadResult) -> list[bytes]:
    return [
        bytes(record.buffer[record.start : record.start + record.size])
        for piece in result.pieces
        for record in record_views(piece)
    ]


def offsets(found: Sequence[bytes]) -> list[int]:
    return [RecordView(data).queue_offset for data in found]


@asynccontextmanager
async def world(
    directory: Path,
    place: Tier,
    *,
    config: StoreConfig = STORE,
    clock: ManualClock | None = None,
    cache_bytes: int = CACHE_BYTES,
    change: Callable[[CopyingTier], None] = lambda tier: None,
) -> AsyncIterator[World]:
    clock = clock or ManualClock()
    store = await Store.open(directory / "data", config, clock)
    tier = await trio.to_thread.run_sync(CopyingTier, store, place, cache_bytes)
    store.use_cold_tier(tier)
    change(tier)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        await tier.begin()
        nursery.start_soon(tier.run)
        yield World(store, tier, clock)
        nursery.cancel_scope.cancel()
    await store.close()


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of a few records."""
    monkeypatch.setattr(writing, "GROUP_BYTES", 2000)
    monkeypatch.setattr(writing, "GROUP_BYTES_MIN", 500)


@pytest.mark.usefixtures("small_groups")
async def test_each_queue_is_the_same_before_and_after_the_removal(tmp_path: Path, tier: Tier) -> None:
    async with world(tmp_path, tier) as made:
        for topic, queues in (("T", 3), ("U", 1), ("%RETRY%G", 2)):
            made.put(topic, COUNT, queues)
        names = [(topic, queue_id) for topic in ("T", "U", "%RETRY%G") for queue_id in range(3)]
        before = {name: await made.all_of(made.queue(*name)) for name in names}
        await remove_sealed(made.store)
        assert made.queue("T").local_from > 20
        assert {name: await made.all_of(made.queue(*name)) for name in names} == before
        assert made.tier.asked


def lost_part(found: Sequence[bytes], before: Sequence[bytes]) -> list[int]:
    """Return the offsets that are missing in *found*, of which all others are as *before*."""
    kept = dict(zip(offsets(found), found, strict=True))
    assert len(kept) == len(found)
    assert all(data == kept.get(offset, data) for offset, data in zip(offsets(before), before, strict=True))
    return sorted(set(offsets(before)) - set(kept))


def data_files(place: Tier) -> list[str]:
    return [each.name for each in place.objects().list_folder("table") if each.name.endswith(".parquet")]


# ---- look-ups


@pytest.mark.usefixtures("small_groups")
async def test_look_ups_find_what_the_log_had(tmp_path: Path, tier: Tier) -> None:
    async with world(tmp_path, tier) as made:
        made.put("T", COUNT, 2)
        queue = made.queue("T", 1)
        before = await made.all_of(queue)
        await remove_sealed(made.store)
        cold = [RecordView(data) for data in before if RecordView(data).queue_offset < queue.local_from]
        assert len(cold) > 20
        for record in cold[::5]:
            offset, cold_of = record.queue_offset, made.store.cold
            assert await cold_of.offset_by_time(queue, record.store_ms) == offset
            assert await cold_of.offset_by_time(queue, record.store_ms - 1) == offset
            assert await cold_of.offset_by_time(queue, record.store_ms + 1) == offset + 1
            assert await cold_of.offset_by_position(queue, record.position) == offset
            assert await cold_of.offset_by_position(queue, record.position + 1) == offset + 1
            assert await cold_of.record_at(record.position) == before[offset]
            assert await cold_of.record_at(record.position + 1) is None
            number = offset * 2 + 1
            for key in (b"%d" % number, b"%X" % number):
                found = await made.tier.records_by_key("T", key, 8, 0, 1 << 60, made.store.first_position)
                assert before[offset] in found
                assert all(key in RecordView(data).properties for data in found)


@pytest.mark.usefixtures("small_groups")
async def test_keys_are_found_newest_first_within_bounds(tmp_path: Path, local_tier: Tier) -> None:
    async with world(tmp_path, local_tier) as made:
        for _ in range(3):  # three files
            made.put("T", COUNT // 3, keys=lambda number: "all " + str(number % 2))
            await remove_sealed(made.store)
        end, cold = made.store.first_position, made.queue().local_from

        async def find(count: int, begin_ms: int = 0, end_ms: int = 1 << 60, key: bytes = b"all") -> list[int]:
            return offsets(await made.tier.records_by_key("T", key, count, begin_ms, end_ms, end))

        assert await find(1000) == list(range(cold - 1, -1, -1))
        assert await find(5) == list(range(cold - 1, cold - 6, -1))
        assert await find(1000, key=b"1") == [each for each in range(cold - 1, -1, -1) if each % 40 % 2]
        assert await find(1000, key=b"nobody") == []
        begin = made.begin_ms + 5 * STEP_MS
        assert await find(1000, begin, begin + 3 * STEP_MS) == [8, 7, 6, 5]
        for name in made.tier.objects.inner.list_folder("index"):
            made.tier.objects.inner.delete(name.name)
        assert await find(1000, key=b"0") == [each for each in range(cold - 1, -1, -1) if not each % 40 % 2]


@pytest.mark.usefixtures("small_groups")
async def test_reads_with_a_filter_select_as_those_of_the_log(tmp_path: Path, local_tier: Tier) -> None:
    async with world(tmp_path, local_tier) as made:
        queue = await made.bury()
        before = await made.all_of(queue)
        threads: list[threading.Thread] = []

        def predicate(record: RecordView) -> bool:
            threads.append(threading.current_thread())
            return record.queue_offset % 3 == 0

        codes = frozenset({tags_code(b"A")})
        found: list[bytes] = []
        offset = 0
        while offset < queue.local_from:
            result = await made.store.readers.read_far(queue, offset, 5, 1 << 20, codes, predicate)
            found += records(result)
            offset = result.next_offset
        assert offsets(found) == list(range(0, offset, 6))
        assert found == before[:offset:6]
        assert threading.main_thread() not in threads


# ---- deleted topics


async def recreate(made: World, count: int) -> Queue:
    made.store.deletions.delete_topic("T")
    await made.store.deletions.wait_durable()
    return await made.bury(count=count)


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("forget", [False, True], ids=["index kept", "index deleted"])
@pytest.mark.parametrize("count", [COUNT // 2, 2 * COUNT], ids=["shorter", "longer"])
async def test_a_topic_that_was_created_again_shows_nothing_of_the_old_one(
    tmp_path: Path, local_tier: Tier, forget: bool, count: int
) -> None:
    clock = ManualClock()
    async with world(tmp_path, local_tier, clock=clock) as made:
        old = await made.all_of(await made.bury())
        assert await made.tier.record_at(RecordView(old[3]).position) == old[3]
        await recreate(made, count)
    if forget:
        (tmp_path / "data" / FILE_NAME).unlink()
    async with world(tmp_path, local_tier, clock=clock) as made:
        queue = made.queue()
        found = await made.all_of(queue)
        assert len(found) == count
        assert not set(found) & set(old)
        for record in map(RecordView, old):
            assert await made.tier.record_at(record.position) is None
        end = made.store.first_position
        keyed = await made.tier.records_by_key("T", b"5", 8, 0, 1 << 60, end)
        assert set(keyed) == ({found[5]} if queue.local_from > 5 else set())


@pytest.mark.parametrize("forget", [False, True], ids=["index kept", "index deleted"])
async def test_a_deletion_counts_also_if_the_new_offsets_only_follow_the_old_ones(
    tmp_path: Path, local_tier: Tier, forget: bool
) -> None:
    clock = ManualClock()
    async with world(tmp_path, local_tier, clock=clock) as made:
        made.put("T", 3)
        made.put("U", COUNT)
        await remove_sealed(made.store)
        made.store.deletions.delete_topic("T")
        await made.store.deletions.wait_durable()
        made.put("T", 8)
        made.queue().expire_to(5)  # the tier gets no earlier one
        made.put("U", COUNT)
        await remove_sealed(made.store)
    if forget:
        (tmp_path / "data" / FILE_NAME).unlink()
    async with world(tmp_path, local_tier, clock=clock) as made:
        found = await made.tier.index.finder.find(made.queue(), 1)
        assert (found.place, found.next_first) == (None, 5 if found.next_first else None)
        assert made.queue().cold_from != 0


# ---- the index


async def bury_and_stop(tmp_path: Path, place: Tier, clock: ManualClock) -> dict[int, list[bytes]]:
    async with world(tmp_path, place, clock=clock) as made:
        for _ in range(4):
            await made.bury(queues=3)
        return {number: await made.all_of(made.queue("T", number)) for number in range(3)}


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def with_other_version(path: Path) -> None:
    database = sqlite3.connect(path)
    with database:
        database.execute("UPDATE about SET value = '0' WHERE name = 'version'")
    database.close()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "no database": lambda path: overwrite(path, 0, b"\xff" * 200),
    "damaged pages": lambda path: overwrite(path, 4096, b"\xff" * (path.stat().st_size - 4096)),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "another version": with_other_version,
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_an_index_that_cannot_be_used_is_built_again(tmp_path: Path, local_tier: Tier, damage: str) -> None:
    clock = ManualClock()
    before = await bury_and_stop(tmp_path, local_tier, clock)
    DAMAGES[damage](tmp_path / "data" / FILE_NAME)
    async with world(tmp_path, local_tier, clock=clock) as made:
        queues = {number: made.queue("T", number) for number in range(3)}
        assert all(queue.first_offset == 0 for queue in queues.values())
        with trio.fail_after(60):
            while not made.tier.index.is_complete:  # noqa: ASYNC110
                await trio.sleep(0.01)
        assert {number: await patient(made, queue) for number, queue in queues.items()} == before
        assert all(queue.first_offset == 0 for queue in queues.values())


async def patient(made: World, queue: Queue) -> list[bytes]:
    """Read *queue*; try again while the index is being built."""
    while True:
        with suppress(Refused):
            return await made.all_of(queue)
        await trio.sleep(0.01)


async def test_an_index_that_contradicts_a_file_is_built_again(tmp_path: Path, local_tier: Tier) -> None:
    clock = ManualClock()
    before = await bury_and_stop(tmp_path, local_tier, clock)
    database = sqlite3.connect(tmp_path / "data" / FILE_NAME)
    with database:
        database.execute("UPDATE spans SET row = row + 1")
    database.close()
    async with world(tmp_path, local_tier, clock=clock) as made:
        with pytest.raises(Refused, match="is being rebuilt"):
            await made.all_of(made.queue())
        assert await patient(made, made.queue()) == before[0]


async def test_what_is_not_indexed_yet_is_refused_and_not_skipped(
    tmp_path: Path, local_tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "SYNC_S", 0.0)
    monkeypatch.setattr(indexes, "RETRY_S", 0.01)
    clock = ManualClock()
    before = await bury_and_stop(tmp_path, local_tier, clock)
    (tmp_path / "data" / FILE_NAME).unlink()
    down = [True]

    def fail() -> None:
        if down[0]:
            raise StoreUnavailable("the store is down")

    def change(tier: CopyingTier) -> None:
        tier.objects.hang = fail

    async with world(tmp_path, local_tier, clock=clock, change=change) as made:
        queue = made.queue()
        assert queue.first_offset == 0
        with pytest.raises(Refused, match="index of the cold tier is being built, 4 of 4 files are left"):
            await made.store.readers.read_far(queue, 0, 8, 1 << 20)
        down[0] = False
        assert await patient(made, queue) == before[0]


async def test_the_index_of_another_table_is_not_used(tmp_path: Path, local_tier: Tier) -> None:
    clock = ManualClock()
    await bury_and_stop(tmp_path, local_tier, clock)
    other = Tier(str(tmp_path / "other"))
    async with world(tmp_path, other, clock=clock) as made:
        assert made.queue().first_offset == made.queue().local_from > 0


# ---- damage in the store


async def damaged(
    tmp_path: Path, place: Tier, damage: Callable[[bytes], bytes | None]
) -> tuple[list[int], list[tuple[int, int]], StoreReadsStatistics]:
    """Damage the second of three files; return the missing offsets, the lost ranges that reads report, and counters."""
    clock = ManualClock()
    async with world(tmp_path, place, clock=clock) as made:
        for _ in range(3):
            await made.bury()
        before = await made.all_of(made.queue())
    name = sorted((name for name in data_files(place) if "kind=topic" in name), key=_begin_of)[1]
    objects = place.objects()
    data = damage(objects.read(name))
    objects.delete(name)
    if data is not None:
        objects.create(name, data)
    async with world(tmp_path, place, clock=clock) as made:
        found, lost = await made.all_with_lost(made.queue())
        return lost_part(found, before), lost, made.tier.reads.statistics()


def _begin_of(name: str) -> int:
    return int(name.rpartition("/")[2].split("-")[1])


def hold(gate: threading.Event) -> None:
    gate.wait()


def covered(lost: Sequence[tuple[int, int]]) -> list[int]:
    return [offset for begin, end in lost for offset in range(begin, end)]


@pytest.mark.parametrize("how", ["lost", "truncated", "empty"])
async def test_a_file_that_is_lost_costs_its_own_messages(
    tmp_path: Path, tier: Tier, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    damages: dict[str, Callable[[bytes], bytes | None]] = {
        "lost": lambda data: None,
        "truncated": lambda data: data[: len(data) // 2],
        "empty": lambda data: b"",
    }
    missing, lost, statistics = await damaged(tmp_path, tier, damages[how])
    assert COUNT // 2 < len(missing) < 2 * COUNT
    assert missing == covered(lost) == list(range(missing[0], missing[-1] + 1))
    assert statistics.damaged == 1
    assert caplog.text.count("old messages are damaged or lost") == 1


@pytest.mark.usefixtures("small_groups")
async def test_a_flipped_bit_costs_a_row_group(
    tmp_path: Path, local_tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    missing, lost, statistics = await damaged(
        tmp_path, local_tier, lambda data: data[:3000] + bytes([data[3000] ^ 1]) + data[3001:]
    )
    assert 0 < len(missing) < 30
    assert missing == covered(lost)
    assert statistics.damaged == 1
    assert "old messages are damaged or lost: row group" in caplog.text


async def test_a_file_that_comes_back_is_read_again(tmp_path: Path, local_tier: Tier) -> None:
    async with world(tmp_path, local_tier) as made:
        before = await made.all_of(await made.bury())
        (name,) = (name for name in data_files(local_tier) if "kind=topic" in name)
        made.tier.reads._blocks.drop((name.removeprefix("table/"), 0))
        moved = tmp_path / "moved"
        (Path(local_tier.url) / name).rename(moved)
        found, _ = await made.all_with_lost(made.queue())
        assert len(lost_part(found, before)) == made.queue().local_from
        moved.rename(Path(local_tier.url) / name)
        made.tier.reads._damaged_until = dict.fromkeys(made.tier.reads._damaged_until, 0.0)  # a minute later
        assert await made.all_of(made.queue()) == before


# ---- other programs


async def test_files_of_other_programs_are_read(tmp_path: Path, tier: Tier) -> None:
    clock = ManualClock()
    before = await bury_and_stop(tmp_path, tier, clock)
    optimize(tier)
    async with world(tmp_path, tier, clock=clock) as made:
        paths = {file.path for file in made.tier.table.files()}
        assert any(parse_data(path) is None for path in paths)
        assert {number: await made.all_of(made.queue("T", number)) for number in range(3)} == before
        for record in (RecordView(before[1][7]), RecordView(before[2][20])):
            queue = made.queue("T", record.queue_id)
            assert await made.tier.record_at(record.position) == before[record.queue_id][record.queue_offset]
            assert await made.tier.offset_by_time(queue, record.store_ms) == record.queue_offset
            assert await made.tier.offset_by_position(queue, record.position) == record.queue_offset
        found = await made.tier.records_by_key("T", b"7", 100, 0, 1 << 60, 1 << 60)
        assert before[1][2] in found


async def test_files_that_another_program_removes_while_the_broker_runs_are_found_elsewhere(
    tmp_path: Path, local_tier: Tier
) -> None:
    async with world(tmp_path, local_tier) as made:
        for _ in range(3):
            await made.bury()
        before = await made.all_of(made.queue())
        made.tier.reads._blocks._values.clear()
        optimize(local_tier, vacuum=True)
        assert await made.all_of(made.queue()) == before
        assert made.tier.reads.statistics().damaged == 0


def optimize(place: Tier, *, vacuum: bool = False) -> None:
    location = place.location()
    options = location.options | {"allow_http": "true"} if location.bucket else None
    table = DeltaTable(f"{place.url}/table", storage_options=options)
    table.optimize.compact()
    if vacuum:
        table.vacuum(0, dry_run=False, enforce_retention_duration=False)


@pytest.mark.usefixtures("small_groups")
async def test_very_large_row_groups_are_read_in_parts(
    tmp_path: Path, local_tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "GROUP_BYTES_MAX", 4000)
    monkeypatch.setattr(row_groups, "PART_BYTES", 2000)
    clock = ManualClock()
    before = await bury_and_stop(tmp_path, local_tier, clock)
    optimize(local_tier)
    async with world(tmp_path, local_tier, clock=clock) as made:
        assert {number: await made.all_of(made.queue("T", number)) for number in range(3)} == before
        assert made.tier.reads.statistics().block_reads > 8


# ---- clocks


async def test_a_clock_that_is_set_back_over_midnight_hides_nothing(tmp_path: Path, local_tier: Tier) -> None:
    clock = ManualClock(DAY_MS * 20_000 - 20 * STEP_MS)
    async with world(tmp_path, local_tier, clock=clock) as made:
        for _ in range(4):
            made.put("T", COUNT // 4, 2)
            clock.ms -= (COUNT // 4 - 5) * STEP_MS
        before = {number: await made.all_of(made.queue("T", number)) for number in range(2)}
        await remove_sealed(made.store)
        assert len(data_files(local_tier)) == 2, "one for each day"
        assert {number: await made.all_of(made.queue("T", number)) for number in range(2)} == before
    (tmp_path / "data" / FILE_NAME).unlink()
    async with world(tmp_path, local_tier, clock=clock) as made:
        assert {number: await made.all_of(made.queue("T", number)) for number in range(2)} == before


# ---- many consumers, and a store that hangs


async def test_a_hundred_consumers_of_a_row_group_cost_one_request(tmp_path: Path, local_tier: Tier) -> None:
    async with world(tmp_path, local_tier) as made:
        queue = await made.bury()
        results: list[list[bytes]] = []

        async def consume() -> None:
            results.append(records(await made.store.readers.read_far(queue, 0, 32, 1 << 20)))

        made.tier.objects.reads.clear()
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(consume)
        assert len(made.tier.objects.reads) == 2, "the metadata, and the row group"
        assert all(result == results[0] and len(result) == 32 for result in results)


async def test_a_consumer_that_leaves_does_not_take_the_others_with_it(tmp_path: Path, local_tier: Tier) -> None:
    async with world(tmp_path, local_tier) as made:
        queue = await made.bury()
        gate = threading.Event()
        made.tier.objects.hang = lambda: hold(gate)
        results: list[int] = []

        async def consume(scope: trio.CancelScope) -> None:
            with scope:
                results.append((await made.store.readers.read_far(queue, 0, 8, 1 << 20)).count)

        scopes = [trio.CancelScope() for _ in range(3)]
        async with trio.open_nursery() as nursery:
            for scope in scopes:
                nursery.start_soon(consume, scope)
                await trio.testing.wait_all_tasks_blocked()
            scopes[0].cancel()
            gate.set()
        assert results == [8, 8]


async def test_a_store_that_hangs_delays_only_cold_reads_and_leaves_no_thread(
    tmp_path: Path, local_tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "DEADLINE_S", 0.05)
    gate = threading.Event()
    async with world(tmp_path, local_tier) as made:
        queue = await made.bury()
        made.tier.objects.hang = lambda: hold(gate)
        for _ in range(3):
            with pytest.raises(Refused, match="did not answer within") as caught:
                await made.store.readers.read_far(queue, 0, 8, 1 << 20)
            assert caught.value.reason is Reason.BUSY
        assert 1 <= made.tier.reads.statistics().hanging <= 3
        assert made.store.readers.read_near(queue, queue.local_from, 8, 1 << 20) is not None
        made.put("T", 3)
        assert made.store.readers.read_near(queue, queue.next_offset - 1, 8, 1 << 20) is not None
    # The store of the block above has stopped, while the threads still hang.
    threads = made.tier.reads._threads
    gate.set()
    with trio.fail_after(60):
        while threads.abandoned:  # noqa: ASYNC110
            await trio.sleep(0.001)


@pytest.mark.usefixtures("small_groups")
async def test_a_consumer_that_reads_in_order_finds_the_next_row_group_in_memory(
    tmp_path: Path, local_tier: Tier
) -> None:
    async with world(tmp_path, local_tier) as made:
        queue = await made.bury()
        offset = 0
        while offset < queue.local_from:
            made.tier.objects.reads.clear()
            result = await made.store.readers.read_far(queue, offset, 8, 1 << 20)
            if offset > 30:
                assert made.tier.objects.reads == [], "read ahead"
            offset = result.next_offset
            await trio.testing.wait_all_tasks_blocked(0.05)


@pytest.mark.usefixtures("small_groups")
async def test_the_cache_has_a_bound(tmp_path: Path, local_tier: Tier) -> None:
    async with world(tmp_path, local_tier, cache_bytes=10_000) as made:
        queue = await made.bury()
        before = await made.all_of(queue)
        reads = made.tier.reads.statistics().block_reads
        assert await made.all_of(queue) == before
        assert made.tier.reads.statistics().block_bytes <= 10_000
        assert made.tier.reads.statistics().block_reads >= 2 * reads - 2
