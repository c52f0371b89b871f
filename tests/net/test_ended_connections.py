"""What idle and ended connections keep in memory: next to nothing, even before a garbage collection."""

import tracemalloc
import weakref
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from tests.broker.toys import Lines, Toy, World, toy_server
from trio.testing import MockClock

from martlet.settings import ServerConfig
from martlet.testing.links import Caller, Conditions, MemoryLink

SMALL = ServerConfig(unsent_bytes_max=4096)


async def by_end_of_stream(caller: Caller, link: MemoryLink) -> None:
    await caller.send(b"echo half a line")
    link.near.finish()


async def by_reset(caller: Caller, link: MemoryLink) -> None:
    await caller.send(b"fill 100000\nslowly never\nwake 1\nhold 9 x\necho half")
    await trio.testing.wait_all_tasks_blocked()
    link.cut()


async def by_protocol_error(caller: Caller, link: MemoryLink) -> None:
    await caller.send(b"x" * 1001)


async def by_protocol_error_of_the_handler(caller: Caller, link: MemoryLink) -> None:
    await caller.send(b"bad words\n")


async def by_defect(caller: Caller, link: MemoryLink) -> None:
    await caller.send(b"break it\nmore\n")


async def by_refusal(caller: Caller, link: MemoryLink) -> None:
    await caller.send(b"wrong state\n")


async def by_defect_of_slow_work(caller: Caller, link: MemoryLink) -> None:
    await caller.send(b"slowly break\n")
    await trio.sleep(2)


async def by_the_handler(caller: Caller, link: MemoryLink) -> None:
    await caller.send(b"bye now\n")


async def by_silence(caller: Caller, link: MemoryLink) -> None:
    await caller.send(b"echo half")
    await trio.sleep(100)


async def slow_work(toy: Toy, text: str) -> None:
    await trio.sleep(1)
    if text == "break":
        raise ZeroDivisionError(text)
    await trio.sleep_forever()


ENDS = [
    by_end_of_stream,
    by_reset,
    by_protocol_error,
    by_protocol_error_of_the_handler,
    by_defect,
    by_refusal,
    by_defect_of_slow_work,
    by_the_handler,
    by_silence,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_an_ended_connection_is_freed_at_once(
    end: Callable[[Caller, MemoryLink], Awaitable[None]], autojump_clock: MockClock, no_collection: None
) -> None:
    world = World(connect=lambda: Lines(50.0), work=slow_work)
    async with toy_server(SMALL, world=world):
        caller, link = world.dial(Conditions(capacity_bytes=2048))
        toy = world.toys.pop()
        lingering: dict[str, weakref.ref[object]]
        lingering = {"handler": weakref.ref(toy), "connection": weakref.ref(toy.connection)}
        del toy
        await end(caller, link)
        await caller.receive_all()
        await trio.testing.wait_all_tasks_blocked()
        assert world.statistic("connections") == 0
        assert [name for name, found in lingering.items() if found() is not None] == []


async def test_an_idle_connection_does_not_keep_its_last_request(autojump_clock: MockClock) -> None:
    lines = b"echo\n" * 3_000
    async with toy_server() as world:
        callers = [world.dial()[0] for _ in range(50)]
        tracemalloc.start()
        for caller in callers * 2:  # the first words are read elsewhere than all others
            await caller.send(lines)
            assert len(await caller.receive_exactly(3_000)) == 3_000
        world.handled.clear()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < 30 * len(lines)
