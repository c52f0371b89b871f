"""Frames passed on by publishers, so that subscribers get messages exactly as they were received.

The frames of one read of a publisher stay together: comparing log positions, many at a time, shows whether a run
consists of them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import final

from martlet.runtime.native import native

__all__ = ["HandedFrames", "cut_frames"]


@final
class HandedChunk:
    """Frames of messages passed on together; frame *i* is in ``data`` from ``bounds[i]`` to ``bounds[i + 1]``."""

    __slots__ = ("bounds", "data", "positions")

    def __init__(self, positions: list[int], data: bytes, ends: Sequence[int], start: int) -> None:
        self.positions = positions
        self.data = data
        self.bounds = [start, *ends]

    @property
    def size(self) -> int:
        return self.bounds[-1] - self.bounds[0]

    def add_to(self, pieces: list[bytes], ends: list[int], wanted: list[int]) -> bool:
        """Append the frames of the messages at *wanted* to *pieces*, and their ends to *ends*; False if some are
        missing.

        No position in *wanted* is beyond the last one here. If the frames follow each other here, they are one piece.
        """
        positions, data, bounds = self.positions, self.data, self.bounds
        index = bisect_left(positions, wanted[0])
        last = index + len(wanted)
        if positions[index:last] == wanted:
            begin, frame_ends = bounds[index], bounds[index + 1 : last + 1]
            pieces.append(data[begin : frame_ends[-1]])
            shift = (ends[-1] if ends else 0) - begin
            ends += [end + shift for end in frame_ends] if shift else frame_ends
            return True
        cut = native(cut_frames)(data, positions, bounds, wanted, ends)
        if cut is None:
            return False
        pieces.append(cut)
        return True


def cut_frames(
    data: bytes, positions: list[int], bounds: list[int], wanted: list[int], ends: list[int]
) -> bytes | None:
    """Return the frames of the messages at *wanted*, and add their ends, after the last one there, to *ends*.

    The arguments are those of a `HandedChunk` and of `HandedChunk.add_to`. Returns None if frames are missing. The
    native kernel has this function as well; see `martlet.runtime.native`.
    """
    frames: list[bytes] = []
    index = 0
    for position in wanted:
        index = bisect_left(positions, position, index)
        if positions[index] != position:
            return None
        frames.append(data[bounds[index] : bounds[index + 1]])
    ends += list(accumulate(map(len, frames), initial=ends[-1] if ends else 0))[1:]
    return b"".join(frames)


@final
class Chunks:
    """The chunks of one encoding, in log order."""

    __slots__ = ("_chunks", "_lasts")

    def __init__(self) -> None:
        self._chunks: list[HandedChunk] = []
        self._lasts: list[int] = []  # the last position of each chunk

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def append(self, chunk: HandedChunk) -> None:
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
        index, count, chunk_index = 0, len(positions), 0
        while index < count:
            chunk_index = bisect_left(self._lasts, positions[index], chunk_index)
            if chunk_index == len(self._chunks):
                return None
            last = bisect_right(positions, self._lasts[chunk_index], index)
            chunk_positions = positions[index:last] if index or last < count else positions
            if not self._chunks[chunk_index].add_to(pieces, ends, chunk_positions):
                return None
            index = last
        return pieces[0] if len(pieces) == 1 else b"".join(pieces), ends


@final
class HandedFrames:
    """The frames that were passed on and are not routed yet, by encoding; ``size`` in bytes."""

    __slots__ = ("_chunks", "size")

    def __init__(self) -> None:
        self._chunks: dict[str, Chunks] = {}
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def add(self, encoding: str, positions: Sequence[int], data: bytes, ends: Sequence[int], start: int) -> None:
        """Keep the frames of messages at *positions*, which increase and are beyond all positions added before."""
        chunk = HandedChunk(list(positions), data, ends, start)
        self.size += chunk.size
        self._chunks.setdefault(encoding, Chunks()).append(chunk)

    def find(self, positions: list[int]) -> Iterator[tuple[str, bytes, list[int]]]:
        """Yield each encoding in which the frames of all messages at *positions*, which increase, were passed on.

        Each comes with the frames, and the end of each frame.
        """
        for encoding, chunks in self._chunks.items():
            frames = chunks.joined(positions)
            if frames is not None:
                yield encoding, *frames

    def drop_before(self, position: int) -> None:
        """Drop frames of messages before *position*, except if they came together with later ones."""
        for encoding, chunks in list(self._chunks.items()):
            self.size -= chunks.drop_before(position)
            if not chunks:
                del self._chunks[encoding]

    def clear(self) -> None:
        """Drop everything."""
        self._chunks.clear()
        self.size = 0
