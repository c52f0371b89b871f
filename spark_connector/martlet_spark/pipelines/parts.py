"""Parquet files of an archive, written by Spark's tasks through Arrow.

A task writes one file per topic and date, or several if it has many topics. Before it creates a file it notes the path,
so that a run can remove files that its predecessor did not commit. Each attempt uses file names of its own: a late
attempt, or a run that was replaced, harms no file of another.
"""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import date
from typing import Any, Final, TypeAlias, final
from urllib.parse import quote
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from martlet_spark.pipelines.unfinished import FileNote, open_path

__all__ = ["PARTITIONS", "WrittenFile", "directory", "write_parts"]

PARTITIONS: Final = ("topic", "date")
ATTEMPT_CHARS: Final = 12
ROW_GROUP_BYTES: Final = 32 << 20
# Files that a task writes at the same time: each takes a descriptor, and a file on S3 also a buffer. A task has the
# messages of one queue after those of another, so most files are complete when they are closed.
OPEN_MAX: Final = 64
Key: TypeAlias = tuple[str, date]


@final
@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One written file; *path* is relative to the archive."""

    path: str
    topic: str
    date: str
    rows: int
    bytes: int


def directory(topic: str, day: str) -> str:
    """Return the directory for messages of *topic* and *day*; characters that are special in paths are escaped."""
    return f"topic={quote(topic, safe='')}/date={day}"


@final
class _Part:
    """A file that is being written; collects rows until they make a row group."""

    def __init__(self, filesystem: pafs.FileSystem, root: str, path: str, schema: pa.Schema) -> None:
        self._filesystem = filesystem
        self._path = f"{root}/{path}"
        filesystem.create_dir(self._path.rpartition("/")[0])
        self._open_path = open_path(filesystem, self._path)
        self._stream = filesystem.open_output_stream(self._open_path)
        self._writer = pq.ParquetWriter(self._stream, schema, compression="zstd")
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self.rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self._pending.append(batch)
        self._pending_bytes += batch.nbytes
        self.rows += batch.num_rows
        if self._pending_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._writer.write_table(pa.Table.from_batches(self._pending))
        self._pending, self._pending_bytes = [], 0

    def close(self) -> int:
        """Complete the file and return its size."""
        self._flush()
        self._writer.close()
        size: int = self._stream.tell()
        self._stream.close()
        if self._open_path != self._path:
            self._filesystem.move(self._open_path, self._path)
        return size

    def abandon(self) -> None:
        """Remove the file, as far as that is possible, on a disk that failed."""
        for each in (self._writer, self._stream):
            with suppress(OSError, pa.ArrowException):
                each.close()
        for path in {self._open_path, self._path}:
            with suppress(OSError):
                self._filesystem.delete_file(path)


def write_parts(
    filesystem: pafs.FileSystem, root: str, batch: int, task: int, batches: Iterator[pa.RecordBatch]
) -> list[WrittenFile]:
    """Write the messages *batches* of one task into files below *root*, and return the files; leave none on failure.

    Raises:
      OSError: the disk or the store failed.
      PipelineError: a newer run has removed some of the files.
    """
    with ExitStack() as undo:
        files = _Files(filesystem, root, batch, task, undo)
        for each in batches:
            for key, rows in _split(each):
                files.add(key, rows)
        written_files = files.close()
        undo.pop_all()
    return written_files


@final
class _Files:
    """The open and complete files of one task; *undo* removes them."""

    def __init__(self, filesystem: pafs.FileSystem, root: str, batch: int, task: int, undo: ExitStack) -> None:
        self._filesystem = filesystem
        self._root = root
        self._attempt = f"{batch:010}-{task:05}-{uuid4().hex[:ATTEMPT_CHARS]}"
        self._note = FileNote(filesystem, root, self._attempt)
        self._count = 0
        self._undo = undo
        self._open: dict[Key, tuple[str, _Part]] = {}  # least recently written file first
        self._written: list[WrittenFile] = []

    def add(self, key: Key, rows: pa.RecordBatch) -> None:
        """Write *rows*, of one topic and date, to their open file, or to a new one."""
        found = self._open.pop(key) if key in self._open else self._begin(key, rows.schema)
        self._open[key] = found
        found[1].add(rows)

    def _begin(self, key: Key, schema: pa.Schema) -> tuple[str, _Part]:
        if len(self._open) >= OPEN_MAX:
            self._close(next(iter(self._open)))
        path = f"{directory(key[0], key[1].isoformat())}/{self._attempt}-{self._count:04}.parquet"
        self._count += 1
        self._note.add(path)
        part = _Part(self._filesystem, self._root, path, schema)
        self._undo.callback(part.abandon)
        return path, part

    def _close(self, key: Key) -> None:
        path, part = self._open.pop(key)
        self._written.append(WrittenFile(path, key[0], key[1].isoformat(), part.rows, part.close()))

    def close(self) -> list[WrittenFile]:
        """Complete all files and return them."""
        for key in list(self._open):
            self._close(key)
        self._note.check()
        return self._written


def _split(batch: pa.RecordBatch) -> Iterator[tuple[Key, pa.RecordBatch]]:
    """Yield the rows of each topic and date, without these two columns."""
    message_columns = batch.drop_columns(list(PARTITIONS))
    topics, days = batch["topic"], batch["date"]
    keys = pa.Table.from_arrays([topics, days], names=list(PARTITIONS)).group_by(list(PARTITIONS)).aggregate([])
    key_rows: list[dict[str, Any]] = keys.to_pylist()
    for key in key_rows:
        rows = message_columns
        if len(key_rows) > 1:
            rows = message_columns.filter(pc.and_(pc.equal(topics, key["topic"]), pc.equal(days, key["date"])))
        yield (key["topic"], key["date"]), rows
