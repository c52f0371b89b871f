"""The streaming reader as Spark's driver calls it, without a JVM: which messages each batch has."""

import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows
from tests.client.patient import patient
from tests.interop.process import eventually

from martlet_client.blocking import Admin, PullConsumer
from martlet_spark.cluster import Cluster
from martlet_spark.errors import DataLost, OptionError, ReadError
from martlet_spark.read.stream import StreamReader
from martlet_spark.source import MartletDataSource

from .conftest import Topic

ALL = ReadAllAvailable()
Offset = Mapping[str, Any]


_opened: list[StreamReader] = []


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    """Stop all readers after each test; Spark ends their process instead."""
    yield
    while _opened:
        _opened.pop().stop()


def reader(topic: Topic, **options: str) -> StreamReader:
    given = {"startingOffsets": "earliest", "pollMs": "0", "timeoutMs": "60s", **topic.options, **options}
    source = MartletDataSource({name: text for name, text in given.items() if text})
    found = source.streamReader(source.schema())
    assert isinstance(found, StreamReader)
    _opened.append(found)
    return found


def through_json(offset: Offset) -> dict[str, Any]:
    """*offset* as Spark returns it from its checkpoint."""
    found: dict[str, Any] = json.loads(json.dumps(offset))
    return found


def rows(found: StreamReader, start: Offset, end: Offset) -> list[bytes]:
    """The bodies of a batch, read by another reader as in an executor."""
    bodies: list[bytes] = []
    for partition in found.partitions(through_json(start), through_json(end)):
        for batch in found.read(partition):
            bodies += batch.column("body").to_pylist()
    return bodies


def test_each_message_is_in_one_batch(topic: Topic) -> None:
    found = reader(topic)
    offset = found.initialOffset()
    for _ in range(3):
        topic.send(10)
        end = found.latestOffset(through_json(offset), ALL)
        assert sorted(rows(found, offset, end)) == sorted(topic.bodies[-10:])
        assert found.latestOffset(through_json(end), ALL) == end
        offset = end


@pytest.mark.parametrize("is_consumed", [False, True])
def test_queues_that_are_taken_away_are_read_to_their_end(topic: Topic, is_consumed: bool) -> None:
    """Also when all other consumers have read them, so that no route has them any more."""
    topic.send(10)
    found = reader(topic)
    offset = found.latestOffset(found.initialOffset(), ALL)
    topic.send(10)
    topic.create(1)
    if is_consumed:
        with Admin(patient(topic.endpoints)) as admin, PullConsumer(patient(topic.endpoints), topic.name) as other:
            admin.create_group(topic.name)
            for queue in other.queues(topic.name):
                other.commit(queue, 5)
            eventually(lambda: len(admin.topic_route(topic.name).read_queues(topic.name)) == 1)
        found = reader(topic)
    end = found.latestOffset(through_json(offset), ALL)
    assert sorted(rows(found, offset, end)) == sorted(topic.bodies[10:])
    topic.create(4)
    topic.send(10)
    last = found.latestOffset(through_json(end), ALL)
    assert sorted(rows(found, end, last)) == sorted(topic.bodies[20:])


def test_the_beginning_is_kept_although_spark_asks_for_it_again(topic: Topic) -> None:
    """Spark plans the first batch from the second initial offset, and after a crash from a third."""
    topic.send(5)
    found = reader(topic, startingOffsets="latest")
    first = found.initialOffset()
    end = found.latestOffset(first, ALL)
    assert rows(found, first, end) == []
    topic.send(5)
    after = found.latestOffset(through_json(end), ALL)
    topic.send(5)  # nobody may take them for messages of the batch that is planned again
    for again in (found, reader(topic, startingOffsets="latest")):
        start = again.initialOffset()
        assert rows(again, start, end) == []
        assert sorted(rows(again, end, after)) == sorted(topic.bodies[5:10])
        if again is not found:
            later = again.latestOffset(through_json(end), ALL)
            assert sorted(rows(again, end, later)) == sorted(topic.bodies[5:])


def test_a_batch_that_is_planned_again_has_the_same_messages(topic: Topic) -> None:
    topic.send(20)
    found = reader(topic, startingOffsets="earliest")
    start = found.initialOffset()
    end = found.latestOffset(start, ALL)
    topic.send(20)
    assert sorted(rows(reader(topic), start, end)) == sorted(topic.bodies[:20])


