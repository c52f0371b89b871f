"""The pump reads from all plain sockets in rounds, and lets other tasks run in between."""

import fcntl
import select
import socket
import sys
import termios
from collections.abc import Awaitable, Callable
from contextlib import closing
from types import SimpleNamespace
from typing import cast, final

import pytest
import trio
import trio.testing
from tests.broker.toys import Lines, Toy, World, answer_later, toy_server
from trio.testing import MockClock

from martlet.net import event_pump, reader
from martlet.net.event_pump import TURN_S, EventPump, PumpReading, trio_epoll_fd
from martlet.settings import ServerConfig


@pytest.fixture
def world() -> World:
    return World()


def connect(world: World) -> socket.socket:
    host, port = world.addresses[0].rsplit(":", 1)
    return socket.create_connection((host, int(port)))


def send(client: socket.socket, data: bytes) -> None:
    """Send *data*, and return once it is in the server's socket: on a busy machine the kernel delivers it later."""
    client.sendall(data)
    while int.from_bytes(fcntl.ioctl(client, termios.TIOCOUTQ, bytes(4)), sys.byteorder):
        pass


async def ask(client: socket.socket, line: bytes) -> bytes:
    """Send *line* and return the next line."""
    send(client, line + b"\n")
    return await receive_line(client)


async def receive_line(client: socket.socket) -> bytes:
    client.setblocking(False)
    data = b""
    while not data.endswith(b"\n"):
        await trio.lowlevel.wait_readable(client)
        more = client.recv(65536)
        assert more, "the server closed"
        data += more
    client.setblocking(True)
    return data[:-1]


async def receive_exactly(client: socket.socket, size: int) -> bytes:
    """Return the next *size* bytes, fewer if the server closes before."""
    client.setblocking(False)
    data = bytearray()
    while len(data) < size:
        await trio.lowlevel.wait_readable(client)
        more = client.recv(size - len(data))
        if not more:
            break
        data += more
    client.setblocking(True)
    return bytes(data)


def pump_of(world: World) -> EventPump[PumpReading]:
    pump = world.server._reader.pump
    assert pump is not None
    return pump


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which a whole turn passes between two readings."""
    seconds = [0.0]

    def perf_counter() -> float:
        seconds[0] += TURN_S
        return seconds[0]

    monkeypatch.setattr(event_pump, "time", SimpleNamespace(perf_counter=perf_counter))


@pytest.fixture
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which no turn ever ends."""
    monkeypatch.setattr(event_pump, "time", SimpleNamespace(perf_counter=lambda: 0.0))


async def test_all_sockets_that_are_ready_share_one_commit(world: World, still_clock: None) -> None:
    async with toy_server(protocol=world.protocol(), world=world):
        clients = [connect(world) for _ in range(20)]
        for client in clients:
            assert await ask(client, b"echo here") == b"here"
        commits = world.store.commits
        for client in clients:
            send(client, b"hold 0 stored\n")
        assert [await receive_line(client) for client in clients] == [b"stored"] * 20
        assert world.store.commits == commits + 1
        for client in clients:
            client.close()


