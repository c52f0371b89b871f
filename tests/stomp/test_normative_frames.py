"""Frames, header encoding, content length, receipts of errors, and versions: what shows without a broker behind."""

import pytest
from tests.stomp.frame_strategies import feed, flatten
from tests.stomp.normative import statement

from martlet_stomp.wire.codec import (
    Limits,
    decode_head,
    encode_connected,
    encode_error,
    encode_frame,
    encode_receipts,
    head_end,
)
from martlet_stomp.wire.connection import GRACE, State, StompConnection, agreed_beats
from martlet_stomp.wire.errors import StompError
from martlet_stomp.wire.packets import AckMode, Connect, Disconnect, Event, SendRun, Subscribe, Unsubscribe, Version
from martlet_stomp.wire.scanner import known_heads

V1_0, V1_1, V1_2 = Version
LATER = pytest.mark.parametrize("version", [V1_1, V1_2])
ALL = pytest.mark.parametrize("version", list(Version))


def connect(version: Version) -> StompConnection:
    connection = StompConnection(known_heads(Limits()), 0.0)
    lines = b"" if version is V1_0 else b"accept-version:%b\nhost:h\n" % version.text.encode()
    connection.receive_data(b"CONNECT\n%b\n\0" % lines, 0.0)
    (event,) = connection.events()
    assert isinstance(event, Connect)
    assert event.version is version
    connection.open(0, 0.0)
    return connection


def events(version: Version, data: bytes) -> list[Event]:
    connection = connect(version)
    connection.receive_data(data, 0.0)
    return list(connection.events())


