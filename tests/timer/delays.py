"""What tests of delays share: a broker with the timer plugin, whose wall clock goes with trio's clock."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from tests.stored import records_of
from tests.timer.timer_talk import install
from trio.testing import wait_all_tasks_blocked

from martlet.broker import Broker
from martlet.contracts import Protocol
from martlet.message import Message, Placed, Record
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import Serving, serving
from martlet.testing.stores import small_config
from martlet_timer.config import TimerConfig
from martlet_timer.plugin import TimerPlugin

START_MS = 1_700_000_000_000


class WallClock:
    """Goes with trio's clock; tests set it forward and back by `shift_ms`."""

    def __init__(self, ms: int = START_MS) -> None:
        self.shift_ms = ms - trio.current_time() * 1000

    def now_ms(self) -> int:
        return int(self.shift_ms + trio.current_time() * 1000 + 1e-6)


class Delays:
    """A running broker with delays."""

    def __init__(self, serving: Serving, plugin: TimerPlugin, clock: WallClock) -> None:
        self.serving = serving
        self.broker = serving.broker
        self.plugin = plugin
        self.clock = clock

    def send(self, body: bytes | str, level: int | str = 1, topic: str = "t", queue_id: int = 0) -> Placed:
        body = body.encode() if isinstance(body, str) else body
        return self.broker.publish(Message(topic, body, f"DELAY\x01{level}\x02TAGS\x01a\x02".encode(), queue_id))

    def bodies(self, topic: str = "t") -> list[str]:
        """The messages of *topic* that can be read, in the order of its queues."""
        return [record.body.decode() for record in self.records(topic)]

    def records(self, topic: str = "t") -> list[Record]:
        return records_of(self.broker.store, topic)

    async def wait_for(self, count: int, topic: str = "t", within_s: float = 10_000) -> list[str]:
        """Wait until *topic* has *count* messages, and return them."""
        changed = trio.Event()

        def flushed() -> None:
            changed.set()

        self.broker.store.readable_end.on_moved.append(flushed)
        with trio.fail_after(within_s):
            while len(found := self.bodies(topic)) < count:
                await changed.wait()
                changed = trio.Event()
        self.broker.store.readable_end.on_moved.remove(flushed)
        await wait_all_tasks_blocked()
        return found

    @property
    def statistics(self) -> dict[str, Any]:
        return self.broker.stats.collect()["delay_levels"]


@asynccontextmanager
async def delays(
    disk: FakeDisk | None = None,
    clock: WallClock | None = None,
    *,
    levels: str = "",
    queues: int = 1,
    ports: Callable[[Broker], Sequence[Protocol]] = lambda broker: (),
    **sizes: Any,
) -> AsyncIterator[Delays]:
    """Run a broker on *disk* with the timer plugin and topic ``t``."""
    plugin = TimerPlugin(TimerConfig(levels) if levels else TimerConfig())
    clock = clock or WallClock()
    async with serving(
        Path("/data/store"),
        store=small_config(**{"segment_bytes": 1 << 20, "page_bytes": 1 << 16, "cache_bytes": 1 << 20} | sizes),
        disk=disk or FakeDisk(),
        clock=clock,
        ports=ports,
        projections=lambda broker: install(broker, plugin, ()),
        dispatchers=plugin.martlet_dispatchers(),
    ) as running:
        running.broker.topics.ensure("t", queues)
        for service in plugin.martlet_services(running.broker):
            await running.nursery.start(service)
        yield Delays(running, plugin, clock)
