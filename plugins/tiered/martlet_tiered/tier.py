"""The cold tier of a broker: an uploader that keeps the log until it has a copy, and a reader of the copies."""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final, final

import trio
from msgspec import structs

from martlet.broker import Broker
from martlet.errors import Refused
from martlet.records.layout import FRONT_BYTES, MAGICS, RecordView
from martlet.runtime.io_threads import IoThreads
from martlet.store.read.cold import RESTORED_FILE
from martlet_tiered.config import TieredConfig
from martlet_tiered.delta import TableLog
from martlet_tiered.errors import StoreUnusable, TableRefused, TierError
from martlet_tiered.files import DataFile
from martlet_tiered.format.writing import TABLE_SCHEMA
from martlet_tiered.local import LocalObjects
from martlet_tiered.location import LOCAL, TierLocation
from martlet_tiered.objects import Objects
from martlet_tiered.opening import open_objects
from martlet_tiered.reading.index import FILE_NAME, TierIndex, identity_of
from martlet_tiered.reading.reader import DEADLINE_S, ReadsOfTier, TierReader
from martlet_tiered.reading.store_reads import StoreReads
from martlet_tiered.remote import RemoteObjects
from martlet_tiered.restore.capture import StateKeeper, UploadFollower
from martlet_tiered.restore.directory import restored_position
from martlet_tiered.rewrite.rewriter import Rewriter
from martlet_tiered.status import PurgeStatus, TierStatus
from martlet_tiered.table import ColdTable
from martlet_tiered.upload.messages import Setup
from martlet_tiered.upload.ownership import Ownership
from martlet_tiered.upload.process import UploadWorker, run_worker
from martlet_tiered.upload.uploader import Uploader

__all__ = ["ObjectTier"]

logger = logging.getLogger("martlet.tiered")

# Between two lines of a purge.
PURGE_S: Final = 1.0


