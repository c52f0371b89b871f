"""Long polling: pulls that found no record wait here until one arrives, they expire, or the broker stops.

A held pull is a few numbers. A new record moves the pulls of its queue that may match to the ``ready`` queues of their
connections and wakes the connections. A connection's next collect reads again and answers the pull, or parks it again
if no record matches. Pulls for a few tags are found by the tag codes of the queue's entries, so a record of another tag
does not touch them. A pull whose next record is still delayed (`retries`) waits for a point in time instead of a
record.

When `parked_max` pulls wait and another one arrives, connections with the largest shares lose some pulls. A
connection's share is its number of pulls times the number of its address. So neither a connection with many pulls nor
an address with many connections keeps others from waiting, and connections of one address get fair shares.

A hundred thousand pulls may wait for one queue. If a record concerns more pulls than can be woken at once, all pulls of
the queue are checked, some in each turn of the event loop, longest waiting first.
"""

from collections import deque
from collections.abc import Hashable, Iterator
from heapq import nlargest
from itertools import islice
from typing import Final, final

import trio

from martlet.access import ConsumeGrant, Gate, Login
from martlet.contracts import Peer
from martlet.delivery.listeners import codes_between, unwatch, watch
from martlet.delivery.routing.selection import Selection
from martlet.errors import Reason, Refused
from martlet.net.origins import origin_of
from martlet.runtime.steps import per_slice
from martlet.store import Queue, QueueReader, Store
from martlet.tables.topics import Topics
from martlet_remoting.consumers.timeouts import Timeouts

__all__ = ["ParkedPulls", "PendingPulls", "Pull"]

# Make room for several pulls at once, so that few pulls trigger a search for the largest shares.
ROOM: Final = 256
GIVERS: Final = 64
PART: Final = 4  # a connection loses a quarter of its pulls at once
# An expression is held as a set of tags or a predicate: 1.6 kB for this many characters, slightly more than a pull.
CHARS_OF_A_PULL: Final = 64
# Every record wakes a pull with more tags than this: table entries for all its tags would take more memory than the
# pull itself.
TAGS_MATCHED: Final = 8
RELEASED_A_TURN: Final = per_slice(us=1)  # pulls


@final
class Pull:
    """A pull request without an answer yet."""

    __slots__ = (
        "asked_offset",
        "bucket",
        "far",
        "gate",
        "grant",
        "group",
        "is_counted",
        "max_bytes",
        "max_messages",
        "must_answer",
        "offset",
        "opaque",
        "own_filter",
        "pending",
        "queue",
        "refused",
        "retries",
        "selection",
        "suspend_until",
        "weight",
    )

    def __init__(
        self,
        pending: "PendingPulls",
        opaque: int,
        group: str,
        queue: Queue,
        offset: int,
        max_messages: int,
        max_bytes: int,
        selection: Selection,
        gate: Gate,
        grant: ConsumeGrant,
    ) -> None:
        self.bucket = -1
        self.is_counted = False  # whether `ParkedPulls` counts the pull as waiting
        self.pending = pending
        self.opaque = opaque
        self.group = group
        self.queue = queue
        self.asked_offset = offset
        self.offset = offset  # next offset to read; past *asked_offset* if the records between were filtered out
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.selection = selection
        self.gate = gate  # checked again before a held pull is answered
        self.grant = grant
        self.own_filter = False  # the request has its own filter; the group's heartbeats do not apply
        self.far = False  # the pull's records come from the disk
        self.retries = False  # the topic is the group's retry topic, whose messages are delayed
        self.weight = 1  # number of pulls that it counts as, by its memory
        self.suspend_until = 0.0  # trio.current_time; 0 for a pull that may not wait
        self.must_answer = True  # the pull must be answered now, with or without records
        self.refused: Refused | None = None  # its login or its permission ended while it waited

    def bring_filter(self, expression: str) -> None:
        """Set the pull's own filter: *expression* adds to its weight."""
        self.own_filter = True
        self.weight = 1 + len(expression) // CHARS_OF_A_PULL

    def expire(self) -> None:
        self.must_answer = True
        self.pending.release(self)

    def refuse(self, refused: Refused) -> None:
        """Answer with *refused* at the next collect, if the pull is held."""
        self.refused = refused
        self.pending.release(self)

    def recheck(self) -> None:
        """Answer now if the pull is held and no longer permitted: the next collect refuses it."""
        try:
            self.gate.consume(self.group, self.queue.topic)
        except Refused as refused:
            self.refuse(refused)


