"""Writes a log of which only some records exist, each at its old position.

The positions in between are *filled*, so that a scan of the log finds records without a gap: with notes of the store
that say nothing, whose bodies are holes of the file, and with the mark for the end of a segment. A segment without a
record has one short filler and this mark.
"""

from array import array
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final, final

import numpy as np

from martlet.message import Message
from martlet.records.codec import body_crc, encode_filler, encode_record
from martlet.records.layout import (
    AFTER_BORN,
    AFTER_STORE,
    FILLER_BYTES,
    MAGIC_V1,
    RECORD_BYTES_MIN,
    ROLLBACK,
    SHORT,
    START,
    RecordView,
)
from martlet.store.disk.files import Disk, Files
from martlet.store.disk.segments import Segment, Segments
from martlet.store.format.notes import NOTES_TOPIC
from martlet_columns.records import Integers
from martlet_tiered.errors import LogUnreadable

__all__ = ["SparseLog"]

OPEN_FILES: Final = 32
# Of a filler: a scan reads it as a whole.
FILLER_BYTES_MAX: Final = 4 << 20
TOPIC: Final = NOTES_TOPIC.encode()
LEAST: Final = RECORD_BYTES_MIN + 1
HOST: Final = bytes([127, 0, 0, 1, 0, 0, 0, 0])


@lru_cache(64)
def _crc_of_zeros(size: int) -> int:
    return body_crc(bytes(size)) if size else 0


@final
class SparseLog:
    """The log in *directory* from position *start* to *end*, in segments of *segment_bytes*."""

    def __init__(self, disk: Disk, directory: str, start: int, end: int, segment_bytes: int) -> None:
        disk.make_directory(directory)
        self._files = Files(disk, OPEN_FILES)
        self._segments = Segments(self._files, directory, segment_bytes)
        self._start = start
        self._end = end
        self._places = array("q")  # begin and end of each record
        self._whole: Integers = np.empty((0, 2), np.int64)  # all of them, sorted
        for at in range(start, max(end, start + 1), segment_bytes):
            self._segments.create(at)

    def add(self, record: bytes) -> None:
        """Write *record*, which is in the log's range; in any order.

        Raises:
          LogUnreadable: it would be in two segments.
        """
        position = RecordView(record).position
        self._write(position, record)
        self._places.extend((position, position + len(record)))

    def finish(self, notes: Iterable[Message], store_ms: int) -> int:
        """Fill the log, append *notes* after its end, and make it durable; return the new end."""
        self._whole = np.unique(np.array(self._places, np.int64).reshape(-1, 2), axis=0)
        for segment in list(self._segments.items):
            self._fill_segment(segment, store_ms)
        end = self._end
        for note in notes:
            end = self._append(note, end, store_ms)
        for segment in self._segments.items:
            self._files.sync(segment.path)
        self._files.close()
        return end

    def _write(self, position: int, data: bytes | memoryview) -> None:
        segment = self._segments.find(position)
        if segment is None or position + len(data) > segment.end:
            raise LogUnreadable(
                f"the record at log position {position} with {len(data)} bytes does not fit into the log's files of "
                f"{self._segments.segment_bytes} bytes from position {self._start} on"
            )
        self._files.write(segment.path, data, position - segment.start)

    # ---- gaps

    def _fill_segment(self, segment: Segment, store_ms: int) -> None:
        limit = min(segment.end, self._end)
        for begin, end in self._gaps(segment.start, limit):
            if end < segment.end:
                self._fill(begin, end, store_ms)
                continue
            if begin == segment.start:
                begin += self._write_filler(begin, RECORD_BYTES_MIN + len(TOPIC), store_ms)
            if end - begin >= FILLER_BYTES:
                self._write(begin, encode_filler(end - begin))

    def _gaps(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges from *begin* to *end* without a record."""
        first, last = np.searchsorted(self._whole[:, 0], (begin, end))
        at = begin
        for start, stop in self._whole[first:last].tolist():
            if start > at:
                yield at, start
            at = max(at, stop)
        if at < end:
            yield at, end

    def _fill(self, begin: int, end: int, store_ms: int) -> None:
        while begin < end:
            size = min(end - begin, FILLER_BYTES_MAX)
            if 0 < end - begin - size < LEAST:
                size -= LEAST
            begin += self._write_filler(begin, size, store_ms)

    def _write_filler(self, position: int, size: int, store_ms: int) -> int:
        """Write a note of *size* bytes that says nothing; less is damage, which a start skips. Return the size."""
        if size >= LEAST:
            topic = TOPIC[: size - RECORD_BYTES_MIN]
            body_bytes = size - RECORD_BYTES_MIN - len(topic)
            start = START.pack(
                *(size, MAGIC_V1, _crc_of_zeros(body_bytes), 0, 0, 0, position, ROLLBACK, store_ms),
            )
            head = b"".join((start, HOST, AFTER_BORN.pack(store_ms), HOST, AFTER_STORE.pack(0, 0, body_bytes)))
            tail = b"".join((bytes((len(topic),)), topic, SHORT.pack(0)))
            self._write(position, head)
            self._write(position + size - len(tail), tail)
        return size

    # ---- notes

    def _append(self, note: Message, position: int, store_ms: int) -> int:
        """Append *note* at *position*, or in the next segment; return the position after it."""
        record = encode_record(note, 0, 0, position, store_ms, HOST)
        segment = self._segments.items[-1]
        room = segment.end - position
        if room < len(record) + FILLER_BYTES:
            if room >= FILLER_BYTES:
                self._write(position, encode_filler(room))
            position = segment.end
            self._segments.create(position)
            record = encode_record(note, 0, 0, position, store_ms, HOST)
        self._write(position, record)
        return position + len(record)
