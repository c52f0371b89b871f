"""Bodies that their producers call compressed and that are not: brokers store them as they do all others."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from martlet.cli.main import main
from martlet.records.compression import COMPRESSED
from martlet_spark.errors import ReadError
from martlet_spark.pipelines.archive import Archive, archive
from martlet_spark.pipelines.stats import message_stats
from martlet_spark.source import MartletDataSource

from .conftest import Topic
from .test_sink import stored

WRONG = b"not compressed at all"


@pytest.fixture
def mixed(topic: Topic) -> Topic:
    """A topic with a message that cannot be decompressed between others."""
    topic.send(2, queues=(0,))
    topic.send_raw(WRONG, COMPRESSED)
    topic.send(2, queues=(0,))
    return topic


def read(topic: Topic, **options: str) -> list[Mapping[str, Any]]:
    source = MartletDataSource({**topic.options, **options})
    reader = source.reader(source.schema())
    batches: list[Any] = [batch for each in reader.partitions() for batch in reader.read(each)]
    return [row for batch in batches for row in batch.to_pylist()]


def test_a_query_reads_such_a_message_as_it_says(mixed: Topic, caplog: pytest.LogCaptureFixture) -> None:
    text = r"message 2 of queue 0 .* has a body that cannot be decompressed: ZLIB body of 21 bytes is damaged"
    with pytest.raises(ReadError, match=f"{text}.*; set the option undecodableBody to null or raw"):
        read(mixed)
    assert [row["offset"] for row in read(mixed, columns="offset,key,msg_id,properties")] == [0, 1, 2, 3, 4]
    for options, expected in (
        ({"failOnDataLoss": "false"}, None),
        ({"undecodableBody": "null"}, None),
        ({"undecodableBody": "raw", "failOnDataLoss": "false"}, WRONG),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "martlet.spark"):
            bodies = [row["body"] for row in read(mixed, **options)]
        assert bodies == [*mixed.bodies[:2], expected, *mixed.bodies[2:]]
        what = "null" if expected is None else "as they are stored"
        assert f"bodies that cannot be decompressed are {what}: 1; the first: message 2 of queue 0" in caplog.text
    with pytest.raises(ReadError, match="cannot be decompressed"):
        read(mixed, undecodableBody="error", failOnDataLoss="false")


@pytest.mark.spark
def test_pipelines_keep_such_a_message_and_count_it(
    spark: SparkSession, mixed: Topic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = archive(spark, mixed.options, Archive(str(tmp_path / "archive")))
    assert report.fields()["messages"] == 5
    assert report.fields()["undecoded"] == 1
    assert archive(spark, mixed.options, Archive(str(tmp_path / "archive"))).fields().get("undecoded") is None
    kept = spark.read.parquet(str(tmp_path / "archive")).where("properties['COMPRESSED_BODY'] = 'ZLIB'").collect()
    assert [(row.offset, bytes(row.body)) for row in kept] == [(2, WRONG)]
    (row,) = message_stats(spark, mixed.options, 1 << 40).collect()
    assert (row.messages, row.bytes) == (5, sum(map(len, [*mixed.bodies, WRONG])))
    copy = Topic(mixed.endpoints)
    words = ["pipeline", "replay", mixed.name, "-n", mixed.endpoints, "--to", copy.name]
    assert main([*words, "--checkpoint", str(tmp_path / "replay"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["sent"], said["undecoded"]) == (5, 1)
    found = {message.body: message.properties.get("COMPRESSED_BODY") for message in stored(copy.endpoints, copy.name)}
    assert found == {**dict.fromkeys(mixed.bodies), WRONG: "ZLIB"}
