"""``martlet pipeline dead-letter``."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from martlet.cli.outcome import Exit, UsageError, complain
from martlet.cli.terminal import print_json
from martlet_remoting.commands.common import plural
from martlet_remoting.commands.values import moment
from martlet_spark.commands.replay import GUARANTEES
from martlet_spark.commands.shared import (
    add_spark,
    add_tier,
    cluster_options,
    in_spark,
    look,
    reading_options,
    run_query,
    size,
    tasks_shown,
)
from martlet_spark.commands.stats import add_rows, print_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from martlet_spark.pipelines.dead_letters import Letters, Resend
    from martlet_spark.pipelines.progress import Show, StreamReport

__all__ = ["configure_dead_letter", "dead_letter"]


def configure_dead_letter(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("group", help="consumer group")
    add("--by", metavar="PROPERTY", action="append", default=[], help="property that is part of the cause; repeatable")
    add(
        "--where", default="", metavar="SQL", help="only these, by a condition in Spark's SQL on columns of the letters"
    )
    add("--from", dest="start", type=moment("--from"), default=0, metavar="TIME", help="stored at this time or later")
    add("--until", type=moment("--until"), default=0, metavar="TIME", help="stored before this time")
    add_tier(parser)
    add_rows(parser, "causes to print, the most frequent; default 20")
    add("--export", metavar="PATH", help="write the letters to Parquet files in this directory, which must not exist")
    _add_resend(parser.add_argument_group("to send them again").add_argument)
    add_spark(parser)


def _add_resend(add: Any) -> None:
    add("--resend", action="store_true", help="send them to the topic that each came from, for all its groups")
    add("--checkpoint", default="", metavar="PATH", help="where Spark notes which were sent; --resend needs it")
    add("--topic", default="", metavar="TOPIC", help="send them to this topic instead")
    add("--dry-run", action="store_true", help="print how many would be sent to which topic, and send none")
    add(
        "--batch-bytes",
        type=size("--batch-bytes"),
        default=256 << 20,
        metavar="SIZE",
        help="sent at once; default 256m",
    )
    add("--guarantee", choices=GUARANTEES, default=GUARANTEES[0], help="default exactly-once, which needs Martlet")


def dead_letter(arguments: Any) -> int:
    from martlet_spark.pipelines.dead_letters import PREFIX, Letters, Resend

    _check(arguments)
    source = reading_options(arguments)
    look({**source, "subscribe": PREFIX + arguments.group})
    letters = Letters(arguments.group, arguments.where, arguments.start, arguments.until)
    if not arguments.resend:
        return _show_causes(arguments, source, letters)
    plan = Resend(arguments.checkpoint, arguments.topic, arguments.guarantee, arguments.batch_bytes)
    return (_show_unsent if arguments.dry_run else _resend)(arguments, source, letters, plan)


def _check(arguments: Any) -> None:
    if arguments.resend and not arguments.checkpoint:
        raise UsageError("--resend needs --checkpoint, a directory that lasts; with it a letter is sent only once")
    if arguments.resend and (arguments.export or arguments.by):
        raise UsageError("--resend prints no causes and exports nothing; give it without --by and --export")
    only = [name for name in ("checkpoint", "topic", "dry_run") if getattr(arguments, name) and not arguments.resend]
    if only:
        raise UsageError(f"--{only[0].replace('_', '-')} is for --resend; give both, or none")


def _show_causes(arguments: Any, source: Mapping[str, str], letters: "Letters") -> int:
    from martlet_spark.pipelines.dead_letters import causes, read_letters
    from martlet_spark.pipelines.session import plain_errors

    with in_spark(arguments, "dead-letter", "reading", "tasks") as (session, show), plain_errors():
        chosen_letters = read_letters(session, source, letters)
        cause_rows = causes(chosen_letters, arguments.by)
        with tasks_shown(session, show, arguments.export or ""):
            if arguments.export:
                chosen_letters.write.option("compression", "zstd").parquet(arguments.export)
            rows = [row.asDict(recursive=True) for row in cause_rows.limit(arguments.rows).collect()]
    if arguments.json:
        print_json({"causes": rows, **({"exported": arguments.export} if arguments.export else {})})
    else:
        print_table([_flat(row) for row in rows], [*cause_rows.columns[:-1], "example"])
        if arguments.export:
            print(f"exported to {arguments.export}")
    return Exit.OK


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return *row* with its example on one line."""
    example = row["example"]
    where = f"{example['queue']}/{example['offset']} {example['msg_id']}"
    return {**row, "example": " ".join(part for part in (where, example["key"], example["body"]) if part)}


def _show_unsent(arguments: Any, source: Mapping[str, str], letters: "Letters", plan: "Resend") -> int:
    from martlet_spark.pipelines.dead_letters import unsent
    from martlet_spark.pipelines.session import plain_errors

    with in_spark(arguments, "dead-letter", "reading", "tasks") as (session, show), plain_errors():
        found = unsent(session, source, letters, plan)
        with tasks_shown(session, show):
            rows = [row.asDict() for row in found.collect()]
    if arguments.json:
        print_json({"unsent": rows})
    else:
        print_table(rows, ["topic", "letters"])
        print(f"{plural(sum(row['letters'] for row in rows if row['topic']), 'letter')} would be sent")
    return Exit.OK


def _resend(arguments: Any, source: Mapping[str, str], letters: "Letters", plan: "Resend") -> int:
    from martlet_spark.pipelines.dead_letters import LEFT_OUT, resend

    left_out = 0

    def work(session: "SparkSession", show: "Show") -> "StreamReport":
        nonlocal left_out
        report = resend(session, source, letters, plan, show, cluster_options(arguments))
        left_out = report.counted[LEFT_OUT]
        return report

    what = f"dead letters of {arguments.group} resent to {plan.topic or 'the topics that they came from'}"
    code = run_query(what, arguments, work, name="dead-letter", label="resending", unit="letters")
    if left_out:
        has = "has no property with the original topic, and was left out"
        have = "have no property with their original topic, and were left out"
        advice = "resend such letters with --topic, --where 'origin_topic IS NULL' and a new --checkpoint"
        complain(f"{plural(left_out, 'letter')} {has if left_out == 1 else have}; {advice}")
        return Exit.FAILED
    return code