async def test_a_busy_socket_starves_neither_tasks_nor_other_sockets(
    world: World, slow_clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read takes a whole turn and gets one line: after each other tasks have their turn, then the next socket."""
    monkeypatch.setattr(reader, "RECEIVE_BYTES", len(b"echo b\n"))
    turns: list[str] = []

    async def tick() -> None:
        while True:
            turns.append("task")
            await trio.lowlevel.checkpoint()

    world.handled = turns
    async with toy_server(protocol=world.protocol(), world=world):
        with connect(world) as busy, connect(world) as other:
            for client in (busy, other):
                assert await ask(client, b"echo x") == b"x"
            turns.clear()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tick)
                send(busy, b"echo a\n" * 50)
                send(other, b"echo b\n")
                while turns.count("echo a") < 50:
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
    handled = [turn for turn in turns if turn != "task"]
    assert handled.index("echo b") <= 2
    places = [place for place, turn in enumerate(turns) if turn != "task"]
    # trio runs the tasks of a turn in any order, so two reads may follow each other, but never three.
    assert all(third - first > 2 for first, third in zip(places, places[2:], strict=False)), turns


@final
class Turns(trio.abc.Instrument):
    """Counts per turn of the event loop how many requests the server of *world* handled."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen = len(world.handled)
        self.counts: list[int] = []

    def before_io_wait(self, timeout: float) -> None:
        self.counts.append(len(self._world.handled) - self._seen)
        self._seen = len(self._world.handled)


@pytest.mark.parametrize("request_number", [1, 2])
async def test_first_and_later_requests_of_many_sockets_are_spread_over_turns(
    world: World, slow_clock: None, request_number: int
) -> None:
    """Each look at the clock finds that a turn is over: so one request a turn, however many sockets are ready."""
    async with toy_server(protocol=world.protocol(), world=world):
        clients = [connect(world) for _ in range(50)]
        while world.statistic("connections") < 50:
            await trio.lowlevel.checkpoint()
        if request_number == 2:
            for client in clients:
                assert await ask(client, b"echo before") == b"before"
        turns = Turns(world)
        trio.lowlevel.add_instrument(turns)
        for client in clients:
            send(client, b"echo a\n")
        assert [await receive_line(client) for client in clients] == [b"a"] * 50
        trio.lowlevel.remove_instrument(turns)
        assert (sum(turns.counts), max(turns.counts)) == (50, 1)
        for client in clients:
            client.close()


async def test_sockets_that_a_round_did_not_reach_are_first_in_the_next(world: World, slow_clock: None) -> None:
    async with toy_server(protocol=world.protocol(), world=world):
        clients = [connect(world) for _ in range(20)]
        for number, client in enumerate(clients):
            assert await ask(client, b"echo %d" % number) == b"%d" % number
        world.handled.clear()
        for number, client in enumerate(clients):
            send(client, b"hold 0 %d\n" % number)
        assert await receive_line(clients[0]) == b"0"
        clients[0].sendall(b"hold 0 again\n")
        assert [await receive_line(client) for client in clients[1:]] == [b"%d" % n for n in range(1, 20)]
        assert await receive_line(clients[0]) == b"again"
        assert sorted(world.handled[:-1]) == sorted(f"hold 0 {number}" for number in range(20))
        assert world.handled[-1] == "hold 0 again"
        assert world.store.commits == 21
        for client in clients:
            client.close()


class Waits:
    """The epoll of the pump, which counts how often it waits."""

    def __init__(self, pump: EventPump[PumpReading], before: Callable[[], None] = lambda: None) -> None:
        self._all = pump._all
        self._before = before
        self.count = 0
        pump._all = cast("select.epoll", self)

    def poll(self, timeout: float, count: int) -> list[tuple[int, int]]:
        if timeout:
            self.count += 1
            self._before()
        return self._all.poll(timeout, count)

    def register(self, fd: int, events: int) -> None:
        self._all.register(fd, events)

    def unregister(self, fd: int) -> None:
        self._all.unregister(fd)

    def close(self) -> None:
        self._all.close()


@pytest.mark.parametrize(("seconds", "waits"), [(TURN_S / 2, False), (60.0, True)])
async def test_the_pump_does_not_wait_when_a_deadline_is_near(
    world: World, mock_clock: MockClock, seconds: float, waits: bool
) -> None:
    async with toy_server(protocol=world.protocol(), world=world):
        with connect(world) as client:
            assert await ask(client, b"echo a") == b"a"
            counted = Waits(pump_of(world))
            with trio.move_on_after(seconds):
                # A request may arrive before the pump has to wait for it.
                for _ in range(1000 if waits else 50):
                    assert await ask(client, b"echo b") == b"b"
                    if counted.count:
                        break
            assert (counted.count > 0) == waits


async def test_a_long_round_before_work_of_trio_does_not_stop_the_pump(world: World) -> None:
    async with toy_server(protocol=world.protocol(), world=world):
        with connect(world) as client:
            assert await ask(client, b"echo a") == b"a"
            pump = pump_of(world)
            pump._ready = [(pump._trio_fd, select.EPOLLIN)]  # the time was over after the sockets before it
            with trio.fail_after(60):
                assert await ask(client, b"echo b") == b"b"
            assert not pump._ready


@final
class Requests(list[str]):
    """Requests that were handled; `one_more` is set at each."""

    one_more = trio.Event()

    def append(self, request: str) -> None:
        super().append(request)
        self.one_more.set()


async def test_the_pump_does_not_wait_while_a_task_can_run(world: World) -> None:
    """A task takes several turns, as the flusher does. If the pump runs before it in a turn, the pump must not wait."""
    world.handled = requests = Requests()
    left: list[int] = []  # turns that the task still needs, at each wait of the pump
    turns = 0

    async def flush() -> None:
        nonlocal turns
        while True:
            await requests.one_more.wait()
            requests.one_more = trio.Event()
            turns = 4
            while turns:
                turns -= 1
                await trio.lowlevel.checkpoint()

    async with toy_server(protocol=world.protocol(), world=world), trio.open_nursery() as nursery:
        nursery.start_soon(flush)
        with connect(world) as client:
            assert await ask(client, b"echo a") == b"a"
            pump = pump_of(world)
            Waits(pump, lambda: left.append(turns))
            for _ in range(50):
                assert await ask(client, b"echo b") == b"b"
        nursery.cancel_scope.cancel()
    assert set(left) <= {0}


@pytest.mark.parametrize("missing", ["epoll", "trio's descriptor"])
async def test_without_its_means_the_server_serves_as_well(
    world: World, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "epoll":
        monkeypatch.delattr(select, "epoll")
    else:
        monkeypatch.setattr(event_pump, "trio_epoll_fd", lambda: -1)
    async with toy_server(protocol=world.protocol(), world=world):
        assert (world.server._reader.pump is None) == (missing == "epoll")
        with connect(world) as client:
            for number in range(10):
                assert await ask(client, b"echo %d" % number) == b"%d" % number


@pytest.mark.parametrize("attempt", range(4))  # the order of tasks in a turn of the event loop is random
@pytest.mark.parametrize("missing", ["nothing", "epoll"])
async def test_what_has_come_is_read_before_a_deadline_is_judged(
    world: World, mock_clock: MockClock, missing: str, attempt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy server reads late; that is not the client's fault."""
    if missing == "epoll":
        monkeypatch.delattr(select, "epoll")
    world.connect = lambda: Lines(10.0)
    async with toy_server(protocol=world.protocol(), world=world):
        clients = [connect(world) for _ in range(20)]
        for client in clients:
            assert await ask(client, b"echo before") == b"before"
        for client in clients:
            send(client, b"echo late\n")
        mock_clock.jump(11)
        assert [await receive_line(client) for client in clients] == [b"late"] * 20
        mock_clock.jump(9)
        await trio.testing.wait_all_tasks_blocked()
        assert world.reasons == []
        mock_clock.jump(2)
        for client in clients:
            assert await receive_line(client) == b"error silent for too long"
            client.close()


async def test_a_long_request_delays_only_its_own_socket(world: World) -> None:
    gates: list[trio.Event] = []

    async def wait(toy: Toy, text: str) -> None:
        gates.append(trio.Event())
        await gates[-1].wait()
        toy.do_echo(text)

    world.work = wait
    async with toy_server(protocol=world.protocol(), world=world):
        with connect(world) as patient, connect(world) as other:
            send(patient, b"echo first\nlong second\necho third\n")
            assert await receive_line(patient) == b"first"
            assert await ask(other, b"echo now") == b"now"
            send(patient, b"echo fourth\n")
            assert "echo third" not in world.handled
            gates[0].set()
            assert await receive_exactly(patient, 20) == b"second\nthird\nfourth\n"
            assert await ask(patient, b"echo fifth") == b"fifth"


@pytest.mark.parametrize("end", ["bye", "bad", "break", "wrong"])
async def test_a_socket_ends_by_what_its_request_does(world: World, end: str) -> None:
    async with toy_server(protocol=world.protocol(), world=world):
        with connect(world) as client, connect(world) as other:
            send(client, b"echo before\n%s words\n" % end.encode())
            answers = await receive_exactly(client, 100)
            assert answers == b"before\n" + {"bye": b"words\n", "bad": b"error words\n"}.get(end, b"")
            assert await ask(other, b"echo alive") == b"alive"
            while world.statistic("connections") > 1:
                await trio.lowlevel.checkpoint()
            assert len(pump_of(world)._watched) == 1


@pytest.mark.parametrize("state", ["idle", "in a long request"])
async def test_a_socket_that_we_close_is_forgotten_at_once(world: World, state: str) -> None:
    """Its descriptor can then belong to another connection."""
    async with toy_server(protocol=world.protocol(), world=world):
        for _ in range(20):
            with connect(world) as client:
                assert await ask(client, b"echo a") == b"a"
                if state != "idle":
                    send(client, b"long never\n")
                    while world.handled[-1] != "long never":
                        await trio.lowlevel.checkpoint()
                peer = next(iter(world.server._peers.values()))
                peer.lose(OSError("lost"))
                assert not pump_of(world)._watched
                assert await receive_exactly(client, 1) == b""
            while world.statistic("connections"):
                await trio.lowlevel.checkpoint()
        assert len(world.reasons) == 20


async def test_a_socket_over_its_limit_is_not_watched_until_there_is_room(world: World) -> None:
    async with toy_server(ServerConfig(unsent_bytes_max=65536), world.protocol(), world):
        with connect(world) as slow:
            send(slow, b"fill 1000000\n" * 20)
            while not world.handled or pump_of(world)._watched:
                await trio.lowlevel.checkpoint()
            assert len(world.handled) < 20
            assert len(await receive_exactly(slow, 20_000_000)) == 20_000_000
            assert await ask(slow, b"echo on") == b"on"


async def test_trios_epoll_is_where_we_look_for_it() -> None:
    """Fails when a new trio has moved it: then the pump would still work, but without lingering."""
    fd = trio_epoll_fd()
    assert fd >= 0
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        looked: list[bool] = []

        async def wait() -> None:
            await trio.lowlevel.wait_readable(ours)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            looked.append(bool(select.select([fd], [], [], 0)[0]))
            theirs.send(b"x")
            looked.append(bool(select.select([fd], [], [], 0)[0]))
        assert looked == [False, True]


async def test_nothing_is_read_while_a_request_is_unfinished(world: World, autojump_clock: MockClock) -> None:
    """The next request of a peer is there before its task has begun to wait for the rest of the one before."""
    rounds = 20  # trio runs tasks that are runnable at once in either order

    def work(toy: Toy, text: str) -> Awaitable[None]:
        if int(text) + 1 < rounds:
            send(client, b"long %d\n" % (int(text) + 1))
        return answer_later(toy, text)

    world.work = work
    async with toy_server(protocol=world.protocol(), world=world):
        with connect(world) as client:
            assert await ask(client, b"echo x") == b"x"
            send(client, b"long 0\n")
            expected = b"".join(b"%d\n" % number for number in range(rounds))
            assert await receive_exactly(client, len(expected)) == expected
