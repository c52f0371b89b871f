"""The store: one log, the queues and keys that index it, and the tasks that make it durable.

`Store.append` extends the log in memory. `Store.commit`, called once per socket read, writes all of it to the operating
system in one call. With ``flush = "sync"`` records become readable when they are durable, with ``"async"`` when they
are written. All methods except `open`, `run`, `close`, `wait_flushed` and `read_far` are synchronous, hence atomic.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import final

import trio

from martlet.errors import Refused, StoreFailed
from martlet.message import Message, Placed
from martlet.records.layout import Dispatcher, Predicate
from martlet.runtime.clock import Clock
from martlet.runtime.steps import Steps
from martlet.runtime.wakeup import Wakeup
from martlet.store.append.admission import Admission
from martlet.store.append.committer import Committer
from martlet.store.append.flusher import Flusher
from martlet.store.append.items import AppendItem, AppendResult
from martlet.store.append.note_writer import NoteWriter
from martlet.store.append.readable import ReadableEnd
from martlet.store.append.writer import Writer
from martlet.store.config import StoreConfig
from martlet.store.disk.checkpoint import read_checkpoint, stopped_in_order
from martlet.store.disk.data_directory import DataDirectory
from martlet.store.disk.files import Disk, Files, RealDisk, is_full
from martlet.store.disk.page_cache import LogWriter, PageCache
from martlet.store.disk.segments import Segments
from martlet.store.format.delays import DELAYS_MS, SCHEDULE_TOPIC, due_dispatcher
from martlet.store.format.light import is_light
from martlet.store.format.notes import OWN_PREFIX
from martlet.store.keys.key_index import KeyIndex
from martlet.store.queues.first_offsets import FirstOffsets
from martlet.store.queues.queues import Queue, QueueFiles, Queues
from martlet.store.read.lookup import QUERY_BYTES_MAX, KeyQueryResult, Lookup
from martlet.store.read.readers import Readers
from martlet.store.read.reading import Care, ReadResult
from martlet.store.recovery.indexer import Indexer
from martlet.store.recovery.recovery import Progress, Recovery
from martlet.store.recovery.repair import Repairs
from martlet.store.recovery.sizes import fit_sizes
from martlet.store.statistics import Recovered, StoreStatistics
from martlet.store.upkeep.checkpointer import Checkpointer
from martlet.store.upkeep.retention import Retention
from martlet.store.upkeep.topic_retention import TopicRetention

__all__ = ["KeyQueryResult", "Store"]

logger = logging.getLogger("martlet.store")


@final
class Store:
    """One open data directory. `open` creates it; start `run` before anyone waits, and end it with `close`."""

    def __init__(self, directory: Path, config: StoreConfig, clock: Clock, disk: Disk) -> None:
        root = str(directory)
        self.directory = root
        self.config = config
        self.disk = disk
        self.files = Files(disk, config.open_files_max)
        self._place = DataDirectory(root, disk, self.files)
        self.segments = Segments(self.files, f"{root}/commitlog", config.segment_bytes)
        self.pages = PageCache(self.segments, config.page_bytes, config.cache_bytes)
        self.tail = LogWriter(self.pages)
        queue_files = QueueFiles(self.files, f"{root}/consumequeue", config.queue_file_entries)
        self.queues = Queues(queue_files)
        self.keys: KeyIndex | None = None
        if config.keys_index:
            self.keys = KeyIndex(self.files, f"{root}/index", config.index_slots, config.index_entries)
        self._sync = config.flush == "sync"
        self.flusher = Flusher(self.files, self.tail, self.segments.directory, self._durable_moved)
        self.admission = Admission(root, self.flusher)
        self.readable_end = ReadableEnd()
        # Each is called after ``readable`` moved, and when the store failed.
        self.on_flushed = self.readable_end.on_moved
        self._wire_background(clock)
        # With async flush, whatever is written is readable already.
        self.early_readers = self.readers.up_to(self.readable_end.early) if self._sync else self.readers
        # Each is called with the name of a deleted topic.
        self.on_deleted: list[Callable[[str], None]] = []
        # The log position after the newest deletion of a topic.
        self.deleted_to = 0
        # The results of the start.
        self.recovered = Recovered()

    def _wire_background(self, clock: Clock) -> None:
        config, segments, queues, tail, flusher = self.config, self.segments, self.queues, self.tail, self.flusher
        wakeup = Wakeup()
        self.repairs = Repairs(self.disk, segments, queues, flusher, self.admission, wakeup)
        self.indexer = Indexer(self.keys, self.disk, segments, queues, tail, flusher, wakeup)
        self.committer = Committer(
            tail, flusher, self.admission, self.readable_end, self.indexer.accept, clock, sync=self._sync
        )
        self.writer = Writer(config, tail, queues, self.committer, self.admission)
        self.notes = NoteWriter(self.writer, self.committer, queues, config, clock)
        self.readers = Readers(
            self.disk, self.pages, queues, self.readable_end, self.repairs, verify=config.verify_reads
        )
        self.lookup = Lookup(
            self.disk,
            segments,
            self.pages,
            tail,
            queues,
            self.readable_end,
            self.readers,
            self.indexer,
            self.repairs,
            config.message_bytes_max,
        )
        self.first_offsets = FirstOffsets(queues, segments)
        self.checkpointer = Checkpointer(
            self.directory,
            config,
            segments,
            queues,
            tail,
            flusher,
            self.admission,
            self.committer,
            self.repairs,
            self.indexer,
            self.first_offsets,
            wakeup,
        )
        self.retention = Retention(
            self.directory,
            config,
            segments,
            self.pages,
            queues,
            self.keys,
            tail,
            flusher,
            self.admission,
            self.committer,
            self.notes,
            self.first_offsets,
            self.checkpointer,
            self.complete_start,
            clock,
        )
        self.topic_retention = TopicRetention(
            config,
            self.disk,
            queues,
            self.readers,
            self.lookup,
            self.notes,
            tail,
            flusher,
            self.retention,
            clock,
        )

    # ---- opening and closing

    @classmethod
    async def open(
        cls,
        directory: Path,
        config: StoreConfig,
        clock: Clock,
        disk: Disk | None = None,
        report: Progress | None = None,
        dispatchers: Mapping[str, Dispatcher] | None = None,
    ) -> "Store":
        """Lock *directory*, recover its content, and return a store that accepts appends.

        Args:
          report: called a few times a second with the bytes done, the total bytes, and the records so far.
          dispatchers: supply the codes of a topic's entries, by topic.

        Raises:
          StoreLocked: another process has it open; the text says which.
          OSError: the directory cannot be used.
        """
        disk = disk if disk is not None else RealDisk()
        store = cls(directory, fit_sizes(str(directory), config, disk), clock, disk)
        store.queues.dispatchers = {SCHEDULE_TOPIC: due_dispatcher(DELAYS_MS), **(dispatchers or {})}
        store._place.lock()
        with ExitStack() as undo:
            undo.callback(store._place.release)
            await store._recover(report)
            undo.pop_all()
        return store

    async def _recover(self, report: Progress | None) -> None:
        began = trio.current_time()
        root = self.directory
        checkpoint = read_checkpoint(self.files, f"{root}/checkpoint")
        clean = stopped_in_order(checkpoint, abort=self._place.has_mark)
        self.segments.load()
        self._do_unless_full(self._place.mark)
        recovery = Recovery(self.segments, self.queues, report)
        await recovery.run(
            checkpoint,
            self.checkpointer.journal,
            clean=clean,
            distrust=lambda: self.checkpointer.distrust(checkpoint, clean=clean),
        )
        if self.keys is not None:
            self.keys.begin(checkpoint, self.segments, recovery.end, clean=clean)
        self._begin_at(recovery)
        self.committer.last_store_ms = max(recovery.last_store_ms, checkpoint.log_ms if checkpoint else 0)
        self.readers.damaged_records = recovery.damaged
        self.recovered.cut_bytes = recovery.cut_bytes
        self.recovered.records = recovery.records
        self.recovered.unlisted = recovery.unlisted
        # Records that the scan found may only be in the page cache; nobody may read them before they are durable.
        for segment in self.segments.items:
            if segment.end > recovery.start:
                self.files.sync(segment.path)
        self.disk.sync_directory(self.segments.directory)
        if not self._do_unless_full(self.checkpointer.write_checkpoint):
            self.checkpointer.owe_checkpoint()
        self.recovered.seconds = trio.current_time() - began

    def _do_unless_full(self, work: Callable[[], None]) -> bool:
        """Do *work* of the start; return False if the disk is full. Appends are then refused until it is done."""
        try:
            work()
        except OSError as error:
            if not is_full(error):
                raise
            logger.warning("this start cannot complete on a full disk: %s", error)
            self.admission.refuse_full(error)
            return False
        return True

    def complete_start(self) -> bool:
        """Do the rest of a start that met a full disk; return False if something is still missing.

        Raises:
          OSError: the disk is still full.
        """
        if not self._place.marked:
            self._place.mark()
        return not self.checkpointer.owes_checkpoint

    def _begin_at(self, recovery: Recovery) -> None:
        end = recovery.end
        self.pages.trusted_from = end
        self.tail.open_at(end)
        self.flusher.durable = end
        self.readable_end.open_at(end)
        self.checkpointer.open_after(recovery.paths, recovery.deleted)
        self.queues.on_damage = self.repairs.want
        self.indexer.open_at(end)

    async def close(self) -> bool:
        """Make everything durable and leave the directory as after an orderly shutdown; idempotent.

        Returns False if the disk was too full for that, or had failed before: the next start recovers.
        """
        if not self._place.is_locked:
            return True
        try:
            if self.flusher.failed is not None:
                return False
            self._commit_last()
            self.flusher.flush_now()
            await self.checkpointer.finish()
            self._place.unmark()
        except OSError as error:
            if not is_full(error):
                raise self.flusher.fail(error) from error
            logger.warning("stopped without a checkpoint, so the next start takes longer: %s", error)
            return False
        finally:
            self._place.release()
        return True

    def _commit_last(self) -> None:
        try:
            self.commit()
        except Refused as refused:
            logger.warning("messages without a commit before the stop are not stored: %s", refused)

    def crash(self) -> None:
        """Release the directory without saving anything, like a killed process; for tests."""
        self._place.release()

    # ---- positions

    @property
    def first_position(self) -> int:
        """The log position of the oldest stored record."""
        return self.segments.start

    @property
    def appended(self) -> int:
        return self.tail.position

    @property
    def written(self) -> int:
        return self.tail.written

    @property
    def durable(self) -> int:
        return self.flusher.durable

    @property
    def readable(self) -> int:
        """The log position before which everything is readable."""
        return self.readable_end.position

    @property
    def refusal(self) -> str:
        """Why appends are refused at the moment; empty if they are not."""
        return self.admission.refusal

    @property
    def on_commit_wanted(self) -> Callable[[], None] | None:
        """Called at the first append after a commit, to request the next one."""
        return self.committer.on_commit_wanted

    @on_commit_wanted.setter
    def on_commit_wanted(self, want: Callable[[], None] | None) -> None:
        self.committer.on_commit_wanted = want

    @property
    def store_host(self) -> bytes:
        """The broker's address as in records: 4 or 16 address bytes and an i32 port."""
        return self.writer.store_host

    @store_host.setter
    def store_host(self, host: bytes) -> None:
        self.writer.store_host = host

    @property
    def damaged_records(self) -> int:
        """The number of damaged records found since the store was opened."""
        return self.readers.damaged_records

    @property
    def failed(self) -> StoreFailed | None:
        """Why the store is read-only until the next start; None if it is not."""
        return self.flusher.failed

    # ---- queues

    def queue(self, topic: str, queue_id: int) -> Queue:
        """Return the queue, created if it does not exist.

        Raises:
          Refused: it would be a new light queue, and there are too many.
        """
        return self.writer.open_queue(topic, queue_id) if is_light(topic) else self.queues.get(topic, queue_id)

    def find_queue(self, topic: str, queue_id: int) -> Queue | None:
        """Return the queue; None if it was never created."""
        return self.queues.find(topic, queue_id)

    def topics_on_disk(self) -> list[str]:
        """The topics that have queues, without Martlet's internal ones."""
        return sorted(topic for topic in self.queues.topics if not topic.startswith(OWN_PREFIX))

    def delete_topic(self, topic: str) -> None:
        """Delete *topic*: its records become invalid now and are removed with their segments.

        A record in the log marks the deletion. Once that is durable (`wait_deleted`), the deletion survives any crash;
        only then the files of the queues are removed.
        """
        if topic not in self.queues.topics:
            return
        self.notes.delete(topic)
        queues = self.queues.forget_topic(topic)
        for queue in queues:
            self.readable_end.forget(queue)
        self.deleted_to = self.tail.written
        self.checkpointer.delete_topic(topic, queues, self.deleted_to)
        for tell in self.on_deleted:
            tell(topic)

    async def wait_deleted(self) -> None:
        """Return once all earlier deletions are durable.

        Raises:
          StoreFailed: the disk failed, so they will never be.
        """
        await self.flusher.wait_durable(self.deleted_to)

    # ---- tables beside the log

    def read_generations(self, name: str) -> Iterator[bytes]:
        """Yield the generations of file *name* of the data directory, newest first; the caller stops at a valid one.

        After a crash between the two renames of a `write_file`, the newest is ``name.tmp``.
        """
        return self._place.read_generations(name)

    def lacks_newest(self, name: str) -> bool:
        """Return whether only the previous generation of file *name* is left: the newest is missing or empty."""
        return self._place.lacks_newest(name)

    def names(self, directory: str) -> list[str]:
        """Return the names in *directory* of the data directory; none if there is no such directory."""
        return self.disk.names(f"{self._place.path}/{directory}")

    def write_file(self, name: str, *pieces: bytes) -> None:
        """Replace file *name* of the data directory atomically; keep the previous content as ``name.bak``."""
        self._place.write_file(name, *pieces)

    # ---- appending

    def append(self, message: Message, queue_id: int) -> Placed:
        """Append *message* to the log and to its queue; `commit` writes it to the disk.

        Raises:
          Refused: it is too large, or the store accepts no writes at the moment (the text says why).
          StoreFailed: the disk failed.
        """
        return self.writer.append_all((self.writer.item(message, queue_id),)).placed(0)

    def append_all(self, items: Sequence[AppendItem], *, atomic: bool = False) -> AppendResult:
        """Append *items* in order, each to its queue, and return where; a refused one does not affect the others.

        With *atomic* all or none is stored, also after a crash; several are contiguous in one segment.

        Raises:
          Refused: with *atomic* only: as for `append`, or they are too many or too large together; none was stored.
          StoreFailed: the disk failed.
        """
        return self.writer.append_all(items, atomic=atomic)

    def item(self, message: Message, queue_id: int) -> AppendItem:
        """Convert *message* for `append_all`.

        Raises:
          Refused: there can be no such queue.
        """
        return self.writer.item(message, queue_id)

    @property
    def before_commit(self) -> list[Callable[[], None]]:
        """Functions that the next commit calls once each, to append its last records."""
        return self.committer.before_commit

    def renew_clock(self) -> None:
        """Give the next records their own store time.

        Others have that of the first record since the last commit, which is some milliseconds old on a busy machine.
        """
        self.committer.renew_clock()

    def commit_soon(self) -> None:
        """Request a commit by the server at the end of this round of the event loop; appends do this themselves."""
        self.committer.commit_soon()

    def commit(self) -> None:
        """Write everything appended since the last commit to the operating system, in one call.

        With async flush it is readable afterwards. After an error, no record with ``placed.end`` beyond ``written`` was
        stored, and nothing of it remains.

        Raises:
          Refused: the disk is full; the store retries automatically.
          StoreFailed: the disk failed.
        """
        self.committer.commit()

    @property
    def delivers_early(self) -> bool:
        """Whether early readers read records before others do."""
        return self.early_readers is not self.readers

    def want_durable(self, position: int) -> None:
        """Request that everything before *position* is soon durable, with sync flush; does not wait."""
        if self._sync and self.flusher.durable < position:
            self.flusher.want(min(position, self.tail.position))

    def _durable_moved(self) -> None:
        self.committer.durable_moved()

    async def wait_flushed(self, position: int) -> None:
        """Return once everything before *position* is durable (sync) or written (async); immediately if it is.

        Raises:
          StoreFailed: the disk failed, so it will never be.
        """
        if self._sync:
            if self.flusher.durable < position:
                await self.flusher.wait_durable(position)
        elif self.tail.written < position:
            if self.flusher.failed is not None:
                raise self.flusher.failed
            raise RuntimeError(f"position {position} was not committed; call commit() before waiting")

    # ---- reading

    def end_offset(self, queue: Queue) -> int:
        """Return the offset after the newest readable message of *queue*."""
        return self.readers.end_offset(queue)

    def read(
        self,
        queue: Queue,
        offset: int,
        max_messages: int,
        budget_bytes: int,
        codes: frozenset[int] | None = None,
        predicate: Predicate | None = None,
    ) -> ReadResult:
        """Return readable records of *queue* from *offset* on, in stored form.

        The first message is returned whatever its size, then as many as fit both limits and do not wait for the disk.
        *codes* are matched against the tag codes of the entries; *predicate* is called with whole records. Looks at a
        limited number of entries, so ``next_offset`` may advance even if nothing matched. Damaged records are skipped.
        May wait for the disk for the first message, and for the rebuild of a damaged block of entries: on the event
        loop, consumers read with `QueueReader`.
        """
        return self.readers.read(queue, offset, max_messages, budget_bytes, codes, predicate)

    def read_near(
        self,
        queue: Queue,
        offset: int,
        max_messages: int,
        budget_bytes: int,
        codes: frozenset[int] | None = None,
        predicate: Predicate | None = None,
        care: Care = Care.LEAVE_OUT,
    ) -> ReadResult | None:
        """Like `read`, but return None if the first record is neither in memory nor in the page cache (see `read_far`).

        It also returns None if the entry is in a damaged block, and before the queue's first offset if `cold` has older
        records.
        """
        return self.readers.read_near(queue, offset, max_messages, budget_bytes, codes, predicate, care)

    async def read_far(
        self,
        queue: Queue,
        offset: int,
        max_messages: int,
        budget_bytes: int,
        codes: frozenset[int] | None = None,
        predicate: Predicate | None = None,
        care: Care = Care.LEAVE_OUT,
    ) -> ReadResult:
        """Like `read`, in a worker thread if that may wait for the disk; *predicate* is called there.

        Raises:
          Refused: a damaged block cannot be rebuilt: the disk is full, or damages it again.
          StoreFailed: the disk failed.
        """
        return await self.readers.read_far(queue, offset, max_messages, budget_bytes, codes, predicate, care)

    # ---- looking up

    def record_at(self, position: int, size_hint: int = 0) -> bytes | None:
        """Return the record that begins at *position*; None if there is none, or it is damaged or not readable yet.

        Martlet's internal records do not count.
        """
        return self.lookup.record_at(position, size_hint)

    async def record_far(self, position: int) -> bytes | None:
        """Like `record_at`, for a *position* from a client: waits for the disk in a worker thread.

        Bytes inside a record that look like another record do not count: the queue must have an entry for the record.

        Raises:
          Refused: the entry is in a damaged block that cannot be rebuilt, because the disk is full.
          StoreFailed: the disk failed.
        """
        return await self.lookup.record_far(position)

    def known_record(self, position: int) -> bytes | None:
        """Like `record_at`, for a *position* that the broker noted itself; also returns internal records."""
        return self.lookup.known_record(position)

    async def known_record_far(self, position: int) -> bytes | None:
        """Like `known_record`, but waits for the disk in a worker thread."""
        return await self.lookup.known_record_far(position)

    def position_at(self, queue: Queue, offset: int) -> Steps[int]:
        """Return the log position of message *offset*; -1 if it is not readable or lost.

        Waits for the disk in a worker thread.

        Raises:
          NotReady: its entry is in a damaged block that is being rebuilt.
        """
        return self.lookup.position_at(queue, offset)

    def store_ms_at(self, queue: Queue, offset: int) -> Steps[int]:
        """Return the store time of message *offset*; -1 if it is not readable or damaged.

        Waits for the disk in a worker thread.

        Raises:
          NotReady: as for `position_at`.
        """
        return self.lookup.store_ms_at(queue, offset)

    def earliest_store_ms(self, queue: Queue | None = None) -> Steps[int]:
        """Return the store time of the oldest message of *queue*, or of the whole log; -1 if it is empty or damaged.

        Raises:
          NotReady: as for `position_at`.
        """
        return self.lookup.earliest_store_ms(queue)

    def offset_by_time(self, queue: Queue, timestamp_ms: int, upper: bool = False) -> Steps[int]:
        """Return the first offset stored at or after *timestamp_ms*, else the end; *upper*: the last at or before it.

        With *upper* and a time before all messages, return the first offset. Works in slices of a few reads.

        Raises:
          NotReady: as for `position_at`.
        """
        return self.lookup.offset_by_time(queue, timestamp_ms, upper)

    def query_keys(
        self, topic: str, key: bytes, max_count: int, begin_ms: int, end_ms: int, bytes_max: int = QUERY_BYTES_MAX
    ) -> Steps[KeyQueryResult]:
        """Return readable records of *topic* with *key* as unique key or in KEYS, newest first; works in slices.

        They have at most *bytes_max* in total, but the first record is always returned.

        Raises:
          NotReady: the key index is being rebuilt because it is damaged or incomplete.
        """
        return self.lookup.query_keys(topic, key, max_count, begin_ms, end_ms, bytes_max)

    # ---- background

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Flush, save indexes, make checkpoints and apply retention, until cancelled.

        Raises:
          StoreFailed: the disk failed; the store is read-only.
        """
        interval = 0.0 if self._sync else self.config.flush_interval_ms / 1000
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.flusher.run, interval)
                nursery.start_soon(self.flusher.run_late, self.config.flush_interval_ms / 1000)
                nursery.start_soon(self.checkpointer.maintain)
                nursery.start_soon(self.indexer.follow)
                nursery.start_soon(self.retention.run)
                nursery.start_soon(self.topic_retention.run)
                task_status.started()
        except BaseExceptionGroup as group:
            if self.flusher.failed is None or group.split(StoreFailed)[1] is not None:
                raise
            raise self.flusher.failed from None

    async def checkpoint(self) -> None:
        """Make the indexes durable and record their progress, so that a start reads only later records."""
        await self.checkpointer.checkpoint()

    def statistics(self) -> StoreStatistics:
        """Return the current counters."""
        return StoreStatistics(
            self.committer,
            self.flusher,
            self.readable_end,
            self.readers,
            self.admission,
            self.segments,
            self.tail,
            self.queues,
            self.retention,
            self.topic_retention,
            self.keys,
            self.recovered,
        )
