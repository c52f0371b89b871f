"""Martlet beside RocketMQ on the same machine in one run, as ratios.

    python benchmarks/compare.py                      every series, the table on stdout and in the work folder
    python benchmarks/compare.py send pull --runs 5   some series

A wheel of this checkout is built and installed first, and the native kernel; Martlet runs
with and without it. Each load runs on one broker, then on the next, in turn, `--runs` times;
a row shows the medians, and their ratios to RocketMQ's.
A broker shares the machine's cores with the driver alone; the others are stopped meanwhile.
"""

import argparse
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from brokers import HERE, WORK, Broker, Martlet, Process, RocketMQ, driver, java, python_with_wheel

# Martlet's sides, and their setting of `broker.native`.
SIDES = {"native kernel": "require", "plain Python": "off"}
EXAMPLE = "org.apache.rocketmq.example.benchmark."


class Table:
    """Rows of load, figure, and the value of each broker, RocketMQ's first; printed as they come."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, tuple[float, ...]]] = []

    def add(self, load: str, figure: str, *values: float) -> None:
        self.rows.append((load, figure, values))
        shown = "".join(f"{value:12,.1f}{_ratio(value, values[0])}" for value in values)
        print(f"{load:44} {figure:18}{shown}", flush=True)

    def markdown(self) -> str:
        names = " | ratio | ".join(SIDES)
        lines = [f"| load | figure | RocketMQ | {names} | ratio |", "|---|---|---" + "|---|---" * len(SIDES) + "|"]
        for load, figure, values in self.rows:
            cells = [f"{values[0]:,.1f}", *(f"{value:,.1f} |{_ratio(value, values[0])}" for value in values[1:])]
            lines.append(f"| {load} | {figure} | {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"


def _ratio(value: float, to: float) -> str:
    return f"{value / to:7.2f}" if to else f"{'-':>7}"


def drive(broker: Broker, command: str, **flags: object) -> dict[str, float]:
    """Run the load driver once; what it printed, and the broker's CPU seconds as ``cpu_s``."""
    words = [f"-{name}={value}" for name, value in flags.items()]
    before = broker.process.cpu_s()
    done = subprocess.run(
        [driver(), "-addr", broker.address, "-cmd", command, *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{broker.name}: {done.stderr.strip()}")
    out: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    out["cpu_s"] = broker.process.cpu_s() - before
    if out.get("refused"):
        print(f"  {broker.name} refused {out['refused']} of {command} {flags}", flush=True)
    return out


@contextmanager
def all_brokers(flush: str) -> Iterator[list[Broker]]:
    """The brokers on fresh stores, RocketMQ first."""
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=WORK))
    brokers: list[Broker] = []
    try:
        brokers.append(RocketMQ(folder / "rocketmq", flush))
        for number, (name, native) in enumerate(SIDES.items()):
            settings = (f"broker.native={native}",)
            brokers.append(Martlet(folder / f"martlet-{number}", flush, python_with_wheel(), None, settings, name))
        yield brokers
    finally:
        for broker in brokers:
            broker.close()
        shutil.rmtree(folder)


@contextmanager
def alone(broker: Broker, brokers: list[Broker]) -> Iterator[None]:
    """Let all but *broker* stand still: an idle JVM takes its share of two cores."""
    others = [other for other in brokers if other is not broker]
    for other in others:
        other.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for other in others:
            other.send_signal(signal.SIGCONT)


def measure(
    table: Table,
    runs: int,
    load: str,
    figures: dict[str, str],
    brokers: list[Broker],
    work: Callable[[Broker], dict[str, float]],
) -> None:
    """Run *work* on each broker in turn and add a row for each of *figures* (key -> title)."""
    results: list[list[dict[str, float]]] = [[] for _ in brokers]
    for _ in range(runs):
        for side, broker in enumerate(brokers):
            with alone(broker, brokers):
                results[side].append(work(broker))
    for key, title in figures.items():
        table.add(load, title, *(statistics.median(float(r.get(key, 0)) for r in side) for side in results))


