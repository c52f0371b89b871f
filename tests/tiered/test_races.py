"""Brokers that write at the same time, and stores that lose, repeat, delay and refuse: nothing is lost or twice."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar
from uuid import uuid4

import pytest

from martlet_tiered.errors import Fenced, ObjectExists, RangeRefused, StoreHung, StoreUnavailable
from martlet_tiered.names import DataName, parse_data
from martlet_tiered.objects import Objects
from martlet_tiered.table import ColdTable

from .cold import Tier, append, now_ms, upload
from .stores import FAULTS, Faulty
from .test_table import actions, positions

Result = TypeVar("Result")

SHARE = 0.3


def committed_ranges(tier: Tier) -> list[tuple[int, int, int]]:
    """Begin, end and epoch of each range, in the order of the commits."""
    found = []
    for version in range(1, tier.table().version + 1):
        lines = actions(tier, version)
        numbers = {str(line["txn"]["appId"]): line["txn"]["version"] for line in lines if "txn" in line}
        if "martlet-log" in numbers:
            names = [parse_data(str(line["add"]["path"])) for line in lines if "add" in line]
            (name,) = names
            assert name is not None
            assert (name.end, name.epoch) == (numbers["martlet-log"], numbers["martlet-owner"])
            found.append((name.begin, name.end, name.epoch))
    return found


class RacingBroker:
    """Takes a table over again and again, and appends until it is fenced."""

    def __init__(self, tier: Tier, rounds: int, barrier: threading.Barrier) -> None:
        self.objects = tier.objects()
        self.table = tier.table()
        self.committed: list[tuple[int, int, int]] = []
        self.fenced = 0
        self._rounds = rounds
        self._barrier = barrier

    def run(self) -> None:
        for _ in range(self._rounds):
            self._barrier.wait()
            try:
                self._own()
            except Fenced:
                self.fenced += 1

    def _own(self) -> None:
        self.table.take_over(uuid4().hex)
        for _ in range(2):
            begin = self.table.end or 0
            append(self.table, self.objects, begin, begin + 5)
            self.table.checkpoint()
            self.committed.append((begin, begin + 5, self.table.epoch))


@pytest.mark.full
def test_of_two_owners_one_goes_on_in_two_hundred_rounds(local_tier: Tier) -> None:
    assert race(local_tier, 200) >= 2 * 200


def test_of_two_owners_the_older_one_is_fenced_and_no_range_is_committed_twice(atomic_tier: Tier) -> None:
    assert race(atomic_tier, 3) >= 2 * 3


def race(atomic_tier: Tier, rounds: int) -> int:
    """Let two brokers take over the same table in each round; return the number of committed ranges.

    The later owner of a round commits two.
    """
    barrier = threading.Barrier(2)
    brokers = [RacingBroker(atomic_tier, rounds, barrier) for _ in range(2)]
    run_together(brokers)
    # In each round both take over, and only one of them may go on.
    assert brokers[0].fenced + brokers[1].fenced > 0
    return check_ranges(atomic_tier, brokers)


def run_together(brokers: Sequence[RacingBroker]) -> None:
    """Run *brokers* in threads, to the end."""
    threads = [threading.Thread(target=broker.run) for broker in brokers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def check_ranges(tier: Tier, brokers: Sequence[RacingBroker]) -> int:
    """Check that no range is missing or there twice; return the number of ranges."""
    ranges = committed_ranges(tier)
    epochs = [epoch for _, _, epoch in ranges]
    assert [begin for begin, _, _ in ranges] == list(range(0, 5 * len(ranges), 5))
    assert epochs == sorted(epochs)
    # A broker that was fenced may have committed a range before it learned of it; no range is lost that it counted.
    assert set(brokers[0].committed) | set(brokers[1].committed) <= set(ranges)
    assert not set(brokers[0].committed) & set(brokers[1].committed)
    assert positions(tier) == list(range(5 * len(ranges)))
    return len(ranges)


def insist(call: Callable[[], Result]) -> Result:
    """Return the result of *call*, repeated as a broker repeats it while its store is unavailable."""
    while True:
        try:
            return call()
        except (StoreHung, StoreUnavailable):
            continue


def test_through_faults_every_object_is_there_once_with_its_data(faulty: Faulty, faulty_tier: Tier) -> None:
    objects = faulty_tier.objects()
    faulty.share = SHARE
    names = [f"many/{number:02}" for number in range(40)]
    for name in names:
        insist(partial(objects.create, name, name.encode() * 100))
        with pytest.raises(ObjectExists):
            insist(partial(objects.create, name, b"other"))
    for name in names:
        assert insist(partial(objects.read, name)) == name.encode() * 100
        assert insist(partial(objects.read_range, name, 5, 9)) == (name.encode() * 100)[5:9]
    assert [each.name for each in insist(lambda: objects.list_folder("many"))] == names
    for name in names:
        insist(partial(objects.delete, name))
    faulty.share = 0
    assert objects.list_folder("many") == []
    assert all(faulty.counts[fault] for fault in FAULTS)


def append_with_faults(table: ColdTable, objects: Objects, begin: int, end: int) -> None:
    """Upload and commit a range as a broker does: until it is committed."""
    file = insist(lambda: upload(objects, DataName("2026-11-28", "topic", table.epoch, begin, end)))
    insist(lambda: table.append(begin, end, [file]))


def test_through_faults_every_range_is_committed_once(faulty: Faulty, faulty_tier: Tier) -> None:
    objects, table = faulty_tier.objects(), faulty_tier.table()
    faulty.share = SHARE
    end = 0
    for generation in range(3):
        epoch = table.epoch
        insist(partial(table.take_over, uuid4().hex))
        assert table.epoch > epoch
        for _ in range(3):
            append_with_faults(table, objects, end, end + 5)
            end += 5
        assert table.end == end
        if generation == 1:  # a new process, of which the old one hears
            old, table = table, insist(faulty_tier.table)
            insist(partial(table.take_over, uuid4().hex))
            with pytest.raises(Fenced):
                append_with_faults(old, objects, end, end + 5)
    old_files = [file for file in insist(table.files) if file.name and file.name.begin < 10]
    merged = insist(lambda: upload(objects, DataName("2026-11-28", "topic", table.epoch, 0, 10, 1)))
    insist(lambda: table.rewrite(old_files, [merged], now_ms(), changes_data=False))
    faulty.share = 0
    ranges = committed_ranges(faulty_tier)
    assert [(begin, end) for begin, end, _ in ranges] == [(begin, begin + 5) for begin in range(0, end, 5)]
    assert positions(faulty_tier) == list(range(end))
    assert all(faulty.counts[fault] for fault in FAULTS)
    assert table.foreign == []


def test_through_faults_of_two_owners_one_goes_on(faulty: Faulty, faulty_tier: Tier) -> None:
    barrier = threading.Barrier(2)
    brokers = [FaultyBroker(faulty_tier, 3, barrier) for _ in range(2)]
    faulty.share = SHARE
    run_together(brokers)
    faulty.share = 0
    assert check_ranges(faulty_tier, brokers) > 0


class FaultyBroker(RacingBroker):
    """The same, over a store that fails."""

    def _own(self) -> None:
        insist(lambda: self.table.take_over(uuid4().hex))
        for _ in range(2):
            begin = self.table.end or 0
            try:
                append_with_faults(self.table, self.objects, begin, begin + 5)
            except RangeRefused:  # the other broker has committed it
                continue
            self.committed.append((begin, begin + 5, self.table.epoch))


def test_a_commit_that_lands_after_it_was_given_up_counts_once(tier: Tier) -> None:
    """The request of a commit can wait in a proxy until the broker has given up, and repeats it."""
    objects, table = tier.objects(), tier.owned()
    file = upload(objects, DataName("2026-11-28", "topic", 1, 0, 5))
    commit = table._log.commit
    calls = []

    def give_up(*words: object) -> None:
        calls.append(words)
        if len(calls) > 1:
            commit(*calls[0])  # type: ignore[arg-type]
        raise StoreHung("no answer")

    table._log.commit = give_up  # type: ignore[assignment,method-assign]
    table.append(0, 5, [file])
    assert len(calls) == 2
    assert (table.end, table.version) == (5, 2)
    assert committed_ranges(tier) == [(0, 5, 1)]
