"""The columns of an archive: all of a message's, partitioned by topic and by the day it was stored (UTC)."""

from typing import Final

import pyarrow as pa

from martlet_spark.columns import COLUMNS

__all__ = ["DATE", "MESSAGE_COLUMNS", "arrow_schema", "spark_columns"]

# The source's columns that an archive has, in order; then topic and date, which are in the paths of its files.
MESSAGE_COLUMNS: Final = tuple(name for name in COLUMNS if name != "topic")
# SQL for the day: the same whatever the session's time zone is.
DATE: Final = "date_add(DATE'1970-01-01', CAST(floor(unix_millis(store_ts) / 86400000) AS INT))"


def arrow_schema() -> pa.Schema:
    """Return the schema of the whole archive."""
    fields = [pa.field(name, COLUMNS[name][1]) for name in MESSAGE_COLUMNS]
    return pa.schema([*fields, pa.field("topic", pa.string()), pa.field("date", pa.date32())])


def spark_columns() -> str:
    """Return the same as SQL."""
    fields = [f"`{name}` {COLUMNS[name][0]}" for name in MESSAGE_COLUMNS]
    return ", ".join([*fields, "topic string", "date date"])
