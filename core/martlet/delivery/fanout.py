"""Encode once, send to many: what subscribers of one queue share at its tail.

A range of a queue in one encoding is the same bytes for everybody who reads it, so the
first who asks encodes it and the others send slices of the same object. Only what
several readers want is kept, a few ranges a queue and a bounded number of bytes in all;
everything else is read from the log again when somebody wants it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, final

from martlet.contracts import Buffer
from martlet.delivery.selection import Selection
from martlet.store import Queue, ReadResult
from martlet.store.codec import decode_record
from martlet.store.layout import HEAD_BYTES, MAGIC_V1, OUTLINE, PLACE, WIDE_HOSTS

__all__ = ["Batch", "Encoding", "Encodings", "SharedTail", "encode_result", "parts"]

# Readers at the tail are at most a few commits apart; who is further behind reads the log.
BATCHES_A_TAIL: Final = 8


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a protocol encodes records for its peers.

    Args:
      name: identifies the encoding: subscribers whose encodings have the same name share encoded bytes.
      encode: gets consecutive records as the log stores them, and returns one frame for each, in order; a frame
        may be empty. `parts` takes records apart.
    """

    name: str
    encode: Callable[[Buffer], list[bytes]]


@final
class Batch:
    """The selected messages of one queue from *start* to before *next*, encoded."""

    __slots__ = ("data", "ends", "next", "offsets", "positions", "start")

    def __init__(
        self,
        start: int,
        next_offset: int,
        frames: list[bytes],
        offsets: Sequence[int],
        positions: Sequence[int] = (),
    ) -> None:
        self.start = start
        self.next = next_offset
        self.offsets = offsets
        self.positions = positions
        self.data = b"".join(frames)
        self.ends = list(accumulate(map(len, frames)))

    def index(self, offset: int) -> int:
        """Which message of the batch is the first from *offset* on."""
        return 0 if offset <= self.start else bisect_left(self.offsets, offset)

    def cut(self, offset: int, count_max: int, budget_bytes: int) -> tuple[Buffer, int, int]:
        """Return (data, count, next offset) of what is there from *offset* on.

        Stops after the message that crosses *budget_bytes*, so one big message always gets through.
        """
        ends, offsets = self.ends, self.offsets
        total = len(ends)
        first = self.index(offset)
        if first >= total:
            return b"", 0, self.next
        begin = ends[first - 1] if first else 0
        last = min(first + count_max, total)
        if ends[last - 1] - begin > budget_bytes:
            last = min(last, max(first, bisect_right(ends, begin + budget_bytes, first, last)) + 1)
        if last == total:
            return (self.data if not first else memoryview(self.data)[begin:]), total - first, self.next
        return memoryview(self.data)[begin : ends[last - 1]], last - first, offsets[last]


def parts(piece: Buffer) -> list[tuple[int, int, int, bytes, bytes]]:
    """Return (queue id, queue offset, sysFlag, body, properties) of each record in *piece*.

    For the function of an `Encoding`: much faster than decoding whole records. Bit 0x1 of sysFlag says that the
    producer compressed the body, and the bits 0x700 say how: 0 or 0x300 is ZLIB, 0x100 LZ4 (frame), 0x200 ZSTD.
    """
    data = bytes(piece)
    found: list[tuple[int, int, int, bytes, bytes]] = []
    at, end = 0, len(data)
    unpack = OUTLINE.unpack_from
    while at < end:
        size, magic, queue_id, offset, flags, body_bytes = unpack(data, at)
        behind = at + size
        if flags & WIDE_HOSTS or magic != MAGIC_V1:
            # body_bytes stands elsewhere behind IPv6 hosts, and the topic's length is wider in V2
            record = decode_record(data, at, check_body=False)
            found.append((queue_id, offset, flags, record.body, record.properties))
        else:
            body_end = at + HEAD_BYTES + body_bytes
            properties_at = body_end + 3 + data[body_end]
            found.append((queue_id, offset, flags, data[at + HEAD_BYTES : body_end], data[properties_at:behind]))
        at = behind
    return found


def encode_result(result: ReadResult, start: int, encoding: Encoding) -> Batch:
    """Return what a read from *start* found, in *encoding*."""
    frames: list[bytes] = []
    for piece in result.pieces:
        frames += encoding.encode(piece)
    offsets, positions = _places(result.pieces)
    return Batch(start, result.next_offset, frames, offsets, positions)


def _places(pieces: list[Buffer]) -> tuple[list[int], list[int]]:
    """The queue offset and the log position of each record in *pieces*."""
    offsets: list[int] = []
    positions: list[int] = []
    unpack = PLACE.unpack_from
    for piece in pieces:
        at, end = 0, len(piece)
        while at < end:
            size, offset, position = unpack(piece, at)
            offsets.append(offset)
            positions.append(position)
            at += size
    return offsets, positions


@final
class SharedTail:
    """What readers of one queue share who want the same selection in the same encoding."""

    __slots__ = ("_cache", "batches", "encoding", "key", "readers", "selection")

    def __init__(self, cache: "Encodings", key: "Key", encoding: Encoding, selection: Selection) -> None:
        self._cache = cache
        self.key = key
        self.encoding = encoding
        self.selection = selection
        self.readers = 0
        self.batches: list[Batch] = []

    def find(self, offset: int) -> Batch | None:
        """The batch that goes on at *offset*, if somebody encoded it lately."""
        for batch in self.batches:
            if batch.start <= offset < batch.next:
                return batch
        return None

    def encode(self, result: ReadResult, start: int) -> Batch:
        """Encode what a read from *start* found, and keep it for the other readers if there are any."""
        batch = encode_result(result, start, self.encoding)
        if self.readers > 1 and batch.data:
            self._cache.keep(self, batch)
        return batch


Key = tuple[Queue, str, str]


@final
class Encodings:
    """All tails, and the bound on what they keep together."""

    __slots__ = ("_kept", "_limit_bytes", "_tails", "kept_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._tails: dict[Key, SharedTail] = {}
        self._kept: dict[Batch, SharedTail] = {}  # oldest first
        self.kept_bytes = 0

    def join(self, queue: Queue, encoding: Encoding, selection: Selection) -> SharedTail:
        """Return the tail for one more reader; it says `leave` when it goes."""
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
        """Remember *batch* while there is room; the oldest make room."""
        if len(tail.batches) >= BATCHES_A_TAIL:
            self._drop(tail.batches[-1])
        tail.batches.insert(0, batch)
        self._kept[batch] = tail
        self.kept_bytes += len(batch.data)
        while self.kept_bytes > self._limit_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, batch: Batch) -> None:
        self._kept.pop(batch).batches.remove(batch)
        self.kept_bytes -= len(batch.data)
