"""Filters that begin at a log position which routing has not reached yet.

A filter delivers records that are appended after it was added. Older records may not be readable yet, and a cursor
behind the tail still reads them. So such a filter joins the others when routing reaches the filter's position.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final, final

from martlet.delivery.cursor import Cursor
from martlet.delivery.routing.route_cache import RouteCache
from martlet.runtime.steps import per_slice

__all__ = ["FILTERS_A_SLICE", "NEVER", "Beginnings"]

NEVER: Final = 1 << 62
# Filters added in one slice.
FILTERS_A_SLICE: Final = per_slice(us=8)


@final
class Beginnings:
    """The filters of cursors that join *routes* later; *has* returns whether a cursor belongs to the owner of *routes*
    now.

    ``first`` is the lowest begin of all filters, `NEVER` if there is none.
    """

    __slots__ = ("_has", "_heap", "_number", "_routes", "first")

    def __init__(self, routes: RouteCache[Cursor], has: Callable[[Cursor], bool]) -> None:
        self.first = NEVER
        self._routes = routes
        self._has = has
        # By position: a cursor and its filters that begin there or, if they were changed since, later.
        self._heap: list[tuple[int, int, Cursor, list[str]]] = []
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def enter(self, cursor: Cursor, reached: int) -> None:
        """Add the filters of *cursor*; filters that begin after log position *reached*, up to which records are
        routed, wait.

        If there are many, most are added before the next message is routed.
        """
        filters = iter(cursor.filters)
        for topic_filter in islice(filters, FILTERS_A_SLICE):
            self.add(cursor, topic_filter, reached)
        if remaining := list(filters):
            self._push(max(cursor.start, reached), cursor, remaining)

    def add(self, cursor: Cursor, topic_filter: str, reached: int) -> None:
        """As `enter`, for one filter."""
        position = max(cursor.start, cursor.begins.get(topic_filter, 0) if cursor.begins else 0)
        if position <= reached:
            self._begin(cursor, topic_filter)
        else:
            self._push(position, cursor, [topic_filter])

    def _push(self, position: int, cursor: Cursor, filters: list[str]) -> None:
        self._number += 1
        heappush(self._heap, (position, self._number, cursor, filters))
        self.first = self._heap[0][0]

    def _begin(self, cursor: Cursor, topic_filter: str) -> None:
        cursor.note_begun(topic_filter)
        self._routes.add(topic_filter, cursor, cursor.filters[topic_filter])

    def begin(self, position: int) -> bool:
        """Add a slice of the filters that begin at *position* or before; return whether none of them is left."""
        heap, count = self._heap, FILTERS_A_SLICE
        while heap and heap[0][0] <= position and count > 0:
            _, _, cursor, filters = heap[0]
            if self._has(cursor) and (topic_filter := filters.pop()) in cursor.filters:
                self.add(cursor, topic_filter, position)  # the filter may have been removed and added again later
                count -= 1
            if not filters or not self._has(cursor):
                heappop(heap)
        self.first = heap[0][0] if heap else NEVER
        return self.first > position

    def note_log_cut(self, position: int) -> None:
        """Note that the log was cut at *position*: filters with later begins now begin there."""
        self._heap = [(min(at, position), number, cursor, filters) for at, number, cursor, filters in self._heap]
        heapify(self._heap)
        self.first = self._heap[0][0] if self._heap else NEVER
