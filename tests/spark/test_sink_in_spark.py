"""The sink in Spark: batches, streams and what fails."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

from martlet_spark.source import MartletDataSource

from .conftest import Topic
from .test_sink import stored, values

pytestmark = pytest.mark.spark


def options(topic: Topic, guarantee: str = "exactly-once", **more: str) -> dict[str, str]:
    return {"endpoints": topic.endpoints, "topic": topic.name, "guarantee": guarantee, **more}


def rows(spark: SparkSession, count: int, columns: Sequence[str] = ("cast(id as string) as body",)) -> DataFrame:
    return spark.range(0, count, 1, 2).selectExpr(*columns)


@pytest.fixture
def empty(endpoints: str) -> Topic:
    return Topic(endpoints)


def stream(spark: SparkSession, source: Topic, sink: Topic, directory: Path, **more: str) -> DataStreamWriter:
    """A stream that copies *source* to *sink*, in batches of 8 messages and two tasks."""
    read = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "8", "minPartitions": "2", "columns": "body,key,tag"}
    frame = spark.readStream.format("martlet").options(**source.options, **read).load()
    writing = frame.writeStream.format(more.pop("format", "martlet")).options(**options(sink, **more))
    return (
        writing.queryName("copy").option("checkpointLocation", str(directory / "checkpoint")).trigger(availableNow=True)
    )


def run(writing: DataStreamWriter) -> list[dict[str, Any]]:
    query = writing.start()
    query.awaitTermination()
    return list(query.recentProgress)


def test_a_batch_is_written(spark: SparkSession, empty: Topic) -> None:
    columns = (
        "cast(id as string) as body",
        "concat('k', id % 7) as key",
        "'blue' as tag",
        "map('n', string(id)) as properties",
    )
    rows(spark, 1000, columns).repartition(4, "key").write.format("martlet").mode("append").options(
        **options(empty)
    ).save()
    found = stored(empty.endpoints, empty.name)
    assert sorted(int(message.body) for message in found) == list(range(1000))
    assert all(message.properties["n"] == message.body.decode() and message.tags == "blue" for message in found)
    assert all(message.keys == (f"k{int(message.body) % 7}",) for message in found)


@pytest.mark.parametrize(
    ("mode", "columns", "text"),
    [
        ("overwrite", ("'x' as body",), "a topic cannot be overwritten; use mode append"),
        ("errorifexists", ("'x' as body",), "UNSUPPORTED_DATA_SOURCE_SAVE_MODE"),
        ("append", ("id as body",), "column 'body' has the type bigint; it must be binary or string"),
        ("append", ("cast(null as string) as body",), "rows have no body"),
    ],
)
def test_a_write_that_cannot_succeed_says_why(
    spark: SparkSession, empty: Topic, mode: str, columns: Sequence[str], text: str
) -> None:
    with pytest.raises(PySparkException) as caught:
        rows(spark, 4, columns).write.format("martlet").mode(mode).options(**options(empty)).save()
    assert text in str(caught.value)
    assert not values(empty)


def test_a_stream_copies_a_topic(spark: SparkSession, topic: Topic, empty: Topic, tmp_path: Path) -> None:
    topic.send(20, tags="red", keys="k")
    assert sum(progress["numInputRows"] for progress in run(stream(spark, topic, empty, tmp_path))) == 20
    found = stored(empty.endpoints, empty.name)
    assert sorted(message.body for message in found) == sorted(topic.bodies)
    assert {(message.tags, message.keys) for message in found} == {("red", ("k",))}


def test_a_stream_cannot_replace_a_topic(spark: SparkSession, empty: Topic, tmp_path: Path) -> None:
    counts = spark.readStream.format("rate").load().groupBy().count().selectExpr("string(count) as body")
    writing = counts.writeStream.format("martlet").options(**options(empty)).outputMode("complete")
    with pytest.raises(PySparkException, match="a topic cannot be overwritten"):
        run(writing.option("checkpointLocation", str(tmp_path)))


def failing(name: str, marker: Path) -> type[MartletDataSource]:
    """Return a source *name* whose sink fails once: in a task, before its commit has an effect, or after it."""

    class Writer(DataSourceStreamArrowWriter):
        def __init__(self, writer: DataSourceStreamArrowWriter) -> None:
            self._writer = writer

        def _fail_once(self, when: str) -> None:
            if name.endswith(when) and not marker.exists():
                marker.touch()
                raise ValueError("the sink fails")

        def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
            message = self._writer.write(iterator)
            self._fail_once("write")
            return message

        def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
            if batchId:
                self._fail_once("before")
            self._writer.commit(messages, batchId)
            if batchId:
                self._fail_once("after")

        def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
            self._writer.abort(messages, batchId)

    class Failing(MartletDataSource):
        @classmethod
        def name(cls) -> str:
            return name

        def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
            return Writer(super().streamWriter(schema, overwrite))

    return Failing


@pytest.mark.parametrize(
    ("when", "guarantee"),
    [("write", "exactly-once"), ("before", "exactly-once"), ("after", "exactly-once"), ("write", "idempotent")],
)
def test_a_query_that_fails_anywhere_writes_each_row_once(
    spark: SparkSession, topic: Topic, empty: Topic, tmp_path: Path, when: str, guarantee: str
) -> None:
    """Rows that a task of an idempotent query has written before the failure are not written again."""
    name = f"failing_{guarantee[0]}_{when}"
    spark.dataSource.register(failing(name, tmp_path / "marker"))
    topic.send(20)
    with pytest.raises(PySparkException, match="the sink fails"):
        run(stream(spark, topic, empty, tmp_path, format=name, guarantee=guarantee))
    topic.send(4)
    run(stream(spark, topic, empty, tmp_path, format=name, guarantee=guarantee))
    assert sorted(message.body for message in stored(empty.endpoints, empty.name)) == sorted(topic.bodies)


def test_guarantees_of_a_batch(spark: SparkSession, empty: Topic) -> None:
    for guarantee in ("exactly-once", "idempotent"):
        rows(spark, 100).write.format("martlet").mode("append").options(**options(empty, guarantee)).save()
    assert values(empty) == sorted([*range(100)] * 2)
    broken = rows(spark, 100, ("if(id < 60, cast(id as string), null) as body",))
    with pytest.raises(PySparkException, match="rows have no body"):
        broken.write.format("martlet").mode("append").options(**options(empty)).save()
    assert len(values(empty)) == 200


def test_results_that_change_are_written_once_within_foreach_batch(
    spark: SparkSession, topic: Topic, empty: Topic, tmp_path: Path
) -> None:
    """Spark's Python writers know no output mode update; a run fails after the write, before Spark notes the batch."""
    topic.send(8)
    frame = spark.readStream.format("martlet").options(**topic.options, startingOffsets="earliest").load()
    counts = frame.groupBy("queue").count().selectExpr("concat(queue, ':', count) AS body")
    with pytest.raises(PySparkException, match="martlet does not support Update mode"):
        run(
            counts.writeStream.format("martlet")
            .options(**options(empty))
            .option("checkpointLocation", str(tmp_path / "update"))
            .outputMode("update")
        )
    failures = [1]

    def write(batch: DataFrame, number: int) -> None:
        numbered = options(empty, txnAppId="counts", txnVersion=str(number))
        batch.write.format("martlet").mode("append").options(**numbered).save()
        if number in failures:
            failures.remove(number)
            raise ValueError("the driver dies")

    writing = counts.writeStream.foreachBatch(write).outputMode("update").trigger(availableNow=True)
    writing = writing.option("checkpointLocation", str(tmp_path / "checkpoint"))
    run(writing)
    topic.send(4)
    with pytest.raises(PySparkException, match="the driver dies"):
        run(writing)
    run(writing)
    bodies = sorted(message.body.decode() for message in stored(empty.endpoints, empty.name))
    assert bodies == sorted(f"{queue}:{count}" for queue in range(4) for count in (2, 3))
