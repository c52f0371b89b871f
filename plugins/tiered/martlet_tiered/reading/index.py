"""Where the messages of the cold tier are: which file, and which of its rows.

The index is a file in the data directory (`database.py`), and a cache: the list of files in the table is the truth. At
a start, and after another program has changed the table, both are compared: files that are gone are removed from the
index, and files that it lacks are indexed by their footers, the newest first. Until all are, `find` refuses what it
does not know, and the broker claims to have each message that its log has lost.

Memory: the first offset of each queue is part of the core's queue; here are the files of the table, about 300 bytes
each, and the last used spans.
"""

import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, TypeVar, final

import trio
from msgspec import structs

from martlet.errors import Reason, Refused, StoreFailed
from martlet.runtime.io_threads import IoThreads
from martlet.runtime.wakeup import Wakeup
from martlet.store import Store
from martlet.store.read.cold import NOTHING_COLD, may_be_cold
from martlet_tiered.errors import TierError
from martlet_tiered.files import DataFile
from martlet_tiered.format.footer import FileFooter, Span
from martlet_tiered.objects import Objects
from martlet_tiered.owners import Reach
from martlet_tiered.reading.database import IndexDatabase, IndexedFile
from martlet_tiered.reading.finder import SpanFinder
from martlet_tiered.reading.sqlite_file import IndexDamaged
from martlet_tiered.reading.table_files import TableFile, exact_spans, load_file, table_of

__all__ = ["FILE_NAME", "TierIndex", "identity_of", "newest_first", "one_error"]

logger = logging.getLogger("martlet.tiered")

T = TypeVar("T")

FILE_NAME: Final = "config/tiered.index"
# Time that a start waits for files that are not indexed yet; the others are indexed while the broker runs.
SYNC_S: Final = 10.0
# Files whose footers are read at the same time, fewer than the threads, which consumers need too.
AT_ONCE: Final = 4
# Pause after a failure of the store, and between log lines about progress or failures.
RETRY_S: Final = 5.0
LOG_S: Final = 30.0
# Queues to which the event loop tells their first offset at once.
QUEUES_AT_ONCE: Final = 500


def identity_of(url: str, broker: str) -> str:
    """Return what the index of the table of *broker* at *url* is named after."""
    return f"{url} {broker}"


