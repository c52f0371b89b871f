"""Removal by age while the wall clock is wrong: nothing goes because the clock jumped."""

import logging

import pytest
from msgspec.structs import replace
from tests.store.conftest import OpenStore
from trio.testing import MockClock

from martlet.store import Store, StoreConfig
from martlet.testing.stores import ManualClock, drain, message, small_config

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
EVERY_HOUR = ";".join(f"{hour:02}" for hour in range(24))
CONFIG = small_config(delete_when=EVERY_HOUR)
RESERVED_S = CONFIG.file_reserved_hours * 3600


def fill(store: Store, segments: int) -> None:
    """Append until the log has this many segments more."""
    wanted = len(store.segments.items) + segments
    while len(store.segments.items) < wanted:
        store.writer.append(message(b"x" * 500), 0)
        store.committer.commit()
    store.flusher.flush_now()


async def look(store: Store, times: int = 1) -> int:
    """Let retention do its work *times* times; return how many segments are left."""
    await store.upkeep.checkpointer.checkpoint()
    for _ in range(times):
        store.upkeep.retention.look()
    return len(store.segments.items)


async def filled(open_store: OpenStore, segments: int = 30, config: StoreConfig = CONFIG) -> Store:
    store = await open_store(config)
    fill(store, segments)
    return store


def pass_time(mock_clock: MockClock, clock: ManualClock, seconds: float) -> None:
    """Let real time pass: both clocks go on."""
    mock_clock.jump(seconds)
    clock.ms += int(seconds * 1000)


