"""Sockets that linger: until the client closes, for a bounded time and a bounded number of bytes."""

import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from martlet.net import lingering
from martlet.net.lingering import LINGER_S, SOCKETS_A_TURN, TURN_BYTES, TURN_S, LingeringSockets

KIB = bytes(1024)


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def running() -> AsyncIterator[LingeringSockets]:
    sockets = LingeringSockets()
    async with trio.open_nursery() as nursery:
        await nursery.start(sockets.run)
        yield sockets
        nursery.cancel_scope.cancel()


def add_one(sockets: LingeringSockets, clients: ExitStack) -> tuple[socket.socket, int]:
    """Return the client of a new lingering socket, and the descriptor of the latter."""
    client, server = socket.socketpair()
    clients.enter_context(client)
    client.setblocking(False)
    server.setblocking(False)
    server.shutdown(socket.SHUT_WR)
    fd = server.detach()
    sockets.add(fd)
    return client, fd


def is_open(fd: int) -> bool:
    with suppress(OSError):
        os.fstat(fd)
        return True
    return False


async def flood(client: socket.socket) -> int:
    """Send until the server closes; return the number of bytes."""
    sent = 0
    try:
        while True:
            await trio.lowlevel.wait_writable(client)
            sent += client.send(KIB * 64)
    except (BrokenPipeError, ConnectionResetError):
        return sent


async def test_a_client_that_writes_reads_the_end_and_closes(clients: ExitStack, autojump_clock: MockClock) -> None:
    async with running() as sockets:
        client, fd = add_one(sockets, clients)
        for _ in range(1000):
            await trio.lowlevel.wait_writable(client)
            client.send(KIB)
        assert client.recv(1) == b""
        assert (len(sockets), is_open(fd)) == (1, True)
        client.close()
        await sockets.wait_none()
        assert (len(sockets), is_open(fd)) == (0, False)
        assert trio.current_time() < LINGER_S


async def test_a_client_that_does_not_close_has_a_few_seconds(clients: ExitStack, autojump_clock: MockClock) -> None:
    async with running() as sockets:
        start = trio.current_time()
        fds = [add_one(sockets, clients)[1]]
        await trio.sleep(LINGER_S / 2)
        fds.append(add_one(sockets, clients)[1])
        await trio.sleep_until(start + LINGER_S - 2 * TURN_S)
        assert [is_open(fd) for fd in fds] == [True, True]
        await trio.sleep(4 * TURN_S)
        assert [is_open(fd) for fd in fds] == [False, True], "each has its own"
        await sockets.wait_none()
        assert trio.current_time() < start + 1.5 * LINGER_S + 4 * TURN_S


async def test_a_client_that_writes_slowly_has_no_more_time(clients: ExitStack, autojump_clock: MockClock) -> None:
    async with running() as sockets:
        start = trio.current_time()
        client, _ = add_one(sockets, clients)
        with suppress(BrokenPipeError):
            while trio.current_time() - start < 2 * LINGER_S:
                client.send(b"x")
                await trio.sleep(LINGER_S / 50)
        assert trio.current_time() - start < LINGER_S + LINGER_S / 25


async def test_a_flood_is_bounded(
    clients: ExitStack, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 8 << 20
    monkeypatch.setattr(lingering, "DISCARD_BYTES_MAX", limit)
    async with running() as sockets:
        start = trio.current_time()
        client, fd = add_one(sockets, clients)
        sent = await flood(client)
        in_flight = client.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert limit <= sent <= limit + TURN_BYTES + in_flight
        assert not is_open(fd)
        seconds = trio.current_time() - start
        assert seconds < LINGER_S
        assert limit / seconds <= TURN_BYTES / TURN_S * 1.01, "others have their turns"


async def test_several_floods_share_what_is_discarded_in_a_turn(
    clients: ExitStack, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lingering, "DISCARD_BYTES_MAX", 1 << 20)
    count = 2 * SOCKETS_A_TURN
    async with running() as sockets:
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(flood, add_one(sockets, clients)[0])
        turns = round((trio.current_time() - start) / TURN_S)
        assert turns >= count * lingering.DISCARD_BYTES_MAX // TURN_BYTES


@pytest.mark.usefixtures("many_descriptors")
async def test_a_thousand_sockets_need_one_task(clients: ExitStack, autojump_clock: MockClock) -> None:
    count = 1000
    async with running() as sockets:
        tasks = trio.lowlevel.current_statistics().tasks_living
        pairs = [add_one(sockets, clients) for _ in range(count)]
        await trio.testing.wait_all_tasks_blocked()
        assert (trio.lowlevel.current_statistics().tasks_living, len(sockets)) == (tasks, count)
        for client, _ in pairs[::2]:
            client.close()
        await trio.sleep(LINGER_S / 2)
        assert [is_open(fd) for _, fd in pairs] == [False, True] * (count // 2)
        await sockets.wait_none()
        assert not any(is_open(fd) for _, fd in pairs)


async def test_the_oldest_socket_gives_way(clients: ExitStack, autojump_clock: MockClock) -> None:
    async with running() as sockets:
        fds = [add_one(sockets, clients)[1] for _ in range(3)]
        assert sockets.give_way()
        assert [is_open(fd) for fd in fds] == [False, True, True]
        assert sockets.give_way()
        assert sockets.give_way()
        assert not sockets.give_way()
        await trio.sleep(2 * LINGER_S)
        _, fd = add_one(sockets, clients)
        await trio.sleep(2 * LINGER_S)
        assert not is_open(fd)


async def test_one_that_gives_way_before_the_task_has_seen_it_does_no_harm(
    clients: ExitStack, autojump_clock: MockClock
) -> None:
    async with running() as sockets:
        await trio.testing.wait_all_tasks_blocked()
        add_one(sockets, clients)
        assert sockets.give_way()
        await trio.testing.wait_all_tasks_blocked()
        _, fd = add_one(sockets, clients)
        await sockets.wait_none()
        assert not is_open(fd)


async def test_a_reset_ends_it(clients: ExitStack, autojump_clock: MockClock) -> None:
    async with running() as sockets:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            server, _ = listener.accept()
        server.setblocking(False)
        fd = server.detach()
        sockets.add(fd)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        await sockets.wait_none()
        assert not is_open(fd)


async def test_all_are_closed_at_the_stop(clients: ExitStack, autojump_clock: MockClock) -> None:
    async with running() as sockets:
        fds = [add_one(sockets, clients)[1] for _ in range(3)]
    fds.append(add_one(sockets, clients)[1])
    assert not any(is_open(fd) for fd in fds)
    assert trio.current_time() < LINGER_S
    assert len(sockets) == 0
