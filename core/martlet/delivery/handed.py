"""Frames that publishers hand on, so that subscribers get messages as they were received.

The frames of one read of a publisher stay together: whether a run consists of them is seen by comparing log positions,
many at a time.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, final

__all__ = ["HandedFrames"]


class Chunk(NamedTuple):
    """Messages that were handed on together; frame *i* of ``data`` ends before ``ends[i]``."""

    positions: list[int]
    data: bytes
    ends: Sequence[int]
    start: int  # of the first frame

    @property
    def size(self) -> int:
        return self.ends[-1] - self.start


@final
class HandedFrames:
    """What was handed on and is not routed yet, by encoding, in log order; ``size`` in bytes."""

    __slots__ = ("_chunks", "size")

    def __init__(self) -> None:
        self._chunks: dict[str, deque[Chunk]] = {}
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def add(self, encoding: str, positions: Sequence[int], data: bytes, ends: Sequence[int], start: int) -> None:
        """Keep the frames of messages at *positions*, which increase and are beyond those that were added before."""
        chunk = Chunk(list(positions), data, ends, start)
        self.size += chunk.size
        self._chunks.setdefault(encoding, deque()).append(chunk)

    def find(self, positions: list[int]) -> Iterator[tuple[str, bytes, list[int]]]:
        """Yield each encoding in which the messages at *positions*, which increase, were all handed on.

        With it come the frames, and the end of each.
        """
        for encoding, chunks in self._chunks.items():
            found = _joined(chunks, positions)
            if found is not None:
                yield encoding, *found

    def drop_before(self, position: int) -> None:
        """Drop chunks whose messages are all before *position*."""
        for encoding, chunks in list(self._chunks.items()):
            while chunks and chunks[0].positions[-1] < position:
                self.size -= chunks.popleft().size
            if not chunks:
                del self._chunks[encoding]

    def clear(self) -> None:
        """Drop everything."""
        self._chunks.clear()
        self.size = 0


def _joined(chunks: deque[Chunk], positions: list[int]) -> tuple[bytes, list[int]] | None:
    """Return the frames of the messages at *positions*, and their ends; None if some are missing."""
    pieces: list[bytes] = []
    ends: list[int] = []
    at, count, size = 0, len(positions), 0
    for own, data, own_ends, start in chunks:
        if at == count:
            break
        if own[-1] < positions[at]:
            continue
        first = bisect_left(own, positions[at])
        while at < count and own[first] == positions[at]:
            last = _equal_until(own, first, positions, at)
            begin = own_ends[first - 1] if first else start
            pieces.append(data[begin : own_ends[last - 1]])
            shift = size - begin
            ends += [end + shift for end in islice(own_ends, first, last)] if shift else own_ends[first:last]
            size = ends[-1]
            at += last - first
            if at == count or own[-1] < positions[at]:
                break
            first = bisect_left(own, positions[at], last)
    if at < count:
        return None
    return pieces[0] if len(pieces) == 1 else b"".join(pieces), ends


def _equal_until(own: list[int], first: int, positions: list[int], at: int) -> int:
    """Return up to which index *own*, from *first* on, has the same values as *positions* from *at* on."""
    count = min(len(own) - first, len(positions) - at)
    if own[first : first + count] == positions[at : at + count]:
        return first + count
    last = first + 1
    while own[last] == positions[at + last - first]:
        last += 1
    return last
