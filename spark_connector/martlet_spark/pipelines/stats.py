"""Statistics of topics: counts, sizes, latency and lag per window of time, topic and tag."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from martlet_columns.decode import RAW
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.cluster import check
from martlet_spark.connection import AnswerFrame, BrokerConnection
from martlet_spark.errors import OptionError
from martlet_spark.read.topics import Subscribed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["SOURCE_COLUMNS", "committed_offsets", "message_stats", "per_topic"]

SOURCE_COLUMNS: Final = "topic,broker,queue,offset,tag,body,born_ts,store_ts"
PERCENTILES: Final = "array(0.5, 0.95, 0.99)"
# (column, SQL) of the statistics per window, topic and tag; p is an array of percentiles, approximated to 0.01 %.
COLUMNS: Final = (
    ("messages", "count(*)"),
    ("bytes", "sum(size)"),
    ("size_mean", "round(avg(size), 1)"),
    ("size_p", f"percentile_approx(size, {PERCENTILES})"),
    ("size_max", "max(size)"),
    ("latency_ms_mean", "round(avg(latency_ms), 1)"),
    ("latency_ms_p", f"percentile_approx(latency_ms, {PERCENTILES})"),
    ("latency_ms_max", "max(latency_ms)"),
)
PLACES: Final = (("p50", 0), ("p95", 1), ("p99", 2))


def message_stats(
    session: "SparkSession", source: Mapping[str, str], window_s: int = 60, group: str = ""
) -> "DataFrame":
    """Return statistics of the messages that *source*, the options of the data source, selects.

    There is a row per window of *window_s*, topic and tag (null for none). Sizes are of bodies, in bytes; the latency
    of a message is from its creation by the producer's clock to its storage by the broker's. With *group*, the column
    ``lag`` counts the messages that this consumer group has not consumed.

    Raises:
      OptionError: an option is invalid.
      ReadError: the group's offsets cannot be read.
    """
    from pyspark.sql import functions as F

    if window_s <= 0:
        raise OptionError(f"window of {window_s} s is too short; give 1 s or more")
    messages = (
        session.read.format("martlet").options(**{"undecodableBody": RAW, **source, "columns": SOURCE_COLUMNS}).load()
    )
    measures = messages.selectExpr(
        f"timestamp_seconds(floor(unix_seconds(store_ts) / {window_s}) * {window_s}) AS window",
        "topic",
        "tag",
        "broker",
        "queue",
        "`offset`",
        "length(body) AS size",
        "unix_millis(store_ts) - unix_millis(born_ts) AS latency_ms",
    )
    columns: list[tuple[str, str]] = [*COLUMNS]
    if group:
        group_offsets = session.createDataFrame(
            _committed_rows(source, group), "topic string, broker string, queue int, read bigint"
        )
        measures = measures.join(F.broadcast(group_offsets), ["topic", "broker", "queue"], "left")
        columns.append(("lag", "count_if(`offset` >= coalesce(read, 0))"))
    statistics = measures.groupBy("window", "topic", "tag").agg(*(F.expr(text).alias(name) for name, text in columns))
    return statistics.selectExpr("window", "topic", "tag", *(each for name, _ in columns for each in _flat(name)))


def per_topic(found: "DataFrame") -> "DataFrame":
    """Return `message_stats` per topic: sums over tags, and the latency of the slowest tag."""
    from pyspark.sql import functions as F

    sums = [f"sum({name}) AS {name}" for name in ("messages", "bytes", "lag") if name in found.columns]
    measures = [F.expr(text) for text in (*sums, "max(latency_ms_p99) AS latency_ms_p99")]
    return found.groupBy("window", "topic").agg(*measures)


def _flat(name: str) -> list[str]:
    """Return the column *name*, or one column for each of its percentiles."""
    if not name.endswith("_p"):
        return [name]
    return [f"{name}[{place}] AS {name.removesuffix('_p')}_{label}" for label, place in PLACES]


def _committed_rows(source: Mapping[str, str], group: str) -> list[tuple[str, str, int, int]]:
    found = committed_offsets(source, group)
    return [(queue.topic, queue.broker_name, queue.queue_id, offset) for queue, offset in sorted(found.items())]


def committed_offsets(source: Mapping[str, str], group: str) -> dict[MessageQueue, int]:
    """Return the committed offset of *group* in each queue of *source*; 0 if it has none."""
    subscribed = Subscribed.of(source)
    cluster = subscribed.cluster
    queues, routes = sorted(subscribed.bounds()), subscribed.routes()
    offsets: dict[MessageQueue, int] = {}
    for topic, broker in sorted({(queue.topic, queue.broker_name) for queue in queues}):
        broker_queues = [queue for queue in queues if (queue.topic, queue.broker_name) == (topic, broker)]
        answers = cluster.ask_broker(topic, routes[topic], broker, partial(_query, group, broker_queues))
        for queue, answer in zip(broker_queues, answers, strict=True):
            if answer.code != ResponseCode.QUERY_NOT_FOUND:
                check(answer, f"offset of group {group!r} in topic {topic!r}", f"broker {broker!r}")
            offsets[queue] = answer.integer("offset") if answer.code == ResponseCode.SUCCESS else 0
    return offsets


def _query(group: str, queues: list[MessageQueue], connection: BrokerConnection) -> list[AnswerFrame]:
    ext: list[dict[str, Any]] = [
        {"consumerGroup": group, "topic": queue.topic, "queueId": queue.queue_id} for queue in queues
    ]
    return connection.request_all(RequestCode.QUERY_CONSUMER_OFFSET, ext)