def message(version: Version, data: bytes) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of the message in *data*."""
    (run,) = events(version, data)
    assert isinstance(run, SendRun)
    return {"destination": run.headers[0].destination, **dict(run.headers[0].pairs)}, run.bodies[0]


def refused(version: Version | None, data: bytes, receipt: str | None = None) -> dict[str, str]:
    """Check that *data* is answered with ERROR, after which nothing is read; return the headers of that."""
    connection = connect(version) if version is not None else StompConnection(known_heads(Limits()), 0.0)
    with pytest.raises(StompError) as caught:
        feed(connection, [data])
    frame = connection.farewell(caught.value)
    assert connection.state is State.ENDED
    found = head_end(frame, 0, V1_2)
    assert found is not None
    command, headers = decode_head(frame[: found[0]], version or V1_2, Limits())
    assert command == "ERROR"
    assert headers["message"]
    assert headers["content-type"] == "text/plain"
    assert int(headers["content-length"]) == len(frame) - found[1] - 1
    assert headers.get("receipt-id") == receipt
    return headers


# frames


@statement(V1_0, "frames-1", "frames-2", "frames-3")
@ALL
def test_a_frame_is_a_command_headers_a_blank_line_a_body_and_nul(version: Version) -> None:
    headers, body = message(version, b"SEND\ndestination:/queue/a\nb:c:d\n\nbody\n\0\n\n")
    assert headers == {"destination": "/queue/a", "b": "c:d"}
    assert body == b"body\n"


@statement(V1_1, "frames-1")
@statement(V1_2, "frames-1")
@LATER
def test_commands_and_names_are_case_sensitive(version: Version) -> None:
    refused(version, b"send\ndestination:/queue/a\n\n\0")
    refused(version, b"Send\ndestination:/queue/a\n\n\0")
    refused(version, b"SEND\nDestination:/queue/a\n\n\0")
    assert message(version, b"SEND\ndestination:/queue/a\nContent-Length:1\nFoo:1\nfoo:2\n\nbody\0") == (
        {"destination": "/queue/a", "Content-Length": "1", "Foo": "1", "foo": "2"},
        b"body",
    )


@statement(V1_2, "frames-2")
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [b"\n", b"\r\n"])
def test_lines_end_with_lf_or_with_cr_lf(end: bytes, last: bytes) -> None:
    data = b"SEND%bdestination:/queue/a%bfoo:bar%b%bbody\r\n\0%b" % (end, last, end, last, last)
    assert message(V1_2, data) == ({"destination": "/queue/a", "foo": "bar"}, b"body\r\n")


@statement(V1_0, "frames-4")
def test_padding_of_stomp_1_0_is_not_part_of_a_value() -> None:
    assert events(V1_0, b"SUBSCRIBE\ndestination: /queue/foo\nack: client\n\n\0") == [
        Subscribe("/queue/foo", ack=AckMode.CLIENT)
    ]


# encoding


@statement(V1_1, "encoding-1", "content-type-2")
@statement(V1_2, "encoding-1", "content-type-2")
@LATER
def test_headers_are_utf_8(version: Version) -> None:
    headers, _ = message(version, "SEND\ndestination:/queue/ä\n名:😀\n\n\0".encode())
    assert headers == {"destination": "/queue/ä", "名": "😀"}
    assert encode_frame("MESSAGE", headers.items(), b"", version) == (
        "MESSAGE\ndestination:/queue/ä\n名:😀\n\n\0".encode()
    )
    for raw in (b"\xff", b"\xed\xa0\x80", b"\xc3("):
        refused(version, b"SEND\ndestination:/queue/a\nfoo:%b\nreceipt:r\n\n\0" % raw, "r")


@statement(V1_1, "encoding-2", "encoding-3", "encoding-5")
@statement(V1_2, "encoding-2", "encoding-3", "encoding-5")
@LATER
def test_headers_are_escaped_and_unescaped(version: Version) -> None:
    plain, escaped = "a\nb:c\\", b"a\\nb\\cc\\\\"
    if version is V1_2:
        plain, escaped = plain + "\r", escaped + b"\\r"
    data = b"SEND\ndestination:/queue/a\n%b:%b\nreceipt:%b\n\n\0" % (escaped, escaped, escaped)
    assert message(version, data)[0] == {"destination": "/queue/a", plain: plain}
    (run,) = events(version, data)
    assert isinstance(run, SendRun)
    assert encode_receipts(run.receipts) == b"RECEIPT\nreceipt-id:%b\n\n\0" % escaped
    assert b"\n%b:%b\n" % (escaped, escaped) in encode_frame("MESSAGE", [(plain, plain)], b"", version)


@statement(V1_1, "encoding-2")
@statement(V1_2, "encoding-2")
@LATER
def test_connect_and_connected_are_not_escaped(version: Version) -> None:
    connection = StompConnection(known_heads(Limits()), 0.0)
    accept = version.text.encode()
    connection.receive_data(b"CONNECT\naccept-version:%b\nlogin:a:b\npasscode:\\t\\\\\n\n\0" % accept, 0.0)
    (event,) = connection.events()
    assert isinstance(event, Connect)
    assert (event.login, event.passcode) == ("a:b", "\\t\\\\")
    assert b"\nserver:a:\\b\n" in encode_connected(version, "s", "a:\\b", (0, 0))


@statement(V1_1, "encoding-4")
@statement(V1_2, "encoding-4")
@pytest.mark.parametrize(("version", "escape"), [(V1_1, b"\\r"), (V1_1, b"\\t"), (V1_2, b"\\t"), (V1_2, b"x\\")])
def test_an_undefined_escape_is_fatal(version: Version, escape: bytes) -> None:
    for line in (b"foo:%b" % escape, b"%b:foo" % escape):
        for head in (b"SEND\nreceipt:r\ndestination:/queue/a", b"UNSUBSCRIBE\nreceipt:r\nid:1"):
            error = refused(version, b"%b\n%b\n\n\0" % (head, line), "r")
            assert " contains \\" in error["message"]


@statement(V1_1, "encoding-6")
@statement(V1_2, "encoding-6")
@LATER
def test_headers_are_neither_trimmed_nor_padded(version: Version) -> None:
    headers, _ = message(version, b"SEND\ndestination:/queue/a\n foo : bar \n\n\0")
    assert headers[" foo "] == " bar "
    refused(version, b"SEND\ndestination:/queue/a\ncontent-length: 4\n\nbody\0")
    assert b"\n foo : bar \n" in encode_frame("MESSAGE", headers.items(), b"", version)


# bodies


@statement(V1_1, "body-1")
@statement(V1_2, "body-1")
@LATER
@pytest.mark.parametrize(
    "head",
    [
        b"SUBSCRIBE\nid:1\ndestination:/queue/a\n",
        b"UNSUBSCRIBE\nid:1\n",
        b"ACK\nid:1-2-3\nmessage-id:1-2-3\nsubscription:1\n",
        b"NACK\nid:1-2-3\nmessage-id:1-2-3\nsubscription:1\n",
        b"BEGIN\ntransaction:t\n",
        b"COMMIT\ntransaction:t\n",
        b"ABORT\ntransaction:t\n",
        b"DISCONNECT\n",
    ],
)
def test_only_send_has_a_body(version: Version, head: bytes) -> None:
    refused(version, b"%breceipt:r\n\nbody\0" % head, "r")
    refused(version, b"%breceipt:r\ncontent-length:4\n\nbody\0" % head, "r")
    assert len(events(version, b"%bcontent-length:0\n\n\0" % head)) == 1
    connect_frame = b"CONNECT\naccept-version:%b\n\nbody\0" % version.text.encode()
    refused(None, connect_frame)


@statement(V1_0, "SUBSCRIBE-6")
def test_the_body_of_subscribe_is_ignored_in_stomp_1_0() -> None:
    assert events(V1_0, b"SUBSCRIBE\ndestination:/queue/a\n\nbody\0") == [Subscribe("/queue/a")]


@statement(V1_0, "SEND-3", "SEND-4")
@statement(V1_1, "content-length-1", "content-length-2", "content-length-3")
@statement(V1_2, "content-length-1", "content-length-2", "content-length-3")
@ALL
def test_a_content_length_says_what_the_body_is(version: Version) -> None:
    body = bytes(range(256)) + b"\n\nSEND\ndestination:/queue/b\n\n\0"
    data = b"SEND\ndestination:/queue/a\ncontent-length:%d\n\n%b\0" % (len(body), body)
    assert message(version, data)[1] == body
    assert message(version, b"SEND\ndestination:/queue/a\ncontent-length:0\n\n\0")[1] == b""
    for length in (b"3", b"5", b"-1", b"+4", b"", b"4.0", b"99999999999", b"0x4"):
        data = b"SEND\ndestination:/queue/a\nreceipt:r\ncontent-length:%b\n\nbody\0\n\n" % length
        refused(version, data, "r")


@statement(V1_0, "SEND-5")
@ALL
def test_without_a_content_length_the_first_nul_ends_the_frame(version: Version) -> None:
    found = events(version, b"SEND\ndestination:/queue/a\n\none\0SEND\ndestination:/queue/a\n\ntwo\0")
    assert [body for run in found if isinstance(run, SendRun) for body in run.bodies] == [b"one", b"two"]


@statement(V1_0, "ERROR-1", "ERROR-2")
@statement(V1_1, "ERROR-1", "ERROR-2", "content-length-4", "content-type-1")
@statement(V1_2, "ERROR-1", "ERROR-2", "content-length-4", "content-type-1")
@ALL
def test_errors_say_what_was_wrong_with_which_frame(version: Version) -> None:
    headers = refused(version, b"SUBSCRIBE\nid:1\nreceipt:message-12345\n\n\0", "message-12345")
    assert headers["message"] == "SUBSCRIBE has no header 'destination'"
    body = b"the whole text; with what to do"
    assert encode_error(body.decode(), version).endswith(b"\n\n%b\0" % body)


# headers of all frames


@statement(V1_1, "repeated-1")
@statement(V1_2, "repeated-1")
@LATER
def test_the_first_of_repeated_headers_counts(version: Version) -> None:
    data = b"SEND\ndestination:/queue/a\nfoo:World\ndestination:/queue/b\nfoo:Hello\nreceipt:1\nreceipt:2\n\n\0"
    assert message(version, data)[0] == {"destination": "/queue/a", "foo": "World"}
    (run,) = events(version, data)
    assert isinstance(run, SendRun)
    assert list(run.receipts) == [b"1"]
    assert message(version, b"SEND\ndestination:/q\ncontent-length:2\ncontent-length:1\n\nab\0")[1] == b"ab"


@statement(V1_1, "limits-1")
@statement(V1_2, "limits-1")
@LATER
def test_a_frame_beyond_the_limits_is_answered_with_error(version: Version) -> None:
    head = b"SEND\nreceipt:r\ndestination:/queue/a\n"
    line = b"a:%b" % bytes(b"x" * 8192)
    for rest, limit in (
        (b"a:b\n" * 99 + b"\n\0", "101 headers"),
        (line + b"\n\n\0", "8192 bytes"),
        (line, "8192 bytes"),
        (b"a:%b\n" % bytes(b"x" * 8000) * 9, "65536 bytes"),
        (b"content-length:4259840\n\n", "4259840 bytes"),
        (b"\n" + bytes(b"x" * 4_259_840), "4259840 bytes"),
    ):
        error = refused(version, head + rest, "r")
        assert limit in error["message"], error


REQUIRED = [
    ("SEND-1", b"SEND", [b"destination:/queue/a"], list(Version)),
    ("SUBSCRIBE-1", b"SUBSCRIBE", [b"destination:/queue/a", b"id:1"], list(Version)),
    ("SUBSCRIBE-4", b"SUBSCRIBE", [b"id:1", b"destination:/queue/a"], [V1_1, V1_2]),
    ("UNSUBSCRIBE-2", b"UNSUBSCRIBE", [b"id:1"], list(Version)),
    ("BEGIN-1", b"BEGIN", [b"transaction:t"], list(Version)),
    ("COMMIT-1", b"COMMIT", [b"transaction:t"], list(Version)),
    ("ABORT-1", b"ABORT", [b"transaction:t"], list(Version)),
    ("ACK-1", b"ACK", [b"message-id:1-2-3"], [V1_0, V1_1]),
    ("ACK-1", b"ACK", [b"id:1-2-3"], [V1_2]),
    ("NACK-1", b"NACK", [b"message-id:1-2-3"], [V1_0, V1_1]),
    ("NACK-1", b"NACK", [b"id:1-2-3"], [V1_2]),
]


@statement(V1_0, "SEND-1", "SUBSCRIBE-1", "UNSUBSCRIBE-2", "BEGIN-2", "COMMIT-1", "ABORT-1", "ACK-1")
@statement(V1_1, "SEND-1", "SUBSCRIBE-1", "SUBSCRIBE-4", "UNSUBSCRIBE-2", "BEGIN-1", "COMMIT-1", "ABORT-1")
@statement(V1_1, "ACK-1", "NACK-1")
@statement(V1_2, "SEND-1", "SUBSCRIBE-1", "SUBSCRIBE-4", "UNSUBSCRIBE-2", "BEGIN-1", "COMMIT-1", "ABORT-1")
@statement(V1_2, "ACK-1", "NACK-1")
@pytest.mark.parametrize(("number", "command", "lines", "versions"), REQUIRED)
def test_a_frame_without_a_required_header_is_refused(
    number: str, command: bytes, lines: list[bytes], versions: list[Version]
) -> None:
    for version in versions:
        whole, lacking = (b"%b\n%b\nreceipt:r\n\n\0" % (command, b"\n".join(each)) for each in (lines, lines[1:]))
        assert len(events(version, whole)) == 1
        refused(version, lacking.replace(b"\n\nreceipt", b"\nreceipt"), "r")


@statement(V1_0, "SUBSCRIBE-3", "SUBSCRIBE-4", "UNSUBSCRIBE-2")
@statement(V1_1, "SUBSCRIBE-5", "SUBSCRIBE-6")
@statement(V1_2, "SUBSCRIBE-5", "SUBSCRIBE-6")
@ALL
def test_values_of_ack(version: Version) -> None:
    data = b"SUBSCRIBE\nid:1\ndestination:/queue/a\n%b\n\0"
    for line, mode in (
        (b"", AckMode.AUTO),
        (b"ack:auto\n", AckMode.AUTO),
        (b"ack:client\n", AckMode.CLIENT),
        (b"ack:client-individual\n", AckMode.CLIENT_INDIVIDUAL),
    ):
        assert events(version, data % line) == [Subscribe("/queue/a", "1", mode)]
    for line in (b"ack:\n", b"ack:AUTO\n", b"ack:individual\n"):
        refused(version, data % (line + b"receipt:r\n"), "r")
    if version is V1_0:
        assert events(version, b"UNSUBSCRIBE\ndestination:/queue/a\n\n\0") == [Unsubscribe(None, "/queue/a")]


@statement(V1_0, "SEND-2", "ACK-2")
@statement(V1_1, "ACK-2")
@statement(V1_2, "ACK-2")
@ALL
def test_send_ack_and_nack_may_name_a_transaction(version: Version) -> None:
    for data in (
        b"SEND\ndestination:/queue/a\ntransaction:t\n\n\0",
        b"ACK\nid:1-2-3\nmessage-id:1-2-3\nsubscription:1\ntransaction:t\n\n\0",
        b"NACK\nid:1-2-3\nmessage-id:1-2-3\nsubscription:1\ntransaction:t\n\n\0",
    ):
        (event,) = events(version, data)
        assert event.transaction == "t"  # type: ignore[union-attr]


@statement(V1_0, "RECEIPT-1", "RECEIPT-2")
@statement(V1_1, "RECEIPT-1", "RECEIPT-2")
@statement(V1_2, "RECEIPT-1")
@ALL
def test_a_receipt_comes_back_as_it_was(version: Version) -> None:
    data = b"SEND\ndestination:/queue/a\nreceipt:message-12345\n\n\0"
    (run,) = events(version, data)
    assert isinstance(run, SendRun)
    assert encode_receipts(run.receipts) == b"RECEIPT\nreceipt-id:message-12345\n\n\0"


# order


@statement(V1_1, "DISCONNECT-1")
@statement(V1_2, "DISCONNECT-1")
@LATER
def test_frames_after_disconnect_are_not_read(version: Version) -> None:
    data = b"DISCONNECT\nreceipt:77\n\n\0SEND\ndestination:/queue/a\n\n\0"
    assert events(version, data) == [Disconnect(b"77")]


@statement(V1_1, "connect-5", "connect-4")
@statement(V1_2, "connect-5", "connect-4")
@pytest.mark.parametrize("host", [b"", b"host:any\n"])  # there are no virtual hosts
@LATER
def test_stomp_is_handled_like_connect(version: Version, host: bytes) -> None:
    found = []
    for command in (b"CONNECT", b"STOMP"):
        connection = StompConnection(known_heads(Limits()), 0.0)
        frame = b"%b\naccept-version:%b\n%blogin:a\n\n\0" % (command, version.text.encode(), host)
        connection.receive_data(frame, 0.0)
        found += list(connection.events())
        assert connection.state is State.ACCEPTING
    assert found[0] == found[1]
    refused(version, b"STOMP\naccept-version:1.2\n\n\0")
    refused(version, b"CONNECT\naccept-version:1.2\n\n\0")


@statement(V1_1, "versions-1", "versions-2")
@statement(V1_2, "versions-1", "versions-2")
@pytest.mark.parametrize(
    ("line", "version"),
    [
        (b"", V1_0),
        (b"accept-version:1.0\n", V1_0),
        (b"accept-version:1.0,1.1,2.0\n", V1_1),
        (b"accept-version:1.0,1.1,1.2\n", V1_2),
        (b"accept-version:1.2,1.0\n", V1_2),
    ],
)
def test_the_version_is_the_highest_common_one(line: bytes, version: Version) -> None:
    connection = StompConnection(known_heads(Limits()), 0.0)
    connection.receive_data(b"CONNECT\nhost:h\n%b\n\0" % line, 0.0)
    (event,) = connection.events()
    assert isinstance(event, Connect)
    assert event.version is version
    assert b"\nversion:%b\n" % version.text.encode() in encode_connected(version, "s", "martlet", (0, 0))


@statement(V1_1, "versions-3", "connect-2")
@statement(V1_2, "versions-3", "connect-2", "ERROR-3")
def test_without_a_common_version_the_supported_ones_are_told() -> None:
    assert refused(None, b"CONNECT\naccept-version:2.0,2.1\nhost:h\n\n\0")["version"] == "1.0,1.1,1.2"


# heart-beats


@statement(V1_1, "beats-1", "beats-2")
@statement(V1_2, "beats-1", "beats-2")
@LATER
def test_heart_beat_is_two_numbers(version: Version) -> None:
    frame = b"CONNECT\naccept-version:%b\n%%b\n\0" % version.text.encode()
    for line, can, wants in ((b"heart-beat:1000,20\n", 1000, 20), (b"heart-beat:0,0\n", 0, 0), (b"", 0, 0)):
        connection = StompConnection(known_heads(Limits()), 0.0)
        connection.receive_data(frame % line, 0.0)
        (event,) = connection.events()
        assert isinstance(event, Connect)
        assert (event.can_beat_ms, event.wants_beat_ms) == (can, wants)
    for beats in (b"", b"1", b"-1,1", b"1,-1", b"x,1", b"1,2,3"):
        refused(None, frame % (b"heart-beat:%b\n" % beats))


@statement(V1_1, "beats-3")
@statement(V1_2, "beats-3")
@LATER
def test_the_larger_interval_of_both_sides_counts(version: Version) -> None:
    for can, wants, sends, expects in ((0, 0, 0, 0), (1000, 0, 0, 1000), (10, 10, 500, 500), (600, 700, 700, 600)):
        beats = agreed_beats(Connect(version, None, None, can, wants), 500)
        assert beats == (sends, expects)
        assert b"\nheart-beat:%d,%d\n" % beats in encode_connected(version, "s", "martlet", beats)


@statement(V1_1, "beats-5", "beats-6")
@statement(V1_2, "beats-5", "beats-6")
@LATER
@pytest.mark.parametrize("data", [b"\n", b"\r\n", b"S", b"SEND\ndestination:/queue/a\n\n\0"])
def test_any_bytes_show_that_a_client_is_alive_and_it_may_be_late(version: Version, data: bytes) -> None:
    connection = connect(version)
    connection.open(1000, 10.0)
    assert connection.deadline() == 10.0 + GRACE
    assert GRACE > 1
    connection.receive_data(data, 11.5)
    assert connection.deadline() == 11.5 + GRACE
    assert [each for event in connection.events() for each in flatten(event)] == (
        [("SEND", "/queue/a", (), b"", None, None)] if data.startswith(b"SEND") else []
    )
    connection.handle_timeout(11.4 + GRACE)
    with pytest.raises(StompError, match="nothing was heard"):
        connection.handle_timeout(11.5 + GRACE)
