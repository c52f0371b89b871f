"""The messages of one queue between the pull and the listener, and the offset up to which all are done."""

from collections import deque
from typing import final

import trio

__all__ = ["Backlog"]


@final
class Backlog:
    """Counts the cached messages of a queue; `commit_offset` never passes a message that is not done.

    A backlog is *dropped* when its queue goes to another consumer or jumps to another
    offset: results of listeners that are still running are then ignored.
    """

    __slots__ = ("_pending", "_room", "_sizes", "bytes", "bytes_max", "dropped", "end", "messages_max")

    def __init__(self, offset: int, messages_max: int, bytes_max: int) -> None:
        self.end = offset
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self.bytes = 0
        self.dropped = False
        self._pending: deque[int] = deque()
        self._sizes: dict[int, int] = {}
        self._room = trio.Event()

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def commit_offset(self) -> int:
        """The offset at which another consumer would have to continue."""
        return self._pending[0] if self._pending else self.end

    @property
    def is_full(self) -> bool:
        """Whether a limit is reached; the message that crosses the limit of bytes is still cached."""
        return len(self._sizes) >= self.messages_max or self.bytes >= self.bytes_max

    def add(self, offset: int, size: int) -> bool:
        """Add a message; return False if it is already in the backlog."""
        if offset in self._sizes or (self._pending and offset <= self._pending[-1]):
            return False
        self._pending.append(offset)
        self._sizes[offset] = size
        self.bytes += size
        return True

    def done(self, offset: int) -> None:
        """Mark the message at *offset* as done."""
        self.bytes -= self._sizes.pop(offset, 0)
        while self._pending and self._pending[0] not in self._sizes:
            self._pending.popleft()
        if not self.is_full:
            self._room.set()
            self._room = trio.Event()

    async def wait_room(self) -> None:
        """Wait until more may be pulled."""
        while self.is_full:
            await self._room.wait()
