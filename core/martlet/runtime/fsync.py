"""Makes files and directories durable by path."""

import os

__all__ = ["fsync_path"]


def fsync_path(path: str) -> None:
    """Return after the data of the file *path*, or the names in the directory *path*, are on the disk.

    Raises:
      OSError: *path* cannot be opened, or the disk failed.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
