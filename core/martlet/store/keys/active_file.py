"""The newest file of the key index, to which keys are added.

Its slots are in memory. A checkpoint writes them, after the entries that they name are durable, so slots never name
missing entries after a crash.
"""

import mmap
import sys
from array import array
from typing import Final, final

from martlet.store.keys.index_files import HEADER, ITEM, ITEM_BYTES, SECONDS_MAX, SLOT_BYTES, IndexFile, IndexFiles

__all__ = ["ActiveFile"]

ITEM_PACK: Final = ITEM.pack
PAGE_SLOTS: Final = 1024  # a page of slots is written when one of its slots has changed
PAGE_BYTES: Final = PAGE_SLOTS * SLOT_BYTES


@final
class ActiveFile:
    """The slots and unsaved entries of ``item``, the newest of *files*; None until there is a key."""

    def __init__(self, files: IndexFiles) -> None:
        self._files = files
        self.slot_count = files.slots
        self._entries_max = files.entries_max
        self.item: IndexFile | None = None
        # In native byte order; written page by page.
        self.slots = memoryview(array("i"))
        self.dirty_pages = bytearray()
        self.entries = bytearray()
        self._saved = 1

    def clear(self) -> None:
        """Forget the file, which was removed."""
        self.item = None
        self.slots = memoryview(array("i"))
        self.entries = bytearray()
        self._saved = 1

    def reopen(self, *, clean: bool) -> None:
        """Continue the newest file if it has room; after a crash, count its entries again."""
        if not self._files.items:
            return
        item = self.item = self._files.items[-1]
        self.slots = memoryview(
            _swap_bytes(self._files.files.read(item.path, self.slot_count * SLOT_BYTES, HEADER.size))
        )
        self.dirty_pages = bytearray(self.slot_count // PAGE_SLOTS + 1)
        if not clean:
            # A crash while slots were written: they may name entries beyond the header's count.
            newest_number = max(self.slots)
            item.count = max(item.count, min(newest_number, self._entries_max - 1) + 1)
        self._saved = item.count
        self.entries = bytearray()

    def insert(self, key: int, position: int, store_ms: int) -> None:
        """Add an entry with hash *key* for the record at *position*, stored at *store_ms*."""
        item = self.item
        if item is None or item.count >= self._entries_max:
            item = self._begin_file(position, store_ms)
        slot = key % self.slot_count
        previous: int = self.slots[slot]
        seconds = (store_ms - item.begin_ms) // 1000
        if seconds < 0:
            seconds = 0
        elif seconds > SECONDS_MAX:
            seconds = SECONDS_MAX
        self.entries += ITEM_PACK(key, position, seconds, previous)
        count = item.count
        self.slots[slot] = count
        self.dirty_pages[slot // PAGE_SLOTS] = 1
        item.count = count + 1
        if not previous:
            item.used_slots += 1
        item.end_ms = store_ms
        item.end_position = position

    def _begin_file(self, position: int, store_ms: int) -> IndexFile:
        if self.item is not None:
            self.save_entries()
            # Entries that slots name must survive a power failure.
            self._files.files.sync(self.item.path)
            self.write_slots(self.item.path, self.take_slots())
        item = self.item = self._files.create(position, store_ms)
        self.slots = _zeros(self.slot_count)
        self.dirty_pages = bytearray(self.slot_count // PAGE_SLOTS + 1)
        self.entries = bytearray()
        self._saved = 1
        return item

    # ---- saving

    def save_entries(self) -> str:
        """Write new entries into the active file and return its path; empty if there are none."""
        item = self.item
        if item is None or not self.entries:
            return ""
        data, self.entries = self.entries, bytearray()
        try:
            self._files.files.write(item.path, data, self._files.entry_at(self._saved))
        except OSError:
            self.entries = data + self.entries
            raise
        self._saved = item.count
        return item.path

    def take_slots(self) -> list[tuple[int, bytes]]:
        """Return the changes of slots and header by position in the active file, and consider them saved.

        Write them after every entry that was saved before this call is durable.
        """
        item = self.item
        if item is None:
            return []
        changes: list[tuple[int, bytes]] = []
        first_page = self.dirty_pages.find(1)
        while first_page >= 0:
            end_page = self.dirty_pages.find(0, first_page)
            end_page = len(self.dirty_pages) if end_page < 0 else end_page
            slots = self.slots[first_page * PAGE_SLOTS : end_page * PAGE_SLOTS]
            changes.append((HEADER.size + first_page * PAGE_BYTES, _swap_bytes(slots.tobytes()).tobytes()))
            first_page = self.dirty_pages.find(1, end_page)
        self.dirty_pages = bytearray(len(self.dirty_pages))
        if changes:
            changes.append((0, item.header()))
        return changes

    def write_slots(self, path: str, parts: list[tuple[int, bytes]]) -> None:
        """Write the result of `take_slots` durably into *path*, whose entries are durable.

        After an error the pages are dirty again, so the next `take_slots` returns them.
        """
        try:
            for at, data in parts:
                self._files.files.write(path, data, at)
            self._files.files.sync(path)
        except OSError:
            for at, data in parts:
                if at:  # at 0 is the header, which is written each time
                    first, pages = (at - HEADER.size) // PAGE_BYTES, -(-len(data) // PAGE_BYTES)
                    self.dirty_pages[first : first + pages] = b"\x01" * pages
            raise

    # ---- reading

    def newest_in_slot(self, slot: int) -> int:
        """Return the number of the newest entry in *slot*; 0 for none."""
        return self.slots[slot]

    def unsaved_entry(self, number: int) -> bytes | None:
        """Return the bytes of entry *number*; None if it is in the file."""
        if number < self._saved:
            return None
        at = (number - self._saved) * ITEM_BYTES
        return bytes(self.entries[at : at + ITEM_BYTES])


def _zeros(count: int) -> memoryview:
    """Return *count* writable i32s, all 0, which take memory page by page once they are set.

    A bytearray would clear the 20 MB of RocketMQ's 5 million slots at once, which takes 10 ms.
    """
    memory = mmap.mmap(-1, count * SLOT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(memory).cast("i")


def _swap_bytes(data: bytes) -> "array[int]":
    """Return the i32s in *data* converted between big-endian and native order."""
    numbers = array("i", data)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers
