"""The sink with several brokers: rows reach them all, one that leaves is replaced, and a batch is on all or on none."""

from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.client.patient import patient
from tests.interop.process import eventually

from martlet_client.blocking import Admin
from martlet_remoting.wire.routes import READABLE, WRITABLE
from martlet_spark.connection import CONNECTIONS
from martlet_spark.errors import WriteError
from martlet_spark.write import staging
from martlet_spark.write.runs import ask
from martlet_spark.write.sink import WrittenTask
from martlet_spark.write.staging import TaskPart

from .clusters import QUEUES, Cluster, Messages, cluster
from .test_sink import Columns, Query, frame, stored, values, writer


def brokers_of(topic: Messages) -> set[str]:
    return {message.queue.broker_name for message in stored(topic.endpoints, topic.name)}


def parts_of(messages: list[WrittenTask | None]) -> list[TaskPart]:
    return [part for message in messages if message is not None for part in message.parts]


def spread(topic: Messages, run: str = "run-1", **options: str) -> Query:
    """A query whose tasks write to all brokers."""
    return Query(topic, topic.name, run, 0, batchBytes="300", **options)


class Stopped(Exception):
    """The driver is killed."""


def commit_until(
    query: Query, messages: list[WrittenTask | None], requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commit *messages*, and end after so many requests, as a driver that is killed."""
    left = requests

    def stop(*arguments: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise Stopped
        return ask(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(staging, "ask", stop)
        with suppress(Stopped):
            query.writer.commit_parts(messages)
    assert left <= 0


# The requests of a commit on two brokers: b prepares, a commits, which decides, and b commits.
@pytest.mark.parametrize("requests", [0, 1, 2, 3])
@pytest.mark.parametrize("rows", ["same", "others"])
def test_a_driver_that_dies_during_a_commit_has_committed_on_all_brokers_or_on_none(
    shared: Messages, monkeypatch: pytest.MonkeyPatch, requests: int, rows: str
) -> None:
    query = spread(shared)
    query.writer.commit_parts(query.batch(0, 1000))
    messages = query.batch(1, *range(100))
    assert {part.queue.broker_name for part in parts_of(messages)} == {"a", "b"}
    commit_until(query, messages, requests, monkeypatch)
    query.writer.abort_parts(messages)  # as Spark does if it is only the answer that is lost
    again = spread(shared, "run-2", changingRows="true")
    second = list(range(100) if rows == "same" else range(200, 230))  # a function whose result changes
    messages = again.batch(1, *second)
    again.writer.commit_parts(messages)
    assert values(shared) == sorted([*(second if requests < 2 else range(100)), 1000])
    assert (parts_of(messages) == []) == (requests >= 2)
    again.writer.commit_parts(again.batch(2, 2000))
    assert len(values(shared)) == len(second if requests < 2 else range(100)) + 2


def test_an_idempotent_task_that_dies_during_its_commit_is_done_or_repeated(
    shared: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch, requests in enumerate((1, 2)):
        numbers = range(batch * 100, batch * 100 + 100)
        with pytest.raises(Stopped):
            commit_of_task(shared, batch, requests, monkeypatch, *numbers)
        assert (
            spread(shared, f"second-{batch}", guarantee="idempotent").task(batch, *numbers, in_task=True)
            == WrittenTask()
        )
        assert values(shared) == list(range(batch * 100 + 100))


def commit_of_task(shared: Messages, batch: int, requests: int, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Write *numbers* as an idempotent task that is killed after so many requests of its commit."""
    query = spread(shared, f"first-{batch}", guarantee="idempotent")
    written = query.task(batch, *numbers)
    commit_until(query, [written], requests, monkeypatch)
    raise Stopped


def test_rows_of_a_key_are_on_one_broker(shared: Messages) -> None:
    columns: Columns = {
        "body": [b"%d" % number for number in range(200)],
        "key": [f"k{number % 20}" for number in range(200)],
    }
    made = writer(shared, *columns)
    made.write(iter([frame(columns)]))
    by_key: dict[str, list[int]] = {}
    for message in stored(shared.endpoints, shared.name):
        by_key.setdefault(message.keys[0], []).append(int(message.body))
    assert [by_key[f"k{key}"] for key in range(20)] == [list(range(key, 200, 20)) for key in range(20)]
    assert brokers_of(shared) == {"a", "b"}


def test_a_broker_that_dies_is_replaced(pair: Cluster, shared: Messages) -> None:
    made = writer(shared, "body")
    bodies = [b"%d" % number for number in range(4000)]

    def batches() -> Iterator[object]:
        yield frame({"body": bodies[:2000]})
        pair.brokers["b"].kill()
        yield frame({"body": bodies[2000:]})

    made.write(batches())
    pair.brokers["b"].start()
    pair.wait_registered("a", "b")
    assert set(values(shared)) == set(range(4000))


# The brokers of a topic change between a commit that was cut off and the next run.


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The brokers a, b and c; each test leaves them running."""
    with cluster(tmp_path_factory.mktemp("three"), "a", "b", "c") as found:
        yield found
        CONNECTIONS.close()


def writable(topic: Messages) -> set[str]:
    with Admin(patient(topic.endpoints)) as admin:
        return {each.broker_name for each in admin.topic_route(topic.name).queues if each.perm & WRITABLE}


def move(topic: Messages, *brokers: str) -> None:
    """Let *topic* be written on *brokers* only; what others have of it can still be read."""
    with Admin(patient(topic.endpoints)) as admin:
        for broker in brokers:
            admin.create_topic(topic.name, queues=QUEUES, cluster=broker)
        for broker in writable(topic) - {*brokers}:
            admin.create_topic(topic.name, queues=QUEUES, perm=READABLE, cluster=broker)
    eventually(lambda: True if writable(topic) == {*brokers} else None)


@pytest.mark.parametrize("requests", [0, 1, 2, 3])
@pytest.mark.parametrize("after", ["abc", "a", "b", "bc", "ac", "c"])
def test_each_row_is_written_once_if_a_topic_moves_while_a_commit_is_cut_off(
    three: Cluster, monkeypatch: pytest.MonkeyPatch, after: str, requests: int
) -> None:
    topic = Messages(three.endpoints, ["a", "b"])
    query = spread(topic)
    query.writer.commit_parts(query.batch(0, 1000))
    commit_until(query, query.batch(1, *range(100)), requests, monkeypatch)
    move(topic, *after)
    again = spread(topic, "run-2", changingRows="true")
    messages = again.batch(1, *range(200, 300))
    again.writer.commit_parts(messages)
    assert values(topic) == sorted([*(range(200, 300) if requests < 2 else range(100)), 1000])


@pytest.mark.parametrize("gone", ["a", "b"])
@pytest.mark.parametrize("retired", [False, True])
def test_a_query_waits_for_the_brokers_that_it_has_written_to(
    three: Cluster, monkeypatch: pytest.MonkeyPatch, gone: str, retired: bool
) -> None:
    topic = Messages(three.endpoints, ["a", "b"])
    query = spread(topic)
    commit_until(query, query.batch(1, *range(100)), 2, monkeypatch)  # a has committed, b is prepared
    move(topic, *{"a", "b"} - {gone})
    three.brokers[gone].stop()
    again = spread(topic, "run-2", timeoutMs="1s")
    text = rf"broker '{gone}' did not answer for 1 s: .*not registered.*; start it, or if .* option retiredBrokers"
    with pytest.raises(WriteError, match=text):
        again.batch(1, *range(100))
    if retired:
        last = spread(topic, "run-3", retiredBrokers=gone)
        last.writer.commit_parts(last.batch(1, *range(100)))
        here = values(topic)
        three.brokers[gone].start()
        three.wait_registered(gone)
        # Only a knows that the batch is decided: without it, b writes all rows.
        assert here == list(range(100)) if gone == "a" else 0 < len(here) < 100
    else:
        three.brokers[gone].start()
        three.wait_registered(gone)
        last = spread(topic, "run-3")
        last.writer.commit_parts(last.batch(1, *range(100)))
        assert values(topic) == list(range(100))
