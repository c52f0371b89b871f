"""A Spark session, and the processor time of its JVM and its Python workers."""

import os
import sys
from pathlib import Path

from benchmarks.brokers import TICKS
from benchmarks.spark.kafka import jars
from benchmarks.spark.paths import PullsSource, TuplesSource
from pyspark.sql import SparkSession

__all__ = ["Spark"]

ROOT = Path(__file__).resolve().parents[2]


class Spark:
    """A session with two threads, with the sources of `paths`, and with Kafka's if *kafka*."""

    def __init__(self, folder: Path, *, kafka: bool = False) -> None:
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ["PYTHONPATH"] = str(ROOT)  # workers import benchmarks.spark.paths
        settings = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "2g",
            "spark.driver.extraJavaOptions": f"-Dderby.system.home={folder}/derby",
            "spark.local.dir": str(folder / "local"),
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.session.timeZone": "UTC",
            "spark.python.unix.domain.socket.enabled": "true",
        }
        if kafka:
            settings["spark.jars"] = ",".join(map(str, jars("source")))
        builder = SparkSession.builder.master("local[2]").appName("martlet-benchmarks")
        for name, value in settings.items():
            builder = builder.config(name, value)
        self.session = builder.getOrCreate()
        self.session.sparkContext.setLogLevel("ERROR")
        self.session.dataSource.register(PullsSource)
        self.session.dataSource.register(TuplesSource)
        self._pid = self.session.sparkContext._gateway.proc.pid

    def cpu_s(self) -> tuple[float, float]:
        """Return the processor seconds so far of the JVM and of its Python workers, also of those that ended."""
        times, parents = {}, {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:  # it ended meanwhile
                    continue
                parents[int(entry.name)] = int(fields[1])
                times[int(entry.name)] = [int(field) / TICKS for field in fields[11:15]]
        workers = {pid for pid in parents if pid != self._pid and self._pid in _ancestors(pid, parents)}
        ended = sum(times[self._pid][2:])
        return sum(times[self._pid][:2]), ended + sum(sum(times[pid]) for pid in workers)

    def close(self) -> None:
        self.session.stop()


def _ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    found = []
    while pid in parents:
        pid = parents[pid]
        found.append(pid)
    return found
