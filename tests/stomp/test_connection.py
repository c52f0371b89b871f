"""The state machine: every command in every state, limits, time, and every cutting of the bytes."""

import math
from itertools import chain, pairwise, repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stomp.frame_strategies import VERSIONS, events_of, feed, flatten, streams

from martlet.testing.peers import check_connection
from martlet_stomp.wire.codec import Limits, decode_head, encode_frame, head_end
from martlet_stomp.wire.connection import TRANSITIONS, State, StompConnection, agreed_beats
from martlet_stomp.wire.errors import StompError
from martlet_stomp.wire.packets import (
    Abort,
    AckMode,
    AckPlace,
    AckRun,
    Begin,
    Commit,
    Connect,
    Disconnect,
    Event,
    Nack,
    SendRun,
    Subscribe,
    Unsubscribe,
    Version,
)
from martlet_stomp.wire.scanner import KnownHeads, known_heads

V1_0, V1_1, V1_2 = Version
LIMITS = Limits(connect_bytes_max=600, frame_bytes_max=3000, head_bytes_max=1000, headers_max=20, header_bytes_max=300)
COMMANDS = {
    "CONNECT": b"accept-version:1.2\nhost:h\n",
    "STOMP": b"accept-version:1.2\nhost:h\n",
    "SEND": b"destination:/queue/a\n",
    "SUBSCRIBE": b"destination:/queue/a\nid:1\n",
    "UNSUBSCRIBE": b"id:1\n",
    "ACK": b"id:1-2-3\nmessage-id:1-2-3\nsubscription:1\n",
    "NACK": b"id:1-2-3\nmessage-id:1-2-3\nsubscription:1\n",
    "BEGIN": b"transaction:t\n",
    "COMMIT": b"transaction:t\n",
    "ABORT": b"transaction:t\n",
    "DISCONNECT": b"",
    # those of brokers, and others
    "CONNECTED": b"version:1.2\n",
    "MESSAGE": b"destination:/queue/a\nmessage-id:1\nsubscription:1\n",
    "RECEIPT": b"receipt-id:1\n",
    "ERROR": b"message:m\n",
    "send": b"destination:/queue/a\n",
    "Send": b"destination:/queue/a\n",
    "SENDS": b"destination:/queue/a\n",
    "SEND ": b"destination:/queue/a\n",
    " SEND": b"destination:/queue/a\n",
    "": b"destination:/queue/a\n",
    "PING": b"",
}


def connect(
    state: State = State.NEW, version: Version = V1_2, limits: Limits = LIMITS, heads: list[KnownHeads] | None = None
) -> StompConnection:
    connection = StompConnection(heads or known_heads(limits), 0.0)
    if state is not State.NEW:
        lines = b"" if version is V1_0 else b"accept-version:%b\nhost:h\n" % version.text.encode()
        connection.receive_data(b"CONNECT\n%b\n\0" % lines, 0.0)
        (event,) = connection.events()
        assert isinstance(event, Connect)
        assert event.version is version
    if state in (State.OPEN, State.ENDED):
        connection.open(0, 0.0)
    if state is State.ENDED:
        connection.end()
    assert connection.state is state
    return connection


def answer(frame: bytes) -> tuple[str, dict[str, str]]:
    """Return what an answer of the broker says, which must be one frame."""
    found = head_end(frame, 0, V1_2)
    assert found is not None
    head = decode_head(frame[: found[0]], V1_2, Limits())
    assert len(frame) == found[1] + int(head.headers["content-length"]) + 1
    assert frame.endswith(b"\0")
    return head


