"""Whatever fails, and whenever: the tier has no gap and no duplicate, and the floor is never ahead of what it has."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from martlet.errors import Refused
from martlet.store import Store
from martlet.testing.stores import ManualClock, message
from martlet_tiered import config as configuring
from martlet_tiered.errors import AccessRefused, Fenced, StoreUnavailable, TierError
from martlet_tiered.names import DataName
from martlet_tiered.upload import uploader as uploading

from .cold import Tier, now_ms
from .stores import Faulty
from .uploads import (
    Held,
    Killed,
    Place,
    begin_upload,
    check_tier,
    fill,
    filled_store,
    open_store,
    table_of,
    tier_records,
    until,
    upload_all,
)

DAY_MS: Final = 86_400_000
CALLS: Final = frozenset(
    ("create", "size", "read", "read_range", "open", "take_over", "append", "rewrite", "files", "checkpoint", "collect")
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for long in real time."""
    monkeypatch.setattr(uploading, "POLL_S", 0.005)
    monkeypatch.setattr(uploading, "BACKOFF_S", 0.005)
    monkeypatch.setattr(uploading, "BACKOFF_MAX_S", 0.02)


class Trip:
    """Counts the calls of all objects and tables that it wraps, and raises at one of them, before or after its effect.

    The call is numbered from 1 on.
    """

    def __init__(self, number: int, error: BaseException, *, after: bool) -> None:
        self.count = 0
        self.name = ""
        self._number = number
        self._error = error
        self._after = after

    def wrap(self, inner: Any) -> "Tripping":
        return Tripping(inner, self)

    def call(self, name: str, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        self.count += 1
        trips = self.count == self._number
        if trips:
            self.name = name
        if trips and not self._after:
            raise self._error
        result = method(*args, **named)
        if trips:
            raise self._error
        return result


class Tripping:
    """Objects or a table of which some calls fail."""

    def __init__(self, inner: Any, trip: Trip) -> None:
        self._inner = inner
        self._trip = trip

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in CALLS:
            return found
        return lambda *args, **named: self._trip.call(name, found, *args, **named)


def check_floor(held: Held, tier: Tier, store: Store) -> None:
    """Assert that each record before the floor can be read in the tier, and nothing is there twice."""
    end = table_of(tier).end
    assert held.uploader.released <= (end or 0)
    check_tier(tier, store, end or 0)


STEPS: Final = 16


async def killed(held: Held) -> None:
    """Run an uploader to its end, or to the end of the log."""
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(held.uploader.run)
            await held.finish()
            raise Killed
    except* Killed:
        pass


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_broker_killed_at_any_call_goes_on_where_it_was(tmp_path: Path, after: bool) -> None:
    names = set()
    for number in range(1, STEPS):
        folder = tmp_path / str(number)
        tier = Tier(str(folder / "tier"))
        async with open_store(folder) as store:
            filled_store(store, 25, topics=("T", "orders"))
            trip = Trip(number, Killed(), after=after)
            held = Held(store, Place(tier, wrap=trip.wrap))
            await killed(held)
            check_floor(held, tier, store)
            names.add(trip.name)
            filled_store(store, 5, 25, topics=("T", "orders"))
            again = await upload_all(store, Place(tier))
            check_tier(tier, store)
            check_floor(again, tier, store)
            assert set(again.followed.files) == {file.path for file in table_of(tier).files()}
    assert names >= {"create", "size", "read_range", "open", "take_over", "append"}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_failure_at_any_call_is_tried_again(tmp_path: Path, after: bool) -> None:
    for number in range(1, STEPS):
        folder = tmp_path / str(number)
        tier = Tier(str(folder / "tier"))
        async with open_store(folder) as store:
            filled_store(store, 25, topics=("T", "orders"))
            trip = Trip(number, StoreUnavailable("the store is down"), after=after)
            held = await upload_all(store, Place(tier, wrap=trip.wrap))
            check_tier(tier, store)
            assert held.uploader.progress.failures == (trip.name not in ("", "checkpoint", "collect"))
            assert set(held.followed.files) == {file.path for file in table_of(tier).files()}


async def test_a_follower_that_fails_holds_the_floor_back(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 25)
        held = Held(store, Place(local_tier))
        committed, failures = held.followed.committed, iter([OSError(5, "Input/output error")] * 2)

        async def fail(*args: Any) -> None:
            assert held.uploader.released < (table_of(local_tier).end or 0)
            for error in failures:
                raise error
            await committed(*args)

        held.followed.committed = fail  # type: ignore[method-assign, assignment]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(held.uploader.run)
            await held.finish()
            nursery.cancel_scope.cancel()
        check_tier(local_tier, store)
        assert held.uploader.progress.failures == 2


async def test_leftovers_of_failed_attempts_are_collected_with_their_keys(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 25)
        for number in (5, 8, 11):
            trip = Trip(number, StoreUnavailable("down"), after=True)
            await upload_all(store, Place(local_tier, wrap=trip.wrap))
            filled_store(store, 5, store.queue("T", 0).next_offset)
        table, objects = table_of(local_tier), local_tier.objects()
        table.take_over("collector")
        known = {file.path for file in table.files()}
        names = {each.name for folder in ("table/date=2023-11-14", "index") for each in objects.list_folder(folder)}
        known |= {f"{path}.keys" for path in known}
        leftovers = {name for name in names if name.partition("/")[2] not in known}
        assert {name.partition("/")[0] for name in leftovers} == {"table", "index"}
        assert table.collect(now_ms()) == []
        assert set(table.collect(now_ms() + 2 * DAY_MS)) == leftovers
        check_tier(local_tier, store, table.end)
        left = {each.name for folder in ("table/date=2023-11-14", "index") for each in objects.list_folder(folder)}
        assert left == names - leftovers


async def test_keys_of_removed_files_are_collected_with_them(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 25)
        await upload_all(store, Place(local_tier))
    table, objects = table_of(local_tier), local_tier.objects()
    table.take_over("owner")
    old = table.files()[0]
    table.rewrite([old], [], now_ms() - 8 * DAY_MS, changes_data=True)
    recent = table.files()[0]
    table.rewrite([recent], [], now_ms() - 6 * DAY_MS, changes_data=True)
    newer = DataName("2023-11-14", "topic", table.epoch + 1, 0, 9)
    objects.create(f"index/{newer.path}.keys", b"of a newer owner")
    objects.create("index/other/notes.txt", b"of nobody")
    expected = [f"index/{old.path}.keys", "index/other/notes.txt", f"table/{old.path}"]
    assert sorted(table.collect(now_ms() + 2 * DAY_MS)) == sorted(expected)
    assert objects.read(f"index/{recent.path}.keys")
    assert objects.read(f"index/{newer.path}.keys")


# ---- stores that fail


async def test_a_store_that_fails_30_percent_of_the_requests_loses_nothing(
    tmp_path: Path, faulty: Faulty, faulty_tier: Tier
) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 30)
        faulty.share = 0.3
        await upload_all(store, Place(faulty_tier), range_bytes=4000)
        filled_store(store, 5, 30)
        await upload_all(store, Place(faulty_tier))
        faulty.share = 0.0
        check_tier(faulty_tier, store)
        assert sum(faulty.counts.values()) > 10


