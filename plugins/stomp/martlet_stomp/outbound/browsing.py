"""Browsing: a client gets the current messages of a queue, which keeps them (``browser:true``, as with ActiveMQ).

A browser reads from the first unsettled message to the queue's end at the time of SUBSCRIBE. After the last message it
gets a MESSAGE with ``browser:end``, and nothing more.
"""

from collections.abc import Sequence
from typing import final

from martlet.delivery.subscriptions import TopicSubscription
from martlet.groups.group import SharedGroup
from martlet.store import Queue
from martlet_stomp.wire.codec import encode_header
from martlet_stomp.wire.packets import Version

__all__ = ["Browse", "last_frame"]


@final
class Browse:
    """One browse of a queue; *shared_group* consumes the queue, None if nobody ever consumed it."""

    __slots__ = ("_ends", "_shared_group")

    def __init__(self, shared_group: SharedGroup | None) -> None:
        self._shared_group = shared_group
        self._ends: dict[int, int] = {}

    def start(self, queue: Queue) -> int:
        """Return the offset at which to begin in *queue*, one of the topic's; note its end."""
        self._ends[queue.queue_id] = queue.next_offset
        first = self._shared_group.first_unsettled(queue.queue_id) if self._shared_group is not None else -1
        return min(max(first, queue.first_offset), queue.next_offset)

    def wanted(self, queue_id: int, offsets: Sequence[int]) -> list[bool]:
        """Return for each of *offsets* whether to send the message: it was there at the start, and is not settled."""
        end, shared_group = self._ends.get(queue_id, 0), self._shared_group
        return [
            offset < end and not (shared_group is not None and shared_group.is_settled(queue_id, offset))
            for offset in offsets
        ]

    def is_over(self, reader: TopicSubscription) -> bool:
        """Return whether *reader* has reached the noted end of each queue."""
        return all(reader.cursor(queue_id) >= end for queue_id, end in self._ends.items())


def last_frame(subscription_id: str | None, number: int, destination: str, version: Version) -> bytes:
    """Return the MESSAGE with ``browser:end`` that follows the last message."""
    lines = [encode_header("subscription", subscription_id, version)] if subscription_id is not None else []
    lines.append(b"message-id:browser-%d-end\n" % number)
    lines.append(encode_header("destination", destination, version))
    return b"MESSAGE\n%bbrowser:end\ncontent-length:0\n\n\0" % b"".join(lines)
