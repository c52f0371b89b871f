"""``martlet pipeline replay``."""

import argparse
from typing import TYPE_CHECKING, Any, Final

from martlet.cli.outcome import UsageError
from martlet_remoting.commands.values import moment, sql, whole
from martlet_spark.commands.shared import add_spark, add_tier, add_topics, cluster_options, run_query, size, source_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from martlet_spark.pipelines.progress import Show, StreamReport

__all__ = ["GUARANTEES", "configure_replay", "replay"]

RATE_MAX: Final = 10_000_000
GUARANTEES: Final = ("exactly-once", "at-least-once")


def configure_replay(parser: argparse.ArgumentParser) -> None:
    add_topics(parser)
    add = parser.add_argument
    add_tier(parser)
    add(
        "--archive",
        default="",
        metavar="PATH",
        help="replay this archive instead of topics, or all topics of the cold tier at this URL",
    )
    add("--to", required=True, metavar="TOPIC", help="topic to send to")
    add(
        "--checkpoint",
        required=True,
        metavar="PATH",
        help="where Spark notes how far it is; a new one begins again from the start",
    )
    add("--from", dest="start", type=moment("--from"), default=0, metavar="TIME", help="stored at this time or later")
    add("--until", type=moment("--until"), default=0, metavar="TIME", help="stored before this time")
    add("--sql", type=sql("--sql"), metavar="SQL92", help="only these; brokers evaluate it, on properties")
    add("--where", default="", metavar="SQL", help="only these, by a condition in Spark's SQL on columns of a message")
    add(
        "--rate", type=whole("--rate", 0, RATE_MAX), default=0, metavar="N", help="most messages a second; default: all"
    )
    add(
        "--batch-bytes",
        type=size("--batch-bytes"),
        default=256 << 20,
        metavar="SIZE",
        help="sent at once, without --rate; default 256m",
    )
    add("--guarantee", choices=GUARANTEES, default=GUARANTEES[0], help="default exactly-once, which needs Martlet")
    add_spark(parser)


def replay(arguments: Any) -> int:
    from martlet_spark.pipelines.replay import Replay, check_target
    from martlet_spark.pipelines.replay import replay as run_replay

    plan = Replay(
        arguments.to,
        arguments.checkpoint,
        arguments.where,
        arguments.start,
        arguments.until,
        arguments.rate,
        arguments.guarantee,
        arguments.batch_bytes,
    )
    source = _source(arguments)
    check_target(source, plan)

    def work(session: "SparkSession", show: "Show") -> "StreamReport":
        return run_replay(session, source, cluster_options(arguments), plan, show)

    return run_query(f"replayed to {arguments.to}", arguments, work, name="replay", label="replaying", unit="messages")


def _source(arguments: Any) -> dict[str, str] | str:
    """Return the options of the topics, or the path of the archive."""
    from martlet_spark.pipelines.archive_log import tier_of

    if sum(map(bool, (arguments.topic, arguments.pattern, arguments.archive))) != 1:
        raise UsageError("give topics, --pattern or --archive, one of them; see --help")
    if arguments.archive and arguments.tier:
        raise UsageError("--archive and --tier both say where to read; give one of them")
    tier = tier_of(arguments.archive) if arguments.archive else ""
    if tier:
        arguments.archive, arguments.tier, arguments.pattern = "", tier, ".*"
    if arguments.sql and (arguments.archive or arguments.tier):
        raise UsageError("--sql is for topics; use --where for an archive and a cold tier")
    if arguments.archive:
        path: str = arguments.archive
        return path
    source = source_of(arguments)
    return {**source, "sql": arguments.sql} if arguments.sql else source
