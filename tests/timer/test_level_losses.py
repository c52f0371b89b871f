"""A power cut loses some rounds of the delay levels and keeps later ones: each message is still delivered once.

The pages of one sync reach the disk in any order, so a round can survive an earlier one. ``MARTLET_CRASH_STEPS`` sends
more messages.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.timer.delays import Delays, WallClock, delays
from trio.testing import MockClock

from martlet.broker import Broker
from martlet.records.layout import RecordView, record_views
from martlet.runtime.steps import finish_now
from martlet.state import pack_rows
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.peers import serving
from martlet.testing.stores import small_config
from martlet_timer.levels.journal_codec import Delivered, apply_note, encode_note
from martlet_timer.levels.state import LevelState

ROUNDS = min(int(os.environ.get("MARTLET_CRASH_STEPS", "3")), 10)
LEVELS = "1s 2s"
JOURNAL = "martlet.journal.delay-levels"
FILE = "/data/store/config/delayOffset.json"
SNAPSHOT = "/data/store/config/delay-levels.snapshot"
LOG = "/data/store/commitlog/00000000000000000000"


def rounds(running: Delays) -> list[tuple[int, int]]:
    """Return where each round begins and ends in the log: its messages, and then its note."""
    ends = sorted(record.position + record.size for record in notes(running))
    first: dict[int, int] = {}
    for position in sorted(record.position for record in running.records()):
        first.setdefault(min(end for end in ends if end > position), position)
    return [(begin, end) for end, begin in first.items()]


def notes(running: Delays) -> Iterator[RecordView]:
    store = running.broker.store
    queue = store.queue(JOURNAL, 0)
    offset = queue.first_offset
    while offset < store.readers.end_offset(queue):
        found = store.readers.read(queue, offset, 1, 1 << 20)
        for piece in found.pieces:
            yield from record_views(piece)
        offset = found.next_offset


async def deliver(disk: FakeDisk, clock: WallClock, flush: str, bodies: Collection[str]) -> list[tuple[int, int]]:
    """Deliver *bodies*, each in a round of its own, and be killed; return the new rounds."""
    async with delays(disk, clock, levels=LEVELS, flush=flush) as running:
        before = len(rounds(running))
        for number, body in enumerate(bodies):
            running.send(body, 1 + number % 2)
            await trio.sleep(0.2)
        await trio.sleep(5)
        assert set(bodies) <= set(running.bodies())
        found = rounds(running)[before:]
        left = disk.after_power_cut(Cut.KILLED, Random(0))
    disk.files, disk.stable_files = left.files, left.stable_files
    return found


def lose(disk: FakeDisk, ranges: Collection[tuple[int, int]]) -> None:
    for begin, end in ranges:
        disk.files[LOG].change(begin, bytes(end - begin))
    disk.files[LOG].sync()


def subsets(count: int) -> list[tuple[int, ...]]:
    return [each for size in range(count + 1) for each in combinations(range(count), size)]


async def check(disk: FakeDisk, clock: WallClock, flush: str, wanted: Collection[str]) -> None:
    """Everything of *wanted* comes once, now and after an orderly stop."""
    for _ in range(2):
        async with delays(disk, clock, levels=LEVELS, flush=flush) as running:
            await trio.sleep(5)
            assert Counter(running.bodies()) == Counter(wanted)


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("lost", subsets(ROUNDS), ids=str)
async def test_any_lost_rounds_are_delivered_again_and_no_others(
    lost: tuple[int, ...], flush: str, autojump_clock: MockClock
) -> None:
    disk, clock = FakeDisk(), WallClock()
    wanted = [f"{number}" for number in range(ROUNDS)]
    found = await deliver(disk, clock, flush, wanted)
    lose(disk, [found[number] for number in lost])
    await check(disk, clock, flush, wanted)


@pytest.mark.parametrize("lost", [(0,), (0, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("flush", ["sync", "async"])
async def test_they_are_delivered_once_although_the_next_run_is_killed_too(
    lost: tuple[int, ...], flush: str, autojump_clock: MockClock
) -> None:
    disk, clock = FakeDisk(), WallClock()
    wanted = [f"{number}" for number in range(8)]
    found = await deliver(disk, clock, flush, wanted[:4])
    lose(disk, [found[number] for number in lost])
    again = await deliver(disk, clock, flush, wanted[4:])
    lose(disk, again[1::2])
    await check(disk, clock, flush, wanted)


async def test_what_is_left_to_deliver_outlasts_a_stop(autojump_clock: MockClock) -> None:
    """In the snapshot, or in the file; without both, in the notes."""
    disk, clock = FakeDisk(), WallClock()
    wanted = [f"{number}" for number in range(4)]
    found = await deliver(disk, clock, "sync", wanted)
    lose(disk, [found[0]])
    config = small_config(segment_bytes=1 << 20, page_bytes=1 << 16, cache_bytes=1 << 20)

    def only_offsets(broker: Broker) -> list[LevelState]:
        return [LevelState(broker)]

    async with serving(Path("/data/store"), store=config, disk=disk, clock=clock, projections=only_offsets):
        pass
    assert b'"martletDelivered":{"1":[[1,2]]}' in bytes(disk.files[FILE].data)
    for gone in ([FILE, FILE + ".bak"], [SNAPSHOT], [FILE, FILE + ".bak", SNAPSHOT]):
        left = disk.after_power_cut(Cut.KILLED, Random(0))
        for path in gone:
            left.files.pop(path, None)
        await check(left, clock, "sync", wanted)


async def test_the_file_is_not_ahead_of_the_durable_log(autojump_clock: MockClock) -> None:
    """With async flush it would contain deliveries that a power cut loses."""
    disk, clock = FakeDisk(), WallClock()
    async with delays(disk, clock, levels=LEVELS, flush="async", flush_interval_ms=3_600_000) as running:
        running.send("a", 1)
        await running.broker.store.flusher.flush()
        await running.wait_for(1)
        table = running.plugin.level_offsets.table
        assert b'"offsetTable":{}' in b"".join(finish_now(table.freeze(running.broker.store.durable)))
        assert table.dirty, "it is written again"
        await running.broker.store.flusher.flush()
        assert b'"offsetTable":{1:1}' in b"".join(finish_now(table.freeze(running.broker.store.durable)))


NONE: Delivered = {}


@pytest.mark.parametrize(
    ("known", "note", "then"),
    [
        (NONE, encode_note({1: 5, 2: 1}, {}, {}), {1: ((0, 5),), 2: ((0, 1),)}),
        (NONE, encode_note({1: 5}, {1: 3}, {}), {1: ((3, 5),)}),
        (None, encode_note({1: 5}, {1: 3}, {}), {1: ((0, 5),)}),
        (None, encode_note({1: 5, 2: 4}, {1: 3, 2: 4}, {1: ((7, 9),)}), {1: ((0, 5), (7, 9)), 2: ((0, 4),)}),
        ({1: ((0, 3),), 2: ((0, 4),)}, encode_note({1: 5, 2: 4}, {1: 3, 2: 4}, {}), {1: ((0, 5),), 2: ((0, 4),)}),
        ({1: ((0, 3), (5, 7))}, encode_note({1: 5}, {1: 3}, {1: ((5, 7),)}), {1: ((0, 7),)}),
        ({1: ((5, 7),)}, encode_note({2: 1}, {}, {1: ((5, 7),)}), {1: ((5, 7),), 2: ((0, 1),)}),
        ({1: ((0, 2),)}, encode_note({1: 9, 2: 1}, {1: 9}, {}), {1: ((0, 2),), 2: ((0, 1),)}),
        ({1: ((0, 9),)}, encode_note({1: 5}, {1: 4}, {}), {1: ((0, 5),)}),
        ({1: ((0, 2), (4, 9))}, msgpack.packb({1: 5}), {1: ((0, 5),)}),
        (None, msgpack.packb({1: 5}), {1: ((0, 5),)}),
    ],
)
def test_a_note_adds_what_its_round_delivered(known: Delivered | None, note: bytes, then: Delivered) -> None:
    assert {level: ranges for level, ranges in apply_note(known, note).items() if ranges} == then


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(1, 3)), max_size=8), st.data())
def test_of_any_notes_that_are_left_exactly_their_messages_count(rounds: list[tuple[int, int]], data: Any) -> None:
    reached: dict[int, int] = {}
    known, wanted = NONE, set[tuple[int, int]]()
    for level, count in rounds:
        begun, reached = reached, {**reached, level: reached.get(level, 0) + count}
        if data.draw(st.booleans()):
            known = apply_note(known, encode_note(reached, begun, {}))
            wanted |= {(level, offset) for offset in range(begun.get(level, 0), reached[level])}
    assert {(level, offset) for level, found in known.items() for each in found for offset in range(*each)} == wanted


async def test_older_snapshots_are_read(autojump_clock: MockClock) -> None:
    async with delays(FakeDisk()) as running:
        offsets = running.plugin.level_offsets
        finish_now(offsets.restore(b"".join(finish_now(pack_rows(1, [(10, 5, [(1, 7), (3, 2)])]))), 0))
        assert offsets.by_level == {1: 7, 3: 2}
