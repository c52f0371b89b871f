"""Timers outlive the retention of their records: a year-long one is appended again whenever its segment goes."""

from errno import EIO
from itertools import chain
from random import Random
from typing import Any

import pytest
import trio
from tests.cold_disk import cold_disk
from tests.timer.timer_talk import DAY_MS, timed
from trio.testing import MockClock

from martlet.errors import Refused, StoreError
from martlet.message import Record, decode_properties
from martlet.runtime.steps import finish_now
from martlet.runtime.turns import Turns
from martlet.tables.topics import TIMER_TOPIC
from martlet.testing.clock import START_MS, TrioClock
from martlet.testing.disk import FakeDisk
from martlet_timer.config import TimerConfig

SMALL: dict[str, Any] = {"segment_bytes": 8192, "page_bytes": 1024, "cache_bytes": 16_384}
FULL: dict[str, Any] = {"disk_used_ratio_max": 0.8, "disk_clean_ratio": 0.85}
YEAR = TimerConfig(delay_max_s=366 * 86_400)


async def test_a_timer_of_a_year_survives_the_removal_of_its_segment(autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with timed(disk, clock, config=YEAR, topics=("T", "other"), **SMALL, **FULL) as made:
        made.publish(body=b"year", TIMER_DELIVER_MS=START_MS + 365 * DAY_MS, own="kept")
        made.publish(body=b"soon", TIMER_DELIVER_MS=START_MS + 1000)
        store = made.broker.store
        for _ in range(60):
            made.publish("other", b"x" * 900)
            await trio.sleep(0.1)
        disk.used_ratio = 0.99
        for _ in range(3):
            store.upkeep.retention.look()
            await trio.sleep(30)
            made.publish("other", b"x" * 900)
        disk.used_ratio = 0.1
        assert store.first_position > 8192
        assert made.statistics["pending"] == 1
        (moved,) = (record for record in made.records(TIMER_TOPIC) if record.body == b"year")
        assert moved.position >= store.first_position
        assert int(decode_properties(moved.properties)["TIMER_ROLL_TIMES"]) >= 1
    clock.skew_ms += 365 * DAY_MS
    async with timed(disk, clock, config=YEAR, topics=("T", "other"), **SMALL, **FULL) as made:
        await trio.sleep(0.01)
        (record,) = (record for record in made.records() if record.body == b"year")
        properties = decode_properties(record.properties)
        assert (properties["own"], properties["REAL_TOPIC"]) == ("kept", "T")
        assert properties["TIMER_DELIVER_MS"] == str(START_MS + 365 * DAY_MS)
        assert made.statistics["pending"] == 0


async def test_many_timers_are_moved_in_groups_and_each_once(autojump_clock: MockClock) -> None:
    random = Random(2)
    async with timed(segment_bytes=1 << 20) as made:
        for number in range(500):
            made.publish(body=b"%d" % number, TIMER_DELIVER_MS=START_MS + 3_600_000 + random.randrange(5000))
        await trio.sleep(1)
        end = made.broker.store.appended
        await made.broker.turns.finish(made.plugin.timers.roll(0, end))
        made.broker.store.committer.commit()
        await trio.sleep(1)
        assert made.plugin.timers.floor() <= end
        assert all(position >= end for _, position in chain(*made.plugin.timers.pending.in_range(0, 1 << 40)))
        assert made.statistics["pending"] == 500
        await trio.sleep(3605)
        assert sorted(int(body) for body in made.bodies()) == [*range(500)]
        assert max(made.late_ms()) <= 2


async def test_records_on_the_disk_are_read_by_a_thread(autojump_clock: MockClock) -> None:
    disk, fake = cold_disk()
    async with timed(fake, topics=("T", "other"), **SMALL) as made:
        for number in range(20):
            made.publish(body=b"%d" % number, TIMER_DELAY_MS=3_600_000)
        for _ in range(30):
            made.publish("other", b"x" * 900)
        await trio.sleep(1)
        end, disk.on_loop = made.broker.store.appended, 0
        await made.broker.turns.finish(made.plugin.timers.roll(0, end))
        made.broker.store.committer.commit()
        await trio.sleep(1)
        assert made.plugin.timers.floor() > 8192
        assert made.statistics["pending"] == 20
        assert disk.on_loop == 0


async def test_records_in_the_kernels_page_cache_are_read_without_a_thread(autojump_clock: MockClock) -> None:
    disk, fake = cold_disk()
    async with timed(fake, topics=("T", "other"), **SMALL) as made:
        bodies = [b"small", b"large" * 1000, b"last"]
        for body in bodies:
            made.publish(body=body, TIMER_DELAY_MS=3_600_000)
        for _ in range(40):
            made.publish("other", b"x" * 900)
        await trio.sleep(1)
        (timers,) = made.plugin.timers.pending.in_range(0, made.broker.store.appended)
        positions, reader = [position for _, position in timers], made.plugin.timer_delivery.reader
        for is_cold in (False, True):
            disk.is_cold, disk.off, disk.on_loop = is_cold, 0, 0
            found = await reader.read(positions, 1 << 20)
            assert [each.body for each in found if isinstance(each, Record)] == bodies
            assert (disk.off, disk.on_loop) == (int(is_cold), 0)
            assert len(await reader.read(positions, 5000)) == 2, "as many as fit, and the one that does not"


async def test_a_record_that_the_disk_fails_to_read_keeps_its_segment_and_no_other_timer_back(
    autojump_clock: MockClock,
) -> None:
    _, disk = cold_disk()
    async with timed(disk, topics=("T", "other"), **SMALL) as made:
        made.publish(body=b"first", TIMER_DELAY_MS=3_600_000)
        for _ in range(10):
            made.publish("other", b"x" * 900)
        second = made.publish(body=b"second", TIMER_DELAY_MS=3_600_001)
        for _ in range(30):
            made.publish("other", b"x" * 900)
        await trio.sleep(1)
        disk.fail_next("read", EIO)
        with pytest.raises(StoreError, match="records of 1 timers cannot be read; check the disk"):
            await made.broker.turns.finish(made.plugin.timers.roll(0, second.position + 1))
        made.broker.store.committer.commit()
        await trio.sleep(1)
        assert made.plugin.timers.floor() == 0
        left = chain(*made.plugin.timers.pending.in_range(0, second.position + 1))
        assert [position for _, position in left] == [made.records(TIMER_TOPIC)[0].position]
        await made.broker.turns.finish(made.plugin.timers.roll(0, second.position + 1))
        await trio.sleep(3600)
        assert made.bodies() == [b"first", b"second"]


async def test_timers_that_are_too_large_for_one_group_are_moved_one_by_one(autojump_clock: MockClock) -> None:
    async with timed(**SMALL) as made:
        for number in range(5):
            made.publish(body=b"%d" % number * 4000, TIMER_DELAY_MS=5000)
        await trio.sleep(1)
        await made.broker.turns.finish(made.plugin.timers.roll(0, made.broker.store.appended))
        await trio.sleep(5)
        assert [body[:1] for body in made.bodies()] == [b"0", b"1", b"2", b"3", b"4"]


async def test_timers_stay_where_they_are_if_the_disk_is_full(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    async with timed(disk) as made:
        made.publish(TIMER_DELAY_MS=5000)
        await trio.sleep(1)
        made.broker.store.admission.close("no room for a test")
        with pytest.raises(Refused, match="no room for a test"):
            await made.broker.turns.finish(made.plugin.timers.roll(0, made.broker.store.appended))
        assert made.statistics["being_delivered"] == 0
        made.broker.store.admission.refusal = ""
        await trio.sleep(5)
        assert len(made.records()) == 1


async def test_a_timer_in_delivery_is_moved_once_it_is_free(autojump_clock: MockClock) -> None:
    async with timed(delivers=False) as made:
        made.publish(TIMER_DELAY_MS=10)
        await trio.sleep(1)
        schedule, turns = made.plugin.timers.schedule, Turns()
        finish_now(schedule.prepare(made.clock.now_ms()))
        (timer,) = schedule.take(made.clock.now_ms(), 10)
        began = trio.current_time()
        with pytest.raises(Refused, match="has been in delivery for 10 s; try again"):
            await turns.finish(made.plugin.timers.roll(0, made.broker.store.appended))
        assert trio.current_time() - began == pytest.approx(10)
        assert schedule.is_taken(timer[1])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(turns.finish, made.plugin.timers.roll(0, made.broker.store.appended))
            await trio.sleep(5)
            assert len(made.records(TIMER_TOPIC)) == 1
            waited_slices = turns.slices
            made.plugin.timer_delivery.give_back([timer])
        assert trio.current_time() - began == pytest.approx(15)
        assert turns.slices - waited_slices < 5
        await trio.sleep(0.1)
        assert len(made.records(TIMER_TOPIC)) == 2
        assert made.statistics["pending"] == 1


async def test_a_timer_that_was_not_moved_is_delivered_though_nothing_else_is_due(autojump_clock: MockClock) -> None:
    """It became due while it was taken, so the delivery had passed it."""
    async with timed() as made:
        made.publish(TIMER_DELAY_MS=1000)
        await trio.sleep(0.5)
        ((timer,),) = made.plugin.timers.pending.in_range(0, made.broker.store.appended)
        assert made.plugin.timers.schedule.hold(timer)
        await trio.sleep(2)
        assert made.records() == []
        made.plugin.timer_delivery.give_back([timer])
        await trio.sleep(0.01)
        assert len(made.records()) == 1
