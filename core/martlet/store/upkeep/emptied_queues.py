"""Notes on queues that a removal of segments empties: without their records, the log has no other trace of them."""

import logging
from collections.abc import Iterator
from typing import Final, final

import trio

from martlet.errors import Refused
from martlet.store.append.flusher import Flusher
from martlet.store.append.note_writer import NoteWriter
from martlet.store.disk.page_cache import LogWriter
from martlet.store.queues.queues import Queue, Queues

__all__ = ["EmptiedQueues"]

logger = logging.getLogger("martlet.store")

# Queues to check per turn of the event loop for whether a removal empties them.
NOTED_A_TURN: Final = 2000


@final
class EmptiedQueues:
    """Writes the next offsets of queues into the log before a removal empties them.

    All queues without a record after log position ``noted_to`` have such a note in the log. ``owes_note`` says that one
    must still be written, because there was no space on the disk.
    """

    def __init__(self, queues: Queues, tail: LogWriter, flusher: Flusher, notes: NoteWriter) -> None:
        self._queues = queues
        self._tail = tail
        self._flusher = flusher
        self._notes = notes
        self.noted_to = 0
        self.owes_note = False

    async def note(self, end: int) -> None:
        """Note the queues that the removal of everything before *end* empties; wait until that is durable."""
        if not self._may_empty(end):
            return
        for queues in self._find_emptied(end):
            self._write_note(queues)
            await trio.lowlevel.checkpoint()
        await self._flusher.wait_durable(self._tail.written)
        self.noted_to = end

    def note_now(self, end: int) -> None:
        """Like `note`, but blocking and complete on return."""
        if not self._may_empty(end):
            return
        for queues in self._find_emptied(end):
            self._write_note(queues)
        self._flusher.flush_now()
        if self._flusher.durable >= self._tail.written:
            self.noted_to = end

    def _may_empty(self, end: int) -> bool:
        """Return whether there may be something to note before *end*."""
        if self._flusher.failed is not None or (end <= self.noted_to and not self.owes_note):
            return False
        self.owes_note = False
        return True

    def _find_emptied(self, end: int) -> Iterator[list[Queue]]:
        """Return the queues that had records or a note, but have neither at or after log position *end*."""
        queues = self._queues.all()
        for at in range(0, len(queues), NOTED_A_TURN):
            batch = queues[at : at + NOTED_A_TURN]
            known = [queue for queue in batch if queue.next_offset or queue.noted >= 0]
            yield [queue for queue in known if queue.last_end <= end and queue.noted < end]

    def _write_note(self, queues: list[Queue]) -> None:
        try:
            if queues:
                self._notes.note_offsets(queues)
        except Refused as refused:
            # The segments are removed anyway, which makes space.
            self.owes_note = True
            logger.warning("the next offsets of %d empty queues are noted later; %s", len(queues), refused)
