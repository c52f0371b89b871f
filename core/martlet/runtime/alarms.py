"""Alarms: times at which keys are due. Most are cancelled, or set to an earlier time, before they ring."""

import math
from collections.abc import Hashable, Iterator
from heapq import heappop, heappush
from typing import Final, Generic, TypeAlias, TypeVar, final

__all__ = ["Alarms"]

# Stale entries tolerated beyond one for each alarm.
STALE_MIN: Final = 64
# Entries that one call moves while stale ones are dropped: more than a call adds, so that this ends.
MOVED_AT_ONCE: Final = 4
# Stale entries that one call drops because their time has come, 0.5 us each.
STALE_AT_ONCE: Final = 1000

K = TypeVar("K", bound=Hashable)
# A time, and a number that no other entry has.
_Entry: TypeAlias = tuple[float, int]


@final
class Alarms(Generic[K]):
    """At most one alarm for each key.

    Alarms are in a heap, where an alarm that was cancelled or set again leaves a stale entry. The entry is dropped when
    its time comes, or when stale entries outnumber the alarms. Then a new heap begins, and each call moves some entries
    of the old one: moving 10,000 at once would take 10 ms. A call takes some microseconds at most.
    """

    __slots__ = ("_entries", "_heap", "_keys", "_number", "_old")

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._old: list[_Entry] = []  # the heap before it, whose entries are moved
        self._entries: dict[K, _Entry] = {}
        self._keys: dict[int, K] = {}  # by the number of the entry; a stale one has none
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def next_at(self) -> float:
        """The time of the next alarm, or an earlier one after very many were cancelled; infinity if none is set."""
        heap = self._earliest()
        return heap[0][0] if heap else math.inf

    def _earliest(self) -> list[_Entry]:
        """Return the heap with the earliest entry, after dropping stale ones: not all, if there are very many."""
        keys, dropped = self._keys, 0
        while True:
            heap = self._heap
            if self._old and (not heap or self._old[0] < heap[0]):
                heap = self._old
            if not heap or heap[0][1] in keys or dropped == STALE_AT_ONCE:
                return heap
            heappop(heap)
            dropped += 1

    def ring_by(self, key: K, at: float) -> bool:
        """Ring for *key* no later than *at*; return whether this is now the first alarm of all.

        An alarm of *key* that is not later stays as it is, and the result is False.
        """
        before = self._entries.get(key)
        if before is not None:
            if at >= before[0]:
                return False
            del self._keys[before[1]]
        elif at == math.inf:
            return False
        self._number += 1
        entry = self._entries[key] = at, self._number
        self._keys[self._number] = key
        heappush(self._heap, entry)
        self._drop_stale()
        return self._earliest()[0] is entry

    def cancel(self, key: K) -> None:
        """Do not ring for *key*."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            del self._keys[entry[1]]
            self._drop_stale()

    def _drop_stale(self) -> None:
        """Drop some stale entries once they outnumber the alarms."""
        if not self._old and len(self._heap) > STALE_MIN + 2 * len(self._entries):
            self._old, self._heap = self._heap, []
        for _ in range(min(len(self._old), MOVED_AT_ONCE)):
            entry = self._old.pop()  # the others stay a heap
            if entry[1] in self._keys:
                heappush(self._heap, entry)

    def take(self, now: float) -> Iterator[tuple[float, K]]:
        """Remove each alarm that rings by *now*, the earliest first; yield its time and its key.

        Ends before the last one where very many were cancelled; `next_at` is not after *now* then.
        """
        while heap := self._earliest():
            at, number = heap[0]
            key = self._keys.get(number)
            if at > now or key is None:
                return
            heappop(heap)
            del self._keys[number], self._entries[key]
            yield at, key
