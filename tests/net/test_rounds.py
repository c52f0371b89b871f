"""Messages published outside a socket read are committed in the same turn: one commit and one wake pass for all."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import pytest
import trio
import trio.testing
from tests.broker.toys import Lines, World, toy_server
from trio.testing import MockClock

from martlet.broker import Broker
from martlet.contracts import Buffer, Connection, Handler, Peer, Protocol
from martlet.errors import MartletError, Refused
from martlet.message import Message
from martlet.net.deadlines import PASSED_A_TURN
from martlet.net.read_turns import CLOSES_A_TURN, ENDS_A_TURN
from martlet.net.rounds import COLLECT_S, COLLECTS_A_ROUND, RELEASES_A_ROUND
from martlet.settings import ServerConfig
from martlet.store import StoreConfig
from martlet.testing.peers import MemoryPeer, Serving, serving


class Publisher:
    """Publishes each line it hears at a time that the line names."""

    def __init__(self, broker: Broker, peer: Peer, nursery: trio.Nursery) -> None:
        self.broker = broker
        self.peer = peer
        self.nursery = nursery

    def publish(self, text: str) -> None:
        self.broker.publish(Message("T", text.encode()))

    async def later(self, text: str) -> None:
        await trio.lowlevel.checkpoint()
        self.publish(text)

    def handle(self, event: str) -> Awaitable[None] | None:
        match event:
            case "in work":
                self.peer.start(self.later, event)
            case "in a service":
                self.nursery.start_soon(self.later, event)
            case "in the rest of a request":
                return self.later(event)
            case "at once":
                self.publish(event)
        return None

    def refuse(self, answer: Buffer, refused: Refused) -> None: ...

    def collect(self, budget_bytes: int) -> None:
        self.publish("in collect")

    def closed(self, reason: str) -> None:
        self.publish("in closed")


async def disconnect(running: Serving, peer: MemoryPeer, connection: Publisher) -> None:
    peer.close()


async def wake(running: Serving, peer: MemoryPeer, connection: Publisher) -> None:
    connection.peer.wake()


def say(line: str) -> Callable[[Serving, MemoryPeer, Publisher], Awaitable[None]]:
    async def said(running: Serving, peer: MemoryPeer, connection: Publisher) -> None:
        await peer.send(line.encode() + b"\n")

    return said


WHERE = {
    "in closed": disconnect,
    "in collect": wake,
    "in work": say("in work"),
    "in a service": say("in a service"),
    "in the rest of a request": say("in the rest of a request"),
    "at once": say("at once"),
}


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("where", WHERE)
async def test_a_message_becomes_readable_wherever_it_is_published(
    where: str, flush: Literal["sync", "async"], tmp_path: Path
) -> None:
    handlers: list[Publisher] = []
    arrived = trio.Event()

    def connect(now: float) -> Connection:
        return Lines()

    async with serving(tmp_path, store=StoreConfig(flush=flush, segment_bytes=1 << 20)) as running:
        broker = running.broker

        def handle(peer: Peer, connection: Connection) -> Handler:
            handlers.append(Publisher(broker, peer, running.nursery))
            return handlers[-1]

        broker.topics.ensure("T", 1)
        queue = broker.store.queue("T", 0)
        queue.watchers = [lambda queue: arrived.set()]
        peer = running.connect(Protocol("lines", "", connect, handle))
        await trio.testing.wait_all_tasks_blocked()
        await WHERE[where](running, peer, handlers[0])
        await arrived.wait()
        while not broker.store.readers.end_offset(queue):
            await trio.lowlevel.checkpoint()
        [record] = broker.store.readers.read(queue, 0, 10, 1 << 20).pieces
        assert where.encode() in bytes(record)


async def test_appends_of_one_turn_are_one_commit(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(100):
            world.store.append()
        assert world.store.commits == 0
        await trio.testing.wait_all_tasks_blocked()
        assert world.store.commits == 1


async def test_a_round_that_appends_nothing_commits_nothing(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        await caller.send(b"echo a\n")
        assert await caller.receive_line() == b"a"
        assert world.store.commits == 0


async def test_a_commit_that_fails_outside_of_a_read_is_logged(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        world.store.fail_commit(MartletError("the disk is full"))
        world.store.append()
        await trio.testing.wait_all_tasks_blocked()
        assert "were not stored; the disk is full" in caplog.text
        await caller.send(b"echo unharmed\n")
        assert await caller.receive_line() == b"unharmed"


async def wake_together(world: World, count: int) -> None:
    """Connect *count* peers, and wake them in one turn of the loop."""
    for _ in range(count):
        world.dial()
    await trio.testing.wait_all_tasks_blocked()
    for toy in world.toys:
        toy.peer.wake()


async def test_appends_of_woken_peers_in_one_round_are_one_commit(autojump_clock: MockClock) -> None:
    world = World()
    world.on_collect = lambda toy: world.store.append()
    async with toy_server(world=world):
        await wake_together(world, 20)
        await trio.testing.wait_all_tasks_blocked()
        assert (world.collects, world.store.commits) == (20, 1)


async def test_work_before_a_commit_is_part_of_it_and_its_answers_leave_with_it(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        await trio.testing.wait_all_tasks_blocked()
        [toy] = world.toys

        def work() -> None:
            world.store.append()
            toy.peer.send(b"answer\n")

        toy.peer.before_commit(work)
        toy.peer.before_commit(lambda: toy.peer.before_commit(work))
        assert world.store.commits == 0
        await trio.testing.wait_all_tasks_blocked()
        assert world.store.commits == 1
        assert [await caller.receive_line() for _ in range(2)] == [b"answer"] * 2


async def test_work_before_a_commit_that_fails_closes_its_connection_alone(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with toy_server() as world:
        failing, working = (world.dial()[0] for _ in range(2))
        await trio.testing.wait_all_tasks_blocked()

        def fail() -> None:
            raise ZeroDivisionError("a bug")

        def work() -> None:
            world.store.append()
            world.toys[1].peer.send(b"answer\n")

        world.toys[0].peer.before_commit(fail)
        world.toys[1].peer.before_commit(work)
        await trio.testing.wait_all_tasks_blocked()
        assert world.store.commits == 1
        assert await working.receive_line() == b"answer"
        assert await failing.receive() == b""
        assert "closed because of a bug" in caplog.text
        assert "ZeroDivisionError: a bug" in caplog.text


class Turns(trio.abc.Instrument):
    """How far *count* moved in each turn of the loop."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._last = count()
        self.steps: list[int] = []

    def before_io_wait(self, timeout: float) -> None:
        last, self._last = self._last, self._count()
        self.steps.append(self._last - last)


