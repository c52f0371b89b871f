"""What the tests of timers share: a broker with the plugin on a disk in memory, and virtual time."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from tests.stored import records_of

from martlet.app.config import Config
from martlet.app.startup import build
from martlet.broker import Broker
from martlet.message import Message, Placed, Record, decode_properties, encode_properties
from martlet.runtime.clock import Clock
from martlet.runtime.stats import Stats
from martlet.settings import BrokerConfig
from martlet.state import Projection
from martlet.store import Store
from martlet.testing.clock import TrioClock
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import serving
from martlet.testing.stores import HOST, small_config
from martlet_timer.config import TimerConfig
from martlet_timer.plugin import TimerPlugin

DAY_MS = 86_400_000
NONE: Mapping[str, object] = {}
SIZES: dict[str, Any] = {"segment_bytes": 1 << 16, "page_bytes": 1 << 13, "cache_bytes": 1 << 16}


class Timed:
    """A broker with the plugin."""

    def __init__(self, broker: Broker, plugin: TimerPlugin, clock: Clock) -> None:
        self.broker = broker
        self.plugin = plugin
        self.clock = clock
        self.sent = 0

    def publish(
        self,
        topic: str = "T",
        body: bytes = b"x",
        queue_id: int = 0,
        properties: Mapping[str, object] = NONE,
        **more: object,
    ) -> Placed:
        """Publish a message with *properties* and *more*, and commit."""
        self.sent += 1
        named = {"UNIQ_KEY": f"KEY{self.sent}", **{name: str(value) for name, value in {**properties, **more}.items()}}
        encoded = encode_properties(named)
        placed = self.broker.publish(Message(topic, body, encoded, queue_id, born_ms=1, born_host=HOST))
        self.broker.store.committer.commit()
        return placed

    def records(self, topic: str = "T") -> list[Record]:
        """Return what is readable in *topic*, queue by queue."""
        return records_of(self.broker.store, topic)

    def bodies(self, topic: str = "T") -> list[bytes]:
        return [record.body for record in self.records(topic)]

    def late_ms(self, topic: str = "T") -> list[int]:
        """Return how much later than wanted each message was delivered, by the clock of timers."""
        properties = [decode_properties(record.properties) for record in self.records(topic)]
        return [int(each["TIMER_DEQUEUE_MS"]) - int(each["TIMER_DELIVER_MS"]) for each in properties]

    def late_ms_of(self, bodies: Iterable[bytes]) -> list[int]:
        """Like `late_ms`, for the messages with these bodies in topic ``T``."""
        late: dict[bytes, int] = {}
        for record in self.records():
            properties = decode_properties(record.properties)
            if "TIMER_DELIVER_MS" in properties:
                late[record.body] = int(properties["TIMER_DEQUEUE_MS"]) - int(properties["TIMER_DELIVER_MS"])
        return [late[body] for body in bodies]

    @property
    def statistics(self) -> dict[str, Any]:
        return self.broker.stats.collect()["timers"]


def install(broker: Broker, plugin: TimerPlugin, topics: Sequence[str]) -> Sequence[Projection]:
    """Create *topics* with two queues each, and call the hooks of *plugin* before those for the replay."""
    for name in topics:
        broker.topics.ensure(name, 2)
    broker.capabilities = dict(plugin.martlet_capabilities(broker))
    broker.set_stages([("timer", stage) for stage in plugin.martlet_stages(broker)])
    return plugin.martlet_projections(broker)


@asynccontextmanager
async def timed(
    disk: FakeDisk | None = None,
    clock: Clock | None = None,
    *,
    config: TimerConfig | None = None,
    topics: Sequence[str] = ("T",),
    delivers: bool = True,
    **store: Any,
) -> AsyncIterator[Timed]:
    """A broker with the plugin that has *topics* with two queues; it delivers timers if *delivers*."""
    plugin = TimerPlugin(config or TimerConfig())
    clock = clock or TrioClock()
    disk = disk or FakeDisk()
    config_of_store = small_config(**{**SIZES, **store})
    async with serving(
        Path("/data"),
        disk=disk,
        clock=clock,
        store=config_of_store,
        broker=BrokerConfig(),
        projections=lambda broker: install(broker, plugin, topics),
        dispatchers=plugin.martlet_dispatchers(),
    ) as running:
        for service in plugin.martlet_services(running.broker) if delivers else ():
            running.nursery.start_soon(service)
        yield Timed(running.broker, plugin, clock)


@asynccontextmanager
async def quiet(*, config: TimerConfig | None = None, topics: Sequence[str] = ("T",)) -> AsyncIterator[Timed]:
    """Like `timed`, without the store's own tasks, so that virtual weeks pass quickly."""
    plugin, clock = TimerPlugin(config or TimerConfig()), TrioClock()
    store = await Store.open(Path("/data"), small_config(**SIZES), clock, FakeDisk())
    broker = build(Config(), store, clock, Stats())
    for projection in install(broker, plugin, topics):
        broker.projections.add("timer", projection)
    await broker.projections.replay()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.flusher.run, 0.0)
        for service in plugin.martlet_services(broker)[:-1]:  # the last one looks at the clocks each second
            nursery.start_soon(service)
        yield Timed(broker, plugin, clock)
        nursery.cancel_scope.cancel()
    store.crash()


async def until(done: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Let virtual time pass until *done* returns something true."""
    with trio.fail_after(timeout_s):
        while not done():  # noqa: ASYNC110
            await trio.sleep(0.001)
