"""Alarms: times at which keys are due. Most are cancelled, or set to an earlier time, before they ring."""

import math
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar, final

__all__ = ["Alarms"]

# Stale entries tolerated beyond one for each alarm.
STALE_MIN: Final = 64

K = TypeVar("K", bound=Hashable)


@final
class Alarms(Generic[K]):
    """At most one alarm for each key.

    Alarms are in a heap, where an alarm that was cancelled or set again leaves a stale entry. The entry is dropped when
    its time comes, or when stale entries outnumber the alarms. Setting and cancelling an alarm take up to a
    microsecond.
    """

    __slots__ = ("_heap", "_number", "_times")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []  # the number orders equal times
        self._number = 0
        self._times: dict[K, float] = {}

    def __len__(self) -> int:
        return len(self._times)

    @property
    def next_at(self) -> float:
        """The time of the next alarm; infinity if none is set."""
        heap, times = self._heap, self._times
        while heap and times.get(heap[0][2]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def ring_by(self, key: K, at: float) -> bool:
        """Ring for *key* no later than *at*; return whether this is now the first alarm of all.

        An alarm of *key* that is not later stays as it is, and the result is False.
        """
        if at >= self._times.get(key, math.inf):
            return False
        self._times[key] = at
        self._number += 1
        heappush(self._heap, (at, self._number, key))
        self._drop_stale()
        return self._heap[0][2] is key

    def cancel(self, key: K) -> None:
        """Do not ring for *key*."""
        if self._times.pop(key, None) is not None:
            self._drop_stale()

    def _drop_stale(self) -> None:
        """Drop stale entries, which keep their keys in memory, once they outnumber the alarms."""
        times = self._times
        if len(self._heap) > STALE_MIN + 2 * len(times):
            self._heap = [entry for entry in self._heap if times.get(entry[2]) == entry[0]]
            heapify(self._heap)

    def take(self, now: float) -> Iterator[tuple[float, K]]:
        """Remove each alarm that rings by *now*, the earliest first; yield its time and its key."""
        while self.next_at <= now:
            at, _, key = heappop(self._heap)
            del self._times[key]
            yield at, key
