"""Moves the first offsets of queues after the oldest segments were removed."""

from typing import final

from martlet.store.queues import Queue, Queues
from martlet.store.segments import Segments

__all__ = ["FirstOffsets"]


@final
class FirstOffsets:
    """Knows which queues may still begin with records that were removed; who reads there is told so."""

    __slots__ = ("_behind", "_queues", "_segments", "_stuck")

    def __init__(self, queues: Queues, segments: Segments) -> None:
        self._queues = queues
        self._segments = segments
        self._behind: dict[Queue, None] = {}
        # Of these a damaged block, which is being rebuilt, hides where they begin.
        self._stuck: dict[Queue, None] = {}

    @property
    def is_behind(self) -> bool:
        """Whether some queues may begin with what was removed."""
        return bool(self._behind or self._stuck)

    def look_again(self) -> int:
        """Look at every queue: the log begins later now. Returns how many there are."""
        self._behind = dict.fromkeys(self._queues.all())
        return len(self._behind)

    def retry_stuck(self) -> None:
        """Look again at the queues whose damaged blocks may have been rebuilt."""
        self._behind |= self._stuck
        self._stuck = {}

    def advance(self, count: int) -> bool:
        """Let up to *count* queues begin with what is left of them; True when there are more."""
        queues, start = self._queues, self._segments.start
        while self._behind and count:
            queue, _ = self._behind.popitem()
            if queues.find(queue.topic, queue.queue_id) is queue:  # else its topic was deleted
                if not queues.advance_first(queue, start):
                    self._stuck[queue] = None
                count -= 1
        return bool(self._behind)
