"""Reads of the store of objects that all consumers share: metadata of files, blocks, positions and keys, each cached.

Reads are done by threads, with a deadline. What is damaged or lost is reported once, and not read again for a while.
"""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar, final

import numpy as np
import trio
from msgspec import Struct

from martlet.errors import MartletError, Reason, Refused
from martlet.runtime.io_threads import IoThreads
from martlet_columns.records import Integers
from martlet_tiered.errors import ObjectDamaged, ObjectMissing, TierError
from martlet_tiered.failures import TRANSIENT
from martlet_tiered.format.keys import FileKeys, decode_keys, keys_name
from martlet_tiered.objects import Objects
from martlet_tiered.reading.blocks import Block, load_block
from martlet_tiered.reading.cache import SharedCache
from martlet_tiered.reading.row_groups import ParquetObject, open_parquet, read_columns

__all__ = ["FileGone", "StoreReads", "StoreReadsStatistics"]

logger = logging.getLogger("martlet.tiered")

T = TypeVar("T")

# Memory for what tells where records are in files, beside the cache of blocks.
METADATA_BYTES_MAX: Final = 16 << 20
LOOK_UP_BYTES_MAX: Final = 16 << 20
# Something damaged or lost is read again after this time: somebody may have restored it.
DAMAGED_S: Final = 60.0
DAMAGED_MAX: Final = 10_000
# Parts of a file that can be damaged, beside its row groups, which have their numbers.
LOST: Final = -1
METADATA: Final = -2
POSITIONS: Final = -3
KEYS: Final = -4


@final
class FileGone(MartletError):
    """The store has no file *path* any more: another program may have replaced it in the table, or it is lost."""

    def __init__(self, path: str) -> None:
        super().__init__(f"cold file {path!r} is gone")
        self.path = path


class StoreReadsStatistics(Struct):
    """Counters since the start: reads of row groups from the store and from memory, and what was damaged.

    `damaged` counts row groups, files and indexes of keys that cannot be read, and `damaged_records` records in row
    groups that can.
    """

    block_reads: int
    block_hits: int
    block_bytes: int
    metadata_reads: int
    damaged: int
    damaged_records: int
    hanging: int


