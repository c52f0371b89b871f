"""Power cuts at every call that changes the disk break no promise, add no message and split no group.

``MARTLET_CRASH_STEPS`` makes the workload longer (default 60 steps); ``MARTLET_CRASH_SEEDS`` runs more of them.
"""

import os
from collections import defaultdict
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from random import Random

import pytest
from tests.state.power_cuts import Workload, cut_everywhere

from martlet.message import Message, Placed
from martlet.records.codec import decode_records
from martlet.store import Store
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import HOST, ManualClock, append_batch, append_group, message, small_config

STEPS = int(os.environ.get("MARTLET_CRASH_STEPS", "60"))
SEEDS = range(int(os.environ.get("MARTLET_CRASH_SEEDS", "1")))
DIRECTORY = Path("/data/store")
CONFIG = small_config(segment_bytes=2048, page_bytes=512, cache_bytes=2048, disk_clean_ratio=0.9)

Place = tuple[str, int, int]


class Ledger:
    """What producers and consumers of a store know; the store must agree with it after any crash."""

    def __init__(self) -> None:
        self.sent: dict[Place, set[bytes]] = defaultdict(set)
        self.acknowledged: dict[Place, tuple[bytes, int]] = {}
        self.pending: list[tuple[Place, bytes, int]] = []
        self.seen: dict[Place, tuple[bytes, int]] = {}
        self.deleting: set[str] = set()
        # Batches and atomic groups: place and body of each member.
        self.groups: list[list[tuple[Place, bytes]]] = []

    def promised(self) -> dict[Place, tuple[bytes, int]]:
        """Return what must be there if the power is cut now: body and log position."""
        return self.seen | self.acknowledged

    def check(self, store: Store) -> dict[Place, bytes]:
        """Compare with everything that *store* holds, and return that."""
        found = contents(store)
        start = store.first_position
        for place, (body, position) in self.promised().items():
            if position >= start and place[0] not in self.deleting:
                assert found.get(place) == body, f"{place} was acknowledged or seen and is gone"
        for place, body in found.items():
            assert body in self.sent[place], f"{place} holds {body!r}, which was never sent there"
        for group in self.groups:
            members = [found.get(place) == body for place, body in group if place[0] not in self.deleting]
            assert all(members) or not any(members), f"of the group {group} only a part is there: {members}"
        return found


def contents(store: Store) -> dict[Place, bytes]:
    """Every readable message by its place."""
    found: dict[Place, bytes] = {}
    for queue in store.queues.all():
        offset = queue.first_offset
        while offset < store.readers.end_offset(queue):
            result = store.readers.read(queue, offset, 100, 10**6)
            assert result.next_offset > offset
            for record in decode_records(b"".join(result.pieces)):
                place = (queue.topic, record.queue_id, record.queue_offset)
                assert record.topic == queue.topic or queue.light
                assert record.queue_id == queue.queue_id
                assert offset <= record.queue_offset < result.next_offset
                found[place] = record.body
            offset = result.next_offset
    return found


class Traffic:
    """Random operations on a store; a ledger records what was promised."""

    def __init__(self, store: Store, ledger: Ledger, random: Random, clock: ManualClock) -> None:
        self.store = store
        self.ledger = ledger
        self.random = random
        self.clock = clock

    def send(self) -> None:
        topic, queue_id = self.random.choice(("A", "B", "C")), self.random.randrange(2)
        if topic in self.ledger.deleting:
            return
        count = self.random.choice((1, 1, 1, 5))
        messages = [
            message(
                self.random.randbytes(8 + self.random.randrange(192)), topic, "t", "k1 k2", f"U{self.random.random()}"
            )
            for _ in range(count)
        ]
        places = self.expect(messages, [queue_id] * count)
        self.note(messages, places, append_batch(self.store, messages, queue_id))

    def send_group(self) -> None:
        """Send messages of several topics that belong together, at times larger than a page."""
        topics = [topic for topic in "ABC" if topic not in self.ledger.deleting]
        messages = [
            message(self.random.randbytes(self.random.choice((9, 30, 300))), self.random.choice(topics), keys="k1")
            for _ in range(self.random.choice((2, 3, 4)))
        ]
        queue_ids = [self.random.randrange(2) for _ in messages]
        places = self.expect(messages, queue_ids)
        self.note(messages, places, append_group(self.store, messages, queue_ids))

    def expect(self, messages: list[Message], queue_ids: list[int]) -> list[list[Place]]:
        """Let light queues index some of *messages*; return all places of each, and note their group."""
        following: dict[tuple[str, int], int] = {}
        places: list[list[Place]] = []
        for one, queue_id in zip(messages, queue_ids, strict=True):
            names = self.random.choice(([], [], ["%LMQ%x"], ["%LMQ%x", "%LMQ%y"]))
            if names:
                one.properties += f"INNER_MULTI_DISPATCH\x01{','.join(names)}\x02".encode()
            places.append([])
            for queue in ((one.topic, queue_id), *((name, 0) for name in names)):
                offset = following.get(queue, self.store.queue(*queue).next_offset)
                following[queue] = offset + 1
                self.ledger.sent[*queue, offset].add(one.body)
                places[-1].append((*queue, offset))
        self.ledger.groups.append(
            [(place, one.body) for one, of_one in zip(messages, places, strict=True) for place in of_one]
        )
        return places

    def note(self, messages: list[Message], places: list[list[Place]], placed: list[Placed]) -> None:
        for one, of_one, at in zip(messages, places, placed, strict=True):
            assert (at.queue_id, at.queue_offset) == of_one[0][1:]
            for place in of_one:
                self.ledger.pending.append((place, one.body, at.position))

    async def send_now(self) -> None:
        self.send()

    async def send_group_now(self) -> None:
        self.send_group()

    async def flush(self) -> None:
        self.store.committer.commit()
        await self.store.flusher.flush()
        for place, body, position in self.ledger.pending:
            self.ledger.acknowledged[place] = (body, position)
        self.ledger.pending.clear()

    def consume(self) -> None:
        for place, body in contents(self.store).items():
            self.ledger.seen[place] = (body, self.store.queues.position_at(self.store.queue(*place[:2]), place[2]))

    def retire(self) -> None:
        self.store.disk.used_ratio = 0.99  # type: ignore[attr-defined]
        self.store.upkeep.retention.look()
        self.store.disk.used_ratio = 0.1  # type: ignore[attr-defined]

    def delete(self) -> None:
        for topic in ("C", "%LMQ%y"):
            self.ledger.deleting.add(topic)
            self.store.deletions.delete_topic(topic)

    async def step(self, number: int) -> None:
        roll = self.random.random()
        self.clock.ms += 10
        if roll < 0.3:
            self.send()
        elif roll < 0.5:
            self.send_group()
        elif roll < 0.65:
            self.store.committer.commit()
            self.consume()
        elif roll < 0.8:
            await self.flush()
        elif roll < 0.97:
            await self.store.upkeep.checkpointer.checkpoint()
        elif number > 30:
            self.retire() if roll < 0.99 else self.delete()


