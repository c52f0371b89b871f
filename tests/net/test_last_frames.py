"""A client that is still writing when the server closes reads the last frame, then the end, and never a reset."""

import socket
import ssl
from collections.abc import Callable

import pytest
import trio
import trio.testing
import trustme
from tests.broker.toys import Lines, Toy, World, toy_server
from tests.last_frames import MORE, read_after_writing
from tests.net.test_server_sockets import Certificates, certificates, dial, dial_tls, receive_exactly, wait_connections
from trio.testing import MockClock
from wsproto import ConnectionType, WSConnection
from wsproto.events import BytesMessage, CloseConnection, Message, Request

from martlet.contracts import WebSocket
from martlet.net import server
from martlet.net.lingering import LINGER_S
from martlet.settings import ServerConfig

__all__ = ["certificates"]  # the fixture

LAST = {
    b"bad words\n": b"error words\n",
    b"x" * 1001: b"error a line is over 1000 bytes\n",
    b"bye now\n": b"now\n",
    b"echo a\nwrong state\n": b"a\n",
    b"echo a\nbreak it\n": b"a\n",
    b"hold 9 stored\nbad words\n": b"stored\nerror words\n",
}


@pytest.fixture
def world() -> World:
    return World()


async def wait_lingering(world: World, count: int) -> None:
    while world.statistic("lingering") != count:
        await trio.lowlevel.checkpoint()


async def flush_later(world: World, lines: bytes) -> None:
    if b"hold" in lines:
        while not world.handled:
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()
        world.store.flush_to(9)


@pytest.mark.parametrize("lines", LAST)
async def test_over_a_plain_socket(world: World, lines: bytes) -> None:
    async with toy_server(protocol=world.protocol(), world=world), trio.open_nursery() as nursery:
        nursery.start_soon(flush_later, world, lines)
        async with await dial(world) as stream:
            assert await read_after_writing(stream, lines + MORE) == LAST[lines]
        await wait_lingering(world, 0)


@pytest.mark.parametrize("lines", LAST)
async def test_over_tls(world: World, certificates: Certificates, lines: bytes) -> None:
    protocol = world.protocol(tls=lambda: certificates.server)
    async with toy_server(protocol=protocol, world=world), trio.open_nursery() as nursery:
        nursery.start_soon(flush_later, world, lines)
        stream = trio.SSLStream(await dial(world), certificates.client, server_hostname="localhost")
        # Without `https_compatible`, an end without close_notify is an error.
        assert await read_after_writing(stream, lines + MORE) == LAST[lines]
        await trio.aclose_forcefully(stream)
        await wait_lingering(world, 0)


@pytest.mark.parametrize("lines", LAST)
async def test_over_a_websocket(world: World, lines: bytes) -> None:
    protocol = world.protocol(websocket=WebSocket(("toy",)))
    client = WSConnection(ConnectionType.CLIENT)
    request = client.send(Request(host="localhost", target="/", subprotocols=["toy"]))
    async with toy_server(protocol=protocol, world=world), trio.open_nursery() as nursery:
        nursery.start_soon(flush_later, world, lines)
        async with await dial(world) as stream:
            await stream.send_all(request)
            client.receive_data(bytes(await stream.receive_some()))
            frames = client.send(Message(lines)) + client.send(Message(MORE))
            client.receive_data(await read_after_writing(stream, frames))
            *_, last = events = list(client.events())
            payload = b"".join(event.data for event in events if isinstance(event, BytesMessage))
            assert (payload, isinstance(last, CloseConnection)) == (LAST[lines], True)
        await wait_lingering(world, 0)


async def test_a_refused_websocket_handshake(world: World) -> None:
    async with (
        toy_server(protocol=world.protocol(websocket=WebSocket(("toy",))), world=world),
        await dial(world) as stream,
    ):
        assert (await read_after_writing(stream, b"GET / HTTP/1.1\r\n" + MORE)).startswith(b"HTTP/1.1 431 ")


async def test_an_alert_says_why_a_tls_handshake_failed(world: World, certificates: Certificates) -> None:
    """In TLS 1.3 a client may write before it learns that its certificate is missing."""
    required = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority = trustme.CA()
    authority.issue_cert("localhost").configure_cert(required)
    authority.configure_trust(required)
    required.verify_mode = ssl.CERT_REQUIRED
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with toy_server(protocol=world.protocol(tls=lambda: required), world=world):
        stream = trio.SSLStream(await dial(world), context, server_hostname="localhost")
        with pytest.raises(trio.BrokenResourceError) as caught:
            await read_after_writing(stream, MORE)
        assert "CERTIFICATE_REQUIRED" in str(caught.value.__cause__)
        await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("secured", [False, True])
