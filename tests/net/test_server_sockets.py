"""The server over real loopback sockets: listening, TLS on the same port, resets, and too few descriptors."""

import gc
import os
import resource
import shutil
import socket
import ssl
import struct
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import cast

import pytest
import trio
import trio.testing
import trustme
from tests.broker.toys import Lines, World, toy_server

from martlet.access import Authentication
from martlet.app.startup import warn_of_open_ports
from martlet.errors import AddressUnavailable, ConfigError
from martlet.net.opening.accepted import NetworkLookup
from martlet.net.server import listening_sockets
from martlet.settings import ServerConfig

MIB = 1 << 20


@dataclass(frozen=True)
class Certificates:
    server: ssl.SSLContext
    client: ssl.SSLContext


@pytest.fixture(scope="module")
def certificates() -> Certificates:
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return Certificates(server, client)


@pytest.fixture
def world() -> World:
    return World()


async def dial(world: World) -> trio.SocketStream:
    host, port = world.addresses[0].rsplit(":", 1)
    return await trio.open_tcp_stream(host, int(port))


async def dial_tls(world: World, certificates: Certificates) -> trio.SSLStream[trio.SocketStream]:
    stream = trio.SSLStream(await dial(world), certificates.client, server_hostname="localhost", https_compatible=True)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(trio.aclose_forcefully, stream)
        await stream.do_handshake()
        undo.pop_all()
    return stream


async def receive_exactly(stream: trio.abc.ReceiveStream, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (more := await stream.receive_some(size - len(data))):
        data += more
    return bytes(data)


async def wait_connections(world: World, count: int) -> None:
    while world.statistic("connections") != count:
        await trio.lowlevel.checkpoint()


async def test_a_loopback_peer_is_served(world: World) -> None:
    async with toy_server(protocol=world.protocol(), world=world):
        async with await dial(world) as stream:
            await stream.send_all(b"echo a\necho b\n")
            assert await receive_exactly(stream, 4) == b"a\nb\n"
            assert world.toys[0].peer.address == f"127.0.0.1:{stream.socket.getsockname()[1]}"
            assert world.toys[0].peer.host[:4] == bytes([127, 0, 0, 1])
        await wait_connections(world, 0)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_an_answer_waits_for_no_acknowledgement_of_the_one_before(
    world: World, certificates: Certificates, tls: bool
) -> None:
    """With Nagle's algorithm, a client that acknowledges late would get its second small answer after 40 ms."""
    async with (
        toy_server(protocol=world.protocol(tls=lambda: certificates.server), world=world),
        await (dial_tls(world, certificates) if tls else dial(world)) as stream,
    ):
        await stream.send_all(b"echo a\n")
        assert await receive_exactly(stream, 2) == b"a\n"
        client = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
        sockets = [each for each in gc.get_objects() if isinstance(each, socket.socket)]
        (its,) = [each for each in sockets if peer_of(each) == client.socket.getsockname()]
        assert its.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert its.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)  # else a lost client would stay forever


def peer_of(connected: socket.socket) -> object:
    try:
        return connected.getpeername()
    except OSError:  # closed, or a listener
        return None


async def test_many_small_answers_leave_in_few_sends(world: World) -> None:
    """More pieces than one sendmsg takes (IOV_MAX is 1024) and more bytes than are worth joining."""
    async with toy_server(protocol=world.protocol(), world=world), await dial(world) as stream:
        await stream.send_all(b"parts 30000\n")
        wanted = b"".join(b"%d " % i for i in range(30000)) + b"\n"
        assert await receive_exactly(stream, len(wanted)) == wanted


async def test_a_peer_that_does_not_read_is_paused_and_loses_nothing(world: World) -> None:
    config = ServerConfig(unsent_bytes_max=65536)
    async with toy_server(config, world.protocol(), world), await dial(world) as slow, await dial(world) as polite:
        await slow.send_all(b"fill 100000\n" * 300)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(world.handled) < 300
        assert world.server.pending.unsent_bytes < 65536 + 100000
        await polite.send_all(b"echo here\n")
        assert await receive_exactly(polite, 5) == b"here\n"
        assert len(await receive_exactly(slow, 300 * 100000)) == 300 * 100000


