"""The columns of an archive: all of a message's, partitioned by topic and by the day it was stored (UTC)."""

from typing import Final

import pyarrow as pa

from martlet_columns.schema import COLUMNS

__all__ = ["DATE", "MESSAGE_COLUMNS", "arrow_schema", "spark_columns"]

# The columns in an archive's files, in order. Topic and date follow: their values are in the paths of the files.
MESSAGE_COLUMNS: Final = tuple(name for name in COLUMNS if name != "topic")
# SQL for the day, independent of the session's time zone.
DATE: Final = "date_add(DATE'1970-01-01', CAST(floor(unix_millis(store_ts) / 86400000) AS INT))"


def arrow_schema() -> pa.Schema:
    """Return the schema of the whole archive."""
    fields = [pa.field(name, COLUMNS[name][1]) for name in MESSAGE_COLUMNS]
    return pa.schema([*fields, pa.field("topic", pa.string()), pa.field("date", pa.date32())])


def spark_columns() -> str:
    """Return the columns of the whole archive as SQL."""
    fields = [f"`{name}` {COLUMNS[name][0]}" for name in MESSAGE_COLUMNS]
    return ", ".join([*fields, "topic string", "date date"])
