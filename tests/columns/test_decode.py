"""Decoding into Arrow: the fast way agrees with the loop over records, for records of every kind."""

import datetime
import sys
import zlib

import pyarrow as pa
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from martlet.message import PROPERTIES_BYTES_MAX, Message, Record, encode_properties
from martlet.records.codec import decode_records, with_room_for_record_crc, write_record_crc
from martlet.records.compression import COMPRESSED, COMPRESSION_LZ4, COMPRESSION_ZLIB, COMPRESSION_ZSTD, PackageMissing
from martlet.records.layout import HEAD_BYTES, POSITION_AT
from martlet_columns.decode import VECTOR_MIN, Decoder
from martlet_columns.errors import RecordError, UndecodableBody
from martlet_columns.records import Records, joined
from martlet_columns.schema import COLUMNS, MS_MAX, MS_MIN, arrow_schema
from martlet_remoting.wire.answers.messages import ReceivedMessage, received

from .stored import HOST, STORE_MS, records, stored, usual

ALL = tuple(COLUMNS)
NAMED = tuple(name for name in COLUMNS if name != "properties")  # properties are found by their bytes, not all split
WIDE_HOST = bytes(15) + b"\x01\x00\x00\x2a\x9f"
MANY = VECTOR_MIN * 2
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def both_ways(found: Records, names: tuple[str, ...] = ALL) -> pa.RecordBatch:
    """Decode *found* all at once and one by one, and return what both agree on."""
    if names == ALL:
        both_ways(found, NAMED)
    decoder = Decoder(names)
    fast = decoder.decode(found, "broker-a")
    slow = decoder.decode_one_by_one(found, "broker-a")
    fast.validate(full=True)
    assert fast.schema == slow.schema == arrow_schema(names)
    assert fast.to_pylist() == slow.to_pylist()
    return fast


def test_a_message_becomes_a_row() -> None:
    row = both_ways(records([usual(number) for number in range(MANY)], first=100)).to_pylist()[8]
    utc = datetime.UTC
    assert row == {
        "topic": "Orders",
        "broker": "broker-a",
        "queue": 3,
        "offset": 108,
        "key": "key-8",
        "tag": "T1",
        "body": b"body",
        "properties": [("KEYS", "key-8"), ("TAGS", "T1"), ("UNIQ_KEY", f"7F{8:030X}"), ("WAIT", "true")],
        "msg_id": f"7F{8:030X}",
        "born_ts": datetime.datetime.fromtimestamp(1_700_000_000.008, utc),
        "store_ts": datetime.datetime.fromtimestamp(1_700_000_001.008, utc),
        "flag": 8,
        "reconsume_times": 0,
    }


@pytest.mark.parametrize("name", ALL)
def test_each_column_can_be_read_alone(name: str) -> None:
    assert both_ways(records([usual(number) for number in range(MANY)]), (name,)).num_rows == MANY


ODD = {
    "no properties": b"",
    "a name twice": b"a\x01b\x02a\x01c\x02",
    "an empty value": b"a\x01\x02b\x01c\x02",
    "an empty name": b"\x01a\x02",
    "no value": b"abc\x02TAGS\x01x\x02",
    "two separators": b"a\x01b\x01c\x02TAGS\x01x\x02",
    "no end": b"TAGS\x01x\x02KEYS\x01y",
    "only a separator": b"\x02",
    "not UTF-8": b"TAGS\x01\xff\xfe\x02",
    "a name in a value": b"a\x01TAGS\x02TAGS\x01real\x02",
    "a name as a value": b"a\x01TAGS\x01b\x02KEYS\x01c\x02",
    "a name at the end of another": b"MYTAGS\x01a\x02MY_UNIQ_KEY\x01b\x02",
    "half of a name": b"_KEY\x01a\x02UNIQ\x01b\x02QUIQ_KEY\x01c\x02",
    "names of columns twice": b"UNIQ_KEY\x01a\x02TAGS\x01b\x02UNIQ_KEY\x01c\x02TAGS\x01\x02",
    "empty values of columns": b"UNIQ_KEY\x01\x02TAGS\x01\x02KEYS\x01",
    "separators in values of columns": b"KEYS\x01a\x01b\x02TAGS\x01a\x00b\x02",
    "a name that another text ends": b"a\x01b\x02KE",
    "only a name": b"KEYS",
}


