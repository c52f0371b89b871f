"""What follows appends in the background: entries and keys go to their files, checkpoints are made.

A start reads the log only from the newest checkpoint on, so what a checkpoint claims must be on the disk before it is
written: first the queues' entries of durable records, then the sync of their files, then the checkpoint.
"""

import errno
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, final

import trio

from martlet.store.checkpoint import Checkpoint, QueueList, write_checkpoint, write_queue_list
from martlet.store.recovery import Follower

if TYPE_CHECKING:
    from martlet.store.log import Store

__all__ = ["Upkeep"]

logger = logging.getLogger("martlet.store")

# Messages that are indexed before the event loop gets its turn.
INDEX_BATCH: Final = 256
# A key index that is this far behind is completed while the store opens, else in the background,
# in blocks that take less than a millisecond each.
FOLLOW_AT_ONCE_BYTES: Final = 16 * 1024 * 1024
FOLLOW_BYTES: Final = 128 * 1024
# The slots of the key index, 20 MB, are written at most this often.
INDEX_SECONDS: Final = 15.0
# With more files than this to sync, one sync of the whole file system is quicker.
SYNC_EACH_MAX: Final = 100
# With more changed queues than this only a checkpoint saves them, and only time brings one: each is a file to open,
# write and close.
SAVE_OFTEN_MAX: Final = 1000
# Queues that are saved before the event loop gets its turn.
SAVE_BATCH: Final = 16


