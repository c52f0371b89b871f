"""The rounds of checks: whom they ask, when, how often, and what becomes of transactions that nobody ends."""

import errno

import pytest
import trio
import trio.testing
from msgspec.structs import replace
from tests.tx.talk import CONFIG, GROUP, TOPIC, Sellers, check_times, half, op_bodies, sellers

from martlet.contracts import Producers
from martlet.errors import Refused
from martlet.message import Message, decode_properties, put_property
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import ManualClock
from martlet_tx.formats import CID, HALF_TOPIC, OP_TOPIC, PARK_TOPIC, op_message

LATER = 6001


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


async def running(nursery: trio.Nursery, clock: ManualClock, **more: object) -> Sellers:
    """A broker whose store flushes by itself, because a round waits for that."""
    found = await sellers(clock=clock, **more)  # type: ignore[arg-type]
    await nursery.start(found.store.upkeep.run)
    return found


async def test_a_transaction_is_asked_about_from_its_immunity_on(nursery: trio.Nursery, clock: ManualClock) -> None:
    found = await running(nursery, clock)
    found.prepare("k1")
    await found.settle()
    clock.ms += 5999
    assert await found.round() == []
    clock.ms += 2
    assert await found.round() == ["k1"]
    assert found.state.halves.checks(0) == 1
    assert found.held.half_queue.next_offset == 1  # no copy


async def test_who_is_asked_gets_the_half_message_and_where_it_was_sent(
    nursery: trio.Nursery, clock: ManualClock
) -> None:
    found = await running(nursery, clock)
    found.broker.topics.update(TOPIC, 4, 4)
    placed = found.prepare("k1", queue_id=3)
    await found.settle()
    clock.ms += LATER
    await found.checks.round()
    (asked,) = found.asked.halves
    found.asked.halves.clear()
    assert (asked.group, asked.topic, asked.queue_id) == (GROUP, TOPIC, 3)
    assert (asked.record.topic, asked.record.position) == (HALF_TOPIC, placed.position)
    await found.end(placed, commit=True)
    await found.settle()
    assert await found.round() == []


async def test_a_message_can_ask_for_a_longer_immunity(nursery: trio.Nursery, clock: ManualClock) -> None:
    found = await running(nursery, clock)
    found.broker.publish(_born_now(found, "k1", "CHECK_IMMUNITY_TIME_IN_SECONDS\x0160\x02"))
    found.broker.publish(_born_now(found, "k2"))
    await found.settle()
    clock.ms += LATER
    assert await found.round() == ["k2"]
    clock.ms += 54_000
    assert await found.round() == ["k1", "k2"]


def _born_now(found: Sellers, key: str, properties: str = "") -> Message:
    message = half(key, properties)
    message.born_ms = found.broker.clock.now_ms()
    return message


async def test_after_its_own_immunity_only_the_answer_to_a_check_counts(
    nursery: trio.Nursery, clock: ManualClock
) -> None:
    found = await running(nursery, clock)
    own = found.broker.publish(_born_now(found, "k1", "CHECK_IMMUNITY_TIME_IN_SECONDS\x0160\x02"))
    usual = found.broker.publish(_born_now(found, "k2"))
    await found.settle()
    clock.ms += 60_000
    assert not found.held.is_late(await found.find(own))
    clock.ms += 1
    assert found.held.is_late(await found.find(own))
    assert not found.held.is_late(await found.find(usual))


async def test_a_transaction_is_parked_after_fifteen_checks(nursery: trio.Nursery, clock: ManualClock) -> None:
    found = await running(nursery, clock)
    found.prepare("k1", "TAGS\x01red\x02")
    await found.settle()
    for _ in range(15):
        clock.ms += 30_000
        assert await found.round() == ["k1"]
    clock.ms += 30_000
    assert await found.round() == []
    (parked,) = found.records(PARK_TOPIC)
    assert (parked.queue_id, parked.body, parked.flag) == (0, b"k1", 7)
    properties = decode_properties(parked.properties)
    assert (properties["TRANSACTION_CHECK_TIMES"], properties["REAL_TOPIC"], properties["TAGS"]) == ("15", TOPIC, "red")
    assert (op_bodies(found), found.pending(), found.stored()) == ([b"0"], [], [])
    assert found.checks.statistics()["parked_messages"] == found.held.parked == 1
    with pytest.raises(Refused, match="was parked after too many checks"):
        found.held.end(await found.held.find(parked.position), commit=True)


