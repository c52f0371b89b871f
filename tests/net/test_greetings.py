"""A server that speaks first: its greeting waits until it is known whether the client begins TLS or WebSocket."""

import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
import trustme
from tests.broker.toys import Lines, Toy, World, toy_server
from tests.net.test_server_sockets import dial
from trio.testing import MockClock
from websockets.client import ClientProtocol
from websockets.frames import Opcode
from websockets.uri import parse_uri

from martlet.contracts import Protocol, WebSocket
from martlet.errors import Reason, Refused
from martlet.testing.links import Conditions

GREETING = b"hello\n"
TLS_HELLO = b"\x16\x03\x01\x00\x05hello"  # no valid ClientHello
SOCKET = WebSocket(("toy",))
PERMISSIVE, ENFORCING = False, True


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context


@pytest.fixture(scope="module")
def client_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture
def world() -> World:
    return World()


def greeting(world: World, greet: Callable[[Toy], None] | None = None, **options: object) -> Protocol:
    """Return a port whose handlers greet."""

    def handle(peer: object, connection: Lines) -> Toy:
        toy = Toy(world, peer, connection)  # type: ignore[arg-type]
        (greet or (lambda toy: toy.peer.send(GREETING)))(toy)
        return toy

    return world.protocol(handle=handle, **options)


@asynccontextmanager
async def encrypted(
    stream: trio.SocketStream, context: ssl.SSLContext
) -> AsyncGenerator[trio.SSLStream[trio.SocketStream]]:
    inside = trio.SSLStream(stream, context, server_hostname="localhost", https_compatible=True)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(trio.aclose_forcefully, inside)
        await inside.do_handshake()
        yield inside


async def lines(stream: trio.abc.ReceiveStream, count: int) -> bytes:
    data = b""
    while data.count(b"\n") < count:
        more = await stream.receive_some()
        assert more, f"it closed after {data!r}"
        data += more
    return data


async def over_websocket(stream: trio.abc.Stream) -> bytes:
    """Return the first message that a WebSocket client gets, which sends nothing after its handshake."""
    client = ClientProtocol(parse_uri("ws://localhost/"), subprotocols=["toy"])  # type: ignore[list-item]
    client.send_request(client.connect())
    while True:
        for data in client.data_to_send():
            await stream.send_all(data)
        for event in client.events_received():
            if getattr(event, "opcode", None) is Opcode.BINARY:
                return bytes(event.data)  # type: ignore[union-attr]
        more = await stream.receive_some()
        assert more, client.handshake_exc
        client.receive_data(more)


@pytest.mark.parametrize("websocket", [None, SOCKET], ids=["", "websocket"])
@pytest.mark.parametrize("required", [PERMISSIVE, ENFORCING])
async def test_a_client_of_tls_gets_the_greeting_encrypted(
    world: World,
    server_context: ssl.SSLContext,
    client_context: ssl.SSLContext,
    required: bool,
    websocket: WebSocket | None,
) -> None:
    port = greeting(world, tls=lambda: server_context, tls_required=required, websocket=websocket)
    async with toy_server(protocol=port, world=world), encrypted(await dial(world), client_context) as stream:
        assert await lines(stream, 1) == GREETING
        await stream.send_all(b"echo a\n")
        assert await lines(stream, 1) == b"a\n"
        assert world.toys[0].peer.encrypted


@pytest.mark.parametrize("secure", [False, True], ids=["ws", "wss"])
async def test_a_client_of_websocket_gets_the_greeting_in_a_frame(
    world: World, server_context: ssl.SSLContext, client_context: ssl.SSLContext, secure: bool
) -> None:
    port = greeting(world, tls=lambda: server_context, tls_required=secure, websocket=SOCKET)
    async with toy_server(protocol=port, world=world), await dial(world) as plain:
        if secure:
            async with encrypted(plain, client_context) as stream:
                assert await over_websocket(stream) == GREETING
        else:
            assert await over_websocket(plain) == GREETING
        assert world.toys[0].peer.encrypted == secure


async def test_a_port_that_requires_tls_says_nothing_in_plain_text(
    autojump_clock: MockClock, server_context: ssl.SSLContext
) -> None:
    """But for the reason, to a client that speaks plain text."""
    async with toy_server() as world:
        port = greeting(world, tls=lambda: server_context, tls_required=True)
        caller, link = world.dial(protocol=port)
        await trio.sleep(900)
        assert link.far.sent_bytes == 0
        await caller.send(b"echo a\n")
        assert await caller.receive_all() == b"error client speaks plain text; this port requires TLS\n"
        assert not world.handled


async def test_a_silent_client_of_a_port_that_requires_tls_is_closed_without_a_word(
    autojump_clock: MockClock, server_context: ssl.SSLContext
) -> None:
    world = World(connect=lambda: Lines(10.0))
    async with toy_server(world=world):
        caller, _ = world.dial(protocol=greeting(world, tls=lambda: server_context, tls_required=True))
        assert await caller.receive_all() == b""
        await trio.sleep(1)
        assert world.reasons == ["silent for too long"]
        assert world.statistic("unsent_bytes") == 0


