"""Messages a second of STOMP, beside ActiveMQ and RabbitMQ, by turns.

    python benchmarks/stomp.py [SCENARIO...] [--runs 5] [--seconds 3] [--bytes 256] [--peers activemq rabbitmq]
        [--compiled] [--flush async]

Scenarios: auto (SEND to MESSAGE on a queue), ack (the same with client-individual and an ACK for each), receipt (a
receipt for each SEND, window 100), fan (one to ten on a topic), latency (2,000 a second). Without any: all. The broker
has one processor and the clients the other. The peers are those of Debian (apt-get install activemq rabbitmq-server);
without them only Martlet is measured. A line has medians of deliveries a second, the ratio to the faster peer, and the
broker's processor time a delivery.
"""

import argparse
import os
import re
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from brokers import TICKS, python_with

BROKER_CPU, CLIENT_CPU = "0", 1
BLOCK_BYTES = 1 << 16
PEERS = ("activemq", "rabbitmq", "martlet")
WINDOW = 2000  # messages that are sent and not received
RECEIPTS = 100  # messages that are sent and have no receipt
STEADY_RATE = 2000
ACK_ID = re.compile(rb"\nack:([^\n]+)")


def frame(command: str, body: bytes = b"", **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}:{value}\n" for name, value in headers.items())
    return f"{command}\n{lines}\n".encode() + body + b"\0"


class Client:
    """A connection of STOMP 1.2, which counts frames by their NUL: no body has one."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.out = bytearray()
        self.rest = b""
        login = {"login": "guest", "passcode": "guest"}
        self.ask(frame("CONNECT", accept_version="1.2", host="/", **login), b"CONNECTED")

    def ask(self, request: bytes, expected: bytes) -> None:
        self.socket.sendall(request)
        data = b""
        while b"\0" not in data:
            data += self.socket.recv(BLOCK_BYTES)
        assert data.lstrip().startswith(expected), data

    def start(self) -> None:
        self.socket.setblocking(False)

    def flush(self) -> None:
        if self.out:
            try:
                sent = self.socket.send(self.out)
            except BlockingIOError:
                return
            del self.out[:sent]

    def receive(self) -> bytes:
        try:
            data = self.socket.recv(BLOCK_BYTES)
        except BlockingIOError:
            return b""
        assert data, "the broker closed the connection"
        return data


class Subscriber(Client):
    def __init__(self, port: int, destination: str, ack: str) -> None:
        super().__init__(port)
        self.ask(frame("SUBSCRIBE", id="0", destination=destination, ack=ack, receipt="s"), b"RECEIPT")
        self.acknowledges = ack != "auto"
        self.count = 0
        self.start()

    def take(self) -> None:
        data = self.receive()
        if not self.acknowledges:
            self.count += data.count(b"\0")
            return
        data = self.rest + data
        end = data.rfind(b"\0") + 1
        self.rest, data = data[end:], data[:end]
        ids = ACK_ID.findall(data)
        if ids:
            self.count += len(ids)
            self.out += b"ACK\nid:%b\n\n\0" % b"\n\n\0ACK\nid:".join(ids)
        self.flush()


class Publisher(Client):
    """Sends to one destination; with receipts, of which *window* may be missing."""

    def __init__(self, port: int, destination: str, payload_bytes: int, window: int = 0) -> None:
        super().__init__(port)
        body = b"x" * payload_bytes
        more = {"content_type": "text/plain", "content_length": str(payload_bytes)}
        whole = frame("SEND", body, destination=destination, **more, receipt="R" if window else "")
        self.head, _, self.tail = whole.partition(b"receipt:")
        self.whole = frame("SEND", body, destination=destination, **more)
        self.tail = self.tail.lstrip(b"R")
        self.window = window
        self.sent = self.done = 0
        self.start()

    def give(self, room: int) -> None:
        """Send what *room* and the window allow."""
        self.flush()
        if self.window:
            room = min(room, self.window - (self.sent - self.done))
        if room <= 0 or len(self.out) > BLOCK_BYTES:
            return
        count = min(room, 256)
        if self.window:
            numbers = range(self.sent, self.sent + count)
            self.out += b"".join([b"%breceipt:%d%b" % (self.head, number, self.tail) for number in numbers])
        else:
            self.out += self.whole * count
        self.sent += count
        self.flush()

    def take(self) -> None:
        self.done += self.receive().count(b"\0")


def pump(publisher: Publisher, subscribers: list[Subscriber], seconds: float) -> float:
    """Return deliveries a second."""
    poll = select.epoll()
    by_fd = {each.socket.fileno(): each for each in (publisher, *subscribers)}
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    began = time.monotonic()
    warm = began + 0.5
    first, start = 0, began
    while True:
        publisher.give(WINDOW - (publisher.sent - min(each.count for each in subscribers)))
        for fd, _ in poll.poll(0.001):
            by_fd[fd].take()
        now = time.monotonic()
        if now >= warm and not first:
            first, start = sum(each.count for each in subscribers), now
        if now >= warm + seconds:
            break
    rate = (sum(each.count for each in subscribers) - first) / (now - start)
    for client in by_fd.values():
        client.socket.close()
    return rate


Scenario = Callable[[int, int, float], float]


def queue(ack: str, window: int = 0) -> Scenario:
    def run(port: int, payload_bytes: int, seconds: float) -> float:
        subscriber = Subscriber(port, "/queue/bench", ack)
        return pump(Publisher(port, "/queue/bench", payload_bytes, window), [subscriber], seconds)

    return run


def fan(port: int, payload_bytes: int, seconds: float) -> float:
    subscribers = [Subscriber(port, "/topic/bench", "auto") for _ in range(10)]
    return pump(Publisher(port, "/topic/bench", payload_bytes), subscribers, seconds)


def latencies(port: int, payload_bytes: int, seconds: float) -> tuple[float, float]:
    """Return p50 and p99, in us, from send to receipt at `STEADY_RATE` messages a second."""
    subscriber, publisher = Subscriber(port, "/queue/steady", "auto"), Publisher(port, "/queue/steady", payload_bytes)
    found: list[float] = []
    clock, rest = time.perf_counter_ns, b""
    head = frame("SEND", destination="/queue/steady", content_length=str(payload_bytes))[:-1]
    filler = b"x" * (payload_bytes - 16)
    began, count = time.perf_counter(), int(seconds * STEADY_RATE)
    for number in range(count + 1):
        due = began + number / STEADY_RATE + (number == count)  # after the last one, wait for what is under way
        while len(found) < count and (left_s := due - time.perf_counter()) > 0:
            if not select.select([subscriber.socket], (), (), left_s)[0]:
                break
            *whole, rest = (rest + subscriber.receive()).split(b"\0")
            now = clock()
            found += [(now - int(each[-payload_bytes:][:16], 16)) / 1000 for each in whole]
        if number < count:
            publisher.socket.sendall(b"%b%016x%b\0" % (head, clock(), filler))
    subscriber.socket.close()
    publisher.socket.close()
    found = sorted(found[count // 10 :])
    return found[len(found) // 2], found[len(found) * 99 // 100]


SCENARIOS: dict[str, tuple[str, Scenario]] = {
    "auto": ("SEND to MESSAGE, auto", queue("auto")),
    "ack": ("client-individual, an ACK each", queue("client-individual")),
    "receipt": (f"a receipt each, window {RECEIPTS}", queue("auto", RECEIPTS)),
    "fan": ("one to ten on a topic", fan),
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def martlet(folder: Path, python: str, flush: str) -> Iterator[tuple[int, int]]:
    port = free_port()
    command = ["taskset", "-c", BROKER_CPU, python, "-m", "martlet", "run", "--data", str(folder / "data")]
    for setting in ('plugins.enabled=["stomp"]', f"stomp.listen=127.0.0.1:{port}", f"store.flush={flush}"):
        command += "--set", setting
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(port)
        try:
            yield port, process.pid
        finally:
            process.terminate()


def wait_for(port: int, seconds: float = 10) -> None:
    for _ in range(int(seconds / 0.05)):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.05)
    sys.exit(f"nothing listens on port {port}")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextmanager
def started(peer: str, options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Start *peer* on an empty folder; yield its port and its process id."""
    with tempfile.TemporaryDirectory() as name:
        python = python_with("compiled") if options.compiled else sys.executable
        with martlet(Path(name), python, options.flush) as found:
            yield found