async def all_done(wanted: int, count: Callable[[], int]) -> int:
    """Wait until *count* is *wanted*; return the largest increase in one turn of the loop."""
    turns = Turns(count)
    trio.lowlevel.add_instrument(turns)
    await trio.testing.wait_all_tasks_blocked()
    trio.lowlevel.remove_instrument(turns)
    assert count() == wanted
    return max(turns.steps)


@pytest.mark.parametrize(("each_s", "most"), [(1.0, 1), (COLLECT_S / 3.5, 4), (0.0, COLLECTS_A_ROUND)])
async def test_a_round_collects_from_few_peers_where_these_take_long(
    each_s: float, most: int, autojump_clock: MockClock
) -> None:
    world = World()
    world.clock = lambda: world.collects * each_s
    async with toy_server(world=world):
        await wake_together(world, 200)
        assert await all_done(200, lambda: world.collects) == most


async def test_the_rounds_of_one_turn_share_the_time_to_collect(autojump_clock: MockClock) -> None:
    world = World()
    world.clock = lambda: world.collects * COLLECT_S / 3.5
    async with toy_server(world=world):
        await wake_together(world, 20)
        for position in range(5):
            world.store.flush_to(position)  # without a turn of the loop between them
        assert world.collects == 4
        assert await all_done(20, lambda: world.collects) == 4


async def test_held_answers_of_hundreds_of_peers_leave_over_several_rounds(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        callers = [world.dial()[0] for _ in range(3 * RELEASES_A_ROUND)]
        for number, caller in enumerate(callers):
            await caller.send(b"hold %d a\n" % (10 if number else 20))
        await trio.testing.wait_all_tasks_blocked()
        held = world.server.pending.held
        world.store.flush_to(10)
        assert len(held) == 2 * RELEASES_A_ROUND, "the first of them leave at once"
        left = await all_done(-1, lambda: -len(held))
        assert left == RELEASES_A_ROUND
        assert [await caller.receive_line() for caller in callers[1:]] == [b"a"] * (len(callers) - 1)
        world.store.flush_to(20)
        assert await callers[0].receive_line() == b"a"


async def test_peers_that_go_together_end_over_several_turns(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        callers = [world.dial()[0] for _ in range(100)]
        await trio.testing.wait_all_tasks_blocked()
        world.server.close_peers("bye")
        assert await all_done(len(callers), lambda: len(world.reasons)) == ENDS_A_TURN


async def test_sockets_whose_last_answers_leave_together_close_over_several_turns(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        dialled = [world.dial() for _ in range(2 * CLOSES_A_TURN)]
        for caller, _ in dialled:
            await caller.send(b"hold 10 a\n")
        await trio.testing.wait_all_tasks_blocked()
        world.server.close_peers("bye")
        await trio.testing.wait_all_tasks_blocked()
        steps = Turns(lambda: sum(link.far.closed for _, link in dialled))
        trio.lowlevel.add_instrument(steps)
        world.store.flush_to(10)
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.remove_instrument(steps)
        assert (sum(steps.steps), max(steps.steps)) == (len(dialled), CLOSES_A_TURN)


async def test_deadlines_that_pass_together_are_handled_over_several_turns(autojump_clock: MockClock) -> None:
    made: list[Lines] = []

    def connect() -> Connection:
        made.append(Lines(10.0))
        return made[-1]

    async with toy_server(ServerConfig(), world=World(connect=connect)) as world:
        for _ in range(300):
            world.dial()
        await trio.testing.wait_all_tasks_blocked()
        turns = Turns(lambda: sum(each.timeouts for each in made))
        trio.lowlevel.add_instrument(turns)
        await trio.sleep(11)
        trio.lowlevel.remove_instrument(turns)
        assert (sum(turns.steps), max(turns.steps)) == (300, PASSED_A_TURN)


async def test_peers_that_come_last_take_turns_after_all_others(autojump_clock: MockClock) -> None:
    world = World(push_bytes=10)
    order: list[int] = []
    world.on_collect = lambda toy: order.append(world.toys.index(toy))
    async with toy_server(world=world):
        for _ in range(5):
            world.dial()
        await trio.testing.wait_all_tasks_blocked()
        for toy in world.toys[:3]:
            toy.peer.wake_last()
        for toy in world.toys[3:]:
            toy.peer.wake()
        steps = Turns(lambda: len(order))
        trio.lowlevel.add_instrument(steps)
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.remove_instrument(steps)
        assert order == [3, 4, 0, 1, 2]
        assert [step for step in steps.steps if step] == [3, 1, 1]
