"""Fan-out: records at the tail of a queue are encoded once for all subscribers.

A range of a queue in one encoding is the same bytes for every reader, so the first reader encodes it and the others
send slices of the same object. Only ranges that several readers want are kept, a few per queue and a limited number of
bytes in total; all others are read from the log again.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Final, final

from martlet.contracts import Buffer
from martlet.delivery.routing.selection import Selection
from martlet.records.codec import decode_record
from martlet.records.layout import HEAD_BYTES, MAGIC_V1, OUTLINE, PLACE, WIDE_HOSTS
from martlet.runtime.native import native
from martlet.store import Queue, ReadResult

__all__ = ["Batch", "Encoding", "Encodings", "SharedTail", "encode_result", "parts", "record_places"]

# Batches kept per tail. Readers at the tail are at most a few commits apart; slower readers read the log.
BATCHES_A_TAIL: Final = 8


@final
class Encoding:
    """A protocol's encoding of records for its clients.

    Args:
      name: identifies the encoding: subscribers whose encodings have the same name share encoded bytes.
      encode: takes consecutive records in stored form, and returns one frame for each, in order; a frame may be
        empty. `parts` splits records into their fields.
    """

    __slots__ = ("encode", "name")

    def __init__(self, name: str, encode: Callable[[Buffer], list[bytes]]) -> None:
        self.name = name
        self.encode = encode


@final
class Batch:
    """The selected messages of one queue from *start* up to *next*, encoded."""

    __slots__ = ("_data", "_frames", "_positions", "_records", "ends", "next", "offsets", "start")

    def __init__(
        self,
        start: int,
        next_offset: int,
        frames: list[bytes],
        offsets: Sequence[int],
        records: Buffer = b"",
    ) -> None:
        self.start = start
        self.next = next_offset
        self.offsets = offsets
        self._records = records
        self._positions: Sequence[int] | None = None
        self._frames: list[bytes] | None = frames  # frames or ``_data``; each is made from the other when needed
        self._data: bytes | None = None
        self.ends = list(accumulate(map(len, frames)))

    @property
    def data(self) -> bytes:
        """All frames, one after the other."""
        if self._data is None:
            self._data, self._frames = b"".join(self._frames or ()), None
        return self._data

    @property
    def frames(self) -> list[bytes]:
        """The frame of each message."""
        if self._frames is None:
            data = self._data or b""
            self._frames = [data[begin:end] for begin, end in pairwise([0, *self.ends])]
            self._data = None
        return self._frames

    @property
    def size(self) -> int:
        """The size of all frames."""
        return self.ends[-1] if self.ends else 0

    @property
    def positions(self) -> Sequence[int]:
        """The log position of each message."""
        if self._positions is None:
            self._positions = native(record_places)(self._records)[1]
            self._records = b""
        return self._positions

    def chosen(self, indexes: Sequence[int]) -> "Batch":
        """Return only the messages at *indexes*."""
        frames, positions = self.frames, self.positions
        chosen = Batch(
            self.start, self.next, [frames[index] for index in indexes], [self.offsets[index] for index in indexes]
        )
        chosen._positions = [positions[index] for index in indexes]
        return chosen

    def end_of(self, count: int) -> int:
        """Return the offset after the first *count* messages."""
        return self.offsets[count] if count < len(self.offsets) else self.next

    def forget_records(self) -> None:
        """Drop the references to the log's memory."""
        self._positions = self.positions

    def index(self, offset: int) -> int:
        """Return the index of the first message in the batch from *offset* on."""
        return 0 if offset <= self.start else bisect_left(self.offsets, offset)

    def span(self, offset: int, count_max: int, budget_bytes: int) -> tuple[int, int]:
        """Return (count, next offset) of the messages from *offset* on.

        Stops after the message that crosses *budget_bytes*, so one big message always gets through.
        """
        ends = self.ends
        total = len(ends)
        first = self.index(offset)
        if first >= total:
            return 0, self.next
        begin = ends[first - 1] if first else 0
        last = min(first + count_max, total)
        if ends[last - 1] - begin > budget_bytes:
            last = min(last, max(first, bisect_right(ends, begin + budget_bytes, first, last)) + 1)
        return last - first, self.next if last == total else self.offsets[last]

    def cut(self, first: int, count: int) -> Buffer:
        """Return the frames of *count* messages from index *first* on, one after the other."""
        data, ends = self.data, self.ends
        if count == len(ends) or not count:
            return data if count else b""
        return memoryview(data)[ends[first - 1] if first else 0 : ends[first + count - 1]]