def send_series(table: Table, runs: int) -> None:
    loads = [
        (1, 1, 1024, 20_000),
        (1, 16, 1024, 120_000),
        (1, 64, 1024, 200_000),
        (4, 16, 1024, 200_000),
        (4, 16, 128, 200_000),
        (1, 1, 128, 20_000),
        (200, 1, 1024, 100_000),
        (1000, 1, 1024, 100_000),
        (4, 4, 65_536, 30_000),
        (2, 2, 1 << 20, 2_000),
    ]
    figures = {"rate": "messages/s", "us_p50": "p50 us", "us_p99": "p99 us", "us_each": "broker us/message"}
    with all_brokers("async") as brokers:
        warm_up(brokers)
        for conns, window, body, count in loads:
            title = f"send {body} B, {conns} x {window} in flight, async"
            measure(
                table,
                runs,
                title,
                figures,
                brokers,
                partial(send_once, conns=conns, window=window, body=body, count=count),
            )


def send_once(broker: Broker, *, count: int, **flags: int) -> dict[str, float]:
    done = drive(broker, "send", count=count, **flags)
    done["us_each"] = done["cpu_s"] * 1e6 / count
    return done


def sync_series(table: Table, runs: int) -> None:
    with all_brokers("sync") as brokers:
        warm_up(brokers, 20_000)
        for window, count in ((1, 3_000), (64, 120_000)):
            title = f"send 1024 B, 1 x {window} in flight, sync flush"
            measure(
                table,
                runs,
                title,
                {"rate": "messages/s", "us_p99": "p99 us"},
                brokers,
                lambda b, w=window, n=count: drive(b, "send", window=w, count=n),
            )


def rate_series(table: Table, runs: int) -> None:
    figures = {"us_p50": "p50 us", "us_p99": "p99 us", "us_p999": "p99.9 us"}
    with all_brokers("async") as brokers:
        warm_up(brokers)
        measure(
            table,
            runs,
            "2,000/s steady, 1024 B, async",
            figures,
            brokers,
            lambda b: drive(b, "rate", rate=2000, secs=8),
        )
        measure(
            table,
            runs,
            "2,000/s, send to receive",
            figures,
            brokers,
            lambda b: drive(b, "tail", rate=2000, secs=8, topic="Tail", queues=16),
        )


def pull_series(table: Table, runs: int) -> None:
    with all_brokers("async") as brokers:
        for broker in brokers:
            drive(broker, "create", topic="Backlog", queues=16)
            drive(broker, "send", conns=4, window=16, count=2_000_000, topic="Backlog", secs=180)
            drive(broker, "create", topic="OneQueue", queues=1)
            drive(broker, "send", conns=1, window=64, count=1_000_000, topic="OneQueue", queues=1, body=128, secs=120)
        for window in (1, 16):
            title = f"pull a warm backlog, {window} outstanding"
            measure(
                table,
                runs,
                title,
                {"rate": "messages/s", "us_p99": "p99 us"},
                brokers,
                lambda b, w=window: drive(b, "pull", window=w, count=600_000, topic="Backlog"),
            )
        measure(
            table,
            runs,
            "1 M of which no tag matches",
            {"scan_rate": "entries/s"},
            brokers,
            lambda b: drive(b, "pull", window=1, count=1, topic="OneQueue", queues=1, tags="NoSuchTag"),
        )
        java_consumer(table, brokers, 2_000_000)


def java_consumer(table: Table, brokers: list[Broker], count: int, group: str = "") -> None:
    """Let a stock push consumer drain the topic Backlog; as *group*, which pops, if it is given."""
    rates, costs = [], []
    for broker in brokers:
        with alone(broker, brokers):
            before = broker.process.cpu_s()
            words = (broker.name_server, "Backlog", str(count), *([group] if group else []))
            done = subprocess.run(
                java(str(HERE / "Drain.java"), *words, heap="1g"), capture_output=True, text=True, check=True
            )
            rates.append(float(re.findall(r"drained ([\d.]+)", done.stdout)[0]))
            costs.append((broker.process.cpu_s() - before) * 1e6 / count)
    how = ", popping," if group else ""
    load = f"a stock Java push consumer{how} through a backlog of {count:,}"
    table.add(load, "messages/s", *rates)
    table.add(load, "broker us/message", *costs)


def transaction_series(table: Table, runs: int) -> None:
    with all_brokers("async") as brokers:
        for broker in brokers:
            drive(broker, "create", topic="Transactions", queues=8)
        words = ("-t", "Transactions", "-w", "32", "-s", "1024", "-ri", "2000")
        load = "RocketMQ's TransactionProducer, 32 threads, all committed"
        java_rows(table, runs, brokers, "TransactionProducer", load, words, r"Send TPS: +(\d+)")


