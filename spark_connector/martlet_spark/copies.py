"""The properties of a message that its sender has set, and that a copy of the message may have."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from martlet.records.reserved import PAST, PAST_PREFIXES, RESERVED

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["own_properties", "own_properties_sql"]


def own_properties(column: str = "properties") -> "Column":
    """Return the sender's own properties of the map *column*, for the column ``properties`` of the sink.

    Leaves out properties that brokers and clients set, the tag, the key, and empty values: the sink refuses them.
    """
    from pyspark.sql import functions as F

    return F.expr(own_properties_sql(f"`{column}`"))


def own_properties_sql(column: str, without: Iterable[str] = ()) -> str:
    """Return `own_properties` in Spark's SQL, without the properties *without*."""
    names = ", ".join(f"'{name}'" for name in sorted({*RESERVED, *PAST, *without}))
    prefixes = " AND ".join(f"NOT startswith(name, '{prefix}')" for prefix in PAST_PREFIXES)
    return f"map_filter({column}, (name, value) -> name NOT IN ({names}) AND {prefixes} AND value != '')"
