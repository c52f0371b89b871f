"""Collects the queues with damaged blocks, and rebuilds them with one repair at a time (`repair.py`)."""

from typing import final

import trio

from martlet.runtime.wakeup import Wakeup
from martlet.store.append.admission import Admission
from martlet.store.append.flusher import Flusher
from martlet.store.disk.files import Disk, is_full
from martlet.store.disk.segments import Segments
from martlet.store.queues.queues import Queue, Queues
from martlet.store.recovery.repair import MemoryRepair, Repair

__all__ = ["Repairs"]


@final
class Repairs:
    """Rebuilds damaged blocks of queues from the log.

    Hold `lock` while writing files of queues. `paths` are changed files that must be synced; *wakeup* is set when there
    is something to repair or to sync.
    """

    __slots__ = ("_admission", "_disk", "_flusher", "_queues", "_segments", "_wakeup", "_wanted", "lock", "paths")

    def __init__(
        self, disk: Disk, segments: Segments, queues: Queues, flusher: Flusher, admission: Admission, wakeup: Wakeup
    ) -> None:
        self._disk = disk
        self._segments = segments
        self._queues = queues
        self._flusher = flusher
        self._admission = admission
        self._wakeup = wakeup
        self._wanted: dict[Queue, None] = {}
        self.lock = trio.Lock()
        self.paths: set[str] = set()

    def want(self, queue: Queue) -> None:
        """Request the rebuild of the damaged blocks of *queue*."""
        self._wanted[queue] = None
        self._wakeup.set()

    def want_all(self) -> None:
        """Request a check of every block of every queue, and the rebuild of damaged ones."""
        self._wanted.update(dict.fromkeys(self._queues.all()))

    async def repair(self, queue: Queue) -> None:
        """Rebuild the damaged blocks of *queue* and of other waiting queues, in a worker thread.

        Raises:
          Refused: the disk is full.
          StoreFailed: the disk failed.
        """
        self._wanted[queue] = None
        try:
            await self._repair(queue)
        except OSError as error:
            raise self._admission.refuse(error) from error

    def repair_now(self, queue: Queue) -> None:
        """Like `repair`, but blocking."""
        self._wanted[queue] = None
        work = self._new_repair()
        try:
            self._run_now(work)
        except OSError as error:
            raise self._admission.refuse(error) from error

    def _run_now(self, work: Repair) -> None:
        try:
            work.run()
        except OSError as error:
            instead = self._new_memory_repair(work.wanted, error)
            if not instead.run():
                raise
            instead.finish()
        else:
            self._finish(work)

    def want_rebuilt(self) -> None:
        """Once there is space again, write blocks that were only rebuilt in memory to their files."""
        queues = self._queues
        if queues.rebuilt and not self._admission.refusal:
            wanted = dict.fromkeys(queue for queue, _ in queues.rebuilt)
            queues.forget_blocks(*wanted)
            self._wanted.update(wanted)

    async def repair_wanted(self) -> None:
        """Do all requested repairs. Raises `OSError`."""
        while self._wanted:
            await self._repair(next(iter(self._wanted)))

    async def _repair(self, queue: Queue) -> None:
        async with self.lock:
            if queue not in self._wanted:
                return  # another task did it meanwhile
            work = self._new_repair()
            with trio.CancelScope(shield=True):
                try:
                    await self._disk.off_loop(work.run)
                except OSError as error:
                    instead = self._new_memory_repair(work.wanted, error)
                    if not await self._disk.off_loop(instead.run):
                        raise
                    instead.finish()
                else:
                    self._finish(work)

    def _new_repair(self) -> Repair:
        wanted, self._wanted = self._wanted, {}
        # Do not recreate the files of a deleted topic.
        live = [queue for queue in wanted if self._queues.find(queue.topic, queue.queue_id) is queue]
        return Repair(self._segments, self._queues, live, self._flusher.durable)

    def _new_memory_repair(self, wanted: list[Queue], error: OSError) -> MemoryRepair:
        """Return a repair whose result goes to the files later; raise *error* again unless the disk is full."""
        if not is_full(error):
            raise error
        self._admission.refuse_full(error)
        self._wakeup.set()
        return MemoryRepair(self._segments, self._queues, wanted, self._flusher.durable)

    def _finish(self, work: Repair) -> None:
        work.finish()
        self.paths |= work.paths
        self._wakeup.set()
