"""The sink that writes an archive through Arrow: tasks write files, and the driver commits them.

The sink is a data source of its own, ``martlet-archive``; `archive` writes with it, and `replay` reads with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from martlet_spark.pipelines.archive_reader import ArchiveReader
from martlet_spark.pipelines.archived import spark_columns
from martlet_spark.pipelines.commits import open_commits
from martlet_spark.pipelines.owner import check_run
from martlet_spark.pipelines.parts import WrittenFile, write_parts
from martlet_spark.pipelines.storage import Location

__all__ = ["ArchiveSource"]


@final
@dataclass
class _Files(WriterCommitMessage):
    """The files of one task, and its query: Spark passes nothing else to the driver."""

    query: str
    files: list[WrittenFile]


@final
class ArchiveWriter(DataSourceStreamArrowWriter):
    """Writes the files of one batch."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._location = Location.from_options(options)
        self._kind = options["kind"]
        self._run = options["run"]

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        assert query is not None
        assert batch is not None
        filesystem, root = self._location.open()
        with self._location.plain_errors():
            written = write_parts(filesystem, root, int(batch), context.partitionId(), iterator)
        return _Files(query, written)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        task_files = [each for each in messages if isinstance(each, _Files)]
        if not task_files:
            return
        files = [file for each in task_files for file in each.files]
        with self._location.plain_errors():
            commits = open_commits(self._location, self._kind)
            if commits.has(task_files[0].query, batchId):
                commits.drop(files)
            else:
                check_run(self._location, self._run)
                commits.commit(task_files[0].query, batchId, files)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        """Do nothing: the batch may have been committed; if not, its next run replaces its files."""


@final
class ArchiveSource(DataSource):
    """The format ``martlet-archive``."""

    @classmethod
    def name(cls) -> str:
        return "martlet-archive"

    def schema(self) -> str:
        return spark_columns()

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return ArchiveReader(self.options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return ArchiveWriter(self.options)