async def test_a_store_that_is_down_is_tried_again_and_says_how_far_it_is_behind(
    tmp_path: Path, faulty: Faulty, faulty_tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 30)
        faulty.answer = 503, b"<Error><Code>SlowDown</Code></Error>"
        tier = Tier(faulty_tier.url, {**faulty_tier.settings, "retries_max": 0}, faulty_tier.environ)
        async with begin_upload(store, Place(tier)) as held:
            await until(lambda: held.uploader.progress.failures > 3)
            assert held.uploader.released == 0
            reason = held.uploader.reason
            assert reason.startswith("cold tier is 0.0 MiB behind: 's3://lake/")
            assert "answers 503 SlowDown; it may be overloaded" in reason
            assert sum("behind" in record.message for record in caplog.records) == 1
            store.writer.append(message(b"accepted", "T"), 0)
            store.committer.commit()
            store.flusher.flush_now()
            faulty.answer = None
            await held.finish()
            assert "it is uploading them" in held.uploader.reason
        check_tier(faulty_tier, store)


async def test_a_store_that_hangs_is_left_and_harms_nothing(tmp_path: Path, faulty: Faulty, faulty_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 10)
        quick = {"retries_max": 0, "connect_timeout_ms": 300, "request_timeout_ms": 300, "upload_timeout_ms": 300}
        tier = Tier(faulty_tier.url, {**faulty_tier.settings, **quick}, faulty_tier.environ)
        async with begin_upload(store, Place(tier)) as held:
            await held.finish()
            faulty.silent = True
            filled_store(store, 10, 10)
            await until(lambda: held.uploader.progress.failures > 1)
            before = held.uploader.released
            assert before < store.durable
            assert "does not answer in time" in held.uploader.reason
            faulty.silent = False
            faulty.hang_up()
            await held.finish()
        check_tier(faulty_tier, store)


