"""Takes the state of a running broker for a restore, and stores it beside the table.

The order makes it consistent: where the log has to begin, then the tables, then the position, then the queues, then
the end. So the first two are not newer than the position, and the queues are not older; they have no message after the
end, and no state counts before the table has reached it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final, final

import trio

from martlet.broker import Broker
from martlet.runtime.io_threads import IoThreads
from martlet_tiered.files import DataFile
from martlet_tiered.format.footer import FileFooter
from martlet_tiered.objects import Objects
from martlet_tiered.owners import Reach
from martlet_tiered.reading.index import TierIndex
from martlet_tiered.restore.broker_state import TABLE_PATH, BrokerState, QueuePlace, store_state

__all__ = ["StateKeeper", "UploadFollower"]

# Queues to look at in one turn of the event loop.
QUEUES_AT_ONCE: Final = 1000
# States that do not count yet, at most.
WAITING: Final = 8


@final
class StateKeeper:
    """Stores the state of *broker* in *objects*, with *threads*."""

    def __init__(self, broker: Broker, objects: Objects, threads: IoThreads) -> None:
        self._broker = broker
        self._objects = objects
        self._threads = threads
        self._end = -1  # of the last state

    async def store(self, epoch: int, reach: Reach) -> None:
        """Store the current state before the next range is uploaded in *epoch*; *reach* is that of the table.

        While uploads are behind, so that the last state does not count yet, a newer one is stored after an eighth of
        what waits: so not many wait, and the one that counts is hardly older than the messages uploaded.

        Raises:
          TierError: the store cannot be used.
          Refused: it did not answer in time.
        """
        limit = self._limit
        if self._end > reach.end and limit - self._end < (limit - reach.end) // WAITING:
            return
        state = await self._capture()
        await self._threads.run(partial(store_state, self._objects, epoch, state, reach))
        self._end = state.end

    @property
    def _limit(self) -> int:
        return min(self._broker.store.durable, self._broker.store.readable)

    async def _capture(self) -> BrokerState:
        broker, store = self._broker, self._broker.store
        # Before the first await: retention may remove records that were appended again after the position.
        start = min(broker.projections.floor(), self._limit)
        segment = store.segments.find(start)
        start = segment.start if segment is not None else start
        paths = broker.tables.open_paths()
        files = await store.disk.off_loop(lambda: dict(zip(paths, map(self._read, paths), strict=True)))
        position = self._limit
        queues = await self._queues()
        return BrokerState(
            *(broker.config.name, position, store.appended, start, store.segments.segment_bytes),
            *(broker.clock.now_ms(), queues),
            {path: data for path, data in files.items() if data and TABLE_PATH.fullmatch(path)},
        )

    def _read(self, path: str) -> bytes:
        return next(iter(self._broker.store.data_directory.read_generations(path)), b"")

    async def _queues(self) -> Sequence[QueuePlace]:
        found: list[QueuePlace] = []
        for number, queue in enumerate(list(self._broker.store.queues.all())):
            if number % QUEUES_AT_ONCE == QUEUES_AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            if queue.next_offset and not queue.deleted:
                found.append(QueuePlace(queue.topic, queue.queue_id, queue.next_offset, queue.expired_to))
        return found


@final
class UploadFollower:
    """Stores the state of the broker before each range, with *keeper*, and tells *index* what is in the table."""

    def __init__(self, index: TierIndex, keeper: StateKeeper) -> None:
        self._index = index
        self._keeper = keeper

    async def sync(self, files: Sequence[DataFile]) -> None:
        """As `TierIndex.sync`."""
        await self._index.sync(files)

    async def beginning(self, epoch: int, reach: Reach) -> None:
        """As `StateKeeper.store`."""
        await self._keeper.store(epoch, reach)

    async def committed(self, files: Sequence[DataFile], footers: Sequence[FileFooter]) -> None:
        """As `TierIndex.committed`."""
        await self._index.committed(files, footers)
