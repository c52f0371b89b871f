"""The topics and queues in which clients' messages are stored."""

from zlib import crc32

from martlet.access import Gate
from martlet.errors import Reason, Refused
from martlet_stomp.shared.context import Context

__all__ = ["find_queue_id", "queue_count"]


def queue_count(context: Context, gate: Gate, topic: str) -> int:
    """Return the number of queues of *topic*, at least 1; creates a missing topic.

    Raises:
      Refused: the topic is missing and may not be created, or the client may not send to it.
    """
    if topic == context.temporary.topic:
        context.temporary.ensure_topic()
    is_new = not context.has_topic(topic)
    found = gate.find_topic(topic, "publish", context.config.queues)
    if is_new and found is not None:
        context.created(topic)
    if found is None:
        raise Refused(Reason.NO_TOPIC, f"topic[{topic}] does not exist; create it, or set broker.auto_create_topics")
    return found.write_queues or 1


def find_queue_id(context: Context, gate: Gate, topic: str, name: str) -> int:
    """Return the queue of *topic* for a message with *name*; any queue if *name* is empty. Raises `Refused`."""
    count = queue_count(context, gate, topic)
    return crc32(name.encode()) % count if name else context.broker.ids.below(count)
