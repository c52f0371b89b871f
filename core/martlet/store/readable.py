"""The end of the readable log.

With ``flush = "sync"`` durable records are readable, with ``"async"`` written ones. A component that must have a copy
of a record before anyone reads it, such as a replica, can limit it further.
"""

from collections.abc import Callable
from typing import final

from martlet.store.queues import Queue

__all__ = ["ReadableEnd"]


@final
class ReadableEnd:
    """The log position before which everything is readable; it changes nowhere else.

    ``on_moved`` is called after each move, and when the store failed. ``on_watched`` is called before that, once after
    the watchers of all queues with new records; nobody has to ask about queues without watchers. Each of ``confirmed``
    returns the log position up to which a component has confirmed the log; when that moves, the component calls
    `update`.
    """

    __slots__ = ("_limit", "_touched", "confirmed", "on_moved", "on_watched", "position")

    def __init__(self) -> None:
        self.position = 0
        self.on_moved: list[Callable[[], None]] = []
        self.on_watched: list[Callable[[], None]] = []
        self.confirmed: list[Callable[[], int]] = []
        # What is durable or, with async flush, written.
        self._limit = 0
        # Queues with records that are not readable yet.
        self._touched: dict[Queue, None] = {}

    def open_at(self, position: int) -> None:
        """Start at *position*, the end of the log found by a start."""
        self._limit = self.position = position

    def touch(self, queue: Queue) -> None:
        """Call the watchers of *queue* when its newest record becomes readable."""
        self._touched[queue] = None

    def forget(self, queue: Queue) -> None:
        """Do not call the watchers of *queue*, because its topic was deleted."""
        self._touched.pop(queue, None)

    def allow(self, position: int) -> None:
        """Note that everything before *position* is durable or, with async flush, written."""
        assert position >= self._limit, f"the readable end cannot move back from {self._limit} to {position}"
        self._limit = position
        self.update()

    def update(self) -> None:
        """Move as far as possible, and notify all watchers; readable records stay readable."""
        end = min(self._limit, *[each() for each in self.confirmed]) if self.confirmed else self._limit
        if end > self.position:
            self.position = end
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
        for callback in self.on_watched:
            callback()
