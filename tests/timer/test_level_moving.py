"""Messages of the delay levels outlive the retention of their records: they become timers due at the same time."""

from random import Random
from typing import Any

import pytest
import trio
from tests.timer.delays import Delays, WallClock, delays
from trio.testing import MockClock

from martlet.errors import Refused
from martlet.message import PROPERTIES_BYTES_MAX, Message, decode_properties
from martlet.store.format.delays import SCHEDULE_TOPIC
from martlet.tables.topics import TIMER_TOPIC
from martlet.testing.disk import Cut, FakeDisk

SMALL: dict[str, Any] = {
    "segment_bytes": 8192,
    "page_bytes": 1024,
    "cache_bytes": 16_384,
    "disk_used_ratio_max": 0.8,
    "disk_clean_ratio": 0.85,
    "retention_interval_ms": 20_000,
}


def fill(running: Delays, count: int = 60) -> None:
    """Send so much to another topic that the first segments are no longer the newest."""
    running.broker.topics.ensure("other", 1)
    for number in range(count):
        running.broker.publish(Message("other", b"x" * 900, b"", 0))
        if number % 5 == 4:
            running.broker.store.committer.commit()


async def remove_first_segments(running: Delays, disk: FakeDisk) -> None:
    """Fill the disk until retention has removed the oldest segment, in the way it does by itself."""
    store = running.broker.store
    first = store.first_position
    disk.used_ratio = 0.99
    with trio.fail_after(1000):
        while store.first_position == first:
            await store.upkeep.checkpointer.checkpoint()
            await trio.sleep(20)
    disk.used_ratio = 0.1


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_pending_message_survives_the_removal_of_its_segment(autojump_clock: MockClock, restarts: bool) -> None:
    disk, clock = FakeDisk(), WallClock()
    began = trio.current_time()
    async with delays(disk, clock, levels="1s 1h 2h", **SMALL) as running:
        for body, level in (("later", 2), ("last", 3), ("too", 2)):
            running.send(body, level)
        fill(running)
        await trio.sleep(1)
        await remove_first_segments(running, disk)
        statistics = running.statistics
        assert (statistics["moved_to_timers"], statistics["expired"], statistics["pending"]) == (3, 0, 0)
        if not restarts:
            await trio.sleep(began + 3599.99 - trio.current_time())
            assert running.bodies() == []
            assert await running.wait_for(2, within_s=0.05) == ["later", "too"]
    async with delays(disk, clock, levels="1s 1h 2h", **SMALL) as running:
        assert await running.wait_for(3) == ["later", "too", "last"]
        assert began + 7200 <= trio.current_time() <= began + 7200.1
        await trio.sleep(10_000)
        assert running.bodies() == ["later", "too", "last"]


