"""How fast the line protocol of examples/martlet-line pushes: one publisher, one and ten subscribers.

    python benchmarks/line.py                      # both, async flush, 256 B bodies
    python benchmarks/line.py --flush sync --subscribers 1
    python benchmarks/line.py --against 127.0.0.1:10920    # a broker that runs already

The broker and the driver are processes of their own. The driver keeps so many publishes
unacknowledged, counts acknowledgements and deliveries, and checks that the offsets of every
subscriber follow each other without a gap. A figure counts only what was acknowledged and
delivered; the log is written like in any other use.
"""

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECEIVE_BYTES = 1 << 18
CREDIT = 5_000_000


class Subscriber:
    """One connection that counts what it is sent."""

    def __init__(self, address: tuple[str, int], topic: str) -> None:
        self.socket = socket.create_connection(address)
        self.socket.sendall(f"SUB {topic} credit {CREDIT}\n".encode())
        self.received = 0
        self.bytes = 0
        self._credit = CREDIT
        self._rest = b""
        self._skip = 0
        self._next = -1
        while not self._rest.endswith(b"\n"):
            self._rest += self.socket.recv(100)
        assert self._rest == b"OK 1\n", self._rest
        self._rest = b""

    def readable(self) -> None:
        data = self.socket.recv(RECEIVE_BYTES)
        assert data, "the broker closed"
        self.bytes += len(data)
        if self._rest:
            data = self._rest + data
        at = 0
        while True:
            if self._skip:
                step = min(self._skip, len(data) - at)
                at += step
                self._skip -= step
                if self._skip:
                    self._rest = b""
                    return
            # BATCH id count bytes, and the head of its first message: MSG queue offset bytes
            end = data.find(b"\n", at)
            second = data.find(b"\n", end + 1) if end >= 0 else -1
            if second < 0:
                self._rest = data[at:]
                return
            _, _, count, size = data[at:end].split()
            offset = int(data[end + 1 : second].split(b" ", 3)[2])
            assert self._next in (-1, offset), f"offset {offset} follows {self._next - 1}"
            self._next = offset + int(count)
            self.received += int(count)
            self._skip = int(size)
            at = end + 1
            self._renew(int(count))

    def _renew(self, count: int) -> None:
        self._credit -= count
        if self._credit < CREDIT // 2:
            self.socket.sendall(f"CREDIT 1 {CREDIT // 2}\n".encode())
            self._credit += CREDIT // 2


class Publisher:
    """One connection that keeps *window* publishes under way."""

    def __init__(self, address: tuple[str, int], topic: str, body_bytes: int, window: int, block: int) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setblocking(False)
        self._block = f"PUB {topic} {'x' * body_bytes}\n".encode() * block
        self._block_messages = block
        self._pending = memoryview(b"")
        self._window = window
        self.sent = 0
        self.acknowledged = 0
        self.watched = True  # whether the selector tells us when there is room

    def writable(self) -> None:
        if not self._pending and self.sent - self.acknowledged < self._window:
            self._pending = memoryview(self._block)
            self.sent += self._block_messages
        if self._pending:
            try:
                self._pending = self._pending[self.socket.send(self._pending) :]
            except BlockingIOError:
                return

    @property
    def wants_to_write(self) -> bool:
        return bool(self._pending) or self.sent - self.acknowledged < self._window

    def readable(self) -> None:
        data = self.socket.recv(RECEIVE_BYTES)
        assert data, "the broker closed"
        assert b"ERR" not in data, data[:200]
        self.acknowledged += data.count(b"\n")


def cpu_seconds(pid: int) -> float:
    """What the process *pid* has used so far (proc(5), stat: utime and stime)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(address: tuple[str, int], options: argparse.Namespace, subscribers: int, pid: int) -> dict[str, float]:
    """Return the rates of one run, and what the broker *pid* (0: unknown) paid for a published message."""
    topic = f"bench-{subscribers}-{time.time_ns()}"
    subs = [Subscriber(address, topic) for _ in range(subscribers)]
    pub = Publisher(address, topic, options.body, options.window, options.block)
    selector = selectors.DefaultSelector()
    for sub in subs:
        selector.register(sub.socket, selectors.EVENT_READ, sub)
    selector.register(pub.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, pub)
    _turn(selector, pub, time.perf_counter() + options.warm_up)
    began, published, delivered = time.perf_counter(), pub.acknowledged, sum(s.received for s in subs)
    cpu = cpu_seconds(pid) if pid else 0.0
    _turn(selector, pub, began + options.seconds)
    seconds, published = time.perf_counter() - began, pub.acknowledged - published
    found: dict[str, float] = {
        "subscribers": subscribers,
        "published_per_s": round(published / seconds),
        "delivered_per_s": round((sum(s.received for s in subs) - delivered) / seconds),
    }
    if pid:
        found["broker_cpu_us_a_message"] = round((cpu_seconds(pid) - cpu) * 1e6 / published, 2)
    return found


def _turn(selector: selectors.BaseSelector, pub: Publisher, until: float) -> None:
    while time.perf_counter() < until:
        if pub.wants_to_write != pub.watched:
            pub.watched = not pub.watched
            selector.modify(pub.socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if pub.watched else 0), pub)
        for key, events in selector.select(0.1):
            if events & selectors.EVENT_READ:
                key.data.readable()
            if events & selectors.EVENT_WRITE:
                key.data.writable()


def serve(options: argparse.Namespace) -> None:
    """Be the broker: print the address and run until stdin ends."""
    sys.path[:0] = [str(ROOT / "examples" / "martlet-line")]
    import trio

    from martlet.store import StoreConfig
    from martlet.testing.peers import serving
    from martlet_line.config import LineConfig
    from martlet_line.plugin import protocol

    def say(address: str) -> None:
        print(address, flush=True)

    async def main() -> None:
        async with serving(
            Path(options.serve),
            store=StoreConfig(flush=options.flush),
            ports=lambda broker: [protocol(LineConfig(listen="127.0.0.1:0"), broker, say)],
        ):
            await trio.to_thread.run_sync(sys.stdin.read)

    trio.run(main)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--subscribers", default="1,10", help="how many, runs apart by commas")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--warm-up", type=float, default=1)
    parser.add_argument("--body", type=int, default=256, help="bytes of a message")
    parser.add_argument("--window", type=int, default=4000, help="publishes unacknowledged at most")
    parser.add_argument("--block", type=int, default=250, help="publishes in one send")
    parser.add_argument("--flush", choices=("async", "sync"), default="async")
    parser.add_argument("--against", default="", help="HOST:PORT of a broker that runs already")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    if options.against:
        report(options, options.against, 0)
        return
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--serve", directory, "--flush", options.flush]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as broker:
            assert broker.stdin is not None
            assert broker.stdout is not None
            try:
                report(options, broker.stdout.readline().strip(), broker.pid)
            finally:
                broker.stdin.close()


def report(options: argparse.Namespace, address: str, pid: int) -> None:
    host, _, port = address.rpartition(":")
    for count in map(int, options.subscribers.split(",")):
        print(
            json.dumps(
                {**measure((host, int(port)), options, count, pid), "flush": options.flush, "body": options.body}
            )
        )


if __name__ == "__main__":
    main()
