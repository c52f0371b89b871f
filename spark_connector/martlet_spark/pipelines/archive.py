"""Archives topics as Parquet files or a Delta table, partitioned by topic and day, each message exactly once.

A streaming query writes the archive, and its checkpoint records the progress. The next run continues after any failure:
it writes an incomplete batch again, and never a complete one.

Spark's own file sink writes Parquet wherever Spark can write. For Delta tables and for S3, where Spark would need jars,
tasks write the files through Arrow, and the driver commits them (`commits.py`).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, final
from uuid import uuid4

from martlet_columns.decode import RAW
from martlet_columns.schema import COLUMNS
from martlet_spark.errors import OptionError, PipelineError
from martlet_spark.options import START, named
from martlet_spark.pipelines.archived import DATE, MESSAGE_COLUMNS
from martlet_spark.pipelines.checkpoints import qualified
from martlet_spark.pipelines.owner import claim, note_query
from martlet_spark.pipelines.progress import UNDECODED, Show, StreamReport, count_undecoded, follow_query, ignore
from martlet_spark.pipelines.session import plain_errors
from martlet_spark.pipelines.storage import Location, is_remote

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["CHECKPOINT", "FORMATS", "Archive", "archive", "start_archive"]

FORMATS: Final = ("parquet", "delta")
CHECKPOINT: Final = "_checkpoint"


@final
@dataclass(frozen=True, slots=True)
class Archive:
    """The path, kind and batch size of an archive.

    A batch has about *batch_bytes* of messages, so no more is written again after a crash. A file has at most the
    messages of one task, about *file_bytes*, before compression.
    """

    path: str
    format: str = "parquet"
    checkpoint: str = ""  # default: a directory in the archive
    batch_bytes: int = 1 << 30
    file_bytes: int = 128 << 20

    @property
    def checkpoint_path(self) -> str:
        if self.checkpoint:
            return self.checkpoint
        if self.path.startswith("s3://"):
            text = f"archive {self.path!r} cannot contain the checkpoint, because Spark reads s3:// with a jar only"
            raise OptionError(f"{text}; give a directory for it that lasts, with --checkpoint")
        return os.path.join(self.path, CHECKPOINT)

    def check(self) -> None:
        """Raise `OptionError` if the options contradict one another, and `PipelineError` if a package is missing."""
        if self.format not in FORMATS:
            raise OptionError(f"format {self.format!r} is unknown; it is {' or '.join(FORMATS)}")
        if self.format == "delta" and is_remote(self.path):
            text = f"Delta table {self.path!r} cannot be written: deltalake writes to local directories and to s3://"
            raise OptionError(f"{text}; give another path, or the format parquet, which Spark writes")
        if self.format == "delta" and find_spec("deltalake") is None:
            raise PipelineError("deltalake is not installed, and Delta tables need it; pip install 'martlet[delta]'")
        assert self.checkpoint_path

    def on(self, session: "SparkSession") -> "Archive":
        """Return this archive with the file system of *session* in its paths."""
        checkpoint = qualified(session, self.checkpoint) if self.checkpoint else ""
        return replace(self, path=qualified(session, self.path), checkpoint=checkpoint)

    @property
    def kind(self) -> str:
        return "spark" if self.spark_writes else self.format

    @property
    def spark_writes(self) -> bool:
        """Whether Spark's file sink writes the archive."""
        return self.format == "parquet" and not self.path.startswith("s3://")


def archive(
    session: "SparkSession", source: Mapping[str, str], target: Archive, *, follow_s: float = 0, show: Show = ignore
) -> StreamReport:
    """Archive the messages that are not in *target* yet; with *follow_s*, poll for new ones at this interval until
    interrupted.

    *source* are options of the data source: ``endpoints``, and ``subscribe`` or ``subscribePattern``.

    Raises:
      PipelineError: the run failed; a new run continues.
      OptionError: an option is invalid.
    """
    with plain_errors():
        target = target.on(session)
        target.check()
        query = start_archive(session, source, target, follow_s=follow_s)
        return follow_query(query, show, observed=(UNDECODED,))


def start_archive(
    session: "SparkSession", source: Mapping[str, str], target: Archive, *, follow_s: float = 0
) -> "StreamingQuery":
    """Start the query of `archive` and return it."""
    from martlet_spark.pipelines.archive_sink import ArchiveSource
    from martlet_spark.pipelines.commits import open_commits

    target = target.on(session)
    target.check()
    begin = {} if named(source, START) else {"startingOffsets": "earliest"}
    options = {
        **begin,
        "maxBytesPerTrigger": str(target.batch_bytes),
        "targetPartitionBytes": str(target.file_bytes),
        "undecodableBody": RAW,
        **source,
        "columns": ",".join(COLUMNS),
    }
    stream = session.readStream.format("martlet").options(**options).load()
    stream = count_undecoded(stream)
    messages = stream.selectExpr(*(f"`{name}`" for name in MESSAGE_COLUMNS), "topic", f"{DATE} AS date")
    writer = messages.writeStream.option("checkpointLocation", target.checkpoint_path)
    writer = writer.trigger(processingTime=f"{follow_s} seconds") if follow_s else writer.trigger(availableNow=True)
    run = uuid4().hex
    query_id = claim(session, target.path, target.kind, target.checkpoint_path, run)
    if target.spark_writes:
        writer = writer.format("parquet").option("compression", "zstd").partitionBy("topic", "date")
        query = writer.start(target.path)
    else:
        location = Location.of(target.path)
        with location.plain_errors():
            open_commits(location, target.format).clean(query_id)
        session.dataSource.register(ArchiveSource)
        options = {**location.options, "kind": target.format, "run": run}
        query = writer.format(ArchiveSource.name()).options(**options).start()
    try:
        note_query(session, target.path, query.id, run)
    except PipelineError:
        query.stop()
        raise
    return query
