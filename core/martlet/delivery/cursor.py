"""Cursors: read the log of some topics from any position up to the tail, and then follow the tail.

A `Feed` is what one protocol follows: some topics, and the topic filters of its receivers. Each receiver has a
`Cursor`. At the tail, the cursor's filters are in a trie that the topics' tail readers query. Cursors behind the tail
are *swept*: one task reads the log once for all of them, from the lowest of their positions on, in log order over all
queues of the topics, and routes each record by a trie of their filters. So ten thousand clients that return together
cost one pass over the records that they missed. When the sweep reaches the tail, its cursors join the tail readers, and
get each record exactly once.

If all filters in a sweep are names without wildcards, only records with the tag codes of these names are read.

A receiver's uncollected records are limited. A full cursor remembers its position in the log and stops taking records;
it is swept again once there is room. It holds positions, never a backlog.
"""

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, unique
from heapq import heappop, heappush
from typing import Final, Protocol, final

import trio

from martlet.delivery.interest import FilterTrie, Grants, Route, in_pieces
from martlet.delivery.subscriptions import readable
from martlet.delivery.tail_reader import (
    READ_AGAIN_S,
    RECEIVERS_A_SLICE,
    RECEIVERS_COUNTED,
    Found,
    Run,
    TailReader,
    Tails,
    make_run,
    merge,
)
from martlet.errors import Refused, StoreError
from martlet.records.codec import tags_code
from martlet.steps import Pace, Steps
from martlet.store import Queue, ReadResult, Store
from martlet.store.queues import BlockDamaged
from martlet.tables.topics import Topics

__all__ = ["Cursor", "Cursors", "Feed", "Permit", "Place"]

log = logging.getLogger("martlet.delivery")

# Routing a message whose name has no cached route takes about 25 us.
MESSAGES_A_SLICE: Final = 256
BYTES_A_SLICE: Final = 1 << 20
# Cursors, and filters of several, that a sweep adds, or moves to the tail; a filter takes 5 to 10 us.
CURSORS_A_SLICE: Final = 256
FILTERS_A_SLICE: Final = 512
CODES_MAX: Final = 1000  # names to search for in one pass over the entries
# Of uncollected records: for a cursor; for all cursors of a feed; for a cursor while they have that much.
PENDING_BYTES: Final = 1 << 22
PENDING_BYTES_ALL: Final = 1 << 26
PENDING_BYTES_LEAST: Final = 1 << 18
MESSAGES_ANY: Final = 1 << 62


@unique
class Place(Enum):
    """Whether a cursor is behind the tail, at it, or full."""

    BEHIND = "behind"  # the sweep has not reached it yet
    SWEPT = "swept"
    TAIL = "tail"
    FULL = "full"  # until some records are collected
    CLOSED = "closed"


class Permit(Protocol):
    """Decides what one receiver may follow and read; created by a gate."""

    @property
    def generation(self) -> int:
        """Incremented when the answers may have changed."""
        ...

    def check(self, topic_filter: str) -> None:
        """Raise `Refused` unless the receiver may follow *topic_filter*."""
        ...

    def allows(self, name: str) -> bool:
        """Return whether the receiver may read messages of *name*."""
        ...


