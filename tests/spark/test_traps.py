"""Traps of Spark's Python data sources; each was seen in PySpark 4.2.0 or 4.3.0, most of them lose rows silently.

- A reader that defines ``pushFilters`` fails all queries by default, and gets filters of other uses of a frame if they
  are allowed: below, and ``test_source.py::test_a_frame_can_be_filtered_in_any_order``.
- ``initialOffset`` is called twice without any crash, and again when batch 0 is replayed, and "latest" moves:
  ``test_stream_reader.py::test_the_beginning_is_kept_although_spark_asks_for_it_again``,
  ``test_source.py::test_a_stream_that_begins_at_the_end_loses_nothing_in_a_crash``.
- A replay may have a start behind its end: below.
- ``prepareForTriggerAvailableNow`` is called before ``initialOffset``:
  ``test_stream_reader.py::test_a_query_for_what_is_available_ends_there``.
- Batches must have exactly the schema that ``to_arrow_schema`` makes: below.
- An idle query asks 90 times a second for offsets: below.
- ``commit`` does not come while a query is idle, so a group has the offset that ``latestOffset`` gets:
  ``test_stream_reader.py::test_the_progress_is_shown_as_that_of_a_group``.
- Spark passes ``checkpointLocation`` and ``queryName`` as options: below.
- ``stop`` is never called when a query stops: below.
- A batch without partitions gets one of Spark's own: below.
- Brokers answer pipelined requests in any order:
  ``test_exchange.py::test_answers_in_any_order_belong_to_their_requests``.
- RocketMQ sends 32 messages a pull: ``test_exchange.py::test_a_read_that_ends_early_is_continued``,
  ``tests/interop/test_spark.py``.
- ``CREATE TABLE`` loses its options: ``test_refusals.py::test_a_table_loses_its_options``.
- ``abort`` is called after a ``commit`` that raised: the tests of the sink.
"""

import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType
from tests.broker_process import broker_process
from tests.client.patient import patient

from martlet_client.blocking import Admin
from martlet_columns.schema import COLUMNS, arrow_schema
from martlet_spark.columns import DEFAULT
from martlet_spark.connection import CONNECTIONS, BrokerConnection
from martlet_spark.read.batch import spark_schema
from martlet_spark.read.offsets import encode
from martlet_spark.read.stream import StreamReader
from martlet_spark.source import BatchReader, MartletDataSource

from .conftest import Topic
from .test_stream_reader import ALL, reader, rows, through_json


def test_readers_define_no_method_that_is_a_trap() -> None:
    assert BatchReader.pushFilters is DataSourceReader.pushFilters
    assert StreamReader.commit is DataSourceStreamReader.commit


@pytest.mark.parametrize("names", [DEFAULT, tuple(COLUMNS), *((name,) for name in COLUMNS)])
def test_the_schema_is_the_one_that_spark_makes(names: tuple[str, ...]) -> None:
    assert arrow_schema(names).equals(to_arrow_schema(spark_schema(names), timezone="UTC"), check_metadata=True)


def test_options_of_spark_itself_are_passed_over(topic: Topic) -> None:
    own = {"checkpointlocation": "/checkpoint", "queryname": "copy"}
    source = MartletDataSource({**topic.options, **own})
    reader = source.reader(source.schema())
    assert list(reader.read(InputPartition(None))) == []  # a partition of Spark's own
    source.streamReader(source.schema())
    sink = MartletDataSource({"endpoints": topic.endpoints, "topic": topic.name, **own})
    for write in (sink.writer, sink.streamWriter):
        write(StructType().add("body", "binary"), overwrite=False)


def test_a_start_behind_its_end_has_no_messages(topic: Topic) -> None:
    topic.send(8)
    found = reader(topic)
    end = found.latestOffset(found.initialOffset(), ALL)
    topic.send(4)
    end = found.latestOffset(through_json(end), ALL)
    queues = {name: offset + 5 for name, offset in end["t"][topic.name].items()}
    planned = found.partitions({"v": 1, "t": {topic.name: queues}}, through_json(end))
    assert [each.value for each in planned] == [[]]


