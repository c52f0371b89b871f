"""The sink without a JVM: the writer classes, as Spark calls them, on a running broker."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
from tests.client.patient import patient
from tests.interop.martlet_process import Martlet
from tests.interop.process import eventually

from martlet_client.blocking import PullConsumer
from martlet_columns.schema import PROPERTIES, TIMESTAMP
from martlet_remoting.wire.answers.messages import ReceivedMessage
from martlet_spark.connection import CONNECTIONS
from martlet_spark.errors import OptionError, WriteError
from martlet_spark.source import MartletDataSource
from martlet_spark.write.sink import BatchWriter, WrittenTask
from martlet_spark.write.staging import Transaction

from .clusters import Messages
from .conftest import Topic

TYPES: dict[str, tuple[DataType, pa.DataType]] = {
    "body": (BinaryType(), pa.binary()),
    "key": (StringType(), pa.string()),
    "tag": (StringType(), pa.string()),
    "queue": (IntegerType(), pa.int32()),
    "topic": (StringType(), pa.string()),
    "properties": (MapType(StringType(), StringType()), PROPERTIES),
    "deliver_at": (TimestampType(), TIMESTAMP),
    "delay_level": (IntegerType(), pa.int32()),
    "flag": (IntegerType(), pa.int32()),
}
Columns: TypeAlias = Mapping[str, Sequence[object]]


def stored(endpoints: str, topic: str) -> list[ReceivedMessage]:
    """All messages of *topic*, queue by queue."""
    with PullConsumer(patient(endpoints), "spark-tests") as consumer:
        return [message for queue in consumer.queues(topic) for message in consumer.read(queue, 0)]


def values(topic: Topic | Messages) -> list[int]:
    """The bodies of all messages of *topic*, which are numbers."""
    return sorted(int(message.body) for message in stored(topic.endpoints, topic.name))


def writer(to: Topic | Messages, *names: str, **options: str) -> BatchWriter:
    given = {"endpoints": to.endpoints, "topic": to.name, "guarantee": "at-least-once", **options}
    schema = StructType([StructField(name, TYPES[name][0]) for name in names])
    made = MartletDataSource(given).writer(schema, overwrite=False)
    assert isinstance(made, BatchWriter)
    return made


def frame(columns: Columns) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({name: pa.array(values, TYPES[name][1]) for name, values in columns.items()})


def write(to: Topic | Messages, columns: Columns, **options: str) -> None:
    made = writer(to, *columns, **options)
    made.commit([made.write(iter([frame(columns)]))])


def test_consumers_see_tag_key_and_properties(topic: Topic) -> None:
    columns: Columns = {"body": [b"paid"], "key": ["k1 k2"], "tag": ["blue"], "properties": [[("amount", "7")]]}
    write(topic, columns)
    (message,) = stored(topic.endpoints, topic.name)
    assert (message.body, message.tags, message.keys) == (b"paid", "blue", ("k1", "k2"))
    assert message.properties["amount"] == "7"
    assert message.properties["UNIQ_KEY"] == message.message_id


def test_rows_go_to_the_queues_that_they_name(topic: Topic) -> None:
    write(topic, {"body": [b"%d" % number for number in range(40)], "queue": [number % 3 for number in range(40)]})
    found = stored(topic.endpoints, topic.name)
    assert [message.body for message in found if message.queue.queue_id == 1] == [b"%d" % n for n in range(1, 40, 3)]
    assert {message.queue.queue_id for message in found} == {0, 1, 2}


def test_messages_with_a_time_are_delivered_then(topic: Topic) -> None:
    past = datetime(2020, 1, 1, tzinfo=UTC)
    write(topic, {"body": [b"at once", b"timed"], "deliver_at": [None, past]})

    def delivered() -> list[bytes] | None:
        found = sorted(message.body for message in stored(topic.endpoints, topic.name))
        return found if len(found) == 2 else None

    assert eventually(delivered) == [b"at once", b"timed"]


@pytest.mark.parametrize("guarantee", ["at-least-once", "exactly-once"])
def test_messages_have_the_flag_and_the_delay_that_their_rows_say(topic: Topic, guarantee: str) -> None:
    columns: Columns = {"body": [b"1", b"2", b"3"], "delay_level": [None, 0, 1], "flag": [None, -7, 1 << 30]}
    write(topic, columns, guarantee=guarantee)
    eventually(lambda: values(topic) == [1, 2, 3] or None)
    found = {int(message.body): message for message in stored(topic.endpoints, topic.name)}
    assert [found[number].flag for number in (1, 2, 3)] == [0, -7, 1 << 30]
    assert (found[3].store_ms - found[3].born_ms) >= 1000


def test_a_delay_that_is_none_is_refused(topic: Topic) -> None:
    now = datetime.now(UTC)
    with pytest.raises(WriteError, match="delay_level -1 of a row is negative; use 1 and higher"):
        write(topic, {"body": [b"1", b"2"], "delay_level": [1, -1]})
    with pytest.raises(WriteError, match="a row has both deliver_at and delay_level; set one of them to null"):
        write(topic, {"body": [b"1", b"2"], "delay_level": [1, 1], "deliver_at": [None, now]})
    assert values(topic) == []


def test_a_topic_is_created_by_its_first_row(topic: Topic) -> None:
    name = f"{topic.name}-made"
    write(topic, {"body": [b"x", b"y"], "topic": [name, topic.name]}, topic="")
    assert [message.body for message in stored(topic.endpoints, name)] == [b"x"]


def test_many_rows_in_small_batches(topic: Topic) -> None:
    bodies = [b"body %d" % number for number in range(5_000)]
    write(topic, {"body": bodies, "key": [f"k{number % 100}" for number in range(5_000)]}, batchBytes="10k")
    found = stored(topic.endpoints, topic.name)
    assert sorted(message.body for message in found) == sorted(bodies)
    by_key: dict[str, list[int]] = {}
    for message in found:
        by_key.setdefault(message.keys[0], []).append(int(message.body.split()[1]))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


@pytest.mark.parametrize("guarantee", ["at-least-once", "exactly-once"])
def test_messages_of_exactly_the_limit_are_written_and_larger_ones_name_it(topic: Topic, guarantee: str) -> None:
    limit = 4 << 20
    columns: Columns = {"body": [b"x", bytes(limit), b"y"], "key": ["k"] * 3, "properties": [[("a", "b" * 30_000)]] * 3}
    write(topic, columns, guarantee=guarantee)
    found = stored(topic.endpoints, topic.name)
    assert [len(message.body) for message in found] == [1, limit, 1]
    assert {message.properties["a"] for message in found} == {"b" * 30_000}
    with pytest.raises(
        WriteError, match=r"MESSAGE_ILLEGAL: message body is \d+ bytes; broker.message_bytes_max is 419430"
    ):
        write(topic, {"body": [bytes(limit + 1)]}, guarantee=guarantee)


def test_empty_bodies_are_written_in_transactions_which_others_refuse(topic: Topic) -> None:
    """A query that copies a topic of MQTT clients has them: they clear retained messages."""
    write(topic, {"body": [b"", b"1"], "key": ["a", "b"]}, guarantee="exactly-once")
    assert sorted(message.body for message in stored(topic.endpoints, topic.name)) == [b"", b"1"]
    with pytest.raises(WriteError, match="a row has an empty body, which brokers take with the guarantee exactly-once"):
        write(topic, {"body": [b""]})


def test_what_cannot_be_written_fails_before_anything_is(topic: Topic) -> None:
    for names, options, text in (
        (("body",), {"guarante": "x"}, "option 'guarante' does not exist; did you mean 'guarantee'"),
        (("key",), {}, "column 'body' of type binary or string is missing"),
        (("body",), {"topic": ""}, "column 'topic' of type string is missing"),
        (("body",), {"guarantee": "once"}, "option guarantee 'once' is none of"),
    ):
        with pytest.raises(OptionError, match=text):
            writer(topic, *names, **options)
    with pytest.raises(OptionError, match="a topic cannot be overwritten; use mode append"):
        MartletDataSource({"endpoints": topic.endpoints, "topic": topic.name, "guarantee": "at-least-once"}).writer(
            StructType([StructField("body", BinaryType())]), overwrite=True
        )


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Martlet]:
    broker = Martlet(tmp_path, {"store.flush": "sync"})
    yield broker
    CONNECTIONS.close()
    broker.close()


def test_a_broker_that_is_killed_and_started_again_loses_nothing(own_broker: Martlet) -> None:
    topic = Topic(own_broker.name_server)
    writer(topic, "body").write(restarting(own_broker))
    assert set(values(topic)) == set(range(6000))


def restarting(broker: Martlet) -> Iterator[pa.RecordBatch]:
    """Yield 6 times 1000 rows, and kill the broker twice between."""
    for number in range(6):
        if number in (2, 4):
            broker.kill()
            broker.start()
        yield frame({"body": [b"%d" % (number * 1000 + each) for each in range(1000)]})


# exactly once


class Query:
    """A streaming query that writes to *topic*, as Spark runs its writers: each batch has two tasks.

    *began_ms* is when its run began, 0 to say nothing of it.
    """

    def __init__(
        self, topic: Topic | Messages, name: str, run: str = "run-1", began_ms: int = 0, **options: str
    ) -> None:
        self.began_ms = began_ms
        self.topic = topic
        self.name = name
        self.run = run
        self.in_task = options.get("guarantee") == "idempotent"
        self.writer = writer(topic, "body", **{"guarantee": "exactly-once", **options})

    def task(self, batch: int, *numbers: int, in_task: bool = False) -> WrittenTask:
        rows = frame({"body": [b"%d" % number for number in numbers]}) if numbers else None
        transaction = Transaction(self.name, batch, self.run, self.began_ms)
        return self.writer.write_rows(iter([rows] if rows else []), lambda: transaction, in_task=in_task)

    def batch(self, batch: int, *numbers: int) -> list[WrittenTask | None]:
        middle = len(numbers) // 2
        return [self.task(batch, *numbers[:middle]), self.task(batch, *numbers[middle:])]


def test_rows_appear_with_the_commit_and_once(topic: Topic) -> None:
    query = Query(topic, topic.name)
    messages = query.batch(0, *range(100))
    assert values(topic) == []
    for _ in range(3):
        query.writer.commit_parts(messages)
        query.writer.abort_parts(messages)  # Spark does this after a commit whose answer was lost
        assert values(topic) == list(range(100))


def test_a_batch_that_is_written_again_after_its_commit_has_no_effect(topic: Topic) -> None:
    query = Query(topic, topic.name)
    query.writer.commit_parts(query.batch(4, *range(10)))
    again = Query(topic, topic.name, "run-2")
    messages = again.batch(4, *reversed(range(10)))  # in another order, and by other tasks
    assert [each.parts for each in messages if each] == [(), ()]
    again.writer.commit_parts(messages)
    again.writer.commit_parts(again.batch(5, *range(10, 20)))
    assert values(topic) == list(range(20))


OLDER = "the checkpoint was restored or copied, or belongs to a second query"


@pytest.mark.parametrize("guarantee", ["exactly-once", "idempotent"])
def test_a_query_with_an_older_checkpoint_fails_instead_of_leaving_rows_out(topic: Topic, guarantee: str) -> None:
    query = Query(topic, topic.name, guarantee=guarantee)
    for batch in range(3):
        query.writer.commit_parts([query.task(batch, *range(batch * 10, batch * 10 + 10), in_task=query.in_task)])
    older = Query(topic, topic.name, "run-2", guarantee=guarantee)
    text = f"batch 1 of query '{topic.name}' is older than 2, the last one that was written: {OLDER}"
    with pytest.raises(WriteError, match=f"{text}, .*; begin with a new checkpoint"):
        older.task(1, 30, 31, in_task=older.in_task)
    assert values(topic) == list(range(30))


@pytest.mark.parametrize("guarantee", ["exactly-once", "idempotent"])
def test_the_last_batch_with_other_rows_fails_instead_of_leaving_them_out(topic: Topic, guarantee: str) -> None:
    query = Query(topic, topic.name, guarantee=guarantee)
    query.writer.commit_parts([query.task(2, 1, 2, 3, in_task=query.in_task)])
    for number, rows in enumerate(((1, 2), (1, 2, 4), (1, 2, 3, 3))):
        older = Query(topic, topic.name, f"run-{number + 2}", guarantee=guarantee)
        text = rf"batch 2 of query '.*' was written before with other rows \(3 rows then, {len(rows)} now\): {OLDER}"
        with pytest.raises(WriteError, match=f"{text}.* or set the option changingRows"):
            older.writer.commit_parts([older.task(2, *rows, in_task=older.in_task)])
    changing = Query(topic, topic.name, "run-9", guarantee=guarantee, changingRows="true")
    changing.writer.commit_parts([changing.task(2, 7, 8, in_task=changing.in_task)])
    changing.writer.commit_parts([changing.task(3, 9, in_task=changing.in_task)])
    assert values(topic) == [1, 2, 3, 9]


def numbered(topic: Topic, version: int, *numbers: int, **options: str) -> None:
    """Write *numbers* as a batch that the user has named after the topic and numbered."""
    columns: Columns = {"body": [b"%d" % number for number in numbers]}
    options = {"guarantee": "exactly-once", "txnAppId": topic.name, "txnVersion": str(version), **options}
    write(topic, columns, **options)


def test_a_batch_that_the_user_numbers_is_written_once(topic: Topic) -> None:
    for version in (0, 0, 1, 5, 5):
        numbered(topic, version, version, 10 + version)
    assert values(topic) == [0, 1, 5, 10, 11, 15]
    with pytest.raises(WriteError, match=f"txnVersion 5 of txnAppId '{topic.name}' was written before with other rows"):
        numbered(topic, 5, 6)
    with pytest.raises(WriteError, match=r"txnVersion 4 of txnAppId .* is older than 5, .*; choose another txnAppId"):
        numbered(topic, 4, 6)
    numbered(topic, 5, 6, changingRows="true")
    numbered(topic, 4, 6, txnAppId=f"{topic.name}-2")
    assert values(topic) == [0, 1, 5, 6, 10, 11, 15]


def test_a_batch_that_is_written_again_elsewhere_fences_the_one_before(topic: Topic) -> None:
    options = {"guarantee": "exactly-once", "txnAppId": topic.name, "txnVersion": "3"}
    old, rows = writer(topic, "body", **options), frame({"body": [b"1"]})
    message = old.write(iter([rows]))
    numbered(topic, 3, 1)
    with pytest.raises(WriteError, match="only its newest run can write"):
        old.commit([message])
    assert values(topic) == [1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"txnAppId": "a"}, "txnAppId and txnVersion belong together"),
        ({"txnVersion": "0"}, "txnAppId and txnVersion belong together"),
        ({"txnAppId": "a", "txnVersion": "-1"}, "option txnVersion '-1' is not between"),
        ({"txnAppId": "x" * 256, "txnVersion": "1"}, "over 255 characters"),
        ({"txnAppId": "a", "txnVersion": "1", "guarantee": "at-least-once"}, "contradict each other"),
    ],
)
def test_a_wrong_number_of_a_batch_is_refused(topic: Topic, options: dict[str, str], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        writer(topic, "body", **{"guarantee": "exactly-once", **options})


def test_a_stream_numbers_its_batches_itself(topic: Topic) -> None:
    source = MartletDataSource({"endpoints": topic.endpoints, "topic": topic.name, "txnAppId": "a", "txnVersion": "1"})
    with pytest.raises(OptionError, match="are for batches, as within foreachBatch"):
        source.streamWriter(StructType([StructField("body", BinaryType())]), overwrite=False)


def test_what_a_batch_had_is_known_after_a_restart_of_the_broker(own_broker: Martlet) -> None:
    topic = Topic(own_broker.name_server)
    query = Query(topic, "query")
    query.writer.commit_parts(query.batch(0, 1, 2))
    own_broker.kill()
    own_broker.start()
    older = Query(topic, "query", "run-2")
    with pytest.raises(WriteError, match="was written before with other rows"):
        older.writer.commit_parts(older.batch(0, 3, 4))
    again = Query(topic, "query", "run-3")
    again.writer.commit_parts(again.batch(0, 1, 2))
    assert values(topic) == [1, 2]


def test_another_query_writes_the_same_batch_again(topic: Topic) -> None:
    for name in ("a", "b"):
        query = Query(topic, f"{topic.name}-{name}")
        query.writer.commit_parts(query.batch(0, 1, 2))
    assert values(topic) == [1, 1, 2, 2]


def test_an_older_run_can_neither_write_nor_commit(topic: Topic) -> None:
    old, new = Query(topic, topic.name, "run-1"), Query(topic, topic.name, "run-2")
    staged = old.batch(0, 1, 2)
    messages = new.batch(0, 3, 4)
    with pytest.raises(WriteError, match=r"ILLEGAL_OPERATION: .* only its newest run can write"):
        old.batch(0, 5, 6)
    with pytest.raises(WriteError, match=r"ILLEGAL_OPERATION: .* only its newest run can write"):
        old.writer.commit_parts(staged)
    old.writer.abort_parts(staged)
    new.writer.commit_parts(messages)
    assert values(topic) == [3, 4]


def test_a_task_of_an_older_run_that_is_the_first_at_a_broker_does_not_stop_the_newer_run(topic: Topic) -> None:
    new = Query(topic, topic.name, "run-2", 2_000)
    staged = new.batch(0, 3, 4)
    late = Query(topic, topic.name, "run-1", 1_000)  # nothing of its run has reached this broker
    with pytest.raises(WriteError, match=r"began 1 s before the newest run .* only its newest run can write"):
        late.batch(0, 1, 2)
    new.writer.commit_parts(staged)
    assert values(topic) == [3, 4]


def test_failed_attempts_and_aborted_batches_are_never_seen(topic: Topic) -> None:
    query = Query(topic, topic.name)
    query.task(0, 1, 2)  # an attempt that Spark gave up
    query.writer.commit_parts([query.task(0, 1, 2), None, query.task(0)])
    aborted = query.batch(1, 8, 9)
    query.writer.abort_parts([*aborted, None])
    with pytest.raises(WriteError, match=r"QUERY_NOT_FOUND: .*; start the query again"):
        query.writer.commit_parts(aborted)
    query.writer.commit_parts([])
    query.writer.commit_parts(query.batch(1, 3, 4))
    assert values(topic) == [1, 2, 3, 4]


def test_a_batch_has_rows_for_several_topics_or_none(topic: Topic) -> None:
    other = Topic(topic.endpoints)
    made = writer(topic, "body", "topic", topic="", guarantee="exactly-once")
    rows = frame({"body": [b"1", b"2", b"3"], "topic": [topic.name, other.name, topic.name]})
    message = made.write(iter([rows]))
    assert values(topic) == values(other) == []
    made.commit([message, made.write(iter([]))])
    assert (values(topic), values(other)) == ([1, 3], [2])


def test_timed_rows_are_part_of_the_transaction(topic: Topic) -> None:
    made = writer(topic, "body", "deliver_at", guarantee="exactly-once")
    past = datetime(2020, 1, 1, tzinfo=UTC)
    made.commit([made.write(iter([frame({"body": [b"1", b"2"], "deliver_at": [None, past]})]))])
    assert eventually(lambda: values(topic) == [1, 2] or None)


def test_what_was_staged_survives_kill_9(own_broker: Martlet) -> None:
    topic = Topic(own_broker.name_server)
    query = Query(topic, "query")
    message = query.writer.write_rows(restarting(own_broker), lambda: Transaction("query", 0, "run-1"), in_task=False)
    own_broker.kill()
    own_broker.start()
    for _ in range(2):
        query.writer.commit_parts([message])
        own_broker.kill()
        own_broker.start()
    assert [each.parts for each in query.batch(0, 1, 2) if each] == [(), ()]
    assert values(topic) == list(range(6000))


def test_a_query_fails_with_the_reason_while_the_disk_is_full_and_later_writes_each_row_once(
    own_broker: Martlet,
) -> None:
    topic = Topic(own_broker.name_server)
    first = Query(topic, "query", timeoutMs="1s")
    first.writer.commit_parts(first.batch(0, 1, 2))
    staged = first.batch(1, *range(3, 100))
    fill_disk(own_broker, "0.000001")
    for work in (
        lambda: first.batch(1, *range(3, 100)),
        lambda: first.writer.commit_parts(staged),
        lambda: Query(topic, "query", "run-2", timeoutMs="1s").batch(1, *range(3, 100)),
    ):
        with pytest.raises(WriteError, match=r"for 1 s: .*SERVICE_NOT_AVAILABLE: .*disk"):
            work()
    fill_disk(own_broker, "0.999999")
    again = Query(topic, "query", "run-3")
    for _ in range(2):
        again.writer.commit_parts(again.batch(1, *range(3, 100)))
    assert values(topic) == list(range(1, 100))


def fill_disk(broker: Martlet, full_ratio: str) -> None:
    """Restart *broker*; above this usage of the disk it refuses writes."""
    broker.stop()
    broker.settings["store.disk_full_ratio"] = full_ratio
    broker.start()


def test_an_idempotent_task_writes_each_batch_once(topic: Topic) -> None:
    for attempt, (batch, numbers) in enumerate(((0, (1, 2)), (0, (1, 2)), (1, (3, 4)))):
        query = Query(topic, topic.name, f"attempt-{attempt}", guarantee="idempotent")
        assert query.task(batch, *numbers, in_task=True) == WrittenTask()
    assert values(topic) == [1, 2, 3, 4]


def test_a_broker_without_transactions_says_what_to_set(tmp_path: Path) -> None:
    broker = Martlet(tmp_path, {"plugins.enabled": '["remoting", "nameserver"]'})
    try:
        query = Query(Topic(broker.name_server), "query")
        with pytest.raises(WriteError, match="no external transactions; set the option guarantee to at-least-once"):
            query.batch(0, 1, 2)
    finally:
        CONNECTIONS.close()
        broker.close()
