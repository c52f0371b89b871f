"""``martlet send``: sends the command line's text, each file, or each line of stdin as a message."""

import argparse
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, BinaryIO, Final, TypeAlias, final

import trio
from msgspec import Struct

from martlet.cli.outcome import Exit, UsageError, complain
from martlet.cli.terminal import print_json_line
from martlet.contracts import Subcommand
from martlet_client import ClientError, Message, Producer, SendResult
from martlet_client.messages import BODY_BYTES_MAX
from martlet_remoting.commands.common import add_json, plural
from martlet_remoting.commands.connecting import add_connection, talking
from martlet_remoting.commands.values import duration, moment, whole

__all__ = ["COMMAND", "configure", "send"]

PRODUCER_GROUP: Final = "martlet_send"
DELAYS: Final = ("--delay", "--deliver-at", "--delay-level")
SENDS_AT_ONCE: Final = 32
STDIN_BYTES: Final = 65536

EPILOG = """\
examples:
  martlet send orders 'one book'                       one message
  martlet send orders 'one book' --tag books --key 4711 --property colour=red
  seq 1 1000 | martlet send orders                     each line of stdin is a message
  martlet send orders --key-separator : < lines        each line is KEY:BODY
  martlet send photos --file a.jpg --file b.jpg        each file is a message, byte for byte
  martlet send reminders tea --delay 10m               deliver it in ten minutes
  martlet send reminders tea --deliver-at 2026-03-01T12:00
  tar c src | martlet send backups --file -            all of stdin is one message
"""


@final
class Item(Struct, frozen=True):
    """The body of a message to send, and the key that its line contains."""

    body: bytes
    keys: tuple[str, ...] = ()


SendOne: TypeAlias = Callable[[Item], Awaitable[None]]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("topic", help="topic to send to")
    parser.add_argument("body", nargs="?", help="text to send; without it and --file, each line of stdin is a message")
    parser.add_argument(
        "-f",
        "--file",
        action="append",
        default=[],
        metavar="FILE",
        help="send this whole file as one message, - for stdin; can be repeated",
    )
    parser.add_argument("--tag", default="", help="tag, by which consumers can select messages")
    parser.add_argument(
        "--key", action="append", default=[], help="key, by which `martlet message` finds the message; can be repeated"
    )
    parser.add_argument(
        "--key-separator", metavar="TEXT", help="text between the key and the body in each line of stdin"
    )
    parser.add_argument(
        "--property", action="append", default=[], metavar="NAME=VALUE", help="property of the message; can be repeated"
    )
    _add_delays(parser)
    add_json(parser)
    add_connection(parser)


def _add_delays(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--delay",
        type=duration("--delay"),
        default=0,
        metavar="TIME",
        help="deliver the messages so much later: 500ms, 30s, 10m, 1h30m, 2d",
    )
    parser.add_argument(
        "--deliver-at",
        type=moment("--deliver-at"),
        default=0,
        metavar="TIME",
        help="deliver the messages at this time: 2026-03-01T12:00, or milliseconds since 1970",
    )
    parser.add_argument(
        "--delay-level",
        type=whole("--delay-level"),
        default=0,
        metavar="N",
        help="deliver the messages later: 1 is 1 s, 18 is 2 h, as the broker's timer.levels says",
    )


