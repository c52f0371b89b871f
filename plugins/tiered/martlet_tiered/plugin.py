"""The plugin: old messages go to an object store or a directory, and consumers read them from there."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from martlet.broker import Broker
from martlet.config import Settings
from martlet.contracts import Service, Subcommand
from martlet.plugins.hooks import Hooks
from martlet.store import ColdTier
from martlet_tiered.config import TieredConfig
from martlet_tiered.errors import missing_package
from martlet_tiered.location import TierLocation

if TYPE_CHECKING:
    from martlet_tiered.tier import ObjectTier

__all__ = ["TieredPlugin"]


class TieredPlugin(Hooks):
    """Provides a cold tier, unless ``tiered.url`` is empty."""

    config_class: ClassVar[type[Settings] | None] = TieredConfig

    def __init__(self, config: TieredConfig) -> None:
        super().__init__(config)
        self._config = config
        self._location = TierLocation.of(config, os.environ) if config.url else None
        self.tier: ObjectTier | None = None

    def martlet_cold_tiers(self, broker: Broker) -> Sequence[ColdTier]:
        if self._location is None:
            return ()
        self.tier = _tier_class()(broker, self._config, self._location)
        broker.stats.add("tiered", self.tier.statistics)
        return (self.tier,)

    def martlet_commands(self) -> Sequence[Subcommand]:
        from martlet_tiered.commands.command import COMMAND  # a broker does not need it

        return [COMMAND]

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        if self.tier is None:
            return ()
        from martlet_tiered.status import StatusSocket  # only a broker with a tier needs it

        requests = StatusSocket(broker, self.tier.status, self.tier.purge)
        return (self.tier.uploader.run, self.tier.reader.run, requests.run)


def _tier_class() -> "type[ObjectTier]":
    """Return `ObjectTier`, whose packages take half a second to import, and which a broker without a tier may lack."""
    try:
        from martlet_tiered.tier import ObjectTier
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    return ObjectTier
