"""Writes the store's internal records (`notes.py`) into the log."""

from collections.abc import Sequence
from typing import Final, final

from martlet.runtime.clock import Clock
from martlet.store.append.committer import Committer
from martlet.store.append.writer import Writer
from martlet.store.config import StoreConfig
from martlet.store.format.notes import NOTES_TOPIC, QueueEnd, deletion, expiry_notes, offset_notes
from martlet.store.queues.queues import Queue, Queues

__all__ = ["NoteWriter"]

# A note with the offsets of many queues is split into several records.
NOTE_BYTES_MAX: Final = 256 * 1024


@final
class NoteWriter:
    """Appends notes and commits them immediately."""

    def __init__(self, writer: Writer, committer: Committer, queues: Queues, config: StoreConfig, clock: Clock) -> None:
        self._writer = writer
        self._queues = queues
        self._committer = committer
        self._clock = clock
        self._body_bytes_max = min(NOTE_BYTES_MAX, config.segment_bytes // 4)

    def delete(self, topic: str) -> None:
        """Note that all earlier records of *topic* are deleted.

        Raises:
          Refused: the disk is full.
          StoreFailed: the disk failed.
        """
        # Twice, so that one damaged record cannot bring the topic back.
        note = deletion(topic, self._writer.store_host, self._clock.now_ms())
        self._committer.commit_early()
        self._writer.append_together((note, note), NOTES_TOPIC)

    def note_offsets(self, queues: list[Queue]) -> None:
        """Note the next offsets of *queues*, which no record in the log shows.

        Raises:
          Refused: the disk is full.
          StoreFailed: the disk failed.
        """
        self._committer.commit_early()
        ends = [(queue.topic, queue.queue_id, queue.next_offset) for queue in queues]
        position = self._writer.position
        host, now_ms = self._writer.store_host, self._clock.now_ms()
        for note in offset_notes(ends, self._body_bytes_max, host, now_ms):
            self._writer.append_together((note,), NOTES_TOPIC)
        for queue in queues:
            queue.noted = position
            self._queues.note_change(queue)

    def note_expiries(self, firsts: Sequence[QueueEnd]) -> None:
        """Note the first offsets of queues, as *firsts* (topic, queue id, offset): consumers get no earlier messages.

        Raises:
          Refused: the disk is full.
          StoreFailed: the disk failed.
        """
        self._committer.commit_early()
        host, now_ms = self._writer.store_host, self._clock.now_ms()
        for note in expiry_notes(firsts, self._body_bytes_max, host, now_ms):
            self._writer.append_together((note,), NOTES_TOPIC)