async def test_a_moved_message_is_a_timer_as_rocketmq_writes_them(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    async with delays(disk, levels="1s 1h", queues=4, **SMALL) as running:
        due_ms = running.clock.now_ms() + 3_600_000
        properties = b"UNIQ_KEY\x01u\x02TIMER_DELAY_SEC\x015\x02DELAY\x012\x02TAGS\x01a\x02"
        host = bytes((10, 0, 0, 1, 0, 0, 1, 0))
        running.broker.publish(Message("t", b"body", properties, 3, 7, 0x1 | 0x300, 123, host, 2))
        fill(running)
        await trio.sleep(1)
        await remove_first_segments(running, disk)
        (timer,) = running.records(TIMER_TOPIC)
        out_ms = decode_properties(timer.properties)["TIMER_OUT_MS"]
        # With DELAY, RocketMQ would hold it once more when it is due.
        expected = {"UNIQ_KEY": "u", "TAGS": "a", "REAL_TOPIC": "t", "REAL_QID": "3", "TIMER_OUT_MS": out_ms}
        assert decode_properties(timer.properties) == expected
        assert due_ms - 1 <= int(out_ms) <= due_ms + 1
        await running.wait_for(1)
        (record,) = running.records()
        assert (record.queue_id, record.body, record.flag, record.sys_flag & 0x701) == (3, b"body", 7, 0x301)
        assert (record.born_ms, record.born_host, record.reconsume_times) == (123, host, 2)
        assert due_ms <= record.store_ms <= due_ms + 5
    assert b'"offsetTable":{2:1}' in bytes(disk.files["/data/store/config/delayOffset.json"].data)


async def test_many_messages_are_moved_in_rounds_and_keep_their_order(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    async with delays(disk, levels="1h 2h", **SMALL | {"segment_bytes": 32_768}) as running:
        for number in range(200):
            running.send(f"{number}", 1 + number % 2)
            await trio.sleep(0.003)
        fill(running, 80)
        await trio.sleep(1)
        await remove_first_segments(running, disk)
        assert running.statistics["expired"] == 0
        assert running.statistics["moved_to_timers"] > 0
        await running.wait_for(200)
        bodies = [int(body) for body in running.bodies()]
        assert bodies == [*range(0, 200, 2), *range(1, 200, 2)]


async def test_delivered_messages_stay_delivered_when_their_newest_note_is_removed(autojump_clock: MockClock) -> None:
    """Retention asks for a note while a round waits for the disk; an older one after it would deliver it again."""
    disk, clock = FakeDisk(), WallClock()
    async with delays(disk, clock, levels="1s 1h", **SMALL) as running:
        running.send("first")
        await running.wait_for(1)
        fill(running)
        await trio.sleep(1)
        projections = running.broker.projections

        def release(name: str) -> None:
            if running.plugin.level_delivery.rounds.are_waiting and not is_released.is_set():
                is_released.set()
                running.serving.nursery.start_soon(projections.keeper.release, 8192)

        running.send("second")
        is_released = trio.Event()
        disk.on_change = release
        assert await running.wait_for(2) == ["first", "second"]
        await trio.sleep(0.1)
        assert is_released.is_set()
        disk.on_change = None
        assert projections.keeper.released == 8192
        left = disk.after_power_cut(Cut.KILLED, Random(1))
    async with delays(left, clock, levels="1s 1h", **SMALL) as running:
        await trio.sleep(10)
        assert running.bodies() == ["first", "second"]


async def test_a_message_without_room_for_the_time_waits_for_its_delay_again(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    began = trio.current_time()
    sizes = SMALL | {"segment_bytes": 1 << 18, "page_bytes": 1 << 16, "cache_bytes": 1 << 18}
    async with delays(disk, levels="1h", **sizes) as running:
        start = b"DELAY\x011\x02a\x01"
        end = b"\x02REAL_TOPIC\x01t\x02REAL_QID\x010\x02"
        longest = PROPERTIES_BYTES_MAX - len(start) - len(end)
        running.broker.publish(Message("t", b"long", start + b"x" * longest, 0))
        fill(running, 400)
        await trio.sleep(1)
        await remove_first_segments(running, disk)
        assert [record.body for record in running.records(SCHEDULE_TOPIC)] == [b"long"]
        assert await running.wait_for(1) == ["long"]
        assert began + 3601 <= trio.current_time() <= began + 3700
        assert running.statistics["postponed"] == 1


async def test_retention_waits_for_a_disk_that_cannot_be_written_and_nothing_is_lost(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FakeDisk()
    async with delays(disk, levels="1s 1h", **SMALL) as running:
        running.send("x", 2)
        fill(running)
        await trio.sleep(1)
        disk.free_bytes = 0
        with pytest.raises(Refused, match="full"):
            fill(running, 200)
        with trio.fail_after(20):
            await running.broker.projections.keeper.release(8192)
        assert running.broker.projections.keeper.released == 0
        assert "messages of the delay levels cannot be moved now" in caplog.text
        disk.free_bytes = None
        await trio.sleep(5)
        await remove_first_segments(running, disk)
        assert await running.wait_for(1) == ["x"]
        assert running.statistics["expired"] == 0
