"""The search for unused shared subscriptions: groups whose filter is in no session.

The state of a group, the messages that its members have settled, outlives its members: members that are only offline
have sessions with the filter, and the group collects messages for them. Once no session has the filter, the group is
kept for ``shared_expiry_s``, for members that subscribe again. Then its state is dropped, and a later subscriber starts
with new messages. The times are not stored: they start again after a restart.
"""

from collections.abc import Iterable, Iterator
from typing import Final, final

import trio

from martlet.runtime.steps import Budget, Steps
from martlet_mqtt.outbound.shares import POLICY, group_of
from martlet_mqtt.shared.context import PROTOCOL, Context
from martlet_mqtt.wire.names import split_shared

__all__ = ["UnusedGroupSearch"]

SWEEP_S: Final = 60.0


@final
class UnusedGroupSearch:
    """Searches for unused groups every `SWEEP_S`, and forgets them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # By group, the time when a sweep first found it in no session.
        self._since: dict[str, float] = {}

    async def run(self) -> None:
        """Forget unused groups, until cancelled."""
        while True:
            await trio.sleep(SWEEP_S)
            await self._context.broker.turns.finish(self._sweep())

    def _sweep(self) -> Steps[None]:
        context, now = self._context, trio.current_time()
        for group in context.shared_lately:
            self._since.pop(group, None)
        context.shared_lately.clear()
        used, before = (yield from self._used()), self._since
        self._since = {}
        over: dict[str, None] = {}
        budget = Budget()
        for group in context.broker.shared_groups.groups_of(PROTOCOL):
            # `used` may lack a group that a client joined since the sweep began.
            if group not in used and group not in context.shared_lately:
                since = self._since[group] = before.get(group, now)
                # Only after two sweeps: the session of a new member may not be known yet.
                if group in before and now - since >= context.config.shared_expiry_s:
                    over[group] = None
            if budget.is_over():
                yield
        yield from context.broker.shared_groups.forget_groups(POLICY, (each for each in over if self._is_unused(each)))

    def _is_unused(self, group: str) -> bool:
        """Return whether no client has joined *group* since the sweep began."""
        del self._since[group]
        return group not in self._context.shared_lately

    def _used(self) -> Steps[set[str]]:
        """Return the groups whose filter is in any session, connected or not; in slices."""
        table, budget, used = self._context.broker.sessions.table, Budget(), set[str]()
        prefix = f"{PROTOCOL} "
        for key in table:
            state = table.get(key) if key.startswith(prefix) else None
            if state is not None:
                used.update(_groups_in(state.filters))
            if budget.is_over(1 + len(state.filters) if state is not None else 1):
                yield
        for client in list(self._context.clients.values()):
            used.update(_groups_in(client.filters))
            if budget.is_over(1 + len(client.filters)):
                yield
        return used


def _groups_in(filters: Iterable[str]) -> Iterator[str]:
    """Yield the groups of the shared subscriptions among *filters*."""
    for each in filters:
        shared = split_shared(each)
        if shared is not None:
            yield group_of(shared)
