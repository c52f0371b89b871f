"""``martlet topic``: list, create, delete, stats."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, final

from msgspec import Struct

from martlet.cli.outcome import Exit
from martlet.cli.terminal import print_json
from martlet.contracts import Subcommand
from martlet_client import Admin, ClientError
from martlet_remoting.commands.common import confirmed, day_time, plural, print_rows, subcommands
from martlet_remoting.commands.connecting import talking
from martlet_remoting.commands.values import whole
from martlet_remoting.wire.answers.bodies import integer, load_object, mapping
from martlet_remoting.wire.codes import RequestCode

__all__ = ["COMMAND"]

EPILOG = """\
examples:
  martlet topic list                          all topics except system topics
  martlet topic list --all --json
  martlet topic create orders --queues 16
  martlet topic create alarms --retention 24  messages expire after a day
  martlet topic create orders --queues 4      fewer queues: those beyond stay readable until they are consumed
  martlet topic create orders --queues 4 --force    says how many messages are lost, and asks first
  martlet topic stats orders                  messages in each queue, and the time of the last one
  martlet topic delete orders                 asks first, unless --yes is given
"""

QUEUES: Final = 8
QUEUES_MAX: Final = 16384  # the broker's limit, in martlet.tables.topics
HOURS_MAX: Final = 1_000_000
WANTED: Final = "martletReadQueueNums"  # set while removed queues wait to be consumed
RESERVE_TIME: Final = "reserve.time"
PERMS: Final = {"rw": 6, "r": 4, "w": 2}
# RocketMQ's own topics (TopicValidator); retry and dead-letter topics belong to groups.
SYSTEM: Final = frozenset({"TBW102", "SELF_TEST_TOPIC", "BenchmarkTest", "OFFSET_MOVED_EVENT", "SCHEDULE_TOPIC_XXXX"})
SYSTEM_STARTS: Final = ("RMQ_SYS_", "rmq_sys_", "%RETRY%", "%DLQ%")


def configure(parser: argparse.ArgumentParser) -> None:
    add = subcommands(parser, EPILOG)
    listing = add("list", "list topics with their queues", show_list)
    listing.add_argument("--all", action="store_true", help="include system, retry and dead-letter topics")
    create = add("create", "create or change a topic on every broker", do_create)
    create.add_argument("topic", help="name of the topic: letters, digits and %%|-_")
    create.add_argument(
        "--queues",
        type=whole("--queues", 1, QUEUES_MAX),
        metavar="N",
        help=f"number of queues on each broker; default for a new topic {QUEUES}, else as it is",
    )
    create.add_argument(
        "--perm", choices=tuple(PERMS), help="read, write or both; default for a new topic rw, else as it is"
    )
    create.add_argument(
        "--retention",
        type=whole("--retention", 0, HOURS_MAX),
        metavar="HOURS",
        help="let messages expire after this time, which cannot be longer than store.file_reserved_hours; 0: keep them "
        "as long as the log does; default for a new topic 0, else as it is (attribute reserve.time)",
    )
    create.add_argument(
        "--force",
        action="store_true",
        help="with fewer --queues: take the other queues away although they have messages that are not consumed; asks "
        "first, unless --yes is given, and says how many messages are lost",
    )
    create.add_argument("--yes", action="store_true", help="do not ask")
    create.add_argument("--cluster", help="use only the brokers of this cluster")
    delete = add("delete", "delete a topic from every broker and name server", do_delete)
    delete.add_argument("topic", help="name of the topic")
    delete.add_argument("--yes", action="store_true", help="do not ask")
    stats = add("stats", "show the offsets and the last message of each queue of a topic", show_stats)
    stats.add_argument("topic", help="name of the topic")


@final
class Listed(Struct):
    """A topic, with the sums over all brokers."""

    brokers: int
    queues: int
    perm: int
    hours: set[str]


async def show_list(arguments: Any) -> int:
    rows_by_name: dict[str, Listed] = {}
    async with Admin(arguments.settings) as admin:
        cluster = await admin.cluster()
        own_names = {*cluster.clusters, *cluster.brokers, *(f"{name}_REPLY_TOPIC" for name in cluster.clusters)}
        for address in cluster.masters().values():
            answer = await admin.network.ask(address, RequestCode.GET_ALL_TOPIC_CONFIG, {})
            for name, fields in mapping(load_object(answer.body), "topicConfigTable").items():
                if isinstance(fields, dict):
                    row = rows_by_name.setdefault(str(name), Listed(0, 0, 0, set()))
                    row.brokers += 1
                    row.queues += max(integer(fields, "readQueueNums", 0), integer(fields, "writeQueueNums", 0))
                    row.perm |= integer(fields, "perm", 0)
                    hours = str(mapping(fields, "attributes").get(RESERVE_TIME, "-1"))
                    row.hours.add("log" if hours in ("-1", "0") else f"{hours} h")
    if not arguments.all:
        rows_by_name = {name: row for name, row in rows_by_name.items() if not _is_system(name, own_names)}
    rows = [
        (name, row.brokers, row.queues, _perm(row.perm), ", ".join(sorted(row.hours)))
        for name, row in sorted(rows_by_name.items())
    ]
    heads = ("topic", "brokers", "queues", "perm", "retention")
    print_rows(heads, rows, as_json=arguments.json)
    return Exit.OK


def _is_system(name: str, own: set[str]) -> bool:
    return name in SYSTEM or name in own or name.startswith(SYSTEM_STARTS)


def _perm(bits: int) -> str:
    return ("r" if bits & 4 else "") + ("w" if bits & 2 else "") or "none"


async def do_create(arguments: Any) -> int:
    attributes = "" if arguments.retention is None else f"+{RESERVE_TIME}={arguments.retention or -1}"
    queues, perm = arguments.queues, PERMS.get(arguments.perm)
    async with Admin(arguments.settings) as admin:
        if queues is None or perm is None:
            current = await _queues_and_perm(admin, arguments.topic)
            queues, perm = queues or current[0], perm or current[1]
        brokers = await admin.create_topic(
            arguments.topic,
            queues=queues,
            perm=perm,
            cluster=arguments.cluster,
            attributes=attributes,
        )
        kept = await _count_kept(admin, arguments.topic, queues, brokers)
        lost_messages = 0
        if kept.kept_queues and arguments.force:
            kept_messages = plural(kept.kept_messages, "message")
            question = f"delete up to {kept_messages} of topic {arguments.topic}, in its other queues?"
            if not arguments.yes and not await confirmed(question):
                raise ClientError("the queues stay readable until they are consumed; answer yes, or give --yes")
            lost_messages = await _force(admin, arguments.topic, queues, brokers)
    if arguments.json:
        kept_counts = {"kept_queues": 0, "kept_messages": 0} if arguments.force else kept._asdict()
        print_json({"topic": arguments.topic, "brokers": brokers, **kept_counts, "lost_messages": lost_messages})
        return Exit.OK
    print(f"topic {arguments.topic} has {plural(queues, 'queue')} on {', '.join(brokers)}")
    if arguments.force:
        print(f"{plural(lost_messages, 'message')} that not every consumer had read were in other queues and are lost")
    elif kept.kept_queues:
        kept_text = f"{plural(kept.kept_queues, 'more queue')} with {plural(kept.kept_messages, 'message')}"
        print(f"{kept_text}: readable until all known consumers have read them, or --force is given")
    return Exit.OK


class Kept(NamedTuple):
    """Removed queues of a topic that stay until they are consumed, and their messages, on all brokers."""

    kept_queues: int
    kept_messages: int


async def _count_kept(admin: Admin, topic: str, queues: int, brokers: Sequence[str]) -> Kept:
    """Return the removed queues of *topic*, numbered from *queues* on, that can still be read."""
    kept_queues = 0
    for address in await _masters(admin, brokers):
        fields = await _config(admin, address, topic)
        if integer(fields, WANTED, -1) >= 0:
            kept_queues += max(integer(fields, "readQueueNums", 0) - queues, 0)
    if not kept_queues:
        return Kept(0, 0)
    stats = [each for each in await admin.topic_stats(topic) if each.queue.queue_id >= queues]
    return Kept(kept_queues, sum(max(each.max_offset - each.min_offset, 0) for each in stats))


async def _force(admin: Admin, topic: str, queues: int, brokers: Sequence[str]) -> int:
    """Drop all queues of *topic* from number *queues* on; return the number of lost messages."""
    lost = 0
    for address in await _masters(admin, brokers):
        fields = await _config(admin, address, topic)
        ext = {
            "topic": topic,
            "defaultTopic": topic,
            "readQueueNums": queues,
            "writeQueueNums": queues,
            "perm": integer(fields, "perm", PERMS["rw"]),
            "topicFilterType": str(fields.get("topicFilterType", "SINGLE_TAG")),
            "topicSysFlag": integer(fields, "topicSysFlag", 0),
            "order": fields.get("order") is True,
            "force": True,
        }
        answer = await admin.network.ask(address, RequestCode.UPDATE_AND_CREATE_TOPIC, ext)
        lost += answer.integer("lostMessages", 0)
    return lost


async def _masters(admin: Admin, brokers: Sequence[str]) -> list[str]:
    masters = (await admin.cluster()).masters()
    return [masters[name] for name in brokers if name in masters]


async def _config(admin: Admin, address: str, topic: str) -> Mapping[object, object]:
    """Return the configuration of *topic* on the broker at *address*; empty if it has no such topic."""
    answer = await admin.network.ask(address, RequestCode.GET_ALL_TOPIC_CONFIG, {})
    fields = mapping(load_object(answer.body), "topicConfigTable").get(topic)
    return fields if isinstance(fields, Mapping) else {}


async def _queues_and_perm(admin: Admin, topic: str) -> tuple[int, int]:
    """Return queues and permissions of *topic* on each broker, or defaults. Raises `ClientError` if brokers differ."""
    found: set[tuple[int, int, int]] = set()
    for address in (await admin.cluster()).masters().values():
        fields = await _config(admin, address, topic)
        if fields:
            numbers = [integer(fields, name, 0) for name in ("readQueueNums", "writeQueueNums", "perm")]
            found.add((integer(fields, WANTED, numbers[0]), numbers[1], numbers[2]))
    if not found:
        return QUEUES, PERMS["rw"]
    read_queues, write_queues, perm = found.pop()
    if found or read_queues != write_queues:
        raise ClientError(f"topic {topic!r} has different numbers of queues or permissions; give --queues and --perm")
    return read_queues, perm


async def do_delete(arguments: Any) -> int:
    async with Admin(arguments.settings) as admin:
        await admin.topic_route(arguments.topic)
        if not arguments.yes and not await confirmed(f"delete topic {arguments.topic} and all its messages?"):
            raise ClientError(f"topic {arguments.topic!r} was not deleted; answer yes, or give --yes")
        await admin.delete_topic(arguments.topic)
    if arguments.json:
        print_json({"topic": arguments.topic, "deleted": True})
    else:
        print(f"topic {arguments.topic} is deleted")
    return Exit.OK


async def show_stats(arguments: Any) -> int:
    async with Admin(arguments.settings) as admin:
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
    print_rows(heads, rows, as_json=arguments.json)
    if not arguments.json:
        print(plural(sum(row[4] for row in rows), "message"))
    return Exit.OK


COMMAND = Subcommand("topic", "list, create and delete topics, show their queues", configure, talking())
