"""The plugin: holds delayed messages until they are due."""

from typing import ClassVar

from martlet.plugins.hooks import Hooks

from .config import TimerConfig
from .levels import parse_levels

__all__ = ["TimerPlugin"]


class TimerPlugin(Hooks):
    config_class: ClassVar[type | None] = TimerConfig

    def __init__(self, config: TimerConfig) -> None:
        super().__init__(config)
        self.delays_ms = parse_levels(config.levels)