def refusal(connection: StompConnection, *pieces: bytes) -> tuple[str, dict[str, str]]:
    """Feed *pieces*, of which the last must break the protocol; return the text and the headers of the ERROR frame."""
    for piece in pieces[:-1]:
        connection.receive_data(piece, 0.0)
        assert list(connection.events()) == []
    connection.receive_data(pieces[-1], 0.0)
    with pytest.raises(StompError) as caught:
        list(connection.events())
    command, headers = answer(connection.farewell(caught.value))
    assert command == "ERROR"
    assert connection.state is State.ENDED
    return str(caught.value), headers


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("command", list(COMMANDS))
@pytest.mark.parametrize("version", list(Version))
def test_every_command_in_every_state(state: State, command: str, version: Version) -> None:
    connection = connect(state, version)
    frame = b"%b\n%breceipt:r\n\n\0" % (command.encode(), COMMANDS[command])
    after = TRANSITIONS.get((state, command))
    if state is State.ENDED or command == "":
        connection.receive_data(frame, 1.0)
        if state is State.ENDED:
            assert list(connection.events()) == []
            assert connection.buffered_bytes == 0
        else:  # the empty line is a heart-beat
            with pytest.raises(StompError, match="command 'destination:/queue/a' is not known"):
                list(connection.events())
    elif after is None:
        text, headers = refusal(connection, frame)
        assert headers["receipt-id"] == "r"
        assert text.partition(";")[0] == headers["message"] or ":" in text
    else:
        connection.receive_data(frame, 1.0)
        (event,) = connection.events()
        assert connection.state is after
        assert type(event).__name__.removesuffix("Run").upper() == command.replace("STOMP", "CONNECT")


EVENTS: list[tuple[Version, bytes, Event]] = [
    (V1_2, b"SUBSCRIBE\nid:0\ndestination:/queue/foo\nack:client\n\n\0", Subscribe("/queue/foo", "0", AckMode.CLIENT)),
    (V1_0, b"SUBSCRIBE\ndestination: /queue/foo\nack: client\n\n\0", Subscribe("/queue/foo", None, AckMode.CLIENT)),
    (
        V1_1,
        b"SUBSCRIBE\nid:a\\cb\ndestination:/topic/x\nack:client-individual\nselector:a > 1\nprefetch-count:7\n"
        b"durable:true\nauto-delete:false\nexclusive:TRUE\nreceipt:1\n\n\0",
        Subscribe(
            "/topic/x",
            "a:b",
            AckMode.CLIENT_INDIVIDUAL,
            "a > 1",
            7,
            is_durable=True,
            auto_delete=False,
            is_exclusive=True,
            receipt=b"1",
        ),
    ),
    (
        V1_2,
        b"SUBSCRIBE\nid:1\ndestination:/topic/x\nactivemq.prefetchSize:9\nprefetch-count:1\nactivemq.exclusive:true\n"
        b"activemq.subcriptionName:n\nbrowser:true\nactivemq.noLocal:true\n\n\0",
        Subscribe("/topic/x", "1", prefetch=9, durable_name="n", is_exclusive=True, is_browser=True, no_local=True),
    ),
    (V1_2, b"SUBSCRIBE\nid:1\ndestination:/q\nauto-delete:true\n\n\0", Subscribe("/q", "1", auto_delete=True)),
    (V1_0, b"UNSUBSCRIBE\ndestination: /queue/a\n\n\0", Unsubscribe(None, "/queue/a")),
    (
        V1_2,
        b"UNSUBSCRIBE\nid:1\nactivemq.subscriptionName:n\ndurable:true\nreceipt:\n\n\0",
        Unsubscribe("1", None, "n", True, b""),
    ),
    (V1_2, b"BEGIN\ntransaction:tx1\nreceipt:a\\cb\n\n\0", Begin("tx1", b"a\\cb")),
    (V1_2, b"COMMIT\ntransaction:tx1\n\n\0", Commit("tx1")),
    (V1_2, b"ABORT\ntransaction:tx1\n\n\0", Abort("tx1")),
    (V1_2, b"ACK\nid:1-2-3\ntransaction:tx1\n\n\0", AckRun([1], [2], [3], transaction="tx1")),
    (V1_1, b"ACK\nsubscription:0\nmessage-id:1-0-34\nreceipt:r:1\n\n\0", AckRun([1], [0], [34], (b"r\\c1",), (0,))),
    (V1_2, b"NACK\nid:1-2-3\n\n\0", Nack(AckPlace(1, 2, 3))),
    (
        V1_1,
        b"NACK\nsubscription:0\nmessage-id:1-2-3\ntransaction:t\nrequeue:false\nreceipt:7\n\n\0",
        Nack(AckPlace(1, 2, 3), "t", False, b"7"),
    ),
    (V1_1, b"DISCONNECT\nreceipt:77\n\0", Disconnect(b"77")),
    (V1_1, b"DISCONNECT\ncontent-length:0\nreceipt:77\n\0", Disconnect(b"77")),
    (V1_2, b"DISCONNECT\n\n\0", Disconnect()),
    (V1_0, b"DISCONNECT\n\n\n\0", Disconnect()),
]


