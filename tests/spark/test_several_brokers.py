"""Several brokers with one name server: each message of each broker is in one batch, whoever joins, stops or leaves."""

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from martlet_spark.connection import CONNECTIONS
from martlet_spark.errors import DataLost, ReadError

from .clusters import QUEUES, Cluster, Messages, Stream, batch_of, stored_on
from .fake_brokers import FakeBroker

pytestmark = pytest.mark.spark


@pytest.fixture
def query(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stream]]:
    """Starts streaming queries, which look for new topics and queues each time."""
    monkeypatch.setattr("martlet_spark.read.topics.ROUTES_S", 0.0)
    made: list[Stream] = []

    def start(topic: Messages, **options: str) -> Stream:
        made.append(Stream(topic, **options))
        return made[-1]

    yield start
    for stream in made:
        stream.reader.stop()


def again(stream: Stream, **options: str) -> Stream:
    """*stream* with other options, at the same place."""
    found = Stream(stream.topic, **options)
    found.offset = stream.offset
    return found


def while_waiting(act: Callable[[], object], wait: Callable[[], object]) -> None:
    """Call *act* in a thread beside *wait*; fail if *act* does."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait()
    finally:
        thread.join()
    assert not errors


def test_a_batch_has_the_messages_of_all_brokers(pair: Cluster, shared: Messages) -> None:
    shared.send(50)
    assert sorted(batch_of(shared)) == sorted(shared.bodies)
    only = Messages(pair.endpoints, ["b"])
    only.send(10)
    both = {"subscribe": f"{shared.name},{only.name}"}
    assert sorted(batch_of(shared, **both)) == sorted(shared.bodies + only.bodies)
    one = {"subscribe": "", "assign": f'{{"{shared.name}": ["a/0"]}}'}
    assert all(body.split()[1] == b"a/0" for body in batch_of(shared, **one))
    numbered = {"subscribe": "", "assign": f'{{"{shared.name}": [1]}}'}
    assert {body.split()[1] for body in batch_of(shared, **numbered)} == {b"a/1", b"b/1"}


def test_a_stream_has_the_messages_of_all_brokers(shared: Messages, query: Callable[..., Stream]) -> None:
    stream = query(shared)
    for to in (["a"], ["b"], ["a", "b"], ["a"]):
        sent = shared.send(5, to=to)
        assert stream.batch() == sorted(sent)
    assert stream.plan() == stream.offset


def test_a_broker_that_joins_is_read_from_its_beginning(
    pair: Cluster, shared: Messages, query: Callable[..., Stream]
) -> None:
    stream = query(shared, startingOffsets="latest")
    assert stream.batch() == []
    shared.send(3)
    pair.add("c")
    shared.create(["c"])
    sent = shared.send(3, to=["c"])
    assert stream.batch() == sorted(shared.bodies)
    assert len(sent) == 6
    pair.brokers.pop("c").stop()
    with pytest.raises(DataLost, match=r"queue c/0 of topic .* is gone: its topic or its broker was removed"):
        again(stream, timeoutMs="0").plan()


def test_a_broker_that_left_is_left_out_if_that_is_allowed(
    pair: Cluster, query: Callable[..., Stream], caplog: pytest.LogCaptureFixture
) -> None:
    pair.add("d")
    topic = Messages(pair.endpoints, ["a", "d"])
    sent = topic.send(3)
    stream = query(topic, failOnDataLoss="false", timeoutMs="0")
    assert stream.batch() == sorted(sent)
    unread = topic.send(3, to=["d"])
    assert pair.brokers["d"].stop() == 0
    others = topic.send(3, to=["a"])
    with caplog.at_level(logging.WARNING, "martlet.spark"):
        assert stream.batch() == sorted(others)
    assert f"queue d/0 of topic '{topic.name}' is gone" in caplog.text
    pair.brokers["d"].start()
    pair.wait_registered("d")
    assert stream.batch() == sorted(unread)  # it was not gone for good
    pair.brokers.pop("d").stop()


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_broker_restarts_between_batches(
    pair: Cluster, shared: Messages, query: Callable[..., Stream], end: str
) -> None:
    stream = query(shared)
    sent = shared.send(3)
    assert stream.batch() == sorted(sent)
    sent = shared.send(3)
    broker = pair.brokers["b"]
    getattr(broker, end)()
    found: list[bytes] = []
    while_waiting(broker.start, lambda: found.extend(stream.batch()))
    assert found == sorted(sent)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_broker_restarts_while_a_batch_is_read(pair: Cluster, shared: Messages, end: str) -> None:
    shared.send(100, body_bytes=20_000)
    rows = batch_of(shared, columns="body", fetchBytes="256k")
    found = [next(rows)]
    while not found[-1].split()[1].startswith(b"b/"):
        found.append(next(rows))
    broker = pair.brokers["b"]
    getattr(broker, end)()
    while_waiting(broker.start, lambda: found.extend(rows))
    assert sorted(found) == sorted(shared.bodies)
    assert len(stored_on("b", found)) == 200


def test_a_batch_that_was_planned_is_read_after_a_restart(
    pair: Cluster, shared: Messages, query: Callable[..., Stream]
) -> None:
    sent = shared.send(5)
    stream = query(shared)
    end = stream.plan()
    broker = pair.brokers["a"]
    broker.kill()
    shared.send(5, to=["b"])
    found: list[bytes] = []
    while_waiting(broker.start, lambda: found.extend(stream.batch(end)))
    assert found == sorted(sent)


def test_the_name_server_restarts(pair: Cluster, shared: Messages, query: Callable[..., Stream]) -> None:
    """It has no routes until brokers register again, some of them before others."""
    stream = query(shared)
    sent = shared.send(3)
    assert stream.batch() == sorted(sent)
    sent = shared.send(3)
    pair.names.kill()
    found: list[bytes] = []
    while_waiting(pair.names.start, lambda: found.extend(stream.batch()))
    assert found == sorted(sent)
    pair.wait_registered("a", "b")


def test_a_task_waits_for_the_routes_of_a_name_server_that_restarts(
    pair: Cluster, shared: Messages, query: Callable[..., Stream]
) -> None:
    stream = query(shared)
    sent = shared.send(3)
    end = stream.plan()
    pair.names.kill()
    pair.names.start()
    assert stream.batch(end) == sorted(sent)
    pair.wait_registered("a", "b")


def test_a_broker_at_the_address_of_another_is_not_read(
    pair: Cluster, shared: Messages, query: Callable[..., Stream]
) -> None:
    """Name servers may say for two minutes that a broker is where another one is now; that one has a queue 0 too."""
    shared.send(3)
    planned = query(shared).plan()
    names = FakeBroker("names")
    address, queues = pair.brokers["b"].address, {"readQueueNums": QUEUES, "writeQueueNums": QUEUES, "perm": 6}
    names.topics[shared.name] = {
        "brokerDatas": [{"cluster": "a", "brokerName": "a", "brokerAddrs": {"0": address}}],
        "queueDatas": [{"brokerName": "a", **queues}],
    }
    try:
        with pytest.raises(ReadError, match=f"cannot be reached: at {address}, .* is broker 'b'"):
            list(batch_of(shared, endpoints=names.address, timeoutMs="0"))
        wrong = query(shared, endpoints=names.address, timeoutMs="0")
        with pytest.raises(ReadError, match=r"this is broker\[b\], not broker\[a\]"):
            wrong.batch(planned)
    finally:
        CONNECTIONS.close()
        names.close()


def test_a_broker_that_stays_away_fails_the_query_in_time(pair: Cluster, query: Callable[..., Stream]) -> None:
    pair.add("e")
    topic = Messages(pair.endpoints, ["e"])
    topic.send(3)
    stream = query(topic, timeoutMs="0")
    end = stream.plan()
    pair.brokers.pop("e").kill()
    with pytest.raises(ReadError, match=r"broker 'e' cannot be read: .*; start it, or set failOnDataLoss to false"):
        stream.batch(end)
    with pytest.raises(ReadError, match=f"topic '{topic.name}' is unknown to name server"):
        stream.plan()
    stream.offset = end
    with pytest.raises(DataLost, match=r"queue e/0 of topic .* is gone: its topic or its broker was removed"):
        stream.plan()
