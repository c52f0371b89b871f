"""The files of a data directory that no broker uses: read, changed and written under the directory's lock."""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from time import sleep
from typing import Final, final

import trio

from martlet.errors import Reason, Refused, StoreLocked
from martlet.runtime.steps import finish_now
from martlet.store.disk.data_directory import DataDirectory, lock_directory
from martlet.store.disk.files import Disk, Files
from martlet_acl.files import (
    FILES,
    POLICIES,
    SECRET_MODE,
    SECRETS,
    AclFilesError,
    LoadedFiles,
    load_newest,
    policies_in_steps,
    secrets_in_steps,
)
from martlet_acl.state import AclState

__all__ = ["OfflineFiles", "has_files", "locked"]

OPEN_FILES: Final = 8
PAUSE_S: Final = 0.1
COPIES: Final = 2  # the file and its previous generation, as a broker writes them


@contextmanager
def locked(directory: str, disk: Disk, tries: int = 1) -> Generator[None]:
    """Keep other processes from using *directory*, after *tries* to lock it.

    Raises:
      StoreLocked: another process uses it.
      OSError: there is no such directory.
    """
    lock = _lock(directory, disk, tries)
    try:
        yield
    finally:
        disk.close(lock)


def _lock(directory: str, disk: Disk, tries: int) -> int:
    for _ in range(tries - 1):
        with suppress(StoreLocked):
            return lock_directory(directory, disk)
        sleep(PAUSE_S)
    return lock_directory(directory, disk)


def has_files(directory: str, disk: Disk) -> bool:
    """Whether *directory* has rules, of whatever generation."""
    return any(name.startswith("acl.json") for name in disk.names(f"{directory}/config"))


@final
class OfflineFiles:
    """The state in the files of *directory*, which the caller has locked (`martlet_acl.administration.StateHolder`).

    With *state* the files are written anew.

    Raises:
      AclFilesError: the files are missing or invalid.
    """

    def __init__(self, directory: str, disk: Disk, state: AclState | None = None) -> None:
        self.lock = trio.Lock()
        self._files = DataDirectory(directory, disk, Files(disk, OPEN_FILES))
        loaded = load_newest(self._files.read_generations) if state is None else None
        self.loaded: LoadedFiles | None = loaded
        self.state = state if state is not None else loaded.state  # type: ignore[union-attr]

    async def take_edits(self) -> None:
        """Raise `AclFilesError` if a newest file has errors: a change must not replace what somebody has edited."""
        if self.loaded is not None and self.loaded.rejected:
            raise AclFilesError(list(self.loaded.warnings))

    def note_change(self) -> None:
        """Do nothing: `wait_saved` writes the files."""

    async def wait_saved(self) -> None:
        """Write both files.

        Raises:
          Refused: the disk does not take them (Reason.UNAVAILABLE).
        """
        self.state.version += 1
        version, secrets = self.state.version, self.state.secrets
        contents = {
            SECRETS: (finish_now(secrets_in_steps(version, secrets)), SECRET_MODE),
            POLICIES: (finish_now(policies_in_steps(self.state, version, self.state.users, secrets)), 0o640),
        }
        try:
            for file in FILES:
                pieces, mode = contents[file]
                for _ in range(COPIES):
                    self._files.write_file(file, *pieces, mode=mode)
        except OSError as error:
            raise Refused(Reason.UNAVAILABLE, f"{file} cannot be written; {error.strerror or error}") from error
