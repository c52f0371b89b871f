from collections.abc import Iterator
from typing import cast

import pytest

from martlet.errors import RemoteProtocolError
from martlet_remoting.wire.codec import encode_binary_command, encode_command
from martlet_remoting.wire.connection import RemotingConnection
from martlet_remoting.wire.packets import Command

IDLE_S = 120.0


def connection(frame_bytes_max: int = 1 << 20, now: float = 0.0) -> RemotingConnection:
    return RemotingConnection(frame_bytes_max, IDLE_S, now)


def test_commands_come_out_however_they_were_cut() -> None:
    frames = encode_command(Command(34, {"a": "1"}, b"x")) + encode_binary_command(Command(11, {"b": "2"}, opaque=9))
    for size in (1, 3, 7, len(frames)):
        made = connection()
        found: list[Command] = []
        for start in range(0, len(frames), size):
            made.receive_data(frames[start : start + size], 0.0)
            found += cast(Iterator[Command], made.events())
        assert [(c.code, dict(c.ext), c.body, c.opaque) for c in found] == [
            (34, {"a": "1"}, b"x", 0),
            (11, {"b": "2"}, b"", 9),
        ]


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff",
        b"\x7f\xff\xff\xff",
        b"\x00\x00\x00\x08\x00\x00\x00\x40{}{}",
        b"\x00\x00\x00\x08\x02\x00\x00\x04{}{}",
        b"\x00\x00\x00\x08\x00\x00\x00\x04{}{}",
        b"\x00\x00\x00\x09\x01\x00\x00\x05\x00\x01\x02\x03\x04",
    ],
)
def test_bytes_that_are_no_command_end_the_connection_for_good(data: bytes) -> None:
    made = connection()
    made.receive_data(data, 0.0)
    with pytest.raises(RemoteProtocolError):
        list(made.events())
    made.receive_data(encode_command(Command(34)), 0.0)
    with pytest.raises(RemoteProtocolError):
        list(made.events())
    assert made.farewell(RemoteProtocolError("x")) == b""


def test_a_browser_gets_an_http_answer_that_explains_this_port() -> None:
    made = connection()
    made.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 0.0)
    with pytest.raises(RemoteProtocolError, match="client speaks HTTP") as caught:
        list(made.events())
    answer = made.farewell(caught.value)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert f"Content-Length: {len(body)}".encode() in head
    assert b"RocketMQ remoting" in body


def test_a_grpc_client_gets_the_reason_in_a_goaway() -> None:
    made = connection()
    made.receive_data(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), 0.0)
    with pytest.raises(RemoteProtocolError, match="gRPC") as caught:
        list(made.events())
    answer = made.farewell(caught.value)
    settings, goaway = answer[:9], answer[9:]
    assert settings == b"\0\0\0\x04\0\0\0\0\0"
    debug = str(caught.value).encode()
    assert goaway == (8 + len(debug)).to_bytes(3, "big") + b"\x07\0\0\0\0\0\x7f\xff\xff\xff\0\0\0\x01" + debug


def test_a_grpc_client_is_answered_before_it_makes_its_call_and_refused_then() -> None:
    """One that is refused before connects again at once, and again."""
    made = connection()
    sent: list[bytes] = []
    made.send = sent.append
    settings, window = b"\0\0\6\4\0\0\0\0\0" + bytes(6), b"\0\0\4\x08\0\0\0\0\0" + bytes(4)
    headers = b"\0\0\3\1\4\0\0\0\1abc"
    for data in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings, window, b"\0\0\0\4\1\0\0\0\0"):
        made.receive_data(data, 0.0)
        assert list(made.events()) == []
    assert sent == [b"\0\0\0\x04\0\0\0\0\0"]
    made.receive_data(headers[:5], 0.0)
    assert list(made.events()) == []
    made.receive_data(headers[5:], 0.0)
    with pytest.raises(RemoteProtocolError, match="gRPC") as caught:
        list(made.events())
    answer = made.farewell(caught.value)
    assert answer[3] == 7
    assert answer.endswith(str(caught.value).encode())


