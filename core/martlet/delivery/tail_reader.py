"""Reads new records of a topic once for all that follow its tail.

A `TailReader` watches the queues of one topic, or of several that a feed follows together. Subscriptions
(`subscriptions.py`) take everything or select by tag: the entries of the queues contain the codes of tags, so the
reader knows whom to wake without reading a record. Protocols with names and filters attach an *interest*, such as a
`FilterTrie`. Then the reader reads each new range once, in log order over all its queues, takes the name of each
message once (its tag), asks the interest for the route of the name, and passes each receiver of the route the `Run` of
its messages. Receivers without a match cost nothing.

Receivers share a run and its frames in each encoding. A publisher may hand on its frames (`hand_on`): if a run consists
of exactly these messages, they are sent as they were received.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from struct import unpack
from typing import Final, Protocol, final

import trio

from martlet.delivery.fanout import Encoding, places
from martlet.delivery.handed import HandedFrames
from martlet.delivery.interest import in_pieces
from martlet.delivery.listeners import Codes, Listener, Listeners, Wakes
from martlet.delivery.routing import Found, Matched, Route, divide
from martlet.errors import Refused, StoreError
from martlet.records.layout import ENTRY, ENTRY_BYTES, I32, RecordView, names_of, record_views
from martlet.steps import Pace, Steps
from martlet.store import Queue, ReadResult, Store
from martlet.tables.topics import Topic, Topics

__all__ = [
    "Found",
    "Frames",
    "Interest",
    "Receiver",
    "Run",
    "TailReader",
    "Tails",
    "codes_between",
    "make_run",
    "merge",
    "unwatch",
    "watch",
]

log = logging.getLogger("martlet.delivery")

# For one slice of work: a message takes 5 us, one whose name has no cached route about 20.
MESSAGES_A_SLICE: Final = 512
BYTES_A_SLICE: Final = 1 << 20
# Receivers, 0.3 to 1 us each, that get a run in one turn, and that are counted together.
RECEIVERS_A_SLICE: Final = 4096
RECEIVERS_COUNTED: Final = 1024
READ_AGAIN_S: Final = 5.0
POSITION_OF: Final = itemgetter(0)


class Receiver(Protocol):
    """Receives runs at the tail; any hashable object."""

    def matched(self, run: "Run", grants: tuple[Hashable, ...]) -> None:
        """Take *run*; *grants* are the values of the matching filters. It must not raise or wait."""
        ...


class Interest(Protocol):
    """Maps names to receivers; implemented by `martlet.delivery.interest.FilterTrie`."""

    def route(self, name: str) -> Route:
        """Return the route of *name*, the same object for equal routes; a message without a tag has the name ""."""
        ...


@final
class Frames:
    """The messages of a run in one encoding: ``data``, in which message *i* ends before ``ends[i]``.

    ``is_whole`` is False if the encoding left out some messages, whose frames are empty.
    """

    __slots__ = ("_each", "data", "ends", "is_whole")

    def __init__(self, data: bytes, ends: Sequence[int], is_whole: bool = True) -> None:
        self._each: list[bytes] | None = None
        self.data = data
        self.ends = ends
        self.is_whole = is_whole

    @property
    def each(self) -> list[bytes]:
        """The frame of each message, for protocols that put something before each."""
        if self._each is None:
            self._each = [self.data[begin:end] for begin, end in pairwise([0, *self.ends])]
        return self._each

    def part(self, first: int, last: int) -> "Frames":
        """Return the frames of the messages from *first* up to *last*."""
        begin = self.ends[first - 1] if first else 0
        ends = [end - begin for end in self.ends[first:last]]
        return Frames(self.data[begin : begin + ends[-1]], ends, self.is_whole)


@final
class Run:
    """Messages of a topic that the same receivers get for the same filters.

    ``data`` has their records, whole and in log order; ``position`` is that of the first, ``end`` the end of the last.
    Messages for others may be between them in the log.
    """

    __slots__ = ("_first", "_frames", "_positions", "_whole", "count", "data", "end", "position")

    def __init__(self, data: bytes, count: int, position: int, end: int) -> None:
        self.data = data
        self.count = count
        self.position = position
        self.end = end
        self._frames: dict[str, Frames] | None = None
        self._positions: list[int] | None = None
        self._whole: Run | None = None  # the run of which this is a part, and
        self._first = 0  # the index of the first message there

    def records(self) -> Iterator[RecordView]:
        """Yield each record: queue id, queue offset, position, properties, body."""
        return record_views(self.data)

    def positions(self) -> list[int]:
        """Return the log position of each message."""
        if self._positions is None:
            self._positions = places(self.data)[1] if self.count > 1 else [self.position]
        return self._positions

    def frames(self, encoding: Encoding) -> Frames:
        """Return the frames of the messages in *encoding*; they are encoded once for all receivers."""
        if self._whole is not None:
            return self._whole.frames(encoding).part(self._first, self._first + self.count)
        found = self._frames.get(encoding.name) if self._frames is not None else None
        if found is None:
            each = encoding.encode(self.data)
            found = Frames(b"".join(each), list(accumulate(map(len, each))), all(each))
            self.keep(encoding.name, found)
        return found

    def split(self, count: int) -> tuple["Run", "Run"]:
        """Return the first *count* messages, at least one and not all, and the others; both share the frames."""
        at = last = 0
        for _ in range(count):
            last, at = at, at + I32.unpack_from(self.data, at)[0]
        end = RecordView(self.data, last).position + at - last
        head = Run(self.data[:at], count, self.position, end)
        tail = Run(self.data[at:], self.count - count, RecordView(self.data, at).position, self.end)
        head._whole = tail._whole = self._whole or self
        head._first, tail._first = self._first, self._first + count
        return head, tail

    def keep(self, encoding: str, frames: Frames) -> None:
        """Use *frames*, which a publisher handed on, for *encoding*."""
        if self._frames is None:
            self._frames = {}
        self._frames[encoding] = frames


@final
class TailReader:
    """Follows one topic at its end, or several; created by `Tails`.

    It follows a topic that is deleted and created again, as long as an interest is attached. ``position`` is the log
    position before which everything is routed; ``viewed`` counts the records whose name was read, ``reads`` the reads
    of queues.
    """

    def __init__(self, tails: "Tails", names: tuple[str, ...], topics: Sequence[Topic]) -> None:
        self.names = names
        self.position = tails.store.readable  # earlier records count as routed
        self.reads = 0
        self.viewed = 0
        self._tails = tails
        self._store = tails.store
        # The first unrouted offset of each queue.
        self._routed: dict[Queue, int] = {}
        self._touched: dict[Queue, None] = {}  # queues with unrouted records
        self._listeners = Listeners()
        self._interests: dict[Interest, None] = {}
        self._handed = HandedFrames()
        self._undone = self._store.committer.undone
        self._routing: Steps[None] | None = None  # of records that were read, if it takes several turns
        self._rules = 0  # counts the changes of rules for routes
        self._topics: dict[str, Topic] = {}  # those of ``names`` that exist
        for topic in topics:
            self.follow(topic)

    def follow(self, topic: Topic) -> None:
        """Follow the queues that *topic* has now: from their end if the topic is new here, otherwise new ones whole."""
        before = self._topics.get(topic.name)
        if before is not None and before.queues is not topic.queues:
            self._leave_topic(before)
            before = None
        new = before is None or not self._routed
        self._topics[topic.name] = topic
        for queue_id in range(topic.read_queues):
            queue = topic.queue(queue_id)
            if queue not in self._routed:
                self._routed[queue] = self._store.end_offset(queue) if new else queue.first_offset
                watch(queue, self._arrived)
                if queue.next_offset > self._routed[queue]:
                    self._arrived(queue)
                    self._tails.route_later(self)

    def leave_deleted(self, topics: Topics) -> bool:
        """Leave topics that were deleted; return whether there were any."""
        gone = [topic for name, topic in self._topics.items() if topics.get(name) is None]
        for topic in gone:
            self._leave_topic(topic)
        return bool(gone)

    def _leave_topic(self, topic: Topic) -> None:
        del self._topics[topic.name]
        for queue in topic.queues.values():
            if self._routed.pop(queue, None) is not None:
                self._leave_queue(queue)
                self._touched.pop(queue, None)

    def _leave_queue(self, queue: Queue) -> None:
        unwatch(queue, self._arrived)
        self._tails.wakes.forget(queue)

    def close(self) -> None:
        for queue in self._routed:
            self._leave_queue(queue)
        self._routed.clear()
        self._touched.clear()
        self._handed.clear()
        self._routing = None

    @property
    def has_interests(self) -> bool:
        """Whether new records are routed."""
        return bool(self._interests)

    @property
    def is_idle(self) -> bool:
        """Whether nobody follows it any more."""
        return not (self._listeners or self._interests)

    @property
    def is_behind(self) -> bool:
        """Whether there are readable records that are not routed yet."""
        return bool(self._touched) or self._routing is not None

    def routed(self, queue: Queue) -> int:
        """Return the offset of *queue* from which on the attached interests are asked."""
        return self._routed.get(queue, 0)

    def queues(self) -> list[Queue]:
        """The queues of the topics."""
        return list(self._routed)

    # followers

    def listen(self, listener: Listener) -> None:
        """Notify *listener* of records that its selection may match; with only a predicate, of all records."""
        self._listeners.add(listener)

    def leave(self, listener: Listener) -> None:
        self._listeners.remove(listener)
        self._tails.release(self)

    def attach(self, interest: Interest) -> None:
        """Route new records by *interest* from now on."""
        if not self._interests:
            self._routing = None
            self._touched.clear()
            for queue in self._routed:
                self._routed[queue] = self._store.end_offset(queue)
        self._interests[interest] = None

    def detach(self, interest: Interest) -> None:
        """Stop routing by *interest*."""
        self._interests.pop(interest, None)
        self._tails.release(self)

    def hand_on(
        self, encoding: str, positions: Sequence[int], data: bytes, ends: Sequence[int], start: int = 0
    ) -> None:
        """Use the given frames of messages just published for receivers with *encoding*.

        Frame *i* of *data* ends before ``ends[i]``, the first one begins at *start*, and it belongs to the message at
        ``positions[i]`` of the log. Frames are kept until the messages are readable, but at most
        `delivery.encoded_bytes` in total; further messages are encoded again.
        """
        self._forget_undone()
        limit = self._tails.handed_bytes_max
        if self._interests and ends and self._handed.size + ends[-1] - start <= limit:
            self._handed.add(encoding, positions, data, ends, start)

    # new records

    def _arrived(self, queue: Queue) -> None:
        """Handle that records of *queue* became readable."""
        start, end = self._routed[queue], self._store.end_offset(queue)
        if self._listeners:
            codes: Codes = set()
            if self._listeners.have_tags and start < end:
                self.reads += 1
                codes = codes_between(self._store, queue, start, end)  # None after a pause of reading
            self._tails.wakes.wake(queue, self._listeners, codes)
        if self._interests:
            self._touched[queue] = None
            self._tails.touched[self] = None
        else:
            self._routed[queue] = max(start, end)

    def route_near(self) -> bool:
        """Route new records that are in memory or in the page cache; return False if there are more."""
        if self._route_some():
            return False
        readable = self._store.readable
        found = self._single()
        if found:
            self._begin(found, readable)
            return not self.is_behind
        results: dict[Queue, ReadResult] = {}
        for queue, start, count, size in self._ranges():
            self.reads += 1
            result = self._store.read_near(queue, start, count, size)
            if result is None:
                return False
            results[queue] = result
        self._take(results, readable)
        return not self.is_behind

    async def route_far(self) -> None:
        """Like `route_near`, but wait for the disk for what is not near."""
        if self._route_some():
            return
        results: dict[Queue, ReadResult] = {}
        readable, ranges = self._store.readable, self._ranges()
        for queue, start, count, size in ranges:
            self.reads += 1
            near = self._store.read_near(queue, start, count, size)
            results[queue] = near if near is not None else await self._store.read_far(queue, start, count, size)
        # Another interest may have come in the meantime, which gets later records only.
        wanted = {queue for queue, start, *_ in ranges if self._routed.get(queue) == start}
        self._take({queue: result for queue, result in results.items() if queue in wanted}, readable)

    def _single(self) -> list[Found]:
        """Return the new record if there is just one, and it is in memory: as fast as possible, for the latency."""
        if len(self._touched) > 1:
            return []
        (queue,) = self._touched
        if queue.light:  # its records belong to other queues; reading them replaces queue and offset
            return []
        offset = self._routed[queue]
        view = self._store.readers.view_now(queue, offset) if self._store.end_offset(queue) == offset + 1 else None
        if view is None:
            return []
        data = bytes(view.buffer[view.start : view.start + view.size])
        self.reads += 1
        self._routed[queue] = offset + 1
        return [(position, data, at, end, name, queue) for position, at, end, name in names_of(data)]

    def _ranges(self) -> list[tuple[Queue, int, int, int]]:
        """Return what a slice reads: queues, and for each the first offset, and how many messages and bytes at most."""
        starts = [(queue, self._routed[queue]) for queue in self._touched]
        counts = first_counts(self._store, starts, MESSAGES_A_SLICE)
        total = max(sum(counts), 1)
        return [
            (queue, start, count, BYTES_A_SLICE * count // total)
            for (queue, start), count in zip(starts, counts, strict=True)
            if count
        ]

    def _take(self, results: dict[Queue, ReadResult], readable: int) -> None:
        """Route the results of reads, up to where the first queue has unread records."""
        results = {queue: result for queue, result in results.items() if queue in self._touched}  # else it was deleted
        self._begin(merge(self._store, results, self._routed, readable), readable)

    def _begin(self, found: list[Found], readable: int) -> None:
        """Route *found*, which was read before *readable*."""
        for queue in list(self._touched):
            if self._routed[queue] >= self._store.end_offset(queue):
                del self._touched[queue]
        self.viewed += len(found)
        self._routing = self._route_all(found, readable)
        self._route_some()

    # routing

    def _route_some(self) -> bool:
        """Route a slice of the records that were read; return True if more of them are left."""
        if self._routing is None:
            return False
        if next(self._routing, self) is self:
            self._routing = None
        return self._routing is not None

    def rules_changed(self) -> None:
        """Find the routes of all further records again, also of those that were read."""
        self._rules += 1

    def _route_all(self, found: list[Found], readable: int) -> Steps[None]:
        pace = Pace(RECEIVERS_A_SLICE)
        for interest in list(self._interests):
            yield from self._route_by(interest, found, pace)
        if not self._touched:
            self.position = max(self.position, readable)
        if self._handed:
            self._handed.drop_before(found[-1][0] + 1 if self._touched and found else self.position)

    def _route_by(self, interest: Interest, found: list[Found], pace: Pace) -> Steps[None]:
        """Give each receiver its records of *found*."""
        rules = self._rules
        for grants, part in divide(found, interest.route):
            if self._rules != rules:  # in a pause: those who still are receivers get the rest
                for receivers, rest in divide(part, interest.route):
                    yield from self._give({each: receivers[each] for each in receivers if each in grants}, rest, pace)
            else:
                yield from self._give(grants, part, pace)

    def _give(self, grants: Matched, part: list[Found], pace: Pace) -> Steps[None]:
        run = make_run(part)
        if self._handed:
            self._use_handed(run, part)
        for count, receivers in in_pieces(grants, RECEIVERS_COUNTED):
            for receiver, values in receivers:
                try:
                    receiver.matched(run, values)
                except Exception:
                    self._log_failed(run)
            if pace.is_over(count):
                yield

    def _log_failed(self, run: Run) -> None:
        log.exception("a receiver of topic[%s] failed and misses %d messages", ", ".join(self.names), run.count)

    def _use_handed(self, run: Run, found: list[Found]) -> None:
        """Use frames that were handed on for *run*, which consists of *found*."""
        self._forget_undone()
        for encoding, data, ends in self._handed.find([each[0] for each in found]):
            run.keep(encoding, Frames(data, ends))

    def _forget_undone(self) -> None:
        """Drop all frames if messages were undone after they were published: others get their positions."""
        undone = self._store.committer.undone
        if undone != self._undone:
            self._undone = undone
            self._handed.clear()


def codes_between(store: Store, queue: Queue, start: int, end: int) -> set[int] | None:
    """Return the tag codes of the messages from *start* up to *end*; None if that would take long."""
    if end - start > MESSAGES_A_SLICE or start < queue.tail_offset:
        return None
    return {entry[2] for entry in ENTRY.iter_unpack(store.queues.entries(queue, start, end - start))}


def first_counts(store: Store, starts: Sequence[tuple[Queue, int]], count: int) -> list[int]:
    """Return how many of the first *count* messages from *starts* on, in log order, are in each queue.

    Publishers write many messages to one queue at a time, so equal shares would read messages that others precede. They
    are used if some of the entries are on disk.
    """
    left = [store.end_offset(queue) - start for queue, start in starts]
    if sum(left) <= count:
        return left
    if len(left) == 1:
        return [count]
    columns: list[Sequence[int]] = []
    for (queue, start), each in zip(starts, left, strict=True):
        column = _positions(store, queue, start, min(each, count))
        if column is None:
            return [min(each, max(count // len(left), 1)) for each in left]
        columns.append(column)
    last = sorted(chain.from_iterable(columns))[count - 1]
    return [bisect_right(column, last) for column in columns]


def _positions(store: Store, queue: Queue, start: int, count: int) -> Sequence[int] | None:
    """Return the log positions of *count* messages from offset *start* on; None if they are on disk or have holes."""
    if start < queue.tail_offset:
        return None
    data = store.queues.entries(queue, start, count)
    found: tuple[int, ...] = unpack(">" + "q12x" * (len(data) // ENTRY_BYTES), data)
    return found if len(found) == count and list(found) == sorted(found) else None


def merge(store: Store, results: dict[Queue, ReadResult], offsets: dict[Queue, int], readable: int) -> list[Found]:
    """Return the records of *results* in log order, and advance *offsets* over them.

    If a queue was not read to its end, later records of other queues are left for the next time. So are records that
    were not *readable* when the reads began, because another queue may have got records since.
    """
    found: list[Found] = []
    limit = readable - 1
    for queue, result in results.items():
        before = len(found)
        found += _records(queue, result)
        offsets[queue] = max(offsets[queue], result.next_offset)
        if result.next_offset < store.end_offset(queue):
            following = store.queues.position_now(queue, result.next_offset)  # -1 for a hole, or if it is on disk
            last = found[-1][0] if len(found) > before else 0
            limit = min(limit, following - 1 if following >= 0 else last)
    if len(results) > 1:
        found.sort(key=POSITION_OF)
    while found and found[-1][0] > limit:
        _, data, at, _, _, queue = found.pop()
        offsets[queue] = RecordView(data, at).queue_offset
    return found


def _records(queue: Queue, result: ReadResult) -> list[Found]:
    data = b"".join(result.pieces)  # with many names, each record is a piece
    return [(position, data, at, end, name, queue) for position, at, end, name in names_of(data)]


def make_run(found: Sequence[Found]) -> Run:
    """Return the run of the records that `merge` found."""
    position, data, at, end, _, _ = found[0]
    if len(found) == 1:
        return Run(data[at:end], 1, position, position + end - at)
    last_position, _, last_at, last_end, _, _ = found[-1]
    sizes = [each[3] - each[2] for each in found if each[1] is data]
    if len(sizes) == len(found) and last_end - at == sum(sizes):
        whole = data[at:last_end]  # nothing else is between them
    else:
        whole = b"".join([each[1][each[2] : each[3]] for each in found])
    return Run(whole, len(found), position, last_position + last_end - last_at)


def watch(queue: Queue, watcher: Callable[[Queue], None]) -> None:
    """Call *watcher* whenever records of *queue* become readable."""
    if queue.watchers is None:
        queue.watchers = [watcher]
    else:
        queue.watchers.append(watcher)


def unwatch(queue: Queue, watcher: Callable[[Queue], None]) -> None:
    """Stop calling *watcher*."""
    if queue.watchers is not None and watcher in queue.watchers:
        queue.watchers.remove(watcher)
        if not queue.watchers:
            queue.watchers = None


@final
class Tails:
    """The tail readers of all followed topics."""

    def __init__(self, store: Store, topics: Topics, handed_bytes_max: int) -> None:
        self.store = store
        self.handed_bytes_max = handed_bytes_max
        self.touched: dict[TailReader, None] = {}
        self._topics = topics
        self._readers: dict[tuple[str, ...], TailReader] = {}
        self._readers_of: dict[str, dict[TailReader, None]] = {}  # by the name of a topic
        self._behind: dict[TailReader, None] = {}
        self._rung = trio.Event()
        self.wakes = Wakes()
        topics.changed.append(self._topic_changed)
        store.readable_end.on_watched.append(self._route_touched)

    def of(self, topic: Topic) -> TailReader:
        """Return the reader of *topic*; it ends when nobody follows the topic any more, or the topic is deleted."""
        return self._reader((topic.name,), [topic])

    def of_all(self, names: Sequence[str]) -> TailReader:
        """Return the reader of all topics with *names*, in log order over them; some may be missing.

        It follows those that are created later too, and ends when nobody follows it any more.
        """
        return self._reader(tuple(names), [topic for name in names if (topic := self._topics.get(name)) is not None])

    def _reader(self, names: tuple[str, ...], topics: Sequence[Topic]) -> TailReader:
        reader = self._readers.get(names)
        if reader is None:
            reader = self._readers[names] = TailReader(self, names, topics)
            for name in names:
                self._readers_of.setdefault(name, {})[reader] = None
        return reader

    def release(self, reader: TailReader) -> None:
        """Drop *reader* if nobody follows it any more."""
        if reader.is_idle and self._readers.get(reader.names) is reader:
            self._drop(reader)

    def _drop(self, reader: TailReader) -> None:
        del self._readers[reader.names]
        for name in reader.names:
            others = self._readers_of[name]
            del others[reader]
            if not others:
                del self._readers_of[name]
        self.touched.pop(reader, None)
        self._behind.pop(reader, None)
        reader.close()

    def _topic_changed(self, topic: Topic | None) -> None:
        if topic is not None:
            for reader in list(self._readers_of.get(topic.name, ())):
                reader.follow(topic)
            return
        for reader in list(self._readers.values()):
            if reader.leave_deleted(self._topics) and not reader.has_interests:
                self._drop(reader)

    def route_later(self, reader: TailReader) -> None:
        """Have `run` route what *reader* has not routed yet."""
        if reader.is_behind:
            self._behind[reader] = None
            self._rung.set()

    def _route_touched(self) -> None:
        """Route a slice of the new readable records immediately."""
        self.wakes.flushed()
        touched, self.touched = self.touched, {}
        for reader in touched:
            if reader not in self._behind and not reader.route_near():
                self._behind[reader] = None
                self._rung.set()

    async def run(self) -> None:
        """Do what does not fit into one turn or must be read from disk, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.wakes.run)
            await self._run()

    async def _run(self) -> None:
        """Route until cancelled."""
        while True:
            await self._rung.wait()
            self._rung = trio.Event()
            while self._behind:
                for reader in list(self._behind):
                    try:
                        await reader.route_far()
                    except (Refused, StoreError, OSError) as error:
                        names = ", ".join(reader.names)
                        log.error("topic[%s] cannot be read at its tail, retrying in 5 s; %s", names, error)
                        await trio.sleep(READ_AGAIN_S)
                    await trio.lowlevel.checkpoint()
                    if not reader.is_behind:
                        self._behind.pop(reader, None)

    def statistics(self) -> dict[str, object]:
        readers = self._readers.values()
        return {
            "followed": len(readers),
            "reads": sum(reader.reads for reader in readers),
            "viewed": sum(reader.viewed for reader in readers),
        }
