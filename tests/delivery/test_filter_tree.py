"""The tree of filters has few nodes, whatever filters come and go."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from martlet.delivery.routing.filter_tree import FilterTree, Stored, _Node

LEVEL = st.sampled_from(["a", "b", "", "+"])
FILTERS = st.lists(LEVEL, min_size=1, max_size=9).map(tuple)
NAMES = st.lists(st.sampled_from(["a", "b", ""]), min_size=1, max_size=9)


def tree() -> FilterTree[int]:
    return FilterTree("/", "+", "#", "$")


def find(found: FilterTree[int], name: str) -> list[Stored[int]]:
    walk = found.begin(name)
    assert found.go_on(walk)
    return walk.tables


def table_of(stored: Stored[int]) -> dict[int, object]:
    return stored if isinstance(stored, dict) else {stored[0]: stored[1]}


def nodes(node: _Node[int], depth: int = 0) -> Iterator[tuple[_Node[int], int]]:
    """Yield all nodes, and how many are above each."""
    yield node, depth
    for child in [*(node.children or {}).values(), *([node.one] if node.one is not None else [])]:
        yield from nodes(child, depth + 1)


def check(found: FilterTree[int], count: int) -> None:
    """Check that each node but the root ends a filter or has several nodes below, and that *count* filters need few."""
    every = list(nodes(found._root))
    for node, depth in every:
        below = len(node.children or {}) + (node.one is not None)
        assert node.children is None or node.children
        assert depth == 0 or node.here is not None or node.rest is not None or below > 1
    assert len(every) <= 2 * count + 1


@given(st.lists(st.tuples(FILTERS, st.booleans(), st.integers(0, 2), st.booleans()), max_size=40), NAMES)
def test_a_filter_adds_two_nodes_at_most_and_leaves_none_behind(
    changes: list[tuple[tuple[str, ...], bool, int, bool]], name: list[str]
) -> None:
    found, model = tree(), dict[tuple[tuple[str, ...], int], int]()
    for number, (levels, has_rest, subscriber, is_added) in enumerate(changes):
        key = ((*levels, "#") if has_rest else levels), subscriber
        if is_added:
            assert found.add(key[0], subscriber, number) is (key not in model)
            model[key] = number
        else:
            assert found.remove(key[0], subscriber) is (model.pop(key, None) is not None)
        check(found, len({each for each, _ in model}))
        values = Counter(value for stored in find(found, "/".join(name)) for value in table_of(stored).values())
        assert values == Counter(value for (each, _), value in model.items() if matches(each, name))
    for each, subscriber in model:
        assert found.remove(each, subscriber)
    check(found, 0)


def matches(levels: tuple[str, ...], name: list[str]) -> bool:
    has_rest = levels[-1] == "#"
    wanted = levels[:-1] if has_rest else levels
    if len(name) < len(wanted) or (len(name) > len(wanted) and not has_rest):
        return False
    return all(level in ("+", own) for level, own in zip(wanted, name, strict=False))


def test_filters_of_200_levels_take_no_node_per_level() -> None:
    found = tree()
    for number in range(100):
        found.add([str(number), *["a"] * 199], number, None)
        found.add([*["b"] * 199, str(number)], number, None)
        found.add([str(number), *["+"] * 198, "x"], number, None)
        found.add(["c"] * number + ["d"] * (200 - number), number, None)
    assert sum(1 for _ in nodes(found._root)) <= 2 * 400 + 1


def test_the_filters_that_match_are_found_in_the_same_order_for_all_names() -> None:
    found = tree()
    for number, each in enumerate(["#", "a/#", "+/b/#", "a/+/c", "+/+/+", "a/b/c", "a/b/#", "+/#"]):
        found.add(each.split("/"), number, each)
    first = [ids(stored) for stored in find(found, "a/b/c")]
    assert sorted(first) == [(number,) for number in range(8)]
    for name in ("a/b/d", "x/b/c", "a/x/c", "a/b", "a", "x"):
        other = [ids(stored) for stored in find(found, name)]
        assert other == [each for each in first if each in other]


def ids(stored: Stored[int]) -> tuple[int, ...]:
    return tuple(table_of(stored))


CHANGES = st.lists(st.tuples(FILTERS, st.booleans(), st.booleans()), max_size=30)


@given(CHANGES, CHANGES, NAMES)
def test_a_walk_finds_what_stays_once_while_filters_come_and_go(
    first: list[tuple[tuple[str, ...], bool, bool]], later: list[tuple[tuple[str, ...], bool, bool]], name: list[str]
) -> None:
    found, current = tree(), set[tuple[str, ...]]()

    def change(levels: tuple[str, ...], has_rest: bool, is_added: bool) -> None:
        key = (*levels, "#") if has_rest else levels
        if is_added:
            found.add(key, 0, key)
            current.add(key)
        else:
            found.remove(key, 0)
            current.discard(key)

    for each in first:
        change(*each)
    stayed, seen = set(current), set(current)
    walk, left = found.begin("/".join(name)), iter(later)
    while not found.go_on(walk, 1):
        for levels, has_rest, is_added in islice(left, 1):
            change(levels, has_rest, is_added)
            stayed &= current
            seen |= current
    values = Counter(value for stored in walk.tables for value in table_of(stored).values())
    assert set(values) >= {each for each in stayed if matches(each, name)}
    assert set(values) <= {each for each in seen if matches(each, name)}
    assert set(values.values()) <= {1}
