"""The table of pending timers behaves like a set, in bounded memory."""

import tracemalloc
from itertools import chain, pairwise
from random import Random

import pytest

from martlet.errors import StoreError
from martlet.runtime.steps import finish_now
from martlet_timer.timers.pending import CHUNK_ROWS, HOUR_MS, PendingTimers

GRANULE = 1000
BASE_MS = 473_000 * HOUR_MS


def check(pending: PendingTimers, model: dict[int, tuple[int, int]]) -> None:
    """Compare *pending* with *model*: position -> (time, key)."""
    assert len(pending) == len(model)
    assert pending.floor() == (min(model) // GRANULE * GRANULE if model else None)
    hours = sorted({due // HOUR_MS for due, _ in model.values()})
    assert pending.next_hour() == (hours[0] if hours else -1)
    found = []
    for hour in hours:
        assert pending.next_hour(hour) == hour
        rows, after = pending.rows_after(hour, -1, 100)
        in_hour = list(rows)
        while rows or after >= 0:
            rows, last = pending.rows_after(hour, after, 100)
            if last == after:
                break
            in_hour += rows
            after = last
        assert all(first[1] < second[1] for first, second in pairwise(in_hour))
        found += in_hour
    assert sorted(found) == sorted((due, position) for position, (due, _) in model.items())
    if hours:
        assert pending.next_hour(hours[-1] + 1) == -1


@pytest.mark.parametrize("seed", range(3))
def test_timers_are_added_found_and_removed(seed: int) -> None:
    random = Random(seed)
    pending, model, gone, added, position = PendingTimers(GRANULE), dict[int, tuple[int, int]](), [], [0], 0
    for step in range(12_000):
        if random.random() < (0.7 if step < 8000 else 0.3) or not model:
            position += random.randrange(1, 50)
            due, key = BASE_MS + random.randrange(4 * HOUR_MS), random.randrange(1 << 32)
            pending.add(due, position, key)
            model[position] = due, key
            added.append(position)
            continue
        at = next(iter(model)) if random.random() < 0.5 else random.choice(added[-9000:])
        if at not in model:
            continue
        due, key = model[at]
        assert pending.has(due, at)
        assert not pending.has(due + 1, at)
        assert not pending.remove(due + 1, at)
        assert at in finish_now(pending.with_key(due, key))
        assert pending.remove(due, at)
        assert not pending.remove(due, at)
        assert not pending.has(due, at)
        assert finish_now(pending.with_key(due, key)) == []
        del model[at]
        gone.append((due, at))
    check(pending, model)
    assert not any(pending.has(*timer) for timer in gone)
    start, end = sorted(random.sample(range(position), 2))
    inside = sorted((due, at) for at, (due, _) in model.items() if start <= at < end)
    assert sorted(chain.from_iterable(pending.in_range(start, end))) == inside
    for at, (due, _) in model.items():
        pending.remove(due, at)
    check(pending, {})


def test_several_timers_can_have_the_same_time_and_key() -> None:
    pending = PendingTimers(GRANULE)
    for position in range(3 * CHUNK_ROWS):
        pending.add(BASE_MS + 5, position, 7 if position % 2000 == 0 else 8)
    assert finish_now(pending.with_key(BASE_MS + 5, 7)) == [*range(0, 3 * CHUNK_ROWS, 2000)]
    assert finish_now(pending.with_key(BASE_MS + 6, 7)) == []
    assert finish_now(pending.with_key(BASE_MS + 5, 9)) == []
    assert finish_now(pending.with_key(BASE_MS + HOUR_MS, 7)) == []


def test_a_key_is_found_only_at_the_border_of_rows() -> None:
    pending = PendingTimers(GRANULE)
    for position, key in enumerate((0x01020304, 0x05060102, 0x03040506)):
        pending.add(BASE_MS, position, key)
    assert finish_now(pending.with_key(BASE_MS, 0x05060304)) == []
    assert finish_now(pending.with_key(BASE_MS, 0x03040506)) == [2]


def copy_of(pending: PendingTimers, first_position: int = 0) -> PendingTimers:
    again = PendingTimers(GRANULE)
    for columns in pending.freeze():
        again.restore(columns, first_position)
    return again


def test_a_snapshot_restores_the_same_timers() -> None:
    random = Random(3)
    pending, model = PendingTimers(GRANULE), dict[int, tuple[int, int]]()
    for position in range(10_000):
        due = BASE_MS + random.randrange(2 * HOUR_MS)
        pending.add(due, position, position)
        model[position] = due, position
    for position in random.sample(range(10_000), 4000):
        pending.remove(*(model.pop(position)[0], position))
    check(copy_of(pending), model)
    check(copy_of(pending, 5000), {at: timer for at, timer in model.items() if at >= 5000})


def test_a_snapshot_has_nothing_that_was_added_later() -> None:
    pending = PendingTimers(GRANULE)
    for position in range(CHUNK_ROWS + 10):
        pending.add(BASE_MS, position, 0)
    frozen = pending.freeze()
    for position in range(CHUNK_ROWS + 10, 3 * CHUNK_ROWS):
        pending.add(BASE_MS + position % 2 * HOUR_MS, position, 0)
    positions = [position for columns in frozen for position in columns[2]]
    assert positions == [*range(CHUNK_ROWS + 10)]


def test_timers_removed_after_a_freeze_may_be_in_it_and_are_removed_again() -> None:
    pending = PendingTimers(GRANULE)
    for position in range(3 * CHUNK_ROWS):
        pending.add(BASE_MS, position, 0)
    frozen = pending.freeze()
    removed = [position for position in range(3 * CHUNK_ROWS) if position % 5]
    for position in removed:
        pending.remove(BASE_MS, position)
    again = PendingTimers(GRANULE)
    for columns in frozen:
        again.restore(columns, 0)
    for position in removed:
        again.remove(BASE_MS, position)
    check(again, dict.fromkeys(range(0, 3 * CHUNK_ROWS, 5), (BASE_MS, 0)))


def test_damaged_columns_are_refused() -> None:
    pending = PendingTimers(GRANULE)
    pending.add(BASE_MS, 1, 2)
    ((hour, dues, positions, keys),) = pending.freeze()
    with pytest.raises(StoreError, match="different lengths"):
        PendingTimers(GRANULE).restore((hour, dues[:0], positions, keys), 0)


def test_a_timer_takes_less_than_20_bytes() -> None:
    random = Random(1)
    tracemalloc.start()
    try:
        pending = PendingTimers(1 << 30)
        for position in range(40_000):
            pending.add(BASE_MS + random.randrange(4 * HOUR_MS), position * 1000, position)
        assert tracemalloc.get_traced_memory()[0] < 20 * 40_000
        for due, position in list(chain.from_iterable(pending.in_range(0, 1 << 40))):
            if position % 20_000:
                pending.remove(due, position)
        assert len(pending) == 2000
        # Mostly dead chunks were rewritten.
        assert tracemalloc.get_traced_memory()[0] < 5 * 20 * 2000
    finally:
        tracemalloc.stop()


def test_chunks_that_are_half_dead_at_the_same_time_are_rewritten_one_by_one() -> None:
    pending, rows = PendingTimers(1 << 30), 4096
    for position in range(20 * rows):
        pending.add(5, position, 0)
    chunks = pending._hours[0].chunks
    for row in range(rows // 2):
        for number in range(20):
            pending.remove(5, number * rows + row)
    sizes = []
    for row in range(rows // 2, rows // 2 + 80):
        for number in range(20):
            pending.remove(5, number * rows + row)
        sizes.append(sum(len(chunk.positions) < rows for chunk in chunks))
    assert max(after - before for before, after in pairwise([0, *sizes])) == 1
    assert sizes[-1] == 20
    assert len(pending) == 20 * (rows // 2 - 80)
