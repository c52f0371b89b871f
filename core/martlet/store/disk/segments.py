"""The files of the log: ``commitlog/<20 digits>``, each named after the position of its first byte."""

import logging
from bisect import bisect_right
from typing import Final, final

from martlet.records.layout import FRONT_BYTES, MAGICS, RecordView
from martlet.store.disk.files import Files

__all__ = ["Segment", "Segments", "numbered_names"]

logger = logging.getLogger("martlet.store")

NAME_DIGITS: Final = 20
POSITION_MAX: Final = 2**62


def numbered_names(names: list[str]) -> list[int]:
    """Return the positions that *names* denote, ascending; other names are ignored."""
    return sorted(int(name) for name in names if len(name) == NAME_DIGITS and name.isascii() and name.isdecimal())


def _segments_among(sizes: dict[int, int], certain: list[int], segment_bytes: int) -> set[int]:
    """Return the positions of the files, given by first position and size, that are segments.

    The *certain* ones begin with a record for their position. Another file may have a damaged head or no record yet. It
    is accepted if it fits: it overlaps none, and its distance from them is a multiple of the segment size, or zero.
    """
    if not sizes:
        return set()
    segments = set(certain or [max(sizes, key=lambda start: (sizes[start], -start))])
    # All files found so far may be short.
    first, units = min(segments), {max(sizes[start] for start in segments), segment_bytes} - {0}
    for start, size in sizes.items():
        if start in segments or any(known < start + size and start < known + sizes[known] for known in segments):
            continue
        beside = any(start in (known, known + sizes[known]) or start + size == known for known in segments)
        if beside or any((start - first) % unit == 0 for unit in units):
            segments.add(start)
    return segments


@final
class Segment:
    """One file of the log, with the positions from ``start`` up to ``end``."""

    __slots__ = ("end", "path", "start")

    def __init__(self, path: str, start: int, end: int) -> None:
        self.path = path
        self.start = start
        self.end = end


