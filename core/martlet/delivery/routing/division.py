"""Divides records among their receivers, so that each receiver gets few runs.

Messages of many names alternate: with 50 devices each run would have one message. So the records of a slice that have
the same route go together. A receiver in several routes, such as a subscriber to everything, gets the records of all of
them as one part, so that each receiver gets its records in log order.
"""

from collections.abc import Hashable, Mapping
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, final

from martlet.store import Queue

__all__ = ["STEPS_A_SLICE", "Found", "Grants", "Interest", "Route", "divide"]

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


# A route with the consecutive records that have it.
Stretch: TypeAlias = tuple[Route[Any], list[Found]]


def divide(records: list[Found], interest: Interest, begin: int = 0, stop: int | None = None) -> tuple[list[Part], int]:
    """Divide *records* from index *begin* up to *stop* among receivers; return their parts, and the end index.

    Records without receivers are left out. It ends early if names are new and take long, because many filters with
    wildcards may match each of them; then no record may have been divided.
    """
    stretches: list[Stretch] = []
    current: Route[Any] | None = None
    name: str | None = None  # of the previous record, whose route is `current`
    route_of, limit = interest.find_route, interest.steps + STEPS_A_SLICE
    end = len(records) if stop is None else stop
    for start in range(begin, end, RECORDS_AT_ONCE):
        if start >= end or interest.steps > limit:
            end = min(start, end)
            break
        for index, each in enumerate(records[start : min(start + RECORDS_AT_ONCE, end)], start):
            if each[4] is name:
                continue
            name = each[4]
            route = route_of(name)
            if route is None:
                end = index
                break
            if route is not current:
                if current is not None and current.grants:
                    stretches.append((current, records[begin:index]))
                begin, current = index, route
    if current is not None and current.grants:
        stretches.append((current, records[begin:end]))
    return _make_parts(stretches), end


def _make_parts(stretches: list[Stretch]) -> list[Part]:
    by_route = {id(route): route for route, _ in stretches}
    if len(by_route) == len(stretches) or sum(map(_count_receivers, by_route.values())) > PAIRS_MAX:
        return [(route.grants, part) for route, part in stretches]
    return _group_by_route(stretches, list(by_route.values()))


def _count_receivers(route: Route[Any]) -> int:
    """Return the number of receivers of *route*, which takes long to count for very many."""
    return len(route.grants) if isinstance(route.grants, dict) else PAIRS_MAX + 1


def _group_by_route(stretches: list[Stretch], routes: list[Route[Any]]) -> list[Part]:
    """Return the records of each route together."""
    routes_of: dict[Any, list[Route[Any]]] = {}
    for route in routes:
        for receiver in route.grants:
            routes_of.setdefault(receiver, []).append(route)
    routes_of_shared = {receiver: own_routes for receiver, own_routes in routes_of.items() if len(own_routes) > 1}
    if len(routes_of_shared) * len(stretches) > STEPS_MAX:
        return [(route.grants, part) for route, part in stretches]
    parts: dict[int, list[Found]] = {id(route): [] for route in routes}
    for route, part in stretches:
        parts[id(route)] += part
    result: list[Part] = []
    for route in routes:
        grants = route.grants
        unshared = grants
        if routes_of_shared:
            unshared = {each: values for each, values in grants.items() if each not in routes_of_shared}
        if unshared:
            result.append((unshared, parts[id(route)]))
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
