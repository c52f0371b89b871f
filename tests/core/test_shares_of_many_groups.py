"""Many shared groups: what happens in one of them costs the same, however many others there are."""

import sys
from types import FrameType
from typing import Self

import pytest
from tests.core.pushing import LINES, publish, told
from tests.core.test_shares import Competitor, broker_in_memory
from trio.lowlevel import checkpoint
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.broker import Broker
from martlet.delivery.group_members import Member
from martlet.delivery.group_notes import DROPS_A_TURN
from martlet.delivery.group_policy import GroupPolicy
from martlet.delivery.subscriptions import from_earliest
from martlet.steps import finish_now
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import RecordingPeer


class Calls:
    """Counts the calls of functions of the broker's delivery in its block."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *args: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event == "call" and "/martlet/delivery/" in frame.f_code.co_filename


def noted(broker: Broker) -> int:
    """How many lanes have something to note with the next commit."""
    return len(broker.shares.notes._pending)


@pytest.mark.parametrize("how", ["topic deleted", "forgotten", "restart"])
async def test_very_many_groups_go_in_turns_and_come_back_with_new_messages_at_once(how: str) -> None:
    policy, disk, groups = GroupPolicy("tested"), FakeDisk(), DROPS_A_TURN // 8 + 20
    disk.cached = True

    def join(broker: Broker, number: int) -> Member:
        return broker.shares.join(
            RecordingPeer(), "t", f"g{number}", LINES, lease_s=30, credit=9, start=from_earliest, policy=policy
        )

    async with broker_in_memory(disk) as broker:
        broker.topics.ensure("t", 8)
        publish(broker, "t", 7, b"old", b"older")
        for number in range(groups):
            member = join(broker, number)
            member.collect(1 << 20)
            assert member.ack(7, 0)
            member.leave()
        broker.store.commit()
        assert len(broker.shares.state) == groups * 8
        if how == "restart":
            broker.topics.delete("t")
    async with broker_in_memory(disk) as broker:
        if how == "forgotten":
            finish_now(broker.shares.forget_groups(policy, [f"g{number}" for number in range(groups)]))
        elif how == "topic deleted":
            broker.topics.delete("t")
        await checkpoint()
        assert noted(broker) <= 2 * DROPS_A_TURN
        assert list(broker.shares.groups_of("tested")) == []
        broker.topics.ensure("t", 8)
        member = join(broker, groups - 1)
        publish(broker, "t", 7, b"new")
        came = told(member.collect(1 << 20))
        assert came == (["7:0:old", "7:1:older", "7:2:new"] if how == "forgotten" else ["7:0:new"])
        await wait_all_tasks_blocked()
        broker.store.commit()
        assert len(broker.shares.state) == 8
        assert not broker.shares.notes.has_undropped


async def calls_of_a_return(groups: int) -> int:
    """Return how many functions are called when a message is given back, and again when a member leaves."""
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        members = [Competitor(broker, group=f"G{number}", credit=1) for number in range(groups)]
        publish(broker, "t", 0, b"a")
        one = members[groups // 2]
        assert one.turn() == ["0:0:a"]
        await wait_all_tasks_blocked()
        with Calls() as calls:
            assert one.member.nack(0, 0)
            one.member.leave()
            await wait_all_tasks_blocked()
        return calls.count


@pytest.mark.plain
async def test_a_message_that_is_given_back_costs_the_same_beside_many_groups(autojump_clock: MockClock) -> None:
    assert 0 < await calls_of_a_return(300) <= await calls_of_a_return(3) + 10
