"""The sizes of the files in a data directory, which take precedence over the configuration.

RocketMQ refuses a store if a file has another size than its own configuration says, and every file of a kind has the
same size. So a store keeps the sizes that it was created with, by whichever broker; the settings of ``[store]`` are for
new stores. Sizes that show only damage are ignored: that of a file which a crash or a copy left short, and that of few
files among many.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from struct import Struct
from typing import Final

from msgspec.structs import replace

from martlet.records.layout import ENTRY_BYTES
from martlet.store.config import StoreConfig
from martlet.store.disk.files import Disk, Files
from martlet.store.disk.segments import Segments, numbered_names
from martlet.store.keys.index_files import HEADER, ITEM, ITEM_BYTES, SLOT, SLOT_BYTES, is_index_name
from martlet.store.queues.queues import queue_ids

__all__ = ["fit_sizes"]

logger = logging.getLogger("martlet.store.recovery.sizes")  # `martlet.offline.directory` ignores it

# The size of a store's only segment counts if it is at least this large: a smaller one was left short by a power cut
# when it was created, and a store that kept such a size would refuse most messages for ever.
LONE_SEGMENT_BYTES_MIN: Final = 1 << 20
# Files of consume queues to check.
FILES_SEEN: Final = 256
# Capacity, in entries, from which on the size of a single file counts.
LONE_ENTRIES_MIN: Final = 100
# Entries of an index file that are checked.
ITEMS_CHECKED: Final = 64
SEARCHED_AT_ONCE: Final = 1 << 20
# RocketMQ's default ratio: maxIndexNum is four times maxHashSlotNum.
ITEMS_OF_A_SLOT: Final = 4
POSITION: Final = Struct(">q")


def fit_sizes(directory: str, config: StoreConfig, disk: Disk) -> StoreConfig:
    """Return *config* with the sizes of the files in the data directory *directory*; logs each difference."""
    files = Files(disk, 4, read_only=True)
    try:
        segments = Segments(files, f"{directory}/commitlog", config.segment_bytes)
        fitted = replace(
            config,
            segment_bytes=segments.bytes_on_disk(LONE_SEGMENT_BYTES_MIN),
            queue_file_entries=_queue_entries(f"{directory}/consumequeue", config.queue_file_entries, disk),
        )
        if config.keys_index:
            slots, entries = _index_sizes(f"{directory}/index", config, disk, files)
            fitted = replace(fitted, index_slots=slots, index_entries=entries)
    finally:
        files.close()
    for key, kind in (
        ("segment_bytes", "log"),
        ("queue_file_entries", "consume queues"),
        ("index_slots", "key index"),
        ("index_entries", "key index"),
    ):
        size, configured = getattr(fitted, key), getattr(config, key)
        if size != configured:
            text = "the files of the %s were made with store.%s = %d, which stays so; the configuration says %d"
            logger.warning(text, kind, key, size, configured)
    return fitted


# ---- consume queues


def _queue_entries(directory: str, entries: int, disk: Disk) -> int:
    """Return the number of entries in a file of a consume queue: that of most files, unless they are too few."""
    sizes = Counter(size for size in islice(_queue_sizes(directory, disk), FILES_SEEN) if size)
    total = sum(sizes.values())
    if not total or sizes[entries * ENTRY_BYTES] * 2 >= total:
        return entries
    size, count = sizes.most_common(1)[0]
    file_entries, extra_bytes = divmod(size, ENTRY_BYTES)
    if extra_bytes or count * 2 <= total or (count == 1 and file_entries < LONE_ENTRIES_MIN):
        return entries
    return file_entries


def _queue_sizes(directory: str, disk: Disk) -> Iterator[int]:
    for topic in disk.names(directory):
        for queue_id in queue_ids(disk.names(f"{directory}/{topic}")):
            queue = f"{directory}/{topic}/{queue_id}"
            for start in numbered_names(disk.names(queue)):
                yield max(disk.path_size(f"{queue}/{start:020d}"), 0)


# ---- key index


def _index_sizes(directory: str, config: StoreConfig, disk: Disk, files: Files) -> tuple[int, int]:
    """Return slots and entries of an index file; those of *config* if the files do not show them."""
    configured = config.index_slots, config.index_entries
    paths = [f"{directory}/{name}" for name in disk.names(directory) if is_index_name(name)]
    sizes = Counter(size for path in paths if (size := disk.path_size(path)) > 0)
    if not sizes or _file_bytes(*configured) in sizes:
        return configured
    size, count = sizes.most_common(1)[0]
    if count * 2 <= sizes.total():
        return configured
    has_content = False
    for path in paths:
        if disk.path_size(path) == size and (count := _next_entry_number(path, files)) > 1:
            has_content = True
            slots_and_entries = _find_sizes(path, size, count, config, files)
            if slots_and_entries is not None:
                return slots_and_entries
    # Content that matches no sizes is damaged, and so may be the size.
    return configured if has_content else next(_possible_sizes(size, config), configured)


def _next_entry_number(path: str, files: Files) -> int:
    """Return the number of the next entry in the index file at *path*; 1 or less if it has none."""
    header = files.read(path, HEADER.size, 0)
    return HEADER.unpack(header)[-1] if len(header) == HEADER.size else 0


def _possible_sizes(size: int, config: StoreConfig) -> Iterator[tuple[int, int]]:
    """Yield the possible numbers of slots and entries of an index file of *size* bytes, the likeliest first."""
    content_bytes = size - HEADER.size
    for slots in (
        content_bytes // (SLOT_BYTES + ITEMS_OF_A_SLOT * ITEM_BYTES),
        config.index_slots,
        (content_bytes - config.index_entries * ITEM_BYTES) // SLOT_BYTES,
    ):
        entries, extra_bytes = divmod(content_bytes - slots * SLOT_BYTES, ITEM_BYTES)
        if slots > 0 and entries > 1 and not extra_bytes:
            yield slots, entries


def _file_bytes(slots: int, entries: int) -> int:
    return HEADER.size + slots * SLOT_BYTES + entries * ITEM_BYTES


def _find_sizes(path: str, size: int, count: int, config: StoreConfig, files: Files) -> tuple[int, int] | None:
    """Return slots and entries of the index file at *path*, whose header has neither.

    The size gives only the sum of both. The begin of the entries shows in the file: each entry names its slot.
    """
    *_, last_position, _, _ = HEADER.unpack(files.read(path, HEADER.size, 0))
    content_bytes = size - HEADER.size
    for slots, entries in _possible_sizes(size, config):
        if _fits_slots(path, size, slots, count, files):
            return slots, entries
    for at in _find_bytes(path, POSITION.pack(last_position), size, files):
        # The position is in the second field of the newest entry.
        slots = (at - 4 - (count - 1) * ITEM_BYTES - HEADER.size) // SLOT_BYTES
        if _fits_slots(path, size, slots, count, files):
            return slots, (content_bytes - slots * SLOT_BYTES) // ITEM_BYTES
    return None


def _fits_slots(path: str, size: int, slots: int, count: int, files: Files) -> bool:
    """Return whether the file can have *slots* slots: its first entries are in their slots' chains."""
    entries_bytes = size - HEADER.size - slots * SLOT_BYTES
    if slots <= 0 or entries_bytes <= 0 or entries_bytes % ITEM_BYTES or entries_bytes // ITEM_BYTES < count:
        return False
    numbers = range(1, min(count, ITEMS_CHECKED + 1))
    data = files.read(path, len(numbers) * ITEM_BYTES, HEADER.size + slots * SLOT_BYTES + ITEM_BYTES)
    for number in numbers:
        code, position, _, previous = ITEM.unpack_from(data, (number - 1) * ITEM_BYTES)
        (newest_number,) = SLOT.unpack(files.read(path, SLOT_BYTES, HEADER.size + code % slots * SLOT_BYTES))
        if code < 0 or position < 0 or not 0 <= previous < number <= newest_number < count:
            return False
    return bool(numbers)


def _find_bytes(path: str, needle: bytes, size: int, files: Files) -> Iterator[int]:
    """Yield each position in the file at *path* where the bytes *needle* begin."""
    at, kept_bytes = HEADER.size, b""
    while (at := files.next_data(path, at)) < size:
        data = kept_bytes + files.read(path, SEARCHED_AT_ONCE, at)
        found_at = data.find(needle)
        while found_at >= 0:
            yield at - len(kept_bytes) + found_at
            found_at = data.find(needle, found_at + 1)
        at += len(data) - len(kept_bytes)
        kept_bytes = data[-len(needle) + 1 :]
