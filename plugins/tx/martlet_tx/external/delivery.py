"""Delivers a transaction: reads its staged messages and stores them in their queues, as atomic groups.

Each group has an event with the progress of the delivery, and is durable before the next group is appended. So after a
crash the delivery continues exactly there. The event of the first group is the commit itself: until then the
transaction is not decided.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Final, final

import trio

from martlet.broker import Broker
from martlet.contracts import StagedBatch
from martlet.errors import Reason, Refused
from martlet.records.layout import Buffer, record_views
from martlet.runtime.steps import WaitingSteps
from martlet.store.append.items import AppendItem
from martlet.store.queues.queues import Queue
from martlet.store.read.reading import ReadResult
from martlet_tx.external.journal_codec import EventKind, Key, Place, StagedRecord, encode_event
from martlet_tx.external.journal_writer import ExternalJournalWriter
from martlet_tx.external.staged_records import Member, decode_batch
from martlet_tx.external.state import ExternalState

__all__ = ["TransactionDelivery", "read_staged"]

log = logging.getLogger("martlet.tx")

# The limits of a group, which blocks the event loop for about 3 ms.
GROUP_MESSAGES: Final = 512
GROUP_BYTES: Final = 512 * 1024
# Bytes that a record needs besides body and properties.
OVERHEAD: Final = 150
NO_BATCH: Final = StagedBatch("", 0, ())


@final
class Loaded:
    """The messages of a chunk from number ``index`` on.

    Args:
      records: the body of each record, None if it is lost, and its number of messages.
    """

    def __init__(self, records: Sequence[tuple[Buffer | None, int]], first: int) -> None:
        self.index = 0
        self._records = list(reversed(records))
        self._batch = NO_BATCH
        self._members: Iterator[Member] = iter(())
        self._next: Member | None = None
        self.peek()
        while self.index < first and self.peek() is not None:
            self.advance()

    def peek(self) -> tuple[StagedBatch, Member] | None:
        """Return the next message and its target; None after the last one."""
        while self._next is None:
            self._next = next(self._members, None)
            if self._next is None:
                if not self._records:
                    return None
                self._open(*self._records.pop())
        return self._batch, self._next

    def _open(self, body: Buffer | None, messages: int) -> None:
        if body is None:
            self.index += messages
        else:
            self._batch, self._members = decode_batch(body)

    def advance(self) -> None:
        self._next = None
        self.index += 1


@final
class TransactionDelivery:
    """The delivery of one transaction; ``place`` is the first message that is not stored yet.

    Attributes:
      is_decided: whether the commit is stored; if not, the first group will store it.
      end: the log position after the last stored group.
      delivered, dropped, lost: numbers of messages that were stored, whose topic was deleted, and whose record is
        damaged or gone.
    """

    def __init__(
        self,
        broker: Broker,
        events: ExternalJournalWriter,
        state: ExternalState,
        key: Key,
        sequence: int,
        epoch: int,
        parts: Sequence[tuple[str, int]],
        place: Place = (0, 0, 0),
        *,
        is_decided: bool = False,
        is_last: bool = False,
        content: str = "",
    ) -> None:
        self._broker = broker
        self._store = broker.store
        self._events = events
        self._state = state
        self.key = key
        self.sequence = sequence
        self.epoch = epoch
        self.parts = parts
        self.place = place
        self.is_decided = is_decided
        self.is_last = is_last
        self.content = content
        self.end = 0
        self.delivered = self.dropped = self.lost = 0
        self.done = trio.Event()
        self._loaded: Loaded | None = None
        self._group_bytes = min(GROUP_BYTES, self._store.config.segment_bytes // 4)

    @property
    def is_finished(self) -> bool:
        return self.is_decided and self.place[0] >= len(self.parts)

    def commit_event(self, place: Place, *, is_copy: bool = False) -> bytes:
        head = *self.key, self.sequence, self.epoch
        later_fields = self._state.hour, is_copy, self.is_last, self.content
        return encode_event(EventKind.COMMIT, *head, self.parts, place, *later_fields)

    def store_first_group(self, check: Callable[[], None]) -> WaitingSteps[None]:
        """Decide the transaction, and store the first group; *check* may refuse it at the last moment.

        Raises:
          Refused: the transaction is not decided.
          StoreFailed: the disk failed.
        """
        yield from self._store_group(check)

    def store_other_groups(self) -> WaitingSteps[None]:
        """Store the other groups.

        Raises:
          Refused: the disk is full; call it again later.
          StoreFailed: the disk failed.
        """
        while not self.is_finished:
            # A power cut may keep a later group and lose an earlier one.
            yield partial(self._store.flusher.wait_flushed, self.end)
            yield from self._store_group(None)
            yield None

    def _store_group(self, check: Callable[[], None] | None) -> WaitingSteps[None]:
        with ExitStack() as undo:
            undo.callback(self._begin_again, self.lost)
            messages, place = yield from self._fill(self.place)
            yield None
            if check is not None:
                check()
            self._append(messages, place)
            undo.pop_all()

    def _begin_again(self, lost: int) -> None:
        """Begin again after the last stored group, with *lost* messages lost by then."""
        self._loaded, self.lost = None, lost

    def _append(self, messages: Sequence[tuple[StagedBatch, Member]], place: Place) -> None:
        items = self._items(messages)
        if self.is_decided:
            event = encode_event(EventKind.PROGRESS, *self.key, self.sequence, place)
        else:
            event = self.commit_event(place)
        end = self._events.append(event, items)
        self._events.commit()
        self.is_decided, self.place, self.end = True, place, end
        self.delivered += len(items)
        self.dropped += len(messages) - len(items)

    def _items(self, messages: Sequence[tuple[StagedBatch, Member]]) -> list[AppendItem]:
        """Return *messages* for their queues, without messages to deleted topics."""
        queues: dict[tuple[str, int], Queue | None] = {}
        code_of = self._store.writer.code_of
        items: list[AppendItem] = []
        for batch, (body, properties, flag) in messages:
            name = batch.topic, batch.queue_id
            if name not in queues:
                queues[name] = self._find_queue(*name)
            queue = queues[name]
            if queue is not None:
                items.append(
                    (
                        queue,
                        body,
                        properties,
                        code_of(properties),
                        flag,
                        batch.sys_flag,
                        batch.born_ms,
                        batch.born_host,
                        batch.reconsume_times,
                        0,
                    )
                )
        return items

    def _find_queue(self, name: str, queue_id: int) -> Queue | None:
        topic = self._broker.topics.get(name)
        if topic is None:
            log.warning(
                "messages of transaction %d of %r for topic[%s] are dropped, because the topic was deleted",
                *(self.sequence, self.key[1], name),
            )
            return None
        queues = max(topic.write_queues, topic.read_queues)
        return topic.queue(queue_id if queue_id < queues else queue_id % max(queues, 1))

    # ---- staged messages

    def _fill(self, place: Place) -> WaitingSteps[tuple[list[tuple[StagedBatch, Member]], Place]]:
        """Return the next messages, as many as fit into a group, and the place after them."""
        messages: list[tuple[StagedBatch, Member]] = []
        size = 0
        part, chunk, message = place
        while part < len(self.parts):
            if chunk >= self.parts[part][1]:
                part, chunk, message = part + 1, 0, 0
                continue
            if self._loaded is None:
                if len(messages) >= GROUP_MESSAGES:
                    break
                self._loaded = yield from self._load(part, chunk, message)
                yield None
            next_message = self._loaded.peek()
            message = self._loaded.index
            if next_message is None:
                self._loaded = None
                chunk, message = chunk + 1, 0
                continue
            size += OVERHEAD + len(next_message[0].topic) + len(next_message[1][0]) + len(next_message[1][1])
            if messages and (size > self._group_bytes or len(messages) >= GROUP_MESSAGES):
                break
            messages.append(next_message)
            self._loaded.advance()
        return messages, (part, chunk, message)

    def _load(self, part: int, chunk: int, message: int) -> WaitingSteps[Loaded]:
        """Read a chunk, from *message* on."""
        staged_part = self._state.parts.get((self.key, (self.sequence, self.parts[part][0])))
        chunks = self._state.chunks.get((staged_part.serial, chunk)) if staged_part is not None else None
        records: list[tuple[Buffer | None, int]] = []
        if chunks is None:
            self._note_lost(part, chunk, 1)  # the number of lost messages is unknown
        for staged_record in chunks.records if chunks is not None else ():
            body = yield from read_staged(self._broker, self._events, staged_record)
            if staged_record.messages:
                records.append((body, staged_record.messages))
            else:  # the record continues the previous one
                previous_body, messages = records.pop()
                records.append(
                    (None if previous_body is None or body is None else b"".join((previous_body, body)), messages)
                )
        for body, messages in records:
            if body is None:
                self._note_lost(part, chunk, messages)
        return Loaded(records, message)

    def _note_lost(self, part: int, chunk: int, messages: int) -> None:
        """Report messages of a chunk as damaged or gone; refuse the commit if the transaction is not decided."""
        name = self.parts[part][0]
        if not self.is_decided:
            text = f"chunk {chunk} of part {name!r} of transaction {self.sequence} of {self.key[1]!r} is damaged or"
            raise Refused(Reason.NOT_FOUND, f"{text} was removed; stage the part again under another name")
        self.lost += messages
        log.error(
            "%d messages of transaction %d of %r are lost: chunk %d of part %r is damaged or was removed",
            *(messages, self.sequence, self.key[1], chunk, name),
        )


def read_staged(
    broker: Broker, events: ExternalJournalWriter, staged_record: StagedRecord
) -> WaitingSteps[Buffer | None]:
    """Return the body of a record of staged messages; None if it is damaged or gone.

    Raises:
      Refused, StoreFailed: as `Readers.read_far`.
    """
    queue, results = events.staged_queue, list[ReadResult]()
    near_result = broker.store.readers.read_near(queue, staged_record.offset, 1, 1)
    if near_result is not None:
        results.append(near_result)
    else:

        async def read() -> None:
            results.append(await broker.store.readers.read_far(queue, staged_record.offset, 1, 1))

        yield read
    record = memoryview(b"".join(results[0].pieces))  # the only copy, as a chunk may have 4 MiB
    for view in islice(record_views(record), 1):
        if view.queue_offset == staged_record.offset:
            return view.body
    return None
