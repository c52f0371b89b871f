"""The columns of a message: names and types, the same in Spark, in archives and in cold tables."""

from collections.abc import Sequence
from functools import cache
from typing import Final

import pyarrow as pa

__all__ = ["COLUMNS", "MS_MAX", "MS_MIN", "PROPERTIES", "RECORD_COLUMNS", "TIMESTAMP", "arrow_schema", "exact_schema"]

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
# Times outside of the years 1 to 9999 are null: a producer may have sent any number. The first and last two days of
# this range are null too: a time zone could move them out of Python's calendar, and `collect` would fail.
MS_MIN: Final = -62_135_596_800_000 + 2 * 86_400_000
MS_MAX: Final = 253_402_300_799_999 - 2 * 86_400_000
PROPERTIES: Final = pa.map_(pa.string(), pa.string())

# name -> (Spark's type, Arrow's type). All are nullable: Spark compares nullability too.
COLUMNS: Final[dict[str, tuple[str, pa.DataType]]] = {
    "topic": ("string", pa.string()),
    "broker": ("string", pa.string()),
    "queue": ("int", pa.int32()),
    "offset": ("bigint", pa.int64()),
    "key": ("string", pa.string()),
    "tag": ("string", pa.string()),
    "body": ("binary", pa.binary()),
    "properties": ("map<string,string>", PROPERTIES),
    "msg_id": ("string", pa.string()),
    "born_ts": ("timestamp", TIMESTAMP),
    "store_ts": ("timestamp", TIMESTAMP),
    "flag": ("int", pa.int32()),
    "reconsume_times": ("int", pa.int32()),
}

# The other columns of an exact table (`exact.py`): what a record has beside its message, and what is kept raw.
RECORD_COLUMNS: Final[dict[str, pa.DataType]] = {
    "_position": pa.int64(),
    "_sys_flag": pa.int32(),
    "_magic": pa.int32(),
    "_body_crc": pa.int32(),
    "_prepared_position": pa.int64(),
    "_born_host": pa.binary(),
    "_store_host": pa.binary(),
    "_properties": pa.binary(),
    "_body": pa.binary(),
    "_record": pa.binary(),
}


def arrow_schema(names: Sequence[str]) -> pa.Schema:
    """Return the Arrow schema of the columns *names*, equal to the one that Spark derives from its own schema."""
    return pa.schema([pa.field(name, COLUMNS[name][1]) for name in names])


@cache
def exact_schema() -> pa.Schema:
    """Return the Arrow schema of an exact table: the columns of a message, then those of its record."""
    return pa.schema([*arrow_schema(tuple(COLUMNS)), *(pa.field(*each) for each in RECORD_COLUMNS.items())])
