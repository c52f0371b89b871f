"""Dead letters of a group: by cause, and exported."""

import json
from pathlib import Path
from uuid import uuid4

import pytest
import trio
from pyspark.sql import SparkSession
from tests.giving_up import give_up

from martlet.cli.main import main
from martlet_remoting.client import Admin, Message, PullConsumer
from martlet_remoting.client.blocking import Producer
from martlet_spark.errors import OptionError
from martlet_spark.pipelines.dead_letters import causes, read_dead_letters

from .conftest import Topic
from .test_pipeline_examples import run as run_example

pytestmark = pytest.mark.spark


async def give_up_all(endpoints: str, group: str, topic: str) -> None:
    """Let *group* give up every message of *topic*."""
    async with Admin(endpoints) as admin, PullConsumer(endpoints, group) as consumer:
        for queue in await consumer.queues(topic):
            async for message in consumer.read(queue):
                await give_up(admin, group, topic, message)


@pytest.fixture
def group(topic: Topic) -> str:
    """A group with the dead letters of two topics: 6 for "disk full", 3 for "no route", 2 with a tag."""
    group, other = f"billing-{uuid4().hex[:8]}", Topic(topic.endpoints)
    with Producer(topic.endpoints, "spark-tests") as producer:
        for number in range(9):
            error = "no route" if number % 3 == 2 else "disk full"
            producer.send(
                Message(topic.name, f"order {number}".encode(), keys=f"k{number}", properties={"error": error})
            )
    other.send(2, tags="red")
    for name in (topic.name, other.name):
        trio.run(give_up_all, topic.endpoints, group, name)
    return group


def test_dead_letters_are_counted_by_cause(spark: SparkSession, topic: Topic, group: str) -> None:
    letters = read_dead_letters(spark, {"endpoints": topic.endpoints}, group)
    most, least = causes(letters).collect()
    assert (most.origin_topic, most.tag, most.way, most.deliveries, most.letters) == (topic.name, None, "retries", 1, 9)
    assert (least.tag, least.letters) == ("red", 2)
    assert most.first <= most.last
    assert most.example.body.startswith("order ")
    assert most.example.offset < 11
    found = causes(letters, ["error"]).where("origin_topic = '" + topic.name + "'").collect()
    assert [(row.error, row.letters) for row in found] == [("disk full", 6), ("no route", 3)]


def test_dead_letters_are_selected_and_exported(
    topic: Topic, group: str, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["pipeline", "dead-letter", group, "-n", topic.endpoints, "--by", "error"]
    words += ["--where", "properties['error'] = 'no route'", "--export", str(tmp_path / "letters")]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["exported"] == str(tmp_path / "letters")
    assert [(cause["error"], cause["letters"]) for cause in report["causes"]] == [("no route", 3)]
    exported = spark.read.parquet(str(tmp_path / "letters")).collect()
    assert sorted(bytes(row.body) for row in exported) == [b"order 2", b"order 5", b"order 8"]
    assert {row.origin_topic for row in exported} == {topic.name}
    assert main(words) == 1
    assert "PATH_ALREADY_EXISTS" in capsys.readouterr().err


def test_the_example(
    spark: SparkSession, topic: Topic, group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("dead_letters", spark, topic.endpoints, group, str(tmp_path / "letters"))
    assert "|retries|" in capsys.readouterr().out
    assert spark.read.parquet(str(tmp_path / "letters")).count() == 11


def test_a_group_without_dead_letters_is_an_error(
    spark: SparkSession, endpoints: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "dead-letter", "nobody", "-n", endpoints]) == 1
    assert "topic '%DLQ%nobody' is unknown to name server" in capsys.readouterr().err
    with pytest.raises(OptionError, match="the group is empty"):
        read_dead_letters(spark, {"endpoints": endpoints}, "")
