"""Dead letters of a consumer group, of any number: grouped by cause, and exported.

A dead letter says where it came from and how it was tried, not which exception the consumer had. So its cause is the
topic it was first in, its tag, the way of its deliveries and how many there were. An application that puts the reason
of a failure into a property of the message can group by that property too.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from martlet_spark.columns import COLUMNS
from martlet_spark.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["CAUSE", "PREFIX", "causes", "read_dead_letters"]

PREFIX: Final = "%DLQ%"
CAUSE: Final = ("origin_topic", "tag", "way", "deliveries")
# The topic of the first delivery: as clients with retry topics note it, and as brokers do for messages that are popped.
ORIGIN: Final = "coalesce(properties['RETRY_TOPIC'], properties['DLQ_ORIGIN_TOPIC'])"
WAY: Final = (
    "CASE WHEN properties['RETRY_TOPIC'] IS NOT NULL THEN 'retries'"
    " WHEN properties['DLQ_ORIGIN_TOPIC'] IS NOT NULL THEN 'pops' ELSE 'unknown' END"
)
EXAMPLE_CHARS: Final = 60
EXAMPLE: Final = (
    "named_struct('queue', queue, 'offset', `offset`, 'msg_id', msg_id, 'key', key,"
    f" 'body', left(translate(decode(body, 'UTF-8'), '\\n\\r\\t', '   '), {EXAMPLE_CHARS}))"
)


def read_dead_letters(session: "SparkSession", source: Mapping[str, str], group: str, where: str = "") -> "DataFrame":
    """Return the dead letters of *group*, all columns of the source and ``origin_topic``, ``way`` and ``deliveries``.

    *source* are the options of the data source for the connection; *where* is a condition in Spark's SQL.
    """
    if not group:
        raise OptionError("the group is empty; give the name of a consumer group")
    options = {**source, "subscribe": f"{PREFIX}{group}", "columns": ",".join(COLUMNS)}
    letters = session.read.format("martlet").options(**options).load()
    found = letters.selectExpr("*", f"{ORIGIN} AS origin_topic", f"{WAY} AS way", "reconsume_times AS deliveries")
    return found.where(where) if where else found


def causes(letters: "DataFrame", by: Sequence[str] = ()) -> "DataFrame":
    """Return how many *letters* each cause has, most first, with the oldest of them as ``example``.

    *by* are names of properties that are part of the cause.
    """
    from pyspark.sql import functions as F

    keys = [F.col(name) for name in CAUSE]
    keys += [F.col("properties").getItem(name).alias(name) for name in by]
    found = letters.groupBy(*keys).agg(
        F.count("*").alias("letters"),
        F.min("store_ts").alias("first"),
        F.max("store_ts").alias("last"),
        F.min_by(F.expr(EXAMPLE), F.struct("store_ts", "queue", "offset")).alias("example"),
    )
    return found.orderBy(F.desc("letters"), *CAUSE, *(F.col(f"`{name}`") for name in by))
