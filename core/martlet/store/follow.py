"""Completes the key index up to the end of the log, block by block, in the background."""

from typing import final

from martlet.store.atomic import valid_after
from martlet.store.key_index import KeyIndex
from martlet.store.queues import Queue, Queues
from martlet.store.scan import Scan
from martlet.store.segments import Segments

__all__ = ["Follower"]


@final
class Follower:
    """Indexes the records that `read` returns.

    While it runs, appended records are not queued for the index: it reads them from the log too.
    """

    __slots__ = ("_names", "_scan", "keys", "segments")

    def __init__(self, segments: Segments, queues: Queues, keys: KeyIndex) -> None:
        self.segments = segments
        self.keys = keys
        # One per topic, for the hash of its name. The index follows queues and never creates one.
        self._names: dict[str, Queue] = {}
        self._scan = Scan(segments, queues, self._named, keys=keys)

    def _named(self, topic: str, queue_id: int) -> Queue:
        queue = self._names.get(topic)
        if queue is None:
            queue = self._names[topic] = Queue(topic, 0)
        return queue

    def read(self, end: int, size: int) -> bytes:
        """Read up to *size* bytes, from the end of the index to log position *end* at most; blocks."""
        return self.segments.read(self.keys.position, min(size, end - self.keys.position))

    def take(self, data: bytes, end: int, size: int) -> int:
        """Index the result of `read` for *end* and *size*; return the size to read next, 0 for the default."""
        keys = self.keys
        segment = self.segments.find(keys.position)
        if segment is None:
            keys.position = end
            return 0
        done, more = self._scan.take_block(segment, keys.position, data)
        if done:
            keys.position += done
        elif size < more <= end - keys.position:
            return more
        else:
            found = valid_after(self.segments, keys.position)
            keys.position = found if 0 <= found < end else end
        return 0
