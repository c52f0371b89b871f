"""What a task does with the answers of brokers, in any order and with any content."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest

from martlet.errors import RemoteProtocolError
from martlet.message import Message
from martlet_remoting.batches import BatchMessage, encode_batch
from martlet_remoting.codes import RequestCode, ResponseCode
from martlet_remoting.packets import MessageQueue
from martlet_spark.connection import Answer, ConnectionLost
from martlet_spark.errors import DataLost, ReadError
from martlet_spark.exchange import BulkReads, Exchange, NotSupported, Progress, Pulls
from martlet_spark.filters import Filter
from martlet_spark.inner_batches import INNER_BATCH
from martlet_spark.planner import Range
from martlet_spark.reading import Reader

from .stored import stored, usual

QUEUE = MessageQueue("Orders", "b", 3)
MOVED = ResponseCode.PULL_OFFSET_MOVED


def messages(first: int, count: int) -> bytearray:
    return stored([usual(number) for number in range(first, first + count)], first=first)


class FakeConnection:
    """Keeps requests, and answers them with what the test has prepared."""

    address = "b:1"

    def __init__(self) -> None:
        self.requests: list[tuple[int, Mapping[str, object]]] = []
        self.answers: list[Answer] = []
        self.outstanding = 0

    def send(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> int:
        self.requests.append((code, ext))
        self.outstanding += 1
        return len(self.requests)

    def receive(self, room: Callable[[int], memoryview]) -> Answer:
        """Return the next prepared answer with its body in *room*; without one, the connection is lost."""
        if not self.answers:
            raise ConnectionLost("the test has no more answers")
        answer = self.answers.pop(0)
        body = room(len(answer.body))
        body[:] = answer.body
        return Answer(answer.opaque, answer.code, answer.ext, answer.remark, body)

    def answer(
        self, opaque: int, code: int, first: int, after: int, bounds: tuple[int, int] = (0, 100), *, more: bool = False
    ) -> None:
        """Answer with the messages from *first* up to *after*."""
        ext = {
            "nextBeginOffset": str(after),
            "minOffset": str(bounds[0]),
            "maxOffset": str(bounds[1]),
            "more": str(more).lower(),
        }
        body = messages(first, after - first) if code == 0 and first < after else bytearray()
        self.answers.append(Answer(opaque, code, ext, "", body))


def exchange(
    kind: type[Exchange], connection: FakeConnection, *, fail_on_loss: bool = True, timeout_s: float = 60
) -> Exchange:
    return kind(connection, Filter(), 1 << 20, timeout_s, fail_on_loss=fail_on_loss)  # type: ignore[arg-type]


def read(talk: Exchange, *ranges: tuple[int, int]) -> list[int]:
    left = [Progress(Range(QUEUE, start, end)) for start, end in ranges]
    found = [offset for records in talk.read(left) for offset in records.heads["offset"].tolist()]
    assert not left
    assert not talk.connection.outstanding
    return found


def test_a_bulk_read_has_many_frames() -> None:
    connection = FakeConnection()
    for after in (5, 9, 12):
        connection.answer(1, 0, {5: 2, 9: 5, 12: 9}[after], after, more=after < 12)
    assert read(exchange(BulkReads, connection), (2, 12)) == list(range(2, 12))
    ((code, ext),) = connection.requests
    assert (code, ext["offset"], ext["endOffset"]) == (RequestCode.BULK_READ, 2, 12)


@pytest.mark.parametrize("kind", [BulkReads, Pulls])
def test_answers_in_any_order_belong_to_their_requests(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    connection.answer(2, 0, 50, 60)
    connection.answer(1, 0, 0, 10)
    assert read(exchange(kind, connection), (0, 10), (50, 60)) == [*range(50, 60), *range(10)]


@pytest.mark.parametrize("kind", [BulkReads, Pulls])
def test_the_answer_to_another_request_is_not_taken_for_ours(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    connection.answer(7, 0, 0, 10)
    with pytest.raises(RemoteProtocolError, match="answer 7 belongs to no request"):
        read(exchange(kind, connection), (0, 10))


@pytest.mark.parametrize("kind", [BulkReads, Pulls])
def test_messages_of_other_offsets_fail_the_read(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    connection.answer(1, 0, 5, 10)
    with pytest.raises(ReadError, match="the broker sent message 5 of queue 3"):
        read(exchange(kind, connection), (6, 10))


@pytest.mark.parametrize("kind", [BulkReads, Pulls])
@pytest.mark.parametrize("end", [9, 100])
def test_messages_after_those_that_an_answer_speaks_of_fail_the_read(kind: type[Exchange], end: int) -> None:
    """They would come twice, or be left out as messages after the range."""
    connection = FakeConnection()
    connection.answer(1, 0, 0, 9)
    connection.answers[0].body[:] = messages(0, 8) + messages(70, 1)
    with pytest.raises(ReadError, match="the broker sent message 70 of queue 3 in an answer with messages 0 to 8"):
        read(exchange(kind, connection), (0, end))


@pytest.mark.parametrize("kind", [BulkReads, Pulls])
def test_a_read_that_ends_early_is_continued(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    connection.answer(1, 0, 0, 4)
    connection.answer(2, 0, 4, 10)
    assert read(exchange(kind, connection), (0, 10)) == list(range(10))
    assert [ext.get("offset", ext.get("queueOffset")) for _, ext in connection.requests] == [0, 4]


@pytest.mark.parametrize("kind", [BulkReads, Pulls])
def test_a_range_that_begins_and_ends_in_a_batch_has_its_messages(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    for opaque, first in enumerate((0, 10, 20), 1):
        body = encode_batch([BatchMessage(b"%d" % number) for number in range(first, first + 10)])
        batch = stored([Message("Orders", body, b"", 3, 0, INNER_BATCH)], first=first)
        ext = {"nextBeginOffset": str(first + 10), "minOffset": "0", "maxOffset": "100", "more": "false"}
        connection.answers.append(Answer(opaque, 0, ext, "", batch))
    assert read(exchange(kind, connection), (7, 22)) == list(range(7, 22))
    assert [ext.get("offset", ext.get("queueOffset")) for _, ext in connection.requests] == [7, 10, 20]


def test_messages_after_the_end_are_left_out() -> None:
    connection = FakeConnection()
    connection.answer(1, 0, 0, 32)
    assert read(exchange(Pulls, connection), (0, 10)) == list(range(10))


def test_offsets_without_messages_are_passed() -> None:
    connection = FakeConnection()
    connection.answer(1, ResponseCode.PULL_RETRY_IMMEDIATELY, 0, 4)
    connection.answer(2, 0, 4, 10)
    assert read(exchange(Pulls, connection), (0, 10)) == list(range(4, 10))
    bulk = FakeConnection()
    bulk.answer(1, 0, 10, 10)  # nothing matched
    assert read(exchange(BulkReads, bulk), (0, 10)) == []


@pytest.mark.parametrize("kind", [BulkReads, Pulls])
def test_removed_messages_fail_the_read(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    connection.answer(1, MOVED, 0, 0, (6, 100))
    with pytest.raises(DataLost, match=r"messages 0 to 5 of queue b/3 .* were removed .* failOnDataLoss"):
        read(exchange(kind, connection), (0, 10))


@pytest.mark.parametrize("kind", [BulkReads, Pulls])
@pytest.mark.parametrize("first", [6, 10, 30])
def test_removed_messages_are_passed_if_the_query_allows_it(
    kind: type[Exchange], first: int, caplog: pytest.LogCaptureFixture
) -> None:
    connection = FakeConnection()
    connection.answer(1, MOVED, 0, 0, (first, 100))
    if first < 10:
        connection.answer(2, 0, first, 10)
    with caplog.at_level(logging.WARNING):
        assert read(exchange(kind, connection, fail_on_loss=False), (0, 10)) == list(range(first, 10))
    assert f"messages 0 to {min(first, 10) - 1} of queue b/3 of topic 'Orders' were removed" in caplog.text


@pytest.mark.parametrize(
    ("kind", "code"), [(BulkReads, 0), (BulkReads, MOVED), (Pulls, ResponseCode.PULL_NOT_FOUND), (Pulls, MOVED)]
)
def test_a_queue_that_lost_its_end_fails_the_read(kind: type[Exchange], code: int) -> None:
    for fail_on_loss in (True, False):
        connection = FakeConnection()
        connection.answer(1, code, 5, 5, (0, 5))
        talk = exchange(kind, connection, fail_on_loss=fail_on_loss)
        if not fail_on_loss:
            assert read(talk, (5, 10)) == []
            return
        with pytest.raises(DataLost, match=r"messages 5 to 9 of queue b/3 .* do not exist: the queue ends at 5"):
            read(talk, (5, 10))


@pytest.mark.parametrize("kind", [BulkReads, Pulls])
def test_a_broker_that_sends_nothing_is_given_up(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    for opaque in range(1, 4):
        connection.answer(opaque, 0 if kind is BulkReads else ResponseCode.PULL_NOT_FOUND, 5, 5)
    with pytest.raises(ReadError, match="has messages from 5 to 10, but the broker sends none of them"):
        read(exchange(kind, connection, timeout_s=0), (5, 10))


def test_a_broker_without_bulk_reads_is_recognized() -> None:
    connection = FakeConnection()
    connection.answer(1, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, 0, 0)
    with pytest.raises(NotSupported):
        read(exchange(BulkReads, connection), (0, 10))


@pytest.mark.parametrize("kind", [BulkReads, Pulls])
def test_a_refusal_says_why(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    connection.answers.append(Answer(1, ResponseCode.NO_PERMISSION, {}, "nobody may read it", bytearray()))
    with pytest.raises(ReadError, match="NO_PERMISSION: nobody may read it; check the options accessKey and secretKey"):
        read(exchange(kind, connection), (0, 10))


def test_only_some_requests_are_outstanding() -> None:
    connection = FakeConnection()
    talk = exchange(BulkReads, connection)
    left = [Progress(Range(QUEUE, number * 10, number * 10 + 10)) for number in range(20)]
    rows = talk.read(left)
    connection.answer(1, 0, 0, 10)
    next(rows)
    assert len(connection.requests) == 9
    assert connection.outstanding == 8
    assert len(left) == 19


@pytest.mark.parametrize("kind", [BulkReads, Pulls])
def test_what_was_received_before_the_connection_broke_is_kept(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    left = [Progress(Range(QUEUE, start, start + 10)) for start in (0, 50)]
    connection.answer(2, 0, 50, 60)
    connection.answer(1, 0, 0, 4)
    rows = exchange(kind, connection).read(left)
    assert next(rows).heads["offset"].tolist() == [*range(50, 60), *range(4)]
    with pytest.raises(ConnectionLost):
        next(rows)
    assert [(progress.next, progress.end) for progress in left] == [(4, 10)]


class Network:
    """Lends the *connections* of the test, one after the other; it is the cluster, too."""

    timeout_s = 30.0
    security = None

    def __init__(self, *connections: FakeConnection) -> None:
        self.connections = list(connections)

    @contextmanager
    def lent(self, *_: object) -> Iterator[FakeConnection]:
        yield self.connections.pop(0)

    def route(self, topic: str) -> str:
        return topic

    def address(self, route: str, broker: str) -> str:
        return f"{broker}:1"


def read_by_task(monkeypatch: pytest.MonkeyPatch, network: Network) -> list[int]:
    """Read messages 0 to 9 of a queue."""
    monkeypatch.setattr("martlet_spark.reading.CONNECTIONS", network)
    monkeypatch.setattr("martlet_spark.connection.time.sleep", lambda seconds: None)
    reader = Reader(network, ["offset"], Filter(), 1 << 20, fail_on_loss=True)  # type: ignore[arg-type]
    return [offset for batch in reader.read([Range(QUEUE, 0, 10)]) for offset in batch["offset"].to_pylist()]


def test_a_read_that_a_busy_broker_ends_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, free = FakeConnection(), FakeConnection()
    busy.answer(1, 0, 0, 6, more=True)
    busy.answer(1, ResponseCode.SYSTEM_BUSY, 6, 6)
    free.answer(1, 0, 6, 10)
    assert read_by_task(monkeypatch, Network(busy, free)) == list(range(10))
    assert [ext["offset"] for _, ext in busy.requests + free.requests] == [0, 6]


def test_a_broker_that_stays_busy_fails_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = [FakeConnection() for _ in range(1000)]
    for connection in connections:
        connection.answer(1, ResponseCode.SYSTEM_BUSY, 0, 0)
    network = Network(*connections)
    network.timeout_s = 0
    with pytest.raises(ReadError, match=r"refused the read .* SYSTEM_BUSY: .*; read with fewer tasks at once"):
        read_by_task(monkeypatch, network)