def pop_series(table: Table, runs: int) -> None:
    count = 200_000
    with all_brokers("async") as brokers:
        for broker in brokers:
            drive(broker, "create", topic="Backlog", queues=16)
            drive(broker, "send", conns=4, window=16, count=count * (runs + 1), topic="Backlog", secs=180)
        for window in (1, 16):
            title = f"pop a backlog and acknowledge each message, {window} pops outstanding"
            work = partial(pop_once, count=count, window=window)
            measure(table, runs, title, {"rate": "messages/s", "us_each": "broker us/message"}, brokers, work)
        for broker in brokers:
            drive(broker, "popmode", topic="Backlog", group="bench-java")
        java_consumer(table, brokers, count, "bench-java")


def pop_once(broker: Broker, *, count: int, window: int) -> dict[str, float]:
    done = drive(broker, "pop", window=window, count=count, topic="Backlog", group=f"pop-{window}", secs=120)
    done["us_each"] = done["cpu_s"] * 1e6 / done["acked"]
    return done


def sql92_series(table: Table, runs: int) -> None:
    with all_brokers("async") as brokers:
        for broker in brokers:
            drive(broker, "create", topic="Spread", queues=16)
            drive(broker, "send", conns=4, window=16, count=1_000_000, topic="Spread", body=128, spread=100, secs=180)
        for sql in ("a = 7", "a = '7'", "a + 1 = 8"):
            work = partial(drive, command="pull", window=1, count=2_000_000, topic="Spread", sql=sql, secs=60)
            figures = {"scan_rate": "entries/s", "us_p99": "p99 us"}
            measure(table, runs, f"1 M of which 1 % have {sql}", figures, brokers, work)


def delay_series(table: Table, runs: int) -> None:
    for flush in ("async", "sync"):
        with all_brokers(flush) as brokers:
            warm_up(brokers)
            title = f"delay level 1, 2,000/s, {flush} flush: send to receive less 1 s"
            measure(table, runs, title, {"ms_p50": "p50 ms", "ms_p99": "p99 ms"}, brokers, delayed)


def delayed(broker: Broker) -> dict[str, float]:
    done = drive(broker, "tail", rate=2000, secs=8, topic="Delayed", queues=4, level=1)
    return {name: done[f"us_{name[3:]}"] / 1000 - 1000 for name in ("ms_p50", "ms_p99")}


def benchmark(
    broker: Broker,
    program: str,
    words: tuple[str, ...],
    figure: str,
    enough: Callable[[list[float]], bool],
    limit_s: float = 60,
) -> list[float]:
    """Run one of RocketMQ's own benchmark programs until its reports are *enough*."""
    log = broker.data / f"{program}-{time.time_ns()}.log"
    process = Process(java(EXAMPLE + program, "-n", broker.name_server, *words, heap="1g"), log)
    end = time.monotonic() + limit_s
    seen: list[float] = []
    while time.monotonic() < end and not enough(seen):
        time.sleep(0.5)
        seen = [float(x) for x in re.findall(figure, log.read_text())]
    process.stop(signal.SIGKILL)
    return seen


def producer_series(table: Table, runs: int) -> None:
    with all_brokers("async") as brokers:
        for broker in brokers:
            drive(broker, "create", topic="BenchmarkTest2", queues=16)
        for threads in (1, 16, 64):
            words = ("-t", "BenchmarkTest2", "-w", str(threads), "-s", "1024", "-ri", "2000")
            java_rows(
                table, runs, brokers, "Producer", f"RocketMQ's Producer, {threads} threads", words, r"Send TPS: (\d+)"
            )
        words = ("-t", "BenchmarkTest2", "-w", "16", "-s", "1024", "-b", "32", "-ri", "2000")
        java_rows(
            table, runs, brokers, "BatchProducer", "RocketMQ's BatchProducer, batches of 32", words, r"Send MPS: (\d+)"
        )


