"""Frames to bytes and back, in each version; and bytes that are no frames."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stomp.frame_strategies import NAMES, TEXTS, VERSIONS, for_version, name_for

from martlet_stomp.wire.codec import (
    Limits,
    check_unfinished,
    content_length,
    decode_head,
    encode_connected,
    encode_error,
    encode_frame,
    encode_header,
    encode_receipts,
    escape,
    find_receipt,
    head_end,
    unescape,
)
from martlet_stomp.wire.errors import StompError
from martlet_stomp.wire.packets import Version

V1_0, V1_1, V1_2 = Version
LIMITS = Limits()


def decode(frame: bytes, version: Version | None) -> tuple[str, dict[str, str], bytes]:
    found = head_end(frame, 0, version)
    assert found is not None
    stop, begin, is_over = found
    command, headers = decode_head(frame[:stop], version, LIMITS)
    if is_over:
        assert begin == len(frame)
        return command, headers, b""
    length = content_length(headers)
    end = begin + length if length >= 0 else frame.index(0, begin)
    assert frame[end:] in (b"\0", b"\0\n")
    return command, headers, frame[begin:end]


# The frames of the specifications, with the section that shows them.
EXAMPLES = [
    # 1.0
    ("the first frame", V1_0, b"CONNECT\nlogin: <username>\npasscode:<passcode>\n\n\0", "CONNECT"),
    ("SEND", V1_0, b"SEND\ndestination:/queue/a\n\nhello queue a\n\0", "SEND"),
    ("SUBSCRIBE", V1_0, b"SUBSCRIBE\ndestination: /queue/foo\nack: client\n\n\0", "SUBSCRIBE"),
    ("UNSUBSCRIBE", V1_0, b"UNSUBSCRIBE\ndestination: /queue/a\n\n\0", "UNSUBSCRIBE"),
    ("BEGIN", V1_0, b"BEGIN\ntransaction: <transaction-identifier>\n\n\0", "BEGIN"),
    ("ACK", V1_0, b"ACK\nmessage-id: <message-identifier>\ntransaction: <transaction-identifier>\n\n\0", "ACK"),
    ("DISCONNECT", V1_0, b"DISCONNECT\n\n\0", "DISCONNECT"),
    # 1.1 and 1.2
    ("STOMP frames", V1_2, b"COMMAND\nheader1:value1\nheader2:value2\n\nBody\0", "COMMAND"),
    ("header receipt", V1_2, b"SEND\ndestination:/queue/a\nreceipt:message-12345\n\nhello queue a\0", "SEND"),
    ("repeated header entries", V1_2, b"MESSAGE\nfoo:World\nfoo:Hello\n\n\0", "MESSAGE"),
    ("connecting", None, b"CONNECT\naccept-version:1.0,1.1,2.0\nhost:stomp.github.org\n\n\0", "CONNECT"),
    ("SUBSCRIBE", V1_1, b"SUBSCRIBE\nid:0\ndestination:/queue/foo\nack:client\n\n\0", "SUBSCRIBE"),
    ("ACK 1.1", V1_1, b"ACK\nsubscription:0\nmessage-id:007\ntransaction:tx1\n\n\0", "ACK"),
    ("ACK 1.2", V1_2, b"ACK\nid:12345\ntransaction:tx1\n\n\0", "ACK"),
    ("DISCONNECT", V1_1, b"DISCONNECT\nreceipt:77\n\0", "DISCONNECT"),  # without a blank line
]


@pytest.mark.parametrize(("section", "version", "frame", "command"), EXAMPLES)
def test_examples_of_the_specifications_are_frames(
    section: str, version: Version | None, frame: bytes, command: str
) -> None:
    found, headers, _body = decode(frame, version)
    assert found == command, section
    assert all(name and value for name, value in headers.items())


def test_the_first_of_repeated_headers_counts() -> None:
    assert decode(b"MESSAGE\nfoo:World\nfoo:Hello\n\n\0", V1_2)[1] == {"foo": "World"}
    assert decode(b"MESSAGE\na\\cb:1\na\\cb:2\n\n\0", V1_2)[1] == {"a:b": "1"}


def test_stomp_1_0_trims_names_and_values_and_later_versions_do_not() -> None:
    frame = b"SEND\n destination : /queue/a \n\n\0"
    assert decode(frame, V1_0)[1] == {"destination": "/queue/a"}
    for version in (V1_1, V1_2):
        assert decode(frame, version)[1] == {" destination ": " /queue/a "}


@pytest.mark.parametrize(
    ("version", "escaped", "plain"),
    [
        (V1_0, r"a\nb\c\\", r"a\nb\c\\"),
        (V1_1, r"a\nb\c\\", "a\nb:\\"),
        (V1_2, r"a\nb\c\\\r", "a\nb:\\\r"),
        (V1_2, r"\\n\\c", r"\n\c"),
        (V1_2, "no escapes", "no escapes"),
        (V1_1, r"\\\\\n", "\\\\\n"),
    ],
)
def test_escapes_of_each_version(version: Version, escaped: str, plain: str) -> None:
    assert unescape(escaped, version) == plain
    frame = b"SEND\nkey:%b\n\n\0" % escaped.encode()
    assert decode(frame, version)[1] == {"key": plain}
    if version is not V1_0:
        assert escape(plain, version) == escaped.encode()


@pytest.mark.parametrize("name", [True, False])
@pytest.mark.parametrize(
    ("version", "text"),
    [
        *[
            (version, text)
            for version in (V1_1, V1_2)
            for text in (r"a\tb", "a\\", r"\C", r"\\\x", "\\ä", r"\0", r"\:")
        ],
        (V1_1, r"a\r"),
    ],
)
def test_undefined_escapes_are_errors(version: Version, text: str, name: bool) -> None:
    line = f"{text}:1" if name else f"a:{text}"
    with pytest.raises(StompError, match="has the escapes"):
        decode(f"SEND\n{line}\n\n\0".encode(), version)


def test_connect_has_no_escapes() -> None:
    frame = b"CONNECT\npasscode:a\\tb\\\\:c\n\n\0"
    assert decode(frame, None)[1] == {"passcode": "a\\tb\\\\:c"}
    headers = [("session", "a:b\\"), ("version", "1.2")]
    assert encode_frame("CONNECTED", headers, b"", V1_2) == b"CONNECTED\nsession:a:b\\\nversion:1.2\n\n\0"


@pytest.mark.parametrize("version", list(Version))
def test_lines_of_any_version_may_end_with_cr_lf(version: Version) -> None:
    frame = b"SEND\r\ndestination:/queue/a\r\nfoo:bar\r\n\r\na\r\nb\0"
    assert decode(frame, version) == ("SEND", {"destination": "/queue/a", "foo": "bar"}, b"a\r\nb")


@pytest.mark.parametrize(
    ("version", "value"), [(V1_0, "a"), (V1_1, "a\r"), (V1_2, "a")]
)  # STOMP 1.2 allows both ends of lines beside each other
def test_cr_in_frames_whose_first_line_ends_with_lf(version: Version, value: str) -> None:
    assert decode(b"SEND\nfoo:a\r\n\n\0", version)[1] == {"foo": value}


def test_a_blank_line_with_cr_is_no_blank_line_of_stomp_1_1() -> None:
    assert head_end(b"SEND\nfoo:a\n\r\nx\0", 0, V1_1) is None
    for version in (V1_0, V1_2, None):
        assert head_end(b"SEND\nfoo:a\n\r\nx\0", 0, version) == (10, 13, False)


@pytest.mark.parametrize("line", [b"a:b\rc", b"a\rb:c", b"\ra:b", b"a:b\r\r"])
def test_stomp_1_2_allows_cr_only_at_the_end_of_a_line(line: bytes) -> None:
    with pytest.raises(StompError, match="carriage return"):
        decode(b"SEND\n%b\n\n\0" % line, V1_2)


@pytest.mark.parametrize("version", [*Version, None])
@pytest.mark.parametrize("line", [b"no colon", b":no name", b":", b" ", b"\\c"])
def test_a_line_that_is_no_header_is_an_error(version: Version | None, line: bytes) -> None:
    if line == b" " and version is not V1_0:
        line = b" x"
    with pytest.raises(StompError, match="is not NAME:VALUE"):
        decode(b"SEND\na:b\n%b\n\n\0" % line, version)


def test_a_value_may_be_empty_and_contain_colons() -> None:
    assert decode(b"SEND\na:\nb:c:d:\n\n\0", V1_2)[1] == {"a": "", "b": "c:d:"}


@pytest.mark.parametrize("raw", [b"\xff", b"\xed\xa0\x80", b"\xc3(", b"\xe2\x82", b"\xc0\x80"])
@pytest.mark.parametrize("version", [*Version, None])
def test_headers_must_be_utf_8(version: Version | None, raw: bytes) -> None:
    for line in (b"a:" + raw, raw + b":a"):
        with pytest.raises(StompError, match=re.escape(f"not UTF-8 near {b'SEND' + bytes((10,)) + line!r}")):
            decode(b"SEND\n%b\n\n\0" % line, version)


@pytest.mark.parametrize("head", [b"SE\0ND\na:b", b"SEND\na:b\0c", b"SEND\na\0:b", b"SEND\na:b\0"])
def test_headers_must_not_contain_nul(head: bytes) -> None:
    with pytest.raises(StompError, match="contain NUL"):
        decode_head(head, V1_2, LIMITS)
    with pytest.raises(StompError, match="contain NUL"):
        check_unfinished(head, head.index(0), LIMITS)


def test_limits_of_the_head() -> None:
    limits = Limits(head_bytes_max=1000, headers_max=10, header_bytes_max=200)
    line = b"a:" + b"x" * 198
    assert decode_head(b"SEND\n" + line, V1_2, limits).headers == {"a": "x" * 198}
    with pytest.raises(StompError, match="header line is longer than 200 bytes"):
        decode_head(b"SEND\nb:c\n" + line + b"x\nd:e", V1_2, limits)
    many = b"SEND" + b"".join(b"\nh%d:" % each for each in range(10))
    assert len(decode_head(many, V1_2, limits).headers) == 10
    with pytest.raises(StompError, match=r"has 11 headers; stomp.headers_max is 10"):
        decode_head(many + b"\nh0:", V1_2, limits)
    with pytest.raises(StompError, match="headers have more than 1000 bytes"):
        decode_head(b"SEND\n" + b"a:%b\n" % (b"x" * 190) * 6, V1_2, limits)
    with pytest.raises(StompError, match="which is no STOMP command"):
        decode_head(b"x" * 40, V1_2, limits)


@pytest.mark.parametrize(
    ("text", "length"),
    [("0", 0), ("5", 5), ("0005", 5), ("4294967296", 4294967296), ("9999999999", 9999999999)],
)
def test_content_lengths(text: str, length: int) -> None:
    assert content_length({"content-length": text}) == length
    assert content_length({"Content-Length": text}) == -1


@pytest.mark.parametrize(
    "text",
    ["", "-1", "+5", " 5", "5 ", "5\t", "5\n", "0x5", "5.0", "1e3", "1_000", "\u0665", "9" * 11, "9" * 8000, "five"],
)
def test_what_is_no_content_length(text: str) -> None:
    with pytest.raises(StompError, match="is not the number of bytes of a body"):
        content_length({"content-length": text})


@given(VERSIONS, st.lists(st.tuples(NAMES, TEXTS), max_size=5), st.binary(max_size=40))
def test_a_frame_comes_out_as_it_went_in(version: Version, pairs: list[tuple[str, str]], body: bytes) -> None:
    headers = {"content-length": str(len(body))}
    for name, value in pairs:
        if plain := name_for(name, version):
            headers.setdefault(plain, for_version(value, version))
    assert decode(encode_frame("SEND", headers.items(), body, version), version) == ("SEND", headers, body)


@given(VERSIONS, TEXTS | st.text(max_size=5), TEXTS | st.text(max_size=5))
def test_no_text_breaks_a_frame(version: Version, name: str, value: str) -> None:
    line = encode_header(name, value, version)
    assert 0 not in line
    frame = b"MESSAGE\n%b\nthe body\0" % line
    if b"\r" not in frame:  # which stays as it is before STOMP 1.2
        command, headers, body = decode(frame, version)
        assert (command, body) == ("MESSAGE", b"the body")
        assert len(headers) == bool(line)
    assert bool(line) == bool(name.strip() if version is V1_0 else name)


def test_what_a_version_cannot_say_is_told_as_well_as_possible() -> None:
    assert encode_header("a:b", "c:d\ne\\", V1_0) == b"a\\cb:c:d\\ne\\\n"
    assert encode_header("a", "b\0c", V1_2) == "a:b�c\n".encode()
    assert encode_header("", "b", V1_2) == b""


def test_receipts_are_one_piece_of_bytes() -> None:
    assert encode_receipts([]) == b""
    assert encode_receipts([b"1"]) == b"RECEIPT\nreceipt-id:1\n\n\0"
    assert encode_receipts([b"1", b"", b"a\\cb"]) == (
        b"RECEIPT\nreceipt-id:1\n\n\0RECEIPT\nreceipt-id:\n\n\0RECEIPT\nreceipt-id:a\\cb\n\n\0"
    )


def test_an_error_has_a_short_message_and_the_whole_text() -> None:
    frame = encode_error("this is wrong: so; do that", V1_2, b"m\\c1", [("version", "1.0,1.1,1.2")])
    command, headers, body = decode(frame, V1_2)
    assert command == "ERROR"
    assert body == b"this is wrong: so; do that"
    assert headers == {
        "message": "this is wrong: so",
        "receipt-id": "m:1",
        "version": "1.0,1.1,1.2",
        "content-type": "text/plain",
        "content-length": str(len(body)),
    }
    assert b"receipt-id" not in encode_error("x", V1_2)


def test_connected_says_what_was_agreed() -> None:
    expected = {"version": "1.2", "session": "s", "server": "martlet/1", "heart-beat": "500,0"}
    assert decode(encode_connected(V1_2, "s", "martlet/1", (500, 0)), None) == ("CONNECTED", expected, b"")
    assert b"heart-beat" not in encode_connected(V1_0, "s", "martlet/1", (500, 0))


@pytest.mark.parametrize(
    ("head", "version", "receipt"),
    [
        (b"SEND\nreceipt:a\nbad line\n", V1_2, b"a"),
        (b"SEND\nreceipt: a \r\nbad line\n", V1_0, b"a"),
        (b"SEND\nreceipt:a:b\n", V1_2, b"a\\cb"),
        (b"SEND\nreceipt:a\nreceipt:b\n", V1_2, b"a"),
        (b"SEND\nreceipt:\n", V1_2, b""),
        (b"SEND\nreceipt:a\\t\n", V1_2, None),
        (b"SEND\nreceipt:\xff\n", V1_2, None),
        (b"SEND\nreceipt:not all of i", V1_2, None),
        (b"SEND\nno-receipt:a\n", V1_2, None),
    ],
)
def test_the_receipt_of_a_malformed_frame_is_found(head: bytes, version: Version, receipt: bytes | None) -> None:
    assert find_receipt(head, version) == receipt
