"""What the Spark sink costs in a task, without Spark: encoding rows, and writing them to a broker.

    python -m benchmarks.spark_sink [--rounds 5] [--rows 200000] [--body 1024]

Run it at the root of a checkout, in an environment with the checkout, PyArrow and NumPy. Arrow batches have 10,000
rows, as Spark's. Prints the least of the rounds: million rows per second of the task's processor time for each choice
of columns; then rows per second by the clock for each guarantee, with a broker on the same machine, and the processor
time of the task per row.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
from benchmarks.brokers import Martlet

from martlet_client.blocking import Admin
from martlet_spark.cluster import Cluster
from martlet_spark.connection import CONNECTIONS, Security
from martlet_spark.write import staging
from martlet_spark.write.encode import Encoder
from martlet_spark.write.sending import Outbox
from martlet_spark.write.staging import Staging, Transaction
from martlet_spark.write.targets import QueueTurns, Targets
from martlet_spark.write.writable import WritableQueues

BATCH_ROWS = 10_000
COLUMNS = (("body",), ("body", "key"), ("body", "key", "tag", "properties"))
MAP = pa.map_(pa.string(), pa.string())


def frame(names: tuple[str, ...], body_bytes: int) -> Any:
    """Return a batch with these columns; properties are two."""
    numbers = range(BATCH_ROWS)
    values = {
        "body": pa.array([bytes([number % 251]) * body_bytes for number in numbers], pa.binary()),
        "key": pa.array([f"key-{number}" for number in numbers]),
        "tag": pa.array([f"T{number % 7}" for number in numbers]),
        "properties": pa.array([[("amount", str(number)), ("region", "north")] for number in numbers], MAP),
    }
    return pa.RecordBatch.from_arrays([values[name] for name in names], names=list(names))


def least(rounds: int, call: Callable[[], object]) -> tuple[float, float]:
    """Return the least time by the clock, and the least processor time, of *call*."""
    clock, processor = [], []
    for _ in range(rounds):
        began, used = time.perf_counter(), time.process_time()
        call()
        clock.append(time.perf_counter() - began)
        processor.append(time.process_time() - used)
    return min(clock), min(processor)


class Writes:
    """Writes the same rows again and again, each time as another transaction."""

    def __init__(self, cluster: Cluster, rows: Any, batches: int) -> None:
        self._cluster = cluster
        self._rows = rows
        self._batches = batches
        self._sequence = 0

    def at_least_once(self) -> None:
        queues_of = WritableQueues(self._cluster)
        with closing(Outbox(self._cluster, QueueTurns(queues_of))) as outbox:
            self._write(queues_of, outbox)
            outbox.finish()

    def exactly_once(self) -> None:
        self._sequence += 1
        queues_of = WritableQueues(self._cluster)
        with closing(Staging(self._cluster, QueueTurns(queues_of), Transaction("b", self._sequence))) as stage:
            self._write(queues_of, stage)
            parts = stage.finish()
        staging.commit(self._cluster, parts)

    def _write(self, queues_of: WritableQueues, sender: Outbox | Staging) -> None:
        targets = Targets(queues_of, "Bench", 1 << 20)
        for _ in range(self._batches):
            for chunk in targets.chunks(self._rows):
                sender.write(chunk)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--body", type=int, default=1024)
    arguments = parser.parse_args()
    for names in COLUMNS:
        rows, encoder = frame(names, arguments.body), Encoder()
        _, used = least(arguments.rounds * 10, lambda rows=rows, encoder=encoder: encoder.encode(rows))
        print(f"encode {', '.join(names):32} {BATCH_ROWS / used / 1e6:6.2f} M rows/s a core")
    with tempfile.TemporaryDirectory() as folder, closing(Martlet(Path(folder), "async", sys.executable)) as broker:
        with Admin(broker.name_server) as admin:
            admin.create_topic("Bench", queues=8)
        writes = Writes(
            Cluster([broker.name_server], Security(), 60),
            frame(("body",), arguments.body),
            arguments.rows // BATCH_ROWS,
        )
        for name, call in ("at-least-once", writes.at_least_once), ("exactly-once", writes.exactly_once):
            clock, used = least(arguments.rounds, call)
            count = arguments.rows // BATCH_ROWS * BATCH_ROWS
            print(f"{name:15} {count / clock:9,.0f} rows/s, {used / count * 1e6:5.2f} us of the task a row")
        CONNECTIONS.close()


if __name__ == "__main__":
    main()
