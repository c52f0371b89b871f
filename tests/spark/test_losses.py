"""Messages that are gone before they are read, and offsets that never had one."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.client.patient import PATIENCE_S, patient
from tests.interop.martlet_process import Martlet
from tests.interop.process import eventually

from martlet.cli.main import main
from martlet_client import TransactionState
from martlet_client.blocking import TransactionProducer
from martlet_client.messages import Message
from martlet_spark.connection import CONNECTIONS
from martlet_spark.errors import DataLost, OptionError

from .clusters import Messages, Stream, batch_of, wait_removed

pytestmark = pytest.mark.spark
RATIOS = {
    "store.disk_used_ratio_max": "0.0001",
    "store.disk_clean_ratio": "0.0001",
    "store.retention_interval_ms": "50",
}
BYTES = 20_000


@pytest.fixture
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Martlet]:
    """A broker with a log of small files."""
    broker = Martlet(tmp_path_factory.mktemp("small"), {"store.segment_bytes": str(1 << 18)})
    try:
        yield broker
    finally:
        CONNECTIONS.close()
        broker.close()


@pytest.fixture
def topic(small: Martlet) -> Messages:
    return Messages(small.name_server)


def test_messages_that_retention_removed_fail_the_query(
    spark: SparkSession,
    small: Martlet,
    topic: Messages,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An archive fails too, and its error names the command's option."""
    archive = ["pipeline", "archive", topic.name, "-n", small.name_server, "--to", str(tmp_path)]
    stream = Stream(topic)
    first = topic.send(5)
    stream.batch()
    assert main(archive) == 0
    start = stream.offset
    topic.send(50, body_bytes=BYTES)
    planned = stream.plan()
    times = [{"startingTimestamp": "1"}, {"startingOffsetsByTimestamp": f'{{"{topic.name}": {{"0": 1, "1": 1}}}}'}]
    assert all(sorted(batch_of(topic, **each)) == sorted(topic.bodies) for each in times)
    forget(small, topic)
    for end in (planned, stream.plan()):
        with pytest.raises(DataLost, match=r"were removed by the broker's retention .* set failOnDataLoss to false"):
            stream.batch(end)
    left = sorted(batch_of(topic))
    assert 0 < len(left) < 100
    assert set(left) < set(topic.bodies)
    for each in times:  # the time of what was removed is where the rest begins
        assert sorted(batch_of(topic, **each)) == left
    with pytest.raises(OptionError, match="startingOffsetsByTimestampStrategy to latest"):
        list(batch_of(topic, startingTimestamp="99999999999999"))
    for end in (planned, stream.plan()):
        lenient = Stream(topic, failOnDataLoss="false")
        lenient.offset = start
        with caplog.at_level(logging.WARNING, "martlet.spark"):
            assert lenient.batch(end) == left
        assert "were removed by the broker's retention" in caplog.text
        caplog.clear()
        lenient.reader.stop()
    stream.reader.stop()
    assert main(archive) == 1
    assert "were removed by the broker's retention" in (said := capsys.readouterr().err)
    assert "; give --allow-loss to continue without them, or begin with a new checkpoint" in said
    assert main([*archive, "--allow-loss"]) == 0
    archived = spark.read.parquet(str(tmp_path)).select("body").collect()
    assert sorted(bytes(row.body) for row in archived) == sorted({*first, *left})


def forget(broker: Martlet, topic: Messages) -> None:
    """Let retention remove the first messages of *topic*, and come back with usual settings."""
    broker.stop()
    usual = dict(broker.settings)
    broker.settings |= RATIOS
    broker.start()
    wait_removed(topic, 10)
    broker.stop()
    broker.settings = usual
    broker.start()


def test_offsets_without_messages_are_no_loss(small: Martlet) -> None:
    """Transactions leave none in their topic: halves, their ends and what was rolled back are in other topics."""
    topic = Messages(small.name_server)
    stream = Stream(topic)
    wanted: list[bytes] = []
    found: list[bytes] = []
    with TransactionProducer(
        patient(small.name_server), "tx", lambda _: TransactionState.UNKNOWN, send_timeout_s=PATIENCE_S
    ) as producer:
        for number in range(40):
            state = TransactionState.COMMIT if number % 3 else TransactionState.ROLLBACK
            message = Message(topic.name, f"{topic.name} martlet/0 {number}".encode())
            producer.send_in_transaction(message, lambda *_, state=state: state)
            if number % 3:
                wanted.append(message.body)
            if number % 10 == 9:
                found += stream.batch()

    def all_found() -> bool | None:
        found.extend(stream.batch())
        return True if len(found) >= len(wanted) else None

    eventually(all_found)  # a commit is not answered
    assert sorted(found) == sorted(wanted)
    assert sorted(batch_of(topic)) == sorted(wanted)
    stream.reader.stop()
