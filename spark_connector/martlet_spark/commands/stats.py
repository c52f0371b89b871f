"""``martlet pipeline stats``."""

import argparse
from typing import TYPE_CHECKING, Any, Final

from martlet.cli.outcome import Exit, UsageError
from martlet.cli.terminal import print_json, table
from martlet_remoting.commands.common import plural
from martlet_remoting.commands.values import duration, moment, whole
from martlet_spark.commands.shared import add_spark, add_tier, add_topics, in_spark, source_of, tasks_shown

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROWS_MAX: Final = 100_000

__all__ = ["add_rows", "configure_stats", "print_table", "stats"]


def configure_stats(parser: argparse.ArgumentParser) -> None:
    add_topics(parser)
    add_tier(parser)
    add = parser.add_argument
    add("--window", type=duration("--window"), default=60_000, metavar="TIME", help="length of a window; default 1m")
    add("--from", dest="start", type=moment("--from"), metavar="TIME", help="messages stored at this time or later")
    add("--until", type=moment("--until"), metavar="TIME", help="messages stored before this time")
    add("--group", default="", help="also count the messages that this consumer group has not consumed")
    add("--to", metavar="PATH", help="write the table to this directory, which must not exist")
    add("--format", choices=("parquet", "csv"), default="parquet", help="of the written table; default parquet")
    add("--plot", metavar="FILE", help="draw it: FILE.html, or FILE.png with matplotlib")
    add_rows(parser, "windows to print, the latest; default 20")
    add_spark(parser)


def add_rows(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--rows", type=whole("--rows", 0, ROWS_MAX), default=20, metavar="N", help=text)


def stats(arguments: Any) -> int:
    from martlet_spark.pipelines.plots import PLOT_ROWS, charts_of, check_plot, plot
    from martlet_spark.pipelines.session import plain_errors
    from martlet_spark.pipelines.stats import message_stats, per_topic

    if arguments.window % 1000:
        raise UsageError("--window is not a number of whole seconds; give for example 10s or 5m")
    if arguments.group and arguments.tier:
        raise UsageError("--group needs brokers, which know what it has consumed; leave --group or --tier out")
    if arguments.plot:
        check_plot(arguments.plot)
    source = {**source_of(arguments), **_times(arguments)}
    with in_spark(arguments, "stats", "measuring", "tasks") as (session, show), plain_errors():
        found = message_stats(session, source, arguments.window // 1000, arguments.group).persist()
        with tasks_shown(session, show, arguments.to or ""):
            count = found.count()
            if arguments.to:
                _write(found.orderBy("window", "topic", "tag"), arguments.to, arguments.format)
            if arguments.plot:
                latest = per_topic(found).orderBy("window", ascending=False).limit(PLOT_ROWS).collect()
                charts = charts_of((row.asDict() for row in reversed(latest)), arguments.window / 1000)
                plot(charts, arguments.plot, "Topics")
            rows = (
                found.orderBy("window", "topic", "tag", ascending=[False, True, True]).limit(arguments.rows).collect()
            )
    shown = [row.asDict() for row in rows]
    written = {name: getattr(arguments, name) for name in ("to", "plot") if getattr(arguments, name)}
    if arguments.json:
        print_json({"count": count, "rows": shown, **written})
    else:
        print_table(shown, found.columns)
        print(f"{plural(count, 'row')}{''.join(f'; written to {path}' for path in written.values())}")
    return Exit.OK


def _times(arguments: Any) -> dict[str, str]:
    found = {"startingTimestamp": arguments.start, "endingTimestamp": arguments.until}
    times = {name: str(value) for name, value in found.items() if value is not None}
    return {**times, "startingOffsetsByTimestampStrategy": "latest"}


def _write(rows: "DataFrame", path: str, kind: str) -> None:
    """Write the few *rows* as one file of a directory."""
    writer = rows.coalesce(1).write
    writer.option("header", "true").csv(path) if kind == "csv" else writer.parquet(path)


def print_table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    print(table([name.replace("_", " ") for name in columns], [[row[name] for name in columns] for row in rows]))
