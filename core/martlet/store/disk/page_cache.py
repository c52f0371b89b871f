"""The log in memory: pages of fixed size, read once for all consumers, and the end that appends extend.

A page at the end of the log is a bytearray that appends fill in place; an older one is the bytes of a single read.
Bytes in a page never change once they are written, and pages are never resized, so readers get views of them. The
least recently used pages are dropped first; a view keeps its page alive until it is sent.
"""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import final

from martlet.records.codec import encode_filler
from martlet.records.layout import FILLER_BYTES, MAGIC_AT, Find
from martlet.store.disk.segments import Segment, Segments

__all__ = ["LogWriter", "Page", "PageCache"]


@final
class Page:
    """The positions from ``base`` up to ``end``; the CRCs of its ``trusted`` bytes need no check."""

    __slots__ = ("base", "data", "end", "searched", "trusted", "view")

    def __init__(self, base: int, data: bytes | bytearray, trusted: bool) -> None:
        self.base = base
        self.data = data
        self.end = base + len(data)
        self.view = memoryview(data).toreadonly()
        self.trusted = trusted
        # The last search of the page: its condition, its end, and the places found (`needle_match`).
        self.searched: tuple[Find, int, list[int] | None] | None = None


@final
class PageCache:
    """The pages of the log by position, in a limited amount of memory; thread-safe."""

    def __init__(self, segments: Segments, page_bytes: int, cache_bytes: int) -> None:
        self.segments = segments
        self.page_bytes = page_bytes
        self.cache_bytes = cache_bytes
        # From this position on, this process wrote the log, so CRCs are not checked.
        self.trusted_from = 0
        # From this position on, only pinned pages are valid: the file has not been written there yet.
        self.final_end = 1 << 63
        self.pinned: dict[int, Page] = {}
        self._held: OrderedDict[int, Page] = OrderedDict()
        self._held_bytes = 0
        self._lock = Lock()

    def base_of(self, segment: Segment, position: int) -> int:
        return position - (position - segment.start) % self.page_bytes

    def find(self, position: int) -> Page | None:
        """Return the page of *position* if it is in memory."""
        segment = self.segments.find(position)
        if segment is None:
            return None
        base = self.base_of(segment, position)
        page = self.pinned.get(base)
        if page is not None:
            return page
        with self._lock:
            page = self._held.get(base)
            if page is not None:
                self._held.move_to_end(base)
        return page

    def load(self, position: int) -> Page | None:
        """Return the page of *position*, read from disk if necessary; None if the log does not contain it."""
        return self._load(position, self.segments.read)

    def load_now(self, position: int) -> Page | None:
        """As `load`, but without waiting for the disk: None if the page is neither in memory nor in the page cache."""
        return self._load(position, self.segments.read_now)

    def load_few(self, few_bytes: int) -> Callable[[int], Page | None]:
        """Return a `load_now` for one read, which copies at most about *few_bytes* from the page cache, then nothing.

        Without a limit, a read of records that lie far apart would copy a page for each of them.
        """
        left = max(few_bytes // self.page_bytes, 2)  # a record may lie in two pages

        def load(position: int) -> Page | None:
            nonlocal left
            page = self.find(position)
            if page is not None:
                return page if position < page.end else None
            left -= 1
            return self.load_now(position) if left >= 0 else None

        return load

    def _load(self, position: int, read: Callable[[int, int], bytes | bytearray | None]) -> Page | None:
        page = self.find(position)
        if page is not None:
            return page if position < page.end else None
        segment = self.segments.find(position)
        if segment is None:
            return None
        base = self.base_of(segment, position)
        if base >= self.final_end:
            return None
        data = read(base, self.page_bytes)
        if data is None or position >= base + len(data):
            return None
        page = Page(base, data, base >= self.trusted_from)
        self.hold(page)
        return page

    def hold(self, page: Page) -> None:
        """Keep *page* until its room is needed."""
        with self._lock:
            before = self._held.pop(page.base, None)
            self._held_bytes += len(page.view) - (len(before.view) if before is not None else 0)
            self._held[page.base] = page
            while self._held_bytes > self.cache_bytes and self._held:
                self._held_bytes -= len(self._held.popitem(last=False)[1].view)

    def drop_before(self, position: int) -> None:
        """Drop pages that retention removed."""
        with self._lock:
            for base in [base for base in self._held if base < position]:
                self._held_bytes -= len(self._held.pop(base).view)

    def read(self, position: int, size: int) -> bytes:
        """Return up to *size* bytes of one segment, from memory and disk."""
        parts: list[bytes] = []
        segment = self.segments.find(position)
        while size > 0 and segment is not None and position < segment.end:
            page = self.load(position)
            if page is None:
                break
            part = bytes(page.view[position - page.base : position - page.base + size])
            parts.append(part)
            position += len(part)
            size -= len(part)
            if position < page.end:
                break
        return b"".join(parts)


@final
class LogWriter:
    """The end of the log: appends extend it at ``position``, and `write_out` writes them to the operating system."""

    def __init__(self, pages: PageCache) -> None:
        self.pages = pages
        self.segments = pages.segments
        self.segment = Segment("", 0, 0)
        self.position = 0
        self.written = 0
        # The begin of the first unwritten atomic group; -1 if there is none.
        self.first_group = -1
        self.data = bytearray()
        self.page = Page(0, self.data, True)
        self.page_base = 0
        self.page_end = 0
        # The highest end of a record that fits into this page and leaves room for the segment's filler.
        self.room = 0

    def open_at(self, position: int) -> None:
        """Continue at *position*, which is in the last segment or at its end."""
        self.position = self.written = position
        self.pages.pinned.clear()
        found = self.segments.find(position)
        if found is None:
            self.segment = self.segments.items[-1] if self.segments.items else Segment("", position, position)
            self._use(Page(position, bytearray(), True))
            return
        self.segment = found
        self._open_page(self.pages.base_of(found, position), position)

    def _open_page(self, base: int, filled: int) -> None:
        data = bytearray(min(self.pages.page_bytes, self.segment.end - base))
        if filled > base:
            old = self.segments.read(base, filled - base)
            data[: len(old)] = old
        page = Page(base, data, base >= self.pages.trusted_from)
        self.pages.pinned[base] = page
        self._use(page)

    def _use(self, page: Page) -> None:
        if isinstance(page.data, bytearray):
            self.data = page.data
        self.page = page
        self.page_base = self.pages.final_end = page.base
        self.page_end = page.end
        self.room = min(page.end, self.segment.end - FILLER_BYTES)

    def begin_group(self) -> None:
        """Note that an atomic group begins here; its records are appended next."""
        if self.first_group < 0:
            self.first_group = self.position

    def put(self, data: bytes | bytearray) -> None:
        """Append *data*, which fits into the segment; it may continue in the next page."""
        view = memoryview(data)
        while view:
            if self.position == self.page_end:
                self._open_page(self.position, self.position)
            at = self.position - self.page_base
            part = view[: self.page_end - self.position]
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
        self._open_page(self.position, self.position)

    def _seal(self) -> None:
        for page in self.pages.pinned.values():
            self.pages.hold(page)
        self.pages.pinned.clear()
        self.position = self.written = self.pages.final_end = self.segment.end

    def write_out(self) -> None:
        """Write everything appended since the last call; all of it is in one segment.

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
        if len(self.pages.pinned) > 1:
            self._hold_full()

    def _write_with_groups(self, start: int, magic_at: int) -> None:
        """Write from *start* to the end, and then the byte at *magic_at*, which makes the first group visible.

        Until then RocketMQ ends the log there. Martlet adds the byte if the whole group is there.
        """
        base = self.pages.base_of(self.segment, magic_at)
        data = self.pages.pinned[base].data
        if not isinstance(data, bytearray):
            raise TypeError(f"page at {base} cannot be written")
        magic_byte = data[magic_at - base]
        data[magic_at - base] = 0
        try:
            self._write(start, self.position)
        finally:
            data[magic_at - base] = magic_byte
        self._write(magic_at, magic_at + 1)

    def _write(self, start: int, end: int) -> None:
        """Write the positions from *start* up to *end*, which are in pinned pages."""
        if start >= self.page_base:
            view = self.page.view[start - self.page_base : end - self.page_base]
            self.segments.files.write(self.segment.path, view, start - self.segment.start)
            return
        for base, page in sorted(self.pages.pinned.items()):
            if start < page.end and base < end:
                begin = max(start, base)
                view = page.view[begin - base : min(page.end, end) - base]
                self.segments.files.write(self.segment.path, view, begin - self.segment.start)

    def _hold_full(self) -> None:
        """Unpin the pages before the current one, because they are written."""
        for base in [base for base in self.pages.pinned if base != self.page_base]:
            self.pages.hold(self.pages.pinned.pop(base))

    def rewind(self, position: int) -> None:
        """Drop from memory everything from *position* on; it is unwritten and in this segment."""
        self.position = position
        if self.first_group >= position:
            self.first_group = -1
        base = self.pages.base_of(self.segment, position)
        for later in [other for other in self.pages.pinned if other > base]:
            del self.pages.pinned[later]
        page = self.pages.pinned.get(base)
        if page is None:
            self._open_page(base, position)
        else:
            self._use(page)

    def undo(self) -> None:
        """Undo all appends since the last `write_out`, in memory and in the file.

        Raises:
          OSError: the file cannot be cleared, so a later start could find refused messages.
        """
        self.rewind(self.written)
        self.segments.files.clear(self.segment.path, self.written - self.segment.start)
