"""What is left in memory of a group that nobody uses: nothing, even before a garbage collection."""

import gc

import pytest
import trio
from tests.delivery.pushing import LINES, publish, told
from tests.groups.test_shared_groups import broker_in_memory
from trio.testing import MockClock

from martlet.delivery.subscriptions import from_earliest
from martlet.groups.group import SharedGroup
from martlet.groups.leases.table import LeaseTable
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.groups.queues.finder import MessageSelection
from martlet.groups.queues.group_queue import GroupQueue
from martlet.groups.strategy.policy import GroupPolicy
from martlet.testing.peers import RecordingPeer


def left() -> list[str]:
    """Return the types of the objects of groups."""
    kinds = SharedGroup, GroupQueue, LeaseTable, Member
    return [type(each).__name__ for each in gc.get_objects() if isinstance(each, kinds)]


@pytest.mark.parametrize("kind", ["consumer group", "of a protocol", "by names"])
async def test_a_group_leaves_nothing_once_its_members_have_left(
    kind: str, no_collection: None, autojump_clock: MockClock
) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 2)
        before = len(left())
        policy = None if kind == "consumer group" else GroupPolicy("tested")
        names = MessageSelection(broker.cursors.open(["t"]), "#") if kind == "by names" else None
        member = broker.shared_groups.join(
            RecordingPeer(), "t", "G", LINES, Membership(lease_s=30, credit=9, start=from_earliest, names=names), policy
        )
        publish(broker, "t", 0, b"a", b"b")
        await trio.sleep(1)
        assert told(member.collect(1 << 20)) == ["0:0:a", "0:1:b"]
        assert member.ack(0, 0)
        assert member.nack(0, 1)
        await trio.sleep(1)
        assert told(member.collect(1 << 20)) == ["0:1:b"]
        assert member.ack(0, 1)
        broker.store.committer.commit()
        assert len(left()) > before
        member.leave()
        del member
        await trio.sleep(10)
        assert broker.shared_groups.statistics()["shares"] == 0
        assert left()[before:] == []
