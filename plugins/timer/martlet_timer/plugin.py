"""The plugin: holds delayed messages until they are due."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from martlet.contracts import Dispatcher, Service, Stage, Timers
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.plugins.hooks import Hooks
from martlet.state import Projection
from martlet.store.delays import SCHEDULE_TOPIC, due_dispatcher
from martlet.tables.topics import BROKER_TOPICS

from .config import TimerConfig
from .deliveries import Deliveries
from .levels import Holder, parse_levels
from .offsets import DelayOffsets
from .steady import SteadyClock

if TYPE_CHECKING:
    from martlet.broker import Broker

__all__ = ["TimerPlugin"]

NAME: Final = "timer"
TIMED: Final = ("TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS")


def refuse_timed(message: Message) -> Message:
    """Refuse *message*, which is to be delivered at any millisecond; those with a level have lost such properties."""
    if message.topic in BROKER_TOPICS:
        return message
    name = next(name for name in TIMED if message.property(name))
    text = f"message has the property {name}, and this broker supports only delay levels; send it with DELAY"
    raise Refused(Reason.ILLEGAL, text)


class TimerPlugin(Hooks):
    config_class: ClassVar[type | None] = TimerConfig

    def __init__(self, config: TimerConfig) -> None:
        super().__init__(config)
        self.delays_ms = parse_levels(config.levels)

    def martlet_dispatchers(self) -> Mapping[str, Dispatcher]:
        return {SCHEDULE_TOPIC: due_dispatcher(self.delays_ms)}

    def martlet_capabilities(self, broker: "Broker") -> Mapping[type, object]:
        return {Timers: Timers()}

    def martlet_stages(self, broker: "Broker") -> Sequence[Stage]:
        self._clock = SteadyClock(broker.clock)
        self.holder = Holder(broker, len(self.delays_ms), self._clock)
        return [self.holder.stage, Stage(refuse_timed, TIMED)]

    def martlet_projections(self, broker: "Broker") -> Sequence[Projection]:
        levels = len(self.delays_ms)
        topic = broker.topics.ensure(SCHEDULE_TOPIC, levels)
        if topic.write_queues < levels:
            broker.topics.update(SCHEDULE_TOPIC, read_queues=levels, write_queues=levels)
        self._offsets = DelayOffsets(broker)
        return [self._offsets]

    def martlet_services(self, broker: "Broker") -> Sequence[Service]:
        self.deliveries = Deliveries(broker, NAME, self.delays_ms, self._offsets, self._clock)
        broker.stats.add("delay_levels", self._statistics)
        return [self.deliveries.run]

    def _statistics(self) -> dict[str, object]:
        return {"held": self.holder.held, **self.deliveries.statistics()}
