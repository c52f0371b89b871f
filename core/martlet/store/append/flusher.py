"""Group commit: one fdatasync for all requests that wait.

While one fdatasync runs in a thread (`syncers.py`), later appends wait for the next. Records that nobody waits for
become durable together with later records. A failed write or fdatasync stops the store permanently: the kernel may have
dropped the pages that it could not write, and the next fsync would report success.
"""

from collections.abc import Callable
from typing import final

import trio

from martlet.errors import StoreFailed
from martlet.store.append.current_sync import CurrentSync
from martlet.store.disk.files import Files
from martlet.store.disk.page_cache import LogWriter
from martlet.store.disk.segments import Segment

__all__ = ["Flusher"]


def _do_nothing() -> None:
    """Do nothing: no committer has the flusher yet."""


@final
class Flusher:
    """Flushes written data to disk; everything before the log position ``durable`` is durable.

    ``on_moved`` is called after ``durable`` moved, and once when the store failed. With *is_sync* a record is flushed
    when it is durable, else once it is written.
    """

    def __init__(self, files: Files, tail: LogWriter, directory: str, *, is_sync: bool) -> None:
        self.files = files
        self.tail = tail
        self.directory = directory
        self.is_sync = is_sync
        self.on_moved: Callable[[], None] = _do_nothing
        self.durable = 0
        self.failed: StoreFailed | None = None
        self.fsyncs = 0
        self.fsync_seconds = 0.0
        self.fsync_seconds_max = 0.0
        # Each is called with a segment once it is complete and durable: no more records are added to it.
        self.on_sealed: list[Callable[[Segment], None]] = []
        # Segments that are complete, but not yet durable.
        self._full_segments: list[Segment] = []
        self._dirty: set[str] = set()
        self._new_directory = False
        # Log position before which written data must be flushed at once; the rest is flushed within the interval of
        # `run_late`.
        self.wanted = 0
        self._asked = trio.Event()
        self._later = trio.Event()
        self._moved = trio.Event()
        self.sync = CurrentSync(files, self._sync_ended)
        self._begins_at_once = False  # whether `run` does not wait for `_asked`

    def rolled(self, path: str) -> None:
        """Note that *path*, which was the last segment until now, has data that is not durable."""
        self._dirty.add(path)

    def began_after(self, full: Segment) -> None:
        """Note that a segment began, whose name is new in the directory of the log, after *full* if that has a path."""
        self._new_directory = True
        if full.path:
            self._full_segments.append(full)

    def ask(self) -> None:
        """Request a flush by `run` of everything written; does not wait."""
        if self.tail.written > self.wanted:
            self.wanted = self.tail.written
        if not self._begins_at_once:
            self._asked.set()
        else:
            self._begin()

    def want(self, position: int) -> None:
        """Request a flush unless a requested one covers everything before *position*; does not wait."""
        if position > self.wanted:
            self.wanted = position
            self.ask()

    def ask_later(self) -> None:
        """Request a flush within the interval of `run_late`; does not wait."""
        self._later.set()

    def fail(self, error: OSError) -> StoreFailed:
        """Stop permanently because of *error*; everyone who waits gets the same `StoreFailed`."""
        if self.failed is None:
            self.failed = StoreFailed(f"the disk failed: {error}; the store accepts no more writes until a restart")
            self.failed.__cause__ = error
            self._announce()
            self._asked.set()  # so that `run` ends
            self.sync.wake()
        return self.failed

    def _announce(self) -> None:
        event, self._moved = self._moved, trio.Event()
        event.set()
        self.on_moved()

    async def wait_durable(self, position: int) -> None:
        """Return once everything before *position* is durable.

        Raises:
          StoreFailed: the disk failed, so it will never be durable.
        """
        while self.durable < position:
            if self.failed is not None:
                raise self.failed
            self.wanted = max(self.wanted, position)
            self.ask()
            await self._moved.wait()

    def want_durable(self, position: int) -> None:
        """With sync flush, request that everything before *position* is soon durable; does not wait."""
        if self.is_sync and self.durable < position:
            self.want(min(position, self.tail.position))

    async def wait_flushed(self, position: int) -> None:
        """Return once everything before *position* is durable (sync) or written (async); immediately if it is.

        Raises:
          StoreFailed: the disk failed, so that will never happen.
        """
        if self.is_sync:
            if self.durable < position:
                await self.wait_durable(position)
        elif self.tail.written < position:
            if self.failed is not None:
                raise self.failed
            raise RuntimeError(f"position {position} was not committed; call commit() before waiting")

    async def run(self, interval_seconds: float) -> None:
        """Flush on request; at most once every *interval_seconds* if that is not 0."""
        await self.sync.open()
        self._begins_at_once = not interval_seconds
        if self._begins_at_once and self.wanted > self.durable:
            self._begin()
        try:
            while self.failed is None:
                if interval_seconds:
                    await self._asked.wait()
                    await trio.sleep(interval_seconds)
                    self._asked = trio.Event()
                    await self.flush()
                else:
                    await self.sync.finish_next()
        finally:
            self._begins_at_once = False
            await self.sync.close()
        raise self.failed

    async def run_late(self, interval_seconds: float) -> None:
        """Request a flush *interval_seconds* after `ask_later`, if something is not durable by then."""
        while True:
            await self._later.wait()
            await trio.sleep(interval_seconds)
            self._later = trio.Event()
            if self.durable < self.tail.written:
                self.ask()

    async def flush(self) -> None:
        """Make all earlier writes durable without blocking the event loop; do nothing after a failure."""
        while self.sync.is_under_way and self.failed is None:  # it may not include the newest writes
            await self.sync.finish()
        if self._begin():
            await self.sync.finish()
        else:
            await trio.lowlevel.checkpoint()

    def flush_now(self) -> None:
        """Like `flush`, but blocking.

        Raises:
          StoreFailed: the disk failed, now or earlier.
        """
        if self.failed is not None:
            raise self.failed
        if self.durable >= self.tail.written:
            return
        begun_paths, begun_directory = self.sync.under_way
        target, (paths, directory) = self.tail.written, self._take_unsynced()
        try:
            for path in sorted({*begun_paths, *paths}):
                self.files.sync(path)
            if directory or begun_directory:
                self.files.disk.sync_directory(self.directory)
        except OSError as error:
            raise self.fail(error) from error
        self._note_durable(target, 0.0)

    def _begin(self) -> bool:
        """Begin to make everything written durable; return False if there is nothing to do, or a sync is under way."""
        if self.failed is not None or self.sync.is_under_way or self.durable >= self.tail.written:
            return False
        target, (paths, directory) = self.tail.written, self._take_unsynced()
        try:
            self.sync.begin(target, paths, directory)
        except OSError as error:
            self.fail(error)
            return False
        return True

    def _sync_ended(self, target: int, seconds: float, failure: OSError | None) -> None:
        if failure is not None:
            self.fail(failure)
        elif target > self.durable:
            self._note_durable(target, seconds)
        elif self.wanted > self.durable:  # `flush_now` was faster, and more was written meanwhile
            self.ask()

    def _take_unsynced(self) -> tuple[list[str], str]:
        """Return the files to sync, and the directory if its names are to be synced too; they count as synced then."""
        segment = self.tail.segment
        if self.tail.written > segment.start:
            self._dirty.add(segment.path)
        work = sorted(self._dirty), self.directory if self._new_directory else ""
        self._dirty.clear()
        self._new_directory = False
        return work

    def _note_durable(self, target: int, seconds: float) -> None:
        """Note that everything before *target* is durable; wake everyone who waits, and request the next flush."""
        self.durable = target
        self.fsyncs += 1
        self.fsync_seconds += seconds
        self.fsync_seconds_max = max(self.fsync_seconds_max, seconds)
        while self._full_segments and self._full_segments[0].end <= target:
            segment = self._full_segments.pop(0)
            for callback in self.on_sealed:
                callback(segment)
        self._announce()
        if self.wanted > target:
            self.ask()
        elif self.tail.written > target:
            self.ask_later()
