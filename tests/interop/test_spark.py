"""The Spark source's readers and the sink's writers, without Spark, on RocketMQ's own broker."""

import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import MapType, StringType, StructField, StructType
from tests.client.listening import PATIENCE_S

from martlet_client.blocking import Admin, Producer
from martlet_client.messages import Message
from martlet_spark.connection import CONNECTIONS
from martlet_spark.errors import WriteError
from martlet_spark.source import MartletDataSource

from . import rocketmq
from .process import eventually
from .store_exchange import RealBroker
from .test_python_client import patient


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    CONNECTIONS.close()


def rows(**options: str) -> list[dict[str, object]]:
    """The rows of a batch."""
    source = MartletDataSource(options)
    reader = source.reader(source.schema())
    batches: Iterator[Any] = itertools.chain.from_iterable(map(reader.read, reader.partitions()))
    return [row for batch in batches for row in batch.to_pylist()]


def eventually_rows(count: int, options: dict[str, str]) -> list[dict[str, object]]:
    """The rows of a batch, once it has *count*: RocketMQ's queues follow its log."""

    def look() -> list[dict[str, object]] | None:
        found = rows(**options)
        return found if len(found) >= count else None

    return eventually(look)


def test_a_topic_with_inner_batches_is_read(real_broker: RealBroker, names: rocketmq.NameServer) -> None:
    settings = patient(real_broker())
    with Admin(settings) as admin:
        admin.create_topic("Batches", queues=1, attributes="+queue.type=BatchCQ")
    with Producer(settings, "batches", send_timeout_s=PATIENCE_S) as producer:
        for first in (0, 10, 20):
            numbers = range(first, first + 10)
            messages = [Message("Batches", b"%d" % n, tags=f"T{n}", keys=[f"K{n}"]) for n in numbers]
            producer.send_batch(messages)
        producer.send(Message("Batches", b"30", tags="T30", keys=["K30"]))
    given = {"endpoints": names.address, "subscribe": "Batches", "columns": "offset,body,tag,key"}
    wanted = [{"offset": n, "body": b"%d" % n, "tag": f"T{n}", "key": f"K{n}"} for n in range(31)]
    assert eventually_rows(len(wanted), given) == wanted
    bounds = {"startingOffsets": '{"Batches": {"0": 7}}', "endingOffsets": '{"Batches": {"0": 23}}'}
    assert rows(**given, **bounds) == wanted[7:23]
    assert rows(**given, **bounds, maxRecordsPerPartition="3") == wanted[7:23]


def test_rows_are_written_at_least_once_and_nothing_else(real_broker: RealBroker, names: rocketmq.NameServer) -> None:
    with Admin(patient(real_broker())) as admin:
        admin.create_topic("Bills", queues=2)
    given = {"endpoints": names.address, "topic": "Bills", "timeoutMs": "200s"}
    names_of = ("body", "key", "tag", "properties")
    schema = StructType([StructField(name, StringType()) for name in names_of[:3]])
    schema = schema.add("properties", MapType(StringType(), StringType()))
    numbers = range(3000)
    columns = {name: pa.array([f"{name}{number}" for number in numbers]) for name in names_of[:3]}
    kind = pa.map_(pa.string(), pa.string())
    columns["properties"] = pa.array([[("number", str(number))] for number in numbers], kind)
    batch = pa.RecordBatch.from_pydict(columns)
    refused = MartletDataSource(given).writer(schema, overwrite=False)
    with pytest.raises(WriteError, match="no external transactions; set the option guarantee to at-least-once"):
        refused.write(iter([batch]))
    MartletDataSource({**given, "guarantee": "at-least-once"}).writer(schema, overwrite=False).write(iter([batch]))
    read = {"endpoints": names.address, "subscribe": "Bills", "columns": ",".join(names_of)}

    def values(row: dict[str, Any]) -> tuple[object, ...]:
        return dict(row["properties"])["number"], row["body"], row["key"], row["tag"]

    stored = sorted(values(row) for row in eventually_rows(3000, read))
    assert stored == sorted((str(n), b"body%d" % n, f"key{n}", f"tag{n}") for n in numbers)
