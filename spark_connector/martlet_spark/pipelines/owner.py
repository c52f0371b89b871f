"""The owner of an archive: a note in the archive names the query, its checkpoint and its newest run.

An archive takes batches of one query only: another would begin at the first message again. If several runs were started
by mistake, the newest continues, and the others fail at their next commit.
"""

import json
from typing import TYPE_CHECKING, Any, Final

import pyarrow.fs as pafs

from martlet_spark.errors import OptionError, PipelineError
from martlet_spark.pipelines.checkpoints import exists, query_of, read_text, write_text
from martlet_spark.pipelines.storage import Location, is_remote, write_whole

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check_run", "claim", "note_query"]

NAME: Final = "_archive.json"
# Kind of an archive, which is its writer and format -> the name that only such an archive has.
MARKS: Final = {"spark": "_spark_metadata", "delta": "_delta_log", "parquet": "_batches"}
WORDS: Final = {"spark": "Parquet files", "delta": "a Delta table", "parquet": "Parquet files"}


def claim(session: "SparkSession", path: str, kind: str, checkpoint: str, run: str) -> str:
    """Make *run* the newest of the archive *path*; return the id of its query, empty if there is none yet.

    Raises:
      OptionError: the archive is of another kind.
      PipelineError: the archive is another query's.
    """
    for other, mark in MARKS.items():
        if other != kind and _has(session, path, mark):
            text = f"archive {path!r} is {WORDS[other]}, and {WORDS[kind]} cannot be added"
            raise OptionError(f"{text}; give the --format that it has, or another path")
    note, query = _read(session, path), query_of(session, checkpoint)
    is_foreign = bool(note.get("query")) and note["query"] != query
    if is_foreign or (not note and not query and _has(session, path, MARKS[kind])):
        raise foreign(path)
    _write(session, path, {"query": query, "run": run})
    return query


def note_query(session: "SparkSession", path: str, query: str, run: str) -> None:
    """Note the id of the query that *run* has begun.

    Raises:
      PipelineError: a newer run was started meanwhile, perhaps with another checkpoint.
    """
    if _read(session, path).get("run") != run:
        raise _replaced(path)
    _write(session, path, {"query": query, "run": run})


def check_run(location: Location, run: str) -> None:
    """Raise `PipelineError` if *run* is not the newest of the archive."""
    newest = _parsed(_load(location)).get("run")
    if newest != run:
        raise _replaced(location.path)


def _replaced(path: str) -> PipelineError:
    """Return the error for a run that is not the newest of the archive *path*."""
    return PipelineError(
        f"archive {path!r} is written by a newer run of this pipeline, which goes on; start one at a time"
    )


def foreign(path: str) -> PipelineError:
    """Return the error for an archive of another query."""
    text = f"archive {path!r} was written with another checkpoint, and would get all messages again"
    return PipelineError(f"{text}; give that --checkpoint, or another directory")


def _has(session: "SparkSession", path: str, name: str) -> bool:
    if is_remote(path):
        return exists(session, f"{path}/{name}")
    location = Location.of(path)
    filesystem, root = location.open()
    with location.plain_errors():
        return bool(filesystem.get_file_info(f"{root}/{name}").type is not pafs.FileType.NotFound)


def _read(session: "SparkSession", path: str) -> dict[str, Any]:
    return _parsed(read_text(session, f"{path}/{NAME}") if is_remote(path) else _load(Location.of(path)))


def _write(session: "SparkSession", path: str, note: dict[str, str]) -> None:
    text = json.dumps(note)
    if is_remote(path):
        write_text(session, f"{path}/{NAME}", text)
        return
    location = Location.of(path)
    filesystem, root = location.open()
    with location.plain_errors():
        write_whole(filesystem, f"{root}/{NAME}", text.encode())


def _load(location: Location) -> str | None:
    filesystem, root = location.open()
    with location.plain_errors():
        if filesystem.get_file_info(f"{root}/{NAME}").type is pafs.FileType.NotFound:
            return None
        with filesystem.open_input_stream(f"{root}/{NAME}") as stream:
            return str(stream.read(), "utf-8")


def _parsed(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
