"""The pipelines' examples do what they say."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from pyspark.sql import SparkSession

from martlet_spark.pipelines.archive import Archive, archive

from .conftest import Topic
from .java_options import pipeline_settings

pytestmark = pytest.mark.spark

EXAMPLES = Path(__file__).parents[2] / "examples" / "spark"
PAGE = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()


def run(name: str, *arguments: Any) -> None:
    """Run the function `main` of an example."""
    assert f"examples/spark/{name}.py" in PAGE
    spec = importlib.util.spec_from_file_location(f"spark_example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(*arguments)


def test_archive(spark: SparkSession, topic: Topic, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topic.send(12)
    run("archive", spark, topic.endpoints, topic.name, str(tmp_path / "archive"))
    assert "archived 12 messages; 0 came meanwhile" in capsys.readouterr().out


def test_replay(spark: SparkSession, topic: Topic, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topic.send(12)
    copy, path = Topic(topic.endpoints), str(tmp_path / "archive")
    archive(spark, topic.options, Archive(path))
    run("replay", spark, topic.endpoints, path, copy.name, str(tmp_path / "replay"))
    assert "replayed 12 messages" in capsys.readouterr().out
    assert spark.read.format("martlet").options(**copy.options).load().count() == 12


def test_stats(spark: SparkSession, topic: Topic, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topic.send(12, tags="red")
    run("stats", spark, topic.endpoints, topic.name, str(tmp_path / "page.html"))
    assert "|red|" in capsys.readouterr().out
    assert topic.name in (tmp_path / "page.html").read_text()


def test_the_declarative_pipelines(topic: Topic, tmp_path: Path) -> None:
    topic.send(10, tags="red")
    shutil.copytree(EXAMPLES / "pipelines", tmp_path / "pipelines")
    spec = tmp_path / "pipelines" / "spark-pipeline.yml"
    text = spec.read_text().replace("127.0.0.1:9876", topic.endpoints).replace("Orders", topic.name)
    spec.write_text(text.replace("file:///tmp/orders-pipeline", (tmp_path / "storage").as_uri()))
    command = Path(pyspark.__file__).parent / "bin" / "spark-pipelines"
    words = [str(command), "run", "--spec", str(spec), "--remote", "local[2]"]
    words += pipeline_settings(str(tmp_path / "warehouse"))
    # SPARK_TESTING lets the server choose its port.
    environment = {**os.environ, "SPARK_TESTING": "1", "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    archived = pa.concat_tables(map(pq.read_table, (tmp_path / "warehouse" / "archive").rglob("*.parquet")))
    assert sorted(archived["body"].to_pylist()) == sorted(topic.bodies)
    stats = pa.concat_tables(map(pq.read_table, (tmp_path / "warehouse" / "stats").rglob("*.parquet")))
    assert sum(stats["messages"].to_pylist()) == 10
    assert set(stats["tag"].to_pylist()) == {"red"}
