"""A record's bytes, read in place: a view must agree with `decode_record` field for field."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.delivery.merge import records_in
from martlet.errors import CorruptRecord
from martlet.message import Message, Record, decode_properties, encode_properties, find_property
from martlet.records.codec import decode_record, encode_record
from martlet.records.layout import (
    ENTRY,
    ENTRY_BYTES,
    POSITION_SIZE,
    RECORD_BYTES_MIN,
    RecordView,
    record_views,
)
from martlet.store import Queue
from martlet.store.format.tags import find_tags

QUEUE = Queue("t", 0)
I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
HOSTS = st.binary(min_size=8, max_size=8) | st.binary(min_size=20, max_size=20)
NAMES = st.text(st.characters(exclude_characters="\x00\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=5)
BUFFERS = st.sampled_from((bytes, bytearray, memoryview))

messages = st.builds(
    Message,
    st.one_of(NAMES, st.just("t" * 127), st.just("t" * 128), st.just("t" * 255)),
    st.binary(max_size=300),
    st.dictionaries(NAMES, NAMES, max_size=5).map(encode_properties),
    st.just(0),
    I32,
    st.integers(0, 2**12).map(lambda flags: flags & ~0x30),
    I64,
    HOSTS,
    I32,
    I64,
)


TAGGED = st.lists(
    st.sampled_from((b"TAGS\x01a/b\x02", b"TAGS\x01\x02", b"XTAGS\x01no\x02", b"K\x01TAGS\x02", b"TAGS\x01\xff")),
    max_size=4,
).map(b"".join)


@given(messages, st.lists(TAGGED, min_size=1, max_size=3), I64.map(lambda position: position // 2), HOSTS)
def test_the_names_of_records_are_their_tags(message: Message, tagged: list[bytes], position: int, host: bytes) -> None:
    data, expected = b"", []
    for number, properties in enumerate(tagged):
        sent = Message(message.topic, message.body, properties, 0, 0, message.sys_flag, 0, message.born_host)
        record = encode_record(sent, 1, 2, position - number, 3, host)
        name = RecordView(record).property("TAGS") or ""
        try:
            find_tags(properties).decode()
        except UnicodeDecodeError:
            name = ""  # it is no text, so no name
        expected.append((position - number, len(data), len(data) + len(record), name))
        data += record
    found = records_in(data, QUEUE)
    assert [(at, start, end, name) for at, _, start, end, name, _ in found] == expected


@given(messages, I64, HOSTS)
def test_the_name_of_a_record_that_is_cut_short_is_not_read(message: Message, position: int, host: bytes) -> None:
    data = encode_record(message, 1, 2, position, 3, host)
    with pytest.raises(CorruptRecord):
        records_in(data[:-1], QUEUE)


def fields(record: Record | RecordView) -> tuple[object, ...]:
    return (
        record.topic,
        record.queue_id,
        record.queue_offset,
        record.position,
        record.size,
        bytes(record.body),
        record.properties,
        record.flag,
        record.sys_flag,
        record.born_ms,
        record.born_host,
        record.store_ms,
        record.store_host,
        record.reconsume_times,
        record.prepared_position,
        record.body_crc,
    )


@given(messages, I32, I64, I64, I64, HOSTS, st.binary(max_size=9), st.binary(max_size=9), BUFFERS)
def test_a_view_reads_what_decoding_reads(
    message: Message,
    queue_id: int,
    offset: int,
    position: int,
    store_ms: int,
    store_host: bytes,
    before: bytes,
    after: bytes,
    kind: Any,
) -> None:
    data = encode_record(message, queue_id, offset, position, store_ms, store_host)
    view = RecordView(kind(before + data + after), len(before))
    decoded = decode_record(data)
    assert fields(view) == fields(decoded)
    for name, value in decode_properties(decoded.properties).items():
        assert view.property(name) == view.property(name.encode()) == value
    assert RecordView(kind(before + data + after), len(before)).property("absent") is None


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize(
    "properties",
    [
        b"",
        b"A\x01one\x02",
        b"A\x01one",  # without the last separator
        b"AA\x01other\x02A\x01one\x02",
        b"A\x01one\x02AA\x01other\x02",
        b"AA\x01other\x02BA\x01another\x02",
        b"A\x01one\x02A\x01two\x02",  # the last of several
        b"A\x01\x02",
        b"B\x01A\x01one\x02",  # within a value
        b"A\x01one\x02B\x01A\x01two\x02",
        b"A\x01\xff\xfe\x02",  # not UTF-8
    ],
)
def test_a_property_is_found_as_in_the_decoded_properties(properties: bytes, kind: Any) -> None:
    data = encode_record(Message("A\x01one\x02", b"A\x01body\x02", properties), 0, 0, 0, 0, bytes(8))
    expected = find_property(properties, b"A").decode("utf-8", "replace") or None
    assert RecordView(kind(b"..." + data + b"A\x01behind\x02"), 3).property("A") == expected


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_view_of_bytes_that_are_no_record_raises_an_error(kind: Any) -> None:
    data = encode_record(Message("topic", b"body", b"A\x01one\x02"), 0, 0, 7, 0, bytes(8))
    for at, value in ((3, 0xFF), (84, 0x7F), (87, 0xFF), (92, 0xFF), (39, 0x30), (7, 0xAB)):
        broken = bytearray(data)
        broken[at] = value
        with pytest.raises(CorruptRecord, match="parts do not add up"):
            RecordView(kind(bytes(broken))).property("A")
    with pytest.raises(CorruptRecord, match="parts do not add up"):
        RecordView(kind(data[:-1])).property("A")


def test_views_of_a_piece_are_its_records_in_order() -> None:
    records = [encode_record(Message("t", b"x" * size), 0, size, 0, 0, bytes(8)) for size in range(4)]
    views = list(record_views(memoryview(b"".join(records))))
    assert [view.queue_offset for view in views] == [0, 1, 2, 3]
    assert [view.start for view in views] == [0, *(sum(map(len, records[: n + 1])) for n in range(3))]
    assert list(record_views(b"")) == []


def test_the_smallest_record_and_entry_have_the_sizes_that_the_layout_names() -> None:
    assert len(encode_record(Message("", b""), 0, 0, 0, 0, bytes(8))) == RECORD_BYTES_MIN
    assert ENTRY.size == ENTRY_BYTES == POSITION_SIZE.size + 8
