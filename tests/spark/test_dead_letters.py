"""Dead letters of a group: by cause, and exported."""

import json
from pathlib import Path
from uuid import uuid4

import pytest
import trio
from pyspark.sql import SparkSession
from tests.client.patient import PATIENCE_S, patient
from tests.giving_up import give_up

from martlet.cli.main import main
from martlet_client import Admin, Message, PullConsumer, ReceivedMessage
from martlet_client.blocking import Producer
from martlet_client.blocking import PullConsumer as BlockingConsumer
from martlet_spark.errors import OptionError
from martlet_spark.pipelines.dead_letters import causes, read_dead_letters

from .conftest import Topic
from .test_pipeline_examples import run as run_example

pytestmark = pytest.mark.spark


async def give_up_all(endpoints: str, group: str, topic: str) -> None:
    """Let *group* give up every message of *topic*."""
    async with Admin(patient(endpoints)) as admin, PullConsumer(patient(endpoints), group) as consumer:
        for queue in await consumer.queues(topic):
            async for message in consumer.read(queue):
                await give_up(admin, group, topic, message)


@pytest.fixture
def group(topic: Topic) -> str:
    """A group with the dead letters of two topics: 6 for "disk full", 3 for "no route", 2 with a tag."""
    group, other = f"billing-{uuid4().hex[:8]}", Topic(topic.endpoints)
    with Producer(patient(topic.endpoints), "spark-tests", send_timeout_s=PATIENCE_S) as producer:
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


def resent(topic: Topic) -> list[ReceivedMessage]:
    """What *topic* has of resent letters."""
    with BlockingConsumer(patient(topic.endpoints), "spark-resent") as consumer:
        found = [message for queue in consumer.queues(topic.name) for message in consumer.read(queue)]
    return [message for message in found if "ORIGIN_TOPIC" in message.properties]


def test_dead_letters_are_resent_once(
    topic: Topic, group: str, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "pipeline",
        "dead-letter",
        group,
        "-n",
        topic.endpoints,
        "--resend",
        "--checkpoint",
        str(tmp_path / "sent"),
    ]
    words += ["--where", f"origin_topic = '{topic.name}' AND properties['error'] = 'no route'", "--from", "2020-01-01"]
    for expected in (3, 0):
        assert main([*words, "--dry-run", "--json"]) == 0
        unsent = [{"topic": topic.name, "letters": expected}] if expected else []
        assert json.loads(capsys.readouterr().out) == {"unsent": unsent}
        assert main([*words, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["sent"], report["left_out"]) == (expected, 0)
    found = resent(topic)
    assert sorted(message.body for message in found) == [b"order 2", b"order 5", b"order 8"]
    assert {message.properties["ORIGIN_TOPIC"] for message in found} == {f"%DLQ%{group}"}
    assert {(*message.keys, message.properties["error"]) for message in found} == {
        (f"k{number}", "no route") for number in (2, 5, 8)
    }
    assert {message.reconsume_times for message in found} == {0}
    assert not {"RETRY_TOPIC", "DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID"} & {
        name for message in found for name in message.properties
    }
    assert main([*words[:-2], "--dry-run"]) == 2
    assert "belongs to a resend with from '15778" in capsys.readouterr().err


def test_letters_without_an_origin_are_left_out_and_said(
    topic: Topic, group: str, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Producer(patient(topic.endpoints), "spark-tests", send_timeout_s=PATIENCE_S) as producer:
        producer.send(Message(f"%DLQ%{group}", b"by hand"))
    words = ["pipeline", "dead-letter", group, "-n", topic.endpoints, "--resend", "--checkpoint"]
    assert main([*words, str(tmp_path / "one")]) == 1
    shown = capsys.readouterr()
    assert "messages 12, sent 11, left out 1, " in shown.out
    assert "1 letter has no property with the original topic, and was left out; resend such letters with" in shown.err
    assert main([*words, str(tmp_path / "two"), "--topic", topic.name, "--where", "origin_topic IS NULL"]) == 0
    assert [message.body for message in resent(topic) if b"hand" in message.body] == [b"by hand"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--resend"], "--resend needs --checkpoint, a directory that lasts; with it a letter is sent only once"),
        (["--resend", "--checkpoint", "c", "--by", "x"], "give it without --by and --export"),
        (["--dry-run"], "--dry-run is for --resend; give both, or none"),
    ],
)
def test_options_of_a_resend_are_checked(capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    assert main(["pipeline", "dead-letter", "billing", *words]) == 2
    assert text in capsys.readouterr().err


def test_the_example(
    spark: SparkSession, topic: Topic, group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("dead_letters", spark, topic.endpoints, group, str(tmp_path / "letters"), str(tmp_path / "resent"))
    shown = capsys.readouterr().out
    assert "|retries|" in shown
    assert "resent 11 of 11 letters" in shown
    assert spark.read.parquet(str(tmp_path / "letters")).count() == 11


def test_a_group_without_dead_letters_is_an_error(
    spark: SparkSession, endpoints: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "dead-letter", "nobody", "-n", endpoints]) == 1
    assert "topic '%DLQ%nobody' is unknown to name server" in capsys.readouterr().err
    with pytest.raises(OptionError, match="the group is empty"):
        read_dead_letters(spark, {"endpoints": endpoints}, "")
