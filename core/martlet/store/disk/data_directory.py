"""The data directory: its lock for one process, and the files that other modules keep in it."""

import logging
import os
from collections.abc import Iterator
from typing import final

from martlet.errors import StoreLocked
from martlet.store.disk.files import FILE_MODE, Disk, Files, Usage, atomic_write, read_file

__all__ = ["DataDirectory", "lock_directory"]


def lock_directory(path: str, disk: Disk) -> int:
    """Lock the data directory *path* and return the descriptor of its lock.

    Raises:
      StoreLocked: another process has it open; the text says which.
      OSError: the lock file cannot be opened.
    """
    try:
        return disk.lock(f"{path}/lock")
    except StoreLocked as error:
        pid = (read_file(disk, f"{path}/abort") or b"").decode("ascii", "replace").strip()
        holder = f"process {pid}" if pid else "another process"
        raise StoreLocked(f"data directory {path!r} is in use by {holder}; stop it first") from error


logger = logging.getLogger("martlet.store")


@final
class DataDirectory:
    """Locks a directory for one process, and marks it as in use: the file ``abort`` contains the process id."""

    def __init__(self, path: str, disk: Disk, files: Files) -> None:
        self.path = path
        self._disk = disk
        self._files = files
        self._lock_fd = -1
        self.marked = False

    @property
    def is_locked(self) -> bool:
        """Return whether this process has it open."""
        return self._lock_fd >= 0

    @property
    def has_mark(self) -> bool:
        """Return whether a process marked it and did not shut down in order."""
        return "abort" in self._disk.names(self.path)

    def lock(self) -> None:
        """Create missing parts of the directory, and lock it.

        Raises:
          StoreLocked: another process has it open; the text says which.
        """
        made = [self.path, *(f"{self.path}/{name}" for name in ("commitlog", "consumequeue", "index"))]
        for path in made:
            self._disk.make_directory(path)
        self._disk.sync_directory(self.path)
        self._lock_fd = lock_directory(self.path, self._disk)

    def release(self) -> None:
        """Close every file and release the lock."""
        self._files.close()
        if self._lock_fd >= 0:
            self._disk.close(self._lock_fd)
            self._lock_fd = -1

    def mark(self) -> None:
        """Mark the directory as open; the mark remains unless the process shuts down in order."""
        path = f"{self.path}/abort"
        if not self.has_mark:
            self._files.create(path, 0)
        self._files.truncate(path, 0)
        self._files.write(path, str(os.getpid()).encode(), 0)
        self._files.sync(path)
        self._files.forget(path)
        self._disk.sync_directory(self.path)
        self.marked = True

    def unmark(self) -> None:
        """Remove the mark, for an orderly shutdown."""
        if self.has_mark:
            self._disk.unlink(f"{self.path}/abort")
        self._disk.sync_directory(self.path)

    def usage(self) -> Usage:
        """Return how full the disk of the directory is."""
        return self._disk.usage(self.path)

    def probe(self) -> None:
        """Write 64 KiB and remove them again.

        Raises:
          OSError: the disk is full, or failed.
        """
        path = f"{self.path}/space.probe"
        if "space.probe" in self._disk.names(self.path):
            self._files.unlink(path)
        self._files.create(path, 0)
        try:
            self._files.write(path, b"\xff" * 65536, 0)
            self._files.sync(path)
        finally:
            self._files.unlink(path)

    def names(self, folder: str) -> list[str]:
        """Return the names in *folder* of the directory; an empty list if there is no such folder."""
        return self._disk.names(f"{self.path}/{folder}")

    def lacks_newest(self, name: str) -> bool:
        """Return whether only the previous generation of file *name* is left: the newest is missing or empty."""
        size_of = self._disk.path_size
        path = f"{self.path}/{name}"
        return size_of(f"{path}.bak") > 0 and size_of(path) <= 0 and size_of(f"{path}.tmp") <= 0

    def read_generations(self, name: str) -> Iterator[bytes]:
        """Yield the generations of file *name*, newest first; the caller stops at a valid one.

        After a crash between the two renames of a `write_file`, the newest is ``name.tmp``.
        """
        if self.lacks_newest(name):
            logger.warning("%s is missing or empty; using its previous generation", name)
        for generation in (name, f"{name}.tmp", f"{name}.bak"):
            data = read_file(self._disk, f"{self.path}/{generation}")
            if data:
                yield data

    def write_file(self, name: str, *pieces: bytes, mode: int = FILE_MODE) -> None:
        """Replace file *name* atomically, by one with *mode*; keep the previous content as ``name.bak``."""
        atomic_write(self._disk, f"{self.path}/{name}", *pieces, mode=mode)
