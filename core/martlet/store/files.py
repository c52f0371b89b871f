"""Every access to the disk; nothing else in Martlet's core opens a file of the store.

A `Disk` is a table of blocking calls on paths and descriptors: `RealDisk` is the
operating system, `martlet.testing.disk.FakeDisk` forgets what was not synced.
Files are read and written by position and never mapped: a mapped page that cannot
be read or written ends the process, and mapped pages count as its memory.
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

__all__ = ["Disk", "Files", "RealDisk", "Usage", "atomic_write", "read_generation"]

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview

FULL_ERRORS: Final = frozenset((errno.ENOSPC, errno.EDQUOT))


def is_full(error: OSError) -> bool:
    """Whether *error* says that there is no space, which may come back."""
    return error.errno in FULL_ERRORS


@final
class Usage:
    """How full the file system is."""

    __slots__ = ("free_bytes", "total_bytes")

    def __init__(self, total_bytes: int, free_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = free_bytes

    @property
    def ratio(self) -> float:
        """The used part, 0 to 1."""
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0


class Disk(Protocol):
    """What the store asks of an operating system; every call but `off_loop` blocks and raises OSError."""

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> int:
        """Return a descriptor; FileNotFoundError without *create*, FileExistsError with it when the file is there."""
        ...

    def close(self, fd: int) -> None: ...

    def size(self, fd: int) -> int: ...

    def read(self, fd: int, size: int, position: int) -> bytes:
        """Return up to *size* bytes; fewer only at the end of the file."""
        ...

    def read_now(self, fd: int, size: int, position: int) -> bytes | bytearray | None:
        """Return *size* bytes, fewer only at the end of the file; None where the disk would have to be waited for."""
        ...

    def write(self, fd: int, data: Bytes, position: int) -> None:
        """Write all of *data*, or raise; a part may have been written then."""
        ...

    def path_size(self, path: str) -> int:
        """The bytes of the file *path*, holes counted; -1 when it is absent or no file."""
        ...

    def truncate(self, fd: int, size: int) -> None:
        """Cut, or lengthen with zeros that take no space."""
        ...

    def sync(self, fd: int) -> None:
        """Return when data and size are on the disk."""
        ...

    def next_data(self, fd: int, position: int) -> int:
        """The first position from *position* on that may hold something else than zeros; the size if there is none."""
        ...

    def sync_directory(self, path: str) -> None:
        """Return when the names in *path* are on the disk."""
        ...

    def sync_everything(self, path: str) -> None:
        """Return when all data and names of the file system of *path* are on the disk."""
        ...

    def make_directory(self, path: str) -> None:
        """Make *path* and what is missing above it; fine if it is there."""
        ...

    def names(self, path: str) -> list[str]:
        """The sorted names in directory *path*; none when it is absent or no directory."""
        ...

    def rename(self, source: str, target: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def remove_directory(self, path: str) -> None: ...

    def lock(self, path: str) -> int:
        """Lock *path* for this opener alone and return its descriptor; closing it unlocks. Raises StoreLocked."""
        ...

    def usage(self, path: str) -> Usage: ...

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run blocking *work* where it does not stop the event loop; not cancellable."""
        ...


# struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK: Final = struct.Struct("hhqqi4x")


@final
class RealDisk:
    """The operating system's files."""

    __slots__ = ()

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> int:
        if create:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
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
        data = bytearray(size)
        try:
            got = os.preadv(fd, [data], position, os.RWF_NOWAIT)
        except OSError:
            # It is not in the page cache (EAGAIN), or this file system cannot tell (EOPNOTSUPP); `read` names errors.
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

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def next_data(self, fd: int, position: int) -> int:
        try:
            return os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            size = os.fstat(fd).st_size
            # ENXIO: only a hole follows. Anything else: the file system does not tell.
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
        # The first byte, as RocketMQ (BrokerStartup, store/lock), so that either refuses beside the other. A lock
        # of the open file description: it also holds against a second opener within this process.
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 1, 0))
        except OSError as error:
            os.close(fd)
            raise StoreLocked(f"{path} is locked by another process ({error.strerror})") from error
        return fd

    def usage(self, path: str) -> Usage:
        status = os.statvfs(path)
        # What root alone may use counts as neither used nor free, as in df.
        used = (status.f_blocks - status.f_bfree) * status.f_frsize
        free = status.f_bavail * status.f_frsize
        return Usage(used + free, free)

    async def off_loop(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work)


def _skip_zeros(fd: int, position: int, size: int) -> int:
    """For a file system that knows no holes: walk over zeros."""
    while position < size:
        data = os.pread(fd, 1 << 20, position)
        if data.strip(b"\x00"):
            return position
        position += len(data) or size
    return size


@final
class _Open:
    """A descriptor, and how many calls use it just now."""

    __slots__ = ("fd", "stale", "uses")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.uses = 1
        self.stale = False


