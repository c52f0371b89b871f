"""The table of a cold tier, opened by a program that only reads it, with its broker running or gone."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar, final

from martlet_tiered.config import TieredConfig
from martlet_tiered.delta import CommitNote, TableLog
from martlet_tiered.errors import TableRefused
from martlet_tiered.files import DataFile
from martlet_tiered.format.footer import FileFooter, read_footer
from martlet_tiered.local import LocalObjects
from martlet_tiered.location import LOCAL, TierLocation
from martlet_tiered.names import DATA_FOLDER, LOG_FOLDER
from martlet_tiered.objects import Objects
from martlet_tiered.remote import RemoteObjects
from martlet_tiered.table import BROKER_PREFIX, OWNER, reach_of

__all__ = ["OpenedTable", "objects_for_reads", "open_table"]

Result = TypeVar("Result")

# Commits of other programs that may follow the last one of a broker.
FOREIGN_MAX: Final = 100


@final
class OpenedTable:
    """A table as it was when it was opened.

    `end` is the log position up to which ranges are in it, `epoch` that of its owner.
    """

    def __init__(self, objects: Objects, log: TableLog, url: str) -> None:
        self.url: Final = url
        self.objects: Final = objects
        name = log.table.metadata().name or ""
        if not name.startswith(BROKER_PREFIX):
            raise TableRefused(f"the table at {url!r} is not of a cold tier; give the tiered.url of a broker")
        self.broker: Final = name.removeprefix(BROKER_PREFIX)
        self.version: Final = log.version
        self.epoch: Final = log.number(OWNER) or 0
        self.reach: Final = reach_of(log)
        self.end: Final = self.reach.end
        self.files: Final[Sequence[DataFile]] = sorted(log.files(), key=lambda file: file.path)
        self._log = log

    def last_commit(self) -> CommitNote | None:
        """Return what the last commit of a broker says about itself; None if it cannot be found."""
        for version in range(self.version, max(self.version - FOREIGN_MAX, -1), -1):
            note = self._log.note(version)
            if note.epoch:
                return note
        return None

    def last_upload_ms(self) -> int:
        """Return when the files of the last range were made, by the clock of their broker; 0 if that is unknown."""
        last = [file.modified_ms for file in self.files if file.name and file.name.end == self.end]
        return max(last, default=0)

    def footer(self, file: DataFile) -> FileFooter:
        """Return the footer of *file*. Raises as `read_footer`."""
        return read_footer(self.objects, f"{DATA_FOLDER}/{file.path}", file.bytes)

    def each(self, files: Sequence[DataFile], work: Callable[[DataFile], Result], at_once: int) -> Iterator[Result]:
        """Yield the results of *work* for each of *files*, in order; *at_once* of them run at the same time."""
        with ThreadPoolExecutor(at_once) as threads:
            yield from threads.map(work, files)


def open_table(config: TieredConfig) -> OpenedTable:
    """Return the table at `config.url`; nothing there is created or repaired.

    Raises:
      ConfigError: credentials are missing or unsafe.
      TierError: the store cannot be read, or has no table there.
    """
    location = TierLocation.of(config, os.environ)
    missing = TableRefused(f"there is no table at {location.url!r}; give the tiered.url of a broker that has uploaded")
    if location.scheme == LOCAL and not os.path.isdir(f"{location.prefix}/{LOG_FOLDER}"):
        raise missing  # and make no directory
    objects = objects_for_reads(location, config)
    log = TableLog(objects, location, config)
    if not log.open():
        raise missing
    return OpenedTable(objects, log, location.url)


def objects_for_reads(location: TierLocation, config: TieredConfig) -> Objects:
    """Return the objects at *location*, which must exist, for programs that only read them."""
    if location.scheme != LOCAL:
        return RemoteObjects(location, config)
    objects = LocalObjects(location.prefix)
    objects.can_tear = False  # only the broker repairs what a power cut has left
    return objects