@pytest.mark.parametrize("websocket", [None, SOCKET], ids=["", "websocket"])
async def test_a_client_in_plain_text_gets_the_greeting_when_it_waits_or_speaks(
    autojump_clock: MockClock, server_context: ssl.SSLContext, websocket: WebSocket | None
) -> None:
    async with toy_server() as world:
        port = greeting(world, tls=lambda: server_context, websocket=websocket)
        waiting, _ = world.dial(protocol=port)
        assert await waiting.receive_exactly(len(GREETING)) == GREETING
        await waiting.send(TLS_HELLO + b"\n")  # too late for TLS, so it is a request
        assert await waiting.receive_all() == b""
        assert world.handled == [TLS_HELLO.decode()]
        speaking, _ = world.dial(protocol=port)
        await speaking.send(b"echo a\n")
        assert await speaking.receive_exactly(len(GREETING) + 2) == GREETING + b"a\n"
        assert not world.toys[0].peer.encrypted


async def test_a_port_without_tls_greets_at_once(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial(protocol=greeting(world))
        began = trio.current_time()
        assert await caller.receive_exactly(len(GREETING)) == GREETING
        assert trio.current_time() == began


async def test_a_client_that_closes_at_once_leaves_nothing(
    autojump_clock: MockClock, server_context: ssl.SSLContext
) -> None:
    async with toy_server() as world:
        for required in (PERMISSIVE, ENFORCING):
            caller, link = world.dial(protocol=greeting(world, tls=lambda: server_context, tls_required=required))
            link.near.finish()
            assert await caller.receive_all() == (b"" if required else GREETING)
        assert (world.statistic("unsent_bytes"), world.statistic("connections")) == (0, 0)


@pytest.mark.parametrize("greets", [False, True], ids=["after a command", "after the greeting"])
async def test_a_protocol_can_begin_tls(
    world: World, server_context: ssl.SSLContext, client_context: ssl.SSLContext, greets: bool
) -> None:
    port = greeting(world, lambda toy: toy.do_tls("hello") if greets else None, tls=lambda: server_context)
    async with toy_server(protocol=port, world=world), await dial(world) as plain:
        if not greets:
            await plain.send_all(b"echo a\ntls hello\n")
            assert await lines(plain, 2) == b"a\nhello\n"
        else:
            assert await lines(plain, 1) == GREETING
        async with encrypted(plain, client_context) as stream:
            assert await lines(stream, 1) == GREETING
            await stream.send_all(b"echo b\n")
            assert await lines(stream, 1) == b"b\n"
            peer = world.toys[0].peer
            assert peer.encrypted
            with pytest.raises(Refused, match="the connection uses TLS or WebSocket already"):
                peer.start_tls()


@pytest.mark.parametrize("sent", [b"tls hello\necho injected\n", b"tls hello\necho inj", b"tls hello\n\x16\x03\x01"])
async def test_plain_text_after_a_command_that_begins_tls_is_refused(
    autojump_clock: MockClock, server_context: ssl.SSLContext, sent: bytes
) -> None:
    """Somebody on the way may have written it, to have it handled as if the client had sent it encrypted."""
    async with toy_server() as world:
        caller, _ = world.dial(protocol=world.protocol(tls=lambda: server_context))
        await caller.send(sent)
        assert (await caller.receive_all()).endswith(b"error client sent plain text where TLS had to begin\n")
        assert world.handled == ["tls hello"]


async def test_what_follows_in_plain_text_instead_of_tls_is_refused(
    autojump_clock: MockClock, server_context: ssl.SSLContext
) -> None:
    async with toy_server() as world:
        caller, _ = world.dial(protocol=world.protocol(tls=lambda: server_context))
        await caller.send(b"tls hello\n")
        assert await caller.receive_exactly(len(GREETING)) == GREETING
        await caller.send(b"echo a\n")
        assert await caller.receive_all() == b"error client sent plain text where TLS had to begin\n"
        assert world.handled == ["tls hello"]
        assert world.statistic("unsent_bytes") == 0


async def test_a_client_that_does_not_begin_tls_is_closed_at_its_deadline(
    autojump_clock: MockClock, server_context: ssl.SSLContext
) -> None:
    world = World(connect=lambda: Lines(10.0))
    async with toy_server(world=world):
        caller, _ = world.dial(protocol=world.protocol(tls=lambda: server_context))
        await caller.send(b"tls hello\n")
        assert await caller.receive_all() == GREETING + b"error silent for too long\n"
        await trio.sleep(1)
        assert world.reasons == ["silent for too long"]


async def test_held_answers_leave_in_plain_text_before_tls(
    autojump_clock: MockClock, server_context: ssl.SSLContext
) -> None:
    async with toy_server() as world:
        caller, _ = world.dial(protocol=world.protocol(tls=lambda: server_context))
        await caller.send(b"hold 5 a\ntls hello\n")
        await trio.sleep(1)
        world.store.flush_to(5)
        assert await caller.receive_exactly(8) == b"a\nhello\n"


async def test_tls_cannot_begin_without_a_certificate(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        world.dial()
        await trio.sleep(1)
        with pytest.raises(Refused, match="toy has no certificate") as caught:
            world.toys[0].peer.start_tls()
        assert caught.value.reason is Reason.NOT_SUPPORTED


async def test_a_peer_has_room_while_its_client_reads(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial(Conditions(capacity_bytes=1000))
        await trio.sleep(1)
        peer = world.toys[0].peer
        assert peer.has_room()
        await caller.send(b"fill 5000\n")
        await trio.sleep(1)
        assert not peer.has_room()
        await caller.receive_exactly(5000)
        await trio.sleep(1)
        assert peer.has_room()
