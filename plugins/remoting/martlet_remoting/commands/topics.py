"""``martlet topic``: list, create, delete, stats."""

import argparse
from dataclasses import dataclass
from typing import Any, Final, final

from martlet.commands.outcome import Exit, complain
from martlet.commands.terminal import print_json, table
from martlet.contracts import Command
from martlet_remoting.client import Admin, ClientError
from martlet_remoting.client.bodies import integer, load_object, mapping
from martlet_remoting.codes import RequestCode

from .shared import day_time, subcommands, talking

__all__ = ["COMMAND"]

EPILOG = """\
examples:
  martlet topic list                          what there is, but for what belongs to the system
  martlet topic create orders --queues 16
  martlet topic stats orders                  how much each queue holds, and when it last got a message
  martlet topic delete orders                 asks first; --yes does not
"""

PERMS: Final = {"rw": 6, "r": 4, "w": 2}
# RocketMQ's own topics (TopicValidator); retry and dead-letter topics belong to groups.
SYSTEM: Final = frozenset({"TBW102", "SELF_TEST_TOPIC", "BenchmarkTest", "OFFSET_MOVED_EVENT", "SCHEDULE_TOPIC_XXXX"})
SYSTEM_STARTS: Final = ("RMQ_SYS_", "rmq_sys_", "%RETRY%", "%DLQ%")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add = subcommands(parser)
    listing = add("list", "list topics with their queues", show_list)
    listing.add_argument("--all", action="store_true", help="also those of the system, retries and dead letters")
    create = add("create", "create a topic on every broker, or change it", do_create)
    create.add_argument("topic", help="its name: letters, digits and %%|-_")
    create.add_argument("--queues", type=int, default=8, help="how many queues on each broker; default %(default)s")
    create.add_argument("--perm", choices=tuple(PERMS), default="rw", help="read, write or both; default %(default)s")
    create.add_argument("--cluster", help="only on the brokers of this cluster")
    delete = add("delete", "delete a topic from every broker and name server", do_delete)
    delete.add_argument("topic", help="its name")
    delete.add_argument("--yes", action="store_true", help="do not ask")
    stats = add("stats", "show what each queue of a topic holds", show_stats)
    stats.add_argument("topic", help="its name")


@final
@dataclass(slots=True)
class Listed:
    """A topic as the brokers hold it together."""

    brokers: int
    queues: int
    perm: int


async def show_list(arguments: Any) -> int:
    found: dict[str, Listed] = {}
    async with Admin(arguments.name_server) as admin:
        cluster = await admin.cluster()
        own = {*cluster.clusters, *cluster.brokers, *(f"{name}_REPLY_TOPIC" for name in cluster.clusters)}
        for address in cluster.masters().values():
            answer = await admin.network.ask(address, RequestCode.GET_ALL_TOPIC_CONFIG, {})
            for name, fields in mapping(load_object(answer.body), "topicConfigTable").items():
                if isinstance(fields, dict):
                    listed = found.setdefault(str(name), Listed(0, 0, 0))
                    listed.brokers += 1
                    listed.queues += max(integer(fields, "readQueueNums", 0), integer(fields, "writeQueueNums", 0))
                    listed.perm |= integer(fields, "perm", 0)
    if not arguments.all:
        found = {name: listed for name, listed in found.items() if not _is_system(name, own)}
    rows = [(name, found[name].brokers, found[name].queues, _perm(found[name].perm)) for name in sorted(found)]
    heads = ("topic", "brokers", "queues", "perm")
    if arguments.json:
        print_json([dict(zip(heads, row, strict=True)) for row in rows])
    else:
        print(table(heads, rows))
    return Exit.OK


def _is_system(name: str, own: set[str]) -> bool:
    return name in SYSTEM or name in own or name.startswith(SYSTEM_STARTS)


def _perm(bits: int) -> str:
    return ("r" if bits & 4 else "") + ("w" if bits & 2 else "") or "none"


async def do_create(arguments: Any) -> int:
    async with Admin(arguments.name_server) as admin:
        brokers = await admin.create_topic(
            arguments.topic, queues=arguments.queues, perm=PERMS[arguments.perm], cluster=arguments.cluster
        )
    if arguments.json:
        print_json({"topic": arguments.topic, "brokers": brokers})
    else:
        print(f"topic {arguments.topic} has {arguments.queues} queues on {', '.join(brokers)}")
    return Exit.OK


async def do_delete(arguments: Any) -> int:
    async with Admin(arguments.name_server) as admin:
        await admin.topic_route(arguments.topic)
        if not arguments.yes and not _confirmed(f"delete topic {arguments.topic} and what is in it?"):
            complain("nothing was deleted; answer yes, or give --yes")
            return Exit.FAILED
        await admin.delete_topic(arguments.topic)
    if arguments.json:
        print_json({"topic": arguments.topic, "deleted": True})
    else:
        print(f"topic {arguments.topic} is deleted")
    return Exit.OK


def _confirmed(question: str) -> bool:
    try:
        return input(f"{question} [yes/no] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


async def show_stats(arguments: Any) -> int:
    async with Admin(arguments.name_server) as admin:
        found = await admin.topic_stats(arguments.topic)
    if not found:
        raise ClientError(f"topic {arguments.topic!r} has no queue")
    heads = ("broker", "queue", "first", "next", "messages", "last message")
    rows = [
        (
            stats.queue.broker_name,
            stats.queue.queue_id,
            stats.min_offset,
            stats.max_offset,
            stats.max_offset - stats.min_offset,
            day_time(stats.last_update_ms),
        )
        for stats in found
    ]
    if arguments.json:
        print_json([dict(zip(heads, row, strict=True)) for row in rows])
    else:
        print(table(heads, rows))
        print(f"{sum(row[4] for row in rows):,} messages")
    return Exit.OK


COMMAND = Command("topic", "list, create, delete and measure topics", configure, talking())