async def test_a_transaction_without_a_producer_is_counted_as_checked(
    nursery: trio.Nursery, clock: ManualClock
) -> None:
    found = await running(nursery, clock, config=replace(CONFIG, checks_max=2))
    found.prepare("k1")
    await found.settle()
    found.asked.connected = False
    clock.ms += LATER
    assert await found.round() == []
    del found.broker.capabilities[Producers]
    assert await found.round() == []
    assert found.checks.unanswerable == 2
    await found.round()
    assert found.stored(PARK_TOPIC) == ["k1"]


async def test_one_failing_check_stalls_no_other(nursery: trio.Nursery, clock: ManualClock) -> None:
    found = await running(nursery, clock)
    for number in range(5):
        found.prepare(f"k{number}")
    await found.settle()
    found.asked.fails = lambda key: key == "k1"
    clock.ms += LATER
    assert await found.round() == ["k0", "k2", "k3", "k4"]


async def test_a_lost_half_message_stalls_no_other_and_ends(nursery: trio.Nursery, clock: ManualClock) -> None:
    found = await running(nursery, clock)
    for number in range(3):
        found.prepare(f"k{number}")
    found.broker.publish(Message(HALF_TOPIC, b"odd", b"PGROUP\x01g\x02", 0))  # without REAL_TOPIC
    found.prepare("k4")
    await found.settle()
    clock.ms += LATER
    assert await found.round() == ["k0", "k1", "k2", "k4"]
    assert (found.pending(), found.checks.lost) == ([0, 1, 2, 4], 1)


async def test_a_round_asks_about_everything_however_much_it_is(nursery: trio.Nursery, clock: ManualClock) -> None:
    found = await running(nursery, clock, segment_bytes=1 << 20, cache_bytes=1 << 16, page_bytes=1 << 14)
    placed = [found.prepare(f"k{number}") for number in range(2500)]
    await found.settle()
    for number in range(0, 2500, 3):
        await found.end(placed[number], commit=False)
    await found.settle()
    clock.ms += LATER
    expected = [f"k{number}" for number in range(2500) if number % 3]
    assert await found.round() == expected
    assert await found.round() == expected
    assert {found.state.halves.checks(number) for number in range(2500) if number % 3} == {2}


async def test_a_round_sends_the_producers_of_a_group_no_more_than_configured(
    nursery: trio.Nursery, clock: ManualClock
) -> None:
    found = await running(nursery, clock, config=replace(CONFIG, check_bytes_max=1000))
    for number in range(8):
        found.prepare(f"k{number}")
    found.prepare("other", group="Q")
    await found.settle()
    clock.ms += LATER
    asked = await found.round()
    assert "other" in asked
    assert 1 < len(asked) < 8
    # The others are not counted as checked.
    assert [found.state.halves.checks(offset) for offset in range(9)].count(0) == 9 - len(asked)


@pytest.mark.parametrize("count", [8, 2500])
async def test_what_a_round_leaves_the_next_one_asks_about(
    nursery: trio.Nursery, clock: ManualClock, count: int
) -> None:
    """Nobody answers, so the oldest stay pending; every other one must be asked about as often as they are."""
    found = await running(nursery, clock, config=replace(CONFIG, check_bytes_max=count * 100))
    for number in range(count):
        found.prepare(f"k{number}")
    for number in range(3):
        found.prepare(f"other{number}", group="Q")
    await found.settle()
    clock.ms += LATER
    asked: list[str] = []
    rounds = 0
    while len({key for key in asked if key.startswith("k")}) < count:
        more = await found.round()
        assert {key for key in more if key.startswith("other")} == {"other0", "other1", "other2"}
        asked += [key for key in more if key.startswith("k")]
        rounds += 1
        assert rounds < 20
    assert asked[:count] == [f"k{number}" for number in range(count)], "in turn"
    for _ in range(3 * rounds):
        await found.round()
    checks = [found.state.halves.checks(offset) for offset in range(count)]
    assert max(checks) - min(checks) <= 1


async def test_a_group_within_the_limit_again_is_asked_about_all(nursery: trio.Nursery, clock: ManualClock) -> None:
    found = await running(nursery, clock, config=replace(CONFIG, check_bytes_max=1000))
    placed = [found.prepare(f"k{number}") for number in range(8)]
    await found.settle()
    clock.ms += LATER
    first = await found.round()
    for each in placed[len(first) + 1 :]:
        await found.end(each, commit=False)
    await found.settle()
    assert await found.round() == [f"k{len(first)}"]
    assert await found.round() == first


