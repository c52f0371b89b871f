"""Timed messages are delivered at their millisecond, with RocketMQ's properties, whatever happens meanwhile."""

import logging
from random import Random

import pytest
import trio
from tests.timer.timer_talk import DAY_MS, quiet, timed, until
from trio.testing import MockClock

from martlet.errors import Reason, Refused
from martlet.message import Message, decode_properties, encode_properties
from martlet.tables.topics import TIMER_TOPIC
from martlet.testing.clock import START_MS, TrioClock
from martlet.testing.disk import FakeDisk
from martlet_timer.config import TimerConfig
from martlet_timer.timers.stage import RepeatLimits, TimerStage


async def test_a_message_arrives_at_its_millisecond(autojump_clock: MockClock) -> None:
    async with timed() as made:
        due_ms = START_MS + 12_345
        made.publish(body=b"later", TIMER_DELIVER_MS=due_ms, TAGS="a", own="b")
        made.publish(body=b"now")
        await trio.sleep(12.344)
        assert made.bodies() == [b"now"]
        await trio.sleep(0.003)
        (_, record) = made.records()
        assert (record.body, record.queue_id, record.born_ms) == (b"later", 0, 1)
        assert decode_properties(record.properties) == {
            "UNIQ_KEY": "KEY1",
            "TIMER_DELIVER_MS": str(due_ms),
            "TAGS": "a",
            "own": "b",
            "TIMER_OUT_MS": str(due_ms - 1),
            "REAL_TOPIC": "T",
            "REAL_QID": "0",
            "TIMER_ENQUEUE_MS": str(START_MS),
            "TIMER_DEQUEUE_MS": str(due_ms),
        }
        assert made.statistics["pending"] == 0
        assert made.statistics["being_delivered"] == 0


@pytest.mark.parametrize(
    ("properties", "after_ms"),
    [
        ({"TIMER_DELAY_SEC": 7}, 7000),
        ({"TIMER_DELAY_SEC": "+7"}, 7000),
        ({"TIMER_DELAY_MS": 3}, 3),
        ({"TIMER_DELAY_MS": 1234, "TIMER_DELIVER_MS": START_MS + 5}, 1234),
        ({"TIMER_DELAY_SEC": 2, "TIMER_DELAY_MS": 1, "TIMER_DELIVER_MS": START_MS + 5}, 2000),
        ({"TIMER_DELIVER_MS": START_MS + 999}, 999),
        ({"TIMER_DELIVER_MS": START_MS + 1000}, 1000),
        # Minus 1 it would look like a time of RocketMQ, which are full seconds.
        ({"TIMER_DELIVER_MS": START_MS + 1001}, 1002),
    ],
)
async def test_a_delay_has_three_forms(autojump_clock: MockClock, properties: dict[str, object], after_ms: int) -> None:
    async with timed() as made:
        made.publish(properties=properties)
        await trio.sleep((after_ms - 0.5) / 1000)
        assert made.records() == []
        await until(made.records)
        (record,) = made.records()
        assert record.store_ms == START_MS + after_ms


@pytest.mark.parametrize(
    "properties",
    [
        {"TIMER_DELIVER_MS": START_MS},
        {"TIMER_DELIVER_MS": 0},
        {"TIMER_DELAY_MS": 0},
        {"TIMER_DELAY_SEC": -5},
        # It was delivered before.
        {"TIMER_DELAY_SEC": 5, "TIMER_OUT_MS": START_MS - 10},
    ],
)
async def test_a_message_that_is_due_is_stored_immediately(
    autojump_clock: MockClock, properties: dict[str, object]
) -> None:
    async with timed() as made:
        made.publish(properties=properties)
        await until(made.records)
        (record,) = made.records()
        expected = {name: str(value) for name, value in properties.items()}
        assert decode_properties(record.properties) == {"UNIQ_KEY": "KEY1", **expected}


