"""Credit is how many more messages a member may hold; a message that it no longer holds gives its credit back."""

from collections.abc import Callable

import pytest
from tests.delivery.pushing import LINES, broker_in_memory, publish, told
from tests.groups.test_shared_groups import Competitor
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.broker import Broker
from martlet.delivery.subscriptions import from_earliest
from martlet.groups.membership import Membership
from martlet.groups.strategy.policy import GroupPolicy
from martlet.records.layout import RecordView
from martlet.testing.peers import RecordingPeer

BODIES = [b"%d" % number for number in range(6)]


async def test_a_reset_gives_back_the_credit_of_what_was_held() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one = Competitor(broker, credit=4)
        publish(broker, "t", 0, *BODIES)
        assert len(one.turn()) == 4
        broker.groups.offsets.reset("G", "t", {0: 0})
        assert one.member.ack(0, 0)
        came = one.turn() + one.turn()
        assert came == ["0:0:0", "0:1:1", "0:2:2", "0:3:3"]
        assert all(one.member.ack(0, offset) for offset in range(4))
        assert one.turn() == ["0:4:4", "0:5:5"]
        assert one.member.credit == 2
        assert one.member.ack(0, 5)
        assert one.member.credit == 3


@pytest.mark.parametrize("takes", [None, lambda record: True], ids=["plain", "choosing"])
async def test_a_member_that_acknowledges_nothing_collects_its_credit_at_a_time(
    takes: Callable[[RecordView], bool] | None,
) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 4)
        membership = Membership(lease_s=0, credit=2, start=from_earliest, takes=takes)
        member = broker.shared_groups.join(RecordingPeer(), "t", "G", LINES, membership, GroupPolicy("test"))
        for queue_id in range(4):
            publish(broker, "t", queue_id, *BODIES[:2])
        sizes = [len(told(member.collect(1 << 20))) for _ in range(5)]
        assert sizes == [2, 2, 2, 2, 0]
        assert member.credit == 2


async def late(broker: Broker, clock: MockClock) -> Competitor:
    """A member whose two messages were taken back."""
    broker.topics.ensure("t", 1)
    one = Competitor(broker, credit=2, lease_s=10)
    publish(broker, "t", 0, *BODIES[:2])
    assert len(one.turn()) == 2
    clock.jump(11)
    await wait_all_tasks_blocked()
    return one


async def test_a_late_member_gets_messages_again_once_it_acts(mock_clock: MockClock) -> None:
    async with broker_in_memory() as broker:
        one = await late(broker, mock_clock)
        assert one.turn() == []  # it may be dead: another shall have them
        assert not one.member.ack(0, 0)
        assert one.member.credit == 2
        assert one.turn() == ["0:0:0", "0:1:1"]
        assert one.deliveries == [2, 2]
        assert one.member.ack(0, 0)
        assert one.member.credit == 1


async def test_a_message_that_another_member_has_by_now_stays_with_it(mock_clock: MockClock) -> None:
    async with broker_in_memory() as broker:
        one = await late(broker, mock_clock)
        two = Competitor(broker)
        assert two.turn() == ["0:0:0", "0:1:1"]
        assert not one.member.nack(0, 1)
        assert one.turn() == []
        assert one.member.credit == 2
        publish(broker, "t", 0, b"x")
        assert one.turn() + two.turn() == ["0:2:x"]
