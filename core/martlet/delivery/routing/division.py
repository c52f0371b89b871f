"""Divides records among their receivers, so that each receiver gets few runs.

Messages of many names alternate: with 50 devices each run would have one message. So the records of a slice that have
the same route go together. A receiver in several routes, such as a subscriber to everything, gets the records of all of
them as one part, so that each receiver gets its records in log order.
"""

from collections.abc import Hashable, Mapping
from itertools import groupby
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, final

from martlet.runtime.native import native
from martlet.store import Queue

__all__ = ["STEPS_A_SLICE", "Found", "Grants", "Interest", "Route", "divide", "group_by_route"]

T = TypeVar("T", bound=Hashable)

# Above this many pairs of receivers and routes, and of receivers in several routes and changes of the route, the
# division would take longer than it saves.
PAIRS_MAX: Final = 1024
STEPS_MAX: Final = 8192
# Steps of an interest after which others have a turn; also the number of records looked at together.
STEPS_A_SLICE: Final = 8192
RECORDS_AT_ONCE: Final = 16

# (position, bytes with the record, start and end of the record there, name, its queue)
Found: TypeAlias = tuple[int, bytes, int, int, str, Queue]
# Receivers, and for each the values of its matching filters.
Grants: TypeAlias = Mapping[T, tuple[Hashable, ...]]
Part: TypeAlias = tuple[Grants[Any], list[Found]]


@final
class Route(Generic[T]):
    """The receivers of the messages of a name, and for each the values of its matching filters."""

    __slots__ = ("grants",)

    def __init__(self, grants: Grants[T]) -> None:
        self.grants = grants


class Interest(Protocol):
    """Maps names to receivers; implemented by `martlet.delivery.routing.route_cache.RouteCache`.

    ``steps`` counts the steps spent on finding routes since the start, about 0.2 us each.
    """

    steps: int

    def find_route(self, name: str) -> Route[Any] | None:
        """Return the route of *name*, the same object for equal routes; a message without a tag has the name "".

        Returns None if finding the route takes more than a turn of the event loop: then ask again in the next turn.
        """
        ...

    def known_routes(self, records: list["Found"], begin: int, end: int) -> list[Route[Any]]:
        """Return the routes of the first of *records* from index *begin* up to *end*, as far as they need no search."""
        ...


# A route with the consecutive records that have it.
Stretch: TypeAlias = tuple[Route[Any], list[Found]]


def divide(records: list[Found], interest: Interest, begin: int = 0, stop: int | None = None) -> tuple[list[Part], int]:
    """Divide *records* from index *begin* up to *stop* among receivers; return their parts, and the end index.

    Records without receivers are left out. It ends early if names are new and take long, because many filters with
    wildcards may match each of them; then no record may have been divided.
    """
    end = len(records) if stop is None else stop
    routes = _find_routes(records, interest, begin, end)
    if not routes:
        return [], begin
    found, alternates = native(group_by_route)(records, begin, routes)
    parts = [(route, part) for route, part in found if route.grants]
    if alternates and sum([_count_receivers(route) for route, _ in parts]) > PAIRS_MAX:
        return [(route.grants, part) for route, part in _stretches(records, begin, routes)], begin + len(routes)
    if alternates:
        return _separate_shared(parts, records, begin, routes), begin + len(routes)
    return [(route.grants, part) for route, part in parts], begin + len(routes)


def _find_routes(records: list[Found], interest: Interest, begin: int, end: int) -> list[Route[Any]]:
    """Return the routes of *records* from index *begin* up to *end*, or of fewer, as `divide` says."""
    find_route, limit = interest.find_route, interest.steps + STEPS_A_SLICE
    routes = interest.known_routes(records, begin, end)
    while (start := begin + len(routes)) < end and interest.steps <= limit:
        for each in records[start : min(start + RECORDS_AT_ONCE, end)]:
            route = find_route(each[4])
            if route is None:
                return routes
            routes.append(route)
        routes += interest.known_routes(records, begin + len(routes), end)
    return routes


def group_by_route(records: list[Found], begin: int, routes: list[Route[Any]]) -> tuple[list[Stretch], bool]:
    """Return each different one of *routes*, with all of its records, and whether one comes again after another.

    *routes* are those of *records* from index *begin* on. The native kernel has this function as well; see
    `martlet.runtime.native`.
    """
    first = routes[0]
    if routes.count(first) == len(routes):
        return [(first, records[begin : begin + len(routes)])], False
    parts: dict[int, Stretch] = {}
    previous, alternates = None, False
    for index, route in enumerate(routes, begin):
        part = parts.get(id(route))
        if part is None:
            part = parts[id(route)] = route, []
        elif route is not previous:
            alternates = True
        previous = route
        part[1].append(records[index])
    return list(parts.values()), alternates


def _stretches(records: list[Found], begin: int, routes: list[Route[Any]]) -> list[Stretch]:
    """Return the stretches of *records*, whose *routes* are those from index *begin* on, that have receivers."""
    stretches: list[Stretch] = []
    for _, same in groupby(enumerate(routes, begin), key=lambda each: id(each[1])):
        (start, route), *others = same
        if route.grants:
            stretches.append((route, records[start : start + 1 + len(others)]))
    return stretches


def _count_receivers(route: Route[Any]) -> int:
    """Return the number of receivers of *route*, which takes long to count for very many."""
    return len(route.grants) if isinstance(route.grants, dict) else PAIRS_MAX + 1


def _separate_shared(found: list[Stretch], records: list[Found], begin: int, routes: list[Route[Any]]) -> list[Part]:
    """Return the parts *found*, without the receivers of several of them, and one part for these.

    *routes* are those of *records* from index *begin* on.
    """
    routes_of: dict[Any, list[Route[Any]]] = {}
    for route, _ in found:
        for receiver in route.grants:
            routes_of.setdefault(receiver, []).append(route)
    routes_of_shared = {receiver: own_routes for receiver, own_routes in routes_of.items() if len(own_routes) > 1}
    if not routes_of_shared:
        return [(route.grants, part) for route, part in found]
    stretches = _stretches(records, begin, routes)
    if len(routes_of_shared) * len(stretches) > STEPS_MAX:
        return [(route.grants, part) for route, part in stretches]
    result: list[Part] = []
    for route, part in found:
        unshared = {each: values for each, values in route.grants.items() if each not in routes_of_shared}
        if unshared:
            result.append((unshared, part))
    # Receivers of the same routes with the same values share their records.
    receivers_alike: dict[tuple[tuple[int, tuple[Hashable, ...]], ...], list[Any]] = {}
    for receiver, own_routes in routes_of_shared.items():
        key = tuple((id(route), route.grants[receiver]) for route in own_routes)
        receivers_alike.setdefault(key, []).append(receiver)
    for key, receivers in receivers_alike.items():
        result += _merge_for(receivers, stretches, values_of=dict(key))
    return result


def _merge_for(
    receivers: list[Any], stretches: list[Stretch], values_of: dict[int, tuple[Hashable, ...]]
) -> list[Part]:
    """Return the records of *receivers* in log order, a part for each change of the values.

    *values_of* has the values of the receivers by the identity of a route.
    """
    result: list[Part] = []
    last: tuple[Hashable, ...] | None = None
    for route, part in stretches:
        values = values_of.get(id(route))
        if values is None:
            continue
        if values == last:
            result[-1][1].extend(part)
        else:
            result.append((dict.fromkeys(receivers, values), list(part)))
            last = values
    return result
