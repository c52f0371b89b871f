"""The cursors of a feed that are behind the tail, and the sweeps that read the log for them.

Cursors that return together cost one pass over the records that they missed. But a cursor that was away for long must
not delay cursors that are nearly at the tail. So there are several *sweeps* (`sweep.py`): each cursor is served by a
sweep that begins at its position, or a few times as far from the tail (`sweeps.py`), and the nearest sweeps have the
most turns (`sweep_turns.py`).

Cursors whose filters have no wildcards have sweeps of their own: these find records by the tag codes of the entries,
which is many times as fast.
"""

from collections.abc import Callable, Iterable
from typing import final

from martlet.delivery.catch_up.departures import Departures
from martlet.delivery.catch_up.sweep import CODES_MAX, Sweep
from martlet.delivery.catch_up.sweeps import Sweeps
from martlet.delivery.cursor import Cursor, CursorPlace
from martlet.delivery.routing.route_cache import RouteCache
from martlet.delivery.tail_reader import TailReader
from martlet.store import Store

__all__ = ["CatchUpReader"]


@final
class CatchUpReader:
    """The cursors of one feed that are behind the tail; *make_routes* returns the empty routes of a sweep.

    ``reader`` is the tail reader of the feed's topics, while there are cursors: sweeps end at its position. ``sweeps``
    counts the sweeps.
    """

    def __init__(self, store: Store, departures: Departures, make_routes: Callable[[], RouteCache[Cursor]]) -> None:
        self.reader: TailReader | None = None
        self.sweeps = 0
        self._store = store
        self._departures = departures
        self._make_routes = make_routes
        self._is_literal = make_routes().is_literal
        self._by_code, self._whole = Sweeps(self._make_sweep), Sweeps(self._make_sweep)
        # The number of names that each cursor without wildcards follows.
        self._name_counts: dict[Cursor, int] = {}
        self._name_total = 0
        self._viewed = self._reads = 0  # records viewed and reads made by sweeps that are over

    # cursors

    def add(self, cursor: Cursor) -> None:
        """Let *cursor* wait for a sweep."""
        cursor.place = CursorPlace.BEHIND
        names = self._count_names(cursor)
        if 0 <= names <= CODES_MAX - self._name_total:
            self._name_counts[cursor] = names
            self._name_total += names
            self._by_code.waiting.add(cursor)
        else:
            self._whole.waiting.add(cursor)

    def _count_names(self, cursor: Cursor) -> int:
        """Return the number of names among the filters of *cursor* that have begun; -1 if one has a wildcard."""
        filters: Iterable[str] = cursor.filters
        if cursor.begins is not None:
            begins, start = cursor.begins, cursor.start
            filters = [each for each in filters if begins.get(each, 0) <= start]
        elif len(cursor.filters) > CODES_MAX:
            return CODES_MAX + 1
        names = 0
        for each in filters:
            if not self._is_literal(each):
                return -1
            names += 1
        return names

    def remove(self, cursor: Cursor) -> None:
        """Stop reading for *cursor*."""
        self._name_total -= self._name_counts.pop(cursor, 0)
        if cursor.sweep is not None:
            cursor.sweep.leave(cursor)
        else:
            for sweeps in self._kinds:
                sweeps.waiting.remove(cursor)

    def forget_routes(self) -> None:
        """Drop all cached routes, because the rules have changed; routing in progress continues by the new rules."""
        for each in self.running:
            each.forget_routes()

    # sweeps

    @property
    def _kinds(self) -> tuple[Sweeps, Sweeps]:
        return self._by_code, self._whole

    @property
    def running(self) -> list[Sweep]:
        """The sweeps that are not over."""
        return [*self._by_code.running, *self._whole.running]

    @property
    def is_sweeping(self) -> bool:
        """Whether a cursor is behind the tail and has room."""
        return any(sweeps.waiting or any(sweep.cursors for sweep in sweeps.running) for sweeps in self._kinds)

    @property
    def has_waiting(self) -> bool:
        """Whether cursors wait for a sweep."""
        return any(sweeps.waiting for sweeps in self._kinds)

    @property
    def viewed(self) -> int:
        """The number of records that the sweeps have read."""
        return self._viewed + sum(each.viewed for each in self.running)

    @property
    def reads(self) -> int:
        """The number of times that the sweeps have read a queue."""
        return self._reads + sum(each.reads for each in self.running)

    @property
    def _cold_to(self) -> int:
        """The log position before which sweeps may wait for the cold tier; 0 without one."""
        return self._store.local_position if self._store.cold.tier is not None else 0

    def plan(self) -> list[Sweep]:
        """Begin sweeps for cursors that no sweep will reach soon; return the new sweeps."""
        new_sweeps: list[Sweep] = []
        for sweeps in self._kinds:
            if sweeps.waiting and self.reader is not None:
                new_sweeps += sweeps.plan(self.reader.readers.readable, self._cold_to)
        return new_sweeps

    def end(self) -> None:
        """End all sweeps, as the last cursor is closed."""
        for sweep in self.running:
            sweep.is_over = True
        for sweeps in self._kinds:
            sweeps.running.clear()
        self.reader = None

    def _make_sweep(self, start: int) -> Sweep:
        assert self.reader is not None, "the feed has no cursors"
        self.sweeps += 1
        return Sweep(self._store, self.reader, self._departures, self._make_routes(), start)

    async def go_on(self, sweep: Sweep) -> bool:
        """Do a slice of *sweep*; return whether it has reached the tail."""
        sweeps = self._by_code if sweep in self._by_code.running else self._whole
        is_at_tail = await sweeps.go_on(sweep, self._cold_to)
        if sweep not in sweeps.running and not sweep.is_over:
            self._viewed += sweep.viewed
            self._reads += sweep.reads
            sweep.is_over = True
        return is_at_tail
