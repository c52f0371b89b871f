"""Logins with passwords: many MQTT clients come back at once, and a guesser with many connections.

    python benchmarks/logins.py                      # 10,000 clients: cold (after a restart), then warm
    python benchmarks/logins.py --clients 1000 --guessers 1000

The broker is a process of its own with the plugin acl. Each client has a user of its own. All have the same stored
hash, so that making them takes no minutes; the broker cannot use that, and hashes once for each user. The guesser
connects from 127.0.0.2 and sends a wrong password on each connection, again and again. A single client that comes
each 50 ms shows what its login waits, with and without the guesser. The processor time of the broker and of the clients
says more than the seconds if the machine does something else, too.
"""

import argparse
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from martlet_acl.passwords import hash_password

PASSWORD = b"correct horse"
CONNACK_BYTES = 4
PROBE_S = 0.05
PROBES = 200
AGAIN_S = 1.0
# Clients that wait for an answer at the same time; a listening socket has a queue of 1,024.
AT_ONCE = 4000


def connect_packet(user: str, password: bytes) -> bytes:
    """Return CONNECT of MQTT 3.1.1 with a clean session."""

    def text(value: bytes) -> bytes:
        return len(value).to_bytes(2, "big") + value

    name = user.encode()
    body = text(b"MQTT") + b"\x04\xc2\x00\x00" + text(b"id-" + name) + text(name) + text(password)
    assert len(body) < 128
    return b"\x10" + bytes([len(body)]) + body


def write_users(data: Path, count: int) -> None:
    """Write the files of access control with users ``u0``, ``u1`` and so on."""
    config = data / "config"
    config.mkdir(parents=True)
    verifier = hash_password(PASSWORD, os.urandom(16))
    names = [f"u{number}" for number in range(count)]
    rules = {"everybody": {"custom": [{"resource": "*", "actions": ["all"], "decision": "allow"}]}}
    (config / "acl.json").write_text(json.dumps({"users": {name: {} for name in names}, "rules": rules}))
    secrets = config / "acl.secrets"
    secrets.touch(0o600)
    secrets.write_text(json.dumps({"users": {name: {"password": verifier} for name in names}}))


@contextmanager
def broker(data: str) -> Iterator[tuple[tuple[str, int], int]]:
    """Run a broker; yield the address of its MQTT port and its process."""
    command = [sys.executable, "-m", "martlet", "run", "--data", data, "--set", "mqtt.listen=127.0.0.1:0"]
    command += ["--set", 'plugins.enabled=["acl","mqtt"]', "--set", "server.connections_max=30000"]
    command += ["--set", "mqtt.connect_s=120"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        host, _, port = next(word.partition("=")[2] for word in words if word.startswith("mqtt=")).rpartition(":")
        yield (host, int(port)), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def processor_s(pid: int) -> float:
    """Return the processor time that the process *pid* has used."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class Clients:
    """Clients that connect at once; one that is refused because the broker is busy reconnects after a second."""

    def __init__(self, address: tuple[str, int], count: int) -> None:
        self._address = address
        self._selector = selectors.DefaultSelector()
        self._due = deque((0.0, number) for number in range(count))
        self._waiting = 0
        self._inside: list[socket.socket] = []
        self._count = count
        self.refused = 0
        self.reset = 0

    def run(self) -> float:
        """Return the seconds until all are logged in."""
        begin = time.perf_counter()
        while len(self._inside) < self._count:
            while self._due and self._waiting < AT_ONCE and self._due[0][0] <= time.perf_counter():
                self._connect(self._due.popleft()[1])
            self._read_answers(0.01)
        elapsed = time.perf_counter() - begin
        for client in self._inside:
            client.close()
        return elapsed

    def _connect(self, number: int) -> None:
        client = socket.create_connection(self._address)
        client.sendall(connect_packet(f"u{number}", PASSWORD))
        self._selector.register(client, selectors.EVENT_READ, number)
        self._waiting += 1

    def _read_answers(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            client = key.fileobj
            assert isinstance(client, socket.socket)
            self._selector.unregister(client)
            self._waiting -= 1
            try:
                answer = client.recv(CONNACK_BYTES)
            except ConnectionResetError:
                answer = b""
                self.reset += 1
            if answer[3:] == b"\0":
                self._inside.append(client)
            else:
                client.close()
                self.refused += 1
                self._due.append((time.perf_counter() + AGAIN_S, key.data))


def probe(address: tuple[str, int], first: int) -> list[float]:
    """Return what logins of users that were not proved before wait, in milliseconds, sorted."""
    waits = []
    for number in range(first, first + PROBES):
        begin = time.perf_counter()
        with socket.create_connection(address) as client:
            client.sendall(connect_packet(f"u{number}", PASSWORD))
            assert client.recv(CONNACK_BYTES)[3:] == b"\0", "a login was refused"
        waits.append((time.perf_counter() - begin) * 1000)
        time.sleep(max(0.0, PROBE_S - (time.perf_counter() - begin)))
    return sorted(waits)


def guess(address: tuple[str, int], connections: int) -> None:
    """Send wrong passwords from 127.0.0.2 on *connections*, each again as soon as it is refused."""
    selector = selectors.DefaultSelector()

    def connect(number: int) -> None:
        client = socket.socket()
        client.bind(("127.0.0.2", 0))
        client.connect(address)
        client.sendall(connect_packet(f"u{number}", b"wrong"))
        selector.register(client, selectors.EVENT_READ, number)

    for number in range(connections):
        connect(number)
    while True:
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            selector.unregister(key.fileobj)
            key.fileobj.close()
            try:
                connect(key.data)
            except OSError:
                time.sleep(0.01)


def show_waits(name: str, waits: list[float]) -> None:
    print(f"{name:28} p50 {waits[len(waits) // 2]:6.1f} ms, p99 {waits[len(waits) * 99 // 100]:6.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--guessers", type=int, default=1000)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as data:
        write_users(Path(data), options.clients + 2 * PROBES)
        with broker(data) as (address, pid):
            for name in ("cold", "warm"):
                clients = Clients(address, options.clients)
                used_s, own_s = processor_s(pid), time.process_time()
                elapsed = clients.run()
                used_s, own_s = processor_s(pid) - used_s, time.process_time() - own_s
                refused = f"{clients.refused} times busy, {clients.reset} resets"
                print(f"{options.clients} logins, {name:14} {elapsed:6.1f} s, {refused}", end="")
                print(f"; processor: broker {used_s:.1f} s, clients {own_s:.1f} s", flush=True)
        with broker(data) as (address, _):
            show_waits("one client", probe(address, options.clients))
            guesser = os.fork()
            if not guesser:
                try:
                    guess(address, options.guessers)
                finally:
                    os._exit(0)
            try:
                time.sleep(2)
                show_waits(f"beside {options.guessers} guessers", probe(address, options.clients + PROBES))
            finally:
                os.kill(guesser, signal.SIGKILL)
                os.waitpid(guesser, 0)


if __name__ == "__main__":
    main()
