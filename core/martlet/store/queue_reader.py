"""One consumer's reads of queues: memory and the page cache at once, the disk in a worker thread.

Pulls, subscriptions and shared groups all read through a `QueueReader`. `read` never waits. If it returns None, the
records are far behind the tail: a task of the peer reads them in a thread, one place after the other, and `done` is
called when `read` has the answer. When the peer may start no more tasks the reader is `stalled` and tries again at the
next `read`.

Records that only the cold tier has are read in a second line, by a second task: a slow tier delays no other place.
"""

from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from typing import Final, TypeAlias, final

from martlet.errors import Refused, StoreError
from martlet.records.layout import Predicate
from martlet.store.queues.queues import Queue
from martlet.store.read.readers import Readers
from martlet.store.read.reading import Care, ReadOptions, ReadResult

__all__ = ["QueueRead", "QueueReader", "Start"]

# Starts a coroutine function in the background (`Peer.start`); raises `Refused` if too many are running.
Start: TypeAlias = Callable[[Callable[[], Awaitable[None]]], None]

AHEAD_MAX: Final = 4


@final
class QueueRead:
    """A read for a task, and later its result."""

    __slots__ = ("failure", "offset", "queue", "result", "wanted")

    def __init__(self, queue: Queue, offset: int, wanted: ReadOptions) -> None:
        self.queue = queue
        self.offset = offset
        self.wanted = wanted
        self.result: ReadResult | None = None
        self.failure: Refused | StoreError | None = None


@final
class _Line:
    """Reads that wait for one task of the peer, which does them one after the other.

    Results that the consumer does not fetch stay in memory, so the task pauses when *ahead_max* of them wait.
    """

    __slots__ = ("_ahead_max", "_done", "_readers", "pending", "results", "stalled", "working")

    def __init__(self, readers: Readers, done: Callable[[Hashable], None], ahead_max: int) -> None:
        self._readers = readers
        self._done = done
        self._ahead_max = ahead_max
        self.pending: dict[Hashable, QueueRead] = {}  # first come, first served
        self.results: dict[Hashable, QueueRead] = {}
        self.working = False  # whether the task is reading
        self.stalled: Refused | None = None  # why the peer may not start the task

    def take(self, place: Hashable, queue: Queue, offset: int, predicate: Predicate | None) -> QueueRead | None:
        """Return the finished read for *place*, if it is this one; drop any other one."""
        finished = self.results.pop(place, None)
        is_it = finished is not None and finished.offset == offset and finished.queue is queue
        return finished if is_it and finished is not None and finished.wanted.predicate is predicate else None

    def is_pending(self, place: Hashable, queue: Queue, offset: int) -> bool:
        """Return whether this read waits for the task."""
        request = self.pending.get(place)
        return request is not None and request.offset == offset and request.queue is queue

    def forget(self, place: Hashable) -> None:
        """Drop finished and pending reads for *place*."""
        if self.pending or self.results:
            self.pending.pop(place, None)
            self.results.pop(place, None)

    def keep_only(self, places: Collection[Hashable]) -> None:
        """Drop finished reads for all other places."""
        for place in [place for place in self.results if place not in places]:
            del self.results[place]

    def clear(self) -> None:
        """Drop all finished and pending reads."""
        self.pending.clear()
        self.results.clear()

    def close(self) -> None:
        """Drop all reads and the consumer."""
        self.clear()
        self._done = _do_nothing

    def start_reading(self, start: Start) -> None:
        """Start the task for the pending reads, unless it is running or there are none."""
        self.stalled = None
        if self.working or not self.pending or len(self.results) >= self._ahead_max:
            return
        try:
            start(self._read_pending)
            self.working = True
        except Refused as refused:
            self.stalled = refused

    async def _read_pending(self) -> None:
        """Read request by request, until none is pending or enough results wait for the consumer."""
        has_finished = False
        try:
            while self.pending and len(self.results) < self._ahead_max:
                place, request = next(iter(self.pending.items()))
                wanted = request.wanted
                try:
                    request.result = await self._readers.read_far(
                        request.queue,
                        request.offset,
                        wanted.count_max,
                        wanted.budget_bytes,
                        wanted.codes,
                        wanted.predicate,
                        wanted.care,
                    )
                except (Refused, StoreError) as error:
                    request.failure = error
                except OSError as error:
                    request.failure = _read_error(request, error)
                if self.pending.get(place) is request:
                    del self.pending[place]
                    self.results[place] = request
                    self._done(place)
            has_finished = True
        finally:
            self.working = False
            if self.pending and not has_finished:
                self._done(next(iter(self.pending)))  # cancelled; a task of another peer may continue


