"""Removes disconnected clients from their groups, a limited number of memberships in each turn of the event loop."""

from collections import deque
from collections.abc import Iterable
from typing import Final, final

import trio

from martlet.groups.member import Member
from martlet.runtime.steps import Budget, Steps, per_slice
from martlet.runtime.turns import Turns

__all__ = ["Leaving"]

# Cost of the end of a membership: 3 to 10 us, because its messages go to other members.
LEAVE_US: Final = 8.0
LEAVES_A_SLICE: Final = per_slice(LEAVE_US)


@final
class Leaving:
    """Members that leave in the next turns; they get no more messages."""

    def __init__(self) -> None:
        self._members: deque[Member] = deque()
        self._work = trio.Event()

    def leave(self, members: Iterable[Member]) -> None:
        """Remove *members*, the first ones at once."""
        leaving = list(members)
        for member in leaving:
            member.credit = 0
        for member in leaving[:LEAVES_A_SLICE]:
            member.leave()
        self._members.extend(leaving[LEAVES_A_SLICE:])
        if self._members:
            self._work.set()

    async def run(self, turns: Turns) -> None:
        """Remove the others, until cancelled."""
        while True:
            await self._work.wait()
            self._work = trio.Event()
            await turns.finish(self._leave())

    def _leave(self) -> Steps[None]:
        budget = Budget(LEAVE_US)
        while self._members:
            self._members.popleft().leave()
            if budget.is_over():
                yield