@pytest.mark.parametrize(("version", "frame", "event"), EVENTS)
def test_what_frames_mean(version: Version, frame: bytes, event: Event) -> None:
    connection = connect(State.OPEN, version)
    connection.receive_data(frame, 0.0)
    (found,) = connection.events()
    assert flatten(found) == flatten(event)


@pytest.mark.parametrize("version", list(Version))
def test_a_message_with_everything(version: Version) -> None:
    connection = connect(State.OPEN, version)
    pairs = [("receipt", "r"), ("content-length", "3"), ("a", "1"), ("destination", "/queue/a"), ("transaction", "t")]
    connection.receive_data(encode_frame("SEND", [*pairs, ("b", "2"), ("a", "3")], b"x\0y", version), 0.0)
    (run,) = connection.events()
    assert isinstance(run, SendRun)
    assert [run.headers[0].destination, run.headers[0].pairs] == ["/queue/a", (("a", "1"), ("b", "2"))]
    assert [run.headers[0].get("b"), run.headers[0].get("destination")] == ["2", None]
    assert [run.bodies, run.receipt_of(0), run.transaction] == [[b"x\0y"], b"r", "t"]


@pytest.mark.parametrize(
    ("accept", "version"),
    [
        (b"1.0", V1_0),
        (b"1.1", V1_1),
        (b"1.2", V1_2),
        (b"1.0,1.1,2.0", V1_1),
        (b"1.0,1.1,1.2", V1_2),
        (b"1.2,1.1,1.0", V1_2),
        (b" 1.1 , 1.0", V1_1),
        (b"1.1,,", V1_1),
        (b"9.9,1.0,x", V1_0),
    ],
)
def test_the_highest_common_version_is_chosen(accept: bytes, version: Version) -> None:
    connection = connect()
    connection.receive_data(b"CONNECT\naccept-version:%b\n\n\0" % accept, 0.0)
    (event,) = connection.events()
    assert isinstance(event, Connect)
    assert event.version is connection.version is version


def test_without_accept_version_it_is_stomp_1_0() -> None:
    connection = connect()
    connection.receive_data(b"CONNECT\nlogin: guest \npasscode: a:b\nheart-beat:1,1\nclient-id:c\n\n\0", 0.0)
    (event,) = connection.events()
    headers = {"login": "guest", "passcode": "a:b", "heart-beat": "1,1", "client-id": "c"}
    assert event == Connect(V1_0, "guest", "a:b", 0, 0, "c", headers)


def test_later_versions_do_not_trim_what_connect_says() -> None:
    connection = connect()
    connection.receive_data(b"STOMP\naccept-version:1.2\nlogin: guest \npasscode:\\c\n\n\0", 0.0)
    (event,) = connection.events()
    assert isinstance(event, Connect)
    assert (event.login, event.passcode) == (" guest ", "\\c")