@final
class Cursor:
    """One receiver of a `Feed`; created by `Feed.open`.

    ``place`` tells where it is; at `Place.TAIL` it has joined the tail. ``wake`` is called when there is something to
    collect, and when the tail is joined. ``dropped`` counts messages that a full cursor did not take (`Feed.open`).
    """

    __slots__ = (
        "_droppable",
        "_feed",
        "_generation",
        "_pending",
        "_pending_bytes",
        "_pending_bytes_max",
        "_permit",
        "_position",
        "dropped",
        "filters",
        "place",
        "wake",
    )

    def __init__(
        self,
        feed: "Feed",
        wake: Callable[[], None],
        filters: Mapping[str, Hashable],
        position: int,
        pending_bytes_max: int,
        permit: Permit | None,
        droppable: Callable[[tuple[Hashable, ...]], bool] | None,
    ) -> None:
        self.wake = wake
        self.dropped = 0
        self._droppable = droppable
        self._permit = permit
        self._generation = permit.generation if permit is not None else 0
        self.filters = dict(filters)
        self.place = Place.BEHIND
        self._feed = feed
        self._position = position
        self._pending: deque[tuple[Run, tuple[Hashable, ...]]] = deque()
        self._pending_bytes = 0
        self._pending_bytes_max = pending_bytes_max

    @property
    def position(self) -> int:
        """The log position before which everything was collected; to continue later, open a cursor there."""
        if self._pending:
            return self._pending[0][0].position
        if self.place is Place.TAIL:
            return self._feed.tail_position(self._position)
        if self.place is Place.SWEPT:
            return max(self._position, self._feed.swept_to)
        return self._position

    @property
    def has_pending(self) -> bool:
        """Whether there is something to collect."""
        return bool(self._pending)

    @property
    def start(self) -> int:
        """The log position before which the cursor ignores records of a sweep."""
        return self._position

    @property
    def reach(self) -> int:
        """The log position from which on a filter that is added now brings messages, or an earlier one."""
        if self.place is Place.TAIL:
            return self._feed.tail_position()
        return max(self._position, self._feed.swept_to) if self.place is Place.SWEPT else self._position

    def collect(self, budget_bytes: int, messages_max: int = MESSAGES_ANY) -> list[tuple[Run, tuple[Hashable, ...]]]:
        """Return about *budget_bytes* of records, as runs with the values of the filters that match them.

        Stops after the run that crosses the budget, and after *messages_max* messages, where a run is split. Wakes the
        receiver again if more is pending.

        Raises:
          Refused: the receiver may no longer follow one of its filters.
        """
        if self._permit is not None and self._permit.generation != self._generation:
            self._ask_again(self._permit)
        found: list[tuple[Run, tuple[Hashable, ...]]] = []
        while self._pending and budget_bytes > 0 and messages_max > 0:
            run, grants = self._pending.popleft()
            if run.count > messages_max:
                run, rest = run.split(messages_max)
                self._pending.appendleft((rest, grants))
            size = len(run.data)
            budget_bytes -= size
            messages_max -= run.count
            self._count_pending(-size)
            found.append((run, grants))
        if self._pending:
            self.wake()
        elif self.place is Place.FULL:
            self._feed.resume(self)
        return found

    def _ask_again(self, permit: Permit) -> None:
        """Check the filters and route pending runs again, because the rules have changed."""
        for each in self.filters:
            permit.check(each)
        self._generation = permit.generation
        if self._pending:
            position = self._pending[0][0].position
            self._drop_pending()
            self._feed.go_back(self, position)

    def may_read(self, name: str) -> bool:
        """Return whether messages of *name* may be delivered to the receiver; False if the decision fails."""
        try:
            return self._permit is None or self._permit.allows(name)
        except Refused:
            return False

    def check(self, topic_filter: str) -> None:
        """Raise `Refused` unless *topic_filter* is valid and the receiver may follow it."""
        self._feed.check(topic_filter)
        if self._permit is not None:
            self._permit.check(topic_filter)

    def matched(self, run: Run, grants: tuple[Hashable, ...]) -> None:
        """Take *run* at the tail (see `Receiver`); a cursor that is full then leaves it."""
        # A run may reach its receivers in several turns, and some may have left the tail since the first.
        if self.place is not Place.TAIL:
            return
        if self._droppable is not None and self._is_full_with(run) and self._droppable(grants):
            self.dropped += run.count
            self._position = run.end
        else:
            self._take(run, grants)

    def swept(self, run: Run, grants: tuple[Hashable, ...]) -> None:
        """Take *run* in a sweep; a cursor that is full then leaves it."""
        if self.place is Place.SWEPT:
            self._take(run, grants)

    def _is_full_with(self, run: Run) -> bool:
        if not self._pending:
            return False
        size = self._pending_bytes + len(run.data)
        if size <= PENDING_BYTES_LEAST:
            return size > self._pending_bytes_max
        return size > self._pending_bytes_max or self._feed.pending_bytes > PENDING_BYTES_ALL

    def _count_pending(self, more: int) -> None:
        self._pending_bytes += more
        self._feed.pending_bytes += more

    def _drop_pending(self) -> None:
        self._pending.clear()
        self._count_pending(-self._pending_bytes)

    def _take(self, run: Run, grants: tuple[Hashable, ...]) -> None:
        size = len(run.data)
        if self._is_full_with(run):
            self._position = run.position
            self._feed.pause(self)
            return
        if not self._pending:
            self.wake()
        self._pending.append((run, grants))
        self._count_pending(size)
        self._position = run.end

    def move_to(self, place: Place, position: int) -> None:
        """Set the cursor to *position*: everything before was taken or is pending."""
        self._position = max(self._position, position)
        self.place = place

    def restart(self, position: int) -> None:
        """Note that the feed has removed the cursor from a sweep or the tail; it continues from *position*."""
        self._position = position

    def resume(self) -> None:
        """Begin to receive, if the cursor was opened paused."""
        if self.place is Place.FULL:
            self._feed.resume(self)

    def add_filter(self, topic_filter: str, value: Hashable = None) -> None:
        """Deliver messages that match *topic_filter* from now on. Raises `Refused` like `check`."""
        self.check(topic_filter)
        self._feed.add_filter(self, topic_filter, value)

    def remove_filter(self, topic_filter: str) -> None:
        """Stop delivering messages that match only *topic_filter*."""
        self._feed.remove_filter(self, topic_filter)

    def skip_to_tail(self) -> None:
        """Drop everything pending and missed; continue with messages published from now on."""
        self._drop_pending()
        self._feed.skip_to_tail(self)

    def close(self) -> None:
        """Stop receiving; call it when the receiver is gone."""
        position = self.position
        self._feed.close_cursor(self)
        self._drop_pending()
        self._position = position


