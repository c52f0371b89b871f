"""Journals: notes are as durable as the messages they are committed with, and come back in their order.

``MARTLET_CRASH_STEPS`` makes the crash test longer (default 60 steps); ``MARTLET_CRASH_SEEDS`` runs more of them.
"""

import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from tests.state.power_cuts import Workload, cut_everywhere
from tests.stored import records_of

from martlet.broker import Broker
from martlet.errors import Reason, Refused, StoreFailed
from martlet.message import Message
from martlet.state.journal import NEXT_COMMIT, RECORD_BYTES, Journal, read_notes
from martlet.store import Store, StoreConfig
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.peers import serving
from martlet.testing.stores import HOST, ManualClock, append_group, message, small_config

STEPS = int(os.environ.get("MARTLET_CRASH_STEPS", "60"))
SEEDS = range(int(os.environ.get("MARTLET_CRASH_SEEDS", "2")))
ROOT = Path("/data")
CONFIG = small_config(segment_bytes=2048, page_bytes=512)


async def open_on(disk: FakeDisk) -> Store:
    store = await Store.open(ROOT, CONFIG, ManualClock(), disk)
    store.writer.store_host = HOST
    return store


def bodies_of(store: Store, topic: str) -> list[bytes]:
    return [record.body for record in records_of(store, topic)]


def notes_of(store: Store, journal: Journal) -> list[bytes]:
    return [note for body in bodies_of(store, journal.topic) for note in read_notes(body)]


def flush(store: Store) -> None:
    store.committer.commit()
    store.flusher.flush_now()


async def test_notes_of_a_commit_are_one_record_after_its_messages() -> None:
    store = await open_on(FakeDisk())
    journal, other = Journal(store, "a"), Journal(store, "b")
    assert journal.note(b"1") == NEXT_COMMIT
    other.note(b"x")
    placed = store.writer.append(message("m"), 0)
    journal.note(b"2")
    store.committer.commit()
    journal.note(b"3")
    flush(store)
    assert [read_notes(body) for body in bodies_of(store, journal.topic)] == [[b"1", b"2"], [b"3"]]
    body = bodies_of(store, journal.topic)[0]
    assert read_notes(memoryview(body)) == read_notes(bytearray(body)) == [b"1", b"2"], "as `RecordView.body` gives it"
    assert notes_of(store, other) == [b"x"]
    first = store.queues.position_at(store.queue(journal.topic, 0), 0)
    assert first == placed.end
    store.crash()


async def test_notes_alone_want_one_commit_and_no_other() -> None:
    store = await open_on(FakeDisk())
    wanted: list[int] = []
    store.committer.on_commit_wanted = lambda: wanted.append(1)
    Journal(store, "a").note(b"1")
    assert wanted
    wanted.clear()
    store.committer.commit()
    assert wanted == []
    Journal(store, "a").note(b"2")
    assert wanted
    store.crash()


async def test_a_commit_without_notes_writes_none() -> None:
    store = await open_on(FakeDisk())
    journal = Journal(store, "a")
    store.writer.append(message("m"), 0)
    flush(store)
    journal.write()
    flush(store)
    assert store.queues.find(journal.topic, 0) is None
    store.crash()


async def test_many_notes_become_several_records_in_their_order() -> None:
    store = await open_on(FakeDisk())
    journal = Journal(store, "a")
    notes = [b"%d" % number * 40 for number in range(100)]
    for note in notes:
        journal.note(note)
    flush(store)
    assert notes_of(store, journal) == notes
    assert len(bodies_of(store, journal.topic)) > 5
    store.crash()


async def test_a_projection_is_never_given_very_many_notes_in_one_record() -> None:
    store = await Store.open(ROOT, StoreConfig(segment_bytes=1 << 20, page_bytes=1 << 16), ManualClock(), FakeDisk())
    journal = Journal(store, "a")
    notes = [b"note %d" % number for number in range(3000)] + [bytes(60_000), b"last"]
    for note in notes:
        journal.note(note)
    flush(store)
    assert notes_of(store, journal) == notes
    sizes = sorted(map(len, bodies_of(store, journal.topic)))
    assert sizes[-2] <= RECORD_BYTES < sizes[-1], "only a note that is longer by itself makes a longer record"
    assert len(sizes) < 10
    store.crash()


