"""Brings the key index to the end of the log, block by block, beside other work."""

from typing import final

from martlet.store.atomic import valid_after
from martlet.store.key_index import KeyIndex
from martlet.store.queues import Queue, Queues
from martlet.store.scan import Scan
from martlet.store.segments import Segments

__all__ = ["Follower"]


@final
class Follower:
    """Indexes what `read` returns.

    While it is at work nothing is queued for the index: what is appended meanwhile it reads as well.
    """

    __slots__ = ("_names", "_scan", "keys", "segments")

    def __init__(self, segments: Segments, queues: Queues, keys: KeyIndex) -> None:
        self.segments = segments
        self.keys = keys
        # One for each topic, for its name's hash. The index follows queues and never makes one.
        self._names: dict[str, Queue] = {}
        self._scan = Scan(segments, queues, self._named, keys=keys)

    def _named(self, topic: str, queue_id: int) -> Queue:
        queue = self._names.get(topic)
        if queue is None:
            queue = self._names[topic] = Queue(topic, 0)
        return queue

    def read(self, end: int, size: int) -> bytes:
        """Up to *size* bytes from where the index stands, at most to log position *end*; blocks."""
        return self.segments.read(self.keys.position, min(size, end - self.keys.position))

    def take(self, data: bytes, end: int, size: int) -> int:
        """Index what `read` returned for *end* and *size*; return the size to read next, 0 for the usual."""
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
