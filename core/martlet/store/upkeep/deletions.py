"""Deletions of topics: records of a deleted topic become invalid at once and are removed with their segments.

A record in the log marks the deletion. Once that is durable, the deletion survives any crash; only then the files of
the queues are removed.
"""

from collections.abc import Callable
from typing import final

from martlet.store.append.flusher import Flusher
from martlet.store.append.note_writer import NoteWriter
from martlet.store.append.readable import ReadableEnd
from martlet.store.disk.page_cache import LogWriter
from martlet.store.queues.queues import Queues
from martlet.store.upkeep.deleted_topics import DeletedTopics

__all__ = ["Deletions"]


@final
class Deletions:
    """Deletes topics; each of ``on_deleted`` is called with the name of a deleted topic."""

    def __init__(
        self,
        queues: Queues,
        tail: LogWriter,
        flusher: Flusher,
        readable: ReadableEnd,
        notes: NoteWriter,
        deleted: DeletedTopics,
    ) -> None:
        self._queues = queues
        self._tail = tail
        self._flusher = flusher
        self._readable = readable
        self._notes = notes
        self._deleted = deleted
        self.on_deleted: list[Callable[[str], None]] = []
        # The log position after the newest deletion.
        self.end = 0

    def delete_topic(self, topic: str) -> None:
        """Delete *topic*, if it has queues.

        Raises:
          Refused: the disk is full; the topic was not deleted.
          StoreFailed: the disk failed.
        """
        if topic not in self._queues.topics:
            return
        self._notes.delete(topic)
        queues = self._queues.forget_topic(topic)
        for queue in queues:
            self._readable.forget(queue)
        self.end = self._tail.written
        self._deleted.add(topic, queues, self.end)
        for tell in self.on_deleted:
            tell(topic)

    async def wait_durable(self) -> None:
        """Return once all earlier deletions are durable.

        Raises:
          StoreFailed: the disk failed, so that will never happen.
        """
        await self._flusher.wait_durable(self.end)
