"""Keeps the table tidy between two uploads: one file at a time loses the messages of deleted topics, the oldest day
expires, and small files become one.
"""

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar, final

import pyarrow as pa
import trio
from msgspec import Struct, structs

from martlet.runtime.clock import Clock
from martlet.runtime.io_threads import IoThreads
from martlet.runtime.steps import Blocking, Steps
from martlet_tiered.config import TieredConfig, call_deadline_s
from martlet_tiered.errors import AccessRefused, ObjectDamaged, ObjectMissing, StoreUnusable, TableRefused
from martlet_tiered.files import DataFile
from martlet_tiered.format.footer import FileFooter
from martlet_tiered.names import DataName
from martlet_tiered.objects import Objects
from martlet_tiered.rewrite.dropping import Dropping
from martlet_tiered.rewrite.merging import Rewritten, TangledQueues, merge_files
from martlet_tiered.rewrite.pacing import PacedThread
from martlet_tiered.rewrite.planning import expired_files, overdue_days, small_files
from martlet_tiered.status import PurgeStatus
from martlet_tiered.table import ColdTable

__all__ = ["Facts", "Purge", "RewriteProgress", "Rewriter", "new_name"]

logger = logging.getLogger("martlet.tiered")

T = TypeVar("T")

HOUR_S: Final = 3600.0
OVERDUE_DAYS: Final = 2
# The first look for deleted topics comes soon after a start: the broker may never run for long.
FIRST_S: Final = 60.0
# Pause while the index does not know all files.
INDEX_S: Final = 1.0
# Objects removed in one call, which has the deadline of an upload.
REMOVED_AT_ONCE: Final = 50
# No retry of a purge mends these.
FINAL: Final = (AccessRefused, StoreUnusable, TableRefused)


class Facts(Protocol):
    """Knows what the files of the table have: the index of readers."""

    async def files_of_deleted(self) -> tuple[Sequence[str], Mapping[str, int]] | None:
        """Return paths of files with messages of deleted topics, and topics with the log position of the deletion.

        None: not all files of the table are known yet.
        """
        ...

    async def replaced(
        self, removed: Sequence[DataFile], added: Sequence[DataFile], footers: Sequence[FileFooter]
    ) -> None:
        """Note that *added* have replaced *removed* in the table."""
        ...


class RewriteProgress(Struct):
    """Counters since the start; bytes are those of files before and after they were rewritten."""

    rewritten_files: int = 0
    rewritten_bytes: int = 0
    stored_bytes: int = 0
    dropped_records: int = 0
    unpurged_files: int = 0
    merged_files: int = 0
    expired_files: int = 0
    expired_bytes: int = 0


class Purge(Struct):
    """A wish to remove the bytes of `topic`, or of all deleted topics if that is empty, at once."""

    topic: str
    is_over: trio.Event
    status: PurgeStatus

    def end(self) -> None:
        """Let whoever waits for it know that it is over."""
        self.status.is_over = True
        self.is_over.set()


