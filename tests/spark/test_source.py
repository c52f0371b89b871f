"""The source in Spark: batches, streams and SQL on a running broker."""

import time
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from martlet_columns.schema import COLUMNS

from .conftest import Topic

pytestmark = pytest.mark.spark


def batch(spark: SparkSession, topic: Topic, **options: str) -> DataFrame:
    return spark.read.format("martlet").options(**{**topic.options, **options}).load()


def bodies(frame: DataFrame) -> list[bytes]:
    return sorted(bytes(row.body) for row in frame.select("body").collect())


def test_a_batch_has_every_message_and_column(spark: SparkSession, topic: Topic) -> None:
    topic.send(100, tags="blue", keys="k1 k2")
    frame = batch(spark, topic, columns=",".join(COLUMNS))
    assert bodies(frame) == sorted(topic.bodies)
    row = frame.where("properties['number'] = '17'").collect()[0]
    assert (row.topic, row.broker, row.queue, row.offset) == (topic.name, "martlet", 1, 4)
    assert (row.key, row.tag, row.flag, row.reconsume_times) == ("k1 k2", "blue", 0, 0)
    assert row.properties["UNIQ_KEY"] == row.msg_id
    assert row.born_ts <= row.store_ts


def test_a_batch_without_messages_is_empty(spark: SparkSession, topic: Topic) -> None:
    assert bodies(batch(spark, topic)) == []


def test_a_user_schema_selects_columns(spark: SparkSession, topic: Topic) -> None:
    topic.send(4)
    frame = spark.read.format("martlet").options(**topic.options).schema("offset bigint, body binary").load()
    assert frame.columns == ["offset", "body"]
    assert bodies(frame) == sorted(topic.bodies)
    wrong = spark.read.format("martlet").options(**topic.options).schema("body string").load()
    with pytest.raises(PySparkException, match="column 'body' has the type string in the schema; it is binary"):
        wrong.collect()


def test_a_frame_can_be_filtered_in_any_order(spark: SparkSession, topic: Topic) -> None:
    """Spark 4.3.0 shares a pushed filter between all frames of one load, so this source offers it none."""
    topic.send(20)
    for setting in ("false", "true"):
        spark.conf.set("spark.sql.python.filterPushdown.enabled", setting)
        frame = batch(spark, topic)
        assert frame.where("queue = 1").count() == 5
        assert frame.count() == 20
        both = frame.where("queue = 1").union(frame.where("queue = 2"))
        assert sorted(row.queue for row in both.collect()) == [1] * 5 + [2] * 5
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_filters_of_the_broker(spark: SparkSession, topic: Topic) -> None:
    topic.send(6, tags="red", keys="a")
    topic.send(6, tags="blue", keys="b c")
    assert bodies(batch(spark, topic, tags="blue || green")) == sorted(topic.bodies[6:])
    assert bodies(batch(spark, topic, key="c")) == sorted(topic.bodies[6:])
    assert bodies(batch(spark, topic, sql="number BETWEEN 3 AND 8")) == sorted(topic.bodies[3:9])
    assert bodies(batch(spark, topic, sql="number > 3", tags="red", columns="body")) == sorted(topic.bodies[4:6])
    with pytest.raises(PySparkException, match="SUBSCRIPTION_PARSE_FAILED"):
        batch(spark, topic, sql="number >").collect()


def next_ms(now_ms: int) -> int:
    """Wait until the clock is past *now_ms*, and return its time."""
    while (found := time.time_ns() // 1_000_000) <= now_ms:
        pass
    return found


def a_time_of_its_own() -> int:
    """A time in ms that is after everything so far and before everything that follows."""
    found = next_ms(time.time_ns() // 1_000_000)
    next_ms(found)
    return found


def test_a_range_of_offsets_and_of_times(spark: SparkSession, topic: Topic) -> None:
    topic.send(8)
    between_ms = a_time_of_its_own()
    topic.send(8)
    start = f'{{"{topic.name}": {{"0": 1, "1": -2, "2": -1, "martlet/3": 2}}}}'
    assert len(bodies(batch(spark, topic, startingOffsets=start))) == 3 + 4 + 0 + 2
    end = f'{{"{topic.name}": {{"0": 1, "1": 1, "2": -1, "3": 0}}}}'
    assert len(bodies(batch(spark, topic, endingOffsets=end))) == 1 + 1 + 4 + 0
    assert bodies(batch(spark, topic, startingTimestamp=str(between_ms))) == sorted(topic.bodies[8:])
    assert bodies(batch(spark, topic, endingTimestamp=str(between_ms))) == sorted(topic.bodies[:8])
    with pytest.raises(PySparkException, match="lacks queue"):
        batch(spark, topic, startingOffsets=f'{{"{topic.name}": {{"0": 1}}}}').collect()
    with pytest.raises(PySparkException, match="has offset 99 of queue"):
        batch(spark, topic, startingOffsets=start.replace("2}", "99}")).collect()
    with pytest.raises(PySparkException, match="startingOffsetsByTimestampStrategy to latest"):
        batch(spark, topic, startingTimestamp="99999999999999").collect()


def test_partitions_are_as_many_as_asked_for(spark: SparkSession, topic: Topic) -> None:
    topic.send(20)
    assert batch(spark, topic).rdd.getNumPartitions() == 1
    for options, count in (({"minPartitions": "6"}, 6), ({"maxRecordsPerPartition": "3"}, 7)):
        frame = batch(spark, topic, **options)
        assert frame.rdd.getNumPartitions() == count
        assert bodies(frame) == sorted(topic.bodies)


def test_sql_reads_a_temporary_view(spark: SparkSession, topic: Topic) -> None:
    topic.send(5)
    spark.sql(
        f"CREATE TEMPORARY VIEW orders USING martlet "
        f"OPTIONS (endpoints '{topic.endpoints}', subscribe '{topic.name}', columns 'body,offset')"
    )
    assert spark.sql("SELECT count(*) AS n FROM orders").collect()[0].n == 5
    spark.sql("DROP VIEW orders")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"subscibe": "x"}, "option 'subscibe' does not exist; did you mean 'subscribe'?"),
        ({"subscribe": "nobody-made-it"}, "topic 'nobody-made-it' is unknown to name server"),
        ({"endpoints": "127.0.0.1:1", "timeoutMs": "0"}, "no name server of 127.0.0.1:1 answered"),
    ],
)
def test_a_query_that_cannot_run_says_why(
    spark: SparkSession, topic: Topic, options: dict[str, str], text: str
) -> None:
    with pytest.raises(PySparkException) as caught:
        batch(spark, topic, **options).collect()
    assert text in str(caught.value)


