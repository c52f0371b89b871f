"""The power is cut at every call that changes the disk while delayed messages are sent, delivered and moved.

Every message that was durable arrives after the next start, once, and not early. ``MARTLET_CRASH_STEPS`` sends more.
"""

import os
from collections import Counter
from functools import partial
from random import Random
from typing import Any

import pytest
import trio
from tests.state.power_cuts import cut_of
from tests.timer.delays import Delays, WallClock, delays
from trio.testing import MockClock

from martlet.broker import Broker
from martlet.message import Message
from martlet.testing.disk import FakeDisk, PowerCut

STEPS = int(os.environ.get("MARTLET_CRASH_STEPS", "8"))
LEVELS = "1s 2s 4s"
DELAYS_MS = (1000, 2000, 4000)
SMALL: dict[str, Any] = {
    "segment_bytes": 8192,
    "disk_used_ratio_max": 0.8,
    "disk_clean_ratio": 0.85,
}


class Workload:
    """Sends messages of two levels, stops in order once on the way, and knows which messages are durable."""

    def __init__(self, flush: str) -> None:
        self.clock = WallClock()
        self.flush = flush
        self.sent: list[tuple[str, int]] = []  # body, and the end of its record
        self.durable: set[str] = set()
        self.is_cut = False
        # Changes of the disk so far, and the range of those that matter.
        self.changes = self.first = self.last = 0
        # When each message is due at the earliest.
        self.due_ms: dict[str, int] = {}

    async def work(self, disk: FakeDisk) -> None:
        for half in range(2):
            async with delays(disk, self.clock, levels=LEVELS, flush=self.flush, **SMALL) as running:
                running.broker.store.on_flushed.append(partial(self.note_durable, running))
                for number in range(half * STEPS, half * STEPS + STEPS):
                    self.send(running, f"{number}", 1 + number % 2)
                    await trio.sleep(0.3)

    def send(self, running: Delays, body: str, level: int) -> None:
        self.due_ms[body] = self.clock.now_ms() + DELAYS_MS[level - 1]
        self.sent.append((body, running.send(body, level).end))

    def note_durable(self, running: Delays) -> None:
        if not self.is_cut:
            self.durable |= {body for body, end in self.sent if end <= running.broker.store.readable}

    def count(self, name: str) -> None:
        self.changes += 1

    async def work_until(self, disk: FakeDisk, number: int) -> None:
        """Work until change *number* of *disk*, counted from 0; all changes from it on fail."""
        left = number

        def cut(name: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                self.is_cut = True
                raise PowerCut

        disk.on_change = cut
        try:
            await self.work(disk)
        except (PowerCut, BaseExceptionGroup):
            if not self.is_cut:
                raise
        disk.on_change = None

    async def check(self, disk: FakeDisk) -> None:
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

    async def work(self, disk: FakeDisk) -> None:
        async with delays(disk, self.clock, levels=LEVELS, flush=self.flush, **SMALL) as running:
            broker = running.broker
            broker.store.on_flushed.append(partial(self.note_durable, running))
            broker.topics.ensure("other", 1)
            for number in range(STEPS // 2):
                self.send(running, f"{number}", 3)
            for _ in range(10):
                broker.publish(Message("other", b"x" * 900, b"", 0))
            await trio.sleep(0.01)
            await broker.store.flusher.flush()
            await broker.store.checkpoint()
            self.first = self.changes
            await self.remove_first_segment(broker, disk)
            self.last = self.changes
            self.moved += running.statistics["moved_to_timers"]
            assert running.statistics["expired"] == 0
            assert broker.store.first_position == 8192

    async def remove_first_segment(self, broker: Broker, disk: FakeDisk) -> None:
        await broker.projections.release(8192)
        disk.used_ratio = 0.9
        broker.store.retention.look()
        disk.used_ratio = 0.1


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("kind", [Workload, Moving])
async def test_each_durable_message_arrives_once_after_a_power_cut_at_any_call(
    kind: type[Workload], flush: str, autojump_clock: MockClock
) -> None:
    disk, workload = FakeDisk(), kind(flush)
    disk.on_change = workload.count
    await workload.work(disk)
    disk.on_change = None
    first, changes = workload.first, workload.last or workload.changes
    await workload.check(disk)
    assert changes - first >= 5
    assert not isinstance(workload, Moving) or workload.moved == STEPS // 2
    for number in range(first, changes):
        disk, workload = FakeDisk(), kind(flush)
        await workload.work_until(disk, number)
        cut = cut_of(number, flush)
        left = disk.after_power_cut(cut, Random(number))
        left.used_ratio = 0.1
        try:
            await workload.check(left)
        except BaseException as error:
            error.add_note(f"{cut.name} at change {number} of {changes}")
            raise
