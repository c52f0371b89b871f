"""Many shared groups: what happens in one of them costs the same, however many others there are."""

import sys
from types import FrameType
from typing import Self

import pytest
from tests.core.pushing import publish
from tests.core.test_shares import Competitor, broker_in_memory
from trio.testing import MockClock, wait_all_tasks_blocked


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
