"""Reads new records of a topic once for all followers of its tail.

A `TailReader` watches the queues of one topic, or of several that a feed follows together. Subscriptions
(`subscriptions.py`) take everything or select by tag: the entries of the queues contain the codes of tags, so the
reader finds the subscriptions to wake without reading a record. Protocols with names and filters attach an *interest*,
such as a `RouteCache`. Then the reader reads each new range once, in log order over all its queues, takes the name of
each message once (its tag), asks the interest for the route of the name, and passes each receiver of the route the
`Run` of its messages. Receivers without a match cost nothing.

An *early* reader of a feed reads up to the early end (`martlet.store.append.readable`): records that nobody waits for
are routed before they are durable.
"""

import logging
from collections.abc import Sequence
from typing import Final, final

import trio

from martlet.delivery.beginnings import Beginnings
from martlet.delivery.listeners import Codes, Listener, Listeners, Wakes, codes_between, unwatch, watch
from martlet.delivery.merge import first_counts, merge, records_in
from martlet.delivery.routing.division import Found, Interest
from martlet.delivery.tail_routing import RECEIVER_US, TailRouting
from martlet.errors import Refused, StoreError
from martlet.runtime.steps import Budget, Steps
from martlet.store import Queue, ReadResult, Store
from martlet.tables.topics import Topic, Topics

__all__ = ["TailReader", "Tails"]

log = logging.getLogger("martlet.delivery")

# Messages in one slice of work, as many as a read of a publisher has at most. A message takes 0.5 to 3 us, and about
# 20 us if its name has no cached route (3 us if it can share one), which `division.STEPS_A_SLICE` limits.
MESSAGES_A_SLICE: Final = 1024
BYTES_A_SLICE: Final = 1 << 20
READ_AGAIN_S: Final = 5.0


