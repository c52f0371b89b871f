"""Writes the events of external transactions, alone or in an atomic group with messages, and staged messages."""

from collections.abc import Sequence
from typing import final

from martlet.broker import Broker
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.store.append.items import AppendItem
from martlet.store.queues.queues import Queue
from martlet_tx.external.journal_codec import EVENTS_TOPIC, StagedRecord
from martlet_tx.external.staged_records import STAGED_TOPIC
from martlet_tx.external.state import ExternalState

__all__ = ["ExternalJournalWriter"]


@final
class ExternalJournalWriter:
    """Appends events and staged messages."""

    def __init__(self, broker: Broker, state: ExternalState) -> None:
        self._broker = broker
        self._store = broker.store
        self._state = state

    @property
    def queue(self) -> Queue:
        return self._store.queues.get(EVENTS_TOPIC, 0)

    @property
    def staged_queue(self) -> Queue:
        return self._store.queues.get(STAGED_TOPIC, 0)

    def append(self, event: bytes, items: Sequence[AppendItem] = ()) -> int:
        """Append *items* and *event*, all or none; return the end in the log.

        Raises:
          Refused: the disk is full, or there is no room for the records; none was stored.
          StoreFailed: the disk failed.
        """
        writer = self._store.writer
        message = Message(EVENTS_TOPIC, event, born_host=self._store.writer.store_host)
        return writer.append_all([*items, writer.item(message, 0)], atomic=True).end

    def staged_items(
        self, bodies: Sequence[bytes], messages: Sequence[int]
    ) -> tuple[list[AppendItem], list[StagedRecord]]:
        """Return records of staged messages for `append`, and the offsets that they get if they are appended next."""
        queue, writer, host = self.staged_queue, self._store.writer, self._store.writer.store_host
        items = [writer.item(Message(STAGED_TOPIC, body, born_host=host), 0) for body in bodies]
        first_offset = queue.next_offset
        sizes = enumerate(zip(bodies, messages, strict=True), first_offset)
        return items, [StagedRecord(offset, len(body), count) for offset, (body, count) in sizes]

    def commit(self) -> None:
        """Commit all appended records.

        Raises:
          Refused, StoreFailed: no record appended since the last commit was stored.
        """
        self._store.committer.commit_early()

    async def wait_applied(self) -> None:
        """Wait until all appended events are durable and applied.

        Raises:
          Refused: the disk is full, or events are not applied anymore.
          StoreFailed: the disk failed.
        """
        end_offset = self.queue.next_offset
        if self._state.next >= end_offset:
            return
        self.commit()
        end_offset = self.queue.next_offset
        await self._store.flusher.wait_flushed(self._store.written)
        while self._state.next < end_offset:
            if self._state.is_stopped:
                text = "external transactions have stopped, because the broker stops or the plugin tx has failed"
                raise Refused(Reason.UNAVAILABLE, f"{text}; try again, and see the broker's log")
            await self._state.applied.park()
