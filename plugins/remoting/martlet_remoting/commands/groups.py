"""``martlet group``: list, lag, reset."""

import argparse
from typing import Any, Final

from martlet.commands.outcome import Exit
from martlet.commands.terminal import print_json, table
from martlet.contracts import Command
from martlet_remoting.client import Admin, ClientError, MessageQueue

from .shared import day_time, moment_ms, subcommands, talking

__all__ = ["COMMAND"]

EPILOG = """\
examples:
  martlet group list                                   groups, their members and their lag
  martlet group lag billing                            where it is in every queue
  martlet group reset billing --topic orders --to end  skip what is there
  martlet group reset billing --topic orders --to 15m  read the last quarter of an hour again
  martlet group reset billing --topic orders --to 2026-03-01T12:00
"""

# Groups that every RocketMQ broker makes by itself (MixAll, SubscriptionGroupManager).
SYSTEM: Final = frozenset(
    {
        "TOOLS_CONSUMER",
        "FILTERSRV_CONSUMER",
        "SELF_TEST_C_GROUP",
        "CID_ONS-HTTP-PROXY",
        "CID_ONSAPI_PULL",
        "CID_ONSAPI_PERMISSION",
        "CID_ONSAPI_OWNER",
        "CID_RMQ_SYS_TRANS",
    }
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add = subcommands(parser)
    listing = add("list", "list consumer groups", show_list)
    listing.add_argument("--all", action="store_true", help="also those of the system")
    lag = add("lag", "show how far a group is in every queue", show_lag)
    lag.add_argument("group", help="its name")
    lag.add_argument("--topic", default="", help="only this topic")
    reset = add("reset", "move a group's offsets of one topic", do_reset)
    reset.add_argument("group", help="its name")
    reset.add_argument("--topic", required=True, help="the topic")
    reset.add_argument(
        "--to", required=True, metavar="WHERE", help="begin, end, a time (2026-03-01T12:00), or 15m: 15 minutes ago"
    )


async def show_list(arguments: Any) -> int:
    rows: list[tuple[str, int, int]] = []
    async with Admin(arguments.name_server) as admin:
        for group in await admin.groups():
            if arguments.all or group not in SYSTEM:
                members = await admin.group_members(group)
                lags = await admin.group_lag(group)
                rows.append((group, len(members), sum(max(lag.lag, 0) for lag in lags)))
    heads = ("group", "members", "lag")
    if arguments.json:
        print_json([dict(zip(heads, row, strict=True)) for row in rows])
    else:
        print(table(heads, rows))
    return Exit.OK


async def show_lag(arguments: Any) -> int:
    async with Admin(arguments.name_server) as admin:
        if arguments.group not in await admin.groups():
            raise ClientError(f"group {arguments.group!r} is unknown; `martlet group list` shows all")
        lags = await admin.group_lag(arguments.group, arguments.topic)
    heads = ("topic", "broker", "queue", "consumed", "stored", "lag", "last consumed was stored")
    rows = [
        (
            lag.queue.topic,
            lag.queue.broker_name,
            lag.queue.queue_id,
            lag.consumer_offset,
            lag.broker_offset,
            lag.lag,
            day_time(lag.last_consumed_ms),
        )
        for lag in lags
    ]
    if arguments.json:
        print_json([dict(zip(heads, row, strict=True)) for row in rows])
    else:
        print(table(heads, rows))
        print(f"{sum(max(lag.lag, 0) for lag in lags):,} messages to consume")
    return Exit.OK


async def do_reset(arguments: Any) -> int:
    async with Admin(arguments.name_server) as admin:
        if arguments.to == "begin":
            found: dict[MessageQueue, int] = {}
            for stats in await admin.topic_stats(arguments.topic):
                found |= await admin.reset_queue_offset(arguments.group, stats.queue, stats.min_offset)
        else:
            when = -1 if arguments.to == "end" else moment_ms(arguments.to)
            found = await admin.reset_offsets(arguments.group, arguments.topic, when)
    rows = [(queue.broker_name, queue.queue_id, offset) for queue, offset in sorted(found.items())]
    heads = ("broker", "queue", "offset")
    if arguments.json:
        print_json([dict(zip(heads, row, strict=True)) for row in rows])
    else:
        print(table(heads, rows))
    return Exit.OK


COMMAND = Command("group", "list consumer groups, show their lag, move their offsets", configure, talking())
