"""Descriptions of shared groups for administrators."""

from collections.abc import Iterator
from typing import final

from msgspec import Struct

from martlet.groups.shared_groups import SharedGroups
from martlet.groups.strategy.policy import AUTO_DELETE, OWNS_TOPIC

__all__ = ["GroupOnTopic", "describe", "describe_all"]


@final
class GroupOnTopic(Struct):
    """One shared group on one topic.

    Attributes:
      topic: its name.
      group: its name, unique in its scope.
      members: the number of members.
      unsettled: the number of messages that members hold, or that wait for their next delivery.
      waiting: the number of messages never delivered; None if the group finds messages by their names, so that
        nobody knows.
      auto_delete: whether the group is deleted with its last member.
      owns_topic: whether the topic was created for the group.
      unused_s: seconds without members; None if it has members, or if groups like it are never forgotten.
    """

    topic: str
    group: str
    members: int
    unsettled: int
    waiting: int | None
    auto_delete: bool
    owns_topic: bool
    unused_s: float | None


def describe(shared_groups: SharedGroups, scope: str, group: str, topic: str) -> GroupOnTopic | None:
    """Return the description of a group on *topic*; None if it never consumed it."""
    if not shared_groups.state.known.count_of(scope, group, topic):
        return None
    shared_group, since = (
        shared_groups.in_memory.get(topic, group, scope),
        shared_groups.unused.since((topic, group, scope)),
    )
    marks, unsettled, by_name, next_offsets = 0, 0, False, dict[int, int]()
    if shared_group is not None:
        marks, by_name = shared_group.context.marks, shared_group.source.finder is not None
        for queue_id, open_queue in shared_group.queues.by_queue.items():
            unsettled += open_queue.leases.table.size
            next_offsets[queue_id] = open_queue.leases.table.next
    for key in shared_groups.state.known.of(scope, group, topic):
        queue = shared_groups.notes.stored(key)
        if queue is not None and key.queue_id not in next_offsets:
            unsettled += len(queue.leases)
            next_offsets[key.queue_id] = queue.next
            if shared_group is None and not key.queue_id:
                marks, by_name = queue.marks, queue.reached >= 0
    waiting = sum(
        max(queue.next_offset - max(next_offsets.get(queue_id, 0), queue.first_offset), 0)
        for queue_id, queue in shared_groups.store.queues.topics.get(topic, {}).items()
    )
    return GroupOnTopic(
        topic,
        group,
        len(shared_group) if shared_group is not None else 0,
        unsettled,
        None if by_name else waiting,
        bool(marks & AUTO_DELETE),
        bool(marks & OWNS_TOPIC),
        round(shared_groups.now() - since, 1) if since is not None else None,
    )


def describe_all(shared_groups: SharedGroups, scope: str) -> Iterator[GroupOnTopic]:
    """Yield the groups of *scope*, once for each topic; tolerates changes in the meantime."""
    known = shared_groups.state.known
    for group_scope, group in known.names():
        for topic in known.topics_of(group_scope, group) if group_scope == scope else ():
            description = describe(shared_groups, scope, group, topic)
            if description is not None:
                yield description
