"""Which queue each row goes to, and how rows are divided into requests."""

from zlib import crc32

import pyarrow as pa
import pytest

from martlet_remoting.wire.batches import decode_batch
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.errors import OptionError, WriteError
from martlet_spark.write.columns import check_columns
from martlet_spark.write.targets import CHUNK_MESSAGES_MAX, QueueTurns, RowTarget, Targets

QUEUES = {
    "One": [MessageQueue("One", "a", number) for number in range(4)],
    "Two": [MessageQueue("Two", broker, number) for broker in "ab" for number in range(2)],
}
TYPES = {"body": pa.binary(), "topic": pa.string(), "key": pa.string(), "queue": pa.int32(), "broker": pa.string()}
TYPES["deliver_at"] = pa.timestamp("us", tz="UTC")


def frame(names: str, *rows: tuple[object, ...]) -> pa.RecordBatch:
    columns = [
        pa.array(values, TYPES[name]) for name, values in zip(names.split(), zip(*rows, strict=True), strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=names.split())


def divided(
    rows: pa.RecordBatch, topic: str = "", *, chunk_bytes: int = 1 << 20
) -> list[tuple[RowTarget, list[bytes]]]:
    targets = Targets(QUEUES.__getitem__, topic, chunk_bytes)
    found = [(chunk.place, [message.body for message in decode_batch(chunk.body)]) for chunk in targets.chunks(rows)]
    assert all(chunk.count == len(bodies) for chunk, (_, bodies) in zip(targets.chunks(rows), found, strict=True))
    return found


def test_rows_without_a_key_may_go_anywhere() -> None:
    rows = frame("body key", (b"1", None), (b"2", ""), (b"3", None))
    assert divided(rows, "One") == [(RowTarget("One"), [b"1", b"2", b"3"])]


def test_a_key_chooses_the_queue_and_keeps_the_order() -> None:
    keys = [f"key-{number % 17}" for number in range(200)]
    found = divided(frame("body key", *((b"%d" % number, key) for number, key in enumerate(keys))), "One")
    by_queue: dict[int, list[bytes]] = {}
    for number, key in enumerate(keys):
        by_queue.setdefault(crc32(key.encode()) % 4, []).append(b"%d" % number)
    assert sorted(found) == sorted((RowTarget("One", "a", queue), bodies) for queue, bodies in by_queue.items())


def test_topics_are_divided_and_the_option_replaces_the_column() -> None:
    rows = frame("topic body", ("One", b"1"), ("Two", b"2"), ("One", b"3"))
    assert divided(rows) == [(RowTarget("One"), [b"1", b"3"]), (RowTarget("Two"), [b"2"])]
    assert divided(rows, "Two") == [(RowTarget("Two"), [b"1", b"2", b"3"])]


def test_a_row_can_name_its_queue() -> None:
    rows = frame("body queue key", (b"1", 3, "k"), (b"2", None, None), (b"3", 3, None))
    assert divided(rows, "One") == [(RowTarget("One"), [b"2"]), (RowTarget("One", "a", 3), [b"1", b"3"])]
    rows = frame("body queue broker", (b"1", 1, "b"), (b"2", None, None), (b"3", 1, "a"))
    found = [(RowTarget("Two"), [b"2"]), (RowTarget("Two", "a", 1), [b"3"]), (RowTarget("Two", "b", 1), [b"1"])]
    assert sorted(divided(rows, "Two")) == found


def test_messages_with_a_time_travel_apart() -> None:
    rows = frame("body deliver_at", (b"1", None), (b"2", 5_000), (b"3", None))
    assert divided(rows, "One") == [(RowTarget("One"), [b"1", b"3"]), (RowTarget("One", timed=True), [b"2"])]


def test_a_chunk_has_limits() -> None:
    rows = frame("body", *((bytes(1000),) for _ in range(10)))
    assert [len(bodies) for _, bodies in divided(rows, "One", chunk_bytes=3500)] == [3, 3, 3, 1]
    assert [len(bodies) for _, bodies in divided(rows, "One", chunk_bytes=10)] == [1] * 10
    rows = frame("body", *((b"x",) for _ in range(CHUNK_MESSAGES_MAX + 1)))
    assert [len(bodies) for _, bodies in divided(rows, "One")] == [CHUNK_MESSAGES_MAX, 1]


@pytest.mark.parametrize(
    ("names", "row", "topic", "text"),
    [
        ("body queue", (b"x", 4), "One", "topic 'One' has no queue 4 on broker 'a'; it has 4, numbered from 0"),
        ("body queue", (b"x", -1), "One", "topic 'One' has no queue -1"),
        ("body queue", (b"x", 1), "Two", "queue 1 of topic 'Two' is on several brokers, a, b; name one"),
        ("body queue broker", (b"x", 1, "c"), "Two", "has no queue 1 on broker 'c'; it is on a, b"),
        ("body topic", (b"x", None), "", "a row has no topic"),
        ("body topic", (b"x", ""), "", "a row has no topic"),
    ],
)
def test_a_row_without_a_place_says_why(names: str, row: tuple[object, ...], topic: str, text: str) -> None:
    with pytest.raises(WriteError, match=text):
        divided(frame(names, row), topic)


def test_queues_are_taken_in_turn_and_failing_brokers_avoided() -> None:
    turns = QueueTurns(QUEUES.__getitem__)
    assert {turns.next_queue(RowTarget("Two")) for _ in range(4)} == set(QUEUES["Two"])
    assert {turns.next_queue(RowTarget("Two"), ["a"]).broker_name for _ in range(4)} == {"b"}
    assert {turns.next_queue(RowTarget("Two", "a"), ["a"]) for _ in range(4)} == set(QUEUES["Two"][:2])
    assert turns.next_queue(RowTarget("Two", "b", 1)) == QUEUES["Two"][3]


@pytest.mark.parametrize(
    ("types", "text"),
    [
        ({}, "column 'body' of type binary or string is missing"),
        ({"body": "int"}, "column 'body' has the type int; it must be binary or string, cast it"),
        ({"body": "binary", "tags": "string"}, "column 'tags' of type string cannot be written; did you mean 'tag'?"),
        ({"body": "binary", "amount": "int"}, "column 'amount' of type int cannot be written; drop it"),
        ({"body": "binary", "properties": "map<string,int>"}, "it must be map<string,string>"),
        ({"body": "binary", "broker": "string"}, "column 'queue' of type int is missing"),
    ],
)
def test_columns_that_cannot_be_written_are_named(types: dict[str, str], text: str) -> None:
    with pytest.raises(OptionError, match=text.replace("?", r"\?")):
        check_columns(types, "One")


def test_a_topic_is_needed() -> None:
    assert check_columns({"body": "string"}, "One") == ("body",)
    with pytest.raises(OptionError, match="column 'topic' of type string is missing; select it, or set"):
        check_columns({"body": "string"}, "")
