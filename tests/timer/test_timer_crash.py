"""The power is cut at every call that changes the disk while timers are sent, delivered, recalled and moved.

None that was acknowledged is lost, none is delivered twice, early, or after an acknowledged recall.
``MARTLET_CRASH_STEPS`` makes the workload longer (default 80 steps); ``MARTLET_CRASH_SEEDS`` runs more of them.
"""

import os
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from tests.state import power_cuts
from tests.state.power_cuts import cut_everywhere, opened
from tests.timer.timer_talk import Timed, install
from trio.testing import MockClock

from martlet.broker import Broker
from martlet.errors import MartletError
from martlet.message import decode_properties
from martlet.runtime.steps import finish_now
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import ManualClock
from martlet_timer.config import TimerConfig
from martlet_timer.plugin import TimerPlugin
from martlet_timer.timers.damped_clock import DampedClock
from martlet_timer.timers.records import out_of

STEPS = int(os.environ.get("MARTLET_CRASH_STEPS", "80"))
SEEDS = range(int(os.environ.get("MARTLET_CRASH_SEEDS", "1")))
CONFIG: dict[str, Any] = {
    "segment_bytes": 4096,
    "page_bytes": 512,
    "cache_bytes": 8192,
    "disk_used_ratio_max": 0.8,
    "disk_clean_ratio": 0.85,
}
ACTIONS = ("send", "deliver", "recall", "roll", "flush", "save", "retire", "wait", "fill")
WEIGHTS = (9, 7, 4, 2, 4, 2, 4, 5, 4)