@pytest.mark.parametrize("most", [1, 7, 20, 1000])
def test_a_batch_has_at_most_so_many_messages(topic: Topic, most: int) -> None:
    topic.send(25, queues=(0, 0, 0, 0, 1))
    found = reader(topic, maxOffsetsPerTrigger=str(most))
    limit = found.getDefaultReadLimit()
    assert limit == ReadMaxRows(most)
    offset, bodies = found.initialOffset(), []
    while (end := found.latestOffset(through_json(offset), limit)) != offset:
        batch = rows(found, offset, end)
        assert 0 < len(batch) <= most
        bodies += batch
        offset = end
    assert sorted(bodies) == sorted(topic.bodies)


def test_spark_may_ask_for_everything_despite_the_limit(topic: Topic) -> None:
    topic.send(25)
    found = reader(topic, maxOffsetsPerTrigger="3")
    start = found.initialOffset()
    assert len(rows(found, start, found.latestOffset(start, ALL))) == 25


def test_a_batch_has_about_so_many_bytes(topic: Topic) -> None:
    topic.send(40)
    found = reader(topic, maxBytesPerTrigger="2k")
    limit = found.getDefaultReadLimit()
    assert limit == ReadMaxBytes(2048)
    start = found.initialOffset()
    batch = rows(found, start, found.latestOffset(start, limit))
    assert 4 <= len(batch) <= 12  # of 250 bytes each


def test_a_batch_waits_for_enough_messages(topic: Topic) -> None:
    found = reader(topic, minOffsetsPerTrigger="10", maxTriggerDelay="1h")
    limit = found.getDefaultReadLimit()
    assert limit == ReadMinRows(10)
    topic.send(9)
    offset = found.initialOffset()
    assert rows(found, offset, found.latestOffset(offset, limit)) == []
    topic.send(1)
    assert len(rows(found, offset, found.latestOffset(offset, limit))) == 10


def test_a_batch_does_not_wait_for_ever(topic: Topic) -> None:
    found = reader(topic, minOffsetsPerTrigger="10", maxTriggerDelay="0ms")
    topic.send(9)
    offset = found.initialOffset()
    assert len(rows(found, offset, found.latestOffset(offset, found.getDefaultReadLimit()))) == 9


def test_a_query_for_what_is_available_ends_there(topic: Topic) -> None:
    topic.send(10)
    found = reader(topic, minOffsetsPerTrigger="4", maxOffsetsPerTrigger="4")
    found.prepareForTriggerAvailableNow()
    topic.send(10)
    limit = found.getDefaultReadLimit()
    offset, bodies = found.initialOffset(), []
    while (end := found.latestOffset(through_json(offset), limit)) != offset:
        bodies += rows(found, offset, end)
        offset = end
    assert sorted(bodies) == sorted(topic.bodies[:10])


