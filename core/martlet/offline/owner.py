"""Who owns the files of a data directory: what root writes there must be open to the user of the broker."""

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final

__all__ = ["give_to_owner", "owner_kept"]

ROOT: Final = 0


@contextmanager
def owner_kept(directory: str) -> Generator[None]:
    """Do work on the files of *directory*; if root does it, the directory's owner gets the files that root has made."""
    try:
        yield
    finally:
        give_to_owner(directory, directory)


def give_to_owner(tree: str, directory: str) -> None:
    """If root runs this, give its files in *tree* to the owner of *directory*.

    Files with several names are left alone: the owner of the directory may have linked a file of root's.
    """
    try:
        owner = os.stat(directory)
    except OSError:
        return
    if os.geteuid() != ROOT or owner.st_uid == ROOT:
        return
    with suppress(PermissionError):  # a file system without owners
        for _, directories, files, folder in os.fwalk(tree, topdown=False):
            for name in (*directories, *files):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if status.st_uid == ROOT and (stat.S_ISDIR(status.st_mode) or status.st_nlink == 1):
                    os.chown(name, owner.st_uid, owner.st_gid, dir_fd=folder, follow_symlinks=False)
        if os.stat(tree).st_uid == ROOT:
            os.chown(tree, owner.st_uid, owner.st_gid)
