"""Writes messages of a topic or an archive to a topic again, each exactly once, at no more than a given rate.

A replay is a streaming query, identified by its checkpoint: with the same checkpoint, a new run continues one that
died. Each message has its origin in properties; properties that brokers and clients set on the original are not copied.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

from martlet_columns.decode import RAW
from martlet_columns.schema import COLUMNS
from martlet_spark.copies import own_properties_sql
from martlet_spark.errors import OptionError
from martlet_spark.options import SOURCE, START, named
from martlet_spark.pipelines.archive_log import kind_of
from martlet_spark.pipelines.archive_sink import ArchiveSource
from martlet_spark.pipelines.archived import spark_columns
from martlet_spark.pipelines.checkpoints import bind, check_bound, qualified
from martlet_spark.pipelines.progress import (
    OBSERVED,
    SENT,
    UNDECODED,
    Show,
    StreamReport,
    count_undecoded,
    follow_query,
    ignore,
)
from martlet_spark.pipelines.session import plain_errors
from martlet_spark.pipelines.storage import Location
from martlet_spark.read.offsets import decode
from martlet_spark.read.seam import bounds_of
from martlet_spark.read.topics import Subscribed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

__all__ = ["BATCH_BYTES", "GUARANTEES", "Replay", "between", "check_target", "replay", "send_again"]

# Whether a query, judging by its progress, has nothing left to do.
Done: TypeAlias = Callable[[Mapping[str, Any]], bool]
# Spark needs some 0.2 s for a batch, so shorter batches would miss the rate.
BATCH_S: Final = 2
BATCH_BYTES: Final = 256 << 20
ORIGIN: Final = (
    "map('ORIGIN_TOPIC', topic, 'ORIGIN_BROKER', broker, 'ORIGIN_QUEUE', string(queue),"
    " 'ORIGIN_OFFSET', string(`offset`), 'ORIGIN_STORED_MS', string(unix_millis(store_ts)))"
)
ORIGIN_NAMES: Final = ("ORIGIN_TOPIC", "ORIGIN_BROKER", "ORIGIN_QUEUE", "ORIGIN_OFFSET", "ORIGIN_STORED_MS")
OWN: Final = own_properties_sql("properties", ORIGIN_NAMES)
# Options of the source that select the messages to replay.
CHOOSING: Final = (
    "subscribe",
    "subscribePattern",
    "assign",
    "tags",
    "key",
    "sql",
    *(option.name for option in START),
)
GUARANTEES: Final = ("exactly-once", "at-least-once")


@final
@dataclass(frozen=True, slots=True)
class Replay:
    """A replay: its target, its selection of messages, and its rate.

    *where* is a condition in Spark's SQL on the columns of a message, and *until_ms* the time of storing before which
    messages are replayed. *rate* is in messages a second; 0 means as fast as possible. A batch, which is a transaction
    of the brokers, has about *batch_bytes*: of messages, or of an archive's files.
    """

    to: str
    checkpoint: str
    where: str = ""
    from_ms: int = 0
    until_ms: int = 0
    rate: int = 0
    guarantee: str = GUARANTEES[0]
    batch_bytes: int = BATCH_BYTES


def replay(
    session: "SparkSession",
    source: Mapping[str, str] | str,
    cluster: Mapping[str, str],
    plan: Replay,
    show: Show = ignore,
) -> StreamReport:
    """Replay the messages that *source* has now and that were not replayed yet.

    *source* are options of the data source, or the path of an archive. *cluster* are the options of
    the sink for its connection.

    Raises:
      PipelineError: it failed; a new run continues.
      OptionError: an option is invalid.
    """
    with plain_errors():
        check_target(source, plan)
        if isinstance(source, str):
            source = qualified(session, source)
        chosen = _choices(source, plan)
        check_bound(session, plan.checkpoint, "replay", chosen)
        kind = kind_of(source) if isinstance(source, str) else ""
        is_paced = kind in ("delta", "list")  # by its source
        batch_s = BATCH_S
        is_done: Done | None = _is_idle
        if isinstance(source, str):
            messages = _of_archive(session, source, kind, plan) if is_paced else _of_files(session, source, plan)
            batch_s = BATCH_S if is_paced else _batch_s(session, source, plan)
        else:
            messages, is_done = _of_topics(session, source, plan), _end_predicate(source)
        writer = send_again(_select(messages, plan), cluster, plan.checkpoint, plan.to, plan.guarantee)
        if plan.rate and not is_paced:
            writer = writer.trigger(processingTime=f"{batch_s} seconds")
        else:
            writer, is_done = writer.trigger(availableNow=True), None
        bind(session, plan.checkpoint, chosen)
        query = writer.start()
        return follow_query(query, show, is_done, observed=(SENT, UNDECODED))


def check_target(source: Mapping[str, str] | str, plan: Replay) -> None:
    """Fail if *plan* cannot work for *source*, judging by the options alone: Spark need not have started.

    Raises:
      OptionError: the target is missing, or is the source.
    """
    if not plan.to or not plan.checkpoint:
        raise OptionError("a replay needs a topic to write to and a checkpoint; give both")
    if isinstance(source, str) or 0 < plan.until_ms <= time.time() * 1000:
        return
    if Subscribed.of(source).selects_topic(plan.to):
        text = f"topic {plan.to!r} is replayed to itself, so each run would send again what the last one has sent"
        raise OptionError(f"{text}; give an end in the past with --until, or another topic")


def send_again(
    messages: "DataFrame", cluster: Mapping[str, str], checkpoint: str, topic: str, guarantee: str = GUARANTEES[0]
) -> "DataStreamWriter":
    """Return the query that sends *messages*, which have the columns of the source, to *topic*, or to the topic in
    their column ``to``; it counts them as `SENT`.
    """
    from pyspark.sql import functions as F

    columns = ["key", "tag", "body", f"map_concat({OWN}, {ORIGIN}) AS properties"]
    found = count_undecoded(messages).selectExpr(*columns, *(() if topic else ("`to` AS topic",)))
    writer = (
        found.observe(OBSERVED + SENT, F.count(F.lit(1)).alias("count"))
        .writeStream.format("martlet")
        .outputMode("append")
    )
    writer = writer.options(**cluster, guarantee=guarantee, **({"topic": topic} if topic else {}))
    return writer.option("checkpointLocation", checkpoint)


def _choices(source: Mapping[str, str] | str, plan: Replay) -> dict[str, object]:
    """Return the choices that a checkpoint is bound to."""
    own = {"to": plan.to, "where": plan.where, "from": plan.from_ms, "until": plan.until_ms}
    if isinstance(source, str):
        return {**own, "archive": source}
    given = named(source, SOURCE)
    return {**own, **{name: given.get(name, "") for name in CHOOSING}}


def _of_topics(session: "SparkSession", source: Mapping[str, str], plan: Replay) -> "DataFrame":
    options = {"undecodableBody": RAW, **source, "columns": ",".join(COLUMNS)}
    if plan.from_ms:
        options |= {"startingTimestamp": str(plan.from_ms), "startingOffsetsByTimestampStrategy": "latest"}
    elif not named(source, START):
        options["startingOffsets"] = "earliest"
    if plan.rate:
        options["maxOffsetsPerTrigger"] = str(plan.rate * BATCH_S)
    else:
        options["maxBytesPerTrigger"] = str(plan.batch_bytes)
    return session.readStream.format("martlet").options(**options).load()


def _of_archive(session: "SparkSession", path: str, kind: str, plan: Replay) -> "DataFrame":
    """Return the stream of an archive that Spark cannot read without jars."""
    session.dataSource.register(ArchiveSource)
    limits = {"rate": plan.rate, "batchRows": plan.rate * BATCH_S, "batchBytes": plan.batch_bytes}
    options = {**Location.of(path).options, "kind": kind, **{name: str(value) for name, value in limits.items()}}
    return session.readStream.format(ArchiveSource.name()).options(**options).load()


def _of_files(session: "SparkSession", path: str, plan: Replay) -> "DataFrame":
    reader = session.readStream.schema(spark_columns())
    limit = ("maxFilesPerTrigger", "1") if plan.rate else ("maxBytesPerTrigger", str(plan.batch_bytes))
    return reader.option(*limit).parquet(path)


def _batch_s(session: "SparkSession", path: str, plan: Replay) -> int:
    """Return how long a batch of one file takes at the rate of *plan*."""
    if not plan.rate:
        return BATCH_S
    files = session.read.schema(spark_columns()).parquet(path).groupBy("_metadata.file_path").count()
    largest = files.selectExpr("max(count) AS most").collect()[0].most or 0
    return max(ceil(largest / plan.rate), BATCH_S)


def _is_idle(progress: Mapping[str, Any]) -> bool:
    source = progress["sources"][0]
    return bool(source["startOffset"] == source["endOffset"])


def _end_predicate(source: Mapping[str, str]) -> Done:
    """Return the predicate on a query's progress that is true once it has read all messages that are there now."""
    heads = {queue: end for queue, (_, end) in bounds_of(source).items()}

    def reached(progress: Mapping[str, Any]) -> bool:
        text = progress["sources"][0]["endOffset"]
        offsets = decode(json.loads(text) if isinstance(text, str) else text) if text else {}
        return all(offsets.get(queue, 0) >= end for queue, end in heads.items())

    return reached


def between(from_ms: int, until_ms: int) -> list[str]:
    """Return the conditions that select by the time of storing; a bound of 0 is none."""
    begin = [f"store_ts >= timestamp_millis({from_ms})"] if from_ms else []
    return [*begin, f"store_ts < timestamp_millis({until_ms})"] if until_ms else begin


def _select(messages: "DataFrame", plan: Replay) -> "DataFrame":
    """Return the rows of *messages* to replay."""
    for condition in (*between(plan.from_ms, plan.until_ms), plan.where):
        messages = messages.where(condition) if condition else messages
    return messages
