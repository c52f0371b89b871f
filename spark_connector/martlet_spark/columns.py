"""The columns that a query selects.

A column that a query does not select is not decoded. Spark's Python data sources get no column pruning from Spark, so a
query selects columns with the option ``columns`` or with a schema of its own.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

from martlet_columns.schema import COLUMNS
from martlet_spark.errors import OptionError

__all__ = ["DEFAULT", "select"]

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
