"""Filters of closed cursors, removed some at a time, because a client may have 20,000.

A cursor that has left takes no records, so the time of the removal does not matter. If the cursor comes back before all
its filters are removed, the others stay.
"""

from collections.abc import Callable
from typing import Final, final

from martlet.delivery.cursor import Cursor
from martlet.delivery.routing.route_cache import RouteCache
from martlet.runtime.steps import per_slice

__all__ = ["Departures"]

# Filters removed in one turn of the event loop.
FILTERS_A_TURN: Final = per_slice(us=4)


@final
class Departures:
    """The filters that are still to be removed; *ring* requests a call of `go_on`."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._filters_left: dict[tuple[RouteCache[Cursor], Cursor], list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._filters_left)

    def leave(self, routes: RouteCache[Cursor], cursor: Cursor) -> None:
        """Remove the filters of *cursor*, which takes nothing by *routes* now: few at once, many in later turns."""
        if len(cursor.filters) <= FILTERS_A_TURN:
            for each in cursor.filters:
                routes.remove(each, cursor)
        else:
            self._filters_left[routes, cursor] = list(cursor.filters)
            self._ring()

    def come_back(self, routes: RouteCache[Cursor], cursor: Cursor) -> None:
        """Keep the remaining filters of *cursor* in *routes*, except dropped ones and those that begin later."""
        for each in self._filters_left.pop((routes, cursor), ()):
            if each not in cursor.filters or (cursor.begins is not None and each in cursor.begins):
                routes.remove(each, cursor)

    def go_on(self) -> None:
        """Remove a slice of the filters."""
        count = FILTERS_A_TURN
        while self._filters_left and count > 0:
            (routes, cursor), filters = next(iter(self._filters_left.items()))
            removed = filters[-count:]
            del filters[-count:]
            for each in removed:
                routes.remove(each, cursor)
            count -= len(removed)
            if not filters:
                del self._filters_left[routes, cursor]
