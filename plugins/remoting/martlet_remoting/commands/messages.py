"""``martlet send``, ``martlet tail`` and ``martlet message``."""

import argparse
import math
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import trio

from martlet.commands.outcome import Exit
from martlet.commands.terminal import print_json
from martlet.contracts import Command
from martlet_remoting.client import (
    Admin,
    ClientError,
    Message,
    MessageNotFound,
    MessageQueue,
    Producer,
    PullConsumer,
    ReceivedMessage,
)

from .shared import ANSWER_S, add_json, add_name_server, day_time, moment_ms, talking

__all__ = ["SEND", "SHOW", "TAIL"]

PRODUCER_GROUP: Final = "martlet_send"
CONSUMER_GROUP: Final = "martlet_tail"
SENDS_AT_ONCE: Final = 32
STDIN_BYTES: Final = 65536

SEND_EPILOG = """\
examples:
  martlet send orders 'one book'                       one message
  martlet send orders 'one book' --tag books --key 4711 --property colour=red
  seq 1 1000 | martlet send orders                     every line of stdin is a message
"""

TAIL_EPILOG = """\
examples:
  martlet tail orders                                  every message that comes from now on, until Ctrl-C
  martlet tail orders --from begin --no-follow         what is there
  martlet tail orders --from 15m --tag 'books || pens' --json
It reads beside all groups: nothing is committed, nobody's messages are taken away.
"""

SHOW_EPILOG = """\
examples:
  martlet message 7F00000100002A9F00000000000003E8     by offset message id, as `martlet send` prints it
  martlet message --key 4711 --topic orders            by key
"""


# send


def configure_send(parser: argparse.ArgumentParser) -> None:
    parser.epilog = SEND_EPILOG
    parser.add_argument("topic", help="where to")
    parser.add_argument("body", nargs="?", help="the text; without it every line of stdin is a message")
    parser.add_argument("--tag", default="", help="consumers select by it")
    parser.add_argument("--key", action="append", default=[], help="found again by it; may be given often")
    parser.add_argument(
        "--property", action="append", default=[], metavar="NAME=VALUE", help="a property; may be given often"
    )
    add_name_server(parser)
    add_json(parser)


def _properties(pairs: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"property {pair!r} is not NAME=VALUE")
        found[name] = value
    return found


def _bodies(arguments: Any) -> Iterator[bytes]:
    if arguments.body is not None:
        yield arguments.body.encode()
        return
    for line in _lines(getattr(sys.stdin.buffer, "raw", sys.stdin.buffer)):
        body = line.rstrip(b"\r")
        if body:
            yield body


def _lines(source: BinaryIO) -> Iterator[bytes]:
    """The lines of *source*, unbuffered: a thread that waits in a buffered reader holds its lock to the very end."""
    rest = b""
    while data := source.read(STDIN_BYTES):
        *whole, rest = (rest + data).split(b"\n")
        yield from whole
    yield rest


async def send(arguments: Any) -> int:
    properties = _properties(arguments.property)
    quiet = arguments.body is None and not arguments.json
    sent = 0
    async with Producer(arguments.name_server, PRODUCER_GROUP, send_timeout_s=ANSWER_S) as producer:
        limit = trio.CapacityLimiter(SENDS_AT_ONCE)

        async def send_one(body: bytes) -> None:
            nonlocal sent
            message = Message(arguments.topic, body, arguments.tag, tuple(arguments.key), properties)
            async with limit:
                result = await producer.send(message)
            sent += 1
            if arguments.json:
                print_json(
                    {
                        "id": result.message_id,
                        "offset_id": result.offset_message_id,
                        "broker": result.queue.broker_name,
                        "queue": result.queue.queue_id,
                        "offset": result.queue_offset,
                        "status": result.status.name,
                    }
                )
            elif not quiet:
                where = f"{result.queue.broker_name}, queue {result.queue.queue_id}, offset {result.queue_offset}"
                print(f"stored on {where}; id {result.offset_message_id}")

        await _each(_bodies(arguments), send_one)
    if quiet:
        print(f"{sent:,} messages stored")
    return Exit.OK


async def _each(bodies: Iterator[bytes], send_one: Any) -> None:
    """Send *bodies*, the first alone because it may create the topic, the others some at once."""
    first = await trio.to_thread.run_sync(next, bodies, None, abandon_on_cancel=True)
    if first is None:
        return
    await send_one(first)
    async with trio.open_nursery() as nursery:
        waiting: list[trio.Event] = []
        while (body := await trio.to_thread.run_sync(next, bodies, None, abandon_on_cancel=True)) is not None:
            done = trio.Event()
            waiting.append(done)
            nursery.start_soon(_then, send_one, body, done)
            if len(waiting) >= SENDS_AT_ONCE:
                await waiting.pop(0).wait()


