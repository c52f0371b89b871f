"""The projection of events in the log: staged parts, committed sequences, and unfinished deliveries.

Events of one producer may be applied in another order than they happened: retention appends copies of needed events. So
an event never undoes a later one: epochs and committed sequences only rise.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, final

import trio

from martlet.records.layout import RecordView
from martlet.runtime.steps import Budget, Steps, WaitingSteps
from martlet.state import NOTHING, Pages, pack_rows, unpack_rows
from martlet_tx.external.journal_codec import (
    EVENTS_TOPIC,
    EventKind,
    Key,
    Place,
    StagedChunk,
    StagedRecord,
    decode_event,
    encode_event,
)

__all__ = [
    "NO_VOTE",
    "UNKNOWN",
    "DeliveryProgress",
    "ExternalState",
    "PartKey",
    "ProducerState",
    "StagedPart",
    "Vote",
]

FORMAT: Final = 2
NAME: Final = "tx-external"
# Chunks to remove in one call of `apply`; each takes 1 us.
CLEANED: Final = 500
# The rows of a snapshot.
PRODUCER, PART, CHUNK, DELIVERY, HOUR = range(5)

PartKey = tuple[int, str]  # sequence and name


class Vote(NamedTuple):
    """The parts that a run has prepared to commit: ``parts`` are names and numbers of chunks, kept for later runs.

    Votes are ordered, first by epoch: the later one counts. Sequence -1 means that no part is prepared. ``content`` is
    the digest that the run has sent.
    """

    epoch: int = 0
    sequence: int = -1
    parts: tuple[tuple[str, int], ...] = ()
    content: str = ""

    def later(self, known: "Vote") -> "Vote":
        """Return this vote unless *known* is later."""
        return known if known[:2] > self[:2] else self


NO_VOTE: Final = Vote()


class ProducerState(NamedTuple):
    """The state of one producer.

    Attributes:
      epoch: the epoch of its newest run; 0 if it never began one.
      runs: its last runs, the newest last.
      committed: its last committed sequence, -1 if none.
      hour: the time of its last use, in hours of operation of the broker.
      noted_at: the log position of the oldest event needed for this state.
      began_ms: the time at which its newest run began, by the client's clock; 0 if unknown.
      brokers: the sorted names of all brokers that it may write to.
      vote: the prepared parts; over once they, or a later sequence, are committed.
      is_ended: whether its last commit was marked as the last one.
      content: the digest in its last commit.
    """

    epoch: int = 0
    runs: tuple[str, ...] = ()
    committed: int = -1
    hour: int = 0
    noted_at: int = NOTHING
    began_ms: int = 0
    brokers: tuple[str, ...] = ()
    vote: Vote = NO_VOTE
    is_ended: bool = False
    content: str = ""

    @property
    def prepared(self) -> int:
        """The sequence that is prepared but not committed, -1 if none."""
        return self.vote.sequence if self.vote.sequence > self.committed else -1

    def prepared_names(self) -> frozenset[str]:
        """Return the names of the parts that are prepared."""
        return frozenset([name for name, _ in self.vote.parts]) if self.prepared >= 0 else frozenset()

    def event(self, key: Key, hour: int) -> bytes:
        """Return the event with this state of the producer *key*, which was last used in *hour*."""
        head = self.epoch, self.runs, self.committed, hour
        later_fields = self.began_ms, self.brokers, self.vote, self.is_ended, self.content
        return encode_event(EventKind.STATE, *key, *head, *later_fields)

    def merged(self, event_state: "ProducerState") -> "ProducerState":
        """Return this state merged with *event_state*, from an event that may be a copy of an older one."""
        newer = event_state if event_state.epoch >= self.epoch else self
        ended = event_state if event_state.committed >= self.committed else self
        return event_state._replace(
            epoch=newer.epoch,
            runs=newer.runs,
            began_ms=newer.began_ms,
            committed=ended.committed,
            is_ended=ended.is_ended,
            content=ended.content,
            hour=max(event_state.hour, self.hour),
            brokers=tuple(sorted({*event_state.brokers, *self.brokers})),
            vote=event_state.vote.later(self.vote),
        )


UNKNOWN: Final = ProducerState()


class StagedPart(NamedTuple):
    """A staged part: its serial number, and its chunks until now."""

    serial: int
    epoch: int
    chunks: int
    messages: int
    size: int
    topics: frozenset[str]


class DeliveryProgress(NamedTuple):
    """The progress of an unfinished delivery; ``parts`` are names and numbers of chunks."""

    sequence: int
    epoch: int
    parts: tuple[tuple[str, int], ...]
    place: Place
    noted_at: int


@final
class ExternalState:
    """The state of all external transactions.

    Attributes:
      of_identity: the number of producers of each identity.
      next: the offset after the last event that was applied.
      applied: tasks that wait for an event to be applied.
      is_stopped: whether no further event is applied, because the broker stops or the plugin has failed.
    """

    def __init__(self) -> None:
        self.name = NAME
        self.topics = frozenset((EVENTS_TOPIC,))
        # Appends needed records before a log position again; set by the owner of the journal.
        self.move: Callable[[int], WaitingSteps[None]] | None = None
        self.applied = trio.lowlevel.ParkingLot()
        self.is_stopped = False
        self.next = 0
        self._clear()

    def _clear(self) -> None:
        self.producers: Pages[Key, ProducerState] = Pages()  # in the order of `ProducerState.noted_at`
        self.parts: Pages[tuple[Key, PartKey], StagedPart] = Pages()
        self.of_identity: dict[str, int] = {}
        # By the serial number of the part and the number of the chunk; in log order.
        self.chunks: Pages[tuple[int, int], StagedChunk] = Pages()
        self.deliveries: dict[Key, DeliveryProgress] = {}
        self.of_producer: dict[Key, dict[PartKey, None]] = {}
        self.hour = 0
        self.hour_noted_at = NOTHING
        self.messages = self.size = 0
        # (messages, bytes) of each transaction.
        self.totals: dict[tuple[Key, int], tuple[int, int]] = {}
        self._serial = 0
        # (serial number, number of chunks) of dropped parts whose chunks are not removed yet.
        self._gone: list[tuple[int, int]] = []

    def held(self) -> int:
        return self.messages

    def stop(self) -> None:
        """Wake all tasks that wait for an event: no further event is applied."""
        self.is_stopped = True
        self.applied.unpark_all()

    def parts_of(self, key: Key, sequence: int | None = None) -> Iterator[tuple[PartKey, StagedPart]]:
        """Yield the parts of a producer, or of one of its transactions."""
        for part_key in list(self.of_producer.get(key, ())):
            if sequence is None or part_key[0] == sequence:
                yield part_key, self.parts[key, part_key]

    # ---- events

    def apply(self, records: Sequence[RecordView]) -> None:
        for record in records:
            kind, *items = decode_event(record.body)
            self._apply(kind, items, record.position)
            self.next = record.queue_offset + 1
        self._clean(CLEANED)
        self.applied.unpark_all()

    def _apply(self, kind: int, items: list[Any], position: int) -> None:
        if kind == EventKind.HOUR:
            self.hour, self.hour_noted_at = max(self.hour, items[0]), position
            return
        key, count_before = (items[0], items[1]), len(self.producers)
        if kind == EventKind.STATE:
            self._apply_state(key, _producer(items[2:6], position, items[6:]))
        elif kind == EventKind.STAGED:
            self._apply_staged(key, position, *items[2:])
        elif kind == EventKind.COMMIT:
            self._apply_commit(key, position, *items[2:])
        elif kind == EventKind.PROGRESS:
            self._apply_progress(key, *items[2:])
        elif kind == EventKind.DROPPED:
            self._drop(key, [(items[2], part) for part in items[3]])
        elif kind == EventKind.FORGOTTEN:
            self._forget_producer(key)
        elif kind == EventKind.PREPARED:
            self._apply_prepared(key, position, *items[2:])
        self._count_producers(key[0], len(self.producers) - count_before)

    def _count_producers(self, identity: str, more: int) -> None:
        if more:
            count = self.of_identity[identity] = self.of_identity.get(identity, 0) + more
            if not count:
                del self.of_identity[identity]

    def _apply_state(self, key: Key, event_state: ProducerState) -> None:
        producer = self.producers.get(key)
        if producer is None:
            self.producers[key] = event_state
        else:
            merged = producer.merged(event_state)
            if merged == event_state:
                del self.producers[key]  # this event has the whole state
                self.producers[key] = event_state
            else:  # a copy that was made before another event was applied
                self.producers[key] = merged._replace(noted_at=producer.noted_at)
        self._drop_stale(key, self.producers[key])

    def _apply_prepared(
        self,
        key: Key,
        position: int,
        sequence: int,
        epoch: int,
        parts: list[tuple[str, int]],
        hour: int,
        is_last: bool,
        content: str = "",
    ) -> None:
        old_state = self.producers.get(key, ProducerState(epoch, noted_at=position))
        vote = Vote(epoch, sequence, tuple([(name, chunks) for name, chunks in parts]), content)
        hour, is_ended = max(hour, old_state.hour), old_state.is_ended or is_last
        new_state = self.producers[key] = old_state._replace(
            vote=vote.later(old_state.vote), hour=hour, is_ended=is_ended
        )
        if old_state.vote[:2] < new_state.vote[:2]:  # the new vote replaces one that was never committed
            self._drop(key, [(old_state.prepared, name) for name in old_state.prepared_names()])

    def _apply_staged(
        self,
        key: Key,
        position: int,
        sequence: int,
        name: str,
        epoch: int,
        number: int,
        records: list[list[int]],
        topics: list[str],
        moved: bool,
    ) -> None:
        part_key = (sequence, name)
        part = self.parts.get((key, part_key))
        chunk = StagedChunk(position, tuple([StagedRecord(*record) for record in records]))
        if part is not None and (part.serial, number) in self.chunks:
            if moved:
                del self.chunks[part.serial, number]
                self.chunks[part.serial, number] = chunk
            return  # else the chunk was staged twice, and the first one counts
        if part is None:
            if not self._may_be_delivered(key, sequence, name, epoch):
                return
            self._serial += 1
            part = StagedPart(self._serial, epoch, 0, 0, 0, frozenset())
            self.of_producer.setdefault(key, {})[part_key] = None
        messages = sum([each.messages for each in chunk.records])
        size = sum([each.size for each in chunk.records])
        self.parts[key, part_key] = StagedPart(
            part.serial,
            part.epoch,
            max(part.chunks, number + 1),
            part.messages + messages,
            part.size + size,
            part.topics.union(topics),
        )
        self._count(key, sequence, messages, size)
        self.chunks[part.serial, number] = chunk

    def _count(self, key: Key, sequence: int, messages: int, size: int) -> None:
        self.messages += messages
        self.size += size
        total = self.totals.get((key, sequence), (0, 0))
        self.totals[key, sequence] = total[0] + messages, total[1] + size
        if not total[0] + messages:
            del self.totals[key, sequence]

    def _may_be_delivered(self, key: Key, sequence: int, name: str, epoch: int) -> bool:
        """Return whether a new part may still be delivered."""
        delivery = self.deliveries.get(key)
        if delivery is not None and delivery.sequence == sequence:
            return _is_undelivered(delivery, name)
        producer = self.producers.get(key)
        if producer is None:
            return True
        is_held = sequence == producer.prepared and name in producer.prepared_names()
        return is_held or (epoch >= producer.epoch and sequence > producer.committed)

    def _apply_commit(
        self,
        key: Key,
        position: int,
        sequence: int,
        epoch: int,
        parts: list[tuple[str, int]],
        place: list[int],
        hour: int,
        is_copy: bool,
        is_last: bool = False,
        content: str = "",
    ) -> None:
        producer = self.producers.get(key)
        if producer is not None and sequence <= producer.committed and not is_copy:
            return
        event_state = ProducerState(epoch, (), sequence, hour, position, is_ended=is_last, content=content)
        if producer is None:
            self.producers[key] = event_state
        elif (
            not producer.epoch
            and producer.merged(event_state)._replace(vote=NO_VOTE) == event_state
            and producer.vote.sequence <= sequence
        ):
            del self.producers[key]  # this event has the whole state
            self.producers[key] = event_state
        else:
            newer = event_state if sequence > producer.committed else producer
            committed, hour = max(sequence, producer.committed), max(hour, producer.hour)
            vote = producer.vote if producer.vote.sequence > committed else producer.vote._replace(parts=())
            producer = producer._replace(is_ended=newer.is_ended, content=newer.content)
            self.producers[key] = producer._replace(committed=committed, hour=hour, vote=vote)
        part_chunks = tuple([(name, chunks) for name, chunks in parts])
        delivery = self.deliveries.get(key)
        start_place = delivery.place if delivery is not None and delivery.sequence == sequence else (0, 0, 0)
        self.deliveries[key] = DeliveryProgress(sequence, epoch, part_chunks, start_place, position)
        self._apply_progress(key, sequence, place)
        self._drop_stale(key, self.producers[key])

    def _apply_progress(self, key: Key, sequence: int, place: list[int]) -> None:
        known = self.deliveries.get(key)
        if known is None or known.sequence != sequence:
            return
        reached = max(known.place, (place[0], place[1], place[2]))
        self._drop_delivered(key, known, reached)
        if reached[0] >= len(known.parts):
            del self.deliveries[key]
        else:
            self.deliveries[key] = known._replace(place=reached)

    def _drop_delivered(self, key: Key, delivery: DeliveryProgress, reached: Place) -> None:
        """Drop the chunks delivered between the place of *delivery* and *reached*."""
        part_number, first_chunk = delivery.place[0], delivery.place[1]
        if part_number < reached[0]:
            self._drop(key, [(delivery.sequence, name) for name, _ in delivery.parts[part_number : reached[0]]])
            part_number, first_chunk = reached[0], 0
        if part_number >= len(delivery.parts):
            return
        part = self.parts.get((key, (delivery.sequence, delivery.parts[part_number][0])))
        if part is not None:
            for chunk in range(first_chunk, reached[1]):
                self.chunks.pop((part.serial, chunk))

    def _drop_stale(self, key: Key, producer: ProducerState) -> None:
        """Drop the parts of older runs, and parts that a commit did not name."""
        delivery = self.deliveries.get(key)
        delivered_names = {name for name, _ in delivery.parts} if delivery is not None else frozenset[str]()
        delivered_sequence = delivery.sequence if delivery is not None else -1
        prepared, prepared_names = producer.prepared, producer.prepared_names()
        stale: list[PartKey] = []
        for part_key in self.of_producer.get(key, ()):
            sequence, name = part_key
            if sequence == delivered_sequence and name in delivered_names:
                continue
            if sequence <= producer.committed or (
                not (sequence == prepared and name in prepared_names)
                and self.parts[key, part_key].epoch < producer.epoch
            ):
                stale.append(part_key)
        self._drop(key, stale)

    def _drop(self, key: Key, part_keys: Iterable[PartKey]) -> None:
        """Drop the existing parts of *part_keys*; 4,000 parts take about 5 ms."""
        of_producer = self.of_producer.get(key)
        if of_producer is None:
            return
        parts, gone = self.parts, self._gone
        counts: dict[int, tuple[int, int]] = {}
        for part_key in part_keys:
            part = parts.pop((key, part_key))
            if part is not None:
                del of_producer[part_key]
                gone.append((part.serial, part.chunks))
                messages, size = counts.get(part_key[0], (0, 0))
                counts[part_key[0]] = messages + part.messages, size + part.size
        if not of_producer:
            del self.of_producer[key]
        for sequence, (messages, size) in counts.items():
            self._count(key, sequence, -messages, -size)

    def _clean(self, count: int) -> None:
        """Remove up to *count* chunks of dropped parts: all of them may be too many for one call of `apply`."""
        while self._gone and count > 0:
            serial, chunks = self._gone.pop()
            for number in range(chunks - 1, max(chunks - count, 0) - 1, -1):
                self.chunks.pop((serial, number))
            if chunks > count:
                self._gone.append((serial, chunks - count))
            count -= chunks

    def _forget_producer(self, key: Key) -> None:
        if key not in self.deliveries:
            self.producers.pop(key)

    # ---- snapshots

    def freeze(self) -> Steps[Sequence[bytes]]:
        head = [(HOUR, self.hour, self.hour_noted_at, self.next, self._serial)]
        deliveries = [(DELIVERY, key, each) for key, each in self.deliveries.items()]
        producers, parts, chunks = self.producers.freeze(), self.parts.freeze(), self.chunks.freeze()
        rows = chain(
            head,
            deliveries,
            ((PRODUCER, key, each) for key, each in producers),
            ((PART, key, each[:5], list(each.topics)) for key, each in parts),
            ((CHUNK, key, each) for key, each in chunks),
        )
        return pack_rows(FORMAT, rows)

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        self._clear()
        self.next = 0
        budget, serials = Budget(), set[int]()
        for kind, *items in unpack_rows(FORMAT, data):
            self._restore_row(kind, items, serials)
            if budget.is_over():
                yield

    def _restore_row(self, kind: int, items: list[Any], serials: set[int]) -> None:
        if kind == HOUR:
            self.hour, self.hour_noted_at, self.next, self._serial = items
        elif kind == DELIVERY:
            key, (sequence, epoch, parts, place, noted_at) = items
            part_chunks = tuple([(name, chunks) for name, chunks in parts])
            self.deliveries[key[0], key[1]] = DeliveryProgress(sequence, epoch, part_chunks, tuple(place), noted_at)
        elif kind == PRODUCER:
            key, (epoch, runs, committed, hour, noted_at, *later_fields) = items
            self.producers[key[0], key[1]] = _producer((epoch, runs, committed, hour), noted_at, later_fields)
            self._count_producers(key[0], 1)
        elif kind == PART:
            (name, (sequence, part)), (serial, epoch, chunks, messages, size), topics = items
            staged_part = StagedPart(serial, epoch, chunks, messages, size, frozenset(topics))
            key = (name[0], name[1])
            self.parts[key, (sequence, part)] = staged_part
            self.of_producer.setdefault(key, {})[sequence, part] = None
            self._count(key, sequence, staged_part.messages, staged_part.size)
            serials.add(serial)
        elif items[0][0] in serials:
            (serial, number), (position, records) = items
            self.chunks[serial, number] = StagedChunk(position, tuple([StagedRecord(*record) for record in records]))

    def forget(self, topic: str) -> None:
        self._clear()

    def floor(self) -> int:
        oldest = [self.hour_noted_at]
        for producer in self.producers.values():
            oldest.append(producer.noted_at)
            break
        for chunk in self.chunks.values():
            oldest.append(chunk.position)
            break
        return min([*oldest, *[each.noted_at for each in self.deliveries.values()]])

    def roll(self, start: int, end: int) -> WaitingSteps[None]:
        assert self.move is not None
        return self.move(end)


def _is_undelivered(delivery: DeliveryProgress, name: str) -> bool:
    """Return whether part *name* has messages that are still to be delivered."""
    return name in [each for each, _ in delivery.parts[delivery.place[0] :]]


def _producer(head: Sequence[Any], noted_at: int, later_fields: Sequence[Any]) -> ProducerState:
    """Return the state of a producer from an event or a row of a snapshot."""
    epoch, runs, committed, hour = head
    producer = ProducerState(epoch, tuple(runs), committed, hour, noted_at)
    if not later_fields:
        return producer
    # earlier versions have fewer fields
    began_ms, brokers, (vote_epoch, sequence, parts, *vote_content), is_ended, *content = later_fields
    vote = Vote(vote_epoch, sequence, tuple([(name, chunks) for name, chunks in parts]), *vote_content)
    producer = producer._replace(began_ms=began_ms, brokers=tuple(brokers), vote=vote, is_ended=is_ended)
    return producer._replace(content=content[0]) if content else producer
