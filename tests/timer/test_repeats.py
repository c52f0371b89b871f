"""Messages that come several times: as often as ActiveMQ delivers them, each once, until somebody ends them."""

import logging
from collections.abc import Sequence
from errno import EIO
from random import Random

import pytest
import trio
from tests.cold_disk import cold_disk
from tests.timer.timer_talk import DAY_MS, Timed, quiet, timed
from trio.testing import MockClock

from martlet.contracts import Timers
from martlet.errors import Reason, Refused
from martlet.message import decode_properties
from martlet.tables.topics import TIMER_TOPIC
from martlet.testing.clock import START_MS, TrioClock
from martlet.testing.disk import FakeDisk
from martlet_timer.config import TimerConfig
from martlet_timer.timers.cron import Cron
from martlet_timer.timers.records import out_of

MINUTE_MS = 60_000
TO_MINUTE_MS = MINUTE_MS - START_MS % MINUTE_MS


def came_ms(made: Timed) -> list[int]:
    """Return when each copy was delivered, in ms since the start."""
    properties = [decode_properties(record.properties) for record in made.records()]
    return [int(each["TIMER_DEQUEUE_MS"]) - START_MS for each in properties]


def about(times: Sequence[int]) -> object:
    """Equal to *times*, each up to 20 ms late: the next one counts from the delivery."""
    return pytest.approx(times, abs=20)