@final
class QueueReader:
    """Reads queues for one consumer, which identifies its reads by places: any hashable, such as a queue id or a pull.

    Args:
      readers: read the store.
      done: called with the place for which `read` now has a result, or must be called again.
      ahead_max: the maximum number of unfetched results of each of its tasks.
    """

    __slots__ = ("_ahead_max", "_cold_line", "_done", "_line", "_readers")

    def __init__(self, readers: Readers, done: Callable[[Hashable], None], ahead_max: int = AHEAD_MAX) -> None:
        self._readers = readers
        self._done = done
        self._ahead_max = ahead_max
        self._line = _Line(readers, done, ahead_max)
        self._cold_line: _Line | None = None  # made for the first cold read

    @property
    def _lines(self) -> Sequence[_Line]:
        return (self._line,) if self._cold_line is None else (self._line, self._cold_line)

    @property
    def working(self) -> bool:
        """Whether a task reads from the disk."""
        return self._line.working

    @property
    def stalled(self) -> Refused | None:
        """Why the peer may start no read; None if it may."""
        return next((line.stalled for line in self._lines if line.stalled is not None), None)

    @property
    def must_wait(self) -> bool:
        """Whether a wake-up comes later: after a read by a task, or when the peer may start tasks again."""
        return any(line.working or line.stalled is not None for line in self._lines)

    @property
    def has_read(self) -> bool:
        """Whether there are results of reads that were not fetched yet."""
        return any(line.results for line in self._lines)

    def read(
        self,
        start: Start,
        place: Hashable,
        queue: Queue,
        offset: int,
        count_max: int,
        budget_bytes: int,
        codes: frozenset[int] | None = None,
        predicate: Predicate | None = None,
        care: Care = Care.LEAVE_OUT,
    ) -> ReadResult | None:
        """Return readable records of *queue* from *offset* on, at most *count_max*; None if a task must read them.

        Limits, filters, *care* and results are those of `Readers.read_near`. Far behind the tail, *predicate* is
        called in a thread.

        Raises:
          Refused: the predicate failed, a damaged block of entries cannot be rebuilt, or the cold tier failed.
          StoreError: the disk failed.
        """
        line = self._line
        if offset < queue.local_from or self._cold_line is not None:
            line = self._choose_line(place, queue, offset)
        if line.results or line.pending:
            finished = line.take(place, queue, offset, predicate)
            if finished is not None:
                line.start_reading(start)
                return _result_of(finished, count_max)
            if line.is_pending(place, queue, offset):
                line.start_reading(start)
                return None
        result = self._readers.read_near(queue, offset, count_max, budget_bytes, codes, predicate, care)
        if result is None:
            wanted = ReadOptions(count_max, budget_bytes, codes, predicate, care)
            line.pending[place] = QueueRead(queue, offset, wanted)
            line.start_reading(start)
        elif line.pending:
            line.pending.pop(place, None)
        return result

    def _choose_line(self, place: Hashable, queue: Queue, offset: int) -> _Line:
        """Return the line of reads from *offset*, after dropping reads for *place* in the other one."""
        if offset < queue.local_from and self._readers.cold.has(queue, offset):
            if self._cold_line is None:
                self._cold_line = _Line(self._readers, self._done, self._ahead_max)
            self._line.forget(place)
            return self._cold_line
        if self._cold_line is not None:
            self._cold_line.forget(place)
        return self._line

    def forget(self, place: Hashable) -> None:
        """Drop finished and pending reads for *place*."""
        for line in self._lines:
            line.forget(place)

    def keep_only(self, places: Collection[Hashable]) -> None:
        """Drop finished reads for all other places, so that those for *places* are done first."""
        for line in self._lines:
            line.keep_only(places)

    def forget_all(self) -> None:
        """Drop all finished and pending reads."""
        for line in self._lines:
            line.clear()

    def close(self) -> None:
        """Drop all reads and the consumer: both refer to each other and would need a garbage collection."""
        for line in self._lines:
            line.close()
        self._done = _do_nothing


def _do_nothing(place: Hashable) -> None:
    """Do nothing: nobody wants the result any more."""


def _read_error(request: QueueRead, error: OSError) -> StoreError:
    """Return the error for the one consumer whose read failed with *error*."""
    queue = request.queue
    text = f"message {request.offset} of consume queue '{queue.topic}/{queue.queue_id}' cannot be read; {error}"
    failure = StoreError(text)
    failure.__cause__ = error
    return failure


def _result_of(request: QueueRead, count_max: int) -> ReadResult:
    """Return the first *count_max* records of a finished *request*, or raise its failure."""
    failure, request.failure = request.failure, None
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # its traceback refers to this frame
    assert request.result is not None
    request.result.cut(count_max)
    return request.result