def java_rows(
    table: Table, runs: int, brokers: list[Broker], program: str, load: str, words: tuple[str, ...], figure: str
) -> None:
    results: list[list[float]] = [[] for _ in brokers]
    for _ in range(max(1, runs // 2)):
        for side, broker in enumerate(brokers):
            with alone(broker, brokers):
                samples = benchmark(broker, program, words, figure, lambda seen: len(seen) >= 7)
            results[side].append(statistics.mean(samples[2:] or [0]))
    table.add(load, "messages/s", *(statistics.median(r) for r in results))


def topics_series(table: Table, runs: int) -> None:
    for topics in (1, 1000, 10_000):
        with all_brokers("async") as brokers:
            for broker in brokers:
                drive(broker, "create", topics=topics, queues=1, topic="Many")
            figures = {"rate": "messages/s"}
            title = f"send 1024 B, 1 x 64 in flight, {topics} topics"
            measure(
                table,
                runs,
                title,
                figures,
                brokers,
                lambda b, t=topics: drive(b, "send", window=64, count=150_000, topics=t, queues=1, topic="Many"),
            )
            table.add(title, "RSS MiB", *(broker.process.rss_mib() for broker in brokers))
            table.add(title, "open files", *(broker.process.open_files() for broker in brokers))


def memory_series(table: Table, runs: int) -> None:
    with all_brokers("async") as brokers:
        time.sleep(10)
        idle = [broker.process.rss_mib() for broker in brokers]
        table.add("idle", "RSS MiB", *idle)
        grown = []
        for broker in brokers:
            before = broker.process.rss_mib()
            holder = Process(
                [driver(), "-addr", broker.address, "-cmd", "idle", "-conns", "2000", "-secs", "60"],
                broker.data / "idle.log",
            )
            while "open" not in (broker.data / "idle.log").read_text():
                time.sleep(0.1)
            grown.append((broker.process.rss_mib() - before) * 1024 / 2000)
            holder.stop()
        table.add("2,000 idle connections", "KiB each", *grown)
        warm_up(brokers, 1_000_000)
        table.add("after 1 M messages of 1 KiB", "RSS MiB", *(broker.process.rss_mib() for broker in brokers))


def start_series(table: Table, runs: int) -> None:
    with all_brokers("async") as brokers:
        times: list[list[float]] = [[] for _ in brokers]
        for _ in range(runs):
            for side, broker in enumerate(brokers):
                broker.stop()
                shutil.rmtree(broker.data / "store", ignore_errors=True)
                began = time.monotonic()
                first_ack(broker)
                times[side].append(time.monotonic() - began)
    table.add("process start to first acknowledged send", "s", *(statistics.median(t) for t in times))


def first_ack(broker: Broker) -> None:
    waiting = subprocess.Popen(
        [driver(), "-addr", broker.address, "-cmd", "first", "-topic", "First", "-secs", "120"],
        stdout=subprocess.DEVNULL,
    )
    broker.start()
    if waiting.wait():
        sys.exit(f"{broker.name} acknowledged nothing")


def recovery_series(table: Table, runs: int) -> None:
    with all_brokers("async") as brokers:
        for broker in brokers:
            drive(broker, "create", topic="Recover")
            drive(broker, "send", conns=4, window=16, count=4_200_000, topic="Recover", secs=400)
        killed, rebuilt = [], []
        for broker in brokers:
            killed.append(crash(broker, ()))
            rebuilt.append(crash(broker, ("consumequeue", "index", "checkpoint")))
    table.add("kill -9 with 4.2 M messages, to first ack", "s", *killed)
    table.add("the same, consumequeue and index deleted", "s", *rebuilt)


def crash(broker: Broker, remove: tuple[str, ...]) -> float:
    broker.stop(signal.SIGKILL)
    for name in remove:
        path = broker.data / "store" / name
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
    began = time.monotonic()
    first_ack(broker)
    return time.monotonic() - began


def warm_up(brokers: list[Broker], count: int = 100_000) -> None:
    for broker in brokers:
        drive(broker, "create")
        drive(broker, "send", conns=4, window=16, count=count)


SERIES = {
    "send": send_series,
    "sync": sync_series,
    "rate": rate_series,
    "pull": pull_series,
    "pop": pop_series,
    "sql92": sql92_series,
    "delay": delay_series,
    "producer": producer_series,
    "transactions": transaction_series,
    "topics": topics_series,
    "memory": memory_series,
    "start": start_series,
    "recovery": recovery_series,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("series", nargs="*", help=f"which: {' '.join(SERIES)} (default: all)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each load on each side")
    words = parser.parse_args()
    unknown = set(words.series) - set(SERIES)
    if unknown:
        parser.error(f"series {min(unknown)!r} is unknown; known: {' '.join(SERIES)}")
    WORK.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the brokers are ended as well
    table = Table()
    for name in words.series or SERIES:
        SERIES[name](table, words.runs)
    target = WORK / "table.md"
    target.write_text(table.markdown())
    print(f"written to {target}")


if __name__ == "__main__":
    main()
