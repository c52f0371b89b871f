"""Long polling: pulls that found nothing wait here until a record arrives, their time is over, or we stop.

A held pull is a few numbers. A record that arrives moves the pulls of its queue that may want it
to the ``ready`` line of their connections and wakes these; the connection's next collect reads
again and answers, or parks the pull once more if its filter wants none of it. Pulls that want a few
tags are found by the tag codes of the queue's entries, so those of other tags cost nothing. A pull whose
next record may not be delivered yet (`retries`) waits for a time instead of a record.

When `parked_max` pulls wait, whoever has the largest share of them gives some up for the next one that comes: the
share of a connection is what it holds times what its address holds. So neither one connection with many pulls nor
many connections of one address keep others from waiting, and where all have one address, each has a fair share of it.

A hundred thousand pulls may wait for one queue. Where a record concerns more of them than can be moved at once, all of
the queue look again, some in each turn of the event loop, those that waited longest first.
"""

from collections import deque
from collections.abc import Hashable
from heapq import nlargest
from itertools import islice
from typing import Final, final

import trio

from martlet.access import ConsumeGrant, Gate
from martlet.contracts import Peer
from martlet.delivery.selection import Selection
from martlet.delivery.tail_reader import codes_between, unwatch, watch
from martlet.errors import Reason, Refused
from martlet.net.origins import origin_of
from martlet.store import Queue, QueueReader, Store
from martlet.tables.topics import Topics

from .deadlines import Deadlines

__all__ = ["ParkedPulls", "PendingPulls", "Pull"]

# Room is made for a small part of all pulls at once, by those with the largest shares, so that few pulls have to look.
ROOM: Final = 256
GIVERS: Final = 64
PART: Final = 4  # the part of its pulls that a connection gives up at once: a quarter
# An expression is kept as a set of tags or a predicate: 1.6 kB for so many characters, a bit more than a pull without.
CHARS_OF_A_PULL: Final = 64
# A pull that wants more tags than this is woken by every record: a table for each of its tags would take more memory
# than the pull itself.
TAGS_MATCHED: Final = 8
RELEASED_A_TURN: Final = 1024  # pulls, 1 to 2 us each


@final
class Pull:
    """A pull that is not answered yet."""

    __slots__ = (
        "asked_offset",
        "bucket",
        "counted",
        "gate",
        "grant",
        "group",
        "last",
        "max_bytes",
        "max_messages",
        "offset",
        "opaque",
        "own_filter",
        "pending",
        "queue",
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
        wanted: Selection,
        gate: Gate,
        grant: ConsumeGrant,
    ) -> None:
        self.bucket = -1
        self.counted = False  # it waits, and is one of those that `ParkedPulls` counts
        self.pending = pending
        self.opaque = opaque
        self.group = group
        self.queue = queue
        self.asked_offset = offset
        self.offset = offset  # where to read on; beyond the asked one when all between was filtered
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.selection = wanted
        self.gate = gate  # asked again before a pull that waited is answered
        self.grant = grant
        self.own_filter = False  # that the pull brought along, else its group's
        self.retries = False  # a group reads its own retries, which have to wait
        self.weight = 1  # how many pulls it counts for, by the memory it takes
        self.suspend_until = 0.0  # in seconds of trio.current_time; 0 for a pull that may not wait
        self.last = True  # it is answered now, whatever there is

    def bring_filter(self, expression: str) -> None:
        """Its filter is its own, of *expression*, and takes memory."""
        self.own_filter = True
        self.weight = 1 + len(expression) // CHARS_OF_A_PULL

    def expire(self) -> None:
        self.last = True
        self.pending.expire(self)