@final
class Files:
    """Files by path over a bounded number of descriptors; safe to use from several threads."""

    __slots__ = ("_lock", "_open", "disk", "open_max", "read_only")

    def __init__(self, disk: Disk, open_max: int, *, read_only: bool = False) -> None:
        self.disk = disk
        self.open_max = open_max
        self.read_only = read_only
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._open)

    def _take(self, path: str) -> _Open:
        with self._lock:
            held = self._open.get(path)
            if held is not None:
                held.uses += 1
                self._open.move_to_end(path)
                return held
            held = _Open(self.disk.open(path, read_only=self.read_only))
            self._hold(path, held)
            return held

    def _hold(self, path: str, held: _Open) -> None:
        while len(self._open) >= self.open_max:
            self._retire(self._open.popitem(last=False)[1])
        self._open[path] = held

    def _retire(self, held: _Open) -> None:
        if held.uses:
            held.stale = True
        else:
            self.disk.close(held.fd)

    def _give(self, held: _Open) -> None:
        with self._lock:
            held.uses -= 1
            if held.stale and not held.uses:
                self.disk.close(held.fd)

    def read(self, path: str, size: int, position: int) -> bytes:
        """Return up to *size* bytes of *path* at *position*."""
        held = self._take(path)
        try:
            return self.disk.read(held.fd, size, position)
        except OSError as error:
            name_path(error, path)
            raise
        finally:
            self._give(held)

    def read_now(self, path: str, size: int, position: int) -> bytes | bytearray | None:
        """As `read`, but None where the disk would have to be waited for."""
        held = self._take(path)
        try:
            return self.disk.read_now(held.fd, size, position)
        except OSError as error:
            name_path(error, path)
            raise
        finally:
            self._give(held)

    def write(self, path: str, data: Bytes, position: int) -> None:
        """Write all of *data* into *path* at *position*."""
        held = self._take(path)
        try:
            self.disk.write(held.fd, data, position)
        except OSError as error:
            name_path(error, path)
            raise
        finally:
            self._give(held)

    def sync(self, path: str) -> None:
        """Return when the data of *path* is on the disk."""
        held = self._take(path)
        try:
            self.disk.sync(held.fd)
        except OSError as error:
            name_path(error, path)
            raise
        finally:
            self._give(held)

    def size(self, path: str) -> int:
        """The bytes of *path*, holes counted."""
        held = self._take(path)
        try:
            return self.disk.size(held.fd)
        except OSError as error:
            name_path(error, path)
            raise
        finally:
            self._give(held)

    def next_data(self, path: str, position: int) -> int:
        """As `Disk.next_data`."""
        held = self._take(path)
        try:
            return self.disk.next_data(held.fd, position)
        except OSError as error:
            name_path(error, path)
            raise
        finally:
            self._give(held)

    def truncate(self, path: str, size: int) -> None:
        """As `Disk.truncate`."""
        held = self._take(path)
        try:
            self.disk.truncate(held.fd, size)
        except OSError as error:
            name_path(error, path)
            raise
        finally:
            self._give(held)

    def clear(self, path: str, position: int) -> None:
        """Make everything from *position* on zeros that take no space; the size stays. Needs no free space."""
        size = self.size(path)
        if position < size:
            self.truncate(path, position)
            self.truncate(path, size)

    def create(self, path: str, size: int) -> None:
        """Make a new file of *size* zeros that take no space; its name is durable after `Disk.sync_directory`."""
        held = _Open(self.disk.open(path, create=True))
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
        """Remove *path*; readers that are at it finish."""
        self.forget(path)
        self.disk.unlink(path)

    def close(self) -> None:
        """Close every descriptor; a call that is under way in a thread closes its own."""
        with self._lock:
            while self._open:
                self._retire(self._open.popitem()[1])


def name_path(error: OSError, path: str) -> None:
    """Make *error*, raised by a call on a descriptor, name *path*; one that names a file already keeps it."""
    if error.filename is None:
        error.filename = path


def atomic_write(disk: Disk, path: str, *pieces: bytes) -> None:
    """Replace *path* by *pieces*, one behind another.

    After a crash it holds the old or the new, and ``path.bak`` what was before.
    Between the two renames the newest generation is ``path.tmp`` alone. A crash or an error there is
    completed by the next call before it writes anything.
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
    _write_new(disk, temporary, pieces)
    if replaces:
        disk.rename(path, path + ".bak")
    disk.rename(temporary, path)
    disk.sync_directory(directory)


def _write_new(disk: Disk, path: str, pieces: Iterable[bytes]) -> None:
    """Create *path* with *pieces* and sync it; after an error it is gone, so that it takes no space of a full disk."""
    fd = disk.open(path, create=True)
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
    """The whole of *path*; None when it is absent."""
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
    """Return *parse* of the newest generation of *path* that it accepts; None when there is none.

    A generation is refused by raising MartletError or ValueError. A crash between the two
    renames of `atomic_write` leaves the newest as ``path.tmp``.
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
