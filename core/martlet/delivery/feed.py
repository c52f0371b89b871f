"""Feeds: the topics that one protocol follows, and the topic filters of its receivers.

Each receiver has a `Cursor`. At the tail, the cursor's filters are in a `RouteCache` that the topics' tail reader asks.
Cursors behind the tail are swept (`reader.py`). When a sweep reaches the tail, its cursors join the tail reader, and
get each record exactly once.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final, final

import trio

from martlet.delivery.beginnings import Beginnings
from martlet.delivery.catch_up.departures import Departures
from martlet.delivery.catch_up.reader import CatchUpReader
from martlet.delivery.catch_up.sweep import Sweep, slice_of
from martlet.delivery.catch_up.sweep_turns import SweepTurns
from martlet.delivery.catch_up.sweeps import distance_class
from martlet.delivery.cursor import PENDING_BYTES, Cursor, CursorPlace, Permit
from martlet.delivery.routing.route_cache import RouteCache
from martlet.delivery.subscriptions import readable
from martlet.delivery.tail_reader import READ_AGAIN_S, TailReader, Tails
from martlet.errors import Refused, StoreError
from martlet.store import Store
from martlet.tables.topics import Topics

__all__ = ["Cursors", "Feed"]

log = logging.getLogger("martlet.delivery")

# Memory limit of a sweep's cached routes; there are few sweeps at a time, but more than one.
SWEEP_ROUTES_BYTES: Final = 1 << 24


@final
class Feed:
    """The topics that one protocol follows; created by `Cursors.open`.

    ``pending_bytes`` is the size of the records that the cursors have not yet collected; a shared record counts for
    each cursor. ``for_groups`` is the feed in which shared groups find their messages: this one or, if it is early,
    another one, because a group reads only readable records.
    """

    def __init__(
        self,
        owner: "Cursors",
        topics: Sequence[str],
        make_routes: Callable[[], RouteCache[Cursor]],
        topics_of: Callable[[str], Sequence[str]],
        is_name: Callable[[str], bool],
        early: bool,
    ) -> None:
        self.pending_bytes = 0
        self.for_groups = self
        self._owner = owner
        self._early = early
        self._readers = owner.store.early_readers if early else owner.store.readers
        self.topics = topics
        self.topics_of = topics_of
        self._reader: TailReader | None = None  # of all topics; None while there are no cursors
        self._tail: RouteCache[Cursor] = make_routes()
        self._beginnings = Beginnings(self._tail, lambda cursor: cursor.place is CursorPlace.TAIL)
        self._make_routes = make_routes
        self._is_name = is_name
        self._set_permissions(self._tail)
        # For cursors behind the tail.
        self.catch_up = CatchUpReader(owner.store, owner.departures, self._make_sweep_routes)
        self._cursors: dict[Cursor, None] = {}

    def _set_permissions(self, routes: RouteCache[Cursor]) -> None:
        owner = self._owner
        routes.permits = _may_read
        routes.asks = lambda: owner.asks()  # the owner sets its `asks` later
        routes.is_name = self._is_name

    def _make_sweep_routes(self) -> RouteCache[Cursor]:
        routes = self._make_routes()
        self._set_permissions(routes)
        routes.routes_bytes_max = SWEEP_ROUTES_BYTES
        return routes

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
          position: start with the first record at or after this log position; None for the tail: the records that are
            appended from now on. A position beyond the end, which a power failure can cause, means the tail too.
          pending_bytes_max: limit for uncollected records; a single run always fits. When all cursors of the feed
            together have 64 MiB, it is at most 256 KiB.
          permit: decides which filters the receiver may follow and which names it may read; None allows everything.
          droppable: called with the values of the filters that match a run; at the tail, a full cursor drops runs for
            which it returns True, and otherwise reads the log later.
          is_paused: receive nothing before `Cursor.resume`, so that further filters begin at *position* too.

        Raises:
          Refused: a filter is invalid, or a topic of the feed is not readable.
        """
        for each in filters:
            self._tail.check(each)
        if not self._cursors:
            self._attach()
        store = self._owner.store
        start = store.appended if position is None else min(position, store.appended)
        cursor = Cursor(self, wake, filters, start, pending_bytes_max, permit, droppable)
        self._cursors[cursor] = None
        if is_paused:
            cursor.is_paused = True
            cursor.move_to(CursorPlace.FULL, 0)
        elif start >= self._readers.readable:
            self._join(cursor, start)
        else:
            self.resume(cursor)
        return cursor

    def check(self, topic_filter: str) -> None:
        """Raise `Refused` (ILLEGAL) unless *topic_filter* is valid."""
        self._tail.check(topic_filter)

    def hand_on(
        self, topic: str, encoding: str, positions: Sequence[int], data: bytes, ends: Sequence[int], start: int = 0
    ) -> None:
        """Use the given frames of messages just published to *topic* for receivers with *encoding*.

        Frame *i* of *data* ends before ``ends[i]``, the first one begins at *start*, and it belongs to the message at
        ``positions[i]`` of the log. Frames are kept until the messages are readable, but at most
        `delivery.encoded_bytes` in total; further messages are encoded again.
        """
        if self._reader is not None and self._reader.has_interests and topic in self.topics:
            self._reader.routing.hand_on(encoding, positions, data, ends, start)

    def cursors(self) -> Iterable[Cursor]:
        """All open cursors."""
        return self._cursors

    def forget_routes(self) -> None:
        """Drop all cached routes, because the rules have changed; routing in progress continues by the new rules."""
        if self._reader is not None:
            self._reader.routing.rules_changed()
        self._tail.forget_routes()
        self.catch_up.forget_routes()

    def close(self) -> None:
        """Stop following the topics."""
        for cursor in list(self._cursors):
            cursor.close()
        self._owner.forget(self)
        if self.for_groups is not self:
            self.for_groups.close()

    def _attach(self) -> None:
        """Follow the topics at their tails."""
        self._reader = self.catch_up.reader = self._owner.reader(self.topics, early=self._early)
        self._reader.attach(self._tail, self._beginnings)

    def _detach(self) -> None:
        reader, self._reader = self._reader, None
        self.catch_up.end()
        if reader is not None:
            reader.detach(self._tail)

    # requests of cursors

    def tail_position(self) -> int:
        """The log position before which everything was delivered to the cursors at the tail."""
        reader = self._reader
        return self._readers.readable if reader is None or not reader.is_behind else reader.position

    def end_position(self) -> int:
        """The log position at which filters begin that are added now."""
        return self._owner.store.appended

    def has_removed(self, position: int, filters: Iterable[str]) -> bool:
        """Return whether retention removed messages from log position *position* on that *filters* may match."""
        store = self._owner.store
        if position < store.oldest_position:
            return True
        topics = {topic for topic in self.topics if position < store.upkeep.topic_retention.removed_to(topic)}
        return bool(topics) and any(not topics.isdisjoint(self.topics_of(each)) for each in filters)

    def resume(self, cursor: Cursor) -> None:
        """Let *cursor* follow the tail if it is there; otherwise let it wait for a sweep to its position."""
        if cursor.start >= self._readers.readable:
            self._join(cursor, cursor.start)
            cursor.wake()
            return
        cursor.move_to(CursorPlace.BEHIND, 0)
        self.catch_up.add(cursor)
        self._owner.find_sweep(self)

    def go_back(self, cursor: Cursor, position: int) -> None:
        """Sweep *cursor* again from *position* on."""
        self._withdraw(cursor)
        cursor.restart(position)
        self.resume(cursor)

    def pause(self, cursor: Cursor) -> None:
        """Stop delivering to *cursor*, which is full."""
        self._withdraw(cursor)
        cursor.move_to(CursorPlace.FULL, 0)

    def close_cursor(self, cursor: Cursor) -> None:
        """Remove *cursor*."""
        if cursor.place is not CursorPlace.CLOSED:
            self._withdraw(cursor)
            cursor.move_to(CursorPlace.CLOSED, 0)
            del self._cursors[cursor]
            if not self._cursors:
                self._detach()

    def skip_to_tail(self, cursor: Cursor) -> None:
        """Move *cursor* to the tail, skipping everything before."""
        if cursor.place is not CursorPlace.CLOSED:
            self._withdraw(cursor)
            cursor.begins = None
            self._join(cursor, self.end_position())

    def add_filter(self, cursor: Cursor, topic_filter: str, value: Hashable, begin: int) -> None:
        """Add a filter of *cursor*, or change its value; a new one begins at *begin* or the end of the log."""
        self._tail.check(topic_filter)
        if begin > cursor.start and topic_filter not in cursor.filters:
            cursor.begin_later(topic_filter, min(begin, self.end_position()))
        cursor.filters[topic_filter] = value
        if cursor.place is CursorPlace.TAIL:
            self._beginnings.add(cursor, topic_filter, self.tail_position())
            self._schedule_filters()
        elif cursor.sweep is not None:
            cursor.sweep.add_filter(cursor, topic_filter)

    def remove_filter(self, cursor: Cursor, topic_filter: str) -> None:
        """Remove a filter of *cursor*."""
        if cursor.filters.pop(topic_filter, self) is not self:
            cursor.forget_begin(topic_filter)
            if cursor.place is CursorPlace.TAIL:
                self._tail.remove(topic_filter, cursor)
            elif cursor.sweep is not None:
                cursor.sweep.remove_filter(cursor, topic_filter)

    def _withdraw(self, cursor: Cursor) -> None:
        """Remove *cursor* from the tail, or from its sweep."""
        if cursor.place is CursorPlace.TAIL:
            self._owner.departures.leave(self._tail, cursor)
        else:
            self.catch_up.remove(cursor)

    def _join(self, cursor: Cursor, position: int) -> None:
        """Let *cursor* follow the tail from log position *position* on."""
        cursor.move_to(CursorPlace.TAIL, position)
        self._owner.departures.come_back(self._tail, cursor)
        self._beginnings.enter(cursor, self.tail_position())
        self._schedule_filters()

    # filters that begin later

    def _schedule_filters(self) -> None:
        if self._beginnings:
            self._owner.begin_filters_later(self)
            if self._beginnings.first <= self.tail_position():
                self._owner.begin_filters_soon(self)

    def begin_due_filters(self) -> bool:
        """Let filters begin whose positions the tail has reached, in slices; return whether none of them is left."""
        return self._beginnings.begin(self.tail_position())

    @property
    def has_later_filters(self) -> bool:
        """Whether filters begin later."""
        return bool(self._beginnings)

    def note_log_cut(self, position: int) -> None:
        """Note that the log was cut at *position*."""
        self._beginnings.note_log_cut(position)
        for cursor in self._cursors:
            cursor.note_log_cut(position)

    # the sweep

    async def go_on(self, sweep: Sweep) -> None:
        """Do one slice of *sweep*, and move cursors to the tail when it is reached."""
        if await self.catch_up.go_on(sweep):
            self._join_cursors(sweep)

    def _join_cursors(self, sweep: Sweep) -> None:
        """Move some cursors to the tail, in the turn in which *sweep* reached it; the others follow later."""
        for cursor in slice_of(sweep.cursors)[0]:
            self._withdraw(cursor)
            self._join(cursor, self.tail_position())
            cursor.wake()