async def test_a_clock_that_jumped_ahead_at_a_restart_removes_nothing_at_once(
    open_store: OpenStore, clock: ManualClock, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    await (await filled(open_store)).close()
    right_ms = clock.ms
    for _ in range(3):  # nor does another restart, when the newest record has the wrong time
        clock.ms = right_ms + 400 * DAY_MS
        caplog.clear()
        store = await open_store(CONFIG)
        assert await look(store, 100) >= 30
        assert store.statistics().overdue_hours == 400 * 24 - CONFIG.file_reserved_hours
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(said) == 1
        assert "397.0 days past store.file_reserved_hours" in said[0]
        store.writer.append(message(b"y"), 0)
        store.committer.commit()
        await store.close()
    clock.ms = right_ms + HOUR_MS
    store = await open_store(CONFIG)
    assert await look(store, 100) >= 30
    assert store.statistics().overdue_hours == 0


async def test_a_clock_that_jumped_ahead_while_the_store_runs_removes_nothing_at_once(
    open_store: OpenStore, clock: ManualClock, mock_clock: MockClock
) -> None:
    store = await filled(open_store)
    before = await look(store)
    pass_time(mock_clock, clock, 60 * 3600)
    assert await look(store) == before
    clock.ms += 400 * DAY_MS
    assert await look(store, 100) == before
    clock.ms -= 400 * DAY_MS
    assert await look(store, 100) == before


async def test_overdue_segments_go_as_fast_as_they_came(
    open_store: OpenStore, clock: ManualClock, mock_clock: MockClock
) -> None:
    store = await filled(open_store)
    before = await look(store)
    clock.ms += 400 * DAY_MS
    assert await look(store) == before
    pass_time(mock_clock, clock, RESERVED_S / before + 1)
    assert await look(store, 100) == before - 1
    pass_time(mock_clock, clock, RESERVED_S / 2)
    assert before / 3 < await look(store, 100) < 2 * before / 3
    left = len(store.segments.items)
    fill(store, 10)  # what is written after a long stop does not pile up behind what was there
    pass_time(mock_clock, clock, 4 * RESERVED_S)
    assert await look(store, 100) < left


async def test_a_broker_that_was_off_for_a_day_removes_what_is_due(open_store: OpenStore, clock: ManualClock) -> None:
    await (await filled(open_store)).close()
    clock.ms += (CONFIG.file_reserved_hours + 48) * HOUR_MS
    store = await open_store(CONFIG)
    fill(store, 1)
    assert await look(store, 100) < 5


async def test_a_disk_that_fills_up_is_relieved_whatever_the_clock_says(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await filled(open_store, config=small_config(delete_when=EVERY_HOUR, disk_clean_ratio=0.0))
    clock.ms += 400 * DAY_MS
    assert await look(store, 100) == 1


async def test_segments_that_a_full_disk_removes_early_are_warned_of(
    open_store: OpenStore, clock: ManualClock, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Consumers may not have read their messages. There is one warning a minute, and it counts all since the last."""
    store = await filled(open_store, 45, small_config(disk_clean_ratio=0.0))
    began = caplog.records.copy()

    def warnings() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING and each not in began]

    pass_time(mock_clock, clock, HOUR_MS / 1000)
    fill(store, 1)
    names = [segment.path for segment in store.segments.items]
    await look(store)
    (text,) = warnings()
    assert text.startswith(f"10 segments up to {names[9]} were removed before store.file_reserved_hours (72) because ")
    assert "and store.disk_clean_ratio is 0: messages stored until 20" in text
    assert "are gone, also those that consumers have not read; give the data directory more space, or set" in text
    await look(store, 2)
    assert len(warnings()) == 1
    pass_time(mock_clock, clock, 61)
    await look(store)
    assert warnings()[1:] == [text.replace("10 segments", "30 segments").replace(names[9], names[39])]
    pass_time(mock_clock, clock, 61)
    await look(store)
    assert len(warnings()) == 3
    pass_time(mock_clock, clock, 61)
    await look(store)
    assert len(warnings()) == 3
    assert store.statistics().segments_removed_early == len(names) - 1


async def test_segments_that_a_full_disk_removes_in_time_are_not_warned_of(
    open_store: OpenStore, clock: ManualClock, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = await filled(open_store, 5, small_config(disk_clean_ratio=0.0))
    pass_time(mock_clock, clock, RESERVED_S + 60)
    fill(store, 1)
    pass_time(mock_clock, clock, RESERVED_S + 60)
    assert await look(store) == 1
    assert not [each for each in caplog.records if "before store.file_reserved_hours" in each.getMessage()]
    assert store.statistics().segments_removed_early == 0


async def test_without_an_hour_only_the_disk_decides(open_store: OpenStore, clock: ManualClock) -> None:
    store = await filled(open_store, config=small_config(disk_used_ratio_max=0.0))
    clock.ms += 400 * DAY_MS
    fill(store, 1)
    assert await look(store, 100) < 5
    assert store.statistics().overdue_hours == 0


async def test_a_clock_that_jumps_back_is_logged_and_removes_nothing(
    open_store: OpenStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = await filled(open_store)
    right_ms = clock.ms
    before = await look(store)
    clock.ms = 0
    assert await look(store, 5) == before
    assert store.statistics().clock_behind_hours == right_ms / HOUR_MS
    assert [r.getMessage() for r in caplog.records if "behind the newest record" in r.getMessage()] != []
    assert len(caplog.records) == 1
    clock.ms = right_ms
    assert await look(store) == before
    assert store.statistics().clock_behind_hours == 0


async def test_records_of_a_wrong_early_time_do_not_age_those_before_them(
    open_store: OpenStore, clock: ManualClock
) -> None:
    store = await filled(open_store, 1)
    right_ms, clock.ms = clock.ms, HOUR_MS
    fill(store, 3)
    clock.ms = right_ms + HOUR_MS
    fill(store, 3)
    assert await look(store, 100) == 7
    clock.ms = right_ms + 71 * HOUR_MS
    assert await look(store, 100) == 7
    clock.ms = right_ms + 74 * HOUR_MS
    assert await look(store, 100) < 5
    assert len(drain(store, store.queue("T", 0))) > 0


async def test_segments_from_the_future_are_removed_with_those_after_them(
    open_store: OpenStore, clock: ManualClock
) -> None:
    store = await filled(open_store, 3)
    right_ms = clock.ms
    clock.ms += 400 * DAY_MS
    fill(store, 3)
    clock.ms = right_ms + HOUR_MS
    fill(store, 3)
    clock.ms = right_ms + 71 * HOUR_MS
    assert await look(store, 100) == 9
    clock.ms = right_ms + 74 * HOUR_MS
    assert await look(store, 100) < 5


async def test_a_log_that_is_all_of_a_time_to_come_stays(open_store: OpenStore, clock: ManualClock) -> None:
    store = await filled(open_store, 5)
    clock.ms -= 400 * DAY_MS
    for _ in range(5):
        clock.ms += 70 * DAY_MS
        assert await look(store, 100) == 5


async def test_a_changed_age_holds_from_the_next_look_on(open_store: OpenStore, clock: ManualClock) -> None:
    store = await filled(open_store)
    clock.ms += 5 * HOUR_MS
    assert await look(store) >= 30
    store.set_config(replace(store.config, file_reserved_hours=4))
    assert await look(store, 10) == 1
    assert (store.config.file_reserved_hours, store.upkeep.topic_retention.hours_max) == (4, 4)
