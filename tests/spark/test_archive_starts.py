"""What a start of an archive costs, and that a run may be killed at any moment: lists of batches and notes of files."""

import io
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs

import pyarrow.fs as pafs
import pytest

from martlet_spark.errors import PipelineError
from martlet_spark.pipelines import batch_lists, parts
from martlet_spark.pipelines.commits import open_commits
from martlet_spark.pipelines.parts import WrittenFile
from martlet_spark.pipelines.storage import Location

from .test_archive_commits import bodies, present
from .test_archive_log import messages, write, write_tasks

KINDS = ("parquet", "delta")


class Requests:
    """Counts the requests to an S3-compatible server, which is the WSGI application *app*."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.reset()

    def reset(self) -> None:
        """Count from 0 on."""
        self.counts: Counter[str] = Counter()
        self.listed: list[str] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        is_list = environ["REQUEST_METHOD"] == "GET" and "list-type" in parse_qs(environ["QUERY_STRING"])
        self.counts["LIST" if is_list else environ["REQUEST_METHOD"]] += 1
        body = b"".join(self._app(environ, start_response))
        if is_list:
            self.listed += [part.partition("</Key>")[0] for part in body.decode().split("<Key>")[1:]]
        return [body]


@pytest.fixture
def requests(bucket: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Requests:
    found = Requests(s3_server._server.app)
    monkeypatch.setattr(s3_server._server, "app", found)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "martlet")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "martlet")
    return found


def test_a_start_costs_what_is_new(
    bucket: str, requests: Requests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lists no files of messages and few lists of batches, and reads only what a killed task has noted."""
    monkeypatch.setattr(batch_lists, "SPANS", (4, 16))
    location = Location.of(f"{bucket}/{tmp_path.name}")
    open_commits(location, "parquet").clean("query")
    starts: list[tuple[Counter[str], list[str]]] = []
    committed = [
        WrittenFile(f"topic=A/date=2026-03-01/{batch}.parquet", "A", "2026-03-01", 1, 1) for batch in range(24)
    ]
    for batch in range(24):
        if batch in (7, 23):
            write_tasks(location, batch, [messages("A", batch, 1)])  # by a run that was killed
            requests.reset()
            open_commits(location, "parquet").clean("query")
            starts.append((requests.counts.copy(), requests.listed.copy()))
            assert not [name for name in requests.listed if "topic=" in name]
            assert present(location) == []
        open_commits(location, "parquet").commit("query", batch, [committed[batch]])
    (few, few_names), (many, many_names) = starts
    assert few == many
    assert few["LIST"] <= 6
    assert few.total() <= 24
    assert len(many_names) <= len(few_names) + 3  # one more, each time
    assert open_commits(location, "parquet").files() == [file.path for file in committed]


class Killed(BaseException):
    """The end of a process."""


class Dying:
    """A store whose client is killed before change number *left*; an object appears when it is complete."""

    def __init__(self, left: int) -> None:
        self._inner = pafs.LocalFileSystem()
        self._lock = Lock()
        self.left = left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def change(self) -> None:
        with self._lock:
            if self.left <= 0:
                raise Killed
            self.left -= 1

    def delete_file(self, path: str) -> None:
        self.change()
        self._inner.delete_file(path)

    def open_output_stream(self, path: str) -> "Output":
        return Output(self, path)


class Output(io.BytesIO):
    def __init__(self, store: Dying, path: str) -> None:
        super().__init__()
        self._store = store
        self._path = path

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._store.change()
            with self._store._inner.open_output_stream(self._path) as stream:
                stream.write(data)


BATCHES = 5
CHANGES_MAX = 1000


