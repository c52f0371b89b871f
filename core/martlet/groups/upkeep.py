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
        self._due: dict[GroupContext, None] = {}  # groups to check in this turn or the next ones, the first one first
        self._alarms: Alarms[GroupContext] = Alarms()
        self._to_wake: deque[SharedGroup] = deque()  # groups to wake: there is room for more unsettled messages
        self._closing: deque[GroupQueue] = deque()  # queues of groups that ended
        self._reach_at = math.inf  # time of the next check of positions, and the groups not checked yet
        self._to_reach: list[SharedGroup] = []
        self._look_at = math.inf  # time of the next check whether dropped queues are stored
        self._log_moved = False
        self._rung = trio.Event()
        owner.store.readable_end.on_moved.append(self._flushed)

    def alarm(self, context: GroupContext, at: float) -> None:
        """Check the group of *context* no later than *at*."""
        if at == -math.inf:
            self._due[context] = None
            self._rung.set()
        elif self._alarms.ring_by(context, at):
            self._rung.set()

    def cancel(self, context: GroupContext) -> None:
        """Stop checking the group of *context*."""
        self._alarms.cancel(context)

    def watch_reach(self) -> None:
        """Check positions from time to time: a group finds its messages by names."""
        self._reach_at = min(self._reach_at, self._owner.now() + REACH_S)
        self._rung.set()

    def close(self, shared_group: SharedGroup) -> None:
        """Close a group whose state is dropped; its queues follow in the next turns."""
        self._closing.extend(shared_group.end())
        self._rung.set()

    def look_at_dropped(self) -> None:
        """Check soon whether the notes about dropped queues were stored; a failed commit loses them."""
        if self._owner.notes.is_dropping:
            self._look_at = min(self._look_at, self._owner.now() + STORED_S)
            self._rung.set()

    def wake_all(self) -> None:
        """Wake the groups, which may have waited for room; some now, the others in the next turns."""
        self._to_wake = deque(self._groups.by_place.values())
        self._wake_some()

    def _wake_some(self) -> None:
        for _ in range(min(len(self._to_wake), GROUPS_A_TURN)):
            self._to_wake.popleft().wake()
        if self._to_wake:
            self._rung.set()

    def _flushed(self) -> None:
        if self._owner.dead_letters.unflushed:
            self._log_moved = True
            self._rung.set()

    def _settle_flushed(self) -> None:
        self._log_moved = False
        for queue in list(self._owner.dead_letters.unflushed):
            self._owner.dead_letters.settle_flushed(queue)
            self._owner.forget_idle(queue.context)

    async def run(self) -> None:
        """Handle groups that are due, until cancelled."""
        dead_letters = self._owner.dead_letters
        while True:
            if not (self._has_work or self._log_moved or dead_letters.far):
                with trio.move_on_at(min(self._alarms.next_at, self._look_at, self._reach_at)):
                    await self._rung.wait()
            self._rung = trio.Event()
            if self._log_moved:
                self._settle_flushed()
            now = self._owner.now()
            self._due.update(dict.fromkeys([context for _, context in self._alarms.take(now)]))
            if self._has_work or min(self._look_at, self._reach_at) <= now:
                self.tick(now)
                await trio.lowlevel.checkpoint()
            await dead_letters.store_far()

    @property
    def _has_work(self) -> bool:
        """Whether there is work for this turn."""
        has_undropped = self._owner.notes.has_undropped
        return bool(self._due or self._closing or self._to_wake or self._to_reach or has_undropped)

    def tick(self, now: float) -> None:
        """Do one turn's share of the due work."""
        self._look_at_due(now)
        for _ in range(min(QUEUES_CLOSED_A_TURN, len(self._closing))):
            self._closing.popleft().close()
        self._wake_some()
        self._owner.notes.drop_some()
        self._reach(now)
        if self._look_at <= now:
            self._look_at = math.inf
            self._owner.notes.try_again()
            self.look_at_dropped()

    def _look_at_due(self, now: float) -> None:
        """Check due groups: a limited number of groups, and of their leases."""
        left = LAPSED_A_TURN
        for context in list(islice(self._due, GROUPS_A_TURN)):
            if left <= 0:
                break
            del self._due[context]
            shared_group = self._groups.of(context)
            if shared_group is not None:
                left = shared_group.tick(now, left)
                self._owner.forget_idle(context)
            if shared_group is not None and self._groups.of(context) is shared_group:
                self.alarm(context, shared_group.deadline())

    def _reach(self, now: float) -> None:
        """Note the positions of groups that find messages by names."""
        notes = self._owner.notes
        if self._reach_at <= now:
            notes.note_reached()
            self._to_reach = [each for each in self._groups.by_place.values() if each.source.finder is not None]
            self._reach_at = now + REACH_S if self._to_reach or notes.has_reached else math.inf
        for shared_group in self._to_reach[-GROUPS_A_TURN:]:
            if self._groups.of(shared_group.context) is shared_group:
                shared_group.source.reach()
        del self._to_reach[-GROUPS_A_TURN:]
