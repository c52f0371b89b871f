"""Messages a second of MQTT, beside Mosquitto with its defaults and with set_tcp_nodelay, by turns.

    python benchmarks/mqtt.py [SCENARIO...] [--runs 5] [--seconds 3] [--bytes 256] [--compiled] [--flush async]

Scenarios: q0 (one to one), fan (one to ten), ten (ten to ten), q1 and q2 (window 100 and 1,000), names (20,000 names
with 50 filters), latency (2,000 a second), connects. Without any: all. The broker has one processor and the clients the
other. Mosquitto must be installed (on Debian: apt-get install mosquitto). A line has medians of deliveries a second,
the ratio to Mosquitto's better one, and the broker's processor time a delivery.
"""

import argparse
import os
import select
import shutil
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
PEERS = ("mosquitto", "mosquitto nodelay", "martlet")
STEADY_RATE = 2000


def packet(first: int, content: bytes) -> bytes:
    size, length = len(content), bytearray()
    while True:
        size, digit = size >> 7, size & 127
        length.append(digit | (0x80 if size else 0))
        if not size:
            return bytes((first,)) + bytes(length) + content


def text(value: str) -> bytes:
    return len(value.encode()).to_bytes(2) + value.encode()


class Client:
    """A connection of MQTT 3.1.1 that counts fixed-size frames and never parses one."""

    def __init__(self, port: int, name: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(packet(0x10, text("MQTT") + b"\x04\x02\x00\x00" + text(name)))
        self.exactly(4)
        self.rest = b""
        self.out = bytearray()

    def exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            assert more, "the broker closed the connection"
            data += more
        return data

    def subscribe(self, topic_filter: str, qos: int) -> None:
        self.socket.sendall(packet(0x82, b"\x00\x01" + text(topic_filter) + bytes((qos,))))
        self.exactly(5)

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


def answers(first: int, ids: tuple[bytes, bytes]) -> bytes:
    """Acknowledgements with the identifiers whose upper and lower bytes are given."""
    high, low = ids
    found = bytearray(4 * len(high))
    found[0::4] = bytes((first,)) * len(high)
    found[1::4] = b"\x02" * len(high)
    found[2::4], found[3::4] = high, low
    return bytes(found)


class Subscriber(Client):
    def __init__(self, port: int, name: str, topic_filter: str, qos: int, frame_bytes: int, id_at: int) -> None:
        super().__init__(port, name)
        self.subscribe(topic_filter, qos)
        self.qos, self.frame_bytes, self.id_at, self.count = qos, frame_bytes, id_at, 0
        self.start()

    def take(self) -> None:
        data = self.rest + self.receive()
        if not self.qos:
            count = len(data) // self.frame_bytes
            self.rest = data[count * self.frame_bytes :]
            self.count += count
            return
        at, end, size = 0, len(data), self.frame_bytes
        while at < end:  # runs of frames and of PUBREL
            if data[at] == 0x62:
                stop = at
                while stop + 4 <= end and data[stop] == 0x62:
                    stop += 4
                if stop == at:
                    break
                self.out += answers(0x70, (data[at + 2 : stop : 4], data[at + 3 : stop : 4]))
            else:
                stop = at
                while stop + size <= end and data[stop] != 0x62:
                    stop += size
                if stop == at:
                    break
                ids = data[at + self.id_at : stop : size], data[at + self.id_at + 1 : stop : size]
                self.out += answers(0x40 if self.qos == 1 else 0x50, ids)
                self.count += (stop - at) // size
            at = stop
        self.rest = data[at:]
        self.flush()


class Publisher(Client):
    """Sends frames of one QoS, of which *window* may be without an answer."""

    def __init__(self, port: int, name: str, frames: list[bytes], qos: int, window: int) -> None:
        super().__init__(port, name)
        self.frames, self.qos, self.window = frames, qos, window
        self.sent = self.done = self.next_id = 0
        self.start()

    def give(self, room: int) -> None:
        """Send what *room* and the window allow."""
        self.flush()
        if self.qos:
            room = min(room, self.window - (self.sent - self.done))
        if room <= 0 or len(self.out) > BLOCK_BYTES:
            return
        count = min(room, 256)
        if not self.qos:
            names = len(self.frames)
            start = self.sent % names
            self.out += b"".join([self.frames[(start + index) % names] for index in range(count)])
        else:
            head, tail = self.frames
            parts: list[bytes] = []
            for _ in range(count):
                self.next_id = self.next_id % 65_000 + 1
                parts += head, self.next_id.to_bytes(2), tail
            self.out += b"".join(parts)
        self.sent += count
        self.flush()

    def take(self) -> None:
        data = self.rest + self.receive()
        end = len(data) // 4 * 4
        self.rest, data = data[end:], data[:end]
        if self.qos == 1:
            self.done += end // 4
            return
        received = [at for at in range(0, end, 4) if data[at] == 0x50]
        self.done += end // 4 - len(received)
        if received:
            self.out += b"".join([b"\x62\x02" + data[at + 2 : at + 4] for at in received])
            self.flush()


def frame(topic: str, payload_bytes: int, qos: int) -> tuple[bytes, bytes]:
    """What is before and after the identifier of a PUBLISH packet."""
    whole = packet(0x30 | qos << 1, text(topic) + (b"\0\0" if qos else b"") + bytes(payload_bytes))
    cut = len(whole) - payload_bytes - (2 if qos else 0)
    return whole[:cut], whole[cut + (2 if qos else 0) :]


def pump(publishers: list[Publisher], subscribers: list[list[Subscriber]], window: int, seconds: float) -> float:
    """Return deliveries a second; publisher *i* is received by ``subscribers[i]``."""
    everybody = {each.socket: each for each in (*publishers, *(one for group in subscribers for one in group))}
    poll = select.epoll()
    by_fd = {}
    for each, client in everybody.items():
        poll.register(each, select.EPOLLIN)
        by_fd[each.fileno()] = client
    began = time.monotonic()
    warm = began + 0.5
    first = last = 0
    start = began
    while True:
        for publisher, group in zip(publishers, subscribers, strict=True):
            publisher.give(window - (publisher.sent - min(one.count for one in group)))
        for fd, _ in poll.poll(0.001):
            by_fd[fd].take()
        now = time.monotonic()
        if now >= warm and not first:
            first, start = sum(one.count for group in subscribers for one in group), now
        if now >= began + 0.5 + seconds:
            last = sum(one.count for group in subscribers for one in group)
            break
    for client in everybody.values():
        client.socket.close()
    return (last - first) / (now - start)


Scenario = Callable[[int, int, float], float]


def one_way(publishers: int, subscribers: int, qos: int, window: int) -> Scenario:
    def run(port: int, payload_bytes: int, seconds: float) -> float:
        groups: list[list[Subscriber]] = []
        senders: list[Publisher] = []
        for number in range(publishers):
            topic = f"bench/{number:02}"
            head, tail = frame(topic, payload_bytes, qos)
            size = len(head) + len(tail) + (2 if qos else 0)
            count = subscribers if publishers == 1 else 1
            groups.append([Subscriber(port, f"s{number}-{i}", topic, qos, size, len(head)) for i in range(count)])
            senders.append(Publisher(port, f"p{number}", [head, tail] if qos else [head + tail], qos, window))
        return pump(senders, groups, window if qos else 2000, seconds)

    return run


def many_names(port: int, payload_bytes: int, seconds: float) -> float:
    frames = [b"".join(frame(f"n/{number % 50:02}/{number:05}", payload_bytes, 0)) for number in range(20_000)]
    groups = [Subscriber(port, f"s{i}", f"n/{i:02}/+", 0, len(frames[0]), 0) for i in range(50)]
    publisher = Publisher(port, "p", frames, 0, 2000)
    began, counted = time.monotonic(), 0
    poll = select.epoll()
    by_fd = {each.socket.fileno(): each for each in (publisher, *groups)}
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    while time.monotonic() < began + seconds:
        publisher.give(2000 - (publisher.sent - sum(each.count for each in groups)))
        for fd, _ in poll.poll(0.001):
            by_fd[fd].take()
    counted = sum(each.count for each in groups)
    rate = counted / (time.monotonic() - began)
    for client in (publisher, *groups):
        client.socket.close()
    return rate


def connects(port: int, payload_bytes: int, seconds: float) -> float:
    """Clients connect, 100 at a time, and close the connection when they are accepted."""
    began, count = time.monotonic(), 0
    while time.monotonic() < began + seconds:
        batch = []
        for number in range(count, count + 100):
            client = socket.socket()
            client.connect(("127.0.0.1", port))
            client.send(packet(0x10, text("MQTT") + b"\x04\x02\x00\x00" + text(f"c{number}")))
            batch.append(client)
        for client in batch:
            client.recv(4)
            client.close()
        count += len(batch)
    return count / (time.monotonic() - began)


def latencies(port: int, payload_bytes: int, seconds: float) -> tuple[float, float]:
    """Return p50 and p99, in us, from send to receipt of QoS 0 at `STEADY_RATE` messages a second."""
    head, _ = frame("steady", payload_bytes, 0)
    size = len(head) + payload_bytes
    subscriber, publisher = Subscriber(port, "s", "steady", 0, size, 0), Publisher(port, "p", [head], 0, 0)
    found: list[float] = []
    filler, rest, clock = bytes(payload_bytes - 8), b"", time.perf_counter_ns
    began, count = time.perf_counter(), int(seconds * STEADY_RATE)
    for number in range(count + 1):
        # After the last message, wait for what is still under way.
        due = began + number / STEADY_RATE + (number == count)
        while len(found) < count and (left_s := due - time.perf_counter()) > 0:
            if not select.select([subscriber.socket], (), (), left_s)[0]:
                break
            rest += subscriber.receive()
            now = clock()
            while len(rest) >= size:
                found.append((now - int.from_bytes(rest[len(head) : len(head) + 8])) / 1000)
                rest = rest[size:]
        if number < count:
            publisher.socket.sendall(head + clock().to_bytes(8) + filler)
    subscriber.socket.close()
    publisher.socket.close()
    found = sorted(found[count // 10 :])
    return found[len(found) // 2], found[len(found) * 99 // 100]


SCENARIOS: dict[str, tuple[tuple[str, Scenario], ...]] = {
    "q0": (("QoS 0 one to one", one_way(1, 1, 0, 0)),),
    "fan": (("QoS 0 one to ten", one_way(1, 10, 0, 0)),),
    "ten": (("QoS 0 ten to ten", one_way(10, 10, 0, 0)),),
    "q1": (("QoS 1, window 100", one_way(1, 1, 1, 100)), ("QoS 1, window 1,000", one_way(1, 1, 1, 1000))),
    "q2": (("QoS 2, window 100", one_way(1, 1, 2, 100)), ("QoS 2, window 1,000", one_way(1, 1, 2, 1000))),
    "names": (("20,000 names, 50 filters", many_names),),
    "connects": (("connections", connects),),
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def mosquitto(folder: Path, *, nodelay: bool) -> Iterator[tuple[int, int]]:
    port = free_port()
    settings = [f"listener {port} 127.0.0.1", "allow_anonymous true", "max_inflight_messages 1000"]
    settings += ["max_queued_messages 0", "persistence false", "log_type none"]
    settings += ["set_tcp_nodelay true"] if nodelay else []
    (folder / "mosquitto.conf").write_text("\n".join(settings) + "\n")
    program = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin") or sys.exit("mosquitto is missing")
    command = ["taskset", "-c", BROKER_CPU, program, "-c", str(folder / "mosquitto.conf")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(port)
        try:
            yield port, process.pid
        finally:
            process.terminate()


@contextmanager
def martlet(folder: Path, python: str, flush: str) -> Iterator[tuple[int, int]]:
    port = free_port()
    command = ["taskset", "-c", BROKER_CPU, python, "-m", "martlet", "run", "--data", str(folder / "data")]
    for setting in ('plugins.enabled=["mqtt"]', f"mqtt.listen=127.0.0.1:{port}", f"store.flush={flush}"):
        command += "--set", setting
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(port)
        try:
            yield port, process.pid
        finally:
            process.terminate()


def wait_for(port: int) -> None:
    for _ in range(200):
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
        if peer == "martlet":
            python = python_with("compiled") if options.compiled else sys.executable
            broker = martlet(Path(name), python, options.flush)
        else:
            broker = mosquitto(Path(name), nodelay=peer.endswith("nodelay"))
        with broker as found:
            yield found


def measured(peer: str, scenario: Scenario, options: argparse.Namespace) -> tuple[float, float]:
    """Return deliveries a second, and microseconds of the broker's processor time for each."""
    with started(peer, options) as (port, pid):
        before, began = cpu_s(pid), time.monotonic()
        rate = scenario(port, options.bytes, options.seconds)
        used = (cpu_s(pid) - before) / (time.monotonic() - began)
    return rate, used / rate * 1e6


def show_latency(options: argparse.Namespace) -> None:
    """Print a row with p50 and p99 of each peer; the ratio is that to Mosquitto with set_tcp_nodelay."""
    found: dict[str, list[tuple[float, float]]] = {peer: [] for peer in PEERS}
    for _ in range(options.runs):
        for peer in PEERS:
            with started(peer, options) as (port, _):
                found[peer].append(latencies(port, options.bytes, options.seconds))
    for index, name in enumerate(("p50", "p99")):
        values = [statistics.median(run[index] for run in found[peer]) for peer in PEERS]
        cells = " | ".join(f"{value:,.0f} µs" for value in values)
        print(f"| {name} at {STEADY_RATE:,} a second | {cells} | {values[2] / values[1]:.2f} | |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, "latency", []])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--bytes", type=int, default=256)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--flush", default="async", choices=("async", "sync"))
    options = parser.parse_args()
    os.sched_setaffinity(0, {CLIENT_CPU})
    print("| | " + " | ".join(PEERS) + " | ratio | µs a delivery |\n|---|" + "---|" * (len(PEERS) + 2))
    for each in options.scenarios or [*SCENARIOS, "latency"]:
        if each == "latency":
            show_latency(options)
            continue
        for name, scenario in SCENARIOS[each]:
            found: dict[str, list[tuple[float, float]]] = {peer: [] for peer in PEERS}
            for _ in range(options.runs):
                for peer in PEERS:
                    found[peer].append(measured(peer, scenario, options))
            rates = {peer: statistics.median(rate for rate, _ in runs) for peer, runs in found.items()}
            costs = " / ".join(f"{statistics.median(cost for _, cost in found[peer]):.1f}" for peer in PEERS)
            best = max(rates[peer] for peer in PEERS[:2])
            cells = " | ".join(f"{rates[peer]:,.0f}" for peer in PEERS)
            print(f"| {name} | {cells} | {rates['martlet'] / best:.2f} | {costs} |", flush=True)


if __name__ == "__main__":
    main()
