"""MQTT beside Mosquitto with its defaults and with set_tcp_nodelay, by turns.

    python benchmarks/mqtt.py                                    everything, with the Martlet of this Python
    python benchmarks/mqtt.py --python now=PYTHON --python before=OTHER_PYTHON   with the Martlet that each has
    python benchmarks/mqtt.py q1 latency --runs 3 --bytes 256    some loads

Loads:
  q0, fan, ten  QoS 0: one publisher to one subscriber, one to ten, ten to one each
  q1, q2        QoS 1 and 2, one to one, with at most 100 and 1,000 messages under way
  sync          the same with 1,000, and store.flush = "sync"; Mosquitto keeps messages in memory only
  many          QoS 1 and 2: 200 publishers that each wait for the answer to one message, without subscribers
  names         20,000 names with 50 filters, from the first message on; and one name in the same way
  connects      clients that connect, 100 at a time, and close the connection when they are accepted
  memory        resident KiB per idle connection, and per one with a subscription of its own
  latency       p50 and p99 from send to receipt at 2,000 messages a second

Each load runs on one broker, then on the next, in turn, --runs times; a row shows medians. Its ratios are those to the
better one of the two Mosquittos, for latencies to the one with set_tcp_nodelay. The last columns are the longest turn
of Martlet's event loop in all runs, in processor time (`turns.py`), which shall be under 10 ms, and the broker's
processor time per delivery or connection. A * says that the clients, not the broker, had no processor time left.
The broker has one processor and the clients another. Mosquitto must be installed (Debian: apt-get install mosquitto).
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import mqtt_load as loads
from idle import cpu_s, raise_limit
from turns import Turns

BROKER_CPU, CLIENT_CPU = "0", 1
DEFAULT, NODELAY = "mosquitto", "mosquitto nodelay"
ALL = "q0", "fan", "ten", "q1", "q2", "sync", "many", "names", "connects", "memory", "latency"
BUSY = 0.95  # of a processor


class Row(NamedTuple):
    """A load, with a name and a unit for each of its figures; of those without a unit, more is better."""

    figures: tuple[tuple[str, str], ...]
    load: loads.Load
    flush: str = "async"


class Run(NamedTuple):
    """What one run of a load on one broker gave."""

    values: tuple[float, ...]
    broker_cpus: float  # processors in use, on average
    client_cpus: float
    longest_turn_ms: float  # 0 for other brokers


def rows_of(group: str, sizes: list[int]) -> list[Row]:
    """Return the rows of one of `ALL`."""
    middle = 256 if 256 in sizes else sizes[0]
    found: list[Row] = []

    def rate(name: str, load: loads.Load, flush: str = "async") -> None:
        found.append(Row(((name, ""),), load, flush))

    if group == "names":
        rate(f"one name, {middle} B", loads.names(1, 1, middle))
        rate(f"20,000 names, 50 filters, {middle} B", loads.names(20_000, 50, middle))
    elif group == "connects":
        rate("connections", loads.connects)
    elif group == "memory":
        kinds = ("idle connection", " KiB"), ("connection with a subscription", " KiB")
        found.append(Row(kinds, loads.memory(3000)))
    elif group == "latency":
        names = tuple((f"{name} at {loads.STEADY_RATE:,} a second, {middle} B", " µs") for name in ("p50", "p99"))
        found.append(Row(names, loads.latency(middle)))
    for size in sizes:
        if group in ("q0", "fan", "ten"):
            name, publishers, subscribers = {
                "q0": ("one to one", 1, 1),
                "fan": ("one to ten", 1, 10),
                "ten": ("ten to ten", 10, 1),
            }[group]
            rate(f"QoS 0 {name}, {size} B", loads.one_way(publishers, subscribers, 0, 2000, size))
        elif group in ("q1", "q2"):
            qos = int(group[1])
            for window in (100, 1000):
                rate(f"QoS {qos}, window {window:,}, {size} B", loads.one_way(1, 1, qos, window, size))
        elif group == "many":
            for qos in (1, 2):
                rate(f"QoS {qos}, 200 publishers, 1 in flight each, {size} B", loads.many(200, qos, size))
        elif group == "sync":
            for qos in (1, 2):
                rate(f"QoS {qos}, sync flush, window 1,000, {size} B", loads.one_way(1, 1, qos, 1000, size), "sync")
    return found


# brokers


def wait_port(port: int) -> None:
    for _ in range(400):
        try:
            loads.socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.05)
    sys.exit(f"nothing listens on port {port}")


def free_port() -> int:
    with loads.socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def program(name: str) -> str:
    path = f"{os.environ['PATH']}:/usr/sbin"
    return shutil.which(name, path=path) or sys.exit(f"{name} is missing; on Debian: apt-get install {name}")


def mosquitto(folder: Path, port: int, *, nodelay: bool) -> list[str]:
    """Return the command that starts it."""
    settings = [f"listener {port} 127.0.0.1", "allow_anonymous true", "max_inflight_messages 1000"]
    settings += ["max_queued_messages 0", "persistence false", "log_type none"]
    settings += ["set_tcp_nodelay true"] if nodelay else []
    (folder / "mosquitto.conf").write_text("\n".join(settings) + "\n")
    return [program("mosquitto"), "-c", str(folder / "mosquitto.conf")]


def martlet(folder: Path, port: int, python: str, flush: str, turns: Turns) -> list[str]:
    """Return the command that starts the Martlet of *python*, whose *turns* are measured."""
    command = [python, *turns.command, "run", "--data", str(folder / "data")]
    settings = 'plugins.enabled=["mqtt"]', f"mqtt.listen=127.0.0.1:{port}", f"store.flush={flush}"
    for setting in (*settings, "server.connections_max=15000"):
        command += "--set", setting
    return command


@contextmanager
def started(peer: str, pythons: dict[str, str], flush: str) -> Iterator[tuple[loads.Target, Turns]]:
    """Start *peer* on an empty folder."""
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        turns = Turns(Path(name) / "turns")
        if peer in pythons:
            command = martlet(Path(name), port, pythons[peer], flush, turns)
        else:
            command = mosquitto(Path(name), port, nodelay=peer == NODELAY)
        command = [program("taskset"), "-c", BROKER_CPU, *command]
        # Not in this folder: a Python with Martlet installed must not find the source.
        with subprocess.Popen(command, cwd=name, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            wait_port(port)
            try:
                yield loads.Target(port, process.pid), turns
            finally:
                process.terminate()


def measured(row: Row, peer: str, pythons: dict[str, str], seconds: float) -> Run:
    with started(peer, pythons, row.flush) as (target, turns):
        turns.begin()
        before, began = (cpu_s(target.pid), time.process_time()), time.monotonic()
        values = row.load(target, seconds)
        took = time.monotonic() - began
        used = cpu_s(target.pid) - before[0], time.process_time() - before[1]
        return Run(values, used[0] / took, used[1] / took, turns.longest_ms())


# the table


class Progress:
    """Says on stderr what was measured, and how long the rest will take."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._began = total, 0, time.monotonic()

    def note(self, name: str, peer: str, run: Run) -> None:
        self._done += 1
        took = time.monotonic() - self._began
        left_min = took / self._done * (self._total - self._done) / 60
        values = " / ".join(f"{value:,.1f}" for value in run.values)
        print(f"[{self._done}/{self._total}, {left_min:.0f} min left] {name}, {peer}: {values}", file=sys.stderr)


