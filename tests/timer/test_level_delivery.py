"""Messages with a delay level arrive when they are due: not early, not late, once, and as RocketMQ delivers them."""

import pytest
import trio
from tests.timer.delays import START_MS, WallClock, delays
from trio.testing import MockClock

from martlet.contracts import Stage
from martlet.errors import Reason, Refused
from martlet.message import Message, decode_properties
from martlet.store.format.delays import DELAYS_MS, SCHEDULE_TOPIC
from martlet.testing.disk import FakeDisk


async def test_each_level_arrives_after_its_delay_and_not_before(autojump_clock: MockClock) -> None:
    async with delays() as running:
        for level in range(1, 19):
            running.send(f"{level}", level)
        began = trio.current_time()
        for level, delay_ms in enumerate(DELAYS_MS, 1):
            await trio.sleep(began + delay_ms / 1000 - 0.0015 - trio.current_time())
            assert len(running.bodies()) == level - 1
            await running.wait_for(level, within_s=0.02)
        assert running.bodies() == [f"{level}" for level in range(1, 19)]
        assert running.statistics["delivered"] == running.statistics["late_5_ms"] == 18


async def test_a_delivered_record_is_what_rocketmq_delivers(autojump_clock: MockClock) -> None:
    async with delays(queues=4) as running:
        properties = b"UNIQ_KEY\x01u\x02DELAY\x0199\x02TIMER_DELAY_SEC\x015\x02TAGS\x01a\x02"
        host = bytes((10, 0, 0, 1, 0, 0, 1, 0))
        placed = running.broker.publish(Message("t", b"body", properties, 3, 7, 0x1 | 0x300, 123, host, 2))
        await trio.sleep(1)
        (held,) = running.records(SCHEDULE_TOPIC)
        assert (held.queue_id, held.queue_offset, placed.queue_id) == (17, 0, 17)
        expected = {"UNIQ_KEY": "u", "TAGS": "a", "DELAY": "18", "REAL_TOPIC": "t", "REAL_QID": "3"}
        assert decode_properties(held.properties) == expected
        await running.wait_for(1)
        (record,) = running.records()
        assert (record.topic, record.queue_id, record.queue_offset) == ("t", 3, 0)
        assert decode_properties(record.properties) == expected
        assert (record.body, record.flag, record.sys_flag & 0x701) == (b"body", 7, 0x301)
        assert (record.born_ms, record.born_host, record.reconsume_times) == (123, host, 2)
        assert START_MS + 7_200_000 <= record.store_ms <= START_MS + 7_200_020


async def test_a_delay_begins_when_its_message_is_stored(autojump_clock: MockClock) -> None:
    """Records of one commit share the time of its first one, but a delayed message has its own."""
    async with delays() as running:
        for level in (0, 1):
            running.send(f"{level}", level)
            running.clock.shift_ms += 5
        await running.wait_for(2)
        plain, late = running.records()
        (held,) = running.records(SCHEDULE_TOPIC)
        assert held.store_ms - plain.store_ms == 5
        assert late.store_ms - held.store_ms >= 1000


async def test_many_messages_of_a_level_arrive_once_in_order_and_in_time(autojump_clock: MockClock) -> None:
    async with delays() as running:
        for number in range(1000):
            running.send(f"{number}")
            await trio.sleep(0.0005)
        await running.wait_for(1000)
        assert running.bodies() == [f"{number}" for number in range(1000)]
        statistics = running.statistics
        assert (statistics["delivered"], statistics["late_10_ms"]) == (1000, 1000)
        assert (statistics["pending"], statistics["pending_1"]) == (0, 0)


async def test_a_burst_is_delivered_in_rounds_of_all_levels(autojump_clock: MockClock) -> None:
    async with delays(levels="1s 1s") as running:
        for number in range(400):
            running.send(f"{number}", 1 + number % 2)
        await running.wait_for(400)
        assert sorted(map(int, running.bodies())) == list(range(400))


@pytest.mark.parametrize("text", ["0", "-1", "-2147483648", "", "+0"])
async def test_no_level_means_no_delay(autojump_clock: MockClock, text: str) -> None:
    async with delays() as running:
        running.send("x", text)
        await trio.sleep(0.01)
        assert running.bodies() == ["x"]


@pytest.mark.parametrize("text", ["abc", "1.5", "2147483648", "-2147483649", "1 ", "\u0663"])
async def test_what_is_no_level_is_refused_and_said(autojump_clock: MockClock, text: str) -> None:
    async with delays() as running:
        with pytest.raises(
            Refused, match=r"property 'DELAY' .* is not a delay level; use 1 to 18, or 0 for no delay"
        ) as refused:
            running.send("x", text)
        assert refused.value.reason is Reason.MALFORMED
        assert running.bodies() == running.bodies(SCHEDULE_TOPIC) == []


async def test_messages_that_cannot_be_stored_are_refused_when_they_are_sent(autojump_clock: MockClock) -> None:
    async with delays() as running:
        with pytest.raises(Refused, match="not exist"):
            running.send("x", topic="nowhere")
        with pytest.raises(Refused, match="queue 9 of topic"):
            running.send("x", queue_id=9)
        with pytest.raises(Refused, match="message body is"):
            running.send(bytes(running.broker.config.message_bytes_max + 1))