def test_queues_that_are_added_are_read_from_their_beginning(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("martlet_spark.read.topics.ROUTES_S", 0.0)
    topic.send(4)
    found = reader(topic, startingOffsets="latest")
    offset = found.latestOffset(found.initialOffset(), ALL)
    topic.create(queues=6)
    topic.send(12, queues=range(6))
    start = offset

    def with_new_queues() -> dict[str, Any] | None:
        nonlocal offset
        offset = found.latestOffset(through_json(offset), ALL)
        return offset if len(offset["t"][topic.name]) == 6 else None

    eventually(with_new_queues)  # the name server has to hear of them
    assert set(offset["new"][topic.name]) == {"martlet/4", "martlet/5"}
    assert sorted(rows(found, start, offset)) == sorted(topic.bodies[4:])


def test_topics_that_match_later_are_read_from_their_beginning(endpoints: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("martlet_spark.read.topics.ROUTES_S", 0.0)
    first = Topic(endpoints)
    found = reader(first, subscribe="", subscribePattern=f"{first.name}.*", startingOffsets="latest")
    offset = found.latestOffset(found.initialOffset(), ALL)
    later = Topic(endpoints)
    later.name = f"{first.name}-later"
    later.create(4)
    later.send(8)
    end = found.latestOffset(through_json(offset), ALL)
    assert sorted(rows(found, offset, end)) == sorted(later.bodies)
    assert set(found.reportLatestOffset()["t"]) == {first.name, later.name}  # type: ignore[index]


def test_the_first_topic_of_a_query_that_found_none_is_read_from_its_beginning(
    endpoints: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("martlet_spark.read.topics.ROUTES_S", 0.0)
    later = Topic(endpoints)
    pattern = f"{later.name}-later"
    found = reader(later, subscribe="", subscribePattern=pattern, startingOffsets="latest")
    start = found.initialOffset()
    assert found.latestOffset(start, ALL) == start
    later.name = pattern
    later.create(4)
    later.send(8)
    assert sorted(rows(found, start, found.latestOffset(start, ALL))) == sorted(later.bodies)


def test_a_topic_that_was_created_again_fails_the_query(topic: Topic) -> None:
    topic.send(10)
    found = reader(topic)
    offset = found.latestOffset(found.initialOffset(), ALL)
    topic.delete()
    topic.create(4)
    topic.send(4)
    with pytest.raises(DataLost, match="the topic was created again, or the broker lost messages; set failOnDataLoss"):
        found.latestOffset(through_json(offset), ALL)
    lenient = reader(topic, failOnDataLoss="false")
    end = lenient.latestOffset(through_json(offset), ALL)
    assert sorted(rows(lenient, offset, end)) == sorted(topic.bodies[-4:])


def create_again(topic: Topic, count: int) -> None:
    topic.delete()
    topic.create(4)
    topic.send(count)


def test_a_topic_that_was_created_again_with_more_messages_fails_the_query(topic: Topic) -> None:
    """Its offsets look as if the query had only to continue, and would miss those before."""
    topic.send(10)
    found = reader(topic)
    offset = found.latestOffset(found.initialOffset(), ALL)
    create_again(topic, 15)
    text = f"topic '{topic.name}' was deleted and created again: message 2 of queue martlet/[01] is not the one that"
    for strict in (found, reader(topic)):
        with pytest.raises(DataLost, match=text):
            strict.latestOffset(through_json(offset), ALL)
    lenient = reader(topic, failOnDataLoss="false")
    end = lenient.latestOffset(through_json(offset), ALL)
    assert sorted(rows(lenient, offset, end)) == sorted(topic.bodies[-15:])
    topic.send(5)
    after = lenient.latestOffset(through_json(end), ALL)
    assert sorted(rows(lenient, end, after)) == sorted(topic.bodies[-5:])


def test_a_batch_that_is_planned_again_is_not_read_from_a_topic_that_was_created_again(topic: Topic) -> None:
    topic.send(10)
    found = reader(topic)
    start = found.initialOffset()
    end = found.latestOffset(start, ALL)
    create_again(topic, 15)
    with pytest.raises(DataLost, match="was deleted and created again"):
        rows(reader(topic), start, end)


def test_the_offset_of_an_earlier_version_does_not_say_which_message_was_the_last(topic: Topic) -> None:
    topic.send(8)
    offset = reader(topic).latestOffset({"v": 1, "t": {}}, ALL)
    topic.send(4)
    found = reader(topic)
    end = found.latestOffset({"v": 1, "t": offset["t"]}, ALL)
    assert sorted(rows(found, offset, end)) == sorted(topic.bodies[-4:])
    assert [*end["last"]] == [topic.name]


def test_a_query_with_available_now_reads_a_topic_that_appears_while_it_starts(endpoints: str) -> None:
    """Name servers that have just started know no topic at the first look, and all at the second."""
    later = Topic(endpoints)
    name = f"{later.name}-later"
    for options in ({"subscribe": name}, {"subscribe": "", "subscribePattern": name}):
        found = reader(later, timeoutMs="1s", **options)
        found.prepareForTriggerAvailableNow()
        start = found.initialOffset()
        later.name = name
        later.create(4)
        later.send(8)
        end = found.latestOffset(start, ALL)
        assert sorted(rows(found, start, end)) == sorted(later.bodies)
        later.send(4)  # too late for this run
        assert found.latestOffset(through_json(end), ALL) == end
        later.delete()
        later.bodies.clear()


def test_a_topic_that_is_gone_fails_the_query(topic: Topic) -> None:
    topic.send(4)
    named = {"timeoutMs": "1s"}
    pattern = {**named, "subscribe": "", "subscribePattern": topic.name}
    offset = reader(topic).latestOffset({"v": 1, "t": {}}, ALL)
    topic.delete()
    for options in (named, pattern):
        with pytest.raises(DataLost, match="is gone: its topic or its broker was removed"):
            reader(topic, **options).latestOffset(through_json(offset), ALL)
        lenient = reader(topic, **options, failOnDataLoss="false")
        assert lenient.latestOffset(through_json(offset), ALL) == offset
        assert rows(lenient, lenient.initialOffset(), offset) == []  # a batch that was planned before


def test_a_new_message_ends_the_wait(topic: Topic) -> None:
    found = reader(topic, pollMs="60s", timeoutMs="60s")
    offset = found.latestOffset(found.initialOffset(), ALL)
    threading.Timer(0.2, topic.send, (1,)).start()
    assert rows(found, offset, found.latestOffset(through_json(offset), ALL)) == [f"{topic.name} 0".encode()]


def shown(topic: Topic, group: str) -> set[tuple[int, int]]:
    """The offset of *group* in each queue of *topic*."""
    with Admin(patient(topic.endpoints)) as admin:
        lags = admin.group_lag(group)
    return {(lag.queue.queue_id, lag.consumer_offset) for lag in lags if lag.queue.topic == topic.name}


def test_the_progress_is_shown_as_that_of_a_group(topic: Topic) -> None:
    """Spark has committed a batch when it asks for the next one, and only then it counts."""
    topic.send(16)
    group = f"{topic.name}-group"
    found = reader(topic, group=group, maxOffsetsPerTrigger="8")
    limit = found.getDefaultReadLimit()
    offset = found.latestOffset(found.initialOffset(), limit)
    with Admin(patient(topic.endpoints)) as admin:
        assert group not in admin.groups()
    for committed in (2, 4):
        offset = found.latestOffset(through_json(offset), limit)
        assert shown(topic, group) == {(number, committed) for number in range(4)}


def test_a_query_goes_on_if_its_progress_cannot_be_shown(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It warns once, and shows the progress as soon as brokers let it."""

    def refuse(*_: object) -> None:
        raise ReadError("broker 'martlet' refuses the commit")

    group = f"{topic.name}-group"
    found = reader(topic, group=group)
    offset = found.initialOffset()
    with monkeypatch.context() as patched:
        patched.setattr(Cluster, "commit", refuse)
        for _ in range(3):
            topic.send(4)
            start, offset = offset, through_json(found.latestOffset(offset, ALL))
            assert rows(found, start, offset) == topic.bodies[-4:]
    assert caplog.text.count("the progress of the query cannot be shown as that of group") == 1
    found.latestOffset(offset, ALL)
    assert shown(topic, group) == {(number, 3) for number in range(4)}


def test_the_newest_messages_are_reported(topic: Topic) -> None:
    """Also those that a limit leaves for later batches: Spark shows how far a query is behind."""
    found = reader(topic, maxOffsetsPerTrigger="4")
    assert found.reportLatestOffset() is None  # before the first look
    topic.send(16)
    offset = found.latestOffset(found.initialOffset(), found.getDefaultReadLimit())
    assert sum(offset["t"][topic.name].values()) == 4
    latest = through_json(found.reportLatestOffset() or {})
    assert sum(latest["t"][topic.name].values()) == 16


def test_a_reader_that_has_looked_at_brokers_can_be_sent_to_tasks(topic: Topic) -> None:
    """Spark pickles the reader that plans: what it has of connections stays on the driver."""
    topic.send(4)
    found = reader(topic)
    end = found.latestOffset(found.initialOffset(), ALL)
    partitions = found.partitions(found.initialOffset(), end)
    found.latestOffset(through_json(end), ALL)
    sent, (partition,) = cloudpickle.loads(cloudpickle.dumps((found, partitions)))  # type: ignore[no-untyped-call]
    assert sorted(body for batch in sent.read(partition) for body in batch.column("body").to_pylist()) == topic.bodies


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"subscribe": ""},
            "exactly one of the options subscribe, subscribePattern and assign is needed; none is given",
        ),
        ({"subscribePattern": ".*"}, "subscribe and subscribePattern are given"),
        ({"subscribe": "nobody-made-it"}, "topic 'nobody-made-it' is unknown to name server"),
        ({"endpoints": "127.0.0.1:1"}, "no name server of 127.0.0.1:1 answered"),
        ({"startingTimestamp": "5", "startingOffsets": "earliest"}, "startingOffsets and startingTimestamp contradict"),
        ({"tags": "||"}, "option tags '||' has no tag"),
    ],
)
def test_a_query_that_cannot_start_says_why(topic: Topic, options: dict[str, str], text: str) -> None:
    with pytest.raises((OptionError, ReadError)) as caught:
        reader(topic, **{"timeoutMs": "0ms", **options}).latestOffset({"v": 1, "t": {}}, ALL)
    assert text in str(caught.value)
