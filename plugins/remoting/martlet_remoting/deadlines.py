"""Many deadlines, most of which are given up before they come: parked pulls, requests to clients.

Buckets of TICK_S seconds, so that adding and giving up cost one dictionary step each;
nothing is early, and nothing is later than a tick, unless thousands are due at once. Sleeps for good while nothing
waits.
"""

import math
from itertools import islice
from typing import Final, Protocol, final

import trio

__all__ = ["TICK_S", "Deadlines", "Timed"]

TICK_S: Final = 0.25
EXPIRED_A_TURN: Final = 1024  # a pull takes 1 to 2 us


class Timed(Protocol):
    """What can be late: ``bucket`` belongs to `Deadlines` and is -1 while nothing is due."""

    bucket: int

    def expire(self) -> None:
        """The time is over; called at most once, and not after `Deadlines.give_up`."""
        ...


@final
class Deadlines:
    """Calls `Timed.expire` when a time has come; `run` must be running for that."""

    __slots__ = ("_awaited", "_buckets", "_nearer")

    def __init__(self) -> None:
        self._buckets: dict[int, dict[int, Timed]] = {}
        self._nearer = trio.Event()
        self._awaited = math.inf  # the bucket that `run` sleeps for

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def add(self, timed: Timed, at: float) -> None:
        """Expire *timed* at *at*, in seconds of `trio.current_time`."""
        bucket = timed.bucket = int(at / TICK_S) + 1
        waiting = self._buckets.get(bucket)
        if waiting is None:
            waiting = self._buckets[bucket] = {}
            if bucket < self._awaited:
                self._nearer.set()
        waiting[id(timed)] = timed

    def give_up(self, timed: Timed) -> None:
        """What *timed* waited for has happened; unknown ones are ignored."""
        waiting = self._buckets.get(timed.bucket)
        if waiting is not None:
            waiting.pop(id(timed), None)
        timed.bucket = -1

    def expire_some(self, now: float) -> None:
        """Expire what is due at *now*, the earliest first, and no more at once than others can wait for."""
        left = EXPIRED_A_TURN
        for bucket in sorted(b for b in self._buckets if b * TICK_S <= now):
            waiting = self._buckets[bucket]
            for timed in list(islice(waiting.values(), left)):
                if waiting.pop(id(timed), None) is not None:  # another that expired may have given it up
                    timed.bucket = -1
                    timed.expire()
                    left -= 1
            if waiting:
                return
            del self._buckets[bucket]

    async def run(self) -> None:
        """Expire what becomes due, until cancelled."""
        while True:
            self._nearer = trio.Event()
            self._awaited = min(self._buckets, default=math.inf)
            with trio.move_on_at(self._awaited * TICK_S):
                await self._nearer.wait()
            self.expire_some(trio.current_time())
