"""The files of the key index: their format (RocketMQ IndexFile.java), and which there are.

A file ``index/<yyyyMMddHHmmssSSS>`` has a header, hash slots with the number of the newest entry, and entries, each
with the number of the previous one.
"""

from array import array
from datetime import datetime
from functools import partial
from struct import Struct
from typing import Final, final

from martlet.runtime.checksum import crc32
from martlet.runtime.steps import Steps, off_loop
from martlet.store.disk.checkpoint import Checkpoint
from martlet.store.disk.files import Files
from martlet.store.disk.segments import Segments
from martlet.store.keys.keyless import is_keyless, record_end

__all__ = ["IndexFile", "IndexFiles", "is_index_name"]

HEADER: Final = Struct(">4q2i")  # begin and end ms, begin and end position, used slots, next entry number
SLOT: Final = Struct(">i")
SLOT_BYTES: Final = 4
ITEM: Final = Struct(">iqii")  # hash, position, seconds since begin, previous entry
ITEM_BYTES: Final = 20
# Slots counted in one step, about a millisecond's work.
SLOTS_A_READ: Final = 32_768
SECONDS_MAX: Final = 2**31 - 1


@final
class IndexFile:
    """One file of the index, active or full; ``count`` is the number of the next entry (the first is 1)."""

    __slots__ = ("begin_ms", "begin_position", "count", "end_ms", "end_position", "path", "used_slots")

    def __init__(self, path: str) -> None:
        self.path = path
        self.begin_ms = 0
        self.end_ms = 0
        self.begin_position = 0
        self.end_position = 0
        self.used_slots = 0
        self.count = 1

    def header(self) -> bytes:
        return HEADER.pack(
            self.begin_ms, self.end_ms, self.begin_position, self.end_position, self.used_slots, self.count
        )

    def seconds_at(self, store_ms: int) -> int:
        """Return the seconds that this file's entry contains for a record that was stored at *store_ms*."""
        return min(max((store_ms - self.begin_ms) // 1000, 0), SECONDS_MAX)


@final
class IndexFiles:
    """All files of the index in *directory*, the oldest first; each has *slots* and room for *entries_max* - 1."""

    def __init__(self, files: Files, directory: str, slots: int, entries_max: int) -> None:
        self.files = files
        self.directory = directory
        self.slots = slots
        self.entries_max = entries_max
        self.items: list[IndexFile] = []
        # The directory has names that are not durable, or lacks some.
        self.new_names = False

    @property
    def file_bytes(self) -> int:
        return HEADER.size + self.slots * SLOT_BYTES + self.entries_max * ITEM_BYTES

    def entry_at(self, number: int) -> int:
        """Return the position of entry *number* in each file."""
        return HEADER.size + self.slots * SLOT_BYTES + number * ITEM_BYTES

    def load(self) -> bool:
        """Find the files; return False if one is damaged and all must be rebuilt."""
        for path in self._paths():
            item = self._load_file(path)
            if item is None:
                return False
            self.items.append(item)
        return True

    def _paths(self) -> list[str]:
        """Return the paths of index files; other files are ignored."""
        disk = self.files.disk
        paths = [f"{self.directory}/{name}" for name in disk.names(self.directory) if is_index_name(name)]
        return [path for path in paths if disk.path_size(path) >= 0]

    def _load_file(self, path: str) -> IndexFile | None:
        if self.files.size(path) != self.file_bytes:
            return None
        item = IndexFile(path)
        (
            item.begin_ms,
            item.end_ms,
            item.begin_position,
            item.end_position,
            item.used_slots,
            item.count,
        ) = HEADER.unpack(self.files.read(path, HEADER.size, 0))
        item.count = max(item.count, 1)
        is_valid = 0 <= item.used_slots <= self.slots and item.count <= self.entries_max
        is_valid = is_valid and 0 <= item.begin_position <= item.end_position and item.begin_ms >= 0
        return item if is_valid else None

    def total(self) -> int:
        """The number of entries in all files."""
        return sum(item.count - 1 for item in self.items)

    def headers_crc(self) -> int:
        """The CRC of the headers of all files with entries."""
        return crc32(b"".join(item.header() for item in self.items if item.count > 1))

    def create(self, position: int, store_ms: int) -> IndexFile:
        """Add a file whose first entry is of the record at *position*, stored at *store_ms*."""
        paths = {item.path for item in self.items}
        name_ms = store_ms
        while (path := f"{self.directory}/{_name(name_ms)}") in paths:
            name_ms += 1
        self.files.create(path, self.file_bytes)
        self.new_names = True
        item = IndexFile(path)
        item.begin_ms, item.begin_position = store_ms, position
        self.items.append(item)
        return item

    def clear(self) -> None:
        """Remove all files."""
        for path in self._paths():
            self.files.unlink(path)
        self.items.clear()
        self.new_names = True

    def remove_begun_after(self, position: int) -> None:
        """Remove the newest files that only have entries from log position *position* on; the keys are added again."""
        while self.items and (self.items[-1].count == 1 or self.items[-1].begin_position >= position):
            self.files.unlink(self.items.pop().path)

    def remove_before(self, position: int, active: IndexFile | None) -> None:
        """Remove files whose messages were all removed by retention, but never the *active* one."""
        while self.items and self.items[0] is not active and self.items[0].end_position < position:
            self.files.unlink(self.items.pop(0).path)
            self.new_names = True

    # ---- checks

    def covers(self, segments: Segments) -> bool:
        """Return whether the files index every record with keys up to their end, so none but the last can be missing.

        RocketMQ records the number of its files nowhere. If the last one is missing, its keys are indexed again.
        """
        covered_end = segments.start
        for item in self.items:
            if item.count > 1:
                if not is_keyless(segments, covered_end, item.begin_position):
                    return False
                covered_end = max(covered_end, record_end(segments, item.end_position))
        return True

    def agrees(self, checkpoint: Checkpoint, *, clean: bool) -> bool:
        """Return whether the files are those that *checkpoint* describes, or possibly newer."""
        if self.total() == checkpoint.index_entries:
            return self.headers_crc() == checkpoint.index_crc or checkpoint.shared
        return self.total() > checkpoint.index_entries and (checkpoint.shared or not clean)

    def check_slots(self, path: str, used_slots: int) -> bool:
        """Return whether file *path* has at least as many used slots as its header tells; blocks for 0.1 s.

        A query would not notice zeroed slots, because they name no entries.
        """
        count = 0
        for first_slot in range(0, self.slots, SLOTS_A_READ):
            size = min(SLOTS_A_READ, self.slots - first_slot) * SLOT_BYTES
            try:
                data = self.files.read(path, size, HEADER.size + first_slot * SLOT_BYTES)
            except FileNotFoundError:
                return True  # retention removed it
            count += len(data) // SLOT_BYTES - array("i", data).count(0)
        return count >= used_slots

    # ---- reads

    def newest_in_slot(self, item: IndexFile, slot: int) -> Steps[int]:
        """Return the number of the newest entry in *slot*: 0 for none, `item.count` (not an entry) if it is lost."""
        data = yield from self._read(item, SLOT_BYTES, HEADER.size + slot * SLOT_BYTES)
        return SLOT.unpack(data)[0] if len(data) == SLOT_BYTES else item.count

    def entry(self, item: IndexFile, number: int) -> Steps[bytes]:
        """Return the bytes of entry *number*; none if the file was removed."""
        return (yield from self._read(item, ITEM_BYTES, self.entry_at(number)))

    def _read(self, item: IndexFile, size: int, at: int) -> Steps[bytes]:
        try:
            data = self.files.read_now(item.path, size, at)
            if data is None:
                data = yield from off_loop(partial(self.files.read, item.path, size, at))
            return bytes(data)
        except FileNotFoundError:
            return b""


def is_index_name(name: str) -> bool:
    return len(name) == 17 and name.isascii() and name.isdecimal()


def _name(ms: int) -> str:
    moment = datetime.fromtimestamp(ms // 1000)
    return f"{moment:%Y%m%d%H%M%S}{ms % 1000:03d}"
