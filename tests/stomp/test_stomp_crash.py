"""Whatever ends the broker: receipts, acknowledgements and transactions mean what they say.

``MARTLET_CRASH_SEEDS`` makes the test on a simulated disk longer.
"""

import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio
from tests.broker_process import BrokerProcess, small_store
from tests.kills import ROUNDS, survive_kills
from tests.stomp.devices import Consumer, Producer, Worker, check, drain
from tests.wire_clients.stomp import StompClient, stomp_broker
from tests.wire_clients.streams import dialed

from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config

SEEDS = range(int(os.environ.get("MARTLET_CRASH_SEEDS", "3")))
GONE = (trio.BrokenResourceError, trio.ClosedResourceError, EOFError, OSError)


Open = Callable[[], AbstractAsyncContextManager[StompClient]]


def talking(address: str) -> Open:
    @asynccontextmanager
    async def opened() -> AsyncIterator[StompClient]:
        async with dialed(address) as wire:
            yield StompClient(wire)

    return opened


async def working(device: Producer | Worker | Consumer, opened: Open) -> None:
    with suppress(*GONE):
        async with opened() as talk:
            await device.run(talk)


async def traffic(devices: tuple[Producer, Worker, Consumer], opened: Open, end: Callable[[], object]) -> None:
    """Let all talk until the broker is ended after some transactions."""
    _, worker, _ = devices
    goal = len(worker.committed) + worker.chance.randrange(20, 200)
    async with trio.open_nursery() as nursery:
        for device in devices:
            nursery.start_soon(working, device, opened)
        await worker.wait_committed(goal)
        end()
        nursery.cancel_scope.cancel()


async def finish(devices: tuple[Producer, Worker, Consumer], opened: Open) -> None:
    async with opened() as one, opened() as two:
        await drain(*devices, one, two)


@pytest.mark.parametrize("flush", ["sync", "async"])
def test_kill_9_breaks_no_receipt_and_no_transaction(tmp_path: Path, flush: str) -> None:
    chance = random.Random(flush)
    devices = Producer(chance), Worker(chance), Consumer(chance)

    def work(victim: BrokerProcess) -> None:
        trio.run(traffic, devices, talking(victim.addresses["stomp"]), victim.kill)

    def end(victim: BrokerProcess) -> None:
        trio.run(finish, devices, talking(victim.addresses["stomp"]))

    settings = {"plugins.enabled": '["stomp"]', **small_store(flush=flush, flush_interval_ms=20)}
    survive_kills(partial(BrokerProcess, tmp_path, settings), work, end)
    trio.run(compare, devices, tmp_path)
    assert len(devices[0].stored) > 20 * ROUNDS


async def compare(devices: tuple[Producer, Worker, Consumer], directory: Path) -> None:
    async with stomp_broker(directory, store=small_config(flush="async", segment_bytes=1 << 20)) as stomp:
        check(*devices, [record.body for record in stomp.records("out")])


@pytest.mark.parametrize("cut", list(Cut))
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_power_cut_breaks_no_receipt_and_no_transaction(cut: Cut, seed: int) -> None:
    chance, disk, directory = random.Random(seed), FakeDisk(), Path("/data")
    devices = Producer(chance), Worker(chance), Consumer(chance)
    store = small_config(flush="sync", segment_bytes=1 << 18, page_bytes=1 << 14, cache_bytes=1 << 18)
    for _ in range(3):
        after = disk
        async with stomp_broker(directory, store=store, disk=disk) as stomp:

            @asynccontextmanager
            async def opened() -> AsyncIterator[StompClient]:
                yield stomp.open()

            def end() -> None:
                nonlocal after
                after = disk.after_power_cut(cut, chance)  # noqa: B023

            await traffic(devices, opened, end)
        disk = after
    async with stomp_broker(directory, store=store, disk=disk) as stomp:
        await drain(*devices, stomp.open(), stomp.open())
        check(*devices, [record.body for record in stomp.records("out")])
    assert len(devices[0].stored) > 40