async def test_a_clock_that_jumped_back_stops_no_check(nursery: trio.Nursery, clock: ManualClock) -> None:
    found = await running(nursery, clock)
    found.prepare("k1")
    await found.settle()
    clock.ms -= 86_400_000
    assert await found.round() == ["k1"]


async def test_checks_are_counted_across_a_restart(nursery: trio.Nursery, clock: ManualClock) -> None:
    disk = FakeDisk()
    found = await running(nursery, clock, disk=disk)
    found.prepare("k1")
    await found.settle()
    clock.ms += LATER
    for _ in range(3):
        await found.round()
    nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await found.store.close()
        again = await sellers(disk, clock)
        assert again.state.halves.checks(0) == 3


# by an administrator


async def test_a_parked_message_is_resumed_once(nursery: trio.Nursery, clock: ManualClock) -> None:
    found = await running(nursery, clock, config=replace(CONFIG, checks_max=1))
    found.prepare("k1")
    await found.settle()
    clock.ms += LATER
    await found.round()
    await found.round()
    (parked,) = found.records(PARK_TOPIC)
    found.held.resume(await found.held.find(parked.position))
    with pytest.raises(Refused, match="is a half message again already"):
        found.held.resume(await found.held.find(parked.position))
    await found.settle()
    with pytest.raises(Refused, match="is a half message again already"):
        found.held.resume(await found.held.find(parked.position))
    assert (found.pending(), found.state.halves.checks(1)) == ([1], 0)
    assert found.checks.statistics()["parked_messages"] == 0
    clock.ms += LATER
    await found.checks.round()
    (asked,) = found.asked.halves
    found.held.end(asked, commit=True)
    await found.settle()
    assert found.stored() == ["k1"]


async def test_the_checks_of_a_pending_transaction_can_be_counted_again(
    nursery: trio.Nursery, clock: ManualClock
) -> None:
    found = await running(nursery, clock)
    placed = found.prepare("k1")
    await found.settle()
    clock.ms += LATER
    await found.round()
    found.held.resume(await found.find(placed))
    await found.settle()
    assert found.state.halves.checks(0) == 0
    await found.end(placed, commit=False)
    with pytest.raises(Refused, match="has ended"):
        found.held.resume(await found.find(placed))


# the offsets of CID_RMQ_SYS_TRANS, by which RocketMQ continues


async def test_rocketmq_is_told_the_oldest_pending_one_and_an_op_record_before_all_that_matter(
    nursery: trio.Nursery, clock: ManualClock
) -> None:
    found = await running(nursery, clock, segment_bytes=1 << 20)
    placed = [found.prepare(f"k{number}") for number in range(1000)]
    await found.settle()
    for number, each in enumerate(placed):
        if number != 700:
            await found.end(each, commit=False)
    await found.settle()
    await found.checks.commit_offsets()
    groups = found.broker.groups
    assert groups.offsets.get(CID, HALF_TOPIC, 0) == 700
    op = groups.offsets.get(CID, OP_TOPIC, 0)
    assert 0 < op <= 700  # op record 700 is the first that names a half message after 700
    await found.end(placed[700], commit=False)
    await found.settle()
    await found.checks.commit_offsets()
    assert (groups.offsets.get(CID, HALF_TOPIC, 0), groups.offsets.get(CID, OP_TOPIC, 0)) == (1000, 1000)


