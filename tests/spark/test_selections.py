"""What options select on a running broker, and what they refuse, without a JVM."""

import json
from collections.abc import Sequence

import pytest
from pyspark.sql.streaming.datasource import ReadMaxBytes
from pyspark.sql.types import LongType, StringType, StructField, StructType
from tests.broker_process import broker_process
from tests.client.patient import PATIENCE_S, patient

from martlet_client.blocking import Admin, Producer
from martlet_client.messages import Message
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.connection import CONNECTIONS, BrokerConnection
from martlet_spark.errors import DataLost, OptionError, ReadError
from martlet_spark.read.stream import limited
from martlet_spark.source import BatchReader, MartletDataSource

from .conftest import Topic
from .test_stream_reader import ALL, reader, rows, through_json


def batch(topic: Topic, **options: str) -> BatchReader:
    """A batch reader; an empty text removes an option."""
    given = {"timeoutMs": "60s", **topic.options, **options}
    source = MartletDataSource({name: text for name, text in given.items() if text})
    found = source.reader(source.schema())
    assert isinstance(found, BatchReader)
    return found


def read(topic: Topic, **options: str) -> tuple[list[bytes], int]:
    """The bodies of a batch, and the number of its partitions."""
    found = batch(topic, **options)
    partitions = found.partitions()
    bodies = [body for each in partitions for part in found.read(each) for body in part.column("body").to_pylist()]
    return bodies, len(partitions)


def of_queues(topic: Topic, *numbers: int) -> str:
    return json.dumps({topic.name: {str(queue): number for queue, number in enumerate(numbers)}})


def test_a_partition_has_about_so_many_bytes(topic: Topic) -> None:
    topic.send(40)
    bodies, one_each = read(topic, targetPartitionBytes="1")
    assert sorted(bodies) == sorted(topic.bodies)
    assert one_each == 40
    bodies, count = read(topic, targetPartitionBytes="2k")
    assert sorted(bodies) == sorted(topic.bodies)
    assert 40 * 150 / 2048 <= count <= 40 * 350 / 2048  # of 250 bytes each
    assert read(topic)[1] == 1


@pytest.mark.parametrize("fetch", ["1", "300", "1k", "9999g"])
def test_every_message_comes_however_much_is_asked_for_at_once(topic: Topic, fetch: str) -> None:
    topic.send(40)
    bodies, _ = read(topic, fetchBytes=fetch)
    assert sorted(bodies) == sorted(topic.bodies)


def test_partitions_by_number_and_size_together(topic: Topic) -> None:
    topic.send(40)
    for least, most, count in (("3", "5", 8), ("20", "5", 20), ("1000", "", 40)):
        bodies, found = read(topic, minPartitions=least, maxRecordsPerPartition=most)
        assert sorted(bodies) == sorted(topic.bodies)
        assert found == count


def test_an_end_before_the_start_is_refused(topic: Topic) -> None:
    topic.send(40)
    for start in (of_queues(topic, 5, 5, 5, 5), "latest"):
        with pytest.raises(OptionError, match=r"startingOffsets has \d+ for martlet/1 .*, and endingOffsets 3 before"):
            read(topic, startingOffsets=start, endingOffsets=of_queues(topic, 10, 3, 10, 10))
    assert (
        read(topic, startingOffsets=of_queues(topic, 5, 5, 5, 5), endingOffsets=of_queues(topic, 5, 5, 5, 5))[0] == []
    )
    # Nobody can know which messages there are before a time.
    assert read(topic, startingOffsets=of_queues(topic, 5, 5, 5, 5), endingTimestamp="5")[0] == []


