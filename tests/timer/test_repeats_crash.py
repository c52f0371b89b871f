"""The power is cut at every call that changes the disk while messages are repeated, ended and moved.

Each acknowledged message comes exactly as often as it should, and not again after its end was acknowledged.
``MARTLET_CRASH_STEPS`` makes the workload longer (default 80 steps); ``MARTLET_CRASH_SEEDS`` runs more of them.
"""

from collections import Counter
from random import Random
from unittest.mock import Mock

import pytest
from tests.state.power_cuts import cut_everywhere
from tests.timer.test_timer_crash import ACTIONS, SEEDS, Workload, deliver, flush, possible_recalls
from tests.timer.timer_talk import Timed
from trio.testing import MockClock

from martlet.errors import MartletError
from martlet.message import decode_properties
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import ManualClock
from martlet_timer.plugin import TimerPlugin

REPEAT = 3
WEIGHTS = (4, 9, 1, 2, 5, 2, 4, 9, 3)


class RepeatedWorkload(Workload):
    """Knows which repeated messages are durable (``sent``), and which were ended (``recalled``).

    ``due`` has the time of each message, ``came`` the copies that retention may have removed.
    """

    def __init__(self, disk: FakeDisk, flush: str, random: Random) -> None:
        super().__init__(disk, flush, random)
        self.came: dict[str, bytes] = {}  # body by unique key

    def set_clock(self, plugin: TimerPlugin, clock: ManualClock) -> None:
        plugin.elapsed = Mock(ms=clock.now_ms)  # so that no step of the clock is a jump

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

    async def check(self, disk: FakeDisk, kind: Cut) -> None:
        """Start on what is left, deliver everything to its end, and count what came."""
        clock = ManualClock(self.clock.ms)
        made = await self.start(disk, clock)
        before = copies(made)
        await flush(made)
        pending = {key.removeprefix("T+").encode() for key in made.plugin.timers.repeated.newest}
        assert made.statistics["pending"] == len(pending), "two timers of one message"
        assert not self.recalled & pending, "ended"
        for _ in range(REPEAT + 3):
            while await deliver(made, 100):
                await flush(made)
            clock.ms += 3000
        after = copies(made)
        came = Counter((self.came | after).values())
        assert all(count <= REPEAT + 1 for count in came.values()), "too often"
        later = {body for key, body in after.items() if key not in before}
        assert not self.recalled & later, "after its end"
        whole = {body for body, count in came.items() if count == REPEAT + 1}
        assert self.sent - self.recalled - possible_recalls(made) - whole == set(), "lost"
        assert made.statistics["pending"] == made.statistics["repeated"] == made.statistics["being_delivered"] == 0
        assert made.statistics["damaged"] == 0
        made.broker.store.crash()


def copies(made: Timed) -> dict[str, bytes]:
    """Return the body of each copy that is readable, by its unique key."""
    found = [(decode_properties(record.properties)["UNIQ_KEY"], record.body) for record in made.records()]
    assert len(dict(found)) == len(found), "twice"
    return dict(found)


@pytest.mark.parametrize("flush_mode", ["sync", "async"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_repeated_messages_survive_a_power_cut_at_every_call(
    autojump_clock: MockClock, seed: int, flush_mode: str
) -> None:
    workload = RepeatedWorkload(FakeDisk(), flush_mode, Random(seed))
    await cut_everywhere(workload)
    await workload.check(workload.disk.after_power_cut(Cut.KILLED, Random(1)), Cut.KILLED)
