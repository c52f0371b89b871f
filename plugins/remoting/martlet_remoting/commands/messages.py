"""``martlet tail`` and ``martlet message``: show messages as they arrive, or by id or key."""

import argparse
from typing import Any, Final

import trio

from martlet.cli.outcome import Exit, UsageError, flush_output
from martlet.cli.terminal import body_fields, print_json, print_json_line
from martlet.contracts import Subcommand
from martlet_client import (
    Admin,
    ClientError,
    MessageNotFound,
    MessageQueue,
    PullConsumer,
    ReceivedMessage,
    Sql,
)
from martlet_client.network import split_address
from martlet_remoting.commands.common import add_json, day_time, one_line
from martlet_remoting.commands.connecting import add_connection, talking
from martlet_remoting.commands.values import WHERE, Where, sql, tags, where, whole
from martlet_remoting.wire.answers.messages import parse_message_id

__all__ = ["SHOW", "TAIL", "TOOLS_GROUP", "choose_queues", "message_fields", "show"]

# RocketMQ's group for tools (MixAll.TOOLS_CONSUMER_GROUP); every broker has it, so reading creates no group.
TOOLS_GROUP: Final = "TOOLS_CONSUMER"

TAIL_EPILOG = """\
examples:
  martlet tail orders                                  new messages, until Ctrl-C
  martlet tail orders --from begin --no-follow         all stored messages
  martlet tail orders --from 15m --tag 'books || pens'
  martlet tail orders --sql "price > 100 AND colour IN ('red', 'blue')"
  martlet tail orders --queue 3 --from 4711 --count 1  the message at offset 4711 of queue 3
  martlet tail orders --json | jq -r .body             one JSON object per line
It does not affect consumer groups: it commits nothing and takes no messages from them.
In JSON, a body that is not UTF-8 is in base64; body_encoding tells which.
"""

SHOW_EPILOG = """\
examples:
  martlet message AC11000201AB3E25A3B2000000000001 --topic orders    find by the id that `martlet send` prints
  martlet message --key 4711 --topic orders                          find by key
  martlet message 7F00000100002A9F00000000000003E8                   find by offset_id, which needs no topic
"""


# tail


def configure_tail(parser: argparse.ArgumentParser) -> None:
    parser.epilog = TAIL_EPILOG
    parser.add_argument("topic", help="topic to read")
    parser.add_argument(
        "--from", dest="start", default="end", type=where("--from"), metavar="WHERE", help=f"{WHERE}; default end"
    )
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument(
        "--tag", default="*", type=tags("--tag"), help="only messages with these tags, such as 'books || pens'"
    )
    selection.add_argument(
        "--sql",
        type=sql("--sql"),
        metavar="EXPRESSION",
        help='only messages whose properties match, such as "price > 100"',
    )
    parser.add_argument("--queue", type=whole("--queue"), metavar="N", help="only this queue of each broker")
    parser.add_argument("--count", type=whole("--count", 1), metavar="N", help="stop after this many messages")
    parser.add_argument(
        "--no-follow", action="store_true", help="stop at the current end instead of waiting for new messages"
    )
    add_json(parser)
    add_connection(parser)


async def tail(arguments: Any) -> int:
    start: Where = arguments.start
    left: int | None = arguments.count
    expression = Sql(arguments.sql) if arguments.sql else arguments.tag
    async with PullConsumer(arguments.settings, TOOLS_GROUP) as consumer:
        queues = await choose_queues(consumer, arguments.topic, arguments.queue)
        starts = {queue: await start.offset_in(consumer, queue) for queue in queues}
        if arguments.no_follow and start.offset is not None:
            await _check_within(consumer, start.offset, queues)
        async with trio.open_nursery() as nursery:

            async def read(queue: MessageQueue, offset: int) -> None:
                nonlocal left
                messages = consumer.read(queue, offset, expression=expression, follow=not arguments.no_follow)
                async for message in messages:
                    if left != 0:
                        left = None if left is None else left - 1
                        show(message, as_json=arguments.json)
                    if left == 0:
                        nursery.cancel_scope.cancel()

            for queue, offset in starts.items():
                nursery.start_soon(read, queue, offset)
    return Exit.OK


async def _check_within(consumer: PullConsumer, offset: int, queues: list[MessageQueue]) -> None:
    """Raise a `ClientError` if *offset* is beyond the end of all *queues*: no message would be shown."""
    end = max([await consumer.max_offset(queue) for queue in queues])
    if offset > end:
        where = f"queue {queues[0].queue_id}" if len(queues) == 1 else "each queue"
        text = f"--from {offset} is beyond the end of {where} of topic {queues[0].topic!r}"
        raise ClientError(f"{text}; messages end at offset {end}")


