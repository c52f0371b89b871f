"""Archives of topics: every message exactly once, whatever happens to a run."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from martlet.cli.main import main
from martlet_columns.schema import COLUMNS
from martlet_spark.errors import PipelineError
from martlet_spark.pipelines.archive import Archive, archive
from martlet_spark.pipelines.commits import open_commits
from martlet_spark.pipelines.progress import Interrupted
from martlet_spark.pipelines.storage import Location

from .conftest import Topic
from .pipeline_process import pipeline, wait_for_batches

pytestmark = pytest.mark.spark


def read_parquet(spark: SparkSession, target: Archive) -> list[bytes]:
    return sorted(bytes(row.body) for row in spark.read.parquet(target.path).select("body").collect())


def read_listed(spark: SparkSession, target: Archive) -> list[bytes]:
    """Bodies of all Parquet files, of which each must be listed."""
    location = Location.of(target.path)
    filesystem, root = location.open()
    infos = filesystem.get_file_info(pafs.FileSelector(root, recursive=True))
    present = sorted(info.path for info in infos if info.base_name.endswith(".parquet"))
    assert present == sorted(f"{root}/{path}" for path in open_commits(location, "parquet").files())
    tables = [pq.ParquetFile(filesystem.open_input_file(path)).read() for path in present]
    bodies: list[bytes] = pa.concat_tables(tables)["body"].to_pylist()
    return sorted(bodies)


def read_delta(spark: SparkSession, target: Archive) -> list[bytes]:
    location = Location.of(target.path)
    table = DeltaTable(location.path, storage_options=location.delta_options)
    bodies: list[bytes] = table.to_pyarrow_table()["body"].to_pylist()
    return sorted(bodies)


def forget(checkpoint: Path, batch: int) -> None:
    """Undo Spark's note that *batch* ended, as if it had died before."""
    (checkpoint / "commits" / str(batch)).unlink()
    (checkpoint / "commits" / f".{batch}.crc").unlink()


Read = Callable[[SparkSession, Archive], list[bytes]]
KINDS: dict[str, Read] = {"parquet": read_parquet, "s3": read_listed, "s3-delta": read_delta}


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path: Path, topic: Topic) -> tuple[Archive, Read]:
    """An archive with small batches, and what reads its bodies."""
    kind = request.param
    form = "delta" if "delta" in kind else "parquet"
    path = f"{request.getfixturevalue('bucket')}/{topic.name}" if "s3" in kind else str(tmp_path / "archive")
    return Archive(path, form, str(tmp_path / "checkpoint"), batch_bytes=4096), KINDS[kind]


def test_a_batch_that_runs_again_is_archived_once(
    spark: SparkSession, topic: Topic, target: tuple[Archive, Read], tmp_path: Path
) -> None:
    """A run that dies after the commit of its batch, and before Spark notes that."""
    written, read = target
    topic.send(40)
    report = archive(spark, topic.options, written)
    assert (report.messages, report.behind) == (40, 0)
    assert report.batches > 1
    assert read(spark, written) == sorted(topic.bodies)
    forget(tmp_path / "checkpoint", report.batches - 1)
    topic.send(10)
    assert archive(spark, topic.options, written).messages >= 10
    assert read(spark, written) == sorted(topic.bodies)


def test_files_of_a_batch_that_did_not_end_are_removed(
    spark: SparkSession, topic: Topic, bucket: str, tmp_path: Path
) -> None:
    written = Archive(f"{bucket}/{topic.name}", checkpoint=str(tmp_path / "checkpoint"), batch_bytes=4096)
    topic.send(30)
    last = archive(spark, topic.options, written).batches - 1
    filesystem, root = Location.of(written.path).open()
    filesystem.delete_file(f"{root}/_batches/{last:010}.json")
    filesystem.delete_file(f"{root}/_writing/complete")  # as in an archive of an earlier version
    with filesystem.open_output_stream(f"{root}/topic=x/date=2026-01-01/{last:010}-00007.parquet") as stream:
        stream.write(b"of a task that the batch does not have any more")
    forget(tmp_path / "checkpoint", last)
    archive(spark, topic.options, written)
    assert read_listed(spark, written) == sorted(topic.bodies)


@pytest.mark.parametrize("form", ["parquet", "delta"])
def test_an_archive_takes_no_other_checkpoint(
    spark: SparkSession, topic: Topic, bucket: str, tmp_path: Path, form: str
) -> None:
    topic.send(4)
    path = f"{bucket}/{topic.name}" if form == "parquet" else str(tmp_path / "archive")
    archive(spark, topic.options, Archive(path, form, str(tmp_path / "one")))
    with pytest.raises(PipelineError, match="was written with another checkpoint"):
        archive(spark, topic.options, Archive(path, form, str(tmp_path / "two")))
    assert len(open_commits(Location.of(path), form).files()) == 1


