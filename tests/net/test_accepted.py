"""Who may connect, and the headers of proxies, on loopback sockets: 127.0.0.9 is a proxy, 127.0.0.1 is none."""

import logging
import socket
import ssl
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trustme
from tests.broker.toys import World, toy_server
from tests.net.proxy_headers import LOCAL, UNKNOWN, binary, field, text
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, Request

from martlet.contracts import PortNetworks, Protocol, WebSocket
from martlet.net.addresses import pack_host, show_address
from martlet.net.opening import accepted
from martlet.net.ports import PortConfig
from martlet.settings import ServerConfig

PROXY = "127.0.0.9"
CLIENT = "203.0.113.7"
HEADERS: dict[str, Callable[..., bytes]] = {"v1": text, "v2": binary}


@pytest.fixture
def world() -> World:
    return World()


def port_networks(networks: list[str], proxies: list[str] | None = None) -> PortNetworks:
    return PortConfig(networks=networks, proxy_networks=proxies or []).port_networks("toy")


@asynccontextmanager
async def behind_proxy(
    world: World, config: ServerConfig | None = None, networks: list[str] | None = None, **options: Any
) -> AsyncGenerator[World]:
    rules = port_networks(networks or [], [PROXY, "fd00::/8"])
    async with toy_server(config, world.protocol(networks=rules, **options), world):
        yield world


async def dial(world: World, source: str = PROXY) -> trio.SocketStream:
    host, port = world.addresses[0].rsplit(":", 1)
    return await trio.open_tcp_stream(host, int(port), local_address=source)


