"""A broker that holds transactions, a producer to talk to it, and what is stored in the end."""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, final

import trio
from tests.state.power_cuts import opened
from tests.stored import records_in
from trio.testing import wait_all_tasks_blocked

from martlet.broker import Broker
from martlet.contracts import HalfMessage, Producers, Transactions
from martlet.message import Message, Placed, Record, find_property
from martlet.runtime.clock import Clock
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import HOST, ManualClock
from martlet_tx.checks import Checks
from martlet_tx.config import TxConfig
from martlet_tx.formats import HALF_TOPIC, NAME, OP_TOPIC, PARK_TOPIC
from martlet_tx.plugin import TxPlugin
from martlet_tx.transactions import HeldTransactions

TOPIC: Final = "orders"
GROUP: Final = "sellers"
CONFIG: Final = TxConfig(immunity_ms=6000, checks_max=15)


@final
class Asked:
    """Stands for a protocol with producers: keeps which transactions it was asked about."""

    def __init__(self) -> None:
        self.halves: list[HalfMessage] = []
        self.fails: Callable[[str], bool] = lambda key: False
        self.connected = True

    def check(self, group: str, half: Record, topic: str, queue_id: int) -> bool:
        if self.fails(half.property("UNIQ_KEY")):
            raise ValueError("this connection is broken")
        if self.connected:
            self.halves.append(HalfMessage(half, topic, queue_id, group))
        return self.connected

    def keys(self) -> list[str]:
        """Return the unique keys that were asked about since the last call."""
        found = [half.record.property("UNIQ_KEY") for half in self.halves]
        self.halves.clear()
        return found


@final
class Sellers:
    """A broker with the plugin, and one producer."""

    def __init__(self, broker: Broker, config: TxConfig) -> None:
        self.broker = broker
        self.store = broker.store
        found = broker.capability(Transactions)
        assert isinstance(found, HeldTransactions)
        self.held = found
        self.state = found.state
        self.checks = Checks(broker, config, found)
        self.asked = Asked()
        broker.capabilities[Producers] = Producers(self.asked.check)

    def prepare(self, key: str, properties: str = "", **more: Any) -> Placed:
        """Send a half message whose body is its *key*."""
        return self.broker.publish(half(key, properties, **more))

    async def find(self, placed: Placed) -> HalfMessage:
        found = self.held.find_nowait(placed.queue_offset, placed.position)
        return found if found is not None else await self.held.find(placed.position)

    async def end(self, placed: Placed, *, commit: bool) -> int:
        return self.held.end(await self.find(placed), commit=commit)

    async def settle(self) -> None:
        """Make all that was appended durable, readable and applied."""
        self.store.committer.commit()
        await self.store.flusher.flush()
        for driven in self.broker.projections._driven:
            await self.broker.projections._catch_up(driven)

    def stored(self, topic: str = TOPIC) -> list[str]:
        """Return the unique keys of the readable messages of queue 0 of *topic*."""
        return [record.property("UNIQ_KEY") for record in self.records(topic)]

    def records(self, topic: str) -> Iterator[Record]:
        queue = self.store.queues.find(topic, 0)
        return records_in(self.store, queue) if queue is not None else iter(())

    def pending(self) -> list[int]:
        halves = self.state.halves
        return [offset for number in halves.pages() for offset in halves.pending_in(number)]

    async def round(self) -> list[str]:
        """Run a round of checks and return the keys of the transactions that were asked about."""
        await self.checks.round()
        await self.settle()
        return self.asked.keys()


def half(key: str, properties: str = "", *, topic: str = TOPIC, queue_id: int = 0, group: str = GROUP) -> Message:
    encoded = f"TRAN_MSG\x01true\x02PGROUP\x01{group}\x02UNIQ_KEY\x01{key}\x02{properties}".encode()
    return Message(topic, key.encode(), encoded, queue_id, 7, 0x4, 1_700_000_000_000, HOST)


def install_with(config: TxConfig) -> Callable[[Broker], None]:
    """Return a function that adds the plugin to a broker, as a start does."""

    def install(broker: Broker) -> None:
        plugin = TxPlugin(config)
        broker.capabilities.update(plugin.martlet_capabilities(broker))
        broker.set_stages([(NAME, stage) for stage in plugin.martlet_stages(broker)])
        for projection in plugin.martlet_projections(broker):
            broker.projections.add(NAME, projection)

    return install


async def sellers(
    disk: FakeDisk | None = None,
    clock: Clock | None = None,
    flush: str = "sync",
    config: TxConfig = CONFIG,
    **sizes: Any,
) -> Sellers:
    """Open a broker whose tasks do not run, with one topic of one queue."""
    install = install_with(config)
    broker = await opened(
        disk or FakeDisk(), clock or ManualClock(), flush, TOPIC, HALF_TOPIC, OP_TOPIC, install=install, **sizes
    )
    return Sellers(broker, config)


async def flushing(found: Sellers, work: Callable[[], Awaitable[object]]) -> None:
    """Do *work*, which waits for the store to flush."""
    done = False

    async def do() -> None:
        nonlocal done
        await work()
        done = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(do)
        while not done:
            await wait_all_tasks_blocked()
            await found.settle()


def op_bodies(found: Sellers) -> list[bytes]:
    return [record.body for record in found.records(OP_TOPIC)]


def check_times(found: Sellers, topic: str = PARK_TOPIC) -> list[bytes]:
    return [find_property(record.properties, b"TRANSACTION_CHECK_TIMES") for record in found.records(topic)]
