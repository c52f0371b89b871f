"""Frames: those of real peers are decoded, ours have the bytes that they expect, and all others are refused."""

import contextlib
import gc
import struct
import tracemalloc
from collections.abc import Callable

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.errors import LocalProtocolError, Refused, RemoteProtocolError
from martlet_remoting.wire.codec import (
    CUT_CODES,
    FrameBuffer,
    decode_frame,
    encode_binary_command,
    encode_command,
    encode_prefix,
    encode_pull_prefix,
    encode_response,
    encode_send_response,
    pull_response_template,
    send_response_template,
)
from martlet_remoting.wire.headers import PullHeader, SendHeader, decode_pull_header, decode_send_header
from martlet_remoting.wire.packets import Command


def frame(header: bytes, body: bytes = b"", encoding: int = 0) -> bytes:
    return struct.pack(">iBxH", 4 + len(header) + len(body), encoding, len(header)) + header + body


def same(left: Command, right: Command) -> bool:
    fields = ("code", "ext", "body", "opaque", "flag", "remark", "language", "version")
    return all(getattr(left, name) == getattr(right, name) for name in fields)


# As the Java, Go and C++ clients spell one and the same request (1.2).
JAVA = (
    b'{"code":14,"extFields":{"queueId":"3","topic":"T","consumerGroup":"G"},"flag":0,"language":"JAVA",'
    b'"opaque":7,"serializeTypeCurrentRPC":"JSON","version":513}'
)
GO = (
    b'{"code":14,"language":"GO","version":317,"opaque":7,"flag":0,"remark":"",'
    b'"extFields":{"consumerGroup":"G","queueId":"3","topic":"T"}}'
)
CPP = (
    b'{"code":14,"extFields":{"consumerGroup":"G","queueId":3,"topic":"T","OnsChannel":""},"flag":0,'
    b'"language":"CPP","opaque":7,"version":333,"remark":"","serializeTypeCurrentRPC":"JSON"}\n'
)


@pytest.mark.parametrize(("header", "language"), [(JAVA, "JAVA"), (GO, "GO"), (CPP, "CPP")])
def test_one_request_of_every_client_reads_the_same(header: bytes, language: str) -> None:
    command = decode_frame(frame(header, b"body"))
    assert (command.code, command.opaque, command.language, command.body) == (14, 7, language, b"body")
    assert (command.text("topic"), command.integer("queueId"), command.text("consumerGroup")) == ("T", 3, "G")
    assert not command.is_response
    assert not command.is_oneway


def test_unknown_language_and_absent_fields_are_tolerated() -> None:
    command = decode_frame(frame(b'{"code":34,"language":"KLINGON","news":[1,2]}'))
    assert (command.code, command.opaque, command.flag, command.language) == (34, 0, 0, "KLINGON")
    assert (dict(command.ext), command.remark, command.body) == ({}, None, b"")


def test_binary_header_follows_the_documented_layout() -> None:
    entry = struct.pack(">h5si1s", 5, b"topic", 1, b"T") + struct.pack(">h1si", 1, b"x", 0)
    header = struct.pack(">hbhiii2si", 310, 9, 317, -5, 2, 2, b"hi", len(entry)) + entry
    command = decode_frame(frame(header, b"b", encoding=1))
    assert (command.code, command.language, command.version, command.opaque) == (310, "GO", 317, -5)
    assert (command.remark, dict(command.ext), command.body) == ("hi", {"topic": "T"}, b"b")
    assert command.is_oneway


names = st.text(min_size=1, max_size=20)
values = st.text(min_size=1, max_size=50)
i32 = st.integers(-(2**31), 2**31 - 1)
commands = st.builds(
    Command,
    code=st.integers(-32768, 32767).filter(lambda code: code not in CUT_CODES),
    ext=st.dictionaries(names, values, max_size=5),
    body=st.binary(max_size=100),
    opaque=i32,
    flag=st.integers(0, 3),
    remark=st.none() | st.text(min_size=1, max_size=30),
    language=st.sampled_from(["JAVA", "CPP", "PYTHON", "NODE_JS"]),
    version=st.integers(0, 32767),
)