async def test_a_delay_level_wins_over_a_time(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(DELAY=1, TIMER_DELAY_MS=5, TIMER_DELIVER_MS="x", TIMER_DELAY_SEC=100)
        await trio.sleep(0.9)
        assert made.records() == []
        await trio.sleep(0.2)
        (record,) = made.records()
        assert not [name for name in decode_properties(record.properties) if name.startswith("TIMER_")]
        made.publish(DELAY=0, TIMER_DELAY_MS=5)
        await trio.sleep(0.01)
        assert len(made.records()) == 2


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({"TIMER_DELIVER_MS": "soon"}, "property TIMER_DELIVER_MS 'soon' is not a number"),
        ({"TIMER_DELAY_MS": "1.5"}, "property TIMER_DELAY_MS '1.5' is not a number"),
        ({"TIMER_DELAY_SEC": "9" * 16}, "is too large"),
        ({"TIMER_DELAY_SEC": "\u0665"}, "is not a number"),
        (
            {"TIMER_DELIVER_MS": START_MS + 259_200_001},
            f"timer message illegal: property TIMER_DELIVER_MS {START_MS + 259_200_001} is 259200001 ms ahead; "
            "the maximum is 259200000 ms (timer.delay_max_s = 259200)",
        ),
        ({"TIMER_DELAY_SEC": 259_201}, "property TIMER_DELAY_SEC 259201 is 259201000 ms ahead"),
        ({"TIMER_DELAY_MS": 5, "own": "x" * 32_600}, "with those of its timer; the maximum is 32639"),
        (
            {"TIMER_DELAY_MS": 5, "TIMER_DEL_UNIQKEY": "T+KEY1"},
            "property 'TIMER_DEL_UNIQKEY' is for the broker only; recall a message by its handle",
        ),
        ({"TIMER_DEL_UNIQKEY": "T+KEY1"}, "is for the broker only"),
    ],
)
async def test_a_wrong_time_is_refused(autojump_clock: MockClock, properties: dict[str, object], reason: str) -> None:
    async with timed() as made:
        with pytest.raises(Refused) as refused:
            made.publish(properties=properties)
        assert refused.value.reason == Reason.ILLEGAL
        assert reason in str(refused.value)
        assert made.records(TIMER_TOPIC) == made.records() == []


def test_a_message_that_is_due_already_has_a_store_time_of_its_own() -> None:
    """With that of an earlier message in the same commit it would look early."""
    renewed: list[bool] = []
    limits = RepeatLimits(1, 1, int)
    stage = TimerStage(lambda: START_MS, DAY_MS, lambda message: 0, lambda: renewed.append(True), limits, str)
    due = Message("T", b"", encode_properties({"TIMER_DELIVER_MS": str(START_MS)}))
    assert stage.hold(due).topic == "T"
    assert renewed == [True]
    later = Message("T", b"", encode_properties({"TIMER_DELIVER_MS": str(START_MS + 1)}))
    assert stage.hold(later).topic == TIMER_TOPIC
    assert renewed == [True]


async def test_a_timer_is_refused_if_the_message_would_be(autojump_clock: MockClock) -> None:
    async with timed() as made:
        with pytest.raises(Refused, match=r"topic\[nowhere\] not exist"):
            made.publish("nowhere", TIMER_DELAY_MS=5)
        made.broker.topics.update("T", 2, 2, perm=4)
        with pytest.raises(Refused, match="not writable"):
            made.publish(TIMER_DELAY_MS=5)


async def test_the_broker_may_choose_the_queue(autojump_clock: MockClock) -> None:
    async with timed() as made:
        for _ in range(40):
            made.publish(queue_id=-1, TIMER_DELAY_MS=5)
        await until(lambda: len(made.records()) == 40)
        queues = [decode_properties(record.properties)["REAL_QID"] for record in made.records(TIMER_TOPIC)]
        assert {record.queue_id for record in made.records()} == {0, 1}
        assert sorted(str(record.queue_id) for record in made.records()) == sorted(queues)


async def test_half_messages_are_not_timers(autojump_clock: MockClock) -> None:
    async with timed() as made:
        stage = made.plugin.martlet_stages(made.broker)[-1]
        for transaction in (0x4, 0xC):
            message = Message("T", b"x", b"TIMER_DELAY_MS\x015\x02", sys_flag=transaction)
            assert stage.change(message).topic == "T"
        assert stage.change(Message("T", b"x", b"TIMER_DELAY_MS\x015\x02", 0, sys_flag=0x8)).topic == TIMER_TOPIC


