"""A plugin that decides who may do what: nobody publishes to a frozen topic, by whatever protocol."""

from collections.abc import Sequence
from typing import ClassVar

from martlet.broker import Broker
from martlet.config import Settings, setting
from martlet.contracts import Authorizer, Identity
from martlet.plugins.hooks import Hooks


class FreezeConfig(Settings):
    topics: list[str] = setting([], "topics that may be read but not published to")
    allow_others: bool = setting(True, "allow everything else; false leaves it to the plugins that come later")


class FreezePlugin(Hooks):
    config_class: ClassVar[type[Settings] | None] = FreezeConfig

    def martlet_authorizers(self, broker: Broker) -> Sequence[Authorizer]:
        frozen = frozenset(self.config.topics)
        # Without an opinion from any plugin the broker denies.
        otherwise = True if self.config.allow_others else None

        def opinion(identity: Identity, action: str, topic: str) -> bool | None:
            return False if action == "publish" and topic in frozen else otherwise

        return (opinion,)
