"""Files of the table lose the messages of deleted topics, and nothing else, whatever fails and whenever."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from martlet.records.layout import RecordView
from martlet.runtime.checksum import crc32_each
from martlet.runtime.io_threads import IoThreads
from martlet.runtime.steps import finish_now
from martlet.store import Store
from martlet.testing.stores import message
from martlet_columns.records import Records
from martlet_tiered.errors import AccessRefused, ObjectDamaged, StoreUnavailable, TierError
from martlet_tiered.files import DataFile
from martlet_tiered.format import writing
from martlet_tiered.format.keys import decode_keys, keys_name
from martlet_tiered.format.writing import write_file
from martlet_tiered.local import LocalObjects
from martlet_tiered.names import DataName
from martlet_tiered.objects import Objects
from martlet_tiered.reading.index import FILE_NAME, TierIndex
from martlet_tiered.rewrite import merging
from martlet_tiered.rewrite.dropping import Dropping
from martlet_tiered.rewrite.merging import Rewritten, merge_files
from martlet_tiered.status import PurgeStatus
from martlet_tiered.upload import uploader as uploading

from .cold import Tier, now_ms
from .stores import Faulty
from .test_upload_faults import Trip
from .uploads import (
    Followed,
    Killed,
    Place,
    fill,
    filled_store,
    log_records,
    open_store,
    table_of,
    tier_records,
    until,
    uploader_of,
)

DAY = "2026-11-28"
NOTHING = Dropping({})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for long in real time, and make row groups of a few records."""
    monkeypatch.setattr(uploading, "POLL_S", 0.005)
    monkeypatch.setattr(uploading, "BACKOFF_S", 0.005)
    monkeypatch.setattr(uploading, "BACKOFF_MAX_S", 0.02)
    monkeypatch.setattr(writing, "GROUP_BYTES", 2000)
    monkeypatch.setattr(writing, "GROUP_BYTES_MIN", 500)


# ---- files