async def test_a_close_by_the_server_without_a_last_frame(
    secured: bool, world: World, certificates: Certificates
) -> None:
    async with toy_server(protocol=world.protocol(tls=lambda: certificates.server), world=world):
        stream = await (dial_tls(world, certificates) if secured else dial(world))
        await stream.send_all(b"echo a\n")
        assert await receive_exactly(stream, 2) == b"a\n"
        world.server.close_peers("it must go")
        assert await read_after_writing(stream, MORE) == b""
        await trio.aclose_forcefully(stream)


async def test_a_peer_has_ended_while_its_socket_lingers(world: World, autojump_clock: MockClock) -> None:
    async with toy_server(protocol=world.protocol(), world=world), await dial(world) as stream:
        await stream.send_all(b"bad words\n")
        await wait_lingering(world, 1)
        assert (world.reasons, world.statistic("connections")) == (["words"], 0)
        assert trio.current_time() == 0
        await trio.sleep(LINGER_S + 1)
        assert world.statistic("lingering") == 0


def say_nothing(lines: Lines, error: Exception) -> bytes:
    return b""


async def client_closes(stream: trio.SocketStream) -> None:
    await stream.send_all(b"echo a\n")
    await stream.receive_some()
    await stream.aclose()


async def client_sends_no_more(stream: trio.SocketStream) -> None:
    await stream.send_all(b"echo a\n")
    await stream.send_eof()


async def client_says_goodbye(stream: trio.SocketStream) -> None:
    await stream.send_all(b"echo a\n")
    await stream.receive_some()
    await stream.send_all(b"leave\n")


async def nothing_was_sent(stream: trio.SocketStream) -> None:
    await stream.send_all(b"bad words\n")


async def client_resets(stream: trio.SocketStream) -> None:
    await stream.send_all(b"echo a\n")
    await stream.receive_some()
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    await stream.aclose()


@pytest.mark.parametrize(
    "end", [client_closes, client_sends_no_more, client_says_goodbye, nothing_was_sent, client_resets]
)
async def test_nothing_lingers_without_need(
    end: Callable[[trio.SocketStream], object], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lingered: list[int] = []
    monkeypatch.setattr(Lines, "farewell", say_nothing)
    monkeypatch.setattr(Toy, "do_leave", lambda toy, text: toy.peer.close(""), raising=False)
    async with toy_server(protocol=world.protocol(), world=world):
        monkeypatch.setattr(world.server._lingering, "add", lingered.append)
        stream = await dial(world)
        await end(stream)  # type: ignore[misc]
        while not world.reasons:
            await trio.lowlevel.checkpoint()
        await stream.aclose()
    assert lingered == []


async def test_lingering_connections_count_and_give_way(world: World) -> None:
    async with toy_server(ServerConfig(connections_max=3), world.protocol(), world):
        streams = [await dial(world) for _ in range(3)]
        for stream in streams[:2]:
            await stream.send_all(b"bad words\n")
        await wait_lingering(world, 2)
        await wait_connections(world, 1)
        streams.append(await dial(world))
        await wait_connections(world, 2)
        assert world.statistic("lingering") == 1
        streams.append(await dial(world))
        await wait_connections(world, 3)
        assert (world.statistic("lingering"), world.statistic("gave_way")) == (0, 0)
        assert world.statistic("turned_away") == 0
        for stream in streams:
            await stream.aclose()


@pytest.mark.parametrize("reads", [False, True])
async def test_a_stop_waits_for_clients_a_moment_only(world: World, autojump_clock: MockClock, reads: bool) -> None:
    async with toy_server(protocol=world.protocol(), world=world), await dial(world) as stream:
        await stream.send_all(b"echo a\n")
        assert await stream.receive_some() == b"a\n"
        world.server.close_peers("the broker stops")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.server.wait_idle)
            if reads:
                assert await stream.receive_some() == b""
                await stream.aclose()
        assert trio.current_time() < 2 * server.LINGER_AT_STOP_S
        assert world.statistic("lingering") == (not reads)


async def test_many_connections_closed_together_need_no_tasks(world: World) -> None:
    async with toy_server(protocol=world.protocol(), world=world):
        streams = [await dial(world) for _ in range(300)]
        for stream in streams:
            await stream.send_all(b"echo a\n")
            await stream.receive_some()
        tasks = trio.lowlevel.current_statistics().tasks_living
        world.server.close_peers("all must go")
        await wait_lingering(world, 300)
        await wait_connections(world, 0)
        await trio.testing.wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        for stream in streams:
            assert await stream.receive_some() == b""
            await stream.aclose()
        await wait_lingering(world, 0)
