"""Forgets shared subscriptions that no session has any more.

The state of a group, which messages its members have had, outlives its members: those that are only offline have
sessions with the filter, and the group collects messages for them. When no session has it any longer, the group is kept
for ``shared_expiry_s``, for members that subscribe again. Then its state is dropped, and who subscribes later starts
with new messages. Nothing about this is stored: after a restart the time starts again.
"""

from typing import Final, final

import trio

from martlet.steps import Pace, Steps

from .context import PROTOCOL, Context
from .names import split_shared
from .shares import POLICY, group_of

__all__ = ["UnusedGroups"]

SWEEP_S: Final = 60.0


@final
class UnusedGroups:
    """Looks for unused groups now and then."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # When a group was first seen without a session, by name.
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
        used = yield from self._used()
        known = context.broker.shares.groups_of(PROTOCOL)
        # Those that somebody joined since the sweep began may have been missed.
        unused = known - used - context.shared_lately
        self._since = {group: self._since.get(group, now) for group in unused}
        over = {group for group, since in self._since.items() if now - since >= context.config.shared_expiry_s}
        if over:
            context.broker.shares.forget_groups(POLICY, over)
            for group in over:
                del self._since[group]

    def _used(self) -> Steps[set[str]]:
        """Return the groups that a session has, connected or not."""
        table, pace, used = self._context.broker.sessions.table, Pace(), set[str]()
        prefix = f"{PROTOCOL} "
        for key in table:
            state = table.get(key) if key.startswith(prefix) else None
            if state is not None:
                used.update(group_of(shared) for each in state.filters if (shared := split_shared(each)) is not None)
            if pace.is_over():
                yield
        for handler in list(self._context.clients.values()):
            used.update(group_of(shared) for each in handler.filters if (shared := split_shared(each)) is not None)
            if pace.is_over():
                yield
        return used