@final
class Rewriter:
    """Rewrites files of the table of *broker*, one at each `step`; all steps run between two uploads.

    Each new file is stored, read back, committed in place of the old one and then told to *facts*. Wherever a broker
    ends in between, the table has each message once; what was stored and not committed is removed a day later.

    `stopped` says why there will be no more steps; it is empty until `stop`.
    """

    def __init__(
        self,
        facts: Facts,
        open_objects: Callable[[], Objects],
        log_begin: Callable[[], int],
        config: TieredConfig,
        clock: Clock,
        broker: str,
    ) -> None:
        self.progress = RewriteProgress()
        self.stopped = ""
        self._config = config
        self._facts = facts
        self._log_begin = log_begin
        self._open_objects = open_objects
        self._objects: Objects | None = None
        self._clock = clock
        self._broker = broker
        self._pace = PacedThread()
        self._threads = IoThreads("the store of the cold tier", threads_max=2, deadline_s=call_deadline_s(config))
        self._look_at = self._tend_at = -1.0
        self._expire_at = self._not_before = 0.0
        self._unmerged: set[str] = set()  # files that cannot become one with others
        self._collect_at = 0.0
        self._number = 0
        self._skipped: dict[str, str] = {}  # why it was left as it is; empty if it need not be rewritten
        self._purges: list[Purge] = []

    @property
    def is_due(self) -> bool:
        """Whether `step` may have something to do."""
        now = trio.current_time()
        if self._look_at < 0:
            self._look_at = self._tend_at = now + FIRST_S
        return now >= self._not_before and (bool(self._purges) or now >= min(self._look_at, self._tend_at))

    def take_removed_hours(self) -> int | None:
        """Return for how many hours objects must not have been in the table to be removed now; None: remove nothing.

        The next time that it returns a number is some hours later.
        """
        now = trio.current_time()
        if now < self._collect_at:
            return None
        # Half of the time is for readers of older versions, a quarter until the next look, an eighth for the removal.
        self._collect_at = now + self._config.deleted_hours * HOUR_S / 8
        return self._config.deleted_hours // 2

    def purge(self, topic: str) -> "Purge":
        """Return a purge of *topic*, or of all deleted topics, which the next steps do; it fails after `stop`."""
        purge = Purge(topic, trio.Event(), PurgeStatus())
        self._purges.append(purge)
        self._skipped.clear()
        if self.stopped:
            self._fail_purges(self.stopped)
        return purge

    def stop(self, why: str) -> None:
        """End all purges with the error *why*: there will be no more steps."""
        self.stopped = why
        self._fail_purges(why)

    def look_now(self) -> None:
        """Let the next `step` look for deleted topics, expired days and small files."""
        self._look_at = self._tend_at = self._expire_at = self._not_before = trio.current_time()
        self._skipped.clear()

    async def step(self, table: ColdTable) -> None:
        """Rewrite or remove some files of *table*, of which this broker is the owner, if that is due; one commit.

        Raises:
          TierError: the store or the table cannot be used; the file may be rewritten or not.
          Refused: the store hangs.
        """
        try:
            await self._step(table)
        except FINAL as error:
            self._fail_purges(str(error))
            raise

    async def _step(self, table: ColdTable) -> None:
        known = await self._facts.files_of_deleted()
        files = await self._threads.run(table.files)
        by_path = {file.path: file for file in files}
        if known is None or not by_path.keys() >= set(known[0]):
            # Another program has changed the table, or its index is being built; the uploader compares both.
            self._not_before = trio.current_time() + INDEX_S
            await self._threads.run(table.refresh)
            return
        paths, deletions = known
        purge = self._purges[0] if self._purges else None
        if purge is not None and purge.topic:
            deletions = {topic: position for topic, position in deletions.items() if topic == purge.topic}
        is_look = purge is not None or trio.current_time() >= self._look_at
        wanted = [by_path[path] for path in paths if path not in self._skipped]
        if wanted and deletions and is_look:
            dropped = await self._purge(table, wanted[0], deletions)
            if purge is not None:
                purge.status.done += bool(dropped)
                purge.status.messages += dropped
                purge.status.left = len(wanted) - 1
        elif purge is not None:
            await self._end_purge(table, purge, is_known=bool(deletions))
        else:
            if is_look:
                self._look_at = trio.current_time() + self._config.deleted_hours * HOUR_S / 4
                self._skipped.clear()
            await self._tend(table, files, self._unmerged.union(paths))

    async def _tend(self, table: ColdTable, files: Sequence[DataFile], excluded: Container[str]) -> None:
        """Remove the oldest day of *files* if it has expired; otherwise make one of small files."""
        now_ms, config = self._clock.now_ms(), self._config
        if trio.current_time() >= self._expire_at:
            days, bytes_max = config.reserved_days, config.reserved_bytes
            expired = expired_files(files, now_ms, days, bytes_max, self._log_begin())
            if expired:
                self._expire_at = trio.current_time() + HOUR_S
                await self._expire(table, expired, overdue_days(files, now_ms, days))
                return
        small = small_files(files, now_ms, config.compact_bytes, excluded)
        if small:
            await self._merge(table, small)
        else:
            self._tend_at = trio.current_time() + HOUR_S

    async def _expire(self, table: ColdTable, files: Sequence[DataFile], overdue: int) -> None:
        await self._commit(table, files, Rewritten([], [], 0, 0), changes_data=True)
        self.progress.expired_files += len(files)
        self.progress.expired_bytes += sum(file.bytes for file in files)
        logger.info("the cold tier has removed %d files of %s, which expired", len(files), files[0].date)
        if overdue > OVERDUE_DAYS:
            logger.warning(
                "messages of the cold tier are %d days past tiered.reserved_days; one day of them is removed each "
                "hour; if the clock of this machine is wrong, correct it",
                overdue,
            )

    async def _merge(self, table: ColdTable, files: Sequence[DataFile]) -> None:
        """Make one file of *files*."""
        try:
            made = await self._made(table, files, Dropping({}), keeps=True)
        except (ObjectDamaged, ObjectMissing, TangledQueues) as error:
            self._unmerged.update(file.path for file in files)
            logger.warning("%d small files of the cold tier stay as they are: %s", len(files), error)
            return
        await self._commit(table, files, made, changes_data=False)
        self.progress.merged_files += len(files)

    async def _end_purge(self, table: ColdTable, purge: "Purge", *, is_known: bool) -> None:
        status = purge.status
        if purge.topic and not is_known:
            status.error = f"topic {purge.topic!r} was not deleted, as far as the table knows"
        else:
            names = await self._threads.run(partial(table.garbage, self._clock.now_ms(), 0))
            for begin in range(0, len(names), REMOVED_AT_ONCE):
                removed = names[begin : begin + REMOVED_AT_ONCE]
                await self._threads.run(partial(table.remove, removed))
                status.objects += len(removed)
            status.damaged = [f"{path}: {why}" for path, why in self._skipped.items() if why]
        self._purges.remove(purge)
        self._skipped.clear()
        purge.end()

    def _fail_purges(self, why: str) -> None:
        for purge in self._purges:
            purge.status.error = why
            purge.end()
        self._purges.clear()

    async def _purge(self, table: ColdTable, file: DataFile, deletions: Mapping[str, int]) -> int:
        """Rewrite *file* without the records before *deletions*; return how many these were."""
        if file.name is None:
            self._skip(file, "another program has written it")
            return 0
        try:
            made = await self._made(table, [file], Dropping(deletions))
        except (ObjectDamaged, ObjectMissing) as error:
            self._skip(file, str(error))
            return 0
        if not made.dropped:  # the deletion is not noted in the table yet, or it is of another topic
            self._skipped[file.path] = ""
            return 0
        await self._commit(table, [file], made, changes_data=True)
        logger.info("the cold tier has removed %d messages of deleted topics from %s", made.dropped, file.path)
        return made.dropped

    async def _commit(
        self, table: ColdTable, removed: Sequence[DataFile], made: Rewritten, *, changes_data: bool
    ) -> None:
        commit = partial(table.rewrite, removed, made.files, self._clock.now_ms(), changes_data=changes_data)
        await self._threads.run(commit)
        await self._facts.replaced(removed, made.files, made.footers)
        if not made.records and not made.dropped:
            return
        self.progress.rewritten_files += len(removed)
        self.progress.rewritten_bytes += sum(file.bytes for file in removed)
        self.progress.stored_bytes += sum(file.bytes for file in made.files)
        self.progress.dropped_records += made.dropped

    def _skip(self, file: DataFile, why: str) -> None:
        self.progress.unpurged_files += 1
        self._skipped[file.path] = why
        logger.error("file %r of the cold tier keeps messages of deleted topics: %s", file.path, why)

    async def _made(
        self, table: ColdTable, files: Sequence[DataFile], dropping: Dropping, *, keeps: bool = False
    ) -> Rewritten:
        if self._objects is None:
            self._objects = await self._threads.run(self._open_objects)
        self._number = max(self._number, table.rewrites) + 1
        name = new_name(table, files, self._number)
        now_ms = self._clock.now_ms
        return await self._finish(merge_files(self._objects, files, name, self._broker, dropping, now_ms, keeps=keeps))

    async def _finish(self, steps: Steps[T]) -> T:
        """Run *steps* to the end: requests to the store have a deadline of their own."""
        try:
            while True:
                outcome = await self._pace.run(_until_blocking(steps))
                if not isinstance(outcome, Blocking):
                    return outcome.value
                await self._threads.run(outcome)
        finally:
            steps.close()
            pa.default_memory_pool().release_unused()


class _Done(Struct, Generic[T]):
    value: T


def _until_blocking(steps: Steps[T]) -> "Steps[Blocking[Any] | _Done[T]]":
    """Return the next blocking work of *steps*, or their result."""
    while True:
        try:
            blocking = next(steps)
        except StopIteration as done:
            return _Done(done.value)
        if blocking is not None:
            return blocking  # type: ignore[no-any-return]
        yield


def new_name(table: ColdTable, files: Sequence[DataFile], number: int) -> DataName:
    """Return a name for what replaces *files* of *table*, which brokers have written, all of one date and kind.

    *number* is another one in each call of an owner of the table.
    """
    ranges = [(name.begin, name.end) for name in [file.name for file in files] if name is not None]
    begin, end = min(begin for begin, _ in ranges), max(end for _, end in ranges)
    name = files[0].name
    assert name is not None
    return structs.replace(name, epoch=table.epoch, begin=begin, end=end, rewrite=number, part=0)