@pytest.mark.parametrize("properties", ODD.values(), ids=ODD.keys())
@pytest.mark.parametrize("every", [1, 3, MANY])
def test_irregular_properties_are_read_as_all_clients_read_them(properties: bytes, every: int) -> None:
    messages = [usual(number) for number in range(MANY)]
    for message in messages[::every]:
        message.properties = properties
    assert both_ways(records(messages)).num_rows == MANY


def test_a_repeated_name_that_no_column_uses_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [usual(number) for number in range(MANY)]
    for message in messages:
        message.properties += b"a\x01b\x02a\x01c\x02"
    found = records(messages)
    slow = Decoder(NAMED).decode_one_by_one(found, "b")
    monkeypatch.setattr(Decoder, "_one_by_one", lambda *_: pytest.fail("records were decoded one by one"))
    assert Decoder(NAMED).decode(found, "b").to_pylist() == slow.to_pylist()


def odd_message(kind: str, number: int) -> Message:
    message = usual(number)
    if kind == "compressed":
        message.body, message.sys_flag = zlib.compress(b"hello" * number), 0x1
    elif kind == "IPv6":
        message.born_host = WIDE_HOST
    elif kind == "long topic":
        message.topic = "t" * 200
    elif kind == "empty":
        message.body = b""
    return message


@pytest.mark.parametrize("kind", ["compressed", "IPv6", "long topic", "empty"])
@pytest.mark.parametrize("every", [1, 3, MANY])
def test_odd_records_keep_their_place(kind: str, every: int) -> None:
    messages = [odd_message(kind, n) if n % every == 0 else usual(n) for n in range(MANY)]
    found = both_ways(records(messages, first=7))
    assert found.column("offset").to_pylist() == list(range(7, 7 + MANY))
    if kind == "compressed":
        assert found.column("body").to_pylist()[every if every < MANY else 0] == b"hello" * (every % MANY)


def test_brokers_with_ipv6_addresses_are_read() -> None:
    assert both_ways(records([usual(number) for number in range(MANY)], store_host=WIDE_HOST)).num_rows == MANY


def test_the_id_of_a_message_without_a_unique_key_is_its_place() -> None:
    messages = [usual(number) for number in range(MANY)]
    messages[5].properties = b"TAGS\x01x\x02"
    found = records(messages)
    assert both_ways(found).column("msg_id").to_pylist()[5] == (
        HOST.hex().upper() + f"{int(found.heads['position'][5]):016X}"
    )


def test_the_id_of_a_record_with_an_impossible_position_has_its_bytes() -> None:
    messages = [usual(number) for number in range(MANY)]
    messages[0].properties = messages[1].properties = b""
    found = records(messages)
    found.data[POSITION_AT : POSITION_AT + 8] = b"\xff" * 8
    assert both_ways(Records(found.data), ("msg_id",)).column("msg_id")[0].as_py() == HOST.hex().upper() + "F" * 16


texts = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), max_size=4)
MARKED = [b"\x01", b"\x02", b"TAGS\x01a\x02", b"KEYS\x01", b"\xff", b"\x00", b"UNIQ_KEY\x01", b"UNIQ", b"_KEY", b"KEYS"]
parts = st.one_of(texts.map(str.encode), st.sampled_from(MARKED))


@example([b"0", b"\x02"], 1)  # an end that is missing, at the place of an end
@given(st.lists(st.lists(parts, max_size=6).map(b"".join), min_size=1, max_size=6), st.integers(1, 9))
def test_any_properties_are_read_alike(strings: list[bytes], every: int) -> None:
    messages = [usual(number) for number in range(VECTOR_MIN)]
    for number, message in enumerate(messages[::every]):
        message.properties = strings[number % len(strings)]
    assert both_ways(records(messages)).num_rows == VECTOR_MIN


