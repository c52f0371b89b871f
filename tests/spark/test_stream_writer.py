"""The streaming writer as Spark calls it, without a JVM: copies of it in tasks, and another one for the commit."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from martlet_spark.errors import WriteError
from martlet_spark.source import MartletDataSource
from martlet_spark.write.sink import BATCH, QUERY, RUN, StreamWriter, WrittenTask
from martlet_spark.write.staging import Staging

from .conftest import Topic
from .test_sink import frame, values


@dataclass
class Task:
    """What Spark says of the task that runs."""

    properties: Mapping[str, str | None] = field(default_factory=dict)
    partition: int = 0

    def get(self) -> "Task":
        return self

    def getLocalProperty(self, name: str) -> str | None:
        return self.properties.get(name)

    def partitionId(self) -> int:
        return self.partition


class Run:
    """A run of the query *topic.name*, which began *began_ms* ms after the others."""

    def __init__(
        self, patched: pytest.MonkeyPatch, topic: Topic, guarantee: str, run: str = "run-1", began_ms: int = 0
    ) -> None:
        self._patched = patched
        self._topic = topic
        self._guarantee = guarantee
        self._run = run
        self._began_ms = began_ms

    def writer(self) -> StreamWriter:
        """A new writer: Spark makes one for each micro-batch, and one more to commit or abort it."""
        given = {"endpoints": self._topic.endpoints, "topic": self._topic.name, "guarantee": self._guarantee}
        schema = StructType([StructField("body", BinaryType())])
        made = MartletDataSource({**given, "checkpointlocation": "/x"}).streamWriter(schema, overwrite=False)
        assert isinstance(made, StreamWriter)
        made._made_ms += self._began_ms
        return made

    def task(self, batch: int, partition: int, *numbers: int) -> WrittenTask:
        """Write *numbers* in a task, with a copy of a new writer; return what the driver gets of it."""
        properties = {QUERY: self._topic.name, BATCH: str(batch), RUN: self._run}
        self._patched.setattr("martlet_spark.write.sink.TaskContext", Task(properties, partition))
        copy: StreamWriter = pickle.loads(pickle.dumps(self.writer()))
        written = pickle.loads(pickle.dumps(copy.write(iter([frame({"body": [b"%d" % each for each in numbers]})]))))
        assert isinstance(written, WrittenTask)
        return written


def test_the_driver_commits_with_nothing_but_the_messages(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, topic, "exactly-once")
    messages = [run.task(0, 0, 1, 2), None, run.task(0, 1, 3)]  # a task that was tried again has none
    assert values(topic) == []
    for _ in range(2):
        run.writer().commit(messages, 0)  # type: ignore[arg-type]
        run.writer().abort(messages, 0)  # type: ignore[arg-type] # as Spark does if the answer of a commit is lost
        assert values(topic) == [1, 2, 3]


def test_an_abort_that_fails_does_not_hide_why_the_query_failed(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(monkeypatch, topic, "exactly-once")
    messages = [run.task(0, 0, 1)]

    def refuse(*_: object) -> None:
        raise WriteError("broker 'a' did not answer")

    monkeypatch.setattr("martlet_spark.write.staging.ask", refuse)
    run.writer().abort(messages, 0)  # type: ignore[arg-type]
    assert "broker 'a' did not answer; brokers drop what was staged later" in caplog.text


def test_a_task_of_an_older_run_cannot_fence_the_newest_one(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has waited somewhere since its driver was replaced, and is the first of its run that asks the broker."""
    older = Run(monkeypatch, topic, "exactly-once", "run-1")
    newer = Run(monkeypatch, topic, "exactly-once", "run-2", began_ms=60_000)
    messages = [newer.task(0, 0, 1)]
    with pytest.raises(WriteError, match="only its newest run can write"):
        older.task(0, 0, 2)
    newer.writer().commit(messages, 0)  # type: ignore[arg-type]
    assert values(topic) == [1]


def test_idempotent_tasks_of_a_batch_write_side_by_side(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, topic, "idempotent")
    for batch in range(2):
        for partition in range(3):
            first = 10 * batch + 3 * partition
            assert run.task(batch, partition, first, first + 1, first + 2) == WrittenTask()
    expected = [*range(9), *range(10, 19)]
    assert values(topic) == expected
    for again in (run, Run(monkeypatch, topic, "idempotent", "run-2", began_ms=60_000)):
        for partition in range(3):  # an attempt after one that was lost, and a batch that runs again
            again.task(1, partition, *range(10 + 3 * partition, 13 + 3 * partition))
    assert values(topic) == expected


def test_of_two_attempts_of_an_idempotent_task_the_one_that_began_last_writes(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark's speculation runs both at once: here the other attempt does all of its work before the first commits."""
    run = Run(monkeypatch, topic, "idempotent")
    finish, left = Staging.finish, [()]

    def finish_late(stage: Staging) -> object:
        if left:
            left.pop()
            run.task(0, 0, 1, 2)
        return finish(stage)

    monkeypatch.setattr(Staging, "finish", finish_late)
    with pytest.raises(WriteError, match="only its newest run can write"):
        run.task(0, 0, 1, 2)
    assert values(topic) == [1, 2]


def test_a_spark_that_does_not_name_the_query_is_refused(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, topic, "exactly-once")
    writer = run.writer()
    monkeypatch.setattr("martlet_spark.write.sink.TaskContext", Task())
    with pytest.raises(WriteError, match="does not say which query runs; set the option guarantee to at-least-once"):
        writer.write(iter([frame({"body": [b"1"]})]))