@final
class PendingPulls:
    """The pulls of one connection: held ones, and ready ones, to answer at the next collect."""

    def __init__(self, peer: Peer, limit: int, store: Store) -> None:
        self._limit = limit
        self.peer = peer
        self.reader = QueueReader(store.readers, self._queue_after_read)
        self.origin = origin_of(peer.host)
        self.waiting = 0  # total weight of the pulls that are held, ready or being read
        self.held: dict[Pull, ParkedPulls] = {}
        self.ready: deque[Pull] = deque()
        self.reading: dict[Pull, None] = {}  # pulls far behind the tail that wait for the reader

    def check_room(self, pull: Pull) -> None:
        """Raise `Refused` (BUSY) if too many pulls of this connection wait already."""
        if self.waiting + pull.weight > self._limit:
            text = f"{self.waiting} pulls of this connection wait already; remoting.parked_peer_max is {self._limit}"
            raise Refused(Reason.BUSY, text)

    def queue_up(self, pull: Pull) -> None:
        """Queue *pull* for an answer at the next collect, and wake the connection."""
        self.ready.append(pull)
        self.peer.wake()

    def _queue_after_read(self, place: Hashable) -> None:
        assert isinstance(place, Pull)
        del self.reading[place]
        self.queue_up(place)

    def release(self, pull: Pull) -> None:
        """Queue the held *pull* for an answer; a pull that is no longer held is queued already."""
        parked = self.held.get(pull)
        if parked is not None:
            parked.take(pull)
            self.queue_up(pull)

    def take_one(self) -> Pull:
        """Remove and return a pull: the one held longest, or if none is held, one being read or ready."""
        for pull, parked in self.held.items():
            parked.take(pull)
            return pull
        pull = self.reading.popitem()[0] if self.reading else self.ready.popleft()
        self.reader.forget(pull)
        return pull


@final
class _Pause:
    """The pulls of one queue whose next record must not be delivered before *at*."""

    __slots__ = ("at", "bucket", "parked", "pulls", "queue")

    def __init__(self, parked: "ParkedPulls", queue: Queue, at: float) -> None:
        self.bucket = -1
        self.parked = parked
        self.queue = queue
        self.at = at
        self.pulls: dict[Pull, None] = {}

    def expire(self) -> None:
        self.parked.resume(self.queue)


@final
class _QueuePulls:
    """The pulls of one queue that wait for a record; pulls for a few tags are found by tag code.

    All records before offset *compared_end* were compared with the pulls, so pulls continue there.
    """

    __slots__ = ("_by_code", "_pulls_for_any_tag", "compared_end", "pulls")

    def __init__(self, compared_end: int) -> None:
        self.compared_end = compared_end
        self.pulls: dict[Pull, None] = {}
        self._pulls_for_any_tag: dict[Pull, None] = {}  # any record may match
        self._by_code: dict[int, dict[Pull, None]] = {}

    def add(self, pull: Pull) -> None:
        self.pulls[pull] = None
        codes = _matched_codes(pull)
        if codes is None:
            self._pulls_for_any_tag[pull] = None
        else:
            for code in codes:
                self._by_code.setdefault(code, {})[pull] = None

    def remove(self, pull: Pull) -> None:
        """Remove *pull*, and let it continue after the records that did not match."""
        del self.pulls[pull]
        codes = _matched_codes(pull)
        if codes is None:
            del self._pulls_for_any_tag[pull]
            return
        for code in codes:
            pulls_of_code = self._by_code[code]
            del pulls_of_code[pull]
            if not pulls_of_code:
                del self._by_code[code]
        pull.offset = max(pull.offset, self.compared_end)

    def find(self, codes: set[int] | None) -> list[Pull] | None:
        """Return the pulls that records with *codes* may match, all if *codes* is None; None if there are too many."""
        if codes is None:
            return list(self.pulls) if len(self.pulls) <= RELEASED_A_TURN else None
        tables = [self._pulls_for_any_tag, *[self._by_code[code] for code in codes & self._by_code.keys()]]
        if sum(map(len, tables)) > RELEASED_A_TURN:
            return None
        return list({pull: None for table in tables for pull in table})


def _matched_codes(pull: Pull) -> frozenset[int] | None:
    """Return the tag codes that *pull* waits for; None if any record may match."""
    codes = pull.selection.codes
    return codes if codes is not None and len(codes) <= TAGS_MATCHED else None


