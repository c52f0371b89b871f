"""Many MQTT clients: what sessions and connections cost, how fast they come back, and the start after a kill.

    python benchmarks/mqtt_sessions.py [--sessions 100000] [--connections 10000] [--messages 10]

1. connections: clients connect, and stay with a keep alive; the broker's memory before, after, and after PINGREQ
2. return: sessions for which messages wait connect together, and get them
3. sessions: clients connect with a session, subscribe to a filter of their own with QoS 1, and go; then kill -9, and
   the start after it

The broker is a process of its own with flush = "async"; the clients share one process.
"""

import argparse
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from idle import cpu_s, raise_limit, resident_kib
from mqtt_load import packet, text

AT_ONCE = 200
SETTLE_S = 20.0  # until the broker has returned what the connections used


class Broker:
    """`martlet run` with MQTT alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = self._started()

    def _started(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "martlet", "run", "--data", str(self.folder / "data")]
        settings = 'plugins.enabled=["mqtt"]', "mqtt.listen=127.0.0.1:0", "store.flush=async"
        for setting in (*settings, "server.connections_max=15000", "delivery.sessions_max=1000000"):
            command += "--set", setting
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        self.start_s = time.monotonic() - began
        address = next(word.partition("=")[2] for word in line.split() if word.startswith("mqtt="))
        host, _, port = address.rpartition(":")
        self.address = host, int(port)
        return process

    def kill_and_start(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = self._started()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()

    @property
    def resident_mib(self) -> float:
        return resident_kib(self.process.pid) / 1024


def opened(
    broker: Broker, count: int, name: str, first: int, *, clean: bool, keep_alive_s: int = 0
) -> list[socket.socket]:
    """Return *count* connections whose CONNECT was sent."""
    found = []
    flags = b"\x02" if clean else b"\x00"
    for number in range(first, first + count):
        each = socket.create_connection(broker.address)
        each.sendall(packet(0x10, text("MQTT") + b"\x04" + flags + keep_alive_s.to_bytes(2) + text(f"{name}{number}")))
        found.append(each)
    return found


def exactly(each: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = each.recv(size - len(data))
        assert more, "the broker closed the connection"
        data += more
    return data


def show(what: str, figures: str) -> None:
    print(f"| {what} | {figures} |", flush=True)


def make_sessions(broker: Broker, count: int) -> None:
    for first in range(0, count, AT_ONCE):
        some = opened(broker, min(AT_ONCE, count - first), "s", first, clean=False)
        for number, each in enumerate(some, first):
            exactly(each, 4)
            each.sendall(packet(0x82, b"\x00\x01" + text(f"d/{number}/#") + b"\x01"))
        for each in some:
            exactly(each, 5)
            each.close()


def sessions(broker: Broker, count: int) -> None:
    before, began = broker.resident_mib, time.monotonic()
    make_sessions(broker, count)
    took = time.monotonic() - began
    time.sleep(SETTLE_S)
    after = broker.resident_mib
    bytes_each = (after - before) * (1 << 20) / count
    show(f"{count:,} sessions connect, subscribe and go", f"{took:.1f} s; {bytes_each:,.0f} bytes of memory each")
    broker.kill_and_start()
    used = cpu_s(broker.process.pid)
    cost = f"ready in {broker.start_s:.1f} s, {used:.1f} s of processor time; {broker.resident_mib:.0f} MiB"
    show("start after kill -9", cost)


def connections(broker: Broker, count: int) -> None:
    before = broker.resident_mib
    began, some = time.monotonic(), []
    for first in range(0, count, AT_ONCE):
        found = opened(broker, min(AT_ONCE, count - first), "c", first, clean=True, keep_alive_s=60)
        for each in found:
            exactly(each, 4)
        some += found
    took = time.monotonic() - began
    after = broker.resident_mib
    show(f"{count:,} connections", f"{took:.1f} s; {(after - before) * 1024 / count:.1f} KiB of memory each")
    used, rounds = cpu_s(broker.process.pid), 5
    for _ in range(rounds):
        for each in some:
            each.sendall(b"\xc0\x00")
        for each in some:
            exactly(each, 2)
    used = (cpu_s(broker.process.pid) - used) / rounds / count
    cost = f"{used * 1e6:.0f} µs of processor time each; {broker.resident_mib - after:+.1f} MiB"
    show(f"PINGREQ of all, {rounds} times", cost)
    for each in some:
        each.close()


def storm(broker: Broker, count: int, messages: int) -> None:
    """Let *count* sessions that share a filter return together."""
    for first in range(0, count, AT_ONCE):
        some = opened(broker, min(AT_ONCE, count - first), "r", first, clean=False)
        for each in some:
            exactly(each, 4)
            each.sendall(packet(0x82, b"\x00\x01" + text("news/#") + b"\x01"))
        for each in some:
            exactly(each, 5)
            each.close()
    publisher = opened(broker, 1, "p", 0, clean=True)[0]
    exactly(publisher, 4)
    for number in range(1, messages + 1):
        publisher.sendall(packet(0x32, text(f"news/{number:04}") + number.to_bytes(2) + bytes(200)))
    exactly(publisher, 4 * messages)
    frame_bytes = len(packet(0x32, text("news/0000") + bytes(202)))
    used, began = cpu_s(broker.process.pid), time.monotonic()
    poll, left = select.epoll(), {}
    for first in range(0, count, AT_ONCE):
        for each in opened(broker, min(AT_ONCE, count - first), "r", first, clean=False):
            each.setblocking(False)
            poll.register(each, select.EPOLLIN)
            left[each.fileno()] = [each, 4 + frame_bytes * messages]
    total = len(left)
    while left:
        for fd, _ in poll.poll(1):
            entry = left[fd]
            data = entry[0].recv(1 << 16)
            assert data, "the broker closed the connection"
            entry[1] -= len(data)
            if entry[1] <= 0:
                poll.unregister(fd)
                del left[fd]
    took, used = time.monotonic() - began, cpu_s(broker.process.pid) - used
    delivered = total * messages
    cost = f"{took:.1f} s; {used / delivered * 1e6:.0f} µs of processor time a message"
    show(f"{total:,} sessions return together, {messages} messages each", cost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--messages", type=int, default=10)
    options = parser.parse_args()
    raise_limit()
    with tempfile.TemporaryDirectory() as name:
        broker = Broker(Path(name))
        try:
            print("| | |\n|---|---|")
            connections(broker, options.connections)
            storm(broker, options.connections, options.messages)
            sessions(broker, options.sessions)
        finally:
            broker.end()
            shutil.rmtree(name, ignore_errors=True)


if __name__ == "__main__":
    main()
