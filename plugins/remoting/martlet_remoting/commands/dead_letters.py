"""``martlet dlq``: list, show and resend the dead letters of a group: messages that its consumers failed on too often.

A group's dead letters are the messages of its topic ``%DLQ%GROUP``. A resend leaves them there. The offset after the
last resent message is committed for the tools' group, so the next ``resend`` continues there.
"""

import argparse
from collections.abc import AsyncIterator
from typing import Any, Final

from martlet.cli.outcome import Exit
from martlet.cli.terminal import print_json, print_json_line
from martlet.contracts import Subcommand
from martlet.records.compression import COMPRESSED, COMPRESSION_BITS
from martlet.records.reserved import PAST, PAST_PREFIXES
from martlet_client import (
    Admin,
    ClientError,
    MessageQueue,
    PullConsumer,
    ReceivedMessage,
    RouteNotFound,
)
from martlet_client.messages import check_group, encoded
from martlet_client.network import TEMPLATE_TOPIC
from martlet_client.sending import Sending
from martlet_remoting.commands.common import day_time, one_line, plural, print_rows, subcommands
from martlet_remoting.commands.connecting import talking
from martlet_remoting.commands.messages import TOOLS_GROUP, message_fields
from martlet_remoting.commands.values import WHERE, Where, where, whole
from martlet_remoting.wire.answers.messages import RETRY_PREFIX
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.headers import SendHeader

__all__ = ["COMMAND"]

PREFIX: Final = "%DLQ%"
PRODUCER_GROUP: Final = "martlet_resend"
RETRIES: Final = 2
BEGIN: Final = Where("begin")
TRANSACTION_BITS: Final = 0xC  # of sysFlag

EPILOG = """\
examples:
  martlet dlq list                               groups with dead letters, and how many were not resent
  martlet dlq show billing                       one line each: time, offset, id, topic, body
  martlet dlq show billing --json | jq -r .id
  martlet dlq resend billing                     resend all that were not resent yet, to this group only
  martlet dlq resend billing --from 12 --count 1 resend the one at offset 12, even if it was resent already
  martlet dlq resend billing --topic orders.bad  resend to this topic instead
A group that pops has no topic for its retries: its dead letters go to the topic that they came from, for all groups.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = subcommands(parser, EPILOG)
    add("list", "list groups that have dead letters", show_list)
    showing = add("show", "show the dead letters of a group", show_letters)
    showing.add_argument("group", help="name of the group")
    showing.add_argument("--from", dest="start", default=BEGIN, type=where("--from"), metavar="WHERE", help=WHERE)
    showing.add_argument("--count", type=whole("--count", 1), metavar="N", help="stop after this many")
    resend = add("resend", "send dead letters to their group again", do_resend)
    resend.add_argument("group", help="name of the group")
    resend.add_argument(
        "--from",
        dest="start",
        type=where("--from"),
        metavar="WHERE",
        help=f"{WHERE}; default: where the last resend without --from ended",
    )
    resend.add_argument("--count", type=whole("--count", 1), metavar="N", help="stop after this many")
    resend.add_argument("--topic", help="send them to this topic, for all its groups, instead of to this group only")


async def show_list(arguments: Any) -> int:
    rows: list[tuple[object, ...]] = []
    async with Admin(arguments.settings) as admin, PullConsumer(arguments.settings, TOOLS_GROUP) as consumer:
        for topic in await admin.topics():
            if topic.startswith(PREFIX):
                stats = [each for each in await admin.topic_stats(topic) if each.max_offset > each.min_offset]
                not_resent = 0
                for each in stats:
                    resent_end = await consumer.committed(each.queue)
                    not_resent += each.max_offset - max(each.min_offset, resent_end or 0)
                messages = sum(each.max_offset - each.min_offset for each in stats)
                last_ms = max((each.last_update_ms for each in stats), default=0)
                rows.append((topic.removeprefix(PREFIX), messages, not_resent, day_time(last_ms)))
    print_rows(("group", "messages", "not resent", "last"), rows, as_json=arguments.json)
    return Exit.OK


async def show_letters(arguments: Any) -> int:
    left = arguments.count
    async with PullConsumer(arguments.settings, TOOLS_GROUP) as consumer:
        for queue in await _queues(arguments, consumer):
            start = await arguments.start.offset_in(consumer, queue)
            async for message in _letters(consumer, queue, start, left):
                left = None if left is None else left - 1
                _show(message, as_json=arguments.json)
    return Exit.OK


async def _queues(arguments: Any, consumer: PullConsumer) -> list[MessageQueue]:
    """Return the queues of the group's dead letters; empty if the group never had any."""
    group = arguments.group
    check_group(group)
    try:
        queues = await consumer.queues(PREFIX + group)
    except RouteNotFound:
        async with Admin(arguments.settings) as admin:
            if group not in await admin.groups():
                raise ClientError(
                    f"group {group!r} is unknown; `martlet dlq list` lists groups with dead letters"
                ) from None
        return []
    if not queues:
        text = f"dead letters of group {group!r} are not readable; allow reading with `martlet topic create"
        raise ClientError(f"{text} '{PREFIX}{group}' --queues 1`")
    return queues


