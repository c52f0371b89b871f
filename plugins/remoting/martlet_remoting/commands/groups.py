"""``martlet group``: list, create, delete, lag, reset."""

import argparse
from typing import Any

from martlet.cli.outcome import Exit
from martlet.cli.terminal import print_json
from martlet.contracts import Subcommand
from martlet.tables.groups import BUILT_IN
from martlet_client import Admin, ClientError, MessageQueue, QueueStats
from martlet_remoting.commands.common import confirmed, day_time, plural, print_rows, subcommands
from martlet_remoting.commands.connecting import talking
from martlet_remoting.commands.values import WHERE, Where, where, whole

__all__ = ["COMMAND"]

EPILOG = """\
examples:
  martlet group list                                   groups, number of members, total lag
  martlet group create billing --retries 5
  martlet group delete billing                         asks first, unless --yes is given
  martlet group lag billing                            offset and lag in every queue
  martlet group reset billing --topic orders --to end  skip all stored messages
  martlet group reset billing --topic orders --to 15m  consume the last 15 minutes again
  martlet group reset billing --topic orders --to 2026-03-01T12:00
  martlet group reset billing --topic orders --queue 3 --to 4711
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = subcommands(parser, EPILOG)
    listing = add("list", "list consumer groups", show_list)
    listing.add_argument("--all", action="store_true", help="include system groups")
    create = add("create", "create or change a consumer group on every broker", do_create)
    create.add_argument("group", help="name of the group: letters, digits and %%|-_")
    create.add_argument(
        "--retries",
        type=whole("--retries"),
        default=16,
        metavar="N",
        help="redeliveries of a failed message before it becomes a dead letter; default %(default)s",
    )
    create.add_argument("--cluster", help="use only the brokers of this cluster")
    delete = add("delete", "delete a consumer group and its offsets from every broker", do_delete)
    delete.add_argument("group", help="name of the group")
    delete.add_argument(
        "--keep-offsets", action="store_true", help="keep its offsets: a new group of this name continues there"
    )
    delete.add_argument("--yes", action="store_true", help="do not ask")
    lag = add("lag", "show the offset and the lag of a group in every queue", show_lag)
    lag.add_argument("group", help="name of the group")
    lag.add_argument("--topic", default="", help="show only this topic")
    reset = add("reset", "reset the offsets of a group for one topic", do_reset)
    reset.add_argument("group", help="name of the group")
    reset.add_argument("--topic", required=True, help="reset its offsets for this topic")
    reset.add_argument("--to", required=True, type=where("--to"), metavar="WHERE", help=WHERE)
    reset.add_argument("--queue", type=whole("--queue"), metavar="N", help="reset only this queue on each broker")


async def show_list(arguments: Any) -> int:
    rows: list[tuple[str, int, int]] = []
    async with Admin(arguments.settings) as admin:
        for group in await admin.groups():
            if arguments.all or group not in BUILT_IN:
                members = await admin.group_members(group)
                lags = await admin.group_lag(group)
                rows.append((group, len(members), sum(max(lag.lag, 0) for lag in lags)))
    print_rows(("group", "members", "lag"), rows, as_json=arguments.json)
    return Exit.OK


async def do_create(arguments: Any) -> int:
    async with Admin(arguments.settings) as admin:
        await admin.create_group(arguments.group, retry_max_times=arguments.retries, cluster=arguments.cluster)
        brokers = list((await admin.cluster()).masters(arguments.cluster))
    if arguments.json:
        print_json({"group": arguments.group, "brokers": brokers, "retries": arguments.retries})
    else:
        print(f"group {arguments.group} is on {', '.join(brokers)}, with {plural_retries(arguments.retries)}")
    return Exit.OK


def plural_retries(number: int) -> str:
    return "1 retry" if number == 1 else f"{number:,} retries"


async def do_delete(arguments: Any) -> int:
    group = arguments.group
    async with Admin(arguments.settings) as admin:
        await _check_known(admin, group)
        if group in BUILT_IN:
            raise ClientError(f"group {group!r} is built in and cannot be deleted; choose another group")
        if members := await admin.group_members(group):
            text = f"group {group!r} has {plural(len(members), 'connected member')}"
            raise ClientError(f"{text}; stop them first, or their next heartbeat creates the group again")
        if not arguments.yes and not await confirmed(f"delete group {group}?"):
            raise ClientError(f"group {group!r} was not deleted; answer yes, or give --yes")
        await admin.delete_group(group, offsets_too=not arguments.keep_offsets)
    if arguments.json:
        print_json({"group": group, "deleted": True})
    else:
        print(f"group {group} is deleted")
    return Exit.OK


async def _check_known(admin: Admin, group: str) -> None:
    if group not in await admin.groups():
        raise ClientError(f"group {group!r} is unknown; `martlet group list` lists all")


async def show_lag(arguments: Any) -> int:
    async with Admin(arguments.settings) as admin:
        await _check_known(admin, arguments.group)
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
    print_rows(heads, rows, as_json=arguments.json)
    if not arguments.json:
        print(f"{plural(sum(max(lag.lag, 0) for lag in lags), 'message')} to consume")
    return Exit.OK


async def do_reset(arguments: Any) -> int:
    to: Where = arguments.to
    async with Admin(arguments.settings) as admin:
        await _check_known(admin, arguments.group)
        if arguments.queue is None and to.offset is None and to.text != "begin":
            time_ms = -1 if to.time_ms is None else to.time_ms
            found = await admin.reset_offsets(arguments.group, arguments.topic, time_ms)
        else:
            found = await _reset_queues(admin, arguments)
    rows = [(queue.broker_name, queue.queue_id, offset) for queue, offset in sorted(found.items())]
    print_rows(("broker", "queue", "offset"), rows, as_json=arguments.json)
    return Exit.OK


async def _reset_queues(admin: Admin, arguments: Any) -> dict[MessageQueue, int]:
    """Compute all target offsets first, so that an error leaves every queue unchanged; then reset the queues."""
    stats = await admin.topic_stats(arguments.topic)
    chosen_stats = [each for each in stats if arguments.queue in (None, each.queue.queue_id)]
    if not chosen_stats:
        last_id = max((each.queue.queue_id for each in stats), default=-1)
        raise ClientError(f"topic {arguments.topic!r} has no queue {arguments.queue}; it has 0 to {last_id}")
    targets = {each.queue: await _target(admin, each, arguments.to) for each in chosen_stats}
    offsets: dict[MessageQueue, int] = {}
    for queue, offset in targets.items():
        offsets |= await admin.reset_queue_offset(arguments.group, queue, offset)
    return offsets


async def _target(admin: Admin, stats: QueueStats, to: Where) -> int:
    if to.offset is not None:
        if not stats.min_offset <= to.offset <= stats.max_offset:
            where_ = f"queue {stats.queue.queue_id} of broker {stats.queue.broker_name}"
            text = f"offset {to.offset} is out of range in {where_}, which has {stats.min_offset} to {stats.max_offset}"
            raise ClientError(f"{text}; nothing was reset, use --queue to reset one queue")
        return to.offset
    if to.time_ms is not None:
        return await admin.search_offset(stats.queue, to.time_ms)
    return stats.min_offset if to.text == "begin" else stats.max_offset


COMMAND = Subcommand(
    "group", "list, create and delete consumer groups, show their lag, reset their offsets", configure, talking()
)
