"""The base of the batch and the streaming reader: options, columns, filter and partitions."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, final

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from martlet_columns.schema import COLUMNS
from martlet_spark.cluster import Cluster
from martlet_spark.columns import DEFAULT, select
from martlet_spark.errors import OptionError
from martlet_spark.options import Options
from martlet_spark.read.both import BothReader
from martlet_spark.read.filters import Filter
from martlet_spark.read.planner import Range, plan

__all__ = ["RangePartition", "TopicReader", "columns_of", "spark_schema"]

TYPES: Final[Mapping[str, DataType]] = {
    each.simpleString(): each
    for each in (
        BinaryType(),
        IntegerType(),
        LongType(),
        StringType(),
        TimestampType(),
        MapType(StringType(), StringType()),
    )
}


def spark_schema(names: Sequence[str]) -> StructType:
    """Return the schema of the columns *names*."""
    return StructType([StructField(name, TYPES[COLUMNS[name][0]]) for name in names])


@final
class RangePartition(InputPartition):
    """One Spark partition: ranges of queues."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        super().__init__(list(ranges))

    @property
    def ranges(self) -> list[Range]:
        found: list[Range] = self.value
        return found


def columns_of(schema: StructType) -> tuple[str, ...]:
    """Return the columns of *schema*, which the user may have given.

    Raises:
      OptionError: a column is unknown or has another type.
    """
    names = select(schema.names)
    for field in schema.fields:
        wanted = COLUMNS[field.name][0]
        if field.dataType.simpleString() != wanted:
            text = f"column {field.name!r} has the type {field.dataType.simpleString()} in the schema; it is {wanted}"
            raise OptionError(f"{text}, cast it after load()")
        if not field.nullable:
            raise OptionError(f"column {field.name!r} is NOT NULL in the schema; leave NOT NULL out")
    return names


class TopicReader:
    """The base of batch and streaming readers; pickled for the tasks, so it holds plain data."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.options = options
        self.names = columns_of(schema)
        if options["columns"] not in (DEFAULT, self.names):
            text = f"option columns and the schema select different columns, {', '.join(self.names)} in the schema"
            raise OptionError(f"{text}; give one of them")
        self.wanted = Filter(options["tags"], options["key"], options["sql"])

    def cluster(self) -> Cluster:
        return Cluster(self.options["endpoints"] or (), self.options.security, self.options["timeoutMs"] / 1000)

    def partitions_of(self, ranges: Sequence[Range]) -> list[RangePartition]:
        options = self.options
        found = plan(
            ranges,
            target_bytes=options["targetPartitionBytes"],
            records_max=options["maxRecordsPerPartition"],
            partitions_min=options["minPartitions"],
        )
        # If there is no partition, Spark makes an unusable one of its own.
        return [RangePartition(each) for each in found] or [RangePartition([])]

    def read_ranges(self, ranges: Sequence[Range]) -> Iterator[Any]:
        _freeze()
        return BothReader(self.cluster(), self.options, self.names, self.wanted).read(ranges)


@cache
def _freeze() -> None:
    """Exempt imported modules from garbage collections, once per process.

    Spark's Python workers collect all garbage after each task, which takes 30 ms with the modules of Spark, PyArrow and
    NumPy, as long as to read 10,000 messages.
    """
    gc.freeze()
