"""The key index: maps the keys of messages to their positions in the log.

Appends only queue a reference; `drain` does the work later, and a query drains first. Keys are added to the newest file
(`active_file.py`), and a query looks into all of them (`index_files.py`).
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Final, final

from martlet.message import find_property
from martlet.runtime.native import native
from martlet.runtime.steps import Blocking, Steps
from martlet.store.disk.checkpoint import Checkpoint
from martlet.store.disk.files import Files
from martlet.store.disk.segments import Segments
from martlet.store.keys.active_file import ActiveFile
from martlet.store.keys.index_files import ITEM, ITEM_BYTES, IndexFile, IndexFiles
from martlet.store.keys.key_hashes import KeyHashes
from martlet.store.keys.usual import Waiting, index_usual
from martlet.store.queues.queues import Queue

__all__ = ["KeyIndex"]

logger = logging.getLogger("martlet.store")

# The maximum number of keys of one message, whose properties have at most 32,767 bytes.
KEYS_MAX: Final = 16_384
# A query follows at most this many entries of a chain; a key that every message has makes long chains.
CHAIN_MAX: Final = 100_000
# Work in one slice of a query: chain entries to follow, each a read from the file, or keys to index first.
WALKED_AT_ONCE: Final = 256
DRAINED_AT_ONCE: Final = 256


@final
class KeyIndex:
    """The index of all keys: its ``files``, the ``active`` file among them, and messages that wait to be indexed."""

    def __init__(self, files: Files, directory: str, slots: int, entries_max: int) -> None:
        self.files = IndexFiles(files, directory, slots, entries_max)
        self.active = ActiveFile(self.files)
        self.hashes = KeyHashes()
        self._index_usual = native(index_usual)
        # Everything before this log position is indexed.
        self.position = 0
        self.store_ms = 0
        # A query found an impossible entry: the index must be rebuilt.
        self.damaged = False
        # Files that existed at the start, and the number of used slots of each.
        self.unchecked: list[tuple[str, int]] = []
        # A thread is writing the result of `ActiveFile.take_slots`.
        self.saving = False
        self.pending: deque[Waiting] = deque()
        # Bytes of the waiting properties, and the keys in them at most: one per message, and one per space.
        self.pending_bytes = self.pending_keys = 0
        # Keys of the first waiting message that are not indexed yet, if it has so many that they take several slices;
        # None before its first slice.
        self._keys_left: list[bytes] | None = None

    def begin(self, checkpoint: Checkpoint | None, segments: Segments, end: int, *, clean: bool) -> None:
        """Load the existing files for a log in *segments* up to *end*; keys are missing from `position` on.

        After a crash, only our own checkpoint tells how much of the index is durable: a power failure can leave a
        header that is newer than its slots.
        """
        start = segments.start
        files, are_loaded = self.files, self.files.load()
        is_own = checkpoint is not None and checkpoint.position >= 0
        is_foreign = not is_own and checkpoint is not None and not checkpoint.known
        if are_loaded and clean and is_foreign and files.items and files.covers(segments):
            # These are RocketMQ's files.
            self.active.reopen(clean=False)
            self.position = min(max(max(item.end_position for item in files.items), start), end)
        elif are_loaded and checkpoint is not None and is_own and files.agrees(checkpoint, clean=clean):
            if not (clean or checkpoint.shared):
                files.remove_begun_after(checkpoint.index_position)
            self.unchecked = [(item.path, item.used_slots) for item in files.items]
            self.active.reopen(clean=clean)
            files.new_names = not clean
            self.position = min(max(checkpoint.index_position, start), end)
        else:
            if end > start or files.items:
                logger.warning("the key index is missing or damaged; rebuilding it from the log")
            self.clear()
            self.position = start

    def clear(self) -> None:
        """Remove all files and start from scratch."""
        self.files.clear()
        self.active.clear()
        self.damaged = False
        self.unchecked.clear()
        self.forget_pending()

    def remove_before(self, position: int) -> None:
        """Remove files whose messages were all removed by retention."""
        self.files.remove_before(position, self.active.item)

    # ---- keys

    def accept(self, appended: Sequence[Waiting]) -> None:
        """Queue the messages of a commit for `drain`; messages without keys are skipped."""
        joined = b"".join([properties for _, _, _, _, properties in appended])
        if self.pending or b"KEY" in joined:
            self.pending.extend(appended)
            self.pending_bytes += len(joined)
            self.pending_keys += len(appended) + joined.count(b" ")
        else:
            _, _, self.position, store_ms, _ = appended[-1]
            self.store_ms = max(self.store_ms, store_ms)

    def forget_pending(self) -> None:
        """Drop the waiting messages; a reader of the log from ``position`` on finds them again."""
        self.pending.clear()
        self.pending_bytes = self.pending_keys = 0
        self._keys_left = None

    def drain(self, budget: int) -> bool:
        """Index about *budget* waiting messages and keys; return whether more are waiting."""
        pending = self.pending
        while pending and budget > 0 and not (self.saving and self._is_nearly_full()):
            messages, budget = self.index(pending, budget)
            if self._keys_left is not None:
                break
            for message in messages:
                _, _, self.position, _, properties = message
                self.pending_bytes -= len(properties)
                self.pending_keys -= 1 + properties.count(b" ")
        return bool(pending)

    def index(self, waiting: deque[Waiting], budget: int) -> tuple[Sequence[Waiting], int]:
        """Index about *budget* keys of the first messages of *waiting*, and remove these.

        Returns the removed messages, and the unused budget. A message of which some keys are left stays.
        """
        if self._keys_left is None:
            # A checkpoint that writes slots in a thread must not meet a new file.
            entries_max = self.files.entries_max - (KEYS_MAX if self.saving else 0)
            count, budget, newest_ms = self._index_usual(waiting, budget, self.active, entries_max, self.hashes)
            self.store_ms = max(self.store_ms, newest_ms)
            if count:
                return [waiting.popleft() for _ in range(count)], budget
        budget = self._index_odd(waiting[0], budget)
        return () if self._keys_left is not None else (waiting.popleft(),), budget

    def _index_odd(self, message: Waiting, budget: int) -> int:
        """Index about *budget* keys of *message*; return the unused budget."""
        queue, position, _, store_ms, properties = message
        keys = self._keys_left
        if keys is None:
            keys = _keys_in(properties)
        for key in keys[-budget:]:
            self.active.insert(self.hashes.of(queue, key), position, store_ms)
        budget_left = budget - max(len(keys), 1)
        del keys[-budget:]
        self._keys_left = keys or None
        if self._keys_left is None and store_ms > self.store_ms:
            self.store_ms = store_ms
        return budget_left

    def _is_nearly_full(self) -> bool:
        """Return whether one message could fill the active file; two threads must not write its slots at once."""
        item = self.active.item
        return item is not None and item.count + KEYS_MAX >= self.files.entries_max

    # ---- queries

    def find(
        self,
        queue: Queue,
        key: bytes,
        count_max: int,
        begin_ms: int,
        end_ms: int,
        store_ms_of: Callable[[int], Steps[int]],
    ) -> Steps[list[int]]:
        """Return up to *count_max* log positions, newest first, of messages in the time range that may have *key*.

        They include messages whose keys have the same hash: the caller compares keys.

        Args:
          store_ms_of: returns the store time of the record at a log position, -1 if unknown; an entry with another
            time is damaged.
        """
        for _ in range(self.pending_keys // DRAINED_AT_ONCE + 1):
            if not self.drain(DRAINED_AT_ONCE):
                break
            yield
        code = self.hashes.of(queue, key)
        positions: dict[int, None] = {}
        for item in reversed(list(self.files.items)):
            if item.begin_ms > end_ms or item.end_ms < begin_ms or item not in self.files.items:
                continue
            for entry in self._chain(item, code):
                if entry is None or isinstance(entry, Blocking):
                    yield entry
                    if item not in self.files.items:  # it was removed meanwhile
                        break
                    continue
                position, seconds = entry
                stored_ms = yield from store_ms_of(position)
                if stored_ms >= 0 and item.seconds_at(stored_ms) != seconds:
                    self.damaged = True
                    return []
                at = item.begin_ms + seconds * 1000
                # Entries contain whole seconds.
                if begin_ms - 999 <= at <= end_ms:
                    positions[position] = None
                    if len(positions) >= count_max:
                        return list(positions)
        return list(positions)

    def _chain(self, item: IndexFile, code: int) -> Generator[tuple[int, int] | Blocking[bytes] | None, None, None]:
        """Yield position and seconds of each entry with the hash *code*; at the end of a slice yield as `Steps` do."""
        slot = code % self.files.slots
        number = yield from self._newest_number(item, slot)
        for walked in range(1, CHAIN_MAX + 1):
            if walked % WALKED_AT_ONCE == 0:
                yield None
            if not number:
                return
            entry = (yield from self._entry(item, number)) if 0 < number < item.count else b""
            key, position, seconds, previous = ITEM.unpack(entry) if len(entry) == ITEM_BYTES else (-1, 0, 0, 0)
            if key < 0 or key % self.files.slots != slot or not 0 <= previous < number:
                self.damaged = item in self.files.items  # otherwise retention removed it meanwhile
                return
            if key == code:
                yield position, seconds
            number = previous

    def _newest_number(self, item: IndexFile, slot: int) -> Steps[int]:
        if item is self.active.item:
            return self.active.newest_in_slot(slot)
        return (yield from self.files.newest_in_slot(item, slot))

    def _entry(self, item: IndexFile, number: int) -> Steps[bytes]:
        unsaved = self.active.unsaved_entry(number) if item is self.active.item else None
        return unsaved if unsaved is not None else (yield from self.files.entry(item, number))


def _keys_in(properties: bytes) -> list[bytes]:
    """Return the words of KEYS and the unique key."""
    words = [*find_property(properties, b"KEYS").split(b" "), find_property(properties, b"UNIQ_KEY")]
    return [word for word in words if word]
