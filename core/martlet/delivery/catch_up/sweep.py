"""One sweep: reads the log once for all its cursors, from the position of the furthest to the tail.

A cursor joins the sweep when the sweep comes to its position. If all filters are names without wildcards, the sweep
looks only at the entries of the queues, and reads only records with the tag codes of these names.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Final, final

from martlet.delivery.beginnings import FILTERS_A_SLICE, NEVER, Beginnings
from martlet.delivery.catch_up.departures import Departures
from martlet.delivery.cursor import Cursor, CursorPlace
from martlet.delivery.merge import POSITION_OF, merge
from martlet.delivery.routing.division import STEPS_A_SLICE, Found, Grants, Route
from martlet.delivery.routing.route_cache import RouteCache, in_pieces
from martlet.delivery.runs import make_runs
from martlet.delivery.tail_reader import TailReader
from martlet.delivery.tail_routing import RECEIVER_US, RECEIVERS_COUNTED
from martlet.records.codec import tags_code
from martlet.runtime.steps import Budget, Steps
from martlet.store import Queue, ReadResult, Store
from martlet.store.queues.queues import BlockDamaged

__all__ = ["AHEAD_BYTES", "CODES_MAX", "CURSORS_A_SLICE", "Sweep", "slice_of"]

# Routing a message whose name has no cached route takes about 25 us.
MESSAGES_A_SLICE: Final = 256
BYTES_A_SLICE: Final = 1 << 20
# Cursors, and filters of several cursors (`FILTERS_A_SLICE`), that a sweep adds, or moves to the tail, in one slice.
CURSORS_A_SLICE: Final = 256
CODES_MAX: Final = 1000  # names searched for in one pass over the entries
# Distance at which cursors ahead join a sweep. A slice ends before the next cursor that has not joined.
AHEAD_BYTES: Final = 1 << 20
REPAIRS: Final = 2  # number of times that the search for a start has damaged entries repaired


@final
class Sweep:
    """A sweep from log position *start* to the position of *reader*, the tail reader of the topics; *routes* is empty.

    Everything before log position ``swept_to`` was routed. ``viewed`` counts the records that were read, ``reads`` the
    reads of queues. A sweep that ``has_met`` another sweep stops: its cursors join that sweep. It ``is_over`` when it
    has no cursors.
    """

    def __init__(
        self, store: Store, reader: TailReader, departures: Departures, routes: RouteCache[Cursor], start: int
    ) -> None:
        self.swept_to = start
        self.viewed = 0
        self.reads = 0
        self.has_met = self.is_over = False
        self.cursors: dict[Cursor, None] = {}
        self._store = store
        self._reader = reader
        self._departures = departures
        self._routes = routes
        self._beginnings = Beginnings(routes, self.cursors.__contains__)  # no cycle: does not refer to `self`
        self._offsets: dict[Queue, int] | None = None  # None until the offsets were searched
        self._codes: frozenset[int] | None = None
        self._codes_to = 0  # the codes include filters that begin before this log position; 0 if the codes are unknown
        self._rules = 0  # counts the changes of rules
        self._routing: Steps[None] | None = None  # routes the records that were read, if that takes several turns

    # cursors

    def take(self, cursor: Cursor) -> None:
        """Sweep *cursor*, whose position is here or ahead."""
        self.cursors[cursor] = None
        cursor.sweep = self
        cursor.place = CursorPlace.SWEPT
        self._departures.come_back(self._routes, cursor)
        self._beginnings.enter(cursor, self.swept_to)
        self._codes_to = 0

    def release(self, cursor: Cursor) -> None:
        """Stop sweeping *cursor*, because the sweep ends."""
        del self.cursors[cursor]
        cursor.sweep = None

    def leave(self, cursor: Cursor) -> None:
        """Stop sweeping *cursor*."""
        self.release(cursor)
        self._departures.leave(self._routes, cursor)
        if self._codes is not None:
            self._codes_to = 0

    def add_filter(self, cursor: Cursor, topic_filter: str) -> None:
        """Note a new filter of *cursor*, or a new value of a filter."""
        self._beginnings.add(cursor, topic_filter, self.swept_to)
        self._codes_to = 0

    def remove_filter(self, cursor: Cursor, topic_filter: str) -> None:
        """Note that *cursor* no longer has a filter."""
        self._routes.remove(topic_filter, cursor)

    def forget_routes(self) -> None:
        """Drop all cached routes, because the rules have changed; routing in progress continues by the new rules."""
        self._rules += 1
        self._routes.forget_routes()

    # slices

    @property
    def is_cold(self) -> bool:
        """Whether the next records may have to come from the cold tier."""
        return self._store.cold.tier is not None and self.swept_to < self._store.local_position

    @property
    def is_routing(self) -> bool:
        """Whether the sweep still routes records of its last read."""
        return self._routing is not None

    async def go_on(self, limit: int) -> bool:
        """Read and route a slice of the log before position *limit*; return whether the sweep has reached the tail."""
        if self._routing is None:
            if self._offsets is None:
                self._offsets = await self._find_start()
            if limit <= self.swept_to:
                return False
            readers = self._reader.readers
            readable_to = readers.readable
            codes, limit = self._codes_before(min(limit, readable_to))
            offsets = self._offsets
            start_offsets, results = offsets.copy(), await self._read(offsets, codes)
            records = merge(readers, results, offsets, limit)
            if codes is not None:
                await self._step_back_to(limit, start_offsets)
            end = limit if offsets == start_offsets else self._position_read_to(limit, records)
            self._routing = self._route_records(_drop_before(records, self.swept_to), end)
        return not self._route_slice() and self._is_at_tail()

    async def _find_start(self) -> dict[Queue, int]:
        return {queue: await _find_first_offset(self._store, queue, self.swept_to) for queue in self._reader.queues()}

    def _routed_queues(self) -> list[tuple[Queue, int]]:
        """Return the queues of the topics, each with the offset up to which the tail reader has routed it."""
        return [(queue, self._reader.routed(queue)) for queue in self._reader.queues()]

    async def _read(self, offsets: dict[Queue, int], codes: frozenset[int] | None) -> dict[Queue, ReadResult]:
        """Read the next records of each queue, up to the position of the tail reader."""
        ranges: list[tuple[Queue, int, int]] = []
        for queue, end in self._routed_queues():
            offset = offsets.setdefault(queue, queue.first_offset)
            if offset < end:
                ranges.append((queue, offset, end))
        share = max(len(ranges), 1)
        results: dict[Queue, ReadResult] = {}
        for queue, offset, end in ranges:
            self.reads += 1
            count = min(max(MESSAGES_A_SLICE // share, 1), end - offset)
            results[queue] = await self._reader.readers.read_far(queue, offset, count, BYTES_A_SLICE // share, codes)
        return results

    async def _step_back_to(self, limit: int, start_offsets: dict[Queue, int]) -> None:
        """Return to log position *limit*: the search for codes may have passed entries after it, unlike `merge`.

        *start_offsets* are the offsets from which the search began.
        """
        offsets, position_of = self._offsets, self._store.queues.position_now
        assert offsets is not None
        for queue, offset in list(offsets.items()):
            start = start_offsets.get(queue, queue.first_offset)
            if offset > start and not 0 <= position_of(queue, offset - 1) < limit:
                offsets[queue] = min(max(await _find_first_offset(self._store, queue, limit), start), offset)

    def _position_read_to(self, limit: int, records: list[Found]) -> int:
        """Return the log position, *limit* at most, before which everything was read; *records* was read last."""
        offsets, position_of = self._offsets, self._store.queues.position_now
        assert offsets is not None
        for queue, routed in self._routed_queues():
            offset = offsets.get(queue, queue.first_offset)
            if offset < routed:
                position = position_of(queue, offset)
                if position < 0:  # a lost message, or an entry that is on disk
                    return records[-1][0] + 1 if records else self.swept_to
                limit = min(limit, position)
        return limit

    def _codes_before(self, limit: int) -> tuple[frozenset[int] | None, int]:
        """Return the tag codes of all wanted names, and the log position, *limit* at most, up to which they are
        complete.

        The codes are None if a filter has a wildcard, or there are too many.
        """
        if self._codes_to <= self.swept_to:
            self._codes, self._codes_to = self._find_codes(self.swept_to + AHEAD_BYTES)
        return self._codes, min(limit, self._codes_to)

    def _find_codes(self, begin_max: int) -> tuple[frozenset[int] | None, int]:
        """Return the codes of filters that begin before *begin_max*, and the position where the next filter begins."""
        codes: set[int] = set()
        end = NEVER
        for cursor in self.cursors:
            begins = cursor.begins or {}
            for each in cursor.filters:
                if begins and begins.get(each, 0) >= begin_max:
                    end = min(end, begins[each])
                elif not self._routes.is_literal(each) or len(codes) > CODES_MAX:
                    return None, NEVER
                else:
                    codes.add(tags_code(each))
        return frozenset(codes), end

    def _is_at_tail(self) -> bool:
        offsets = self._offsets
        if self._reader.is_behind or offsets is None:
            return False
        return all(offsets.get(queue, 0) >= routed for queue, routed in self._routed_queues())

    # routing

    def _route_slice(self) -> bool:
        """Route a slice of the records that were read; return True if records are left."""
        if self._routing is None:
            return False
        if next(self._routing, self) is self:
            self._routing = None
        return self._routing is not None

    def _route_records(self, records: list[Found], end: int) -> Steps[None]:
        """Route *records*; after that, everything before log position *end* is routed."""
        self.viewed += len(records)
        budget, index = Budget(RECEIVER_US), 0
        while index < len(records):
            index = yield from self._route_from(records, index, budget)
        self.swept_to = max(self.swept_to, end)

    def _route_from(self, records: list[Found], first: int, budget: Budget) -> Steps[int]:
        """Route the records from index *first* on; return the index to continue at after a change of the rules."""
        rules = self._rules
        for grants, start, end in self._split_by_route(records, first):
            if start == end:
                yield
                if self._rules != rules:
                    return start
                continue
            for run in make_runs(records[start:end]):
                for count, receivers in in_pieces(grants, RECEIVERS_COUNTED):
                    for cursor, values in receivers:
                        cursor.swept(run, values, self)
                    if budget.is_over(count):
                        yield
            if self._rules != rules:
                return end
        return len(records)

    def _split_by_route(self, records: list[Found], first: int) -> Iterator[tuple[Grants[Cursor], int, int]]:
        """Split *records* where the route changes, and where filters begin.

        Yields receivers, and the indexes of their first record and after their last one. Equal indexes are a pause
        before that record, because finding routes took long.
        """
        beginnings, limit = self._beginnings, self._routes.steps + STEPS_A_SLICE
        current: Route[Cursor] | None = None
        for index in range(first, len(records)):
            position, name = records[index][0], records[index][4]
            if beginnings.first <= position:
                if current is not None and current.grants:
                    yield current.grants, first, index
                first, current = index, None
                while not beginnings.begin(position):
                    yield {}, first, first
            while (route := self._routes.find_route(name)) is None:
                yield {}, first, first
            if route is not current:
                if current is not None and current.grants:
                    yield current.grants, first, index
                first, current = index, route
            if self._routes.steps > limit:
                limit = self._routes.steps + STEPS_A_SLICE
                yield {}, first, first
        if current is not None and current.grants:
            yield current.grants, first, len(records)


def slice_of(cursors: Iterable[Cursor]) -> tuple[list[Cursor], bool]:
    """Return the first of *cursors*, as many as one slice adds, and whether these are all."""
    taken: list[Cursor] = []
    filters = 0
    for cursor in cursors:
        filters += len(cursor.filters)
        if len(taken) == CURSORS_A_SLICE or (taken and filters > FILTERS_A_SLICE):
            return taken, False
        taken.append(cursor)
    return taken, True


def _drop_before(records: list[Found], position: int) -> list[Found]:
    """Return the records of *records*, which is in log order, that begin at *position* or later."""
    return (
        records[bisect_left(records, position, key=POSITION_OF) :] if records and records[0][0] < position else records
    )


async def _find_first_offset(store: Store, queue: Queue, position: int) -> int:
    """Return the first offset of *queue* whose record begins at *position* or later, or an earlier offset.

    Reads entries from files in a thread, and repairs damaged ones. Asks the cold tier for a *position* before the log.

    Raises:
      Refused: the cold tier failed or did not answer in time.
    """
    if position < store.local_position and store.cold.has_range(queue):
        return await store.cold.offset_by_position(queue, position)
    for _ in range(REPAIRS):
        try:
            return await _search_offset(store, queue, position)
        except BlockDamaged:
            await store.upkeep.repairs.repair(queue)
    return queue.local_from


async def _search_offset(store: Store, queue: Queue, position: int) -> int:
    queues, start, saved = store.queues, queue.local_from, queue.tail_offset
    if start < saved:
        offset = await store.disk.off_loop(lambda: queues.first_behind(queue, start, saved, position))
        if offset < saved:
            return offset
        start = offset
    return queues.first_behind(queue, start, queue.next_offset, position)
