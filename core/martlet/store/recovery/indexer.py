"""Adds the keys of records to the key index: keys of a commit at once, and all missing ones in the background."""

import logging
from collections import deque
from functools import partial
from typing import Final, final

import trio

from martlet.runtime.wakeup import Wakeup
from martlet.store.append.committer import Appended
from martlet.store.append.flusher import Flusher
from martlet.store.disk.files import Disk, is_full
from martlet.store.disk.page_cache import LogWriter
from martlet.store.disk.segments import Segments
from martlet.store.format.atomic import valid_after
from martlet.store.keys.key_index import KeyIndex
from martlet.store.keys.usual import Waiting
from martlet.store.queues.queues import Queue, Queues
from martlet.store.recovery.recovery import Progress
from martlet.store.recovery.scan import Scan

__all__ = ["IndexFollower", "Indexer"]

logger = logging.getLogger("martlet.store")

# Messages and keys indexed per turn of the event loop; 2.3 us each.
INDEX_BATCH: Final = 256
# If more messages and keys wait for the key index, commits help.
UNINDEXED_MAX: Final = 20_000
INDEX_HELP: Final = 64  # a commit indexes this many more than it adds
INDEX_HELP_MAX: Final = 2048
# If more messages, or more bytes of properties, wait, the index follows the log instead: memory has a limit.
WAITING_MAX: Final = 1_000_000
WAITING_BYTES_MAX: Final = 64 << 20
# A key index that is at most this far behind is completed while the store opens; otherwise in the background.
FOLLOW_AT_ONCE_BYTES: Final = 16 * 1024 * 1024
# What a thread reads at once in the background: bytes, and about as many messages; and the blocks in which it reads.
FOLLOWED_AT_ONCE_BYTES: Final = 1024 * 1024
FOLLOWED_AT_ONCE: Final = 2048
FOLLOW_BYTES: Final = 128 * 1024  # takes one or two milliseconds
# Up to this many slots are counted while the store opens; a production index has 5,000,000.
SLOTS_AT_ONCE: Final = 65_536


@final
class IndexFollower:
    """Completes the index up to the end of the log, block by block.

    `read_on` finds the keys of the next records, and `index` adds some of them at a time.

    While it runs, appended records are not queued for the index: they are read from the log too.
    """

    def __init__(self, segments: Segments, queues: Queues, keys: KeyIndex) -> None:
        self.segments = segments
        self.keys = keys
        # One per topic, for the hash of its name. The index follows queues and never creates one.
        self._names: dict[str, Queue] = {}
        self._found: list[Waiting] = []
        self._waiting: deque[Waiting] = deque()
        self._position = 0  # end of the complete index once nothing waits
        self._block_bytes = FOLLOW_BYTES
        self._scan = Scan(segments, queues, self._name_queue, keys=self._found)

    def index(self, budget: int) -> bool:
        """Index about *budget* keys; return whether all that were found are done. Raises `OSError`."""
        messages, keys = self._waiting, self.keys
        while messages and budget > 0:
            _, budget = keys.index(messages, budget)
        if not messages:
            keys.position = self._position
        return not messages

    def _name_queue(self, topic: str, queue_id: int) -> Queue:
        queue = self._names.get(topic)
        if queue is None:
            queue = self._names[topic] = Queue(topic, 0)
        return queue

    def read_on(self, end: int) -> None:
        """Find the keys of the next records up to log position *end*, once `index` has none left.

        Blocks; runs in any thread.
        """
        begin = self._position = max(self.keys.position, self.segments.start)
        while self._position < min(end, begin + FOLLOWED_AT_ONCE_BYTES) and len(self._waiting) < FOLLOWED_AT_ONCE:
            self._read_block(end)

    def _read_block(self, end: int) -> None:
        begin, size = self._position, self._block_bytes
        self._block_bytes = FOLLOW_BYTES
        segment = self.segments.find(begin)
        if segment is None:
            self._position = end
            return
        data = self.segments.read(begin, min(size, end - begin))
        bytes_done, size_needed = self._scan.take_block(segment, begin, data)
        self._waiting.extend(self._found)
        self._found.clear()
        if bytes_done:
            self._position += bytes_done
        elif size < size_needed <= end - begin:
            self._block_bytes = size_needed
        else:
            following = valid_after(self.segments, begin)
            self._position = following if 0 <= following < end else end