def _may_read(name: str, cursor: Cursor) -> bool:
    return cursor.may_read(name)


@final
class Cursors:
    """All feeds of a broker; `run` runs their sweeps."""

    def __init__(self, store: Store, topics: Topics, tails: Tails) -> None:
        # Returns whether permissions depend on the names of messages.
        self.asks: Callable[[], bool] = lambda: False
        # Called with the topics of a new feed, whose messages have names.
        self.on_opened: Callable[[Sequence[str]], None] = lambda topics: None
        self.store = store
        self._topics = topics
        self._tails = tails
        self._feeds: dict[Feed, None] = {}
        self._with_waiting: dict[Feed, None] = {}  # feeds with cursors that wait for a sweep
        self._turns: SweepTurns[tuple[Feed, Sweep]] = SweepTurns()
        self._with_later_filters: dict[Feed, None] = {}  # feeds with filters that begin later
        self._with_due_filters: dict[Feed, None] = {}  # feeds with many filters that begin now
        self.departures = Departures(self._wake_run)
        self._work = trio.Event()
        store.readable_end.on_moved.append(self._begin_due_filters)
        store.committer.on_undone.append(self._note_log_cut)

    def open(
        self,
        topics: Iterable[str],
        make_routes: Callable[[], RouteCache[Cursor]] = RouteCache,
        topics_of: Callable[[str], Sequence[str]] | None = None,
        is_name: Callable[[str], bool] = lambda name: True,
        *,
        early: bool = False,
    ) -> Feed:
        """Return a feed of *topics*.

        Args:
          topics: their names; they must exist.
          make_routes: returns an empty `RouteCache` with the protocol's separator and wildcards.
          topics_of: if each name belongs to one topic: returns the topics whose names match a filter or name; the
            permission to read is required there. By default it is required in all topics.
          is_name: returns whether the protocol allows a name, which is empty for messages without a tag; messages with
            other names are not delivered. It is asked once for each name, as long as the name's route is cached.
          early: deliver records that nobody waits for (`Gate.note_unawaited`) before they are durable. Cursor positions
            may then be stored only in the log, as those of sessions are.

        Raises:
          Refused: there is no such topic, or it is not readable.
        """
        names = list(topics)
        for name in names:
            readable(self._topics, name)
        topics_of, early = topics_of or (lambda topic_filter: names), early and self.store.delivers_early
        feed = Feed(self, names, make_routes, topics_of, is_name, early)
        self._feeds[feed] = None
        if early:
            feed.for_groups = Feed(self, names, make_routes, topics_of, is_name, False)
            self._feeds[feed.for_groups] = None
        self.on_opened(names)
        return feed

    def forget_routes(self) -> None:
        """Drop all cached routes, because permissions have changed."""
        for feed in self._feeds:
            feed.forget_routes()

    def waiting(self) -> Iterator[Cursor]:
        """Yield the cursors of all feeds; more may be opened and closed meanwhile."""
        for feed in list(self._feeds):
            for cursor in list(feed.cursors()):
                if cursor.place is not CursorPlace.CLOSED:
                    yield cursor

    def reader(self, topics: Sequence[str], *, early: bool) -> TailReader:
        """Return the tail reader of *topics*, of which some may be deleted. Raises `Refused` if one is not readable."""
        for name in topics:
            if self._topics.get(name) is not None:
                readable(self._topics, name)
        return self._tails.of_all(topics, early=early)

    def forget(self, feed: Feed) -> None:
        """Remove *feed*, which was closed."""
        self._feeds.pop(feed, None)
        self._with_waiting.pop(feed, None)
        self._with_later_filters.pop(feed, None)

    def begin_filters_later(self, feed: Feed) -> None:
        """Let filters of *feed* begin once the log is readable up to their positions."""
        self._with_later_filters[feed] = None

    def _begin_due_filters(self) -> None:
        for feed in list(self._with_later_filters):
            if not feed.begin_due_filters():
                self.begin_filters_soon(feed)
            if not feed.has_later_filters:
                del self._with_later_filters[feed]

    def begin_filters_soon(self, feed: Feed) -> None:
        """Let filters of *feed* that begin at the tail do so in the next turns of the event loop."""
        self._with_due_filters[feed] = None
        self._wake_run()

    def _note_log_cut(self, position: int) -> None:
        for feed in self._feeds:
            feed.note_log_cut(position)

    def find_sweep(self, feed: Feed) -> None:
        """Find a sweep for a cursor of *feed* that is behind."""
        self._with_waiting[feed] = None
        self._work.set()

    def _wake_run(self) -> None:
        self._work.set()

    @property
    def _has_work(self) -> bool:
        return bool(self._with_waiting or self._turns or self._with_due_filters or self.departures)

    async def run(self) -> None:
        """Sweep until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._work.wait()
                self._work = trio.Event()
                while self._has_work:
                    self._begin_filters()
                    self.departures.go_on()
                    await trio.lowlevel.checkpoint()
                    await self.sweep(nursery)
                    await trio.lowlevel.checkpoint()

    async def sweep(self, nursery: trio.Nursery) -> None:
        """Do one slice of the sweep whose turn it is.

        After a failure, the sweep waits in *nursery*; there it also waits for the cold tier, so that others go on.
        """
        self._begin_sweeps()
        if not self._turns:
            return
        feed, sweep = self._turns.take()
        if sweep.is_over:
            return
        if sweep.is_cold and not sweep.is_routing:
            nursery.start_soon(self._go_on, nursery, feed, sweep)
        else:
            await self._go_on(nursery, feed, sweep)

    async def _go_on(self, nursery: trio.Nursery, feed: Feed, sweep: Sweep) -> None:
        try:
            await feed.go_on(sweep)
        except (Refused, StoreError, OSError) as error:
            log.error("cursors behind the tail cannot read, retrying in 5 s; %s", error)
            nursery.start_soon(self._retry, feed, sweep)
            return
        if not sweep.is_over:
            self._queue(feed, sweep)
        if feed.catch_up.has_waiting:
            self.find_sweep(feed)

    def _begin_sweeps(self) -> None:
        """Begin sweeps for the cursors that need one."""
        with_waiting, self._with_waiting = self._with_waiting, {}
        for feed in with_waiting:
            for sweep in feed.catch_up.plan():
                self._queue(feed, sweep)

    def _queue(self, feed: Feed, sweep: Sweep) -> None:
        self._turns.add((feed, sweep), distance_class(self.store.readable - sweep.swept_to))
        self._work.set()

    async def _retry(self, feed: Feed, sweep: Sweep) -> None:
        await trio.sleep(READ_AGAIN_S)
        self._queue(feed, sweep)

    def _begin_filters(self) -> None:
        for feed in list(self._with_due_filters):
            if feed.begin_due_filters():
                del self._with_due_filters[feed]

    def statistics(self) -> dict[str, object]:
        feeds = self._feeds
        return {
            "feeds": len(feeds),
            "cursors": sum(map(len, feeds)),
            "sweeps": sum(feed.catch_up.sweeps for feed in feeds),
            "viewed": sum(feed.catch_up.viewed for feed in feeds),
        }
