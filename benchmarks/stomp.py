"""Messages a second of STOMP, beside ActiveMQ and RabbitMQ, by turns.

    python benchmarks/stomp.py                                  everything, with the Martlet of this Python
    python benchmarks/stomp.py auto latency --runs 3 --bytes 256

Loads:
  auto     SEND to MESSAGE on a queue
  ack      the same with client-individual, and an ACK for each message
  receipt  the same with auto, and a receipt for each SEND, of which 100 may be missing
  many     200 clients that each wait for the receipt of one SEND, without subscribers
  fan      one to ten on a topic
  latency  p50 and p99 from SEND to MESSAGE at 2,000 messages a second
  beats    p99 and maximum of how much the time between two heart-beats deviates from its median, with an interval of
           1,000 ms, for 20 clients that get nothing else, beside the load auto for 4 times --seconds
  memory   resident MiB after the start, and after all loads

First each load runs on each broker for --warm seconds that do not count, as a JVM is slow at first. Then each load runs
on one broker, then on the next, in turn, --runs times; a row shows medians. Its ratios are those to the better one of
ActiveMQ, whose socket buffers have 1 MiB, and RabbitMQ. Both keep messages in memory only. Martlet writes each to its
log; with "sync", its default, a receipt comes after fdatasync. The last columns are the longest turn of Martlet's event
loop in all runs, in processor time (`turns.py`), and the broker's processor time for each delivery. A * says that the
clients, not the broker, had no processor time left. The broker has one processor and the clients another. Debian:
apt-get install activemq rabbitmq-server.
"""

import argparse
import os
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from brokers import free_port, wait_port
from idle import cpu_s, resident_kib
from sockets import BLOCK_BYTES, Connection
from tests.interop.stomp_peers import ActiveMQ, RabbitMQ
from turns import Turns

BROKER_CPU, CLIENT_CPU = "0", 1
WINDOW = 2000  # messages that are sent and not received
RECEIPTS = 100  # messages that are sent and have no receipt
SENDERS = 200  # of the load many
STEADY_RATE = 2000
BEATEN, BEAT_MS = 20, 1000  # clients that get heart-beats, and their interval
BUSY = 0.95  # of a processor
ACK_ID = re.compile(rb"\nack:([^\n]+)")
PEERS = ("ActiveMQ", "RabbitMQ")
numbers = count(1)


def frame(command: str, body: bytes = b"", **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}:{value}\n" for name, value in headers.items())
    return f"{command}\n{lines}\n".encode() + body + b"\0"


class Client(Connection):
    """A connection of STOMP 1.2, which counts frames by their NUL: no body has one."""

    def __init__(self, port: int, **headers: str) -> None:
        super().__init__(port)
        self.rest = b""
        login = {"login": "guest", "passcode": "guest"}
        self.ask(frame("CONNECT", accept_version="1.2", host="/", **login, **headers), b"CONNECTED")

    def ask(self, request: bytes, expected: bytes) -> None:
        self.socket.sendall(request)
        data = b""
        while b"\0" not in data:
            data += self.socket.recv(BLOCK_BYTES)
        assert data.lstrip().startswith(expected), data


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


class Beaten(Client):
    """A client that gets heart-beats, and notes when."""

    def __init__(self, port: int) -> None:
        super().__init__(port, heart_beat=f"0,{BEAT_MS}")
        self.times: list[float] = []
        self.start()

    def take(self) -> None:
        self.receive()
        self.times.append(time.monotonic())

    def gaps_ms(self) -> list[float]:
        return [(later - earlier) * 1000 for earlier, later in pairwise(self.times)]


def pump(publisher: Publisher, subscribers: list[Subscriber], seconds: float, others: Sequence[Beaten] = ()) -> float:
    """Return deliveries a second; *others* get something else meanwhile."""
    poll = select.epoll()
    by_fd = {each.socket.fileno(): each for each in (publisher, *subscribers, *others)}
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


