"""Routes are the same as those of a plain matcher, and a change of filters invalidates few cached routes."""

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import count, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.delivery.routing import route_cache
from martlet.delivery.routing.division import Route, divide
from martlet.delivery.routing.route_cache import (
    COMBINED_MAX,
    FREED_AT_ONCE,
    NAME_BYTES,
    NAME_STEPS,
    SIBLING_STEPS,
    STAMPED_LEVELS,
    STEPS_A_TURN,
    RouteCache,
    in_pieces,
)
from martlet.errors import Reason, Refused
from martlet.store import Queue

LEVELS = st.sampled_from(["", "a", "b", "$s", "c"])
NAMES = st.lists(LEVELS, min_size=1, max_size=4).map("/".join)


@st.composite
def filters(draw: st.DrawFn) -> str:
    levels = draw(st.lists(LEVELS | st.just("+"), min_size=1, max_size=4))
    if draw(st.booleans()):
        levels = [*levels[:-1], "#"]
    return "/".join(levels)


def plain_match(topic_filter: str, name: str) -> bool:
    """MQTT 3.1.1, 4.7.1 and 4.7.2, level by level."""
    wanted, levels = topic_filter.split("/"), name.split("/")
    if name.startswith("$") and wanted[0] in ("+", "#"):
        return False
    if wanted[-1] == "#":
        wanted.pop()
        if len(levels) < len(wanted):
            return False
        levels = levels[: len(wanted)]
    return len(wanted) == len(levels) and all(w in ("+", level) for w, level in zip(wanted, levels, strict=True))


@pytest.mark.parametrize(
    ("topic_filter", "name", "matches"),
    [
        ("sport/tennis/player1/#", "sport/tennis/player1", True),
        ("sport/tennis/player1/#", "sport/tennis/player1/score/wimbledon", True),
        ("sport/#", "sport", True),
        ("#", "a/b/c", True),
        ("sport/tennis/+", "sport/tennis/player1", True),
        ("sport/tennis/+", "sport/tennis/player1/ranking", False),
        ("sport/+", "sport", False),
        ("sport/+", "sport/", True),
        ("+/+", "/finance", True),
        ("/+", "/finance", True),
        ("+", "/finance", False),
        ("#", "$SYS/monitor/Clients", False),
        ("+/monitor/Clients", "$SYS/monitor/Clients", False),
        ("$SYS/#", "$SYS/monitor", True),
        ("$SYS/monitor/+", "$SYS/monitor/Clients", True),
    ],
)
def test_the_examples_of_the_specification(topic_filter: str, name: str, matches: bool) -> None:
    routes: RouteCache[str] = RouteCache()
    routes.add(topic_filter, "s")
    assert (set(routes.route(name).grants) == {"s"}) is matches
    assert plain_match(topic_filter, name) is matches


def changes_of(each: st.SearchStrategy[str], names: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    what = st.sampled_from(["add", "remove", "route"])
    return st.lists(st.tuples(what, each, names, st.integers(0, 3), st.integers(0, 2)), max_size=60)


# Filters and names of many levels, nearly all alike.
DEEP = st.builds(
    lambda count, more: "/".join(["a"] * count + more),
    st.integers(0, STAMPED_LEVELS + 3),
    st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=3),
)
DEEP_FILTERS = st.builds(
    lambda name, at, wildcard: "/".join([*name.split("/")[:at], wildcard, *name.split("/")[at + 1 :]]),
    DEEP,
    st.integers(0, STAMPED_LEVELS + 6),
    st.just("+"),
) | st.builds(lambda name: f"{name}/#", DEEP)
CHANGES = changes_of(filters(), NAMES) | changes_of(DEEP_FILTERS | DEEP, DEEP)


@given(CHANGES)
def test_routes_are_what_a_plain_matcher_finds_after_every_change(
    changes: list[tuple[str, str, str, int, int]],
) -> None:
    routes: RouteCache[int] = RouteCache(names_max=8)
    model: dict[tuple[str, int], int] = {}
    names: list[str] = []
    for what, topic_filter, name, subscriber, value in changes:
        if what == "add":
            routes.add(topic_filter, subscriber, value)
            model[topic_filter, subscriber] = value
        elif what == "remove":
            assert routes.remove(topic_filter, subscriber) is (model.pop((topic_filter, subscriber), None) is not None)
        names = [*names[-5:], name]
        assert len(routes) == len(model)
        for asked in names:
            wanted: dict[int, list[int]] = {}
            for (each, holder), granted in model.items():
                if plain_match(each, asked):
                    wanted.setdefault(holder, []).append(granted)
            found = {holder: Counter(values) for holder, values in routes.route(asked).grants.items()}
            assert found == {holder: Counter(values) for holder, values in wanted.items()}
    for topic_filter, subscriber in model:
        assert routes.remove(topic_filter, subscriber)
    root = routes._tree._root
    assert (root.children, root.one, root.here, root.rest) == (None,) * 4


