"""What one pull costs inside the process: frames in, answers out, no socket.

    python benchmarks/pulls.py [--rounds 40] [--body 1024] [--queues 4]

Pulls of 32 messages walk over a warm backlog, whose entries and records are in memory or in the page cache; once
for everything and once by tag. Prints the least and the median of many rounds, in microseconds a pull: the least
is what the code costs, the median what this machine made of it just now.
"""

import argparse
import statistics
import tempfile
import time
from inspect import signature
from pathlib import Path

import trio
import trio.lowlevel

from martlet import contracts
from martlet.message import Message, encode_properties
from martlet.store import StoreConfig
from martlet.testing.peers import serving
from martlet_remoting.config import RemotingConfig
from martlet_remoting.handler import RemotingHandler
from martlet_remoting.handlers import context
from martlet_remoting.wire.codec import encode_command
from martlet_remoting.wire.connection import RemotingConnection
from martlet_remoting.wire.packets import Command

MESSAGES_A_PULL = 32
PULLS_A_READ = 4
BACKLOG = 4000  # messages a queue

STATE = getattr(context, "RemotingState" if hasattr(context, "RemotingState") else "Parts")  # its older name


class Sink:
    """A peer that keeps nothing."""

    def __init__(self) -> None:
        self.address = "127.0.0.1:1"
        self.host = b"\x7f\x00\x00\x01\x00\x00\x00\x01"
        self.identity = None
        self.sent = 0

    def login_origin(self, client_id: str = "") -> object:
        return getattr(contracts, "NO_ORIGIN", None)  # older checkouts do not ask

    def send(self, *pieces: bytes) -> None:
        self.sent += sum(map(len, pieces))

    def hold_until(self, position: int) -> None: ...

    def wake(self) -> None: ...

    def start(self, *arguments: object) -> None:
        raise SystemExit("a pull of this load was far behind the tail; raise the memory or lower BACKLOG")

    def close(self, reason: str) -> None:
        raise SystemExit(reason)


def request(queue_id: int, offset: int, tags: str) -> bytes:
    ext = {"consumerGroup": "g", "topic": "T", "queueId": str(queue_id), "queueOffset": str(offset)}
    ext |= {"maxMsgNums": str(MESSAGES_A_PULL), "sysFlag": "4", "commitOffset": "0", "suspendTimeoutMillis": "0"}
    ext |= {"subscription": tags, "subVersion": "1", "expressionType": "TAG"}
    return encode_command(Command(11, ext, b"", opaque=offset))


def reads(queues: int, tags: str) -> list[bytes]:
    """Some socket reads of requests, which walk over the backlog of all queues."""
    pulls = [
        request(queue_id, offset, tags)
        for offset in range(0, BACKLOG - MESSAGES_A_PULL, MESSAGES_A_PULL)
        for queue_id in range(queues)
    ]
    return [b"".join(pulls[at : at + PULLS_A_READ]) for at in range(0, len(pulls), PULLS_A_READ)]


async def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), store=StoreConfig(flush="async")) as served:
            broker = served.broker
            broker.topics.update("T", read_queues=options.queues, write_queues=options.queues)
            properties = encode_properties({"UNIQ_KEY": "7F00000100002A139B47000000000000", "TAGS": "TagA"})
            for _ in range(BACKLOG):
                for queue_id in range(options.queues):
                    broker.publish(Message("T", b"x" * options.body, properties, queue_id))
                broker.store.committer.commit()
            await broker.store.upkeep.checkpointer.checkpoint()
            handler_of = STATE(broker, RemotingConfig())
            for tags in ("*", "TagA"):
                measure(handler_of, reads(options.queues, tags), tags, options.rounds)
                await trio.lowlevel.checkpoint()


def new_connection() -> RemotingConnection:
    """Create a connection with the arguments of the checkout: older ones do not take the time."""
    now = (0.0,) if "now" in signature(RemotingConnection.__init__).parameters else ()
    return RemotingConnection(1 << 24, 120.0, *now)


def measure(state: object, load: list[bytes], tags: str, rounds: int) -> None:
    connection, sink = new_connection(), Sink()
    handler = RemotingHandler(state, sink, connection)
    pulls = len(load) * PULLS_A_READ
    costs = []
    for _ in range(rounds):
        sink.sent = 0
        began = time.process_time()
        for part in load:
            connection.receive_data(part, 0.0)
            for command in connection.events():
                handler.handle(command)
        costs.append((time.process_time() - began) * 1e6 / pulls)
        assert sink.sent > pulls * MESSAGES_A_PULL * 100, sink.sent
    least, median = min(costs), statistics.median(costs)
    print(f"tags {tags:5}: least {least:6.2f} us, median {median:6.2f} us a pull of {MESSAGES_A_PULL}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--body", type=int, default=1024, help="bytes of a message")
    parser.add_argument("--queues", type=int, default=4)
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