@final
class Upkeep:
    """The indexes and checkpoints of one store."""

    __slots__ = (
        "_dirty_paths",
        "_index_saved",
        "_index_saved_at",
        "_store",
        "_work",
        "checkpointed",
        "deleted",
        "follower",
    )

    def __init__(self, store: "Store") -> None:
        self._store = store
        self._work = trio.Event()
        self._dirty_paths: set[str] = set()
        # Below this log position consume queues and checkpoint are durable.
        self.checkpointed = 0
        # Topics that were removed, with the log position before which their records are void.
        self.deleted: dict[str, int] = {}
        # Makes up for what the key index lacks; None when it lacks nothing but `keys.pending`.
        self.follower: Follower | None = None
        # Up to where the key index was durable when its slots were last written, with how many entries.
        self._index_saved = (0, 0)
        self._index_saved_at = 0.0

    def stir(self) -> None:
        """Something was appended."""
        if not self._work.is_set():
            self._work.set()

    def open_at(self, end: int, listed: QueueList | None) -> None:
        """Begin behind a recovery that ended at *end*; completes the key index unless it is far behind."""
        store, keys = self._store, self._store.keys
        self.deleted = listed.deleted if listed else {}
        if keys is None:
            return
        self.follower = Follower(store.segments, store.queues, keys)
        if end - keys.position <= FOLLOW_AT_ONCE_BYTES:
            wanted = FOLLOW_BYTES
            while keys.position < end:
                wanted = self.follower.take(self.follower.read(end, wanted), end, wanted) or FOLLOW_BYTES
            self.follower = None

    def distrust(self, checkpoint: Checkpoint | None) -> None:
        """Queues are to be made anew: should this start not come to its end, the next reads the whole log as well."""
        store = self._store
        if checkpoint is not None:
            changed = replace(checkpoint, position=store.segments.start)
            write_checkpoint(store.files, f"{store.directory}/checkpoint", changed)

    def delete_topic(self, topic: str) -> None:
        """Note that what the log holds of *topic* is void; its queues go next."""
        before = dict(self.deleted)
        self.deleted[topic] = self._store.tail.written
        try:
            self._write_list(without=topic)
        except OSError:
            self.deleted = before
            raise

    async def follow(self) -> None:
        """Complete the key index after a start that found it far behind."""
        store = self._store
        follower, wanted = self.follower, FOLLOW_BYTES
        while follower is not None:
            end = store.tail.written
            if follower.keys.position >= end:
                self.follower = follower = None
                break
            follower.keys.position = max(follower.keys.position, store.segments.start)
            data = await store.disk.off_loop(partial(follower.read, end, wanted))
            try:
                wanted = follower.take(data, end, wanted) or FOLLOW_BYTES
            except OSError as error:
                if not store.retention.is_full_error(error):
                    raise store.flusher.fail(error) from error
                await trio.sleep(1)

    async def maintain(self) -> None:
        """Bring entries and keys to their files, and make checkpoints, as appends come; until cancelled."""
        store = self._store
        interval = store.config.persist_interval_ms / 1000
        checkpoint_seconds = store.config.checkpoint_interval_ms / 1000
        last = trio.current_time()
        while True:
            await self._work.wait()
            self._work = trio.Event()
            await trio.sleep(interval)
            try:
                await self._drain_keys()
                few = len(store.queues.dirty) <= SAVE_OFTEN_MAX
                if few:
                    await self._save_queues()
                grown = few and store.flusher.durable - self.checkpointed >= store.config.checkpoint_bytes
                if grown or trio.current_time() - last >= checkpoint_seconds:
                    await self.checkpoint()
                    last = trio.current_time()
            except OSError as error:
                if not store.retention.is_full_error(error):
                    raise store.flusher.fail(error) from error
                store.refusal = store.retention.refusal_for(error)
            if store.queues.dirty or self.checkpointed < store.tail.written:
                self._work.set()

    async def _drain_keys(self) -> None:
        keys = self._store.keys
        while keys is not None and keys.drain(INDEX_BATCH):
            await trio.lowlevel.checkpoint()

    async def _save_queues(self) -> None:
        """Write the entries of durable records, and of the key index, to their files."""
        store = self._store
        limit = store.flusher.durable
        for index, queue in enumerate(list(store.queues.dirty)):
            self._dirty_paths |= store.queues.save(queue, limit)
            if index % SAVE_BATCH == SAVE_BATCH - 1:
                await trio.lowlevel.checkpoint()
        if store.keys is not None:
            store.keys.save_entries()

    async def checkpoint(self) -> None:
        """Make the indexes durable and note how far they are, so that a start reads only what is behind."""
        store = self._store
        position = store.flusher.durable
        await self._drain_keys()
        await self._save_queues()
        # Nothing was appended below `position` since, so all its entries are in files now.
        due = trio.current_time() - self._index_saved_at >= INDEX_SECONDS
        work = self._take_checkpoint(position, with_index=due)
        # A stop must not come between: what is to be synced is known to `work` alone.
        with trio.CancelScope(shield=True):
            await store.disk.off_loop(work)
        self.checkpointed = max(self.checkpointed, position)

    def _take_checkpoint(self, position: int, *, with_index: bool) -> Callable[[], None]:
        """Return the blocking part of a checkpoint at *position*, whose entries are all in their files."""
        store = self._store
        paths, self._dirty_paths = sorted(self._dirty_paths), set()
        directories, store.queues.files.new_directories = sorted(store.queues.files.new_directories), set()
        keys = store.keys if with_index else None
        made = Checkpoint(store.last_store_ms, store.last_store_ms, store.last_store_ms, position=position)
        made.confirmed_position = position
        parts: list[tuple[int, bytes]] = []
        index_path = ""
        before = self._index_saved, self._index_saved_at
        if keys is not None:
            keys.save_entries()
            parts = keys.take_slots()
            index_path = keys.active.path if keys.active is not None else ""
            self._index_saved = min(keys.position, position), keys.total()
            self._index_saved_at = trio.current_time()
            if index_path:
                paths.append(index_path)
            if keys.new_names:
                directories.append(keys.directory)
                keys.new_names = False
            keys.saving = True
        made.index_position, made.index_entries = self._index_saved

        def work() -> None:
            try:
                self._sync_all(paths, directories)
                if keys is not None and index_path and parts:
                    keys.write_slots(index_path, parts)
                write_checkpoint(store.files, f"{store.directory}/checkpoint", made)
            except OSError:
                self._index_saved, self._index_saved_at = before
                raise
            finally:
                if keys is not None:
                    keys.saving = False

        return work

    def _sync_all(self, paths: list[str], directories: list[str]) -> None:
        store = self._store
        try:
            if len(paths) + len(directories) > SYNC_EACH_MAX:
                store.disk.sync_everything(store.directory)
                return
            for path in paths:
                self._sync_if_there(path)
            for directory in directories:
                self._sync_directory_if_there(directory)
        except OSError as error:
            # Also for want of space: what was to be synced may be gone, and the next sync would not say so.
            raise OSError(errno.EIO, f"a sync failed: {error.strerror}", error.filename) from error

    def _sync_if_there(self, path: str) -> None:
        try:
            self._store.files.sync(path)
        except FileNotFoundError:
            logger.debug("%s was removed before it was synced", path)

    def _sync_directory_if_there(self, path: str) -> None:
        try:
            self._store.disk.sync_directory(path)
        except FileNotFoundError:
            logger.debug("%s was removed before it was synced", path)

    def write_checkpoint(self) -> None:
        """As `checkpoint`, blocking, with the list of queues; for the start and the end."""
        store = self._store
        keys = store.keys
        if keys is not None:
            keys.drain(len(keys.pending))
        position = store.flusher.durable
        for queue in list(store.queues.dirty):
            self._dirty_paths |= store.queues.save(queue, position)
        self._take_checkpoint(position, with_index=True)()
        self._write_list()
        self.checkpointed = position

    def _write_list(self, without: str = "") -> None:
        """Write what the queues hold in durable files."""
        store = self._store
        while store.retention.advance(1 << 20):
            pass
        topics = {
            topic: {queue_id: (queue.first_offset, queue.saved) for queue_id, queue in of_topic.items()}
            for topic, of_topic in store.queues.topics.items()
            if topic != without
        }
        start = store.segments.start
        self.deleted = {topic: position for topic, position in self.deleted.items() if position > start}
        write_queue_list(store.files, f"{store.directory}/queues", topics, self.deleted, start)