@pytest.mark.parametrize("topic_filter", ["a#", "#/a", "a/#/b", "a+", "a/+b/c", "++", "##"])
def test_a_wildcard_has_a_level_of_its_own(topic_filter: str) -> None:
    routes: RouteCache[str] = RouteCache()
    with pytest.raises(Refused) as refused:
        routes.add(topic_filter, "s")
    assert refused.value.reason is Reason.ILLEGAL
    assert len(routes) == 0


def test_separator_and_wildcards_are_the_protocols_own() -> None:
    routes: RouteCache[str] = RouteCache(separator=".", one="*", rest=">", hidden="")
    routes.add("a.*.>", "s")
    assert set(routes.route("a.b").grants) == {"s"}
    assert set(routes.route("a.b.c/+").grants) == {"s"}
    assert not routes.route("a").grants
    routes.add(">", "t")
    assert set(routes.route("$x").grants) == {"t"}


def test_the_rest_can_need_a_level() -> None:
    """As in NATS: ``a.>`` matches no ``a``."""
    routes: RouteCache[str] = RouteCache(".", "*", ">", "", rest_takes_none=False)
    for topic_filter in ("a.>", "a.*.>", ">", "a.b.c.>"):
        routes.add(topic_filter, topic_filter)
    assert set(routes.route("a").grants) == {">"}
    assert set(routes.route("a.b").grants) == {">", "a.>"}
    assert set(routes.route("a.b.c").grants) == {">", "a.>", "a.*.>"}
    assert set(routes.route("a.b.c.d").grants) == {">", "a.>", "a.*.>", "a.b.c.>"}
    assert routes.remove("a.*.>", "a.*.>")
    assert set(routes.route("a.b.c").grants) == {">", "a.>"}


def test_equal_routes_are_one_object() -> None:
    routes: RouteCache[str] = RouteCache()
    routes.add("a/#", "s", 1)
    assert routes.route("a/b") is routes.route("a/c")
    assert routes.route("b") is not routes.route("a/b")


def test_a_storm_of_connecting_devices_leaves_other_routes_cached() -> None:
    routes: RouteCache[str] = RouteCache()
    routes.add("devices/+/state", "dashboard")
    names = [f"devices/{number}/state" for number in range(100)]
    for name in names:
        routes.route(name)
    found = routes.routes_found
    for number in range(1000, 3000):
        routes.add(f"devices/{number}/commands/#", f"device{number}")
        routes.add(f"devices/{number}/config", f"device{number}")
    for name in names:
        assert set(routes.route(name).grants) == {"dashboard"}
    assert routes.routes_found == found
    routes.add("devices/7/#", "late")
    for name in names:
        routes.route(name)
    assert routes.routes_found == found + 1
    assert set(routes.route("devices/7/state").grants) == {"dashboard", "late"}


def test_a_slice_finds_the_routes_of_few_new_names() -> None:
    routes: RouteCache[str] = RouteCache()
    routes.add("#", "all")
    found = [(number, b"", 0, 0, f"{number}/device", Queue("t", 0)) for number in range(1000)]
    ends = [0]
    while ends[-1] < len(found):
        ends.append(divide(found, routes, ends[-1])[1])
    assert len(ends) > 10, "each takes a few ms"
    assert divide(found, routes)[1] == len(found), "the names are known now"


def test_names_that_differ_in_a_level_that_no_filter_has_share_a_route() -> None:
    routes: RouteCache[str] = RouteCache()
    for topic_filter in ("site/+/+", "site/7/#", "+/7/+", "other/7/x", "site/7"):
        routes.add(topic_filter, topic_filter)
    route, walked = routes.route("site/7/0"), routes._tree.steps
    assert set(route.grants) == {"site/+/+", "site/7/#", "+/7/+"}
    before = routes.steps
    for number in range(1, 100):
        assert routes.route(f"site/7/{number}") is route
    assert routes._tree.steps == walked, "none needed a walk"
    assert routes.steps - before == 99 * SIBLING_STEPS
    assert set(routes.route("site/7").grants) == {"site/7", "site/7/#"}
    assert set(routes.route("site/8/0").grants) == {"site/+/+"}
    assert set(routes.route("other/7/x").grants) == {"other/7/x", "+/7/+"}


