"""A streaming query on two executor JVMs, which loses a part of itself in each of its first five batches.

Started as a program, ``chaos_query.py FOLDER ENDPOINTS TOPIC TARGET COPY``, which the test starts until it ends well.
Then it runs pipelines on the same executors: an archive of *TARGET*, its replay to *COPY*, and statistics.
The source and the sink are the real ones: what is here hands their calls on, and kills processes in between. A kill
leaves a mark in *FOLDER*, so that it happens once.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from martlet_remoting.wire.codes import RequestCode
from martlet_spark.pipelines.archive import Archive, archive
from martlet_spark.pipelines.replay import Replay, replay
from martlet_spark.pipelines.stats import message_stats, per_topic
from martlet_spark.source import MartletDataSource
from martlet_spark.write import staging
from martlet_spark.write.runs import ask

# In which batch each process is killed.
READER: Final = 0
EXECUTOR: Final = 1
WRITER: Final = 2
DRIVER_BEFORE_COMMIT: Final = 3
DRIVER_AFTER_COMMIT: Final = 4
KILLS: Final = ("reader", "executor", "writer", "driver before its commit", "driver after its commit")

BATCH: Final = "streaming.sql.batchId"


def once(folder: str, batch: int, kill: int) -> bool:
    """Whether *kill* is due in *batch* and has not happened."""
    if batch != kill:
        return False
    try:
        os.close(os.open(f"{folder}/killed-{kill}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def kill_java() -> None:
    """Kill the JVM that started this Python worker: the executor, or the driver where it plans and commits."""
    pid = os.getpid()
    while Path(f"/proc/{pid}/comm").read_text().strip() != "java":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)
    os._exit(1)


def batch_of_task() -> int:
    context = TaskContext.get()
    assert context is not None
    return int(context.getLocalProperty(BATCH) or -1)


class ChaosReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Martlet's reader, whose process, or whose executor, dies after the first rows."""

    def __init__(self, inner: Any, folder: str) -> None:
        self._inner = inner
        self._folder = folder

    def initialOffset(self) -> dict[str, Any]:
        found: dict[str, Any] = self._inner.initialOffset()
        return found

    def prepareForTriggerAvailableNow(self) -> None:
        self._inner.prepareForTriggerAvailableNow()

    def getDefaultReadLimit(self) -> ReadLimit:
        found: ReadLimit = self._inner.getDefaultReadLimit()
        return found

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        found: dict[str, Any] = self._inner.latestOffset(start, limit)
        return found

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        found: Sequence[InputPartition] = self._inner.partitions(start, end)
        return found

    def read(self, partition: InputPartition) -> Iterator[Any]:
        for rows in self._inner.read(partition):
            yield rows
            if once(self._folder, batch_of_task(), READER):
                os._exit(1)
            if once(self._folder, batch_of_task(), EXECUTOR):
                kill_java()


class ChaosWriter(DataSourceStreamArrowWriter):
    """A sink's writer, whose process dies after it has written, and whose driver dies before and after its commit.

    A commit is the first one of several brokers: before it, the others are prepared, and after it, they have to follow.
    """

    def __init__(self, inner: Any, folder: str) -> None:
        self._inner = inner
        self._folder = folder

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        message: WriterCommitMessage = self._inner.write(iterator)
        if once(self._folder, batch_of_task(), WRITER):
            os._exit(1)
        return message

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        asked: list[int] = []

        def ask_or_die(cluster: Any, queue: Any, code: int, *more: Any) -> Any:
            is_due = code == RequestCode.COMMIT_EXTERNAL_TRANSACTION and asked
            if is_due and once(self._folder, batchId, DRIVER_BEFORE_COMMIT):
                kill_java()
            answer = ask(cluster, queue, code, *more)
            if is_due and once(self._folder, batchId, DRIVER_AFTER_COMMIT):
                kill_java()
            asked.append(code)
            return answer

        with patch.object(staging, "ask", ask_or_die):
            self._inner.commit(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._inner.abort(messages, batchId)


class Chaos(DataSource):
    """Martlet's source and its sink, each with kills."""

    OWN = ("folder", "path")

    @classmethod
    def name(cls) -> str:
        return "chaos"

    def _others(self) -> dict[str, str]:
        return {name: text for name, text in self.options.items() if name.lower() not in self.OWN}

    def schema(self) -> StructType:
        return MartletDataSource(self._others()).schema()

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return ChaosReader(MartletDataSource(self._others()).streamReader(schema), self.options["folder"])

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        inner = MartletDataSource(self._others()).streamWriter(schema, overwrite)
        return ChaosWriter(inner, self.options["folder"])


def session(folder: str) -> SparkSession:
    builder = SparkSession.builder.master("local-cluster[2,1,1024]").appName("martlet-chaos")
    quick = os.environ["SPARK_SUBMIT_OPTS"]  # as each JVM of a test has them
    for name, value in {
        "spark.executor.memory": "1024m",  # as much as the cluster's workers have
        "spark.pyspark.python": sys.executable,
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": quick,
        "spark.executor.extraJavaOptions": quick,
        "spark.local.dir": f"{folder}/local",
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
        "spark.sql.shuffle.partitions": "2",
        # To compile a small query takes longer than to run it.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.python.unix.domain.socket.enabled": "true",
    }.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def run_pipelines(spark: SparkSession, folder: str, endpoints: str, topic: str, copy: str) -> None:
    """Archive *topic*, replay the archive to *copy*, count both topics, and write these four numbers to *folder*.

    Tasks write and read the files of a Delta table themselves, in processes of executors.
    """
    cluster, table = {"endpoints": endpoints}, Archive(f"{folder}/archive", "delta")
    source = {**cluster, "subscribe": topic}
    found = {"archived": archive(spark, source, table).messages}
    found["replayed"] = replay(spark, table.path, cluster, Replay(copy, f"{folder}/replay")).counted["sent"]
    stats = message_stats(spark, {**cluster, "subscribe": f"{topic},{copy}"}, 86_400)
    for row in per_topic(stats).collect():  # one a day
        found[row.topic] = found.get(row.topic, 0) + row.messages
    Path(folder, "pipelines.json").write_text(json.dumps(found))


def main(folder: str, endpoints: str, topic: str, target: str, copy: str) -> None:
    spark = session(folder)
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(Chaos)
    options = {"endpoints": endpoints, "subscribe": topic, "startingOffsets": "earliest", "columns": "body"}
    limits = {"maxOffsetsPerTrigger": "150", "minPartitions": "2", "folder": folder}
    rows = spark.readStream.format("chaos").options(**options, **limits).load()
    query = (
        rows.writeStream.format("chaos")
        .options(endpoints=endpoints, topic=target, guarantee="exactly-once", batchBytes="300")
        .options(folder=folder, checkpointLocation=f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    run_pipelines(spark, folder, endpoints, target, copy)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
