"""``martlet send``: one message from the command line, one from each file, or one from each line of stdin."""

import argparse
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, TypeAlias, final

import trio

from martlet.cli.outcome import Exit, UsageError, complain
from martlet.cli.terminal import print_json_line
from martlet.contracts import Command
from martlet_remoting.client import ClientError, Message, Producer, SendResult
from martlet_remoting.client.messages import BODY_BYTES_MAX

from .connecting import add_connection, talking
from .shared import add_json, plural

__all__ = ["COMMAND", "configure", "send"]

PRODUCER_GROUP: Final = "martlet_send"
SENDS_AT_ONCE: Final = 32
STDIN_BYTES: Final = 65536

EPILOG = """\
examples:
  martlet send orders 'one book'                       one message
  martlet send orders 'one book' --tag books --key 4711 --property colour=red
  seq 1 1000 | martlet send orders                     every line of stdin is a message
  martlet send orders --key-separator : < lines        every line is KEY:BODY
  martlet send photos --file a.jpg --file b.jpg        every file is a message, byte for byte
  tar c src | martlet send backups --file -            all of stdin is one message
"""


@final
@dataclass(frozen=True, slots=True)
class Item:
    """A message to be: its body, and the key that its line has."""

    body: bytes
    keys: tuple[str, ...] = ()


SendOne: TypeAlias = Callable[[Item], Awaitable[None]]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("topic", help="where to")
    parser.add_argument("body", nargs="?", help="the text; without it and --file every line of stdin is a message")
    parser.add_argument(
        "-f",
        "--file",
        action="append",
        default=[],
        metavar="FILE",
        help="send the whole file as one message, - for stdin; may be given often",
    )
    parser.add_argument("--tag", default="", help="consumers select by it")
    parser.add_argument("--key", action="append", default=[], help="found again by it; may be given often")
    parser.add_argument("--key-separator", metavar="TEXT", help="every line of stdin is a key, this text, and the body")
    parser.add_argument(
        "--property", action="append", default=[], metavar="NAME=VALUE", help="a property; may be given often"
    )
    add_json(parser)
    add_connection(parser)


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
        raise UsageError(f"body {arguments.body!r} comes with --file {arguments.file[0]!r}; give only one of both")
    if arguments.key_separator is not None and (arguments.body is not None or arguments.file):
        raise UsageError("--key-separator is for the lines of stdin; give --key to a body or a file")
    if arguments.key_separator == "":
        raise UsageError("--key-separator '' is empty; give what is between key and body, for example :")


@final
class Source:
    """What is to be sent, one item after the other; ``blank`` counts the lines that are no message."""

    def __init__(self, arguments: Any) -> None:
        self.blank = 0
        self._arguments = arguments

    def items(self) -> Iterator[Item]:
        """Yield what the command line asks for; blocks where stdin does."""
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
            yield Item(body, (key.decode("utf-8", "replace"),))


def _stdin() -> BinaryIO:
    """Standard input, unbuffered: a thread that waits in a buffered reader holds its lock to the very end."""
    if sys.stdin is None:
        raise UsageError("body is missing and stdin is closed; give a body, or --file")
    if sys.stdin.isatty():
        complain("reading messages from the terminal, one a line; Ctrl-D ends")
    found: BinaryIO = getattr(sys.stdin.buffer, "raw", sys.stdin.buffer)
    return found


def _lines(source: BinaryIO) -> Iterator[bytes]:
    rest = b""
    number = 1
    while data := source.read(STDIN_BYTES):
        *whole, rest = (rest + data).split(b"\n")
        yield from whole
        number += len(whole)
        if len(rest) > BODY_BYTES_MAX:
            raise ClientError(f"line {number} is over the limit of {BODY_BYTES_MAX} bytes; a body can have no more")
    if rest:
        yield rest


def _content(path: str) -> bytes:
    """All bytes of a file; somewhat more than fits a message is enough to be refused."""
    try:
        if path == "-":
            body = _read_body(_stdin())
        else:
            with open(path, "rb") as source:
                body = _read_body(source)
    except OSError as error:
        raise UsageError(f"file {path!r} cannot be read; {error.strerror}") from error
    if not body:
        raise ClientError(f"file {path!r} is empty; brokers take no empty message")
    if len(body) > BODY_BYTES_MAX:
        raise ClientError(f"file {path!r} is over the limit of {BODY_BYTES_MAX} bytes; a body can have no more")
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
    source = Source(arguments)
    summed_up = arguments.body is None and len(arguments.file) != 1 and not arguments.json
    stored = 0
    async with Producer(
        arguments.settings, PRODUCER_GROUP, send_timeout_s=arguments.settings.request_timeout_s
    ) as producer:

        async def send_one(item: Item) -> None:
            nonlocal stored
            keys = (*arguments.key, *item.keys)
            result = await producer.send(Message(arguments.topic, item.body, arguments.tag, keys, properties))
            stored += 1
            if not summed_up:
                _show(result, as_json=arguments.json)

        try:
            await send_each(source.items(), send_one)
        except BaseException:
            if summed_up and stored:
                complain(f"{plural(stored, 'message')} stored before it ended")
            raise
    if source.blank:
        complain(f"{plural(source.blank, 'blank line')} not sent; brokers take no empty message")
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
            }
        )
    else:
        where = f"{queue.broker_name}, queue {queue.queue_id}, offset {result.queue_offset}"
        print(f"stored on {where}; id {result.message_id}")


async def send_each(items: Iterator[Item], send_one: SendOne) -> None:
    """Send *items*, the first alone because it may create the topic, the others some at once.

    When *items* ends with an error, those before it are sent first: they may be stored already, and must be counted.
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


COMMAND = Command("send", "send messages to a topic", configure, talking(send))
