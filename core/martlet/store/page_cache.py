"""The log in memory: chunks of fixed size, read once for all consumers, and the end that appends extend.

A chunk at the end of the log is a bytearray that appends fill in place; an older one is the bytes of a single read.
Bytes in a chunk never change once they are written, and chunks are never resized, so readers get views of them. The
least recently used chunks are dropped first; a view keeps its chunk alive until it is sent.
"""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import final

from martlet.store.codec import encode_filler
from martlet.store.layout import FILLER_BYTES, MAGIC_AT
from martlet.store.segments import Segment, Segments

__all__ = ["Chunk", "Chunks", "LogWriter"]


@final
class Chunk:
    """The positions from ``base`` up to ``end``; the CRCs of its ``trusted`` bytes need no check."""

    __slots__ = ("base", "data", "end", "trusted", "view")

    def __init__(self, base: int, data: bytes | bytearray, trusted: bool) -> None:
        self.base = base
        self.data = data
        self.end = base + len(data)
        self.view = memoryview(data).toreadonly()
        self.trusted = trusted


@final
class Chunks:
    """Chunks by position, in a limited amount of memory; thread-safe."""

    __slots__ = (
        "_held",
        "_held_bytes",
        "_lock",
        "cache_bytes",
        "chunk_bytes",
        "final_end",
        "pinned",
        "segments",
        "trusted_from",
    )

    def __init__(self, segments: Segments, chunk_bytes: int, cache_bytes: int) -> None:
        self.segments = segments
        self.chunk_bytes = chunk_bytes
        self.cache_bytes = cache_bytes
        # From here on this process wrote the log, so CRCs are not checked.
        self.trusted_from = 0
        # From here on only pinned chunks are valid: the file has not been written there yet.
        self.final_end = 1 << 63
        self.pinned: dict[int, Chunk] = {}
        self._held: OrderedDict[int, Chunk] = OrderedDict()
        self._held_bytes = 0
        self._lock = Lock()

    def base_of(self, segment: Segment, position: int) -> int:
        return position - (position - segment.start) % self.chunk_bytes

    def find(self, position: int) -> Chunk | None:
        """Return the chunk of *position* if it is in memory."""
        segment = self.segments.find(position)
        if segment is None:
            return None
        base = self.base_of(segment, position)
        chunk = self.pinned.get(base)
        if chunk is not None:
            return chunk
        with self._lock:
            chunk = self._held.get(base)
            if chunk is not None:
                self._held.move_to_end(base)
        return chunk

    def load(self, position: int) -> Chunk | None:
        """Return the chunk of *position*, read from disk if necessary; None if the log has nothing there."""
        return self._load(position, self.segments.read)

    def load_now(self, position: int) -> Chunk | None:
        """Like `load`, but without waiting for the disk: None if it is neither in memory nor in the page cache."""
        return self._load(position, self.segments.read_now)

    def _load(self, position: int, read: Callable[[int, int], bytes | bytearray | None]) -> Chunk | None:
        chunk = self.find(position)
        if chunk is not None:
            return chunk if position < chunk.end else None
        segment = self.segments.find(position)
        if segment is None:
            return None
        base = self.base_of(segment, position)
        if base >= self.final_end:
            return None
        data = read(base, self.chunk_bytes)
        if data is None or position >= base + len(data):
            return None
        chunk = Chunk(base, data, base >= self.trusted_from)
        self.hold(chunk)
        return chunk

    def hold(self, chunk: Chunk) -> None:
        """Keep *chunk* until its room is needed."""
        with self._lock:
            before = self._held.pop(chunk.base, None)
            self._held_bytes += len(chunk.view) - (len(before.view) if before is not None else 0)
            self._held[chunk.base] = chunk
            while self._held_bytes > self.cache_bytes and self._held:
                self._held_bytes -= len(self._held.popitem(last=False)[1].view)

    def drop_before(self, position: int) -> None:
        """Drop chunks that retention removed."""
        with self._lock:
            for base in [base for base in self._held if base < position]:
                self._held_bytes -= len(self._held.pop(base).view)

    def read(self, position: int, size: int) -> bytes:
        """Return up to *size* bytes of one segment, from memory and disk."""
        parts: list[bytes] = []
        segment = self.segments.find(position)
        while size > 0 and segment is not None and position < segment.end:
            chunk = self.load(position)
            if chunk is None:
                break
            part = bytes(chunk.view[position - chunk.base : position - chunk.base + size])
            parts.append(part)
            position += len(part)
            size -= len(part)
            if position < chunk.end:
                break
        return b"".join(parts)


