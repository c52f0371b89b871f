"""The plugin: holds half messages, ends transactions and has producers asked about those that did not end."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from martlet.broker import Broker
from martlet.contracts import Service, Stage, Transactions
from martlet.plugins.hooks import Hooks
from martlet.state import Projection
from martlet.store.layout import PREPARED

from .checks import Checks
from .config import TxConfig
from .formats import HALF_TOPIC, OP_TOPIC
from .held import HeldTransactions
from .projection import PendingTransactions

__all__ = ["TxPlugin"]


class TxPlugin(Hooks):
    config_class: ClassVar[type | None] = TxConfig
    before: ClassVar[Mapping[str, str]] = {
        "timer": "a delayed transactional message waits for its commit first, and then for its time"
    }

    def __init__(self, config: TxConfig) -> None:
        super().__init__(config)
        self._config = config
        self._held: HeldTransactions | None = None

    def _of(self, broker: Broker) -> HeldTransactions:
        """Return the transactions of *broker*, the same for all hooks."""
        if self._held is None:
            state = PendingTransactions(broker)
            self._held = HeldTransactions(broker, self._config, state)
            state.renew = self._held.roll
        return self._held

    def martlet_capabilities(self, broker: Broker) -> Mapping[type, object]:
        return {Transactions: self._of(broker)}

    def martlet_stages(self, broker: Broker) -> Sequence[Stage]:
        return (Stage(self._of(broker).hold, ("TRAN_MSG",), PREPARED),)

    def martlet_projections(self, broker: Broker) -> Sequence[Projection]:
        for topic in HALF_TOPIC, OP_TOPIC:
            broker.topics.ensure(topic, 1)
        return (self._of(broker).state,)

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        checks = Checks(broker, self._config, self._of(broker))
        broker.stats.add("transactions", checks.statistics)
        return (checks.run,)