def run(store: Dying, location: Location, kind: str, first: int, ended: list[int]) -> None:
    """Archive batches from *first* on, as a run does; *ended* are those whose end Spark has noted."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Location, "open", lambda self: (store, self.path))
        open_commits(location, kind).clean("query")
        for batch in range(first, BATCHES):
            if batch == 1:  # an attempt of a task that failed, and did not even remove its file
                write_tasks(location, batch, [messages("A", 2 * batch, 1)])
            write(location, kind, batch, [messages("A", 2 * batch, 1)], [messages("A", 2 * batch + 1, 1)])
            ended.append(batch)


def test_a_run_may_be_killed_between_any_two_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lists, "SPANS", (2, 4))
    for changes in range(CHANGES_MAX):
        location = Location.of(str(tmp_path / str(changes)))
        ended: list[int] = []
        store = Dying(changes)
        try:
            run(store, location, "parquet", 0, ended)
        except Killed:
            found = bodies(location, "parquet")
            assert len(found) in (2 * len(ended), 2 * len(ended) + 2)
            assert found == sorted(f"A {n}" for n in range(len(found)))
            run(Dying(CHANGES_MAX), location, "parquet", len(ended), ended)
        open_commits(location, "parquet").clean("query")
        assert bodies(location, "parquet") == sorted(f"A {n}" for n in range(2 * BATCHES))
        assert present(location) == sorted(open_commits(location, "parquet").files())
        assert sorted(path.name for path in (tmp_path / str(changes) / "_batches").iterdir()) == [
            "0000000000-0000000003.json",
            "0000000004.json",
        ]
        assert [path.name for path in (tmp_path / str(changes) / "_writing").iterdir()] == ["complete"]
        shutil.rmtree(location.path)
        if store.left:
            break
    assert 30 < changes < CHANGES_MAX - 1


def test_lists_are_read_while_they_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lists, "SPANS", (100, 10_000))
    location = Location.of(str(tmp_path))
    for batch in range(9):
        write(location, "parquet", batch, [messages("A", batch, 1)])
    before = open_commits(location, "parquet").files()
    monkeypatch.setattr(batch_lists, "SPANS", (2, 4))
    store, seen = Dying(CHANGES_MAX), 0

    def change() -> None:
        nonlocal seen
        seen += 1
        assert open_commits(location, "parquet").files() == before

    monkeypatch.setattr(store, "change", change)
    batch_lists.BatchLists(store, location.path).join()
    assert seen == 4 + 8 + 2 + 4
    assert open_commits(location, "parquet").files() == before
    assert len([*(tmp_path / "_batches").iterdir()]) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_of_an_earlier_version_goes_on(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch has its own list there, and files have no notes: one start lists all of it, and no later one."""
    location = Location.of(str(tmp_path))
    for batch in range(10):
        write(location, kind, batch, [messages("A", batch, 1)])
    shutil.rmtree(tmp_path / "_writing")
    folder = tmp_path / "topic=A" / "date=2026-03-01"
    strays = (
        "0000000010-00000-0123456789ab.parquet",
        ".0000000010-00000-0123456789ab.parquet.0123",
        "0000000009-00000-0.parquet",
    )
    for name in strays:
        (folder / name).touch()
    (folder / "somebody-else.parquet").touch()
    monkeypatch.setattr(batch_lists, "SPANS", (2, 4))
    open_commits(location, kind).clean("query")
    assert present(location) == sorted(
        [*open_commits(location, kind).files(), "topic=A/date=2026-03-01/somebody-else.parquet"]
    )
    write(location, kind, 10, [messages("A", 10, 1)])
    assert bodies(location, kind) == sorted(f"A {n}" for n in range(11))
    if kind == "parquet":
        assert len([*(tmp_path / "_batches").iterdir()]) <= 5
    (folder / strays[0]).touch()
    open_commits(location, kind).clean("query")
    assert (folder / strays[0]).exists()


def test_a_late_task_of_a_run_that_was_replaced_leaves_nothing(tmp_path: Path) -> None:
    location = Location.of(str(tmp_path))
    store: Any = Dying(CHANGES_MAX)  # where a file appears with its end

    def rows() -> Iterator[Any]:
        yield messages("A", 0, 1)
        open_commits(location, "parquet").clean("query")

    with pytest.raises(PipelineError, match="were removed by a newer run of this pipeline; start one at a time"):
        parts.write_parts(store, location.path, 0, 0, rows())
    assert present(location) == []
