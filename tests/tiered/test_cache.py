"""Who asks for the same thing at the same time shares one read."""

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from martlet_tiered.reading.cache import SharedCache


def reader(calls: list[str], gate: trio.Event, value: str = "value") -> Callable[[], Awaitable[str]]:
    async def read() -> str:
        calls.append(value)
        await gate.wait()
        return value

    return read


async def test_one_read_serves_all_and_is_kept() -> None:
    cache: SharedCache[str, str] = SharedCache(100, len)
    calls: list[str] = []
    gate, found = trio.Event(), list[str]()

    async def ask() -> None:
        found.append(await cache.get("key", reader(calls, gate)))

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert cache.has("key")
        gate.set()
    await ask()
    assert (calls, found) == (["value"], ["value"] * 11)
    assert (cache.reads, cache.bytes) == (1, 5)


async def test_an_error_is_everybodys_and_not_kept() -> None:
    cache: SharedCache[str, str] = SharedCache(100, len)
    gate, failed = trio.Event(), list[int]()

    async def fail() -> str:
        await gate.wait()
        raise OSError("no")

    async def ask(number: int) -> None:
        with pytest.raises(OSError, match="no"):
            await cache.get("key", fail)
        failed.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(ask, number)
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
    assert (len(failed), cache.reads) == (5, 1)
    assert await cache.get("key", reader([], gate)) == "value"


async def test_the_next_one_reads_if_the_first_is_cancelled() -> None:
    cache: SharedCache[str, str] = SharedCache(100, len)
    calls: list[str] = []
    gate, found, scope = trio.Event(), list[str](), trio.CancelScope()

    async def leave() -> None:
        with scope:
            await cache.get("key", reader(calls, gate))

    async def stay() -> None:
        found.append(await cache.get("key", reader(calls, gate)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            nursery.start_soon(stay)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
    assert (calls, found) == (["value"] * 2, ["value"] * 3)


async def test_the_last_used_values_stay() -> None:
    cache: SharedCache[str, str] = SharedCache(6, len)
    gate = trio.Event()
    gate.set()
    for key in ("a", "b", "a", "c"):
        await cache.get(key, reader([], gate, 3 * key))
    assert [cache.find(key) for key in "abc"] == ["aaa", None, "ccc"]
    await cache.get("d", reader([], gate, 100 * "d"))
    assert (cache.find("d"), len(cache), cache.bytes) == (100 * "d", 1, 100)
