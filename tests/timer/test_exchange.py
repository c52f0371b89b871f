"""Timers of a store that RocketMQ has used: what it delivered, rolled or recalled is not delivered again."""

from random import Random

import pytest
import trio
from tests.timer.timer_talk import Timed, timed
from trio.testing import MockClock

from martlet.message import Message
from martlet.tables.topics import TIMER_TOPIC
from martlet.testing.clock import START_MS, TrioClock
from martlet.testing.disk import Cut, FakeDisk
from martlet_timer.handover.exchange import PATH, mark
from martlet_timer.handover.wheel_files import CHECK, SLOT, UNIT


def store(made: Timed, body: bytes, out_ms: int, key: str = "", **more: object) -> None:
    """Store a record of the timer topic as RocketMQ does."""
    properties = {"UNIQ_KEY": key or body.decode(), "TIMER_OUT_MS": out_ms, "REAL_TOPIC": "T", "REAL_QID": 0, **more}
    encoded = "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode()
    made.broker.store.writer.append(Message(TIMER_TOPIC, body, encoded, 0), 0)
    made.broker.store.committer.commit()


def page(content: bytes) -> bytes:
    """Return the file with *content* once RocketMQ has opened it."""
    return content.ljust(4096, b"\0")


async def write_check(disk: FakeDisk, clock: TrioClock, read_ms: int, offset: int) -> None:
    async with timed(disk, clock, delivers=False) as made:
        made.broker.store.data_directory.write_file(PATH, page(CHECK.pack(read_ms, 0, offset, offset + 100, 0, 0, 1)))


# RocketMQ 5.5 leaves the topic out, unless appendTopicForTimerDeleteKey is set.
@pytest.mark.parametrize("recalled", ["T+recalled", "recalled"])
async def test_what_rocketmq_has_delivered_is_over(autojump_clock: MockClock, recalled: str) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with timed(disk, clock, delivers=False) as made:
        store(made, b"delivered", START_MS - 2000)
        store(made, b"pending", START_MS - 1000)
        store(made, b"later", START_MS + 5000)
        store(made, b"rolled", START_MS + 6000)
        store(made, b"recalled", START_MS + 7000)
        store(made, b"not recalled", START_MS + 8000)
        store(made, b"rolled", START_MS + 6000, TIMER_ROLL_TIMES=1)
        store(made, b"0", START_MS + 7000, "recalled", TAGS="_RECALL_TAG_", TIMER_DEL_UNIQKEY=recalled)
        store(made, b"not in the wheel", START_MS - 9000)
    await write_check(disk, clock, START_MS - 1000, 8)
    for _ in range(2):
        async with timed(disk, clock) as made:
            await trio.sleep(0.1)
            assert sorted(made.bodies()) == [b"not in the wheel", b"pending"]
            # New timers are older than the file, and a second start takes over nothing again.
            made.publish(body=b"new", TIMER_DELAY_MS=3_600_000)
            made.broker.store.committer.commit()
            await trio.sleep(0.1)
    async with timed(disk, clock) as made:
        await trio.sleep(10)
        came = made.bodies()
        assert sorted(came) == [b"later", b"not in the wheel", b"not recalled", b"pending", b"rolled"]
        assert made.statistics["pending"] == 2
        await trio.sleep(3600)
        assert made.bodies()[5:] == [b"new", b"new"]


async def test_check_points_of_pops_are_no_timers(autojump_clock: MockClock) -> None:
    revive = "rmq_sys_REVIVE_LOG_DefaultCluster"
    async with timed(topics=("T", revive)) as made:
        store(made, b"a check point", START_MS + 1000, REAL_TOPIC=revive)
        store(made, b"a timer", START_MS + 1000)
        await trio.sleep(5)
        assert (made.bodies(), made.bodies(revive)) == ([b"a timer"], [])
        assert made.statistics["pending"] == 0


KNOWN = mark(CHECK.pack(START_MS + 10_000, 0, 100, 100, 0, 0, 1)) + bytes(4000)


@pytest.mark.parametrize("content", [b"", b"short", KNOWN])
async def test_a_file_that_rocketmq_has_not_written_changes_nothing(autojump_clock: MockClock, content: bytes) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with timed(disk, clock, delivers=False) as made:
        made.publish(TIMER_DELAY_MS=2000)
        made.broker.store.data_directory.write_file(PATH, content)
    async with timed(disk, clock) as made:
        await trio.sleep(3)
        assert len(made.records()) == 1


