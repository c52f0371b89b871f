"""The schedule of pending timers, in the order of due times, computed from `PendingTimers` a little ahead of time.

The steps run in slices, and sort no more than the times within one second: an hour is distributed over seconds a minute
before it begins, a second over milliseconds a second before. Timers keep their log order at each step, so timers of one
millisecond are delivered in log order. A timer that is added too late for these steps goes into a heap.

The schedule can be dropped and computed again at any time.
"""

from array import array
from collections import deque
from heapq import heappop, heappush
from typing import Final, final

from martlet.runtime.steps import Budget, Steps
from martlet_timer.timers.pending import HOUR_MS, PendingTimers

__all__ = ["Schedule"]

SECOND_MS: Final = 1000
HOUR_AHEAD_MS: Final = 60_000
SECOND_AHEAD_MS: Final = 1000
# Timers to distribute in one slice, in less than a millisecond.
ROWS_AT_ONCE: Final = 1024
ROW_US: Final = 1.0
# Timers that one call of `take` checks: after many recalls most are gone.
LOOKS: Final = 1024
# If the clock goes back by more than this, the schedule starts again: otherwise all new timers would go to the heap.
BACK_MS: Final = 10_000

Timer = tuple[int, int]


@final
class _Second:
    """Timers due in one second: milliseconds within it and positions, in log order."""

    __slots__ = ("dues", "positions")

    def __init__(self) -> None:
        self.dues = array("H")
        self.positions = array("q")


@final
class _Moment:
    """Timers due in the same millisecond; timers before ``next`` are taken."""

    __slots__ = ("due_ms", "next", "positions")

    def __init__(self, due_ms: int) -> None:
        self.due_ms = due_ms
        self.positions = array("q")
        self.next = 0