async def open_on(disk: FakeDisk, clock: ManualClock) -> Store:
    store = await Store.open(DIRECTORY, CONFIG, clock, disk)
    store.writer.store_host = HOST
    store.writer.light_queues = True
    return store


class Work(Workload):
    """Random operations on a store, whose ledger must be kept over each cut."""

    def __init__(self, disk: FakeDisk, cut: Cut, seed: int) -> None:
        super().__init__(disk, "sync")
        self.cut = cut
        self.clock = ManualClock()
        self.ledger = Ledger()
        self.random = Random(seed)
        self.chance = Random(seed + 1000)

    def shared(self) -> Iterable[object]:
        return self.disk, self.random, self.chance

    def cut_of(self, number: int) -> Cut:
        return self.cut

    async def work(self) -> None:
        store = await open_on(self.disk, self.clock)
        traffic = Traffic(store, self.ledger, self.random, self.clock)
        for number in range(STEPS):
            await traffic.step(number)
        await traffic.flush()
        await store.close()

    async def check(self, disk: FakeDisk, kind: Cut) -> None:
        await check_after(disk, self.ledger, self.clock, self.chance)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cut", list(Cut), ids=lambda cut: cut.name)
async def test_nothing_acknowledged_is_lost_wherever_the_power_is_cut(cut: Cut, seed: int) -> None:
    work = Work(FakeDisk(), cut, seed)
    assert await cut_everywhere(work) > STEPS
    store = await open_on(work.disk, work.clock)
    work.ledger.check(store)
    await store.close()


async def check_after(
    found: FakeDisk, ledger: Ledger, clock: ManualClock, chance: Random, *, again: bool = True
) -> None:
    """Open what a power cut left; it agrees with the ledger, takes more, and keeps that: here through an orderly stop,

    in some cases through further power cuts, one of them within this very start.
    """
    within: list[FakeDisk] = []
    if again and chance.random() < 0.1:
        found.on_change = lambda name: within.append(found.after_power_cut(chance.choice(list(Cut)), chance))
    store = await open_on(found, clock)
    found.on_change = None
    before = ledger.check(store)
    if again and chance.random() < 0.3:
        await check_second_cut(found, store, ledger, clock, chance)
    else:
        placed = store.writer.append(message("after", "A"), 0)
        store.committer.commit()
        store.flusher.flush_now()
        await store.close()
        store = await open_on(found, clock)
        after = contents(store)
        assert after.pop(("A", 0, placed.queue_offset)) == b"after"
        assert after == before
        store.crash()
    for disk in chance.sample(within, min(3, len(within))):
        await check_after(disk, ledger, clock, chance, again=False)


async def check_second_cut(found: FakeDisk, store: Store, ledger: Ledger, clock: ManualClock, chance: Random) -> None:
    """Work on after a crash, with other messages at the same places, and cut the power again."""
    later = deepcopy(ledger)
    later.acknowledged, later.seen, later.pending = ledger.promised(), {}, []
    work = Traffic(store, later, chance, clock)
    work.consume()
    for step in chance.choices(
        (work.send_now, work.send_group_now, work.flush, work.store.upkeep.checkpointer.checkpoint),
        k=chance.randrange(6),
    ):
        await step()
    disk = found.after_power_cut(chance.choice(list(Cut)), chance)
    store.crash()
    await check_after(disk, later, clock, chance, again=False)