@final
class ParkedPulls:
    """The waiting pulls of all connections; the held ones by queue."""

    def __init__(self, store: Store, timeouts: Timeouts, limit: int) -> None:
        self._store = store
        self._timeouts = timeouts
        self._limit = limit
        self._waiting: dict[Queue, _QueuePulls] = {}
        # Queue -> number of its pulls, longest waiting first, that are still to read again.
        self._counts_to_release: dict[_QueuePulls, int] = {}
        self._more_to_release = trio.Event()
        self._pauses: dict[Queue, _Pause] = {}
        self._count = 0
        self._pending: dict[PendingPulls, None] = {}  # connections with waiting pulls
        self._by_origin: dict[bytes, int] = {}
        self.waiting = 0
        self.given_up = 0
        self.stopping = False

    def __len__(self) -> int:
        """Return the number of held pulls."""
        return self._count

    def admit(self, pull: Pull) -> list[Pull]:
        """Let *pull* wait; return the pulls that made room for it, which the caller must refuse."""
        if pull.is_counted:
            return []
        gave_way = self._make_room() if self._pending and self.waiting + pull.weight > self._limit else []
        pull.is_counted = True
        self._count_for(pull.pending, pull.weight)
        return gave_way

    def refusal(self) -> Refused:
        """Return the reason for refusing pulls that were removed to make room for others."""
        return Refused(Reason.BUSY, f"too many pulls wait on this broker; remoting.parked_max is {self._limit}")

    def _count_for(self, pending: PendingPulls, change: int) -> None:
        self.waiting += change
        pending.waiting += change
        if pending.waiting:
            self._pending[pending] = None
        else:
            del self._pending[pending]
        origin_weight = self._by_origin.get(pending.origin, 0) + change
        if origin_weight:
            self._by_origin[pending.origin] = origin_weight
        else:
            del self._by_origin[pending.origin]

    def _share(self, pending: PendingPulls) -> int:
        return pending.waiting * self._by_origin[pending.origin]

    def _make_room(self) -> list[Pull]:
        """Remove pulls of the connections with the largest shares, but none of shares below half the largest."""
        total_goal = self.waiting - max(1, self._limit // ROOM)
        removed_pulls: list[Pull] = []
        largest = nlargest(GIVERS, self._pending, key=self._share)
        share_min = self._share(largest[0]) // 2
        for pending in largest:
            if self.waiting <= total_goal or self._share(pending) < share_min:
                break
            weight_goal = pending.waiting - max(1, pending.waiting // PART)
            while pending.waiting > weight_goal and self.waiting > total_goal:
                pull = pending.take_one()
                self.done(pull)
                removed_pulls.append(pull)
        self.given_up += len(removed_pulls)
        return removed_pulls

    def park(self, pull: Pull, not_before: float | None = None) -> None:
        """Hold *pull*, which was admitted, until its queue has new records or it expires.

        With *not_before*, hold it until then regardless of new records, or until it expires.
        """
        if not_before is None:
            self._watch(pull.queue).add(pull)
        else:
            self._pause(pull.queue, not_before).pulls[pull] = None
        self._count += 1
        pull.pending.held[pull] = self
        if pull.bucket < 0:
            self._timeouts.add(pull, pull.suspend_until)

    def _watch(self, queue: Queue) -> _QueuePulls:
        queue_pulls = self._waiting.get(queue)
        if queue_pulls is None:
            queue_pulls = self._waiting[queue] = _QueuePulls(self._store.readers.end_offset(queue))
            watch(queue, self._release_matching)
            self._store.flusher.want_durable(queue.last_end)
        return queue_pulls

    def _pause(self, queue: Queue, until: float) -> _Pause:
        pause = self._pauses.get(queue)
        if pause is None:
            pause = self._pauses[queue] = _Pause(self, queue, until)
        elif pause.at <= until:
            return pause
        self._timeouts.give_up(pause)
        pause.at = until
        self._timeouts.add(pause, until)
        return pause

    def _release_matching(self, queue: Queue) -> None:
        """Handle new records in *queue*. Keep the watch: the store is iterating over its watchers."""
        queue_pulls = self._waiting.get(queue)
        if queue_pulls is None:
            return
        start, end = queue_pulls.compared_end, self._store.readers.end_offset(queue)
        if queue_pulls.pulls and start < end:
            pulls = queue_pulls.find(codes_between(self._store, queue, start, end))
            self._release(queue_pulls, pulls)
            if pulls is None:
                return  # pulls that are not released yet have not seen these records
        queue_pulls.compared_end = max(start, end)

    def _release(self, queue_pulls: _QueuePulls, pulls: list[Pull] | None) -> None:
        """Let *pulls* read again; None for all, some in each turn of the event loop by `run`."""
        if pulls is None:
            self._counts_to_release[queue_pulls] = len(queue_pulls.pulls)
            self._more_to_release.set()
            return
        for pull in pulls:
            queue_pulls.remove(pull)
        self._queue_up(pulls)

    async def run(self) -> None:
        """Let the many pulls of one queue read again, some per turn of the event loop, until cancelled."""
        while True:
            await self._more_to_release.wait()
            self._more_to_release = trio.Event()
            while self.is_releasing:
                self.release_some()
                await trio.lowlevel.checkpoint()

    @property
    def is_releasing(self) -> bool:
        """Whether pulls of a queue are still to be released."""
        return bool(self._counts_to_release)

    def release_some(self) -> None:
        """Release some of the pulls that are still to be released."""
        queue_pulls, count = next(iter(self._counts_to_release.items()))
        pulls = list(islice(queue_pulls.pulls, min(count, RELEASED_A_TURN)))
        del self._counts_to_release[queue_pulls]  # and add the queue again, after the others
        if count > len(pulls) > 0:
            self._counts_to_release[queue_pulls] = count - len(pulls)
        self._release(queue_pulls, pulls)

    def resume(self, queue: Queue) -> None:
        """Let the pulls of *queue* that wait for a point in time read again now."""
        pause = self._pauses.pop(queue, None)
        if pause is not None:
            self._timeouts.give_up(pause)
            self._queue_up(list(pause.pulls))

    def _queue_up(self, pulls: list[Pull]) -> None:
        """Queue *pulls*, which are no longer held, for an answer."""
        self._count -= len(pulls)
        for pull in pulls:
            pending = pull.pending
            del pending.held[pull]
            pending.queue_up(pull)

    def wake_topic(self, topic: str) -> None:
        """Let every held pull of *topic* read again, for changes other than new records, such as an offset reset."""
        self._wake([queue for queue in (*self._waiting, *self._pauses) if queue.topic == topic])

    def wake_gone(self, topics: Topics) -> None:
        """Let every held pull of a deleted topic read again."""
        self._wake([queue for queue in (*self._waiting, *self._pauses) if topics.get(queue.topic) is None])

    def _wake(self, queues: list[Queue]) -> None:
        for queue in queues:
            queue_pulls = self._waiting.get(queue)
            if queue_pulls is not None:
                self._release(queue_pulls, queue_pulls.find(None))
            self.resume(queue)

    def take(self, pull: Pull) -> None:
        """Stop holding *pull*."""
        queue_pulls, pause = self._waiting.get(pull.queue), self._pauses.get(pull.queue)
        if queue_pulls is not None and pull in queue_pulls.pulls:
            queue_pulls.remove(pull)
            self._count -= 1
        elif pause is not None and pull in pause.pulls:
            del pause.pulls[pull]
            self._count -= 1
        pull.pending.held.pop(pull, None)

    def waiting_pulls(self) -> Iterator[Pull]:
        """Yield the held pulls; more may come and go meanwhile."""
        for pending in list(self._pending):
            yield from list(pending.held)

    def logins(self) -> Iterator[Login]:
        """Yield the identities of the held pulls, and what ends each."""
        for pull in self.waiting_pulls():
            yield pull.gate.identity, pull.refuse

    def done(self, pull: Pull) -> None:
        """Settle the answered *pull*: it no longer counts as waiting and cannot expire."""
        if pull.is_counted:
            pull.is_counted = False
            self._count_for(pull.pending, -pull.weight)
        if pull.bucket >= 0:
            self._timeouts.give_up(pull)

    def drop(self, pending: PendingPulls) -> None:
        """Drop the pulls of a closed connection."""
        for pull in list(pending.held):
            self.take(pull)
            self.done(pull)
        for pull in (*pending.ready, *pending.reading):
            self.done(pull)
        pending.ready.clear()
        pending.reading.clear()
        pending.reader.close()
        if pending.waiting:  # an unexpected error closed the connection while a pull was being handled
            self._count_for(pending, -pending.waiting)

    def sweep(self) -> None:
        """Stop watching queues without held pulls."""
        for queue in [queue for queue, queue_pulls in self._waiting.items() if not queue_pulls.pulls]:
            del self._waiting[queue]
            unwatch(queue, self._release_matching)

    def answer_all(self) -> None:
        """Answer every held pull now, and hold no more: at shutdown."""
        self.stopping = True
        tables = [queue_pulls.pulls for queue_pulls in self._waiting.values()] + [
            pause.pulls for pause in self._pauses.values()
        ]
        for pulls in tables:
            for pull in list(pulls):
                pull.expire()
