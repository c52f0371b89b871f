"""Replays: each message once, in the order of its queue, with its origin."""

import json
import re
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.client.patient import patient

from martlet.cli.main import main
from martlet_client import ReceivedMessage
from martlet_client.blocking import PullConsumer
from martlet_spark.errors import OptionError, PipelineError
from martlet_spark.pipelines.archive import Archive, archive
from martlet_spark.pipelines.replay import Replay, replay

from .conftest import Topic
from .pipeline_process import pipeline, wait_for_batches

pytestmark = pytest.mark.spark


def stored(topic: Topic) -> list[ReceivedMessage]:
    with PullConsumer(patient(topic.endpoints), "spark-replays") as consumer:
        return [message for queue in consumer.queues(topic.name) for message in consumer.read(queue)]


@pytest.fixture
def copy(endpoints: str) -> Topic:
    """An empty topic."""
    return Topic(endpoints)


def cluster(topic: Topic) -> dict[str, str]:
    return {"endpoints": topic.endpoints}


def test_a_replay_of_an_archive_continues_and_keeps_the_origin(
    spark: SparkSession, topic: Topic, copy: Topic, tmp_path: Path
) -> None:
    topic.send(40, tags="red", keys="k")
    path, plan = str(tmp_path / "archive"), Replay(copy.name, str(tmp_path / "replay"))
    for count in (40, 10):
        archive(spark, topic.options, Archive(path))
        assert replay(spark, path, cluster(topic), plan).messages == count
        if count == 40:
            topic.send(10, tags="red", keys="k")
    found = stored(copy)
    assert sorted(message.body for message in found) == sorted(topic.bodies)
    assert {(message.tags, tuple(message.keys)) for message in found} == {("red", ("k",))}
    origins = [(m.properties["ORIGIN_QUEUE"], int(m.properties["ORIGIN_OFFSET"])) for m in found]
    assert len(set(origins)) == 50
    assert {message.properties["ORIGIN_TOPIC"] for message in found} == {topic.name}
    # All have one key, so they are in one queue, where each origin's are in order.
    for queue in "0123":
        own = [offset for origin, offset in origins if origin == queue]
        assert own == sorted(own)


@pytest.mark.parametrize("kind", ["delta", "s3", "s3-delta"])
def test_an_archive_that_spark_cannot_read_is_replayed(
    spark: SparkSession, topic: Topic, copy: Topic, bucket: str, tmp_path: Path, kind: str
) -> None:
    path = f"{bucket}/{topic.name}" if "s3" in kind else str(tmp_path / "archive")
    target = Archive(path, "delta" if "delta" in kind else "parquet", str(tmp_path / "checkpoint"))
    plan = Replay(copy.name, str(tmp_path / "replay"), where="offset < 11", rate=1000 if kind == "s3" else 0)
    for total in (40, 48):
        topic.send(total - len(topic.bodies), keys="k")
        archive(spark, topic.options, target)
        report = replay(spark, path, cluster(topic), plan)
    assert (report.messages, report.counted["sent"]) == (8, 4)  # offsets 10 and 11 of each queue
    found = stored(copy)
    assert sorted(message.body for message in found) == sorted(topic.bodies[:44])
    assert {message.properties["ORIGIN_TOPIC"] for message in found} == {topic.name}


def test_an_archive_is_replayed_whole_at_a_rate_when_a_condition_skips_files(
    spark: SparkSession, topic: Topic, copy: Topic, tmp_path: Path
) -> None:
    """Spark reads no file of topics that a condition leaves out, and yet others may follow."""
    other, path = Topic(topic.endpoints), str(tmp_path / "archive")
    topic.send(8)
    other.send(8)
    source = {**topic.options, "subscribe": f"{topic.name},{other.name}"}
    for _ in range(2):
        archive(spark, source, Archive(path))
        other.send(8)
    plan = Replay(copy.name, str(tmp_path / "replay"), where=f"topic = '{other.name}'", rate=1000)
    replay(spark, path, cluster(topic), plan)
    assert sorted(message.body for message in stored(copy)) == sorted(other.bodies[:16])