async def test_half_messages_and_those_of_the_broker_are_not_held(autojump_clock: MockClock) -> None:
    async with delays() as running:
        half = Message("t", b"half", b"DELAY\x011\x02", 0, sys_flag=0x4)
        assert running.plugin.level_stage.hold(half).topic == "t"
        running.broker.topics.ensure("RMQ_SYS_TRANS_HALF_TOPIC", 1)
        running.send("half", topic="RMQ_SYS_TRANS_HALF_TOPIC")
        await trio.sleep(0.01)
        assert running.bodies("RMQ_SYS_TRANS_HALF_TOPIC") == ["half"]
        committed = Message("t", b"committed", b"DELAY\x011\x02", 0, sys_flag=0x8)
        assert running.plugin.level_stage.hold(committed).topic == SCHEDULE_TOPIC


# the wall clock


@pytest.mark.parametrize("jump_ms", [3_600_000, -3_600_000, 10 * 365 * 86_400_000, -10 * 365 * 86_400_000, 50, -50])
async def test_a_jump_of_the_wall_clock_changes_no_delay(autojump_clock: MockClock, jump_ms: int) -> None:
    async with delays() as running:
        running.send("before", 5)
        await trio.sleep(20)
        running.clock.shift_ms += jump_ms
        running.send("after", 4)
        await trio.sleep(29.99)
        assert running.bodies() == []
        assert await running.wait_for(1, within_s=0.03) == ["after"]
        await trio.sleep(9.96)
        assert running.bodies() == ["after"]
        assert await running.wait_for(2, within_s=0.06) == ["after", "before"]
        running.clock.shift_ms -= jump_ms
        running.send("last", 1)
        await trio.sleep(0.99)
        assert len(running.bodies()) == 2
        assert await running.wait_for(3, within_s=0.03) == ["after", "before", "last"]
        assert running.statistics["late_max_ms"] <= 10


async def test_a_clock_set_back_between_two_starts_adds_one_delay_at_most(
    autojump_clock: MockClock,
) -> None:
    disk, clock = FakeDisk(), WallClock()
    async with delays(disk, clock) as running:
        running.send("x", 4)
        await trio.sleep(1)
    clock.shift_ms -= 86_400_000
    async with delays(disk, clock) as running:
        await trio.sleep(29.9)
        assert running.bodies() == []
        assert await running.wait_for(1, within_s=0.3) == ["x"]


# restarts


async def test_pending_messages_and_what_became_due_meanwhile_arrive_after_a_restart(autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), WallClock()
    async with delays(disk, clock) as running:
        running.send("delivered", 1)
        running.send("due", 2)
        running.send("pending", 5)
        await running.wait_for(1)
    await trio.sleep(10)
    for _ in range(2):
        async with delays(disk, clock) as running:
            assert await running.wait_for(2, within_s=0.1) == ["delivered", "due"]
            await trio.sleep(1)
            assert len(running.bodies()) == 2
    async with delays(disk, clock) as running:
        assert await running.wait_for(3, within_s=50) == ["delivered", "due", "pending"]
        assert running.statistics["late_max_ms"] <= 10


# what cannot be delivered


async def test_a_message_of_a_deleted_topic_is_logged_and_counted(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with delays() as running:
        running.broker.topics.ensure("gone", 1)
        running.send("lost", topic="gone")
        running.send("kept")
        await trio.sleep(0.5)
        running.broker.topics.delete("gone")
        assert await running.wait_for(1) == ["kept"]
        assert (running.statistics["undeliverable"], running.statistics["delivered"]) == (1, 1)
        assert "(message 0 of level 1, key none) is not delivered; topic[gone] does not exist any more" in caplog.text


async def test_a_message_whose_queue_was_removed_goes_to_another_one(autojump_clock: MockClock) -> None:
    async with delays(queues=4) as running:
        running.send("x", queue_id=3)
        await trio.sleep(0.5)
        running.broker.topics.update("t", 2, 2)
        await running.wait_for(1)
        assert [record.queue_id for record in running.records()] == [1]


async def test_a_message_for_a_closed_topic_waits_for_its_delay_again(autojump_clock: MockClock) -> None:
    async with delays() as running:
        running.send("x", 2)
        running.broker.topics.update("t", 1, 1, perm=4)
        await trio.sleep(7)
        assert running.bodies() == []
        running.broker.topics.update("t", 1, 1, perm=6)
        assert await running.wait_for(1, within_s=4) == ["x"]
        assert (running.statistics["postponed"], running.statistics["delivered"]) == (1, 1)


async def test_only_what_a_later_stage_refuses_is_dropped(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(message: Message) -> Message:
        if message.body == b"bad" and message.topic == "t":
            raise Refused(Reason.ILLEGAL, "not this one")
        return message

    async with delays() as running:
        running.broker.set_stages([*running.broker.stages.pairs, ("judge", Stage(refuse))])
        for body in ("a", "bad", "b"):
            running.send(body)
        assert await running.wait_for(2) == ["a", "b"]
        await trio.sleep(10)
        assert running.bodies() == ["a", "b"]
        assert (running.statistics["undeliverable"], running.statistics["delivered"]) == (1, 2)
        assert "for topic t is not delivered; not this one" in caplog.text


@pytest.mark.parametrize("properties", [b"DELAY\x011\x02", b"DELAY\x011\x02REAL_TOPIC\x01SCHEDULE_TOPIC_XXXX\x02"])
async def test_a_record_without_a_real_topic_is_skipped(autojump_clock: MockClock, properties: bytes) -> None:
    async with delays() as running:
        running.broker.publish(Message(SCHEDULE_TOPIC, b"odd", properties, 0))
        running.send("x")
        assert await running.wait_for(1) == ["x"]
        assert running.statistics["undeliverable"] == 1
