"""Writes messages of a topic or an archive to a topic again, each exactly once, at no more than a given rate.

A replay is a streaming query, and its checkpoint is the replay: a run that died continues with it. Each message has its
origin in properties; what brokers and clients wrote into its own properties is over, and does not come along.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

from martlet_remoting.reserved import RESERVED
from martlet_spark.cluster import Cluster
from martlet_spark.columns import COLUMNS
from martlet_spark.errors import OptionError
from martlet_spark.offsets import decode
from martlet_spark.options import SOURCE, parse
from martlet_spark.pipelines.archived import spark_columns
from martlet_spark.pipelines.progress import Show, StreamReport, follow_query, ignore
from martlet_spark.pipelines.session import plain_errors
from martlet_spark.topics import Subscribed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Replay", "replay"]

# Whether a query, judging by its progress, has nothing left to do.
Done: TypeAlias = Callable[[Mapping[str, Any]], bool]
# Spark needs some 0.2 s for a batch, so shorter ones would be slower than asked for.
BATCH_S: Final = 2
ORIGIN: Final = (
    "map('ORIGIN_TOPIC', topic, 'ORIGIN_BROKER', broker, 'ORIGIN_QUEUE', string(queue),"
    " 'ORIGIN_OFFSET', string(`offset`), 'ORIGIN_STORED_MS', string(unix_millis(store_ts)))"
)
ORIGIN_NAMES: Final = ("ORIGIN_TOPIC", "ORIGIN_BROKER", "ORIGIN_QUEUE", "ORIGIN_OFFSET", "ORIGIN_STORED_MS")
NOT_REPLAYED: Final = ", ".join(f"'{name}'" for name in sorted({*RESERVED, *ORIGIN_NAMES}))


@final
@dataclass(frozen=True, slots=True)
class Replay:
    """What is replayed, and how.

    *where* is a condition in Spark's SQL on the columns of a message, and *until_ms* the time of storing before which
    messages are replayed. *rate* is in messages a second; 0 is as fast as possible.
    """

    to: str
    checkpoint: str
    where: str = ""
    from_ms: int = 0
    until_ms: int = 0
    rate: int = 0
    guarantee: str = "exactly-once"


def replay(
    session: "SparkSession",
    source: Mapping[str, str] | str,
    cluster: Mapping[str, str],
    plan: Replay,
    show: Show = ignore,
) -> StreamReport:
    """Replay what *source* has now and was not replayed yet.

    *source* are options of the data source, or the path of an archive that Spark can read. *cluster* are the options of
    the sink for its connection.

    Raises:
      PipelineError: it failed; a new run continues.
      OptionError: an option is invalid.
    """
    if not plan.to or not plan.checkpoint:
        raise OptionError("a replay needs a topic to write to and a checkpoint; give both")
    with plain_errors():
        if isinstance(source, str):
            messages, batch_s = _archived(session, source, plan), _batch_s(session, source, plan)
            is_done: Done = _is_idle
        else:
            messages, batch_s, is_done = _of_topics(session, source, plan), BATCH_S, _reached(source)
        writer = _selected(messages, plan).writeStream.format("martlet").outputMode("append")
        writer = writer.options(**cluster, topic=plan.to, guarantee=plan.guarantee)
        writer = writer.option("checkpointLocation", plan.checkpoint)
        if not plan.rate:
            return follow_query(writer.trigger(availableNow=True).start(), show)
        return follow_query(writer.trigger(processingTime=f"{batch_s} seconds").start(), show, is_done)


def _of_topics(session: "SparkSession", source: Mapping[str, str], plan: Replay) -> "DataFrame":
    options = {**source, "columns": ",".join(COLUMNS)}
    if plan.from_ms:
        options |= {"startingTimestamp": str(plan.from_ms), "startingOffsetsByTimestampStrategy": "latest"}
    else:
        options["startingOffsets"] = "earliest"
    if plan.rate:
        options["maxOffsetsPerTrigger"] = str(plan.rate * BATCH_S)
    return session.readStream.format("martlet").options(**options).load()


def _archived(session: "SparkSession", path: str, plan: Replay) -> "DataFrame":
    reader = session.readStream.schema(spark_columns())
    return (reader.option("maxFilesPerTrigger", "1") if plan.rate else reader).parquet(path)


def _batch_s(session: "SparkSession", path: str, plan: Replay) -> int:
    """Return how long a batch of one file takes at the rate of *plan*."""
    if not plan.rate:
        return BATCH_S
    files = session.read.schema(spark_columns()).parquet(path).groupBy("_metadata.file_path").count()
    largest = files.selectExpr("max(count) AS most").collect()[0].most or 0
    return max(ceil(largest / plan.rate), BATCH_S)


def _is_idle(progress: Mapping[str, Any]) -> bool:
    return bool(progress["numInputRows"] == 0)


def _reached(source: Mapping[str, str]) -> Done:
    """Return what says whether a query has read all messages that are there now."""
    options = parse(source, SOURCE)
    cluster = Cluster(options["endpoints"], options.security, options["timeoutMs"] / 1000)
    heads = {queue: end for queue, (_, end) in Subscribed(cluster, options).bounds().items()}

    def reached(progress: Mapping[str, Any]) -> bool:
        text = progress["sources"][0]["endOffset"]
        offsets = decode(json.loads(text) if isinstance(text, str) else text) if text else {}
        return all(offsets.get(queue, 0) >= end for queue, end in heads.items())

    return reached


def _selected(messages: "DataFrame", plan: Replay) -> "DataFrame":
    """Return what of *messages* is replayed, in the columns of the sink."""
    for condition in (
        f"store_ts >= timestamp_millis({plan.from_ms})" if plan.from_ms else "",
        f"store_ts < timestamp_millis({plan.until_ms})" if plan.until_ms else "",
        plan.where,
    ):
        messages = messages.where(condition) if condition else messages
    own = f"map_filter(properties, (name, value) -> name NOT IN ({NOT_REPLAYED}) AND value != '')"
    return messages.selectExpr("key", "tag", "body", f"map_concat({own}, {ORIGIN}) AS properties")
