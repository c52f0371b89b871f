"""Inner batches of RocketMQ 5 become the messages that its own clients unroll."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.columns.stored import HOST, STORE_MS, stored, usual

from martlet.message import Message, decode_properties, encode_properties
from martlet_columns.decode import VECTOR_MIN, Decoder
from martlet_columns.records import Records
from martlet_columns.schema import COLUMNS
from martlet_remoting.wire.batches import BatchMessage, encode_batch
from martlet_remoting.wire.inner_batches import INNER_BATCH
from martlet_spark.errors import ReadError
from martlet_spark.read.inner_batches import unrolled
from martlet_spark.read.received import check_range

WIDE_HOST = bytes(15) + b"\x01\x00\x00\x2a\x9f"


def inner(first: int, count: int) -> list[BatchMessage]:
    """Messages of an inner batch."""
    properties = [encode_properties({"TAGS": f"T{n}", "UNIQ_KEY": f"K{n}"}) for n in range(first, first + count)]
    return [BatchMessage(f"inner {first + n}".encode(), text, n) for n, text in enumerate(properties)]


def outer(messages: list[BatchMessage], sys_flag: int = INNER_BATCH, born_host: bytes = HOST) -> Message:
    """The record of a batch, compressed if *sys_flag* says so."""
    body = encode_batch(messages)
    body = zlib.compress(body) if sys_flag & 1 else body
    return Message("Orders", body, b"OWN\x01x\x02", 3, 99, sys_flag, 5000, born_host, 7)


def records(*parts: tuple[int, Message], store_host: bytes = HOST) -> Records:
    """Records of messages, each with its offset."""
    data = bytearray()
    for offset, message in parts:
        data += stored([message], first=offset, store_host=store_host)
    return Records(data)


@pytest.mark.parametrize("sys_flag", [INNER_BATCH, INNER_BATCH | 0x301])
@pytest.mark.parametrize("host", [HOST, WIDE_HOST])
def test_a_batch_becomes_its_messages(sys_flag: int, host: bytes) -> None:
    found = unrolled(records((0, usual(0)), (1, outer(inner(1, 3), sys_flag, host)), (4, usual(4)), store_host=host), 0)
    check_range(found, 3, 0, 5)
    rows = Decoder(tuple(COLUMNS)).decode(found, "b").to_pylist()
    assert [row["offset"] for row in rows] == list(range(5))
    assert [row["body"] for row in rows] == [b"body", b"inner 1", b"inner 2", b"inner 3", b"body"]
    assert [row["flag"] for row in rows] == [0, 0, 1, 2, 4]
    assert [row["msg_id"] for row in rows[1:4]] == ["K1", "K2", "K3"]
    assert rows[2]["properties"] == [("TAGS", "T2"), ("UNIQ_KEY", "K2")]
    assert [row["reconsume_times"] for row in rows] == [0] * 5
    assert {row["born_ts"].timestamp() for row in rows[1:4]} == {5.0}
    assert {row["store_ts"].timestamp() * 1000 for row in rows[1:4]} == {STORE_MS}


@pytest.mark.parametrize("flag", [0x40, 0x80])
def test_a_record_with_one_of_both_flags_is_a_message(flag: int) -> None:
    found = records((0, outer(inner(0, 3), flag)))
    assert unrolled(found, 0) is found
    assert Decoder(("body",)).decode(found, "b").column("body").to_pylist() == [encode_batch(inner(0, 3))]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(0, 60), st.integers(0, 60))
def test_a_range_that_cuts_batches_has_its_messages(counts: list[int], first: int, end: int) -> None:
    """0 means a message that is no batch. Brokers answer with whole batches, from the one with *first* on."""
    parts, offset = [], 0
    for count in counts:
        size = max(count, 1)
        if offset + size > first:
            parts.append((offset, outer(inner(offset, count)) if count else usual(offset)))
        offset += size
    if not parts:
        return
    found = unrolled(records(*parts), first)
    check_range(found, 3, first, max(offset, first))
    cut = found.before(end)
    offsets = cut.heads["offset"].tolist() if cut is not None else []
    assert offsets == list(range(first, min(offset, end)))


def test_many_batches_are_decoded_at_once() -> None:
    count = VECTOR_MIN
    found = unrolled(records(*((2 * n, outer(inner(2 * n, 2))) for n in range(count))), 0)
    bodies = Decoder(("body", "tag")).decode(found, "b")
    assert bodies.column("body").to_pylist() == [f"inner {n}".encode() for n in range(2 * count)]
    assert bodies.column("tag").to_pylist() == [f"T{n}" for n in range(2 * count)]


@pytest.mark.parametrize(
    ("body", "sys_flag", "text"),
    [
        (b"\x00\x00", INNER_BATCH, "batch message 0 is cut short"),
        (encode_batch(inner(0, 2))[:-1], INNER_BATCH, "batch message 1 claims 49 bytes; 48 are left"),
        (b"no zlib", INNER_BATCH | 1, "ZLIB body of 7 bytes is damaged"),
    ],
    ids=["too short", "cut", "not compressed"],
)
def test_a_damaged_batch_fails_the_read(body: bytes, sys_flag: int, text: str) -> None:
    message = usual(0)
    message.body, message.sys_flag = body, sys_flag
    with pytest.raises(ReadError) as caught:
        unrolled(records((5, message)), 0)
    assert f"message 5 of queue 3 (position {1 << 33} of the broker's log) is a batch" in str(caught.value)
    assert text in str(caught.value)


def test_properties_of_the_batch_itself_are_left_out() -> None:
    """Stock clients see a message's own properties only."""
    (row,) = Decoder(("properties",)).decode(unrolled(records((0, outer(inner(7, 1)))), 0), "b").to_pylist()
    assert dict(row["properties"]) == decode_properties(inner(7, 1)[0].properties)
