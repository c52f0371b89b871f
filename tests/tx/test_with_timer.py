"""Delayed and timed transactional messages, with the plugin that delays: they are delayed from their commit on."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from tests.tx.talk import TOPIC, Sellers, half
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.broker import Broker
from martlet.errors import Refused
from martlet.message import Placed
from martlet.runtime.clock import Clock
from martlet.state import Projection
from martlet.testing.clock import START_MS, TrioClock
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.peers import serving
from martlet.testing.stores import small_config
from martlet_timer.config import TimerConfig
from martlet_timer.plugin import TimerPlugin
from martlet_tx.config import TxConfig
from martlet_tx.formats import HALF_TOPIC, PARK_TOPIC
from martlet_tx.plugin import TxPlugin

CONFIG = TxConfig(immunity_ms=6000, checks_max=1)
SIZES: dict[str, Any] = {"segment_bytes": 1 << 20, "page_bytes": 1 << 16, "cache_bytes": 1 << 20}
# Each is 10 s from the commit on.
DELAYS = ["DELAY\x013\x02", "TIMER_DELAY_MS\x0110000\x02", "TIMER_DELAY_SEC\x0110\x02"]
DELAY_S = 10


@asynccontextmanager
async def selling(disk: FakeDisk, clock: Clock) -> AsyncIterator[Sellers]:
    """A broker with both plugins; it runs all but the rounds of checks."""
    plugins = {"tx": TxPlugin(CONFIG), "timer": TimerPlugin(TimerConfig())}

    def install(broker: Broker) -> Sequence[Projection]:
        broker.topics.ensure(TOPIC, 1)
        stages = []
        projections: list[Projection] = []
        for name, plugin in plugins.items():
            broker.capabilities |= plugin.martlet_capabilities(broker)
            stages += [(name, stage) for stage in plugin.martlet_stages(broker)]
            projections += plugin.martlet_projections(broker)
        broker.set_stages(stages)
        return projections

    timer = plugins["timer"]
    async with serving(
        Path("/data"),
        disk=disk,
        clock=clock,
        store=small_config(**SIZES),
        projections=install,
        dispatchers=timer.martlet_dispatchers(),
    ) as running:
        for service in timer.martlet_services(running.broker):
            await running.nursery.start(service)
        yield Sellers(running.broker, CONFIG)


async def prepared(found: Sellers, key: str, properties: str) -> Placed:
    placed = found.broker.publish(half(key, properties))
    await flushed(found)
    return placed


async def flushed(found: Sellers) -> None:
    """Wait until what was appended is durable and applied."""
    found.store.committer.commit()
    await found.store.flusher.wait_flushed(found.store.written)
    await wait_all_tasks_blocked()


async def commit(found: Sellers, placed: Placed) -> int:
    """Commit a transaction and return the time."""
    await found.end(placed, commit=True)
    await flushed(found)
    return found.broker.clock.now_ms()


async def check_delivered_at(found: Sellers, key: str, due_ms: int) -> None:
    """See that the message *key* comes when it is due, not before, and once."""
    await trio.sleep((due_ms - found.broker.clock.now_ms()) / 1000 - 0.01)
    assert key not in found.stored()
    await trio.sleep(0.1)
    assert found.stored().count(key) == 1
    await trio.sleep(60)
    assert found.stored().count(key) == 1


@pytest.mark.parametrize("delay", DELAYS)
async def test_a_delay_begins_with_the_commit(delay: str, autojump_clock: MockClock) -> None:
    async with selling(FakeDisk(), TrioClock()) as found:
        placed = await prepared(found, "k1", delay)
        await trio.sleep(60)
        assert (found.stored(), found.stored(HALF_TOPIC)) == ([], ["k1"])
        committed_ms = await commit(found, placed)
        with pytest.raises(Refused, match="has ended"):
            await found.end(placed, commit=True)
        await check_delivered_at(found, "k1", committed_ms + DELAY_S * 1000)


async def test_a_message_with_a_time_is_delivered_then_or_at_a_later_commit(autojump_clock: MockClock) -> None:
    async with selling(FakeDisk(), TrioClock()) as found:
        early = await prepared(found, "early", f"TIMER_DELIVER_MS\x01{START_MS + 30_000}\x02")
        late = await prepared(found, "late", f"TIMER_DELIVER_MS\x01{START_MS + 30_000}\x02")
        await trio.sleep(5)
        await commit(found, early)
        await check_delivered_at(found, "early", START_MS + 30_000)
        assert found.broker.clock.now_ms() > START_MS + 60_000
        await commit(found, late)
        await trio.sleep(0.1)
        assert sorted(found.stored()) == ["early", "late"]


@pytest.mark.parametrize("delay", DELAYS)
async def test_a_delayed_message_that_is_rolled_back_never_comes(delay: str, autojump_clock: MockClock) -> None:
    async with selling(FakeDisk(), TrioClock()) as found:
        placed = await prepared(found, "k1", delay)
        await found.end(placed, commit=False)
        await flushed(found)
        await trio.sleep(60)
        assert found.stored() == []


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("delay", DELAYS)
async def test_a_delayed_transaction_survives_a_crash(delay: str, committed: bool, autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with selling(disk, clock) as found:
        placed = await prepared(found, "k1", delay)
        await trio.sleep(20)
        due_ms = await commit(found, placed) + DELAY_S * 1000 if committed else 0
        disk = disk.after_power_cut(Cut.KILLED, Random(0))
    async with selling(disk, clock) as found:
        if not committed:
            await trio.sleep(20)
            assert found.stored() == []
            due_ms = await commit(found, placed) + DELAY_S * 1000
        await check_delivered_at(found, "k1", due_ms)


@pytest.mark.parametrize("delay", DELAYS)
async def test_a_delayed_half_message_is_moved_and_parked_without_delay(delay: str, autojump_clock: MockClock) -> None:
    """RocketMQ delays the half message itself, and then no longer knows where its message belongs."""
    async with selling(FakeDisk(), TrioClock()) as found:
        await prepared(found, "moved", delay)
        await prepared(found, "parked", delay)
        await found.broker.turns.finish(found.state.roll(0, found.store.appended))
        await flushed(found)
        assert found.pending() == [2, 3]
        (moved, parked) = await found.held.pending(0, 10, 1 << 20)
        found.held.park(parked.half, 1)
        found.held.end(moved.half, commit=True)
        await flushed(found)
        assert found.stored(PARK_TOPIC) == ["parked"]
        (record,) = found.records(PARK_TOPIC)
        found.held.resume(await found.held.find(record.position))
        await flushed(found)
        (resumed,) = await found.held.pending(0, 10, 1 << 20)
        await check_delivered_at(found, "moved", found.broker.clock.now_ms() + DELAY_S * 1000)
        found.held.end(resumed.half, commit=True)
        await flushed(found)
        await check_delivered_at(found, "parked", found.broker.clock.now_ms() + DELAY_S * 1000)
