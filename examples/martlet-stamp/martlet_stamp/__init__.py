"""A plugin in twenty lines: stores every message with a property that names the broker which received it."""

from collections.abc import Sequence
from typing import ClassVar

from martlet.broker import Broker
from martlet.config import Settings, setting
from martlet.contracts import Stage
from martlet.message import Message, put_property
from martlet.plugins.hooks import Hooks


class StampConfig(Settings):
    name: str = setting("STAMP", "the property's name")


class StampPlugin(Hooks):
    config_class: ClassVar[type[Settings] | None] = StampConfig

    def martlet_stages(self, broker: Broker) -> Sequence[Stage]:
        name, value = self.config.name.encode(), broker.config.name.encode()

        def stamp(message: Message) -> Message:
            message.properties = put_property(message.properties, name, value)
            return message

        return (Stage(stamp),)
