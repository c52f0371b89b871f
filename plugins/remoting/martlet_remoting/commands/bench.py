"""``martlet bench``: puts a short load on a running broker and measures it.

Only acknowledged messages count, and all are read back. The first messages, which open connections and create the
topic, are not measured. The load comes from one Python process, which is often the bottleneck; the output says so.
"""

import argparse
import time
from array import array
from collections.abc import Sequence
from typing import Any, Final

import trio

from martlet.cli.outcome import Exit
from martlet.cli.terminal import Bar, print_json, table
from martlet.contracts import Subcommand
from martlet_client import Admin, ClientError, Message, MessageQueue, Producer, PullConsumer
from martlet_remoting.commands.common import add_json
from martlet_remoting.commands.connecting import add_connection, talking
from martlet_remoting.commands.messages import TOOLS_GROUP
from martlet_remoting.commands.values import whole

__all__ = ["COMMAND"]

EPILOG = """\
examples:
  martlet bench                                    20,000 messages of 1 KiB, 64 in flight
  martlet bench --in-flight 1                      latency of a producer that sends one at a time
  martlet bench --size 128 --messages 100000
The topic is created if it does not exist, and is not deleted; retention removes its messages.
"""

TOPIC: Final = "MartletBench"
PRODUCER_GROUP: Final = "martlet_bench"
WARM: Final = 100
MIB: Final = 1024 * 1024


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    for option, default, metavar, text in (
        ("--messages", 20_000, "N", "number of messages"),
        ("--size", 1024, "BYTES", "size of each body"),
        ("--in-flight", 64, "N", "number of concurrent sends"),
        ("--queues", 4, "N", "number of queues of the topic, if it is created"),
    ):
        parser.add_argument(
            option, type=whole(option, 1), default=default, metavar=metavar, help=f"{text}; default %(default)s"
        )
    parser.add_argument("--topic", default=TOPIC, help="topic to use; default %(default)s")
    add_json(parser)
    add_connection(parser)


async def bench(arguments: Any) -> int:
    async with Admin(arguments.settings) as admin:
        if arguments.topic not in await admin.topics():
            await admin.create_topic(arguments.topic, queues=arguments.queues)
    async with PullConsumer(arguments.settings, TOOLS_GROUP) as consumer:
        sent = await _send(arguments)
        starts = sent.pop("starts")
        received = await _receive(arguments, consumer, starts)
    rows = [sent, received]
    if arguments.json:
        print_json(rows)
    else:
        heads = ("what", "messages", "seconds", "messages/s", "MiB/s", "p50 ms", "p99 ms", "p99.9 ms", "max ms")
        print(table(heads, [[row.get(head) for head in heads] for row in rows]))
        print(f"{arguments.size:,} B bodies, {arguments.in_flight} in flight, driven by one Python process")
    return Exit.OK


async def _send(arguments: Any) -> dict[str, Any]:
    body = bytes(arguments.size)
    latencies = array("d")
    left = arguments.messages
    bar = Bar("sending", "messages")
    settings = arguments.settings
    async with Producer(
        settings, PRODUCER_GROUP, send_timeout_s=settings.request_timeout_s, compress_over_bytes=1 << 30
    ) as producer:
        for _ in range(min(WARM, arguments.messages)):
            await producer.send(Message(arguments.topic, body))
        async with PullConsumer(arguments.settings, TOOLS_GROUP) as consumer:
            queues = await consumer.queues(arguments.topic)
            starts = {queue: await consumer.max_offset(queue) for queue in queues}

        async def keep_sending() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                began = time.perf_counter()
                await producer.send(Message(arguments.topic, body))
                latencies.append(time.perf_counter() - began)
                bar.update(len(latencies), arguments.messages)

        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(min(arguments.in_flight, arguments.messages)):
                nursery.start_soon(keep_sending)
        spent = time.perf_counter() - began
    bar.close()
    return {**_row("send", len(latencies), arguments.size, spent), **_percentiles(latencies), "starts": starts}


async def _receive(arguments: Any, consumer: PullConsumer, starts: dict[MessageQueue, int]) -> dict[str, Any]:
    received = 0
    bar = Bar("receiving", "messages")

    async def read(queue: MessageQueue, start: int) -> None:
        nonlocal received
        async for _ in consumer.read(queue, start):
            received += 1
            bar.update(received, arguments.messages)

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for queue, start in starts.items():
            nursery.start_soon(read, queue, start)
    spent = time.perf_counter() - began
    bar.close()
    if received < arguments.messages:
        raise ClientError(f"{arguments.messages} messages were acknowledged, but only {received} could be read back")
    return _row("receive", received, arguments.size, spent)


def _row(what: str, messages: int, size: int, spent_s: float) -> dict[str, Any]:
    return {
        "what": what,
        "messages": messages,
        "seconds": round(spent_s, 3),
        "messages/s": round(messages / spent_s),
        "MiB/s": round(messages * size / spent_s / MIB, 1),
    }


def _percentiles(latencies: Sequence[float]) -> dict[str, float]:
    ordered = sorted(latencies)
    last = len(ordered) - 1
    found = {f"p{share:g} ms": ordered[round(last * share / 100)] * 1000 for share in (50, 99, 99.9)}
    found["max ms"] = ordered[last] * 1000
    return {name: round(value, 3) for name, value in found.items()}


COMMAND = Subcommand("bench", "put a short load on a running broker and measure it", configure, talking(bench))
