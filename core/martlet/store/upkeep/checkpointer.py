"""Does the background work of appends: writes entries and keys to their files, and makes checkpoints.

A start reads the log only from the newest checkpoint on, so everything that a checkpoint claims must be on disk before
it is written: first the queues' entries of durable records, then the sync of their files, then the checkpoint.
"""

import errno
import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Final, final

import trio
from msgspec.structs import replace

from martlet.runtime.wakeup import Wakeup
from martlet.store.append.admission import Admission
from martlet.store.append.committer import Committer
from martlet.store.append.flusher import Flusher
from martlet.store.config import StoreConfig
from martlet.store.disk.checkpoint import NO_JOURNAL, Checkpoint, write_checkpoint
from martlet.store.disk.files import is_full
from martlet.store.disk.page_cache import LogWriter
from martlet.store.disk.segments import Segments
from martlet.store.queues.first_offsets import FirstOffsets
from martlet.store.queues.queue_journal import QueueJournal, encode_deletion, encode_queue
from martlet.store.queues.queues import Queue, Queues, Unsaved
from martlet.store.recovery.indexer import Indexer
from martlet.store.recovery.repair import Repairs
from martlet.store.upkeep.deleted_topics import DeletedTopics

__all__ = ["Checkpointer"]

logger = logging.getLogger("martlet.store")

# Minimum time between two writes of the key index's slots, which are 20 MB.
INDEX_SECONDS: Final = 15.0
# With more files than this, one sync of the whole file system is faster than one per file.
SYNC_EACH_MAX: Final = 100
# With more changed queues than this, they are saved only at checkpoints, and checkpoints are made only by time: each
# queue is a file to open, write and close.
SAVE_OFTEN_MAX: Final = 1000
# Queues whose entries a thread writes in one turn. For a new queue it also creates the file, about 1 ms.
SAVE_BATCH: Final = 64
# Queues to encode for the journal per turn; about 2 us each.
JOURNAL_BATCH: Final = 256