@pytest.mark.parametrize("accept", [b"", b"2.0", b"1.3,2.0", b"1", b"1.20", b"01.1", b"1.0.0", b"a", b"1.0;1.1"])
def test_without_a_common_version_the_supported_ones_are_told(accept: bytes) -> None:
    text, headers = refusal(connect(), b"CONNECT\naccept-version:%b\n\n\0" % accept)
    assert headers["version"] == "1.0,1.1,1.2"
    assert headers["content-type"] == "text/plain"
    assert "supported versions are 1.0,1.1,1.2" in text


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        (b"0,0", (0, 0)),
        (b"1000,2000", (1000, 2000)),
        (b"007,1", (7, 1)),
        (b" 5 , 6 ", (5, 6)),
        (b"4294967296,999999999999999999", (0x7FFF_FFFF, 0x7FFF_FFFF)),
    ],
)
def test_forms_of_heart_beat(beats: bytes, expected: tuple[int, int]) -> None:
    connection = connect()
    connection.receive_data(b"CONNECT\naccept-version:1.1,1.2\nheart-beat:%b\n\n\0" % beats, 0.0)
    (event,) = connection.events()
    assert isinstance(event, Connect)
    assert (event.can_beat_ms, event.wants_beat_ms) == expected


@pytest.mark.parametrize(
    "beats",
    [b"", b"1", b"1,", b",1", b"1,2,3", b"-1,0", b"0,-1", b"+1,1", b"a,b", b"1.5,1", b"1;1", b"1 1", b"9" * 19 + b",1"],
)
def test_what_is_no_heart_beat(beats: bytes) -> None:
    text, _ = refusal(connect(), b"CONNECT\naccept-version:1.2\nheart-beat:%b\n\n\0" % beats)
    assert "is not two numbers of milliseconds" in text


@pytest.mark.parametrize(
    ("can", "wants", "agreed"),
    [(0, 0, (0, 0)), (0, 100, (500, 0)), (100, 0, (0, 500)), (1000, 2000, (2000, 1000)), (1, 1, (500, 500))],
)
def test_heart_beats_are_the_slower_of_what_both_want(can: int, wants: int, agreed: tuple[int, int]) -> None:
    assert agreed_beats(Connect(V1_2, None, None, can, wants), 500) == agreed


