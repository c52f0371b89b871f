"""Dead letters of a consumer group, of any number: grouped by cause, exported, and sent again.

A dead letter records its origin and its deliveries, not the exception of the consumer. So its cause is its first topic,
its tag, and the way and number of its deliveries. An application that puts the reason of a failure into a property of
the message can group by that property too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from pyspark.sql import functions as F

from martlet_columns.decode import RAW
from martlet_columns.schema import COLUMNS
from martlet_spark.errors import OptionError
from martlet_spark.pipelines.checkpoints import bind, check_bound, read_offsets
from martlet_spark.pipelines.progress import OBSERVED, SENT, UNDECODED, Show, StreamReport, follow_query, ignore
from martlet_spark.pipelines.replay import BATCH_BYTES, GUARANTEES, between, send_again
from martlet_spark.pipelines.session import plain_errors

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = [
    "CAUSE",
    "LEFT_OUT",
    "PREFIX",
    "Letters",
    "Resend",
    "causes",
    "read_dead_letters",
    "read_letters",
    "resend",
    "unsent",
]

PREFIX: Final = "%DLQ%"
CAUSE: Final = ("origin_topic", "tag", "way", "deliveries")
# The topic of the first delivery: clients with retry topics note it, and brokers note it for messages that are popped.
ORIGIN: Final = "coalesce(properties['RETRY_TOPIC'], properties['DLQ_ORIGIN_TOPIC'])"
WAY: Final = (
    "CASE WHEN properties['RETRY_TOPIC'] IS NOT NULL THEN 'retries'"
    " WHEN properties['DLQ_ORIGIN_TOPIC'] IS NOT NULL THEN 'pops' ELSE 'unknown' END"
)
# Name of the count of letters without a property for their original topic, which `resend` does not send.
LEFT_OUT: Final = "left_out"
EXAMPLE_CHARS: Final = 60
EXAMPLE: Final = (
    "named_struct('queue', queue, 'offset', `offset`, 'msg_id', msg_id, 'key', key,"
    f" 'body', left(translate(decode(body, 'UTF-8'), '\\n\\r\\t', '   '), {EXAMPLE_CHARS}))"
)


@final
@dataclass(frozen=True, slots=True)
class Letters:
    """Selected dead letters of *group*: by the time of storing, and by *where*, a condition in Spark's SQL."""

    group: str
    where: str = ""
    from_ms: int = 0
    until_ms: int = 0

    def options(self, source: Mapping[str, str]) -> dict[str, str]:
        """Return the options of the data source; *source* are the options for the connection."""
        if not self.group:
            raise OptionError("the group is empty; give the name of a consumer group")
        own = {"subscribe": f"{PREFIX}{self.group}", "columns": ",".join(COLUMNS)}
        return {"undecodableBody": RAW, **source, **own}

    def select(self, letters: "DataFrame") -> "DataFrame":
        """Return the selected rows of *letters*, with the columns of their causes."""
        found = letters.selectExpr("*", f"{ORIGIN} AS origin_topic", f"{WAY} AS way", "reconsume_times AS deliveries")
        for condition in (*between(self.from_ms, self.until_ms), self.where):
            found = found.where(condition) if condition else found
        return found


@final
@dataclass(frozen=True, slots=True)
class Resend:
    """The target and checkpoint of `resend`: *topic*, or if it is empty, the first topic of each letter.

    A letter is sent once with the same *checkpoint*. A batch, which is a transaction of the brokers, has about
    *batch_bytes* of letters.
    """

    checkpoint: str
    topic: str = ""
    guarantee: str = GUARANTEES[0]
    batch_bytes: int = BATCH_BYTES


def read_dead_letters(session: "SparkSession", source: Mapping[str, str], group: str, where: str = "") -> "DataFrame":
    """Return the dead letters of *group*, all columns of the source and ``origin_topic``, ``way`` and ``deliveries``.

    *source* are the options of the data source for the connection; *where* is a condition in Spark's SQL.
    """
    return read_letters(session, source, Letters(group, where))