async def test_thousands_of_timers_arrive_in_order_and_in_time(autojump_clock: MockClock) -> None:
    random = Random(1)
    async with timed(segment_bytes=1 << 22) as made:
        for number in range(1500):
            made.publish(body=b"%d" % number, TIMER_DELIVER_MS=START_MS + random.randrange(500, 3000))
        await trio.sleep(3.1)
        records = made.records()
        assert len({record.body for record in records}) == len(records) == 1500
        wanted = [(int(decode_properties(each.properties)["TIMER_OUT_MS"]), int(each.body)) for each in records]
        assert wanted == sorted(wanted)
        assert max(made.late_ms()) <= 2
        assert min(made.late_ms()) >= 0
        assert made.statistics["delivered"] == 1500
        assert made.statistics["late_max_ms"] <= 2


async def test_a_timer_of_forty_days_arrives_in_time(autojump_clock: MockClock) -> None:
    config = TimerConfig(delay_max_s=365 * 86_400)
    async with quiet(config=config) as made:
        made.publish(TIMER_DELIVER_MS=START_MS + 40 * DAY_MS)
        made.publish(TIMER_DELIVER_MS=START_MS + 20 * DAY_MS + 7)
        await trio.sleep(40 * 86_400 - 0.001)
        assert made.late_ms() == [0]
        await trio.sleep(0.003)
        assert made.late_ms() == [0, 0]


