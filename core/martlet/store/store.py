"""The store: one log, the queues and keys that index it, and the tasks that make it durable.

A `Store` opens a directory, makes its parts and connects them; its users call the parts. `Writer.append` extends the
log in memory. `Committer.commit`, called once per socket read, writes everything new to the operating system in one
call. With ``flush = "sync"`` records become readable when they are durable, with ``"async"`` when they are written.
Methods that are not ``async`` are atomic.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import final

import trio

from martlet.errors import Refused
from martlet.records.layout import Dispatcher
from martlet.runtime.clock import Clock
from martlet.runtime.wakeup import Wakeup
from martlet.store.append.admission import Admission
from martlet.store.append.committer import Committer
from martlet.store.append.flusher import Flusher
from martlet.store.append.note_writer import NoteWriter
from martlet.store.append.readable import ReadableEnd
from martlet.store.append.writer import Writer
from martlet.store.cold_tier import ColdTier
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
from martlet.store.read.cold import ColdRecords
from martlet.store.read.lookup import Lookup
from martlet.store.read.readers import Readers
from martlet.store.recovery.indexer import Indexer
from martlet.store.recovery.recovery import Progress, Recovery
from martlet.store.recovery.repair import Repairs
from martlet.store.recovery.sizes import fit_sizes
from martlet.store.statistics import Recovered, StoreStatistics
from martlet.store.upkeep.checkpointer import Checkpointer
from martlet.store.upkeep.deleted_topics import DeletedTopics
from martlet.store.upkeep.deletions import Deletions
from martlet.store.upkeep.disk_space import DiskSpace
from martlet.store.upkeep.emptied_queues import EmptiedQueues
from martlet.store.upkeep.retention import Retention
from martlet.store.upkeep.segment_age import SegmentAge
from martlet.store.upkeep.topic_retention import TopicRetention
from martlet.store.upkeep.upkeep import StoreUpkeep

__all__ = ["Store"]

logger = logging.getLogger("martlet.store")


@final
class Store:
    """One open data directory and its parts.

    `open` creates it. Start `StoreUpkeep.run` before anyone waits, and end it with `close`.
    """

    def __init__(self, directory: Path, config: StoreConfig, clock: Clock, disk: Disk) -> None:
        root = str(directory)
        self.config = config
        self.disk = disk
        files = Files(disk, config.open_files_max)
        self.data_directory = DataDirectory(root, disk, files)
        self.segments = Segments(files, f"{root}/commitlog", config.segment_bytes)
        self.pages = PageCache(self.segments, config.page_bytes, config.cache_bytes)
        self.tail = LogWriter(self.pages)
        self.queues = Queues(QueueFiles(files, f"{root}/consumequeue", config.queue_file_entries))
        self.keys: KeyIndex | None = None
        if config.keys_index:
            self.keys = KeyIndex(files, f"{root}/index", config.index_slots, config.index_entries)
        is_sync = config.flush == "sync"
        self.flusher = Flusher(files, self.tail, self.segments.directory, is_sync=is_sync)
        self.admission = Admission(root, self.flusher)
        self.readable_end = ReadableEnd()
        wakeup = Wakeup()
        repairs = Repairs(disk, self.segments, self.queues, self.flusher, self.admission, wakeup)
        indexer = Indexer(self.keys, disk, self.segments, self.queues, self.tail, self.flusher, wakeup)
        self.committer = Committer(self.tail, self.flusher, self.admission, self.readable_end, indexer.accept, clock)
        self.writer = Writer(config, self.tail, self.queues, self.committer, self.admission)
        self.notes = NoteWriter(self.writer, self.committer, self.queues, config, clock)
        cold, verify = ColdRecords(self.queues), config.verify_reads
        self.readers = Readers(disk, self.pages, self.queues, self.readable_end, repairs, cold, verify=verify)
        # With async flush, everything written is readable already.
        self.early_readers = self.readers.up_to(self.readable_end.early) if is_sync else self.readers
        self.lookup = Lookup(
            disk,
            self.segments,
            self.pages,
            self.tail,
            self.queues,
            self.readable_end,
            self.readers,
            indexer,
            repairs,
            config.message_bytes_max,
        )
        deleted = DeletedTopics(self.queues, wakeup)
        self.upkeep = self._make_upkeep(repairs, indexer, deleted, wakeup, clock)
        self.deletions = Deletions(self.queues, self.tail, self.flusher, self.readable_end, self.notes, deleted)
        # The results of the start.
        self.recovered = Recovered()

    def _make_upkeep(
        self, repairs: Repairs, indexer: Indexer, deleted: DeletedTopics, wakeup: Wakeup, clock: Clock
    ) -> StoreUpkeep:
        config, root, segments, queues = self.config, self.data_directory.path, self.segments, self.queues
        tail, flusher, admission, committer = self.tail, self.flusher, self.admission, self.committer
        first_offsets = FirstOffsets(queues, segments)
        checkpointer = Checkpointer(
            root,
            config,
            segments,
            queues,
            tail,
            flusher,
            admission,
            committer,
            repairs,
            indexer,
            first_offsets,
            deleted,
            wakeup,
        )
        age = SegmentAge(root, config, segments, committer, clock)
        space = DiskSpace(self.data_directory, config, flusher, admission, checkpointer)
        emptied = EmptiedQueues(queues, tail, flusher, self.notes)
        retention = Retention(root, segments, self.pages, self.keys, first_offsets, checkpointer, age, space, emptied)
        topic_retention = TopicRetention(
            self.disk, queues, self.readers, self.lookup, self.notes, tail, flusher, age, clock
        )
        return StoreUpkeep(config, flusher, indexer, repairs, checkpointer, retention, topic_retention)

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
          dispatchers: compute the codes of a topic's entries, by topic.

        Raises:
          StoreLocked: another process has it open; the text says which.
          OSError: the directory cannot be used.
        """
        disk = disk if disk is not None else RealDisk()
        store = cls(directory, fit_sizes(str(directory), config, disk), clock, disk)
        store.queues.dispatchers = {SCHEDULE_TOPIC: due_dispatcher(DELAYS_MS), **(dispatchers or {})}
        store.data_directory.lock()
        with ExitStack() as undo:
            undo.callback(store.data_directory.release)
            await store._recover(report)
            undo.pop_all()
        return store

    async def _recover(self, report: Progress | None) -> None:
        began = trio.current_time()
        files, checkpointer = self.segments.files, self.upkeep.checkpointer
        checkpoint = read_checkpoint(files, f"{self.data_directory.path}/checkpoint")
        clean = stopped_in_order(checkpoint, abort=self.data_directory.has_mark)
        self.segments.load()
        self._do_unless_full(self.data_directory.mark)
        recovery = Recovery(self.segments, self.queues, report)
        await recovery.run(
            checkpoint,
            checkpointer.journal,
            clean=clean,
            distrust=lambda: checkpointer.distrust(checkpoint, clean=clean),
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
                files.sync(segment.path)
        self.disk.sync_directory(self.segments.directory)
        if not self._do_unless_full(checkpointer.write_checkpoint):
            checkpointer.owe_checkpoint()
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

    def _begin_at(self, recovery: Recovery) -> None:
        end = recovery.end
        self.pages.trusted_from = end
        self.tail.open_at(end)
        self.flusher.durable = end
        self.readable_end.open_at(end)
        self.upkeep.checkpointer.open_after(recovery.paths, recovery.deleted)
        self.queues.on_damage = self.upkeep.repairs.want
        self.upkeep.indexer.open_at(end)

    async def close(self) -> bool:
        """Make everything durable and leave the directory as after an orderly shutdown; idempotent.

        Returns False if the disk was too full for that, or had failed before: the next start recovers.
        """
        if not self.data_directory.is_locked:
            return True
        try:
            if self.flusher.failed is not None:
                return False
            self._commit_last()
            self.flusher.flush_now()
            await self.upkeep.checkpointer.finish()
            self.data_directory.unmark()
        except OSError as error:
            if not is_full(error):
                raise self.flusher.fail(error) from error
            logger.warning("stopped without a checkpoint, so the next start takes longer: %s", error)
            return False
        finally:
            self.data_directory.release()
        return True

    def _commit_last(self) -> None:
        try:
            self.committer.commit()
        except Refused as refused:
            logger.warning("messages without a commit before the stop are not stored: %s", refused)

    def crash(self) -> None:
        """Release the directory without saving anything, like a killed process; for tests."""
        self.data_directory.release()

    def set_config(self, config: StoreConfig) -> None:
        """Replace the configuration, of which only the age of segments has an effect before the next start."""
        self.config = self.upkeep.retention.age.config = config

    @property
    def cold(self) -> ColdRecords:
        """The records that only the cold tier has."""
        return self.readers.cold

    def use_cold_tier(self, tier: ColdTier) -> None:
        """Remove no record before *tier* has released it, and read from *tier* what the log has lost.

        Call it once, before `StoreUpkeep.run`, and then ``tier.begin``.
        """
        self.cold.tier = tier
        self.upkeep.retention.add_keeper(tier, f"cold tier {tier.name!r}")

    # ---- positions

    @property
    def first_position(self) -> int:
        """The log position of the oldest stored record."""
        return self.segments.start

    @property
    def oldest_position(self) -> int:
        """The log position of the oldest record that consumers may read, from the cold tier or from the log."""
        return min(self.segments.start, self.cold.from_position)

    @property
    def local_position(self) -> int:
        """The log position before which only the cold tier has the records of consumers: the log's first, or a later
        one after a restore.
        """
        return max(self.segments.start, self.cold.to_position)

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
    def delivers_early(self) -> bool:
        """Whether early readers read records before other readers."""
        return self.early_readers is not self.readers

    # ---- queues

    def queue(self, topic: str, queue_id: int) -> Queue:
        """Return the queue, created if it does not exist.

        Raises:
          Refused: it would be a new light queue, and there are too many.
        """
        return self.writer.open_queue(topic, queue_id) if is_light(topic) else self.queues.get(topic, queue_id)

    def topics_on_disk(self) -> list[str]:
        """The topics that have queues, without Martlet's internal ones."""
        return sorted(topic for topic in self.queues.topics if not topic.startswith(OWN_PREFIX))

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
            self.upkeep.retention,
            self.upkeep.topic_retention,
            self.keys,
            self.recovered,
        )
