"""Checkpoints of replays and resends belong to one selection, also if a run dies at its start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter
from tests.client.patient import PATIENCE_S, patient

from martlet_client.blocking import Admin, Producer
from martlet_client.messages import Message
from martlet_spark.errors import OptionError
from martlet_spark.pipelines.dead_letters import Letters, Resend, resend
from martlet_spark.pipelines.replay import Replay, replay

from .conftest import Topic

pytestmark = pytest.mark.spark

# Runs a pipeline with a condition, and returns how many messages it has sent.
Run: TypeAlias = Callable[[str], int]


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture(params=["replay", "resend"])
def run(request: pytest.FixtureRequest, spark: SparkSession, topic: Topic, tmp_path: Path) -> Run:
    """A pipeline of 4 messages, each in a queue of its own, with the checkpoint ``checkpoint``."""
    cluster, checkpoint = {"endpoints": topic.endpoints}, str(tmp_path / "checkpoint")
    copy = Topic(topic.endpoints)

    def run_replay(where: str) -> int:
        return replay(spark, topic.options, cluster, Replay(copy.name, checkpoint, where)).counted["sent"]

    def run_resend(where: str) -> int:
        return resend(spark, cluster, Letters(copy.name, where), Resend(checkpoint, topic.name)).counted["sent"]

    if request.param == "replay":
        topic.send(4)
        return run_replay
    letters = f"%DLQ%{copy.name}"
    with Admin(patient(topic.endpoints)) as admin, Producer(patient(topic.endpoints), "spark-tests") as producer:
        admin.create_topic(letters, queues=4)
        for queue in producer.queues(letters):
            producer.send(Message(letters, b"letter"), queue=queue, timeout_s=PATIENCE_S)
    return run_resend


def test_a_run_that_dies_once_its_query_has_begun_leaves_its_selection(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = DataStreamWriter.start

    def start_and_die(writer: DataStreamWriter, *given: Any) -> None:
        start(writer, *given).awaitTermination()
        raise Killed

    monkeypatch.setattr(DataStreamWriter, "start", start_and_die)
    with pytest.raises(Killed):
        run("queue = 0")
    monkeypatch.undo()
    with pytest.raises(OptionError, match=r"belongs to a re.* with where 'queue = 0'; give the same, or another"):
        run("queue = 1")
    assert run("queue = 0") == 0
    (tmp_path / "checkpoint" / "martlet.json").unlink()
    with pytest.raises(OptionError, match=r"belongs to another query, or its file martlet\.json was removed; give an"):
        run("queue = 0")


def test_a_run_that_dies_before_its_query_begins_leaves_the_choice(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(DataStreamWriter, "start", die)
    with pytest.raises(Killed):
        run("queue = 0")
    monkeypatch.undo()
    assert run("queue < 3") == 3