@pytest.mark.parametrize(
    ("version", "frame", "text"),
    [
        *[(version, b"SEND\n\n\0", "SEND has no header 'destination'") for version in Version],
        (V1_2, b"SEND\ndestination:\n\n\0", "SEND has no header 'destination'"),
        *[(version, b"SUBSCRIBE\nid:1\n\n\0", "SUBSCRIBE has no header 'destination'") for version in Version],
        (V1_1, b"SUBSCRIBE\ndestination:/q\n\n\0", "SUBSCRIBE has no header 'id'"),
        (V1_2, b"SUBSCRIBE\ndestination:/q\n\n\0", "SUBSCRIBE has no header 'id'"),
        (
            V1_2,
            b"SUBSCRIBE\ndestination:/q\nid:1\nack:Auto\n\n\0",
            "ack 'Auto' of SUBSCRIBE is not one of auto, client,",
        ),
        (V1_2, b"SUBSCRIBE\ndestination:/q\nid:1\nprefetch-count:-1\n\n\0", "prefetch '-1' of SUBSCRIBE is not"),
        (V1_0, b"UNSUBSCRIBE\n\n\0", "UNSUBSCRIBE has no header 'id'"),
        (V1_1, b"UNSUBSCRIBE\ndestination:/q\n\n\0", "UNSUBSCRIBE has no header 'id'"),
        *[(version, b"ACK\n\n\0", "ACK has no header") for version in Version],
        *[(version, b"NACK\n\n\0", "NACK has no header") for version in Version],
        (V1_2, b"ACK\nmessage-id:1-2-3\nsubscription:1\n\n\0", "ACK has no header 'id'"),
        (V1_1, b"ACK\nid:1-2-3\n\n\0", "ACK has no header 'message-id'"),
        *[
            (V1_2, b"ACK\nid:%b\n\n\0" % each, "which this connection did not receive")
            for each in (b"12345", b"1-2", b"1-2-3-4", b"-1-2-3", b"1-2-x", b"1 -2-3", b"1-2-" + b"9" * 19)
        ],
        *[(V1_2, b"%b\n\n\0" % each, "has no header 'transaction'") for each in (b"BEGIN", b"COMMIT", b"ABORT")],
        (V1_1, b"BEGIN\ntransaction:t\n\nbody\0", "BEGIN has a body of 4 bytes; only SEND has one"),
        (V1_2, b"ACK\nid:1-2-3\ncontent-length:1\n\nx\0", "ACK has a body of 1 bytes"),
        (V1_2, b"SEND\ndestination:/q\ncontent-length:3\n\nfour\0", "content-length 3 is wrong"),
        (V1_2, b"SEND\ndestination:/q\ncontent-length:5\n\nfour\0\n", "content-length 5 is wrong"),
        (V1_2, b"SEND\ndestination:/q\ncontent-length:-1\n\nx\0", "content-length '-1' is not the number of bytes"),
        (V1_2, b"SEND\ndestination:/q\ncontent-length:2\n\0", "the headers contain NUL"),
        (V1_2, b"SEND\ndesti\0nation:/q\n\n\0", "the headers contain NUL"),
        (V1_1, b"SEND\ndestination:/q\nfoo:\\r\n\n\0", "STOMP 1.1 has the escapes"),
        (V1_2, b"SEND\ndestination:/q\nfoo:\\t\n\n\0", "STOMP 1.2 has the escapes"),
        (V1_2, b"SEND\ndestination:/\xff\n\n\0", "not UTF-8"),
        (V1_2, b"SEND\ndestination:/q\nfoo\n\n\0", "'foo' is not NAME:VALUE"),
        (V1_2, b"SEND\ndestination:/q\ncontent-length:3000\n\n", "a frame has more than 3000 bytes"),
        (V1_2, b"SEND\ndestination:/q\ncontent-length:9999999999\n\n", "a frame has more than 3000 bytes"),
        (V1_2, b"SEND\ndestination:/q\n\n%b" % (b"x" * 3000), "a frame has more than 3000 bytes"),
        (
            V1_2,
            b"SEND\ndestination:/q\nfoo:%b\n\n\0" % (b"x" * 300),
            "longer than 300 bytes; stomp.header_bytes_max",
        ),
        (V1_2, b"SEND\n" + b"a:b\n" * 21 + b"\n\0", "a frame has 21 headers"),
        (
            V1_2,
            b"SEND\n" + b"a:%b\n" % (b"x" * 250) * 4 + b"\n\0",
            "1000 bytes; stomp.head_bytes_max is that",
        ),
        (V1_2, b"GET /index.html HTTP/1.1\r\n\r\n", "command 'GET /index.html HTTP/1.1' is not known"),
        (V1_2, b"\x16\x03\x01\0\xf5\x01\0\0\xf1\x03\x03", "the headers contain NUL"),
        (V1_2, b"x" * 32, "which is no STOMP command"),
    ],
)
def test_frames_that_break_the_protocol(version: Version, frame: bytes, text: str) -> None:
    found, headers = refusal(connect(State.OPEN, version), frame)
    assert text in found
    assert "receipt-id" not in headers
    # The same comes out of pieces, and with a receipt.
    pieces = [frame[at : at + 1] for at in range(len(frame))]
    connection = connect(State.OPEN, version)
    with pytest.raises(StompError) as caught:
        feed(connection, pieces)
    assert text.partition(" has ")[0] in str(caught.value) or "no STOMP command" in text or "NUL" in text
    command, _, rest = frame.partition(b"\n")
    if rest and b":" in rest:
        _, headers = refusal(connect(State.OPEN, version), b"%b\nreceipt:r\n%b" % (command, rest))
        assert headers["receipt-id"] == "r"


def test_a_body_of_a_frame_of_stomp_1_0_is_ignored() -> None:
    connection = connect(State.OPEN, V1_0)
    connection.receive_data(b"SUBSCRIBE\ndestination:/q\n\nany body\0BEGIN\ntransaction:t\n\n\0", 0.0)
    assert list(connection.events()) == [Subscribe("/q"), Begin("t")]


@pytest.mark.parametrize("version", list(Version))
def test_frames_before_connect(version: Version) -> None:
    text, headers = refusal(connect(), b"SEND\ndestination:/q\nreceipt:a:b\n\n\0")
    assert "came before the client was connected" in text
    assert headers["receipt-id"] == "a:b"


