"""The power is cut at every call that changes the disk while clients use sessions: what they were told is stored is so.

``MARTLET_CRASH_STEPS`` makes the workload longer (default 100 steps); ``MARTLET_CRASH_SEEDS`` runs more of them.
"""

import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from random import Random
from typing import Any

import pytest
from tests.sessions.session_talk import Client, said
from tests.state import power_cuts
from tests.state.power_cuts import cut_everywhere, opened

from martlet.broker import Broker
from martlet.message import Message
from martlet.runtime.steps import finish_now
from martlet.sessions.session import Session
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import ManualClock

STEPS = int(os.environ.get("MARTLET_CRASH_STEPS", "100"))
SEEDS = range(int(os.environ.get("MARTLET_CRASH_SEEDS", "1")))
SIZES: dict[str, Any] = {"segment_bytes": 4096, "page_bytes": 512, "cache_bytes": 8192}
CONFIG: dict[str, Any] = {**SIZES, "disk_used_ratio_max": 0.8, "disk_clean_ratio": 0.85}
ACTIONS = ("open", "leave", "end", "filter", "no filter", "send", "ack", "atomic", "data", "publish")
WEIGHTS = (6, 4, 1, 6, 2, 8, 8, 4, 2, 8)
STORING = ("commit", "flush", "save", "roll", "retire", "sweep")
STORING_WEIGHTS = (6, 5, 2, 2, 4, 1)
NAMES = ("a", "bé", "c")

# What one client knows of its session; empty for none.
Said = dict[str, Any]


