"""The store: one log, the queues and keys that index it, and the tasks that make it durable.

`Store.append` fills the log's growing end in memory; `Store.commit`, once a socket read, hands
all of it to the operating system in one write. With ``flush = "sync"`` records are
readable when they are durable, with ``"async"`` when they are written. Everything but
`open`, `run`, `close`, `wait_flushed` and `read_far` is synchronous, hence atomic.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, final

import trio

from martlet.clock import Clock
from martlet.errors import NotReady, Reason, Refused, StoreFailed, StoreLocked
from martlet.message import Message, Placed
from martlet.store.admission import Admission
from martlet.store.checkpoint import read_checkpoint, stopped_in_order
from martlet.store.checkpointer import Checkpointer
from martlet.store.codec import (
    check_record,
)
from martlet.store.committer import Appended, Committer
from martlet.store.config import StoreConfig
from martlet.store.files import Disk, Files, RealDisk, atomic_write, is_full, read_file
from martlet.store.flusher import Flusher
from martlet.store.key_index import KeyIndex
from martlet.store.layout import (
    ENTRY_BYTES,
    FRONT_BYTES,
    MAGICS,
    RECORD_BYTES_MIN,
    Predicate,
    RecordView,
)
from martlet.store.note_writer import NoteWriter
from martlet.store.notes import OWN_PREFIX
from martlet.store.page_cache import Chunks, LogWriter
from martlet.store.queues import BlockDamaged, Queue, QueueFiles, Queues
from martlet.store.readable import ReadableEnd
from martlet.store.reading import Reader, ReadResult, ReadStatus, bounds
from martlet.store.recovery import Progress, Recovery
from martlet.store.retention import Retention
from martlet.store.segments import Segments
from martlet.store.statistics import StoreStatistics
from martlet.store.tags import Dispatcher
from martlet.store.writer import RunItem, RunResult, Writer
from martlet.turns import Steps

__all__ = ["Found", "Store"]

logger = logging.getLogger("martlet.store")

OWN_BYTES: Final = OWN_PREFIX.encode()
# Messages that wait for the key index before appends help with it.
UNINDEXED_MAX: Final = 20_000
# Entries that a read in a worker thread takes along.
SCAN_ENTRIES: Final = 4096
# Of the records that a query by key finds.
QUERY_BYTES_MAX: Final = 1 << 30
QUERY_PAUSE_BYTES: Final = 524_288  # read in one slice; a read counts at least QUERY_STEP_BYTES
QUERY_STEP_BYTES: Final = 32_768
# So often a read has a damaged block rebuilt.
REPAIRS_A_READ: Final = 3
# Positions of damaged records that are remembered, so that each is reported once.
DAMAGED_MAX: Final = 10_000


def _copied(result: ReadResult) -> ReadResult:
    """*result* with its records copied: a view would keep a chunk for each while they wait to be sent."""
    if result.pieces:
        result.pieces = [b"".join(result.pieces)]
    return result


@final
class Found:
    """What a query by key found: whole records, newest first, and how far the index reaches."""

    __slots__ = ("index_ms", "index_position", "records")

    def __init__(self, records: list[bytes], index_ms: int, index_position: int) -> None:
        self.records = records
        self.index_ms = index_ms
        self.index_position = index_position


@final
class Store:
    """One data directory. Made by `open`; `run` is to be started before anyone waits, `close` ends it."""

    __slots__ = (
        "_clock",
        "_lock_fd",
        "_marked",
        "_sync",
        "admission",
        "checkpointer",
        "chunks",
        "committer",
        "config",
        "cut_bytes",
        "damaged",
        "damaged_records",
        "deleted_to",
        "directory",
        "disk",
        "files",
        "flusher",
        "keys",
        "notes",
        "on_deleted",
        "on_flushed",
        "queues",
        "readable_end",
        "reader",
        "recovered_records",
        "recovery_seconds",
        "retention",
        "segments",
        "tail",
        "unlisted",
        "writer",
    )

    def __init__(self, directory: Path, config: StoreConfig, clock: Clock, disk: Disk) -> None:
        root = str(directory)
        self.directory = root
        self.config = config
        self.disk = disk
        self._clock = clock
        self.files = Files(disk, config.open_files_max)
        self.segments = Segments(self.files, f"{root}/commitlog", config.segment_bytes)
        self.chunks = Chunks(self.segments, config.chunk_bytes, config.cache_bytes)
        self.tail = LogWriter(self.chunks)
        queue_files = QueueFiles(self.files, f"{root}/consumequeue", config.queue_file_entries)
        self.queues = Queues(queue_files)
        self.keys: KeyIndex | None = None
        if config.keys_index:
            self.keys = KeyIndex(self.files, f"{root}/index", config.index_slots, config.index_entries)
        self.reader = Reader(self.chunks, self._found_damage, verify=config.verify_reads)
        self.flusher = Flusher(self.files, self.tail, self.segments.directory, self._durable_moved)
        self._sync = config.flush == "sync"
        self.readable_end = ReadableEnd()
        # Each is called after ``readable`` moved, and when the store failed.
        self.on_flushed = self.readable_end.on_moved
        self.admission = Admission(root, self.flusher)
        self.committer = Committer(
            self.tail, self.flusher, self.admission, self.readable_end, self._index, clock, sync=self._sync
        )
        self.writer = Writer(config, self.tail, self.queues, self.committer, self.admission)
        self.notes = NoteWriter(self.writer, self.committer, config, clock)
        self.retention = Retention(self, clock)
        self.checkpointer = Checkpointer(self)
        # Each is called with the name of a topic that was deleted.
        self.on_deleted: list[Callable[[str], None]] = []
        self.damaged: set[int] = set()
        self.damaged_records = 0
        # The log position behind the newest deletion of a topic.
        self.deleted_to = 0
        self.cut_bytes = 0
        # Topics that were rebuilt from a log of RocketMQ's and had no queues there: they may have been deleted.
        self.unlisted: set[str] = set()
        self.recovery_seconds = 0.0
        self.recovered_records = 0
        self._lock_fd = -1
        # The file `abort` holds our pid.
        self._marked = False

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
        """Lock *directory*, recover what is in it, and return a store that takes appends.

        Args:
          report: called a few times a second with bytes done, bytes in all, and records so far.
          dispatchers: by topic, what supplies the codes of its entries.

        Raises:
          StoreLocked: another process has it open; the text says which.
          OSError: the directory cannot be used.
        """
        store = cls(directory, config, clock, disk if disk is not None else RealDisk())
        store.queues.dispatchers = dict(dispatchers or {})
        store._take_lock()
        try:
            await store._recover(report)
        except BaseException:
            store._release()
            raise
        return store

    def _take_lock(self) -> None:
        made = [self.directory, *(f"{self.directory}/{name}" for name in ("commitlog", "consumequeue", "index"))]
        for path in made:
            self.disk.make_directory(path)
        self.disk.sync_directory(self.directory)
        try:
            self._lock_fd = self.disk.lock(f"{self.directory}/lock")
        except StoreLocked as error:
            pid = (read_file(self.disk, f"{self.directory}/abort") or b"").decode("ascii", "replace").strip()
            holder = f"process {pid}" if pid else "another process"
            raise StoreLocked(f"data directory {self.directory!r} is in use by {holder}; stop it first") from error

    def _release(self) -> None:
        self.files.close()
        if self._lock_fd >= 0:
            self.disk.close(self._lock_fd)
            self._lock_fd = -1

    async def _recover(self, report: Progress | None) -> None:
        began = trio.current_time()
        root = self.directory
        checkpoint = read_checkpoint(self.files, f"{root}/checkpoint")
        clean = stopped_in_order(checkpoint, abort="abort" in self.disk.names(root))
        self.segments.load()
        self._marked = self._do_unless_full(self._mark_running)
        recovery = Recovery(self.segments, self.queues, report)
        await recovery.run(
            checkpoint,
            self.checkpointer.journal,
            clean=clean,
            distrust=lambda: self.checkpointer.distrust(checkpoint, clean=clean),
        )
        if self.keys is not None:
            self.keys.begin(checkpoint, self.segments.start, recovery.end, clean=clean)
        self._begin_at(recovery)
        self.committer.last_store_ms = max(recovery.last_store_ms, checkpoint.log_ms if checkpoint else 0)
        self.damaged_records = recovery.damaged
        self.cut_bytes = recovery.cut_bytes
        self.recovered_records = recovery.records
        self.unlisted = recovery.unlisted
        # What the scan found may be in the page cache only: nobody reads it before it is durable.
        for segment in self.segments.items:
            if segment.end > recovery.start:
                self.files.sync(segment.path)
        self.disk.sync_directory(self.segments.directory)
        if not self._do_unless_full(self.checkpointer.write_checkpoint):
            self.checkpointer.owe_checkpoint()
        self.recovery_seconds = trio.current_time() - began

    def _do_unless_full(self, work: Callable[[], None]) -> bool:
        """Do *work* of the start; False if the disk is full, and then no append is taken before it is made up for."""
        try:
            work()
        except OSError as error:
            if not is_full(error):
                raise
            logger.warning("this start cannot be completed before there is space: %s", error)
            self.admission.refuse_full(error)
            return False
        return True

    def complete_start(self) -> bool:
        """Make up for what the start could not write on a full disk; False if something is left.

        Raises:
          OSError: it still cannot be written.
        """
        if not self._marked:
            self._mark_running()
            self._marked = True
        return not self.checkpointer.owes_checkpoint

    def _mark_running(self) -> None:
        path = f"{self.directory}/abort"
        if "abort" not in self.disk.names(self.directory):
            self.files.create(path, 0)
        self.files.truncate(path, 0)
        self.files.write(path, str(os.getpid()).encode(), 0)
        self.files.sync(path)
        self.files.forget(path)
        self.disk.sync_directory(self.directory)

    def _begin_at(self, recovery: Recovery) -> None:
        end = recovery.end
        self.chunks.trusted_from = end
        self.tail.open_at(end)
        self.flusher.durable = end
        self.readable_end.open_at(end)
        self.checkpointer.open_at(end, recovery.paths, recovery.deleted)

    async def close(self) -> bool:
        """Make everything durable and leave the directory as after an orderly stop; idempotent.

        Returns False when the disk was too full for that: the next start recovers.
        """
        if self._lock_fd < 0:
            return True
        try:
            if self.flusher.failed is None:
                self._commit_last()
                self.flusher.flush_now()
                self.checkpointer.write_checkpoint(orderly=True)
                if "abort" in self.disk.names(self.directory):
                    self.disk.unlink(f"{self.directory}/abort")
                self.disk.sync_directory(self.directory)
        except OSError as error:
            if not is_full(error):
                raise self.flusher.fail(error) from error
            logger.warning("stopped without a checkpoint, so that the next start takes longer: %s", error)
            return False
        finally:
            self._release()
        return True

    def _commit_last(self) -> None:
        try:
            self.commit()
        except Refused as refused:
            logger.warning("what was not committed before the stop is not stored: %s", refused)

    def crash(self) -> None:
        """Let go of the directory without saving anything, as a killed process would; for tests."""
        self._release()

    # ---- positions

    @property
    def first_position(self) -> int:
        """The first log position that is kept."""
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
        """The log position before which everything may be read."""
        return self.readable_end.position

    @property
    def refusal(self) -> str:
        """Why appends are refused just now; empty when they are not."""
        return self.admission.refusal

    @property
    def on_commit_wanted(self) -> Callable[[], None] | None:
        """Called at the first append after a commit, so that whoever commits knows that there is something."""
        return self.committer.on_commit_wanted

    @on_commit_wanted.setter
    def on_commit_wanted(self, want: Callable[[], None] | None) -> None:
        self.committer.on_commit_wanted = want

    @property
    def store_host(self) -> bytes:
        """The broker's address as records hold it: 4 or 16 address bytes and an i32 port."""
        return self.writer.store_host

    @store_host.setter
    def store_host(self, host: bytes) -> None:
        self.writer.store_host = host

    @property
    def failed(self) -> StoreFailed | None:
        """Why the store is read-only until the next start; None while all is well."""
        return self.flusher.failed

    # ---- queues

    def queue(self, topic: str, queue_id: int) -> Queue:
        """The queue, made if it does not exist yet."""
        return self.queues.get(topic, queue_id)

    def find_queue(self, topic: str, queue_id: int) -> Queue | None:
        """The queue; None when nothing was ever stored in or asked of it."""
        return self.queues.find(topic, queue_id)

    def topics_on_disk(self) -> list[str]:
        """The topics that have queues, without Martlet's own."""
        return sorted(topic for topic in self.queues.topics if not topic.startswith(OWN_PREFIX))

    def delete_topic(self, topic: str) -> None:
        """Remove *topic*: its records are void from now on and go with their segments.

        A record in the log says so. The deletion holds through any crash once that is durable (`wait_deleted`); only
        then the files of the queues go.
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
        """Return when every deletion so far is durable.

        Raises:
          StoreFailed: it will never be.
        """
        await self.flusher.wait_durable(self.deleted_to)

    # ---- tables beside the log

    def read_generations(self, name: str) -> Iterator[bytes]:
        """Yield the generations of file *name* of the data directory, newest first; the caller stops at a good one.

        A crash between the two renames of a `write_file` leaves the newest as ``name.tmp``.
        """
        for generation in (name, f"{name}.tmp", f"{name}.bak"):
            data = read_file(self.disk, f"{self.directory}/{generation}")
            if data:
                yield data

    def write_file(self, name: str, *pieces: bytes) -> None:
        """Replace file *name* of the data directory at once; its previous content stays as ``name.bak``."""
        atomic_write(self.disk, f"{self.directory}/{name}", *pieces)

    # ---- appending

    def append(self, message: Message, queue_id: int) -> Placed:
        """Put *message* at the end of the log and of its queue; `commit` hands it to the disk.

        Raises:
          Refused: it is too large, or the store takes no writes just now (the text says why).
          StoreFailed: the disk failed.
        """
        return self.writer.append(message, queue_id)

    def append_run(self, run: Sequence[RunItem]) -> RunResult:
        """Append the messages of *run*, in order, each to its queue; one that is refused does not stop the others.

        Raises:
          StoreFailed: the disk failed.
        """
        return self.writer.append_run(run)

    def append_batch(self, messages: Sequence[Message], queue_id: int) -> list[Placed]:
        """Append *messages*, all of one topic, with consecutive offsets; all or none, as `append_group`.

        Raises:
          Refused: as `append`; none was stored.
        """
        return self.writer.append_batch(messages, queue_id)

    def append_group(self, messages: Sequence[Message], queue_ids: Sequence[int]) -> list[Placed]:
        """Append *messages* of any topics, each to the queue of its topic with the id at its place; all or none.

        They lie side by side in one segment. After a crash all are there or none is.

        Raises:
          Refused: as `append`, or the group has too many messages or bytes; none was stored.
        """
        return self.writer.append_group(messages, queue_ids)

    @property
    def before_commit(self) -> list[Callable[[], None]]:
        """What the next commit calls, once each, to append the last records of it."""
        return self.committer.before_commit

    def commit_soon(self) -> None:
        """Have the server commit at the end of this round of the event loop; appends call this themselves."""
        self.committer.commit_soon()

    def commit(self) -> None:
        """Hand everything appended since the last commit to the operating system, in one write.

        With async flush it is readable now. After an error every record whose ``placed.end`` is behind
        ``written`` was not stored and leaves no trace.

        Raises:
          Refused: the disk is full; the store tries again by itself.
          StoreFailed: the disk failed.
        """
        self.committer.commit()

    def _index(self, appended: list[Appended]) -> None:
        """Queue the keys of what was committed for the key index."""
        keys = self.keys
        if keys is not None and self.checkpointer.follower is None:
            keys.pending.extend(appended)
            if len(keys.pending) > UNINDEXED_MAX:
                self._help_index(keys)
        self.checkpointer.wake()

    def _help_index(self, keys: KeyIndex) -> None:
        try:
            keys.drain(len(keys.pending) - UNINDEXED_MAX // 2)
        except OSError as error:
            logger.warning("the key index cannot grow: %s; it goes on later", error)

    def _durable_moved(self) -> None:
        self.committer.durable_moved()

    async def wait_flushed(self, position: int) -> None:
        """Return when everything before *position* is durable (sync) or written (async); at once if it is.

        Raises:
          StoreFailed: it will never be.
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
        """The offset behind the newest readable message of *queue*."""
        return queue.next_offset if queue.last_end <= self.readable else queue.end_before(self.readable)

    def read(
        self,
        queue: Queue,
        offset: int,
        max_messages: int,
        budget_bytes: int,
        codes: frozenset[int] | None = None,
        predicate: Predicate | None = None,
    ) -> ReadResult:
        """Return readable records of *queue* from *offset* on, as they are stored.

        The first message comes whatever its size; then as many as fit both limits and need no waiting for the disk.
        *codes* are compared with the tags' codes of the entries, *predicate* is shown whole records. Looks at a bounded
        number of entries, so ``next_offset`` may move though nothing matched. Damaged records are left out.
        Waits for the disk for the first message, and for the rebuild of a damaged block of entries: on the event
        loop, consumers read with `QueueReader`.
        """
        end = self.end_offset(queue)
        outside = bounds(queue, offset, end)
        if outside is not None:
            return outside
        read = self.reader.read
        entries, load = self.queues.load_entries, self.chunks.load_now
        try:
            result = read(queue, offset, end, max_messages, budget_bytes, codes, predicate, entries, load)
        except BlockDamaged:
            self._repair_now(queue)
            entries = self.queues.entries
            result = read(queue, offset, end, max_messages, budget_bytes, codes, predicate, entries, load)
        assert result is not None
        return result

    def read_near(
        self,
        queue: Queue,
        offset: int,
        max_messages: int,
        budget_bytes: int,
        codes: frozenset[int] | None = None,
        predicate: Predicate | None = None,
    ) -> ReadResult | None:
        """As `read`, but None where the first record is neither in memory nor in the page cache: `read_far` reads it.

        So it is where its entry is in a damaged block.
        """
        end = self.end_offset(queue)
        outside = bounds(queue, offset, end)
        if outside is not None:
            return outside
        entries, load = self.queues.load_entries, self.chunks.load_now
        read = self.reader.read
        try:
            return read(queue, offset, end, max_messages, budget_bytes, codes, predicate, entries, load, wait=False)
        except BlockDamaged:
            return None

    def _repair_now(self, queue: Queue) -> None:
        try:
            self.checkpointer.repair_now(queue)
        except OSError as error:
            raise self.admission.refuse(error) from error

    async def read_far(
        self,
        queue: Queue,
        offset: int,
        max_messages: int,
        budget_bytes: int,
        codes: frozenset[int] | None = None,
        predicate: Predicate | None = None,
    ) -> ReadResult:
        """As `read`, in a worker thread where the disk may be waited for; *predicate* is called there.

        Raises:
          Refused: a damaged block cannot be rebuilt: the disk is full, or damages it again.
          StoreFailed: the disk failed.
        """
        end = self.end_offset(queue)
        outside = bounds(queue, offset, end)
        if outside is not None:
            return outside
        for _ in range(REPAIRS_A_READ):
            try:
                result = await self._read_off_loop(queue, offset, end, max_messages, budget_bytes, codes, predicate)
                break
            except BlockDamaged:
                await self._repair(queue)
            if self.queues.find(queue.topic, queue.queue_id) is not queue:
                return ReadResult(ReadStatus.NO_QUEUE, offset, queue.first_offset, end)  # its topic was deleted
            outside = bounds(queue, offset, end)
            if outside is not None:
                return outside
        else:
            where = f"consume queue '{queue.topic}/{queue.queue_id}'"
            raise Refused(Reason.UNAVAILABLE, f"{where} is damaged again after each rebuild; check the disk")
        result.end_offset = self.end_offset(queue)
        return result

    async def _repair(self, queue: Queue) -> None:
        try:
            await self.checkpointer.repair(queue)
        except OSError as error:
            raise self.admission.refuse(error) from error

    async def _read_off_loop(
        self,
        queue: Queue,
        offset: int,
        end: int,
        max_messages: int,
        budget_bytes: int,
        codes: frozenset[int] | None,
        predicate: Predicate | None,
    ) -> ReadResult:
        """Read in a worker thread; raises `BlockDamaged` where the first entry is in a damaged block."""
        # The entries in memory belong to the event loop's thread: take them along.
        held = self.queues.load_entries(queue, offset, SCAN_ENTRIES) if offset >= queue.tail_offset else b""
        end = min(end, offset + len(held) // ENTRY_BYTES if held else queue.tail_offset)

        def entries(queue: Queue, at: int, count: int) -> bytes:
            if not held:
                return self.queues.saved_entries(queue, at, count)
            return held[(at - offset) * ENTRY_BYTES : (at - offset + count) * ENTRY_BYTES]

        def work() -> ReadResult:
            read, load = self.reader.read, self.chunks.load
            result = read(queue, offset, end, max_messages, budget_bytes, codes, predicate, entries, load)
            assert result is not None
            return _copied(result)

        return await self.disk.off_loop(work)

    def record_at(self, position: int, size_hint: int = 0) -> bytes | None:
        """The record that begins at *position*; None when none does, it is damaged, or not readable yet.

        Records of Martlet's own are none.
        """
        if position < self.segments.start or position + RECORD_BYTES_MIN > self.readable:
            return None
        head = self.chunks.read(position, max(size_hint, 4))
        if len(head) < 4:
            return None
        size = RecordView(head).size
        segment = self.segments.find(position)
        if segment is None or size < RECORD_BYTES_MIN or position + size > min(segment.end, self.readable):
            return None
        data = head[:size] if len(head) >= size else self.chunks.read(position, size)
        if not check_record(data, 0, size, position) or RecordView(data).topic_bytes.startswith(OWN_BYTES):
            return None
        return data

    def _found_damage(self, position: int, queue: Queue, offset: int) -> None:
        if position in self.damaged or len(self.damaged) >= DAMAGED_MAX:
            return
        self.damaged.add(position)
        self.damaged_records += 1
        logger.error(
            "record at position %d (message %d of %s/%d) is damaged; it is skipped",
            position,
            offset,
            queue.topic,
            queue.queue_id,
        )

    # ---- looking up

    def position_at(self, queue: Queue, offset: int) -> int:
        """The log position of message *offset*; -1 if it is not readable or lost.

        Raises:
          NotReady: its entry is in a damaged block, which is being rebuilt.
        """
        if not queue.first_offset <= offset < self.end_offset(queue):
            return -1
        try:
            return self.queues.checked_position(queue, offset)
        except BlockDamaged:
            self.checkpointer.want_repair(queue)
            text = f"consume queue '{queue.topic}/{queue.queue_id}' is damaged and being rebuilt; try again in a moment"
            raise NotReady(text, partial(self._repair, queue)) from None

    def store_ms_at(self, queue: Queue, offset: int) -> int:
        """When message *offset* was stored; -1 if it is not readable or damaged.

        Raises:
          NotReady: as `position_at`.
        """
        position = self.position_at(queue, offset)
        if position < 0:
            return -1
        front = self._front_at(position)
        return RecordView(front).store_ms if len(front) == FRONT_BYTES else -1

    def _front_at(self, position: int) -> bytes:
        """The first bytes of a readable record; loads no chunk, which would push out what consumers read."""
        chunk = self.chunks.find(position)
        if chunk is None or position + FRONT_BYTES > chunk.end:
            return self.segments.read(position, FRONT_BYTES)
        return bytes(chunk.view[position - chunk.base : position - chunk.base + FRONT_BYTES])

    def earliest_store_ms(self, queue: Queue) -> int:
        """When the oldest message of *queue* was stored; -1 when it has none.

        Raises:
          NotReady: as `position_at`.
        """
        return self.store_ms_at(queue, queue.first_offset)

    def offset_by_time(self, queue: Queue, timestamp_ms: int, upper: bool = False) -> int:
        """The first offset stored at or after *timestamp_ms* (the end if none); with *upper* the last at or before it.

        Upper with a time before everything is the first offset.

        Raises:
          NotReady: as `position_at`.
        """
        first, end = queue.first_offset, self.end_offset(queue)
        low, high = first, end
        while low < high:
            middle = (low + high) // 2
            stored = self._store_ms_near(queue, middle, high)
            if stored < timestamp_ms or (upper and stored == timestamp_ms):
                low = middle + 1
            else:
                high = middle
        return max(low - 1, first) if upper else low

    def _store_ms_near(self, queue: Queue, offset: int, end: int) -> int:
        """The store time of *offset*, or of the next message that is intact; beyond every time if none is."""
        for at in range(offset, min(end, offset + 64)):
            stored = self.store_ms_at(queue, at)
            if stored >= 0:
                return stored
        return 2**63 - 1

    def query_keys(
        self, topic: str, key: bytes, max_count: int, begin_ms: int, end_ms: int, bytes_max: int = QUERY_BYTES_MAX
    ) -> Steps[Found]:
        """Return readable records of *topic* that carry *key* as unique key or among KEYS, newest first, in slices.

        Their sizes add up to *bytes_max* at most, but one record always gets through.

        Raises:
          NotReady: the key index is damaged or lacks keys; it is being rebuilt.
        """
        keys = self.keys
        if keys is None:
            return Found([], 0, 0)
        self._check_keys_complete()
        queue = self.queues.find(topic, 0) or Queue(topic, 0)
        records: list[bytes] = []
        size = unpaused = 0
        for position in (yield from keys.find(queue, key, max_count, begin_ms, end_ms)):
            data = self.record_at(position)
            if data is None and not self._explains(position):
                keys.damaged = True
            if data is not None and self._is_kept(RecordView(data), queue):
                size += len(data)
                if records and size > bytes_max:
                    break
                records.append(data)
            unpaused += QUERY_STEP_BYTES + (len(data) if data is not None else 0)
            if unpaused > QUERY_PAUSE_BYTES:
                unpaused = 0
                yield
        self._check_keys_complete()
        return Found(records, keys.store_ms, keys.position)

    def _check_keys_complete(self) -> None:
        if self.checkpointer.keys_complete:
            return
        self.checkpointer.wake()
        text = "the key index is being checked or rebuilt; try again in a few seconds"
        raise NotReady(text, self.checkpointer.wait_keys)

    def _explains(self, position: int) -> bool:
        """Whether the log tells why it has no record for readers at *position*; else an entry with it is damaged."""
        if not self.segments.start <= position < self.tail.position:
            return 0 <= position < self.segments.start  # removed by retention
        if position >= self.readable:
            return True
        front = self._front_at(position)
        if len(front) < FRONT_BYTES:
            return False
        record = RecordView(front)
        return record.position == position and record.magic in MAGICS  # it is damaged further on

    def _is_kept(self, record: RecordView, like: Queue) -> bool:
        """Whether the entry of *record* in its queue names it; one of a deleted topic has none, or another's."""
        if record.topic_bytes != like.topic_bytes:
            return False
        queue = self.queues.find(like.topic, record.queue_id)
        offset = record.queue_offset
        if queue is None or not queue.first_offset <= offset < queue.next_offset:
            return False
        try:
            position = self.queues.checked_position(queue, offset)
        except BlockDamaged:
            self.checkpointer.want_repair(queue)
            return True
        return position == record.position

    # ---- background

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Flush, save indexes, make checkpoints and remove what is old, until cancelled.

        Raises:
          StoreFailed: the disk failed; the store is read-only.
        """
        interval = 0.0 if self._sync else self.config.flush_interval_ms / 1000
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.flusher.run, interval)
                nursery.start_soon(self.checkpointer.maintain)
                nursery.start_soon(self.checkpointer.follow)
                nursery.start_soon(self.retention.run)
                task_status.started()
        except BaseExceptionGroup as group:
            # Not `except*`, which mypyc does not compile.
            if self.flusher.failed is None or group.split(StoreFailed)[1] is not None:
                raise
            raise self.flusher.failed from None

    async def checkpoint(self) -> None:
        """Make the indexes durable and note how far they are, so that a start reads only what is behind."""
        await self.checkpointer.checkpoint()

    def statistics(self) -> StoreStatistics:
        """Counters of this moment."""
        return StoreStatistics(self)
