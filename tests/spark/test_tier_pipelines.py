"""Pipelines and streams read the cold tier's table, with the broker that wrote it stopped, and each message once."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.client.patient import patient
from tests.tiered.cold import Tier, now_ms
from tests.tiered.histories import DAY_MS, HOST, History, make_history

from martlet.cli.main import main
from martlet.message import Message as StoredMessage
from martlet.message import encode_properties
from martlet.records.codec import encode_record
from martlet_client.blocking import PullConsumer
from martlet_spark.errors import OptionError
from martlet_spark.source import MartletDataSource

from .conftest import Topic
from .test_tiers import broker, owned, place, replace_files, send_odd, stored, tier, written

__all__ = ["broker", "tier"]


@pytest.fixture
def history(tmp_path: Path) -> History:
    return make_history(tmp_path / "cold")


def report(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Run a pipeline, which must work; return what it reports."""
    assert main(["pipeline", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def bodies(topic: Topic) -> Counter[bytes]:
    with PullConsumer(patient(topic.endpoints), "tier-copies") as consumer:
        return Counter(message.body for queue in consumer.queues(topic.name) for message in consumer.read(queue))


@pytest.mark.spark
def test_stats_count_the_table(history: History, spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "stats", "Orders", "Bills", "--tier", place(history), "--window", "1d")
    rows = {row["topic"]: row for row in found["rows"]}
    assert {topic: row["messages"] for topic, row in rows.items()} == {"Orders": 1500, "Bills": 1500}
    assert rows["Orders"]["bytes"] == sum(len(each.body) for each in history.of("Orders"))
    assert main(["pipeline", "stats", "Orders", "--tier", place(history), "--group", "g"]) == 2
    assert "--group needs brokers" in capsys.readouterr().err


@pytest.mark.spark
def test_a_replay_of_the_table_continues_after_its_files_were_replaced(
    history: History, topic: Topic, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", "Orders", "--tier", place(history), "--to", topic.name, "-n", topic.endpoints]
    words += ["--checkpoint", str(tmp_path / "checkpoint"), "--batch-bytes", "100k", "--guarantee", "at-least-once"]
    assert report(capsys, *words)["messages"] == 1500
    assert bodies(topic) == Counter(each.body for each in history.of("Orders"))
    replace_files(history)
    assert report(capsys, *words)["messages"] == 0
    assert bodies(topic).total() == 1500


@pytest.mark.spark
def test_a_tier_is_an_archive_of_all_topics(
    history: History, topic: Topic, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", "--archive", history.url, "--to", topic.name, "-n", topic.endpoints]
    words += ["--checkpoint", str(tmp_path / "checkpoint"), "--where", "offset < 10"]
    assert main(["pipeline", *words]) == 2
    assert "is replayed to itself" in capsys.readouterr().err
    assert report(capsys, *words, "--until", str(DAY_MS + 100))["sent"] == 80
    wanted = Counter(each.body for each in history.messages if each.record.queue_offset < 10)
    assert bodies(topic) == wanted
    assert main(["pipeline", *words, "--tier", place(history)]) == 2
    assert "--archive and --tier both say where to read" in capsys.readouterr().err


@pytest.mark.spark
def test_dead_letters_of_the_table_are_counted_and_sent_again(
    topic: Topic, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier, data = Tier(str(tmp_path / "cold")), []
    for number in range(5):
        properties = encode_properties({"RETRY_TOPIC": topic.name, "UNIQ_KEY": f"{number:032X}", "error": "full"})
        message = StoredMessage("%DLQ%billing", b"letter %d" % number, properties, 0)
        data.append(bytes(encode_record(message, 0, number, number * 1000, DAY_MS, HOST)))
    written(tier, {"dlq": data}, owned(tier), 0, 10_000)
    words = ["dead-letter", "billing", "--tier", tier.url, "-n", topic.endpoints]
    [cause] = report(capsys, *words, "--by", "error")["causes"]
    assert (cause["origin_topic"], cause["way"], cause["error"], cause["letters"]) == (topic.name, "retries", "full", 5)
    words += ["--resend", "--checkpoint", str(tmp_path / "checkpoint")]
    report(capsys, *words)
    report(capsys, *words)
    assert bodies(topic) == Counter(b"letter %d" % number for number in range(5))


def test_a_stream_reads_its_backlog_from_the_table_and_then_the_broker(broker: tuple[str, Any], tier: Tier) -> None:
    topic = Topic(broker[0])
    send_odd(topic)
    stored(topic, tier, 50)
    given = {"startingOffsets": "earliest", "pollMs": "0", "undecodableBody": "raw", "tierUrl": tier.url}
    source = MartletDataSource({**topic.options, **given})
    reader: Any = source.streamReader(source.schema())
    offset, found, kinds = reader.initialOffset(), [], []
    for _ in range(3):
        end = json.loads(json.dumps(reader.latestOffset(offset, ReadAllAvailable())))
        partitions = reader.partitions(offset, end)
        kinds.append({each.rows is not None for partition in partitions for each in partition.ranges})
        for partition in partitions:
            for batch in reader.read(partition):
                found += list(zip(*(batch.column(name).to_pylist() for name in ("queue", "offset")), strict=True))
        offset = end
        topic.send(8)
    reader.stop()
    assert True in kinds[0]
    assert kinds[2] == {False}
    assert sorted(found) == sorted(set(found))
    assert len(found) == 60 + 45 + 1 + 16


def test_a_stream_of_the_table_alone_refuses_what_needs_brokers(history: History) -> None:
    source = MartletDataSource(
        {"tier": "cold", "tierUrl": place(history), "subscribe": "Orders", "group": "g", "pollMs": "0"}
    )
    with pytest.raises(OptionError, match="option group needs brokers, and tier is cold"):
        source.streamReader(source.schema())


def test_a_stream_of_the_table_alone_gives_new_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("martlet_spark.read.cold_stream.LOOK_S", 0)
    tier = Tier(str(tmp_path / "cold"))
    table = owned(tier)

    def upload(first: int, count: int) -> None:
        message = StoredMessage("Orders", b"x", b"", 0)
        data = [
            bytes(encode_record(message, 0, first + each, (first + each) * 1000, now_ms(), HOST))
            for each in range(count)
        ]
        written(tier, {"topic": data}, table, first * 1000, (first + count) * 1000)

    upload(0, 5)
    given = {"tier": "cold", "tierUrl": tier.url, "subscribe": "Orders", "pollMs": "0", "maxOffsetsPerTrigger": "4"}
    source = MartletDataSource(given)
    reader: Any = source.streamReader(source.schema())
    offset, batches = reader.initialOffset(), []
    for number in range(5):
        end = json.loads(json.dumps(reader.latestOffset(offset, reader.getDefaultReadLimit())))
        rows = [
            batch.column("offset").to_pylist() for each in reader.partitions(offset, end) for batch in reader.read(each)
        ]
        batches.append([each for batch in rows for each in batch])
        offset = end
        if number == 2:
            upload(5, 3)
    assert batches == [[0, 1, 2, 3], [4], [], [5, 6, 7], []]
