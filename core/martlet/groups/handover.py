"""Takes over leases that another broker handed out, such as RocketMQ, as leases of a consumer group."""

from collections.abc import Mapping

from martlet.groups.journal.journal_codec import Key, LeaseState
from martlet.groups.queues.group_context import Owner
from martlet.store import Queue

__all__ = ["take_over"]


def take_over(owner: Owner, topic: str, group: str, queue_id: int, leases: Mapping[int, LeaseState], room: int) -> int:
    """Lease messages that another broker handed out, below the committed offset of *group*; return their number.

    The committed offset becomes the offset of the first of them. If they are more than *room*, nothing is leased, and
    all messages from the first one on are delivered again. Removed messages are left out, and so are messages of a
    topic, queue or group that does not exist. The group must not be in memory.
    """
    known_topic = owner.topics.get(topic)
    if known_topic is None or not known_topic.has_readable(queue_id) or owner.groups.get(group) is None:
        return 0
    queue, key = known_topic.queue(queue_id), Key("", group, topic, queue_id)
    committed = min(owner.groups.offsets.get(group, topic, queue_id), queue.next_offset)
    existing = {offset: lease for offset, lease in leases.items() if queue.first_offset <= offset < queue.next_offset}
    if committed >= 0:
        existing = {offset: lease for offset, lease in existing.items() if offset < committed}
    if not existing:
        return 0
    owner.groups.offsets.commit(group, topic, queue_id, min(existing))
    if committed < 0 or len(existing) > room:
        owner.notes.begin(key, min(existing))
        return 0
    _replace_leases(owner, key, committed, existing, queue)
    return len(existing)


def _replace_leases(owner: Owner, key: Key, committed: int, leases: Mapping[int, LeaseState], queue: Queue) -> None:
    """Replace the stored state below *committed*; the stored state of later messages is still right."""
    stored = owner.notes.stored(key)
    if stored is not None and stored.next <= queue.next_offset:
        later = {offset: lease for offset, lease in stored.leases.items() if offset >= committed}
        leases, committed = {**leases, **later}, max(committed, stored.next)
    owner.notes.begin_with(key, committed, leases)
