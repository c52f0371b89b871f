"""Sends, pulls and flushes over sockets, on this checkout and another by turns, as ratios.

    python benchmarks/pump.py CHECKOUT [--runs 5]

Both brokers run from source, in plain Python, on fresh stores; the load driver (`driver/`, Go) loads one while the
other is stopped. A row has the medians of all runs: the other checkout's, and this one's with its ratio to that.
Takes about six minutes with five runs on a quiet machine of two cores; use no other kind of machine.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from brokers import HERE, WORK, Broker, Martlet
from compare import Table, drive, measure

FIGURES = {"rate": "messages/s", "us_p50": "p50 us", "us_p99": "p99 us", "us_p999": "p99.9 us", "cpu_us": "CPU us each"}
ASYNC = ((1, 1, 20_000), (1, 16, 80_000), (1, 64, 200_000), (4, 16, 200_000))
SYNC = ((1, 1, 3_000), (1, 64, 60_000))


@contextmanager
def both(other: Path, flush: str) -> Iterator[list[Broker]]:
    """A broker of each checkout, the other one first."""
    WORK.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=WORK))
    brokers: list[Broker] = []
    try:
        for side, checkout in (("before", other), ("now", HERE.parent)):
            brokers.append(Martlet(folder / side, flush, sys.executable, checkout))
        for broker in brokers:
            drive(broker, "create")
            drive(broker, "send", window=64, count=20_000)
        yield brokers
    finally:
        for broker in brokers:
            broker.close()
        shutil.rmtree(folder)


def load(broker: Broker, command: str, count: int, **flags: object) -> dict[str, float]:
    out = drive(broker, command, count=count, **flags)
    return out | {"cpu_us": out["cpu_s"] * 1e6 / count}


def sends(table: Table, runs: int, other: Path, flush: str, loads: tuple[tuple[int, int, int], ...]) -> None:
    with both(other, flush) as brokers:
        for conns, window, count in loads:
            title = f"send 1024 B, {conns} x {window} in flight, {flush}"
            measure(
                table,
                runs,
                title,
                FIGURES,
                brokers,
                lambda b, c=conns, w=window, n=count: load(b, "send", n, conns=c, window=w),
            )


def pulls(table: Table, runs: int, other: Path) -> None:
    with both(other, "async") as brokers:
        for broker in brokers:
            drive(broker, "create", topic="Backlog")
            drive(broker, "send", conns=4, window=16, count=400_000, topic="Backlog")
        for window in (1, 16):
            title = f"pull a warm backlog, {window} outstanding"
            measure(
                table,
                runs,
                title,
                FIGURES,
                brokers,
                lambda b, w=window: load(b, "pull", 300_000, window=w, topic="Backlog"),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    other, table = options.checkout.resolve(), Table()
    sends(table, options.runs, other, "async", ASYNC)
    sends(table, options.runs, other, "sync", SYNC)
    pulls(table, options.runs, other)


if __name__ == "__main__":
    main()
