"""What a task does with the answers of brokers, in any order and with any content."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import orjson
import pytest
from tests.columns.stored import stored, usual

from martlet.errors import RemoteProtocolError
from martlet.message import Message
from martlet_remoting.wire.batches import BatchMessage, encode_batch
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.inner_batches import INNER_BATCH
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.connection import AnswerFrame, ConnectionBroken
from martlet_spark.errors import DataLost, ReadError
from martlet_spark.read.exchange import EVERYTHING, BulkReadExchange, Exchange, NotSupported, Pulls, Unchecked
from martlet_spark.read.filters import Filter
from martlet_spark.read.planner import Range
from martlet_spark.read.progress import RangeProgress
from martlet_spark.read.task import RangeReader

QUEUE = MessageQueue("Orders", "b", 3)
MOVED = ResponseCode.PULL_OFFSET_MOVED
NONE = ResponseCode.PULL_NOT_FOUND
AGAIN = ResponseCode.PULL_RETRY_IMMEDIATELY
TAGS = Filter("T1 || T2")


def messages(first: int, count: int, body: bytes = b"body") -> bytearray:
    return stored([usual(number, body) for number in range(first, first + count)], first=first)


class FakeConnection:
    """Keeps requests, and answers them with what the test has prepared."""

    address = "b:1"

    def __init__(self) -> None:
        self.requests: list[tuple[int, Mapping[str, object]]] = []
        self.answers: list[AnswerFrame] = []
        self.outstanding = 0

    def send(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> int:
        self.requests.append((code, ext))
        self.outstanding += 1
        return len(self.requests)

    def receive(self, room: Callable[[int], memoryview] | None = None) -> AnswerFrame:
        """Return the next prepared answer, its body in *room* if there is one; without one, the connection is lost."""
        if not self.answers:
            raise ConnectionBroken("the test has no more answers")
        answer = self.answers.pop(0)
        if room is None:
            return answer
        body = room(len(answer.body))
        body[:] = answer.body
        return AnswerFrame(answer.opaque, answer.code, answer.ext, answer.remark, body)

    def answer(
        self,
        opaque: int,
        code: int,
        first: int,
        after: int,
        bounds: tuple[int, int] = (0, 100),
        *,
        more: bool = False,
        body: bytes = b"body",
    ) -> None:
        """Answer with the messages from *first* up to *after*."""
        ext = {
            "nextBeginOffset": str(after),
            "minOffset": str(bounds[0]),
            "maxOffset": str(bounds[1]),
            "more": str(more).lower(),
        }
        data = messages(first, after - first, body) if code == 0 and first < after else bytearray()
        self.answers.append(AnswerFrame(opaque, code, ext, "", data))

    def answer_lacking(self, opaque: int, code: int, found: Sequence[int], after: int) -> None:
        """Answer with the messages *found*, of those up to *after*."""
        body = bytearray().join([messages(number, 1) for number in found])
        self.answers.append(AnswerFrame(opaque, code, {"nextBeginOffset": str(after), "maxOffset": "100"}, "", body))

    def answer_config(self, opaque: int, **attributes: str) -> None:
        """Answer with the configuration of a topic."""
        body = orjson.dumps({"attributes": {name.replace("_", "."): text for name, text in attributes.items()}})
        self.answers.append(AnswerFrame(opaque, 0, {}, "", bytearray(body)))


def exchange(
    kind: type[Exchange],
    connection: FakeConnection,
    *,
    wanted: Filter = EVERYTHING,
    fail_on_loss: bool = True,
    timeout_s: float = 60,
) -> Exchange:
    return kind(connection, wanted, 1 << 20, timeout_s, fail_on_loss=fail_on_loss)  # type: ignore[arg-type]


def read(talk: Exchange, *ranges: tuple[int, int]) -> list[int]:
    left = [RangeProgress(Range(QUEUE, start, end)) for start, end in ranges]
    found = [offset for records in talk.read(left) for offset in records.heads["offset"].tolist()]
    assert not left
    assert not talk.connection.outstanding
    return found


def test_a_bulk_read_has_many_frames() -> None:
    connection = FakeConnection()
    for after in (5, 9, 12):
        connection.answer(1, 0, {5: 2, 9: 5, 12: 9}[after], after, more=after < 12)
    assert read(exchange(BulkReadExchange, connection), (2, 12)) == list(range(2, 12))
    ((code, ext),) = connection.requests
    assert (code, ext["offset"], ext["endOffset"]) == (RequestCode.BULK_READ, 2, 12)


@pytest.mark.parametrize("kind", [BulkReadExchange, Pulls])
def test_answers_in_any_order_belong_to_their_requests(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    connection.answer(2, 0, 50, 60)
    connection.answer(1, 0, 0, 10)
    assert read(exchange(kind, connection), (0, 10), (50, 60)) == [*range(50, 60), *range(10)]


@pytest.mark.parametrize("kind", [BulkReadExchange, Pulls])
def test_the_answer_to_another_request_is_not_taken_for_ours(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    connection.answer(7, 0, 0, 10)
    with pytest.raises(RemoteProtocolError, match="answer 7 belongs to no request"):
        read(exchange(kind, connection), (0, 10))


@pytest.mark.parametrize("kind", [BulkReadExchange, Pulls])
def test_messages_of_other_offsets_fail_the_read(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    connection.answer(1, 0, 5, 10)
    with pytest.raises(ReadError, match="the broker sent message 5 of queue 3"):
        read(exchange(kind, connection), (6, 10))


@pytest.mark.parametrize("kind", [BulkReadExchange, Pulls])
@pytest.mark.parametrize("end", [9, 100])
def test_messages_after_those_that_an_answer_speaks_of_fail_the_read(kind: type[Exchange], end: int) -> None:
    """They would come twice, or be left out as messages after the range."""
    connection = FakeConnection()
    connection.answer(1, 0, 0, 9)
    connection.answers[0].body[:] = messages(0, 8) + messages(70, 1)
    with pytest.raises(ReadError, match="the broker sent message 70 of queue 3 in an answer with messages 0 to 8"):
        read(exchange(kind, connection), (0, end))


@pytest.mark.parametrize("kind", [BulkReadExchange, Pulls])
def test_a_read_that_ends_early_is_continued(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    connection.answer(1, 0, 0, 4)
    connection.answer(2, 0, 4, 10)
    assert read(exchange(kind, connection), (0, 10)) == list(range(10))
    assert [ext.get("offset", ext.get("queueOffset")) for _, ext in connection.requests] == [0, 4]


@pytest.mark.parametrize("kind", [BulkReadExchange, Pulls])
def test_a_range_that_begins_and_ends_in_a_batch_has_its_messages(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    for opaque, first in enumerate((0, 10, 20), 1):
        body = encode_batch([BatchMessage(b"%d" % number) for number in range(first, first + 10)])
        batch = stored([Message("Orders", body, b"", 3, 0, INNER_BATCH)], first=first)
        ext = {"nextBeginOffset": str(first + 10), "minOffset": "0", "maxOffset": "100", "more": "false"}
        connection.answers.append(AnswerFrame(opaque, 0, ext, "", batch))
    assert read(exchange(kind, connection), (7, 22)) == list(range(7, 22))
    assert [ext.get("offset", ext.get("queueOffset")) for _, ext in connection.requests] == [7, 10, 20]


def test_messages_after_the_end_are_left_out() -> None:
    connection = FakeConnection()
    connection.answer(1, 0, 0, 32)
    assert read(exchange(Pulls, connection), (0, 10)) == list(range(10))


def test_offsets_without_messages_are_passed() -> None:
    bulk = FakeConnection()
    bulk.answer(1, 0, 10, 10)  # nothing matched
    assert read(exchange(BulkReadExchange, bulk, wanted=TAGS), (0, 10)) == []


# How many answers RocketMQ needs to convince us of a loss: what seems lost is asked for again.
CERTAIN = [(BulkReadExchange, 1), (Pulls, 2)]


@pytest.mark.parametrize(("kind", "times"), CERTAIN)
def test_removed_messages_fail_the_read(kind: type[Exchange], times: int) -> None:
    connection = FakeConnection()
    for opaque in range(1, times + 1):
        connection.answer(opaque, MOVED, 0, 0, (6, 100))
    with pytest.raises(DataLost, match=r"messages 0 to 5 of queue b/3 .* were removed .* failOnDataLoss"):
        read(exchange(kind, connection), (0, 10))
    assert not connection.answers


@pytest.mark.parametrize(("kind", "times"), CERTAIN)
@pytest.mark.parametrize("first", [6, 10, 30])
def test_removed_messages_are_passed_if_the_query_allows_it(
    kind: type[Exchange], times: int, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    connection = FakeConnection()
    for opaque in range(1, times + 1):
        connection.answer(opaque, MOVED, 0, 0, (first, 100))
    if first < 10:
        connection.answer(times + 1, 0, first, 10)
    with caplog.at_level(logging.WARNING):
        assert read(exchange(kind, connection, fail_on_loss=False), (0, 10)) == list(range(first, 10))
    assert f"messages 0 to {min(first, 10) - 1} of queue b/3 of topic 'Orders' were removed" in caplog.text


@pytest.mark.parametrize(
    ("kind", "code", "times"),
    [(BulkReadExchange, 0, 1), (BulkReadExchange, MOVED, 1), (Pulls, NONE, 2), (Pulls, MOVED, 2)],
)
def test_a_queue_that_lost_its_end_fails_the_read(kind: type[Exchange], code: int, times: int) -> None:
    for fail_on_loss in (True, False):
        connection = FakeConnection()
        for opaque in range(1, times + 1):
            connection.answer(opaque, code, 5, 5, (0, 5))
        talk = exchange(kind, connection, fail_on_loss=fail_on_loss)
        if not fail_on_loss:
            assert read(talk, (5, 10)) == []
            return
        with pytest.raises(DataLost, match=r"messages 5 to 9 of queue b/3 .* do not exist: the queue ends at 5"):
            read(talk, (5, 10))


def test_a_queue_that_is_short_for_a_moment_has_lost_nothing() -> None:
    for code, bounds in ((MOVED, (6, 100)), (NONE, (0, 5)), (MOVED, (0, 0))):
        connection = FakeConnection()
        connection.answer(1, code, 5, 5, bounds)
        connection.answer(2, 0, 5, 10)
        assert read(exchange(Pulls, connection), (5, 10)) == list(range(5, 10))


# Answers to a pull at 0 that pass messages of RocketMQ's queue: code, messages, next offset; and which are lost.
LACKING = {
    "none": (AGAIN, (), 4, (0, 3)),
    "after the range": (AGAIN, (), 300, (0, 9)),
    "no entries": (NONE, (), 4, (0, 3)),
    "the first": (0, range(4, 10), 10, (0, 3)),
    "some between": (0, (0, 1, 5, 6, 7, 8, 9), 10, (2, 4)),
    "the last": (0, (0, 1), 10, (2, 9)),
}


@pytest.mark.parametrize("fail_on_loss", [True, False])
@pytest.mark.parametrize("lacking", LACKING)
def test_messages_that_rocketmq_passes_are_lost(
    lacking: str, fail_on_loss: bool, caplog: pytest.LogCaptureFixture
) -> None:
    code, found, after, (first, last) = LACKING[lacking]
    connection = FakeConnection()
    connection.answer_lacking(1, code, found, after)
    opaque = 2
    if code != NONE:
        connection.answer_config(2)
        opaque = 3
    rest = [number for number in found if number > first]
    for again in range(opaque, opaque + (2 if first else 1)):
        connection.answer_lacking(again, AGAIN if not rest and not code else code, rest, after)
    connection.answer_lacking(opaque + (2 if first else 1), 0, range(last + 1, 10), 10)
    talk = exchange(Pulls, connection, fail_on_loss=fail_on_loss)
    text = f"messages {first} to {last} of queue b/3 of topic 'Orders' (were removed|cannot be read)"
    if fail_on_loss:
        with pytest.raises(DataLost, match=text):
            read(talk, (0, 10))
        return
    with caplog.at_level(logging.WARNING):
        assert read(talk, (0, 10)) == [*range(first), *range(last + 1, 10)]
    assert re.search(text, caplog.text)


@pytest.mark.parametrize("lacking", LACKING)
def test_messages_that_rocketmq_passes_for_a_moment_are_read(lacking: str) -> None:
    code, found, after, (first, _) = LACKING[lacking]
    connection = FakeConnection()
    connection.answer_lacking(1, code, found, after)
    if code != NONE:
        connection.answer_config(2)
    connection.answer_lacking(2 if code == NONE else 3, 0, range(first, 10), 10)
    assert read(exchange(Pulls, connection), (0, 10)) == list(range(10))


def test_answers_that_arrive_before_the_configuration_are_kept() -> None:
    connection = FakeConnection()
    connection.answer_lacking(1, 0, range(4, 10), 10)
    connection.answer(2, 0, 50, 60)
    connection.answer_config(3)
    connection.answer(4, 0, 0, 10)
    assert read(exchange(Pulls, connection), (0, 10), (50, 60)) == [*range(50, 60), *range(10)]


def test_compacted_topics_lack_messages() -> None:
    connection = FakeConnection()
    connection.answer_lacking(1, 0, (3, 7), 8)
    connection.answer_config(2, cleanup_policy="COMPACTION")
    connection.answer_lacking(3, AGAIN, (), 10)
    assert read(exchange(Pulls, connection), (0, 10)) == [3, 7]
    codes = [code for code, _ in connection.requests]
    assert codes == [RequestCode.PULL_MESSAGE, RequestCode.GET_TOPIC_CONFIG, RequestCode.PULL_MESSAGE]


def test_sql_of_a_compacted_topic_is_refused() -> None:
    connection = FakeConnection()
    connection.answers.append(AnswerFrame(1, 0, {}, "", bytearray()))
    connection.answer_config(2, cleanup_policy="COMPACTION")
    with pytest.raises(ReadError, match="'Orders': it is compacted, so the broker ignores filters"):
        read(exchange(Pulls, connection, wanted=Filter(sql="a = 1")), (0, 10))


def filtered(connection: FakeConnection) -> None:
    """Answer pulls with a filter: the messages 5 and 8."""
    connection.answer_lacking(1, AGAIN, (), 4)
    connection.answer_lacking(2, 0, (5, 8), 9)
    connection.answer_lacking(3, AGAIN, (), 11)


def test_a_filter_passes_messages_that_are_there() -> None:
    connection = FakeConnection()
    filtered(connection)
    connection.answer(4, 0, 0, 1)
    assert read(exchange(Pulls, connection, wanted=TAGS), (0, 10)) == [5, 8]
    *pulls, last = [(ext["queueOffset"], ext["subscription"]) for _, ext in connection.requests]
    assert pulls == [(0, "T1 || T2"), (4, "T1 || T2"), (9, "T1 || T2")]
    assert last == (0, "*")


@pytest.mark.parametrize("code", [MOVED, AGAIN, NONE, 0])
def test_messages_that_are_removed_while_a_filter_passes_them_are_lost(
    code: int, caplog: pytest.LogCaptureFixture
) -> None:
    for fail_on_loss in (True, False):
        connection = FakeConnection()
        filtered(connection)
        connection.answer_lacking(4, code, () if code else (6,), 6 if code else 7)
        connection.answer_config(5)
        connection.answer_lacking(6, code, () if code else (6,), 6 if code else 7)
        talk = exchange(Pulls, connection, wanted=TAGS, fail_on_loss=fail_on_loss)
        text = "messages 0 to 5 of queue b/3 .* while the query read them; some may match its filter"
        if fail_on_loss:
            with pytest.raises(DataLost, match=text):
                read(talk, (0, 10))
        else:
            assert read(talk, (0, 10)) == [5, 8]
            assert re.search(text, caplog.text)


def test_a_filter_of_a_compacted_topic_passes_what_was_removed() -> None:
    connection = FakeConnection()
    filtered(connection)
    connection.answer_lacking(4, 0, (3,), 4)
    connection.answer_config(5, cleanup_policy="COMPACTION")
    assert read(exchange(Pulls, connection, wanted=TAGS), (0, 10)) == [5, 8]


def test_offsets_of_a_static_topic_are_refused() -> None:
    connection = FakeConnection()
    connection.answer(1, 0, 0, 10)
    connection.answers[0] = AnswerFrame(1, 0, {**connection.answers[0].ext, "offsetDelta": "7"}, "", messages(0, 10))
    with pytest.raises(ReadError, match="topic 'Orders' is a static topic"):
        read(exchange(Pulls, connection), (0, 10))


@pytest.mark.parametrize("kind", [BulkReadExchange, Pulls])
def test_a_broker_that_sends_nothing_is_given_up(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    for opaque in range(1, 4):
        connection.answer(opaque, 0 if kind is BulkReadExchange else ResponseCode.PULL_NOT_FOUND, 5, 5)
    with pytest.raises(ReadError, match="has messages from 5 to 10, but the broker sends none of them"):
        read(exchange(kind, connection, timeout_s=0), (5, 10))


def test_a_broker_without_bulk_reads_is_recognized() -> None:
    connection = FakeConnection()
    connection.answer(1, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, 0, 0)
    with pytest.raises(NotSupported):
        read(exchange(BulkReadExchange, connection), (0, 10))


@pytest.mark.parametrize("kind", [BulkReadExchange, Pulls])
def test_a_refusal_says_why(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    connection.answers.append(AnswerFrame(1, ResponseCode.NO_PERMISSION, {}, "nobody may read it", bytearray()))
    with pytest.raises(ReadError, match="NO_PERMISSION: nobody may read it; check the options accessKey and secretKey"):
        read(exchange(kind, connection), (0, 10))


def test_only_some_requests_are_outstanding() -> None:
    connection = FakeConnection()
    talk = exchange(BulkReadExchange, connection)
    left = [RangeProgress(Range(QUEUE, number * 10, number * 10 + 10)) for number in range(20)]
    rows = talk.read(left)
    connection.answer(1, 0, 0, 10)
    next(rows)
    assert len(connection.requests) == 9
    assert connection.outstanding == 8
    assert len(left) == 19


@pytest.mark.parametrize("kind", [BulkReadExchange, Pulls])
def test_what_was_received_before_the_connection_broke_is_kept(kind: type[Exchange]) -> None:
    connection = FakeConnection()
    left = [RangeProgress(Range(QUEUE, start, start + 10)) for start in (0, 50)]
    connection.answer(2, 0, 50, 60)
    connection.answer(1, 0, 0, 4)
    rows = exchange(kind, connection).read(left)
    assert next(rows).heads["offset"].tolist() == [*range(50, 60), *range(4)]
    with pytest.raises(ConnectionBroken):
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
    monkeypatch.setattr("martlet_spark.read.task.CONNECTIONS", network)
    monkeypatch.setattr("martlet_spark.connection.time.sleep", lambda seconds: None)
    reader = RangeReader(network, ["offset"], Filter(), 1 << 20, fail_on_loss=True)  # type: ignore[arg-type]
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


GAPS = {
    "all": ((), [(0, 9)]),
    "the first": ((3, 4, 5, 6, 7, 8, 9), [(0, 2)]),
    "two between": ((0, 1, 4, 5, 9), [(2, 3), (6, 8)]),
    "the last": ((0, 1, 2), [(3, 9)]),
}


@pytest.mark.parametrize("oldest", [0, 100])
@pytest.mark.parametrize("gaps", GAPS)
def test_messages_that_a_bulk_read_lacks_are_lost(gaps: str, oldest: int, caplog: pytest.LogCaptureFixture) -> None:
    found, lost = GAPS[gaps]
    what = "were removed" if oldest else "are damaged or missing"
    for fail_on_loss in (True, False):
        connection = FakeConnection()
        connection.answer_lacking(1, 0, found, 10)
        connection.answers[0].ext["minOffset"] = str(oldest)  # type: ignore[index]
        talk = exchange(BulkReadExchange, connection, fail_on_loss=fail_on_loss)
        if fail_on_loss:
            with pytest.raises(DataLost, match=f"messages {lost[0][0]} to {lost[0][1]} of queue b/3 .* {what}"):
                read(talk, (0, 10))
            continue
        with caplog.at_level(logging.WARNING):
            assert read(talk, (0, 10)) == list(found)
    for first, last in lost:
        assert f"messages {first} to {last} of queue b/3 of topic 'Orders' {what}" in caplog.text
    assert caplog.text.count("continuing without them") == len(lost)


def test_what_a_filter_leaves_out_is_no_loss_unless_the_broker_says_so(caplog: pytest.LogCaptureFixture) -> None:
    for said, lost in (("", []), ("3-4", [(3, 3)]), ("0-2,7-10", [(0, 1), (7, 9)])):
        connection = FakeConnection()
        connection.answer_lacking(1, 0, (5, 6), 10)
        connection.answers[0].ext |= {"minOffset": "0", **({"lost": said} if said else {})}  # type: ignore[operator]
        with caplog.at_level(logging.WARNING):
            assert read(exchange(BulkReadExchange, connection, wanted=TAGS, fail_on_loss=False), (0, 10)) == [5, 6]
        for first, last in lost:
            assert f"messages {first} to {last} of queue b/3 of topic 'Orders' are damaged or missing" in caplog.text
        assert caplog.text.count("continuing without them") == len(lost)
        caplog.clear()


@pytest.mark.parametrize("said", ["3", "-", "3-x", "3-4-5", "-1-4", "3-4;5-6"])
def test_a_broker_that_says_nonsense_about_losses_fails_the_read(said: str) -> None:
    connection = FakeConnection()
    connection.answer_lacking(1, 0, (5, 6), 10)
    connection.answers[0].ext |= {"minOffset": "0", "lost": said}  # type: ignore[operator]
    with pytest.raises(RemoteProtocolError, match="is no range of offsets"):
        read(exchange(BulkReadExchange, connection, wanted=TAGS), (0, 10))


def test_damaged_frames_are_asked_for_again_if_loss_is_allowed() -> None:
    """The broker leaves the damaged messages out then; if it sends them again, the read fails."""
    left = [RangeProgress(Range(QUEUE, 0, 10)), RangeProgress(Range(QUEUE, 50, 60))]
    connection = FakeConnection()
    connection.answer(1, 0, 0, 10)
    connection.answer(2, 0, 50, 60)
    flip(connection.answers[1])
    talk = exchange(BulkReadExchange, connection, fail_on_loss=False)
    with pytest.raises(Unchecked):
        list(talk.read(left))
    assert sorted((progress.next, progress.end) for progress in left) == [(0, 10), (50, 60)]
    again = FakeConnection()
    again.answer(1, 0, 0, 10)
    again.answer(2, 0, 50, 60)
    flip(again.answers[1])
    with pytest.raises(ReadError, match="CRC") as failed:
        list(
            exchange(BulkReadExchange, again, fail_on_loss=False).read(sorted(left, key=lambda progress: progress.next))
        )
    assert not isinstance(failed.value, Unchecked)
    assert [ext["checked"] for _, ext in again.requests] == ["true", "true"]
    assert all("checked" not in ext for _, ext in connection.requests)


@pytest.mark.parametrize(
    ("kind", "hint"), [(BulkReadExchange, "set failOnDataLoss to false to"), (Pulls, "startingOffsets")]
)
def test_the_error_about_a_damaged_message_says_how_to_go_on(kind: type[Exchange], hint: str) -> None:
    """RocketMQ's brokers send damaged messages whatever the query allows, and so does one that leaves none out."""
    for fail_on_loss in (True, False):
        connection = FakeConnection()
        connection.answer(1, 0, 0, 10)
        flip(connection.answers[0])
        progress = RangeProgress(Range(QUEUE, 0, 10))
        progress.checked = not fail_on_loss
        wanted = hint if fail_on_loss else "startingOffsets"
        text = rf"message 9 of queue 3 .* CRC; 'martlet store verify' lists damaged messages; {wanted}"
        with pytest.raises(ReadError, match=text):
            list(exchange(kind, connection, fail_on_loss=fail_on_loss).read([progress]))


