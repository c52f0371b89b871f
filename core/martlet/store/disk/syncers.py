"""Makes files durable without blocking the event loop.

One thread waits for requests in a pipe, because starting a worker thread for each fdatasync and getting its result can
cost more than the fdatasync. With the native kernel this thread does not need the interpreter's lock, so a busy event
loop does not delay it.
"""

import errno
import os
import struct
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Final, Protocol, final

import trio

from martlet.runtime.native import native

__all__ = ["OffLoopSyncer", "SyncThread", "Syncer", "serve_syncs"]

REQUEST: Final = struct.Struct("=i")  # a file descriptor, or the complement of a directory's
RESULT: Final = struct.Struct("=ii")  # errno, 0 for success; and how many were synced
# The capacity of a pipe: a request is written at once, and read at once. Processes have fewer descriptors than that.
REQUEST_BYTES: Final = 65536


class Syncer(Protocol):
    """Makes files durable, one request at a time."""

    def begin(self, files: Sequence[tuple[int, str]], directory: str) -> None:
        """Begin to sync *files*, descriptors and paths, and then the names in *directory*, unless that is empty."""
        ...

    async def finished(self) -> None:
        """Return when the current request, or the next one, is complete; then call `take_result`."""
        ...

    @property
    def results_fd(self) -> int:
        """A descriptor that is readable when a request is complete; -1 if there is only `finished`."""
        ...

    def take_result(self) -> None:
        """Take the result of the completed request.

        Raises:
          OSError: a file or the directory is not durable.
        """
        ...

    def close(self) -> None:
        """Release what the syncer holds; no request may be under way."""
        ...


class _Disk(Protocol):
    """What `OffLoopSyncer` needs of a `Disk`."""

    def sync(self, fd: int) -> None: ...

    def sync_directory(self, path: str) -> None: ...

    async def off_loop(self, work: Callable[[], None]) -> None: ...


@final
class OffLoopSyncer:
    """Syncs by `Disk.off_loop`, on any disk."""

    def __init__(self, disk: _Disk) -> None:
        self._disk = disk
        self._files: Sequence[tuple[int, str]] = ()
        self._directory = ""
        self._begun = trio.Event()
        self._failure: OSError | None = None

    def begin(self, files: Sequence[tuple[int, str]], directory: str) -> None:
        self._files, self._directory = files, directory
        self._begun.set()

    async def finished(self) -> None:
        await self._begun.wait()
        self._begun = trio.Event()
        try:
            await self._disk.off_loop(self._sync)
        except OSError as error:
            self._failure = error

    def _sync(self) -> None:
        for fd, path in self._files:
            try:
                self._disk.sync(fd)
            except OSError as error:
                raise _named(error.errno, path) from error
        if self._directory:
            self._disk.sync_directory(self._directory)

    @property
    def results_fd(self) -> int:
        return -1

    def take_result(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Do nothing: the disk does not belong to the syncer."""


@final
class SyncThread:
    """A thread that syncs files of the operating system."""

    def __init__(self) -> None:
        requests, self._requests = os.pipe()
        self._results, results = os.pipe()
        self._paths: list[str] = []
        self._directory_fd = -1
        self._thread = Thread(target=_serve, args=(requests, results), name="flusher", daemon=True)
        self._thread.start()

    def begin(self, files: Sequence[tuple[int, str]], directory: str) -> None:
        self._paths = [path for _, path in files]
        fds = [fd for fd, _ in files]
        if directory:
            self._directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            self._paths.append(directory)
            fds.append(~self._directory_fd)
        os.write(self._requests, b"".join(map(REQUEST.pack, fds)))

    async def finished(self) -> None:
        await trio.lowlevel.wait_readable(self._results)

    @property
    def results_fd(self) -> int:
        return self._results

    def take_result(self) -> None:
        code, synced = RESULT.unpack(os.read(self._results, RESULT.size))
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1
        if code:
            raise _named(code, self._paths[synced])

    def close(self) -> None:
        os.close(self._requests)
        self._thread.join()
        os.close(self._results)


def _named(code: int | None, path: str) -> OSError:
    return OSError(code, os.strerror(code or errno.EIO), path)


def _serve(requests: int, results: int) -> None:
    """Serve until the other end of *requests* is closed; closes this end of both pipes."""
    try:
        native(serve_syncs)(requests, results)
    finally:
        os.close(requests)
        os.close(results)


def serve_syncs(requests: int, results: int) -> None:
    """Sync the descriptors that come from the pipe *requests*, and write a `RESULT` for each request to *results*."""
    while request := os.read(requests, REQUEST_BYTES):
        synced = code = 0
        try:
            for (fd,) in REQUEST.iter_unpack(request):
                if fd >= 0:
                    os.fdatasync(fd)
                else:
                    os.fsync(~fd)
                synced += 1
        except OSError as error:
            code = error.errno or errno.EIO
        os.write(results, RESULT.pack(code, synced))
