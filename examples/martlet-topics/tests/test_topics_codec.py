"""Bytes to packets and back: each command, what is refused, and round trips of names and messages."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.errors import RemoteProtocolError
from martlet_topics.codec import (
    ENCODING,
    Limits,
    announced,
    decode,
    decode_name,
    encode_error,
    encode_frame,
    encode_run,
)
from martlet_topics.packets import (
    Acknowledge,
    Command,
    Forget,
    Hello,
    Ping,
    Publish,
    Quit,
    Subscribe,
    Unsubscribe,
)

LIMITS = Limits(line_bytes=100, run_bytes=1000, run_messages=5)
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("line", "data", "packet"),
    [
        (b"HELLO", b"", Hello()),
        (b"HELLO me\r", b"", Hello("me")),
        (b"HELLO a%20b%25%C3%BC", b"", Hello("a b%ü")),
        (b"SUB a/+/#", b"", Subscribe("a/+/#", 0)),
        (b"SUB  a  1", b"", Subscribe("a", 1)),
        (b"UNSUB a/#", b"", Unsubscribe("a/#")),
        (b"ACK 1 1", b"", Acknowledge(1, 1)),
        (b"ACK 65535 1", b"", Acknowledge(65535, 1)),
        (b"ACK 7 0", b"", Acknowledge(7, 0)),
        (b"RUN 0 0 0", b"", Publish(0, (), (), b"", ())),
        (b"RUN 1 1 8", b"a/b 1\nx\n", Publish(1, (b"a/b",), (b"x",), b"a/b 1\nx\n", (8,))),
        (
            b"RUN 65534 2 11",
            b"a 0\n\nb 1\n\n\n",
            Publish(65534, (b"a", b"b"), (b"", b"\n"), b"a 0\n\nb 1\n\n\n", (5, 11)),
        ),
        (b"TX 3 0 0", b"", Publish(3, (), (), b"", (), True)),
        (b"TX 3 0 0 5 2", b"", Publish(3, (), (), b"", (), True, Acknowledge(5, 2))),
        (b"FORGET", b"", Forget()),
        (b"PING", b"", Ping()),
        (b"QUIT", b"", Quit()),
    ],
)
def test_each_command(line: bytes, data: bytes, packet: Command) -> None:
    assert announced(line, LIMITS) == len(data)
    assert decode(line, data, LIMITS) == packet


@pytest.mark.parametrize(
    ("line", "data", "text"),
    [
        (b"", b"", "'' is not a command"),
        (b"hello", b"", "'hello' is not a command"),
        (b"HELLO a b", b"", "has 2 words after its first; expected 0 to 1"),
        (b"SUB", b"", "expected 1 to 2"),
        (b"SUB a 2", b"", "QoS 2 is not supported"),
        (b"SUB a x", b"", "QoS 'x' is not a number"),
        (b"SUB %00", b"", "holds a control character"),
        (b"SUB %FF", b"", "is not UTF-8"),
        (b"HELLO \xff", b"", "is not UTF-8"),
        (b"ACK 0 1", b"", "packet ids 0 to 0 do not exist"),
        (b"ACK 65535 2", b"", "packet ids 65535 to 65536 do not exist"),
        (b"ACK 1 2001", b"", "2001 messages cannot be in flight"),
        (b"ACK -1 1", b"", "'-1' is not a number"),
        (b"ACK 1234567890 1", b"", "send up to 9 digits"),
        (b"RUN 1 6 0", b"", "a run of 6 messages from packet id 1 on is too long"),
        (b"RUN 65535 2 0", b"", "from packet id 65535 on is too long"),
        (b"RUN 1 1 6", b"a 1\nx ", "message 'a' does not fit its run"),
        (b"RUN 1 1 5", b"a 2\nx", "message 'a' does not fit its run"),
        (b"RUN 1 1 3", b"abc", "body size '' is not a number"),
        (b"RUN 1 1 4", b"a x\n", "body size 'x' is not a number"),
        (b"RUN 1 1 7", b"a 1\nx\nb", "has 1 bytes more than these"),
        (b"RUN 1 0 1", b"x", "has 1 bytes more than these"),
        (b"TX 1 0 0 5", b"", "send both, or neither"),
        (b"TX 1 0 0 0 1", b"", "packet ids 0 to 0 do not exist"),
    ],
)
def test_what_is_no_command_is_told(line: bytes, data: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(line, data, LIMITS)
    assert text in str(caught.value)


def test_a_run_has_a_limit() -> None:
    assert announced(b"RUN 1 1 1000", LIMITS) == 1000
    assert announced(b"RUNNING 1 1 9999", LIMITS) == 0
    for line in (b"RUN 1 1 1001", b"TX 1 1 999999999", b"RUN 1 1", b"RUN 1 1 x"):
        with pytest.raises(RemoteProtocolError):
            announced(line, LIMITS)


@given(st.lists(st.tuples(TEXTS, st.binary(max_size=40)), max_size=5), st.integers(1, 60_000))
def test_messages_come_back_as_they_were(messages: list[tuple[str, bytes]], first: int) -> None:
    data = b"".join(encode_frame(name.encode(), body) for name, body in messages)
    line = encode_run(first, len(messages), len(data)).rstrip()
    limits = Limits(run_bytes=1 << 20)
    assert announced(line, limits) == len(data)
    run = decode(line, data, limits)
    assert isinstance(run, Publish)
    assert run.first_id == first
    assert run.bodies == tuple(body for _, body in messages)
    plain = [name for name, _ in messages if "+" not in name and "#" not in name]
    assert [decode_name(word) for word in run.names if decode_name(word)] == plain


@given(st.binary(max_size=40), st.binary(max_size=60))
def test_any_bytes_are_a_command_or_refused_with_a_reason(line: bytes, data: bytes) -> None:
    for start in (b"", b"RUN 1 1 ", b"TX 1 2 ", b"ACK ", b"SUB ", b"HELLO "):
        try:
            command = decode(start + line.replace(b"\n", b""), data, LIMITS)
        except RemoteProtocolError as error:
            assert str(error)  # noqa: PT017
        else:
            assert isinstance(command, Command)


@pytest.mark.parametrize("word", [b"a/#", b"+", b"a%00", b"%FF", b"\xff", b"a%0Ab"])
def test_these_are_no_names_of_messages(word: bytes) -> None:
    assert decode_name(word) == ""


def test_what_the_broker_says() -> None:
    assert encode_run(0, 2, 10) == b"RUN 0 2 10\n"
    assert encode_run(7, 1, 10, again=True) == b"RUN 7 1 10 again\n"
    assert encode_error("BUSY", "too\nmuch") == b"ERR 0 0 BUSY too?much\n"
    assert encode_error("BUSY", "x", 3, 4) == b"ERR 3 4 BUSY x\n"
    assert ENCODING.name == "topics"


def test_what_a_client_of_rocketmq_compressed_is_inflated() -> None:
    from martlet_topics.codec import _plain

    assert _plain(zlib.compress(b"body"), 0x301) == b"body"
    assert _plain(zlib.compress(b"body"), 0x1) == b"body"
    for body, flag in ((b"body", 0x0), (b"no zlib", 0x301), (b"lz4", 0x101)):
        assert _plain(body, flag) == body