def requests() -> int:
    """How many requests the driver has sent on the connections that are idle now."""
    return sum(connection._opaque for idle in CONNECTIONS._idle.values() for connection in idle)


def idle_requests(found: StreamReader, offset: dict[str, Any]) -> int:
    """How many requests ten looks of an idle query send, if its routes do not grow old; each look takes 20 ms."""
    limit = found.getDefaultReadLimit()
    found.latestOffset(through_json(offset), limit)
    before, began = requests(), time.monotonic()
    for _ in range(10):
        assert found.latestOffset(through_json(offset), limit) == offset
    assert time.monotonic() - began >= 10 * 0.02
    return requests() - before


@pytest.fixture
def lasting_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("martlet_spark.read.topics.ROUTES_S", 3600.0)


@pytest.mark.usefixtures("lasting_routes")
def test_an_idle_query_sends_nothing(topic: Topic) -> None:
    topic.send(4)
    found = reader(topic, pollMs="20ms")
    assert idle_requests(found, found.latestOffset(found.initialOffset(), ALL)) == 0
    topic.send(1)
    offset = found.latestOffset(found.initialOffset(), ALL)
    assert sum(offset["t"][topic.name].values()) == 5


@pytest.mark.usefixtures("lasting_routes")
def test_a_query_that_waits_for_more_sends_one_request_for_each_poll(topic: Topic) -> None:
    topic.send(4)
    found = reader(topic, pollMs="20ms", minOffsetsPerTrigger="100", maxTriggerDelay="1h")
    assert idle_requests(found, encode(dict.fromkeys(found._driver.subscribed.bounds(), 0))) == 10


@pytest.mark.usefixtures("lasting_routes")
def test_queues_over_the_limit_of_waiting_requests_are_looked_at(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("martlet_spark.read.watching.WATCHED_MAX", 2)
    found = reader(topic, pollMs="20ms")
    offset = found.latestOffset(found.initialOffset(), ALL)
    assert idle_requests(found, offset) == 10
    topic.send(1, queues=(3,))
    assert rows(found, offset, found.latestOffset(through_json(offset), ALL)) == topic.bodies


@pytest.mark.usefixtures("lasting_routes")
def test_a_broker_that_lets_few_requests_wait_is_polled_no_faster(tmp_path: Path) -> None:
    with broker_process(tmp_path / "data", {"remoting.bulk_reads_peer_max": "2"}) as endpoints:
        few = Topic(endpoints)
        found = reader(few, pollMs="20ms")
        offset = found.latestOffset(found.initialOffset(), ALL)
        assert idle_requests(found, offset) <= 10
        few.send(1, queues=(3,))
        assert rows(found, offset, found.latestOffset(through_json(offset), ALL)) == few.bodies
        found.stop()
        CONNECTIONS.close()


def test_a_pattern_without_topics_is_polled_no_faster(topic: Topic) -> None:
    found = reader(topic, subscribe="", subscribePattern="no-such-topic-.*", pollMs="20ms")
    began = time.monotonic()
    for _ in range(5):
        assert found.latestOffset(found.initialOffset(), ALL) == found.initialOffset()
    assert time.monotonic() - began >= 5 * 0.02


def test_a_reader_that_nobody_stops_needs_no_stop(topic: Topic) -> None:
    """Spark kills its process: what it has at the broker ends with its connections."""
    topic.send(4)
    found = reader(topic, pollMs="1ms", group=f"{topic.name}-g")
    offset = found.latestOffset(found.initialOffset(), ALL)
    found.latestOffset(through_json(offset), ALL)
    for connection in found._driver.watch._connections.values():
        assert isinstance(connection, BrokerConnection)
        connection.close()
    with Admin(patient(topic.endpoints)) as admin:
        assert {lag.consumer_offset for lag in admin.group_lag(f"{topic.name}-g") if lag.queue.topic == topic.name} == {
            1
        }
    again = reader(topic, group=f"{topic.name}-g")
    assert again.latestOffset(through_json(offset), ALL) == offset


@pytest.mark.spark
def test_a_batch_without_messages_is_empty(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    load = spark.read.format("martlet").options(**topic.options)
    assert load.load().collect() == []
    topic.send(4)
    assert load.option("startingOffsets", "latest").load().collect() == []
