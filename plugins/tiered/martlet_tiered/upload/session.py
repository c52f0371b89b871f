"""What an uploader does with the table, in blocking calls; each belongs to one epoch."""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, final

from martlet_tiered.errors import TierError
from martlet_tiered.files import DataFile
from martlet_tiered.format.writing import TABLE_SCHEMA
from martlet_tiered.owners import Owners, Reach
from martlet_tiered.table import ColdTable

__all__ = ["OpenTable", "UploadSession", "open_session"]

# Opens the store, and makes a handle of the table, which is not open yet.
OpenTable: TypeAlias = Callable[[], ColdTable]


@final
class UploadSession:
    """A table that this broker has taken over, until something fails; then the next session has a new epoch.

    So no object of a failed attempt has the name of a later one, and a call that hangs cannot commit after the next
    session has begun.
    """

    def __init__(self, table: ColdTable) -> None:
        self.epoch: Final = table.epoch
        self.table: Final = table

    @property
    def end(self) -> int | None:
        """The log position up to which ranges are in the table; None before the first."""
        return self.table.end

    @property
    def reach(self) -> Reach:
        """Which states of the broker count."""
        return self.table.reach

    def files(self) -> list[DataFile]:
        """Return the files of the table."""
        return self.table.files()

    def append(self, begin: int, end: int, files: Sequence[DataFile]) -> None:
        """Commit the range, as `ColdTable.append`."""
        self.table.append(begin, end, files)

    def take_foreign(self) -> int:
        """Return the number of commits of other programs since the last call."""
        count = len(self.table.foreign)
        self.table.foreign.clear()
        return count

    def tidy(self, now_ms: int, removed_hours: int | None) -> str:
        """Write a checkpoint if one is due, and remove objects that nobody needs; return what failed.

        These are files that the table has not had for *removed_hours*; None: remove nothing.
        """
        try:
            self.table.checkpoint()
            if removed_hours is not None:
                self.table.collect(now_ms, removed_hours)
        except TierError as error:
            return str(error)
        return ""


def open_session(open_table: OpenTable, owner: str, last: Owners) -> UploadSession:
    """Open the table and take it over as *owner*, unless another data directory did after *last*.

    Raises:
      Fenced: another data directory has taken the table over since.
    """
    table = open_table()
    table.open(TABLE_SCHEMA)
    table.take_over(owner, last)
    return UploadSession(table)