def sources(objects: Objects, store: Store, parts: int) -> tuple[list[DataFile], list[bytes]]:
    """Store the records of *store* in several files, of neighbouring ranges; return the files and the records."""
    found = list(log_records(store))
    size = -(-len(found) // parts)
    files = []
    for at in range(0, len(found), size):
        part = found[at : at + size]
        name = DataName(DAY, "topic", 1, part[0][0], part[-1][0] + 1)
        made = write_file(name, "a", Records(bytearray().join(data for _, data in part)), 1)
        objects.create(f"table/{name.path}", made.data)
        objects.create(keys_name(name.path), made.keys)
        files.append(made.file)
    return files, [data for _, data in found]


def merged(objects: Objects, files: Sequence[DataFile], dropping: Dropping = NOTHING, **options: Any) -> Rewritten:
    assert files[0].name is not None
    assert files[-1].name is not None
    name = DataName(DAY, "topic", 2, files[0].name.begin, files[-1].name.end, 1)
    return finish_now(merge_files(objects, files, name, "a", dropping, lambda: 7, **options))


@pytest.mark.parametrize("window", [1, 3000, 20 << 20])
@pytest.mark.parametrize("keeps", [False, True])
async def test_a_merged_file_is_the_one_that_an_upload_of_all_its_records_makes(
    tmp_path: Path, local_tier: Tier, monkeypatch: pytest.MonkeyPatch, window: int, keeps: bool
) -> None:
    monkeypatch.setattr(merging, "WINDOW_BYTES", window)
    objects = local_tier.objects()
    async with open_store(tmp_path) as store:
        filled_store(store, 60)
        files, records = sources(objects, store, 7)
    made = merged(objects, files, keeps=keeps)
    (file,) = made.files
    assert file.path == f"date={DAY}/kind=topic/e2-0-{files[-1].name.end}-r1-0.parquet"  # type: ignore[union-attr]
    expected = write_file(file.name, "a", Records(bytearray().join(records)), 7)  # type: ignore[arg-type]
    assert made.footers == [expected.footer]
    assert objects.read(f"table/{file.path}") == bytes(expected.data)
    assert objects.read(keys_name(file.path)) == expected.keys
    assert (file, made.records, made.dropped) == (expected.file, 60, 0)


async def test_a_large_merge_becomes_several_files(
    tmp_path: Path, local_tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "FILE_BYTES", 20_000)
    objects = local_tier.objects()
    async with open_store(tmp_path) as store:
        filled_store(store, 200)
        files, records = sources(objects, store, 3)
    made = merged(objects, files)
    assert len(made.files) > 1
    assert [file.name.part for file in made.files if file.name] == list(range(len(made.files)))
    assert sum(span.count for footer in made.footers for span in footer.spans) == len(records) == made.records


async def test_records_before_a_deletion_leave_with_their_keys(tmp_path: Path, local_tier: Tier) -> None:
    objects = local_tier.objects()
    async with open_store(tmp_path) as store:
        filled_store(store, 60)
        (file,), records = sources(objects, store, 1)
    position = RecordView(records[40]).position
    made = merged(objects, [file], Dropping({"T": position, "orders": 0, "other": 1 << 62}))
    views = [RecordView(data) for data in records]
    kept = [view for view in views if view.topic != "T" or view.position >= position]
    expected = write_file(
        made.files[0].name,  # type: ignore[arg-type]
        "a",
        Records(bytearray().join(view.buffer[view.start : view.start + view.size] for view in kept)),
        7,
    )
    assert made.footers == [expected.footer]
    assert made.dropped == 60 - len(kept) > 10
    assert len(decode_keys(objects.read(keys_name(made.files[0].path)))) < len(
        decode_keys(objects.read(keys_name(file.path)))
    )


async def test_a_file_that_keeps_all_or_nothing_is_not_written_again(tmp_path: Path, local_tier: Tier) -> None:
    objects = local_tier.objects()
    async with open_store(tmp_path) as store:
        filled_store(store, 20)
        (file,), _ = sources(objects, store, 1)
    before = objects.list_folder("table")
    assert merged(objects, [file], Dropping({"other": 1 << 62})) == Rewritten([], [], 20, 0)
    assert merged(objects, [file], Dropping({}, 1 << 62)) == Rewritten([], [], 0, 20)
    assert objects.list_folder("table") == before


def flip(path: Path) -> None:
    """Damage a file in its first row group."""
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)


async def test_a_damaged_source_is_left_as_it_is(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 40)
        files, _ = sources(local_tier.objects(), store, 2)
    flip(Path(local_tier.url, "table", files[1].path))
    with pytest.raises(ObjectDamaged, match=r"row group 0 of .* is damaged"):
        merged(local_tier.objects(), files)


async def test_a_store_that_returns_other_data_is_noticed(
    tmp_path: Path, local_tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = local_tier.objects()
    async with open_store(tmp_path) as store:
        filled_store(store, 40)
        files, _ = sources(objects, store, 2)
    calls: list[int] = []

    def wrong(parts: Iterator[memoryview]) -> list[int]:
        """A CRC of the second read of a record that differs."""
        found = crc32_each(parts)
        calls.append(len(found))
        if sum(calls) > 40:
            found[0] ^= 1
        return found

    monkeypatch.setattr(merging, "crc32_each", wrong)
    with pytest.raises(ObjectDamaged, match="has other records than the files before"):
        merged(objects, files)


# ---- brokers


class Tended:
    """An uploader with an index; tests start each look for deleted topics."""

    def __init__(self, store: Store, place: Place, folder: Path, **settings: Any) -> None:
        self.store = store
        config = place.tier.config(**{"range_bytes": 3000, "range_ms": 1, "compact_bytes": 0, **settings})
        self.index = TierIndex(store, str(folder / FILE_NAME), place.tier.url, place.tier.objects(), IoThreads("store"))
        self.uploader, self.rewriter = uploader_of(store, place, config, self.index)

    async def facts(self) -> tuple[list[str], dict[str, int]]:
        """Return what the index knows of deleted topics once it is complete."""
        while True:
            found = await self.index.files_of_deleted()
            if found is not None:
                return found
            await trio.sleep(0.002)

    async def purge(self) -> None:
        """Upload all of the log, and remove deleted topics from the table."""
        await self.uploader.release(self.store.durable)
        await until(lambda: self.uploader.released >= self.store.durable)
        while (await self.facts())[0]:
            self.rewriter.look_now()
            await trio.sleep(0.01)


@asynccontextmanager
async def tended(store: Store, place: Place, folder: Path, **settings: Any) -> AsyncIterator[Tended]:
    made = Tended(store, place, folder, **settings)
    await made.index.begin()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.index.run)
        nursery.start_soon(made.uploader.run)
        yield made
        nursery.cancel_scope.cancel()