@final
class Schedule:
    """Returns timers of *pending* when they are due, ordered by time, then by position.

    A taken timer is not returned again until `give_back`. Call `add` for each timer that is added to *pending*.
    """

    def __init__(self, pending: PendingTimers) -> None:
        self._pending = pending
        self._taken: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Compute the schedule again; taken timers stay taken."""
        # Timers due before `_opened_ms` are in `_moments` or `_late`, from there to `_indexed_ms` in `_seconds`.
        self._opened_ms = self._indexed_ms = 0
        self._moments: deque[_Moment] = deque()
        self._late: list[Timer] = []
        self._seconds: dict[int, _Second] = {}
        self._order: list[int] = []  # a heap of the keys of `_seconds`
        self._edition = object()

    def add(self, due_ms: int, position: int) -> None:
        """Add a new timer."""
        if due_ms < self._opened_ms:
            heappush(self._late, (due_ms, position))
        elif due_ms < self._indexed_ms:
            self._put(due_ms, position)

    def forget(self, position: int) -> None:
        """Drop a taken timer whose removal is complete."""
        self._taken.discard(position)

    def hold(self, timer: Timer) -> bool:
        """Take *timer* at any time; return False if it is taken already, or no longer pending."""
        if timer[1] in self._taken or not self._pending.has(*timer):
            return False
        self._taken.add(timer[1])
        return True

    def is_taken(self, position: int) -> bool:
        """Return whether the timer at *position* is taken."""
        return position in self._taken

    @property
    def taken(self) -> int:
        return len(self._taken)

    def _put(self, due_ms: int, position: int) -> None:
        number, ms = divmod(due_ms, SECOND_MS)
        second = self._seconds.get(number)
        if second is None:
            second = self._seconds[number] = _Second()
            heappush(self._order, number)
        second.dues.append(ms)
        second.positions.append(position)

    # ---- getting ready

    def prepare(self, now_ms: int) -> Steps[None]:
        """Distribute the timers that are due soon."""
        if self._opened_ms > now_ms + SECOND_AHEAD_MS + SECOND_MS + BACK_MS:
            self.reset()
        edition = self._edition
        while self._edition is edition:
            hour = self._pending.next_hour(self._indexed_ms // HOUR_MS)
            hour_is_next = hour >= 0 and (not self._order or self._order[0] * SECOND_MS >= hour * HOUR_MS)
            if hour >= 0 and (hour_is_next or not self._has_due(now_ms)) and hour * HOUR_MS <= now_ms + HOUR_AHEAD_MS:
                yield from self._index(hour)
            elif self._order and self._order[0] * SECOND_MS <= now_ms + SECOND_AHEAD_MS and not self._has_due(now_ms):
                yield from self._open(self._order[0])
            else:
                return

    def _has_due(self, now_ms: int) -> bool:
        due_ms = self.first_due_ms()
        return due_ms is not None and due_ms <= now_ms

    def _index(self, hour: int) -> Steps[None]:
        """Distribute the timers of *hour* over seconds."""
        edition, after = self._edition, -1
        self._indexed_ms = hour * HOUR_MS  # no timer is pending before that
        while True:
            rows, last = self._pending.rows_after(hour, after, ROWS_AT_ONCE)
            for due_ms, position in rows:
                self._put(due_ms, position)
            if last == after:
                break
            after = last
            yield
            if self._edition is not edition:
                return
        self._indexed_ms = (hour + 1) * HOUR_MS

    def _open(self, number: int) -> Steps[None]:
        """Distribute the timers of a second over milliseconds."""
        edition, second, row = self._edition, self._seconds[number], 0
        self._opened_ms = max(self._opened_ms, number * SECOND_MS)  # no other timer is pending before that
        moments: dict[int, _Moment] = {}
        base = number * SECOND_MS
        budget = Budget(ROW_US)
        while row < len(second.dues):
            ms = second.dues[row]
            moment = moments.get(ms)
            if moment is None:
                moment = moments[ms] = _Moment(base + ms)
            moment.positions.append(second.positions[row])
            row += 1
            if budget.is_over():
                yield
                if self._edition is not edition:
                    return
        heappop(self._order)
        del self._seconds[number]
        self._moments.extend(moments[ms] for ms in sorted(moments))
        self._opened_ms = base + SECOND_MS

    # ---- taking

    def first_due_ms(self) -> int | None:
        """Return the due time of the first distributed timer; None if there is none."""
        dues = [self._moments[0].due_ms] if self._moments else []
        if self._late:
            dues.append(self._late[0][0])
        return min(dues, default=None)

    def wake_ms(self) -> int | None:
        """Return the time at which `prepare` or `take` has work; None without timers."""
        times = []
        due_ms = self.first_due_ms()
        if due_ms is not None:
            times.append(due_ms)
        if self._order:
            times.append(self._order[0] * SECOND_MS - SECOND_AHEAD_MS)
        hour = self._pending.next_hour(self._indexed_ms // HOUR_MS)
        if hour >= 0:
            times.append(hour * HOUR_MS - HOUR_AHEAD_MS)
        return min(times, default=None)

    def take(self, now_ms: int, count: int) -> list[Timer]:
        """Take up to *count* due timers; more may be due although fewer are returned."""
        timers: list[Timer] = []
        for _ in range(LOOKS):
            due_ms = self.first_due_ms()
            if due_ms is None or due_ms > now_ms or len(timers) == count:
                break
            timer = self._pop(due_ms)
            if timer[1] not in self._taken and self._pending.has(*timer):
                self._taken.add(timer[1])
                timers.append(timer)
        return timers

    def _pop(self, due_ms: int) -> Timer:
        """Remove the next timer, which is due at *due_ms*."""
        moment = self._moments[0] if self._moments else None
        if moment is None or moment.due_ms > due_ms:
            return heappop(self._late)
        position = moment.positions[moment.next]
        if self._late and self._late[0] < (due_ms, position):
            return heappop(self._late)
        moment.next += 1
        if moment.next == len(moment.positions):
            self._moments.popleft()
        return due_ms, position

    def give_back(self, timers: list[Timer]) -> None:
        """Release taken *timers*, which were not delivered, to be due again; ignore others."""
        for due_ms, position in timers:
            if position in self._taken:
                self._taken.discard(position)
                if due_ms < self._opened_ms:
                    heappush(self._late, (due_ms, position))
                elif due_ms < self._indexed_ms:
                    self._put(due_ms, position)