@final
class TierIndex:
    """The index of the tier of *store* at *path*, which is of the table *identity*; *threads* read *objects*.

    `begin` comes first, and `run` indexes what is missing. `unindexed` is the number of files that are not indexed yet;
    `faults` has why files cannot be read, by their paths.
    """

    def __init__(self, store: Store, path: str, identity: str, objects: Objects, threads: IoThreads) -> None:
        self.faults: dict[str, str] = {}
        self._store = store
        self._objects = objects
        self._threads = threads
        self._database = IndexDatabase(path, identity)
        self._is_synced = False
        self._one_at_a_time = trio.Lock()
        self._table: dict[str, TableFile] = {}
        self._missing: dict[str, TableFile] = {}  # the newest first
        self._must_rebuild = False
        # Topics whose deletion the database does not know yet, each with the log position after it.
        self._deleted: list[tuple[str, int]] = []
        self.finder = SpanFinder(self._ask, lambda: self.is_complete, self._check_complete)
        self._adding = trio.Lock()
        self._comparing = trio.Lock()
        self._telling = trio.Lock()
        self._work = Wakeup()
        self._log_at = 0.0

    @property
    def unindexed(self) -> int:
        """The number of files that are not indexed yet."""
        return len(self._table) if self._must_rebuild else len(self._missing)

    @property
    def is_complete(self) -> bool:
        """Whether everything in the table is indexed."""
        return self._is_synced and not self.unindexed

    @property
    def files(self) -> int:
        """The number of files in the table."""
        return len(self._table)

    def has_file(self, path: str) -> bool:
        """Return whether the table has file *path*."""
        return path in self._table

    # ---- changes

    async def begin(self) -> None:
        """Open the index, and tell the store what the tier had when the broker stopped; then comes `sync`.

        Raises:
          OSError: the disk is full or fails.
        """
        await trio.to_thread.run_sync(self._database.open)
        if await self._ask(lambda database: database.has_deletions_after(self._store.appended)):
            logger.warning("the index of the cold tier knows deletions that the log has lost; rebuilding it")
            self._must_rebuild = True
        known = await self._ask(lambda database: database.files())
        self._table = {file.path: TableFile(file.path, file.bytes, file.start, file.end) for file in known}
        self._store.deletions.on_deleted.append(self._topic_deleted)
        await self._tell()

    async def run(self) -> None:
        """Check the index, and index what is missing, until cancelled."""
        with suppress(Refused):  # `_catch_up` tries again
            await self._ask(lambda database: database.check())
        while True:
            await self._catch_up()
            await self._work.wait()

    async def sync(self, files: Sequence[DataFile]) -> None:
        """Compare the index with the *files* of the table: after `begin`, and when another program has changed it.

        Waits some seconds for files that are not indexed yet; `run` indexes the others.
        """
        await self.sync_with(partial(_given, files))

    async def sync_with(self, read: Callable[[], Awaitable[Sequence[DataFile]]]) -> None:
        """As `sync`, with the files that *read* returns; the broker's own commits wait for it.

        Raises what *read* raises.
        """
        async with self._comparing:
            await self._compare(await read())
        try:
            with trio.move_on_after(SYNC_S):
                await self._index_missing()
        except (Refused, TierError) as error:
            self._log(logging.WARNING, "%d files of the cold tier are not indexed yet; %s", self.unindexed, error)
        await self._tell()

    async def _compare(self, files: Sequence[DataFile]) -> None:
        table = await trio.to_thread.run_sync(table_of, files, self._table)
        async with self._adding:
            # One question: nobody may ask between the removal and the new `_missing`.
            known, indexed = await self._ask(lambda database: _remove_others(database, table))
            if table and not known:
                logger.warning("the cold tier has no index; building it from %d files", len(table))
            self._table, self._is_synced = table, True
            self.faults.clear()
            self._set_missing(file for path, file in table.items() if path not in indexed)
            self.finder.forget()
        self._work.set()

    async def beginning(self, epoch: int, reach: Reach) -> None:
        """Do nothing: the index learns of a range when it is committed."""

    async def committed(self, files: Sequence[DataFile], footers: Sequence[FileFooter]) -> None:
        """Add *files* with their *footers*, which the broker has just committed.

        What fails is done later by `run`; until then, consumers are refused.
        """
        pairs = [(TableFile.of(file), footer) for file, footer in zip(files, footers, strict=True)]
        async with self._comparing:
            new = [file for file, _ in pairs if file.path not in self._table]
            self._table.update((file.path, file) for file in new)
            self._set_missing([*self._missing.values(), *new])
        try:
            for file, footer in sorted(pairs, key=lambda pair: newest_first(pair[0])):
                await self._add(await self._load(file, footer))
        except (Refused, TierError) as error:
            self._log(logging.WARNING, "%d files of the cold tier are not indexed yet; %s", self.unindexed, error)
            self._work.set()
        await self._tell()

    async def replaced(
        self, removed: Sequence[DataFile], added: Sequence[DataFile], footers: Sequence[FileFooter]
    ) -> None:
        """Note that *added* with these *footers* have replaced the files *removed* in the table, at once for readers.

        Raises:
          Refused: the disk or the store fails; the next `sync` compares the index with the table.
        """
        new = {file.path: TableFile.of(file) for file in added}
        # With the new ones: a reader may have listed the table after the commit.
        gone = {file.path for file in removed} | set(new)
        loaded = [await self._load(file, footer) for file, footer in zip(new.values(), footers, strict=True)]
        async with self._comparing, self._adding:
            exact: dict[str, int] = {}
            for at, file in enumerate(loaded):
                tangled = await self._ask(partial(IndexDatabase.tangled_files, file=file))
                others = {path: size for path, size in tangled.items() if path not in gone}
                if others:
                    exact |= others
                    loaded[at] = structs.replace(file, spans=await self._exact_spans(file.path, file.bytes))
            spans = [(path, await self._exact_spans(path, size)) for path, size in exact.items()]
            await self._ask(lambda database: database.replace(gone, loaded, spans))
            self._table = {path: file for path, file in self._table.items() if path not in gone} | new
            self._set_missing(file for path, file in self._missing.items() if path not in gone)
            self.finder.forget()
        await self._tell()

    async def files_of_deleted(self) -> tuple[list[str], dict[str, int]] | None:
        """Return the paths of files that have messages of deleted topics, and topics with the position of the deletion.

        Only deletions count that are noted in the table. None: not everything in the table is indexed yet.

        Raises:
          Refused: the disk fails, or the index is damaged and will be built again.
        """
        if not self.is_complete:
            return None
        return await self._ask(lambda database: database.deleted())

    def _set_missing(self, files: Iterable[TableFile]) -> None:
        self._missing = {file.path: file for file in sorted(files, key=newest_first)}

    def _topic_deleted(self, topic: str) -> None:
        self._deleted.append((topic, self._store.deletions.end))
        self.finder.forget()
        self._work.set()

    # ---- indexing

    async def _catch_up(self) -> None:
        """Index what is missing, and try again while the store is down."""
        while self._missing or self._must_rebuild or self._deleted:
            was_incomplete = bool(self.unindexed)
            try:
                await self._ask(lambda database: None)
                await self._index_missing()
            except (Refused, TierError, OSError) as error:
                self._log(logging.WARNING, "%d files of the cold tier are not indexed yet; %s", self.unindexed, error)
                await trio.sleep(RETRY_S)
            else:
                if was_incomplete and not self.unindexed:
                    logger.info("the index of the cold tier is complete: %d files", self.files)
                    await self._tell()

    async def _index_missing(self) -> None:
        while self._missing:
            batch = list(self._missing.values())[:AT_ONCE]
            loaded: dict[str, IndexedFile] = {}

            async def load(file: TableFile, into: dict[str, IndexedFile] = loaded) -> None:
                into[file.path] = await self._load(file, None)

            with one_error():
                async with trio.open_nursery() as nursery:
                    for file in batch:
                        nursery.start_soon(load, file)
            for file in batch:
                await self._add(loaded[file.path])
            self._log(logging.INFO, "indexing the cold tier: %d of %d files are left", self.unindexed, self.files)

    async def _load(self, file: TableFile, footer: FileFooter | None) -> IndexedFile:
        return await self._threads.run(partial(load_file, self._objects, file, footer))

    async def _add(self, file: IndexedFile) -> None:
        """Add *file*, unless it was added or removed in the meantime."""
        async with self._adding:
            if file.path not in self._missing:
                return
            tangled = await self._ask(lambda database: database.tangled_files(file))
            exact: list[tuple[str, list[Span]]] = []
            if tangled:
                exact = [(path, await self._exact_spans(path, size)) for path, size in tangled.items()]
                file = structs.replace(file, spans=await self._exact_spans(file.path, file.bytes))
            await self._ask(lambda database: database.add(file, exact))
            self._missing.pop(file.path, None)
            self.finder.forget()
        if file.fault:
            logger.error("a file of the cold tier cannot be read, and its messages are lost: %s", file.fault)
            self.faults[file.path] = file.fault

    async def _exact_spans(self, path: str, size: int) -> list[Span]:
        return await self._threads.run(partial(exact_spans, self._objects, path, size))

    # ---- what the store knows

    async def _tell(self) -> None:
        """Tell the store the first offset of each queue, in slices, after any call that began earlier."""
        async with self._telling:
            await self._tell_firsts()

    async def _tell_firsts(self) -> None:
        cold, queues = self._store.cold, self._store.queues
        if self._table:
            cold.from_position = min(file.start for file in self._table.values())
        rows = await self._ask(lambda database: database.first_offsets())
        firsts = {(topic, queue_id): first for topic, queue_id, first in rows}
        unknown = NOTHING_COLD if self.is_complete else 0
        lowest = 0 if self._misses_older() else NOTHING_COLD
        for number, queue in enumerate(list(queues.all())):
            if may_be_cold(queue.topic) and not queue.deleted:
                cold.keep(queue, min(firsts.get((queue.topic, queue.queue_id), unknown), lowest))
            if number % QUEUES_AT_ONCE == QUEUES_AT_ONCE - 1:
                await trio.lowlevel.checkpoint()

    def _misses_older(self) -> bool:
        """Return whether a queue may have messages before the first indexed one."""
        if not self._is_synced:
            return True
        missing = self._table if self._must_rebuild else self._missing
        indexed = [file.start for path, file in self._table.items() if path not in missing]
        return bool(missing) and min(file.start for file in missing.values()) < min(indexed, default=NOTHING_COLD)

    # ---- the database

    def _check_complete(self) -> None:
        if not self.is_complete:
            text = f"the index of the cold tier is being built, {self.unindexed} of {self.files} files are left"
            text = text if self._is_synced else "the cold tier has not read its table yet, because its store is down"
            raise Refused(Reason.BUSY, f"{text}; try again in a few seconds")

    def distrust(self, why: str) -> None:
        """Build the index again, because it contradicts a file."""
        if not self._must_rebuild:
            logger.error("the index of the cold tier is damaged (%s); rebuilding it from %d files", why, self.files)
            self._must_rebuild = True
            self.finder.forget()
            self._work.set()

    async def _ask(self, question: Callable[[IndexDatabase], T]) -> T:
        """Return the answer of the database, in a thread.

        Raises:
          Refused: the disk is full or fails, or the index is damaged and will be built again (BUSY).
        """
        database = self._database
        async with self._one_at_a_time:
            try:
                if self._must_rebuild:
                    await trio.to_thread.run_sync(database.clear)
                    self._must_rebuild = False
                    self._set_missing(self._table.values())
                await self._note_deleted(database)
                return await trio.to_thread.run_sync(question, database)
            except IndexDamaged as error:
                self.distrust(str(error))
                raise Refused(Reason.BUSY, "the index of the cold tier is damaged; it is being rebuilt") from error
            except OSError as error:
                raise Refused(Reason.BUSY, f"{error}; check the disk") from error

    async def _note_deleted(self, database: IndexDatabase) -> None:
        """Write deletions to the database before it answers anything, and after they are durable: they could be undone.

        Raises:
          OSError: the disk is full or fails.
        """
        while self._deleted:
            try:
                await self._store.deletions.wait_durable()
            except StoreFailed as error:
                raise OSError(str(error)) from error
            topic, position = self._deleted[0]
            await trio.to_thread.run_sync(database.delete_topic, topic, position)
            del self._deleted[0]

    def _log(self, level: int, text: str, *values: object) -> None:
        """Log *text*, unless something was logged lately."""
        now = trio.current_time()
        if now >= self._log_at:
            self._log_at = now + LOG_S
            logger.log(level, text, *values)


def newest_first(file: TableFile) -> tuple[int, bool, str]:
    """Return the order in which files are added: of one range, the internal one is first, with the deletions."""
    return -file.end, not file.is_internal, file.path


def _remove_others(database: IndexDatabase, table: Container[str]) -> tuple[int, set[str]]:
    """Remove files that are not in *table* or have a fault; return how many there were, and the paths of the others."""
    known = database.files()
    gone = {file.path for file in known if file.fault or file.path not in table}
    database.remove(gone)
    return len(known), {file.path for file in known} - gone


async def _given(files: Sequence[DataFile]) -> Sequence[DataFile]:
    return files


@contextmanager
def one_error() -> Iterator[None]:
    """Raise the first error of a nursery itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
