"""Spark Connect and Declarative Pipelines, each with a JVM of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest

from .conftest import Topic
from .java_options import pipeline_settings
from .test_sink import stored

pytestmark = pytest.mark.spark

PROGRAM = Path(__file__).parent / "connect_client.py"
# SPARK_TESTING lets the Connect server choose its port.
ENVIRONMENT = {"SPARK_TESTING": "1", "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}


def run(*words: str | Path, folder: Path) -> str:
    """Run a command in *folder*; return what it writes to its standard output."""
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env={**os.environ, **ENVIRONMENT})
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def test_a_connect_client_reads_and_writes_batches_and_streams_and_sees_lags(topic: Topic, tmp_path: Path) -> None:
    topic.send(8, tags="red")
    topic.send(12, tags="blue")
    copy = Topic(topic.endpoints)
    out = run(sys.executable, PROGRAM, topic.endpoints, topic.name, copy.name, folder=tmp_path)
    found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert found.pop("kind").startswith("pyspark.sql.connect")
    assert "option 'colums' does not exist; did you mean 'columns'?" in found.pop("error")
    assert found == {"batch": 5, "view": 8, "stream": 20, "lag": [4, 0]}
    assert sorted(message.body for message in stored(copy.endpoints, copy.name)) == sorted(topic.bodies * 2)


SPEC = """\
name: orders
storage: {storage}
libraries:
  - glob:
      include: transformations/**
"""
TABLE = """\
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()


@dp.table
def orders():
    options = {options!r}
    return spark.readStream.format("martlet").options(**options).load()


dp.create_sink("copy", "martlet", {sink!r})


@dp.append_flow(target="copy")
def copied():
    return spark.readStream.format("martlet").options(**{options!r}).load().select("body")
"""


@pytest.mark.full  # the example pipelines run each time
def test_a_declarative_pipeline_reads_a_topic_into_a_table_and_a_topic(topic: Topic, tmp_path: Path) -> None:
    copy = Topic(topic.endpoints)
    sink = {"endpoints": copy.endpoints, "topic": copy.name}
    topic.send(10)
    (tmp_path / "transformations").mkdir()
    options = {**topic.options, "startingOffsets": "earliest", "columns": "offset,body"}
    (tmp_path / "transformations" / "orders.py").write_text(TABLE.format(options=options, sink=sink))
    spec = tmp_path / "spark-pipeline.yml"
    spec.write_text(SPEC.format(storage=(tmp_path / "storage").as_uri()))
    command = Path(pyspark.__file__).parent / "bin" / "spark-pipelines"
    settings = pipeline_settings(f"{tmp_path}/warehouse")
    out = run(command, "run", "--spec", spec, "--remote", "local[2]", *settings, folder=tmp_path)
    assert "Run is COMPLETED" in out
    files = (tmp_path / "warehouse" / "orders").glob("*.parquet")
    bodies = [body for file in files for body in pq.read_table(file).column("body").to_pylist()]
    assert sorted(bodies) == sorted(topic.bodies)
    assert sorted(message.body for message in stored(copy.endpoints, copy.name)) == sorted(topic.bodies)
