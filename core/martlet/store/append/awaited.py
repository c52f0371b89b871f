"""Which records somebody waits for until they are durable.

Records that are *unawaited* need no fdatasync of their own: nobody waits until they are durable. A commit that has only
such records, for queues that nobody watches except early readers (`readable.py`), asks for no flush at once. The log is
durable in order, so whatever is awaited later takes them along.
"""

from collections import deque
from typing import final

from martlet.store.disk.page_cache import LogWriter

__all__ = ["Awaited"]


@final
class Awaited:
    """The parts of the log that are not durable and for which somebody waits, and which pending records are unawaited.

    ``unawaited`` is the number of records at the end of the pending ones for which nobody waits.
    """

    def __init__(self, tail: LogWriter) -> None:
        self._tail = tail
        self.unawaited = 0
        # Where the parts begin and end, in order.
        self._parts: deque[tuple[int, int]] = deque()

    def add(self, start: int) -> None:
        """Note that somebody waits until the written log from *start* on is durable."""
        parts = self._parts
        if parts and parts[-1][1] == start:
            start = parts.pop()[0]
        parts.append((start, self._tail.written))

    def forget_before(self, durable: int) -> None:
        """Forget the parts before *durable*, up to where the log is durable."""
        parts = self._parts
        while parts and parts[0][1] <= durable:
            parts.popleft()

    @property
    def early_end(self) -> int:
        """The log position where the first records begin that are not durable and for which somebody waits."""
        return self._parts[0][0] if self._parts else self._tail.written
