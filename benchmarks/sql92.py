"""What a scan by SQL92 costs inside the process: pulls over a backlog of which few messages match, no socket.

    python benchmarks/sql92.py [--rounds 5] [--messages 200000] [--body 128] [--queues 16]

Pulls of 32 messages by each expression go through all queues in turn, from the first to the last offset; each message
has ``a`` = 0 to 99, so that one of a hundred matches. The log is in the page cache. Prints the least of the rounds, in
processor time: microseconds per message scanned, and messages per second; and the longest single pull.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import trio

from martlet import contracts
from martlet.broker import Broker
from martlet.message import Message, encode_properties
from martlet.store import StoreConfig
from martlet.testing.peers import serving
from martlet_filter_sql92.plugin import Sql92Config, Sql92Plugin
from martlet_remoting.config import RemotingConfig
from martlet_remoting.handler import RemotingHandler
from martlet_remoting.handlers.context import RemotingState
from martlet_remoting.wire.codec import FrameBuffer, encode_command
from martlet_remoting.wire.connection import RemotingConnection
from martlet_remoting.wire.packets import Command

EXPRESSIONS = (
    "a = 7",
    "a = '7'",
    "colour = 'violet' AND a > 50",
    "a IN ('7', '8', '9')",
    "colour LIKE 'vio%'",
    "missing IS NOT NULL",
    "a BETWEEN 7 AND 7",
    "a + 1 = 8",
)
COMMIT_MESSAGES = 1000
SEGMENT_BYTES = 64 << 20  # a segment is read up to its size


class Sink:
    """A peer that keeps the last answer."""

    def __init__(self) -> None:
        self.address = "127.0.0.1:1"
        self.host = b"\x7f\x00\x00\x01\x00\x00\x00\x01"
        self.identity = None
        self.sent = b""

    def login_origin(self, client_id: str = "") -> object:
        return getattr(contracts, "NO_ORIGIN", None)  # older checkouts do not ask

    def send(self, *pieces: Any) -> None:
        self.sent = b"".join(map(bytes, pieces))

    def hold_until(self, position: int) -> None: ...

    def wake(self) -> None: ...

    def start(self, *arguments: object) -> None:
        raise SystemExit("a pull of this load was far behind the tail; raise the memory or lower --messages")

    def close(self, reason: str) -> None:
        raise SystemExit(reason)


def request(queue_id: int, offset: int, expression: str) -> bytes:
    ext = {"consumerGroup": "g", "topic": "T", "queueId": str(queue_id), "queueOffset": str(offset)}
    ext |= {"maxMsgNums": "32", "sysFlag": "4", "commitOffset": "0", "suspendTimeoutMillis": "0"}
    ext |= {"subscription": expression, "subVersion": "1", "expressionType": "SQL92"}
    return encode_command(Command(11, ext, b"", opaque=offset))


def fill(broker: Broker, options: argparse.Namespace) -> None:
    broker.topics.update("T", read_queues=options.queues, write_queues=options.queues)
    for number in range(options.messages):
        colour = "violet" if number % 100 == 7 else "red"
        properties = {"UNIQ_KEY": f"7F00000100002A139B47{number:012X}", "a": f"{number // 16 % 100}", "colour": colour}
        broker.publish(Message("T", b"x" * options.body, encode_properties(properties), number % options.queues))
        if number % COMMIT_MESSAGES == 0:
            broker.store.committer.commit()
    broker.store.committer.commit()


def warm(folder: Path) -> None:
    """Read the log, so that it is in the page cache."""
    for path in folder.rglob("commitlog/*"):
        with path.open("rb") as file:
            while file.read(1 << 20):
                pass


def scan(state: RemotingState, expression: str, queues: int, count: int) -> tuple[float, float, int]:
    """Scan all queues; return the processor time, the longest of one pull, and the number of pulls."""
    sink, frames = Sink(), FrameBuffer()
    connection = RemotingConnection(1 << 24, 120.0, 0.0)
    handler = RemotingHandler(state, sink, connection)  # type: ignore[arg-type]
    offsets = dict.fromkeys(range(queues), 0)
    total, longest, pulls = 0.0, 0.0, 0
    while offsets:
        for queue_id, offset in list(offsets.items()):
            frame = request(queue_id, offset, expression)
            began = time.process_time()
            connection.receive_data(frame, 0.0)
            for command in connection.events():
                handler.handle(command)
            took = time.process_time() - began
            total, longest, pulls = total + took, max(longest, took), pulls + 1
            frames.receive_data(sink.sent)
            answer = frames.next_command()
            assert answer is not None
            offsets[queue_id] = int(str(answer.ext["nextBeginOffset"]))
            if offsets[queue_id] >= count // queues:
                del offsets[queue_id]
    return total, longest, pulls


async def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), store=StoreConfig(flush="async", segment_bytes=SEGMENT_BYTES)) as served:
            broker = served.broker
            broker.filters = dict(Sql92Plugin(Sql92Config()).martlet_filters(broker))
            fill(broker, options)
            await broker.store.upkeep.checkpointer.checkpoint()
            state = RemotingState(broker, RemotingConfig())
            for expression in options.expression or EXPRESSIONS:
                rounds = []
                for _ in range(options.rounds):
                    warm(Path(folder))
                    rounds.append(scan(state, expression, options.queues, options.messages))
                least, longest = min(took for took, _, _ in rounds), min(longest for _, longest, _ in rounds)
                each = least * 1e6 / options.messages
                say = f"{expression:30}: least {each:6.3f} us a message, {1 / each:5.2f} M messages/s"
                print(f"{say}, longest pull {longest * 1e3:5.2f} ms, {rounds[0][2]} pulls")
                await trio.lowlevel.checkpoint()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--body", type=int, default=128, help="bytes of a message")
    parser.add_argument("--queues", type=int, default=16)
    parser.add_argument("--expression", action="append", help="scan by this one instead; can be repeated")
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