def measured(peer: str, scenario: Scenario, options: argparse.Namespace) -> tuple[float, float]:
    """Return deliveries a second, and microseconds of the broker's processor time for each."""
    with started(peer, options) as (port, pid):
        before, began = cpu_s(pid), time.monotonic()
        rate = scenario(port, options.bytes, options.seconds)
        used = (cpu_s(pid) - before) / (time.monotonic() - began)
    return rate, used / rate * 1e6


def show_latency(peers: list[str], options: argparse.Namespace) -> None:
    """Print a row with p50 and p99 of each peer."""
    found: dict[str, list[tuple[float, float]]] = {peer: [] for peer in peers}
    for _ in range(options.runs):
        for peer in peers:
            with started(peer, options) as (port, _):
                found[peer].append(latencies(port, options.bytes, options.seconds))
    for index, name in enumerate(("p50", "p99")):
        values = [statistics.median(run[index] for run in found[peer]) for peer in peers]
        cells = " | ".join(f"{value:,.0f} µs" for value in values)
        ratio = values[-1] / min(values[:-1], default=values[-1])
        print(f"| {name} at {STEADY_RATE:,} a second | {cells} | {ratio:.2f} | |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, "latency", []])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--bytes", type=int, default=256)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--flush", default="async", choices=("async", "sync"))
    options = parser.parse_args()
    peers = ["martlet"]
    os.sched_setaffinity(0, {CLIENT_CPU})
    print("| | " + " | ".join(peers) + " | ratio | µs a delivery |\n|---|" + "---|" * (len(peers) + 2))
    for each in options.scenarios or [*SCENARIOS, "latency"]:
        if each == "latency":
            show_latency(peers, options)
            continue
        name, scenario = SCENARIOS[each]
        found: dict[str, list[tuple[float, float]]] = {peer: [] for peer in peers}
        for _ in range(options.runs):
            for peer in peers:
                found[peer].append(measured(peer, scenario, options))
        rates = {peer: statistics.median(rate for rate, _ in runs) for peer, runs in found.items()}
        costs = " / ".join(f"{statistics.median(cost for _, cost in found[peer]):.1f}" for peer in peers)
        ratio = rates["martlet"] / max([rates[peer] for peer in peers if peer != "martlet"], default=rates["martlet"])
        cells = " | ".join(f"{rates[peer]:,.0f}" for peer in peers)
        print(f"| {name} | {cells} | {ratio:.2f} | {costs} |", flush=True)


if __name__ == "__main__":
    main()