class Workload(power_cuts.Workload):
    """Knows what is durable: timers, deliveries and recalls."""

    def __init__(self, disk: FakeDisk, flush: str, random: Random) -> None:
        super().__init__(disk, flush)
        self.random = random
        self.clock = ManualClock()
        self.due: dict[bytes, int] = {}  # of all timers
        self.sent: set[bytes] = set()  # durable ones
        self.recalled: set[bytes] = set()
        self.seen: dict[bytes, int] = {}  # position of each delivery that retention may have removed
        self.used: set[str] = set()
        self.retired = False
        self._unflushed: list[tuple[set[bytes], bytes]] = []

    def shared(self) -> Iterable[object]:
        return self.disk, self.random

    async def start(self, disk: FakeDisk, clock: ManualClock) -> Timed:
        plugin = TimerPlugin(TimerConfig())

        def add(broker: Broker) -> None:
            broker.projections._driven.clear()  # the others take most of the time of a start
            for projection in install(broker, plugin, ("T", "other")):
                broker.projections.add("timer", projection)
            self.set_clock(plugin, clock)

        broker = await opened(disk, clock, self.flush, install=add, **CONFIG)
        return Timed(broker, plugin, clock)

    def set_clock(self, plugin: TimerPlugin, clock: ManualClock) -> None:
        plugin.timer_clock = DampedClock(clock, clock.now_ms)

    async def work(self) -> None:
        made = await self.start(self.disk, self.clock)
        for _ in range(STEPS):
            await self.step(made)
        made.broker.store.committer.commit()
        await flush(made)
        made.broker.projections.save()
        await made.broker.store.close()

    async def check(self, disk: FakeDisk, kind: Cut) -> None:
        """Start on what is left, deliver everything, and look at what came."""
        clock = ManualClock(self.clock.ms)
        made = await self.start(disk, clock)
        for _ in range(2):
            while await deliver(made, 100):
                await flush(made)
            clock.ms += 10_000
        came = dict(self.seen)
        for record in made.records():
            properties = decode_properties(record.properties)
            assert record.store_ms >= int(properties["TIMER_DELIVER_MS"]) == self.due[record.body]
            assert came.setdefault(record.body, record.position) == record.position, "twice"
        assert not self.recalled & came.keys(), "recalled"
        assert self.sent - self.recalled - came.keys() - possible_recalls(made) == set(), "lost"
        assert made.statistics["pending"] == made.statistics["being_delivered"] == made.statistics["damaged"] == 0
        made.broker.store.crash()

    async def step(self, made: Timed) -> None:
        (action,) = self.random.choices(ACTIONS, WEIGHTS)
        self.used.add(action)
        if action == "wait":
            self.clock.ms += self.random.randrange(2000)
        elif action == "fill":
            made.publish("other", b"x" * self.random.randrange(900))
        elif action == "send":
            body = b"%d" % len(self.due)
            self.due[body] = self.clock.ms + self.random.randrange(1, 5000)
            made.publish(body=body, UNIQ_KEY=body.decode(), TIMER_DELIVER_MS=self.due[body])
            self._unflushed.append((self.sent, body))
        elif action == "recall":
            await self.recall(made)
        elif action == "deliver":
            await deliver(made)
        else:
            await self.store(made, action)

    async def recall(self, made: Timed) -> None:
        body = self.random.choice(list(self.due) or [b"none"])
        try:
            end = await made.plugin.recalls.recall("T", out_of(self.due.get(body, 0)), body.decode())
        except MartletError:
            return
        if end:  # otherwise nothing was recalled
            self._unflushed.append((self.recalled, body))

    async def store(self, made: Timed, action: str) -> None:
        store = made.broker.store
        if action == "roll":
            await flush(made)
            await made.broker.turns.finish(made.plugin.timers.roll(0, store.appended))
        store.committer.commit()
        if action == "roll":
            return
        await flush(made)
        for what, body in self._unflushed:
            what.add(body)
        self._unflushed = []
        if action == "save":
            (driven,) = (each for each in made.broker.projections._driven if each.name == "timers")
            await made.broker.projections.snapshots.write(driven)
        elif action == "retire" and len(store.segments.items) > 2:
            await self.retire(made)

    async def retire(self, made: Timed) -> None:
        """Remove the oldest segment, as retention does."""
        store = made.broker.store
        self.seen.update((record.body, record.position) for record in made.records())
        await flush(made)
        end = store.segments.items[-2].end
        await made.broker.turns.finish(made.plugin.timers.roll(0, end))
        store.committer.commit()
        await flush(made)
        made.broker.projections.keeper.released = end
        await store.upkeep.checkpointer.checkpoint()
        self.disk.used_ratio = 0.99
        store.upkeep.retention.look()
        self.disk.used_ratio = 0.1
        self.retired |= store.first_position > 0


async def flush(made: Timed) -> None:
    """Make everything durable and apply it."""
    await made.broker.store.flusher.flush()
    for driven in made.broker.projections._driven:
        await made.broker.projections._catch_up(driven)


async def deliver(made: Timed, count: int = 5) -> bool:
    """Do one turn of the service, for *count* timers; return whether any was due."""
    delivery = made.plugin.timer_delivery
    finish_now(made.plugin.timers.schedule.prepare(made.clock.now_ms()))
    timers = made.plugin.timers.schedule.take(made.clock.now_ms(), count)
    if timers:
        await delivery._deliver(timers)
    return bool(timers)


def possible_recalls(made: Timed) -> set[bytes]:
    """Return the bodies of timers whose recall is stored, acknowledged or not."""
    found = [decode_properties(record.properties) for record in made.records("rmq_sys_wheel_timer")]
    return {each["UNIQ_KEY"].encode() for each in found if "TIMER_DEL_UNIQKEY" in each}


@pytest.mark.parametrize("flush_mode", ["sync", "async"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_timers_survive_a_power_cut_at_every_call(autojump_clock: MockClock, seed: int, flush_mode: str) -> None:
    workload = Workload(FakeDisk(), flush_mode, Random(seed))
    await cut_everywhere(workload)
    await workload.check(workload.disk.after_power_cut(Cut.KILLED, Random(1)), Cut.KILLED)
    if seed == 0 and STEPS >= 80:
        assert workload.used == set(ACTIONS)
        assert workload.retired
        assert workload.recalled