async def test_rocketmq_changes_a_marked_file(autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with timed(disk, clock, delivers=False) as made:
        made.publish(body=b"over", TIMER_DELAY_MS=2000)
        made.publish(body=b"pending", TIMER_DELAY_MS=8000)
        before = mark(CHECK.pack(START_MS, 0, 0, 0, 0, 0, 1))
        # It maps the file and changes its beginning.
        changed = CHECK.pack(START_MS + 5000, 0, 2, 2, 0, 0, 2) + before[CHECK.size :]
        made.broker.store.data_directory.write_file(PATH, page(changed))
        await trio.sleep(5)
        made.broker.publish(Message("T", b"over"))  # as RocketMQ delivered it
        made.broker.store.committer.commit()
    async with timed(disk, clock) as made:
        await trio.sleep(9)
        assert sorted(made.bodies()) == [b"over", b"pending"]


@pytest.mark.parametrize("byte", range(len(mark(bytes(CHECK.size)))))
async def test_a_flipped_bit_in_our_own_file_changes_nothing(autojump_clock: MockClock, byte: int) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with timed(disk, clock, delivers=False) as made:
        made.publish(TIMER_DELAY_MS=2000)
        content = bytearray(mark(CHECK.pack(START_MS, 0, 1, 1, 0, 0, 1)))
        content[byte] ^= 1 << byte % 8
        made.broker.store.data_directory.write_file(PATH, bytes(content))
    async with timed(disk, clock) as made:
        await trio.sleep(3)
        assert len(made.records()) == 1


async def test_rocketmqs_file_says_nothing_of_what_is_newer_than_its_log(autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with timed(disk, clock, delivers=False) as made:
        store(made, b"over", START_MS - 1000)
        store(made, b"pending", START_MS + 5000)
    # A flipped bit makes the time one of the far future, and the offset one that no record has.
    await write_check(disk, clock, START_MS + (1 << 40), 2 + (1 << 40))
    async with timed(disk, clock) as made:
        await trio.sleep(9)
        assert made.bodies() == [b"pending"]


async def test_an_older_file_of_rocketmq_is_not_taken_for_the_newest(autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with timed(disk, clock, delivers=False) as made:
        store(made, b"over", START_MS - 1000)
    await write_check(disk, clock, START_MS, 1)
    async with timed(disk, clock) as made:
        await trio.sleep(1)
        made.publish(body=b"pending", TIMER_DELAY_MS=5000)
        made.broker.store.flusher.flush_now()
        killed = disk.after_power_cut(Cut.KILLED, Random(0))
    killed.unlink(f"/data/{PATH}")
    async with timed(killed, clock) as made:
        await trio.sleep(9)
        assert made.bodies() == [b"pending"]


async def test_a_shutdown_writes_rocketmqs_files(whole_wheel: None, autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with timed(disk, clock) as made:
        placed = [made.publish(TIMER_DELIVER_MS=START_MS + after) for after in (500, 5500, 5700, 6000, 250_000_000)]
        await trio.sleep(1)
        assert len(made.records()) == 1
    check = bytes(disk.files[f"/data/{PATH}"].data)
    assert check == mark(check)
    read_ms, log_end, offset, master, *_ = CHECK.unpack_from(check)
    assert (read_ms, offset, master) == (START_MS + 1000, 5, 5)
    log, wheel = disk.files["/data/timerlog/00000000000000000000"].data, disk.files["/data/timerwheel"].data
    assert (len(log), len(wheel), log_end) == (100 << 20, 2 * 604_800 * 32, 5 * UNIT.size)
    found: dict[int, list[int]] = {}
    for slot_ms in (START_MS + 1000, START_MS + 5000, START_MS + 1000 + 2 * 86_400_000):
        second, _, at, count, _ = SLOT.unpack_from(wheel, slot_ms // 1000 % (2 * 604_800) * 32)
        assert second * 1000 == slot_ms
        positions = []
        while at >= 0:
            size, at, kind, _, _, position, record_size, _, _ = UNIT.unpack_from(log, at)
            assert size == UNIT.size
            assert record_size > 0
            positions.append(position if kind == 1 else -position)
        assert count == sum(kept != -placed[-1].position or slot_ms > START_MS + 5000 for kept in positions)
        found[slot_ms - START_MS] = positions[::-1]
    at = [each.position for each in placed]
    # The last unit is for the last record of the topic, as a recall without a key.
    assert found == {1000: [-at[4]], 5000: at[1:4], 1000 + 2 * 86_400_000: [-at[4]]}