@final
class PendingPulls:
    """The pulls of one connection: held ones, and those that shall be answered at the next collect."""

    __slots__ = ("_limit", "held", "origin", "peer", "reader", "reading", "ready", "waiting")

    def __init__(self, peer: Peer, limit: int, store: Store) -> None:
        self._limit = limit
        self.peer = peer
        self.reader = QueueReader(store, self._was_read)
        self.origin = origin_of(peer.host)
        self.waiting = 0  # the weight of the pulls that are held, ready or far behind the tail
        self.held: dict[Pull, ParkedPulls] = {}
        self.ready: deque[Pull] = deque()
        self.reading: dict[Pull, None] = {}  # far behind the tail; the reader calls when it has their records

    def check_room(self, pull: Pull) -> None:
        """Raise `Refused` (BUSY) when too many pulls of this connection wait for *pull* to wait as well."""
        if self.waiting + pull.weight > self._limit:
            text = f"{self.waiting} pulls of this connection wait; remoting.parked_peer_max is {self._limit}"
            raise Refused(Reason.BUSY, text)

    def queue_up(self, pull: Pull) -> None:
        """Let the next collect take *pull*."""
        self.ready.append(pull)
        self.peer.wake()

    def _was_read(self, place: Hashable) -> None:
        assert isinstance(place, Pull)
        del self.reading[place]
        self.queue_up(place)

    def expire(self, pull: Pull) -> None:
        """The time of *pull* is over; one that is on its way already needs no push."""
        parked = self.held.get(pull)
        if parked is not None:
            parked.take(pull)
            self.queue_up(pull)

    def take_one(self) -> Pull:
        """Take a pull out of the lines: the one that was held first, or where none is, one that is on its way."""
        for pull, parked in self.held.items():
            parked.take(pull)
            return pull
        pull = self.reading.popitem()[0] if self.reading else self.ready.popleft()
        self.reader.forget(pull)
        return pull


@final
class _Pause:
    """The pulls of one queue whose next record may not be delivered before *at*."""

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
class _Held:
    """The pulls of one queue that wait for a record, those that want a few tags by the codes of these.

    The codes of all records before the offset *matched* were looked at, so a pull goes on from there.
    """

    __slots__ = ("_by_code", "_others", "matched", "pulls")

    def __init__(self, matched: int) -> None:
        self.matched = matched
        self.pulls: dict[Pull, None] = {}
        self._others: dict[Pull, None] = {}  # any record may be for them
        self._by_code: dict[int, dict[Pull, None]] = {}

    def add(self, pull: Pull) -> None:
        self.pulls[pull] = None
        codes = _matched_codes(pull)
        if codes is None:
            self._others[pull] = None
        else:
            for code in codes:
                self._by_code.setdefault(code, {})[pull] = None

    def remove(self, pull: Pull) -> None:
        """Forget *pull*, which need not read again what was not for it."""
        del self.pulls[pull]
        codes = _matched_codes(pull)
        if codes is None:
            del self._others[pull]
            return
        for code in codes:
            same = self._by_code[code]
            del same[pull]
            if not same:
                del self._by_code[code]
        pull.offset = max(pull.offset, self.matched)

    def find(self, codes: set[int] | None) -> list[Pull] | None:
        """The pulls that records with *codes* may be for, all for None; None where they are too many at once."""
        if codes is None:
            return list(self.pulls) if len(self.pulls) <= RELEASED_A_TURN else None
        tables = [self._others, *[self._by_code[code] for code in codes & self._by_code.keys()]]
        if sum(map(len, tables)) > RELEASED_A_TURN:
            return None
        return list({pull: None for table in tables for pull in table})


def _matched_codes(pull: Pull) -> frozenset[int] | None:
    """The codes by which *pull* is found; None when any record may be for it."""
    codes = pull.selection.codes
    return codes if codes is not None and len(codes) <= TAGS_MATCHED else None


