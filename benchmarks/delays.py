"""How late messages with a delay level are delivered, and how long that blocks the event loop.

    python benchmarks/delays.py [--rate 2000] [--seconds 8] [--body 1024] [--flush sync]

Publishes messages of level 1 at a steady rate inside the process, on a real disk, and measures from the time when each
is due to the time when it is readable. Then the same for a burst of all levels that are due at once.
"""

import argparse
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from martlet.broker import Broker
from martlet.message import Message
from martlet.state import Projection
from martlet.store import StoreConfig
from martlet.testing.peers import serving
from martlet_timer.config import TimerConfig
from martlet_timer.plugin import TimerPlugin

QUEUES = 8
BURST = 20_000


class Figures:
    """Takes the place of the plugin's histogram."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        self._wanted = 0
        self._complete = trio.Event()

    def add(self, late_ms: float) -> None:
        self.late_ms.append(late_ms)
        if len(self.late_ms) == self._wanted:
            self._complete.set()

    async def wait_for(self, count: int) -> None:
        """Wait until there are *count* figures."""
        self._wanted = count
        if len(self.late_ms) < count:
            await self._complete.wait()

    def at(self, share: float) -> float:
        return sorted(self.late_ms)[min(int(share * len(self.late_ms)), len(self.late_ms) - 1)]


class Pauses:
    """The longest times between two turns of the event loop."""

    def __init__(self) -> None:
        self.ms: list[float] = []

    async def run(self) -> None:
        while True:
            began = time.perf_counter()
            await trio.lowlevel.checkpoint()
            self.ms.append((time.perf_counter() - began) * 1000)
            await trio.sleep(0.0005)


def install(broker: Broker, plugin: TimerPlugin) -> Sequence[Projection]:
    """Call the hooks of *plugin* in the broker's order, up to those for projections."""
    broker.capabilities = dict(plugin.martlet_capabilities(broker))
    broker.set_stages([("timer", stage) for stage in plugin.martlet_stages(broker)])
    return plugin.martlet_projections(broker)


@asynccontextmanager
async def running(flush: str) -> AsyncIterator[tuple[Broker, TimerPlugin, Figures]]:
    plugin = TimerPlugin(TimerConfig("1s 1s 1s 1s"))
    with tempfile.TemporaryDirectory() as folder:
        async with serving(
            Path(folder),
            store=StoreConfig(flush="sync" if flush == "sync" else "async"),
            projections=lambda broker: install(broker, plugin),
            dispatchers=plugin.martlet_dispatchers(),
        ) as served:
            broker = served.broker
            broker.topics.ensure("T", QUEUES)
            for service in plugin.martlet_services(broker):
                served.nursery.start_soon(service)
            figures = Figures()
            plugin.level_delivery.rounds.lateness = figures  # type: ignore[assignment]
            yield broker, plugin, figures


async def steady(rate: int, seconds: int, body: bytes, flush: str) -> None:
    async with running(flush) as (broker, _, figures):
        began, count = trio.current_time(), rate * seconds
        for number in range(count):
            await trio.sleep_until(began + number / rate)
            broker.publish(Message("T", body, b"DELAY\x011\x02", number % QUEUES))
        await figures.wait_for(count)
    p50, p99 = figures.at(0.5), figures.at(0.99)
    print(f"{count} messages at {rate}/s, {flush} flush: p50 {p50:.1f} ms late, p99 {p99:.1f}, max {figures.at(1):.1f}")


async def burst(body: bytes, flush: str) -> None:
    pauses = Pauses()
    async with running(flush) as (broker, _, figures), trio.open_nursery() as nursery:
        for number in range(BURST):
            broker.publish(Message("T", body, b"DELAY\x01%d\x02" % (1 + number % 4), number % QUEUES))
            if number % 50 == 0:
                await trio.lowlevel.checkpoint()
        nursery.start_soon(pauses.run)
        await figures.wait_for(BURST)
        nursery.cancel_scope.cancel()
    worst = sorted(pauses.ms)[-5:]
    text = ", ".join(f"{pause:.1f}" for pause in worst)
    print(f"burst of {BURST}, {flush} flush: the last {figures.at(1):.0f} ms late; longest turns of the loop {text} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=2000)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--body", type=int, default=1024)
    parser.add_argument("--flush", choices=["sync", "async"], action="append")
    words = parser.parse_args()
    for flush in words.flush or ["async", "sync"]:
        trio.run(steady, words.rate, words.seconds, bytes(words.body), flush)
        trio.run(burst, bytes(words.body), flush)


if __name__ == "__main__":
    main()