def read_letters(session: "SparkSession", source: Mapping[str, str], letters: Letters) -> "DataFrame":
    """Like `read_dead_letters`, for the selected *letters*."""
    return letters.select(session.read.format("martlet").options(**letters.options(source)).load())


def resend(
    session: "SparkSession",
    source: Mapping[str, str],
    letters: Letters,
    plan: Resend,
    show: Show = ignore,
    cluster: Mapping[str, str] | None = None,
) -> StreamReport:
    """Send *letters* again, each exactly once; skip letters that were sent with this checkpoint before.

    They are sent to *cluster*, which are the options of the sink for its connection; default: those of *source*.

    Each copy has the letter's place in the dead letter topic in its properties; the letters stay in that topic. The
    report counts letters that do not name their first topic as ``left_out``, unless all go to one topic.

    Raises:
      PipelineError: it failed; a new run continues.
      OptionError: an option is invalid, or the checkpoint belongs to another selection.
    """
    limits = {"startingOffsets": "earliest", "maxBytesPerTrigger": str(plan.batch_bytes)}
    choices = _choices(letters, plan)
    with plain_errors():
        check_bound(session, plan.checkpoint, "resend", choices)
        stream = session.readStream.format("martlet").options(**letters.options(source), **limits).load()
        rows = letters.select(stream).withColumn("to", _target(plan))
        rows = rows.observe(OBSERVED + LEFT_OUT, F.count_if(F.isnull("to")).alias("count")).where("`to` IS NOT NULL")
        writer = send_again(rows, source if cluster is None else cluster, plan.checkpoint, plan.topic, plan.guarantee)
        bind(session, plan.checkpoint, choices)
        query = writer.trigger(availableNow=True).start()
        return follow_query(query, show, observed=(SENT, LEFT_OUT, UNDECODED))


def unsent(session: "SparkSession", source: Mapping[str, str], letters: Letters, plan: Resend) -> "DataFrame":
    """Return the number of letters that `resend` would send, as ``letters`` per ``topic``, null for no topic."""
    check_bound(session, plan.checkpoint, "resend", _choices(letters, plan))
    found = read_letters(session, source, letters)
    for queue, offset in read_offsets(session, plan.checkpoint).items():
        broker = queue.broker_name.replace("\\", "\\\\").replace("'", "\\'")
        found = found.where(f"NOT (broker = '{broker}' AND queue = {queue.queue_id} AND offset < {offset})")
    return found.groupBy(_target(plan).alias("topic")).agg(F.count("*").alias("letters")).orderBy("topic")


def _choices(letters: Letters, plan: Resend) -> dict[str, object]:
    return {
        "group": letters.group,
        "where": letters.where,
        "from": letters.from_ms,
        "until": letters.until_ms,
        "topic": plan.topic,
    }


def _target(plan: Resend) -> "Column":
    """Return the topic to send a letter to; null if the letter names none."""
    return F.lit(plan.topic) if plan.topic else F.col("origin_topic")


def causes(letters: "DataFrame", by: Sequence[str] = ()) -> "DataFrame":
    """Return the number of *letters* per cause, most first, with the oldest letter as ``example``.

    *by* are names of properties that are part of the cause.
    """
    keys = [F.col(name) for name in CAUSE]
    keys += [F.col("properties").getItem(name).alias(name) for name in by]
    found = letters.groupBy(*keys).agg(
        F.count("*").alias("letters"),
        F.min("store_ts").alias("first"),
        F.max("store_ts").alias("last"),
        F.min_by(F.expr(EXAMPLE), F.struct("store_ts", "queue", "offset")).alias("example"),
    )
    return found.orderBy(F.desc("letters"), *CAUSE, *(F.col(f"`{name}`") for name in by))
