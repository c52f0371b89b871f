"""What follows appends in the background: entries and keys go to their files, checkpoints are made.

A start reads the log only from the newest checkpoint on, so what a checkpoint claims must be on the disk before it is
written: first the queues' entries of durable records, then the sync of their files, then the checkpoint.
"""

import errno
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Final, final

import trio

from martlet.store.checkpoint import NO_JOURNAL, Checkpoint, write_checkpoint
from martlet.store.files import is_full
from martlet.store.follow import Follower
from martlet.store.queue_journal import Journal, encode_deletion, encode_queue
from martlet.store.queues import Queue, Queues, Unsaved
from martlet.store.recovery import Progress
from martlet.store.repair import MemoryRepair, Repair

if TYPE_CHECKING:
    from martlet.store.log import Store

__all__ = ["Checkpointer"]

logger = logging.getLogger("martlet.store")

# Messages that are indexed before the event loop gets its turn.
INDEX_BATCH: Final = 256
# A key index that is this far behind is completed while the store opens, else in the background,
# in blocks that take less than a millisecond each.
FOLLOW_AT_ONCE_BYTES: Final = 16 * 1024 * 1024
FOLLOW_BYTES: Final = 128 * 1024
# With so few slots they are counted while the store opens; a real index has 5,000,000.
SLOTS_AT_ONCE: Final = 65_536
# The slots of the key index, 20 MB, are written at most this often.
INDEX_SECONDS: Final = 15.0
# With more files than this to sync, one sync of the whole file system is quicker.
SYNC_EACH_MAX: Final = 100
# With more changed queues than this only a checkpoint saves them, and only time brings one: each is a file to open,
# write and close.
SAVE_OFTEN_MAX: Final = 1000
# Queues whose entries a thread writes before others get their turn; a new one's file is created there, about 1 ms.
SAVE_BATCH: Final = 64
# Queues that are encoded for the journal before it does; about 2 us each.
JOURNAL_BATCH: Final = 256


