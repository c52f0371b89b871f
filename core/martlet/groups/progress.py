"""The progress of shared groups, in memory or not, for draining and descriptions."""

from typing import final

from martlet.groups.in_memory import GroupsInMemory
from martlet.groups.journal.journal_codec import Key
from martlet.groups.journal.journal_writer import GroupJournalWriter
from martlet.groups.journal.state import GroupState
from martlet.store import Queue

__all__ = ["GroupProgress"]


@final
class GroupProgress:
    """The progress of each group, from its queues in memory or from its stored state."""

    def __init__(self, state: GroupState, notes: GroupJournalWriter, in_memory: GroupsInMemory) -> None:
        self._state = state
        self._notes = notes
        self._in_memory = in_memory

    def groups_on(self, topic: str) -> list[tuple[str, str]]:
        """Return scope and name of each group that is not a consumer group and has a state on *topic*."""
        return [each for each in self._state.known.groups(topic) if each[0]]

    def low_of(self, scope: str, group: str, store_queue: Queue) -> int | None:
        """Return the offset in *store_queue* before which all messages are settled.

        None if the group finds its messages by their names, and no message of this queue is unsettled: see
        `reached_by`.
        """
        topic, queue_id = store_queue.topic, store_queue.queue_id
        shared_group, known = (
            self._in_memory.get(topic, group, scope),
            self._notes.stored(Key(scope, group, topic, queue_id)),
        )
        queue = shared_group.queues.by_queue.get(queue_id) if shared_group is not None else None
        by_name, has_unsettled = self.reached_by(scope, group, topic) >= 0, False
        low = store_queue.first_offset
        if queue is not None:
            low, has_unsettled = queue.leases.table.low, queue.leases.table.size > 0
        elif known is not None:
            low, has_unsettled = known.low, bool(known.leases)
        return None if by_name and not has_unsettled else low

    def reached_by(self, scope: str, group: str, topic: str) -> int:
        """Return the log position before which a group has found everything by names; -1 if it reads its queues."""
        shared_group, known = self._in_memory.get(topic, group, scope), self._notes.stored(Key(scope, group, topic, 0))
        reached = shared_group.source.reached if shared_group is not None else -1
        return max(reached, known.reached if known is not None else -1)