def test_offsets_of_other_topics_and_queues_are_refused(topic: Topic) -> None:
    topic.send(4)
    given = json.loads(of_queues(topic, 0, 0, 0, 0))
    with pytest.raises(OptionError, match=f"startingOffsets names topic 'Other'; the query reads {topic.name}"):
        read(topic, startingOffsets=json.dumps({**given, "Other": {"0": 1}}))
    with pytest.raises(OptionError, match=r"names queue '9', which topic .* does not have; its queues are 0, 1, 2, 3"):
        read(topic, endingOffsets=json.dumps({topic.name: {**given[topic.name], "9": 1}}))
    with pytest.raises(OptionError, match="startingOffsets has offset -3 of queue 0"):
        read(topic, startingOffsets=of_queues(topic, -3, 0, 0, 0))
    with pytest.raises(OptionError, match="option assign names queue '9'"):
        read(topic, subscribe="", assign=json.dumps({topic.name: [9]}))


def test_queues_are_assigned_by_number_or_with_their_broker(topic: Topic) -> None:
    topic.send(40)
    for queues in (["martlet/0", 1], [0, 1], [0, "0", "martlet/1"]):
        assert sorted(read(topic, subscribe="", assign=json.dumps({topic.name: queues}))[0]) == sorted(
            body for number, body in enumerate(topic.bodies) if number % 4 < 2
        )


def test_a_pattern_selects_whole_names(topic: Topic) -> None:
    topic.send(4)
    assert sorted(read(topic, subscribe="", subscribePattern=topic.name)[0]) == sorted(topic.bodies)
    assert read(topic, subscribe="", subscribePattern=topic.name[:-1])[0] == []


def test_an_invalid_expression_is_shown(topic: Topic) -> None:
    topic.send(4)
    with pytest.raises(ReadError, match=r"SQL92 expression '\(number >\)' is invalid at character 10"):
        read(topic, sql="number >")


