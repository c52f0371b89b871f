"""Old days expire, small files become one, and what other programs do to the table is survived."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from deltalake import DeltaTable

from martlet.store import Store
from martlet.testing.stores import ManualClock
from martlet_tiered.files import DataFile
from martlet_tiered.names import DataName
from martlet_tiered.rewrite.planning import expired_files, overdue_days, small_files
from martlet_tiered.upload import uploader as uploading

from .cold import DAY_MS, Tier, now_ms
from .test_rewriting import STEPS, Tended, purge_or_die, tended
from .test_upload_faults import Trip
from .uploads import Killed, Place, filled_store, log_records, open_store, table_of, tier_records, until

TODAY_MS = 1_795_824_000_000  # 2026-11-28, 00:00 UTC
MIB = 1 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for long in real time."""
    monkeypatch.setattr(uploading, "POLL_S", 0.005)
    monkeypatch.setattr(uploading, "BACKOFF_S", 0.005)
    monkeypatch.setattr(uploading, "BACKOFF_MAX_S", 0.02)


# ---- plans


def made(date: str, begin: int, end: int, size: int = MIB, kind: str = "topic", rows: int = 10) -> DataFile:
    name = DataName(date, kind, 1, begin, end)  # type: ignore[arg-type]
    return DataFile(name.path, date, kind, size, 0, rows, {}, {})


FILES = [
    made("2026-11-25", 0, 10),
    made("2026-11-25", 0, 10, kind="internal"),
    made("2026-11-25", 10, 20, kind="dlq"),
    made("2026-11-26", 10, 20, kind="internal"),
    made("2026-11-26", 20, 30),
    made("2026-11-28", 30, 40),
]


@pytest.mark.parametrize(
    ("days", "bytes_max", "log_begin", "expected"),
    [
        (0, 0, 99, []),
        (3, 0, 99, []),
        (2, 0, 99, [0, 1, 2]),
        (2, 0, 5, [0, 2]),
        (1, 0, 99, [0, 1, 2]),
        (0, 6 * MIB, 99, []),
        (0, 6 * MIB - 1, 99, [0, 1, 2]),
        (3, 1, 99, [0, 1, 2]),
    ],
)
def test_the_oldest_day_expires_by_days_and_bytes(
    days: int, bytes_max: int, log_begin: int, expected: list[int]
) -> None:
    found = expired_files(FILES, TODAY_MS + 5, days, bytes_max, log_begin)
    assert sorted(FILES.index(file) for file in found) == expected


def test_today_never_expires_and_notes_stay_while_there_is_anything_before_them() -> None:
    today = [file for file in FILES if file.date == "2026-11-28"]
    assert expired_files(today, TODAY_MS + 5, 0, 1, 99) == []
    tangled = [made("2026-11-25", 50, 60), made("2026-11-25", 10, 20, kind="internal"), made("2026-11-26", 0, 10)]
    assert expired_files(tangled, TODAY_MS, 1, 0, 99) == tangled[:1]
    assert expired_files([FILES[1]], TODAY_MS, 1, 0, 99) == []


def test_days_that_are_overdue_are_counted() -> None:
    assert overdue_days(FILES, TODAY_MS, 0) == 0
    assert [overdue_days(FILES, TODAY_MS + DAY_MS - 1, days) for days in (1, 2, 3, 4)] == [2, 1, 0, 0]


def test_neighbours_of_a_past_day_become_one_file() -> None:
    files = [
        made("2026-11-27", at, at + 10, size) for at, size in zip(range(0, 60, 10), (1, 2, 9, 3, 4, 5), strict=True)
    ]
    shuffled = [files[3], files[0], files[5], files[1], files[2], files[4]]
    assert small_files(shuffled, TODAY_MS, 9, ()) == files[:2]
    assert small_files(files[2:], TODAY_MS, 9, ()) == files[3:]
    assert small_files(files, TODAY_MS, 9, {files[1].path}) == files[3:]
    assert small_files(files, TODAY_MS - 1, 9, ()) == []
    assert small_files(files, TODAY_MS, 0, ()) == []


def test_files_become_one_while_they_fit_into_memory() -> None:
    large = [made("2026-11-27", at, at + 1, 7 * MIB) for at in range(5)]
    assert small_files(large, TODAY_MS, 8 * MIB, ()) == large[:3]
    many = [made("2026-11-27", at, at + 1, 5, rows=200_000) for at in range(5)]
    assert small_files(many, TODAY_MS, 8 * MIB, ()) == many[:2]
    of_two_kinds = [made("2026-11-27", 0, 5), made("2026-11-27", 5, 9, kind="dlq")]
    assert small_files(of_two_kinds, TODAY_MS, 8 * MIB, ()) == []
    alone = [made("2026-11-27", at, at + 1, 5, rows=300_000) for at in range(3)]
    assert small_files(alone, TODAY_MS, 8 * MIB, ()) == []


# ---- brokers


async def uploaded(held: Tended) -> None:
    await held.uploader.release(held.store.durable)
    await until(lambda: held.uploader.released >= held.store.durable)


async def tend(held: Tended) -> None:
    """Upload all of the log, and let the rewriter do what it can."""
    await uploaded(held)
    held.rewriter.look_now()
    await until(lambda: not held.rewriter.is_due)