@final
class ParkedPulls:
    """The pulls of all connections that wait, the held ones by queue."""

    def __init__(self, store: Store, deadlines: Deadlines, limit: int) -> None:
        self._store = store
        self._deadlines = deadlines
        self._limit = limit
        self._waiting: dict[Queue, _Held] = {}
        # How many pulls of a queue, those that waited longest, are still to look again.
        self._releasing: dict[_Held, int] = {}
        self._more_to_release = trio.Event()
        self._paused: dict[Queue, _Pause] = {}
        self._count = 0
        self._pending: dict[PendingPulls, None] = {}  # that have pulls which wait
        self._by_origin: dict[bytes, int] = {}
        self.waiting = 0
        self.given_up = 0
        self.stopping = False

    def __len__(self) -> int:
        """How many pulls are held."""
        return self._count

    def admit(self, pull: Pull) -> list[Pull]:
        """Let *pull* wait; return the pulls that give way to it, which wait no longer and must be refused."""
        if pull.counted:
            return []
        gave_way = self._make_room() if self._pending and self.waiting + pull.weight > self._limit else []
        pull.counted = True
        self._count_for(pull.pending, pull.weight)
        return gave_way

    def refusal(self) -> Refused:
        """Why pulls give way."""
        return Refused(Reason.BUSY, f"too many pulls wait at this broker; remoting.parked_max is {self._limit}")

    def _count_for(self, pending: PendingPulls, change: int) -> None:
        self.waiting += change
        pending.waiting += change
        if pending.waiting:
            self._pending[pending] = None
        else:
            del self._pending[pending]
        held = self._by_origin.get(pending.origin, 0) + change
        if held:
            self._by_origin[pending.origin] = held
        else:
            del self._by_origin[pending.origin]

    def _share(self, pending: PendingPulls) -> int:
        return pending.waiting * self._by_origin[pending.origin]

    def _make_room(self) -> list[Pull]:
        """Take pulls from the connections with the largest shares, and none from those with less than half of that."""
        goal = self.waiting - max(1, self._limit // ROOM)
        found: list[Pull] = []
        largest = nlargest(GIVERS, self._pending, key=self._share)
        least = self._share(largest[0]) // 2
        for pending in largest:
            if self.waiting <= goal or self._share(pending) < least:
                break
            keeps = pending.waiting - max(1, pending.waiting // PART)
            while pending.waiting > keeps and self.waiting > goal:
                pull = pending.take_one()
                self.done(pull)
                found.append(pull)
        self.given_up += len(found)
        return found

    def park(self, pull: Pull, not_before: float | None = None) -> None:
        """Hold *pull*, which was admitted, until its queue has more or its time is over.

        With *not_before* it is held until then, whatever comes; at most until its time is over.
        """
        if not_before is None:
            self._watched(pull.queue).add(pull)
        else:
            self._pause(pull.queue, not_before).pulls[pull] = None
        self._count += 1
        pull.pending.held[pull] = self
        if pull.bucket < 0:
            self._deadlines.add(pull, pull.suspend_until)

    def _watched(self, queue: Queue) -> _Held:
        held = self._waiting.get(queue)
        if held is None:
            held = self._waiting[queue] = _Held(self._store.end_offset(queue))
            watch(queue, self._arrived)
        return held

    def _pause(self, queue: Queue, until: float) -> _Pause:
        pause = self._paused.get(queue)
        if pause is None:
            pause = self._paused[queue] = _Pause(self, queue, until)
        elif pause.at <= until:
            return pause
        self._deadlines.give_up(pause)
        pause.at = until
        self._deadlines.add(pause, until)
        return pause

    def _arrived(self, queue: Queue) -> None:
        """The store says that *queue* has more to read. It walks over its watchers now, so ours stays."""
        held = self._waiting.get(queue)
        if held is None:
            return
        start, end = held.matched, self._store.end_offset(queue)
        if held.pulls and start < end:
            pulls = held.find(codes_between(self._store, queue, start, end))
            self._release(held, pulls)
            if pulls is None:
                return  # those that are not released yet have not seen these records
        held.matched = max(start, end)

    def _release(self, held: _Held, pulls: list[Pull] | None) -> None:
        """Let *pulls* look again; None for all, of which `run` takes some in each turn of the loop."""
        if pulls is None:
            self._releasing[held] = len(held.pulls)
            self._more_to_release.set()
            return
        for pull in pulls:
            held.remove(pull)
        self._queue_up(pulls)

    async def run(self) -> None:
        """Let the many pulls of one queue look again, until cancelled."""
        while True:
            await self._more_to_release.wait()
            self._more_to_release = trio.Event()
            while self.is_releasing:
                self.release_some()
                await trio.lowlevel.checkpoint()

    @property
    def is_releasing(self) -> bool:
        """Whether pulls of a queue are still to look again."""
        return bool(self._releasing)

    def release_some(self) -> None:
        """Let some of those pulls look again that are to."""
        held, left = next(iter(self._releasing.items()))
        pulls = list(islice(held.pulls, min(left, RELEASED_A_TURN)))
        del self._releasing[held]  # and after the others again
        if left > len(pulls) > 0:
            self._releasing[held] = left - len(pulls)
        self._release(held, pulls)

    def resume(self, queue: Queue) -> None:
        """Let the pulls of *queue* that wait for a time look again."""
        pause = self._paused.pop(queue, None)
        if pause is not None:
            self._deadlines.give_up(pause)
            self._queue_up(list(pause.pulls))

    def _queue_up(self, pulls: list[Pull]) -> None:
        """Let *pulls*, which are held no longer, be answered."""
        self._count -= len(pulls)
        for pull in pulls:
            pending = pull.pending
            del pending.held[pull]
            pending.queue_up(pull)

    def wake_topic(self, topic: str) -> None:
        """Let every held pull of *topic* look again; for what is no record, such as an offset reset."""
        self._wake([queue for queue in (*self._waiting, *self._paused) if queue.topic == topic])

    def wake_gone(self, topics: Topics) -> None:
        """Let every held pull of a topic that *topics* has no more look again."""
        self._wake([queue for queue in (*self._waiting, *self._paused) if topics.get(queue.topic) is None])

    def _wake(self, queues: list[Queue]) -> None:
        for queue in queues:
            held = self._waiting.get(queue)
            if held is not None:
                self._release(held, held.find(None))
            self.resume(queue)

    def take(self, pull: Pull) -> None:
        """Hold *pull* no longer."""
        held, pause = self._waiting.get(pull.queue), self._paused.get(pull.queue)
        if held is not None and pull in held.pulls:
            held.remove(pull)
            self._count -= 1
        elif pause is not None and pull in pause.pulls:
            del pause.pulls[pull]
            self._count -= 1
        pull.pending.held.pop(pull, None)

    def done(self, pull: Pull) -> None:
        """*pull* is answered; it waits no longer and its time no longer runs."""
        if pull.counted:
            pull.counted = False
            self._count_for(pull.pending, -pull.weight)
        if pull.bucket >= 0:
            self._deadlines.give_up(pull)

    def drop(self, pending: PendingPulls) -> None:
        """The connection of *pending* is gone, and its pulls with it."""
        for pull in list(pending.held):
            self.take(pull)
            self.done(pull)
        for pull in (*pending.ready, *pending.reading):
            self.done(pull)
        pending.ready.clear()
        pending.reading.clear()
        pending.reader.close()
        if pending.waiting:  # a defect ended the connection with a pull in hand
            self._count_for(pending, -pending.waiting)

    def sweep(self) -> None:
        """Stop watching queues that no pull waits for."""
        for queue in [queue for queue, held in self._waiting.items() if not held.pulls]:
            del self._waiting[queue]
            unwatch(queue, self._arrived)

    def answer_all(self) -> None:
        """We stop: every held pull is answered now, and none is held any more."""
        self.stopping = True
        tables = [held.pulls for held in self._waiting.values()] + [pause.pulls for pause in self._paused.values()]
        for pulls in tables:
            for pull in list(pulls):
                pull.expire()
