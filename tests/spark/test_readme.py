"""The program for Spark in the README runs as it stands."""

import re
import shlex
from pathlib import Path
from runpy import run_path

import pytest
from pyspark.sql import SparkSession
from tests.spark.conftest import Topic

from martlet.cli.main import main

README = Path(__file__).parents[2] / "README.md"

pytestmark = pytest.mark.spark


def test_the_readme_reads_a_topic(
    spark: SparkSession, topic: Topic, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"^```python\n([^`]*pyspark[^`]*)^```$", README.read_text(), re.MULTILINE)
    topic.send(2)
    script = tmp_path / "readme.py"
    script.write_text(program.replace("127.0.0.1:9876", topic.endpoints).replace("Greetings", topic.name))
    run_path(str(script))
    shown = capfd.readouterr().out
    assert all(body.decode() in shown for body in topic.bodies)


def test_the_pipelines_of_the_readme_run(
    spark: SparkSession, topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = re.findall(r"^venv/bin/martlet (pipeline .*)$", README.read_text(), re.MULTILINE)
    assert len(lines) == 2
    monkeypatch.chdir(tmp_path)
    topic.send(2)
    for line in lines:  # a path is absolute here, because the running JVM stays in its own directory
        line = line.replace("Greetings", topic.name).replace("--to archive", f"--to {tmp_path}/archive")
        assert main([*shlex.split(line), "-n", topic.endpoints]) == 0
    assert topic.name in (tmp_path / "greetings.html").read_text()
    assert spark.read.parquet(str(tmp_path / "archive")).count() == 2
