"""Timers are given when they are due: in order, never early, each once, whatever the clock does."""

from random import Random

import pytest

from martlet.runtime.steps import finish_now
from martlet_timer.timers.pending import HOUR_MS, PendingTimers
from martlet_timer.timers.schedule import Schedule

START_MS = 473_000 * HOUR_MS + 1234


class Timers:
    """A table, its schedule, and what was given so far."""

    def __init__(self) -> None:
        self.pending = PendingTimers(1000)
        self.schedule = Schedule(self.pending)
        self.now_ms = START_MS
        self.position = 0
        self.left: dict[int, int] = {}  # position -> time
        self.given: list[tuple[int, int]] = []

    def add(self, due_ms: int) -> int:
        self.position += 1
        self.pending.add(due_ms, self.position, 0)
        self.schedule.add(due_ms, self.position)
        self.left[self.position] = due_ms
        return self.position

    def remove(self, position: int) -> None:
        self.pending.remove(self.left.pop(position), position)
        self.schedule.forget(position)

    def take(self, count: int = 10) -> list[tuple[int, int]]:
        finish_now(self.schedule.prepare(self.now_ms))
        taken = self.schedule.take(self.now_ms, count)
        assert all(due <= self.now_ms and self.left[position] == due for due, position in taken)
        self.given += taken
        return taken

    def take_all(self) -> list[tuple[int, int]]:
        """Take everything that is due, and remove it."""
        found, in_vain = [], 0
        while (wake := self.schedule.wake_ms()) is not None and wake <= self.now_ms:
            taken = self.take()
            found += taken
            for _, position in taken:
                self.remove(position)
            # In a second whose timers were all removed it finds none.
            in_vain = 0 if taken else in_vain + 1
            assert in_vain < 50, f"nothing is given at {self.now_ms} although the schedule wants to wake at {wake}"
        assert not [position for position, due in self.left.items() if due <= self.now_ms]
        return found


@pytest.mark.parametrize("seed", range(10))
def test_all_timers_are_given_in_time(seed: int) -> None:
    random = Random(seed)
    timers = Timers()
    reach_ms = random.choice((2000, 60_000, 3 * HOUR_MS))
    for _ in range(600):
        for _ in range(random.randrange(10)):
            timers.add(timers.now_ms + random.randrange(1, reach_ms) // random.choice((1, 1, 1000)))
        if timers.left and random.random() < 0.3:
            timers.remove(random.choice(list(timers.left)))
        wake_ms = timers.schedule.wake_ms()
        assert not timers.left or (wake_ms is not None and wake_ms <= min(timers.left.values()))
        expected = sorted((due, position) for position, due in timers.left.items() if due <= timers.now_ms)
        assert timers.take_all() == expected
        timers.now_ms += random.choice((0, 1, 7, reach_ms // 100))
    timers.now_ms += reach_ms
    timers.take_all()
    assert not timers.left
    assert timers.schedule.wake_ms() is None
    assert timers.schedule.taken == 0


def test_timers_of_one_millisecond_keep_their_log_order() -> None:
    timers = Timers()
    due = START_MS + 5000
    before = [timers.add(due) for _ in range(5000)]
    timers.now_ms = due - 1
    assert timers.take_all() == []
    after = [timers.add(due) for _ in range(20)]
    timers.now_ms = due
    assert timers.take_all() == [(due, position) for position in before + after]


def test_a_timer_is_not_given_twice_and_not_after_its_removal() -> None:
    timers = Timers()
    first, second, third = (timers.add(START_MS - 10) for _ in range(3))
    assert timers.take(1) == [(START_MS - 10, first)]
    assert timers.schedule.is_taken(first)
    assert not timers.schedule.is_taken(second)
    timers.remove(second)
    timers.schedule.reset()
    assert timers.take() == [(START_MS - 10, third)]
    assert timers.take() == []


def test_what_was_not_delivered_is_given_again_in_its_place() -> None:
    timers = Timers()
    first, second = timers.add(START_MS - 10), timers.add(START_MS - 9)
    taken = timers.take(1)
    timers.schedule.give_back(taken)
    assert not timers.schedule.is_taken(first)
    assert timers.take() == [(START_MS - 10, first), (START_MS - 9, second)]
    timers.remove(first)
    timers.schedule.give_back([(START_MS - 10, first)])
    assert timers.take() == []


def test_the_clock_may_go_back_and_forth() -> None:
    timers = Timers()
    for minute in range(120):
        timers.add(START_MS + 60_000 * minute + 30_000)
    timers.now_ms += HOUR_MS
    assert len(timers.take_all()) == 60
    timers.now_ms -= HOUR_MS
    assert timers.take_all() == []
    soon = timers.add(timers.now_ms + 5)
    assert timers.take_all() == []
    timers.now_ms += 5
    assert timers.take_all() == [(timers.now_ms, soon)]
    timers.now_ms += 3 * HOUR_MS
    assert len(timers.take_all()) == 60


def test_new_timers_do_not_gather_in_the_heap_after_the_clock_went_back() -> None:
    timers = Timers()
    timers.add(START_MS + HOUR_MS)
    timers.now_ms += HOUR_MS
    timers.take_all()
    timers.now_ms -= HOUR_MS
    timers.take()
    for _ in range(100):
        timers.add(START_MS + HOUR_MS - 10_000)
    assert len(timers.schedule._late) == 0
    timers.now_ms += HOUR_MS
    assert len(timers.take_all()) == 100


@pytest.mark.parametrize("slices", range(1, 12))
def test_timers_added_and_removed_between_slices_are_not_lost(slices: int) -> None:
    timers = Timers()
    hour_ms = (START_MS // HOUR_MS + 1) * HOUR_MS
    due = hour_ms + 77
    before = [timers.add(due) for _ in range(5000)]
    timers.now_ms = due
    steps = timers.schedule.prepare(timers.now_ms)
    for _ in range(slices):
        next(steps, None)
    earlier = timers.add(START_MS - 5)
    after = [timers.add(due), timers.add(due + 1)]
    timers.remove(before[0])
    timers.remove(before[-1])
    finish_now(steps)
    timers.now_ms = due + 1
    expected = [
        (START_MS - 5, earlier),
        *((due, position) for position in [*before[1:-1], after[0]]),
        (due + 1, after[1]),
    ]
    assert timers.take_all() == expected


@pytest.mark.parametrize("by_reset", [False, True])
def test_a_preparation_that_was_interrupted_is_repeated(by_reset: bool) -> None:
    timers = Timers()
    for _ in range(3000):
        timers.add(START_MS + 5)
    timers.now_ms += 5
    for slices in range(1, 8):
        steps = timers.schedule.prepare(timers.now_ms)
        for _ in range(slices):
            next(steps, None)
        if by_reset:
            timers.schedule.reset()
            finish_now(steps)
        else:
            steps.close()
    assert len(timers.take_all()) == 3000


def test_a_million_timers_in_a_minute_are_brought_near_in_short_slices() -> None:
    timers = Timers()
    random = Random(1)
    for position in range(200_000):
        timers.pending.add(START_MS + random.randrange(200), position, 0)
    slices = sum(1 for _ in timers.schedule.prepare(START_MS + 200))
    assert slices >= 2 * 200_000 // 1024
