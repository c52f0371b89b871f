"""TLS, client certificates and WebSocket, over real sockets."""

import ssl
from pathlib import Path

import pytest
import trio
from tests.mqtt.users import Users
from tests.wire_clients.stomp import (
    V1_2,
    StompClient,
    StompPort,
    connected,
    stomp_broker,
    stomp_port,
    websocket,
)
from tests.wire_clients.streams import WebSocketWire
from wsproto.events import AcceptConnection, RejectConnection

from martlet.errors import ConfigError
from martlet_stomp.config import StompConfig
from martlet_stomp.plugin import StompPlugin

TLS = {"tls_cert": "server"}
ENFORCING = {**TLS, "tls": "enforcing"}
CERTIFICATES = {**ENFORCING, "tls_client_ca": "ca"}
ALL = "publish *; read *"


async def exchange(talk: StompClient, body: bytes = b"x" * 70_000) -> None:
    """Send a message and receive it."""
    await talk.subscribe("/queue/a", "client")
    await talk.publish("/queue/a", body, content_length=str(len(body)))
    (message,) = await talk.messages(1)
    assert message.body == body
    await talk.ack(message)
    await talk.disconnect()


# TLS


async def test_a_plain_connection(tmp_path: Path) -> None:
    async with stomp_port(tmp_path) as port:
        talk, answer = await connected(await port.wire())
        assert answer.command == "CONNECTED"
        await exchange(talk)


async def test_a_permissive_port_has_clients_with_and_without_tls(tmp_path: Path) -> None:
    async with stomp_port(tmp_path, TLS) as port:
        for wire in (await port.wire(), await port.tls_wire()):
            talk, answer = await connected(wire)
            assert answer.command == "CONNECTED"
            await exchange(talk)


async def test_an_enforcing_port_refuses_plain_text(tmp_path: Path) -> None:
    async with stomp_port(tmp_path, ENFORCING) as port:
        talk, _ = await connected(await port.tls_wire())
        await exchange(talk)
        plain = StompClient(await port.wire(), V1_2)
        await plain.send(b"CONNECT\naccept-version:1.2\nhost:h\n\n\0")
        while data := await plain.wire.receive_some():
            assert b"CONNECTED" not in data
        assert not port.broker.context.clients


async def test_a_port_that_enforces_tls_needs_a_certificate(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        plugin = StompPlugin(StompConfig(listen="127.0.0.1:0", tls="enforcing"))
        with pytest.raises(ConfigError, match=r"stomp\.tls_cert is empty; name a certificate file"):
            plugin.protocol(stomp.broker)


# client certificates


async def with_certificates(port: StompPort, directory: Path) -> None:
    users = Users(directory)
    users.write(ann=ALL, bob=ALL)
    users.install(port.broker.broker)


@pytest.mark.parametrize(
    ("certificate", "headers", "expected"),
    [
        ("ann", {}, "ann"),
        ("ann", {"login": "ann"}, "ann"),  # a login without a passcode proves nothing more
        ("ann", {"login": "bob", "passcode": "bob"}, "bob"),  # the passcode decides
        ("mallory", {}, ""),  # nobody knows it
        ("mallory", {"login": "ann", "passcode": "ann"}, "ann"),
    ],
)
async def test_a_certificate_counts_if_there_is_no_passcode(
    tmp_path: Path, certificate: str, headers: dict[str, str], expected: str
) -> None:
    async with stomp_port(tmp_path, CERTIFICATES) as port:
        await with_certificates(port, tmp_path)
        _, answer = await connected(await port.tls_wire(certificate), **headers)
        assert answer.command == "CONNECTED"
        (client,) = port.broker.context.clients
        assert client.described()["user"] == expected


@pytest.mark.parametrize(
    ("certificate", "headers"),
    [
        ("ann", {"login": "bob"}),
        ("ann", {"login": "ann", "passcode": "a guess"}),
        ("mallory", {"login": "ann"}),
        ("ann", {"passcode": "ann"}),
    ],
)
async def test_a_wrong_login_is_refused_whatever_the_certificate_says(
    tmp_path: Path, certificate: str, headers: dict[str, str]
) -> None:
    async with stomp_port(tmp_path, CERTIFICATES) as port:
        await with_certificates(port, tmp_path)
        _, answer = await connected(await port.tls_wire(certificate), **headers)
        assert answer.command == "ERROR"
        assert "password is wrong" in answer["message"]
        assert not port.broker.context.clients


async def test_a_client_without_a_certificate_does_not_get_in(tmp_path: Path) -> None:
    async with stomp_port(tmp_path, CERTIFICATES) as port:
        wire = await port.tls_wire()
        with pytest.raises((trio.BrokenResourceError, ssl.SSLError, EOFError)):
            await connected(wire)
        assert not port.broker.context.clients


# WebSocket


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("text", [False, True])
async def test_websocket_frames_may_be_text_or_binary(tmp_path: Path, text: bool, tls: bool) -> None:
    async with stomp_port(tmp_path, TLS) as port:
        wire = await websocket(await (port.tls_wire() if tls else port.wire()), text=text)
        talk, answer = await connected(wire)
        assert answer.command == "CONNECTED"
        await exchange(talk, "größer".encode() * 20_000)


@pytest.mark.parametrize("size", [1, 7])
async def test_stomp_frames_may_begin_and_end_anywhere_in_websocket_frames(tmp_path: Path, size: int) -> None:
    async with stomp_port(tmp_path) as port:
        wire = await websocket(await port.wire(), text=True)
        talk = StompClient(wire, V1_2)
        data = b"CONNECT\naccept-version:1.2\nhost:h\n\n\0\n" + talk.frame("DISCONNECT", receipt="bye")
        at = data.index(b"DISCONNECT")
        for part in (data[:at], data[at:]):
            for begin in range(0, len(part), size):
                await wire.send(part[begin : begin + size])
            await talk.receive()
        assert await talk.is_closed()


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        (["v12.stomp"], "v12.stomp"),
        (["v11.stomp", "v10.stomp"], "v11.stomp"),
        (["other", "v10.stomp"], "v10.stomp"),
        (["mqtt"], None),
        ([], None),
    ],
)
async def test_a_subprotocol_of_stomp_is_chosen(tmp_path: Path, offered: list[str], chosen: str | None) -> None:
    async with stomp_port(tmp_path) as port:
        answer = await WebSocketWire(await port.wire(), text=True).shake_hands(*offered)
        if offered == ["mqtt"]:
            assert isinstance(answer, RejectConnection)
        else:
            assert isinstance(answer, AcceptConnection)
            assert answer.subprotocol == chosen


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("", True),
        ("http://localhost:8080", True),
        ("http://127.0.0.1", True),
        ("https://example.org", True),
        ("https://example.com", False),
        ("https://example.org.evil.com", False),
        ("null", False),
    ],
)
async def test_web_pages_of_others_may_not_connect(tmp_path: Path, origin: str, allowed: bool) -> None:
    async with stomp_port(tmp_path, config=StompConfig(origins=["https://example.org"])) as port:
        answer = await WebSocketWire(await port.wire(), text=True).shake_hands("v12.stomp", origin=origin)
        assert isinstance(answer, AcceptConnection if allowed else RejectConnection)
        assert getattr(answer, "status_code", None) == (None if allowed else 403)


async def test_an_error_comes_before_the_end_of_a_websocket(tmp_path: Path) -> None:
    async with stomp_port(tmp_path) as port:
        talk, _ = await connected(await websocket(await port.wire(), text=True))
        await talk.send(talk.frame("SEND", b"x", receipt="r"))
        assert (await talk.error())["receipt-id"] == "r"
