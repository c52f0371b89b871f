"""Descriptions of shared groups for administrators."""

from collections.abc import Iterator
from typing import final

from msgspec import Struct

from martlet.groups.shared_groups import Shares
from martlet.groups.strategy.policy import AUTO_DELETE, OWNS_TOPIC

__all__ = ["GroupOnTopic", "describe", "describe_all"]


@final
class GroupOnTopic(Struct):
    """One shared group on one topic.

    Attributes:
      topic: its name.
      group: its name, unique in its scope.
      members: how many there are.
      unsettled: messages that members hold, or that wait for their next delivery.
      waiting: messages that were never delivered; None if the group finds them by their names, so that nobody knows.
      auto_delete: whether the group goes with its last member.
      owns_topic: whether the topic was created for the group.
      unused_s: how long it has had no members; None if it has, or if groups like it are never forgotten.
    """

    topic: str
    group: str
    members: int
    unsettled: int
    waiting: int | None
    auto_delete: bool
    owns_topic: bool
    unused_s: float | None


def describe(shares: Shares, scope: str, group: str, topic: str) -> GroupOnTopic | None:
    """Return what is known of a group on *topic*; None if it never consumed it."""
    if not shares.state.known.count_of(scope, group, topic):
        return None
    share, since = shares.open_share((topic, group, scope)), shares.unused.since((topic, group, scope))
    marks, unsettled, by_name, next_offsets = 0, 0, False, dict[int, int]()
    if share is not None:
        marks, by_name = share.context.marks, share.source.finder is not None
        for queue_id, open_lane in share.lanes.by_queue.items():
            unsettled += open_lane.leases.table.size
            next_offsets[queue_id] = open_lane.leases.table.next
    for key in shares.state.known.of(scope, group, topic):
        lane = shares.notes.stored(key)
        if lane is not None and key.queue_id not in next_offsets:
            unsettled += len(lane.leases)
            next_offsets[key.queue_id] = lane.next
            if share is None and not key.queue_id:
                marks, by_name = lane.marks, lane.reached >= 0
    waiting = sum(
        max(queue.next_offset - max(next_offsets.get(queue_id, 0), queue.first_offset), 0)
        for queue_id, queue in shares.store.queues.topics.get(topic, {}).items()
    )
    return GroupOnTopic(
        topic,
        group,
        len(share) if share is not None else 0,
        unsettled,
        None if by_name else waiting,
        bool(marks & AUTO_DELETE),
        bool(marks & OWNS_TOPIC),
        round(shares.now() - since, 1) if since is not None else None,
    )


def describe_all(shares: Shares, scope: str) -> Iterator[GroupOnTopic]:
    """Yield the groups of *scope*, once for each topic; tolerates changes in the meantime."""
    known = shares.state.known
    for of, group in known.names():
        for topic in known.topics_of(of, group) if of == scope else ():
            found = describe(shares, scope, group, topic)
            if found is not None:
                yield found
