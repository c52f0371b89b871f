"""Advances the first offsets of queues after the oldest segments were removed."""

from typing import final

from martlet.store.disk.segments import Segments
from martlet.store.queues.queues import Queue, Queues

__all__ = ["FirstOffsets"]


@final
class FirstOffsets:
    """Tracks the queues that may still begin with removed records; readers of such records get an error."""

    def __init__(self, queues: Queues, segments: Segments) -> None:
        self._queues = queues
        self._segments = segments
        self._behind: dict[Queue, None] = {}
        # Queues whose first record is unknown because of a damaged block that is being rebuilt.
        self._stuck: dict[Queue, None] = {}

    @property
    def is_behind(self) -> bool:
        """Return whether some queues may begin with removed records."""
        return bool(self._behind or self._stuck)

    def look_again(self) -> int:
        """Check every queue again, because the log now begins later; return the number of queues."""
        self._behind = dict.fromkeys(self._queues.all())
        return len(self._behind)

    def retry_stuck(self) -> None:
        """Check the queues with damaged blocks again; the blocks may have been rebuilt."""
        self._behind |= self._stuck
        self._stuck = {}

    def advance(self, count: int) -> bool:
        """Advance up to *count* queues to their first remaining record; return True if there are more queues."""
        queues, start = self._queues, self._segments.start
        while self._behind and count:
            queue, _ = self._behind.popitem()
            if queues.find(queue.topic, queue.queue_id) is queue:  # otherwise its topic was deleted
                if not queues.advance_first(queue, start):
                    self._stuck[queue] = None
                count -= 1
        return bool(self._behind)
