"""The Spark connector beside slower ways to read, beside Parquet, and beside Spark's Kafka source.

    python -m benchmarks.spark                     every series
    python -m benchmarks.spark read --runs 5       bulk reads; 32-message pulls, tuples, a stub in memory, Parquet
    python -m benchmarks.spark kafka --runs 5      Kafka 4.1.1 on the same rows
    python -m benchmarks.spark stream              tiny batches, and requests while nothing arrives

Run it at the root of a checkout, in an environment with the checkout, PySpark, PyArrow and NumPy; Java and, for Kafka,
Maven must be installed. Brokers, rows and Spark's files are in a temporary folder. Ways to read take turns, `--runs`
times after a warm-up, and each row shows medians: rows/s by the clock, processor time per row of the JVM, the Python
workers and the broker, and rows per second of processor time with and without the broker's.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.brokers import Martlet, Process
from benchmarks.spark.kafka import Kafka
from benchmarks.spark.rows import make_rows, send_rows
from benchmarks.spark.session import Spark
from benchmarks.spark.streams import idle, tiny_batches
from pyspark.sql import DataFrame

COUNTS = {1024: 1_000_000, 100: 2_000_000}
COLUMNS_5 = "topic,queue,offset,store_ts,body"
COLUMNS_13 = "topic,broker,queue,offset,key,tag,body,properties,msg_id,born_ts,store_ts,flag,reconsume_times"


@dataclass
class Figures:
    """What one run of *count* rows took: seconds by the clock, and of processors."""

    count: int
    wall_s: float
    jvm_s: float
    python_s: float
    broker_s: float

    @property
    def rate(self) -> float:
        return self.count / self.wall_s

    @property
    def a_core(self) -> float:
        return self.count / (self.jvm_s + self.python_s + self.broker_s)

    @property
    def a_core_without_broker(self) -> float:
        return self.count / (self.jvm_s + self.python_s)


@dataclass
class Way:
    """A way to read the rows: a name, what makes a fresh frame, and the broker that it reads from."""

    name: str
    load: Callable[[], DataFrame]
    broker: Process | None = None
    count: int = 0  # rows; 0: all
    write: Callable[[DataFrame], None] = lambda frame: frame.write.format("noop").mode("overwrite").save()
    runs: list[Figures] = field(default_factory=list)

    def run(self, spark: Spark, count: int) -> Figures:
        broker_s, (jvm_s, python_s) = self._broker_s(), spark.cpu_s()
        began = time.perf_counter()
        self.write(self.load())
        wall_s = time.perf_counter() - began
        jvm_end_s, python_end_s = spark.cpu_s()
        broker_s = self._broker_s() - broker_s
        return Figures(self.count or count, wall_s, jvm_end_s - jvm_s, python_end_s - python_s, broker_s)

    def _broker_s(self) -> float:
        return self.broker.cpu_s() if self.broker else 0.0


HEAD = (
    "| {:34} | rows/s | of the first | CPU us a row: JVM + Python + broker | rows/s a core | of the first "
    "| without broker |"
)


def compare(spark: Spark, title: str, ways: Sequence[Way], count: int, runs: int) -> None:
    """Let *ways* take turns, and print a row of medians for each; ratios are to the first."""
    for number in range(runs + 1):
        for way in ways:
            figures = way.run(spark, count)
            if number:  # the first is a warm-up
                way.runs.append(figures)
    print(f"\n{HEAD.format(title)}\n|---|---|---|---|---|---|---|")
    for way in ways:
        print(_row(way, ways[0]), flush=True)


def _row(way: Way, first: Way) -> str:
    def us(name: str) -> float:
        return statistics.median(getattr(run, name) * 1e6 / run.count for run in way.runs)

    def median(of: Way, name: str) -> float:
        return statistics.median(getattr(run, name) for run in of.runs)

    rate, core = median(way, "rate"), median(way, "a_core")
    cpu = f"{us('jvm_s'):.2f} + {us('python_s'):.2f} + {us('broker_s'):.2f}"
    ratios = rate / median(first, "rate"), core / median(first, "a_core")
    without = median(way, "a_core_without_broker")
    return f"| {way.name:34} | {rate:,.0f} | {ratios[0]:.2f} | {cpu} | {core:,.0f} | {ratios[1]:.2f} | {without:,.0f} |"


class Bench:
    """A Spark session, a broker with topics of rows, and the same rows in Parquet, in *folder*."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.options = options
        self.spark = Spark(folder / "spark", kafka="kafka" in options.series)
        self.martlet = Martlet(folder / "martlet", "async", sys.executable)

    def close(self) -> None:
        self.spark.close()
        self.martlet.close()

    def run(self, series: str) -> None:
        if series == "stream":
            self.stream()
            return
        work = {"read": self.read, "archive": self.archive, "kafka": self.kafka}[series]
        for body_bytes in self.options.bodies:
            work(body_bytes)

    def rows(self, body_bytes: int) -> tuple[Path, int]:
        """Return the Parquet file and the number of rows with bodies of *body_bytes*, which the broker has too."""
        path, count = self.folder / f"rows-{body_bytes}.parquet", int(COUNTS[body_bytes] * self.options.scale)
        if not path.exists():
            queues = self.options.queues
            make_rows(path, count, body_bytes, queues)
            send_rows(path, self.martlet.name_server, self.martlet.address, topic(body_bytes), queues)
        return path, count

    def frame(self, body_bytes: int, source: str = "martlet", endpoints: str = "", **options: str) -> DataFrame:
        reader = self.spark.session.read.format(source).option("subscribe", topic(body_bytes)).options(**options)
        return reader.option("endpoints", endpoints or self.martlet.name_server).load()

    def way(self, name: str, body_bytes: int, source: str = "martlet", **options: str) -> Way:
        return Way(name, lambda: self.frame(body_bytes, source, **options), self.martlet.process)

    def parquet(self, path: Path) -> DataFrame:
        return self.spark.session.read.parquet(str(path))

    def read(self, body_bytes: int) -> None:
        path, count = self.rows(body_bytes)
        with stub("memory", self.martlet.name_server, topic(body_bytes)) as process:
            name = "a stub that answers from memory"
            ways = [
                self.way("bulk reads, 6 columns", body_bytes),
                Way(name, lambda: self.frame(body_bytes, endpoints=process.address), process),
                self.way("pulls of 32 messages", body_bytes, "martlet-pulls"),
                self.part("tuples, one record at a time", body_bytes, count // 5, "martlet-tuples"),
                self.way("bulk reads, 5 columns", body_bytes, columns=COLUMNS_5),
                self.way("bulk reads, 13 columns", body_bytes, columns=COLUMNS_13),
                Way("Parquet (key, queue, body)", lambda: self.parquet(path)),
            ]
            compare(self.spark, f"{body_bytes} B to noop", ways, count, self.options.runs)

    def part(self, name: str, body_bytes: int, count: int, source: str) -> Way:
        """Return a way that reads *count* rows only, since it is slow."""
        each = count // self.options.queues
        ends = dict.fromkeys(map(str, range(self.options.queues)), each)
        way = self.way(name, body_bytes, source, endingOffsets=json.dumps({topic(body_bytes): ends}))
        way.count = each * self.options.queues
        return way

    def archive(self, body_bytes: int) -> None:
        path, count = self.rows(body_bytes)
        target = str(self.folder / "archive")
        ways = [
            self.way("bulk reads to Parquet, 6 columns", body_bytes),
            Way("Parquet to Parquet", lambda: self.parquet(path)),
        ]
        for way in ways:
            way.write = lambda frame: frame.write.mode("overwrite").parquet(target)
        compare(self.spark, f"{body_bytes} B to Parquet", ways, count, self.options.runs)

    def kafka(self, body_bytes: int) -> None:
        path, count = self.rows(body_bytes)
        kafka = Kafka(self.folder / f"kafka-{body_bytes}", self.options.queues)

        def load() -> DataFrame:
            return self._kafka(self.spark.session.read, kafka).option("subscribe", topic(body_bytes)).load()

        try:
            columns = self.parquet(path).selectExpr("key", "body as value", "queue as partition")
            self._kafka(columns.write, kafka).option("topic", topic(body_bytes)).save()
            self._check_equal(load(), self.frame(body_bytes))
            ways = [Way("Spark's Kafka source", load, kafka.process), self.way("martlet, 6 columns", body_bytes)]
            compare(self.spark, f"{body_bytes} B to noop", ways, count, self.options.runs)
        finally:
            kafka.close()

    def _kafka(self, side: object, kafka: Kafka) -> object:
        return side.format("kafka").option("kafka.bootstrap.servers", kafka.address)

    @staticmethod
    def _check_equal(theirs: DataFrame, ours: DataFrame) -> None:
        """Check that both have the same rows, by hashes."""
        hashed = "sum(crc32(cast({} as binary))), sum(crc32({})), count(*)"
        sums = [
            frame.selectExpr(*hashed.format(*names).split(", ")).collect()[0]
            for frame, names in ((theirs, ("key", "value")), (ours, ("key", "body")))
        ]
        assert tuple(sums[0]) == tuple(sums[1]), sums

    def stream(self) -> None:
        tiny_batches(self.spark, self.martlet, self.folder)
        with stub("count", self.martlet.name_server) as process:
            idle(self.spark, self.martlet, process.address, self.folder)
            counts = process.counts()
        print(f"requests in all, by code: {counts}")


def topic(body_bytes: int) -> str:
    return f"Rows-{body_bytes}"


class _Stub(Process):
    """A server of `stub`, which prints its address first and ends with its stdin."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "benchmarks.spark.stub", *words]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        self.address = self._child.stdout.readline().strip()

    def counts(self) -> str:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        return self._child.stdout.read().strip()


@contextmanager
def stub(*words: str) -> Iterator[_Stub]:
    process = _Stub(*words)
    try:
        yield process
    finally:
        process.stop()


SERIES = ("read", "archive", "kafka", "stream")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("series", nargs="*", help=f"which: {' '.join(SERIES)} (default: all)")
    add("--runs", type=int, default=5, help="runs of each way, after a warm-up")
    add("--bodies", type=int, nargs="+", choices=sorted(COUNTS), default=[1024, 100], help="sizes in bytes")
    add("--scale", type=float, default=1.0, help="rows, as a share of 1 M of 1 KiB and 2 M of 100 B")
    add("--queues", type=int, default=4, help="queues of a topic, to which messages are sent in turn")
    options = parser.parse_args()
    unknown = set(options.series) - set(SERIES)
    if unknown:
        parser.error(f"series {min(unknown)!r} is unknown; known: {' '.join(SERIES)}")
    options.series = options.series or SERIES
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the brokers are ended as well
    with tempfile.TemporaryDirectory(prefix="martlet-spark-") as folder:
        bench = Bench(Path(folder), options)
        try:
            for name in options.series:
                bench.run(name)
        finally:
            bench.close()


if __name__ == "__main__":
    main()
