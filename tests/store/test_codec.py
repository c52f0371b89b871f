"""The layout of records: spec examples, round trips, and every kind of damage."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.errors import CorruptRecord
from martlet.message import Message, Record
from martlet.records.codec import (
    check_record,
    decode_record,
    decode_records,
    encode_filler,
    encode_record,
    hash_code,
    key_hash,
    record_size,
    tags_code,
)
from martlet.records.layout import BLANK_MAGIC, HEAD_BYTES

HOST4 = bytes((10, 0, 0, 2)) + (10911).to_bytes(4, "big")
HOST6 = bytes(range(16)) + (10911).to_bytes(4, "big")

hosts = st.sampled_from([HOST4, HOST6])
messages = st.builds(
    Message,
    topic=st.text(st.characters(codec="utf-8"), min_size=1, max_size=60).filter(lambda t: len(t.encode()) < 127)
    | st.just("%RETRY%" + "g" * 150),
    body=st.binary(max_size=300),
    properties=st.binary(max_size=80),
    flag=st.integers(-(2**31), 2**31 - 1),
    sys_flag=st.sampled_from([0, 1, 4, 8, 12, 0x301]),
    born_ms=st.integers(0, 2**62),
    born_host=hosts,
    reconsume_times=st.integers(0, 100),
    prepared_position=st.integers(0, 2**62),
)


def sample(body: bytes = b"hello", topic: str = "T") -> Message:
    return Message(topic, body, b"TAGS\x01A\x02", born_ms=5, born_host=HOST4)


FIELDS = (
    *("topic", "queue_id", "queue_offset", "position", "size", "body", "properties", "flag", "sys_flag", "born_ms"),
    *("born_host", "store_ms", "store_host", "reconsume_times", "prepared_position", "body_crc"),
)


def fields_of(record: Record) -> list[object]:
    return [getattr(record, name) for name in FIELDS]


def test_a_record_has_the_fields_where_rocketmq_puts_them() -> None:
    data = encode_record(sample(), 3, 7, 4096, 99, HOST4)
    assert len(data) == 91 + 5 + 1 + 7
    assert struct.unpack_from(">iIi", data) == (len(data), 0xDAA320A7, zlib.crc32(b"hello") & 0x7FFFFFFF)
    assert struct.unpack_from(">iiqqiq", data, 12) == (3, 0, 7, 4096, 0, 5)
    assert data[48:56] == HOST4
    assert struct.unpack_from(">q", data, 56) == (99,)
    assert data[64:72] == HOST4
    assert struct.unpack_from(">iqi", data, 72) == (0, 0, 5)
    assert data[88:] == b"hello\x01T\x00\x07TAGS\x01A\x02"


def test_a_long_topic_makes_a_v2_record() -> None:
    topic = "%DLQ%" + "g" * 123
    data = encode_record(sample(topic=topic), 0, 0, 0, 0, HOST4)
    assert data[4:8] == bytes.fromhex("DAA320AB")
    assert decode_record(data).topic == topic
    assert encode_record(sample(topic=topic[:-1]), 0, 0, 0, 0, HOST4)[4:8] == bytes.fromhex("DAA320A7")


@given(messages, hosts, st.integers(0, 2**40), st.integers(0, 2**40))
def test_what_is_encoded_comes_back(message: Message, host: bytes, offset: int, position: int) -> None:
    data = encode_record(message, 2, offset, position, 123, host)
    assert len(data) == record_size(message, message.topic.encode(), host)
    record = decode_record(data, 0, position)
    assert record.topic == message.topic
    assert record.body == message.body
    assert record.properties == message.properties
    assert (record.queue_id, record.queue_offset, record.position, record.size) == (2, offset, position, len(data))
    assert (record.flag, record.born_ms, record.born_host) == (message.flag, message.born_ms, message.born_host)
    assert (record.store_ms, record.store_host) == (123, host)
    assert (record.reconsume_times, record.prepared_position) == (message.reconsume_times, message.prepared_position)
    assert record.sys_flag & ~0x30 == message.sys_flag
    assert bool(record.sys_flag & 0x10) == (len(message.born_host) == 20)
    assert bool(record.sys_flag & 0x20) == (len(host) == 20)
    assert check_record(data, 0, len(data), position)


@given(st.lists(messages, max_size=6))
def test_adjacent_records_are_decoded_separately(wanted: list[Message]) -> None:
    data = b"".join(encode_record(m, 0, i, 0, 0, HOST4) for i, m in enumerate(wanted))
    found = decode_records(data)
    assert [r.body for r in found] == [m.body for m in wanted]
    assert [fields_of(r) for r in decode_records(memoryview(data))] == [fields_of(r) for r in found]


def test_a_filler_is_skipped_with_all_it_spans() -> None:
    one = encode_record(sample(b"one"), 0, 0, 0, 0, HOST4)
    two = encode_record(sample(b"two"), 0, 1, 0, 0, HOST4)
    data = one + encode_filler(30) + bytes(22) + two + encode_filler(8)
    assert [r.body for r in decode_records(data)] == [b"one", b"two"]
    assert encode_filler(30) == struct.pack(">iI", 30, BLANK_MAGIC) == bytes.fromhex("0000001ecbd43194")


def test_every_cut_is_noticed() -> None:
    data = encode_record(sample(), 3, 7, 4096, 99, HOST6)
    for cut in range(len(data)):
        with pytest.raises(CorruptRecord):
            decode_record(data[:cut], 0, 4096)
        assert not check_record(data[:cut], 0, cut, 4096)


def test_a_flipped_bit_in_the_structure_or_the_body_is_noticed() -> None:
    data = encode_record(sample(b"x" * 40), 3, 7, 4096, 99, HOST4)
    guarded = [*range(12), *range(28, 36), *range(84, 88 + 41), 130, 131]
    for at in guarded:
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises(CorruptRecord):
                decode_record(damaged, 0, 4096)
            assert not check_record(damaged, 0, len(damaged), 4096)


def test_a_topic_that_is_wrong_or_has_a_nul_is_noticed() -> None:
    data = bytearray(encode_record(sample(b"x" * 40), 3, 7, 4096, 99, HOST4))
    topic = sample().topic.encode()
    assert check_record(data, 0, len(data), 4096, topic)
    assert not check_record(data, 0, len(data), 4096, topic + b"x")
    assert not check_record(data, 0, len(data), 4096, topic[:-1])
    data[HEAD_BYTES + 40 + 1] = 0  # no CRC covers the topic
    assert not check_record(data, 0, len(data), 4096)


@given(st.binary(max_size=400))
def test_garbage_is_refused_in_one_way(data: bytes) -> None:
    if data:
        with pytest.raises(CorruptRecord):
            decode_records(data)


def test_the_error_names_the_position_and_the_defect() -> None:
    data = encode_record(sample(), 3, 7, 4096, 99, HOST4)
    with pytest.raises(CorruptRecord, match="record at position 5000 says it is at position 4096") as caught:
        decode_record(data, 0, 5000)
    assert caught.value.position == 5000


def test_the_body_is_not_checked_when_nobody_asks() -> None:
    data = bytearray(encode_record(sample(), 3, 7, 4096, 99, HOST4))
    data[88] ^= 1
    assert decode_record(data, check_body=False).body == b"iello"
    assert decode_records(data, check_body=False)[0].body == b"iello"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("A", 65),
        ("TagA", 2598919),
        ("hello world", 1794106052),
        ("polygenelubricants", -(2**31)),
        ("ä", 228),
        ("😀", 0xD83D * 31 + 0xDE00),
    ],
)
def test_tags_code_is_javas_hash_code(text: str, code: int) -> None:
    assert tags_code(text) == code
    assert tags_code(text.encode()) == code


@given(st.text(st.characters(codec="utf-8"), max_size=600))
def test_the_hash_is_the_same_however_it_is_computed(text: str) -> None:
    units = struct.unpack(f"<{len(text.encode('utf-16-le')) // 2}H", text.encode("utf-16-le"))
    code = 0
    for unit in units:
        code = (31 * code + unit) % 2**32
    assert hash_code(text.encode()) == code


def test_the_key_hash_is_the_magnitude() -> None:
    assert key_hash("T", b"k") == abs(tags_code("T#k"))
    assert key_hash("TopicTest", b"7F000001") == abs(tags_code("TopicTest#7F000001"))


@given(st.binary(max_size=60))
def test_the_key_hash_fits_an_entry_for_any_bytes(key: bytes) -> None:
    assert 0 <= key_hash("topic", key) < 2**31
