"""Collects the bodies of answers in one buffer, as they arrive, until there are enough records to decode at once.

NumPy and Arrow take up to 0.5 ms for each buffer, whatever its size, and a frame of a bulk read has only 200 records
of 1 KiB. So frames of all queues follow one another in one buffer, which the socket writes to, and which is used again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, final

import numpy as np

from martlet_columns.records import Records, joined
from martlet_remoting.wire.inner_batches import INNER_BATCH
from martlet_spark.errors import ReadError
from martlet_spark.read.inner_batches import unrolled
from martlet_spark.read.progress import RangeProgress
from martlet_spark.read.received import Damaged, check_bodies, check_range, received_records

__all__ = ["BYTES_ENOUGH", "FrameBodies", "FramePart"]

# Received bytes that start a decoding; a larger frame is decoded whole.
BYTES_ENOUGH: Final = 1 << 22
# Frames of bulk reads have 256 KiB, so the buffer has room for one more below that size.
BUFFER_BYTES: Final = BYTES_ENOUGH + (1 << 19)


@final
@dataclass(frozen=True, slots=True)
class FramePart:
    """A frame of *progress*: *size* bytes at *start* of the buffer, messages *first* up to *after*, wanted up to *end*.

    If *is_whole*, no message before *end* may be missing; the queue begins at *oldest*.
    """

    start: int
    size: int
    progress: RangeProgress
    first: int
    after: int
    end: int
    is_whole: bool = False
    oldest: int = 0

    @property
    def queue(self) -> int:
        return self.progress.queue.queue_id


@final
class FrameBodies:
    """The bodies of frames that are received but not decoded yet.

    ``gaps`` are the ranges of offsets that the frames of the last `take` lack, each with its part.
    """

    def __init__(self) -> None:
        self._buffer = _buffer(BUFFER_BYTES)
        self.end = 0
        self.parts: list[FramePart] = []
        self.gaps: list[tuple[FramePart, int, int]] = []

    @property
    def enough(self) -> bool:
        return self.end >= BYTES_ENOUGH

    def room(self, size: int) -> memoryview:
        """Return *size* bytes of the buffer, for the body of the next frame; call `add` once it is received."""
        end = self.end + size
        if end > len(self._buffer):
            larger = _buffer(end)
            larger[: self.end] = self._buffer[: self.end]
            self._buffer = larger
        return self._buffer[self.end : end]

    def add(self, part: FramePart) -> None:
        """Add *part*, whose body is where `room` said."""
        self.parts.append(part)
        self.end += part.size

    def take(self) -> Records | None:
        """Return the checked records of all frames, None without frames; the next call of `room` overwrites them.

        Raises:
          Damaged: a record is damaged.
          ReadError: a record does not belong to the range of its frame.
        """
        self.gaps = []
        if not self.parts:
            return None
        data, parts = self._buffer[: self.end], self.parts
        self.end, self.parts = 0, []
        if len(self._buffer) > BUFFER_BYTES:
            self._buffer = _buffer(BUFFER_BYTES)
        try:
            records = received_records(data)
        except ReadError:
            _find_wrong(data, parts)
            raise
        check_bodies(records)
        return records if _match_requests(records, parts) else self._one_by_one(data, parts)

    def _one_by_one(self, data: memoryview, parts: Sequence[FramePart]) -> Records | None:
        """Like `take`, for frames of any kind: each is unrolled, checked and cut off at its end."""
        found = []
        for part in parts:
            records = unrolled(received_records(data[part.start : part.start + part.size]), part.first)
            check_range(records, part.queue, part.first, part.after)
            before = records.before(part.end)
            if before is not None:
                found.append(before)
            if part.is_whole:
                there = [] if before is None else before.heads["offset"].tolist()
                self.gaps += [(part, *gap) for gap in _gaps(there, part.first, part.end)]
        return joined(found) if found else None


def _buffer(size: int) -> memoryview:
    """Return *size* uninitialised bytes: pages that are never used cost nothing."""
    return np.empty(size, np.uint8).data


def _find_wrong(data: memoryview, parts: Sequence[FramePart]) -> None:
    """Raise `Damaged` with a text that names the first of *parts* whose records have wrong sizes."""
    for part in parts:
        try:
            received_records(data[part.start : part.start + part.size])
        except ReadError as error:
            raise Damaged(f"messages {part.first} to {part.after - 1} of {part.progress}: {error}") from error


def _match_requests(records: Records, parts: Sequence[FramePart]) -> bool:
    """Return whether each part has the messages of its queue and range in ascending order, and no inner batch."""
    begins = np.array([part.start for part in parts])
    at = np.searchsorted(records.starts, begins)
    if at[-1] == len(records) or (records.starts[at] != begins).any():
        return False  # a record goes beyond its part
    counts = np.diff(at, append=len(records))
    if any(part.is_whole and part.end - part.first != count for part, count in zip(parts, counts, strict=True)):
        return False

    def of_each(value: Callable[[FramePart], int]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return np.repeat(np.array([value(part) for part in parts], np.int64), counts)

    heads = records.heads
    offsets = heads["offset"].astype(np.int64)
    fine = offsets >= of_each(lambda part: part.first)
    fine &= offsets < of_each(lambda part: min(part.after, part.end))
    fine &= (heads["queue"] == of_each(lambda part: part.queue)) & (heads["sys_flag"] & INNER_BATCH != INNER_BATCH)
    ascends = offsets[1:] > offsets[:-1]
    ascends[at[1:] - 1] = True
    return bool(fine.all() and ascends.all())


def _gaps(there: Sequence[int], first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges from *first* to *end* that have none of the ascending offsets *there*."""
    for before, after in pairwise((first - 1, *there, end)):
        if after > before + 1:
            yield before + 1, after
