"""Chooses the queue of each row, and makes requests of rows.

A row goes to the queue that it names; else, with a key, to the queue that the key's hash chooses, so that messages of
one key keep their order; else to any queue. Rows of one queue travel together.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, final
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from martlet_columns.records import Integers
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.errors import WriteError
from martlet_spark.write.encode import Encoder

__all__ = ["CHUNK_MESSAGES_MAX", "BatchBody", "QueueTurns", "RowTarget", "Targets"]

# A batch's answer has 33 bytes per message; four answers fit the buffers of a socket.
CHUNK_MESSAGES_MAX: Final = 4096
# Bytes to encode at once, about: more is slower, as it does not fit the processor's cache.
ENCODED_BYTES: Final = 8 << 20

QueuesOf: TypeAlias = Callable[[str], Sequence[MessageQueue]]


class RowTarget(NamedTuple):
    """The target of rows: one queue of *broker*, any queue of *broker* (-1), or any queue of any broker (no broker).

    Messages with *timed* are delivered later.
    """

    topic: str
    broker: str = ""
    queue_id: int = -1
    timed: bool = False


@final
@dataclass(frozen=True, slots=True)
class BatchBody:
    """The body of a batch send: *count* messages for one place. With *is_over*, a single message is too large."""

    place: RowTarget
    body: bytes
    count: int
    is_over: bool = False


@final
class QueueTurns:
    """Chooses the queues of each topic in turn."""

    def __init__(self, queues_of: QueuesOf) -> None:
        self.queues_of = queues_of
        self._turn = random.randrange(1 << 16)  # so that tasks which start together do not all begin with queue 0

    def next_queue(self, place: RowTarget, avoided: Sequence[str] = ()) -> MessageQueue:
        """Return the queue of *place*, or the next one that it allows; if possible not on a broker of *avoided*."""
        if place.queue_id >= 0:
            return MessageQueue(place.topic, place.broker, place.queue_id)
        queues = [queue for queue in self.queues_of(place.topic) if place.broker in ("", queue.broker_name)]
        if not queues:
            raise WriteError(f"topic {place.topic!r} has no queue on broker {place.broker!r} any more; create it there")
        self._turn += 1
        queues = [queue for queue in queues if queue.broker_name not in avoided] or queues
        return queues[self._turn % len(queues)]


@final
class Targets:
    """Divides rows into chunks.

    *topic* replaces the column. *allows_empty* is an argument of `Encoder`.
    """

    def __init__(self, queues_of: QueuesOf, topic: str, chunk_bytes: int, *, allows_empty: bool = False) -> None:
        self._queues_of = queues_of
        self._topic = topic
        self._chunk_bytes = chunk_bytes
        self._encoder = Encoder(allows_empty=allows_empty)
        self._places: list[RowTarget] = []
        self._numbers: dict[RowTarget, int] = {}

    def chunks(self, rows: Any) -> Iterator[BatchBody]:
        """Yield the messages of *rows*, a RecordBatch with columns of the sink; in order within each queue.

        Raises:
          WriteError: a row cannot be a message, or its queue does not exist.
        """
        step = max(len(rows) * ENCODED_BYTES // max(rows.nbytes, 1), 1)
        for start in range(0, len(rows), step):
            yield from self._chunks(rows.slice(start, step))

    def _chunks(self, rows: Any) -> Iterator[BatchBody]:
        numbers = self._places_of(rows)
        if (numbers != numbers[0]).any():
            order = np.argsort(numbers, kind="stable")
            rows, numbers = rows.take(pa.array(order)), numbers[order]
        encoded_rows = self._encoder.encode(rows)
        ends = [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)]
        start = 0
        for end in ends:
            place = self._places[numbers[start]]
            while start < end:
                limit = encoded_rows.bounds[start] + self._chunk_bytes
                chunk_end = int(np.searchsorted(encoded_rows.bounds, limit, "right")) - 1
                chunk_end = min(max(chunk_end, start + 1), start + CHUNK_MESSAGES_MAX, end)
                yield BatchBody(
                    place,
                    encoded_rows.slice(start, chunk_end),
                    chunk_end - start,
                    encoded_rows.bounds[chunk_end] > limit,
                )
                start = chunk_end

    def _number(self, place: RowTarget) -> int:
        if place not in self._numbers:
            self._numbers[place] = len(self._places)
            self._places.append(place)
        return self._numbers[place]

    def _places_of(self, rows: Any) -> Integers:
        """Return the number of each row's place."""
        found = np.zeros(len(rows), np.int64)
        for topic, at in self._topics_of(rows):
            self._place(topic, rows if len(at) == len(rows) else rows.take(pa.array(at)), at, found)
        timed = _timed_rows(rows)
        if timed.any():
            numbers, back = np.unique(found[timed], return_inverse=True)
            later = [self._number(self._places[number]._replace(timed=True)) for number in numbers.tolist()]
            found[timed] = np.array(later, np.int64)[back]
        return found

    def _topics_of(self, rows: Any) -> list[tuple[str, Integers]]:
        """Return the topics of *rows*, each with the numbers of its rows."""
        if self._topic:
            return [(self._topic, np.arange(len(rows)))]
        codes = rows.column("topic").cast(pa.string()).dictionary_encode()
        names = codes.dictionary.to_pylist()
        if codes.null_count or "" in names:
            raise WriteError("a row has no topic (null or empty); fill the column topic, or set the option topic")
        if len(names) == 1:
            return [(names[0], np.arange(len(rows)))]
        numbers = np.asarray(codes.indices)
        return [(name, np.flatnonzero(numbers == number)) for number, name in enumerate(names)]

    def _place(self, topic: str, rows: Any, row_indexes: Integers, place_numbers: Integers) -> None:
        """Write the place numbers of *rows*, all of this topic, to *place_numbers* at the indexes *row_indexes*."""
        queues, names = self._queues_of(topic), rows.schema.names
        place_numbers[row_indexes] = self._number(RowTarget(topic))
        if "key" in names:
            keys = rows.column("key").cast(pa.binary())
            has_key = np.asarray(pc.greater(pc.fill_null(pc.binary_length(keys), 0), 0))
            if has_key.any():
                queue_numbers = np.array([self._number(RowTarget(topic, *_place_of(queue))) for queue in queues])
                place_numbers[row_indexes[has_key]] = queue_numbers[
                    _hashes(keys.filter(pa.array(has_key))) % len(queues)
                ]
        if "queue" in names:
            self._place_named(topic, rows, row_indexes, place_numbers, queues)

    def _place_named(
        self, topic: str, rows: Any, row_indexes: Integers, place_numbers: Integers, queues: Sequence[MessageQueue]
    ) -> None:
        """Like `_place`, for the rows that name their queue."""
        has_queue = rows.column("queue").is_valid()
        if not has_queue.true_count:
            return
        rows_with_queue = rows.filter(has_queue)
        ids = np.asarray(rows_with_queue.column("queue"))
        if "broker" in rows.schema.names:
            codes = rows_with_queue.column("broker").fill_null("").dictionary_encode()
            brokers, numbers = codes.dictionary.to_pylist(), np.asarray(codes.indices)
        else:
            brokers, numbers = [""], np.zeros(len(ids), np.int64)
        pairs, back = np.unique(np.stack((numbers, ids)), axis=1, return_inverse=True)
        places = [_named_queue(topic, brokers[number], queue_id, queues) for number, queue_id in pairs.T.tolist()]
        place_numbers[row_indexes[np.asarray(has_queue)]] = np.array([self._number(place) for place in places])[
            back.reshape(-1)
        ]


