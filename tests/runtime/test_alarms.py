import gc
import math
import weakref
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from martlet.runtime import alarms as module
from martlet.runtime.alarms import STALE_AT_ONCE, STALE_MIN, Alarms

KEYS = st.integers(0, 5)
ACTIONS = st.one_of(
    st.tuples(st.just("ring"), KEYS, st.integers(0, 9)),
    st.tuples(st.just("cancel"), KEYS, st.just(0)),
    st.tuples(st.just("take"), st.just(0), st.integers(0, 9)),
)


@given(st.lists(ACTIONS))
def test_alarms_ring_as_a_plain_dictionary_of_times_says(actions: list[tuple[str, int, int]]) -> None:
    with patch.object(module, "STALE_MIN", 0), patch.object(module, "MOVED_AT_ONCE", 2):  # so that entries move
        alarms, times = compare_with_dictionary(actions)
        assert sorted(alarms.take(math.inf)) == sorted((at, key) for key, at in times.items())


def compare_with_dictionary(actions: list[tuple[str, int, int]]) -> tuple[Alarms[int], dict[int, float]]:
    alarms, times = Alarms[int](), dict[int, float]()
    for action, key, at in actions:
        if action == "ring":
            is_first = at < min(times.values(), default=math.inf)
            is_sooner = at < times.get(key, math.inf)
            assert alarms.ring_by(key, at) >= (is_first and is_sooner)
            times[key] = min(at, times.get(key, math.inf))
        elif action == "cancel":
            alarms.cancel(key)
            times.pop(key, None)
        else:
            taken = list(alarms.take(at))
            assert [when for when, _ in taken] == sorted(when for when in times.values() if when <= at)
            assert {key: when for when, key in taken} == {key: when for key, when in times.items() if when <= at}
            times = {key: when for key, when in times.items() if when > at}
        assert len(alarms) == len(times)
        assert alarms.next_at == min(times.values(), default=math.inf)
    return alarms, times


def test_an_alarm_set_while_others_are_taken_rings_in_its_turn() -> None:
    alarms = Alarms[str]()
    alarms.ring_by("a", 1)
    alarms.ring_by("b", 3)
    taken = []
    for _, key in alarms.take(5):
        taken.append(key)
        if key == "a":
            alarms.ring_by("c", 2)
    assert taken == ["a", "c", "b"]


def test_cancelled_alarms_do_not_stay_in_memory() -> None:
    alarms = Alarms[int]()
    for number in range(10_000):
        alarms.ring_by(number, 1000 + number)
        alarms.ring_by(-1, 500_000 - number)
    for number in range(9_990):
        alarms.cancel(number)
    assert len(alarms) == 11
    assert len(alarms._heap) + len(alarms._old) <= 2 * STALE_MIN + 4 * len(alarms)
    assert [key for _, key in alarms.take(1_000_000)] == [*range(9_990, 10_000), -1]


def test_a_cancelled_alarm_frees_its_key_at_once() -> None:
    class Key:
        pass

    alarms, keys = Alarms[Key](), [Key() for _ in range(STALE_MIN)]
    refs = [weakref.ref(key) for key in keys]
    gc.disable()
    try:
        for key in keys:
            alarms.ring_by(key, 1)
            alarms.cancel(key)
        del key, keys
        assert [ref() for ref in refs] == [None] * STALE_MIN
    finally:
        gc.enable()


def test_many_cancelled_alarms_are_dropped_a_limited_number_at_a_time() -> None:
    alarms = Alarms[int]()
    count = 5 * STALE_AT_ONCE
    for number in range(2 * count):
        alarms.ring_by(number, number)
    for number in range(count):
        alarms.cancel(number)
    entries = len(alarms._heap)
    times = []
    while not (taken := list(alarms.take(count))):
        assert entries - len(alarms._heap) <= 2 * STALE_AT_ONCE
        entries = len(alarms._heap)
        times.append(alarms.next_at)
    assert taken == [(count, count)]
    assert times == sorted(times)
    assert times[0] < count