FRAME_LZ4 = bytes.fromhex(
    "04224d186840c01200000000000068240000008f6d6172746c6574200800ffffffffffffffffffffffffffffffffffffb250746c65742000000000"
)
bodies = st.one_of(
    st.binary(max_size=40).map(lambda body: (body, 0)),
    st.binary(max_size=40).map(lambda body: (zlib.compress(body), COMPRESSED)),
    st.binary(max_size=40).map(lambda body: (zlib.compress(body), COMPRESSED | COMPRESSION_ZLIB)),
    st.binary(max_size=40).map(lambda body: (zstandard.compress(body), COMPRESSED | COMPRESSION_ZSTD)),
    st.just((FRAME_LZ4, COMPRESSED | COMPRESSION_LZ4)),
    st.integers(60_000, 70_000).map(lambda size: (bytes(size), 0)),
)
odd_messages = st.builds(
    lambda topic, body, properties, flag, born_ms, host, tries: Message(
        topic, body[0], properties, 3, flag, body[1], born_ms, host, tries
    ),
    st.one_of(st.sampled_from(["t", "t" * 127, "t" * 128, "t" * 255, "ü" * 64]), texts.filter(bool)),
    bodies,
    st.one_of(
        st.lists(parts, max_size=6).map(b"".join),
        st.just("x").map(lambda x: encode_properties({"long": x * (PROPERTIES_BYTES_MAX - 6)})),
        st.dictionaries(texts.filter(bool), texts.filter(bool)).map(encode_properties),
    ),
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.one_of(st.integers(0, 1 << 42), st.integers(-(1 << 63), (1 << 63) - 1)),
    st.sampled_from([HOST, WIDE_HOST]),
    st.integers(0, 20),
)


def as_received(record: Record) -> dict[str, object]:
    """The row of *record*, made of the message that a consumer receives."""
    found = received(record, "broker-a")
    assert isinstance(found, ReceivedMessage)
    row = {name: getattr(found, name) for name in ("topic", "body", "properties", "flag", "reconsume_times")}
    row |= {"broker": found.queue.broker_name, "queue": found.queue.queue_id, "offset": found.queue_offset}
    row |= {"key": found.properties.get("KEYS"), "tag": found.properties.get("TAGS"), "msg_id": found.message_id}
    for name, ms in (("born_ts", found.born_ms), ("store_ts", found.store_ms)):
        row[name] = EPOCH + datetime.timedelta(milliseconds=ms) if MS_MIN <= ms <= MS_MAX else None
    return row


@given(st.lists(odd_messages, min_size=1, max_size=8), st.integers(1, 9), st.sampled_from([HOST, WIDE_HOST]))
def test_messages_of_any_kind_are_those_that_consumers_receive(odd: list[Message], every: int, host: bytes) -> None:
    messages = [usual(number) for number in range(VECTOR_MIN)]
    messages[::every] = [odd[number % len(odd)] for number in range(len(messages[::every]))]
    found = records(messages, store_host=host)
    rows = Decoder(ALL).decode(found, "broker-a").to_pylist()
    for row in rows:
        row["properties"] = dict(row["properties"])
    assert rows == [as_received(record) for record in decode_records(found.data)]


def test_a_body_in_a_format_that_nobody_knows_fails_the_read() -> None:
    messages = [usual(number) for number in range(MANY)]
    messages[9].sys_flag = COMPRESSED | 0x700
    text = r"message 9 of queue 3 .* cannot be decompressed: compression type 7 is unknown"
    with pytest.raises(UndecodableBody, match=text):
        Decoder(ALL).decode(records(messages), "b")


BOMB = zlib.compress(bytes(65 << 20))


@pytest.mark.parametrize("body", [b"no ZLIB", BOMB, zlib.compress(b"cut short")[:-3]], ids=["other", "bomb", "cut"])
@pytest.mark.parametrize("count", [1, MANY])
def test_a_body_that_cannot_be_decompressed_concerns_only_those_who_want_it(body: bytes, count: int) -> None:
    messages = [usual(number) for number in range(count)]
    messages[0].body, messages[0].sys_flag = body, COMPRESSED
    found = records(messages)
    without = Decoder(tuple(name for name in ALL if name != "body"))
    assert without.decode(found, "b").to_pylist() == without.decode_one_by_one(found, "b").to_pylist()
    assert without.undecoded == 0
    with pytest.raises(UndecodableBody, match=r"message 0 of queue 3 .* that cannot be decompressed: ZLIB body"):
        Decoder(("body",)).decode(found, "b")
    for policy, expected in (("null", None), ("raw", body)):
        decoder = Decoder(ALL, policy)
        rows = decoder.decode(found, "b").to_pylist()
        assert [row["body"] for row in rows] == [expected, *[b"body"] * (count - 1)]
        assert dict(rows[0]["properties"]).get("COMPRESSED_BODY") == ("ZLIB" if policy == "raw" else None)
        assert decoder.undecoded == 1
        assert "message 0 of queue 3" in decoder.first_undecoded