class Workload(power_cuts.Workload):
    """Random clients; knows what each session was at the last flush, and ever since."""

    def __init__(self, disk: FakeDisk, flush: str, random: Random) -> None:
        super().__init__(disk, flush)
        self.random = random
        self.clock = ManualClock()
        self.sessions: dict[str, Session] = {}
        self.last: dict[str, Said] = {name: {} for name in NAMES}
        # What may be stored: the state at the last flush, and each one after it.
        self.possible: dict[str, list[Said]] = {name: [{}] for name in NAMES}
        # Bodies of messages that acknowledge an id of a session, and the position that it had.
        self.atomic: dict[str, tuple[str, int, int]] = {}
        self.used: set[str] = set()
        self.position = 0
        self.retired = False

    def shared(self) -> Iterable[object]:
        return self.disk, self.random, self.sessions

    async def work(self) -> None:
        broker = await opened(self.disk, self.clock, self.flush, "out", **CONFIG)
        for _ in range(STEPS):
            await self.step(broker)
        broker.projections.save()
        self.possible = {name: [self.last[name]] for name in NAMES}
        await broker.store.close()

    async def step(self, broker: Broker) -> None:
        self.clock.ms += self.random.randrange(20)
        (action,) = self.random.choices(ACTIONS + STORING, WEIGHTS + STORING_WEIGHTS)
        self.used.add(action)
        if action in STORING:
            await self.store(broker, action)
            return
        name = self.random.choice(NAMES)
        session = self.sessions.get(name)
        if action == "publish":
            broker.publish(Message("out", b"x" * self.random.randrange(900), queue_id=0))
        elif session is None:
            self.sessions[name] = Client(broker, name).open(self.position, expiry_s=3600)
            self.note(name)
        elif action == "open":
            self.sessions[name] = Client(broker, name).open(expiry_s=3600)
            self.note(name)
        elif action in ("leave", "end"):
            session.leave() if action == "leave" else session.end()
            del self.sessions[name]
            self.note(name, {} if action == "end" else None)
        else:
            self.change(broker, name, session, action)

    def change(self, broker: Broker, name: str, session: Session, action: str) -> None:
        self.position += self.random.randrange(1, 100)
        if action == "filter":
            session.subscribe(f"f{self.random.randrange(5)}", b"o" * self.random.randrange(3))
        elif action == "no filter":
            session.unsubscribe(f"f{self.random.randrange(5)}")
        elif action == "data":
            session.keep(b"%d" % self.position)
        elif action == "send":
            count = self.random.randrange(1, 4)
            first = session.next_id
            session.hand_out(first, range(self.position, self.position + count), self.position + count)
            self.position += count
        elif session.flight:
            number = self.random.choice(list(session.flight))
            if action == "ack":
                session.acknowledge(number)
            else:
                self.acknowledge_atomically(broker, name, session, number)
        self.note(name)

    def acknowledge_atomically(self, broker: Broker, name: str, session: Session, number: int) -> None:
        body, position = f"{name} {number} {self.position}", session.flight[number]
        changes = session.changes()
        changes.acknowledge(number)
        broker.publish_all([Message("out", body.encode(), queue_id=0)], atomic=True, notes=changes.notes)
        changes.apply()
        self.atomic[body] = name, number, position

    def note(self, name: str, after: Said | None = None) -> None:
        if after is None:
            session = self.sessions.get(name)
            after = said(session) if session is not None else self.last[name]
        self.last[name] = after
        self.possible[name].append(after)

    async def store(self, broker: Broker, action: str) -> None:
        if action == "sweep":
            finish_now(broker.sessions.expiry.sweep())
        elif action == "roll":
            finish_now(broker.sessions.table.roll(0, broker.store.appended))
        broker.store.committer.commit()
        if action in ("commit", "roll", "sweep"):
            return
        await broker.store.flusher.flush()
        self.possible = {name: [self.last[name]] for name in NAMES}
        if action == "save":
            (driven,) = (each for each in broker.projections._driven if each.name == "sessions")
            await broker.projections.snapshots.write(driven)
        elif action == "retire" and len(broker.store.segments.items) > 2:
            await self.retire(broker)

    async def retire(self, broker: Broker) -> None:
        """Remove the oldest segment, as retention does."""
        store = broker.store
        for driven in broker.projections._driven:
            await broker.projections._catch_up(driven)
        end = store.segments.items[-2].end
        finish_now(broker.sessions.table.roll(0, end))
        store.committer.commit()
        await store.flusher.flush()
        broker.projections.keeper.released = end
        await store.upkeep.checkpointer.checkpoint()
        self.disk.used_ratio = 0.99
        store.upkeep.retention.look()
        self.disk.used_ratio = 0.1
        self.retired = store.first_position > 0

    async def check(self, disk: FakeDisk, kind: Cut) -> None:
        broker = await opened(disk, ManualClock(self.clock.ms), self.flush, "out", **CONFIG)
        self.check_sessions(broker, kind)
        self.check_groups(broker)
        broker.store.crash()

    def check_sessions(self, broker: Broker, kind: Cut) -> None:
        """Each session is as it was at some time after the last flush.

        If the disk may have lost a note and kept a later one, this holds only for each part of it; but no session has
        parts of one that it replaced.
        """
        for name in NAMES:
            found, possible = said(broker.sessions.table.get(f"toy {name}")), self.possible[name]
            if found not in possible:
                assert kind in {Cut.REORDERED, Cut.TORN}, f"session {name!r}"
                assert any(consists_of(found, each) for each in sessions_in(possible)), f"session {name!r}"

    def check_groups(self, broker: Broker) -> None:
        """No message of an atomic group is there without its acknowledgement."""
        queue = broker.store.queue("out", 0)
        result = broker.store.readers.read(queue, queue.first_offset, 1000, 1 << 20)
        bodies = b"".join(map(bytes, result.pieces))
        for body, (name, number, position) in self.atomic.items():
            state = broker.sessions.table.get(f"toy {name}")
            if state is not None and state.flight.get(number) == position:
                assert body.encode() not in bodies


def sessions_in(states: list[Said]) -> Iterator[list[Said]]:
    """Yield the states of each of the sessions that had a name one after the other."""
    for exists, each in groupby(states, bool):
        if exists:
            yield list(each)


def consists_of(found: Said, states: list[Said]) -> bool:
    """Return whether each part of *found* is as in one of *states*."""
    names = {"owner", "position", "next_id", "data"}
    return all(any(found.get(name) == each[name] for each in states) for name in names) and all(
        any(found[table].get(key) == each[table].get(key) for each in states)
        for table in ("filters", "flight")
        for key in {key for each in (found, *states) for key in each[table]}
    )


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_sessions_survive_a_power_cut_at_every_call(seed: int, flush: str) -> None:
    workload = Workload(FakeDisk(), flush, Random(seed))
    assert await cut_everywhere(workload) > STEPS
    if seed == 0 and STEPS >= 100:
        assert workload.used == {*ACTIONS, *STORING}
        assert workload.atomic
        assert workload.retired
        assert any(workload.last.values())
