"""``martlet pipeline replay``."""

import argparse
from typing import Any, Final

from martlet.cli.outcome import Exit, UsageError
from martlet_remoting.commands.values import moment, sql, whole

from .shared import add_spark, add_topics, bar, cluster_options, in_spark, print_report, source_of

__all__ = ["configure_replay", "replay"]

RATE_MAX: Final = 10_000_000
GUARANTEES: Final = ("exactly-once", "at-least-once")


def configure_replay(parser: argparse.ArgumentParser) -> None:
    add_topics(parser)
    add = parser.add_argument
    add("--archive", default="", metavar="PATH", help="replay this archive of Parquet files instead of topics")
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
    add("--guarantee", choices=GUARANTEES, default=GUARANTEES[0], help="default exactly-once, which needs Martlet")
    add_spark(parser)


def replay(arguments: Any) -> int:
    from martlet_spark.pipelines.replay import Replay
    from martlet_spark.pipelines.replay import replay as run_replay

    plan = Replay(
        arguments.to,
        arguments.checkpoint,
        arguments.where,
        arguments.start,
        arguments.until,
        arguments.rate,
        arguments.guarantee,
    )
    source = _source(arguments)
    with in_spark(arguments, "replay") as session, bar("replaying", "messages") as show:
        report = run_replay(session, source, cluster_options(arguments), plan, show)
    print_report(f"replayed to {arguments.to}", report.fields(), as_json=arguments.json)
    return Exit.OK


def _source(arguments: Any) -> dict[str, str] | str:
    """Return the options of the topics, or the path of the archive."""
    if sum(map(bool, (arguments.topic, arguments.pattern, arguments.archive))) != 1:
        raise UsageError("give topics, --pattern or --archive, one of them; see --help")
    if arguments.archive:
        if arguments.sql:
            raise UsageError("--sql is for topics; use --where for an archive")
        path: str = arguments.archive
        return path
    source = source_of(arguments)
    return {**source, "sql": arguments.sql} if arguments.sql else source
