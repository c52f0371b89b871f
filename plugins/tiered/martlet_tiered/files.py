"""Files of the table, as its log describes them."""

import datetime
import json
from collections.abc import Mapping

from msgspec import Struct

from martlet_tiered.names import DataName, parse_data

__all__ = ["DataFile"]


class DataFile(Struct, frozen=True):
    """A Parquet file of the table; `path` is relative to the table.

    `minimum` and `maximum` have values of columns that have any; times are datetimes. `rows` is None if whoever wrote
    the file has not said.
    """

    path: str
    date: str
    kind: str
    bytes: int
    modified_ms: int
    rows: int | None
    minimum: Mapping[str, object]
    maximum: Mapping[str, object]

    @property
    def name(self) -> DataName | None:
        """The parts of the path; None if another program wrote the file, as Delta's OPTIMIZE does."""
        return parse_data(self.path)

    @property
    def partition(self) -> dict[str, str | None]:
        """The values of the table's partition columns."""
        return {"date": self.date, "kind": self.kind}

    @property
    def statistics(self) -> str:
        """The statistics in the form of Delta's log (PROTOCOL.md, Per-file Statistics)."""
        values = {"numRecords": self.rows, "minValues": self.minimum, "maxValues": self.maximum, "nullCount": {}}
        return json.dumps(values, default=_time)


def _time(value: object) -> str:
    if not isinstance(value, datetime.datetime):
        raise TypeError(f"{value!r} is no value of a statistic")
    return value.astimezone(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
