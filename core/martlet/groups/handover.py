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
    known = {offset: lease for offset, lease in leases.items() if queue.first_offset <= offset < queue.next_offset}
    if committed >= 0:
        known = {offset: lease for offset, lease in known.items() if offset < committed}
    if not known:
        return 0
    owner.groups.offsets.commit(group, topic, queue_id, min(known))
    if committed < 0 or len(known) > room:
        owner.notes.begin(key, min(known))
        return 0
    _take_over(owner, key, committed, known, queue)
    return len(known)


def _take_over(owner: Owner, key: Key, committed: int, leases: Mapping[int, LeaseState], queue: Queue) -> None:
    """Replace the stored state below *committed*; the stored state of later messages is still right."""
    old = owner.notes.stored(key)
    if old is not None and old.next <= queue.next_offset:
        later = {offset: lease for offset, lease in old.leases.items() if offset >= committed}
        leases, committed = {**leases, **later}, max(committed, old.next)
    owner.notes.begin_with(key, committed, leases)
