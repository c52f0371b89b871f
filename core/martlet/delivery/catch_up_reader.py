"""Reads the log once for all cursors of a feed that are behind the tail.

One *sweep* reads from the lowest of their positions on, in log order over all queues of the topics, and routes each
record by a trie of their filters. Cursors join it when it passes their positions, and leave it when it reaches the
tail. So ten thousand clients that return together cost one pass over the records that they missed.

If all filters in a sweep are names without wildcards, only records with the tag codes of these names are read.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Final, final

from martlet.delivery.beginnings import FILTERS_A_SLICE, Beginnings
from martlet.delivery.cursor import Cursor, Place
from martlet.delivery.interest import FilterTrie, Grants, Route, in_pieces
from martlet.delivery.merge import POSITION_OF, merge
from martlet.delivery.routing import STEPS_A_SLICE, Found
from martlet.delivery.runs import make_runs
from martlet.delivery.tail_reader import RECEIVERS_A_SLICE, RECEIVERS_COUNTED, TailReader
from martlet.records.codec import tags_code
from martlet.steps import Pace, Steps
from martlet.store import Queue, ReadResult, Store
from martlet.store.queues import BlockDamaged

__all__ = ["CatchUpReader"]

# Routing a message whose name has no cached route takes about 25 us.
MESSAGES_A_SLICE: Final = 256
BYTES_A_SLICE: Final = 1 << 20
# Cursors, and filters of several (`FILTERS_A_SLICE`), that a sweep adds, or moves to the tail.
CURSORS_A_SLICE: Final = 256
CODES_MAX: Final = 1000  # names to search for in one pass over the entries
REPAIRS: Final = 2  # how often the search for a start has damaged entries repaired


@final
class CatchUpReader:
    """The cursors of one feed that are behind the tail, and the sweeps for them; *trie* routes for those swept.

    ``reader`` is the tail reader of the feed's topics, while there are cursors: a sweep ends where it is. ``swept_to``
    is the log position before which the sweep has routed everything. ``viewed`` counts the records that sweeps read,
    ``reads`` the reads of queues.
    """

    def __init__(self, store: Store, trie: FilterTrie[Cursor]) -> None:
        self.reader: TailReader | None = None
        self.swept_to = 0
        self.sweeps = 0
        self.viewed = 0
        self.reads = 0
        self._store = store
        self._trie = trie
        self._behind: dict[Cursor, None] = {}  # those that the sweep has not reached yet
        self._swept: dict[Cursor, None] = {}
        self._offsets: dict[Queue, int] = {}
        self._beginnings = Beginnings(trie, lambda cursor: cursor.place is Place.SWEPT)
        self._codes: frozenset[int] | None = None
        self._codes_known = False
        self._rules = 0  # counts the changes of rules
        self._giving: Steps[None] | None = None  # routes the records that were read, if it takes several turns

    # cursors

    @property
    def is_sweeping(self) -> bool:
        """Whether a cursor is behind the tail and has room."""
        return bool(self._behind or self._swept)

    def add(self, cursor: Cursor) -> None:
        """Sweep *cursor*, from when a sweep passes its position."""
        self._behind[cursor] = None

    def remove(self, cursor: Cursor) -> None:
        """Stop sweeping *cursor*."""
        self._behind.pop(cursor, None)
        if self._swept.pop(cursor, self) is None:
            for each in cursor.filters:
                self._trie.remove(each, cursor)
            self._codes_known = self._codes_known and self._codes is None

    def add_filter(self, cursor: Cursor, topic_filter: str) -> None:
        """Note a new filter of *cursor*, or a new value of one."""
        if cursor.place is Place.SWEPT:
            self._codes_known = False
            self._beginnings.add(cursor, topic_filter, self.swept_to)

    def remove_filter(self, cursor: Cursor, topic_filter: str) -> None:
        """Note that *cursor* has a filter no longer."""
        if cursor.place is Place.SWEPT:
            self._trie.remove(topic_filter, cursor)

    def forget_routes(self) -> None:
        """Drop all cached routes, because the rules have changed; what is being routed continues by the new ones."""
        self._rules += 1
        self._trie.forget_routes()

    def next_at_tail(self) -> list[Cursor]:
        """Return some of the cursors that join the tail, which the sweep has reached."""
        return _slice_of(self._swept)[0]

    # the sweep

    async def sweep(self) -> bool:
        """Do one slice of a sweep: read and route; return whether it has reached the tail."""
        if self._giving is None:
            if not self._swept:
                await self._begin()
            if not (self._take_along() and self._swept):
                return False
            readable_to = self._store.readable
            found = merge(self._store, await self._read(), self._offsets, readable_to)
            self._giving = self._give(_from(found, self.swept_to))
        return not self._give_some() and self._is_at_tail()

    def _queues(self) -> list[tuple[Queue, int]]:
        """Return the queues of the topics, each with the offset up to which the tail reader has routed it."""
        reader = self.reader
        return [(queue, reader.routed(queue)) for queue in reader.queues()] if reader is not None else []

    async def _begin(self) -> None:
        """Start a sweep at the position of the cursor that is furthest behind."""
        self.sweeps += 1
        start = min((cursor.start for cursor in self._behind), default=self._store.readable)
        offsets: dict[Queue, int] = {}
        for queue, _ in self._queues():
            offsets[queue] = await _first_from(self._store, queue, start)
        self._offsets, self.swept_to = offsets, start

    def _take_along(self) -> bool:
        """Add cursors that the sweep has reached; return False if there are more of them."""
        taken, is_all = _slice_of(cursor for cursor in self._behind if cursor.start >= self.swept_to)
        self._codes_known = self._codes_known and not taken
        for cursor in taken:
            del self._behind[cursor]
            self._swept[cursor] = None
            cursor.place = Place.SWEPT
            self._beginnings.enter(cursor, self.swept_to)
        return is_all

    async def _read(self) -> dict[Queue, ReadResult]:
        """Read further in each queue, up to the position of the tail readers."""
        ranges = [
            (queue, self._offsets.setdefault(queue, queue.first_offset), routed) for queue, routed in self._queues()
        ]
        ranges = [each for each in ranges if each[1] < each[2]]
        codes, share = self._wanted_codes(), max(len(ranges), 1)
        results: dict[Queue, ReadResult] = {}
        for queue, offset, end in ranges:
            self.reads += 1
            count = min(max(MESSAGES_A_SLICE // share, 1), end - offset)
            results[queue] = await self._store.read_far(queue, offset, count, BYTES_A_SLICE // share, codes)
        return results

    def _wanted_codes(self) -> frozenset[int] | None:
        """Return the tag codes of all wanted names; None if a filter has a wildcard, or there are too many."""
        if not self._codes_known:
            self._codes = self._find_codes()
            self._codes_known = True
        return self._codes

    def _find_codes(self) -> frozenset[int] | None:
        codes: set[int] = set()
        for cursor in self._swept:
            for each in cursor.filters:
                if not self._trie.is_literal(each) or len(codes) > CODES_MAX:
                    return None
                codes.add(tags_code(each))
        return frozenset(codes)

    def _give_some(self) -> bool:
        """Route a slice of the records that were read; return True if more of them are left."""
        if self._giving is None:
            return False
        if next(self._giving, self) is self:
            self._giving = None
        return self._giving is not None

    def _give(self, found: list[Found]) -> Steps[None]:
        """Route *found*."""
        self.viewed += len(found)
        pace, at = Pace(RECEIVERS_A_SLICE), 0
        while at < len(found):
            at = yield from self._give_from(found, at, pace)
        if found:
            self.swept_to = found[-1][0] + 1

    def _give_from(self, found: list[Found], first: int, pace: Pace) -> Steps[int]:
        """Route the records from index *first* on; return where to continue, because the rules have changed."""
        rules = self._rules
        for grants, start, end in self._by_route(found, first):
            if start == end:
                yield
                if self._rules != rules:
                    return start
                continue
            for run in make_runs(found[start:end]):
                for count, receivers in in_pieces(grants, RECEIVERS_COUNTED):
                    for cursor, values in receivers:
                        cursor.swept(run, values)
                    if pace.is_over(count):
                        yield
            if self._rules != rules:
                return end
        return len(found)

    def _by_route(self, found: list[Found], first: int) -> Iterator[tuple[Grants[Cursor], int, int]]:
        """Split *found* where the route changes, and where filters begin.

        Yields who gets them, and the indexes where they begin and end; equal ones for a pause before what begins there,
        because finding routes took long.
        """
        beginnings, limit = self._beginnings, self._trie.steps + STEPS_A_SLICE
        current: Route[Cursor] | None = None
        for index in range(first, len(found)):
            position, name = found[index][0], found[index][4]
            if beginnings.first <= position:
                if current is not None and current.grants:
                    yield current.grants, first, index
                first, current = index, None
                while not beginnings.begin(position):
                    yield {}, first, first
            while (route := self._trie.find_route(name)) is None:
                yield {}, first, first
            if route is not current:
                if current is not None and current.grants:
                    yield current.grants, first, index
                first, current = index, route
            if self._trie.steps > limit:
                limit = self._trie.steps + STEPS_A_SLICE
                yield {}, first, first
        if current is not None and current.grants:
            yield current.grants, first, len(found)

    def _is_at_tail(self) -> bool:
        if self.reader is not None and self.reader.is_behind:
            return False
        return all(self._offsets.get(queue, 0) >= routed for queue, routed in self._queues())


def _slice_of(cursors: Iterable[Cursor]) -> tuple[list[Cursor], bool]:
    """Return the first of *cursors*, as many as one slice adds to a trie, and whether they are all."""
    taken: list[Cursor] = []
    filters = 0
    for cursor in cursors:
        filters += len(cursor.filters)
        if len(taken) == CURSORS_A_SLICE or (taken and filters > FILTERS_A_SLICE):
            return taken, False
        taken.append(cursor)
    return taken, True


def _from(found: list[Found], position: int) -> list[Found]:
    """Return the records of *found*, which are in log order, that begin at *position* or later."""
    return found[bisect_left(found, position, key=POSITION_OF) :] if found and found[0][0] < position else found


async def _first_from(store: Store, queue: Queue, position: int) -> int:
    """Return the first offset of *queue* whose record begins at *position* or later, or an earlier offset.

    Reads entries from files in a thread, and repairs damaged ones.
    """
    for _ in range(REPAIRS):
        try:
            return await _search(store, queue, position)
        except BlockDamaged:
            await store.repairs.repair(queue)
    return queue.first_offset


async def _search(store: Store, queue: Queue, position: int) -> int:
    queues, low, saved = store.queues, queue.first_offset, queue.tail_offset
    if low < saved:
        found = await store.disk.off_loop(lambda: queues.first_behind(queue, low, saved, position))
        if found < saved:
            return found
        low = found
    return queues.first_behind(queue, low, queue.next_offset, position)