@final
class Feed:
    """What one protocol follows; created by `Cursors.open`.

    ``viewed`` counts the records that sweeps read. ``pending_bytes`` is the size of what the cursors have not yet
    collected; what several of them share counts for each.
    """

    def __init__(
        self,
        owner: "Cursors",
        topics: Sequence[str],
        make_trie: Callable[[], FilterTrie[Cursor]],
        topics_of: Callable[[str], Sequence[str]],
        is_name: Callable[[str], bool],
    ) -> None:
        self.pending_bytes = 0
        self.viewed = 0
        self.reads = 0
        self.swept_to = 0
        self.sweeps = 0
        self._owner = owner
        self.topics = topics
        self.topics_of = topics_of
        self._reader: TailReader | None = None  # of all topics; None while there are no cursors
        self._tail: FilterTrie[Cursor] = make_trie()
        self._sweep: FilterTrie[Cursor] = make_trie()
        for trie in (self._tail, self._sweep):
            trie.permits = _may_read
            trie.asks = lambda: owner.asks()  # the owner gets it later
            trie.is_name = is_name
        self._behind: dict[Cursor, None] = {}
        self._swept: dict[Cursor, None] = {}
        self._cursors: dict[Cursor, None] = {}
        self._offsets: dict[Queue, int] = {}
        self._starts: list[int] = []  # a heap of the positions at which cursors join the sweep
        self._codes: frozenset[int] | None = None
        self._codes_known = False
        self._rules = 0  # counts the changes of rules
        self._giving: Steps[None] | None = None  # routes the records that the sweep read, if it takes several turns

    def __len__(self) -> int:
        """The number of open cursors."""
        return len(self._cursors)

    def open(
        self,
        wake: Callable[[], None],
        filters: Mapping[str, Hashable],
        position: int | None = None,
        pending_bytes_max: int = PENDING_BYTES,
        permit: Permit | None = None,
        droppable: Callable[[tuple[Hashable, ...]], bool] | None = None,
        is_paused: bool = False,
    ) -> Cursor:
        """Return the cursor of a new receiver; protocols call `Gate.follow`, which checks permissions.

        Args:
          wake: called when there is something to collect; must not collect itself.
          filters: topic filters, each with a value that is returned with the runs that it matches.
          position: start with the first record at or after this log position; None for the tail. A position beyond the
            end, which a power failure can cause, means the tail too.
          pending_bytes_max: limit for uncollected records; a single run always fits. When all cursors of the feed
            together have 64 MiB, it is at most 256 KiB.
          permit: decides what the receiver may follow and read; None allows everything.
          droppable: called with the values of the filters that match a run; at the tail, a full cursor drops those for
            which it returns True, and otherwise reads the log later.
          is_paused: receive nothing before `Cursor.resume`, so that further filters begin at *position* too.

        Raises:
          Refused: a filter is invalid, or a topic of the feed is not readable.
        """
        for each in filters:
            self._tail.check(each)
        if not self._cursors:
            self._attach()
        start = 0 if position is None else min(position, self._owner.store.readable)
        cursor = Cursor(self, wake, filters, start, pending_bytes_max, permit, droppable)
        self._cursors[cursor] = None
        if position is None:
            self._join(cursor)
        elif is_paused:
            cursor.move_to(Place.FULL, 0)
        else:
            self.resume(cursor)
        return cursor

    def check(self, topic_filter: str) -> None:
        """Raise `Refused` (ILLEGAL) unless *topic_filter* is valid."""
        self._tail.check(topic_filter)

    def hand_on(
        self, topic: str, encoding: str, positions: Sequence[int], data: bytes, ends: Sequence[int], start: int = 0
    ) -> None:
        """Use the given frames for messages just published to *topic*, like `TailReader.hand_on`."""
        if self._reader is not None and topic in self.topics:
            self._reader.hand_on(encoding, positions, data, ends, start)

    def cursors(self) -> Iterable[Cursor]:
        """All open cursors."""
        return self._cursors

    def forget_routes(self) -> None:
        """Drop all cached routes, because the rules have changed; what is being routed continues by the new ones."""
        if self._reader is not None:
            self._reader.rules_changed()
        self._rules += 1
        self._tail.forget_routes()
        self._sweep.forget_routes()

    def close(self) -> None:
        """Stop following the topics."""
        for cursor in list(self._cursors):
            cursor.close()
        self._owner.forget(self)

    def _attach(self) -> None:
        """Follow the topics at their tails."""
        self._reader = self._owner.reader(self.topics)
        self._reader.attach(self._tail)

    def _detach(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.detach(self._tail)

    def _queues(self) -> list[tuple[Queue, int]]:
        """Return the queues of the topics, each with the offset up to which the tail reader has routed it."""
        reader = self._reader
        return [(queue, reader.routed(queue)) for queue in reader.queues()] if reader is not None else []

    # requests of cursors

    def tail_position(self, taken: int = 0) -> int:
        """The log position before which everything was delivered to the cursors at the tail.

        *taken* is the end of the last run that one of them took: runs come in log order over all topics.
        """
        reader = self._reader
        if reader is None or not reader.is_behind:
            return self._owner.store.readable
        return max(reader.position, taken)

    def first_position(self) -> int:
        """The log position before which retention has removed all messages."""
        return self._owner.store.first_position

    def resume(self, cursor: Cursor) -> None:
        """Add *cursor* to the sweep when it passes the cursor's position."""
        cursor.move_to(Place.BEHIND, 0)
        self._behind[cursor] = None
        self._owner.ring(self)

    def go_back(self, cursor: Cursor, position: int) -> None:
        """Sweep *cursor* again from *position* on."""
        self._take_out(cursor)
        cursor.restart(position)
        self.resume(cursor)

    def pause(self, cursor: Cursor) -> None:
        """Stop delivering to *cursor*, which is full."""
        self._take_out(cursor)
        cursor.move_to(Place.FULL, 0)

    def close_cursor(self, cursor: Cursor) -> None:
        """Remove *cursor*."""
        if cursor.place is not Place.CLOSED:
            self._take_out(cursor)
            cursor.move_to(Place.CLOSED, 0)
            del self._cursors[cursor]
            if not self._cursors:
                self._detach()

    def skip_to_tail(self, cursor: Cursor) -> None:
        """Move *cursor* to the tail, skipping everything before."""
        if cursor.place is not Place.CLOSED:
            self._take_out(cursor)
            self._join(cursor)

    def add_filter(self, cursor: Cursor, topic_filter: str, value: Hashable) -> None:
        """Add a filter of *cursor*."""
        self._tail.check(topic_filter)
        cursor.filters[topic_filter] = value
        self._codes_known = False
        trie = self._trie_of(cursor)
        if trie is not None:
            trie.add(topic_filter, cursor, value)

    def remove_filter(self, cursor: Cursor, topic_filter: str) -> None:
        """Remove a filter of *cursor*."""
        if cursor.filters.pop(topic_filter, self) is not self:
            trie = self._trie_of(cursor)
            if trie is not None:
                trie.remove(topic_filter, cursor)

    def _trie_of(self, cursor: Cursor) -> FilterTrie[Cursor] | None:
        if cursor.place is Place.TAIL:
            return self._tail
        return self._sweep if cursor.place is Place.SWEPT else None

    def _take_out(self, cursor: Cursor) -> None:
        trie = self._trie_of(cursor)
        if trie is not None:
            for each in cursor.filters:
                trie.remove(each, cursor)
        self._behind.pop(cursor, None)
        if self._swept.pop(cursor, self) is None:
            self._codes_known = self._codes_known and self._codes is None

    def _join(self, cursor: Cursor) -> None:
        cursor.move_to(Place.TAIL, self.tail_position())
        for each, value in cursor.filters.items():
            self._tail.add(each, cursor, value)

    # the sweep

    @property
    def is_sweeping(self) -> bool:
        """Whether a cursor is behind the tail and has room."""
        return bool(self._behind or self._swept)

    async def sweep(self) -> None:
        """Do one slice of a sweep: read, route, and move cursors to the tail when it is reached."""
        if self._giving is None:
            if not self._swept:
                await self._begin()
            if not (self._take_along() and self._swept):
                return
            readable_to = self._owner.store.readable
            self._giving = self._give(merge(self._owner.store, await self._read(), self._offsets, readable_to))
        if not self._give_some() and self._is_at_tail():
            self._join_some()

    async def _begin(self) -> None:
        """Start a sweep at the position of the cursor that is furthest behind."""
        self.sweeps += 1
        start = min((cursor.start for cursor in self._behind), default=self._owner.store.readable)
        offsets: dict[Queue, int] = {}
        for queue, _ in self._queues():
            offsets[queue] = await self._owner.first_from(queue, start)
        self._offsets, self.swept_to = offsets, start
        self._starts.clear()

    def _take_along(self) -> bool:
        """Add cursors that the sweep has reached; return False if there are more of them."""
        taken, is_all = _slice_of(cursor for cursor in self._behind if cursor.start >= self.swept_to)
        self._codes_known = self._codes_known and not taken
        for cursor in taken:
            del self._behind[cursor]
            self._swept[cursor] = None
            if cursor.start > self.swept_to:
                heappush(self._starts, cursor.start)
            cursor.place = Place.SWEPT
            for each, value in cursor.filters.items():
                self._sweep.add(each, cursor, value)
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
            results[queue] = await self._owner.store.read_far(queue, offset, count, BYTES_A_SLICE // share, codes)
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
                if not self._sweep.is_literal(each) or len(codes) > CODES_MAX:
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
            run = make_run(found[start:end])
            for count, receivers in in_pieces(grants, RECEIVERS_COUNTED):
                for cursor, values in receivers:
                    if cursor.start <= run.position:
                        cursor.swept(run, values)
                if pace.is_over(count):
                    yield
            if self._rules != rules:
                return end
        return len(found)

    def _by_route(self, found: list[Found], first: int) -> Iterator[tuple[Grants[Cursor], int, int]]:
        """Split *found* where the route changes, and where a cursor that joined the sweep later begins.

        Yields like `tail_reader._by_route`.
        """
        starts = self._starts
        current: Route[Cursor] | None = None
        for index in range(first, len(found)):
            position, name = found[index][0], found[index][4]
            route = self._sweep.route(name)
            begins = False
            while starts and starts[0] <= position:
                heappop(starts)
                begins = True
            if route is not current or begins:
                if current is not None and current.grants:
                    yield current.grants, first, index
                first, current = index, route
        if current is not None and current.grants:
            yield current.grants, first, len(found)

    def _is_at_tail(self) -> bool:
        if self._reader is not None and self._reader.is_behind:
            return False
        return all(self._offsets.get(queue, 0) >= routed for queue, routed in self._queues())

    def _join_some(self) -> None:
        """Move some cursors to the tail, in the turn in which the sweep reached it; the others follow later."""
        for cursor in _slice_of(self._swept)[0]:
            self._take_out(cursor)
            self._join(cursor)
            cursor.wake()


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


def _may_read(name: str, cursor: Cursor) -> bool:
    return cursor.may_read(name)


@final
class Cursors:
    """All feeds of a broker; `run` does their sweeps."""

    def __init__(self, store: Store, topics: Topics, tails: Tails) -> None:
        # Return whether permissions depend on the names of messages.
        self.asks: Callable[[], bool] = lambda: False
        # Called with the topics of a new feed, whose messages have names.
        self.on_opened: Callable[[Sequence[str]], None] = lambda topics: None
        self.store = store
        self._topics = topics
        self._tails = tails
        self._feeds: dict[Feed, None] = {}
        self._sweeping: dict[Feed, None] = {}
        self._asking: list[Cursor] = []  # to wake, because the rules have changed
        self._rung = trio.Event()

    def open(
        self,
        topics: Iterable[str],
        make_trie: Callable[[], FilterTrie[Cursor]] = FilterTrie,
        topics_of: Callable[[str], Sequence[str]] | None = None,
        is_name: Callable[[str], bool] = lambda name: True,
    ) -> Feed:
        """Return a feed of *topics*.

        Args:
          topics: their names; they must exist.
          make_trie: returns an empty trie with the protocol's separator and wildcards.
          topics_of: returns those topics that have the names which a filter, or a name, matches, if each name belongs
            to one topic; the permission to read is required there. By default it is required in all of them.
          is_name: returns whether the protocol allows a name, which is empty for messages without a tag; nobody gets
            messages with another one. It is asked once for each name, as long as its route is cached.

        Raises:
          Refused: there is no such topic, or it is not readable.
        """
        names = list(topics)
        for name in names:
            readable(self._topics, name)
        feed = Feed(self, names, make_trie, topics_of or (lambda topic_filter: names), is_name)
        self._feeds[feed] = None
        self.on_opened(names)
        return feed

    def forget_routes(self) -> None:
        """Drop all cached routes and have each cursor check its filters, because permissions have changed."""
        for feed in self._feeds:
            feed.forget_routes()
        self._asking = [cursor for feed in self._feeds for cursor in feed.cursors()]
        self._rung.set()

    def reader(self, topics: Sequence[str]) -> TailReader:
        """Return the tail reader of *topics*, of which some may be deleted. Raises `Refused` if one is not readable."""
        for name in topics:
            if self._topics.get(name) is not None:
                readable(self._topics, name)
        return self._tails.of_all(topics)

    def forget(self, feed: Feed) -> None:
        """Remove *feed*, which was closed."""
        self._feeds.pop(feed, None)
        self._sweeping.pop(feed, None)

    def ring(self, feed: Feed) -> None:
        """Wake the sweeper for *feed*: one of its cursors is behind."""
        self._sweeping[feed] = None
        self._rung.set()

    async def first_from(self, queue: Queue, position: int) -> int:
        """Return the first offset of *queue* whose record begins at *position* or later, or an earlier offset.

        Reads entries from files in a thread.
        """
        queues, low, saved = self.store.queues, queue.first_offset, queue.tail_offset
        try:
            if low < saved:
                found = await self.store.disk.off_loop(lambda: queues.first_behind(queue, low, saved, position))
                if found < saved:
                    return found
                low = found
            return queues.first_behind(queue, low, queue.next_offset, position)
        except BlockDamaged:
            return queue.first_offset  # the first read repairs it

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await self._rung.wait()
            self._rung = trio.Event()
            while self._sweeping or self._asking:
                self._wake_some()
                await trio.lowlevel.checkpoint()
                for feed in list(self._sweeping):
                    try:
                        await feed.sweep()
                    except (Refused, StoreError, OSError) as error:
                        log.error("cursors behind the tail cannot read, retrying in 5 s; %s", error)
                        await trio.sleep(READ_AGAIN_S)
                    await trio.lowlevel.checkpoint()
                    if not feed.is_sweeping:
                        self._sweeping.pop(feed, None)

    def _wake_some(self) -> None:
        for cursor in self._asking[:CURSORS_A_SLICE]:
            if cursor.place is not Place.CLOSED:
                cursor.wake()
        del self._asking[:CURSORS_A_SLICE]

    def statistics(self) -> dict[str, object]:
        feeds = self._feeds
        return {
            "feeds": len(feeds),
            "cursors": sum(map(len, feeds)),
            "sweeps": sum(feed.sweeps for feed in feeds),
            "viewed": sum(feed.viewed for feed in feeds),
        }