def shown(value: float, unit: str) -> str:
    return f"{value:,.1f}{unit}" if unit == " KiB" else f"{value:,.0f}{unit}"


def lines_of(row: Row, runs: dict[str, list[Run]], martlets: list[str]) -> Iterator[str]:
    """Yield a line of the table for each figure of *row*."""
    for index, (name, unit) in enumerate(row.figures):
        values = {peer: statistics.median(run.values[index] for run in of_peer) for peer, of_peer in runs.items()}
        if not unit:
            best = max(values[DEFAULT], values[NODELAY])
        else:
            best = values[NODELAY] if unit == " µs" else min(values[DEFAULT], values[NODELAY])
        cells = [name]
        for peer, value in values.items():
            is_limited = not unit and statistics.median(run.client_cpus for run in runs[peer]) > BUSY
            cells.append(shown(value, unit) + ("*" if is_limited else ""))
            if peer in martlets:
                cells.append(f"{value / best:.2f}")
        cells.append(" / ".join(f"{max(run.longest_turn_ms for run in runs[peer]):.1f} ms" for peer in martlets))
        costs = (statistics.median(run.broker_cpus / run.values[index] for run in of_peer) for of_peer in runs.values())
        cells.append("" if unit else " / ".join(f"{cost * 1e6:.1f}" for cost in costs))
        yield f"| {' | '.join(cells)} |"


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    version = subprocess.run([program("mosquitto"), "-h"], capture_output=True, text=True, check=False).stdout
    return f"{os.cpu_count()} x {model}, Linux {platform.release()}, {version.splitlines()[0]}"


def pythons_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the Pythons whose Martlets are measured, by name."""
    found = dict(each.partition("=")[::2] for each in options.python)
    return found or {"martlet": sys.executable}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="*", choices=[*ALL, []], metavar="LOAD", help="all if there is none")
    parser.add_argument("--runs", type=int, default=5, help="of each load on each broker (default: 5)")
    parser.add_argument("--seconds", type=float, default=3, help="of a run (default: 3)")
    parser.add_argument("--bytes", type=int, nargs="+", default=[64, 256, 1024], help="sizes of payloads")
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PYTHON", help="measure the Martlet that it has installed"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each run to FILE, a line for each load")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    pythons = pythons_of(options)
    peers = [DEFAULT, NODELAY, *pythons]
    raise_limit()
    os.sched_setaffinity(0, {CLIENT_CPU})
    rows = [row for group in options.loads or ALL for row in rows_of(group, options.bytes)]
    progress = Progress(len(rows) * len(peers) * options.runs)
    print(f"{machine()}; load average {os.getloadavg()[0]:.1f}; medians of {options.runs} runs\n")
    heads = [cell for peer in peers for cell in ((peer, "ratio") if peer in pythons else (peer,))]
    print(
        f"| | {' | '.join(heads)} | longest turn | µs of processor time |\n|---|{'---|' * (len(heads) + 2)}", flush=True
    )
    for row in rows:
        runs: dict[str, list[Run]] = {peer: [] for peer in peers}
        for _ in range(options.runs):
            for peer in peers:
                run = measured(row, peer, pythons, options.seconds)
                runs[peer].append(run)
                progress.note(row.figures[0][0], peer, run)
        for line in lines_of(row, runs, list(pythons)):
            print(line, flush=True)
        if options.json is not None:
            with options.json.open("a") as out:
                out.write(json.dumps({"figures": row.figures, "flush": row.flush, "runs": runs}) + "\n")
    print(f"\nload average at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