def test_events_before_an_error_are_not_lost() -> None:
    connection = connect(State.OPEN)
    connection.receive_data(b"BEGIN\ntransaction:t\n\n\0SEND\ndestination:/q\n\nx\0BAD\n\n\0", 0.0)
    events = connection.events()
    assert next(events) == Begin("t")
    assert isinstance(next(events), SendRun)
    with pytest.raises(StompError, match="command 'BAD' is not known"):
        next(events)


def test_nothing_is_read_after_disconnect() -> None:
    connection = connect(State.OPEN)
    connection.receive_data(b"DISCONNECT\nreceipt:1\n\n\0SEND\ndestination:/q\n\nx\0", 0.0)
    assert list(connection.events()) == [Disconnect(b"1")]
    assert connection.buffered_bytes == 0
    connection.receive_data(b"SEND\ndestination:/q\n\nx\0", 0.0)
    assert list(connection.events()) == []
    assert connection.buffered_bytes == 0
    # The client gets one ERROR for its last frame, and nothing else.
    assert answer(connection.farewell(StompError("no", b"1")))[1]["receipt-id"] == "1"
    assert connection.farewell(StompError("no")) == b""


def test_a_connection_that_was_ended_is_told_nothing_more() -> None:
    connection = connect(State.OPEN)
    connection.end()
    assert connection.farewell(StompError("no")) == b""


def test_an_error_of_another_kind_is_told_without_a_receipt() -> None:
    _, headers = answer(connect(State.OPEN).farewell(ValueError("what; then")))
    assert headers["message"] == "what"
    assert "receipt-id" not in headers


def test_line_ends_between_frames_are_heart_beats() -> None:
    connection = connect(State.OPEN)
    data = b"\n\r\n\nBEGIN\ntransaction:t\n\n\0\n\n\r\n\nCOMMIT\ntransaction:t\n\n\0\n"
    check_connection(lambda: connect(State.OPEN), data, [Begin("t"), Commit("t")])
    for _ in range(3):
        connection.receive_data(b"\n\r\n\n", 1.0)
        assert list(connection.events()) == []
        assert connection.buffered_bytes == 0


@pytest.mark.parametrize("version", list(Version))
def test_a_heart_beat_in_pieces_leaves_nothing_behind(version: Version) -> None:
    connection = connect(State.OPEN, version)
    for piece in (b"\r", b"\n", b"\n", b"\n\r", b"\n\r\n"):
        connection.receive_data(piece, 1.0)
        assert list(connection.events()) == []
        assert connection.buffered_bytes == piece.endswith(b"\r")
    assert connection.buffered_bytes == 0
    connection.receive_data(b"\r", 1.0)
    connection.receive_data(b"SEND", 1.0)
    with pytest.raises(StompError):
        feed(connection, [b"\n", b"destination:/q\n\n\0"])


@pytest.mark.parametrize("version", list(Version))
def test_events_are_the_same_however_the_bytes_are_cut(version: Version) -> None:
    heads = known_heads(LIMITS)
    name = b"id" if version is V1_2 else b"message-id"
    data = b"".join(
        (
            b"SEND\ndestination:/queue/a\ncontent-length:3\n\none\0",
            b"SEND\ndestination:/queue/a\ncontent-length:3\n\ntwo\0\n",
            b"SEND\ndestination:/queue/a\nreceipt:1\n\nthree\0\n",
            b"SEND\ndestination:/queue/a\nreceipt:2\n\nfour\0\r\n",
            b"SEND\r\ndestination:/queue/b\r\ncontent-length:7\r\n\r\nSEND\n\0\n\0\n\n",
            b"SEND\ndestination:/queue/a\ntransaction:t\n\n\0",
            b"ACK\n%b:1-0-5\n\n\0" % name,
            b"ACK\n%b:1-0-6\n\n\0" % name,
            b"ACK\n%b:1-0-7\nreceipt:x\n\n\0\n" % name,
            b"NACK\n%b:1-0-8\n\n\0" % name,
            b"BEGIN\ntransaction:t\n\n\0",
            b"DISCONNECT\nreceipt:77\n\0",
            b"SEND\ndestination:/queue/a\n\nignored\0",
        )
    )
    whole = connect(State.OPEN, version, heads=heads)
    whole.receive_data(data, 0.0)
    expected = [each for event in whole.events() for each in flatten(event)]
    assert len(expected) == 12
    check_connection(lambda: connect(State.OPEN, version, heads=heads), data, expected, flatten=flatten)


