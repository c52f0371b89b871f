"""`LagListener` and `configure` in Spark."""

import json
import os
import queue
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import martlet_spark
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark import Lag, LagListener, configure
from martlet_spark.session import SETTINGS

from .conftest import Topic

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"


def progress(*sources: tuple[str | None, str | None]) -> Any:
    """A progress whose sources are at these latest and end offsets."""
    found = [SimpleNamespace(latestOffset=latest, endOffset=end) for latest, end in sources]
    return SimpleNamespace(progress=SimpleNamespace(id="q", name="totals", batchId=7, sources=found))


def offset(**queues: int) -> str:
    return json.dumps({"v": 1, "t": {"T": {f"b/{name[1:]}": value for name, value in queues.items()}}})


QUEUES = [MessageQueue("T", "b", number) for number in range(3)]


@pytest.mark.parametrize(
    ("sources", "lags"),
    [
        ([(offset(q0=10, q1=5), offset(q0=3, q1=5))], {QUEUES[0]: 7, QUEUES[1]: 0}),
        ([(offset(q0=10, q2=9), offset(q0=10))], {QUEUES[0]: 0}),  # a queue that the query has not begun to read
        ([(offset(q0=10), offset(q0=12))], {QUEUES[0]: 0}),  # a batch that is planned again
        ([(offset(q0=9), offset(q0=4)), (offset(q0=9), offset(q0=2))], {QUEUES[0]: 7}),
        ([(None, None), ("null", "5"), ('{"logs": {"0": 3}}', '{"logs": {"0": 1}}'), ("x", "y")], None),
    ],
)
def test_the_lag_is_what_the_query_has_still_to_read(
    sources: list[tuple[str | None, str | None]], lags: dict[MessageQueue, int] | None
) -> None:
    reported: list[Lag] = []
    listener = LagListener(reported.append)
    listener.onQueryProgress(progress(*sources))
    if lags is None:
        assert not reported
        assert not listener.lags
        return
    assert reported == [listener.lags["q"]] == [Lag("q", "totals", 7, lags)]
    assert reported[0].total == sum(lags.values())
    gone: Any = SimpleNamespace(id="q")
    listener.onQueryTerminated(gone)
    assert not listener.lags


@contextmanager
def listening(spark: SparkSession) -> Iterator["queue.SimpleQueue[Lag]"]:
    """The lags that a listener of *spark* reports."""
    lags: queue.SimpleQueue[Lag] = queue.SimpleQueue()
    listener = LagListener(lags.put)
    spark.streams.addListener(listener)
    try:
        yield lags
    finally:
        spark.streams.removeListener(listener)


def start(spark: SparkSession, topic: Topic, directory: Path) -> StreamingQuery:
    """Start a query that reads two messages of *topic* a micro-batch, to its end."""
    options = {**topic.options, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "2"}
    stream = spark.readStream.format("martlet").options(**options).load()
    return (
        stream.writeStream.format("noop")
        .queryName("totals")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )


@pytest.mark.spark
def test_spark_reports_the_lag_of_each_micro_batch(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    topic.send(6, queues=(0, 1))
    with listening(spark) as lags:
        query = start(spark, topic, tmp_path)
        query.awaitTermination()
        found = [lags.get(timeout=240) for _ in range(3)]
    assert [(lag.query_id, lag.query_name, lag.batch_id, lag.total) for lag in found] == [
        (query.id, "totals", 0, 4),
        (query.id, "totals", 1, 2),
        (query.id, "totals", 2, 0),
    ]
    assert {each.queue_id: lag for each, lag in found[0].queues.items()} == {0: 2, 1: 2, 2: 0, 3: 0}


@pytest.mark.spark
def test_the_example_of_the_page_shows_lags(
    spark: SparkSession, topic: Topic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = re.search(r"^## Lag$.*?^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert example is not None
    topic.send(4)
    added: list[LagListener] = []
    script = tmp_path / "example.py"
    script.write_text(example[1])
    run_path(str(script), {"spark": SimpleNamespace(streams=SimpleNamespace(addListener=added.append))})
    (listener,) = added
    spark.streams.addListener(listener)
    with listening(spark) as lags:  # it is called after the listener of the example
        start(spark, topic, tmp_path).awaitTermination()
        while lags.get(timeout=240).total:
            pass
    spark.streams.removeListener(listener)
    assert "totals: 2 messages behind" in capsys.readouterr().out


def test_configure_sets_what_the_source_needs() -> None:
    builder = configure(SparkSession.Builder())
    assert builder._options == SETTINGS == {"spark.python.unix.domain.socket.enabled": "true"}
    assert configure(builder) is builder


@pytest.mark.parametrize(
    ("master", "before", "after"),
    [
        ("", None, sys.executable),
        ("local[2]", None, sys.executable),
        ("local-cluster[2,1,1024]", "/other/python", "/other/python"),
        ("spark://127.0.0.1:7077", None, None),
        ("yarn", "/other/python", "/other/python"),
    ],
)
def test_local_workers_use_the_python_of_the_program(
    monkeypatch: pytest.MonkeyPatch, master: str, before: str | None, after: str | None
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", before or "")
    if before is None:
        monkeypatch.delenv("PYSPARK_PYTHON")
    configure(SparkSession.Builder().master(master) if master else SparkSession.Builder())
    assert os.environ.get("PYSPARK_PYTHON") == after


@pytest.mark.parametrize(
    ("name", "value"),
    [("PYSPARK_GATEWAY_PORT", "4711"), ("PYSPARK_SUBMIT_ARGS", "--master yarn pyspark-shell"), ("SPARK_CONF_DIR", "")],
)
def test_workers_of_a_cluster_that_spark_names_use_their_own_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str
) -> None:
    (tmp_path / "spark-defaults.conf").write_text("# spark.master local\nspark.master  spark://127.0.0.1:7077\n")
    monkeypatch.setenv("PYSPARK_PYTHON", "")
    monkeypatch.delenv("PYSPARK_PYTHON")
    monkeypatch.setenv(name, value or str(tmp_path))
    configure(SparkSession.Builder())
    assert "PYSPARK_PYTHON" not in os.environ


@pytest.mark.spark
def test_the_session_of_these_tests_is_configured(spark: SparkSession) -> None:
    assert {name: spark.conf.get(name) for name in SETTINGS} == SETTINGS


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="module 'martlet_spark' has no attribute 'Nothing'"):
        martlet_spark.Nothing  # noqa: B018
