"""An in-memory disk for tests: it can lose everything that was not synced, and fail on demand.

It counts every call that changes something, and the power can be cut at any of them. `FakeDisk.after_power_cut` returns
the disk as the next process finds it: with everything that was synced and, depending on `Cut`, with nothing else, with
random writes, or with random sectors of writes. A created, renamed or removed name survives if its directory was synced
afterwards.
"""

import errno
import os
from collections.abc import Callable
from enum import Enum, unique
from itertools import count
from random import Random
from typing import Final, TypeVar, final

import trio

from martlet.errors import StoreLocked
from martlet.store.disk.files import FILE_MODE, Bytes, Usage
from martlet.store.disk.syncers import OffLoopSyncer, Syncer

__all__ = ["Cut", "FakeDisk", "PowerCut"]

T = TypeVar("T")

SECTOR_BYTES: Final = 512
BLOCK_BYTES: Final = 4096


@final
class PowerCut(BaseException):
    """The machine lost power in the middle of a call; this process does not exist any more."""


@unique
class Cut(Enum):
    """The fate of changes that were not synced."""

    LOST = "none of them survives"
    KILLED = "only the process is killed: all are seen by the next, and are as little durable as before"
    REORDERED = "each survives or not"
    TORN = "each sector of 512 bytes survives or not"


