"""Data sources that read topics in slower ways, to compare with; they run in Spark's Python workers.

``martlet-pulls`` asks for 32 messages at a time, the most that RocketMQ answers. ``martlet-tuples`` decodes messages
one by one and yields a tuple for each.
"""

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from martlet_columns.decode import Decoder
from martlet_spark.read import exchange
from martlet_spark.read import task as reading
from martlet_spark.source import MartletDataSource

__all__ = ["PullsSource", "TuplesSource"]

FAST = {
    (reading, "BulkReads"): exchange.BulkReadExchange,
    (exchange, "PULL_MESSAGES"): exchange.PULL_MESSAGES,
    (Decoder, "decode"): Decoder.decode,
}


class _Slow(DataSourceReader):
    """Replaces parts of the reader while *inner* reads: workers are shared with the real source."""

    def __init__(self, inner: DataSourceReader, slow: dict[str, Any], *, tuples: bool) -> None:
        self._inner = inner
        self._slow = slow
        self._tuples = tuples

    def partitions(self) -> Any:
        return self._inner.partitions()

    def read(self, partition: InputPartition) -> Iterator[Any]:
        for (owner, name), value in FAST.items():
            setattr(owner, name, self._slow.get(name, value))
        try:
            for batch in self._inner.read(partition):
                if self._tuples:
                    yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
                else:
                    yield batch
        finally:
            for (owner, name), value in FAST.items():
                setattr(owner, name, value)


class PullsSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "martlet-pulls"

    def schema(self) -> StructType:
        return MartletDataSource(self.options).schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        slow = {"BulkReads": exchange.Pulls, "PULL_MESSAGES": 32}
        return _Slow(MartletDataSource(self.options).reader(schema), slow, tuples=False)


class TuplesSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "martlet-tuples"

    def schema(self) -> StructType:
        return MartletDataSource(self.options).schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        slow = {"decode": Decoder.decode_one_by_one}
        return _Slow(MartletDataSource(self.options).reader(schema), slow, tuples=True)