def test_a_replay_that_is_killed_continues(
    spark: SparkSession, topic: Topic, copy: Topic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic.send(400)
    words = ["pipeline", "replay", topic.name, "-n", topic.endpoints, "--to", copy.name]
    words += ["--checkpoint", str(tmp_path / "replay"), "--batch-bytes"]
    with pipeline([*words, "4k"], tmp_path) as process:
        wait_for_batches(tmp_path / "replay", 2)
        process.kill()
    assert main([*words, "1m", "--json"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["sent"] < 400
    assert sorted(message.body for message in stored(copy)) == sorted(topic.bodies)


def test_a_checkpoint_is_of_one_selection(
    spark: SparkSession, topic: Topic, copy: Topic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic.send(8)
    words = ["pipeline", "replay", topic.name, "-n", topic.endpoints, "--to", copy.name]
    words += ["--checkpoint", str(tmp_path / "replay")]
    assert main([*words, "--where", "offset = 0", "--until", "2100-01-01"]) == 0
    assert "messages 8, sent 4, batches 1" in capsys.readouterr().out
    assert main([*words, "--where", "offset = 1", "--until", "2100-01-01"]) == 2
    text = f"checkpoint '{tmp_path / 'replay'}' belongs to a replay with where 'offset = 0'; give the same, or another"
    assert text in capsys.readouterr().err


def test_a_topic_is_replayed_by_condition_at_a_rate(
    spark: SparkSession, topic: Topic, copy: Topic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic.send(30)
    words = ["pipeline", "replay", topic.name, "-n", topic.endpoints, "--to", copy.name, "--rate", "10"]
    words += ["--checkpoint", str(tmp_path / "replay"), "--sql", "number BETWEEN 1 AND 25", "--where", "offset < 6"]
    assert main([*words, "--from", "2020-01-01"]) == 0
    text = rf"replayed to {copy.name}: messages 25, sent 23, batches [2-9]"  # one would have 20 offsets at most
    assert re.match(text, capsys.readouterr().out)
    assert sorted(message.body for message in stored(copy)) == sorted(topic.bodies[1:24])


def test_a_replay_selects_by_the_time_of_storing(
    spark: SparkSession, topic: Topic, copy: Topic, tmp_path: Path
) -> None:
    ends = []
    for _ in range(3):
        topic.send(8)
        ends.append(max(message.store_ms for message in stored(topic)))
        while time.time() * 1000 < ends[-1] + 1:
            pass
    from_ms, until_ms = ends[0] + 1, ends[1] + 1
    expected = sorted(message.body for message in stored(topic) if from_ms <= message.store_ms < until_ms)
    assert 0 < len(expected) <= 8
    path = str(tmp_path / "archive")
    archive(spark, topic.options, Archive(path))
    sources: list[dict[str, str] | str] = [topic.options, path]
    for number, source in enumerate(sources):
        target = Topic(copy.endpoints) if number else copy
        plan = Replay(target.name, str(tmp_path / f"replay{number}"), from_ms=from_ms, until_ms=until_ms)
        replay(spark, source, cluster(topic), plan)
        assert sorted(message.body for message in stored(target)) == expected


def test_a_replay_begins_where_the_options_say(spark: SparkSession, topic: Topic, copy: Topic, tmp_path: Path) -> None:
    topic.send(8)
    start = {"startingOffsets": json.dumps({topic.name: dict.fromkeys("0123", 1)}), "pollMs": "200"}
    plan = Replay(copy.name, str(tmp_path / "replay"))
    replay(spark, {**topic.options, **start}, cluster(topic), plan)
    assert sorted(message.body for message in stored(copy)) == sorted(topic.bodies[4:])
    with pytest.raises(OptionError, match="belongs to a replay with no tags; give the same, or another checkpoint"):
        replay(spark, {**topic.options, **start, "tags": "red"}, cluster(topic), plan)


def test_a_replay_that_cannot_run_says_why(
    spark: SparkSession, topic: Topic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic.send(1)
    with pytest.raises(OptionError, match="needs a topic to write to and a checkpoint"):
        replay(spark, topic.options, cluster(topic), Replay("", "x"))
    for selection in ({"subscribe": f"B,{topic.name}"}, {"subscribePattern": f"{topic.name}.*"}):
        for until_ms in (0, 4102444800000):
            plan = Replay(topic.name, str(tmp_path / "self"), until_ms=until_ms)
            with pytest.raises(OptionError, match="is replayed to itself, so each run would send again what the last"):
                replay(spark, {**cluster(topic), **selection}, cluster(topic), plan)
    with pytest.raises(PipelineError, match="nonsense"):
        replay(spark, topic.options, cluster(topic), Replay("A", str(tmp_path / "c"), where="nonsense = 1"))
    words = ["pipeline", "replay", "--to", "A", "--checkpoint", "c", "-n", topic.endpoints]
    assert main(words) == 2
    assert "give topics, --pattern or --archive, one of them" in capsys.readouterr().err
    assert main([*words, "--archive", "x", "--sql", "a = 1"]) == 2
    assert "--sql is for topics; use --where for an archive" in capsys.readouterr().err
    assert main([*words, "--archive", str(tmp_path)]) == 1
    assert f"{str(tmp_path)!r} is not an archive; give the path that" in capsys.readouterr().err
