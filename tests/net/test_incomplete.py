"""Which connections are closed when incomplete requests use too much memory."""

from hypothesis import given
from hypothesis import strategies as st

from martlet.net.incomplete import AT_ONCE, IncompleteRequests

HERE, THERE = b"here", b"there"


def test_a_byte_now_and_then_makes_no_request_young() -> None:
    requests: IncompleteRequests[str] = IncompleteRequests(1600, 1600)
    requests.note("trickle", HERE, 1000, 1000, 0.0)
    for second in range(1, 100):
        requests.note("trickle", HERE, 1000 + second, 1, float(second))
    requests.note("large", HERE, 200, 200, 50.0)
    requests.note("large", HERE, 500, 300, 99.0)
    assert not requests.over(HERE)
    requests.note("new", HERE, 2, 2, 100.0)
    assert requests.over(HERE)
    assert requests.give_way(HERE) == ["trickle"]
    assert (requests.total, requests.held_by(HERE)) == (502, 502)


def test_a_request_begins_where_the_last_one_ended() -> None:
    requests: IncompleteRequests[str] = IncompleteRequests(1000, 1000)
    requests.note("busy", HERE, 600, 600, 0.0)
    requests.note("stuck", HERE, 300, 300, 50.0)
    requests.note("busy", HERE, 400, 900, 100.0)  # the rest of one, and the beginning of the next
    requests.note("new", HERE, 301, 301, 100.0)
    assert requests.give_way(HERE) == ["stuck"]


def test_a_full_address_costs_no_other_address() -> None:
    requests: IncompleteRequests[str] = IncompleteRequests(1000, 600)
    requests.note("old", THERE, 350, 350, 0.0)
    requests.note("first", HERE, 500, 500, 1.0)
    requests.note("second", HERE, 101, 101, 2.0)
    assert not requests.over(THERE)
    assert requests.over(HERE)
    assert requests.give_way(HERE) == ["first"]
    assert (requests.total, requests.largest_origin()) == (451, 350)


def test_very_many_close_in_several_steps() -> None:
    requests: IncompleteRequests[int] = IncompleteRequests(10_000, 20_000)
    for number in range(10_000):
        requests.note(number, number.to_bytes(4, "big"), 1, 1, float(number))
    requests.note(-1, HERE, 5000, 5000, 1e5)
    closed: list[int] = []
    while requests.over(HERE):
        found = requests.give_way(HERE)
        assert len(found) <= AT_ONCE
        closed += found
    assert closed == list(range(len(closed)))
    assert requests.total <= 10_000


Notes = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50), st.integers(1, 50), st.floats(0, 10)), max_size=60)


@given(Notes)
def test_the_held_bytes_add_up_and_stay_within_the_limits(notes: list[tuple[int, int, int, float]]) -> None:
    requests: IncompleteRequests[int] = IncompleteRequests(120, 70)
    held: dict[int, int] = {}
    now = 0.0
    for owner, size, received, pause in notes:
        now += pause
        origin = bytes([owner % 2])
        requests.note(owner, origin, size, received, now)
        held[owner] = size
        if requests.over(origin):
            for closed in requests.give_way(origin):
                assert held.pop(closed) > 0
        assert requests.total == sum(held.values()) <= 120
        for parity in (0, 1):
            mine = sum(size for other, size in held.items() if other % 2 == parity)
            assert requests.held_by(bytes([parity])) == mine <= 70
    for owner in list(held):
        requests.forget(owner)
    assert (requests.total, requests.largest_origin()) == (0, 0)
