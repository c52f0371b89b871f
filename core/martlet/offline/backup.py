"""A copy of a data directory, which a broker may be using; the copy is then started, completed and verified.

The order makes the copy consistent, without contact to the broker: files that refer to records of the log are copied
before the end of the log is looked up. First the checkpoint, then the files that it names: journal and consume queues.
Then tables and snapshots, which are never ahead of the durable log. Then the log, up to the end of the last whole
record. So the copy equals the directory of a killed broker, and the code of a start turns it into a store that was
stopped in order. The key index is not copied, because a running broker changes it everywhere; it is rebuilt from the
log.

If retention removes a segment before it was copied, the copy begins again: projections append again the state that they
need of it, after the end that was looked up.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Final, final

import trio
from msgspec import Struct, field

from martlet.app.config import Config
from martlet.errors import StoreError
from martlet.offline.directory import Finding, Report, repair, verify
from martlet.store.disk.checkpoint import NO_JOURNAL, parse_checkpoint
from martlet.store.disk.files import Disk, Files, read_file
from martlet.store.disk.segments import Segments, numbered_names
from martlet.store.queues.queues import queue_ids
from martlet.store.recovery.inspect import Damage, Inspection, LogWalk, require_log

__all__ = ["Backup", "backup", "remove_tree"]

CHUNK_BYTES: Final = 1 << 20
OPEN_FILES: Final = 8
# Attempts, while retention removes segments or checkpoints come in between.
TRIES: Final = 10
PAUSE_S: Final = 0.2


class Backup(Struct):
    """The files that were copied; ``findings`` are damages that the original has as well, and is empty otherwise."""

    inspection: Inspection
    copied_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)


class _Moved(Exception):
    """A file was removed by the broker before it was copied."""


async def backup(
    directory: str,
    config: Config,
    disk: Disk,
    copying: Report | None = None,
    starting: Report | None = None,
    indexing: Report | None = None,
    trying: Report | None = None,
    reading: Report | None = None,
    *,
    target: str,
) -> Backup:
    """Copy the data directory *directory* to the empty directory *target*, and complete and verify the copy.

    Args:
      copying: called from time to time with bytes done and total bytes.
      starting, indexing, trying, reading: as in `repair` and `verify`, which work on the copy.

    Raises:
      StoreError: there is no log, *target* is not empty or inside of *directory*, or the broker removes segments faster
        than they can be copied.
      OSError: a file cannot be read or written; the copy is useless.
    """
    require_log(directory, disk)
    if f"{target}/".startswith(f"{directory}/"):
        raise StoreError(f"backup {target!r} is inside of the data directory; choose another place")
    copy = _Copy(directory, target, disk, copying)
    for _ in range(TRIES):
        if disk.names(target):
            raise StoreError(f"directory {target!r} is not empty; choose another one, or remove it")
        try:
            await copy.make()
            break
        except _Moved:
            copy.remove()
    else:
        raise StoreError(
            f"retention removed segments of {directory!r} faster than they could be copied; free some space first"
        )
    await repair(target, config, disk, starting, indexing)
    verification = await verify(target, config, disk, trying, reading)
    return Backup(verification.inspection, copy.copied, verification.findings)


@final
class _Copy:
    """One copy, which may be made several times."""

    def __init__(self, source: str, target: str, disk: Disk, report: Report | None) -> None:
        self._source = source
        self._target = target
        self._disk = disk
        self._report = report
        self._total = 0
        self.copied = 0

    async def make(self) -> None:
        """Copy everything.

        Raises:
          _Moved: a segment was removed meanwhile.
        """
        disk = self._disk
        self.copied, self._total = 0, 0
        disk.make_directory(self._target)
        begin = await self._copy_checkpoint()
        for path in self._queue_files():
            with suppress(FileNotFoundError):  # the topic was deleted, or retention removed the file: the log says so
                await self._copy(path)
        for name in self._table_names():
            await self._copy_table(name)
        if "abort" in disk.names(self._source):
            with suppress(FileNotFoundError):
                await self._copy("abort")
        await self._copy_log(begin)
        disk.sync_everything(self._target)

    def remove(self) -> None:
        """Remove the copied files."""
        remove_tree(self._disk, self._target)

    async def _copy_checkpoint(self) -> int:
        """Copy the checkpoint and the journal that it names; return the log position up to which they are complete."""
        disk = self._disk
        for _ in range(TRIES):
            page = read_file(disk, f"{self._source}/checkpoint")
            checkpoint = parse_checkpoint(page)
            if page is None or checkpoint is None:
                return -1
            try:
                if checkpoint.journal_generation != NO_JOURNAL:
                    await self._copy(f"queues.{checkpoint.journal_generation:010d}")
            except FileNotFoundError:
                continue  # a newer checkpoint has begun another one
            self._write("checkpoint", page)
            return checkpoint.position
        return -1  # without them the start reads the whole log

    def _queue_files(self) -> Iterator[str]:
        disk, folder = self._disk, f"{self._source}/consumequeue"
        for topic in disk.names(folder):
            for queue_id in queue_ids(disk.names(f"{folder}/{topic}")):
                for start in numbered_names(disk.names(f"{folder}/{topic}/{queue_id}")):
                    yield f"consumequeue/{topic}/{queue_id}/{start:020d}"

    def _table_names(self) -> list[str]:
        names = self._disk.names(f"{self._source}/config")
        return sorted({name.removesuffix(".tmp") for name in names})

    async def _copy_table(self, name: str) -> None:
        """Copy a file of ``config/``, which the broker may replace meanwhile: between renames it has no name."""
        for _ in range(TRIES):
            for generation in (name, f"{name}.tmp"):
                data = read_file(self._disk, f"{self._source}/config/{generation}")
                if data is not None and (generation == name or data):
                    self._write(f"config/{name}", data)
                    return
            await trio.sleep(PAUSE_S / TRIES)

    # ---- the log

    async def _copy_log(self, begin: int) -> None:
        """Copy the log up to its end, which is looked up from position *begin* on (-1: from the last segment)."""
        files = Files(self._disk, OPEN_FILES, read_only=True)
        try:
            segments = Segments(files, f"{self._source}/commitlog", 0)
            segments.load()
            if not segments.items:
                self._disk.make_directory(f"{self._target}/commitlog")
                return
            last_start = segments.items[-1].start
            begin = max(begin if begin >= 0 else last_start, segments.start)
            try:
                end = _walk(segments, begin).log_end
            except FileNotFoundError as error:
                raise _Moved from error
            # A commit whose end was seen may still be in progress; its other bytes follow soon.
            await trio.sleep(PAUSE_S)
            segments_to_copy = [segment for segment in segments.items if segment.start <= end]
            self._total = end - segments.start
            for segment in segments_to_copy:
                try:
                    await self._copy(f"commitlog/{segment.start:020d}", max(end - segment.start, 0))
                except FileNotFoundError as error:
                    raise _Moved from error
        finally:
            files.close()
        self._copy_damage_again(begin)

    def _copy_damage_again(self, begin: int) -> None:
        """Copy again the log from *begin*, which was not written yet when it was copied, and so looks damaged."""
        files = Files(self._disk, OPEN_FILES, read_only=True)
        try:
            segments = Segments(files, f"{self._target}/commitlog", 0)
            segments.load()
            for damage in _walk(segments, begin).damage:
                self._copy_range(segments, damage)
        finally:
            files.close()

    def _copy_range(self, segments: Segments, damage: Damage) -> None:
        """Copy again the bytes of *damage*, a range in *segments* of the copy."""
        segment = segments.find(damage.start)
        if segment is None:
            return
        path, at = f"commitlog/{segment.start:020d}", damage.start - segment.start
        size = min(damage.end, segment.end) - damage.start
        source = self._disk.open(f"{self._source}/{path}", read_only=True)
        target = self._disk.open(f"{self._target}/{path}")
        try:
            self._disk.write(target, self._disk.read(source, size, at), at)
            self._disk.sync(target)
        finally:
            self._disk.close(source)
            self._disk.close(target)

    # ---- files

    async def _copy(self, path: str, limit: int | None = None) -> None:
        """Copy the file at *path*, with its holes; from *limit* on the copy has zeros."""
        disk = self._disk
        source = disk.open(f"{self._source}/{path}", read_only=True)
        try:
            size = disk.size(source)
            end = size if limit is None else min(size, limit)
            disk.make_directory(f"{self._target}/{path}".rpartition("/")[0])
            target = disk.open(f"{self._target}/{path}", create=True)
            try:
                disk.truncate(target, size)
                at = disk.next_data(source, 0)
                while at < end:
                    data = disk.read(source, min(CHUNK_BYTES, end - at), at)
                    if not data:
                        break
                    if data.count(0) < len(data):
                        disk.write(target, data, at)
                    at += len(data)
                    self._count_copied(len(data))
                    await trio.lowlevel.checkpoint()
                    at = disk.next_data(source, at)
                disk.sync(target)
            finally:
                disk.close(target)
        finally:
            disk.close(source)

    def _write(self, path: str, data: bytes) -> None:
        disk = self._disk
        disk.make_directory(f"{self._target}/{path}".rpartition("/")[0])
        target = disk.open(f"{self._target}/{path}", create=True)
        try:
            disk.write(target, data, 0)
            disk.sync(target)
        finally:
            disk.close(target)
        self._count_copied(len(data))

    def _count_copied(self, size: int) -> None:
        self.copied += size
        if self._report is not None:
            self._report(self.copied, max(self._total, self.copied), 0)


def _walk(segments: Segments, begin: int) -> Inspection:
    """Return the inspection of the log from *begin* on."""
    walk = LogWalk(segments, bodies=True)
    walk.run(None, begin)
    return walk.found


def remove_tree(disk: Disk, directory: str) -> None:
    """Remove *directory* and its content."""
    for name in disk.names(directory):
        path = f"{directory}/{name}"
        if disk.path_size(path) >= 0:
            disk.unlink(path)
        else:
            remove_tree(disk, path)
    disk.remove_directory(directory)
