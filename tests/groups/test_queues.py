"""What a shared group hands out to who asks each time: of one queue, in order, and as often as it must."""

from tests.delivery.pushing import LINES, broker_in_memory, publish, told
from tests.groups.test_shared_groups import Competitor, committed

from martlet.broker import Broker
from martlet.delivery.routing.selection import EVERYTHING, select_tags
from martlet.delivery.subscriptions import from_earliest
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.settings import DeliveryConfig
from martlet.testing.peers import RecordingPeer
from martlet.testing.stores import ManualClock


def join(broker: Broker, *, credit: int = 100, lease_s: float = 30.0) -> Member:
    return broker.shared_groups.join(
        RecordingPeer(),
        "t",
        "G",
        LINES,
        Membership(lease_s=lease_s, credit=credit, start=from_earliest, holder="anyone"),
    )


async def test_messages_of_one_queue_can_be_taken() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 3)
        member = join(broker)
        for queue_id in range(3):
            publish(broker, "t", queue_id, b"a", b"b")
        assert member.group.distribution.rest() == 6
        assert told(member.group.distribution.hand_out(member, 1 << 20, 1)) == ["1:0:a", "1:1:b"]
        assert (member.group.distribution.rest(1), member.group.distribution.rest()) == (0, 4)
        assert not member.group.distribution.is_ready(1)
        assert member.group.distribution.is_ready(2)
        assert member.group.distribution.hand_out(member, 1 << 20, 7) == []
        assert sorted(told(member.group.distribution.hand_out(member, 1 << 20))) == ["0:0:a", "0:1:b", "2:0:a", "2:1:b"]
        assert not member.group.distribution.is_ready()


async def test_in_order_a_queue_waits_for_its_earlier_messages() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 2)
        member, shared_group = join(broker, credit=2), join(broker, credit=2).group
        publish(broker, "t", 0, b"a", b"b", b"c")
        publish(broker, "t", 1, b"x")
        first = shared_group.distribution.hand_out(member, 1 << 20, 0, in_order=True)
        assert told(first) == ["0:0:a", "0:1:b"]
        member.credit = 5
        assert not shared_group.distribution.is_ready(0, in_order=True)
        assert shared_group.distribution.is_ready(in_order=True)
        assert told(shared_group.distribution.hand_out(member, 1 << 20, in_order=True)) == ["1:0:x"]
        woken = []
        for offset in (0, 1):
            member.woken = False
            assert shared_group.ack(0, offset, first[0].generation)
            woken.append(member.woken)
        assert woken == [False, True]
        assert told(shared_group.distribution.hand_out(member, 1 << 20, in_order=True)) == ["0:2:c"]


async def test_in_order_returned_messages_come_first() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        member = join(broker, credit=3)
        publish(broker, "t", 0, b"a", b"b", b"c", b"d")
        (first,) = member.group.distribution.hand_out(member, 1 << 20, in_order=True)
        assert member.group.ack(0, 1, first.generation)
        assert member.group.renew(0, 2, first.generation, 0.0)
        member.credit = 9
        member.group.tick(broker.shared_groups.now())
        assert member.group.distribution.hand_out(member, 1 << 20, in_order=True) == []
        assert member.group.renew(0, 0, first.generation, 0.0)
        member.group.tick(broker.shared_groups.now())
        assert told(member.group.distribution.hand_out(member, 1 << 20, in_order=True)) == [
            "0:0:a",
            "0:1:b",  # it was settled before a, which comes again
            "0:2:c",
            "0:3:d",
        ]


async def test_all_messages_of_one_hand_out_get_one_generation_that_is_newer_than_their_last() -> None:
    clock = ManualClock()
    async with broker_in_memory(clock=clock) as broker:
        broker.topics.ensure("t", 1)
        member = join(broker, credit=1)
        publish(broker, "t", 0, b"a", b"b")
        (first,) = member.group.distribution.hand_out(member, 1 << 20)
        later = member.group.renew(0, 0, first.generation, 0.0)
        assert later > first.generation
        member.group.tick(broker.shared_groups.now())
        clock.ms -= 5000
        member.credit = 5
        found = member.group.distribution.hand_out(member, 1 << 20)
        assert told(found) == ["0:0:a", "0:1:b"]
        assert {delivery.generation for delivery in found} == {later + 1}
        assert not member.group.ack(0, 0, later)
        assert all(member.group.ack(0, offset, later + 1) for offset in (0, 1))


async def test_a_message_that_stays_leased_does_not_stop_its_queue() -> None:
    async with broker_in_memory(delivery=DeliveryConfig(lease_window=200)) as broker:
        broker.topics.ensure("t", 1)
        member = join(broker, credit=1 << 20)
        publish(broker, "t", 0, b"stuck")
        (stuck,) = member.collect(1 << 20)
        for number in range(1000):
            publish(broker, "t", 0, b"%d" % number)
            (found,) = member.collect(1 << 20)
            assert member.group.ack(0, found.first, found.generation)
        assert committed(broker) == 0
        assert broker.shared_groups.unsettled < 200
        assert member.group.ack(0, 0, stuck.generation)
        broker.store.committer.commit()
        assert (committed(broker), broker.shared_groups.unsettled) == (1001, 0)


async def test_a_group_that_changes_its_selection_looks_at_what_came_before() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one = Competitor(broker, selection=select_tags(["A"]))
        assert one.turn() == []
        publish(broker, "t", 0, b"b", properties=b"TAGS\x01B\x02")
        shared_group = one.member.group
        shared_group.source.select(EVERYTHING)
        assert shared_group.distribution.is_ready()
        assert told(shared_group.distribution.hand_out(one.member, 1 << 20)) == ["0:0:b"]
