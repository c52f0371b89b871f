"""Checks the order of a queue's records, and interprets records that are out of order.

Within one life of a topic the offsets of a queue's records have no gaps: a refused append returns its offset, and a
deletion is a record of its own. So an unexpected offset is a sign of damage, either to that record or to earlier ones,
and the queue's next record decides: of contradicting records, the one that no other record confirms is damaged. Only
its own entry is lost.
"""

import logging
from collections.abc import Callable
from typing import Final, final

from martlet.records.layout import RECORD_BYTES_MIN
from martlet.store.queues.queues import Queue, Queues

__all__ = ["Order"]

logger = logging.getLogger("martlet.store")

# In a store that RocketMQ wrote, a gap of at most this size is accepted without confirmation.
FOREIGN_GAP_MAX: Final = 1024


@final
class _Suspect:
    """A record with an unexpected queue offset."""

    __slots__ = ("code", "offset", "position", "size")

    def __init__(self, offset: int, position: int, size: int, code: int) -> None:
        self.offset = offset
        self.position = position
        self.size = size
        self.code = code


@final
class Order:
    """Adds records to their queues if their offset is not simply the next one.

    Args:
      guess: the log does not begin at 0, so the first record found of a queue may have any offset.
      foreign: RocketMQ may have written the log; it writes no records of deletions.
    """

    def __init__(self, queues: Queues, on_lost: Callable[[int], None]) -> None:
        self.queues = queues
        self.guess = False
        self.foreign = False
        self.lost = 0
        self.suspects: dict[Queue, _Suspect] = {}
        self._on_lost = on_lost
        # Queues whose first offset is based on a single record.
        self._guessed: set[Queue] = set()
        # Topics that were deleted within the scan: their queues begin at 0.
        self._settled_topics: set[str] = set()
        # Positions and sizes of ranges of the log without records.
        self._regions: list[tuple[int, int]] = []

    def damage(self, position: int, size: int) -> None:
        """Note that the log has no record in *size* bytes from *position* on."""
        self._regions.append((position, size))

    def forget(self, topic: str, queues: list[Queue]) -> None:
        """Note that *topic* was deleted here."""
        self._settled_topics.add(topic)
        for queue in queues:
            self.suspects.pop(queue, None)
            self._guessed.discard(queue)

    def take(self, queue: Queue, offset: int, position: int, size: int, code: int) -> None:
        """Handle a record with an unexpected offset, or whose queue has a suspect."""
        self.queues.touch(queue)
        suspect = self.suspects.pop(queue, None)
        if suspect is not None:
            self._decide(queue, suspect, offset)
        if offset == queue.next_offset:
            queue.add(position, size, code)
        elif self._may_begin_at(queue, offset, position):
            queue.begin_at(offset)
            self._guessed.add(queue)
            queue.add(position, size, code)
        else:
            self.suspects[queue] = _Suspect(offset, position, size, code)

    def _may_begin_at(self, queue: Queue, offset: int, position: int) -> bool:
        """Return whether an unknown queue can begin with *offset*: whether enough records may have been before."""
        is_unknown = self.guess and not queue.next_offset and queue.topic not in self._settled_topics
        return is_unknown and (self.foreign or 0 < offset <= position // RECORD_BYTES_MIN)

    def _decide(self, queue: Queue, suspect: _Suspect, offset: int) -> None:
        """Decide on *suspect*; the next record has *offset*."""
        next_offset = queue.next_offset
        if offset == suspect.offset + 1:
            self._believe(queue, suspect)
        elif offset == next_offset + 1:
            # The suspect took this offset.
            self._lose(suspect.position)
            queue.add_holes(1, suspect.position)
        elif next_offset < suspect.offset < offset and self._damage_hides(queue, offset - next_offset - 1):
            self._jump(queue, suspect)
        else:
            self._lose(suspect.position)

    def _believe(self, queue: Queue, suspect: _Suspect) -> None:
        """Accept two records that agree with each other but not with earlier ones."""
        is_alone = queue in self._guessed and queue.next_offset - queue.stored_from == 1
        gap = suspect.offset - queue.next_offset
        if is_alone and not (gap > 0 and self._damage_hides(queue, gap)):
            self._lose(queue.last_end)
            self._begin_at(queue, suspect.offset)
        elif gap < 0 and suspect.offset > queue.stored_from:
            # A damaged earlier record had set the next offset too high.
            self._lose(queue.last_end)
            self.queues.rewind(queue, suspect.offset)
        self._jump(queue, suspect)

    def _jump(self, queue: Queue, suspect: _Suspect) -> None:
        """Accept the suspect: fill the gap before it, or restart the queue there."""
        if suspect.offset > queue.next_offset:
            queue.add_holes(suspect.offset - queue.next_offset, suspect.position)
        elif suspect.offset < queue.next_offset:
            self._begin_at(queue, suspect.offset)
        queue.add(suspect.position, suspect.size, suspect.code)

    def _begin_at(self, queue: Queue, offset: int) -> None:
        self.queues.forget_blocks(queue)
        if offset < queue.expired_to:
            queue.expired_to = 0  # RocketMQ deleted the topic and created it again
        queue.begin_at(offset)

    def _damage_hides(self, queue: Queue, count: int) -> bool:
        """Return whether *count* records may be lost after the queue's last one, in ranges without records."""
        hidden = sum(size for position, size in self._regions if position >= queue.last_end)
        return count <= self.lost + hidden // RECORD_BYTES_MIN

    def settle(self) -> None:
        """Decide on the remaining suspects, after which no records follow."""
        for queue in list(self.suspects):
            self.settle_queue(queue, -1)

    def settle_queue(self, queue: Queue, end: int) -> None:
        """Decide on the suspect of *queue*, whose next record has offset *end* (-1: unknown)."""
        suspect = self.suspects.pop(queue, None)
        if suspect is None:
            return
        gap = suspect.offset - queue.next_offset
        is_real = suspect.offset + 1 == end or gap == 1 or (gap > 0 and self._damage_hides(queue, gap))
        if self.foreign and end < 0:
            # One flipped bit turns a power of two into 0, so then offset 0 may be damage instead of a new topic.
            is_recreated = suspect.offset == 0 and queue.next_offset & (queue.next_offset - 1)
            is_real = is_real or 0 < gap <= FOREIGN_GAP_MAX or bool(is_recreated)
        if is_real:
            self._jump(queue, suspect)
        else:
            self._lose(suspect.position)
            # It took the offset after the last one, which no other message may get.
            queue.add_holes(1, suspect.position)

    def _lose(self, position: int) -> None:
        self.lost += 1
        self._on_lost(position)
