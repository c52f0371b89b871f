"""The offsets of the delay levels: in the log, in RocketMQ's file, and which of them count."""

import errno
from pathlib import Path

import orjson
import pytest
import trio
from tests.timer.delays import WallClock, delays
from trio.testing import MockClock

from martlet.tables.rocketmq_json import parse
from martlet.tables.saved import POSITION_KEY
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import serving
from martlet.testing.stores import small_config

PATH = "/data/store/config/delayOffset.json"


def table_of(disk: FakeDisk) -> dict[str, object]:
    return parse(bytes(disk.files[PATH].data), "delayOffset.json")


def write(disk: FakeDisk, table: dict[str, object]) -> None:
    """Replace the file, as RocketMQ does: with what it knows."""
    disk.files[PATH].data[:] = orjson.dumps({name: table[name] for name in ("dataVersion", "offsetTable")})
    disk.files.pop(PATH + ".bak", None)


async def fill(disk: FakeDisk, clock: WallClock) -> None:
    """Deliver two messages of level 1 and one of level 2; leave one of level 3."""
    async with delays(disk, clock) as running:
        for body, level in (("a", 1), ("b", 1), ("c", 2), ("d", 5)):
            running.send(body, level)
        await running.wait_for(3)


async def test_the_file_is_rocketmqs(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    await fill(disk, WallClock())
    assert b'"offsetTable":{1:2,2:1}' in bytes(disk.files[PATH].data), "RocketMQ writes keys without quotes"
    table = table_of(disk)
    assert table["offsetTable"] == {"1": 2, "2": 1}
    version = table["dataVersion"]
    assert isinstance(version, dict)
    assert set(version) == {"counter", "stateVersion", "timestamp"}


@pytest.mark.parametrize(
    "lost", [["delayOffset.json"], ["delay-levels.snapshot"], ["delayOffset.json", "delay-levels"]]
)
async def test_the_notes_in_the_log_suffice(lost: list[str], autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), WallClock()
    await fill(disk, clock)
    for path in [path for path in disk.files if any(name in path for name in lost)]:
        disk.unlink(path)
    async with delays(disk, clock) as running:
        assert await running.wait_for(4) == ["a", "b", "c", "d"]


async def test_offsets_that_rocketmq_wrote_last_count(autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), WallClock()
    await fill(disk, clock)
    table = table_of(disk)
    write(disk, {**table, "offsetTable": {"1": 1, "2": 1}})
    async with delays(disk, clock) as running:
        assert await running.wait_for(4, within_s=0.1) == ["a", "b", "c", "b"]
        assert POSITION_KEY in table_of(disk), "after a crash the same offsets must not count again"
        assert await running.wait_for(5) == ["a", "b", "c", "b", "d"]
    async with delays(disk, clock) as running:
        await trio.sleep(100)
        assert running.bodies() == ["a", "b", "c", "b", "d"]


async def test_nothing_is_delivered_before_rocketmqs_offsets_are_our_own(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk, clock = FakeDisk(), WallClock()
    await fill(disk, clock)
    write(disk, table_of(disk))
    await trio.sleep(100)
    full = True

    def fail(name: str) -> None:
        if full and name == "rename":
            raise OSError(errno.ENOSPC, "No space left on device")

    disk.on_change = fail
    async with delays(disk, clock) as running:
        await trio.sleep(4)
        assert running.bodies() == ["a", "b", "c"]
        assert "config/delayOffset.json cannot be written, so nothing is delivered yet" in caplog.text
        full = False
        assert await running.wait_for(4, within_s=7) == ["a", "b", "c", "d"]


async def test_offsets_beyond_the_queues_end_count_as_the_end(autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), WallClock()
    await fill(disk, clock)
    write(disk, {**table_of(disk), "offsetTable": {"1": 99, "2": 1}})
    async with delays(disk, clock) as running:
        running.send("e", 1)
        assert "e" in await running.wait_for(4)


async def test_a_damaged_file_is_not_used(autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), WallClock()
    await fill(disk, clock)
    disk.files[PATH].data[:] = b'{"offsetTable":{1:"many"}}'
    disk.files.pop(PATH + ".bak", None)
    async with delays(disk, clock) as running:
        assert await running.wait_for(4) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("flush", ["sync", "async"])
async def test_a_full_disk_delays_deliveries_and_loses_or_repeats_none(
    flush: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "martlet.timer")
    disk = FakeDisk()
    async with delays(disk, flush=flush, levels="1s 2s") as running:
        for number in range(300):
            running.send(f"{number}", 1 + number % 2)
        await trio.sleep(0.9)
        disk.free_bytes = 0
        await trio.sleep(5)
        assert len(running.bodies()) < 300
        assert running.statistics["failed_rounds"] > 1
        assert caplog.text.count("delayed messages wait, and are tried again every second; the disk") == 1
        disk.free_bytes = None
        await running.wait_for(300, within_s=60)
        assert caplog.text.count("delayed messages are delivered again") == 1
        await trio.sleep(5)
        assert sorted(map(int, running.bodies())) == list(range(300))
        assert running.statistics["delivered"] == 300


async def test_a_start_without_the_plugin_logs_how_many_messages_of_levels_wait(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk, clock = FakeDisk(), WallClock()
    await fill(disk, clock)
    async with delays(disk, clock) as running:
        running.send("e", 18)
    assert "wait for plugin" not in caplog.text
    config = small_config(segment_bytes=1 << 20, page_bytes=1 << 16, cache_bytes=1 << 20)
    async with serving(Path("/data/store"), store=config, disk=disk, clock=clock):
        assert "2 messages of 'delay-levels' wait for plugin" in caplog.text