@final
class LogWriter:
    """The end of the log: appends extend it at ``position``, and `write_out` writes them to the operating system."""

    __slots__ = (
        "chunk",
        "chunk_base",
        "chunk_end",
        "chunks",
        "data",
        "first_group",
        "position",
        "room",
        "segment",
        "segments",
        "written",
    )

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks
        self.segments = chunks.segments
        self.segment = Segment("", 0, 0)
        self.position = 0
        self.written = 0
        # Where the first unwritten atomic group begins; -1 if there is none.
        self.first_group = -1
        self.data = bytearray()
        self.chunk = Chunk(0, self.data, True)
        self.chunk_base = 0
        self.chunk_end = 0
        # The highest end of a record that fits into this chunk and leaves room for the segment's filler.
        self.room = 0

    def open_at(self, position: int) -> None:
        """Continue at *position*, which is in the last segment or at its end."""
        self.position = self.written = position
        self.chunks.pinned.clear()
        found = self.segments.find(position)
        if found is None:
            self.segment = self.segments.items[-1] if self.segments.items else Segment("", position, position)
            self._use(Chunk(position, bytearray(), True))
            return
        self.segment = found
        self._open_chunk(self.chunks.base_of(found, position), position)

    def _open_chunk(self, base: int, filled: int) -> None:
        data = bytearray(min(self.chunks.chunk_bytes, self.segment.end - base))
        if filled > base:
            old = self.segments.read(base, filled - base)
            data[: len(old)] = old
        chunk = Chunk(base, data, base >= self.chunks.trusted_from)
        self.chunks.pinned[base] = chunk
        self._use(chunk)

    def _use(self, chunk: Chunk) -> None:
        if isinstance(chunk.data, bytearray):
            self.data = chunk.data
        self.chunk = chunk
        self.chunk_base = self.chunks.final_end = chunk.base
        self.chunk_end = chunk.end
        self.room = min(chunk.end, self.segment.end - FILLER_BYTES)

    def begin_group(self) -> None:
        """Note that an atomic group begins here; its records are appended next."""
        if self.first_group < 0:
            self.first_group = self.position

    def put(self, data: bytes | bytearray) -> None:
        """Append *data*, which fits into the segment; it may continue in the next chunk."""
        view = memoryview(data)
        while view:
            if self.position == self.chunk_end:
                self._open_chunk(self.position, self.position)
            at = self.position - self.chunk_base
            part = view[: self.chunk_end - self.position]
            self.data[at : at + len(part)] = part
            self.position += len(part)
            view = view[len(part) :]

    def roll(self) -> None:
        """Write everything appended so far, end the segment and start the next.

        Raises:
          OSError: the write failed; if anything had been appended, it was undone (`undo`).
        """
        if self.position < self.segment.end:
            remaining = self.segment.end - self.position
            if remaining >= FILLER_BYTES:
                self.put(encode_filler(remaining))
            self.write_out()
            self._seal()
        self.segment = self.segments.create(self.position)
        self._open_chunk(self.position, self.position)

    def _seal(self) -> None:
        for chunk in self.chunks.pinned.values():
            self.chunks.hold(chunk)
        self.chunks.pinned.clear()
        self.position = self.written = self.chunks.final_end = self.segment.end

    def write_out(self) -> None:
        """Write everything appended since the last call; it is all in one segment.

        Raises:
          OSError: the write failed; everything since the last call is undone.
        """
        start = self.written
        if start == self.position:
            return
        try:
            if self.first_group < 0:
                self._write(start, self.position)
            else:
                self._write_with_groups(start, self.first_group + MAGIC_AT)
        except OSError:
            self.undo()
            raise
        self.written = self.position
        self.first_group = -1
        if len(self.chunks.pinned) > 1:
            self._hold_full()

    def _write_with_groups(self, start: int, magic_at: int) -> None:
        """Write from *start* to the end, and then the byte at *magic_at*, which makes the first group visible.

        Until then RocketMQ ends the log there. Martlet adds the byte if the whole group is there.
        """
        base = self.chunks.base_of(self.segment, magic_at)
        data = self.chunks.pinned[base].data
        if not isinstance(data, bytearray):
            raise TypeError(f"chunk at {base} cannot be written")
        magic_byte = data[magic_at - base]
        data[magic_at - base] = 0
        try:
            self._write(start, self.position)
        finally:
            data[magic_at - base] = magic_byte
        self._write(magic_at, magic_at + 1)

    def _write(self, start: int, end: int) -> None:
        """Write the positions from *start* up to *end*, which are in pinned chunks."""
        if start >= self.chunk_base:
            view = self.chunk.view[start - self.chunk_base : end - self.chunk_base]
            self.segments.files.write(self.segment.path, view, start - self.segment.start)
            return
        for base, chunk in sorted(self.chunks.pinned.items()):
            if start < chunk.end and base < end:
                begin = max(start, base)
                view = chunk.view[begin - base : min(chunk.end, end) - base]
                self.segments.files.write(self.segment.path, view, begin - self.segment.start)

    def _hold_full(self) -> None:
        """Unpin the chunks before the current one, because they are written."""
        for base in [base for base in self.chunks.pinned if base != self.chunk_base]:
            self.chunks.hold(self.chunks.pinned.pop(base))

    def rewind(self, position: int) -> None:
        """Drop from memory everything from *position* on, which is unwritten and in this segment."""
        self.position = position
        if self.first_group >= position:
            self.first_group = -1
        base = self.chunks.base_of(self.segment, position)
        for later in [other for other in self.chunks.pinned if other > base]:
            del self.chunks.pinned[later]
        chunk = self.chunks.pinned.get(base)
        if chunk is None:
            self._open_chunk(base, position)
        else:
            self._use(chunk)

    def undo(self) -> None:
        """Undo all appends since the last `write_out`, in memory and in the file.

        Raises:
          OSError: the file cannot be cleared, so a later start could find refused messages.
        """
        self.rewind(self.written)
        self.segments.files.clear(self.segment.path, self.written - self.segment.start)
