"""What one message costs inside the process: frames in, answers out, the log written, no socket.

    python benchmarks/sends.py [--rounds 40]

1 to 40 sends (SEND_MESSAGE_V2) and two batches of 32 (SEND_BATCH_MESSAGE) a read. Beside another checkout: `beside.py`.

Prints the least and the median of many rounds, in microseconds a message: the least
is what the code costs, the median what this machine made of it just now.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from inspect import signature
from pathlib import Path

import trio

from martlet import contracts
from martlet.app.config import PluginsConfig
from martlet.broker import Broker
from martlet.message import encode_properties
from martlet.plugins.loader import load
from martlet.store import StoreConfig
from martlet.testing.peers import serving
from martlet_remoting.config import RemotingConfig
from martlet_remoting.handler import RemotingHandler
from martlet_remoting.handlers import context
from martlet_remoting.wire.batches import BatchMessage, encode_batch
from martlet_remoting.wire.codec import encode_command
from martlet_remoting.wire.connection import RemotingConnection
from martlet_remoting.wire.packets import Command

WIDTHS = (1, 2, 4, 8, 16, 40)  # a read of 64 KiB brings 40 messages of 1 KiB
BATCH = 32

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
        self.sent += len(pieces)

    def hold_until(self, position: int) -> None:
        self.position = position

    def before_commit(self, work: Callable[[], None]) -> None:
        work()

    def wake(self) -> None: ...

    def close(self, reason: str) -> None:
        raise SystemExit(reason)


def properties_of(number: int, i: int) -> bytes:
    key = f"7F00000100002A139B4700000000{number:06d}{i:02d}".ljust(32, "0")[:32]
    return encode_properties({"UNIQ_KEY": key, "WAIT": "true", "TAGS": "TagA"})


def request(code: int, properties: bytes, body: bytes, i: int, batch: bool) -> bytes:
    ext = {"a": "g", "b": "T", "c": "TBW102", "d": "4", "e": str(i % 8), "f": "0", "g": "1732000000000", "h": "0"}
    ext |= {"i": properties.decode(), "j": "0", "k": "false", "m": "true" if batch else "false"}
    return encode_command(Command(code, ext, body, opaque=i))


def new_connection() -> RemotingConnection:
    """As the checkout takes it: older ones are not told the time."""
    now = (0.0,) if "now" in signature(RemotingConnection.__init__).parameters else ()
    return RemotingConnection(1 << 24, 120.0, *now)


async def set_stages(broker: Broker) -> None:
    """Install the stages of the plugins that are on by default; older checkouts have none."""
    if not hasattr(broker, "set_stages"):
        return
    plugins = load(PluginsConfig().enabled, {})
    await plugins.call("martlet_capabilities", broker=broker)  # comes first at a start
    found = await plugins.call("martlet_stages", broker=broker)
    broker.set_stages([(plugin, stage) for plugin, stages in found for stage in stages])


def sends(body_bytes: int, number: int, count: int) -> bytes:
    """The *count* requests of one read."""
    body = b"x" * body_bytes
    return b"".join(request(310, properties_of(number, i), body, i, False) for i in range(count))


def batches(body_bytes: int, number: int, count: int) -> bytes:
    """*count* batches, the requests of one read."""
    body = b"x" * body_bytes
    made = []
    for i in range(count):
        members = [BatchMessage(body, properties_of(number * count + i, j)) for j in range(BATCH)]
        made.append(request(320, properties_of(number, 99), encode_batch(members), i, True))
    return b"".join(made)


async def run(rounds: int, body_bytes: int, make: Callable[[int, int, int], bytes], count: int) -> None:
    reads, messages = 60, count * BATCH if make is batches else count
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), store=StoreConfig(flush="async")) as served:
            served.broker.topics.update("T")
            state = STATE(served.broker, RemotingConfig())
            await set_stages(served.broker)
            connection = new_connection()
            sink = Sink()
            handler = RemotingHandler(state, sink, connection)
            costs = []
            for number in range(rounds):
                data = [make(body_bytes, number * reads + i, count) for i in range(reads)]
                began = time.process_time()
                for part in data:
                    connection.receive_data(part, 0.0)
                    for command in connection.events():
                        rest = handler.handle(command)
                        if rest is not None:  # after each thousand requests, as the server does
                            await rest
                    served.broker.store.committer.commit()
                costs.append((time.process_time() - began) * 1e6 / (reads * messages))
                await trio.sleep(0.02)
            assert sink.sent
            least, median = min(costs), statistics.median(costs)
            what = f"{count:2} {make.__name__} a read of {body_bytes:4} B"
            print(f"{what}: least {least:6.2f} us, median {median:6.2f} us a message")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--bodies", type=int, nargs="+", default=[128, 1024], help="bytes of a message")
    words = parser.parse_args()
    for make, count in (*((sends, width) for width in WIDTHS), (batches, 2)):
        for body_bytes in words.bodies:
            trio.run(run, words.rounds, body_bytes, make, count)


if __name__ == "__main__":
    main()