def test_a_package_that_is_missing_fails_the_read_whatever_the_query_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all bodies would be null, and nobody would install it."""
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    message = usual(0)
    message.sys_flag = COMPRESSED | COMPRESSION_LZ4
    with pytest.raises(PackageMissing, match=r"LZ4 body requires the package 'lz4'; install it with pip$"):
        Decoder(("body",), "raw").decode(records([message]), "b")


def test_bodies_are_counted_once_if_a_text_is_no_utf_8() -> None:
    messages = [usual(number) for number in range(MANY)]
    messages[3].sys_flag = COMPRESSED
    messages[4].properties = b"TAGS\x01\xff\x02"
    decoder = Decoder(ALL, "null")
    decoder.decode(records(messages), "b")
    assert decoder.undecoded == 1


@given(st.data())
def test_damaged_records_are_refused_or_read_alike(data: st.DataObject) -> None:
    whole = stored([usual(number) for number in range(VECTOR_MIN)])
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    for decoder in (Decoder(ALL), Decoder(NAMED)):
        try:
            found = Records(whole)
            slow = decoder.decode_one_by_one(found, "b").to_pylist()
        except RecordError:
            with pytest.raises(RecordError):
                decoder.decode(Records(whole), "b")
            continue
        assert decoder.decode(found, "b").to_pylist() == slow


def test_impossible_times_are_null() -> None:
    messages = [usual(number) for number in range(MANY)]
    for number, ms in enumerate((-(1 << 63), (1 << 63) - 1, MS_MAX, 0)):
        messages[number].born_ms = ms
    found = both_ways(records(messages)).column("born_ts")
    assert [value.as_py() is None for value in found[:5]] == [True, True, False, False, False]


def test_a_flipped_bit_in_a_body_is_found() -> None:
    data = stored([usual(number, bytes(100)) for number in range(MANY)])
    data[data.index(bytes(100)) + 50] = 1
    with pytest.raises(RecordError, match=r"message 0 of queue 3 \(position 8589934592 .*\) does not match its CRC$"):
        Records(data).check_bodies()


def test_a_flipped_bit_of_an_ipv6_record_is_found() -> None:
    message = usual(0, bytes(100))
    message.born_host = WIDE_HOST
    data = stored([message])
    Records(bytearray(data)).check_bodies()
    data[data.index(bytes(100)) + 50] = 1
    with pytest.raises(RecordError, match="does not match its CRC"):
        Records(data).check_bodies()


@given(st.data())
def test_flipped_bits_are_found_among_many_records(data: st.DataObject) -> None:
    """In bodies, and anywhere in a record with a record CRC, except in its size."""
    plain, guarded = usual(0, bytes(100)), usual(1, bytes(50))
    guarded.properties = with_room_for_record_crc(guarded.properties)
    whole = stored([plain, guarded, usual(2, b""), usual(3, bytes(10))])
    starts = Records(bytearray(whole)).starts.tolist()
    write_record_crc(whole, starts[1], starts[2])
    Records(bytearray(whole)).check_bodies()
    at = data.draw(st.one_of(st.integers(HEAD_BYTES, HEAD_BYTES + 99), st.integers(starts[1] + 4, starts[2] - 21)))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(RecordError, match=r"does not match its (record )?CRC"):
        Records(whole).check_bodies()


@pytest.mark.parametrize("size", [0, 90, 1 << 20, 0xFFFFFFFF])
def test_a_wrong_size_is_found(size: int) -> None:
    data = stored([usual(number) for number in range(3)])
    data[:4] = size.to_bytes(4, "big")
    with pytest.raises(RecordError, match=r"record 1 says|\d records say \d+ bytes in total; \d+ are there"):
        Records(data)


@pytest.mark.parametrize(("offset", "count"), [(10, 0), (12, 2), (15, 5), (99, 5)])
def test_messages_from_an_offset_on_are_cut_off(offset: int, count: int) -> None:
    found = records([usual(number) for number in range(5)], first=10).before(offset)
    assert (len(found) if found is not None else 0) == count
    if found is not None:
        assert len(found.data) == sum(found.heads["size"])


def test_parts_are_joined_in_order() -> None:
    whole = joined([records([usual(n) for n in range(first, first + 3)], first=first) for first in (0, 3, 6)])
    assert whole.heads["offset"].tolist() == list(range(9))
    assert Decoder(ALL).decode(whole, "b").num_rows == 9
    assert whole.heads["store_ms"].tolist()[:3] == [STORE_MS, STORE_MS + 1, STORE_MS + 2]