def _properties(pairs: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--property {pair!r} is not NAME=VALUE; for example colour=red")
        found[name] = value
    return found


def _check(arguments: Any) -> None:
    if arguments.body is not None and arguments.file:
        raise UsageError(
            f"body {arguments.body!r} was given along with --file {arguments.file[0]!r}; give only one of them"
        )
    if arguments.key_separator is not None and (arguments.body is not None or arguments.file):
        raise UsageError("--key-separator applies only to lines of stdin; use --key for a body or a file")
    if arguments.key_separator == "":
        raise UsageError("--key-separator '' is empty; give the text between key and body, for example :")
    delays = {name: getattr(arguments, name[2:].replace("-", "_")) for name in DELAYS}
    given = [name for name, value in delays.items() if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} were given together; a message has one delay, give only one of them")


@final
class MessageSource:
    """The messages to send; ``blank`` counts the empty lines, which are not sent."""

    def __init__(self, arguments: Any) -> None:
        self.blank = 0
        self._arguments = arguments

    def items(self) -> Iterator[Item]:
        """Yield the messages from the command line, the files or stdin; blocks while it waits for stdin."""
        arguments = self._arguments
        if arguments.body is not None:
            yield Item(arguments.body.encode("utf-8", "surrogateescape"))
        elif arguments.file:
            for path in arguments.file:
                yield Item(_content(path))
        else:
            yield from self._lines()

    def _lines(self) -> Iterator[Item]:
        separator = self._arguments.key_separator
        for number, line in enumerate(_lines(_stdin()), 1):
            body = line.removesuffix(b"\r")
            if not body:
                self.blank += 1
                continue
            if separator is None:
                yield Item(body)
                continue
            key, found, body = body.partition(separator.encode())
            if not found or not key or not body:
                raise ClientError(f"line {number} is not KEY{separator}BODY; its first bytes are {line[:40]!r}")
            yield Item(body, (_key(key, number),))


def _key(key: bytes, number: int) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        text = f"key {key[:40]!r} of line {number} is not UTF-8; only bodies may contain other bytes"
        raise ClientError(text) from None


def _stdin() -> BinaryIO:
    """Return stdin, unbuffered: a thread that waits in a buffered reader would hold the reader's lock at exit."""
    if sys.stdin is None:
        raise UsageError("body is missing and stdin is closed; give a body or --file")
    if sys.stdin.isatty():
        complain("reading messages from the terminal, one per line; end with Ctrl-D")
    found: BinaryIO = getattr(sys.stdin.buffer, "raw", sys.stdin.buffer)
    return found


def _lines(source: BinaryIO) -> Iterator[bytes]:
    partial_line = b""
    line_number = 1
    while data := source.read(STDIN_BYTES):
        *lines, partial_line = (partial_line + data).split(b"\n")
        yield from lines
        line_number += len(lines)
        if len(partial_line) > BODY_BYTES_MAX:
            raise ClientError(
                f"line {line_number} is larger than {BODY_BYTES_MAX} bytes, the limit of a body; send less"
            )
    if partial_line:
        yield partial_line


def _content(path: str) -> bytes:
    """Return all bytes of a file; stop reading soon after the limit of a body."""
    try:
        if path == "-":
            body = _read_body(_stdin())
        else:
            with open(path, "rb") as source:
                body = _read_body(source)
    except OSError as error:
        raise UsageError(f"file {path!r} cannot be read; {error.strerror}") from error
    if not body:
        raise ClientError(f"file {path!r} is empty; brokers refuse empty messages")
    if len(body) > BODY_BYTES_MAX:
        raise ClientError(f"file {path!r} is larger than {BODY_BYTES_MAX} bytes, the limit of a body; send less")
    return body


def _read_body(source: BinaryIO) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while size <= BODY_BYTES_MAX and (data := source.read(STDIN_BYTES)):
        pieces.append(data)
        size += len(data)
    return b"".join(pieces)


async def send(arguments: Any) -> int:
    _check(arguments)
    properties = _properties(arguments.property)
    source = MessageSource(arguments)
    summed_up = arguments.body is None and len(arguments.file) != 1 and not arguments.json
    stored = 0
    async with Producer(
        arguments.settings, PRODUCER_GROUP, send_timeout_s=arguments.settings.request_timeout_s
    ) as producer:
        # A send outlasts an outage, but an address without a listener is more likely a mistake: this request fails at
        # once.
        await producer.queues(arguments.topic)

        async def send_one(item: Item) -> None:
            nonlocal stored
            keys = (*arguments.key, *item.keys)
            message = Message(
                arguments.topic,
                item.body,
                arguments.tag,
                keys,
                properties,
                delay_level=arguments.delay_level,
                delay_ms=arguments.delay,
                deliver_at_ms=arguments.deliver_at,
            )
            result = await producer.send(message)
            stored += 1
            if not summed_up:
                _show(result, as_json=arguments.json)

        complete = False
        try:
            await send_each(source.items(), send_one)
            complete = True
        finally:
            if summed_up and stored and not complete:
                complain(f"{plural(stored, 'message')} stored before the error")
    if source.blank:
        complain(f"{plural(source.blank, 'blank line')} not sent; brokers refuse empty messages")
    if summed_up:
        print(f"{plural(stored, 'message')} stored")
    return Exit.OK


def _show(result: SendResult, *, as_json: bool) -> None:
    queue = result.queue
    if as_json:
        print_json_line(
            {
                "id": result.message_id,
                "offset_id": result.offset_message_id,
                "topic": queue.topic,
                "broker": queue.broker_name,
                "queue": queue.queue_id,
                "offset": result.queue_offset,
                "status": result.status.name,
                "recall_handle": result.recall_handle,
            }
        )
    else:
        where = f"{queue.broker_name}, queue {queue.queue_id}, offset {result.queue_offset}"
        print(f"stored on {where}; id {result.message_id}")
        if result.recall_handle:
            print(f"recall it with: martlet timer recall {result.recall_handle}")


async def send_each(items: Iterator[Item], send_one: SendOne) -> None:
    """Send *items*: the first alone, because it may create the topic, then the others concurrently.

    If *items* raises an error, it is raised after the sends in flight are finished and counted.
    """
    failed: Exception | None = None
    first = await trio.to_thread.run_sync(next, items, None, abandon_on_cancel=True)
    if first is None:
        return
    await send_one(first)
    async with trio.open_nursery() as nursery:
        under_way: list[trio.Event] = []
        while True:
            try:
                item = await trio.to_thread.run_sync(next, items, None, abandon_on_cancel=True)
            except (ClientError, UsageError, OSError) as error:
                failed = error
                break
            if item is None:
                break
            done = trio.Event()
            under_way.append(done)
            nursery.start_soon(_then, send_one, item, done)
            if len(under_way) >= SENDS_AT_ONCE:
                await under_way.pop(0).wait()
    if failed is not None:
        raise failed


async def _then(send_one: SendOne, item: Item, done: trio.Event) -> None:
    await send_one(item)
    done.set()


COMMAND = Subcommand("send", "send messages to a topic", configure, talking(send))
