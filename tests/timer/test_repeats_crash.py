"""The power is cut at every call that changes the disk while messages are repeated, ended and moved.

Each acknowledged message comes exactly as often as it should, and not again after its end was acknowledged.
``MARTLET_CRASH_STEPS`` makes the workload longer (default 80 steps); ``MARTLET_CRASH_SEEDS`` runs more of them.
"""

from collections import Counter
from functools import partial
from random import Random
from unittest.mock import Mock

import pytest
from tests.state.power_cuts import Left, copied, cut_everywhere, cut_of, opened
from tests.timer.test_timer_crash import ACTIONS, CONFIG, SEEDS, STEPS, Workload, deliver, flush
from tests.timer.timer_talk import Timed, install
from trio.testing import MockClock

from martlet.broker import Broker
from martlet.errors import MartletError
from martlet.message import decode_properties
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import ManualClock
from martlet_timer.config import TimerConfig
from martlet_timer.plugin import TimerPlugin

REPEAT = 3
WEIGHTS = (4, 9, 1, 2, 5, 2, 4, 9, 3)


class RepeatedWorkload(Workload):
    """Knows which repeated messages are durable (``sent``), and which were ended (``recalled``).

    ``due`` has the time of each message, ``came`` the copies that retention may have removed.
    """

    def __init__(self, disk: FakeDisk, random: Random, clock: ManualClock) -> None:
        super().__init__(disk, random, clock)
        self.came: dict[str, bytes] = {}  # body by unique key

    async def step(self, made: Timed) -> None:
        (action,) = self.random.choices(ACTIONS, WEIGHTS)
        self.used.add(action)
        if action == "wait":
            self.clock.ms += self.random.randrange(1500)
        elif action == "fill":
            made.publish("other", b"x" * self.random.randrange(900))
        elif action == "send":
            self.send(made)
        elif action == "recall":
            await self.recall(made)
        elif action == "deliver":
            await deliver(made)
        else:
            await self.store(made, action)

    def send(self, made: Timed) -> None:
        body = b"%d" % len(self.due)
        self.due[body] = self.clock.ms
        made.publish(
            body=body,
            UNIQ_KEY=body.decode(),
            TIMER_PERIOD_MS=self.random.randrange(100, 1500),
            TIMER_REPEAT=REPEAT,
        )
        self._unflushed.append((self.sent, body))

    async def recall(self, made: Timed) -> None:
        body = self.random.choice(list(self.due) or [b"none"])
        try:
            end = made.plugin.recalls.end_repeated("T", body.decode())
        except MartletError:
            return
        if end:
            self._unflushed.append((self.recalled, body))

    async def retire(self, made: Timed) -> None:
        self.came |= copies(made)
        await super().retire(made)


def copies(made: Timed) -> dict[str, bytes]:
    """Return the body of each copy that is readable, by its unique key."""
    found = [(decode_properties(record.properties)["UNIQ_KEY"], record.body) for record in made.records()]
    assert len(dict(found)) == len(found), "twice"
    return dict(found)


async def start(disk: FakeDisk, clock: ManualClock, flush_mode: str) -> Timed:
    plugin = TimerPlugin(TimerConfig())
    plugin.elapsed = Mock(ms=clock.now_ms)  # so that no step of the clock is a jump

    def add(broker: Broker) -> None:
        broker.projections._driven.clear()  # the others take most of the time of a start
        for projection in install(broker, plugin, ("T", "other")):
            broker.projections.add("timer", projection)

    return Timed(await opened(disk, clock, flush_mode, install=add, **CONFIG), plugin, clock)


async def work(disk: FakeDisk, workload: RepeatedWorkload, flush_mode: str) -> None:
    made = await start(disk, workload.clock, flush_mode)
    for _ in range(STEPS):
        await workload.step(made)
    made.broker.store.commit()
    await flush(made)
    made.broker.projections.save()
    await made.broker.store.close()


async def check(disk: FakeDisk, workload: RepeatedWorkload, flush_mode: str) -> None:
    """Start on what is left, deliver everything to its end, and count what came."""
    clock = ManualClock(workload.clock.ms)
    made = await start(disk, clock, flush_mode)
    before = copies(made)
    await flush(made)
    pending = {key.removeprefix("T+").encode() for key in made.plugin.timers.repeated.newest}
    assert made.statistics["pending"] == len(pending), "two timers of one message"
    assert not workload.recalled & pending, "ended"
    for _ in range(REPEAT + 3):
        while await deliver(made, 100):
            await flush(made)
        clock.ms += 3000
    after = copies(made)
    came = Counter((workload.came | after).values())
    assert all(count <= REPEAT + 1 for count in came.values()), "too often"
    later = {body for key, body in after.items() if key not in before}
    assert not workload.recalled & later, "after its end"
    whole = {body for body, count in came.items() if count == REPEAT + 1}
    assert workload.sent - workload.recalled - possible_ends(made) - whole == set(), "lost"
    assert made.statistics["pending"] == made.statistics["repeated"] == made.statistics["being_delivered"] == 0
    assert made.statistics["damaged"] == 0
    made.broker.store.crash()


def possible_ends(made: Timed) -> set[bytes]:
    """Return the bodies of messages whose end is stored, acknowledged or not."""
    found = [decode_properties(record.properties) for record in made.records("rmq_sys_wheel_timer")]
    return {each["UNIQ_KEY"].encode() for each in found if "TIMER_DEL_UNIQKEY" in each}


async def cuts_of(seed: int, flush_mode: str) -> list[Left[RepeatedWorkload]]:
    disk = FakeDisk()
    workload = RepeatedWorkload(disk, Random(seed), ManualClock())
    cuts = await cut_everywhere(
        disk,
        partial(work, disk, workload, flush_mode),
        lambda: copied(workload, disk, workload.random),
        partial(cut_of, flush=flush_mode),
    )
    await check(disk.after_power_cut(cut_of(0, "async"), Random(1)), workload, flush_mode)
    return cuts


@pytest.mark.parametrize("flush_mode", ["sync", "async"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_repeated_messages_survive_a_power_cut_at_every_call(
    autojump_clock: MockClock, seed: int, flush_mode: str
) -> None:
    for cut in await cuts_of(seed, flush_mode):
        try:
            await check(cut.disk, cut.known, flush_mode)
        except BaseException as error:
            error.add_note(f"seed {seed}, {cut.kind.name} at change {cut.number}")
            raise