@pytest.mark.parametrize("topic_filter", ["a/b/x", "a/b/x/#", "a/+/x", "+/b/x", "a/b/+", "a/#", "#"])
def test_a_filter_that_has_the_level_ends_the_sharing(topic_filter: str) -> None:
    routes: RouteCache[str] = RouteCache()
    routes.add("a/+/+", "all")
    assert routes.route("a/b/c") is routes.route("a/b/d")
    for _ in range(2):
        routes.add(topic_filter, "new")
        for name in ("a/b/x", "a/b/y", "a/b/c", "a/b/e"):
            assert set(routes.route(name).grants) == {"all"} | ({"new"} if plain_match(topic_filter, name) else set())
        routes.remove(topic_filter, "new")
        for name in ("a/b/x", "a/b/z", "a/b/c"):
            assert set(routes.route(name).grants) == {"all"}


def test_names_share_no_route_if_each_is_checked() -> None:
    routes: RouteCache[str] = RouteCache()
    routes.add("a/+", "s")
    routes.is_name = lambda name: name != "a/bad"
    assert set(routes.route("a/1").grants) == {"s"}
    assert not routes.route("a/bad").grants
    routes.asks = lambda: True
    routes.permits = lambda name, subscriber: name != "a/secret"
    routes.forget_routes()
    assert set(routes.route("a/1").grants) == {"s"}
    assert not routes.route("a/secret").grants


def test_cached_names_are_bounded() -> None:
    routes: RouteCache[str] = RouteCache(names_max=50)
    routes.add("#", "s")
    for number in range(500):
        assert set(routes.route(f"a/{number}").grants) == {"s"}
        assert len(routes._cached) <= 50
        assert len(routes._stamps) <= 150
        assert len(routes._cached_by_parent) <= 50
        assert len(routes._route_by_key) <= 50


def test_names_of_many_levels_have_few_stamps() -> None:
    routes: RouteCache[str] = RouteCache()
    for number in range(50):
        routes.route(f"{number}/" + "a/" * 198 + "b")
    assert len(routes._stamps) == 1 + 50 * STAMPED_LEVELS


@pytest.mark.parametrize("depth", range(STAMPED_LEVELS + 4))
def test_a_wildcard_at_any_depth_changes_cached_routes(depth: int) -> None:
    routes: RouteCache[str] = RouteCache()
    begin = "a/" * depth
    for topic_filter, name in (
        (begin + "+/y", begin + "x/y"),
        (begin + "#", begin + "x/y"),
        (begin + "x/#", begin + "x"),
    ):
        assert not routes.route(name).grants
        routes.add(topic_filter, "s")
        assert set(routes.route(name).grants) == {"s"}
        routes.remove(topic_filter, "s")
        assert not routes.route(name).grants


def test_cached_routes_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_cache, "ROUTES_BYTES_MAX", 100_000)
    routes: RouteCache[int] = RouteCache()
    for number in range(30):
        routes.add("#", number)
    most = 0
    for number in range(1000):
        routes.add(f"long/{number}", number)
        routes.route(f"long/{number}")  # which has a route of its own
        most = max(most, len(routes._cached))
    assert 5 < most < 100_000 // (NAME_BYTES + 30 * route_cache.SUBSCRIBER_BYTES) + 2
    for number in range(1000):
        routes.route("x" * 3000 + str(number))
        assert len(routes._cached) < 100_000 // 3000 + 2


def test_dropped_routes_are_freed_a_few_at_a_time() -> None:
    routes: RouteCache[str] = RouteCache()
    routes.add("#", "s")
    for number in range(1000):
        routes.route(f"a/{number}")
    routes.forget_routes()
    before = sum(map(len, routes._tables_to_free))
    assert before > 1000
    for number in range(before):
        routes.route(f"b/{number}")
        now = sum(map(len, routes._tables_to_free))
        assert before - now <= FREED_AT_ONCE
        before = now
    assert not routes._tables_to_free


def combined(routes: RouteCache[int], name: str) -> dict[int, list[Hashable]]:
    return {subscriber: sorted(values, key=str) for subscriber, values in routes.route(name).grants.items()}


def test_a_route_to_very_many_is_what_its_filters_say() -> None:
    routes: RouteCache[int] = RouteCache()
    wanted: dict[int, list[Hashable]] = {}
    for topic_filter, subscribers, value in (("a/#", range(3000), 1), ("a/+", range(2900, 3500), 2), ("#", [7], 3)):
        for subscriber in subscribers:
            routes.add(topic_filter, subscriber, value)
            wanted.setdefault(subscriber, []).append(value)
    route = routes.route("a/b")
    assert combined(routes, "a/b") == wanted
    assert (len(route.grants), sorted(route.grants[2950], key=str), route.grants[7][-1]) == (3500, [1, 2], 1)
    assert dict(route.grants.items()) == {each: route.grants[each] for each in route.grants}
    assert 4000 not in route.grants
    assert routes.route("a/c") is route
    assert routes.remove("a/#", 2950)
    routes.add("a/b", 4000, 4)
    assert set(route.grants[2950]) == {1, 2}  # a route does not change; it may be in use
    assert combined(routes, "a/b") == {**wanted, 2950: [2], 4000: [4]}


