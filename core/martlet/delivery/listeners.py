"""Wakes listeners that wait for records of a topic: for any record, or for records with certain tags.

One message may be for a hundred thousand subscriptions. If they are too many to wake in the turn of the event loop in
which it became readable, its queue waits in `Wakes`, which wakes some in each turn. Records that arrive meanwhile are
read by the listeners that are not woken yet; the others are woken again when it is the queue's turn.
"""

from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice
from typing import Final, Protocol, TypeAlias, final

import trio

from martlet.delivery.routing.selection import Selection
from martlet.records.layout import ENTRY
from martlet.runtime.steps import per_slice
from martlet.store import Queue, Store

__all__ = ["WAKES_A_TURN", "Codes", "Listener", "Listeners", "Wakes", "codes_between", "unwatch", "watch"]

WAKES_A_TURN: Final = per_slice(us=1)
# If more messages became readable together, looking at the tag of each would take longer than waking every listener.
CODES_MAX: Final = 512

# Codes of tags; None for any.
Codes: TypeAlias = set[int] | None


class Listener(Protocol):
    """Waits at the tail of queues for any record, or for records with certain tags."""

    selection: Selection

    def arrived_at(self, queue: Queue) -> None:
        """Handle new readable records of *queue*; must not raise. May be called after the listener has left."""
        ...


@final
class Listeners:
    """The listeners of one topic, by the codes of their tags."""

    __slots__ = ("_by_code", "_everything")

    def __init__(self) -> None:
        self._everything: dict[Listener, None] = {}
        self._by_code: dict[int, dict[Listener, None]] = {}

    def __bool__(self) -> bool:
        """Whether there are any listeners."""
        return bool(self._everything or self._by_code)

    @property
    def have_tags(self) -> bool:
        """Whether some listeners wait only for certain tags."""
        return bool(self._by_code)

    def add(self, listener: Listener) -> None:
        codes = listener.selection.codes
        if codes is None:
            self._everything[listener] = None
        for code in codes or ():
            self._by_code.setdefault(code, {})[listener] = None

    def remove(self, listener: Listener) -> None:
        self._everything.pop(listener, None)
        for code in listener.selection.codes or ():
            table = self._by_code.get(code)
            if table is not None:
                table.pop(listener, None)
                if not table:
                    del self._by_code[code]

    def tables(self, codes: Codes) -> list[dict[Listener, None]]:
        """Return the tables of the listeners that records with *codes* may concern."""
        by_code = self._by_code
        if codes is None:
            return [self._everything, *by_code.values()]
        return [self._everything, *[by_code[code] for code in codes & by_code.keys()]]


@final
class Wakes:
    """Wakes listeners, at most `WAKES_A_TURN` at a flush and as many in each turn of `run`."""

    def __init__(self) -> None:
        self._wakes_left = WAKES_A_TURN
        self._queued: dict[Queue, tuple[Listeners, Codes]] = {}
        self._queue: Queue | None = None  # the queue whose listeners are being woken
        self._remaining: Iterator[Listener] = iter(())
        self._work = trio.Event()

    def wake(self, queue: Queue, listeners: Listeners, codes: Codes) -> None:
        """Wake listeners that new records of *queue* with *codes* may concern: now, or if many, in later turns."""
        queued = self._queued.get(queue)
        if queued is None and queue is not self._queue:
            tables = listeners.tables(codes)
            count = _count_listeners(tables, self._wakes_left)
            if count <= self._wakes_left:
                self._wakes_left -= count
                for listener in list(chain.from_iterable(tables)):
                    listener.arrived_at(queue)
                return
        elif queued is not None:
            codes = None if codes is None or queued[1] is None else codes | queued[1]
        self._queued[queue] = listeners, codes
        self._work.set()

    def forget(self, queue: Queue) -> None:
        """Stop waking listeners of *queue*."""
        self._queued.pop(queue, None)
        if queue is self._queue:
            self._queue, self._remaining = None, iter(())

    def flushed(self) -> None:
        """Note that `wake` was called for all queues of a flush: the next flush may wake as many again."""
        self._wakes_left = WAKES_A_TURN

    @property
    def is_waking(self) -> bool:
        """Whether there are listeners that wait for their turn."""
        return self._queue is not None or bool(self._queued)

    def wake_some(self) -> None:
        """Wake the listeners whose turn it is."""
        wakes_left = WAKES_A_TURN
        while wakes_left > 0 and self.is_waking:
            if self._queue is None:
                self._begin_queue()
            queue, woken = self._queue, list(islice(self._remaining, wakes_left))
            assert queue is not None
            for listener in woken:
                listener.arrived_at(queue)
            if len(woken) < wakes_left and self._queue is queue:
                self._queue = None
            wakes_left -= len(woken) + 1  # a queue without listeners counts too

    def _begin_queue(self) -> None:
        """Begin with the queue that has waited longest; copy a table when it is its turn: listeners leave."""
        self._queue = queue = next(iter(self._queued))
        listeners, codes = self._queued.pop(queue)
        self._remaining = chain.from_iterable(map(list, listeners.tables(codes)))

    async def run(self) -> None:
        """Wake listeners that were too many for one turn, until cancelled."""
        while True:
            await self._work.wait()
            self._work = trio.Event()
            while self.is_waking:
                self.wake_some()
                await trio.lowlevel.checkpoint()


def _count_listeners(tables: Collection[Collection[Listener]], count_max: int) -> int:
    """Return the number of entries of all *tables*, or a number just above *count_max*."""
    count = 0
    for table in tables:
        count += len(table)
        if count > count_max:
            break
    return count


def codes_between(store: Store, queue: Queue, start: int, end: int) -> Codes:
    """Return the tag codes of the messages from *start* up to *end*; None if that would take long."""
    if end - start > CODES_MAX or start < queue.tail_offset:
        return None
    return {entry[2] for entry in ENTRY.iter_unpack(store.queues.entries(queue, start, end - start))}


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