async def choose_queues(consumer: PullConsumer, topic: str, queue_id: int | None) -> list[MessageQueue]:
    """Return the readable queues of *topic*: all, or with a *queue_id* the queues that have it."""
    queues = await consumer.queues(topic)
    if not queues:
        raise ClientError(f"topic {topic!r} has no readable queue; `martlet topic list --all` shows its permissions")
    chosen_queues = [queue for queue in queues if queue_id in (None, queue.queue_id)]
    if not chosen_queues:
        last_id = max(queue.queue_id for queue in queues)
        raise ClientError(f"topic {topic!r} has no queue {queue_id}; it has 0 to {last_id}")
    return chosen_queues


def show(message: ReceivedMessage, *, as_json: bool) -> None:
    """Print *message* on one line."""
    if as_json:
        print_json_line(message_fields(message))
    else:
        tag = f" [{one_line(message.tags.encode())}]" if message.tags else ""
        place = f"{message.queue.queue_id}/{message.queue_offset}"
        print(f"{day_time(message.store_ms)} {place}{tag} {one_line(message.body)}")
    flush_output()


def message_fields(message: ReceivedMessage) -> dict[str, object]:
    """Return the fields of *message* for JSON."""
    return {
        "topic": message.topic,
        "broker": message.queue.broker_name,
        "queue": message.queue.queue_id,
        "offset": message.queue_offset,
        "id": message.message_id,
        "offset_id": message.offset_message_id,
        "tag": message.tags,
        "keys": list(message.keys),
        "properties": message.properties,
        "born_ms": message.born_ms,
        "born_host": message.born_host,
        "stored_ms": message.store_ms,
        "redeliveries": message.reconsume_times,
        **body_fields(message.body),
    }


# message


def configure_show(parser: argparse.ArgumentParser) -> None:
    parser.epilog = SHOW_EPILOG
    parser.add_argument("id", nargs="?", help="id of the message, which requires --topic, or its offset_id")
    parser.add_argument("--key", help="find by key instead; requires --topic")
    parser.add_argument("--topic", default="", help="topic of the message")
    add_json(parser)
    add_connection(parser)


async def show_found(arguments: Any) -> int:
    if (arguments.id is None) == (arguments.key is None):
        raise UsageError("command needs either a message id or --key; give exactly one of them")
    if arguments.key is not None and not arguments.topic:
        raise UsageError(
            f"--key {arguments.key!r} needs a topic; give --topic, because each topic has its own key index"
        )
    async with Admin(arguments.settings) as admin:
        if arguments.key is None:
            found = [await _by_id(admin, arguments.id, arguments.topic)]
        else:
            found = await admin.messages_by_key(arguments.topic, arguments.key)
    if not found:
        raise MessageNotFound(f"key {arguments.key!r} has no message in topic {arguments.topic!r}")
    if arguments.json:
        print_json([message_fields(message) for message in found])
    else:
        print("\n\n".join(map(_card, found)))
    return Exit.OK


async def _by_id(admin: Admin, message_id: str, topic: str) -> ReceivedMessage:
    if not topic:
        try:
            split_address(parse_message_id(message_id)[0])
        except ValueError as error:
            text = f"message id {message_id!r} is not an offset_id"
            raise MessageNotFound(f"{text}; give --topic to find a message by its id") from error
    return await admin.message(message_id, topic)


def _card(message: ReceivedMessage) -> str:
    fields = message_fields(message)
    fields["stored"], fields["born"] = day_time(message.store_ms), day_time(message.born_ms)
    fields["body"] = one_line(message.body)
    for name in ("born_ms", "stored_ms", "body_encoding"):
        del fields[name]
    return "\n".join(f"{name:13} {_value(value)}" for name, value in fields.items() if value not in ("", [], {}))


def _value(value: object) -> str:
    if isinstance(value, dict):
        text = ", ".join(f"{name}={value}" for name, value in value.items())
    else:
        text = " ".join(value) if isinstance(value, list) else str(value)
    return one_line(text.encode("utf-8", "backslashreplace"))


TAIL = Subcommand("tail", "show the messages of a topic as they arrive", configure_tail, talking(tail))
SHOW = Subcommand("message", "find messages by id or by key", configure_show, talking(show_found))
