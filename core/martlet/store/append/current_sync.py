"""The sync under way, of which there is one at most, and those who wait for its end."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, final

import trio

from martlet.store.disk.files import Files, OpenFile
from martlet.store.disk.syncers import OffLoopSyncer, Syncer

__all__ = ["CurrentSync", "SyncWatcher"]


class _Begun(NamedTuple):
    """A sync under way: the log position that becomes durable, its start in s, and its files, which it needs open."""

    target: int
    began_s: float
    paths: list[str]
    directory: str
    opened: list[OpenFile]


class SyncWatcher(Protocol):
    """An event loop that calls functions when descriptors are readable."""

    def watch_call(self, fd: int, call: Callable[[], None]) -> None: ...

    def unwatch_call(self, fd: int) -> None: ...


@final
class CurrentSync:
    """Makes files durable, and calls *ended* after each sync with its target, its duration in s, and its error.

    The end of a sync is handled in the task that calls `finish_next`, or in a `SyncWatcher`, which needs no turn of
    trio's loop for it.
    """

    def __init__(self, files: Files, ended: Callable[[int, float, OSError | None], None]) -> None:
        self._files = files
        self._ended = ended
        self._syncer: Syncer = OffLoopSyncer(files.disk)
        self._begun: _Begun | None = None
        self._is_awaited = False  # whether a task is in `finish_next`
        self._scope: trio.CancelScope | None = None  # of that task
        self._watcher: SyncWatcher | None = None
        self._is_watched = False  # whether the watcher waits for the end
        self._end_event: trio.Event | None = None  # others wait for it

    @property
    def is_under_way(self) -> bool:
        """Whether a sync has begun and not ended."""
        return self._begun is not None

    @property
    def under_way(self) -> tuple[list[str], str]:
        """The files and the directory of the sync under way."""
        return (self._begun.paths, self._begun.directory) if self._begun is not None else ([], "")

    async def open(self) -> None:
        """Use the syncer of the disk, until `close`."""
        while self._begun is not None:  # by another syncer, for which another task waits
            await self.finish()
        self._syncer = self._files.disk.syncer()
        self._watch_results()

    async def close(self) -> None:
        """Finish the sync under way, and release the syncer of the disk."""
        self.unwatch()
        try:
            with trio.CancelScope(shield=True):
                while self._begun is not None:  # a task may begin the next one when this one ends
                    await self.finish()
        finally:
            self._syncer.close()
            self._syncer = OffLoopSyncer(self._files.disk)

    def begin(self, target: int, paths: list[str], directory: str) -> None:
        """Begin to sync *paths*, and then the names in *directory*, unless that is empty.

        Raises:
          OSError: a file cannot be opened; nothing has begun.
        """
        opened: list[OpenFile] = []
        try:
            opened.extend(map(self._files.take, paths))  # what it has opened before an error stays in `opened`
            self._syncer.begin([(each.fd, path) for each, path in zip(opened, paths, strict=True)], directory)
        except OSError:
            self._give(opened)
            raise
        self._begun = _Begun(target, trio.current_time(), paths, directory, opened)
        if self._scope is not None and not self._is_watched:
            self._scope.shield = True

    def _give(self, opened: list[OpenFile]) -> None:
        for each in opened:
            self._files.give(each)

    # its end

    async def finish(self) -> None:
        """Wait until the sync that has begun, if any, has ended."""
        begun = self._begun
        while begun is not None and self._begun is begun:
            if self._is_awaited or self._is_watched:
                if self._end_event is None:
                    self._end_event = trio.Event()
                await self._end_event.wait()
            else:
                # A cancelled fdatasync would go on in its thread, and its result would be lost.
                with trio.CancelScope(shield=True):
                    await self.finish_next()

    async def finish_next(self) -> None:
        """Wait until the sync that has begun, or the next one, has ended; or until `wake`.

        It is cancellable until a sync begins.
        """
        self._is_awaited = True
        try:
            with trio.CancelScope(shield=self._begun is not None and not self._is_watched) as self._scope:
                if self._is_watched:
                    await trio.sleep_forever()
                await self._syncer.finished()
        except trio.Cancelled:
            raise
        except BaseException:  # a bug, or a power cut in a test: nothing tells the end of this sync anymore
            self._begun = None
            raise
        finally:
            is_woken = self._scope is not None and self._scope.cancelled_caught
            self._is_awaited, self._scope = False, None
        if not is_woken:
            self._end()

    def _end(self) -> None:
        """Handle the end of the sync that has begun."""
        begun, self._begun = self._begun, None
        assert begun is not None, "a sync has ended that has not begun"
        self._give(begun.opened)
        failure: OSError | None = None
        try:
            self._syncer.take_result()
        except OSError as error:
            failure = error
        self._ended(begun.target, trio.current_time() - begun.began_s, failure)
        if self._end_event is not None:
            self._end_event.set()
            self._end_event = None

    def wake(self) -> None:
        """Let `finish_next` return soon: now, or when the sync ends for which it waits."""
        if self._begun is None or self._is_watched:
            self._wake_now()

    def _wake_now(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    # the watcher

    def watch(self, watcher: SyncWatcher) -> None:
        """Handle the ends of syncs in *watcher*, an event loop inside trio's, until `unwatch`."""
        self._watcher = watcher
        self._watch_results()

    def _watch_results(self) -> None:
        if self._watcher is not None and self._syncer.results_fd >= 0:
            self._is_watched = True
            self._watcher.watch_call(self._syncer.results_fd, self._end)
            self._wake_now()

    def unwatch(self) -> None:
        """Handle the ends of syncs in a trio task again."""
        if self._is_watched and self._watcher is not None:
            self._watcher.unwatch_call(self._syncer.results_fd)
            self._is_watched = False
            self._wake_now()
        self._watcher = None
