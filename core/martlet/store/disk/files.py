"""All disk access: no other module of Martlet's core opens files of the store (`syncers.py` opens directories).

A `Disk` is a table of blocking calls on paths and descriptors: `RealDisk` is the operating system,
`martlet.testing.disk.FakeDisk` loses everything that was not synced. Files are read and written by position and never
mapped: an I/O error on a mapped page kills the process, and mapped pages count as its memory.
"""

import ctypes
import errno
import fcntl
import os
import stat
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Final, Protocol, TypeVar, final

import trio

from martlet.errors import MartletError, StoreLocked
from martlet.runtime.native import native
from martlet.store.disk.syncers import Syncer, SyncThread

__all__ = ["Disk", "Files", "OpenFile", "RealDisk", "Usage", "atomic_write", "read_generation", "uncleared"]

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview

FULL_ERRORS: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
FILE_MODE: Final = 0o640  # of new files
# None where the C library has no preadv2: musl before 1.2.5.
READ_NOWAIT: Final[int | None] = getattr(os, "RWF_NOWAIT", None)


def is_full(error: OSError) -> bool:
    """Return whether *error* reports lack of space, which may be temporary."""
    return error.errno in FULL_ERRORS


@final
class Usage:
    """Space on the file system."""

    def __init__(self, total_bytes: int, free_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = free_bytes

    @property
    def ratio(self) -> float:
        """The used fraction, 0 to 1."""
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0


class Disk(Protocol):
    """The operating system's calls that the store uses; all except `off_loop` block and raise OSError."""

    def open(self, path: str, *, create: bool = False, read_only: bool = False, mode: int = FILE_MODE) -> int:
        """Return a descriptor. FileNotFoundError if the file is missing; with *create* FileExistsError if it exists.

        *mode* is who may open a created file, as in ``chmod``.
        """
        ...

    def close(self, fd: int) -> None: ...

    def size(self, fd: int) -> int: ...

    def read(self, fd: int, size: int, position: int) -> bytes:
        """Return up to *size* bytes; fewer only at the end of the file."""
        ...

    def read_now(self, fd: int, size: int, position: int) -> bytes | bytearray | None:
        """Return *size* bytes, fewer only at the end of the file; None if the read would wait for the disk."""
        ...

    def write(self, fd: int, data: Bytes, position: int) -> None:
        """Write all of *data*, or raise, possibly after writing a part."""
        ...

    def path_size(self, path: str) -> int:
        """Return the size of the file *path*, including holes; -1 if there is no such file."""
        ...

    def stamp(self, path: str) -> tuple[int, ...] | None:
        """Return numbers that change when the file *path* is written or replaced; None if there is no such file."""
        ...

    def truncate(self, fd: int, size: int) -> None:
        """Shorten the file, or lengthen it with zeros that take no space."""
        ...

    def sync(self, fd: int) -> None:
        """Return after data and size are on the disk."""
        ...

    def next_data(self, fd: int, position: int) -> int:
        """Return the first position from *position* on that may contain nonzero bytes; the size if there is none."""
        ...

    def sync_directory(self, path: str) -> None:
        """Return after the names in *path* are on the disk."""
        ...

    def sync_everything(self, path: str) -> None:
        """Return after all data and names of the file system of *path* are on the disk."""
        ...

    def make_directory(self, path: str) -> None:
        """Create *path* and missing parents; do nothing if it exists."""
        ...

    def names(self, path: str) -> list[str]:
        """Return the sorted names in directory *path*; an empty list if there is no such directory."""
        ...

    def rename(self, source: str, target: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def remove_directory(self, path: str) -> None: ...

    def lock(self, path: str) -> int:
        """Lock *path* exclusively and return its descriptor; closing the descriptor unlocks it. Raises StoreLocked."""
        ...

    def usage(self, path: str) -> Usage: ...

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run blocking *work* without stopping the event loop; not cancellable."""
        ...

    def syncer(self) -> Syncer:
        """Return a syncer for files of this disk; the caller closes it."""
        ...


# struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK: Final = struct.Struct("hhqqi4x")


def uncleared(size: int) -> bytearray:
    """Return *size* bytes of any content, which the caller overwrites or removes.

    The native kernel has a function with the same name, which saves clearing them: a fifth of the time of a read from
    the page cache. See `martlet.runtime.native`.
    """
    return bytearray(size)


@final
class RealDisk:
    """The real file system."""

    def __init__(self) -> None:
        self._uncleared = native(uncleared)

    def open(self, path: str, *, create: bool = False, read_only: bool = False, mode: int = FILE_MODE) -> int:
        if create:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        return os.open(path, os.O_RDONLY if read_only else os.O_RDWR)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def read(self, fd: int, size: int, position: int) -> bytes:
        data = os.pread(fd, size, position)
        if len(data) == size or not data:
            return data
        parts = [data]
        got = len(data)
        while got < size and (data := os.pread(fd, size - got, position + got)):
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def read_now(self, fd: int, size: int, position: int) -> bytes | bytearray | None:
        if READ_NOWAIT is None:
            return None
        data = self._uncleared(size)
        try:
            got = os.preadv(fd, [data], position, READ_NOWAIT)
        except OSError:
            # The data is not in the page cache (EAGAIN), or this file system cannot tell (EOPNOTSUPP); `read` reports
            # errors.
            return None
        if got < size:
            if position + got < os.fstat(fd).st_size:
                return None
            del data[got:]
        return data

    def write(self, fd: int, data: Bytes, position: int) -> None:
        done = os.pwrite(fd, data, position)
        size = len(data)
        while done < size:
            done += os.pwrite(fd, memoryview(data)[done:], position + done)

    def path_size(self, path: str) -> int:
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return -1
        return status.st_size if stat.S_ISREG(status.st_mode) else -1

    def stamp(self, path: str) -> tuple[int, ...] | None:
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def next_data(self, fd: int, position: int) -> int:
        try:
            return os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            size = os.fstat(fd).st_size
            # ENXIO: only a hole follows. Any other error: the file system does not report holes.
            return size if error.errno == errno.ENXIO else _skip_zeros(fd, position, size)

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as error:
            name_path(error, path)
            raise
        finally:
            os.close(fd)

    def sync_everything(self, path: str) -> None:
        # Linux reports a failed write-back here since 5.8; os.sync never does.
        libc = ctypes.CDLL(None, use_errno=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if libc.syncfs(fd) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), path)
        finally:
            os.close(fd)

    def make_directory(self, path: str) -> None:
        os.makedirs(path, 0o750, exist_ok=True)

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def lock(self, path: str) -> int:
        # Locks the first byte, as RocketMQ does (BrokerStartup, store/lock), so each broker refuses to start while the
        # other runs. The lock belongs to the open file description, so it also excludes a second opener in this
        # process.
        fd = os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 1, 0))
        except OSError as error:
            os.close(fd)
            raise StoreLocked(f"{path} is locked by another process ({error.strerror})") from error
        return fd

    def usage(self, path: str) -> Usage:
        status = os.statvfs(path)
        # Space reserved for root counts as neither used nor free, as in df.
        used = (status.f_blocks - status.f_bfree) * status.f_frsize
        free = status.f_bavail * status.f_frsize
        return Usage(used + free, free)

    async def off_loop(self, work: Callable[[], T]) -> T:
        # `run_sync` accepts everything with the interface of a limiter, but its type is narrower.
        return await trio.to_thread.run_sync(work, limiter=ThreadLimiter())  # type: ignore[arg-type]

    def syncer(self) -> Syncer:
        return SyncThread()


def _skip_zeros(fd: int, position: int, size: int) -> int:
    """Skip zeros, on a file system that does not report holes."""
    while position < size:
        data = os.pread(fd, 1 << 20, position)
        if data.strip(b"\x00"):
            return position
        position += len(data) or size
    return size


@final
class ThreadLimiter:
    """Trio's limiter of worker threads, but if a thread is free, work begins in this turn of the loop, not the next."""

    def __init__(self) -> None:
        self._limiter = trio.to_thread.current_default_thread_limiter()

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Wait for a free thread; `run_sync` itself is a checkpoint, so this method need not be one."""
        try:
            self._limiter.acquire_on_behalf_of_nowait(borrower)
        except trio.WouldBlock:
            await self._limiter.acquire_on_behalf_of(borrower)

    def release_on_behalf_of(self, borrower: object) -> None:
        self._limiter.release_on_behalf_of(borrower)


@final
class OpenFile:
    """A descriptor, and the number of calls that are using it."""

    __slots__ = ("fd", "stale", "uses")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.uses = 1
        self.stale = False


@final
class Files:
    """Files by path, with a limited number of open descriptors; thread-safe."""

    def __init__(self, disk: Disk, open_max: int, *, read_only: bool = False) -> None:
        self.disk = disk
        self.open_max = open_max
        self.read_only = read_only
        self._open: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._open)

    def take(self, path: str) -> OpenFile:
        """Return *path* opened; it stays open until `give`."""
        with self._lock:
            held = self._open.get(path)
            if held is not None:
                held.uses += 1
                self._open.move_to_end(path)
                return held
            held = OpenFile(self.disk.open(path, read_only=self.read_only))
            self._hold(path, held)
            return held

    def _hold(self, path: str, held: OpenFile) -> None:
        while len(self._open) >= self.open_max:
            self._retire(self._open.popitem(last=False)[1])
        self._open[path] = held

    def _retire(self, held: OpenFile) -> None:
        if held.uses:
            held.stale = True
        else:
            self.disk.close(held.fd)

    def give(self, held: OpenFile) -> None:
        """End the use of what `take` has returned."""
        with self._lock:
            held.uses -= 1
            if held.stale and not held.uses:
                self.disk.close(held.fd)

    def read(self, path: str, size: int, position: int) -> bytes:
        """Return up to *size* bytes of *path* at *position*."""
        held = self.take(path)
        try:
            return self.disk.read(held.fd, size, position)
        except OSError as error:
            name_path(error, path)
            raise
        finally:
            self.give(held)

    def read_now(self, path: str, size: int, position: int) -> bytes | bytearray | None:
        """As `read`, but return None if the read would wait for the disk."""
        held = self.take(path)
        try:
            return self.disk.read_now(held.fd, size, position)
        except OSError as error:
            name_path(error, path)
            raise
        finally:
            self.give(held)

    def write(self, path: str, data: Bytes, position: int) -> None:
        """Write all of *data* into *path* at *position*."""
        held = self.take(path)
        try:
            self.disk.write(held.fd, data, position)
        except OSError as error:
            name_path(error, path)
            raise
        finally:
            self.give(held)

    def sync(self, path: str) -> None:
        """Return after the data of *path* is on the disk."""
        held = self.take(path)
        try:
            self.disk.sync(held.fd)
        except OSError as error:
            name_path(error, path)
            raise
        finally:
            self.give(held)

    def size(self, path: str) -> int:
        """Return the size of *path*, including holes."""
        held = self.take(path)
        try:
            return self.disk.size(held.fd)
        except OSError as error:
            name_path(error, path)
            raise
        finally:
            self.give(held)

    def next_data(self, path: str, position: int) -> int:
        """As `Disk.next_data`."""
        held = self.take(path)
        try:
            return self.disk.next_data(held.fd, position)
        except OSError as error:
            name_path(error, path)
            raise
        finally:
            self.give(held)

    def truncate(self, path: str, size: int) -> None:
        """As `Disk.truncate`."""
        held = self.take(path)
        try:
            self.disk.truncate(held.fd, size)
        except OSError as error:
            name_path(error, path)
            raise
        finally:
            self.give(held)

    def clear(self, path: str, position: int) -> None:
        """Replace everything from *position* on by zeros that take no space; the size stays. Needs no free space."""
        size = self.size(path)
        if position < size:
            self.truncate(path, position)
            self.truncate(path, size)

    def create(self, path: str, size: int) -> None:
        """Create a file of *size* zeros that take no space; its name is durable after `Disk.sync_directory`."""
        held = OpenFile(self.disk.open(path, create=True))
        try:
            self.disk.truncate(held.fd, size)
        except OSError as error:
            name_path(error, path)
            self.disk.close(held.fd)
            self.disk.unlink(path)
            raise
        held.uses = 0
        with self._lock:
            self._hold(path, held)

    def forget(self, path: str) -> None:
        """Close *path* if it is open."""
        with self._lock:
            held = self._open.pop(path, None)
            if held is not None:
                self._retire(held)

    def unlink(self, path: str) -> None:
        """Remove *path*; reads in progress complete."""
        self.forget(path)
        self.disk.unlink(path)

    def close(self) -> None:
        """Close every descriptor; a call in progress in a thread closes its own."""
        with self._lock:
            while self._open:
                self._retire(self._open.popitem()[1])


def name_path(error: OSError, path: str) -> None:
    """Add *path* to *error*, raised by a call on a descriptor, unless it names a file already."""
    if error.filename is None:
        error.filename = path


def atomic_write(disk: Disk, path: str, *pieces: bytes, mode: int = FILE_MODE) -> None:
    """Replace the content of *path* by the concatenated *pieces*, in a new file with *mode*.

    After a crash *path* has the old content or the new, and ``path.bak`` the previous one. Between the two renames the
    newest generation exists only as ``path.tmp``. After a crash or an error there, the next call completes the rename
    before it writes anything.
    """
    directory, name = os.path.split(path)
    temporary = path + ".tmp"
    disk.make_directory(directory)
    names = disk.names(directory)
    replaces = name in names
    if f"{name}.tmp" in names:
        if replaces:
            disk.unlink(temporary)
        else:
            disk.rename(temporary, path)
            replaces = True
    _write_new(disk, temporary, pieces, mode)
    if replaces:
        disk.rename(path, path + ".bak")
    disk.rename(temporary, path)
    disk.sync_directory(directory)


def _write_new(disk: Disk, path: str, pieces: Iterable[bytes], mode: int) -> None:
    """Create *path* with *pieces* and sync it; after an error, remove it, so that it takes no space of a full disk."""
    fd = disk.open(path, create=True, mode=mode)
    try:
        position = 0
        for piece in pieces:
            disk.write(fd, piece, position)
            position += len(piece)
        disk.sync(fd)
    except OSError as error:
        name_path(error, path)
        disk.unlink(path)
        raise
    finally:
        disk.close(fd)


def read_file(disk: Disk, path: str) -> bytes | None:
    """Return the content of *path*; None if it does not exist."""
    try:
        fd = disk.open(path, read_only=True)
    except FileNotFoundError:
        return None
    try:
        return disk.read(fd, disk.size(fd), 0)
    except OSError as error:
        name_path(error, path)
        raise
    finally:
        disk.close(fd)


def read_generation(disk: Disk, path: str, parse: Callable[[bytes], T]) -> T | None:
    """Return the result of *parse* for the newest generation of *path* that it accepts; None if there is none.

    *parse* rejects a generation by raising MartletError or ValueError. After a crash between the two renames of
    `atomic_write`, the newest is ``path.tmp``.
    """
    for generation in (path, path + ".tmp", path + ".bak"):
        data = read_file(disk, generation)
        if not data:
            continue
        try:
            return parse(data)
        except (MartletError, ValueError):
            continue
    return None
