"""Finds the subscribers of a name: a tree of topic filters, and routes cached per name.

A filter consists of levels with wildcards: one for any level, one for all further levels. The tree finds the
subscribers of a name in one walk over its levels, whatever the number of filters. The result is cached as a `Route`,
because names repeat, and names share equal routes.

A change of filters must not invalidate every cached route: devices that connect bring thousands of changes. So a route
depends on the stamps of its name's prefixes. A change increments one stamp, that of the levels before the filter's
first wildcard, and a filter without wildcards only drops the route of its own name. While nothing changes, a lookup
compares one number.

Often the last level tells devices apart, and no filter names it: then all names with the same levels before it share
one cached route, and a new one of them needs no walk.

Precedents: NATS ``server/sublist.go``, mosquitto ``subs.c``. MQTT 3.1.1 section 4.7 has the rules of the wildcards.
"""

from collections.abc import Callable, Collection, Hashable, ItemsView, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Generic, TypeAlias, TypeVar, final

from martlet.delivery.routing.division import Found, Grants, Route
from martlet.delivery.routing.filter_tree import FilterTree, FilterWalk, Stored, Table
from martlet.errors import Reason, Refused
from martlet.runtime.native import native
from martlet.runtime.steps import Steps, finish_now, per_slice

__all__ = ["RouteCache", "in_pieces", "known_routes"]

T = TypeVar("T", bound=Hashable)

# Grants, and the number of subscribers checked to find them.
Piece: TypeAlias = tuple[int, Collection[tuple[T, tuple[Hashable, ...]]]]

# Above this many subscribers of a name, they are not combined into one table: for 100,000 that takes 50 ms, and copying
# the tables of its filters 1 ms.
COMBINED_MAX: Final = 1000
# Number of filters whose tables are left as they are; each costs a look-up for each subscriber of the others.
TABLES_MAX: Final = 8
# Steps in one turn of the event loop for finding a route. A step adds VALUES_A_STEP values.
STEPS_A_TURN: Final = per_slice(us=0.5)
VALUES_A_STEP: Final = 32
# Steps that a new name takes besides its walk through the filters: 20 us.
NAME_STEPS: Final = 100
# Steps that a new name takes whose route is known from another one with the same levels before the last: 3 us.
SIBLING_STEPS: Final = 15
NAMES_MAX: Final = 200_000
# Approximate memory limit of cached routes; long names and routes to many subscribers take most of it.
ROUTES_BYTES_MAX: Final = 1 << 27
NAME_BYTES: Final = 300
STAMP_BYTES: Final = 150
ROUTE_BYTES: Final = 400
SUBSCRIBER_BYTES: Final = 300
# Levels of the longest prefix with a stamp of its own; longer ones share it, so that a name has few stamps.
STAMPED_LEVELS: Final = 8
# Entries of dropped tables freed when a route is made, which adds three at most.
FREED_AT_ONCE: Final = 16
ROOT: Final = None


NOBODY: Final[Route[Any]] = Route({})


@final
class _CombinedGrants(Mapping[T, tuple[Hashable, ...]], Generic[T]):
    """Grants of very many subscribers: those in *united* and in the tables of some filters, combined lazily."""

    __slots__ = ("_tables", "_united")

    def __init__(self, united: dict[T, tuple[Hashable, ...]], tables: Sequence[Table[T]]) -> None:
        self._united = united
        self._tables = [table.copy() for table in tables]

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[T]:
        return (subscriber for subscriber, _ in self.pairs())

    def items(self) -> ItemsView[T, tuple[Hashable, ...]]:
        return _CombinedGrantsItems(self)

    def pairs(self) -> Iterator[tuple[T, tuple[Hashable, ...]]]:
        """Yield each subscriber with its values."""
        united, tables = self._united, self._tables
        for subscriber, values in united.items():
            yield subscriber, (*values, *[table[subscriber] for table in tables if subscriber in table])
        is_only_table = len(tables) == 1 and not united
        for index, table in enumerate(tables):
            earlier, later = tables[:index], tables[index + 1 :]
            for subscriber, value in table.items():
                if is_only_table:
                    yield subscriber, (value,)
                elif subscriber not in united and not any(subscriber in each for each in earlier):
                    yield subscriber, (value, *[each[subscriber] for each in later if subscriber in each])

    def __getitem__(self, subscriber: T) -> tuple[Hashable, ...]:
        table_values = [table[subscriber] for table in self._tables if subscriber in table]
        values = (*self._united.get(subscriber, ()), *table_values)
        if not values:
            raise KeyError(subscriber)
        return values