async def _then(send_one: Any, body: bytes, done: trio.Event) -> None:
    await send_one(body)
    done.set()


# tail


def configure_tail(parser: argparse.ArgumentParser) -> None:
    parser.epilog = TAIL_EPILOG
    parser.add_argument("topic", help="which topic")
    parser.add_argument(
        "--from",
        dest="start",
        default="end",
        metavar="WHERE",
        help="begin, end, a time (2026-03-01T12:00), or 15m: 15 minutes ago; default %(default)s",
    )
    parser.add_argument("--tag", default="*", help="only these, as a consumer says it: 'books || pens'")
    parser.add_argument("--queue", type=int, help="only this queue")
    parser.add_argument("--count", type=int, metavar="N", help="end after so many messages")
    parser.add_argument("--no-follow", action="store_true", help="end at what is there now")
    add_name_server(parser)
    add_json(parser)


async def tail(arguments: Any) -> int:
    start_ms = None if arguments.start in ("begin", "end") else moment_ms(arguments.start)
    async with PullConsumer(arguments.name_server, CONSUMER_GROUP) as consumer:
        queues = [q for q in await consumer.queues(arguments.topic) if arguments.queue in (None, q.queue_id)]
        if not queues:
            raise ClientError(f"topic {arguments.topic!r} has no queue {arguments.queue}")
        left = [math.inf if arguments.count is None else arguments.count]
        async with trio.open_nursery() as nursery:

            async def read(queue: MessageQueue, offset: int) -> None:
                messages = consumer.read(queue, offset, expression=arguments.tag, follow=not arguments.no_follow)
                async for message in messages:
                    if left[0] > 0:
                        left[0] -= 1
                        show(message, arguments.json)
                    if left[0] <= 0:
                        nursery.cancel_scope.cancel()

            for queue in queues:
                nursery.start_soon(read, queue, await _start(consumer, queue, arguments.start, start_ms))
    return Exit.OK


async def _start(consumer: PullConsumer, queue: MessageQueue, where: str, start_ms: int | None) -> int:
    if start_ms is not None:
        return await consumer.search_offset(queue, start_ms)
    return await (consumer.min_offset(queue) if where == "begin" else consumer.max_offset(queue))


def show(message: ReceivedMessage, as_json: bool) -> None:
    """Print *message*, on one line for people."""
    if as_json:
        print_json(_fields(message))
    else:
        tag = f" [{message.tags}]" if message.tags else ""
        print(
            f"{day_time(message.store_ms)} {message.queue.queue_id}/{message.queue_offset}{tag} {_text(message.body)}"
        )
    sys.stdout.flush()


def _text(body: bytes) -> str:
    text = body.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _fields(message: ReceivedMessage) -> dict[str, object]:
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
        "body": message.body.decode("utf-8", "backslashreplace"),
    }


# message


def configure_show(parser: argparse.ArgumentParser) -> None:
    parser.epilog = SHOW_EPILOG
    parser.add_argument("id", nargs="?", help="an offset message id, or with --topic a unique key")
    parser.add_argument("--key", help="find by key instead; needs --topic")
    parser.add_argument("--topic", default="", help="the topic it is in")
    add_name_server(parser)
    add_json(parser)


async def show_one(arguments: Any) -> int:
    if (arguments.id is None) == (arguments.key is None):
        raise ValueError("give either an id or --key")
    if arguments.key is not None and not arguments.topic:
        raise ValueError("--key needs --topic, for keys are a topic's own")
    async with Admin(arguments.name_server) as admin:
        if arguments.key is None:
            found = [await admin.message(arguments.id, arguments.topic)]
        else:
            found = await admin.messages_by_key(arguments.topic, arguments.key)
    if not found:
        raise MessageNotFound(f"no message of topic {arguments.topic!r} has key {arguments.key!r}")
    if arguments.json:
        print_json([_fields(message) for message in found])
        return Exit.OK
    for message in found:
        fields = _fields(message)
        fields["stored"] = day_time(message.store_ms)
        fields["born"] = day_time(message.born_ms)
        fields["body"] = _text(message.body)
        for name in ("born_ms", "stored_ms"):
            del fields[name]
        print("\n".join(f"{name:13} {_value(value)}" for name, value in fields.items() if value not in ("", [], {})))
        print()
    return Exit.OK


def _value(value: object) -> str:
    if isinstance(value, dict):
        return _text(", ".join(f"{name}={text}" for name, text in value.items()).encode())
    return _text(str(value).encode("utf-8", "backslashreplace")) if not isinstance(value, list) else " ".join(value)


SEND = Command("send", "send messages to a topic", configure_send, talking(send))
TAIL = Command("tail", "show messages of a topic as they come", configure_tail, talking(tail))
SHOW = Command("message", "find messages by id or by key", configure_show, talking(show_one))
