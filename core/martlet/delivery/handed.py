"""Frames that publishers hand on, so that subscribers get messages as they were received.

The frames of one read of a publisher stay together: whether a run consists of them is seen by comparing log positions,
many at a time.
"""

from bisect import bisect_left
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
class Chunks:
    """The chunks of one encoding, in log order."""

    __slots__ = ("_chunks", "_lasts")

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._lasts: list[int] = []  # the last position of each

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def append(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._lasts.append(chunk.positions[-1])

    def drop_before(self, position: int) -> int:
        """Drop chunks whose messages are all before *position*; return their size."""
        count = bisect_left(self._lasts, position)
        size = sum([chunk.size for chunk in self._chunks[:count]])
        del self._chunks[:count], self._lasts[:count]
        return size

    def joined(self, positions: list[int]) -> tuple[bytes, list[int]] | None:
        """Return the frames of the messages at *positions*, and their ends; None if some are missing."""
        pieces: list[bytes] = []
        ends: list[int] = []
        at, count, size, number = 0, len(positions), 0, 0
        while at < count:
            number = bisect_left(self._lasts, positions[at], number)
            if number == len(self._chunks):
                return None
            own, data, own_ends, start = self._chunks[number]
            first = bisect_left(own, positions[at])
            if own[first] != positions[at]:
                return None
            last = _equal_until(own, first, positions, at)
            begin = own_ends[first - 1] if first else start
            pieces.append(data[begin : own_ends[last - 1]])
            shift = size - begin
            ends += [end + shift for end in islice(own_ends, first, last)] if shift else own_ends[first:last]
            size = ends[-1]
            at += last - first
        return pieces[0] if len(pieces) == 1 else b"".join(pieces), ends


@final
class HandedFrames:
    """What was handed on and is not routed yet, by encoding; ``size`` in bytes."""

    __slots__ = ("_chunks", "size")

    def __init__(self) -> None:
        self._chunks: dict[str, Chunks] = {}
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def add(self, encoding: str, positions: Sequence[int], data: bytes, ends: Sequence[int], start: int) -> None:
        """Keep the frames of messages at *positions*, which increase and are beyond those that were added before."""
        chunk = Chunk(list(positions), data, ends, start)
        self.size += chunk.size
        self._chunks.setdefault(encoding, Chunks()).append(chunk)

    def find(self, positions: list[int]) -> Iterator[tuple[str, bytes, list[int]]]:
        """Yield each encoding in which the messages at *positions*, which increase, were all handed on.

        With it come the frames, and the end of each.
        """
        for encoding, chunks in self._chunks.items():
            found = chunks.joined(positions)
            if found is not None:
                yield encoding, *found

    def drop_before(self, position: int) -> None:
        """Drop what belongs to messages before *position*, except if it came together with later ones."""
        for encoding, chunks in list(self._chunks.items()):
            self.size -= chunks.drop_before(position)
            if not chunks:
                del self._chunks[encoding]

    def clear(self) -> None:
        """Drop everything."""
        self._chunks.clear()
        self.size = 0


def _equal_until(own: list[int], first: int, positions: list[int], at: int) -> int:
    """Return up to which index *own*, from *first* on, has the same values as *positions* from *at* on."""
    count = min(len(own) - first, len(positions) - at)
    if own[first : first + count] == positions[at : at + count]:
        return first + count
    last = first + 1
    while own[last] == positions[at + last - first]:
        last += 1
    return last
