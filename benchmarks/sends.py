"""What one SEND_MESSAGE_V2 costs inside the process: frames in, answers out, the log written, no socket.

    python benchmarks/sends.py [--rounds 40]

Prints the least and the median of many rounds, in microseconds a message: the least
is what the code costs, the median what this machine made of it just now.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import trio

from martlet.message import encode_properties
from martlet.store import StoreConfig
from martlet.testing.peers import serving
from martlet_remoting.codec import encode_command
from martlet_remoting.config import RemotingConfig
from martlet_remoting.connection import RemotingConnection
from martlet_remoting.context import Parts
from martlet_remoting.handler import RemotingHandler
from martlet_remoting.packets import Command

FRAMES_AT_ONCE = 40  # what a read of 64 KiB brings of 1 KiB messages


class Sink:
    """A peer that keeps nothing."""

    def __init__(self) -> None:
        self.address = "127.0.0.1:1"
        self.host = b"\x7f\x00\x00\x01\x00\x00\x00\x01"
        self.identity = None
        self.sent = 0

    def send(self, *pieces: bytes) -> None:
        self.sent += len(pieces)

    def hold_until(self, position: int) -> None:
        self.position = position

    def wake(self) -> None: ...

    def close(self, reason: str) -> None:
        raise SystemExit(reason)


def frames(body_bytes: int, number: int) -> bytes:
    """One read's worth of requests."""
    made = []
    for i in range(FRAMES_AT_ONCE):
        key = f"7F00000100002A139B4700000000{number:06d}{i:02d}".ljust(32, "0")[:32]
        properties = encode_properties({"UNIQ_KEY": key, "WAIT": "true", "TAGS": "TagA"}).decode()
        ext = {"a": "g", "b": "T", "c": "TBW102", "d": "4", "e": str(i % 8), "f": "0", "g": "1732000000000", "h": "0"}
        request = Command(
            310, {**ext, "i": properties, "j": "0", "k": "false", "m": "false"}, b"x" * body_bytes, opaque=i
        )
        made.append(encode_command(request))
    return b"".join(made)


async def run(rounds: int, body_bytes: int) -> None:
    reads = 60
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), store=StoreConfig(flush="async")) as served:
            served.broker.topics.update("T")
            parts = Parts(served.broker, RemotingConfig())
            connection = RemotingConnection(1 << 24, 120.0)
            sink = Sink()
            handler = RemotingHandler(parts, sink, connection)
            costs = []
            for number in range(rounds):
                data = [frames(body_bytes, number * reads + i) for i in range(reads)]
                began = time.process_time()
                for part in data:
                    connection.receive_data(part, 0.0)
                    for command in connection.events():
                        handler.handle(command)
                    served.broker.store.commit()
                costs.append((time.process_time() - began) * 1e6 / (reads * FRAMES_AT_ONCE))
                await trio.sleep(0.02)
            assert sink.sent == rounds * reads * FRAMES_AT_ONCE
            print(f"{body_bytes:5} B: least {min(costs):6.2f} us, median {statistics.median(costs):6.2f} us a message")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    words = parser.parse_args()
    for body_bytes in (128, 1024):
        trio.run(run, words.rounds, body_bytes)


if __name__ == "__main__":
    main()
