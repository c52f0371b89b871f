"""The columns of the source: names, types, and the selection of a query.

A column that a query does not select is not decoded. Spark's Python data sources get no column pruning from Spark, so a
query selects columns with the option ``columns`` or with a schema of its own.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Final

import pyarrow as pa

from martlet_spark.errors import OptionError

__all__ = ["COLUMNS", "DEFAULT", "MS_MAX", "MS_MIN", "PROPERTIES", "TIMESTAMP", "arrow_schema", "select"]

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
DEFAULT: Final = ("topic", "queue", "offset", "key", "store_ts", "body")


def select(names: Iterable[str]) -> tuple[str, ...]:
    """Check the selected columns *names*, and return them.

    Raises:
      OptionError: a column is unknown or selected twice, or none is selected.
    """
    selected: list[str] = []
    for name in names:
        if name not in COLUMNS:
            near = get_close_matches(name.lower(), COLUMNS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the columns are {', '.join(COLUMNS)}"
            raise OptionError(f"column {name!r} does not exist; {hint}")
        if name in selected:
            raise OptionError(f"column {name!r} is selected twice; name it once")
        selected.append(name)
    if not selected:
        raise OptionError(f"no column is selected; the columns are {', '.join(COLUMNS)}")
    return tuple(selected)


def arrow_schema(names: Sequence[str]) -> pa.Schema:
    """Return the Arrow schema of the columns *names*, equal to the one that Spark derives from its own schema."""
    return pa.schema([pa.field(name, COLUMNS[name][1]) for name in names])