async def test_a_message_comes_once_more_than_it_is_repeated(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(TIMER_PERIOD_MS=2000, TIMER_REPEAT=3, TAGS="a", own="b")
        await trio.sleep(60)
        assert came_ms(made) == about([2000, 4000, 6000, 8000])
        assert made.statistics["pending"] == made.statistics["repeated"] == made.statistics["being_delivered"] == 0
        assert made.statistics["delivered"] == 4
        keys: set[str] = set()
        for record in made.records():
            properties = decode_properties(record.properties)
            assert (properties["TAGS"], properties["own"], record.body) == ("a", "b", b"x")
            assert properties["scheduledJobId"] == "T:KEY1"
            assert not {"TIMER_CRON", "TIMER_PERIOD_MS", "TIMER_REPEAT"} & properties.keys()
            keys.add(properties["UNIQ_KEY"])
        assert len(keys) == 4


async def test_the_delay_comes_before_the_first_period(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(TIMER_DELAY_MS=500, TIMER_PERIOD_MS=2000, TIMER_REPEAT=2)
        await trio.sleep(60)
        assert came_ms(made) == about([500, 2500, 4500])


async def test_a_time_may_be_the_first_one(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(TIMER_DELIVER_MS=START_MS + 7000, TIMER_PERIOD_MS=1000, TIMER_REPEAT=1)
        await trio.sleep(60)
        assert came_ms(made) == about([7000, 8000])


async def test_a_period_without_repetitions_is_a_delay(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(TIMER_PERIOD_MS=2000)
        made.publish(TIMER_DELAY_MS=500, TIMER_PERIOD_MS=5000, TIMER_REPEAT=0)
        made.publish(TIMER_PERIOD_MS=0)
        await trio.sleep(60)
        assert made.statistics["repeated"] == 0
        properties = [decode_properties(record.properties) for record in made.records()]
        assert [each["UNIQ_KEY"] for each in properties] == ["KEY3", "KEY2", "KEY1"]
        assert all("scheduledJobId" not in each and "TIMER_PERIOD_MS" not in each for each in properties)


async def test_minus_one_has_no_end_until_its_timer_is_recalled(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(TIMER_PERIOD_MS=1000, TIMER_REPEAT=-1)
        await trio.sleep(50.5)
        assert len(made.records()) == 50
        capability = made.broker.capability(Timers)
        assert capability is not None
        assert capability.pending is not None
        assert capability.recall is not None
        (pending,) = await capability.pending(0, 10)
        assert pending.repeats == "every 1000 ms, for ever"
        assert await capability.recall(pending.topic, pending.out_ms, pending.unique, "") > 0
        await trio.sleep(60)
        assert len(made.records()) == 50
        assert made.statistics["pending"] == made.statistics["repeated"] == 0


async def test_a_schedule_comes_at_its_minutes_without_end(autojump_clock: MockClock) -> None:
    async with quiet() as made:
        made.publish(TIMER_CRON="* * * * *")
        made.publish("T", b"odd", TIMER_CRON="*/2 * * * *")
        await trio.sleep(TO_MINUTE_MS / 1000 + 4.5 * 60)
        times = [record.store_ms - START_MS for record in made.records() if record.body == b"x"]
        assert times == [TO_MINUTE_MS + number * MINUTE_MS for number in range(5)]
        assert len([record for record in made.records() if record.body == b"odd"]) in (2, 3)
        assert made.statistics["repeated"] == made.statistics["pending"] == 2


async def test_the_delay_of_a_schedule_counts_for_its_first_time_alone(autojump_clock: MockClock) -> None:
    async with quiet() as made:
        made.publish(TIMER_CRON="* * * * *", TIMER_DELAY_MS=5000)
        await trio.sleep(TO_MINUTE_MS / 1000 + 3.5 * 60)
        assert came_ms(made) == about([TO_MINUTE_MS + late for late in (5000, 60_000, 120_000, 180_000)])


async def test_each_time_of_a_schedule_begins_a_series(autojump_clock: MockClock) -> None:
    """As ActiveMQ's code has it: the first time has the delay twice, the others once."""
    async with quiet() as made:
        made.publish(TIMER_CRON="* * * * *", TIMER_DELAY_MS=3000, TIMER_PERIOD_MS=1000, TIMER_REPEAT=2)
        await trio.sleep(TO_MINUTE_MS / 1000 + 100)
        first, second = TO_MINUTE_MS + 6000, TO_MINUTE_MS + MINUTE_MS + 3000
        assert came_ms(made) == about([at + late for at in (first, second) for late in (0, 1000, 2000)])
        assert {decode_properties(each.properties)["scheduledJobId"] for each in made.records()} == {"T:KEY1"}
        assert len({decode_properties(each.properties)["UNIQ_KEY"] for each in made.records()}) == 6
        assert made.statistics["repeated"] == 1


async def test_a_time_to_live_begins_with_each_copy(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(TIMER_DELAY_MS=500, TIMER_PERIOD_MS=2000, TIMER_REPEAT=2, EXPIRES_MS=START_MS + 10_000)
        await trio.sleep(60)
        for record in made.records():
            properties = decode_properties(record.properties)
            assert int(properties["EXPIRES_MS"]) - int(properties["TIMER_DEQUEUE_MS"]) == 10_000


async def test_a_message_without_a_key_gets_one(autojump_clock: MockClock) -> None:
    async with timed() as made:
        for _ in range(2):
            made.publish(TIMER_PERIOD_MS=1000, TIMER_REPEAT=1, UNIQ_KEY="")
        await trio.sleep(1.5)
        assert made.statistics["repeated"] == 2
        await trio.sleep(60)
        assert len(made.records()) == 4
        assert len({decode_properties(each.properties)["scheduledJobId"] for each in made.records()}) == 2


async def test_what_is_sent_twice_with_one_key_is_repeated_once(autojump_clock: MockClock) -> None:
    async with timed() as made:
        for body in (b"1", b"2"):
            made.publish(body=body, UNIQ_KEY="K", TIMER_PERIOD_MS=1000, TIMER_REPEAT=2)
        await trio.sleep(60)
        assert made.bodies() == [b"2"] * 3
        assert made.statistics["pending"] == 0


async def test_many_messages_that_are_due_together_all_come(autojump_clock: MockClock) -> None:
    async with timed(segment_bytes=1 << 20) as made:
        for number in range(300):
            made.publish(body=b"%d" % number, TIMER_PERIOD_MS=1000, TIMER_REPEAT=2)
            made.publish(body=b"once", TIMER_DELAY_MS=1000)
        await trio.sleep(10)
        assert sorted(made.bodies()) == sorted([b"%d" % number for number in range(300)] * 3 + [b"once"] * 300)
        assert made.statistics["pending"] == made.statistics["being_delivered"] == 0


# ---- limits and wrong fields


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({"TIMER_PERIOD_MS": "soon", "TIMER_REPEAT": 1}, "period 'soon' is wrong; it is a number of milliseconds"),
        ({"TIMER_PERIOD_MS": "-5", "TIMER_REPEAT": 1}, "period '-5' is wrong"),
        ({"TIMER_PERIOD_MS": 1000, "TIMER_REPEAT": "-2"}, "repetitions '-2' is wrong; use 0 to 2147483647, or -1"),
        ({"TIMER_PERIOD_MS": 1000, "TIMER_REPEAT": 1 << 31}, "repetitions '2147483648' is wrong"),
        (
            {"TIMER_PERIOD_MS": 99, "TIMER_REPEAT": 1},
            "period 99 of a repeated message is too short; the minimum is 100 ms (timer.period_min_ms)",
        ),
        ({"TIMER_REPEAT": 5}, "period 0 of a repeated message is too short"),
        ({"TIMER_REPEAT": -1, "TIMER_DELAY_MS": 1000}, "period 0 of a repeated message is too short"),
        (
            {"TIMER_PERIOD_MS": 259_200_001, "TIMER_REPEAT": 1},
            "period 259200001 is too long; the maximum is 259200000 ms (timer.delay_max_s = 259200)",
        ),
        ({"TIMER_CRON": "61 * * * *"}, "schedule has the minute '61'; use 0 to 59"),
        ({"TIMER_CRON": "0 0 31 2 *"}, "schedule never comes"),
        (
            {"TIMER_CRON": "* * * * *", "TIMER_DELIVER_MS": START_MS + 5000},
            "message has both TIMER_CRON and TIMER_DELIVER_MS; use one of them",
        ),
        (
            {"TIMER_CRON": "* * * * *", "TIMER_PERIOD_MS": 1000, "TIMER_REPEAT": -1},
            "the series of a schedule has no end, and the next one can begin after 60000 ms",
        ),
        (
            {"TIMER_CRON": "* * * * *", "TIMER_PERIOD_MS": 1000, "TIMER_REPEAT": 59},
            "the series of a schedule takes 60000 ms, and the next one can begin after 60000 ms",
        ),
        ({"TIMER_CRON": "0 * * * *", "TIMER_REPEAT": 5}, "period 0 of a repeated message is too short"),
    ],
)
async def test_a_wrong_repetition_is_refused(
    autojump_clock: MockClock, properties: dict[str, object], reason: str
) -> None:
    async with timed() as made:
        with pytest.raises(Refused) as refused:
            made.publish(properties=properties)
        assert refused.value.reason == Reason.ILLEGAL
        assert reason in str(refused.value)
        assert made.records(TIMER_TOPIC) == made.records() == []


async def test_a_schedule_may_be_further_ahead_than_a_delay(autojump_clock: MockClock) -> None:
    async with quiet() as made:
        made.publish(TIMER_CRON="0 0 1 1 *")
        await trio.sleep(0.1)
        assert made.plugin.timers.repeated.newest["T+KEY1"][0] == Cron("0 0 1 1 *").next_ms(START_MS)
        assert Cron("0 0 1 1 *").next_ms(START_MS) - START_MS > 10 * DAY_MS


async def test_more_repeated_messages_than_allowed_are_refused(autojump_clock: MockClock) -> None:
    async with timed(config=TimerConfig(schedules_max=2)) as made:
        for _ in range(2):
            made.publish(TIMER_PERIOD_MS=1000, TIMER_REPEAT=1)
        await trio.sleep(0.5)
        with pytest.raises(
            Refused, match=r"there are 2 repeated messages; timer\.schedules_max allows no more"
        ) as refused:
            made.publish(TIMER_CRON="* * * * *")
        assert refused.value.reason == Reason.BUSY
        await trio.sleep(10)
        made.publish(TIMER_CRON="* * * * *")


async def test_a_delay_level_wins_over_a_repetition(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(DELAY=1, TIMER_PERIOD_MS=100, TIMER_REPEAT=-1, TIMER_CRON="x")
        await trio.sleep(60)
        (record,) = made.records()
        assert not [name for name in decode_properties(record.properties) if name.startswith("TIMER_")]


# ---- the end


async def test_the_name_ends_a_message_and_its_series(autojump_clock: MockClock) -> None:
    async with quiet() as made:
        made.publish(TIMER_CRON="* * * * *", TIMER_PERIOD_MS=10_000, TIMER_REPEAT=3)
        made.publish(body=b"other", TIMER_PERIOD_MS=10_000, TIMER_REPEAT=-1)
        # The first time is late by a period, and so is its series.
        await trio.sleep(TO_MINUTE_MS / 1000 + 25)
        assert made.statistics["repeated"] == 3
        count = made.bodies().count(b"x")
        assert count == 1
        end = made.plugin.recalls.end_repeated("T", "KEY1")
        assert end == made.broker.store.written
        await trio.sleep(300)
        assert made.bodies().count(b"x") == count
        assert made.bodies().count(b"other") > 20
        assert made.statistics["repeated"] == made.statistics["pending"] == 1
        assert made.plugin.recalls.end_repeated("T", "KEY1") == 0
        assert made.plugin.recalls.end_repeated("other", "KEY2") == 0


async def test_a_message_ends_whatever_happens_to_its_timer(autojump_clock: MockClock) -> None:
    """Its timer may be in delivery, in a move, or between two times."""
    random = Random(7)
    async with timed(segment_bytes=1 << 20) as made:
        for number in range(60):
            made.publish(body=b"%d" % number, UNIQ_KEY=f"K{number}", TIMER_PERIOD_MS=100, TIMER_REPEAT=-1)
        await trio.sleep(1)

        async def move() -> None:
            for _ in range(30):
                await made.broker.turns.finish(made.plugin.timers.roll(0, made.broker.store.appended))
                await trio.sleep(0.05)

        ends: dict[bytes, int] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(move)
            for number in range(60):
                await trio.sleep(random.random() / 30)
                ends[b"%d" % number] = made.plugin.recalls.end_repeated("T", f"K{number}")
        await trio.sleep(5)
        assert made.statistics["repeated"] == made.statistics["pending"] == made.statistics["being_delivered"] == 0
        for record in made.records():
            assert record.position < ends[record.body]


async def test_a_message_that_ends_while_the_disk_is_slow_does_not_come_again(autojump_clock: MockClock) -> None:
    """The next timer becomes due before the end is durable."""
    async with timed() as made:
        made.publish(TIMER_PERIOD_MS=100, TIMER_REPEAT=-1)
        await trio.sleep(0.05)
        (timer,) = made.plugin.timers.repeated.newest.values()
        await trio.sleep((timer[0] - made.clock.now_ms()) / 1000)
        while not made.plugin.timers.schedule.is_taken(timer[1]):
            await trio.lowlevel.checkpoint()
        end = made.plugin.recalls.end_repeated("T", "KEY1")
        applied = made.plugin.timers._apply_note
        notes: list[bytes] = []
        made.plugin.timers._apply_note = notes.append  # type: ignore[assignment,method-assign]
        await made.broker.store.flusher.wait_flushed(end)
        await trio.sleep(1)
        for note in notes:
            applied(note)
        await trio.sleep(5)
        assert all(record.position < end for record in made.records())
        assert made.statistics["pending"] == made.statistics["being_delivered"] == 0


async def test_an_end_that_is_refused_changes_nothing(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(TIMER_PERIOD_MS=1000, TIMER_REPEAT=-1)
        await trio.sleep(0.5)
        made.broker.store.admission.close("no room for a test")
        with pytest.raises(Refused, match="no room for a test"):
            made.plugin.recalls.end_repeated("T", "KEY1")
        made.broker.store.admission.refusal = ""
        await trio.sleep(3)
        assert len(made.records()) == 3


# ---- restarts, downtime and troubles


async def test_a_broker_that_was_down_delivers_one_copy_of_what_it_missed(autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with timed(disk, clock) as made:
        made.publish(body=b"period", TIMER_PERIOD_MS=10_000, TIMER_REPEAT=5)
        made.publish(body=b"cron", TIMER_CRON="* * * * *")
        await trio.sleep(15)
        assert made.bodies() == [b"period"]
    await trio.sleep(300)
    async with timed(disk, clock) as made:
        await trio.sleep(1)
        assert made.bodies() == [b"period", b"period", b"cron"]
        started = came_ms(made)[-1]
        await trio.sleep(35)
        periods = [at for at, body in zip(came_ms(made), made.bodies(), strict=True) if body == b"period"]
        assert periods == about([10_000, *[started + number * 10_000 for number in range(4)]])
        await trio.sleep(120)
        assert made.bodies().count(b"period") == 6
        crons = [at for at, body in zip(came_ms(made), made.bodies(), strict=True) if body == b"cron"]
        assert all((START_MS + at) % MINUTE_MS < 20 for at in crons[1:])
        assert len(crons) in (3, 4)


async def test_an_end_survives_a_restart(autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with timed(disk, clock) as made:
        made.publish(TIMER_PERIOD_MS=1000, TIMER_REPEAT=-1)
        await trio.sleep(2.5)
        made.plugin.recalls.end_repeated("T", "KEY1")
    async with timed(disk, clock) as made:
        await trio.sleep(10)
        assert len(made.records()) == 2
        assert made.statistics["pending"] == 0


@pytest.mark.parametrize("properties", [{"TIMER_PERIOD_MS": 1000, "TIMER_REPEAT": -1}, {"TIMER_CRON": "* * * * *"}])
async def test_a_message_without_its_topic_ends(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, properties: dict[str, object]
) -> None:
    with caplog.at_level(logging.WARNING, "martlet.timer"):
        async with timed() as made:
            made.publish(properties=properties)
            made.broker.topics.delete("T")
            await trio.sleep(100)
            assert made.statistics["pending"] == made.statistics["repeated"] == 0
            assert made.statistics["dropped_without_topic"] == 1
    assert "timers for topic[T] are dropped" in caplog.text


async def test_a_schedule_with_series_ends_with_its_topic(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(TIMER_CRON="* * * * *", TIMER_PERIOD_MS=1000, TIMER_REPEAT=2)
        made.broker.topics.delete("T")
        await trio.sleep(100)
        assert made.statistics["pending"] == made.statistics["repeated"] == 0


async def test_a_repeated_message_follows_its_topic_to_another_queue(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(queue_id=1, TIMER_PERIOD_MS=1000, TIMER_REPEAT=2)
        made.broker.topics.update("T", 1, 1)
        await trio.sleep(10)
        assert [record.queue_id for record in made.records()] == [0, 0, 0]


async def test_a_topic_without_permission_postpones_all_later_times(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(TIMER_PERIOD_MS=1000, TIMER_REPEAT=2)
        made.broker.topics.update("T", 2, 2, perm=4)
        await trio.sleep(30)
        assert made.statistics["postponed"] == 1
        made.broker.topics.update("T", 2, 2, perm=6)
        await trio.sleep(60)
        assert came_ms(made) == about([61_000, 62_000, 63_000])


async def test_a_disk_that_cannot_read_delays_the_schedule(autojump_clock: MockClock) -> None:
    _, disk = cold_disk()
    async with timed(disk, topics=("T", "other"), segment_bytes=8192, page_bytes=1024, cache_bytes=16_384) as made:
        made.publish(TIMER_PERIOD_MS=2000, TIMER_REPEAT=1)
        for _ in range(40):
            made.publish("other", b"x" * 900)
        await trio.sleep(1)
        disk.fail_next("read", EIO)
        await trio.sleep(30)
        assert made.records() == []
        await trio.sleep(60)
        assert len(made.records()) == 2


async def test_what_another_broker_stored_does_not_flood(autojump_clock: MockClock) -> None:
    """RocketMQ takes whatever properties its clients send."""
    async with timed() as made:
        place = {"TIMER_OUT_MS": out_of(START_MS + 1000), "REAL_TOPIC": "T", "REAL_QID": 0}
        for _ in range(2):
            made.publish(TIMER_TOPIC, b"no key", properties={**place, "TIMER_REPEAT": 20, "UNIQ_KEY": ""})
        made.publish(TIMER_TOPIC, b"dense", properties={**place, "TIMER_PERIOD_MS": 0, "TIMER_REPEAT": 20})
        made.publish(TIMER_TOPIC, b"wrong", properties={**place, "TIMER_CRON": "every day"})
        await trio.sleep(2)
        assert made.bodies().count(b"dense") in (10, 11)
        await trio.sleep(10)
        assert made.bodies().count(b"dense") == 21
        assert made.bodies().count(b"wrong") == 1
        assert made.bodies().count(b"no key") == 2
        assert made.statistics["repeated"] == made.statistics["pending"] == 0


async def test_retention_moves_what_is_repeated(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(TIMER_DELAY_MS=5000, TIMER_PERIOD_MS=1000, TIMER_REPEAT=1)
        await trio.sleep(1)
        for _ in range(3):
            await made.broker.turns.finish(made.plugin.timers.roll(0, made.broker.store.appended))
            await trio.sleep(0.1)
        assert made.statistics["pending"] == made.statistics["repeated"] == 1
        await trio.sleep(20)
        assert len(made.records()) == 2
        assert made.statistics["pending"] == made.statistics["repeated"] == 0


async def test_the_end_of_a_message_removes_whatever_is_pending_of_it(autojump_clock: MockClock) -> None:
    """A power cut may lose the note that removes an earlier timer, and keep the one of the last delivery."""
    async with timed() as made:
        made.publish(UNIQ_KEY="K", TIMER_PERIOD_MS=1000, TIMER_REPEAT=2)
        await trio.sleep(0.5)
        made.plugin.timer_writer.append([], [], ["T+K", "T+K.series"])
        await trio.sleep(10)
        assert made.records() == []
        assert made.statistics["pending"] == made.statistics["repeated"] == 0
