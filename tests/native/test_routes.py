"""The kernel finds and groups the routes of records as Python does."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.native.kernel import kernel_of

from martlet.delivery.routing.division import Found, Route, group_by_route
from martlet.delivery.routing.route_cache import RouteCache, known_routes
from martlet.store import Queue

QUEUE = Queue("t", 0)
KNOWN = ["a/1", "a/2", "b/1", "c"]
# The same object again and again, and equal ones.
NAMES = st.lists(st.sampled_from(KNOWN) | st.sampled_from(KNOWN).map(lambda name: "".join([*name])))


def records_of(names: list[str]) -> list[Found]:
    return [(number, b"", 0, 0, name, QUEUE) for number, name in enumerate(names)]


@given(NAMES, st.sets(st.sampled_from(KNOWN)), st.booleans(), st.integers(0, 5), st.integers(0, 9))
def test_the_kernel_finds_the_routes_that_python_finds(
    names: list[str], known: set[str], changed: bool, begin: int, end: int
) -> None:
    routes: RouteCache[str] = RouteCache()
    routes.add("a/+", "s")
    for name in sorted(known):
        routes.route(name)
    if changed:
        routes.add("a/#", "t")
    for stop in end, len(names):
        arguments = records_of(names), begin, stop, routes._cached, routes._changes
        python, kernel = known_routes(*arguments), kernel_of(known_routes)(*arguments)
        assert list(map(id, kernel)) == list(map(id, python))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(0, 5))
def test_the_kernel_groups_records_as_python_does(numbers: list[int], begin: int) -> None:
    each: list[Route[Any]] = [Route({}) for _ in range(4)]
    arguments = records_of(["x"] * (begin + len(numbers))), begin, [each[number] for number in numbers]
    assert kernel_of(group_by_route)(*arguments) == group_by_route(*arguments)
