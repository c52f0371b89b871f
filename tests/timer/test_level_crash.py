"""The power is cut at every call that changes the disk while delayed messages are sent and delivered.

Every message that was durable arrives after the next start, once, and not early. ``MARTLET_CRASH_STEPS`` sends more.
"""

import os
from collections import Counter
from functools import partial
from random import Random

import pytest
import trio
from tests.state.power_cuts import count_changes, cut_of
from tests.timer.delays import Delays, WallClock, delays
from trio.testing import MockClock

from martlet.testing.disk import FakeDisk, PowerCut

STEPS = int(os.environ.get("MARTLET_CRASH_STEPS", "8"))
LEVELS = "1s 2s"
DELAYS_MS = (1000, 2000)


class Workload:
    """Sends messages of two levels, stops in order once on the way, and knows which messages are durable."""

    def __init__(self, flush: str) -> None:
        self.clock = WallClock()
        self.flush = flush
        self.sent: list[tuple[str, int]] = []  # body, and the end of its record
        self.durable: set[str] = set()
        self.is_cut = False
        # When each message is due at the earliest.
        self.due_ms: dict[str, int] = {}

    async def work(self, disk: FakeDisk) -> None:
        for half in range(2):
            async with delays(disk, self.clock, levels=LEVELS, flush=self.flush, segment_bytes=8192) as running:
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
        async with delays(disk, self.clock, levels=LEVELS, flush=self.flush, segment_bytes=8192) as running:
            await trio.sleep(5)
            records = running.records()
            came = Counter(record.body.decode() for record in records)
            assert set(came) >= self.durable, "a durable message was lost"
            assert set(came.values()) <= {1}, "a message arrived twice"
            for record in records:
                assert record.store_ms >= self.due_ms[record.body.decode()], "a message arrived early"


@pytest.mark.parametrize("flush", ["sync", "async"])
async def test_each_durable_message_arrives_once_after_a_power_cut_at_any_call(
    flush: str, autojump_clock: MockClock
) -> None:
    disk, workload = FakeDisk(), Workload(flush)
    changes = await count_changes(disk, partial(workload.work, disk))
    disk.on_change = None
    await workload.check(disk)
    assert changes > 2 * STEPS
    for number in range(changes):
        disk, workload = FakeDisk(), Workload(flush)
        await workload.work_until(disk, number)
        kind = cut_of(number, flush)
        try:
            await workload.check(disk.after_power_cut(kind, Random(number)))
        except BaseException as error:
            error.add_note(f"{kind.name} at change {number} of {changes}")
            raise