@pytest.mark.parametrize(
    ("field", "columns", "text"),
    [
        (StructField("offset", LongType(), nullable=False), "", "column 'offset' is NOT NULL in the schema"),
        (StructField("OFFSET", LongType()), "", "column 'OFFSET' does not exist; did you mean 'offset'"),
        (StructField("offset", StringType()), "", "has the type string in the schema; it is bigint, cast it"),
        (StructField("offset", LongType()), "body", "option columns and the schema select different columns, offset"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused(field: StructField, columns: str, text: str) -> None:
    options = {"endpoints": "127.0.0.1:1", "subscribe": "T"} | ({"columns": columns} if columns else {})
    with pytest.raises(OptionError, match=text):
        MartletDataSource(options).reader(StructType([field]))


def test_a_schema_and_the_option_may_select_the_same() -> None:
    options = {"endpoints": "127.0.0.1:1", "subscribe": "T", "columns": "offset"}
    schema = StructType([StructField("offset", LongType())])
    assert isinstance(MartletDataSource(options).reader(schema), BatchReader)


@pytest.mark.parametrize("change", ["subscribe", "pattern", "assign"])
def test_a_checkpoint_with_queues_that_the_options_do_not_select_fails_at_once(topic: Topic, change: str) -> None:
    topic.send(8)
    other = Topic(topic.endpoints)
    offset = reader(topic).latestOffset({"v": 1, "t": {}}, ALL)
    changes = {
        "subscribe": {"subscribe": other.name},
        "pattern": {"subscribe": "", "subscribePattern": other.name},
        "assign": {"subscribe": "", "assign": json.dumps({topic.name: [1, 2, 3]})},
    }
    # A query that waited would wait for an hour.
    changed = reader(topic, **changes[change], timeoutMs="1h")
    with pytest.raises(
        DataLost, match=rf"has queue martlet/0 of topic '{topic.name}', which the options do not select"
    ):
        changed.latestOffset(through_json(offset), ALL)
    lenient = reader(topic, **changes[change], timeoutMs="1h", failOnDataLoss="false")
    topic.send(4)
    other.send(4)
    end = lenient.latestOffset(through_json(offset), ALL)
    wanted = topic.bodies[9:] if change == "assign" else other.bodies
    assert sorted(rows(lenient, offset, end)) == sorted(wanted)


def test_a_topic_that_is_added_to_a_query_is_read_from_its_beginning(topic: Topic) -> None:
    topic.send(4)
    other = Topic(topic.endpoints)
    other.send(4)
    offset = reader(topic).latestOffset({"v": 1, "t": {}}, ALL)
    more = reader(topic, subscribe=f"{topic.name},{other.name}", startingOffsets="latest", columns="body")
    end = more.latestOffset(through_json(offset), ALL)
    assert sorted(rows(more, offset, end)) == sorted(other.bodies)


def test_the_size_of_messages_is_looked_at_when_there_are_some(topic: Topic) -> None:
    """An empty topic has no size: what a query assumed of it must not count for the first messages."""
    found = reader(topic, maxBytesPerTrigger="2k")
    limit = ReadMaxBytes(2048)
    offset = found.latestOffset(found.initialOffset(), limit)
    topic.send(40)
    assert 4 <= len(rows(found, offset, found.latestOffset(through_json(offset), limit))) <= 12  # of 250 bytes each


def test_a_limit_in_bytes_counts_the_messages_of_all_topics(topic: Topic) -> None:
    """One topic with large messages does not make the batches of small ones tiny."""
    large = Topic(topic.endpoints)
    topic.send(400)
    with Producer(patient(topic.endpoints), "spark-tests", send_timeout_s=PATIENCE_S) as producer:
        for _ in range(2):
            producer.send(Message(large.name, b"x" * 20_000))
    both = reader(topic, subscribe=f"{topic.name},{large.name}")
    start = both.initialOffset()
    end = both.latestOffset(start, ReadMaxBytes(70_000))  # of 140,000
    assert 100 <= len(rows(both, start, end)) <= 300


def test_each_queue_has_its_turn_in_batches_that_are_smaller_than_their_number() -> None:
    queues = [MessageQueue("T", "b", number) for number in range(5)]
    left = dict.fromkeys(queues, 2) | {queues[0]: 1000, queues[4]: 0}
    turn = 0
    read_of: dict[MessageQueue, int] = dict.fromkeys(queues, 0)
    for _ in range(4):
        found = limited(left, 2, turn)
        assert sum(found.values()) == 2
        turn += 2
        for queue, count in found.items():
            read_of[queue] += count
            left[queue] += 0 if queue is queues[4] else 1 - count  # new messages arrive all the time
    assert [read_of[queue] for queue in queues] == [2, 2, 2, 2, 0]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many requests were sent at once, by their code; single requests are not in it."""
    found: list[tuple[int, int]] = []
    original = BrokerConnection.request_all

    def request_all(self: BrokerConnection, code: int, ext: Sequence[dict[str, object]]) -> object:
        found.append((int(code), len(ext)))
        return original(self, code, ext)

    monkeypatch.setattr(BrokerConnection, "request_all", request_all)
    return found


def test_many_topics_are_asked_for_at_once(endpoints: str, sent: list[tuple[int, int]]) -> None:
    topics = [Topic(endpoints, queues=1) for _ in range(70)]
    names = ",".join(topic.name for topic in topics)
    topics[7].send(3, queues=(0,))
    sent.clear()
    assert sorted(read(topics[0], subscribe=names)[0]) == sorted(topics[7].bodies)
    assert [count for _, count in sent[:2]] == [70, 70]  # routes, and offsets
    with Admin(patient(endpoints)) as admin:
        admin.delete_topic(topics[3].name)
    with pytest.raises(ReadError, match=f"topic '{topics[3].name}' is unknown to name server"):
        read(topics[0], subscribe=names)


def test_a_broker_without_sql92_says_which_plugin_is_missing(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("plain")
    with broker_process(folder / "data", {"plugins.enabled": '["nameserver", "remoting"]'}) as endpoints:
        topic = Topic(endpoints)
        topic.send(4, tags="red", keys="k")
        assert sorted(read(topic, tags="red")[0]) == sorted(topic.bodies)
        for options in ({"sql": "number > 1"}, {"key": "k"}):
            with pytest.raises(ReadError, match=r"add plugin 'filter_sql92' to plugins\.enabled"):
                read(topic, **options)
        CONNECTIONS.close()
