"""The store: one log, the queues and keys that index it, and the tasks that make it durable.

`Store.append` fills the log's growing end in memory; `Store.commit`, once a socket read, hands
all of it to the operating system in one write. With ``flush = "sync"`` records are
readable when they are durable, with ``"async"`` when they are written. Everything but
`open`, `run`, `close`, `wait_flushed` and `read_far` is synchronous, hence atomic.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, final

import trio

from martlet.clock import Clock
from martlet.errors import NotReady, Reason, Refused, StoreFailed, StoreLocked
from martlet.message import PROPERTIES_BYTES_MAX, Message, Placed
from martlet.store.atomic import MARK_AT, group_marks
from martlet.store.checkpoint import read_checkpoint, stopped_in_order
from martlet.store.checkpointer import Checkpointer
from martlet.store.codec import (
    check_record,
    encode_into,
    encode_record,
    has_seal,
    record_size,
    seal,
    with_room_for_seal,
    without_seal,
)
from martlet.store.config import StoreConfig
from martlet.store.files import Disk, Files, RealDisk, atomic_write, is_full, read_file
from martlet.store.flusher import Flusher
from martlet.store.key_index import KeyIndex
from martlet.store.layout import (
    ENTRY,
    ENTRY_BYTES,
    FILLER_BYTES,
    FRONT_BYTES,
    MAGICS,
    PREPARED,
    RECORD_BYTES_MIN,
    ROLLBACK,
    TRANSACTION_MASK,
    Predicate,
    RecordView,
)
from martlet.store.notes import NOTES_TOPIC, deletion, is_note, offset_notes
from martlet.store.page_cache import Chunks, LogWriter
from martlet.store.queues import BlockDamaged, Queue, QueueFiles, Queues
from martlet.store.reading import Reader, ReadResult, ReadStatus, bounds
from martlet.store.recovery import Progress, Recovery
from martlet.store.retention import Retention
from martlet.store.segments import Segments
from martlet.store.statistics import StoreStatistics
from martlet.store.tags import TagCodes
from martlet.turns import Steps

__all__ = ["Found", "Store"]

logger = logging.getLogger("martlet.store")

NO_HOST: Final = bytes(8)
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
# A note of many queues' offsets goes into several records.
NOTE_BYTES_MAX: Final = 256 * 1024
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
        "_codes",
        "_lock_fd",
        "_lost",
        "_marked",
        "_now_ms",
        "_pending",
        "_seals",
        "_sync",
        "_touched",
        "appended_bytes",
        "appended_messages",
        "checkpointer",
        "chunks",
        "commits",
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
        "last_store_ms",
        "on_commit_wanted",
        "on_deleted",
        "on_flushed",
        "queues",
        "readable",
        "reader",
        "recovered_records",
        "recovery_seconds",
        "refusal",
        "retention",
        "segments",
        "store_host",
        "tail",
        "unlisted",
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
        self.retention = Retention(self, clock)
        self.checkpointer = Checkpointer(self)
        self.store_host = NO_HOST
        self.on_flushed: list[Callable[[], None]] = []
        # Called at the first append after a commit, so that whoever commits knows that there is something.
        self.on_commit_wanted: Callable[[], None] | None = None
        # Each is called with the name of a topic that was deleted.
        self.on_deleted: list[Callable[[str], None]] = []
        self.readable = 0
        # Why appends are refused just now; empty when they are not.
        self.refusal = ""
        self.damaged: set[int] = set()
        self.damaged_records = 0
        # The log position behind the newest deletion of a topic.
        self.deleted_to = 0
        self.cut_bytes = 0
        # Topics that were rebuilt from a log of RocketMQ's and had no queues there: they may have been deleted.
        self.unlisted: set[str] = set()
        self.recovery_seconds = 0.0
        self.recovered_records = 0
        self.appended_messages = 0
        self.appended_bytes = 0
        self.commits = 0
        self.last_store_ms = 0
        self._sync = config.flush == "sync"
        self._codes = TagCodes()
        # Appended and not yet committed, in order.
        self._pending: list[tuple[Queue, int, int, int, bytes]] = []
        # Why what was appended since the last commit will never be stored, though its appends returned.
        self._lost: Refused | StoreFailed | None = None
        # Queues with watchers that have records which are not readable yet.
        self._touched: dict[Queue, None] = {}
        self._now_ms = 0
        self._seals = config.seal_records
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
    ) -> "Store":
        """Lock *directory*, recover what is in it, and return a store that takes appends.

        Args:
          report: called a few times a second with bytes done, bytes in all, and records so far.

        Raises:
          StoreLocked: another process has it open; the text says which.
          OSError: the directory cannot be used.
        """
        store = cls(directory, config, clock, disk if disk is not None else RealDisk())
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
        self.last_store_ms = max(recovery.last_store_ms, checkpoint.log_ms if checkpoint else 0)
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
            self.refusal = self.retention.refusal_for(error)
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
        self.flusher.durable = self.readable = end
        self.checkpointer.open_at(end, recovery.paths, recovery.deleted)

    async def close(self) -> None:
        """Make everything durable and leave the directory as after an orderly stop; idempotent."""
        if self._lock_fd < 0:
            return
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
        finally:
            self._release()

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
        """The topics that have queues."""
        return sorted(self.queues.topics)

    def delete_topic(self, topic: str) -> None:
        """Remove *topic*: its records are void from now on and go with their segments.

        A record in the log says so. The deletion holds through any crash once that is durable (`wait_deleted`); only
        then the files of the queues go.
        """
        if topic not in self.queues.topics:
            return
        # Twice, so that no single damaged record brings the topic back.
        note = deletion(topic, self.store_host, self._clock.now_ms())
        try:
            self.commit()
        except (Refused, StoreFailed) as error:
            self._lost = error
            raise
        self._append_notes((note, note))
        queues = self.queues.forget_topic(topic)
        for queue in queues:
            self._touched.pop(queue, None)
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

    def note_offsets(self, queues: list[Queue]) -> int:
        """Write into the log where *queues* go on, whose records are to be removed; return the position behind it.

        Raises:
          Refused: the disk is full.
          StoreFailed: the disk failed.
        """
        self.commit()
        ends = [(queue.topic, queue.queue_id, queue.next_offset) for queue in queues]
        position = self.tail.position
        body_bytes_max = min(NOTE_BYTES_MAX, self.config.segment_bytes // 4)
        for note in offset_notes(ends, body_bytes_max, self.store_host, self._clock.now_ms()):
            self._append_notes((note,))
        for queue in queues:
            queue.noted = position
        return self.tail.written

    def _append_notes(self, notes: Sequence[Message]) -> None:
        """Append records of the store's own, which belong to no queue, in one segment; all or none is stored."""
        queue = Queue(NOTES_TOPIC, 0)
        size = sum(record_size(note, queue.topic_bytes, self.store_host) for note in notes)
        if self.tail.position + size + FILLER_BYTES > self.tail.segment.end:
            self._roll_for(size, "a record of the store")
        now = self._clock.now_ms()
        for note in notes:
            position = self.tail.position
            self.tail.put(encode_record(note, 0, 0, position, now, self.store_host))
            self._pending.append((queue, position, self.tail.position, now, b""))
        self.commit()

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
        of_topic = self.queues.topics.get(message.topic)
        queue = of_topic.get(queue_id) if of_topic is not None else None
        if queue is None:
            queue = self._new_queue(message.topic, queue_id)
        body = message.body
        properties = message.properties
        properties_bytes = len(properties)
        sealed = self._seals
        if sealed or has_seal(properties, properties_bytes):
            properties = self._fit_seal(message)
            properties_bytes = len(properties)
        body_bytes = len(body)
        if (
            self.refusal
            or body_bytes > self.config.message_bytes_max
            or properties_bytes > PROPERTIES_BYTES_MAX
            or 0 in properties
        ):
            self._refuse(message)
        tail = self.tail
        position = tail.position
        size = queue.overhead + body_bytes + properties_bytes
        # 24: two hosts in IPv6 make the record this much longer.
        if position + size + (24 + FILLER_BYTES) > tail.segment.end:
            self._roll(message, queue)
            position = tail.position
        now = self._now_ms
        if not now:
            now = self._begin_commit()
        kind = message.sys_flag & TRANSACTION_MASK
        indexed = kind != PREPARED and kind != ROLLBACK
        offset = queue.next_offset if indexed else 0
        end = position + size
        if end <= tail.chunk_end and queue.narrow and len(message.born_host) == 8 and len(self.store_host) == 8:
            at = position - tail.chunk_base
            encode_into(
                tail.data, at, size, message, queue.topic_part, queue_id, offset, position, now, self.store_host
            )
            if sealed:
                seal(tail.data, at, at + size)
            tail.position = end
        else:
            record = bytearray(encode_record(message, queue_id, offset, position, now, self.store_host))
            size = len(record)
            if sealed:
                seal(record, 0, size)
            tail.put(record)
            end = tail.position
        if indexed:
            code = self._codes.of(properties) if not queue.timed else self._codes.due(properties, now)
            queue.tail += ENTRY.pack(position, size, code)
            queue.next_offset = offset + 1
            queue.last_end = end
            if not queue.dirty:
                self.queues.touch(queue)
        # Keys of rollback records are not indexed.
        self._pending.append((queue, position, end, now, properties if kind != ROLLBACK else b""))
        return Placed(queue_id, offset, position, end, now)

    def append_batch(self, messages: Sequence[Message], queue_id: int) -> list[Placed]:
        """Append *messages*, all of one topic, with consecutive offsets; all or none, as `append_group`.

        Raises:
          Refused: as `append`; none was stored.
        """
        if not messages:
            return []
        queue = self.queues.find(messages[0].topic, queue_id) or self._new_queue(messages[0].topic, queue_id)
        for message in messages:
            if self._seals or has_seal(message.properties, len(message.properties)):
                self._fit_seal(message)
        bodies = [len(message.body) for message in messages]
        properties = [message.properties for message in messages]
        lengths = [len(each) for each in properties]
        if (
            self.refusal
            or max(bodies) > self.config.message_bytes_max
            or max(lengths) > PROPERTIES_BYTES_MAX
            or 0 in b"".join(properties)
        ):
            self._refuse_any(messages)
        host_bytes = len(self.store_host)
        hosts = [len(message.born_host) for message in messages]
        total = sum(bodies) + sum(lengths) + sum(hosts) + len(messages) * (queue.overhead + host_bytes - 16)
        kinds = {message.sys_flag & TRANSACTION_MASK for message in messages}
        usual = queue.narrow and host_bytes == 8 and not queue.timed and max(hosts) == 8 and kinds == {0}
        tail = self.tail
        if tail.position + total + 24 + FILLER_BYTES > tail.segment.end:
            self._roll_for(total + 24, f"a batch of {len(messages)} messages")
        if not usual or tail.position + total > tail.chunk_end:
            return self._append_together(messages, [queue] * len(messages), total)
        return self._append_usual(messages, queue)

    def append_group(self, messages: Sequence[Message], queue_ids: Sequence[int]) -> list[Placed]:
        """Append *messages* of any topics, each to the queue of its topic with the id at its place; all or none.

        They lie side by side in one segment. After a crash all are there or none is.

        Raises:
          Refused: as `append`, or the group has too many messages or bytes; none was stored.
        """
        if not messages:
            return []
        queues = [
            self.queues.find(message.topic, queue_id) or self._new_queue(message.topic, queue_id)
            for message, queue_id in zip(messages, queue_ids, strict=True)
        ]
        for message in messages:
            if self._seals or has_seal(message.properties, len(message.properties)):
                self._fit_seal(message)
        self._refuse_any(messages)
        host = self.store_host
        total = sum(record_size(each, queue.topic_bytes, host) for each, queue in zip(messages, queues, strict=True))
        self._check_group(len(messages), total)
        if self.tail.position + total + FILLER_BYTES > self.tail.segment.end:
            self._roll_for(total, f"a group of {len(messages)} messages")
        return self._append_together(messages, queues, total)

    def _check_group(self, count: int, size: int) -> None:
        config = self.config
        if count > config.group_messages_max:
            limit = f"the most is {config.group_messages_max} (store.group_messages_max)"
            raise Refused(Reason.ILLEGAL, f"the group has {count} messages; {limit}")
        if size > config.group_bytes_max:
            limit = f"the most is {config.group_bytes_max} (store.group_bytes_max)"
            raise Refused(Reason.ILLEGAL, f"the group has {size} bytes; {limit}")

    def _append_together(self, messages: Sequence[Message], queues: Sequence[Queue], total: int) -> list[Placed]:
        """Append *messages* as an atomic group of *total* bytes, for which the segment has room.

        Nothing but memory beyond the log's end changes before all of them are encoded.
        """
        tail, host = self.tail, self.store_host
        start = position = tail.position
        in_chunk = start + total <= tail.chunk_end
        data, base = (tail.data, tail.chunk_base) if in_chunk else (bytearray(total), start)
        now = self._now_ms
        if not now:
            now = self._now_ms = self._clock.now_ms()
        offsets: dict[Queue, int] = {}
        placed: list[Placed] = []
        for message, queue, mark in zip(messages, queues, group_marks(len(messages)), strict=True):
            kind = message.sys_flag & TRANSACTION_MASK
            offset = 0
            if kind != PREPARED and kind != ROLLBACK:
                offset = offsets.get(queue, queue.next_offset)
                offsets[queue] = offset + 1
            record = encode_record(message, queue.queue_id, offset, position, now, host)
            at, end = position - base, position + len(record)
            data[at : at + len(record)] = record
            data[at + MARK_AT] |= mark
            if self._seals:
                seal(data, at, end - base)
            placed.append(Placed(queue.queue_id, offset, position, end, now))
            position = end
        if len(messages) > 1:
            tail.begin_group()
        if in_chunk:
            tail.position = position
        else:
            tail.put(data)
        for message, queue, at_place in zip(messages, queues, placed, strict=True):
            self._put_entry(message, queue, at_place)
        return placed

    def _put_entry(self, message: Message, queue: Queue, placed: Placed) -> None:
        """Put the record of *message* into its queue, and among what is to be committed."""
        properties, kind = message.properties, message.sys_flag & TRANSACTION_MASK
        if kind != PREPARED and kind != ROLLBACK:
            code = self._codes.due(properties, placed.store_ms) if queue.timed else self._codes.of(properties)
            self.queues.touch(queue)
            queue.add(placed.position, placed.end - placed.position, code)
        # Keys of rollback records are not indexed.
        keyed = properties if kind != ROLLBACK else b""
        self._pending.append((queue, placed.position, placed.end, placed.store_ms, keyed))

    def _append_usual(self, messages: Sequence[Message], queue: Queue) -> list[Placed]:
        """Append *messages*, which have IPv4 hosts, are no transactions, and fit into the chunk."""
        tail, queue_id, topic_part, overhead = self.tail, queue.queue_id, queue.topic_part, queue.overhead
        data, base, host = tail.data, tail.chunk_base, self.store_host
        now = self._now_ms
        if not now:
            now = self._begin_commit()
        position, offset = tail.position, queue.next_offset
        placed: list[Placed] = []
        entries: list[bytes] = []
        pending: list[tuple[Queue, int, int, int, bytes]] = []
        code_of = self._codes.of
        sealed = self._seals
        for message, mark in zip(messages, group_marks(len(messages)), strict=True):
            properties = message.properties
            size = overhead + len(message.body) + len(properties)
            encode_into(data, position - base, size, message, topic_part, queue_id, offset, position, now, host)
            data[position - base + MARK_AT] |= mark
            if sealed:
                seal(data, position - base, position - base + size)
            entries.append(ENTRY.pack(position, size, code_of(properties)))
            end = position + size
            pending.append((queue, position, end, now, properties))
            placed.append(Placed(queue_id, offset, position, end, now))
            position = end
            offset += 1
        if len(messages) > 1:
            tail.begin_group()
        tail.position = queue.last_end = position
        queue.tail += b"".join(entries)
        queue.next_offset = offset
        if not queue.dirty:
            self.queues.touch(queue)
        self._pending += pending
        return placed

    def _fit_seal(self, message: Message) -> bytes:
        """Make room for the seal of *message*, or take off one that is another record's; returns its properties."""
        fitted = with_room_for_seal(message.properties) if self._seals else without_seal(message.properties)
        message.properties = fitted
        return fitted

    def _new_queue(self, topic: str, queue_id: int) -> Queue:
        if not topic or "/" in topic or "\x00" in topic or topic in (".", "..") or len(topic.encode()) > 255:
            raise Refused(Reason.ILLEGAL, f"topic {topic!r} cannot be a directory of the store")
        if queue_id < 0:
            raise Refused(Reason.ILLEGAL, f"queue id {queue_id} is negative")
        return self.queues.get(topic, queue_id)

    def _refuse_any(self, messages: Sequence[Message]) -> None:
        """Say why the first of *messages* that cannot be stored cannot be."""
        for message in messages:
            properties = message.properties
            too_long = len(message.body) > self.config.message_bytes_max or len(properties) > PROPERTIES_BYTES_MAX
            if self.refusal or too_long or 0 in properties:
                self._refuse(message)

    def _refuse(self, message: Message) -> None:
        """Say why *message* cannot be stored."""
        if self.flusher.failed is not None:
            raise self.flusher.failed
        if self.refusal:
            raise Refused(Reason.UNAVAILABLE, self.refusal)
        if len(message.properties) > PROPERTIES_BYTES_MAX:
            raise Refused(
                Reason.ILLEGAL,
                f"the properties have {len(message.properties)} bytes; the most is {PROPERTIES_BYTES_MAX}",
            )
        if 0 in message.properties:
            raise Refused(Reason.ILLEGAL, "the properties hold U+0000; the store tells by it that a write was torn")
        raise Refused(
            Reason.ILLEGAL,
            f"the body has {len(message.body)} bytes; the most is {self.config.message_bytes_max} "
            "(store.message_bytes_max)",
        )

    def _roll(self, message: Message, queue: Queue) -> None:
        size = record_size(message, queue.topic_bytes, self.store_host)
        if self.tail.position + size + FILLER_BYTES > self.tail.segment.end:
            self._roll_for(size, "the record")

    def _roll_for(self, size: int, what: str) -> None:
        """Begin a segment in which *size* bytes have room."""
        if self.flusher.failed is not None:
            raise self.flusher.failed
        if size + FILLER_BYTES > self.config.segment_bytes:
            raise Refused(
                Reason.ILLEGAL,
                f"{what} has {size} bytes; a segment has {self.config.segment_bytes} (store.segment_bytes)",
            )
        before = self.tail.segment
        if before.path:
            self.flusher.wrote(before.path)
        try:
            self.tail.roll()
        except OSError as error:
            lost = bool(self._pending) and self.tail.written < before.end
            if lost:
                self._take_back()
            else:
                self._accept_pending()
            refused = self._disk_refused(error)
            if lost:
                self._lost = refused
            raise refused from error
        self._accept_pending()
        self.flusher.created()

    # ---- committing

    def _begin_commit(self) -> int:
        """Return the time that all records of the next commit get; called with the first of them."""
        self._now_ms = now = self._clock.now_ms()
        self.commit_soon()
        return now

    def commit_soon(self) -> None:
        """Have the server commit at the end of this round of the event loop; appends call this themselves."""
        if self.on_commit_wanted is not None:
            self.on_commit_wanted()

    def commit(self) -> None:
        """Hand everything appended since the last commit to the operating system, in one write.

        With async flush it is readable now. After an error every record whose ``placed.end`` is behind
        ``written`` was not stored and leaves no trace.

        Raises:
          Refused: the disk is full; the store tries again by itself.
          StoreFailed: the disk failed.
        """
        self._now_ms = 0
        if self._lost is not None:
            lost, self._lost = self._lost, None
            raise lost
        if not self._pending:
            return
        tail = self.tail
        self.flusher.wrote(tail.segment.path)
        try:
            tail.write_out()
        except OSError as error:
            self._take_back()
            raise self._disk_refused(error) from error
        self._accept_pending()

    def _accept_pending(self) -> None:
        """What is pending is written: count it, queue its keys, wake who waits for it."""
        pending = self._pending
        if not pending:
            return
        self.commits += 1
        self.appended_messages += len(pending)
        # Side by side in one segment.
        self.appended_bytes += pending[-1][2] - pending[0][1]
        self.last_store_ms = pending[-1][3]
        touched = self._touched
        # With sync flush a watcher may still come before the records become readable.
        for item in pending:
            if self._sync or item[0].watchers:
                touched[item[0]] = None
        keys = self.keys
        if keys is not None and self.checkpointer.follower is None:
            keys.pending.extend(pending)
            if len(keys.pending) > UNINDEXED_MAX:
                self._help_index(keys)
        self._pending = []
        self.checkpointer.wake()
        self.flusher.ask()
        if not self._sync:
            self._became_readable(self.tail.written)

    def _help_index(self, keys: KeyIndex) -> None:
        try:
            keys.drain(len(keys.pending) - UNINDEXED_MAX // 2)
        except OSError as error:
            logger.warning("the key index cannot grow: %s; it goes on later", error)

    def _take_back(self) -> None:
        """Nothing that is pending was stored: give its queue offsets back."""
        for queue, _, end, _, _ in reversed(self._pending):
            if queue.last_end == end:
                queue.drop_last()
        self._pending = []

    def _disk_refused(self, error: OSError) -> Refused | StoreFailed:
        """What to raise for *error* of a write: full disks heal, anything else does not."""
        if is_full(error):
            self.refusal = self.retention.refusal_for(error)
            return Refused(Reason.UNAVAILABLE, self.refusal)
        failed = self.flusher.fail(error)
        self.refusal = str(failed)
        return failed

    def _became_readable(self, position: int) -> None:
        self.readable = position
        if self._touched:
            self._call_watchers()
        for callback in self.on_flushed:
            callback()

    def _call_watchers(self) -> None:
        touched, self._touched = self._touched, {}
        for queue in touched:
            if queue.last_end > self.readable:
                self._touched[queue] = None
            for watcher in tuple(queue.watchers or ()):
                watcher(queue)

    def _durable_moved(self) -> None:
        if self.flusher.failed is not None:
            self.refusal = str(self.flusher.failed)
        if self._sync:
            self._became_readable(self.flusher.durable)
        elif self.flusher.failed is not None:
            self._became_readable(self.readable)

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
            raise self._disk_refused(error) from error

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
            raise self._disk_refused(error) from error

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

        The store's own records are none.
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
        if not check_record(data, 0, size, position) or is_note(RecordView(data).topic_bytes):
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