def live(store: Store, deleted: Sequence[str], position: int) -> list[tuple[int, bytes]]:
    """Return the records of the log but for those of the topics *deleted* before *position*."""
    return [(at, data) for at, data in log_records(store) if at >= position or RecordView(data).topic not in deleted]


async def test_a_deleted_topic_leaves_the_files_and_its_next_life_stays(tmp_path: Path, tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store)
        async with tended(store, Place(tier), tmp_path) as made:
            await made.purge()
            before = {file.path for file in table_of(tier).files()}
            store.deletions.delete_topic("T")
            filled_store(store, 10, topics=("T", "orders"))
            deleted = store.deletions.end
            await made.purge()
            assert tier_records(tier) == live(store, ["T"], deleted)
            queue = store.queue("T", 0)
            found = await made.index.finder.find(queue, 0)
            assert found.place is not None
            assert found.place.span.min_position > deleted
            assert made.rewriter.progress.dropped_records > 10
            assert {file.path for file in table_of(tier).files()} != before
        # Old files are there until other programs do not need them any more.
        objects, table = tier.objects(), table_of(tier)
        table.take_over("collector")
        replaced = before - {file.path for file in table.files()}
        stored = {each.name for each in objects.list_folder("table")}
        assert {f"table/{path}" for path in replaced} <= stored
        assert table.collect(now_ms(), 24) == []
        gone = table.collect(now_ms(), 0)
        assert set(gone) == {f"table/{path}" for path in replaced} | {keys_name(path) for path in replaced}
        assert tier_records(tier) == live(store, ["T"], deleted)


async def test_after_a_rebuild_of_the_index_deletions_are_known_again(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store)
        async with tended(store, Place(local_tier), tmp_path) as made:
            await made.uploader.release(store.durable)
            await until(lambda: made.uploader.released >= store.durable)
        store.deletions.delete_topic("orders")
        filled_store(store, 10, 60)
        deleted = store.deletions.end
        async with tended(store, Place(local_tier), tmp_path) as made:
            await made.uploader.release(store.durable)
            await until(lambda: made.uploader.released >= store.durable)
        (tmp_path / FILE_NAME).unlink()
        async with tended(store, Place(local_tier), tmp_path) as made:
            await until(lambda: made.index.is_complete)
            assert (await made.facts())[1].keys() == {"orders"}
            await made.purge()
        assert tier_records(local_tier) == live(store, ["orders"], deleted)


async def test_a_deletion_that_is_not_in_the_table_yet_changes_no_file(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store)
        async with tended(store, Place(local_tier), tmp_path) as made:
            await made.purge()
            made.uploader._config = local_tier.config(range_ms=86_400_000, range_bytes=1 << 30)
            made.uploader._bytes_max = 1 << 30
            store.deletions.delete_topic("T")
            store.flusher.flush_now()
            paths, deletions = await made.facts()
            assert paths
            assert deletions == {}
            made.rewriter.look_now()
            await until(lambda: not made.rewriter.is_due)
            assert made.rewriter.progress.rewritten_files == 0


STEPS = 17


