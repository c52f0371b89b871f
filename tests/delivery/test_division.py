"""Records are divided so that each receiver gets all of its own, in log order, in few parts."""

from collections.abc import Hashable, Mapping
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.delivery.routing import division
from martlet.delivery.routing.division import Found, Route, divide
from martlet.store import Queue

Values = tuple[Hashable, ...]


class Ways:
    """The ways of names; each costs *steps* when it is asked for."""

    def __init__(self, ways: Mapping[str, Route[Any]], cost: int = 0) -> None:
        self._ways = ways
        self._cost = cost
        self.steps = 0

    def find_route(self, name: str) -> Route[Any] | None:
        self.steps += self._cost
        return self._ways[name]

    def known_routes(self, records: list[Found], begin: int, end: int) -> list[Route[Any]]:
        return []


def records(names: str) -> list[Found]:
    return [(10 * index, b"", 0, 0, name, cast(Queue, None)) for index, name in enumerate(names)]


def got(found: list[Found], ways: Mapping[str, Route[Any]]) -> dict[str, list[tuple[str, list[int], Values]]]:
    """Return for each receiver its parts: names, positions, values."""
    result: dict[str, list[tuple[str, list[int], Values]]] = {}
    parts, end = divide(found, Ways(ways))
    assert end == len(found)
    for grants, part in parts:
        for receiver, values in grants.items():
            text = "".join(each[4] for each in part)
            result.setdefault(receiver, []).append((text, [each[0] for each in part], values))
    return result


RECEIVERS = st.dictionaries(st.sampled_from("uvwxyz"), st.tuples(st.integers(0, 1)), max_size=4)


@given(st.lists(RECEIVERS, min_size=4, max_size=4), st.text("abcd", max_size=40))
def test_each_receiver_gets_its_records_in_order_with_their_values(grants: list[dict[str, Values]], text: str) -> None:
    ways = {name: Route(each) for name, each in zip("abcd", grants, strict=True)}
    found = records(text)
    received = got(found, ways)
    for receiver in "uvwxyz":
        expected = [(at, ways[name].grants[receiver]) for at, *_, name, _ in found if receiver in ways[name].grants]
        parts = received.get(receiver, [])
        assert [(at, values) for _, positions, values in parts for at in positions] == expected


def test_alternating_names_with_different_receivers_are_one_part_each() -> None:
    ways = {"a": Route({"u": (1,)}), "b": Route({"v": (2,)}), "c": Route({})}
    assert got(records("abcabcab"), ways) == {
        "u": [("aaa", [0, 30, 60], (1,))],
        "v": [("bbb", [10, 40, 70], (2,))],
    }


def test_a_receiver_of_everything_gets_one_part() -> None:
    ways = {"a": Route({"u": (1,), "all": (0,)}), "b": Route({"v": (2,), "all": (0,)})}
    received = got(records("ababab"), ways)
    assert received["all"] == [("ababab", [0, 10, 20, 30, 40, 50], (0,))]
    assert received["u"] == [("aaa", [0, 20, 40], (1,))]
    assert received["v"] == [("bbb", [10, 30, 50], (2,))]


def test_receivers_of_the_same_routes_share_their_parts() -> None:
    ways = {"a": Route({"one": (0,), "two": (0,)}), "b": Route({"one": (0,), "two": (0,), "u": (1,)})}
    parts, _ = divide(records("abab"), Ways(ways))
    assert [set(grants) for grants, _ in parts] == [{"u"}, {"one", "two"}]


def test_a_part_ends_where_the_values_change() -> None:
    ways = {"a": Route({"u": (1,)}), "b": Route({"u": (2,)})}
    assert [text for text, _, _ in got(records("aabba"), ways)["u"]] == ["aa", "bb", "a"]


def test_names_whose_routes_take_long_are_divided_in_several_turns() -> None:
    ways = Ways({"a": Route({"u": (1,)}), "b": Route({})}, cost=division.STEPS_A_SLICE // 20)
    found, end, turns = records("ab" * 100), 0, 0
    positions: list[int] = []
    while end < len(found):
        before = ways.steps
        parts, end = divide(found, ways, end)
        positions += [each[0] for _, part in parts for each in part]
        turns += 1
        assert ways.steps - before <= 2 * division.STEPS_A_SLICE
    assert positions == [each[0] for each in found if each[4] == "a"]
    assert turns > 4


@pytest.mark.parametrize("limit", ["PAIRS_MAX", "STEPS_MAX"])
def test_what_would_take_long_is_divided_only_where_the_route_changes(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {"a": Route({"u": (1,), "all": (0,)}), "b": Route({"v": (2,), "all": (0,)})}
    expected = {receiver: [each[1:] for each in parts] for receiver, parts in got(records("aabab"), ways).items()}
    monkeypatch.setattr(division, limit, 1)
    received = got(records("aabab"), ways)
    assert [text for text, _, _ in received["all"]] == ["aa", "b", "a", "b"]
    for receiver, parts in expected.items():
        positions = [at for found, _ in parts for at in found]
        assert [at for _, found, _ in received[receiver] for at in found] == positions