class Sink:
    """Collects the batches of a streaming query."""

    def __init__(self, spark: SparkSession, topic: Topic, directory: Path) -> None:
        self._spark = spark
        self._topic = topic
        self._checkpoint = str(directory / "checkpoint")
        self.batches: dict[int, list[bytes]] = {}

    def run(self, fail_at: int = -1, **options: str) -> None:
        """Read what is available now; raise in the sink of batch *fail_at* after it has stored it."""

        def store(frame: DataFrame, number: int) -> None:
            self.batches[number] = bodies(frame)
            if number == fail_at:
                raise ValueError("the sink fails")

        stream = self._spark.readStream.format("martlet").options(**{**self._topic.options, **options}).load()
        query = (
            stream.writeStream.foreachBatch(store)
            .option("checkpointLocation", self._checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    @property
    def bodies(self) -> list[bytes]:
        return sorted(body for batch in self.batches.values() for body in batch)


def test_a_stream_continues_after_a_restart(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    sink = Sink(spark, topic, tmp_path)
    topic.send(20)
    sink.run(startingOffsets="earliest", maxOffsetsPerTrigger="8")
    assert [len(found) for found in sink.batches.values()] == [8, 8, 4]
    topic.send(20)
    sink.run(startingOffsets="earliest")
    assert sink.bodies == sorted(topic.bodies)


def test_streams_of_one_topic_are_joined_with_themselves_and_with_a_batch(
    spark: SparkSession, topic: Topic, tmp_path: Path
) -> None:
    """Each has all messages, also where a function reads a batch twice."""
    topic.send(12)
    keys = ["topic", "queue", "offset"]
    stream, other = (
        spark.readStream.format("martlet").options(**topic.options, startingOffsets="earliest").load() for _ in "12"
    )
    known = batch(spark, topic, columns=",".join(keys))
    rows = stream.join(other.select(keys), keys).select(stream.columns).union(stream).join(known, keys)
    found: list[tuple[int, list[bytes]]] = []
    query = rows.writeStream.foreachBatch(lambda frame, _: found.append((frame.count(), bodies(frame))))
    query.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start().awaitTermination()
    assert found == [(24, sorted(topic.bodies * 2))]


@pytest.mark.parametrize("fail_at", [0, 1])
def test_a_batch_that_failed_has_the_same_messages_again(
    spark: SparkSession, topic: Topic, tmp_path: Path, fail_at: int
) -> None:
    sink = Sink(spark, topic, tmp_path)
    topic.send(16)
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "8"}
    with pytest.raises(PySparkException, match="the sink fails"):
        sink.run(fail_at, **options)
    first = dict(sink.batches)
    topic.send(16)
    sink.run(-1, **options)
    assert {number: sink.batches[number] for number in first} == first
    assert sink.bodies == sorted(topic.bodies)


def test_a_stream_that_begins_at_the_end_loses_nothing_in_a_crash(
    spark: SparkSession, topic: Topic, tmp_path: Path
) -> None:
    topic.send(10)
    sink = Sink(spark, topic, tmp_path)
    with pytest.raises(PySparkException, match="the sink fails"):
        sink.run(fail_at=0, startingOffsets="latest")
    topic.send(10)
    sink.run(startingOffsets="latest")
    assert sink.bodies == sorted(topic.bodies[10:])


def test_the_checkpoint_of_another_source_is_refused(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    topic.send(4)
    sink = Sink(spark, topic, tmp_path)
    sink.run(startingOffsets="earliest")
    other = Topic(topic.endpoints)
    other.send(4)
    foreign = Sink(spark, other, tmp_path)
    text = f"of topic '{topic.name}', which the options do not select: it is the checkpoint of another query, or they"
    with pytest.raises(PySparkException, match=text):
        foreign.run(startingOffsets="earliest")


def test_progress_tells_how_far_the_query_is_behind(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    topic.send(8)
    query = (
        spark.readStream.format("martlet")
        .options(**topic.options, startingOffsets="earliest", maxOffsetsPerTrigger="4")
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    sources = [progress["sources"][0] for progress in query.recentProgress]
    assert [source["numInputRows"] for source in sources if source["numInputRows"]] == [4, 4]
    assert '"martlet/0": 2' in sources[0]["latestOffset"]
