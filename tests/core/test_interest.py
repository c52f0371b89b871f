"""The trie gives the same results as a plain matcher, and a change of filters invalidates few cached routes."""

from collections import Counter
from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.delivery.interest import FilterTrie, in_pieces
from martlet.errors import Reason, Refused

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
    trie: FilterTrie[str] = FilterTrie()
    trie.add(topic_filter, "s")
    assert (set(trie.route(name).grants) == {"s"}) is matches
    assert plain_match(topic_filter, name) is matches


CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "route"]), filters(), NAMES, st.integers(0, 3), st.integers(0, 2)),
    max_size=60,
)


@given(CHANGES)
def test_routes_are_what_a_plain_matcher_finds_after_every_change(
    changes: list[tuple[str, str, str, int, int]],
) -> None:
    trie: FilterTrie[int] = FilterTrie(names_max=8)
    model: dict[tuple[str, int], int] = {}
    names: list[str] = []
    for what, topic_filter, name, subscriber, value in changes:
        if what == "add":
            trie.add(topic_filter, subscriber, value)
            model[topic_filter, subscriber] = value
        elif what == "remove":
            assert trie.remove(topic_filter, subscriber) is (model.pop((topic_filter, subscriber), None) is not None)
        names = [*names[-5:], name]
        assert len(trie) == len(model)
        for asked in names:
            wanted: dict[int, list[int]] = {}
            for (each, holder), granted in model.items():
                if plain_match(each, asked):
                    wanted.setdefault(holder, []).append(granted)
            found = {holder: Counter(values) for holder, values in trie.route(asked).grants.items()}
            assert found == {holder: Counter(values) for holder, values in wanted.items()}
    for topic_filter, subscriber in model:
        assert trie.remove(topic_filter, subscriber)
    assert trie._root.is_empty()


@pytest.mark.parametrize("topic_filter", ["a#", "#/a", "a/#/b", "a+", "a/+b/c", "++", "##"])
def test_a_wildcard_has_a_level_of_its_own(topic_filter: str) -> None:
    trie: FilterTrie[str] = FilterTrie()
    with pytest.raises(Refused) as refused:
        trie.add(topic_filter, "s")
    assert refused.value.reason is Reason.ILLEGAL
    assert len(trie) == 0


def test_separator_and_wildcards_are_the_protocols_own() -> None:
    trie: FilterTrie[str] = FilterTrie(separator=".", one="*", rest=">", hidden="")
    trie.add("a.*.>", "s")
    assert set(trie.route("a.b").grants) == {"s"}
    assert set(trie.route("a.b.c/+").grants) == {"s"}
    assert not trie.route("a").grants
    trie.add(">", "t")
    assert set(trie.route("$x").grants) == {"t"}


def test_equal_routes_are_one_object() -> None:
    trie: FilterTrie[str] = FilterTrie()
    trie.add("a/#", "s", 1)
    assert trie.route("a/b") is trie.route("a/c")
    assert trie.route("b") is not trie.route("a/b")


def test_a_storm_of_connecting_devices_leaves_other_routes_cached() -> None:
    trie: FilterTrie[str] = FilterTrie()
    trie.add("devices/+/state", "dashboard")
    names = [f"devices/{number}/state" for number in range(100)]
    for name in names:
        trie.route(name)
    found = trie.found
    for number in range(1000, 3000):
        trie.add(f"devices/{number}/commands/#", f"device{number}")
        trie.add(f"devices/{number}/config", f"device{number}")
    for name in names:
        assert set(trie.route(name).grants) == {"dashboard"}
    assert trie.found == found
    trie.add("devices/7/#", "late")
    for name in names:
        trie.route(name)
    assert trie.found == found + 1
    assert set(trie.route("devices/7/state").grants) == {"dashboard", "late"}


def test_cached_names_are_bounded() -> None:
    trie: FilterTrie[str] = FilterTrie(names_max=50)
    trie.add("#", "s")
    for number in range(500):
        assert set(trie.route(f"a/{number}").grants) == {"s"}
        assert len(trie._cached) <= 50
        assert len(trie._stamps) <= 150
        assert len(trie._equal) <= 50


def combined(trie: FilterTrie[int], name: str) -> dict[int, list[Hashable]]:
    return {subscriber: sorted(values, key=str) for subscriber, values in trie.route(name).grants.items()}


def test_a_route_to_very_many_is_what_its_filters_say() -> None:
    trie: FilterTrie[int] = FilterTrie()
    wanted: dict[int, list[Hashable]] = {}
    for topic_filter, subscribers, value in (("a/#", range(3000), 1), ("a/+", range(2900, 3500), 2), ("#", [7], 3)):
        for subscriber in subscribers:
            trie.add(topic_filter, subscriber, value)
            wanted.setdefault(subscriber, []).append(value)
    route = trie.route("a/b")
    assert combined(trie, "a/b") == wanted
    assert (len(route.grants), route.grants[2950], route.grants[7][-1]) == (3500, (1, 2), 1)
    assert dict(route.grants.items()) == {each: route.grants[each] for each in route.grants}
    assert 4000 not in route.grants
    assert trie.route("a/c") is route
    assert trie.remove("a/#", 2950)
    trie.add("a/b", 4000, 4)
    assert route.grants[2950] == (1, 2)  # a route does not change; it may be in use
    assert combined(trie, "a/b") == {**wanted, 2950: [2], 4000: [4]}


def test_a_route_to_very_many_leaves_out_those_without_permission() -> None:
    trie: FilterTrie[int] = FilterTrie()
    for subscriber in range(3000):
        trie.add("#", subscriber)
    asked: list[tuple[str, int]] = []

    def permits(name: str, subscriber: int) -> bool:
        asked.append((name, subscriber))
        return name != "odd" or subscriber % 2 == 1

    trie.permits = permits
    assert trie.route("even") is trie.route("other")
    trie.forget_routes()
    trie.asks = lambda: True
    odd, even = trie.route("odd").grants, trie.route("even").grants
    assert bool(odd)
    assert not asked, "the route of a name is computed without asking about its subscribers"
    assert (len(odd), len(even), odd[7], 8 in odd, 8 in even) == (1500, 3000, (None,), False, True)
    asked.clear()
    pieces = in_pieces(odd, 1000)
    assert next(iter(pieces)) == (1000, [(subscriber, (None,)) for subscriber in range(1, 1000, 2)])
    assert len(asked) == 1000


def test_a_route_to_few_leaves_out_those_without_permission() -> None:
    trie: FilterTrie[int] = FilterTrie()
    for subscriber in range(10):
        trie.add("#", subscriber)
    trie.asks, trie.permits = lambda: True, lambda name, subscriber: name != "odd" or subscriber % 2 == 1
    assert list(trie.route("odd").grants) == list(trie.match("odd")) == [1, 3, 5, 7, 9]
    assert trie.route("even") is trie.route("other")