def test_an_http2_client_that_makes_no_call_is_refused_in_the_end() -> None:
    made = connection()
    sent: list[bytes] = []
    made.send = sent.append
    ping = b"\0\0\x08\6\0\0\0\0\0" + bytes(8)
    made.receive_data(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + 1000 * ping, 0.0)
    assert list(made.events()) == []
    made.receive_data(5000 * ping, 0.0)
    with pytest.raises(RemoteProtocolError, match="gRPC"):
        list(made.events())


MQTT_PROTOCOL = b"\x00\x04MQTT\x05\x02\x00\x3c"
OTHER_PROTOCOLS = [
    ("HTTP;", b"OPTIONS * HTTP/1.1\r\n"),
    ("HTTP;", b"CONNECT example.org:80 HTTP/1.1\r\n"),
    ("HTTP/2, as RocketMQ's gRPC clients do;", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ("STOMP; .* usually 61613", b"CONNECT\naccept-version:1.2\n\n\x00"),
    ("STOMP; .* usually 61613", b"CONNECT\r\naccept-version:1.2\r\n\r\n\x00"),
    ("STOMP; .* usually 61613", b"STOMP\nhost:/\n\n\x00"),
    ("MQTT; .* usually 1883", b"\x10\x10" + MQTT_PROTOCOL),
    ("MQTT; .* usually 1883", b"\x10\xff\x01" + MQTT_PROTOCOL),
    ("MQTT; .* usually 1883", b"\x10\xff\xff\xff\x7f" + MQTT_PROTOCOL),
    ("MQTT; .* usually 1883", b"\x10\x12\x00\x06MQIsdp\x03\x02\x00\x3c"),
]


@pytest.mark.parametrize(("name", "data"), OTHER_PROTOCOLS)
def test_the_error_names_the_other_protocol_of_a_client_and_its_port(name: str, data: bytes) -> None:
    made = connection()
    made.receive_data(data, 0.0)
    with pytest.raises(RemoteProtocolError, match=f"^client speaks {name}"):
        list(made.events())


@pytest.mark.parametrize("data", [b"\x10\x10\x00\x04MQTX", b"CONNECTED", b"\x7f\xff\xff\xff"])
def test_an_unknown_beginning_is_a_wrong_frame_length(data: bytes) -> None:
    made = connection()
    made.receive_data(data, 0.0)
    with pytest.raises(RemoteProtocolError, match=r"^frame length \d+ is over the limit"):
        list(made.events())


def test_tls_on_a_port_without_a_certificate_is_named() -> None:
    made = connection()
    made.receive_data(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 0.0)
    with pytest.raises(RemoteProtocolError, match=r"remoting\.tls_cert"):
        list(made.events())


def test_a_new_peer_has_its_whole_time() -> None:
    made = connection(now=1000.0)
    assert made.deadline() == 1000.0 + IDLE_S
    made.handle_timeout(1000.0 + IDLE_S - 1)
    with pytest.raises(RemoteProtocolError, match="silent for 120 s"):
        made.handle_timeout(1000.0 + IDLE_S)


def test_a_silent_connection_expires_and_every_byte_restarts_the_timeout() -> None:
    made = connection(now=0.0)
    made.receive_data(b"\x00", 50.0)
    made.handle_timeout(IDLE_S)
    assert made.deadline() == 50.0 + IDLE_S
    with pytest.raises(RemoteProtocolError, match=r"silent for 120 s; remoting\.idle_s"):
        made.handle_timeout(50.0 + IDLE_S)


def test_a_peer_that_waits_for_us_may_be_silent() -> None:
    made = connection(now=0.0)
    waiting = {1}
    made.waiting = waiting
    made.handle_timeout(IDLE_S)
    assert made.deadline() == 2 * IDLE_S
    waiting.clear()
    with pytest.raises(RemoteProtocolError):
        made.handle_timeout(2 * IDLE_S)
