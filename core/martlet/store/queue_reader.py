"""One consumer's reads of queues: memory and the page cache at once, the disk in a worker thread.

Pulls, subscriptions and shared groups all read through a `QueueReader`. `read` never waits. If it returns None, the
records are far behind the tail: a task of the peer reads them in a thread, one place after the other, and `done` is
called when `read` has the answer. Results that the consumer does not fetch stay in memory, so the task pauses when
`ahead_max` of them wait. When the peer may start no more tasks the reader is `stalled` and tries again at the next
`read`.

Records that only the cold tier has are read in a second line, by a second task: a slow tier delays no other place.
"""

from collections.abc import Awaitable, Callable, Collection, Hashable
from typing import Final, TypeAlias, final

from martlet.errors import Refused, StoreError
from martlet.records.layout import Predicate
from martlet.store.queues.queues import Queue
from martlet.store.read.readers import Readers
from martlet.store.read.reading import Care, ReadResult

__all__ = ["QueueRead", "QueueReader", "Start"]

# Starts a coroutine function in the background (`Peer.start`); raises `Refused` if too many are running.
Start: TypeAlias = Callable[[Callable[[], Awaitable[None]]], None]

AHEAD_MAX: Final = 4


@final
class QueueRead:
    """A read for the worker thread, and later its result."""

    __slots__ = ("budget_bytes", "care", "codes", "count_max", "failure", "offset", "predicate", "queue", "result")

    def __init__(
        self,
        queue: Queue,
        offset: int,
        count_max: int,
        budget_bytes: int,
        codes: frozenset[int] | None,
        predicate: Predicate | None,
        care: Care,
    ) -> None:
        self.queue = queue
        self.offset = offset
        self.count_max = count_max
        self.budget_bytes = budget_bytes
        self.codes = codes
        self.predicate = predicate
        self.care = care
        self.result: ReadResult | None = None
        self.failure: Refused | StoreError | None = None


@final
class QueueReader:
    """Reads queues for one consumer, which identifies its reads by places: any hashable, such as a queue id or a pull.

    Args:
      readers: read the store.
      done: called with the place for which `read` now has a result, or must be called again.
      ahead_max: the maximum number of unfetched results of the thread.
    """

    __slots__ = ("_ahead_max", "_cold_line", "_done", "_pending", "_readers", "_results", "_stalled", "working")

    def __init__(self, readers: Readers, done: Callable[[Hashable], None], ahead_max: int = AHEAD_MAX) -> None:
        self._readers = readers
        self._done = done
        self._ahead_max = ahead_max
        self._pending: dict[Hashable, QueueRead] = {}  # reads for the thread, first come, first served
        self._results: dict[Hashable, QueueRead] = {}
        self.working = False  # whether a task of the peer is reading
        self._stalled: Refused | None = None
        self._cold_line: QueueReader | None = None  # made for the first cold read

    @property
    def stalled(self) -> Refused | None:
        """Why the peer may start no read; None if it may."""
        if self._stalled is None and self._cold_line is not None:
            return self._cold_line.stalled
        return self._stalled

    @property
    def must_wait(self) -> bool:
        """Whether a wake-up comes later: after a read by the thread, or when the peer may start tasks again."""
        is_waiting = self.working or self._stalled is not None
        return is_waiting or (self._cold_line is not None and self._cold_line.must_wait)

    @property
    def has_read(self) -> bool:
        """Whether there are results of reads that were not fetched yet."""
        return bool(self._results) or (self._cold_line is not None and self._cold_line.has_read)

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
        """Return readable records of *queue* from *offset* on, at most *count_max*; None if a thread must read them.

        Limits, filters, *care* and results are those of `Readers.read_near`. Far behind the tail, *predicate* is
        called in a thread.

        Raises:
          Refused: the predicate failed, a damaged block of entries cannot be rebuilt, or the cold tier failed.
          StoreError: the disk failed.
        """
        cold_line = self._cold_line
        if offset < queue.local_from and self._readers.cold.has(queue, offset):
            if cold_line is None:
                cold_line = self._cold_line = QueueReader(self._readers, self._done, self._ahead_max)
            self._forget_here(place)
            return cold_line._read(start, place, queue, offset, count_max, budget_bytes, codes, predicate, care)
        if cold_line is not None:
            cold_line.forget(place)
        return self._read(start, place, queue, offset, count_max, budget_bytes, codes, predicate, care)

    def _read(
        self,
        start: Start,
        place: Hashable,
        queue: Queue,
        offset: int,
        count_max: int,
        budget_bytes: int,
        codes: frozenset[int] | None,
        predicate: Predicate | None,
        care: Care,
    ) -> ReadResult | None:
        """As `read`, in this line."""
        if self._results or self._pending:
            finished = self._results.pop(place, None)
            if (
                finished is not None
                and finished.offset == offset
                and finished.queue is queue
                and finished.predicate is predicate
            ):
                self._start_reading(start)
                return _result_of(finished, count_max)
            request = self._pending.get(place)
            if request is not None and request.offset == offset and request.queue is queue:
                self._start_reading(start)
                return None
        result = self._readers.read_near(queue, offset, count_max, budget_bytes, codes, predicate, care)
        if result is None:
            self._pending[place] = QueueRead(queue, offset, count_max, budget_bytes, codes, predicate, care)
            self._start_reading(start)
        elif self._pending:
            self._pending.pop(place, None)
        return result

    def forget(self, place: Hashable) -> None:
        """Drop finished and pending reads for *place*."""
        self._forget_here(place)
        if self._cold_line is not None:
            self._cold_line.forget(place)

    def _forget_here(self, place: Hashable) -> None:
        if self._pending or self._results:
            self._pending.pop(place, None)
            self._results.pop(place, None)

    def keep_only(self, places: Collection[Hashable]) -> None:
        """Drop finished and pending reads for all other places, so that those for *places* are done first."""
        for place in [place for place in self._results if place not in places]:
            del self._results[place]
        if self._cold_line is not None:
            self._cold_line.keep_only(places)

    def forget_all(self) -> None:
        """Drop all finished and pending reads."""
        self._pending.clear()
        self._results.clear()
        if self._cold_line is not None:
            self._cold_line.forget_all()

    def close(self) -> None:
        """Drop all reads and the consumer: both refer to each other and would need a garbage collection."""
        self.forget_all()
        self._done = _do_nothing
        if self._cold_line is not None:
            self._cold_line.close()

    def _start_reading(self, start: Start) -> None:
        """Start a task of the peer for the pending reads, unless one is running or there are none."""
        self._stalled = None
        if self.working or not self._pending or len(self._results) >= self._ahead_max:
            return
        try:
            start(self._read_pending)
            self.working = True
        except Refused as refused:
            self._stalled = refused

    async def _read_pending(self) -> None:
        """Read in a thread, request by request, until none is pending or enough results wait for the consumer."""
        has_finished = False
        try:
            while self._pending and len(self._results) < self._ahead_max:
                place, request = next(iter(self._pending.items()))
                try:
                    request.result = await self._readers.read_far(
                        request.queue,
                        request.offset,
                        request.count_max,
                        request.budget_bytes,
                        request.codes,
                        request.predicate,
                        request.care,
                    )
                except (Refused, StoreError) as error:
                    request.failure = error
                except OSError as error:
                    request.failure = _read_error(request, error)
                if self._pending.get(place) is request:
                    del self._pending[place]
                    self._results[place] = request
                    self._done(place)
            has_finished = True
        finally:
            self.working = False
            if self._pending and not has_finished:
                self._done(next(iter(self._pending)))  # cancelled; a task of another peer may continue


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
