"""Timed work of shared groups: ends of leases, dead letters, and cleaning up after groups that ended.

A turn of the event loop handles a limited number of groups, of their leases and of their queues.
"""

import math
from collections import deque
from itertools import islice
from typing import Final, Protocol, final

import trio

from martlet.groups.group import LAPSED_A_TURN, STORED_S, SharedGroup
from martlet.groups.handing_out.dead_letters import DeadLetters
from martlet.groups.in_memory import GroupsInMemory
from martlet.groups.queues.group_context import GroupContext, Owner
from martlet.groups.queues.group_queue import GroupQueue
from martlet.runtime.alarms import Alarms
from martlet.runtime.steps import per_slice

__all__ = ["Upkeep"]

# Groups checked in one turn of the event loop.
GROUPS_A_TURN: Final = per_slice(us=10)
# Seconds between two checks of the positions of groups that find messages by names.
REACH_S: Final = 10.0
# Queues of ended groups closed in one turn.
QUEUES_CLOSED_A_TURN: Final = per_slice(us=3)


class _Owner(Owner, Protocol):
    """The methods of `SharedGroups` that this module uses."""

    in_memory: GroupsInMemory
    dead_letters: DeadLetters

    def forget_idle(self, context: GroupContext) -> None: ...


@final
class Upkeep:
    """Handles groups when they are due, while `run` is running."""

    def __init__(self, owner: _Owner) -> None:
        self._owner = owner
        self._groups = owner.in_memory
        self._groups_due: dict[GroupContext, None] = {}  # groups to check in this turn or the next ones, in order
        self._alarms: Alarms[GroupContext] = Alarms()
        self._to_wake: deque[SharedGroup] = deque()  # groups to wake: there is room for more unsettled messages
        self._queues_to_close: deque[GroupQueue] = deque()  # queues of groups that ended
        self._check_positions_at = math.inf  # time of the next check of positions, and the groups not checked yet
        self._positions_to_check: list[SharedGroup] = []
        self._check_dropped_at = math.inf  # time of the next check whether dropped queues are stored
        self._log_moved = False
        self._is_storing_far = False  # whether a task stores dead letters of messages far behind the tail
        self._work = trio.Event()
        owner.store.readable_end.on_moved.append(self._note_flushed)

    def alarm(self, context: GroupContext, at: float) -> None:
        """Check the group of *context* no later than *at*."""
        if at == -math.inf:
            self._groups_due[context] = None
            self._work.set()
        elif self._alarms.ring_by(context, at):
            self._work.set()

    def cancel(self, context: GroupContext) -> None:
        """Stop checking the group of *context*."""
        self._alarms.cancel(context)

    def watch_reach(self) -> None:
        """Check positions from time to time: a group finds its messages by names."""
        self._check_positions_at = min(self._check_positions_at, self._owner.now() + REACH_S)
        self._work.set()

    def close(self, shared_group: SharedGroup) -> None:
        """Close a group whose state is dropped; its queues follow in the next turns."""
        self._queues_to_close.extend(shared_group.end())
        self._work.set()

    def look_at_dropped(self) -> None:
        """Check soon whether the notes about dropped queues were stored; a failed commit loses them."""
        if self._owner.notes.is_dropping:
            self._check_dropped_at = min(self._check_dropped_at, self._owner.now() + STORED_S)
            self._work.set()

    def wake_all(self) -> None:
        """Wake the groups, which may have waited for room; some now, the others in the next turns."""
        self._to_wake = deque(self._groups.by_place.values())
        self._wake_some()

    def _wake_some(self) -> None:
        for _ in range(min(len(self._to_wake), GROUPS_A_TURN)):
            self._to_wake.popleft().wake()
        if self._to_wake:
            self._work.set()

    def _note_flushed(self) -> None:
        if self._owner.dead_letters.unflushed:
            self._log_moved = True
            self._work.set()

    def _settle_flushed(self) -> None:
        self._log_moved = False
        for queue in list(self._owner.dead_letters.unflushed):
            self._owner.dead_letters.settle_flushed(queue)
            self._owner.forget_idle(queue.context)

    async def run(self) -> None:
        """Handle groups that are due, until cancelled."""
        async with trio.open_nursery() as nursery:
            await self._handle_due(nursery)

    async def _handle_due(self, nursery: trio.Nursery) -> None:
        """Handle groups that are due, until cancelled; dead messages are read in a task of *nursery*."""
        dead_letters = self._owner.dead_letters
        while True:
            if not (self._has_work or self._log_moved):
                with trio.move_on_at(min(self._alarms.next_at, self._check_dropped_at, self._check_positions_at)):
                    await self._work.wait()
            self._work = trio.Event()
            if self._log_moved:
                self._settle_flushed()
            now = self._owner.now()
            self._groups_due.update(dict.fromkeys([context for _, context in self._alarms.take(now)]))
            if self._has_work or min(self._check_dropped_at, self._check_positions_at) <= now:
                self.tick(now)
                await trio.lowlevel.checkpoint()
            if dead_letters.far and not self._is_storing_far:
                self._is_storing_far = True
                nursery.start_soon(self._store_far)

    async def _store_far(self) -> None:
        """Store the dead letters of messages that a thread or the cold tier reads."""
        dead_letters = self._owner.dead_letters
        try:
            while dead_letters.far:
                await dead_letters.store_far()
                await trio.lowlevel.checkpoint()
        finally:
            self._is_storing_far = False

    @property
    def _has_work(self) -> bool:
        """Whether there is work for this turn."""
        has_undropped = self._owner.notes.has_undropped
        return bool(
            self._groups_due or self._queues_to_close or self._to_wake or self._positions_to_check or has_undropped
        )

    def tick(self, now: float) -> None:
        """Do one turn's share of the due work."""
        self._check_due(now)
        for _ in range(min(QUEUES_CLOSED_A_TURN, len(self._queues_to_close))):
            self._queues_to_close.popleft().close()
        self._wake_some()
        self._owner.notes.drop_some()
        self._note_positions(now)
        if self._check_dropped_at <= now:
            self._check_dropped_at = math.inf
            self._owner.notes.try_again()
            self.look_at_dropped()

    def _check_due(self, now: float) -> None:
        """Check due groups: a limited number of groups, and of their leases."""
        left = LAPSED_A_TURN
        for context in list(islice(self._groups_due, GROUPS_A_TURN)):
            if left <= 0:
                break
            del self._groups_due[context]
            shared_group = self._groups.of(context)
            if shared_group is not None:
                left = shared_group.tick(now, left)
                self._owner.forget_idle(context)
            if shared_group is not None and self._groups.of(context) is shared_group:
                self.alarm(context, shared_group.deadline())

    def _note_positions(self, now: float) -> None:
        """Note the positions of groups that find messages by names."""
        notes = self._owner.notes
        if self._check_positions_at <= now:
            notes.note_reached()
            self._positions_to_check = [
                each for each in self._groups.by_place.values() if each.source.finder is not None
            ]
            self._check_positions_at = now + REACH_S if self._positions_to_check or notes.has_reached else math.inf
        for shared_group in self._positions_to_check[-GROUPS_A_TURN:]:
            if self._groups.of(shared_group.context) is shared_group:
                shared_group.source.reach()
        del self._positions_to_check[-GROUPS_A_TURN:]