@final
class StoreReads:
    """Reads *objects* with *threads*; blocks of up to *cache_bytes* stay in memory."""

    def __init__(self, objects: Objects, threads: IoThreads, cache_bytes: int) -> None:
        self.damaged = 0
        self.damaged_records = 0
        self._objects = objects
        self._threads = threads
        self._blocks: SharedCache[tuple[str, int], Block] = SharedCache(cache_bytes, lambda block: block.memory_bytes)
        self._files: SharedCache[str, ParquetObject] = SharedCache(METADATA_BYTES_MAX, lambda file: file.memory_bytes)
        self._positions: SharedCache[str, Integers] = SharedCache(LOOK_UP_BYTES_MAX, lambda each: int(each.nbytes))
        self._keys: SharedCache[str, FileKeys] = SharedCache(LOOK_UP_BYTES_MAX, lambda keys: 12 * len(keys) + 100)
        self._damaged_until: dict[tuple[str, int], float] = {}

    async def file(self, path: str, size: int) -> ParquetObject | None:
        """Return the metadata of a data file; None if it is damaged, or lost (`note_lost`).

        Raises:
          Refused: the store did not answer.
          FileGone: the store does not have it; this is so for each of its parts.
        """
        read = partial(self._run, partial(open_parquet, self._objects, path, size))
        return await self._intact((path, METADATA), partial(self._files.get, path, read))

    def has_block(self, file: ParquetObject, number: int) -> bool:
        """Return whether block *number* of *file* is in memory, or being read."""
        return self._blocks.has((file.path, number))

    def block_now(self, path: str, number: int) -> Block | None:
        """Return a block of file *path* if it is in memory."""
        return self._blocks.find((path, number))

    async def block(self, file: ParquetObject, number: int) -> Block | None:
        """Return the records of range *number* of *file*; None if it is damaged or lost.

        Raises:
          Refused, FileGone: as `file`.
        """
        key = file.path, number
        return await self._intact(key, partial(self._blocks.get, key, partial(self._read_block, file, number)))

    async def positions(self, file: ParquetObject) -> "Integers | None":
        """Return the log position of each row of *file*; None if they are damaged or lost.

        Raises:
          Refused, FileGone: as `file`.
        """
        read = partial(self._run, partial(_read_positions, self._objects, file))
        return await self._intact((file.path, POSITIONS), partial(self._positions.get, file.path, read))

    async def keys(self, path: str) -> FileKeys | None:
        """Return the keys of file *path*; None if they are damaged or lost, as with files of other programs.

        Raises:
          Refused: the store did not answer.
        """
        read = partial(self._run, partial(_read_keys, self._objects, path))
        return await self._intact((path, KEYS), partial(self._keys.get, path, read), is_expected=True)

    def is_lost(self, path: str) -> bool:
        """Return whether file *path* was lost a short time ago."""
        return self._damaged_until.get((path, LOST), 0.0) > trio.current_time()

    def note_lost(self, path: str) -> None:
        """Note that the table has file *path*, and the store does not."""
        self._note_damage((path, LOST), f"cold file {path!r} is lost")

    def statistics(self) -> StoreReadsStatistics:
        """Return the current counters."""
        return StoreReadsStatistics(
            *(self._blocks.reads, self._blocks.hits, self._blocks.bytes, self._files.reads),
            *(self.damaged, self.damaged_records, self._threads.abandoned),
        )

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of *work*, done by one of the threads.

        Raises:
          Refused: it takes too long.
        """
        return await self._threads.run(work)

    async def _read_block(self, file: ParquetObject, number: int) -> Block:
        block = await self._run(partial(load_block, self._objects, file, file.ranges[number]))
        if block.damaged:
            self.damaged_records += block.damaged
            logger.error("%d records of row group %d of cold file %r are damaged", block.damaged, number, file.path)
        return block

    async def _intact(
        self, key: tuple[str, int], read: Callable[[], Awaitable[T]], *, is_expected: bool = False
    ) -> T | None:
        """Return what *read* returns; None if it is damaged or lost, or missing, which must be *is_expected*."""
        if self._damaged_until.get(key, 0.0) > trio.current_time() or (self.is_lost(key[0]) and not is_expected):
            return None
        try:
            return await read()
        except ObjectMissing as error:
            if not is_expected:
                raise FileGone(key[0]) from error
            self._note_damage(key, "")
        except ObjectDamaged as error:
            self._note_damage(key, str(error))
        return None

    def _note_damage(self, key: tuple[str, int], text: str) -> None:
        """Note that *key* is damaged, and log *text*, once, unless it is empty."""
        if text and key not in self._damaged_until:
            self.damaged += 1
            logger.error("old messages are damaged or lost: %s", text)
        if len(self._damaged_until) >= DAMAGED_MAX:
            self._damaged_until.clear()
        self._damaged_until[key] = trio.current_time() + DAMAGED_S

    async def _run(self, work: Callable[[], T]) -> T:
        """Return the result of *work* in a thread.

        Raises:
          ObjectMissing, ObjectDamaged: as *work*.
          Refused: the store did not answer (BUSY), or refuses access.
        """
        try:
            return await self._threads.run(work)
        except (ObjectMissing, ObjectDamaged):
            raise
        except TierError as error:
            reason = Reason.BUSY if isinstance(error, TRANSIENT) else Reason.UNAVAILABLE
            raise Refused(reason, f"old messages cannot be read; {error}") from error


def _read_positions(objects: Objects, file: ParquetObject) -> Integers:
    return np.asarray(read_columns(objects, file, ("_position",)).column(0).combine_chunks())


def _read_keys(objects: Objects, path: str) -> FileKeys:
    return decode_keys(objects.read(keys_name(path)))
