"""Uploads the log to the cold tier, range by range, while the broker runs.

    log:     ... -----------|---------------------|--------------|
                         released          begin + range      durable and readable

A range is uploaded in steps, any of which may be the last one that a broker lives to do: its files and their keys are
stored and read back, then one commit adds them to the table, then the index of readers learns of them, and then
retention may remove the records. So records are in the log until consumers can read them elsewhere. A start continues
at the end of the table.

Another process does what costs time (`process`): it reads the log, and stores the files. It runs while there are ranges
to upload. The broker decides which range that is and which messages are left out, and it alone commits.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final, Protocol, TypeAlias, final

import trio

from martlet.errors import MartletError
from martlet.runtime.clock import Clock
from martlet.runtime.io_threads import IoThreads
from martlet.runtime.wakeup import Wakeup
from martlet.store import Store
from martlet_tiered.config import TieredConfig, call_deadline_s
from martlet_tiered.errors import Fenced, FileTooLarge, LogUnreadable
from martlet_tiered.files import DataFile
from martlet_tiered.format.footer import FileFooter
from martlet_tiered.owners import Reach
from martlet_tiered.table import ColdTable
from martlet_tiered.upload.deleted import LiveQueues
from martlet_tiered.upload.messages import FindRange, FoundRange, StoreRange
from martlet_tiered.upload.ownership import Ownership
from martlet_tiered.upload.process import UploadWorker
from martlet_tiered.upload.progress import Trouble, UploadProgress
from martlet_tiered.upload.session import OpenTable, UploadSession, open_session

__all__ = ["CommitFollower", "RunWorker", "TableUpkeep", "Uploader"]

logger = logging.getLogger("martlet.tiered")

POLL_S: Final = 1.0
BACKOFF_S: Final = 1.0
BACKOFF_MAX_S: Final = 60.0
# Records of a range: 30 bytes of memory each, and as much again while they are sorted.
RECORDS_MAX: Final = 500_000
# Bytes of a file in memory. The range is chosen so that its largest file has about the first number, by the ratio of
# the ranges before; a file that comes to the second one is given up, and the range is halved.
FILE_BYTES: Final = 24 << 20
FILE_BYTES_MAX: Final = 48 << 20
RANGE_BYTES_MIN: Final = 1 << 20
# A process that has nothing to upload for this long is ended: it has 100 MiB of memory, and a start takes 0.5 s.
IDLE_S: Final = 30.0
# Files of the log that a range is read from.
SEGMENTS_MAX: Final = 1000
TIDY_RANGES: Final = 8
# Files are not rewritten while uploads are this many ranges behind, or retention waits for them.
RANGES_BEHIND: Final = 4
# Requests of a commit, one after the other.
COMMIT_REQUESTS: Final = 10

# Runs an upload process that may be silent for that many seconds; it is open.
RunWorker: TypeAlias = Callable[[float], AbstractAsyncContextManager[UploadWorker]]


class CommitFollower(Protocol):
    """Learns what is in the table: the index of readers."""

    async def sync(self, files: Sequence[DataFile]) -> None:
        """Note that *files* are all files of the table: at the start, and after another program has changed it."""
        ...

    async def beginning(self, epoch: int, reach: Reach) -> None:
        """Note that the next range will be uploaded in *epoch*; *reach* says which states of the broker count."""
        ...

    async def committed(self, files: Sequence[DataFile], footers: Sequence[FileFooter]) -> None:
        """Note that *files* with these *footers* were added. Retention may remove their records when it returns."""
        ...


class TableUpkeep(Protocol):
    """Rewrites files between two uploads; nothing else writes to the table meanwhile."""

    def take_removed_hours(self) -> int | None:
        """Return for how many hours objects must not have been in the table to be removed now; None: remove nothing.

        The next time that it returns a number is some hours later.
        """
        ...

    @property
    def is_due(self) -> bool:
        """Whether `step` may have something to do."""
        ...

    async def step(self, table: ColdTable) -> None:
        """Rewrite some files of *table*, which this broker owns, in some seconds."""
        ...

    def stop(self, why: str) -> None:
        """Give up what is to be done: another broker owns the table now."""
        ...


@final
class Uploader:
    """Uploads the log of *store*, and keeps from retention what it has not uploaded.

    Args:
      open_table: opens the table; called in a thread for each session.
      run_worker: runs an upload process.
      follower: learns of each commit.
      upkeep: has its turn when no upload is due, and after each one, unless that is urgent.
      broker: the name of the broker.
      ownership: of the data directory of *store*.
    """

    def __init__(
        self,
        store: Store,
        config: TieredConfig,
        clock: Clock,
        open_table: OpenTable,
        run_worker: RunWorker,
        follower: CommitFollower,
        upkeep: TableUpkeep,
        broker: str,
        ownership: Ownership,
    ) -> None:
        self.released = 0
        self.progress = UploadProgress()
        self._store = store
        self._config = config
        self._clock = clock
        self._open_table = open_table
        self._run_worker = run_worker
        self._follower = follower
        self._upkeep = upkeep
        self._broker = broker
        self._ownership = ownership
        deadline_s = call_deadline_s(config, COMMIT_REQUESTS)
        self._threads = IoThreads("the store of the cold tier", threads_max=2, deadline_s=deadline_s)
        self._live = LiveQueues(store)
        self._wakeup = Wakeup()
        self._wanted = 0  # retention waits for records before this log position
        self._pending_since: float | None = None  # on trio's clock; None: nothing was to be uploaded
        self._bytes_max = min(config.range_bytes, FILE_BYTES)
        self._trouble = Trouble("the store of objects was not opened yet")

    # ---- retention

    @property
    def limit(self) -> int:
        """The log position up to which records are durable, and readers may see them."""
        return min(self._store.durable, self._store.readable)

    @property
    def behind(self) -> int:
        """Bytes of the log that are not uploaded yet."""
        return max(self.limit - max(self.released, self._store.first_position), 0)

    @property
    def reason(self) -> str:
        """Why records may not be removed yet, and how many."""
        return self._trouble.describe(self.behind)

    @property
    def trouble(self) -> str:
        """Why nothing can be uploaded now; empty if it can."""
        return self._trouble.text

    async def release(self, end: int) -> None:
        """Hurry to upload the records before log position *end*."""
        if end > self._wanted:
            self._wanted = end
            self._wakeup.set()

    # ---- sessions

    async def run(self) -> None:
        """Upload until cancelled. What fails is logged once a minute, and tried again after a pause."""
        backoff_s = BACKOFF_S
        while True:
            ranges = self.progress.ranges
            try:
                await self._upload_in_session()
            except Fenced as error:
                self._trouble.text = str(error)
                self._upkeep.stop(str(error))
                logger.error("the cold tier has stopped uploading: %s", error)
                await trio.sleep_forever()
            except (MartletError, OSError) as error:
                self._note_failure(error, is_defect=False)
            except Exception as error:  # a defect here must not stop the broker
                self._note_failure(error, is_defect=True)
            backoff_s = BACKOFF_S if self.progress.ranges > ranges else min(2 * backoff_s, BACKOFF_MAX_S)
            await trio.sleep(backoff_s)

    def _note_failure(self, error: Exception, *, is_defect: bool) -> None:
        self.progress.failures += 1
        self._trouble.note(error, self.behind, is_defect=is_defect)

    async def _upload_in_session(self) -> None:
        session = await self._take_over()
        begin = self._begin_of(session)
        await self._store.disk.off_loop(self._ownership.save)
        await self._follower.sync(await self._threads.run(session.files))
        self.released = begin
        self._trouble.text = ""
        logger.info("the cold tier uploads the log from position %d on; %.1f MiB wait", begin, self.behind / (1 << 20))
        while True:
            if await self._wait_for_work():
                async with self._run_worker(call_deadline_s(self._config)) as worker:
                    await self._upload_ranges(session, worker)
            if self._upkeep_is_due:
                await self._upkeep.step(session.table)
                await self._tidy(session)

    async def _take_over(self) -> UploadSession:
        ownership = self._ownership
        owner = await self._store.disk.off_loop(ownership.next_owner)
        session = await self._threads.run(partial(open_session, self._open_table, owner, ownership.owners))
        ownership.take(session.epoch)
        return session

    async def _upload_ranges(self, session: UploadSession, worker: UploadWorker) -> None:
        """Upload a range, and more until there is none for a while, or upkeep is due."""
        while True:
            await self._follower.beginning(session.epoch, session.reach)
            await self._upload_range(session, worker)
            self._trouble.text = ""
            await self._tidy(session)
            is_over = self._upkeep_is_due
            with trio.move_on_after(IDLE_S) as idle:
                is_over = is_over or not await self._wait_for_work()
            if is_over or idle.cancelled_caught:
                return

    def _begin_of(self, session: UploadSession) -> int:
        """Return where the uploads continue.

        Raises:
          LogUnreadable: the table ends after the log.
        """
        end = session.end
        if end is None:
            return self._store.first_position
        if end > self._store.appended:
            raise LogUnreadable(
                f"the table ends at log position {end}, and the log at {self._store.appended}: it is the table of "
                "another data directory; set tiered.url to an empty place, or restore the data directory"
            )
        return end

    # ---- ranges

    @property
    def _upkeep_is_due(self) -> bool:
        is_urgent = self._wanted > self.released or self.behind > RANGES_BEHIND * self._config.range_bytes
        return self._upkeep.is_due and not is_urgent

    async def _wait_for_work(self) -> bool:
        """Return true once a range is to be uploaded: it is large enough, old enough, or retention waits for it.

        Return false once upkeep is due; with both, they take turns.
        """
        released = self.released
        while True:
            pending = self.limit - released
            if pending > 0:
                now = trio.current_time()
                since = self._pending_since = now if self._pending_since is None else self._pending_since
                is_old = now - since >= self._config.range_ms / 1000
                if pending >= self._bytes_max or is_old or self._wanted > released:
                    return True
            if self._upkeep_is_due:
                return False
            with trio.move_on_after(POLL_S):
                await self._wakeup.wait()

    async def _upload_range(self, session: UploadSession, worker: UploadWorker) -> None:
        begin, limit = self.released, self.limit
        segments = [(each.start, each.end) for each in self._store.segments.items if each.end > begin][:SEGMENTS_MAX]
        limit = min(limit, segments[-1][1]) if segments else limit
        found, runs = await worker.find(FindRange(segments, begin, limit, self._bytes_max, RECORDS_MAX))
        if found.end <= begin:
            raise LogUnreadable(f"the log cannot be read from position {begin} on; it is damaged there")
        firsts = await self._live.first_offsets(runs, found.end)
        bytes_max = None if found.end - begin <= RANGE_BYTES_MIN else FILE_BYTES_MAX
        wanted = StoreRange(session.epoch, self._clock.now_ms(), firsts.tobytes(), bytes_max)
        try:
            stored, files, footers = await worker.store(wanted)
        except FileTooLarge:
            self._bytes_max = (found.end - begin) // 2
            return
        await self._threads.run(partial(session.append, begin, found.end, files))
        await self._follower.committed(files, footers)
        await self._sync_if_foreign(session)
        self.released = found.end
        self._pending_since = None
        self._note_range(begin, found, stored.records, files)

    async def _sync_if_foreign(self, session: UploadSession) -> None:
        foreign = session.take_foreign()
        if foreign:
            logger.warning("another program has changed the table of the cold tier in %d commits", foreign)
            await self._follower.sync(await self._threads.run(session.files))

    def _note_range(self, begin: int, found: FoundRange, records: int, files: Sequence[DataFile]) -> None:
        self.progress.add(begin, found, records, sum(file.bytes for file in files))
        self._live.forget_before(found.end)
        if found.damaged:
            logger.error(
                "the cold tier leaves out %d damaged parts of the log, the first at position %d",
                found.damaged,
                found.damaged_at,
            )
        if found.removed:
            logger.error(
                "the cold tier lacks %d bytes of the log before position %d: retention removed them while it was off",
                found.removed,
                found.end,
            )
        largest = max((file.bytes for file in files), default=0)
        log_bytes = found.end - begin
        # Not more than twice the range: the next messages may compress less.
        fitting = min(log_bytes * FILE_BYTES // max(largest, 1), 2 * max(log_bytes, FILE_BYTES))
        self._bytes_max = min(self._config.range_bytes, max(fitting, RANGE_BYTES_MIN))

    async def _tidy(self, session: UploadSession) -> None:
        """Write checkpoints and remove leftovers now and then; what fails is done the next time.

        It may be the first to see commits of other programs.
        """
        removed_hours = self._upkeep.take_removed_hours()
        if removed_hours is not None or self.progress.ranges % TIDY_RANGES == 0:
            failure = await self._threads.run(partial(session.tidy, self._clock.now_ms(), removed_hours))
            if failure:
                logger.warning("the table of the cold tier was not tidied: %s", failure)
        await self._sync_if_foreign(session)