def test_a_route_to_very_many_leaves_out_those_without_permission() -> None:
    routes: RouteCache[int] = RouteCache()
    for subscriber in range(3000):
        routes.add("#", subscriber)
    asked: list[tuple[str, int]] = []

    def permits(name: str, subscriber: int) -> bool:
        asked.append((name, subscriber))
        return name != "odd" or subscriber % 2 == 1

    routes.permits = permits
    assert routes.route("even") is routes.route("other")
    routes.forget_routes()
    routes.asks = lambda: True
    odd, even = routes.route("odd").grants, routes.route("even").grants
    assert bool(odd)
    assert not asked, "the route of a name is computed without asking about its subscribers"
    assert (len(odd), len(even), odd[7], 8 in odd, 8 in even) == (1500, 3000, (None,), False, True)
    asked.clear()
    pieces = in_pieces(odd, 1000)
    assert next(iter(pieces)) == (1000, [(subscriber, (None,)) for subscriber in range(1, 1000, 2)])
    assert len(asked) == 1000


def test_a_route_to_few_leaves_out_those_without_permission() -> None:
    routes: RouteCache[int] = RouteCache()
    for subscriber in range(10):
        routes.add("#", subscriber)
    routes.asks, routes.permits = lambda: True, lambda name, subscriber: name != "odd" or subscriber % 2 == 1
    assert list(routes.route("odd").grants) == list(routes.match("odd")) == [1, 3, 5, 7, 9]
    assert routes.route("even") is routes.route("other")


def branching(levels: int, end: str) -> list[str]:
    """Return filters of which each branch fits a name of "a" levels."""
    return ["/".join([*each, end]) for each in product("+a", repeat=levels)]


def found_in_turns(routes: RouteCache[int], name: str) -> tuple[Route[int], int]:
    """Return the route of *name*, and in how many turns it was found; none of them takes long."""
    for turn in count(1):
        before = routes.steps
        route = routes.find_route(name)
        assert routes.steps - before <= 2 * STEPS_A_TURN + 100 + NAME_STEPS
        if route is not None:
            return route, turn
    raise AssertionError


@pytest.mark.parametrize("end", ["b", "z"])
@pytest.mark.parametrize("others", [(), range(100_000, 100_000 + COMBINED_MAX + 1)])
def test_the_branching_filters_of_many_are_matched_in_several_turns(end: str, others: Sequence[int]) -> None:
    routes, filters = RouteCache[int](), branching(14, end)
    for subscriber, topic_filter in enumerate(filters):
        routes.add(topic_filter, subscriber, topic_filter)
        routes.add(topic_filter, subscriber // 2, topic_filter)
    for subscriber in others:
        routes.add("#", subscriber, "#")
    route, turns = found_in_turns(routes, "a/" * 14 + "b")
    assert turns > 2
    expected = dict.fromkeys(others, 1)
    if end == "b":
        expected |= {each: (each * 2 < len(filters)) * 2 + 1 - (each == 0) for each in range(len(filters))}
    assert {subscriber: len(values) for subscriber, values in route.grants.items()} == expected
    again, turns = found_in_turns(routes, "a/" * 14 + "b")
    assert (again, turns) == (route, 1)


def test_filters_that_change_while_a_route_is_found_are_in_the_next_one() -> None:
    routes, name = RouteCache[int](), "a/" * 14 + "b"
    for subscriber, topic_filter in enumerate(branching(14, "b")):
        routes.add(topic_filter, subscriber, None)
    assert routes.find_route(name) is None
    routes.add(name, -1, None)
    routes.add("a/#", -2, None)
    routes.remove("+/" * 14 + "b", 0)
    found_in_turns(routes, name)
    route, _ = found_in_turns(routes, name)
    assert {-1, -2} <= set(route.grants)
    assert 0 not in route.grants


def test_a_route_found_in_turns_asks_for_permission_at_last() -> None:
    routes, name = RouteCache[int](), "a/" * 14 + "b"
    for subscriber, topic_filter in enumerate(branching(14, "b")):
        routes.add(topic_filter, subscriber, None)
    assert routes.find_route(name) is None
    routes.asks, routes.permits = lambda: True, lambda name, subscriber: subscriber < 10
    routes.forget_routes()
    route, _ = found_in_turns(routes, name)
    assert {each for _, piece in in_pieces(route.grants, 1024) for each, _ in piece} == set(range(10))
