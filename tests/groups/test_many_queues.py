"""Shared groups on topics with many queues: a delivery costs what it delivers, and every queue has its turn."""

import sys
from types import FrameType

import trio
from tests.delivery.pushing import publish
from tests.groups.test_shared_groups import Competitor, broker_in_memory
from trio.testing import MockClock

from martlet.groups.handing_out.distribution import MESSAGES_A_TURN, RESTS_EXACT
from martlet.groups.queues.group_queues import RESTORED_A_TURN
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import ManualClock

QUEUES = 500


async def calls_of_a_delivery(queues: int) -> int:
    """Return how many functions one delivery calls of a group that has consumed *queues* queues."""
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", queues)
        one = Competitor(broker, credit=queues)
        for queue_id in range(queues):
            publish(broker, "t", queue_id, b"old")
        while came := one.turn():
            for message in came:
                assert one.member.ack(int(message.split(":")[0]), 0)
        broker.store.committer.commit()
        publish(broker, "t", 3, b"new")
        calls = 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            came = one.turn()
            one.member.group.distribution.rest()
            one.member.group.distribution.is_ready()
            one.member.group.deadline()
            one.member.group.tick(broker.shared_groups.now())
        finally:
            sys.setprofile(None)
        assert came == ["3:1:new"]
        return calls


async def test_a_delivery_costs_the_same_on_a_topic_of_many_queues() -> None:
    assert await calls_of_a_delivery(QUEUES) == await calls_of_a_delivery(8) > 0


async def test_queues_take_turns() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 3)
        for queue_id in range(3):
            publish(broker, "t", queue_id, *[b"x"] * (2 * MESSAGES_A_TURN))
        one = Competitor(broker, credit=0)
        turns: list[str] = []
        for _ in range(3 * 2 * MESSAGES_A_TURN // 32):
            one.member.add_credit(32)
            turns += [each.split(":")[0] for each in one.turn()]
        assert turns == [str(queue_id) for queue_id in (0, 1, 2, 0, 1, 2) for _ in range(MESSAGES_A_TURN)]


async def test_leases_of_each_queue_end_on_time(autojump_clock: MockClock) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", QUEUES)
        for queue_id in range(QUEUES):
            publish(broker, "t", queue_id, b"x")
        one = Competitor(broker, credit=0)
        expected: dict[float, str] = {}
        start = trio.current_time()
        for number in range(QUEUES):
            one.member.lease_s = 1.0 + number * 37 % QUEUES
            one.member.add_credit(1)
            expected[one.member.lease_s] = one.turn()[0]
        two = Competitor(broker, lease_s=10_000, credit=1000)
        for after_s, message in sorted(expected.items()):
            await trio.sleep_until(start + after_s + 0.001)
            assert two.turn() == [message]


async def test_what_is_left_of_many_queues_is_counted_now_and_then() -> None:
    async with broker_in_memory() as broker:
        queues = 4 * RESTS_EXACT
        broker.topics.ensure("t", queues)
        for queue_id in range(queues):
            publish(broker, "t", queue_id, b"x", b"y")
        one = Competitor(broker, credit=queues)
        shared_group = one.member.group
        assert shared_group.distribution.rest() == 2 * queues
        assert len(one.turn()) == queues
        assert [shared_group.distribution.rest() for _ in range(5)] == [queues] * 5
        assert shared_group.distribution.rest(queue_id=queues - 1) == 2


async def test_a_reset_of_a_queue_that_was_read_to_its_end_is_noticed() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 2)
        publish(broker, "t", 1, b"a")
        one = Competitor(broker)
        assert one.turn() == ["1:0:a"]
        assert one.member.ack(1, 0)
        broker.store.committer.commit()
        broker.groups.offsets.reset("G", "t", {1: 0})
        assert one.turn() == ["1:0:a"]


async def test_stored_leases_of_many_queues_are_restored_in_turns(autojump_clock: MockClock) -> None:
    disk, each = FakeDisk(), RESTORED_A_TURN * 3 // 4
    disk.cached = True
    clock = ManualClock()
    async with broker_in_memory(disk, clock=clock) as broker:
        broker.topics.ensure("t", 4)
        for queue_id in range(4):
            publish(broker, "t", queue_id, *[b"x"] * each)
        one = Competitor(broker, lease_s=100, credit=4 * each)
        while one.turn():
            pass
        assert broker.shared_groups.unsettled == 4 * each
        generation = one.member.group.renew(3, 7, clock.now_ms(), 100)
        broker.store.committer.commit()
    async with broker_in_memory(disk, clock=clock) as broker:
        for queue_id in range(4):
            publish(broker, "t", queue_id, b"new")
        two = Competitor(broker, credit=5 * each)
        shared_group = two.member.group
        assert broker.shared_groups.unsettled == 2 * each
        assert two.turn() == [f"{queue_id}:{each}:new" for queue_id in range(2)]
        assert shared_group.ack(3, 7, generation)  # its queue is restored at once
        assert not shared_group.ack(3, 7, generation)
        assert (shared_group.next_offset(3), broker.shared_groups.unsettled) == (each, 3 * each + 2)
        assert two.turn() == [f"3:{each}:new"]
        shared_group.tick(broker.shared_groups.now())
        assert two.turn() == [f"2:{each}:new"]
        assert broker.shared_groups.unsettled == 4 * each + 4
        clock.ms += 101_000
        await trio.sleep(101)
        came: list[str] = []
        for _ in range(20):
            shared_group.tick(broker.shared_groups.now())
            came += two.turn()
        assert len(came) == len(set(came)) == 4 * each + 3
        assert set(two.deliveries) == {2}


async def test_a_deleted_topic_takes_leases_with_it_that_were_not_restored_yet(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    disk.cached = True
    async with broker_in_memory(disk) as broker:
        broker.topics.ensure("t", 3)
        for queue_id in range(3):
            publish(broker, "t", queue_id, *[b"x"] * RESTORED_A_TURN)
        one = Competitor(broker, lease_s=100, credit=3 * RESTORED_A_TURN)
        while one.turn():
            pass
    async with broker_in_memory(disk) as broker:
        Competitor(broker)
        assert broker.shared_groups.unsettled == RESTORED_A_TURN
        broker.topics.delete("t")
        broker.store.committer.commit()
        assert len(broker.shared_groups.state) == broker.shared_groups.unsettled == 0
