"""A real RocketMQ broker as the source, and beside Martlet behind one name server."""

import logging
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time_ns
from types import SimpleNamespace
from typing import TypeAlias

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from tests.interop import fetch, rocketmq
from tests.interop.java import Java, Jvm, Queue, message
from tests.interop.martlet_process import Martlet
from tests.interop.mqtt_clients import Link, Message, PahoClients
from tests.interop.process import eventually

from martlet_spark.connection import CONNECTIONS
from martlet_spark.errors import DataLost

from .clusters import Messages, Stream, batch_of, wait_removed

pytestmark = [pytest.mark.spark, pytest.mark.interop, pytest.mark.timeout(900)]

Producer: TypeAlias = tuple[str, int, str]  # the broker and the queue that it sends to, and its name
# On a slow machine, the first batches of a streaming query take minutes.
FIRST_QUERY_S = 700.0
# The defaults of mqtt.topic and mqtt.queues.
MQTT_TOPIC = "mqtt"
MQTT_QUEUES = 8


@dataclass(frozen=True)
class Mixed:
    """Martlet, with its name server, and RocketMQ, which is registered there."""

    ours: Martlet
    theirs: rocketmq.Broker

    @property
    def endpoints(self) -> str:
        return self.ours.name_server


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    folder = tmp_path_factory.mktemp("mixed")
    ours = Martlet(folder / "ours", {"broker.name": "ours", "broker.cluster": "ours"})
    said = {"brokerName": "theirs", "brokerClusterName": "theirs", "enablePropertyFilter": "true"}
    try:
        theirs = rocketmq.Broker(folder / "theirs", ours.name_server, said)
        try:
            yield Mixed(ours, theirs)
            CONNECTIONS.close()
        finally:
            theirs.kill()
    finally:
        ours.close()


@pytest.fixture
def forgetful(mixed: Mixed, tmp_path: Path) -> Iterator[rocketmq.Broker]:
    """A real broker for one test: once asked to delete expired files, it goes on for 20 rounds of 10 s."""
    said = {"brokerName": "forgetful", "brokerClusterName": "forgetful"}
    said |= {"mappedFileSizeCommitLog": str(1 << 20), "fileReservedTime": "0"}
    broker = rocketmq.Broker(tmp_path / "forgetful", mixed.endpoints, said)
    yield broker
    broker.kill()


@pytest.fixture
def theirs(mixed: Mixed) -> Messages:
    """A topic of the real broker."""
    return Messages(mixed.endpoints, ["theirs"])


def frame(spark: SparkSession, topic: Messages, **options: str) -> DataFrame:
    return spark.read.format("martlet").options(**topic.options, **options).load()


def bodies(rows: DataFrame) -> list[bytes]:
    return sorted(bytes(row.body) for row in rows.select("body").collect())


def test_a_batch_has_the_messages_of_rocketmq(spark: SparkSession, theirs: Messages) -> None:
    red = theirs.send(100, tags="red", keys="k1 k2")
    blue = theirs.send(50, tags="blue")
    assert bodies(frame(spark, theirs)) == sorted(theirs.bodies)
    assert bodies(frame(spark, theirs, minPartitions="4")) == sorted(theirs.bodies)
    assert bodies(frame(spark, theirs, tags="blue || green")) == sorted(blue)
    assert bodies(frame(spark, theirs, key="k2")) == sorted(red)
    assert bodies(frame(spark, theirs, sql="number < 3")) == sorted(red[:6] + blue[:6])
    row = frame(spark, theirs, columns="topic,broker,tag,key,properties").where("tag = 'red'").first()
    assert row is not None
    assert (row.topic, row.broker, row.tag, row.key) == (theirs.name, "theirs", "red", "k1 k2")
    assert "UNIQ_KEY" in row.properties
    with pytest.raises(PySparkException, match="SUBSCRIPTION_PARSE_FAILED"):
        frame(spark, theirs, sql="number >").collect()