@final
class Segments:
    """The segments in order. A position between two of them belongs to the first and has no data.

    Threads may call `find` and `read` while the event loop adds and removes segments.
    """

    def __init__(self, files: Files, directory: str, segment_bytes: int) -> None:
        self.files = files
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.items: list[Segment] = []
        self._starts: list[int] = []
        # Paths that have the name of a segment but are not segments.
        self.strays: list[str] = []

    def load(self) -> None:
        """Find the segments on disk; if the last one is short, `complete` lengthens it later.

        Other files named with 20 digits are ignored, with a warning.
        """
        sizes = self._sizes()
        certain = [start for start in sizes if self._begins_with_record(start)]
        starts = sorted(_segments_among(sizes, certain, self.segment_bytes))
        self.items = []
        for index, start in enumerate(starts):
            last = index + 1 == len(starts)
            end = start + max(sizes[start], self.segment_bytes) if last else starts[index + 1]
            self.items.append(Segment(self.path_of(start), start, end))
        self._starts = starts
        self.strays += [self.path_of(start) for start in sizes if start not in set(starts)]
        for path in self.strays:
            logger.warning("%s is no segment of the log; ignoring it", path)

    def show(self, bounds: list[tuple[int, int]]) -> None:
        """Have the segments with these positions, first and end, which are those of another process; to read only."""
        self.items = [Segment(self.path_of(start), start, end) for start, end in bounds]
        self._starts = [start for start, _ in bounds]

    def _sizes(self) -> dict[int, int]:
        """Return the size of each file that may be a segment, by the position in its name."""
        sizes: dict[int, int] = {}
        self.strays = []
        for start in numbered_names(self.files.disk.names(self.directory)):
            path = self.path_of(start)
            try:
                size = self.files.size(path)
                self.files.read(path, 1, 0)  # if this is a directory, opening works but reading fails
            except IsADirectoryError:
                size = POSITION_MAX
            if start + size < POSITION_MAX:
                sizes[start] = size
            else:
                self.strays.append(path)
        return sizes

    def bytes_on_disk(self, least: int) -> int:
        """Return the segment size of the files on disk, which all except the newest have; without files, the
        configured size.

        A crash or a copy may have left the newest short. If it is the only one, it counts as whole if it has at least
        *least* bytes and is not full of records, which are then cut off.
        """
        sizes = self._sizes()
        self.strays = []
        found = sorted(
            _segments_among(sizes, [start for start in sizes if self._begins_with_record(start)], self.segment_bytes)
        )
        if not found:
            return self.segment_bytes
        newest = sizes[found[-1]]
        if len(found) > 1:
            before, between = sizes[found[-2]], found[-1] - found[-2]
            if not self._begins_with_record(found[-2]) and not between % self.segment_bytes:
                return max(self.segment_bytes, newest)  # its own size may be damaged as well
            # If segments are missing between the two, there is room for several.
            return max(before if before and not between % before else between, newest)
        if newest >= self.segment_bytes or newest < least:
            return max(newest, self.segment_bytes)
        path = self.path_of(found[0])
        last = self.files.read(path, FRONT_BYTES, newest - FRONT_BYTES)
        return self.segment_bytes if last.rstrip(b"\x00") else newest

    def _begins_with_record(self, start: int) -> bool:
        """Return whether the file named after *start* begins with a record for that position."""
        front = self.files.read(self.path_of(start), FRONT_BYTES, 0)
        if len(front) < FRONT_BYTES:
            return False
        record = RecordView(front)
        return record.magic in MAGICS and record.position == start

    def complete(self) -> None:
        """Lengthen the last segment to its full size, in case a crash or a copy left it short."""
        if self.items:
            last = self.items[-1]
            if self.files.size(last.path) < last.end - last.start:
                self.files.truncate(last.path, last.end - last.start)

    def path_of(self, start: int) -> str:
        return f"{self.directory}/{start:0{NAME_DIGITS}d}"

    @property
    def start(self) -> int:
        """The first stored position."""
        return self.items[0].start if self.items else 0

    @property
    def end(self) -> int:
        """The end of the last segment."""
        return self.items[-1].end if self.items else 0

    def find(self, position: int) -> Segment | None:
        """Return the segment of *position*; None before the first and after the last."""
        items = self.items
        index = bisect_right(self._starts, position) - 1
        if 0 <= index < len(items):
            segment = items[index]
            if segment.start <= position < segment.end:
                return segment
        # There is none, or a removal moved the list while this thread searched it.
        return next((each for each in items if each.start <= position < each.end), None)

    def create(self, start: int) -> Segment:
        """Create the segment that begins at *start*, after all others; the caller must sync the directory."""
        path = self.path_of(start)
        try:
            self.files.create(path, self.segment_bytes)
        except FileExistsError:
            self._move_stray(path)
            self.files.create(path, self.segment_bytes)
        made = Segment(path, start, start + self.segment_bytes)
        self.items.append(made)
        self._starts.append(start)
        return made

    def _move_stray(self, path: str) -> None:
        """Rename anything else with the name of the next segment."""
        logger.warning("%s has the name of the next segment but is none; renaming it", path)
        self.files.disk.rename(path, f"{path}.stray")

    def remove_first(self) -> Segment:
        """Remove the oldest segment and its file."""
        items, starts = self.items, self._starts
        self.items, self._starts = items[1:], starts[1:]
        try:
            self.files.unlink(items[0].path)
        except OSError:
            self.items, self._starts = items, starts
            raise
        return items[0]

    def remove_after(self, position: int) -> list[Segment]:
        """Remove every segment that begins after *position*, newest first."""
        gone: list[Segment] = []
        while self.items and self.items[-1].start > position:
            last = self.items.pop()
            self._starts.pop()
            self.files.unlink(last.path)
            gone.append(last)
        return gone

    def read(self, position: int, size: int) -> bytes:
        """Return up to *size* bytes of one segment from *position* on; empty if it has none."""
        segment = self.find(position)
        if segment is None:
            return b""
        try:
            return self.files.read(segment.path, min(size, segment.end - position), position - segment.start)
        except FileNotFoundError:
            if self.find(position) is segment:
                raise
            return b""  # removed meanwhile

    def head_store_ms(self, segment: Segment) -> int:
        """Return the store time of the record at the head of *segment*; 0 if there is none."""
        front = self.read(segment.start, FRONT_BYTES)
        if len(front) < FRONT_BYTES:
            return 0
        record = RecordView(front)
        return record.store_ms if record.magic in MAGICS else 0

    def read_now(self, position: int, size: int) -> bytes | bytearray | None:
        """As `read`, but return None if the read would wait for the disk, or fails, or there is no data."""
        segment = self.find(position)
        if segment is None:
            return None
        try:
            return self.files.read_now(segment.path, min(size, segment.end - position), position - segment.start)
        except OSError:
            return None  # `read` reports the error
