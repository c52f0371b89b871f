"""Connections that the pump reads from: each ends once, and none because the server was slow."""

from collections.abc import Awaitable
from contextlib import ExitStack

import pytest
import trio
import trio.testing
from tests.broker.toys import Lines, Toy, World, toy_server
from tests.net.test_event_pump import ask, connect, receive_exactly, send
from trio.testing import MockClock

from martlet.contracts import WebSocket
from martlet.net.reader import EVENTS_A_TURN


@pytest.fixture
def world() -> World:
    return World()


async def test_a_client_is_not_silent_while_its_requests_are_handled_in_slices(
    world: World, mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, count = Toy.handle, 3 * EVENTS_A_TURN
    world.connect = lambda: Lines(10.0)
    async with toy_server(protocol=world.protocol(), world=world):
        with connect(world) as client:
            assert await ask(client, b"echo before") == b"before"

            def slow(toy: Toy, event: str) -> Awaitable[None] | None:
                mock_clock.jump(0.2)
                if len(world.handled) == count:
                    send(client, b"echo y\n")
                return handle(toy, event)

            monkeypatch.setattr(Toy, "handle", slow)
            send(client, b"echo x\n" * count)
            assert await receive_exactly(client, 2 * count + 2) == b"x\n" * count + b"y\n"
            assert world.reasons == []


async def test_a_client_is_not_silent_while_it_waits_for_its_turn(world: World, mock_clock: MockClock) -> None:
    world.connect = lambda: Lines(10.0)
    async with toy_server(protocol=world.protocol(websocket=WebSocket(("toy",))), world=world):
        turns = world.server._reader.turns
        limit, turns._limit, turns._turns_left = turns._limit, 0, 0
        with connect(world) as client:
            send(client, b"GET / HTTP/1.1\r\n")
            while not world.server._reader._in_line:
                await trio.lowlevel.checkpoint()
            mock_clock.jump(11)
            for _ in range(10):  # those in line keep the server from coming to rest
                await trio.lowlevel.checkpoint()
            assert (world.reasons, len(world.toys)) == ([], 1)
            turns._limit = limit
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(6)
            assert await receive_exactly(client, 1) == b""
        await trio.testing.wait_all_tasks_blocked()
        assert world.reasons == ["silent for too long"], "its turn came, and it said no more"


@pytest.mark.parametrize("attempt", range(8))  # the order of tasks in a turn of the event loop is random
async def test_a_request_that_ends_in_the_turn_in_which_the_server_stops_leaves_no_peer(
    world: World, attempt: int
) -> None:
    gate = trio.Event()

    async def wait(toy: Toy, text: str) -> None:
        await gate.wait()

    world.work = wait
    with ExitStack() as clients:
        async with toy_server(protocol=world.protocol(), world=world):
            for _ in range(3):
                client = clients.enter_context(connect(world))
                assert await ask(client, b"echo here") == b"here"
                send(client, b"long x\n")
            while len(world.handled) < 6:
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked()
            gate.set()
        assert [len(toy.ended) for toy in world.toys] == [1] * 3
        assert world.statistic("connections") == 0


async def test_peers_that_close_each_other_when_the_server_stops_end_once(world: World) -> None:
    def close_others(toy: Toy) -> None:
        for other in world.toys:
            if other is not toy:
                other.peer.close("with the others")

    world.on_closed = close_others
    with ExitStack() as clients:
        async with toy_server(protocol=world.protocol(), world=world):
            for _ in range(3):
                assert await ask(clients.enter_context(connect(world)), b"echo here") == b"here"
        assert [len(toy.ended) for toy in world.toys] == [1] * 3


async def test_the_rest_of_a_request_that_closes_its_connection_is_awaited(world: World) -> None:
    done: list[str] = []

    async def rest(text: str) -> None:
        done.append(text)

    def close(toy: Toy, text: str) -> Awaitable[None]:
        toy.peer.close("it said so")
        return rest(text)

    world.work = close
    async with toy_server(protocol=world.protocol(), world=world):
        with connect(world) as client:
            send(client, b"long x\n")
            assert await receive_exactly(client, 1) == b""
        await trio.testing.wait_all_tasks_blocked()
        assert (done, world.reasons) == (["x"], ["it said so"])


async def test_a_connection_that_cannot_begin_ends_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(lines: Lines) -> float:
        raise RuntimeError("no deadline")

    async with toy_server(protocol=world.protocol(), world=world):
        with monkeypatch.context() as broken, connect(world) as client:
            broken.setattr(Lines, "deadline", fail)
            assert await receive_exactly(client, 1) == b""
        with connect(world) as client:
            assert await ask(client, b"echo here") == b"here"
        assert world.reasons[:1] == ["RuntimeError: no deadline"]
