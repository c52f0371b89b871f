"""The plugin: half messages and their transactions, checks of pending transactions, and external transactions."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from martlet.broker import Broker
from martlet.config import Settings
from martlet.contracts import ExternalTransactions, Service, Stage, Transactions
from martlet.plugins.hooks import Hooks
from martlet.records.layout import PREPARED
from martlet.state import Projection
from martlet_tx.checks import Checks
from martlet_tx.config import TxConfig
from martlet_tx.external.state import ExternalState
from martlet_tx.external.transactions import StagedTransactions
from martlet_tx.formats import HALF_TOPIC, OP_TOPIC
from martlet_tx.renewal import HalfMessageRenewal
from martlet_tx.state import HalfMessageState
from martlet_tx.transactions import HeldTransactions

__all__ = ["TxPlugin"]


class TxPlugin(Hooks):
    config_class: ClassVar[type[Settings] | None] = TxConfig
    before: ClassVar[Mapping[str, str]] = {
        "timer": "a delayed transactional message waits for its commit first, and then for its time"
    }

    def __init__(self, config: TxConfig) -> None:
        super().__init__(config)
        self._config = config
        self._held: HeldTransactions | None = None
        self._external: StagedTransactions | None = None

    def _of(self, broker: Broker) -> HeldTransactions:
        """Return the transactions of *broker*, the same for all hooks."""
        if self._held is None:
            state = HalfMessageState(broker)
            self._held = HeldTransactions(broker, self._config, state)
            state.renew = HalfMessageRenewal(broker, self._held).roll
        return self._held

    def _external_of(self, broker: Broker) -> StagedTransactions:
        """Return the external transactions of *broker*, the same for all hooks."""
        if self._external is None:
            self._external = StagedTransactions(broker, self._config, ExternalState())
        return self._external

    def martlet_capabilities(self, broker: Broker) -> Mapping[type, object]:
        return {Transactions: self._of(broker), ExternalTransactions: self._external_of(broker)}

    def martlet_stages(self, broker: Broker) -> Sequence[Stage]:
        return (Stage(self._of(broker).hold, ("TRAN_MSG",), PREPARED),)

    def martlet_projections(self, broker: Broker) -> Sequence[Projection]:
        for topic in HALF_TOPIC, OP_TOPIC:
            broker.topics.ensure(topic, 1)
        return (self._of(broker).state, self._external_of(broker).state)

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        checks = Checks(broker, self._config, self._of(broker))
        broker.stats.add("transactions", checks.statistics)
        external = self._external_of(broker)
        broker.stats.add("external_transactions", external.statistics)
        return (checks.run, external.run)
