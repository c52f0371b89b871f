"""The power is cut at every call that changes the disk while a shared group works: what was settled stays settled.

``MARTLET_CRASH_STEPS`` makes the workload longer (default 60 steps); ``MARTLET_CRASH_SEEDS`` runs more of them.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import trio
from tests.state import power_cuts
from tests.state.group_talk import Handles, drain, handles, join
from tests.state.power_cuts import cut_everywhere, opened
from tests.stored import records_of

from martlet.broker import Broker
from martlet.delivery.feed import Feed
from martlet.delivery.routing.selection import Selection
from martlet.errors import Refused
from martlet.groups.member import Member
from martlet.groups.queues import group_source
from martlet.groups.queues.finder import MessageSelection
from martlet.message import Message
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import ManualClock

STEPS = int(os.environ.get("MARTLET_CRASH_STEPS", "60"))
SEEDS = range(int(os.environ.get("MARTLET_CRASH_SEEDS", "1")))
CONFIG: dict[str, Any] = {"segment_bytes": 8192, "page_bytes": 512, "cache_bytes": 8192}
ACTIONS = ("publish", "collect", "ack", "nack", "renew", "leave", "keep", "atomic", "flush", "commit", "save", "roll")
WEIGHTS = [6, 8, 8, 3, 3, 2, 1, 4, 5, 4, 2, 1]
DAY_MS = 86_400_000
BY_NAME = Selection("names a", None, lambda record: record.property("TAGS") == "a")


class Workload(power_cuts.Workload):
    """Random work of a group, which takes some names of the topic or all; knows what must be there after a crash."""

    def __init__(self, disk: FakeDisk, flush: str, random: Random, *, by_name: bool) -> None:
        super().__init__(disk, flush)
        self.by_name = by_name
        self.unwanted: set[int] = set()
        self.random = random
        self.clock = ManualClock()
        self.published = 0
        self.held: dict[int, int] = {}
        self.settled: set[int] = set()
        # What was settled or published, and is durable.
        self.durable_settled: set[int] = set()
        self.durable_published = 0
        self.began_durably = not by_name  # else the group's first member joined, and that is durable
        # Offsets that were acknowledged together with a message whose body is the offset.
        self.atomic: set[int] = set()
        self.member: Member | None = None
        self.number = 0

    def shared(self) -> Iterable[object]:
        return self.disk, self.random, self.member

    async def work(self) -> None:
        broker = await opened(self.disk, self.clock, self.flush, "t", "out", **CONFIG)
        for _ in range(STEPS):
            await self.step(broker)
        broker.projections.save()
        await broker.store.close()

    async def step(self, broker: Broker) -> None:
        (action,) = self.random.choices((*ACTIONS, "reach"), (*WEIGHTS, 3 * self.by_name))
        self.clock.ms += self.random.randrange(20)
        if self.member is None:
            self.number += 1
            self.member = self.join(broker, keep=f"holder {self.number}", lease_s=3600)
        if action in ("publish", "commit", "flush", "save", "roll", "reach"):
            await self.store(broker, action)
        elif action in ("leave", "keep"):
            self.member.leave(keep=action == "keep")
            self.member = None
            if action == "leave":
                self.held.clear()
        elif action == "collect":
            self.held |= await self.collect(broker, self.member)
        elif self.held:
            self.settle(broker, self.member, action)

    def join(self, broker: Broker, **more: Any) -> Member:
        return (
            join(broker, BY_NAME, MessageSelection(feed_of(broker), "a"), **more)
            if self.by_name
            else join(broker, **more)
        )

    async def collect(self, broker: Broker, member: Member) -> Handles:
        found: Handles = {}
        while True:
            async with trio.open_nursery() as nursery:
                while feed_of(broker).catch_up.is_sweeping:
                    await broker.cursors.sweep(nursery)
            more = handles((await drain(member))[1])
            found |= more
            if not (more or feed_of(broker).catch_up.is_sweeping):
                return found

    async def store(self, broker: Broker, action: str) -> None:
        if action == "publish":
            for _ in range(self.random.randrange(1, 6)):
                name = self.random.choice(("a", "a", "b")) if self.by_name else "a"
                if name == "b":
                    self.unwanted.add(self.published)
                self.published += 1
                broker.publish(Message("t", b"x" * self.random.randrange(9), f"TAGS\x01{name}\x02".encode(), 0))
        elif action == "roll":
            with suppress(Refused):  # while acknowledgements are under way
                for _ in broker.shared_groups.state.roll(0, broker.store.appended):
                    pass
        elif action == "reach" and self.member is not None:
            broker.shared_groups.notes.note_reached()
            self.member.group.source.reach()
        broker.store.committer.commit()
        if action in ("flush", "save"):
            await broker.store.flusher.flush()
            self.durable_settled |= self.settled
            self.durable_published = self.published
            self.began_durably = True
        if action == "save":
            await broker.projections.snapshots.write(broker.projections._driven[0])

    def settle(self, broker: Broker, member: Member, action: str) -> None:
        shared_group = member.group
        for offset in self.random.sample(sorted(self.held), self.random.randrange(1, 1 + min(len(self.held), 5))):
            generation = self.held.pop(offset)
            if action == "renew":
                self.held[offset] = shared_group.renew(0, offset, generation, self.random.choice((10, 7200)))
                assert self.held[offset] > generation
            elif action == "nack":
                assert shared_group.nack(0, offset, generation)
            elif action == "ack":
                assert shared_group.ack(0, offset, generation)
                self.settled.add(offset)
            else:
                note = shared_group.acknowledgement(0, offset, generation)
                broker.publish_all([Message("out", b"%d" % offset, queue_id=0)], atomic=True, notes=[note])
                self.settled.add(offset)
                self.atomic.add(offset)

    async def check(self, disk: FakeDisk, kind: Cut) -> None:
        """What was settled does not come again, all else does."""
        broker = await opened(disk, ManualClock(self.clock.ms + DAY_MS), self.flush, "t", "out", **CONFIG)
        member = self.join(broker, credit=100_000)
        came = set(await self.collect(broker, member))
        assert not came & (self.durable_settled | self.unwanted)
        everything = set(range(self.durable_published)) - self.unwanted if self.began_durably else came
        assert everything - came <= self.settled
        out = {int(record.body) for record in records_of(broker.store, "out")}
        for offset in self.atomic & everything:
            assert (offset in out) != (offset in came), f"message {offset} and its result are not one"
        broker.store.crash()


def feed_of(broker: Broker) -> Feed:
    """Return the one feed of the broker."""
    feeds = list(broker.cursors._feeds)
    return feeds[0] if feeds else broker.cursors.open(["t"])


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_group_survives_a_power_cut_at_every_call(
    seed: int, by_name: bool, flush: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_source, "REACH_BYTES", 100)
    monkeypatch.setattr(group_source, "REACH_BYTES_AT_END", 100)
    workload = Workload(FakeDisk(), flush, Random(seed), by_name=by_name)
    assert await cut_everywhere(workload) > STEPS
    assert workload.atomic
    assert len(workload.settled) > len(workload.atomic)
