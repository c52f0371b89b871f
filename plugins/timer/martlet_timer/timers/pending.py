"""The pending timers: due time and record position of each, in about 16 bytes per timer.

Timers are grouped by the hour in which they are due, and within an hour kept in log order, in chunks of three arrays.
So a timer is added at the end of its hour's last chunk, and found by a binary search for its position. A removed timer
leaves a dead row. A chunk is rewritten when most of its rows are dead, and dropped with its last timer.

A snapshot is rendered in a worker thread while the table changes. It contains every timer added before, even if the
timer is removed meanwhile: the removal is a note in the log after the position of the snapshot, and is applied again.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from heapq import nsmallest
from itertools import chain
from typing import Final, TypeAlias, final

from martlet.errors import StoreError
from martlet.runtime.steps import Budget, Steps

__all__ = ["HOUR_MS", "Frozen", "PendingTimers"]

HOUR_MS: Final = 3_600_000
CHUNK_ROWS: Final = 4096
# Smaller chunks keep their dead rows.
TIDY_ROWS: Final = 64
# Removals between two rewrites of a chunk, each of which takes about a millisecond: timers that are due together are
# often spread over all chunks, which are then half dead at the same time.
TIDY_EVERY: Final = 64
# Marks a dead row, in place of the time within the hour.
DEAD: Final = 0xFFFFFFFF
KEY_BYTES: Final = 4
# Rows that one slice of a listing checks.
LISTED_ROWS: Final = 1024
# Time to search a chunk for a key.
SEARCH_US: Final = 10.0

Column: TypeAlias = "array[int]"
# Timers of an hour as columns: the hour, milliseconds within it, positions, key hashes.
Frozen: TypeAlias = tuple[int, Column, Column, Column]


@final
class HourTimers:
    """Timers of one hour: milliseconds within the hour, log positions (ascending) and key hashes, row by row."""

    __slots__ = ("dues", "keys", "live", "positions")

    def __init__(self) -> None:
        self.dues = array("I")
        self.positions = array("q")
        self.keys = array("I")
        self.live = 0

    def add(self, due: int, position: int, key: int) -> None:
        self.dues.append(due)
        self.positions.append(position)
        self.keys.append(key)  # last: `rows` in a thread counts complete rows by the keys
        self.live += 1

    def find(self, due: int, position: int) -> int:
        """Return the row of a timer; -1 if the chunk does not have it."""
        row = bisect_left(self.positions, position)
        is_match = row < len(self.positions) and self.positions[row] == position and self.dues[row] == due
        return row if is_match else -1

    def with_key(self, due: int, key: int) -> list[int]:
        """Return the positions of timers with this time and key hash."""
        data, key_bytes = self.keys.tobytes(), array("I", (key,)).tobytes()
        positions: list[int] = []
        byte_index = data.find(key_bytes)
        while byte_index >= 0:
            row, misaligned = divmod(byte_index, KEY_BYTES)
            if not misaligned and self.dues[row] == due:
                positions.append(self.positions[row])
            byte_index = data.find(key_bytes, byte_index + 1)
        return positions

    def without_dead(self) -> "HourTimers":
        live_timers = HourTimers()
        for due, position, key in zip(self.dues, self.positions, self.keys, strict=True):
            if due != DEAD:
                live_timers.add(due, position, key)
        return live_timers

    def rows(self, last: int) -> tuple[Column, Column, Column]:
        """Return the columns of live rows up to position *last*; may be called in a thread."""
        keys = self.keys[:]
        dues, positions = self.dues[: len(keys)], self.positions[: len(keys)]
        end = bisect_right(positions, last)
        if DEAD not in dues:
            return dues[:end], positions[:end], keys[:end]
        live = [row for row in range(end) if dues[row] != DEAD]
        return (
            array("I", [dues[row] for row in live]),
            array("q", [positions[row] for row in live]),
            array("I", [keys[row] for row in live]),
        )


@final
class Hour:
    """The timers due in one hour; ``firsts`` has the first position of each chunk."""

    __slots__ = ("chunks", "firsts")

    def __init__(self) -> None:
        self.chunks: list[HourTimers] = []
        self.firsts: list[int] = []

    def last_chunk(self, position: int) -> HourTimers:
        """Return the chunk for a new timer at *position*."""
        if not self.chunks or len(self.chunks[-1].positions) >= CHUNK_ROWS:
            self.append(HourTimers(), position)
        return self.chunks[-1]

    def append(self, chunk: HourTimers, first: int) -> None:
        self.chunks.append(chunk)
        self.firsts.append(first)

    def index_of(self, position: int) -> int:
        """Return the index of the chunk that may have *position*; -1 if there is none."""
        return bisect_right(self.firsts, position) - 1


@final
class PendingTimers:
    """All pending timers. *granule_bytes* is the resolution of `floor`, such as the size of a segment."""

    def __init__(self, granule_bytes: int) -> None:
        self._granule_bytes = granule_bytes
        self._hours: dict[int, Hour] = {}
        self._counts: dict[int, int] = {}  # number of timers by granule of the log
        self._order: list[int] = []  # the hours, ascending
        self._last = -1
        self._since_tidy = 0  # removals since a chunk was rewritten
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def add(self, due_ms: int, position: int, key: int) -> None:
        """Add a timer whose record is at *position*, after all others of its hour."""
        hour, due = divmod(due_ms, HOUR_MS)
        timers = self._hours.get(hour)
        if timers is None:
            timers = self._hours[hour] = Hour()
            insort(self._order, hour)
        timers.last_chunk(position).add(due, position, key)
        granule = position // self._granule_bytes
        self._counts[granule] = self._counts.get(granule, 0) + 1
        self._last = max(self._last, position)
        self.count += 1

    def has(self, due_ms: int, position: int) -> bool:
        """Return whether the timer at *position* is pending."""
        hour, due = divmod(due_ms, HOUR_MS)
        timers = self._hours.get(hour)
        index = timers.index_of(position) if timers is not None else -1
        return timers is not None and index >= 0 and timers.chunks[index].find(due, position) >= 0

    def remove(self, due_ms: int, position: int) -> bool:
        """Remove a timer; return whether it was pending."""
        hour, due = divmod(due_ms, HOUR_MS)
        timers = self._hours.get(hour)
        index = timers.index_of(position) if timers is not None else -1
        if timers is None or index < 0:
            return False
        chunk = timers.chunks[index]
        row = chunk.find(due, position)
        if row < 0:
            return False
        chunk.dues[row] = DEAD
        chunk.live -= 1
        self._tidy(hour, timers, index)
        self.count -= 1
        self._uncount(position)
        return True

    def _tidy(self, hour: int, timers: Hour, index: int) -> None:
        """Rewrite a chunk whose rows are mostly dead, now or at a later removal; drop an empty one."""
        chunk = timers.chunks[index]
        if chunk.live:
            self._since_tidy += 1
            if len(chunk.positions) > max(2 * chunk.live, TIDY_ROWS) and self._since_tidy >= TIDY_EVERY:
                self._since_tidy = 0
                timers.chunks[index] = chunk.without_dead()
            return
        del timers.chunks[index], timers.firsts[index]
        if not timers.chunks:
            del self._hours[hour], self._order[bisect_left(self._order, hour)]

    def _uncount(self, position: int) -> None:
        granule = position // self._granule_bytes
        count = self._counts[granule] - 1
        if count:
            self._counts[granule] = count
        else:
            del self._counts[granule]

    # ---- looking up

    def next_hour(self, start: int = 0) -> int:
        """Return the first hour from *start* on that has timers; -1 if there is none."""
        index = bisect_left(self._order, start)
        return self._order[index] if index < len(self._order) else -1

    def with_key(self, due_ms: int, key: int) -> Steps[list[int]]:
        """Return the positions of timers due at *due_ms* with this key hash, ascending."""
        hour, due = divmod(due_ms, HOUR_MS)
        timers = self._hours.get(hour)
        positions: list[int] = []
        budget = Budget(SEARCH_US)
        for chunk in list(timers.chunks) if timers is not None else ():
            positions += chunk.with_key(due, key)
            if budget.is_over():
                yield
        return positions

    def rows_after(self, hour: int, position: int, count: int) -> tuple[list[tuple[int, int]], int]:
        """Return time and position of timers of *hour* after *position*, and the position to continue after.

        Checks at most *count* rows. At the end, the position to continue after equals *position*.
        """
        timers = self._hours.get(hour)
        if timers is None:
            return [], position
        index = max(timers.index_of(position), 0)
        row = bisect_right(timers.chunks[index].positions, position)
        if row == len(timers.chunks[index].positions):
            index, row = index + 1, 0
        if index == len(timers.chunks):
            return [], position
        base, chunk = hour * HOUR_MS, timers.chunks[index]
        dues, positions = chunk.dues[row : row + count], chunk.positions[row : row + count]
        rows = [(base + due, at) for due, at in zip(dues, positions, strict=True) if due != DEAD]
        return rows, positions[-1]

    def first_due(self, from_ms: int, count: int) -> Steps[list[tuple[int, int]]]:
        """Return time and position of the first *count* timers that are due at *from_ms* or later, in this order."""
        timers: list[tuple[int, int]] = []
        hour = self.next_hour(from_ms // HOUR_MS)
        while hour >= 0 and len(timers) < count:
            in_hour: list[tuple[int, int]] = []
            before, after = -2, -1
            while before != after:
                before = after
                rows, after = self.rows_after(hour, before, LISTED_ROWS)
                in_hour = nsmallest(count, chain(in_hour, (row for row in rows if row[0] >= from_ms)))
                yield
            timers += in_hour
            hour = self.next_hour(hour + 1)
        return timers[:count]

    def count_before(self, end_ms: int) -> Steps[int]:
        """Return the number of timers that are due before *end_ms*."""
        count, last_hour = 0, end_ms // HOUR_MS
        budget = Budget()
        for hour in self._order[: bisect_right(self._order, last_hour)]:
            timers = self._hours.get(hour)
            for chunk in list(timers.chunks) if timers is not None else ():
                if hour < last_hour:
                    count += chunk.live
                else:
                    count += sum(due < end_ms - hour * HOUR_MS for due in chunk.dues)
                if budget.is_over(1 + len(chunk.dues) // 16 * (hour == last_hour)):
                    yield
        return count

    # ---- retention

    def floor(self) -> int | None:
        """Return a position at or before the oldest needed record; None without timers."""
        return min(self._counts) * self._granule_bytes if self._counts else None

    def in_range(self, start: int, end: int) -> Iterator[list[tuple[int, int]]]:
        """Yield time and position of the timers with records from *start* to *end*, in lists of up to a few hundred.

        Timers may be added and removed meanwhile: yielded timers may be gone.
        """
        rows: list[tuple[int, int]] = []
        budget = Budget()
        for hour, timers in list(self._hours.items()):
            for chunk in timers.chunks[max(timers.index_of(start), 0) : timers.index_of(end) + 1]:
                low, high = bisect_left(chunk.positions, start), bisect_left(chunk.positions, end)
                for due, position in zip(chunk.dues[low:high], chunk.positions[low:high], strict=True):
                    if due != DEAD:
                        rows.append((hour * HOUR_MS + due, position))
                    if budget.is_over():
                        yield rows
                        rows = []
            if budget.is_over():
                yield rows
                rows = []
        yield rows

    # ---- snapshots

    def freeze(self) -> Iterator[Frozen]:
        """Return an iterator over all current timers, for a worker thread; the module explains later removals."""
        return _columns(list(self._hours.items()), self._last)

    def restore(self, columns: Frozen, first_position: int) -> None:
        """Add timers of one hour, except those with records before *first_position*."""
        hour, dues, positions, keys = columns
        if not len(dues) == len(positions) == len(keys):
            raise StoreError(f"columns of hour {hour} have different lengths")
        first_row = bisect_left(positions, first_position)
        chunk = HourTimers()
        chunk.dues, chunk.positions, chunk.keys = dues[first_row:], positions[first_row:], keys[first_row:]
        chunk.live = len(chunk.positions)
        if not chunk.live:
            return
        timers = self._hours.get(hour)
        if timers is None:
            timers = self._hours[hour] = Hour()
            insort(self._order, hour)
        timers.append(chunk, chunk.positions[0])
        self._count(chunk.positions)
        self._last = max(self._last, chunk.positions[-1])
        self.count += chunk.live

    def _count(self, positions: Column) -> None:
        """Count timers by granule."""
        first, last = positions[0] // self._granule_bytes, positions[-1] // self._granule_bytes
        counts = {first: len(positions)}
        if first != last:
            counts = Counter(position // self._granule_bytes for position in positions)
        for granule, count in counts.items():
            self._counts[granule] = self._counts.get(granule, 0) + count


def _columns(hours: list[tuple[int, Hour]], last: int) -> Iterator[Frozen]:
    for hour, timers in hours:
        for chunk in list(timers.chunks):
            columns = chunk.rows(last)
            if columns[0]:
                yield hour, *columns