@final
class _CombinedGrantsItems(ItemsView[T, tuple[Hashable, ...]]):
    """The items of `_CombinedGrants`, without a look-up for each."""

    __slots__ = ("_combined",)

    def __init__(self, combined: _CombinedGrants[T]) -> None:
        super().__init__(combined)
        self._combined = combined

    def __iter__(self) -> Iterator[tuple[T, tuple[Hashable, ...]]]:
        return self._combined.pairs()


@final
class _PermittedGrants(Mapping[T, tuple[Hashable, ...]], Generic[T]):
    """The grants of very many subscribers of a name; `pieces` omits subscribers that may not receive its messages.

    Asking for permission takes 0.3 us, so a piece is filtered only when it is used.
    """

    __slots__ = ("_all", "_name", "_permits")

    def __init__(self, name: str, grants: Grants[T], permits: Callable[[str, T], bool]) -> None:
        self._name = name
        self._all = grants
        self._permits = permits

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[T]:
        return (subscriber for subscriber in self._all if self._permits(self._name, subscriber))

    def __getitem__(self, subscriber: T) -> tuple[Hashable, ...]:
        values = self._all[subscriber]
        if not self._permits(self._name, subscriber):
            raise KeyError(subscriber)
        return values

    def pieces(self, size: int) -> Iterator[Piece[T]]:
        """Yield the subscribers in pieces of *size*."""
        name, permits = self._name, self._permits
        for count, piece in _split(self._all, size):
            yield count, [pair for pair in piece if permits(name, pair[0])]


def in_pieces(grants: Grants[T], size: int) -> Iterable[Piece[T]]:
    """Yield *grants* in pieces: the number of subscribers checked, *size* at most, and the permitted ones."""
    if isinstance(grants, dict) and len(grants) <= size:
        return ((len(grants), grants.items()),)
    return grants.pieces(size) if isinstance(grants, _PermittedGrants) else _split(grants, size)


def _split(grants: Grants[T], size: int) -> Iterator[Piece[T]]:
    pairs = iter(grants.items())
    while piece := list(islice(pairs, size)):
        yield len(piece), piece


