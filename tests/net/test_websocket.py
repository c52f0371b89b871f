"""WebSocket as a byte stream: real clients, every cutting of what they send, and all that breaks the protocol."""

import itertools
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from tests.broker.toys import World, toy_server
from tests.net.test_server_sockets import Certificates, certificates, dial, dial_tls
from trio.testing import MockClock
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    Pong,
    RejectConnection,
    Request,
    TextMessage,
)

from martlet.contracts import Protocol, WebSocket
from martlet.net.opening.websocket import HEAD_BYTES_MAX, PAYLOAD_BYTES, _join_for_frame
from martlet.settings import ServerConfig
from martlet.testing.links import Caller, Conditions

__all__ = ["certificates"]  # the fixture

ACCEPTED = AcceptConnection(subprotocol="toy")


@pytest.fixture
def world() -> World:
    return World()


def speaks(world: World, **settings: object) -> Protocol:
    return world.protocol(websocket=WebSocket(("toy", "toy2"), **settings))  # type: ignore[arg-type]


def hello(**fields: object) -> Request:
    fields.setdefault("subprotocols", ["other", "toy"])
    return Request(host="localhost", target="/mqtt", **fields)  # type: ignore[arg-type]


class Client:
    """wsproto's client on a link."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.state = WSConnection(ConnectionType.CLIENT)
        self.events: list[Event] = []

    async def send(self, *events: Event) -> None:
        await self.caller.send(b"".join(bytes(self.state.send(event)) for event in events))

    async def receive(self) -> Event:
        while not self.events:
            data = await self.caller.receive()
            assert data, "the server closed"
            self.state.receive_data(data)
            self.events += self.state.events()
        return self.events.pop(0)

    async def receive_close(self) -> Event:
        """Return the close frame, which may follow words of the protocol itself."""
        while isinstance(event := await self.receive(), BytesMessage):
            pass
        return event

    async def receive_bytes(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            event = await self.receive()
            assert isinstance(event, BytesMessage), event
            data += event.data
        return data


@asynccontextmanager
async def opened(world: World, **settings: object) -> AsyncGenerator[Client]:
    async with toy_server(world=world):
        client = Client(world.dial(protocol=speaks(world, **settings))[0])
        await client.send(hello())
        assert await client.receive() == ACCEPTED
        yield client


async def test_payloads_are_one_stream_of_bytes(world: World, autojump_clock: MockClock) -> None:
    async with opened(world) as client:
        for event in (
            BytesMessage(data=b"echo on"),
            BytesMessage(data=b"e\nec", message_finished=False),
            BytesMessage(data=b"", message_finished=False),
            BytesMessage(data=b"ho two\n"),
            BytesMessage(data=b""),
        ):
            await client.send(event)
        assert await client.receive_bytes(8) == b"one\ntwo\n"


async def test_large_payloads_pass_both_ways(world: World, autojump_clock: MockClock) -> None:
    async with opened(world) as client:
        await client.send(BytesMessage(data=b"echo here\n" * 20_000))
        assert await client.receive_bytes(100_000) == b"here\n" * 20_000
        await client.send(BytesMessage(data=b"fill 3000000\n"))
        assert await client.receive_bytes(3_000_000) == bytes(3_000_000)


async def test_pings_are_answered_within_a_message(world: World, autojump_clock: MockClock) -> None:
    async with opened(world) as client:
        await client.send(BytesMessage(data=b"echo ", message_finished=False), Ping(payload=b"there?"))
        assert await client.receive() == Pong(payload=b"there?")
        await client.send(BytesMessage(data=b"yes\n"))
        assert await client.receive_bytes(4) == b"yes\n"


async def test_pings_of_a_client_that_does_not_read_take_no_memory(world: World, autojump_clock: MockClock) -> None:
    async with toy_server(world=world):
        client = Client(world.dial(Conditions(capacity_bytes=1024), speaks(world))[0])
        await client.send(hello())
        assert await client.receive() == ACCEPTED
        peer = next(iter(world.server._peers.values()))
        for _ in range(500):
            await client.send(Ping(payload=b"x" * 125))
        assert len(peer.transport._unsent) < 5000  # type: ignore[attr-defined]


async def test_a_close_is_answered_and_the_server_ends_the_connection(world: World, autojump_clock: MockClock) -> None:
    async with opened(world) as client:
        await client.send(BytesMessage(data=b"echo last\n"), CloseConnection(code=1000, reason="done"))
        assert await client.receive_bytes(5) == b"last\n"
        assert await client.receive() == CloseConnection(code=1000, reason="done")
        assert await client.caller.receive() == b""
        await trio.testing.wait_all_tasks_blocked()
        assert world.reasons == [""]


async def test_our_close_is_a_close_frame(world: World, autojump_clock: MockClock) -> None:
    async with opened(world) as client:
        await client.send(BytesMessage(data=b"bye now\n"))
        assert await client.receive_bytes(4) == b"now\n"
        assert await client.receive() == CloseConnection(code=1000, reason="")
        assert await client.caller.receive() == b""


async def test_text_frames_are_taken_only_where_the_protocol_says_so(world: World, autojump_clock: MockClock) -> None:
    async with opened(world, text=True) as client:
        await client.send(TextMessage(data="echo d\u00e9j\u00e0 vu\n"))
        assert await client.receive_bytes(10) == "d\u00e9j\u00e0 vu\n".encode()
    async with opened(World()) as client:
        await client.send(TextMessage(data="echo no\n"))
        assert await client.receive_close() == CloseConnection(code=1003, reason="text frames are not accepted")
        assert await client.caller.receive() == b""


REQUEST = (
    b"GET /mqtt HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: toy\r\n"
)
REFUSED = {
    "no subprotocol of ours": (REQUEST.replace(b": toy", b": other"), 400),
    "wrong version": (REQUEST.replace(b"13", b"12"), 426),
    "no key": (REQUEST.replace(b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n", b""), 400),
    "no upgrade": (REQUEST.replace(b"Connection: Upgrade\r\n", b""), 400),
    "origin": (REQUEST + b"Origin: https://evil.example\r\n", 403),
    "not HTTP": (b"GARBAGE\r\n", 400),
    "bytes": (b"G\xff\x00\r\n", 400),
    "not ASCII": (REQUEST.replace(b"Host: x", b"Host: \xff\xfe"), 400),
    "too long": (REQUEST + b"X: " + b"x" * 40_000, 431),
    "too long by one byte": (REQUEST + b"X: " + b"x" * (HEAD_BYTES_MAX - len(REQUEST) - 6) + b"\r\n", 431),
}
PHRASES = {400: b"Bad Request", 403: b"Forbidden", 426: b"Upgrade Required", 431: b"Request Header Fields Too Large"}
NAMED = {
    "no subprotocol of ours": "the client offers the subprotocols other; this port has toy, toy2",
    "origin": "a web page of origin https://evil.example may not connect; toy.origins can allow it",
    "too long": f"the HTTP request has more than {HEAD_BYTES_MAX} bytes",
    "no upgrade": "Missing header, 'Connection: Upgrade'; this port is for WebSocket",
}


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("case", REFUSED)
async def test_a_refused_handshake_gives_the_reason_and_ends(
    case: str, cut: bool, world: World, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    request, status = REFUSED[case]
    async with toy_server(world=world):
        caller, _ = world.dial(protocol=speaks(world, origins=(), origins_key="toy.origins"))
        data = request + b"\r\n"
        try:
            for piece in (data[at : at + 1] for at in range(len(data))) if cut else [data]:
                await caller.send(piece)
        except OSError:
            assert case.startswith("too long")
        head, _, body = (await caller.receive_all()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d %b\r\n" % (status, PHRASES[status]))
        assert b"\r\nContent-Length: %d" % len(body) in head
        assert NAMED.get(case, "") in body.decode()
        await trio.testing.wait_all_tasks_blocked()
        assert world.handled == []
    assert f"WebSocket handshake refused ({status}): {body.decode().strip()}" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("cut", [1, 1000, 4096, 8191, 100_000])
async def test_a_long_handshake_is_taken_however_it_is_cut(cut: int, world: World, autojump_clock: MockClock) -> None:
    data = REQUEST + b"Cookie: " + b"c" * (HEAD_BYTES_MAX - len(REQUEST) - 12) + b"\r\n\r\n"
    assert len(data) == HEAD_BYTES_MAX
    async with toy_server(world=world):
        caller, _ = world.dial(protocol=speaks(world))
        for at in range(0, len(data), cut):
            await caller.send(data[at : at + cut])
        await trio.testing.wait_all_tasks_blocked()
        await caller.send(Frame(Opcode.BINARY, b"echo one\n").serialize(mask=True))
        while not world.handled:
            await trio.testing.wait_all_tasks_blocked()
        assert world.handled == ["echo one"]


async def test_a_client_without_subprotocols_speaks_the_protocol_of_the_port(
    world: World, autojump_clock: MockClock
) -> None:
    async with toy_server(world=world):
        client = Client(world.dial(protocol=speaks(world))[0])
        await client.send(hello(subprotocols=[]))
        assert await client.receive() == AcceptConnection(subprotocol=None)
        await client.send(BytesMessage(data=b"echo one\n"))
        assert await client.receive_bytes(4) == b"one\n"


@pytest.mark.parametrize(
    ("origin", "host", "is_allowed"),
    [
        (b"https://broker.example:8443", b"broker.example:1883", True),
        (b"http://BROKER.example", b"broker.Example", True),
        (b"http://[fd00::1]:8080", b"[fd00::1]:1883", True),
        (b"https://broker.example.evil.example", b"broker.example", False),
        (b"https://evil.example", b"broker.example", False),
        (b"null", b"null", False),
    ],
)
async def test_a_page_of_the_host_that_the_client_connects_to_is_not_foreign(
    origin: bytes, host: bytes, is_allowed: bool, world: World, autojump_clock: MockClock
) -> None:
    async with toy_server(world=world):
        caller, _ = world.dial(protocol=speaks(world, origins=()))
        await caller.send(REQUEST.replace(b"Host: x", b"Host: " + host) + b"Origin: " + origin + b"\r\n\r\n")
        assert (await caller.receive_line()).startswith(b"HTTP/1.1 101" if is_allowed else b"HTTP/1.1 403")


BROKEN = {
    "not masked": b"\x82\x03abc",
    "reserved bit": b"\xc2\x80\0\0\0\0",
    "unknown opcode": b"\x83\x80\0\0\0\0",
    "fragmented ping": b"\x09\x80\0\0\0\0",
    "ping too long": b"\x89\xfe\x00\x7e\0\0\0\0",
    "continuation of nothing": b"\x80\x81\0\0\0\0x",
    "length with high bit": b"\x82\xff\xff\xff\xff\xff\xff\xff\xff\xff\0\0\0\0",
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_broken_frame_is_named_and_ends_the_connection(
    case: str, world: World, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(world) as client:
        await client.send(BytesMessage(data=b"echo before\n"))
        assert await client.receive_bytes(7) == b"before\n"
        await client.caller.send(BROKEN[case])
        event = await client.receive_close()
        assert isinstance(event, CloseConnection)
        assert event.code == 1002
        assert await client.caller.receive() == b""
    assert "peer broke the WebSocket protocol" in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_frame_of_any_length_is_passed_on_as_it_comes(world: World, autojump_clock: MockClock) -> None:
    async with opened(world) as client:
        await client.caller.send(b"\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff\0\0\0\0" + b"echo one\n")
        assert await client.receive_bytes(4) == b"one\n"


def conversation() -> bytes:
    """What a client sends, from its handshake on."""
    frames = [
        Frame(Opcode.BINARY, b"echo one\necho ", fin=False),
        Frame(Opcode.PING, b"ping"),
        Frame(Opcode.CONT, b"two\n"),
        Frame(Opcode.BINARY, b"echo " + b"3" * 300 + b"\n"),
        Frame(Opcode.CLOSE, b"\x03\xe8"),
    ]
    return REQUEST + b"\r\n" + b"".join(frame.serialize(mask=True) for frame in frames)


async def answer_to(world: World, pieces: list[bytes]) -> bytes:
    caller, _ = world.dial(protocol=speaks(world))
    for piece in pieces:
        await caller.send(piece)
        await trio.testing.wait_all_tasks_blocked()
    return await caller.receive_all()


async def test_it_does_not_matter_how_bytes_are_cut(world: World, autojump_clock: MockClock) -> None:
    """Also when frames come together with the handshake."""
    data = conversation()
    chance = random.Random(1)
    async with toy_server(world=world):
        await answer_to(world, [data])
        wanted, world.handled = world.handled, []
        assert wanted == ["echo one", "echo two", "echo " + "3" * 300]
        cuttings = [[data[:at], data[at:]] for at in range(1, len(data))]
        cuttings.append([data[at : at + 1] for at in range(len(data))])
        for _ in range(20):
            places = [0, *sorted(chance.sample(range(1, len(data)), 8)), len(data)]
            cuttings.append([data[start:end] for start, end in itertools.pairwise(places)])
        for pieces in cuttings:
            answer = await answer_to(world, pieces)
            handled, world.handled = world.handled, []
            assert handled == wanted, [len(piece) for piece in pieces]
            assert answer.startswith(b"HTTP/1.1 101 ")
            assert b"\x8a\x04ping" in answer
            assert answer.endswith(b"\x88\x02\x03\xe8")


@pytest.mark.parametrize("at", range(0, len(conversation()), 7))
async def test_a_connection_that_breaks_anywhere_is_freed(at: int, world: World, autojump_clock: MockClock) -> None:
    async with toy_server(world=world):
        caller, link = world.dial(protocol=speaks(world))
        await caller.send(conversation()[:at])
        await trio.testing.wait_all_tasks_blocked()
        link.cut()
        await trio.testing.wait_all_tasks_blocked()
        assert world.statistic("connections") == 0


async def test_many_tiny_frames_are_taken_in_small_reads(world: World, autojump_clock: MockClock) -> None:
    """Each takes about 10 us to parse, so a read of 256 KiB of them would keep the event loop for long."""
    lines = 5000
    data = b"".join(Frame(Opcode.BINARY, b"\n").serialize(mask=True) for _ in range(lines))
    together: list[int] = []

    async with opened(world) as client:
        peer = next(iter(world.server._peers.values()))
        receive_data = peer.connection.receive_data

        def noting(payload: bytes, now: float) -> None:
            together.append(len(payload))
            receive_data(payload.replace(b"\n", b"echo x\n"), now)

        peer.connection.receive_data = noting  # type: ignore[method-assign, assignment]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.caller.send, data)
            assert await client.receive_bytes(2 * lines) == b"x\n" * lines
    assert sum(together) == lines
    assert max(together) <= 4096 // 7 + 1


@pytest.mark.parametrize("secured", [False, True])
async def test_another_library_is_served_over_a_socket(secured: bool, world: World, certificates: Certificates) -> None:
    protocol = world.protocol(websocket=WebSocket(("toy",)), tls=lambda: certificates.server)
    async with (
        toy_server(ServerConfig(), protocol, world),
        await (dial_tls(world, certificates) if secured else dial(world)) as stream,
    ):
        client = ClientProtocol(parse_uri("ws://localhost/mqtt"), subprotocols=["toy"])  # type: ignore[list-item]
        client.send_request(client.connect())
        received = bytearray()
        sent = False
        while len(received) < 400_005:
            for data in client.data_to_send():
                await stream.send_all(data)
            client.receive_data(bytes(await stream.receive_some(65536)))
            for event in client.events_received():
                received += event.data if isinstance(event, Frame) else b""
            if client.subprotocol and not sent:
                client.send_binary(b"echo here\nfill 400000\n")
                sent = True
        assert received == b"here\n" + bytes(400_000)
        client.send_close(1000)
        for data in client.data_to_send():
            await stream.send_all(data)
        while last := await stream.receive_some(65536):
            client.receive_data(bytes(last))
        client.receive_eof()
        assert client.close_code == 1000


async def test_the_protocol_itself_is_spoken_on_the_same_port(world: World, autojump_clock: MockClock) -> None:
    async with toy_server(world=world):
        caller, _ = world.dial(protocol=speaks(world))
        await caller.send(b"echo plain\n")
        assert await caller.receive_line() == b"plain"


async def test_what_is_sent_before_the_handshake_follows_it(world: World, autojump_clock: MockClock) -> None:
    async with toy_server(world=world):
        client = Client(world.dial(protocol=speaks(world))[0])
        await client.caller.send(b"GET")
        await trio.testing.wait_all_tasks_blocked()
        world.toys[0].do_echo("welcome")
        await trio.testing.wait_all_tasks_blocked()
        assert client.caller.end.receive(100) is None
        data = bytes(client.state.send(hello()))
        await client.caller.send(data[3:])
        assert await client.receive() == ACCEPTED
        assert await client.receive_bytes(8) == b"welcome\n"


async def test_a_rejected_request_is_one_for_clients_too(world: World, autojump_clock: MockClock) -> None:
    async with toy_server(world=world):
        client = Client(world.dial(protocol=speaks(world))[0])
        await client.send(hello(subprotocols=["mqtt"]))
        event = await client.receive()
        assert isinstance(event, RejectConnection)
        assert event.status_code == 400


def test_a_frame_has_a_part_of_a_long_piece() -> None:
    """A connection encodes no more ahead than that, however much waits for it."""
    assert _join_for_frame([b"a", bytes(PAYLOAD_BYTES), b"b"]) == (b"a" + bytes(PAYLOAD_BYTES - 1), PAYLOAD_BYTES)
    assert _join_for_frame([b"a", b"b"]) == (b"ab", 2)