@pytest.mark.parametrize(("kind", "messages_each"), [(BulkReadExchange, 200), (Pulls, 32)])
def test_records_of_many_answers_are_decoded_at_once(kind: type[Exchange], messages_each: int) -> None:
    """Of 32 records, to decode them in columns takes longer than one by one."""
    connection = FakeConnection()
    for opaque, first in enumerate(range(0, 3200, messages_each), 1):
        connection.answer(opaque, 0, first, first + messages_each, (0, 3200))
    rows = exchange(kind, connection).read([RangeProgress(Range(QUEUE, 0, 3200))])
    assert [len(records) for records in rows] == [3200]


def test_large_records_are_decoded_before_all_were_received() -> None:
    """A thousand at once are enough; the others stay at the broker."""
    connection = FakeConnection()
    for first in range(0, 3000, 50):
        connection.answer(1, 0, first, first + 50, (0, 3000), more=first < 2950, body=bytes(4000))
    rows = exchange(BulkReadExchange, connection).read([RangeProgress(Range(QUEUE, 0, 3000))])
    first = len(next(rows))
    assert 1000 <= first < 2000
    assert len(connection.answers) == 60 - first // 50
    assert sum(map(len, rows)) == 3000 - first


def flip(answer: AnswerFrame) -> None:
    """Damage the body of the last message in *answer*."""
    body = bytes(answer.body)
    answer.body[body.rindex(b"body")] ^= 1
