"""A disk for a dry run of a start: it reads another disk and keeps every change in memory.

So the code of a start itself computes the changes that a start would make, and `DryDisk.changes` reports them. Memory
is needed for everything written: 20 bytes per message of a consume queue that is rebuilt.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar, final

from martlet.store.disk.files import FILE_MODE, Bytes, Disk, Usage
from martlet.store.disk.syncers import OffLoopSyncer, Syncer

__all__ = ["DryDisk"]

T = TypeVar("T")

PAGE_BYTES: Final = 65536
NOTHING: Final = -1  # replaces the descriptor of the disk below


@final
class _File:
    """One file: ``limit`` bytes of ``source``, a path of the disk below, overlaid by the pages that were written."""

    __slots__ = ("limit", "pages", "size", "source")

    def __init__(self, source: str, size: int) -> None:
        self.source = source
        self.size = self.limit = size
        self.pages: dict[int, bytearray] = {}

    def truncate(self, size: int) -> None:
        self.limit = min(self.limit, size)
        self.size = size
        last, within = divmod(size, PAGE_BYTES)
        for number in [number for number in self.pages if number > last]:
            del self.pages[number]
        if last in self.pages:
            self.pages[last][within:] = bytes(PAGE_BYTES - within)


def _error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)


@final
class _Directory:
    """A created directory."""

    __slots__ = ()


Entry = _File | _Directory | None
DIRECTORY: Final = _Directory()


@final
class DryDisk:
    """A `Disk` that does not change *below*."""

    def __init__(self, below: Disk) -> None:
        self.below = below
        # Files and directories that differ from the disk below or were opened, by directory and name; None for removed
        # ones.
        self._entries: dict[str, dict[str, Entry]] = {}
        # The file and the descriptor of its source, by our descriptor.
        self._open: dict[int, tuple[_File, int]] = {}
        self._next_fd = 1 << 20

    # ---- changes

    def changes(self) -> dict[str, str]:
        """Return the differences from the disk below: ``created``, ``changed`` or ``removed``, by path."""
        changes: dict[str, str] = {}
        for directory, names in self._entries.items():
            for name, entry in names.items():
                path = f"{directory}/{name}"
                kind = self._difference(path, entry) if not isinstance(entry, _Directory) else ""
                if kind:
                    changes[path] = kind
        return dict(sorted(changes.items()))

    def _difference(self, path: str, file: _File | None) -> str:
        try:
            fd = self.below.open(path, read_only=True)
        except FileNotFoundError:
            return "created" if file is not None else ""
        try:
            if file is None:
                return "removed" if self._is_file(fd) else ""
            return "" if self._is_same(file, path, fd) else "changed"
        finally:
            self.below.close(fd)

    def _is_same(self, file: _File, path: str, fd: int) -> bool:
        if file.size != self.below.size(fd):
            return False
        if file.source == path and file.limit == file.size:
            numbers = sorted(file.pages)
        else:
            numbers = list(range(-(-file.size // PAGE_BYTES)))
        source = self._open_source(file)
        try:
            return all(
                self._page(file, source, number)[: file.size - number * PAGE_BYTES]
                == self.below.read(fd, PAGE_BYTES, number * PAGE_BYTES)
                for number in numbers
            )
        finally:
            if source != NOTHING:
                self.below.close(source)

    # ---- files

    def _place(self, path: str) -> tuple[dict[str, Entry], str]:
        directory, name = os.path.split(path)
        return self._entries.setdefault(directory, {}), name

    def _is_file(self, fd: int) -> bool:
        try:
            self.below.read(fd, 1, 0)
        except IsADirectoryError:
            return False
        return True

    def _find(self, path: str) -> Entry:
        """Return the file or directory at *path*; None if there is none."""
        names, name = self._place(path)
        if name in names:
            return names[name]
        try:
            fd = self.below.open(path, read_only=True)
        except FileNotFoundError:
            return None
        except IsADirectoryError:
            return DIRECTORY
        try:
            if not self._is_file(fd):
                return DIRECTORY
            file = names[name] = _File(path, self.below.size(fd))
            return file
        finally:
            self.below.close(fd)

    def _open_source(self, file: _File) -> int:
        return self.below.open(file.source, read_only=True) if file.source else NOTHING

    def open(self, path: str, *, create: bool = False, read_only: bool = False, mode: int = FILE_MODE) -> int:
        entry = self._find(path)
        if create:
            if entry is not None:
                raise _error(errno.EEXIST, path)
            if not isinstance(self._find(os.path.dirname(path)), _Directory):
                raise _error(errno.ENOENT, path)
            entry = _File("", 0)
            self._set(path, entry)
        if not isinstance(entry, _File):
            raise _error(errno.ENOENT if entry is None else errno.EISDIR, path)
        fd = self._next_fd
        self._next_fd += 1
        self._open[fd] = entry, self._open_source(entry)
        return fd

    def close(self, fd: int) -> None:
        _, source = self._open.pop(fd)
        if source != NOTHING:
            self.below.close(source)

    def size(self, fd: int) -> int:
        return self._open[fd][0].size

    def _page(self, file: _File, source: int, number: int) -> bytes | bytearray:
        """Return one whole page; zeros after the end of the file."""
        page = file.pages.get(number)
        if page is not None:
            return page
        at = number * PAGE_BYTES
        size = min(PAGE_BYTES, file.limit - at)
        data = self.below.read(source, size, at) if size > 0 else b""
        return data.ljust(PAGE_BYTES, b"\x00")

    def read(self, fd: int, size: int, position: int) -> bytes:
        file, source = self._open[fd]
        end = min(position + size, file.size)
        if source != NOTHING and not file.pages and end <= file.limit:
            return self.below.read(source, max(end - position, 0), position)
        pieces: list[bytes] = []
        while position < end:
            number, at = divmod(position, PAGE_BYTES)
            piece = bytes(self._page(file, source, number)[at : at + end - position])
            pieces.append(piece)
            position += len(piece)
        return b"".join(pieces)

    def read_now(self, fd: int, size: int, position: int) -> bytes | bytearray | None:
        return self.read(fd, size, position)

    def write(self, fd: int, data: Bytes, position: int) -> None:
        file, source = self._open[fd]
        view = memoryview(data)
        while view:
            number, at = divmod(position, PAGE_BYTES)
            piece = view[: PAGE_BYTES - at]
            page = file.pages.get(number)
            if page is None:
                page = file.pages[number] = bytearray(self._page(file, source, number))
            page[at : at + len(piece)] = piece
            position += len(piece)
            view = view[len(piece) :]
            file.size = max(file.size, position)

    def path_size(self, path: str) -> int:
        entry = self._find(path)
        return entry.size if isinstance(entry, _File) else -1

    def stamp(self, path: str) -> tuple[int, ...] | None:
        entry = self._find(path)
        return (id(entry), entry.size, len(entry.pages)) if isinstance(entry, _File) else None

    def truncate(self, fd: int, size: int) -> None:
        self._open[fd][0].truncate(size)

    def sync(self, fd: int) -> None:
        """Do nothing: writes stay in memory and never become durable."""

    def next_data(self, fd: int, position: int) -> int:
        file, source = self._open[fd]
        data_at = self.below.next_data(source, position) if position < file.limit else file.limit
        data_at = data_at if data_at < file.limit else file.size
        first_page = position // PAGE_BYTES
        written_page = min((number for number in file.pages if number >= first_page), default=None)
        return data_at if written_page is None else min(data_at, max(written_page * PAGE_BYTES, position), file.size)

    # ---- names

    def sync_directory(self, path: str) -> None:
        if not isinstance(self._find(path), _Directory):
            raise _error(errno.ENOENT, path)

    def sync_everything(self, path: str) -> None:
        """Do nothing, as `sync`."""

    def make_directory(self, path: str) -> None:
        while path.strip("/") and (entry := self._find(path)) is not DIRECTORY:
            if entry is not None:
                raise _error(errno.EEXIST, path)
            self._set(path, DIRECTORY)
            path = os.path.dirname(path)

    def names(self, path: str) -> list[str]:
        names = set(self.below.names(path))
        for name, entry in self._entries.get(path, {}).items():
            if entry is None:
                names.discard(name)
            else:
                names.add(name)
        return sorted(names)

    def rename(self, source: str, target: str) -> None:
        entry = self._find(source)
        if not isinstance(entry, _File):
            raise _error(errno.ENOENT if entry is None else errno.EISDIR, source)
        self._set(source, None)
        self._set(target, entry)

    def _set(self, path: str, entry: Entry) -> None:
        names, name = self._place(path)
        names[name] = entry

    def unlink(self, path: str) -> None:
        entry = self._find(path)
        if not isinstance(entry, _File):
            raise _error(errno.ENOENT if entry is None else errno.EISDIR, path)
        self._set(path, None)

    def remove_directory(self, path: str) -> None:
        if not isinstance(self._find(path), _Directory):
            raise _error(errno.ENOENT, path)
        if self.names(path):
            raise _error(errno.ENOTEMPTY, path)
        self._set(path, None)

    # ---- other operations

    def lock(self, path: str) -> int:
        """Lock *path* of the disk below if it exists and is writable; otherwise no process can have it open."""
        source = NOTHING
        if os.path.basename(path) in self.below.names(os.path.dirname(path)):
            with suppress(OSError):  # read-only, so no broker can have it open either
                source = self.below.lock(path)
        fd = self._next_fd
        self._next_fd += 1
        self._open[fd] = _File("", 0), source
        return fd

    def usage(self, path: str) -> Usage:
        return self.below.usage(path)

    async def off_loop(self, work: Callable[[], T]) -> T:
        return await self.below.off_loop(work)

    def syncer(self) -> Syncer:
        return OffLoopSyncer(self)
