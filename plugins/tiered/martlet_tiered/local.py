"""A local directory as a store of objects: files that appear with all of their data, and durably."""

import errno
import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Final, final

from martlet.runtime.fsync import fsync_path
from martlet_tiered.errors import (
    AccessRefused,
    ObjectChanged,
    ObjectDamaged,
    ObjectExists,
    ObjectMissing,
    StoreUnavailable,
    TierError,
)
from martlet_tiered.objects import StoredObject, check_name

__all__ = ["LocalObjects"]

TEMPORARY: Final = ".temporary"
NS: Final = 1_000_000


def _problem(error: OSError, path: str) -> TierError:
    if isinstance(error, PermissionError):
        return AccessRefused(f"{path!r} cannot be used: {error.strerror}; give it to the broker's user")
    return StoreUnavailable(f"{path!r} cannot be used: {error.strerror}; check the disk")


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@final
class LocalObjects:
    """The files below *root*, which is created if it is missing.

    A file is written under another name, synced, and linked to its own, which fails if that exists; then its directory
    is synced. `swap` is not available: nothing replaces a file if and only if it is a certain version.
    """

    can_tear = True
    _numbers = itertools.count()

    def __init__(self, root: str) -> None:
        self.url = root
        self._temporary = os.path.join(root, TEMPORARY)
        try:
            self._make_folder(self._temporary)
        except OSError as error:
            raise _problem(error, root) from error

    def __repr__(self) -> str:
        return f"LocalObjects({self.url!r})"

    def create(self, name: str, data: bytes | memoryview) -> None:
        path = self._path(name)
        try:
            if self._link(data, path) or self._holds(path, data):
                return
        except OSError as error:
            raise _problem(error, path) from error
        raise ObjectExists(f"{path!r} exists already, with other data")

    def read(self, name: str) -> bytes:
        return self._read(name, 0, None)

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        return self._read(name, begin, end)

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self._read(name, begin, end) for begin, end in ranges]

    def size(self, name: str) -> int:
        path = self._path(name)
        try:
            return os.stat(path).st_size
        except FileNotFoundError:
            raise ObjectMissing(f"{path!r} does not exist") from None
        except OSError as error:
            raise _problem(error, path) from error

    def list_folder(self, folder: str) -> list[StoredObject]:
        found: list[StoredObject] = []
        try:
            for parent, _, files in os.walk(self._path(folder), onerror=_raise_unless_missing):
                for file in files:
                    path = os.path.join(parent, file)
                    with suppress(FileNotFoundError):  # removed in the meantime
                        status = os.stat(path)
                        name = os.path.relpath(path, self.url)
                        found.append(StoredObject(name, status.st_size, status.st_mtime_ns // NS))
        except OSError as error:
            raise _problem(error, self.url) from error
        return sorted(found, key=lambda each: each.name)

    def delete(self, name: str) -> None:
        path = self._path(name)
        try:
            os.unlink(path)
            fsync_path(os.path.dirname(path))
        except FileNotFoundError:
            return
        except OSError as error:
            raise _problem(error, path) from error

    def tag(self, name: str) -> str | None:
        return None

    def swap(self, name: str, data: bytes, tag: str) -> None:
        raise ObjectChanged(f"{self._path(name)!r} cannot be replaced: a directory has no versions of files")

    def sync(self, names: Sequence[str]) -> None:
        folders = {parent for name in names for parent in PurePath(name).parents}
        paths = [self._path(name) for name in names] + [os.path.join(self.url, folder) for folder in sorted(folders)]
        try:
            for path in paths:
                fsync_path(path)
        except OSError as error:
            raise _problem(error, path) from error

    def remove_temporary(self, before_ms: int) -> None:
        """Remove what broken-off calls of `create` have left before that time."""
        for name in os.listdir(self._temporary):
            path = os.path.join(self._temporary, name)
            with suppress(FileNotFoundError):
                if os.stat(path).st_mtime_ns // NS < before_ms:
                    os.unlink(path)

    def _path(self, name: str) -> str:
        return os.path.join(self.url, check_name(name))

    def _make_folder(self, path: str) -> None:
        """Create *path* and the folders above it, each durably."""
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        self._make_folder(parent)
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
        fsync_path(parent)

    def _link(self, data: bytes | memoryview, path: str) -> bool:
        """Whether *path* did not exist and has *data* now."""
        folder = os.path.dirname(path)
        self._make_folder(folder)
        temporary, handle = self._make_temporary()
        try:
            with open(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(handle)
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        fsync_path(folder)
        return True

    def _make_temporary(self) -> tuple[str, int]:
        """Return a new file and its handle; a process that had our pid may have left some."""
        while True:
            path = os.path.join(self._temporary, f"{os.getpid()}-{next(self._numbers)}")
            with suppress(FileExistsError):
                return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def _holds(self, path: str, data: bytes | memoryview) -> bool:
        with open(path, "rb") as file:
            is_same = os.fstat(file.fileno()).st_size == len(data) and file.read() == data
        if is_same:
            fsync_path(os.path.dirname(path))  # whoever linked it may not have come so far
        return is_same

    def _read(self, name: str, begin: int, end: int | None) -> bytes:
        path = self._path(name)
        try:
            with open(path, "rb") as file:
                file.seek(begin)
                data = file.read() if end is None else file.read(end - begin)
        except (FileNotFoundError, IsADirectoryError):
            raise ObjectMissing(f"{path!r} does not exist") from None
        except OSError as error:
            raise _problem(error, path) from error
        if end is not None and len(data) < end - begin:
            raise ObjectDamaged(f"{path!r} ends before byte {end}")
        return data
