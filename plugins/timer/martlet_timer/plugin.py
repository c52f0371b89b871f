"""The plugin: holds delayed messages until they are due, by a delay level or at a time in milliseconds."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import trio

from martlet.config import Settings
from martlet.contracts import Dispatcher, Service, Stage, Timers
from martlet.plugins.hooks import Hooks
from martlet.state import Projection
from martlet.store.format.delays import SCHEDULE_TOPIC, due_dispatcher
from martlet.tables.topics import TIMER_TOPIC
from martlet_timer.config import TimerConfig
from martlet_timer.elapsed_time import ElapsedTime, watch
from martlet_timer.handover.exchange import TimerHandover
from martlet_timer.levels.delay_clock import DelayClock
from martlet_timer.levels.delivery import LevelDelivery
from martlet_timer.levels.stage import LevelStage, parse_levels
from martlet_timer.levels.state import LevelState
from martlet_timer.running import RunningInfo
from martlet_timer.timers.damped_clock import DampedClock
from martlet_timer.timers.delivery import TimerDelivery
from martlet_timer.timers.journal_writer import TimerJournalWriter
from martlet_timer.timers.listing import Listing
from martlet_timer.timers.recall import Recalls
from martlet_timer.timers.stage import RepeatLimits, TimerStage
from martlet_timer.timers.state import TimerState

if TYPE_CHECKING:
    from martlet.broker import Broker

__all__ = ["TimerPlugin"]

NAME: Final = "timer"


class TimerPlugin(Hooks):
    config_class: ClassVar[type[Settings] | None] = TimerConfig

    def __init__(self, config: TimerConfig) -> None:
        super().__init__(config)
        self.levels = config.levels
        self.delays_ms = parse_levels(config.levels)
        self._config = config
        self._horizon_ms = config.delay_max_s * 1000
        self.elapsed = ElapsedTime()

    def martlet_dispatchers(self) -> Mapping[str, Dispatcher]:
        return {SCHEDULE_TOPIC: due_dispatcher(self.delays_ms)}

    def martlet_capabilities(self, broker: "Broker") -> Mapping[type, object]:
        journal = broker.journal("timers")
        self.timer_clock = DampedClock(broker.clock, self.elapsed.ms)
        self.timers = TimerState(journal.topic, broker.store.config.segment_bytes)
        self.timer_writer = TimerJournalWriter(broker, journal, NAME)
        self.timer_delivery = TimerDelivery(
            broker, self.timer_writer, self.timers, self.timer_clock, self._config.period_min_ms
        )
        self.exchange = TimerHandover(broker, self.timers, self.timer_writer)
        self.recalls = Recalls(broker, self.timers, self.timer_delivery, self.timer_writer, self.timer_clock)
        listing = Listing(broker, self.timers, self.timer_delivery)
        return {
            Timers: Timers(
                self.recalls.recall,
                listing.count,
                listing.pending,
                lambda: self.running.values(),
                self.levels,
                self.recalls.end_repeated,
            )
        }

    def martlet_stages(self, broker: "Broker") -> Sequence[Stage]:
        self.delay_clock = DelayClock(broker.clock, self.elapsed.ms)
        self.level_stage = LevelStage(broker, len(self.delays_ms), self.delay_clock)
        # The stage of levels comes first and removes the properties of a time: a level wins.
        return [
            self.level_stage.stage,
            TimerStage(
                self.timer_clock.now_ms,
                self._horizon_ms,
                broker.queue_for_later,
                broker.store.committer.renew_clock,
                RepeatLimits(self._config.period_min_ms, self._config.schedules_max, lambda: len(self.timers.repeated)),
                broker.ids.unique,
            ).stage(),
        ]

    def martlet_projections(self, broker: "Broker") -> Sequence[Projection]:
        levels = len(self.delays_ms)
        topic = broker.topics.ensure(SCHEDULE_TOPIC, levels)
        if topic.write_queues < levels:
            broker.topics.update(SCHEDULE_TOPIC, read_queues=levels, write_queues=levels)
        broker.topics.ensure(TIMER_TOPIC, 1)
        broker.stats.add("timers", self._timer_statistics)
        self.level_offsets = LevelState(broker)
        self.running = RunningInfo(broker, self.level_offsets, self._timer_statistics)
        return [self.level_offsets, self.timers]

    def martlet_services(self, broker: "Broker") -> Sequence[Service]:
        self.timers.next_offset = broker.store.queue(TIMER_TOPIC, 0).next_offset  # the replay has applied all records
        self.level_delivery = LevelDelivery(
            broker, NAME, self.delays_ms, self.level_offsets, self.delay_clock, self.timer_clock.now_ms
        )
        broker.stats.add("delay_levels", self._level_statistics)
        return [self.level_delivery.run, self._deliver_timers, self._watch_clocks]

    async def _deliver_timers(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Deliver timers; ready once RocketMQ's timers are taken over, or if that must be retried."""
        is_ready = False

        def ready() -> None:
            nonlocal is_ready
            if not is_ready:
                is_ready = True
                task_status.started()

        await self.exchange.adopt(ready)
        ready()
        try:
            await self.timer_delivery.run()
        finally:
            self.exchange.hand_over()

    async def _watch_clocks(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, self.timer_clock.now_ms, self.timer_delivery.wake)
            nursery.start_soon(self.running.sample)
            nursery.start_soon(watch, self.delay_clock.now_ms, self.level_delivery.wake)

    def _level_statistics(self) -> dict[str, object]:
        return {"held": self.level_stage.held, **self.level_delivery.statistics()}

    def _timer_statistics(self) -> dict[str, object]:
        return {**self.timer_delivery.statistics(), "recalled": self.recalls.recalled}
