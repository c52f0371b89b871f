"""Commits: one write to the operating system for everything appended since the last one.

The committer also undoes appends whose write failed, and reports when records become readable.
"""

from collections.abc import Callable
from typing import TypeAlias, final

from martlet.errors import Refused, StoreFailed
from martlet.runtime.clock import Clock
from martlet.store.append.admission import Admission
from martlet.store.append.awaited import Awaited
from martlet.store.append.flusher import Flusher
from martlet.store.append.readable import ReadableEnd
from martlet.store.disk.page_cache import LogWriter
from martlet.store.queues.queues import Queue

__all__ = ["Appended", "Committer"]

# Queue, position and end of a record, its store time, and the properties whose keys to index.
Appended: TypeAlias = tuple[Queue, int, int, int, bytes]


@final
class Committer:
    """Writes the records that the writer appended to *tail* to the operating system.

    Args:
      index: receives the records of each commit, in order.
    """

    def __init__(
        self,
        tail: LogWriter,
        flusher: Flusher,
        admission: Admission,
        readable: ReadableEnd,
        index: Callable[[list[Appended]], None],
        clock: Clock,
    ) -> None:
        self._tail = tail
        self._flusher = flusher
        self._admission = admission
        self._readable = readable
        self._index = index
        self._clock = clock
        flusher.on_moved = self.durable_moved
        # Appended but not yet committed, in order.
        self.pending: list[Appended] = []
        # Pairs of a light queue that indexes a pending record, and the end of that record, in order.
        self.light: list[tuple[Queue, int]] = []
        self._awaited = Awaited(tail)
        # The store time of pending records; 0 if nothing was appended since the last commit.
        self.now_ms = 0
        # Called at the first append after a commit.
        self.on_commit_wanted: Callable[[], None] | None = None
        # Called once each by the next commit, to append its last records; may raise the same errors as `Writer.append`.
        self.before_commit: list[Callable[[], None]] = []
        # Why everything appended since the last commit is lost, although those appends returned.
        self._lost: Refused | StoreFailed | None = None
        # The number of times appends were undone: their positions are used again by other records.
        self.undone = 0
        # Each is called with the log position from which on appends were undone.
        self.on_undone: list[Callable[[int], None]] = []
        self.appended_messages = 0
        self.appended_bytes = 0
        self.commits = 0
        self.last_store_ms = 0

    def read_clock(self) -> int:
        """Return the store time for appends; it stays the same until the next commit."""
        if not self.now_ms:
            self.now_ms = self._clock.now_ms()
            if self.on_commit_wanted is not None:
                self.on_commit_wanted()
        return self.now_ms

    def renew_clock(self) -> None:
        """Give the next records a store time of their own.

        Other records have the store time of the first record since the last commit, which is some milliseconds old on a
        busy machine.
        """
        if self.now_ms:
            self.now_ms = self._clock.now_ms()

    def commit_soon(self) -> None:
        """Request a commit by the server at the end of this round of the event loop; appends do this themselves."""
        if self.on_commit_wanted is not None:
            self.on_commit_wanted()

    def note_unawaited(self, topic: str, count: int, end: int) -> None:
        """Note that nobody waits until the last *count* records, which were just appended, are durable.

        The first of them is in *topic*, and the last one ends at *end*. Nothing is noted if other records were appended
        with them or instead of them.
        """
        pending, awaited = self.pending, self._awaited
        if len(pending) - awaited.unawaited < count:
            return
        queue, *_ = pending[-count]
        _, _, last_end, _, _ = pending[-1]
        if last_end == end and queue.topic == topic:
            awaited.unawaited += count

    def commit(self) -> None:
        """Write everything appended since the last commit to the operating system, in one call.

        With async flush the records are readable afterwards. After an error, no record that ends beyond ``written`` was
        stored, and no part of such a record remains.

        Raises:
          Refused: the disk is full; everything since the last commit was undone, and the store retries automatically.
          StoreFailed: the disk failed.
        """
        if self.before_commit:
            self._call_before_commit()
        self.now_ms = 0
        if self._lost is not None:
            lost, self._lost = self._lost, None
            raise lost
        if not self.pending:
            return
        try:
            self._tail.write_out()
        except OSError as error:
            self._undo_pending()
            self._allow_written()
            raise self._admission.refuse(error) from error
        self._accept()

    def commit_early(self) -> None:
        """Commit before the server does at the end of the round, as `commit`.

        If this commit fails, the server's commit fails as well: appends of other callers were undone, and their answers
        must not be sent.
        """
        try:
            self.commit()
        except (Refused, StoreFailed) as error:
            self.fail_next(error)
            raise

    def _call_before_commit(self) -> None:
        """Call the functions of `before_commit`, which append; if one fails, nothing of this commit is stored."""
        appends, self.before_commit = self.before_commit, []
        # Appends made now belong to this commit and must not request another.
        on_commit_wanted, self.on_commit_wanted = self.on_commit_wanted, None
        failure: Refused | StoreFailed | None = None
        for append in appends:
            try:
                append()
            except (Refused, StoreFailed) as error:
                failure = failure or error
        self.on_commit_wanted = on_commit_wanted
        if failure is None:
            return
        self._undo_pending()
        try:
            self._tail.undo()
        except OSError as error:
            failure = self._admission.refuse(error)
        self._allow_written()
        self._lost = failure

    def roll(self) -> None:
        """Commit, end the segment and start the next.

        Raises:
          Refused: the disk is full.
          StoreFailed: the disk failed.
        """
        if self._flusher.failed is not None:
            raise self._flusher.failed
        ended = self._tail.segment
        if ended.path:
            self._flusher.rolled(ended.path)
        try:
            self._tail.roll()
        except OSError as error:
            are_lost = bool(self.pending) and self._tail.written < ended.end
            if are_lost:
                self._undo_pending()
            else:
                self._accept()
                self._allow_written()
            refusal = self._admission.refuse(error)
            if are_lost:
                self._lost = refusal
            raise refusal from error
        self._accept()
        self._flusher.began_after(ended)

    def fail_next(self, error: Refused | StoreFailed) -> None:
        """Raise *error* from the next commit too: appends that returned to their callers were undone."""
        self._lost = error

    def durable_moved(self) -> None:
        """Update the readable end after the flusher's ``durable`` moved, or the disk failed."""
        flusher, tail = self._flusher, self._tail
        assert flusher.durable <= tail.written <= tail.position, "durable, written and appended are out of order"
        if flusher.failed is not None:
            self._admission.refusal = str(flusher.failed)
        if flusher.is_sync:
            self._awaited.forget_before(flusher.durable)
            self._readable.allow(flusher.durable, self._awaited.early_end)
        elif flusher.failed is not None:
            self._readable.announce()

    def _allow_written(self) -> None:
        """With async flush, make everything written readable when no commit follows that does so.

        The end of a segment is written without a record, and answers may wait for it.
        """
        if not self._flusher.is_sync:
            self._readable.allow(self._tail.written)

    def _accept(self) -> None:
        """Process the pending records, which were written: count them, index their keys, wake waiting readers."""
        pending = self.pending
        if not pending:
            return
        tail, awaited, is_sync = self._tail, self._awaited, self._flusher.is_sync
        _, start, _, _, _ = pending[0]
        _, _, end, self.last_store_ms, _ = pending[-1]
        assert end <= tail.written <= tail.position, "an accepted record is not written"
        self.commits += 1
        self.appended_messages += len(pending)
        # Contiguous in one segment.
        self.appended_bytes += end - start
        is_unawaited = is_sync and awaited.unawaited == len(pending) and not self.light
        awaited.unawaited = 0
        # With sync flush, a watcher may be added before the records become readable.
        queues = {queue: None for queue, _, _, _, _ in pending}
        for queue in queues:
            if is_sync or queue.watchers:
                self._readable.touch(queue)
        self.pending = []
        for queue, _ in self.light:
            self._readable.touch(queue)
        self.light.clear()
        self._index(pending)
        if is_unawaited:
            self._accept_unawaited(queues, start)
            return
        self._flusher.ask()
        if is_sync:
            awaited.add(start)
        else:
            self._readable.allow(tail.written)

    def _accept_unawaited(self, queues: dict[Queue, None], start: int) -> None:
        """Let early readers read the records from *start* on, of *queues*, unless earlier ones are awaited."""
        flusher = self._flusher
        if flusher.wanted > start or self._readable.confirmed or any(queue.watchers for queue in queues):
            flusher.ask()
        else:
            flusher.ask_later()
        self._readable.allow_early(self._awaited.early_end, queues)

    def _undo_pending(self) -> None:
        """Undo all pending appends; none was stored."""
        self.take_back(0)
        for callback in self.on_undone:
            callback(self._tail.written)

    def take_back(self, count: int) -> None:
        """Release the queue offsets of the pending records, except the first *count*."""
        self.undone += 1
        self._awaited.unawaited = min(self._awaited.unawaited, count)
        kept_end = 0
        if count:
            _, _, kept_end, _, _ = self.pending[count - 1]
        for queue, _, end, _, _ in reversed(self.pending[count:]):
            if queue.last_end == end:
                queue.drop_last()
        del self.pending[count:]
        while self.light and self.light[-1][1] > kept_end:
            self.light.pop()[0].drop_last()
