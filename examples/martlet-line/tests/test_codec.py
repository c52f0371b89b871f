"""Lines and packets: what each line means, what is refused, and that nothing depends on how bytes are cut."""

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from martlet.contracts import Buffer
from martlet.errors import RemoteProtocolError
from martlet.message import Message, encode_properties
from martlet.records.codec import encode_record
from martlet_line.codec import HELP, Limits, Received, decode, decode_batch, encode, encode_error, frames
from martlet_line.packets import (
    Ack,
    Command,
    Credit,
    Extend,
    Help,
    Login,
    Malformed,
    Nack,
    Ping,
    Pong,
    Publish,
    Quit,
    Subscribe,
    Unsubscribe,
)

LIMITS = Limits(line_bytes=300, body_bytes=1000, words=10)


def one(topic: str, body: bytes, properties: bytes = b"") -> Publish:
    return Publish(topic, [body], [properties])


@pytest.mark.parametrize(
    ("line", "packet"),
    [
        (b"PUB t hello", one("t", b"hello")),
        (b"PUB t hello world  !", one("t", b"hello world  !")),
        (b"pub t hello", one("t", b"hello")),
        (b"PUB t hello\r", one("t", b"hello")),
        (b"PUB t", one("t", b"")),
        (b"PUB t ", one("t", b"")),
        (b"PUB t k=v hello", one("t", b"hello", b"k\x01v\x02")),
        (b"PUB t k=v l=w= hello", one("t", b"hello", b"k\x01v\x02l\x01w=\x02")),
        (b"PUB t k=a%20b%3D hello", one("t", b"hello", b"k\x01a b=\x02")),
        (b"PUB t hello k=v", one("t", b"hello k=v")),
        (b"PUB t : k=v", one("t", b"k=v")),
        (b"PUB t a=b : k=v", one("t", b"k=v", b"a\x01b\x02")),
        (b"PUB t :)", one("t", b":)")),
        (b"PUB t =)", one("t", b"=)")),
        (b"PUB t k=v", one("t", b"", b"k\x01v\x02")),
        (b"PUB t \xff\x00\xfe", one("t", b"\xff\x00\xfe")),
        (b"SUB t", Subscribe("t")),
        (b"SUB t from tail", Subscribe("t")),
        (b"SUB t from earliest credit 5", Subscribe("t", start="earliest", credit=5)),
        (b"SUB t from offset 17 credit 0", Subscribe("t", start=17, credit=0)),
        (b"SUB t as NAME", Subscribe("t", name="NAME")),
        (b"SUB t group G lease 9 from earliest", Subscribe("t", group="G", lease_s=9, start="earliest")),
        (b"sub t TAGS B,A,A", Subscribe("t", tags=("A", "B"))),
        (b"SUB t tags a%2Cb", Subscribe("t", tags=("a,b",))),
        (b"SUB t where PROPERTIES a=b c=d", Subscribe("t", language="PROPERTIES", expression="a=b c=d")),
        (b"SUB t credit 1 WHERE SQL92 a = 'x  y'", Subscribe("t", credit=1, language="SQL92", expression="a = 'x  y'")),
        (b"CREDIT 1 500", Credit(1, 500)),
        (b"ACK 1 0 17", Ack(1, 0, 17, 17)),
        (b"ACK 1 0 17 20", Ack(1, 0, 17, 20)),
        (b"NACK 1 0 17", Nack(1, 0, 17)),
        (b"NACK 1 0 17 500", Nack(1, 0, 17, 500)),
        (b"EXTEND 1 0 17", Extend(1, 0, 17)),
        (b"UNSUB 3", Unsubscribe(3)),
        (b"UNSUB 3 forget", Unsubscribe(3, True)),
        (b"LOGIN ann%20b a%20%0Ab", Login("ann b", b"a \nb")),
        (b"PING", Ping()),
        (b"PING are you there", Ping("are you there")),
        (b"PONG", Pong()),
        (b"HELP", Help()),
        (b"QUIT", Quit()),
    ],
)
def test_a_line_is_this_packet(line: bytes, packet: Command) -> None:
    assert decode(line + b"\n", LIMITS) == ([packet], len(line) + 1)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"FOO", "'FOO' is not a command; try HELP"),
        (b"\x00\xff", "is not a command; try HELP"),
        (b" PUB t x", "a line begins with a space"),
        (b"PUB", "PUB: topic is missing"),
        (b"PUB  x", "PUB: topic is missing"),
        (b"PUB \xff x", "is not UTF-8"),
        (b"PUB a\x00b x", "holds control characters"),
        (b"PUB t k= hello", "is not a property"),
        (b"PUB t k=%01 hello", "holds U+0001 or U+0002"),
        (b"PUB t " + b"k=v " * 11 + b"x", "more than 10 properties"),
        (b"SUB", "topic is missing"),
        (b"SUB t from", "from needs a value"),
        (b"SUB t from nowhere", "it is tail, earliest or offset N"),
        (b"SUB t from offset -1", "is not a whole number"),
        (b"SUB t from offset", "offset needs a value"),
        (b"SUB t credit 1 credit 2", "credit is given twice"),
        (b"SUB t as N group G", "as and group exclude each other"),
        (b"SUB t lease 5", "lease is for groups"),
        (b"SUB t what 5", "is not an option"),
        (b"SUB t where", "filter language is missing"),
        (b"SUB t where SQL92 ", "expression is missing"),
        (b"SUB t as \xff", "is not UTF-8"),
        (b"CREDIT 1", "followed by id n"),
        (b"CREDIT x 1", "id 'x' is not a whole number"),
        (b"CREDIT 1 " + b"9" * 200, "is not a whole number"),
        (b"CREDIT 1 \xb2", "is not a whole number"),
        (b"ACK 1 0", "followed by id queue offset last"),
        (b"ACK 1 0 1 2 3", "followed by id queue offset last"),
        (b"NACK", "followed by id queue offset delay_ms"),
        (b"EXTEND 1 0", "followed by id queue offset"),
        (b"UNSUB", "followed by id [forget]"),
        (b"UNSUB 1 remember", "followed by id [forget]"),
        (b"LOGIN ann", "followed by user password"),
        (b"LOGIN ann a b", "followed by user password"),
        (b"LOGIN", "followed by user password"),
        (b"LOGIN %01 a", "holds control characters"),
        (b"PING \x07", "holds control characters"),
        (b"HELP me", "nothing follows it"),
        (b"CREDIT " + b"1 " * 11, "more than 10 words"),
    ],
)
def test_a_wrong_line_is_answered_with_what_is_expected(line: bytes, text: str) -> None:
    (packet,), used = decode(line + b"\n", LIMITS)
    assert isinstance(packet, Malformed)
    assert text in packet.text
    assert used == len(line) + 1