@pytest.mark.parametrize("start", [b"", b"\n", b"\r\n"])
def test_connect_is_the_same_however_it_is_cut(start: bytes) -> None:
    data = start + b"CONNECT\r\naccept-version:1.1\r\nlogin:a\\b\r\n\r\n\0"
    headers = {"accept-version": "1.1", "login": "a\\b"}
    check_connection(lambda: StompConnection(known_heads(LIMITS), 0.0), data, [Connect(V1_1, "a\\b", headers=headers)])


@given(VERSIONS.flatmap(lambda version: st.tuples(st.just(version), streams(version))), st.data())
def test_any_frames_are_the_same_cut_anywhere(case: tuple[Version, bytes], source: st.DataObject) -> None:
    version, data = case
    limits = Limits()
    whole = events_of(connect(State.OPEN, version, limits), [data])
    cuts = source.draw(st.lists(st.integers(0, len(data)), max_size=6).map(sorted))
    pieces = [data[start:end] for start, end in pairwise([0, *cuts, len(data)])]
    assert events_of(connect(State.OPEN, version, limits), pieces) == whole


@given(VERSIONS, st.lists(st.binary(max_size=30) | st.sampled_from([b"SEND\n", b"\n\n", b"\0", b"a:b\n"]), max_size=8))
def test_arbitrary_bytes_are_refused_or_taken_and_never_kept_for_ever(version: Version, pieces: list[bytes]) -> None:
    connection = connect(State.OPEN, version)
    assert len(events_of(connection, pieces)) <= sum(map(len, pieces)) + 1
    assert connection.buffered_bytes <= LIMITS.frame_bytes_max


# limits


@pytest.mark.parametrize("state", [State.NEW, State.OPEN])
@pytest.mark.parametrize(
    ("start", "more", "text"),
    [
        (b"SEND\nx:", b"y", "header line is longer than 300 bytes"),
        (b"", b"x", "no STOMP command"),
        (b"SEND\n", b"a:b\n", "more than {} bytes"),
        (b"CONNECT\n\n", b"x", "more than 600 bytes|is connected"),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
def test_an_endless_head_fails_at_the_limit(
    state: State, start: bytes, more: bytes, text: str, piece_bytes: int
) -> None:
    connection = connect(state)
    piece = more * piece_bytes
    limit = LIMITS.connect_bytes_max if state is State.NEW and piece_bytes < 100 else LIMITS.head_bytes_max
    with pytest.raises(StompError, match=text.format(limit)):
        feed(connection, chain([start], repeat(piece, LIMITS.head_bytes_max)))
    assert connection.buffered_bytes <= LIMITS.head_bytes_max + len(piece)


@pytest.mark.parametrize("piece_bytes", [100, 999])
def test_a_body_without_an_end_fails_at_the_limit(piece_bytes: int) -> None:
    connection = connect(State.OPEN)
    start = b"SEND\ndestination:/q\nreceipt:r\n\nreceipt:no\n"
    with pytest.raises(StompError, match="a frame has more than 3000 bytes") as caught:
        feed(connection, chain([start], repeat(b"x" * piece_bytes, LIMITS.frame_bytes_max)))
    assert caught.value.receipt == b"r"
    assert connection.buffered_bytes <= LIMITS.frame_bytes_max + piece_bytes


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])  # the latter are not for the scanner
def test_a_frame_of_exactly_the_limit_is_taken(has_length: bool, line_end: bytes) -> None:
    length = LIMITS.frame_bytes_max - len(b"SEND|destination:/q|content-length:2958||".replace(b"|", line_end)) - 1
    lines = [b"SEND", b"destination:/q", *([b"content-length:%d" % length] if has_length else []), b"", b""]
    head = line_end.join(lines)
    body = b"x" * (LIMITS.frame_bytes_max - len(head) - 1)
    connection = connect(State.OPEN)
    connection.receive_data((head + body + b"\0") * 3, 0.0)
    assert [each[3] for run in connection.events() for each in flatten(run)] == [body] * 3
    longer = head.replace(b":%d" % length, b":%d" % (length + 1)) + body + b"x\0"
    for pieces in ([longer], [longer[:-1], longer[-1:]], [longer[:2000], longer[2000:]]):
        connection = connect(State.OPEN)
        with pytest.raises(StompError, match="more than 3000 bytes"):
            feed(connection, pieces)