def days_of(tier: Tier) -> set[str]:
    return {file.date for file in table_of(tier).files()}


async def test_an_expired_day_leaves_the_table_and_its_queues_begin_later(tmp_path: Path, tier: Tier) -> None:
    clock = ManualClock(now_ms() - 3 * DAY_MS)
    async with open_store(tmp_path, clock) as store:
        for at in range(4):
            filled_store(store, 21, 21 * at)
            clock.ms += DAY_MS
        async with tended(store, Place(tier), tmp_path, reserved_days=1, compact_bytes=0) as held:
            await uploaded(held)
            queue = store.queue("T", 0)
            assert queue.cold_from == 0
            days = sorted(days_of(tier))
            before = tier_records(tier)
            for left in (days[1:], days[2:], days[2:]):
                await tend(held)
                assert sorted({file.date for file in table_of(tier).files() if file.kind != "internal"}) == left
            assert 0 < queue.cold_from < queue.next_offset
            found = await held.index.finder.find(queue, queue.cold_from)
            assert found.place is not None
            assert found.place.span.first == queue.cold_from
            assert held.rewriter.progress.expired_files >= 6
        after = tier_records(tier)
        assert 0 < len(after) < len(before)
        assert after == [pair for pair in before if pair in after]
        async with tended(store, Place(tier), tmp_path) as held:
            await until(lambda: held.index.is_complete)
            assert store.queue("T", 0).cold_from == queue.cold_from


@pytest.mark.parametrize("kinds", [("T", "orders"), ("T", "%DLQ%G", "martlet.x")], ids=["topics", "kinds"])
async def test_small_files_become_one_and_readers_find_the_same(
    tmp_path: Path, tier: Tier, kinds: Sequence[str]
) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 60, topics=kinds)
        async with tended(store, Place(tier), tmp_path, compact_bytes=0) as held:
            await uploaded(held)
            before = table_of(tier).files()
        async with tended(store, Place(tier), tmp_path, compact_bytes=MIB) as held:
            await tend(held)
            after = table_of(tier).files()
            assert len(after) == len({(file.date, file.kind) for file in before}) < len(before)
            assert held.rewriter.progress.merged_files == len(before)
            assert tier_records(tier) == list(log_records(store))
            for queue in store.queues.topics["T"].values():
                assert queue.cold_from == 0
                found = await held.index.finder.find(queue, 0)
                assert found.place is not None
                assert found.place.span.last == queue.next_offset - 1
            await tend(held)
            assert table_of(tier).files() == after
        version = table_of(tier).version
        assert version > 3


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_broker_killed_at_any_call_of_a_merge_goes_on_where_it_was(tmp_path: Path, after: bool) -> None:
    names = set()
    for number in range(4 + after, STEPS + 1, 2):
        folder = tmp_path / str(number)
        local = Tier(str(folder / "tier"))
        async with open_store(folder) as store:
            filled_store(store, 12, topics=("T",))
            async with tended(store, Place(local), folder, range_bytes=600, compact_bytes=0) as held:
                await uploaded(held)
            trip = Trip(number, Killed(), after=after)
            held = Tended(store, Place(local, wrap=trip.wrap), folder, compact_bytes=MIB)
            await held.index.begin()
            await purge_or_die(held, tend)
            names.add(trip.name)
            assert tier_records(local) == list(log_records(store))
            async with tended(store, Place(local), folder, compact_bytes=MIB) as held:
                await tend(held)
            assert tier_records(local) == list(log_records(store))
            assert len(table_of(local).files()) == 1
    assert names >= {"create", "read_range"}


# ---- other programs


def optimize(tier: Tier) -> None:
    """Rewrite the table as another program does, and remove its old files at once."""
    table = DeltaTable(f"{tier.url}/table")
    table.optimize.compact()
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)


async def records_of(held: Tended, store: Store, topic: str) -> list[int]:
    """Return the first offsets that the index finds in each queue of *topic*."""
    found = []
    for queue in store.queues.topics[topic].values():
        for offset in range(queue.next_offset):
            span = await held.index.finder.find(queue, offset)
            assert span.place is not None
            found.append(offset)
    return found


async def test_a_foreign_optimize_and_vacuum_are_survived_by_a_broker_that_uploads(
    tmp_path: Path, local_tier: Tier
) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 60, topics=("T", "orders"))
        async with tended(store, Place(local_tier), tmp_path, compact_bytes=MIB) as held:
            await uploaded(held)
            optimize(local_tier)
            filled_store(store, 60, 60, topics=("T", "orders"))
            await tend(held)
            assert any(file.name is None for file in table_of(local_tier).files())
            assert len(await records_of(held, store, "T")) == 60
            table = DeltaTable(f"{local_tier.url}/table").to_pyarrow_table(columns=["_position"])
            expected = [position for position, _ in log_records(store)]
            assert sorted(table.column(0).to_pylist()) == expected
            optimize(local_tier)
            filled_store(store, 6, 120, topics=("T", "orders"))
            await uploaded(held)
            assert len(await records_of(held, store, "orders")) == 63
        table = DeltaTable(f"{local_tier.url}/table").to_pyarrow_table(columns=["_position"])
        assert sorted(table.column(0).to_pylist()) == [position for position, _ in log_records(store)]