def test_empty_lines_say_nothing() -> None:
    assert decode(b"\n\r\n\n", LIMITS) == ([], 4)


def test_put_takes_a_body_with_anything_in_it() -> None:
    data = b"PUT t 7 k=v\na\nb\x00\r\nc\nPING\n"
    assert decode(data, LIMITS) == ([one("t", b"a\nb\x00\r\nc", b"k\x01v\x02"), Ping()], len(data))


def test_put_waits_for_its_whole_body() -> None:
    data = b"PING\nPUT t 7\na\nb\x00\r\nc\n"
    for end in range(5, len(data)):
        assert decode(data[:end], LIMITS) == ([Ping()], 5)


def test_a_put_that_is_no_publish_takes_its_body_along() -> None:
    (packet, ping), _ = decode(b"PUT t 4 nonsense\nPING\nPING\n", LIMITS)
    assert isinstance(packet, Malformed)
    assert ping == Ping()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"x" * 301, "a line is longer than 300 bytes"),
        (b"x" * 301 + b"\n", "a line is longer than 300 bytes"),
        (b"PUB t " + b"x" * 300 + b"\n", "a line is longer than 300 bytes; use PUT"),
        (b"PUB t a\nPUB t " + b"x" * 300 + b"\n", "a line is longer than 300 bytes; use PUT"),
        (b"PUT t 1001\n", "a body of 1001 bytes is longer than 1000"),
        (b"PUT t " + b"9" * 100 + b"\n", "does not say how long its body is"),
        (b"PUT t -1\n", "does not say how long its body is"),
        (b"PUT t\n", "does not say how long its body is"),
        (b"put\n", "does not say how long its body is"),
        (b"PUT t 2\nabc\n", "a body of 2 bytes does not end with a newline"),
    ],
)
def test_what_cannot_be_read_on_from_closes_the_peer(data: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        decode(data, LIMITS)


def test_publishes_to_one_topic_behind_each_other_are_one_run() -> None:
    data = b"PUB t a\nPUT t 1\nb\nPUB t k=v c\nPUB u d\nPING\nPUB u e\nPUB u =f\n"
    commands, _ = decode(data, LIMITS)
    assert commands == [
        Publish("t", [b"a", b"b", b"c"], [b"", b"", b"k\x01v\x02"]),
        one("u", b"d"),
        Ping(),
        Publish("u", [b"e", b"=f"], [b"", b""]),
    ]


NAMES = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=("Cc", "Zs", "Cf")), min_size=1, max_size=12
).filter(str.isprintable)
NUMBERS = st.integers(0, 10**17)
PROPERTIES = st.dictionaries(
    st.text(st.characters(exclude_characters="\x01\x02", codec="utf-8"), min_size=1, max_size=8),
    st.text(st.characters(exclude_characters="\x01\x02", codec="utf-8"), min_size=1, max_size=8),
    max_size=5,
).map(encode_properties)
PACKETS: st.SearchStrategy[Command] = st.one_of(
    st.builds(lambda topic, body, properties: one(topic, body, properties), NAMES, st.binary(max_size=99), PROPERTIES),
    st.builds(
        lambda topic, kind, start, credit, tags, lease, where: Subscribe(
            topic,
            start=start,
            credit=credit,
            tags=tuple(sorted(tags)),
            language=where[:1] and "L" + where[0],
            expression=where[:1] and where,
            **({"name": kind} if lease is None else {"group": kind, "lease_s": lease}),
        ),
        NAMES,
        NAMES,
        st.one_of(st.sampled_from(["tail", "earliest"]), NUMBERS),
        NUMBERS,
        st.sets(NAMES, max_size=3),
        st.one_of(st.none(), NUMBERS),
        st.one_of(st.just(""), NAMES),
    ),
    st.builds(Unsubscribe, NUMBERS, st.booleans()),
    st.builds(Credit, NUMBERS, NUMBERS),
    st.builds(Ack, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.builds(Nack, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.builds(Extend, NUMBERS, NUMBERS, NUMBERS),
    st.builds(Login, NAMES, st.binary(min_size=1)),
    st.builds(Ping, st.one_of(st.just(""), NAMES)),
    st.sampled_from([Pong(), Help(), Quit()]),
)


@settings(deadline=None)
@given(packet=PACKETS)
def test_every_packet_comes_back_from_its_line(packet: Command) -> None:
    data = encode(packet)
    assert decode(data, Limits()) == ([packet], len(data))


@settings(deadline=None)
@given(data=st.binary(max_size=400))
def test_garbage_is_packets_or_a_protocol_error_and_nothing_else(data: bytes) -> None:
    try:
        _, used = decode(data, LIMITS)
    except RemoteProtocolError:
        return
    assert 0 <= used <= len(data)
    assert b"\n" not in data[used:] or data[used:].upper().lstrip().startswith(b"PUT")


@settings(deadline=None)
@given(
    lines=st.lists(st.sampled_from([b"PUB t a\n", b"PUT t 2\n\n\n\n", b"SUB t\n", b"PUB t k=v \r\n", b"\n", b"x\n"]))
)
def test_what_is_consumed_is_what_was_declared(lines: list[bytes]) -> None:
    data = b"".join(lines)
    commands, used = decode(data, LIMITS)
    assert used == len(data)
    said = sum(len(c.bodies) if isinstance(c, Publish) else 1 for c in commands)
    assert said == len([line for line in lines if line != b"\n"])


# what the broker says


def record(body: bytes, properties: bytes = b"", sys_flag: int = 0, host: bytes = bytes(8), topic: str = "t") -> bytes:
    message = Message(topic, body, properties, sys_flag=sys_flag, born_host=host)
    return encode_record(message, 3, 17, 0, 0, bytes(8))


def framed(piece: Buffer) -> bytes:
    return b"".join(frames(piece))


def test_a_message_is_a_line_and_its_body() -> None:
    assert framed(record(b"hello")) == b"MSG 3 17 5\nhello\n"
    assert framed(record(b"a\nb", b"k\x01v\x02l\x01w\x02")) == b"MSG 3 17 3 k=v l=w\na\nb\n"
    assert framed(record(b"", b"k\x01a b=%\x02")) == b"MSG 3 17 0 k=a%20b=%25\n\n"


def test_records_of_every_layout_are_framed() -> None:
    wide = record(b"x", host=bytes(20))
    long_topic = record(b"y", topic="t" * 130)
    assert framed(memoryview(wide + record(b"z") + long_topic)) == b"MSG 3 17 1\nx\nMSG 3 17 1\nz\nMSG 3 17 1\ny\n"


def test_a_compressed_body_is_delivered_plain_or_named() -> None:
    packed = zlib.compress(b"hello" * 100)
    assert framed(record(packed, sys_flag=0x1)) == b"MSG 3 17 500\n" + b"hello" * 100 + b"\n"
    assert framed(record(packed, b"k\x01v", sys_flag=0x301)).startswith(b"MSG 3 17 500 k=v\n")
    assert framed(record(b"???", b"k\x01v", sys_flag=0x201)) == b"MSG 3 17 3 k=v compressed=zstd\n???\n"
    assert framed(record(b"???", sys_flag=0x101)) == b"MSG 3 17 3 compressed=lz4\n???\n"
    assert framed(record(b"no zlib", sys_flag=0x1)) == b"MSG 3 17 7 compressed=zlib\nno zlib\n"


def test_a_body_that_would_inflate_without_end_stays_compressed() -> None:
    bomb = zlib.compress(bytes(65 << 20))
    assert framed(record(bomb, sys_flag=0x1)).startswith(b"MSG 3 17 %d compressed=zlib\n" % len(bomb))


@settings(deadline=None)
@given(messages=st.lists(st.tuples(st.binary(max_size=50), PROPERTIES), max_size=5))
def test_what_is_framed_is_received(messages: list[tuple[bytes, bytes]]) -> None:
    data = b"".join(record(body, properties) for body, properties in messages)
    assert decode_batch(framed(data)) == [Received(3, 17, body, properties) for body, properties in messages]


@pytest.mark.parametrize(
    "data", [b"MSG 1 2\n\n", b"MSG 1 2 x\n\n", b"MSG 1 2 3\nab\n", b"BATCH 1 2 3\nabc\n", b"MSG 1 2 3"]
)
def test_a_client_notices_a_broken_batch(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_batch(data)


def test_an_error_is_one_line_whatever_it_says() -> None:
    assert encode_error("BUSY", "a\nOK 1\r\n b") == b"ERR BUSY a OK 1 b\n"


def test_help_names_every_command() -> None:
    text = " ".join(HELP)
    for verb in ("PUB", "PUT", "SUB", "CREDIT", "ACK", "NACK", "EXTEND", "UNSUB", "PING", "HELP", "QUIT"):
        assert verb in text
