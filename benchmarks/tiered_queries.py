"""Queries of old messages: from the cold tier's table directly, and through the broker that has moved them there.

    python benchmarks/tiered_queries.py [MIB] [--spark]

Writes a log of MIB (default 120) with JSON bodies of about 1 KiB in 8 topics with 4 queues. A broker uploads it and
removes it from its log, as far as whole segments go. Then `read_arrow` reads one topic after the other, with 3 columns
(queue, offset, key), the 6 default ones and all 13: through the broker (`hot`) and from the table (`cold`). With
--spark, a session of two threads reads all topics, too, to noop: `hot`, `cold`, and Spark's own reader of the files of
the table. Rows per second of time, and microseconds of processor time for a row, of the reader and of the broker; the
best of three runs each.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tiered
import trio
from brokers import TICKS, Martlet

from martlet.store import StoreConfig
from martlet_client.blocking import Admin
from martlet_columns.schema import COLUMNS
from martlet_spark import configure, read_arrow

RUNS = 3
SEGMENT_BYTES = 4 << 20
TOPICS = [f"Orders-{number}" for number in range(8)]
KINDS = {"3": "queue,offset,key", "6": "topic,queue,offset,key,store_ts,body", "13": ",".join(COLUMNS)}
# Segments of 4 MiB, and each but the last is removed once the tier has it.
SETTINGS = (
    *(f"store.segment_bytes={SEGMENT_BYTES}", "store.page_bytes=65536", "store.disk_used_ratio_max=0.0"),
    *("store.disk_clean_ratio=0.0", "store.disk_full_ratio=1.0", "store.retention_interval_ms=100"),
    *("tiered.range_ms=10000", 'plugins.enabled=["remoting","nameserver","tiered"]'),
)


def processor_s(pid: int) -> float:
    """Return the processor time of process *pid* and of those that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def measure(name: str, rows: int, work: Callable[[], int], broker: int, readers: Callable[[], float]) -> None:
    best: tuple[float, float, float] | None = None
    for _ in range(RUNS):
        begin, own, its = time.monotonic(), readers(), processor_s(broker)
        count = work()
        found = time.monotonic() - begin, readers() - own, processor_s(broker) - its
        assert count == rows, f"{name}: {count} rows instead of {rows}"
        best = min(best or found, found)
    assert best is not None
    wall, reader_s, broker_s = best
    us = (1_000_000 * each / rows for each in (reader_s, broker_s))
    print(f"{name:24} {rows / wall:10,.0f} rows/s {next(us):8.2f} us reader {next(us):8.2f} us broker", flush=True)


def wait_moved(data: Path, end: int) -> None:
    """Wait until the log begins near its *end*."""
    log = data / "store/commitlog"
    while min(int(path.name) for path in log.iterdir()) < end - (12 << 20):
        time.sleep(0.2)


def arrow(kind: str, columns: str, **place: object) -> int:
    count = 0
    for topic in TOPICS:
        given = {"columns": columns, "tier": kind, **place}
        servers = str(given.pop("endpoints"))
        count += sum(batch.num_rows for batch in read_arrow(servers, topic, **given))
    return count


def spark_rows(broker: Martlet, url: str, rows: int) -> None:
    """Measure Spark: the same rows through both readers, and through its own reader of Parquet files."""
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session = configure(builder).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    options = {"endpoints": broker.name_server, "subscribe": ",".join(TOPICS), "tierUrl": url}

    def children() -> float:
        me = str(os.getpid())
        parents = {path.name: path for path in Path("/proc").iterdir() if path.name.isdecimal()}
        known = {me}
        for _ in range(6):
            for pid in parents:
                try:
                    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                except OSError:
                    continue
                if parent in known and pid != str(broker.process.pid):
                    known.add(pid)
        return sum(processor_s(int(pid)) for pid in known if Path(f"/proc/{pid}/stat").exists())

    def own(kind: str, columns: str) -> int:
        frame = session.read.format("martlet").options(**options, tier=kind, columns=columns).load()
        frame.write.format("noop").mode("append").save()
        return rows

    def files(columns: str) -> int:
        found = DeltaTable(f"{url}/table").file_uris(file_pruning_predicate=[("kind", "=", "topic")])
        names = [name for name in columns.split(",") if name not in ("date", "kind")]
        frame = session.read.option("basePath", f"{url}/table").parquet(*found)
        frame.where("topic LIKE 'Orders-%'").select(*names).write.format("noop").mode("append").save()
        return rows

    for number, columns in KINDS.items():
        for kind in ("hot", "cold"):
            measure(f"Spark {kind} {number}", rows, lambda: own(kind, columns), broker.process.pid, children)  # noqa: B023
        measure(f"Spark Parquet {number}", rows, lambda: files(columns), broker.process.pid, children)  # noqa: B023
    session.stop()


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    mib = int(words[0]) if words else 120
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "store").mkdir()
        tiered.CONFIG = StoreConfig(flush="async", segment_bytes=SEGMENT_BYTES, page_bytes=65536)
        count = trio.run(tiered.write_log, root / "store", mib, 1024)
        url = str(root / "tier")
        broker = Martlet(root, "async", sys.executable, None, (*SETTINGS, f"tiered.url={url}"))
        try:
            with Admin(broker.name_server) as admin:
                for topic in TOPICS:
                    admin.create_topic(topic, queues=4)
            wait_moved(root, mib << 20)
            while arrow("cold", "offset", endpoints="", tierUrl=url) < count:
                time.sleep(0.5)
            print(f"{count:,} messages, load {os.getloadavg()[0]:.1f}")
            for number, columns in KINDS.items():
                for kind in ("hot", "cold"):
                    server = broker.name_server if kind == "hot" else ""
                    place = {"endpoints": server, "tierUrl": url}
                    measure(
                        f"read_arrow {kind} {number}",
                        count,
                        lambda: arrow(kind, columns, **place),  # noqa: B023
                        broker.process.pid,
                        time.process_time,
                    )
            if "--spark" in sys.argv:
                spark_rows(broker, url, count)
        finally:
            broker.close()


if __name__ == "__main__":
    main()
