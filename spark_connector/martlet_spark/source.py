"""The data source ``martlet``: `MartletDataSource`, and its batch reader."""

from collections.abc import Iterator
from typing import Any, Final, final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.types import StructType

from martlet_spark.options import BATCH, SINK, STREAM, parse
from martlet_spark.read.batch import RangePartition, TopicReader, spark_schema
from martlet_spark.read.cold_stream import ColdStreamReader
from martlet_spark.read.seam import plan_batch
from martlet_spark.read.stream import StreamReader
from martlet_spark.write.sink import BatchWriter, StreamWriter

__all__ = ["MartletDataSource"]

# Options that Spark itself adds.
SPARKS: Final = ("checkpointlocation", "queryname")


@final
class BatchReader(TopicReader, DataSourceReader):
    """Reads the messages that exist when the query is planned."""

    def partitions(self) -> list[InputPartition]:
        return [*self.partitions_of(plan_batch(self.cluster(), self.options, with_sizes=True))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        # If there is no partition, Spark makes one of its own.
        return self.read_ranges(partition.ranges if isinstance(partition, RangePartition) else ())


class MartletDataSource(DataSource):
    """Topics of Martlet and RocketMQ, for reads and writes: ``format("martlet")``."""

    @classmethod
    def name(cls) -> str:
        return "martlet"

    def schema(self) -> StructType:
        return spark_schema(parse(self.options, STREAM + _ENDING, SPARKS)["columns"])

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(parse(self.options, BATCH, SPARKS), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = parse(self.options, STREAM, SPARKS)
        return ColdStreamReader(options, schema) if options["tier"] == "cold" else StreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return BatchWriter(parse(self.options, SINK, SPARKS), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return StreamWriter(parse(self.options, SINK, SPARKS), schema, overwrite=overwrite)


_ENDING: Final = tuple(option for option in BATCH if option not in STREAM)