async def _letters(
    consumer: PullConsumer, queue: MessageQueue, start: int, count: int | None
) -> AsyncIterator[ReceivedMessage]:
    if count == 0:
        return
    number = 0
    async for message in consumer.read(queue, start):
        yield message
        number += 1
        if number == count:
            return


def _origin(message: ReceivedMessage) -> str:
    """Return the original topic of *message*; empty if unknown."""
    return message.properties.get("RETRY_TOPIC") or message.properties.get("DLQ_ORIGIN_TOPIC", "")


def _show(message: ReceivedMessage, *, as_json: bool) -> None:
    if as_json:
        print_json_line({**message_fields(message), "origin_topic": _origin(message)})
        return
    tag = f" [{one_line(message.tags.encode())}]" if message.tags else ""
    where_ = f"{message.queue_offset} {message.message_id} {_origin(message) or '-'}"
    print(f"{day_time(message.store_ms)} {where_}{tag} {one_line(message.body)}")


async def do_resend(arguments: Any) -> int:
    resent = 0
    places: set[str] = set()
    async with PullConsumer(arguments.settings, TOOLS_GROUP) as consumer:
        network = consumer.network
        sending = Sending(network, PRODUCER_GROUP, RETRIES, arguments.settings.request_timeout_s, default_queues=1)
        for queue in await _queues(arguments, consumer):
            left = None if arguments.count is None else arguments.count - resent
            async for message in _letters(consumer, queue, await _begin(arguments, consumer, queue), left):
                header = _header(message, arguments, network.clock.now_ms())
                await sending.send(header, message.body, RequestCode.SEND_MESSAGE_V2)
                places.add(_place(header.topic, arguments))
                resent += 1
                if arguments.start is None:
                    await consumer.commit(queue, message.queue_offset + 1)
    if arguments.json:
        print_json({"group": arguments.group, "resent": resent})
    else:
        where_to = " and ".join(sorted(places)) or f"group {arguments.group}"
        print(f"{plural(resent, 'message')} resent to {where_to}")
    return Exit.OK


def _place(topic: str, arguments: Any) -> str:
    if topic == RETRY_PREFIX + arguments.group:
        return f"group {arguments.group}"
    return f"topic {topic}, for all its groups"


async def _begin(arguments: Any, consumer: PullConsumer, queue: MessageQueue) -> int:
    if arguments.start is not None:
        offset: int = await arguments.start.offset_in(consumer, queue)
        return offset
    return max(await consumer.min_offset(queue), await consumer.committed(queue) or 0)


def _header(message: ReceivedMessage, arguments: Any, now_ms: int) -> SendHeader:
    """Return the header for resending *message*: same id, keys and properties, and the full number of retries."""
    origin = _origin(message)
    properties = {
        name: text
        for name, text in message.properties.items()
        if name not in PAST and not name.startswith(PAST_PREFIXES)
    }
    topic = arguments.topic
    if topic is None and "RETRY_TOPIC" in properties:
        topic = RETRY_PREFIX + arguments.group
    else:
        # A group of another protocol has no retry topic: it consumes the original topic.
        properties.pop("RETRY_TOPIC", None)
        topic = topic or origin
    if not topic:
        raise ClientError(f"message {message.message_id!r} has no property with its original topic; give --topic")
    # The body was decompressed on receipt.
    sys_flag = message.sys_flag & ~(COMPRESSED | COMPRESSION_BITS | TRANSACTION_BITS)
    return SendHeader(
        producer_group=PRODUCER_GROUP,
        topic=topic,
        default_topic=TEMPLATE_TOPIC,
        default_queues=1,
        queue_id=-1,
        sys_flag=sys_flag,
        born_ms=now_ms,
        flag=message.flag,
        properties=encoded(properties).decode(),
    )


COMMAND = Subcommand("dlq", "list, show and resend dead letters", configure, talking())