async def test_pending_timers_survive_a_restart(autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with timed(disk, clock) as made:
        for after_ms in (500, 1500, 2500, 60_000):
            made.publish(body=b"%d" % after_ms, TIMER_DELAY_MS=after_ms)
        await trio.sleep(0.6)
        assert made.bodies() == [b"500"]
    await trio.sleep(1.4)
    async with timed(disk, clock) as made:
        await until(lambda: len(made.records()) == 2)
        assert made.bodies() == [b"500", b"1500"]
        await trio.sleep(1)
        assert made.bodies() == [b"500", b"1500", b"2500"]
        assert made.statistics["pending"] == 1


async def test_records_that_are_not_pending_yet_are_counted(autojump_clock: MockClock) -> None:
    """RocketMQ calls them timerOffsetBehind."""
    disk, clock = FakeDisk(), TrioClock()
    async with timed(disk, clock) as made:
        assert made.statistics["not_yet_pending"] == 0
        for _ in range(3):
            made.publish(TIMER_DELAY_MS=60_000)
        assert (made.statistics["pending"], made.statistics["not_yet_pending"]) == (0, 3)
        assert made.plugin.running.values()["timerOffsetBehind"] == "3"
        await made.broker.store.flusher.wait_flushed(made.broker.store.appended)
        await until(lambda: made.statistics["pending"] == 3)
        assert made.statistics["not_yet_pending"] == 0
    async with timed(disk, clock) as made:
        assert (made.statistics["pending"], made.statistics["not_yet_pending"]) == (3, 0)
        made.publish(TIMER_DELAY_MS=60_000)
        assert made.statistics["not_yet_pending"] == 1
        assert made.plugin.running.values()["timerOffsetBehind"] == "1"


# ---- what can go wrong at the time of delivery


async def test_timers_of_a_deleted_topic_are_dropped_and_counted(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with timed(topics=("T", "gone")) as made:
        for _ in range(3):
            made.publish("gone", TIMER_DELAY_MS=1000)
        made.publish(TIMER_DELAY_MS=1000)
        made.broker.topics.delete("gone")
        with caplog.at_level(logging.WARNING):
            await trio.sleep(1.1)
        assert len(made.records()) == 1
        assert made.statistics["dropped_without_topic"] == 3
        assert made.statistics["pending"] == 0
        assert [each.getMessage() for each in caplog.records] == [
            "timers for topic[gone] are dropped when they are due, because the topic was deleted"
        ]


async def test_a_timer_for_a_queue_that_is_gone_goes_to_another(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(queue_id=1, TIMER_DELAY_MS=1000)
        made.broker.topics.update("T", 1, 1)
        await trio.sleep(1.1)
        (record,) = made.records()
        assert record.queue_id == 0


async def test_a_timer_for_a_topic_that_takes_no_messages_waits_for_it(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with timed(topics=("T", "closed")) as made:
        made.publish("closed", body=b"c", TIMER_DELAY_MS=1000)
        made.publish(TIMER_DELAY_MS=1000)
        made.broker.topics.update("closed", 2, 2, perm=4)
        await trio.sleep(100)
        assert len(made.records()) == 1
        assert made.records("closed") == []
        assert made.statistics["postponed"] == 2
        assert "is refused, trying again in a minute; topic[closed] is not writable" in caplog.text
        made.broker.topics.update("closed", 2, 2)
        await trio.sleep(60)
        (record,) = made.records("closed")
        assert record.body == b"c"
        assert decode_properties(record.properties)["TIMER_ROLL_TIMES"] == "2"
        assert made.statistics["pending"] == 0


async def test_a_full_disk_delays_timers_and_loses_none(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FakeDisk()
    async with timed(disk) as made:
        for number in range(300):
            made.publish(body=b"%d" % number, TIMER_DELAY_MS=1000)
        free, disk.free_bytes = disk.free_bytes, 0
        await trio.sleep(10)
        assert len(made.records()) < 300
        assert made.statistics["behind_ms"] >= 8000
        disk.free_bytes = free
        await until(lambda: len(made.records()) == 300, 120)
        assert made.bodies() == [b"%d" % number for number in range(300)]
        assert caplog.text.count("timers wait, because the store refuses messages") == 1
        assert made.statistics["pending"] == made.statistics["being_delivered"] == 0


async def test_a_damaged_record_is_reported_and_stops_nothing_else(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with timed(disk, clock) as made:
        made.publish(body=b"first", TIMER_DELAY_MS=1000)
        placed = made.publish(body=b"second", TIMER_DELAY_MS=1000)
        made.publish(body=b"third", TIMER_DELAY_MS=1000)
    (log_file,) = (file for path, file in disk.files.items() if "/commitlog/" in path)
    log_file.data[placed.position + 88] ^= 1
    async with timed(disk, clock) as made:
        await trio.sleep(1.1)
        assert made.bodies() == [b"first", b"third"]
        assert made.statistics["damaged"] == 1
        assert made.statistics["pending"] == 0
        assert f"is lost: its record at position {placed.position} is damaged" in caplog.text


async def test_a_record_that_the_disk_fails_to_read_is_tried_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with timed(disk, clock, topics=("T", "other")) as made:
        made.publish(body=b"first", TIMER_DELAY_MS=1000)
        for _ in range(3):
            made.publish("other", b"x" * 8000)  # the first record is not in memory after the restart
    async with timed(disk, clock) as made:
        segments = made.broker.store.segments
        read, failures = segments.read, 2

        def fail(position: int, size: int) -> bytes:
            nonlocal failures
            if not failures:
                return read(position, size)
            failures -= 1
            raise OSError(5, "Input/output error")

        made.plugin.timer_delivery.reader._read = fail
        await trio.sleep(1.1)
        assert made.statistics["unreadable"] == 1
        await trio.sleep(59.8)
        assert made.records() == []
        await trio.sleep(61)
        assert made.bodies() == [b"first"]
        assert made.statistics["unreadable"] == 0
        assert caplog.text.count("cannot be read at position 116, trying again in a minute; Input/output error") == 2


async def test_timers_that_were_not_delivered_are_held(autojump_clock: MockClock) -> None:
    async with timed() as made:
        state = made.plugin.timers
        for delay_ms in (5_000, 70_000, 80_000):
            made.publish(TIMER_DELAY_MS=delay_ms)
        await until(lambda: state.held() == 3)
        await until(lambda: state.held() == 2)
        assert made.bodies() == [b"x"]


@pytest.mark.parametrize("delay", [{"TIMER_DELAY_MS": "200"}, {"DELAY": "1"}])
async def test_large_messages_arrive_though_a_group_of_several_would_be_too_large(
    autojump_clock: MockClock, delay: dict[str, object]
) -> None:
    async with timed(group_bytes_max=2000) as broker:
        large = [b"%d" % number * 3000 for number in range(3)]
        for body in large:
            broker.publish(body=body, properties=delay)
        broker.publish(body=b"small", properties=delay)
        await until(lambda: len(broker.bodies()) == 4)
        assert broker.bodies() == [*large, b"small"]