def test_an_archive_has_every_column_by_topic_and_day(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    topic.send(8, tags="blue", keys="k1 k2")
    more = {"startingTimestamp": "1", "maxOffsetsPerTrigger": "100", "pollMs": "200", "group": "archives"}
    archive(spark, {**topic.options, **more}, Archive(str(tmp_path), file_bytes=100))
    assert len(list(tmp_path.glob("topic=*/date=*/*.parquet"))) >= 4, "a file has the messages of one task"
    found = spark.read.parquet(str(tmp_path))
    assert sorted(found.columns) == sorted([*COLUMNS, "date"])
    source = spark.read.format("martlet").options(**topic.options, columns=",".join(COLUMNS)).load()
    names = [name for name in COLUMNS if name != "properties"]
    key = "map_entries(properties) AS properties"
    assert (
        found.selectExpr(*(f"`{name}`" for name in names), key)
        .exceptAll(source.selectExpr(*(f"`{name}`" for name in names), key))
        .count()
        == 0
    )
    for row in found.select("date").distinct().collect():  # two, if midnight came in between
        assert list((tmp_path / f"topic={topic.name}" / f"date={row.date}").glob("*.zstd.parquet"))


def test_a_path_is_on_the_default_file_system_of_the_cluster(spark: SparkSession, tmp_path: Path) -> None:
    """Spark would write there, and the note of who writes the archive must be there too."""
    settings = spark._jsc.hadoopConfiguration()
    before = settings.get("fs.defaultFS")
    assert Archive("/a", checkpoint="c").on(spark) == Archive("/a", checkpoint="c")
    settings.set("fs.defaultFS", "hdfs://127.0.0.1:1")
    try:
        found = Archive("/a", checkpoint=f"file://{tmp_path}").on(spark)
        assert found == Archive("hdfs://127.0.0.1:1/a", checkpoint=f"file://{tmp_path}")
        assert Archive("s3://bucket/a", checkpoint="/c").on(spark).checkpoint == "hdfs://127.0.0.1:1/c"
    finally:
        settings.set("fs.defaultFS", before)


def test_a_run_that_is_killed_continues(
    spark: SparkSession, topic: Topic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic.send(400)
    target = Archive(str(tmp_path / "archive"))
    words = ["pipeline", "archive", topic.name, "-n", topic.endpoints, "--to", target.path, "--batch-bytes"]
    with pipeline([*words, "4k"], tmp_path) as process:
        wait_for_batches(tmp_path / "archive" / "_checkpoint", 2)
        process.kill()
    assert main([*words, "1m", "--json"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["messages"] < 400
    assert read_parquet(spark, target) == sorted(topic.bodies)
    assert main([*words, "1m"]) == 0
    assert capsys.readouterr().out.startswith(f"archived to {target.path}: messages 0, batches 0, behind 0, seconds ")


def test_ctrl_c_ends_with_the_report(
    spark: SparkSession, topic: Topic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a run, without a trace of Spark's; the next run continues."""
    topic.send(400)
    target = Archive(str(tmp_path / "archive"))
    words = ["pipeline", "archive", topic.name, "-n", topic.endpoints, "--to", target.path, "--batch-bytes"]
    with pipeline([*words, "4k", "--json"], tmp_path) as process:
        wait_for_batches(tmp_path / "archive" / "_checkpoint", 2)
        os.killpg(process.pid, signal.SIGINT)
        assert process.child.wait() == 130
        archived = json.loads(process.child.stdout.read())["messages"]  # type: ignore[union-attr]
    said = (tmp_path / "said").read_text()
    assert "martlet: interrupted; what was completed stays, and the same command continues" in said
    assert "py4j" not in said
    assert 0 < archived < 400
    assert main([*words, "1m", "--json"]) == 0
    rest = json.loads(capsys.readouterr().out)["messages"]
    # The batch that is written during the interrupt can be completed after the report, and then the next run skips it.
    assert 0 <= 400 - archived - rest <= archived
    assert read_parquet(spark, target) == sorted(topic.bodies)


def test_an_interrupt_leaves_the_report(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    def show(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    topic.send(10)
    with pytest.raises(Interrupted) as found:
        archive(spark, topic.options, Archive(str(tmp_path)), follow_s=1, show=show)
    assert found.value.report.messages == 10
    assert not spark.streams.active


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--to", "x"], 2, "give topics or --pattern"),
        (["A", "--pattern", "B", "--to", "x"], 2, "give topics or --pattern"),
        (["A", "--to", "x", "--batch-bytes", "many"], 2, "--batch-bytes 'many' is not a size; give for example 512k"),
        (["A", "--to", "s3://x"], 2, "cannot contain the checkpoint, because Spark reads s3:// with a jar only"),
        (["A", "--to", "x", "-n", "127.0.0.1:1"], 3, "no name server of 127.0.0.1:1 answered"),
        (["nobody-made-it", "--to", "x"], 1, "topic 'nobody-made-it' is unknown to name server"),
    ],
)
def test_a_command_that_cannot_run_says_why_before_spark_starts(
    endpoints: str, capsys: pytest.CaptureFixture[str], words: list[str], code: int, text: str
) -> None:
    given = words if "-n" in words else [*words, "-n", endpoints]
    assert main(["pipeline", "archive", *given]) == code
    assert text in capsys.readouterr().err


def test_what_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert main(["pipeline", "archive", "A", "--to", "x"]) == 1
    assert f"JAVA_HOME '{tmp_path}' has no bin/java, and Spark needs it; install Java 17" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert main(["pipeline", "archive", "A", "--to", "x"]) == 1
    assert "numpy is not installed, and pipelines need it; pip install 'martlet[spark]'" in capsys.readouterr().err


def test_the_list_of_commands_imports_no_spark() -> None:
    text = (
        "import sys; from martlet.cli.main import commands; commands(); print({'pyspark', 'pyarrow'} & {*sys.modules})"
    )
    assert subprocess.check_output([sys.executable, "-c", text], text=True) == "set()\n"


def test_a_topic_that_was_created_again_is_not_archived_with_the_old_one(
    spark: SparkSession, topic: Topic, tmp_path: Path
) -> None:
    target = Archive(str(tmp_path / "archive"))
    topic.send(8)
    archive(spark, topic.options, target)
    topic.delete()
    topic.create(4)
    topic.send(12)
    with pytest.raises(
        PipelineError, match=r"was deleted and created again.*; set failOnDataLoss to false to continue"
    ):
        archive(spark, topic.options, target)
    archive(spark, {**topic.options, "failOnDataLoss": "false"}, target)
    assert read_parquet(spark, target) == sorted(topic.bodies)
