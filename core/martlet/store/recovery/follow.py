"""Completes the key index up to the end of the log, block by block, in the background."""

from collections import deque
from typing import final

from martlet.store.disk.segments import Segments
from martlet.store.format.atomic import valid_after
from martlet.store.keys.key_index import KeyIndex, Waiting
from martlet.store.queues.queues import Queue, Queues
from martlet.store.recovery.scan import Scan

__all__ = ["Follower"]


@final
class Follower:
    """Indexes the records that `read` returns: `take` finds their keys, and `index` adds some of them at a time.

    While it runs, appended records are not queued for the index: it reads them from the log too.
    """

    __slots__ = ("_names", "_position", "_scan", "_waiting", "keys", "segments")

    def __init__(self, segments: Segments, queues: Queues, keys: KeyIndex) -> None:
        self.segments = segments
        self.keys = keys
        # One per topic, for the hash of its name. The index follows queues and never creates one.
        self._names: dict[str, Queue] = {}
        self._waiting: deque[Waiting] = deque()
        self._position = 0  # where the index is complete up to once nothing waits
        self._scan = Scan(segments, queues, self._named, keys=self._take_keys)

    def _take_keys(self, queue: Queue, position: int, store_ms: int, properties: bytes) -> None:
        """Take a message of the block, for `index`."""
        self._waiting.append((queue, position, -1, store_ms, properties))

    def index(self, budget: int) -> bool:
        """Index about *budget* keys; return whether the block is done. Raises `OSError`."""
        waiting, keys = self._waiting, self.keys
        while waiting and budget > 0:
            budget = keys.index(waiting[0], budget)
            if not keys.is_within:
                waiting.popleft()
        if not waiting:
            keys.position = self._position
        return not waiting

    def _named(self, topic: str, queue_id: int) -> Queue:
        queue = self._names.get(topic)
        if queue is None:
            queue = self._names[topic] = Queue(topic, 0)
        return queue

    def read(self, end: int, size: int) -> bytes:
        """Read up to *size* bytes, from the end of the index to log position *end* at most; blocks."""
        return self.segments.read(self.keys.position, min(size, end - self.keys.position))

    def take(self, data: bytes, end: int, size: int) -> int:
        """Take the result of `read` for *end* and *size*; return the size to read next, 0 for the default."""
        begin = self._position = self.keys.position
        segment = self.segments.find(begin)
        if segment is None:
            self._position = end
            return 0
        done, more = self._scan.take_block(segment, begin, data)
        if done:
            self._position += done
        elif size < more <= end - begin:
            return more
        else:
            found = valid_after(self.segments, begin)
            self._position = found if 0 <= found < end else end
        return 0