async def test_at_the_end_offsets_are_committed_though_the_store_flushes_no_more(
    clock: ManualClock, autojump_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        found = await running(nursery, clock, flush="async")
        await nursery.start(found.checks.run)
        await trio.testing.wait_all_tasks_blocked()
        placed = found.prepare("k1")
        await found.settle()
        await found.end(placed, commit=False)
        await found.settle()
        found.prepare("k2")
        found.store.committer.commit()
        assert found.store.flusher.durable < found.store.readable
        began = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() == began
    assert found.broker.groups.offsets.get(CID, HALF_TOPIC, 0) == 1


async def test_what_rocketmq_has_handled_is_not_pending(nursery: trio.Nursery, clock: ManualClock) -> None:
    found = await running(nursery, clock)
    for number in range(6):
        found.prepare(f"k{number}")
    await found.settle()
    found.broker.groups.offsets.commit(CID, HALF_TOPIC, 0, 99)  # of another store
    found.checks.find_handled()
    assert found.held.handled_before == 0
    found.broker.groups.offsets.commit(CID, HALF_TOPIC, 0, 4)
    found.checks.find_handled()
    await found.checks.adopt()
    await found.settle()
    assert found.pending() == [4, 5]


async def test_on_a_full_disk_what_rocketmq_has_handled_cannot_end_again(
    nursery: trio.Nursery,
    clock: ManualClock,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = FakeDisk()
    found = await running(nursery, clock, disk=disk)
    placed = [found.prepare(f"k{number}") for number in range(6)]
    await found.settle()
    found.broker.groups.offsets.commit(CID, HALF_TOPIC, 0, 4)
    disk.free_bytes = 0
    found.store.admission.refuse_full(OSError(errno.ENOSPC, "No space left on device"))
    async with trio.open_nursery() as service:
        await service.start(found.checks.run)
        await trio.sleep(1)
        assert "transactions that RocketMQ has handled cannot be noted, so none is checked yet; the disk" in caplog.text
        with pytest.raises(Refused, match="has ended"):
            await found.end(placed[3], commit=True)
        disk.free_bytes = None
        found.store.upkeep.retention.look()
        await trio.sleep(10)
        assert found.pending() == [4, 5]
        service.cancel_scope.cancel()


async def test_a_copy_by_rocketmq_continues_its_count_and_ends_with_its_first_half_message(
    nursery: trio.Nursery, clock: ManualClock
) -> None:
    found = await running(nursery, clock)
    first = found.prepare("k1")
    second = found.prepare("k2")
    await found.settle()
    for placed, times in (first, b"2"), (second, b"0"):
        (record,) = [each for each in found.records(HALF_TOPIC) if each.queue_offset == placed.queue_offset]
        properties = put_property(record.properties, b"TRANSACTION_CHECK_TIMES", times)
        properties = put_property(properties, b"TRAN_PREPARED_QUEUE_OFFSET", b"%d" % placed.queue_offset)
        found.broker.publish(Message(HALF_TOPIC, record.body, properties, 0), passed="tx")
    await found.settle()
    assert (found.pending(), found.state.halves.checks(2)) == ([2, 3], 2)
    found.broker.publish(op_message([first.queue_offset], 1, b"\x7f\0\0\1\0\0\0\1"), passed="tx")
    await found.settle()
    assert found.pending() == [3]


async def test_a_copy_of_a_transaction_that_has_ended_has_ended_too(nursery: trio.Nursery, clock: ManualClock) -> None:
    found = await running(nursery, clock)
    placed = found.prepare("k1")
    await found.settle()
    await found.end(placed, commit=False)
    await found.settle()
    (record,) = found.records(HALF_TOPIC)
    properties = put_property(record.properties, b"TRAN_PREPARED_QUEUE_OFFSET", b"0")
    found.broker.publish(Message(HALF_TOPIC, record.body, properties, 0), passed="tx")
    await found.settle()
    assert found.pending() == []


async def test_the_service_runs_a_round_every_interval_and_commits_offsets_at_its_end(
    nursery: trio.Nursery, clock: ManualClock, autojump_clock: trio.testing.MockClock
) -> None:
    found = await running(nursery, clock, config=replace(CONFIG, check_interval_ms=30_000))
    found.prepare("k1")
    await found.settle()
    clock.ms += LATER
    async with trio.open_nursery() as service:
        await service.start(found.checks.run)
        for count in range(1, 5):
            await trio.sleep_until(trio.current_time() + (30 if count > 1 else 30.5))
            assert len(found.asked.keys()) == 1
        service.cancel_scope.cancel()
    assert found.broker.groups.offsets.get(CID, HALF_TOPIC, 0) == 0
    assert check_times(found, HALF_TOPIC) == [b""]


async def test_rounds_that_fail_one_after_another_are_logged_once(
    nursery: trio.Nursery,
    clock: ManualClock,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    disk = FakeDisk()
    found = await running(nursery, clock, disk=disk, config=replace(CONFIG, check_interval_ms=30_000))
    found.prepare("k1")
    await found.settle()
    clock.ms += LATER
    disk.free_bytes = 0
    async with trio.open_nursery() as service:
        await service.start(found.checks.run)
        await trio.sleep(100)
        assert caplog.text.count("transactions are not checked, and are tried again every round; the disk") == 1
        assert found.asked.keys() == []
        disk.free_bytes = None
        await trio.sleep(60)
        assert caplog.text.count("transactions are checked again") == 1
        assert set(found.asked.keys()) == {"k1"}
        service.cancel_scope.cancel()
