"""Replays: each message once, in the order of its queue, with its origin."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from martlet.cli.main import main
from martlet_remoting.client import ReceivedMessage
from martlet_remoting.client.blocking import PullConsumer
from martlet_spark.errors import OptionError, PipelineError
from martlet_spark.pipelines.archive import Archive, archive
from martlet_spark.pipelines.replay import Replay, replay

from .conftest import Topic

pytestmark = pytest.mark.spark


def stored(topic: Topic) -> list[ReceivedMessage]:
    with PullConsumer(topic.endpoints, "spark-replays") as consumer:
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


def test_a_topic_is_replayed_by_condition_at_a_rate(
    spark: SparkSession, topic: Topic, copy: Topic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic.send(30)
    words = ["pipeline", "replay", topic.name, "-n", topic.endpoints, "--to", copy.name, "--rate", "10"]
    words += ["--checkpoint", str(tmp_path / "replay"), "--sql", "number BETWEEN 1 AND 25", "--where", "offset < 6"]
    assert main([*words, "--from", "2020-01-01"]) == 0
    assert capsys.readouterr().out.startswith(f"replayed to {copy.name}: messages ")
    assert sorted(message.body for message in stored(copy)) == sorted(topic.bodies[1:24])


def test_a_replay_that_cannot_run_says_why(
    spark: SparkSession, topic: Topic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic.send(1)
    with pytest.raises(OptionError, match="needs a topic to write to and a checkpoint"):
        replay(spark, topic.options, cluster(topic), Replay("", "x"))
    with pytest.raises(PipelineError, match="nonsense"):
        replay(spark, topic.options, cluster(topic), Replay("A", str(tmp_path / "c"), where="nonsense = 1"))
    words = ["pipeline", "replay", "--to", "A", "--checkpoint", "c", "-n", topic.endpoints]
    assert main(words) == 2
    assert "give topics, --pattern or --archive, one of them" in capsys.readouterr().err
    assert main([*words, "--archive", "x", "--sql", "a = 1"]) == 2
    assert "--sql is for topics; use --where for an archive" in capsys.readouterr().err