async def receive_exactly(stream: trio.abc.ReceiveStream, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (more := await stream.receive_some(size - len(data))):
        data += more
    return bytes(data)


async def ask(stream: trio.abc.Stream, word: str = "hello") -> None:
    await stream.send_all(f"echo {word}\n".encode())
    assert await receive_exactly(stream, len(word) + 1) == f"{word}\n".encode()


async def wait_statistic(world: World, name: str, value: int) -> None:
    while world.statistic(name) != value:
        await trio.lowlevel.checkpoint()


async def is_closed(stream: trio.SocketStream) -> bool:
    """Wait for the end; the server may have closed the socket before it read all that was sent."""
    try:
        return await stream.receive_some() == b""
    except trio.BrokenResourceError:
        return True


def own_address(stream: trio.SocketStream) -> str:
    name: tuple[str, int] = stream.socket.getsockname()
    return show_address(*name)


# headers of proxies


@pytest.mark.parametrize("form", HEADERS)
@pytest.mark.parametrize("client", [CLIENT, "2001:db8::7"])
async def test_a_peer_behind_a_proxy_has_the_address_of_the_client(world: World, form: str, client: str) -> None:
    async with behind_proxy(world), await dial(world) as stream:
        await stream.send_all(HEADERS[form](client, 51234))
        await ask(stream)
        peer = world.toys[0].peer
        assert peer.address == show_address(client, 51234)
        assert peer.host == pack_host(client, 51234)
        assert peer.login_origin().address == client
    assert world.statistic("wrong_proxy_headers") == 0


async def test_an_ipv4_client_in_ipv6_has_its_ipv4_address(world: World) -> None:
    async with behind_proxy(world), await dial(world) as stream:
        await stream.send_all(binary("::ffff:203.0.113.7", 51234))
        await ask(stream)
        assert world.toys[0].peer.address == "203.0.113.7:51234"
        assert len(world.toys[0].peer.host) == 8


@pytest.mark.parametrize("form", HEADERS)
async def test_header_and_requests_may_come_together_or_byte_by_byte(world: World, form: str) -> None:
    header = HEADERS[form](CLIENT, 51234)
    async with behind_proxy(world), await dial(world) as at_once, await dial(world) as slow:
        await at_once.send_all(header + b"echo one\necho ")
        assert await receive_exactly(at_once, 4) == b"one\n"
        await at_once.send_all(b"two\n")
        assert await receive_exactly(at_once, 4) == b"two\n"
        for at in range(len(header)):
            await wait_statistic(world, "awaited_proxy_headers", 1)
            await slow.send_all(header[at : at + 1])
        await ask(slow)
        assert [toy.peer.address for toy in world.toys] == [f"{CLIENT}:51234"] * 2
        assert world.handled == ["echo one", "echo two", "echo hello"]


async def test_nothing_exists_for_a_connection_without_its_header(world: World) -> None:
    async with behind_proxy(world), await dial(world) as stream:
        await stream.send_all(b"PROXY TCP4 203.0")
        await wait_statistic(world, "awaited_proxy_headers", 1)
        assert (world.toys, world.statistic("connections"), world.statistic("accepted")) == ([], 0, 0)
        await stream.send_all(b".113.7 192.0.2.1 1 2\r\n")
        await ask(stream)
        assert world.statistic("awaited_proxy_headers") == 0


@pytest.mark.parametrize("header", [LOCAL, UNKNOWN, binary(CLIENT, 1, kind=0x31, fields=bytes(204))], ids=repr)
async def test_a_proxy_that_names_no_client_is_the_client(
    world: World, header: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with behind_proxy(world, networks=["203.0.113.0/24"]), await dial(world) as stream:
        await stream.send_all(header)
        await ask(stream)
        assert world.toys[0].peer.address == own_address(stream)
    assert not caplog.records, "a health check is nothing special"


@pytest.mark.parametrize("reset", [False, True], ids=["end", "reset"])
@pytest.mark.parametrize("sent", [b"", LOCAL, UNKNOWN], ids=["nothing", "v2", "v1"])
async def test_a_health_check_is_not_logged(
    world: World, sent: bytes, reset: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy that checks whether a port listens connects, sends a header or nothing, and closes or resets."""
    caplog.set_level(logging.INFO)
    async with behind_proxy(world):
        stream = await dial(world)
        await stream.send_all(sent)
        await wait_statistic(world, "accepted" if sent else "awaited_proxy_headers", 1)
        if reset:
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await stream.aclose()
        await wait_statistic(world, "awaited_proxy_headers", 0)
        await wait_statistic(world, "connections", 0)
        assert world.statistic("wrong_proxy_headers") == 0
    assert not caplog.records


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"echo hello\n", "no PROXY header begins with b'echo hello"),
        (b"\x16\x03\x01\2\0", "no PROXY header begins with b'\\x16"),
        (b"PROXY TCP4 nobody\r\n", "PROXY line b'PROXY TCP4 nobody"),
        (binary(CLIENT, 1, command=0x22), "version and command 0x22"),
        (b"PROXY TCP4 203.0.113.7", "it ended within its PROXY header"),
    ],
)
async def test_a_wrong_header_closes_the_connection(
    world: World, sent: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with behind_proxy(world), await dial(world) as stream:
        await stream.send_all(sent)
        if "ended" in why:
            await stream.send_eof()
        assert await is_closed(stream)
        assert (world.statistic("wrong_proxy_headers"), world.statistic("accepted")) == (1, 0)
        assert f"toy.proxy_networks: closed a connection of {own_address(stream)}; " in caplog.text
        assert why in caplog.text


async def test_wrong_headers_are_logged_once_in_ten_seconds(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async with behind_proxy(world):
        for _ in range(10):
            async with await dial(world) as stream:
                await stream.send_all(b"echo hello\n")
                assert await is_closed(stream)
        assert world.statistic("wrong_proxy_headers") == 10
    assert len(caplog.records) == 1


async def test_a_header_has_a_time_limit(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accepted, "HEADER_S", 0.05)
    async with behind_proxy(world), await dial(world) as stream:
        await stream.send_all(b"PROXY TCP4 203.0")
        assert await is_closed(stream)
        assert "no PROXY header came within 0.05 s" in caplog.text
        assert (world.statistic("wrong_proxy_headers"), world.statistic("awaited_proxy_headers")) == (1, 0)


async def test_the_oldest_of_too_many_waiting_connections_is_closed(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accepted, "AWAITED_MAX", 2)
    async with behind_proxy(world):
        streams = []
        for number in range(3):
            streams.append(await dial(world))
            await wait_statistic(world, "awaited_proxy_headers", min(number + 1, 2))
        assert await is_closed(streams[0])
        assert "2 newer connections wait for their PROXY headers" in caplog.text
        for stream in streams[1:]:
            await stream.send_all(text(CLIENT, 1))
            await ask(stream)
        for stream in streams:
            await stream.aclose()


async def test_a_server_that_stops_closes_the_connections_without_header(world: World) -> None:
    async with behind_proxy(world):
        stream = await dial(world)
        await wait_statistic(world, "awaited_proxy_headers", 1)
    assert await is_closed(stream)
    await stream.aclose()
    assert world.statistic("awaited_proxy_headers") == 0


@pytest.mark.parametrize("form", HEADERS)
async def test_a_header_from_elsewhere_is_nonsense_of_the_protocol(world: World, form: str) -> None:
    async with behind_proxy(world), await dial(world, "127.0.0.1") as stream:
        await ask(stream)
        await stream.send_all(HEADERS[form](CLIENT, 51234) + b"\n")
        await wait_statistic(world, "connections", 0)
        assert world.toys[0].peer.address == own_address(stream)
        assert world.handled[1].startswith(("PROXY", "\r"))


async def test_a_second_header_is_nonsense_of_the_protocol(world: World) -> None:
    async with behind_proxy(world), await dial(world) as stream:
        await stream.send_all(text(CLIENT, 1) + text("198.51.100.1", 2))
        await wait_statistic(world, "accepted", 1)
        await wait_statistic(world, "connections", 0)
        assert world.toys[0].peer.address == f"{CLIENT}:1"


# with TLS and WebSocket


@pytest.fixture(scope="module")
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    authority, server, client = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server)
    authority.configure_trust(client)
    return server, client


async def encrypt(stream: trio.SocketStream, context: ssl.SSLContext) -> trio.SSLStream[trio.SocketStream]:
    secret = trio.SSLStream(stream, context, server_hostname="localhost", https_compatible=True)
    await secret.do_handshake()
    return secret


@pytest.mark.parametrize("form", HEADERS)
@pytest.mark.parametrize("required", [False, True], ids=["permissive", "enforcing"])
async def test_tls_begins_after_the_header(
    world: World, contexts: tuple[ssl.SSLContext, ssl.SSLContext], form: str, required: bool
) -> None:
    server, client = contexts
    async with behind_proxy(world, tls=lambda: server, tls_required=required), await dial(world) as stream:
        await stream.send_all(HEADERS[form](CLIENT, 51234))
        await ask(await encrypt(stream, client))
        assert (world.toys[0].peer.address, world.toys[0].peer.encrypted) == (f"{CLIENT}:51234", True)


async def talk_websocket(stream: trio.abc.Stream, first: bytes = b"") -> None:
    client = WSConnection(ConnectionType.CLIENT)
    await stream.send_all(first + client.send(Request(host="localhost", target="/", subprotocols=["toy"])))
    payload = b""
    while payload != b"hello\n":
        client.receive_data(bytes(await stream.receive_some()))
        for event in client.events():
            if isinstance(event, AcceptConnection):
                await stream.send_all(client.send(BytesMessage(b"echo hello\n")))
            elif isinstance(event, BytesMessage):
                payload += bytes(event.data)


@pytest.mark.parametrize("form", HEADERS)
async def test_websocket_begins_after_the_header(
    world: World, contexts: tuple[ssl.SSLContext, ssl.SSLContext], form: str
) -> None:
    server, client = contexts
    serving = behind_proxy(world, tls=lambda: server, websocket=WebSocket(("toy",)))
    async with serving, await dial(world) as plain, await dial(world) as stream:
        await talk_websocket(plain, HEADERS[form](CLIENT, 51234))
        await stream.send_all(HEADERS[form](CLIENT, 51235))
        await talk_websocket(await encrypt(stream, client))
        assert [toy.peer.address for toy in world.toys] == [f"{CLIENT}:51234", f"{CLIENT}:51235"]


async def test_a_greeting_waits_for_the_header(world: World) -> None:
    def greet(peer: object, connection: object) -> object:
        toy = handle(peer, connection)  # type: ignore[arg-type]
        toy.peer.send(f"hello {toy.peer.address}\n".encode())  # type: ignore[attr-defined]
        return toy

    handle = world.protocol().handle
    async with behind_proxy(world, handle=greet), await dial(world) as stream:
        await wait_statistic(world, "awaited_proxy_headers", 1)
        await stream.send_all(text(CLIENT, 1))
        assert await receive_exactly(stream, 20) == f"hello {CLIENT}:1\n".encode()


# networks


async def test_only_networks_of_the_port_may_connect(world: World, caplog: pytest.LogCaptureFixture) -> None:
    protocol = world.protocol(networks=port_networks(["127.0.0.2", "10.0.0.0/8"]))
    async with toy_server(protocol=protocol, world=world):
        async with await dial(world, "127.0.0.2") as stream:
            await ask(stream)
        for _ in range(3):
            async with await dial(world, "127.0.0.3") as stream:
                assert await is_closed(stream)
        assert (world.statistic("refused_by_networks"), world.statistic("accepted")) == (3, 1)
    (record,) = caplog.records
    assert record.getMessage().startswith("toy.networks refused a connection of 127.0.0.3:")


async def test_behind_a_proxy_the_network_of_the_client_counts(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async with behind_proxy(world, networks=["203.0.113.0/24"]):
        async with await dial(world) as stream:
            await stream.send_all(text(CLIENT, 1))
            await ask(stream)
        async with await dial(world) as stream:
            await stream.send_all(text("198.51.100.1", 1))
            assert await is_closed(stream)
        async with await dial(world, "127.0.0.1") as stream:
            assert await is_closed(stream)
        assert world.statistic("refused_by_networks") == 2
    assert "toy.networks refused a connection of 198.51.100.1:1; " in caplog.text


async def test_each_port_has_its_own_networks(world: World) -> None:
    protocols: list[Protocol] = [world.protocol(networks=port_networks(["127.0.0.2"])), world.protocol()]
    async with toy_server(protocol=protocols[0], world=world), trio.open_nursery() as nursery:
        (listener,) = world.server.bind(protocols[1])
        nursery.start_soon(world.server._accept, protocols[1], listener)
        async with await dial(world, "127.0.0.3") as stream:
            assert await is_closed(stream)
        world.addresses.reverse()
        async with await dial(world, "127.0.0.3") as stream:
            await ask(stream)
        nursery.cancel_scope.cancel()


# limits of an address


async def test_an_address_has_a_limit_of_connections(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async with toy_server(ServerConfig(connections_address_max=2), world.protocol(), world):
        first, second = await dial(world, "127.0.0.2"), await dial(world, "127.0.0.2")
        await ask(first)
        await ask(second)
        async with await dial(world, "127.0.0.2") as third, await dial(world, "127.0.0.3") as other:
            assert await is_closed(third)
            await ask(other)
        assert world.statistic("refused_by_address_max") == 1
        await first.aclose()
        await wait_statistic(world, "connections", 1)
        async with await dial(world, "127.0.0.2") as stream:
            await ask(stream)
        await second.aclose()
    (record,) = caplog.records
    assert record.getMessage().startswith("server.connections_address_max refused a connection of 127.0.0.2:")
    assert record.getMessage().endswith(" to toy; its address has 2 already")


async def test_behind_a_proxy_the_address_of_the_client_has_the_limit(world: World) -> None:
    async with behind_proxy(world, ServerConfig(connections_address_max=1)):
        held = []
        for client in CLIENT, "203.0.113.8", "2001:db8::1", "2001:db8:0:1::1":
            held.append(await dial(world))
            await held[-1].send_all(binary(client, 1))
            await ask(held[-1])
        for client in CLIENT, "::ffff:203.0.113.8", "2001:db8::ffff":  # the last one is in the same /64
            async with await dial(world) as stream:
                await stream.send_all(binary(client, 2))
                assert await is_closed(stream)
        assert world.statistic("refused_by_address_max") == 3
        for stream in held:
            await stream.aclose()


async def test_an_address_has_a_limit_of_new_connections_a_second(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async with behind_proxy(world, ServerConfig(connects_address_s=1)):
        answered = 0
        while not world.statistic("refused_by_address_rate"):
            async with await dial(world) as stream:
                await stream.send_all(text(CLIENT, 1))
                answered += await answers(stream)
        assert answered >= 10, "at once"
        async with await dial(world) as stream:
            await stream.send_all(text("203.0.113.8", 1))
            await ask(stream)
        assert (world.statistic("refused_by_address_rate"), world.statistic("rated_addresses")) == (1, 2)
    wanted = (
        f"server.connects_address_s refused a connection of {CLIENT}:1 to toy; its address makes more than 1 a second"
    )
    assert [record.getMessage() for record in caplog.records] == [wanted]


async def answers(stream: trio.SocketStream) -> bool:
    try:
        await stream.send_all(b"echo hello\n")
        return await receive_exactly(stream, 6) == b"hello\n"
    except trio.BrokenResourceError:
        return False


@pytest.mark.parametrize("fields", [b"", field(4, bytes(3000))], ids=["short", "long"])
async def test_the_fullest_client_address_gives_way_behind_a_proxy(world: World, fields: bytes) -> None:
    async with behind_proxy(world, ServerConfig(connections_max=3)):
        crowd = []
        for number in range(3):
            crowd.append(await dial(world))
            await crowd[-1].send_all(binary(CLIENT, number, fields=fields))
            await ask(crowd[-1])
        other = await dial(world)
        await other.send_all(binary("203.0.113.8", 1, fields=fields))
        await ask(other)
        assert await is_closed(crowd[-1])
        assert (world.statistic("gave_way"), world.statistic("connections_address")) == (1, 2)
        for stream in (*crowd, other):
            await stream.aclose()