@final
class Checkpointer:
    """Writes entries and keys to their files, and makes checkpoints; set *wakeup* when there is work for it."""

    def __init__(
        self,
        directory: str,
        config: StoreConfig,
        segments: Segments,
        queues: Queues,
        tail: LogWriter,
        flusher: Flusher,
        admission: Admission,
        committer: Committer,
        repairs: Repairs,
        indexer: Indexer,
        first_offsets: FirstOffsets,
        deleted: DeletedTopics,
        wakeup: Wakeup,
    ) -> None:
        self._directory = directory
        self._config = config
        self._files = segments.files
        self._segments = segments
        self._queues = queues
        self._tail = tail
        self._flusher = flusher
        self._admission = admission
        self._committer = committer
        self._repairs = repairs
        self._indexer = indexer
        self._first_offsets = first_offsets
        self._deleted = deleted
        self._wakeup = wakeup
        self._dirty_paths: set[str] = set()
        # The last checkpoint was made: nothing more is written.
        self._finished = False
        self.journal = QueueJournal(segments.files, directory)
        # Consume queues and checkpoint are durable below this log position.
        self.checkpointed = 0
        # There was no space for the checkpoint at startup; appends are refused until it is written.
        self.owes_checkpoint = False
        # When the slots of the key index were last written.
        self._index_saved_at = 0.0

    def owe_checkpoint(self) -> None:
        """Make the checkpoint as soon as there is space."""
        self.owes_checkpoint = True
        self._wakeup.set()

    def open_after(self, paths: set[str], deleted: list[str]) -> None:
        """Start after a recovery that changed *paths* and found the deletions of topics *deleted*."""
        self._dirty_paths |= paths
        self._deleted.unjournaled = deleted

    def distrust(self, checkpoint: Checkpoint | None, *, clean: bool) -> None:
        """Invalidate the checkpoint, so that the next start rebuilds all queues if this one does not complete."""
        known = checkpoint or Checkpoint()
        position = max(known.position, self._segments.start)
        invalid = replace(known, position=position, journal_generation=NO_JOURNAL, orderly=clean)
        write_checkpoint(self._files, f"{self._directory}/checkpoint", invalid)

    async def repair_all(self) -> None:
        """Check every block of every queue and the key index, and rebuild damaged ones.

        Otherwise blocks are checked only when they are read. A key index that is far behind is left to
        `Indexer.complete`.
        """
        self._repairs.want_all()
        await self._indexer.check()
        await self._mend()

    # ---- entries and checkpoints

    async def maintain(self) -> None:
        """Write entries and keys to their files and make checkpoints while messages are appended; until cancelled."""
        interval = self._config.persist_interval_ms / 1000
        checkpoint_seconds = self._config.checkpoint_interval_ms / 1000
        last_checkpoint = trio.current_time()
        while True:
            await self._wakeup.wait()
            await trio.sleep(interval)
            try:
                await self._mend()
                await self._indexer.drain()
                are_few = len(self._queues.dirty) <= SAVE_OFTEN_MAX
                if are_few:
                    async with self._repairs.lock:
                        await self._save_queues(self._flusher.durable)
                has_grown = are_few and self._flusher.durable - self.checkpointed >= self._config.checkpoint_bytes
                if has_grown or self.owes_checkpoint or trio.current_time() - last_checkpoint >= checkpoint_seconds:
                    await self.checkpoint()
                    last_checkpoint = trio.current_time()
            except OSError as error:
                if not is_full(error):
                    raise self._flusher.fail(error) from error
                self._admission.refuse_full(error)
            if self._has_work():
                self._wakeup.set()

    def _has_work(self) -> bool:
        return (
            bool(self._queues.dirty or self._deleted or self.owes_checkpoint or self._queues.rebuilt)
            or self.checkpointed < self._tail.written
            or (self._indexer.keys is not None and self._indexer.keys.damaged)
        )

    async def _mend(self) -> None:
        """Rebuild the blocks and files that queries and lookups found damaged."""
        self._repairs.want_rebuilt()
        await self._repairs.repair_wanted()
        self._indexer.rebuild_damaged()

    async def _save_queues(self, limit: int) -> None:
        """Write the entries of records before *limit*, which are durable, and the key index to their files."""
        if self._finished:
            return
        for topic in self._deleted.take(limit):
            # Queues created since then under the same name have nothing in files yet.
            await self._files.disk.off_loop(partial(self._queues.files.remove_topic, topic))
        dirty = iter(list(self._queues.dirty))
        while batch := list(islice(dirty, SAVE_BATCH)):
            unsaved = [self._queues.take_unsaved(queue, limit) for queue in batch]
            # Shielded: completed writes must be recorded.
            with trio.CancelScope(shield=True):
                self._dirty_paths |= await self._files.disk.off_loop(partial(_write_unsaved, self._queues, unsaved))
            for each in unsaved:
                self._queues.note_saved(each)
        if self._indexer.keys is not None:
            self._indexer.keys.active.save_entries()

    async def finish(self) -> None:
        """Make the last checkpoint of an orderly shutdown, after all threads have finished writing."""
        with trio.CancelScope(shield=True):
            async with self._repairs.lock:
                self.write_checkpoint(orderly=True)
                self._finished = True

    async def checkpoint(self) -> None:
        """Make the indexes durable and record their progress, so that a start reads only later records."""
        await self._indexer.drain()
        async with self._repairs.lock:
            if self._finished:
                return
            position = self._flusher.durable
            await self._save_queues(position)
            is_new_journal = self.journal.outgrown
            changes: list[bytes] = []
            try:
                for entries in self._encode_journal(whole=is_new_journal):
                    changes.append(entries)
                    await trio.lowlevel.checkpoint()
            except trio.Cancelled:
                # The changes are known only from *changes*.
                self.journal.abandon()
                raise
            is_index_due = trio.current_time() - self._index_saved_at >= INDEX_SECONDS
            write_all = self._prepare_checkpoint(position, changes, whole=is_new_journal, with_index=is_index_due)
            # Shielded: the files to sync are known only from `write_all`.
            with trio.CancelScope(shield=True):
                await self._files.disk.off_loop(write_all)
            if self._queues.files.left:
                await self._files.disk.off_loop(self._queues.files.remove_left)
        self.checkpointed = max(self.checkpointed, position)
        self.owes_checkpoint = False

    def _encode_journal(self, *, whole: bool) -> Iterator[bytes]:
        """Encode the changes for the journal, in parts of less than a millisecond each.

        Appends continue meanwhile; they do not change files. A topic deleted meanwhile goes into the next journal
        record: the record of its deletion is after this checkpoint.
        """
        queues = self._queues
        changed: Iterator[Queue] = iter(queues.changed)
        queues.changed = {}
        deletions = self._deleted.take_unjournaled()
        if whole:
            # The files of queues deleted while entries were being saved still exist.
            changed = chain(_each_queue(list(queues.topics.values())), self._deleted.queues_with_files())
        elif deletions:
            yield b"".join(map(encode_deletion, deletions))
        start = -1 if self._first_offsets.is_behind else self._segments.start
        while batch := list(islice(changed, JOURNAL_BATCH)):
            for queue in batch:
                queue.changed = False
            stored = [queue for queue in batch if queue.saved or queue.noted >= 0]
            yield b"".join([encode_queue(queue, start, whole=whole) for queue in stored])

    def _prepare_checkpoint(
        self, position: int, changes: list[bytes], *, whole: bool, with_index: bool, orderly: bool = False
    ) -> Callable[[], None]:
        """Return a function that writes a checkpoint at *position*, and blocks; all entries before it are in files.

        The journal gets *changes*; with *whole* these are all queues, for a new file.
        """
        keys = self._indexer.keys if with_index else None
        if keys is not None:
            try:
                keys.active.save_entries()
            except OSError:
                # The changes are known only from *changes*.
                self.journal.abandon()
                raise
        paths, self._dirty_paths, self._repairs.paths = self._dirty_paths | self._repairs.paths, set(), set()
        directories, self._queues.files.new_directories = self._queues.files.new_directories, set()
        newest_ms = self._committer.last_store_ms
        checkpoint = Checkpoint(newest_ms, newest_ms, newest_ms, position=position)
        checkpoint.confirmed_position = position
        checkpoint.orderly = orderly
        slot_changes: list[tuple[int, bytes]] = []
        index_path = ""
        saved_before = self._indexer.saved, self._index_saved_at
        if keys is not None:
            slot_changes = keys.active.take_slots()
            index_path = keys.active.item.path if keys.active.item is not None else ""
            self._indexer.saved = min(keys.position, position), keys.files.total(), keys.files.headers_crc()
            self._index_saved_at = trio.current_time()
            if index_path:
                paths.add(index_path)
            if keys.files.new_names:
                directories.add(keys.files.directory)
                keys.files.new_names = False
            keys.saving = True
        checkpoint.index_position, checkpoint.index_entries, checkpoint.index_crc = self._indexer.saved

        def write_all() -> None:
            try:
                self._sync_all(paths, directories)
                if keys is not None and index_path and slot_changes:
                    keys.active.write_slots(index_path, slot_changes)
                self.journal.write([entries for entries in changes if entries], whole=whole, into=checkpoint)
                write_checkpoint(self._files, f"{self._directory}/checkpoint", checkpoint)
                if whole:
                    self.journal.remove_others()
            except OSError:
                # The next checkpoint writes everything to a new journal.
                self.journal.abandon()
                self._indexer.saved, self._index_saved_at = saved_before
                raise
            finally:
                if keys is not None:
                    keys.saving = False

        return write_all

    def _sync_all(self, paths: set[str], directories: set[str]) -> None:
        try:
            if len(paths) + len(directories) > SYNC_EACH_MAX:
                self._files.disk.sync_everything(self._directory)
                return
            for path in sorted(paths):
                self._sync_if_there(path)
            for directory in sorted(directories):
                self._sync_directory_if_there(directory)
        except OSError as error:
            # This includes lack of space: the kernel may have dropped the data, and the next sync would not report it.
            raise OSError(errno.EIO, f"a sync failed: {error.strerror}", error.filename) from error

    def _sync_if_there(self, path: str) -> None:
        try:
            self._files.sync(path)
        except FileNotFoundError:
            logger.debug("%s was removed before it was synced", path)

    def _sync_directory_if_there(self, path: str) -> None:
        try:
            self._files.disk.sync_directory(path)
        except FileNotFoundError:
            logger.debug("%s was removed before it was synced", path)

    def write_checkpoint(self, *, orderly: bool = False) -> None:
        """As `checkpoint`, but blocking; for startup and, with *orderly*, for shutdown."""
        self._indexer.drain_now()
        position = self._flusher.durable
        for topic in self._deleted.take(position):
            self._queues.files.remove_topic(topic)
        for queue in list(self._queues.dirty):
            self._dirty_paths |= self._queues.save(queue, position)
        while self._first_offsets.advance(1 << 20):
            pass
        is_new_journal = self.journal.outgrown
        changes = list(self._encode_journal(whole=is_new_journal))
        self._prepare_checkpoint(position, changes, whole=is_new_journal, with_index=True, orderly=orderly)()
        self.checkpointed = position


def _each_queue(tables: list[dict[int, Queue]]) -> Iterator[Queue]:
    """Yield the queues of *tables*, which may grow meanwhile."""
    for of_topic in tables:
        yield from list(of_topic.values())


def _write_unsaved(queues: Queues, unsaved: list[Unsaved]) -> set[str]:
    """Write the entries of several queues to their files, and return the paths to sync; blocking."""
    paths: set[str] = set()
    for each in unsaved:
        paths |= queues.write_unsaved(each)
    return paths