async def test_an_orderly_stop_keeps_notes_that_nobody_committed() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    journal = Journal(store, "a")
    journal.note(b"last")
    await store.close()
    store = await open_on(disk)
    assert notes_of(store, journal) == [b"last"]
    store.crash()


async def test_what_cannot_be_noted_is_refused() -> None:
    store = await open_on(FakeDisk())
    journal = Journal(store, "a")
    with pytest.raises(Refused, match="note has 513 bytes; the maximum is 512") as caught:
        journal.note(bytes(513))
    assert caught.value.reason is Reason.ILLEGAL
    with pytest.raises(Refused, match="note has 513 bytes; the maximum is 512"):
        journal.records_of([b"", bytes(513)])
    store.admission.refusal = "the disk is full"
    with pytest.raises(Refused, match="the disk is full"):
        journal.note(b"")
    store.flusher.fail(OSError(5, "gone"))
    with pytest.raises(StoreFailed):
        journal.note(b"")
    store.crash()


@pytest.mark.parametrize("name", ["", "A", "a.b", "a/b", "x" * 65])
async def test_a_journal_has_a_name_that_every_broker_can_keep(name: str) -> None:
    store = await open_on(FakeDisk())
    with pytest.raises(ValueError, match="is invalid; use"):
        Journal(store, name)
    store.crash()


async def test_a_commit_that_fails_stores_neither_its_messages_nor_its_notes() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    journal = Journal(store, "a")
    store.writer.append(message("kept"), 0)
    journal.note(b"kept")
    flush(store)
    disk.fail_next("write", 28)
    store.writer.append(message("lost"), 0)
    journal.note(b"lost")
    with pytest.raises(Refused):
        store.committer.commit()
    store.admission.refusal = ""
    store.committer.commit()
    journal.note(b"later")
    flush(store)
    assert notes_of(store, journal) == [b"kept", b"later"]
    assert bodies_of(store, "T") == [b"kept"]
    store.crash()


async def test_notes_that_find_no_room_fail_their_commit() -> None:
    """The segment is full when the notes are to be written, and the disk has no space for another."""
    disk = FakeDisk()
    store = await open_on(disk)
    journal = Journal(store, "a")
    store.writer.append(message(bytes(1700)), 0)
    flush(store)
    store.writer.append(message(b"fits"), 0)
    journal.note(bytes(400))
    disk.fail_next("truncate", 28)
    with pytest.raises(Refused):
        store.committer.commit()
    store.admission.refusal = ""
    store.writer.append(message(b"later"), 0)
    flush(store)
    assert notes_of(store, journal) == []
    assert bodies_of(store, "T")[-1] == b"later"
    store.crash()


async def test_notes_that_find_no_room_before_the_commit_fail_it_too() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    journal = Journal(store, "a")
    store.writer.append(message(bytes(1600)), 0)
    flush(store)
    journal.note(bytes(300))
    disk.fail_next("truncate", 28)
    with pytest.raises(Refused):
        journal.note(bytes(300))
    with pytest.raises(Refused):
        store.committer.commit()
    store.admission.refusal = ""
    store.committer.commit()
    journal.note(b"later")
    flush(store)
    assert notes_of(store, journal) == [b"later"]
    store.crash()


# in a broker


@asynccontextmanager
async def broker_on(disk: FakeDisk) -> AsyncIterator[Broker]:
    async with serving(ROOT, store=CONFIG, clock=ManualClock(), disk=disk) as made:
        yield made.broker


async def test_notes_go_with_the_group_they_belong_to_and_after_those_before_them() -> None:
    async with broker_on(FakeDisk()) as broker:
        store, journal = broker.store, broker.journal("a")
        broker.topics.ensure("T", 1)
        journal.note(b"before")
        notes = [(journal, b"1"), (journal, b"2")]
        result = broker.publish_all([Message("T", b"m", queue_id=0)], atomic=True, notes=notes)
        journal.note(b"after")
        flush(store)
        assert notes_of(store, journal) == [b"before", b"1", b"2", b"after"]
        queue = store.queue(journal.topic, 0)
        assert [store.queues.position_at(queue, offset) for offset in range(3)][1:2] == result.ends
        assert broker.journal("a") is journal


async def test_many_notes_of_a_group_become_several_records_in_their_order() -> None:
    async with broker_on(FakeDisk()) as broker:
        store, journal = broker.store, broker.journal("a")
        notes = [b"%d" % number * 40 for number in range(20)]
        broker.publish_all([], atomic=True, notes=[(journal, note) for note in notes])
        flush(store)
        assert notes_of(store, journal) == notes
        assert len(bodies_of(store, journal.topic)) > 1


