"""The power is cut at every call that changes the disk: a projection then knows what the log says.

``MARTLET_CRASH_STEPS`` makes the workload longer (default 60 steps); ``MARTLET_CRASH_SEEDS`` runs more of them.
"""

import os
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from tests.state import power_cuts
from tests.state.power_cuts import cut_everywhere
from tests.state.tally import Running, retire, start, stop

from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import message

STEPS = int(os.environ.get("MARTLET_CRASH_STEPS", "60"))
SEEDS = range(int(os.environ.get("MARTLET_CRASH_SEEDS", "1")))
CONFIG: dict[str, Any] = {"segment_bytes": 2048, "page_bytes": 512, "cache_bytes": 2048, "disk_clean_ratio": 0.9}


class Workload(power_cuts.Workload):
    """Random work on a store with a projection; knows which keys were acknowledged."""

    def __init__(self, disk: FakeDisk, flush: str, random: Random) -> None:
        super().__init__(disk, flush)
        self.random = random
        self.sent = 0
        # Key -> topic and log position, once it was durable.
        self.acknowledged: dict[str, tuple[str, int]] = {}
        self.live: set[str] = set()
        self._pending: list[tuple[str, str, int, bool]] = []
        self.deleting = False

    def shared(self) -> Iterable[object]:
        return self.disk, self.random

    def cut_of(self, number: int) -> Cut:
        return list(Cut)[number % 4]  # what it waits for is flushed, whatever the mode

    async def work(self) -> None:
        running = await start(self.disk, **CONFIG, flush=self.flush)
        for _ in range(STEPS):
            await self.step(running)
        await stop(running)

    async def step(self, running: Running) -> None:
        store, roll = running.store, self.random.random()
        if roll < 0.55:
            self._send(running)
        elif roll < 0.75:
            store.committer.commit()
            await store.flusher.flush()
            for key, topic, position, live in self._pending:
                self.acknowledged[key] = topic, position
                if live:
                    self.live.add(key)
            self._pending.clear()
        elif roll < 0.85:
            await store.upkeep.checkpointer.checkpoint()
        elif roll < 0.95:
            store.committer.commit()
            await store.flusher.flush()
            await running.projections.snapshots.write(running.projections._driven[0])
        elif roll < 0.99 and len(store.segments.items) > 2:
            await retire(running, self.disk)
        elif self.sent > 20 and not self.deleting:
            self.deleting = True
            store.deletions.delete_topic("B")

    def _send(self, running: Running) -> None:
        for _ in range(self.random.choice((1, 1, 4))):
            topic = self.random.choice(("A", "A", "Other") if self.deleting else ("A", "B", "Other"))
            key, live = f"k{self.sent}", self.random.random() < 0.1
            self.sent += 1
            body = self.random.randbytes(self.random.randrange(120))
            placed = running.store.writer.append(message(body, topic, "t", "live" if live else "", key), self.sent % 2)
            self._pending.append((key, topic, placed.position, live))

    async def check(self, disk: FakeDisk, kind: Cut) -> None:
        """What was acknowledged and is kept is known, what is live is kept whatever was removed, and no more."""
        running = await start(disk, **CONFIG, flush=self.flush)
        first = running.store.first_position
        known = running.tally.totals(first)
        running.check()
        keys = set().union(*(keys for _, keys in known.values()))
        for key, (topic, position) in self.acknowledged.items():
            if topic == "Other" or (topic == "B" and self.deleting):
                continue
            assert key in keys or (position < first and key not in self.live), f"{key} was acknowledged and is gone"
        running.store.crash()


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_projection_survives_a_power_cut_at_every_call(seed: int, flush: str) -> None:
    assert await cut_everywhere(Workload(FakeDisk(), flush, Random(seed))) > STEPS
