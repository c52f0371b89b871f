"""``martlet pipeline``: data pipelines on topics, in Spark."""

import argparse
from typing import TYPE_CHECKING, Any, Final

from martlet.cli.outcome import UsageError
from martlet.contracts import Subcommand
from martlet_remoting.commands.common import subcommands
from martlet_remoting.commands.values import seconds
from martlet_spark.commands.dead_letters import configure_dead_letter, dead_letter
from martlet_spark.commands.replay import configure_replay, replay
from martlet_spark.commands.shared import add_spark, add_topics, as_command, run_query, size, source_of
from martlet_spark.commands.stats import configure_stats, stats

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from martlet_spark.pipelines.progress import Show, StreamReport

__all__ = ["COMMAND"]

EPILOG: Final = """\
examples:
  martlet pipeline archive Orders --to /data/archive             what is new since the last run, as Parquet files
  martlet pipeline archive --pattern 'Orders-.*' --to /data/archive --follow
  martlet pipeline archive Orders --to s3://lake/orders --checkpoint /data/checkpoints/orders --format delta
  martlet pipeline archive Orders --to /archive --master spark://10.0.0.1:7077 --conf spark.executor.memory=4g
  martlet pipeline stats Orders Payments                         counts, sizes and latency per minute, topic and tag
  martlet pipeline stats Orders --window 5m --from 2026-03-01T12:00 --group billing --plot orders.html
  martlet pipeline stats Orders --to /data/stats --format csv
  martlet pipeline replay Orders --to Orders.again --checkpoint /data/again --from 2026-03-01T12:00 --rate 1000
  martlet pipeline replay --archive /data/archive --to Orders --checkpoint /data/replay --where "topic = 'Orders'"
  martlet pipeline replay Orders --tier s3://lake/broker-a --to Orders.again --checkpoint /data/again
  martlet pipeline dead-letter billing                           how many dead letters of each cause, with an example
  martlet pipeline dead-letter billing --by error                by a property of the application's too
  martlet pipeline dead-letter billing --where "origin_topic = 'Orders'" --export /data/letters
  martlet pipeline dead-letter billing --where "tag = 'red'" --resend --checkpoint /data/resent-red --dry-run
They need Spark: pip install 'martlet[spark]', and Java 17. Each can be interrupted at any time and run again:
Ctrl-C ends it with a report of what was completed, and exit code 130.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = subcommands(parser, EPILOG)
    _configure_archive(add("archive", "write topics to Parquet files or a Delta table", archive))

    configure_replay(add("replay", "send messages of topics, or of an archive, to a topic again", replay))
    configure_stats(add("stats", "count and measure the messages of topics, per window of time and tag", stats))
    configure_dead_letter(
        add("dead-letter", "group a group's dead letters by cause, export them, or send them again", dead_letter)
    )


def _configure_archive(parser: argparse.ArgumentParser) -> None:
    add_topics(parser)
    add = parser.add_argument
    add("--to", required=True, metavar="PATH", help="directory, s3://BUCKET/PREFIX, or any path that Spark can write")
    add("--format", choices=("parquet", "delta"), default="parquet", help="of the archive; default parquet")
    add("--checkpoint", default="", metavar="PATH", help="where Spark notes how far it is; default: in the archive")
    add("--batch-bytes", type=size("--batch-bytes"), default=1 << 30, metavar="SIZE", help="of messages; default 1g")
    add(
        "--file-bytes",
        type=size("--file-bytes"),
        default=128 << 20,
        metavar="SIZE",
        help="most messages in a file, before compression; default 128m",
    )
    add("--allow-loss", action="store_true", help="continue if messages were removed before they were archived")
    add("--follow", action="store_true", help="continue with new messages until Ctrl-C")
    add(
        "--every", type=seconds("--every"), default=60.0, metavar="SECONDS", help="how often, with --follow; default 60"
    )
    add_spark(parser)


def archive(arguments: Any) -> int:
    from martlet_spark.errors import PipelineError
    from martlet_spark.pipelines.archive import Archive
    from martlet_spark.pipelines.archive import archive as run_archive

    target = Archive(arguments.to, arguments.format, arguments.checkpoint, arguments.batch_bytes, arguments.file_bytes)
    target.check()
    source = source_of(arguments)
    if arguments.allow_loss:
        source["failOnDataLoss"] = "false"
    follow_s = arguments.every if arguments.follow else 0

    def work(session: "SparkSession", show: "Show") -> "StreamReport":
        try:
            return run_archive(session, source, target, follow_s=follow_s, show=show)
        except PipelineError as error:
            raise PipelineError(str(error).replace("set failOnDataLoss to false", "give --allow-loss")) from error

    return run_query(f"archived to {arguments.to}", arguments, work, name="archive", label="archiving", unit="messages")


def run(arguments: argparse.Namespace) -> int:
    from martlet_spark.pipelines.session import check_installed

    check_installed()
    from martlet_spark.errors import OptionError, SparkConnectorError

    try:
        code: int = arguments.work(arguments)
    except OptionError as error:
        raise UsageError(as_command(str(error))) from error
    except SparkConnectorError as error:
        raise type(error)(as_command(str(error))) from error
    return code


COMMAND = Subcommand("pipeline", "archive topics and analyse them, in Spark", configure, run)
