"""Bulk reads in progress: requests of readers of whole topics, each answered by many frames.

A read is a few numbers. It is ready, waits for a worker thread to read records from the disk, or waits at the end of
its queue for a record. `handlers/bulk.py` sends frames of ready reads while the socket has room.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Final, final

from martlet.access import Gate, Login
from martlet.contracts import Peer
from martlet.delivery.listeners import unwatch, watch
from martlet.delivery.routing.selection import Selection
from martlet.errors import Reason, Refused
from martlet.store import Care, Queue, QueueReader, Store
from martlet_remoting.consumers.timeouts import Timeouts

__all__ = ["BulkRead", "BulkReads", "PendingBulkReads"]

CHARS_OF_A_READ: Final = 2048  # of an expression; a read with a longer expression counts as several


@final
class BulkRead:
    """A read of *queue* from *offset* up to *end*, of records of about *credit_bytes* in total."""

    __slots__ = (
        "bucket",
        "care",
        "credit_bytes",
        "end",
        "gate",
        "lost",
        "offset",
        "opaque",
        "pending",
        "queue",
        "refused",
        "selection",
        "wait_s",
        "weight",
    )

    def __init__(
        self,
        pending: "PendingBulkReads",
        opaque: int,
        gate: Gate,
        queue: Queue,
        offset: int,
        end: int,
        credit_bytes: int,
        wait_s: float,
        selection: Selection,
        expression_chars: int,
        care: Care,
    ) -> None:
        self.bucket = -1
        self.pending = pending
        self.opaque = opaque
        self.gate = gate  # checked again before each frame
        self.queue = queue
        self.offset = offset
        self.end = end
        self.credit_bytes = credit_bytes
        self.wait_s = wait_s  # remaining time to wait for the first record; 0 once the read has waited
        self.selection = selection
        self.care = care
        self.lost: list[tuple[int, int]] = []  # ranges of offsets found unreadable since the last frame
        self.weight = 1 + expression_chars // CHARS_OF_A_READ
        self.refused: Refused | None = None  # its login or its permission has ended

    def expire(self) -> None:
        self.pending.reads.end_wait(self)

    def refuse(self, refused: Refused) -> None:
        """Answer with *refused* in place of the next frame."""
        self.refused = refused
        self.pending.reads.end_wait(self)

    def recheck(self) -> None:
        """Continue now if the read waits for a record and is no longer permitted: the next collect refuses it."""
        try:
            self.gate.read(self.queue.topic)
        except Refused as refused:
            self.refuse(refused)


@final
class PendingBulkReads:
    """The bulk reads of one connection."""

    def __init__(self, peer: Peer, reads: "BulkReads") -> None:
        self.peer = peer
        self.reads = reads
        self.reader = QueueReader(reads.store.readers, self._was_read, ahead_max=1)
        self.ready: deque[BulkRead] = deque()
        self.unfinished: dict[BulkRead, None] = {}
        self.weight = 0  # of the unfinished reads

    def queue_up(self, read: BulkRead) -> None:
        """Queue *read*, last, to continue at the next collect."""
        self.ready.append(read)
        self.peer.wake_last()

    def _was_read(self, place: Hashable) -> None:
        assert isinstance(place, BulkRead)
        self.queue_up(place)


@final
class BulkReads:
    """The bulk reads of all connections, and the reads among them that wait for a record.

    Args:
      now: returns the time of `Timeouts`.
      weight_max: limit of the total weight of unfinished reads; *peer_max* is the limit of one connection.
    """

    def __init__(
        self, store: Store, timeouts: Timeouts, now: Callable[[], float], weight_max: int, peer_max: int
    ) -> None:
        self.store: Final = store
        self.count = 0
        self.weight = 0
        self._timeouts = timeouts
        self._now = now
        self._weight_max = weight_max
        self._peer_max = peer_max
        self._pending: dict[PendingBulkReads, None] = {}  # connections with unfinished reads
        self._fullest = 0  # upper bound of a connection's weight; may be too high
        self._waiting: dict[Queue, dict[BulkRead, None]] = {}
        self._stopping = False

    def begin(self, read: BulkRead, refuse: Callable[[BulkRead], None]) -> None:
        """Begin *read*, to continue at the next collect of its connection.

        If too many reads are unfinished, the connection with the most loses the newest half of its reads, unless this
        connection would then have as many: connections that never read cannot keep others from reading. *refuse* is
        called with each of these reads.

        Raises:
          Refused: too many reads are unfinished (BUSY).
        """
        pending = read.pending
        if pending.weight + read.weight > self._peer_max:
            text = f"{len(pending.unfinished)} bulk reads of this connection are unfinished"
            raise Refused(Reason.BUSY, f"{text}; remoting.bulk_reads_peer_max is {self._peer_max}")
        while self.weight + read.weight > self._weight_max:
            for removed_read in self._make_room(pending.weight + read.weight):
                refuse(removed_read)
        pending.unfinished[read] = None
        self._count_for(pending, read.weight)
        self.count += 1
        pending.queue_up(read)

    def refusal(self) -> Refused:
        """Return the reason for refusing reads that were removed to make room for others."""
        text = f"{self.count} bulk reads are unfinished; remoting.bulk_reads_max is {self._weight_max}"
        return Refused(Reason.BUSY, text)

    def _make_room(self, weight: int) -> list[BulkRead]:
        """Remove reads of the connection with the most, if it has more than *weight*.

        Raises:
          Refused: no connection has more than *weight*.
        """
        fullest = max(self._pending, key=_weight, default=None) if self._fullest > weight else None
        if fullest is not None:
            self._fullest = fullest.weight
        if fullest is None or fullest.weight <= weight:
            raise self.refusal()
        removed_reads: list[BulkRead] = []
        while fullest.weight * 2 > self._fullest:
            newest = next(reversed(fullest.unfinished))
            self._forget(newest)
            removed_reads.append(newest)
        return removed_reads

    def _count_for(self, pending: PendingBulkReads, change: int) -> None:
        self.weight += change
        pending.weight += change
        if pending.weight:
            self._pending[pending] = None
            self._fullest = max(self._fullest, pending.weight)
        else:
            self._pending.pop(pending, None)

    def done(self, read: BulkRead) -> None:
        """Note that *read* got its last frame."""
        if read.pending.unfinished.pop(read, read) is None:
            self.count -= 1
            self._count_for(read.pending, -read.weight)

    def _forget(self, read: BulkRead) -> None:
        """End *read* in any state."""
        waiting_reads = self._waiting.get(read.queue)
        if waiting_reads is not None and waiting_reads.pop(read, read) is None:
            self._timeouts.give_up(read)
        elif read in read.pending.ready:
            read.pending.ready.remove(read)
        read.pending.reader.forget(read)
        self.done(read)

    def end_offset(self, queue: Queue) -> int:
        """Return the offset after the last readable message of *queue*."""
        return self.store.readers.end_offset(queue)

    def may_wait(self, read: BulkRead) -> bool:
        """Return whether *read*, which is at the end of its queue, may wait for a record."""
        return read.wait_s > 0 and not self._stopping

    def wait(self, read: BulkRead) -> None:
        """Let *read* continue when its queue gets a record, or its time is over."""
        waiting_reads = self._waiting.get(read.queue)
        if waiting_reads is None:
            waiting_reads = self._waiting[read.queue] = {}
            watch(read.queue, self._end_waits_of)
            self.store.flusher.want_durable(read.queue.last_end)
        waiting_reads[read] = None
        self._timeouts.add(read, self._now() + read.wait_s)
        read.wait_s = 0.0

    def waiting_reads(self) -> Iterator[BulkRead]:
        """Yield the reads that wait for a record; more may come and go meanwhile."""
        for waiting_reads in list(self._waiting.values()):
            yield from list(waiting_reads)

    def logins(self) -> Iterator[Login]:
        """Yield the identities of the unfinished reads, and what ends each; more may come and go meanwhile."""
        for pending in list(self._pending):
            for read in list(pending.unfinished):
                yield read.gate.identity, read.refuse

    def end_wait(self, read: BulkRead) -> None:
        """Let *read* continue, if it waits."""
        waiting_reads = self._waiting.get(read.queue)
        if waiting_reads is None or waiting_reads.pop(read, read) is not None:
            return
        self._timeouts.give_up(read)
        read.pending.queue_up(read)

    def _end_waits_of(self, queue: Queue) -> None:
        """Let the reads of *queue* continue. Keep the watch: the store is iterating over its watchers."""
        for read in list(self._waiting[queue]):
            self.end_wait(read)

    def sweep(self) -> None:
        """Stop watching queues for which no read waits."""
        for queue in [queue for queue, waiting_reads in self._waiting.items() if not waiting_reads]:
            del self._waiting[queue]
            unwatch(queue, self._end_waits_of)

    def end_waits(self) -> None:
        """Let all waiting reads continue: at shutdown, and after a topic was deleted."""
        for waiting_reads in self._waiting.values():
            for read in list(waiting_reads):
                self.end_wait(read)

    def stop(self) -> None:
        """Let all waiting reads continue, and let no read wait from now on."""
        self._stopping = True
        self.end_waits()

    def drop(self, pending: PendingBulkReads) -> None:
        """Drop the reads of a closed connection."""
        for read in list(pending.unfinished):
            self._forget(read)
        pending.ready.clear()
        pending.reader.close()


def _weight(pending: PendingBulkReads) -> int:
    return pending.weight