class Run(NamedTuple):
    """What one run of a load on one broker gave."""

    rate: float  # deliveries a second
    broker_cpus: float  # processors in use, on average
    client_cpus: float
    longest_turn_ms: float  # 0 for other brokers


Load = Callable[[int, int, float], float]


def queue(ack: str, window: int = 0) -> Load:
    def run(port: int, payload_bytes: int, seconds: float) -> float:
        name = f"/queue/bench-{next(numbers)}"
        subscriber = Subscriber(port, name, ack)
        return pump(Publisher(port, name, payload_bytes, window), [subscriber], seconds)

    return run


def many(port: int, payload_bytes: int, seconds: float) -> float:
    """Return messages a second of `SENDERS` clients that each wait for the receipt of one, without subscribers."""
    name, poll = f"/topic/bench-{next(numbers)}", select.epoll()
    by_fd = {each.socket.fileno(): each for each in (Publisher(port, name, payload_bytes, 1) for _ in range(SENDERS))}
    for fd, sender in by_fd.items():
        poll.register(fd, select.EPOLLIN)
        sender.give(1)
    warm = time.monotonic() + 0.5
    first, start, now = 0, 0.0, 0.0
    while not start or now < start + seconds:
        for fd, _ in poll.poll(0.001):
            by_fd[fd].take()
            by_fd[fd].give(1)
        now = time.monotonic()
        if not start and now >= warm:
            first, start = sum(each.done for each in by_fd.values()), now
    rate = (sum(each.done for each in by_fd.values()) - first) / (now - start)
    for sender in by_fd.values():
        sender.socket.close()
    return rate


def fan(port: int, payload_bytes: int, seconds: float) -> float:
    name = f"/topic/bench-{next(numbers)}"
    subscribers = [Subscriber(port, name, "auto") for _ in range(10)]
    return pump(Publisher(port, name, payload_bytes), subscribers, seconds)