async def test_a_reset_while_answers_wait_harms_nobody(world: World) -> None:
    async with toy_server(protocol=world.protocol(), world=world):
        for _ in range(20):
            stream = await dial(world)
            await stream.send_all(b"fill 10000000\n")
            while not world.server.pending.unsent_bytes:
                await trio.lowlevel.checkpoint()
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await stream.aclose()
            await wait_connections(world, 0)
            assert world.server.pending.unsent_bytes == 0
        async with await dial(world) as other:
            await other.send_all(b"echo alive\n")
            assert await receive_exactly(other, 6) == b"alive\n"


async def test_a_half_closed_socket_gets_its_answers(world: World) -> None:
    async with toy_server(protocol=world.protocol(), world=world), await dial(world) as stream:
        await stream.send_all(b"hold 5 stored\nfill 3000000\n")
        await stream.send_eof()
        while not world.server.pending.held:
            await trio.lowlevel.checkpoint()
        world.store.flush_to(5)
        assert len(await receive_exactly(stream, 3000007)) == 3000007
        assert await stream.receive_some() == b""


async def test_connections_over_the_limit_are_closed_at_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async with toy_server(ServerConfig(connections_max=2), world.protocol(), world):
        first, second = await dial(world), await dial(world)
        await wait_connections(world, 2)
        third = await dial(world)
        assert await third.receive_some() == b""
        await first.aclose()
        await wait_connections(world, 1)
        fourth = await dial(world)
        await fourth.send_all(b"echo in\n")
        assert await receive_exactly(fourth, 3) == b"in\n"
        for stream in (second, third, fourth):
            await stream.aclose()
        assert world.statistic("turned_away") == 1
    assert "server.connections_max is 2" in caplog.text