@final
class Indexer:
    """Feeds *keys*, which is None in a store without a key index; sets *wakeup* when there is work for `drain`."""

    def __init__(
        self,
        keys: KeyIndex | None,
        disk: Disk,
        segments: Segments,
        queues: Queues,
        tail: LogWriter,
        flusher: Flusher,
        wakeup: Wakeup,
    ) -> None:
        self.keys = keys
        self._disk = disk
        self._segments = segments
        self._queues = queues
        self._tail = tail
        self._flusher = flusher
        self._wakeup = wakeup
        # Adds missing keys to the key index; None if only `keys.pending` are missing.
        self._follower: IndexFollower | None = None
        self._behind = trio.Event()
        # Set when the key index may have become complete, and then replaced by a new event.
        self._moved = trio.Event()
        # The durable position of the key index when its slots were last written, the number of entries then, and the
        # CRC of its headers.
        self.saved = (0, 0, 0)

    def open_at(self, end: int) -> None:
        """Start after a recovery that ended at log position *end*."""
        keys = self.keys
        if keys is None:
            return
        if keys.files.slots <= SLOTS_AT_ONCE and not all(keys.files.check_slots(*each) for each in keys.unchecked):
            logger.warning("the key index is damaged; rebuilding it from the log")
            keys.clear()
            keys.position = self._segments.start
        if keys.files.slots <= SLOTS_AT_ONCE:
            keys.unchecked.clear()
        self._follower = IndexFollower(self._segments, self._queues, keys)
        if end - keys.position > FOLLOW_AT_ONCE_BYTES or not self._complete_now(self._follower, end):
            self._behind.set()

    # ---- appends

    def accept(self, appended: list[Appended]) -> None:
        """Accept the records of a commit."""
        keys = self.keys
        if keys is not None and self._follower is None:
            keys_before = keys.pending_keys
            keys.accept(appended)
            if keys.pending_keys > UNINDEXED_MAX:
                self._index_backlog(keys, keys.pending_keys - keys_before)
        self._wakeup.set()

    def _index_backlog(self, keys: KeyIndex, appended: int) -> None:
        """Index slightly more than was *appended*, so the backlog shrinks and no commit pays for all of it."""
        try:
            keys.drain(min(appended + INDEX_HELP, INDEX_HELP_MAX))
        except OSError as error:
            logger.warning("the key index cannot grow: %s; retrying later", error)
        if keys.pending_keys > WAITING_MAX or keys.pending_bytes > WAITING_BYTES_MAX:
            logger.warning(
                "%d messages have more keys than can be indexed at once; the key index follows in the background, and "
                "queries by key wait for it",
                len(keys.pending),
            )
            keys.forget_pending()
            self._follower = IndexFollower(self._segments, self._queues, keys)
            self._behind.set()

    async def drain(self) -> None:
        """Index the waiting messages, one batch per turn."""
        keys = self.keys
        while keys is not None and self._follower is None and keys.drain(INDEX_BATCH):
            await trio.lowlevel.checkpoint()

    def drain_now(self) -> None:
        """Like `drain`, but blocking."""
        if self.keys is not None and self._follower is None:
            while self.keys.drain(self.keys.pending_keys):
                pass

    # ---- completeness

    @property
    def is_complete(self) -> bool:
        """Return whether the key index has every key: not damaged, not being rebuilt, and its files were checked."""
        keys = self.keys
        return keys is None or not (keys.damaged or keys.unchecked or self._follower is not None)

    async def wait_complete(self) -> None:
        """Return once the key index is complete."""
        while not self.is_complete:
            await self._moved.wait()

    def wake(self) -> None:
        """Request the rebuild of a damaged index."""
        self._wakeup.set()

    def _announce(self) -> None:
        event, self._moved = self._moved, trio.Event()
        event.set()

    async def check(self) -> None:
        """Check in a worker thread whether the files of the key index have lost slots."""
        keys = self.keys
        while keys is not None and keys.unchecked:
            path, used_slots = unchecked = keys.unchecked[-1]
            has_all_slots = await self._disk.off_loop(partial(keys.files.check_slots, path, used_slots))
            if unchecked in keys.unchecked:  # not rebuilt meanwhile
                keys.unchecked.remove(unchecked)
                if not has_all_slots:
                    keys.damaged = True
                    self._wakeup.set()
        self._announce()

    def rebuild_damaged(self) -> None:
        """Restart the key index from scratch if a query found an impossible entry."""
        keys = self.keys
        if keys is None or not keys.damaged or keys.saving or self._follower is not None:
            return
        logger.warning("the key index is damaged; rebuilding it from the log")
        keys.clear()
        keys.position = self._segments.start
        self.saved = (0, 0, keys.files.headers_crc())
        self._follower = IndexFollower(self._segments, self._queues, keys)
        self._behind.set()

    # ---- adding missing keys

    def complete(self, report: Progress | None = None) -> bool:
        """Index every record, instead of `follow`; return False if the disk is full. Blocks.

        Args:
          report: called often with the bytes done, the total bytes, and the entries so far.
        """
        return self._follower is None or self._complete_now(self._follower, self._tail.written, report)

    async def follow(self) -> None:
        """Complete the key index whenever it is far behind: after a start, or while it is rebuilt; until cancelled."""
        await self.check()
        while True:
            await self._behind.wait()
            self._behind = trio.Event()
            if self._follower is not None:
                await self._complete_in_turns(self._follower)

    def _complete_now(self, follower: IndexFollower, end: int, report: Progress | None = None) -> bool:
        """Complete the key index up to log position *end*; return False if the disk is full."""
        begin = follower.keys.position
        try:
            while follower.keys.position < end:
                follower.read_on(end)
                while not follower.index(WAITING_MAX):
                    pass
                if report is not None:
                    report(follower.keys.position - begin, end - begin, follower.keys.files.total())
        except OSError as error:
            if not is_full(error):
                raise
            return False
        self._follower = None
        return True

    async def _complete_in_turns(self, follower: IndexFollower) -> None:
        while True:
            end = self._tail.written
            if follower.keys.position >= end:
                self._follower = None
                self._announce()
                return
            await self._disk.off_loop(partial(follower.read_on, end))
            while not await self._index_some(follower):
                await trio.lowlevel.checkpoint()

    async def _index_some(self, follower: IndexFollower) -> bool:
        """Index some keys that *follower* has found; return whether none is left. Waits while the disk is full."""
        try:
            return follower.index(INDEX_BATCH)
        except OSError as error:
            if not is_full(error):
                raise self._flusher.fail(error) from error
            await trio.sleep(1)
            return False