def latencies(port: int, payload_bytes: int, seconds: float) -> tuple[float, float]:
    """Return p50 and p99, in us, from send to receipt at `STEADY_RATE` messages a second."""
    name = f"/queue/steady-{next(numbers)}"
    subscriber, publisher = Subscriber(port, name, "auto"), Publisher(port, name, payload_bytes)
    found: list[float] = []
    clock, rest = time.perf_counter_ns, b""
    head = frame("SEND", destination=name, content_length=str(payload_bytes))[:-1]
    filler = b"x" * (payload_bytes - 16)
    began, total = time.perf_counter(), int(seconds * STEADY_RATE)
    for number in range(total + 1):
        due = began + number / STEADY_RATE + (number == total)  # after the last one, wait for what is under way
        while len(found) < total and (left_s := due - time.perf_counter()) > 0:
            if not select.select([subscriber.socket], (), (), left_s)[0]:
                break
            *whole, rest = (rest + subscriber.receive()).split(b"\0")
            now = clock()
            found += [(now - int(each[-payload_bytes:][:16], 16)) / 1000 for each in whole]
        if number < total:
            publisher.socket.sendall(b"%b%016x%b\0" % (head, clock(), filler))
    subscriber.socket.close()
    publisher.socket.close()
    found = sorted(found[total // 10 :])
    return found[len(found) // 2], found[len(found) * 99 // 100]


def beat_deviations(port: int, payload_bytes: int, seconds: float) -> list[float]:
    """Return how much each time between two heart-beats deviates from their median, in ms, under full load."""
    name = f"/queue/bench-{next(numbers)}"
    subscriber, beaten = Subscriber(port, name, "auto"), [Beaten(port) for _ in range(BEATEN)]
    pump(Publisher(port, name, payload_bytes), [subscriber], 4 * seconds, beaten)
    gaps = [gap for each in beaten for gap in each.gaps_ms()]
    usual = statistics.median(gaps)
    return [abs(gap - usual) for gap in gaps]


LOADS: dict[str, tuple[str, Load]] = {
    "auto": ("SEND to MESSAGE, auto", queue("auto")),
    "ack": ("client-individual, an ACK each", queue("client-individual")),
    "receipt": (f"a receipt each, window {RECEIPTS}", queue("auto", RECEIPTS)),
    "many": (f"{SENDERS} clients, a receipt each, 1 in flight", many),
    "fan": ("one to ten on a topic", fan),
}


class Broker(NamedTuple):
    """One that runs."""

    port: int
    pid: int
    turns: Turns | None = None


@contextmanager
def martlet(folder: Path, python: str, flush: str) -> Iterator[Broker]:
    port, turns = free_port(), Turns(folder.with_suffix(".turns"))
    command = ["taskset", "-c", BROKER_CPU, python, *turns.command, "run", "--data", str(folder)]
    for setting in ('plugins.enabled=["stomp"]', f"stomp.listen=127.0.0.1:{port}", f"store.flush={flush}"):
        command += "--set", setting
    # Not in this folder: a Python with Martlet installed must not find the source.
    log = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=folder.parent, stdout=log, stderr=log) as process:
        wait_port(port)
        try:
            yield Broker(port, process.pid, turns)
        finally:
            process.terminate()


@contextmanager
def all_brokers() -> Iterator[dict[str, Broker]]:
    """Start all that are measured, by name, those of `PEERS` first."""
    before = ("taskset", "-c", BROKER_CPU)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        found: dict[str, Broker] = {}
        for peer, start in (("ActiveMQ", ActiveMQ), ("RabbitMQ", RabbitMQ)):
            more = {"heap": "1g"} if start is ActiveMQ else {}
            running = stack.enter_context(closing(start(folder / peer, before, **more)))
            found[peer] = Broker(running.port, running.pid)
        for flush in ("sync", "async"):
            found[f"martlet, {flush}"] = stack.enter_context(martlet(folder / flush, sys.executable, flush))
        yield found


def measured(load: Load, broker: Broker, payload_bytes: int, seconds: float) -> Run:
    turns = broker.turns
    if turns is not None:
        turns.begin()
    before, own, began = cpu_s(broker.pid), time.process_time(), time.monotonic()
    rate = load(broker.port, payload_bytes, seconds)
    took = time.monotonic() - began
    used, own = cpu_s(broker.pid) - before, time.process_time() - own
    return Run(rate, used / took, own / took, turns.longest_ms() if turns is not None else 0.0)


def warm_up(brokers: dict[str, Broker], loads: list[str], size: int, seconds: float) -> None:
    """Run *loads* without measuring: a JVM compiles what runs often, which takes it seconds on one processor."""
    for broker in brokers.values():
        for each in loads:
            LOADS[each][1](broker.port, size, seconds)


def show_rates(each: str, size: int, brokers: dict[str, Broker], options: argparse.Namespace) -> None:
    """Print a row with the rates of a load."""
    name, load = LOADS[each]
    runs: dict[str, list[Run]] = {peer: [] for peer in brokers}
    for _ in range(options.runs):
        for peer, broker in brokers.items():
            runs[peer].append(measured(load, broker, size, options.seconds))
    rates = {peer: statistics.median(run.rate for run in found) for peer, found in runs.items()}
    best = max(rates[peer] for peer in PEERS)
    cells = [f"{name}, {size} B"]
    for peer, rate in rates.items():
        is_limited = statistics.median(run.client_cpus for run in runs[peer]) > BUSY
        cells.append(f"{rate:,.0f}" + ("*" if is_limited else ""))
        cells += [] if peer in PEERS else [f"{rate / best:.2f}"]
    cells.append(
        " / ".join(f"{max(run.longest_turn_ms for run in runs[peer]):.1f} ms" for peer in rates if peer not in PEERS)
    )
    costs = (statistics.median(run.broker_cpus / run.rate for run in found) * 1e6 for found in runs.values())
    cells.append(" / ".join(f"{cost:.1f}" for cost in costs))
    print(f"| {' | '.join(cells)} |", flush=True)


def show_latencies(size: int, brokers: dict[str, Broker], options: argparse.Namespace) -> None:
    """Print a row with p50 and one with p99."""
    found: dict[str, list[tuple[float, float]]] = {peer: [] for peer in brokers}
    for _ in range(options.runs):
        for peer, broker in brokers.items():
            found[peer].append(latencies(broker.port, size, options.seconds))
    for index, name in enumerate(("p50", "p99")):
        values = {peer: statistics.median(run[index] for run in runs) for peer, runs in found.items()}
        print(row_of(f"{name} at {STEADY_RATE:,} a second, {size} B", values, " µs"), flush=True)


def show_beats(size: int, brokers: dict[str, Broker], options: argparse.Namespace) -> None:
    """Print a row with p99 and one with the maximum, over all runs."""
    found: dict[str, list[float]] = {peer: [] for peer in brokers}
    for _ in range(options.runs):
        for peer, broker in brokers.items():
            found[peer] += beat_deviations(broker.port, size, options.seconds)
    for name, rank in (("p99", 0.99), ("maximum", 1.0)):
        values = {peer: sorted(each)[min(int(len(each) * rank), len(each) - 1)] for peer, each in found.items()}
        print(row_of(f"{name} of the deviation of heart-beats of {BEAT_MS:,} ms", values, " ms", 1), flush=True)


def row_of(name: str, values: dict[str, float], unit: str, digits: int = 0) -> str:
    """Return a row of figures of which less is better."""
    best = min(values[peer] for peer in PEERS)
    cells = [name]
    for peer, value in values.items():
        cells.append(f"{value:,.{digits}f}{unit}")
        cells += [] if peer in PEERS else [f"{value / best:.2f}"]
    return f"| {' | '.join(cells)} | | |"


def memory_of(brokers: dict[str, Broker]) -> dict[str, float]:
    return {peer: resident_kib(broker.pid) / 1024 for peer, broker in brokers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [*LOADS, "latency", "beats", "memory"]
    parser.add_argument("loads", nargs="*", choices=[*choices, []], metavar="LOAD", help="all if there is none")
    parser.add_argument("--runs", type=int, default=5, help="of each load on each broker (default: 5)")
    parser.add_argument("--seconds", type=float, default=3, help="of a run (default: 3)")
    parser.add_argument("--warm", type=float, default=4, help="seconds of each load before all runs (default: 4)")
    parser.add_argument("--bytes", type=int, nargs="+", default=[64, 256, 1024], help="sizes of payloads")
    options = parser.parse_args()
    wanted = options.loads or choices
    with all_brokers() as brokers:
        os.sched_setaffinity(0, {CLIENT_CPU})
        idle = memory_of(brokers)
        if options.warm:
            warm_up(brokers, [each for each in LOADS if each in wanted] or ["auto"], options.bytes[0], options.warm)
        print(f"load average {os.getloadavg()[0]:.1f}; medians of {options.runs} runs\n")
        heads = [cell for peer in brokers for cell in ((peer,) if peer in PEERS else (peer, "ratio"))]
        print(
            f"| | {' | '.join(heads)} | longest turn | µs of processor time |\n|---|{'---|' * (len(heads) + 2)}",
            flush=True,
        )
        for size in options.bytes:
            for each in LOADS:
                if each in wanted:
                    show_rates(each, size, brokers, options)
        if "latency" in wanted:
            show_latencies(256 if 256 in options.bytes else options.bytes[0], brokers, options)
        if "beats" in wanted:
            show_beats(256 if 256 in options.bytes else options.bytes[0], brokers, options)
        if "memory" in wanted:
            print(row_of("memory after the start", idle, " MiB"))
            print(row_of("memory after all loads", memory_of(brokers), " MiB"))


if __name__ == "__main__":
    main()
