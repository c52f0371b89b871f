"""The end of the readable log.

With ``flush = "sync"`` durable records are readable, with ``"async"`` written ones. A component that must have a copy
of a record before anyone reads it, such as a replica, can limit it further.

Records that nobody waits for may be delivered before they are durable, to receivers that keep no position except in
later records of the same log. The `EarlyEnd` is the end of such records: everything between the readable end and the
early end was written, and nobody waits for any of it.
"""

from collections.abc import Callable, Iterable
from typing import final

from martlet.store.queues.queues import Queue

__all__ = ["EarlyEnd", "ReadableEnd"]


@final
class EarlyEnd:
    """The log position before which early readers read; never before the readable end.

    When early readers can read more of a queue, its ``watchers`` are called, and then each of ``on_watched``.
    """

    def __init__(self) -> None:
        self.position = 0
        self.watchers: dict[Queue, list[Callable[[Queue], None]]] = {}
        self.on_watched: list[Callable[[], None]] = []

    def watch(self, queue: Queue, watcher: Callable[[Queue], None]) -> None:
        """Call *watcher* whenever early readers can read more of *queue*."""
        self.watchers.setdefault(queue, []).append(watcher)

    def unwatch(self, queue: Queue, watcher: Callable[[Queue], None]) -> None:
        """Stop calling *watcher*."""
        watchers = self.watchers.get(queue)
        if watchers is not None and watcher in watchers:
            watchers.remove(watcher)
            if not watchers:
                del self.watchers[queue]

    def call(self, queue: Queue) -> None:
        """Call the watchers of *queue*."""
        for watcher in tuple(self.watchers.get(queue, ())):
            watcher(queue)


@final
class ReadableEnd:
    """The log position before which everything is readable; no other code changes it.

    ``on_moved`` is called after each move, and when the store failed. ``on_watched`` is called before that, once after
    the watchers of all queues with new records, so nobody has to ask about queues without watchers. Each function of
    ``confirmed`` returns the log position up to which a component has confirmed the log; when that moves, the component
    calls `update`. ``early`` is the end for early readers.
    """

    def __init__(self) -> None:
        self.position = 0
        self.on_moved: list[Callable[[], None]] = []
        self.on_watched: list[Callable[[], None]] = []
        self.confirmed: list[Callable[[], int]] = []
        self.early = EarlyEnd()
        # End of the durable log or, with async flush, of the written log.
        self._limit = 0
        self._early_limit = 0
        # Queues with records that are not readable yet.
        self._touched: dict[Queue, None] = {}

    def open_at(self, position: int) -> None:
        """Start at *position*, the end of the log that a start has found."""
        self._limit = self._early_limit = self.position = self.early.position = position

    def touch(self, queue: Queue) -> None:
        """Call the watchers of *queue* when its newest record becomes readable."""
        self._touched[queue] = None

    def forget(self, queue: Queue) -> None:
        """Do not call the watchers of *queue*, because its topic was deleted."""
        self._touched.pop(queue, None)

    def allow(self, position: int, early: int = 0) -> None:
        """Note that everything before *position* is durable or, with async flush, written.

        Records before *early* may be delivered to early readers.
        """
        assert position >= self._limit, f"the readable end cannot move back from {self._limit} to {position}"
        self._limit = position
        self._early_limit = max(self._early_limit, early)
        self.update()

    def allow_early(self, position: int, queues: Iterable[Queue]) -> None:
        """Let early readers read everything before *position*; the new records belong to *queues*."""
        self._early_limit = max(self._early_limit, position)
        if self.confirmed or position <= self.early.position:
            return
        early = self.early
        early.position = position
        if early.watchers:
            for queue in queues:
                early.call(queue)
            for callback in early.on_watched:
                callback()

    def update(self) -> None:
        """Move as far as possible, and notify all watchers; readable records stay readable."""
        end = min(self._limit, *[each() for each in self.confirmed]) if self.confirmed else self._limit
        if end > self.position:
            self.position = end
        self.early.position = max(self.early.position, end, 0 if self.confirmed else self._early_limit)
        if self._touched:
            self._call_watchers()
        for callback in self.on_moved:
            callback()

    def announce(self) -> None:
        """Call ``on_moved``."""
        for callback in self.on_moved:
            callback()

    def _call_watchers(self) -> None:
        touched, self._touched = self._touched, {}
        for queue in touched:
            if queue.last_end > self.position:
                self._touched[queue] = None
            for watcher in tuple(queue.watchers or ()):
                watcher(queue)
            if self.early.watchers:
                self.early.call(queue)
        for callback in self.on_watched:
            callback()