@given(commands)
def test_json_round_trip(command: Command) -> None:
    assert same(decode_frame(encode_command(command)), command)


@given(commands)
def test_binary_round_trip(command: Command) -> None:
    assert same(decode_frame(encode_binary_command(command)), command)


def test_code_beyond_16_bits_needs_json() -> None:
    with pytest.raises(LocalProtocolError, match="200050"):
        encode_binary_command(Command(200050))
    assert decode_frame(encode_command(Command(200050))).code == 200050


def test_header_fields_leave_as_strings() -> None:
    header = encode_command(Command(1, {"a": 5, "b": True, "c": False, "d": None, "e": "x"}))[8:]
    assert orjson.loads(header)["extFields"] == {"a": "5", "b": "true", "c": "false", "e": "x"}


STREAM = b"".join(
    [
        encode_command(Command(10, {"topic": "T"}, b"first", opaque=1)),
        encode_binary_command(Command(11, {"topic": "U"}, b"", opaque=2)),
        encode_response(3, 0, {"offset": 9}, b"third"),
    ]
)


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_any_cut_gives_the_same_commands(cut: int) -> None:
    buffer = FrameBuffer()
    found = []
    for part in (STREAM[:cut], STREAM[cut:]):
        buffer.receive_data(part)
        found += [(c.opaque, c.body) for c in buffer.commands()]
    assert found == [(1, b"first"), (2, b""), (3, b"third")]
    assert buffer.buffered_bytes == 0


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 64])
def test_dribbled_stream_gives_the_same_commands(step: int) -> None:
    buffer = FrameBuffer()
    found = []
    for start in range(0, len(STREAM), step):
        buffer.receive_data(STREAM[start : start + step])
        found += [c.opaque for c in buffer.commands()]
    assert found == [1, 2, 3]


def test_commands_not_taken_out_in_time_are_not_lost() -> None:
    buffer = FrameBuffer()
    middle = len(STREAM) - 10
    buffer.receive_data(STREAM[:middle])
    buffer.receive_data(STREAM[middle:])
    assert [c.opaque for c in buffer.commands()] == [1, 2, 3]


def test_dribbled_bytes_are_held_once() -> None:
    buffer = FrameBuffer()
    whole = encode_command(Command(10, {}, b"x" * 5000))
    for position in range(len(whole) - 1):
        buffer.receive_data(whole[position : position + 1])
        assert buffer.next_command() is None
        assert buffer.buffered_bytes == position + 1
    buffer.receive_data(whole[-1:])
    command = buffer.next_command()
    assert command is not None
    assert len(command.body) == 5000


