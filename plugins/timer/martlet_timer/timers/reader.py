"""Reads the records of timers: from memory directly, others in a worker thread."""

from collections.abc import Sequence
from typing import Final, TypeAlias, final

from martlet.errors import CorruptRecord
from martlet.message import Record
from martlet.records.codec import check_record, decode_record
from martlet.records.layout import I32, RECORD_BYTES_MAX, RECORD_BYTES_MIN
from martlet.store import Store

__all__ = ["ReadOutcome", "RecordReader"]

# Size of a read: timers with the same time were often stored one after the other, so it takes several records.
BLOCK_BYTES: Final = 16_384
# A record in the kernel's page cache is read on the event loop, in a few us; most have less than this.
RECORD_BYTES: Final = 2048

# The record; None if it is damaged or gone; the error if the disk failed to read it.
ReadOutcome: TypeAlias = Record | OSError | None


@final
class RecordReader:
    """Reads records of any topic by position. `read_now` and `read` return results for the first positions."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read = store.segments.read

    async def read(self, positions: Sequence[int], bytes_max: int) -> list[ReadOutcome]:
        """Return the records at *positions*: the first one, and further ones up to *bytes_max*."""
        found = self._read_cached(positions, bytes_max)
        if found is not None:
            return found
        return await self._store.disk.off_loop(lambda: self.read_now(positions, bytes_max))

    def _read_cached(self, positions: Sequence[int], bytes_max: int) -> list[ReadOutcome] | None:
        """Return the result of `read`; None if a record is neither in a page of the log nor in the page cache."""
        outcomes: list[ReadOutcome] = []
        for position in positions:
            data = self._from_page(position) or self._from_kernel(position)
            if data is None:
                return None
            outcomes.append(_decode(data, position))
            bytes_max -= len(data)
            if bytes_max <= 0:
                break
        return outcomes

    def _from_page(self, position: int) -> bytes | None:
        page = self._store.pages.find(position)
        if page is None or position + 4 > page.end:
            return None
        at = position - page.base
        size: int = I32.unpack_from(page.view, at)[0]
        if not RECORD_BYTES_MIN <= size <= RECORD_BYTES_MAX or position + size > page.end:
            return None
        return bytes(page.view[at : at + size])

    def _from_kernel(self, position: int) -> bytes | None:
        """Return a record without waiting for the disk; a thread would cost more than the read."""
        segments = self._store.segments
        data = segments.read_now(position, RECORD_BYTES)
        size = I32.unpack_from(data)[0] if data is not None and len(data) >= 4 else 0
        if data is None or not RECORD_BYTES_MIN <= size <= RECORD_BYTES_MAX:
            return None
        if size > len(data):
            data = segments.read_now(position, size)
        return bytes(data[:size]) if data is not None and len(data) >= size else None

    def read_now(self, positions: Sequence[int], bytes_max: int) -> list[ReadOutcome]:
        """Return the result of `read`, blocking; may be called in a thread."""
        outcomes: list[ReadOutcome] = []
        base, block = 0, b""
        for position in positions:
            try:
                if not base <= position <= base + len(block) - 4:
                    base, block = position, self._read(position, BLOCK_BYTES)
                size = I32.unpack_from(block, position - base)[0] if len(block) >= 4 else 0
                if not RECORD_BYTES_MIN <= size <= RECORD_BYTES_MAX:
                    outcomes.append(None)
                    continue
                if position + size > base + len(block):
                    base, block = position, self._read(position, max(size, BLOCK_BYTES))
                outcomes.append(_decode(block[position - base : position - base + size], position))
                bytes_max -= size
            except OSError as error:
                outcomes.append(error)
            if bytes_max <= 0:
                break
        return outcomes


def _decode(data: bytes, position: int) -> Record | None:
    if not check_record(data, 0, len(data), position):
        return None
    try:
        return decode_record(data, 0, check_body=False)
    except CorruptRecord:
        return None
