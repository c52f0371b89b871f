"""What an idle connection costs: resident memory of a broker before and after many clients connect and say hello.

    python benchmarks/idle.py                        # 5,000 connections
    python benchmarks/idle.py --connections 10000 --seconds 5

The broker is a process of its own, as `martlet run` starts it. Every connection sends one heartbeat-sized
request, so that it has passed all layers once, and then stays silent. Each needs two file descriptors
on this machine, one here and one in the broker; the limit is raised as far as it goes.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# GET_BROKER_RUNTIME_INFO would make a large answer; an unknown code is answered in a few bytes.
HEADER = b'{"code":9999,"language":"JAVA","version":400,"opaque":1,"flag":0,"extFields":{}}'
HELLO = (4 + len(HEADER)).to_bytes(4, "big") + len(HEADER).to_bytes(4, "big") + HEADER
AIM_KIB = 12.0


def raise_limit() -> int:
    """Return how many descriptors may be open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def resident_kib(pid: int) -> int:
    """Return the resident set of process *pid*."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise RuntimeError(f"process {pid} has no VmRSS")


def cpu_s(pid: int) -> float:
    """Return the processor time that process *pid* has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(data: str) -> tuple[subprocess.Popen[str], tuple[str, int]]:
    """Start a broker and return it with its port."""
    command = [sys.executable, "-m", "martlet", "run", "--data", data]
    command += ["--set", "remoting.listen=127.0.0.1:0", "--set", "nameserver.listen=127.0.0.1:0"]
    command += ["--set", "mqtt.listen=127.0.0.1:0", "--set", "stomp.listen=127.0.0.1:0"]
    broker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert broker.stdout is not None
    words = broker.stdout.readline().split()
    address = next(word.partition("=")[2] for word in words if word.startswith("remoting="))
    host, _, port = address.rpartition(":")
    return broker, (host, int(port))


def connect(address: tuple[str, int]) -> socket.socket:
    """Connect, say hello, and take the answer."""
    opened = socket.create_connection(address)
    opened.sendall(HELLO)
    assert opened.recv(65536), "the broker closed"
    return opened


def main() -> int:
    """Print the figures; 1 when the aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long to watch the processor time of silence")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    limit = raise_limit()
    if options.connections > limit - 100:
        parser.error(f"{options.connections} connections need more than the {limit} descriptors allowed here")
    with tempfile.TemporaryDirectory() as data:
        broker, address = start(data)
        try:
            warm = [connect(address) for _ in range(20)]
            before = resident_kib(broker.pid)
            opened = [connect(address) for _ in range(options.connections)]
            after = resident_kib(broker.pid)
            used = cpu_s(broker.pid)
            time.sleep(options.seconds)
            idle = (cpu_s(broker.pid) - used) / options.seconds
            for each in (*warm, *opened):
                each.close()
        finally:
            broker.terminate()
            broker.wait()
    each_kib = (after - before) / options.connections
    figures = {
        "connections": options.connections,
        "before_kib": before,
        "after_kib": after,
        "kib_per_connection": round(each_kib, 2),
        "idle_processor_share": round(idle, 4),
    }
    if options.json:
        print(json.dumps(figures))
    else:
        print(
            f"{options.connections} idle connections: {before / 1024:.1f} MiB before, {after / 1024:.1f} MiB with them"
        )
        print(f"{each_kib:.2f} KiB each (aim: at most {AIM_KIB:g}); {idle:.1%} of a processor while all are silent")
    return 0 if each_kib <= AIM_KIB else 1


if __name__ == "__main__":
    sys.exit(main())