async def test_a_call_that_never_returns_is_abandoned_and_cannot_commit_later(
    tmp_path: Path, local_tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = trio.Event()
    hung: list[object] = []
    fenced: list[object] = []

    class Hanging(Tripping):
        def __getattr__(self, name: str) -> Any:
            found = getattr(self._inner, name)
            if name != "append" or hung:
                return found

            def hang(*args: Any) -> None:
                hung.append(args)
                trio.from_thread.run(gate.wait)
                with pytest.raises(Fenced):
                    found(*args)
                fenced.append(args)

            return hang

    monkeypatch.setattr(configuring, "DEADLINE_SPARE_S", -619.0)
    async with open_store(tmp_path) as store:
        filled_store(store, 25)
        place = Place(local_tier, wrap=lambda found: Hanging(found, Trip(0, Killed(), after=False)))
        limits = {"upload_timeout_ms": 600_000, "request_timeout_ms": 60_000, "retry_ms": 20_000}
        async with begin_upload(store, place, **limits) as held:
            await held.finish()
            assert held.uploader.progress.failures == 1
            gate.set()
            await until(lambda: bool(fenced))
        check_tier(local_tier, store)


async def test_a_stop_does_not_wait_for_a_store_that_hangs(tmp_path: Path, faulty: Faulty, faulty_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 10)
        faulty.silent = True
        async with begin_upload(store, Place(faulty_tier)) as held:
            await until(lambda: bool(faulty.connections))
        assert held.uploader._threads.abandoned == 1, "the call is still under way"
        faulty.silent = False
        faulty.hang_up()
        await until(lambda: not held.uploader._threads.abandoned)


async def test_a_full_disk_of_the_tier_is_survived(
    tmp_path: Path, local_tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 25)
        link, full = os.link, [True]

        def refuse(*args: Any, **named: Any) -> None:
            if full and "kind=" in str(args[1]):
                raise OSError(28, "No space left on device")
            link(*args, **named)

        monkeypatch.setattr(os, "link", refuse)
        async with begin_upload(store, Place(local_tier)) as held:
            await until(lambda: held.uploader.progress.failures > 1)
            assert "No space left on device; check the disk" in held.uploader.reason
            assert held.uploader.released == 0
            full.clear()
            await held.finish()
        check_tier(local_tier, store)


# ---- owners


async def test_a_broker_that_was_replaced_stops_and_the_store_goes_on(
    tmp_path: Path, tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_store(tmp_path / "one") as first, open_store(tmp_path / "two") as second:
        filled_store(first, 20)
        filled_store(second, 40)
        async with begin_upload(first, Place(tier)) as old:
            await old.finish()
            floor = old.uploader.released
            async with begin_upload(second, Place(tier)) as new:
                await new.finish()
                filled_store(first, 20, 20)
                await old.uploader.release(first.durable)
                await until(lambda: "has an owner of epoch 2 now" in old.uploader.reason)
                assert old.uploader.released == floor
                filled_store(first, 1, 40)
                filled_store(second, 5, 40)
                await new.finish()
        check_tier(tier, second)
        assert "the cold tier has stopped uploading" in caplog.text
        assert old.uploader.released == floor


async def test_a_broker_that_failed_does_not_take_the_table_back(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 20)
        down: list[TierError] = []

        class Down(Tripping):
            def __getattr__(self, name: str) -> Any:
                if down and name == "create":
                    raise down[0]
                return getattr(self._inner, name)

        place = Place(local_tier, wrap=lambda found: Down(found, Trip(0, Killed(), after=False)))
        async with begin_upload(store, place) as held:
            await held.finish()
            down.append(AccessRefused("refuses access"))
            filled_store(store, 20, 20)
            await held.uploader.release(store.durable)
            await until(lambda: held.uploader.progress.failures > 1)
            table = table_of(local_tier)
            table.take_over("another broker")
            await until(lambda: "owner of epoch" in held.uploader.reason)
            opened = place.opened
            down.clear()
            await trio.sleep(0.1)
            assert place.opened == opened
            table.refresh()
            assert table.epoch == table._log.number("martlet-owner")


async def test_the_table_of_another_broker_is_not_touched(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 10)
        await upload_all(store, Place(local_tier, "a"))
        before = tier_records(local_tier)
        async with begin_upload(store, Place(local_tier, "b")) as held:
            await until(lambda: held.uploader.progress.failures > 0)
            assert "belongs to broker 'a'" in held.uploader.reason
            assert held.uploader.released == 0
        assert tier_records(local_tier) == before


async def test_other_programs_may_change_the_table(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 25)
        async with begin_upload(store, Place(local_tier)) as held:
            await held.finish()
            table_of(local_tier)._log.table.optimize.compact()
            filled_store(store, 5, 25)
            await held.finish()
            files = {file.path for file in table_of(local_tier).files()}
            await until(lambda: set(held.followed.files) == files)
        assert any(path.split("/")[-1].startswith("part-") for path in files)


# ---- the clock and the disk


@pytest.mark.parametrize("jump_ms", [-400 * DAY_MS, 400 * DAY_MS], ids=["back", "ahead"])
async def test_a_clock_that_jumps_loses_and_repeats_nothing(tmp_path: Path, local_tier: Tier, jump_ms: int) -> None:
    clock = ManualClock()
    async with open_store(tmp_path, clock) as store:
        filled_store(store, 20)
        async with begin_upload(store, Place(local_tier)) as held:
            await held.finish()
            clock.ms += jump_ms
            held.uploader._clock.ms += jump_ms  # type: ignore[attr-defined]
            held.rewriter._collect_at = 0.0
            filled_store(store, 20, 20)
            await held.finish()
        check_tier(local_tier, store)


@asynccontextmanager
async def kept_store(path: Path, place: Place) -> AsyncIterator[tuple[Store, Held]]:
    """A store with full segments whose retention keeps what *place* has not got, and its uploader."""
    async with open_store(path, disk_used_ratio_max=0.0, disk_clean_ratio=0.0, disk_full_ratio=0.0) as store:
        filled_store(store, 80)
        await store.upkeep.checkpointer.checkpoint()
        held = Held(store, place, range_ms=DAY_MS, range_bytes=1 << 30)
        store.upkeep.retention.add_keeper(held.uploader)
        yield store, held


async def test_retention_removes_only_what_is_uploaded_and_the_refusal_says_why(
    tmp_path: Path, local_tier: Tier
) -> None:
    down = [True]

    def place_wrap(found: Any) -> Any:
        if down:
            raise StoreUnavailable("the store is down")
        return found

    async with kept_store(tmp_path, Place(local_tier, wrap=place_wrap)) as (store, held):
        retention = store.upkeep.retention
        async with trio.open_nursery() as nursery:
            nursery.start_soon(held.uploader.run)
            await until(lambda: held.uploader.progress.failures > 0)
            retention.look()
            await retention.release()
            retention.look()
            assert store.first_position == 0
            with pytest.raises(Refused, match=r"cold tier is 0\.0 MiB behind: the store is down"):
                fill(store, (message(b"one more", "T"), 0))
            down.clear()
            await until(lambda: held.uploader.released >= store.segments.items[-1].start)
            await retention.release()
            retention.look()
            assert 0 < store.first_position <= held.uploader.released
            nursery.cancel_scope.cancel()
        assert next(position for position, _ in tier_records(local_tier)) == 0