HOSTILE: list[tuple[str, bytes]] = [
    ("frame length -1 is invalid", struct.pack(">i", -1)),
    ("frame length 0 is invalid", struct.pack(">i", 0)),
    ("frame length 3 is invalid", struct.pack(">i", 3) + b"abc"),
    ("is over the limit of 16777216", struct.pack(">i", 16 * 1024 * 1024 + 1)),
    ("is over the limit of 16777216", b"GET / HTTP/1.1\r\n\r\n"),
    ("header length 9 exceeds the frame", struct.pack(">iBxH", 6, 0, 9) + b"{}"),
    ("header length 16777215 exceeds", struct.pack(">iI", 6, 0xFFFFFF) + b"{}"),
    ("header encoding 2 is unknown", frame(b"{}", encoding=2)),
    ("header encoding 255 is unknown", frame(b"{}", encoding=255)),
    ("header is not JSON", frame(b"")),
    ("header is not JSON", frame(b"{")),
    ("header is not JSON", frame(b"\xff\xfe")),
    ("surrogate", frame(b'{"code":310,"extFields":{"i":"\\udc00"}}')),
    ("header is not JSON", frame(b'{"code":1,"extFields":' + b"[" * 60_000)),
    ("header is not valid: Expected `object`", frame(b"[1]")),
    ("missing required field `code`", frame(b"{}")),
    ("Expected `int`, got `str`", frame(b'{"code":"10"}')),
    ("Expected `int`, got `float`", frame(b'{"code":1.5}')),
    ("Expected `int`, got `bool`", frame(b'{"code":true}')),
    (r"Expected `int`, got `null` - at `\$\.opaque`", frame(b'{"code":1,"opaque":null}')),
    ("Expected `int` <= 2147483647", frame(b'{"code":1,"opaque":2147483648}')),
    (r"`int` <= 2147483647 - at `\$\.version`", frame(b'{"code":34,"version":' + b"9" * 4000 + b"}")),
    ("Expected `int` >= -2147483648", frame(b'{"code":1,"flag":-2147483649}')),
    ("extFields is not a JSON object", frame(b'{"code":1,"extFields":[]}')),
    ("extFields is not JSON", frame(b'{"code":1,"extFields":{"a":"\xff"}}')),
    ("extFields is not a JSON object", frame(b'{"code":11,"flag":1,"extFields":[]}')),
    (r"Expected `str | null`, got `object` - at `\$\.remark`", frame(b'{"code":1,"remark":{}}')),
    ("cut short", frame(b"", encoding=1)),
    ("cut short", frame(b"\x00" * 20, encoding=1)),
    ("length 9 of the remark exceeds", frame(struct.pack(">hbhiii", 1, 0, 0, 0, 0, 9), encoding=1)),
    ("length -1 of the remark exceeds", frame(struct.pack(">hbhiiii", 1, 0, 0, 0, 0, -1, 0), encoding=1)),
    ("length 5 of the fields does not match", frame(struct.pack(">hbhiiii", 1, 0, 0, 0, 0, 0, 5), encoding=1)),
    ("of the field name exceeds", frame(struct.pack(">hbhiiiih", 1, 0, 0, 0, 0, 0, 2, 77), encoding=1)),
    ("more than 1024 fields", frame(struct.pack(">hbhiiii6150x", 1, 0, 0, 0, 0, 0, 6150), encoding=1)),
    ("not UTF-8", frame(struct.pack(">hbhiii1si", 1, 0, 0, 0, 0, 1, b"\xff", 0), encoding=1)),
]


@pytest.mark.parametrize(("text", "data"), HOSTILE)
def test_hostile_bytes_are_refused_with_a_sentence(text: str, data: bytes) -> None:
    buffer = FrameBuffer()
    buffer.receive_data(data)
    with pytest.raises(RemoteProtocolError, match=text):
        buffer.next_command()
    with pytest.raises(RemoteProtocolError, match=text):
        buffer.next_command()
    assert buffer.buffered_bytes == 0


@pytest.mark.parametrize("start", [struct.pack(">iI", 9000, 9000), struct.pack(">iI", 9000, 2 << 24)])
@pytest.mark.parametrize("cut", [8, 5, 3])
def test_a_frame_that_cannot_be_is_refused_before_it_is_here(start: bytes, cut: int) -> None:
    buffer = FrameBuffer()
    buffer.receive_data(start[:cut])
    if cut < 8:
        assert buffer.next_command() is None
        buffer.receive_data(start[cut:])
    with pytest.raises(RemoteProtocolError, match="header"):
        buffer.next_command()