@final
class _Stamp:
    """Counts the changes of filters with a certain prefix: the levels before their first wildcard."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


@final
class _Cached(Generic[T]):
    """A route and its stamps, whose sum was ``total``; last found valid after ``checked`` changes."""

    __slots__ = ("checked", "route", "stamps", "total")

    def __init__(self, route: Route[T], stamps: tuple[_Stamp, ...], checked: int) -> None:
        self.route = route
        self.stamps = stamps
        self.total = sum([stamp.count for stamp in stamps])
        self.checked = checked


@final
class RouteCache(Generic[T]):
    """Topic filters of subscribers; a subscriber is any hashable.

    Args:
      separator: separates the levels of names and filters.
      one: a level of a filter that matches any single level.
      rest: the last level of a filter that matches any number of further levels.
      hidden: names with this prefix are not matched by wildcards at a filter's first level; empty for none.
      names_max: the maximum number of names with cached routes; one more drops them all.
      rest_takes_none: whether *rest* matches no level too: MQTT's ``a/#`` matches ``a``, and NATS' ``a.>`` does not.
    """

    def __init__(
        self,
        separator: str = "/",
        one: str = "+",
        rest: str = "#",
        hidden: str = "$",
        names_max: int = NAMES_MAX,
        *,
        rest_takes_none: bool = True,
    ) -> None:
        self._separator = separator
        self._one = one
        self._rest = rest
        self._names_max = names_max
        self._tree: FilterTree[T] = FilterTree(separator, one, rest, hidden, rest_takes_none=rest_takes_none)
        self._count = 0
        self._changes = 0
        self._cached: dict[str, _Cached[T]] = {}
        self._stamps: dict[str | None, _Stamp] = {}
        # By the levels before the last one: the routes of names whose last level does not matter.
        self._cached_by_parent: dict[str, _Cached[T]] = {}
        self._route_by_key: dict[Hashable, Route[T]] = {}
        self._bytes = 0  # bytes that these four tables have taken since they were empty
        # Earlier contents of these four tables, freed a few at a time: 200,000 routes take 0.1 s.
        self._tables_to_free: list[dict[Any, Any]] = []
        self._unfinished: tuple[str, Steps[Route[T]]] | None = None  # the name whose route is being found
        self.routes_bytes_max = ROUTES_BYTES_MAX
        self.routes_found = 0  # number of routes found outside of the cache
        self.steps = 0  # steps spent on finding routes (`FilterTree.steps`)
        # Returns whether a subscriber may receive messages of a name; called while ``asks`` returns True.
        self.permits: Callable[[str, T], bool] = lambda name, subscriber: True
        self.asks: Callable[[], bool] = lambda: False
        # Returns whether the protocol allows a name; no filter matches other names.
        self.is_name: Callable[[str], bool] = lambda name: True

    def __len__(self) -> int:
        """The number of filters."""
        return self._count

    # filters

    def check(self, topic_filter: str) -> list[str]:
        """Return the levels of *topic_filter*. Raises `Refused` (ILLEGAL) if a wildcard is misplaced."""
        levels = topic_filter.split(self._separator)
        if self._rest in topic_filter or self._one in topic_filter:
            for index, level in enumerate(levels):
                if level == self._rest and index == len(levels) - 1:
                    break
                if self._rest in level or (self._one in level and level != self._one):
                    text = f"topic filter {topic_filter!r:.200} has a misplaced wildcard"
                    raise Refused(
                        Reason.ILLEGAL,
                        f"{text}; use {self._one!r} only as a whole level, {self._rest!r} only as the last one",
                    )
        return levels

    def is_literal(self, topic_filter: str) -> bool:
        """Return whether *topic_filter* matches only one name: itself."""
        return self._one not in topic_filter and self._rest not in topic_filter

    def add(self, topic_filter: str, subscriber: T, value: Hashable = None) -> None:
        """Subscribe *subscriber* to *topic_filter*; *value* is in its routes and replaces an earlier one.

        Raises:
          Refused: the filter is invalid.
        """
        levels = self.check(topic_filter)
        self._count += self._tree.add(levels, subscriber, value)
        self._invalidate_routes(topic_filter, levels)

    def remove(self, topic_filter: str, subscriber: T) -> bool:
        """Remove the filter of *subscriber*; return False if there was none."""
        levels = topic_filter.split(self._separator)
        if not self._tree.remove(levels, subscriber):
            return False
        self._count -= 1
        self._invalidate_routes(topic_filter, levels)
        return True

    def _invalidate_routes(self, topic_filter: str, levels: list[str]) -> None:
        """Invalidate exactly the cached routes that the change affects."""
        self._drop_equal()
        literal_levels = len(levels)
        for index, level in enumerate(levels):
            if level in (self._one, self._rest):
                literal_levels = index
                break
        if literal_levels == len(levels):
            self._invalidate_name(levels)
            return
        if literal_levels and levels[literal_levels] == self._rest:
            # The wildcard for further levels also matches zero levels.
            self._invalidate_name(levels[:literal_levels])
        prefix = self._separator.join(levels[: min(literal_levels, STAMPED_LEVELS)]) if literal_levels else ROOT
        stamp = self._stamps.get(prefix)
        if stamp is not None:
            stamp.count += 1
            self._changes += 1

    def _invalidate_name(self, levels: list[str]) -> None:
        """Invalidate the cached route of the name with *levels*, of which the last matters now."""
        self._cached.pop(self._separator.join(levels), None)
        self._cached_by_parent.pop(self._separator.join(levels[:-1]), None)

    def forget_routes(self) -> None:
        """Drop all cached routes, because permissions have changed or they take too much memory."""
        self._tables_to_free += [each for each in (self._cached, self._stamps, self._cached_by_parent) if each]
        self._cached, self._stamps, self._cached_by_parent, self._bytes, self._unfinished = {}, {}, {}, 0, None
        self._drop_equal()

    def _drop_equal(self) -> None:
        if self._route_by_key:
            self._tables_to_free.append(self._route_by_key)
            self._route_by_key = {}

    def _free_some(self) -> None:
        for _ in range(FREED_AT_ONCE):
            self._tables_to_free[-1].popitem()
            if not self._tables_to_free[-1]:
                self._tables_to_free.pop()
                if not self._tables_to_free:
                    return

    # names

    def route(self, name: str) -> Route[T]:
        """Return the subscribers of *name*, however long finding them takes."""
        while (route := self.find_route(name)) is None:
            pass
        return route

    def find_route(self, name: str) -> Route[T] | None:
        """Return the subscribers of *name*; None if finding them takes more than a turn: then ask again in the next.

        Finding starts again if another name is asked for in between.
        """
        cached = self._cached.get(name)
        if cached is not None and (cached.checked == self._changes or self._is_valid(cached)):
            return cached.route
        parent = name[: max(name.rfind(self._separator), 0)]
        cached = self._cached_by_parent.get(parent) if parent else None
        if cached is not None and self._is_valid(cached) and self.is_name(name) and not self.asks():
            return self._share_cached(name, cached)
        if self._unfinished is not None and self._unfinished[0] == name:
            return self._continue_finding(name, self._unfinished[1])
        return self._begin_finding(name)

    def known_routes(self, records: list[Found], begin: int, end: int) -> list[Route[T]]:
        """Return the routes of the first of *records* from index *begin* up to *end* that need no search."""
        return native(known_routes)(records, begin, end, self._cached, self._changes)

    def _is_valid(self, cached: _Cached[T]) -> bool:
        """Return whether no filter has changed that could change the route of *cached*."""
        if sum([stamp.count for stamp in cached.stamps]) != cached.total:
            return False
        cached.checked = self._changes
        return True

    def _share_cached(self, name: str, cached: _Cached[T]) -> Route[T]:
        """Keep *cached*, which is for names with another last level, for *name* too; return its route."""
        self.routes_found += 1
        self.steps += SIBLING_STEPS
        self._make_room()
        self._bytes += NAME_BYTES + name.__sizeof__()
        self._cached[name] = cached
        return cached.route

    def _make_room(self) -> None:
        """Drop all cached routes if they are too many, and free some that were dropped before."""
        if len(self._cached) >= self._names_max or self._bytes >= self.routes_bytes_max:
            self.forget_routes()
        if self._tables_to_free:
            self._free_some()

    def _continue_finding(self, name: str, steps: Steps[Route[T]]) -> Route[T] | None:
        self._unfinished = None
        try:
            next(steps)
        except StopIteration as finished:
            route: Route[T] = finished.value
            return route
        self._unfinished = name, steps
        return None

    def _begin_finding(self, name: str) -> Route[T] | None:
        self.routes_found += 1
        self.steps += NAME_STEPS
        self._make_room()
        # The stamps as they are now: if filters change before the route is found, only waiting messages use it.
        stamps_before = len(self._stamps)
        cached: _Cached[T] = _Cached(NOBODY, self._stamps_of(name), self._changes)
        size = name.__sizeof__()
        self._bytes += NAME_BYTES + size + (len(self._stamps) - stamps_before) * (STAMP_BYTES + size)
        walk = self._begin_walk(name)
        if not self._continue_walk(walk) or not _has_few_subscribers(walk.tables):
            return self._continue_finding(name, self._find_route_in_slices(name, walk, cached))
        # Equal routes share a table for each filter, or have equal grants. A change of filters empties `_route_by_key`.
        grants = self._only_permitted(name, _unite(walk.tables))
        key = frozenset(grants.items())
        cached.route = self._route_by_key.get(key) or self._share_route(key, grants, len(grants))
        self._cached[name] = cached
        if not walk.reads_last and not self.asks():
            self._cached_by_parent[name[: walk.last - len(self._separator)]] = cached
        return cached.route

    def _find_route_in_slices(self, name: str, walk: FilterWalk[T], cached: _Cached[T]) -> Steps[Route[T]]:
        """Return the route of *name*, which *walk* finds, and cache it in *cached*."""
        key, large_tables = yield from self._finish_walk(walk)
        route = self._route_by_key.get(key)
        if route is None:
            route = self._share_route(key, *(yield from self._combine(walk.tables, large_tables)))
        cached.route = Route(_PermittedGrants(name, route.grants, self.permits)) if self.asks() else route
        self._cached[name] = cached
        return cached.route

    def _share_route(self, key: Hashable, grants: Grants[T], count: int) -> Route[T]:
        """Return a route to *count* subscribers, shared with equal routes."""
        self._bytes += ROUTE_BYTES + count * SUBSCRIBER_BYTES
        route = self._route_by_key[key] = Route(grants)
        return route

    def _only_permitted(self, name: str, grants: Grants[T]) -> Grants[T]:
        """Return the entries of *grants* whose subscribers may receive messages of *name*."""
        if not self.asks():
            return grants
        permits = self.permits
        return {subscriber: values for subscriber, values in grants.items() if permits(name, subscriber)}

    def _stamps_of(self, name: str) -> tuple[_Stamp, ...]:
        """Return the stamps of the first proper prefixes of *name*, creating missing ones."""
        stamps: list[_Stamp] = []
        prefix: str | None = ROOT
        at = -1
        for _ in range(STAMPED_LEVELS + 1):
            stamp = self._stamps.get(prefix)
            if stamp is None:
                stamp = self._stamps[prefix] = _Stamp()
            stamps.append(stamp)
            at = name.find(self._separator, at + 1)
            if at < 0:
                break
            prefix = name[:at]
        return tuple(stamps)

    def match(self, name: str) -> Grants[T]:
        """Return the subscribers of *name* with the values of their matching filters, without using the cache."""
        walk = self._begin_walk(name)
        if self._continue_walk(walk) and _has_few_subscribers(walk.tables):
            return self._only_permitted(name, _unite(walk.tables))
        _, large_tables = finish_now(self._finish_walk(walk))
        return self._only_permitted(name, finish_now(self._combine(walk.tables, large_tables))[0])

    def _begin_walk(self, name: str) -> FilterWalk[T]:
        return self._tree.begin(name) if self.is_name(name) else FilterWalk("", [])

    def _continue_walk(self, walk: FilterWalk[T]) -> bool:
        """Continue *walk* for a turn; return whether it is over."""
        tree = self._tree
        before = tree.steps
        is_over = tree.go_on(walk, STEPS_A_TURN)
        self.steps += tree.steps - before
        return is_over

    def _finish_walk(self, walk: FilterWalk[T]) -> Steps[tuple[Hashable, list[Table[T]]]]:
        """Continue *walk* to its end; return a key of the filters found, and the tables with very many subscribers."""
        while not self._continue_walk(walk):
            yield
        tables, ids, large_tables = walk.tables, list[int](), list[Table[T]]()
        for start in range(0, len(tables), STEPS_A_TURN):
            part = tables[start : start + STEPS_A_TURN]
            ids += map(id, part)
            large_tables += [stored for stored in part if isinstance(stored, dict) and len(stored) > COMBINED_MAX]
            if len(part) == STEPS_A_TURN:
                yield
        return tuple(ids), large_tables if len(large_tables) <= TABLES_MAX else []

    def _combine(self, tables: Sequence[Stored[T]], large_tables: list[Table[T]]) -> Steps[tuple[Grants[T], int]]:
        """Return the very many subscribers in *tables*, each with its values, and about how many there are.

        Subscribers in *large_tables*, a part of *tables*, are not counted one by one.
        """
        large_ids, grants, steps = set(map(id, large_tables)), dict[T, tuple[Hashable, ...]](), 0
        for stored in tables:
            if id(stored) in large_ids:
                continue
            for subscriber, value in list(stored.items()) if isinstance(stored, dict) else (stored,):
                earlier = grants.get(subscriber, ())
                grants[subscriber] = (*earlier, value)
                steps += 1 + len(earlier) // VALUES_A_STEP
                if steps >= STEPS_A_TURN:
                    self.steps += steps
                    steps = 0
                    yield
        count = len(grants) + sum(map(len, large_tables))
        return _CombinedGrants(grants, large_tables) if large_tables else grants, count


def known_routes(
    records: list[Found], begin: int, end: int, cached: dict[str, _Cached[T]], changes: int
) -> list[Route[T]]:
    """Return the routes of *records* from index *begin* up to *end*, or up to the first name without a valid one.

    *cached* has routes by name; those that were checked after *changes* are valid. The native kernel has this function
    as well; see `martlet.runtime.native`.
    """
    routes: list[Route[T]] = []
    name: str | None = None
    for each in records[begin:end]:
        if each[4] is not name:
            name = each[4]
            known = cached.get(name)
            if known is None or known.checked != changes:
                break
            route = known.route
        routes.append(route)
    return routes


def _has_few_subscribers(tables: Sequence[Stored[T]]) -> bool:
    """Return whether the subscribers in *tables*, each counted once per filter, are few enough for one table."""
    count = len(tables)
    if count <= COMBINED_MAX:
        count += sum([len(table) - 1 for table in tables if isinstance(table, dict)])
    return count <= COMBINED_MAX


def _unite(tables: Sequence[Stored[T]]) -> dict[T, tuple[Hashable, ...]]:
    """Return the subscribers in *tables*, each with its values."""
    grants: dict[T, tuple[Hashable, ...]] = {}
    for table in tables:
        for subscriber, value in table.items() if isinstance(table, dict) else (table,):
            earlier = grants.get(subscriber)
            grants[subscriber] = (value,) if earlier is None else (*earlier, value)
    return grants
