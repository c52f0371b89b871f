"""The cursors of a durable subscription; its session stores them as the options of a filter."""

from collections.abc import Callable
from typing import final

import msgpack  # type: ignore[import-untyped]

from martlet.delivery.subscriptions import Start
from martlet.store import Queue

__all__ = ["Cursors"]

# Returns the log position of a message, by queue id and offset; -1 if there is no such message.
PositionAt = Callable[[int, int], int]


@final
class Cursors:
    """For each queue of a topic the offset of the next message, and the log position of the message before that.

    The position tells whether it is still the same queue: if the topic was deleted and created again, its messages are
    read from the beginning.
    """

    __slots__ = ("_next",)

    def __init__(self, packed: bytes) -> None:
        self._next: dict[int, tuple[int, int]] = {}
        for queue_id, offset, position in msgpack.unpackb(packed) if packed else ():
            self._next[queue_id] = offset, position

    def start(self, otherwise: Start, position_at: PositionAt) -> Start:
        """Return where to begin in a queue: at its cursor, or *otherwise* if it has none."""

        def begin(queue: Queue) -> int:
            number = queue.queue_id
            offset, position = self._next.get(number, (-1, -1))
            if offset < 0:
                offset = otherwise(queue)
            elif offset <= queue.first_offset or position_at(number, offset - 1) != position:
                offset = queue.first_offset
            self._next[number] = offset, position_at(number, offset - 1) if offset else -1
            return offset

        return begin

    def move(self, queue_id: int, offset: int, position: int) -> bool:
        """Move a cursor forward to *offset*; *position* is that of the message before. False if it is there already."""
        if offset <= self._next.get(queue_id, (-1, -1))[0]:
            return False
        self._next[queue_id] = offset, position
        return True

    def pack(self) -> bytes:
        """Return the bytes to make the same cursors from."""
        return bytes(msgpack.packb([(queue_id, *at) for queue_id, at in self._next.items()]))