def held_bytes(buffer: FrameBuffer, data: bytes, commands: int) -> int:
    """How much memory *buffer* keeps of *data*, which comes as a socket brings it, while *commands* are taken out."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        with contextlib.suppress(RemoteProtocolError):
            for start in range(0, len(data), 262_144):
                buffer.receive_data(bytes(memoryview(data)[start : start + 262_144]))
                while commands and buffer.next_command() is not None:
                    commands -= 1
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()


LARGE = encode_command(Command(10, {}, bytes(4_000_000)))


@pytest.mark.parametrize("data", [LARGE, LARGE[:9] + b"?" + LARGE[10:], STREAM * 2000], ids=["large", "bad", "small"])
def test_what_was_taken_out_is_not_kept(data: bytes) -> None:
    assert held_bytes(FrameBuffer(), data, 1_000_000) < 100_000


def test_a_large_frame_is_not_kept_for_the_small_one_after_it() -> None:
    buffer = FrameBuffer()
    assert held_bytes(buffer, LARGE + STREAM, 1) < 400_000
    assert [command.opaque for command in buffer.commands()] == [1, 2, 3]


@pytest.mark.parametrize("size", [7, 1000, 65_536, 100_000])
def test_a_large_frame_in_pieces_of_any_size_comes_out_whole(size: int) -> None:
    body = bytes(range(256)) * 2000
    data = encode_command(Command(10, {"a": "b"}, body, opaque=7)) + STREAM
    buffer = FrameBuffer()
    found = []
    for start in range(0, len(data), size):
        buffer.receive_data(data[start : start + size])
        found += list(buffer.commands())
    assert found[0].body == body
    assert type(found[0].body) is bytes
    assert [command.opaque for command in found] == [7, 1, 2, 3]
    assert buffer.buffered_bytes == 0


def test_an_incomplete_frame_costs_its_bytes_however_small_its_pieces() -> None:
    data = encode_command(Command(10, {}, bytes(1_000_000)))[:-1]
    buffer = FrameBuffer()
    tracemalloc.start()
    try:
        for start in range(0, len(data), 10):
            buffer.receive_data(data[start : start + 10])
            assert buffer.next_command() is None
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(data) == buffer.buffered_bytes
    assert held < 1.3 * len(data)


def test_long_remark_and_long_header_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="remark"):
        decode_frame(encode_command(Command(1, remark="x" * 70_000)))
    with pytest.raises(RemoteProtocolError, match="remark"):
        decode_frame(encode_binary_command(Command(1, remark="x" * 70_000)))
    with pytest.raises(RemoteProtocolError, match="header length"):
        decode_frame(encode_command(Command(1, {"a": "x" * 262_144})))


def test_good_commands_before_a_bad_frame_are_delivered() -> None:
    buffer = FrameBuffer()
    buffer.receive_data(encode_command(Command(10, opaque=1)) + struct.pack(">i", -7))
    first = buffer.next_command()
    assert first is not None
    assert first.opaque == 1
    with pytest.raises(RemoteProtocolError, match="-7"):
        buffer.next_command()


def test_frame_limit_is_the_callers() -> None:
    buffer = FrameBuffer(frame_bytes_max=100)
    buffer.receive_data(struct.pack(">i", 101))
    with pytest.raises(RemoteProtocolError, match="limit of 100 bytes"):
        buffer.next_command()


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_waits_for_more(data: bytes) -> None:
    buffer = FrameBuffer(frame_bytes_max=150)
    buffer.receive_data(data)
    try:
        list(buffer.commands())
    except RemoteProtocolError:
        assert buffer.buffered_bytes == 0
    assert buffer.buffered_bytes <= len(data)


@given(
    st.sampled_from([encode_command, encode_binary_command]),
    st.lists(st.tuples(st.integers(4, 200), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_damaged_frames_never_raise_anything_else(
    encode: Callable[[Command], bytes], damage: list[tuple[int, int]]
) -> None:
    data = bytearray(encode(Command(310, SHORT, b"body", 7, remark="r")))
    for position, value in damage:
        data[position % len(data)] = value
    try:
        command = decode_frame(bytes(data))
        decode_send_header(command)
    except (RemoteProtocolError, Refused) as error:
        assert str(error)  # noqa: PT017


@given(st.binary(max_size=60))
def test_garbage_headers_never_raise_anything_else(header: bytes) -> None:
    for encoding in (0, 1):
        try:
            decode_frame(frame(header, encoding=encoding))
        except RemoteProtocolError as error:
            assert str(error)  # noqa: PT017


def test_send_answer_is_what_a_real_broker_writes() -> None:
    """Bytes of a RocketMQ 5.5.0 broker."""
    real = (
        b'\x00\x00\x01\x1e\x00\x00\x01\x1a{"code":0,"extFields":{"queueId":"1",'
        b'"transactionId":"7F000001000A18B4AAC2345678900000","msgId":"7F000001000078BF0000000000000000",'
        b'"TRACE_ON":"true","MSG_REGION":"DefaultRegion","queueOffset":"0"},"flag":1,"language":"JAVA",'
        b'"opaque":8,"serializeTypeCurrentRPC":"JSON","version":513}'
    )
    ids = "7F000001000078BF0000000000000000", "7F000001000A18B4AAC2345678900000"
    assert encode_send_response(send_response_template(), 8, 0, ids[0], 1, 0, ids[1]) == real


def test_pull_answer_is_what_a_real_broker_writes() -> None:
    """Bytes of a RocketMQ 5.5.0 broker, without the 230 bytes of the record."""
    real = (
        b'\x00\x00\x01\xdf\x00\x00\x00\xf5{"code":0,"extFields":{"suggestWhichBrokerId":"0","groupSysFlag":"0",'
        b'"nextBeginOffset":"1","maxOffset":"1","minOffset":"0","topicSysFlag":"0"},"flag":1,"language":"JAVA",'
        b'"opaque":9,"remark":"FOUND","serializeTypeCurrentRPC":"JSON","version":513}'
    )
    assert encode_pull_prefix(pull_response_template(), 9, 0, 1, 0, 1, "FOUND", 230) == real


def test_error_answer_is_what_a_real_broker_writes() -> None:
    """Bytes of a RocketMQ 5.5.0 broker."""
    real = (
        b'\x00\x00\x00\x90\x00\x00\x00\x8c{"code":3,"flag":1,"language":"JAVA","opaque":10,'
        b'"remark":" request type 9999 not supported","serializeTypeCurrentRPC":"JSON","version":513}'
    )
    assert encode_response(10, 3, remark=" request type 9999 not supported") == real


@given(i32, st.text(max_size=40), st.text(max_size=20), st.booleans())
def test_send_answer_survives_any_transaction_id_and_region(opaque: int, key: str, region: str, trace: bool) -> None:
    template = send_response_template(region, trace)
    answer = decode_frame(encode_send_response(template, opaque, 10, "AB,CD", 3, 2**40, key))
    assert (answer.opaque, answer.code, answer.is_response) == (opaque, 10, True)
    assert answer.text("transactionId", "") == key
    assert answer.text("MSG_REGION") == region
    assert answer.boolean("TRACE_ON") is trace
    assert (answer.text("msgId"), answer.integer("queueId"), answer.integer("queueOffset")) == ("AB,CD", 3, 2**40)


def test_prefix_announces_the_body_that_follows() -> None:
    answer = decode_frame(encode_prefix(5, 0, {"x": 1}, body_bytes=4) + b"body")
    assert (answer.body, answer.integer("x")) == (b"body", 1)
    template = pull_response_template()
    pulled = decode_frame(encode_pull_prefix(template, -1, 21, 10, 5, 2**50, "OFFSET_TOO_SMALL", 3, 1) + b"abc")
    assert pulled.body == b"abc"
    assert pulled.remark == "OFFSET_TOO_SMALL"
    fields = ("nextBeginOffset", "minOffset", "maxOffset", "suggestWhichBrokerId")
    assert [pulled.integer(name) for name in fields] == [10, 5, 2**50, 1]


ACCESS: list[tuple[str, Callable[[Command], object], object]] = [
    ("number as text", lambda c: c.text("number"), "5"),
    ("flag as text", lambda c: c.text("yes"), "true"),
    ("text as number", lambda c: c.integer("digits"), -12),
    ("number", lambda c: c.integer("number"), 5),
    ("default of absent", lambda c: c.integer("absent", 8), 8),
    ("default of empty", lambda c: c.integer("empty", 8), 8),
    ("default of null", lambda c: c.text("null", "d"), "d"),
    ("true", lambda c: c.boolean("yes"), True),
    ("TRUE", lambda c: c.boolean("TRUE"), True),
    ("anything else", lambda c: c.boolean("digits"), False),
    ("absent is the default", lambda c: c.boolean("absent", True), True),
]
FIELDS = Command(
    1,
    {"number": 5, "yes": True, "digits": "-12", "empty": "", "null": None, "TRUE": "TRUE", "word": "x", "list": [1]},
)


@pytest.mark.parametrize(("name", "read", "expected"), ACCESS)
def test_header_fields_are_read_as_their_type(name: str, read: Callable[[Command], object], expected: object) -> None:
    assert read(FIELDS) == expected


@pytest.mark.parametrize("name", ["absent", "empty", "word", "list", "yes"])
def test_bad_number_is_refused_by_name(name: str) -> None:
    with pytest.raises(Refused, match=name):
        FIELDS.integer(name)
    with pytest.raises(Refused, match="absent"):
        FIELDS.text("absent")


@pytest.mark.parametrize("number", ["9223372036854775808", "-9223372036854775809", "9" * 5000])
def test_number_beyond_64_bits_is_refused(number: str) -> None:
    with pytest.raises(Refused, match="64-bit"):
        Command(1, {"n": number}).integer("n")


SHORT = {
    "a": "P", "b": "T", "c": "TBW102", "d": "4", "e": "2", "f": "1", "g": "1700000000000", "h": "9",
    "i": "TAGS\x01A\x02", "j": "3", "k": "true", "l": "16", "m": "false", "n": "b",
}  # fmt: skip
LONG = {
    "producerGroup": "P", "topic": "T", "defaultTopic": "TBW102", "defaultTopicQueueNums": "4", "queueId": 2,
    "sysFlag": 1, "bornTimestamp": "1700000000000", "flag": 9, "properties": "TAGS\x01A\x02", "reconsumeTimes": "3",
    "unitMode": True, "maxReconsumeTimes": "16", "batch": False, "bname": "b",
}  # fmt: skip
SEND = SendHeader(
    producer_group="P", topic="T", default_topic="TBW102", default_queues=4, queue_id=2, sys_flag=1,
    born_ms=1700000000000, flag=9, properties="TAGS\x01A\x02", reconsume_times=3, unit_mode=True,
    max_reconsume_times=16, batch=False, broker_name="b",
)  # fmt: skip


def test_long_and_short_send_headers_read_the_same() -> None:
    assert decode_send_header(Command(310, SHORT)) == SEND
    assert decode_send_header(Command(10, LONG)) == SEND
    assert decode_send_header(decode_frame(encode_command(Command(310, SEND.to_ext())))) == SEND


def test_a_batch_is_marked_by_the_header_or_by_the_code() -> None:
    assert decode_send_header(Command(310, {**SHORT, "m": "true"})).batch
    assert decode_send_header(Command(310, {**SHORT, "m": True})).batch
    assert decode_send_header(Command(320, SHORT)).batch
    assert not decode_send_header(Command(310, SHORT)).batch


@pytest.mark.parametrize("name", ["a", "b", "e"])
def test_send_without_a_mandatory_field_is_refused(name: str) -> None:
    with pytest.raises(Refused, match=f"field .*{name}"):
        decode_send_header(Command(310, {key: value for key, value in SHORT.items() if key != name}))


def test_pull_header_round_trip() -> None:
    pull = PullHeader("G", "T", 3, 2**40, 32, 0x4, 0, 15_000, "A || B", 17, "TAG", 1000, "b")
    assert decode_pull_header(decode_frame(encode_command(Command(11, pull.to_ext())))) == pull


def test_pull_without_an_expression_type_means_tags() -> None:
    ext = PullHeader("G", "T", 3, 5, 32, 0, 0, 0).to_ext()
    del ext["expressionType"]
    assert decode_pull_header(Command(11, ext)).expression_type == "TAG"
