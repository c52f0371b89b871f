"""The power is cut at every call that changes the disk while external transactions are staged, committed and moved.

Small ones are one atomic group, large ones several. ``MARTLET_CRASH_STEPS`` makes the random work longer (default 12
steps); ``MARTLET_CRASH_SEEDS`` runs more of it.
"""

import os
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import pytest
from tests.state.power_cuts import Workload, cut_everywhere
from tests.tx.external_talk import OTHER, QUERY, TOPIC, Sink, hurt, sink

from martlet.errors import Reason, Refused
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import ManualClock

LENGTH = int(os.environ.get("MARTLET_CRASH_STEPS", "12"))
SEEDS = range(int(os.environ.get("MARTLET_CRASH_SEEDS", "1")))
STEPS = ("begin", "small", "large", "prepare", "commit", "again", "abort", "roll", "save")
WEIGHTS = (1, 4, 3, 2, 5, 1, 1, 3, 1)
PARTS = {"small": (1, 3), "large": (2, 24)}  # chunks, and messages of each, of which about 20 are a group


class Work(Workload):
    """Does the steps *names*, and remembers what was asked for and what was acknowledged.

    *damage* is done to what a cut leaves.
    """

    def __init__(self, disk: FakeDisk, flush: str, names: Sequence[str], damage: str = "") -> None:
        super().__init__(disk, flush)
        self.names = names
        self.damage = damage
        self.clock = ManualClock()
        self.sequence = 0
        self.epoch = 0
        self.asked_epoch = 0
        # What the current transaction has: its parts, and what was staged in each topic, in order.
        self.parts: list[tuple[str, int]] = []
        self.messages: dict[str, list[str]] = {TOPIC: [], OTHER: []}
        # What must be stored, and what a commit without an answer may have stored after it.
        self.stored: dict[str, list[str]] = {TOPIC: [], OTHER: []}
        self.doubtful: dict[str, list[str]] = {TOPIC: [], OTHER: []}
        self.doubtful_parts: list[tuple[str, int]] = []
        # What was asked to be prepared of the current transaction, and whether that was acknowledged.
        self.held_parts: list[tuple[str, int]] = []
        self.held_messages: dict[str, list[str]] = {TOPIC: [], OTHER: []}
        self.is_held = False
        self.number = 0
        self.found: Sink | None = None

    def shared(self) -> Iterable[object]:
        return self.disk, self.found

    async def work(self) -> None:
        self.found = await sink(self.disk, self.clock, self.flush)
        for name in self.names:
            await self.step(name)
        self.found.broker.projections.save()
        await self.found.store.close()

    async def step(self, name: str) -> None:
        found = self.found
        assert found is not None
        if name == "begin":
            await self.begin(found)
        elif name in PARTS:
            await self.stage(found, *PARTS[name])
        elif name == "prepare":
            await self.prepare(found)
        elif name == "commit":
            await self.commit(found)
        elif name == "again" and self.sequence:
            assert (await found.commit(self.sequence - 1, [], epoch=self.epoch)).is_duplicate
        elif name == "abort":
            await found.abort(self.sequence, epoch=self.epoch)
            self.forget_staged()
        elif name == "roll":
            await found.do(lambda: found.broker.turns.finish(found.state.roll(0, found.store.appended)))
        elif name == "save":
            for driven in found.broker.projections._driven:
                await found.broker.projections.snapshots.write(driven)

    async def begin(self, found: Sink) -> None:
        self.asked_epoch = self.epoch + 1
        begun = await found.begin_at(f"run-{self.asked_epoch}")
        self.epoch = begun.epoch
        assert (begun.epoch, begun.committed) == (self.asked_epoch, self.sequence - 1)
        self.forget_staged()
        if self.is_held:
            assert begun.prepared == self.sequence
        if begun.prepared >= 0:
            await self.take_over(found)

    async def prepare(self, found: Sink) -> None:
        self.held_parts = list(self.parts)
        self.held_messages = {topic: list(bodies) for topic, bodies in self.messages.items()}
        await found.prepare(self.sequence, self.held_parts, epoch=self.epoch)
        self.is_held = True

    async def take_over(self, found: Sink) -> None:
        """End what an older run has prepared."""
        if self.sequence % 2:
            self.doubtful, self.doubtful_parts = self.held_messages, self.held_parts
            answer = await found.commit(self.sequence, None, epoch=self.epoch)
            assert answer.messages == sum(map(len, self.held_messages.values()))
            self.settle_commit()
            self.check_stored(found)
        else:
            self.is_held = False
            assert await found.abort_prepared(self.sequence, epoch=self.epoch) == len(self.held_parts)

    def forget_staged(self) -> None:
        self.parts, self.messages = [], {TOPIC: [], OTHER: []}

    async def stage(self, found: Sink, chunks: int, count: int) -> None:
        part, staged = f"part-{self.number}", list[tuple[str, list[str]]]()
        for chunk in range(chunks):
            topic = (TOPIC, OTHER)[self.number % 2]
            bodies = [f"{self.number}-{number}" for number in range(count)]
            self.number += 1
            await found.stage(self.sequence, part, bodies, chunk=chunk, epoch=self.epoch, topic=topic)
            staged.append((topic, bodies))
        self.parts.append((part, chunks))
        for topic, bodies in staged:
            self.messages[topic] += bodies

    async def commit(self, found: Sink) -> None:
        parts, self.doubtful_parts = self.parts, self.parts
        self.doubtful = self.messages
        answer = await found.commit(self.sequence, parts, epoch=self.epoch)
        assert (answer.sequence, answer.is_duplicate) == (self.sequence, False)
        assert answer.messages == sum(map(len, self.messages.values()))
        self.settle_commit()
        self.check_stored(found)

    def settle_commit(self) -> None:
        for topic, bodies in self.doubtful.items():
            self.stored[topic] = self.stored[topic] + bodies
        self.doubtful, self.doubtful_parts = {TOPIC: [], OTHER: []}, []
        self.is_held = False
        self.sequence += 1
        self.forget_staged()

    def check_stored(self, found: Sink) -> None:
        for topic in TOPIC, OTHER:
            assert found.stored(topic) == self.stored[topic]

    # ---- what must hold after a crash

    async def check(self, disk: FakeDisk, kind: Cut) -> None:
        """Check that each transaction is there whole or not at all, and that the producer can go on."""
        hurt(disk, self.damage)
        found = await sink(disk, self.clock, self.flush)
        await found.go_on()
        producer = found.state.producers.get(("", QUERY))
        committed = producer.committed if producer is not None else -1
        if committed == self.sequence:
            self.settle_commit()  # the answer was lost
        self.check_stored(found)
        assert committed == self.sequence - 1
        epoch = producer.epoch if producer is not None else 0
        assert epoch in (self.epoch, self.asked_epoch)
        if epoch == self.epoch and self.parts:
            self.check_parts(found)
        await self.finish(found, epoch)

    def check_parts(self, found: Sink) -> None:
        """What was acknowledged as staged is there, unless an abort or a newer run was asked for."""
        there = found.parts()
        for part, chunks in self.parts:
            assert there[self.sequence, part] in (chunks, 0)

    async def finish(self, found: Sink, epoch: int) -> None:
        """Commit what is staged, then a new transaction of a new run; the old run can do neither."""
        self.epoch = epoch
        there = found.parts()
        if self.parts and all(there[self.sequence, part] == chunks for part, chunks in self.parts):
            await self.commit(found)
        await self.begin(found)
        with pytest.raises(Refused) as refused:
            await found.stage(self.sequence, "late", ["x"], epoch=self.epoch - 1)
        assert refused.value.reason is Reason.FENCED
        await self.stage(found, *PARTS["large"])
        await self.commit(found)
        assert not found.state.parts
        assert not found.state.chunks
        assert found.state.messages == 0
        found.store.crash()


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("between", ["", "save", "roll", "begin", "abort"])
async def test_a_transaction_is_stored_whole_or_not_at_all_wherever_the_power_is_cut(size: str, between: str) -> None:
    names = ["begin", size, *([between] if between else []), size, "commit", "again"]
    assert await cut_everywhere(Work(FakeDisk(), "sync", names)) > 20


@pytest.mark.parametrize("first", ["", "commit"])  # the transaction's number decides what the next run does
@pytest.mark.parametrize("between", ["save", "roll", "abort"])
async def test_what_is_prepared_is_kept_for_the_next_run_wherever_the_power_is_cut(first: str, between: str) -> None:
    names = ["begin", *([first] if first else []), "large", "prepare", "small", between, "begin", "small", "commit"]
    assert await cut_everywhere(Work(FakeDisk(), "sync", names)) > 20


@pytest.mark.parametrize(("size", "damage"), [("small", "zeroed"), ("large", "removed"), ("large", "zeroed")])
async def test_a_transaction_survives_the_loss_of_snapshots(size: str, damage: str) -> None:
    names = [size, "save", "commit", "save", "small"]
    assert await cut_everywhere(Work(FakeDisk(), "async", names, damage)) > 20


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_random_steps_lead_to_one_outcome_wherever_the_power_is_cut(seed: int, flush: str) -> None:
    names: list[Any] = Random(seed).choices(STEPS, WEIGHTS, k=LENGTH)
    assert await cut_everywhere(Work(FakeDisk(), flush, names), seed % 3) > LENGTH