async def test_an_address_with_all_connections_gives_one_up_for_another_address(world: World) -> None:
    async with toy_server(ServerConfig(connections_max=3), world.protocol(), world):
        crowd = [await dial(world) for _ in range(3)]
        await wait_connections(world, 3)
        host, port = world.addresses[0].rsplit(":", 1)
        other = await trio.open_tcp_stream(host, int(port), local_address="127.0.0.2")
        await other.send_all(b"echo in\n")
        assert await receive_exactly(other, 3) == b"in\n"
        assert await crowd[2].receive_some() == b"", "the newest"
        await crowd[0].send_all(b"echo still in\n")
        assert await receive_exactly(crowd[0], 9) == b"still in\n"
        assert (world.statistic("gave_way"), world.statistic("turned_away")) == (1, 0)
        assert world.statistic("connections_address") == 2
        for stream in (*crowd, other):
            await stream.aclose()


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_accepting_survives_a_lack_of_descriptors(
    world: World, few_descriptors: None, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with toy_server(protocol=world.protocol(), world=world):
        waiting = socket.socket()
        waiting.setblocking(False)
        gc.collect()  # what it closed later could be accepted with
        lowest = os.dup(waiting.fileno())
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        host, port = world.addresses[0].rsplit(":", 1)
        with pytest.raises(BlockingIOError):
            waiting.connect((host, int(port)))
        while "cannot accept" not in caplog.text:
            await trio.lowlevel.checkpoint()
        assert world.statistic("connections") == 0
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        async with trio.SocketStream(trio.socket.from_stdlib_socket(waiting)) as stream:
            await stream.send_all(b"echo in\n")
            assert await receive_exactly(stream, 3) == b"in\n"
    assert caplog.text.count("cannot accept") == 1, "one line, however often it was tried"


async def test_a_port_in_use_is_an_error_that_names_it(world: World) -> None:
    async with toy_server(protocol=world.protocol(), world=world):
        taken = world.protocol()
        with pytest.raises(AddressUnavailable, match="toy cannot listen on"):
            world.server.bind(type(taken)("toy", world.addresses[0], taken.connect, taken.handle))


def has_ipv6() -> bool:
    """Whether this machine has the IPv6 loopback address; some containers do not."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


async def test_ipv6_is_served_or_refused_by_name_where_the_machine_has_none(world: World) -> None:
    made = world.protocol()
    protocol = type(made)("toy", "[::1]:0", made.connect, made.handle)
    if not has_ipv6():
        async with toy_server(world=world):
            with pytest.raises((AddressUnavailable, ConfigError), match=r"toy cannot listen on '\[::1\]:0'"):
                world.server.bind(protocol)
        return
    async with toy_server(protocol=protocol, world=world):
        port = world.server._listeners[0].getsockname()[1]
        async with await trio.open_tcp_stream("::1", port) as stream:
            await stream.send_all(b"echo six\n")
            assert await receive_exactly(stream, 4) == b"six\n"
            assert world.toys[0].peer.address == f"[::1]:{stream.socket.getsockname()[1]}"
            assert len(world.toys[0].peer.host) == 20


async def test_a_peer_is_known_by_its_ipv6_address(world: World) -> None:
    """Also on a machine without IPv6: the connection is IPv4, but what accept says of it is not."""
    async with toy_server(world=world):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            caller = socket.create_connection(listener.getsockname())
            name = "fe80::7%lo", 1234, 0, 1
            world.server._sockets.accept(NetworkLookup(world.protocol()), listener.accept()[0], name)
        async with trio.SocketStream(trio.socket.from_stdlib_socket(caller)) as stream:
            await stream.send_all(b"echo six\n")
            assert await receive_exactly(stream, 4) == b"six\n"
            assert world.toys[0].peer.address == "[fe80::7%lo]:1234"
            assert world.toys[0].peer.host == socket.inet_pton(socket.AF_INET6, "fe80::7") + (1234).to_bytes(4, "big")


# TLS


async def test_tls_and_plain_share_a_port(world: World, certificates: Certificates) -> None:
    protocol = world.protocol(tls=lambda: certificates.server)
    async with toy_server(protocol=protocol, world=world), await dial(world) as plain:
        secret = await dial_tls(world, certificates)
        for stream in (plain, secret):
            await stream.send_all(b"echo hello\n")
            assert await receive_exactly(stream, 6) == b"hello\n"
        await secret.aclose()


async def test_large_answers_pass_tls_whole_and_in_order(world: World, certificates: Certificates) -> None:
    async with toy_server(protocol=world.protocol(tls=lambda: certificates.server), world=world):
        secret = await dial_tls(world, certificates)
        await secret.send_all(b"parts 100000\n")
        wanted = b"".join(b"%d " % i for i in range(100000)) + b"\n"
        assert await receive_exactly(secret, len(wanted)) == wanted
        await secret.send_all(b"bye now\n")
        assert await receive_exactly(secret, 4) == b"now\n"
        await secret.aclose()
        await wait_connections(world, 0)


async def test_held_answers_and_pushes_pass_tls(world: World, certificates: Certificates) -> None:
    async with toy_server(protocol=world.protocol(tls=lambda: certificates.server), world=world):
        secret = await dial_tls(world, certificates)
        await secret.send_all(b"hold 5 stored\n")
        while not world.server.pending.held:
            await trio.lowlevel.checkpoint()
        world.store.flush_to(5)
        assert await receive_exactly(secret, 7) == b"stored\n"
        await secret.send_all(b"push 100\n")
        assert len(await receive_exactly(secret, 100_000)) == 100_000
        await secret.aclose()


async def test_a_port_that_requires_tls_refuses_plain_text(
    world: World, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    protocol = world.protocol(tls=lambda: certificates.server, tls_required=True)
    async with toy_server(protocol=protocol, world=world):
        async with await dial(world) as plain:
            await plain.send_all(b"echo hello\n")
            assert await receive_exactly(plain, 100) == b"error client speaks plain text; this port requires TLS\n"
        secret = await dial_tls(world, certificates)
        await secret.send_all(b"echo hello\n")
        assert await receive_exactly(secret, 6) == b"hello\n"
        await secret.aclose()
    assert world.handled == ["echo hello"]
    assert len(caplog.records) == 1


async def test_a_port_without_certificates_takes_a_hello_for_plain_text(world: World) -> None:
    async with toy_server(protocol=world.protocol(), world=world), await dial(world) as stream:
        await stream.send_all(b"\x16" * 2000)
        assert await receive_exactly(stream, 1000) == b"error a line is over 1000 bytes\n"


@pytest.mark.parametrize(
    "garbage", [b"\x16" * 100, b"\x16\x03\x01\x00\x05hello", b"\x16\x03\x01\xff\xff" + b"x" * 70000]
)
async def test_a_garbage_handshake_ends_that_peer_without_noise(
    world: World, certificates: Certificates, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with toy_server(protocol=world.protocol(tls=lambda: certificates.server), world=world):
        async with await dial(world) as stream:
            try:
                await stream.send_all(garbage)
                while await stream.receive_some():
                    pass
            except trio.BrokenResourceError:
                pass
        await wait_connections(world, 0)
        assert "SSL" in world.reasons[0]
        secret = await dial_tls(world, certificates)
        await secret.send_all(b"echo alive\n")
        assert await receive_exactly(secret, 6) == b"alive\n"
        await secret.aclose()
    assert not caplog.records


async def test_a_handshake_that_never_ends_costs_no_time_and_ends_at_the_deadline(
    world: World, certificates: Certificates, autojump_clock: trio.testing.MockClock
) -> None:
    """What the farewell wants to say cannot be said before the handshake: it waits, it does not spin."""
    world.connect = lambda: Lines(30)
    async with toy_server(protocol=world.protocol(tls=lambda: certificates.server), world=world):
        caller, link = world.dial(protocol=world.protocol(tls=lambda: certificates.server))
        await caller.send(b"\x16\x03\x01")
        await trio.sleep(31)
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        assert trio.lowlevel.current_statistics().tasks_runnable == 0
        await trio.sleep(10)
        assert link.far.closed
        assert world.statistic("connections") == 0


async def test_certificates_are_asked_for_at_each_new_peer(world: World, certificates: Certificates) -> None:
    other = trustme.CA()
    renewed = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    other.issue_cert("localhost").configure_cert(renewed)
    now = [certificates.server]
    async with toy_server(protocol=world.protocol(tls=lambda: now[0]), world=world):
        old = await dial_tls(world, certificates)
        now[0] = renewed
        with pytest.raises(trio.BrokenResourceError):
            await dial_tls(world, certificates)
        client = ssl.create_default_context()
        other.configure_trust(client)
        new = await dial_tls(world, Certificates(renewed, client))
        for stream in (old, new):
            await stream.send_all(b"echo hello\n")
            assert await receive_exactly(stream, 6) == b"hello\n"
            await stream.aclose()


async def test_renegotiation_is_refused(world: World, certificates: Certificates) -> None:
    """A request of TLS 1.2 to negotiate again is refused, and affects only its own connection."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.fail("openssl is not installed; on Debian: apt-get install openssl")
    async with toy_server(protocol=world.protocol(tls=lambda: certificates.server), world=world):
        command = [openssl, "s_client", "-connect", world.addresses[0], "-tls1_2"]
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        assert process.stdin is not None
        async with process.stdin:
            await process.stdin.send_all(b"echo one\n")
            while "echo one" not in world.handled:
                await trio.lowlevel.checkpoint()
            await process.stdin.send_all(b"R\n")
            await wait_connections(world, 0)
        await process.wait()
        async with await dial(world) as plain:
            await plain.send_all(b"echo alive\n")
            assert await receive_exactly(plain, 6) == b"alive\n"
        assert world.handled == ["echo one", "echo alive"]


async def test_a_protocol_listens_on_all_its_addresses(world: World) -> None:
    made = world.protocol()
    protocol = type(made)("toy", "127.0.0.1:0, 127.0.0.2:0", made.connect, made.handle, bound=made.bound)
    async with toy_server(protocol=protocol, world=world):
        names = [each.getsockname()[:2] for each in world.server._listeners]
        assert [host for host, _ in names] == ["127.0.0.1", "127.0.0.2"]
        assert world.addresses[-1] == f"127.0.0.1:{names[0][1]}"
        for host, port in names:
            async with await trio.open_tcp_stream(host, port) as stream:
                await stream.send_all(b"echo hi\n")
                assert await receive_exactly(stream, 3) == b"hi\n"


async def test_if_one_address_is_taken_none_stays_bound(world: World) -> None:
    async with toy_server(protocol=world.protocol(), world=world):
        made, count = world.protocol(), len(world.server._listeners)
        with pytest.raises(AddressUnavailable, match=r"toy cannot listen on '127\.0\.0\.2:0, "):
            world.server.bind(type(made)("toy", f"127.0.0.2:0, {world.addresses[0]}", made.connect, made.handle))
        assert len(world.server._listeners) == count


async def test_every_address_of_ipv6_takes_clients_of_ipv4_too(world: World) -> None:
    made = world.protocol()
    if not has_ipv6():
        return
    async with toy_server(protocol=type(made)("toy", "[::]:0", made.connect, made.handle), world=world):
        port = world.server._listeners[0].getsockname()[1]
        for host in "127.0.0.1", "::1":
            async with await trio.open_tcp_stream(host, port) as stream:
                await stream.send_all(b"echo hi\n")
                assert await receive_exactly(stream, 3) == b"hi\n"
                address = world.toys[-1].peer.address
                assert address.startswith("127.0.0.1:" if host == "127.0.0.1" else "[::1]:")


async def test_each_family_may_have_a_socket_of_its_own(world: World) -> None:
    if not has_ipv6():
        return
    (found,) = listening_sockets("[::]:0")
    port = found.getsockname()[1]
    found.close()
    both = listening_sockets(f"0.0.0.0:{port}, [::]:{port}")
    assert [each.getsockname()[:2] for each in both] == [("0.0.0.0", port), ("::", port)]
    for each in both:
        each.close()


class Listening:
    """A listening socket, as far as its address goes."""

    def __init__(self, host: str) -> None:
        self._host = host

    def getsockname(self) -> tuple[str, int]:
        return self._host, 1883


@pytest.mark.parametrize(
    ("hosts", "open_to"),
    [
        (["127.0.0.1"], ""),
        (["::1", "127.0.0.2"], ""),
        (["0.0.0.0"], "0.0.0.0:1883"),
        (["127.0.0.1", "10.0.0.5", "::"], "10.0.0.5:1883 and [::]:1883"),
    ],
)
def test_a_start_warns_of_ports_that_anybody_can_use(
    world: World, caplog: pytest.LogCaptureFixture, hosts: list[str], open_to: str
) -> None:
    bound = {world.protocol(): [cast(socket.socket, Listening(host)) for host in hosts]}
    authentication = Authentication(b"key")
    warn_of_open_ports(authentication, bound)
    found = [each for each in caplog.messages if "is open to the network, and no plugin checks who connects" in each]
    assert found == ([caplog.messages[0]] if open_to else [])
    assert not open_to or found[0].startswith(f"toy at {open_to} is open to the network")
    caplog.clear()
    authentication.authenticators = (lambda credentials, origin: None,)
    warn_of_open_ports(authentication, bound)
    assert caplog.messages == []


def test_a_port_that_requires_a_client_certificate_is_not_open(world: World, caplog: pytest.LogCaptureFixture) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    made = world.protocol()
    for required in (True, False):
        protocol = type(made)("toy", "0.0.0.0:0", made.connect, made.handle, lambda: context, required)
        warn_of_open_ports(Authentication(b"key"), {protocol: [cast(socket.socket, Listening("0.0.0.0"))]})
        assert len(caplog.messages) == (0 if required else 1)