@final
class Checkpointer:
    """The indexes and checkpoints of one store."""

    __slots__ = (
        "_behind",
        "_deletions",
        "_dirty_paths",
        "_doomed",
        "_index_saved",
        "_index_saved_at",
        "_keys_moved",
        "_lock",
        "_repairs",
        "_store",
        "_work",
        "checkpointed",
        "follower",
        "journal",
        "owes_checkpoint",
    )

    def __init__(self, store: "Store") -> None:
        self._store = store
        self._work = trio.Event()
        # Entries go to their files, and damaged blocks are rebuilt, by one task at a time.
        self._lock = trio.Lock()
        self._dirty_paths: set[str] = set()
        self.journal = Journal(store.files, store.directory)
        # Deleted topics, where the record of the deletion ends, and their queues: the files go once it is durable.
        self._doomed: list[tuple[int, str, list[Queue]]] = []
        # Deletions that the journal is to be told of.
        self._deletions: list[str] = []
        # Queues with damaged blocks.
        self._repairs: dict[Queue, None] = {}
        # Below this log position consume queues and checkpoint are durable.
        self.checkpointed = 0
        # The start found no space for its checkpoint; no append is taken before there is one.
        self.owes_checkpoint = False
        # Makes up for what the key index lacks; None when it lacks nothing but `keys.pending`.
        self.follower: Follower | None = None
        self._behind = trio.Event()
        # Set when the key index may have become complete; another takes its place then.
        self._keys_moved = trio.Event()
        # Up to where the key index was durable when its slots were last written, with how many entries, and the CRC of
        # its headers.
        self._index_saved = (0, 0, 0)
        self._index_saved_at = 0.0

    def wake(self) -> None:
        """Something was appended."""
        if not self._work.is_set():
            self._work.set()

    def owe_checkpoint(self) -> None:
        """Have the checkpoint made as soon as there is space."""
        self.owes_checkpoint = True
        self.wake()

    def open_at(self, end: int, paths: set[str], deleted: list[str]) -> None:
        """Begin after a recovery that ended at *end*, changed *paths* and found the deletions of topics *deleted*."""
        store, keys = self._store, self._store.keys
        self._dirty_paths |= paths
        self._deletions = deleted
        store.queues.on_damage = self.want_repair
        if keys is None:
            return
        if keys.slots <= SLOTS_AT_ONCE and not all(keys.check_slots(*each) for each in keys.unchecked):
            logger.warning("the key index is damaged; rebuilding it from the log")
            keys.clear()
            keys.position = store.segments.start
        if keys.slots <= SLOTS_AT_ONCE:
            keys.unchecked.clear()
        self.follower = Follower(store.segments, store.queues, keys)
        if end - keys.position > FOLLOW_AT_ONCE_BYTES or not self._follow_at_once(self.follower, end):
            self._behind.set()

    def _follow_at_once(self, follower: Follower, end: int, report: Progress | None = None) -> bool:
        """Complete the key index up to log position *end*; False when the disk is full."""
        wanted, begin = FOLLOW_BYTES, follower.keys.position
        try:
            while follower.keys.position < end:
                wanted = follower.take(follower.read(end, wanted), end, wanted) or FOLLOW_BYTES
                if report is not None:
                    report(follower.keys.position - begin, end - begin, follower.keys.total())
        except OSError as error:
            if not is_full(error):
                raise
            return False
        self.follower = None
        return True

    def distrust(self, checkpoint: Checkpoint | None, *, clean: bool) -> None:
        """All queues are to be rebuilt: should this start not come to its end, the next does the same."""
        store = self._store
        before = checkpoint or Checkpoint()
        position = max(before.position, store.segments.start)
        changed = replace(before, position=position, journal_generation=NO_JOURNAL, orderly=clean)
        write_checkpoint(store.files, f"{store.directory}/checkpoint", changed)

    def delete_topic(self, topic: str, queues: list[Queue], end: int) -> None:
        """*topic* was deleted by the record that ends at *end*; the files of *queues* go later."""
        self._doomed.append((end, topic, queues))
        self.wake()

    # ---- repairs

    def want_repair(self, queue: Queue) -> None:
        """Have the damaged blocks of *queue* rebuilt."""
        self._repairs[queue] = None
        self.wake()

    async def repair(self, queue: Queue) -> None:
        """Rebuild the damaged blocks of *queue*, and of others that wait for it, in a worker thread."""
        store = self._store
        self._repairs[queue] = None
        async with self._lock:
            if queue not in self._repairs:
                return  # somebody did it meanwhile
            work = self._new_repair()
            with trio.CancelScope(shield=True):
                try:
                    await store.disk.off_loop(work.run)
                except OSError as error:
                    instead = self._new_memory_repair(work.wanted, error)
                    if not await store.disk.off_loop(instead.run):
                        raise
                    instead.finish()
                else:
                    self._finish_repair(work)

    def repair_now(self, queue: Queue) -> None:
        """As `repair`, blocking."""
        self._repairs[queue] = None
        work = self._new_repair()
        try:
            work.run()
        except OSError as error:
            instead = self._new_memory_repair(work.wanted, error)
            if not instead.run():
                raise
            instead.finish()
        else:
            self._finish_repair(work)

    def _new_repair(self) -> Repair:
        store = self._store
        wanted, self._repairs = self._repairs, {}
        # The files of a deleted topic are not to come back.
        live = [queue for queue in wanted if store.queues.find(queue.topic, queue.queue_id) is queue]
        return Repair(store.segments, store.queues, live, store.flusher.durable)

    def _new_memory_repair(self, wanted: list[Queue], error: OSError) -> MemoryRepair:
        """A repair whose result goes to the files later; raises *error* again unless it is that the disk is full."""
        if not is_full(error):
            raise error
        store = self._store
        store.admission.refuse_full(error)
        self.wake()
        return MemoryRepair(store.segments, store.queues, wanted, store.flusher.durable)

    def _write_rebuilt(self) -> None:
        """Once there is space again, repair in their files the blocks that were only repaired in memory."""
        queues = self._store.queues
        if queues.rebuilt and not self._store.refusal:
            wanted = dict.fromkeys(queue for queue, _ in queues.rebuilt)
            queues.forget_blocks(*wanted)
            self._repairs.update(wanted)

    def _finish_repair(self, work: Repair) -> None:
        work.finish()
        self._dirty_paths |= work.paths
        self.wake()

    async def repair_all(self) -> None:
        """Look at every block of every queue and at the key index, and rebuild what is damaged.

        Otherwise that is done for what is read. A key index that is far behind is left to `complete_keys`.
        """
        self._repairs.update(dict.fromkeys(self._store.queues.all()))
        await self._check_keys()
        await self._mend()

    # ---- the key index

    def complete_keys(self, report: Progress | None = None) -> bool:
        """Index every record, in place of `follow`; False when the disk is full. Blocks.

        Args:
          report: called often with bytes done, bytes in all, and entries so far.
        """
        return self.follower is None or self._follow_at_once(self.follower, self._store.tail.written, report)

    @property
    def keys_complete(self) -> bool:
        """Whether the key index has every key: it is not damaged, not being rebuilt, and its files were checked."""
        keys = self._store.keys
        return keys is None or not (keys.damaged or keys.unchecked or self.follower is not None)

    async def wait_keys(self) -> None:
        """Return when the key index is complete."""
        while not self.keys_complete:
            await self._keys_moved.wait()

    def _announce_keys(self) -> None:
        moved, self._keys_moved = self._keys_moved, trio.Event()
        moved.set()

    async def follow(self) -> None:
        """Complete the key index whenever it is far behind: after a start, and when it is rebuilt; until cancelled."""
        await self._check_keys()
        while True:
            await self._behind.wait()
            self._behind = trio.Event()
            if self.follower is not None:
                await self._follow(self.follower)

    async def _check_keys(self) -> None:
        """See in a worker thread whether the files of the key index have lost slots."""
        keys = self._store.keys
        while keys is not None and keys.unchecked:
            path, used_slots = unchecked = keys.unchecked[-1]
            whole = await self._store.disk.off_loop(partial(keys.check_slots, path, used_slots))
            if unchecked in keys.unchecked:  # it was not rebuilt meanwhile
                keys.unchecked.remove(unchecked)
                if not whole:
                    keys.damaged = True
                    self.wake()
        self._announce_keys()

    async def _follow(self, follower: Follower) -> None:
        store, wanted = self._store, FOLLOW_BYTES
        while True:
            end = store.tail.written
            if follower.keys.position >= end:
                self.follower = None
                self._announce_keys()
                return
            follower.keys.position = max(follower.keys.position, store.segments.start)
            data = await store.disk.off_loop(partial(follower.read, end, wanted))
            try:
                wanted = follower.take(data, end, wanted) or FOLLOW_BYTES
            except OSError as error:
                if not is_full(error):
                    raise store.flusher.fail(error) from error
                await trio.sleep(1)

    def _rebuild_keys(self) -> None:
        """Begin the key index again, after a query met what cannot be in it."""
        store, keys = self._store, self._store.keys
        if keys is None or keys.saving or self.follower is not None:
            return
        logger.warning("the key index is damaged; rebuilding it from the log")
        keys.clear()
        keys.position = store.segments.start
        self._index_saved = (0, 0, keys.headers_crc())
        self.follower = Follower(store.segments, store.queues, keys)
        self._behind.set()

    # ---- entries and checkpoints

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
                await self._mend()
                await self._drain_keys()
                few = len(store.queues.dirty) <= SAVE_OFTEN_MAX
                if few:
                    async with self._lock:
                        await self._save_queues(store.flusher.durable)
                grown = few and store.flusher.durable - self.checkpointed >= store.config.checkpoint_bytes
                if grown or self.owes_checkpoint or trio.current_time() - last >= checkpoint_seconds:
                    await self.checkpoint()
                    last = trio.current_time()
            except OSError as error:
                if not is_full(error):
                    raise store.flusher.fail(error) from error
                store.admission.refuse_full(error)
            if self._unfinished():
                self._work.set()

    def _unfinished(self) -> bool:
        store = self._store
        return (
            bool(store.queues.dirty or self._doomed or self.owes_checkpoint or store.queues.rebuilt)
            or self.checkpointed < store.tail.written
            or (store.keys is not None and store.keys.damaged)
        )

    async def _mend(self) -> None:
        """Rebuild what queries and lookups found damaged."""
        self._write_rebuilt()
        while self._repairs:
            await self.repair(next(iter(self._repairs)))
        if self._store.keys is not None and self._store.keys.damaged:
            self._rebuild_keys()

    async def _drain_keys(self) -> None:
        keys = self._store.keys
        while keys is not None and self.follower is None and keys.drain(INDEX_BATCH):
            await trio.lowlevel.checkpoint()

    async def _save_queues(self, limit: int) -> None:
        """Write the entries of records before *limit*, which are durable, and of the key index, to their files."""
        store = self._store
        for topic, queues in self._take_doomed(limit):
            store.queues.let_go(queues)
            # Queues that were made since under the same name have nothing in files yet.
            await store.disk.off_loop(partial(store.queues.files.remove_topic, topic))
        dirty = iter(list(store.queues.dirty))
        while batch := list(islice(dirty, SAVE_BATCH)):
            unsaved = [store.queues.take_unsaved(queue, limit) for queue in batch]
            # Shielded: what was written must be noted.
            with trio.CancelScope(shield=True):
                self._dirty_paths |= await store.disk.off_loop(partial(_write_unsaved, store.queues, unsaved))
            for each in unsaved:
                store.queues.note_saved(each)
        if store.keys is not None:
            store.keys.save_entries()

    def _take_doomed(self, limit: int) -> list[tuple[str, list[Queue]]]:
        """The topics whose deletion is durable, below *limit*."""
        due = [(topic, queues) for end, topic, queues in self._doomed if end <= limit]
        self._doomed = [item for item in self._doomed if item[0] > limit]
        self._deletions += [topic for topic, _ in due]
        return due

    async def checkpoint(self) -> None:
        """Make the indexes durable and note how far they are, so that a start reads only what is behind."""
        store = self._store
        await self._drain_keys()
        async with self._lock:
            position = store.flusher.durable
            await self._save_queues(position)
            whole = self.journal.outgrown
            parts: list[bytes] = []
            try:
                for part in self._journal_parts(whole=whole):
                    parts.append(part)
                    await trio.lowlevel.checkpoint()
            except trio.Cancelled:
                # `parts` alone knows what changed.
                self.journal.abandon()
                raise
            due = trio.current_time() - self._index_saved_at >= INDEX_SECONDS
            work = self._take_checkpoint(position, parts, whole=whole, with_index=due)
            # Shielded: what is to be synced is known to `work` alone.
            with trio.CancelScope(shield=True):
                await store.disk.off_loop(work)
            if store.queues.files.left:
                await store.disk.off_loop(store.queues.files.remove_left)
        self.checkpointed = max(self.checkpointed, position)
        self.owes_checkpoint = False

    def _journal_parts(self, *, whole: bool) -> Iterator[bytes]:
        """Encode what the journal is to be told, in parts of less than a millisecond's work.

        Appends go on meanwhile; they change nothing of what is in files. A topic that is deleted meanwhile is told of
        next time: its record is behind this checkpoint.
        """
        store = self._store
        queues = store.queues
        changed: Iterator[Queue] = iter(queues.changed)
        queues.changed = {}
        deletions, self._deletions = self._deletions, []
        if whole:
            # Queues of topics that were deleted while entries were saved have their files still.
            doomed = [queue for _, _, gone in self._doomed for queue in gone]
            changed = chain(_each(list(queues.topics.values())), doomed)
        elif deletions:
            yield b"".join(map(encode_deletion, deletions))
        start = -1 if store.retention.is_behind else store.segments.start
        while part := list(islice(changed, JOURNAL_BATCH)):
            for queue in part:
                queue.changed = False
            yield b"".join([encode_queue(queue, start, whole=whole) for queue in part if queue.saved])

    def _take_checkpoint(
        self, position: int, journal: list[bytes], *, whole: bool, with_index: bool, orderly: bool = False
    ) -> Callable[[], None]:
        """Return the blocking part of a checkpoint at *position*, whose entries are all in their files."""
        store = self._store
        keys = store.keys if with_index else None
        if keys is not None:
            try:
                keys.save_entries()
            except OSError:
                # *journal* alone knows what changed.
                self.journal.abandon()
                raise
        paths, self._dirty_paths = self._dirty_paths, set()
        directories, store.queues.files.new_directories = store.queues.files.new_directories, set()
        newest_ms = store.committer.last_store_ms
        made = Checkpoint(newest_ms, newest_ms, newest_ms, position=position)
        made.confirmed_position = position
        made.orderly = orderly
        parts: list[tuple[int, bytes]] = []
        index_path = ""
        before = self._index_saved, self._index_saved_at
        if keys is not None:
            parts = keys.take_slots()
            index_path = keys.active.path if keys.active is not None else ""
            self._index_saved = min(keys.position, position), keys.total(), keys.headers_crc()
            self._index_saved_at = trio.current_time()
            if index_path:
                paths.add(index_path)
            if keys.new_names:
                directories.add(keys.directory)
                keys.new_names = False
            keys.saving = True
        made.index_position, made.index_entries, made.index_crc = self._index_saved

        def work() -> None:
            try:
                self._sync_all(paths, directories)
                if keys is not None and index_path and parts:
                    keys.write_slots(index_path, parts)
                self.journal.write([part for part in journal if part], whole=whole, into=made)
                write_checkpoint(store.files, f"{store.directory}/checkpoint", made)
                if whole:
                    self.journal.remove_others()
            except OSError:
                # The next checkpoint tells a new journal everything.
                self.journal.abandon()
                self._index_saved, self._index_saved_at = before
                raise
            finally:
                if keys is not None:
                    keys.saving = False

        return work

    def _sync_all(self, paths: set[str], directories: set[str]) -> None:
        store = self._store
        try:
            if len(paths) + len(directories) > SYNC_EACH_MAX:
                store.disk.sync_everything(store.directory)
                return
            for path in sorted(paths):
                self._sync_if_there(path)
            for directory in sorted(directories):
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

    def write_checkpoint(self, *, orderly: bool = False) -> None:
        """As `checkpoint`, blocking; for the start and, *orderly*, for the end."""
        store = self._store
        keys = store.keys
        if keys is not None and self.follower is None:
            keys.drain(len(keys.pending))
        position = store.flusher.durable
        for topic, queues in self._take_doomed(position):
            store.queues.let_go(queues)
            store.queues.files.remove_topic(topic)
        for queue in list(store.queues.dirty):
            self._dirty_paths |= store.queues.save(queue, position)
        while store.retention.advance(1 << 20):
            pass
        whole = self.journal.outgrown
        parts = list(self._journal_parts(whole=whole))
        self._take_checkpoint(position, parts, whole=whole, with_index=True, orderly=orderly)()
        self.checkpointed = position


def _each(tables: list[dict[int, Queue]]) -> Iterator[Queue]:
    """The queues of *tables*, to which others may be added meanwhile."""
    for of_topic in tables:
        yield from list(of_topic.values())


def _write_unsaved(queues: Queues, unsaved: list[Unsaved]) -> set[str]:
    paths: set[str] = set()
    for each in unsaved:
        paths |= queues.write_unsaved(each)
    return paths
