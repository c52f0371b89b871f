"""New connections per second of an address."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.net.opening import connect_rates
from martlet.net.opening.connect_rates import BURST_MIN, ConnectRates


@pytest.mark.parametrize("a_second", [1, 3, 10, 50])
def test_a_burst_is_taken_and_then_so_many_a_second(a_second: int) -> None:
    rates, burst = ConnectRates(a_second), max(a_second, BURST_MIN)
    assert [rates.take(b"a", 100.0) for _ in range(burst + 2)] == [True] * burst + [False] * 2
    for second in range(1, 5):
        now = 100.0 + second
        assert [rates.take(b"a", now) for _ in range(a_second + 2)] == [True] * a_second + [False] * 2


def test_refused_connections_do_not_count() -> None:
    """A client that tries again and again must get in as soon as the rate allows it."""
    rates = ConnectRates(1)
    for _ in range(1000):
        rates.take(b"a", 100.0)
    assert rates.take(b"a", 101.0)


def test_addresses_do_not_affect_each_other() -> None:
    rates = ConnectRates(1)
    while rates.take(b"a", 100.0):
        pass
    assert rates.take(b"b", 100.0)


def test_a_clock_that_stands_still_forgets_nothing() -> None:
    rates = ConnectRates(1)
    taken = sum(rates.take(b"a", 0.0) for _ in range(100))
    assert taken == BURST_MIN


def test_addresses_are_forgotten_once_they_may_burst_again() -> None:
    rates = ConnectRates(5)
    for number in range(1000):
        rates.take(number.to_bytes(4), 100.0)
    assert len(rates) == 1000
    for _ in range(1000):
        rates.take(b"a", 110.0)
    assert len(rates) == 1


def test_the_number_of_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect_rates, "ORIGINS_MAX", 100)
    rates = ConnectRates(1)
    for number in range(10_000):
        assert rates.take(number.to_bytes(4), 100.0)
        assert len(rates) <= 100


@given(st.integers(1, 30), st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.floats(0, 3))))
def test_no_second_has_more_than_burst_and_rate(a_second: int, calls: list[tuple[bytes, float]]) -> None:
    rates, now = ConnectRates(a_second), 50.0
    taken: dict[bytes, list[float]] = {}
    for origin, pause in calls:
        now += pause
        if rates.take(origin, now):
            taken.setdefault(origin, []).append(now)
    for times in taken.values():
        for first in times:
            within = [each for each in times if first <= each < first + 1]
            assert len(within) <= max(a_second, BURST_MIN) + a_second
