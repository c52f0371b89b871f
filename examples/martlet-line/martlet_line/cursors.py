"""The cursors of a durable subscription; its session stores them as the options of a filter."""

from typing import final

import msgpack  # type: ignore[import-untyped]

from martlet.access import TopicOffsets
from martlet.delivery.subscriptions import Start
from martlet.runtime.steps import Steps
from martlet.store import Queue

__all__ = ["Cursors"]


@final
class Cursors:
    """For each queue of a topic the offset of the next message, and how far the log was readable at that time.

    The latter tells whether it is still the same queue: if the topic was deleted and created again, all its messages
    come later in the log, and are read from the beginning.
    """

    __slots__ = ("_next",)

    def __init__(self, packed: bytes) -> None:
        self._next: dict[int, tuple[int, int]] = {}
        for queue_id, offset, readable in msgpack.unpackb(packed) if packed else ():
            self._next[queue_id] = offset, readable

    def check(self, figures: TopicOffsets) -> Steps[None]:
        """Move the cursors of queues that were created again to the beginning. Raises `NotReady`."""
        for queue_id, (offset, readable) in list(self._next.items()):
            first = figures.first_offset(queue_id)
            if offset <= first:
                continue
            position = yield from figures.position_at(queue_id, first)
            if not 0 <= position < readable:
                self._next[queue_id] = first, figures.readable

    def start(self, otherwise: Start, figures: TopicOffsets) -> Start:
        """Return where to begin in a queue: at its cursor, or *otherwise* if it has none."""

        def begin(queue: Queue) -> int:
            known = self._next.get(queue.queue_id)
            offset = otherwise(queue) if known is None else max(known[0], queue.first_offset)
            self._next[queue.queue_id] = offset, figures.readable
            return offset

        return begin

    def move(self, queue_id: int, offset: int, readable: int) -> bool:
        """Move a cursor forward to *offset*; return False if it is there already."""
        if offset <= self._next.get(queue_id, (-1, -1))[0]:
            return False
        self._next[queue_id] = offset, readable
        return True

    def pack(self) -> bytes:
        """Return the bytes to make the same cursors from."""
        return bytes(msgpack.packb([(queue_id, *at) for queue_id, at in self._next.items()]))
