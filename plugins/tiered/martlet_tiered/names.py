"""Names of objects, relative to the prefix of the cold tier.

``table/`` is the Delta table, and ``table/date=2026-11-28/kind=topic/e3-0-268435456.parquet`` one of its files: what
epoch 3 uploaded of the log from position 0 to 268435456. A file that replaces others has their range, and the number of
the rewrite and of the file in it: ``e3-0-536870912-r7-0.parquet``.
"""

import datetime
import re
from typing import Final, Literal, get_args

from msgspec import Struct

__all__ = ["DATA_FOLDER", "LOG_FOLDER", "DataName", "Kind", "commit_name", "parse_commit", "parse_data", "probe_name"]

Kind = Literal["topic", "retry", "dlq", "internal"]

DATA_FOLDER: Final = "table"
LOG_FOLDER: Final = "table/_delta_log"

NUMBER: Final = r"(0|[1-9][0-9]{0,18})"
DATA: Final = re.compile(
    rf"date=([0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}})/kind=({'|'.join(get_args(Kind))})"
    rf"/e{NUMBER}-{NUMBER}-{NUMBER}(?:-r{NUMBER}-{NUMBER})?\.parquet",
)
COMMIT: Final = re.compile(r"([0-9]{20})\.json")


class DataName(Struct, frozen=True):
    """What the name of a file of the table says.

    `begin` and `end` are log positions; the file has records from `begin` on, before `end`. `rewrite` is 0 for an
    uploaded file.
    """

    date: str
    kind: Kind
    epoch: int
    begin: int
    end: int
    rewrite: int = 0
    part: int = 0

    @property
    def path(self) -> str:
        """The name of the file, relative to the table."""
        suffix = f"-r{self.rewrite}-{self.part}" if self.rewrite else ""
        return f"date={self.date}/kind={self.kind}/e{self.epoch}-{self.begin}-{self.end}{suffix}.parquet"


def _is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def parse_data(path: str) -> DataName | None:
    """Return what *path*, relative to the table, says; None if it is not exactly what `DataName.path` returns."""
    match = DATA.fullmatch(path)
    if match is None or not _is_date(match[1]):
        return None
    date, kind, epoch, begin, end, rewrite, part = match.groups()
    name = DataName(date, kind, int(epoch), int(begin), int(end), int(rewrite or 0), int(part or 0))  # type: ignore[arg-type]
    return name if name.epoch and name.begin < name.end and name.path == path else None


def commit_name(version: int) -> str:
    """Return the name of the object with commit *version* of the table."""
    return f"{LOG_FOLDER}/{version:020}.json"


def parse_commit(name: str) -> int | None:
    """Return the version of the commit in the object *name*; None if it is none."""
    folder, _, file = name.rpartition("/")
    match = COMMIT.fullmatch(file)
    return int(match[1]) if match and folder == LOG_FOLDER else None


def probe_name(unique: str) -> str:
    """Return a name for an object that only `probe` uses."""
    return f"probe/{unique}"
