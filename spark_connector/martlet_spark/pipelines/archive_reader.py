"""Reads an archive of Parquet files or a Delta table as a stream, through Arrow: Spark would need jars for it."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any, Final, final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from martlet_spark.pipelines.archive_log import ArchiveLog, RowPlace, Slice, advance, open_log, slices
from martlet_spark.pipelines.archived import arrow_schema
from martlet_spark.pipelines.storage import Location

__all__ = ["ArchiveReader", "BatchPace", "read_slice"]

PARTITION_BYTES: Final = 32 << 20  # of files, as they are stored
BATCH_ROWS: Final = 4096


@final
class BatchPace:
    """Limits batches to a mean of *rate* rows a second: each waits until the time of its predecessors is over."""

    def __init__(
        self, rate: int, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._due: float | None = None

    def wait(self, rows: int) -> None:
        """Wait until a batch of *rows* may begin."""
        now = self._clock()
        due = now if self._due is None else max(self._due, now)
        if due > now:
            self._sleep(due - now)
        self._due = due + rows / self._rate


@final
@dataclass
class _Slices(InputPartition):
    slices: list[Slice]


@final
class ArchiveReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads an archive; *options* have its `Location`, its ``kind`` and a ``rate`` in rows a second, 0 for no limit."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._location = Location.from_options(options)
        self._kind = options["kind"]
        self._rate = int(options["rate"])
        self._batch_rows = int(options["batchrows"])
        self._batch_bytes = int(options["batchbytes"])
        self._pace: BatchPace | None = None
        self._log: ArchiveLog | None = None
        self._last: int | None = None

    def initialOffset(self) -> dict[str, Any]:
        return asdict(RowPlace())

    def prepareForTriggerAvailableNow(self) -> None:
        self._last = self._opened().last()

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._batch_rows:
            return ReadMaxRows(self._batch_rows)
        return ReadMaxBytes(self._batch_bytes) if self._batch_bytes else ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        log, begin = self._opened(), RowPlace.of(start)
        last = log.last() if self._last is None else self._last
        end = advance(log, begin, last, rows_max=self._batch_rows, bytes_max=self._batch_bytes)
        if self._rate and end != begin:
            self._pace = self._pace or BatchPace(self._rate)
            self._pace.wait(sum(each.end - each.first for each in slices(log, begin, end)))
        return asdict(end)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        found: list[InputPartition] = []
        own: list[Slice] = []
        for each in slices(self._opened(), RowPlace.of(start), RowPlace.of(end)):
            own.append(each)
            if sum(slice_.file.bytes for slice_ in own) >= PARTITION_BYTES:
                found.append(_Slices(own))
                own = []
        return [*found, _Slices(own)] if own else found

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, _Slices)
        for each in partition.slices:
            yield from read_slice(self._location, each)

    def _opened(self) -> ArchiveLog:
        if self._log is None:
            self._log = open_log(self._location, self._kind)
        return self._log


def read_slice(location: Location, part: Slice) -> Iterator[pa.RecordBatch]:
    """Yield the rows of *part*, in all columns of an archive."""
    filesystem, root = location.open()
    schema, done = arrow_schema(), 0
    with location.plain_errors(), filesystem.open_input_file(f"{root}/{part.file.path}") as file:
        parquet = pq.ParquetFile(file)
        for number in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(number).num_rows
            if done + rows > part.first and done < part.end:
                at = done
                for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[number]):
                    first, after = max(part.first - at, 0), min(part.end - at, len(batch))
                    if first < after:
                        yield _with_path_columns(batch.slice(first, after - first), part, schema)
                    at += len(batch)
            done += rows


def _with_path_columns(batch: pa.RecordBatch, part: Slice, schema: pa.Schema) -> pa.RecordBatch:
    """Return *batch* with the columns topic and date, whose values are in the path of its file."""
    path_columns = {
        "topic": pa.repeat(pa.scalar(part.file.topic), len(batch)),
        "date": pa.repeat(pa.scalar(date.fromisoformat(part.file.date), pa.date32()), len(batch)),
    }
    columns = [path_columns[field.name] if field.name in path_columns else batch.column(field.name) for field in schema]
    return pa.RecordBatch.from_arrays(
        [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(columns, schema, strict=True)
        ],
        schema=schema,
    )
