"""Tasks that read from a peer of their own share each turn of the event loop: a few go on, the others come next."""

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from tests.broker.toys import World, toy_server
from trio.testing import MockClock

from martlet.net.read_turns import READS_A_TURN, ReadTurns


@asynccontextmanager
async def running() -> AsyncGenerator[tuple[ReadTurns, trio.Nursery]]:
    turns = ReadTurns()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(turns.run)
        await trio.testing.wait_all_tasks_blocked()
        yield turns, nursery
        nursery.cancel_scope.cancel()


class Reads(trio.abc.Instrument):
    """Records which task read in which turn of the loop."""

    def __init__(self) -> None:
        self.turns: list[list[int]] = [[]]

    def before_io_wait(self, timeout: float) -> None:
        self.turns.append([])


async def test_a_few_read_in_each_turn_in_the_order_they_came() -> None:
    reads = Reads()
    async with running() as (turns, nursery):
        came: list[int] = []

        async def read(number: int) -> None:
            came.append(number)
            await turns.wait()
            reads.turns[-1].append(number)

        trio.lowlevel.add_instrument(reads)
        for number in range(100):
            nursery.start_soon(read, number)
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.remove_instrument(reads)
    busy = [turn for turn in reads.turns if turn]
    assert max(map(len, busy)) == READS_A_TURN
    assert len(busy) <= 100 // READS_A_TURN + 2
    # trio runs the tasks of a turn in any order, so only whole turns can be compared.
    place = {number: at for at, number in enumerate(came)}
    for turn, following in itertools.pairwise(busy):
        assert max(place[number] for number in turn) < min(place[number] for number in following)


async def test_one_that_gives_up_leaves_the_line() -> None:
    async with running() as (turns, _):
        for _ in range(READS_A_TURN):
            await turns.wait()  # without a turn of the loop between them
        with trio.CancelScope() as gone:
            gone.cancel()
            await turns.wait()
        assert gone.cancelled_caught
        for _ in range(3 * READS_A_TURN):
            await turns.wait()


class Handled(trio.abc.Instrument):
    """How many requests the server of *world* handled in each turn of the loop."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.counts: list[int] = []

    def before_io_wait(self, timeout: float) -> None:
        self.counts.append(len(self._world.handled) - sum(self.counts))


@pytest.mark.parametrize("requests_before", [0, 1])
async def test_peers_that_read_by_themselves_are_spread_over_turns(
    requests_before: int, autojump_clock: MockClock
) -> None:
    """Links in memory stand for all peers that the event pump does not read from."""
    async with toy_server() as world:
        callers = [world.dial()[0] for _ in range(60)]
        for caller in callers * requests_before:
            await caller.send(b"echo before\n")
            assert await caller.receive_line() == b"before"
        await trio.testing.wait_all_tasks_blocked()
        world.handled.clear()
        handled = Handled(world)
        trio.lowlevel.add_instrument(handled)
        async with trio.open_nursery() as nursery:
            for caller in callers:
                nursery.start_soon(caller.send, b"echo now\n")
        assert [await caller.receive_line() for caller in callers] == [b"now"] * 60
        trio.lowlevel.remove_instrument(handled)
        assert (sum(handled.counts), max(handled.counts)) == (60, READS_A_TURN)
