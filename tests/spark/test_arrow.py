"""Topics as Arrow record batches, without Spark."""

import datetime
import gc
import subprocess
import sys
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest

from martlet_columns.schema import COLUMNS, arrow_schema
from martlet_spark import read_arrow
from martlet_spark.connection import CONNECTIONS
from martlet_spark.errors import OptionError, ReadError

from .clusters import Cluster, Messages
from .conftest import Topic


def read(topic: Topic, **options: object) -> Any:
    return read_arrow(topic.endpoints, topic.name, **options)


def bodies(reader: Any) -> list[bytes]:
    return sorted(reader.read_all().column("body").to_pylist())


def test_all_messages_come_with_their_columns(topic: Topic) -> None:
    topic.send(100, tags="blue", keys="k1 k2")
    table = read(topic, columns=list(COLUMNS)).read_all()
    assert table.schema == arrow_schema(tuple(COLUMNS))
    assert sorted(table.column("body").to_pylist()) == sorted(topic.bodies)
    for queue in range(4):
        of_queue = table.filter(pa.compute.equal(table.column("queue"), queue))
        assert of_queue.column("offset").to_pylist() == list(range(25))
    row = table.slice(0, 1).to_pylist()[0]
    assert (row["topic"], row["broker"], row["key"], row["tag"]) == (topic.name, "martlet", "k1 k2", "blue")
    assert row["born_ts"] <= row["store_ts"]


def test_a_topic_without_messages_has_the_schema_alone(topic: Topic) -> None:
    reader = read(topic)
    assert reader.schema == arrow_schema(("topic", "queue", "offset", "key", "store_ts", "body"))
    assert reader.read_all().num_rows == 0


def test_filters_and_bounds(topic: Topic) -> None:
    topic.send(6, tags="red", keys="a")
    topic.send(6, tags="blue", keys="b c")
    assert bodies(read(topic, tags="blue || green")) == sorted(topic.bodies[6:])
    assert bodies(read(topic, key="c")) == sorted(topic.bodies[6:])
    assert bodies(read(topic, sql="number BETWEEN 3 AND 8")) == sorted(topic.bodies[3:9])
    starts: dict[str, object] = {topic.name: {"0": 2, "1": -1, "2": -1, "3": -1}}
    assert bodies(read(topic, startingOffsets=starts)) == topic.bodies[8:9]
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    assert len(bodies(read(topic, endingTimestamp=later))) == 12
    options: dict[str, object] = {"startingTimestamp": later, "startingOffsetsByTimestampStrategy": "latest"}
    assert bodies(read(topic, **options)) == []


def test_polars_and_duckdb_take_the_reader(topic: Topic) -> None:
    topic.send(40)
    frame = pl.from_arrow(read(topic))
    assert isinstance(frame, pl.DataFrame)
    assert sorted(frame["body"]) == sorted(topic.bodies)
    reader = read(topic, columns=["queue", "body"])
    found = duckdb.from_arrow(reader).aggregate("queue, count(*) AS messages", "queue").order("queue").fetchall()
    assert found == [(queue, 10) for queue in range(4)]


def test_topics_of_several_brokers(pair: Cluster, shared: Messages) -> None:
    shared.send(3)
    table = read_arrow(pair.endpoints, [shared.name], columns=["broker", "body"]).read_all()
    assert sorted(table.column("body").to_pylist()) == sorted(shared.bodies)
    assert sorted(set(table.column("broker").to_pylist())) == ["a", "b"]


def test_a_reader_that_is_not_read_to_its_end_leaves_no_connection(topic: Topic) -> None:
    topic.send(40)
    before = sum(map(len, CONNECTIONS._idle.values()))
    reader = read(topic, fetchBytes=1)
    assert reader.read_next_batch().num_rows > 0
    reader.close()
    del reader
    gc.collect()
    assert sum(map(len, CONNECTIONS._idle.values())) <= before + 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"colums": "body"}, "option 'colums' does not exist; did you mean 'columns'"),
        ({"columns": ["bodi"]}, "column 'bodi' does not exist; did you mean 'body'"),
        ({"minPartitions": 2}, "option minPartitions is one of batches that are read; leave it out"),
        ({"fetchBytes": 1.5}, "1.5 is no value of an option"),
        ({"maxOffsetsPerTrigger": 5}, "option maxOffsetsPerTrigger is one of streams that are read"),
    ],
)
def test_wrong_options_are_named(topic: Topic, options: dict[str, object], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        read(topic, **options)


def test_a_topic_that_does_not_exist_and_a_server_that_does_not_answer(endpoints: str) -> None:
    with pytest.raises(ReadError, match="topic 'no-such-topic' is unknown to name server"):
        read_arrow(endpoints, "no-such-topic", timeoutMs=1)
    with pytest.raises(ReadError, match=r"127\.0\.0\.1:1\b"):
        read_arrow("127.0.0.1:1", "T", timeoutMs=1)


def test_it_needs_no_spark(topic: Topic) -> None:
    topic.send(8)
    program = f"""
import sys
from martlet_spark import read_arrow
print(read_arrow({topic.endpoints!r}, {topic.name!r}).read_all().num_rows, "pyspark" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "8 False\n"
