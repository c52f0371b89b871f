"""The power is cut at every call that changes the disk while delayed messages are sent, delivered and moved.

Every message that was durable arrives after the next start, once, and not early. ``MARTLET_CRASH_STEPS`` sends more.
"""

import os
from collections import Counter
from functools import partial
from typing import Any

import pytest
import trio
from tests.state import power_cuts
from tests.state.power_cuts import count_changes, cut_again
from tests.timer.delays import Delays, WallClock, delays
from trio.testing import MockClock

from martlet.broker import Broker
from martlet.message import Message
from martlet.testing.disk import Cut, FakeDisk

STEPS = int(os.environ.get("MARTLET_CRASH_STEPS", "8"))
LEVELS = "1s 2s 4s"
DELAYS_MS = (1000, 2000, 4000)
SMALL: dict[str, Any] = {
    "segment_bytes": 8192,
    "disk_used_ratio_max": 0.8,
    "disk_clean_ratio": 0.85,
}


class Workload(power_cuts.Workload):
    """Sends messages of two levels, stops in order once on the way, and knows which messages are durable."""

    def __init__(self, disk: FakeDisk, flush: str) -> None:
        super().__init__(disk, flush)
        self.clock = WallClock()
        self.sent: list[tuple[str, int]] = []  # body, and the end of its record
        self.durable: set[str] = set()
        self.first = self.last = 0  # the range of the changes that matter
        # When each message is due at the earliest.
        self.due_ms: dict[str, int] = {}

    async def work(self) -> None:
        for half in range(2):
            async with delays(self.disk, self.clock, levels=LEVELS, flush=self.flush, **SMALL) as running:
                running.broker.store.readable_end.on_moved.append(partial(self.note_durable, running))
                for number in range(half * STEPS, half * STEPS + STEPS):
                    self.send(running, f"{number}", 1 + number % 2)
                    await trio.sleep(0.3)

    def send(self, running: Delays, body: str, level: int) -> None:
        self.due_ms[body] = self.clock.now_ms() + DELAYS_MS[level - 1]
        self.sent.append((body, running.send(body, level).end))

    def note_durable(self, running: Delays) -> None:
        if not self.is_cut:
            self.durable |= {body for body, end in self.sent if end <= running.broker.store.readable}

    async def check(self, disk: FakeDisk, kind: Cut) -> None:
        disk.used_ratio = 0.1
        async with delays(disk, self.clock, levels=LEVELS, flush=self.flush, **SMALL) as running:
            await trio.sleep(5)
            records = running.records()
            came = Counter(record.body.decode() for record in records)
            assert set(came) >= self.durable, "a durable message was lost"
            assert set(came.values()) <= {1}, "a message arrived twice"
            for record in records:
                assert record.store_ms >= self.due_ms[record.body.decode()], "a message arrived early"


class Moving(Workload):
    """Sends messages, and others until they are in the first of two segments, which is then removed."""

    moved = 0

    async def work(self) -> None:
        async with delays(self.disk, self.clock, levels=LEVELS, flush=self.flush, **SMALL) as running:
            broker = running.broker
            broker.store.readable_end.on_moved.append(partial(self.note_durable, running))
            broker.topics.ensure("other", 1)
            for number in range(STEPS // 2):
                self.send(running, f"{number}", 3)
            for _ in range(10):
                broker.publish(Message("other", b"x" * 900, b"", 0))
            await trio.sleep(0.01)
            await broker.store.flusher.flush()
            await broker.store.upkeep.checkpointer.checkpoint()
            self.first = self.changes
            await self.remove_first_segment(broker)
            self.last = self.changes
            self.moved += running.statistics["moved_to_timers"]
            assert running.statistics["expired"] == 0
            assert broker.store.first_position == 8192

    async def remove_first_segment(self, broker: Broker) -> None:
        await broker.projections.keeper.release(8192)
        self.disk.used_ratio = 0.9
        broker.store.upkeep.retention.look()
        self.disk.used_ratio = 0.1


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("kind", [Workload, Moving])
async def test_each_durable_message_arrives_once_after_a_power_cut_at_any_call(
    kind: type[Workload], flush: str, autojump_clock: MockClock
) -> None:
    workload = kind(FakeDisk(), flush)
    await count_changes(workload)
    changes = range(workload.first, workload.last or workload.changes)
    await workload.check(workload.disk, Cut.KILLED)
    assert len(changes) >= 5
    assert not isinstance(workload, Moving) or workload.moved == STEPS // 2
    await cut_again(lambda disk: kind(disk, flush), changes)
