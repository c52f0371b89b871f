"""The broker of the simulation, from one start to its end: what `app.startup` makes, except ports and signals."""

from typing import TYPE_CHECKING, Final, final

import trio

from martlet.app.config import Config
from martlet.app.startup import build
from martlet.broker import Broker
from martlet.contracts import Service
from martlet.net.server import Server
from martlet.plugins.hooks import Hooks
from martlet.runtime.stats import Stats
from martlet.store import Store
from martlet.testing.links import MemoryLink
from martlet_remoting.config import RemotingConfig
from martlet_remoting.handlers.context import RemotingState
from martlet_remoting.plugin import RemotingPlugin
from martlet_timer.config import TimerConfig
from martlet_timer.plugin import TimerPlugin
from martlet_tx.config import TxConfig
from martlet_tx.plugin import TxPlugin

from .bodies import LEVELS
from .checker import Tap
from .held import CHECKS_MAX
from .ledger import JOURNAL, Ledger, Row, rows_in

if TYPE_CHECKING:
    from .world import World

__all__ = ["ADDRESS", "Life"]

ADDRESS: Final = "127.0.0.1:10911"
# A snapshot of a projection is due after so many bytes of followed records.
SNAPSHOT_BYTES: Final = 16_384
TX: Final = TxConfig(check_interval_ms=1500, immunity_ms=500, checks_max=CHECKS_MAX)


@final
class Life:
    """The broker, its plugins, and the links to it."""

    def __init__(self, world: "World") -> None:
        self.disk = world.disk
        self.alive = True
        self.readable = 0
        self.store: Store | None = None
        self.taps: list[Tap] = []
        self.links: dict[str, MemoryLink] = {}
        self.stop = trio.Event()
        self.ended = trio.Event()
        self.scope = trio.CancelScope()
        self.serving = False
        self.broker: Broker
        self.server: Server
        self.ledger: Ledger
        self.remoting = RemotingPlugin(RemotingConfig(listen=ADDRESS, vip=False, light_queues=world.plan.light))
        self.timer = TimerPlugin(TimerConfig(LEVELS))
        self.timer.elapsed.suspended_ns = lambda: 0
        self.tx = TxPlugin(TX)
        self.dispatchers = self.timer.martlet_dispatchers()

    @property
    def state(self) -> RemotingState:
        return self.remoting.state

    @property
    def pending_transactions(self) -> int:
        return self.tx._of(self.broker).state.halves.pending

    def stalled(self, name: str) -> bool:
        """Whether the link of that name lets nothing through at the moment."""
        return self.links[name].stalled

    def stored_rows(self) -> dict[int, Row]:
        """What the ledger should know."""
        assert self.store is not None
        return rows_in(self.store, self.ledger.topics, self.ledger.journal)

    def build(self, world: "World", store: Store) -> None:
        """Make the broker and call the hooks of its plugins in the order of `martlet.app.startup`."""
        stats = Stats()
        self.broker = broker = build(Config(broker=world.broker_config), store, world.clock, stats, world.chance)
        self.server = Server(world.server_config, store, stats, turns=broker.turns, clock=lambda: 0.0)
        plugins: list[tuple[str, Hooks]] = [("remoting", self.remoting), ("tx", self.tx), ("timer", self.timer)]
        broker.capabilities = {
            kind: each for _, plugin in plugins for kind, each in plugin.martlet_capabilities(broker).items()
        }
        broker.set_stages(
            [(name, stage) for name, plugin in plugins for stage in plugin.martlet_stages(broker)],
            [(name, router) for name, plugin in plugins for router in plugin.martlet_routers(broker)],
        )
        for name, plugin in plugins:
            for projection in plugin.martlet_projections(broker):
                broker.projections.add(name, projection)
        self.protocol = self.remoting.martlet_protocols(broker)[0]
        self.services: list[Service] = [each for _, plugin in plugins for each in plugin.martlet_services(broker)]
        self.protocol.bound(ADDRESS)
        followed = [f"topic-{number}" for number in range(world.plan.topics)]
        self.ledger = Ledger(followed, broker.journal(JOURNAL).topic)
        broker.projections.add("ledger", self.ledger)
        broker.projections.snapshots._snapshot_bytes = SNAPSHOT_BYTES
        self.store = store
        self.readable = store.readable

    def stop_serving(self) -> None:
        """Let the plugins say goodbye."""
        self.remoting.stop()
        self.server.close_peers("the broker stops")