@final
class TailReader:
    """Follows one topic at its end, or several; created by `Tails`.

    With *early* it reads up to the early end. It follows a topic that is deleted and created again, as long as an
    interest is attached. Everything before log position ``position`` is routed; ``viewed`` counts the records whose
    name was read, ``reads`` the reads of queues.
    """

    def __init__(self, tails: "Tails", names: tuple[str, ...], topics: Sequence[Topic], early: bool = False) -> None:
        self.names = names
        self.early = early
        self.readers = tails.store.early_readers if early else tails.store.readers
        self.position = self.readers.readable  # earlier records count as routed
        self.reads = 0
        self.viewed = 0
        self._tails = tails
        self._store = tails.store
        # The first unrouted offset of each queue.
        self._routed: dict[Queue, int] = {}
        self._touched: dict[Queue, None] = {}  # queues with unrouted records
        self._listeners = Listeners()
        self._interests: dict[Interest, Beginnings | None] = {}
        self.routing = TailRouting(tails.store, names, tails.handed_bytes_max)
        self._routing_steps: Steps[None] | None = None  # routes records that were read, if it takes several turns
        self._topics: dict[str, Topic] = {}  # existing topics of ``names``
        for topic in topics:
            self.follow(topic)

    def follow(self, topic: Topic) -> None:
        """Follow the queues that *topic* has now: those of a new topic from their end, later ones as a whole."""
        known = self._topics.get(topic.name)
        if known is not None and known.queues is not topic.queues:
            self._leave_topic(known)
            known = None
        is_new = known is None or not self._routed
        self._topics[topic.name] = topic
        for queue_id in range(topic.read_queues):
            queue = topic.queue(queue_id)
            if queue not in self._routed:
                self._routed[queue] = self.readers.end_offset(queue) if is_new else topic.beginning_of(queue)
                self._watch(queue)
                if queue.next_offset > self._routed[queue]:
                    self._note_new_records(queue)
                    self._tails.route_later(self)

    def leave_deleted(self, topics: Topics) -> bool:
        """Leave topics that were deleted; return whether there were any."""
        deleted = [topic for name, topic in self._topics.items() if topics.get(name) is None]
        for topic in deleted:
            self._leave_topic(topic)
        return bool(deleted)

    def _leave_topic(self, topic: Topic) -> None:
        del self._topics[topic.name]
        for queue in topic.queues.values():
            if self._routed.pop(queue, None) is not None:
                self._leave_queue(queue)
                self._touched.pop(queue, None)

    def _watch(self, queue: Queue) -> None:
        if self.early:
            self._store.readable_end.early.watch(queue, self._note_new_records)
        else:
            watch(queue, self._note_new_records)
            self._store.flusher.want_durable(queue.last_end)

    def _leave_queue(self, queue: Queue) -> None:
        if self.early:
            self._store.readable_end.early.unwatch(queue, self._note_new_records)
        else:
            unwatch(queue, self._note_new_records)
        self._tails.wakes.forget(queue)

    def close(self) -> None:
        for queue in self._routed:
            self._leave_queue(queue)
        self._routed.clear()
        self._touched.clear()
        self.routing.clear()
        self._routing_steps = None

    @property
    def has_interests(self) -> bool:
        """Whether new records are routed."""
        return bool(self._interests)

    @property
    def is_idle(self) -> bool:
        """Whether the reader has no followers."""
        return not (self._listeners or self._interests)

    @property
    def is_behind(self) -> bool:
        """Whether there are readable records that are not routed yet."""
        return bool(self._touched) or self._routing_steps is not None

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

    def attach(self, interest: Interest, beginnings: Beginnings | None = None) -> None:
        """Route new records by *interest* from now on; *beginnings* has filters that join it at later positions."""
        if not self._interests:
            self._routing_steps = None
            self._touched.clear()
            for queue in self._routed:
                self._routed[queue] = self.readers.end_offset(queue)
        self._interests[interest] = beginnings

    def detach(self, interest: Interest) -> None:
        """Stop routing by *interest*."""
        self._interests.pop(interest, None)
        self._tails.release(self)

    # new records

    def _note_new_records(self, queue: Queue) -> None:
        """Handle that records of *queue* became readable."""
        start, end = self._routed[queue], self.readers.end_offset(queue)
        if self._listeners:
            codes: Codes = set()
            if self._listeners.have_tags and start < end:
                self.reads += 1
                codes = codes_between(self._store, queue, start, end)  # None after a pause of reading
            self._tails.wakes.wake(queue, self._listeners, codes)
        if self._interests:
            if start < end or not self.early:
                self._touched[queue] = None
                self._tails.touched[self] = None
        else:
            self._routed[queue] = max(start, end)

    def route_near(self) -> bool:
        """Route new records that are in memory or in the page cache; return False if there are more."""
        if self._continue_routing():
            return False
        readable = self.readers.readable
        records = self._take_single_record()
        if records:
            self._begin_routing(records, readable)
            return not self.is_behind
        results: dict[Queue, ReadResult] = {}
        for queue, start, count, size in self._plan_reads():
            self.reads += 1
            result = self.readers.read_near(queue, start, count, size)
            if result is None:
                return False
            results[queue] = result
        self._route_results(results, readable)
        return not self.is_behind

    async def route_far(self) -> None:
        """As `route_near`, but wait for the disk for other records."""
        if self._continue_routing():
            return
        results: dict[Queue, ReadResult] = {}
        readable, ranges = self.readers.readable, self._plan_reads()
        for queue, start, count, size in ranges:
            self.reads += 1
            near = self.readers.read_near(queue, start, count, size)
            results[queue] = near if near is not None else await self.readers.read_far(queue, start, count, size)
        # Another interest may have been attached meanwhile; it gets only later records.
        unmoved = {queue for queue, start, *_ in ranges if self._routed.get(queue) == start}
        self._route_results({queue: result for queue, result in results.items() if queue in unmoved}, readable)

    def _take_single_record(self) -> list[Found]:
        """Return the new record if there is just one and it is in memory: a short cut for the latency."""
        if len(self._touched) > 1:
            return []
        (queue,) = self._touched
        if queue.light:  # its records belong to other queues; reading them replaces queue and offset
            return []
        offset = self._routed[queue]
        view = self.readers.view_now(queue, offset) if self.readers.end_offset(queue) == offset + 1 else None
        if view is None:
            return []
        data = bytes(view.buffer[view.start : view.start + view.size])
        self.reads += 1
        self._routed[queue] = offset + 1
        return records_in(data, queue)

    def _plan_reads(self) -> list[tuple[Queue, int, int, int]]:
        """Return the ranges to read in one slice: queue, first offset, and maximum numbers of messages and bytes."""
        starts = [(queue, self._routed[queue]) for queue in self._touched]
        counts = first_counts(self.readers, starts, MESSAGES_A_SLICE)
        total = max(sum(counts), 1)
        return [
            (queue, start, count, BYTES_A_SLICE * count // total)
            for (queue, start), count in zip(starts, counts, strict=True)
            if count
        ]

    def _route_results(self, results: dict[Queue, ReadResult], readable: int) -> None:
        """Route the results of reads, up to the first unread record of a queue."""
        results = {queue: result for queue, result in results.items() if queue in self._touched}  # others were deleted
        self._begin_routing(merge(self.readers, results, self._routed, readable), readable)

    def _begin_routing(self, records: list[Found], readable: int) -> None:
        """Route *records*, which was read before *readable*."""
        for queue in list(self._touched):
            if self._routed[queue] >= self.readers.end_offset(queue):
                del self._touched[queue]
        self.viewed += len(records)
        self._routing_steps = self._route_all(records, readable)
        self._continue_routing()

    # routing

    def _continue_routing(self) -> bool:
        """Route a slice of the records that were read; return True if records are left."""
        if self._routing_steps is None:
            return False
        if next(self._routing_steps, self) is self:
            self._routing_steps = None
        return self._routing_steps is not None

    def _route_all(self, records: list[Found], readable: int) -> Steps[None]:
        budget = Budget(RECEIVER_US)
        for interest, beginnings in list(self._interests.items()):
            yield from self.routing.route_by(interest, beginnings, records, budget)
        if not self._touched:
            self.position = max(self.position, readable)
        self.routing.routed(records[-1][0] + 1 if self._touched and records else self.position)


@final
class Tails:
    """The tail readers of all followed topics."""

    def __init__(self, store: Store, topics: Topics, handed_bytes_max: int) -> None:
        self.store = store
        self.handed_bytes_max = handed_bytes_max
        self.touched: dict[TailReader, None] = {}
        self._topics = topics
        self._readers: dict[tuple[tuple[str, ...], bool], TailReader] = {}
        self._readers_of: dict[str, dict[TailReader, None]] = {}  # by the name of a topic
        self._readers_behind: dict[TailReader, None] = {}
        self._work = trio.Event()
        self.wakes = Wakes()
        topics.changed.append(self._topic_changed)
        topics.deleted.append(self._topic_deleted)
        store.readable_end.on_watched.append(self._route_after_wakes)
        store.readable_end.early.on_watched.append(self._route_touched)

    def of(self, topic: Topic) -> TailReader:
        """Return the reader of *topic*; it ends when it has no followers any more, or the topic is deleted."""
        return self._reader((topic.name,), [topic], early=False)

    def of_all(self, names: Sequence[str], *, early: bool = False) -> TailReader:
        """Return the reader of all topics with *names*, in log order over them; some may be missing.

        It follows topics that are created later too, and ends when it has no followers any more. An *early* reader
        reads up to the early end of the log; it serves feeds, and no listeners.
        """
        topics = [topic for name in names if (topic := self._topics.get(name)) is not None]
        return self._reader(tuple(names), topics, early=early)

    def _reader(self, names: tuple[str, ...], topics: Sequence[Topic], *, early: bool) -> TailReader:
        reader = self._readers.get((names, early))
        if reader is None:
            reader = self._readers[names, early] = TailReader(self, names, topics, early)
            for name in names:
                self._readers_of.setdefault(name, {})[reader] = None
        return reader

    def follows(self, topic: str) -> bool:
        """Return whether *topic* has followers."""
        return topic in self._readers_of

    def release(self, reader: TailReader) -> None:
        """Drop *reader* if it has no followers any more."""
        if reader.is_idle and self._readers.get((reader.names, reader.early)) is reader:
            self._drop(reader)

    def _drop(self, reader: TailReader) -> None:
        del self._readers[reader.names, reader.early]
        for name in reader.names:
            others = self._readers_of[name]
            del others[reader]
            if not others:
                del self._readers_of[name]
        self.touched.pop(reader, None)
        self._readers_behind.pop(reader, None)
        reader.close()

    def _topic_changed(self, topic: Topic | None) -> None:
        if topic is not None:
            for reader in list(self._readers_of.get(topic.name, ())):
                reader.follow(topic)

    def _topic_deleted(self, name: str) -> None:
        for reader in list(self._readers_of.get(name, ())):
            if reader.leave_deleted(self._topics) and not reader.has_interests:
                self._drop(reader)

    def route_later(self, reader: TailReader) -> None:
        """Let `run` route the remaining records of *reader*."""
        if reader.is_behind:
            self._readers_behind[reader] = None
            self._work.set()

    def _route_after_wakes(self) -> None:
        self.wakes.flushed()
        self._route_touched()

    def _route_touched(self) -> None:
        """Route a slice of the new readable records immediately."""
        touched, self.touched = self.touched, {}
        for reader in touched:
            if reader not in self._readers_behind and not reader.route_near():
                self._readers_behind[reader] = None
                self._work.set()

    async def run(self) -> None:
        """Route records that do not fit into one turn or must be read from disk, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.wakes.run)
            await self._route_behind()

    async def _route_behind(self) -> None:
        """Route until cancelled."""
        while True:
            await self._work.wait()
            self._work = trio.Event()
            while self._readers_behind:
                for reader in list(self._readers_behind):
                    try:
                        await reader.route_far()
                    except (Refused, StoreError, OSError) as error:
                        names = ", ".join(reader.names)
                        log.error("topic[%s] cannot be read at its tail, retrying in 5 s; %s", names, error)
                        await trio.sleep(READ_AGAIN_S)
                    await trio.lowlevel.checkpoint()
                    if not reader.is_behind:
                        self._readers_behind.pop(reader, None)

    def statistics(self) -> dict[str, object]:
        readers = self._readers.values()
        return {
            "followed": len(readers),
            "reads": sum(reader.reads for reader in readers),
            "viewed": sum(reader.viewed for reader in readers),
        }
