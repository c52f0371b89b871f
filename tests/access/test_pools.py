"""Pools: how far quotas are used up, at times that a test chooses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.access.pools import ANY, BURST_S, QUANTUM_S, Pool, Rate, Used
from martlet.contracts import Quota
from martlet.errors import Reason, Refused


def rate(per_s: int) -> Rate:
    made = Rate()
    made.set(per_s, 0.0)
    return made


def pool(**limits: int) -> Pool:
    made = Pool("user 'ann'", Used())
    made.set(Quota(**limits), 0.0)  # type: ignore[arg-type]
    return made


def test_no_limit_is_never_used_up() -> None:
    free = rate(0)
    assert free.count(5.0, 1 << 40) == 0
    assert (free.due, free.room(5.0), free.quantum(), free.is_paid(5.0)) == (0, ANY, ANY, True)


@pytest.mark.parametrize("per_s", [1, 2, 3, 7, 10, 1000, 12_345_678])
def test_a_second_s_worth_may_come_at_once_and_then_one_after_the_other(per_s: int) -> None:
    limited, now = rate(per_s), 1000.0
    assert limited.room(now) == pytest.approx(per_s, rel=1e-3)
    due = limited.count(now, per_s)
    assert due == pytest.approx(now + 1 / per_s, abs=1e-5)
    assert limited.room(now) <= per_s * 1e-5
    for _ in range(5):
        now = due + 1e-5
        assert limited.room(now) >= 1
        due = limited.count(now, 1)
        assert due == pytest.approx(now + 1 / per_s, abs=1e-4)


def test_what_was_not_used_adds_up_for_a_second_only() -> None:
    limited = rate(10)
    limited.count(0.0, 10)
    assert limited.room(0.35) == 3
    assert limited.room(500.0) == 10


def test_what_was_too_much_is_paid_for_later() -> None:
    limited = rate(10)
    assert limited.count(0.0, 1000) == pytest.approx(99.1, abs=1e-4)
    assert not limited.is_paid(99.9)
    assert limited.is_paid(100.1)


def test_what_is_to_be_paid_for_is_paid_for_by_the_higher_of_two_rates() -> None:
    limited = rate(10)
    limited.count(0.0, 100)
    limited.set(5, 1.0)
    assert not limited.is_paid(9.99)
    assert limited.is_paid(10.0)
    limited.set(50, 2.0)
    assert not limited.is_paid(2.79)
    assert limited.is_paid(2.81)
    assert limited.room(2.31) == 25


def test_a_rate_that_was_removed_is_forgotten() -> None:
    limited = rate(10)
    limited.count(0.0, 1000)
    limited.set(0, 1.0)
    assert limited.room(1.0) == ANY
    assert limited.is_paid(1.0)
    limited.set(10, 2.0)
    assert limited.room(2.0) == 10


@given(st.integers(1, 10_000), st.lists(st.tuples(st.integers(1, 50), st.floats(0, 3)), min_size=1, max_size=40))
def test_who_waits_until_the_next_is_due_keeps_the_rate(per_s: int, sends: list[tuple[int, float]]) -> None:
    """Over any time it gets no more than the rate allows, a second's worth, and what its last step took too much."""
    limited, now, total = rate(per_s), 0.0, 0
    for count, pause_s in sends:
        now = max(now + pause_s, limited.due)
        assert total <= per_s * (now + BURST_S) + 50 + per_s * 1e-3
        limited.count(now, count)
        total += count


@given(st.integers(1, 10_000), st.floats(0, 5), st.integers(0, 20_000))
def test_room_is_what_can_be_counted_before_the_next_must_wait(per_s: int, used_s: float, after: int) -> None:
    now = 100.0
    limited = rate(per_s)
    limited.count(now, int(used_s * per_s))
    room = limited.room(now)
    if not room:
        assert limited.due > now
        return
    if room > 1:
        assert limited.count(now, room - 1) <= now + 1e-9
    assert limited.count(now, 1) > now - 1e-5


def test_the_tighter_limit_decides() -> None:
    limited = pool(messages_in=10, bytes_in=1000)
    assert limited.count_in(0.0, 1, 2000) == pytest.approx(1.0, abs=0.01)
    assert limited.due_in == pytest.approx(1.0, abs=0.01)
    assert limited.due_out == 0
    assert limited.accepted(0.0, [1]) == 0


@pytest.mark.parametrize(
    ("limits", "sizes", "accepted"),
    [
        ({"messages_in": 3}, [5] * 10, 3),
        ({"bytes_in": 100}, [30] * 10, 4),
        ({"bytes_in": 100}, [500, 1], 1),
        ({"messages_in": 2, "bytes_in": 100}, [30] * 10, 2),
        ({"messages_out": 1}, [30] * 10, 10),
        ({}, [30] * 10, 10),
    ],
)
def test_the_first_of_several_messages_are_accepted(limits: dict[str, int], sizes: list[int], accepted: int) -> None:
    assert pool(**limits).accepted(7.0, sizes) == accepted


def test_what_is_read_at_once_is_worth_a_quarter_of_a_second() -> None:
    assert pool(messages_in=100).receive_bytes(200) == 100 * QUANTUM_S * 200
    assert pool(messages_in=1).receive_bytes(200) == 200
    assert pool(bytes_in=100_000).receive_bytes(200) == 25_000
    assert pool(messages_out=1).receive_bytes(200) > 1 << 40


@pytest.mark.parametrize("field", ["messages_in", "bytes_out", "connections", "shared_groups"])
def test_a_limit_is_not_negative(field: str) -> None:
    with pytest.raises(ValueError, match=f"quota {field} is -1; use 0 for no limit"):
        Quota(**{field: -1})  # type: ignore[arg-type]


def test_refusals_name_the_user_and_the_limit_and_are_counted() -> None:
    limited = pool(messages_in=10, bytes_in=500, messages_out=7, connections=1, subscriptions=2, shared_groups=1)
    limited.connections = 1
    limited.subscriptions = 1
    limited.count_group("g", 1)
    told = [str(limited.refusal_in(3)), str(limited.refusal_out())]
    for check in (
        limited.check_connections,
        lambda: limited.check_subscriptions(2),
        lambda: limited.check_group("h"),
    ):
        with pytest.raises(Refused) as caught:
            check()
        assert caught.value.reason is Reason.QUOTA
        told.append(str(caught.value))
    assert told == [
        "user 'ann': may send 10 messages and 500 bytes a second, and that is used up; try again later",
        "user 'ann': may receive 7 messages a second, and that is used up; try again later",
        "user 'ann': 1 connections are open, and the quota is 1",
        "user 'ann': 1 subscriptions are open and 2 requested, and the quota is 2",
        "user 'ann': 1 shared groups are in use, and the quota is 1",
    ]
    assert limited.used.refused == 7
    limited.check_subscriptions(1)
    limited.check_group("g")
