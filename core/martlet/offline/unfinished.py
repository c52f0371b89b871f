"""The folder ``TARGET.unfinished``, in which the backup ``TARGET`` is made.

The folder has a lock file and the copy. A backup that fails or is interrupted removes it. A killed backup cannot; then
the next backup to the same target recognizes the folder by its lock file, and begins again in it.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final

from martlet.errors import StoreError, StoreLocked
from martlet.offline.backup import remove_tree
from martlet.store.disk.files import Disk

__all__ = ["unfinished_backup"]

LOCK: Final = "backup.lock"
COPY: Final = "copy"


@contextmanager
def unfinished_backup(target: str, disk: Disk) -> Generator[str]:
    """Yield the directory in which to make the backup *target*; it gets that name at the end of the block.

    If the block fails or is interrupted, the directory is removed, with the parent directories that were created.

    Raises:
      StoreError: *target* exists, another process is making it, or something else has the name of the folder.
    """
    folder = f"{target}.unfinished"
    _check(target, folder, disk)
    created = _missing_directories(os.path.dirname(target))
    try:
        disk.make_directory(folder)
        lock = disk.lock(f"{folder}/{LOCK}")
    except StoreLocked as error:
        raise StoreError(f"another process is making the backup {target!r}; wait for it, or choose another") from error
    try:
        _remove(f"{folder}/{COPY}", disk)
        yield f"{folder}/{COPY}"
        disk.rename(f"{folder}/{COPY}", target)
    finally:
        # The lock file goes last: a folder without one is not recognized.
        for name in (COPY, LOCK):
            _remove(f"{folder}/{name}", disk)
        disk.close(lock)
        for path in (folder, *created):  # parent directories of a finished backup are not empty
            with suppress(OSError):
                disk.remove_directory(path)
    disk.sync_directory(os.path.dirname(target))


def _check(target: str, folder: str, disk: Disk) -> None:
    if os.path.lexists(target):
        raise StoreError(f"{target!r} exists; choose another target, or remove it")
    names = disk.names(folder)
    is_ours = os.path.isdir(folder) and not os.path.islink(folder) and names in ([], [LOCK], [LOCK, COPY])
    if os.path.lexists(folder) and not is_ours:
        raise StoreError(f"{folder!r} exists and is not an unfinished backup; choose another target, or remove it")


def _missing_directories(directory: str) -> list[str]:
    """Return *directory* and its parents, as far as they do not exist, the innermost first."""
    missing = []
    while not os.path.lexists(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    return missing


def _remove(path: str, disk: Disk) -> None:
    with suppress(OSError):
        if os.path.isdir(path):
            remove_tree(disk, path)
        else:
            disk.unlink(path)