async def test_clients_have_no_access_to_a_journal() -> None:
    async with broker_on(FakeDisk()) as broker:
        store, journal = broker.store, broker.journal("a")
        journal.note(b"secret")
        flush(store)
        with pytest.raises(Refused) as caught:
            broker.publish(Message(journal.topic, b"forged"))
        assert caught.value.reason is Reason.NO_TOPIC
        with pytest.raises(Refused):
            broker.topics.ensure(journal.topic, 1)
        assert broker.topics.auto_create(journal.topic, "TBW102", 1) is None or pytest.fail("made")
        assert store.topics_on_disk() == []
        assert store.lookup.record_at(0) is None


async def test_a_journal_survives_a_restart_of_the_broker() -> None:
    disk = FakeDisk()
    async with broker_on(disk) as broker:
        broker.journal("a").note(b"kept")
    async with broker_on(disk) as broker:
        assert broker.topics.get(broker.journal("a").topic) is None
        assert notes_of(broker.store, broker.journal("a")) == [b"kept"]


# crashes


class Work(Workload):
    """Notes and messages, and what of them was acknowledged."""

    store: Store
    journal: Journal

    def __init__(self, disk: FakeDisk, cut: Cut, seed: int) -> None:
        super().__init__(disk, "sync")
        self.cut = cut
        self.random = Random(seed)
        self.notes: list[bytes] = []
        self.acknowledged = 0
        # Bodies of messages by the note in their group.
        self.groups: dict[bytes, list[bytes]] = {}

    def shared(self) -> Iterable[object]:
        return [value for name, value in vars(self).items() if name != "acknowledged"]

    def cut_of(self, number: int) -> Cut:
        return self.cut

    async def work(self) -> None:
        self.store = await open_on(self.disk)
        self.journal = Journal(self.store, "crash")
        for _ in range(STEPS):
            await self.step()
        self.store.crash()

    async def check(self, disk: FakeDisk, kind: Cut) -> None:
        """What was acknowledged is there, in order, nothing was invented, and no note is parted from its group."""
        store = await open_on(disk)
        again, acknowledged = Journal(store, "crash"), self.acknowledged
        found = notes_of(store, again)
        assert found[:acknowledged] == self.notes[:acknowledged]
        later = iter(self.notes[acknowledged:])
        assert all(note in later for note in found[acknowledged:]), "notes are not in their order"
        assert kind not in (Cut.LOST, Cut.KILLED) or found == self.notes[: len(found)]
        bodies = set(bodies_of(store, "T"))
        for note, members in self.groups.items():
            assert {note in found} == {body in bodies for body in members}
        # The journal goes on, and comes back.
        again.note(b"after the crash")
        flush(store)
        store.crash()
        store = await open_on(disk)
        assert notes_of(store, again) == [*found, b"after the crash"]
        store.crash()

    def note(self) -> None:
        self.notes.append(self._unique("note"))
        self.journal.note(self.notes[-1])

    def send(self) -> None:
        self.store.writer.append(message(self._unique("message")), 0)

    def send_group(self) -> None:
        note = self._unique("grouped")
        bodies = [self._unique("member") for _ in range(self.random.choice((1, 2, 3)))]
        self.journal.write()
        append_group(self.store, [*map(message, bodies), *self.journal.records_of([note])], [0] * (len(bodies) + 1))
        self.notes.append(note)
        self.groups[note] = bodies

    def _unique(self, what: str) -> bytes:
        return f"{what} {len(self.notes)} {self.random.random()} ".encode() + bytes(self.random.randrange(150))

    async def step(self) -> None:
        roll = self.random.random()
        if roll < 0.4:
            self.note()
        elif roll < 0.5:
            self.send()
        elif roll < 0.7:
            self.send_group()
        elif roll < 0.8:
            self.store.committer.commit()
        elif roll < 0.95:
            flush(self.store)
            self.acknowledged = len(self.notes)
        else:
            await self.store.upkeep.checkpointer.checkpoint()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cut", list(Cut), ids=lambda cut: cut.name)
async def test_acknowledged_notes_survive_wherever_the_power_is_cut(cut: Cut, seed: int) -> None:
    assert await cut_everywhere(Work(FakeDisk(), cut, seed)) > STEPS // 2
