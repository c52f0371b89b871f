"""What a new connection costs the broker, with and without networks, limits of an address, and headers of a proxy.

    python benchmarks/accepts.py                     # this checkout alone
    python benchmarks/accepts.py CHECKOUT            # and another one, whose connections have none of that
    python benchmarks/accepts.py --connections 5000 --rounds 11

Clients of remoting connect, 100 at a time, send one small request, take the answer and close. The figures are the
broker's processor time for each, medians of all rounds; all kinds take turns, so a busy machine slows all of them.
"""

import argparse
import shutil
import socket
import statistics
import struct
import sys
import tempfile
from pathlib import Path

from brokers import HERE, WORK, Martlet
from idle import HELLO

AT_ONCE = 100
IP_BIND_ADDRESS_NO_PORT = 24  # of Linux; without it, a free port is searched among those of closed connections
PROXY = "127.0.0.2"
OWN = "127.0.0.1"
PLUGINS = 'plugins.enabled=["remoting","nameserver"]'
PROXIES = f'remoting.proxy_networks=["{PROXY}"]'
TEXT = b"PROXY TCP4 203.0.113.7 192.0.2.1 51234 10911\r\n"
BINARY = (
    b"\r\n\r\n\0\r\nQUIT\n" + struct.pack(">BBH", 0x21, 0x11, 12) + bytes((203, 0, 113, 7, 192, 0, 2, 1)) + bytes(4)
)
# kind -> settings, address of the client, what it sends first
KINDS: dict[str, tuple[tuple[str, ...], str, bytes]] = {
    "usual": ((), OWN, b""),
    "networks": (('remoting.networks=["10.0.0.0/8","127.0.0.0/8"]',), OWN, b""),
    "limits": (("server.connections_address_max=10000", "server.connects_address_s=100000"), OWN, b""),
    "no proxy, where proxies are": ((PROXIES,), OWN, b""),
    "proxy, version 1": ((PROXIES,), PROXY, TEXT),
    "proxy, version 2": ((PROXIES,), PROXY, BINARY),
}


def cpu_us(pid: int) -> float:
    """Return the processor time of all threads of process *pid* so far, to the nanosecond."""
    times = [path.read_text().split()[0] for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(map(int, times)) / 1000


def connect(broker: Martlet, count: int, source: str, first: bytes) -> float:
    """Return the broker's processor time for *count* connections, in microseconds for each."""
    before = cpu_us(broker.process.pid)
    for _ in range(0, count, AT_ONCE):
        clients = []
        for _ in range(AT_ONCE):
            client = socket.socket()
            if source != OWN:
                client.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
                client.bind((source, 0))
            client.connect(("127.0.0.1", broker.port))
            client.sendall(first + HELLO)
            clients.append(client)
        for client in clients:
            if not client.recv(65536):
                sys.exit("the broker closed a connection")
            client.close()
    return (cpu_us(broker.process.pid) - before) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path)
    parser.add_argument("--connections", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=WORK))
    brokers: dict[str, tuple[Martlet, str, bytes]] = {}
    try:
        if options.checkout is not None:
            other = Martlet(folder / "other", "async", sys.executable, options.checkout, (PLUGINS,))
            brokers["usual, the other checkout"] = (other, OWN, b"")
        for kind, (settings, source, first) in KINDS.items():
            broker = Martlet(folder / kind, "async", sys.executable, HERE.parent, (PLUGINS, *settings))
            brokers[kind] = (broker, source, first)
        figures: dict[str, list[float]] = {kind: [] for kind in brokers}
        for number in range(options.rounds + 1):
            for kind, (broker, source, first) in brokers.items():
                figure = connect(broker, options.connections, source, first)
                if number:  # the first round loads what it needs
                    figures[kind].append(figure)
        for kind, found in figures.items():
            print(f"{kind:32} {statistics.median(found):8.1f} us, least {min(found):8.1f} us")
    finally:
        for broker, *_ in brokers.values():
            broker.close()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
