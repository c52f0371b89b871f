"""The commit of an archive's batch: whatever interrupts it, each message is in the archive once. Without Spark."""

import json
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from deltalake import DeltaTable, write_deltalake

from martlet_spark.errors import OptionError, PipelineError
from martlet_spark.pipelines import parts
from martlet_spark.pipelines.archive import Archive
from martlet_spark.pipelines.archive_log import RowPlace, advance, open_log
from martlet_spark.pipelines.batch_lists import BatchLists
from martlet_spark.pipelines.commits import open_commits
from martlet_spark.pipelines.owner import NAME, check_run, note_query
from martlet_spark.pipelines.parts import _Files, _split, write_parts
from martlet_spark.pipelines.storage import Location, write_whole

from .test_archive_log import messages, read, write, write_tasks

STEPS = ("in a file", "after a task", "before the commit", "after the commit")


@pytest.fixture(params=["local", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Location:
    if request.param == "local":
        return Location.of(str(tmp_path / "archive"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "martlet")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "martlet")
    return Location.of(f"{request.getfixturevalue('bucket')}/{tmp_path.name}")


def present(location: Location) -> list[str]:
    """All files of messages, also those that are not complete."""
    filesystem, root = location.open()
    infos = filesystem.get_file_info(pafs.FileSelector(root, recursive=True))
    return sorted(info.path.removeprefix(f"{root}/") for info in infos if ".parquet" in info.base_name)


def bodies(location: Location, kind: str) -> list[str]:
    log = open_log(location, "delta" if kind == "delta" else "list")
    return sorted(read(location, log, RowPlace(), advance(log, RowPlace(), log.last())))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_a_run_that_is_killed_at_any_step_is_continued(location: Location, kind: str, step: str) -> None:
    write(location, kind, 0, [messages("A", 0, 4)])
    first, second = [messages("A", 4, 3), messages("%DLQ%a|b", 0, 2)], [messages("A", 7, 3)]
    if step == "in a file":
        files = _Files(*location.open(), 1, 0, ExitStack())
        for key, rows in _split(messages("A", 4, 3)):
            files.add(key, rows)
        ((_, part),) = files._open.values()
        part._flush()
        if location.is_s3:  # where a file appears with its end
            part.close()
    elif step == "after a task":
        write_tasks(location, 1, first)
    elif step == "before the commit":
        write_tasks(location, 1, first, second)
    else:
        write(location, kind, 1, first, second)
    # The next run; its tasks may divide the rows in another way.
    open_commits(location, kind).clean("query")
    write(location, kind, 1, second, first)
    write(location, kind, 2, [messages("A", 10, 1)])
    assert bodies(location, kind) == sorted([*(f"A {n}" for n in range(11)), "%DLQ%a|b 0", "%DLQ%a|b 1"])
    assert present(location) == sorted(open_commits(location, kind).files())


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_others_read_topics_with_any_name(tmp_path: Path, kind: str) -> None:
    location = Location.of(str(tmp_path))
    write(location, kind, 0, [messages("%RETRY%a|b", 0, 2)])
    assert (tmp_path / "topic=%25RETRY%25a%7Cb" / "date=2026-03-01").is_dir()
    if kind == "delta":
        table = DeltaTable(str(tmp_path)).to_pyarrow_table()
        assert set(table["topic"].to_pylist()) == {"%RETRY%a|b"}


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process can have more than *size* bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, kind: str) -> None:
    location = Location.of(str(tmp_path / "archive"))
    write(location, kind, 0, [messages("A", 0, 4)])
    with (
        pytest.raises(PipelineError, match=r"cannot be used: .*File too large"),
        location.plain_errors(),
        full_disk(1 << 16),
    ):
        write_tasks(location, 1, [messages("B", 0, 2), messages("A", 4, 4, body_bytes=1 << 16)])
    assert present(location) == sorted(open_commits(location, kind).files())
    write(location, kind, 1, [messages("A", 4, 4)])
    assert bodies(location, kind) == [f"A {n}" for n in range(8)]


def test_a_run_that_was_replaced_cannot_commit(location: Location) -> None:
    filesystem, root = location.open()
    write_whole(filesystem, f"{root}/{NAME}", json.dumps({"query": "q", "run": "new"}).encode())
    check_run(location, "new")
    with pytest.raises(PipelineError, match="is written by a newer run of this pipeline, which goes on; start one at"):
        check_run(location, "old")


def test_a_run_that_is_replaced_while_it_starts_ends(tmp_path: Path) -> None:
    """The newer one may have another checkpoint: the older one had not noted its query yet."""
    note = tmp_path / NAME
    note.write_text(json.dumps({"query": "", "run": "new"}))
    with pytest.raises(PipelineError, match="is written by a newer run of this pipeline"):
        note_query(None, str(tmp_path), "query", "old")  # type: ignore[arg-type]
    note_query(None, str(tmp_path), "query", "new")  # type: ignore[arg-type]
    assert json.loads(note.read_text()) == {"query": "query", "run": "new"}


def test_a_commit_lists_no_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be hundreds of thousands."""
    location = Location.of(str(tmp_path))
    write(location, "parquet", 7, [messages("A", 0, 4)])
    commits = open_commits(location, "parquet")
    with monkeypatch.context() as patched:
        patched.setattr(BatchLists, "_present", None)
        assert commits.has("query", 7)
        assert not commits.has("query", 8)
        with pytest.raises(PipelineError, match="was written with another checkpoint"):
            commits.has("another", 8)
    assert commits.has("query", 5)
    assert not commits.has("query", 9)


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "OPEN_MAX", 2)
    location = Location.of(str(tmp_path))
    batches = [messages(topic, n * 4, 4) for n, topic in enumerate("ABACADBA")]
    write(location, "parquet", 0, batches)
    expected = [body.as_py().decode() for batch in batches for body in batch["body"]]
    assert bodies(location, "parquet") == sorted(expected)
    assert (
        len(present(location)) == len(open_commits(location, "parquet").files()) == 6
    )  # A is open when more comes of it, twice


def test_files_that_were_closed_are_removed_if_their_task_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "OPEN_MAX", 2)
    location = Location.of(str(tmp_path))

    def rows() -> Iterator[pa.RecordBatch]:
        yield from (messages(topic, 0, 4) for topic in "ABCD")
        raise OSError(5, "Input/output error")

    filesystem, root = location.open()
    with pytest.raises(OSError, match="Input/output error"):
        write_parts(filesystem, root, 0, 0, rows())
    assert present(location) == []


def test_a_delta_table_is_not_written_where_deltalake_cannot() -> None:
    target = Archive("hdfs://127.0.0.1:1/archive", "delta", "checkpoint")
    with pytest.raises(OptionError, match="deltalake writes to local directories and to s3://; give another path, or"):
        target.check()


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_another_query_cannot_commit(tmp_path: Path, kind: str) -> None:
    location = Location.of(str(tmp_path))
    write(location, kind, 0, [messages("A", 0, 4)])
    with pytest.raises(PipelineError, match="was written with another checkpoint"):
        open_commits(location, kind).has("another", 0)


def test_a_table_of_something_else_is_left_alone(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), pa.table({"a": [1]}))
    with pytest.raises(PipelineError, match="is not an archive: it has other columns or partitions; give another path"):
        open_commits(Location.of(str(tmp_path)), "delta").clean("query")
    assert DeltaTable(str(tmp_path)).version() == 0


def test_a_store_without_credentials_is_an_error(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    location = Location.of(f"{bucket}/x")
    filesystem, root = location.open()
    with pytest.raises(PipelineError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"), location.plain_errors():
        filesystem.get_file_info(f"{root}/y")