def test_times_are_found_in_rocketmq(theirs: Messages) -> None:
    theirs.send(20)
    between_ms = eventually(lambda: time_ns() // 1_000_000)
    eventually(lambda: True if time_ns() // 1_000_000 > between_ms + 1 else None)
    later = theirs.send(20)
    found = sorted(batch_of(theirs, startingTimestamp=str(between_ms + 1)))
    assert found == sorted(later)
    assert sorted(batch_of(theirs, endingTimestamp=str(between_ms + 1))) == sorted(set(theirs.bodies) - set(later))


def test_a_stream_has_the_messages_of_rocketmq(spark: SparkSession, theirs: Messages, tmp_path: Path) -> None:
    found: list[tuple[int, list[bytes]]] = []

    def run() -> None:
        limits = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "90"}
        rows = spark.readStream.format("martlet").options(**theirs.options, **limits).load()
        query = rows.writeStream.foreachBatch(lambda batch, number: found.append((number, bodies(batch))))
        query.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start().awaitTermination()

    theirs.send(100)
    run()
    assert [len(batch) for _, batch in found] == [90, 90, 20]
    theirs.send(20)
    run()
    assert sorted(body for _, batch in found for body in batch) == sorted(theirs.bodies)


def test_rocketmq_is_read_by_pulls_without_a_pause(theirs: Messages, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know bulk reads; that answer is enough."""
    theirs.send(40)

    def forbidden(seconds: float) -> None:
        raise AssertionError(f"waited {seconds} s")

    monkeypatch.setattr("martlet_spark.read.exchange.pull_only", pulls := set[str]())
    for module in ("identity", "task", "watching"):
        monkeypatch.setattr(f"martlet_spark.read.{module}.pull_only", pulls)
    with monkeypatch.context() as patch:
        # Not the sleep of the whole process: other threads, such as Py4J's, may sleep.
        patch.setattr("martlet_spark.connection.time", SimpleNamespace(sleep=forbidden, monotonic=monotonic))
        stream = Stream(theirs)
        found = stream.batch()
    assert found == sorted(theirs.bodies)
    assert len(pulls) == 1
    stream.reader.stop()


def test_rocketmq_restarts_within_a_batch(mixed: Mixed, theirs: Messages) -> None:
    theirs.send(200)
    rows = batch_of(theirs, columns="body", fetchBytes="8k")
    found = [next(rows)]
    mixed.theirs.kill()
    mixed.theirs.start()
    found += rows
    assert sorted(found) == sorted(theirs.bodies)


def test_messages_that_rocketmq_has_removed_fail_the_query(
    forgetful: rocketmq.Broker, caplog: pytest.LogCaptureFixture
) -> None:
    topic = Messages(forgetful.name_server, [forgetful.name])
    stream = Stream(topic)
    topic.send(10)
    stream.batch()
    start = stream.offset
    topic.send(40, body_bytes=60_000)  # more than four segments
    planned = stream.plan()
    wait_removed(topic, 15, ask=forgetful.address)
    for end in (planned, stream.plan()):
        with pytest.raises(DataLost, match=r"were removed by the broker's retention .* set failOnDataLoss to false"):
            stream.batch(end)
    lenient = Stream(topic, failOnDataLoss="false")
    lenient.offset = start
    with caplog.at_level(logging.WARNING, "martlet.spark"):
        left = lenient.batch()
    assert 0 < len(left) < 80
    assert set(left) < set(topic.bodies)
    assert "were removed by the broker's retention before the query read them; continuing without them" in caplog.text
    stream.reader.stop()
    lenient.reader.stop()


def test_all_producers_agree_with_a_query_that_aggregates(
    spark: SparkSession, mixed: Mixed, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """A Java producer, the Python client and an MQTT client write while a streaming query counts.

    The first two write to Martlet and to RocketMQ.
    """
    topic = Messages(mixed.endpoints, ["ours", "theirs"])
    options = topic.options | {"subscribe": f"{topic.name},{MQTT_TOPIC}"}
    rows = spark.readStream.format("martlet").options(**options, columns="broker,queue,body", pollMs="100")
    counted = (
        rows.option("startingOffsets", "earliest")
        .load()
        .selectExpr("broker", "queue", "split(decode(body, 'UTF-8'), ' ')[0] AS producer", "crc32(body) AS hash")
        .groupBy("broker", "queue", "producer")
        .agg({"*": "count", "hash": "sum"})
    )
    query = counted.writeStream.outputMode("complete").format("memory").queryName("agreed")
    with ExitStack() as stack:
        running = query.option("checkpointLocation", str(tmp_path)).start()
        stack.callback(running.stop)
        jvm = Jvm(fetch.CLIENT_VERSIONS[-1], tmp_path_factory.mktemp("java"))
        stack.callback(jvm.stop)
        java = Java(jvm, mixed.endpoints)
        devices = PahoClients()
        stack.callback(devices.close)
        device = devices.connect(Link(f"mqtt://{mixed.ours.mqtt}"), "device")
        wanted: dict[Producer, list[int]] = {}
        producer = java.producer()
        for round_ in range(3):
            for broker in ("ours", "theirs"):
                for number in range(2):
                    sent = [f"java {broker}/{number} {round_} {i}".encode() for i in range(50)]
                    producer.send(*(message(topic.name, body) for body in sent), to=Queue(topic.name, broker, number))
                    wanted.setdefault((broker, number, "java"), []).extend(map(zlib.crc32, sent))
            for body in topic.send(25):
                where, _, last = body.split()[1].decode().partition("/")
                wanted.setdefault((where, int(last), topic.name), []).append(zlib.crc32(body))
            for number in range(30):
                name, body = f"room/{number % 5}", f"mqtt {round_} {number}".encode()
                device.publish(Message(name, body, 1 + number % 2))
                queue = zlib.crc32(name.encode()) % MQTT_QUEUES
                wanted.setdefault(("ours", queue, "mqtt"), []).append(zlib.crc32(body))
        java.close()

        def agreed() -> dict[Producer, tuple[int, int]] | None:
            """What the query has counted, once it has as many messages: RocketMQ's queues follow its log."""
            running.processAllAvailable()
            rows = spark.table("agreed").collect()
            counts = {(row.broker, row.queue, row.producer): (row["count(1)"], row["sum(hash)"]) for row in rows}
            return counts if sum(count for count, _ in counts.values()) >= sum(map(len, wanted.values())) else None

        sums = {key: (len(hashes), sum(hashes)) for key, hashes in wanted.items()}
        assert eventually(agreed, FIRST_QUERY_S) == sums