@final
class _File:
    """Contents as programs see them (``data``), as the disk holds them (``stable``), and the changes between."""

    __slots__ = ("blocks", "changes", "data", "mode", "number", "stable", "writes")
    _numbers = count()

    def __init__(self, data: bytes = b"", mode: int = FILE_MODE) -> None:
        self.mode = mode
        self.number = next(self._numbers)
        self.writes = 0
        self.data = bytearray(data)
        self.stable = bytearray(data)
        # (position, bytes written), or (size, None) for a truncate.
        self.changes: list[tuple[int, bytes | None]] = []
        self.blocks: set[int] = {at // BLOCK_BYTES for at in range(0, len(data), BLOCK_BYTES)}

    def change(self, position: int, data: bytes | None) -> None:
        _apply(self.data, position, data)
        self.changes.append((position, data))
        self.writes += 1
        if data is None:
            self.blocks = {block for block in self.blocks if block * BLOCK_BYTES < position}

    def sync(self) -> None:
        for position, data in self.changes:
            _apply(self.stable, position, data)
        self.changes.clear()

    def killed(self) -> "_File":
        """The same for another process."""
        found = _File(bytes(self.data), self.mode)
        found.stable = bytearray(self.stable)
        found.changes = list(self.changes)
        return found

    def after(self, cut: Cut, random: Random) -> "_File":
        found = bytearray(self.stable)
        for position, data in self.changes if cut is not Cut.LOST else ():
            if data is None or cut is Cut.REORDERED:
                if random.random() < 0.5:
                    _apply(found, position, data)
            else:
                for at, part in _sectors(position, data):
                    if random.random() < 0.5:
                        _apply(found, at, part)
        return _File(bytes(found), self.mode)


def _apply(content: bytearray, position: int, data: bytes | None) -> None:
    if data is None:
        if position < len(content):
            del content[position:]
        else:
            content.extend(bytes(position - len(content)))
        return
    if position > len(content):
        content.extend(bytes(position - len(content)))
    content[position : position + len(data)] = data


def _sectors(position: int, data: bytes) -> list[tuple[int, bytes]]:
    parts: list[tuple[int, bytes]] = []
    while data:
        size = SECTOR_BYTES - position % SECTOR_BYTES
        parts.append((position, data[:size]))
        position += size
        data = data[size:]
    return parts


@final
class FakeDisk:
    """A `martlet.store.Disk` without a machine. Paths are plain strings with ``/``.

    Attributes:
      calls: the number of calls that changed something so far, by name ("write", "sync", "rename", ...).
      on_change: called before each of them with its name, and may raise.
      failures: errno by (name of the call, its number counted from 0), raised once instead of the call.
      free_bytes: space for new blocks; None for any amount. A write that needs more writes the bytes that fit.
      used_ratio: the result of `usage` when ``free_bytes`` is None.
      cached: whether files are in the page cache, so that `read_now` finds them.
    """

    def __init__(self) -> None:
        self.files: dict[str, _File] = {}
        self.directories: set[str] = set()
        # Names as the disk holds them; changes of names since, in order.
        self.stable_files: dict[str, _File] = {}
        self.stable_directories: set[str] = set()
        self.name_changes: list[tuple[str, str, str, _File | None]] = []
        self.open_files: dict[int, tuple[str, _File, bool]] = {}
        self.locked: dict[int, str] = {}
        self.calls: dict[str, int] = {}
        self.on_change: Callable[[str], None] | None = None
        self.failures: dict[tuple[str, int], int] = {}
        self.free_bytes: int | None = None
        self.total_bytes = 1 << 30
        self.used_ratio = 0.1
        self.cached = False
        self._next_fd = 3

    # ---- faults

    def _changing(self, name: str, path: str | None = None) -> None:
        """Count the call; *path* is what its error names, None for a call on a descriptor."""
        if self.on_change is not None:
            self.on_change(name)
        number = self.calls.get(name, 0)
        self.calls[name] = number + 1
        self._fail(name, number, path)

    def _fail(self, name: str, number: int, path: str | None = None) -> None:
        code = self.failures.pop((name, number), None)
        if code is not None:
            raise OSError(code, os.strerror(code), path)

    def fail_next(self, name: str, code: int, *, after: int = 0) -> None:
        """Let a call of *name* fail with errno *code*: the next one, or the one after *after* more successful ones."""
        self.failures[name, self.calls.get(name, 0) + after] = code

    def after_power_cut(self, cut: Cut, random: Random) -> "FakeDisk":
        """Return the disk after a power cut at this moment."""
        if cut is Cut.KILLED:
            return self._after_kill()
        found = FakeDisk()
        files = dict(self.stable_files)
        found.directories = set(self.stable_directories)
        for change in self._surviving_names(cut, random):
            _rename(files, found.directories, change)
        copies: dict[int, _File] = {}
        for path, file in files.items():
            if id(file) not in copies:
                copies[id(file)] = file.after(cut, random)
            found.files[path] = copies[id(file)]
        found.stable_files = dict(found.files)
        found.stable_directories = set(found.directories)
        found.free_bytes, found.total_bytes, found.used_ratio = self.free_bytes, self.total_bytes, self.used_ratio
        return found

    def _after_kill(self) -> "FakeDisk":
        found = FakeDisk()
        copies: dict[int, _File] = {}
        for file in (*self.files.values(), *self.stable_files.values()):
            copies.setdefault(id(file), file.killed())
        found.files = {path: copies[id(file)] for path, file in self.files.items()}
        found.stable_files = {path: copies[id(file)] for path, file in self.stable_files.items()}
        found.directories, found.stable_directories = set(self.directories), set(self.stable_directories)
        for kind, path, target, changed in self.name_changes:
            copy = None if changed is None else copies.setdefault(id(changed), changed.killed())
            found.name_changes.append((kind, path, target, copy))
        found.free_bytes, found.total_bytes, found.used_ratio = self.free_bytes, self.total_bytes, self.used_ratio
        return found

    def _surviving_names(self, cut: Cut, random: Random) -> list[tuple[str, str, str, _File | None]]:
        """Return the surviving names. Names go through a journal: a first part of the changes survives."""
        return [] if cut is Cut.LOST else self.name_changes[: random.randint(0, len(self.name_changes))]

    # ---- Disk

    def open(self, path: str, *, create: bool = False, read_only: bool = False, mode: int = FILE_MODE) -> int:
        file = self.files.get(path)
        if create:
            self._changing("create", path)
            if file is not None or path in self.directories:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            if os.path.dirname(path) not in self.directories:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            file = self.files[path] = _File(mode=mode)
            self.name_changes.append(("link", path, "", file))
        elif path in self.directories:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        elif file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self._opened(path, file, read_only)

    def _opened(self, path: str, file: _File, read_only: bool) -> int:
        fd = self._next_fd
        self._next_fd += 1
        self.open_files[fd] = path, file, read_only
        return fd

    def _file(self, fd: int) -> _File:
        held = self.open_files.get(fd)
        if held is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return held[1]

    def close(self, fd: int) -> None:
        self._file(fd)
        del self.open_files[fd]
        self.locked.pop(fd, None)

    def size(self, fd: int) -> int:
        return len(self._file(fd).data)

    def read(self, fd: int, size: int, position: int) -> bytes:
        number = self.calls.get("read", 0)
        self.calls["read"] = number + 1
        self._fail("read", number)
        return bytes(self._file(fd).data[position : position + size])

    def read_now(self, fd: int, size: int, position: int) -> bytes | None:
        return self.read(fd, size, position) if self.cached else None

    def write(self, fd: int, data: Bytes, position: int) -> None:
        file = self._file(fd)
        if self.open_files[fd][2]:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        content = bytes(data)
        fitting = self._fitting(file, position, content)
        number = self.calls.get("write", 0)
        if ("write", number) in self.failures:
            fitting = len(content) // 2
        try:
            self._changing("write")
        except OSError:
            if fitting:
                file.change(position, content[:fitting])
            raise
        if fitting:
            self._allocate(file, position, fitting)
            file.change(position, content[:fitting])
        if fitting < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _fitting(self, file: _File, position: int, data: bytes) -> int:
        """Return the number of bytes of *data* for which there is space."""
        if self.free_bytes is None:
            return len(data)
        free = self.free_bytes
        for block in range(position // BLOCK_BYTES, (position + len(data) - 1) // BLOCK_BYTES + 1):
            if block not in file.blocks:
                free -= BLOCK_BYTES
                if free < 0:
                    return max(block * BLOCK_BYTES - position, 0)
        return len(data)

    def _allocate(self, file: _File, position: int, size: int) -> None:
        needed = set(range(position // BLOCK_BYTES, (position + size - 1) // BLOCK_BYTES + 1)) - file.blocks
        file.blocks |= needed
        if self.free_bytes is not None:
            self.free_bytes -= len(needed) * BLOCK_BYTES

    def path_size(self, path: str) -> int:
        file = self.files.get(path)
        return -1 if file is None else len(file.data)

    def stamp(self, path: str) -> tuple[int, ...] | None:
        file = self.files.get(path)
        return None if file is None else (file.number, len(file.data), file.writes)

    def truncate(self, fd: int, size: int) -> None:
        self._changing("truncate")
        file = self._file(fd)
        before = len(file.blocks)
        file.change(size, None)
        if self.free_bytes is not None:
            self.free_bytes += (before - len(file.blocks)) * BLOCK_BYTES

    def sync(self, fd: int) -> None:
        self._changing("sync")
        self._file(fd).sync()

    def next_data(self, fd: int, position: int) -> int:
        data = self._file(fd).data
        rest = data[position:]
        return position + len(rest) - len(rest.lstrip(b"\x00"))

    def sync_directory(self, path: str) -> None:
        if path not in self.directories:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._changing("sync_directory", path)
        # A journal is written in order: earlier changes are durable with it.
        last = max((i for i, change in enumerate(self.name_changes) if _concerns(change, path)), default=-1)
        for change in self.name_changes[: last + 1]:
            _rename(self.stable_files, self.stable_directories, change)
        del self.name_changes[: last + 1]

    def sync_everything(self, path: str) -> None:
        self._changing("sync", path)
        for file in self.files.values():
            file.sync()
        for change in self.name_changes:
            _rename(self.stable_files, self.stable_directories, change)
        self.name_changes.clear()

    def make_directory(self, path: str) -> None:
        if path in self.directories or not path.strip("/"):
            self.directories.add(path)
            return
        self.make_directory(os.path.dirname(path))
        self._changing("make_directory", path)
        self.directories.add(path)
        self.name_changes.append(("mkdir", path, "", None))

    def names(self, path: str) -> list[str]:
        prefix = f"{path.rstrip('/')}/"
        start = len(prefix)
        inside = {name[start:] for each in (self.files, self.directories) for name in each if name.startswith(prefix)}
        return sorted(name for name in inside if name and "/" not in name)

    def rename(self, source: str, target: str) -> None:
        if source not in self.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        self._changing("rename", source)
        self.files[target] = self.files.pop(source)
        self.name_changes.append(("rename", source, target, None))

    def unlink(self, path: str) -> None:
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._changing("unlink", path)
        gone = self.files.pop(path)
        if self.free_bytes is not None:
            self.free_bytes += len(gone.blocks) * BLOCK_BYTES
        self.name_changes.append(("unlink", path, "", None))

    def remove_directory(self, path: str) -> None:
        if path not in self.directories:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if self.names(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._changing("remove_directory", path)
        self.directories.discard(path)
        self.name_changes.append(("rmdir", path, "", None))

    def lock(self, path: str) -> int:
        if path in self.locked.values():
            raise StoreLocked(f"{path} is locked by another process")
        fd = self.open(path, create=path not in self.files)
        self.locked[fd] = path
        return fd

    def usage(self, path: str) -> Usage:
        if self.free_bytes is None:
            return Usage(self.total_bytes, int(self.total_bytes * (1 - self.used_ratio)))
        return Usage(self.total_bytes, self.free_bytes)

    async def off_loop(self, work: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()
        return work()

    def syncer(self) -> Syncer:
        return OffLoopSyncer(self)


def _concerns(change: tuple[str, str, str, _File | None], directory: str) -> bool:
    return directory in (os.path.dirname(change[1]), os.path.dirname(change[2]))


def _rename(files: dict[str, _File], directories: set[str], change: tuple[str, str, str, _File | None]) -> None:
    kind, path, target, file = change
    if kind == "link" and file is not None:
        files[path] = file
    elif kind == "unlink":
        files.pop(path, None)
    elif kind == "rename":
        if path in files:
            files[target] = files.pop(path)
    elif kind == "mkdir":
        directories.add(path)
    elif kind == "rmdir":
        directories.discard(path)