def _timed_rows(rows: Any) -> Any:
    """Return a mask of the rows that are delivered later."""
    found = np.zeros(len(rows), bool)
    if "deliver_at" in rows.schema.names:
        found |= np.asarray(rows.column("deliver_at").is_valid())
    if "delay_level" in rows.schema.names:
        found |= np.asarray(pc.fill_null(rows.column("delay_level"), 0)) > 0
    return found


def _place_of(queue: MessageQueue) -> tuple[str, int]:
    return queue.broker_name, queue.queue_id


def _named_queue(topic: str, broker: str, queue_id: int, queues: Sequence[MessageQueue]) -> RowTarget:
    """Return the queue of *topic* with this number; raises `WriteError` if there is none, or one on several brokers."""
    brokers = sorted({queue.broker_name for queue in queues})
    if not broker and len(brokers) > 1:
        text = f"queue {queue_id} of topic {topic!r} is on several brokers, {', '.join(brokers)}"
        raise WriteError(f"{text}; name one in the column broker")
    place = RowTarget(topic, broker or brokers[0], queue_id)
    if MessageQueue(topic, place.broker, queue_id) not in queues:
        has = sum(queue.broker_name == place.broker for queue in queues)
        text = f"topic {topic!r} has no queue {queue_id} on broker {place.broker!r}"
        raise WriteError(f"{text}; it has {has}, numbered from 0" if has else f"{text}; it is on {', '.join(brokers)}")
    return place


def _hashes(texts: Any) -> Integers:
    """Return the hash of each element, as in `martlet_client.select_by_hash`."""
    codes = texts.dictionary_encode()
    hashes = np.array([crc32(text) for text in codes.dictionary.to_pylist()], np.int64)
    found: Integers = hashes[np.asarray(codes.indices)]
    return found