def parts(piece: Buffer) -> list[tuple[int, int, int, bytes, bytes]]:
    """Return (queue id, queue offset, sysFlag, body, properties) of each record in *piece*.

    For the function of an `Encoding`: much faster than decoding whole records. Bit 0x1 of sysFlag means that the
    producer compressed the body, and the bits 0x700 tell how: 0 or 0x300 is ZLIB, 0x100 LZ4 (frame), 0x200 ZSTD.
    """
    data = bytes(piece)
    fields: list[tuple[int, int, int, bytes, bytes]] = []
    at, end = 0, len(data)
    unpack = OUTLINE.unpack_from
    while at < end:
        size, magic, queue_id, offset, flags, body_bytes = unpack(data, at)
        behind = at + size
        if flags & WIDE_HOSTS or magic != MAGIC_V1:
            # with IPv6 hosts body_bytes has another offset, and in V2 the topic's length is wider
            record = decode_record(data, at, check_body=False)
            fields.append((queue_id, offset, flags, record.body, record.properties))
        else:
            body_end = at + HEAD_BYTES + body_bytes
            properties_at = body_end + 3 + data[body_end]
            fields.append((queue_id, offset, flags, data[at + HEAD_BYTES : body_end], data[properties_at:behind]))
        at = behind
    return fields


def encode_result(result: ReadResult, start: int, encoding: Encoding) -> Batch:
    """Return the result of a read from *start* in *encoding*."""
    pieces = result.pieces
    if not pieces:
        return Batch(start, result.next_offset, [], ())
    # Records that other queues' records separate in the log are many small pieces.
    records = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    frames = encoding.encode(records)
    dense = range(start, result.next_offset)
    offsets = dense if result.count == len(dense) else native(record_places)(records)[0]
    return Batch(start, result.next_offset, frames, offsets, records)


def record_places(records: Buffer) -> tuple[list[int], list[int]]:
    """Return the queue offset and the log position of each of *records*.

    The native kernel has this function as well; see `martlet.runtime.native`.
    """
    offsets: list[int] = []
    positions: list[int] = []
    unpack = PLACE.unpack_from
    at, end = 0, len(records)
    while at < end:
        size, offset, position = unpack(records, at)
        offsets.append(offset)
        positions.append(position)
        at += size
    return offsets, positions


@final
class SharedTail:
    """Encoded batches shared by readers of one queue with the same selection and encoding."""

    __slots__ = ("_cache", "batches", "encoding", "key", "readers", "selection")

    def __init__(self, cache: "Encodings", key: "Key", encoding: Encoding, selection: Selection) -> None:
        self._cache = cache
        self.key = key
        self.encoding = encoding
        self.selection = selection
        self.readers = 0
        self.batches: list[Batch] = []

    def find(self, offset: int) -> Batch | None:
        """Return the cached batch that contains *offset*; None if there is none."""
        for batch in self.batches:
            if batch.start <= offset < batch.next:
                return batch
        return None

    def encode(self, result: ReadResult, start: int) -> Batch:
        """Encode the result of a read from *start*, and keep it if there are other readers."""
        batch = encode_result(result, start, self.encoding)
        if self.readers > 1 and batch.size:
            self._cache.keep(self, batch)
        return batch


Key = tuple[Queue, str, str]


@final
class Encodings:
    """All shared tails of all queues; limits the total size of their batches."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._tails: dict[Key, SharedTail] = {}
        self._kept: dict[Batch, SharedTail] = {}  # oldest first
        self.kept_bytes = 0

    def join(self, queue: Queue, encoding: Encoding, selection: Selection) -> SharedTail:
        """Return the shared tail and count one more reader, which must call `leave` later."""
        key = (queue, encoding.name, selection.name)
        tail = self._tails.get(key)
        if tail is None:
            tail = self._tails[key] = SharedTail(self, key, encoding, selection)
        tail.readers += 1
        return tail

    def leave(self, tail: SharedTail) -> None:
        tail.readers -= 1
        if tail.readers < 2:
            for batch in list(tail.batches):
                self._drop(batch)
        if not tail.readers:
            del self._tails[tail.key]

    def keep(self, tail: SharedTail, batch: Batch) -> None:
        """Cache *batch*; drop the oldest batches if there is not enough room."""
        batch.forget_records()
        if len(tail.batches) >= BATCHES_A_TAIL:
            self._drop(tail.batches[-1])
        tail.batches.insert(0, batch)
        self._kept[batch] = tail
        self.kept_bytes += batch.size
        while self.kept_bytes > self._limit_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, batch: Batch) -> None:
        self._kept.pop(batch).batches.remove(batch)
        self.kept_bytes -= batch.size