@final
class ObjectTier(ReadsOfTier):
    """The `ColdTier` of *broker* at *location*. `uploader` and `reader` have services, which the plugin runs.

    Raises:
      TierError: the settings do not fit the store, or a local directory cannot be used.
    """

    def __init__(self, broker: Broker, config: TieredConfig, location: TierLocation) -> None:
        self.name: Final = location.url
        self._broker = broker
        self._config = config
        self._location = location
        # A consumer waits for a retry, so it begins in time; the log of the table is read with the same.
        self._patience = structs.replace(config, retry_ms=min(config.retry_ms, round(DEADLINE_S * 500)))
        self._objects = _open_for_reads(location, self._patience)
        threads = IoThreads("the store of old messages")
        self._threads = threads
        store, name = broker.store, broker.config.name
        path = f"{store.data_directory.path}/{FILE_NAME}"
        self.index = TierIndex(store, path, identity_of(location.url, name), self._objects, threads)
        self._reads = StoreReads(self._objects, threads, config.cache_bytes)
        self.reader = TierReader(self.name, self.index, self._reads, self._refresh)
        ownership = Ownership(store.disk, store.data_directory.path, broker.ids.unique())
        self.rewriter: Final = Rewriter(
            *(self.index, self._open_objects, lambda: store.first_position, config, broker.clock, name)
        )
        follower = UploadFollower(self.index, StateKeeper(broker, self._objects, threads))
        self.uploader: Final = Uploader(
            *(store, config, broker.clock, self._open_table, self._run_worker, follower, self.rewriter, name, ownership)
        )

    # ---- what the tier has

    async def begin(self) -> None:
        """Open the index and compare it with the table; if the store does not answer, that comes later.

        Raises:
          TierError: the store cannot be used, or the table belongs to another broker.
        """
        self._tell_restored()
        await self.index.begin()
        try:
            await self._refresh()
        except (TableRefused, StoreUnusable):
            raise
        except (Refused, TierError) as error:
            logger.warning("the cold tier begins with what its index had; %s", error)

    def _tell_restored(self) -> None:
        """Tell the store up to which log position a restored data directory has no messages."""
        store = self._broker.store
        about = next(iter(store.data_directory.read_generations(RESTORED_FILE)), b"")
        store.cold.to_position = restored_position(about)

    async def _refresh(self) -> None:
        await self.index.sync_with(self._files)

    async def _files(self) -> Sequence[DataFile]:
        return await self._threads.run(self._read_files)

    def _read_files(self) -> Sequence[DataFile]:
        log = TableLog(self._objects, self._location, self._patience)
        table = ColdTable(self._objects, log, self._broker.config.name)
        table.open(TABLE_SCHEMA)
        return table.files()

    def _open_objects(self) -> Objects:
        broker = self._broker
        return open_objects(self._location, self._config, broker.ids.unique(), broker.clock.now_ms())

    def _open_table(self) -> ColdTable:
        objects = self._open_objects()
        return ColdTable(objects, TableLog(objects, self._location, self._config), self._broker.config.name)

    def _run_worker(self, deadline_s: float) -> AbstractAsyncContextManager[UploadWorker]:
        config, options, broker = self._config, self._location.options, self._broker
        unique, now_ms = broker.ids.unique(), broker.clock.now_ms()
        folder, level = broker.store.segments.directory, logger.getEffectiveLevel()
        return run_worker(Setup(config, options, folder, broker.config.name, unique, now_ms, level), deadline_s)

    def statistics(self) -> dict[str, object]:
        """Return the counters of uploads and reads."""
        counters = {f"upload_{name}": value for name, value in structs.asdict(self.uploader.progress).items()}
        counters["upload_behind_bytes"] = self.uploader.behind
        counters |= structs.asdict(self.rewriter.progress)
        counters |= structs.asdict(self._reads.statistics())
        counters |= {"files": self.index.files, "unindexed_files": self.index.unindexed}
        return {**counters, "faulty_files": len(self.index.faults)}

    async def status(self) -> TierStatus:
        """Return how far the uploads are, and the counters."""
        uploader, store = self.uploader, self._broker.store
        position, behind, behind_ms = uploader.released, uploader.behind, 0
        if behind:
            front = await store.disk.off_loop(partial(store.segments.read, position, FRONT_BYTES))
            record = RecordView(front)
            if len(front) == FRONT_BYTES and record.magic in MAGICS:
                behind_ms = max(self._broker.clock.now_ms() - record.store_ms, 0)
        return TierStatus(
            *(self.name, self._broker.config.name, position, behind, behind_ms),
            *(uploader.reason if behind else "", self.statistics()),
        )

    async def purge(self, topic: str) -> AsyncGenerator[PurgeStatus, None]:
        """Remove the bytes of deleted topics, or of *topic* alone, and yield how far that is, once a second."""
        store, uploader = self._broker.store, self.uploader
        end = store.durable  # the notes of all deletions so far
        if store.deletions.end > end:
            await store.deletions.wait_durable()
            end = store.deletions.end
        await uploader.release(end)
        while uploader.released < end and not self.rewriter.stopped:
            yield PurgeStatus(waits=uploader.reason)
            await trio.sleep(PURGE_S)
        request = self.rewriter.purge(topic)
        while not request.is_over.is_set():
            request.status.waits = self._waits()
            yield request.status
            with trio.move_on_after(PURGE_S):
                await request.is_over.wait()
        request.status.waits = ""
        yield request.status

    def _waits(self) -> str:
        """Return what keeps files from being rewritten now; empty if nothing does."""
        if self.uploader.trouble:
            return self.uploader.reason
        return "" if self.index.is_complete else "its index is being built"

    # ---- retention

    @property
    def released(self) -> int:
        """Retention may remove records before this log position."""
        return self.uploader.released

    @property
    def reason(self) -> str:
        """Why records may not be removed yet, and how many."""
        return self.uploader.reason

    async def release(self, end: int) -> None:
        """Hurry to upload the records before log position *end*."""
        await self.uploader.release(end)


def _open_for_reads(location: TierLocation, config: TieredConfig) -> Objects:
    return LocalObjects(location.prefix) if location.scheme == LOCAL else RemoteObjects(location, config)