async def purge_or_die(made: Tended, work: Callable[[Tended], Awaitable[None]] = Tended.purge) -> None:
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.index.run)
            nursery.start_soon(made.uploader.run)
            await work(made)
            raise Killed
    except* Killed:
        pass


def one_file_with_a_deleted_topic(store: Store) -> None:
    fill(store, *[(message(b"%d" % number, "TU"[number % 2], keys=f"k{number}"), 0) for number in range(12)])


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_broker_killed_at_any_call_of_a_rewrite_goes_on_where_it_was(tmp_path: Path, after: bool) -> None:
    names = set()
    for number in range(1, STEPS):
        folder = tmp_path / str(number)
        local = Tier(str(folder / "tier"))
        async with open_store(folder) as store:
            one_file_with_a_deleted_topic(store)
            async with tended(store, Place(local), folder) as made:
                await made.purge()
                store.deletions.delete_topic("T")
                store.flusher.flush_now()
                await made.uploader.release(store.durable)
                await until(lambda made=made, store=store: made.uploader.released >= store.durable)  # type: ignore[misc]
            trip = Trip(number, Killed(), after=after)
            made = Tended(store, Place(local, wrap=trip.wrap), folder)
            await made.index.begin()
            await purge_or_die(made)
            names.add(trip.name)
            found = tier_records(local)
            assert found in (live(store, [], 0), live(store, ["T"], store.durable))
            async with tended(store, Place(local), folder) as made:
                await made.purge()
            assert tier_records(local) == live(store, ["T"], store.durable)
    assert names >= {"open", "take_over", "create", "read", "read_range", "rewrite"}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_failure_at_any_call_of_a_rewrite_is_tried_again(tmp_path: Path, after: bool) -> None:
    for number in range(1, STEPS):
        folder = tmp_path / str(number)
        local = Tier(str(folder / "tier"))
        async with open_store(folder) as store:
            one_file_with_a_deleted_topic(store)
            async with tended(store, Place(local), folder) as made:
                await made.purge()
            trip = Trip(number, StoreUnavailable("the store is down"), after=after)
            async with tended(store, Place(local, wrap=trip.wrap), folder) as made:
                store.deletions.delete_topic("T")
                store.flusher.flush_now()
                await made.purge()
            assert tier_records(local) == live(store, ["T"], store.durable)


async def test_a_store_that_fails_30_percent_of_the_requests_loses_nothing(
    tmp_path: Path, faulty: Faulty, faulty_tier: Tier
) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 30)
        async with tended(store, Place(faulty_tier), tmp_path) as made:
            await made.purge()
            faulty.share = 0.3
            store.deletions.delete_topic("T")
            filled_store(store, 5, 30)
            deleted = store.deletions.end
            await made.purge()
            faulty.share = 0.0
        assert tier_records(faulty_tier) == live(store, ["T"], deleted)
        assert sum(faulty.counts.values()) > 10