class Counted(bytearray):
    """What was received, counting the bytes of it that are looked at."""

    looked_at = 0

    def find(self, what: Any, start: Any = 0, end: Any = None) -> int:
        size = len(self) if end is None else min(end, len(self))
        self.looked_at += max(0, size - start)
        return super().find(what, start, size)

    def __bytes__(self) -> bytes:
        self.looked_at += len(self)
        return bytes(memoryview(self))


def counted(connection: StompConnection, monkeypatch: pytest.MonkeyPatch) -> Counted:
    buffer = connection._buffer = Counted()

    def counting(data: Any, at: int, version: Version | None, seen: int = 0) -> tuple[int, int, bool] | None:
        found = head_end(data, at, version, seen)
        buffer.looked_at += (found[1] if found is not None else len(data)) - at - seen
        return found

    monkeypatch.setattr("martlet_stomp.wire.connection.head_end", counting)
    return buffer


@pytest.mark.parametrize("head", [b"", b"content-length:30000\n"])
def test_each_piece_of_a_body_is_looked_at_once(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connect(State.OPEN, limits=Limits())
    buffer = counted(connection, monkeypatch)
    feed(connection, [b"SEND\ndestination:/q\n%b\n" % head, *[b"fifteen bytes !"] * 2000])
    assert buffer.looked_at < 40_000
    connection.receive_data(b"\0", 0.0)
    (run,) = connection.events()
    assert isinstance(run, SendRun)
    assert run.bodies == [b"fifteen bytes !" * 2000]
    assert buffer.looked_at < 200_000


@pytest.mark.parametrize("line", [b"k:v\n", b"key:%b\n" % (b"v" * 290)])
def test_each_byte_of_a_head_is_looked_at_a_few_times(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connect(State.OPEN, limits=Limits(header_bytes_max=300))
    buffer = counted(connection, monkeypatch)
    head = b"SEND\ndestination:/q\n" + line * (30_000 // len(line))
    feed(connection, [head[at : at + 1] for at in range(len(head))])
    # Besides, with each piece the first 32 bytes for the command, and the last 301 for a line that is too long.
    assert buffer.looked_at < len(head) * (32 + 301 + 10)


# time


def test_a_client_must_connect_in_time() -> None:
    connection = connect()
    connection.receive_data(b"CONN", 9.0)
    assert connection.deadline() == 10.0
    connection.handle_timeout(9.9)
    with pytest.raises(StompError, match="did not connect within 10 s"):
        connection.handle_timeout(10.0)


def test_a_client_that_beats_must_be_heard_within_twice_its_interval() -> None:
    connection = connect(State.ACCEPTING)
    connection.open(1000, 5.0)
    assert connection.deadline() == 7.0
    connection.receive_data(b"\n", 6.0)
    assert connection.deadline() == 8.0
    connection.receive_data(b"SE", 7.5)  # any bytes show that it is alive
    assert connection.deadline() == 9.5
    connection.handle_timeout(9.4)
    with pytest.raises(StompError, match="nothing was heard for 2 s"):
        connection.handle_timeout(9.5)


def test_a_client_without_heart_beats_may_be_silent() -> None:
    connection = connect(State.ACCEPTING)
    connection.open(0, 5.0)
    assert connection.deadline() == math.inf
    connection.handle_timeout(1e9)
