"""The power is cut at every call that changes the disk while timers are sent, delivered, recalled and moved.

None that was acknowledged is lost, none is delivered twice, early, or after an acknowledged recall.
``MARTLET_CRASH_STEPS`` makes the workload longer (default 80 steps); ``MARTLET_CRASH_SEEDS`` runs more of them.
"""

import os
from functools import partial
from random import Random
from typing import Any

import pytest
from tests.state.power_cuts import Left, copied, cut_everywhere, cut_of, opened
from tests.timer.timer_talk import Timed, install
from trio.testing import MockClock

from martlet.errors import MartletError
from martlet.message import decode_properties
from martlet.runtime.steps import finish_now
from martlet.testing.disk import FakeDisk
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


class Workload:
    """Knows what is durable: timers, deliveries and recalls."""

    def __init__(self, disk: FakeDisk, random: Random, clock: ManualClock) -> None:
        self.disk = disk
        self.random = random
        self.clock = clock
        self.due: dict[bytes, int] = {}  # of all timers
        self.sent: set[bytes] = set()  # durable ones
        self.recalled: set[bytes] = set()
        self.seen: dict[bytes, int] = {}  # position of each delivery that retention may have removed
        self.used: set[str] = set()
        self.retired = False
        self._unflushed: list[tuple[set[bytes], bytes]] = []

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
        store.commit()
        if action == "roll":
            return
        await flush(made)
        for what, body in self._unflushed:
            what.add(body)
        self._unflushed = []
        if action == "save":
            (driven,) = (each for each in made.broker.projections._driven if each.name == "timers")
            await made.broker.projections._save(driven)
        elif action == "retire" and len(store.segments.items) > 2:
            await self.retire(made)

    async def retire(self, made: Timed) -> None:
        """Remove the oldest segment, as retention does."""
        store = made.broker.store
        self.seen.update((record.body, record.position) for record in made.records())
        await flush(made)
        end = store.segments.items[-2].end
        await made.broker.turns.finish(made.plugin.timers.roll(0, end))
        store.commit()
        await flush(made)
        made.broker.projections.released = end
        await store.checkpoint()
        self.disk.used_ratio = 0.99
        store.retention.look()
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


async def start(disk: FakeDisk, clock: ManualClock, flush: str) -> Timed:
    plugin = TimerPlugin(TimerConfig())

    def add(broker: Any) -> None:
        broker.projections._driven.clear()  # the others take most of the time of a start
        for projection in install(broker, plugin, ("T", "other")):
            broker.projections.add("timer", projection)
        plugin.timer_clock = DampedClock(clock, clock.now_ms)

    broker = await opened(disk, clock, flush, install=add, **CONFIG)
    return Timed(broker, plugin, clock)


async def work(disk: FakeDisk, workload: Workload, flush_mode: str) -> None:
    made = await start(disk, workload.clock, flush_mode)
    for _ in range(STEPS):
        await workload.step(made)
    made.broker.store.commit()
    await flush(made)
    made.broker.projections.save()
    await made.broker.store.close()


async def check(disk: FakeDisk, workload: Workload, flush_mode: str) -> None:
    """Start on what is left, deliver everything, and look at what came."""
    clock = ManualClock(workload.clock.ms)
    made = await start(disk, clock, flush_mode)
    for _ in range(2):
        while await deliver(made, 100):
            await flush(made)
        clock.ms += 10_000
    came = dict(workload.seen)
    for record in made.records():
        properties = decode_properties(record.properties)
        assert record.store_ms >= int(properties["TIMER_DELIVER_MS"]) == workload.due[record.body]
        assert came.setdefault(record.body, record.position) == record.position, "twice"
    assert not workload.recalled & came.keys(), "recalled"
    assert workload.sent - workload.recalled - came.keys() - set(possible_recalls(made)) == set(), "lost"
    assert made.statistics["pending"] == made.statistics["being_delivered"] == made.statistics["damaged"] == 0
    made.broker.store.crash()


def possible_recalls(made: Timed) -> list[bytes]:
    """Return the bodies of timers whose recall is stored, acknowledged or not."""
    found = [decode_properties(record.properties) for record in made.records("rmq_sys_wheel_timer")]
    return [each["UNIQ_KEY"].encode() for each in found if "TIMER_DEL_UNIQKEY" in each]


async def cuts_of(seed: int, flush_mode: str) -> list[Left[Workload]]:
    disk = FakeDisk()
    workload = Workload(disk, Random(seed), ManualClock())
    cuts = await cut_everywhere(
        disk,
        partial(work, disk, workload, flush_mode),
        lambda: copied(workload, disk, workload.random),
        partial(cut_of, flush=flush_mode),
    )
    await check(disk.after_power_cut(cut_of(0, "async"), Random(1)), workload, flush_mode)
    if seed == 0 and STEPS >= 80:
        assert workload.used == set(ACTIONS)
        assert workload.retired
        assert workload.recalled
    return cuts


@pytest.mark.parametrize("flush_mode", ["sync", "async"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_timers_survive_a_power_cut_at_every_call(autojump_clock: MockClock, seed: int, flush_mode: str) -> None:
    for cut in await cuts_of(seed, flush_mode):
        try:
            await check(cut.disk, cut.known, flush_mode)
        except BaseException as error:
            error.add_note(f"seed {seed}, {cut.kind.name} at change {cut.number}")
            raise
