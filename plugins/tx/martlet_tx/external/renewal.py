"""Renewal of events and staged messages: those still needed are appended again before retention removes them."""

import logging
from typing import final

from martlet.broker import Broker
from martlet.runtime.steps import Budget, WaitingSteps
from martlet_tx.external.deliveries import Deliveries
from martlet_tx.external.delivery import read_staged
from martlet_tx.external.journal_codec import EventKind, Key, StagedChunk, encode_event
from martlet_tx.external.journal_writer import ExternalJournalWriter
from martlet_tx.external.state import ExternalState, PartKey, StagedPart

__all__ = ["StagedRenewal"]

log = logging.getLogger("martlet.tx")


@final
class StagedRenewal:
    """Appends records again that are still needed and about to be removed."""

    def __init__(
        self, broker: Broker, events: ExternalJournalWriter, state: ExternalState, deliveries: Deliveries
    ) -> None:
        self._broker = broker
        self._store = broker.store
        self._events = events
        self._state = state
        self._deliveries = deliveries

    def move_before(self, end: int) -> WaitingSteps[None]:
        """Append the needed records before log position *end* again.

        A commit comes first, then its producer, then staged parts: so each copy has its old meaning in a log that
        begins with the copies.

        Raises:
          Refused: the disk is full.
          StoreFailed: the disk failed.
        """
        self._store.committer.commit_early()
        for key, progress in list(self._state.deliveries.items()):
            delivery = self._deliveries.get(key)
            if progress.noted_at < end and delivery is not None and not delivery.is_finished:
                self._events.append(delivery.commit_event(delivery.place, is_copy=True))
        if self._state.hour_noted_at < end:
            self._events.append(encode_event(EventKind.HOUR, self._state.hour))
        budget = Budget()
        for key, producer in self._state.producers.freeze():
            if producer.noted_at >= end:
                break  # the chunks are in log order
            if self._state.producers.get(key) == producer:
                self._events.append(producer.event(key, producer.hour))
            if budget.is_over(8):
                yield None
        for name, part in list(self._state.parts.freeze()):
            for number in range(part.chunks):
                chunk = self._state.chunks.get((part.serial, number))
                if chunk is not None and chunk.position < end and name in self._state.parts:
                    yield from self._move(name, part, number, chunk)
                elif budget.is_over():
                    yield None

    def _move(self, name: tuple[Key, PartKey], part: StagedPart, number: int, chunk: StagedChunk) -> WaitingSteps[None]:
        key, (sequence, part_name) = name
        bodies: list[bytes] = []
        for staged_record in chunk.records:
            body = yield from read_staged(self._broker, self._events, staged_record)
            if body is None:
                text = "chunk %d of part %r of transaction %d of %r is lost: its record is damaged"
                log.error(text, number, part_name, sequence, key[1])
                return
            bodies.append(bytes(body))
        items, new_records = self._events.staged_items(
            bodies, [staged_record.messages for staged_record in chunk.records]
        )
        head = (*key, sequence, part_name, part.epoch, number)
        self._events.append(encode_event(EventKind.STAGED, *head, new_records, sorted(part.topics), True), items)
        yield None