async def test_a_broker_that_was_replaced_rewrites_nothing(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        one_file_with_a_deleted_topic(store)
        async with tended(store, Place(local_tier), tmp_path) as made:
            await made.purge()
            store.deletions.delete_topic("T")
            store.flusher.flush_now()
            await made.uploader.release(store.durable)
            await until(lambda: made.uploader.released >= store.durable)
            table_of(local_tier).take_over("another")
            before = tier_records(local_tier)
            made.rewriter.look_now()
            await until(lambda: "another" in made.uploader.reason or "epoch" in made.uploader.reason)
        assert tier_records(local_tier) == before


# ---- purges


def failing(monkeypatch: pytest.MonkeyPatch, errors: list[TierError]) -> None:
    """Let removals of data files raise *errors*, one at each call, the last one first."""
    delete = LocalObjects.delete

    def fail(self: LocalObjects, name: str) -> None:
        if errors and name.startswith("table/"):
            raise errors.pop()
        delete(self, name)

    monkeypatch.setattr(LocalObjects, "delete", fail)


@asynccontextmanager
async def deleted_topic(tmp_path: Path, local_tier: Tier) -> AsyncIterator[Tended]:
    """A broker with a file that has messages of a deleted topic; the deletion is in the table."""
    async with open_store(tmp_path) as store:
        one_file_with_a_deleted_topic(store)
        async with tended(store, Place(local_tier), tmp_path) as made:
            await made.purge()
            store.deletions.delete_topic("T")
            store.flusher.flush_now()
            await made.uploader.release(store.durable)
            await until(lambda: made.uploader.released >= store.durable)
            yield made


async def finished(made: Tended, topic: str = "") -> PurgeStatus:
    request = made.rewriter.purge(topic)
    with trio.fail_after(60):
        await request.is_over.wait()
    assert request.status.is_over
    return request.status


async def test_a_purge_ends_with_the_reason_if_the_store_refuses_to_remove(
    tmp_path: Path, local_tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deleted_topic(tmp_path, local_tier) as made:
        failing(monkeypatch, [AccessRefused("DELETE is refused: 403")])
        assert (await finished(made)).error == "DELETE is refused: 403"
        again = await finished(made)
        assert (again.error, again.done, again.objects) == ("", 0, 1)


async def test_a_purge_goes_on_after_the_store_was_down(
    tmp_path: Path, local_tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deleted_topic(tmp_path, local_tier) as made:
        errors: list[TierError] = [StoreUnavailable("the store is down"), StoreUnavailable("the store is down")]
        failing(monkeypatch, errors)
        status = await finished(made)
        assert (errors, status.error, status.done, status.objects) == ([], "", 1, 1)


async def test_purges_end_when_another_broker_takes_the_table_over(tmp_path: Path, local_tier: Tier) -> None:
    async with deleted_topic(tmp_path, local_tier) as made:
        table_of(local_tier).take_over("another")
        assert "has an owner of epoch" in (await finished(made)).error
        await until(lambda: bool(made.rewriter.stopped))
        assert "has an owner of epoch" in (await finished(made, "T")).error


class Incomplete(Followed):
    """An index whose knowledge of deletions a test sets."""

    known: tuple[Sequence[str], dict[str, int]] | None = None

    async def files_of_deleted(self) -> tuple[Sequence[str], dict[str, int]] | None:
        return self.known


@pytest.mark.parametrize("known", [None, (["file-of-another-program.parquet"], {"T": 1})])
@pytest.mark.parametrize("topic", ["", "T"])
async def test_a_purge_waits_until_the_index_knows_the_files_of_the_table(
    tmp_path: Path, local_tier: Tier, known: tuple[Sequence[str], dict[str, int]] | None, topic: str
) -> None:
    async with open_store(tmp_path) as store:
        followed = Incomplete()
        followed.known = known
        rewriter = uploader_of(store, Place(local_tier), local_tier.config(), followed)[1]
        table = table_of(local_tier)
        table.take_over("a")
        request = rewriter.purge(topic)
        await rewriter.step(table)
        assert not request.is_over.is_set()
        assert not rewriter.is_due, "the uploader would do nothing but ask again"
        followed.known = ([], {"T": 1})
        await rewriter.step(table)
        assert (request.status.is_over, request.status.error) == (True, "")


async def test_a_look_for_deleted_topics_is_not_over_before_the_index_is_complete(
    tmp_path: Path, local_tier: Tier
) -> None:
    async with open_store(tmp_path) as store:
        followed = Incomplete()
        rewriter = uploader_of(store, Place(local_tier), local_tier.config(), followed)[1]
        table = table_of(local_tier)
        table.take_over("a")
        rewriter.look_now()
        await rewriter.step(table)
        rewriter._not_before = 0.0
        assert rewriter.is_due


async def test_a_rewrite_has_the_time_of_an_upload_for_each_object(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        config = local_tier.config(upload_timeout_ms=3_600_000, retry_ms=240_000)
        rewriter = uploader_of(store, Place(local_tier), config, Followed())[1]
        assert rewriter._threads._deadline_s == 3600 + 240 + 60
